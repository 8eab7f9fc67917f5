"""A book that a named Ray actor serves: `rollbook.open("ray://NAME", over=...)`.

The actor has the book open; clients have neither ledger nor store and call the actor. Records cross as frames
(`core.wire`) in the object store, which processes of one node read without copying.

Invariant: the actor has no state that a crash could lose, except published weights, which their publisher holds. A call
whose answer was lost is repeated only if that is safe; the ledger then decides what was done.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import pickle
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray
from ray.exceptions import (
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollbook.book import book as books
from rollbook.book import rollouts
from rollbook.book.append import AppendResult, HeldBackError, append_records, find_limiter_reason, to_rows
from rollbook.book.book import SEGMENT_BYTES, TRAIN, Book, BookState
from rollbook.book.checkpoint import make_checkpoint
from rollbook.book.errors import (
    BookError,
    ConnectionLostError,
    LeaseLostError,
    MissingBookError,
    OutcomeUnknownError,
    ReadOnlyError,
    StoreFullError,
)
from rollbook.book.lease import Claim, Lease, LeaseRequest, RetryAckError, lease_records
from rollbook.book.ledger import SERVED, check_writable
from rollbook.book.read import (
    PAGE_ROWS,
    Condition,
    Operand,
    Selection,
    check_columns,
    fetch,
    get_uid,
    parse_conditions,
    scan,
)
from rollbook.book.rollouts import append_rollouts
from rollbook.core import __version__
from rollbook.core.addresses import POSTGRES, RAY, redacted
from rollbook.core.checks import check_int
from rollbook.core.experiences import Experiences
from rollbook.core.vocabulary import Vocabulary
from rollbook.core.wire import decode, encode

if TYPE_CHECKING:
    from rollbook.book.consumer import ConsumerSetting
    from rollbook.book.query import Result
    from rollbook.book.read import RecordId
    from rollbook.core.experience import Experience
    from rollbook.core.ids import EID
    from rollbook.core.vocabulary import Tokenizer

    Frame = NDArray[np.uint8]

NAMESPACE = "rollbook"
"""Ray namespace of the actors."""
THREADS = {"append": 16, "wait": 32, "settle": 8, "rollouts": 8, "control": 4}
"""Threads of the actor by group of calls; others, such as queries, have `READ_THREADS`. No group waits for another."""
READ_THREADS = 8
WAIT_SECONDS = 1.0
"""Longest wait inside the actor; clients repeat the call until their timeout."""
CROWDED_WAIT_SECONDS = 0.05
"""The same if most threads for waits are taken."""
RESTART_SECONDS = 60.0
"""How long a client waits for an actor that crashed, or for room in the object store."""
MAX_INLINE_BYTES = 64 << 10
"""Frames up to this size travel within the call, larger ones in the object store."""
_CONNECT_SECONDS = 10.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class Packed(NamedTuple):
    """Records as a frame, in an argument or a result."""

    frame: Frame
    single: bool
    """Whether it is one `Experience`."""


class Answer(NamedTuple):
    """What the actor answers: an exception, or a result."""

    process_token: str
    """Identifies the process of the actor."""
    error: Exception | None
    result: Any


class PublishedWeights(NamedTuple):
    """Weights in the object store."""

    id: str
    version: int
    metadata: Mapping[str, Any]
    files: Sequence[Any]
    """The `ObjectRef` of the files, in a list, so that Ray passes the reference and not the files."""


def to_frame(records: Experiences | Sequence[Experience]) -> Frame:
    """Encode records as a frame in an array, which Ray stores without pickling it."""
    return np.frombuffer(encode(records, out=lambda size: np.empty(size, np.uint8).data), np.uint8)


def _is_record(content: Any) -> bool:
    # The module loads torch, which the actor does not need: until it has loaded there is no record.
    record_class = getattr(sys.modules.get("rollbook.core.experience"), "Experience", None)
    return record_class is not None and isinstance(content, record_class)


def pack(content: Any) -> Any:
    """Replace records by frames, and iterators by lists."""
    if isinstance(content, Iterator):
        content = list(content)
    if _is_record(content):
        return Packed(to_frame([content]), True)
    if isinstance(content, Experiences) or (
        isinstance(content, (list, tuple)) and content and all(map(_is_record, content))
    ):
        return Packed(to_frame(content), False)
    return content


def unpack(content: Any, *, verify: bool = True) -> Any:
    """Restore what `pack` replaced; the columns of records are views of the frame."""
    if isinstance(content, Packed):
        records = decode(content.frame.data, verify=verify)
        return records[0] if content.single else records
    return content


def to_stream(table: pa.Table | pa.RecordBatch) -> Frame:
    """Write Arrow data as an IPC stream in an array."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return np.frombuffer(sink.getvalue(), np.uint8)


