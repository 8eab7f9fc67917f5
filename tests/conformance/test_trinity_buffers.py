"""Trinity-RFT's cases for trainer batches, queues, SQL buffers, sample strategies, selectors, metrics and the viewer.

Each is run against what Rollbook has in its place, or is in `NOT_COVERED` with the reason why there is nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rollbook
from rollbook import EID, Experience, Experiences
from rollbook.book import Book, Mix, Part
from rollbook.book.consumer import MaxSize, MaxUses
from rollbook.book.sampler import EasyToHard, First, Item, Last, NewestPolicy, Priority
from rollbook.compat import verl
from rollbook.train import AlgorithmConfig, Prompts
from rollbook.train.rows import TrainRows
from tests.conformance.algorithms import decoded

CASES = {case["id"]: case for case in json.loads((Path(__file__).parent / "buffers_trinity.json").read_text())["cases"]}
NOT_COVERED = {
    "sql_order_replay": "no sampler takes the least used and among these the newest; `Priority` takes the oldest first",
    "sel_difficulty_greedy": "prompts are not selected by estimated difficulty; `drop_constant_groups` filters groups",
    "sel_difficulty_update": "as sel_difficulty_greedy",
    "metrics_agg": "metrics are numbers by name; suffixes of names do not select an aggregation",
    "metrics_run": "as metrics_agg",
    "vis_format": "`rollbook show` and the viewer print tokens in formats of their own",
    "vis_items": "as vis_format",
}
TESTED = {
    *("batch_two", "batch_trailing_masked_reward", "batch_dpo", "batch_one_missing_reward_drops_all"),
    *("prio_limit", "queue_evict", "queue_ties", "queue_reuse", "queue_timeout_loss", "sql_order", "sql_staleness"),
    *("staleness_bound", "mix_split", "mix_rows", "sel_sequential", "sel_easy2hard", "sel_seq_overflow"),
    "sel_shuffle_overflow",
}


def test_every_case_is_tested_or_has_a_reason() -> None:
    assert CASES.keys() == TESTED | NOT_COVERED.keys() and not TESTED & NOT_COVERED.keys()


# --- batches of verl's trainer --------------------------------------------------------------------------------------


@pytest.fixture
def data_proto(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for verl, as the cases were made with."""
    proto = SimpleNamespace(from_dict=lambda tensors, non_tensors: SimpleNamespace(batch=tensors, rows=non_tensors))
    monkeypatch.setattr(verl, "import_package", lambda *names: SimpleNamespace(DataProto=proto))


def check_batch(data: Any, expected: dict[str, Any]) -> None:
    for name, tensor in decoded(expected).items():
        assert torch.equal(data.batch[name], tensor) and data.batch[name].dtype == tensor.dtype, name


@pytest.mark.usefixtures("data_proto")
def test_batch_two() -> None:
    inputs, expected = CASES["batch_two"]["inputs"], CASES["batch_two"]["expected"]
    records = [
        Experience(**fields, eid=EID.parse(uid), reward=reward, info={"model_version": version})
        for fields, uid, reward, version in zip(
            inputs["exps"], expected["non_tensor"]["unique_ids"], (1.0, -1.0), expected["meta"]["model_versions"],
            strict=True,
        )
    ]  # fmt: skip
    data = verl.to_verl(records, pad_token_id=0, mask_dtype=torch.bool)
    check_batch(data, expected["batch"])
    for name, rows in (*expected["non_tensor"].items(), ("model_versions", expected["meta"]["model_versions"])):
        assert data.rows[name].tolist() == rows


@pytest.mark.usefixtures("data_proto")
def test_batch_trailing_masked_reward() -> None:
    record = Experience(**CASES["batch_trailing_masked_reward"]["inputs"])
    scores = verl.to_verl([record], pad_token_id=0).batch["token_level_scores"]
    assert scores.tolist() == [[0.0, 5.0, 0.0]], "on the last action token, not on the tool's"


@pytest.mark.usefixtures("data_proto")
def test_batch_dpo() -> None:
    case = CASES["batch_dpo"]
    data = verl.to_verl([Experience(**case["inputs"], eid=EID(1, 2))], pad_token_id=0, mask_dtype=torch.bool)
    check_batch(data, case["expected"]["batch"])
    assert data.rows["uid"].tolist() == case["expected"]["uid"]


@pytest.mark.usefixtures("data_proto")
def test_batch_one_missing_reward() -> None:
    records = [Experience(tokens=[1, 2], logprobs=[0.0], reward=1.0), Experience(tokens=[3, 4], logprobs=[0.0])]
    with pytest.raises(ValueError, match="reward"):
        verl.to_verl(records, pad_token_id=0)


# --- queues and SQL -------------------------------------------------------------------------------------------------


def make_book(rewards: list[float], versions: list[int | None] | None = None, **settings: Any) -> Book:
    """A book with a record for each reward, appended one by one."""
    book = rollbook.open("memory:")
    book.consumer(create=True, change=True, **settings)
    for reward, version in zip(rewards, versions or [None] * len(rewards), strict=True):
        book.append(Experience(tokens=[1, 2], reward=reward, policy_versions=version))
    return book


def read(book: Book, count: int, column: str = "reward", **options: Any) -> list[Any]:
    with book.lease(count, **options) as lease:
        values = lease.experiences.values(column)
        lease.ack()
    return values


def test_prio_limit() -> None:
    case = CASES["prio_limit"]
    sampler = Priority("decay_limit_randomization", decay=2.0, limit=3, sigma=0.0)
    items = [Item(seq=0, version=version, uses=uses) for version, uses in case["inputs"]]
    assert [[-sampler.rank(item, {}), sampler.reuse(item)[0]] for item in items] == case["expected"]


