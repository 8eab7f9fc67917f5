"""Off-policy corrections against loops in plain Python, in every layout; extremes, errors, and what is reported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.algorithms.corrections import Correction, diagnostics, importance_weights, staleness_weights
from rollbook.core.rows import Rows

USUAL = settings(deadline=None, max_examples=60)


@dataclass
class Ragged:
    """Tokens of several rows and which of them count, in both layouts."""

    lengths: list[int]
    masks: list[list[bool]]
    seed: int
    left: bool
    extra: int

    def rows(self, number: int = 0) -> list[list[float]]:
        """Numbers for each token, another set for each `number`."""
        generator = torch.Generator().manual_seed(self.seed * 10 + number)
        return [torch.randn(length, generator=generator, dtype=torch.float64).tolist() for length in self.lengths]

    def padded(self, rows: list[list[Any]], fill: float = math.nan) -> torch.Tensor:
        """[B, A] Rows on one side, with rubbish, or `fill`, around them."""
        width = max(self.lengths, default=0) + self.extra
        full = torch.full((len(rows), width), fill, dtype=torch.float64)
        for i, row in enumerate(rows):
            at = width - len(row) if self.left else 0
            full[i, at : at + len(row)] = torch.tensor(row, dtype=torch.float64)
        return full

    def packed(self, rows: list[list[Any]]) -> Rows:
        flat = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
        return Rows(flat, self.lengths)

    def unpadded(self, matrix: torch.Tensor) -> list[list[Any]]:
        width = matrix.shape[1]
        starts = [width - n if self.left else 0 for n in self.lengths]
        return [matrix[i, s : s + n].tolist() for i, (s, n) in enumerate(zip(starts, self.lengths, strict=True))]

    @property
    def padded_mask(self) -> torch.Tensor:
        return self.padded(self.masks, 0.0).bool()

    @property
    def packed_mask(self) -> Rows:
        return Rows(self.packed(self.masks).values.bool(), self.lengths)


@st.composite
def ragged(draw: st.DrawFn, min_rows: int = 0) -> Ragged:
    """Rows of 0 to 7 tokens, any of which may be masked, padded on either side."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=min_rows, max_size=6))
    masks = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    return Ragged(lengths, masks, draw(st.integers(0, 10**6)), draw(st.booleans()), draw(st.integers(0, 2)))


def flat(rows: list[list[Any]]) -> list[Any]:
    return [x for row in rows for x in row]


def close(actual: list[float], expected: list[float], tolerance: float = 1e-9) -> None:
    assert len(actual) == len(expected)
    for number, reference in zip(actual, expected, strict=True):
        assert math.isclose(number, reference, rel_tol=tolerance, abs_tol=1e-12), (actual, expected)


# --- weights --------------------------------------------------------------------------------------------------------


def naive_weights(
    data: Ragged, policy: list[list[float]], behaviour: list[list[float]], options: dict[str, Any]
) -> tuple[list[list[float]], list[list[bool]]]:
    """Row by row and token by token, as the docstring says it."""
    level = options["level"]
    weights: list[list[float]] = []
    masks: list[list[bool]] = []
    units: list[float] = []
    for mask, old, new in zip(data.masks, behaviour, policy, strict=True):
        off = [p - b if m else 0.0 for p, b, m in zip(new, old, mask, strict=True)]
        count = sum(mask)
        power = {"sequence": sum(off), "geometric": sum(off) / max(count, 1)}
        raw = [math.exp(max(-options["log_clamp"], min(options["log_clamp"], power.get(level, d)))) for d in off]
        keep = list(mask)
        if options["veto"] is not None and any(
            m and math.exp(d) < options["veto"] for d, m in zip(off, mask, strict=True)
        ):
            keep = [False] * len(mask)
        if options["mask_outside"] is not None:
            a, b = options["mask_outside"]
            keep = [k and a <= w <= b for k, w in zip(keep, raw, strict=True)]
        if options["truncate"] is not None:
            raw = [min(w, options["truncate"]) for w in raw]
        if options["low"] is not None:
            raw = [max(w, options["low"]) for w in raw]
        weights.append([w if k else 0.0 for w, k in zip(raw, keep, strict=True)])
        masks.append(keep)
        selected = [w for w, k in zip(raw, keep, strict=True) if k]
        units += selected if level == "token" else selected[:1]
    if options["normalize"] and units:
        mean = sum(units) / len(units)
        weights = [[w / mean for w in row] for row in weights]
    return weights, masks


