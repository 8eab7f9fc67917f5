"""A plain work queue on one PostgreSQL table: the floor that the book is compared with.

It has synchronous commits, fencing and lease expiry, and nothing else: no events, groups, digests or checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SCHEMA = """
CREATE TABLE raw_queue (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    uid TEXT UNIQUE,
    body BYTEA,
    state SMALLINT NOT NULL DEFAULT 0,
    fence BIGINT,
    expires TIMESTAMPTZ
);
CREATE INDEX raw_queue_waiting ON raw_queue (id) WHERE state = 0;
ALTER TABLE raw_queue ALTER body SET STORAGE EXTERNAL;
"""


def append(connection: Any, rows: Sequence[tuple[str, bytes]]) -> None:
    """Insert rows of (uid, body) in one transaction; uids that are there already are skipped."""
    with connection.transaction():
        connection.cursor().executemany(
            "INSERT INTO raw_queue (uid, body) VALUES (%s, %b) ON CONFLICT DO NOTHING", rows
        )


def lease(connection: Any, count: int, fence: int, seconds: float = 300.0) -> list[tuple[int, bytes]]:
    """Claim up to `count` rows for `seconds`; return their (id, body)."""
    with connection.transaction():
        rows: list[tuple[int, bytes]] = connection.execute(
            "UPDATE raw_queue SET state = 1, fence = %s, expires = now() + make_interval(secs => %s) WHERE id IN "
            "(SELECT id FROM raw_queue WHERE state = 0 ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING id, body",
            (fence, seconds, count),
        ).fetchall()
    return rows


def ack(connection: Any, ids: Sequence[int], fence: int) -> int:
    """Mark claimed rows as done; return how many changed: none of an expired or another's claim."""
    with connection.transaction():
        changed: int = connection.execute(
            "UPDATE raw_queue SET state = 2 WHERE id = ANY(%s) AND fence = %s AND expires > now()", (list(ids), fence)
        ).rowcount
    return changed
