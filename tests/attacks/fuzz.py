"""Mutated frames by the hundred thousand, in child processes: `python -m tests.attacks.fuzz --frames 200000`.

Every input follows from the seed and its number alone, so that a failure can be made again. A child reads its share
one after the other and looks at each: only records or a `WireError` may come of it, no memory over twice the stated
size plus 64 MiB, nothing executed, imported, spawned or written. The parent sees what a child cannot report itself: a
signal, or an input that does not come to an end. Half of the children run under `python -O`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import faulthandler
import gc
import itertools
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollbook.core import wire
from tests.attacks import corpus
from tests.attacks.outcome import ROOT, SPARE, Meter, decoded, read_as_any, stated_size, streamed

NUMBERS = [
    0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 63, 64, 65, 127, 128, 255, 256, 1023, 4096, 32767, 32768, 65535, 65536, 2**24,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**48, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1,
]  # fmt: skip
WORDS = [
    b'{"$int":"0x', b'{"$float":"nan"}', b'{"$text":"', b'{"$bytes":"', b'{"$tuple":[', b'{"$map":[[', b'{"$dict":{',
    b'{"$tensor":{"dtype":"', b'{"$array":{"dtype":"', b'{"$scalar":{"dtype":"<U1","data":"', b'"shape":[', b'"data":"',
    b"[", b"]", b"{", b"}", b",", b":", b'"', b"null", b"true", b"-0.0", b"1e999", b"18446744073709551616",
    b'"float32"', b'"bool"', b'"<M8[0s]"', b'"|O"', b'"<U4"', b"//////8=", b"AAAA", b"\\ud800", b"\\u0024", b"$",
    b"source_field", b"torch.bool", b"2305843009213693951", b"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", b'{"a":{"a":{"a":',
]  # fmt: skip
FREE_FORM = ("info", "metrics", "messages", "tools", "custom_fields", "sampling")
PICKLED = [
    b"\x8c\x02os\x8c\x06system\x93", b"cos\nsystem\n", b"cbuiltins\nexec\n", b"crollbook_attack_canary\nx\n",
    b"(", b"t", b"R", b"\x81", b"b", b"0", b"2", b"}", b"]", b")", b"e", b"u", b"s", b"a", b"N", b"\x88", b"\x8f",
    b"\x90", b"\x94", b"h\x00", b"h\x05", b"\x85", b"\x86", b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\xff",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"ctorch._utils\n_rebuild_tensor_v2\n", b"cnumpy\ndtype\n",
    b"cbuiltins\nbytearray\n", b"G\x7f\xf0\0\0\0\0\0\0",
]  # fmt: skip


SHARES = ("recomputed", "foreign", "decoded", "optimised")


# --- inputs ---------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One input, how it came to be, and how it is to be read."""

    data: bytes
    change: str
    recomputed: bool
    """Whether checksum and lengths are right, so that the bytes come to what lies behind them."""
    foreign: bool = False
    """Whether it is one of Trinity's formats."""


@dataclass
class Target:
    """A good frame, and the parts of its Arrow stream that mutations aim at."""

    name: str
    frame: bytes
    parts: corpus.Parts
    body: bytes
    schema: range
    batch: range
    spans: list[tuple[str, int, int]]
    """The buffers: what each holds, where it begins, how long it is."""
    arrays: dict[str, pa.Array]


