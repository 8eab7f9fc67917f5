"""Read configurations from YAML, TOML, recipes and `section.key=value` arguments; write them as YAML with comments.

Invariant: nothing in a file is ever executed or built: a document becomes texts, numbers, true, false, null, lists and
mappings, by rules that stand here, or is refused with its file and line. `1e-5` is a number and `no` is text.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook.core.files import check_regular
from rollbook.train.config.schema import Config
from rollbook.train.config.values import (
    ConfigError,
    Kind,
    ListOf,
    Nullable,
    Section,
    MappingOf,
    Text,
    find_section,
    get_section,
)

KeyPath = tuple[str, ...]
MAX_VALUES = 100_000
"""Values in one document; aliases of aliases could be billions."""
MAX_DEPTH = 100
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_WORDS = {
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
    origins: dict[KeyPath, str] = field(default_factory=dict)


def parse_scalar(text: str) -> Any:
    """What a plain word is, by YAML 1.2's core schema.

    >>> [parse_scalar(word) for word in ("1e-5", "no", "12:30", "2026-11-16", "true", "~", "0x1F", "010")]
    [1e-05, 'no', '12:30', '2026-11-16', True, None, 31, 10]
    """
    if text in _SPECIAL_WORDS:
        return _SPECIAL_WORDS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > 4000:
            raise ValueError(f"got a number of {len(text)} digits, expected fewer")
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    return float(text) if _FLOAT.fullmatch(text) else text


def _import_yaml() -> Any:
    """PyYAML, or an error that says how to get it."""
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise ImportError("YAML needs PyYAML: pip install 'rollbook[train]' (TOML files need nothing)") from error


@functools.cache
def _loader() -> Any:
    """Text to nodes, and no further: there is no constructor to be tricked."""
    yaml = _import_yaml()

    parts: list[Any] = [yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser, yaml.composer.Composer]

    def begin(self: Any, text: str) -> None:
        parts[0].__init__(self, text)
        for part in parts[1:]:
            part.__init__(self)

    def resolve(self: Any, kind: Any, value: Any, implicit: Any) -> str:
        return "plain" if kind is yaml.ScalarNode and implicit[0] else "untagged"

    nothing = {name: lambda self, *place: None for name in ("descend_resolver", "ascend_resolver")}
    return type("Loader", tuple(parts), {"__init__": begin, "resolve": resolve, **nothing})


def parse_yaml(text: str, name: str) -> tuple[Any, dict[KeyPath, str]]:
    """The one document of a text, and the line of each key; `name` is what errors call it.

    >>> parse_yaml("optimizer: {lr: 1e-5}\\nname: no", "my.yaml")
    ({'optimizer': {'lr': 1e-05}, 'name': 'no'}, {('optimizer',): 'my.yaml, line 1', ('optimizer', 'lr'): 'my.yaml, line 1', ('name',): 'my.yaml, line 2'})
    >>> parse_yaml("a: 1\\na: 2", "my.yaml")
    Traceback (most recent call last):
        ...
    rollbook.train.config.values.ConfigError: a: is there twice, expected once (my.yaml, line 2)
    """  # noqa: E501
    yaml = _import_yaml()
    origins: dict[KeyPath, str] = {}
    try:
        node = _loader()(text).get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "context", None) or str(error)
        raise ConfigError(f"{name}{f', line {mark.line + 1}' if mark else ''}", f"is no YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(name, f"got more than {MAX_DEPTH} mappings and lists in each other, expected fewer") from None
    left = iter(range(MAX_VALUES))
    return (None if node is None else _convert_node(node, (), name, origins, [], left)), origins


def _convert_node(node: Any, place: KeyPath, name: str, origins: dict[KeyPath, str], above: list[Any], left: Iterator[int]) -> Any:
    source = f"{name}, line {node.start_mark.line + 1}"
    where = ".".join(place) or name
    if next(left, None) is None or len(above) > MAX_DEPTH:
        raise ConfigError(where, f"got more than {MAX_VALUES} values or {MAX_DEPTH} levels, expected fewer", source)
    if node in above:
        raise ConfigError(where, "got a value that contains itself, expected one that ends", source)
    if node.tag not in ("plain", "untagged", "tag:yaml.org,2002:str"):
        raise ConfigError(where, f"got the tag {node.tag!r}, expected plain values", source)
    if node.id == "scalar":
        try:
            return parse_scalar(node.value) if node.tag == "plain" else node.value
        except ValueError as error:
            raise ConfigError(where, str(error), source) from None
    inside = [*above, node]
    if node.id == "sequence":
        return [_convert_node(child, (*place, str(i)), name, origins, inside, left) for i, child in enumerate(node.value)]
    mapping: dict[Any, Any] = {}
    for key, value in node.value:
        line = f"{name}, line {key.start_mark.line + 1}"
        if key.id != "scalar":
            raise ConfigError(where, "got a list or a mapping as a key, expected text", line)
        word = _convert_node(key, place, name, origins, inside, left)
        if not isinstance(word, str):
            raise ConfigError(where, f"got {key.value!r} as a key, expected text (in quotes: '{key.value}')", line)
        if word in mapping:
            raise ConfigError(".".join((*place, word)), "is there twice, expected once", line)
        origins[*place, word] = line
        mapping[word] = _convert_node(value, (*place, word), name, origins, inside, left)
    return mapping


def read_file(path: Path, name: str | None = None) -> Document:
    """A YAML or TOML file, by its ending."""
    called = name or str(path)
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise ConfigError(called, "got a file of no known kind, expected .yaml, .yml or .toml")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(called, f"is no UTF-8 text: {error.reason} at byte {error.start}") from None
    origins: dict[KeyPath, str] = {}
    if path.suffix == ".toml":
        try:
            values: Any = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(called, f"is no TOML: {error}") from None
        origins = {(): called}
    else:
        values, origins = parse_yaml(text, called)
    if not isinstance(values, dict | None):
        raise ConfigError(called, f"got a {type(values).__name__}, expected sections and keys")
    return Document(values or {}, origins)


def parse_argument(text: str) -> Any:
    """A value from the command line: a plain word, or a list, mapping or quoted text as YAML writes them.

    >>> parse_argument("3e-4"), parse_argument("[a, 1]"), parse_argument("cuda:1"), parse_argument('"7"')
    (0.0003, ['a', 1], 'cuda:1', '7')
    """
    if text[:1] not in ("[", "{", '"', "'"):
        return parse_scalar(text)
    try:
        return json.loads(text, object_pairs_hook=_reject_duplicates)  # most such values; needs no PyYAML
    except ConfigError:
        raise
    except (ValueError, RecursionError):
        return parse_yaml(text, "the command line")[0]


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(twice, "is there twice in a mapping, expected once")
    return mapping


DEFAULT_RECIPE = "letters"
"""The recipe that is run where none is named."""
COMMAND_LINE = "the command line"
RECIPE_FOLDER = Path(__file__).parent.parent / "recipes"
_SUFFIXES = (".yaml", ".yml", ".toml")
_LAYOUT_KEYS = ("columns", "keep")
"""Keys of `data` that say what a file looks like: another file from the command line has the same layout."""


def list_recipes() -> dict[str, Path]:
    """The embedded recipes by name."""
    files = sorted(RECIPE_FOLDER.iterdir()) if RECIPE_FOLDER.is_dir() else []
    return {path.stem: path for path in files if path.suffix in _SUFFIXES}


def load_config(config: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The whole configuration of a file, or of a recipe by its name, with `section.key=value` changes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "my.toml")
    ...     _ = file.write_text('[optimizer]\\nlr = 1e-4')
    ...     found = load_config(file, ["optimizer.warmup_steps=5", "algorithm=rloo"])
    >>> found.optimizer.lr, found.optimizer.warmup_steps, found.algorithm.estimator
    (0.0001, 5, 'rloo')
    """
    layers = _read_with_bases(_find_file(DEFAULT_RECIPE if config is None else config, None), [])
    layers = merge_layers(layers, parse_arguments(overrides), arguments=True)
    try:
        return Config.of(layers.values)
    except ConfigError as error:
        raise error.at(_find_origin(error.path, layers.origins)) from None