OPTIONS = st.fixed_dictionaries(
    {
        "level": st.sampled_from(["token", "sequence", "geometric"]),
        "truncate": st.none() | st.floats(0.5, 3),
        "low": st.none() | st.floats(0, 0.5),
        "mask_outside": st.none() | st.tuples(st.floats(0, 0.9), st.floats(1.0, 5)),
        "veto": st.none() | st.floats(1e-6, 0.5),
        "log_clamp": st.floats(0.1, 20),
        "normalize": st.booleans(),
    }
)


@USUAL
@given(ragged(), OPTIONS)
def test_importance_weights_are_the_loop_in_every_layout(data: Ragged, options: dict[str, Any]) -> None:
    policy, behaviour = data.rows(0), data.rows(1)
    weights, masks = naive_weights(data, policy, behaviour, options)
    padded = importance_weights(data.padded(policy), data.padded(behaviour), data.padded_mask, **options)
    packed = importance_weights(data.packed(policy), data.packed(behaviour), data.packed_mask, **options)
    assert data.unpadded(padded.mask) == [row.tolist() for row in packed.mask] == masks
    close(flat(data.unpadded(padded.weights)), flat(weights))
    close(packed.weights.values.tolist(), flat(weights))
    assert not padded.weights[~padded.mask].any()
    assert padded.report.reasons == packed.report.reasons
    lost = [i for i, (old, new) in enumerate(zip(data.masks, masks, strict=True)) if any(old) and not any(new)]
    assert padded.report.which("nothing left") == lost
    tokens = sum(map(sum, data.masks))
    masked = tokens - sum(map(sum, masks))
    assert math.isclose(padded.report.metrics["masked"], masked / tokens if tokens else 0.0, abs_tol=1e-12)
    units = [w for row, mask in zip(weights, masks, strict=True) for w, m in zip(row, mask, strict=True) if m]
    if options["level"] == "token" and not options["normalize"] and units:
        metrics = padded.report.metrics
        close([metrics["weight_mean"], metrics["weight_max"]], [sum(units) / len(units), max(units)])
        share = sum(units) ** 2 / (len(units) * sum(w * w for w in units)) if any(units) else 0.0
        close([metrics["weight_ess"]], [share])


@USUAL
@given(ragged(min_rows=1), OPTIONS, st.randoms())
def test_rows_do_not_see_each_other(data: Ragged, options: dict[str, Any], random: Any) -> None:
    options = {**options, "normalize": False}
    policy, behaviour, mask = data.padded(data.rows(0)), data.padded(data.rows(1)), data.padded_mask
    together = importance_weights(policy, behaviour, mask, **options)
    order = list(range(len(data.lengths)))
    random.shuffle(order)
    mixed = importance_weights(policy[order], behaviour[order], mask[order], **options)
    assert torch.equal(mixed.weights, together.weights[order]) and torch.equal(mixed.mask, together.mask[order])
    parts = [importance_weights(policy[i : i + 1], behaviour[i : i + 1], mask[i : i + 1], **options) for i in order]
    assert torch.equal(torch.cat([part.weights for part in parts]), mixed.weights)


def test_weights_have_no_gradient_and_leave_their_arguments_alone() -> None:
    policy = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    behaviour, mask = torch.tensor([[-1.5, -1.0]]), torch.tensor([[True, True]])
    correction = importance_weights(policy, behaviour, mask)
    assert not correction.weights.requires_grad and correction.weights.dtype == torch.float32
    correction.mask[:] = False
    assert mask.all() and behaviour.tolist() == [[-1.5, -1.0]]
    assert importance_weights(policy.double(), behaviour).weights.dtype == torch.float64
    assert importance_weights([[-1, -2]], [[-1, -1]]).weights[0].dtype == torch.float32


