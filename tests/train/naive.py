"""One step of learning, written from the papers in the plainest way: one sample at a time, one token at a time.

Nothing here is the project's, and nothing here is fast: plain Python loops, whole logits, torch's own optimizer. A
`Sample` goes through the model by itself, without padding; every loss is a list with one entry for each action.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Numbers = list[torch.Tensor]


@dataclass
class Sample:
    """A prompt, what was said, which of its tokens are actions (a tool's are not), and what is known about it."""

    prompt: list[int]
    response: list[int]
    action: list[bool]
    group: int = 0
    reward: float = 0.0
    turns: list[float] = field(default_factory=list)
    """The reward of each token of the response, where rewards are given before the end, too."""
    old: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    ref: list[float] = field(default_factory=list)
    teacher: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    expert: bool = False


@dataclass
class How:
    """What is done; the names of losses are the keys of `LOSSES`."""

    loss: str = "ppo"
    mode: str = "token-mean"
    clip: tuple[float, float] = (0.2, 0.2)
    dual: float | None = 3.0
    kl: str = "k2"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    tau: float = 1.0
    mu: float = 0.1
    beta: float = 0.1
    longest: int = 1
    value_clip: float | None = 0.2
    optimizer: str = "adamw"
    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0


# --- models -----------------------------------------------------------------------------------------------------------


def scored(model: Any, prompt: Sequence[int], response: Sequence[int]) -> tuple[Numbers, Numbers]:
    """The log-prob of each token of the response, and the entropy of what it was sampled from."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0]
    every = torch.log_softmax(logits.float(), dim=-1)
    log_probs, entropies = [], []
    for i, token in enumerate(response):
        row = every[len(prompt) + i - 1]
        log_probs.append(row[token])
        entropies.append(-(row.exp() * row).sum())
    return log_probs, entropies


def valued(backbone: Any, head: Any, prompt: Sequence[int], response: Sequence[int]) -> Numbers:
    """The value of the state before each token of the response."""
    hidden = backbone(input_ids=torch.tensor([[*prompt, *response]])).last_hidden_state[0]
    return [head(hidden[len(prompt) + i - 1])[0] for i in range(len(response))]


# --- advantages -------------------------------------------------------------------------------------------------------


def by_group(samples: Sequence[Sample], rule: Callable[[float, list[float]], float]) -> None:
    """One advantage on every action: of the reward, and of all rewards of its group."""
    for one in samples:
        rewards = [other.reward for other in samples if other.group == one.group]
        one.advantages = [rule(one.reward, rewards)] * len(one.response)


def grpo(reward: float, rewards: list[float]) -> float:
    """(r - mean) / (std + 1e-6), the deviation by n - 1 (arXiv 2402.03300)."""
    return (reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6)


def dr_grpo(reward: float, rewards: list[float]) -> float:
    """r - mean (arXiv 2503.20783)."""
    return reward - statistics.fmean(rewards)


def rloo(reward: float, rewards: list[float]) -> float:
    """r - the mean of the others (arXiv 2402.14740)."""
    return reward - (sum(rewards) - reward) / (len(rewards) - 1)


def asymre(reward: float, rewards: list[float]) -> float:
    """r - (mean - 0.1) (arXiv 2506.20520)."""
    return reward - (statistics.fmean(rewards) - 0.1)


def reinforce(reward: float, rewards: list[float]) -> float:
    """r: what is still to come, of a reward at the end without discount."""
    return reward


def whitened(samples: Sequence[Sample]) -> None:
    """Advantages of all actions of all samples to mean 0 and variance 1 (n - 1)."""
    every = [a for one in samples for a, acts in zip(one.advantages, one.action, strict=True) if acts]
    mean, deviation = statistics.fmean(every), math.sqrt(statistics.variance(every) + 1e-8)
    for one in samples:
        one.advantages = [(a - mean) / deviation for a in one.advantages]


def gae(samples: Sequence[Sample], gamma: float, lam: float, kl_coef: float = 0.0) -> None:
    """Generalised advantage estimation over actions (arXiv 1506.02438), the reward on the last of them or where each
    turn was rewarded, each less kl_coef (log old - log ref)."""
    for one in samples:
        one.advantages, one.returns = [0.0] * len(one.response), [0.0] * len(one.response)
        following, advantage, reward = 0.0, 0.0, one.reward
        for i in reversed(range(len(one.response))):
            if not one.action[i]:
                continue
            reward = one.turns[i] if one.turns else reward
            penalty = kl_coef * (one.old[i] - one.ref[i]) if kl_coef else 0.0
            delta = reward - penalty + gamma * following - one.values[i]
            advantage = delta + gamma * lam * advantage
            one.advantages[i], one.returns[i] = advantage, advantage + one.values[i]
            following, reward = one.values[i], 0.0


def distilled(samples: Sequence[Sample]) -> None:
    """How much likelier the teacher finds each token than the policy that said it."""
    for one in samples:
        one.advantages = [theirs - ours for theirs, ours in zip(one.teacher, one.old, strict=True)]


# --- losses: one entry for each token of one sample -------------------------------------------------------------------


def ppo_tokens(how: How, one: Sample, log_probs: Numbers) -> Numbers:
    """max(-A r, -A clip(r)), and at most -A dual where A < 0 (arXiv 1707.06347, 1912.09729)."""
    losses = []
    for log_p, old, a in zip(log_probs, one.old, one.advantages, strict=True):
        ratio = torch.exp(log_p - old)
        held = torch.clamp(ratio, 1 - how.clip[0], 1 + how.clip[1])
        loss = torch.max(-a * ratio, -a * held)
        if a < 0 and how.dual is not None:
            loss = torch.min(loss, torch.tensor(-a * how.dual))
        losses.append(loss)
    return losses


def gspo_tokens(how: How, one: Sample, log_probs: Numbers) -> Numbers:
    """The row's ratio, exp(mean log r), clipped, on each of its tokens (arXiv 2507.18071, equations 5 and 7)."""
    acting = [i for i, acts in enumerate(one.action) if acts]
    mean = sum(log_probs[i] - one.old[i] for i in acting) / len(acting)
    ratio = torch.exp(torch.as_tensor(mean))
    a = one.advantages[acting[0]]
    loss = -torch.min(ratio * a, torch.clamp(ratio, 1 - how.clip[0], 1 + how.clip[1]) * a)
    return [loss for _ in log_probs]


def cispo_tokens(how: How, one: Sample, log_probs: Numbers) -> Numbers:
    """-A clip(r) log p, the clipped ratio a constant (arXiv 2506.13585)."""
    losses = []
    for log_p, old, a in zip(log_probs, one.old, one.advantages, strict=True):
        ratio = math.exp(log_p.item() - old)
        losses.append(-a * min(max(ratio, 1 - how.clip[0]), 1 + how.clip[1]) * log_p)
    return losses


def topr_tokens(how: How, one: Sample, log_probs: Numbers) -> Numbers:
    """-A log p where A > 0, else -A min(r, 1) log p, r a constant (arXiv 2503.14286)."""
    losses = []
    for log_p, old, a in zip(log_probs, one.old, one.advantages, strict=True):
        losses.append(-a * (1.0 if a > 0 else min(math.exp(log_p.item() - old), 1.0)) * log_p)
    return losses


def opmd_tokens(how: How, one: Sample, log_probs: Numbers) -> Numbers:
    """-A log p / (1 + tau) (arXiv 2505.17826)."""
    return [-a * log_p / (1 + how.tau) for log_p, a in zip(log_probs, one.advantages, strict=True)]


def sft_tokens(how: How, one: Sample, log_probs: Numbers) -> Numbers:
    """-log p."""
    return [-log_p for log_p in log_probs]


LOSSES: dict[str, Callable[[How, Sample, Numbers], Numbers]] = {
    "ppo": ppo_tokens,
    "gspo": gspo_tokens,
    "cispo": cispo_tokens,
    "topr": topr_tokens,
    "opmd": opmd_tokens,
    "sft": sft_tokens,
}


def kl_tokens(how: How, one: Sample, log_probs: Numbers) -> Numbers:
    """The estimates of http://joschu.net/blog/kl-approx.html, d = log p - log ref."""
    estimates: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: torch.exp(-d) - 1 + d,
    }
    return [estimates[how.kl](log_p - ref) for log_p, ref in zip(log_probs, one.ref, strict=True)]


