"""From rewards of rows to advantages of tokens, over a whole rollout: shaping, KL, estimator, whitening, clipping.

Invariant: everything is computed once, over all rows of the rollout (and of all processes), by group id: the numbers do
not depend on how rows are cut into batches, and what is normalised is normalised once. The order is

    reward -> overlong penalty -> running norm -> estimator's score of the row -> clip
           -> on the last action, less the KL of each token -> return, or GAE -> whiten -> clip

and `info["reward"]` stays what the reward source said. Where a row has token rewards (`extras["token_level_reward"]`),
estimators that take rewards of tokens are given these; what shaping added to the row's reward is on its last action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import torch

from rollbook.algorithms import ESTIMATORS
from rollbook.algorithms.advantages import cumulative_returns, dr_grpo, grpo, reinforce_plus_plus_baseline, rloo
from rollbook.algorithms.filters import zero_variance
from rollbook.algorithms.groups import block_means, sums_of_blocks
from rollbook.algorithms.inputs import INFO_KEYS
from rollbook.algorithms.kl import penalise
from rollbook.algorithms.moments import whiten
from rollbook.algorithms.results import Advantages, Report, as_advantages
from rollbook.algorithms.shaping import RunningNorm, clip_advantages, clip_rewards, shape_overlong
from rollbook.compat.lightrft.config import MakerConfig
from rollbook.compat.lightrft.rollout_batches import Whole
from rollbook.core.checks import check_float
from rollbook.core.metrics import advise
from rollbook.core.process_group import ALONE, Ranks, current_ranks
from rollbook.core.rows import Rows


@dataclass
class Scored:
    """What became of the rewards: one entry for each row of the rollout."""

    rewards: torch.Tensor
    """[N] What goes on each row's last action, before `finish` clips it."""
    steps: dict[str, Any] = field(default_factory=dict)
    """By the prefix of its metrics, what each step gave back, with a `report`."""
    scale: float = 1.0
    """The factor of the running norm, for token rewards."""

    @property
    def metrics(self) -> dict[str, float]:
        """What the steps report."""
        return {
            name: value for prefix, step in self.steps.items() for name, value in step.report.to_metrics(prefix).items()
        }


@dataclass(frozen=True)
class Recursions:
    """Replacements for the recursions over tokens, by LightRFT's signatures; `None`: the built-in one.

    Each is called once per batch, in the batch's own layout: (B, A) tensors if padded, `Rows` if packed.
    """

    returns: Callable[..., Any] | None = None
    """`get_cumulative_returns(rewards, action_mask, gamma)`, for estimators over rows and `reinforce`."""
    advantages: Callable[..., Any] | None = None
    """`get_advantages_and_returns(values, rewards, action_mask, gamma, lambd)`, for `gae` and `ppo`."""


def over_rows(name: str) -> bool:
    """Whether an estimator scores whole rows within groups, whose scores then go through returns and the KL penalty.

    CPGD does score rows, but defines its advantages by that alone: no KL, no discount.

    >>> over_rows("rloo"), over_rows("reinforce_baseline"), over_rows("gae"), over_rows("cpgd")
    (True, True, False, False)
    """
    entry = ESTIMATORS[name]
    if entry.scores == "rows":
        return bool(entry.kl_in_reward)
    return entry.compares_runs and "token_rewards" in entry.inputs


def takes_token_rewards(name: str) -> bool:
    """Whether an estimator is given token rewards where a row has them.

    >>> takes_token_rewards("gae"), takes_token_rewards("grpo"), takes_token_rewards("reinforce_plus_plus_baseline")
    (True, False, False)
    """
    return ESTIMATORS[name].takes_token_rewards


