"""Every estimator, divergence and loss once more: plain Python numbers and loops, written from the formulas.

Invariant: nothing of torch, numpy or rollbook is used here. Means are exact (rational arithmetic); a gradient is a
difference quotient of the loss itself, in which whatever a formula holds constant is computed from `frozen`, the
unmoved copy of the argument that moves.

Tokens are lists of rows. `None` is NaN: a reward that is missing, or a slot that nobody may read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Rows = list[list[Any]]
Outputs = dict[str, Any]
ESTIMATORS: dict[str, Callable[..., Outputs]] = {}
OTHERS: dict[str, Callable[..., Outputs]] = {}
LOSSES: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {}
"""For each loss the arguments it is differentiated by, and its value."""


def expected(function: str, inputs: dict[str, Any], options: dict[str, Any]) -> Outputs:
    """What a function gives."""
    section, name = function.split(".")
    if section == "advantages":
        return ESTIMATORS[name](**inputs, **options)
    if section == "losses":
        moving, loss = LOSSES[name]
        return differentiated(loss, moving, inputs, options)
    if section == "kl":
        tokens = kl_tokens(inputs["logprobs"], inputs["logprobs"], name=name, **_but(inputs, "logprobs"), **options)
        total = differentiated(_kl_sum, ("logprobs",), inputs, {"name": name, **options})
        return {"values": tokens, "gradient": total["gradient"]}
    return OTHERS[name](**inputs, **options)


def _but(mapping: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in names}


# --- small tools ----------------------------------------------------------------------------------------------------


def mean(xs: list[float]) -> float:
    return float(sum(map(Fraction, xs)) / len(xs)) if xs else 0.0


def variance(xs: list[float], kind: str) -> float:
    if len(xs) < 2:
        return 0.0
    middle = sum(map(Fraction, xs)) / len(xs)
    return float(sum((Fraction(x) - middle) ** 2 for x in xs) / (len(xs) - (kind == "sample")))


def deviation(xs: list[float], kind: str) -> float:
    return math.sqrt(variance(xs, kind))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ones(rows: Rows) -> Rows:
    return [[1] * len(row) for row in rows]


def counted(rows: Rows, mask: Rows) -> list[Any]:
    return [x for row, keep in zip(rows, mask, strict=True) for x, m in zip(row, keep, strict=True) if m]


def by_token(rule: Callable[[int, int], float], mask: Rows) -> Rows:
    """A number for each token that counts, 0 for the others."""
    return [[rule(i, t) if m else 0.0 for t, m in enumerate(row)] for i, row in enumerate(mask)]


def on_tokens(value: Any, i: int, t: int) -> float:
    """A number of a token, or of its row."""
    return value[i][t] if isinstance(value[i], list) else value[i]


def whitened(rows: Rows, mask: Rows, std: str, eps: float, eps_in: str = "variance") -> Rows:
    unmasked = counted(rows, mask)
    if len(unmasked) < 2 or min(unmasked) == max(unmasked):
        return by_token(lambda i, t: 0.0, mask)
    middle, spread = mean(unmasked), variance(unmasked, std)
    under = {"variance": math.sqrt(spread + eps), "std": math.sqrt(spread) + eps, "floor": math.sqrt(max(spread, eps))}
    return by_token(lambda i, t: (rows[i][t] - middle) / under[eps_in], mask)


def differentiated(
    loss: Callable[..., float], moving: tuple[str, ...], inputs: dict[str, Any], options: dict[str, Any]
) -> Outputs:
    """Value, and slope by each entry of the moving arguments: a difference quotient of fourth order."""
    frozen = {name: inputs[name] for name in moving}

    def at(name: str, path: tuple[int, ...], step: float) -> float:
        moved = [list(row) if isinstance(row, list) else row for row in inputs[name]]
        place = moved
        for index in path[:-1]:
            place[index] = list(place[index])
            place = place[index]
        place[path[-1]] += step
        return loss(**{**inputs, name: moved}, frozen=frozen, **options)

    def slope(name: str, path: tuple[int, ...], value: Any) -> Any:
        if isinstance(value, list):
            return [slope(name, (*path, k), item) for k, item in enumerate(value)]
        if value is None:
            return 0.0  # nobody reads it
        h = 1e-3
        points = {k: at(name, path, k * h) for k in (-3, -2, -1, 1, 2, 3)}
        # of sixth order: the rest is of the order of h^6, below rounding
        nearest, far, farther = (points[k] - points[-k] for k in (1, 2, 3))
        return (45 * nearest - 9 * far + farther) / (60 * h)

    value = loss(**inputs, frozen=frozen, **options)
    return {"value": value, "gradient": {name: slope(name, (), inputs[name]) for name in moving}}


# --- estimators that compare rows -----------------------------------------------------------------------------------


class Runs(list[float]):
    """The rewards of a group's runs, and in `rows` those of the rows of each."""

    rows: list[list[float]]

    def spread(self, std: str) -> float:
        """The deviation: each run adds the mean of its rows' squares."""
        if min(map(min, self.rows)) == max(map(max, self.rows)):
            return 0.0
        middle = mean(self)
        squares = [mean([(r - middle) ** 2 for r in of_run]) for of_run in self.rows]
        return math.sqrt(sum(squares) / (len(squares) - (std == "sample")))