def _find_file(name: str | Path, beside: Path | None) -> Path:
    """The file that a name stands for: a path (relative to the folder `beside`), else a recipe's name."""
    path = Path(name).expanduser() if beside is None else beside / Path(name).expanduser()
    check_regular(path)
    if path.suffix in _SUFFIXES or path.is_file():
        if not path.is_file():
            raise ConfigError(str(path), "there is no such file")
        return path
    names = list_recipes()
    if str(name) not in names:
        from rollbook.core.checks import suggest

        raise ConfigError(str(name), f"is neither a file nor a recipe{suggest(str(name), list(names))}")
    return names[str(name)]


def _read_with_bases(path: Path, below: list[Path]) -> Document:
    """A file over its base, and that over its own."""
    if path.resolve() in below:
        raise ConfigError("base", f"goes round in a circle: {' <- '.join(file.name for file in [*below, path])}")
    document = read_file(path, f"recipe {path.stem}" if path.parent == RECIPE_FOLDER else None)
    if path.parent != RECIPE_FOLDER:
        document.values = _resolve_paths(document.values, get_section(Config), path.parent)
    base = document.values.pop("base", None)
    if base is None:
        return merge_layers(Document({}), document)
    source = _find_origin("base", document.origins)
    if not isinstance(base, str):
        raise ConfigError("base", f"got {base!r}, expected a file, relative to this one, or a recipe's name", source)
    try:
        under = _find_file(base, path.parent)
    except ConfigError as error:
        raise ConfigError("base", f"{error.path} {error.message}", source) from None
    return merge_layers(_read_with_bases(under, [*below, path.resolve()]), document)


