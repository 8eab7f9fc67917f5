"""Groups: whole ones, counted in runs, with those that failed, were filtered or came too late for the policy."""

from __future__ import annotations

import pytest

import rollbook
from rollbook.book import EasyToHard, Last, MaxUses, NewestPolicy, Priority, Proportional
from rollbook.core.ids import EID
from tests.book.records import Clock, check, group, numbers, record, records, take


def test_a_group_is_offered_when_it_is_complete(url: str) -> None:
    with rollbook.open(url) as book:
        first, second = group("a", 4, size=4), group("b", 2, size=2)
        book.append(first[:3])
        assert book.lease(1, by="group").short == "asked for 1, got 0: no more groups were complete"
        book.append([*second, first[3]])
        lease = book.lease(2, by="group")
        assert not lease.short
        # First in, by the group's first record; its members together, in order.
        assert lease.uids == [row.eid.uid for row in (*first, *second)]
        assert lease.ack() == 6
        check(book)


def test_runs_are_counted_not_rows(url: str) -> None:
    with rollbook.open(url) as book:
        steps = [record("a", 0, step=step, suffix=f"{step}", group_size=2) for step in range(3)]
        book.append(steps)
        book.append(record("a", 0, step=1, suffix="branch", group_size=2))
        assert not book.lease(1, by="group")
        book.append(record("a", 1, suffix="x", group_size=2))
        assert len(book.lease(1, by="group")) == 5
        check(book)


def test_failed_runs_count(url: str) -> None:
    with rollbook.open(url) as book:
        rows = group("a", 4, size=4)
        book.append(rows[:2])
        book.fail(rows[2].eid, "out of memory")
        assert not book.lease(1, by="group")
        book.fail([rows[3].eid], group_size=4)
        lease = book.lease(1, by="group")
        assert lease.uids == [row.eid.uid for row in rows[:2]]
        assert book.counts().dropped == {"failed": 1, "out of memory": 1}
        assert book.history(rows[2].eid)[-1].reason == "out of memory"
        check(book)


def test_a_group_of_failures_alone_is_never_offered(url: str) -> None:
    with rollbook.open(url) as book:
        book.fail([row.eid for row in group("a", 2)], group_size=2)
        assert not book.lease(1, by="group")
        assert book.counts().dropped == {"failed": 2}
        check(book)


def test_the_size_may_come_with_a_failure_or_the_settings(url: str) -> None:
    with rollbook.open(url, group_size=3) as book:
        book.append(group("a", 2))
        assert not book.lease(1, by="group")
        book.fail(EID(batch=0, task="a", run=2))
        assert len(book.lease(1, by="group")) == 2
        # What records say of their own group goes before the settings.
        book.append(group("b", 2, size=2))
        assert len(book.lease(1, by="group")) == 2


def test_filtered_members_count(url: str) -> None:
    with rollbook.open(url) as book:
        rows = group("a", 3, size=3)
        book.append(rows[:2])
        assert book.drop(rows[0], "too long") == 1
        assert book.drop(rows[0], "too long") == 0
        book.append(rows[2])
        assert book.lease(1, by="group").uids == [rows[1].eid.uid, rows[2].eid.uid]
        assert book.counts().dropped == {"too long": 1}
        with pytest.raises(KeyError, match="'unknown'"):
            book.drop("unknown")
        with pytest.raises(ValueError, match="reason"):
            book.drop(rows[1], "")
        check(book)


def test_dropping_for_one_consumer(url: str) -> None:
    with rollbook.open(url) as book:
        book.consumer("other", create=True)
        rows = group("a", 2, size=2)
        book.append(rows)
        assert book.drop(rows[0], consumer="other") == 1
        assert len(book.lease(1, by="group")) == 2
        assert len(book.lease(1, by="group", consumer="other")) == 1
        check(book)


def test_stale_members_count(url: str) -> None:
    with rollbook.open(url, max_staleness=1) as book:
        book.announce(5)
        rows = [record("a", run, suffix="s", group_size=3, policy_versions=v) for run, v in enumerate([5, 3, 4])]
        assert book.append(rows).stale == 1
        assert book.lease(1, by="group").uids == [rows[0].eid.uid, rows[2].eid.uid]
        assert book.counts().dropped == {"stale": 1}
        check(book)


def test_deleted_members_count(url: str) -> None:
    with rollbook.open(url) as book:
        rows = group("a", 2, size=2)
        book.append(rows[0])
        book.delete(rows[0], author="ana")
        book.append(rows[1])
        assert book.lease(1, by="group").uids == [rows[1].eid.uid]
        check(book)