def known_runs(rewards: list[Any], groups: list[Any], runs: list[Any] | None) -> dict[Any, Runs]:
    """For each group the rewards of its runs, each run once, as the mean over its rows."""
    members_by_group: dict[Any, dict[Any, list[float]]] = {}
    for i, (r, g) in enumerate(zip(rewards, groups, strict=True)):
        of_run = members_by_group.setdefault(g, {}).setdefault(i if runs is None else runs[i], [])
        if r is not None:
            of_run.append(r)
    runs_by_group = {}
    for g, members in members_by_group.items():
        runs_by_group[g] = Runs(mean(of_run) for of_run in members.values() if of_run)
        runs_by_group[g].rows = [of_run for of_run in members.values() if of_run]
    return runs_by_group


def scored(scores: list[float], mask: Rows | None) -> Outputs:
    if mask is None:
        return {"advantages": scores}
    return {"advantages": by_token(lambda i, t: scores[i], mask)}


def by_group(
    rewards: list[Any],
    groups: list[Any],
    mask: Rows | None,
    runs: list[Any] | None,
    singleton: str,
    score: Callable[[float, list[float]], float],
) -> Outputs:
    """`score` of a reward among its group's; 0 without a reward; alone 0 or the reward."""
    members = known_runs(rewards, groups, runs)
    scores = []
    for r, g in zip(rewards, groups, strict=True):
        if r is None:
            scores.append(0.0)
        elif len(members[g]) == 1:
            scores.append(r if singleton == "raw" else 0.0)
        else:
            scores.append(score(r, members[g]))
    return scored(scores, mask)


def over(off: float, divisor: float) -> float:
    return 0.0 if off == 0 else off / divisor


def grpo(rewards, groups, mask=None, runs=None, *, std="sample", eps=1e-6, level="group", singleton="zero"):
    everyone = [r for xs in known_runs(rewards, groups, runs).values() for r in xs]

    def score(r, xs):
        return over(r - mean(xs), (xs.spread(std) if level == "group" else deviation(everyone, std)) + eps)

    return by_group(rewards, groups, mask, runs, singleton, score)


def dr_grpo(rewards, groups, mask=None, runs=None, *, singleton="zero"):
    return by_group(rewards, groups, mask, runs, singleton, lambda r, xs: r - mean(xs))


def rloo(rewards, groups, mask=None, runs=None, *, singleton="zero"):
    names = list(range(len(rewards))) if runs is None else runs
    scores = []
    for r, g, run in zip(rewards, groups, names, strict=True):
        apart = [
            (x, u) for x, h, u in zip(rewards, groups, names, strict=True) if h == g and u != run and x is not None
        ]
        others = [mean([x for x, u in apart if u == other]) for other in dict.fromkeys(u for _, u in apart)]
        lone = (r or 0.0) if singleton == "raw" else 0.0
        scores.append(0.0 if r is None else r - mean(others) if others else lone)
    return scored(scores, mask)


def opmd(rewards, groups, mask=None, runs=None, *, baseline="mean", tau=1.0, singleton="zero"):
    def score(r, xs):
        if baseline == "mean" or min(xs) == max(xs):
            return r - mean(xs)
        top = max(xs)
        return r - (top + tau * math.log(sum(math.exp((x - top) / tau) for x in xs) / len(xs)))

    return by_group(rewards, groups, mask, runs, singleton, score)


def asymre(rewards, groups, mask=None, runs=None, *, shift=-0.1, singleton="zero"):
    return by_group(rewards, groups, mask, runs, singleton, lambda r, xs: r - mean(xs) - shift)


def rec(rewards, groups, mask=None, runs=None, *, normalize=False, std="population", eps=1e-6, singleton="zero"):
    def score(r, xs):
        return over(r - mean(xs), xs.spread(std) + eps) if normalize else r - mean(xs)

    return by_group(rewards, groups, mask, runs, singleton, score)


def cpgd(
    rewards,
    groups,
    mask=None,
    runs=None,
    *,
    weight="std",
    weight_clip=3.0,
    weight_constant=1.0,
    std="population",
    eps=1e-6,
    singleton="zero",
):
    every = known_runs(rewards, groups, runs).values()
    differ = [xs for xs in every if len(xs) > 1 and xs.spread("sample") > 0]

    def score(r, xs):
        off = r - mean(xs)
        if weight == "std":
            return over(off, xs.spread(std) + eps)
        if weight == "clip_filter_like":
            return off * (min(len(every) / len(differ), weight_clip) if xs.spread("sample") > 0 else weight_constant)
        return off

    return by_group(rewards, groups, mask, runs, singleton, score)


def pass_at_k(rewards, groups, mask=None, runs=None, *, k=4, correct=0.0):
    def score(r, xs):
        n, wrong = len(xs), sum(x <= correct for x in xs)
        if n < k:
            return 0.0
        chance = 1 - math.comb(wrong, k) / math.comb(n, k)
        if chance in (0, 1):
            return 0.0
        # among the sets of k that hold this sample, the share that passes
        passes = 1.0 if r > correct else 1 - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
        return (passes - chance) / math.sqrt(chance * (1 - chance))

    return by_group(rewards, groups, mask, runs, "zero", score)


def step_wise_grpo(
    rewards, groups, runs, steps, mask=None, *, step_norm=False, std="sample", eps=1e-6, level="group", singleton="zero"
):
    keys = list(zip(groups, runs, strict=True))
    last = {key: max(s for k, s in zip(keys, steps, strict=True) if k == key) for key in keys}
    final = {k: r for k, s, r in zip(keys, steps, rewards, strict=True) if s == last[k]}
    runs_of = list(final)
    options = {"std": std, "eps": eps, "level": level, "singleton": singleton}
    scores = grpo([final[k] for k in runs_of], [k[0] for k in runs_of], **options)["advantages"]
    by_run = dict(zip(runs_of, scores, strict=True))
    return scored([by_run[k] / (keys.count(k) if step_norm else 1) for k in keys], mask)


