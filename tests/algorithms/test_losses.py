"""Losses against references written with Python loops over rows and tokens, slopes derived by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.algorithms import losses
from rollbook.algorithms.losses import (
    LOSSES,
    chord_mu,
    cispo,
    cpg,
    dpo,
    dpo_sums,
    entropy_loss,
    gmpo,
    interleaved,
    mix,
    mix_chord,
    mix_denominators,
    ppo,
    rec,
    sapo,
    sft,
    topr,
    value_loss,
)
from rollbook.algorithms.losses.policy import CLIP_MODES, REGULARIZERS, WEIGHTS
from rollbook.batch.plan import Denominators
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows

NAMES = ("lp", "old", "adv", "ref")
Row = list[tuple[float, float, float, float]]
"""The tokens of a row that count: log p, log old, advantage, log ref."""
Found = list[tuple[float, float]]
"""The loss of each of these tokens, and its slope in the token's own log p, constants held."""


# --- random rows, and every way to lay them out -----------------------------------------------------------------------


class Batch:
    """Ragged rows with masks that have holes; some rows are empty, some have no token that counts."""

    def __init__(self, seed: int, rows: int | None = None) -> None:
        draw = random.Random(seed)
        self.draw = draw
        self.slots: list[list[tuple[float, ...]]] = []
        self.mask: list[list[bool]] = []
        for _ in range(draw.randint(1, 5) if rows is None else rows):
            length, share = draw.randint(0, 6), draw.choice([0.0, 0.5, 1.0, 1.0])
            advantage = draw.gauss(0, 1)
            spread = draw.choice([0.0, 0.5])
            ratio_spread = draw.choice([0.05, 0.3, 1.5])
            slots = []
            for _ in range(length):
                lp = -draw.expovariate(1) - 0.01
                slots.append(
                    (lp, lp + draw.gauss(0, ratio_spread), advantage + draw.gauss(0, spread), lp + draw.gauss(0, 1))
                )
            self.slots.append(slots)
            self.mask.append([draw.random() < share for _ in range(length)])

    def rows(self) -> list[Row]:
        """Only what counts, for the references."""
        pairs = zip(self.slots, self.mask, strict=True)
        return [[slot for slot, on in zip(slots, mask, strict=True) if on] for slots, mask in pairs]  # type: ignore[misc]

    def sub(self, rows: list[int]) -> Batch:
        part = Batch(0, 0)
        part.slots, part.mask = [self.slots[i] for i in rows], [self.mask[i] for i in rows]
        return part

    def lengths(self) -> list[int]:
        return [len(slots) for slots in self.slots]

    def padded(self, side: str, extra: int = 0) -> dict[str, torch.Tensor]:
        """Matrices with rubbish wherever the mask is False."""
        width = max(self.lengths(), default=0) + extra
        tensors = {name: torch.full((len(self.slots), width), math.nan, dtype=torch.float64) for name in NAMES}
        tensors["mask"] = torch.zeros(len(self.slots), width, dtype=torch.bool)
        for i, (slots, mask) in enumerate(zip(self.slots, self.mask, strict=True)):
            start = width - len(slots) if side == "left" else 0
            for j, (slot, on) in enumerate(zip(slots, mask, strict=True)):
                tensors["mask"][i, start + j] = on
                for name, value in zip(NAMES, slot, strict=True):
                    tensors[name][i, start + j] = value if on else math.inf
        return tensors

    def packed(self) -> dict[str, Any]:
        flat = [slot for slots in self.slots for slot in slots]
        table = torch.tensor(flat, dtype=torch.float64).reshape(-1, 4)
        tensors: dict[str, Any] = {name: table[:, k].clone() for k, name in enumerate(NAMES)}
        on_tokens = torch.tensor([on for mask in self.mask for on in mask], dtype=torch.bool)
        tensors["mask"] = Rows(on_tokens, self.lengths())
        for name in NAMES:
            tensors[name][~on_tokens] = math.nan
        tensors["adv"] = Rows(tensors["adv"], self.lengths())
        return tensors


