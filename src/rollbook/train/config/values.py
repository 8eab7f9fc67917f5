"""Kinds of configuration values, dataclasses as sections, and the rejection of secrets.

Invariant: a value that was read has exactly the annotated type and is within its bounds. It is plain (text, numbers,
booleans, null, lists, mappings) and a copy. Anything else is a `ConfigError` with the full path of the key.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
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
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias
from urllib.parse import quote

from rollbook.core.addresses import is_secret_name, redacted, url_secrets
from rollbook.core.checks import describe_range, suggest
from rollbook.core.errors import RollbookError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rollbook.train.algorithm import AlgorithmConfig


RawValue: TypeAlias = "str | float | bool | Sequence[Any] | Mapping[str, Any] | None"
"""A value of a file, of the command line or of a caller, before it is checked."""


class ConfigError(RollbookError, ValueError):
    """Raised for an invalid key or value of a configuration.

    Args:
        path: Path of the key.
        message: What is wrong.
        source: File and line, or argument, that set the key.

    >>> error = ConfigError("lr", "got -1, expected a number > 0").under("optimizer")
    >>> str(error), str(error.at("my.yaml, line 3"))
    ('optimizer.lr: got -1, expected a number > 0', 'optimizer.lr: got -1, expected a number > 0 (my.yaml, line 3)')
    """

    def __init__(self, path: str, message: str, source: str = "") -> None:
        super().__init__(f"{path}: {message}" + (f" ({source})" if source else ""))
        self.path, self.message, self.source = path, message, source

    def under(self, name: str) -> ConfigError:
        """Return the error with `name` before its path.

        Args:
            name: Name of a section.

        Returns:
            A new error.
        """
        return ConfigError(f"{name}.{self.path}" if self.path else name, self.message, self.source)

    def at(self, source: str) -> ConfigError:
        """Return the error with another source.

        Args:
            source: File and line.

        Returns:
            A new error.
        """
        return ConfigError(self.path, self.message, source)


class Kind(Protocol):
    """A kind of value: a type with bounds."""

    @property
    def expected(self) -> str:
        """Description for errors: `a number from 0 to 1`."""

    def read(self, value: RawValue) -> Any:
        """Check and convert a value; raise `ConfigError` with a path relative to the key."""


def _value_error(value: RawValue, expected: str, hint: str = "") -> ConfigError:
    text = repr(redacted(value) if isinstance(value, str) else value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else text
    return ConfigError("", f"got {text}, expected {expected}{hint}")


@dataclass(frozen=True)
class Boolean:
    """True or false; 0 and 1 are rejected."""

    expected: str = "true or false"

    def read(self, value: RawValue) -> bool:
        if not isinstance(value, bool):
            raise _value_error(value, self.expected)
        return value


@dataclass(frozen=True)
class Number:
    """A finite number within its bounds.

    Args:
        integer: Whether only integers are allowed.
        low: Lower bound.
        high: Upper bound.
        above: Lower bound, itself excluded.
        below: Upper bound, itself excluded.
        whole_from: Value from which only integers are allowed, for keys that are a fraction (0.1) or a count (100).

    >>> Number(integer=True, low=1).read(1e3), Number(above=0, high=1).expected
    (1000, 'a number in (0, 1]')
    """

    integer: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    whole_from: float | None = None

    @property
    def expected(self) -> str:
        kind = "an integer" if self.integer else "a number"
        text = describe_range(kind, self.low, self.high, self.above, self.below)
        if self.whole_from:
            text += f" (< {self.whole_from:g}: a fraction; >= {self.whole_from:g}: a count)"
        return text

    def read(self, value: RawValue) -> float | int:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise _value_error(value, self.expected)
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


@dataclass(frozen=True)
class Text:
    """A text.

    Args:
        choices: Allowed texts; empty: any.
        pattern: Regular expression that must match.
        description: Description of the pattern in errors.
    """

    choices: tuple[str, ...] = ()
    pattern: str = ""
    description: str = ""

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self.choices)}" if self.choices else self.description or "a string"

    def read(self, value: RawValue) -> str:
        if not isinstance(value, str):
            can_be_quoted = isinstance(value, (int, float, bool)) and not self.choices and not self.pattern
            text = str(value).lower() if isinstance(value, bool) else value
            raise _value_error(value, self.expected, f' (in quotes it would be: "{text}")' if can_be_quoted else "")
        if self.choices and value not in self.choices:
            close = difflib.get_close_matches(value, self.choices, n=1)
            raise _value_error(value, self.expected, f"; did you mean {close[0]!r}?" if close else "")
        if self.pattern and not re.fullmatch(self.pattern, value):
            raise _value_error(value, self.expected)
        return value


@dataclass(frozen=True)
class Nullable:
    """A value or null."""

    inner: Kind

    @property
    def expected(self) -> str:
        text = self.inner.expected
        return f"null or {text}" if " each " in text else f"{text} or null"

    def read(self, value: RawValue) -> Any:
        try:
            return None if value is None else self.inner.read(value)
        except ConfigError as error:
            if error.path or not error.message.endswith(f"expected {self.inner.expected}"):
                raise
            message = error.message.removesuffix(self.inner.expected) + self.expected
            raise ConfigError("", message) from None


@dataclass(frozen=True)
class Either:
    """One of several kinds; the first that accepts a value reads it."""

    kinds: tuple[Kind, ...]

    @property
    def expected(self) -> str:
        return " or ".join(kind.expected for kind in self.kinds)

    def read(self, value: RawValue) -> Any:
        for kind in self.kinds:
            try:
                return kind.read(value)
            except ConfigError:
                continue
        raise _value_error(value, self.expected)


@dataclass(frozen=True)
class ListOf:
    """A list of values of one kind, read as a tuple. Without a `length`, a single value is a list of one."""

    item: Kind
    length: int | None = None

    @property
    def expected(self) -> str:
        if self.length is not None:
            return f"a list of {self.length}: each {self.item.expected}"
        return f"a list: each {self.item.expected}"

    def read(self, value: RawValue) -> tuple[Any, ...]:
        if isinstance(value, (list, tuple)):
            entries: Sequence[Any] = value
        elif self.length is not None or value is None:
            raise _value_error(value, self.expected)
        else:
            entries = [value]
        if self.length is not None and len(entries) != self.length:
            raise _value_error(value, self.expected)
        items = []
        for i, entry in enumerate(entries):
            try:
                items.append(self.item.read(entry))
            except ConfigError as error:
                raise error.under(str(i)) from None
        return tuple(items)


@dataclass(frozen=True)
class PlainValue:
    """Any plain value, such as an option that is passed on."""

    expected: str = "a string, a number, true, false, null, a list or a mapping"

    def read(self, value: RawValue, depth: int = 0) -> Any:
        if depth > 50:
            raise ConfigError("", "got more than 50 levels of nesting, expected fewer")
        if isinstance(value, Mapping):
            return _read_mapping(value, lambda entry: self.read(entry, depth + 1))
        if isinstance(value, (list, tuple)):
            return [self.read(entry, depth + 1) for entry in value]
        if value is None or (isinstance(value, (str, bool, int, float)) and value == value):
            return value
        raise _value_error(value, self.expected)


@dataclass(frozen=True)
class MappingOf:
    """A mapping from names to values of one kind; `names` are those allowed, if not any."""

    item: Kind
    names: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        text = f"a mapping of {', '.join(self.names)}" if self.names else "a mapping"
        return text if isinstance(self.item, PlainValue) else f"{text}, each {self.item.expected}"

    def read(self, value: RawValue) -> dict[str, Any]:
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
            raise ConfigError("", f"got {name!r} as a name, expected a string (in quotes: '{name}')")
        try:
            entries[name] = read(entry)
        except ConfigError as error:
            raise error.under(name) from None
    return entries


def unknown_key_error(name: str, names: Sequence[str], elsewhere: Sequence[str] = ()) -> ConfigError:
    """Build the error of an unknown key, which suggests another one.

    Args:
        name: The unknown key.
        names: Keys of the section.
        elsewhere: Paths of keys with this name in other sections, which are suggested instead.
    """
    name = name or "''"
    if elsewhere:
        return ConfigError(name, f"unknown key; did you mean {' or '.join(map(repr, elsewhere))}?")
    return ConfigError(name, f"unknown key{suggest(name, list(names))}")


# --- sections ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """A key of a section.

    Args:
        name: Its name.
        kind: Kind of its values.
        default: Default, as in a file.
        doc: Description.
        changeable: Whether a run may be resumed with another value.
        resets: Keys of the same section that return to their defaults if a file or an argument changes this one; `*`:
            all.
        complete_with: Name that makes a mapping complete. Such a mapping replaces that of the base; another one is
            merged with it.
        path: Whether a text may be a path, which is relative to the file that contains it.
    """

    name: str
    kind: Kind
    default: Any
    doc: str
    changeable: bool = False
    resets: tuple[str, ...] = ()
    complete_with: str = ""
    path: bool = False


@dataclass(frozen=True)
class Section:
    """A dataclass as a section of a configuration.

    Args:
        cls: The dataclass.
        keys: Keys by name.
        build: Builds an instance from the values of its keys.
        values: Returns the values of the keys of an instance.
        defaults: Returns the plain defaults for the plain values of a section, which may name a preset.
        short_key: The key that a text in place of the section sets.
    """

    cls: type
    keys: Mapping[str, Key]
    build: Callable[[dict[str, Any]], Any]
    values: Callable[[Any], dict[str, Any]]
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    short_key: str = ""

    @property
    def expected(self) -> str:
        return f"a mapping of its keys{f', or its {self.short_key}' if self.short_key else ''}"

    def read(self, value: RawValue) -> Any:
        if isinstance(value, self.cls):
            return value
        value = self.expand(value)
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
            return self.build(values)
        except ConfigError:
            raise
        except ValueError as error:  # of a dataclass that checks its fields: "optimizer.lr: got ..."
            location, _, message = str(error).partition(": ")
            raise ConfigError(location.rpartition(".")[2], message) from error

    def expand(self, value: RawValue) -> Any:
        """Expand the short form of a section, a text, to a mapping; null becomes an empty one."""
        if value is None:
            return {}
        return {self.short_key: value} if self.short_key and isinstance(value, str) else value


def find_section(kind: Kind) -> Section | None:
    """Return the section of a kind that is a section, an optional one, or a list of them; else `None`.

    Args:
        kind: The kind.
    """
    while isinstance(kind, (Nullable, ListOf)):
        kind = kind.inner if isinstance(kind, Nullable) else kind.item
    return kind if isinstance(kind, Section) else None


def parse_annotation(hint: Any, limits: Mapping[str, Any]) -> Kind:
    """Return the kind of a type annotation.

    Args:
        hint: The annotation.
        limits: Arguments of `Number`, `Text` or `MappingOf`.

    Raises:
        TypeError: Keys cannot have this annotation.

    >>> parse_annotation(float | None, {"above": 0}).expected
    'a number > 0 or null'
    >>> parse_annotation(tuple[str, ...], {}).read("stop")
    ('stop',)
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        rest = [arg for arg in args if arg is not type(None)]
        kinds = tuple(parse_annotation(arg, limits) for arg in rest)
        kind = kinds[0] if len(kinds) == 1 else Either(kinds)
        return kind if len(rest) == len(args) else Nullable(kind)
    if origin is Literal:
        return Text(choices=args)
    if origin is tuple and args[-1] is ...:
        return ListOf(parse_annotation(args[0], limits))
    if origin is tuple and len(set(args)) == 1:
        return ListOf(parse_annotation(args[0], limits), len(args))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return MappingOf(parse_annotation(args[1], {}), limits.get("names", ()))
    if hint is Any:
        return PlainValue()
    if hint is bool:
        return Boolean()
    if hint in (int, float):
        return Number(integer=hint is int, **limits)
    if hint is str:
        return Text(**limits)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return get_section(hint)
    raise TypeError(f"annotation: got {hint!r}, expected one that keys can have")


