"""Estimators over time: GAE and returns-to-go, computed backward over the tokens of a row.

Invariant: a reward is placed once, on a token that takes part in the recursion, or is counted as lost. A row that lacks
a reward has advantages of 0 and is in no statistic. Whitening happens once, over the batch of all processes, and the
returned advantages are within `clip`.

Shared defaults:

- *Tool tokens* (masked slots between tokens that count) are skipped: no state, no discount, 0 in the result. With
  `observations="through"` they are states with their own values and rewards (SkyRL, slime), with `"zeroed"` states of
  value and reward 0 (OpenRLHF, LightRFT). `response` (bool) marks slots that are not padding, so that tool tokens at
  the end of a row take part too. Without it, those between the first and the last token that counts do.
- *Rewards on tokens that do not take part* are dropped (`off_action_rewards="drop"`), or moved to the last action
  before them without discount (`"carry"`; to the first action if there is none before). The report lists their rows
  under "reward off actions", and their sum.
- *NaN, missing or infinite rewards*: the advantages of the row are 0, it is in no statistic, and it is counted.
- *Rows without actions* are counted, and contribute nothing. Whitening makes a single token, and equal tokens, 0.
- `std`, `eps`: of whitening, (A - mean) / sqrt(std^2 + eps) over all tokens that count.
- `clip` bounds advantages after whitening; `clip_fraction` is the share of tokens outside the bound.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.groups import STD, Grouped, as_rewards
from rollbook.algorithms.groups import whiten as whiten_rows
from rollbook.algorithms.layout import Ids, Layout, PerRow, PerToken, as_mask
from rollbook.algorithms.registry import ESTIMATORS
from rollbook.algorithms.results import Advantages, Report, rows_where
from rollbook.algorithms.scan import TokenPositions, count_rewards, gae_scan, return_scan, scan_mask
from rollbook.core.checks import check_bool, check_choice, check_float
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup

__all__ = [
    "cumulative_returns",
    "gae",
    "ppo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
]

OFF_ACTION = ("drop", "carry")
"""Options of `off_action_rewards`."""
Flags = NDArray[np.bool_]


@dataclass
class _PlacedRewards:
    """Checked rewards of tokens and of rows, and the report."""

    layout: Layout
    token_rewards: torch.Tensor
    """[of the layout's shape] Finite on every token that takes part."""
    row_rewards: torch.Tensor | None
    """[B] Finite; 0 where a reward is missing."""
    response: torch.Tensor | None
    """The tokens that take part; `None` if those are the tokens that count."""
    left_out: Flags
    """[B] Rows that lack a reward."""
    reasons: dict[str, list[int]]
    metrics: dict[str, float]

    @cached_property
    def tokens(self) -> torch.Tensor:
        """[of the layout's shape] Token rewards, with the reward of each row added on its last action."""
        if self.row_rewards is None:
            return self.token_rewards
        rows, _, last = TokenPositions(self.layout.mask, self.layout.lengths).ends()
        tokens = self.token_rewards.clone(memory_format=torch.contiguous_format)
        tokens.view(-1)[last] += self.row_rewards[rows]
        return tokens

    def finish(
        self,
        advantages: torch.Tensor,
        returns: torch.Tensor,
        mask: PerToken | None,
        *,
        whiten: bool,
        std: str,
        eps: float,
        process_group: ProcessGroup,
        clip: float | None,
        unknown: torch.Tensor | None = None,
    ) -> Advantages:
        """Set rows without a reward to 0 (their returns to `unknown`), whiten, then clip.

        Every process makes the same collective calls, whatever its rows are.
        """
        check_bool("whiten", whiten)
        check_choice("std", std, STD)
        check_float("eps", eps, 0)
        layout = self.layout
        if self.left_out.any():
            left_out = layout.spread(torch.from_numpy(self.left_out).to(layout.mask.device))
            returns = torch.where(left_out, torch.zeros_like(returns) if unknown is None else unknown, returns)
            layout = layout.narrowed(~left_out)
            advantages, returns = layout.masked(advantages), self.layout.masked(returns)
        if whiten:
            tokens = layout.restore(advantages), layout.restore(layout.mask)
            advantages = layout.tensor(
                "advantages", whiten_rows(*tokens, std=std, eps=eps, process_group=process_group)
            )
        metrics = dict(self.metrics)
        if clip is not None:
            check_float("clip", clip, 1e-30, expected="a positive number or None")
            over = int((advantages.abs() > clip).sum())
            metrics["clip_fraction"] = over / max(int(self.layout.mask.sum()), 1)
            advantages = advantages.clamp(-clip, clip)
        report = Report(layout.rows, self.reasons, metrics)
        return Advantages(layout.restore(advantages), layout.restore(returns), None, mask, report)


def _place_rewards(
    layout: Layout,
    token_rewards: PerToken | None,
    rewards: PerRow | None,
    response: PerToken | None = None,
    observations: str = "skip",
    off_action_rewards: str = "drop",
) -> _PlacedRewards:
    """Check rewards, and move or drop token rewards on tokens that do not take part."""
    check_choice("off_action_rewards", off_action_rewards, OFF_ACTION)
    lengths, mask = layout.lengths, layout.mask
    slots = None if response is None else as_mask("response", layout.tensor("response", response))
    participating = mask if observations == "skip" else scan_mask(mask, lengths, observations, slots)
    scanned = participating if observations == "through" else mask
    reasons: dict[str, Flags] = {}
    lost = 0.0
    if token_rewards is None and rewards is None:
        raise ValueError("rewards: got neither rewards of rows nor token_rewards, expected one of them or both")
    if token_rewards is None:
        tokens = torch.zeros(layout.shape, dtype=_reward_dtype(rewards), device=mask.device)
        left_out = np.zeros(layout.rows, dtype=np.bool_)
        actions, off = layout.counts.cpu().numpy(), left_out
        metrics = {"off_action_reward_sum": 0.0}
        reasons |= {"missing reward": left_out, "infinite reward": left_out}
    else:
        tokens = layout.tensor("token_rewards", token_rewards).detach()
        tokens = tokens.to(_reward_dtype(tokens) if _reward_dtype(rewards) == torch.float32 else torch.float64)
        counts = count_rewards(tokens, scanned, lengths)
        actions = counts.counts if scanned is mask else layout.counts.cpu().numpy()
        left_out, off = counts.nonfinite > 0, counts.off_mask > 0
        missing = left_out
        if left_out.any():
            narrowed = Layout(layout.shape, lengths, scanned)
            missing = (narrowed.row_sums(tokens.isnan().to(torch.float32)) > 0).cpu().numpy()
            tokens = tokens.masked_fill(scanned & ~tokens.isfinite(), 0)
        reasons |= {"missing reward": missing, "infinite reward": left_out & ~missing}
        tokens, total, lost = _move_off_action_rewards(tokens, scanned, layout, off_action_rewards, bool(off.any()))
        metrics = {"off_action_reward_sum": total}
    row_rewards = None
    if rewards is not None:
        numbers = as_rewards("rewards", rewards)
        if len(numbers) != layout.rows:
            raise ValueError(f"rewards: got {len(numbers)}, expected {layout.rows}, one for each row")
        finite, absent = np.isfinite(numbers), np.isnan(numbers)
        reasons["missing reward"] = reasons["missing reward"] | absent
        reasons["infinite reward"] = reasons["infinite reward"] | (~finite & ~absent)
        left_out = left_out | ~finite
        usable = np.where(finite, numbers, 0.0)
        row_rewards = torch.from_numpy(usable).to(tokens)
        lost += float(usable[actions == 0].sum())
    reasons |= {"no actions": actions == 0, "reward off actions": off}
    metrics["lost_reward_sum"] = lost
    rows_by_reason = {reason: rows_where(flags) for reason, flags in reasons.items()}
    other = None if participating is mask else participating
    return _PlacedRewards(layout, tokens, row_rewards, other, left_out, rows_by_reason, metrics)


def _move_off_action_rewards(
    tokens: torch.Tensor, scanned: torch.Tensor, layout: Layout, rule: str, any_off: bool
) -> tuple[torch.Tensor, float, float]:
    """Drop or move rewards on tokens that do not take part; also return their sum, and how much of it is lost."""
    if not any_off:
        return tokens, 0.0, 0.0
    flat = tokens.reshape(-1)
    slots = (~scanned.reshape(-1) & flat.isfinite() & (flat != 0)).nonzero()[:, 0]
    moved = flat[slots].to(torch.float64)
    total = float(moved.sum())
    if rule == "drop":
        return tokens, total, total
    positions = TokenPositions(layout.mask, layout.lengths)
    row = positions.rows_at(slots)
    has_actions = (positions.end > positions.begin)[row]
    carried = torch.where(scanned.reshape(-1), flat, torch.zeros_like(flat)).to(torch.float64)
    carried.index_add_(0, positions.nearest(slots[has_actions]), moved[has_actions])
    return carried.to(tokens.dtype).reshape(tokens.shape), total, float(moved[~has_actions].sum())


def _reward_dtype(rewards: PerRow | None) -> torch.dtype:
    return torch.float64 if isinstance(rewards, torch.Tensor) and rewards.dtype == torch.float64 else torch.float32


def place_rewards(
    rewards: PerRow, mask: PerToken | None = None, *, token_rewards: PerToken | None = None
) -> tuple[Any, Report]:
    """Add the reward of each row to the token reward of its last action.

    A row without actions gets no reward, and a missing reward is 0; the report counts both.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        mask: [B, R] or packed: which tokens count. `None`: all.
        token_rewards: [B, R] or packed: reward of each token.

    Returns:
        Rewards of tokens, [B, R] or packed as the mask, 0 where it is False; and the report.

    Raises:
        ValueError: If the number of rows differs.

    >>> tokens, report = place_rewards([1.0, 2.0, None], [[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    >>> [row.tolist() for row in tokens], report.which("no actions"), report.which("missing reward")
    ([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], [1], [2])
    """
    layout = Layout.from_tokens(mask, token_rewards=token_rewards)
    placed = _place_rewards(layout, token_rewards, rewards)
    return layout.restore(layout.masked(placed.tokens)), Report(layout.rows, placed.reasons, placed.metrics)


@ESTIMATORS.register("gae", source="GAE (Schulman et al., 2015, arXiv 1506.02438), equation 16")
def gae(
    token_rewards: PerToken | None = None,
    values: PerToken | None = None,
    mask: PerToken | None = None,
    response: PerToken | None = None,
    rewards: PerRow | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    observations: str = "skip",
    off_action_rewards: str = "drop",
    whiten: bool = False,
    std: str = "sample",
    eps: float = 1e-8,
    process_group: ProcessGroup = SINGLE_PROCESS,
    clip: float | None = None,
) -> Advantages:
    """Compute GAE advantages: the decayed sum of temporal differences.

    delta_i = r_i + gamma V_j - V_i and A_i = delta_i + gamma lam A_j, with j the next token that counts; after the last
    one, V and A are 0. Returns are A + V, never whitened. A row that lacks a reward has advantages of 0 and its values
    as returns, so that the critic gets no gradient from it.

    Other frameworks: verl and Trinity (as `ppo`) whiten; LightRFT and OpenRLHF treat tool tokens as states of value 0,
    SkyRL and slime as states with values.

    Args:
        token_rewards: [B, R] or packed: reward of each token.
        values: [B, R] or packed: the critic's values.
        mask: [B, R] or packed: which tokens count. `None`: all.
        response: [B, R] or packed, bool: which slots are no padding, for tool tokens at the end of a row.
        rewards: [B] Reward of each row, added on its last action; `None` or NaN where it is missing.
        gamma: Discount per token, 0 to 1.
        lam: Lambda of GAE, 0 to 1.
        observations: How tool tokens take part: `"skip"`, `"through"` or `"zeroed"`; see the module `temporal`.
        off_action_rewards: Rewards on tokens that take no part: `"drop"` or `"carry"` to the last action before them.
        whiten: Whether to whiten the advantages over the batch.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the variance in whitening.
        process_group: Processes over whose rows statistics are computed.
        clip: Bound of the advantages after whitening; `None`: no bound.

    Returns:
        Advantages and returns in the layout of the mask, 0 where it is False.

    Raises:
        ValueError: If values or rewards are missing, or an option is invalid.

    >>> result = gae([[0.0, 0.0, 1.0]], [[0.5, 0.9, 0.2]], torch.tensor([[1, 0, 1]]), gamma=0.9, lam=0.5)
    >>> result.advantages, result.returns
    (tensor([[0.0400, 0.0000, 0.8000]]), tensor([[0.5400, 0.0000, 1.0000]]))
    """
    if values is None:
        raise ValueError(
            "values: got None, expected the critic's value of each token: the argument, `batch.values`, or, for "
            "records, info_keys={'values': KEY}"
        )
    layout = Layout.from_tokens(mask, token_rewards=token_rewards, values=values, response=response)
    placed = _place_rewards(layout, token_rewards, rewards, response, observations, off_action_rewards)
    critic = layout.tensor("values", values)
    arguments = placed.tokens, critic, layout.mask, layout.lengths, gamma, lam, observations, placed.response
    advantages, returns = gae_scan(*arguments)
    unknown = critic.detach().to(returns.dtype) if placed.left_out.any() else None
    options = {"whiten": whiten, "std": std, "eps": eps, "process_group": process_group, "clip": clip}
    return placed.finish(advantages, returns, mask, unknown=unknown, **options)  # type: ignore[arg-type]


@ESTIMATORS.register(
    "ppo", source="PPO (Schulman et al., 2017, arXiv 1707.06347), equations 11 and 12; whitened over the batch"
)
def ppo(
    token_rewards: PerToken | None = None,
    values: PerToken | None = None,
    mask: PerToken | None = None,
    response: PerToken | None = None,
    rewards: PerRow | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    observations: str = "skip",
    off_action_rewards: str = "drop",
    whiten: bool = True,
    std: str = "sample",
    eps: float = 1e-8,
    process_group: ProcessGroup = SINGLE_PROCESS,
    clip: float | None = None,
) -> Advantages:
    """Compute GAE advantages, whitened over the batch by default (verl, Trinity).

    Returns are not whitened.

    Args:
        token_rewards: [B, R] or packed: reward of each token.
        values: [B, R] or packed: the critic's values.
        mask: [B, R] or packed: which tokens count. `None`: all.
        response: [B, R] or packed, bool: which slots are no padding, for tool tokens at the end of a row.
        rewards: [B] Reward of each row, added on its last action; `None` or NaN where it is missing.
        gamma: Discount per token, 0 to 1.
        lam: Lambda of GAE, 0 to 1.
        observations: How tool tokens take part: `"skip"`, `"through"` or `"zeroed"`; see the module `temporal`.
        off_action_rewards: Rewards on tokens that take no part: `"drop"` or `"carry"` to the last action before them.
        whiten: Whether to whiten the advantages over the batch.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the variance in whitening.
        process_group: Processes over whose rows statistics are computed.
        clip: Bound of the advantages after whitening; `None`: no bound.

    Returns:
        Advantages and returns in the layout of the mask, 0 where it is False.

    Raises:
        ValueError: If values or rewards are missing, or an option is invalid.

    >>> ppo([[0.0, 1.0], [0.0, 3.0]], [[0.5, 0.5], [1.0, 1.0]], gamma=0.9, lam=0.8).returns
    [tensor([0.8100, 1.0000]), tensor([2.3400, 3.0000])]
    """
    return gae(
        token_rewards,
        values,
        mask,
        response,
        rewards,
        gamma=gamma,
        lam=lam,
        observations=observations,
        off_action_rewards=off_action_rewards,
        whiten=whiten,
        std=std,
        eps=eps,
        process_group=process_group,
        clip=clip,
    )


def _return_to_go(
    token_rewards: PerToken | None,
    rewards: PerRow | None,
    mask: PerToken | None,
    response: PerToken | None,
    gamma: float,
    observations: str,
    off_action_rewards: str,
    finish: dict[str, Any],
) -> Advantages:
    """Compute returns-to-go as advantages. Without tokens and mask, each row is one action: [B] in, [B] out."""
    rows_only = token_rewards is None and mask is None and rewards is not None
    if rows_only:
        count = len(as_rewards("rewards", rewards))  # type: ignore[arg-type]
        device = rewards.device if isinstance(rewards, torch.Tensor) else None
        layout = Layout.from_tokens(torch.ones(count, 1, dtype=torch.bool, device=device))
    else:
        layout = Layout.from_tokens(mask, token_rewards=token_rewards, response=response)
    placed = _place_rewards(layout, token_rewards, rewards, response, observations, off_action_rewards)
    check_float("gamma", gamma, 0, 1)
    if token_rewards is None and placed.row_rewards is not None and placed.response is None and gamma == 1:
        # The return of every action is the reward of its row. Adding 0.0 turns -0.0 into 0.0, as a sum would.
        returns = layout.masked(layout.spread(placed.row_rewards + 0.0))
    else:
        returns = return_scan(placed.tokens, layout.mask, layout.lengths, gamma, observations, placed.response)
    estimate = placed.finish(returns, returns.clone(), mask, **finish)
    if not rows_only:
        return estimate
    scores = estimate.advantages[:, 0]
    return Advantages(scores, estimate.returns[:, 0], scores, None, estimate.report)


@ESTIMATORS.register("reinforce", source="REINFORCE (Williams, 1992): the return to go")
def reinforce(
    token_rewards: PerToken | None = None,
    rewards: PerRow | None = None,
    mask: PerToken | None = None,
    response: PerToken | None = None,
    groups: Ids | None = None,
    *,
    gamma: float = 1.0,
    observations: str = "skip",
    off_action_rewards: str = "drop",
    whiten: bool = False,
    std: str = "sample",
    eps: float = 1e-8,
    process_group: ProcessGroup = SINGLE_PROCESS,
    clip: float | None = None,
) -> Advantages:
    """Compute the return-to-go of each token: the discounted sum of its own and all later rewards.

    R_i = r_i + gamma R_j, with j the next token that counts. With gamma 1 and rewards of rows, every action has the
    reward of its row (Trinity).

    Args:
        token_rewards: [B, R] or packed: reward of each token.
        rewards: [B] Reward of each row, added on its last action; `None` or NaN where it is missing.
        mask: [B, R] or packed: which tokens count. `None`: all.
        response: [B, R] or packed, bool: which slots are no padding, for tool tokens at the end of a row.
        groups: [B] Group ids. They change no advantage, but add the reward statistics of groups to the report.
        gamma: Discount per token, 0 to 1.
        observations: How tool tokens take part: `"skip"`, `"through"` or `"zeroed"`; see the module `temporal`.
        off_action_rewards: Rewards on tokens that take no part: `"drop"` or `"carry"` to the last action before them.
        whiten: Whether to whiten the advantages over the batch.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the variance in whitening.
        process_group: Processes over whose rows statistics are computed.
        clip: Bound of the advantages after whitening; `None`: no bound.

    Returns:
        Advantages and returns in the layout of the mask, 0 where it is False. Without any tokens [B].

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> reinforce(torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 5.0]]), mask=[[1, 1, 1], [1, 1, 0]], gamma=0.5).advantages
    tensor([[0.2500, 0.5000, 1.0000],
            [1.0000, 2.0000, 0.0000]])
    >>> reinforce(rewards=[3.0, None], mask=[[1, 0, 1], [1, 1]]).advantages
    [tensor([3., 0., 3.]), tensor([0., 0.])]
    """
    finish = {"whiten": whiten, "std": std, "eps": eps, "process_group": process_group, "clip": clip}
    estimate = _return_to_go(token_rewards, rewards, mask, response, gamma, observations, off_action_rewards, finish)
    if groups is None or rewards is None:
        return estimate
    return estimate.with_report(
        estimate.report.plus(metrics=Grouped(rewards, groups, process_group=process_group).report().metrics)
    )


@ESTIMATORS.register(
    "reinforce_plus_plus",
    "reinforce++",
    "reinforceplusplus",
    source="REINFORCE++ (Hu et al., 2025, arXiv 2501.03262): returns, whitened",
)
def reinforce_plus_plus(
    token_rewards: PerToken | None = None,
    rewards: PerRow | None = None,
    mask: PerToken | None = None,
    response: PerToken | None = None,
    *,
    gamma: float = 1.0,
    observations: str = "skip",
    off_action_rewards: str = "drop",
    whiten: bool = True,
    std: str = "sample",
    eps: float = 1e-8,
    process_group: ProcessGroup = SINGLE_PROCESS,
    clip: float | None = None,
) -> Advantages:
    """Compute returns-to-go, whitened once over all tokens of the global batch (REINFORCE++).

    In the paper, the token reward is minus the KL penalty, plus the reward of the row on the last action. Returns are
    not whitened. Whitening over less than the global batch is another estimator: pass `process_group` in a distributed
    run.

    Args:
        token_rewards: [B, R] or packed: reward of each token.
        rewards: [B] Reward of each row, added on its last action; `None` or NaN where it is missing.
        mask: [B, R] or packed: which tokens count. `None`: all.
        response: [B, R] or packed, bool: which slots are no padding, for tool tokens at the end of a row.
        gamma: Discount per token, 0 to 1.
        observations: How tool tokens take part: `"skip"`, `"through"` or `"zeroed"`; see the module `temporal`.
        off_action_rewards: Rewards on tokens that take no part: `"drop"` or `"carry"` to the last action before them.
        whiten: Whether to whiten the advantages over the batch.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the variance in whitening.
        process_group: Processes over whose rows statistics are computed.
        clip: Bound of the advantages after whitening; `None`: no bound.

    Returns:
        Advantages and returns in the layout of the mask, 0 where it is False. Without any tokens [B].

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> reinforce_plus_plus([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0]]).advantages
    [tensor([-1.1180, -1.1180]), tensor([0., 0.]), tensor([1.1180, 1.1180])]
    """
    finish = {"whiten": whiten, "std": std, "eps": eps, "process_group": process_group, "clip": clip}
    return _return_to_go(token_rewards, rewards, mask, response, gamma, observations, off_action_rewards, finish)


@ESTIMATORS.register(
    "reinforce_plus_plus_baseline",
    "reinforce++_baseline",
    "reinforce_baseline",
    source="REINFORCE++ with the group's mean as baseline (arXiv 2501.03262)",
    compares_runs=True,
)
def reinforce_plus_plus_baseline(
    token_rewards: PerToken | None = None,
    rewards: PerRow | None = None,
    groups: Ids | None = None,
    mask: PerToken | None = None,
    response: PerToken | None = None,
    runs: Ids | None = None,
    *,
    gamma: float = 1.0,
    observations: str = "skip",
    off_action_rewards: str = "drop",
    singleton: str = "zero",
    whiten: bool = True,
    std: str = "sample",
    eps: float = 1e-8,
    process_group: ProcessGroup = SINGLE_PROCESS,
    clip: float | None = None,
) -> Advantages:
    """Subtract the mean reward of the group on every token, add the token rewards still to come, and whiten.

    gamma is 1 by definition, as in LightRFT; other values are ignored with a warning. Token rewards without rewards of
    rows are taken as centered. `whiten=False` is the form of LightRFT before its common normalization. Returns are not
    whitened.

    Args:
        token_rewards: [B, R] or packed: reward of each token, such as a KL penalty.
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        mask: [B, R] or packed: which tokens count. `None`: all.
        response: [B, R] or packed, bool: which slots are no padding, for tool tokens at the end of a row.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        gamma: Discount per token, 0 to 1.
        observations: How tool tokens take part: `"skip"`, `"through"` or `"zeroed"`; see the module `temporal`.
        off_action_rewards: Rewards on tokens that take no part: `"drop"` or `"carry"` to the last action before them.
        singleton: Score of a row that is alone in its group: `"zero"`, or its `"raw"` reward.
        whiten: Whether to whiten the advantages over the batch.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the variance in whitening.
        process_group: Processes over whose rows statistics are computed.
        clip: Bound of the advantages after whitening; `None`: no bound.

    Returns:
        Advantages and returns in the layout of the mask, 0 where it is False. Without any tokens [B].

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> result = reinforce_plus_plus_baseline(rewards=[1.0, 0.0, 3.0], groups=["a", "a", "b"], whiten=False)
    >>> result.advantages, result.report.which("singleton group")
    (tensor([ 0.5000, -0.5000,  0.0000]), [2])
    """
    if check_float("gamma", gamma, 0, 1) != 1:
        warnings.warn(f"reinforce_plus_plus_baseline: gamma {gamma} is ignored, expected 1", stacklevel=2)
    finish = {"whiten": whiten, "std": std, "eps": eps, "process_group": process_group, "clip": clip}
    shared = (1.0, observations, off_action_rewards, finish)
    if rewards is None and groups is not None:
        raise ValueError("rewards: got None, expected a reward for each row, for the mean of its group")
    if rewards is None:
        return _return_to_go(token_rewards, None, mask, response, *shared)
    if groups is None:
        raise ValueError("groups: got None, expected a group id for each row, for the mean of its group")
    grouped = Grouped(rewards, groups, runs, process_group)
    scores = torch.from_numpy(grouped.fill_singletons(grouped.centered(), singleton)[grouped.local])
    has_reward = torch.from_numpy(grouped.valid[grouped.local])
    centered = torch.where(has_reward, scores, torch.nan).to(grouped.device, grouped.dtype)  # NaN: still missing
    estimate = _return_to_go(token_rewards, centered, mask, response, *shared)
    grouped_report = grouped.report()
    reasons = {
        reason: sorted({*rows, *grouped_report.reasons.get(reason, ())})
        for reason, rows in estimate.report.reasons.items()
    }
    infinite = set(grouped_report.reasons["infinite reward"])
    reasons["missing reward"] = [row for row in reasons["missing reward"] if row not in infinite]
    return estimate.with_report(grouped_report.plus(reasons, estimate.report.metrics))


@ESTIMATORS.register(
    "remax",
    source="ReMax (Li et al., 2023, arXiv 2310.10505): the greedy response's reward as baseline",
    greedy_baseline=True,
)
def remax(
    token_rewards: PerToken | None = None,
    baselines: PerRow | None = None,
    mask: PerToken | None = None,
    response: PerToken | None = None,
    rewards: PerRow | None = None,
    *,
    observations: str = "skip",
    off_action_rewards: str = "drop",
    whiten: bool = False,
    std: str = "sample",
    eps: float = 1e-8,
    process_group: ProcessGroup = SINGLE_PROCESS,
    clip: float | None = None,
) -> Advantages:
    """Subtract the reward of the greedy response to the same prompt from the return-to-go (ReMax).

    The baseline is not subtracted from returns. A row that lacks its reward or baseline has advantages of 0, and is
    counted.

    Args:
        token_rewards: [B, R] or packed: reward of each token.
        baselines: [B] Reward of the greedy response.
        mask: [B, R] or packed: which tokens count. `None`: all.
        response: [B, R] or packed, bool: which slots are no padding, for tool tokens at the end of a row.
        rewards: [B] Reward of each row, added on its last action; `None` or NaN where it is missing.
        observations: How tool tokens take part: `"skip"`, `"through"` or `"zeroed"`; see the module `temporal`.
        off_action_rewards: Rewards on tokens that take no part: `"drop"` or `"carry"` to the last action before them.
        whiten: Whether to whiten the advantages over the batch.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the variance in whitening.
        process_group: Processes over whose rows statistics are computed.
        clip: Bound of the advantages after whitening; `None`: no bound.

    Returns:
        Advantages and returns in the layout of the mask, 0 where it is False.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> remax([[0.0, 1.0], [0.0, 3.0]], [1.0, 0.5]).advantages
    [tensor([0., 0.]), tensor([2.5000, 2.5000])]
    """
    if baselines is None:
        raise ValueError("baselines: got None, expected the greedy response's reward for each row")
    layout = Layout.from_tokens(mask, token_rewards=token_rewards, response=response)
    placed = _place_rewards(layout, token_rewards, rewards, response, observations, off_action_rewards)
    base = as_rewards("baselines", baselines)
    if len(base) != layout.rows:
        raise ValueError(f"baselines: got {len(base)}, expected {layout.rows}, one for each row")
    absent = ~np.isfinite(base)
    placed.left_out = placed.left_out | absent
    placed.reasons["missing baseline"] = rows_where(absent)
    returns = return_scan(placed.tokens, layout.mask, layout.lengths, 1.0, observations, placed.response)
    offset = torch.from_numpy(np.where(absent, 0.0, base)).to(returns)
    advantages = layout.masked(returns - layout.spread(offset))
    return placed.finish(
        advantages, returns, mask, whiten=whiten, std=std, eps=eps, process_group=process_group, clip=clip
    )


def cumulative_returns(token_rewards: PerToken, mask: PerToken | None = None, *, gamma: float = 1.0) -> Any:
    """Compute discounted returns-to-go over the tokens that count.

    As `get_cumulative_returns` of LightRFT, except that tool tokens are 0 and cost no discount; there they have the
    running return and cost one.

    Args:
        token_rewards: [B, R] or packed: reward of each token.
        mask: [B, R] or packed: which tokens count. `None`: all.
        gamma: Discount per token, 0 to 1.

    Returns:
        Returns, [B, R] or packed as the arguments, 0 where the mask is False.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> cumulative_returns([[0.0, 9.0, 1.0]], [[1, 0, 1]], gamma=0.5)
    [tensor([0.5000, 0.0000, 1.0000])]
    """
    return reinforce(token_rewards, mask=mask, gamma=gamma).returns
