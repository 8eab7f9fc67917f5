"""`Book`, the durable store between rollouts and training, and `open`.

Invariant: no record is lost, acknowledged twice or dropped without a reason. When a method returns, its effect is in
the ledger; when it raises, nothing changed.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rollbook.book import compaction, queue, reports, revision
from rollbook.book.append import (
    AppendResult,
    GroupCommit,
    Writer,
    append_records,
    append_tombstones,
    check_tokenizer,
)
from rollbook.book.checkpoint import (
    Checkpoint,
    RewindResult,
    list_checkpoints,
    make_checkpoint,
    rewind_book,
)
from rollbook.book.compaction import CompactionResult
from rollbook.book.consumer import (
    ConsumerConfig,
    all_consumers,
    find_consumer,
    get_consumer,
)
from rollbook.book.disk import Disk
from rollbook.book.errors import BookError, CorruptBookError, MissingBookError, NotABookError, ReadOnlyError
from rollbook.book.lease import (
    Lease,
    alease_records,
    check_request,
    drop_stale_records,
    lease_records,
    refresh_consumer,
)
from rollbook.book.ledger import (
    TABLES,
    Forward,
    Ledger,
    SQLiteLedger,
    WeightsTransport,
    check_files,
    check_text,
    check_writable,
    prepare_tables,
    read_layout,
    yield_to_writers,
)
from rollbook.book.read import Selection, fetch, find_seqs, get_uid, get_uids, parse_conditions
from rollbook.book.segments.files import FileSegmentStore, MemorySegmentStore, SegmentStore
from rollbook.core.addresses import POSTGRES, RAY, PostgresAddress, is_conninfo, redacted, url_secrets
from rollbook.core.checks import check_choice, check_float, check_int
from rollbook.core.errors import explain_missing

if TYPE_CHECKING:
    from rollbook.book.check import Report
    from rollbook.book.consumer import ConsumerSetting
    from rollbook.book.lease import LeaseRequest
    from rollbook.book.query import Result
    from rollbook.book.read import Operand, RecordId, RecordIds
    from rollbook.core.experience import Experience
    from rollbook.core.experiences import Experiences
    from rollbook.core.ids import EID
    from rollbook.core.vocabulary import Tokenizer, Vocabulary

__all__ = ["Book", "open"]


TRAIN = "train"
"""The default consumer group."""


@dataclass
class BookState:
    """What the modules of this package keep about an open book; not part of the API.

    >>> BookState().compactor is None
    True
    """

    appends: Iterator[int] = field(default_factory=lambda: itertools.count(os.urandom(1)[0]))
    """Counts appends. It starts at a random number, so that programs that append once and end also compact."""
    compactor: threading.Thread | None = None
    """Merges small segments in the background."""
    opened_with: dict[str, Any] = field(default_factory=dict)
    """Arguments of `rollbook.open` that open this book again."""
    group_commit: GroupCommit = field(default_factory=GroupCommit)
    known_column_types: set[tuple[str, str]] = field(default_factory=set)
    """Columns that the ledger has, with types."""
    unsettled_checkpoints: dict[str | None, str] = field(default_factory=dict)
    """Tokens of checkpoints whose outcome is unknown, by the requested name."""
    pending_tokenizer: Tokenizer | Vocabulary | None = None
    """The tokenizer or its vocabulary, until the ledger is known to have its vocabulary."""
    forward: Forward | None = None
    """Calls a function in the process that serves the book; `None` if this process has the ledger open."""
    weights_transport: WeightsTransport | None = None
    """Passes the weights of a trainer to rollout workers; `None`: files or the database do."""


class Book:
    """A durable, replayable, queryable store of experience; opened by `rollbook.open`.

    Args:
        url: Address of the book.
        ledger: Its ledger.
        store: The store of its segments.
        read_only: Whether it is opened for reading.
        tokenizer: Name of the tokenizer of its records, if it is known.
        quota: Largest size of its segments in bytes; `None`: no limit.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> group = [rollbook.Experience(eid={"batch": 0, "task": 1, "run": r}, tokens=[1, 2, 3 + r], reward=float(r),
    ...                              group_size=2) for r in range(2)]
    >>> book.append(group)
    AppendResult(admitted=2, existing=0, revised=0, stale=0)
    >>> book.append(group).existing
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
        """Address of the book, without secrets."""
        self.ledger = ledger
        self.store = store
        self.read_only = read_only
        self.tokenizer = tokenizer
        self.quota = quota
        self.closed = False
        """Whether `close` was called."""
        self.state = BookState()
        """Shared by the modules of `rollbook.book`; not part of the API."""

    # --- writing ------------------------------------------------------------------------------------------------

    def append(
        self,
        experiences: Experience | Iterable[Experience],
        *,
        evaluation: bool = False,
        author: str = "",
        timeout: float | None = None,
    ) -> AppendResult:
        """Append records atomically; they are durable when it returns.

        Idempotent: records already in the book are skipped, even if they were revised since. A record with a known id
        and fields that were missing (advantages, returns, a reward, new keys of `info`) is a revision by `author`.

        Args:
            experiences: One record, several, or `Experiences`.
            evaluation: Store the records for evaluation; they are never leased.
            author: Author of revisions.
            timeout: Seconds to wait while a rate limiter holds inserts back; `None` waits without limit.

        Returns:
            How many records are new, known, revised, and stale for some consumer.

        Raises:
            ConflictError: A different record has the same id.
            BackPressureError: A rate limiter still held inserts back at the timeout.
            QuotaExceededError: The book would exceed its quota.
        """
        check_writable(self, "append")
        check_text("author", author, 0)
        if timeout is not None:
            check_float("timeout", timeout, 0.0)
        return self._append(experiences, evaluation=evaluation, author=author, timeout=timeout)[0]

    def _append(
        self,
        experiences: Experience | Iterable[Experience],
        *,
        evaluation: bool,
        author: str,
        timeout: float | None,
    ) -> tuple[AppendResult, dict[str, str]]:
        """Call `append`, and also return the outcome of records by id: "admitted", "stale" or "revised"."""
        return append_records(self, experiences, evaluation=evaluation, author=author, timeout=timeout)

    def writer(
        self,
        *,
        delay: float = 0.05,
        batch: int = 256,
        max_pending: int = 4096,
        evaluation: bool = False,
        author: str = "",
    ) -> Writer:
        """Return a streaming writer, which collects small appends and commits them together.

        Args:
            delay: Seconds that a record waits at most for others.
            batch: Number of records that are committed without waiting longer.
            max_pending: Number of records that may be pending; `Writer.add` blocks above it.
            evaluation: As for `append`.
            author: As for `append`.
        """
        check_writable(self, "writer")
        check_text("author", author, 0)
        return Writer(self, delay=delay, batch=batch, max_pending=max_pending, evaluation=evaluation, author=author)

    def fail(self, eids: EID | Sequence[EID], reason: str = "failed", *, group_size: int | None = None) -> int:
        """Record runs that produced no record (a crash, a filter), so that they count for their group.

        Fail runs before the others of their group are appended: then a crash in between leaves no group that waits
        forever.

        Args:
            eids: The ids of the runs.
            reason: Why they are dropped.
            group_size: Number of runs in their group.

        Returns:
            How many of them are new.
        """
        check_writable(self, "fail")
        check_text("reason", reason)
        listed = [eids] if hasattr(eids, "uid") or isinstance(eids, (str, Mapping)) else list(eids)
        return append_tombstones(self, listed, reason, group_size) if listed else 0

    def drop(self, uids: RecordIds, reason: str = "filtered", *, consumer: str | None = None) -> int:
        """Drop records that are waiting or cooling down; they still count for their groups.

        Args:
            uids: One id or record, or several.
            reason: Why they are dropped.
            consumer: The consumer group that drops them; `None` for all groups.

        Returns:
            How many rows were dropped, over all these groups.
        """
        check_writable(self, "drop")
        check_text("reason", reason)
        seqs = find_seqs(self, get_uids(uids))
        count = 0
        for start in range(0, len(seqs), queue.CHUNK):
            with queue.write_drained(self) as tx:
                groups = all_consumers(tx) if consumer is None else [get_consumer(tx, consumer)]
                chunk = seqs[start : start + queue.CHUNK]
                count += sum(queue.drop_by_seq(tx, group, chunk, reason) for group in groups)
            yield_to_writers(self.ledger)
        return count

    # --- leasing ------------------------------------------------------------------------------------------------

    def consumer(
        self, name: str = TRAIN, *, create: bool = False, change: bool = False, **settings: ConsumerSetting
    ) -> ConsumerConfig:
        """Return a consumer group's configuration, or create or change the group.

        Args:
            name: The consumer group.
            create: Create the group, with these settings, if the book does not have it.
            change: Change the settings of an existing group, for all its users; all waiting records are ranked again.
                Without it, settings that differ from those of the group raise an error.
            settings: Fields of `ConsumerConfig`.

        Raises:
            UnknownConsumerError: The book has no such group, and `create` is false.
        """
        with self.ledger.read() as tx:
            group = find_consumer(tx, name) if create else get_consumer(tx, name)
        if group is not None and group.settings.changed(settings) == group.settings:
            return group.settings
        check_writable(self, "consumer")
        with self.ledger.write() as tx:
            config = queue.configure_consumer(tx, name, settings, create=create, change=change)
        if group is not None:
            refresh_consumer(self, name)
        return config

    def consumers(self) -> dict[str, ConsumerConfig]:
        """Return the consumer groups, in the order of their creation, and their configurations."""
        with self.ledger.read() as tx:
            return {group.name: group.settings for group in all_consumers(tx)}

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
        """Claim `n` records, or with `by="group"` all waiting records of `n` groups.

        Args:
            n: Number of records or groups.
            by: `"experience"` or `"group"`.
            consumer: The consumer group that the records are for.
            create: Create the group, with default settings, if the book does not have it.
            timeout: Seconds to wait until all are there, including waits for other writers; `None` waits without
                limit. After that the lease has fewer records, and `lease.short` is the reason.
            exact: Claim all `n` or none.
            max_staleness: Overrides the group's bound; older records are dropped as stale.
            seconds: Lease duration without progress; by default the group's `lease_seconds`.

        Returns:
            The lease, a context manager; it is empty if nothing could be claimed.

        Raises:
            UnknownConsumerError: The book has no such group, and `create` is false.
            LockTimeoutError: With `timeout=None`: another writer held the ledger for 30 s.
        """
        check_writable(self, "lease")
        request = check_request(consumer, n, by, max_staleness, seconds, timeout, exact=exact, create=create)
        return self._lease(request, timeout)

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
        """Call `lease` without blocking the event loop. A canceled wait claims nothing. See `lease`."""
        check_writable(self, "lease")
        request = check_request(consumer, n, by, max_staleness, seconds, timeout, exact=exact, create=create)
        return await alease_records(lambda stop: self._lease(request, timeout, stop))

    def _lease(self, request: LeaseRequest, timeout: float | None, stop: threading.Event | None = None) -> Lease:
        return lease_records(self, request, timeout, stop)

    # --- policy versions ----------------------------------------------------------------------------------------

    def announce(self, version: int) -> None:
        """Set the current policy version, from which staleness is counted.

        Args:
            version: The version of the weights that sample from now on.

        Raises:
            BookError: The version is older than the announced one; only `rewind` goes back.
        """
        check_writable(self, "announce")
        version = check_int("version", version)
        with self.ledger.write() as tx:
            consumers = all_consumers(tx) if queue.announce_version(tx, version) else []
        for consumer in consumers:
            if consumer.settings.max_staleness is not None:
                drop_stale_records(self, consumer.name)

    @property
    def policy_version(self) -> int | None:
        """The policy version that was announced last."""
        with self.ledger.read() as tx:
            return queue.announced_version(tx)

    # --- metrics ------------------------------------------------------------------------------------------------

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store metrics of a training step; SQL sees them in `events`, as the JSON of `detail`.

        Args:
            step: The training step.
            metrics: Numbers by name; NaN and infinity are allowed.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> book.log(1, {"loss": 0.5, "grad_norm": float("inf")})
        >>> book.metrics()
        [(1, {'loss': 0.5, 'grad_norm': inf})]
        """
        check_writable(self, "log")
        if check_int("step", step) >= reports.INT64_END:
            raise ValueError(f"step: got {step}, expected a 64-bit integer")
        event = queue.Event(reports.METRICS_KIND, step=int(step), detail=reports.encode_metrics(metrics))
        with self.ledger.write() as tx:
            queue.record_events(tx, [event])

    def metrics(self) -> list[tuple[int, dict[str, float]]]:
        """Return the logged metrics by step (the last value of each name), without those that a rewind undid."""
        return reports.read_metrics(self)

    # --- revisions ----------------------------------------------------------------------------------------------

    def revise(
        self,
        uid: str | EID | Experience | Mapping[str, Mapping[str, Any]],
        *,
        author: str,
        reason: str | None = None,
        retrain: bool | str = False,
        **fields: Any,
    ) -> int:
        """Change late fields (reward, advantages, `info` ...) of a record, or of several: `{uid: {field: value}}`.

        Args:
            uid: The record, or a mapping from ids to fields.
            author: Who revises; stored in the ledger.
            reason: Why; stored in the ledger.
            retrain: `True` offers trained and dropped records again; `"group"` also the rest of their groups, for
                estimators that compare within a group.
            fields: New values; dicts are merged.

        Returns:
            How many records changed.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> record = rollbook.Experience(tokens=[1, 2, 3])
        >>> _ = book.append(record)
        >>> book.revise(record, reward=1.0, author="ana", reason="looks right")
        1
        >>> book[record.eid.uid].reward, book.history(record.eid.uid)[-1].detail["author"]
        (1.0, 'ana')
        """
        check_writable(self, "revise")
        revision.check_signature(author, reason)
        if isinstance(uid, Mapping):
            if fields:
                raise ValueError(f"revise: got {', '.join(fields)} and a mapping, expected one of the two")
            changes = {get_uid(key): dict(values) for key, values in uid.items()}
        else:
            changes = {get_uid(uid): fields}
        if not retrain and not all(changes.values()):
            raise ValueError("revise: got no field to change")
        check_choice("retrain", retrain, (False, True, "group"))
        return revision.revise_records(self, changes, author=author, reason=reason, retrain=retrain) if changes else 0

    def delete(self, uids: RecordIds, *, author: str, reason: str | None = None) -> int:
        """Delete records; the next compaction removes their bytes.

        The ledger keeps their ids, so that they are not admitted again. Records are deleted in chunks: a call that
        fails leaves the rest unchanged, and repeating it finishes.

        Args:
            uids: One id or record, or several.
            author: Who deletes; stored in the ledger.
            reason: Why; stored in the ledger.

        Returns:
            How many records were deleted.
        """
        check_writable(self, "delete")
        revision.check_signature(author, reason)
        return revision.delete_records(self, get_uids(uids), author=author, reason=reason)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def checkpoint(self, name: str | None = None, *, keep: int | None = None) -> str:
        """Create a checkpoint, for a trainer to save with its weights. Idempotent.

        Args:
            name: Its name; by default a new one.
            keep: Forget all checkpoints but the newest `keep`. Bytes that the oldest one needs are not removed.

        Returns:
            Its name.

        Raises:
            ConflictError: A checkpoint of another state has this name.
        """
        check_writable(self, "checkpoint")
        return make_checkpoint(self, name, keep)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints, oldest first."""
        return list_checkpoints(self)

    def rewind(self, name: str, *, later: str = "keep") -> RewindResult:
        """Go back to a checkpoint: later acknowledgements are void, and their records return to the queue.

        The state of every consumer (its settings, its counters, each record's uses and rank) and the announced version
        are restored. The next leases are those that followed the checkpoint the first time. Active leases end, and
        their records are waiting again. For consumers with `max_staleness`, records sampled by versions after the
        checkpoint's, which are abandoned, are stale. Consumers created later start over; later checkpoints are deleted.
        Revisions and deletions stay.

        Args:
            name: The checkpoint.
            later: `"keep"` leaves later records waiting; `"drop"` drops them as "rewound" and frees their ids.

        Returns:
            How many acknowledgements were voided, leases ended and later records kept or dropped.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3])])
        >>> saved = book.checkpoint()
        >>> book.lease(1).ack(step=1)
        1
        >>> book.rewind(saved).acks, book.counts().waiting, rollbook.book.trained_steps(book)
        (1, 1, {})
        """
        check_writable(self, "rewind")
        return rewind_book(self, name, later)

    # --- reading ------------------------------------------------------------------------------------------------

    def __getitem__(self, uid: str | EID) -> Experience:
        """Return the record as it is now."""
        return fetch(self, find_seqs(self, [get_uid(uid)]))[0]

    def __iter__(self) -> Iterator[Experience]:
        """Iterate over the records that have bytes, as they are now, in the order in which they were appended."""
        return iter(self.where())

    def get(self, uids: RecordIds) -> Experiences:
        """Return records by id.

        Args:
            uids: One id or record, or several.

        Returns:
            The records, in this order, each once.

        Raises:
            KeyError: An id is not in the book.
            BookError: The bytes of a record are gone.
        """
        return fetch(self, find_seqs(self, get_uids(uids)))

    def __contains__(self, uid: RecordId) -> bool:
        with self.ledger.read() as tx:
            return bool(tx.first("SELECT 1 FROM records WHERE uid = ?", (get_uid(uid),)))

    def __len__(self) -> int:
        """Return how many records were admitted, for training and evaluation, including failed runs."""
        with self.ledger.read() as tx:
            return int(tx.first("SELECT CAST(COALESCE(SUM(n), 0) AS BIGINT) FROM tallies WHERE consumer = 0")[0])

    def __bool__(self) -> bool:
        return True

    def where(self, *conditions: tuple[str, str, Any], **equal: Operand) -> Selection:
        """Select records by conditions: `("reward", ">", 0.5)`, `("info.level", "in", [1, 2])`, `task="a"`.

        Columns are those of the ledger (`rollbook.book.read.LEDGER_COLUMNS`), texts and numbers of a record, and
        entries of `info` and `metrics` as `info.NAME`. `book.where(...).scan(columns)` returns Arrow batches.

        Args:
            conditions: (column, operator, value) of each condition.
            equal: Values of columns that must be equal; a list: one of them.

        Returns:
            The records, which are read lazily.
        """
        return Selection(self, parse_conditions(conditions, equal))

    def sql(
        self,
        query: str,
        parameters: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        memory: str | int = "1GB",
        seconds: float = 60.0,
    ) -> Result:
        """Run a read-only DuckDB query.

        Args:
            query: One statement over the tables `experiences`, `events` (also called `ledger`), `queue`, `leases`,
                `revisions`, `checkpoints` and `media`.
            parameters: Parameters of the statement.
            memory: Memory limit.
            seconds: Time limit.

        Returns:
            The result: `.arrow()`, `.pandas()`, `.polars()` or `.rows()`.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> for i in range(4):
        ...     _ = book.append(rollbook.Experience(eid={"task": i % 2}, tokens=[1, 2, i], reward=i / 4))
        >>> book.sql("select tid, avg(reward) mean, max(len(tokens)) longest from experiences group by 1 order by 1")
        tid  mean  longest
        /0   0.25        3
        /1    0.5        3
        """
        from rollbook.book.query import run_sql

        return run_sql(self, query, parameters, memory, seconds)

    def counts(self, consumer: str = TRAIN) -> reports.Counts:
        """Return a consumer's counts: admitted = waiting + leased + trained + dropped.

        Args:
            consumer: The consumer group.
        """
        return reports.count_records(self, consumer)

    def history(self, uid: str | EID | Experience) -> list[reports.Entry]:
        """Return the events of a record, in order.

        Args:
            uid: The record's id, or the record.

        Raises:
            KeyError: The id is not in the book.
        """
        return reports.read_history(self, get_uid(uid))

    # --- maintenance --------------------------------------------------------------------------------------------

    def compact(
        self, *, garbage: float = 0.5, small: int = compaction.SMALL_SEGMENT_BYTES, grace: float = 3600.0
    ) -> CompactionResult:
        """Remove unneeded bytes and merge small segments, concurrently with readers and writers.

        Records that every consumer dropped as too old or too many lose their bytes, unless a checkpoint needs them or
        `keep_stale` keeps them. Trained records keep theirs until a quota needs the space.

        Args:
            garbage: Rewrite segments of which more than this share is not needed. Those with deleted or redacted bytes
                are always rewritten.
            small: Merge segments below this size where there are many.
            grace: Remove segments that nothing points to, as a crash leaves them, this many seconds after they were
                first noticed.

        Returns:
            What was removed, and the size before and after.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> records = [rollbook.Experience(tokens=[1, 2, 3 + i]) for i in range(4)]
        >>> _ = book.append(records)
        >>> _ = book.delete(records[:3], author="ana")
        >>> done = book.compact()
        >>> done.records, done.removed, done.after < done.before
        (1, 1, True)
        """
        check_writable(self, "compact")
        return compaction.compact(self, garbage=garbage, small=small, grace=grace)

    def check(self, *, deep: bool = True) -> Report:
        """Check tables, places, bytes, counts, leases, groups, events and files of the book.

        Changes nothing, runs concurrently with readers and writers, and uses little memory. `rollbook.book.repair`
        repairs what it reports.

        Args:
            deep: Read every byte of the data.

        Returns:
            The findings; `Report.ok` is true if there are none.

        >>> import rollbook
        >>> book = rollbook.open("memory:")
        >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3])])
        >>> book.check().ok
        True
        """
        from rollbook.book.check import check

        return check(self, deep=deep)

    def close(self) -> None:
        """Close files and connections. Idempotent; completed calls are durable with or without it."""
        self.closed = True
        if self.state.compactor is not None:
            self.state.compactor.join()
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
        from rollbook.core.terminal import html_table

        headers = ["consumer", "records", "waiting", "leased", "trained", "dropped"]
        counts = [self.counts(name) for name in self.consumers()]
        rows = [[c.consumer, c.admitted, c.waiting, c.leased, c.trained, sum(c.dropped.values())] for c in counts]
        evaluation = f", and {counts[0].evaluation:,} for evaluation" if counts and counts[0].evaluation else ""
        return html_table(f"Book {self.url}{evaluation}", headers, rows)

    def __reduce__(self) -> Any:
        """Pickle by reopening: the copy is another open book on the same records.

        The pickle holds what `rollbook.open` was called with: a password in the address, too.
        """
        if self.url == "memory:":
            raise TypeError("a book in memory cannot be pickled: open a folder or postgresql:// to share it")
        return _reopen, ("r" if self.read_only else "r+", dict(self.state.opened_with))


