"""Checks on what samples do: truncation that is rewarded, loops, duplicates.

Invariant: a share is judged over the recent steps and over the whole run, whichever is worse, and never on less than a
threshold's number of samples.
"""

from __future__ import annotations

import numpy as np

from rollbook.doctor.findings import Finding, Judgement, amount, exact, fine, found, percent, unknown
from rollbook.doctor.samples import Samples, distinct
from rollbook.doctor.statistics import Floats, Ints, Mask, at_least
from rollbook.doctor.thresholds import Thresholds

_FEW = 4
"""A quarter of the samples that are needed elsewhere are enough where only truncated ones count."""


def truncation_rewarded(samples: Samples, t: Thresholds) -> Judgement:
    """Answers that were cut off get a good reward: the policy learns never to end."""
    scored = samples.there & np.isfinite(samples.reward)
    if samples.constant or not scored.any():
        return unknown("rewards do not differ" if scored.any() else "no sample is scored")
    low, high = (float(each) for each in np.quantile(samples.reward[scored], (0.01, 0.99)))
    if high <= low:
        low, high = samples.low, samples.high
    bar = low + t.good_reward * (high - low)
    cut = scored & samples.truncated & ~samples.dropped
    good = cut & (samples.reward >= bar)
    n, hits = int(cut.sum()), int(good.sum())
    if n < max(t.samples // _FEW, 1):
        return fine(f"{n} of {int(scored.sum())} scored samples are truncated, {hits} of them rewarded")
    if at_least(hits, n, t.certainty) <= t.truncation_rewarded:
        return fine(f"{percent(hits / n)} of {n} truncated samples have a reward of {amount(bar)} or more")
    first, last = samples.span(good)
    ended = scored & ~samples.truncated
    beside = f"; of those that ended {percent(float((samples.reward[ended] >= bar).mean()))}" if ended.any() else ""
    return found(
        Finding(
            "truncation-rewarded",
            "high" if hits >= n / 2 or hits >= 0.05 * int(scored.sum()) else "medium",
            f"{hits} truncated samples are rewarded",
            f"Of {n} truncated samples {percent(hits / n)} have a reward of {amount(bar)} or more{beside}. Ill above "
            f"{percent(t.truncation_rewarded)}.",
            "An answer without an end should not be paid: give truncated samples the lowest reward or mask them out of "
            "the loss, and have the grader look only behind the end of thinking. If these answers are right, raise "
            "the limit of new tokens.",
            (first, last),
            samples.evidence(good, samples.reward, apart=True),
            hits,
            samples.where(
                f"truncated and reward >= {exact(bar)}" + (" and not dropped" if samples.dropped.any() else ""),
                first,
                last,
            ),
            hits / int(scored.sum()),
        )
    )


def looped(samples: Samples, t: Thresholds) -> Mask:
    """[N] samples that are mostly repetition, or were cut off in a loop."""
    return samples.there & ((samples.repetition >= t.loop_share) | (np.isfinite(samples.loop_at) & samples.truncated))


def loops(samples: Samples, t: Thresholds) -> Judgement:
    """Responses that say the same thing over and over."""
    known = samples.there & np.isfinite(samples.repetition)
    n = int(known.sum())
    if n < t.samples:
        return unknown(f"the tokens of only {n} samples are known, {t.samples} are needed")
    ill = looped(samples, t) & known
    worst, part = _worst(samples, t, ill, known)
    if worst <= t.loops:
        return fine(f"{int(ill.sum())} of {n} samples are loops")
    ill &= part
    share = float(ill.sum()) / int((known & part).sum())
    first, last = samples.span(ill)
    cut = float(samples.truncated[ill].mean())
    return found(
        Finding(
            "repetition-loops",
            "high" if share >= 0.25 else "medium",
            f"{percent(share)} of samples are caught in loops",
            f"{int(ill.sum())} of {int((known & part).sum())} samples repeat themselves over half or more of the "
            f"response, or were cut off in a loop; {percent(cut)} of these are truncated. Ill above "
            f"{percent(t.loops)}.",
            "Give loops the lowest reward and no length bonus, check the end-of-text token and the stop strings, and "
            "that sampling is not greedy; mask loops out of the loss if they come from the base model.",
            (first, last),
            samples.evidence(ill, samples.repetition, apart=True),
            int(ill.sum()),
            samples.where(f"(repetition >= {exact(t.loop_share)} or (truncated and loop_at >= 0))", first, last),
            share,
        )
    )


def twins(samples: Samples, t: Thresholds) -> tuple[Mask, Mask, Ints]:
    """[N] samples that count, [N] those of them whose response another run of their step has too, and [N] how many
    samples share each response."""
    counts = samples.there & (samples.digest >= 0) & (samples.tokens >= t.duplicate_tokens) & ~samples.made
    places = np.flatnonzero(counts)
    steps, digests = samples.step[places], samples.digest[places]
    _, when = np.unique(steps, return_inverse=True)
    _, place = np.unique(when * (int(digests.max(initial=0)) + 1) + digests, return_inverse=True)
    # The parts of one run may say the same; other runs should not.
    group, run = samples.group[places], samples.run[places]
    _, who = np.unique(group * (int(run.max(initial=0)) + 1) + run, return_inverse=True)
    runs = distinct(place, who, int(place.max(initial=-1)) + 1)
    shared = np.zeros(len(samples), np.int64)
    shared[places] = runs[place]
    return counts, shared > 1, shared


def duplicates(samples: Samples, t: Thresholds) -> Judgement:
    """The same response again and again: the batch is smaller than it looks."""
    counts, twin, shared = twins(samples, t)
    n = int(counts.sum())
    if n < t.samples:
        return unknown(f"only {n} responses have {t.duplicate_tokens} tokens or more, {t.samples} are needed")
    # One of each set is no duplicate.
    extra = np.zeros(len(samples))
    extra[twin] = 1 - 1 / shared[twin]
    worst, part = _worst(samples, t, extra, counts)
    if worst <= t.duplicates:
        return fine(f"{percent(float(extra.sum()) / n)} of {n} responses are duplicates; ill above {t.duplicates:.0%}")
    ill = twin & part
    total = int((counts & part).sum())
    share = float(extra[ill].sum()) / total
    first, last = samples.span(ill)
    pairs = np.unique(np.stack([samples.step[ill], samples.digest[ill], samples.group[ill]], 1), axis=0)
    sets = np.unique(pairs[:, :2], axis=0)
    across = len(pairs) > 1.5 * len(sets)
    return found(
        Finding(
            "duplicates",
            "high" if share >= 0.4 else "medium",
            f"{percent(share)} of responses are copies of another",
            f"{int(ill.sum())} of {total} responses of {t.duplicate_tokens} tokens or more are shared by several runs "
            f"of one step, {len(sets)} different ones in all"
            + (", many of them over several prompts" if across else "")
            + f". Ill above {percent(t.duplicates)} that could be left out.",
            "If the policy has collapsed, raise the temperature or go back. If not, something writes records twice, or "
            "the engine gets the same seed for each sample of a group: give each its own.",
            (first, last),
            samples.evidence(ill, shared.astype(np.float64)),
            int(ill.sum()),
            "" if across else samples.where(f"duplicate and response_tokens >= {t.duplicate_tokens}", first, last),
            share,
        )
    )


def _worst(samples: Samples, t: Thresholds, hits: Mask | Floats, known: Mask) -> tuple[float, Mask]:
    """The share of hits that is sure, of the recent steps or of the whole run, whichever is higher; and [N] which."""
    best, best_part = 0.0, samples.there
    for part in (samples.there, samples.recent(t)):
        n = int((known & part).sum())
        if n >= t.samples and (sure := at_least(float(hits[part].sum()), n, t.certainty)) > best:
            best, best_part = sure, part
    return best, best_part