def _resolve_paths(value: Any, kind: Kind | None, folder: Path) -> Any:
    """Make the paths of a file's values relative to its folder, if something is there.

    Other paths stay as they are, relative to the working directory: some are names on the hub, and the configuration
    kept with a run has paths from the command line.
    """
    section = find_section(kind) if kind is not None else None
    if isinstance(value, list):
        return [_resolve_paths(entry, kind, folder) for entry in value]
    if section is None:
        return value
    if isinstance(value, str) and section.short and section.keys[section.short].path:
        return _resolve_path(value, folder)
    if not isinstance(value, Mapping):
        return value
    anchored = dict(value)
    for name, entry in value.items():
        key = section.keys.get(name)
        if key is not None and key.path and isinstance(entry, str):
            anchored[name] = _resolve_path(entry, folder)
        elif key is not None:
            anchored[name] = _resolve_paths(entry, key.kind, folder)
    return anchored


def _resolve_path(text: str, folder: Path) -> str:
    """A path, or `file.py:function`, joined to a folder if the file is in it."""
    file, ending, function = text.partition(".py:")
    path = Path(file + ending.removesuffix(":"))
    if path.is_absolute() or not (folder / path).exists():
        return text
    return os.path.normpath(folder / path) + (f":{function}" if ending else "")


def parse_arguments(arguments: Sequence[str]) -> Document:
    """`section.key=value` arguments as one layer; of two for the same key the later one counts.

    A key of text takes the value as it stands; others take numbers, true, false, null, [lists] and {mappings}.

    >>> parse_arguments(["algorithm=ppo", "algorithm.group_size=2"]).values
    {'algorithm': {'preset': 'ppo', 'group_size': 2}}
    >>> parse_arguments(["name=2026", "steps=20", "sampling.stop=[END]", "rewards.0.weight=2"]).values
    {'name': '2026', 'steps': 20, 'sampling': {'stop': ['END']}, 'rewards': {'0': {'weight': 2}}}
    """
    layer = Document({})
    for argument in arguments:
        path, equals, text = argument.partition("=")
        place = tuple(path.strip().split("."))
        if not equals or not all(place):
            raise ConfigError(argument, "is no change, expected section.key=value", COMMAND_LINE)
        if place == ("base",):
            raise ConfigError(path, "got it as a change, expected it in a file", COMMAND_LINE)
        try:
            value = _parse_value(_kind_at(place), text)
        except ConfigError as error:
            raise ConfigError(path, error.message, COMMAND_LINE) from None
        except ValueError as error:
            raise ConfigError(path, str(error), COMMAND_LINE) from None
        inner = layer.values
        for at, part in enumerate(place[:-1]):
            if not isinstance(inner.get(part), dict):
                inner[part] = _as_mapping(_kind_at(place[: at + 1]), inner.get(part))
            inner = inner[part]
        existing, spread = inner.get(place[-1]), _as_mapping(_kind_at(place), value) if isinstance(value, str) else {}
        # `data=x.jsonl` after `data.limit=5` is a key beside it: it does not matter which of the two is said first.
        inner[place[-1]] = {**existing, **spread} if isinstance(existing, dict) and spread else value
        layer.origins[place] = COMMAND_LINE
    return layer


