"""GAE and discounted returns by CUDA kernels, compared with a loop over tokens in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollbook.algorithms.kernels import scan_triton as scan

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def by_loop(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute GAE [B, R] column by column from the right, on the CPU; masked tokens are skipped."""
    columns = [torch.where(mask, part, 0).double().T.cpu().numpy() for part in (rewards, values)]
    counts = mask.T.cpu().numpy()
    out = np.zeros(columns[0].shape)
    after, ahead = np.zeros((2, len(rewards)))
    for i in reversed(range(len(out))):
        reward, value = columns[0][i], columns[1][i]
        now = reward + gamma * after - value + gamma * lam * ahead
        ahead, after = np.where(counts[i], now, ahead), np.where(counts[i], value, after)
        out[i] = np.where(counts[i], now, 0)
    advantages = torch.from_numpy(out).T.contiguous().to(mask.device)
    return advantages, torch.where(mask, advantages + values.double(), 0)


def masks(shape: tuple[int, int], kind: str) -> torch.Tensor:
    if kind == "full":
        return torch.ones(shape, dtype=torch.bool, device=DEVICE)
    if kind == "none":
        return torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    if kind == "tail":
        return torch.arange(shape[1], device=DEVICE) < torch.randint(0, shape[1] + 1, (shape[0], 1), device=DEVICE)
    return torch.rand(shape, device=DEVICE) > {"many": 0.1, "few": 0.97}[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (5, 4096), (4, 4097), (2, 9001), (0, 5), (5, 0)])
@pytest.mark.parametrize("kind", ["full", "none", "tail", "many", "few"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_padded_and_packed(dtype: torch.dtype, shape: tuple[int, int], kind: str, gamma: float, lam: float) -> None:
    mask = masks(shape, kind)
    # What lies where the mask is off is never looked at.
    rewards, values = (torch.randn(shape, device=DEVICE, dtype=dtype).masked_fill(~mask, torch.nan) for _ in range(2))
    expected = by_loop(rewards, values, mask, gamma, lam)
    sums = by_loop(rewards, torch.zeros_like(values), mask, gamma, 1.0)[0]
    # Sums of thousands of terms are as large as they are.
    tolerance = 1e-11 if dtype == torch.float64 else 2e-6 * (1 + float(expected[1].abs().max() if mask.any() else 0))
    for offsets in (None, torch.arange(0, shape[0] + 1, device=DEVICE) * shape[1]):
        take = (lambda part: part) if offsets is None else (lambda part: part.reshape(-1))
        actual = scan.gae(take(rewards), take(values), take(mask), offsets, gamma, lam)
        for column, other in zip(actual, expected, strict=True):
            assert column.dtype == dtype
            torch.testing.assert_close(column.double(), take(other), rtol=1e-5, atol=tolerance)
            assert not column[~take(mask)].any()
        returns = scan.discounted(take(rewards), take(mask), offsets, gamma)
        torch.testing.assert_close(returns.double(), take(sums), rtol=1e-5, atol=tolerance)
        assert not returns[~take(mask)].any()


def test_rows_of_any_length() -> None:
    lengths = [0, 1, 5000, 0, 4096, 3, 4097, 0]
    ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    total = sum(lengths)
    rewards, values = torch.randn(2, total, device=DEVICE, dtype=torch.float64)
    mask = torch.rand(total, device=DEVICE) > 0.3
    actual = scan.gae(rewards, values, mask, ends, 0.99, 0.95)
    alone = scan.discounted(rewards, mask, ends, 0.99)
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        row = [part[None, start:stop] for part in (rewards, values, mask)]
        expected = by_loop(*row, 0.99, 0.95)
        for column, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(column[start:stop], other[0], rtol=1e-10, atol=1e-10)
        sums = by_loop(row[0], torch.zeros_like(row[1]), row[2], 0.99, 1.0)[0]
        torch.testing.assert_close(alone[start:stop], sums[0], rtol=1e-10, atol=1e-10)


def test_nan_affects_only_its_row_and_earlier_tokens() -> None:
    rewards, values = torch.randn(2, 3, 50, device=DEVICE)
    mask = torch.ones(3, 50, dtype=torch.bool, device=DEVICE)
    rewards[1, 20] = torch.nan
    actual = scan.gae(rewards, values, mask, None, 0.99, 0.95)[0].isnan()
    assert actual[1, :21].all() and not actual[1, 21:].any() and not actual[0].any() and not actual[2].any()
