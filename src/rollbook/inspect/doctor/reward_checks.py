"""Checks on rewards: groups without variance, collapse, saturation, uncentered advantages, and what the reward follows.

Invariant: what the reward follows (length, format, one part) is judged by order within a group, or within a step where
groups have one sample. Advantages are made of that order, and neither units nor prompt difficulty affect it.
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

_SOLVED = (
    "Where all samples are right, the prompts are solved: sample harder ones (or weigh prompts by how often they "
    "fail), and drop groups of one reward before training (dynamic sampling), so that the batch is filled with groups "
    "that teach."
)
_UNSOLVED = (
    "Where all samples are wrong, the prompts are too hard: begin with easier ones, take more samples per prompt or a "
    "higher temperature, give credit for parts of an answer, and check that the grader accepts a right one."
)
_ALIKE = (
    "Where all samples get the same reward in between, it does not tell the answers apart: make it finer (credit for "
    "parts, or a model's score beside the rule), and drop groups of one reward before training (dynamic sampling)."
)
_ADVISED = 0.25
"""Advice is given for each kind of group that is at least so large a share of those without variance."""


def check_zero_variance(samples: Samples, t: Thresholds) -> CheckResult:
    """Groups whose samples all have the same reward: their advantages are 0."""
    groups = samples.groups
    if not len(groups.code):
        return skipped("no group has two scored samples")
    recent = samples.recent(t)
    first = int(samples.step[recent].min())
    use = groups.step >= first
    total = int(use.sum())
    if total < t.groups:
        return skipped(f"only {total} recent groups have two scored samples, {t.groups} are needed")
    flat = use & (groups.high - groups.low <= 1e-9 * np.maximum(1.0, np.abs(groups.high)))
    size = float(np.median(groups.runs[use]))
    bar = max(t.zero_variance, (1 + 2 ** (1 - size)) / 2 if size <= 3 else 0.0)
    share = float(flat.sum()) / total
    if at_least(int(flat.sum()), total, t.certainty) <= bar:
        return passed(f"{percent(share)} of {total} recent groups have one reward; triggered above {percent(bar)}")
    top, bottom = samples.high, samples.low
    solved = int((flat & (groups.low >= top)).sum()) if top > bottom or top > 0 else 0
    unsolved = int((flat & (groups.high <= bottom)).sum()) if top > bottom or top <= 0 else 0
    alike = int(flat.sum()) - solved - unsolved
    member = np.isin(samples.group, groups.code[flat]) & np.isfinite(samples.reward)
    given_up = float(samples.dropped[member].mean())
    severity: Severity = "high" if share >= (1 + bar) / 2 else "medium"
    after = ""
    if given_up > 0.9:
        severity, after = "low", " They were dropped before training: this costs generation, not gradient."
    kinds = sorted([(solved, _SOLVED), (unsolved, _UNSOLVED), (alike, _ALIKE)], key=lambda kind: -kind[0])
    recommendation = " ".join(text for count, text in kinds if count >= _ADVISED * int(flat.sum()))
    first, last = samples.span(member)
    return triggered(
        Finding(
            "zero-variance",
            severity,
            f"{percent(share)} of groups have one reward and teach nothing",
            f"Of {total} groups in steps {first} to {last}, {int(flat.sum())} have the same reward for every sample: "
            f"{solved} all solved, {unsolved} all unsolved, {alike} alike in between. Triggered above "
            f"{percent(bar)}.{after}",
            recommendation,
            (first, last),
            samples.evidence(member, samples.step.astype(np.float64), apart=True),
            int(member.sum()),
            samples.where("zero_variance", first),
            share,
        )
    )


def check_reward_collapse(samples: Samples, t: Thresholds) -> CheckResult:
    """The reward has fallen far below what it was, or there never was any."""
    scored = np.isfinite(samples.reward)
    n = int(scored.sum())
    if n < t.samples:
        return skipped(f"only {n} samples are scored, {t.samples} are needed")
    if samples.constant:
        if samples.high > 0:
            return passed(f"all rewards are {amount(samples.high)}")
        return triggered(
            Finding(
                "reward-collapse",
                "high",
                f"Every reward is {amount(samples.high)}: nothing is learned",
                f"All {n} scored samples have reward {amount(samples.high)}.",
                "Look at some answers: if right ones are among them, the grader or the answer's extraction is broken; "
                "if not, begin with easier prompts, or fine-tune on some solutions first.",
                samples.span(scored),
                samples.evidence(scored, samples.step.astype(np.float64), apart=True),
                n,
                "",
                1.0,
            )
        )
    series = samples.series(samples.reward)
    if len(series) < t.trend_steps:
        return skipped(f"{len(series)} steps have enough scored samples, a fall needs {t.trend_steps}")
    w = samples.window(len(series), t)
    per_window = len(np.unique(samples.group[scored])) / len(samples.steps) * w
    if per_window < t.groups:
        return skipped(f"{w} steps have {per_window:.0f} groups, a fall needs {t.groups}")
    now = float(np.median(series.values[-w:]))
    before = series.values[:-w]
    rolling = np.median(np.lib.stride_tricks.sliding_window_view(before, min(w, len(before))), axis=1)
    at = int(rolling.argmax())
    peak = float(rolling[at])
    floor = min(float(np.nanquantile(samples.reward, 0.05)), now)
    lost = (peak - now) / (peak - floor) if peak > floor else 0.0
    error = _error(samples, series, per_window, w)
    half = (peak + now) / 2
    stays = float((series.values[-w:] < half).mean())
    if lost < t.reward_collapse or peak - now < 1.5 * t.certainty * error or stays < 0.75:
        return passed(f"the reward is {amount(now)}, the best {w} steps had {amount(peak)}")
    still = np.flatnonzero(series.values > half)
    first = int(series.steps[min(int(still.max()) + 1, len(series) - 1)])
    affected = scored & (samples.step >= first) & (samples.reward <= half)
    return triggered(
        Finding(
            "reward-collapse",
            "high",
            f"The reward fell from {amount(peak)} to {amount(now)}",
            f"The median of step means is {amount(now)} over the last {w} steps; it was {amount(peak)} over steps "
            f"{int(series.steps[at])} to {int(series.steps[at + min(w, len(before)) - 1])}. Lost: {percent(lost)} of "
            f"what there was above {amount(floor)}; triggered at {percent(t.reward_collapse)}.",
            f"Go back to a checkpoint before step {first} and look at what changed there: too large a learning rate or "
            "too many updates per batch, log-probs that differ between engine and trainer, a broken grader, other "
            "prompts. A KL penalty or tighter clipping keeps it from coming back.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, -samples.reward, apart=True),
            int(affected.sum()),
            samples.where(f"reward <= {exact(half)}", first),
            float(affected.sum()) / n,
        )
    )


def _error(samples: Samples, series: Series, per_window: float, w: int) -> float:
    """The standard error of the difference between two windows of steps, half by the spread of groups and half by the
    jumps from step to step: prompts may differ between steps, and few jumps are a poor measure alone."""
    scored = np.isfinite(samples.reward)
    _, place = np.unique(samples.group[scored], return_inverse=True)
    means = np.bincount(place, samples.reward[scored]) / np.bincount(place)
    level = np.interp(samples.step[scored], series.steps, series.values)
    around = means - np.bincount(place, level) / np.bincount(place)
    from_groups = math.sqrt(2 * float(np.var(around)) / per_window)
    # A jump is the difference of two steps.
    jumps = np.abs(np.diff(series.values))
    from_steps = 1.4826 * float(np.median(jumps)) / math.sqrt(2) * math.sqrt(2 / w)
    return math.sqrt((from_groups**2 + from_steps**2) / 2)


def check_evaluation_falls(samples: Samples, t: Thresholds) -> CheckResult:
    """The policy does worse on held-out prompts than it did before."""
    held_out = samples.evaluations
    if held_out is None:
        return skipped("there are no evaluation records")
    scored = held_out.there & np.isfinite(held_out.reward)
    steps: list[int] = np.unique(held_out.step[scored]).tolist()
    if len(steps) < 2:
        return skipped(f"there are evaluations of {len(steps)} steps, two are needed")
    means = {step: _prompt_means(held_out, scored & (held_out.step == step)) for step in steps}
    best = max(steps[:-1], key=lambda step: float(np.mean(list(means[step].values()))))
    last = steps[-1]
    common = means[best].keys() & means[last].keys()
    if len(common) < t.groups:
        return skipped(f"{len(common)} prompts are in both evaluations, {t.groups} are needed")
    falls = np.array([means[best][prompt] - means[last][prompt] for prompt in sorted(common)])
    fall, error = float(falls.mean()), float(falls.std(ddof=1)) / math.sqrt(len(falls))
    before, now = (float(np.mean([means[step][prompt] for prompt in common])) for step in (best, last))
    span = held_out.high - held_out.low
    if fall - t.certainty * error <= 0 or fall <= t.evaluation_fall * span:
        return passed(f"held-out prompts get {amount(now)} at step {last}, at best {amount(before)} (step {best})")
    affected = scored & (held_out.step == last)
    return triggered(
        Finding(
            "evaluation-falls",
            "high",
            f"The reward of held-out prompts fell from {amount(before)} to {amount(now)}",
            f"On {len(common)} prompts that were evaluated both times, the mean reward was {amount(before)} at step "
            f"{best} and is {amount(now)} at step {last}: {amount(fall)} less, ± {amount(t.certainty * error)}. "
            f"Triggered above {percent(t.evaluation_fall)} of the range of rewards.",
            f"Go back to the checkpoint of step {best}. If the training reward rose meanwhile, the policy overfits its "
            "prompts or exploits the reward: read what it answers, take more or other prompts, or add a KL penalty. If "
            "it fell too, lower the learning rate.",
            (best, last),
            held_out.evidence(affected, -held_out.reward, apart=True),
            int(affected.sum()),
            f"evaluation and step = {last}",
            fall / span,
        )
    )


def _prompt_means(samples: Samples, mask: Mask) -> dict[int, float]:
    """The mean reward of each prompt."""
    prompts, place = np.unique(samples.prompt[mask], return_inverse=True)
    means = np.bincount(place, samples.reward[mask]) / np.bincount(place)
    return dict(zip(prompts.tolist(), means.tolist(), strict=True))


def check_saturation(samples: Samples, t: Thresholds) -> CheckResult:
    """Nearly every sample has the top reward: there is nothing left to learn from these prompts."""
    use = samples.recent(t) & np.isfinite(samples.reward)
    n = int(use.sum())
    if n < t.samples:
        return skipped(f"only {n} recent samples are scored, {t.samples} are needed")
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
            "Stop here, or go on with harder prompts or a finer reward. If the answers are not that good, the reward "
            "is easy to please: read some of them.",
            (first, int(samples.steps[-1])),
            samples.evidence(hits, samples.step.astype(np.float64), apart=True),
            count,
            samples.where(f"reward >= {exact(bar)}", first),
            share,
        )
    )


def check_advantage_mean(samples: Samples, t: Thresholds) -> CheckResult:
    """The mean advantage is off zero, by samples and by tokens: the baseline is missing or wrong."""
    use = samples.recent(t) & np.isfinite(samples.advantage) & ~samples.dropped
    n = int(use.sum())
    if not np.isfinite(samples.advantage).any():
        return skipped("no advantages are recorded")
    if n < t.samples:
        return skipped(f"only {n} recent samples have advantages, {t.samples} are needed")
    values = samples.advantage[use]
    weights = np.nan_to_num(samples.trained_tokens[use], nan=1.0)
    by_sample = float(values.mean())
    by_token = float(np.average(values, weights=weights)) if weights.sum() > 0 else by_sample
    spread = float(values.std())
    scale = spread if spread > 1e-9 * abs(by_sample) else abs(by_sample)
    if scale == 0:
        return passed("all advantages are 0")
    # Token-wise whitening centres tokens, group-wise centring centres samples: either will do.
    off = min(abs(by_sample), abs(by_token)) / scale if by_sample * by_token > 0 else 0.0
    error = _mean_error(samples.blocks[use], values)
    if not error < math.inf:
        return skipped("the samples are all of one group")
    if off < t.advantage_mean or abs(by_sample) < 2 * t.certainty * error:
        return passed(f"the mean advantage is {amount(by_sample)}, its standard deviation {amount(spread)}")
    first = int(samples.step[use].min())
    sign = 1.0 if by_sample > 0 else -1.0
    affected = use & (sign * samples.advantage > 0)
    return triggered(
        Finding(
            "advantage-mean",
            "high" if off >= 0.5 else "medium",
            f"The mean advantage is {amount(by_sample)}, not 0",
            f"Over {n} samples in steps {first} to {int(samples.steps[-1])} the mean is {amount(by_sample)} by sample "
            f"and {amount(by_token)} by token, with a standard deviation of {amount(spread)}: {off:.2f} of it. "
            f"Triggered at {t.advantage_mean:g}.",
            "Every answer is pushed "
            + ("up" if sign > 0 else "down")
            + ", whatever it is. Subtract a baseline (the group's mean, leave-one-out, a critic that fits) after all "
            "shaping and filtering of rewards, not before; and check that groups are whole when they are centred.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, sign * samples.advantage, apart=True),
            int(affected.sum()),
            samples.where(f"advantage {'>' if sign > 0 else '<'} 0 and not dropped", first),
            float(affected.sum()) / n,
        )
    )


def _mean_error(blocks: Ints, values: Floats) -> float:
    """The standard error of a mean whose blocks are independent, but not the values in them."""
    _, place, counts = np.unique(blocks, return_inverse=True, return_counts=True)
    k = len(counts)
    if k < 2:
        return math.inf
    sums = np.bincount(place, values - values.mean())
    return math.sqrt(float((sums**2).sum()) * k / (k - 1)) / len(values)


# --- what the reward follows ----------------------------------------------------------------------------------------

_FORMAT = re.compile(
    r"format|fmt|template|\btags?\b|_tags?\b|schema|boxed|well_?formed|parse?able|\bstyle|_style", re.I
)
"""Names of parts that speak of the form of an answer."""
_PLAIN = re.compile(r"[\w./-]+")
"""Names that a filter can hold."""
_PAIRS = 64
"""Fewest pairs of samples with different rewards; with fewer, an order can be chance."""


def check_reward_follows_length(samples: Samples, t: Thresholds) -> CheckResult:
    """Within a group the longer (or the shorter) answer nearly always has the higher reward."""
    # Truncated answers are long and wrong in every healthy run.
    use = samples.recent(t, t.order_samples) & np.isfinite(samples.reward) & ~samples.truncated & (samples.tokens > 0)
    seen = _compared(samples, t, use)
    if isinstance(seen, str):
        return skipped(seen)
    places, found_pairs = seen
    size = order(found_pairs, samples.reward[places], samples.tokens[places])
    if (few := _few(size, t)) is not None:
        return skipped(few)
    if not _clear(abs(size.d), size.error, t.length_reward, t) or abs(size.weighted) < t.length_reward:
        return passed(
            f"the order of rewards within a group is that of lengths by d = {size.d:.2f}, "
            f"{size.weighted:.2f} where pairs count by the difference of their rewards"
        )
    longer = size.d > 0
    middle = np.zeros(len(samples))
    middle[places] = _centred(samples.blocks[places], samples.tokens[places])
    lead = np.zeros(len(samples))
    lead[places] = _centred(samples.blocks[places], samples.reward[places])
    affected = use & (lead > 0) & ((middle > 0) == longer)
    first = int(samples.step[use].min())
    return triggered(
        Finding(
            "reward-follows-length",
            "high",
            f"Within a group the {'longer' if longer else 'shorter'} answer gets the higher reward",
            f"Of {size.pairs:,} pairs of answers with different rewards, {percent((1 + abs(size.d)) / 2)} "
            f"are ordered as their lengths are (Somers' d = {size.d:.2f} ± {size.error:.2f}, truncated ones left "
            f"out). Triggered at {t.length_reward:g}.",
            "The policy will learn length and nothing else. Look at what the reward measures (a judge that likes long "
            "answers, a length bonus or penalty with too much weight), and compare answers of equal length, or take "
            "the part that depends on length out.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, np.abs(middle) * affected, apart=True),
            int(affected.sum()),
            samples.where("scored", first),
            abs(size.d),
        )
    )


def check_reward_follows_format(samples: Samples, t: Thresholds) -> CheckResult:
    """A part that speaks of form decides the reward, and the other parts have no say."""
    seen = _with_parts(samples, t)
    if isinstance(seen, str):
        return skipped(seen)
    places, found_pairs, columns = seen
    reward = samples.reward[places]
    orders = {name: order(found_pairs, reward, column) for name, column in columns.items()}
    forms = {name: relation for name, relation in orders.items() if _FORMAT.search(name)}
    others = {
        name: relation for name, relation in orders.items() if name not in forms and not _same(columns[name], reward)
    }
    if not forms:
        return skipped("no part of the reward is called a format")
    if not others:
        return skipped("the reward has no other part than its format")
    name, lead = max(forms.items(), key=lambda relation: relation[1].d)
    if (few := _few(lead, t)) is not None:
        return skipped(few)
    loud = {other: relation.d for other, relation in others.items() if _heard(relation, t)}
    if not _clear(lead.d, lead.error, t.format_reward, t) or loud:
        loudest = max(loud.items(), key=lambda relation: abs(relation[1])) if loud else None
        return passed(
            f"the order of rewards is that of {name!r} by d = {lead.d:.2f}"
            + (f", of {loudest[0]!r} by {loudest[1]:.2f}" if loudest else "")
        )
    flat = [other for other, relation in others.items() if relation.differs < t.influence]
    use = _mask(samples, places)
    first = int(samples.step[use].min())
    bar = float(np.nanmean(columns[name]))
    affected = _mask(samples, places[columns[name] > bar])
    quiet = "never differ within a group" if len(flat) == len(others) else "have no say"
    return triggered(
        Finding(
            "reward-follows-format",
            "high",
            f"The reward is that of {_shown(name)} alone",
            f"Of {lead.pairs:,} pairs of answers with different rewards, {percent((1 + lead.d) / 2)} are "
            f"ordered as {_shown(name)} orders them (Somers' d = {lead.d:.2f}); the other parts "
            f"({', '.join(_shown(other) for other in list(others)[:6])}) {quiet}. Triggered at {t.format_reward:g}.",
            "The policy learns the form and not the task. Pay for form only together with a right answer (or as a "
            "gate: no form, no reward), lower its weight once it is learned, and see why the other parts are flat: "
            "prompts that are too hard, or a grader that fails.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, samples.reward, apart=True),
            int(affected.sum()),
            samples.where(f"part.{name} > {exact(bar)}" if _PLAIN.fullmatch(name) else "scored", first),
            lead.d,
        )
    )


def check_component_dominates(samples: Samples, t: Thresholds) -> CheckResult:
    """One part of the reward decides every comparison, though other parts vary."""
    seen = _with_parts(samples, t)
    if isinstance(seen, str):
        return skipped(seen)
    places, found_pairs, columns = seen
    reward = samples.reward[places]
    complete = np.isfinite(reward) & np.all([np.isfinite(column) for column in columns.values()], axis=0)
    if int(complete.sum()) < t.samples:
        return skipped("too few samples have every part of the reward")
    weights = fit_weights(reward[complete], {name: column[complete] for name, column in columns.items()})
    if weights is None:
        return skipped("the parts that are recorded do not add up to the reward")
    if len(weights) < 2:
        return skipped("the reward has one part that varies")
    orders = {name: order(found_pairs, reward, weight * columns[name]) for name, weight in weights.items()}
    name, lead = max(orders.items(), key=lambda part: part[1].d)
    if (few := _few(lead, t)) is not None:
        return skipped(few)
    others = {other: part for other, part in orders.items() if other != name}
    varied = {other: part for other, part in others.items() if part.differs >= t.influence}
    loud = any(_heard(part, t) for part in others.values())
    if not _clear(lead.d, lead.error, t.dominance, t) or loud or not varied:
        ordered = ", ".join(f"{part!r} {orders[part].d:.2f}" for part in sorted(orders))
        return passed(f"the order of rewards is that of each part by d = {ordered}")
    use = _mask(samples, places)
    first = int(samples.step[use].min())
    strong, weak = np.zeros(len(samples)), np.zeros(len(samples))
    blocks = samples.blocks[places]
    strong[places] = _centred(blocks, weights[name] * columns[name])
    for other in varied:
        spread = float(np.nanstd(columns[other])) or 1.0
        weak[places] += np.nan_to_num(_centred(blocks, weights[other] / abs(weights[other]) * columns[other] / spread))
    affected = use & (strong * weak < 0)
    scale = {part: abs(weight) * float(np.nanstd(columns[part])) for part, weight in weights.items()}
    spreads = ", ".join(f"{_shown(part)} {value:.3g}" for part, value in sorted(scale.items(), key=lambda p: -p[1]))
    return triggered(
        Finding(
            "component-dominates",
            "medium",
            f"{_shown(name)} decides the reward; the other parts have no say",
            f"Within a group the order of rewards is that of {_shown(name)} by d = {lead.d:.2f}; that of "
            + ", ".join(f"{_shown(part)} by {varied[part].d:.2f}" for part in list(varied)[:6])
            + f", though {'it differs' if len(varied) == 1 else 'they differ'} between samples. Weighted standard "
            f"deviations: {spreads}. Triggered at {t.dominance:g}, where no other has a say.",
            "Bring the parts to one scale before they are added (normalise each within the group, or bound it), and "
            "then weigh them; if the small parts do not matter, take them out.",
            (first, int(samples.steps[-1])),
            samples.evidence(affected, np.abs(strong) * affected, apart=True),
            int(affected.sum()),
            samples.where("scored", first),
            lead.d,
        )
    )


def _compared(samples: Samples, t: Thresholds, use: Mask) -> tuple[Ints, Pairs] | str:
    """Which samples are compared, and their pairs; or why there are none."""
    n = int(use.sum())
    if n < t.samples:
        return f"only {n} recent samples can be compared, {t.samples} are needed"
    if samples.constant:
        return "rewards do not differ"
    places = np.flatnonzero(use)
    return places, pairs(samples.blocks[places])


def _with_parts(samples: Samples, t: Thresholds) -> tuple[Ints, Pairs, dict[str, Floats]] | str:
    seen = _compared(samples, t, samples.recent(t, t.order_samples) & np.isfinite(samples.reward))
    if isinstance(seen, str):
        return seen
    places, found_pairs = seen
    # What most samples lack is no part of their reward.
    columns = {name: column for name, column in samples.parts(places).items() if np.isfinite(column).mean() >= 0.5}
    if len(columns) < 2:
        return "fewer than two parts of the reward are recorded"
    return places, found_pairs, columns


def _few(size: Order, t: Thresholds) -> str | None:
    if size.blocks < t.groups or size.pairs < _PAIRS:
        return (
            f"only {size.pairs} pairs in {size.blocks} groups have different rewards, {_PAIRS} in {t.groups} are needed"
        )
    return None


def _clear(d: float, error: float, bar: float, t: Thresholds) -> bool:
    """Whether an order reaches its threshold, and does not do so by chance."""
    return d >= bar and d - t.certainty * error >= bar - 0.1


def _heard(size: Order, t: Thresholds) -> bool:
    """Whether a part has a say where it differs, and not by chance."""
    return size.differs > 0 and (abs(size.d) - size.error) / size.differs > t.influence


def _same(column: Floats, reward: Floats) -> bool:
    """Whether a part is the whole reward under another name."""
    return bool(np.nanmax(np.abs(column - reward), initial=0.0) <= 1e-6 * max(1.0, float(np.abs(reward).max())))


def _centred(blocks: Ints, values: Floats) -> Floats:
    """Values less their block's mean."""
    _, place = np.unique(blocks, return_inverse=True)
    finite = np.isfinite(values)
    sums = np.bincount(place, np.where(finite, values, 0.0))
    return np.asarray(values - (sums / np.maximum(np.bincount(place, finite), 1))[place], np.float64)


def _mask(samples: Samples, places: Ints) -> Mask:
    mask = np.zeros(len(samples), bool)
    mask[places] = True
    return mask


def _shown(name: str) -> str:
    """A part's name as text: it came with the records."""
    return repr(name[:40])