def gigpo(
    step_rewards,
    groups,
    runs,
    steps,
    states,
    mask=None,
    *,
    omega=1.0,
    gamma=1.0,
    normalize="none",
    std="sample",
    eps=1e-6,
    singleton="zero",
):
    keys = list(zip(groups, runs, strict=True))
    rewards_of_steps = [0.0 if r is None else r for r in step_rewards]
    totals: dict[Any, float] = {}
    to_go = [0.0] * len(keys)
    for i, key in enumerate(keys):
        totals[key] = totals.get(key, 0.0) + rewards_of_steps[i]
        later = [(steps[j], j) for j in range(len(keys)) if keys[j] == key and steps[j] >= steps[i]]
        to_go[i] = sum(gamma**rank * rewards_of_steps[j] for rank, (_, j) in enumerate(sorted(later)))
    normal = (lambda v, g, s: grpo(v, g, std=std, eps=eps, singleton=s)) if normalize == "std" else None
    plain = normal or (lambda v, g, s: dr_grpo(v, g, singleton=s))
    of_runs = plain(list(totals.values()), [k[0] for k in totals], singleton)["advantages"]
    by_run = dict(zip(totals, of_runs, strict=True))
    anchors = [(g, s) if s is not None else (g, s, i) for i, (g, s) in enumerate(zip(groups, states, strict=True))]
    by_state = plain(to_go, anchors, "zero")["advantages"]
    return scored([by_run[k] + omega * a for k, a in zip(keys, by_state, strict=True)], mask)


ESTIMATORS |= {f.__name__: f for f in (grpo, dr_grpo, rloo, opmd, asymre, rec, cpgd, pass_at_k, step_wise_grpo, gigpo)}


# --- estimators over time -------------------------------------------------------------------------------------------


def over_time(
    token_rewards, rewards, mask, response, observations, off_action_rewards, slope, unknown, whiten, std, eps, clip
):
    """`slope(row, places, reward)` along each row; then what is missing, whitened and clipped."""
    alone = mask is None and token_rewards is None
    if mask is None:
        mask = [[1]] * len(rewards) if alone else ones(token_rewards)
    results, left = [], []
    for i, keep in enumerate(mask):
        actions = [t for t, m in enumerate(keep) if m]
        inside = range(actions[0], actions[-1] + 1) if actions else range(0)
        spoken = [t for t in range(len(keep)) if response[i][t]] if response is not None else list(inside)
        places = actions if observations == "skip" else spoken
        taken = places if observations == "through" else actions
        reward = [0.0] * len(keep)
        row_rewards = token_rewards[i] if token_rewards is not None else reward
        missing = rewards is not None and rewards[i] is None
        missing = missing or any(row_rewards[t] is None for t in taken)
        for t, r in enumerate(row_rewards):
            if r is None:
                continue
            if t in taken:
                reward[t] += r
            elif off_action_rewards == "carry" and actions:
                reward[max((a for a in actions if a < t), default=actions[0])] += r
        if rewards is not None and rewards[i] is not None and actions:
            reward[actions[-1]] += rewards[i]
        results.append(slope(i, places, reward, keep))
        left.append(missing)
    advantages = by_token(lambda i, t: 0.0 if left[i] else results[i][0][t], mask)
    returns = by_token(lambda i, t: unknown(i, t) if left[i] else results[i][1][t], mask)
    if whiten:
        kept_mask = [[0] * len(row) if is_left_out else row for row, is_left_out in zip(mask, left, strict=True)]
        advantages = whitened(advantages, kept_mask, std, eps)
    if clip is not None:
        advantages = by_token(lambda i, t: max(-clip, min(clip, advantages[i][t])), mask)
    if alone:
        return {"advantages": [row[0] for row in advantages], "returns": [row[0] for row in returns]}
    return {"advantages": advantages, "returns": returns}


def gae(
    token_rewards=None,
    values=None,
    mask=None,
    response=None,
    rewards=None,
    *,
    gamma=1.0,
    lam=1.0,
    observations="skip",
    off_action_rewards="drop",
    whiten=False,
    std="sample",
    eps=1e-8,
    clip=None,
):
    if mask is None:
        mask = ones(values)

    def slope(i, places, reward, keep):
        advantages = [0.0] * len(keep)
        value = {t: 0.0 if observations == "zeroed" and not keep[t] else values[i][t] for t in places}
        for n, t in enumerate(places):  # from the definition: the sum of all later differences
            for distance, u in enumerate(places[n:]):
                after = value[places[n + distance + 1]] if n + distance + 1 < len(places) else 0.0
                advantages[t] += (gamma * lam) ** distance * (reward[u] + gamma * after - value[u])
        return advantages, [a + value.get(t, 0.0) for t, a in enumerate(advantages)]

    common = (observations, off_action_rewards, slope, lambda i, t: values[i][t], whiten, std, eps, clip)
    return over_time(token_rewards, rewards, mask, response, *common)


def ppo_advantage(token_rewards=None, values=None, mask=None, response=None, rewards=None, *, whiten=True, **options):
    return gae(token_rewards, values, mask, response, rewards, whiten=whiten, **options)


def to_go(gamma):
    def slope(i, places, reward, keep):
        sums = [0.0] * len(keep)
        for n, t in enumerate(places):
            sums[t] = sum(gamma**distance * reward[u] for distance, u in enumerate(places[n:]))
        return sums, sums

    return slope


