"""What a response loses, or gains, for its length, for repeating itself, for being likely: numbers to add to rewards.

Invariant: nothing that is given is changed; a penalty depends on the row and its group alone, not on where it stands.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.groups import Floats, Grouped, as_rewards
from rollbook.algorithms.layout import Layout, PerRow, PerToken
from rollbook.core.checks import check_bool, check_float, check_int
from rollbook.core.process_group import ALONE, Ranks


def overlong_penalty(
    lengths: PerRow, *, max_length: int, buffer: int = 1024, factor: float = 1.0, bounded: bool = True
) -> torch.Tensor:
    """[B] What a response loses for running into the last `buffer` tokens before `max_length`.

    DAPO (Yu et al., 2025, arXiv 2503.14476), equation 13: 0 up to `max_length - buffer`, then falling linearly to
    `-factor` at `max_length`, and `-factor` beyond. `bounded=False` goes on falling beyond, as LightRFT's does; up to
    `max_length` they are the same. lengths: (B,), the end token included.

    >>> overlong_penalty([12, 10, 7, 6, 0], max_length=10, buffer=4)
    tensor([-1.0000, -1.0000, -0.2500,  0.0000,  0.0000])
    """
    return given_back(lengths, overlong(whole_lengths(lengths), max_length, buffer, factor, bounded))


def overlong(lengths: Floats, max_length: int, buffer: int, factor: float, bounded: bool) -> Floats:
    """[B] `overlong_penalty` of lengths that are known to be whole."""
    check_float("max_length", max_length, 1)
    check_float("buffer", buffer, 1, max_length, what=f"a number of tokens from 1 to max_length, {max_length}")
    check_float("factor", factor, 0, what="a number of at least 0, the largest penalty")
    found = np.minimum((max_length - buffer - lengths) / buffer, 0.0) * factor
    return np.maximum(found, -factor) if check_bool("bounded", bounded) else found


def length_penalty(lengths: PerRow, *, target: int, per_token: float = 0.001, max_penalty: float = 1.0) -> torch.Tensor:
    """[B] What a response loses for each token over `target`, at most `max_penalty`.

    -min(per_token * max(0, length - target), max_penalty). `shape_length` adds it to rewards.

    >>> length_penalty([90, 100, 150, 5000], target=100, per_token=0.01)
    tensor([ 0.0000,  0.0000, -0.5000, -1.0000])
    """
    return given_back(lengths, over_target(whole_lengths(lengths), target, per_token, max_penalty))


def over_target(lengths: Floats, target: int, per_token: float, max_penalty: float) -> Floats:
    """[B] `length_penalty` of lengths that are known to be whole."""
    check_float("target", target, 0)
    check_float("per_token", per_token, 0)
    check_float("max_penalty", max_penalty, 0)
    return 0.0 - np.minimum(np.maximum(lengths - target, 0.0) * per_token, max_penalty)


def length_bonus(lengths: PerRow, correct: PerRow, groups: Any, *, ranks: Ranks = ALONE) -> torch.Tensor:
    """[B] A bonus for being short among the answers to one prompt.

    Kimi k1.5 (2025, arXiv 2501.12599), section 2.3.3: b = 0.5 - (length - shortest) / (longest - shortest), over all
    answers of the group; a correct answer gets b, a wrong one min(0, b); a group whose answers are equally long gets 0.
    correct: (B,) truth values, or rewards that are 1 or 0; `None` or NaN where that is not known: such a row gets 0 and
    is neither the shortest nor the longest. `shape_by(rewards, bonus, "add", weight, reason="length bonus")` adds it to
    rewards and reports whom it changed.

    >>> length_bonus([100, 200, 300, 100, 300, 50], [True, True, True, False, False, True], list("aaabbc"))
    tensor([ 0.5000,  0.0000, -0.5000,  0.0000, -0.5000,  0.0000])
    """
    sizes, right = whole_lengths(lengths), as_rewards("correct", correct)
    same_rows("correct", right, sizes)
    known = ~np.isnan(right)
    odd = np.flatnonzero(known & (right != 0) & (right != 1))
    if len(odd):
        raise ValueError(f"correct: got {right[odd[0]]:g} at row {odd[0]}, expected true or false, 1 or 0, or None")
    grouped = Grouped(torch.from_numpy(np.where(known, sizes, np.nan)), groups, None, ranks)
    own = grouped.own
    low, high = (np.where(grouped.count > 0, end, 0.0) for end in grouped.ends)
    spread = grouped.of(high - low)[own]
    bonus = 0.5 - (sizes - grouped.of(low)[own]) / np.where(spread > 0, spread, 1.0)
    bonus = np.where(right == 1, bonus, np.minimum(bonus, 0.0))
    return given_back(lengths, np.where(known & (spread > 0), bonus, 0.0))


def repetition_penalty(
    tokens: PerToken, mask: PerToken | None = None, *, n: int = 20, max_penalty: float = 1.0
) -> torch.Tensor:
    """[B] float32: what a response loses for saying the same again: `-max_penalty` times its share of repeated n-grams.

    The share is 1 - (different n-grams) / (all n-grams), the formula of Open R1's repetition reward (there over words,
    with n = 3; here over token ids, and long n-grams, as in Yeo et al., 2025, arXiv 2502.03373, who take 40, so that
    ordinary phrases cost nothing while a loop of any period costs nearly all). tokens, mask: (B, A) or packed token
    ids; an n-gram counts if all its tokens do, so that none reaches over a tool's answer. Fewer than n tokens: 0.

    N-grams are told apart by a hash of 64 bits; that two of a row of 32,768 share one has a chance below 1e-10.
    `shape_repetition` adds it to rewards.

    >>> repetition_penalty([[1, 2, 1, 2, 1], [1, 2, 3, 4], [7]], n=2)
    tensor([-0.5000,  0.0000,  0.0000])
    """
    layout = Layout.of(mask, tokens=tokens)
    lost = repeated(layout, tokens, n, max_penalty)
    return torch.from_numpy(lost).to(layout.mask.device, torch.float32)


def repeated(layout: Layout, tokens: PerToken, n: int, max_penalty: float) -> Floats:
    """[B] `repetition_penalty` of tokens of a layout."""
    n = check_int("n", n, 1)
    check_float("max_penalty", max_penalty, 0)
    given = layout.whole("tokens", tokens)
    if given.is_floating_point() and given.numel():
        raise ValueError(f"tokens: got {str(given.dtype).removeprefix('torch.')}, expected integers")
    flat = given.detach().cpu().to(torch.int64).reshape(-1).numpy()
    counts = layout.mask.cpu().reshape(-1).numpy()
    bounds = np.concatenate([[0], np.cumsum(layout.row_lengths.cpu().numpy())]).tolist()
    grams = _window_hashes(flat, n)
    whole = _whole_windows(counts, n)
    share = np.zeros(layout.rows)
    for row, (start, stop) in enumerate(pairwise(bounds)):
        last = stop - n + 1  # windows that begin here or later reach into the next row
        found = np.sort(grams[start:last][whole[start:last]]) if last > start else grams[:0]
        if len(found):
            share[row] = np.count_nonzero(found[1:] == found[:-1]) / len(found)
    return 0.0 - max_penalty * share


def _window_hashes(tokens: NDArray[np.int64], n: int) -> NDArray[np.uint64]:
    """[N - n + 1] A hash of each n tokens in a row; windows double until two of them, overlapping, make n."""
    hashes, width = _mixed(tokens.view(np.uint64)), 1
    while width < n and len(tokens) >= n:
        step = min(width, n - width)
        size = len(hashes) - step
        hashes = _mixed(hashes[:size] * np.uint64(0x9E3779B97F4A7C15) + hashes[step:])
        width += step
    return hashes if len(tokens) >= n else hashes[:0]


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Words with every bit spread over all: the finisher of SplitMix64 (Steele et al., 2014), which is one to one."""
    mixed: NDArray[np.uint64] = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _whole_windows(counts: NDArray[np.bool_], n: int) -> NDArray[np.bool_]:
    """[N - n + 1] Whether each of n slots in a row counts."""
    before = np.concatenate([[0], np.cumsum(counts)])
    return np.equal(before[n:] - before[:-n], n) if len(counts) >= n else np.zeros(0, dtype=np.bool_)


