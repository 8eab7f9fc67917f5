"""The learner against a reference that shares no code with it (`naive.py`): losses, gradients and new weights.

The models are float32 and tiny. Both sides compute the same sums in another order, so that numbers of order 1 differ by
a few units in the last place: gradients agree within 1e-5 of their largest entry (`CLOSE`), losses within 1e-6.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollbook import Experience, Experiences
from rollbook.algorithms import estimate
from rollbook.models import Actor, Critic
from rollbook.train.algorithm import PRESET_NAMES, AlgorithmConfig
from rollbook.train.learner import Learner, MinibatchConfig, UpdateResult
from rollbook.train.optimizer import OptimizerConfig
from tests.train import naive
from tests.train.naive import How, Sample
from tests.train.stages import complete

CLOSE = 1e-5
"""How far two gradients, or two sets of new weights, may be apart, as a share of the largest entry; measured: 4e-6."""
EPS = 1e-3
"""AdamW's: it divides a gradient by its own size, which would make whole steps of the rounding of entries near 0."""
LAYOUTS = [(packed, budget) for packed in (False, True) for budget in (4096, 24)]
"""Padded and packed, in one micro-batch and in many."""


def llama(seed: int = 0) -> Any:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.25,
        pad_token_id=0,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


@functools.cache
def other(seed: int) -> Any:
    """A model that does not learn."""
    return llama(seed)


def numbers(model: Any, sample: Sample) -> list[float]:
    with torch.no_grad():
        return [float(x) for x in naive.scored(model, sample.prompt, sample.response)[0]]


def samples() -> list[Sample]:
    """Prompts and responses of many lengths; the rewards of group 1 are all alike, every third response has a token of
    a tool in it, and the old policy is near `llama()` and not the same, so that ratios are clipped on both sides."""
    return copy.deepcopy(_samples())


@functools.cache
def _samples() -> list[Sample]:
    draw = random.Random(0)
    drawn = []
    for group in range(4):
        prompt = [draw.randrange(3, 32) for _ in range(draw.randint(2, 6))]
        for run in range(4):
            response = [draw.randrange(3, 32) for _ in range(draw.randint(2, 8))]
            action = [True] * len(response)
            if (group + run) % 3 == 0:
                action[len(response) // 2 - 1] = False
            sample = Sample(prompt, response, action, group, 0.5 if group == 1 else draw.uniform(-1, 2))
            sample.old = [x + draw.gauss(0, 0.4) for x in numbers(other(0), sample)]
            sample.engine = [x + draw.gauss(0, 0.5) for x in sample.old]
            sample.ref, sample.teacher = numbers(other(101), sample), numbers(other(102), sample)
            drawn.append(sample)
    return drawn


def records(samples: Sequence[Sample], **columns: Sequence[Any]) -> Experiences:
    """The same as records, without advantages."""
    rows = []
    seen: dict[int, int] = {}
    for sample in samples:
        run = seen[sample.group] = seen.get(sample.group, -1) + 1
        rows.append(
            Experience(
                eid={"batch": 1, "task": sample.group, "run": run},
                tokens=[*sample.prompt, *sample.response],
                prompt_length=len(sample.prompt),
                action_mask=sample.action,
                reward=sample.reward,
                token_level_reward=sample.turns or None,
                logprobs=sample.engine,
                old_logprobs=sample.old,
                ref_logprobs=sample.ref,
                teacher_logprobs=sample.teacher,
                values=sample.values or None,
            )
        )
    return Experiences(rows).assign(**columns)


def optimizing(settings: How) -> OptimizerConfig:
    return OptimizerConfig(
        name=settings.optimizer,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.grad_clip,
    )


def gradients(monkeypatch: pytest.MonkeyPatch, optimizer: Any) -> list[dict[str, torch.Tensor]]:
    """A list that grows by the gradient of each update, as it is before it is clipped."""
    seen: list[dict[str, torch.Tensor]] = []
    update = optimizer.update

    def watched(step: int, *norm: float) -> float:
        pairs = zip(optimizer.names, optimizer.weights, strict=True)
        seen.append({name.removeprefix("model."): parameter.grad.clone() for name, parameter in pairs})
        return float(update(step, *norm))

    monkeypatch.setattr(optimizer, "update", watched)
    return seen


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], close: float = CLOSE) -> None:
    assert list(actual) == list(expected)
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    assert largest > 0
    for name, expected_tensor in expected.items():
        assert float((actual[name] - expected_tensor).abs().max()) <= close * largest, name


