"""A run opened to be looked at by a command: its source, its index brought up to date, and the answers they give.

Invariant: what a command says is of the run as it was when it was opened; nothing is written to it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

LEDGER = "ledger.sqlite"
"""The file that a book's folder has; `rollbook.book.book.LEDGER`, without loading the book."""

if TYPE_CHECKING:
    from rollbook.inspect.answers import Answers
    from rollbook.inspect.index import Index
    from rollbook.inspect.sources import BookSource, Source


@dataclass(frozen=True, slots=True)
class Opened:
    """What there is to ask."""

    source: Source
    index: Index
    answers: Answers


def book_at(path: str) -> str:
    """The address of the book that a command is given: of a run's folder, the book in it.

    >>> book_at("postgresql://host/database"), book_at("some/book")
    ('postgresql://host/database', 'some/book')
    """
    inside = os.path.join(path, "book")
    run = "://" not in path and not os.path.isfile(os.path.join(path, LEDGER))
    return inside if run and os.path.isfile(os.path.join(inside, LEDGER)) else path


@contextlib.contextmanager
def opened(
    path: str,
    tokenizer: str | None = None,
    *,
    ids: Sequence[str] | None = None,
    spans: Callable[[BookSource], Sequence[tuple[int | None, int | None]]] | None = None,
) -> Iterator[Opened]:
    """Open a run and index it.

    Args:
        path: What `open_source` opens.
        tokenizer: The path of a tokenizer, for records without text.
        ids: Index only the groups of these records or groups, where the run is a book.
        spans: Index only the training steps that it returns, where the run is a book.
    """
    from rollbook.inspect.answers import Answers
    from rollbook.inspect.index import Index
    from rollbook.inspect.sources import BookSource, load, open_source

    with contextlib.closing(open_source(path, tokenizer=tokenizer)) as source, Index() as index:
        if isinstance(source, BookSource):
            if ids is not None:
                source.seqs = source.seqs_of(ids)
            elif spans is not None:
                source.seqs = source.seqs_in(spans(source))
        load(source, index)
        yield Opened(source, index, Answers(source, index))


def uid_of(index: Index, what: str) -> str:
    """The uid that is meant: the whole of it, or a beginning that no other has."""
    if index.query("SELECT 1 FROM samples WHERE uid = ?", [what]):
        return what
    # `42/1089/6` is run 6 of a task before it is the beginning of run 60.
    for beginning in (f"{what}/", what):
        found = index.query(
            "SELECT uid FROM samples WHERE substr(uid, 1, ?) = ? ORDER BY n LIMIT 9", [len(beginning), beginning]
        )
        if len(found) == 1:
            return str(found[0][0])
        if found:
            listed = ", ".join(uid for (uid,) in found[:8])
            raise ValueError(f"id: got {what!r}, which {len(found)} or more begin with: {listed}")
    raise ValueError(
        f"id: got {what!r}, which is no trajectory or group here; `rollbook ls PATH --where ...` lists them"
    )
