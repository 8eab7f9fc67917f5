"""Which samples are kept: as many as asked for, whole groups, half by chance, and each says why."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.io.trajectories import Candidate, Selection, select


def candidates(sizes: list[int], seed: int = 0, has_id: bool = True) -> list[Candidate]:
    draw = random.Random(seed)
    made = []
    for g, size in enumerate(sizes):
        for run in range(size):
            made.append(
                Candidate(
                    rank=g % 2,
                    index=len(made),
                    experience=g,
                    row=run,
                    uid=f"{g}/{run}",
                    group=f"g{g}",
                    has_id=has_id,
                    reward=draw.choice([None, float("nan"), 0.0, 1.0, draw.random()]),
                    tokens=draw.randint(1, 50),
                    truncated=draw.random() < 0.1,
                    error=draw.random() < 0.05,
                    mismatch=draw.choice([None, draw.random()]),
                )
            )
    return made


def uids(kept: list[Selection]) -> list[str]:
    return [one.candidate.uid for one in kept]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(0, 40),
    st.sampled_from(["auto", "groups", "first", "random"]),
    st.integers(0, 3),
)
def test_as_many_as_asked_for(sizes: list[int], count: int, keep: str, seed: int) -> None:
    every = candidates(sizes, seed)
    kept = select(every, count, keep, str(seed))
    assert len(kept) == min(count, len(every)) == len(set(uids(kept)))
    assert all(one.reason for one in kept)
    assert [one.candidate.index for one in kept] == sorted(one.candidate.index for one in kept)
    mixed = list(every)
    random.Random(seed).shuffle(mixed)
    again = select(mixed, count, keep, str(seed))
    assert {one.candidate.uid: (one.reason, one.weight) for one in again} == {
        one.candidate.uid: (one.reason, one.weight) for one in kept
    }


@given(st.integers(2, 8), st.integers(2, 30), st.integers(0, 5), st.integers(2, 6))
def test_half_are_whole_groups_by_chance(size: int, groups: int, seed: int, wanted: int) -> None:
    every = candidates([size] * groups, seed)
    count = wanted * size
    kept = select(every, count, "groups", str(seed))
    by_lot = [one for one in kept if one.weight is not None]
    if count >= len(every):
        assert {one.reason for one in kept} == {"all"}
        return
    names = Counter(one.candidate.group for one in by_lot)
    assert set(names.values()) == {size} and len(names) == max(1, -(-count // 2) // size)
    # Each stands for as many as its weight says: together for all.
    assert sum(one.weight or 0 for one in by_lot) == pytest.approx(len(every))
    assert all(("random" in one.reason) == (one.weight is not None) for one in kept)
    # What was chosen comes with its group, but for the last, for which there may be no room.
    whole = Counter(one.candidate.group for one in kept)
    assert sum(found != size for found in whole.values()) <= 1


def test_chance_is_fair() -> None:
    every = candidates([4] * 10)
    seen = Counter(
        one.candidate.group for seed in range(400) for one in select(every, 16, "groups", str(seed)) if one.weight
    )
    assert set(seen) == {f"g{g}" for g in range(10)}
    assert max(seen.values()) < 1.6 * min(seen.values())


def told(**more: Any) -> list[Candidate]:
    """Twelve groups of two, in which everything happens once."""
    made = []
    for g in range(12):
        for run in range(2):
            made.append(Candidate(0, len(made), g, run, f"{g}/{run}", f"g{g}", True, 0.4 + 0.1 * run, 10))
    made[2].reward, made[4].reward = 9.0, -9.0
    made[6].reward = made[7].reward
    made[8].truncated, made[10].mismatch, made[12].tokens, made[14].error = True, 3.0, 99, True
    return made


def test_what_is_shown() -> None:
    kept = {one.candidate.uid: one.reason for one in select(told(), 20, "groups", "1")}
    reasons = {"1/0": "best", "2/0": "worst", "4/0": "truncated", "5/0": "mismatch", "6/0": "longest", "7/0": "error"}
    for uid, why in reasons.items():
        assert why in kept[uid].split(", ")
    assert any("zero variance" in kept.get(uid, "") for uid in ("3/0", "3/1"))
    mates = {uid: why for uid, why in kept.items() if why.startswith("with ")}
    assert mates and all(f"{uid[:-1]}{1 - int(uid[-1])}" in kept for uid in mates)


def test_without_ids_the_first() -> None:
    every = candidates([3, 3], has_id=False)
    assert uids(select(every, 2, "auto", "1")) == ["0/0", "0/1"]
    assert {one.reason for one in select(every, 2, "auto", "1")} == {"first"}
    assert len(uids(select(every, 2, "groups", "1"))) == 2


def test_the_first_are_of_every_rank() -> None:
    every = [Candidate(rank, i, 0, i, f"{rank}{i}", "g", False, None, 1) for rank in range(3) for i in range(5)]
    assert uids(select(every, 6, "first", "1")) == ["00", "01", "10", "11", "20", "21"]


def test_a_function_of_ones_own() -> None:
    every = candidates([2, 2])
    longest = lambda some, count: sorted(((one, "long") for one in some), key=lambda pair: -pair[0].tokens)  # noqa: E731
    kept = select(every, 1, longest, "1")
    assert kept[0].candidate.tokens == max(one.tokens for one in every) and kept[0].reason == "long"
    assert uids(select(every, 3, lambda some, count: some[:2], "1")) == ["0/0", "0/1"]
    with pytest.raises(ValueError, match="keep: got 3"):
        select(every, 1, lambda some, count: [3], "1")
