"""Checks on what the reward follows: length alone, format alone, one part of many.

Invariant: all are judged by order, within a group (or a step, where groups have one sample): that is what advantages
are made of, and neither units nor the difficulty of prompts can mislead it.
"""

from __future__ import annotations

import re

import numpy as np

from rollbook.inspect.doctor.findings import Finding, Judgement, exact, fine, found, percent, unknown
from rollbook.inspect.doctor.samples import Samples
from rollbook.inspect.doctor.statistics import Floats, Ints, Mask, Order, Pairs, fit_weights, order, pairs
from rollbook.inspect.doctor.thresholds import Thresholds

_FORMAT = re.compile(
    r"format|fmt|template|\btags?\b|_tags?\b|schema|boxed|well_?formed|parse?able|\bstyle|_style", re.I
)
"""Names of parts that speak of the form of an answer."""
_PLAIN = re.compile(r"[\w./-]+")
"""Names that a filter can hold."""
_PAIRS = 64
"""Fewest pairs of samples with different rewards; with fewer, an order can be chance."""


def reward_follows_length(samples: Samples, t: Thresholds) -> Judgement:
    """Within a group the longer (or the shorter) answer nearly always has the higher reward."""
    # Truncated answers are long and wrong in every healthy run.
    use = samples.recent(t, t.order_samples) & np.isfinite(samples.reward) & ~samples.truncated & (samples.tokens > 0)
    seen = _compared(samples, t, use)
    if isinstance(seen, str):
        return unknown(seen)
    places, found_pairs = seen
    size = order(found_pairs, samples.reward[places], samples.tokens[places])
    if (few := _few(size, t)) is not None:
        return unknown(few)
    if not _clear(abs(size.d), size.error, t.length_reward, t) or abs(size.weighted) < t.length_reward:
        return fine(
            f"the order of rewards within a group is that of lengths by d = {size.d:.2f}, "
            f"{size.weighted:.2f} where pairs count by the difference of their rewards"
        )
    longer = size.d > 0
    middle = np.zeros(len(samples))
    middle[places] = _centred(samples.blocks[places], samples.tokens[places])
    lead = np.zeros(len(samples))
    lead[places] = _centred(samples.blocks[places], samples.reward[places])
    ill = use & (lead > 0) & ((middle > 0) == longer)
    first = int(samples.step[use].min())
    return found(
        Finding(
            "reward-follows-length",
            "high",
            f"Within a group the {'longer' if longer else 'shorter'} answer gets the higher reward",
            f"Of {size.pairs:,} pairs of answers with different rewards, {percent((1 + abs(size.d)) / 2)} "
            f"are ordered as their lengths are (Somers' d = {size.d:.2f} ± {size.error:.2f}, truncated ones left "
            f"out). Ill from {t.length_reward:g}.",
            "The policy will learn length and nothing else. Look at what the reward measures (a judge that likes long "
            "answers, a length bonus or penalty with too much weight), and compare answers of equal length, or take "
            "the part that depends on length out.",
            (first, int(samples.steps[-1])),
            samples.evidence(ill, np.abs(middle) * ill, apart=True),
            int(ill.sum()),
            samples.where("scored", first),
            abs(size.d),
        )
    )


def reward_follows_format(samples: Samples, t: Thresholds) -> Judgement:
    """A part that speaks of form decides the reward, and the other parts have no say."""
    seen = _with_parts(samples, t)
    if isinstance(seen, str):
        return unknown(seen)
    places, found_pairs, columns = seen
    reward = samples.reward[places]
    orders = {name: order(found_pairs, reward, column) for name, column in columns.items()}
    forms = {name: each for name, each in orders.items() if _FORMAT.search(name)}
    others = {name: each for name, each in orders.items() if name not in forms and not _same(columns[name], reward)}
    if not forms:
        return unknown("no part of the reward is called a format")
    if not others:
        return unknown("the reward has no other part than its format")
    name, lead = max(forms.items(), key=lambda each: each[1].d)
    if (few := _few(lead, t)) is not None:
        return unknown(few)
    loud = {other: each.d for other, each in others.items() if _heard(each, t)}
    if not _clear(lead.d, lead.error, t.format_reward, t) or loud:
        said = max(loud.items(), key=lambda each: abs(each[1])) if loud else None
        return fine(
            f"the order of rewards is that of {name!r} by d = {lead.d:.2f}"
            + (f", of {said[0]!r} by {said[1]:.2f}" if said else "")
        )
    flat = [other for other, each in others.items() if each.differs < t.influence]
    use = _mask(samples, places)
    first = int(samples.step[use].min())
    bar = float(np.nanmean(columns[name]))
    ill = _mask(samples, places[columns[name] > bar])
    quiet = "never differ within a group" if len(flat) == len(others) else "have no say"
    return found(
        Finding(
            "reward-follows-format",
            "high",
            f"The reward is that of {_shown(name)} alone",
            f"Of {lead.pairs:,} pairs of answers with different rewards, {percent((1 + lead.d) / 2)} are "
            f"ordered as {_shown(name)} orders them (Somers' d = {lead.d:.2f}); the other parts "
            f"({', '.join(_shown(each) for each in list(others)[:6])}) {quiet}. Ill from {t.format_reward:g}.",
            "The policy learns the form and not the task. Pay for form only together with a right answer (or as a "
            "gate: no form, no reward), lower its weight once it is learned, and see why the other parts are flat: "
            "prompts that are too hard, or a grader that fails.",
            (first, int(samples.steps[-1])),
            samples.evidence(ill, samples.reward, apart=True),
            int(ill.sum()),
            samples.where(f"part.{name} > {exact(bar)}" if _PLAIN.fullmatch(name) else "scored", first),
            lead.d,
        )
    )


