"""`ExperienceDataset`: records as a resumable torch `IterableDataset`, one by one or in batches.

A unit is what the dataset yields: a record, or a batch.

Invariant: the units of an epoch and their order depend only on the source, the settings, the seed and the epoch. Every
unit goes to exactly one rank and one worker, and the units of a rank have the same order with any number of workers, so
that a position in the epoch is one number.
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

from rollbook.core.checks import check_int
from rollbook.core.errors import WireError
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.files import check_regular
from rollbook.core.wire import HEADER_BYTES, decode, read_header

Rows: TypeAlias = NDArray[np.int64]
RecordSource: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str] | Experience | Experiences]"
"""Records, paths of frame files, or an iterable of records."""
_ROWS_PER_CHUNK = 1024
"""Records that are built at once when records are returned one by one."""


class ExperienceDataset(IterableDataset[Any]):
    """Records for a torch `DataLoader` with `batch_size=None`: this class makes the batches.

    It yields single `Experience`s, or with `batch_size` or `max_tokens` batches of type `Experiences`. They are
    distributed round-robin to ranks, and to the workers of a rank.

    The epoch increases when this process iterates to its end. With workers and without `tracked`, call `set_epoch`
    before each epoch. `state_dict` and `load_state_dict` save and restore the position. It is exact if this process
    iterates the dataset, or a loader through `tracked`, or if the loader collects the states of its workers, as
    torchdata's `StatefulDataLoader` does. Iterating again without loading starts at the last loaded state.

    Args:
        source: `Experiences`, a list of records, paths of frame files, or any object that can be iterated repeatedly
            and yields `Experiences` or `Experience`. Files are read a few frames at a time.
        batch_size: Records per batch. The last may have fewer.
        max_tokens: Maximum number of tokens of a batch, which is filled with records in order.
        collate: Converts a batch, in the worker. For an `ExperienceBatch`:
            `functools.partial(rollbook.compat.lightrft.batch.from_experiences, pad_token_id=0)`.
        shuffle: Shuffle in each epoch: all records if they are in memory, else the frames of the files, and then the
            records within windows of `shuffle_rows`.
        seed: Seed of the order.
        shuffle_rows: Number of records that are shuffled together.
        drop_last: Give all ranks the same number of units, and leave out a short last batch. Otherwise ranks may
            differ by one unit.
        rank: The rank; by default that of `torch.distributed`.
        world_size: The number of ranks; by default that of `torch.distributed`.

    Raises:
        ValueError: An argument is invalid, or two of them exclude each other.

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
        batch_size = None if batch_size is None else check_int("batch_size", batch_size, 1)
        max_tokens = None if max_tokens is None else check_int("max_tokens", max_tokens, 1)
        shuffle_rows = check_int("shuffle_rows", shuffle_rows, 1)
        seed = check_int("seed", seed)
        if batch_size is not None and max_tokens is not None:
            raise ValueError(f"max_tokens: got {max_tokens} with batch_size {batch_size}, expected only one of the two")
        if collate is not None and batch_size is None and max_tokens is None:
            raise ValueError("collate: got a function, expected batch_size or max_tokens with it: it converts batches")
        self.rank, self.world_size = _resolve_rank(rank, world_size)
        self._source = _open_source(source)
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
        # [epoch, first unit of this rank in it]. In shared memory, so that persistent workers see the next epoch. Only
        # the process that created the dataset writes to it.
        self._shared_position: torch.Tensor = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._units_taken = 0
        self._resumed_position: tuple[int, int, int] | None = None

    # --- position ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The current or next epoch."""
        return int(self._shared_position[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, which starts at its beginning unless it is the current one.

        Args:
            epoch: Number of the epoch.
        """
        if check_int("epoch", epoch) != self.epoch:
            self._start_epoch(epoch, 0)

    def _start_epoch(self, epoch: int, start: int) -> None:
        self._shared_position[0], self._shared_position[1] = epoch, start
        self._units_taken, self._resumed_position = 0, None

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
        worker, workers = _worker_place()
        epoch, start, taken = self._position()
        taken += self._units_taken
        return {"epoch": epoch, "start": start, "taken": taken, "worker": worker, "workers": workers, **self._settings}

    def _position(self) -> tuple[int, int, int]:
        """Return the epoch, the first unit of this rank in it, and the number of units that this worker has yielded."""
        return self._resumed_position or (int(self._shared_position[0]), int(self._shared_position[1]), 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position, with the same source and settings.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: The state is of another dataset, of other settings or of another worker.
        """
        position = ("epoch", "start", "taken", "worker", "workers")
        for name in (*position, *self._settings):
            if name not in state:
                raise ValueError(f"state: got no {name!r}, expected a state_dict of ExperienceDataset")
            if name in self._settings and state[name] != self._settings[name]:
                raise ValueError(f"{name}: got a state saved with {state[name]!r}, expected {self._settings[name]!r}")
        epoch, start, taken, worker, workers = (int(state[name]) for name in position)
        if (worker, workers) == (0, 1):
            self._start_epoch(epoch, start + taken)
            return
        if (worker, workers) != _worker_place():
            raise ValueError(
                f"state: got the state of worker {worker} of {workers}, expected to load it in the same worker; the "
                "main process has a state of its own (see tracked)"
            )
        self._resumed_position, self._units_taken = (epoch, start, taken), 0

    def tracked(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterate `loader`, a `DataLoader` of this dataset, and keep the position of the dataset up to date.

        The workers of a loader have copies of the dataset and prefetch. This counts the units that were yielded.

        Args:
            loader: The loader.

        Yields:
            The batches of the loader.

        Raises:
            ValueError: The loader is of another dataset, batches by itself or changes the order.
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
        self._units_taken = 0
        for unit in loader:
            self._units_taken += 1
            yield unit
        self._start_epoch(epoch + 1, 0)

    # --- iteration ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of units of this rank in an epoch; raise `TypeError` if it is not known in advance."""
        if self._source.count is None or self._settings["max_tokens"] is not None:
            raise TypeError("len: unknown with max_tokens, or for a source without a length")
        size, drop = self._settings["batch_size"] or 1, self._settings["drop_last"]
        units = self._source.count // size if drop else -(-self._source.count // size)
        return units // self.world_size + (not drop and self.rank < units % self.world_size)

    def __iter__(self) -> Iterator[Any]:
        worker, workers = _worker_place()
        epoch, start, taken = self._position()
        self._units_taken = 0
        for unit in self._collated(self._units_of_rank(epoch, start + worker + taken * workers, workers)):
            self._units_taken += 1
            yield unit
        if get_worker_info() is None:
            self._start_epoch(epoch + 1, 0)
        else:
            self._resumed_position = None

    def _units_of_rank(self, epoch: int, first: int, step: int) -> Iterator[_Unit]:
        """Yield every `step`th unit of this rank, from number `first`."""
        # One unit per rank at a time, since `drop_last` drops the last units if there are fewer than ranks.
        one_per_rank: list[_Unit] = []
        number = 0
        for unit in self._units(epoch):
            one_per_rank.append(unit)
            if len(one_per_rank) == self.world_size:
                if number >= first and not (number - first) % step:
                    yield one_per_rank[self.rank]
                one_per_rank = []
                number += 1
        has_last = self.rank < len(one_per_rank) and not self._settings["drop_last"]
        if has_last and number >= first and not (number - first) % step:
            yield one_per_rank[self.rank]

    def _units(self, epoch: int) -> Iterator[_Unit]:
        """Yield the units of all ranks, as rows of blocks."""
        size, cap = self._settings["batch_size"] or 1, self._settings["max_tokens"]
        unit: _Unit = []
        filled = 0
        for block, order in self._shuffled_blocks(epoch):
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
            for i, length in enumerate(block.records.token_lengths()[order].tolist()):
                if length > cap:
                    eid = block.records[int(order[i])].eid
                    raise ValueError(f"max_tokens: got {cap}, expected at least {length}, the length of record {eid}")
                if filled + length > cap:
                    yield [*unit, (block, order[begin:i])] if i > begin else unit
                    unit, filled, begin = [], 0, i
                filled += length
            if begin < len(order):
                unit.append((block, order[begin:]))
        if unit and not self._settings["drop_last"]:
            yield unit

    def _shuffled_blocks(self, epoch: int) -> Iterator[tuple[_Block, Rows]]:
        """Yield blocks of records that are shuffled together, with the order of their rows."""
        shuffle, seed = self._settings["shuffle"], self._settings["seed"]
        parts: Iterable[_Part] = self._source.parts()
        if shuffle and self._source.count is not None:
            all_parts = list(parts)
            parts = (all_parts[i] for i in np.random.default_rng([seed, epoch]).permutation(len(all_parts)))
        min_rows = self._settings["shuffle_rows"] if shuffle else 1
        for number, block in enumerate(_join_parts(parts, min_rows)):
            if shuffle:
                yield block, np.random.default_rng([seed, epoch, number + 1]).permutation(block.count)
            else:
                yield block, np.arange(block.count)

    def _collated(self, units: Iterator[_Unit]) -> Iterator[Any]:
        if self._settings["batch_size"] is None and self._settings["max_tokens"] is None:
            yield from _iterate_rows(units)
            return
        for unit in units:
            batch = Experiences.concat([block.records.take(rows) for block, rows in unit])
            yield batch if self._collate is None else self._collate(batch)


def _resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and the number of ranks."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank: got {rank} with world_size {world_size}, expected both or neither")
    if rank is None or world_size is None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return 0, 1
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: got {rank}, expected 0 to {world_size - 1}, with world_size {world_size}")
    return rank, world_size


def _worker_place() -> tuple[int, int]:
    """Return the number of this loader worker, and how many there are."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


# --- sources ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """Records that are loaded together: in memory, or a frame of a file."""

    count: int
    load: Callable[[], Experiences]


class _Block:
    """Parts that are shuffled together, loaded on first use."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts: list[_Part] | None = parts
        self._records: Experiences | None = None
        self.count = sum(source.count for source in parts)

    @property
    def records(self) -> Experiences:
        if self._records is None:
            self._records = Experiences.concat([source.load() for source in self._parts or ()])
            self._parts = None
        return self._records


_Unit: TypeAlias = list[tuple[_Block, Rows]]


def _join_parts(parts: Iterable[_Part], min_rows: int) -> Iterator[_Block]:
    """Yield blocks of complete parts with at least `min_rows` records each, except the last."""
    pending: list[_Part] = []
    count = 0
    for source in parts:
        if source.count:
            pending.append(source)
            count += source.count
        if count >= min_rows:
            yield _Block(pending)
            pending, count = [], 0
    if pending:
        yield _Block(pending)


def _iterate_rows(units: Iterator[_Unit]) -> Iterator[Experience]:
    """Yield the records of units of one record, built `_ROWS_PER_CHUNK` at a time."""
    pending: list[int] = []
    block: _Block | None = None
    for ((next_block, (row,)),) in units:
        if block is not None and (next_block is not block or len(pending) == _ROWS_PER_CHUNK):
            yield from block.records.take(pending).rows()
            pending = []
        block = next_block
        pending.append(int(row))
    if block is not None:
        yield from block.records.take(pending).rows()


class _MemorySource:
    """Records in memory, as one part."""

    def __init__(self, records: Experiences) -> None:
        self.records = records
        self.count: int | None = len(records)

    def parts(self) -> Iterator[_Part]:
        return iter([_Part(len(self.records), lambda: self.records)])


class _FileSource:
    """Frames of files, which are loaded when they are needed."""

    def __init__(self, paths: list[Path]) -> None:
        self.frames = [frame for path in paths for frame in _scan_frames(path)]
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
            offset = None if error.offset is None else self.start + error.offset
            raise WireError(f"{self.path}: {error.message}", offset) from None


def _scan_frames(path: Path) -> Iterator[_FileFrame]:
    """Locate the frames of a file by their headers."""
    check_regular(path)
    size = path.stat().st_size
    start = 0
    with open(path, "rb") as file:
        while start < size:
            file.seek(start)
            try:
                frame = read_header(file.read(HEADER_BYTES))
            except WireError as error:
                raise WireError(f"{path}: {error.message}", start + (error.offset or 0)) from None
            if start + frame.stop > size:
                raise WireError(f"{path}: the frame takes {frame.stop} bytes, {size - start} are left", start)
            yield _FileFrame(path, start, start + frame.stop, frame.count)
            start += frame.stop


class _StreamSource:
    """An iterable of `Experiences` or `Experience`s, of unknown length."""

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
            if rows and (isinstance(entry, Experiences) or len(rows) == _ROWS_PER_CHUNK):
                yield _loaded_part(Experiences(rows))
                rows = []
            if isinstance(entry, Experiences):
                yield _loaded_part(entry)
        if rows:
            yield _loaded_part(Experiences(rows))


def _loaded_part(records: Experiences) -> _Part:
    return _Part(len(records), lambda: records)


def _open_source(data: RecordSource) -> _MemorySource | _FileSource | _StreamSource:
    if isinstance(data, Experiences):
        return _MemorySource(data)
    if isinstance(data, (str, os.PathLike)):
        return _FileSource([Path(data)])
    if isinstance(data, Sequence) and not isinstance(data, (bytes, bytearray, memoryview)):
        if data and all(isinstance(entry, (str, os.PathLike)) for entry in data):
            return _FileSource([Path(entry) for entry in data])
        rows = [entry for entry in data if isinstance(entry, Experience)]
        if len(rows) == len(data):
            return _MemorySource(Experiences(rows))
        if all(isinstance(entry, (Experience, Experiences)) for entry in data):
            parts = _StreamSource(data).parts()
            return _MemorySource(Experiences.concat(source.load() for source in parts))
    if isinstance(data, Iterable) and not isinstance(data, (Iterator, bytes, bytearray, memoryview, Mapping)):
        return _StreamSource(data)
    raise ValueError(
        f"source: got {type(data).__name__}, expected Experiences, a list of records, paths of frame files, or "
        "an iterable (not an iterator) of Experiences or records"
    )


__all__ = ["ExperienceDataset"]