@functools.cache
def read_field_docs(cls: type) -> dict[str, str]:
    """Return the descriptions of the fields of a dataclass, each in one line.

    They are in the section `Args` of the class, or in strings under the fields.

    Args:
        cls: The dataclass.

    Returns:
        Descriptions by field; those under the fields only if the source code is installed.

    >>> from rollbook.train.optimizer import OptimizerConfig
    >>> read_field_docs(OptimizerConfig)["eps"]
    "Term added to AdamW's denominator."
    """
    arguments = re.search(r"^Args:\n((?:    .*\n)*)", inspect.cleandoc(cls.__doc__ or "") + "\n", re.MULTILINE)
    entries = re.split(r"^    (\w+): ", "" if arguments is None else arguments[1], flags=re.MULTILINE)
    docs = {name: " ".join(text.split()) for name, text in zip(entries[1::2], entries[2::2], strict=True)}
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except OSError:
        return docs
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
    changeable: bool = False,
    resets: tuple[str, ...] = (),
    complete_with: str = "",
    path: bool = False,
    **limits: Any,
) -> Any:
    """Declare a key of a section as a dataclass field.

    Args:
        default: The default value.
        changeable: As in `Key`; so are the following.
        resets: Keys of the same section that return to their defaults.
        complete_with: Name that makes a mapping complete.
        path: Whether a text may be a path.
        limits: `low`, `high`, `above`, `below` and `whole_from` of numbers; `choices`, `pattern` and `description` of
            texts; `names` of mappings.
    """
    metadata = {
        "limits": limits,
        "changeable": changeable,
        "resets": resets,
        "complete_with": complete_with,
        "path": path,
    }
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_fields(instance: DataclassInstance) -> None:
    """Read every field of a section by its kind and store the result.

    Args:
        instance: The section, in its `__post_init__`.

    Raises:
        ConfigError: A value is not valid.
    """
    for name, spec in get_section(type(instance)).keys.items():
        try:
            value = spec.kind.read(getattr(instance, name))
        except ConfigError as error:
            raise error.under(name) from None
        object.__setattr__(instance, name, value)


