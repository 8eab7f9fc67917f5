"""A configuration as YAML, with a comment over every key.

Invariant: what is written loads back to an equal configuration, here and in any reader of YAML 1.1 or 1.2: text that a
reader could take for something else is in quotes, and numbers have the dot that older readers look for.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rollbook.train.config.kinds import Section, section_in
from rollbook.train.config.reading import scalar
from rollbook.train.config.schema import Config
from rollbook.train.config.sections import section_of

_BARE = re.compile(r"[A-Za-z_/][\w/.@+-]*(:[\w/.@+-]+)*", re.ASCII)
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""What some reader takes for more than text."""
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def shown(config: Config) -> str:
    """The whole configuration, defaults included: what a key is for stands over it, its default beside another value.

    >>> print(shown(Config(name="mine", optimizer={"lr": 1e-5}))[:100])
    # What the run is called.
    name: mine  # default: run
    # The run's folder; null: runs/NAME.
    out: null
    """
    return "\n".join(_section(config.to_dict(), section_of(Config), "")) + "\n"


def _section(values: Mapping[str, Any], section: Section, indent: str) -> Iterator[str]:
    usual = section.usual(values)
    for name, key in section.keys.items():
        inner = section_in(key.kind)
        doc = key.doc or (summary(inner) if inner is not None else "")
        if inner is not None and not indent:
            yield ""
        yield from textwrap.wrap(doc, 118, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        value = values[name]
        if inner is not None and isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _section(value, inner, indent + "  ")
        elif inner is not None and isinstance(value, list) and value:
            yield f"{indent}{name}:"
            for each in value:
                yield f"{indent}-"
                yield from _section(each, inner, indent + "  ")
        else:
            yield f"{indent}{name}: {flow(value)}{_aside(value, usual[name])}"


def _aside(value: Any, usual: Any) -> str:
    return "" if value == usual or usual in (None, {}, []) else f"  # default: {flow(usual)}"


def summary(section: Section) -> str:
    """What a section is: the first paragraph of its class's documentation."""
    return " ".join((section.of.__doc__ or "").split("\n\n")[0].split())


def flow(value: Any) -> str:
    """A value in one line.

    >>> print(flow({"lr": 1e-5, "on": ["no", "module:function", "a b", 3, None]}))
    {lr: 1.0e-05, "on": ["no", module:function, "a b", 3, null]}
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{text(name)}: {flow(each)}" for name, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float):
        return number(value)
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def number(value: float) -> str:
    """A number that every reader takes for one: 1e-05 is text to some.

    >>> number(1e-5), number(0.1), number(1e22), number(float("inf"))
    ('1.0e-05', '0.1', '1.0e+22', '.inf')
    """
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    digits, mark, power = repr(value).partition("e")
    return f"{digits if '.' in digits else digits + '.0'}{mark}{power}" if mark else digits


def text(value: str) -> str:
    """A text, in quotes unless it is text to every reader."""
    if _BARE.fullmatch(value) and value.lower() not in _WORDS and isinstance(scalar(value), str):
        return value
    return '"' + "".join(_ESCAPES.get(each) or (each if _is_plain(each) else _escaped(each)) for each in value) + '"'


def _is_plain(each: str) -> bool:
    return each.isprintable() and each != "\ufeff"


def _escaped(each: str) -> str:
    code = ord(each)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
