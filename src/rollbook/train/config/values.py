"""Types of configuration values, dataclasses as sections, and secrets, which are refused as text.

Invariant: a value that is read is of exactly the annotated type, within its bounds, plain (text, numbers, true, false,
null, lists, mappings) and shared with nobody; anything else is a `ConfigError` that names the key by its full path.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import quote

from rollbook.core.addresses import is_secret_name, redacted, url_secrets
from rollbook.core.errors import RollbookError

if TYPE_CHECKING:
    from rollbook.train.algorithm import AlgorithmConfig


class ConfigError(RollbookError, ValueError):
    """A key that is not as it should be: its `path`, what is wrong (`message`), and the file or argument it came from.

    >>> error = ConfigError("lr", "got -1, expected a number above 0").under("optimizer")
    >>> str(error), str(error.at("my.yaml, line 3"))
    ('optimizer.lr: got -1, expected a number above 0', 'optimizer.lr: got -1, expected a number above 0 (my.yaml, line 3)')
    """  # noqa: E501

    def __init__(self, path: str, message: str, source: str = "") -> None:
        super().__init__(f"{path}: {message}" + (f" ({source})" if source else ""))
        self.path, self.message, self.source = path, message, source

    def under(self, name: str) -> ConfigError:
        """The same, of a key of `name`."""
        return ConfigError(f"{name}.{self.path}" if self.path else name, self.message, self.source)

    def at(self, source: str) -> ConfigError:
        """The same, with where it was written."""
        return ConfigError(self.path, self.message, source)


class Kind(Protocol):
    """A kind of value."""

    @property
    def expected(self) -> str:
        """What there should be, as an error says it."""

    def read(self, value: Any) -> Any:
        """The value as it is kept, or a `ConfigError` whose path is relative to the key."""


def _value_error(value: Any, expected: str, hint: str = "") -> ConfigError:
    shown = repr(redacted(value) if isinstance(value, str) else value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    shown = {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else shown
    return ConfigError("", f"got {shown}, expected {expected}{hint}")


@dataclass(frozen=True)
class Boolean:
    """True or false, and nothing that only counts as one of them."""

    expected: str = "true or false"

    def read(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise _value_error(value, self.expected)
        return value


@dataclass(frozen=True)
class Number:
    """A finite number within its bounds.

    `above` and `below` leave the bound itself out. `whole_from`: from there on only whole numbers make sense, as in a
    share (0.1) or a count (100).

    >>> Number(integer=True, low=1).read(1e3), Number(above=0, high=1).expected
    (1000, 'a number above 0, up to 1')
    """

    integer: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    whole_from: float | None = None

    @property
    def expected(self) -> str:
        text = "a whole number" if self.integer else "a number"
        bounds = [
            *([f"from {_format_bound(self.low)}"] if self.low is not None else []),
            *([f"above {_format_bound(self.above)}"] if self.above is not None else []),
            *([f"to {_format_bound(self.high)}"] if self.high is not None and self.low is not None else []),
            *([f"up to {_format_bound(self.high)}"] if self.high is not None and self.low is None else []),
            *([f"below {_format_bound(self.below)}"] if self.below is not None else []),
        ]
        open_end = self.low is not None and self.high is None and self.below is None
        text = " ".join([text, ", ".join(bounds) if self.above is not None else " ".join(bounds)]).strip()
        text += " on" if open_end else ""
        return text + (
            f" (a share below {_format_bound(self.whole_from)}, a whole number from there)" if self.whole_from else ""
        )

    def read(self, value: Any) -> float | int:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if fits:
            is_whole = isinstance(value, int) or value.is_integer()
            fits = (
                (not self.integer or is_whole)
                and (self.low is None or value >= self.low)
                and (self.high is None or value <= self.high)
                and (self.above is None or value > self.above)
                and (self.below is None or value < self.below)
                and (self.whole_from is None or value < self.whole_from or is_whole)
            )
        if not fits:
            raise _value_error(value, self.expected)
        if self.integer or (self.whole_from is not None and value >= self.whole_from):
            return int(value)
        try:
            return float(value)
        except OverflowError:
            raise _value_error(value, self.expected) from None


def _format_bound(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


@dataclass(frozen=True)
class Text:
    """A text: any, one of some, or one of a form."""

    choices: tuple[str, ...] = ()
    pattern: str = ""
    description: str = ""

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self.choices)}" if self.choices else self.description or "text"

    def read(self, value: Any) -> str:
        if not isinstance(value, str):
            scalar = isinstance(value, (int, float, bool)) and not self.choices and not self.pattern
            written = str(value).lower() if isinstance(value, bool) else value
            raise _value_error(value, self.expected, f' (in quotes it would be: "{written}")' if scalar else "")
        if self.choices and value not in self.choices:
            raise _value_error(value, self.expected, _suggest_choice(value, self.choices))
        if self.pattern and not re.fullmatch(self.pattern, value):
            raise _value_error(value, self.expected)
        return value


def _suggest_choice(name: str, names: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True)
class Nullable:
    """What may also be null."""

    inner: Kind

    @property
    def expected(self) -> str:
        return f"{self.inner.expected}, or null"

    def read(self, value: Any) -> Any:
        try:
            return None if value is None else self.inner.read(value)
        except ConfigError as error:
            is_own = not error.path and error.message.endswith(f"expected {self.inner.expected}")
            raise ConfigError("", f"{error.message}, or null") if is_own else error from None


@dataclass(frozen=True)
class Either:
    """One kind or another; the first that takes a value has it."""

    kinds: tuple[Kind, ...]

    @property
    def expected(self) -> str:
        return " or ".join(kind.expected for kind in self.kinds)

    def read(self, value: Any) -> Any:
        for kind in self.kinds:
            try:
                return kind.read(value)
            except ConfigError:
                continue
        raise _value_error(value, self.expected)


@dataclass(frozen=True)
class ListOf:
    """A list of values of one kind, kept as a tuple; one value alone is a list of one, unless a length is asked for."""

    item: Kind
    length: int | None = None

    @property
    def expected(self) -> str:
        if self.length is not None:
            return f"a list of {self.length}: each {self.item.expected}"
        return f"a list: each {self.item.expected}"

    def read(self, value: Any) -> tuple[Any, ...]:
        alone = not isinstance(value, (list, tuple))
        if alone and (self.length is not None or value is None):
            raise _value_error(value, self.expected)
        entries = [value] if alone else value
        if self.length is not None and len(entries) != self.length:
            raise _value_error(value, self.expected)
        checked_entries = []
        for i, entry in enumerate(entries):
            try:
                checked_entries.append(self.item.read(entry))
            except ConfigError as error:
                raise error.under(str(i)) from None
        return tuple(checked_entries)


@dataclass(frozen=True)
class PlainValue:
    """Any plain value; what it means is known to whoever it is passed on to."""

    expected: str = "text, a number, true, false, null, a list or a mapping"

    def read(self, value: Any, depth: int = 0) -> Any:
        if depth > 50:
            raise ConfigError("", "got more than 50 mappings and lists in each other, expected fewer")
        if isinstance(value, Mapping):
            return _read_mapping(value, lambda entry: self.read(entry, depth + 1))
        if isinstance(value, (list, tuple)):
            return [self.read(entry, depth + 1) for entry in value]
        if value is None or (isinstance(value, (str, bool, int, float)) and value == value):
            return value
        raise _value_error(value, self.expected)


@dataclass(frozen=True)
class MappingOf:
    """A mapping from names to values of one kind: `names` are those there can be, if not any."""

    item: Kind
    names: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        text = f"a mapping of {', '.join(self.names)}" if self.names else "a mapping"
        return text if isinstance(self.item, PlainValue) else f"{text}, each {self.item.expected}"

    def read(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _value_error(value, self.expected)
        for name in value:
            if self.names and name not in self.names:
                raise unknown_key_error(str(name), self.names)
        return _read_mapping(value, self.item.read)


def _read_mapping(value: Mapping[Any, Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    entries = {}
    for name, entry in value.items():
        if not isinstance(name, str):
            raise ConfigError("", f"got {name!r} as a name, expected text (in quotes: '{name}')")
        try:
            entries[name] = read(entry)
        except ConfigError as error:
            raise error.under(name) from None
    return entries


def unknown_key_error(name: str, names: Sequence[str], elsewhere: Sequence[str] = ()) -> ConfigError:
    """What to say of a key that does not exist: the nearest that does, here or in another section."""
    from rollbook.core.checks import suggest

    name = name or "''"
    if elsewhere:
        return ConfigError(name, f"unknown key; did you mean {' or '.join(map(repr, elsewhere))}?")
    return ConfigError(name, f"unknown key{suggest(name, list(names))}")


# --- sections ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """One key of a section: its name, kind, default (as it is written in a file) and what it is for."""

    name: str
    kind: Kind
    default: Any
    doc: str
    free: bool = False
    """Whether an interrupted run may be gone on with under another value."""
    anew: tuple[str, ...] = ()
    """Keys of the same section, of a base, that another value of this one leaves no meaning for; `*`: all."""
    complete_with: str = ""
    """Of a mapping: with this name in it, it is complete and takes the place of the base's; otherwise it changes it."""
    path: bool = False
    """Whether a text is, or may be, a path: in a file it is relative to that file."""


