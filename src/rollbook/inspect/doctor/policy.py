"""Checks on the policy: entropy, length, distance to the reference, and log-probs of engine and trainer.

Invariant: a trend counts only where a rank test sees it and the change is large; a level is read from the recent steps.
"""

from __future__ import annotations

import numpy as np

from rollbook.inspect.doctor.findings import Finding, Judgement, amount, exact, fine, found, percent, unknown
from rollbook.inspect.doctor.samples import Samples
from rollbook.inspect.doctor.statistics import Mask, Series, at_least, trend
from rollbook.inspect.doctor.thresholds import Thresholds

_SURE = "The policy is sure, and mostly right: stop here, or go on with harder prompts, for which it may be too sure."
_EXPLORE = (
    "Give exploration room: raise the upper clip bound (clip-higher), add an entropy bonus or a KL penalty on tokens "
    "of high covariance, sample at temperature 1, lower the learning rate; go back to a checkpoint before step"
)


def entropy_collapse(samples: Samples, t: Thresholds) -> Judgement:
    """Sampling has hardly any choice left: the samples of a group will be alike, and nothing new is tried."""
    measured = bool(np.isfinite(samples.entropy).any())
    # The mean of -log p over sampled tokens is an estimate of the entropy; good enough for a trend, not for a level.
    values = samples.entropy if measured else -samples.logprob
    name = "entropy" if measured else "surprise (-log-prob; no entropy is recorded)"
    use = samples.recent(t) & np.isfinite(values)
    n = int(use.sum())
    if not np.isfinite(values).any():
        return unknown("neither entropies nor log-probs are recorded")
    if n < t.samples:
        return unknown(f"only {n} recent samples have them, {t.samples} are needed")
    series = samples.series(values)
    if not len(series):
        return unknown("no step has enough samples with them")
    w = samples.window(len(series), t)
    now, early = float(np.median(series.values[-w:])), float(np.median(series.values[:w]))
    low = measured and now < t.entropy_floor
    falling = trend(series.values)
    fell = len(series) >= t.trend_steps and now <= t.entropy_fall * early and falling <= -t.trend
    if not low and not fell:
        if not measured and len(series) < t.trend_steps:
            return unknown(f"no entropies are recorded, and {len(series)} steps are too few for a trend of log-probs")
        return fine(f"the mean {name} is {amount(now)} nats per token; it was {amount(early)}")
    bar = max(t.entropy_floor if low else 0.0, t.entropy_fall * early if fell else 0.0)
    first = _since(series, series.values >= bar)
    ill = samples.there & (values <= bar) & (samples.step >= first)
    sure = _solved(samples, t)
    return found(
        Finding(
            "entropy-collapse",
            "low" if sure else "high" if low else "medium",
            f"Entropy has {'fallen' if sure else 'collapsed'} to {amount(now)} nats per token"
            + (", as the prompts were solved" if sure else ""),
            f"The median of step means of the {name} is {amount(now)} over the last {w} steps; early it was "
            f"{amount(early)} (trend: z = {falling:.1f}). Ill below {t.entropy_floor:g}, or at less than "
            f"{percent(t.entropy_fall)} of the early value.",
            _SURE if sure else f"{_EXPLORE} {first}.",
            (first, int(samples.steps[-1])),
            samples.evidence(ill, -values, apart=True),
            int(ill.sum()),
            samples.where(f"entropy <= {exact(bar)}" if measured else f"logprob >= {exact(-bar)}", first),
            float((ill & use).sum()) / n,
        )
    )


def _solved(samples: Samples, t: Thresholds) -> bool:
    """Whether recent rewards are good, and rose to it: then a policy that is sure is no illness."""
    series = samples.series(samples.reward)
    if len(series) < t.trend_steps or samples.constant:
        return False
    now = float(np.median(series.values[-samples.window(len(series), t) :]))
    good = samples.low + t.good_reward * (samples.high - samples.low)
    return now >= good and trend(series.values) >= t.trend


def _since(series: Series, well: Mask) -> int:
    """The step from which on none was well, the last one at the latest."""
    last = np.flatnonzero(well)
    at = int(last.max()) + 1 if len(last) else 0
    return int(series.steps[min(at, len(series) - 1)])


def growth(samples: Samples, t: Thresholds, mask: Mask) -> tuple[Series, float, float, float] | None:
    """Length by step over some samples, its early and recent level, and its trend; nothing where steps are too few."""
    series = samples.series(samples.tokens, mask & (samples.tokens > 0))
    if len(series) < t.trend_steps:
        return None
    w = samples.window(len(series), t)
    return (
        series,
        float(np.median(series.values[:w])),
        float(np.median(series.values[-w:])),
        trend(series.values),
    )


