"""`ExperienceDataset`: every record once, in one order with any number of workers, the same place after a restart."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from benchmarks import peers
from rollbook import Experience, Experiences, WireError
from rollbook.compat.lightrft.batch import ExperienceBatch, from_experiences
from rollbook.core.wire import write_frame
from rollbook.io.torch_dataset import ExperienceDataset
from tests.adapters.samples import make_records

RECORDS = make_records(0, count=23)
UIDS = [eid.uid for eid in RECORDS.eids()]


def uids(unit: Any) -> list[str]:
    """The ids in a unit: a record, records or a batch."""
    if isinstance(unit, Experience):
        return [unit.eid.uid]
    if isinstance(unit, ExperienceBatch):
        return [eid.uid for eid in unit.ids or () if eid is not None]
    return [eid.uid for eid in unit.eids()]


def flat(units: Any) -> list[str]:
    return [uid for unit in units for uid in uids(unit)]


def write_file(path: Path, records: Experiences, sizes: list[int]) -> Path:
    with path.open("wb") as file:
        at = 0
        for size in sizes:
            write_frame(file, records[at : at + size])
            at += size
    return path


class Again:
    """Something that can be iterated any number of times, and has no length."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)


# --- what it gives ------------------------------------------------------------------------------------------------


def test_rows_batches_and_collated_batches() -> None:
    rows = list(ExperienceDataset(RECORDS))
    assert rows == RECORDS and all(isinstance(row, Experience) for row in rows)
    batches = list(ExperienceDataset(RECORDS, batch_size=5))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3] and Experiences.concat(batches) == RECORDS
    assert [len(batch) for batch in ExperienceDataset(RECORDS, batch_size=5, drop_last=True)] == [5] * 4
    collate = functools.partial(from_experiences, pad_token_id=9)
    first = next(iter(ExperienceDataset(RECORDS, batch_size=4, collate=collate)))
    assert first == from_experiences(RECORDS[:4], pad_token_id=9)


@settings(max_examples=50, deadline=None)
@given(st.integers(9, 40), st.booleans(), st.integers(0, 99))
def test_a_token_cap_is_kept(cap: int, shuffle: bool, seed: int) -> None:
    data = ExperienceDataset(RECORDS, max_tokens=cap, shuffle=shuffle, seed=seed)
    batches = list(data)
    sizes = [int(batch.token_lengths().sum()) for batch in batches]
    assert max(sizes) <= cap and sorted(flat(batches)) == sorted(UIDS)
    firsts = [int(batch.token_lengths()[0]) for batch in batches]
    # The next record would not have fitted.
    assert all(size + after > cap for size, after in zip(sizes, firsts[1:], strict=False))


def test_a_record_over_the_cap_is_named() -> None:
    with pytest.raises(ValueError, match=r"max_tokens: got 2, expected at least \d+, the length of record b%2F1/"):
        list(ExperienceDataset(RECORDS, max_tokens=2))


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_kind_of_source_gives_every_record(tmp_path: Path, shuffle: bool) -> None:
    file = write_file(tmp_path / "one", RECORDS, [4, 1, 10, 8])
    files = [write_file(tmp_path / "a", RECORDS[:9], [9]), write_file(tmp_path / "b", RECORDS[9:], [7, 7])]
    sources: list[Any] = [
        RECORDS,
        list(RECORDS),
        [RECORDS[:5], *RECORDS[5:8], RECORDS[8:]],
        file,
        str(file),
        files,
        Again([RECORDS[:5], *RECORDS[5:8], RECORDS[8:]]),
        Again(list(RECORDS)),
    ]
    for source in sources:
        for batch_size in (None, 4):
            data = ExperienceDataset(source, batch_size=batch_size, shuffle=shuffle, shuffle_rows=6)
            seen = flat(data)
            assert sorted(seen) == sorted(UIDS)
            assert (seen == UIDS) is not shuffle
            # The next epoch has another order, the same epoch the same.
            assert (flat(data) == seen) is not shuffle
            data.set_epoch(0)
            assert flat(data) == seen
            if not isinstance(source, Again):
                assert len(data) == (23 if batch_size is None else 6)
    with pytest.raises(TypeError, match="len: unknown with max_tokens, or for a source without a length"):
        len(ExperienceDataset(Again([RECORDS])))


def test_seeds_differ_and_blocks_mix() -> None:
    orders = [flat(ExperienceDataset(RECORDS, shuffle=True, seed=seed)) for seed in range(4)]
    assert len({tuple(order) for order in orders}) == 4