class Inputs:
    """All that inputs are made from."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        frames = corpus.frames()
        self.targets = [_target(name, frames[name]) for name in frames if name not in ("two", "three")]
        self.frames = list(frames.values())
        self.foreign = [*corpus.payloads().values(), *_hostile()]
        self.values = list(corpus.odd_values().values())
        self.states, self.keys = corpus.legacy_states(), corpus.legacy_keys()
        self.item, self.tensors = corpus.trxp_item()

    def make(self, number: int) -> Case:
        """Input `number`: the same in every process with this seed."""
        rng = random.Random(f"{self.seed}/{number}")
        choice = rng.random()
        for share, maker in _MAKERS:
            if choice < share:
                return maker(self, rng)
            choice -= share
        raise ValueError("the shares do not add up to 1")


def _target(name: str, frame: bytes) -> Target:
    parts = corpus.take_apart(frame)
    body = parts.body
    schema, batch = corpus.messages(body)
    spans = [(role, start, size) for (_, role), (start, size) in corpus.buffer_spans(body).items() if size]
    table = pa.ipc.open_stream(body).read_all()
    arrays = {column: table.column(column).combine_chunks() for column in table.schema.names}
    return Target(
        name, frame, parts, body, range(schema.start, schema.data), range(batch.start, batch.data), spans, arrays
    )


def _hostile() -> list[bytes]:
    call = b"\x80\x04cos\nsystem\n(X\x1a\x00\x00\x00touch rollbook_fuzz_canarytR."
    return [call, corpus.trxp_of(call), b"\x80\x02cbuiltins\nexec\n(X\x01\x00\x00\x001tR."]


# --- mutations ------------------------------------------------------------------------------------------------------

Mutation = Callable[[random.Random, bytearray, range], None]


def _flip(rng: random.Random, data: bytearray, region: range) -> None:
    data[rng.choice(region)] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray, region: range) -> None:
    data[rng.choice(region)] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xC0, 0xFE, 0xFF, rng.randrange(256)))


def _number(rng: random.Random, data: bytearray, region: range) -> None:
    """An aligned number, set to one that lies on an edge or moved a little."""
    form, size = rng.choice((("<H", 2), ("<I", 4), ("<I", 4), ("<Q", 8), ("<Q", 8), ("<Q", 8)))
    first = region.start + -region.start % size
    places = range(first, region.stop - size + 1, size)
    if not places:
        return
    at = rng.choice(places)
    if rng.random() < 0.5:
        value = rng.choice(NUMBERS)
    else:
        value = struct.unpack_from(form, data, at)[0] + rng.choice((-64, -8, -4, -2, -1, 1, 2, 4, 8, 64))
    struct.pack_into(form, data, at, value % (1 << 8 * size))


def _swap(rng: random.Random, data: bytearray, region: range) -> None:
    words = range(region.start + -region.start % 8, region.stop - 7, 8)
    if len(words) > 1:
        a, b = rng.choice(words), rng.choice(words)
        data[a : a + 8], data[b : b + 8] = data[b : b + 8], data[a : a + 8]


def _copy(rng: random.Random, data: bytearray, region: range) -> None:
    size = min(rng.choice((4, 8, 16, 32, 64)), len(region))
    a, b = (rng.randrange(region.start, region.stop - size + 1) // 4 * 4 for _ in range(2))
    part = data[a : a + size]
    data[b : b + len(part)] = part


def _blank(rng: random.Random, data: bytearray, region: range) -> None:
    size = min(rng.choice((4, 8, 16, 100)), len(region))
    at = rng.randrange(region.start, region.stop - size + 1)
    data[at : at + size] = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))


IN_PLACE: list[Mutation] = [_flip, _set, _number, _number, _number, _swap, _copy, _blank]


def _resize(rng: random.Random, data: bytearray, others: list[bytes], words: list[bytes]) -> None:
    """A mutation that moves what follows: cut, insert, repeat, splice."""
    at, size = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, 16, 64, 256))
    kind = rng.randrange(6)
    if kind == 0:
        del data[at:]
    elif kind == 1:
        del data[at : at + size]
    elif kind == 2:
        data[at:at] = rng.choice((bytes(size), rng.randbytes(size), rng.choice(words)))
    elif kind == 3:
        data[at:at] = data[at : at + size]
    elif kind == 4:
        other = rng.choice(others)
        start = rng.randrange(len(other))
        data[at : at + size] = other[start : start + size]
    else:
        other = rng.choice(others)
        data[at:] = other[rng.randrange(len(other)) :]


def _mutate(rng: random.Random, data: bytearray, regions: list[range]) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5, 9))):
        region = rng.choice(regions)
        if len(region) >= 8:
            rng.choice(IN_PLACE)(rng, data, region)


# --- makers ---------------------------------------------------------------------------------------------------------


def _raw(inputs: Inputs, rng: random.Random) -> Case:
    """A frame as damaged storage or a broken connection gives it: nothing is made to fit."""
    data = bytearray(rng.choice(inputs.frames))
    if rng.random() < 0.5:
        _mutate(rng, data, [range(len(data)), range(64)])
    if rng.random() < 0.5:
        _resize(rng, data, inputs.frames, WORDS)
    return Case(bytes(data), "raw", recomputed=False)


def _header(inputs: Inputs, rng: random.Random) -> Case:
    """One or two lies in the header, over the right header checksum."""
    target = rng.choice(inputs.targets)
    lies: dict[str, int] = {}
    for _ in range(rng.choice((1, 1, 2))):
        name, bits = rng.choice(
            [("length", 64), ("decoded", 64), ("count", 64), ("flags", 16), ("version", 16), ("reserved", 64)]
        )
        lies[name] = rng.choice((rng.choice(NUMBERS), getattr(target.parts, name) + rng.choice((-1, 1, 64, -64))))
        lies[name] %= 1 << bits
    return Case(target.parts.join(**lies), f"header of {target.name}: {lies}", recomputed=False)


def _stored(inputs: Inputs, rng: random.Random) -> Case:
    """A compressed body that is damaged as stored, under the right checksum of what is stored."""
    target = rng.choice([target for target in inputs.targets if target.parts.flags])
    stored = bytearray(target.parts.stored)
    _mutate(rng, stored, [range(len(stored)), range(min(32, len(stored)))])
    if rng.random() < 0.2:
        _resize(rng, stored, [other.parts.stored for other in inputs.targets], WORDS)
    lies = {"decoded": target.parts.decoded + rng.choice((-8, 8, 1 << 20))} if rng.random() < 0.1 else {}
    frame = corpus.seal(target.body, target.parts.count, target.parts.compression, stored=bytes(stored), **lies)
    return Case(frame, f"stored {target.name}", recomputed=True)


def _seal(rng: random.Random, body: bytes, target: Target) -> bytes:
    compression = target.parts.compression if rng.random() < 0.8 else rng.choice((None, "zstd", "lz4"))
    return corpus.seal(body, target.parts.count, compression)


def _metadata(inputs: Inputs, rng: random.Random) -> Case:
    """Damage in the two messages' flatbuffers."""
    target = rng.choice(inputs.targets)
    body = bytearray(target.body)
    _mutate(rng, body, rng.choice(([target.schema], [target.batch], [target.batch], [target.schema, target.batch])))
    return Case(_seal(rng, bytes(body), target), f"metadata of {target.name}", recomputed=True)


