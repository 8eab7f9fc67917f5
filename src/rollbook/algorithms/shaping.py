"""Shaping of rewards before estimation, and of advantages after it: penalties, clipping, normalization, pass rates.

Invariant: arguments are not modified. A missing reward (`None` or NaN) stays missing, is in no statistic, and is
counted. The report lists the rows that were changed, by reason.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.filters import WeightResult as WeightResult
from rollbook.algorithms.filters import clip_filter_like_weight_func as clip_filter_like_weight_func
from rollbook.algorithms.filters import clip_filter_weights as clip_filter_weights
from rollbook.algorithms.groups import Floats, Grouped, as_ids, as_rewards, whiten
from rollbook.algorithms.layout import Ids, Layout, PerRow, PerToken, check_state
from rollbook.algorithms.results import Report, rows_where
from rollbook.core.checks import check_bool, check_choice, check_float, check_int
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup

__all__ = [
    "ClipResult",
    "PassRates",
    "RunningNorm",
    "ShapingResult",
    "clip_advantages",
    "clip_rewards",
    "clip_scores",
    "difference",
    "length_bonus",
    "length_penalty",
    "normalize_advantages",
    "overlong_penalty",
    "pass_rates",
    "rank_penalty",
    "repetition_penalty",
    "shape_by",
    "shape_length",
    "shape_overlong",
    "shape_rank",
    "shape_repetition",
    "shape_rewards",
]


def overlong_penalty(
    lengths: PerRow, *, max_length: int, buffer: int = 1024, factor: float = 1.0, bounded: bool = True
) -> torch.Tensor:
    """Compute the penalty of responses that run into the last `buffer` tokens before `max_length`.

    DAPO (Yu et al., 2025, arXiv 2503.14476), equation 13: 0 up to `max_length - buffer`, then falling linearly to
    `-factor` at `max_length`, and `-factor` beyond.

    Args:
        lengths: [B] Response tokens, with the end token.
        max_length: Longest response.
        buffer: Tokens before `max_length` in which the penalty grows.
        factor: Penalty at `max_length`.
        bounded: Whether the penalty stays at `factor` beyond `max_length`; `False`: it keeps growing, as in LightRFT.

    Returns:
        [B] Penalties, at most 0.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> overlong_penalty([12, 10, 7, 6, 0], max_length=10, buffer=4)
    tensor([-1.0000, -1.0000, -0.2500,  0.0000,  0.0000])
    """
    return _as_tensor_like(
        lengths, _compute_overlong_penalty(_check_lengths(lengths), max_length, buffer, factor, bounded)
    )


def _compute_overlong_penalty(lengths: Floats, max_length: int, buffer: int, factor: float, bounded: bool) -> Floats:
    """Compute `overlong_penalty` in float64. Shape: [B]."""
    check_float("max_length", max_length, 1)
    check_float("buffer", buffer, 1, max_length, expected=f"a number of tokens from 1 to max_length, {max_length}")
    check_float("factor", factor, 0, expected="a number >= 0, the largest penalty")
    penalty = np.minimum((max_length - buffer - lengths) / buffer, 0.0) * factor
    return np.maximum(penalty, -factor) if check_bool("bounded", bounded) else penalty


def length_penalty(lengths: PerRow, *, target: int, per_token: float = 0.001, max_penalty: float = 1.0) -> torch.Tensor:
    """Compute the penalty of each token over `target`: -min(per_token * max(0, length - target), max_penalty).

    `shape_length` adds it to rewards.

    Args:
        lengths: [B] Response tokens, with the end token.
        target: Length without a penalty.
        per_token: Penalty per token over `target`.
        max_penalty: Largest penalty.

    Returns:
        [B] Penalties, at most 0.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> length_penalty([90, 100, 150, 5000], target=100, per_token=0.01)
    tensor([ 0.0000,  0.0000, -0.5000, -1.0000])
    """
    return _as_tensor_like(lengths, _compute_length_penalty(_check_lengths(lengths), target, per_token, max_penalty))


def _compute_length_penalty(lengths: Floats, target: int, per_token: float, max_penalty: float) -> Floats:
    """Compute `length_penalty` in float64. Shape: [B]."""
    check_float("target", target, 0)
    check_float("per_token", per_token, 0)
    check_float("max_penalty", max_penalty, 0)
    return 0.0 - np.minimum(np.maximum(lengths - target, 0.0) * per_token, max_penalty)


def length_bonus(
    lengths: PerRow, correct: PerRow, groups: Ids, *, process_group: ProcessGroup = SINGLE_PROCESS
) -> torch.Tensor:
    """Compute a bonus for the short answers of each group.

    Kimi k1.5 (2025, arXiv 2501.12599), section 2.3.3: b = 0.5 - (length - shortest) / (longest - shortest), over all
    answers of the group; a correct answer gets b, a wrong one min(0, b); a group whose answers are equally long gets 0.
    `shape_by(rewards, bonus, "add", weight, reason="length bonus")` adds it to rewards.

    Args:
        lengths: [B] Response tokens, with the end token.
        correct: [B] Whether an answer is correct, or a reward of 1 or 0; `None` or NaN where that is unknown: such a
            row gets 0 and is neither the shortest nor the longest.
        groups: [B] Group id of each row.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        [B] Bonuses, -0.5 to 0.5.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> length_bonus([100, 200, 300, 100, 300, 50], [True, True, True, False, False, True], list("aaabbc"))
    tensor([ 0.5000,  0.0000, -0.5000,  0.0000, -0.5000,  0.0000])
    """
    sizes, right = _check_lengths(lengths), as_rewards("correct", correct)
    _check_row_count("correct", right, sizes)
    has_label = ~np.isnan(right)
    invalid = np.flatnonzero(has_label & (right != 0) & (right != 1))
    if len(invalid):
        raise ValueError(
            f"correct: got {right[invalid[0]]:g} at row {invalid[0]}, expected true or false, 1 or 0, or None"
        )
    grouped = Grouped(torch.from_numpy(np.where(has_label, sizes, np.nan)), groups, None, process_group)
    local = grouped.local
    low, high = (np.where(grouped.count > 0, end, 0.0) for end in grouped.reward_range)
    spread = grouped.per_row(high - low)[local]
    bonus = 0.5 - (sizes - grouped.per_row(low)[local]) / np.where(spread > 0, spread, 1.0)
    bonus = np.where(right == 1, bonus, np.minimum(bonus, 0.0))
    return _as_tensor_like(lengths, np.where(has_label & (spread > 0), bonus, 0.0))


def repetition_penalty(
    tokens: PerToken, mask: PerToken | None = None, *, n: int = 20, max_penalty: float = 1.0
) -> torch.Tensor:
    """Compute the penalty of repetition: `-max_penalty` times the share of repeated n-grams.

    The share is 1 - (different n-grams) / (all n-grams), the formula of the repetition reward of Open R1 (over words,
    with n = 3). Here n-grams are of token ids, and long, as in Yeo et al., 2025, arXiv 2502.03373 (n = 40), so that
    ordinary phrases cost nothing and a loop of any period costs nearly `max_penalty`. An n-gram counts if all its
    tokens do, so that none spans the output of a tool. Rows of fewer than n tokens get 0.

    N-grams are compared by 64-bit hashes; the probability of a collision in a row of 32,768 tokens is below 1e-10.
    `shape_repetition` adds the penalty to rewards.

    Args:
        tokens: [B, R] or packed: token ids.
        mask: [B, R] or packed: which tokens count. `None`: all.
        n: Length of an n-gram.
        max_penalty: Largest penalty.

    Returns:
        [B] float32 penalties, at most 0.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> repetition_penalty([[1, 2, 1, 2, 1], [1, 2, 3, 4], [7]], n=2)
    tensor([-0.5000,  0.0000,  0.0000])
    """
    layout = Layout.from_tokens(mask, tokens=tokens)
    penalty = _compute_repetition_penalty(layout, tokens, n, max_penalty)
    return torch.from_numpy(penalty).to(layout.mask.device, torch.float32)


def _compute_repetition_penalty(layout: Layout, tokens: PerToken, n: int, max_penalty: float) -> Floats:
    """Compute `repetition_penalty` in float64. Shape: [B]."""
    n = check_int("n", n, 1)
    check_float("max_penalty", max_penalty, 0)
    ids = layout.tensor("tokens", tokens)
    if ids.is_floating_point() and ids.numel():
        raise ValueError(f"tokens: got {str(ids.dtype).removeprefix('torch.')}, expected integers")
    flat = ids.detach().cpu().to(torch.int64).reshape(-1).numpy()
    counts = layout.mask.cpu().reshape(-1).numpy()
    bounds = np.concatenate([[0], np.cumsum(layout.row_lengths.cpu().numpy())]).tolist()
    grams = _window_hashes(flat, n)
    complete = _unmasked_windows(counts, n)
    share = np.zeros(layout.rows)
    for row, (start, stop) in enumerate(pairwise(bounds)):
        last = stop - n + 1  # windows that begin here or later reach into the next row
        row_grams = np.sort(grams[start:last][complete[start:last]]) if last > start else grams[:0]
        if len(row_grams):
            share[row] = np.count_nonzero(row_grams[1:] == row_grams[:-1]) / len(row_grams)
    return 0.0 - max_penalty * share


def _window_hashes(tokens: NDArray[np.int64], n: int) -> NDArray[np.uint64]:
    """Hash each window of n tokens, by doubling windows until two overlapping ones cover n tokens.

    Returns:
        [N - n + 1].
    """
    hashes, width = _mix_bits(tokens.view(np.uint64)), 1
    while width < n and len(tokens) >= n:
        step = min(width, n - width)
        size = len(hashes) - step
        hashes = _mix_bits(hashes[:size] * np.uint64(0x9E3779B97F4A7C15) + hashes[step:])
        width += step
    return hashes if len(tokens) >= n else hashes[:0]


def _mix_bits(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each word: the finalizer of SplitMix64 (Steele et al., 2014), a bijection."""
    mixed: NDArray[np.uint64] = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _unmasked_windows(counts: NDArray[np.bool_], n: int) -> NDArray[np.bool_]:
    """Mark the windows of n slots that all count. Shape: [N - n + 1]."""
    counts_before = np.concatenate([[0], np.cumsum(counts)])
    return np.equal(counts_before[n:] - counts_before[:-n], n) if len(counts) >= n else np.zeros(0, dtype=np.bool_)


