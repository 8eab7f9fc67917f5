"""Read configurations from YAML, TOML, recipes and `section.key=value` arguments; write them as YAML with comments.

Invariant: reading a file executes nothing. A document becomes texts, numbers, booleans, null, lists and mappings, by
the core schema of YAML 1.2 (`1e-5` is a number, `no` is text), or is rejected with its file and line.
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
from typing import TYPE_CHECKING, Any

from rollbook.core.checks import suggest
from rollbook.core.files import check_regular
from rollbook.train.config.schema import Config
from rollbook.train.config.values import (
    ConfigError,
    Kind,
    ListOf,
    MappingOf,
    Nullable,
    RawValue,
    Section,
    Text,
    find_section,
    get_section,
)

if TYPE_CHECKING:
    from yaml import Node  # type: ignore[import-untyped]

KeyPath = tuple[str, ...]
"""The names of a key and of the sections that contain it."""
MAX_VALUES = 100_000
"""Maximum number of values in a document. Aliases of aliases could expand to billions."""
MAX_DEPTH = 100
"""Maximum depth of nested mappings and lists."""
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
    """Values of a file or of arguments.

    Args:
        values: The values by key.
        origins: File and line of each key, for errors.
    """

    values: dict[str, Any]
    origins: dict[KeyPath, str] = field(default_factory=dict)


def parse_scalar(text: str) -> Any:
    """Parse an unquoted scalar by the core schema of YAML 1.2.

    Args:
        text: The scalar.

    >>> [parse_scalar(word) for word in ("1e-5", "no", "12:30", "2026-11-16", "true", "~", "0x1F", "010")]
    [1e-05, 'no', '12:30', '2026-11-16', True, None, 31, 10]
    """
    if text in _SPECIAL_WORDS:
        return _SPECIAL_WORDS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > 4000:
            raise ValueError(f"got a number of {len(text)} digits, expected at most 4000")
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    return float(text) if _FLOAT.fullmatch(text) else text


def _import_yaml() -> Any:
    """Import PyYAML, or raise an error with the command that installs it."""
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise ImportError(
            "YAML needs PyYAML: install the extra 'train' of Rollbook (TOML files need nothing)"
        ) from error


@functools.cache
def _loader() -> Any:
    """Build a YAML loader that returns nodes. It has no constructor, so no tag can create an object."""
    yaml = _import_yaml()
    bases: list[Any] = [yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser, yaml.composer.Composer]

    class Loader(*bases):  # type: ignore[misc]
        def __init__(self, text: str) -> None:
            bases[0].__init__(self, text)
            for base in bases[1:]:
                base.__init__(self)

        def resolve(self, node_class: type, value: str, implicit: tuple[bool, bool]) -> str:
            return "plain" if node_class is yaml.ScalarNode and implicit[0] else "untagged"

        def descend_resolver(self, *position: Any) -> None:
            pass

        def ascend_resolver(self) -> None:
            pass

    return Loader


def parse_yaml(text: str, name: str) -> tuple[Any, dict[KeyPath, str]]:
    """Parse a text with one YAML document.

    Args:
        text: The text.
        name: Name of the file in errors.

    Returns:
        The value of the document, and the origin of each key.

    Raises:
        ConfigError: The text is not YAML, has tags or duplicate keys, or is too large.

    >>> parse_yaml("optimizer: {lr: 1e-5}\\nname: no", "my.yaml")
    ({'optimizer': {'lr': 1e-05}, 'name': 'no'}, {('optimizer',): 'my.yaml, line 1', ('optimizer', 'lr'): 'my.yaml, line 1', ('name',): 'my.yaml, line 2'})
    >>> parse_yaml("a: 1\\na: 2", "my.yaml")
    Traceback (most recent call last):
        ...
    rollbook.train.config.values.ConfigError: a: duplicate key (my.yaml, line 2)
    """  # noqa: E501
    yaml = _import_yaml()
    origins: dict[KeyPath, str] = {}
    try:
        node = _loader()(text).get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "context", None) or str(error)
        raise ConfigError(f"{name}{f', line {mark.line + 1}' if mark else ''}", f"invalid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(name, f"got more than {MAX_DEPTH} levels of nesting, expected fewer") from None
    budget = iter(range(MAX_VALUES))
    return (None if node is None else _convert_node(node, (), name, origins, [], budget)), origins


def _convert_node(
    node: Node, path: KeyPath, name: str, origins: dict[KeyPath, str], parents: list[Node], budget: Iterator[int]
) -> Any:
    source = f"{name}, line {node.start_mark.line + 1}"
    location = ".".join(path) or name
    if next(budget, None) is None or len(parents) > MAX_DEPTH:
        raise ConfigError(location, f"got more than {MAX_VALUES} values or {MAX_DEPTH} levels, expected fewer", source)
    if node in parents:
        raise ConfigError(location, "got a value that contains itself", source)
    if node.tag not in ("plain", "untagged", "tag:yaml.org,2002:str"):
        raise ConfigError(location, f"got the tag {node.tag!r}, expected plain values", source)
    if node.id == "scalar":
        try:
            return parse_scalar(node.value) if node.tag == "plain" else node.value
        except ValueError as error:
            raise ConfigError(location, str(error), source) from None
    parents = [*parents, node]
    if node.id == "sequence":
        return [
            _convert_node(child, (*path, str(i)), name, origins, parents, budget) for i, child in enumerate(node.value)
        ]
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = f"{name}, line {key_node.start_mark.line + 1}"
        if key_node.id != "scalar":
            raise ConfigError(location, "got a list or a mapping as a key, expected a string", line)
        key = _convert_node(key_node, path, name, origins, parents, budget)
        if not isinstance(key, str):
            text = key_node.value
            raise ConfigError(location, f"got {text!r} as a key, expected a string (in quotes: '{text}')", line)
        if key in mapping:
            raise ConfigError(".".join((*path, key)), "duplicate key", line)
        origins[*path, key] = line
        mapping[key] = _convert_node(value_node, (*path, key), name, origins, parents, budget)
    return mapping


def read_file(path: Path, name: str | None = None) -> Document:
    """Read a YAML or TOML file, by its suffix.

    Args:
        path: The file.
        name: Name of the file in errors; `None`: its path.

    Raises:
        ConfigError: The file is neither, or is not valid.
    """
    name = name or str(path)
    if path.suffix not in _SUFFIXES:
        raise ConfigError(name, f"got the suffix {path.suffix!r}, expected .yaml, .yml or .toml")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(name, f"invalid UTF-8: {error.reason} at byte {error.start}") from None
    origins: dict[KeyPath, str] = {}
    if path.suffix == ".toml":
        try:
            values: Any = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(name, f"invalid TOML: {error}") from None
        origins = {(): name}
    else:
        values, origins = parse_yaml(text, name)
    if not isinstance(values, dict | None):
        raise ConfigError(name, f"got a {type(values).__name__}, expected sections and keys")
    return Document(values or {}, origins)


def parse_argument(text: str) -> Any:
    """Parse a value of the command line: an unquoted scalar, or a list, mapping or quoted text as in YAML.

    Args:
        text: The value.

    >>> parse_argument("3e-4"), parse_argument("[a, 1]"), parse_argument("cuda:1"), parse_argument('"7"')
    (0.0003, ['a', 1], 'cuda:1', '7')
    """
    if text[:1] not in ("[", "{", '"', "'"):
        return parse_scalar(text)
    try:
        return json.loads(text, object_pairs_hook=_reject_duplicates)  # does not need PyYAML
    except ConfigError:
        raise
    except (ValueError, RecursionError):
        return parse_yaml(text, "the command line")[0]


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise ConfigError(next(name for name in names if names.count(name) > 1), "duplicate key")
    return mapping


# --- files and recipes ------------------------------------------------------------------------------------------------

DEFAULT_RECIPE = "letters"
"""The recipe that `rollbook train` runs by default."""
COMMAND_LINE = "the command line"
RECIPE_FOLDER = Path(__file__).parent.parent / "recipes"
_SUFFIXES = (".yaml", ".yml", ".toml")
_LAYOUT_KEYS = ("columns", "keep")
"""Keys of `data` that describe the layout of a file. They still apply to a file named on the command line."""


def list_recipes() -> dict[str, Path]:
    """Return the files of the embedded recipes by name.

    >>> list_recipes()["letters"].name
    'letters.yaml'
    """
    files = sorted(RECIPE_FOLDER.iterdir()) if RECIPE_FOLDER.is_dir() else []
    return {path.stem: path for path in files if path.suffix in _SUFFIXES}


def load_config(config: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load a configuration file or a recipe.

    Args:
        config: A YAML or TOML file, the name of a recipe, or keys and sections, such as `Config.to_dict` returns;
            `None`: the default recipe.
        overrides: Changes, as `section.key=value`.

    Returns:
        The configuration, complete with defaults.

    Raises:
        ConfigError: The file or recipe does not exist, or a key or a value is not valid.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "my.toml")
    ...     _ = file.write_text('[optimizer]\\nlr = 1e-4')
    ...     config = load_config(file, ["optimizer.warmup_steps=5", "algorithm=rloo"])
    >>> config.optimizer.lr, config.optimizer.warmup_steps, config.algorithm.estimator
    (0.0001, 5, 'rloo')
    """
    if isinstance(config, Mapping):
        layers = Document(dict(config))
    else:
        layers = _read_with_bases(_find_file(DEFAULT_RECIPE if config is None else config, None), [])
    layers = merge_layers(layers, parse_arguments(overrides), arguments=True)
    try:
        return Config.from_dict(layers.values)
    except ConfigError as error:
        raise error.at(_find_origin(error.path, layers.origins)) from None