def _as_mapping(kind: Kind | None, value: Any) -> dict[str, Any]:
    """What stands for a section, or for a list of one, as a mapping that more keys go into."""
    kind = kind.inner if isinstance(kind, Nullable) else kind
    if value is None:
        return {}
    if isinstance(kind, ListOf):
        return {"0": _as_mapping(kind.item, value)}
    section = kind.spread(value) if isinstance(kind, Section) else None
    return dict(section) if isinstance(section, Mapping) else {}


def _kind_at(place: KeyPath) -> Kind | None:
    """The kind of the key at a place; `None` where there is none, or any plain value."""
    kind: Kind = get_section(Config)
    for part in place:
        kind = kind.inner if isinstance(kind, Nullable) else kind
        if isinstance(kind, ListOf) and part.isdecimal():
            kind = kind.item
        elif isinstance(kind, Section) and part in kind.keys:
            kind = kind.keys[part].kind
        elif isinstance(kind, MappingOf):
            kind = kind.item
        else:
            return None
    return kind


def _parse_value(kind: Kind | None, text: str) -> Any:
    inner = kind.inner if isinstance(kind, Nullable) else kind
    if isinstance(kind, Nullable) and text in ("null", "~", ""):
        return None
    words = isinstance(inner.item if isinstance(inner, ListOf) else inner, Text)
    if words and text[:1] not in ("'", '"', "[" if isinstance(inner, ListOf) else "'"):
        return text
    return parse_argument(text)


# --- layers -----------------------------------------------------------------------------------------------------------


def merge_layers(old: Document, new: Document, arguments: bool = False) -> Document:
    """One layer over another; `arguments`: the new one is from the command line."""
    try:
        values = _merge(old.values, new.values, get_section(Config), arguments)
    except ConfigError as error:
        raise error.at(_find_origin(error.path, new.origins)) from None
    return Document(values, {**old.origins, **new.origins})


def _merge(old: Any, new: Any, kind: Kind | None, arguments: bool = False) -> Any:
    """A value over another one: mappings key by key, anything else in its place."""
    section = find_section(kind) if kind is not None else None
    if section is not None and new is not None:
        old, new = section.spread(old), section.spread(new)
    lists = isinstance(kind.inner if isinstance(kind, Nullable) else kind, ListOf)
    if lists and isinstance(new, Mapping) and new and all(str(name).isdecimal() for name in new):
        return _merge_items(old, new, section)
    if not isinstance(new, Mapping) or not isinstance(old, Mapping) or lists:
        return new
    keys = section.keys if section is not None else {}
    combined = dict(old)
    for name, value in new.items():
        key = keys.get(name)
        is_complete = (
            key is not None and key.complete_with and isinstance(value, Mapping) and key.complete_with in value
        )
        if is_complete:
            combined.pop(name, None)
        if key is not None and value is not None and _is_different(old.get(name), value, bool(is_complete)):
            gone = old if "*" in key.anew else [other for other in key.anew if other != name]
            same_layout = arguments and old.get(name) is not None
            for other in gone:
                if not (same_layout and other in _LAYOUT_KEYS):
                    combined.pop(other, None)
        try:
            combined[name] = _merge(combined.get(name), value, key.kind if key is not None else None, arguments)
        except ConfigError as error:
            raise error.under(name) from None
    # What this layer says itself was not dropped by it, in whatever order it says so.
    return {**combined, **{name: combined.get(name, new[name]) for name in new}}


def _is_different(old: Any, new: Any, is_complete: bool) -> bool:
    return is_complete or (old is None if isinstance(new, Mapping) else old != new)


