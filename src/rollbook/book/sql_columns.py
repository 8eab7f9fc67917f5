"""Tables around a query: one table out of batches whose columns differ, and a query's answer as rows, frames and text.

Invariant: a value is the same after `unify` as before, but for whole numbers of 64 bits beside floats, which round as
they do in SQL, and a column whose types agree is not copied; what `Result` hands out is all there is, and what it shows
is printable, escaped and short, whatever the values hold.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from rollbook.core.fields import COLUMNAR, DTYPES
from rollbook.core.ragged import promote

_NUMBERS = {pa.from_numpy_dtype(np.dtype(name)): name for name in COLUMNAR if DTYPES[name].storage == name}
_NUMBERS[pa.bool_()] = "bool"
# Every 64-bit whole number, signed or not.
_WIDE = pa.decimal128(20, 0)
_UNITS = ("s", "ms", "us", "ns")


def superset(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """The schema that holds all columns of all `schemas`, in the order in which they first appear.

    A column's type depends on the set of its types, not on their order:

    - numbers and booleans: the narrowest type that holds all exactly; else, for whole numbers (uint64 beside a signed
      type), decimal128(20, 0), and with a float among them float64;
    - list, large_list, fixed_size_list: the same kind if all are of it, else large_list, of the joined values;
    - string and its variants: large_string; binary and its variants: large_binary;
    - struct: all fields of all; dictionary: as its values; timestamp of one time zone: the finest unit;
    - null: whatever the others say.

    Anything else raises `ValueError` naming the column and its types.

    >>> a = pa.schema([("tokens", pa.large_list(pa.int32())), ("reward", pa.float32())])
    >>> b = pa.schema([("tokens", pa.large_list(pa.int64())), ("text", pa.string())])
    >>> superset([a, b])
    tokens: large_list<item: int64>
      child 0, item: int64
    reward: float
    text: string
    >>> superset([a, pa.schema([("reward", pa.string())])])
    Traceback (most recent call last):
        ...
    ValueError: column 'reward': got float and string, which have no type in common
    """
    found: dict[str, dict[pa.DataType, None]] = {}
    for schema in set_in_order(schemas):
        if len(set(schema.names)) != len(schema.names):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise ValueError(f"column {twice!r}: stands twice in one schema")
        for field in schema:
            found.setdefault(field.name, {})[field.type] = None
    return pa.schema([pa.field(name, _join(name, list(kinds))) for name, kinds in found.items()])


def set_in_order(schemas: Iterable[pa.Schema]) -> list[pa.Schema]:
    """The different ones among many schemas, which of a book's thousands of frames are a few."""
    return list(dict.fromkeys(schema.remove_metadata() for schema in schemas))


def unify(batches: Iterable[pa.RecordBatch], schema: pa.Schema | None = None) -> pa.Table:
    """One table of all batches, a chunk for each. Columns that a batch lacks are null there.

    `schema`: the columns wanted and their types (default: the superset of the batches'). A column of a batch that
    is not in it is left out; one whose type it cannot hold raises `ValueError`.

    >>> narrow = pa.record_batch({"step": pa.array([1, 2], pa.int32())})
    >>> wide = pa.record_batch({"step": pa.array([2**40]), "note": ["late"]})
    >>> unify([narrow, wide]).to_pydict()
    {'step': [1, 2, 1099511627776], 'note': [None, None, 'late']}
    """
    batches = list(batches)
    if schema is None:
        schema = superset(batch.schema for batch in batches)
    else:
        for found in set_in_order(batch.schema for batch in batches):
            _check_holds(schema, found)
    return pa.Table.from_batches([_fit(batch, schema) for batch in batches], schema=schema)


def _check_holds(schema: pa.Schema, found: pa.Schema) -> None:
    for field in schema:
        places = found.get_all_field_indices(field.name)
        if len(places) > 1:
            raise ValueError(f"column {field.name!r}: stands twice in one schema")
        kind = found.field(places[0]).type if places else field.type
        if kind != field.type and _join(field.name, [field.type, kind]) != field.type:
            raise ValueError(f"column {field.name!r}: got {kind}, which {field.type} cannot hold")