def data_of(arrays: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments under every name that a loss may ask for, and the leaf that carries the gradient."""
    leaf = arrays["lp"].clone().requires_grad_()
    old, adv, ref = arrays["old"], arrays["adv"], arrays["ref"]
    data = {"new_logprobs": leaf, "old_logprobs": old, "advantages": adv, "ref_logprobs": ref, "mask": arrays["mask"]}
    return data | {"values": leaf, "returns": adv, "old_values": old, "entropy": leaf}, leaf


def grads_of(batch: Batch, leaf: torch.Tensor, mask: Any) -> list[list[float]]:
    """The gradient of each row's tokens that count; everywhere else it must be 0."""
    grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    if isinstance(mask, Rows):
        mask = mask.values
    assert (grad[~mask] == 0).all()
    slopes = grad[mask].tolist()  # in the order of rows, whatever the layout
    ends = list(itertools.accumulate(sum(row) for row in batch.mask))
    return [slopes[end - sum(row) : end] for end, row in zip(ends, batch.mask, strict=True)]


def layouts(batch: Batch) -> dict[str, dict[str, Any]]:
    return {
        "right": batch.padded("right"),
        "left, wider": batch.padded("left", extra=3),
        "packed": batch.packed(),
    }


def denominators(rows: list[Row]) -> Denominators:
    return Denominators(sum(map(len, rows)), sum(1 for row in rows if row), len(rows))


# --- references -------------------------------------------------------------------------------------------------------


def naive_ppo(
    row: Row, low=0.2, high=0.2, dual: float | None = 3.0, delta: float | None = None, plain: bool = False
) -> Found:
    terms = []
    distance = sum(old - lp for lp, old, *_ in row) / max(len(row), 1)
    for lp, old, a, _ in row:
        r = 1.0 if plain else math.exp(lp - old)
        value, slope = -a * r, -a * r
        if a > 0 and r > 1 + high:
            value, slope = -a * (1 + high), 0.0
        if a < 0 and r < 1 - low:
            value, slope = -a * (1 - low), 0.0
        if a < 0 and dual is not None and r > dual:
            value, slope = -a * dual, 0.0
        if delta is not None and a < 0 and distance > delta:
            value, slope = 0.0, 0.0
        terms.append((value, slope))
    return terms


def naive_gspo(row: Row, low=3e-4, high=4e-4) -> Found:
    s = math.exp(sum(lp - old for lp, old, *_ in row) / max(len(row), 1))
    terms = []
    for _, _, a, _ in row:
        if a > 0 and s > 1 + high:
            terms.append((-a * (1 + high), 0.0))
        elif a < 0 and s < 1 - low:
            terms.append((-a * (1 - low), 0.0))
        else:
            terms.append((-a * s, -a * s))
    return terms


def naive_gmpo(row: Row, low=0.4, high=0.4) -> Found:
    if not row:
        return []
    a = sum(adv for _, _, adv, _ in row) / len(row)
    inside, product = [], 1.0
    for lp, old, *_ in row:
        r = math.exp(lp - old)
        clipped = min(r, math.exp(high)) if a > 0 else max(r, math.exp(-low))
        inside.append(clipped == r)
        product *= clipped
    mean = product ** (1 / len(row))
    # every token carries the row's loss, so the slopes of all of them add up on each: n * (1 / n)
    return [(-a * mean, -a * mean if free else 0.0) for free in inside]


def naive_sapo(row: Row, tau_pos=1.0, tau_neg=1.05, detached=False) -> Found:
    terms = []
    for lp, old, a, _ in row:
        tau, r = (tau_pos if a > 0 else tau_neg), math.exp(lp - old)
        s = 1 / (1 + math.exp(-tau * (r - 1)))
        gate = 4 / tau * s
        terms.append((-a * gate * lp, -a * gate) if detached else (-a * gate, -a * 4 * s * (1 - s) * r))
    return terms


def naive_cpg(row: Row, low=0.2, high=0.2) -> Found:
    terms = []
    for lp, old, a, _ in row:
        top, bottom = old + math.log(1 + high), old + math.log(1 - low)
        if a > 0:
            terms.append((-a * min(lp, top), -a if lp < top else 0.0))
        else:
            terms.append((-a * max(lp, bottom), -a if lp > bottom else 0.0))
    return terms


def naive_is(row: Row) -> Found:
    return [(-a * math.exp(lp - old),) * 2 for lp, old, a, _ in row]


def naive_cispo(row: Row, low=1.0, high=0.28, mask=False, mask_low=1.0, mask_high=0.28) -> Found:
    terms = []
    for lp, old, a, _ in row:
        r = math.exp(lp - old)
        weight = -a * min(max(r, 1 - low), 1 + high)
        if mask and ((a > 0 and r > 1 + mask_high) or (a < 0 and r < 1 - mask_low)):
            weight = 0.0
        terms.append((weight * lp, weight))
    return terms


def naive_topr(row: Row, threshold=0.0, level="token") -> Found:
    row_ratio = math.exp(min(sum(lp - old for lp, old, *_ in row), 20))
    terms = []
    for lp, old, a, _ in row:
        r = math.exp(lp - old) if level == "token" else row_ratio
        weight = -a if a > threshold else -a * min(r, 1.0)
        terms.append((weight * lp, weight))
    return terms


def naive_opmd(row: Row, tau=1.0) -> Found:
    return [(-a * lp / (1 + tau), -a / (1 + tau)) for lp, _, a, _ in row]


def naive_sppo(row: Row, epsilon=0.3) -> Found:
    terms = []
    for lp, old, a, _ in row:
        inside = 1 / (1 + epsilon) <= math.exp(lp - old) <= 1 + epsilon
        terms.append((-a * (lp - old), -a) if inside else (0.0, 0.0))
    return terms


def naive_rec(row: Row, clip="none", weight="none", regularizer="none", coef=0.0, temperature=1.0) -> Found:
    s = math.exp(sum(lp - old for lp, old, *_ in row) / max(len(row), 1))
    terms = []
    for lp, old, a, _ in row:
        r = math.exp(lp - old)
        inside = {
            "none": True,
            "two-side": 0.8 <= r <= 1.2,
            "one-side": r <= 1.2 if a > 0 else r >= 0.8,
            "gspo-one-side": s <= 1.2 if a > 0 else s >= 0.8,
            "ring": 0.8 <= r <= 1.2 or (a > 0 and r <= 0.4) or (a < 0 and r >= 3.0),
        }[clip]
        w = {
            "none": 1.0,
            "importance_sampling": r,
            "gspo_importance_sampling": s,
            "advantage": math.exp(a / temperature),
        }[weight]
        slope = -w * a if inside else 0.0
        value = slope * lp
        if regularizer == "k2":
            value, slope = value + coef * (lp - old) ** 2, slope + 2 * coef * (lp - old)
        if regularizer == "forward-kl":
            value, slope = value - coef * lp, slope - coef
        terms.append((value, slope))
    return terms


def naive_sft(row: Row) -> Found:
    return [(-lp, -1.0) for lp, *_ in row]


def naive_sft_is(row: Row) -> Found:
    return [(-math.exp(lp) * lp, -math.exp(lp)) for lp, *_ in row]


def naive_sft_phi(row: Row, cutoff=1.0) -> Found:
    terms = []
    for lp, *_ in row:
        p = math.exp(lp)
        terms.append((-p * (1 - p) * min(lp, math.log(cutoff)), -p * (1 - p) if p < cutoff else 0.0))
    return terms


def naive_value(row: Row, clip: float | None = 0.2) -> Found:
    terms = []
    for v, old, target, _ in row:
        value, slope = (v - target) ** 2 / 2, v - target
        if clip is not None:
            clipped = min(max(v, old - clip), old + clip)
            if (clipped - target) ** 2 > (v - target) ** 2:
                value, slope = (clipped - target) ** 2 / 2, 0.0
        terms.append((value, slope))
    return terms


def naive_entropy(row: Row, coef=0.0) -> Found:
    return [(-coef * h, -coef) for h, *_ in row]


def naive_kl(row: Row, estimator="k2", coef=0.001) -> Found:
    terms = []
    for lp, old, _, ref in row:
        d, r = lp - ref, math.exp(lp - old)
        k3 = math.exp(-d) - 1 + d
        corrected = (r * k3, r * k3 + r * (1 - math.exp(-d))) if r < 2 else (2 * k3, 2 * (1 - math.exp(-d)))
        value, slope = {
            "k1": (d, 1.0),
            "k2": (d * d / 2, d),
            "k3": (k3, 1 - math.exp(-d)),
            "abs": (abs(d), math.copysign(1, d)),
            "low_var_kl": (min(k3, 10.0), 1 - math.exp(-d) if k3 < 10 else 0.0),
            "corrected_k3": corrected,
            "none": (0.0, 0.0),
        }[estimator]
        terms.append((coef * value, coef * slope))
    return terms


MEAN, ROWS, SUMS = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
CASES: list[tuple[str, dict[str, Any], Callable[..., Found], dict[str, Any], str]] = [
    ("ppo", {}, naive_ppo, {}, MEAN),
    ("ppo", {"dual_clip": None, "mode": ROWS}, naive_ppo, {"dual": None}, ROWS),
    ("ppo", {"clip_low": 0.1, "clip_high": 0.5, "mode": SUMS}, naive_ppo, {"low": 0.1, "high": 0.5}, SUMS),
    ("ppo", {"sequence_delta": 0.02}, naive_ppo, {"delta": 0.02}, MEAN),
    ("ppo", {"policy_gradient": True}, naive_ppo, {"plain": True}, MEAN),
    ("ppo", {"mode": "seq-mean-token-sum-norm", "norm": 7.0}, naive_ppo, {}, "seq-mean-token-sum-norm"),
    ("gspo", {}, naive_gspo, {}, ROWS),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.3, "mode": MEAN}, naive_gspo, {"low": 0.2, "high": 0.3}, MEAN),
    ("gmpo", {}, naive_gmpo, {}, ROWS),
    ("gmpo", {"clip_low": 0.1, "clip_high": 0.2, "mode": MEAN}, naive_gmpo, {"low": 0.1, "high": 0.2}, MEAN),
    ("sapo", {}, naive_sapo, {}, MEAN),
    ("sapo", {"detach_gate": True, "tau_neg": 2.0}, naive_sapo, {"detached": True, "tau_neg": 2.0}, MEAN),
    ("cpg", {}, naive_cpg, {}, ROWS),
    ("cpg", {"clip_low": 0.5, "clip_high": 0.1}, naive_cpg, {"low": 0.5, "high": 0.1}, ROWS),
    ("importance_sampling", {}, naive_is, {}, MEAN),
    ("cispo", {}, naive_cispo, {}, MEAN),
    ("cispo", {"clip_low": 0.3}, naive_cispo, {"low": 0.3}, MEAN),
    ("cispo", {"mask_clip": True, "mask_clip_low": 0.1}, naive_cispo, {"mask": True, "mask_low": 0.1}, MEAN),
    ("topr", {}, naive_topr, {}, MEAN),
    ("topr", {"threshold": 0.5, "level": "sequence"}, naive_topr, {"threshold": 0.5, "level": "sequence"}, MEAN),
    ("opmd", {}, naive_opmd, {}, MEAN),
    ("opmd", {"tau": 0.25, "mode": SUMS}, naive_opmd, {"tau": 0.25}, SUMS),
    ("sppo", {}, naive_sppo, {}, MEAN),
    ("sft", {}, naive_sft, {}, MEAN),
    ("sft_is", {}, naive_sft_is, {}, MEAN),
    ("sft_phi", {}, naive_sft_phi, {}, MEAN),
    ("sft_phi", {"cutoff": 0.5}, naive_sft_phi, {"cutoff": 0.5}, MEAN),
    ("value", {}, naive_value, {}, ROWS),
    ("value", {"clip": None, "mode": MEAN}, naive_value, {"clip": None}, MEAN),
    ("entropy", {"coef": 0.3}, naive_entropy, {"coef": 0.3}, MEAN),
]
CASES += [("kl", {}, naive_kl, {}, MEAN)]
CASES += [
    ("kl", {"estimator": name, "coef": 0.5}, naive_kl, {"estimator": name, "coef": 0.5}, MEAN)
    for name in ("none", "k1", "k2", "k3", "abs", "low_var_kl", "corrected_k3")
]
CASES += [
    (
        "rec",
        {"clip_mode": c, "weight": w, "regularizer": r, "regularizer_coef": 0.1, "temperature": 2.0},
        naive_rec,
        {"clip": c, "weight": w, "regularizer": r, "coef": 0.1, "temperature": 2.0},
        ROWS if c == "gspo-one-side" else MEAN,
    )
    for c, w, r in itertools.product(CLIP_MODES, WEIGHTS, REGULARIZERS)
]
PLAIN = list({case[0]: case for case in reversed(CASES)}.values())
"""The first case of each loss, mostly with its defaults; none is 0 whatever the code does, as `entropy`'s are."""
ids = pytest.mark.parametrize(
    ("name", "options", "naive", "expected", "mode"), CASES, ids=lambda part: part if isinstance(part, str) else None
)
every_loss = pytest.mark.parametrize(("name", "options"), [case[:2] for case in PLAIN], ids=[case[0] for case in PLAIN])


