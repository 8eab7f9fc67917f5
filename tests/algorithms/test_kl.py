"""KL estimators, the penalty in the reward, and coefficients, against references with Python loops."""

from __future__ import annotations

import math
import random
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.algorithms.kl import KL, AdaptiveKL, FixedKL, corrected_k3, k3, kl, kl_loss, penalize, token_kl
from rollbook.core.rows import Rows


def naive(name: str, lp: float, ref: float, old: float | None = None) -> float:
    d = lp - ref
    third = math.exp(-d) - 1 + d
    if name == "low_var_kl":
        clamped = min(max(d, -20.0), 20.0)
        return min(max(math.exp(-clamped) - 1 + clamped, -10.0), 10.0)
    if name == "corrected_k3":
        return third if old is None else min(math.exp(lp - old), 2.0) * third
    return {"none": 0.0, "k1": d, "k2": d * d / 2, "k3": third, "abs": abs(d)}[name]


def doubles(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


numbers = st.floats(-30, 0)


@pytest.mark.parametrize("name", KL.names())
@settings(deadline=None, max_examples=50)
@given(tokens=st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6))
def test_estimators(name, tokens):
    lp, ref, old = (doubles(part) for part in zip(*tokens, strict=True))
    expected = [naive(name, *token) for token in tokens]
    for shape in ((-1,), (1, -1), (-1, 1, 1)):
        estimated = kl(name, lp.reshape(shape), ref.reshape(shape), old.reshape(shape))
        assert estimated.shape == lp.reshape(shape).shape and estimated.dtype == torch.float64
        assert estimated.flatten().tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert kl(name, lp.tolist(), ref.tolist(), old.tolist()).dtype == torch.float32
    same = kl(name, lp, lp, old)
    assert (same == 0).all()


@pytest.mark.parametrize("name", KL.names())
def test_gradients(name):
    torch.manual_seed(0)
    lp, ref, old = (torch.randn(3, 4, dtype=torch.float64) for _ in range(3))
    assert torch.autograd.gradcheck(lambda leaf: kl(name, leaf, ref, old), (lp.requires_grad_(),))


def test_aliases_and_unknown_names():
    assert KL["low-variance"].name == "low_var_kl" and KL["kl"].name == "k1" and KL["mse"].name == "k2"
    with pytest.raises(ValueError, match=r"KL estimator: unknown name 'k4'; choose from none, k1, kl, k2"):
        kl("k4", [0.0], [0.0])
    with pytest.raises(ValueError, match=r"corrected_k3: unknown option 'cpa'; did you mean 'cap'"):
        kl("corrected_k3", [0.0], [0.0], cpa=3.0)
    with pytest.raises(ValueError, match=r"ref_logprobs: got shape \[1\], expected \[2\]"):
        kl("k1", [0.0, 0.0], [0.0])
    with pytest.raises(ValueError, match=r"old_logprobs: got shape \[1\], expected \[2\]"):
        corrected_k3([0.0, 0.0], [0.0, 0.0], [0.0])
    with pytest.raises(ValueError, match=r"cap: got -1"):
        corrected_k3([0.0], [0.0], [0.0], cap=-1)


def exact(x: float) -> tuple[float, float]:
    """exp(x) - 1 - x and its slope, exp(x) - 1, in sixty digits."""
    with localcontext(prec=60):
        power = Decimal(x).exp()
        return float(power - 1 - Decimal(x)), float(power - 1)


