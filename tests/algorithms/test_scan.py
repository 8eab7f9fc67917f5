"""The recursions over time, each way of computing them, against loops over Python numbers."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbook.algorithms import scan
from rollbook.algorithms.kernels import scan_numba

WAYS = {"numba": scan_numba, "numpy": None}
nan = math.nan


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced(request.param):
        yield request.param


class forced:
    """One of the ways on the CPU, whatever the size of a call."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __enter__(self) -> None:
        self.before = list(scan._numba)
        scan._numba[:] = [WAYS[self.way]]

    def __exit__(self, *_: object) -> None:
        scan._numba[:] = self.before


# --- the reference: one row, Python numbers --------------------------------------------------------------------------


def naive_part(mask: list[bool], observations: str, response: list[bool] | None) -> list[bool]:
    if observations == "skip":
        return mask
    if response is not None:
        return [m or r for m, r in zip(mask, response, strict=True)]
    if not any(mask):
        return mask
    first, last = mask.index(True), len(mask) - 1 - mask[::-1].index(True)
    return [first <= t <= last for t in range(len(mask))]


def naive_gae(
    rewards: list[float],
    values: list[float],
    mask: list[bool],
    gamma: float,
    lam: float,
    observations: str = "skip",
    response: list[bool] | None = None,
) -> tuple[list[float], list[float]]:
    part = naive_part(mask, observations, response)
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(mask))):
        if not part[t]:
            continue
        reward, value = rewards[t], values[t]
        if observations == "zeroed" and not mask[t]:
            reward = value = 0.0
        next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        next_value = value
        if mask[t]:
            advantages[t], returns[t] = next_advantage, next_advantage + value
    return advantages, returns


def naive_returns(
    rewards: list[float],
    mask: list[bool],
    gamma: float,
    observations: str = "skip",
    response: list[bool] | None = None,
) -> list[float]:
    return naive_gae(rewards, [0.0] * len(mask), mask, gamma, 1.0, observations, response)[0]


number = st.floats(-4, 4, width=32)
rows_of_tokens = st.lists(
    st.lists(st.tuples(number, number, st.booleans(), st.booleans()), max_size=12), min_size=1, max_size=9
)
discount = st.sampled_from([0.0, 0.3, 0.95, 1.0])


def columns(rows: list[list[tuple[Any, ...]]]) -> list[list[list[Any]]]:
    return [[[token[k] for token in row] for row in rows] for k in range(4)]


