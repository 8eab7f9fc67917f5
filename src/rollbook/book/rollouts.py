"""Rollouts in progress: the groups that rollout workers claim, the weights they load, and what they report.

Groups are numbered from 0 in the order of the prompts. The trainer sets how many may be started (`set_limit`). A worker
claims some (`claim_rollouts`), generates and appends their records, and finishes them (`finish_claims`).

Invariant: a group is claimed by at most one worker at a time. A claim has a fence, a number that is never used again:
after the claim was given to another worker, calls with the old fence change nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollbook.book import queue
from rollbook.book.append import AppendCondition, append_records
from rollbook.book.consumer import get_consumer
from rollbook.book.errors import BookError, ConflictError, NoWeightsError
from rollbook.book.lease import refresh_consumer
from rollbook.book.ledger import Transaction, check_text, check_writable, parse_object, served, write_once
from rollbook.book.segments.files import FileSegmentStore
from rollbook.core.checks import check_float, check_int
from rollbook.core.files import make_folder, private_opener

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.core.experiences import Experiences

OPEN, SUSPENDED, FINISHED = "open", "suspended", "finished"
CLAIMED, RETURNED = "claimed", "returned"
WEIGHTS_PART_BYTES = 16 << 20
"""Size of the parts in which a database stores weights."""
_WEIGHTS_FOLDER = "weights"
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.02, 0.5
_MAX_FACTOR = 1 << 20
"""By how much the time to live of the claims of a group is multiplied at most."""
_MAX_EVENTS = 20_000
"""How many of the last events `read_generations` looks at."""


class RolloutClaim(NamedTuple):
    """A group that a worker has claimed; see `claim_rollouts`.

    Args:
        number: Number of the group, from 0.
        fence: Number of the claim, which is never used again.
        version: The policy version when the group was claimed.
        worker: Name of the worker.
        claimed: Time of the claim, in seconds since 1970 by the database's clock.
        expires: Time at which the claim expires unless it is renewed.
    """

    number: int
    fence: int
    version: int
    worker: str = ""
    claimed: float = 0.0
    expires: float = 0.0


@dataclass(frozen=True)
class RolloutState:
    """Groups that are being generated or may be; see `read_rollouts`.

    Args:
        status: `open`, `suspended` or `finished`.
        next: Number of the first group that was not started.
        limit: Number of the first group that may not be started yet.
        returned: Numbers of groups that were started, and wait for another worker.
        in_flight: Groups that workers have claimed.
        settings: What the trainer stored for its workers.
        time: Time of this state, in seconds since 1970 by the database's clock.
    """

    status: str
    next: int
    limit: int
    returned: list[int] = field(default_factory=list)
    in_flight: list[RolloutClaim] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    time: float = field(default=0.0, repr=False)


class Generation(NamedTuple):
    """A group that a worker finished; see `read_generations`.

    Args:
        worker: Name of the worker.
        seconds: Seconds from the claim to the append.
        age: Seconds since then.
    """

    worker: str
    seconds: float
    age: float


class WorkerReport(NamedTuple):
    """The last report of a worker or trainer; see `read_worker_reports`.

    Args:
        name: Name of the worker or trainer.
        age: Seconds since the report.
        details: What it reported; see `report_worker`.
    """

    name: str
    age: float
    details: dict[str, Any]


class Weights(NamedTuple):
    """Published weights; see `fetch_weights`.

    Args:
        id: Identifies them.
        version: The policy version.
        files: Contents by name.
        metadata: What the trainer added.
    """

    id: str
    version: int
    files: Mapping[str, bytes | memoryview]
    metadata: Mapping[str, Any]


# --- the trainer's calls ----------------------------------------------------------------------------------------------


@served(repeat=True)
def open_rollouts(book: Book, settings: Mapping[str, Any], *, next: int, returned: Sequence[int] = ()) -> None:
    """Void all claims, and let workers claim groups from `next` on, as far as `set_limit` allows.

    Args:
        book: The book.
        settings: What workers need to know, JSON-compatible.
        next: Number of the first group that was not started.
        returned: Numbers of groups before `next` that were not finished.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> open_rollouts(book, {}, next=0)
    >>> set_limit(book, 2)
    >>> first, second = claim_rollouts(book, "a", 4, seconds=60)
    >>> finish_claims(book, [first])
    1
    >>> return_claims(book, [second], "worker stopped")
    1
    >>> [claim.number for claim in claim_rollouts(book, "b", 4, seconds=60)]
    [1]
    >>> finish_claims(book, [second])  # "b" has it now
    0
    """
    check_writable(book, "open_rollouts")
    with book.ledger.write() as tx:
        _restart_rollouts(tx, OPEN, settings, check_int("next", next))
        for number in sorted(set(returned)):
            tx.run(
                "INSERT INTO claims (number, fence, worker, version, claimed, expires, factor, state) "
                "VALUES (?, 0, '', 0, 0, 0, 1, ?)",
                (check_int("returned", number), RETURNED),
            )


@served(repeat=True)
def suspend_rollouts(book: Book, settings: Mapping[str, Any]) -> None:
    """Void all claims, and let workers claim nothing until `open_rollouts`.

    Args:
        book: The book.
        settings: What workers need to know, JSON-compatible.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> suspend_rollouts(book, {})
    >>> set_limit(book, 1)
    >>> claim_rollouts(book, "a", 1, seconds=60)
    []
    """
    check_writable(book, "suspend_rollouts")
    with book.ledger.write() as tx:
        _restart_rollouts(tx, SUSPENDED, settings)


def _restart_rollouts(tx: Transaction, status: str, settings: Mapping[str, Any], next: int | None = None) -> None:
    """Void all claims and store a new state, with the number of the first group that was not started if it is known."""
    row = tx.first("SELECT next, fence FROM rollouts WHERE id = 0")
    last_next, fence = row or (0, 0)
    _void_claims(tx, "trainer started")
    tx.run("DELETE FROM rollouts")
    number = last_next if next is None else next
    tx.run(
        "INSERT INTO rollouts (id, status, next, highest, fence, settings) VALUES (0, ?, ?, ?, ?, ?)",
        (status, number, number, fence, json.dumps(dict(settings))),
    )


@served(repeat=True)
def close_rollouts(book: Book) -> None:
    """Tell workers that no more groups are needed, and void their claims.

    Args:
        book: The book.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> open_rollouts(book, {}, next=0)
    >>> close_rollouts(book)
    >>> read_rollouts(book).status
    'finished'
    """
    check_writable(book, "close_rollouts")
    with book.ledger.write() as tx:
        tx.run("UPDATE rollouts SET status = ? WHERE id = 0", (FINISHED,))
        _void_claims(tx, "training finished")


def _void_claims(tx: Transaction, reason: str) -> None:
    """Remove all claims, and record for those that workers have why their groups are not generated."""
    rows = tx.all(
        "SELECT number, fence, version, worker, claimed, expires FROM claims WHERE state = ? ORDER BY number",
        (CLAIMED,),
    )
    _mark_returned(tx, [RolloutClaim(*values) for values in rows], reason)
    tx.run("DELETE FROM claims")


@served(repeat=True)
def set_limit(book: Book, limit: int) -> None:
    """Set how many groups workers may start.

    Args:
        book: The book.
        limit: Number of the first group that may not be started yet.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> open_rollouts(book, {}, next=0)
    >>> set_limit(book, 2)
    >>> [claim.number for claim in claim_rollouts(book, "a", 4, seconds=60)]
    [0, 1]
    """
    check_int("limit", limit)
    with book.ledger.write(shared=True, durable=False) as tx:
        tx.run("UPDATE rollouts SET highest = ? WHERE id = 0", (limit,))


@served(repeat=True)
def read_rollouts(book: Book) -> RolloutState | None:
    """Return the state of the rollouts.

    Args:
        book: The book.

    Returns:
        The state, or `None` if no trainer has opened rollouts.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> open_rollouts(book, {"lr": 1}, next=3, returned=[1])
    >>> read_rollouts(book)
    RolloutState(status='open', next=3, limit=3, returned=[1], in_flight=[], settings={'lr': 1})
    """
    with book.ledger.read() as tx:
        row = tx.first("SELECT status, next, highest, settings FROM rollouts WHERE id = 0")
        if row is None:
            return None
        claims = tx.all("SELECT state, number, fence, version, worker, claimed, expires FROM claims ORDER BY number")
        now = tx.now
    status, next_group, limit, settings = row
    return RolloutState(
        status,
        next_group,
        limit,
        [number for state, number, *_ in claims if state == RETURNED],
        [RolloutClaim(*values) for state, *values in claims if state == CLAIMED],
        parse_object(settings, "rollouts: settings"),
        now,
    )


@served(repeat=True)
def count_open_groups(book: Book, consumer: str = "train") -> int:
    """Return how many groups wait for a consumer, or are leased by it.

    Args:
        book: The book.
        consumer: A consumer with a bound on staleness, whose inbox can be drained at any time.

    Returns:
        Number of groups.

    >>> import rollbook
    >>> book = rollbook.open("memory:", max_staleness=1)
    >>> _ = book.append([rollbook.Experience(tokens=[1, 2], eid={"batch": 0, "task": task}) for task in (0, 1)])
    >>> count_open_groups(book)
    2
    """
    refresh_consumer(book, consumer)
    with book.ledger.read() as tx:
        group = get_consumer(tx, consumer)
        (count,) = tx.first(
            "SELECT COUNT(DISTINCT gid) FROM queue WHERE consumer = ? AND state IN ('waiting', 'cooling', 'leased')",
            (group.id,),
        )
    return int(count)


@served(repeat=True)
def read_generations(book: Book, count: int = 32) -> list[Generation]:
    """Return the groups that workers finished last, the newest first.

    Args:
        book: The book.
        count: Maximum number of groups.

    Returns:
        Worker, duration and age of each group.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> open_rollouts(book, {}, next=0)
    >>> set_limit(book, 1)
    >>> finish_claims(book, claim_rollouts(book, "a", 1, seconds=60))
    1
    >>> [generation.worker for generation in read_generations(book)]
    ['a']
    """
    with book.ledger.read() as tx:
        rows = tx.all(
            "SELECT time, detail FROM events WHERE kind = 'generated' "
            "AND id > (SELECT COALESCE(MAX(id), 0) FROM events) - ? ORDER BY id DESC LIMIT ?",
            (_MAX_EVENTS, check_int("count", count, 1)),
        )
        now = tx.now
    details = [(time, parse_object(text, "an event's detail")) for time, text in rows]
    return [
        Generation(str(detail.get("worker")), float(detail.get("seconds", 0.0)), now - time) for time, detail in details
    ]


# --- the workers' calls -----------------------------------------------------------------------------------------------


@served(wait=True)
def claim_rollouts(book: Book, worker: str, count: int, *, seconds: float, timeout: float = 0.0) -> list[RolloutClaim]:
    """Claim groups to generate, those that were returned or have expired first.

    A claim lasts twice as long each time its group has expired before, so that a group is generated in the end even if
    calls of the book take longer than `seconds`.

    Args:
        book: The book.
        worker: Name of the worker.
        count: How many at most.
        seconds: Seconds after which a claim that is not renewed expires.
        timeout: Seconds to wait for the first one.

    Returns:
        The claims; empty if there is nothing to generate now.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> open_rollouts(book, {}, next=0)
    >>> set_limit(book, 3)
    >>> [claim.number for claim in claim_rollouts(book, "a", 2, seconds=60)]
    [0, 1]
    >>> [claim.number for claim in claim_rollouts(book, "b", 2, seconds=60)]
    [2]
    """
    check_writable(book, "claim_rollouts")
    check_text("worker", worker, 1, 200)
    count, seconds = check_int("count", count, 1), check_float("seconds", seconds, 0.0, 1e9)
    end, wait = time.monotonic() + check_float("timeout", timeout, 0.0), _FIRST_WAIT_SECONDS
    while True:
        if _may_claim(book):
            claims = write_once(book.ledger, lambda tx: _claim(tx, worker, count, seconds), _has_claims)
            if claims:
                return claims
        left = end - time.monotonic()
        if left <= 0:
            return []
        time.sleep(min(wait, left))
        wait = min(wait * 1.5, _LONGEST_WAIT_SECONDS)


def _may_claim(book: Book) -> bool:
    """Return whether there seems to be a group to claim, without a lock, since many workers ask."""
    with book.ledger.read() as tx:
        rows = tx.all(
            "SELECT 1 FROM rollouts WHERE id = 0 AND status = ? AND (next < highest OR EXISTS "
            "(SELECT 1 FROM claims WHERE state = ? OR expires <= ?))",
            (OPEN, RETURNED, tx.now),
        )
    return bool(rows)


def _claim(tx: Transaction, worker: str, count: int, seconds: float) -> list[RolloutClaim]:
    row = tx.first(f"SELECT status, next, highest, fence FROM rollouts WHERE id = 0{tx.for_update}")
    if row is None or row[0] != OPEN:
        return []
    _, next_group, limit, fence = row
    free = tx.all(
        "SELECT number, worker, state, factor FROM claims WHERE state = ? OR expires <= ? ORDER BY number LIMIT ?",
        (RETURNED, tx.now, count),
    )
    new_groups = range(next_group, max(min(limit, next_group + count - len(free)), next_group))
    factors = {number: min(factor * (1 + (state == CLAIMED)), _MAX_FACTOR) for number, _, state, factor in free}
    factors |= dict.fromkeys(new_groups, 1)
    if not factors:
        return []
    version = queue.announced_version(tx) or 0
    claims = [
        RolloutClaim(number, fence + i, version, worker, tx.now, tx.now + seconds * factor)
        for i, (number, factor) in enumerate(factors.items(), start=1)
    ]
    tx.insert(
        "claims",
        ("number", "fence", "worker", "version", "claimed", "expires", "factor", "state"),
        [(*_columns(claim), factors[claim.number], CLAIMED) for claim in claims],
        "ON CONFLICT (number) DO UPDATE SET fence = excluded.fence, worker = excluded.worker, version = "
        "excluded.version, claimed = excluded.claimed, expires = excluded.expires, "
        "factor = excluded.factor, state = excluded.state",
    )
    tx.run("UPDATE rollouts SET next = ?, fence = ? WHERE id = 0", (new_groups.stop, claims[-1].fence))
    expired = [(number, holder) for number, holder, state, _ in free if state == CLAIMED]
    queue.record_events(
        tx,
        [
            *(queue.Event("reassigned", reason="expired", detail={"number": n, "worker": w}) for n, w in expired),
            *(queue.Event("begun", lease=claim.fence, detail=_describe(claim)) for claim in claims),
        ],
    )
    return claims


def _columns(claim: RolloutClaim) -> tuple[Any, ...]:
    return claim.number, claim.fence, claim.worker, claim.version, claim.claimed, claim.expires


def _describe(claim: RolloutClaim) -> dict[str, Any]:
    return {"number": claim.number, "worker": claim.worker, "version": claim.version}


def _has_claims(tx: Transaction, claims: Sequence[RolloutClaim]) -> bool:
    # A claim that was not committed leaves its fence to the next one, of another worker.
    query = "SELECT 1 FROM claims WHERE fence = ? AND worker = ? AND claimed = ?"
    return not claims or tx.first(query, (claims[-1].fence, claims[-1].worker, claims[-1].claimed)) is not None


def _find_current(tx: Transaction, claims: Sequence[RolloutClaim]) -> list[RolloutClaim]:
    """Return those claims that their workers still have, and lock their rows."""
    rows = tx.all(
        f"SELECT fence FROM claims WHERE state = ? AND fence {tx.in_ints} ORDER BY number{tx.for_update}",
        (CLAIMED, tx.array([claim.fence for claim in claims])),
    )
    fences = {fence for (fence,) in rows}
    return [claim for claim in claims if claim.fence in fences]


@served(repeat=True)
def renew_claims(book: Book, claims: Sequence[RolloutClaim], seconds: float) -> list[RolloutClaim]:
    """Extend claims, including expired ones that no other worker was given.

    Args:
        book: The book.
        claims: The claims.
        seconds: New time to live, of a group that has not expired before; see `claim_rollouts`.

    Returns:
        Those that the worker still has.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> open_rollouts(book, {}, next=0)
    >>> set_limit(book, 2)
    >>> claims = claim_rollouts(book, "a", 2, seconds=60)
    >>> _ = return_claims(book, claims[:1], "out of memory")
    >>> [claim.number for claim in renew_claims(book, claims, 60)]
    [1]
    """
    if not claims:
        return []

    def transact(tx: Transaction) -> list[RolloutClaim]:
        current = _find_current(tx, claims)
        fences = tx.array([claim.fence for claim in current])
        tx.run(
            f"UPDATE claims SET expires = ? + ? * factor WHERE fence {tx.in_ints}",
            (tx.now, float(seconds), fences),
        )
        return current

    # Not durable: after a crash of the server, a claim may expire earlier.
    return write_once(
        book.ledger,
        transact,
        lambda tx, current: False,
        begin=lambda timeout: book.ledger.write(shared=True, durable=False, timeout=timeout),
    )


@served(repeat=True)
def finish_claims(book: Book, claims: Sequence[RolloutClaim], detail: Mapping[str, Any] | None = None) -> int:
    """Record that the groups of these claims are in the book and will not be generated again.

    Args:
        book: The book.
        claims: The claims; those that the worker has lost are ignored.
        detail: JSON-compatible details for their events.

    Returns:
        How many claims were ended.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> open_rollouts(book, {}, next=0)
    >>> set_limit(book, 2)
    >>> finish_claims(book, claim_rollouts(book, "a", 2, seconds=60))
    2
    >>> read_rollouts(book).in_flight
    []
    """

    def transact(tx: Transaction) -> int:
        return _finish(tx, claims, detail)

    return write_once(book.ledger, transact, lambda tx, _: not _find_current(tx, claims)) if claims else 0


def _finish(tx: Transaction, claims: Sequence[RolloutClaim], detail: Mapping[str, Any] | None) -> int:
    current = _find_current(tx, claims)
    tx.run(f"DELETE FROM claims WHERE fence {tx.in_ints}", (tx.array([claim.fence for claim in current]),))
    events = []
    for claim in current:
        seconds = round(max(tx.now - claim.claimed, 0.0), 3)
        more = {**_describe(claim), "seconds": seconds, **(detail or {})}
        events.append(queue.Event("generated", lease=claim.fence, detail=more))
    queue.record_events(tx, events)
    return len(current)


class _ClaimLostError(Exception):
    """The claim of an append was given to another worker, or voided."""


@served(repeat=True)
def append_rollouts(
    book: Book,
    claim: RolloutClaim,
    records: Experiences,
    *,
    detail: Mapping[str, Any] | None = None,
    dropped_for: str | None = None,
    reason: str = "",
) -> bool:
    """Append the records of a group and finish its claim, in one transaction.

    So a worker that was paused or cut off cannot append a group that another worker was given, or that a rewind of the
    book has made obsolete.

    Args:
        book: The book.
        claim: The claim of the group.
        records: All records of the group.
        detail: JSON-compatible details for the event of the claim.
        dropped_for: Name of a consumer for which the records are dropped at once.
        reason: Why they are dropped.

    Returns:
        Whether they are in the book by this claim; `False` if the worker had lost it, or the group was there before.

    Raises:
        ConflictError: Ids of the records conflict, and their group is not in the book.

    >>> import rollbook
    >>> from rollbook.core.experiences import Experiences
    >>> book = rollbook.open("memory:")
    >>> open_rollouts(book, {}, next=0)
    >>> set_limit(book, 1)
    >>> [claim] = claim_rollouts(book, "a", 1, seconds=60)
    >>> open_rollouts(book, {}, next=0)  # voids the claim
    >>> append_rollouts(book, claim, Experiences([rollbook.Experience(tokens=[1, 2])])), len(book)
    (False, 0)
    """
    check_writable(book, "append_rollouts")

    def begin(tx: Transaction) -> None:
        if not _finish(tx, [claim], detail):
            raise _ClaimLostError

    try:
        result, _ = append_records(book, records, condition=AppendCondition(begin, dropped_for, reason))
        if result.admitted:
            return True
    except _ClaimLostError:
        pass
    except ConflictError:
        if not groups_in_book(book, sorted({eid.tid for eid in records.eids()})):
            raise
    if finish_claims(book, [claim], detail):
        return False
    # An earlier call may have taken effect, of which the answer was lost.
    with book.ledger.read() as tx:
        return tx.first("SELECT 1 FROM events WHERE kind = 'generated' AND lease = ?", (claim.fence,)) is not None


@served(repeat=True)
def return_claims(book: Book, claims: Sequence[RolloutClaim], reason: str) -> int:
    """Give groups back, for other workers to generate.

    Args:
        book: The book.
        claims: The claims; those that the worker has lost are ignored.
        reason: Stored in the ledger.

    Returns:
        How many claims were ended.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> open_rollouts(book, {}, next=0)
    >>> set_limit(book, 2)
    >>> return_claims(book, claim_rollouts(book, "a", 2, seconds=60), "out of memory")
    2
    >>> read_rollouts(book).returned
    [0, 1]
    """
    if not claims:
        return 0
    check_text("reason", reason)

    def transact(tx: Transaction) -> int:
        current = _find_current(tx, claims)
        _mark_returned(tx, current, reason)
        return len(current)

    return write_once(book.ledger, transact, lambda tx, _: not _find_current(tx, claims))


@served(repeat=True)
def return_worker_claims(book: Book, worker: str, reason: str) -> int:
    """Give back all groups that a worker of this name has claimed, such as before it was restarted.

    Args:
        book: The book.
        worker: Name of the worker.
        reason: Stored in the ledger.

    Returns:
        How many claims were ended.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> open_rollouts(book, {}, next=0)
    >>> set_limit(book, 2)
    >>> _ = claim_rollouts(book, "a", 2, seconds=60)
    >>> return_worker_claims(book, "a", "restarted")
    2
    """

    def select(tx: Transaction) -> list[RolloutClaim]:
        rows = tx.all(
            "SELECT number, fence, version, worker, claimed, expires FROM claims WHERE worker = ? AND state = ? "
            f"ORDER BY number{tx.for_update}",
            (worker, CLAIMED),
        )
        return [RolloutClaim(*values) for values in rows]

    def transact(tx: Transaction) -> int:
        claims = select(tx)
        _mark_returned(tx, claims, reason)
        return len(claims)

    return write_once(book.ledger, transact, lambda tx, _: not select(tx))


def _mark_returned(tx: Transaction, claims: Sequence[RolloutClaim], reason: str) -> None:
    fences = tx.array([claim.fence for claim in claims])
    tx.run(f"UPDATE claims SET state = ? WHERE fence {tx.in_ints}", (RETURNED, fences))
    events = [queue.Event("reassigned", reason=reason, lease=c.fence, detail=_describe(c)) for c in claims]
    queue.record_events(tx, events)


@served(repeat=True)
def groups_in_book(book: Book, groups: Sequence[str]) -> set[str]:
    """Return those groups of which the book has training records.

    Args:
        book: The book.
        groups: Ids of groups (`EID.tid`).

    Returns:
        Ids of those that are in the book.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(tokens=[1, 2], eid={"batch": 0, "task": 1})])
    >>> groups_in_book(book, ["0/1", "0/2"])
    {'0/1'}
    """
    with book.ledger.read() as tx:
        rows = tx.all(
            f"SELECT DISTINCT gid FROM records WHERE gid {tx.in_texts} AND evaluation = 0 "
            "AND (removed_reason IS NULL OR removed_reason <> 'rewound')",
            (tx.array(list(groups)),),
        )
    return {group for (group,) in rows}


# --- reports ----------------------------------------------------------------------------------------------------------


@served(repeat=True)
def report_worker(book: Book, worker: str, **details: Any) -> None:
    """Store what a worker or trainer does now, in place of its last report.

    Args:
        book: The book.
        worker: Its name.
        details: JSON-compatible details.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> report_worker(book, "a", state="generating", version=3)
    >>> read_worker_reports(book)[0].details
    {'state': 'generating', 'version': 3}
    """
    check_writable(book, "report_worker")
    text = json.dumps(details)
    with book.ledger.write(shared=True, durable=False) as tx:
        tx.run(
            "INSERT INTO workers (name, seen, detail) VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET seen = excluded.seen, detail = excluded.detail",
            (check_text("worker", worker, 1, 200), tx.now, text),
        )


@served(repeat=True)
def read_worker_reports(book: Book) -> list[WorkerReport]:
    """Return the last reports of all workers and trainers.

    Args:
        book: The book.

    Returns:
        The reports, in the order of the names.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> report_worker(book, "a", state="generating")
    >>> [report.details for report in read_worker_reports(book)]
    [{'state': 'generating'}]
    """
    with book.ledger.read() as tx:
        return select_worker_reports(tx)


def select_worker_reports(tx: Transaction) -> list[WorkerReport]:
    """Implement `read_worker_reports` in a transaction."""
    rows: list[tuple[Any, ...]] = tx.all("SELECT name, seen, detail FROM workers ORDER BY name")
    return [WorkerReport(name, max(tx.now - seen, 0.0), parse_object(text, "workers")) for name, seen, text in rows]


@served(repeat=True)
def remove_worker(book: Book, worker: str) -> None:
    """Remove the report of a worker or trainer that ends.

    Args:
        book: The book.
        worker: Its name.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> report_worker(book, "a", state="generating")
    >>> remove_worker(book, "a")
    >>> read_worker_reports(book)
    []
    """
    with book.ledger.write(shared=True, durable=False) as tx:
        tx.run("DELETE FROM workers WHERE name = ?", (worker,))


# --- weights ----------------------------------------------------------------------------------------------------------


def publish_weights(book: Book, version: int, files: Mapping[str, bytes], metadata: Mapping[str, Any]) -> None:
    """Publish weights for workers, in place of earlier ones.

    A book in a folder keeps them in files there, one in PostgreSQL in the database; those of a book that Ray serves are
    in the object store. They are not durable: a trainer that is started again publishes its weights again.

    Args:
        book: The book.
        version: Their policy version.
        files: Contents by name.
        metadata: JSON-compatible.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> publish_weights(book, 3, {"weights": b"..."}, {"dtype": "float32"})
    >>> weights = fetch_weights(book)
    >>> weights.version, weights.files, weights.metadata
    (3, {'weights': b'...'}, {'dtype': 'float32'})
    """
    check_writable(book, "publish_weights")
    name = os.urandom(8).hex()
    if book.state.weights_transport is not None:
        book.state.weights_transport.put_weights(name, check_int("version", version), files, metadata)
        return
    details = {"id": name, "version": check_int("version", version), "files": list(files), "metadata": dict(metadata)}
    folder = _weights_folder(book)
    if folder is not None:
        make_folder(folder)
        make_folder(folder / name)
        for file_name, data in files.items():
            with open(folder / name / _check_file_name(file_name), "wb", opener=private_opener) as file:
                file.write(data)
    with book.ledger.write(shared=True, durable=False) as tx:
        pointer = _read_pointer(tx)
        # A worker may be reading the weights before these.
        retained_ids = [name] if pointer is None else [name, pointer["id"]]
        if folder is None:
            block = 0
            for file_name, data in files.items():
                for chunk in _split(data):
                    tx.run(
                        "INSERT INTO weights (id, part, name, data) VALUES (?, ?, ?, ?)",
                        (name, block, _check_file_name(file_name), chunk),
                    )
                    block += 1
            tx.run(f"DELETE FROM weights WHERE NOT (id {tx.in_texts})", (tx.array(retained_ids),))
        tx.run(
            "INSERT INTO meta (key, value) VALUES ('weights', ?) "
            "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (json.dumps(details),),
        )
    if folder is not None:
        for path in folder.iterdir():
            if path.name not in retained_ids:
                shutil.rmtree(path, ignore_errors=True)


def _split(data: bytes) -> Iterator[bytes]:
    yield from (data[at : at + WEIGHTS_PART_BYTES] for at in range(0, max(len(data), 1), WEIGHTS_PART_BYTES))


def _check_file_name(name: str) -> str:
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise ValueError(f"files: got {name!r}, expected the name of a file, without a folder")
    return name


def _weights_folder(book: Book) -> Path | None:
    store = book.store
    return Path(store.book_folder) / _WEIGHTS_FOLDER if isinstance(store, FileSegmentStore) else None


def _read_pointer(tx: Transaction) -> dict[str, Any] | None:
    row = tx.first("SELECT value FROM meta WHERE key = 'weights'")
    return None if row is None else parse_object(row[0], "meta: weights")


def weights_version(book: Book) -> tuple[str, int] | None:
    """Return which weights are published, without reading them.

    Args:
        book: The book.

    Returns:
        Their id and policy version, or `None` if there are none.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> publish_weights(book, 3, {"weights": b"..."}, {})
    >>> weights_id, version = weights_version(book)
    >>> version
    3
    """
    if book.state.weights_transport is not None:
        return book.state.weights_transport.weights_version()
    with book.ledger.read() as tx:
        pointer = _read_pointer(tx)
    return None if pointer is None else (pointer["id"], pointer["version"])


def fetch_weights(book: Book) -> Weights:
    """Read the published weights.

    Args:
        book: The book.

    Returns:
        The weights.

    Raises:
        NoWeightsError: There are none.
        BookError: Their files are missing.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> publish_weights(book, 3, {"weights": b"..."}, {})
    >>> weights = fetch_weights(book)
    >>> weights.version, weights.files
    (3, {'weights': b'...'})
    """
    missing = f"{book.url}: no weights were published, expected a trainer with rollout workers"
    if book.state.weights_transport is not None:
        published = book.state.weights_transport.get_weights()
        if published is None:
            raise NoWeightsError(missing)
        return Weights(*published)
    while True:
        with book.ledger.read() as tx:
            pointer = _read_pointer(tx)
            if pointer is None:
                raise NoWeightsError(missing)
            rows = tx.all("SELECT name, data FROM weights WHERE id = ? ORDER BY part", (pointer["id"],))
        folder = _weights_folder(book)
        parts: dict[str, list[bytes]] = {}
        for name, data in rows:
            parts.setdefault(name, []).append(data)
        files = {name: b"".join(chunks) for name, chunks in parts.items()}
        if folder is not None:
            source = folder / _check_file_name(pointer["id"])
            with suppress(FileNotFoundError):
                files = {name: (source / _check_file_name(name)).read_bytes() for name in pointer["files"]}
        if files.keys() == set(pointer["files"]):
            return Weights(pointer["id"], pointer["version"], files, pointer["metadata"])
        # `publish_weights` has removed them, or some of them, while they were read.
        current = weights_version(book)
        if current is not None and current[0] == pointer["id"]:
            raise BookError(f"{book.url}: files of the published weights are missing; the trainer publishes new ones")


__all__ = [
    "Generation",
    "RolloutClaim",
    "RolloutState",
    "Weights",
    "WorkerReport",
    "append_rollouts",
    "claim_rollouts",
    "close_rollouts",
    "count_open_groups",
    "fetch_weights",
    "finish_claims",
    "groups_in_book",
    "open_rollouts",
    "publish_weights",
    "read_generations",
    "read_rollouts",
    "read_worker_reports",
    "remove_worker",
    "renew_claims",
    "report_worker",
    "return_claims",
    "return_worker_claims",
    "set_limit",
    "suspend_rollouts",
    "weights_version",
]
