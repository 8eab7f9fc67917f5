"""Exceptions of the book.

Invariant: an exception raised before a commit changed nothing. Messages name the field or the id, the value and what
was expected.
"""

from __future__ import annotations

import os

from rollbook.core.errors import RollbookError, WireError

__all__ = [
    "BackPressureError",
    "BookError",
    "ConflictError",
    "ConnectionLostError",
    "CorruptBookError",
    "LeaseLostError",
    "LockTimeoutError",
    "MissingBookError",
    "MissingSegmentError",
    "NewerLayoutError",
    "NoWeightsError",
    "NotABookError",
    "OutcomeUnknownError",
    "QuotaExceededError",
    "ReadOnlyError",
    "SegmentBusyError",
    "StoreFullError",
    "UnknownConsumerError",
    "WriterStoppedError",
]


class BookError(RollbookError, ValueError):
    """Base class of the exceptions of the book."""


class NotABookError(BookError):
    """There is no book at this address, or not one that this version can open."""


class MissingBookError(NotABookError):
    """There is nothing at this address yet."""


class NewerLayoutError(NotABookError):
    """The book was written by a newer version of Rollbook with another layout."""


class ConflictError(BookError):
    """A different record has the same id."""


class UnknownConsumerError(BookError, KeyError):
    """The book has no consumer group of this name."""

    # `KeyError` would show the message in quotes.
    __str__ = Exception.__str__


class LeaseLostError(BookError):
    """The lease expired, was revoked or is finished. Others may have its records; nothing was changed."""


class LockTimeoutError(BookError, TimeoutError):
    """Another writer held the ledger's lock until the timeout; nothing was changed."""


class ConnectionLostError(BookError):
    """The server cannot be reached, or the connection broke before the commit; nothing was changed."""


class OutcomeUnknownError(BookError):
    """The connection broke during the commit and the server is unreachable: the call may have taken effect.

    Repeating the call is safe: `append`, `lease`, `ack` and `checkpoint` take effect once.
    """


class StoreFullError(BookError):
    """The object store of Ray has no room for the arguments or the result of a call, which can be repeated."""


class NoWeightsError(BookError):
    """No weights are published, or the process that published them has ended."""


class BackPressureError(BookError):
    """A rate limiter still held inserts back at the timeout; nothing was written."""


class QuotaExceededError(BookError):
    """The book would exceed its quota; nothing was written."""


class ReadOnlyError(BookError):
    """The book was opened for reading."""


class MissingSegmentError(RollbookError, LookupError):
    """The segment is not in the store: compaction moved its records, or it was lost."""


class SegmentBusyError(RollbookError, RuntimeError):
    """The segment cannot be removed yet because it is being written."""


class WriterStoppedError(RollbookError, RuntimeError):
    """A write or sync failed, so this store accepts no more writes; reopen the book."""


class CorruptBookError(BookError, WireError):
    """Bytes of the book do not match the ledger.

    Args:
        message: What is wrong.
        offset: Byte offset of the error in its file, if known.
    """

    def __init__(self, message: str, offset: int | None = None) -> None:
        WireError.__init__(self, message, offset)


def moved_error(path: str | os.PathLike[str]) -> BookError:
    """Return the exception for a file or folder that is no longer the one that was opened."""
    return BookError(f"{os.fspath(path)}: the book was moved, removed or replaced while it was open; reopen it")
