"""Weighted sums, recipes by label, and LightRFT's reward functions, label maps and recipes."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.compat.lightrft.rewards import lightrft_reward
from rollbook.rewards import (
    CombinedReward,
    FunctionReward,
    Recipe,
    Reward,
    RewardInput,
    RewardResult,
    as_reward,
)
from tests.rewards import helpers
from tests.rewards.helpers import as_told, sample, samples


class Counting(torch.nn.Module):
    """Scores a sequence with its sum, and keeps what it was asked."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.scored: list[list[int]] = []

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        self.scored += [row[mask.bool()].tolist() for row, mask in zip(sequences, attention_mask, strict=True)]
        return self.scale * (sequences * attention_mask).sum(-1)


def with_ids(label: str, *ids: int, **more: Any) -> RewardInput:
    return sample("r", label=label, prompt_ids=[], response_ids=list(ids), **more)


def same(left: list[float], right: list[float]) -> bool:
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(left, right, strict=True))


NAN = math.nan

# --- sums -----------------------------------------------------------------------------------------------------------


def test_a_list_is_a_weighted_sum_with_metrics() -> None:
    def right(response: str, reference: str) -> float:
        return float(response == reference)

    def parts(response: str) -> dict[str, float]:
        return {"reward": 0.5, "words": len(response.split())}

    reward = as_reward([right, parts], weights=[2.0, 1.0])
    scores = reward([sample("a b", reference="a b"), sample("c", reference="d")])
    assert scores.rewards == [2.5, 0.5]
    assert scores.metrics == {"right": [1.0, 0.0], "parts": [0.5, 0.5], "parts/words": [2.0, 1.0]}
    assert scores.parts == ("right", "parts")  # and the words are only logged
    assert asyncio.run(reward.score_async([sample("c", reference="d")])).rewards == [0.5]


def test_a_part_that_fails_takes_the_reward_but_not_the_metrics() -> None:
    reward = as_reward([as_told, lambda response: 1.0], names=["told", "one"])
    scores = reward(samples("3", "raise"))
    assert same(scores.rewards, [4.0, NAN]) and scores.metrics["one"] == [1.0, 1.0]
    assert scores.errors == [None, f"told: as_told: {helpers.RAISED}"]
    looked_at = as_reward([as_told, lambda response: 1.0], names=["told", "one"], weights=[0, 1])
    assert looked_at(samples("3", "raise")).rewards == [1.0, 1.0]


