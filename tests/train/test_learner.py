"""What a learner promises beside its numbers: what is not finite changes nothing, what does not matter does not matter,
and what goes on another time goes on as if nothing had been.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rollbook import Experience, Experiences
from rollbook.models import Actor, Critic
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.learner import Learner, MinibatchConfig, NonFiniteLossError
from rollbook.train.optimizer import OptimizerConfig
from tests.train.stages import complete
from tests.train.test_reference import gradients, llama, numbers, records, same, samples, weights

GRPO = AlgorithmConfig.preset("grpo", kl_coef=0.05, entropy_coef=0.01)
STEP = OptimizerConfig(lr=0.01, eps=1e-5)
PLAIN = OptimizerConfig(name="sgd", betas=(0.0, 0.999), lr=0.3, max_grad_norm=0.0)


@functools.cache
def completed() -> Experiences:
    """Sixteen records with advantages, those of group 1 all 0; nothing changes them."""
    return complete(records(samples()), GRPO)


def learner(**options: Any) -> Learner:
    settings: dict[str, Any] = {"optimizer": STEP, "minibatch": MinibatchConfig(shuffle=False), **options}
    return Learner(Actor(llama()), settings.pop("algorithm", GRPO), **settings)


def critical(**options: Any) -> Learner:
    """A learner of PPO."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        critic = Critic(llama(5).model, value_head="normal")
    settings = {"kl_coef": 0.0, **options.pop("changes", {})}
    return learner(algorithm=AlgorithmConfig.preset("ppo", **settings), critic=critic, **options)


def judged(critic: Any) -> Experiences:
    return complete(records(samples()), AlgorithmConfig.preset("ppo", kl_coef=0.0), critic=critic)