def _merge_items(old: Any, new: Mapping[str, Any], section: Section | None) -> Any:
    """Single items of a list changed, by their numbers."""
    items = [] if old is None else list(old) if isinstance(old, (list, tuple)) else [old]
    for name, value in sorted(new.items(), key=lambda pair: int(pair[0])):
        if int(name) > len(items):
            raise ConfigError(str(name), f"got item {name} of a list of {len(items)}, expected at most {len(items)}")
        before = items[int(name)] if int(name) < len(items) else None
        items[int(name) : int(name) + 1] = [_merge(before, value, section)]
    return items


def _find_origin(path: str, origins: Mapping[KeyPath, str]) -> str:
    """Where the key at a path was written: by an argument for a part of it, itself, or what holds it."""
    place = tuple(path.replace("[", ".").replace("]", "").split("."))
    if any(other[: len(place)] == place and source == COMMAND_LINE for other, source in origins.items()):
        return COMMAND_LINE
    sources = (origins[place[:n]] for n in range(len(place), -1, -1) if place[:n] in origins)
    return next(sources, "")


_UNQUOTED = re.compile(r"[A-Za-z_/][\w/.@+-]*(:[\w/.@+-]+)*", re.ASCII)
_AMBIGUOUS_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""What some reader takes for more than text."""
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def dump_config(config: Config) -> str:
    """The whole configuration, defaults included: what a key is for stands over it, its default beside another value.

    >>> print(dump_config(Config(name="mine", optimizer={"lr": 1e-5}))[:100])
    # What the run is called.
    name: mine  # default: run
    # The run's folder; null: runs/NAME.
    out: null
    """
    return "\n".join(_section_lines(config.to_dict(), get_section(Config), "")) + "\n"


def _section_lines(values: Mapping[str, Any], section: Section, indent: str) -> Iterator[str]:
    usual = section.usual(values)
    for name, key in section.keys.items():
        inner = find_section(key.kind)
        doc = key.doc or (summarize(inner) if inner is not None else "")
        if inner is not None and not indent:
            yield ""
        yield from textwrap.wrap(doc, 118, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        value = values[name]
        if inner is not None and isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _section_lines(value, inner, indent + "  ")
        elif inner is not None and isinstance(value, list) and value:
            yield f"{indent}{name}:"
            for entry in value:
                yield f"{indent}-"
                yield from _section_lines(entry, inner, indent + "  ")
        else:
            yield f"{indent}{name}: {format_value(value)}{_default_comment(value, usual[name])}"


def _default_comment(value: Any, usual: Any) -> str:
    return "" if value == usual or usual in (None, {}, []) else f"  # default: {format_value(usual)}"


def summarize(section: Section) -> str:
    """What a section is: the first paragraph of its class's documentation."""
    return " ".join((section.of.__doc__ or "").split("\n\n")[0].split())


def format_value(value: Any) -> str:
    """A value in one line.

    >>> print(format_value({"lr": 1e-5, "on": ["no", "module:function", "a b", 3, None]}))
    {lr: 1.0e-05, "on": ["no", module:function, "a b", 3, null]}
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_format_text(name)}: {format_value(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if isinstance(value, str):
        return _format_text(value)
    if isinstance(value, float):
        return _format_number(value)
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _format_number(value: float) -> str:
    """A number that every reader takes for one: 1e-05 is text to some.

    >>> _format_number(1e-5), _format_number(0.1), _format_number(1e22), _format_number(float("inf"))
    ('1.0e-05', '0.1', '1.0e+22', '.inf')
    """
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    digits, mark, power = repr(value).partition("e")
    return f"{digits if '.' in digits else digits + '.0'}{mark}{power}" if mark else digits


def _format_text(value: str) -> str:
    """A text, in quotes unless it is text to every reader."""
    if _UNQUOTED.fullmatch(value) and value.lower() not in _AMBIGUOUS_WORDS and isinstance(parse_scalar(value), str):
        return value
    return '"' + "".join(_ESCAPES.get(char) or (char if _is_plain(char) else _escape(char)) for char in value) + '"'


def _is_plain(char: str) -> bool:
    return char.isprintable() and char != "\ufeff"


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