def reinforce(
    token_rewards=None,
    rewards=None,
    mask=None,
    response=None,
    *,
    gamma=1.0,
    observations="skip",
    off_action_rewards="drop",
    whiten=False,
    std="sample",
    eps=1e-8,
    clip=None,
):
    common = (observations, off_action_rewards, to_go(gamma), lambda i, t: 0.0, whiten, std, eps, clip)
    return over_time(token_rewards, rewards, mask, response, *common)


def reinforce_plus_plus(token_rewards=None, rewards=None, mask=None, response=None, *, whiten=True, **options):
    return reinforce(token_rewards, rewards, mask, response, whiten=whiten, **options)


def reinforce_plus_plus_baseline(
    token_rewards=None,
    rewards=None,
    groups=None,
    mask=None,
    response=None,
    runs=None,
    *,
    singleton="zero",
    whiten=True,
    **options,
):
    scores = dr_grpo(rewards, groups, None, runs, singleton=singleton)["advantages"]
    centered = [None if r is None else a for r, a in zip(rewards, scores, strict=True)]
    return reinforce(token_rewards, centered, mask, response, whiten=whiten, **options)


def remax(
    token_rewards=None,
    baselines=None,
    mask=None,
    response=None,
    rewards=None,
    *,
    observations="skip",
    off_action_rewards="drop",
    whiten=False,
    std="sample",
    eps=1e-8,
    clip=None,
):
    if mask is None:
        mask = ones(token_rewards)
    with_baseline = [
        None if b is None else 0.0 for b in baselines
    ]  # a missing baseline leaves a row out as a reward does
    if rewards is not None:
        with_baseline = [None if r is None or b is None else r for r, b in zip(rewards, baselines, strict=True)]

    def slope(i, places, reward, keep):
        returns = to_go(1.0)(i, places, reward, keep)[0]
        return [r - (baselines[i] or 0.0) for r in returns], returns

    common = (observations, off_action_rewards, slope, lambda i, t: 0.0, whiten, std, eps, clip)
    return over_time(token_rewards, with_baseline, mask, response, *common)


# --- estimators of single tokens ------------------------------------------------------------------------------------


def on_policy_distill(old_logprobs, teacher_logprobs, mask=None, *, coef=1.0):
    mask = mask or ones(old_logprobs)
    return {"advantages": by_token(lambda i, t: coef * (teacher_logprobs[i][t] - old_logprobs[i][t]), mask)}


def jsd(old_logprobs, teacher_logprobs, mask=None, *, beta=0.5, coef=1.0, normalize=True):
    def score(i, t):
        p, q = math.exp(old_logprobs[i][t]), math.exp(teacher_logprobs[i][t])
        if normalize and beta == 0:
            return coef * (q / p - 1)
        if normalize and beta == 1:
            return coef * math.log(q / p)
        slope = (1 - beta) * math.log(p / (beta * q + (1 - beta) * p))  # of the divergence, by p
        return -coef * slope / (beta * (1 - beta) if normalize else 1)

    return {"advantages": by_token(score, mask or ones(old_logprobs))}


def clip_b(
    rewards, groups, mask, old_logprobs, entropy, runs=None, *, mu=2.5, std="sample", eps=1e-6, singleton="zero"
):
    advantages = grpo(rewards, groups, mask, runs, std=std, eps=eps, singleton=singleton)["advantages"]
    s = by_token(lambda i, t: math.exp(old_logprobs[i][t]) * (entropy[i][t] + old_logprobs[i][t]), mask)
    middle, spread = mean(counted(s, mask)), deviation(counted(s, mask), "population")
    keep = by_token(lambda i, t: not (advantages[i][t] < 0 and s[i][t] - middle < -mu * spread), mask)
    return {"advantages": advantages, "mask": [[int(x) for x in row] for row in keep]}


def clip_v(
    rewards,
    groups,
    mask,
    old_logprobs,
    entropy,
    necs,
    runs=None,
    *,
    mu=8.5,
    max_frac=1e-4,
    centered=True,
    zero_advantage="keep",
    std="sample",
    eps=1e-6,
    singleton="zero",
):
    advantages = grpo(rewards, groups, mask, runs, std=std, eps=eps, singleton=singleton)["advantages"]
    d = by_token(lambda i, t: necs[i][t] - math.exp(old_logprobs[i][t]) * (entropy[i][t] + old_logprobs[i][t]), mask)
    unmasked = counted(d, mask)
    bound = mu * deviation(unmasked, "population") + (mean(unmasked) if centered else 0.0)
    places = [(i, t) for i, row in enumerate(mask) for t, m in enumerate(row) if m]
    candidates = [(i, t) for i, t in places if advantages[i][t] < 0 and d[i][t] > bound]
    limit = max(int(max_frac * len(places)), 1) if max_frac > 0 else 0
    if len(candidates) > limit:
        edge = sorted((d[i][t] for i, t in candidates), reverse=True)[limit]
        candidates = [(i, t) for i, t in candidates if d[i][t] > edge]
    if zero_advantage == "uncapped":
        candidates += [(i, t) for i, t in places if advantages[i][t] == 0 and d[i][t] > bound]
    keep = [[int(bool(m) and (i, t) not in candidates) for t, m in enumerate(row)] for i, row in enumerate(mask)]
    return {"advantages": advantages, "mask": keep}


ESTIMATORS |= {
    f.__name__: f for f in (reinforce, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, on_policy_distill, jsd)
}
ESTIMATORS |= {"gae": gae, "ppo": ppo_advantage, "clip_b": clip_b, "clip_v": clip_v}


