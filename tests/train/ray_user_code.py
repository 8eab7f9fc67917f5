"""What the configurations of the Ray trials name: a model and rewards, of which the model logs calls of the book.

Actors have the environment of their raylet, not that of the driver, so that options carry the path of the log. A line
of the log is one write to a file opened for appending: it is there even if the process is killed right after it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from rollbook.book import lease as leases
from rollbook.book.errors import LeaseLostError
from rollbook.core.experiences import Experiences
from rollbook.core.ids import EID
from rollbook.train import worker as workers
from rollbook.train.recipes import letters

_paths: list[str] = []


def model(log: str, fail: str = "", failed: str = "", **options: Any) -> Any:
    """Build the model of letters, and log the appends and acknowledgements of this process from now on.

    Args:
        log: Path of the log.
        fail: Actors whose title has this text fail.
        failed: A file: the one that creates it fails alone.
        options: Of the model.
    """
    if fail and fail in Path("/proc/self/cmdline").read_text() and not (failed and Path(failed).exists()):
        if failed:
            Path(failed).touch()
        raise RuntimeError("the builder of the trial fails")
    if not _paths:
        _wrap()
    _paths[:] = [log]
    return letters.model(**options)


def _say(**line: Any) -> None:
    if _paths:
        descriptor = os.open(_paths[0], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)


def _wrap() -> None:
    append, ack = workers.append_rollouts, leases.Lease.ack

    def logged_append(book: Any, claim: Any, records: Experiences, **options: Any) -> bool:
        fingerprints = {row.eid.uid: fingerprint(row) for row in records}
        _say(did="try append", records=fingerprints)
        is_appended = append(book, claim, records, **options)
        if is_appended:
            _say(did="append", records=fingerprints)
        return is_appended

    def logged_ack(self: leases.Lease, step: int | None = None, **options: Any) -> int:
        uids, fence = list(self.uids), self._claim.id
        _say(did="try ack", fence=fence, uids=uids, step=step)
        try:
            count = ack(self, step, **options)
        except LeaseLostError:
            _say(did="lost", fence=fence, uids=uids, step=step)
            raise
        _say(did="ack", fence=fence, uids=uids, step=step)
        return count

    workers.append_rollouts, leases.Lease.ack = logged_append, logged_ack  # type: ignore[method-assign,assignment]


def fingerprint(record: Any) -> str:
    """Return a hash of what a worker generated: tokens, log-probs, versions and reward."""
    parts = [list(map(int, record.tokens)), record.reward]
    for name in ("logprobs", "policy_versions"):
        content = getattr(record, name)
        parts.append(content if content is None or isinstance(content, int) else [float(number) for number in content])
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def reward(eid: EID, seconds: float = 0.0, gate: str = "") -> float:
    """Return a random reward after a pause; wait while the file `gate` exists."""
    time.sleep(seconds)
    while gate and Path(gate).exists():
        time.sleep(0.05)
    return letters.random_reward(eid)


def failing_reward(eid: EID) -> float:
    """Raise an exception for each sample."""
    raise RuntimeError("the reward of the trial fails")
