"""A book served by a Ray actor, on a real local cluster."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollbook
from rollbook import Experience, Experiences
from rollbook.batch.plan import PlanError
from rollbook.book import (
    BackPressureError,
    BookError,
    ConflictError,
    ConnectionLostError,
    CorruptBookError,
    LeaseLostError,
    MissingBookError,
    Mix,
    NotABookError,
    Part,
    QueryTimeoutError,
    ReadOnlyError,
    SamplesToInserts,
    StoreFullError,
    UnknownConsumerError,
    export_records,
    forget_checkpoint,
    import_records,
    read_policy_lineage,
    read_vocabulary,
    redact_records,
    remove_consumer,
    snapshot,
    trained_steps,
)
from rollbook.book.rollouts import (
    append_rollouts,
    claim_rollouts,
    open_rollouts,
    renew_claims,
    report_worker,
    set_limit,
)
from rollbook.rollout.server import ServerError
from rollbook.train.checkpoint import CorruptCheckpointError
from rollbook.train.config import ConfigError
from tests.book.records import check, group, record, records

ray = pytest.importorskip("ray")
from rollbook.book import ray as served  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "book")


@pytest.fixture
def book(folder: str, request: pytest.FixtureRequest) -> Iterator[served.RayBook]:
    name = f"b{abs(hash(request.node.name)) % 10**9}"
    book = rollbook.open(f"ray://{name}", over=folder)
    assert isinstance(book, served.RayBook)
    yield book
    if not book.closed:
        book.stop()


@pytest.fixture(scope="module")
def shared(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> served.RayBook:
    """A book for several tests: the start of an actor takes seconds."""
    book = rollbook.open("ray://shared", over=tmp_path_factory.mktemp("shared") / "book")
    assert isinstance(book, served.RayBook)
    return book


def kill(book: served.RayBook) -> None:
    """End the process of the actor as a crash does."""
    os.kill(book.call_actor("ping", group="control"), signal.SIGKILL)


def rich_records() -> list[Experience]:
    image = np.random.default_rng(0).integers(0, 255, (80, 80, 3), dtype=np.uint8)
    return [
        Experience(
            eid=rollbook.EID(batch=1, task=i // 2, run=i % 2),
            tokens=[1, 2, 3, 4, 5, 6],
            prompt_length=2,
            action_mask=[True, False, True, True],
            logprobs=[-0.1, -0.2, -0.3, -0.4],
            reward=i / 4,
            advantages=[0.5, 0.5, 0.5, 0.5],
            info={"level": i, "nested": {"a": [1, None, "é"]}},
            metrics={"time": 0.5},
            messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
            multi_modal_inputs={"image": image, "pixels": np.ones((2, 3), np.float32)},
            group_size=2,
        )
        for i in range(8)
    ]


# --- a book as any other ----------------------------------------------------------------------------------------------


def test_records_are_the_same_as_in_the_book_itself(
    book: served.RayBook, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, *_: Any) -> Any:
        raise AssertionError("records are not pickled")

    monkeypatch.setattr(Experience, "__reduce__", refuse, raising=False)
    monkeypatch.setattr(Experience, "__reduce_ex__", refuse, raising=False)
    rich = rich_records()
    assert book.append(rich).admitted == 8
    assert book.append(iter(rich)).existing == 8
    uids = [row.eid.uid for row in rich]
    with rollbook.open(folder, "r") as direct:
        expected = direct.get(uids)
        assert book.get(rich) == expected == book.get(uids) and list(book) == list(direct)
        assert book[uids[3]] == direct[uids[3]] and uids[3] in book and "x" not in book
        conditions = (("reward", ">", 0.5), ("info.level", "<", 7))
        chosen, same = book.where(*conditions), direct.where(*conditions)
        assert chosen.count() == same.count() == 4 and chosen.uids() == same.uids()
        assert chosen.experiences() == same.experiences() and list(chosen.where(run=0)) == list(same.where(run=0))
        assert [len(batch) for batch in book.where().batches(3)] == [3, 3, 2]
        scanned = [list(opened.where().scan(["uid", "tokens", "reward"], rows=5)) for opened in (book, direct)]
        assert [batch.to_pydict() for batch in scanned[0]] == [batch.to_pydict() for batch in scanned[1]]
        query = "select uid, reward, len(tokens) n from experiences where reward > ? order by 1"
        assert book.sql(query, [0.5]).rows() == direct.sql(query, [0.5]).rows()
        assert (len(book), book.counts(), book.consumers()) == (len(direct), direct.counts(), direct.consumers())
        assert book.history(rich[0]) == direct.history(uids[0]) and book.check().ok
    lease = book.lease(2, by="group")
    assert lease.experiences == book.get(lease.uids) and lease.ack(step=3) == 4


def test_columns_are_views_of_the_object_store(shared: served.RayBook) -> None:
    book = shared
    book.append([Experience(tokens=[i] * 50_000) for i in range(4)])
    frame = served.to_frame(book.where(("length", ">", 100)).experiences())
    reference = ray.put(frame)
    first, second = (ray.get(reference) for _ in range(2))
    assert not first.flags.writeable and np.shares_memory(first, second)  # one copy for all processes of the node
    answer = ray.get(book._get_actor().call.remote("get", True, False, [book.where().uids()], {}))
    assert isinstance(answer.result, served.Packed) and not answer.result.frame.flags.owndata


def test_writing(book: served.RayBook) -> None:
    book.append(group("a", 2, size=3))
    assert book.fail(rollbook.EID(batch=0, task="a", run=2), "crash", group_size=3) == 1
    assert book.revise("0/a/0/0/s", reward=1.0, author="ana") == 1
    assert book.revise({"0/a/1/0/s": {"reward": 0.5}}, author="ana") == 1
    book.announce(4)
    assert book.policy_version == 4
    book.log(1, {"loss": 0.5})
    assert book.metrics() == [(1, {"loss": 0.5})]
    assert book.consumer("replay", create=True, max_staleness=2).max_staleness == 2
    with book.writer(delay=0.01) as writer:
        receipts = [writer.add(row) for row in records(20)]
    assert sum(receipt.result().admitted for receipt in receipts) == 20
    assert book.drop(["//0/0/0000", record(suffix="0001")], "filtered") == 4
    assert book.delete(record(suffix="0002"), author="ana") == 1
    saved = book.checkpoint()
    assert [checkpoint.name for checkpoint in book.checkpoints()] == [saved]
    assert book.lease(3).ack(step=1) == 3
    assert book.rewind(saved).acks == 3 and read_policy_lineage(book) == 1
    assert book.compact().records >= 0
    assert repr(book).startswith(f"Book('{book.url}': ") and book.url in book._repr_html_()


def test_functions_of_a_book(book: served.RayBook, tmp_path: Path) -> None:
    book.append(records(6))
    book.consumer("other", create=True)
    remove_consumer(book, "other")
    assert list(book.consumers()) == ["train"]
    saved = book.checkpoint("here")
    forget_checkpoint(book, saved)
    with pytest.raises(KeyError):
        forget_checkpoint(book, saved)
    book.lease(1).ack(step=9)
    assert trained_steps(book) == {"//0/0/0000": [9]}
    assert read_vocabulary(book) is None
    assert redact_records(book, record(suffix="0001"), ["info.i"], author="ana") == 1
    assert export_records(book, tmp_path / "all.parquet") == 6
    assert import_records(book, tmp_path / "all.parquet").existing == 6
    mix = Mix([Part(book, 0.5), Part(rollbook.open("memory:"), 0.5)])
    assert len(mix.lease(2)) == 1 and mix.balance == [0.0, 0.0]
    open_rollouts(book, {}, next=0)
    set_limit(book, 2)
    assert [claim.number for claim in claim_rollouts(book, "w", 4, seconds=60, timeout=1)] == [0, 1]
    began = time.monotonic()
    assert claim_rollouts(book, "w", 4, seconds=60, timeout=1.2) == [] and time.monotonic() - began >= 1.2
    with pytest.raises(BookError, match=r"needs the (ledger|store) of the book; open .*book directly"):
        snapshot(book, tmp_path / "copy")


def test_exceptions_are_those_of_the_book(shared: served.RayBook) -> None:
    book = shared
    book.append(record(suffix="a", reward=1.0))
    with pytest.raises(ConflictError) as caught:
        book.append(record(suffix="a", reward=2.0))
    assert type(caught.value) is ConflictError and "//0/0/a" in str(caught.value)
    for call, kind in [
        (lambda: book["x"], KeyError),
        (lambda: book.lease(1, consumer="x"), UnknownConsumerError),
        (lambda: book.lease(0), ValueError),
        (lambda: book.append([3]), ValueError),  # type: ignore[list-item]
        (lambda: book.where(("x", "=", 1)), ValueError),
        (lambda: book.sql("select x"), ValueError),
    ]:
        with pytest.raises(kind):
            call()  # type: ignore[no-untyped-call]
    for error in (
        CorruptBookError("bad", 3),
        PlanError("token_cap", "too small", 1),
        ConfigError("optimizer.lr", "got -1", "my.yaml, line 3"),
        CorruptCheckpointError(Path("x"), "no state.pt"),
        ServerError("gone", 404),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    with rollbook.open(book.url, "r") as reader:
        assert len(reader) == len(book)
        with pytest.raises(ReadOnlyError, match="append"):
            reader.append(records(1))
        with pytest.raises(ReadOnlyError, match="delete"):
            reader.delete("//0/0/a", author="ana")
        with pytest.raises(ReadOnlyError, match="remove_consumer"):
            remove_consumer(reader, "x")
        weights = served.PublishedWeights("w", 1, {}, [])
        for name, arguments in (("set_weights", [weights]), ("drop_weights", ["w"]), ("stop", [])):
            with pytest.raises(ReadOnlyError, match=f"{name}: the client opened the book for reading"):
                reader.call_actor(name, *arguments)  # type: ignore[attr-defined]
    with pytest.raises(BookError, match="closed"):
        len(reader)


# --- creation ---------------------------------------------------------------------------------------------------------


def test_creators_that_differ_get_an_error(shared: served.RayBook, tmp_path: Path) -> None:
    book, folder = shared, shared.over
    assert rollbook.open(book.url, over=folder).over == folder == rollbook.open(book.url).over
    for options, message in [
        ({"over": tmp_path / "x"}, r"over: got '.*/x', the actor serves the book with '.*/book'"),
        ({"over": folder, "quota": 5}, "quota: got 5, the actor serves the book with None"),
        ({"quota": 5}, "quota: got 5"),
        ({"tokenizer": "abc"}, "tokenizer: got 'abc', the actor serves the book with None"),
        ({"max_staleness": 3}, "max_staleness: got 3, the book has None"),
    ]:
        with pytest.raises(BookError, match=message):
            rollbook.open(book.url, **options)
    copy = pickle.loads(pickle.dumps(book))
    assert isinstance(copy, served.RayBook) and copy.url == book.url


def test_addresses_that_are_none(folder: str, tmp_path: Path) -> None:
    with pytest.raises(NotABookError, match=r"no actor of this name .* over='postgresql"):
        rollbook.open("ray://nobody")
    with pytest.raises(ValueError, match="RAY_ADDRESS"):
        rollbook.open("ray://10.0.0.1:10001", over=folder)
    for over in ("memory:", "s3://bucket/book"):
        with pytest.raises(ValueError, match="over: got .*, expected a folder or 'postgresql"):
            rollbook.open("ray://nobody", over=over)
    with pytest.raises(ValueError, match="over: got .*, expected None"):
        rollbook.open(folder, over=folder)
    with pytest.raises(NotABookError, match="there is no book here"):
        rollbook.open("ray://nobody", "r+", over=tmp_path / "none")
    assert served.find_actor("nobody") is None  # A failed opening leaves no actor.


# --- leases -----------------------------------------------------------------------------------------------------------


def test_leases_end_as_in_the_book_itself(book: served.RayBook, folder: str) -> None:
    book.append(records(6))
    with book.lease(2) as lease:
        assert lease.ack(step=1, uids=lease.uids[:1]) == 1
        assert lease.ack(step=1, uids=lease.uids[:1]) == 1  # again
        assert lease.nack() == 1
    brief = book.lease(1, seconds=0.2)
    assert brief.renew() > 0
    time.sleep(0.4)
    with pytest.raises(LeaseLostError):
        brief.ack()
    late = book.lease(9, timeout=1.3)
    assert len(late) == 5 and late.short.startswith("asked for 9, got 5")

    async def wait() -> int:
        waiting = asyncio.create_task(book.alease(1, timeout=20))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(late.nack)
        async with await waiting as lease:
            return await lease.aack(step=2)

    assert asyncio.run(wait()) == 1
    with rollbook.open(folder, "r") as direct:
        check(direct)


def test_back_pressure_of_many_writers_blocks_nobody(folder: str) -> None:
    limiter = SamplesToInserts(ratio=1.0, slack=4, lease_size=2, append_size=4)
    book = rollbook.open("ray://pressed", over=folder, limiters=limiter)
    book.append(records(4))
    with pytest.raises(BackPressureError, match="held back until the timeout"):
        book.append(records(1, start=900), timeout=0.2)
    writers = [threading.Thread(target=book.append, args=(records(1, start=10 + i),)) for i in range(60)]
    for writer in writers:
        writer.start()
    trained = 0
    while trained < 64:
        with book.lease(2, timeout=20) as lease:
            assert lease
            trained += lease.ack(step=1)
    for writer in writers:
        writer.join(20)
        assert not writer.is_alive()
    assert book.counts().trained == len(book) == 64
    book.stop()  # type: ignore[attr-defined]


def test_slow_queries_do_not_hold_up_rollout_workers(shared: served.RayBook) -> None:
    open_rollouts(shared, {}, next=0)
    set_limit(shared, 1)
    [claim] = claim_rollouts(shared, "a", 1, seconds=60)
    endless = "SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b"

    def query() -> None:
        with pytest.raises(QueryTimeoutError):
            shared.sql(endless, seconds=2)

    queries = [threading.Thread(target=query) for _ in range(served.READ_THREADS)]
    for thread in queries:
        thread.start()
    time.sleep(0.5)
    report_worker(shared, "a", state="generating")
    assert renew_claims(shared, [claim], 60) == [claim]
    assert append_rollouts(shared, claim, Experiences(records(1, start=700)))
    assert all(thread.is_alive() for thread in queries)
    for thread in queries:
        thread.join()


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_nothing_acknowledged_is_lost_in_crashes(book: served.RayBook, folder: str) -> None:
    appended: list[str] = []
    trained: list[str] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def write() -> None:
        try:
            for i in range(120):
                batch = records(4, start=4 * i)
                book.append(batch)
                appended.extend(row.eid.uid for row in batch)
                time.sleep(0.01)
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    def train() -> None:
        try:
            while not done.is_set() or book.counts().waiting:
                lease = book.lease(8, timeout=0.5)
                if lease:
                    assert len(lease.experiences) == len(lease)
                    lease.ack(step=1)
                    trained.extend(lease.uids)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write), threading.Thread(target=train)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        time.sleep(0.5)
        kill(book)
    for thread in threads:
        thread.join(60)
    assert not failures and len(appended) == 480
    assert sorted(trained) == sorted(appended)  # once each
    with rollbook.open(folder) as direct:
        assert {uid: len(steps) for uid, steps in trained_steps(direct).items()} == dict.fromkeys(appended, 1)
        assert direct.check().ok
        check(direct)


def test_a_crash_before_the_book_exists(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray restarts the actor, which then creates the book for its creator, and for nobody else."""
    create_actor = served._create_actor

    def create_and_crash(*arguments: Any) -> Any:
        actor = create_actor(*arguments)
        crashing = served.RayBook("ray://crashing")
        kill(crashing)
        with pytest.raises(MissingBookError):
            len(crashing)
        return actor

    monkeypatch.setattr(served, "_create_actor", create_and_crash)
    book = rollbook.open("ray://crashing", over=folder, max_staleness=3)
    assert book.consumers()["train"].max_staleness == 3 and Path(folder).exists()
    book.stop()  # type: ignore[attr-defined]


