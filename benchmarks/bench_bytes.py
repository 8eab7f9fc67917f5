"""Experiences to bytes and back: Rollbook beside Trinity-RFT and beside memcpy.

Run as `python -m benchmarks.bench_bytes [--n 4096] [--rounds 7] [--json PATH]` from the project root.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks import harness, peers
from benchmarks.harness import FRESH, WARM, Comparison, Contender, Options, Report
from benchmarks.workload import Workload, check_same, make_workload, touch
from rollbook import Experiences
from rollbook.core import wire
from rollbook.core.experience import Experience
from rollbook.core.ragged import Ragged
from rollbook.core.wire import decode, encode

THEIR_WRITE = "Trinity serialize_many"
THEIR_READ = "Trinity deserialize_many"
THEIR_ROWS = "Trinity deserialize_many, every field read"
FROM_ROWS = "write from rows"
FROM_COLUMNS = "write from columns, fresh bytes"
FROM_COLUMNS_REUSED = "write from columns, reused buffer"
OPEN = "open, header, schema and offsets checked"
OPEN_VERIFIED = "open, every byte verified"
OPEN_TOUCHED = "open and read every byte"
OPEN_ROWS = "open and make rows"
OPEN_ROWS_READ = "open and make rows, every field read"

ROUNDS = 7
COMPARISONS = (
    Comparison(FROM_ROWS, FROM_ROWS, THEIR_WRITE, target=9),
    Comparison(FROM_ROWS, FROM_ROWS, FRESH, bound=True),
    Comparison(FROM_COLUMNS, FROM_COLUMNS, THEIR_WRITE),
    Comparison(FROM_COLUMNS, FROM_COLUMNS, FRESH, bound=True),
    Comparison(FROM_COLUMNS_REUSED, FROM_COLUMNS_REUSED, THEIR_WRITE),
    Comparison(FROM_COLUMNS_REUSED, FROM_COLUMNS_REUSED, WARM, target=2, bound=True),
    Comparison(OPEN, OPEN, THEIR_READ, target=200),
    Comparison(OPEN_VERIFIED, OPEN_VERIFIED, THEIR_READ, target=20),
    Comparison(OPEN_VERIFIED, OPEN_VERIFIED, WARM, bound=True),
    Comparison(OPEN_TOUCHED, OPEN_TOUCHED, THEIR_READ),
    Comparison(OPEN_TOUCHED, OPEN_TOUCHED, WARM, bound=True),
    Comparison(OPEN_ROWS, OPEN_ROWS, THEIR_READ, target=7),
    Comparison(OPEN_ROWS_READ, OPEN_ROWS_READ, THEIR_ROWS),
)


def read(buffer: Any) -> int:
    """Read a whole buffer once, eight bytes at a time where it is aligned so; gives the number of bytes."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    word_bytes = data.size - data.size % 8
    np.bitwise_xor.reduce(data[:word_bytes].view(np.uint64))
    np.bitwise_xor.reduce(data[word_bytes:])
    return data.size


def read_columns(experiences: Experiences) -> int:
    """Read everything that the columns hold, values and offsets alike; gives the number of bytes."""
    total = 0
    for column in experiences.columns.values():
        buffers = (column.values, column.offsets) if isinstance(column, Ragged) else column.buffers()
        total += sum(read(buffer) for buffer in buffers if buffer is not None)
    return total


def contenders(workload: Workload, trinity: Any, our_bytes: bytes, their_bytes: bytes) -> list[Contender]:
    """Both sides and the bounds. What is written is new in each round, so that nothing is cached in it."""

    def our_rows() -> list[Experience]:
        return workload.build(Experience)

    def our_columns() -> Experiences:
        return Experiences(our_rows())

    buffer = bytearray(wire.encoded_size(our_columns()))
    read_theirs = trinity.Experience.deserialize_many
    return [
        *harness.memcpy_bounds(len(our_bytes)),
        Contender(THEIR_WRITE, trinity.Experience.serialize_many, lambda: workload.build(trinity.Experience)),
        Contender(THEIR_READ, lambda _: read_theirs(their_bytes)),
        Contender(THEIR_ROWS, lambda _: touch(read_theirs(their_bytes))),
        Contender(FROM_ROWS, Experience.serialize_many, our_rows),
        Contender(FROM_COLUMNS, lambda columns: encode(columns), our_columns),
        Contender(FROM_COLUMNS_REUSED, lambda columns: wire.encode(columns, out=buffer), our_columns),
        Contender(OPEN, lambda _: wire.decode(our_bytes, verify=False)),
        Contender(OPEN_VERIFIED, lambda _: wire.decode(our_bytes, verify=True)),
        Contender(OPEN_TOUCHED, lambda _: read_columns(wire.decode(our_bytes, verify=False))),
        Contender(OPEN_ROWS, lambda _: Experience.deserialize_many(our_bytes)),
        Contender(OPEN_ROWS_READ, lambda _: touch(Experience.deserialize_many(our_bytes))),
    ]


def run(options: Options) -> Report:
    """Check that both sides agree, then time them."""
    rounds = options.rounds or ROUNDS
    trinity = peers.trinity(options.scratch)
    workload = make_workload(options.n, options.seed)

    their_bytes = trinity.Experience.serialize_many(workload.build(trinity.Experience))
    our_rows = workload.build(Experience)
    our_bytes = Experience.serialize_many(our_rows)
    columns = Experiences(our_rows)
    reused = wire.encode(columns, out=bytearray(wire.encoded_size(columns)))
    check_same(
        workload,
        {
            "Trinity": trinity.Experience.deserialize_many(their_bytes),
            "Rollbook": Experience.deserialize_many(our_bytes),
            "Rollbook, from columns": list(decode(encode(columns))),
            "Rollbook, from a reused buffer": list(wire.decode(bytes(reused), verify=True)),
            "Rollbook, unverified": list(wire.decode(our_bytes, verify=False)),
        },
    )
    del our_rows, columns, reused

    times = harness.measure(contenders(workload, trinity, our_bytes, their_bytes), rounds, options.seed)
    facts = {
        "experiences": len(workload.rows),
        "rounds": rounds,
        "MB of tensors": round(workload.tensor_bytes / 1e6, 1),
        "MB of text": round(workload.text_bytes / 1e6, 1),
        "MB of columns read": round(read_columns(wire.decode(our_bytes)) / 1e6, 1),
        "% overhead of Rollbook's bytes": round(100 * (len(our_bytes) / workload.payload_bytes - 1), 2),
        "% overhead of Trinity's bytes": round(100 * (len(their_bytes) / workload.payload_bytes - 1), 2),
    }
    return Report("Bytes", facts, times, [times.compare(c) for c in COMPARISONS])


if __name__ == "__main__":
    harness.main(run)
