"""Planned passes: the same for every budget and layout, in the input's order and shape, models left as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import Experience, Experiences
from rollbook.core.ragged import Ragged
from rollbook.models import Actor, Critic, Policy, ValueModel
from rollbook.models.forward import forward
from tests import tiny
from tests.models import zoo
from tests.models.zoo import policy_log_probs, reference_log_probs, values


@pytest.fixture(scope="module")
def actor() -> Actor:
    return Actor(tiny.qwen3(), temperature=0.8)


@pytest.fixture(scope="module")
def critic() -> Critic:
    torch.manual_seed(0)
    return Critic(tiny.llama(), value_head="normal")


shapes = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20)).filter(any), min_size=1, max_size=9)


@settings(max_examples=40)
@given(shapes=shapes, budget=st.integers(1, 90), packed=st.sampled_from([None, True]), seed=st.integers(0, 99))
def test_any_budget_gives_the_same(
    actor: Actor, critic: Critic, shapes: list[tuple[int, int]], budget: int, packed: bool | None, seed: int
) -> None:
    records = zoo.records(shapes, seed=seed)
    scored = policy_log_probs(actor, records, token_budget=budget, packed=packed, entropy=True)
    assert isinstance(scored.logprobs, Ragged) and scored.logprobs.lengths.tolist() == [r for _, r in shapes]
    with torch.no_grad():
        for log_probs, entropy, record in zip(scored.logprobs, scored.entropy, records, strict=True):
            if len(log_probs):
                expected = zoo.naive(actor.model, record, 0.8)
                torch.testing.assert_close(log_probs, expected[0], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(entropy, expected[1], rtol=1e-5, atol=1e-5)
    some = [float(row.sum()) for row in values(critic, records, token_budget=budget, packed=packed).values]
    every = [float(row.sum()) for row in values(critic, records, token_budget=10**6).values]
    np.testing.assert_allclose(some, every, rtol=1e-4, atol=1e-4)


def test_the_same_budget_gives_the_same_bits(actor: Actor) -> None:
    records = zoo.records([(3, 9), (7, 4), (2, 2), (5, 5)])
    first = policy_log_probs(actor, records, token_budget=20).logprobs
    again = policy_log_probs(actor, Experiences(records), token_budget=20).logprobs
    assert np.array_equal(first.values, again.values)


def test_nothing_and_nothing_to_score(actor: Actor) -> None:
    assert len(policy_log_probs(actor, []).logprobs) == 0
    scored = policy_log_probs(actor, zoo.records([(3, 0), (2, 0)]))
    assert scored.logprobs.lengths.tolist() == [0, 0] and scored.stats["micro_batches"] == 0


def test_a_truncated_prompts_record(actor: Actor) -> None:
    record = Experience(
        tokens=[9, 10, 11, 12],
        prompt_length=4,
        logprobs=[-1.0],
        action_mask=[False],
        truncate_status="prompt_truncated",
    )
    assert policy_log_probs(actor, [record]).logprobs.lengths.tolist() == [1]


def test_a_preference_pair_is_refused(actor: Actor) -> None:
    with pytest.raises(ValueError, match="got a preference pair, expected a response"):
        policy_log_probs(actor, [Experience(tokens=[1, 2], chosen=[3], rejected=[4])])


def test_plan_and_progress(actor: Actor) -> None:
    records = zoo.records([(2, 6)] * 5 + [(10, 30), (1, 0)])
    reports: list[tuple[int, int]] = []
    scored = policy_log_probs(actor, records, token_budget=16, progress=lambda done, of: reports.append((done, of)))
    # The long record is alone; the others two by two; the one without a response is not run.
    assert scored.stats["micro_batches"] == len(reports) == 4
    assert [done for done, _ in reports] == sorted(done for done, _ in reports) and reports[-1] == (80, 80)
    assert scored.stats["tokens"] == 80 and scored.stats["slots"] == 60 and scored.stats["padding"] == 0
    assert 0 < scored.stats["forward_seconds"] <= scored.stats["seconds"]
    uneven = policy_log_probs(actor, zoo.records([(2, 6), (1, 3)]), token_budget=16)
    assert uneven.stats["padding"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 0}, "token_budget: got 0"),
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"actor": torch.nn.Linear(2, 2)}, "model: got Linear, expected an Actor"),
    ],
)
def test_bad_options(actor: Actor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_log_probs(**{"actor": actor, "data": zoo.records([(2, 2)]), **options})
    with pytest.raises(ValueError, match="model: got Actor, expected a Critic"):
        values(actor, zoo.records([(2, 2)]))


def test_no_dropout_and_no_gradients_and_modes_restored() -> None:
    model = tiny.gpt2()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5
    records = zoo.records([(3, 8), (2, 5)])
    actor, critic = Actor(model), Critic(tiny.gpt2(), value_head="normal")
    quiet = policy_log_probs(actor, records).logprobs
    actor.train(), critic.train()
    model.transformer.h[1].eval()
    before = [part.training for part in actor.modules()]
    loud = zoo.stats_of(actor, records).logprobs.values
    assert not torch.allclose(loud, quiet.tensor_of_values())  # training does drop out
    again = policy_log_probs(actor, records).logprobs
    values(critic, records)
    assert np.array_equal(again.values, quiet.values)
    assert [part.training for part in actor.modules()] == before and all(part.training for part in critic.modules())
    assert torch.is_grad_enabled() and loud.requires_grad
    # What it leaves behind can be trained with: rotary tables and the like are no inference tensors.
    (zoo.stats_of(actor, records).logprobs.values * again.tensor_of_values()).sum().backward()


def test_a_reference_of_ones_own(actor: Actor) -> None:
    records = zoo.records([(3, 4), (2, 6)])
    reference = actor.reference()
    assert np.array_equal(
        reference_log_probs(reference, records).logprobs.values, policy_log_probs(actor, records).logprobs.values
    )


# --- forward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [None, True])
def test_forward_gives_columns_by_name(actor: Actor, critic: Critic, packed: bool | None) -> None:
    records = Experiences(zoo.records([(3, 9), (7, 4), (2, 0), (0, 5), (5, 5)]))
    stats: dict[str, float] = {}
    columns = forward(actor, records, ("old_logprobs", "entropy"), token_budget=20, packed=packed, stats=stats)
    expected = policy_log_probs(actor, records, token_budget=20, packed=packed, entropy=True)
    assert list(columns) == ["old_logprobs", "entropy"] and stats.keys() == expected.stats.keys()
    for name, column in (("old_logprobs", expected.logprobs), ("entropy", expected.entropy)):
        assert columns[name].dtype == "float32" and columns[name].lengths.tolist() == [9, 4, 0, 5, 5]
        assert np.array_equal(columns[name].values, column.values)
    (state,) = forward(critic, records, ("values",), token_budget=20, packed=packed).values()
    assert np.array_equal(state.values, values(critic, records, token_budget=20, packed=packed).values.values)
    assert records.assign(old_logprobs=columns["old_logprobs"])[1].old_logprobs is not None
    assert isinstance(actor, Policy) and isinstance(critic, ValueModel) and not isinstance(critic, Policy)
    with pytest.raises(ValueError, match="outputs: got \\['values', 'entropy'\\]"):
        forward(critic, records, ("values", "entropy"))


def test_forward_is_finite_where_nothing_counts() -> None:
    """A suppressed token that a tool wrote has no probability, and is in no loss."""
    actor = Actor(tiny.llama(), suppress=(7,))
    records = Experiences([
        Experience(tokens=[3, 7, 4, 7], prompt_length=1, action_mask=[False, True, True]),
        Experience(tokens=[3, 7], prompt_length=1),
    ])  # fmt: skip
    old_logprobs = forward(actor, records, ("old_logprobs",))["old_logprobs"]
    assert (
        old_logprobs[0] is not None
        and old_logprobs[0][0] == 0
        and old_logprobs[0][1] < 0
        and old_logprobs[0][2] == -torch.inf
    )
    assert old_logprobs[1] is not None and old_logprobs[1][0] == -torch.inf