def _offsets(inputs: Inputs, rng: random.Random) -> Case:
    """Damage in the buffers, in offsets and validity above all."""
    target = rng.choice([target for target in inputs.targets if target.spans])
    body = bytearray(target.body)
    kinds = rng.choice((("offsets",), ("offsets", "validity"), ("data",), ("offsets", "data", "validity")))
    spans = [span for span in target.spans if span[0] in kinds] or target.spans
    regions = [range(start, start + size + -size % 8) for _, start, size in spans]
    _mutate(rng, body, regions)
    if rng.random() < 0.15:
        _mutate(rng, body, [target.batch])
    return Case(_seal(rng, bytes(body), target), f"buffers of {target.name}", recomputed=True)


def _anywhere(inputs: Inputs, rng: random.Random) -> Case:
    """Damage anywhere in the stream, and streams cut and grown."""
    target = rng.choice(inputs.targets)
    body = bytearray(target.body)
    _mutate(rng, body, [range(len(body))])
    if rng.random() < 0.5:
        _resize(rng, body, [other.body for other in inputs.targets], WORDS)
    return Case(_seal(rng, bytes(body), target), f"stream of {target.name}", recomputed=True)


def _crossed(inputs: Inputs, rng: random.Random) -> Case:
    """The schema of one frame over the batch of another, and frames behind frames."""
    schema_target, batch_target = rng.choice(inputs.targets), rng.choice(inputs.targets)
    kind = rng.randrange(3)
    if kind == 0:
        body = schema_target.body[: schema_target.batch.start] + batch_target.body[batch_target.batch.start :]
        return Case(
            _seal(rng, body, batch_target),
            f"schema of {schema_target.name}, batch of {batch_target.name}",
            recomputed=True,
        )
    if kind == 1:
        body = bytearray(schema_target.body)
        start, stop = (
            schema_target.batch.start,
            min(schema_target.batch.stop, schema_target.batch.start + len(batch_target.batch)),
        )
        body[start:stop] = batch_target.body[batch_target.batch.start : batch_target.batch.start + stop - start]
        return Case(
            _seal(rng, bytes(body), schema_target),
            f"metadata of {batch_target.name} in {schema_target.name}",
            recomputed=True,
        )
    body = bytearray(batch_target.body)
    _mutate(rng, body, [batch_target.schema, batch_target.batch, range(batch_target.batch.stop, len(body))])
    return Case(
        schema_target.frame + _seal(rng, bytes(body), batch_target),
        f"{schema_target.name}, then {batch_target.name}",
        recomputed=True,
    )