def test_names_and_weights_are_checked() -> None:
    reward = FunctionReward(as_told)
    for options, message in [
        ({"weights": [1.0, 2.0]}, "weights: got 2, expected 1"),
        ({"weights": {"b": 1.0}}, "unknown component 'b'"),
        ({"weights": {}}, "missing for 'a'"),
        ({"weights": [math.nan]}, "weight of 'a'"),
        ({"weights": [1.0], "combine": sum}, "beside combine"),
    ]:
        with pytest.raises(ValueError, match=message):
            CombinedReward({"a": reward}, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names: got"):
        as_reward([as_told, as_told], names=["a", "a"])
    assert list(as_reward([as_told, as_told, reward])(samples("1")).metrics) == [
        "as_told0",
        "as_told1",
        "FunctionReward",
    ]


def test_combine_replaces_the_sum() -> None:
    def least(rewards: list[torch.Tensor]) -> torch.Tensor:
        assert [r.dtype for r in rewards] == [torch.float32] * 2
        return torch.stack(rewards).amin(0)

    scores = as_reward([as_told, lambda response: 2.0], combine=least, names=["a", "b"])(samples("1", "5", "raise"))
    assert same(scores.rewards, [1.0, 2.0, NAN])
    with pytest.raises(ValueError, match="gave 1 scores, expected 2"):
        as_reward([as_told, as_told], combine=lambda rewards: [1.0])(samples("1", "5"))


def test_parts_that_wait_run_side_by_side() -> None:
    class Waits(Reward):
        waits = True

        def __call__(self, inputs: Any) -> RewardResult:
            together.wait()
            return RewardResult(rewards=[1.0] * len(inputs))

    together = threading.Barrier(8, timeout=30)  # breaks unless all are there at once
    assert CombinedReward({str(i): Waits() for i in range(8)})(samples("a")).rewards == [8.0]


def test_what_is_no_reward_is_refused() -> None:
    for wrong, message in [
        (None, "got None"),
        ([], "an empty list"),
        (3, "got int"),
        ("no.such", "expected a URL"),
        ("math:cosinus", "has no function 'cosinus'"),
        ([as_told, None], "got None"),
    ]:
        with pytest.raises(ValueError, match=message):
            as_reward(wrong)
    with pytest.raises(ValueError, match="cannot be combined with a FunctionReward"):
        as_reward(FunctionReward(as_told), workers=2)
    with pytest.raises(ValueError, match="option 'wrkers' is not one of FunctionReward"):
        as_reward(as_told, wrkers=2)
    with pytest.raises(ValueError, match="'wrkers' is not one of any reward"):
        as_reward([as_told, as_told], wrkers=2)


def test_texts_name_functions() -> None:
    assert as_reward("tests.rewards.helpers:as_told")(samples("3")).rewards == [3.0]
    assert as_reward("exact_match")([sample("A", reference="a")]).rewards == [1.0]


# --- recipes --------------------------------------------------------------------------------------------------------


def test_each_label_has_its_own_components_and_models_see_only_theirs() -> None:
    value, safety = Counting(), Counting(scale=10.0)
    recipe = {
        "value": [("model", "value", 1.0), ("rule", "long", 0.5)],
        "safe": [("model", "safety", 0.1)],
        "gsm8k_rule": [("gsm8k_rule", None, 1.0)],
        "both": [("model", "value", 1.0), ("model", "safety", 0.0)],
    }
    reward = Recipe(
        recipe,
        functions={"long": lambda response: len(response), "gsm8k_rule": lambda response, reference: 7},
        models=[safety, value],
        label_map={"safety": 0, "value": 1},
    )
    inputs = [with_ids("value", 1, 2), with_ids("safe", 3), with_ids("gsm8k_rule", 4), with_ids("both", 5)]
    scores = reward(inputs)
    assert scores.rewards == [3.5, 3.0, 7.0, 5.0]
    assert same(scores.metrics["value"], [3.0, NAN, NAN, 5.0])
    assert same(scores.metrics["safety"], [NAN, 30.0, NAN, 50.0])
    assert same(scores.metrics["long"], [1.0, NAN, NAN, NAN])
    assert same(scores.metrics["gsm8k_rule"], [NAN, NAN, 7.0, NAN])
    assert sorted(value.scored) == [[1, 2], [5]] and sorted(safety.scored) == [[3], [5]]
    again = asyncio.run(reward.score_async(inputs))
    assert again.rewards == scores.rewards
    assert set(reward(inputs[1:2]).metrics) == set(scores.metrics)


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=12), st.randoms())
def test_a_recipe_does_not_depend_on_order(labels: list[str], random: Any) -> None:
    recipe = Recipe(
        {"a": [("f", 1.0)], "b": [("f", 2.0), ("g", None, -1.0)], "c": [("g", 0.5), ("g", 0.5)]},
        functions={"f": lambda response: len(response), "g": lambda response: float(ord(response[0]))},
    )
    inputs = [sample("xyz"[: 1 + i % 3], label=label) for i, label in enumerate(labels)]
    order = list(range(len(inputs)))
    random.shuffle(order)
    straight, mixed = recipe(inputs), recipe([inputs[i] for i in order])
    assert [straight.rewards[i] for i in order] == mixed.rewards
    for reward_input, reward in zip(inputs, straight.rewards, strict=True):
        f, g = float(len(reward_input.response)), float(ord(reward_input.response[0]))
        assert reward == {"a": f, "b": 2 * f - g, "c": g}[reward_input.label]