def score(
    whole: Whole, config: MakerConfig, norm: RunningNorm | None = None, max_new_tokens: int | None = None
) -> Scored:
    """The rewards of a rollout, shaped, and scored within their groups if that is what the estimator does."""
    ranks = current_ranks()
    if ranks is ALONE and norm is None and not config.overlong_buffer:
        scored = _block_scores(whole, config)
        if scored is not None:
            return scored
    rewards = whole.numbers("reward")
    steps: dict[str, Any] = {}
    scale = 1.0
    if config.overlong_buffer:
        if max_new_tokens is None:
            raise ValueError("max_new_tokens: got None, expected the longest response, for the overlong buffer")
        shaped = steps["overlong"] = shape_overlong(
            rewards,
            whole.numbers("response_length"),
            max_length=max_new_tokens,
            buffer=config.overlong_buffer_len,
            factor=config.overlong_buffer_penalty_factor,
        )
        rewards = shaped.rewards
    if norm is not None:
        normed = steps["running_norm"] = norm(rewards, ranks=ranks)
        rewards = normed.rewards
        scale = 1 / norm.scale
    if over_rows(config.advantage_estimator):
        found = _row_scores(whole, rewards, config, ranks)
        steps[ESTIMATORS[config.advantage_estimator].name] = found
        scores = torch.as_tensor(found.advantages if found.scores is None else found.scores, dtype=torch.float32)
        missing = rewards.isnan()
        rewards = torch.where(missing, torch.nan, scores) if missing.any() else scores  # it stays missing
    return Scored(rewards, steps, scale)


def _block_scores(whole: Whole, config: MakerConfig) -> Scored | None:
    """Score rewards whose groups are blocks of `n_samples_per_prompt` rows, in about ten numpy operations.

    Returns:
        The scores of the general path, bit for bit, or `None` if it is needed: other estimators or options, rows with
        ids, missing or infinite rewards, rewards that are not float32 on the CPU.
    """
    size, options = config.n_samples_per_prompt, config.estimator_options
    entry = ESTIMATORS[config.advantage_estimator]
    formula = entry.function
    if formula not in _BLOCK_FORMULAS or size < 2 or (options and (formula is not grpo or list(options) != ["eps"])):
        return None
    parts = []
    for batch, count in zip(whole.batches, whole.sizes, strict=True):
        part = batch.info.get("reward") if batch.info else None
        if batch.ids or type(part) is not torch.Tensor or not part.is_cpu or part.dtype != torch.float32:
            return None
        if part.shape != (count,) or part.requires_grad:
            return None
        parts.append(part.numpy())
    if not parts:
        return None
    rewards = np.concatenate(parts, dtype=np.float64)  # a copy: the report is computed later
    if not len(rewards) or len(rewards) % size or not isfinite(rewards.dot(rewards)):
        return None
    blocks = rewards.reshape(-1, size)
    ascending, means = block_means(blocks)
    scores = blocks - means[:, None]
    if formula is rloo:
        scores *= size
        scores /= size - 1
    elif formula is grpo:
        squares = sums_of_blocks((ascending - means[:, None]) ** 2)
        divisors = np.sqrt(squares / (size - 1)) + check_float("eps", options.get("eps", entry.options["eps"]), 0)
        scores /= np.where(divisors > 0, divisors, 1.0)[:, None]
    scores += 0.0  # -0.0 becomes 0.0
    with np.errstate(over="ignore"):
        shaped = torch.from_numpy(scores.reshape(-1).astype(np.float32))

    def report() -> Report:
        return _row_scores(whole, torch.from_numpy(rewards.astype(np.float32)), config, ALONE).report

    return Scored(shaped, {entry.name: Advantages(shaped, None, shaped, None, report)})


_BLOCK_FORMULAS = (grpo, dr_grpo, rloo, reinforce_plus_plus_baseline)
"""The estimators of `_block_scores`; the last one's scores are those of `dr_grpo`."""


