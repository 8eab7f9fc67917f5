"""Names of a user's own parts: `module:function` and `path/to/file.py:function`, as configs have them.

Invariant: a name gives the one object that it names, or a `ValueError` that says which half of it is wrong; a file is
run once in a process, however often it is named; what goes wrong inside a user's module is raised as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from rollbook.core.checks import suggest
from rollbook.core.fingerprints import load_module_file


def resolve(target: str, *, name: str = "function", folder: str | Path | None = None) -> Any:
    """What `module:name` or `file.py:name` names; a dotted name is looked up step by step (`module:Class.method`).

    `name` says in errors which option it is of. A file's path is relative to `folder`, by default the current one.

    >>> resolve("math:gcd")(12, 18)
    6
    >>> resolve("math:gdc")
    Traceback (most recent call last):
        ...
    ValueError: function: got 'math:gdc', but math has no 'gdc'; did you mean 'gcd'?
    >>> resolve("maths:gcd", name="data.function")
    Traceback (most recent call last):
        ...
    ValueError: data.function: got 'maths:gcd', but there is no module 'maths'
    """
    where, _, inner = target.rpartition(":") if isinstance(target, str) else ("", "", "")
    if not where or not inner or not all(part.isidentifier() for part in inner.split(".")):
        raise ValueError(f"{name}: got {target!r}, expected 'module:function' or 'path/to/file.py:function'")
    found: Any
    if where.endswith(".py"):
        found = _file(target, name, Path(folder or ".") / where)
    else:
        found = _module(target, name, where, Path(folder or "."))
    for part in inner.split("."):
        if not hasattr(found, part):
            known = (
                {each: None for each in vars(found) if not each.startswith("_")} if hasattr(found, "__dict__") else {}
            )
            guess = suggest(part, known).partition("?")
            hint = guess[0] + guess[1] if guess[1] else ""
            raise ValueError(f"{name}: got {target!r}, but {where} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def _module(target: str, name: str, path: str, folder: Path) -> ModuleType:
    if not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{name}: got {target!r}, expected a module's dotted name or a .py file before the colon")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if path != missing and not path.startswith(f"{missing}."):
            raise  # the module is there, and misses another
        # A command does not look for modules in the folder where it is called, as a script of one's own would.
        file = Path(*path.split(".")).with_suffix(".py")
        here = f"; the file is there: {file}:{target.rpartition(':')[2]}" if (folder / file).is_file() else ""
        raise ValueError(f"{name}: got {target!r}, but there is no module {missing!r}{here}") from None


def _file(target: str, name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{name}: got {target!r}, but there is no file {path.resolve()}")
    return load_module_file(path)
