"""Load a user's `.py` file as a module: reward functions, prompts, builders and environments named by a path.

Invariant: a file runs once per process, whoever names it, so that its parts share one module.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_of_file(path: str | Path) -> ModuleType:
    """Import a file and return its module; later calls return the same module.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: `path` is not a `.py` file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     script = Path(folder, "mine.py")
    ...     _ = script.write_text("answer = 6 * 7")
    ...     module_of_file(script).answer, module_of_file(script) is module_of_file(str(script))
    (42, True)
    """
    file_path = Path(path).resolve()
    name = "_rollbook_file_" + hashlib.blake2b(str(file_path).encode(), digest_size=8).hexdigest()
    if name in sys.modules:
        return sys.modules[name]
    if not file_path.is_file():
        raise FileNotFoundError(f"no such file: {file_path}")
    spec = importlib.util.spec_from_file_location(name, file_path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file_path} is not a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
