"""Tables: the book as SQL sees it.

Invariant: a table's columns come from the ledger where it has them, else from the frames, and only those that a query
names are loaded. Nothing here can be written to.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rollbook.book import query, schema
from rollbook.book.query import Result, superset, unify
from rollbook.book.read import LEDGER_TYPES, frame_arrays, ledger_arrays
from rollbook.core import columns as arrow
from rollbook.core.columns import PLAIN_TYPES
from rollbook.core.fields import BY_CODE, DTYPES, FIELDS
from rollbook.core.ids import EID, step_of

if TYPE_CHECKING:
    from rollbook.book.book import Book

_KINDS = {"INT": pa.int64(), "REAL": pa.float64(), "EVENT_ID": pa.int64(), "BYTES": pa.large_binary()}
SHOWN = {
    "events": ("id", "time", "seq", "uid", "consumer", "kind", "reason", "step", "lease", "detail"),
    "work": ("seq", "uid", "consumer", "state", "reason", "rank", "weight", "version", "uses", "attempts", "lease"),
    "leases": ("id", "consumer", "holder", "made", "expires", "seconds", "state", "count"),
    "revisions": ("seq", "uid", "n", "time", "author", "reason", "fields"),
    "checkpoints": ("name", "event", "seq", "made"),
    "media": ("hash", "size", "uses"),
}
"""The ledger's tables that queries see, with ids and names in the place of numbers; `ledger` is another name of
`events`."""


_WORK = (
    "(SELECT seq, consumer, state, reason, rank, weight, version, uses, attempts, lease FROM work UNION ALL "
    "SELECT records.seq, inbox.consumer, 'waiting', NULL, NULL, NULL, records.version_min, 0, 0, NULL FROM inbox "
    "JOIN records ON records.seq BETWEEN inbox.first AND inbox.last AND records.evaluation = 0) AS work"
)
"""`work` with the records of inboxes, which wait and have no rank yet."""


def _type(table: str, column: str) -> pa.DataType:
    if column in ("uid", "consumer"):
        return pa.large_string()
    if (table, column) == ("media", "uses"):
        return pa.int64()
    declared = next(definition for definition in schema.TABLES[table] if definition.split()[0] == column).split()[1]
    return _KINDS.get(declared.strip("{}"), pa.large_string())


class LedgerTable:
    """A table of the ledger."""

    def __init__(self, book: Book, name: str) -> None:
        self.book = book
        self.name = name
        self.schema = pa.schema([(column, _type(name, column)) for column in SHOWN[name]])

    def load(self, columns: list[str]) -> pa.Table:
        """These columns, read in one go."""
        name = self.name
        expressions = {
            "uid": "records.uid",
            "consumer": "consumers.name",
            "uses": "(SELECT COUNT(*) FROM media_uses WHERE media_uses.hash = media.hash)"
            if name == "media"
            else f"{name}.uses",
        }
        joins = ""
        if "uid" in columns:
            joins += f" LEFT JOIN records ON records.seq = {name}.seq"
        if "consumer" in columns:
            joins += f" LEFT JOIN consumers ON consumers.id = {name}.consumer"
        order = {"events": "id", "leases": "id", "checkpoints": "event", "media": "hash"}.get(name, "seq")
        listed = ", ".join(expressions.get(column, f"{name}.{column}") for column in columns)
        source = _WORK if name == "work" else name
        with self.book.ledger.read() as tx:
            rows = tx.all(f"SELECT {listed} FROM {source}{joins} ORDER BY {name}.{order}")
        arrays = [pa.array([row[i] for row in rows], self.schema.field(c).type) for i, c in enumerate(columns)]
        return pa.Table.from_arrays(arrays, names=columns)


_KEPT = "(gone IS NULL OR gone <> 'rewound')"
RECORDS = {
    "experiences": _KEPT,
    "training": f"{_KEPT} AND evaluation = 0",
    "evaluations": f"{_KEPT} AND evaluation = 1",
    "all_experiences": "1 = 1",
}
"""The tables of records, each with the condition that its rows meet; `all_experiences` has also those that a rewind
took back."""


class RecordsTable:
    """Records as they are now, whether or not their bytes are still there."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.condition = RECORDS["experiences"]
        with book.ledger.read() as tx:
            self.last = tx.one("SELECT COALESCE(MAX(seq), 0) FROM records")[0]
            noted = tx.all("SELECT name, type FROM columns ORDER BY name, type")
        types = {
            "seq": pa.int64(),
            "uid": pa.large_string(),
            "train_step": pa.int64(),
            "tid": pa.large_string(),
            "rid": pa.large_string(),
            **LEDGER_TYPES,
        }
        self.frames = {name: kind for name, kind in arrow_types(noted).items() if name not in types}
        self.schema = pa.schema([*types.items(), *self.frames.items()])

    def where(self, condition: str) -> RecordsTable:
        """The same table with the records that meet another condition."""
        table = copy.copy(self)
        table.condition = condition
        return table

    def load(self, columns: list[str]) -> pa.Table:
        """These columns; frames are read only if one of them is not the ledger's."""
        from_frames = [name for name in columns if name in self.frames]
        from_ledger = [name for name in columns if name not in self.frames]
        requested = self.schema if not columns else pa.schema([self.schema.field(name) for name in columns])
        batches = []
        for seqs, stored in self._pieces(bool(from_frames)):
            arrays: dict[str, pa.Array] = {}
            if from_ledger:
                arrays |= self._from_ledger(from_ledger, seqs)
            if stored and from_frames:
                present, columns_read = frame_arrays(self.book, seqs, from_frames, portable=True)
                if len(present) < len(seqs):  # Deleted meanwhile: a row without bytes.
                    place = {seq: i for i, seq in enumerate(present)}
                    indices = pa.array([place.get(seq) for seq in seqs], pa.int64())
                    columns_read = {name: array.take(indices) for name, array in columns_read.items()}
                arrays |= columns_read
            chosen = [name for name in columns if name in arrays and not pa.types.is_null(arrays[name].type)]
            if not chosen:
                # Bytes that are gone: as many nulls as there are records.
                chosen, arrays = [columns[0]], {columns[0]: pa.nulls(len(seqs), requested.field(columns[0]).type)}
            batches.append(pa.RecordBatch.from_arrays([arrays[name] for name in chosen], names=chosen))
        return unify(batches, requested)

    def _pieces(self, by_frame: bool) -> Iterator[tuple[list[int], bool]]:
        """The numbers of all records, in order, those of one frame together."""
        last = 0
        while True:
            with self.book.ledger.read() as tx:
                rows = tx.all(
                    "SELECT seq, segment, start FROM records "
                    f"WHERE seq > ? AND seq <= ? AND {self.condition} ORDER BY seq LIMIT 10000",
                    (last, self.last),
                )
            if not rows:
                return
            last = rows[-1][0]
            if not by_frame:
                yield [row[0] for row in rows], False
                continue
            for place, run in groupby(rows, key=lambda row: row[1:]):
                yield [row[0] for row in run], place[0] is not None

    def _from_ledger(self, columns: list[str], seqs: list[int]) -> dict[str, pa.Array]:
        computed = {name: needs for name, needs in _COMPUTED.items() if name in columns}
        names = [name for name in columns if name not in computed]
        needed = [name for needs in computed.values() for name in needs]
        with self.book.ledger.read() as tx:
            arrays = ledger_arrays(tx, list(dict.fromkeys([*names, *needed])), seqs)
        if "train_step" in columns:
            pairs = zip(*(arrays[name].to_pylist() for name in _COMPUTED["train_step"]), strict=True)
            arrays["train_step"] = pa.array([step_of(batch, version) for batch, version in pairs], pa.int64())
        if "tid" in columns or "rid" in columns:
            parts = (arrays[name].to_pylist() for name in _COMPUTED["tid"])
            ids = [EID(batch, task, run, 0, "") for batch, task, run in zip(*parts, strict=True)]
            arrays["tid"] = pa.array([eid.tid for eid in ids], pa.large_string())
            arrays["rid"] = pa.array([eid.rid for eid in ids], pa.large_string())
        return arrays


