"""Changes of stored records: late fields, revisions, redactions and deletions.

Invariant: an append only adds fields that were missing; any other difference is reported as a conflict.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from reprlib import Repr
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import xxhash

from rollbook.book import content_hash, index_columns, queue
from rollbook.book.consumer import Consumer, all_consumers, save_consumer
from rollbook.book.content_hash import is_late
from rollbook.book.disk import Disk, hit_failpoint
from rollbook.book.errors import BookError, ConflictError
from rollbook.book.ledger import Transaction, check_text, check_writable, chunks, served, yield_to_writers
from rollbook.book.media import extract
from rollbook.book.read import check_present, fetch, find_seqs, get_uids, locate
from rollbook.book.segments.files import FileSegmentStore, Place, SegmentStore
from rollbook.core.checks import suggest
from rollbook.core.experiences import from_rows
from rollbook.core.fields import FIELDS
from rollbook.core.freeform import same
from rollbook.core.wire import encode

if TYPE_CHECKING:
    from rollbook.book.append import AppendTransaction, PendingAppend
    from rollbook.book.book import Book
    from rollbook.book.read import RecordIds
    from rollbook.core.experience import Experience


class Difference(NamedTuple):
    """The first field in which two records of one id differ.

    >>> str(Difference("reward", "1.0", "0.5"))
    'reward: stored 1.0, given 0.5'
    """

    field: str
    """Name of the field, or `info.score` for an entry of a dict."""
    stored: str
    """The values, abbreviated."""
    new: str

    def __str__(self) -> str:
        return f"{self.field}: stored {self.stored}, given {self.new}"


@dataclass(frozen=True, slots=True)
class Addition:
    """What a record adds to the stored one of the same id."""

    merged: Experience
    """The stored record with the additions; without additions, or with a conflict, the stored record itself."""
    added: tuple[str, ...] = ()
    """Names of added fields, and of entries of dicts as `info.score`."""
    conflict: Difference | None = None
    """The difference, if it is another record."""


def compare(old: Experience, new: Experience) -> Addition:
    """Compare a record with a stored one of the same id; return the fields that it adds, or the conflict.

    `new` may add late fields (see `is_late`) that `old` lacks, and new keys of dicts. Fields that it lacks stay
    unchanged. All other fields must be equal.

    >>> from rollbook import Experience
    >>> old = Experience(eid={"suffix": "a"}, tokens=[1, 2, 3], info={"seed": 7})
    >>> late = old.replace(reward=1.0, info={"judge": "b"})
    >>> addition = compare(old, late)
    >>> addition.added, addition.merged.reward, addition.merged.info
    (('reward', 'info.judge'), 1.0, {'seed': 7, 'judge': 'b'})
    >>> str(compare(late, old.replace(reward=0.0)).conflict)
    'reward: stored 1.0, given 0.0'
    """
    added: list[str] = []
    changes_to_old: dict[str, Any] = {}
    additions: dict[str, Any] = {}
    for name, field in FIELDS.items():
        a, b = getattr(old, name), getattr(new, name)
        if not is_late(field):
            if not same(a, b):
                return Addition(old, conflict=_difference(name, a, b))
        elif field.kind == "json":
            new_entries, conflict = _compare_entries(name, a, b)
            if conflict is not None:
                return Addition(old, conflict=conflict)
            added.extend(f"{name}.{key}" for key in new_entries)
            if new_entries:
                changes_to_old[name] = {**a, **new_entries}
            additions[name] = {**b, **a}
        elif b is None:
            additions[name] = a
        elif a is None:
            added.append(name)
            changes_to_old[name] = b
        elif not same(a, b):
            return Addition(old, conflict=_difference(name, a, b))
    for name in sorted({*old.unknown, *new.unknown}):
        c, d = (row.unknown[name] if name in row.unknown else pa.nulls(1) for row in (old, new))
        # A null in an unknown column may come from another record of the frame; it equals a missing column.
        if not same(c, d) and (c.null_count, d.null_count) != (1, 1):
            return Addition(old, conflict=_difference(name, c.to_pylist()[0], d.to_pylist()[0]))
    if not added:
        return Addition(old)
    # A record that was read with unusual shapes keeps them only in its own `replace`.
    return Addition(new.replace(**additions) if new.malformed_fields else old.replace(**changes_to_old), tuple(added))


def _compare_entries(name: str, old: dict[Any, Any], new: dict[Any, Any]) -> tuple[dict[Any, Any], Difference | None]:
    """Return the entries that only `new` has, and the first that differs."""
    additions: dict[Any, Any] = {}
    for key, value in new.items():
        if key not in old:
            additions[key] = value
        elif not same(old[key], value):
            return {}, _difference(f"{name}.{key}", old[key], value)
    return additions, None


_abbreviator = Repr()
_abbreviator.maxstring = _abbreviator.maxother = _abbreviator.maxlong = 60


def _difference(field: str, old: Any, new: Any) -> Difference:
    return Difference(field, _show_value(old, new), _show_value(new, old))


def _show_value(value: Any, other: Any) -> str:
    """Format a value for an error; of tensors and long texts, the part that differs from the other."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = str(value.dtype).removeprefix("torch.")
        text = f"{kind}{list(value.shape)}"
        if getattr(other, "shape", None) == value.shape and len(value.shape) == 1:
            mine, others = value.tolist(), other.tolist()
            at = next((i for i, (a, b) in enumerate(zip(mine, others, strict=True)) if not same(a, b)), None)
            text += "" if at is None else f" with {mine[at]!r} at {at}"
        return text
    if isinstance(value, str) and isinstance(other, str) and len(value) > 60:
        at = next(
            (i for i, (a, b) in enumerate(zip(value, other, strict=False)) if a != b),
            min(len(value), len(other)),
        )
        start = max(0, at - 10)
        return f"{value[start : start + 50]!r} from character {start} of {len(value)}"
    return _abbreviator.repr(value)