def test_one_impossible_token_vetoes_its_row_below_the_clamp_too() -> None:
    policy, behaviour = torch.tensor([[-60.0, -1.0], [-25.0, -1.0]]), torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    correction = importance_weights(policy, behaviour, veto=1e-15, log_clamp=20.0)
    assert correction.report.which("vetoed") == [0] and correction.mask.tolist() == [[False, False], [True, True]]


def test_a_sequence_is_masked_as_a_whole_and_a_token_alone() -> None:
    policy, behaviour = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]), torch.tensor([[-3.0, -1.0], [-1.0, -1.2]])
    token = importance_weights(policy, behaviour, truncate=None, mask_outside=(0.5, 2.0))
    assert token.mask.tolist() == [[False, True], [True, True]]
    row = importance_weights(policy, behaviour, level="sequence", truncate=None, mask_outside=(0.5, 2.0))
    assert row.mask.tolist() == [[False, False], [True, True]] and row.report.which("nothing left") == [0]


def test_equal_policies_weigh_exactly_one() -> None:
    logprobs = torch.randn(4, 9).exp().neg()
    for level in ("token", "sequence", "geometric"):
        correction = importance_weights(logprobs, logprobs, level=level, normalize=True)
        assert torch.equal(correction.weights, torch.ones(4, 9)) and correction.report.metrics["weight_ess"] == 1.0
        assert correction.report.metrics["capped"] == 0.0


def test_old_tokens_are_cut_and_still_count_in_their_row() -> None:
    policy, behaviour = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.5, -1.0, -1.25]])
    correction = importance_weights(
        policy, behaviour, versions=[[1, 4, 5]], current=5, max_staleness=1, level="sequence", truncate=None
    )
    assert correction.mask.tolist() == [[False, True, True]] and correction.report.which("stale") == [0]
    assert correction.weights[0].tolist() == pytest.approx([0.0, math.exp(0.75), math.exp(0.75)])


# --- extremes -------------------------------------------------------------------------------------------------------

EXTREME = st.sampled_from([0.0, -1e-30, -1.0, -50.0, -1e4, -1e15, -3e38, 5.0, 3e38])


@USUAL
@given(
    st.lists(st.tuples(EXTREME, EXTREME), min_size=1, max_size=6), st.sampled_from(["token", "sequence", "geometric"])
)
def test_finite_log_probs_give_finite_numbers(pairs: list[tuple[float, float]], level: str) -> None:
    policy = torch.tensor([[a for a, _ in pairs], [b for _, b in pairs]])
    behaviour = policy.flip(0)
    for value in (*diagnostics(policy, behaviour).values(),):
        assert type(value) is float and math.isfinite(value)
    correction = importance_weights(policy, behaviour, level=level, truncate=None, normalize=True)
    assert correction.weights.isfinite().all() and all(map(math.isfinite, correction.report.metrics.values()))
    assert 0 <= correction.report.metrics["ess_token"] <= 1 and correction.report.metrics["kl_k3"] >= 0


def test_a_ratio_beyond_all_bounds_is_cut_on_its_own_side() -> None:
    metrics = diagnostics([[3e38]], [[-3e38]])
    assert math.exp(79) < metrics["kl_k3"] < math.exp(81) and math.exp(79) < metrics["chi2_token"] < math.exp(81)
    assert metrics["log_diff_max_abs"] > 5e38 and metrics["ess_token"] == 1.0
    assert diagnostics([[-3e38]], [[3e38]])["chi2_sequence"] == -1.0


@pytest.mark.parametrize("off", [1e-4, -1e-8, 1e-12, -1e-15])
def test_a_small_distance_keeps_its_digits(off: float) -> None:
    policy = torch.tensor([[off]], dtype=torch.float64)
    expected = off**2 / 2 + off**3 / 6 + off**4 / 24
    assert diagnostics(policy, torch.zeros_like(policy))["kl_k3"] == pytest.approx(expected, rel=1e-13, abs=0)