def from_stream(stream: Frame) -> pa.Table:
    """Read an IPC stream without copying."""
    return pa.ipc.open_stream(pa.py_buffer(stream)).read_all()


# --- operations in the actor ------------------------------------------------------------------------------------------


def _append(
    book: Book, *, frame: Frame, evaluation: bool, author: str, is_retry: bool
) -> tuple[AppendResult, dict[str, str]]:
    """Append without waiting for rate limiters. If `is_retry`, they are checked before the frame is decoded."""
    if is_retry:
        with book.ledger.read() as tx:
            reason = find_limiter_reason(tx, 1)
        if reason is not None:
            raise HeldBackError(reason)
    return append_records(book, decode(frame.data), evaluation=evaluation, author=author, timeout=0.0)


def _claim(book: Book, request: LeaseRequest, seconds: float, *, partial: bool, repeated: bool) -> Claim:
    if repeated:
        _return_lost_claims(book, request)
    return lease_records(book, request, seconds, partial=partial)._claim


def _return_lost_claims(book: Book, request: LeaseRequest) -> None:
    """Give back the records of an earlier attempt whose answer was lost."""
    with book.ledger.read() as tx:
        leases = tx.all(
            "SELECT leases.id, leases.expires, leases.seconds FROM leases JOIN consumers "
            "ON consumers.id = leases.consumer WHERE consumers.name = ? AND leases.state = 'active' "
            "AND leases.holder = ? AND leases.expires > ?",
            (request.consumer, request.holder, tx.now),
        )
        claims = []
        for fence, expires, seconds in leases:
            rows = tx.all(
                "SELECT queue.seq, records.uid FROM queue JOIN records ON records.seq = queue.seq "
                "WHERE queue.lease = ?",
                (fence,),
            )
            seqs, uids = [row[0] for row in rows], [row[1] for row in rows]
            claims.append(Claim(fence, seqs, uids, None, expires, seconds, "", (), True))
    for claim in claims:
        Lease(book, request, claim).nack("the answer to the lease was lost")


def _restore_lease(book: Book, request: LeaseRequest, claim: Claim, chosen: dict[str, int], is_last: bool) -> Lease:
    """Restore a lease for a call that changes the `chosen` records; `is_last` if the lease has no others."""
    lease = Lease(book, request, claim)
    lease._remaining = chosen if is_last else {**chosen, "": 0}
    return lease


def _ack(
    book: Book,
    request: LeaseRequest,
    claim: Claim,
    chosen: dict[str, int],
    is_last: bool,
    step: int | None,
    priorities: Mapping[int, float],
    details: Mapping[int, Mapping[str, Any]],
) -> int:
    lease = _restore_lease(book, request, claim, chosen, is_last)
    try:
        return lease._ack(chosen, step, priorities, details)
    except RetryAckError:
        return lease._ack(chosen, step, priorities, details)


def _nack(
    book: Book,
    request: LeaseRequest,
    claim: Claim,
    chosen: dict[str, int],
    is_last: bool,
    reason: str,
    *,
    drop: bool,
    repeated: bool,
) -> int:
    try:
        count = _restore_lease(book, request, claim, chosen, is_last)._nack(chosen, reason, drop=drop)
    except LeaseLostError:
        with book.ledger.read() as tx:
            row = tx.first("SELECT state FROM leases WHERE id = ?", (claim.id,))
        if not repeated or row is None or row[0] != "nacked":
            raise
        count = 0
    # The first attempt returned what the second did not find.
    return len(chosen) if repeated else count


def _renew(book: Book, request: LeaseRequest, claim: Claim, duration: float) -> float:
    return Lease(book, request, claim)._renew(duration)


class _Page(Selection):
    """One page of a selection."""

    def __init__(self, book: Book, conditions: Sequence[Condition], after: int, rows: int) -> None:
        super().__init__(book, [*conditions, ("seq", ">", after)])
        self.piece: list[Any] | None = next(super()._pieces(rows), None)
        self.last: int | None = None if self.piece is None else self.piece[-1][0]
        """Number of its last record; `None` if there are no more."""

    def _pieces(self, rows: int = PAGE_ROWS) -> Iterator[list[Any]]:
        yield from [] if self.piece is None else [self.piece]


def _read_page(book: Book, conditions: Sequence[Condition], after: int, rows: int) -> tuple[int | None, Any]:
    page = _Page(book, conditions, after, rows)
    return page.last, pack(next(page.batches(rows), None))