def test_files_are_read_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "frames", RECORDS, [2] * 11 + [1])
    module = importlib.import_module("rollbook.io.torch_dataset")
    loaded: list[int] = []
    decode = module.decode

    def counting(memory: Any, **options: Any) -> Experiences:
        loaded.append(len(memory))
        return decode(memory, **options)

    monkeypatch.setattr(module, "decode", counting)
    units = iter(ExperienceDataset(path, batch_size=2))
    for _ in range(3):
        next(units)
    assert len(loaded) == 3
    loaded.clear()
    data = ExperienceDataset(path, batch_size=2)
    data.load_state_dict({**data.state_dict(), "start": 10})
    assert flat(data) == UIDS[20:] and len(loaded) == 2  # what was delivered before is not read again


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = write_file(tmp_path / "frames", RECORDS, [10, 13])
    content = path.read_bytes()
    path.write_bytes(content[:-64])
    with pytest.raises(WireError, match=r"frames: the frame takes"):
        ExperienceDataset(path)
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(WireError, match=r"frames: the body does not match its checksum"):
        list(ExperienceDataset(path))
    path.write_bytes(b"something else entirely" * 9)
    with pytest.raises(WireError, match=r"frames: bad magic"):
        ExperienceDataset(path)


# --- ranks and workers --------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 12),
    st.integers(1, 4),
    st.sampled_from([None, 1, 2, 5]),
    st.booleans(),
    st.integers(0, 5),
)
def test_ranks_share_without_loss_or_doubling(
    count: int, world: int, size: int | None, shuffle: bool, seed: int
) -> None:
    records = RECORDS[:count]
    kinds = {"batch_size": size, "shuffle": shuffle, "seed": seed, "world_size": world}
    ranks = [ExperienceDataset(records, **kinds, rank=rank) for rank in range(world)]
    parts = [list(data) for data in ranks]
    assert sorted(uid for part in parts for uid in flat(part)) == sorted(UIDS[:count])
    assert [len(part) for part in parts] == [len(data) for data in ranks]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    # Dealt in turn, they are what one rank would have had.
    alone = list(ExperienceDataset(records, batch_size=size, shuffle=shuffle, seed=seed))
    dealt = [parts[i % world][i // world] for i in range(len(alone))]
    assert [uids(unit) for unit in dealt] == [uids(unit) for unit in alone]
    equal = [list(ExperienceDataset(records, **kinds, rank=rank, drop_last=True)) for rank in range(world)]
    assert len({len(part) for part in equal}) == 1


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("size", [None, 4])
def test_workers_do_not_change_the_order(workers: int, size: int | None) -> None:
    data = ExperienceDataset(RECORDS, batch_size=size, shuffle=True, seed=3)
    expected = [uids(unit) for unit in data]
    data.set_epoch(0)
    loader = DataLoader(data, batch_size=None, num_workers=workers)
    assert [uids(unit) for unit in loader] == expected and len(loader) == len(expected)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_that_collate(context: str) -> None:
    collate = functools.partial(from_experiences, pad_token_id=0, packing_samples=True)
    data = ExperienceDataset(RECORDS, batch_size=6, collate=collate)
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context)
    for i, batch in enumerate(loader):
        assert batch == collate(RECORDS[6 * i : 6 * i + 6])


def test_workers_that_stay_hear_of_the_epoch() -> None:
    data = ExperienceDataset(RECORDS, shuffle=True)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    orders = []
    for epoch in range(3):
        data.set_epoch(epoch)
        orders.append(tuple(flat(loader)))
    assert len(set(orders)) == 3
    alone = ExperienceDataset(RECORDS, shuffle=True)
    assert orders == [tuple(flat(alone)) for _ in range(3)]


def test_ranks_are_torchs_unless_given() -> None:
    torch.distributed.init_process_group(backend="fake", store=FakeStore(), rank=1, world_size=4)
    try:
        data = ExperienceDataset(RECORDS)
    finally:
        torch.distributed.destroy_process_group()
    assert (data.rank, data.world_size) == (1, 4) and flat(data) == UIDS[1::4]


# --- going on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_where_it_was(workers: int) -> None:
    """At every place of an epoch, through a loader; with another number of workers afterwards, too."""
    settings = {"batch_size": 4, "shuffle": True, "seed": 5}
    epochs = [[uids(unit) for unit in ExperienceDataset(RECORDS, **settings)]]
    data = ExperienceDataset(RECORDS, **settings)
    data.set_epoch(1)
    epochs.append([uids(unit) for unit in data])
    for stop in range(len(epochs[0]) + 1):
        data = ExperienceDataset(RECORDS, **settings)
        seen = []
        units = data.tracked(DataLoader(data, batch_size=None, num_workers=workers))
        for unit in units if stop else ():
            seen.append(uids(unit))
            if len(seen) == stop:
                break
        state = data.state_dict()
        for after in {0, workers}:
            again = ExperienceDataset(RECORDS, **settings)
            again.load_state_dict(state)
            rest = [uids(unit) for unit in again.tracked(DataLoader(again, batch_size=None, num_workers=after))]
            assert seen + rest == epochs[0], (stop, after)
            assert again.epoch == 1 and again.state_dict()["start"] == 0
            following = [uids(unit) for unit in again.tracked(DataLoader(again, batch_size=None, num_workers=after))]
            assert following == epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_again_and_again(workers: int) -> None:
    """A process that dies after every second batch, until the second epoch has begun."""
    settings = {"batch_size": 3, "shuffle": True, "rank": 1, "world_size": 2}
    alone = ExperienceDataset(RECORDS, **settings)
    expected = [uids(unit) for _ in range(2) for unit in alone]
    state, seen = ExperienceDataset(RECORDS, **settings).state_dict(), []
    while len(seen) < len(expected):
        data = ExperienceDataset(RECORDS, **settings)
        data.load_state_dict(state)
        for i, unit in enumerate(data.tracked(DataLoader(data, batch_size=None, num_workers=workers))):
            seen.append(uids(unit))
            if i == 1:
                break
        state = data.state_dict()
    assert seen == expected


def test_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    data = ExperienceDataset(RECORDS, shuffle=True)
    units = iter(data)
    for _ in RECORDS:
        next(units)
    assert next(units, None) is None
    again = ExperienceDataset(RECORDS, shuffle=True)
    again.load_state_dict(data.state_dict())
    assert again.epoch == 1 and sorted(flat(again)) == sorted(UIDS)
    again.load_state_dict({**data.state_dict(), "epoch": 1, "taken": 3})
    again.set_epoch(1)  # as a loop over epochs does; the place is kept
    assert len(list(again)) == 20


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [None, 4])
def test_torchdatas_loader_keeps_the_place(workers: int, size: int | None) -> None:
    peers.verl()
    stateful = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader

    def make() -> Any:
        data = ExperienceDataset(RECORDS, batch_size=size, shuffle=True, seed=1)
        return stateful(data, batch_size=None, num_workers=workers)

    uninterrupted = [uids(unit) for unit in make()]
    for stop in (1, 2, 5):
        loader = make()
        units = iter(loader)
        head = [uids(next(units)) for _ in range(stop)]
        again = make()
        again.load_state_dict(loader.state_dict())
        assert head + [uids(unit) for unit in again] == uninterrupted