# --- divergences ----------------------------------------------------------------------------------------------------


def divergence(
    name, x, x0, ref, old=None, *, log_ratio_clamp=20.0, bound=10.0, cap=2.0, detach_ratio=False, **unknown
) -> float:
    if unknown:
        raise TypeError(f"options {list(unknown)}")
    d = x - ref
    if name == "low_var_kl":
        d = clip(d, -log_ratio_clamp, log_ratio_clamp)
    k3 = math.exp(-d) - 1 + d if abs(d) < 500 else math.inf
    if name == "corrected_k3" and old is not None:
        return min(math.exp((x0 if detach_ratio else x) - old), cap) * k3
    return {"none": 0.0, "k1": d, "k2": d * d / 2, "abs": abs(d), "low_var_kl": clip(k3, -bound, bound)}.get(name, k3)


def kl_tokens(logprobs, frozen, ref_logprobs, mask=None, old_logprobs=None, *, name, **options) -> Rows:
    def at(i, t):
        old = None if old_logprobs is None else old_logprobs[i][t]
        return divergence(name, logprobs[i][t], frozen[i][t], ref_logprobs[i][t], old, **options)

    return by_token(at, mask or ones(logprobs))


def _kl_sum(logprobs, frozen, **rest) -> float:
    return sum(map(sum, kl_tokens(logprobs, frozen["logprobs"], **rest)))


# --- losses ---------------------------------------------------------------------------------------------------------


def aggregate(values, mask=None, *, mode="token-mean", norm=None, denominators=None, weights=None) -> float:
    mask = mask or ones(values)
    if None in counted(values, mask):
        return math.nan
    tokens = by_token(lambda i, t: values[i][t] * (1.0 if weights is None else on_tokens(weights, i, t)), mask)
    counts = [sum(bool(m) for m in row) for row in mask]
    count = max(sum(counts) if denominators is None else denominators["tokens"], 1)
    rows = max(sum(c > 0 for c in counts) if denominators is None else denominators["sequences"], 1)
    if mode == "token-mean":
        return sum(map(sum, tokens)) / count
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / c for row, c in zip(tokens, counts, strict=True) if c) / rows
    return sum(map(sum, tokens)) / {"seq-mean-token-sum": rows, "seq-mean-token-sum-norm": norm}[mode]


def policy(term, mode_by_default, moving=("new_logprobs",)):
    """A loss that is a `term` of each token, put together by `aggregate`."""

    def loss(
        new_logprobs,
        frozen,
        old_logprobs=None,
        advantages=None,
        mask=None,
        *,
        mode=None,
        norm=None,
        denominators=None,
        weights=None,
        **options,
    ):
        mask, constant = mask or ones(new_logprobs), frozen["new_logprobs"]

        def ratios(i, source):
            if old_logprobs is None:
                return []
            return [source[i][t] - old_logprobs[i][t] for t, m in enumerate(mask[i]) if m]

        def at(i, t):
            old = None if old_logprobs is None else old_logprobs[i][t]
            a = None if advantages is None else on_tokens(advantages, i, t)
            return term(
                new_logprobs[i][t], constant[i][t], old, a, ratios(i, constant), ratios(i, new_logprobs), **options
            )

        chosen = mode or (mode_by_default(options) if callable(mode_by_default) else mode_by_default)
        return aggregate(by_token(at, mask), mask, mode=chosen, norm=norm, denominators=denominators, weights=weights)

    return moving, loss


def pessimist(a, r, low, high):
    return max(-a * r, -a * clip(r, low, high))


def ppo(
    x,
    x0,
    old,
    a,
    row0,
    row,
    *,
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=3.0,
    log_ratio_clamp=20.0,
    sequence_delta=None,
    policy_gradient=False,
):
    r = math.exp(x - x0) if policy_gradient else math.exp(clip(x - old, -log_ratio_clamp, log_ratio_clamp))
    loss = pessimist(a, r, 1 - clip_low, 1 + clip_high)
    if dual_clip is not None and a < 0:
        loss = min(loss, -a * dual_clip)
    clamped = [-clip(d, -log_ratio_clamp, log_ratio_clamp) for d in row0]
    return 0.0 if sequence_delta is not None and a < 0 and sum(clamped) / len(clamped) > sequence_delta else loss


def gspo(x, x0, old, a, row0, row, *, clip_low=3e-4, clip_high=4e-4, log_ratio_clamp=20.0):
    s = math.exp(clip(sum(row0) / len(row0), -log_ratio_clamp, log_ratio_clamp)) * math.exp(x - x0)
    return pessimist(a, s, 1 - clip_low, 1 + clip_high)


def gmpo(x, x0, old, a, row0, row, *, clip_low=0.4, clip_high=0.4, log_ratio_clamp=20.0):
    clamped = [clip(d, -log_ratio_clamp, log_ratio_clamp) for d in row]
    clamped = [min(d, clip_high) if a > 0 else max(d, -clip_low) for d in clamped]
    return -a * math.exp(sum(clamped) / len(clamped))  # the loss of the row, on each of its tokens


def sapo(x, x0, old, a, row0, row, *, tau_pos=1.0, tau_neg=1.05, log_ratio_clamp=20.0, detach_gate=False):
    tau = tau_pos if a > 0 else tau_neg
    r = math.exp(clip((x0 if detach_gate else x) - old, -log_ratio_clamp, log_ratio_clamp))
    gate = 4 / tau / (1 + math.exp(-tau * (r - 1)))
    return -a * gate * (x if detach_gate else 1.0)