def _scan_page(
    book: Book, conditions: Sequence[Condition], after: int, columns: Sequence[str] | None, rows: int
) -> tuple[int | None, list[Frame]]:
    page = _Page(book, conditions, after, rows)
    return page.last, [to_stream(batch) for batch in scan(book, page, columns, rows)]


def _count(book: Book, conditions: Sequence[Condition]) -> int:
    return Selection(book, conditions).count()


def _list_uids(book: Book, conditions: Sequence[Condition]) -> list[str]:
    return Selection(book, conditions).uids()


def _run_sql(book: Book, *args: Any, **options: Any) -> tuple[Frame, bool]:
    result = book.sql(*args, **options)
    return to_stream(result.arrow()), result.more


def _make_checkpoint(book: Book, name: str | None, keep: int | None, token: str) -> str:
    check_writable(book, "checkpoint")
    return make_checkpoint(book, name, keep, token)


def _get_policy_version(book: Book) -> int | None:
    return book.policy_version


OPERATIONS: dict[str, Callable[..., Any]] = {
    "ack": _ack,
    "append": _append,
    "checkpoint": _make_checkpoint,
    "claim": _claim,
    "contains": Book.__contains__,
    "count": _count,
    "fetch": fetch,
    "length": Book.__len__,
    "nack": _nack,
    "policy_version": _get_policy_version,
    "read_page": _read_page,
    "renew": _renew,
    "scan_page": _scan_page,
    "sql": _run_sql,
    "uids": _list_uids,
}
"""What clients call, besides methods of `Book` and functions that are `served`."""
METHODS = {
    *("announce", "check", "checkpoints", "compact", "consumer", "consumers", "counts", "delete", "drop", "fail"),
    *("get", "history", "log", "metrics", "revise", "rewind"),
}
_WRITING_CONTROLS = ("stop", "set_weights", "drop_weights")
_CONTROLS = ("connect", "ping", "get_weights", *_WRITING_CONTROLS)
"""Calls of the actor itself."""
_REPEAT_AWARE = ("claim", "nack")
"""Operations that must know whether an earlier attempt may have taken effect."""