@functools.cache
def get_section(cls: type) -> Section:
    """Return a dataclass as a section.

    Args:
        cls: The dataclass.
    """
    # These load torch, so they are imported when a configuration is created.
    from rollbook.train.algorithm import PRESET_NAMES, AlgorithmConfig
    from rollbook.train.optimizer import OptimizerConfig

    names = {"AlgorithmConfig": AlgorithmConfig, "OptimizerConfig": OptimizerConfig}
    hints, docs = typing.get_type_hints(cls, localns=names), read_field_docs(cls)
    keys = {}
    if cls is AlgorithmConfig:
        doc = "Preset to start from; null: all settings are given."
        keys["preset"] = Key("preset", Nullable(Text(choices=tuple(PRESET_NAMES))), "grpo", doc, resets=("*",))
    for spec in dataclasses.fields(cls):
        metadata = spec.metadata
        default = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
        keys[spec.name] = Key(
            spec.name,
            parse_annotation(hints[spec.name], metadata.get("limits", {})),
            list(default) if isinstance(default, tuple) else default,
            docs.get(spec.name, ""),
            metadata.get("changeable", False),
            metadata.get("resets", _RESETS.get(spec.name, ()) if cls is AlgorithmConfig else ()),
            metadata.get("complete_with", ""),
            metadata.get("path", False),
        )
    if cls is AlgorithmConfig:
        return Section(cls, keys, _build_algorithm, _algorithm_values, _preset_values, "preset")
    defaults = {name: to_plain(spec.default) for name, spec in keys.items()}
    return Section(cls, keys, lambda values: cls(**values), vars, lambda values: defaults, getattr(cls, "SHORT", ""))


