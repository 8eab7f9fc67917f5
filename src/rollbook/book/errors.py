"""What a book refuses, each refusal a type of its own.

Invariant: an error raised before a commit changed nothing; every message names the field or the id, what was found and
what was expected.
"""

from __future__ import annotations

import os

from rollbook.core.errors import WireError


class BookError(ValueError):
    """Anything a book refuses; the types below say what."""


class NotABook(BookError):
    """The place holds no book, or not one that this version can open."""


class NewerLayout(NotABook):
    """The book was written by a newer version, whose layout is not known here: it is refused, never guessed."""


class Conflict(BookError):
    """Another record stands under the same id."""


class UnknownConsumer(BookError, KeyError):
    """The book has no consumer group of this name."""

    # Not that of `KeyError`, which shows the message in quotes.
    __str__ = Exception.__str__


class LeaseLost(BookError):
    """The lease expired, was taken back or is finished: its records may be another's, and nothing was changed."""


class LockTimeout(BookError, TimeoutError):
    """Another writer held the ledger for the whole wait; nothing was changed."""


class ConnectionLost(BookError):
    """The server cannot be reached, or the connection broke before the commit; nothing was changed."""


class OutcomeUnknown(BookError):
    """The connection broke during the commit and the server could not be asked since: the call may have taken effect.

    The same call may be repeated: `append`, `lease`, `ack` and `checkpoint` take effect once.
    """


class BackPressure(BookError):
    """A limiter holds inserts back, and still did when the time was up; nothing was written."""


class QuotaExceeded(BookError):
    """The book would grow past its quota; nothing was written."""


class ReadOnly(BookError):
    """The book was opened for reading."""


class Damaged(BookError, WireError):
    """Bytes of the book are not what the ledger says they are."""

    def __init__(self, message: str, offset: int | None = None) -> None:
        WireError.__init__(self, message, offset)


def moved(path: str | os.PathLike[str]) -> BookError:
    """Return the error of a file or folder that is not the one that was opened."""
    return BookError(f"{os.fspath(path)}: the book was moved, removed or replaced while it was open; reopen it")