def test_what_is_masked_touches_nothing_and_what_counts_is_not_hidden() -> None:
    policy = torch.tensor([[-1.0, math.nan, -2.0]])
    behaviour = torch.tensor([[-1.0, -1.0, math.inf]])
    clean = importance_weights(policy, behaviour, [[1, 0, 0]])
    assert clean.weights.tolist() == [[1.0, 0.0, 0.0]] and all(map(math.isfinite, clean.report.metrics.values()))
    shown = importance_weights(policy, behaviour, [[1, 1, 0]], mask_outside=(0.5, 2.0))
    assert math.isnan(shown.weights[0, 1]) and math.isnan(shown.report.metrics["kl"])
    assert importance_weights([[-1.0]], [[-math.inf]]).weights[0].tolist() == [2.0]
    never = importance_weights([[-math.inf]], [[-1.0]]).weights[0].item()
    assert never == pytest.approx(math.exp(-20))


# --- diagnostics ----------------------------------------------------------------------------------------------------


def naive_diagnostics(data: Ragged, policy: list[list[float]], behaviour: list[list[float]]) -> dict[str, float]:
    rows = [
        [(p, b) for p, b, m in zip(new, old, mask, strict=True) if m]
        for new, old, mask in zip(policy, behaviour, data.masks, strict=True)
    ]
    rows = [row for row in rows if row]
    off = [p - b for row in rows for p, b in row]
    sums = [sum(p - b for p, b in row) for row in rows]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    def ess(logs: list[float]) -> float:
        weights = [math.exp(x) for x in logs]
        return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))

    perplexity = [math.exp(-mean([mean([pair[i] for pair in row]) for row in rows])) for i in (0, 1)]
    return {
        "kl": -mean(off),
        "kl_k3": mean([math.exp(d) - 1 - d for d in off]),
        "chi2_token": mean([math.exp(2 * d) for d in off]) - 1,
        "chi2_sequence": mean([math.exp(2 * d) for d in sums]) - 1,
        "ess_token": ess(off),
        "ess_sequence": ess(sums),
        "log_diff_mean_abs": mean([abs(d) for d in off]),
        "log_diff_max_abs": max(abs(d) for d in off),
        "log_diff_std": mean([(d - mean(off)) ** 2 for d in off]) ** 0.5,
        "policy_perplexity": perplexity[0],
        "engine_perplexity": perplexity[1],
        "perplexity_ratio": perplexity[0] / perplexity[1],
    }


@USUAL
@given(ragged())
def test_diagnostics_are_their_formulas(data: Ragged) -> None:
    policy, behaviour = data.rows(0), data.rows(1)
    padded = diagnostics(data.padded(policy), data.padded(behaviour), data.padded_mask)
    packed = diagnostics(data.packed(policy), data.packed(behaviour), data.packed_mask)
    if sum(map(sum, data.masks)):
        expected = naive_diagnostics(data, policy, behaviour)
    else:
        ones = {"ess_token", "ess_sequence", "policy_perplexity", "engine_perplexity", "perplexity_ratio"}
        expected = {name: float(name in ones) for name in padded}
    assert list(padded) == list(packed) == list(expected)
    close(list(padded.values()), list(expected.values()), 1e-7)
    close(list(packed.values()), list(expected.values()), 1e-7)


# --- staleness ------------------------------------------------------------------------------------------------------