@pytest.mark.parametrize("label", ["valu", None, 3, ["value"]])
def test_an_unknown_label_is_an_error_before_anything_runs(label: Any) -> None:
    ran: list[str] = []
    recipe = Recipe({"value": [("f", 1.0)]}, functions={"f": lambda response: ran.append(response) or 1.0})
    with pytest.raises(ValueError, match=r"label: got .* which the recipe does not have"):
        recipe([sample("a", label="value"), sample("b", label=label)])
    assert ran == []


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"a": [("format", None, 1.0), ("acuracy", None, 1.0)]}, "function 'acuracy'.*did you mean 'accuracy'"),
        ({"a": [("model", "valu", 1.0)]}, "model 'valu'.*did you mean 'value'"),
        ({"a": [("model", None, 1.0)]}, "a model without a key"),
        ({"a": [("modle", "value", 1.0)]}, "'modle' with key 'value'"),
        ({"a": [("format", None, "1")]}, "weight of 'format'"),
        ({"a": [("format", None, math.nan)]}, "weight of 'format'"),
        ({"a": ["format"]}, r"expected \(type, key, weight\)"),
        ({"a": []}, "no components"),
        ({}, "expected {label"),
        ({"a": [("model", "value", 1.0), ("rule", "value", 1.0)]}, "'value' as a model and a function"),
    ],
)
def test_an_unknown_component_is_an_error_at_construction(recipe: Any, message: str) -> None:
    functions = {"format": as_told, "accuracy": as_told, "value": as_told}
    with pytest.raises(ValueError, match=message):
        Recipe(recipe, functions=functions, models={"value": Counting()})


def test_models_need_keys() -> None:
    lines = {"a": [("model", "value", 1.0)]}
    with pytest.raises(ValueError, match="or label_map"):
        Recipe(lines, models=[Counting()])
    with pytest.raises(ValueError, match=r"label_map\['value'\]: got 3, expected an index below 1"):
        Recipe(lines, models=[Counting()], label_map={"value": 3})
    with pytest.raises(ValueError, match="there are none"):
        Recipe(lines, label_map={"value": 0})


def test_a_recipe_by_as_reward_with_ready_functions() -> None:
    lines = {"gsm8k_rule": [("boxed_match", None, 0.9), ("think_boxed_format", None, 0.1)]}
    reward = as_reward(lines, time_limit=5.0)
    right, bare, wrong = r"<think>x</think> \boxed{72}", r"\boxed{72}", "72"
    scores = reward([sample(text, reference="72", label="gsm8k_rule") for text in (right, bare, wrong)])
    assert scores.rewards == [1.0, 0.9, 0.0]
    assert scores.metrics["think_boxed_format"] == [1.0, 0.0, 0.0]


def test_a_failing_component_is_recorded_on_its_samples() -> None:
    recipe = Recipe({"a": [("told", 1.0)], "b": [("one", 1.0)]}, functions={"told": as_told, "one": lambda response: 1})
    scores = recipe([sample("raise", label="a"), sample("raise", label="b"), sample("2", label="a")])
    assert same(scores.rewards, [NAN, 1.0, 2.0])
    assert scores.errors == [f"told: as_told: {helpers.RAISED}", None, None]


# --- LightRFT's form ------------------------------------------------------------------------------------------------


