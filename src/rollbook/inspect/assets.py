"""The page's files: the scripts, styles and the one HTML page, as they lie in the package.

Invariant: the manifest is read once; a name that is not in it does not exist, whatever it looks like, so no request
ever becomes a path. Types come from a fixed table; a file of another type in the package is an error, not a guess.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "png": "image/png",
    "woff2": "font/woff2",
}


@dataclass(frozen=True)
class Asset:
    """One file of the page. `sha256` in hexadecimal digits."""

    content: bytes
    type: str
    sha256: str


@cache
def manifest() -> dict[str, Asset]:
    """Every file under static/ by its name relative to it, with slashes.

    >>> manifest()["index.html"].type
    'text/html; charset=utf-8'
    >>> "../assets.py" in manifest()
    False
    """
    return dict(sorted(_walk(resources.files("rollbook.inspect") / "static", "")))


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    found = []
    for each in folder.iterdir():
        name = prefix + each.name
        if each.is_dir():
            if each.name != "__pycache__":
                found += _walk(each, name + "/")
            continue
        if each.name.startswith("."):
            continue
        kind = TYPES.get(each.name.rpartition(".")[2])
        if kind is None:
            raise ValueError(f"{name}: a file of the viewer's pages ends in {', '.join(TYPES)}")
        content = each.read_bytes()
        found.append((name, Asset(content, kind, hashlib.sha256(content).hexdigest())))
    return found
