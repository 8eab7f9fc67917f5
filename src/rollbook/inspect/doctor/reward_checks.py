"""Checks on rewards: zero-variance groups, collapse, saturation, uncentered advantages, and what drives the reward.

Invariant: what drives the reward (length, format, one part) is measured by order within a group, or within a step if
groups have one sample. Advantages depend on that order, and units and prompt difficulty do not affect it.
"""

from __future__ import annotations

import math
import re

import numpy as np

from rollbook.inspect.doctor.findings import (
    CheckResult,
    Finding,
    Samples,
    Severity,
    Thresholds,
    amount,
    exact,
    passed,
    percent,
    skipped,
    triggered,
)
from rollbook.inspect.statistics import Floats, Ints, Mask, Order, Pairs, Series, at_least, fit_weights, order, pairs

_SOLVED_ADVICE = (
    "Solved groups: use harder prompts (or weight prompts by failure rate), and drop zero-variance groups before "
    "training (dynamic sampling) to fill the batch with informative groups."
)
_UNSOLVED_ADVICE = (
    "Unsolved groups: start with easier prompts, use more samples per prompt or a higher temperature, give partial "
    "credit, and check that the grader accepts correct answers."
)
_EQUAL_ADVICE = (
    "Groups with equal intermediate rewards: the reward does not distinguish the answers. Refine it (partial credit, "
    "or a model's score in addition to the rule), and drop zero-variance groups before training (dynamic sampling)."
)
_ADVICE_SHARE = 0.25
"""Share of the zero-variance groups from which on a kind of group gets a recommendation."""


