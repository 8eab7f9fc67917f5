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


def numbers(model: Any, one: Sample) -> list[float]:
    with torch.no_grad():
        return [float(x) for x in naive.scored(model, one.prompt, one.response)[0]]


def samples() -> list[Sample]:
    """Prompts and responses of many lengths; the rewards of group 1 are all alike, every third response has a token of
    a tool in it, and the old policy is near `llama()` and not the same, so that ratios are clipped on both sides."""
    return copy.deepcopy(_samples())


@functools.cache
def _samples() -> list[Sample]:
    draw = random.Random(0)
    found = []
    for group in range(4):
        prompt = [draw.randrange(3, 32) for _ in range(draw.randint(2, 6))]
        for run in range(4):
            response = [draw.randrange(3, 32) for _ in range(draw.randint(2, 8))]
            action = [True] * len(response)
            if (group + run) % 3 == 0:
                action[len(response) // 2 - 1] = False
            one = Sample(prompt, response, action, group, 0.5 if group == 1 else draw.uniform(-1, 2))
            one.old = [x + draw.gauss(0, 0.4) for x in numbers(other(0), one)]
            one.engine = [x + draw.gauss(0, 0.5) for x in one.old]
            one.ref, one.teacher = numbers(other(101), one), numbers(other(102), one)
            found.append(one)
    return found


def records(given: Sequence[Sample], **columns: Sequence[Any]) -> Experiences:
    """The same as records, without advantages."""
    made = []
    seen: dict[int, int] = {}
    for one in given:
        run = seen[one.group] = seen.get(one.group, -1) + 1
        made.append(
            Experience(
                eid={"batch": 1, "task": one.group, "run": run},
                tokens=[*one.prompt, *one.response],
                prompt_length=len(one.prompt),
                action_mask=one.action,
                reward=one.reward,
                token_level_reward=one.turns or None,
                logprobs=one.engine,
                old_logprobs=one.old,
                ref_logprobs=one.ref,
                teacher_logprobs=one.teacher,
                values=one.values or None,
            )
        )
    return Experiences(made).assign(**columns)


def optimizing(how: How) -> OptimizerConfig:
    return OptimizerConfig(
        name=how.optimizer,
        lr=how.lr,
        betas=how.betas,
        eps=how.eps,
        weight_decay=how.weight_decay,
        max_grad_norm=how.grad_clip,
    )


def gradients(monkeypatch: pytest.MonkeyPatch, optimizer: Any) -> list[dict[str, torch.Tensor]]:
    """A list that grows by the gradient of each update, as it is before it is clipped."""
    seen: list[dict[str, torch.Tensor]] = []
    update = optimizer.update

    def watched(step: int, *norm: float) -> float:
        pairs = zip(optimizer.names, optimizer.weights, strict=True)
        seen.append({name.removeprefix("model."): one.grad.clone() for name, one in pairs})
        return float(update(step, *norm))

    monkeypatch.setattr(optimizer, "update", watched)
    return seen


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in module.named_parameters()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], close: float = CLOSE) -> None:
    assert list(found) == list(expected)
    largest = max(float(one.abs().max()) for one in expected.values())
    assert largest > 0
    for name, theirs in expected.items():
        assert float((found[name] - theirs).abs().max()) <= close * largest, name


def minibatches(learned: UpdateResult, count: int) -> list[list[int]]:
    """Which records were in each minibatch."""
    return [[i for i, place in enumerate(learned.placements) if place.get("minibatch") == k] for k in range(count)]