def minibatches(learned: UpdateResult, count: int) -> list[list[int]]:
    """Which records were in each minibatch."""
    return [[i for i, place in enumerate(learned.placements) if place.get("minibatch") == k] for k in range(count)]


# --- a step of GRPO ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packed", "budget", "optimizer"),
    [*((*layout, "sgd") for layout in LAYOUTS), (False, 4096, "adamw"), (True, 24, "adamw")],
)
def test_grpo(monkeypatch: pytest.MonkeyPatch, packed: bool, budget: int, optimizer: str) -> None:
    """Three minibatches in shuffled order, an asymmetric clip, an entropy bonus, a KL by k3, weights that decay; two
    samples without a reward, which are in no mean, no divergence and no bonus."""
    settings = How(
        clip=(0.2, 0.28), kl="k3", kl_coef=0.05, entropy_coef=0.02, optimizer=optimizer, weight_decay=0.1, grad_clip=0.4
    )
    settings.lr, settings.eps, settings.betas = (
        (0.3, 1e-8, (0.0, 0.999)) if optimizer == "sgd" else (0.01, EPS, (0.9, 0.999))
    )
    model = llama()
    actor, batch = Actor(copy.deepcopy(model)), samples()
    batch[3].reward = batch[9].reward = math.nan
    algorithm = AlgorithmConfig.preset(
        "grpo",
        kl_coef=settings.kl_coef,
        kl_estimator="k3",
        entropy_coef=settings.entropy_coef,
        loss_options={"clip_high": settings.clip[1]},
    )
    minibatch = MinibatchConfig(minibatches=3, packed=packed, token_budget=budget)
    learner = Learner(actor, algorithm, optimizer=optimizing(settings), minibatch=minibatch, seed=7)
    seen = gradients(monkeypatch, learner.optimizer)
    learned = learner.update(complete(records(batch), algorithm), step=1)

    scored = [i for i in range(16) if i not in (3, 9)]
    naive.by_group([batch[i] for i in scored], naive.grpo)
    mover = naive.optimizer_of(settings, list(model.parameters()))
    parts: list[dict[str, float]] = []
    fractions = []
    parts_of_update = minibatches(learned, 3)
    assert sorted(i for rows in parts_of_update for i in rows) == scored
    assert parts_of_update != [scored[:4], scored[4:9], scored[9:]]
    assert learned.placements[3] == learned.placements[9] == {"excluded": "no reward"}
    assert learned.metrics["excluded/no_reward"] == 2
    for k, rows in enumerate(parts_of_update):
        chosen = [batch[i] for i in rows]
        fractions.append(naive.clip_fraction(model, settings, chosen))
        loss, reported = naive.policy_loss(model, settings, chosen)
        gradient, length = naive.moved(settings, mover, model, loss)
        parts.append({**reported, "grad_norm": length})
        same(seen[k], gradient)
    same(weights(actor.model), weights(model))
    assert learned.updates == 3
    assert any(length["grad_norm"] > settings.grad_clip for length in parts)  # what is clipped is compared
    for name in ("loss", "kl", "entropy", "grad_norm"):
        assert learned.metrics[name] == pytest.approx(sum(part[name] for part in parts) / 3, rel=1e-5, abs=1e-6), name
    assert learned.metrics["policy/pg_clipfrac"] == pytest.approx(sum(fractions) / 3, abs=1e-6) and min(fractions) > 0
    micro_batches = len({(learned.placements[i]["minibatch"], learned.placements[i]["micro_batch"]) for i in scored})
    assert micro_batches == 3 if budget > 1000 else micro_batches > 5