def _find_file(name: str | Path, folder: Path | None) -> Path:
    """Return the file of a path, relative to `folder`, or of the name of a recipe."""
    path = Path(name).expanduser() if folder is None else folder / Path(name).expanduser()
    check_regular(path)
    if path.suffix in _SUFFIXES or path.is_file():
        if not path.is_file():
            raise ConfigError(str(path), "no such file")
        return path
    names = list_recipes()
    if str(name) not in names:
        raise ConfigError(str(name), f"no such file or recipe{suggest(str(name), list(names))}")
    return names[str(name)]


def _read_with_bases(path: Path, files: list[Path]) -> Document:
    """Read a file and merge it with its base; `files` are those that it is a base of."""
    if path.resolve() in files:
        raise ConfigError("base", f"files form a cycle: {' <- '.join(file.name for file in [*files, path])}")
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
        base_path = _find_file(base, path.parent)
    except ConfigError as error:
        raise ConfigError("base", f"{error.path}: {error.message}", source) from None
    return merge_layers(_read_with_bases(base_path, [*files, path.resolve()]), document)


def _resolve_paths(value: RawValue, kind: Kind | None, folder: Path) -> Any:
    """Resolve the paths in a file that exist relative to its folder.

    Other paths remain relative to the working directory: some are names on the hub, and the configuration stored with
    a run has paths of the command line.
    """
    section = find_section(kind) if kind is not None else None
    if isinstance(value, list):
        return [_resolve_paths(entry, kind, folder) for entry in value]
    if section is None:
        return value
    if isinstance(value, str) and section.short_key and section.keys[section.short_key].path:
        return _resolve_path(value, folder)
    if not isinstance(value, Mapping):
        return value
    resolved = dict(value)
    for name, entry in value.items():
        key = section.keys.get(name)
        if key is not None and key.path and isinstance(entry, str):
            resolved[name] = _resolve_path(entry, folder)
        elif key is not None:
            resolved[name] = _resolve_paths(entry, key.kind, folder)
    return resolved