def packed(column: list[list[Any]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([x for row in column for x in row], dtype=dtype)


def padded(column: list[list[Any]], dtype: torch.dtype, side: str, fill: Any) -> torch.Tensor:
    """Rows in a matrix a little wider than the longest."""
    width = max(map(len, column)) + 2
    gap = [[fill] * (width - len(row)) for row in column]
    filled = [hole + row if side == "left" else row + hole for row, hole in zip(column, gap, strict=True)]
    return torch.tensor(filled, dtype=dtype).reshape(len(column), width)


def unpadded(matrix: torch.Tensor, lengths: list[int], side: str) -> torch.Tensor:
    width = matrix.shape[1]
    rows = [row[width - n :] if side == "left" else row[:n] for row, n in zip(matrix, lengths, strict=True)]
    return torch.cat(rows)


@pytest.mark.slow
@given(
    rows_of_tokens,
    discount,
    discount,
    st.sampled_from(scan.OBSERVATIONS),
    st.booleans(),
    st.sampled_from(["left", "right"]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_every_way_and_layout_is_the_naive_loop(
    rows: list[list[tuple[Any, ...]]],
    gamma: float,
    lam: float,
    observations: str,
    use_response: bool,
    side: str,
    dtype: torch.dtype,
) -> None:
    rewards, values, mask, response = columns(rows)
    lengths = [len(row) for row in rows]
    responses = response if use_response else [None] * len(rows)
    expected = [
        naive_gae(*row, gamma, lam, observations, is_response)
        for *row, is_response in zip(rewards, values, mask, responses, strict=True)
    ]
    to_go = [
        naive_returns(r, m, gamma, observations, is_response)
        for r, m, is_response in zip(rewards, mask, responses, strict=True)
    ]
    flat = packed(rewards, dtype), packed(values, dtype), packed(mask, torch.bool)
    packed_response = packed(response, torch.bool) if use_response else None
    matrix = padded(rewards, dtype, side, nan), padded(values, dtype, side, nan), padded(mask, torch.bool, side, False)
    said_matrix = padded(response, torch.bool, side, False) if use_response else None
    exact = []
    for implementation in WAYS:
        with forced(implementation):
            scanned = scan.gae_scan(*flat, lengths, gamma, lam, observations, packed_response)
            scanned = (*scanned, scan.return_scan(flat[0], flat[2], lengths, gamma, observations, packed_response))
            wide = scan.gae_scan(*matrix, None, gamma, lam, observations, said_matrix)
            wide = (*wide, scan.return_scan(matrix[0], matrix[2], None, gamma, observations, said_matrix))
        assert all(column.dtype == dtype for column in scanned)
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
        for k in range(2):
            torch.testing.assert_close(scanned[k], packed([pair[k] for pair in expected], dtype), **tolerance)
        torch.testing.assert_close(scanned[2], packed(to_go, dtype), **tolerance)
        for column, other in zip(scanned, wide, strict=True):
            assert torch.equal(column, unpadded(other, lengths, side))
            assert other[~matrix[2]].count_nonzero() == 0
        exact.append(scanned)
    assert all(torch.equal(*pair) for pair in zip(*exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lam", [0.95, 0.0])
def test_rows_of_several_blocks_are_equal_bit_for_bit(dtype: torch.dtype, lam: float) -> None:
    block = scan_numba.BLOCK
    lengths = [2 * block + 7, block, block + 1, 1, 0, 3 * block, block - 1, 5, 0, 2 * block, 64, 65]
    generator = torch.Generator().manual_seed(1)
    total = sum(lengths)
    rewards, values = (torch.randn(total, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    everything = torch.ones(total, dtype=torch.bool)
    ends = torch.arange(total) % block > block // 3  # rows whose tokens begin late, with a hole in long ones
    for mask in (everything, ends, torch.rand(total, generator=generator) < 0.5, ~everything):
        with forced("numba"):
            compiled = (*scan.gae_scan(rewards, values, mask, lengths, 0.99, lam),)
            compiled = (*compiled, scan.return_scan(rewards, mask, lengths, 0.97))
            counted = scan.count_rewards(rewards, mask, lengths)
        with forced("numpy"):
            plain = (*scan.gae_scan(rewards, values, mask, lengths, 0.99, lam),)
            plain = (*plain, scan.return_scan(rewards, mask, lengths, 0.97))
            assert all(map(np.array_equal, counted, scan.count_rewards(rewards, mask, lengths)))
        assert all(map(torch.equal, compiled, plain))
        starts = np.cumsum([0, *lengths])
        for row in (0, 2, 5):
            span = slice(int(starts[row]), int(starts[row + 1]))
            expected = naive_gae(*(x[span].tolist() for x in (rewards, values, mask)), 0.99, lam)
            for k in range(2):
                tolerance = 1e-5 if dtype == torch.float32 else 1e-11
                expected_row = torch.tensor(expected[k], dtype=dtype)
                torch.testing.assert_close(compiled[k][span], expected_row, rtol=tolerance, atol=tolerance)


def test_three_ways_through_a_tools_reply_as_peers_have_them(way: str) -> None:
    # Seven tokens, a reply of three: the first action's advantage is 0.328 (verl), 0.187 (SkyRL, slime), 0.117
    # (OpenRLHF, LightRFT) for the same data.
    values = [0.5, 0.6, 0.9, 0.1, 0.8, 0.7, 0.9]
    rewards = [0.0] * 6 + [1.0]
    mask = [True, True, False, False, False, True, True]
    first_advantages = {}
    for observations in scan.OBSERVATIONS:
        tensors = torch.tensor([rewards]), torch.tensor([values]), torch.tensor([mask])
        advantages = scan.gae_scan(*tensors, None, 0.95, 0.95, observations)[0][0].tolist()
        assert advantages == pytest.approx(naive_gae(rewards, values, mask, 0.95, 0.95, observations)[0], abs=1e-6)
        first_advantages[observations] = round(advantages[0], 3)
    assert first_advantages == {"skip": 0.328, "through": 0.187, "zeroed": 0.117}


def test_a_reward_on_a_tools_last_token_as_peers_have_it(way: str) -> None:
    # verl's recursion drops it; SkyRL and slime carry it back through the tool's token.
    values, rewards = torch.tensor([[0.5, 0.6, 0.9]]), torch.tensor([[0.0, 0.0, 1.0]])
    mask, response = torch.tensor([[True, True, False]]), torch.tensor([[True, True, True]])
    dropped = scan.gae_scan(rewards, values, mask, None, 0.95, 0.95)[0]
    carried = scan.gae_scan(rewards, values, mask, None, 0.95, 0.95, "through", response)[0]
    assert dropped[0].tolist() == pytest.approx([-0.4715, -0.6, 0.0])  # given as -0.472 and -0.600
    assert [round(x, 3) for x in carried[0].tolist()] == [0.382, 0.345, 0.0]


def test_what_does_not_take_part_is_never_read(way: str) -> None:
    rewards = torch.tensor([[nan, 1.0, math.inf, 2.0, nan]])
    values = torch.tensor([[math.inf, 0.5, nan, 0.25, nan]])
    mask = torch.tensor([[False, True, False, True, False]])
    for observations in ("skip", "zeroed"):
        advantages, returns = scan.gae_scan(rewards, values, mask, None, 0.9, 0.8, observations)
        assert advantages.isfinite().all() and returns.isfinite().all()
        assert scan.return_scan(rewards, mask, None, 0.9, observations).isfinite().all()


@pytest.mark.parametrize("bad", [nan, math.inf])
def test_what_is_not_finite_among_tokens_that_count_shows_and_spreads_to_earlier_ones_alone(
    way: str, bad: float
) -> None:
    values = torch.tensor([0.5, 0.5, bad, 0.5, 0.5, 0.5])
    mask = torch.ones(6, dtype=torch.bool)
    advantages, _ = scan.gae_scan(torch.zeros(6), values, mask, [5, 1], 0.9, 0.8)
    assert advantages.isfinite().tolist() == [False, False, False, True, True, True]


def test_results_are_new_and_have_no_gradient(way: str) -> None:
    rewards, values = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    mask = torch.tensor([[True, False, True], [True, True, True]])
    originals = rewards.detach().clone(), values.detach().clone(), mask.clone()
    for observations in scan.OBSERVATIONS:
        scanned = (*scan.gae_scan(rewards, values, mask, None, 0.9, 0.9, observations),)
        scanned = (*scanned, scan.return_scan(rewards, mask, None, 0.9, observations))
        assert not any(column.requires_grad for column in scanned)
        for column in scanned:
            column.add_(1)
    assert torch.equal(rewards, originals[0]) and torch.equal(values, originals[1]) and torch.equal(mask, originals[2])


def test_types_of_any_kind_and_tensors_that_are_not_contiguous(way: str) -> None:
    rewards = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).T
    values, mask = rewards.flip(0), (rewards > -1)
    plain = scan.gae_scan(rewards.contiguous(), values, mask.contiguous(), None, 0.9, 0.8)
    assert all(map(torch.equal, plain, scan.gae_scan(rewards, values, mask, None, 0.9, 0.8)))
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        scanned = scan.gae_scan(rewards.to(dtype), values.to(dtype), mask, None, 0.9, 0.8)
        expected = scan.gae_scan(rewards.to(dtype).float(), values.to(dtype).float(), mask, None, 0.9, 0.8)
        assert scanned[0].dtype == torch.float32 and all(map(torch.equal, scanned, expected))
    assert scan.gae_scan(rewards.double(), values, mask)[0].dtype == torch.float64
    assert scan.count_rewards(rewards.bfloat16(), mask).counts.tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_nothing_in_nothing_out(way: str, shape: tuple[int, int]) -> None:
    empty, mask = torch.empty(shape), torch.empty(shape, dtype=torch.bool)
    for observations in scan.OBSERVATIONS:
        assert scan.gae_scan(empty, empty, mask, None, 1.0, 1.0, observations)[0].shape == shape
        assert scan.return_scan(empty, mask, None, 1.0, observations).shape == shape
    assert scan.count_rewards(empty, mask).counts.tolist() == [0] * shape[0]


@given(rows_of_tokens)
def test_the_survey_counts_by_row(rows: list[list[tuple[Any, ...]]]) -> None:
    rewards, _, taken, broken = columns(rows)
    rewards = [[nan if b and r > 2 else math.inf if b and r < -2 else r for r, b in zip(*pair, strict=True)]
               for pair in zip(rewards, broken, strict=True)]  # fmt: skip
    lengths = [len(row) for row in rows]
    expected = [
        [sum(row) for row in taken],
        [
            sum(t and not math.isfinite(r) for r, t in zip(*pair, strict=True))
            for pair in zip(rewards, taken, strict=True)
        ],
        [
            sum(not t and math.isfinite(r) and r != 0 for r, t in zip(*pair, strict=True))
            for pair in zip(rewards, taken, strict=True)
        ],
    ]
    for implementation in WAYS:
        with forced(implementation):
            counted = scan.count_rewards(packed(rewards, torch.float32), packed(taken, torch.bool), lengths)
        assert [part.tolist() for part in counted] == expected


@given(rows_of_tokens)
def test_places_finds_the_nearest_action(rows: list[list[tuple[Any, ...]]]) -> None:
    mask = columns(rows)[2]
    place = scan.TokenPositions(packed(mask, torch.bool), [len(row) for row in rows])
    start = 0
    expected: dict[int, int] = {}
    for row in mask:
        actions = [t for t, hit in enumerate(row) if hit]
        for t in range(len(row) if actions else 0):
            expected[start + t] = start + max([a for a in actions if a <= t], default=actions[0])
        start += len(row)
    slots = torch.tensor(list(expected), dtype=torch.int64)
    assert place.nearest(slots).tolist() == list(expected.values())


# --- which way ------------------------------------------------------------------------------------------------------


def run(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


@pytest.mark.slow
def test_only_a_large_call_loads_numba() -> None:
    printed = run(
        "import sys, torch\n"
        "from rollbook.algorithms import scan\n"
        "small, large = torch.ones(4, 64, dtype=torch.bool), torch.ones(1, scan.LARGE, dtype=torch.bool)\n"
        "scan.return_scan(small.float(), small); scan.count_rewards(small.float(), small)\n"
        "first = 'numba' in sys.modules, scan.backend(64)\n"
        "scan.return_scan(large.float(), large)\n"
        "print(first, 'numba' in sys.modules, scan.backend(64))"
    )
    assert printed == "(False, 'numpy') True numba"


@pytest.mark.slow
def test_without_numba_a_large_call_gives_the_same_numbers() -> None:
    printed = run(
        "import sys\n"
        "sys.modules['numba'] = None\n"
        "import torch\n"
        "from rollbook.algorithms import scan\n"
        "values = torch.randn(2, scan.LARGE, generator=torch.Generator().manual_seed(0))\n"
        "mask = values > -2\n"
        "made = scan.gae_scan(values, values, mask, None, 0.99, 0.9)\n"
        "print(scan.backend(), made[0].double().sum().item(), made[1].double().sum().item())"
    )
    values = torch.randn(2, scan.LARGE, generator=torch.Generator().manual_seed(0))
    with forced("numba"):
        scanned = scan.gae_scan(values, values, values > -2, None, 0.99, 0.9)
    assert printed == f"numpy {scanned[0].double().sum().item()} {scanned[1].double().sum().item()}"


def test_kernels_of_a_device_get_what_takes_part_and_their_results_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between a device's kernels and the caller, with kernels that are loops over Python numbers."""
    masks = []

    def rows(*tensors: torch.Tensor, offsets: torch.Tensor | None) -> Iterator[list[list[Any]]]:
        bounds = [0, *(offsets.tolist()[1:])] if offsets is not None else None
        for i in range(tensors[0].shape[0] if bounds is None else len(bounds) - 1):
            yield [(t[i] if bounds is None else t[bounds[i] : bounds[i + 1]]).tolist() for t in tensors]

    def gae(rewards: Any, values: Any, mask: Any, offsets: Any, gamma: float, lam: float) -> Any:
        masks.append(mask.tolist())
        assert all(column.is_contiguous() for column in (rewards, values, mask)) and mask.dtype == torch.bool
        pairs = [naive_gae(*row, gamma, lam) for row in rows(rewards, values, mask, offsets=offsets)]
        return tuple(torch.tensor([x for pair in pairs for x in pair[k]]).reshape(mask.shape) for k in range(2))

    def discounted(rewards: Any, mask: Any, offsets: Any, gamma: float) -> Any:
        to_go = [naive_returns(*row, gamma) for row in rows(rewards, mask, offsets=offsets)]
        return torch.tensor([x for row in to_go for x in row]).reshape(mask.shape)

    values = torch.tensor([[0.5, 0.6, 0.9, 0.7], [0.1, 0.2, 0.3, 0.4]])
    mask = torch.tensor([[True, False, False, True], [False, True, True, False]])
    for lengths in (None, [3, 5]):
        data = (values, values, mask) if lengths is None else tuple(t.flatten() for t in (values, values, mask))
        for observations in scan.OBSERVATIONS:
            expected = (*scan.gae_scan(*data, lengths, 0.9, 0.8, observations),)
            expected = (*expected, scan.return_scan(data[0], data[2], lengths, 0.9, observations))
            with monkeypatch.context() as patch:
                patch.setattr(scan, "_triton_module", lambda _: SimpleNamespace(gae=gae, discounted=discounted))
                scanned = (*scan.gae_scan(*data, lengths, 0.9, 0.8, observations),)
                scanned = (*scanned, scan.return_scan(data[0], data[2], lengths, 0.9, observations))
            for column, other in zip(scanned, expected, strict=True):
                torch.testing.assert_close(column, other)
    assert masks[0] == mask.tolist()
    assert masks[1] == [[True] * 4, [False, True, True, False]]


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 1.5}, "gamma: got 1.5, expected a number from 0 to 1"),
        ({"lam": -0.1}, "lam: got -0.1, expected a number from 0 to 1"),
        ({"gamma": nan}, "gamma: got nan, expected a number from 0 to 1"),
        ({"observations": "stop"}, "observations: got 'stop', expected one of 'skip', 'through', 'zeroed'"),
        ({"values": torch.zeros(2, 4)}, r"values: got shape \[2, 4\], expected \[2, 3\], as the mask has"),
        ({"response": torch.ones(1, 3)}, r"response: got shape \[1, 3\], expected \[2, 3\], as the mask has"),
        ({"mask": torch.ones(2, 3)}, "mask: got torch.float32, expected torch.bool"),
        ({"lengths": [3, 3]}, r"mask: got 2 dimensions, expected 1 \(total,\) beside `lengths`"),
        ({"mask": torch.ones(6, dtype=torch.bool)}, r"mask: got 1 dimensions, expected 2 \(B, R\)"),
        (
            {"mask": torch.ones(6, dtype=torch.bool), "lengths": [3, 4]},
            "lengths: got a sum of 7, expected 6, the number of tokens",
        ),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {"rewards": torch.zeros(2, 3), "values": torch.zeros(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool)}
    with pytest.raises(ValueError, match=message):
        scan.gae_scan(**{**arguments, **change})
