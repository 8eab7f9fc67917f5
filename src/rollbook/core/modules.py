"""Load a user's `.py` file as a module, and fingerprint the source of a user's functions and classes.

Invariant: a file runs once per process, whoever names it, so that its parts share one module.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


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


def source_fingerprint(target: Any) -> str | None:
    """Fingerprint the source of a user's function or class by the syntax of its module, without comments and layout.

    A function of the main program or of a notebook goes by its own source alone.

    Returns:
        16 hex digits, or `None` for code of this library and where there is no source.

    >>> source_fingerprint(module_of_file), len(source_fingerprint(textwrap.dedent))
    (None, 16)
    """
    name = getattr(target, "__module__", None) or ""
    module = sys.modules.get(name)
    if module is None or name.partition(".")[0] == "rollbook":
        return None
    try:
        # Read from the file: `inspect` keeps the source of the first time it looked.
        path = getattr(module, "__file__", None)
        has_file = path is not None and name != "__main__"
        text = Path(str(path)).read_text("utf-8") if has_file else inspect.getsource(target)
    except (OSError, TypeError, UnicodeDecodeError):
        return None
    return text_fingerprint(text)


def text_fingerprint(text: str) -> str:
    """Fingerprint Python source by its syntax; 16 hex digits.

    >>> text_fingerprint("x = 1  # one") == text_fingerprint("x=1") != text_fingerprint("x = 2")
    True
    """
    with contextlib.suppress(SyntaxError):  # else the text itself: a lambda amid an expression
        text = ast.dump(ast.parse(textwrap.dedent(text)))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def joined_fingerprint(parts: Mapping[str, str | None]) -> str | None:
    """Fingerprint several sources by name; `None` if none of them has a fingerprint."""
    present = {name: fingerprint for name, fingerprint in parts.items() if fingerprint is not None}
    return text_fingerprint(repr(sorted(present.items()))) if present else None
