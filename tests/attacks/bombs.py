"""Small inputs that ask for much: each is read in a process of its own, which says what it took.

`python -m tests.attacks.bombs` reads all of them and prints a JSON object: name -> what came of it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import torch

from rollbook import Experience
from rollbook.core import wire
from tests.attacks import corpus
from tests.attacks.corpus import Flat, field_of, message_of, metadata_of, schema_message, text_of
from tests.attacks.outcome import Meter, decoded, read_as_any, stated_size

SECONDS = 30
"""After which a reading is ended from outside."""


def _arrow() -> dict[str, Callable[[], bytes]]:
    """Flatbuffers may point at one thing from many places: a few hundred kilobytes describe gigabytes."""
    nothing = message_of(3, Flat([("<q", 0), Flat(pairs=[]), Flat(pairs=[])]))
    key, long = text_of("k"), text_of(b"v" * 200_000)

    def many_pairs() -> Flat:
        return Flat(items=[Flat([key, long])] * 5_000)

    def ballast() -> Flat:
        # Arrow's check of flatbuffers allows 8 tables for each byte: more bytes, more tables.
        return metadata_of([(key, text_of(b"v" * 1_000_000))])

    def wide(count: int, name: Flat) -> Flat:
        return field_of(text_of("wide"), "struct", children=Flat(items=[field_of(name, "null")] * count))

    def tree() -> Flat:
        field = field_of(text_of("leaf"), "null")
        for level in range(20):
            field = field_of(text_of(f"level{level}"), "struct", children=Flat(items=[field, field]))
        return field

    def sealed(*messages: bytes) -> bytes:
        return corpus.seal(b"".join(messages) + corpus.END, 0)

    def schema(*columns: Flat, more: Flat | None = None) -> bytes:
        return sealed(schema_message(Flat(items=columns), more), nothing)

    return {
        "metadata of the schema": lambda: schema(more=many_pairs()),
        "metadata of its message": lambda: sealed(
            message_of(1, Flat([None, Flat(items=[])]), 0, many_pairs()), nothing
        ),
        "metadata of the batch": lambda: sealed(
            schema_message(Flat(items=[])), message_of(3, Flat([None, Flat(pairs=[]), Flat(pairs=[])]), 0, many_pairs())
        ),
        "metadata of a column": lambda: schema(field_of(key, "null", more=many_pairs())),
        "a long name": lambda: schema(*[field_of(long, "null")] * 5_000),
        "a long inner name": lambda: schema(wide(5_000, long)),
        "a column a million times": lambda: schema(*[field_of(key, "null")] * 1_000_000),
        "columns in columns": lambda: schema(*[wide(2_000, key)] * 500, more=ballast()),
        "a tree of one branch": lambda: schema(tree(), more=ballast()),
        "frames of other columns each": _frames_of_other_columns,
    }


def _frames_of_other_columns() -> bytes:
    """Every frame adds a thousand columns, which every other frame then has as well, without a value."""
    arrays = corpus.columns_of(corpus.minimal())
    arrays.update({f"c000_{j}": pa.array([1], pa.int8()) for j in range(1000)})
    body = corpus.stream_of(corpus.batch_of(arrays))
    return b"".join(corpus.seal(body.replace(b"c000_", b"c%03d_" % i), 1) for i in range(100))


def _compressed(compression: str) -> dict[str, Callable[[], bytes]]:
    def zeros(size: int, before: bytes = b"") -> bytes:
        return corpus.compress(before + bytes(size), compression)

    def seal(stated: int, stored: bytes) -> bytes:
        return corpus.seal(b"", 1, compression, stored=stored, decoded=stated)

    def good_first() -> bytes:
        body = corpus.take_apart(corpus.frames()["minimal"]).body
        return seal(len(body), zeros(1 << 27, body))

    return {
        f"{compression} that states little": lambda: seal(1000, zeros(1 << 28)),
        f"{compression} that states what it is": lambda: seal(1 << 28, zeros(1 << 28)),
        f"{compression} that states more than it is": lambda: seal(1 << 33, zeros(1 << 20)),
        f"{compression} over the limit": lambda: seal(1 << 40, zeros(1 << 28)),
        f"{compression} with a good body first": good_first,
    }


def _many_frames() -> bytes:
    """Good frames, each within what a frame may decode to whatever its size."""
    frame = wire.encode([Experience(tokens=torch.zeros(1 << 23, dtype=torch.int32))])
    return corpus.seal(corpus.take_apart(frame).body, 1, "zstd") * 16


def _tensors_on_the_same_bytes() -> bytes:
    size = 1_000_000
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    text = json.dumps({f"0:x{i}": entry for i in range(1000)}).encode()
    return corpus.trxp_of(
        {"version": 1, "num_items": 1, "items": [{}]}, len(text).to_bytes(8, "little") + text + bytes(size)
    )


def _shared_lists() -> bytes:
    """Lists that the pickle holds once and the record, whose lists are its own, would hold thousands of times."""
    lists: list[Any] = [[] for _ in range(1000)]
    state = {**corpus.legacy_states()[0], "info": {"size": "x" * 1_000_000, "lists": [lists] * 3900}}
    return corpus.legacy_pickle([state])


def _shared_tensors() -> bytes:
    """A tensor of a few bytes that reads as megabytes, in many places."""
    state = {**corpus.legacy_states()[0], "info": {"tensors": [torch.zeros(1).expand(1 << 20)] * 2000}}
    return corpus.legacy_pickle([state])


def _payloads() -> dict[str, Callable[[], bytes]]:
    return {
        "tensors on the same bytes": _tensors_on_the_same_bytes,
        "pickled lists that are shared": _shared_lists,
        "pickled tensors that are shared": _shared_tensors,
        "pickled lists": lambda: b"\x80\x02" + b"]" * 3_000_000 + b".",
        "pickled dicts": lambda: b"\x80\x02" + b"}" * 3_000_000 + b".",
        "pickled sets": lambda: b"\x80\x04" + b"\x8f" * 3_000_000 + b".",
        "pickled marks": lambda: b"\x80\x02" + b"(" * 3_000_000 + b".",
        "pickled tuples": lambda: b"\x80\x02N" + b"\x85" * 3_000_000 + b".",
        "pickled floats": lambda: b"\x80\x02" + b"G\0\0\0\0\0\0\0\0" * 300_000 + b".",
        "pickled memos": lambda: b"\x80\x04N" + b"\x94" * 3_000_000 + b".",
        "pickled bytearrays": lambda: b"\x80\x05" + (b"\x96" + bytes(8)) * 300_000 + b".",
    }


def bombs() -> dict[str, Callable[[], bytes]]:
    """All of them by name; what each is made of is made when it is called."""
    frames = {"zstd in many frames": _many_frames}
    return {**_arrow(), **_compressed("zstd"), **_compressed("lz4"), **frames, **_payloads()}


def _measure(make: Callable[[], bytes]) -> dict[str, Any]:
    data = make()
    gc.collect()
    meter, start = Meter(), time.process_time()  # of this process: what others do on the machine does not count
    taken = decoded(data) if data[:8] == wire.MAGIC else read_as_any(data)
    return {
        "taken": taken,
        "seconds": time.process_time() - start,
        "peak": meter.peak(),
        "size": len(data),
        "stated": stated_size(data),
    }


def _in_a_fork(make: Callable[[], bytes]) -> dict[str, Any]:
    """Forked, so that what one reading leaves behind in the allocators does not hide what the next one takes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(SECONDS)
        try:
            result = _measure(make)
        except BaseException:
            result = {"error": traceback.format_exc(limit=-4)}
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    result = json.loads(text) if text else {"error": "no word came"}
    return result if code == 0 else {"error": f"ended by {signal.Signals(-code).name}"}


def main() -> int:
    warnings.simplefilter("ignore")
    # Once, so that what is loaded when it is first needed does not count.
    for frame in corpus.frames().values():
        decoded(frame)
    for payload in (*corpus.payloads().values(), b""):
        read_as_any(payload)
    print(json.dumps({name: _in_a_fork(make) for name, make in bombs().items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