def one_number(how: How, samples: Sequence[Sample], losses: Sequence[Numbers]) -> torch.Tensor:
    """All losses of all actions of a minibatch, weighed, as one number."""
    sums, counts = [], []
    for one, tokens in zip(samples, losses, strict=True):
        weights = one.weights or [1.0] * len(tokens)
        kept = [w * loss for w, loss, acts in zip(weights, tokens, one.action, strict=True) if acts]
        sums.append(torch.stack(kept).sum())
        counts.append(len(kept))
    if how.mode == "token-mean":
        return torch.stack(sums).sum() / sum(counts)
    if how.mode == "seq-mean-token-mean":
        return sum(total / n for total, n in zip(sums, counts, strict=True)) / len(sums)  # type: ignore[return-value]
    if how.mode == "seq-mean-token-sum":
        return torch.stack(sums).mean()
    if how.mode == "seq-mean-token-sum-norm":
        return torch.stack(sums).sum() / (len(sums) * how.longest)
    raise KeyError(how.mode)


def policy_loss(model: Any, how: How, samples: Sequence[Sample]) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a minibatch: of the policy, plus kl_coef KL, minus entropy_coef entropy; and its parts."""
    every = [scored(model, one.prompt, one.response) for one in samples]
    parts: dict[str, float] = {}
    if how.loss == "mix":
        own = [i for i, one in enumerate(samples) if not one.expert]
        theirs = [i for i, one in enumerate(samples) if one.expert]
        total = torch.zeros(())
        for rows, name, share in ((own, "ppo", 1 - how.mu), (theirs, "sft", how.mu)):
            if rows:
                losses = [LOSSES[name](how, samples[i], every[i][0]) for i in rows]
                total = total + share * one_number(how, [samples[i] for i in rows], losses)
        every, samples = [every[i] for i in own], [samples[i] for i in own]  # KL and entropy are of its own
    else:
        total = one_number(how, samples, [LOSSES[how.loss](how, samples[i], every[i][0]) for i in range(len(samples))])
    if how.kl_coef and samples:
        kl = one_number(
            how, samples, [kl_tokens(how, one, found[0]) for one, found in zip(samples, every, strict=True)]
        )
        total, parts["kl"] = total + how.kl_coef * kl, kl.item()
    if how.entropy_coef and samples:
        entropy = one_number(how, samples, [found[1] for found in every])
        total, parts["entropy"] = total - how.entropy_coef * entropy, entropy.item()
    return total, {"loss": total.item(), **parts}


def clip_fraction(model: Any, how: How, samples: Sequence[Sample]) -> float:
    """The share of actions for which PPO's clip decides."""
    hits, count = 0, 0
    for one in samples:
        for i, log_p in enumerate(scored(model, one.prompt, one.response)[0]):
            if one.action[i]:
                ratio, a = math.exp(log_p.item() - one.old[i]), one.advantages[i]
                hits += (a > 0 and ratio > 1 + how.clip[1]) or (a < 0 and ratio < 1 - how.clip[0])
                count += 1
    return hits / count


