"""Files as plain values, with the line that each was written in: YAML by the rules of version 1.2, and TOML.

Invariant: nothing in a file is ever executed or built: a document becomes texts, numbers, true, false, null, lists and
mappings, by rules that stand here, or is refused with its file and line. `1e-5` is a number and `no` is text.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook.train.config.kinds import ConfigError

Place = tuple[str, ...]
MOST = 100_000
"""Values in one document; aliases of aliases could be billions."""
DEEPEST = 100
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NAMED = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass
class Document:
    """A file's values, and where each key of its mappings was written."""

    values: dict[str, Any]
    origins: dict[Place, str] = field(default_factory=dict)


def scalar(text: str) -> Any:
    """What a plain word is, by YAML 1.2's core schema.

    >>> [scalar(word) for word in ("1e-5", "no", "12:30", "2026-11-16", "true", "~", "0x1F", "010")]
    [1e-05, 'no', '12:30', '2026-11-16', True, None, 31, 10]
    """
    if text in _NAMED:
        return _NAMED[text]
    if _INTEGER.fullmatch(text):
        if len(text) > 4000:
            raise ValueError(f"got a number of {len(text)} digits, expected fewer")
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    return float(text) if _FLOAT.fullmatch(text) else text


def yaml_module() -> Any:
    """PyYAML, or an error that says how to get it."""
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise ImportError("YAML needs PyYAML: pip install 'rollbook[train]' (TOML files need nothing)") from error


@functools.cache
def _loader() -> Any:
    """Text to nodes, and no further: there is no constructor to be tricked."""
    yaml = yaml_module()

    parts: list[Any] = [yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser, yaml.composer.Composer]

    def begin(self: Any, text: str) -> None:
        parts[0].__init__(self, text)
        for part in parts[1:]:
            part.__init__(self)

    def resolve(self: Any, kind: Any, value: Any, implicit: Any) -> str:
        return "plain" if kind is yaml.ScalarNode and implicit[0] else "untagged"

    nothing = {name: lambda self, *place: None for name in ("descend_resolver", "ascend_resolver")}
    return type("Loader", tuple(parts), {"__init__": begin, "resolve": resolve, **nothing})


def yaml_values(text: str, name: str) -> tuple[Any, dict[Place, str]]:
    """The one document of a text, and the line of each key; `name` is what errors call it.

    >>> yaml_values("optimizer: {lr: 1e-5}\\nname: no", "my.yaml")
    ({'optimizer': {'lr': 1e-05}, 'name': 'no'}, {('optimizer',): 'my.yaml, line 1', ('optimizer', 'lr'): 'my.yaml, line 1', ('name',): 'my.yaml, line 2'})
    >>> yaml_values("a: 1\\na: 2", "my.yaml")
    Traceback (most recent call last):
        ...
    rollbook.train.config.kinds.ConfigError: a: is there twice, expected once (my.yaml, line 2)
    """  # noqa: E501
    yaml = yaml_module()
    origins: dict[Place, str] = {}
    try:
        node = _loader()(text).get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        said = getattr(error, "problem", None) or getattr(error, "context", None) or str(error)
        raise ConfigError(f"{name}{f', line {mark.line + 1}' if mark else ''}", f"is no YAML: {said}") from None
    except RecursionError:
        raise ConfigError(name, f"got more than {DEEPEST} mappings and lists in each other, expected fewer") from None
    left = iter(range(MOST))
    return (None if node is None else _value(node, (), name, origins, [], left)), origins


def _value(node: Any, place: Place, name: str, origins: dict[Place, str], above: list[Any], left: Iterator[int]) -> Any:
    source = f"{name}, line {node.start_mark.line + 1}"
    where = ".".join(place) or name
    if next(left, None) is None or len(above) > DEEPEST:
        raise ConfigError(where, f"got more than {MOST} values or {DEEPEST} levels, expected fewer", source)
    if node in above:
        raise ConfigError(where, "got a value that contains itself, expected one that ends", source)
    if node.tag not in ("plain", "untagged", "tag:yaml.org,2002:str"):
        raise ConfigError(where, f"got the tag {node.tag!r}, expected plain values", source)
    if node.id == "scalar":
        try:
            return scalar(node.value) if node.tag == "plain" else node.value
        except ValueError as error:
            raise ConfigError(where, str(error), source) from None
    inside = [*above, node]
    if node.id == "sequence":
        return [_value(each, (*place, str(i)), name, origins, inside, left) for i, each in enumerate(node.value)]
    made: dict[Any, Any] = {}
    for key, value in node.value:
        line = f"{name}, line {key.start_mark.line + 1}"
        if key.id != "scalar":
            raise ConfigError(where, "got a list or a mapping as a key, expected text", line)
        word = _value(key, place, name, origins, inside, left)
        if not isinstance(word, str):
            raise ConfigError(where, f"got {key.value!r} as a key, expected text (in quotes: '{key.value}')", line)
        if word in made:
            raise ConfigError(".".join((*place, word)), "is there twice, expected once", line)
        origins[*place, word] = line
        made[word] = _value(value, (*place, word), name, origins, inside, left)
    return made


def read_file(path: Path, name: str | None = None) -> Document:
    """A YAML or TOML file, by its ending."""
    called = name or str(path)
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise ConfigError(called, "got a file of no known kind, expected .yaml, .yml or .toml")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(called, f"is no UTF-8 text: {error.reason} at byte {error.start}") from None
    origins: dict[Place, str] = {}
    if path.suffix == ".toml":
        try:
            values: Any = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(called, f"is no TOML: {error}") from None
        origins = {(): called}
    else:
        values, origins = yaml_values(text, called)
    if not isinstance(values, dict | None):
        raise ConfigError(called, f"got a {type(values).__name__}, expected sections and keys")
    return Document(values or {}, origins)


def argument(text: str) -> Any:
    """A value from the command line: a plain word, or a list, mapping or quoted text as YAML writes them.

    >>> argument("3e-4"), argument("[a, 1]"), argument("cuda:1"), argument('"7"')
    (0.0003, ['a', 1], 'cuda:1', '7')
    """
    if text[:1] not in ("[", "{", '"', "'"):
        return scalar(text)
    try:
        return json.loads(text, object_pairs_hook=_once)  # most such values; needs no PyYAML
    except ConfigError:
        raise
    except (ValueError, RecursionError):
        return yaml_values(text, "the command line")[0]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(twice, "is there twice in a mapping, expected once")
    return made
