"""Removers and limiters: what they let go, what they hold back, and that none waits for another for ever."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbook
from rollbook.book import (
    BackPressureError,
    Balanced,
    ConsumerConfig,
    EasyToHard,
    First,
    Last,
    MaxAge,
    MaxSize,
    MaxUses,
    MinSize,
    NewestPolicy,
    Priority,
    Proportional,
    SamplesToInserts,
    Uniform,
)

# --- samples to inserts -------------------------------------------------------------------------------------------

RATIOS = st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 1.0, 1.5, 2.0, 3.0, 7.0, 16.0])


def smallest_slack(ratio: float, lease: int, append: int) -> Fraction:
    step = Fraction(repr(ratio)) * append
    return max((lease + step) / 2, step)


@given(
    ratio=RATIOS,
    lease=st.integers(1, 12),
    append=st.integers(1, 12),
    min_size=st.sampled_from([0, 0, 1, 5, 20]),
    more=st.sampled_from([0.0, 0.5, 3.0, 40.0]),
    extra_uses=st.integers(0, 2),
    seed=st.integers(0, 1 << 32),
)
def test_what_is_accepted_never_comes_to_a_standstill(
    ratio: float, lease: int, append: int, min_size: int, more: float, extra_uses: int, seed: int
) -> None:
    """Whatever the order of appends, leases and records given up, one of the two sides can always move."""
    slack = math.nextafter(float(smallest_slack(ratio, lease, append)), math.inf) + more
    part = SamplesToInserts(ratio, slack, min_size, lease, append)
    chance = random.Random(seed)
    max_uses = -int(-ratio // 1) + extra_uses
    left: list[int] = []  # the uses that are left of each record that waits
    inserts = samples = 0
    for _ in range(60):
        m, k = chance.randint(1, append), chance.randint(1, lease)
        can_append = part.inserts_left(inserts, samples) >= m
        take = min(k, len(left), part.samples_left(inserts, samples))
        assert take or part.inserts_left(inserts, samples) >= append, (inserts, samples, left)
        if can_append and (not take or chance.random() < 0.5):
            inserts += m
            left += [max_uses] * m
        elif take:
            samples += take
            chance.shuffle(left)
            left = [n - 1 for n in left[:take] if n > 1] + left[take:]
        if left and chance.random() < 0.1:  # Given up: counts on neither side.
            used = max_uses - left.pop()
            inserts, samples = inserts - 1, samples - used


@given(ratio=RATIOS, lease=st.integers(1, 64), append=st.integers(1, 64), less=st.floats(0.001, 1.0))
def test_less_slack_than_two_steps_is_refused(ratio: float, lease: int, append: int, less: float) -> None:
    slack = float(smallest_slack(ratio, lease, append))
    SamplesToInserts(ratio, slack + 1e-9, 0, lease, append)
    with pytest.raises(ValueError, match="forever; expected a slack of at least"):
        SamplesToInserts(ratio, slack * (1 - less), 0, lease, append)


def test_what_is_refused_would_have_come_to_a_standstill() -> None:
    """The first append would not fit, or both would wait."""

    def stuck(ratio: Fraction, slack: Fraction, lease: int, append: int) -> bool:
        seen, ahead = set(), [(0, 0)]
        while ahead:
            inserts, samples = ahead.pop()
            if (inserts, samples) in seen or inserts > 60:
                continue
            seen.add((inserts, samples))
            c = inserts * ratio - samples
            waiting = inserts * int(ratio) - samples
            can_append = c + append * ratio <= slack
            can_lease = c - lease >= -slack and waiting >= lease
            some = c - 1 >= -slack and waiting >= 1 and waiting < lease
            if not (can_append or can_lease or some):
                return True
            if can_append:
                ahead += [(inserts + m, samples) for m in range(1, append + 1)]
            if can_lease or some:
                ahead.append((inserts, samples + min(lease, waiting)))
        return False

    tried = 0
    for ratio in (1, 2):
        for lease in (1, 2, 5):
            for append in (1, 2, 5):
                needed = smallest_slack(ratio, lease, append)
                assert not stuck(Fraction(ratio), needed, lease, append)
                if append * ratio > lease:
                    # Nothing was handed out yet, and the largest append does not fit.
                    assert stuck(Fraction(ratio), needed - Fraction(1, 2), lease, append)
                    tried += 1
    assert tried > 5


def test_tenths_are_tenths() -> None:
    part = SamplesToInserts(ratio=0.1, slack=0.65, lease_size=1, append_size=3)
    assert part.inserts_left(0, 0) == 6
    part = SamplesToInserts(ratio=0.1, slack=2.0, lease_size=1, append_size=3)
    # 0.3 / 0.1 is 2.9999999999999996: the third append would wait for ever.
    assert part.inserts_left(17, 0) == 3 and part.inserts_left(10**15 + 17, 10**14) == 3
    assert SamplesToInserts(0.1, 0.3 + 0.7, 0, 1, 10).inserts_left(0, 0) == 10


def record(i: int, **fields: Any) -> rollbook.Experience:
    return rollbook.Experience(
        eid={"batch": 0, "task": i, "step": i, "suffix": "s"}, tokens=[1, 2, i], **{"reward": 0.5, **fields}
    )


def test_a_book_holds_back_whoever_is_ahead() -> None:
    part = SamplesToInserts(ratio=1.0, slack=4, lease_size=4, append_size=4)
    with rollbook.open("memory:", limiters=part) as book:
        book.append([record(i) for i in range(4)])
        with pytest.raises(BackPressureError, match="1 more would pass its ratio of 1 by more than 4"):
            book.append(record(4), timeout=0)
        assert len(book) == 4
        with pytest.raises(BackPressureError, match="append_size = 4"):
            book.append([record(i) for i in range(10, 20)], timeout=0)
        assert book.append([record(i, reward=1.0) for i in range(100, 120)], evaluation=True).admitted == 20
        lease = book.lease(8)
        assert len(lease) == 4
        assert book.append([record(i) for i in range(4, 8)], timeout=0).admitted == 4
        # What is given back was not handed out.
        lease.nack()
        with pytest.raises(BackPressureError):
            book.append(record(8), timeout=0)


@pytest.mark.parametrize("reason", ["drop", "nack", "attempts", "stale", "delete", "max_age"])
@pytest.mark.parametrize("uses", [0, 1])
def test_records_given_up_hold_nothing_back(reason: str, uses: int) -> None:
    """However often they were used, and wherever they were: as if they had never come."""
    now = [1000.0]
    part = SamplesToInserts(ratio=3.0, slack=12, lease_size=4, append_size=4)
    removers = (MaxUses(3), MaxAge(100.0)) if reason == "max_age" else MaxUses(3)
    settings = {"limiters": part, "removers": removers, "max_staleness": 0, "max_attempts": 1}
    with rollbook.open("memory:", clock=lambda: now[0], **settings) as book:
        for turn in range(5):
            records = [record(10 * turn + i, info={"model_version": turn}) for i in range(4)]
            assert book.append(records, timeout=0).admitted == 4, (reason, turn)
            for _ in range(uses):
                with book.lease(4) as lease:
                    assert len(lease) == 4
                    lease.ack()
            if reason == "drop":
                book.drop(records)
            elif reason == "nack":
                book.lease(4).nack(drop=True)
            elif reason == "attempts":
                book.lease(4).nack()
            elif reason == "stale":
                book.announce(turn + 1)
            elif reason == "delete":
                active = book.lease(2)
                assert len(active) == 2
                book.delete(records, author="ana")
            else:
                now[0] += 1000
                assert not book.lease(4)
            counts = book.counts()
            assert counts.adds_up and sum(counts.dropped.values()) == 4 * (turn + 1)
            with book.ledger.read() as tx:
                assert tx.first("SELECT inserts, samples FROM consumers") == (0, 0)


def test_a_record_that_returns_counts_again() -> None:
    part = SamplesToInserts(ratio=1.0, slack=4, lease_size=4, append_size=4)
    with rollbook.open("memory:", limiters=part, removers=MaxUses(2)) as book:
        records = [record(i) for i in range(4)]
        book.append(records)
        with book.lease(4) as lease:
            lease.ack()
        book.drop(records)
        book.revise(records[0], reward=1.0, author="ana", retrain=True)
        with book.ledger.read() as tx:
            assert tx.first("SELECT inserts, samples FROM consumers") == (1, 1)


def test_groups_are_handed_out_whole_within_the_ratio() -> None:
    part = SamplesToInserts(ratio=1.0, slack=4, min_size=4, lease_size=2, append_size=4)
    with rollbook.open("memory:", limiters=part, group_size=2) as book:
        for start in (0, 4):
            runs = []
            for i in range(start, start + 4):
                eid = {"batch": 0, "task": i // 2, "run": i % 2, "suffix": "s"}
                runs.append(rollbook.Experience(eid=eid, tokens=[1, i]))
            book.append(runs, timeout=0)
        # (8 - 4) * 1 + 4 records may go, whole groups of them.
        lease = book.lease(10, by="group")
        assert len(lease) == 8 and "asked for 10, got 4" in lease.short


# --- the other parts in a book ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drop", "left"), [("oldest", [3, 4, 5]), ("worst", [3, 4, 5])])
def test_max_size(drop: str, left: list[int]) -> None:
    with rollbook.open("memory:", sampler=EasyToHard(), removers=MaxSize(3, drop)) as book:
        book.append([record(i, reward=i / 10) for i in range(2)])
        book.append([record(i, reward=i / 10) for i in range(2, 6)])
        assert book.counts().dropped == {"max_size": 3}
        lease = book.lease(9)
        assert sorted(row.eid.task for row in lease) == left
        # What is leased does not wait: there is room for others, and when it comes back nothing is lost by that alone.
        book.append([record(i, reward=i / 10) for i in range(6, 9)])
        lease.nack()
        assert book.counts().waiting == 6
        book.append(record(9, reward=0.0))
        counts = book.counts()
        assert counts.waiting == 3 and counts.adds_up


def test_max_size_lets_go_of_the_worst() -> None:
    with rollbook.open("memory:", sampler=EasyToHard(), removers=MaxSize(2, "worst")) as book:
        for i, reward in enumerate([0.5, 0.9, 0.1, 0.7]):
            book.append(record(i, reward=reward))
        assert [row.reward for row in book.lease(9)] == [0.9, 0.7]


def test_max_age_is_counted_from_admission() -> None:
    now = [1000.0]
    with rollbook.open("memory:", clock=lambda: now[0], removers=MaxAge(10.0)) as book:
        book.append([record(0), record(1)])
        now[0] += 6
        book.append([record(2)])
        active = book.lease(1)
        now[0] += 4
        lease = book.lease(9)
        assert [row.eid.task for row in lease] == [2]
        assert book.counts().dropped == {"max_age": 1}
        # What is leased does not wait; once it is given back it is too old.
        active.nack()
        assert not book.lease(9)
        assert book.counts().dropped == {"max_age": 2}


def test_many_old_ones_at_once() -> None:
    now = [1000.0]
    with rollbook.open("memory:", clock=lambda: now[0], removers=MaxAge(10.0)) as book:
        book.append([record(i) for i in range(2100)])
        now[0] += 10
        book.append([record(3000)])
        assert [row.eid.task for row in book.lease(9)] == [3000]
        assert book.counts().dropped == {"max_age": 2100}


@pytest.mark.parametrize(("uses", "expected"), [(1, 1), (3, 3)])
def test_max_uses(uses: int, expected: int) -> None:
    with rollbook.open("memory:", removers=MaxUses(uses)) as book:
        book.append(record(0))
        for _ in range(expected):
            book.lease(1).nack()  # Given back is not used.
            assert book.lease(1).ack() == 1
        assert not book.lease(1) and book.counts().trained == 1


def test_min_size_counts_what_is_there_in_any_way() -> None:
    with rollbook.open("memory:", limiters=MinSize(3)) as book:
        book.append([record(0), record(1)])
        assert "MinSize waits for 3" in book.lease(1).short
        book.append(record(2))
        first = book.lease(2)
        assert len(first) == 2 and len(book.lease(2)) == 1  # Two are leased, one waits: three are there.
        first.ack()
        assert not book.lease(1)


@pytest.mark.parametrize("by", ["experience", "group"])
def test_a_bound_holds_for_what_comes_back(by: str) -> None:
    """A record that was leased, or resting, when a version was announced is too old when it comes back."""
    with rollbook.open("memory:", max_staleness=1) as book:
        book.append([record(0, info={"model_version": 1}), record(1, info={"model_version": 5})])
        active = book.lease(1)
        book.announce(5)
        active.nack()
        assert [row.eid.task for row in book.lease(2, by=by)] == [1]
        assert book.counts().dropped == {"stale": 1}


def test_a_stricter_bound_of_a_lease_holds_for_later_records_too() -> None:
    with rollbook.open("memory:", max_staleness=9) as book:
        book.announce(10)
        for i in range(3):
            book.append([record(2 * i, info={"model_version": 5}), record(2 * i + 1, info={"model_version": 10})])
            with book.lease(9, max_staleness=1) as lease:
                assert [row.eid.task for row in lease] == [2 * i + 1]
                lease.ack()
        assert book.counts().dropped == {"stale": 3}


# --- parts and settings -------------------------------------------------------------------------------------------

REFUSED = [
    (lambda: MaxSize(0), "MaxSize.size: got 0"),
    (lambda: MaxSize(2.5), "MaxSize.size: got 2.5"),
    (lambda: MaxSize(2, "newest"), "MaxSize.drop: got 'newest'"),
    (lambda: MaxAge(0.0), "MaxAge.seconds: got 0.0"),
    (lambda: MaxAge(float("nan")), "MaxAge.seconds: got nan"),
    (lambda: MaxUses(0), "MaxUses.uses: got 0"),
    (lambda: MinSize(0), "MinSize.size: got 0"),
    (lambda: SamplesToInserts(0.0, 5), "SamplesToInserts.ratio: got 0.0"),
    (lambda: SamplesToInserts(float("inf"), 5), "SamplesToInserts.ratio: got inf"),
    (lambda: SamplesToInserts(1.0, float("nan")), "SamplesToInserts.slack: got nan"),
    (lambda: SamplesToInserts(1.0, float("inf")), "SamplesToInserts.slack: got inf"),
    (lambda: SamplesToInserts(1.0, 5, -1), "SamplesToInserts.min_size: got -1"),
    (lambda: SamplesToInserts(1.0, 4.5, 0, 1, 8), "expected a slack of at least 8"),
    (lambda: Proportional(alpha=-1.0), "Proportional.alpha: got -1.0"),
    (lambda: Proportional(alpha=float("nan")), "Proportional.alpha: got nan"),
    (lambda: Proportional(beta=float("inf")), "Proportional.beta: got inf"),
    (lambda: Proportional(least=0.0), "Proportional.least: got 0.0"),
    (lambda: Proportional(least="a"), "Proportional.least: got 'a'"),
    (lambda: Uniform(key="reward"), "Uniform.key: got 'reward'"),
    (lambda: Priority(function="quadratic"), "Priority.function: got 'quadratic'"),
    (lambda: Priority(decay=float("inf")), "Priority.decay: got inf"),
    (lambda: Priority(sigma=-1.0), "Priority.sigma: got -1.0"),
    (lambda: Priority(limit=-1), "Priority.limit: got -1"),
    (lambda: Priority(cooldown=float("nan")), "Priority.cooldown: got nan"),
    (lambda: EasyToHard(ascending="no"), "EasyToHard.ascending: got 'no'"),
    (lambda: Balanced(edges=(0.5, 0.5)), "Balanced.edges: got"),
    (lambda: Balanced(edges=(0.5, float("nan"))), "Balanced.edges: got nan"),
    (lambda: ConsumerConfig(sampler="first"), "sampler: got 'first'"),
    (lambda: ConsumerConfig(sampler=EasyToHard(key="rewrd")), "key: got 'rewrd'"),
    (lambda: ConsumerConfig(sampler=Proportional(key="finish_reason")), "key: got 'finish_reason'"),
    (lambda: ConsumerConfig(sampler=Balanced(key=3)), "key: got 3"),
    (lambda: ConsumerConfig(removers=MinSize(3)), "removers: got MinSize"),
    (lambda: ConsumerConfig(limiters=MaxUses(3)), "limiters: got MaxUses"),
    (lambda: ConsumerConfig(removers=(MaxUses(3), MaxUses(4))), "MaxUses: got it twice"),
    (lambda: ConsumerConfig(limiters=(MinSize(3), MinSize(4))), "MinSize: got it twice"),
    (lambda: ConsumerConfig(max_staleness=-1), "max_staleness: got -1"),
    (lambda: ConsumerConfig(group_size=0), "group_size: got 0"),
    (lambda: ConsumerConfig(partial_after=-1.0), "partial_after: got -1.0"),
    (lambda: ConsumerConfig(lease_seconds=0.0), "lease_seconds: got 0.0"),
    (lambda: ConsumerConfig(max_attempts=0), "max_attempts: got 0"),
    (lambda: ConsumerConfig(keep_stale="yes"), "keep_stale: got 'yes'"),
    (lambda: ConsumerConfig(seed=1 << 63), "seed: got 9223372036854775808"),
    (lambda: ConsumerConfig(seed=1.5), "seed: got 1.5"),
    # Parts that could wait for each other for ever.
    (lambda: ConsumerConfig(removers=(MaxSize(5),), limiters=(MinSize(6),)), "MaxSize keeps at most 5"),
    (
        lambda: ConsumerConfig(removers=(MaxSize(5),), limiters=(SamplesToInserts(1.0, 9, 6),)),
        "MaxSize keeps at most 5",
    ),
    (lambda: ConsumerConfig(limiters=(SamplesToInserts(2.0, 9),)), "leased at most 1 time"),
    (
        lambda: ConsumerConfig(removers=(MaxUses(3),), limiters=(SamplesToInserts(4.0, 9),)),
        "leased at most 3 time",
    ),
    (
        lambda: ConsumerConfig(
            sampler=Priority("decay_limit_randomization", limit=2), limiters=(SamplesToInserts(3.0, 9),)
        ),
        "leased at most 2 time",
    ),
    (lambda: ConsumerConfig(removers=(MaxSize(3),), group_size=4), "none ever would be"),
    (lambda: ConsumerConfig(limiters=(SamplesToInserts(1.0, 9, lease_size=2),), group_size=4), "at least one group"),
    (lambda: ConsumerConfig(limiters=(SamplesToInserts(1.0, 5, lease_size=8),), group_size=8), "expected at least 8"),
    (lambda: ConsumerConfig(limiters=(SamplesToInserts(1.0, 9), MinSize(10))), "expected at least 10"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_parts_that_make_no_sense_are_refused(case: int) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value), str(caught.value)


def test_what_stays_within_the_bounds_is_accepted() -> None:
    ConsumerConfig(removers=(MaxSize(5),), limiters=(MinSize(5),))
    ConsumerConfig(removers=(MaxSize(3),), group_size=4, partial_after=60.0)
    ConsumerConfig(sampler=Priority(), limiters=(SamplesToInserts(30.0, 90),))
    ConsumerConfig(sampler=Priority("decay_limit_randomization", limit=0), limiters=(SamplesToInserts(30.0, 90),))
    ConsumerConfig(limiters=(SamplesToInserts(1.0, 8, lease_size=8),), group_size=8)
    ConsumerConfig(limiters=(SamplesToInserts(1.0, 5, lease_size=8),), group_size=8, partial_after=1.0)
    ConsumerConfig(limiters=(SamplesToInserts(1.0, 10), MinSize(10)))
    ConsumerConfig(limiters=(SamplesToInserts(1.0, 9, min_size=1), MinSize(10)))


def test_a_group_larger_than_the_slack_still_comes_together() -> None:
    """Run by run, up to the group's size: the last one is let in."""
    part = SamplesToInserts(1.0, 8, lease_size=8)
    with rollbook.open("memory:", limiters=part, group_size=8) as book:
        for turn in range(3):
            for run in range(8):
                eid = {"batch": 0, "task": turn, "run": run, "suffix": "s"}
                book.append(rollbook.Experience(eid=eid, tokens=[1, 2]), timeout=0)
            with book.lease(1, by="group") as lease:
                assert len(lease) == 8
                lease.ack()