def test_partial_groups_after_a_deadline(url: str) -> None:
    clock = Clock()
    with rollbook.open(url, clock=clock, partial_after=60.0) as book:
        rows = group("a", 4, size=4)
        book.append(rows[0])
        clock.now += 40
        book.append(rows[1])  # The time counts from the first.
        assert not book.lease(1, by="group")
        clock.now += 20
        book.append(group("b", 1, size=1))
        lease = book.lease(2, by="group")
        assert len(lease) == 3 and lease.partial == ["0/a"]
        assert lease.short == "1 of 2 groups are partial, since partial_after has passed: 0/a"
        lease.ack()
        book.append(rows[2])
        assert len(take(book, 1, by="group")) == 1
        book.append(rows[3])
        lease = book.lease(2, by="group")
        assert len(lease) == 1 and not lease.partial and "partial" not in lease.short
        assert not book.lease(1, by="group")
        check(book)


def test_waiting_sees_a_deadline(url: str) -> None:
    with rollbook.open(url, partial_after=0.1) as book:
        book.append(group("a", 1, size=2))
        assert len(book.lease(1, by="group", timeout=60)) == 1


def test_default_ids_are_groups_of_their_own(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(3))
        assert numbers(book.lease(2, by="group")) == [0, 1]
        rows = book.sql("select gid, uid from experiences").rows()
        assert all(gid == uid for gid, uid in rows)


def test_a_group_of_unknown_size_is_what_there_is_of_it(url: str) -> None:
    with rollbook.open(url) as book:
        rows = group("a", 3)
        book.append(rows[:2])
        assert len(take(book, 1, by="group")) == 2
        book.append(rows[2])
        assert len(take(book, 1, by="group")) == 1


def test_a_late_member_is_offered_when_the_others_are_back(url: str) -> None:
    with rollbook.open(url) as book:
        rows = [record("a", run, suffix=f"{run}{step}", step=step, group_size=2) for run in (0, 1) for step in (0, 1)]
        book.append(rows[:3])
        lease = book.lease(1, by="group")
        assert len(lease) == 3
        book.append(rows[3])
        assert not book.lease(1, by="group")  # Some of the group is leased.
        lease.nack()
        assert len(take(book, 1, by="group")) == 4
        check(book)


def test_a_group_that_is_given_back_or_expires_is_offered_whole(url: str) -> None:
    clock = Clock()
    with rollbook.open(url, clock=clock) as book:
        book.append([*group("a", 2, size=2), *group("b", 2, size=2)])
        lease = book.lease(1, by="group", seconds=5)
        lease.ack(uids=lease.uids[:1])
        clock.now += 6
        assert [uid.split("/")[1] for uid in book.lease(2, by="group").uids] == ["a", "b", "b"]
        check(book)


def test_groups_and_consumers_that_come_later(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(group("a", 2, size=3))
        assert not book.lease(1, by="group", consumer="later", create=True)
        book.append(record("a", 2, suffix="s", group_size=3))
        assert len(book.lease(1, by="group", consumer="later")) == 3
        assert len(book.lease(1, by="group")) == 3
        check(book)


def test_the_order_of_groups(url: str) -> None:
    with rollbook.open(url, sampler=EasyToHard()) as book:
        for name, sampler in (("last", Last()), ("newest", NewestPolicy()), ("priority", Priority())):
            book.consumer(name, create=True, sampler=sampler)
        rewards = {"a": (0.0, 0.5), "b": (1.0, 0.5), "c": (0.25, 0.5)}
        versions = {"a": 3, "b": 1, "c": 2}
        for task, group_rewards in rewards.items():
            book.append(
                [
                    record(task, run, suffix="s", group_size=2, reward=reward, policy_versions=versions[task])
                    for run, reward in enumerate(group_rewards)
                ]
            )

        def order(consumer: str) -> str:
            return "".join(uid.split("/")[1] for uid in book.lease(9, by="group", consumer=consumer).uids[::2])

        assert [order(name) for name in ("train", "last", "newest", "priority")] == ["bca", "cba", "acb", "acb"]
        check(book)


def test_a_revised_reward_moves_its_group(url: str) -> None:
    with rollbook.open(url, sampler=EasyToHard()) as book:
        book.consumer("proportional", create=True, sampler=Proportional(alpha=1.0, beta=1.0))
        book.append([*group("a", 1, size=1, reward=0.5), *group("b", 1, size=1, reward=0.25)])
        for name in ("train", "proportional"):
            book.lease(2, by="group", consumer=name).nack()
        book.revise("0/b/0/0/s", reward=2.0, author="ana")
        assert book.lease(2, by="group").uids == ["0/b/0/0/s", "0/a/0/0/s"]
        lease = book.lease(2, by="group", consumer="proportional")
        weights = dict(zip(lease.uids, lease.weights or [], strict=True))
        assert weights == pytest.approx({"0/a/0/0/s": 1.0, "0/b/0/0/s": 0.25})
        check(book)


def test_groups_that_are_used_again(url: str) -> None:
    with rollbook.open(url, removers=MaxUses(2)) as book:
        book.append([*group("a", 2, size=2), *group("b", 2, size=2)])
        leased = ["".join(uid[2] for uid in [e.eid.uid for e in take(book, 1, by="group")]) for _ in range(4)]
        assert sorted(leased) == ["aa", "aa", "bb", "bb"]
        assert not book.lease(1, by="group")
        check(book)
