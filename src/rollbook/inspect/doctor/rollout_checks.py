"""Checks on the policy (entropy, length, KL, train-inference mismatch), on samples and on data flow.

Invariant: a trend must be both large and significant in a rank test. A share is taken over the recent steps or over the
run, whichever is worse, and never over fewer samples than a threshold requires. Checks on data flow read the ledger and
are skipped for sources without one.
"""

from __future__ import annotations

import math

import numpy as np

from rollbook.inspect.doctor.findings import (
    CheckResult,
    Finding,
    Samples,
    Thresholds,
    amount,
    count_distinct,
    exact,
    passed,
    percent,
    skipped,
    triggered,
)
from rollbook.inspect.statistics import Floats, Ints, Mask, Series, at_least, by_step, trend

_SOLVED_ADVICE = "The policy is confident and mostly correct. Stop, or continue with harder prompts."
_EXPLORATION_ADVICE = (
    "Raise the upper clip bound (clip-higher), add an entropy bonus or a KL penalty on high-covariance tokens, sample "
    "at temperature 1, or lower the learning rate. Return to a checkpoint before step"
)


def check_entropy_collapse(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for a policy that is nearly deterministic."""
    measured = bool(np.isfinite(samples.entropy).any())
    # The mean of -log p over sampled tokens estimates the entropy well enough for a trend, but not for a level.
    values = samples.entropy if measured else -samples.logprob
    name = "entropy" if measured else "-log-prob (no entropy recorded)"
    use = samples.recent(t) & np.isfinite(values)
    n = int(use.sum())
    if not np.isfinite(values).any():
        return skipped("no entropies or log-probs recorded")
    if n < t.samples:
        return skipped(f"only {n} recent samples have entropies or log-probs, {t.samples} required")
    series = samples.series(values)
    if not len(series):
        return skipped("no step has enough samples with entropies or log-probs")
    w = samples.window(len(series), t)
    now, early = float(np.median(series.values[-w:])), float(np.median(series.values[:w]))
    low = measured and now < t.entropy_floor
    falling = trend(series.values)
    dropped = len(series) >= t.trend_steps and now <= t.entropy_fall * early and falling <= -t.trend
    if not low and not dropped:
        if not measured and len(series) < t.trend_steps:
            return skipped(f"no entropies recorded, and {len(series)} steps are too few for a trend of log-probs")
        return passed(f"the mean {name} is {amount(now)} nats per token, early {amount(early)}")
    bar = max(t.entropy_floor if low else 0.0, t.entropy_fall * early if dropped else 0.0)
    first = _first_step_after(series, series.values >= bar)
    affected = samples.present & (values <= bar) & (samples.step >= first)
    solved = _is_solved(samples, t)
    return triggered(
        Finding(
            "entropy-collapse",
            "low" if solved else "high" if low else "medium",
            f"Entropy {'dropped' if solved else 'collapsed'} to {amount(now)} nats per token"
            + (" as the prompts were solved" if solved else ""),
            f"The median of step means of the {name} is {amount(now)} over the last {w} steps and {amount(early)} "
            f"early (trend z = {falling:.1f}). Triggered below {t.entropy_floor:g}, or below "
            f"{percent(t.entropy_fall)} of the early value.",
            _SOLVED_ADVICE if solved else f"{_EXPLORATION_ADVICE} {first}.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, -values, one_per_group=True),
            int(affected.sum()),
            samples.build_filter(f"entropy <= {exact(bar)}" if measured else f"logprob >= {exact(-bar)}", first),
            float((affected & use).sum()) / n,
        )
    )


def _is_solved(samples: Samples, t: Thresholds) -> bool:
    """Return whether recent rewards are good and have risen, in which case low entropy is no problem."""
    series = samples.series(samples.reward)
    if len(series) < t.trend_steps or samples.constant:
        return False
    now = float(np.median(series.values[-samples.window(len(series), t) :]))
    good = samples.low + t.good_reward * (samples.high - samples.low)
    return now >= good and trend(series.values) >= t.trend


def _first_step_after(series: Series, healthy: Mask) -> int:
    """Return the first step after the last healthy one; at most the last step."""
    last = np.flatnonzero(healthy)
    at = int(last.max()) + 1 if len(last) else 0
    return int(series.steps[min(at, len(series) - 1)])


def measure_growth(samples: Samples, t: Thresholds, mask: Mask) -> tuple[Series, float, float, float] | None:
    """Return length by step, its early and recent level, and its trend; `None` with too few steps."""
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


def has_exploded(samples: Samples, t: Thresholds, mask: Mask) -> bool:
    """Return whether the lengths of the masked samples have grown beyond the threshold."""
    growth = measure_growth(samples, t, mask)
    if growth is None:
        return False
    _, early, now, rising = growth
    return now >= t.length_growth * early and rising >= t.trend


def check_length_explosion(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for responses that grow without a gain in reward."""
    growth = measure_growth(samples, t, samples.present)
    if growth is None:
        return skipped(f"fewer than {t.trend_steps} steps have enough samples")
    series, early, now, rising = growth
    times = now / early
    if not has_exploded(samples, t, samples.present):
        return passed(f"the mean length is {amount(now)} tokens, {times:.2f} times the early {amount(early)}")
    rewards = samples.series(samples.reward)
    w = samples.window(len(series), t)
    reward_note = "no rewards recorded"
    if len(rewards) >= t.trend_steps and not samples.constant:
        reward_range = float(np.subtract(*np.nanquantile(samples.reward, (0.99, 0.01)))) or samples.high - samples.low
        gain = float(np.median(rewards.values[-w:]) - np.median(rewards.values[:w])) / reward_range
        if gain >= t.length_gain and trend(rewards.values) >= t.trend:
            return passed(f"the mean length is {times:.2f} times the early one, and the reward rose with it")
        reward_note = f"the reward changed by {gain:+.1%} of its range"
    recent = samples.recent(t)
    truncated = float(samples.truncated[recent].mean()) if recent.any() else 0.0
    first = _first_step_after(series, series.values < t.length_growth * early)
    bar = t.length_growth * early
    affected = samples.present & (samples.step >= first) & (samples.tokens >= bar)
    return triggered(
        Finding(
            "length-explosion",
            "high" if times >= t.length_growth**2 or truncated >= 0.3 else "medium",
            f"Responses are {times:.1f} times as long as before, without a gain in reward",
            f"The median of step means is {amount(now)} tokens over the last {w} steps and {amount(early)} early "
            f"(trend z = {rising:.1f}); {reward_note}; {percent(truncated)} of recent samples are truncated. Triggered "
            f"at {t.length_growth:g} times, unless the reward rises by {percent(t.length_gain)} of its range.",
            "Check the loss for a length bias: a per-sequence mean penalizes long wrong responses less, so sum over "
            "tokens and divide by a constant. Add a soft overlong penalty, and mask or zero truncated responses.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, samples.tokens, one_per_group=True),
            int(affected.sum()),
            samples.build_filter(f"response_tokens >= {exact(bar)}", first),
            float((affected & recent).sum()) / max(int(recent.sum()), 1),
        )
    )


def check_kl_blowup(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for divergence from the reference policy."""
    values = samples.kl
    use = samples.recent(t) & np.isfinite(values)
    n = int(use.sum())
    if not np.isfinite(values).any():
        return skipped("no reference log-probs recorded")
    if n < t.samples:
        return skipped(f"only {n} recent samples have a KL, {t.samples} required")
    series = samples.series(values, median=True)
    if not len(series):
        return skipped("no step has enough samples with a KL")
    w = samples.window(len(series), t)
    now = float(np.median(series.values[-w:]))
    earlier = float(np.median(series.values[:-w])) if len(series) > w else now
    rising = trend(series.values)
    high = now > t.kl
    grew = (
        len(series) >= t.trend_steps and now >= max(t.kl_least, t.kl_growth * max(earlier, 0.0)) and rising >= t.trend
    )
    if not high and not grew:
        return passed(f"the KL is {amount(now)} nats per token, previously {amount(earlier)}")
    bar = min(t.kl if high else np.inf, max(t.kl_least, t.kl_growth / 2 * earlier) if grew else np.inf)
    first = _first_step_after(series, series.values <= bar)
    affected = samples.present & (samples.step >= first) & (values > bar)
    return triggered(
        Finding(
            "kl-blowup",
            "high" if high else "medium",
            f"KL to the reference is {amount(now)} nats per token",
            f"The median over samples and the last {w} steps is {amount(now)}, and {amount(earlier)} over the earlier "
            f"steps (trend z = {rising:.1f}). Triggered above {t.kl:g}, or above {t.kl_least:g} after growing "
            f"{t.kl_growth:g} times.",
            "Lower the learning rate or max_grad_norm, or raise the KL coefficient (or make it adaptive). If the drift "
            f"is intended, update the reference to a recent checkpoint. Read samples from step {first} on.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, values, one_per_group=True),
            int(affected.sum()),
            samples.build_filter(f"kl > {exact(bar)}", first),
            float((affected & use).sum()) / n,
        )
    )


def check_mismatch(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for train-inference mismatch: different log-probs of the same tokens in engine and trainer."""
    measured = samples.present & np.isfinite(samples.mismatch)
    if not measured.any():
        return skipped("no record has log-probs from both engine and trainer")
    recent = measured & ~(samples.staleness > t.mismatch_lag)
    use = recent if int(recent.sum()) >= t.samples else measured
    n = int(use.sum())
    if n < t.samples:
        return skipped(f"only {n} samples have log-probs from both, {t.samples} required")
    above = use & (samples.mismatch > t.mismatch)
    overall = at_least(int(above.sum()), n, t.certainty)
    # A failed weight sync affects a single step.
    steps, inverse, counts = np.unique(samples.step[use], return_inverse=True, return_counts=True)
    hits = np.bincount(inverse, above[use])
    bad_steps = [
        int(step)
        for step, hits_in_step, count in zip(steps, hits, counts, strict=True)
        if count >= min(t.samples, 16) and at_least(hits_in_step, count, t.certainty) > max(t.mismatch_share, 0.5)
    ]
    level = float(np.median(samples.mismatch[use]))
    if overall <= t.mismatch_share and not bad_steps:
        return passed(
            f"the median mismatch is {amount(level)} nats per token; {percent(above.sum() / n)} of {n} samples are "
            f"above {t.mismatch:g}"
        )
    affected = above if overall > t.mismatch_share else above & np.isin(samples.step, bad_steps)
    first, last = samples.step_range(affected)
    worst = float(np.median(samples.mismatch[affected]))
    old = "" if use is recent else f" Most samples are more than {t.mismatch_lag} versions old, which adds to it."
    return triggered(
        Finding(
            "train-inference-mismatch",
            "high" if worst >= 4 * t.mismatch else "medium",
            f"Train-inference mismatch of {amount(worst)} nats per token",
            f"{int(affected.sum())} of {n} samples have a mean |old_logprobs - logprobs| above {t.mismatch:g} nats per "
            f"token, with a median of {amount(worst)}; the median over all samples is {amount(level)}. Triggered with "
            f"more than {percent(t.mismatch_share)} of samples, or with most of a step.{old}",
            "Compare one sample token by token. A constant factor indicates temperature; jumps at certain tokens the "
            "chat template or tool results; a single step a failed weight sync; an even spread precision (fp8, MoE "
            "routing). Until it is fixed, train on recomputed log-probs with truncated importance sampling.",
            (first, last),
            samples.evidence(affected, samples.mismatch, one_per_group=True),
            int(affected.sum()),
            samples.build_filter(
                f"mismatch > {exact(t.mismatch)}"
                + (f" and not staleness > {t.mismatch_lag}" if use is recent and (recent != measured).any() else ""),
                first,
                last,
            ),
            float(affected.sum()) / n,
        )
    )


def check_nans(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for NaN/Inf in rewards and per-token values."""
    records = samples.present | samples.selected
    n = int(records.sum())
    if not n:
        return skipped("there are no records")
    # Some sources count the reward among the values.
    bad = records & (np.nan_to_num(samples.nans) > samples.unscorable)
    unscorable = records & samples.unscorable
    above_limit = float(bad.sum()) / n > t.nan_records
    rewards_above_limit = n >= t.samples and at_least(int(unscorable.sum()), n, t.certainty) > t.nan_rewards
    if not above_limit and not rewards_above_limit:
        return passed(f"{int(bad.sum())} records have NaN/Inf values, {int(unscorable.sum())} of {n} a NaN reward")
    affected = bad | unscorable
    not_dropped = int((affected & ~samples.dropped).sum())
    reasons = []
    if above_limit:
        reasons.append(f"{int(bad.sum())} of {n} records have NaN/Inf per-token values")
    if rewards_above_limit:
        reasons.append(f"{int(unscorable.sum())} of {n} records have a NaN reward")
    first, last = samples.step_range(affected)
    return triggered(
        Finding(
            "nans",
            "low" if not not_dropped else "high" if above_limit else "medium",
            f"{int(affected.sum())} records have NaN/Inf values"
            if above_limit
            else f"{percent(unscorable.sum() / n)} of rewards are NaN",
            "; ".join(reasons) + f". {not_dropped} of them were not dropped. Triggered with more than "
            f"{percent(t.nan_records)} and {percent(t.nan_rewards)} of records.",
            "Drop these records before training and find the source: a log-prob of -inf (a token excluded by top-p or "
            "a grammar), an empty mask, a standard deviation of 0, an overflow in half precision, a failed grader.",
            (first, last),
            samples.evidence(affected, np.nan_to_num(samples.nans)),
            int(affected.sum()),
            samples.build_filter("nan", first, last),
            float(affected.sum()) / n,
        )
    )


# --- samples --------------------------------------------------------------------------------------------------------

_TRUNCATED_DIVISOR = 4
"""Divisor of `Thresholds.samples` for checks on truncated samples only."""


def check_truncation_rewarded(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for truncated samples with a good reward."""
    scored = samples.present & np.isfinite(samples.reward)
    if samples.constant or not scored.any():
        return skipped("all rewards are equal" if scored.any() else "no sample is scored")
    low, high = (float(quantile) for quantile in np.quantile(samples.reward[scored], (0.01, 0.99)))
    if high <= low:
        low, high = samples.low, samples.high
    bar = low + t.good_reward * (high - low)
    truncated = scored & samples.truncated & ~samples.dropped
    good = truncated & (samples.reward >= bar)
    n, hits = int(truncated.sum()), int(good.sum())
    if n < max(t.samples // _TRUNCATED_DIVISOR, 1):
        return passed(f"{n} of {int(scored.sum())} scored samples are truncated, of which {hits} are rewarded")
    if at_least(hits, n, t.certainty) <= t.truncation_rewarded:
        return passed(f"{percent(hits / n)} of {n} truncated samples have a reward of {amount(bar)} or more")
    first, last = samples.step_range(good)
    ended = scored & ~samples.truncated
    finished = f", of finished samples {percent(float((samples.reward[ended] >= bar).mean()))}" if ended.any() else ""
    return triggered(
        Finding(
            "truncation-rewarded",
            "high" if hits >= n / 2 or hits >= 0.05 * int(scored.sum()) else "medium",
            f"{hits} truncated samples are rewarded",
            f"Of {n} truncated samples {percent(hits / n)} have a reward of {amount(bar)} or more{finished}. "
            f"Triggered above {percent(t.truncation_rewarded)}.",
            "Give truncated samples the lowest reward or mask them out of the loss, and let the grader read only the "
            "text after the thinking block. If these answers are correct, raise max_tokens.",
            (first, last),
            samples.evidence(good, samples.reward, one_per_group=True),
            hits,
            samples.build_filter(
                f"truncated and reward >= {exact(bar)}" + (" and not dropped" if samples.dropped.any() else ""),
                first,
                last,
            ),
            hits / int(scored.sum()),
        )
    )


def find_loops(samples: Samples, t: Thresholds) -> Mask:
    """Return [N] samples that are mostly repetition, or were truncated inside a loop."""
    return samples.present & ((samples.repetition >= t.loop_share) | (np.isfinite(samples.loop_at) & samples.truncated))


def check_loops(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for repetition loops."""
    measured = samples.present & np.isfinite(samples.repetition)
    n = int(measured.sum())
    if n < t.samples:
        return skipped(f"only {n} samples have tokens, {t.samples} required")
    affected = find_loops(samples, t) & measured
    worst, subset = _worst_share(samples, t, affected, measured)
    if worst <= t.loops:
        return passed(f"{int(affected.sum())} of {n} samples are loops")
    affected &= subset
    share = float(affected.sum()) / int((measured & subset).sum())
    first, last = samples.step_range(affected)
    truncated = float(samples.truncated[affected].mean())
    return triggered(
        Finding(
            "repetition-loops",
            "high" if share >= 0.25 else "medium",
            f"{percent(share)} of samples are repetition loops",
            f"{int(affected.sum())} of {int((measured & subset).sum())} samples are at least {percent(t.loop_share)} "
            f"repetition or were truncated inside a loop; {percent(truncated)} of these are truncated. Triggered above "
            f"{percent(t.loops)}.",
            "Give loops the lowest reward and no length bonus. Check the end-of-text token, the stop strings, and that "
            "sampling is not greedy. Mask loops out of the loss if they come from the base model.",
            (first, last),
            samples.evidence(affected, samples.repetition, one_per_group=True),
            int(affected.sum()),
            samples.build_filter(f"(repetition >= {exact(t.loop_share)} or (truncated and loop_at >= 0))", first, last),
            share,
        )
    )


def find_copies(samples: Samples, t: Thresholds) -> tuple[Mask, Mask, Ints]:
    """Find identical responses within groups.

    Returns:
        [N] samples long enough to count, [N] samples whose response another run of the group has too, and [N] the
        number of runs that share each response.
    """
    counts = samples.present & (samples.digest >= 0) & (samples.tokens >= t.duplicate_tokens) & ~samples.derived
    places = np.flatnonzero(counts)
    groups, digests = samples.group[places], samples.digest[places]
    _, inverse = np.unique(groups * (int(digests.max(initial=0)) + 1) + digests, return_inverse=True)
    # Parts of one run may be equal; different runs should not be.
    runs = count_distinct(inverse, samples.run[places], int(inverse.max(initial=-1)) + 1)
    shared = np.zeros(len(samples), np.int64)
    shared[places] = runs[inverse]
    return counts, shared > 1, shared


def check_duplicates(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for identical responses within groups."""
    counts, duplicated, shared = find_copies(samples, t)
    n = int(counts.sum())
    if n < t.samples:
        return skipped(f"only {n} responses have at least {t.duplicate_tokens} tokens, {t.samples} required")
    # One of each set is not a duplicate.
    redundancy = np.zeros(len(samples))
    redundancy[duplicated] = 1 - 1 / shared[duplicated]
    worst, subset = _worst_share(samples, t, redundancy, samples.present)
    share = float(redundancy[subset].sum()) / int(subset.sum())
    if worst <= t.duplicates:
        return passed(
            f"{percent(share)} of {int(subset.sum())} responses are duplicates; triggered above {t.duplicates:.0%}"
        )
    affected = duplicated & subset
    first, last = samples.step_range(affected)
    sets = np.unique(np.stack([samples.group[affected], samples.digest[affected]], 1), axis=0)
    bar = samples.low + t.good_reward * (samples.high - samples.low)
    rewarded = affected & (samples.reward >= bar) & (not samples.constant)
    solved = float(redundancy[rewarded].sum()) >= 0.5 * float(redundancy[affected].sum())
    return triggered(
        Finding(
            "duplicates",
            "low" if solved else "high" if share >= 0.4 else "medium",
            f"{percent(share)} of responses are duplicates" + (", most of them correct" if solved else ""),
            f"{int(affected.sum())} of {int(subset.sum())} responses are identical to another of their group (at least "
            f"{t.duplicate_tokens} tokens), {len(sets)} distinct ones; "
            f"{percent(float(rewarded.sum()) / int(affected.sum()))} of them have a good reward. Triggered above "
            f"{percent(t.duplicates)} redundant responses.",
            "The policy has solved these prompts, which have one correct answer: sample fewer responses, or use harder "
            "prompts."
            if solved
            else "If the policy has collapsed, raise the temperature or return to an earlier checkpoint. Otherwise, "
            "records are written twice, or the engine uses one seed for all samples of a group.",
            (first, last),
            samples.evidence(affected, shared.astype(np.float64)),
            int(affected.sum()),
            samples.build_filter("duplicate", first, last),
            share,
        )
    )


def check_truncation(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for responses truncated at a limit."""
    recent = samples.recent(t)
    n, truncated = int(recent.sum()), recent & samples.truncated
    if n < t.samples:
        return skipped(f"only {n} recent samples, {t.samples} required")
    share = int(truncated.sum()) / n
    if at_least(int(truncated.sum()), n, t.certainty) <= t.truncation:
        return passed(f"{percent(share)} of {n} recent samples are truncated; triggered above {percent(t.truncation)}")
    first, last = samples.step_range(truncated)
    return triggered(
        Finding(
            "truncation",
            "high" if share >= (1 + t.truncation) / 2 else "medium",
            f"{percent(share)} of recent samples are truncated",
            f"{int(truncated.sum())} of {n} samples in steps {first} to {last} ended at a token or turn limit. "
            f"Triggered above {percent(t.truncation)}.",
            "Raise the limit (sampling.max_tokens, environment.max_turns or context_limit), check the end-of-text "
            "token and the stop strings, or penalize length.",
            (first, last),
            samples.evidence(truncated, samples.tokens, one_per_group=True),
            int(truncated.sum()),
            samples.build_filter("truncated", first),
            share,
        )
    )


def _worst_share(samples: Samples, t: Thresholds, hits: Mask | Floats, measured: Mask) -> tuple[float, Mask]:
    """Return the lower bound of the share of hits, over recent steps or the run, whichever is higher, and [N] which."""
    best, best_subset = 0.0, samples.present
    for subset in (samples.present, samples.recent(t)):
        n = int((measured & subset).sum())
        if n >= t.samples and (bound := at_least(float(hits[subset].sum()), n, t.certainty)) > best:
            best, best_subset = bound, subset
    return best, best_subset


# --- data flow ------------------------------------------------------------------------------------------------------


def check_staleness(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for samples from old policy versions."""
    measured = samples.present & np.isfinite(samples.staleness) & ~samples.dropped
    n = int(measured.sum())
    if not n:
        return skipped("no policy versions recorded")
    if n < t.samples:
        return skipped(f"only {n} samples have a policy version, {t.samples} required")
    newest = by_step(samples.step[measured], samples.version[measured], median=True, least=1)
    # Trainers that count every optimizer step advance several versions per step.
    stride = float(np.median(np.diff(newest.values))) if len(newest) >= 3 else 1.0
    limit = t.stale_lag * max(stride, 1.0)
    worst, subset = 0.0, measured
    for candidates in (measured, measured & samples.recent(t)):
        bound = at_least(int((candidates & (samples.staleness > limit)).sum()), int(candidates.sum()), t.certainty)
        if int(candidates.sum()) >= t.samples and bound > worst:
            worst, subset = bound, candidates
    old = subset & (samples.staleness > limit)
    share = float(old.sum()) / int(subset.sum())
    if worst <= t.stale:
        return passed(
            f"{percent(share)} of {n} samples are more than {limit:g} versions old; triggered above {t.stale:.0%}"
        )
    first, last = samples.step_range(old)
    return triggered(
        Finding(
            "stale-data",
            "high" if share >= 0.5 else "medium",
            f"{percent(share)} of samples are more than {limit:g} versions old",
            f"{int(old.sum())} of {int(subset.sum())} samples were more than {limit:g} versions behind when they were "
            f"trained on (or arrived); the median staleness is {np.median(samples.staleness[subset]):g}, the maximum "
            f"{np.max(samples.staleness[subset]):g}. "
            f"Triggered above {percent(t.stale)}.",
            "Set max_staleness when leasing, let generation wait for the trainer, generate fewer steps ahead, or "
            "sync weights more often. Correct the rest with truncated importance sampling or decoupled clipping "
            "against recomputed log-probs.",
            (first, last),
            samples.evidence(old, samples.staleness, one_per_group=True),
            int(old.sum()),
            samples.build_filter(
                f"staleness > {exact(limit)}" + (" and not dropped" if samples.dropped.any() else ""), first, last
            ),
            share,
        )
    )


def check_keep_bias(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for a keep rate that depends on length."""
    trained = samples.state == "trained"
    # Truncated responses are often dropped on purpose.
    use = samples.present & (trained | samples.dropped) & (samples.tokens > 0) & ~samples.truncated
    n, lost = int(use.sum()), int((use & samples.dropped).sum())
    if not trained.any():
        return skipped("no sample was trained on, or the source has no ledger")
    if n < t.samples or lost < t.samples // 4:
        return passed(f"{lost} of {n} samples were dropped")
    places = np.flatnonzero(use)
    rank = _rank_within_steps(samples.step[places], samples.tokens[places])
    was_trained = trained[places]
    short, long = rank < 0.25, rank > 0.75
    few = min(int(short.sum()), int(long.sum()))
    if few < max(t.samples // 4, 1):
        return skipped(f"only {few} samples are in the longest or shortest quarter of their steps")
    low, high = float(was_trained[short].mean()), float(was_trained[long].mean())
    pooled = float(was_trained[short | long].mean())
    error = math.sqrt(pooled * (1 - pooled) * (1 / int(short.sum()) + 1 / int(long.sum())))
    if abs(low - high) < t.keep_bias or abs(low - high) < 2 * t.certainty * error:
        return passed(
            f"{percent(low)} of the shortest quarter of each step were trained on, {percent(high)} of the longest"
        )
    side = long if high < low else short
    affected = np.zeros(len(samples), bool)
    affected[places[side & ~was_trained]] = True
    first, last = samples.step_range(affected)
    return triggered(
        Finding(
            "keep-rate-bias",
            "high" if abs(low - high) >= 0.5 else "medium",
            f"{percent(high)} of long samples are trained on, and {percent(low)} of short ones",
            f"{lost} of {n} samples were dropped. {percent(low)} of the shortest quarter of each step were trained on "
            f"and {percent(high)} of the longest (truncated samples excluded). Triggered at a difference of "
            f"{percent(t.keep_bias)}.",
            "Check the drop reasons (book.counts, book.keep_rates). Long samples finish late, so a staleness limit or "
            "deadline drops them first. Count staleness from the start of a sample, resume generation, or use partial "
            "rollouts instead of dropping.",
            (first, last),
            samples.evidence(affected, samples.tokens if side is long else -samples.tokens),
            int(affected.sum()),
            samples.build_filter("dropped and not truncated", first, last),
            abs(low - high),
        )
    )


def _rank_within_steps(steps: Ints, values: Floats) -> Floats:
    """Return [N] the rank of each value within its step, from 0 to 1; ties get their mean rank."""
    order = np.lexsort((values, steps))
    step, value = steps[order], values[order]
    new = np.ones(len(order), bool)
    new[1:] = (step[1:] != step[:-1]) | (value[1:] != value[:-1])
    first = np.flatnonzero(new)
    run_index = np.cumsum(new) - 1
    counts = np.diff(first, append=len(order))
    _, begin, which, size = np.unique(step, return_index=True, return_inverse=True, return_counts=True)
    middle = first[run_index] + (counts[run_index] - 1) / 2 - begin[which]
    ranks = np.empty(len(values))
    ranks[order] = (middle + 0.5) / size[which]
    return ranks


def check_incomplete_groups(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for groups that never become complete."""
    k = len(samples.gids)
    if not np.isfinite(samples.group_size).any():
        return skipped("no group_size recorded")
    if samples.partial:
        return skipped("only a selection of the records was saved")
    expected = np.zeros(k)
    np.maximum.at(expected, samples.group, np.nan_to_num(samples.group_size))
    runs = count_distinct(samples.group, samples.run, k)
    step = np.full(k, np.iinfo(np.int64).min, np.int64)
    np.maximum.at(step, samples.group, samples.step)
    # Number of steps after a group's own.
    later = len(samples.steps) - np.searchsorted(samples.steps, step, side="right")
    old = (expected > 1) & (later >= t.patience)
    n = int(old.sum())
    if n < t.groups:
        return skipped(f"only {n} groups are followed by {t.patience} steps, {t.groups} required")
    incomplete = old & (runs < expected)
    count = int(incomplete.sum())
    if at_least(count, n, t.certainty) <= t.incomplete:
        return passed(f"{count} of {n} groups are incomplete")
    affected = np.isin(samples.group, np.flatnonzero(incomplete))
    waiting = int((affected & (samples.state == "waiting")).sum())
    first, last = samples.step_range(affected)
    missing = int((expected - runs)[incomplete].sum())
    return triggered(
        Finding(
            "groups-incomplete",
            "high" if count >= n / 4 else "medium",
            f"{count} groups are incomplete",
            f"{count} of {n} groups of past steps are missing {missing} samples; {waiting} of their samples are still "
            f"waiting. Triggered above {percent(t.incomplete)}.",
            "Call book.fail for failed samples so that their groups count as complete, or lease incomplete groups "
            "after a time (partial_after). Then find why samples are lost: tool timeouts, crashed workers, abandoned "
            "requests.",
            (first, last),
            samples.evidence(affected, (expected - runs)[samples.group], one_per_group=True),
            int(affected.sum()),
            samples.build_filter("incomplete", first, last),
            count / n,
        )
    )
