"""Check the names and parameter types of a package against the limits in CONTRIBUTING.md.

Usage: python tools/check_names.py [FOLDER ...]    (default: src)

Counts names of variables, parameters, attributes and functions that say nothing about what they hold, vague names,
modules named by a gerund, and parameters typed plain `Any` or `object`. Exits with 1 and lists the places if a limit is
exceeded.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

BANNED = {
    *("asked", "cut", "each", "found", "fresh", "given", "gone", "got", "held", "here", "how", "kept", "known"),
    *("made", "many", "most", "near", "odd", "one", "ours", "own", "room", "said", "theirs", "there", "told"),
    *("wanted", "what", "where", "whole", "why"),
}
ALLOWED_FUNCTIONS = {"where"}
"""Banned names that say enough as the name of a function: `book.where(...)` reads as SQL."""
VAGUE = {"data", "item", "obj", "res", "result", "tmp", "value"}
ALLOWED_GERUNDS = {
    *("decoding", "loading", "logging", "packing", "padding"),
    *("rendering", "sampling", "sharding", "tracking", "training"),
}
MAX_BANNED_SHARE = 0.0005
MAX_VAGUE_SHARE = 0.02
MAX_GERUND_MODULES = 10
MAX_UNTYPED_PARAMETERS = 250
MAX_PLACES = 20


class Binding(NamedTuple):
    """A variable, parameter, attribute or function at the line that defines it."""

    name: str
    place: str


class Limit(NamedTuple):
    """A measured number, its limit, and the places that count."""

    title: str
    measured: float
    maximum: float
    places: Sequence[str]


def find_bindings(path: Path, tree: ast.Module) -> Iterator[Binding]:
    """Yield every variable, parameter, attribute and function that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Binding(node.id.strip("_"), f"{path}:{node.lineno} {node.id}")
        elif isinstance(node, ast.arg):
            yield Binding(node.arg.strip("_"), f"{path}:{node.lineno} {node.arg}")
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield Binding(node.attr.strip("_"), f"{path}:{node.lineno} .{node.attr}")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name not in ALLOWED_FUNCTIONS:
            yield Binding(node.name.strip("_"), f"{path}:{node.lineno} {node.name}()")


def find_untyped_parameters(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield the places of parameters annotated plain `Any` or `object`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            annotation = ast.unparse(node.annotation)
            if annotation in ("Any", "object"):
                yield f"{path}:{node.lineno} {node.arg}: {annotation}"


def measure(folders: Sequence[Path]) -> list[Limit]:
    """Measure all modules in the folders."""
    trees = {path: ast.parse(path.read_text("utf-8")) for folder in folders for path in sorted(folder.rglob("*.py"))}
    bindings = [binding for path, tree in trees.items() for binding in find_bindings(path, tree)]
    banned = [binding.place for binding in bindings if binding.name in BANNED]
    vague = [binding.place for binding in bindings if binding.name in VAGUE]
    gerunds = [str(path) for path in trees if path.stem.endswith("ing") and path.stem not in ALLOWED_GERUNDS]
    untyped = [place for path, tree in trees.items() for place in find_untyped_parameters(path, tree)]
    total = max(len(bindings), 1)
    return [
        Limit("banned names, share", len(banned) / total, MAX_BANNED_SHARE, banned),
        Limit("vague names, share", len(vague) / total, MAX_VAGUE_SHARE, vague),
        Limit("modules named by a gerund", len(gerunds), MAX_GERUND_MODULES, gerunds),
        Limit("parameters typed Any or object", len(untyped), MAX_UNTYPED_PARAMETERS, untyped),
    ]


def main(arguments: Sequence[str]) -> int:
    """Print the measurements, list the places above a limit, and return the exit status."""
    status = 0
    for limit in measure([Path(argument) for argument in arguments or ["src"]]):
        print(f"{limit.title}: {limit.measured:.4g}, at most {limit.maximum:.4g}")
        if limit.measured > limit.maximum:
            status = 1
            files = Counter(place.partition(":")[0] for place in limit.places)
            print("\n".join(f"  {path}: {count}" for path, count in files.most_common(MAX_PLACES)))
            print("\n".join(f"  {place}" for place in limit.places[:MAX_PLACES]))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