def check_zero_variance(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for groups whose samples all have the same reward."""
    groups = samples.groups
    if not len(groups.code):
        return skipped("no group has two scored samples")
    recent = samples.recent(t)
    first = int(samples.step[recent].min())
    use = groups.step >= first
    total = int(use.sum())
    if total < t.groups:
        return skipped(f"only {total} recent groups have two scored samples, {t.groups} required")
    flat = use & (groups.high - groups.low <= 1e-9 * np.maximum(1.0, np.abs(groups.high)))
    size = float(np.median(groups.runs[use]))
    bar = max(t.zero_variance, (1 + 2 ** (1 - size)) / 2 if size <= 3 else 0.0)
    share = float(flat.sum()) / total
    if at_least(int(flat.sum()), total, t.certainty) <= bar:
        return passed(f"{percent(share)} of {total} recent groups have zero variance; triggered above {percent(bar)}")
    top, bottom = samples.high, samples.low
    solved = int((flat & (groups.low >= top)).sum()) if top > bottom or top > 0 else 0
    unsolved = int((flat & (groups.high <= bottom)).sum()) if top > bottom or top <= 0 else 0
    equal = int(flat.sum()) - solved - unsolved
    member = np.isin(samples.group, groups.code[flat]) & np.isfinite(samples.reward)
    dropped_share = float(samples.dropped[member].mean())
    severity: Severity = "high" if share >= (1 + bar) / 2 else "medium"
    note = ""
    if dropped_share > 0.9:
        severity, note = "low", " They were dropped before training, so only generation is wasted."
    kinds = sorted(
        [(solved, _SOLVED_ADVICE), (unsolved, _UNSOLVED_ADVICE), (equal, _EQUAL_ADVICE)], key=lambda kind: -kind[0]
    )
    recommendation = " ".join(text for count, text in kinds if count >= _ADVICE_SHARE * int(flat.sum()))
    first, last = samples.step_range(member)
    return triggered(
        Finding(
            "zero-variance",
            severity,
            f"{percent(share)} of groups have zero reward variance",
            f"{int(flat.sum())} of {total} groups in steps {first} to {last} have the same reward for every sample: "
            f"{solved} solved, {unsolved} unsolved, {equal} in between. Triggered above {percent(bar)}.{note}",
            recommendation,
            (first, last),
            samples.evidence(member, samples.step.astype(np.float64), one_per_group=True),
            int(member.sum()),
            samples.build_filter("zero_variance", first),
            share,
        )
    )


def check_reward_collapse(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for a reward that dropped far below its earlier level, or was never positive."""
    scored = np.isfinite(samples.reward)
    n = int(scored.sum())
    if n < t.samples:
        return skipped(f"only {n} samples are scored, {t.samples} required")
    if samples.constant:
        if samples.high > 0:
            return passed(f"all rewards are {amount(samples.high)}")
        return triggered(
            Finding(
                "reward-collapse",
                "high",
                f"Every reward is {amount(samples.high)}: no learning signal",
                f"All {n} scored samples have reward {amount(samples.high)}.",
                "Read some answers. If some are correct, the grader or the answer extraction is broken. If none are, "
                "start with easier prompts, or fine-tune on solutions first.",
                samples.step_range(scored),
                samples.evidence(scored, samples.step.astype(np.float64), one_per_group=True),
                n,
                "",
                1.0,
            )
        )
    series = samples.series(samples.reward)
    if len(series) < t.trend_steps:
        return skipped(f"{len(series)} steps have enough scored samples, {t.trend_steps} required")
    w = samples.window(len(series), t)
    per_window = len(np.unique(samples.group[scored])) / len(samples.steps) * w
    if per_window < t.groups:
        return skipped(f"{w} steps have {per_window:.0f} groups, {t.groups} required")
    now = float(np.median(series.values[-w:]))
    earlier = series.values[:-w]
    rolling = np.median(np.lib.stride_tricks.sliding_window_view(earlier, min(w, len(earlier))), axis=1)
    at = int(rolling.argmax())
    peak = float(rolling[at])
    floor = min(float(np.nanquantile(samples.reward, 0.05)), now)
    lost = (peak - now) / (peak - floor) if peak > floor else 0.0
    error = _window_error(samples, series, per_window, w)
    half = (peak + now) / 2
    low_share = float((series.values[-w:] < half).mean())
    if lost < t.reward_collapse or peak - now < 1.5 * t.certainty * error or low_share < 0.75:
        return passed(f"the reward is {amount(now)}, over the best {w} steps {amount(peak)}")
    above = np.flatnonzero(series.values > half)
    first = int(series.steps[min(int(above.max()) + 1, len(series) - 1)])
    affected = scored & (samples.step >= first) & (samples.reward <= half)
    return triggered(
        Finding(
            "reward-collapse",
            "high",
            f"The reward dropped from {amount(peak)} to {amount(now)}",
            f"The median of step means is {amount(now)} over the last {w} steps and was {amount(peak)} over steps "
            f"{int(series.steps[at])} to {int(series.steps[at + min(w, len(earlier)) - 1])}: a loss of {percent(lost)} "
            f"of the reward above {amount(floor)}. Triggered at {percent(t.reward_collapse)}.",
            f"Return to a checkpoint before step {first} and check what changed: a high learning rate, too many "
            "updates per batch, train-inference mismatch, a broken grader, other prompts. A KL penalty or tighter "
            "clipping can prevent it.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, -samples.reward, one_per_group=True),
            int(affected.sum()),
            samples.build_filter(f"reward <= {exact(half)}", first),
            float(affected.sum()) / n,
        )
    )


def _window_error(samples: Samples, series: Series, per_window: float, w: int) -> float:
    """Return the standard error of the difference between two windows of steps.

    It averages the variance from groups and the variance from jumps between steps: prompts may differ between steps,
    and few jumps alone are a poor estimate.
    """
    scored = np.isfinite(samples.reward)
    _, inverse = np.unique(samples.group[scored], return_inverse=True)
    means = np.bincount(inverse, samples.reward[scored]) / np.bincount(inverse)
    level = np.interp(samples.step[scored], series.steps, series.values)
    residuals = means - np.bincount(inverse, level) / np.bincount(inverse)
    from_groups = math.sqrt(2 * float(np.var(residuals)) / per_window)
    # A jump is the difference of two steps.
    jumps = np.abs(np.diff(series.values))
    from_steps = 1.4826 * float(np.median(jumps)) / math.sqrt(2) * math.sqrt(2 / w)
    return math.sqrt((from_groups**2 + from_steps**2) / 2)


def check_evaluation_falls(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for a drop of the reward on held-out prompts."""
    held_out = samples.evaluations
    if held_out is None:
        return skipped("there are no evaluation records")
    scored = held_out.present & np.isfinite(held_out.reward)
    steps: list[int] = np.unique(held_out.step[scored]).tolist()
    if len(steps) < 2:
        return skipped(f"there are evaluations of {len(steps)} steps, 2 required")
    means = {step: _prompt_means(held_out, scored & (held_out.step == step)) for step in steps}
    best = max(steps[:-1], key=lambda step: float(np.mean(list(means[step].values()))))
    last = steps[-1]
    common = means[best].keys() & means[last].keys()
    if len(common) < t.groups:
        return skipped(f"{len(common)} prompts are in both evaluations, {t.groups} required")
    falls = np.array([means[best][prompt] - means[last][prompt] for prompt in sorted(common)])
    fall, error = float(falls.mean()), float(falls.std(ddof=1)) / math.sqrt(len(falls))
    best_reward, reward = (float(np.mean([means[step][prompt] for prompt in common])) for step in (best, last))
    span = held_out.high - held_out.low
    if fall - t.certainty * error <= 0 or fall <= t.evaluation_fall * span:
        return passed(
            f"the held-out reward is {amount(reward)} at step {last}, at best {amount(best_reward)} (step {best})"
        )
    affected = scored & (held_out.step == last)
    return triggered(
        Finding(
            "evaluation-falls",
            "high",
            f"The held-out reward dropped from {amount(best_reward)} to {amount(reward)}",
            f"On {len(common)} prompts in both evaluations, the mean reward was {amount(best_reward)} at step {best} "
            f"and is {amount(reward)} at step {last}, a drop of {amount(fall)} ± {amount(t.certainty * error)}. "
            f"Triggered above {percent(t.evaluation_fall)} of the reward range.",
            f"Return to the checkpoint of step {best}. If the training reward rose meanwhile, the policy overfits or "
            "hacks the reward: read its answers, use more or other prompts, or add a KL penalty. If it dropped too, "
            "lower the learning rate.",
            (best, last),
            held_out.evidence(affected, -held_out.reward, one_per_group=True),
            int(affected.sum()),
            f"evaluation and step = {last}",
            fall / span,
        )
    )


def _prompt_means(samples: Samples, mask: Mask) -> dict[int, float]:
    """Return the mean reward of each prompt."""
    prompts, inverse = np.unique(samples.prompt[mask], return_inverse=True)
    means = np.bincount(inverse, samples.reward[mask]) / np.bincount(inverse)
    return dict(zip(prompts.tolist(), means.tolist(), strict=True))


def check_saturation(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for samples that nearly all have the top reward."""
    use = samples.recent(t) & np.isfinite(samples.reward)
    n = int(use.sum())
    if n < t.samples:
        return skipped(f"only {n} recent samples are scored, {t.samples} required")
    if samples.constant and samples.high <= 0:
        return passed(f"all rewards are {amount(samples.high)}")
    bar = samples.high - t.top * (samples.high - samples.low)
    hits = use & (samples.reward >= bar)
    count = int(hits.sum())
    share = count / n
    if share < t.saturation or at_least(count, n, t.certainty) < t.saturation - 0.1:
        return passed(
            f"{percent(share)} of {n} recent samples have the top reward; triggered at {percent(t.saturation)}"
        )
    first = int(samples.step[use].min())
    return triggered(
        Finding(
            "reward-saturation",
            "high" if share >= (1 + t.saturation) / 2 else "medium",
            f"{percent(share)} of recent samples have the top reward",
            f"{count} of {n} samples in steps {first} to {int(samples.steps[-1])} have a reward of at least "
            f"{amount(bar)}; the highest is {amount(samples.high)}. Triggered at {percent(t.saturation)}.",
            "Stop, or continue with harder prompts or a finer reward. Read some answers: if they are not that good, "
            "the reward is too easy.",
            (first, int(samples.steps[-1])),
            samples.evidence(hits, samples.step.astype(np.float64), one_per_group=True),
            count,
            samples.build_filter(f"reward >= {exact(bar)}", first),
            share,
        )
    )


def check_advantage_mean(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for a mean advantage that is not zero, over samples and over tokens."""
    use = samples.recent(t) & np.isfinite(samples.advantage) & ~samples.dropped
    n = int(use.sum())
    if not np.isfinite(samples.advantage).any():
        return skipped("no advantages recorded")
    if n < t.samples:
        return skipped(f"only {n} recent samples have advantages, {t.samples} required")
    values = samples.advantage[use]
    weights = np.nan_to_num(samples.trained_tokens[use], nan=1.0)
    by_sample = float(values.mean())
    by_token = float(np.average(values, weights=weights)) if weights.sum() > 0 else by_sample
    spread = float(values.std())
    scale = spread if spread > 1e-9 * abs(by_sample) else abs(by_sample)
    if scale == 0:
        return passed("all advantages are 0")
    # Token-wise whitening centers tokens, group-wise centering centers samples; either is fine.
    offset = min(abs(by_sample), abs(by_token)) / scale if by_sample * by_token > 0 else 0.0
    error = _mean_error(samples.blocks[use], values)
    if not error < math.inf:
        return skipped("all samples are of one group")
    if offset < t.advantage_mean or abs(by_sample) < 2 * t.certainty * error:
        return passed(f"the mean advantage is {amount(by_sample)}, its standard deviation {amount(spread)}")
    first = int(samples.step[use].min())
    sign = 1.0 if by_sample > 0 else -1.0
    affected = use & (sign * samples.advantage > 0)
    return triggered(
        Finding(
            "advantage-mean",
            "high" if offset >= 0.5 else "medium",
            f"The mean advantage is {amount(by_sample)}, not 0",
            f"Over {n} samples in steps {first} to {int(samples.steps[-1])} the mean is {amount(by_sample)} by sample "
            f"and {amount(by_token)} by token, {offset:.2f} of the standard deviation of {amount(spread)}. Triggered "
            f"at {t.advantage_mean:g}.",
            f"All responses are pushed {'up' if sign > 0 else 'down'}. Subtract a baseline (group mean, leave-one-out, "
            "a fitted critic) after all reward shaping and filtering, and check that groups are complete when they "
            "are centered.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, sign * samples.advantage, one_per_group=True),
            int(affected.sum()),
            samples.build_filter(f"advantage {'>' if sign > 0 else '<'} 0 and not dropped", first),
            float(affected.sum()) / n,
        )
    )


def _mean_error(blocks: Ints, values: Floats) -> float:
    """Return the standard error of a mean, clustered by block."""
    _, inverse, counts = np.unique(blocks, return_inverse=True, return_counts=True)
    k = len(counts)
    if k < 2:
        return math.inf
    sums = np.bincount(inverse, values - values.mean())
    return math.sqrt(float((sums**2).sum()) * k / (k - 1)) / len(values)


# --- what drives the reward -----------------------------------------------------------------------------------------

_FORMAT_NAMES = re.compile(
    r"format|fmt|template|\btags?\b|_tags?\b|schema|boxed|well_?formed|parse?able|\bstyle|_style", re.I
)
"""Names of reward parts that measure format."""
_FILTER_NAME = re.compile(r"[\w./-]+")
"""Names that a filter can contain."""
_MIN_PAIRS = 64
"""Minimum number of pairs with different rewards."""


def check_reward_follows_length(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for a reward that orders the responses of a group by length."""
    # Truncated responses are long and wrong in every healthy run.
    use = samples.recent(t, t.order_samples) & np.isfinite(samples.reward) & ~samples.truncated & (samples.tokens > 0)
    selection = _find_pairs(samples, t, use)
    if isinstance(selection, str):
        return skipped(selection)
    places, pairing = selection
    relation = order(pairing, samples.reward[places], samples.tokens[places])
    if (too_few := _too_few_pairs(relation, t)) is not None:
        return skipped(f"{too_few} (truncated samples excluded)")
    if not _exceeds(abs(relation.d), relation.error, t.length_reward, t) or abs(relation.weighted) < t.length_reward:
        return passed(
            f"Somers' d of reward and length within groups is {relation.d:.2f}, and {relation.weighted:.2f} weighted "
            "by reward difference"
        )
    longer = relation.d > 0
    length_offset = np.zeros(len(samples))
    length_offset[places] = _center(samples.blocks[places], samples.tokens[places])
    reward_offset = np.zeros(len(samples))
    reward_offset[places] = _center(samples.blocks[places], samples.reward[places])
    affected = use & (reward_offset > 0) & ((length_offset > 0) == longer)
    first = int(samples.step[use].min())
    return triggered(
        Finding(
            "reward-follows-length",
            "high",
            f"Within groups, {'longer' if longer else 'shorter'} responses get the higher reward",
            f"Of {relation.pairs:,} pairs with different rewards, {percent((1 + abs(relation.d)) / 2)} are ordered by "
            f"length (Somers' d = {relation.d:.2f} ± {relation.error:.2f}, truncated samples excluded). Triggered at "
            f"{t.length_reward:g}.",
            "Check what the reward measures (a judge that prefers long answers, a length bonus or penalty with too "
            "much weight). Compare responses of equal length, or remove the part that depends on length.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, np.abs(length_offset) * affected, one_per_group=True),
            int(affected.sum()),
            samples.build_filter("scored", first),
            abs(relation.d),
        )
    )


def check_reward_follows_format(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for a reward that is decided by its format part."""
    selection = _find_part_pairs(samples, t)
    if isinstance(selection, str):
        return skipped(selection)
    places, pairing, columns = selection
    reward = samples.reward[places]
    orders = {name: order(pairing, reward, column) for name, column in columns.items()}
    format_parts = {name: relation for name, relation in orders.items() if _FORMAT_NAMES.search(name)}
    others = {
        name: relation
        for name, relation in orders.items()
        if name not in format_parts and not _equals_reward(columns[name], reward)
    }
    if not format_parts:
        return skipped("no reward part is named after format")
    if not others:
        return skipped("the reward has no part besides format")
    name, leading = max(format_parts.items(), key=lambda relation: relation[1].d)
    if (too_few := _too_few_pairs(leading, t)) is not None:
        return skipped(too_few)
    influential = {other: relation.d for other, relation in others.items() if _has_influence(relation, t)}
    if not _exceeds(leading.d, leading.error, t.format_reward, t) or influential:
        strongest = max(influential.items(), key=lambda relation: abs(relation[1])) if influential else None
        return passed(
            f"Somers' d of the reward is {leading.d:.2f} with {name!r}"
            + (f" and {strongest[1]:.2f} with {strongest[0]!r}" if strongest else "")
        )
    flat = [other for other, relation in others.items() if relation.differs < t.influence]
    use = _mask(samples, places)
    first = int(samples.step[use].min())
    bar = float(np.nanmean(columns[name]))
    affected = _mask(samples, places[columns[name] > bar])
    others_state = "are constant within groups" if len(flat) == len(others) else "have no influence"
    return triggered(
        Finding(
            "reward-follows-format",
            "high",
            f"The reward follows {_quote(name)} alone",
            f"Of {leading.pairs:,} pairs with different rewards, {percent((1 + leading.d) / 2)} are ordered by "
            f"{_quote(name)} (Somers' d = {leading.d:.2f}); the other parts "
            f"({', '.join(_quote(other) for other in list(others)[:6])}) {others_state}. "
            f"Triggered at {t.format_reward:g}.",
            "Reward format only together with a correct answer (or use it as a gate), lower its weight once it is "
            "learned, and check why the other parts are constant: prompts that are too hard, or a failing grader.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, samples.reward, one_per_group=True),
            int(affected.sum()),
            samples.build_filter(f"part.{name} > {exact(bar)}" if _FILTER_NAME.fullmatch(name) else "scored", first),
            leading.d,
        )
    )


def check_component_dominates(samples: Samples, t: Thresholds) -> CheckResult:
    """Check for one reward part that decides nearly every comparison although others vary."""
    selection = _find_part_pairs(samples, t)
    if isinstance(selection, str):
        return skipped(selection)
    places, pairing, columns = selection
    reward = samples.reward[places]
    complete = np.isfinite(reward) & np.all([np.isfinite(column) for column in columns.values()], axis=0)
    if int(complete.sum()) < t.samples:
        return skipped("too few samples have all parts of the reward")
    weights = fit_weights(reward[complete], {name: column[complete] for name, column in columns.items()})
    if weights is None:
        return skipped("the recorded parts do not add up to the reward")
    if len(weights) < 2:
        return skipped("only one part of the reward varies")
    orders = {name: order(pairing, reward, weight * columns[name]) for name, weight in weights.items()}
    name, leading = max(orders.items(), key=lambda component: component[1].d)
    if (too_few := _too_few_pairs(leading, t)) is not None:
        return skipped(too_few)
    others = {other: component for other, component in orders.items() if other != name}
    varied = {other: component for other, component in others.items() if component.differs >= t.influence}
    influential = any(_has_influence(component, t) for component in others.values())
    if not _exceeds(leading.d, leading.error, t.dominance, t) or influential or not varied:
        ordered = ", ".join(f"{component!r} {orders[component].d:.2f}" for component in sorted(orders))
        return passed(f"Somers' d of the reward with each part: {ordered}")
    use = _mask(samples, places)
    first = int(samples.step[use].min())
    strong, weak = np.zeros(len(samples)), np.zeros(len(samples))
    blocks = samples.blocks[places]
    strong[places] = _center(blocks, weights[name] * columns[name])
    for other in varied:
        spread = float(np.nanstd(columns[other])) or 1.0
        weak[places] += np.nan_to_num(_center(blocks, weights[other] / abs(weights[other]) * columns[other] / spread))
    affected = use & (strong * weak < 0)
    scale = {component: abs(weight) * float(np.nanstd(columns[component])) for component, weight in weights.items()}
    spreads = ", ".join(
        f"{_quote(component)} {value:.3g}" for component, value in sorted(scale.items(), key=lambda p: -p[1])
    )
    return triggered(
        Finding(
            "component-dominates",
            "medium",
            f"{_quote(name)} decides the reward; the other parts have no influence",
            f"Somers' d of the reward within groups is {leading.d:.2f} with {_quote(name)}, but "
            + ", ".join(f"{varied[component].d:.2f} with {_quote(component)}" for component in list(varied)[:6])
            + f", although {'it varies' if len(varied) == 1 else 'they vary'}. Weighted standard deviations: "
            f"{spreads}. Triggered at {t.dominance:g} if no other part has influence.",
            "Normalize the parts to one scale before adding them (per group, or by bounding), then weight them. Remove "
            "parts that do not matter.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, np.abs(strong) * affected, one_per_group=True),
            int(affected.sum()),
            samples.build_filter("scored", first),
            leading.d,
        )
    )


def _find_pairs(samples: Samples, t: Thresholds, use: Mask) -> tuple[Ints, Pairs] | str:
    """Return the samples to compare and their pairs, or why there are none."""
    n = int(use.sum())
    if n < t.samples:
        return f"only {n} recent samples can be compared, {t.samples} required"
    if samples.constant:
        return "all rewards are equal"
    places = np.flatnonzero(use)
    return places, pairs(samples.blocks[places])


def _find_part_pairs(samples: Samples, t: Thresholds) -> tuple[Ints, Pairs, dict[str, Floats]] | str:
    selection = _find_pairs(samples, t, samples.recent(t, t.order_samples) & np.isfinite(samples.reward))
    if isinstance(selection, str):
        return selection
    places, pairing = selection
    # A value that most samples lack is not a part of the reward.
    columns = {name: column for name, column in samples.parts(places).items() if np.isfinite(column).mean() >= 0.5}
    if len(columns) < 2:
        return "fewer than two reward parts recorded"
    return places, pairing, columns


def _too_few_pairs(relation: Order, t: Thresholds) -> str | None:
    if relation.blocks < t.groups or relation.pairs < _MIN_PAIRS:
        return (
            f"only {relation.pairs} pairs in {relation.blocks} groups have different rewards, {_MIN_PAIRS} in "
            f"{t.groups} required"
        )
    return None


def _exceeds(d: float, error: float, bar: float, t: Thresholds) -> bool:
    """Return whether an order reaches its threshold, beyond its error."""
    return d >= bar and d - t.certainty * error >= bar - 0.1


def _has_influence(relation: Order, t: Thresholds) -> bool:
    """Return whether a part influences the reward where it differs, beyond its error."""
    return relation.differs > 0 and (abs(relation.d) - relation.error) / relation.differs > t.influence


def _equals_reward(column: Floats, reward: Floats) -> bool:
    """Return whether a part equals the reward."""
    return bool(np.nanmax(np.abs(column - reward), initial=0.0) <= 1e-6 * max(1.0, float(np.abs(reward).max())))


def _center(blocks: Ints, values: Floats) -> Floats:
    """Return [N] values minus the mean of their block."""
    _, inverse = np.unique(blocks, return_inverse=True)
    finite = np.isfinite(values)
    sums = np.bincount(inverse, np.where(finite, values, 0.0))
    return np.asarray(values - (sums / np.maximum(np.bincount(inverse, finite), 1))[inverse], np.float64)


def _mask(samples: Samples, places: Ints) -> Mask:
    mask = np.zeros(len(samples), bool)
    mask[places] = True
    return mask


def _quote(name: str) -> str:
    """Return the name of a part, escaped, since it comes from the records."""
    return repr(name[:40])
