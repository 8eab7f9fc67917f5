"""The vocabulary of a book's tokenizer, kept in its ledger: what makes its records' texts readable without a tokenizer.

Invariant: it is written once, with the first records of a book that was opened with a tokenizer, and is of the same
tokenizer as the fingerprint beside it.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from rollbook.book.errors import CorruptBookError
from rollbook.core.errors import WireError
from rollbook.core.metrics import advise

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.core.vocabulary import Vocabulary


def encode_vocabulary(book: Book) -> str | None:
    """What the ledger is to keep of the tokenizer that the book was opened with; `None` if it has it."""
    from rollbook.core.vocabulary import Vocabulary

    with book.ledger.read() as tx:
        if tx.one("SELECT 1 FROM meta WHERE key = 'vocabulary'"):
            book.untold = None
            return None
    try:
        made = Vocabulary.of(book.untold)
    except Exception as error:  # A user's tokenizer may raise anything; records are admitted without its vocabulary.
        advise(f"tokenizer: its vocabulary is not kept, texts will show as ids: {type(error).__name__}: {error}")
        book.untold = None
        return None
    return base64.b64encode(made.to_bytes()).decode("ascii")


def read_vocabulary(book: Book) -> Vocabulary | None:
    """See `Book.vocabulary`."""
    from rollbook.core.vocabulary import Vocabulary

    with book.ledger.read() as tx:
        row = tx.one("SELECT value FROM meta WHERE key = 'vocabulary'")
    if row is None:
        return None
    try:
        return Vocabulary.from_bytes(binascii.a2b_base64(row[0], strict_mode=True))
    except (TypeError, ValueError) as error:
        what = error.message if isinstance(error, WireError) else str(error)
        raise CorruptBookError(f"{book.url}: the vocabulary in its ledger cannot be read: {what}") from None