def equal(left: Any, right: Any) -> bool:
    """Bit for bit, in whatever it is nested."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return bool(left == right)


def poisoned(rows: Experiences, which: Sequence[int], value: float = math.inf, name: str = "advantages") -> Experiences:
    """Some records with one number that is none."""
    column = [row.clone() for row in rows.values(name)]
    for i in which:
        column[i][-1] = value
    return rows.assign(**{name: column})


# --- what is not finite -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_changes_nothing(value: float) -> None:
    rows = completed()
    mind = learner(minibatch=MinibatchConfig(shuffle=False, minibatches=4))
    mind.update(rows, step=1)
    before, state = weights(mind.actor), copy.deepcopy(mind.state_dict())
    spoilt = poisoned(rows, [0, 5, 9, 13], value)
    with (
        pytest.raises(NonFiniteLossError, match="step 2, pass 0, minibatch 2: .* 3 times in a row"),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        mind.update(spoilt, step=2)
    assert equal(weights(mind.actor), before)
    assert equal(mind.state_dict()["optimizer"], state["optimizer"]) and mind.failures == 3
    assert [f"({k} in a row)" in str(warning.message) for k, warning in enumerate(caught, 1)] == [True, True]
    assert all(parameter.grad is None for parameter in mind.actor.parameters())


def test_the_other_minibatches_of_a_step_count() -> None:
    rows = completed()
    mind, other = learner(minibatch=MinibatchConfig(shuffle=False, minibatches=4)), learner()
    with pytest.warns(UserWarning, match="step 1, pass 0, minibatch 1: the loss or its gradient is not finite"):
        learned = mind.update(poisoned(rows, [4]), step=1)
    assert (learned.updates, learned.skipped, mind.failures) == (3, 1, 0)
    assert learned.metrics["skipped"] == 1 and math.isfinite(learned.metrics["loss"])
    for part in (range(4), range(8, 12), range(12, 16)):
        other.update(rows.take(list(part)), step=1)
    same(weights(mind.actor), weights(other.actor), 1e-7)


def test_a_gradient_that_is_not_finite_is_noticed() -> None:
    rows, mind = completed(), learner()
    hook = mind.actor.model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    before = weights(mind.actor)
    with pytest.warns(UserWarning, match="not finite"):
        assert mind.update(rows, step=1).skipped == 1
    assert equal(weights(mind.actor), before) and mind.failures == 1
    hook.remove()
    assert mind.update(rows, step=2).updates == 1 and mind.failures == 0


def test_actor_and_critic_move_together_or_not_at_all() -> None:
    mind = critical()
    rows = poisoned(judged(mind.critic), [3], name="returns")
    before = weights(mind.actor), weights(mind.critic)
    with pytest.warns(UserWarning, match="not finite"):
        assert mind.update(rows, step=1).skipped == 1
    assert equal((weights(mind.actor), weights(mind.critic)), before)
    assert not mind.optimizer.inner.state and mind.critic_optimizer and not mind.critic_optimizer.inner.state


# --- what does not matter ---------------------------------------------------------------------------------------------


def test_the_order_of_records_does_not_matter() -> None:
    rows = completed()
    order = [7, 2, 15, 0, 9, 4, 11, 1, 13, 6, 3, 8, 14, 5, 12, 10]
    in_order, shuffled = learner(optimizer=PLAIN), learner(optimizer=PLAIN)
    in_order.update(rows, step=1)
    shuffled.update(rows.take(order), step=1)
    same(weights(in_order.actor), weights(shuffled.actor), 1e-6)


def test_shuffling_is_by_seed_and_step() -> None:
    rows = completed()
    minibatches = MinibatchConfig(minibatches=4)

    def minibatches_of(seed: int, step: int) -> list[int]:
        learned = learner(minibatch=minibatches, seed=seed).update(rows, step=step)
        return [place["minibatch"] for place in learned.placements]

    assert minibatches_of(0, 1) == minibatches_of(0, 1)
    assert len({tuple(minibatches_of(*seed_and_step)) for seed_and_step in ((0, 1), (1, 1), (0, 2))}) == 3
    assert sorted(minibatches_of(0, 1)) == sorted([0, 1, 2, 3] * 4)


def test_two_epochs_are_two_passes() -> None:
    rows = completed()
    in_one_update = learner(minibatch=MinibatchConfig(shuffle=False, minibatches=2, epochs=2))
    in_two_updates = learner(minibatch=MinibatchConfig(shuffle=False, minibatches=2))
    learned = in_one_update.update(rows, step=1)
    parts = [in_two_updates.update(rows, step=1) for _ in range(2)]
    assert equal(weights(in_one_update.actor), weights(in_two_updates.actor)) and equal(
        in_one_update.state_dict(), in_two_updates.state_dict()
    )
    assert learned.updates == 4
    assert learned.metrics["loss"] == pytest.approx(sum(part.metrics["loss"] for part in parts) / 2)
    assert learned.placements[0] == {
        "minibatch": [0, 0],
        "micro_batch": [0, 0],
        "weight": [parts[0].placements[0]["weight"]] * 2,
    }


def test_places_say_what_each_record_weighed() -> None:
    learned = learner(minibatch=MinibatchConfig(minibatches=3, token_budget=30)).update(completed(), step=1)
    for k in range(3):
        record_weights = [place["weight"] for place in learned.placements if place["minibatch"] == k]
        assert sum(record_weights) == pytest.approx(1, abs=1e-6)


def test_drop_zero_is_training_without_those_records() -> None:
    rows = completed()
    dropping = learner(minibatch=MinibatchConfig(shuffle=False, drop_zero_advantages=True))
    without = learner()
    learned = dropping.update(rows, step=1)
    without.update(rows.take([*range(4), *range(8, 16)]), step=1)
    assert equal(weights(dropping.actor), weights(without.actor))
    assert [i for i, place in enumerate(learned.placements) if place.get("excluded") == "zero advantage"] == [
        4,
        5,
        6,
        7,
    ]
    assert learned.metrics["rows"] == 12 and learned.metrics["excluded/zero_advantage"] == 4
    keeping = learner()
    keeping.update(rows, step=1)  # which counts them in its denominators
    assert not equal(weights(dropping.actor), weights(keeping.actor))


def test_keep_groups() -> None:
    rows = completed()
    learned = learner(minibatch=MinibatchConfig(minibatches=2, keep_groups=True)).update(rows, step=1)
    by_group: dict[str, set[int]] = {}
    for eid, place in zip(rows.eids(), learned.placements, strict=True):
        by_group.setdefault(eid.tid, set()).add(place["minibatch"])
    assert len(by_group) == 4 and all(len(minibatches) == 1 for minibatches in by_group.values())
    assert sorted(min(minibatches) for minibatches in by_group.values()) == [0, 0, 1, 1]


def test_old_log_probs_are_each_records_own() -> None:
    """Some records have the trainer's, some the engine's alone: how they are cut makes no difference."""
    partial = list(completed())
    for i in range(0, 16, 2):
        partial[i] = partial[i].replace(old_logprobs=None)
        partial[i + 1] = partial[i + 1].replace(logprobs=None)
    filled = [row if row.old_logprobs is not None else row.replace(old_logprobs=row.logprobs) for row in partial]
    final_weights = []
    for rows, budget in ((filled, 4096), (partial, 4096), (partial, 12)):
        mind = learner(optimizer=PLAIN, minibatch=MinibatchConfig(shuffle=False, token_budget=budget))
        mind.update(rows, step=1)
        final_weights.append(weights(mind.actor))
    same(final_weights[1], final_weights[0], 1e-6)
    same(final_weights[2], final_weights[0], 1e-6)


def test_a_lack_is_named() -> None:
    rows = list(completed())
    for name in ("advantages", "ref_logprobs"):
        changed = [*rows[:3], rows[3].replace(**{name: None}), *rows[4:]]
        with pytest.raises(ValueError, match=rf"record 1/0/3.*got no {name}.*pipeline computes"):
            learner().update(changed, step=1)


def test_advantages_from_elsewhere_need_no_reward() -> None:
    """Whatever they are, 0 too; of an expert's records neither is read."""
    rows = [row.replace(reward=None) for row in completed()]
    assert equal(learner().update(rows, step=1).placements, learner().update(completed(), step=1).placements)
    bare = [records(samples())[0].replace(reward=None, eid={"batch": "expert", "task": 0})]
    mix = AlgorithmConfig.preset("mix")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = complete([*completed(), *bare], mix, expert=[False] * 16 + [True])
    learned = learner(algorithm=mix).update(both, step=1, expert=[False] * 16 + [True])
    assert both[16].reward is None and "weight" in learned.placements[16]