# --- a step of GRPO ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packed", "budget", "optimizer"),
    [*((*each, "sgd") for each in LAYOUTS), (False, 4096, "adamw"), (True, 24, "adamw")],
)
def test_grpo(monkeypatch: pytest.MonkeyPatch, packed: bool, budget: int, optimizer: str) -> None:
    """Three minibatches in shuffled order, an asymmetric clip, an entropy bonus, a KL by k3, weights that decay; two
    samples without a reward, which are in no mean, no divergence and no bonus."""
    how = How(
        clip=(0.2, 0.28), kl="k3", kl_coef=0.05, entropy_coef=0.02, optimizer=optimizer, weight_decay=0.1, grad_clip=0.4
    )
    how.lr, how.eps, how.betas = (0.3, 1e-8, (0.0, 0.999)) if optimizer == "sgd" else (0.01, EPS, (0.9, 0.999))
    model = llama()
    actor, given = Actor(copy.deepcopy(model)), samples()
    given[3].reward = given[9].reward = math.nan
    algorithm = AlgorithmConfig.preset(
        "grpo",
        kl_coef=how.kl_coef,
        kl_estimator="k3",
        entropy_coef=how.entropy_coef,
        loss_options={"clip_high": how.clip[1]},
    )
    minibatch = MinibatchConfig(minibatches=3, packed=packed, token_budget=budget)
    learner = Learner(actor, algorithm, optimizer=optimizing(how), minibatch=minibatch, seed=7)
    seen = gradients(monkeypatch, learner.optimizer)
    learned = learner.update(complete(records(given), algorithm), step=1)

    scored = [i for i in range(16) if i not in (3, 9)]
    naive.by_group([given[i] for i in scored], naive.grpo)
    mover = naive.optimizer_of(how, list(model.parameters()))
    parts: list[dict[str, float]] = []
    fractions = []
    cut = minibatches(learned, 3)
    assert sorted(i for rows in cut for i in rows) == scored
    assert cut != [scored[:4], scored[4:9], scored[9:]]
    assert learned.placements[3] == learned.placements[9] == {"excluded": "no reward"}
    assert learned.metrics["excluded/no_reward"] == 2
    for k, rows in enumerate(cut):
        chosen = [given[i] for i in rows]
        fractions.append(naive.clip_fraction(model, how, chosen))
        loss, found = naive.policy_loss(model, how, chosen)
        gradient, length = naive.moved(how, mover, model, loss)
        parts.append({**found, "grad_norm": length})
        same(seen[k], gradient)
    same(weights(actor.model), weights(model))
    assert learned.updates == 3
    assert any(length["grad_norm"] > how.grad_clip for length in parts)  # what is clipped is compared
    for name in ("loss", "kl", "entropy", "grad_norm"):
        assert learned.metrics[name] == pytest.approx(sum(one[name] for one in parts) / 3, rel=1e-5, abs=1e-6), name
    assert learned.metrics["policy/pg_clipfrac"] == pytest.approx(sum(fractions) / 3, abs=1e-6) and min(fractions) > 0
    many = len({(learned.placements[i]["minibatch"], learned.placements[i]["micro_batch"]) for i in scored})
    assert many == 3 if budget > 1000 else many > 5