@dataclass(frozen=True)
class Section:
    """A dataclass as a section of a configuration."""

    of: type
    keys: Mapping[str, Key]
    make: Callable[[dict[str, Any]], Any]
    parts: Callable[[Any], dict[str, Any]]
    """From an instance back to the values of its keys."""
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """From the section's plain values to its plain defaults, which a preset among them decides."""
    short: str = ""
    """The key that a text in place of the section is for."""

    @property
    def expected(self) -> str:
        return f"a mapping of its keys{f', or its {self.short}' if self.short else ''}"

    def read(self, value: Any) -> Any:
        if isinstance(value, self.of):
            return value
        value = self.spread(value)
        if not isinstance(value, Mapping):
            raise _value_error(value, self.expected)
        values = {}
        for name, entry in value.items():
            if name not in self.keys:
                raise unknown_key_error(str(name), list(self.keys))
            try:
                values[name] = self.keys[name].kind.read(entry)
            except ConfigError as error:
                raise error.under(name) from None
        try:
            return self.make(values)
        except ConfigError:
            raise
        except ValueError as error:  # of a dataclass of the library's own: "optimizer.lr: got ..."
            where, _, message = str(error).partition(": ")
            raise ConfigError(where.rpartition(".")[2], message) from error

    def spread(self, value: Any) -> Any:
        """A text in place of the section as a mapping of its key, and null as one of none."""
        if value is None:
            return {}
        return {self.short: value} if self.short and isinstance(value, str) else value