class BookServer:
    """The actor's class.

    Args:
        arguments: `over`, `node` and arguments of `rollbook.open`.
        mode: Mode in which the book is opened. After a crash it is `"r+"`: only a client that opens the book with
            mode `"a"` may then create it, if it still does not exist.
        settings: Settings of the consumer group "train" for a new book.
        vocabulary: Bytes of the tokenizer's vocabulary.
    """

    def __init__(
        self, arguments: Mapping[str, Any], mode: str, settings: Mapping[str, Any], vocabulary: bytes | None
    ) -> None:
        self.arguments = dict(arguments)
        self.mode, self.settings = mode, dict(settings)
        self.was_restarted: bool = ray.get_runtime_context().was_current_actor_reconstructed
        self.vocabulary = vocabulary
        self.process_token = os.urandom(6).hex()
        self.weights: PublishedWeights | None = None
        self._books: tuple[Book, Book] | None = None
        self._opening = threading.Lock()
        self._waiting = 0
        self._counting = threading.Lock()

    def call(
        self,
        name: str,
        read_only: bool,
        repeated: bool,
        args: Sequence[Any],
        options: Mapping[str, Any],
        frame: Frame | None = None,
    ) -> Answer:
        """Call an operation, a method of the book or a served function.

        Args:
            name: Which one.
            read_only: Whether the client opened the book for reading.
            repeated: Whether an earlier attempt of the same call may have taken effect.
            args: Its positional arguments, packed.
            options: Its keyword arguments, packed.
            frame: The records of an append.
        """
        try:
            result = self._call(name, read_only, repeated, args, options, frame)
        except Exception as error:
            return Answer(self.process_token, _make_portable(error), None)
        return Answer(self.process_token, None, pack(result))

    def _call(
        self,
        name: str,
        read_only: bool,
        repeated: bool,
        args: Sequence[Any],
        options: Mapping[str, Any],
        frame: Frame | None,
    ) -> Any:
        if read_only and name in _WRITING_CONTROLS:
            raise ReadOnlyError(f"{name}: the client opened the book for reading (mode 'r')")
        if name in _CONTROLS:
            return getattr(self, f"_{name}")(*args, **options)
        book = self._open()[read_only]
        args = [unpack(content) for content in args]
        options = {key: unpack(content) for key, content in options.items()}
        if frame is not None:
            options["frame"] = frame
        if name in _REPEAT_AWARE:
            options["repeated"] = repeated
        function = OPERATIONS.get(name)
        if function is None and name in METHODS:
            function = getattr(Book, name)
        if function is None:
            module = name.rpartition(".")[0]
            if module.startswith("rollbook.book."):
                importlib.import_module(module)
            function = SERVED.get(name)
        if function is None:
            raise BookError(f"call: unknown function {name!r}; the client may have another version of Rollbook")
        if name == "claim":
            with self._limited_wait(args[1], options["partial"]) as seconds:
                return function(book, args[0], seconds, **options)
        return function(book, *args, **options)

    @contextmanager
    def _limited_wait(self, seconds: float, last: bool) -> Iterator[float]:
        """Yield how long a call may wait: shorter if most threads are taken, unless it is the client's last call."""
        with self._counting:
            self._waiting += 1
            crowded = self._waiting > THREADS["wait"] // 2
        try:
            yield min(seconds, CROWDED_WAIT_SECONDS) if crowded and not last else seconds
        finally:
            with self._counting:
                self._waiting -= 1

    def _open(self, *, create: bool = False) -> tuple[Book, Book]:
        """Return the book, and the same book for clients that only read; open it if it is not.

        Args:
            create: Whether a restarted actor may create the book.
        """
        with self._opening:
            if self._books is None:
                book = self._open_book(create)
                if self.vocabulary is not None:
                    book.state.pending_tokenizer = Vocabulary.from_bytes(self.vocabulary)
                reader = Book.__new__(Book)  # not `copy`, which would open the book again
                reader.__dict__.update(book.__dict__)
                reader.read_only = True
                self._books = book, reader
            return self._books

    def _open_book(self, create: bool) -> Book:
        options = {key: self.arguments[key] for key in self.arguments if key not in ("over", "node")}
        if self.was_restarted:
            try:
                return books.open(self.arguments["over"], "r+", **options)  # its settings may have been changed
            except MissingBookError:
                if not create:
                    raise
        return books.open(self.arguments["over"], self.mode, **options, **self.settings)

    def _connect(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], version: str, create: bool
    ) -> dict[str, Any]:
        """Compare what a client expects with what the book is served with, and open the book."""
        if version != __version__:
            raise BookError(f"version: got a client of Rollbook {version}, the actor has Rollbook {__version__}")
        for key, expected in arguments.items():
            if expected != self.arguments[key]:
                raise BookError(
                    f"{key}: got {_redact(key, expected)}, the actor serves the book with "
                    f"{_redact(key, self.arguments[key])}"
                )
        book, _ = self._open(create=create)
        if settings:
            book.consumer(TRAIN, create=True, **settings)
        return {key: self.arguments[key] for key in ("over", "tokenizer", "quota")}

    def _ping(self) -> int:
        return os.getpid()

    def _stop(self) -> None:
        with self._opening:
            if self._books is not None:
                self._books[0].close()

    def _set_weights(self, weights: PublishedWeights) -> None:
        self.weights = weights

    def _get_weights(self) -> PublishedWeights | None:
        return self.weights

    def _drop_weights(self, weights_id: str) -> None:
        if self.weights is not None and self.weights.id == weights_id:
            self.weights = None


def _redact(key: str, content: Any) -> str:
    if key == "storage_options":
        return "other values" if content else "None"
    return repr(redacted(content) if isinstance(content, str) else content)