def _rebuilt(inputs: Inputs, rng: random.Random) -> Case:
    """Good Arrow of bad records: columns swapped, renamed, dropped and borrowed, nulls, free-form text that lies."""
    target = rng.choice([target for target in inputs.targets if target.arrays])
    arrays = dict(target.arrays)
    count = target.parts.count
    for _ in range(rng.choice((1, 1, 2, 3))):
        names = list(arrays)
        name = rng.choice(names)
        kind = rng.randrange(7)
        if kind <= 1:
            texts = [n for n in names if n in FREE_FORM and arrays[n].type == pa.large_string()]
            if texts:
                name = rng.choice(texts)
                arrays[name] = _bad_text(rng, arrays[name], WORDS)
        elif kind == 2:
            other = rng.choice(names)
            arrays[name], arrays[other] = arrays[other], arrays[name]
        elif kind == 3:
            del arrays[name]
            if not arrays:
                return Case(target.frame, target.name, recomputed=True)
        elif kind == 4:
            order = [rng.choice((None, *range(count))) for _ in range(count)]
            arrays[name] = arrays[name].take(pa.array(order, pa.int64()))
        elif kind == 5:
            lender = rng.choice([other for other in inputs.targets if other.arrays])
            name = rng.choice(list(lender.arrays))
            rows = [rng.randrange(lender.parts.count) for _ in range(count)]
            arrays[name] = lender.arrays[name].take(pa.array(rows, pa.int64()))
        else:
            arrays[f"{name}__{rng.choice(('dtype', 'other', 'one', 'raw', 'x'))}"] = arrays[rng.choice(names)]
    body = corpus.stream_of(corpus.batch_of(arrays))
    if rng.random() < 0.2:
        memory = bytearray(body)
        _mutate(rng, memory, [range(len(memory))])
        body = bytes(memory)
    return Case(_seal(rng, body, target), f"rebuilt {target.name}", recomputed=True)