def _fit(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if batch.schema.equals(schema):
        return batch
    arrays = []
    for field in schema:
        place = batch.schema.get_field_index(field.name)
        if place < 0:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        elif batch.column(place).type == field.type:
            arrays.append(batch.column(place))
        else:
            # Not "safe", which would refuse 2**53 + 1 as a float: what the types allow was settled above.
            column = batch.column(place)
            counted = retyped(column.type, _COUNTED)
            if counted != column.type:  # Arrow casts a bool to any number but a decimal.
                column = column.cast(counted, safe=False)
            arrays.append(column.cast(field.type, safe=False))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


_COUNTED = {pa.bool_(): pa.uint8()}


def retyped(kind: pa.DataType, instead: Mapping[pa.DataType, pa.DataType]) -> pa.DataType:
    """The type with others in the place of some, in lists and structs too.

    >>> retyped(pa.large_list(pa.bool_()), {pa.bool_(): pa.uint8()})
    LargeListType(large_list<item: uint8>)
    """
    if pa.types.is_large_list(kind):
        return pa.large_list(retyped(kind.value_type, instead))
    if pa.types.is_list(kind):
        return pa.list_(retyped(kind.value_type, instead))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(retyped(kind.value_type, instead), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, retyped(field.type, instead)) for field in kind])
    return instead.get(kind, kind)


def _join(name: str, kinds: list[pa.DataType]) -> pa.DataType:
    """The one type for values of all `kinds` (at least one)."""
    plain = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in kinds]
    distinct = list(dict.fromkeys(kind for kind in plain if not pa.types.is_null(kind)))
    if not distinct:
        return pa.null()
    if len(distinct) == 1:
        return kinds[0] if len(set(kinds)) == 1 else distinct[0]
    joined: pa.DataType | None = None
    if all(kind in _NUMBERS or kind == _WIDE for kind in distinct):
        joined = _join_numbers(distinct)
    elif _all(distinct, pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list):
        joined = _join_lists(name, distinct)
    elif _all(distinct, pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view):
        joined = pa.large_string()
    elif _all(
        distinct,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
        pa.types.is_fixed_size_binary,
    ):
        joined = pa.large_binary()
    elif _all(distinct, pa.types.is_struct):
        fields: dict[str, dict[pa.DataType, None]] = {}
        for kind in distinct:
            for field in kind:
                fields.setdefault(field.name, {})[field.type] = None
        joined = pa.struct([pa.field(key, _join(f"{name}.{key}", list(types))) for key, types in fields.items()])
    elif _all(distinct, pa.types.is_timestamp) and len({kind.tz for kind in distinct}) == 1:
        joined = pa.timestamp(max((kind.unit for kind in distinct), key=_UNITS.index), distinct[0].tz)
    if joined is None:
        names = " and ".join(sorted(map(str, distinct)))
        raise ValueError(f"column {name!r}: got {names}, which have no type in common")
    return joined


def _all(kinds: list[pa.DataType], *tests: Callable[[pa.DataType], bool]) -> bool:
    return all(any(test(kind) for test in tests) for kind in kinds)


def _join_numbers(kinds: list[pa.DataType]) -> pa.DataType:
    exact = promote(_NUMBERS[kind] for kind in kinds) if _WIDE not in kinds else None
    if exact is not None:
        return pa.from_numpy_dtype(np.dtype(exact))
    return pa.float64() if any(pa.types.is_floating(kind) for kind in kinds) else _WIDE


def _join_lists(name: str, kinds: list[pa.DataType]) -> pa.DataType:
    value = _join(name, list(dict.fromkeys(kind.value_type for kind in kinds)))
    if _all(kinds, pa.types.is_list):
        return pa.list_(value)
    sizes = {kind.list_size if pa.types.is_fixed_size_list(kind) else None for kind in kinds}
    size = sizes.pop()
    return pa.list_(value, size) if size is not None and not sizes else pa.large_list(value)


# --- a query's answer -------------------------------------------------------------------------------------------