# --- a step of PPO ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packed", "budget", "kl_in"),
    [*((*layout, "loss") for layout in LAYOUTS), (False, 4096, "reward"), (True, 24, "reward")],
)
def test_ppo(monkeypatch: pytest.MonkeyPatch, packed: bool, budget: int, kl_in: str) -> None:
    """Actor and critic in two minibatches: GAE, whitening, values that are clipped; KL in the loss or in the reward;
    rewards at the end, by turn, by turn alone; one that is missing, and one of tokens that is."""
    settings = How(kl_coef=0.05, lr=0.01, eps=EPS, grad_clip=0.5)
    slow = How(lr=0.003, eps=EPS, grad_clip=0.0, value_clip=0.1)
    model, backbone = llama(), llama(5).model
    actor, critic = Actor(copy.deepcopy(model)), Critic(copy.deepcopy(backbone))
    with torch.random.fork_rng():
        torch.manual_seed(6)
        torch.nn.init.normal_(critic.value_head.weight, std=0.25)
    judge = torch.nn.ModuleDict({"backbone": backbone, "value_head": copy.deepcopy(critic.value_head)})
    batch = samples()
    draw = random.Random(1)
    for sample in batch:
        with torch.no_grad():
            now = naive.valued(judge["backbone"], judge["value_head"], sample.prompt, sample.response)
        sample.values = [float(value) + draw.gauss(0, 0.2) for value in now]
        if sample.group in (2, 3):
            sample.turns = [draw.gauss(0, 1) if acts else 0.0 for acts in sample.action]
            sample.reward = sum(sample.turns)
    batch[5].reward = math.nan
    rows = list(records(batch))
    rows[12:] = [row.replace(reward=None) for row in rows[12:]]
    rows[10] = rows[10].replace(token_level_reward=[math.nan if acts else 0.0 for acts in batch[10].action])
    algorithm = AlgorithmConfig.preset(
        "ppo",
        gamma=0.99,
        lam=0.95,
        value_clip=0.1,
        kl_coef=0.05,
        kl_in=kl_in,
        kl_estimator="k1" if kl_in == "reward" else "k2",
    )
    learner = Learner(
        actor,
        algorithm,
        critic=critic,
        optimizer=optimizing(settings),
        critic_optimizer=optimizing(slow),
        minibatch=MinibatchConfig(minibatches=2, packed=packed, token_budget=budget),
    )
    seen = gradients(monkeypatch, learner.optimizer), gradients(monkeypatch, learner.critic_optimizer)
    learned = learner.update(complete(rows, algorithm), step=1)

    scored = [sample for i, sample in enumerate(batch) if i not in (5, 10)]
    if kl_in == "reward":
        settings.kl_coef = 0.0
        naive.gae(scored, 0.99, 0.95, kl_coef=0.05)
    else:
        naive.gae(scored, 0.99, 0.95)
    naive.whitened(scored)
    assert learned.placements[5] == learned.placements[10] == {"excluded": "no reward"}
    movers = [
        naive.optimizer_of(part_settings, list(of.parameters()))
        for part_settings, of in ((settings, model), (slow, judge))
    ]
    losses: list[tuple[float, float]] = []
    for k, rows in enumerate(minibatches(learned, 2)):
        chosen = [batch[i] for i in rows]
        loss, _ = naive.policy_loss(model, settings, chosen)
        same(seen[0][k], naive.moved(settings, movers[0], model, loss)[0])
        value = naive.value_loss(judge["backbone"], judge["value_head"], slow, chosen)
        same(seen[1][k], naive.moved(slow, movers[1], judge, value)[0])
        losses.append((loss.item(), value.item()))
    same(weights(actor.model), weights(model))
    same(weights(critic), weights(judge))
    for name, i in (("loss", 0), ("critic/value_loss", 1)):
        assert learned.metrics[name] == pytest.approx(sum(pair[i] for pair in losses) / 2, rel=1e-5, abs=1e-6)
    assert 0 < learned.metrics["critic/vf_clipfrac"] < 1


def test_the_group_mean_as_baseline_is_whitened() -> None:
    """By the trainer as by the function; a sample without a reward is in neither mean."""
    batch = samples()
    batch[9].reward = math.nan
    algorithm = AlgorithmConfig(estimator="reinforce_plus_plus_baseline")
    completed = complete(records(batch), algorithm)
    expected = estimate("reinforce_plus_plus_baseline", records(batch)).advantages
    scored = [sample for i, sample in enumerate(batch) if i != 9]
    naive.by_group(scored, naive.dr_grpo)
    naive.whitened(scored)
    batch[9].advantages = [0.0] * len(batch[9].response)
    for row, estimated, sample in zip(completed, expected, batch, strict=True):
        assert row.advantages is not None
        naive_advantages = [a if acts else 0.0 for a, acts in zip(sample.advantages, sample.action, strict=True)]
        assert row.advantages.tolist() == pytest.approx(naive_advantages, abs=1e-6)
        assert torch.as_tensor(estimated).tolist() == pytest.approx(naive_advantages, abs=1e-6)


# --- every other preset -----------------------------------------------------------------------------------------------

