"""`Book`: records between those who make them and those who train on them.

Invariant: nothing is lost, acknowledged twice or dropped without a reason: what a method returned is in the ledger, and
what it raised changed nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rollbook.book import compaction, queue, reports, revision, schema
from rollbook.book.append import (
    AppendResult,
    GroupCommit,
    append_records,
    append_tombstones,
    check_tokenizer,
    configure_consumer,
)
from rollbook.book.checkpoint import (
    Checkpoint,
    RewindResult,
    forget_checkpoint,
    list_checkpoints,
    make_checkpoint,
    rewind_book,
    trained_steps,
)
from rollbook.book.compaction import CompactionResult
from rollbook.book.consumer import (
    Consumer,
    ConsumerConfig,
    all_consumers,
    create_consumer,
    delete_removed_consumers,
    find_consumer,
    get_consumer,
    remove_consumer,
)
from rollbook.book.disk import Disk
from rollbook.book.errors import BookError, CorruptBookError, NotABookError, ReadOnlyError
from rollbook.book.lease import (
    Lease,
    alease_records,
    check_request,
    drop_stale_records,
    lease_records,
    refresh_consumer,
)
from rollbook.book.ledger import Ledger, SQLiteLedger, Transaction, check_files, check_text, let_others
from rollbook.book.read import Selection, fetch, parse_conditions, seqs_of, uid_of, uids_of
from rollbook.book.reports import log_metrics, read_metrics
from rollbook.book.segments.files import FileSegmentStore, MemorySegmentStore, SegmentStore
from rollbook.book.transfer import copy_book
from rollbook.core.addresses import POSTGRES, PostgresAddress, is_conninfo, redacted, url_secrets
from rollbook.core.checks import check_bool, check_choice, check_float, check_int

if TYPE_CHECKING:
    import pyarrow as pa

    from rollbook.book.append import Writer
    from rollbook.book.check import Report
    from rollbook.book.query import Result
    from rollbook.core.experience import Experience
    from rollbook.core.experiences import Experiences
    from rollbook.core.ids import EID
    from rollbook.core.vocabulary import Vocabulary


TRAIN = "train"
"""The consumer group that is meant where none is named."""


class Book:
    """A durable, replayable, queryable store of experience; made by `rollbook.open`.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> group = [rollbook.Experience(eid={"batch": 0, "task": 1, "run": r}, tokens=[1, 2, 3 + r], reward=float(r),
    ...                              group_size=2) for r in range(2)]
    >>> book.append(group)
    AppendResult(admitted=2, known=0, revised=0, stale=0)
    >>> book.append(group).known
    2
    >>> with book.lease(1, by="group") as lease:
    ...     print(lease.experiences.values("reward"))
    ...     _ = lease.ack(step=1)
    [0.0, 1.0]
    >>> [event.kind for event in book.history(group[0].eid.uid)]
    ['admitted', 'leased', 'trained']
    >>> book.counts()
    Counts(consumer='train', admitted=2, waiting=0, leased=0, trained=2, dropped={}, evaluation=0)
    """

    def __init__(
        self,
        url: str,
        ledger: Ledger,
        store: SegmentStore,
        *,
        read_only: bool = False,
        tokenizer: str | None = None,
        quota: int | None = None,
    ) -> None:
        self.url = redacted(url)
        """Where the book is, without secrets."""
        self.ledger = ledger
        self.store = store
        self.read_only = read_only
        self.tokenizer = tokenizer
        self.quota = quota
        self.appends = itertools.count(os.urandom(1)[0])
        """Counts appends, from anywhere on: programs that append once and end merge small segments now and then too."""
        self.tender: threading.Thread | None = None
        """Merges small segments beside appends, for a moment now and then."""
        self.closed = False
        self.opened_with: dict[str, Any] = {}
        """Arguments of `rollbook.open` that open this book again."""
        self.group_commit = GroupCommit()
        self.known_kinds: set[tuple[str, str]] = set()
        """Columns and their types that the ledger is known to have noted."""
        self.unsettled_checkpoints: dict[str | None, str] = {}
        """Tokens of checkpoints whose outcome is unknown, by the name that was asked for."""
        self.untold: Any = None
        """The tokenizer itself, until the ledger is known to have its vocabulary."""

    def start(self, settings: Mapping[str, Any]) -> None:
        """Have the consumer group "train" there, with these settings."""
        if self.read_only:
            if settings:
                raise ReadOnlyError(f"{self.url}: opened for reading, and got settings ({', '.join(settings)})")
            return
        self.consumer(TRAIN, create=True, **settings)

    def _writable(self, what: str) -> None:
        if self.read_only:
            raise ReadOnlyError(f"{what}: {self.url} was opened for reading (mode 'r')")

    # --- bringing ---------------------------------------------------------------------------------------------

    def append(
        self,
        experiences: Experience | Iterable[Experience],
        *,
        evaluation: bool = False,
        author: str = "",
        timeout: float | None = None,
    ) -> AppendResult:
        """Admit records; durable when it returns, all of them or none.

        The same record again changes nothing, whatever was revised since. A known id with fields that were missing
        (advantages, returns, a reward, new keys of `info`) is a revision by `author`; with anything else different it
        is a `ConflictError`. `evaluation=True`: stored for evaluation, never leased. While a rate limiter holds inserts
        back, this waits at most `timeout` seconds, and then raises `BackPressureError`.
        """
        self._writable("append")
        check_text("author", author, 0)
        if timeout is not None:
            check_float("timeout", timeout, 0.0)
        return append_records(self, experiences, evaluation=evaluation, author=author, timeout=timeout)[0]

    async def aappend(self, experiences: Experience | Iterable[Experience], **options: Any) -> AppendResult:
        """`append` without blocking the event loop."""
        return await asyncio.to_thread(lambda: self.append(experiences, **options))

    def writer(
        self, *, delay: float = 0.05, batch: int = 256, most: int = 4096, evaluation: bool = False, author: str = ""
    ) -> Writer:
        """A streaming writer: small appends are gathered for at most `delay` seconds, or until `batch` records are
        together, and admitted as one."""
        self._writable("writer")
        check_text("author", author, 0)
        from rollbook.book.append import Writer

        return Writer(self, delay=delay, batch=batch, most=most, evaluation=evaluation, author=author)

    def fail(self, eids: EID | Sequence[EID], reason: str = "failed", *, group_size: int | None = None) -> int:
        """Tombstones: runs that gave no record (a crash, a filter) and count for their group; how many are new.

        They are dropped from the start, for this reason. Fail runs before the others of their group are appended: then
        a crash in between leaves no group that waits for ever.
        """
        self._writable("fail")
        check_text("reason", reason)
        listed = [eids] if hasattr(eids, "uid") or isinstance(eids, (str, Mapping)) else list(eids)
        return append_tombstones(self, listed, reason, group_size) if listed else 0

    def drop(self, uids: Any, reason: str = "filtered", *, consumer: str | None = None) -> int:
        """Give up records that wait or rest, for one consumer or for all; they still count for their groups. How many
        were given up, by all these consumers together."""
        self._writable("drop")
        check_text("reason", reason)
        seqs = seqs_of(self, uids_of(uids))
        count = 0
        for start in range(0, len(seqs), queue.CHUNK):
            with queue.write_drained(self) as tx:
                groups = all_consumers(tx) if consumer is None else [get_consumer(tx, consumer)]
                piece = seqs[start : start + queue.CHUNK]
                count += sum(queue.drop_by_seq(tx, group, piece, reason) for group in groups)
            let_others(self.ledger)
        return count

    # --- taking -----------------------------------------------------------------------------------------------

    def consumer(
        self, name: str = TRAIN, *, create: bool = False, change: bool = False, **settings: Any
    ) -> ConsumerConfig:
        """Return a consumer group's settings (see `ConsumerConfig`).

        Args:
            create: Create the group, with these settings, if the book does not have it.
            change: Change the settings of a group that exists, for everybody; all that waits is ranked anew. Without
                it, other settings than those of the group are refused.

        Raises:
            UnknownConsumerError: The book has no such group, and `create` is false.
        """
        with self.ledger.read() as tx:
            found = find_consumer(tx, name) if create else get_consumer(tx, name)
        if found is not None and found.settings.changed(settings) == found.settings:
            return found.settings
        self._writable("consumer")
        with self.ledger.write() as tx:
            configured = configure_consumer(tx, self, name, settings, create=create, change=change)
        if found is not None:
            refresh_consumer(self, name)
        return configured

    def remove_consumer(self, name: str) -> None:
        """Remove a consumer group: its leases end, and no record is kept for its sake any more.

        Events keep what it did, without its name. The group "train" cannot be removed.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> _ = book.consumer("replay", create=True)
        >>> book.remove_consumer("replay")
        >>> list(book.consumers())
        ['train']
        """
        self._writable("remove_consumer")
        if name == TRAIN:
            raise ValueError(f"remove_consumer: got {name!r}, which every book has")
        with self.ledger.write() as tx:
            remove_consumer(tx, name)
        delete_removed_consumers(self.ledger)

    def consumers(self) -> dict[str, ConsumerConfig]:
        """The consumer groups there are, in the order they were made, and their settings."""
        with self.ledger.read() as tx:
            return {each.name: each.settings for each in all_consumers(tx)}

    def make_consumer(self, tx: Transaction, name: str, settings: Mapping[str, Any] | None = None) -> Consumer:
        """A new consumer group, offered all that is in the book for training."""
        consumer = create_consumer(tx, name, ConsumerConfig().changed(dict(settings or {})))
        queue.backfill_consumer(tx, consumer.id)
        return consumer

    def lease(
        self,
        n: int,
        *,
        by: str = "experience",
        consumer: str = TRAIN,
        create: bool = False,
        timeout: float | None = 0.0,
        exact: bool = False,
        max_staleness: int | None = None,
        seconds: float | None = None,
    ) -> Lease:
        """Claim `n` records, or (`by="group"`) `n` whole groups with all that waits of them.

        Args:
            consumer: The consumer group that the records are for.
            create: Create the group, with default settings, if the book does not have it.
            timeout: How many seconds to wait until all are there, other writers' turns included; `None`: without limit.
                After that the lease has what there is, and `lease.short` says why it is less.
            exact: Claim all `n` or none.
            max_staleness: Overrides the group's bound; what is older is dropped as stale, for good.
            seconds: How long the lease lives without progress; by default the group's `lease_seconds`.

        Raises:
            UnknownConsumerError: The book has no such group, and `create` is false.
            LockTimeoutError: With `timeout=None`: another writer held the ledger for 30 s.
        """
        self._writable("lease")
        wanted = check_request(consumer, n, by, max_staleness, seconds, timeout, exact=exact, create=create)
        return lease_records(self, wanted, timeout)

    async def alease(
        self,
        n: int,
        *,
        by: str = "experience",
        consumer: str = TRAIN,
        create: bool = False,
        timeout: float | None = 0.0,
        exact: bool = False,
        max_staleness: int | None = None,
        seconds: float | None = None,
    ) -> Lease:
        """`lease` without blocking the event loop; a wait that is cancelled has claimed nothing."""
        self._writable("lease")
        wanted = check_request(consumer, n, by, max_staleness, seconds, timeout, exact=exact, create=create)
        return await alease_records(self, wanted, timeout)

    # --- the policy's version -----------------------------------------------------------------------------------

    def announce(self, version: int) -> None:
        """Say which policy version is trained now: what consumers' staleness bounds count from. It never falls."""
        self._writable("announce")
        version = check_int("version", version)
        with self.ledger.write() as tx:
            is_new = queue.announce_version(tx, version)
        for name, settings in self.consumers().items() if is_new else ():
            if settings.max_staleness is not None:
                drop_stale_records(self, name)

    @property
    def policy_version(self) -> int | None:
        """The version that was announced last."""
        with self.ledger.read() as tx:
            return queue.announced_version(tx)

    @property
    def policy_lineage(self) -> int:
        """The number of the policy's lineage, which every rewind raises.

        Whoever samples reads it with `policy_version` and puts it into `info["policy_lineage"]` of the records: then a
        record of a version that a rewind abandoned is known as such, whenever it is appended.
        """
        with self.ledger.read() as tx:
            return queue.read_lineage(tx).number

    # --- measuring -----------------------------------------------------------------------------------------------

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep numbers of a training step, by name; SQL sees them in `events`, as the JSON of `detail`.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> book.log(1, {"loss": 0.5, "grad_norm": float("inf")})
        >>> book.metrics()
        [(1, {'loss': 0.5, 'grad_norm': inf})]
        """
        self._writable("log")
        log_metrics(self, step, metrics)

    def metrics(self) -> list[tuple[int, dict[str, float]]]:
        """What was logged, step by step, of one name the last; without what came after a checkpoint that was rewound
        to."""
        return read_metrics(self)

    # --- changing -----------------------------------------------------------------------------------------------

    def revise(
        self,
        uid: str | EID | Experience | Mapping[str, Mapping[str, Any]],
        *,
        author: str,
        reason: str | None = None,
        retrain: bool | str = False,
        **fields: Any,
    ) -> int:
        """Change what comes late (reward, advantages, `info` ...) of a record, or of many: `{uid: {field: value}}`.

        Who did it and when stands in the ledger. Dicts are merged. `retrain=True`: records that were trained or dropped
        wait again; `retrain="group"`: and so do the other records of their groups, for estimators that compare within a
        group. Returns how many records changed.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> record = rollbook.Experience(tokens=[1, 2, 3])
        >>> _ = book.append(record)
        >>> book.revise(record, reward=1.0, author="ana", reason="looks right")
        1
        >>> book[record.eid.uid].reward, book.history(record.eid.uid)[-1].detail["author"]
        (1.0, 'ana')
        """
        self._writable("revise")
        revision.check_signature(author, reason)
        if isinstance(uid, Mapping):
            if fields:
                raise ValueError(f"revise: got {', '.join(fields)} beside a mapping, expected one of the two")
            changes = {uid_of(key): dict(value) for key, value in uid.items()}
        else:
            changes = {uid_of(uid): fields}
        if not retrain and not all(changes.values()):
            raise ValueError("revise: got no field to change")
        check_choice("retrain", retrain, (False, True, "group"))
        return revision.revise_records(self, changes, author=author, reason=reason, retrain=retrain) if changes else 0

    def redact(self, uids: Any, fields: Sequence[str], *, author: str, reason: str | None = None) -> int:
        """Blank texts, messages, media or keys of `info` of records; the next compaction removes the old bytes.

        Many records are worked through in pieces: a call that fails in the middle leaves the rest as it was, and
        repeating it finishes.
        """
        self._writable("redact")
        revision.check_signature(author, reason)
        return revision.redact_records(self, uids_of(uids), list(fields), author=author, reason=reason)

    def delete(self, uids: Any, *, author: str, reason: str | None = None) -> int:
        """Remove records; the ledger keeps their ids, so that they are not admitted again. The next compaction removes
        the bytes.

        Many records are worked through in pieces: a call that fails in the middle leaves the rest as it was, and
        repeating it finishes.
        """
        self._writable("delete")
        revision.check_signature(author, reason)
        return revision.delete_records(self, uids_of(uids), author=author, reason=reason)

    # --- points to go back to ------------------------------------------------------------------------------------

    def checkpoint(self, name: str | None = None, *, keep: int | None = None) -> str:
        """Name this point, for a trainer to save with its weights; the name.

        A name that another point has is refused; the same point again changes nothing. `keep`: forget all checkpoints
        but the newest so many. What the oldest one needs is not removed.
        """
        self._writable("checkpoint")
        return make_checkpoint(self, name, keep)

    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that are kept, oldest first."""
        return list_checkpoints(self)

    def forget(self, name: str) -> None:
        """Forget a checkpoint; nothing is kept for its sake any more."""
        self._writable("forget")
        forget_checkpoint(self, name)

    def rewind(self, name: str, *, later: str = "keep") -> RewindResult:
        """Go back to a checkpoint: acknowledgements that came after it are void, and their records are offered again.

        Every consumer is as it was (its settings, its counters, each record's uses and place), and so is the announced
        version. The next leases are those that followed the checkpoint the first time. Living leases end, and what they
        held waits.
        Records that came later wait (`later="keep"`) or are dropped as "rewound" and their ids are free again
        (`later="drop"`); for consumers with `max_staleness` those that were sampled by versions after the checkpoint's,
        which are abandoned, are stale. Consumers made later begin anew; later checkpoints are forgotten. Revisions
        stay, and what was deleted stays deleted.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3])])
        >>> saved = book.checkpoint()
        >>> book.lease(1).ack(step=1)
        1
        >>> book.rewind(saved).acks, book.counts().waiting, book.trained()
        (1, 1, {})
        """
        self._writable("rewind")
        return rewind_book(self, name, later)

    def trained(self, consumer: str = TRAIN) -> dict[str, list[int | None]]:
        """The optimizer steps in which each record was trained on, by id: acknowledgements that no rewind voided."""
        return trained_steps(self, consumer)

    def fork(self, name: str, url: str | os.PathLike[str], **options: Any) -> Book:
        """Start another run from a checkpoint: a new book at `url` with all as it was then; this one stays as it is.

        What came after the checkpoint is not in it, except revisions and deletions of what came before.
        `options`: those of `rollbook.open` that say how the new book is kept.
        """
        return copy_book(self, url, name, options)

    def snapshot(self, url: str | os.PathLike[str], **options: Any) -> Book:
        """Copy the book as it is at one moment to an empty `url`, of any kind, while others go on writing; the copy.

        Leases that live now are void in the copy. `options`: those of `rollbook.open` that say how the copy is kept.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3])])
        >>> copy = book.snapshot("memory:")
        >>> _ = book.append([rollbook.Experience(tokens=[4, 5, 6])])
        >>> len(book), len(copy)
        (2, 1)
        """
        return copy_book(self, url, None, options)

    # --- looking ------------------------------------------------------------------------------------------------

    def __getitem__(self, uid: str | EID) -> Experience:
        """The record as it is now."""
        return fetch(self, seqs_of(self, [uid_of(uid)]))[0]

    def __iter__(self) -> Iterator[Experience]:
        """Every record as it is now, in the order of admission; those whose bytes are gone are left out."""
        return iter(self.where())

    def get(self, uids: Any) -> Experiences:
        """Records by id, in this order."""
        return fetch(self, seqs_of(self, uids_of(uids)))

    def __contains__(self, uid: object) -> bool:
        with self.ledger.read() as tx:
            return bool(tx.one("SELECT 1 FROM records WHERE uid = ?", (uid_of(uid),)))  # type: ignore[arg-type]

    def __len__(self) -> int:
        """How many records were admitted, for training and evaluation, failed runs among them."""
        with self.ledger.read() as tx:
            return int(tx.one("SELECT CAST(COALESCE(SUM(n), 0) AS BIGINT) FROM tallies WHERE consumer = 0")[0])

    def __bool__(self) -> bool:
        return True

    def where(self, *conditions: tuple[str, str, Any], **equal: Any) -> Selection:
        """The records that meet all conditions: `("reward", ">", 0.5)`, `("info.level", "in", [1, 2])`, `task="a"`.

        Columns are those of the ledger (`rollbook.book.read.LEDGER_COLUMNS`), texts and numbers of a record, and
        entries of `info` and `metrics` as `info.NAME`.
        """
        return Selection(self, parse_conditions(conditions, equal))

    def scan(
        self, columns: Sequence[str] | None = None, *conditions: tuple[str, str, Any], rows: int = 1024, **equal: Any
    ) -> Iterator[pa.RecordBatch]:
        """Arrow batches of some columns (all, if none are named) of the records that meet all conditions.

        Memory is that of a batch, of at most `rows` rows; columns that are not named are not touched, and those of
        mapped segments are not copied. They are checked as far as it is needed to be safe; `book.get` checks all.
        """
        return self.where(*conditions, **equal).scan(columns, rows)

    def sql(
        self,
        query: str,
        parameters: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        memory: str | int = "1GB",
        seconds: float = 60.0,
    ) -> Result:
        """DuckDB's answer to one reading statement over the tables `experiences`, `events` (also called `ledger`),
        `work`, `leases`, `revisions`, `checkpoints` and `media`; `.arrow()`, `.pandas()`, `.polars()` or `.rows()`.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> for i in range(4):
        ...     _ = book.append(rollbook.Experience(eid={"task": i % 2}, tokens=[1, 2, i], reward=i / 4))
        >>> book.sql("select tid, avg(reward) mean, max(len(tokens)) longest from experiences group by 1 order by 1")
        tid  mean  longest
        /0   0.25        3
        /1    0.5        3
        """
        from rollbook.book.sql import run_sql

        return run_sql(self, query, parameters, memory, seconds)

    def counts(self, consumer: str = TRAIN) -> reports.Counts:
        """How far a consumer is: admitted = waiting + leased + trained + dropped, by reason."""
        return reports.counts(self, consumer)

    def history(self, uid: str | EID | Experience) -> list[reports.Entry]:
        """Every event of one record, in order."""
        return reports.history(self, uid_of(uid))

    def keep_rates(
        self, by: str = "length", edges: Sequence[float] | None = None, consumer: str = TRAIN
    ) -> list[reports.KeepRate]:
        """How many of the records of each response length (`by="length"`, in tokens), or reward, were trained on, and
        how many were dropped; without runs that failed, which have neither."""
        return reports.keep_rates(self, consumer, by, edges)

    def now(self) -> float:
        """The database's clock, in seconds since 1970."""
        with self.ledger.read() as tx:
            return float(tx.now)

    def vocabulary(self) -> Vocabulary | None:
        """The bytes of each token id, from the tokenizer that the book was first written with; `None` if it was opened
        without one, or with a fingerprint alone."""
        from rollbook.book.append import read_vocabulary

        return read_vocabulary(self)

    # --- keeping house --------------------------------------------------------------------------------------------

    def compact(
        self, *, garbage: float = 0.5, small: int = compaction.SMALL, grace: float = 3600.0
    ) -> CompactionResult:
        """Remove bytes that nobody needs and merge small segments, beside readers and writers.

        Written anew are segments of which more than the share `garbage` is not needed, those that hold deleted or
        redacted bytes, and those below `small` bytes where there are many. Segments that nothing points to, as a crash
        leaves them, are removed when they are met again `grace` seconds after they were noticed. Records that every
        consumer dropped, too old or too many, lose their bytes, unless a checkpoint needs them or `keep_stale` keeps
        them; trained ones keep theirs until a quota asks for room.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> records = [rollbook.Experience(tokens=[1, 2, 3 + i]) for i in range(4)]
        >>> _ = book.append(records)
        >>> _ = book.delete(records[:3], author="ana")
        >>> done = book.compact()
        >>> done.records, done.removed, done.after < done.before
        (1, 1, True)
        """
        self._writable("compact")
        return compaction.compact(self, garbage=garbage, small=small, grace=grace)

    def check(self, *, deep: bool = True) -> Report:
        """Whether all that the book promises is true: tables, places, bytes, counts, leases, groups, events, files.

        Changes nothing, beside readers and writers, in little memory. `deep=False` does not look at every byte of the
        data. `rollbook.book.repair` mends what is found.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3])])
        >>> book.check().ok
        True
        """
        from rollbook.book.check import check

        return check(self, deep=deep)

    # --- other formats ------------------------------------------------------------------------------------------

    def export(
        self,
        path: str | os.PathLike[str],
        *conditions: tuple[str, str, Any],
        format: str | None = None,
        evaluation: bool = False,
        overwrite: bool = False,
        **options: Any,
    ) -> int:
        """Write the records that meet all conditions (all, if there are none) as Parquet, a HF dataset, JSONL, frames
        or TRXP (see `rollbook.io.transfer.FORMATS`); how many. The format follows from the path unless it is given.

        Files do not say what a record is for: those for training are written, or (`evaluation=True`) those that are
        kept beside, for `import_(..., evaluation=True)`.
        """
        from rollbook.io import transfer

        kept = self.where(*conditions, evaluation=int(check_bool("evaluation", evaluation)))
        return transfer.write(kept.batches(), path, format, overwrite=overwrite, **options)

    def import_(
        self,
        path: str | os.PathLike[str],
        format: str | None = None,
        *,
        evaluation: bool = False,
        author: str = "",
        on_error: str = "raise",
        **options: Any,
    ) -> AppendResult:
        """Append what a file, folder or database of any of `rollbook.io.transfer.FORMATS` holds, batch by batch.

        Again is nothing: records that are there already stay. `on_error="skip"` leaves out rows that cannot be read,
        and warns how many.
        """
        from rollbook.core.metrics import advise
        from rollbook.io import transfer

        self._writable("import_")
        done = AppendResult()
        with transfer.read(path, format, on_error=on_error, **options) as reading_:
            for batch in reading_:
                done += self.append(batch, evaluation=evaluation, author=author)
        if reading_.report.count:
            advise(
                f"import_: {reading_.report.count} rows of {os.fspath(path)} could not be read; the first: "
                f"{reading_.report.skipped[0].why}"
            )
        return done

    # --- ending -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End writing and let go of files; what was returned is safe in any case."""
        self.closed = True
        if self.tender is not None:
            self.tender.join()
        self.store.close()
        self.ledger.close()

    def __enter__(self) -> Book:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            counts = self.counts()
        except (ImportError, OSError, ValueError, RuntimeError):  # closed, or the server does not answer
            return f"Book({self.url!r})"
        states = f"{counts.waiting:,} waiting, {counts.leased:,} leased, {counts.trained:,} trained"
        return f"Book({self.url!r}: {counts.admitted:,} records, {states})"

    def _repr_html_(self) -> str:
        from rollbook.core.notebook import table

        headers = ["consumer", "records", "waiting", "leased", "trained", "dropped"]
        counts = [self.counts(name) for name in self.consumers()]
        rows = [[c.consumer, c.admitted, c.waiting, c.leased, c.trained, sum(c.dropped.values())] for c in counts]
        evaluation = f", and {counts[0].evaluation:,} for evaluation" if counts and counts[0].evaluation else ""
        return table(f"Book {self.url}{evaluation}", headers, rows)

    def __reduce__(self) -> Any:
        """Pickle by reopening: the copy is another open book on the same records.

        The pickle holds what `rollbook.open` was called with: a password in the address, too.
        """
        if self.url == "memory:":
            raise TypeError("a book in memory cannot be pickled: open a folder or postgresql:// to share it")
        return _reopen, ("r" if self.read_only else "r+", dict(self.opened_with))