# --- a step of PPO ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packed", "budget", "kl_in"),
    [*((*each, "loss") for each in LAYOUTS), (False, 4096, "reward"), (True, 24, "reward")],
)
def test_ppo(monkeypatch: pytest.MonkeyPatch, packed: bool, budget: int, kl_in: str) -> None:
    """Actor and critic in two minibatches: GAE, whitening, values that are clipped; KL in the loss or in the reward;
    rewards at the end, by turn, by turn alone; one that is missing, and one of tokens that is."""
    how = How(kl_coef=0.05, lr=0.01, eps=EPS, grad_clip=0.5)
    slow = How(lr=0.003, eps=EPS, grad_clip=0.0, value_clip=0.1)
    model, backbone = llama(), llama(5).model
    actor, critic = Actor(copy.deepcopy(model)), Critic(copy.deepcopy(backbone))
    with torch.random.fork_rng():
        torch.manual_seed(6)
        torch.nn.init.normal_(critic.value_head.weight, std=0.25)
    judge = torch.nn.ModuleDict({"backbone": backbone, "value_head": copy.deepcopy(critic.value_head)})
    given = samples()
    draw = random.Random(1)
    for one in given:
        with torch.no_grad():
            now = naive.valued(judge["backbone"], judge["value_head"], one.prompt, one.response)
        one.values = [float(value) + draw.gauss(0, 0.2) for value in now]
        if one.group in (2, 3):
            one.turns = [draw.gauss(0, 1) if acts else 0.0 for acts in one.action]
            one.reward = sum(one.turns)
    given[5].reward = math.nan
    rows = list(records(given))
    rows[12:] = [row.replace(reward=None) for row in rows[12:]]
    rows[10] = rows[10].replace(token_level_reward=[math.nan if acts else 0.0 for acts in given[10].action])
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
        optimizer=optimizing(how),
        critic_optimizer=optimizing(slow),
        minibatch=MinibatchConfig(minibatches=2, packed=packed, token_budget=budget),
    )
    seen = gradients(monkeypatch, learner.optimizer), gradients(monkeypatch, learner.critic_optimizer)
    learned = learner.update(complete(rows, algorithm), step=1)

    scored = [one for i, one in enumerate(given) if i not in (5, 10)]
    if kl_in == "reward":
        how.kl_coef = 0.0
        naive.gae(scored, 0.99, 0.95, kl_coef=0.05)
    else:
        naive.gae(scored, 0.99, 0.95)
    naive.whitened(scored)
    assert learned.placements[5] == learned.placements[10] == {"excluded": "no reward"}
    movers = [naive.optimizer_of(each, list(of.parameters())) for each, of in ((how, model), (slow, judge))]
    losses: list[tuple[float, float]] = []
    for k, rows in enumerate(minibatches(learned, 2)):
        chosen = [given[i] for i in rows]
        loss, _ = naive.policy_loss(model, how, chosen)
        same(seen[0][k], naive.moved(how, movers[0], model, loss)[0])
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
    given = samples()
    given[9].reward = math.nan
    algorithm = AlgorithmConfig(estimator="reinforce_plus_plus_baseline")
    found = complete(records(given), algorithm)
    expected = estimate("reinforce_plus_plus_baseline", records(given)).advantages
    scored = [one for i, one in enumerate(given) if i != 9]
    naive.by_group(scored, naive.dr_grpo)
    naive.whitened(scored)
    given[9].advantages = [0.0] * len(given[9].response)
    for row, ours, one in zip(found, expected, given, strict=True):
        assert row.advantages is not None
        theirs = [a if acts else 0.0 for a, acts in zip(one.advantages, one.action, strict=True)]
        assert row.advantages.tolist() == pytest.approx(theirs, abs=1e-6)
        assert torch.as_tensor(ours).tolist() == pytest.approx(theirs, abs=1e-6)


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
    how = How(lr=0.3, optimizer="sgd", betas=(0.0, 0.999), **changes)
    model = llama()
    actor, given = Actor(copy.deepcopy(model)), samples()
    algorithm = AlgorithmConfig.preset(name)
    if algorithm.drop_constant_groups:
        given = [one for one in given if one.group != 1]
    learner = Learner(
        actor,
        name,
        optimizer=optimizing(how),
        minibatch=MinibatchConfig(minibatches=2, packed=packed, token_budget=budget),
        max_tokens=12,
    )
    seen = gradients(monkeypatch, learner.optimizer)
    learned = learner.update(complete(records(given), algorithm), step=1)
    if advise is not None:
        advise(given)
    mover = naive.optimizer_of(how, list(model.parameters()))
    losses = []
    for k, rows in enumerate(minibatches(learned, 2)):
        loss, found = naive.policy_loss(model, how, [given[i] for i in rows])
        same(seen[k], naive.moved(how, mover, model, loss)[0])
        losses.append(found["loss"])
    same(weights(actor.model), weights(model))
    assert learned.metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("packed", "budget"), LAYOUTS)
def test_mix(monkeypatch: pytest.MonkeyPatch, packed: bool, budget: int) -> None:
    """Own rows, some with the engine's log-probs alone, beside an expert's, of which there are tokens and no more."""
    how = How(loss="mix", mu=0.1, kl_coef=0.05, entropy_coef=0.02, lr=0.3, optimizer="sgd", betas=(0.0, 0.999))
    model = llama()
    actor, given = Actor(copy.deepcopy(model)), samples()
    for one in given:
        one.expert = one.group == 3
    own = [one for one in given if not one.expert]
    algorithm = AlgorithmConfig.preset("mix", kl_coef=0.05, entropy_coef=0.02)
    rows = list(complete(records(own), algorithm))
    for i in (1, 4, 6):
        rows[i] = rows[i].replace(old_logprobs=None)
        own[i].old = own[i].engine
    bare = dict.fromkeys(("reward", "logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs"))
    rows += [row.replace(**bare) for row in records([one for one in given if one.expert])]
    learner = Learner(
        actor,
        algorithm,
        optimizer=optimizing(how),
        minibatch=MinibatchConfig(minibatches=2, packed=packed, token_budget=budget),
    )
    seen = gradients(monkeypatch, learner.optimizer)
    learned = learner.update(rows, step=1, expert=[one.expert for one in given])
    naive.by_group(own, naive.grpo)
    mover = naive.optimizer_of(how, list(model.parameters()))
    losses = []
    for k, chosen in enumerate(minibatches(learned, 2)):
        loss, found = naive.policy_loss(model, how, [given[i] for i in chosen])
        same(seen[k], naive.moved(how, mover, model, loss)[0])
        losses.append(found["loss"])
    same(weights(actor.model), weights(model))
    assert learned.metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("packed", "budget"), LAYOUTS)