def coefficients(rows: list[Row], mode: str, counts: Denominators | None = None) -> list[float]:
    """What the loss of each of a row's tokens is multiplied by."""
    counts = counts or denominators(rows)
    return [
        {
            MEAN: 1 / max(counts.tokens, 1),
            ROWS: 1 / max(counts.sequences, 1) / max(len(row), 1),
            SUMS: 1 / max(counts.sequences, 1),
            "seq-mean-token-sum-norm": 1 / 7.0,
        }[mode]
        for row in rows
    ]


def reference(rows: list[Row], naive: Callable[..., Found], expected: dict[str, Any], mode: str) -> tuple[float, Any]:
    value, grads = 0.0, []
    for row, coefficient in zip(rows, coefficients(rows, mode), strict=True):
        terms = naive(row, **expected)
        value += sum(coefficient * loss for loss, _ in terms)
        grads.append([coefficient * slope for _, slope in terms])
    return value, grads


def close(actual: list[list[float]], expected: list[list[float]]) -> bool:
    return all(
        a == pytest.approx(b, rel=1e-8, abs=1e-10)
        for a, b in zip(itertools.chain(*actual), itertools.chain(*expected), strict=True)
    )


# --- values and gradients ---------------------------------------------------------------------------------------------


@ids
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_value_and_gradient(name, options, naive, expected, mode, seed):
    batch = Batch(seed)
    value, grads = reference(batch.rows(), naive, expected, mode)
    for layout, arrays in layouts(batch).items():
        data, leaf = data_of(arrays)
        loss = LOSSES.call(name, data, **options)
        assert loss.value.dtype == torch.float64 and loss.value.shape == (), layout
        assert loss.value.item() == pytest.approx(value, rel=1e-9, abs=1e-11), layout
        loss.backward()
        assert close(grads_of(batch, leaf, arrays["mask"]), grads), layout


@ids
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_micro_batches_add_up_in_any_order(name, options, naive, expected, mode, seed):
    batch = Batch(seed, rows=6)
    value, grads = reference(batch.rows(), naive, expected, mode)
    order = list(range(6))
    batch.draw.shuffle(order)
    split = batch.draw.randint(1, 5)
    counts, parts = denominators(batch.rows()), [order[:split], order[split:]]
    total, sums, slopes = 0.0, {}, [[]] * 6
    for k, part in enumerate(parts):
        small = batch.sub(part)
        arrays = small.packed() if k else small.padded("left")
        data, leaf = data_of(arrays)
        loss = LOSSES.call(name, data, **options, denominators=counts)
        loss.backward()
        total += loss.value.item()
        for metric, number in loss.metrics.items():
            sums[metric] = sums.get(metric, 0.0) + number.item()
        for i, grad in zip(part, grads_of(small, leaf, arrays["mask"]), strict=True):
            slopes[i] = grad
    assert total == pytest.approx(value, rel=1e-9, abs=1e-11)
    assert close(slopes, grads)
    data, _ = data_of(batch.padded("right"))
    whole_metrics = LOSSES.call(name, data, **options).metrics
    assert {m: n.item() for m, n in whole_metrics.items()} == pytest.approx(sums, rel=1e-5, abs=1e-6)
    assert all(n.shape == () and not n.requires_grad for n in whole_metrics.values())


RATIOS = ["ppo", "gspo", "gmpo", "sapo", "cpg", "importance_sampling", "cispo", "topr", "sppo", "rec"]
SMOOTH = ["ppo", "gmpo", "sapo", "cpg", "importance_sampling", "opmd", "sppo", "sft", "value", "entropy", "kl"]


