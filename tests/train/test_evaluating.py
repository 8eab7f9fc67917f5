"""Evaluation: real engines and rewards; what fails is counted and loses nothing else; nothing of it is ever trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import rollbook
from rollbook import EID, Experience
from rollbook.rewards import RewardInput, RewardResult
from rollbook.rewards.types import Reward
from rollbook.rollout import (
    BaseEngine,
    Cancel,
    Line,
    Prompt,
    Request,
    RunInfo,
    Sample,
    ScriptedEngine,
    TransformersEngine,
)
from rollbook.train.evaluation import Evaluation, avg_at_k_interval, compare_evaluations, evaluate, evaluate_records
from tests.tiny import bytes_, llama

ASKED = ["1+1=", "2+2=", "3+3="]


def prompts() -> list[Prompt]:
    return [Prompt(text=text, reference=str(2 * int(text[0]))) for text in ASKED]


def answering(*texts: Sequence[Any]) -> ScriptedEngine:
    """An engine with an answer for each run of each prompt: a text, or a `Line`."""
    lines = [[line if isinstance(line, Line) else Line(text=line) for line in runs] for runs in texts]
    return ScriptedEngine(dict(zip(ASKED, lines, strict=True)), tokenizer=bytes_())


def right(response: str, reference: str) -> float:
    return float(response == reference)


# --- the numbers ----------------------------------------------------------------------------------------------------


def test_all_numbers_of_a_small_evaluation() -> None:
    engine = answering(["2", "2", "3", "3"], ["4", "5", "6", "4"], ["1", "1", "1", "6"])
    evaluation = evaluate(engine, prompts(), right, k=4, step=40)
    assert ["".join("-+"[ok] for ok in prompt_result.outcomes) for prompt_result in evaluation.per_prompt] == [
        "++--",
        "+--+",
        "---+",
    ]
    assert (evaluation.prompts, evaluation.k, evaluation.step, evaluation.success) == (3, 4, 40, pytest.approx(5 / 12))
    assert evaluation.interval == avg_at_k_interval(evaluation.outcomes)
    numbers = evaluation.metrics("held_out")
    assert numbers.pop("held_out/length") == pytest.approx(1.0)
    assert numbers == pytest.approx(
        {
            "held_out/avg@4": 5 / 12,
            "held_out/avg@4/low": evaluation.low,
            "held_out/avg@4/high": evaluation.high,
            "held_out/pass@1": 5 / 12,
            "held_out/pass@2": (5 / 6 + 5 / 6 + 1 / 2) / 3,
            "held_out/pass@4": 1.0,
            "held_out/maj@4": (0.5 + 1 + 0) / 3,  # a tie; the first; a wrong one
            "held_out/reward": 5 / 12,
            "held_out/truncated": 0.0,
            "held_out/failed": 0.0,
            "held_out/unscored": 0.0,
            "held_out/prompts": 3,
        }
    )
    assert [row.eid.rid for row in evaluation.records] == [
        f"eval-40/{row}/{run}" for row in range(3) for run in range(4)
    ]
    assert evaluation.records[0].reward == 1.0 and evaluation.records[0].info["reference"] == "2"


def test_a_vote_is_by_the_marked_answer_or_by_ones_own() -> None:
    engine = answering(["so \\boxed{2}", "it is \\boxed{2}", "3"], ["4", "4 ", "5"], ["7", "8", "6"])
    evaluation = evaluate(engine, prompts(), "exact_match", k=3)
    assert [prompt_result.answers for prompt_result in evaluation.per_prompt] == [
        ("2", "2", "3"),
        ("4", "4", "5"),
        ("7", "8", "6"),
    ]
    custom = evaluate(engine, prompts(), right, k=3, answer=lambda row: None if "box" in row.response_text else "same")
    assert custom.per_prompt[0].answers == (None, None, "same")
    assert custom.metrics()["eval/maj@3"] == pytest.approx((0 + 1 / 3 + 1 / 3) / 3)


@pytest.mark.parametrize(("success", "expected"), [(None, 1 / 3), (0.5, 2 / 3), (0, 1.0), (2.0, 0.0), ("close", 2 / 3)])
def test_what_counts_as_success(success: Any, expected: float) -> None:
    class Parts(Reward):
        def __call__(self, inputs: Sequence[Any]) -> RewardResult:
            rewards = [
                {"2": 0.1 + 0.2 + 0.7 - 1e-9, "5": 0.5}.get(reward_input.response, 0.0) for reward_input in inputs
            ]
            return RewardResult(rewards=rewards, metrics={"close": [float(reward >= 0.5) for reward in rewards]})

    evaluation = evaluate(answering(["2"], ["5"], ["9"]), prompts(), Parts(), success=success)
    assert evaluation.success == pytest.approx(expected)
    assert evaluation.records[0].metrics["close"] == 1.0


def test_greedy_with_one_sample_and_a_real_model() -> None:
    engine = TransformersEngine(llama(), bytes_())
    sampling = {"temperature": 0, "max_tokens": 4}
    texts = ["ab", "abc", [5, 6, 7]]
    evaluation = evaluate(engine, texts, lambda response_ids: float(len(response_ids) > 0), sampling=sampling)
    assert (evaluation.k, evaluation.success, evaluation.prompts) == (1, 1.0, 3)
    again = evaluate(engine, texts, lambda response: 0.0, sampling=sampling, seed=5)
    assert [row.tokens.tolist() for row in again.records] == [row.tokens.tolist() for row in evaluation.records]
    with pytest.warns(UserWarning, match="k: got 2 with temperature 0"):
        evaluate(engine, ["ab"], lambda response: 0.0, sampling=sampling, k=2)


def test_the_same_seed_gives_the_same_samples_whatever_else_is_asked() -> None:
    engine = TransformersEngine(llama(), bytes_())
    chosen_prompts = [Prompt(text=text, eid=EID(batch=3, task=f"row-{text}")) for text in ("ab", "cd", "ef")]
    zero: Any = lambda response: 0.0  # noqa: E731
    options: dict[str, Any] = {"k": 2, "sampling": {"max_tokens": 5}, "step": 3}
    complete = evaluate(engine, chosen_prompts, zero, seed=1, **options)
    part = evaluate(engine, chosen_prompts[1:2], zero, seed=1, **options)
    other = evaluate(engine, chosen_prompts, zero, seed=2, **options)
    assert [row.tokens.tolist() for row in complete.records[2:4]] == [row.tokens.tolist() for row in part.records]
    assert [row.eid.uid for row in complete.records[2:4]] == [row.eid.uid for row in part.records]
    assert [row.tokens.tolist() for row in complete.records] != [row.tokens.tolist() for row in other.records]
    assert part.records[0].eid.rid == "eval-3/row-cd/0"


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_samples_that_fail_or_have_no_reward_count_as_not_successful() -> None:
    def picky(response: str, reference: str) -> float:
        if response == "9":
            raise RuntimeError("unreadable")
        return right(response, reference)

    long = Line(text="2 2 2 2 2 2")
    engine = answering(["2", Line(error="out of memory")], ["9", "4"], [Line(error="refused"), long])
    evaluation = evaluate(engine, prompts(), picky, k=2, sampling={"max_tokens": 3})
    assert evaluation.outcomes == [(True, False), (False, True), (False, False)]
    assert (evaluation.failed, evaluation.unscored) == (2, 1)
    numbers = evaluation.metrics()
    assert (numbers["eval/failed"], numbers["eval/unscored"]) == pytest.approx((2 / 6, 1 / 6))
    assert numbers["eval/truncated"] == pytest.approx(1 / 6)
    assert numbers["eval/reward"] == pytest.approx(2 / 3)  # of those that have one
    assert evaluation.records[1].reward is None and evaluation.records[1].info["error"] == "out of memory"
    assert "unreadable" in evaluation.records[2].info["reward_error"] and evaluation.records[2].reward is None
    assert str(evaluation).endswith("on 3 prompts, 2 samples failed")


def test_an_engine_that_breaks_off_loses_only_what_it_owed() -> None:
    class Breaking(BaseEngine):
        run = RunInfo(engine="breaking", engine_version="1", model="none")

        def _run(self, requests: Sequence[Request], cancel: Cancel) -> Iterator[tuple[int, Sample]]:
            request = requests[0]
            yield 0, Sample(prompt=request.prompt, eid=request.eids[0], prompt_ids=[5], response_ids=[6], text="2")
            raise ConnectionError("gone")

    with rollbook.open("memory:") as book:
        evaluation = evaluate(Breaking(), prompts(), right, book=book)
        assert (evaluation.success, evaluation.failed, len(book)) == (pytest.approx(1 / 3), 2, 3)
        nothing = evaluate(answering(*[[Line(error="no")]] * 3), prompts(), right, success="close", step=1, book=book)
        assert nothing.success == 0 and math.isnan(nothing.metrics()["eval/reward"])
        assert math.isnan(nothing.metrics()["eval/length"])
        assert book.check().ok


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k: got 0"),
        ({"step": -1}, "step: got -1"),
        ({"success": "clsoe"}, "success: got 'clsoe', expected a part of the reward; did you mean 'close'"),
        ({"success": True}, "success: got True"),
        ({"success": ""}, "success: got ''"),
        ({"confidence": 95}, "confidence: got 95"),
        ({"sampling": {"temprature": 1.0}}, "did you mean 'temperature'"),
        ({"prompts": []}, "prompts: missing"),
        ({"prompts": "1+1="}, "prompts: got str, expected a list"),
        ({"prompts": [Prompt(text="1+1=", eid=EID(task=1))] * 2}, "both give run eval-0/1/0"),
        ({"reward": 3}, "reward: got int"),
    ],
)
def test_mistakes_are_refused(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"prompts": prompts(), "reward": {"close": right, "same": right}, **options}
    with pytest.raises(ValueError, match=message):
        evaluate(answering(["2"], ["4"], ["6"]), **arguments)


def test_a_reward_that_gives_too_few_scores_is_an_error() -> None:
    class Short(Reward):
        def __call__(self, inputs: Sequence[RewardInput]) -> RewardResult:
            return RewardResult(rewards=[1.0])

    with pytest.raises(ValueError, match="reward: got 1 scores back, expected 3"):
        evaluate(answering(["2"], ["4"], ["6"]), prompts(), Short())


# --- the book -------------------------------------------------------------------------------------------------------


def test_what_is_evaluated_is_in_the_book_and_never_leased() -> None:
    with rollbook.open("memory:") as book:
        engine = answering(["2", "3"], ["4", "5"], ["6", Line(error="no")])
        evaluate(engine, prompts(), right, k=2, step=40, book=book)
        counts = book.counts()
        assert (counts.evaluation, counts.admitted, counts.waiting) == (6, 0, 0)
        with book.lease(10) as lease:
            assert len(lease) == 0
        means = book.sql("select task, avg(reward) from experiences where batch = 'eval-40' group by 1 order by 1")
        assert [row[1] for row in means.rows()] == [0.5, 0.5, 1.0]  # one without a reward is in no average
        evaluate(engine, prompts(), right, k=2, step=40, book=book)
        assert len(book) == 6  # the same again is nothing new


def test_another_evaluation_of_the_same_step_is_kept_beside_the_first() -> None:
    with rollbook.open("memory:") as book:
        for texts in (["2"], ["3"], ["5"], ["3"]):
            evaluation = evaluate(answering(texts, ["4"], ["6"]), prompts(), right, step=7, book=book)
            assert [book[row.eid.uid].response_text for row in evaluation.records] == [texts[0], "4", "6"]
        assert len(book) == 9
        assert {row.eid.tid for row in book} == {"eval-7/0", "eval-7/1", "eval-7/2"}
        other = evaluate(answering(["2"], ["4"], ["6"]), prompts(), right, step=7, book=book, name="easy")
        assert other.records[0].eid.tid == "easy-7/0"
        assert book.check().ok


def test_prompts_that_number_their_rows_themselves() -> None:
    class Rows:
        def every(self, batch: str) -> list[Prompt]:
            return [prompt.replace(eid=EID(batch=batch, task=10 + i, suffix="")) for i, prompt in enumerate(prompts())]

    evaluation = evaluate(answering(["2"], ["4"], ["6"]), Rows(), right, step=5)
    assert [row.eid.rid for row in evaluation.records] == ["eval-5/10/0", "eval-5/11/0", "eval-5/12/0"]


# --- before and after -------------------------------------------------------------------------------------------------


def outcome(*texts: str, **options: Any) -> Evaluation:
    return evaluate(answering(*[[text] for text in texts]), prompts(), right, **options)


def test_a_difference_is_paired_by_prompt_whatever_the_order() -> None:
    before, after = outcome("2", "5", "5"), outcome("2", "4", "6", step=9)
    rise = compare_evaluations(before, after)
    assert rise.value == pytest.approx(2 / 3) and -1 <= rise.low < rise.value < rise.high <= 1
    turned = evaluate_records(list(after.records)[::-1], step=9)
    assert compare_evaluations(before, turned) == rise
    assert compare_evaluations(before, after, 0.5).low > rise.low


def test_other_prompts_are_not_compared() -> None:
    before = outcome("2", "5", "5")
    with pytest.raises(ValueError, match="after: got no prompt 2"):
        compare_evaluations(before, evaluate_records(list(before.records)[:2]))
    other = evaluate(ScriptedEngine([[7]]), [[1], [2], [3]], lambda response: 1.0)
    with pytest.raises(ValueError, match="prompt 0: got .* after, expected '1\\+1='"):
        compare_evaluations(before, other)


def test_records_that_others_made_are_evaluated_by_run() -> None:
    rows = [
        Experience(eid=EID("eval-1", task, run, step), tokens=[1, 2, 3, 4], prompt_length=2, reward=reward,
                   action_mask=torch.tensor([True, False]), experience_type="multi_turn")
        for task, run, step, reward in
        [(0, 0, 0, 1.0), (0, 0, 1, 1.0), (0, 1, 0, 0.0), (1, 0, 0, 1.0), (1, 1, 0, math.nan)]
    ]  # fmt: skip
    evaluation = evaluate_records(rows, step=1)
    assert evaluation.outcomes == [(True, False), (True, False)] and (evaluation.k, evaluation.unscored) == (2, 1)
    assert evaluation.metrics()["eval/length"] == 1.0  # what the model wrote
    with pytest.raises(ValueError, match="records: got 1 to 2 runs per task"):
        evaluate_records(rows[:4])
    with pytest.raises(ValueError, match="records: missing"):
        evaluate_records([])
