"""Records as a resumable torch `IterableDataset`, one by one or in batches.

Invariant: the units of an epoch (rows or batches) and their order follow from the source, the settings, the seed and
the epoch alone. Every unit goes to exactly one rank and one worker, and the units of a rank have the same order with
any number of workers, so that a position in the epoch is one number.
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
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from rollbook.core.errors import WireError
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.files import check_regular
from rollbook.core.wire import HEADER_BYTES, decode, read_header

Rows: TypeAlias = NDArray[np.int64]
RecordSource: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str] | Experience | Experiences]"
"""Records, paths of frame files, or an iterable of records."""
_GATHER = 1024
"""Rows that are created at once when rows are returned one by one."""


class ExperienceDataset(IterableDataset[Any]):
    """Records for a torch `DataLoader` with `batch_size=None`: this class makes the batches.

    The units are single `Experience`s, or `Experiences` with `batch_size` or `max_tokens`. They are distributed to
    ranks, and to the workers of a rank, in turn.

    The epoch increases when it was iterated to its end in this process. With workers and without `tracked`, call
    `set_epoch` before each epoch. `state_dict` and `load_state_dict` save and restore the position: exactly, if this
    process iterates the dataset, or a loader through `tracked`, or if the loader asks its workers, as torchdata's
    `StatefulDataLoader` does. Iterating again without loading starts at the last loaded state.

    Args:
        source: `Experiences`, a list of records, paths of frame files, or any object that can be iterated repeatedly
            and yields `Experiences` or `Experience`. Files are read a few frames at a time.
        batch_size: Records per batch. The last may have fewer.
        max_tokens: Largest number of tokens of a batch, filled with records in order.
        collate: Converts a batch, in the worker. For an `ExperienceBatch`:
            `functools.partial(rollbook.compat.lightrft.batch.from_experiences, pad_token_id=0)`.
        shuffle: Shuffle in each epoch: all records if they are in memory, else the frames of the files, and then
            `shuffle_rows` records at a time.
        seed: The seed of the order.
        shuffle_rows: Records that are shuffled together.
        drop_last: Give all ranks the same number of units, and leave out a short last batch. Otherwise ranks may
            differ by one unit.
        rank: The rank; by default that of `torch.distributed`.
        world_size: The number of ranks; by default that of `torch.distributed`.

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
        source: RecordSource,
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
        for name, limit in (("batch_size", batch_size), ("max_tokens", max_tokens), ("shuffle_rows", shuffle_rows)):
            if limit is not None and (type(limit) is not int or limit < 1):
                raise ValueError(f"{name}: got {limit!r}, expected a whole number from 1 on")
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

    # --- position ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The current or next epoch."""
        return int(self._shared[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. If it is not the current one, it starts at its beginning."""
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch: got {epoch!r}, expected a whole number from 0 on")
        if epoch != self.epoch:
            self._begin(epoch, 0)

    def _begin(self, epoch: int, start: int) -> None:
        self._shared[0], self._shared[1] = epoch, start
        self._taken, self._resumed = 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the position in it and the settings.

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
        """Return the epoch, where this rank started in it, and the units that this worker had taken by then."""
        return self._resumed or (int(self._shared[0]), int(self._shared[1]), 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position, with the same source and settings."""
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

    def tracked(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterate `loader`, a `DataLoader` of this dataset, and keep the position of the dataset up to date.

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

    # --- iteration ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the units of this rank in an epoch, if they can be counted in advance."""
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
        """Yield every `step`th unit of this rank, from number `first`."""
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
        filled = 0
        for block, order in self._blocks(epoch):
            begin = 0
            if cap is None:
                while filled + len(order) - begin >= size:
                    stop = begin + size - filled
                    yield [*unit, (block, order[begin:stop])]
                    unit, filled, begin = [], 0, stop
                if begin < len(order):
                    unit.append((block, order[begin:]))
                    filled += len(order) - begin
                continue
            for at, length in enumerate(block.records.token_lengths()[order].tolist()):
                if length > cap:
                    eid = block.records[int(order[at])].eid
                    raise ValueError(f"max_tokens: got {cap}, expected at least {length}, as record {eid} has")
                if filled + length > cap:
                    yield [*unit, (block, order[begin:at])] if at > begin else unit
                    unit, filled, begin = [], 0, at
                filled += length
            if begin < len(order):
                unit.append((block, order[begin:]))
        if unit and not self._settings["drop_last"]:
            yield unit

    def _blocks(self, epoch: int) -> Iterator[tuple[_Block, Rows]]:
        """Yield blocks of records that are ordered together, with their order."""
        shuffle, seed = self._settings["shuffle"], self._settings["seed"]
        parts: Iterable[_Part] = self._source.parts()
        if shuffle and self._source.count is not None:
            all_parts = list(parts)
            parts = (all_parts[i] for i in np.random.default_rng([seed, epoch]).permutation(len(all_parts)))
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
    """Return the rank and the number of ranks."""
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
    """Records that are loaded together: in memory, or a frame of a file."""

    count: int
    load: Callable[[], Experiences]


class _Block:
    """Parts that are ordered together, loaded on first use."""

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
    """Yield blocks of complete parts with at least `least` records each, except the last."""
    pending: list[_Part] = []
    count = 0
    for part in parts:
        if part.count:
            pending.append(part)
            count += part.count
        if count >= least:
            yield _Block(pending)
            pending, count = [], 0
    if pending:
        yield _Block(pending)


def _rows(units: Iterator[_Unit]) -> Iterator[Experience]:
    """Yield the record of each unit of one, created in bulk."""
    pending: list[int] = []
    block: _Block | None = None
    for ((its, (row,)),) in units:
        if block is not None and (its is not block or len(pending) == _GATHER):
            yield from block.records.take(pending).rows()
            pending = []
        block = its
        pending.append(int(row))
    if block is not None:
        yield from block.records.take(pending).rows()


class _Memory:
    def __init__(self, records: Experiences) -> None:
        self.records = records
        self.count: int | None = len(records)

    def parts(self) -> Iterator[_Part]:
        return iter([_Part(len(self.records), lambda: self.records)])


class _Files:
    """Frames of files, located by their headers."""

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
        for number, entry in enumerate(self.source):
            if isinstance(entry, Experience):
                rows.append(entry)
            elif not isinstance(entry, Experiences):
                raise ValueError(
                    f"source: item {number} is of type {type(entry).__name__}, expected Experiences or Experience"
                )
            if rows and (isinstance(entry, Experiences) or len(rows) == _GATHER):
                yield _loaded(Experiences(rows))
                rows = []
            if isinstance(entry, Experiences):
                yield _loaded(entry)
        if rows:
            yield _loaded(Experiences(rows))


def _loaded(records: Experiences) -> _Part:
    return _Part(len(records), lambda: records)


def _source(data: RecordSource) -> _Memory | _Files | _Stream:
    if isinstance(data, Experiences):
        return _Memory(data)
    if isinstance(data, (str, os.PathLike)):
        return _Files([Path(data)])
    if isinstance(data, Sequence) and not isinstance(data, (bytes, bytearray, memoryview)):
        if data and all(isinstance(entry, (str, os.PathLike)) for entry in data):
            return _Files([Path(entry) for entry in data])
        rows = [entry for entry in data if isinstance(entry, Experience)]
        if len(rows) == len(data):
            return _Memory(Experiences(rows))
        if all(isinstance(entry, (Experience, Experiences)) for entry in data):
            parts = _Stream(data).parts()
            return _Memory(Experiences.concat(part.load() for part in parts))
    if isinstance(data, Iterable) and not isinstance(data, (Iterator, bytes, bytearray, memoryview, Mapping)):
        return _Stream(data)
    raise ValueError(
        f"source: got {type(data).__name__}, expected Experiences, a list of records, paths of frame files, or "
        "an iterable (not an iterator) of Experiences or records"
    )


__all__ = ["ExperienceDataset"]
