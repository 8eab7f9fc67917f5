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
    built = []
    for g, size in enumerate(sizes):
        for run in range(size):
            built.append(
                Candidate(
                    rank=g % 2,
                    index=len(built),
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
    return built


def uids(selections: list[Selection]) -> list[str]:
    return [selection.candidate.uid for selection in selections]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(0, 40),
    st.sampled_from(["auto", "groups", "first", "random"]),
    st.integers(0, 3),
)
def test_as_many_as_asked_for(sizes: list[int], count: int, keep: str, seed: int) -> None:
    every = candidates(sizes, seed)
    selections = select(every, count, keep, str(seed))
    assert len(selections) == min(count, len(every)) == len(set(uids(selections)))
    assert all(selection.reason for selection in selections)
    assert [selection.candidate.index for selection in selections] == sorted(
        selection.candidate.index for selection in selections
    )
    mixed = list(every)
    random.Random(seed).shuffle(mixed)
    again = select(mixed, count, keep, str(seed))
    assert {selection.candidate.uid: (selection.reason, selection.weight) for selection in again} == {
        selection.candidate.uid: (selection.reason, selection.weight) for selection in selections
    }


@given(st.integers(2, 8), st.integers(2, 30), st.integers(0, 5), st.integers(2, 6))
def test_half_are_whole_groups_by_chance(size: int, groups: int, seed: int, group_count: int) -> None:
    every = candidates([size] * groups, seed)
    count = group_count * size
    selections = select(every, count, "groups", str(seed))
    by_lot = [selection for selection in selections if selection.weight is not None]
    if count >= len(every):
        assert {selection.reason for selection in selections} == {"all"}
        return
    names = Counter(selection.candidate.group for selection in by_lot)
    assert set(names.values()) == {size} and len(names) == max(1, -(-count // 2) // size)
    # Each stands for as many as its weight says: together for all.
    assert sum(selection.weight or 0 for selection in by_lot) == pytest.approx(len(every))
    assert all(("random" in selection.reason) == (selection.weight is not None) for selection in selections)
    # What was chosen comes with its group, but for the last, for which there may be no room.
    by_group = Counter(selection.candidate.group for selection in selections)
    assert sum(members != size for members in by_group.values()) <= 1


def test_chance_is_fair() -> None:
    every = candidates([4] * 10)
    seen = Counter(
        selection.candidate.group
        for seed in range(400)
        for selection in select(every, 16, "groups", str(seed))
        if selection.weight
    )
    assert set(seen) == {f"g{g}" for g in range(10)}
    assert max(seen.values()) < 1.6 * min(seen.values())


def shown_candidates(**more: Any) -> list[Candidate]:
    """Twelve groups of two, in which everything happens once."""
    built = []
    for g in range(12):
        for run in range(2):
            built.append(Candidate(0, len(built), g, run, f"{g}/{run}", f"g{g}", True, 0.4 + 0.1 * run, 10))
    built[2].reward, built[4].reward = 9.0, -9.0
    built[6].reward = built[7].reward
    built[8].truncated, built[10].mismatch, built[12].tokens, built[14].error = True, 3.0, 99, True
    return built


def test_what_is_shown() -> None:
    by_uid = {selection.candidate.uid: selection.reason for selection in select(shown_candidates(), 20, "groups", "1")}
    reasons = {"1/0": "best", "2/0": "worst", "4/0": "truncated", "5/0": "mismatch", "6/0": "longest", "7/0": "error"}
    for uid, reason in reasons.items():
        assert reason in by_uid[uid].split(", ")
    assert any("zero variance" in by_uid.get(uid, "") for uid in ("3/0", "3/1"))
    mates = {uid: reason for uid, reason in by_uid.items() if reason.startswith("with ")}
    assert mates and all(f"{uid[:-1]}{1 - int(uid[-1])}" in by_uid for uid in mates)


def test_without_ids_the_first() -> None:
    every = candidates([3, 3], has_id=False)
    assert uids(select(every, 2, "auto", "1")) == ["0/0", "0/1"]
    assert {selection.reason for selection in select(every, 2, "auto", "1")} == {"first"}
    assert len(uids(select(every, 2, "groups", "1"))) == 2


def test_the_first_are_of_every_rank() -> None:
    every = [Candidate(rank, i, 0, i, f"{rank}{i}", "g", False, None, 1) for rank in range(3) for i in range(5)]
    assert uids(select(every, 6, "first", "1")) == ["00", "01", "10", "11", "20", "21"]


def test_a_function_of_ones_own() -> None:
    every = candidates([2, 2])
    longest = lambda some, count: sorted(((candidate, "long") for candidate in some), key=lambda pair: -pair[0].tokens)  # noqa: E731
    selections = select(every, 1, longest, "1")
    assert (
        selections[0].candidate.tokens == max(candidate.tokens for candidate in every)
        and selections[0].reason == "long"
    )
    assert uids(select(every, 3, lambda some, count: some[:2], "1")) == ["0/0", "0/1"]
    with pytest.raises(ValueError, match="keep: got 3"):
        select(every, 1, lambda some, count: [3], "1")