FINITE = st.floats(-1e6, 1e6)
SAMPLERS = st.one_of(
    st.just(First()),
    st.just(Last()),
    st.just(NewestPolicy()),
    st.just(Uniform()),
    st.builds(
        Proportional,
        key=st.sampled_from(["reward", "length", "info.td", "metrics.a.b"]),
        alpha=st.floats(0, 100),
        beta=st.floats(0, 100),
        default=st.floats(0, 1e300),
        least=st.floats(1e-300, 1e10),
    ),
    st.builds(
        Priority,
        function=st.sampled_from(["linear_decay", "decay_limit_randomization"]),
        decay=FINITE,
        limit=st.integers(0, 100),
        sigma=st.floats(0, 1e6),
        cooldown=st.floats(0, 1e9),
    ),
    st.builds(EasyToHard, key=st.just("response_tokens"), ascending=st.booleans()),
    st.builds(Balanced, edges=st.lists(FINITE, unique=True).map(lambda edges: tuple(sorted(edges)))),
)


@given(
    sampler=SAMPLERS,
    uses=st.none() | st.integers(1, 99),
    size=st.none() | st.integers(10, 1000),
    age=st.none() | st.floats(1e-3, 1e9),
    least=st.none() | st.integers(1, 9),
    ratio=st.none() | st.floats(1e-3, 1.0),
    rest=st.fixed_dictionaries(
        {},
        optional={
            "max_staleness": st.none() | st.integers(0, 1 << 40),
            "keep_stale": st.booleans(),
            "group_size": st.none() | st.integers(1, 8),
            "partial_after": st.none() | st.floats(0, 1e6),
            "lease_seconds": st.floats(1e-3, 1e9),
            "max_attempts": st.none() | st.integers(1, 9),
            "seed": st.integers(-(1 << 63), (1 << 63) - 1),
        },
    ),
)
def test_settings_come_back_from_json(
    sampler: Any, uses: Any, size: Any, age: Any, least: Any, ratio: Any, rest: dict[str, Any]
) -> None:
    removers = [
        part
        for part in (MaxUses(uses), size and MaxSize(size, "worst"), age and MaxAge(age))
        if part  # each part is true, what is not there is none
    ]
    limiters = [MinSize(least)] if least else []
    if ratio is not None:
        limiters.append(SamplesToInserts(ratio, 100.0, 2, 8, 4))
    config = ConsumerConfig(sampler=sampler, removers=removers, limiters=limiters, **rest)
    text = config.to_json()
    back = ConsumerConfig.from_json(text)
    assert back == config and back.to_json() == text
    assert (back.max_uses, back.max_age, back.min_size, back.ratio) == (
        config.max_uses,
        config.max_age,
        config.min_size,
        config.ratio,
    )


