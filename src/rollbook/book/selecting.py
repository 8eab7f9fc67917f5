"""Selecting: records by condition, as ids, as records, or as Arrow batches of some columns.

Invariant: conditions on what the ledger knows are answered by the ledger, before any byte of a record is read; the
others are checked on the columns they name, frame by frame. Memory is that of a piece, whatever the book's size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rollbook.book import reading, tags
from rollbook.book.errors import MissingSegmentError
from rollbook.book.ledger import Transaction
from rollbook.book.shelves import Place
from rollbook.core import arrow
from rollbook.core.checks import check_float, check_int, suggest
from rollbook.core.experiences import Experiences
from rollbook.core.fields import FIELDS

if TYPE_CHECKING:
    from rollbook.book.book import Book

LEDGER_COLUMNS = (*tags.IndexColumns._fields, "seq", "evaluation", "admitted", "revision", "bytes", "gone")
"""What a condition can ask the ledger for."""
_ASKED = tuple(
    dict.fromkeys(
        [*LEDGER_COLUMNS, *(name for name, each in FIELDS.items() if each.kind in ("text", "number", "integer"))]
    )
)
"""What a condition can be on, with the entries of `info` and `metrics`."""
Condition = tuple[str, str, Any]
_TESTS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SQL = {"=": "=", "==": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
OPERATORS = (*_TESTS, "in", "not in", "is", "is not")
PIECE = 1024
MOST = 10_000
"""How many values one `in` may have; `book.get` takes any number of ids."""


def parse_conditions(given: Sequence[Any], equal: dict[str, Any]) -> list[Condition]:
    """Conditions as users give them: `("reward", ">", 0.5)`, and `task="a"` for `("task", "=", "a")`."""
    found: list[Condition] = []
    for each in (
        *given,
        *((name, "in" if isinstance(value, (list, tuple, set)) else "=", value) for name, value in equal.items()),
    ):
        if not isinstance(each, tuple) or len(each) != 3 or not isinstance(each[0], str):
            raise ValueError(f"where: got {each!r}, expected (column, operator, value)")
        name, test, value = each
        if test not in OPERATORS:
            raise ValueError(f"where: {name}: got operator {test!r}, expected one of {', '.join(OPERATORS)}")
        head = name.split(".")[0]
        if name not in LEDGER_COLUMNS and head not in FIELDS:
            raise ValueError(f"where: {name!r} is no column{suggest(name, [*_ASKED, 'info.NAME', 'metrics.NAME'])}")
        if test in ("in", "not in"):
            if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
                raise ValueError(f"where: {name}: got {test} {value!r}, expected several values")
            value = list(value)
            if len(value) > MOST:
                raise ValueError(f"where: {name}: got {len(value)} values, expected at most {MOST}")
        elif test in ("is", "is not"):
            if value is not None:
                raise ValueError(f"where: {name}: got {test} {value!r}, expected {test} None")
        elif value is None:
            if test not in ("=", "==", "!="):
                raise ValueError(f"where: {name}: got {test} None, expected 'is' or 'is not'")
            test = "is" if test in ("=", "==") else "is not"
        if (
            head not in ("info", "metrics")
            and name not in LEDGER_COLUMNS
            and FIELDS[head].kind not in ("text", "number", "integer")
        ):
            raise ValueError(
                f"where: {name!r} is a {FIELDS[head].kind}; conditions are on numbers and texts, book.sql on all"
            )
        if name in LEDGER_COLUMNS and value is not None:
            value = [_fit(name, each) for each in value] if isinstance(value, list) else _fit(name, value)
        found.append((name, test, value))
    return found


def _fit(name: str, value: Any) -> Any:
    """A value as every database compares it with a column of the ledger."""
    if name in ("batch", "task"):
        value = str(value)
    kind = LEDGER_TYPES[name]
    if kind == pa.large_string():
        if not isinstance(value, str) or "\0" in value or value.encode("utf-8", "replace").decode() != value:
            raise ValueError(f"where: {name}: got {value!r}, expected a text without NUL and lone surrogates")
        return value
    # Integers beyond 64 bits and numpy's are none to a database.
    found = check_float(f"where: {name}", int(value) if isinstance(value, (bool, np.bool_)) else value)
    return int(value) if isinstance(value, Integral) and abs(found) < 2**63 else found


def in_ledger(asked: Sequence[Condition]) -> tuple[str, list[Any]]:
    """The SQL of the conditions that the ledger answers."""
    parts: list[str] = []
    values: list[Any] = []
    for name, test, value in asked:
        if name not in LEDGER_COLUMNS:
            continue
        # The ledger has no number for a reward that is NaN: it differs from every number, and it is not missing.
        nan = f" OR scored = {tags.NOT_A_NUMBER}" if name == "reward" and test in ("!=", "not in") else ""
        if test in ("is", "is not") and name == "reward":
            parts.append(f"scored {'=' if test == 'is' else '<>'} {tags.UNSCORED}")
        elif test in ("is", "is not"):
            parts.append(f"{name} {test.upper()} NULL")
        elif test in ("in", "not in"):
            if not value:
                parts.append("1 = 0" if test == "in" else "1 = 1")
                continue
            parts.append(f"({name} {test.upper()} ({','.join('?' * len(value))}){nan})")
            values += value
        else:
            parts.append(f"({name} {_SQL[test]} ?{nan})")
            values.append(value)
    return " AND ".join(parts) or "1 = 1", values


class Selection:
    """The records that meet some conditions, read when they are asked for; made by `book.where`.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(tokens=[1, 2, i], reward=i / 4, info={"i": i}) for i in range(5)])
    >>> good = book.where(("reward", ">", 0.4), ("info.i", "<", 4))
    >>> good.count(), [record.reward for record in good]
    (2, [0.5, 0.75])
    """

    def __init__(self, book: Book, asked: Sequence[Condition], order: str = "seq") -> None:
        self._book = book
        self._asked = list(asked)
        self._order = order

    def where(self, *given: Condition, **equal: Any) -> Selection:
        """These records, narrowed."""
        return Selection(self._book, [*self._asked, *parse_conditions(given, equal)], self._order)

    @property
    def _late(self) -> list[Condition]:
        return [each for each in self._asked if each[0] not in LEDGER_COLUMNS]

    def count(self) -> int:
        """How many there are, those too whose bytes are gone and runs that failed (`gone` says why)."""
        if not self._late:
            sql, values = in_ledger(self._asked)
            with self._book.ledger.read() as tx:
                return int(tx.one(f"SELECT COUNT(*) FROM records WHERE {sql}", values)[0])
        return sum(len(piece) for piece in self._pieces())

    def uids(self) -> list[str]:
        """Their ids, in the order of admission; like `count`, whether their bytes are there or not."""
        return [uid for piece in self._pieces() for _, uid, *_ in piece]

    def experiences(self) -> Experiences:
        """All of them at once."""
        return Experiences.concat(list(self.batches()))

    def batches(self, rows: int = PIECE) -> Iterator[Experiences]:
        """Records piece by piece; those whose bytes are gone are left out."""
        for piece in self._pieces(check_int("rows", rows, 1)):
            located = _locations(piece)
            present, records = reading.fetch_present(self._book, list(located), located=located)
            if present:
                yield records

    def __iter__(self) -> Iterator[Any]:
        for piece in self._pieces():
            yield from reading.fetch_rows(self._book, _locations(piece))

    def scan(self, columns: Sequence[str] | None = None, rows: int = PIECE) -> Iterator[pa.RecordBatch]:
        """Arrow batches of some columns; see `Book.scan`."""
        check_int("rows", rows, 1)
        return scan(self._book, self, columns, rows)

    def _pieces(self, rows: int = PIECE) -> Iterator[list[Any]]:
        """(seq, uid, segment, start, size, slot, gone, bytes) of the records that meet all conditions."""
        sql, values = in_ledger(self._asked)
        last = 0
        while True:
            with self._book.ledger.read() as tx:
                found = tx.all(
                    "SELECT seq, uid, segment, start, size, slot, gone, bytes FROM records "
                    f"WHERE seq > ? AND {sql} ORDER BY seq LIMIT ?",
                    (last, *values, rows),
                )
            if not found:
                return
            last = found[-1][0]
            kept = found
            for condition in self._late:
                kept = self._filtered(kept, condition)
            if kept:
                yield kept
            if len(found) < rows:
                return

    def _filtered(self, piece: list[Any], condition: Condition) -> list[Any]:
        values = _values(self._book, [row[0] for row in piece if row[2] is not None], condition[0])
        return [row for row in piece if row[0] in values and _meets(values[row[0]], condition)]

    def __repr__(self) -> str:
        shown = " and ".join(f"{name} {test} {value!r}" for name, test, value in self._asked)
        return f"Selection({self._book.url!r}, {shown or 'all'})"


def _locations(piece: Sequence[Any]) -> dict[int, reading.Location]:
    """Where the records of a piece lie that have bytes."""
    return {row[0]: (row[0], *row[2:]) for row in piece if row[2] is not None}


def _values(book: Book, seqs: list[int], name: str) -> dict[int, Any]:
    """A field of those of these records that have bytes, by their numbers."""
    head, dot, key = name.partition(".")
    present, records = reading.fetch_present(book, seqs, verify=False, media=False)
    values = records.values(head) if present else []
    if dot:
        values = [None if value is None else value.get(key) for value in values]
    return dict(zip(present, values, strict=True))


def _meets(value: Any, condition: Condition) -> bool:
    _, test, wanted = condition
    if test == "is":
        return value is None
    if test == "is not":
        return value is not None
    if value is None:
        return False
    try:
        if test == "in":
            return value in wanted
        if test == "not in":
            return value not in wanted
        return bool(_TESTS[test](value, wanted))
    except TypeError:
        return False


# --- columns --------------------------------------------------------------------------------------------------------


def checked_columns(columns: Sequence[str] | None) -> list[str] | None:
    """Names of columns: of the ledger, or fields of a record."""
    if columns is None:
        return None
    for name in columns:
        if not isinstance(name, str) or (name not in LEDGER_COLUMNS and name not in FIELDS):
            raise ValueError(
                f"columns: got {name!r}, expected names of columns"
                f"{suggest(str(name), dict.fromkeys([*LEDGER_COLUMNS, *FIELDS]))}"
            )
    return list(dict.fromkeys(columns))


def scan(book: Book, selection: Selection, columns: Sequence[str] | None, rows: int) -> Iterator[pa.RecordBatch]:
    """Batches with what the ledger has of the columns from the ledger, and the rest from the frames: a batch a frame,
    so that columns of mapped segments are not copied."""
    wanted = checked_columns(columns)
    names = [*LEDGER_COLUMNS, *(name for name in FIELDS if name not in LEDGER_COLUMNS)] if wanted is None else wanted
    from_ledger = [name for name in names if name in LEDGER_COLUMNS]
    from_frames = [name for name in names if name not in LEDGER_COLUMNS]
    if from_frames and set(from_ledger) <= _IN_FRAMES:
        # The frames have the same numbers: the ledger need not be asked twice.
        from_ledger, from_frames = [], names
    for piece in selection._pieces(rows):
        kept = [row for row in piece if row[2] is not None] if from_frames else piece
        if not kept:
            continue
        arrays: dict[str, pa.Array] = {}
        if from_ledger:
            with book.ledger.read() as tx:
                arrays = ledger_arrays(tx, from_ledger, [row[0] for row in kept])
        if not from_frames:
            yield _batch(names, arrays)
            continue
        runs = [list(run) for _, run in groupby(kept, key=lambda row: row[2:5])]
        start = 0
        for run, (present, frame_columns) in zip(runs, _runs(book, runs, from_frames), strict=True):
            here = {name: array.slice(start, len(run)) for name, array in arrays.items()}
            start += len(run)
            if len(present) < len(run):
                rows_present = [i for i, row in enumerate(run) if row[0] in set(present)]
                here = {name: array.take(pa.array(rows_present, pa.int64())) for name, array in here.items()}
            if present:
                yield _batch(names, here | frame_columns)


def _batch(names: list[str], arrays: dict[str, pa.Array]) -> pa.RecordBatch:
    ordered = _ordered(tuple(names), tuple(arrays))
    return pa.RecordBatch.from_arrays([arrays[name] for name in ordered], names=ordered)


@lru_cache(256)
def _ordered(names: tuple[str, ...], arrays: tuple[str, ...]) -> list[str]:
    """The arrays of some fields, sides included, in the order of the fields."""
    sides = (name for field in names for name in arrays if name == field or name.startswith(f"{field}__"))
    return list(dict.fromkeys(sides))


def _runs(
    book: Book, runs: Sequence[list[Any]], fields: Sequence[str]
) -> Iterator[tuple[list[int], dict[str, pa.Array]]]:
    """The numbers and columns of each run of records, all of one frame: as they lie there if it is the whole of it,
    without those that were deleted meanwhile."""
    frames = [(Place(*run[0][2:5]), [row[5] for row in run]) for run in runs]
    done = 0
    try:
        for run, found in zip(runs, reading.whole_arrays(book, frames, fields), strict=True):
            if found is None:
                yield frame_arrays(book, [row[0] for row in run], fields)
            else:
                yield [row[0] for row in run], _with_nulls(found, fields, len(run))
            done += 1
    except MissingSegmentError:  # Compaction has moved some.
        for run in runs[done:]:
            yield frame_arrays(book, [row[0] for row in run], fields)


def _with_nulls(arrays: dict[str, pa.Array], fields: Sequence[str], count: int) -> dict[str, pa.Array]:
    """The arrays, with nulls for the fields that no record has."""
    missing = {name: pa.nulls(count, LEDGER_TYPES.get(name)) for name in fields if name not in arrays}
    return {**missing, **arrays} if missing else arrays


LEDGER_TYPES: dict[str, pa.DataType] = {
    **dict.fromkeys(
        ("uid", "gid", "batch", "task", "suffix", "finish_reason", "truncate_status", "kind", "parent", "gone"),
        pa.large_string(),
    ),
    **dict.fromkeys(("reward", "admitted"), pa.float64()),
    **dict.fromkeys(
        (
            "run",
            "step",
            "scored",
            "length",
            "prompt_tokens",
            "response_tokens",
            "trained_tokens",
            "version_min",
            "version_max",
            "group_size",
            "seq",
            "revision",
            "bytes",
        ),
        pa.int64(),
    ),
    "evaluation": pa.bool_(),
}


_IN_FRAMES = {name for name in LEDGER_COLUMNS if name in FIELDS and FIELDS[name].kind in ("number", "integer")}
"""Columns of the ledger that frames have as well, of the same type."""


def ledger_arrays(tx: Transaction, names: Sequence[str], seqs: Sequence[int]) -> dict[str, pa.Array]:
    """Columns of the ledger, of records whose numbers rise."""
    chosen = ["seq", *names, *(["scored"] if "reward" in names else [])]
    found = tx.all(
        f"SELECT {', '.join(chosen)} FROM records WHERE seq >= ? AND seq <= ? ORDER BY seq", (seqs[0], seqs[-1])
    )
    if len(found) != len(seqs):
        wanted = set(seqs)
        found = [row for row in found if row[0] in wanted]
    arrays = {}
    for i, name in enumerate(names, 1):
        column = [row[i] for row in found]
        if name == "reward":
            column = [float("nan") if row[-1] == tags.NOT_A_NUMBER else row[i] for row in found]
        elif name == "evaluation":
            column = [bool(value) for value in column]
        arrays[name] = pa.array(column, LEDGER_TYPES[name])
    return arrays


def frame_arrays(
    book: Book, seqs: list[int], fields: Sequence[str], portable: bool = False
) -> tuple[list[int], dict[str, pa.Array]]:
    """Read columns of frames, these fields' and their sides', as Arrow arrays; `portable` as Parquet has them.

    Returns:
        The numbers of those of these records that have bytes, and their columns.
    """

    def read(places: list[reading.Location]) -> tuple[list[int], dict[str, pa.Array]]:
        if not places:
            return [], {}
        records = reading.gather(book, places, verify=False, only=fields)
        arrays = arrow.to_arrays(records.columns, portable)
        missing = {name: pa.nulls(len(places)) for name in fields if name not in arrays}
        return [place[0] for place in places], {**missing, **arrays}

    return reading.retried(book, seqs, read, skip=True)
