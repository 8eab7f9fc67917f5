"""Estimators over time: advantages by a recursion over the rewards of a row, from its last token to its first.

Invariant: a reward is placed once, on a token that takes part in the recursion, or it is counted as lost; a row that
lacks a reward has advantages of 0 and is in no statistic; whitening happens once, over the batch of all ranks; a bound
on advantages holds for what is returned.

What all of them share, where an option does not say otherwise:

- *Tool tokens* (slots between tokens that count) are skipped: no state, no discount, 0 in the result. With
  `observations="through"` they are states with values and rewards of their own (SkyRL, slime), with `"zeroed"` states
  of value and reward 0 (OpenRLHF, LightRFT). `response` (tokens, bool) says which slots are no padding, so that tool
  tokens at a row's end take part too; without it those between the first and the last token that counts do.
- *Rewards on tokens that do not take part* are left out (`off_action_rewards="drop"`), or moved to the last action
  before them without discount (`"carry"`; to the first action if there is none before). Either way the report has their
  rows under "reward off actions", and their sum.
- *NaN or missing rewards*: the row's advantages are 0, it is in no statistic, and it is counted; so with infinite ones.
- *Rows without actions* are counted, and contribute nothing. A *single* row or token is nothing special, except that
  whitening makes a single token, and equal ones, exactly 0.
- `std`, `eps`: of whitening, (A - mean) / sqrt(std^2 + eps) over all tokens that count; `std` is the sample's unless
  `"population"` is asked for.
- `clip` bounds advantages after whitening; `clip_fraction` is measured before it, over the tokens that count.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.groups import STD, Grouped, as_rewards
from rollbook.algorithms.groups import whiten as whiten_rows
from rollbook.algorithms.layout import Layout, PerRow, PerToken, as_mask
from rollbook.algorithms.registry import ESTIMATORS
from rollbook.algorithms.results import Advantages, Report, rows_where
from rollbook.algorithms.scan import Places, gae_scan, return_scan, survey, taking_part
from rollbook.core.checks import check_bool, check_choice, check_float
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup

OFF_ACTION = ("drop", "carry")
Flags = NDArray[np.bool_]


@dataclass
class _Placed:
    """Rewards ready for a recursion, and what is to be said of them."""

    layout: Layout
    tokens: torch.Tensor
    """[of the layout's shape] Finite on every token that takes part."""
    response: torch.Tensor | None
    """The tokens that take part, unless those are the tokens that count."""
    left_out: Flags
    """[B] Rows that lack a reward."""
    reasons: dict[str, list[int]]
    metrics: dict[str, float]

    def finish(
        self,
        advantages: torch.Tensor,
        returns: torch.Tensor,
        mask: PerToken | None,
        *,
        whiten: bool,
        std: str,
        eps: float,
        ranks: ProcessGroup,
        clip: float | None,
        unknown: torch.Tensor | None = None,
    ) -> Advantages:
        """The estimate: rows left out are 0 (their returns `unknown`), the others whitened and bounded, in this order.

        Every rank comes to the same collective calls, whatever its rows are.
        """
        check_bool("whiten", whiten)
        check_choice("std", std, STD)
        check_float("eps", eps, 0)
        layout = self.layout
        if self.left_out.any():
            gone = layout.spread(torch.from_numpy(self.left_out).to(layout.mask.device))
            returns = torch.where(gone, torch.zeros_like(returns) if unknown is None else unknown, returns)
            layout = layout.narrowed(~gone)
            advantages, returns = layout.masked(advantages), self.layout.masked(returns)
        if whiten:
            given = layout.give(advantages), layout.give(layout.mask)
            advantages = layout.whole("advantages", whiten_rows(*given, std=std, eps=eps, ranks=ranks))
        metrics = dict(self.metrics)
        if clip is not None:
            check_float("clip", clip, 1e-30, what="a positive number, or None")
            over = int((advantages.abs() > clip).sum())
            metrics["clip_fraction"] = over / max(int(self.layout.mask.sum()), 1)
            advantages = advantages.clamp(-clip, clip)
        report = Report(layout.rows, self.reasons, metrics)
        return Advantages(layout.give(advantages), layout.give(returns), None, mask, report)


def _placed(
    layout: Layout,
    token_rewards: PerToken | None,
    rewards: PerRow | None,
    response: PerToken | None = None,
    observations: str = "skip",
    off_action_rewards: str = "drop",
) -> _Placed:
    """Token rewards with what is broken or lies elsewhere taken care of, and row rewards on each row's last action."""
    check_choice("off_action_rewards", off_action_rewards, OFF_ACTION)
    lengths, mask = layout.lengths, layout.mask
    whole = None if response is None else as_mask("response", layout.whole("response", response))
    part = taking_part(mask, lengths, observations, whole)
    taken = part if observations == "through" else mask
    reasons: dict[str, Flags] = {}
    lost = 0.0
    if token_rewards is None and rewards is None:
        raise ValueError("rewards: got neither rewards of rows nor token_rewards, expected one of them or both")
    if token_rewards is None:
        tokens = torch.zeros(layout.shape, dtype=_kind(rewards), device=mask.device)
        left_out = np.zeros(layout.rows, dtype=np.bool_)
        actions, off = layout.counts.cpu().numpy(), left_out
        metrics = {"off_action_reward_sum": 0.0}
        reasons |= {"missing reward": left_out, "infinite reward": left_out}
    else:
        tokens = layout.whole("token_rewards", token_rewards).detach()
        tokens = tokens.to(_kind(tokens) if _kind(rewards) == torch.float32 else torch.float64)
        found = survey(tokens, taken, lengths)
        actions = found.counts if taken is mask else layout.counts.cpu().numpy()
        left_out, off = found.broken > 0, found.off > 0
        missing = left_out
        if left_out.any():
            narrowed = Layout(layout.shape, lengths, taken)
            missing = (narrowed.row_sums(tokens.isnan().to(torch.float32)) > 0).cpu().numpy()
            tokens = tokens.masked_fill(taken & ~tokens.isfinite(), 0)
        reasons |= {"missing reward": missing, "infinite reward": left_out & ~missing}
        tokens, total, lost = _carried(tokens, taken, layout, off_action_rewards, bool(off.any()))
        metrics = {"off_action_reward_sum": total}
    if rewards is not None:
        given = as_rewards("rewards", rewards)
        if len(given) != layout.rows:
            raise ValueError(f"rewards: got {len(given)}, expected {layout.rows}, one for each row")
        finite, absent = np.isfinite(given), np.isnan(given)
        reasons["missing reward"] = reasons["missing reward"] | absent
        reasons["infinite reward"] = reasons["infinite reward"] | (~finite & ~absent)
        left_out = left_out | ~finite
        rows, _, last = Places(mask, lengths).ends()
        usable = np.where(finite, given, 0.0)
        tokens = tokens.clone(memory_format=torch.contiguous_format)
        tokens.view(-1)[last] += torch.from_numpy(usable).to(tokens)[rows]
        lost += float(usable[actions == 0].sum())
    reasons |= {"no actions": actions == 0, "reward off actions": off}
    metrics["lost_reward_sum"] = lost
    named = {reason: rows_where(rows) for reason, rows in reasons.items()}
    return _Placed(layout, tokens, None if part is mask else part, left_out, named, metrics)


def _carried(
    tokens: torch.Tensor, taken: torch.Tensor, layout: Layout, how: str, any_off: bool
) -> tuple[torch.Tensor, float, float]:
    """Rewards once those that lie on no token taken are seen to, their sum, and how much of it is lost."""
    if not any_off:
        return tokens, 0.0, 0.0
    flat = tokens.reshape(-1)
    slots = (~taken.reshape(-1) & flat.isfinite() & (flat != 0)).nonzero()[:, 0]
    moved = flat[slots].to(torch.float64)
    total = float(moved.sum())
    if how == "drop":
        return tokens, total, total
    place = Places(layout.mask, layout.lengths)
    row = place.row_of(slots)
    acts = (place.end > place.begin)[row]
    kept = torch.where(taken.reshape(-1), flat, torch.zeros_like(flat)).to(torch.float64)
    kept.index_add_(0, place.nearest(slots[acts]), moved[acts])
    return kept.to(tokens.dtype).reshape(tokens.shape), total, float(moved[~acts].sum())


def _kind(rewards: Any) -> torch.dtype:
    return torch.float64 if isinstance(rewards, torch.Tensor) and rewards.dtype == torch.float64 else torch.float32


def place_rewards(
    rewards: PerRow, mask: PerToken | None = None, *, token_rewards: PerToken | None = None
) -> tuple[Any, Report]:
    """Rewards of tokens: each row's reward on its last action, added to what `token_rewards` has there.

    rewards: (B,), `None` or NaN where there is none; mask, token_rewards: (B, A) or packed, and so the result. A row
    without actions gets no reward, and a missing one is 0; the report counts both. Tokens that do not count are 0.

    >>> tokens, report = place_rewards([1.0, 2.0, None], [[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    >>> [row.tolist() for row in tokens], report.which("no actions"), report.which("missing reward")
    ([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], [1], [2])
    """
    layout = Layout.of(mask, token_rewards=token_rewards)
    placed = _placed(layout, token_rewards, rewards)
    return layout.give(layout.masked(placed.tokens)), Report(layout.rows, placed.reasons, placed.metrics)


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
    ranks: ProcessGroup = SINGLE_PROCESS,
    clip: float | None = None,
) -> Advantages:
    """Generalised advantage estimation: the decayed sum of temporal differences.

    delta_i = r_i + gamma V_j - V_i and A_i = delta_i + gamma lam A_j, with j the next token that counts; nothing comes
    after the last. returns = A + V, never whitened. token_rewards, values, mask, response: (B, A) or packed; rewards:
    (B,), placed on each row's last action besides the token rewards. A row that lacks a reward has advantages of 0 and
    its values as returns, so that a critic learns nothing from it. Tool tokens, std, eps, whitening, clip: as the
    module `temporal` says; no group statistics, so that singleton and constant groups are nothing special.

    Peers: verl and Trinity (as `ppo`) whiten; LightRFT and OpenRLHF go through tool tokens as if they were states of
    value 0, SkyRL and slime as states with values.

    >>> found = gae([[0.0, 0.0, 1.0]], [[0.5, 0.9, 0.2]], torch.tensor([[1, 0, 1]]), gamma=0.9, lam=0.5)
    >>> found.advantages, found.returns
    (tensor([[0.0400, 0.0000, 0.8000]]), tensor([[0.5400, 0.0000, 1.0000]]))
    """
    if values is None:
        raise ValueError(
            "values: got None, expected the critic's value of each token: an argument, `batch.values`, or of records "
            "info_keys={'values': KEY}"
        )
    layout = Layout.of(mask, token_rewards=token_rewards, values=values, response=response)
    placed = _placed(layout, token_rewards, rewards, response, observations, off_action_rewards)
    critic = layout.whole("values", values)
    given = placed.tokens, critic, layout.mask, layout.lengths, gamma, lam, observations, placed.response
    advantages, returns = gae_scan(*given)
    unknown = critic.detach().to(returns.dtype) if placed.left_out.any() else None
    options = {"whiten": whiten, "std": std, "eps": eps, "ranks": ranks, "clip": clip}
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
    ranks: ProcessGroup = SINGLE_PROCESS,
    clip: float | None = None,
) -> Advantages:
    """`gae`, with advantages whitened over the batch unless told otherwise; returns stay as they are (verl, Trinity).

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
        ranks=ranks,
        clip=clip,
    )


def _to_go(
    token_rewards: PerToken | None,
    rewards: PerRow | None,
    mask: PerToken | None,
    response: PerToken | None,
    gamma: float,
    observations: str,
    off_action_rewards: str,
    finish: dict[str, Any],
) -> Advantages:
    """Returns-to-go as advantages. Without any tokens each row is one action: (B,) in, (B,) out."""
    rows_only = token_rewards is None and mask is None and rewards is not None
    if rows_only:
        count = len(as_rewards("rewards", rewards))  # type: ignore[arg-type]
        device = rewards.device if isinstance(rewards, torch.Tensor) else None
        layout = Layout.of(torch.ones(count, 1, dtype=torch.bool, device=device))
    else:
        layout = Layout.of(mask, token_rewards=token_rewards, response=response)
    placed = _placed(layout, token_rewards, rewards, response, observations, off_action_rewards)
    returns = return_scan(placed.tokens, layout.mask, layout.lengths, gamma, observations, placed.response)
    found = placed.finish(returns, returns.clone(), mask, **finish)
    if not rows_only:
        return found
    scores = found.advantages[:, 0]
    return Advantages(scores, found.returns[:, 0], scores, None, found.report)


@ESTIMATORS.register("reinforce", source="REINFORCE (Williams, 1992): the return to go")
def reinforce(
    token_rewards: PerToken | None = None,
    rewards: PerRow | None = None,
    mask: PerToken | None = None,
    response: PerToken | None = None,
    groups: Any = None,
    *,
    gamma: float = 1.0,
    observations: str = "skip",
    off_action_rewards: str = "drop",
    whiten: bool = False,
    std: str = "sample",
    eps: float = 1e-8,
    ranks: ProcessGroup = SINGLE_PROCESS,
    clip: float | None = None,
) -> Advantages:
    """The return-to-go of each token: the discounted sum of its own and all later rewards.

    R_i = r_i + gamma R_j, with j the next token that counts. token_rewards, mask, response: (B, A) or packed; rewards:
    (B,), placed on each row's last action, so that with gamma 1 every action has its row's reward (Trinity); without
    any tokens the result is (B,). `groups` (B,) changes no advantage: the report then has the groups' reward means.
    Tool tokens, NaN, std, eps, whitening, clip: as the module `temporal` says.

    >>> reinforce(torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 5.0]]), mask=[[1, 1, 1], [1, 1, 0]], gamma=0.5).advantages
    tensor([[0.2500, 0.5000, 1.0000],
            [1.0000, 2.0000, 0.0000]])
    >>> reinforce(rewards=[3.0, None], mask=[[1, 0, 1], [1, 1]]).advantages
    [tensor([3., 0., 3.]), tensor([0., 0.])]
    """
    finish = {"whiten": whiten, "std": std, "eps": eps, "ranks": ranks, "clip": clip}
    found = _to_go(token_rewards, rewards, mask, response, gamma, observations, off_action_rewards, finish)
    if groups is None or rewards is None:
        return found
    return found.with_report(found.report.plus(metrics=Grouped(rewards, groups, ranks=ranks).report().metrics))


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
    ranks: ProcessGroup = SINGLE_PROCESS,
    clip: float | None = None,
) -> Advantages:
    """Returns-to-go, whitened once over all tokens that count of the global batch; `returns` are not whitened.

    The paper's token rewards are minus the KL penalty, with the row's reward on the last action. Everything else as
    `reinforce`. Whitening over less than the global batch is another estimator: give `ranks` where there are several.

    >>> reinforce_plus_plus([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0]]).advantages
    [tensor([-1.1180, -1.1180]), tensor([0., 0.]), tensor([1.1180, 1.1180])]
    """
    finish = {"whiten": whiten, "std": std, "eps": eps, "ranks": ranks, "clip": clip}
    return _to_go(token_rewards, rewards, mask, response, gamma, observations, off_action_rewards, finish)


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
    groups: Any = None,
    mask: PerToken | None = None,
    response: PerToken | None = None,
    runs: Any = None,
    *,
    gamma: float = 1.0,
    observations: str = "skip",
    off_action_rewards: str = "drop",
    singleton: str = "zero",
    whiten: bool = True,
    std: str = "sample",
    eps: float = 1e-8,
    ranks: ProcessGroup = SINGLE_PROCESS,
    clip: float | None = None,
) -> Advantages:
    """Reward minus the group's mean on every token, plus the token rewards still to come, whitened over the batch.

    rewards, groups, runs: (B,); rows of one run count once in their group's mean. token_rewards (a KL penalty, say),
    mask, response: (B, A) or packed; without any tokens the result is (B,). Token rewards alone, without groups, are
    taken as centred already. gamma is 1 by definition, as in LightRFT: another one is taken as 1, with a warning. A
    lone row's centred reward is 0 (`singleton="raw"`: its reward), equal rewards' exactly 0. `whiten=False` is
    LightRFT's, before what it does to all estimators. `returns` are not whitened.

    >>> found = reinforce_plus_plus_baseline(rewards=[1.0, 0.0, 3.0], groups=["a", "a", "b"], whiten=False)
    >>> found.advantages, found.report.which("singleton group")
    (tensor([ 0.5000, -0.5000,  0.0000]), [2])
    """
    if check_float("gamma", gamma, 0, 1) != 1:
        warnings.warn(f"reinforce_plus_plus_baseline: gamma {gamma} is taken as 1, its only value", stacklevel=2)
    finish = {"whiten": whiten, "std": std, "eps": eps, "ranks": ranks, "clip": clip}
    shared = (1.0, observations, off_action_rewards, finish)
    if rewards is None and groups is not None:
        raise ValueError("rewards: got None, expected a reward for each row, to take its group's mean from")
    if rewards is None:
        return _to_go(token_rewards, None, mask, response, *shared)
    if groups is None:
        raise ValueError("groups: got None, expected an id for each row, to take its group's mean from its reward")
    grouped = Grouped(rewards, groups, runs, ranks)
    scores = torch.from_numpy(grouped.alone(grouped.centred(), singleton)[grouped.own])
    known = torch.from_numpy(grouped.valid[grouped.own])
    centred = torch.where(known, scores, torch.nan).to(grouped.device, grouped.dtype)  # still missing where it was
    found = _to_go(token_rewards, centred, mask, response, *shared)
    own = grouped.report()
    reasons = {reason: sorted({*rows, *own.reasons.get(reason, ())}) for reason, rows in found.report.reasons.items()}
    infinite = set(own.reasons["infinite reward"])
    reasons["missing reward"] = [row for row in reasons["missing reward"] if row not in infinite]
    return found.with_report(own.plus(reasons, found.report.metrics))


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
    ranks: ProcessGroup = SINGLE_PROCESS,
    clip: float | None = None,
) -> Advantages:
    """The return-to-go minus the reward of the greedy response to the same prompt; `returns` are without baseline.

    token_rewards, mask, response: (B, A) or packed; rewards, baselines: (B,). A row that lacks its reward or its
    baseline has advantages of 0, and is counted. Tool tokens, std, eps, whitening, clip: as the module `temporal` says.

    >>> remax([[0.0, 1.0], [0.0, 3.0]], [1.0, 0.5]).advantages
    [tensor([0., 0.]), tensor([2.5000, 2.5000])]
    """
    if baselines is None:
        raise ValueError("baselines: got None, expected the greedy response's reward for each row")
    layout = Layout.of(mask, token_rewards=token_rewards, response=response)
    placed = _placed(layout, token_rewards, rewards, response, observations, off_action_rewards)
    base = as_rewards("baselines", baselines)
    if len(base) != layout.rows:
        raise ValueError(f"baselines: got {len(base)}, expected {layout.rows}, one for each row")
    absent = ~np.isfinite(base)
    placed.left_out = placed.left_out | absent
    placed.reasons["missing baseline"] = rows_where(absent)
    returns = return_scan(placed.tokens, layout.mask, layout.lengths, 1.0, observations, placed.response)
    offset = torch.from_numpy(np.where(absent, 0.0, base)).to(returns)
    advantages = layout.masked(returns - layout.spread(offset))
    return placed.finish(advantages, returns, mask, whiten=whiten, std=std, eps=eps, ranks=ranks, clip=clip)


def cumulative_returns(token_rewards: PerToken, mask: PerToken | None = None, *, gamma: float = 1.0) -> Any:
    """Discounted returns-to-go over the tokens that count; 0 elsewhere. (B, A) or packed, and so the result.

    LightRFT's `get_cumulative_returns`, whose tool tokens carry the running return and cost a discount; here they are 0
    and cost none.

    >>> cumulative_returns([[0.0, 9.0, 1.0]], [[1, 0, 1]], gamma=0.5)
    [tensor([0.5000, 0.0000, 1.0000])]
    """
    return reinforce(token_rewards, mask=mask, gamma=gamma).returns