@pytest.mark.parametrize("layout", ["right", "packed"])
@pytest.mark.parametrize("name", SMOOTH)
def test_gradcheck(name, layout):
    """Losses without a stopped gradient, against finite differences; the others have slopes by hand above."""
    batch = Batch(33, rows=4)
    assert sum(map(sum, batch.mask)) > 6
    arrays = layouts(batch)[layout]

    def value(leaf: torch.Tensor) -> torch.Tensor:
        data, _ = data_of(arrays)
        data |= {"new_logprobs": leaf, "values": leaf, "entropy": leaf}
        return LOSSES.call(name, data, **({"coef": 0.5} if name in ("entropy", "kl") else {})).value

    on = arrays["mask"].values if layout == "packed" else arrays["mask"]
    start = torch.where(on, arrays["lp"], 0.0).requires_grad_()
    assert torch.autograd.gradcheck(value, (start,))


@pytest.mark.parametrize("name", RATIOS)
def test_on_policy_gradient_is_the_policy_gradient(name):
    x = torch.randn(3, 4, dtype=torch.float64).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    LOSSES.call(name, {"new_logprobs": x, "old_logprobs": x, "advantages": advantages}, mode=MEAN).backward()
    assert torch.allclose(x.grad, -advantages[:, None].expand(3, 4) / 12)  # old is a constant even if it is x itself


# --- what all losses hold -------------------------------------------------------------------------------------------


@every_loss
def test_rows_without_tokens_change_nothing(name, options):
    batch = Batch(33, rows=4)
    batch.mask[1] = [False] * len(batch.mask[1])
    assert sum(map(any, batch.mask)) >= 2
    without = batch.sub([i for i in range(4) if any(batch.mask[i])])
    data, leaf = data_of(batch.padded("right"))
    rest, small = data_of(without.padded("right"))
    loss, expected = LOSSES.call(name, data, **options), LOSSES.call(name, rest, **options)
    assert expected.value.item() != 0
    assert loss.value.item() == pytest.approx(expected.value.item(), rel=1e-12)
    assert {k: v.item() for k, v in loss.metrics.items()} == pytest.approx(
        {k: v.item() for k, v in expected.metrics.items()}, rel=1e-6
    )
    loss.backward()
    expected.backward()
    slopes, small_slopes = leaf.grad[data["mask"]], small.grad[rest["mask"]]
    assert torch.allclose(slopes, small_slopes) and small_slopes.any()


@every_loss
def test_no_token_at_all_is_zero_with_a_gradient(name, options):
    leaf = torch.full((2, 3), math.nan, requires_grad=True)
    junk = torch.full((2, 3), math.nan)
    data, _ = data_of({"lp": leaf, "old": junk, "adv": junk, "ref": junk, "mask": torch.zeros(2, 3)})
    data |= {"new_logprobs": leaf, "values": leaf, "entropy": leaf}
    loss = LOSSES.call(name, data, **options)
    assert loss.value.item() == 0 and all(v.item() == 0 for v in loss.metrics.values())
    loss.backward()
    assert (leaf.grad == 0).all()
    empty = {key: Rows(torch.zeros(0), []) for key in data}
    assert LOSSES.call(name, empty, **options).value.item() == 0


@every_loss
@pytest.mark.parametrize("argument", ["lp", "old", "adv"])
def test_nan_where_it_counts_is_not_hidden(name, options, argument):
    batch = Batch(33, rows=3)
    arrays = batch.padded("right")
    place = arrays["mask"].nonzero()[0]
    arrays[argument][place[0], place[1]] = math.nan
    reads = {
        "sft": "lp", "sft_is": "lp", "sft_phi": "lp", "entropy": "lp", "opmd": "lp adv", "rec": "lp adv", "kl": "lp",
    }.get(name, "lp old adv")  # fmt: skip
    data, _ = data_of(arrays)
    value = LOSSES.call(name, data, **options).value
    assert math.isnan(value.item()) == (argument in reads)


REPORTED = {"importance_sampling": "approx_kl"} | dict.fromkeys(
    ["ppo", "gspo", "gmpo", "sapo", "cpg", "cispo"], "ppo_kl"
)


@pytest.mark.parametrize("name", REPORTED)
def test_the_kl_that_is_reported_is_of_the_ratio_as_it_is(name):
    data = {"new_logprobs": [[-1.0, -52.0, -0.5]], "old_logprobs": [[-1.5, -2.0, -40.5]], "advantages": [1.0]}
    reported = LOSSES.call(name, data).metrics[REPORTED[name]]
    assert reported.item() == pytest.approx((-0.5 + 50.0 - 40.0) / 3)
    mixed = LOSSES.call("mix", data | {"expert_mask": [False]}).metrics["usual/ppo_kl"]
    assert mixed.item() == reported.item()


def test_a_plain_policy_gradient_clips_nothing_and_reports_the_true_distance():
    _, metrics = ppo([[-1.0, -2.0]], [[-3.0, -1.5]], [[1.0, -1.0]], policy_gradient=True)
    assert metrics["pg_clipfrac"] == metrics["pg_clipfrac_lower"] == 0 and metrics["ppo_kl"].item() == -0.75


@pytest.mark.parametrize("name", [name for name in RATIOS if name not in ("sppo", "cpg")])
def test_extreme_ratios_stay_finite(name):
    x = torch.tensor([[-500.0, -0.1, -500.0, -0.1]], requires_grad=True)
    old = torch.tensor([[-0.1, -500.0, -0.1, -500.0]])
    data = {"new_logprobs": x, "old_logprobs": old, "advantages": torch.tensor([[1.0, 1.0, -1.0, -1.0]])}
    loss = LOSSES.call(name, data)
    loss.backward()
    assert loss.value.isfinite() and x.grad.isfinite().all()


@every_loss
def test_lists_and_half_precision(name, options):
    batch = Batch(33, rows=3)
    arrays = batch.padded("right")
    arrays = {k: torch.where(arrays["mask"], v, 0.0) if k != "mask" else v for k, v in arrays.items()}
    data, _ = data_of({k: v.float() if k != "mask" else v for k, v in arrays.items()})
    expected = LOSSES.call(name, data, **options).value
    assert expected.dtype == torch.float32 and expected != 0
    listed = {key: value.tolist() for key, value in data.items()}
    assert LOSSES.call(name, listed, **options).value.item() == pytest.approx(expected.item(), rel=1e-6)
    half = {key: value.to(torch.bfloat16) if key != "mask" else value for key, value in data.items()}
    loss = LOSSES.call(name, half, **options).value
    assert loss.dtype == torch.float32
    wide = {key: value.float() if key != "mask" else value for key, value in half.items()}
    assert loss.item() == LOSSES.call(name, wide, **options).value.item()