@USUAL
@given(
    ragged(),
    st.sampled_from(["cut", "linear", "exponential"]),
    st.integers(0, 4),
    st.floats(0, 1),
    st.booleans(),
    st.booleans(),
)
def test_staleness_is_the_loop(
    data: Ragged, kind: str, max_staleness: int, decay: float, by_row: bool, unbounded: bool
) -> None:
    generator = torch.Generator().manual_seed(data.seed)
    versions = [torch.randint(3, 9, (n,), generator=generator).tolist() for n in data.lengths]
    if by_row:
        versions = [[3 + i % 6] * n for i, n in enumerate(data.lengths)]
    limit = None if unbounded and kind == "exponential" else max_staleness
    options: dict[str, Any] = {"kind": kind, "max_staleness": limit, "decay": decay}
    masks, weights = [], []
    for row, mask in zip(versions, data.masks, strict=True):
        age = [8 - v for v in row]
        masks.append([m and (limit is None or s <= limit) for s, m in zip(age, mask, strict=True)])
        decay_of = {
            "cut": lambda s: 1.0,
            "linear": lambda s: 1 - s / (max_staleness + 1),
            "exponential": lambda s: decay**s,
        }[kind]
        weights.append([decay_of(s) if m else 0.0 for s, m in zip(age, masks[-1], strict=True)])
    # What stands at masked tokens and padding, a version of the future too, does not matter.
    given_padded: Any = data.padded(versions, 99.0).long()
    given_packed: Any = data.packed(versions)
    given_packed = Rows(torch.where(data.packed_mask.values, given_packed.values.long(), 99), data.lengths)
    if by_row:
        given_padded = given_packed = [3 + i % 6 for i in range(len(data.lengths))]
    padded = staleness_weights(given_padded, 8, data.padded_mask, **options)
    packed = staleness_weights(given_packed, 8, data.packed_mask, **options)
    assert data.unpadded(padded.mask) == [row.tolist() for row in packed.mask] == masks
    close(flat(data.unpadded(padded.weights)), flat(weights), 1e-6)
    close(packed.weights.values.tolist(), flat(weights), 1e-6)
    ages = [8 - v for row, mask in zip(versions, data.masks, strict=True) for v, m in zip(row, mask, strict=True) if m]
    assert padded.report.metrics["staleness_max"] == max(ages, default=0)
    close([padded.report.metrics["staleness_mean"]], [sum(ages) / len(ages) if ages else 0.0])
    fewer = [i for i, (old, new) in enumerate(zip(data.masks, masks, strict=True)) if old != new]
    assert padded.report.which("stale") == packed.report.which("stale") == fewer


def test_one_version_for_each_of_packed_tokens() -> None:
    mask = Rows(torch.ones(3, dtype=torch.bool), [2, 1])
    correction = staleness_weights(torch.tensor([1, 5, 5]), 5, mask, max_staleness=2)
    assert [row.tolist() for row in correction.mask] == [[False, True], [True]]
    correction = staleness_weights(torch.tensor([1, 5]), 5, mask, max_staleness=2)
    assert [row.tolist() for row in correction.mask] == [[False, False], [True]]
    # Two rows and two tokens, but not one each: a flat tensor is of rows, as a list is, unless other tokens are flat.
    uneven, zeros = Rows(torch.ones(2, dtype=torch.bool), [0, 2]), Rows(torch.zeros(2), [0, 2])
    options: Any = {"current": 5, "max_staleness": 2}
    for versions in ([5, 1], torch.tensor([5, 1]), np.array([5, 1])):
        for correction in (
            staleness_weights(versions, mask=uneven, **options),
            importance_weights(zeros, zeros, uneven, versions, **options),
        ):
            assert correction.mask.values.tolist() == [False, False]
    by_token = staleness_weights(Rows(torch.tensor([5, 1]), [0, 2]), 5, uneven, max_staleness=2)
    assert by_token.mask.values.tolist() == [True, False]
    with pytest.raises(ValueError, match="versions: got 2 numbers for as many rows and as many tokens, expected Rows"):
        importance_weights(zeros, torch.zeros(2), uneven, np.array([5, 1]), **options)


def test_one_version_for_all() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for version in (3, np.int64(3), torch.tensor(3), np.array(3)):
        for current in (5, np.int64(5)):
            correction = staleness_weights(version, current, mask, kind="linear", max_staleness=3)
            assert correction.weights.tolist() == [[0.5, 0.5, 0.0], [0.5, 0.0, 0.0]]
            assert correction.report.metrics["staleness_max"] == 2.0
    packed = staleness_weights(3, 5, [[1, 1], [], [1]], max_staleness=1)
    assert packed.weights.values.tolist() == [0.0] * 3 and packed.report.which("stale") == [0, 2]
    zeros = torch.zeros(2, 3)
    correction = importance_weights(zeros, zeros, mask, 3, current=5, max_staleness=1)
    assert not correction.mask.any()
    assert staleness_weights([[3, 3], []], 5, max_staleness=3).weights.values.tolist() == [1.0, 1.0]


# --- errors ---------------------------------------------------------------------------------------------------------