def _reopen(mode: str, arguments: Mapping[str, Any]) -> Book:
    return open(mode=mode, **arguments)


LEDGER = "ledger.sqlite"
MODES = ("a", "r+", "r")
SEGMENT_BYTES = 256 << 20
"""Size at which a segment is finished, by default."""


def open(
    url: str | os.PathLike[str],
    mode: str = "a",
    *,
    tokenizer: Tokenizer | str | None = None,
    quota: int | None = None,
    data: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    segment_bytes: int = SEGMENT_BYTES,
    clock: Callable[[], float] | None = None,
    over: str | os.PathLike[str] | None = None,
    **settings: ConsumerSetting,
) -> Book:
    """Open a book, or create it.

    Args:
        url: A folder (or the folder of a run, for its book), `memory:`, or `postgresql://user@host/database`, with
            `?schema=NAME` for more than one book in a database. The password comes from `PGPASSWORD`, `~/.pgpass` or
            the URL, and is never shown. `ray://NAME` is a book that a Ray actor of this name serves.
        mode: `"a"` creates the book if it does not exist, `"r+"` requires it, `"r"` opens it for reading.
        tokenizer: The tokenizer of the records, or its fingerprint. A book takes records of one tokenizer and stores
            its vocabulary, so that texts can be shown without it.
        quota: Maximum size of the data in bytes.
        data: For PostgreSQL, a folder or object store (any fsspec URL) for the data instead of the database.
        storage_options: Options of that fsspec file system.
        segment_bytes: Size at which a segment is finished.
        clock: Replaces the database's clock in simulations.
        over: For `ray://NAME`, the folder or `postgresql://` address of the book to serve. If no actor of this name
            serves a book, one is created.
        settings: Settings of the consumer group "train"; see `Book.consumer`.

    Returns:
        The book, a context manager.

    Raises:
        NotABookError: There is no book at this address, or this version cannot read it.
        BookError: The book was written with another tokenizer, or has its data elsewhere.

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
        raise ValueError(f"url: got {url!r}, expected a folder, 'memory:' or 'postgresql://...', or 'ray://NAME'")
    if address.startswith(RAY):
        if clock is not None:
            raise ValueError("clock: expected None for a book that an actor serves")
        return _open_served(address, mode, over, tokenizer, quota, data, storage_options, segment_bytes, settings)
    if over is not None:
        raise ValueError(f"over: got {redacted(over)!r}, expected None: only ray://NAME serves another book")
    address, ledger, store = _open_storage(address, mode, data, storage_options or {}, segment_bytes, clock)
    book = Book(address, ledger, store, read_only=read_only, tokenizer=_get_fingerprint(tokenizer), quota=quota)
    book.state.opened_with = {
        "url": address if "://" in address else os.path.abspath(os.path.expanduser(address)),
        "tokenizer": book.tokenizer,
        "quota": quota,
        "data": data,
        "storage_options": storage_options,
        "segment_bytes": segment_bytes,
    }
    if not isinstance(tokenizer, str):
        book.state.pending_tokenizer = tokenizer
    try:
        if book.tokenizer is not None:
            with ledger.read() as tx:
                check_tokenizer(tx, book)
        if not read_only:
            book.consumer(TRAIN, create=True, **settings)  # type: ignore[arg-type]
        elif settings:
            raise ReadOnlyError(f"{book.url}: opened for reading, and got settings ({', '.join(settings)})")
    except BaseException:
        book.close()
        raise
    return book


def _open_storage(
    address: str,
    mode: str,
    data: str | None,
    storage_options: Mapping[str, Any],
    segment_bytes: int,
    clock: Callable[[], float] | None,
) -> tuple[str, Ledger, SegmentStore]:
    """Open the ledger and the segments of a book in this process; also return the address of the book itself."""
    if address.startswith(POSTGRES):
        return address, *open_postgres(address, mode, data, storage_options, clock)
    if data is not None:
        raise ValueError(
            f"data: got {redacted(data)!r}, expected None: only a book in PostgreSQL keeps its data elsewhere"
        )
    if address == "memory:":
        if mode != "a":
            raise NotABookError(f"memory: got mode {mode!r}, expected 'a': a book in memory is always new")
        ledger = SQLiteLedger(None, clock=clock or time.time)
        store = MemorySegmentStore(segment_bytes)
        prepare_tables(ledger, create=True, address="memory:", meta={})
        return address, ledger, store
    if "://" in address or (":" in address.split("/")[0] and not Path(address).exists() and os.name != "nt"):
        raise ValueError(
            f"url: got {redacted(address)!r}, expected a folder, 'memory:' or 'postgresql://...', or 'ray://NAME'"
        )
    if is_conninfo(address) and not Path(address).exists():
        raise ValueError(f"url: got {redacted(address)!r}, expected it as postgresql://user@host/database")
    # Absolute: a program may change its folder while the book is open.
    folder = Path(os.path.abspath(os.path.expanduser(address)))
    if not (folder / LEDGER).exists() and (folder / "book" / LEDGER).exists():
        # As on the command line, the folder of a run is a path of its book. A new book here would hide it.
        folder, address = folder / "book", os.path.join(address, "book")
    return address, *open_folder(folder, mode, segment_bytes, clock, Disk())


def _open_served(
    address: str,
    mode: str,
    over: str | os.PathLike[str] | None,
    tokenizer: Tokenizer | str | None,
    quota: int | None,
    data: str | None,
    storage_options: Mapping[str, Any] | None,
    segment_bytes: int,
    settings: Mapping[str, ConsumerSetting],
) -> Book:
    try:
        from rollbook.book.ray import open_served
    except ModuleNotFoundError as error:
        raise explain_missing(address, error) from None
    arguments = {
        "tokenizer": _get_fingerprint(tokenizer),
        "quota": quota,
        "data": data,
        "storage_options": None if storage_options is None else dict(storage_options),
        "segment_bytes": segment_bytes,
    }
    return open_served(address, mode, over, arguments, settings, None if isinstance(tokenizer, str) else tokenizer)


def _get_fingerprint(tokenizer: Tokenizer | str | None) -> str | None:
    if tokenizer is None or isinstance(tokenizer, str):
        return tokenizer
    from rollbook.core.vocabulary import tokenizer_fingerprint

    if not (hasattr(tokenizer, "backend_tokenizer") or hasattr(tokenizer, "get_vocab")):
        raise ValueError(
            f"tokenizer: got {type(tokenizer).__name__}, expected a tokenizer or its fingerprint (a string)"
        )
    return tokenizer_fingerprint(tokenizer)


def open_folder(
    folder: Path, mode: str, segment_bytes: int, clock: Callable[[], float] | None, disk: Disk
) -> tuple[Ledger, SegmentStore]:
    """Open the ledger and the segments of a folder; see `open`."""
    path = folder / LEDGER
    check_files(path)
    if mode != "a" and not path.exists():
        raise MissingBookError(f"{folder}: there is no book here (no {LEDGER})")
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
        raise _lost_ledger_error(folder)
    ledger = SQLiteLedger(path, read_only=mode == "r", clock=clock or time.time)
    try:
        if lost and read_layout(ledger) is None:
            raise _lost_ledger_error(folder)
        prepare_tables(ledger, create=mode != "r", address=str(folder), meta={})
        _check_schema(ledger, folder)
        if new:
            disk.sync_folder(str(folder))
        return ledger, store
    except BaseException:
        ledger.close()
        raise


def _lost_ledger_error(folder: Path) -> CorruptBookError:
    """Return the error for segments without a ledger: compaction would remove them, since a new one lacks them."""
    return CorruptBookError(
        f"{folder}: it has segments, and its {LEDGER} is missing or empty; `rollbook check --repair` makes one"
    )


_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master"


@lru_cache(maxsize=1)
def _expected_schema() -> frozenset[tuple[Any, ...]]:
    ledger = SQLiteLedger(None)
    prepare_tables(ledger, create=True, address="memory:", meta={})
    with ledger.read() as tx:
        return frozenset(tx.all(_SCHEMA))


def _check_schema(ledger: Ledger, folder: Path) -> None:
    """Raise `CorruptBookError` if the SQL of a table or index differs from that of this layout.

    Constraints and indices of an untrusted ledger could run any expression at every write. Other tables are ignored.
    """
    with ledger.read() as tx:
        objects = frozenset(tx.all(_SCHEMA))
    mine = {row for row in objects if row[2] in TABLES}
    different = sorted(mine ^ _expected_schema(), key=str)
    if different:
        kind, name = different[0][:2]
        raise CorruptBookError(
            f"{folder}: the ledger's {kind} {str(name)[:80]!r} is missing or is not what this version makes; "
            "`rollbook check --repair` rebuilds it"
        )


def open_postgres(
    url: str, mode: str, data: str | None, options: Mapping[str, Any], clock: Callable[[], float] | None
) -> tuple[Ledger, SegmentStore]:
    """Open the ledger and the segments of a book in PostgreSQL; see `open`."""
    from rollbook.book.postgres import PostgresLedger
    from rollbook.book.segments.postgres import PostgresSegmentStore

    parsed = PostgresAddress.parse(url)
    if data is not None and url_secrets(data):
        # The URL of the data is stored in the book, where every user of the book can read it.
        raise ValueError(f"data: {redacted(data)!r} contains a secret; pass it in storage_options")
    ledger = PostgresLedger(parsed.plain, parsed.schema, read_only=mode == "r", clock=clock)
    try:
        ledger.check_privilege()
        if mode == "a":
            ledger.make_schema()
        address = redacted(url)
        if mode == "r+" and read_layout(ledger) is None:
            raise MissingBookError(f"{address}: there is no book here")
        prepare_tables(ledger, create=mode != "r", address=address, meta={"data": data or ""})
        with ledger.read() as tx:
            stored_data = tx.first("SELECT value FROM meta WHERE key = 'data'")[0]
        if stored_data != (data or ""):
            raise BookError(
                f"{address}: its data lies in {redacted(stored_data) or 'the database'}; got data={data!r}, expected "
                f"data={redacted(stored_data) or None!r}"
            )
        if data is None:
            return ledger, PostgresSegmentStore(ledger)
        from rollbook.book.segments.fsspec import FsspecSegmentStore

        return ledger, FsspecSegmentStore(data, options)
    except BaseException:
        ledger.close()
        raise