@every_loss
def test_weights_multiply_and_leave_denominators_alone(name, options):
    batch = Batch(33, rows=4)
    arrays = batch.padded("right")
    data, _ = data_of(arrays)
    plain = LOSSES.call(name, data, mode=MEAN, **options).value.item()
    assert plain != 0
    double = torch.full(arrays["mask"].shape, 2.0, dtype=torch.float64)
    assert LOSSES.call(name, data, mode=MEAN, weights=double, **options).value.item() == pytest.approx(2 * plain)
    torch.manual_seed(0)
    weights = torch.rand(arrays["mask"].shape, dtype=torch.float64).requires_grad_()
    total = 0.0
    for i, j in arrays["mask"].nonzero().tolist():  # one token at a time: the others weigh 0
        one_hot = torch.zeros_like(double)
        one_hot[i, j] = 1.0
        share = LOSSES.call(name, data, mode=MEAN, weights=one_hot, **options).value.item()
        total += share * weights[i, j].item()
    loss = LOSSES.call(name, data, mode=MEAN, weights=weights, **options).value
    assert loss.item() == pytest.approx(total, rel=1e-9)
    loss.backward()
    assert weights.grad is None


@pytest.mark.parametrize("name", [*RATIOS, "opmd"])
def test_advantages_of_rows_are_those_of_their_tokens(name):
    batch = Batch(33, rows=4)
    per_row = torch.tensor([0.5, -1.0, 2.0, -0.3], dtype=torch.float64)
    for arrays in layouts(batch).values():
        data, _ = data_of(arrays)
        counts = torch.tensor(batch.lengths())
        if isinstance(arrays["mask"], Rows):
            data["advantages"] = torch.repeat_interleave(per_row, counts)
        else:
            data["advantages"] = per_row[:, None].expand(arrays["mask"].shape)
        expected = LOSSES.call(name, data).value
        assert LOSSES.call(name, data | {"advantages": per_row}).value == expected
        assert LOSSES.call(name, data | {"advantages": per_row.tolist()}).value.item() == pytest.approx(expected.item())


def test_columns_of_records_are_packed_tokens():
    rows = [[-1.0, -2.0], [-0.5]]
    column = Ragged.from_arrays(rows, "float32")
    advantages = Ragged.from_arrays([[1.0, 2.0], [-1.0]], "float32")
    expected = ppo(rows, rows, [[1.0, 2.0], [-1.0]]).value
    assert ppo(column, column, advantages, weights=Ragged.from_arrays([[1.0, 1.0], [1.0]], "float32")).value == expected


@pytest.mark.parametrize("name", LOSSES.names())
def test_registry_refuses_what_it_does_not_know(name):
    data = {key: torch.zeros(2, 2) for key in LOSSES[name].inputs}
    with pytest.raises(ValueError, match=f"{name}: unknown option 'clip_rnage'"):
        LOSSES.call(name, data, clip_rnage=0.2)
    first = next(key for key, required in LOSSES[name].inputs.items() if required)
    with pytest.raises(ValueError, match=f"{name}: missing input '{first}'"):
        LOSSES.call(name, {key: value for key, value in data.items() if key != first})
    assert LOSSES[name].summary and LOSSES[name].source