def _reopen(mode: str, arguments: Mapping[str, Any]) -> Book:
    return open(mode=mode, **arguments)


LEDGER = "ledger.sqlite"
MODES = ("a", "r+", "r")


def open(
    url: str | os.PathLike[str],
    mode: str = "a",
    *,
    tokenizer: Any = None,
    quota: int | None = None,
    data: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    segment_bytes: int = 256 << 20,
    clock: Callable[[], float] | None = None,
    disk: Disk | None = None,
    **settings: Any,
) -> Book:
    """Open a book, or make it.

    `url` is a folder (`runs/first`; the folder of a run stands for its book), `memory:`, or
    `postgresql://user@host/database` (`?schema=NAME` for more than one book in a database); the password comes
    from `PGPASSWORD` or `~/.pgpass`, or stands in the URL, and is never shown.
    `mode`: "a" makes it if it is not there, "r+" wants it there, "r" only reads. `tokenizer` (or
    its fingerprint): a book takes records of one tokenizer, and keeps its vocabulary, so that its texts can be shown
    without it. `quota`: the most bytes its data may take. `data`: for
    PostgreSQL, a folder or an object store (any fsspec address) for the data instead of the database. `settings`: those
    of the consumer group "train" (see `Book.consumer`). `clock` replaces the database's clock in simulations, `disk`
    the file operations in trials.

    >>> import rollbook
    >>> with rollbook.open("memory:") as book:
    ...     book.append([rollbook.Experience(tokens=[1, 2, 3])]).admitted
    1
    """
    check_choice("mode", mode, MODES)
    if quota is not None:
        check_int("quota", quota, 1)
    check_int("segment_bytes", segment_bytes, 1)
    address = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    read_only = mode == "r"
    if not isinstance(address, str) or not address:
        raise ValueError(f"url: got {url!r}, expected a folder, 'memory:' or 'postgresql://...'")
    ledger: Ledger
    store: SegmentStore
    if address.startswith(POSTGRES):
        ledger, store = _postgres(address, mode, data, storage_options or {}, clock)
    else:
        if data is not None:
            raise ValueError(
                f"data: got {redacted(data)!r}, expected None: only a book in PostgreSQL keeps its data elsewhere"
            )
        if address == "memory:":
            if mode != "a":
                raise NotABookError(f"memory: got mode {mode!r}, expected 'a': a book in memory is always new")
            ledger = SQLiteLedger(None, clock=clock or time.time)
            store = MemorySegmentStore(segment_bytes)
            schema.prepare(ledger, create=True, where="memory:", meta={})
        elif "://" in address or (":" in address.split("/")[0] and not Path(address).exists() and os.name != "nt"):
            raise ValueError(f"url: got {redacted(address)!r}, expected a folder, 'memory:' or 'postgresql://...'")
        elif is_conninfo(address) and not Path(address).exists():
            raise ValueError(f"url: got {redacted(address)!r}, expected it as postgresql://user@host/database")
        else:
            # Absolute: a program may change its folder while the book is open.
            folder = Path(os.path.abspath(os.path.expanduser(address)))
            if not (folder / LEDGER).exists() and (folder / "book" / LEDGER).exists():
                # A run's folder stands for its book, as on the command line: an empty book beside it would hide it.
                folder, address = folder / "book", os.path.join(address, "book")
            ledger, store = _folder(folder, mode, segment_bytes, clock, disk or Disk())
    book = Book(address, ledger, store, read_only=read_only, tokenizer=_fingerprint(tokenizer), quota=quota)
    book.opened_with = {
        "url": address if "://" in address else os.path.abspath(os.path.expanduser(address)),
        "tokenizer": book.tokenizer,
        "quota": quota,
        "data": data,
        "storage_options": storage_options,
        "segment_bytes": segment_bytes,
    }
    if not isinstance(tokenizer, str):
        book.untold = tokenizer
    try:
        if book.tokenizer is not None:
            with ledger.read() as tx:
                check_tokenizer(tx, book)
        book.start(settings)
    except BaseException:
        book.close()
        raise
    return book