def _bad_text(rng: random.Random, array: pa.Array, words: list[bytes]) -> pa.Array:
    values = array.to_pylist()
    row = rng.randrange(len(values))
    text = bytearray((values[row] or "{}").encode())
    for _ in range(rng.choice((1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        text[at : at + rng.choice((0, 0, 1, 4))] = rng.choice(words)
    values[row] = text.decode(errors="replace")
    return pa.array(values, array.type)


def _foreign(inputs: Inputs, rng: random.Random) -> Case:
    """Trinity's formats; where it is TRXP, the lengths of both parts are made right again."""
    data = bytearray(rng.choice(inputs.foreign))
    if data[:4] != b"TRXP":
        _damage(inputs, rng, data)
        return Case(bytes(data), "pickle", recomputed=False, foreign=True)
    size = struct.unpack_from("<Q", data, 5)[0]
    meta, tensors = data[21 : 21 + size], data[21 + size :]
    if len(tensors) < 8:
        tensors = bytearray(struct.pack("<Q", 2) + b"{}")
    kind = rng.random()
    if kind < 0.4:
        _damage(inputs, rng, meta)
    elif kind < 0.9:
        length = min(struct.unpack_from("<Q", tensors)[0], len(tensors) - 8)
        header = bytearray(tensors[8 : 8 + length])
        for _ in range(rng.choice((1, 2, 3))):
            at = rng.randrange(len(header) + 1)
            new = rng.choice((rng.choice(WORDS), str(rng.choice(NUMBERS)).encode(), rng.randbytes(1)))
            header[at : at + rng.choice((0, 1, len(new)))] = new
        tensors = bytearray(struct.pack("<Q", len(header))) + header + tensors[8 + length :]
    else:
        _mutate(rng, tensors, [range(len(tensors))])
    lies = {rng.choice(("version", "meta", "tensors")): rng.choice(NUMBERS) % 256} if rng.random() < 0.05 else None
    return Case(corpus.trxp_of(bytes(meta), bytes(tensors), lies), "TRXP", recomputed=lies is None, foreign=True)


def _odd_values(inputs: Inputs, rng: random.Random) -> Case:
    """Whole pickles of records in which one to three values are of any type at all."""
    oddities = {rng.choice(inputs.keys): _value(inputs, rng) for _ in range(rng.choice((1, 1, 2, 3)))}
    kind = rng.randrange(4)
    if kind == 0:
        data = corpus.legacy_pickle([{**rng.choice(inputs.states), **oddities}], protocol=rng.randrange(2, 6))
    else:
        item = {**inputs.item, **({"rollbook": {**inputs.item["rollbook"], **oddities}} if kind == 1 else oddities)}
        if kind == 3:
            item[rng.choice(list(item))] = _value(inputs, rng)
        data = corpus.trxp_of({"version": 1, "num_items": 1, "items": [item]}, inputs.tensors)
    return Case(data, f"odd values under {list(oddities)}", recomputed=True, foreign=True)


def _value(inputs: Inputs, rng: random.Random) -> Any:
    value = rng.choice(inputs.values)
    kind = rng.randrange(8)
    if kind == 0:
        return [value, rng.choice(inputs.values)]
    if kind == 1:
        return {rng.choice(("a", "batch", "source_field", "$int")): value}
    return value


def _damage(inputs: Inputs, rng: random.Random, data: bytearray) -> None:
    """A pickle: opcodes put in, taken out and changed."""
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[at:at] = rng.choice(PICKLED)
        elif kind == 1:
            new = rng.choice(PICKLED)
            data[at : at + len(new)] = new
        elif kind == 2 and len(data) >= 8:
            _mutate(rng, data, [range(len(data))])
        else:
            _resize(rng, data, inputs.foreign, PICKLED)
        if not data:
            data += b"\x80"


_MAKERS: list[tuple[float, Callable[[Inputs, random.Random], Case]]] = [
    (0.17, _metadata),
    (0.18, _offsets),
    (0.10, _anywhere),
    (0.07, _crossed),
    (0.13, _rebuilt),
    (0.06, _stored),
    (0.05, _header),
    (0.08, _raw),
    (0.11, _foreign),
    (0.05, _odd_values),
]


# --- looking at one input -------------------------------------------------------------------------------------------


class Tripped(BaseException):
    """Reading did what no data may make it do. Not an `Exception`, so that nobody catches it on the way."""


class Watch:
    """While it is armed: nothing is executed, imported, spawned, connected to or opened for writing."""

    EVENTS = (
        "compile", "exec", "import", "os.", "subprocess.", "socket.", "shutil.", "pickle.find_class", "marshal.",
        "code.__new__", "function.__new__", "ctypes.dlopen", "ctypes.dlsym", "urllib.", "webbrowser.", "tempfile.",
        "builtins.input", "builtins.breakpoint", "cpython.", "sys.settrace", "sys.setprofile", "signal.", "syslog.",
    )  # fmt: skip

    def __init__(self) -> None:
        self.armed = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event == "open":
            if not self._writes(arguments):
                return
        elif not event.startswith(self.EVENTS) or event in ("os.listdir", "os.scandir"):
            return
        if event == "ctypes.dlopen" and arguments == (None,):
            # The process itself, which the writer asks for to have large frames' pages at once.
            return
        if event == "ctypes.dlsym" and arguments[1] == "madvise":
            return
        self.armed = False
        self.seen.append(f"{event} {str(arguments)[:200]}")
        raise Tripped(self.seen[-1])

    @staticmethod
    def _writes(arguments: tuple[Any, ...]) -> bool:
        _, mode, flags = (*arguments, None, None)[:3]
        return (
            bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))
        )


def read(case: Case, number: int) -> bool:
    """Read the input; which of the ways besides the main one follows from its number. Whether it was taken."""
    if case.foreign:
        return read_as_any(case.data)
    taken = decoded(case.data)
    if number % 4 == 0:
        decoded(case.data, verify=False)
    elif number % 4 == 1:
        streamed(case.data)
    elif number % 8 == 2:
        read_as_any(memoryview(b"\0" + case.data)[1:])
    return taken


class Examiner:
    """Reads inputs under watch, in this process."""

    SLOW = 5.0

    def __init__(self, inputs: Inputs) -> None:
        warnings.simplefilter("ignore")
        # What is loaded when it is first needed is needed once before the watch begins.
        for frame in [*inputs.frames, b"", b"TRXP", inputs.frames[0][:100]]:
            read(Case(frame, "warm-up", True), 0)
            read(Case(frame, "warm-up", True), 1)
        for payload in inputs.foreign:
            read(Case(payload, "warm-up", True, foreign=True), 0)
        for value in inputs.values:
            if type(value) is not int:  # one of them is too long to be printed
                repr(value)
        gc.collect()
        self.watch = Watch()
        self.meter = Meter()

    def examine(self, case: Case, number: int) -> tuple[bool, str]:
        """Whether the input was taken, and what is wrong with how it was read (nothing: empty)."""
        self.watch.seen.clear()
        self.meter.start()
        begin = time.monotonic()
        taken, wrong = False, ""
        self.watch.armed = True
        try:
            taken = read(case, number)
        except BaseException as error:
            self.watch.armed = False
            wrong = "".join(traceback.format_exception(error, limit=-8))
        finally:
            self.watch.armed = False
        took, peak = time.monotonic() - begin, self.meter.peak()
        if self.watch.seen:
            wrong = wrong or f"tripped: {self.watch.seen}"
        if not wrong and took > self.SLOW:
            wrong = f"took {took:.1f} s"
        if not wrong and peak > 2 * stated_size(case.data) + SPARE:
            wrong = f"took {peak >> 20} MiB, stated are {stated_size(case.data)} bytes"
        return taken, wrong


# --- a child --------------------------------------------------------------------------------------------------------


def child(seed: int, first: int, count: int, state: Path) -> int:
    """Read inputs `first` and on. Says on stdout, a JSON object a line, what failed, and at the end what was seen."""
    faulthandler.enable()
    with state.open("r+b") as file:
        place = mmap.mmap(file.fileno(), 8)
    inputs = Inputs(seed)
    examiner = Examiner(inputs)
    resident = _resident()
    totals: collections.Counter[str] = collections.Counter()
    for number in range(first, first + count):
        struct.pack_into("<q", place, 0, number)
        case = inputs.make(number)
        taken, wrong = examiner.examine(case, number)
        totals["frames"] += 1
        totals["recomputed"] += case.recomputed and not case.foreign
        totals["foreign"] += case.foreign
        totals["decoded" if taken else "refused"] += not wrong
        if wrong:
            print(json.dumps({"number": number, "how": case.change, "wrong": wrong}), flush=True)
    gc.collect()
    grown = _resident() - resident
    if grown > SPARE:
        wrong = f"the process kept {grown >> 20} MiB over {count} inputs"
        print(json.dumps({"number": first, "how": "all", "wrong": wrong}), flush=True)
    if Path("rollbook_fuzz_canary").exists():
        print(json.dumps({"number": first, "how": "all", "wrong": "a payload ran a command"}), flush=True)
    print(json.dumps({"totals": totals}), flush=True)
    return 0


def _resident() -> int:
    """Bytes that are resident now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


# --- the parent -----------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    first: int
    count: int
    optimised: bool


@dataclass
class Running:
    """A child, its share, and where its state and words go."""

    batch: Batch
    process: subprocess.Popen[str]
    state: Path
    output: Path
    last: int = -1
    since: float = dataclasses.field(default_factory=time.monotonic)


class Campaign:
    """A whole run: shares out the inputs, watches the children, keeps what failed."""

    PATIENCE = 60.0
    """Seconds for one input, on a machine that may be busy."""
    PATIENCE_AT_FIRST = 180.0
    """Seconds to import torch and to build the corpus."""

    def __init__(self, frames: int, seed: int, jobs: int, save: Path, batch: int) -> None:
        self.frames, self.seed, self.jobs, self.save = frames, seed, jobs, save
        # An even number of shares, every second of them under -O: both get the same.
        pairs = max(1, -(-frames // (2 * batch)), -(-jobs // 2))
        edges = [frames * i // (2 * pairs) for i in range(2 * pairs + 1)]
        self.todo = [Batch(a, b - a, i % 2 == 1) for i, (a, b) in enumerate(itertools.pairwise(edges)) if b > a]
        self.todo.reverse()
        self.totals: collections.Counter[str] = collections.Counter()
        self.failures: list[tuple[int, bool, str]] = []
        self.inputs: Inputs | None = None

    def run(self) -> int:
        begin = time.monotonic()
        running: list[Running] = []
        with tempfile.TemporaryDirectory() as folder:
            try:
                while self.todo or running:
                    while self.todo and len(running) < self.jobs:
                        running.append(self._start(self.todo.pop(), Path(folder)))
                    time.sleep(0.1)
                    running = [child for child in running if not self._finished(child)]
            finally:
                for child in running:
                    child.process.kill()
                    child.process.wait()
        self._summary(time.monotonic() - begin)
        return 1 if self.failures or self.totals["frames"] < self.frames else 0

    def _start(self, batch: Batch, folder: Path) -> Running:
        name = f"{batch.first}-{batch.count}-{time.monotonic_ns()}"
        state, output = folder / f"{name}.state", folder / f"{name}.out"
        state.write_bytes(struct.pack("<q", -1))
        switches = ["-O"] if batch.optimised else []
        child_arguments = [str(self.seed), str(batch.first), str(batch.count), str(state)]
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *switches, "-W", "ignore", "-m", "tests.attacks.fuzz", "--child", *child_arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return Running(batch, process, state, output)

    def _finished(self, child: Running) -> bool:
        """Whether a child is done, or had to be ended because its input does not come to an end."""
        code = child.process.poll()
        number = struct.unpack("<q", child.state.read_bytes())[0]
        if code is None:
            if number != child.last:
                child.last, child.since = number, time.monotonic()
                return False
            if time.monotonic() - child.since < (self.PATIENCE if number >= 0 else self.PATIENCE_AT_FIRST):
                return False
            child.process.kill()
            child.process.wait()
        lines, words = self._lines(child.output)
        for line in lines:
            if "totals" in line:
                self.totals.update(line["totals"])
                self.totals["optimised"] += line["totals"]["frames"] * child.batch.optimised
            else:
                self._failed(line["number"], child.batch.optimised, f"{line['how']}\n{line['wrong']}")
        if not any("totals" in line for line in lines):
            self._died(child, code, number, words)
        else:
            print(f"{self.totals['frames']:>8} of {self.frames} inputs, {len(self.failures)} failures", flush=True)
        return True

    @staticmethod
    def _lines(output: Path) -> tuple[list[dict[str, Any]], str]:
        lines, words = [], []
        for line in output.read_text(errors="replace").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                words.append(line)
        return lines, "\n".join(words[-40:])

    def _died(self, child: Running, code: int | None, number: int, words: str) -> None:
        """A child that did not come to its end: keep the input it was at, and have the rest read by another."""
        if code is None:
            reason = f"did not come to an end within {self.PATIENCE:.0f} s"
        elif code < 0:
            reason = f"ended by {signal.Signals(-code).name}"
        else:
            reason = f"exited with {code}"
        self._failed(max(number, child.batch.first), child.batch.optimised, f"{reason}\n{words}")
        if number < child.batch.first:
            # It fell before its first input: another would fall too.
            return
        self.totals["frames"] += number + 1 - child.batch.first
        rest = child.batch.first + child.batch.count - number - 1
        if rest > 0 and len(self.failures) < 1000:
            self.todo.append(Batch(number + 1, rest, child.batch.optimised))

    def _failed(self, number: int, optimised: bool, wrong: str) -> None:
        self.failures.append((number, optimised, wrong))
        if len(self.failures) > 200:
            return
        self.inputs = self.inputs or Inputs(self.seed)
        self.save.mkdir(parents=True, exist_ok=True)
        case = self.inputs.make(number)
        path = self.save / f"{self.seed}-{number}.bin"
        path.write_bytes(case.data)
        path.with_suffix(".txt").write_text(f"seed {self.seed}, input {number}: {case.change}\n{wrong}\n")

    def _summary(self, took: float) -> None:
        kinds: dict[str, list[tuple[int, bool]]] = collections.defaultdict(list)
        for number, optimised, wrong in self.failures:
            kinds[wrong.strip().splitlines()[-1][:160]].append((number, optimised))
        for kind, numbers in sorted(kinds.items(), key=lambda item: -len(item[1])):
            number, optimised = numbers[0]
            python = f"{Path(sys.executable).name}{' -O' if optimised else ''}"
            path = self.save / f"{self.seed}-{number}.bin"
            print(f"\n{len(numbers)} x {kind}\n    {python} -m tests.attacks.fuzz --replay {path}")
        frames = max(self.totals["frames"], 1)
        share = {name: f"{100 * self.totals[name] / frames:.1f} %" for name in SHARES}
        print(
            f"\nseed {self.seed}: {self.totals['frames']} inputs in {took:.0f} s with {self.jobs} jobs, "
            f"{share['optimised']} of them under python -O\n"
            f"    {share['recomputed']} frames with checksum and lengths recomputed, "
            f"{share['foreign']} in Trinity's formats\n"
            f"    {share['decoded']} decoded, {self.totals['refused']} refused with WireError\n"
            f"    {len(self.failures)} failures{f', kept in {self.save}' if self.failures else ''}"
        )


def replay(path: Path) -> int:
    """Read one saved input in every way; prints what is wrong."""
    inputs = Inputs(0)
    examiner = Examiner(inputs)
    data = path.read_bytes()
    foreign = data[:4] != wire.MAGIC[:4]
    results = [examiner.examine(Case(data, "replay", False, foreign), number) for number in range(4)]
    wrong = [text for _, text in results if text]
    print(wrong[0] if wrong else "decoded" if results[0][0] else "refused with WireError")
    return 1 if wrong else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--frames", type=int, default=200_000, help="how many inputs")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time, printed at the end")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="processes at a time")
    parser.add_argument("--batch", type=int, default=10_000, help="inputs per process")
    parser.add_argument(
        "--save", type=Path, default=None, help="folder for inputs that fail (default: a temporary one)"
    )
    parser.add_argument("--replay", type=Path, default=None, help="read one saved input and say what comes of it")
    parser.add_argument("--child", nargs=4, metavar=("SEED", "FIRST", "COUNT", "STATE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        seed, first, count = map(int, options.child[:3])
        return child(seed, first, count, Path(options.child[3]))
    if options.replay:
        return replay(options.replay)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    save = options.save or Path(tempfile.gettempdir()) / f"rollbook-fuzz-{seed}"
    return Campaign(options.frames, seed, options.jobs, save, options.batch).run()


if __name__ == "__main__":
    sys.exit(main())