def _resolve_path(text: str, folder: Path) -> str:
    """Join a path, or `file.py:function`, to a folder if the file is in it."""
    file, ending, function = text.partition(".py:")
    path = Path(file + ending.removesuffix(":"))
    if path.is_absolute() or not (folder / path).exists():
        return text
    return os.path.normpath(folder / path) + (f":{function}" if ending else "")


def parse_arguments(arguments: Sequence[str]) -> Document:
    """Parse `section.key=value` arguments.

    Values of text keys are taken literally; others are parsed as numbers, true, false, null, [lists] and {mappings}.

    Args:
        arguments: The arguments. Of two for the same key, the later one counts.

    Raises:
        ConfigError: An argument has no key or no `=`, or its value cannot be parsed.

    >>> parse_arguments(["algorithm=ppo", "algorithm.group_size=2"]).values
    {'algorithm': {'preset': 'ppo', 'group_size': 2}}
    >>> parse_arguments(["name=2026", "steps=20", "sampling.stop=[END]", "rewards.0.weight=2"]).values
    {'name': '2026', 'steps': 20, 'sampling': {'stop': ['END']}, 'rewards': {'0': {'weight': 2}}}
    """
    layer = Document({})
    for argument in arguments:
        name, equals, text = argument.partition("=")
        path = tuple(name.strip().split("."))
        if not equals or not all(path):
            raise ConfigError(argument, "expected section.key=value", COMMAND_LINE)
        if path == ("base",):
            raise ConfigError(name, "cannot be changed on the command line, expected it in a file", COMMAND_LINE)
        try:
            value = _parse_value(_kind_at(path), text)
        except ConfigError as error:
            raise ConfigError(name, error.message, COMMAND_LINE) from None
        except ValueError as error:
            raise ConfigError(name, str(error), COMMAND_LINE) from None
        section = layer.values
        for depth, key_part in enumerate(path[:-1], 1):
            if not isinstance(section.get(key_part), dict):
                section[key_part] = _as_mapping(_kind_at(path[:depth]), section.get(key_part))
            section = section[key_part]
        existing, expanded = section.get(path[-1]), _as_mapping(_kind_at(path), value) if isinstance(value, str) else {}
        # `data=x.jsonl` after `data.limit=5` does not remove the limit: the order of the two does not matter.
        section[path[-1]] = {**existing, **expanded} if isinstance(existing, dict) and expanded else value
        layer.origins[path] = COMMAND_LINE
    return layer