def cpg(x, x0, old, a, row0, row, *, clip_low=0.2, clip_high=0.2):
    return -a * (min(x, old + math.log(1 + clip_high)) if a > 0 else max(x, old + math.log(1 - clip_low)))


def importance_sampling(x, x0, old, a, row0, row, *, log_ratio_clamp=20.0):
    return -a * math.exp(clip(x - old, -log_ratio_clamp, log_ratio_clamp))


def cispo(
    x,
    x0,
    old,
    a,
    row0,
    row,
    *,
    clip_low=1.0,
    clip_high=0.28,
    mask_clip=False,
    mask_clip_low=1.0,
    mask_clip_high=0.28,
    log_ratio_clamp=20.0,
):
    r = math.exp(clip(x0 - old, -log_ratio_clamp, log_ratio_clamp))
    if mask_clip and ((a > 0 and r > 1 + mask_clip_high) or (a < 0 and r < 1 - mask_clip_low)):
        return 0.0
    return -a * clip(r, 1 - clip_low, 1 + clip_high) * x


def topr(x, x0, old, a, row0, row, *, threshold=0.0, level="token", log_ratio_clamp=20.0):
    d = clip(x0 - old if level == "token" else sum(row0), -log_ratio_clamp, log_ratio_clamp)
    return -a * (1.0 if a > threshold else min(math.exp(d), 1.0)) * x


def opmd_loss(x, x0, old, a, row0, row, *, tau=1.0):
    return -a * x / (1 + tau)


def sppo(x, x0, old, a, row0, row, *, epsilon=0.3):
    return -a * (x - old) if 1 / (1 + epsilon) <= math.exp(x0 - old) <= 1 + epsilon else 0.0


def rec_loss(
    x,
    x0,
    old,
    a,
    row0,
    row,
    *,
    clip_low=0.2,
    clip_high=0.2,
    ring_low=0.6,
    ring_high=2.0,
    clip_mode="none",
    weight="none",
    regularizer="none",
    regularizer_coef=0.0,
    temperature=1.0,
    log_ratio_clamp=20.0,
):
    r = math.exp(clip(x0 - old, -log_ratio_clamp, log_ratio_clamp))
    s = math.exp(clip(sum(row0) / len(row0), -log_ratio_clamp, log_ratio_clamp))
    seen = s if clip_mode == "gspo-one-side" else r
    above, below = seen >= 1 - clip_low, seen <= 1 + clip_high
    inside = {
        "none": True,
        "two-side": above and below,
        "ring": (above and below) or (a >= 0 and r <= 1 - ring_low) or (a <= 0 and r >= 1 + ring_high),
    }.get(clip_mode, (a >= 0 and below) or (a <= 0 and above))
    w = {"none": 1.0, "importance_sampling": r, "gspo_importance_sampling": s}.get(weight, math.exp(a / temperature))
    loss = -w * a * x if inside else 0.0
    return loss + regularizer_coef * {"none": 0.0, "k2": (x - old) ** 2, "forward-kl": -x}[regularizer]


def sft(x, x0, old, a, row0, row):
    return -x


def sft_is(x, x0, old, a, row0, row):
    return -math.exp(x0) * x


def sft_phi(x, x0, old, a, row0, row, *, cutoff=1.0):
    return -math.exp(x0) * (1 - math.exp(x0)) * min(x, math.log(cutoff))


def rec_mode(options):
    return "seq-mean-token-mean" if options.get("clip_mode") == "gspo-one-side" else "token-mean"


def value_loss(values, frozen, returns, mask=None, old_values=None, *, clip=0.2, mode="seq-mean-token-mean", **scaling):
    def at(i, t):
        v, r = values[i][t], returns[i][t]
        if clip is None:
            return (v - r) ** 2 / 2
        clipped = old_values[i][t] + max(-clip, min(clip, v - old_values[i][t]))
        return max((v - r) ** 2, (clipped - r) ** 2) / 2

    mask = mask or ones(values)
    return aggregate(by_token(at, mask), mask, mode=mode, **scaling)


def entropy_loss(entropy, frozen, mask=None, *, coef=0.0, **scaling):
    return -coef * aggregate(entropy, mask, **scaling)


def kl_loss(
    new_logprobs,
    frozen,
    ref_logprobs,
    mask=None,
    old_logprobs=None,
    *,
    estimator="k2",
    coef=0.001,
    estimator_options=None,
    **scaling,
):
    tokens = kl_tokens(
        new_logprobs,
        frozen["new_logprobs"],
        ref_logprobs,
        mask,
        old_logprobs,
        name=estimator,
        **(estimator_options or {}),
    )
    return coef * aggregate(tokens, mask, **scaling)


def mix(new_logprobs, frozen, old_logprobs, advantages, expert_mask, mask=None, *, mu=0.1, expert="sft", **options):
    """(1 - mu) times PPO over usual rows, mu times the expert's loss over the others."""
    mask = mask or ones(new_logprobs)
    scale = [options.pop(name, 1.0) for name in ("usual_scale", "expert_scale")]
    cutoff = {"cutoff": options.pop("cutoff", 1.0)} if expert == "sft_phi" else {}
    scaling = {name: options.pop(name) for name in ("mode", "norm") if name in options}

    def rows(flag):
        return [row if e == flag else [0] * len(row) for row, e in zip(mask, expert_mask, strict=True)]

    usual = LOSSES["ppo"][1](new_logprobs, frozen, old_logprobs, advantages, rows(False), **scaling, **options)
    other = LOSSES[expert][1](new_logprobs, frozen, None, None, rows(True), **scaling, **cutoff)
    return (1 - mu) * scale[0] * usual + mu * scale[1] * other