def test_numbers_of_numpy_are_numbers() -> None:
    config = ConsumerConfig(
        removers=(MaxSize(np.int64(7)), MaxAge(np.float32(0.5))),
        seed=np.int32(3),
        keep_stale=np.bool_(True),
    )
    assert ConsumerConfig.from_json(config.to_json()) == config


PLAIN = json.loads(ConsumerConfig().to_json())
HOSTILE = [
    "",
    "[]",
    "null",
    "{}",
    "{" * 100,
    json.dumps({**PLAIN, "hook": "os.system"}),
    json.dumps({**PLAIN, "sampler": None}),
    json.dumps({**PLAIN, "sampler": "first"}),
    json.dumps({**PLAIN, "sampler": {"name": ["first"]}}),
    json.dumps({**PLAIN, "sampler": {"name": "ConsumerConfig"}}),
    json.dumps({**PLAIN, "sampler": {"name": "__class__"}}),
    json.dumps({**PLAIN, "sampler": {"name": "first", "key": "reward"}}),
    json.dumps({**PLAIN, "sampler": {"name": "balanced", "edges": 5, "key": "no such"}}),
    json.dumps({**PLAIN, "sampler": {"name": "balanced", "edges": ["a"]}}),
    json.dumps({**PLAIN, "sampler": {"name": "proportional", "alpha": "2"}}),
    json.dumps({**PLAIN, "sampler": {"name": "proportional", "key": ["reward"]}}),
    json.dumps({**PLAIN, "removers": {"name": "max_size", "size": 3}}),
    json.dumps({**PLAIN, "removers": [{"name": "max_size"}]}),
    json.dumps({**PLAIN, "removers": [{"name": "min_size", "size": 3}]}),
    json.dumps({**PLAIN, "removers": [["max_size", 3]]}),
    json.dumps({**PLAIN, "limiters": [{"name": "samples_to_inserts", "ratio": 1}]}),
    json.dumps({**PLAIN, "limiters": "min_size"}),
    json.dumps({**PLAIN, "seed": 1e300}),
    json.dumps({**PLAIN, "seed": None}),
    json.dumps({**PLAIN, "max_staleness": "2"}),
    json.dumps({**PLAIN, "lease_seconds": float("nan")}),
    json.dumps({key: value for key, value in PLAIN.items() if key != "sampler"}),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_settings_that_this_version_does_not_know_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        ConsumerConfig.from_json(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(name=st.sampled_from(sorted(PLAIN)), value=JSON)
def test_any_value_of_a_setting_is_taken_or_refused(name: str, value: Any) -> None:
    text = json.dumps({**PLAIN, name: value})
    try:
        config = ConsumerConfig.from_json(text)
    except ValueError:
        return
    assert ConsumerConfig.from_json(config.to_json()) == config


KINDS = ["first", "proportional", "priority", "easy_to_hard", "balanced", "max_size", "samples_to_inserts"]
OPTIONS = ["key", "alpha", "least", "edges", "limit", "ascending", "decay", "size", "ratio", "slack"]


@given(kind=st.sampled_from(KINDS), options=st.dictionaries(st.sampled_from(OPTIONS), JSON))
def test_any_options_of_a_part_are_taken_or_refused(kind: str, options: dict[str, Any]) -> None:
    part = {"name": kind, **options}
    setting = {"max_size": "removers", "samples_to_inserts": "limiters"}.get(kind, "sampler")
    try:
        config = ConsumerConfig.from_json(json.dumps({**PLAIN, setting: part if setting == "sampler" else [part]}))
    except ValueError:
        return
    assert ConsumerConfig.from_json(config.to_json()) == config