def test_leases_survive_a_restart(book: served.RayBook) -> None:
    book.append(records(6))
    first, second = book.lease(2), book.lease(2)
    book.put_weights("1", 7, {"model": b"weights"}, {"dtype": "float32"})
    kill(book)
    assert first.ack(step=1) == 2 and second.renew() > 0
    assert first.ack(step=1) == 2
    kill(book)
    assert second.nack() == 2
    assert book.counts().waiting == 4 and book.counts().trained == 2
    weights = book.get_weights()  # published again by the process that has them
    assert weights is not None and bytes(weights[2]["model"]) == b"weights" and weights[3] == {"dtype": "float32"}
    assert book.weights_version() == ("1", 7)


def test_a_claim_whose_answer_was_lost_is_given_back(book: served.RayBook) -> None:
    book.append([row for task in "ab" for row in group(task, 2, size=2)])
    lost = book.lease(2, by="group")
    answer = book._get_actor().call.remote("claim", False, True, [lost._request, 0.0], {"partial": True})
    claim = ray.get(answer).result
    assert claim.id != lost.fence and claim.seqs == lost._claim.seqs
    with pytest.raises(LeaseLostError):
        lost.ack(step=1)
    lease = served.RayLease(book, lost._request, claim)
    repeated = [lease._request, claim, dict(lease._remaining), True, "gone"]
    assert lease.nack() == 4
    again = ray.get(book._get_actor().call.remote("nack", False, True, repeated, {"drop": False}))
    assert again.error is None and again.result == 4
    first = ray.get(book._get_actor().call.remote("nack", False, False, repeated, {"drop": False}))
    assert isinstance(first.error, LeaseLostError)


