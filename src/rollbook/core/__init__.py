"""The record (`Experience`, `EID`), its columns (`Experiences`, `Ragged`), its bytes (`wire`), checks, errors.

`lazily` gives a package names that are imported from their modules on first use, so that importing it is fast.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__version__ = "0.1.0"


def lazily(
    package: str, homes: Mapping[str, str], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build the `__getattr__` and `__dir__` of a package.

    Args:
        package: Name of the package.
        homes: The module of each name.
        modules: Modules of the package that can be used without importing them.

    Returns:
        The two functions.

    >>> get, names = lazily("rollbook", {"EID": "rollbook.core.ids"}, ["core"])
    >>> get("EID").__name__, [name for name in names() if not name.startswith("__")]
    ('EID', ['EID', 'core'])
    """

    def get(name: str) -> Any:
        try:
            if name in homes:
                loaded = getattr(importlib.import_module(homes[name]), name)
                setattr(sys.modules[package], name, loaded)
                return loaded
            if name in modules:
                return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            from rollbook.core.errors import explain_missing

            raise explain_missing(f"{package}.{name}", error) from None
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        dunders = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*homes, *modules, *dunders})

    return get, names