ONE = torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: importance_weights(ONE, torch.zeros(1, 3)), "logprobs: got shape [1, 3], expected [1, 2]"),
        (lambda: importance_weights(ONE, ONE, torch.ones(2, 2)), "old_logprobs: got shape [1, 2], expected [2, 2]"),
        (lambda: importance_weights(ONE, ONE, level="row"), "level: got 'row', expected one of 'token', 'sequence'"),
        (lambda: importance_weights(ONE, ONE, truncate=0.0), "truncate: got 0.0, expected a positive number"),
        (lambda: importance_weights(ONE, ONE, low=3.0), "low: got 3.0, expected a number from 0 to 2"),
        (lambda: importance_weights(ONE, ONE, veto=2.0), "veto: got 2.0, expected a ratio in (0, 1]"),
        (lambda: importance_weights(ONE, ONE, log_clamp=100.0), "log_clamp: got 100.0, expected a positive number up"),
        (lambda: importance_weights(ONE, ONE, normalize="no"), "normalize: got 'no', expected True or False"),
        (lambda: importance_weights(ONE, ONE, mask_outside=2.0), "mask_outside: got 2.0, expected a pair"),
        (
            lambda: importance_weights(ONE, ONE, mask_outside=(2.0, 1.0)),
            "mask_outside: high: got 1.0, expected a number",
        ),
        (
            lambda: importance_weights(ONE, ONE, versions=[1]),
            "versions: expected all of versions, current and max_stal",
        ),
        (lambda: importance_weights(ONE, ONE, max_staleness=1), "versions: expected all of versions, current and max"),
        (lambda: importance_weights(ONE, ONE, current=3), "versions: expected all of versions, current and max_stalen"),
        (lambda: staleness_weights(3, 5, max_staleness=1), "mask: got None, expected a mask beside one version"),
        (lambda: staleness_weights(None, 5, max_staleness=1), "versions: got None, expected the version of each token"),
        (lambda: staleness_weights(None, 5, ONE, max_staleness=1), "versions: got None, expected the version of each"),
        (lambda: staleness_weights("v3", 5, ONE, max_staleness=1), "versions: got str, expected one number for each"),
        (lambda: staleness_weights(1.5, 5, ONE, max_staleness=1), "versions: got float32, expected integers"),
        (lambda: staleness_weights(True, 5, ONE, max_staleness=1), "versions: got bool, expected integers"),
        (lambda: staleness_weights(6, 5, ONE + 1, max_staleness=1), "versions: got 6, expected at most current, 5"),
        (lambda: staleness_weights([1], True, ONE, max_staleness=1), "current: got True, expected the number of a"),
        (lambda: staleness_weights([1], 1, max_staleness=1), "mask: got None, expected a mask beside one version"),
        (lambda: staleness_weights([2], 1, ONE + 1, max_staleness=1), "versions: got 2, expected at most current, 1"),
        (lambda: staleness_weights([1, 1], 1, ONE, max_staleness=1), "versions: got 2, expected 1, one for each row"),
        (lambda: staleness_weights([1.5], 1, ONE, max_staleness=1), "versions: got float32, expected integers"),
        (
            lambda: staleness_weights([1], 1.0, ONE, max_staleness=1),
            "current: got 1.0, expected the number of a version",
        ),
        (
            lambda: staleness_weights([1], 1, ONE),
            "max_staleness: got None, expected a number of versions for kind='cut'",
        ),
        (lambda: staleness_weights([1], 1, ONE, kind="soft"), "kind: got 'soft', expected one of 'cut', 'exponential'"),
        (lambda: staleness_weights([1], 1, ONE, max_staleness=-1), "max_staleness: got -1, expected a number >= 0"),
        (
            lambda: staleness_weights([1], 1, ONE, kind="exponential", decay=2),
            "decay: got 2, expected a number from 0 to 1",
        ),
    ],
)
def test_bad_input_is_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert words in str(raised.value)


def test_a_correction_fits_a_loss() -> None:
    """The mask narrows the denominator; the mask of before keeps it. Either way masked tokens add nothing."""
    from rollbook.algorithms.aggregate import aggregate

    losses, mask = torch.tensor([[1.0, 3.0, 5.0]]), torch.tensor([[True, True, True]])
    correction: Correction = importance_weights(
        torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.0, -9.0, -1.0]]), mask, mask_outside=(0.5, 2.0)
    )
    assert aggregate(losses, correction.mask, weights=correction.weights).item() == 3.0
    assert aggregate(losses, mask, weights=correction.weights).item() == 2.0
