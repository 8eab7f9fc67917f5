"""In-place operations on every tensor of a row, from every source: none ends the process, none changes the source.

torch does not know read-only memory: writing to a tensor on a read-only map is a signal, not an exception. So all of
it runs in a process of its own.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook import Experience, Experiences
from rollbook.core import fields, wire
from rollbook.core.wire import encode
from rollbook.io.arrow import from_table, to_table
from rollbook.io.hf import from_hf, to_hf
from rollbook.io.parquet import read_parquet, write_parquet
from tests.attacks import corpus
from tests.attacks.outcome import ROOT

Source = tuple[Callable[[], Any], Callable[[], bytes]]
"""A way to read the records anew, and a digest of what they are read from."""


def records() -> list[Experience]:
    return [row for rows in corpus.declared_records().values() for row in rows]


def writable_records() -> list[Experience]:
    """Those that Trinity's format can keep: it has no 128-bit and no 32-bit complex numbers."""
    rows = records()
    for row in rows:
        for name in ("complex32", "complex128"):
            (row.multi_modal_inputs or {}).pop(name, None)
    return rows


def sources(folder: Path) -> dict[str, Callable[[], Source]]:
    """Every way in. Each is made when it is asked for, since some keep files open."""
    frame = Experience.serialize_many(records())
    path = folder / "frames"

    def of(data: Any, **options: Any) -> Source:
        return lambda: wire.decode(data, **options), lambda: hashlib.sha256(data).digest()

    def of_file(path: Path, read: Callable[[], Any]) -> Source:
        return read, lambda: digest_of(path)

    def mapped(access: int, **options: Any) -> Source:
        with path.open("r+b") as file:
            data = mmap.mmap(file.fileno(), 0, access=access)
        return of_file(path, lambda: wire.decode(data, **options))

    def protected() -> Source:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        array = np.frombuffer(data, dtype=np.uint8)
        return of(array)

    def read_only() -> Source:
        array = np.frombuffer(frame, dtype=np.uint8).copy()
        array.flags.writeable = False
        return of(array)

    def odd_offset() -> Source:
        return of(memoryview(b"123" + frame + b"45678")[3 : 3 + len(frame)])

    def parquet() -> Source:
        file = folder / "records.parquet"
        write_parquet(Experiences(records()), file)
        return of_file(file, lambda: read_parquet(file))

    def dataset() -> Source:
        hf_dataset = to_hf(Experiences(records()))
        return lambda: from_hf(hf_dataset), lambda: encode(from_hf(hf_dataset))

    def dataset_on_disk() -> Source:
        import datasets

        place = folder / "dataset"
        to_hf(Experiences(records())).save_to_disk(str(place))
        loaded = datasets.load_from_disk(str(place))
        return of_file(place, lambda: from_hf(loaded))

    def streamed() -> Source:
        def read() -> list[Experience]:
            with path.open("rb") as file:
                return [row for part in wire.iter_frames(file) for row in part.rows()]

        return of_file(path, read)

    def arrow() -> Source:
        table = to_table(Experiences(records()))
        return lambda: from_table(table), lambda: encode(from_table(table))

    def foreign(data: bytes) -> Source:
        return lambda: Experience.deserialize_many(data), lambda: hashlib.sha256(data).digest()

    def compressed(compression: str) -> Source:
        return of(bytes(wire.encode(records(), compression=compression)))

    return {
        "bytes": lambda: of(frame),
        "bytes, unverified": lambda: of(frame, verify=False),
        "bytes, as rows": lambda: foreign(frame),
        "bytearray": lambda: of(bytearray(frame)),
        "memoryview": lambda: of(memoryview(frame)),
        "memoryview at an odd offset": odd_offset,
        "two frames": lambda: of(frame + frame),
        "zstd": lambda: compressed("zstd"),
        "lz4": lambda: compressed("lz4"),
        "map to read": lambda: mapped(mmap.ACCESS_READ),
        "map to copy": lambda: mapped(mmap.ACCESS_COPY),
        "private map": lambda: mapped(mmap.ACCESS_COPY, private=True),
        "protected map": protected,
        "read-only array": read_only,
        "iter_frames": streamed,
        "arrow": arrow,
        "parquet": parquet,
        "dataset": dataset,
        "dataset on disk": dataset_on_disk,
        "TRXP": lambda: foreign(wire.to_trxp(writable_records())),
        "pickle": lambda: foreign(corpus.legacy_pickle(corpus.legacy_states())),
    }