DELETIONS_FILE = "deletions.jsonl"
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Deletion:
    """A record that was deleted, or whose `fields` were redacted."""

    uid: str
    time: float
    author: str
    reason: str | None = None
    fields: tuple[str, ...] = ()


def append_deletions(store: SegmentStore, entries: Iterable[Deletion]) -> None:
    """Append entries to the list of deletions and sync it, in a write transaction; only books in folders have one."""
    if not isinstance(store, FileSegmentStore):
        return
    lines = [_format_deletion(entry) for entry in entries]
    if not lines:
        return
    path = os.path.join(store.book_folder, DELETIONS_FILE)
    file, is_new = store.disk.open_append(path)
    try:
        # A crash may have left half a line.
        store.disk.append(file, [b"" if is_new else b"\n", *lines])
        store.disk.sync(file)
        if is_new:
            store.disk.sync_folder(store.book_folder)
    finally:
        file.close()


def _format_deletion(entry: Deletion) -> bytes:
    text = json.dumps(asdict(entry)).encode()
    return b"%016x %s\n" % (xxhash.xxh3_64_intdigest(text), text)


def read_deletions(folder: str | os.PathLike[str], disk: Disk) -> tuple[list[Deletion], bool]:
    """Return the list of deletions, and whether it exists and all of it could be read.

    >>> import rollbook, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rollbook.open(folder) as book:
    ...         _ = book.append(rollbook.Experience(eid={"suffix": "a"}, tokens=[1, 2, 3]))
    ...         _ = book.delete(["//0/0/a"], author="ana", reason="on request")
    ...     [(entry.uid, entry.author, entry.reason) for entry in read_deletions(folder, Disk())[0]]
    [('//0/0/a', 'ana', 'on request')]
    """
    entries: list[Deletion] = []
    try:
        fd = disk.open_read(os.path.join(folder, DELETIONS_FILE))
    except OSError:
        return entries, False
    complete = True
    with os.fdopen(fd, "rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
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


Change = Callable[["Experience", int], tuple["Experience", Sequence[str]] | None]
"""(record, index) -> (changed record, names of changed fields), or `None` if nothing changes."""
_MAX_ATTEMPTS = 50
_CHUNK = 500
"""Records that one transaction deletes, while other writers wait."""
_REDACT_CHUNK = 500
_REDACT_BYTES = 16 << 20
"""Records, and about how many bytes, that a redaction rewrites at once."""


def rewrite_records(
    book: Book,
    seqs: Sequence[int],
    change: Change,
    *,
    kind: str,
    author: str,
    reason: str | None,
    hashes: Sequence[bytes] | None = None,
    retrain: bool | str = False,
    append: AppendTransaction | None = None,
    timeout: float | None = None,
) -> list[int]:
    """Replace records by the results of `change`, and append those of `append` in the same transaction.

    Returns:
        The indices of the changed records. If there are none, nothing is appended either.
    """
    for _ in range(_MAX_ATTEMPTS):
        with book.ledger.read() as tx:
            states = _read_revisions(tx, seqs)
        rewrites = []
        for i, (seq, row) in enumerate(zip(seqs, fetch(book, seqs).rows(), strict=True)):
            changed = change(row, i)
            if changed is not None:
                rewrites.append(_Rewrite(i, seq, row, *changed, states[seq][0] + 1))
        if not rewrites:
            return []
        records = from_rows([rewrite.new for rewrite in rewrites])
        extracted = extract(records, evaluation=[states[rewrite.seq][2] for rewrite in rewrites])
        blobs = list(extracted.blobs)
        parts = [encode(extracted.stripped), *(extracted.blobs[key].data for key in blobs)]
        if book.quota is not None and kind != "redacted":  # A redaction is never refused for lack of space.
            from rollbook.book.append import check_quota

            check_quota(book, sum(len(data) for data in parts))
        if append is not None:
            append.write_bytes()
        place, *media_places = book.store.put(parts)
        index_rows = index_columns.index_columns(records)
        rewritten_seqs = [rewrite.seq for rewrite in rewrites]
        if hashes is None:
            stored_hashes = content_hash.content_hashes(records).full
        else:
            stored_hashes = [hashes[rewrite.position] for rewrite in rewrites]
        with queue.write_drained(book, timeout=timeout) as tx:
            if _read_revisions(tx, seqs) != states or not book.store.has(place.segment):
                continue  # Another writer revised or deleted one of them: start again from that.
            if kind == "redacted":
                mark_for_purge(tx, rewritten_seqs)
                _clear_quoted_values(tx, seqs)
            if book.ledger.dialect == "sqlite" and tx.first("SELECT 1 FROM purges WHERE segment = ?", (place.segment,)):
                book.store.seal()  # See `AppendTransaction.__call__`.
            _update_records(tx, rewrites, index_rows, place)
            _add_revisions(tx, rewrites, stored_hashes, author, reason)
            uses = extracted.uses or [()] * len(rewrites)
            _update_media(tx, rewrites, uses, dict(zip(blobs, media_places, strict=True)))
            _record_changes(tx, rewrites, kind, author, reason)
            tx.run_many(
                "INSERT INTO columns (name, type) VALUES (?, ?) ON CONFLICT DO NOTHING",
                sorted(index_columns.column_types(records)),
            )
            ranks: dict[str, list[float | None]] = {}
            for consumer in all_consumers(tx):
                ranked_by = consumer.settings.sampler.key
                if ranked_by is not None and ranked_by not in ranks:
                    numbers = index_columns.number_column(records, ranked_by)
                    ranks[ranked_by] = [None if n is None or math.isnan(n) else n for n in numbers]
                apply_revisions(tx, consumer, rewritten_seqs, ranks.get(ranked_by or ""), retrain is not False)
                if retrain == "group":
                    siblings = _find_siblings(tx, [row.gid for row in index_rows], rewritten_seqs)
                    apply_revisions(tx, consumer, siblings, None, True)
            if append is not None:
                append.commit(tx)
            if kind == "redacted":
                deletions = [Deletion(r.new.eid.uid, tx.now, author, reason, tuple(r.fields)) for r in rewrites]
                append_deletions(book.store, deletions)
        return [rewrite.position for rewrite in rewrites]
    raise BookError(f"records {list(seqs)[:3]}...: other writers revised them during each of {_MAX_ATTEMPTS} attempts")


class _Rewrite(NamedTuple):
    """A record that is replaced."""

    position: int
    """Index among the records of the call."""
    seq: int
    old: Experience
    new: Experience
    fields: Sequence[str]
    """Names of the fields that differ."""
    revision: int
    """Number of the new revision."""


def _update_records(
    tx: Transaction,
    rewrites: Sequence[_Rewrite],
    index_rows: Sequence[index_columns.IndexColumns],
    place: Place,
) -> None:
    """Write the index columns of rewritten records, and where their frame is."""
    share = -(-place.length // len(rewrites))
    columns = (*index_columns.IndexColumns._fields, "revision", "segment", "start", "size", "slot", "bytes")
    location = (place.segment, place.offset, place.length)
    tx.run_many(
        f"UPDATE records SET {', '.join(f'{name} = ?' for name in columns)} WHERE seq = ?",
        [
            (*index_rows[slot], rewrite.revision, *location, slot, share, rewrite.seq)
            for slot, rewrite in enumerate(rewrites)
        ],
    )


def _add_revisions(
    tx: Transaction, rewrites: Sequence[_Rewrite], hashes: Sequence[bytes], author: str, reason: str | None
) -> None:
    tx.run_many(
        "INSERT INTO revisions (seq, n, time, author, reason, fields, full_hash) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (rewrite.seq, rewrite.revision, tx.now, author, reason, ",".join(rewrite.fields), content)
            for rewrite, content in zip(rewrites, hashes, strict=True)
        ],
    )


def _update_media(
    tx: Transaction, rewrites: Sequence[_Rewrite], uses: Sequence[Sequence[str]], places: Mapping[str, Place]
) -> None:
    """Write which media the rewritten records use, by hash, and where new media are."""
    tx.run_many("DELETE FROM media_uses WHERE seq = ?", [(rewrite.seq,) for rewrite in rewrites])
    rows = [(key, rewrite.seq) for rewrite, keys in zip(rewrites, uses, strict=True) for key in keys]
    tx.run_many(
        "INSERT INTO media (hash, segment, start, size) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
        [(key, places[key].segment, places[key].offset, places[key].length) for key, _ in rows],
    )
    tx.run_many("INSERT INTO media_uses (hash, seq) VALUES (?, ?)", rows)


def _record_changes(tx: Transaction, rewrites: Sequence[_Rewrite], kind: str, author: str, reason: str | None) -> None:
    """Write an event for each rewritten record; that of a revision has the small values before and after."""
    events = []
    for rewrite in rewrites:
        detail: dict[str, Any] = {"author": author, "fields": list(rewrite.fields), "revision": rewrite.revision}
        if kind == "revised":
            detail["was"] = _event_values(rewrite.old, rewrite.fields)
            detail["is"] = _event_values(rewrite.new, rewrite.fields)
        events.append(queue.Event(kind, rewrite.seq, reason=reason, detail=detail))
    queue.record_events(tx, events)


def _event_values(record: Experience, names: Sequence[str]) -> dict[str, Any]:
    values = {name: _event_value(record, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _read_revisions(tx: Transaction, seqs: Sequence[int]) -> dict[int, tuple[int, str | None, bool]]:
    """Return the revision of each record, why it is gone, and whether it is for evaluation."""
    states: dict[int, tuple[int, str | None, bool]] = {}
    for marks, chunk in chunks(seqs):
        rows = tx.all(f"SELECT seq, revision, removed_reason, evaluation FROM records WHERE seq IN ({marks})", chunk)
        states.update(
            (seq, (revision, removed_reason, bool(evaluation))) for seq, revision, removed_reason, evaluation in rows
        )
    return states


def _find_siblings(tx: Transaction, gids: Sequence[str], besides: Sequence[int]) -> list[int]:
    """Return the other records of these groups that can be trained on."""
    siblings: list[int] = []
    for marks, chunk in chunks(list(dict.fromkeys(gids))):
        siblings += [
            row[0]
            for row in tx.all(
                f"SELECT seq FROM records WHERE gid IN ({marks}) AND evaluation = 0 AND removed_reason IS NULL "
                "ORDER BY seq",
                chunk,
            )
        ]
    left = set(besides)
    return [seq for seq in siblings if seq not in left]


def _event_value(row: Experience, name: str) -> Any:
    """Return a number or text for an event, or `None` for anything else."""
    head, _, key = name.partition(".")
    value = getattr(row, head)
    if key:
        value = value.get(key)
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= 200) else None


def apply_revisions(
    tx: Transaction, consumer: Consumer, seqs: Sequence[int], values: Sequence[float | None] | None, retrain: bool
) -> None:
    """Update a consumer's rows to new numbers; with `retrain`, return finished records to the queue."""
    numbers = dict(zip(seqs, values, strict=True)) if values is not None else {}
    sampler = consumer.settings.sampler
    moves = []
    events = []
    for row in queue.select_rows_by_seq(tx, consumer, seqs):
        new = row
        if row.seq in numbers and numbers[row.seq] != row.value:
            item = consumer.item(row.seq, row.uses, row.version, numbers[row.seq])
            new = new._replace(value=item.value, weight=sampler.weight(item))
            if row.state == queue.WAITING:
                new = new._replace(rank=sampler.rank(item, consumer.state))
        if retrain and row.state in (queue.TRAINED, queue.DROPPED):
            item = consumer.item(row.seq, row.uses, row.version, new.value)
            rank = sampler.rank(item, consumer.state)
            new = new._replace(state=queue.WAITING, reason=None, rank=rank, until=None)
            events.append(queue.Event("returned", row.seq, consumer.id, "revised"))
        if new != row:
            moves.append((row, new))
    queue.change_rows(tx, consumer, moves, events)
    save_consumer(tx, consumer)


# --- public operations ----------------------------------------------------------------------------------------------


def add_fields(
    book: Book,
    pending: PendingAppend,
    revisions: Sequence[tuple[int, int]],
    author: str,
    append: AppendTransaction | None,
    timeout: float | None = None,
) -> list[str]:
    """Add late fields to existing records and, if any changes, append new records in the same transaction.

    Returns:
        The ids of the changed records.
    """
    indices = [i for i, _ in revisions]
    rows = pending.select(indices).rows()

    def change(old: Experience, i: int) -> tuple[Experience, Sequence[str]] | None:
        addition = compare(old, rows[i])
        if addition.conflict is not None:
            raise ConflictError(
                f"{old.eid.uid}: got another record under the same id; {addition.conflict}; "
                "append only adds missing fields; book.revise changes existing ones"
            )
        return (addition.merged, addition.added) if addition.added else None

    stored_hashes = [pending.hashes.full[i] for i in indices]
    seqs = [seq for _, seq in revisions]
    revised = rewrite_records(
        book,
        seqs,
        change,
        kind="revised",
        author=author,
        reason="append",
        hashes=stored_hashes,
        append=append,
        timeout=timeout,
    )
    if len(revised) < len(seqs):
        _store_hashes(book, seqs, stored_hashes, author)
    return [pending.index_rows[indices[i]].uid for i in revised]


def _store_hashes(book: Book, seqs: Sequence[int], stored_hashes: Sequence[bytes], author: str) -> None:
    """Store the hashes of records that added nothing, so that the next append recognizes them at once."""
    with book.ledger.write() as tx:
        for seq, content in zip(seqs, stored_hashes, strict=True):
            if tx.first("SELECT 1 FROM revisions WHERE seq = ? AND full_hash = ?", (seq, content)) is None:
                n = tx.first("SELECT COALESCE(MIN(n), 0) FROM revisions WHERE seq = ? AND n <= 0", (seq,))[0] - 1
                tx.run(
                    "INSERT INTO revisions (seq, n, time, author, reason, fields, full_hash) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (seq, n, tx.now, author, "append", "", content),
                )


def check_signature(author: str, reason: str | None) -> None:
    """Check the author and the reason of a change."""
    check_text("author", author)
    if reason is not None:
        check_text("reason", reason)


def revise_records(
    book: Book, changes: Mapping[str, Mapping[str, Any]], *, author: str, reason: str | None, retrain: bool | str
) -> int:
    """Implement `Book.revise`."""
    allowed = [name for name, field in FIELDS.items() if content_hash.is_late(field)]
    for uid, fields in changes.items():
        for name in fields:
            if name not in allowed:
                raise ValueError(f"revise: {uid}: field {name!r} cannot be revised{suggest(name, allowed)}")
    listed = list(changes.values())

    def change(old: Experience, i: int) -> tuple[Experience, Sequence[str]] | None:
        new_fields = {
            name: {**getattr(old, name), **value} if FIELDS[name].kind == "json" else value
            for name, value in listed[i].items()
        }
        new = old.replace(**new_fields)
        names = [name for name in new_fields if not same(getattr(old, name), getattr(new, name))]
        return (new, names) if names else None

    seqs = find_seqs(book, list(changes))
    done = rewrite_records(book, seqs, change, kind="revised", author=author, reason=reason, retrain=retrain)
    same_as_before = [seq for i, seq in enumerate(seqs) if i not in set(done)]
    if retrain and same_as_before:
        _requeue_unchanged(book, same_as_before, retrain)
    return len(done)


def _requeue_unchanged(book: Book, seqs: Sequence[int], retrain: bool | str) -> None:
    """Return records to the queue that a revision did not change."""
    with queue.write_drained(book) as tx:
        returned = list(seqs)
        if retrain == "group":
            gids: list[str] = []
            for marks, chunk in chunks(seqs):
                gids += [row[0] for row in tx.all(f"SELECT gid FROM records WHERE seq IN ({marks})", chunk)]
            returned += _find_siblings(tx, gids, seqs)
        for consumer in all_consumers(tx):
            apply_revisions(tx, consumer, returned, None, True)


REDACTABLE = ("prompt_text", "response_text", "messages", "tools", "chosen_messages", "rejected_messages")
"""Fields that can be redacted, in addition to `info`, `metrics`, `multi_modal_inputs` and their keys as `info.NAME`."""


@served(repeat=True)
def redact_records(
    book: Book, uids: RecordIds, fields: Sequence[str], *, author: str, reason: str | None = None
) -> int:
    """Blank texts, messages, media or keys of `info` of records; the next compaction removes the old bytes.

    Records are redacted in chunks: a call that fails leaves the rest unchanged, and repeating it finishes.

    Args:
        book: The book.
        uids: One id or record, or several.
        fields: Fields, or keys of `info` as `info.NAME`.
        author: Who redacts; stored in the ledger.
        reason: Why; stored in the ledger.

    Returns:
        How many records changed.

    Raises:
        ValueError: A field cannot be redacted.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> record = rollbook.Experience(tokens=[1, 2, 3], info={"name": "Ana", "level": 2})
    >>> _ = book.append(record)
    >>> redact_records(book, record, ["info.name"], author="ana"), book[record.eid.uid].info
    (1, {'level': 2})
    """
    check_writable(book, "redact_records")
    check_signature(author, reason)
    allowed = (*REDACTABLE, "info", "metrics", "multi_modal_inputs")
    for name in fields:
        head, dot, _ = name.partition(".")
        if head not in allowed or (dot and head not in allowed[len(REDACTABLE) :]):
            raise ValueError(f"redact: field {name!r} cannot be redacted{suggest(name, list(allowed))}")

    def change(old: Experience, i: int) -> tuple[Experience, Sequence[str]] | None:
        blank: dict[str, Any] = {}
        for name in fields:
            head, dot, key = name.partition(".")
            if dot:
                left = blank[head] if head in blank else getattr(old, head)
                blank[head] = {k: v for k, v in (left or {}).items() if k != key}
            else:
                blank[head] = {} if FIELDS[head].always else None
        new = old.replace(**blank)
        heads = {name: name.partition(".")[0] for name in fields}
        names = [name for name, head in heads.items() if not same(getattr(old, head), getattr(new, head))]
        return (new, names) if names else None

    seqs = find_seqs(book, get_uids(uids))
    return sum(
        len(rewrite_records(book, piece, change, kind="redacted", author=author, reason=reason))
        for piece in _split_by_size(book, seqs)
    )


def _split_by_size(book: Book, seqs: Sequence[int]) -> list[list[int]]:
    """Split records into pieces that are rewritten together; raise if one of them has no bytes."""
    pieces: list[list[int]] = []
    free_bytes = 0
    for start in range(0, len(seqs), _CHUNK):
        chunk = seqs[start : start + _CHUNK]
        with book.ledger.read() as tx:
            places = locate(tx, chunk)
            sizes = dict(
                row
                for marks, some in chunks(chunk)
                for row in tx.all(f"SELECT seq, bytes FROM records WHERE seq IN ({marks})", some)
            )
        check_present(book, chunk, places)
        for seq in chunk:
            if not pieces or len(pieces[-1]) == _REDACT_CHUNK or sizes[seq] > free_bytes:
                pieces.append([])
                free_bytes = _REDACT_BYTES
            pieces[-1].append(seq)
            free_bytes -= sizes[seq]
    return pieces


def mark_for_purge(tx: Transaction, seqs: Sequence[int]) -> None:
    """Mark the segments of these records, which the next compaction has to rewrite."""
    for marks, chunk in chunks(seqs):
        for table, condition in (
            ("records", f"seq IN ({marks}) AND segment IS NOT NULL"),
            ("media", f"hash IN (SELECT hash FROM media_uses WHERE seq IN ({marks}))"),
        ):
            tx.run(
                f"INSERT INTO purges (segment, since) SELECT DISTINCT segment, {tx.now!r} FROM {table} "
                f"WHERE {condition} ON CONFLICT DO NOTHING",
                chunk,
            )


def _clear_quoted_values(tx: Transaction, seqs: Sequence[int]) -> None:
    """Clear the values of records that events quote."""
    for marks, chunk in chunks(seqs):
        tx.run(f"UPDATE events SET detail = NULL WHERE kind = 'revised' AND seq IN ({marks})", chunk)


def delete_records(book: Book, uids: Sequence[str], *, author: str, reason: str | None) -> int:
    """Implement `Book.delete`."""
    seqs = find_seqs(book, uids)
    count = 0
    for start in range(0, len(seqs), _CHUNK):
        with queue.write_drained(book) as tx:
            count += _delete_chunk(tx, book, seqs[start : start + _CHUNK], author, reason)
        hit_failpoint("during delete")
        if start + _CHUNK < len(seqs):
            yield_to_writers(book.ledger)
    return count


def _delete_chunk(tx: Transaction, book: Book, seqs: Sequence[int], author: str, reason: str | None) -> int:
    """Delete records, except those deleted already; return how many."""
    present = tx.all(
        f"SELECT seq, uid FROM records WHERE seq {tx.in_ints} "
        "AND (removed_reason IS NULL OR removed_reason <> 'deleted')",
        (tx.array(seqs),),
    )
    seqs_present = [seq for seq, _ in present]
    mark_for_purge(tx, seqs_present)
    tx.run(
        "UPDATE records SET removed_reason = 'deleted', segment = NULL, start = NULL, size = NULL, slot = NULL, "
        f"bytes = 0, reward = NULL, scored = 0 WHERE seq {tx.in_ints}",
        (tx.array(seqs_present),),
    )
    tx.run(f"DELETE FROM media_uses WHERE seq {tx.in_ints}", (tx.array(seqs_present),))
    queue.record_events(
        tx, [queue.Event("deleted", seq, reason=reason, detail={"author": author}) for seq in seqs_present]
    )
    for consumer in all_consumers(tx):
        rows = queue.select_rows_by_seq(tx, consumer, seqs_present)
        queue.drop_rows(
            tx, consumer, [row for row in rows if row.state in (queue.WAITING, queue.COOLING, queue.LEASED)], "deleted"
        )
        save_consumer(tx, consumer)
    _clear_quoted_values(tx, seqs_present)
    append_deletions(book.store, [Deletion(uid, tx.now, author, reason) for _, uid in present])
    return len(seqs_present)