class Result:
    """The rows of a query's answer.

    Columns of one name get a number (`a`, `a_1`). Whole numbers of 128 bits, which sums of integers are in DuckDB,
    come as int64 where all fit, else as decimals.

    >>> result = Result(pa.table({"task": ["a", "b"], "tokens": [[1, 2], list(range(4096))]}))
    >>> len(result), result.columns, result.rows()[0]
    (2, ['task', 'tokens'], ('a', [1, 2]))
    >>> result
    task  tokens
    a     [1, 2]
    b     [0, 1, 2, 3, … 4096 in all]
    """

    def __init__(self, table: pa.Table, more: bool = False) -> None:
        for place, field in enumerate(table.schema):
            if pa.types.is_decimal128(field.type) and field.type.precision == 38 and field.type.scale == 0:
                try:
                    table = table.set_column(place, field.name, table.column(place).cast(pa.int64()))
                except pa.ArrowInvalid:
                    continue
        self._table = table.rename_columns(_distinct(table.column_names))
        self.more = more
        """Whether `max_rows` cut off rows."""

    @property
    def columns(self) -> list[str]:
        """The names, each once."""
        names: list[str] = self._table.column_names
        return names

    def arrow(self) -> pa.Table:
        """An Arrow table; texts and lists with 64-bit offsets."""
        return self._table

    def pandas(self) -> Any:
        """A pandas DataFrame; lists are numpy arrays."""
        try:
            return self._table.to_pandas()
        except ImportError:
            raise ImportError("Result.pandas needs pandas: pip install pandas") from None

    def polars(self) -> Any:
        """A polars DataFrame."""
        try:
            import polars
        except ImportError:
            raise ImportError("Result.polars needs polars: pip install polars") from None
        return polars.from_arrow(self._table)

    def rows(self) -> list[tuple[Any, ...]]:
        """All rows, in plain Python values."""
        return list(self)

    def dicts(self) -> list[dict[str, Any]]:
        """All rows, by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self]

    def __len__(self) -> int:
        count: int = self._table.num_rows
        return count

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def text(self, rows: int = 20, width: int = 160) -> str:
        """The first rows as lines of at most `width` characters; long values, lists and rows of columns are cut.

        What EXPLAIN says comes as it is.
        """
        if self.columns == ["explain_key", "explain_value"]:
            return "\n".join(plan for _, plan in self)
        shown = self._cells(rows, 40)
        numeric = [pa.types.is_integer(f.type) or pa.types.is_floating(f.type) for f in self._table.schema]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        ends = list(itertools.accumulate(size + 2 for size in widths))
        fit = max(1, sum(end - 2 <= width for end in ends))
        lines = []
        for line in shown:
            cells = zip(line[:fit], widths, numeric, strict=False)
            lines.append("  ".join(c.rjust(size) if right else c.ljust(size) for c, size, right in cells).rstrip())
        hidden = [
            f"{len(self) - rows} more rows" if len(self) > rows else "",
            f"{len(widths) - fit} more columns: {_cut(', '.join(self.columns[fit:]), width)}"
            if fit < len(widths)
            else "",
            "cut by max_rows" if self.more else "",
            "no rows" if not len(self) else "",
        ]
        note = "; ".join(filter(None, hidden))
        return "\n".join([*lines, f"({note})"] if note else lines)

    __repr__ = text

    def _repr_html_(self) -> str:
        head, *body = self._cells(50, 200)
        parts = ["<table><thead><tr>", *(f"<th>{html.escape(cell)}</th>" for cell in head), "</tr></thead><tbody>"]
        for line in body:
            parts += ["<tr>", *(f"<td>{html.escape(cell)}</td>" for cell in line), "</tr>"]
        more = f"<p>{len(self) - 50} more rows</p>" if len(self) > 50 else ""
        return "".join([*parts, "</tbody></table>", more])

    def _cells(self, rows: int, size: int) -> list[list[str]]:
        first = self._table.slice(0, rows)
        columns = [[_cut(str(n), size), *(_cell(v, size) for v in first.column(n))] for n in self.columns]
        return [list(line) for line in zip(*columns, strict=True)]


def _distinct(names: list[str]) -> list[str]:
    used = set(names)
    seen: set[str] = set()
    result = []
    for name in names:
        new = name
        numbers = itertools.count(1)
        while new in seen or (new != name and new in used):
            new = f"{name}_{next(numbers)}"
        seen.add(new)
        result.append(new)
    return result


def _cell(value: pa.Scalar, size: int) -> str:
    """A value as one short line; of a list of thousands only the first few are looked at."""
    if not value.is_valid:
        return "NULL"
    kind = value.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        count = len(value.values)
        few = count if count <= 6 else 4
        inside = ", ".join(_cell(each, max(8, size // 2)) for each in value.values.slice(0, few))
        tail = f", … {count} in all]" if few < count else "]"
        return "[" + _cut(inside, max(8, size - len(tail) - 1)) + tail
    if pa.types.is_floating(kind):
        return f"{value.as_py():.6g}" if len(repr(value.as_py())) > 12 else repr(value.as_py())
    return _cut(str(value.as_py()), size)


def _cut(text: str, size: int) -> str:
    # Texts come from models: what is not printable would move the cursor or colour the terminal.
    short = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: size + 1])
    return short if len(short) <= size else short[: size - 1] + "…"