def dpo_loss(model: Any, reference: Any, how: How, pairs: Sequence[tuple[list[int], list[int], list[int]]]) -> Any:
    """The mean over (prompt, chosen, rejected) of -log sigmoid(beta z), z the log-ratio to the reference of the chosen
    answer less that of the rejected one (arXiv 2305.18290)."""
    losses = []
    for prompt, chosen, rejected in pairs:
        logit: Any = 0.0
        for sign, answer in ((1, chosen), (-1, rejected)):
            with torch.no_grad():
                theirs = sum(scored(reference, prompt, answer)[0])
            logit = logit + sign * (sum(scored(model, prompt, answer)[0]) - theirs)
        losses.append(-torch.log(torch.sigmoid(how.beta * logit)))
    return torch.stack(losses).mean()


def value_loss(backbone: Any, head: Any, how: How, samples: Sequence[Sample]) -> torch.Tensor:
    """The mean over actions of half the larger squared error, of V and of V near its old value."""
    losses = []
    for one in samples:
        for i, value in enumerate(valued(backbone, head, one.prompt, one.response)):
            if not one.action[i]:
                continue
            error = (value - one.returns[i]) ** 2
            if how.value_clip is not None:
                old = one.values[i]
                near = torch.clamp(value, old - how.value_clip, old + how.value_clip)
                error = torch.max(error, (near - one.returns[i]) ** 2)
            losses.append(error / 2)
    return torch.stack(losses).mean()


# --- a step -----------------------------------------------------------------------------------------------------------


def optimizer_of(how: How, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's own; weights decay, vectors do not."""
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": how.weight_decay},
        {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0},
    ]
    if how.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=how.lr, momentum=how.betas[0])
    return torch.optim.AdamW(groups, lr=how.lr, betas=how.betas, eps=how.eps)


def moved(how: How, mover: torch.optim.Optimizer, module: Any, loss: torch.Tensor) -> tuple[dict[str, Any], float]:
    """Descend once; the gradient by name, before it was clipped, and its length."""
    mover.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    parameters = [one for one in module.parameters() if one.requires_grad]
    gradient = {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}
    length = float(torch.nn.utils.clip_grad_norm_(parameters, how.grad_clip if how.grad_clip else math.inf))
    mover.step()
    return gradient, length
