"""Checks on the flow of data: stale samples, a keep-rate that depends on length, groups that never complete.

Invariant: they read what the ledger wrote; a source without one is not judged.
"""

from __future__ import annotations

import math

import numpy as np

from rollbook.inspect.doctor.findings import Finding, Judgement, exact, fine, found, percent, unknown
from rollbook.inspect.doctor.samples import Samples, distinct
from rollbook.inspect.doctor.statistics import Floats, Ints, at_least, by_step
from rollbook.inspect.doctor.thresholds import Thresholds


def stale(samples: Samples, t: Thresholds) -> Judgement:
    """Samples of policies long gone."""
    known = samples.there & np.isfinite(samples.lag) & ~samples.dropped
    n = int(known.sum())
    if not n:
        return unknown("no record says which policy version made it")
    if n < t.samples:
        return unknown(f"only {n} samples have a policy version, {t.samples} are needed")
    newest = by_step(samples.step[known], samples.version[known], median=True, least=1)
    # Trainers that count every optimizer step move by several versions from one step to the next.
    stride = float(np.median(np.diff(newest.values))) if len(newest) >= 3 else 1.0
    limit = t.stale_lag * max(stride, 1.0)
    worst, part = 0.0, known
    for each in (known, known & samples.recent(t)):
        sure = at_least(int((each & (samples.lag > limit)).sum()), int(each.sum()), t.certainty)
        if int(each.sum()) >= t.samples and sure > worst:
            worst, part = sure, each
    old = part & (samples.lag > limit)
    share = float(old.sum()) / int(part.sum())
    if worst <= t.stale:
        return fine(f"{percent(share)} of {n} samples are more than {limit:g} versions old; ill above {t.stale:.0%}")
    first, last = samples.span(old)
    lag = float(np.median(samples.lag[part]))
    return found(
        Finding(
            "stale-data",
            "high" if share >= 0.5 else "medium",
            f"{percent(share)} of samples are more than {limit:g} versions old",
            f"Of {int(part.sum())} samples {int(old.sum())} had fallen more than {limit:g} versions behind when they "
            f"were trained on (or came); the median lag is {lag:g}, the largest {np.max(samples.lag[part]):g}. Ill "
            f"above {percent(t.stale)}.",
            "Bound it when leasing (max_staleness), let generation wait for the trainer or run fewer engines ahead, "
            "synchronise weights more often, and correct what is left (truncated importance sampling, or decoupled "
            "clipping against recomputed log-probs).",
            (first, last),
            samples.evidence(old, samples.lag, apart=True),
            int(old.sum()),
            samples.where(f"lag > {exact(limit)}" + (" and not dropped" if samples.dropped.any() else ""), first, last),
            share,
        )
    )