def _as_mapping(kind: Kind | None, value: RawValue) -> dict[str, Any]:
    """Expand the short form of a section, or of a list of one, to a mapping that takes more keys."""
    kind = kind.inner if isinstance(kind, Nullable) else kind
    if value is None:
        return {}
    if isinstance(kind, ListOf):
        return {"0": _as_mapping(kind.item, value)}
    section = kind.expand(value) if isinstance(kind, Section) else None
    return dict(section) if isinstance(section, Mapping) else {}


def _kind_at(path: KeyPath) -> Kind | None:
    """Return the kind of a key; `None` if it is unknown or takes any value."""
    kind: Kind = get_section(Config)
    for name in path:
        kind = kind.inner if isinstance(kind, Nullable) else kind
        if isinstance(kind, ListOf) and name.isdecimal():
            kind = kind.item
        elif isinstance(kind, Section) and name in kind.keys:
            kind = kind.keys[name].kind
        elif isinstance(kind, MappingOf):
            kind = kind.item
        else:
            return None
    return kind


def _parse_value(kind: Kind | None, text: str) -> Any:
    inner = kind.inner if isinstance(kind, Nullable) else kind
    if isinstance(kind, Nullable) and text in ("null", "~", ""):
        return None
    is_text = isinstance(inner.item if isinstance(inner, ListOf) else inner, Text)
    if is_text and text[:1] not in ("'", '"', "[" if isinstance(inner, ListOf) else "'"):
        return text
    return parse_argument(text)


# --- layers -----------------------------------------------------------------------------------------------------------


def merge_layers(old: Document, new: Document, arguments: bool = False) -> Document:
    """Merge a document over another one.

    Args:
        old: The base.
        new: The document whose values take precedence.
        arguments: Whether `new` is from the command line.
    """
    try:
        values = _merge(old.values, new.values, get_section(Config), arguments)
    except ConfigError as error:
        raise error.at(_find_origin(error.path, new.origins)) from None
    return Document(values, {**old.origins, **new.origins})


def _merge(old: RawValue, new: RawValue, kind: Kind | None, arguments: bool = False) -> Any:
    """Merge a value over another one: mappings key by key, anything else is replaced."""
    section = find_section(kind) if kind is not None else None
    if section is not None and new is not None:
        old, new = section.expand(old), section.expand(new)
    is_list = isinstance(kind.inner if isinstance(kind, Nullable) else kind, ListOf)
    if is_list and isinstance(new, Mapping) and new and all(str(name).isdecimal() for name in new):
        return _merge_items(old, new, section)
    if not isinstance(new, Mapping) or not isinstance(old, Mapping) or is_list:
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
            reset = old if "*" in key.resets else [other for other in key.resets if other != name]
            keeps_layout = arguments and old.get(name) is not None
            for other in reset:
                if not (keeps_layout and other in _LAYOUT_KEYS):
                    combined.pop(other, None)
        try:
            combined[name] = _merge(combined.get(name), value, key.kind if key is not None else None, arguments)
        except ConfigError as error:
            raise error.under(name) from None
    # A layer does not reset the keys that it sets itself, regardless of their order.
    return {**combined, **{name: combined.get(name, new[name]) for name in new}}