def test_the_registry_is_complete():
    expected = """ppo gspo gmpo sapo cpg importance_sampling cispo topr opmd sppo rec sft sft_is sft_phi mix
    mix_chord dpo dpo_sums value entropy kl"""
    assert set(LOSSES.names()) == set(expected.split())
    assert {case[0] for case in CASES} == set(LOSSES.names()) - {"mix", "mix_chord", "dpo", "dpo_sums"}
    assert all(name in vars(losses) for name in losses.__all__)


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ppo(X, X[:, :2], X), r"old_logprobs: got shape \[2, 2\], expected \[2, 3\]"),
        (lambda: ppo(X, X, X[:, :2]), r"advantages: got shape \[2, 2\], expected \[2, 3\]"),
        (lambda: ppo(X, X, X[:, 0].repeat(2)), r"advantages: got shape \[4\], expected \[2\], one for each row"),
        (
            lambda: ppo([[0.0, 0.0], []], torch.zeros(2), torch.ones(2)),
            r"advantages: got 2 numbers for as many rows and as many tokens, expected Rows\(values, lengths\)",
        ),
        (lambda: ppo(X, X, None), r"advantages: got None, expected one number for each row or token: \(B,\), \(B, R\)"),
        (lambda: ppo(X, X, 5), r"advantages: got 5, expected one number for each row or token"),
        (lambda: ppo(X, X, "up"), r"advantages: got str, expected one number for each row or token"),
        (lambda: losses.opmd([[0.0]], None), r"advantages: got None"),
        (lambda: sft(X, weights=2), r"weights: got 2, expected one number for each row or token"),
        (lambda: mix(X, X, None, [0, 1]), r"advantages: got None"),
        (lambda: ppo(X, X, X, X + 0.5), r"mask: got 0.5, expected 0 and 1 only"),
        (lambda: ppo(X, X, X, weights=X[:1]), r"weights: got shape \[1, 3\]"),
        (lambda: ppo(X, X, X, clip_low=-0.1), r"clip_low: got -0.1, expected a number >= 0"),
        (lambda: ppo(X, X, X, clip_high=math.nan), r"clip_high: got nan"),
        (lambda: ppo(X, X, X, dual_clip=1.0), r"dual_clip: got 1.0, expected a number > 1 or None"),
        (lambda: ppo(X, X, X, sequence_delta="x"), r"sequence_delta: got 'x', expected a number or None"),
        (lambda: ppo(X, X, X, log_ratio_clamp=-1), r"log_ratio_clamp: got -1"),
        (lambda: ppo(X, X, X, mode="mean"), r"mode: got 'mean', expected one of 'token-mean'"),
        (lambda: ppo(X, X, X, mode="seq-mean-token-sum-norm"), r"norm: got None"),
        (lambda: cpg(X, X, X, clip_low=1.0), r"clip_low: got 1.0, expected a number in \[0, 1\)"),
        (lambda: sapo(X, X, X, tau_neg=0), r"tau_neg: got 0"),
        (lambda: topr(X, X, X, level="row"), r"level: got 'row', expected one of 'token', 'sequence'"),
        (lambda: rec(X, X, X, clip_mode="both"), r"clip_mode: got 'both', expected one of 'none'"),
        (lambda: rec(X, X, X, weight="x"), r"weight: got 'x'"),
        (lambda: rec(X, X, X, regularizer="k9"), r"regularizer: got 'k9'"),
        (lambda: rec(X, X, X, temperature=0), r"temperature: got 0, expected a positive number"),
        (lambda: losses.sft_phi(X, cutoff=1.5), r"cutoff: got 1.5, expected a probability in \(0, 1\]"),
        (lambda: value_loss(X, X), r"old_values: got None, expected the values before the update, since clip is 0.2"),
        (lambda: value_loss(X, X, clip=0), r"clip: got 0, expected a positive number or None"),
        (lambda: mix(X, X, X, [True]), r"expert_mask: got shape \[1\], expected \[2\], one for each row"),
        (lambda: mix(X, X, X, [0, 2]), r"expert_mask: got 2, expected 0 and 1 only"),
        (lambda: mix(X, X, X, [0, 1], mu=1.5), r"mu: got 1.5"),
        (
            lambda: mix(X, X, X, [0, 1], denominators=Denominators(1, 1, 1)),
            r"denominators: got Denominators, expected a pair",
        ),
        (lambda: mix(X, X, X, [0, 1], denominators=5), r"denominators: got int, expected a pair of Denominators"),
        (lambda: mix_chord(X, X, X, [0, 1], 1, denominators={"tokens": 3}), r"denominators: got dict, expected a pair"),
        (lambda: mix_chord(X, X, X, [0, 1], [3, 4]), r"step: got \[3, 4\], expected one step"),
        (lambda: mix_chord(X, X, X, [0, 1], 2.7), r"step: got 2.7\d*, expected an integer"),
        (lambda: mix_chord(X, X, X, [0, 1], True), r"step: got True, expected an integer"),
        (lambda: mix_chord(X, X, X, [0, 1], [math.inf] * 2), r"step: got inf, expected an integer"),
        (lambda: mix_chord(X, X, X, [0, 1], torch.zeros(0)), r"step: got \[\], expected one step"),
        (lambda: mix_chord(X, X, X, [0, 1], None), r"step: expected an array of numbers"),
        (lambda: chord_mu(-1, 1, 1, 0.5, 0.1), r"step: got -1"),
        (lambda: dpo(X, ["a"], [1, 0], X), r"pairs: got 1, expected 2, one for each row"),
        (lambda: dpo(X, None, [1, 0], X), r"pairs: got None, expected 2 ids, one for each row"),
        (lambda: dpo(X, [["a"], ["a"]], [1, 0], X), r"pairs: expected hashable ids"),
        (
            lambda: dpo(X, ["a", "a"], [1, 0], X, denominators={"tokens": 3}),
            r"denominators: got {'tokens': 3}, expected the number of pairs",
        ),
        (lambda: dpo(X, ["a", "a"], [1, 1], X), r"pairs: 'a' has rows 0 and 1 as chosen, expected one of each"),
        (lambda: dpo(X, ["a", "b"], [1, 0], X), r"pairs: 'a' has a chosen row and no rejected one"),
        (lambda: dpo(X, ["a", "a"], [1, 0]), r"ref_logprobs: got None, expected .* or reference_free=True"),
        (
            lambda: dpo(X, ["a", "a"], [1, 0], X, reference_free=True),
            r"ref_logprobs: got a reference, expected None, since reference_free is True",
        ),
        (
            lambda: dpo_sums([1.0], [1.0], None, [1.0], reference_free=True),
            r"ref_rejected_logprobs: got a reference, expected None, since reference_free is True",
        ),
        (
            lambda: dpo_sums([1.0], [1.0], [1.0]),
            r"ref_rejected_logprobs: got None, expected the reference's log-probs",
        ),
        (lambda: dpo_sums(1.0, 1.0, 1.0, 1.0), r"chosen_logprobs: got shape \[\], expected one number for each pair"),
        (lambda: dpo_sums([1.0], None, [1.0], [1.0]), r"rejected_logprobs: expected an array of numbers"),
        (
            lambda: dpo_sums(X[0], X[0].to("meta"), reference_free=True),
            r"chosen_logprobs: got device cpu, expected meta",
        ),
        (lambda: cispo(X, X, X, mask_clip="false"), r"mask_clip: got 'false', expected True or False"),
        (lambda: ppo(X, X, X, policy_gradient=1), r"policy_gradient: got 1, expected True or False"),
        (lambda: sapo(X, X, X, detach_gate="no"), r"detach_gate: got 'no', expected True or False"),
        (lambda: mix_chord(X, X, X, [0, 1], 1, phi=None), r"phi: got None, expected True or False"),
        (lambda: dpo(X, ["a", "a"], [1, 0], reference_free="no"), r"reference_free: got 'no', expected True or False"),
        (lambda: dpo_sums([1.0], [1.0], reference_free=1), r"reference_free: got 1, expected True or False"),
        (lambda: dpo(X, ["a", "a"], [1, 0], X, beta=0), r"beta: got 0, expected a positive number"),
        (lambda: dpo(X, ["a", "a"], [1, 0], X, variant="x"), r"variant: got 'x'"),
        (lambda: dpo(X, ["a", "a"], [1, 0], X, variant="ipo", label_smoothing=0.1), r"label_smoothing: got 0.1"),
        (lambda: dpo_sums([1.0], [1.0]), r"ref_chosen_logprobs: got None"),
        (lambda: dpo_sums([1.0], [1.0, 2.0], reference_free=True), r"rejected_logprobs: got shape \[2\]"),
        (lambda: interleaved(3), r"rows: got 3, expected an even number"),
    ],
)
def test_errors_name_field_value_and_expectation(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@every_loss
@pytest.mark.parametrize("invalid", [5, {"tokens": 3}, (1, 2, 3)])
def test_the_denominators_of_the_batch_have_one_type(name, options, invalid):
    data, _ = data_of(Batch(33, rows=4).padded("right"))
    with pytest.raises(ValueError, match=rf"denominators: got {type(invalid).__name__}, expected the Denominators"):
        LOSSES.call(name, data, denominators=invalid, **options)


def test_numbers_of_numpy_are_options():
    options = {"clip_low": np.float32(0.25), "dual_clip": np.float64(3.0), "sequence_delta": np.int64(1)}
    plain = {"clip_low": 0.25, "dual_clip": 3.0, "sequence_delta": 1}
    assert ppo(LP, OLD, ADV, **options).value == ppo(LP, OLD, ADV, **plain).value
    with pytest.raises(ValueError, match="dual_clip: got True, expected a number > 1 or None"):
        ppo(LP, OLD, ADV, dual_clip=True)


# --- single losses ----------------------------------------------------------------------------------------------------

LP = torch.tensor([[-1, -2, -0.5], [-0.3, -1.5, -2.5]])
OLD = torch.tensor([[-1.2, -1.5, -0.5], [-0.1, -1.5, -2]])
ADV = torch.tensor([1.0, -1.0])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


def test_numeric_anchors():
    assert cpg(LP, OLD, ADV, MASK).value.item() == pytest.approx(0.0838957, abs=1e-6)
    entropy_mask = torch.tensor([[1, 0, 0], [0, 0, 1]])
    narrow = ppo(LP, OLD, ADV, entropy_mask, mode=ROWS, dual_clip=None)
    assert narrow.value.item() == pytest.approx(-0.2, abs=1e-6)  # denominators count only the tokens of high entropy
    wide = ppo(LP, OLD, ADV, MASK, mode=ROWS, dual_clip=None, weights=entropy_mask)
    assert wide.value.item() == pytest.approx((-1.2 / 2 + 0.8 / 3) / 2, abs=1e-6)  # and here all of them


def test_sequence_mask_reports_and_keeps_denominators():
    x = torch.log(torch.tensor([[0.5, 0.5], [1.0, 1.0]]))
    loss, metrics = ppo(x, torch.zeros(2, 2), [-1.0, -1.0], sequence_delta=0.1)
    assert loss.item() == pytest.approx(0.5)  # two of four tokens are left out, four are divided by
    assert metrics["seq_mask/masked_tokens"] == 0.5
    assert metrics["seq_mask/mean_sequence_kl"].item() == pytest.approx(math.log(2) / 2)
    clamp = ppo(torch.tensor([[100.0]]), torch.zeros(1, 1), [1.0], log_ratio_clamp=2.0, clip_high=100.0)
    assert clamp.value.item() == pytest.approx(-math.exp(2))


def test_gspo_has_the_gradient_of_its_rows_objective():
    batch = Batch(33, rows=4)
    arrays = batch.padded("right")
    arrays["adv"][:] = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)[:, None]
    data, leaf = data_of(arrays)
    LOSSES.call("gspo", data, clip_low=9.0, clip_high=99.0).backward()
    again = torch.where(arrays["mask"], arrays["lp"], 0.0).requires_grad_()
    difference = torch.where(arrays["mask"], again - torch.where(arrays["mask"], arrays["old"], 0.0), 0.0)
    counts = arrays["mask"].sum(1)
    ratios = (difference.sum(1) / counts.clamp(min=1)).exp()
    (-(arrays["adv"][:, 0] * ratios)[counts > 0].mean()).backward()
    assert torch.allclose(leaf.grad[arrays["mask"]], again.grad[arrays["mask"]])


