"""Samplers: what chance, order and turns promise, seen through books and through the rank functions themselves.

Chance is tested with fixed seeds: a test that passes once passes always. `too_far` bounds how far counts may be from
what was expected: a sampler that is right passes it for all but one seed in thousands.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbook
from rollbook.book import (
    Balanced,
    Book,
    EasyToHard,
    First,
    Last,
    MaxUses,
    NewestPolicy,
    Priority,
    Proportional,
    Uniform,
)
from rollbook.book.sampler import Item, hash_uniform

FOREVER = MaxUses(None)


def record(i: int, *, task: Any = None, run: int = 0, reward: float | None = None, **info: Any) -> rollbook.Experience:
    eid = {"batch": 0, "task": i if task is None else task, "run": run, "step": i, "suffix": "s"}
    return rollbook.Experience(eid=eid, tokens=[1, 2, i], reward=reward, info=info)


def too_far(observed: Sequence[float], expected: Sequence[float]) -> bool:
    """Pearson's statistic against its bound at one in 3,000 (Wilson and Hilferty's approximation)."""
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(observed) - 1
    part = 2 / (9 * freedom)
    return statistic > freedom * (1 - part + 3.4 * math.sqrt(part)) ** 3


def draws(book: Book, count: int, by: str = "experience") -> list[Any]:
    """The tasks of one draw after another, each acknowledged."""
    tasks = []
    for _ in range(count):
        with book.lease(1, by=by) as lease:
            tasks.append(lease.experiences[0].eid.task)
            lease.ack()
    return tasks


# --- chance -------------------------------------------------------------------------------------------------------


def test_chance_is_even_and_follows_from_its_parts() -> None:
    numbers = [hash_uniform(7, i, 0) for i in range(20_000)]
    tenths = Counter(int(10 * value) for value in numbers)
    assert not too_far([tenths[i] for i in range(10)], [2000.0] * 10)
    # Next numbers, seeds and uses do not go together.
    for others in ([hash_uniform(7, i + 1, 0) for i in range(20_000)], [hash_uniform(8, i, 0) for i in range(20_000)]):
        pairs = Counter((int(5 * a), int(5 * b)) for a, b in zip(numbers, others, strict=True))
        assert not too_far([pairs[i, j] for i in range(5) for j in range(5)], [800.0] * 25)


@pytest.mark.parametrize("by", ["experience", "group"])
def test_uniform_draws_with_replacement(by: str) -> None:
    with rollbook.open("memory:", sampler=Uniform(), removers=FOREVER, seed=11) as book:
        book.append([record(i) for i in range(6)])
        tasks = draws(book, 720, by)
    counts = Counter(tasks)
    assert not too_far([counts[i] for i in range(6)], [120.0] * 6)
    pairs = Counter(itertools.pairwise(tasks))
    assert not too_far([pairs[i, j] for i in range(6) for j in range(6)], [719 / 36] * 36)


@pytest.mark.parametrize("by", ["experience", "group"])
def test_proportional_draws_with_replacement(by: str) -> None:
    sampler = Proportional(alpha=0.5)
    with rollbook.open("memory:", sampler=sampler, removers=FOREVER, seed=5) as book:
        book.append([record(i, reward=float((i + 1) ** 2)) for i in range(5)])
        counts = Counter(draws(book, 720, by))
    assert not too_far([counts[i] for i in range(5)], [720 * (i + 1) / 15 for i in range(5)])


def test_the_first_draws_without_replacement() -> None:
    """Many seeds, one draw of two each: the pairs are those of drawing one after the other."""
    weights = [1.0, 2.0, 5.0]
    counts: Counter[tuple[int, ...]] = Counter()
    sampler = Proportional(alpha=1.0)
    for seed in range(6000):
        ranks = {i: sampler.rank(Item(seq=i, seed=seed, value=w), {}) for i, w in enumerate(weights)}
        counts[tuple(sorted(ranks, key=ranks.__getitem__)[:2])] += 1
    keys = [(i, j) for i in range(3) for j in range(3) if i != j]
    expected = [6000 * weights[i] / 8 * weights[j] / (8 - weights[i]) for i, j in keys]
    assert not too_far([counts[key] for key in keys], expected)


class Race:
    """Adds up how often each kind of item should have been drawn, and how often it was."""

    def __init__(self) -> None:
        self.expected: Counter[str] = Counter()
        self.spread: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    def drawn(self, kind_of: dict[Any, str], weights: dict[Any, float], chosen: Any) -> None:
        total = sum(weights.values())
        for kind in set(kind_of.values()):
            odds = sum(weight for key, weight in weights.items() if kind_of[key] == kind) / total
            self.expected[kind] += odds
            self.spread[kind] += odds * (1 - odds)
        self.seen[kind_of[chosen]] += 1

    def distances(self) -> dict[str, float]:
        """In standard deviations. Draws are fair one by one, given all before: these are all near 0."""
        return {
            kind: (self.seen[kind] - self.expected[kind]) / math.sqrt(self.spread[kind])
            for kind in self.expected
            if self.spread[kind] > 5
        }


@pytest.mark.parametrize("sampler", [Uniform(), Proportional(alpha=1.0)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_early_late_used_and_changed_items_race_on_equal_terms(sampler: Any, seed: int) -> None:
    """Through the rank functions alone, for many draws: arrivals, uses and new numbers between them."""
    dice = random.Random(seed)
    state: dict[str, Any] = {}
    waiting: dict[int, tuple[float, Item]] = {}
    kinds: dict[int, str] = {}
    race = Race()

    def offer(item: Item, kind: str) -> None:
        waiting[item.seq] = sampler.rank(item, state), item
        kinds[item.seq] = kind

    numbers = iter(range(10**9))
    for _ in range(12):
        offer(Item(next(numbers), seed, value=dice.choice([1.0, 4.0])), "early")
    for _ in range(12_000):
        chosen = min(waiting, key=lambda seq: (waiting[seq][0], seq))
        weights = {seq: sampler.weight(item) for seq, (_, item) in waiting.items()}
        race.drawn({seq: kinds[seq] for seq in waiting}, weights, chosen)
        rank, item = waiting.pop(chosen)
        sampler.record_lease(rank, state)
        if dice.random() < 0.8:
            offer(Item(item.seq, seed, item.uses + 1, value=item.value), "used")
        while len(waiting) < 12:
            offer(Item(next(numbers), seed, value=dice.choice([1.0, 4.0])), "late")
        if dice.random() < 0.5:
            # Ranked again with another number, long after it was offered.
            item = waiting[dice.choice(sorted(waiting))][1]
            offer(Item(item.seq, seed, item.uses, value=dice.choice([1.0, 4.0])), "changed")
    distances = race.distances()
    assert {"used", "late", "changed"} <= set(distances)
    assert all(abs(distance) < 3.6 for distance in distances.values()), distances


@pytest.mark.parametrize("by", ["experience", "group"])
def test_arrivals_uses_and_revisions_in_a_book(by: str) -> None:
    """The same in a book, where priorities change with acknowledgements and revisions."""
    dice = random.Random(4)
    race = Race()
    values: dict[int, float] = {}
    kinds: dict[int, str] = {}
    with rollbook.open("memory:", sampler=Proportional(alpha=1.0), removers=FOREVER, seed=9) as book:

        def bring(count: int, kind: str) -> None:
            rows = [record(len(values) + i, reward=dice.choice([1.0, 4.0])) for i in range(count)]
            values.update({row.eid.task: row.reward for row in rows})
            kinds.update({row.eid.task: kind for row in rows})
            book.append(rows)

        bring(6, "early")
        for turn in range(500):
            lease = book.lease(1, by=by)
            task = lease.experiences[0].eid.task
            race.drawn(kinds, values, task)
            values[task] = dice.choice([1.0, 4.0])
            lease.ack(priorities={lease.uids[0]: values[task]})
            kinds[task] = "used"
            if turn % 40 == 0:
                bring(1, "late")
            if turn % 2 == 0:
                task = dice.choice(sorted(values))
                values[task] = dice.choice([1.5, 3.0, 5.0])
                book.revise(record(task).eid, reward=values[task], author="judge")
                kinds[task] = "changed"
    distances = race.distances()
    assert {"used", "changed"} <= set(distances)
    assert all(abs(distance) < 3.6 for distance in distances.values()), distances


@pytest.mark.parametrize("by", ["experience", "group"])
@pytest.mark.parametrize("sampler", [Uniform(), Proportional(), Balanced()])
def test_what_is_given_back_keeps_its_place(sampler: Any, by: str) -> None:
    with rollbook.open("memory:", sampler=sampler, seed=3) as book:
        book.append([record(i, reward=i / 8) for i in range(8)])
        for _ in range(4):
            first = book.lease(2, by=by)
            uids = first.uids
            first.nack()
            with book.lease(2, by=by) as lease:
                assert lease.uids == uids
                lease.ack()


# --- importance weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["experience", "group"])
@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.4), (1.0, 1.0), (0.0, 0.5), (2.0, 0.0)])
def test_importance_weights(alpha: float, beta: float, by: str) -> None:
    rewards = [0.0, -3.0, 0.5, None, 2.0, 7.0, 1e-9, 0.25]
    sampler = Proportional(alpha=alpha, beta=beta, default=1.5, least=0.01)
    with rollbook.open("memory:", sampler=sampler, seed=1) as book:
        book.append([record(i, reward=reward) for i, reward in enumerate(rewards)])
        sizes = [max(1.5 if reward is None else abs(reward), 0.01) ** alpha for reward in rewards]
        left = dict(enumerate(sizes))
        while left:
            lease = book.lease(3, by=by)
            tasks = [row.eid.task for row in lease]
            odds = [left[task] / sum(left.values()) for task in tasks]
            plain = [(1 / (len(left) * p)) ** beta for p in odds]
            assert lease.weights == pytest.approx([weight / max(plain) for weight in plain])
            assert lease.batch(pad_token_id=0).extra["weights"].tolist() == pytest.approx(lease.weights)
            lease.ack()
            for task in tasks:
                del left[task]
        assert book.lease(1).weights == []


def test_no_importance_weights_without_priorities() -> None:
    with rollbook.open("memory:", sampler=Uniform()) as book:
        book.append(record(0))
        assert book.lease(1).weights is None


def test_priorities_of_an_acknowledgement_hold_from_then_on() -> None:
    with rollbook.open("memory:", sampler=Proportional(alpha=1.0), removers=FOREVER, seed=2) as book:
        book.append([record(i, reward=1.0) for i in range(4)])
        lease = book.lease(4)
        lease.ack(priorities={uid: float(i**2) for i, uid in enumerate(sorted(lease.uids))})
        lease = book.lease(4)
        sizes = dict(zip(sorted(lease.uids), [1e-6, 1.0, 4.0, 9.0], strict=True))
        raw = [(14 / (4 * sizes[uid])) ** 0.4 for uid in lease.uids]
        assert lease.weights == pytest.approx([value / max(raw) for value in raw], rel=1e-6)


# --- the same sequence --------------------------------------------------------------------------------------------

SAMPLERS = [
    First(),
    Last(),
    NewestPolicy(),
    Uniform(),
    Proportional(),
    Priority(decay=0.6),
    Priority("decay_limit_randomization", sigma=1.5, limit=3, cooldown=2.0),
    EasyToHard(),
    Balanced(),
]


def life(opened: Callable[[], Book], by: str, end: Callable[[Book, int], Book]) -> list[list[str]]:
    """What is leased in a busy run of 12 turns; `end` may put another book in the place of one, between turns."""
    dice = random.Random(0)
    book = opened()
    leased = []
    for turn in range(12):
        book.append(
            [
                record(
                    100 * turn + i,
                    task=f"{turn}.{i // 2}",
                    run=i % 2,
                    reward=dice.choice([0.0, 0.4, 1.0]),
                    model_version=turn,
                )
                for i in range(4)
            ]
        )
        lease = book.lease(2, by=by)
        leased.append(lease.uids)
        if turn % 4 == 3:
            lease.nack()
        else:
            lease.ack()
        if turn % 3 == 2:
            book.revise(lease.uids[0], reward=dice.choice([0.1, 0.3, 0.9]), author="judge", retrain=turn == 8)
        book = end(book, turn)
    book.close()
    return leased


@pytest.mark.parametrize("by", ["experience", "group"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_a_restart_goes_on_with_the_same_sequence(sampler: Any, by: str, tmp_path: Path) -> None:
    now = [1000.0]
    settings = {"sampler": sampler, "removers": (MaxUses(2),), "group_size": 2, "seed": 6}

    def opened(url: str, **options: Any) -> Book:
        return rollbook.open(url, clock=lambda: now[0], **options)

    def wait(book: Book, turn: int) -> Book:
        now[0] += 1
        return book

    def restart(book: Book, turn: int) -> Book:
        now[0] += 1
        if turn in (4, 9):
            book.close()
            # With the same settings or with none named: it is the same consumer.
            return opened(str(tmp_path / "book"), **(settings if turn == 4 else {}))
        return book

    straight = life(lambda: opened("memory:", **settings), by, wait)
    now[0] = 1000.0
    broken = life(lambda: opened(str(tmp_path / "book"), **settings), by, restart)
    assert straight == broken
    assert all(straight)


@pytest.mark.parametrize("by", ["experience", "group"])
def test_another_seed_is_another_sequence(by: str) -> None:
    for sampler in (Uniform(), Proportional(), Priority("decay_limit_randomization", sigma=1.5)):
        sequences = []
        for seed in (0, 0, 1):
            new_book = lambda seed=seed: rollbook.open("memory:", sampler=sampler, group_size=2, seed=seed)  # noqa: B023, E731
            sequences.append(life(new_book, by, lambda book, turn: book))
        assert sequences[0] == sequences[1] != sequences[2], sampler


def test_two_consumers_draw_on_their_own() -> None:
    with rollbook.open("memory:", sampler=Uniform(), seed=1) as book:
        book.consumer("other", create=True, sampler=Uniform(), seed=2)
        book.consumer("same", create=True, sampler=Uniform(), seed=1)
        book.append([record(i) for i in range(30)])
        first, other, same = (book.lease(30, consumer=name).uids for name in ("train", "other", "same"))
        assert first == same != other and sorted(first) == sorted(other)


# --- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "times"), [(1, 1), (2, 2), (3, 3)])
def test_a_limit_is_how_often_a_record_is_delivered(limit: int, times: int) -> None:
    with rollbook.open("memory:", sampler=Priority("decay_limit_randomization", limit=limit)) as book:
        book.append([record(v, model_version=v) for v in range(3)])
        assert Counter(draws(book, 3 * times)) == {0: times, 1: times, 2: times}
        assert not book.lease(1) and book.counts().trained == 3


def test_without_a_limit_a_record_is_delivered_for_ever() -> None:
    for sampler in (Priority(limit=1), Priority("decay_limit_randomization", limit=0)):
        with rollbook.open("memory:", sampler=sampler) as book:
            book.append(record(0, model_version=0))
            assert draws(book, 30) == [0] * 30


def test_a_record_rests_after_use() -> None:
    now = [1000.0]
    with rollbook.open("memory:", clock=lambda: now[0], sampler=Priority(cooldown=10.0)) as book:
        book.append([record(0, model_version=9), record(1, model_version=0)])
        assert draws(book, 2) == [0, 1]
        assert not book.lease(2) and book.counts().waiting == 2
        now[0] += 9.5
        assert not book.lease(2)
        now[0] += 0.5
        assert [row.eid.task for row in book.lease(2)] == [0, 1]


def test_noise_is_normal_and_seeded() -> None:
    sampler = Priority("decay_limit_randomization", sigma=2.0)
    noise = [-sampler.rank(Item(seq=i, seed=3, version=5), {}) - 5 for i in range(8000)]
    assert noise == [-sampler.rank(Item(seq=i, seed=3, version=5), {}) - 5 for i in range(8000)]
    cuts = [-math.inf, -1.0, -0.5, 0.0, 0.5, 1.0, math.inf]

    def below(x: float) -> float:
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    expected = [8000 * (below(b) - below(a)) for a, b in itertools.pairwise(cuts)]
    seen = [sum(a <= x / 2 < b for x in noise) for a, b in itertools.pairwise(cuts)]
    assert not too_far(seen, expected)
    assert sampler.rank(Item(seq=0, seed=4), {}) != sampler.rank(Item(seq=0, seed=3), {})
    assert sampler.rank(Item(seq=0, seed=3, uses=1), {}) + 2 != sampler.rank(Item(seq=0, seed=3), {})


def tasks_in_order(sampler: Any, records: Iterable[rollbook.Experience], by: str = "experience") -> list[Any]:
    with rollbook.open("memory:", sampler=sampler) as book:
        book.append(list(records))
        return list(dict.fromkeys(row.eid.task for row in book.lease(99, by=by)))


@pytest.mark.parametrize("by", ["experience", "group"])
def test_orders(by: str) -> None:
    versions = [2, 5, None, 5, 1]
    records = [record(i) if v is None else record(i, model_version=v) for i, v in enumerate(versions)]
    assert tasks_in_order(First(), records, by) == [0, 1, 2, 3, 4]
    assert tasks_in_order(Last(), records, by) == [4, 3, 2, 1, 0]
    assert tasks_in_order(NewestPolicy(), records, by) == [1, 3, 0, 4, 2]
    rewards = [0.5, None, math.nan, 1.0, -2.0, 0.5]
    records = [record(i, reward=reward) for i, reward in enumerate(rewards)]
    assert tasks_in_order(EasyToHard(), records, by) == [3, 0, 5, 4, 1, 2]
    assert tasks_in_order(EasyToHard(ascending=True), records, by) == [4, 0, 5, 3, 1, 2]
    assert tasks_in_order(
        EasyToHard(key="info.level", ascending=True), [record(i, level=-i) for i in range(3)], by
    ) == [
        2,
        1,
        0,
    ]


def test_groups_go_by_the_mean_of_what_waits() -> None:
    with rollbook.open("memory:", sampler=EasyToHard(), group_size=2) as book:
        book.append([record(i, task="ab"[i // 2], run=i % 2, reward=r) for i, r in enumerate([0.2, 0.4, 0.3, 0.5])])
        lease = book.lease(1, by="group")
        assert {row.eid.task for row in lease} == {"b"}
        lease.nack()
        # A late reward moves a group that is ready already, and one that was leased when it came.
        book.revise(record(0, task="a").eid, reward=0.9, author="ana")
        lease = book.lease(1, by="group")
        assert {row.eid.task for row in lease} == {"a"}
        book.revise(record(0, task="a").eid, reward=0.0, author="ana")
        lease.nack()
        assert {row.eid.task for row in book.lease(1, by="group")} == {"b"}


def test_a_revision_while_leased_counts_when_the_record_is_given_back() -> None:
    with rollbook.open("memory:", sampler=EasyToHard()) as book:
        book.append([record(0, reward=1.0), record(1, reward=0.5)])
        lease = book.lease(1)
        assert lease.experiences[0].eid.task == 0
        book.revise(record(0).eid, reward=0.1, author="ana")
        lease.nack()
        assert [row.eid.task for row in book.lease(2)] == [1, 0]


# --- balance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["experience", "group"])
def test_a_batch_holds_every_band_alike(by: str) -> None:
    rewards = [0.0] * 12 + [0.3] * 6 + [0.6] * 4 + [1.0] * 3
    with rollbook.open("memory:", sampler=Balanced()) as book:
        book.append([record(i, reward=reward) for i, reward in enumerate(rewards)])
        for batch in range(3):
            with book.lease(4, by=by) as lease:
                assert lease.experiences.values("reward") == [0.0, 0.3, 0.6, 1.0], batch
                lease.ack()
        # The hardest are used up: the others go on in turn.
        assert [row.reward for row in book.lease(6, by=by)] == [0.0, 0.3, 0.6, 0.0, 0.3, 0.0]


def test_a_band_that_was_empty_does_not_catch_up() -> None:
    with rollbook.open("memory:", sampler=Balanced(edges=(0.5,))) as book:
        book.append([record(i, reward=0.0) for i in range(20)])
        with book.lease(10) as lease:
            lease.ack()
        book.append([record(i, reward=1.0) for i in range(20, 40)])
        assert [row.reward for row in book.lease(8)].count(1.0) == 4


def test_bands_and_unknown_numbers() -> None:
    sampler = Balanced(edges=(0.0, 1.0))
    ranks = [sampler.rank(Item(seq=i, value=v), {}) for i, v in enumerate([-1.0, 0.0, 0.5, 1.0, 9.0, None, math.nan])]
    assert ranks == [1.0, 1.25, 1.25, 1.5, 1.5, 1.75, 1.75]
    assert Balanced(edges=()).rank(Item(seq=0, value=0.3), {}) == 1.0


# --- any numbers --------------------------------------------------------------------------------------------------

ANY = st.none() | st.floats()
ITEMS = st.builds(
    Item,
    seq=st.integers(0, (1 << 63) - 1),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    uses=st.integers(0, 1 << 40),
    version=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    value=ANY,
)
PARTS = st.one_of(
    st.sampled_from([First(), Last(), NewestPolicy(), Uniform()]),
    st.builds(
        Proportional,
        alpha=st.floats(0, 100),
        default=st.floats(min_value=0),
        least=st.floats(min_value=0, exclude_min=True),
    ),
    st.builds(
        Priority,
        st.sampled_from(["linear_decay", "decay_limit_randomization"]),
        decay=st.floats(-1e100, 1e100),
        sigma=st.floats(0, 1e100),
    ),
    st.builds(EasyToHard, ascending=st.booleans()),
    st.builds(Balanced, edges=st.lists(st.floats(allow_nan=False), unique=True).map(lambda e: tuple(sorted(e)))),
)


@given(sampler=PARTS, items=st.lists(ITEMS, min_size=1, max_size=6))
def test_every_item_has_a_rank(sampler: Any, items: list[Item]) -> None:
    """Whatever the numbers: no NaN, which no order has a place for, and weights that can be divided by."""
    state: dict[str, Any] = {}
    for item in items:
        weight = sampler.weight(item)
        assert 0 < weight < math.inf and 0 < 1 / weight < math.inf
        rank = sampler.rank(item, state)
        assert isinstance(rank, float) and not math.isnan(rank)
        if isinstance(sampler, (Uniform, Proportional)):
            assert state.get("clock", 0.0) <= rank < math.inf
        if math.isfinite(rank):
            sampler.record_lease(rank, state)
        again, rest = sampler.reuse(item)
        assert again in (True, False) and 0 <= rest < math.inf


@given(
    values=st.lists(ANY, min_size=2, max_size=5),
    alpha=st.floats(0, 100),
    least=st.floats(min_value=0, exclude_min=True),
)
def test_a_larger_priority_is_never_less_likely(values: list[float | None], alpha: float, least: float) -> None:
    sampler = Proportional(alpha=alpha, least=least)
    priorities = sorted(abs(value) for value in values if value is not None and not math.isnan(value))
    weights = [sampler.weight(Item(seq=0, value=value)) for value in priorities]
    assert weights == sorted(weights)


@pytest.mark.parametrize("by", ["experience", "group"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_strange_numbers_in_a_book(sampler: Any, by: str) -> None:
    values = [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.0, None]
    with rollbook.open("memory:", sampler=sampler) as book:
        book.append([record(i, reward=value) for i, value in enumerate(values)])
        lease = book.lease(99, by=by)
        assert sorted(row.eid.task for row in lease) == list(range(8))
        assert lease.weights is None or all(0 < weight <= 1 for weight in lease.weights)
        lease.nack()
        assert len(book.lease(99, by=by)) == 8 and book.counts().adds_up