def test_dpo(monkeypatch: pytest.MonkeyPatch, packed: bool, budget: int) -> None:
    """Pairs of answers in two minibatches, twice; both answers of a pair are in one micro-batch."""
    how = How(lr=0.3, optimizer="sgd", betas=(0.0, 0.999))
    model, reference = llama(), llama(101)
    actor, given = Actor(copy.deepcopy(model)), samples()
    pairs = [(one.prompt, one.response, two.response) for one, two in zip(given[::2], given[1::2], strict=True)]
    rows = [
        Experience(tokens=prompt, chosen=chosen, rejected=rejected, eid={"batch": 1, "task": i})
        for i, (prompt, chosen, rejected) in enumerate(pairs)
    ]
    learner = Learner(
        actor,
        "dpo",
        reference=Actor(reference, trainable=False),
        optimizer=optimizing(how),
        minibatch=MinibatchConfig(minibatches=2, epochs=2, packed=packed, token_budget=budget),
    )
    seen = gradients(monkeypatch, learner.optimizer)
    learned = learner.update(complete(rows, AlgorithmConfig.preset("dpo")), step=1)
    assert all(len(place[key]) == 2 for place in learned.placements for key in ("minibatch", "micro_batch", "weight"))
    mover = naive.optimizer_of(how, list(model.parameters()))
    losses = []
    for epoch in range(2):
        for k in range(2):
            chosen = [
                pair for pair, place in zip(pairs, learned.placements, strict=True) if place["minibatch"][epoch] == k
            ]
            loss = naive.dpo_loss(model, reference, how, chosen)
            same(seen[2 * epoch + k], naive.moved(how, mover, model, loss)[0])
            losses.append(loss.item())
    same(weights(actor.model), weights(model))
    assert learned.metrics["loss"] == pytest.approx(sum(losses) / 4, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_weights(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """What tokens weigh: by the record, by the sampler, and by how much likelier the trainer finds them than the engine
    did, truncated; tokens too far off are masked, and count in no denominator."""
    how = How(mode=mode, kl_coef=0.05, entropy_coef=0.02, lr=0.3, optimizer="sgd", betas=(0.0, 0.999))
    model = llama()
    actor, given = Actor(copy.deepcopy(model)), samples()
    algorithm = AlgorithmConfig.preset(
        "grpo",
        kl_coef=0.05,
        entropy_coef=0.02,
        loss_options={"mode": mode},
        correction={"truncate": 1.2, "mask_outside": (0.5, 4.0)},
    )
    draw = random.Random(3)
    own = [[draw.uniform(0.5, 1.5) for _ in one.response] for one in given]
    drawn = [draw.uniform(0.5, 2.0) for _ in given]
    rows = complete(records(given), algorithm).assign(loss_weights=own)
    naive.by_group(given, naive.grpo)
    masked = 0
    for one, mine, share in zip(given, own, drawn, strict=True):
        ratios = [math.exp(old - engine) for old, engine in zip(one.old, one.engine, strict=True)]
        inside = [acts and 0.5 <= ratio <= 4 for acts, ratio in zip(one.action, ratios, strict=True)]
        masked += sum(one.action) - sum(inside)
        one.action = inside
        one.weights = [w * share * min(ratio, 1.2) for w, ratio in zip(mine, ratios, strict=True)]
    assert masked > 3
    learner = Learner(
        actor,
        algorithm,
        optimizer=optimizing(how),
        minibatch=MinibatchConfig(minibatches=2, packed=True, token_budget=24),
    )
    seen = gradients(monkeypatch, learner.optimizer)
    learned = learner.update(rows, step=1, weights=drawn)
    mover = naive.optimizer_of(how, list(model.parameters()))
    for k, chosen in enumerate(minibatches(learned, 2)):
        loss, _ = naive.policy_loss(model, how, [given[i] for i in chosen])
        same(seen[k], naive.moved(how, mover, model, loss)[0])
    same(weights(actor.model), weights(model))
