"""`ExperienceDataset`: records as a torch `IterableDataset`, one by one or in batches, that can stop and go on.

Invariant: the units of an epoch (rows or batches) and their order follow from the source, the settings, the seed and
the epoch alone. Every unit goes to exactly one rank and one worker, and a rank's units arrive in the same order with
any number of workers, so that a place in the epoch is one number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.files import check_regular
from rollbook.core.wire import HEADER_BYTES, WireError, decode, read_header

Rows: TypeAlias = NDArray[np.int64]
_GATHER = 1024
"""Rows that are made at once where rows are given out one by one."""


class ExperienceDataset(IterableDataset[Any]):
    """Records for a torch `DataLoader` with `batch_size=None`: this class makes the batches.

    `source`: `Experiences`, a list of records, the path of a file of frames (or several), or anything that can be
    iterated again and again and gives `Experiences` or `Experience`. Files are read a few frames at a time.

    Without `batch_size` and `max_tokens` the units are single `Experience`s. With `batch_size` they are `Experiences`
    of that many records (the last may have fewer), with `max_tokens` of as many records, in order, as have that many
    tokens together. `collate` makes something else of a batch, in the worker:
    `functools.partial(rollbook.compat.lightrft.batch.from_experiences, pad_token_id=0)` an `ExperienceBatch`.

    `shuffle` orders anew in each epoch, from `seed`: all records where they lie in memory, else files' frames among
    each other and then `shuffle_rows` records at a time. Units are dealt to the ranks in turn, and to a rank's workers
    in turn; `rank` and `world_size` are torch.distributed's unless given. Ranks may have one unit more or less; with
    `drop_last` they have equally many, and the rest, like a short last batch, is left out.

    The epoch rises by itself when it has been iterated to its end in this process; `set_epoch` says which it is (with
    workers, and without `tracked`, call it before each). `state_dict` and `load_state_dict` keep the place: exactly,
    if this process iterates the dataset, or a loader through `tracked`, or if the loader asks its workers, as
    torchdata's `StatefulDataLoader` does. Iterating again without loading begins where the last loaded state was.

    >>> rows = [Experience(tokens=[1, 2, 3 + i]) for i in range(5)]
    >>> data = ExperienceDataset(rows, batch_size=2)
    >>> [[int(row.tokens[-1]) for row in batch] for batch in data]
    [[3, 4], [5, 6], [7]]
    >>> halves = [ExperienceDataset(rows, shuffle=True, seed=7, rank=r, world_size=2) for r in range(2)]
    >>> sorted(int(row.tokens[-1]) for half in halves for row in half)
    [3, 4, 5, 6, 7]
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        collate: Callable[[Experiences], Any] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_rows: int = 16384,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        for name, given in (("batch_size", batch_size), ("max_tokens", max_tokens), ("shuffle_rows", shuffle_rows)):
            if given is not None and (type(given) is not int or given < 1):
                raise ValueError(f"{name}: got {given!r}, expected a whole number from 1 on")
        if batch_size is not None and max_tokens is not None:
            raise ValueError(f"max_tokens: got {max_tokens} beside batch_size {batch_size}, expected one of the two")
        if collate is not None and batch_size is None and max_tokens is None:
            raise ValueError("collate: got a function, expected batch_size or max_tokens with it: rows stay rows")
        if type(seed) is not int or seed < 0:
            raise ValueError(f"seed: got {seed!r}, expected a whole number from 0 on")
        self.rank, self.world_size = _place(rank, world_size)
        self._source = _source(source)
        self._collate = collate
        self._settings: dict[str, Any] = {
            "batch_size": batch_size,
            "max_tokens": max_tokens,
            "shuffle": bool(shuffle),
            "seed": seed,
            "shuffle_rows": shuffle_rows,
            "drop_last": bool(drop_last),
            "rank": self.rank,
            "world_size": self.world_size,
        }
        # Shared with workers, also with those that outlive an epoch; only the process that made it writes to it.
        self._shared: torch.Tensor = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._taken = 0
        self._resumed: tuple[int, int, int] | None = None

    # --- where it is ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Which epoch is, or will be, iterated."""
        return int(self._shared[0])

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is next; another one than now starts from its beginning."""
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch: got {epoch!r}, expected a whole number from 0 on")
        if epoch != self.epoch:
            self._begin(epoch, 0)

    def _begin(self, epoch: int, start: int) -> None:
        self._shared[0], self._shared[1] = epoch, start
        self._taken, self._resumed = 0, None

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the place in it and the settings, as plain numbers.

        >>> data = ExperienceDataset([Experience(tokens=[1, 2 + i]) for i in range(4)], shuffle=True)
        >>> whole = [int(row.tokens[-1]) for row in data]
        >>> data.set_epoch(0)
        >>> units = iter(data)
        >>> head = [int(next(units).tokens[-1]) for _ in range(3)]
        >>> again = ExperienceDataset([Experience(tokens=[1, 2 + i]) for i in range(4)], shuffle=True)
        >>> again.load_state_dict(data.state_dict())
        >>> head + [int(row.tokens[-1]) for row in again] == whole
        True
        """
        worker, workers = _worker()
        epoch, start, taken = self._place()
        taken += self._taken
        return {"epoch": epoch, "start": start, "taken": taken, "worker": worker, "workers": workers, **self._settings}

    def _place(self) -> tuple[int, int, int]:
        """The epoch, where this rank began in it, and how many units this worker had taken by then."""
        return self._resumed or (int(self._shared[0]), int(self._shared[1]), 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, with the same source and settings."""
        place = ("epoch", "start", "taken", "worker", "workers")
        for name in (*place, *self._settings):
            if name not in state:
                raise ValueError(f"state: got no {name!r}, expected a state_dict of ExperienceDataset")
            if name in self._settings and state[name] != self._settings[name]:
                raise ValueError(f"{name}: got a state saved with {state[name]!r}, expected {self._settings[name]!r}")
        epoch, start, taken, worker, workers = (int(state[name]) for name in place)
        if (worker, workers) == (0, 1):
            self._begin(epoch, start + taken)
            return
        if (worker, workers) != _worker():
            raise ValueError(
                f"state: got that of worker {worker} of {workers}, expected to load it in the same; the process that "
                "owns the loader has its own (see tracked)"
            )
        self._resumed, self._taken = (epoch, start, taken), 0

    def tracked(self, loader: Any) -> Iterator[Any]:
        """What `loader`, a `DataLoader` of this dataset, gives, with the dataset's place kept up to date.

        A loader's workers have copies of the dataset and are ahead of what was delivered; this counts deliveries.
        """
        if loader.dataset is not self or loader.batch_size is not None or not getattr(loader, "in_order", True):
            raise ValueError(
                "loader: expected a DataLoader of this dataset with batch_size=None that keeps the order, got one with "
                f"batch_size={loader.batch_size!r}, in_order={getattr(loader, 'in_order', True)}"
            )
        if not loader.num_workers:
            yield from loader
            return
        epoch = self.epoch
        self._taken = 0
        for unit in loader:
            self._taken += 1
            yield unit
        self._begin(epoch + 1, 0)

    # --- what it gives --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many units this rank has in an epoch, where that is known beforehand."""
        if self._source.count is None or self._settings["max_tokens"] is not None:
            raise TypeError("len: units are counted beforehand only without max_tokens, and of a source with a size")
        size, drop = self._settings["batch_size"] or 1, self._settings["drop_last"]
        units = self._source.count // size if drop else -(-self._source.count // size)
        return units // self.world_size + (not drop and self.rank < units % self.world_size)

    def __iter__(self) -> Iterator[Any]:
        worker, workers = _worker()
        epoch, start, taken = self._place()
        self._taken = 0
        for unit in self._made(self._mine(epoch, start + worker + taken * workers, workers)):
            self._taken += 1
            yield unit
        if get_worker_info() is None:
            self._begin(epoch + 1, 0)
        else:
            self._resumed = None

    def _mine(self, epoch: int, first: int, step: int) -> Iterator[_Unit]:
        """Every `step`th of this rank's units, from number `first` on."""
        deal: list[_Unit] = []
        number = 0
        for unit in self._units(epoch):
            deal.append(unit)
            # One round of dealing at a time: whether it is a full one decides about the last with `drop_last`.
            if len(deal) == self.world_size:
                if number >= first and not (number - first) % step:
                    yield deal[self.rank]
                deal = []
                number += 1
        last = self.rank < len(deal) and not self._settings["drop_last"]
        if last and number >= first and not (number - first) % step:
            yield deal[self.rank]

    def _units(self, epoch: int) -> Iterator[_Unit]:
        size, cap = self._settings["batch_size"] or 1, self._settings["max_tokens"]
        unit: _Unit = []
        held = 0
        for block, order in self._blocks(epoch):
            begin = 0
            if cap is None:
                while held + len(order) - begin >= size:
                    stop = begin + size - held
                    yield [*unit, (block, order[begin:stop])]
                    unit, held, begin = [], 0, stop
                if begin < len(order):
                    unit.append((block, order[begin:]))
                    held += len(order) - begin
                continue
            for at, length in enumerate(block.records.token_lengths()[order].tolist()):
                if length > cap:
                    eid = block.records[int(order[at])].eid
                    raise ValueError(f"max_tokens: got {cap}, expected at least {length}, as record {eid} has")
                if held + length > cap:
                    yield [*unit, (block, order[begin:at])] if at > begin else unit
                    unit, held, begin = [], 0, at
                held += length
            if begin < len(order):
                unit.append((block, order[begin:]))
        if unit and not self._settings["drop_last"]:
            yield unit

    def _blocks(self, epoch: int) -> Iterator[tuple[_Block, Rows]]:
        """The records that are ordered together, block by block, and their order."""
        shuffle, seed = self._settings["shuffle"], self._settings["seed"]
        parts: Iterable[_Part] = self._source.parts()
        if shuffle and self._source.count is not None:
            known = list(parts)
            parts = (known[i] for i in np.random.default_rng([seed, epoch]).permutation(len(known)))
        least = self._settings["shuffle_rows"] if shuffle else 1
        for number, block in enumerate(_blocks(parts, least)):
            if shuffle:
                yield block, np.random.default_rng([seed, epoch, number + 1]).permutation(block.count)
            else:
                yield block, np.arange(block.count)

    def _made(self, units: Iterator[_Unit]) -> Iterator[Any]:
        if self._settings["batch_size"] is None and self._settings["max_tokens"] is None:
            yield from _rows(units)
            return
        for unit in units:
            batch = Experiences.concat([block.records.take(rows) for block, rows in unit])
            yield batch if self._collate is None else self._collate(batch)


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Which rank of how many this is."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank: got {rank} with world_size {world_size}, expected both or neither")
    if rank is None or world_size is None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return 0, 1
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: got {rank}, expected 0 to {world_size - 1}, world_size being {world_size}")
    return rank, world_size