KL_TOO = {"kl_coef": 0.001, "kl": "k2"}
PRESETS: dict[str, tuple[dict[str, Any], Callable[[list[Sample]], None] | None]] = {
    "dr_grpo": ({"mode": "seq-mean-token-sum-norm", "longest": 12}, lambda g: naive.by_group(g, naive.dr_grpo)),
    "dapo": ({"clip": (0.2, 0.28)}, lambda g: naive.by_group(g, naive.grpo)),
    "rloo": (KL_TOO, lambda g: naive.by_group(g, naive.rloo)),
    "reinforce++": (KL_TOO, lambda g: (naive.by_group(g, naive.reinforce), naive.whitened(g))[1]),
    "gspo": (
        {"loss": "gspo", "clip": (3e-4, 4e-4), "mode": "seq-mean-token-mean", **KL_TOO},
        lambda g: naive.by_group(g, naive.grpo),
    ),
    "cispo": ({"loss": "cispo", "clip": (1.0, 0.28), **KL_TOO}, lambda g: naive.by_group(g, naive.grpo)),
    "opmd": ({"loss": "opmd", **KL_TOO}, lambda g: naive.by_group(g, naive.dr_grpo)),
    "topr": ({"loss": "topr", **KL_TOO}, lambda g: naive.by_group(g, naive.reinforce)),
    "asymre": ({"loss": "opmd"}, lambda g: naive.by_group(g, naive.asymre)),
    "sft": ({"loss": "sft"}, None),
    "on_policy_distill": ({}, naive.distilled),
}
"""What the preset is for the reference, and its advantages."""


def test_every_preset_is_compared() -> None:
    assert {*PRESETS, "grpo", "ppo", "mix", "dpo"} == {*PRESET_NAMES}


@pytest.mark.parametrize(("packed", "budget"), [(False, 4096), (True, 24)])
@pytest.mark.parametrize("name", PRESETS)
def test_preset(monkeypatch: pytest.MonkeyPatch, name: str, packed: bool, budget: int) -> None:
    """Two minibatches of a preset as it is, from rewards to weights."""
    changes, advise = PRESETS[name]
    settings = How(lr=0.3, optimizer="sgd", betas=(0.0, 0.999), **changes)
    model = llama()
    actor, batch = Actor(copy.deepcopy(model)), samples()
    algorithm = AlgorithmConfig.preset(name)
    if algorithm.drop_constant_groups:
        batch = [sample for sample in batch if sample.group != 1]
    learner = Learner(
        actor,
        name,
        optimizer=optimizing(settings),
        minibatch=MinibatchConfig(minibatches=2, packed=packed, token_budget=budget),
        max_tokens=12,
    )
    seen = gradients(monkeypatch, learner.optimizer)
    learned = learner.update(complete(records(batch), algorithm), step=1)
    if advise is not None:
        advise(batch)
    mover = naive.optimizer_of(settings, list(model.parameters()))
    losses = []
    for k, rows in enumerate(minibatches(learned, 2)):
        loss, reported = naive.policy_loss(model, settings, [batch[i] for i in rows])
        same(seen[k], naive.moved(settings, mover, model, loss)[0])
        losses.append(reported["loss"])
    same(weights(actor.model), weights(model))
    assert learned.metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("packed", "budget"), LAYOUTS)
def test_mix(monkeypatch: pytest.MonkeyPatch, packed: bool, budget: int) -> None:
    """Own rows, some with the engine's log-probs alone, beside an expert's, of which there are tokens and no more."""
    settings = How(loss="mix", mu=0.1, kl_coef=0.05, entropy_coef=0.02, lr=0.3, optimizer="sgd", betas=(0.0, 0.999))
    model = llama()
    actor, batch = Actor(copy.deepcopy(model)), samples()
    for sample in batch:
        sample.expert = sample.group == 3
    own_samples = [sample for sample in batch if not sample.expert]
    algorithm = AlgorithmConfig.preset("mix", kl_coef=0.05, entropy_coef=0.02)
    rows = list(complete(records(own_samples), algorithm))
    for i in (1, 4, 6):
        rows[i] = rows[i].replace(old_logprobs=None)
        own_samples[i].old = own_samples[i].engine
    bare = dict.fromkeys(("reward", "logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs"))
    rows += [row.replace(**bare) for row in records([sample for sample in batch if sample.expert])]
    learner = Learner(
        actor,
        algorithm,
        optimizer=optimizing(settings),
        minibatch=MinibatchConfig(minibatches=2, packed=packed, token_budget=budget),
    )
    seen = gradients(monkeypatch, learner.optimizer)
    learned = learner.update(rows, step=1, expert=[sample.expert for sample in batch])
    naive.by_group(own_samples, naive.grpo)
    mover = naive.optimizer_of(settings, list(model.parameters()))
    losses = []
    for k, chosen in enumerate(minibatches(learned, 2)):
        loss, reported = naive.policy_loss(model, settings, [batch[i] for i in chosen])
        same(seen[k], naive.moved(settings, mover, model, loss)[0])
        losses.append(reported["loss"])
    same(weights(actor.model), weights(model))
    assert learned.metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("packed", "budget"), LAYOUTS)