def component_dominates(samples: Samples, t: Thresholds) -> Judgement:
    """One part of the reward decides every comparison, though other parts vary."""
    seen = _with_parts(samples, t)
    if isinstance(seen, str):
        return unknown(seen)
    places, found_pairs, columns = seen
    reward = samples.reward[places]
    whole = np.isfinite(reward) & np.all([np.isfinite(column) for column in columns.values()], axis=0)
    if int(whole.sum()) < t.samples:
        return unknown("too few samples have every part of the reward")
    weights = fit_weights(reward[whole], {name: column[whole] for name, column in columns.items()})
    if weights is None:
        return unknown("the parts that are recorded do not add up to the reward")
    if len(weights) < 2:
        return unknown("the reward has one part that varies")
    orders = {name: order(found_pairs, reward, weight * columns[name]) for name, weight in weights.items()}
    name, lead = max(orders.items(), key=lambda each: each[1].d)
    if (few := _few(lead, t)) is not None:
        return unknown(few)
    others = {other: each for other, each in orders.items() if other != name}
    varied = {other: each for other, each in others.items() if each.differs >= t.influence}
    loud = any(_heard(each, t) for each in others.values())
    if not _clear(lead.d, lead.error, t.dominance, t) or loud or not varied:
        ordered = ", ".join(f"{each!r} {orders[each].d:.2f}" for each in sorted(orders))
        return fine(f"the order of rewards is that of each part by d = {ordered}")
    use = _mask(samples, places)
    first = int(samples.step[use].min())
    strong, weak = np.zeros(len(samples)), np.zeros(len(samples))
    blocks = samples.blocks[places]
    strong[places] = _centred(blocks, weights[name] * columns[name])
    for other in varied:
        spread = float(np.nanstd(columns[other])) or 1.0
        weak[places] += np.nan_to_num(_centred(blocks, weights[other] / abs(weights[other]) * columns[other] / spread))
    ill = use & (strong * weak < 0)
    scale = {each: abs(weight) * float(np.nanstd(columns[each])) for each, weight in weights.items()}
    spreads = ", ".join(f"{_shown(each)} {value:.3g}" for each, value in sorted(scale.items(), key=lambda p: -p[1]))
    return found(
        Finding(
            "component-dominates",
            "medium",
            f"{_shown(name)} decides the reward; the other parts have no say",
            f"Within a group the order of rewards is that of {_shown(name)} by d = {lead.d:.2f}; that of "
            + ", ".join(f"{_shown(each)} by {varied[each].d:.2f}" for each in list(varied)[:6])
            + f", though {'it differs' if len(varied) == 1 else 'they differ'} between samples. Weighted standard "
            f"deviations: {spreads}. Ill from {t.dominance:g}, where no other has a say.",
            "Bring the parts to one scale before they are added (normalise each within the group, or bound it), and "
            "then weigh them; if the small parts do not matter, take them out.",
            (first, int(samples.steps[-1])),
            samples.evidence(ill, np.abs(strong) * ill, apart=True),
            int(ill.sum()),
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
    known = np.isfinite(values)
    sums = np.bincount(place, np.where(known, values, 0.0))
    return np.asarray(values - (sums / np.maximum(np.bincount(place, known), 1))[place], np.float64)


def _mask(samples: Samples, places: Ints) -> Mask:
    made = np.zeros(len(samples), bool)
    made[places] = True
    return made


def _shown(name: str) -> str:
    """A part's name as text: it came with the records."""
    return repr(name[:40])