def test_versions_of_records_and_of_tokens_may_be_mixed_and_none_may_be_missing() -> None:
    algorithm = AlgorithmConfig.preset("grpo", kl_coef=0.0, correction={"max_staleness": 2})
    rows = list(completed().take([0, 1, 2, 3]))
    lengths = [len(row.action_mask) for row in rows]
    old = [1] * (lengths[1] - 1) + [5]
    mixed: list[Any] = [5, old, 4, 1]
    spread: list[Any] = [[5] * lengths[0], old, [4] * lengths[2], [1] * lengths[3]]
    updates = [
        learner(algorithm=algorithm).update(
            [row.replace(policy_versions=version) for row, version in zip(rows, versions, strict=True)], step=6
        )
        for versions in (mixed, spread)
    ]
    assert updates[0].placements == updates[1].placements and updates[0].metrics == updates[1].metrics
    assert (
        updates[0].placements[3] == {"excluded": "no trainable token"} and updates[0].metrics["correction/stale"] == 2
    )
    for version, message in ((None, "got no policy_versions"), (9, "policy_versions: got 9, expected at most 5")):
        wrong = [row.replace(policy_versions=5) for row in rows]
        wrong[2] = wrong[2].replace(policy_versions=version)
        with pytest.raises(ValueError, match=f"record 1/0/2/.*{message}"):
            learner(algorithm=algorithm).update(wrong, step=6)


# --- a critic ---------------------------------------------------------------------------------------------------------