_RESETS = {"loss": ("loss_options",), "estimator": ("estimator_options",)}


def _build_algorithm(values: dict[str, Any]) -> AlgorithmConfig:
    from rollbook.train.algorithm import AlgorithmConfig

    preset = values.pop("preset", "grpo")
    return AlgorithmConfig(**values) if preset is None else AlgorithmConfig.preset(preset, **values)


def _algorithm_values(algorithm: AlgorithmConfig) -> dict[str, Any]:
    from rollbook.train.algorithm import PRESET_NAMES

    return {"preset": algorithm.name if algorithm.name in PRESET_NAMES else None, **algorithm.to_dict()}


def _preset_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the preset that the values of an algorithm start from."""
    return _algorithm_values(_build_algorithm({"preset": values["preset"]})) | {"preset": "grpo"}


def to_plain(value: RawValue | DataclassInstance) -> Any:
    """Convert a section, or a value of one, to plain values: texts, numbers, lists, mappings.

    Args:
        value: The section or value.

    >>> from rollbook.train.optimizer import OptimizerConfig
    >>> to_plain(OptimizerConfig(betas=(0.9, 0.95)))["betas"]
    [0.9, 0.95]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        section = get_section(type(value))
        values = section.values(value)
        return {name: to_plain(values[name]) for name in section.keys}
    if isinstance(value, Mapping):
        return {name: to_plain(entry) for name, entry in value.items()}
    return [to_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def flatten(config: DataclassInstance) -> Iterator[tuple[str, Any, bool]]:
    """Iterate over the keys of all sections.

    Args:
        config: A section that contains others.

    Yields:
        The path of a key, its plain value, and whether a resumed run may change it.
    """

    def walk(path: str, value: RawValue, section: Section | None, changeable: bool) -> Iterator[tuple[str, Any, bool]]:
        if isinstance(value, Mapping) and value:
            for name, entry in value.items():
                spec = section.keys[name] if section is not None else None
                inner = find_section(spec.kind) if spec is not None else None
                is_changeable = changeable or (spec is not None and spec.changeable)
                yield from walk(f"{path}.{name}" if path else name, entry, inner, is_changeable)
        elif isinstance(value, list) and section is not None:
            for i, entry in enumerate(value):
                yield from walk(f"{path}.{i}", entry, section, changeable)
        else:
            yield path, value, changeable

    yield from walk("", to_plain(config), get_section(type(config)), False)


_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_SCHEME = re.compile("[A-Za-z-]{1,16} (?=[$])")
"""The scheme in a header, such as `Bearer ${NAME}`."""
_SECRET_IN_HEADER = re.compile(
    "auth|cookie|credential|key|passphrase|passw|secret|session|signature|token", re.IGNORECASE
)
"""Names of headers with secrets."""
TextFunction = Callable[[str, str, bool, bool], str]
"""Maps the path of a text, the text, whether its key is named like a secret, and whether it is a header, to a new
text."""


def check_secrets(values: Mapping[str, Any]) -> None:
    """Reject secrets that are written out.

    Args:
        values: A configuration as plain values.

    Raises:
        ConfigError: A URL, a header or an option contains one. The message does not quote it.

    >>> check_secrets({"engine": {"url": "https://ana:${WORD}@host", "options": {"headers": {"X-Run": "7"}}}})
    >>> check_secrets({"engine": {"options": {"headers": {"Authorization": "Bearer abc"}}}})
    Traceback (most recent call last):
        ...
    rollbook.train.config.values.ConfigError: engine.options.headers.Authorization: got a secret as text, which
    config.yaml and --show-config would show, expected an environment variable: "${NAME}" or "Bearer ${NAME}"
    """
    _map_texts(values, "", _check_text)


def expand_variables(value: RawValue, path: str) -> Any:
    """Replace `${NAME}` in the URLs, headers and secret options of a value by environment variables.

    Args:
        value: A value of a configuration.
        path: The path of its key.

    Raises:
        ConfigError: A variable is not set.

    >>> os.environ["WORD"] = "a/b"
    >>> options = {"url": "https://ana:${WORD}@host", "headers": {"X-Api-Key": "${WORD}"}, "text": "${WORD}"}
    >>> expand_variables(options, "options")
    {'url': 'https://ana:a%2Fb@host', 'headers': {'X-Api-Key': 'a/b'}, 'text': '${WORD}'}
    """
    return _map_texts(value, path, _expand_text)


def _map_texts(value: RawValue, path: str, leaf: TextFunction, headers: bool = False, secret: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _map_texts(
                entry,
                f"{path}.{name}" if path else str(name),
                leaf,
                name == "headers" or headers,
                secret or bool(_SECRET_IN_HEADER.search(str(name)) if headers else is_secret_name(str(name))),
            )
            for name, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, f"{path}.{i}", leaf, headers, secret) for i, item in enumerate(value)]
    if isinstance(value, (int, float)) and headers and secret:
        value = str(value)
    if isinstance(value, str) and value:
        return leaf(path, value, secret, headers)
    return value