def digest_of(path: Path) -> bytes:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


def tensors_of(row: Experience) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that can be reached from a row, by a name to show."""
    for field in fields.FIELDS.values():
        value = getattr(row, field.name)
        if isinstance(value, torch.Tensor):
            yield field.name, value
        elif field.kind == "media" and value:
            yield from ((f"{field.name}[{key}]", item) for key, item in value.items())
        elif field.kind == "json":
            yield from within(field.name, value)


def within(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, np.ndarray) and value.dtype.isnative and value.dtype.kind in "biuf":
        yield name, torch.from_numpy(value)
    elif isinstance(value, (dict, list, tuple)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in parts:
            yield from within(f"{name}.{key}", item)


def write_on(rows: list[Experience]) -> int:
    """Fill every tensor with its row's number, by every kind of in-place operation its type has; gives their count."""
    count = 0
    for i, row in enumerate(rows):
        for name, tensor in tensors_of(row):
            tensor.fill_(7)
            tensor.zero_()
            if tensor.dtype in (torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16):
                tensor.add_(1).mul_(2)
                tensor[...] = 3
            tensor.fill_(i % 2 + 1)
            count += 1
            assert name
    for i, row in enumerate(rows):
        for name, tensor in tensors_of(row):
            expected = torch.full(tensor.shape, i % 2 + 1, dtype=torch.float32).to(tensor.dtype)
            assert bool((tensor == expected).all()), f"row {i}: {name} is not what was written: {tensor}"
    return count


WAYS: dict[str, Callable[[Any], list[Experience]]] = {
    "rows": lambda experiences: experiences.rows() if isinstance(experiences, Experiences) else experiences,
    "one by one": lambda experiences: [experiences[i] for i in range(len(experiences))],
    "in order": list,
    "a slice": lambda experiences: list(experiences[1:]),
}


def attack(folder: Path) -> None:
    """Run in the child: say before each source that it begins and behind it how many tensors were written on."""
    (folder / "frames").write_bytes(Experience.serialize_many(records()))
    for name, make in sources(folder).items():
        print(f"begin {name}", flush=True)
        for way, rows_of in WAYS.items():
            read, digest = make()
            before = digest()
            count = write_on(rows_of(read()))
            if digest() != before:
                print(f"changed {name} ({way})", flush=True)
        print(f"written {name}: {count}", flush=True)


@pytest.fixture(scope="module")
def report() -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        source = (
            "import sys, pathlib; from tests.attacks.test_in_place import attack; attack(pathlib.Path(sys.argv[1]))"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", source, folder],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "HF_DATASETS_OFFLINE": "1"},
        )
    lines = done.stdout.splitlines()
    assert done.returncode >= 0, f"ended by {signal.Signals(-done.returncode).name} after {lines[-1:]}\n{done.stderr}"
    assert done.returncode == 0, f"failed after {lines[-1:]}\n{done.stderr}"
    assert not [line for line in lines if line.startswith("changed")], lines
    return {name: int(count) for name, count in (line[8:].split(": ") for line in lines if line.startswith("written "))}


@pytest.mark.parametrize("name", sources(Path()))
def test_every_tensor_from_every_source_can_be_written_on(name: str, report: dict[str, int]) -> None:
    rows = corpus.legacy_states() if name == "pickle" else records()
    # The last way of reading leaves the first row out; two frames have every row twice.
    assert report[name] >= len(rows)


def test_every_tensor_field_is_among_the_records() -> None:
    names = {name.partition("[")[0].partition(".")[0] for row in records() for name, _ in tensors_of(row)}
    assert {field.name for field in fields.tensor_fields()} | {"multi_modal_inputs", "info"} <= names
    kinds = {tensor.dtype for row in records() for _, tensor in tensors_of(row)}
    assert kinds >= {getattr(torch, name) for name in fields.DTYPES if hasattr(torch, name)}


def test_writing_on_a_protected_map_would_end_the_process() -> None:
    """What the tests above are about: were a tensor handed out on such memory, this is what an operation would do."""
    source = """
import mmap, tempfile
import numpy as np, torch
with tempfile.TemporaryFile() as file:
    file.write(bytes(4096)); file.flush()
    array = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=np.uint8)
    torch.from_numpy(array).fill_(1)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", source], capture_output=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGSEGV, done.stderr
