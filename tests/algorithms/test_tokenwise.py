"""Estimators over single tokens: distillation, and group scores that spare some tokens."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbook.algorithms.advantages.tokenwise import clip_b, clip_v, jsd, on_policy_distill

LOGS = st.floats(-30, -1e-6)
PAIRS = st.lists(st.tuples(LOGS, LOGS, st.booleans()), min_size=1, max_size=12)


def columns(rows: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    return [torch.tensor([list(column)], dtype=torch.float64) for column in zip(*rows, strict=True)]


@given(rows=PAIRS, coef=st.floats(0.1, 3))
def test_distillation_is_the_gap_of_log_probs(rows: list[tuple[float, float, bool]], coef: float) -> None:
    student, teacher, mask = columns(rows)
    estimated = on_policy_distill(student, teacher, mask, coef=coef)
    expected = [coef * (t - s) if on else 0.0 for s, t, on in rows]
    assert estimated.advantages[0].tolist() == pytest.approx(expected)
    gaps = [s - t for s, t, on in rows if on]
    assert estimated.report.metrics["kl"] == pytest.approx(statistics.fmean(gaps) if gaps else 0.0)
    assert estimated.report.which("no actions") == ([] if gaps else [0])


@given(rows=PAIRS, beta=st.floats(0, 1), coef=st.floats(0.1, 3))
def test_jsd_has_the_sign_of_the_gap_and_a_divergence_of_at_least_zero(
    rows: list[tuple[float, float, bool]], beta: float, coef: float
) -> None:
    student, teacher, mask = columns(rows)
    estimated = jsd(student, teacher, mask, beta=beta, coef=coef)
    for advantage, (s, t, on) in zip(estimated.advantages[0].tolist(), rows, strict=True):
        if not on:
            assert advantage == 0
        elif abs(t - s) > 1e-9:
            assert math.copysign(1, advantage) == math.copysign(1, t - s)
    assert estimated.report.metrics["divergence"] >= 0


@given(student=LOGS, teacher=LOGS, beta=st.floats(0.01, 0.99))
def test_jsd_is_log_of_mixture_over_student(student: float, teacher: float, beta: float) -> None:
    p, q = math.exp(student), math.exp(teacher)
    expected = (1 - beta) * math.log((beta * q + (1 - beta) * p) / p)
    advantages = jsd([[student]], [[teacher]], beta=beta, normalize=False).advantages
    wide = jsd(
        torch.tensor([[student]], dtype=torch.float64), torch.tensor([[teacher]], dtype=torch.float64), beta=beta
    )
    assert advantages[0].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert wide.advantages.item() == pytest.approx(expected / (beta * (1 - beta)), rel=1e-9, abs=1e-12)


def test_jsd_at_its_ends() -> None:
    student, teacher = torch.tensor([[-0.5, -2.0]]), torch.tensor([[-1.5, -0.25]])
    torch.testing.assert_close(
        jsd(student, teacher, beta=1.0).advantages, on_policy_distill(student, teacher).advantages
    )
    torch.testing.assert_close(jsd(student, teacher, beta=0.0).advantages, torch.exp(teacher - student) - 1)
    near_zero = jsd(student, teacher, beta=1e-9).advantages
    torch.testing.assert_close(near_zero, jsd(student, teacher, beta=0.0).advantages)


def test_jsd_is_the_gradient_of_the_divergence() -> None:
    # Over a whole vocabulary: sum over tokens of p * advantage * d log p is minus the gradient of D itself.
    torch.manual_seed(0)
    beta = 0.3
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64).log_softmax(-1)
    student = logits.log_softmax(-1)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    divergence = (
        beta * (teacher.exp() * (teacher - mixture)).sum() + (1 - beta) * (student.exp() * (student - mixture)).sum()
    )
    (right,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    advantages = jsd(student.detach()[None], teacher[None], beta=beta, normalize=False).advantages[0]
    (gradient,) = torch.autograd.grad((student.exp().detach() * advantages * student).sum(), logits)
    torch.testing.assert_close(gradient, -right)
    # and the reported divergence, weighted by the student, is D
    divergences = [
        jsd([[s]], [[t]], beta=beta).report.metrics["divergence"]
        for s, t in zip(student.tolist(), teacher.tolist(), strict=True)
    ]
    total = sum(p * d for p, d in zip(student.exp().tolist(), divergences, strict=True))
    assert total == pytest.approx(divergence.item(), rel=1e-5)


def naive_clip_b(advantages: Any, logs: Any, entropy: Any, mask: Any, mu: float) -> list[list[bool]]:
    push = [[math.exp(x) * (h + x) for x, h in zip(a, b, strict=True)] for a, b in zip(logs, entropy, strict=True)]
    unmasked = [s for row, on in zip(push, mask, strict=True) for s, keep in zip(row, on, strict=True) if keep]
    mean, std = (statistics.fmean(unmasked), statistics.pstdev(unmasked)) if unmasked else (0.0, 0.0)
    return [
        [bool(keep) and not (a < 0 and s - mean < -mu * std) for a, s, keep in zip(row, pushes, on, strict=True)]
        for row, pushes, on in zip(advantages, push, mask, strict=True)
    ]


@given(data=st.data())
def test_clip_b_equals_its_loop_padded_and_packed(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 5)), 4
    matrix = st.lists(st.lists(st.floats(-4, -0.01), min_size=width, max_size=width), min_size=rows, max_size=rows)
    logs, entropy = data.draw(matrix), [[-x for x in row] for row in data.draw(matrix)]
    mask = data.draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=rows, max_size=rows))
    mu = data.draw(st.sampled_from([0.53, 1.13]))
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (logs, entropy)]
    estimated = clip_b(rewards, ["a"] * rows, torch.tensor(mask), *tensors, mu=mu)
    expected = naive_clip_b(estimated.advantages.tolist(), logs, entropy, mask, mu)
    assert estimated.mask.tolist() == expected
    assert not (estimated.mask & ~torch.tensor(mask)).any()
    packed = clip_b(rewards, ["a"] * rows, mask, logs, entropy, mu=mu)
    assert [row.tolist() for row in packed.mask] == expected


def test_clip_v_takes_the_largest_first() -> None:
    mask = torch.ones(2, 4)
    necs = torch.tensor([[0.9, 0.8, 0.1, 0.1], [0.9, 0.9, 0.1, 0.1]])
    logs, entropy = torch.full((2, 4), -0.5), torch.full((2, 4), 0.5)
    estimated = clip_v([0.0, 1.0], ["a", "a"], mask, logs, entropy, necs, mu=0.1, max_frac=0.125)
    assert estimated.mask.tolist() == [[False, True, True, True], [True] * 4]
    both = clip_v([0.0, 1.0], ["a", "a"], mask, logs, entropy, necs, mu=0.1, max_frac=0.25)
    assert both.mask.tolist() == [[False, False, True, True], [True] * 4]
    assert both.report.metrics["frac_clipped"] == 0.25
    assert both.report.which("tokens left out") == [0]
    none = clip_v([0.0, 1.0], ["a", "a"], mask, logs, entropy, necs, mu=0.1, max_frac=0.0)
    assert none.mask.all()


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="beta: got 2, expected a number from 0 to 1"):
        jsd([[0.0]], [[0.0]], beta=2)
    with pytest.raises(ValueError, match="zero_advantage: got 'drop'"):
        clip_v([0.0], ["a"], [[1]], [[0.0]], [[0.0]], [[0.0]], zero_advantage="drop")
    with pytest.raises(ValueError, match="teacher_logprobs: got rows of lengths"):
        on_policy_distill([[0.0, 0.0]], [[0.0]])


def test_a_teacher_that_rules_a_token_out_leaves_a_finite_divergence() -> None:
    for teacher in (-math.inf, 0.0, 900.0):
        estimated = jsd(torch.tensor([[-1.0]]), torch.tensor([[teacher]]))
        assert math.isfinite(estimated.report.metrics["divergence"])


def test_half_precision_log_probs_are_subtracted_as_they_are() -> None:
    student, teacher = torch.tensor([[-10.06]]).bfloat16(), torch.tensor([[-0.0123]]).bfloat16()
    advantages = on_policy_distill(student, teacher).advantages
    assert advantages.dtype == torch.float32
    assert advantages.item() == pytest.approx(teacher.item() - student.item(), abs=1e-6)


@pytest.mark.parametrize("n", range(1, 21))
def test_tokens_that_are_all_alike_are_all_kept(n: int) -> None:
    mask, logs, entropy = torch.ones(2, n), torch.full((2, n), -0.5), torch.full((2, n), 0.7)
    assert clip_b([0.0, 1.0], ["a", "a"], mask, logs, entropy, mu=0.0).mask.all()
    assert clip_v([0.0, 1.0], ["a", "a"], mask, logs, entropy, entropy, mu=0.0, max_frac=1.0).mask.all()