def _make_portable(error: Exception) -> Exception:
    """Return an exception that a client can unpickle."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return BookError(f"{type(error).__name__}: {error}")
    return error


# --- clients ----------------------------------------------------------------------------------------------------------


def _forward_method(name: str, group: str | None = None, *, reads: bool = False, repeat: bool = True) -> Any:
    """Return a method that calls the method of this name in the actor."""

    @functools.wraps(getattr(Book, name))
    def call(self: RayBook, *args: Any, **options: Any) -> Any:
        return self.call_actor(name, *args, group=group, reads=reads, repeat=repeat, **options)

    return call


def _find_group(name: str) -> str | None:
    """Return the group of threads of a served function: slow queries must not hold up the calls of rollout workers."""
    module, _, function = name.rpartition(".")
    if module != rollouts.__name__:
        return None
    return "append" if function == append_rollouts.__name__ else "rollouts"


class RayBook(Book):
    """A book that an actor serves. Its methods are those of `Book`, and raise the same exceptions.

    If the actor crashes, calls wait until Ray has started it again, at most `RESTART_SECONDS`.

    Args:
        url: `ray://NAME`.
        read_only: Whether it was opened for reading.
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        # Not `Book.__init__`: there is no ledger and no store.
        self.url = url
        self.read_only = read_only
        self.name = url.removeprefix(RAY)
        self.over: str | None = None
        """Address of the book that is served, without secrets."""
        self.tokenizer = None
        self.quota = None
        self.closed = False
        self.state = BookState(opened_with={"url": url}, forward=self._forward, weights_transport=self)
        self._actor: Any = None
        self._process_token: str | None = None
        self._weights: PublishedWeights | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("ledger", "store"):
            raise BookError(f"{self.url}: this needs the {name} of the book; open {self.over or 'it'} directly")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- calls ------------------------------------------------------------------------------------------------------

    def call_actor(
        self,
        name: str,
        *args: Any,
        group: str | None = None,
        reads: bool = False,
        repeat: bool = True,
        frame: Any = None,
        **options: Any,
    ) -> Any:
        """Call a function in the actor, again if the actor was restarted.

        Args:
            name: The function.
            args: Its arguments.
            group: Group of threads in the actor.
            reads: Whether it changes nothing.
            repeat: Whether it may be repeated if an answer was lost.
            frame: The records of an append, or a reference to them in the object store.
            options: Its keyword arguments.

        Raises:
            ConnectionLostError: The actor cannot be reached; nothing was changed.
            OutcomeUnknownError: The actor cannot be reached; the call may have taken effect.
            StoreFullError: The object store is full.
        """
        if self.closed:
            raise BookError(f"{self.url}: the book was closed")
        if not repeat:
            self.call_actor("ping", group="control", reads=True)  # wait for a restart in progress
        packed = [pack(content) for content in args], {key: pack(content) for key, content in options.items()}
        sent = False
        end = math.inf
        pause = 0.05
        while True:
            reference = None
            try:
                actor = self._get_actor()
                method = actor.call if group is None else actor.call.options(concurrency_group=group)
                reference = method.remote(name, self.read_only, sent, *packed, frame)
                answer: Answer = ray.get(reference)
                break
            except TaskCancelledError:
                raise
            except (ObjectStoreFullError, OutOfDiskError) as error:
                failure: Exception = _store_full_error(self.url, error)
                sent = sent or reference is not None  # the result may not have fit
            except RayTaskError as error:
                if not isinstance(error.cause, (ObjectStoreFullError, OutOfDiskError)):
                    raise BookError(f"{self.url}: {name}: {error}") from error
                failure, sent = _store_full_error(self.url, error.cause), True
            except (RayError, _NoActorError) as error:
                self._actor = None
                sent = sent or reference is not None
                text = describe_ray_error(error)
                if text.is_creation:
                    raise ConnectionLostError(f"{self.url}: the actor cannot start: {text.last}") from None
                reason = text.first
                failure = ConnectionLostError(f"{self.url}: {name}: the actor cannot be reached: {reason}")
                if sent and not reads:
                    failure = OutcomeUnknownError(
                        f"{self.url}: {name}: the actor was lost during the call, which may have taken effect: {reason}"
                    )
            end = min(end, time.monotonic() + RESTART_SECONDS)
            if time.monotonic() >= end or (sent and not repeat):
                raise failure
            time.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, 1.0)
        if answer.process_token != self._process_token:
            self._process_token = answer.process_token
            if self._weights is not None and name != "set_weights":
                self.call_actor("set_weights", self._weights, group="control")  # a restarted actor has none
        if answer.error is not None:
            raise answer.error
        return unpack(answer.result, verify=False)

    def _get_actor(self) -> Any:
        if not ray.is_initialized():
            raise _NoActorError("Ray is not initialized in this process")
        if self._actor is None:
            self._actor = find_actor(self.name)
        if self._actor is None:
            raise _NoActorError("there is no actor of this name")
        return self._actor

    def _forward(self, name: str, args: Sequence[Any], options: Mapping[str, Any], *, repeat: bool, wait: bool) -> Any:
        """Implement `Forward`: call a function that is `served`."""
        if not wait or not options.get("timeout", 0.0):
            if wait and options.get("timeout", 0.0) is None:
                options = {**options, "timeout": math.inf}
            else:
                return self.call_actor(name, *args, group=_find_group(name), repeat=repeat, **options)
        end = time.monotonic() + options["timeout"]
        while True:
            left = max(end - time.monotonic(), 0.0)
            limited = {**options, "timeout": min(left, WAIT_SECONDS)}
            result = self.call_actor(name, *args, group="wait", repeat=repeat, **limited)
            if result or left <= WAIT_SECONDS:
                return result

    # --- writing ----------------------------------------------------------------------------------------------------

    def _append(
        self, experiences: Any, *, evaluation: bool, author: str, timeout: float | None
    ) -> tuple[AppendResult, dict[str, str]]:
        records = experiences if isinstance(experiences, Experiences) else to_rows(experiences)
        if not len(records):
            return AppendResult(), {}
        end = math.inf if timeout is None else time.monotonic() + timeout
        frame: Any = to_frame(records)
        if frame.nbytes > MAX_INLINE_BYTES:
            frame = self._put(frame)
        pause = 0.01
        is_retry = False
        while True:
            try:
                outcome: tuple[AppendResult, dict[str, str]] = self.call_actor(
                    "append", group="append", frame=frame, evaluation=evaluation, author=author, is_retry=is_retry
                )
                return outcome
            except HeldBackError:
                left = end - time.monotonic()
                if left <= 0:
                    raise
            # The wait is here: a writer that is held back takes no thread of the actor.
            time.sleep(min(pause * (0.5 + random.random()), left))
            pause, is_retry = min(1.5 * pause, 0.25), True

    def _put(self, content: Any) -> Any:
        """Put an object into the object store; wait for room if it is full."""
        end = time.monotonic() + RESTART_SECONDS
        pause = 0.05
        while True:
            try:
                return ray.put(content)
            except (ObjectStoreFullError, OutOfDiskError) as error:
                if time.monotonic() >= end:
                    raise _store_full_error(self.url, error) from error
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    fail = _forward_method("fail")
    drop = _forward_method("drop")
    revise = _forward_method("revise")
    delete = _forward_method("delete")
    log = _forward_method("log")
    announce = _forward_method("announce")
    consumer = _forward_method("consumer")
    rewind = _forward_method("rewind", repeat=False)
    compact = _forward_method("compact")

    def checkpoint(self, name: str | None = None, *, keep: int | None = None) -> str:
        """Create a checkpoint; see `Book.checkpoint`."""
        token = self.state.unsettled_checkpoints.pop(name, None) or os.urandom(6).hex()
        try:
            created: str = self.call_actor("checkpoint", name, keep, token)
        except OutcomeUnknownError:
            self.state.unsettled_checkpoints[name] = token
            raise
        return created

    # --- leasing ----------------------------------------------------------------------------------------------------

    def _lease(self, request: LeaseRequest, timeout: float | None, stop: threading.Event | None = None) -> Lease:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = max(end - time.monotonic(), 0.0)
            last = left <= WAIT_SECONDS
            fields = self.call_actor("claim", request, min(left, WAIT_SECONDS), group="wait", partial=last)
            if fields.id or last or (stop is not None and stop.is_set()):
                return RayLease(self, request, fields)

    # --- reading ----------------------------------------------------------------------------------------------------

    get = _forward_method("get", reads=True)
    counts = _forward_method("counts", "control", reads=True)
    consumers = _forward_method("consumers", reads=True)
    metrics = _forward_method("metrics", reads=True)
    history = _forward_method("history", reads=True)
    checkpoints = _forward_method("checkpoints", reads=True)
    check = _forward_method("check", reads=True)

    @property
    def policy_version(self) -> int | None:
        """The policy version that was announced last."""
        version: int | None = self.call_actor("policy_version", group="control", reads=True)
        return version

    def where(self, *conditions: tuple[str, str, Any], **equal: Operand) -> Selection:
        """Select records by conditions; see `Book.where`."""
        return RaySelection(self, parse_conditions(conditions, equal))

    def sql(
        self,
        query: str,
        parameters: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        memory: str | int = "1GB",
        seconds: float = 60.0,
    ) -> Result:
        """Run a read-only DuckDB query in the actor; see `Book.sql`."""
        from rollbook.book.query import Result

        stream, more = self.call_actor("sql", query, parameters, reads=True, memory=memory, seconds=seconds)
        return Result(from_stream(stream), more)

    def __getitem__(self, uid: str | EID) -> Experience:
        records: Experiences = self.get([get_uid(uid)])
        return records[0]

    def __contains__(self, uid: RecordId) -> bool:
        return bool(self.call_actor("contains", get_uid(uid), reads=True))

    def __len__(self) -> int:
        return int(self.call_actor("length", group="control", reads=True))

    # --- weights ----------------------------------------------------------------------------------------------------

    def put_weights(self, id: str, version: int, files: Mapping[str, bytes], metadata: Mapping[str, Any]) -> None:
        """Publish weights in the object store, in place of earlier ones.

        They are there while this process lives, also if the actor is restarted.

        Args:
            id: Identifies the weights.
            version: The policy version.
            files: Contents by file name.
            metadata: Small plain values.
        """
        check_writable(self, "put_weights")
        arrays = {name: np.frombuffer(content, np.uint8) for name, content in files.items()}
        self._weights = PublishedWeights(id, version, dict(metadata), [self._put(arrays)])
        self.call_actor("set_weights", self._weights, group="control")

    def get_weights(self) -> tuple[str, int, dict[str, memoryview], Mapping[str, Any]] | None:
        """Return the published weights.

        Returns:
            Id, version, contents by file name (views of the object store) and metadata; `None` if there are none, or if
            the process that published them has ended.
        """
        weights: PublishedWeights | None = self.call_actor("get_weights", group="control", reads=True)
        if weights is None:
            return None
        try:
            arrays = ray.get(weights.files[0])
        except (ObjectLostError, RayActorError):
            if not self.read_only:
                self.call_actor("drop_weights", weights.id, group="control")
            return None
        files = {name: memoryview(array) for name, array in arrays.items()}
        return weights.id, weights.version, files, weights.metadata

    def weights_version(self) -> tuple[str, int] | None:
        """Return the id and the version of the published weights, or `None` if there are none."""
        weights: PublishedWeights | None = self.call_actor("get_weights", group="control", reads=True)
        return None if weights is None else (weights.id, weights.version)

    # --- ending -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect. Idempotent; the actor goes on serving the book."""
        self.closed = True

    def stop(self) -> None:
        """Stop serving: end the actor. The book stays where it is."""
        check_writable(self, "stop")
        self.call_actor("stop", group="control", reads=True)
        actor = find_actor(self.name)
        if actor is not None:
            ray.kill(actor, no_restart=True)
        self.closed = True