def keep_bias(samples: Samples, t: Thresholds) -> Judgement:
    """Long samples are dropped more often than short ones (or the other way): training sees another distribution."""
    trained = samples.state == "trained"
    # Overlong answers are often left out on purpose.
    use = samples.there & (trained | samples.dropped) & (samples.tokens > 0) & ~samples.truncated
    n, lost = int(use.sum()), int((use & samples.dropped).sum())
    if not trained.any():
        return unknown("nothing was trained on yet, or the source has no ledger")
    if n < t.samples or lost < t.samples // 4:
        return fine(f"{lost} of {n} samples that were decided on were dropped")
    places = np.flatnonzero(use)
    rank = _ranks(samples.step[places], samples.tokens[places])
    kept = trained[places]
    short, long = rank < 0.25, rank > 0.75
    few = min(int(short.sum()), int(long.sum()))
    if few < max(t.samples // 4, 1):
        return unknown(f"only {few} samples are in the longest or the shortest quarter of their steps")
    low, high = float(kept[short].mean()), float(kept[long].mean())
    pooled = float(kept[short | long].mean())
    error = math.sqrt(pooled * (1 - pooled) * (1 / int(short.sum()) + 1 / int(long.sum())))
    if abs(low - high) < t.keep_bias or abs(low - high) < 2 * t.certainty * error:
        return fine(
            f"of the shortest quarter of each step {percent(low)} were trained on, of the longest {percent(high)}"
        )
    side = long if high < low else short
    ill = np.zeros(len(samples), bool)
    ill[places[side & ~kept]] = True
    first, last = samples.span(ill)
    return found(
        Finding(
            "keep-rate-bias",
            "high" if abs(low - high) >= 0.5 else "medium",
            f"{percent(high)} of long samples are trained on, and {percent(low)} of short ones",
            f"Of {n} samples that were decided on {lost} were dropped. Of the shortest quarter of each step "
            f"{percent(low)} were trained on, of the longest {percent(high)} (truncated ones left out). Ill from "
            f"{percent(t.keep_bias)} between them.",
            "Look at the reasons of the drops (book.counts, book.keep_rates): long samples are late, and a staleness "
            "bound or a deadline takes them first. Count staleness from when a sample began, let generation be "
            "resumed, or allow partial rollouts instead of dropping them.",
            (first, last),
            samples.evidence(ill, samples.tokens if side is long else -samples.tokens),
            int(ill.sum()),
            samples.where("dropped and not truncated", first, last),
            abs(low - high),
        )
    )


def _ranks(steps: Ints, values: Floats) -> Floats:
    """[N] Where each value stands among those of its step, from 0 to 1; equal values stand in their middle."""
    order = np.lexsort((values, steps))
    step, value = steps[order], values[order]
    new = np.ones(len(order), bool)
    new[1:] = (step[1:] != step[:-1]) | (value[1:] != value[:-1])
    first = np.flatnonzero(new)
    place = np.cumsum(new) - 1
    counts = np.diff(first, append=len(order))
    _, begin, which, size = np.unique(step, return_index=True, return_inverse=True, return_counts=True)
    middle = first[place] + (counts[place] - 1) / 2 - begin[which]
    ranks = np.empty(len(values))
    ranks[order] = (middle + 0.5) / size[which]
    return ranks


def incomplete(samples: Samples, t: Thresholds) -> Judgement:
    """Groups that were to have more runs than ever came: by-group leasing waits for them for ever."""
    k = len(samples.gids)
    if not np.isfinite(samples.group_size).any():
        return unknown("no record says how many runs its group has (group_size)")
    if samples.partial:
        return unknown("these are some of the records that there were")
    expected = np.zeros(k)
    np.maximum.at(expected, samples.group, np.nan_to_num(samples.group_size))
    runs = distinct(samples.group, samples.run, k)
    step = np.full(k, np.iinfo(np.int64).min, np.int64)
    np.maximum.at(step, samples.group, samples.step)
    # Steps that come after a group's own.
    later = len(samples.steps) - np.searchsorted(samples.steps, step, side="right")
    old = (expected > 1) & (later >= t.patience)
    n = int(old.sum())
    if n < t.groups:
        return unknown(f"only {n} groups have seen {t.patience} later steps, {t.groups} are needed")
    lacking = old & (runs < expected)
    count = int(lacking.sum())
    if at_least(count, n, t.certainty) <= t.incomplete:
        return fine(f"{count} of {n} groups lack runs")
    ill = np.isin(samples.group, np.flatnonzero(lacking))
    waiting = int((ill & (samples.state == "waiting")).sum())
    first, last = samples.span(ill)
    missing = int((expected - runs)[lacking].sum())
    return found(
        Finding(
            "groups-incomplete",
            "high" if count >= n / 4 else "medium",
            f"{count} groups never become complete",
            f"{count} of {n} groups whose step has passed lack runs, {missing} in all; {waiting} of their samples "
            f"still wait. Ill above {percent(t.incomplete)}.",
            "Tell the book of runs that failed (book.fail), so that their groups count as complete; or lease groups "
            "without them after a time (partial_after). Then see why runs are lost: time limits of tools, crashed "
            "workers, requests that were given up.",
            (first, last),
            samples.evidence(ill, (expected - runs)[samples.group], apart=True),
            int(ill.sum()),
            samples.where("incomplete", first, last),
            count / n,
        )
    )