def find_section(kind: Kind) -> Section | None:
    """The section that a kind is, or may be, or is a list of."""
    while isinstance(kind, (Nullable, ListOf)):
        kind = kind.inner if isinstance(kind, Nullable) else kind.item
    return kind if isinstance(kind, Section) else None


def parse_annotation(hint: Any, limits: Mapping[str, Any], section: Callable[[type], Section]) -> Kind:
    """The kind of an annotation, with what limits it.

    >>> parse_annotation(float | None, {"above": 0}, section=None).expected
    'a number above 0, or null'
    >>> parse_annotation(tuple[str, ...], {}, section=None).read("stop")
    ('stop',)
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        rest = [arg for arg in args if arg is not type(None)]
        kinds = tuple(parse_annotation(arg, limits, section) for arg in rest)
        kind = kinds[0] if len(kinds) == 1 else Either(kinds)
        return kind if len(rest) == len(args) else Nullable(kind)
    if origin is Literal:
        return Text(choices=args)
    if origin is tuple and args[-1] is ...:
        return ListOf(parse_annotation(args[0], limits, section))
    if origin is tuple and len(set(args)) == 1:
        return ListOf(parse_annotation(args[0], limits, section), len(args))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return MappingOf(parse_annotation(args[1], {}, section), limits.get("names", ()))
    if hint is Any:
        return PlainValue()
    if hint is bool:
        return Boolean()
    if hint in (int, float):
        return Number(integer=hint is int, **limits)
    if hint is str:
        return Text(**limits)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return section(hint)
    raise TypeError(f"{hint!r} is no annotation that a key can have")


@functools.cache
def read_field_docs(cls: type) -> dict[str, str]:
    """The strings under a dataclass's fields, by field, each in one line.

    >>> from rollbook.train.optimizer import OptimizerConfig
    >>> read_field_docs(OptimizerConfig)["eps"]
    "Term added to AdamW's denominator."
    """
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except OSError:  # an installation without sources has no strings to show, and needs none to run
        return {}
    docs: dict[str, str] = {}
    lines = body.body if isinstance(body, ast.ClassDef) else []
    for line, after in itertools.pairwise(lines):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(after, ast.Expr):
            value = after.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[line.target.id] = " ".join(value.value.split())
    return docs


def key(
    default: Any,
    *,
    free: bool = False,
    anew: tuple[str, ...] = (),
    complete_with: str = "",
    path: bool = False,
    **limits: Any,
) -> Any:
    """Declare a key of a section as a dataclass field.

    Args:
        default: The default value.
        free: See `Key`; so are `anew`, `complete_with` and `path`.
        limits: `low`, `high`, `above`, `below` and `whole_from` of numbers; `choices`, `pattern` and `description` of
            texts; `names` of mappings.
    """
    metadata = {"limits": limits, "free": free, "anew": anew, "complete_with": complete_with, "path": path}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_fields(self: Any) -> None:
    """Read every field of a section by its kind, and put what was read in its place."""
    for name, spec in get_section(type(self)).keys.items():
        try:
            value = spec.kind.read(getattr(self, name))
        except ConfigError as error:
            raise error.under(name) from None
        object.__setattr__(self, name, value)


def get_section(cls: type) -> Section:
    """A dataclass as a section: its keys by name."""
    return _build_section(cls)


@functools.cache
def _build_section(cls: type) -> Section:
    # These load torch: when a configuration is made, not when its modules are imported.
    from rollbook.train.algorithm import PRESET_NAMES, AlgorithmConfig
    from rollbook.train.optimizer import OptimizerConfig

    names = {"AlgorithmConfig": AlgorithmConfig, "OptimizerConfig": OptimizerConfig}
    hints, docs = typing.get_type_hints(cls, localns=names), read_field_docs(cls)
    keys = {}
    if cls is AlgorithmConfig:
        doc = "The algorithm to begin from; null: one's own, of its parts."
        keys["preset"] = Key("preset", Nullable(Text(choices=tuple(PRESET_NAMES))), "grpo", doc, anew=("*",))
    for spec in dataclasses.fields(cls):
        metadata = spec.metadata
        default = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
        keys[spec.name] = Key(
            spec.name,
            parse_annotation(hints[spec.name], metadata.get("limits", {}), get_section),
            list(default) if isinstance(default, tuple) else default,
            docs.get(spec.name, ""),
            metadata.get("free", False),
            metadata.get("anew", _RESETS.get(spec.name, ()) if cls is AlgorithmConfig else ()),
            metadata.get("complete_with", ""),
            metadata.get("path", False),
        )
    if cls is AlgorithmConfig:
        return Section(cls, keys, _build_algorithm, _algorithm_values, _preset_values, "preset")
    usual = {name: to_plain(spec.default) for name, spec in keys.items()}
    return Section(cls, keys, lambda values: cls(**values), vars, lambda values: usual, getattr(cls, "SHORT", ""))


_RESETS = {"loss": ("loss_options",), "estimator": ("estimator_options",)}


def _build_algorithm(values: dict[str, Any]) -> AlgorithmConfig:
    from rollbook.train.algorithm import AlgorithmConfig

    preset = values.pop("preset", "grpo")
    return AlgorithmConfig(**values) if preset is None else AlgorithmConfig.preset(preset, **values)


def _algorithm_values(algorithm: AlgorithmConfig) -> dict[str, Any]:
    from rollbook.train.algorithm import PRESET_NAMES

    return {"preset": algorithm.name if algorithm.name in PRESET_NAMES else None, **algorithm.to_dict()}


def _preset_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the preset that an algorithm's values begin from."""
    return _algorithm_values(_build_algorithm({"preset": values["preset"]})) | {"preset": "grpo"}