@pytest.mark.parametrize("name", ["k3", "low_var_kl", "corrected_k3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_k3_is_right_to_rounding_near_zero_and_far_from_it(name, dtype, tolerance):
    """exp(x) - 1 - x as it stands is off by 9 parts in 100 at x = 1e-6, and its gradient by 2 at 3e-8, in float32."""
    sizes = [10.0**power for power in range(-15, 1)] + [3e-8, 3e-7, 0.3, 0.49, 0.499999, 0.5, 0.500001, 0.51, 2.0, 19.0]
    x = torch.tensor([sign * size for size in sizes for sign in (1, -1)], dtype=dtype)
    logprobs = (-x).requires_grad_()
    options = {"bound": 1e30} if name == "low_var_kl" else {"detach_ratio": True} if name == "corrected_k3" else {}
    estimated = kl(name, logprobs, torch.zeros_like(x), logprobs.detach(), **options)
    estimated.sum().backward()
    expected = [exact(gap) for gap in x.tolist()]
    assert estimated.tolist() == pytest.approx([value for value, _ in expected], rel=tolerance, abs=0)
    assert logprobs.grad.tolist() == pytest.approx([-slope for _, slope in expected], rel=tolerance, abs=0)


def test_k3_has_every_derivative_and_maps():
    x = doubles([-2.0, -1e-3, 0.0, 1e-5, 0.4, 3.0]).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda leaf: k3(leaf, torch.zeros_like(leaf)), (x,))
    slopes = torch.func.vmap(torch.func.grad(lambda gap: k3(gap, torch.zeros_like(gap))))(x.detach())
    assert torch.equal(slopes, -torch.expm1(-x.detach()))
    assert k3([-math.inf, math.nan], [0.0, 0.0]).isinf().tolist() == [True, False]  # never infinity less infinity
    assert math.isnan(k3([math.nan], [0.0]).item())


def exact_corrected(lp: float, ref: float, old: float, cap: float, detach: bool) -> tuple[float, float]:
    with localcontext(prec=80):
        ratio, power, x = (Decimal(lp) - Decimal(old)).exp(), (Decimal(ref) - Decimal(lp)).exp(), Decimal(ref - lp)
        capped = min(ratio, Decimal(cap))
        slope = -capped * (power - 1) + (0 if detach or ratio > cap else capped * (power - 1 - x))
        return float(capped * (power - 1 - x)), float(slope)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("cap", [2.0, 1.3])
def test_corrected_k3_is_finite_and_right_where_k3_overflows(cap, detach):
    draw, drawn = random.Random(0), [(-200.0, -1.0, -1.0), (-110.0, -1.0, -80.0), (-200.0, -1.0, -1.25)]
    # Quarters, whose differences are exact in float32; an exponent near 80 then still costs half a digit.
    drawn += [(-draw.randint(0, 800) / 4, -draw.randint(0, 20) / 4, -draw.randint(0, 400) / 4) for _ in range(400)]
    cases = [(token, exact_corrected(*token, cap, detach)) for token in drawn]
    tokens, expected = zip(*(case for case in cases if max(map(abs, case[1])) < 1e38), strict=True)
    assert sum(ref - lp > 89 for lp, ref, _ in tokens) > 50  # of which k3 alone is infinite
    lp, ref, old = (torch.tensor(part) for part in zip(*tokens, strict=True))
    estimated = corrected_k3(lp.requires_grad_(), ref, old, cap=cap, detach_ratio=detach)
    estimated.sum().backward()
    assert estimated.tolist() == pytest.approx([value for value, _ in expected], rel=5e-6, abs=1e-37)
    assert lp.grad.tolist() == pytest.approx([slope for _, slope in expected], rel=5e-6, abs=1e-37)


def test_one_unlikely_token_does_not_spoil_a_corrected_loss():
    lp = torch.tensor([[-1.0, -200.0]], requires_grad=True)
    loss = kl_loss(lp, [[-1.5, -1.0]], None, [[-1.0, -1.0]], estimator="corrected_k3", coef=1.0)
    assert loss.value.item() == pytest.approx((math.exp(-0.5) - 0.5 + 1.0) / 2)
    loss.backward()
    assert lp.grad.tolist() == [[pytest.approx(0.25), 0.0]]  # d * p / old, over two tokens


def test_k3_far_away():
    assert math.isinf(k3([-200.0], [0.0]).item())  # not hidden
    assert kl("low_var_kl", [-200.0], [0.0]).item() == 10.0
    wide = kl("low_var_kl", [-5.0], [0.0], bound=1000.0).item()
    assert wide == pytest.approx(math.exp(5) - 6, rel=1e-5)


def test_corrected_k3_gradient_with_and_without_the_ratio():
    """The expectation under old of the corrected gradient is that of KL(p, ref); over three tokens it is a sum."""
    logits = doubles([1.3, -0.2, 0.4]).requires_grad_()
    old = doubles([1.0, 0.1, 0.2]).log_softmax(0)
    ref = doubles([-1.4, 0.7, 1.9]).log_softmax(0)
    log_p = logits.log_softmax(0)
    true = torch.autograd.grad((log_p.exp() * (log_p - ref)).sum(), logits, retain_graph=True)[0]

    def expected(detach: bool) -> torch.Tensor:
        estimated = corrected_k3(log_p, ref, old, detach_ratio=detach)
        return torch.autograd.grad((old.exp() * estimated).sum(), logits, retain_graph=True)[0]

    assert torch.allclose(expected(False), true)
    assert not torch.allclose(expected(True), true, atol=1e-2)
    assert torch.equal(corrected_k3(log_p, ref, old, detach_ratio=True), corrected_k3(log_p, ref, old))
    assert torch.equal(corrected_k3(log_p, ref), k3(log_p, ref))
    far = torch.tensor([0.0], requires_grad=True)
    corrected_k3(far, [-1.0], [-500.0]).sum().backward()
    assert far.grad.isfinite().all()  # a ratio that overflows is capped before it does


def test_k2_has_the_gradient_of_kl_and_k1_has_none_in_expectation():
    logits = doubles([0.3, -0.2, 0.9]).requires_grad_()
    ref = doubles([-0.4, 0.7, 0.1]).log_softmax(0)
    log_p = logits.log_softmax(0)
    probs = log_p.exp().detach()
    gradients = {}
    for name in ("k1", "k2", "k3"):
        gradients[name] = torch.autograd.grad((probs * kl(name, log_p, ref)).sum(), logits, retain_graph=True)[0]
    true = torch.autograd.grad((log_p.exp() * (log_p - ref)).sum(), logits, retain_graph=True)[0]
    forward = torch.autograd.grad((ref.exp() * (ref - log_p)).sum(), logits)[0]
    assert torch.allclose(gradients["k1"], torch.zeros(3, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(gradients["k2"], true) and torch.allclose(gradients["k3"], forward)


def test_lists_join_what_is_on_a_device():
    on_device = torch.zeros(2, device="meta")
    for name in KL.names():
        assert kl(name, [-1.0, -2.0], on_device).device.type == kl(name, on_device, [-1.0, -2.0]).device.type == "meta"
    assert corrected_k3([-1.0, -2.0], [-1.0, -2.0], on_device).device.type == "meta"
    with pytest.raises(ValueError, match="ref_logprobs: got device cpu, expected meta"):
        k3(on_device, torch.zeros(2))
    with pytest.raises(ValueError, match=r"old_logprobs: got shape \[3\], expected \[2\], as logprobs have"):
        corrected_k3([-1.0, -2.0], [-1.0, -2.0], torch.zeros(3))


def test_to_detach_the_ratio_is_true_or_false():
    for old in (None, [-1.0]):
        with pytest.raises(ValueError, match="detach_ratio: got 'no', expected True or False"):
            corrected_k3([-1.0], [-2.0], old, detach_ratio="no")


def test_token_kl_reads_only_what_counts():
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    lp, ref = torch.tensor([[math.nan, -1.0, -2.0], [-3.0, math.inf, 0.0]]), torch.full((2, 3), -1.5)
    padded = token_kl(lp, ref, mask, estimator="k2")
    assert padded.tolist() == [[0, 0.125, 0.125], [1.125, 0, 0]]
    packed = token_kl(Rows(lp.flatten(), [3, 3]), ref.flatten(), Rows(mask.flatten(), [3, 3]), estimator="k2")
    assert isinstance(packed, Rows) and packed.values.tolist() == padded.flatten().tolist()
    old = torch.zeros(2, 3)
    capped = token_kl(lp, ref, mask, old, estimator="corrected_k3", cap=0.0)
    assert (capped == 0).all()


def test_kl_loss_takes_the_reference_as_constant():
    lp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss = kl_loss(lp, lp, estimator="k1", coef=2.0)
    loss.backward()
    assert lp.grad.tolist() == [[1.0, 1.0]]
    options = {"cap": 1.0}
    outcome = kl_loss([[-1.0]], [[-2.0]], None, [[-3.0]], estimator="corrected_k3", coef=1.0, estimator_options=options)
    assert outcome.value.item() == pytest.approx(math.exp(-1))
    with pytest.raises(ValueError, match="coef: got nan"):
        kl_loss([[-1.0]], [[-2.0]], coef=math.nan)


def test_kl_loss_takes_weights_of_rows():
    lp, ref = torch.tensor([[-1.0, -2.0, -0.3], [-0.5, -1.0, -9.0]]), torch.full((2, 3), -1.5)
    mask, weights = torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.tensor([2.0, 0.5])
    expected = kl_loss(lp, ref, mask, weights=weights[:, None].expand(2, 3)).value
    packed = [Rows(column[mask.bool()], [3, 2]) for column in (lp, ref)]
    for row_weights in (weights, [2.0, 0.5], weights.numpy()):
        assert kl_loss(lp, ref, mask, weights=row_weights).value == expected
        assert kl_loss(*packed, weights=row_weights).value.item() == pytest.approx(expected.item())
    assert expected != kl_loss(lp, ref, mask).value
    with pytest.raises(ValueError, match=r"weights: got 5, expected one number for each row or token"):
        kl_loss(lp, ref, mask, weights=5)


# --- the penalty in the reward ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6), coef=st.sampled_from([0.1, 0.0, -1.0]), clip=st.sampled_from([None, 0.5, (-0.1, 2.0)])
)
def test_penalize(seed, coef, clip):
    draw = random.Random(seed)
    lengths = [draw.randint(0, 5) for _ in range(draw.randint(1, 4))]
    mask = [[draw.random() < 0.6 for _ in range(n)] for n in lengths]
    kls = [[draw.gauss(0, 1) if on else math.nan for on in row] for row in mask]
    rewards = [draw.choice([draw.gauss(0, 1), math.nan]) for _ in lengths]
    low, high = (-math.inf, math.inf) if clip is None else (-0.5, 0.5) if clip == 0.5 else (-0.1, 2.0)
    expected, no_actions = [], []
    for i, row in enumerate(mask):
        last = max((j for j, on in enumerate(row) if on), default=None)
        if last is None:
            no_actions.append(i)
        reward = 0.0 if math.isnan(rewards[i]) else rewards[i]
        reward = min(max(reward, low), high)
        penalties = [-max(coef, 0) * kls[i][j] if on else 0.0 for j, on in enumerate(row)]
        expected.append([penalty + (reward if j == last else 0.0) for j, penalty in enumerate(penalties)])
    missing = [i for i, reward in enumerate(rewards) if math.isnan(reward)]

    flat = doubles([x for row in kls for x in row])
    kept_tokens = Rows(torch.tensor([x for row in mask for x in row], dtype=torch.bool), lengths)
    penalized, report = penalize(rewards, Rows(flat, lengths), kept_tokens, coef=coef, reward_clip=clip)
    assert [row.tolist() for row in penalized] == [pytest.approx(row, abs=1e-6) for row in expected]
    assert report.reasons == {"no actions": no_actions, "missing reward": missing} and report.rows == len(lengths)

    width = max(lengths) + 1
    padded, wide = torch.full((len(lengths), width), math.nan), torch.zeros(len(lengths), width)
    for i, n in enumerate(lengths):  # left-padded
        padded[i, width - n :], wide[i, width - n :] = torch.tensor(kls[i]), torch.tensor(mask[i], dtype=torch.float)
    again, _ = penalize(torch.tensor(rewards), padded, wide, coef=coef, reward_clip=clip)
    for i, n in enumerate(lengths):
        assert again[i, width - n :].tolist() == pytest.approx(expected[i], abs=1e-6)
        assert (again[i, : width - n] == 0).all()


def test_penalize_rewards_of_tokens_and_none():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    token_rewards = torch.tensor([[1.0, 5.0, 9.0], [0.0, math.nan, 2.0]])
    penalized, report = penalize(token_rewards, torch.ones(2, 3), mask, coef=0.5, reward_clip=3.0)
    assert penalized.tolist() == [[0.5, 2.5, 0.0], [-0.5, -0.5, 1.5]]
    assert report.which("missing reward") == [1] and report.metrics == {"kl": 1.0, "kl_coef": 0.5}
    penalized, report = penalize([None, 2.0], None, mask)
    assert penalized.tolist() == [[0, 0, 0], [0, 0, 2.0]] and report.reasons["missing reward"] == [0]
    penalized, _ = penalize([[1.0, 2.0], [3.0]], [[0.1, 0.2], [0.3]], coef=1.0)
    assert [row.tolist() for row in penalized] == [pytest.approx([0.9, 1.8]), pytest.approx([2.7])]
    assert penalize(doubles([1.0]), doubles([[1.0]]), coef=1.0).rewards.dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: penalize([1.0], None, torch.ones(1, 2), coef=0.1), r"kl: got None, expected the KL of tokens"),
        (lambda: penalize([1.0, 2.0, 3.0], torch.ones(2, 2)), r"rewards: got shape \[3\], expected \[2\]"),
        (lambda: penalize([1.0], torch.ones(1, 2), coef=math.nan), r"coef: got nan"),
        (lambda: penalize([1.0], torch.ones(1, 2), reward_clip=(2, 1)), r"reward_clip: got 1, expected a number >= 2"),
        (
            lambda: penalize([1.0], torch.ones(1, 2), reward_clip=(1, 2, 3)),
            r"reward_clip: got \(1, 2, 3\), expected a pair \(low, high\), one number, or None",
        ),
        (lambda: penalize([1.0], torch.ones(1, 2), reward_clip="x"), r"reward_clip: got 'x', expected a number >="),
        (
            lambda: penalize([1.0], torch.ones(1, 2), reward_clip=-1.0),
            r"reward_clip: got -1.0, expected a number >=",
        ),
        (lambda: penalize([1.0], torch.ones(1, 2), reward_clip=("x", 1)), r"reward_clip: got 'x', expected a number"),
        (
            lambda: penalize([1.0], torch.ones(1, 2), reward_clip=(0, "x")),
            r"reward_clip: got 'x', expected a number >= 0",
        ),
        (
            lambda: penalize(torch.ones(2), torch.ones(2), Rows(torch.ones(2), [0, 2])),
            r"rewards: got 2 numbers for as many rows and as many tokens, expected Rows\(values, lengths\)",
        ),
    ],
)
def test_penalize_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rewards_of_packed_rows_some_of_which_are_empty():
    rewards, _ = penalize(torch.tensor([1.0, 2.0]), Rows(torch.ones(2), [0, 2]))
    assert rewards.values.tolist() == [0.0, 2.0]