def rank_penalty(
    rewards: PerRow,
    groups: Any,
    log_probs: PerRow,
    runs: Any = None,
    *,
    penalty: float = 0.25,
    ranks: Ranks = ALONE,
) -> torch.Tensor:
    """[B] What a response loses for being among the likelier ones of its group: `-penalty * reward * rank / n`.

    Rewarding the Unlikely (He et al., 2025, arXiv 2506.02355). rank counts from 0, the least likely by `log_probs`,
    (B,), the mean log-prob of each row; equally likely ones share the mean of their ranks; n is the group's size. With
    `runs`, (B,) ids, rows of one run count once: the run is as likely as its rows are on average, and each row loses by
    the run's rank and its own reward. A row without a finite reward has no rank, is not counted and loses 0.

    `shape_rank` adds it to rewards; estimate from the sum: Trinity takes mean and deviation from the penalised rewards,
    but subtracts that mean from the raw ones, so that two equal rewards both score +0.707.

    >>> rank_penalty([1.0, 1.0, 0.0], ["a", "a", "a"], [-0.2, -0.9, -0.5], penalty=0.3)
    tensor([-0.2000,  0.0000,  0.0000])
    >>> rank_penalty([1.0, 1.0, 1.0], ["a", "a", "a"], [-0.1, -0.5, -0.9], ["x", "x", "y"], penalty=0.3)
    tensor([-0.1500, -0.1500,  0.0000])
    """
    return given_back(rewards, likely_lost(rewards, groups, log_probs, runs, penalty, ranks))


