"""Helpers of the commands: `resolve_book`, `open_run`, `resolve_uid` and `sample_table`.

Invariant: a command shows the run in the state in which it was opened, and writes nothing to it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollbook.core.addresses import check_book_is_here
from rollbook.core.terminal import columns, figure, printable, table, tail, width

if TYPE_CHECKING:
    from rollbook.inspect.answers import Answers
    from rollbook.inspect.index import Index
    from rollbook.inspect.sources import BookSource, Source


LEDGER = "ledger.sqlite"
"""The ledger's file in the folder of a book. Equals `rollbook.book.book.LEDGER`, which would load the book."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run with its index."""

    source: Source
    index: Index
    answers: Answers


def resolve_book(path: str) -> str:
    """Return the path or URL of a book; for the folder of a run, the book in it.

    >>> resolve_book("postgresql://host/database"), resolve_book("some/book")
    ('postgresql://host/database', 'some/book')
    """
    if "://" in path or os.path.isfile(os.path.join(path, LEDGER)):
        return path
    book = os.path.join(path, "book")
    if os.path.isfile(os.path.join(book, LEDGER)):
        return book
    check_book_is_here(path)
    return path


@contextlib.contextmanager
def open_run(
    path: str,
    tokenizer: str | None = None,
    *,
    ids: Sequence[str] | None = None,
    spans: Callable[[BookSource], Sequence[tuple[int | None, int | None]]] | None = None,
) -> Iterator[OpenRun]:
    """Open a run and index it.

    Args:
        path: Path or URL for `open_source`.
        tokenizer: Path of a tokenizer, for records without text.
        ids: Of a book, index only the groups with these ids, or of records with these ids.
        spans: Of a book, index only the ranges of training steps that this function returns.
    """
    from rollbook.inspect.answers import Answers
    from rollbook.inspect.index import Index
    from rollbook.inspect.sources import BookSource, load, open_source

    with contextlib.closing(open_source(path, tokenizer=tokenizer)) as source, Index() as index:
        if isinstance(source, BookSource):
            if ids is not None:
                source.seqs = source.find_seqs(ids)
            elif spans is not None:
                source.seqs = source.seqs_in(spans(source))
        load(source, index)
        yield OpenRun(source, index, Answers(source, index))


def resolve_uid(index: Index, prefix: str) -> str:
    """Return the uid that equals `prefix`, or else the only one that begins with it."""
    if index.query("SELECT 1 FROM samples WHERE uid = ?", [prefix]):
        return prefix
    # `42/1089/6` is first run 6 of a task, then a prefix of run 60.
    for start in (f"{prefix}/", prefix):
        matches = index.query(
            "SELECT uid FROM samples WHERE substr(uid, 1, ?) = ? ORDER BY n LIMIT 9", [len(start), start]
        )
        if len(matches) == 1:
            return str(matches[0][0])
        if matches:
            listed = ", ".join(uid for (uid,) in matches[:8])
            raise ValueError(f"id: {prefix!r} is ambiguous: {len(matches)} or more begin with it: {listed}")
    raise ValueError(
        f"id: {prefix!r} is not a trajectory or group of this run; `rollbook ls PATH --where ...` lists them"
    )


_NUMBER_COLUMNS = ("reward", "advantage", "tokens", "entropy", "kl")
_OPTIONAL_COLUMNS = ("kl", "entropy", "advantage", "state", "tokens")


def sample_table(rows: Sequence[dict[str, Any]], extra_columns: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of a table of samples.

    On a narrow terminal, ids are printed without their last part, if they stay unique. `rollbook show` accepts both.

    Args:
        rows: Samples, as `Answers.list` returns them.
        extra_columns: Additional numeric columns, placed first.
    """
    numbers = (*extra_columns, *_NUMBER_COLUMNS)
    names = ("uid", *numbers, "status", "state", "ends with")
    lines = []
    for row in rows:
        values = {**row, "tokens": row["response_tokens"]}
        # Steps are labels, without thousands separators.
        cells = [str(values[name]) if name == "step" else figure(values[name]) for name in numbers]
        lines.append(
            [printable(row["uid"]), *cells, row["status"], row["state"], tail(printable(row["closing"] or ""))]
        )
    total_width = sum(max(width(line[i]) for line in (names, *lines)) + 1 for i in range(len(names) - 1)) + len(
        names[-1]
    )
    short_ids = [line[0].rpartition("/")[0] for line in lines]
    if total_width > columns() and len(set(short_ids)) == len(short_ids):
        lines = [[name, *line[1:]] for name, line in zip(short_ids, lines, strict=True)]
    yield from table(
        names,
        lines,
        right=range(1, 1 + len(numbers)),
        ends=(len(names) - 1,),
        optional=[names.index(name) for name in _OPTIONAL_COLUMNS],
    )