_COMPUTED = {
    "train_step": ("batch", "version_min"),
    "tid": ("batch", "task", "run"),
    "rid": ("batch", "task", "run"),
}
"""Columns that are computed from others of the ledger."""


class MetricsTable:
    """What `Book.log` was given: a row for each name of each training step, without what was rewound."""

    schema = pa.schema([("train_step", pa.int64()), ("name", pa.large_string()), ("value", pa.float64())])

    def __init__(self, book: Book) -> None:
        self.book = book

    def load(self, columns: list[str]) -> pa.Table:
        """These columns, in the order of the steps."""
        rows = [(step, name, value) for step, values in self.book.metrics() for name, value in values.items()]
        arrays = [pa.array([row[i] for row in rows], field.type) for i, field in enumerate(self.schema)]
        return pa.Table.from_arrays(arrays, schema=self.schema).select(columns)


def sql_tables(book: Book) -> dict[str, query.Source]:
    """The tables of a book by name."""
    records = RecordsTable(book)
    tables: dict[str, query.Source] = {name: records.where(condition) for name, condition in RECORDS.items()}
    tables["metrics"] = MetricsTable(book)
    tables |= {name: LedgerTable(book, name) for name in SHOWN}
    tables["ledger"] = tables["events"]
    return tables


def run_sql(
    book: Book, text: str, parameters: Sequence[Any] | Mapping[str, Any] | None, memory: str | int, seconds: float
) -> Result:
    """See `Book.sql`."""
    return query.run_query(text, sql_tables(book), parameters=parameters, memory=memory, seconds=seconds)


_TENSOR = re.compile(r"([a-z0-9]{3,8})((?:x[0-9]{1,9}){0,32})")
_PORTABLE = {d.name: pa.from_numpy_dtype(d.portable) for d in BY_CODE.values()}


def arrow_types(noted: Iterable[tuple[str, str]]) -> dict[str, pa.DataType]:
    """The type of every field's column that holds all that was noted of it."""
    noted_types: dict[str, list[pa.DataType]] = {}
    for name, text in noted:
        kind = _parse_type(text)
        if name in FIELDS and FIELDS[name].kind == "tensor" and kind is not None:
            noted_types.setdefault(name, []).append(kind)
    types = {}
    for name, field in FIELDS.items():
        if field.kind != "tensor":
            types[name] = PLAIN_TYPES[field.kind, ""]
        elif name in noted_types:
            types[name] = superset([pa.schema([(name, kind)]) for kind in noted_types[name]]).field(name).type
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