def likely_lost(
    rewards: PerRow, groups: Any, log_probs: PerRow, runs: Any, penalty: float, ranks: Ranks = ALONE
) -> Floats:
    """[B] `rank_penalty` in float64."""
    check_float("penalty", penalty, 0, 1)
    grouped = Grouped(rewards, groups, runs, ranks)
    likely = as_rewards("log_probs", log_probs)
    same_rows("log_probs", likely, grouped.values[grouped.own])
    likely = np.concatenate([np.asarray(part, dtype=np.float64) for part in ranks.gather(likely.tolist())])
    odd = np.flatnonzero(grouped.valid & np.isnan(likely))
    if len(odd):
        raise ValueError(f"log_probs: got NaN at row {odd[0]}, expected the mean log-prob of each row with a reward")
    share = _ranks_of(grouped.over_runs(likely), grouped)[grouped.run] / np.maximum(grouped.of(grouped.count), 1)
    lost: Floats = 0.0 - penalty * np.where(grouped.valid, grouped.values, 0.0) * share
    return lost[grouped.own]


def _ranks_of(values: Floats, grouped: Grouped) -> Floats:
    """[runs] How many runs of the group with a reward are below each, from 0; equals share the mean of their ranks."""
    known = np.flatnonzero(grouped.run_valid)
    order = known[np.lexsort((values[known], grouped.run_group[known]))]
    group, value, place = grouped.run_group[order], values[order], np.arange(len(order))
    new_group = np.r_[True, group[1:] != group[:-1]][: len(order)]
    new_value = new_group | np.r_[True, value[1:] != value[:-1]][: len(order)]
    first = np.flatnonzero(new_value)
    equals = np.cumsum(new_value) - 1
    middle = (first + np.r_[first[1:], len(order)][: len(first)] - 1) / 2
    rank = np.zeros(len(values))
    rank[order] = middle[equals] - np.maximum.accumulate(np.where(new_group, place, 0))
    return rank


# --- shared with `shaping` ------------------------------------------------------------------------------------------


def whole_lengths(lengths: PerRow) -> Floats:
    """[B] Lengths as numbers, once they are known to be whole and not negative."""
    found = as_rewards("lengths", lengths)
    odd = np.flatnonzero(~((found >= 0) & (found < np.inf) & (np.floor(found) == found)))
    if len(odd):
        raise ValueError(f"lengths: got {found[odd[0]]:g} at row {odd[0]}, expected a number of tokens")
    return found


def same_rows(name: str, values: Floats, rewards: Floats) -> None:
    """Refuse numbers of rows that are not as many as there are rewards."""
    if len(values) != len(rewards):
        raise ValueError(f"{name}: got {len(values)}, expected {len(rewards)}, one for each row")


def given_back(model: PerRow, values: Floats) -> torch.Tensor:
    """[B] Numbers on the device of what was given; float64 if that was."""
    if not isinstance(model, torch.Tensor):
        return torch.from_numpy(values).to(torch.float32)
    return torch.from_numpy(values).to(model.device, torch.float64 if model.dtype == torch.float64 else torch.float32)