def test_gmpo_needs_no_product():
    """A thousand unlikely tokens: the product of ratios underflows in float32, its root does not."""
    x = torch.full((1, 1000), -2.0)
    assert gmpo(x, torch.zeros(1, 1000), [1.0]).value.item() == pytest.approx(-math.exp(-2.0))
    assert gmpo(-x, torch.zeros(1, 1000), [1.0]).value.item() == pytest.approx(-math.exp(0.4))


def test_sapo_fades_where_the_detached_form_grows():
    slopes = {}
    for detach in (False, True):
        x = torch.log(torch.tensor([[1.0, 5.0]])).requires_grad_()
        sapo(x, torch.zeros(1, 2), [1.0], detach_gate=detach, mode=SUMS).backward()
        slopes[detach] = x.grad[0].tolist()
    assert slopes[False] == pytest.approx([-1.0, -0.3532547], abs=1e-5)
    assert slopes[True] == pytest.approx([-2.0, -3.928055], abs=1e-5)


def test_rec_has_one_default_for_each_bound():
    options = LOSSES["rec"].options
    assert (options["ring_low"], options["ring_high"]) == (0.6, 2.0)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    x = torch.tensor([[1.0]], requires_grad=True)
    cispo(x, [[0.0]], [[1.0]]).backward()
    assert x.grad.item() == pytest.approx(-1.28)


def test_entropy_is_a_bonus():
    x = torch.tensor([[1.0, 3.0]], requires_grad=True)
    entropy_loss(x, coef=0.1).backward()
    assert (x.grad < 0).all()  # descending the loss raises entropy


# --- mixtures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
@pytest.mark.parametrize("mode", [MEAN, ROWS])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_mix(name, mode, seed):
    batch = Batch(seed, rows=5)
    expert = [batch.draw.random() < 0.5 for _ in range(5)]
    mu = 0.3 if name == "mix" else 0.475
    options = {"mu": 0.3} if name == "mix" else {"warmup": 10, "decay": 20, "peak": 0.9, "valley": 0.05}
    value, grads = 0.0, [[]] * 5
    for flag, weight in ((False, 1 - mu), (True, mu)):
        numbers = [i for i in range(5) if expert[i] == flag]
        naive = (naive_sft_phi if name == "mix_chord" else naive_sft) if flag else naive_ppo
        part, slopes = reference([batch.rows()[i] for i in numbers], naive, {}, mode)
        value += weight * part
        for i, slope in zip(numbers, slopes, strict=True):
            grads[i] = [weight * s for s in slope]
    for i, row in enumerate(batch.slots):  # nothing but log p is read of an expert's row
        if expert[i]:
            batch.slots[i] = [(slot[0], math.nan, math.nan, math.nan) for slot in row]
    for arrays in layouts(batch).values():
        data, leaf = data_of(arrays)
        loss = LOSSES.call(name, data | {"expert_mask": expert, "step": [20] * 5}, mode=mode, **options)
        assert loss.value.item() == pytest.approx(value, rel=1e-9, abs=1e-11)
        loss.backward()
        assert close(grads_of(batch, leaf, arrays["mask"]), grads)
    counts = mix_denominators(batch.padded("right")["mask"], expert)
    total, sums = 0.0, {}
    for part in ([3, 0], [1, 2, 4]):
        arrays = batch.sub(part).packed()
        data, leaf = data_of(arrays)
        flags = torch.tensor(expert)[part]
        small = LOSSES.call(name, data | {"expert_mask": flags, "step": 20}, mode=mode, denominators=counts, **options)
        total += small.value.item()
        for metric, number in small.metrics.items():
            sums[metric] = sums.get(metric, 0.0) + number.item()
    assert total == pytest.approx(value, rel=1e-9, abs=1e-11)
    assert {m: n.item() for m, n in loss.metrics.items()} == pytest.approx(sums, rel=1e-5, abs=1e-6)


def test_mix_of_one_kind_is_that_loss():
    data, _ = data_of(Batch(33, rows=4).padded("right"))
    rows = (data["new_logprobs"], data["old_logprobs"], data["advantages"])
    assert mix(*rows, [False] * 4, data["mask"], mu=0.0).value == ppo(*rows, data["mask"]).value
    assert mix(*rows, [True] * 4, data["mask"], mu=1.0).value == sft(rows[0], data["mask"]).value
    plain = mix_chord(*rows, [True] * 4, 9, data["mask"], peak=1.0, valley=1.0, phi=False)
    assert plain.value == sft(rows[0], data["mask"]).value


def test_a_chord_step_may_come_with_no_row():
    rows, options = torch.zeros(0, 3), {"warmup": 10, "peak": 0.9, "valley": 0.1}
    counts = (Denominators(3, 1, 1), Denominators(3, 1, 1))
    for step in (torch.zeros(0, dtype=torch.int64), [], 5):
        loss = mix_chord(rows, rows, rows, torch.zeros(0, dtype=torch.bool), step, denominators=counts, **options)
        assert loss.value.item() == 0.0 and loss.metrics["mu"].item() == 0.0
    packed = Rows(torch.zeros(0), [])
    assert mix_chord(packed, packed, [], [], [], denominators=counts, **options).value.item() == 0.0
    data, _ = data_of(Batch(33, rows=2).padded("right"))
    later = LOSSES.call("mix_chord", data | {"expert_mask": [0, 1], "step": torch.tensor([5.0, 5.0])}, **options)
    for step in (5, np.int64(5), 5.0, torch.tensor(5)):
        same = LOSSES.call("mix_chord", data | {"expert_mask": [0, 1], "step": step}, **options)
        assert same.value == later.value and same.metrics["mu"].item() == pytest.approx(0.45)