def test_an_actor_that_does_not_come_back(book: served.RayBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "RESTART_SECONDS", 0.5)
    ray.kill(served.find_actor(book.name), no_restart=True)
    time.sleep(0.5)
    with pytest.raises(ConnectionLostError, match="cannot be reached"):
        len(book)
    book.closed = True


def test_a_full_object_store(shared: served.RayBook, monkeypatch: pytest.MonkeyPatch) -> None:
    book, before = shared, len(shared)
    attempts: list[int] = []
    put = ray.put

    def refuse(content: Any) -> Any:
        attempts.append(1)
        if len(attempts) < 3:
            raise ray.exceptions.ObjectStoreFullError("no room")
        return put(content)

    def refuse_always(content: Any) -> Any:
        raise ray.exceptions.ObjectStoreFullError("no room")

    monkeypatch.setattr(ray, "put", refuse)
    large = Experience(tokens=[1] * 50_000)
    assert book.append(large).admitted == 1 and len(attempts) == 3
    monkeypatch.setattr(served, "RESTART_SECONDS", 0.2)
    monkeypatch.setattr(ray, "put", refuse_always)
    with pytest.raises(StoreFullError, match="object store of Ray is full"):
        book.append(Experience(tokens=[2] * 50_000))
    assert len(book) == before + 1