def test_the_critic_learns_alone_at_first() -> None:
    mind = critical(changes={"critic_warmup": 2})
    rows = judged(mind.critic)
    for step in (1, 2):
        before = weights(mind.actor), weights(mind.critic)
        learned = mind.update(rows, step=step)
        assert equal(weights(mind.actor), before[0]) and not mind.optimizer.inner.state
        assert not equal(weights(mind.critic), before[1])
        assert "loss" not in learned.metrics and "critic/value_loss" in learned.metrics
    before = weights(mind.actor), weights(mind.critic)
    assert "loss" in mind.update(rows, step=3).metrics
    assert not equal(weights(mind.actor), before[0]) and not equal(weights(mind.critic), before[1])


# --- going on another time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grpo", "ppo", "bfloat16"])
def test_going_on_is_bit_equal(kind: str) -> None:
    def new_learner() -> Learner:
        settings = {
            "minibatch": MinibatchConfig(minibatches=2),
            "optimizer": OptimizerConfig(lr=0.003, warmup_steps=2, weight_decay=0.1),
        }
        if kind == "ppo":
            return critical(**settings)
        if kind == "bfloat16":
            return Learner(Actor(llama().bfloat16()), GRPO, precision="bfloat16", **settings)
        return learner(**settings)

    uninterrupted, first = new_learner(), new_learner()
    rows = completed() if kind != "ppo" else judged(uninterrupted.critic)
    for step in range(1, 5):
        uninterrupted.update(rows, step=step)
    for step in range(1, 3):
        first.update(rows, step=step)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = new_learner()
    second.actor.load_state_dict(first.actor.state_dict())
    if second.critic is not None:
        second.critic.load_state_dict(first.critic.state_dict())
    second.load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 5):
        second.update(rows, step=step)
    assert equal(weights(second.actor), weights(uninterrupted.actor))
    assert equal(second.state_dict(), uninterrupted.state_dict())
    if kind == "ppo":
        assert equal(weights(second.critic), weights(uninterrupted.critic))


def test_the_state_of_another_model_is_refused() -> None:
    state = learner().state_dict()
    with pytest.raises(ValueError, match="critic: the state and this learner"):
        critical().load_state_dict(state)
    with pytest.raises(ValueError, match="optimizer: got the state of other weights"):
        Learner(Actor(llama(), lora={"r": 2, "target_modules": ["q_proj"]}), GRPO).load_state_dict(state)
    with pytest.raises(ValueError, match="precision: got the state"):
        Learner(Actor(llama().bfloat16()), GRPO, precision="bfloat16").load_state_dict(state)


# --- precision, adapters, memory --------------------------------------------------------------------------------------


def test_bfloat16_moves_by_less_than_its_numbers_are_apart() -> None:
    """By 1e-5 a step, where weights of 0.25 are 1e-3 apart: without float32 copies none would ever move."""
    mind = Learner(Actor(llama().bfloat16()), GRPO, precision="bfloat16", optimizer=OptimizerConfig(lr=1e-5))
    rows = completed()
    before = [weight.detach().clone() for weight in mind.optimizer.weights]
    copies = [weight.clone() for weight in mind.optimizer.moved]
    mind.update(rows, step=1)
    moved = torch.cat([(new != old).flatten() for new, old in zip(mind.optimizer.moved, copies, strict=True)])
    seen = torch.cat([(new != old).flatten() for new, old in zip(mind.optimizer.weights, before, strict=True)])
    assert moved.float().mean() > 0.7 and seen.float().mean() < 0.1
    for step in range(2, 31):
        mind.update(rows, step=step)
    seen = torch.cat([(new != old).flatten() for new, old in zip(mind.optimizer.weights, before, strict=True)])
    assert seen.float().mean() > 0.25
    for weight, master in zip(mind.optimizer.weights, mind.optimizer.moved, strict=True):
        assert weight.dtype == torch.bfloat16 and master.dtype == torch.float32
        assert torch.equal(weight, master.bfloat16())


