"""Log-probs, entropies and likeliest tokens against the textbook in float64, whatever the pieces they come from."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.algorithms.kernels import vocabulary as _vocabulary
from rollbook.models import logprobs
from rollbook.models import logprobs as output_layers
from rollbook.models.logprobs import (
    OutputLayer,
    TokenStats,
    entropy_from_logits,
    from_hidden,
    from_logits,
    top_k,
    top_k_from_hidden,
)

INF = float("inf")


def textbook(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float | torch.Tensor = 1.0, ignore: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64, in the order of the definitions."""
    temperatures = torch.as_tensor(temperature, dtype=torch.float64).expand(labels.shape)
    log_probs = torch.log_softmax(logits.double() / temperatures[..., None], -1)
    probs = log_probs.exp()
    entropy = -torch.where(probs > 0, probs * log_probs, 0).sum(-1)
    labeled = labels != ignore
    chosen = log_probs.gather(-1, torch.where(labeled, labels, 0)[..., None])[..., 0]
    return torch.where(labeled, chosen, 0), entropy


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@contextmanager
def tile_sizes(piece: int, tile: tuple[int, int]) -> Iterator[None]:
    """Pieces and tiles of another size than the usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_vocabulary, "_PIECE_CPU", piece)
        patch.setattr(output_layers, "_TILE_CPU", tile)
        yield


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, float | torch.Tensor]:
    """Logits in float64 with some at -inf, labels with some to be ignored, temperatures."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    vocabulary = draw(st.integers(1, 30))
    seeded = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn((*shape, vocabulary), generator=seeded, dtype=torch.float64) * draw(st.sampled_from([1, 30]))
    labels = torch.randint(0, vocabulary, shape, generator=seeded)
    if draw(st.booleans()):
        # One logit of each row stays, so that there is a distribution.
        ruled_out = torch.rand(logits.shape, generator=seeded) < 0.5
        ruled_out.scatter_(-1, torch.randint(0, vocabulary, (*shape, 1), generator=seeded), False)
        logits = logits.masked_fill(ruled_out, -INF)
    if draw(st.booleans()):
        labels = labels.masked_fill(torch.rand(shape, generator=seeded) < 0.3, -100)
    temperatures = torch.rand(shape, generator=seeded, dtype=torch.float64) * 2 + 0.25
    temperature = draw(st.sampled_from([1.0, 0.7, 3.0, temperatures, torch.tensor(1.5)]))
    return logits, labels, temperature


SIZES = st.sampled_from([(1, (1, 1)), (7, (2, 3)), (64, (3, 5)), (1 << 18, (512, 2048))])


@given(cases(), SIZES)
@settings(deadline=None, max_examples=150)
def test_values_are_the_textbooks(
    case: tuple[torch.Tensor, torch.Tensor, float | torch.Tensor], size: tuple[int, tuple[int, int]]
) -> None:
    logits, labels, temperature = case
    log_probs, entropy = textbook(logits, labels, temperature)
    with tile_sizes(*size):
        scored = from_logits(logits, labels, temperature=temperature, entropy=True)
        assert scored.entropy is not None
        assert scored.logprobs.dtype == scored.entropy.dtype == torch.float64
        close(scored.logprobs, log_probs)
        close(scored.entropy, entropy)
        close(from_logits(logits, labels, temperature=temperature).logprobs, log_probs)
        close(entropy_from_logits(logits, temperature=temperature), entropy)


@given(cases(), SIZES)
@settings(deadline=None, max_examples=100)
def test_gradients_are_the_textbooks(
    case: tuple[torch.Tensor, torch.Tensor, float | torch.Tensor], size: tuple[int, tuple[int, int]]
) -> None:
    logits, labels, temperature = case
    # The textbook has no gradient beside -inf, so there it gets the limit: a logit that is merely very low.
    low = logits.clamp(min=-1e5).requires_grad_()
    log_probs, entropy = textbook(low, labels, temperature)
    # A label that cannot be has log-prob -inf, and a gradient that is none: leave it out.
    possible = log_probs > -1e3
    weights = torch.randn(2, *labels.shape, dtype=torch.float64)
    weights[0] = torch.where(possible, weights[0], 0)
    logits = logits.clone().requires_grad_()
    with tile_sizes(*size):
        scored = from_logits(logits, labels, temperature=temperature, entropy=True)
        assert scored.entropy is not None
        for outputs, expected in (
            ((scored.logprobs, None), (log_probs, None)),
            ((None, scored.entropy), (None, entropy)),
            ((scored.logprobs, scored.entropy), (log_probs, entropy)),
        ):
            (slopes,) = torch.autograd.grad(weighed(outputs, weights), logits, retain_graph=True)
            (expected_slopes,) = torch.autograd.grad(weighed(expected, weights), low, retain_graph=True)
            close(slopes, expected_slopes, 1e-8)
            assert not slopes[logits == -INF].any()