def _fingerprint(tokenizer: Any) -> str | None:
    if tokenizer is None or isinstance(tokenizer, str):
        return tokenizer
    from rollbook.core.fingerprints import tokenizer_fingerprint

    if not (hasattr(tokenizer, "backend_tokenizer") or hasattr(tokenizer, "get_vocab")):
        raise ValueError(
            f"tokenizer: got {type(tokenizer).__name__}, of which no fingerprint can be taken; pass a text"
        )
    return tokenizer_fingerprint(tokenizer)


def _folder(
    folder: Path, mode: str, segment_bytes: int, clock: Callable[[], float] | None, disk: Disk
) -> tuple[Ledger, SegmentStore]:
    path = folder / LEDGER
    check_files(path)
    if mode != "a" and not path.exists():
        raise NotABookError(f"{folder}: there is no book here (no {LEDGER})")
    if folder.exists() and not folder.is_dir():
        raise NotABookError(f"{folder}: got a file, expected a folder")
    if mode == "a":
        disk.make_folder(str(folder))
    remote = disk.network_file_system(str(folder))
    if remote is not None:
        raise BookError(
            f"{folder}: the folder is on {remote}, where locks and syncs cannot be trusted; expected a local disk "
            "(postgresql:// is for books that many machines share)"
        )
    store = FileSegmentStore(str(folder), disk, segment_bytes)
    # Looked for before the ledger is: another process may be making the book, and a segment comes after the tables.
    lost = bool(store.segments())
    new = not path.exists()
    if lost and new:
        raise _lost(folder)
    ledger = SQLiteLedger(path, read_only=mode == "r", clock=clock or time.time)
    try:
        if lost and schema.layout_of(ledger) is None:
            raise _lost(folder)
        schema.prepare(ledger, create=mode != "r", where=str(folder), meta={})
        _check_schema(ledger, folder)
        if new:
            disk.sync_folder(str(folder))
        return ledger, store
    except BaseException:
        ledger.close()
        raise


