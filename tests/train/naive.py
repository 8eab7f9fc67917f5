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
    for sample in samples:
        rewards = [mate.reward for mate in samples if mate.group == sample.group]
        sample.advantages = [rule(sample.reward, rewards)] * len(sample.response)


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
    every = [a for sample in samples for a, acts in zip(sample.advantages, sample.action, strict=True) if acts]
    mean, deviation = statistics.fmean(every), math.sqrt(statistics.variance(every) + 1e-8)
    for sample in samples:
        sample.advantages = [(a - mean) / deviation for a in sample.advantages]


def gae(samples: Sequence[Sample], gamma: float, lam: float, kl_coef: float = 0.0) -> None:
    """Generalised advantage estimation over actions (arXiv 1506.02438), the reward on the last of them or where each
    turn was rewarded, each less kl_coef (log old - log ref)."""
    for sample in samples:
        sample.advantages, sample.returns = [0.0] * len(sample.response), [0.0] * len(sample.response)
        following, advantage, reward = 0.0, 0.0, sample.reward
        for i in reversed(range(len(sample.response))):
            if not sample.action[i]:
                continue
            reward = sample.turns[i] if sample.turns else reward
            penalty = kl_coef * (sample.old[i] - sample.ref[i]) if kl_coef else 0.0
            delta = reward - penalty + gamma * following - sample.values[i]
            advantage = delta + gamma * lam * advantage
            sample.advantages[i], sample.returns[i] = advantage, advantage + sample.values[i]
            following, reward = sample.values[i], 0.0


def distilled(samples: Sequence[Sample]) -> None:
    """How much likelier the teacher finds each token than the policy that said it."""
    for sample in samples:
        sample.advantages = [teacher - student for teacher, student in zip(sample.teacher, sample.old, strict=True)]


# --- losses: one entry for each token of one sample -------------------------------------------------------------------


def ppo_tokens(settings: How, sample: Sample, log_probs: Numbers) -> Numbers:
    """max(-A r, -A clip(r)), and at most -A dual where A < 0 (arXiv 1707.06347, 1912.09729)."""
    losses = []
    for log_p, old, a in zip(log_probs, sample.old, sample.advantages, strict=True):
        ratio = torch.exp(log_p - old)
        clipped = torch.clamp(ratio, 1 - settings.clip[0], 1 + settings.clip[1])
        loss = torch.max(-a * ratio, -a * clipped)
        if a < 0 and settings.dual is not None:
            loss = torch.min(loss, torch.tensor(-a * settings.dual))
        losses.append(loss)
    return losses


def gspo_tokens(settings: How, sample: Sample, log_probs: Numbers) -> Numbers:
    """The row's ratio, exp(mean log r), clipped, on each of its tokens (arXiv 2507.18071, equations 5 and 7)."""
    acting = [i for i, acts in enumerate(sample.action) if acts]
    mean = sum(log_probs[i] - sample.old[i] for i in acting) / len(acting)
    ratio = torch.exp(torch.as_tensor(mean))
    a = sample.advantages[acting[0]]
    loss = -torch.min(ratio * a, torch.clamp(ratio, 1 - settings.clip[0], 1 + settings.clip[1]) * a)
    return [loss for _ in log_probs]


def cispo_tokens(settings: How, sample: Sample, log_probs: Numbers) -> Numbers:
    """-A clip(r) log p, the clipped ratio a constant (arXiv 2506.13585)."""
    losses = []
    for log_p, old, a in zip(log_probs, sample.old, sample.advantages, strict=True):
        ratio = math.exp(log_p.item() - old)
        losses.append(-a * min(max(ratio, 1 - settings.clip[0]), 1 + settings.clip[1]) * log_p)
    return losses


def topr_tokens(settings: How, sample: Sample, log_probs: Numbers) -> Numbers:
    """-A log p where A > 0, else -A min(r, 1) log p, r a constant (arXiv 2503.14286)."""
    losses = []
    for log_p, old, a in zip(log_probs, sample.old, sample.advantages, strict=True):
        losses.append(-a * (1.0 if a > 0 else min(math.exp(log_p.item() - old), 1.0)) * log_p)
    return losses


def opmd_tokens(settings: How, sample: Sample, log_probs: Numbers) -> Numbers:
    """-A log p / (1 + tau) (arXiv 2505.17826)."""
    return [-a * log_p / (1 + settings.tau) for log_p, a in zip(log_probs, sample.advantages, strict=True)]


def sft_tokens(settings: How, sample: Sample, log_probs: Numbers) -> Numbers:
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


def kl_tokens(settings: How, sample: Sample, log_probs: Numbers) -> Numbers:
    """The estimates of http://joschu.net/blog/kl-approx.html, d = log p - log ref."""
    estimates: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: torch.exp(-d) - 1 + d,
    }
    return [estimates[settings.kl](log_p - ref) for log_p, ref in zip(log_probs, sample.ref, strict=True)]