# --- coefficients -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 4000)), max_size=8))
def test_adaptive_kl(updates):
    control, value = AdaptiveKL(0.1, 6.0, 10_000), 0.1
    for k, (measured, steps) in enumerate(updates):
        control.update(torch.tensor(measured, dtype=torch.float64) if k % 2 else measured, steps)
        value *= 1 + max(-0.2, min(0.2, measured / 6.0 - 1)) * steps / 10_000
        assert control.value == pytest.approx(value)
    other = AdaptiveKL(9.0, 1.0, 1.0)
    other.load_state_dict(control.state_dict())
    assert vars(other) == vars(control)


@pytest.mark.parametrize("bad", [math.nan, math.inf, torch.tensor(math.nan)])
def test_adaptive_kl_refuses_what_is_not_finite(bad):
    control = AdaptiveKL(0.1, 6.0, 10_000)
    with pytest.raises(ValueError, match=r"kl: got (nan|inf), expected a finite number; the coefficient stays 0.1"):
        control.update(bad, 256)
    assert control.value == 0.1


def test_coefficients_check_their_numbers():
    with pytest.raises(ValueError, match=r"n_steps: got 50000, expected fewer than 50000"):
        AdaptiveKL(0.1, 6.0, 10_000).update(0.0, 50_000)  # would make the coefficient 0 or negative, for good
    for bad, name in (((-0.1, 6, 10), "init"), ((0.1, 0, 10), "target"), ((0.1, 6, math.inf), "horizon")):
        with pytest.raises(ValueError, match=f"{name}: got {bad[('init', 'target', 'horizon').index(name)]}"):
            AdaptiveKL(*bad)
    control = AdaptiveKL(0.1, 6.0, 10_000)
    with pytest.raises(ValueError, match="target: got -1"):
        control.load_state_dict({"value": 0.5, "target": -1, "horizon": 1, "clip": 0.2})
    fixed = FixedKL(0.01)
    for state, words in (
        ({}, "state: got nothing, expected value"),
        ({"valeu": 1.0}, "state: got valeu, expected value"),
        (None, "state: got NoneType, expected a mapping of value"),
    ):
        for coefficient in (control, fixed):
            with pytest.raises(ValueError, match=words):
                coefficient.load_state_dict(state)
    for measured, words in ((torch.ones(2), r"shape \[2\]"), (None, "None"), ("much", "'much'")):
        with pytest.raises(ValueError, match=f"kl: got {words}, expected one number"):
            control.update(measured, 1)
    assert control.state_dict() == {"value": 0.1, "target": 6.0, "horizon": 10_000.0, "clip": 0.2}
    fixed.update(100.0, 10)
    assert fixed.state_dict() == {"value": 0.01}
    fixed.load_state_dict({"value": 0.02})
    assert fixed.value == 0.02
    with pytest.raises(ValueError, match="coef: got -1"):
        FixedKL(-1)


def test_a_controller_is_a_coefficient():
    for controller in (FixedKL(0.25), AdaptiveKL(0.25, 6, 100)):
        with_it = penalize([1.0], [[0.5, 0.2]], [[1, 1]], coef=controller)
        torch.testing.assert_close(with_it.rewards[0], penalize([1.0], [[0.5, 0.2]], [[1, 1]], coef=0.25).rewards[0])
        assert kl_loss([[-1.0]], [[-2.0]], coef=controller).value == kl_loss([[-1.0]], [[-2.0]], coef=0.25).value