def _worker() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


# --- sources ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """Records that are loaded together: some in memory, or a frame of a file."""

    count: int
    load: Callable[[], Experiences]


class _Block:
    """Parts that are ordered together, loaded when a record of theirs is first wanted."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts: list[_Part] | None = parts
        self._records: Experiences | None = None
        self.count = sum(part.count for part in parts)

    @property
    def records(self) -> Experiences:
        if self._records is None:
            self._records = Experiences.concat([part.load() for part in self._parts or ()])
            self._parts = None
        return self._records


_Unit: TypeAlias = list[tuple[_Block, Rows]]


def _blocks(parts: Iterable[_Part], least: int) -> Iterator[_Block]:
    """Blocks of whole parts with at least so many records each, but for the last."""
    held: list[_Part] = []
    count = 0
    for part in parts:
        if part.count:
            held.append(part)
            count += part.count
        if count >= least:
            yield _Block(held)
            held, count = [], 0
    if held:
        yield _Block(held)


def _rows(units: Iterator[_Unit]) -> Iterator[Experience]:
    """Units of one record as that record, made many at a time."""
    held: list[int] = []
    block: _Block | None = None
    for ((its, (row,)),) in units:
        if block is not None and (its is not block or len(held) == _GATHER):
            yield from block.records.take(held).rows()
            held = []
        block = its
        held.append(int(row))
    if block is not None:
        yield from block.records.take(held).rows()


class _Memory:
    def __init__(self, records: Experiences) -> None:
        self.records = records
        self.count: int | None = len(records)

    def parts(self) -> Iterator[_Part]:
        return iter([_Part(len(self.records), lambda: self.records)])


class _Files:
    """Frames of files, found by their headers alone."""

    def __init__(self, paths: list[Path]) -> None:
        self.frames = [frame for path in paths for frame in _frames(path)]
        self.count: int | None = sum(frame.count for frame in self.frames)

    def parts(self) -> Iterator[_Part]:
        return (_Part(frame.count, frame.load) for frame in self.frames)


@dataclass(frozen=True, slots=True)
class _FileFrame:
    path: Path
    start: int
    stop: int
    count: int

    def load(self) -> Experiences:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            memory = bytearray(file.read(self.stop - self.start))
        try:
            return decode(memory, private=True)
        except WireError as error:
            at = None if error.offset is None else self.start + error.offset
            raise WireError(f"{self.path}: {error.message}", at) from None


def _frames(path: Path) -> Iterator[_FileFrame]:
    check_regular(path)
    size = path.stat().st_size
    at = 0
    with open(path, "rb") as file:
        while at < size:
            file.seek(at)
            try:
                frame = read_header(file.read(HEADER_BYTES))
            except WireError as error:
                raise WireError(f"{path}: {error.message}", at + (error.offset or 0)) from None
            if at + frame.stop > size:
                raise WireError(f"{path}: the frame takes {frame.stop} bytes, {size - at} are there", at)
            yield _FileFrame(path, at, at + frame.stop, frame.count)
            at += frame.stop


class _Stream:
    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source
        self.count: int | None = None

    def parts(self) -> Iterator[_Part]:
        rows: list[Experience] = []
        for number, item in enumerate(self.source):
            if isinstance(item, Experience):
                rows.append(item)
            elif not isinstance(item, Experiences):
                raise ValueError(
                    f"source: item {number} is of type {type(item).__name__}, expected Experiences or Experience"
                )
            if rows and (isinstance(item, Experiences) or len(rows) == _GATHER):
                yield _loaded(Experiences(rows))
                rows = []
            if isinstance(item, Experiences):
                yield _loaded(item)
        if rows:
            yield _loaded(Experiences(rows))


def _loaded(records: Experiences) -> _Part:
    return _Part(len(records), lambda: records)


def _source(given: Any) -> _Memory | _Files | _Stream:
    if isinstance(given, Experiences):
        return _Memory(given)
    if isinstance(given, (str, os.PathLike)):
        return _Files([Path(given)])
    if isinstance(given, Sequence) and not isinstance(given, (bytes, bytearray, memoryview)):
        if given and all(isinstance(item, (str, os.PathLike)) for item in given):
            return _Files([Path(item) for item in given])
        if all(isinstance(item, Experience) for item in given):
            return _Memory(Experiences(given))
        if all(isinstance(item, (Experience, Experiences)) for item in given):
            parts = _Stream(given).parts()
            return _Memory(Experiences.concat(part.load() for part in parts))
    if isinstance(given, Iterable) and not isinstance(given, (Iterator, bytes, bytearray, memoryview, Mapping)):
        return _Stream(given)
    raise ValueError(
        f"source: got {type(given).__name__}, expected Experiences, a list of records, paths of frame files, or "
        "something that can be iterated more than once and gives Experiences or records"
    )


__all__ = ["ExperienceDataset"]