def one_number(settings: How, samples: Sequence[Sample], losses: Sequence[Numbers]) -> torch.Tensor:
    """All losses of all actions of a minibatch, weighed, as one number."""
    sums, counts = [], []
    for sample, tokens in zip(samples, losses, strict=True):
        weights = sample.weights or [1.0] * len(tokens)
        weighted = [w * loss for w, loss, acts in zip(weights, tokens, sample.action, strict=True) if acts]
        sums.append(torch.stack(weighted).sum())
        counts.append(len(weighted))
    if settings.mode == "token-mean":
        return torch.stack(sums).sum() / sum(counts)
    if settings.mode == "seq-mean-token-mean":
        return sum(total / n for total, n in zip(sums, counts, strict=True)) / len(sums)  # type: ignore[return-value]
    if settings.mode == "seq-mean-token-sum":
        return torch.stack(sums).mean()
    if settings.mode == "seq-mean-token-sum-norm":
        return torch.stack(sums).sum() / (len(sums) * settings.longest)
    raise KeyError(settings.mode)


def policy_loss(model: Any, settings: How, samples: Sequence[Sample]) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a minibatch: of the policy, plus kl_coef KL, minus entropy_coef entropy; and its parts."""
    every = [scored(model, sample.prompt, sample.response) for sample in samples]
    parts: dict[str, float] = {}
    if settings.loss == "mix":
        own_rows = [i for i, sample in enumerate(samples) if not sample.expert]
        expert_rows = [i for i, sample in enumerate(samples) if sample.expert]
        total = torch.zeros(())
        for rows, name, share in ((own_rows, "ppo", 1 - settings.mu), (expert_rows, "sft", settings.mu)):
            if rows:
                losses = [LOSSES[name](settings, samples[i], every[i][0]) for i in rows]
                total = total + share * one_number(settings, [samples[i] for i in rows], losses)
        every, samples = [every[i] for i in own_rows], [samples[i] for i in own_rows]  # KL and entropy are of its own
    else:
        total = one_number(
            settings, samples, [LOSSES[settings.loss](settings, samples[i], every[i][0]) for i in range(len(samples))]
        )
    if settings.kl_coef and samples:
        kl = one_number(
            settings,
            samples,
            [kl_tokens(settings, sample, scores[0]) for sample, scores in zip(samples, every, strict=True)],
        )
        total, parts["kl"] = total + settings.kl_coef * kl, kl.item()
    if settings.entropy_coef and samples:
        entropy = one_number(settings, samples, [scores[1] for scores in every])
        total, parts["entropy"] = total - settings.entropy_coef * entropy, entropy.item()
    return total, {"loss": total.item(), **parts}


def clip_fraction(model: Any, settings: How, samples: Sequence[Sample]) -> float:
    """The share of actions for which PPO's clip decides."""
    hits, count = 0, 0
    for sample in samples:
        for i, log_p in enumerate(scored(model, sample.prompt, sample.response)[0]):
            if sample.action[i]:
                ratio, a = math.exp(log_p.item() - sample.old[i]), sample.advantages[i]
                hits += (a > 0 and ratio > 1 + settings.clip[1]) or (a < 0 and ratio < 1 - settings.clip[0])
                count += 1
    return hits / count


def dpo_loss(model: Any, reference: Any, settings: How, pairs: Sequence[tuple[list[int], list[int], list[int]]]) -> Any:
    """The mean over (prompt, chosen, rejected) of -log sigmoid(beta z), z the log-ratio to the reference of the chosen
    answer less that of the rejected one (arXiv 2305.18290)."""
    losses = []
    for prompt, chosen, rejected in pairs:
        logit: Any = 0.0
        for sign, answer in ((1, chosen), (-1, rejected)):
            with torch.no_grad():
                reference_sum = sum(scored(reference, prompt, answer)[0])
            logit = logit + sign * (sum(scored(model, prompt, answer)[0]) - reference_sum)
        losses.append(-torch.log(torch.sigmoid(settings.beta * logit)))
    return torch.stack(losses).mean()


def value_loss(backbone: Any, head: Any, settings: How, samples: Sequence[Sample]) -> torch.Tensor:
    """The mean over actions of half the larger squared error, of V and of V near its old value."""
    losses = []
    for sample in samples:
        for i, value in enumerate(valued(backbone, head, sample.prompt, sample.response)):
            if not sample.action[i]:
                continue
            error = (value - sample.returns[i]) ** 2
            if settings.value_clip is not None:
                old = sample.values[i]
                clipped = torch.clamp(value, old - settings.value_clip, old + settings.value_clip)
                error = torch.max(error, (clipped - sample.returns[i]) ** 2)
            losses.append(error / 2)
    return torch.stack(losses).mean()


# --- a step -----------------------------------------------------------------------------------------------------------


def optimizer_of(settings: How, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's own; weights decay, vectors do not."""
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.dim() > 1],
            "weight_decay": settings.weight_decay,
        },
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.betas[0])
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def moved(settings: How, mover: torch.optim.Optimizer, module: Any, loss: torch.Tensor) -> tuple[dict[str, Any], float]:
    """Descend once; the gradient by name, before it was clipped, and its length."""
    mover.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradient = {
        name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None
    }
    length = float(torch.nn.utils.clip_grad_norm_(parameters, settings.grad_clip if settings.grad_clip else math.inf))
    mover.step()
    return gradient, length