def weighed(parts: tuple[torch.Tensor | None, ...], weights: torch.Tensor) -> torch.Tensor:
    """A loss; where a weight is 0 a value of -inf adds nothing."""
    return sum(
        (torch.where(weight != 0, part, 0) * weight).sum()
        for part, weight in zip(parts, weights, strict=True)
        if part is not None
    )  # type: ignore[return-value]


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([[0.5], [2.0]])])
def test_gradcheck_from_logits(temperature: float | torch.Tensor) -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 4, -100], [2, 2, 1]])
    with tile_sizes(5, (1, 1)):
        assert torch.autograd.gradcheck(
            lambda x: tuple(from_logits(x, labels, temperature=temperature, entropy=True)), (logits,)
        )
        assert torch.autograd.gradcheck(lambda x: from_logits(x, labels, temperature=temperature)[0], (logits,))
        assert torch.autograd.gradcheck(lambda x: entropy_from_logits(x, temperature=temperature), (logits,))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("tile", [(1, 2), (2, 3), (512, 2048)])
def test_gradcheck_from_hidden(softcap: float | None, tile: tuple[int, int]) -> None:
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([6, -100, 0])
    with tile_sizes(7, tile):
        assert torch.autograd.gradcheck(
            lambda h, w, b: tuple(from_hidden(h, w, labels, bias=b, temperature=0.8, entropy=True, softcap=softcap)),
            (hidden, weight, bias),
        )
        assert torch.autograd.gradcheck(
            lambda w: from_hidden(hidden.detach(), w, labels, softcap=softcap)[0], (weight,)
        )


@given(
    st.lists(st.integers(0, 4), max_size=2).map(tuple),
    st.integers(1, 20),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([None, 0.5, 10.0]),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    SIZES,
    st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=120)