class _NoActorError(Exception):
    """There is no actor to call."""


class RayErrorText(NamedTuple):
    """Lines of the text of an error of Ray."""

    first: str
    last: str
    is_creation: bool
    """Whether the actor could not be created."""


def describe_ray_error(error: BaseException) -> RayErrorText:
    """Return the first and the last line of an error of Ray, or the name of its class if it has no text.

    >>> describe_ray_error(RayError("The actor died.  \\n\\nTraceback\\n  KeyError: 1"))
    RayErrorText(first='The actor died.', last='KeyError: 1', is_creation=False)
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return RayErrorText(lines[0], lines[-1], "creation task" in lines[0])


def _store_full_error(url: str, error: Exception) -> StoreFullError:
    reason = describe_ray_error(error).first
    return StoreFullError(f"{url}: the object store of Ray is full, nothing was lost: {reason}")


class RayLease(Lease):
    """A lease of a book that an actor serves. The actor does not store it, so that it survives a restart."""

    _book: RayBook

    def _fetch(self) -> Experiences:
        if not self._claim.seqs:
            return Experiences()
        records: Experiences = self._book.call_actor("fetch", self._claim.seqs, reads=True)
        return records

    def _renew_if_due(self) -> None:
        if self._claim.id and time.monotonic() - self._renewed >= self._seconds * 0.25:
            self.renew()

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        claim = self._claim._replace(seqs=[], uids=[], weights=None, short="", partial=())
        try:
            return self._book.call_actor(name, self._request, claim, *args, group="settle", **options)
        except LeaseLostError:
            self._known_lost = True
            raise

    def _renew(self, duration: float) -> float:
        expires: float = self._call("renew", duration)
        return expires

    def _ack(
        self,
        chosen: dict[str, int],
        step: int | None,
        priorities: Mapping[int, float],
        details: Mapping[int, Mapping[str, Any]],
    ) -> int:
        is_last = chosen.keys() >= self._remaining.keys()
        count: int = self._call("ack", chosen, is_last, step, priorities, details)
        return count

    def _nack(self, chosen: dict[str, int], reason: str, *, drop: bool) -> int:
        count: int = self._call("nack", chosen, len(chosen) == len(self._remaining), reason, drop=drop)
        return count


class RaySelection(Selection):
    """A selection that is read page by page from the actor."""

    _book: RayBook

    def count(self) -> int:
        """Count the records; see `Selection.count`."""
        return int(self._book.call_actor("count", self._conditions, reads=True))

    def uids(self) -> list[str]:
        """Return their ids; see `Selection.uids`."""
        uids: list[str] = self._book.call_actor("uids", self._conditions, reads=True)
        return uids

    def _pages(self, name: str, *args: Any) -> Iterator[Any]:
        last: int | None = 0
        while last is not None:
            last, content = self._book.call_actor(name, self._conditions, last, *args, reads=True)
            if last is not None:
                yield content

    def batches(self, rows: int = PAGE_ROWS) -> Iterator[Experiences]:
        """Yield the records in batches; see `Selection.batches`."""
        for content in self._pages("read_page", check_int("rows", rows, 1)):
            if content is not None:
                yield unpack(content, verify=False)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches():
            yield from batch

    def scan(self, columns: Sequence[str] | None = None, rows: int = PAGE_ROWS) -> Iterator[pa.RecordBatch]:
        """Return Arrow batches of some columns; see `Selection.scan`."""
        names = check_columns(columns)
        check_int("rows", rows, 1)
        return (
            batch
            for streams in self._pages("scan_page", names, rows)
            for stream in streams
            for batch in from_stream(stream).to_batches()
        )


# --- opening ----------------------------------------------------------------------------------------------------------


def find_actor(name: str) -> Any:
    """Return the handle of a book's actor, or `None` if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def open_served(
    url: str,
    mode: str,
    over: str | os.PathLike[str] | None,
    arguments: Mapping[str, Any],
    settings: Mapping[str, ConsumerSetting],
    tokenizer: Tokenizer | None,
) -> RayBook:
    """Implement `rollbook.open` for `ray://NAME`.

    Args:
        url: `ray://NAME`.
        mode: See `rollbook.open`.
        over: Address of the book to serve; `None` connects to an actor that serves one.
        arguments: Arguments of `rollbook.open`, with the tokenizer's fingerprint.
        settings: Settings of the consumer group "train".
        tokenizer: The tokenizer, for its vocabulary.
    """
    name = url.removeprefix(RAY)
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"url: got {url!r}, expected ray://NAME, with a name of letters, digits, '_', '.' and '-'; the address of "
            "the cluster goes into RAY_ADDRESS or ray.init"
        )
    if mode == "r" and settings:
        raise ReadOnlyError(f"{url}: opened for reading, and got settings ({', '.join(settings)})")
    connect_cluster(url)
    if over is None:
        defaults = {"segment_bytes": SEGMENT_BYTES}
        expected = {key: content for key, content in arguments.items() if content != defaults.get(key)}
    else:
        expected = {**arguments, **_locate(over)}
    created = None
    if find_actor(name) is None:
        if over is None:
            raise MissingBookError(
                f"{url}: no actor of this name serves a book; pass the book to serve: "
                f"rollbook.open({url!r}, over='postgresql://...'), or over a folder"
            )
        vocabulary = None if tokenizer is None else Vocabulary.from_tokenizer(tokenizer).to_bytes()
        created = _create_actor(name, expected, "a" if mode == "a" else "r+", settings, vocabulary)
    book = RayBook(url, read_only=mode == "r")
    try:
        served = book.call_actor(
            "connect", expected, dict(settings), __version__, mode == "a", group="control", reads=True
        )
    except BaseException as error:
        if isinstance(error, ConnectionLostError) and over is not None and find_actor(name) is None:
            # The actor died with its node while this process was connecting.
            return open_served(url, mode, over, arguments, settings, tokenizer)
        if created is not None:
            ray.kill(created, no_restart=True)
        if type(error) is BookError:
            raise BookError(f"{url}: {error}") from None
        raise
    book.over, book.tokenizer, book.quota = redacted(served["over"]), served["tokenizer"], served["quota"]
    return book