def _clipped(rewards: torch.Tensor, config: MakerConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[N] The rewards within the configured bounds, and 1 where that changed one; `None` without bounds."""
    fraction = None
    for low, high in _bounds(config):
        clipped = clip_rewards(rewards, low, high).rewards
        changed = ((clipped != rewards) & ~rewards.isnan()).float()
        fraction = changed if fraction is None else torch.maximum(fraction, changed)
        rewards = clipped
    return rewards, fraction


def _bounds(config: MakerConfig) -> list[tuple[float, float]]:
    if not ESTIMATORS[config.advantage_estimator].clips_rewards:
        return []
    found = [] if config.reward_clip_range is None else [config.reward_clip_range]
    return [*found, (-config.reward_clip, config.reward_clip)] if config.reward_clip > 0 else found


def _row_scores(whole: Whole, rewards: torch.Tensor, config: MakerConfig, ranks: Ranks) -> Advantages:
    entry = ESTIMATORS[config.advantage_estimator]
    if entry.name == "reinforce_plus_plus_baseline":
        # Its baseline is that of dr_grpo; what it does besides (returns, whitening) comes later here.
        entry = ESTIMATORS["dr_grpo"]
    options = {name: value for name, value in config.estimator_options.items() if name in entry.options}
    if "ranks" in entry.options:
        options.setdefault("ranks", ranks)
    ids = whole.ids()
    groups = whole.groups(config.n_samples_per_prompt, ranks)
    alone = config.n_samples_per_prompt == 1 if ids is None else len(set(groups)) == len(groups)
    if ranks is ALONE and alone and len(groups) > 1:
        advise(
            f"{entry.name}: every group has one sample, and nothing to compare it with; n_samples_per_prompt is "
            f"{config.n_samples_per_prompt}"
        )
    given: dict[str, Any] = {
        "rewards": rewards,
        "groups": groups,
        "runs": None if ids is None else whole.runs(),
        "ids": None if ids is None else [eid.uid for eid in ids],
        "steps": None if ids is None else [eid.step for eid in ids],
    }
    if entry.inputs.get("runs") and ids is None:
        given |= {"runs": list(range(len(whole))), "steps": [0] * len(whole)}
    given = {name: value for name, value in given.items() if value is not None and name in entry.inputs}
    return as_advantages(entry.name, entry.call(given, options))


def check(config: MakerConfig, given: Mapping[str, Any]) -> None:
    """Refuse an estimator that lacks a model, before anything is sampled.

    >>> check(MakerConfig(advantage_estimator="gae"), {"values": None})
    Traceback (most recent call last):
        ...
    ValueError: gae: got no values, which it needs; give the maker a critic
    """
    entry = ESTIMATORS[config.advantage_estimator]
    needs = {"values": "values", "teacher_log_probs": "teacher"}
    for name, model in needs.items():
        if name in entry.inputs and given.get(model) is None:
            shown = name if name == "values" else repr(name)
            raise ValueError(f"{entry.name}: got no {shown}, which it needs; {_SOURCES[name]}")
    if config.kl_coef is not None and config.kl_coef > 0 and not config.use_kl_loss and given.get("reference") is None:
        raise ValueError(
            f"initial_model: got None, expected the reference model of the KL penalty (kl_coef is {config.kl_coef:g})"
        )


def finish(
    whole: Whole,
    scored: Scored,
    config: MakerConfig,
    *,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    lambd: float = 1.0,
    recursions: Recursions | None = None,
) -> dict[str, float]:
    """Give each batch of a rollout its `advantages` and `returns`, and `info` what the steps have to say.

    Rewards are clipped here, after whoever scored them. Adds `info["return"]` (the sum of a row's token rewards),
    `reward_clip_frac` and `advantage_clip_frac` where there is a bound, and `filtered` where `dynamic_sampling` masks
    rows. Gives back metrics of the whole.
    """
    ranks = current_ranks()
    recursions = recursions or Recursions()
    entry = ESTIMATORS[config.advantage_estimator]
    mask = whole.rows("action_mask")
    if mask is None:
        raise ValueError("action_mask: got none, and no other response-axis field, expected one")
    metrics = dict(scored.metrics)
    rewards, clip_fraction = _clipped(scored.rewards, config)
    known = ~rewards.isnan() if "rewards" in entry.inputs else torch.ones(len(whole), dtype=torch.bool)
    keep = torch.ones(len(whole), dtype=torch.bool)
    if config.dynamic_sampling:
        groups = whole.groups(config.n_samples_per_prompt, ranks)
        kept = zero_variance(whole.numbers("reward"), groups, whole.runs(), ranks=ranks)
        keep = kept.keep.cpu()
        mask = _where(mask, keep)
        whole.put_numbers("filtered", ~keep)
        metrics |= kept.report.to_metrics("dynamic_sampling")
    coef = 0.0 if config.use_kl_loss else max(kl_coef, 0.0)
    by_token = whole.token_rewards() if takes_token_rewards(entry.name) else None
    if by_token is not None:
        rewards = torch.where(by_token[1], rewards - scored.scale * whole.numbers("reward"), rewards)
    # A list: of a tensor with as many rows as tokens nobody could say which it is of.
    token_rewards, report = penalise(rewards.tolist(), whole.rows("kl") if coef > 0 else None, mask, coef=coef)
    if by_token is not None:
        token_rewards = Rows(token_rewards.values + scored.scale * by_token[0].values, mask.lengths)
    metrics |= report.to_metrics("reward") | {"reward/missing_reward": float((~known).sum())}
    if over_rows(entry.name):
        counted = _where(mask, known)  # of a row without a reward nothing is known, its KL or not
        baseline = entry.name == "reinforce_plus_plus_baseline"
        options = {"whiten": False, "gamma": gamma, "ranks": ranks, **config.estimator_options}
        if baseline and recursions.returns is None:
            # Its scores have the group's mean taken off already: without groups it does the rest.
            found = entry.call({"token_rewards": token_rewards, "mask": counted}, options)
            advantages, returns = found.advantages, found.returns
        else:
            returns = _returns_to_go(whole, token_rewards, counted, gamma, recursions)
            advantages = returns.apply(torch.clone)
            if baseline and options["whiten"]:
                advantages = whiten(advantages, counted, ranks=ranks)
        whitened = baseline and bool(options["whiten"])
    else:
        found, whitened = _over_tokens(
            whole, rewards, token_rewards, mask, config, coef, gamma, lambd, ranks, recursions
        )
        advantages, returns = found.advantages, found.returns
        mask = found.mask if isinstance(found.mask, Rows) else mask
        counted = _where(mask, known)
        metrics |= found.report.to_metrics(entry.name)
    if config.advantages_norm and not whitened and not entry.normalized:
        options = {"eps_in": "std", "scale": not config.no_advantage_std_norm, "ranks": ranks}
        advantages = whiten(advantages, counted, **options)
    if config.advantage_clip > 0:
        clipped = clip_advantages(advantages, mask, config.advantage_clip)
        advantages = clipped.advantages
        whole.put_numbers("advantage_clip_frac", clipped.fractions.cpu())
        metrics["advantage/clip_fraction"] = clipped.fraction
    if clip_fraction is not None:
        whole.put_numbers("reward_clip_frac", clip_fraction)
        metrics["reward/clip_fraction"] = float(clip_fraction.mean())
    sums = [row.sum() for row in token_rewards]
    whole.put_numbers("return", torch.stack(sums) if sums else torch.zeros(0))
    if config.dynamic_sampling or not over_rows(entry.name):
        whole.put("action_mask", mask)
    whole.put("advantages", advantages)
    whole.put("returns", returns)
    return metrics


def _where(mask: Rows, keep: torch.Tensor) -> Rows:
    """A mask with some rows taken out."""
    lengths = torch.tensor(mask.lengths, dtype=torch.int64)
    return Rows(mask.values & torch.repeat_interleave(keep, lengths), mask.lengths)


def _returns_to_go(whole: Whole, token_rewards: Rows, mask: Rows, gamma: float, recursions: Recursions) -> Rows:
    if recursions.returns is None:
        returns: Rows = cumulative_returns(token_rewards, mask, gamma=gamma)
        return returns
    arguments = zip(whole.laid_out(token_rewards), whole.laid_out(mask), strict=True)
    return whole.gathered("get_cumulative_returns", [recursions.returns(*batch, gamma) for batch in arguments])


def _replaced(
    whole: Whole,
    rewards: torch.Tensor,
    token_rewards: Rows,
    values: Rows | None,
    mask: Rows,
    options: Mapping[str, Any],
    recursions: Recursions,
) -> Advantages:
    """The estimate of `gae` (with `values`) or `reinforce` by a replaced recursion, whitened and clipped as theirs."""
    counted = _where(mask, ~rewards.isnan())
    if values is not None and recursions.advantages is not None:
        arguments = zip(*map(whole.laid_out, (values, token_rewards, counted)), strict=True)
        pairs = [recursions.advantages(*batch, options["gamma"], options["lam"]) for batch in arguments]
        advantages, returns = (
            whole.gathered("get_advantages_and_returns", [pair[part] for pair in pairs]) for part in (0, 1)
        )
        # From a row without a reward the critic is to learn nothing.
        unknown = _where(mask, rewards.isnan()).values
        returns = returns.apply(lambda found: torch.where(unknown, values.values.to(found.dtype), found))
    else:
        returns = _returns_to_go(whole, token_rewards, counted, options["gamma"], recursions)
        advantages = returns.apply(torch.clone)
    if options.get("whiten"):
        advantages = whiten(advantages, counted, **{name: options[name] for name in ("std", "eps", "ranks")})
    if options.get("clip") is not None:
        advantages = clip_advantages(advantages, counted, options["clip"]).advantages
    return Advantages(advantages, returns)


def _over_tokens(
    whole: Whole,
    rewards: torch.Tensor,
    token_rewards: Rows,
    mask: Rows,
    config: MakerConfig,
    coef: float,
    gamma: float,
    lambd: float,
    ranks: Ranks,
    recursions: Recursions,
) -> tuple[Advantages, bool]:
    """The estimators that look at tokens, and whether they whitened."""
    entry = ESTIMATORS[config.advantage_estimator]
    options: dict[str, Any] = dict(config.estimator_options)
    for name, value in (("gamma", gamma), ("lam", lambd), ("ranks", ranks)):
        if name in entry.options:
            options.setdefault(name, value)
    if config.advantages_norm and not config.no_advantage_std_norm and "whiten" in entry.options:
        options.setdefault("whiten", True)
    given: dict[str, Any] = {"mask": mask}
    makers: dict[str, Any] = {
        "rewards": lambda: rewards,
        "groups": lambda: whole.groups(config.n_samples_per_prompt, ranks),
        "runs": whole.runs,
        "steps": lambda: [eid.step for eid in whole.ids() or ()] or None,
        "values": lambda: whole.rows("values"),
        "log_probs": lambda: whole.rows("action_log_probs"),
        "teacher_log_probs": lambda: whole.rows("extras.teacher_logprobs"),
        "entropy": lambda: whole.rows("action_entropy"),
        "necs": lambda: whole.rows("extras.necs"),
    }
    makers |= {name: (lambda key=key: whole.entries(key)) for name, key in INFO_KEYS.items()}
    if "token_rewards" in entry.inputs:
        # Those of rows without a reward are 0 there, and must be known to be unknown: their rewards come as rewards.
        known = ~rewards.isnan()
        makers["token_rewards"] = lambda: token_rewards
        makers["rewards"] = lambda: None if bool(known.all()) else torch.where(known, 0.0, torch.nan).tolist()
    elif coef > 0:
        advise(f"{entry.name} takes no rewards of tokens: the KL penalty is left out")
    given |= {name: makers[name]() for name in entry.inputs if name in makers}
    given = {name: value for name, value in given.items() if value is not None}
    missing = [name for name, needed in entry.inputs.items() if needed and name not in given]
    if missing:
        raise ValueError(f"{entry.name}: got no {missing[0]!r}, which it needs; {_advice(missing[0])}")
    if entry.greedy_baseline and "baselines" not in given:
        raise ValueError(f"{entry.name}: got no baselines, which it needs; {_advice('baselines')}")
    over_values = entry.name in ("gae", "ppo")
    replaces = recursions.advantages if over_values else recursions.returns
    if replaces is not None and (over_values or entry.name in ("reinforce", "reinforce_plus_plus")):
        chosen = {**entry.options, **options}
        found = _replaced(whole, rewards, token_rewards, given.get("values"), mask, chosen, recursions)
    else:
        found = as_advantages(entry.name, entry.call(given, options))
    return found, bool(options.get("whiten", entry.options.get("whiten", False)))


_SOURCES = {
    "values": "give the maker a critic",
    "teacher_log_probs": "give the maker a teacher",
    "necs": "put them into each batch's extras['necs']",
    "entropy": "set MakerConfig.entropy",
    "log_probs": "give the maker an actor that computes them",
}


def _advice(name: str) -> str:
    return _SOURCES.get(name) or f"put them into the prompts' info[{INFO_KEYS.get(name, name)!r}]"


__all__ = ["Recursions", "Scored", "check", "finish", "over_rows", "score", "takes_token_rewards"]