@pytest.mark.parametrize("budget", [4096, 24])
@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_short_numbers_give_nearly_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch, precision: str, budget: int
) -> None:
    """Of a loss without a clip, on whose other side a rounded ratio may be."""
    rows = completed()
    model = llama().bfloat16().float()  # the same weights for all
    slopes = []
    for kind in ("float32", precision):
        actor = Actor(copy.deepcopy(model).bfloat16() if kind == "bfloat16" else copy.deepcopy(model))
        mind = Learner(actor, "asymre", optimizer=PLAIN, precision=kind, minibatch=MinibatchConfig(token_budget=budget))
        seen = gradients(monkeypatch, mind.optimizer)
        mind.update(rows, step=1)
        slopes.append(torch.cat([gradient.float().flatten() for gradient in seen[0].values()]))
    apart = float((slopes[0] - slopes[1]).norm() / slopes[0].norm())
    assert 0 < apart < 0.05


def test_weights_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"actor: got weights of torch.bfloat16, expected float32"):
        Learner(Actor(llama().bfloat16()), GRPO)
    with pytest.raises(ValueError, match=r"actor: got weights of torch.float32, expected bfloat16"):
        Learner(Actor(llama()), GRPO, precision="bfloat16")


def test_adapters_learn_and_the_base_does_not() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        actor = Actor(llama(), lora={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]})
    drawn = samples()
    rows = complete(completed().assign(ref_logprobs=[None] * 16), GRPO, reference=actor.reference())
    for row, sample in zip(rows, drawn, strict=True):
        assert row.ref_logprobs.tolist() == pytest.approx(numbers(llama(), sample), abs=1e-5)  # the base's
    mind = Learner(actor, GRPO, optimizer=OptimizerConfig(lr=0.05))
    assert mind.optimizer.names and all("lora_" in name for name in mind.optimizer.names)
    before = weights(actor)
    first = mind.update(rows, step=1).metrics
    assert first["kl"] == pytest.approx(0, abs=1e-9)  # B is 0 at first: the policy is the base
    assert mind.update(rows, step=2).metrics["kl"] > 1e-5
    after = weights(actor)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("lora_" in name for name in changed)


def test_gradient_checkpointing_gives_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = completed()
    slopes = []
    for saving in (False, True):
        mind = learner(optimizer=PLAIN)
        again = 0

        def forward(*_: Any) -> None:
            nonlocal again
            again += 1

        mind.actor.model.model.layers[0].mlp.register_forward_pre_hook(forward)
        if saving:
            mind.actor.gradient_checkpointing_enable()
        _ = mind.actor.head, mind.packed
        again = 0
        seen = gradients(monkeypatch, mind.optimizer)
        mind.update(rows, step=1)
        assert again == (2 if saving else 1)  # once more on the way back
        slopes.append(seen[0])
    same(slopes[1], slopes[0], 1e-6)