def check_cluster_address(address: str) -> None:
    """Raise `ConnectionError` if nothing answers at HOST:PORT. Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if "//" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"{address}: {error}") from None


def connect_cluster(url: str) -> None:
    """Connect this process to a Ray cluster: that of `RAY_ADDRESS`, or one that runs on this machine."""
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        check_cluster_address(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        raise BookError(
            f"{url}: there is no Ray cluster to connect to ({error}); start one with `ray start --head`, "
            "call ray.init() first, or set RAY_ADDRESS"
        ) from None


def _locate(over: str | os.PathLike[str]) -> dict[str, str | None]:
    """Return the address of the book to serve, and the node that has it."""
    address = os.fspath(over)
    if not isinstance(address, str) or not address or address == "memory:":
        raise ValueError(f"over: got {over!r}, expected a folder or 'postgresql://...', which outlive the actor")
    if address.startswith(POSTGRES):
        return {"over": address, "node": None}
    if "://" in address:
        raise ValueError(f"over: got {redacted(address)!r}, expected a folder or 'postgresql://...'")
    # A path means another folder on another machine.
    node: str = ray.get_runtime_context().get_node_id()
    return {"over": os.path.abspath(os.path.expanduser(address)), "node": node}


def _create_actor(
    name: str, arguments: Mapping[str, Any], mode: str, settings: Mapping[str, Any], vocabulary: bytes | None
) -> Any:
    """Create the actor; return `None` if another process was faster."""
    options: dict[str, Any] = {}
    if arguments["node"] is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(arguments["node"], soft=False)
    remote: Any = ray.remote  # its type stub lacks `concurrency_groups`
    actor = remote(max_concurrency=READ_THREADS, concurrency_groups=THREADS)(BookServer).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
        **options,
    )
    try:
        return actor.remote(dict(arguments), mode, dict(settings), vocabulary)
    except ValueError:
        if find_actor(name) is None:
            raise
        return None