def test_from_hidden_is_from_logits(
    shape: tuple[int, ...],
    vocabulary: int,
    width: int,
    biased: bool,
    softcap: float | None,
    dtype: torch.dtype,
    size: tuple[int, tuple[int, int]],
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    parts = [
        torch.randn(*shape, width, generator=draw),
        torch.randn(vocabulary, width, generator=draw),
        torch.randn(vocabulary, generator=draw),
    ]
    parts = [part.to(dtype) for part in parts]
    labels = torch.randint(0, vocabulary, shape, generator=draw)
    weights = torch.randn(2, *shape, generator=draw, dtype=torch.float64)
    leaves = [part.clone().requires_grad_() for part in parts]
    exact = [part.double().requires_grad_() for part in parts]
    with tile_sizes(*size):
        scored = from_hidden(
            leaves[0],
            leaves[1],
            labels,
            bias=leaves[2] if biased else None,
            temperature=0.9,
            softcap=softcap,
            entropy=True,
        )
        assert scored.entropy is not None
        logits = exact[0] @ exact[1].T + (exact[2] if biased else 0)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        expected = from_logits(logits, labels, temperature=0.9, entropy=True)
        assert expected.entropy is not None
        close_enough = 1e-10 if dtype == torch.float64 else 2e-5
        close(scored.logprobs, expected.logprobs, close_enough)
        close(scored.entropy, expected.entropy, close_enough)
        weighed(tuple(scored), weights).backward()
        weighed(tuple(expected), weights).backward()
    for tensor, reference in zip(leaves, exact, strict=True):
        if tensor is leaves[2] and not biased:
            assert tensor.grad is None
            continue
        assert tensor.grad is not None and reference.grad is not None
        assert tensor.grad.dtype == dtype
        # A gradient in bfloat16 is rounded to it once, at the end.
        torch.testing.assert_close(
            tensor.grad.double(),
            reference.grad,
            rtol=4e-3 if dtype == torch.bfloat16 else close_enough,
            atol=close_enough,
        )


@contextmanager
def sixteen_bits() -> Iterator[set[tuple[torch.dtype, ...]]]:
    """Heads as on a CUDA device: 16-bit factors stay what they are. Gives the types of every product's two and result.

    A CPU has no product of them that is summed in float32, so they are widened for the product, and for nothing else.
    """
    seen: set[tuple[torch.dtype, ...]] = set()
    from_tensors, product = OutputLayer.from_tensors, OutputLayer.product

    def narrow(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None
    ) -> OutputLayer:
        layer = from_tensors(hidden, weight, bias, softcap)
        return replace(layer, factor_dtype=torch.promote_types(hidden.dtype, weight.dtype))

    def widened(
        head: OutputLayer, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, add: bool = False
    ) -> torch.Tensor:
        seen.add((left.dtype, right.dtype, out.dtype))
        return product(head, left.to(out.dtype), right.to(out.dtype), out, add)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputLayer, "from_tensors", staticmethod(narrow))
        patch.setattr(OutputLayer, "product", widened)
        yield seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("tile", [(1, 1), (3, 5), (4, 2048), (7, 12), (512, 5), (512, 2048)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_products_of_sixteen_bits(dtype: torch.dtype, count: int, tile: tuple[int, int], softcap: float | None) -> None:
    draw = torch.Generator().manual_seed(count)
    parts = [torch.randn(*shape, generator=draw).to(dtype) for shape in ((count, 6), (12, 6), (12,))]
    labels = torch.randint(0, 12, (count,), generator=draw)
    weights = torch.randn(2, count, generator=draw, dtype=torch.float64)
    leaves = [part.clone().requires_grad_() for part in parts]
    with tile_sizes(64, tile), sixteen_bits() as seen:
        scored = from_hidden(
            leaves[0], leaves[1], labels, bias=leaves[2], softcap=softcap, temperature=0.9, entropy=True
        )
        weighed(tuple(scored), weights).backward()
    assert seen == ({(dtype, dtype, torch.float32)} if count else set())
    hidden, weight, bias = (part.double() for part in parts)
    logits = (hidden @ weight.T + bias).requires_grad_()
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = textbook(capped, labels, 0.9)
    assert scored.entropy is not None
    close(scored.logprobs, expected[0], 2e-5)
    close(scored.entropy, expected[1], 2e-5)
    (slopes,) = torch.autograd.grad(weighed(expected, weights), logits)
    ones = torch.ones(count, 1, dtype=torch.float64)
    for leaf, left, right in ((leaves[0], slopes, weight), (leaves[1], slopes.T, hidden), (leaves[2], slopes.T, ones)):
        assert leaf.grad is not None and leaf.grad.dtype == dtype
        # Each slope is rounded to 16 bits, and so is the gradient: half an eps both times, of terms as large as these.
        bound = 1.1 * torch.finfo(dtype).eps * (left.abs() @ right.abs()) + 1e-5
        exact = left @ right
        assert ((leaf.grad.double().view(exact.shape) - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_few_bits_lose_nothing(dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 40_000) * 4).to(dtype)
    labels = torch.randint(0, 40_000, (6,))
    log_probs, entropy = textbook(logits, labels, 0.9)
    scored = from_logits(logits, labels, temperature=0.9, entropy=True)
    assert scored.entropy is not None
    assert scored.logprobs.dtype == scored.entropy.dtype == torch.float32
    assert (scored.logprobs - log_probs).abs().max() < 1e-5
    assert (scored.entropy - entropy).abs().max() < 1e-5
    hidden, weight = torch.randn(6, 96).to(dtype), torch.randn(5000, 96).to(dtype)
    labels = torch.randint(0, 5000, (6,))
    log_probs, entropy = textbook(hidden.double() @ weight.double().T, labels)
    scored = from_hidden(hidden, weight, labels, entropy=True)
    assert scored.entropy is not None
    assert (scored.logprobs - log_probs).abs().max() < 1e-4
    assert (scored.entropy - entropy).abs().max() < 1e-4


def test_the_gradient_has_the_logits_type() -> None:
    logits = torch.randn(3, 50).bfloat16().requires_grad_()
    exact = logits.detach().double().requires_grad_()
    labels = torch.tensor([1, 2, 3])
    weighed(tuple(from_logits(logits, labels, entropy=True)), torch.ones(2, 3)).backward()
    weighed(textbook(exact, labels), torch.ones(2, 3)).backward()
    assert logits.grad is not None and exact.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=4e-3, atol=1e-6)


def test_known_entropies() -> None:
    logits = torch.tensor([[[0.0, 0, 0, 0], [10.0, 0, 0, 0], [1.0, 2, 3, 4]]])
    expected = torch.tensor([[1.3862943649, 0.0014981878, 0.9475371242]])
    torch.testing.assert_close(entropy_from_logits(logits), expected, rtol=1e-7, atol=2e-7)
    # The published numbers are float32's; in float64 the second is 1.8e-7 lower.
    assert entropy_from_logits(logits.double())[0, 1].item() == pytest.approx(0.0014980029292489387, rel=1e-12)
    assert entropy_from_logits(torch.zeros(7)).item() == pytest.approx(math.log(7))


def test_large_logits_lose_no_digits() -> None:
    # The same distribution, far from 0: differences of such numbers are exact, their powers are not touched.
    logits = torch.randn(4, 1000).mul(64).round().div(64)
    labels = torch.tensor([0, 1, 2, 3])
    unshifted, shifted = (from_logits(logits + shift, labels, entropy=True) for shift in (0.0, 4096.0))
    assert unshifted.entropy is not None and shifted.entropy is not None
    assert torch.equal(unshifted.logprobs, shifted.logprobs)
    assert torch.equal(unshifted.entropy, shifted.entropy)
    sharp = torch.tensor([[0.0, -1e4, -3e38]])
    scored = from_logits(sharp, torch.tensor([0]), entropy=True, temperature=1e-3)
    assert scored.logprobs.item() == 0 and scored.entropy is not None and scored.entropy.item() == 0


def test_tokens_that_cannot_be() -> None:
    logits = torch.tensor([[0.0, -INF, 0.0], [-INF, 5.0, -INF]], requires_grad=True)
    scored = from_logits(logits, torch.tensor([1, 1]), entropy=True)
    assert scored.entropy is not None
    assert scored.logprobs.tolist() == [-INF, 0.0]
    close(scored.entropy, torch.tensor([math.log(2), 0.0]), 1e-6)
    scored.entropy.sum().backward()
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros(2, 3))
    assert from_logits(torch.full((1, 3), -INF), torch.tensor([0])).logprobs.isnan().all()
    assert from_logits(torch.tensor([[1.0, torch.nan]]), torch.tensor([0])).logprobs.isnan().all()
    bias = torch.tensor([0.0, -INF, 0.0])
    through = from_hidden(torch.zeros(1, 2), torch.ones(3, 2), torch.tensor([1]), bias=bias, entropy=True)
    assert through.entropy is not None
    assert through.logprobs.tolist() == [-INF] and through.entropy.item() == pytest.approx(math.log(2))
    with tile_sizes(1, (1, 1)):
        through = from_hidden(torch.zeros(1, 2), torch.ones(3, 2), torch.tensor([0]), bias=bias.flip(0).roll(1))
    assert through.logprobs.item() == pytest.approx(-math.log(2))


def test_ignored_labels() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    labels = torch.tensor([1, -100, 2])
    scored = from_logits(logits, labels, entropy=True)
    assert scored.logprobs[1] == 0 and scored.entropy is not None and scored.entropy[1] > 0
    scored.logprobs.sum().backward()
    assert logits.grad is not None
    assert not logits.grad[1].any() and logits.grad[0].any()
    zero = from_logits(logits, torch.tensor([0, 3, 0]), ignore_index=0).logprobs
    assert (zero == 0).tolist() == [True, False, True]
    assert from_logits(logits, labels).entropy is None


POISONS = [torch.nan, INF, -INF]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, (1, 1)), (12, (2, 3)), (1 << 18, (512, 2048))])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ignored_logits_may_be_anything(
    poison: float, dtype: torch.dtype, size: tuple[int, tuple[int, int]], temperature: float
) -> None:
    logits = torch.randn(5, 6).to(dtype)
    labels = torch.tensor([2, -100, 5, -100, 0])
    labeled = labels != -100
    spoilt = logits.clone()
    spoilt[1], spoilt[3, 4] = poison, poison
    all_logits, alone = spoilt.requires_grad_(), logits[labeled].requires_grad_()
    with tile_sizes(*size):
        scored = from_logits(all_logits, labels, temperature=temperature, entropy=True)
        expected = from_logits(alone, labels[labeled], temperature=temperature, entropy=True)
        assert scored.entropy is not None and expected.entropy is not None
        assert torch.equal(scored.logprobs[labeled], expected.logprobs) and not scored.logprobs[~labeled].any()
        # The log-probs alone; then also the entropies, of which the loss leaves out some.
        for output, expected_output in (
            (scored.logprobs.sum(), expected.logprobs.sum()),
            (
                scored.logprobs.sum() + torch.where(labeled, scored.entropy, 0).sum(),
                expected.logprobs.sum() + expected.entropy.sum(),
            ),
        ):
            (slopes,) = torch.autograd.grad(output, all_logits, retain_graph=True)
            (expected_slopes,) = torch.autograd.grad(expected_output, alone, retain_graph=True)
            assert torch.equal(slopes[~labeled], torch.zeros_like(slopes[~labeled]))
            assert torch.equal(slopes[labeled], expected_slopes) and expected_slopes.any()
        # Where an entropy counts it is not hidden that there is none.
        (slopes,) = torch.autograd.grad(scored.entropy.sum(), all_logits)
        assert slopes[1].isnan().all() and slopes[labeled].isfinite().all()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [(1, 1), (2, 3), (512, 2048)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("narrow", [False, True])
def test_ignored_hidden_states_may_be_anything(
    poison: float, dtype: torch.dtype, tile: tuple[int, int], softcap: float | None, narrow: bool
) -> None:
    parts = [torch.randn(*shape).to(dtype) for shape in ((5, 4), (7, 4), (7,))]
    labels = torch.tensor([-100, 1, -100, 0, 6])
    labeled = labels != -100
    spoilt = parts[0].clone()
    spoilt[0], spoilt[2, 1] = poison, poison
    leaves = [part.clone().requires_grad_() for part in (spoilt, *parts[1:])]
    exact = [part.double().requires_grad_() for part in (parts[0][labeled], *parts[1:])]
    with tile_sizes(64, tile), sixteen_bits() if narrow else nullcontext():
        scored = from_hidden(leaves[0], leaves[1], labels, bias=leaves[2], softcap=softcap, entropy=True)
        assert scored.entropy is not None
        (scored.logprobs.sum() + torch.where(labeled, scored.entropy, 0).sum()).backward()
        # The weight's gradient alone, and the hidden states' alone.
        by_weight = from_hidden(spoilt, leaves[1], labels, softcap=softcap).logprobs.sum()
        (weight_only,) = torch.autograd.grad(by_weight, leaves[1])
        by_hidden = from_hidden(leaves[0], parts[1], labels, softcap=softcap).logprobs.sum()
        (hidden_only,) = torch.autograd.grad(by_hidden, leaves[0])
    assert weight_only.isfinite().all() and weight_only.any()
    assert hidden_only.isfinite().all() and hidden_only[labeled].any() and not hidden_only[~labeled].any()
    expected = from_hidden(exact[0], exact[1], labels[labeled], bias=exact[2], softcap=softcap, entropy=True)
    assert expected.entropy is not None
    (expected.logprobs.sum() + expected.entropy.sum()).backward()
    assert leaves[0].grad is not None and not leaves[0].grad[~labeled].any()
    close_enough = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    for slopes, reference in zip((leaves[0].grad[labeled], leaves[1].grad, leaves[2].grad), exact, strict=True):
        assert slopes is not None and reference.grad is not None
        close(slopes, reference.grad, close_enough)
    assert torch.equal(leaves[0].detach()[labeled], parts[0][labeled])  # nothing was changed in place
    assert torch.equal(spoilt.isfinite(), leaves[0].isfinite()) and not spoilt[0].isfinite().any()


def test_what_a_loss_leaves_out_has_no_gradient() -> None:
    # No label is ignored here: it is the loss that takes some tokens only.
    logits = torch.tensor([[torch.nan, 1.0], [0.0, 1.0]], requires_grad=True)
    logprobs = from_logits(logits, torch.tensor([0, 0])).logprobs
    torch.where(torch.tensor([False, True]), logprobs, 0).sum().backward()
    assert logits.grad is not None and logits.grad[0].tolist() == [0, 0]
    assert logits.grad[1, 0].item() == pytest.approx(1 - 1 / (1 + math.e))
    # One that counts is not hidden, and its gradient stays its own.
    (slopes,) = torch.autograd.grad(from_logits(logits, torch.tensor([0, 0])).logprobs.sum(), logits)
    assert slopes.isnan().tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("cell", [(-INF, -INF, -INF), (0.0, torch.nan, 1.0), (0.0, INF, 1.0)])
@pytest.mark.parametrize("size", [(1, (1, 1)), (1 << 18, (512, 2048))])
def test_where_there_is_no_distribution(cell: tuple[float, ...], size: tuple[int, tuple[int, int]]) -> None:
    logits = torch.tensor([cell, (0.0, 0.0, 0.0)], requires_grad=True)
    bias = torch.tensor(cell, requires_grad=True)
    with tile_sizes(*size):
        scored = from_logits(logits, torch.tensor([0, 0]), entropy=True)
        assert scored.entropy is not None
        assert scored.logprobs.isnan().tolist() == scored.entropy.isnan().tolist() == [True, False]
        (slopes,) = torch.autograd.grad(scored.logprobs.sum() + scored.entropy.sum(), logits)
        assert slopes[0].isnan().all() and slopes[1].isfinite().all()
        through = from_hidden(torch.zeros(1, 2), torch.ones(3, 2), torch.tensor([0]), bias=bias, entropy=True)
        assert through.entropy is not None
        assert through.logprobs.isnan().all() and through.entropy.isnan().all()
        assert entropy_from_logits(logits).isnan().tolist() == [True, False]


def test_numbers_may_be_numpys() -> None:
    logits, labels = torch.randn(2, 5), torch.tensor([0, 3])
    expected = from_logits(logits, labels, temperature=0.5, ignore_index=3).logprobs
    for half in (np.float32(0.5), np.float64(0.5), np.float16(0.5)):
        scored = from_logits(logits, labels, temperature=half, ignore_index=np.int64(3))  # type: ignore[arg-type]
        assert torch.equal(scored.logprobs, expected)
    by_numpy = from_logits(logits, labels, temperature=np.int32(2)).logprobs  # type: ignore[arg-type]
    assert torch.equal(by_numpy, from_logits(logits, labels, temperature=2).logprobs)
    assert torch.equal(top_k(logits, np.int64(2)).ids, top_k(logits, 2).ids)  # type: ignore[arg-type]
    hidden, weight = torch.randn(2, 4), torch.randn(5, 4)
    capped = from_hidden(hidden, weight, labels, softcap=np.float32(2)).logprobs  # type: ignore[arg-type]
    assert torch.equal(capped, from_hidden(hidden, weight, labels, softcap=2.0).logprobs)


def test_the_smallest_temperatures() -> None:
    # Those that can be inverted give the likeliest token all; in float64 there are smaller ones.
    logits, labels = torch.tensor([[0.0, 1.0, -INF]]), torch.tensor([1])
    assert from_logits(logits, labels, temperature=3e-39).logprobs.item() == 0
    assert from_logits(logits.double(), labels, temperature=1e-300).logprobs.item() == 0
    assert from_logits(logits, labels, temperature=torch.tensor([3e-39])).logprobs.item() == 0
    assert from_logits(logits, labels, temperature=1e38).logprobs.item() == pytest.approx(-math.log(2))


def test_slices_are_not_copied() -> None:
    full_logits = torch.randn(3, 5, 8, dtype=torch.float64)
    labels = torch.randint(0, 8, (3, 4))
    for view in (
        full_logits[:, :-1],
        full_logits[:, 1:],
        full_logits.flip(-1)[:, :-1],
        full_logits.transpose(0, 1)[1:].transpose(0, 1),
    ):
        log_probs, entropy = textbook(view, labels)
        with tile_sizes(8, (1, 1)):
            scored = from_logits(view, labels, entropy=True)
        close(scored.logprobs, log_probs)
        assert scored.entropy is not None
        close(scored.entropy, entropy)
    assert _vocabulary.flatten_logits(full_logits[:, :-1]).data_ptr() == full_logits.data_ptr()
    assert _vocabulary.flatten_logits(full_logits[:, -1:]).shape == (1, 3, 8)
    strided = torch.randn(2, 3, 4, 5, dtype=torch.float64)[:, :2, :3]
    close(entropy_from_logits(strided), textbook(strided, torch.zeros(2, 2, 3, dtype=torch.int64))[1])
    logits = full_logits.clone().requires_grad_()
    exact = full_logits.clone().requires_grad_()
    from_logits(logits[:, :-1], labels).logprobs.sum().backward()
    textbook(exact[:, :-1], labels)[0].sum().backward()
    assert logits.grad is not None and exact.grad is not None
    close(logits.grad, exact.grad)


def test_no_gradient_is_asked_for() -> None:
    logits = torch.randn(2, 3)
    scored = from_logits(logits, torch.tensor([0, 1]), entropy=True)
    assert not scored.logprobs.requires_grad
    with_gradient = from_logits(logits.requires_grad_(), torch.tensor([0, 1]))
    assert with_gradient.logprobs.requires_grad
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(with_gradient.logprobs.sum(), logits, create_graph=True)
    hidden, weight = torch.randn(2, 4), torch.randn(3, 4, requires_grad=True)
    both = from_hidden(hidden, weight, torch.tensor([0, 1]), entropy=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(both.logprobs.sum(), weight, create_graph=True)


def test_autocast_outside_changes_nothing() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 3])
    alone = from_hidden(hidden, weight, labels).logprobs
    slopes = torch.autograd.grad(alone.sum(), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        inside = from_hidden(hidden, weight, labels).logprobs
        others = torch.autograd.grad(inside.sum(), (hidden, weight))
    assert torch.equal(alone, inside)
    assert all(map(torch.equal, slopes, others))


def test_types_may_differ() -> None:
    hidden, weight = torch.randn(4, 8).bfloat16(), torch.randn(20, 8)
    labels = torch.tensor([0, 1, 2, 3])
    logprobs = from_hidden(hidden, weight, labels).logprobs
    close(logprobs, from_logits(hidden.float() @ weight.T, labels).logprobs, 1e-5)


@given(
    st.lists(st.integers(0, 3), max_size=2).map(tuple),
    st.integers(1, 40),
    st.data(),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    SIZES,
)
@settings(deadline=None, max_examples=100)
def test_top_k_is_a_stable_sort(
    shape: tuple[int, ...], vocabulary: int, data: st.DataObject, dtype: torch.dtype, size: tuple[int, tuple[int, int]]
) -> None:
    k = data.draw(st.integers(1, vocabulary))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    # Few different logits, so that many are equal; some negative, some -0.0, some -inf.
    logits = torch.randint(-3, 4, (*shape, vocabulary), generator=draw).to(dtype) / 2 * -1
    logits = logits.masked_fill(torch.rand(logits.shape, generator=draw) < 0.1, -INF)
    logits[..., -1] = 0.25
    expected = torch.log_softmax(logits.double() / 0.7, -1).sort(dim=-1, descending=True, stable=True)
    with tile_sizes(*size):
        top = top_k(logits, k, temperature=0.7)
    assert torch.equal(top.ids, expected.indices[..., :k])
    close(top.logprobs, expected.values[..., :k], 1e-5)
    hidden = torch.eye(vocabulary, dtype=dtype)[0].expand(*shape, vocabulary)
    weight = torch.zeros(vocabulary, vocabulary, dtype=dtype)
    weight[:, 0] = torch.randint(-3, 4, (vocabulary,), generator=draw).to(dtype)
    product = hidden.double() @ weight.double().T
    with tile_sizes(*size):
        top = top_k_from_hidden(hidden, weight, k, temperature=0.7, softcap=4.0)
    expected = torch.log_softmax(4 * torch.tanh(product / 4) / 0.7, -1).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(top.ids, expected.indices[..., :k])
    close(top.logprobs, expected.values[..., :k], 1e-5)


def test_top_k_of_a_real_vocabulary() -> None:
    logits = torch.randn(3, 50_000)
    top = top_k(logits, 5)
    values, ids = torch.log_softmax(logits.double(), -1).topk(5)
    assert torch.equal(top.ids, ids)
    close(top.logprobs, values, 1e-5)
    hidden, weight, bias = torch.randn(3, 16), torch.randn(5000, 16), torch.randn(5000)
    top = top_k_from_hidden(hidden, weight, 7, bias=bias)
    values, ids = torch.log_softmax(hidden.double() @ weight.double().T + bias.double(), -1).topk(7)
    assert torch.equal(top.ids, ids)
    close(top.logprobs, values, 1e-5)


LOGITS, LABELS = torch.zeros(2, 3), torch.tensor([0, 1])
HIDDEN, WEIGHT = torch.zeros(2, 4), torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_logits([[1.0, 2.0]], LABELS), r"logits: got list, expected a tensor"),  # type: ignore[arg-type]
        (lambda: from_logits(None, LABELS), r"logits: got NoneType, expected a tensor"),  # type: ignore[arg-type]
        (lambda: from_logits(LOGITS, [0, 1]), r"labels: got list, expected a tensor"),  # type: ignore[arg-type]
        (lambda: from_logits(LOGITS, LABELS.numpy()), r"labels: got ndarray, expected a tensor"),
        (lambda: entropy_from_logits([[1.0]]), r"logits: got list, expected a tensor"),  # type: ignore[arg-type]
        (lambda: top_k([[1.0]], 1), r"logits: got list, expected a tensor"),  # type: ignore[arg-type]
        (lambda: from_hidden([[1.0]], WEIGHT, LABELS), r"hidden: got list, expected"),  # type: ignore[arg-type]
        (lambda: from_hidden(HIDDEN, [[1.0]], LABELS), r"weight: got list, expected"),  # type: ignore[arg-type]
        (lambda: from_hidden(HIDDEN, WEIGHT, [0, 1]), r"labels: got list, expected"),  # type: ignore[arg-type]
        (lambda: from_hidden(HIDDEN, WEIGHT, LABELS, bias=[0.0]), r"bias: got list"),  # type: ignore[arg-type]
        (lambda: top_k_from_hidden(HIDDEN, [[1.0]], 1), r"weight: got list, expected"),  # type: ignore[arg-type]
        (lambda: top_k_from_hidden([[1.0]], WEIGHT, 1), r"hidden: got list, expected"),  # type: ignore[arg-type]
        (lambda: from_hidden(HIDDEN, WEIGHT.to(torch.float8_e4m3fn), LABELS), r"weight: got torch.float8"),
        (lambda: from_hidden(HIDDEN.long(), WEIGHT, LABELS), r"hidden: got torch.int64"),
        (lambda: from_logits(LOGITS, torch.tensor([0, 3])), r"labels: got 3, expected 0 to 2, or -100"),
        (lambda: from_logits(LOGITS, torch.tensor([0, -1])), r"labels: got -1"),
        (lambda: from_logits(LOGITS, torch.tensor([0])), r"labels: got shape \(1,\), expected \(2,\)"),
        (lambda: from_logits(LOGITS, LABELS.float()), r"labels: got torch.float32, expected integers"),
        (lambda: from_logits(LOGITS, LABELS.bool()), r"labels: got torch.bool"),
        (lambda: from_logits(LOGITS, LABELS.to("meta")), r"labels: got device meta, expected cpu"),
        (lambda: from_logits(LOGITS.long(), LABELS), r"logits: got torch.int64"),
        (lambda: from_logits(torch.zeros(2, 0), LABELS), r"logits: got shape \(2, 0\)"),
        (lambda: entropy_from_logits(torch.tensor(1.0)), r"logits: got shape \(\)"),
        (lambda: from_logits(LOGITS, LABELS, temperature=0.0), r"temperature: got 0.0, expected a positive"),
        (lambda: from_logits(LOGITS, LABELS, temperature=float("nan")), r"temperature: got nan"),
        (lambda: from_logits(LOGITS, LABELS, temperature=float("inf")), r"temperature: got inf"),
        (lambda: from_logits(LOGITS, LABELS, temperature=-1), r"temperature: got -1, expected a positive"),
        (lambda: from_logits(LOGITS, LABELS, temperature=True), r"temperature: got True, expected a positive"),
        (
            lambda: from_logits(LOGITS, LABELS, temperature="a"),  # type: ignore[arg-type]
            r"temperature: got 'a', expected a number or a tensor",
        ),
        (
            lambda: from_logits(LOGITS, LABELS, temperature=None),  # type: ignore[arg-type]
            r"temperature: got None, expected a number or a tensor",
        ),
        (
            lambda: from_logits(LOGITS, LABELS, temperature=[1.0] * 99),  # type: ignore[arg-type]
            r"temperature: got \[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, \.\.\.\], expected",
        ),
        (lambda: from_logits(LOGITS, LABELS, temperature=1e-40), r"temperature: got 1e-40, .* float32 holds, and its"),
        (lambda: from_logits(LOGITS, LABELS, temperature=1e39), r"temperature: got 1e\+39, .* float32 holds"),
        (
            lambda: from_logits(LOGITS.double(), LABELS, temperature=1e-310),
            r"temperature: got 1e-310, .* float64 holds, and its",
        ),
        (
            lambda: from_logits(LOGITS, LABELS, temperature=torch.tensor([1.0, 1e-40])),
            r"temperature: got 9.99995e-41, .* float32 holds, and their",
        ),
        (lambda: from_logits(LOGITS, LABELS, temperature=LABELS == 0), r"temperature: got torch.bool"),
        (lambda: top_k(LOGITS, 1, temperature="a"), r"temperature: got 'a'"),  # type: ignore[arg-type]
        (lambda: from_logits(LOGITS, LABELS, ignore_index=0.5), r"ignore_index: got 0.5, expected an integer"),  # type: ignore[arg-type]
        (lambda: from_logits(LOGITS, LABELS, temperature=torch.tensor([1.0, -2.0])), r"temperature: got -2"),
        (lambda: from_logits(LOGITS, LABELS, temperature=torch.ones(3)), r"temperature: got shape \(3,\)"),
        (
            lambda: from_logits(LOGITS, LABELS, temperature=torch.ones(2, requires_grad=True)),
            r"temperature: got a tensor that requires a gradient",
        ),
        (lambda: from_hidden(HIDDEN, WEIGHT[:, :3], LABELS), r"weight: got shape \(3, 3\), expected \(V, 4\)"),
        (lambda: from_hidden(HIDDEN, WEIGHT[0], LABELS), r"weight: got shape \(4,\)"),
        (lambda: from_hidden(HIDDEN, WEIGHT, torch.tensor([0, 5])), r"labels: got 5, expected 0 to 2"),
        (lambda: from_hidden(HIDDEN, WEIGHT, LABELS, bias=torch.zeros(2)), r"bias: got shape \(2,\), expected \(3,\)"),
        (lambda: from_hidden(HIDDEN, WEIGHT.long(), LABELS), r"weight: got torch.int64"),
        (lambda: from_hidden(HIDDEN, WEIGHT.to("meta"), LABELS), r"weight: got device meta"),
        (lambda: from_hidden(HIDDEN, WEIGHT, LABELS, softcap=0.0), r"softcap: got 0.0"),
        (lambda: from_hidden(HIDDEN, WEIGHT, LABELS, softcap=1e-40), r"softcap: got 1e-40, .* float32 holds"),
        (lambda: from_hidden(HIDDEN, WEIGHT, LABELS, softcap="a"), r"softcap: got 'a'"),  # type: ignore[arg-type]
        (lambda: from_hidden(HIDDEN, WEIGHT[:0], LABELS), r"hidden: got shape"),
        (lambda: top_k(LOGITS, 2.0), r"k: got 2.0, expected an integer"),  # type: ignore[arg-type]
        (lambda: top_k(LOGITS, True), r"k: got True, expected an integer"),
        (lambda: top_k(LOGITS, np.bool_(True)), r"k: got .*True.*, expected an integer"),  # type: ignore[arg-type]
        (lambda: top_k_from_hidden(HIDDEN, WEIGHT, None), r"k: got None, expected an integer"),  # type: ignore[arg-type]
        (lambda: top_k(LOGITS, 4), r"k: got 4, expected an integer from 1 to 3"),
        (lambda: top_k_from_hidden(HIDDEN, WEIGHT, 0), r"k: got 0, expected an integer from 1 to 3"),
    ],
)
def test_bad_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.slow
def test_memory_beside_the_logits_is_small() -> None:
    # In a process of its own, whose largest size nothing else has raised.
    script = """
import resource, sys, torch
from rollbook.models.logprobs import from_logits, from_hidden
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def settle():
    from_logits(torch.zeros(64, 2000), torch.zeros(64, dtype=torch.int64), entropy=True)
    from_hidden(torch.zeros(4, 64), torch.zeros(5000, 64), torch.zeros(4, dtype=torch.int64), entropy=True)
settle()
logits = torch.ones(256, 100_000)
before = peak()
from_logits(logits, torch.zeros(256, dtype=torch.int64), entropy=True)
first = peak() - before
del logits
hidden, weight = torch.ones(2048, 64, requires_grad=True), torch.ones(25_000, 64, requires_grad=True)
before = peak()
found = from_hidden(hidden, weight, torch.zeros(2048, dtype=torch.int64), entropy=True)
(found.logprobs.sum() + found.entropy.sum()).backward()
print(first * 1024 / (256 * 100_000 * 4), (peak() - before) * 1024 / (2048 * 25_000 * 4))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    forward, product = map(float, done.stdout.split())
    assert forward < 0.1
    assert product < 0.25


def test_results_are_named() -> None:
    assert TokenStats._fields == ("logprobs", "entropy")
    assert logprobs.TopK._fields == ("ids", "logprobs")