def mix_chord(
    new_logprobs,
    frozen,
    old_logprobs,
    advantages,
    expert_mask,
    step,
    mask=None,
    *,
    warmup=0,
    decay=0,
    peak=0.1,
    valley=0.1,
    phi=True,
    **options,
):
    now = step[0] if isinstance(step, list) else step
    mu = valley
    if now < warmup:
        mu = peak * now / warmup
    elif now < warmup + decay:
        mu = valley + (peak - valley) * 0.5 * (1 + math.cos(math.pi * (now - warmup) / decay))
    kind = "sft_phi" if phi else "sft"
    return mix(new_logprobs, frozen, old_logprobs, advantages, expert_mask, mask, mu=mu, expert=kind, **options)


def preference(logits, beta, label_smoothing, variant, denominators):
    def pair_loss(z):
        if variant == "ipo":
            return (z - 1 / (2 * beta)) ** 2
        if variant == "hinge":
            return max(0.0, 1 - beta * z)
        softplus = [max(y, 0.0) + math.log1p(math.exp(-abs(y))) for y in (-beta * z, beta * z)]
        return (1 - label_smoothing) * softplus[0] + label_smoothing * softplus[1]

    return sum(map(pair_loss, logits)) / (len(logits) if denominators is None else denominators)


def dpo(
    new_logprobs,
    frozen,
    pairs,
    chosen,
    ref_logprobs=None,
    mask=None,
    *,
    beta=0.1,
    label_smoothing=0.0,
    variant="sigmoid",
    reference_free=False,
    denominators=None,
):
    mask = mask or ones(new_logprobs)

    def of(row):
        places = [t for t, m in enumerate(mask[row]) if m]
        ref = 0.0 if reference_free else sum(ref_logprobs[row][t] for t in places)
        return sum(new_logprobs[row][t] for t in places) - ref

    logits = []
    for name in dict.fromkeys(pairs):
        rows = {chosen[row]: row for row in range(len(pairs)) if pairs[row] == name}
        if all(any(mask[row]) for row in rows.values()):
            logits.append(of(rows[True]) - of(rows[False]))
    return preference(logits, beta, label_smoothing, variant, denominators)


def dpo_sums(
    chosen_logprobs,
    rejected_logprobs,
    frozen,
    ref_chosen_logprobs=None,
    ref_rejected_logprobs=None,
    *,
    beta=0.1,
    label_smoothing=0.0,
    variant="sigmoid",
    reference_free=False,
    denominators=None,
):
    free = [0.0] * len(chosen_logprobs)
    refs = (free, free) if reference_free else (ref_chosen_logprobs, ref_rejected_logprobs)
    each_pair = zip(chosen_logprobs, rejected_logprobs, *refs, strict=True)
    return preference([c - r - (rc - rr) for c, r, rc, rr in each_pair], beta, label_smoothing, variant, denominators)


BY_ROW, BY_TOKEN = "seq-mean-token-mean", "token-mean"
LOSSES |= {
    "ppo": policy(ppo, BY_TOKEN),
    "gspo": policy(gspo, BY_ROW),
    "gmpo": policy(gmpo, BY_ROW),
    "sapo": policy(sapo, BY_TOKEN),
    "cpg": policy(cpg, BY_ROW),
    "importance_sampling": policy(importance_sampling, BY_TOKEN),
    "cispo": policy(cispo, BY_TOKEN),
    "topr": policy(topr, BY_TOKEN),
    "opmd": policy(opmd_loss, BY_TOKEN),
    "sppo": policy(sppo, BY_TOKEN),
    "rec": policy(rec_loss, rec_mode),
    "sft": policy(sft, BY_TOKEN),
    "sft_is": policy(sft_is, BY_TOKEN),
    "sft_phi": policy(sft_phi, BY_TOKEN),
    "value": (("values",), value_loss),
    "entropy": (("entropy",), entropy_loss),
    "kl": (("new_logprobs",), kl_loss),
    "mix": (("new_logprobs",), mix),
    "mix_chord": (("new_logprobs",), mix_chord),
    "dpo": (("new_logprobs",), dpo),
    "dpo_sums": (("chosen_logprobs", "rejected_logprobs"), dpo_sums),
}


# --- the rest -------------------------------------------------------------------------------------------------------


def whiten(values, mask=None, *, std="sample", eps=1e-8, eps_in="variance", shift_mean=True, scale=True):
    mask = mask or ones(values)
    middle = mean(counted(values, mask))
    normalized = (
        whitened(values, mask, std, eps, eps_in) if scale else by_token(lambda i, t: values[i][t] - middle, mask)
    )
    return {"values": by_token(lambda i, t: normalized[i][t] + (0.0 if shift_mean else middle), mask)}


def high_entropy_mask(entropy, mask=None, ratio=0.2, *, over="sample"):
    mask = mask or ones(entropy)
    if not 0 < ratio < 1:
        return {"mask": mask}
    places = [[(i, t) for t, m in enumerate(row) if m] for i, row in enumerate(mask)]
    marked = set()
    for part in places if over == "sample" else [[place for row in places for place in row]]:
        key = {(i, t): -math.inf if entropy[i][t] is None else entropy[i][t] for i, t in part}
        best = sorted(part, key=lambda place: (-key[place], place))
        marked |= set(best[: max(1, math.floor(len(part) * ratio))])
    return {"mask": [[int((i, t) in marked) for t in range(len(row))] for i, row in enumerate(mask)]}