def exploded(samples: Samples, t: Thresholds, mask: Mask) -> bool:
    """Whether the lengths of some samples have grown beyond the threshold."""
    grown = growth(samples, t, mask)
    return grown is not None and grown[2] >= t.length_growth * grown[1] and grown[3] >= t.trend


def length_explosion(samples: Samples, t: Thresholds) -> Judgement:
    """Responses have grown several times over, and the reward has not."""
    grown = growth(samples, t, samples.there)
    if grown is None:
        return unknown(f"fewer than {t.trend_steps} steps have enough samples")
    series, early, now, rising = grown
    times = now / early
    if not exploded(samples, t, samples.there):
        return fine(f"the mean length is {amount(now)} tokens, {times:.2f} times the early {amount(early)}")
    rewards = samples.series(samples.reward)
    w = samples.window(len(series), t)
    said = "no rewards are recorded"
    if len(rewards) >= t.trend_steps and not samples.constant:
        wide = float(np.subtract(*np.nanquantile(samples.reward, (0.99, 0.01)))) or samples.high - samples.low
        gain = float(np.median(rewards.values[-w:]) - np.median(rewards.values[:w])) / wide
        if gain >= t.length_gain and trend(rewards.values) >= t.trend:
            return fine(f"the mean length is {times:.2f} times the early one, and the reward rose with it")
        said = f"the reward moved by {gain:+.1%} of its range"
    recent = samples.recent(t)
    cut = float(samples.truncated[recent].mean()) if recent.any() else 0.0
    first = _since(series, series.values < t.length_growth * early)
    bar = t.length_growth * early
    ill = samples.there & (samples.step >= first) & (samples.tokens >= bar)
    return found(
        Finding(
            "length-explosion",
            "high" if times >= t.length_growth**2 or cut >= 0.3 else "medium",
            f"Responses are {times:.1f} times as long as they were, without more reward",
            f"The median of step means is {amount(now)} tokens over the last {w} steps and {amount(early)} early "
            f"(trend: z = {rising:.1f}); {said}; {percent(cut)} of recent samples are truncated. Ill from "
            f"{t.length_growth:g} times, unless the reward rises by {percent(t.length_gain)} of its range.",
            "Check that the loss does not favour long answers (a mean per sequence pushes long wrong ones less: sum "
            "over tokens and divide by a constant), punish overlong answers softly, and mask or zero those that are "
            "truncated.",
            (first, int(samples.steps[-1])),
            samples.evidence(ill, samples.tokens, apart=True),
            int(ill.sum()),
            samples.where(f"response_tokens >= {exact(bar)}", first),
            float((ill & recent).sum()) / max(int(recent.sum()), 1),
        )
    )


def kl_blowup(samples: Samples, t: Thresholds) -> Judgement:
    """The policy runs away from the reference."""
    values = samples.kl
    use = samples.recent(t) & np.isfinite(values)
    n = int(use.sum())
    if not np.isfinite(values).any():
        return unknown("no log-probs of a reference policy are recorded")
    if n < t.samples:
        return unknown(f"only {n} recent samples have a KL, {t.samples} are needed")
    series = samples.series(values, median=True)
    if not len(series):
        return unknown("no step has enough samples with a KL")
    w = samples.window(len(series), t)
    now = float(np.median(series.values[-w:]))
    before = float(np.median(series.values[:-w])) if len(series) > w else now
    rising = trend(series.values)
    high = now > t.kl
    grew = len(series) >= t.trend_steps and now >= max(t.kl_least, t.kl_growth * max(before, 0.0)) and rising >= t.trend
    if not high and not grew:
        return fine(f"the KL is {amount(now)} nats per token, before it was {amount(before)}")
    bar = min(t.kl if high else np.inf, max(t.kl_least, t.kl_growth / 2 * before) if grew else np.inf)
    first = _since(series, series.values <= bar)
    ill = samples.there & (samples.step >= first) & (values > bar)
    return found(
        Finding(
            "kl-blowup",
            "high" if high else "medium",
            f"KL to the reference is {amount(now)} nats per token",
            f"The median over samples and the last {w} steps is {amount(now)}, and {amount(before)} over the steps "
            f"before (trend: z = {rising:.1f}). Ill above {t.kl:g}, or above {t.kl_least:g} after growing "
            f"{t.kl_growth:g} times.",
            "Lower the learning rate or clip gradients, raise the KL coefficient (or make it adaptive), or move the "
            f"reference up to a recent checkpoint if the drift is wanted; read samples from step {first} on for what "
            "the policy has become.",
            (first, int(samples.steps[-1])),
            samples.evidence(ill, values, apart=True),
            int(ill.sum()),
            samples.where(f"kl > {exact(bar)}", first),
            float((ill & use).sum()) / n,
        )
    )