def rank_penalty(
    rewards: PerRow,
    groups: Ids,
    logprobs: PerRow,
    runs: Ids | None = None,
    *,
    penalty: float = 0.25,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> torch.Tensor:
    """Compute the penalty of likely responses within their group: `-penalty * reward * rank / n`.

    Rewarding the Unlikely (He et al., 2025, arXiv 2506.02355). The rank counts from 0, the least likely; equally likely
    rows share the mean of their ranks; n is the size of the group. With `runs`, a run is as likely as its rows on
    average, and each row is penalized by the rank of the run and its own reward. A row without a finite reward has no
    rank, is not counted and gets 0.

    `shape_rank` adds it to rewards. Estimate advantages from the sum: Trinity computes mean and deviation from the
    penalized rewards, but subtracts that mean from the raw ones, so that two equal rewards both score +0.707.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        logprobs: [B] Mean log-prob of each row.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        penalty: Coefficient.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        [B] Penalties.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> rank_penalty([1.0, 1.0, 0.0], ["a", "a", "a"], [-0.2, -0.9, -0.5], penalty=0.3)
    tensor([-0.2000,  0.0000,  0.0000])
    >>> rank_penalty([1.0, 1.0, 1.0], ["a", "a", "a"], [-0.1, -0.5, -0.9], ["x", "x", "y"], penalty=0.3)
    tensor([-0.1500, -0.1500,  0.0000])
    """
    return _as_tensor_like(rewards, _compute_rank_penalty(rewards, groups, logprobs, runs, penalty, process_group))


def _compute_rank_penalty(
    rewards: PerRow,
    groups: Ids,
    logprobs: PerRow,
    runs: Ids | None,
    penalty: float,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Floats:
    """Compute `rank_penalty` in float64. Shape: [B]."""
    check_float("penalty", penalty, 0, 1)
    grouped = Grouped(rewards, groups, runs, process_group)
    likely = as_rewards("logprobs", logprobs)
    _check_row_count("logprobs", likely, grouped.values[grouped.local])
    likely = np.concatenate(
        [np.asarray(rank_logprobs, dtype=np.float64) for rank_logprobs in process_group.gather(likely.tolist())]
    )
    missing_rows = np.flatnonzero(grouped.valid & np.isnan(likely))
    if len(missing_rows):
        raise ValueError(
            f"logprobs: got NaN at row {missing_rows[0]}, expected the mean log-prob of each row with a reward"
        )
    share = _group_ranks(grouped.over_runs(likely), grouped)[grouped.run] / np.maximum(
        grouped.per_row(grouped.count), 1
    )
    penalties: Floats = 0.0 - penalty * np.where(grouped.valid, grouped.values, 0.0) * share
    return penalties[grouped.local]


def _group_ranks(values: Floats, grouped: Grouped) -> Floats:
    """Rank runs with a reward within their group, from 0; equal values share the mean of their ranks.

    Returns:
        [runs] One number per run.
    """
    has_reward = np.flatnonzero(grouped.run_valid)
    order = has_reward[np.lexsort((values[has_reward], grouped.run_group[has_reward]))]
    group, value, position = grouped.run_group[order], values[order], np.arange(len(order))
    new_group = np.r_[True, group[1:] != group[:-1]][: len(order)]
    new_value = new_group | np.r_[True, value[1:] != value[:-1]][: len(order)]
    first = np.flatnonzero(new_value)
    equals = np.cumsum(new_value) - 1
    middle = (first + np.r_[first[1:], len(order)][: len(first)] - 1) / 2
    rank = np.zeros(len(values))
    rank[order] = middle[equals] - np.maximum.accumulate(np.where(new_group, position, 0))
    return rank


def _check_lengths(lengths: PerRow) -> Floats:
    """Convert lengths to float64, and check that they are nonnegative integers. Shape: [B]."""
    numbers = as_rewards("lengths", lengths)
    invalid = np.flatnonzero(~((numbers >= 0) & (numbers < np.inf) & (np.floor(numbers) == numbers)))
    if len(invalid):
        raise ValueError(f"lengths: got {numbers[invalid[0]]:g} at row {invalid[0]}, expected a number of tokens")
    return numbers


def _check_row_count(name: str, values: Floats, rewards: Floats) -> None:
    """Raise `ValueError` unless there are as many numbers as rewards."""
    if len(values) != len(rewards):
        raise ValueError(f"{name}: got {len(values)}, expected {len(rewards)}, one for each row")


def _as_tensor_like(argument: PerRow, values: Floats) -> torch.Tensor:
    """Convert numbers to a tensor on the device of `argument`: float64 if that is, else float32. Shape: [B]."""
    if not isinstance(argument, torch.Tensor):
        return torch.from_numpy(values).to(torch.float32)
    dtype = torch.float64 if argument.dtype == torch.float64 else torch.float32
    return torch.from_numpy(values).to(argument.device, dtype)


OPERATIONS = ("add", "sub", "mul", "div")
"""Operations of `shape_by`."""
_OTHER_REASONS = ("missing reward", "infinite reward", "missing value", "zero divisor")


@dataclass(frozen=True)
class ShapingResult:
    """Shaped rewards, and the report.

    Attributes:
        rewards: [B] NaN where a reward is missing.
        report: Rows by reason, also "missing reward" and "infinite reward" (before shaping), and the metrics of
            `difference`.

    >>> shaped = clip_rewards([3.0, None, 0.5], high=1.0, ids=["x", "y", "z"])
    >>> shaped.rewards, shaped.report.which("above"), shaped.report.which("missing reward")
    (tensor([1.0000,    nan, 0.5000]), ['x'], ['y'])
    """

    rewards: torch.Tensor
    report: Report


@dataclass(frozen=True)
class ClipResult:
    """Clipped advantages, and the share that was clipped.

    Attributes:
        advantages: For each token, in the given layout; 0 where the mask is False.
        fractions: [B] float32: share of the tokens of each row that were clipped; 0 for a row without tokens.
        fraction: The same over the batch.
        report: The report.

    >>> clipped = clip_advantages([[3.0, 0.5], [-0.1]], None, 1.0)
    >>> clipped.advantages, clipped.fractions, clipped.report.which("clipped")
    ([tensor([1.0000, 0.5000]), tensor([-0.1000])], tensor([0.5000, 0.0000]), [0])
    """

    advantages: Any
    fractions: torch.Tensor
    fraction: float
    report: Report


@dataclass(frozen=True)
class PassRates:
    """The mean reward of each task.

    Attributes:
        keys: [T] Tasks in order of first appearance.
        rates: [T] Mean reward; NaN if no reward is known.
        counts: [T] Number of known rewards.
        report: The report.

    >>> result = pass_rates([1.0, 0.0, None], ["easy", "easy", "odd"])
    >>> result.keys, result.rates, result.counts, result.report.which("missing reward")
    (['easy', 'odd'], [0.5, nan], [2, 0], [2])
    """

    keys: list[Hashable]
    rates: list[float]
    counts: list[int]
    report: Report

    def by_taskset(self) -> dict[Hashable, dict[str, list[Any]]]:
        """Return rates by taskset for a task selector, for keys `(taskset, index)`; unknown rates are left out."""
        rates: dict[Hashable, dict[str, list[Any]]] = {}
        for key, rate, count in zip(self.keys, self.rates, self.counts, strict=True):
            if not isinstance(key, tuple) or len(key) != 2:
                raise ValueError(f"keys: got {key!r}, expected pairs (taskset, index)")
            if count:
                taskset_rates = rates.setdefault(key[0], {"indices": [], "values": []})
                taskset_rates["indices"].append(key[1])
                taskset_rates["values"].append(rate)
        return rates


# --- penalties ------------------------------------------------------------------------------------------------------


def shape_overlong(
    rewards: PerRow,
    lengths: PerRow,
    ids: Sequence[Hashable] | None = None,
    *,
    max_length: int,
    buffer: int = 1024,
    factor: float = 1.0,
    bounded: bool = True,
) -> ShapingResult:
    """Add the `overlong_penalty` to rewards.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        lengths: [B] Response tokens, with the end token.
        ids: [B] Names of the rows for the report.
        max_length: Longest response.
        buffer: Tokens before `max_length` in which the penalty grows.
        factor: Penalty at `max_length`.
        bounded: Whether the penalty stays at `factor` beyond `max_length`; `False`: it keeps growing, as in LightRFT.

    Returns:
        The shaped rewards [B], and the report.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> shaped = shape_overlong([1.0, 1.0, 1.0], [10, 7, 6], max_length=10, buffer=4)
    >>> shaped.rewards, shaped.report.which("overlong")
    (tensor([0.0000, 0.7500, 1.0000]), [0, 1])
    """
    unshaped, sizes = as_rewards("rewards", rewards), _check_lengths(lengths)
    _check_row_count("lengths", sizes, unshaped)
    penalty = _compute_overlong_penalty(sizes, max_length, buffer, factor, bounded)
    return _build_result(rewards, unshaped, unshaped + penalty, {"overlong": rows_where(penalty < 0)}, ids)


def shape_length(
    rewards: PerRow,
    lengths: PerRow,
    ids: Sequence[Hashable] | None = None,
    *,
    target: int,
    per_token: float = 0.001,
    max_penalty: float = 1.0,
) -> ShapingResult:
    """Add the `length_penalty` to rewards.

    Penalized rows are reported under "over target".

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        lengths: [B] Response tokens, with the end token.
        ids: [B] Names of the rows for the report.
        target: Length without a penalty.
        per_token: Penalty per token over `target`.
        max_penalty: Largest penalty.

    Returns:
        The shaped rewards [B], and the report.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> shaped = shape_length([1.0, 1.0], [90, 150], target=100, per_token=0.01)
    >>> shaped.rewards, shaped.report.which("over target")
    (tensor([1.0000, 0.5000]), [1])
    """
    unshaped, sizes = as_rewards("rewards", rewards), _check_lengths(lengths)
    _check_row_count("lengths", sizes, unshaped)
    penalty = _compute_length_penalty(sizes, target, per_token, max_penalty)
    return _build_result(rewards, unshaped, unshaped + penalty, {"over target": rows_where(penalty < 0)}, ids)


def shape_repetition(
    rewards: PerRow,
    tokens: PerToken,
    mask: PerToken | None = None,
    ids: Sequence[Hashable] | None = None,
    *,
    n: int = 20,
    max_penalty: float = 1.0,
) -> ShapingResult:
    """Add the `repetition_penalty` to rewards.

    Penalized rows are reported under "repetition".

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        tokens: [B, R] or packed: token ids.
        mask: [B, R] or packed: which tokens count. `None`: all.
        ids: [B] Names of the rows for the report.
        n: Length of an n-gram.
        max_penalty: Largest penalty.

    Returns:
        The shaped rewards [B], and the report.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> shaped = shape_repetition([1.0, 1.0], [[1, 2, 1, 2, 1], [1, 2, 3, 4]], n=2)
    >>> shaped.rewards, shaped.report.which("repetition")
    (tensor([0.5000, 1.0000]), [0])
    """
    unshaped, layout = as_rewards("rewards", rewards), Layout.from_tokens(mask, tokens=tokens)
    if layout.rows != len(unshaped):
        raise ValueError(f"tokens: got {layout.rows} rows, expected {len(unshaped)}, one for each reward")
    penalty = _compute_repetition_penalty(layout, tokens, n, max_penalty)
    return _build_result(rewards, unshaped, unshaped + penalty, {"repetition": rows_where(penalty < 0)}, ids)


def shape_rank(
    rewards: PerRow,
    groups: Ids,
    logprobs: PerRow,
    runs: Ids | None = None,
    ids: Sequence[Hashable] | None = None,
    *,
    penalty: float = 0.25,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> ShapingResult:
    """Add the `rank_penalty` to rewards.

    Changed rows are reported under "likely". A likely response with a negative reward moves towards 0.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        logprobs: [B] Mean log-prob of each row.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        ids: [B] Names of the rows for the report.
        penalty: Coefficient.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        The shaped rewards [B], and the report.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> shaped = shape_rank([1.0, 1.0, 0.0], ["a", "a", "a"], [-0.2, -0.9, -0.5], penalty=0.3)
    >>> shaped.rewards, shaped.report.which("likely")
    (tensor([0.8000, 1.0000, 0.0000]), [0])
    """
    unshaped = as_rewards("rewards", rewards)
    penalties = _compute_rank_penalty(rewards, groups, logprobs, runs, penalty, process_group)
    return _build_result(rewards, unshaped, unshaped + penalties, {"likely": rows_where(penalties != 0)}, ids)


# --- the shaping of a rollout ----------------------------------------------------------------------------------------


def shape_rewards(
    rewards: torch.Tensor,
    lengths: PerRow,
    *,
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    max_tokens: int | None = None,
    norm: RunningNorm | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Shape the rewards of a rollout: overlong penalty, then running norm.

    Args:
        rewards: [B] float32, NaN where a reward is missing.
        lengths: [B] response tokens.
        overlong_buffer: The last tokens before `max_tokens` that are penalized; 0: none.
        overlong_penalty: The penalty at the end of the buffer.
        max_tokens: The longest response.
        norm: Running statistics of all rewards so far, updated with these.
        process_group: The processes that share the statistics.

    Returns:
        The rewards [B], and metrics.

    Raises:
        ValueError: If an option is invalid, or `overlong_buffer` is set without `max_tokens`.

    >>> shape_rewards(torch.tensor([1.0, 1.0]), [10, 6], overlong_buffer=4, max_tokens=10)[0]
    tensor([0., 1.])
    """
    metrics: dict[str, float] = {}
    if overlong_buffer:
        if max_tokens is None:
            raise ValueError("max_tokens: missing; the overlong buffer ends at the longest response")
        options: dict[str, Any] = {"max_length": max_tokens, "buffer": overlong_buffer, "factor": overlong_penalty}
        shaped = shape_overlong(rewards, lengths, **options)
        rewards, metrics = shaped.rewards, shaped.report.to_metrics("overlong")
    if norm is not None:
        shaped = norm(rewards, process_group=process_group)
        rewards, metrics = shaped.rewards, metrics | shaped.report.to_metrics("running_norm")
    return rewards, metrics


def clip_scores(scores: torch.Tensor, bounds: tuple[float, float] | None) -> tuple[torch.Tensor, dict[str, float]]:
    """Clip the scores (or rewards) of rows.

    Args:
        scores: [B], NaN where a reward is missing.
        bounds: (low, high); `None`: no bounds.

    Returns:
        The scores [B], and the metric `reward/clip_fraction` if there are bounds.

    >>> clip_scores(torch.tensor([3.0, -0.5]), (-1.0, 1.0))
    (tensor([ 1.0000, -0.5000]), {'reward/clip_fraction': 0.5})
    """
    if bounds is None:
        return scores, {}
    clipped = clip_rewards(scores, *bounds).rewards
    changed = ((clipped != scores) & ~scores.isnan()).float()
    return clipped, {"reward/clip_fraction": float(changed.mean()) if len(changed) else 0.0}


def normalize_advantages(
    advantages: PerToken,
    mask: PerToken,
    has_reward: torch.Tensor,
    *,
    normalize: str | None = None,
    clip: float = 0.0,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> tuple[Any, dict[str, float]]:
    """Normalize advantages over all rows with a reward, then clip them, so that the bound holds at the loss.

    Args:
        advantages: [B, R] or packed.
        mask: Which tokens count, in the same layout.
        has_reward: [B] bool: rows that have a reward.
        normalize: Subtract the `mean`, or also divide by the standard deviation (`mean_std`); `None`: neither.
        clip: The bound; 0: none.
        process_group: The processes whose rows are normalized together.

    Returns:
        The advantages in their layout, and the metric `advantage/clip_fraction` if there is a bound.

    >>> normalize_advantages(torch.tensor([[2.0, -0.5]]), torch.tensor([[1, 1]]), torch.tensor([True]), clip=1.0)
    (tensor([[ 1.0000, -0.5000]]), {'advantage/clip_fraction': 0.5})
    """
    if normalize is not None:
        layout = Layout.from_tokens(mask)
        counted = layout.restore(layout.mask & layout.spread(has_reward))
        advantages = whiten(
            advantages, counted, eps_in="std", scale=normalize == "mean_std", process_group=process_group
        )
    if clip <= 0:
        return advantages, {}
    clipped = clip_advantages(advantages, mask, clip)
    return clipped.advantages, {"advantage/clip_fraction": clipped.fraction}


# --- operations on rewards ------------------------------------------------------------------------------------------


def shape_by(
    rewards: PerRow,
    values: PerRow,
    op: str = "add",
    weight: float = 1.0,
    ids: Sequence[Hashable] | None = None,
    *,
    reason: str = "changed",
) -> ShapingResult:
    """Add `weight * values` to rewards, or subtract, multiply or divide by it.

    A reward is left as it is where its value is missing, and where it would be divided by 0; both are counted. Changed
    rows are reported under `reason`.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        values: [B] Values; `None` or NaN where they are missing.
        op: `add`, `sub`, `mul` or `div`, also in capitals, as in the reward_shaping_mapper of Trinity.
        weight: Factor of the values.
        ids: [B] Names of the rows for the report.
        reason: Reason in the report.

    Returns:
        The shaped rewards [B], and the report.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> shaped = shape_by([2.0, 2.0, None], [0.5, 0.0, 1.0], "div", 2.0)
    >>> shaped.rewards, shaped.report.which("zero divisor"), shaped.report.which("missing reward")
    (tensor([2., 2., nan]), [1], [2])
    >>> shape_by([1.0, 1.0], [0.0, -0.5], reason="style").report.which("style")
    [1]
    """
    check_choice("op", op.lower() if isinstance(op, str) else op, OPERATIONS)
    check_float("weight", weight)
    if not isinstance(reason, str) or not reason or reason in _OTHER_REASONS:
        raise ValueError(f"reason: got {reason!r}, expected a name other than {', '.join(map(repr, _OTHER_REASONS))}")
    unshaped, by = as_rewards("rewards", rewards), as_rewards("values", values)
    _check_row_count("values", by, unshaped)
    by = by * weight
    missing, kind = np.isnan(by), op.lower()
    zero = (by == 0) & (kind == "div")
    with np.errstate(all="ignore"):
        after = {"add": unshaped + by, "sub": unshaped - by, "mul": unshaped * by}.get(
            kind, unshaped / np.where(zero, 1, by)
        )
    after = np.where(missing | zero, unshaped, after)
    has_reward = ~np.isnan(unshaped)
    reasons = {"missing value": rows_where(missing & has_reward), "zero divisor": rows_where(zero & has_reward)}
    reasons[reason] = rows_where((after != unshaped) & has_reward)
    return _build_result(rewards, unshaped, after, reasons, ids)


def clip_rewards(
    rewards: PerRow, low: float | None = None, high: float | None = None, ids: Sequence[Hashable] | None = None
) -> ShapingResult:
    """Clip rewards to `low` and `high`; `reward_clip` c of LightRFT is `-c, c`.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        low: Lower bound; `None`: none.
        high: Upper bound; `None`: none.
        ids: [B] Names of the rows for the report.

    Returns:
        The shaped rewards [B], and the report.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> clipped = clip_rewards([20.0, None, -3.0, 0.5], -1.0, 10.0)
    >>> clipped.rewards, clipped.report.which("above"), clipped.report.which("below")
    (tensor([10.0000,     nan, -1.0000,  0.5000]), [0], [2])
    """
    lower = -np.inf if low is None else check_float("low", low)
    upper = np.inf if high is None else check_float("high", high)
    if lower > upper:
        raise ValueError(f"low: got {low}, expected at most high, {high}")
    unclipped = as_rewards("rewards", rewards)
    reasons = {"below": rows_where(unclipped < lower), "above": rows_where(unclipped > upper)}
    return _build_result(rewards, unclipped, np.clip(unclipped, lower, upper), reasons, ids)


def difference(before: PerRow, after: PerRow) -> dict[str, float]:
    """Measure how much rewards were changed, over all rows.

    The report of each shaper has these numbers for its own step; this function gives them for a sequence of steps.

    Args:
        before: [B] Rewards before.
        after: [B] Rewards after. Where one is missing or infinite, the change counts as 0.

    Returns:
        The numbers by name.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> difference([2.0, 2.0, None], [3.0, 2.0, None])
    {'reward_diff/mean': 0.3333333333333333, 'reward_diff/min': 0.0, 'reward_diff/max': 1.0}
    """
    first, last = as_rewards("before", before), as_rewards("after", after)
    _check_row_count("after", last, first)
    off = np.zeros(len(first))
    moved = np.isfinite(first) & np.isfinite(last)
    off[moved] = last[moved] - first[moved]
    if not len(off):
        return {}
    return {
        "reward_diff/mean": float(off.mean()),
        "reward_diff/min": float(off.min()),
        "reward_diff/max": float(off.max()),
    }


def clip_advantages(advantages: PerToken, mask: PerToken | None, bound: float, *, over: str = "tokens") -> ClipResult:
    """Clip advantages to ±`bound`, and measure the share that was outside before.

    Clip last, after whitening, so that the bound holds at the loss.

    Args:
        advantages: [B, R] or packed.
        mask: [B, R] or packed: which tokens count. `None`: all.
        bound: The bound.
        over: Shares of `"tokens"` that count, or of all `"slots"`, padding included, which LightRFT logs for its
            REINFORCE estimators (for GAE it measures after clipping, and always logs 0).

    Returns:
        The advantages in the same layout, and the report.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> result = clip_advantages([[1.0, 1.0, 1.0], [2.0, -2.0]], None, 1.5)
    >>> result.advantages, result.fractions, result.fraction
    ([tensor([1., 1., 1.]), tensor([ 1.5000, -1.5000])], tensor([0., 1.]), 0.4)
    """
    check_float("bound", bound, 1e-30, expected="a positive number")
    check_choice("over", over, ("tokens", "slots"))
    layout = Layout.from_tokens(mask, advantages=advantages)
    tokens = layout.take("advantages", advantages)
    outside = layout.row_sums((tokens.detach().abs() > bound).to(torch.float64)).cpu()
    counts = (layout.counts if over == "tokens" else layout.row_lengths).cpu()
    fraction = float(outside.sum() / counts.sum().clamp(min=1))
    report = Report(layout.rows, {"clipped": rows_where(outside > 0)}, {"clip_fraction": fraction})
    fractions = (outside / counts.clamp(min=1)).to(tokens.device, torch.float32)
    return ClipResult(layout.restore(tokens.clamp(-bound, bound)), fractions, fraction, report)


class RunningNorm:
    """Normalization of rewards by the running deviation, and optionally the mean, of all rewards of all processes.

    Call it once per rollout with all of its rewards: `norm(rewards)` updates the statistics and scales the rewards,
    `norm(rewards, update=False)` only scales them (evaluation). Up to rounding, the state does not depend on the order
    of rewards or their division into calls and processes: counts, means and squares are in float64, merged as by Chan,
    Golub and LeVeque (1979). The deviation is of the sample (n - 1). Missing and infinite rewards are ignored.

    Args:
        floor: Smallest deviation to divide by; below it, rewards keep their scale. Equal, nearly equal and single
            rewards are thus treated alike, and no reward is scaled by more than 1 / floor.
        minus_mean: Whether to subtract the mean.

    >>> norm = RunningNorm()
    >>> norm([1.0, 1.0]).rewards, norm([3.0, None, 3.0]).rewards, norm.count, norm.mean, round(norm.std, 4)
    (tensor([1., 1.]), tensor([2.5981,    nan, 2.5981]), 4, 2.0, 1.1547)
    >>> RunningNorm(minus_mean=True)([5.0, 5.0]).rewards
    tensor([0., 0.])
    >>> RunningNorm()([1.0, 1.0 + 1e-9]).rewards
    tensor([1., 1.])
    """

    def __init__(self, *, floor: float = 1e-3, minus_mean: bool = False) -> None:
        self.floor = check_float("floor", floor, 1e-30, expected="a positive number")
        self.minus_mean = check_bool("minus_mean", minus_mean)
        self._state = (0, 0.0, 0.0, 0.0, 0.0)

    @property
    def count(self) -> int:
        """Number of rewards so far."""
        return self._state[0]

    @property
    def mean(self) -> float:
        """Mean of the rewards so far; exact for equal rewards."""
        _, mean, _, low, high = self._state
        return low if low == high else mean

    @property
    def std(self) -> float:
        """Deviation of the rewards so far; exactly 0 for fewer than two, or if all are equal."""
        count, _, squares, low, high = self._state
        return 0.0 if count < 2 or low == high else float((squares / (count - 1)) ** 0.5)

    @property
    def scale(self) -> float:
        """Divisor of rewards: the deviation if it is above the floor, else 1."""
        return self.std if self.std > self.floor else 1.0

    def update(self, rewards: PerRow, process_group: ProcessGroup = SINGLE_PROCESS) -> None:
        """Update the statistics with the rewards of one rollout, of every process.

        Args:
            rewards: [B] Rewards of this process.
            process_group: The processes.
        """
        values = as_rewards("rewards", rewards)
        local = np.sort(values[np.isfinite(values)])  # sorted, so that the order of rewards has no effect
        moments = (0, 0.0, 0.0, 0.0, 0.0)
        if len(local):
            mean = float(local.mean())
            moments = (len(local), mean, float(((local - mean) ** 2).sum()), float(local[0]), float(local[-1]))
        for (state,) in process_group.gather([moments]):
            self._state = _merge_moments(self._state, state)

    def apply(self, rewards: PerRow, ids: Sequence[Hashable] | None = None) -> ShapingResult:
        """Scale rewards by the statistics so far.

        Args:
            rewards: [B] Rewards.
            ids: [B] Ids of the rows, for the report.

        Returns:
            The scaled rewards [B], and the report.
        """
        unscaled = as_rewards("rewards", rewards)
        shaped = (unscaled - (self.mean if self.minus_mean else 0.0)) / self.scale
        return _build_result(rewards, unscaled, shaped, {}, ids, {"running_mean": self.mean, "running_std": self.std})

    def __call__(
        self,
        rewards: PerRow,
        ids: Sequence[Hashable] | None = None,
        *,
        update: bool = True,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> ShapingResult:
        """Update the statistics, unless `update` is False, and scale rewards [B]."""
        if check_bool("update", update):
            self.update(rewards, process_group)
        return self.apply(rewards, ids)

    def state_dict(self) -> dict[str, float]:
        """Return the state as plain numbers."""
        return dict(zip(_STATE, self._state, strict=True))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: If the state is invalid.
        """
        check_state(state, _STATE)
        count = check_float("state: count", state["count"], 0, 2**63, "an integer >= 0")
        if not count.is_integer():
            raise ValueError(f"state: count: got {count}, expected an integer >= 0")
        largest = float(np.finfo(np.float64).max)
        mean, low = (
            check_float(f"state: {name}", state[name], -largest, largest, "a finite number") for name in ("mean", "low")
        )
        squares = check_float("state: squares", state["squares"], 0, largest, "a finite number >= 0")
        high = check_float("state: high", state["high"], low, largest, f"a finite number >= {low:g}")
        self._state = (int(count), mean, squares, low, high)


_STATE = ("count", "mean", "squares", "low", "high")
_State = tuple[int, float, float, float, float]


def _merge_moments(first: _State, other: _State) -> _State:
    if not first[0] or not other[0]:
        return other if not first[0] else first
    count, off = first[0] + other[0], other[1] - first[1]
    mean = first[1] + off * other[0] / count
    squares = first[2] + other[2] + off * off * first[0] * other[0] / count
    return count, mean, squares, min(first[3], other[3]), max(first[4], other[4])


def pass_rates(rewards: PerRow, keys: Sequence[Hashable]) -> PassRates:
    """Compute the mean reward of each task, and the share of tasks that are neither always nor never solved.

    The metrics are shares of the tasks with a known rate: `valid_ratio` of rates within (0, 1), `strict_valid_ratio`
    within (1/16, 15/16).

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        keys: [B] Task of each row; `(taskset, index)` pairs as keys make `by_taskset` work.

    Returns:
        The rates by task, and the ratios.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> result = pass_rates([1.0, 0.0, 1.0, None], [(0, 7), (0, 7), (1, 3), (1, 3)])
    >>> result.rates, result.report.metrics["valid_ratio"], result.by_taskset()[0]
    ([0.5, 1.0], 0.5, {'indices': [7], 'values': [0.5]})
    """
    grouped = Grouped(rewards, as_ids("keys", keys, len(as_rewards("rewards", rewards))))
    has_reward = grouped.count > 0
    rates = grouped.mean[has_reward]
    shares = {
        "valid_ratio": (rates > 0) & (rates < 1),
        "strict_valid_ratio": (rates > 1 / 16) & (rates < 15 / 16),
        "<1_ratio": rates < 1,
        ">0_ratio": rates > 0,
        "<15_16_ratio": rates < 15 / 16,
        ">1_16_ratio": rates > 1 / 16,
    }
    metrics = {name: float(share.mean()) if len(rates) else 0.0 for name, share in shares.items()}
    missing = np.isnan(grouped.values)
    reasons = {"missing reward": rows_where(missing), "infinite reward": rows_where(~grouped.valid & ~missing)}
    means = np.where(has_reward, grouped.mean, np.nan).tolist()
    return PassRates(grouped.group_ids, means, grouped.count.tolist(), Report(grouped.rows, reasons, metrics))


def _build_result(
    rewards: PerRow,
    unshaped: Floats,
    after: Floats,
    reasons: Mapping[str, Sequence[int]],
    ids: Sequence[Hashable] | None,
    metrics: Mapping[str, float] | None = None,
) -> ShapingResult:
    all_reasons = {
        "missing reward": rows_where(np.isnan(unshaped)),
        "infinite reward": rows_where(np.isinf(unshaped)),
        **reasons,
    }
    report = Report(len(unshaped), all_reasons, {**difference(unshaped, after), **(metrics or {})})
    return ShapingResult(_as_tensor_like(rewards, after), report if ids is None else report.with_ids(ids))