def mixed(
    model_reward_list: list[torch.Tensor], labels: Any, queries: Any, refs: Any, label_map: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A reward function as LightRFT's examples have them."""
    right = torch.tensor([float(query == ref) for query, ref in zip(queries, refs, strict=True)])
    total = right.clone()
    for scores in model_reward_list:
        assert scores.dtype == torch.float32 and scores.shape == right.shape
        total += scores
    return total, {"accuracy_reward": right, "model_reward": total - right}


def test_rules_alone_see_the_response_alone() -> None:
    seen: dict[str, Any] = {}

    def reward_fn(**arguments: Any) -> Any:
        seen.update(arguments)
        return mixed(**arguments)

    prompt = r"put it in \boxed{} after <think> </think>: "
    inputs = [sample("4", prompt=prompt, reference="4", label="gsm8k_rule"), sample("5", reference="4", label="x")]
    scores = lightrft_reward([], reward_fn)(inputs)
    assert scores.rewards == [1.0, 0.0] and scores.metrics["accuracy_reward"] == [1.0, 0.0]
    assert seen["queries"] == ["4", "5"] and seen["refs"] == ["4", "4"] and seen["model_reward_list"] == []
    assert seen["labels"] == ["gsm8k_rule", "x"] and seen["label_map"] == {}


def test_models_run_where_the_recipe_needs_them() -> None:
    value, safety = Counting(), Counting(scale=10.0)
    recipe = {"value": [("model", "value", 1.0)], "safety": [("model", "safety", 1.0)], "rule": [("rule", None, 1.0)]}
    label_map = {"value": 0, "safety": 1, "general": 2}  # LightRFT's has a key for a model that is not there
    reward = lightrft_reward([value, safety], mixed, label_map, recipe)
    scores = reward([with_ids("value", 1), with_ids("safety", 2), with_ids("rule", 3, reference="r")])
    assert scores.rewards == [1.0, 20.0, 1.0]
    assert (value.scored, safety.scored) == ([[1]], [[2]])
    assert asyncio.run(reward.score_async([with_ids("value", 4)])).rewards == [4.0]
    with pytest.raises(ValueError, match="label: got 'valu'"):
        reward([with_ids("valu", 1)])


def test_a_recipe_that_asks_for_a_model_that_is_not_there() -> None:
    recipe = {"value": [("model", "value", 1.0)], "safety": [("model", "safety", 1.0)]}
    reward = lightrft_reward([Counting()], mixed, {"value": 0, "safety": 1}, recipe)
    assert reward([with_ids("value", 1)]).rewards == [1.0]  # a label of the recipe that the data do not have
    with pytest.raises(ValueError, match="got model 'safety', expected one of the models"):
        reward([with_ids("safety", 1)])


def test_one_model_is_its_own_score() -> None:
    assert lightrft_reward(Counting())([with_ids("x", 1, 2)]).rewards == [3.0]
    assert lightrft_reward(Counting(), mixed)([with_ids("x", 1, 2)]).rewards == [3.0]
    with pytest.raises(ValueError, match="expected a function that combines them"):
        lightrft_reward([Counting(), Counting()])
    with pytest.raises(ValueError, match="got None without a reward_fn"):
        lightrft_reward(None)


def test_what_a_reward_fn_gives_is_checked() -> None:
    def short(**arguments: Any) -> Any:
        return torch.zeros(1), {}

    def unnumbered(**arguments: Any) -> Any:
        return [1, math.nan], {"m": torch.tensor([1, 2])}

    inputs = samples("a", "b")
    with pytest.raises(ValueError, match="gave 1 scores, expected 2"):
        lightrft_reward([], short)(inputs)
    scores = lightrft_reward([], unnumbered)(inputs)
    assert same(scores.rewards, [1.0, NAN]) and scores.metrics["m"] == [1.0, 2.0]
    assert scores.errors[1] == "reward_fn: gave nan, expected a finite number"


def test_a_model_without_a_score_is_a_sample_without_a_reward() -> None:
    reward = lightrft_reward([Counting(scale=math.inf), Counting()], mixed, {"a": 0, "b": 1})
    scores = reward([with_ids("x", 1), with_ids("x", 2)])
    assert all(map(math.isnan, scores.rewards)) and "gave inf" in (scores.errors[0] or "")