def test_torchs_checkpoints_keep_the_place(tmp_path: Path) -> None:
    data = ExperienceDataset(RECORDS, shuffle=True, batch_size=3)
    units = iter(data)
    head = [uids(next(units)) for _ in range(4)]
    dcp.save({"data": data, "weight": torch.ones(2)}, checkpoint_id=tmp_path / "step", no_dist=True)
    again = ExperienceDataset(RECORDS, shuffle=True, batch_size=3)
    dcp.load({"data": again, "weight": torch.zeros(2)}, checkpoint_id=tmp_path / "step", no_dist=True)
    assert head + [uids(unit) for unit in again] == head + [uids(unit) for unit in units]


# --- what is refused ----------------------------------------------------------------------------------------------


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong, message in (
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"max_tokens": 1.5}, "max_tokens: got 1.5"),
        ({"batch_size": 2, "max_tokens": 9}, "max_tokens: got 9 with batch_size 2"),
        ({"collate": from_experiences}, "collate: got a function, expected batch_size or max_tokens"),
        ({"seed": -1}, "seed: got -1"),
        ({"rank": 2, "world_size": 2}, "rank: got 2, expected 0 to 1"),
        ({"rank": 2}, "rank: got 2 with world_size None"),
    ):
        with pytest.raises(ValueError, match=message):
            ExperienceDataset(RECORDS, **wrong)
    for source in (iter(RECORDS), 3, b"bytes", {"a": 1}):
        with pytest.raises(ValueError, match=r"source: got \w+, expected Experiences"):
            ExperienceDataset(source)
    with pytest.raises(ValueError, match=r"source: item 1 is of type int"):
        list(ExperienceDataset(Again([RECORDS, 1])))
    with pytest.raises(ValueError, match=r"epoch: got -1"):
        ExperienceDataset(RECORDS).set_epoch(-1)


def test_states_of_something_else_are_refused() -> None:
    data = ExperienceDataset(RECORDS, batch_size=2)
    with pytest.raises(ValueError, match=r"batch_size: got a state saved with 3, expected 2"):
        data.load_state_dict(ExperienceDataset(RECORDS, batch_size=3).state_dict())
    with pytest.raises(ValueError, match=r"state: got no 'epoch'"):
        data.load_state_dict({})
    with pytest.raises(ValueError, match=r"state: got the state of worker 1 of 2"):
        data.load_state_dict({**data.state_dict(), "worker": 1, "workers": 2})
    with pytest.raises(ValueError, match=r"loader: expected a DataLoader of this dataset with batch_size=None"):
        next(data.tracked(DataLoader(data, batch_size=2)))
