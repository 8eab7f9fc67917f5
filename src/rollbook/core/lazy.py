"""Names of a package that load when they are first used, so that importing the package is quick.

Invariant: a name is the same object each time, and is looked for in one module alone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(
    package: str, homes: Mapping[str, str], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`: `homes` gives the module of each name.

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