def _is_different(old: RawValue, new: RawValue, is_complete: bool) -> bool:
    return is_complete or (old is None if isinstance(new, Mapping) else old != new)


def _merge_items(old: RawValue, new: Mapping[str, Any], section: Section | None) -> list[Any]:
    """Change single items of a list, by their indices."""
    items = [] if old is None else list(old) if isinstance(old, (list, tuple)) else [old]
    for name, value in sorted(new.items(), key=lambda pair: int(pair[0])):
        if int(name) > len(items):
            raise ConfigError(str(name), f"got item {name} of a list of {len(items)}, expected at most {len(items)}")
        previous = items[int(name)] if int(name) < len(items) else None
        items[int(name) : int(name) + 1] = [_merge(previous, value, section)]
    return items


def _find_origin(name: str, origins: Mapping[KeyPath, str]) -> str:
    """Return where a key was set: on the command line (also if only a part of it), or in a file."""
    path = tuple(name.replace("[", ".").replace("]", "").split("."))
    if any(other[: len(path)] == path and source == COMMAND_LINE for other, source in origins.items()):
        return COMMAND_LINE
    sources = (origins[path[:n]] for n in range(len(path), -1, -1) if path[:n] in origins)
    return next(sources, "")


# --- writing ----------------------------------------------------------------------------------------------------------

_UNQUOTED = re.compile(r"[A-Za-z_/][\w/.@+-]*(:[\w/.@+-]+)*", re.ASCII)
_AMBIGUOUS_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Words that some YAML readers do not take for text."""
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def dump_config(config: Config) -> str:
    """Write a configuration as YAML: all keys, with their descriptions and defaults as comments.

    Args:
        config: The configuration.

    Returns:
        The YAML text, which `load_config` reads.

    >>> for line in dump_config(Config(name="mine", optimizer={"lr": 1e-5})).splitlines()[:4]:
    ...     print(line)
    # Name of the run.
    name: mine  # default: run
    # Folder of the run; null: runs/NAME.
    out: null
    """
    return "\n".join(_section_lines(config.to_dict(), get_section(Config), "")) + "\n"


def _section_lines(values: Mapping[str, Any], section: Section, indent: str) -> Iterator[str]:
    default = section.defaults(values)
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
            yield f"{indent}{name}: {format_value(value)}{_default_comment(value, default[name])}"


def _default_comment(value: RawValue, default: RawValue) -> str:
    return "" if value == default or default in (None, {}, []) else f"  # default: {format_value(default)}"


def summarize(section: Section) -> str:
    """Return the first paragraph of the docstring of a section.

    Args:
        section: The section.
    """
    return " ".join((section.cls.__doc__ or "").split("\n\n")[0].split())


def format_value(value: RawValue) -> str:
    """Write a value as YAML in one line.

    Args:
        value: The value.

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
    """Write a number that every YAML reader takes for one; 1e-05 is text to some.

    >>> _format_number(1e-5), _format_number(0.1), _format_number(1e22), _format_number(float("inf"))
    ('1.0e-05', '0.1', '1.0e+22', '.inf')
    """
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    digits, mark, power = repr(value).partition("e")
    return f"{digits if '.' in digits else digits + '.0'}{mark}{power}" if mark else digits


def _format_text(value: str) -> str:
    """Write a text, in quotes unless every YAML reader takes it for text."""
    if _UNQUOTED.fullmatch(value) and value.lower() not in _AMBIGUOUS_WORDS and isinstance(parse_scalar(value), str):
        return value
    return '"' + "".join(_ESCAPES.get(char) or (char if _is_plain(char) else _escape(char)) for char in value) + '"'


def _is_plain(char: str) -> bool:
    return char.isprintable() and char != "\ufeff"


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