def to_plain(value: Any) -> Any:
    """A section as plain values: text, numbers, lists, mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        section = get_section(type(value))
        parts = section.parts(value)
        return {name: to_plain(parts[name]) for name in section.keys}
    if isinstance(value, Mapping):
        return {name: to_plain(entry) for name, entry in value.items()}
    return [to_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def flatten(config: Any) -> Iterator[tuple[str, Any, bool]]:
    """(path, plain value, whether it may change) of every key, mappings and lists of sections taken apart."""

    def walk(path: str, value: Any, section: Section | None, free: bool) -> Iterator[tuple[str, Any, bool]]:
        if isinstance(value, Mapping) and value:
            for name, entry in value.items():
                spec = section.keys[name] if section is not None else None
                inner = find_section(spec.kind) if spec is not None else None
                mine = free or (spec is not None and spec.free)
                yield from walk(f"{path}.{name}" if path else name, entry, inner, mine)
        elif isinstance(value, list) and section is not None:
            for i, entry in enumerate(value):
                yield from walk(f"{path}.{i}", entry, section, free)
        else:
            yield path, value, free

    yield from walk("", to_plain(config), get_section(type(config)), False)


_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
TextFunction = Callable[[str, str, bool], str]
"""(path, text, whether its name is a secret's) -> the text to have in its place."""


def check_secrets(values: Mapping[str, Any]) -> None:
    """Refuse secrets that are written out.

    Args:
        values: A configuration as plain values.

    Raises:
        ConfigError: A URL, a header or an option holds one. The message names the key and does not quote the value.

    >>> check_secrets({"engine": {"url": "https://ana:${WORD}@host", "options": {"headers": {"X-Run": "7"}}}})
    >>> check_secrets({"engine": {"options": {"headers": {"Authorization": "Bearer abc"}}}})
    Traceback (most recent call last):
        ...
    rollbook.train.config.values.ConfigError: engine.options.headers.Authorization: got a secret as text, which
    config.yaml and --show-config would show, expected an environment variable: "${NAME}"
    """
    _map_texts(values, "", _check_text)


def expand_variables(value: Any, path: str) -> Any:
    """Replace `${NAME}` in the URLs, headers and secret options of a value by environment variables.

    Args:
        value: A value of a configuration.
        path: The path of its key.

    Raises:
        ConfigError: A variable is not set.

    >>> os.environ["WORD"] = "a/b"
    >>> expand_variables({"url": "https://ana:${WORD}@host", "headers": {"X-Api-Key": "${WORD}"}, "text": "${WORD}"}, "options")
    {'url': 'https://ana:a%2Fb@host', 'headers': {'X-Api-Key': 'a/b'}, 'text': '${WORD}'}
    """
    return _map_texts(value, path, _expand_text)


def _map_texts(value: Any, path: str, leaf: TextFunction, headers: bool = False, secret: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _map_texts(
                entry,
                f"{path}.{name}" if path else str(name),
                leaf,
                name == "headers" or headers,
                secret or is_secret_name(str(name), strict=headers),
            )
            for name, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, f"{path}.{i}", leaf, headers, secret) for i, item in enumerate(value)]
    if isinstance(value, str) and value:
        return leaf(path, value, secret)
    return value


def _check_text(path: str, text: str, secret: bool) -> str:
    try:
        secrets = [text] if secret else list(url_secrets(text).values())
    except ImportError:
        secrets = []  # without psycopg no book in PostgreSQL is opened
    except ValueError as error:
        raise ConfigError(path, str(error).removeprefix("url: ")) from None
    if all(_VARIABLE.search(part) for part in secrets):
        return text
    raise ConfigError(
        path,
        "got a secret as text, which config.yaml and --show-config would show, expected an environment variable: "
        + ('"${NAME}"' if secret else 'as in "https://user:${NAME}@host"'),
    )


def _expand_text(path: str, text: str, secret: bool) -> str:
    is_url = "://" in text

    def variable(match: re.Match[str]) -> str:
        variable_value = os.environ.get(match[1])
        if variable_value is None:
            raise ConfigError(path, f"got {match[0]}, and {match[1]} is not set in the environment")
        return quote(variable_value, safe="") if is_url else variable_value

    return _VARIABLE.sub(variable, text) if secret or is_url else text
