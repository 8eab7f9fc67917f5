"""Tables: the book as SQL sees it.

Invariant: a table's columns come from the ledger where it has them, else from the frames, and only those that a query
names are loaded. Nothing here can be written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rollbook.book import kinds, query, schema, selecting
from rollbook.book.sql_columns import Result, unify
from rollbook.ids import EID

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


def _type(table: str, column: str) -> pa.DataType:
    if column in ("uid", "consumer"):
        return pa.large_string()
    if (table, column) == ("media", "uses"):
        return pa.int64()
    declared = next(each for each in schema.TABLES[table] if each.split()[0] == column).split()[1]
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
        told = {
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
        asked = ", ".join(told.get(column, f"{name}.{column}") for column in columns)
        with self.book.ledger.read() as tx:
            found = tx.all(f"SELECT {asked} FROM {name}{joins} ORDER BY {name}.{order}")
        arrays = [pa.array([row[i] for row in found], self.schema.field(c).type) for i, c in enumerate(columns)]
        return pa.Table.from_arrays(arrays, names=columns)


class RecordsTable:
    """Every record that was admitted, as it is now, whether or not its bytes are still there."""

    def __init__(self, book: Book) -> None:
        self.book = book
        with book.ledger.read() as tx:
            self.last = tx.one("SELECT COALESCE(MAX(seq), 0) FROM records")[0]
            noted = tx.all("SELECT name, type FROM columns ORDER BY name, type")
        told = {
            "seq": pa.int64(),
            "uid": pa.large_string(),
            "tid": pa.large_string(),
            "rid": pa.large_string(),
            **selecting.LEDGER_TYPES,
        }
        self.frames = {name: kind for name, kind in kinds.schema_of(noted).items() if name not in told}
        self.schema = pa.schema([*told.items(), *self.frames.items()])

    def load(self, columns: list[str]) -> pa.Table:
        """These columns; frames are read only if one of them is not the ledger's."""
        from_frames = [name for name in columns if name in self.frames]
        from_ledger = [name for name in columns if name not in self.frames]
        wanted = self.schema if not columns else pa.schema([self.schema.field(name) for name in columns])
        batches = []
        for seqs, stored in self._pieces(bool(from_frames)):
            arrays: dict[str, pa.Array] = {}
            if from_ledger:
                arrays |= self._from_ledger(from_ledger, seqs)
            if stored and from_frames:
                arrays |= selecting.frame_arrays(self.book, seqs, from_frames, portable=True)
            kept = [name for name in columns if name in arrays and not pa.types.is_null(arrays[name].type)]
            if not kept:
                # Bytes that are gone: as many nulls as there are records.
                kept, arrays = [columns[0]], {columns[0]: pa.nulls(len(seqs), wanted.field(columns[0]).type)}
            batches.append(pa.RecordBatch.from_arrays([arrays[name] for name in kept], names=kept))
        return unify(batches, wanted)

    def _pieces(self, by_frame: bool) -> Iterator[tuple[list[int], bool]]:
        """The numbers of all records, in order, those of one frame together."""
        last = 0
        while True:
            with self.book.ledger.read() as tx:
                found = tx.all(
                    "SELECT seq, segment, start FROM records WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT 10000",
                    (last, self.last),
                )
            if not found:
                return
            last = found[-1][0]
            if not by_frame:
                yield [row[0] for row in found], False
                continue
            for place, run in groupby(found, key=lambda row: row[1:]):
                yield [row[0] for row in run], place[0] is not None

    def _from_ledger(self, columns: list[str], seqs: list[int]) -> dict[str, pa.Array]:
        names = [name for name in columns if name not in ("tid", "rid")]
        extra = [name for name in ("batch", "task", "run") if name not in names] if len(names) < len(columns) else []
        with self.book.ledger.read() as tx:
            arrays = selecting.ledger_arrays(tx, [*names, *extra], seqs)
        if "tid" in columns or "rid" in columns:
            parts = (arrays[name].to_pylist() for name in ("batch", "task", "run"))
            ids = [EID(batch, task, run, 0, "") for batch, task, run in zip(*parts, strict=True)]
            arrays["tid"] = pa.array([eid.tid for eid in ids], pa.large_string())
            arrays["rid"] = pa.array([eid.rid for eid in ids], pa.large_string())
        return arrays


def sources(book: Book) -> dict[str, query.Source]:
    """The tables of a book by name."""
    found: dict[str, query.Source] = {name: LedgerTable(book, name) for name in SHOWN}
    found["ledger"] = found["events"]
    found["experiences"] = RecordsTable(book)
    return found


def sql(
    book: Book, text: str, parameters: Sequence[Any] | Mapping[str, Any] | None, memory: str | int, seconds: float
) -> Result:
    """See `Book.sql`."""
    return query.run(text, sources(book), parameters=parameters, memory=memory, seconds=seconds)