def test_dpo(monkeypatch: pytest.MonkeyPatch, packed: bool, budget: int) -> None:
    """Pairs of answers in two minibatches, twice; both answers of a pair are in one micro-batch."""
    settings = How(lr=0.3, optimizer="sgd", betas=(0.0, 0.999))
    model, reference = llama(), llama(101)
    actor, batch = Actor(copy.deepcopy(model)), samples()
    pairs = [
        (sample.prompt, sample.response, other_sample.response)
        for sample, other_sample in zip(batch[::2], batch[1::2], strict=True)
    ]
    rows = [
        Experience(tokens=prompt, chosen=chosen, rejected=rejected, eid={"batch": 1, "task": i})
        for i, (prompt, chosen, rejected) in enumerate(pairs)
    ]
    learner = Learner(
        actor,
        "dpo",
        reference=Actor(reference, trainable=False),
        optimizer=optimizing(settings),
        minibatch=MinibatchConfig(minibatches=2, epochs=2, packed=packed, token_budget=budget),
    )
    seen = gradients(monkeypatch, learner.optimizer)
    learned = learner.update(complete(rows, AlgorithmConfig.preset("dpo")), step=1)
    assert all(len(place[key]) == 2 for place in learned.placements for key in ("minibatch", "micro_batch", "weight"))
    mover = naive.optimizer_of(settings, list(model.parameters()))
    losses = []
    for epoch in range(2):
        for k in range(2):
            chosen = [
                pair for pair, place in zip(pairs, learned.placements, strict=True) if place["minibatch"][epoch] == k
            ]
            loss = naive.dpo_loss(model, reference, settings, chosen)
            same(seen[2 * epoch + k], naive.moved(settings, mover, model, loss)[0])
            losses.append(loss.item())
    same(weights(actor.model), weights(model))
    assert learned.metrics["loss"] == pytest.approx(sum(losses) / 4, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_weights(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """What tokens weigh: by the record, by the sampler, and by how much likelier the trainer finds them than the engine
    did, truncated; tokens too far off are masked, and count in no denominator."""
    settings = How(mode=mode, kl_coef=0.05, entropy_coef=0.02, lr=0.3, optimizer="sgd", betas=(0.0, 0.999))
    model = llama()
    actor, batch = Actor(copy.deepcopy(model)), samples()
    algorithm = AlgorithmConfig.preset(
        "grpo",
        kl_coef=0.05,
        entropy_coef=0.02,
        loss_options={"mode": mode},
        correction={"truncate": 1.2, "mask_outside": (0.5, 4.0)},
    )
    draw = random.Random(3)
    token_weights = [[draw.uniform(0.5, 1.5) for _ in sample.response] for sample in batch]
    drawn = [draw.uniform(0.5, 2.0) for _ in batch]
    rows = complete(records(batch), algorithm).assign(loss_weights=token_weights)
    naive.by_group(batch, naive.grpo)
    masked = 0
    for sample, sample_weights, share in zip(batch, token_weights, drawn, strict=True):
        ratios = [math.exp(old - engine) for old, engine in zip(sample.old, sample.engine, strict=True)]
        inside = [acts and 0.5 <= ratio <= 4 for acts, ratio in zip(sample.action, ratios, strict=True)]
        masked += sum(sample.action) - sum(inside)
        sample.action = inside
        sample.weights = [w * share * min(ratio, 1.2) for w, ratio in zip(sample_weights, ratios, strict=True)]
    assert masked > 3
    learner = Learner(
        actor,
        algorithm,
        optimizer=optimizing(settings),
        minibatch=MinibatchConfig(minibatches=2, packed=True, token_budget=24),
    )
    seen = gradients(monkeypatch, learner.optimizer)
    learned = learner.update(rows, step=1, weights=drawn)
    mover = naive.optimizer_of(settings, list(model.parameters()))
    for k, chosen in enumerate(minibatches(learned, 2)):
        loss, _ = naive.policy_loss(model, settings, [batch[i] for i in chosen])
        same(seen[k], naive.moved(settings, mover, model, loss)[0])
    same(weights(actor.model), weights(model))
