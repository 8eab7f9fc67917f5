"""KL estimators, the penalty in the reward, and coefficients, against references with Python loops."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.algorithms.kl import KL, AdaptiveKL, FixedKL, corrected_k3, k3, kl, kl_loss, penalise, token_kl
from rollbook.jagged import Rows


def naive(name: str, lp: float, ref: float, old: float | None = None) -> float:
    d = lp - ref
    third = math.exp(-d) - 1 + d
    if name == "low_var_kl":
        held = min(max(d, -20.0), 20.0)
        return min(max(math.exp(-held) - 1 + held, -10.0), 10.0)
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
        found = kl(name, lp.reshape(shape), ref.reshape(shape), old.reshape(shape))
        assert found.shape == lp.reshape(shape).shape and found.dtype == torch.float64
        assert found.flatten().tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
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
    with pytest.raises(ValueError, match=r"KL estimator: got 'k4', expected one of its names; \(none, k1, kl, k2"):
        kl("k4", [0.0], [0.0])
    with pytest.raises(ValueError, match=r"corrected_k3: option 'cpa' is none of its options; did you mean 'cap'"):
        kl("corrected_k3", [0.0], [0.0], cpa=3.0)
    with pytest.raises(ValueError, match=r"ref_log_probs: got shape \[1\], expected \[2\]"):
        kl("k1", [0.0, 0.0], [0.0])
    with pytest.raises(ValueError, match=r"cap: got -1"):
        corrected_k3([0.0], [0.0], [0.0], cap=-1)


def test_k3_near_zero_and_far_away():
    small = k3([0.0], [1e-4]).item()
    assert small == pytest.approx(math.expm1(1e-4) - 1e-4, rel=1e-2)  # exp(d) - 1 - d would have no digit right
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
        found = corrected_k3(log_p, ref, old, detach_ratio=detach)
        return torch.autograd.grad((old.exp() * found).sum(), logits, retain_graph=True)[0]

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
    found = kl_loss([[-1.0]], [[-2.0]], None, [[-3.0]], estimator="corrected_k3", coef=1.0, estimator_options=options)
    assert found.value.item() == pytest.approx(math.exp(-1))
    with pytest.raises(ValueError, match="coef: got nan"):
        kl_loss([[-1.0]], [[-2.0]], coef=math.nan)


# --- the penalty in the reward ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6), coef=st.sampled_from([0.1, 0.0, -1.0]), clip=st.sampled_from([None, 0.5, (-0.1, 2.0)])
)
def test_penalise(seed, coef, clip):
    draw = random.Random(seed)
    lengths = [draw.randint(0, 5) for _ in range(draw.randint(1, 4))]
    mask = [[draw.random() < 0.6 for _ in range(n)] for n in lengths]
    kls = [[draw.gauss(0, 1) if kept else math.nan for kept in row] for row in mask]
    rewards = [draw.choice([draw.gauss(0, 1), math.nan]) for _ in lengths]
    low, high = (-math.inf, math.inf) if clip is None else (-0.5, 0.5) if clip == 0.5 else (-0.1, 2.0)
    expected, no_actions = [], []
    for i, row in enumerate(mask):
        last = max((j for j, kept in enumerate(row) if kept), default=None)
        if last is None:
            no_actions.append(i)
        reward = 0.0 if math.isnan(rewards[i]) else rewards[i]
        reward = min(max(reward, low), high)
        penalties = [-max(coef, 0) * kls[i][j] if kept else 0.0 for j, kept in enumerate(row)]
        expected.append([penalty + (reward if j == last else 0.0) for j, penalty in enumerate(penalties)])
    missing = [i for i, reward in enumerate(rewards) if math.isnan(reward)]

    flat = doubles([x for row in kls for x in row])
    kept = Rows(torch.tensor([x for row in mask for x in row], dtype=torch.bool), lengths)
    found, report = penalise(rewards, Rows(flat, lengths), kept, coef=coef, reward_clip=clip)
    assert [row.tolist() for row in found] == [pytest.approx(row, abs=1e-6) for row in expected]
    assert report.reasons == {"no actions": no_actions, "missing reward": missing} and report.rows == len(lengths)

    width = max(lengths) + 1
    padded, wide = torch.full((len(lengths), width), math.nan), torch.zeros(len(lengths), width)
    for i, n in enumerate(lengths):  # left-padded
        padded[i, width - n :], wide[i, width - n :] = torch.tensor(kls[i]), torch.tensor(mask[i], dtype=torch.float)
    again, _ = penalise(torch.tensor(rewards), padded, wide, coef=coef, reward_clip=clip)
    for i, n in enumerate(lengths):
        assert again[i, width - n :].tolist() == pytest.approx(expected[i], abs=1e-6)
        assert (again[i, : width - n] == 0).all()


def test_penalise_rewards_of_tokens_and_none():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    given_ = torch.tensor([[1.0, 5.0, 9.0], [0.0, math.nan, 2.0]])
    found, report = penalise(given_, torch.ones(2, 3), mask, coef=0.5, reward_clip=3.0)
    assert found.tolist() == [[0.5, 2.5, 0.0], [-0.5, -0.5, 1.5]]
    assert report.which("missing reward") == [1] and report.metrics == {"kl": 1.0, "kl_coef": 0.5}
    found, report = penalise([None, 2.0], None, mask)
    assert found.tolist() == [[0, 0, 0], [0, 0, 2.0]] and report.reasons["missing reward"] == [0]
    found, _ = penalise([[1.0, 2.0], [3.0]], [[0.1, 0.2], [0.3]], coef=1.0)
    assert [row.tolist() for row in found] == [pytest.approx([0.9, 1.8]), pytest.approx([2.7])]
    assert penalise(doubles([1.0]), doubles([[1.0]]), coef=1.0).rewards.dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: penalise([1.0], None, torch.ones(1, 2), coef=0.1), r"kl: got None, expected the KL of tokens"),
        (lambda: penalise([1.0, 2.0, 3.0], torch.ones(2, 2)), r"rewards: got shape \[3\], expected \[2\]"),
        (lambda: penalise([1.0], torch.ones(1, 2), coef=math.nan), r"coef: got nan"),
        (lambda: penalise([1.0], torch.ones(1, 2), reward_clip=(2, 1)), r"reward_clip: got 1, expected .* below 2"),
        (
            lambda: penalise(torch.ones(2), Rows(torch.ones(2), [0, 2])),
            r"rewards: got 2 numbers for as many rows and as many tokens, expected Rows\(values, lengths\)",
        ),
    ],
)
def test_penalise_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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
    assert control.state_dict() == {"value": 0.1, "target": 6.0, "horizon": 10_000.0, "clip": 0.2}
    fixed = FixedKL(0.01)
    fixed.update(100.0, 10)
    assert fixed.state_dict() == {"value": 0.01}
    fixed.load_state_dict({"value": 0.02})
    assert fixed.value == 0.02
    with pytest.raises(ValueError, match="coef: got -1"):
        FixedKL(-1)
