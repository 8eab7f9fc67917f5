"""Checks on what samples do: truncation that is rewarded, loops, duplicates.

Invariant: a share is judged over the recent steps and over the whole run, whichever is worse, and never on less than a
threshold's number of samples.
"""

from __future__ import annotations

import numpy as np

from rollbook.inspect.doctor.findings import Finding, Judgement, amount, exact, fine, found, percent, unknown
from rollbook.inspect.doctor.samples import Samples, distinct
from rollbook.inspect.doctor.statistics import Floats, Ints, Mask, at_least
from rollbook.inspect.doctor.thresholds import Thresholds

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
    """Find responses that several runs of one group share, token for token.

    Returns:
        [N] samples that are long enough to count, [N] those whose response another run of the group has too, and [N]
        how many runs share each response.
    """
    counts = samples.there & (samples.digest >= 0) & (samples.tokens >= t.duplicate_tokens) & ~samples.made
    places = np.flatnonzero(counts)
    groups, digests = samples.group[places], samples.digest[places]
    _, place = np.unique(groups * (int(digests.max(initial=0)) + 1) + digests, return_inverse=True)
    # The parts of one run may say the same; other runs should not.
    runs = distinct(place, samples.run[places], int(place.max(initial=-1)) + 1)
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
    worst, part = _worst(samples, t, extra, samples.there)
    share = float(extra[part].sum()) / int(part.sum())
    if worst <= t.duplicates:
        return fine(f"{percent(share)} of {int(part.sum())} responses are duplicates; ill above {t.duplicates:.0%}")
    ill = twin & part
    first, last = samples.span(ill)
    sets = np.unique(np.stack([samples.group[ill], samples.digest[ill]], 1), axis=0)
    bar = samples.low + t.good_reward * (samples.high - samples.low)
    right = ill & (samples.reward >= bar) & (not samples.constant)
    solved = float(extra[right].sum()) >= 0.5 * float(extra[ill].sum())
    return found(
        Finding(
            "duplicates",
            "low" if solved else "high" if share >= 0.4 else "medium",
            f"{percent(share)} of responses are copies of another" + (", most of them right" if solved else ""),
            f"{int(ill.sum())} of {int(part.sum())} responses are shared, token for token, by several samples of their "
            f"group ({t.duplicate_tokens} tokens or more), {len(sets)} different ones in all; "
            f"{percent(float(right.sum()) / int(ill.sum()))} of them have a good reward. Ill above "
            f"{percent(t.duplicates)} that could be left out.",
            "These prompts have one right answer, and the policy knows it: sample fewer responses to them, or harder "
            "prompts."
            if solved
            else "If the policy has collapsed, raise the temperature or go back. If not, something writes records "
            "twice, or the engine gets the same seed for each sample of a group: give each its own.",
            (first, last),
            samples.evidence(ill, shared.astype(np.float64)),
            int(ill.sum()),
            samples.where("duplicate", first, last),
            share,
        )
    )


def truncation(samples: Samples, t: Thresholds) -> Judgement:
    """Most responses are cut off at a limit: the model never gets to its answer."""
    recent = samples.recent(t)
    n, cut = int(recent.sum()), recent & samples.truncated
    if n < t.samples:
        return unknown(f"only {n} recent samples, {t.samples} are needed")
    share = int(cut.sum()) / n
    if at_least(int(cut.sum()), n, t.certainty) <= t.truncation:
        return fine(f"{percent(share)} of {n} recent samples are truncated; ill above {percent(t.truncation)}")
    first, last = samples.span(cut)
    return found(
        Finding(
            "truncation",
            "high" if share >= (1 + t.truncation) / 2 else "medium",
            f"{percent(share)} of recent samples are cut off at a limit",
            f"{int(cut.sum())} of {n} samples in steps {first} to {last} ended at a limit of tokens or turns instead "
            f"of by themselves. Ill above {percent(t.truncation)}.",
            "Raise the limit (sampling.max_tokens, environment.max_turns or context_limit), check the end-of-text "
            "token and the stop strings, or penalize length: answers that are cut off are rewarded for beginnings.",
            (first, last),
            samples.evidence(cut, samples.tokens, apart=True),
            int(cut.sum()),
            samples.where("truncated", first),
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