def _lost(folder: Path) -> CorruptBookError:
    """Why no ledger is begun beside segments: it would know nothing of them, and compaction would remove them."""
    return CorruptBookError(
        f"{folder}: it has segments, and its {LEDGER} is missing or empty; `rollbook check --repair` makes one"
    )


_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master"


@lru_cache(maxsize=1)
def _expected() -> frozenset[tuple[Any, ...]]:
    ledger = SQLiteLedger(None)
    schema.prepare(ledger, create=True, where="memory:", meta={})
    with ledger.read() as tx:
        return frozenset(tx.all(_SCHEMA))


def _check_schema(ledger: Ledger, folder: Path) -> None:
    """Refuse tables that are not, word by word, those of this layout: constraints and indices of a stranger's could
    compute whatever it likes at every write. Tables that the book does not know are never touched."""
    with ledger.read() as tx:
        found = frozenset(tx.all(_SCHEMA))
    mine = {row for row in found if row[2] in schema.TABLES}
    unlike = sorted(mine ^ _expected(), key=str)
    if unlike:
        kind, name = unlike[0][:2]
        raise CorruptBookError(
            f"{folder}: the ledger's {kind} {str(name)[:80]!r} is missing or is not what this version makes; "
            "`rollbook check --repair` builds it anew"
        )


