"""Kinds: the Arrow types that a book's columns have had, noted in the ledger so that SQL knows its tables at once.

Invariant: types are read from their names by the few rules below, and from nothing else: what a ledger says of a column
can only be a type that a frame may hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pyarrow as pa

from rollbook.book.sql_columns import superset
from rollbook.core import arrow
from rollbook.core.columns import PLAIN_TYPES
from rollbook.core.experiences import Experiences
from rollbook.core.fields import BY_CODE, DTYPES, FIELDS
from rollbook.core.ragged import Ragged
from rollbook.core.row_layout import RowLayout

_TENSOR = re.compile(r"([a-z0-9]{3,8})((?:x[0-9]{1,9}){0,32})")
_PORTABLE = {d.name: pa.from_numpy_dtype(d.portable) for d in BY_CODE.values()}


def column_types(many: Experiences | RowLayout) -> set[tuple[str, str]]:
    """(field, type) of the tensor columns: `("tokens", "int32")`, `("routed_experts", "int16x24x8")`.

    >>> from rollbook import Experience, Experiences
    >>> sorted(column_types(Experiences([Experience(tokens=[1, 2, 3])])))
    [('action_mask', 'bool'), ('tokens', 'int32')]
    """
    return {
        (name, "x".join([column.dtype, *map(str, column.trailing)]))
        for name, column in many.columns.items()
        if isinstance(column, Ragged) and name in FIELDS
    }


def arrow_types(noted: Iterable[tuple[str, str]]) -> dict[str, pa.DataType]:
    """The type of every field's column that holds all that was noted of it."""
    found: dict[str, list[pa.DataType]] = {}
    for name, text in noted:
        kind = _parse_type(text)
        if name in FIELDS and FIELDS[name].kind == "tensor" and kind is not None:
            found.setdefault(name, []).append(kind)
    types = {}
    for name, field in FIELDS.items():
        if field.kind != "tensor":
            types[name] = PLAIN_TYPES[field.kind, ""]
        elif name in found:
            types[name] = superset([pa.schema([(name, kind)]) for kind in found[name]]).field(name).type
        else:
            types[name] = arrow.empty_type(field)
    return types


def _parse_type(text: object) -> pa.DataType | None:
    match = _TENSOR.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[1] not in _PORTABLE or match[1] not in DTYPES:
        return None
    kind = _PORTABLE[match[1]]
    for size in reversed([int(part) for part in match[2].split("x") if part]):
        kind = pa.list_(kind, size)
    return pa.large_list(kind)