def mismatch(samples: Samples, t: Thresholds) -> Judgement:
    """Engine and trainer give the same tokens other probabilities: every update is off-policy without saying so."""
    known = samples.there & np.isfinite(samples.mismatch)
    if not known.any():
        return unknown("no record has log-probs of both engine and trainer")
    fresh = known & ~(samples.lag > t.mismatch_lag)
    use = fresh if int(fresh.sum()) >= t.samples else known
    n = int(use.sum())
    if n < t.samples:
        return unknown(f"only {n} samples have log-probs of both, {t.samples} are needed")
    over = use & (samples.mismatch > t.mismatch)
    whole = at_least(int(over.sum()), n, t.certainty)
    # A step whose weights were not synchronised is ill alone.
    steps, place, counts = np.unique(samples.step[use], return_inverse=True, return_counts=True)
    hits = np.bincount(place, over[use])
    sick = [
        int(step)
        for step, hit, count in zip(steps, hits, counts, strict=True)
        if count >= min(t.samples, 16) and at_least(hit, count, t.certainty) > max(t.mismatch_share, 0.5)
    ]
    level = float(np.median(samples.mismatch[use]))
    if whole <= t.mismatch_share and not sick:
        return fine(
            f"the median difference is {amount(level)} nats per token; {percent(over.sum() / n)} of {n} samples are "
            f"above {t.mismatch:g}"
        )
    ill = over if whole > t.mismatch_share else over & np.isin(samples.step, sick)
    first, last = samples.span(ill)
    worst = float(np.median(samples.mismatch[ill]))
    old = "" if use is fresh else f" All samples are more than {t.mismatch_lag} versions old, which is part of it."
    return found(
        Finding(
            "logprob-mismatch",
            "high" if worst >= 4 * t.mismatch else "medium",
            f"Log-probs of engine and trainer differ by {amount(worst)} nats per token",
            f"{int(ill.sum())} of {n} samples differ by more than {t.mismatch:g} nats per token on average, and by "
            f"{amount(worst)} in the median; over all samples the median is {amount(level)}. Ill with more than "
            f"{percent(t.mismatch_share)} of samples, or with most of a step.{old}",
            "Compare one sample token by token: a constant factor is temperature, a jump at certain tokens the chat "
            "template or tool results, one step alone weights that did not arrive, an even spread precision "
            "(fp8, MoE routing). Until then train on recomputed log-probs and correct the ratio "
            "(truncated importance sampling).",
            (first, last),
            samples.evidence(ill, samples.mismatch, apart=True),
            int(ill.sum()),
            samples.where(
                f"mismatch > {exact(t.mismatch)}"
                + (f" and not lag > {t.mismatch_lag}" if use is fresh and (fresh != known).any() else ""),
                first,
                last,
            ),
            float(ill.sum()) / n,
        )
    )


def nans(samples: Samples, t: Thresholds) -> Judgement:
    """Numbers that are no numbers: one of them in a batch makes the whole gradient NaN."""
    every = samples.there | samples.chosen
    n = int(every.sum())
    if not n:
        return unknown("there are no records")
    # The reward counts among them in some sources.
    bad = every & (np.nan_to_num(samples.nans) > samples.unscorable)
    unscorable = every & samples.unscorable
    many = float(bad.sum()) / n > t.nan_records
    some = n >= t.samples and at_least(int(unscorable.sum()), n, t.certainty) > t.nan_rewards
    if not many and not some:
        return fine(f"{int(bad.sum())} records have NaNs, {int(unscorable.sum())} of {n} a reward that is NaN")
    ill = bad | unscorable
    went_in = int((ill & ~samples.dropped).sum())
    what = []
    if many:
        what.append(f"{int(bad.sum())} of {n} records have a NaN or an infinity among their per-token numbers")
    if some:
        what.append(f"{int(unscorable.sum())} of {n} records have a reward that is NaN")
    first, last = samples.span(ill)
    return found(
        Finding(
            "nans",
            "low" if not went_in else "high" if many else "medium",
            f"{int(ill.sum())} records have NaNs" if many else f"{percent(unscorable.sum() / n)} of rewards are NaN",
            "; ".join(what) + f". {went_in} of them were not dropped. Ill with more than {percent(t.nan_records)} and "
            f"{percent(t.nan_rewards)} of records.",
            "Drop such records before training and find where they come from: a log-prob of -inf (a token that top-p "
            "or a grammar had excluded), a mask without tokens, a standard deviation of 0, an overflow in half "
            "precision, a grader that failed.",
            (first, last),
            samples.evidence(ill, np.nan_to_num(samples.nans)),
            int(ill.sum()),
            samples.where("nan", first, last),
            float(ill.sum()) / n,
        )
    )