def _postgres(
    url: str, mode: str, data: str | None, options: Mapping[str, Any], clock: Callable[[], float] | None
) -> tuple[Ledger, SegmentStore]:
    from rollbook.book.postgres import PostgresLedger
    from rollbook.book.segments.postgres import PostgresSegmentStore

    address = PostgresAddress.parse(url)
    if data is not None and url_secrets(data):
        # The book keeps where its data lies, for whoever opens it.
        raise ValueError(f"data: got {redacted(data)!r} with a secret in it, expected that in storage_options")
    ledger = PostgresLedger(address.plain, address.schema, read_only=mode == "r", clock=clock)
    try:
        if mode == "a":
            ledger.make_schema()
        where = redacted(url)
        if mode == "r+" and schema.layout_of(ledger) is None:
            raise NotABookError(f"{where}: there is no book here")
        schema.prepare(ledger, create=mode != "r", where=where, meta={"data": data or ""})
        with ledger.read() as tx:
            kept = tx.one("SELECT value FROM meta WHERE key = 'data'")[0]
        if kept != (data or ""):
            raise BookError(
                f"{where}: its data lies in {redacted(kept) or 'the database'}; got data={data!r}, expected "
                f"data={redacted(kept) or None!r}"
            )
        if data is None:
            return ledger, PostgresSegmentStore(ledger)
        from rollbook.book.segments.fsspec import FsspecSegmentStore

        return ledger, FsspecSegmentStore(data, options)
    except BaseException:
        ledger.close()
        raise