def clip_filter_like_weight_func(rewards, clip_filter_like_weight_clip_eps=3.0, lamda=1.0):
    constant = [min(row) == max(row) for row in rewards]
    if all(constant):
        return {"weights": [[1.0] * len(row) for row in rewards]}
    factor = min(len(rewards) / (len(rewards) - sum(constant)), clip_filter_like_weight_clip_eps)
    return {"weights": [[lamda if c else factor] * len(row) for row, c in zip(rewards, constant, strict=True)]}


def overlong_penalty(lengths, *, max_length, buffer=1024, factor=1.0, bounded=True):
    def penalty(length):
        if length <= max_length - buffer:
            return 0.0
        falling = factor * (max_length - buffer - length) / buffer
        return max(falling, -factor) if bounded else falling

    return {"penalties": [penalty(length) for length in lengths]}


def importance_weights(
    old_logprobs,
    logprobs,
    mask=None,
    *,
    level="token",
    truncate=2.0,
    low=None,
    mask_outside=None,
    veto=None,
    log_clamp=20.0,
    normalize=False,
):
    mask = mask or ones(old_logprobs)
    off = by_token(lambda i, t: old_logprobs[i][t] - logprobs[i][t], mask)
    kept_mask, weights = [list(map(bool, row)) for row in mask], []
    for i, row in enumerate(mask):
        n = sum(map(bool, row))
        whole_row = sum(off[i]) / (1 if level == "sequence" else max(n, 1))
        exponents = [d if level == "token" else whole_row for d in off[i]]
        weights.append([math.exp(clip(e, -log_clamp, log_clamp)) for e in exponents])
        vetoed = veto is not None and any(m and d < math.log(veto) for d, m in zip(off[i], row, strict=True))
        for t, w in enumerate(weights[i]):
            outside = mask_outside is not None and not mask_outside[0] <= w <= mask_outside[1]
            kept_mask[i][t] = kept_mask[i][t] and not vetoed and not outside
    top, least = math.inf if truncate is None else truncate, 0.0 if low is None else low
    bounded = by_token(lambda i, t: clip(weights[i][t], least, top), kept_mask)
    if normalize:
        left = [counted([w], [m]) for w, m in zip(bounded, kept_mask, strict=True)]
        units = [w for row in left for w in (row if level == "token" else row[:1])]
        factor = len(units) / sum(units)
        bounded = by_token(lambda i, t: bounded[i][t] * factor, kept_mask)
    return {"weights": bounded, "mask": [[int(m) for m in row] for row in kept_mask]}


def diagnostics(old_logprobs, logprobs, mask=None):
    mask = mask or ones(old_logprobs)
    off = by_token(lambda i, t: old_logprobs[i][t] - logprobs[i][t], mask)
    d, rows = counted(off, mask), [counted([row], [m]) for row, m in zip(off, mask, strict=True) if any(m)]
    w, row_ratios = [math.exp(x) for x in d], [math.exp(sum(row)) for row in rows]

    def perplexity(source):
        return math.exp(-mean([mean(counted([s], [m])) for s, m in zip(source, mask, strict=True) if any(m)]))

    def size(ws):
        return sum(ws) ** 2 / (len(ws) * sum(x * x for x in ws))

    policy, engine = perplexity(old_logprobs), perplexity(logprobs)
    return {
        "kl": mean([-x for x in d]),
        "kl_k3": mean([math.exp(x) - 1 - x for x in d]),
        "chi2_token": mean([x * x for x in w]) - 1,
        "chi2_sequence": mean([x * x for x in row_ratios]) - 1,
        "ess_token": size(w),
        "ess_sequence": size(row_ratios),
        "log_diff_mean_abs": mean([abs(x) for x in d]),
        "log_diff_max_abs": max(abs(x) for x in d),
        "log_diff_std": deviation(d, "population"),
        "policy_perplexity": policy,
        "engine_perplexity": engine,
        "perplexity_ratio": policy / engine,
    }


def softmax(row, temperature):
    top = max(x for x in row if x is not None)
    powers = [0.0 if x is None else math.exp((x - top) / temperature) for x in row]
    return [p / math.fsum(powers) for p in powers]


def token_entropy(row, temperature):
    return -math.fsum(p * math.log(p) for p in softmax(row, temperature) if p > 0)


def from_logits(logits, labels, *, temperature=1.0):
    def total(logits, frozen, labels, temperature):
        return math.fsum(
            math.log(softmax(row, temperature)[y]) for row, y in zip(logits, labels, strict=True) if y is not None
        )

    chosen = [
        0.0 if y is None else math.log(softmax(row, temperature)[y]) for row, y in zip(logits, labels, strict=True)
    ]
    slopes = differentiated(total, ("logits",), {"logits": logits}, {"labels": labels, "temperature": temperature})
    entropies = [token_entropy(row, temperature) for row in logits]
    return {"logprobs": chosen, "entropy": entropies, "gradient": slopes["gradient"]}


def entropy_from_logits(logits, *, temperature=1.0):
    def total(logits, frozen):
        return math.fsum(token_entropy(row, temperature) for row in logits)

    slopes = differentiated(total, ("logits",), {"logits": logits}, {})
    return {"entropy": [token_entropy(row, temperature) for row in logits], "gradient": slopes["gradient"]}


OTHERS |= {f.__name__: f for f in (whiten, high_entropy_mask, clip_filter_like_weight_func, overlong_penalty)}
OTHERS |= {f.__name__: f for f in (importance_weights, diagnostics, from_logits, entropy_from_logits)}
OTHERS["aggregate"] = lambda **arguments: {"value": aggregate(**arguments)}
