"""Log-prob kernels on a CUDA device: values and gradients equal those of plain torch, with less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollbook.algorithms.kernels import logits_triton as kernels
from rollbook.algorithms.kernels import vocabulary as _vocabulary
from rollbook.models import logprobs
from rollbook.models.logprobs import (
    TokenStats,
    entropy_from_logits,
    from_hidden,
    from_logits,
    top_k,
    top_k_from_hidden,
)

DEVICE = torch.device("cuda")
INF = float("inf")
MIB = 1 << 20
KINDS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weights(stats: TokenStats) -> torch.Tensor:
    """Compute a loss of log-probs and entropy."""
    assert stats.entropy is not None
    factors = torch.linspace(-1, 2, stats.logprobs.numel(), device=stats.logprobs.device, dtype=torch.float64)
    factors = factors.view(stats.logprobs.shape)
    log_probs = torch.where(stats.logprobs.isfinite(), stats.logprobs, 0)
    return (log_probs * factors).sum() + (stats.entropy * factors.flip(0)).sum()


def exact(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> TokenStats:
    """Compute the statistics in float64 with plain torch."""
    return from_logits(logits.double(), labels, entropy=True, **options)


def close(actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float, relative: float = 0) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual.double(), expected.double(), rtol=relative or tolerance, atol=tolerance)


def test_kernels_are_available() -> None:
    assert kernels.AVAILABLE
    assert _vocabulary.kernels_for(torch.zeros(1, device=DEVICE)) is kernels
    assert _vocabulary.kernels_for(torch.zeros(1, device=DEVICE, dtype=torch.float64)) is None


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    ("shape", "vocabulary"), [((5,), 3), ((2, 3), 1000), ((3,), 4097), ((2, 2), 151_936), ((0,), 7)]
)
@pytest.mark.parametrize("temperature", ["one", "number", "each"])
def test_from_logits(dtype: torch.dtype, shape: tuple[int, ...], vocabulary: int, temperature: str) -> None:
    logits = (torch.randn(*shape, vocabulary, device=DEVICE) * 4).to(dtype)
    labels = torch.randint(0, vocabulary, shape, device=DEVICE)
    if shape[0]:
        labels[0] = -100
        logits[-1][..., : vocabulary // 2] = -INF
    temperatures = torch.rand(shape, device=DEVICE) + 0.5
    options: dict[str, Any] = {"temperature": {"one": 1.0, "number": 0.7, "each": temperatures}[temperature]}
    leaf, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
    actual, expected = from_logits(leaf, labels, entropy=True, **options), exact(reference, labels, **options)
    assert actual.logprobs.dtype == torch.float32
    close(actual.logprobs, expected.logprobs, 2e-5)
    close(actual.entropy, expected.entropy, 2e-5)
    close(from_logits(logits, labels, **options).logprobs, expected.logprobs, 2e-5)
    close(entropy_from_logits(logits, **options), expected.entropy, 2e-5)
    weights(actual).backward()
    weights(expected).backward()
    assert leaf.grad is not None and reference.grad is not None
    assert leaf.grad.dtype == dtype
    close(leaf.grad, reference.grad, 2e-5, 1e-2 if dtype != torch.float32 else 1e-4)
    assert not leaf.grad[logits == -INF].any()


def test_gradient_of_one_output() -> None:
    logits, labels = torch.randn(6, 5000, device=DEVICE), torch.randint(0, 5000, (6,), device=DEVICE)
    for pick in (0, 1):
        logits_leaf, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
        for leaf, stats in (
            (logits_leaf, from_logits(logits_leaf, labels, entropy=True)),
            (reference, exact(reference, labels)),
        ):
            part = stats[pick]
            assert part is not None
            part.sum().backward()
            assert leaf.grad is not None
        close(logits_leaf.grad, reference.grad, 1e-5)


def test_slices_and_strides() -> None:
    storage = torch.randn(3, 5, 2000, device=DEVICE)
    labels = torch.randint(0, 2000, (3, 4), device=DEVICE)
    for view in (storage[:, :-1], storage[:, 1:, ::1], storage.transpose(1, 2).contiguous().transpose(1, 2)[:, :-1]):
        actual, expected = from_logits(view, labels, entropy=True), exact(view, labels)
        close(actual.logprobs, expected.logprobs, 1e-5)
        close(actual.entropy, expected.entropy, 1e-5)
    torch.cuda.synchronize()
    large = torch.randn(4, 65, 50_000, device=DEVICE, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    from_logits(large[:, :-1], torch.zeros(4, 64, dtype=torch.int64, device=DEVICE), entropy=True)
    assert torch.cuda.max_memory_allocated() - before < MIB


def test_a_view_with_offsets_beyond_32_bits() -> None:
    storage = torch.empty(151_936, 16_384, device=DEVICE, dtype=torch.bfloat16).normal_()
    view = storage.T[-3:]
    assert (view.shape[1] - 1) * view.stride(1) > 2**31
    labels = torch.randint(140_000, 151_936, (3,), device=DEVICE)
    leaf, reference = view.detach().requires_grad_(), view.double().requires_grad_()
    actual, expected = from_logits(leaf, labels, entropy=True), exact(reference, labels)
    close(actual.logprobs, expected.logprobs, 2e-5)
    close(actual.entropy, expected.entropy, 2e-5)
    weights(actual).backward()
    weights(expected).backward()
    assert leaf.grad is not None
    close(leaf.grad, reference.grad, 2e-5, 1e-2)


TINY = [1e-6, 1e-9, 1e-12, 1e-38, 3e-39]


@pytest.mark.parametrize("temperature", TINY)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("vocabulary", [300, 9000])
def test_tiny_temperatures_are_greedy(temperature: float, dtype: torch.dtype, vocabulary: int) -> None:
    logits = torch.randn(3, vocabulary, device=DEVICE).to(dtype)
    # Tops in the first block of entries, and in later ones to which sums have to move.
    labels = torch.tensor([0, vocabulary // 2, vocabulary - 1], device=DEVICE)
    logits[torch.arange(3), labels] = 60.0
    logits[:, 7] = -INF
    logits.requires_grad_()
    actual = from_logits(logits, labels, temperature=temperature, entropy=True)
    assert actual.entropy is not None
    assert actual.logprobs.tolist() == actual.entropy.tolist() == [0.0] * 3
    (slopes,) = torch.autograd.grad(actual.logprobs.sum() + actual.entropy.sum(), logits)
    assert slopes.isfinite().all() and not slopes.any()


@pytest.mark.parametrize("temperature", TINY)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("vocabulary", [300, 900, 9000])
def test_tiny_temperatures_of_a_head(temperature: float, dtype: torch.dtype, vocabulary: int) -> None:
    # Small integers: every way to add them up gives the same, so that the label's logit is the top to the bit.
    hidden = torch.randint(-3, 4, (4, 64), device=DEVICE).to(dtype)
    weight = torch.randint(-3, 4, (vocabulary, 64), device=DEVICE).to(dtype)
    labels = torch.tensor([0, 70, vocabulary // 2, vocabulary - 1], device=DEVICE)
    weight[labels] = 4 * hidden
    assert torch.equal((hidden.double() @ weight.double().T).argmax(-1), labels)
    assert kernels.supports(hidden, weight) == (dtype != torch.float32)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    actual = from_hidden(*leaves, labels, temperature=temperature, entropy=True)
    assert actual.entropy is not None
    assert actual.logprobs.tolist() == actual.entropy.tolist() == [0.0] * 4
    for slopes in torch.autograd.grad(actual.logprobs.sum() + actual.entropy.sum(), leaves):
        assert slopes.isfinite().all() and not slopes.any()


def test_invalid_inputs_give_nan() -> None:
    logits = torch.randn(4, 10, device=DEVICE)
    labels = torch.tensor([0, 10, -1, -100], device=DEVICE)
    actual = from_logits(logits, labels, entropy=True)
    assert actual.logprobs.isnan().tolist() == [False, True, True, False]
    assert actual.entropy is not None and actual.entropy.isfinite().all()
    temperatures = torch.tensor([1.0, 0.0, -1.0, INF], device=DEVICE)
    actual = from_logits(logits, labels.clamp(0, 9), temperature=temperatures)
    assert actual.logprobs.isnan().tolist() == [False, True, True, True]
    hidden, weight = torch.randn(2, 64, device=DEVICE).bfloat16(), torch.randn(10, 64, device=DEVICE).bfloat16()
    actual = from_hidden(hidden, weight, torch.tensor([3, 10], device=DEVICE))
    assert actual.logprobs.isnan().tolist() == [False, True]
    logits[1, 3] = torch.nan
    logits[2] = -INF
    actual = from_logits(logits, labels.clamp(0, 9), entropy=True)
    assert actual.logprobs.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("poison", [torch.nan, INF, -INF])
@pytest.mark.parametrize("dtype", [*KINDS, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ignored_logits_may_be_anything(poison: float, dtype: torch.dtype, temperature: float) -> None:
    logits = torch.randn(6, 5000, device=DEVICE).to(dtype)
    labels = torch.randint(0, 5000, (6,), device=DEVICE)
    labels[1], labels[4] = -100, -100
    is_valid = labels != -100
    spoilt = logits.clone()
    spoilt[1], spoilt[4, 4999] = poison, poison
    all_logits, alone = spoilt.requires_grad_(), logits[is_valid].requires_grad_()
    actual = from_logits(all_logits, labels, temperature=temperature, entropy=True)
    expected = from_logits(alone, labels[is_valid], temperature=temperature, entropy=True)
    assert actual.entropy is not None and expected.entropy is not None
    assert torch.equal(actual.logprobs[is_valid], expected.logprobs) and not actual.logprobs[~is_valid].any()
    for output, expected_output in (
        (actual.logprobs.sum(), expected.logprobs.sum()),
        (
            actual.logprobs.sum() + torch.where(is_valid, actual.entropy, 0).sum(),
            expected.logprobs.sum() + expected.entropy.sum(),
        ),
    ):
        (gradient,) = torch.autograd.grad(output, all_logits, retain_graph=True)
        (other,) = torch.autograd.grad(expected_output, alone, retain_graph=True)
        assert torch.equal(gradient[~is_valid], torch.zeros_like(gradient[~is_valid]))
        assert torch.equal(gradient[is_valid], other) and other.any()
    # Where an entropy counts it is not hidden that there is none.
    (gradient,) = torch.autograd.grad(actual.entropy.sum(), all_logits)
    assert gradient[1].isnan().all() and gradient[is_valid].isfinite().all()


@pytest.mark.parametrize("dtype", [*KINDS, torch.float64])
def test_logits_without_a_distribution_give_nan(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 100, device=DEVICE).to(dtype)
    logits[0], logits[1, 3], logits[2, 3] = -INF, torch.nan, INF
    logits.requires_grad_()
    actual = from_logits(logits, torch.zeros(4, dtype=torch.int64, device=DEVICE), entropy=True)
    assert actual.entropy is not None
    assert actual.logprobs.isnan().tolist() == actual.entropy.isnan().tolist() == [True, True, True, False]
    (slopes,) = torch.autograd.grad(actual.logprobs.sum() + actual.entropy.sum(), logits)
    assert slopes[:3].isnan().all() and slopes[3].isfinite().all()


@pytest.mark.parametrize("poison", [torch.nan, INF, -INF])
@pytest.mark.parametrize("dtype", [*KINDS, torch.float64])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("entries", [1 << 25, 1 << 16])
def test_ignored_hidden_states_may_be_anything(
    poison: float, dtype: torch.dtype, softcap: float | None, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_BACKWARD_TILE_ENTRIES", entries)
    shapes = ((200, 64), (1500, 64), (1500,))
    parts = [(torch.randn(*shape, device=DEVICE) / 3).to(dtype) for shape in shapes]
    labels = torch.randint(0, 1500, (200,), device=DEVICE)
    labels[::3] = -100
    is_valid = labels != -100
    spoilt = parts[0].clone()
    spoilt[0], spoilt[3, 1], spoilt[-2] = poison, poison, poison
    assert not is_valid[[0, 3, -2]].any()
    leaves = [part.clone().requires_grad_() for part in (spoilt, *parts[1:])]
    references = [part.double().requires_grad_() for part in (parts[0][is_valid], *parts[1:])]
    actual = from_hidden(leaves[0], leaves[1], labels, bias=leaves[2], softcap=softcap, entropy=True)
    expected = from_hidden(
        references[0], references[1], labels[is_valid], bias=references[2], softcap=softcap, entropy=True
    )
    assert actual.entropy is not None and expected.entropy is not None
    assert not actual.logprobs[~is_valid].any()
    close(actual.logprobs[is_valid], expected.logprobs, 2e-5)
    (actual.logprobs.sum() + torch.where(is_valid, actual.entropy, 0).sum()).backward()
    (expected.logprobs.sum() + expected.entropy.sum()).backward()
    assert leaves[0].grad is not None and not leaves[0].grad[~is_valid].any()
    for gradient, other in zip((leaves[0].grad[is_valid], leaves[1].grad, leaves[2].grad), references, strict=True):
        assert gradient is not None and other.grad is not None
        error = (gradient.double() - other.grad).norm() / other.grad.norm()
        assert error < (1e-2 if dtype.itemsize == 2 else 1e-4)
    # The weight's gradient alone, of the log-probs alone.
    alone = from_hidden(spoilt, leaves[1], labels, softcap=softcap).logprobs.sum()
    (slopes,) = torch.autograd.grad(alone, leaves[1])
    assert slopes.isfinite().all() and slopes.any()


HEADS = [
    {},
    {"temperature": 0.7},
    {"softcap": 5.0},
    {"bias": True},
    {"bias": True, "softcap": 3.0, "temperature": "each"},
]


@pytest.mark.parametrize("dtype", [*KINDS, torch.float64])
@pytest.mark.parametrize(("count", "vocabulary", "width"), [(1, 5, 8), (200, 1000, 64), (300, 777, 136), (130, 40, 30)])
@pytest.mark.parametrize("head", HEADS)
def test_from_hidden(dtype: torch.dtype, count: int, vocabulary: int, width: int, head: dict[str, Any]) -> None:
    head = dict(head)
    parts = [
        torch.randn(count, width, device=DEVICE),
        torch.randn(vocabulary, width, device=DEVICE) * 2 / width**0.5,
        torch.randn(vocabulary, device=DEVICE),
    ]
    labels = torch.randint(0, vocabulary, (count,), device=DEVICE)
    labels[-1] = -100
    if head.get("temperature") == "each":
        head["temperature"] = torch.rand(count, device=DEVICE) + 0.5
    biased, softcap = head.pop("bias", False), head.pop("softcap", None)
    leaves = [part.to(dtype, copy=True).requires_grad_() for part in parts]
    references = [part.to(dtype).double().requires_grad_() for part in parts]
    actual = from_hidden(
        leaves[0], leaves[1], labels, bias=leaves[2] if biased else None, softcap=softcap, entropy=True, **head
    )
    logits = references[0] @ references[1].T + (references[2] if biased else 0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = exact(logits, labels, **head)
    close(actual.logprobs, expected.logprobs, 2e-5)
    close(actual.entropy, expected.entropy, 2e-5)
    weights(actual).backward()
    weights(expected).backward()
    for leaf, other in zip(leaves[: 2 + biased], references, strict=False):
        assert leaf.grad is not None and other.grad is not None and leaf.grad.dtype == dtype
        error = (leaf.grad.double() - other.grad).norm() / other.grad.norm()
        assert error < (1e-2 if dtype.itemsize == 2 else 1e-4)


def test_all_matrix_products_give_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(700, 256, device=DEVICE).bfloat16()
    weight = (torch.randn(9000, 256, device=DEVICE) / 8).bfloat16()
    labels = torch.randint(0, 9000, (700,), device=DEVICE)
    assert kernels.supports(hidden, weight)
    fused = from_hidden(hidden, weight, labels, entropy=True)
    monkeypatch.setattr(kernels, "supports", lambda *_: False)
    for tile in ((4096, 16384), (128, 1000), (300, 8192)):
        monkeypatch.setattr(logprobs, "_TILE_CUDA", tile)
        tiled = from_hidden(hidden, weight, labels, entropy=True)
        close(tiled.logprobs, fused.logprobs, 2e-5)
        close(tiled.entropy, fused.entropy, 2e-5)
    grads = []
    for entries in (1 << 25, 1 << 16):
        monkeypatch.setattr(logprobs, "_BACKWARD_TILE_ENTRIES", entries)
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        weights(from_hidden(leaves[0], leaves[1], labels, entropy=True)).backward()
        grads.append([leaf.grad for leaf in leaves])
    for gradient, other in zip(*grads, strict=True):
        assert gradient is not None and other is not None
        assert (gradient - other).norm() / other.norm() < 5e-3
    monkeypatch.setattr(_vocabulary, "kernels_for", lambda _: None)
    plain = from_hidden(hidden, weight, labels, entropy=True)
    close(plain.logprobs, fused.logprobs, 2e-5)
    close(plain.entropy, fused.entropy, 2e-5)


def test_impossible_tokens_by_bias() -> None:
    hidden, weight = torch.randn(4, 64, device=DEVICE).bfloat16(), torch.randn(900, 64, device=DEVICE).bfloat16()
    bias = torch.zeros(900, device=DEVICE)
    bias[:600] = -INF
    labels = torch.tensor([0, 700, 899, 300], device=DEVICE)
    actual = from_hidden(hidden, weight, labels, bias=bias, entropy=True)
    expected = exact(hidden.double() @ weight.double().T + bias, labels)
    assert actual.logprobs.isinf().tolist() == [True, False, False, True]
    close(actual.logprobs, expected.logprobs, 2e-5)
    close(actual.entropy, expected.entropy, 2e-5)


def test_autocast_outside_changes_nothing() -> None:
    hidden, weight = torch.randn(40, 64, device=DEVICE), torch.randn(300, 64, device=DEVICE)
    labels = torch.randint(0, 300, (40,), device=DEVICE)
    alone = from_hidden(hidden, weight, labels).logprobs
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(from_hidden(hidden, weight, labels).logprobs, alone)


@pytest.mark.parametrize("dtype", [*KINDS, torch.float64])
def test_top_k(dtype: torch.dtype) -> None:
    logits = torch.randn(70, 20_000, device=DEVICE).to(dtype)
    logits[:, 100:200] = 9.0
    actual = top_k(logits, 120, temperature=0.7)
    expected = torch.log_softmax(logits.double() / 0.7, -1).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(actual.ids, expected.indices[:, :120])
    close(actual.logprobs, expected.values[:, :120], 2e-5)
    hidden, weight = torch.randn(70, 64, device=DEVICE).to(dtype), torch.randn(30_000, 64, device=DEVICE).to(dtype)
    actual = top_k_from_hidden(hidden, weight, 8)
    values = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    close(actual.logprobs, values.topk(8).values, 5e-5)
    close(actual.logprobs, values.gather(1, actual.ids), 5e-5)


def test_memory_of_a_large_head() -> None:
    tokens_, vocabulary, width = 16_384, 151_936, 2_048
    hidden = torch.randn(tokens_, width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = torch.empty(vocabulary, width, device=DEVICE, dtype=torch.bfloat16).normal_(0, 0.02).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens_,), device=DEVICE)

    def peak(of: int) -> float:
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - of) / MIB

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    actual = from_hidden(hidden, weight, labels, entropy=True)
    assert peak(before) < 512
    assert actual.entropy is not None
    (actual.logprobs.sum() + actual.entropy.sum()).backward()
    gradients = (hidden.nbytes + weight.nbytes) / MIB
    assert peak(before) - gradients < 1024
    some = slice(8000, 8016)
    expected = exact(hidden.detach()[some].double() @ weight.detach().double().T, labels[some])
    close(actual.logprobs[some], expected.logprobs, 1e-4)
    close(actual.entropy[some], expected.entropy, 1e-4)
