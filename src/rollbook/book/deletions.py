"""The list of deleted and redacted records of a folder book, in a file beside its segments.

Invariant: an entry is synced before the ledger commits the deletion or redaction. A repair without the ledger reads the
list, so that a record whose bytes no compaction has removed yet does not come back.

The file has one line per entry: the xxh3-64 checksum of the JSON that follows it, in hexadecimal, a space and the JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import xxhash

from rollbook.book.disk import Disk
from rollbook.book.shelves import FolderShelf, Shelf

DELETIONS_FILE = "deletions.jsonl"
_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Deletion:
    """A record that was deleted, or whose `fields` were redacted."""

    uid: str
    time: float
    author: str
    reason: str | None = None
    fields: tuple[str, ...] = ()


def add_deletion(shelf: Shelf, entries: Iterable[Deletion]) -> None:
    """Append entries and sync them; a book that has no folder keeps no list. Call it in a write transaction."""
    if not isinstance(shelf, FolderShelf):
        return
    lines = [_format_deletion(entry) for entry in entries]
    if not lines:
        return
    path = os.path.join(shelf.book_folder, DELETIONS_FILE)
    file, is_new = shelf.disk.open_append(path)
    try:
        # A crash may have left half a line.
        shelf.disk.append(file, [b"" if is_new else b"\n", *lines])
        shelf.disk.sync(file)
        if is_new:
            shelf.disk.sync_folder(shelf.book_folder)
    finally:
        file.close()


def _format_deletion(entry: Deletion) -> bytes:
    text = json.dumps(asdict(entry)).encode()
    return b"%016x %s\n" % (xxhash.xxh3_64_intdigest(text), text)


def read_deletions(folder: str | os.PathLike[str], disk: Disk) -> tuple[list[Deletion], bool]:
    """Return the entries, and whether the list is there and all of it can be read.

    >>> import rollbook, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rollbook.open(folder) as book:
    ...         _ = book.append(rollbook.Experience(eid={"suffix": "a"}, tokens=[1, 2, 3]))
    ...         _ = book.delete(["//0/0/a"], author="ana", reason="asked")
    ...     [(entry.uid, entry.author, entry.reason) for entry in read_deletions(folder, Disk())[0]]
    [('//0/0/a', 'ana', 'asked')]
    """
    entries: list[Deletion] = []
    try:
        fd = disk.open_read(os.path.join(folder, DELETIONS_FILE))
    except OSError:
        return entries, False
    complete = True
    with os.fdopen(fd, "rb") as file:
        while line := file.readline(_LONGEST):
            if line == b"\n":
                continue
            entry = _parse_deletion(line)
            if entry is not None:
                entries.append(entry)
            elif line.endswith(b"\n"):
                complete = False
    return entries, complete


def _parse_deletion(line: bytes) -> Deletion | None:
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if checksum != b"%016x" % xxhash.xxh3_64_intdigest(text):
        return None
    try:
        values = json.loads(text)
        return Deletion(**{**values, "fields": tuple(values["fields"])})
    except (KeyError, RecursionError, TypeError, ValueError):
        return None