# --- pairs ------------------------------------------------------------------------------------------------------------


def naive_dpo(z: float, beta: float, smoothing: float, variant: str) -> float:
    if variant == "ipo":
        return (z - 1 / (2 * beta)) ** 2
    if variant == "hinge":
        return max(0.0, 1 - beta * z)
    sure, wrong = (math.log(1 / (1 + math.exp(-sign * beta * z))) for sign in (1, -1))
    return -(1 - smoothing) * sure - smoothing * wrong


@pytest.mark.parametrize(
    ("variant", "smoothing", "free"),
    [("sigmoid", 0.0, False), ("sigmoid", 0.2, True), ("ipo", 0.0, False), ("hinge", 0.0, False)],
)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_dpo_per_pair(variant, smoothing, free, seed):
    batch = Batch(seed, rows=8)
    names = [("p", i // 2) for i in range(8)]
    roles = [i % 2 == 0 for i in range(8)]
    order = list(range(8))
    batch.draw.shuffle(order)
    rows = batch.rows()
    ratio = [sum(lp - (0 if free else ref) for lp, _, _, ref in row) for row in rows]
    full = [k for k in range(4) if rows[2 * k] and rows[2 * k + 1]]
    value = sum(naive_dpo(ratio[2 * k] - ratio[2 * k + 1], 0.3, smoothing, variant) for k in full) / max(len(full), 1)
    options = {"beta": 0.3, "variant": variant, "label_smoothing": smoothing, "reference_free": free}
    small = batch.sub(order)

    def referred(arrays: dict[str, Any]) -> dict[str, Any]:
        return data_of(arrays)[0] | ({"ref_logprobs": None} if free else {})

    for arrays in layouts(small).values():
        data = referred(arrays)
        pairs, chosen = [names[i] for i in order], [roles[i] for i in order]
        loss = LOSSES.call("dpo", data | {"pairs": pairs, "chosen": chosen}, **options)
        assert loss.value.item() == pytest.approx(value, rel=1e-9, abs=1e-11)
        right = sum(ratio[2 * k] > ratio[2 * k + 1] for k in full) / max(len(full), 1)
        assert loss.metrics["accuracy_mean"].item() == pytest.approx(right)
    total, sums = 0.0, {}
    for part in ([0, 1, 6, 7], [2, 3, 4, 5]):
        data = referred(batch.sub(part).padded("left"))
        pairs, chosen = torch.tensor(part) // 2, torch.tensor(part) % 2 == 0
        share = LOSSES.call("dpo", data | {"pairs": pairs, "chosen": chosen}, denominators=len(full), **options)
        total += share.value.item()
        for metric, number in share.metrics.items():
            sums[metric] = sums.get(metric, 0.0) + number.item()
    assert total == pytest.approx(value, rel=1e-9, abs=1e-11)
    assert {m: n.item() for m, n in loss.metrics.items()} == pytest.approx(sums, rel=1e-5, abs=1e-6)
    better, worse = ([ratio[2 * k + side] for k in full] for side in (0, 1))
    zeros = [] if free else [[0.0] * len(full)] * 2
    summed = dpo_sums(*(torch.tensor(part, dtype=torch.float64) for part in (better, worse, *zeros)), **options)
    assert summed.value.item() == pytest.approx(value, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("variant", ["sigmoid", "ipo", "hinge"])
def test_dpo_gradcheck(variant):
    torch.manual_seed(1)
    x, ref = torch.randn(4, 3, dtype=torch.float64).requires_grad_(), torch.randn(4, 3, dtype=torch.float64)
    pairs, chosen = interleaved(4)
    smoothing = 0.1 if variant == "sigmoid" else 0.0

    def value(leaf: torch.Tensor) -> torch.Tensor:
        return dpo(leaf, pairs, chosen, ref, variant=variant, label_smoothing=smoothing).value

    assert torch.autograd.gradcheck(value, (x,))


def test_sums_in_lists_join_those_on_a_device():
    on_device = torch.zeros(2, device="meta")
    assert dpo_sums([1.0, 2.0], on_device, reference_free=True).value.device.type == "meta"
    assert dpo_sums([1.0, 2.0], [0.0, 0.0], np.zeros(2), on_device).value.device.type == "meta"


def test_dpo_does_not_pool_pairs():
    """Pairs with beta * z of 4 and -2: pooled, their loss would be 0.127 and both would seem right."""
    loss, metrics = dpo([[40.0], [0.0], [0.0], [20.0]], *interleaved(4), [[0.0]] * 4)
    assert loss.item() == pytest.approx(1.073, abs=1e-3)
    assert metrics["accuracy_mean"] == 0.5 and metrics["reward_margin"] == 1.0
    halves = Denominators(tokens=4, sequences=4, samples=4)
    rows = ([[40.0], [0.0]], [[0.0], [20.0]])
    parts = [dpo(pair, *interleaved(2), reference_free=True, denominators=halves) for pair in rows]
    assert sum(part.value for part in parts).item() == pytest.approx(loss.item())


def test_dpo_of_long_rows_is_right_in_float32_in_every_layout():
    """The sums of 32,768 tokens are near 3e4; their difference kept two digits packed, and four padded."""
    n = 32_768
    torch.manual_seed(0)
    lp = -torch.rand(4, n) * 2
    ref = lp * torch.tensor([1.0001, 1.00012, 1.0003, 0.9999])[:, None]
    pairs, chosen = interleaved(4)

    def metrics_and_slopes(dtype: torch.dtype, packed: bool) -> tuple[dict[str, float], torch.Tensor]:
        leaf = lp.to(dtype, copy=True).requires_grad_()
        policy, reference = leaf, ref.to(dtype)
        if packed:
            policy, reference = (Rows(column.reshape(-1), [n] * 4) for column in (policy, reference))
        loss = dpo(policy, pairs, chosen, reference)
        assert loss.value.dtype == dtype
        loss.backward()
        return {name: metric.item() for name, metric in loss.metrics.items()}, leaf.grad

    metrics, slopes = metrics_and_slopes(torch.float64, False)
    assert abs(metrics["chosen_reward"]) > 0.05
    for dtype, packed in ((torch.float64, True), (torch.float32, False), (torch.float32, True)):
        others, grads = metrics_and_slopes(dtype, packed)
        assert others == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        assert torch.allclose(grads.double(), slopes, rtol=1e-5, atol=0)
    sums = [part.double().sum(-1) for part in (lp[::2], lp[1::2], ref[::2], ref[1::2])]
    assert dpo_sums(*sums).value.item() == pytest.approx(metrics["dpo_loss"], rel=1e-9)