def test_queue_evict_and_ties() -> None:
    case = CASES["queue_evict"]
    removers = [MaxSize(3, drop="worst"), MaxUses(1)]
    book = make_book([0.0] * len(case["inputs"]), case["inputs"], sampler=Priority(), removers=removers)
    assert read(book, 3, "policy_versions") == case["expected"]
    case = CASES["queue_ties"]
    book = make_book(case["inputs"], [0] * 3, sampler=Priority(), removers=[MaxSize(2, drop="worst"), MaxUses(1)])
    assert read(book, 2) == case["expected"]


def test_queue_reuse() -> None:
    case = CASES["queue_reuse"]
    book = make_book([0.0] * 4, case["inputs"], sampler=Priority(decay=0.6), removers=[MaxSize(4), MaxUses(None)])
    versions = [read(book, 1, "policy_versions")[0] for _ in range(12)]
    assert [[v, versions[: i + 1].count(v)] for i, v in enumerate(versions)] == case["expected"]


def test_queue_timeout_loses_nothing() -> None:
    book = make_book([1.0, 2.0])
    with book.lease(4, timeout=0.01) as lease:
        assert len(lease) == 2 and lease.short
        lease.nack("too few")
    assert read(book, 2) == [1.0, 2.0]


def test_sql_order() -> None:
    case = CASES["sql_order"]
    book = make_book(case["inputs"], sampler=Last())
    assert [read(book, 2), read(book, 2)] == case["expected"] and not book.lease(1)


def test_sql_staleness() -> None:
    book = make_book([float(v) for v in range(6)], list(range(6)), sampler=NewestPolicy())
    book.announce(5)
    assert read(book, 6, max_staleness=1) == CASES["sql_staleness"]["expected"]


# --- sample strategies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(5))
def test_staleness_bound(number: int) -> None:
    """As in 0.5.2; 0.6.0 allows one version more."""
    case = CASES["staleness_bound"]
    step, limit = case["inputs"][number]
    book = make_book([0.0] * (step + 1), list(range(step + 1)), sampler=First())
    book.announce(step)
    versions = read(book, step + 1, "policy_versions", max_staleness=None if limit == "unset" else limit)
    assert versions == list(range(case["expected"]["v0_5_2"][number], step + 1))


def test_mix_split() -> None:
    """The odd record goes to the parts in turn; Trinity gives it to the expert's. A share of 0 is refused."""
    case = CASES["mix_split"]
    for (count, ratio), expected in zip(case["inputs"], case["expected"], strict=True):
        books = [make_book([0.0] * 20), make_book([0.0] * 20)]
        if not 0 < ratio < 1:
            with pytest.raises(ValueError, match="share: got 0.0"):
                Mix([Part(books[0], 1 - ratio), Part(books[1], ratio)])
            continue
        mix = Mix([Part(books[0], 1 - ratio), Part(books[1], ratio)])
        sizes = []
        for _ in range(2):
            with mix.lease(count) as lease:
                sizes.append([len(part) for part in lease.leases])
                lease.ack()
        assert sizes == ([expected, expected] if count != 7 else [expected[::-1], expected])


def test_mix_rows() -> None:
    case = CASES["mix_rows"]
    fields = {name: case["inputs"][name] for name in ("tokens", "prompt_length", "reward")}
    usual = Experience(**fields, logprobs=[-1.0, -2.0], advantages=[1.0, 1.0])
    rows = TrainRows.from_records(
        Experiences([usual, Experience(**fields)]),
        AlgorithmConfig.preset("mix", kl_coef=0.0),
        expert=[row["info"]["is_expert"] for row in case["expected"]],
    )
    assert rows.expert == [False, True]
    assert rows.records[0].advantages.tolist() == [1.0, 1.0] and rows.records[0].old_logprobs.tolist() == [-1.0, -2.0]
    assert rows.records[1].advantages.tolist() == case["expected"][1]["advantages"]
    assert rows.records[1].old_logprobs.tolist() == case["expected"][1]["logprobs"]


# --- selectors ------------------------------------------------------------------------------------------------------


def numbered(**options: Any) -> Prompts:
    return Prompts([str(i) for i in range(10)], **options)


def take(prompts: Prompts, count: int) -> list[int]:
    return [int(prompt.text or "") for prompt in prompts.take(count, step=1)]


def test_sequential_selection() -> None:
    prompts = numbered(shuffle=False)
    assert [take(prompts, 4) for _ in range(4)] == CASES["sel_sequential"]["expected"]
    overflow = take(numbered(shuffle=False), 23)
    assert overflow == [i % 10 for i in range(23)], "into the third epoch: no index is out of range"


def test_shuffled_selection() -> None:
    selected = take(numbered(seed=42), 23)
    assert sorted(selected[:10]) == sorted(selected[10:20]) == list(range(10)), "every epoch has every prompt"
    assert len(selected) == 23 and selected[:10] != selected[10:20], "none is left out; Trinity returns 20"


def test_easy_to_hard() -> None:
    """Records, as prompts have no such order: each is used once, where Trinity starts over."""
    book = rollbook.open("memory:")
    book.consumer(create=True, change=True, sampler=EasyToHard(key="info.f1"))
    book.append([Experience(tokens=[1, 2], reward=float(i), info={"f1": i / 10}) for i in range(10)])
    expected = CASES["sel_easy2hard"]["expected"]
    assert [read(book, 4), read(book, 4), read(book, 4)] == [expected[0], expected[1], expected[2][:2]]