def test_records_of_several_turns_learn_from_actions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tool said has no gradient: its advantage, its old log-prob and its weight may be anything."""
    rows = completed()
    wild = []
    for row in rows:
        off = ~row.action_mask
        changes = {name: torch.where(off, 1e4, getattr(row, name)) for name in ("advantages", "old_logprobs")}
        wild.append(row.replace(**changes))
    slopes = []
    for trained in (rows, wild):
        mind = learner(optimizer=PLAIN)
        seen = gradients(monkeypatch, mind.optimizer)
        mind.update(trained, step=1)
        slopes.append(seen[0])
    assert any((~row.action_mask).any() for row in rows)
    same(slopes[1], slopes[0], 1e-7)


def test_records_without_a_token_that_counts_are_excluded() -> None:
    rows = list(completed())
    rows[2] = rows[2].replace(action_mask=[False] * len(rows[2].action_mask))
    with_empty, without_empty = learner(), learner()
    learned = with_empty.update(rows, step=1)
    without_empty.update([*rows[:2], *rows[3:]], step=1)
    assert learned.placements[2] == {"excluded": "no trainable token"}
    assert equal(weights(with_empty.actor), weights(without_empty.actor))


@pytest.mark.parametrize("packed", [False, True])
def test_a_first_token_without_a_prompt_is_not_trained_on(packed: bool) -> None:
    """No model predicts it: prompt_length=0 gives what prompt_length=1 gives, whose first token is no action."""
    algorithm = AlgorithmConfig.preset("ppo", kl_coef=0.05, kl_in="loss", entropy_coef=0.01)
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 16, (n,), generator=draw).tolist() for n in (6, 4, 5)]
    metrics = []
    for prompt in (0, 1):
        mind = critical(changes={"kl_coef": 0.05, "entropy_coef": 0.01}, minibatch=MinibatchConfig(packed=packed))
        rows = [
            Experience(tokens=tokens, prompt_length=prompt, action_mask=[True] * (len(tokens) - prompt),
                       reward=float(i), eid={"task": 0, "run": i})
            for i, tokens in enumerate(texts)
        ]  # fmt: skip
        models = {"actor": mind.actor, "reference": Actor(llama(7).model), "critic": mind.critic}
        learned = mind.update(complete(rows, algorithm, **models), step=1)
        metrics.append({name: value for name, value in learned.metrics.items() if "seconds" not in name})
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-6)
    lone = Experience(tokens=[5], prompt_length=0, action_mask=[True], advantages=[1.0], logprobs=[-1.0])
    assert learner(algorithm=AlgorithmConfig.preset("grpo", kl_coef=0.0)).update([lone], step=1).placements[0] == {
        "excluded": "no trainable token"
    }


def test_nothing_to_learn_from() -> None:
    mind = learner(minibatch=MinibatchConfig(drop_zero_advantages=True))
    before = weights(mind.actor)
    rows = completed()
    learned = mind.update(rows.take([4, 5, 6, 7]), step=1)
    assert (learned.updates, learned.skipped) == (0, 0) and equal(weights(mind.actor), before)
    empty = mind.update(Experiences([]), step=1)
    assert (empty.updates, empty.placements) == (0, [])


def test_a_learning_rate_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of a schedule, as plain descent: what the weights move by is the rate times the gradient."""
    settings = OptimizerConfig(
        name="sgd", betas=(0.0, 0.999), lr=0.4, warmup_steps=2, schedule="linear", steps=6, max_grad_norm=0.0
    )
    mind = learner(optimizer=settings)
    seen = gradients(monkeypatch, mind.optimizer)
    for step, rate in ((1, 0.2), (4, 0.2), (5, 0.1)):
        before = weights(mind.actor.model)
        assert mind.update(completed(), step=step).metrics["lr"] == pytest.approx(rate)
        after = weights(mind.actor.model)
        same({name: before[name] - after[name] for name in before}, {n: rate * g for n, g in seen[-1].items()}, 1e-4)


def test_a_pair_longer_than_the_budget_goes_alone() -> None:
    rows = [
        Experience(tokens=[3, 4], chosen=[5] * n, rejected=[6] * 3, eid={"batch": 1, "task": n}) for n in (2, 20, 3)
    ]
    mind = Learner(
        Actor(llama()), "dpo", reference=Actor(llama(101), trainable=False), minibatch=MinibatchConfig(token_budget=8)
    )
    learned = mind.update(rows, step=1)
    assert len({place["micro_batch"] for place in learned.placements}) >= 2
    assert sum(place["weight"] for place in learned.placements) == pytest.approx(1, abs=1e-6)


def test_rows_without_weights_beside_others_weigh_one() -> None:
    """However the rows are cut."""
    rows = completed()
    weights_of = [torch.full((len(row.advantages),), 2.0) if i < 6 else None for i, row in enumerate(rows)]
    explicit = [
        torch.ones(len(row.advantages)) if row_weights is None else row_weights
        for row, row_weights in zip(rows, weights_of, strict=True)
    ]
    losses = []
    for column in (weights_of, explicit):
        for budget in (24, 4096):
            mind = learner(minibatch=MinibatchConfig(shuffle=False, token_budget=budget))
            losses.append(mind.update(rows.assign(loss_weights=column), step=1).metrics["loss"])
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5) and losses[:2] == losses[2:]


def test_an_actor_is_a_model() -> None:
    for wrong in (None, 5, torch.nn.Linear(1, 1)):
        with pytest.raises(ValueError, match=f"actor: got {type(wrong).__name__}, expected a Policy such as Actor"):
            Learner(wrong, "grpo")  # type: ignore[arg-type]