def _check_text(path: str, text: str, secret: bool, header: bool) -> str:
    try:
        parts = {} if secret else url_secrets(text)
    except ImportError:
        parts = {}  # without psycopg no PostgreSQL address is used
    except ValueError as error:
        raise ConfigError(path, str(error).removeprefix("url: ")) from None
    if "user info" in parts:
        user, colon, password = parts["user info"].partition(":")
        parts["user info"] = password if colon else user
    if secret:
        parts = {"": _SCHEME.sub("", text, count=1) if header else text}
    if all(map(_VARIABLE.fullmatch, parts.values())):
        return text
    expected = '"${NAME}" or "Bearer ${NAME}"' if header else '"${NAME}"'
    raise ConfigError(
        path,
        "got a secret as text, which config.yaml and --show-config would show, expected an environment variable: "
        + (expected if secret else 'as in "https://user:${NAME}@host"'),
    )


def _expand_text(path: str, text: str, secret: bool, header: bool) -> str:
    is_url = "://" in text

    def variable(match: re.Match[str]) -> str:
        variable_value = os.environ.get(match[1])
        if variable_value is None:
            raise ConfigError(path, f"got {match[0]}, and {match[1]} is not set in the environment")
        return quote(variable_value, safe="") if is_url else variable_value

    return _VARIABLE.sub(variable, text) if secret or header or is_url else text
