"""Token selection: distribution, rules and random numbers per row, and kinds of log-probs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rollbook.rollout.decoding import (
    NUCLEUS_SIZE,
    BatchRules,
    Blocks,
    TokenRule,
    choose_tokens,
    sample_by_inverse_cdf,
    uniform_numbers,
)

ENOUGH = 5.0
"""Standard deviations. Seeds are fixed, so results do not change."""


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the distance of a chi-square statistic from its mean, in standard deviations (Wilson-Hilferty)."""
    seen = expected > 0
    assert not counts[~seen].any(), "a token of probability 0 was chosen"
    freedom = int(seen.sum()) - 1
    statistic = float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def reference(logits: np.ndarray, rule: TokenRule) -> np.ndarray:
    """Compute the distribution of a row in float64, by the definitions in the docstring of the module."""
    scores = logits.astype(np.float64)
    scores[[*rule.forbidden, *rule.forbidden_until_min_tokens]] = -np.inf
    if rule.greedy:
        return (np.arange(len(scores)) == scores.argmax()).astype(np.float64)
    scores = (scores - scores.max()) / rule.temperature
    ordered = np.sort(scores)[::-1]
    if 0 < rule.top_k < len(scores):
        scores[scores < ordered[rule.top_k - 1]] = -np.inf
    shares = np.exp(scores) / np.exp(scores).sum()
    floor = -np.inf
    if rule.top_p < 1:
        ordered = np.sort(scores)[::-1]
        mass = np.cumsum(np.sort(shares)[::-1])
        floor = ordered[min(int((mass < rule.top_p).sum()), len(ordered) - 1)]
    if rule.min_p > 0:
        floor = max(floor, math.log(rule.min_p))
    shares[scores < floor] = 0
    return shares / shares.sum()


def chosen(logits: np.ndarray | torch.Tensor, rules: list[TokenRule], numbers: Any) -> Any:
    rows = torch.as_tensor(logits)
    batch_rules = BatchRules(rules, rows.shape[1], "cpu")
    return choose_tokens(rows, batch_rules, torch.as_tensor(np.asarray(numbers, np.float64)))


# --- random streams -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2**70), st.integers(0, 10**6)), min_size=1, max_size=5), st.integers(1, 9))
def test_numbers_depend_only_on_seed_and_index(rows: list[tuple[int, int]], count: int) -> None:
    numbers = uniform_numbers([seed for seed, _ in rows], [start for _, start in rows], count)
    assert numbers.shape == (len(rows), count) and numbers.dtype == np.float64
    assert (numbers >= 0).all() and (numbers < 1).all()
    for i, (seed, start) in enumerate(rows):
        for j in range(count):
            assert numbers[i, j] == uniform_numbers([seed], [start + j], 1)[0, 0]


def test_streams_are_uniform_and_independent() -> None:
    numbers = uniform_numbers(range(2000), [0] * 2000, 100)  # seeds that differ in a few bits
    assert len(np.unique(numbers)) == numbers.size
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    assert abs(chi_square(counts, np.full(100, numbers.size / 100))) < ENOUGH
    for a, b in (
        (numbers[:, :-1], numbers[:, 1:]),
        (numbers[:-1], numbers[1:]),
    ):  # next in the stream, same place in the next one
        counts, _, _ = np.histogram2d(a.ravel(), b.ravel(), bins=10, range=((0, 1), (0, 1)))
        assert abs(chi_square(counts.ravel(), np.full(100, a.size / 100))) < ENOUGH


# --- the distribution -----------------------------------------------------------------------------------------------

RULES = [
    TokenRule(),
    TokenRule(temperature=0.3),
    TokenRule(temperature=5.0),
    TokenRule(top_k=3),
    TokenRule(top_p=0.7),
    TokenRule(min_p=0.2),
    TokenRule(temperature=1.7, top_k=12, top_p=0.8, min_p=0.05),
    TokenRule(forbidden=(0, 7, 36)),
    TokenRule(temperature=2.0, top_p=0.5, forbidden=(3,)),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_frequencies_equal_probabilities(rule: TokenRule) -> None:
    logits = np.random.default_rng(5).normal(0, 1.5, 37).astype(np.float32)
    rows, times = 1000, 60
    batch_rules = BatchRules([rule] * rows, 37, "cpu")
    batch = torch.from_numpy(logits).expand(rows, -1)
    numbers = torch.from_numpy(uniform_numbers(range(rows), [0] * rows, times))
    ids = torch.cat([choose_tokens(batch, batch_rules, numbers[:, j]).ids for j in range(times)])
    expected = reference(logits, rule) * rows * times
    assert abs(chi_square(np.bincount(ids.numpy(), minlength=37), expected)) < ENOUGH


rule_strategy = st.builds(
    TokenRule,
    temperature=st.sampled_from([0.0, 1e-35, 1e-3, 0.4, 1.0, 3.0, 1e4]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.6, 0.1, 1e-9]),
    top_k=st.sampled_from([-1, -1, 1, 2, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.3, 1.0]),
    forbidden=st.sampled_from([(), (1,), (0, 4)]),
    forbidden_until_min_tokens=st.sampled_from([(), (), (2,), (3, 5)]),
    logprobs_kind=st.sampled_from(["processed", "tempered", "raw"]),
)


@given(st.integers(0, 2**32), st.lists(rule_strategy, min_size=1, max_size=6), st.integers(6, 70), st.booleans())
def test_each_row_follows_its_rule(seed: int, rules: list[TokenRule], vocabulary: int, coarse: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (len(rules), vocabulary)).astype(np.float32)
    if coarse:
        logits = np.round(logits * 2) / 2  # many are equal
    edge = [0.0, 1 - 2.0**-52, 0.5]
    numbers = np.array([edge[i % 3] if rng.random() < 0.3 else rng.random() for i in range(len(rules))])
    choice = chosen(logits, rules, numbers)
    for i, rule in enumerate(rules):
        token, shares = int(choice.ids[i]), reference(logits[i], rule)
        assert shares[token] > 0
        if not rule.greedy:
            before = shares[:token].sum()
            assert before - 1e-5 <= numbers[i] <= before + shares[token] + 1e-5
        scores = logits[i].astype(np.float64)
        raw = scores[token] - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
        tempered = 0.0
        if not rule.greedy:
            allowed = scores.copy()
            allowed[list(rule.forbidden)] = -np.inf  # never there, as in training; what is early is
            cool = (allowed - scores.max()) / rule.temperature
            tempered = cool[token] - np.log(np.exp(cool - cool.max()).sum()) - cool.max()
        expected = {"processed": math.log(shares[token]), "tempered": tempered, "raw": raw}[rule.logprobs_kind]
        assert choice.logprobs[i].item() == pytest.approx(expected, abs=2e-5, rel=1e-6)
        # Alone, and in another place, it gets the same.
        alone = chosen(logits[i : i + 1], [rule], numbers[i : i + 1])
        assert alone.ids.item() == token and alone.logprobs.item() == pytest.approx(choice.logprobs[i].item(), abs=1e-6)


@given(st.lists(st.sampled_from([0.0, 1e-38, 1e-30, 1e-7, 0.5, 3.0]), min_size=1, max_size=70), st.booleans())
def test_tokens_of_probability_zero_are_never_sampled(row: list[float], even: bool) -> None:
    if not any(row):
        return
    row += [0.0] * (-len(row) % 64 if even else 0)
    numbers = torch.tensor([0.0, 2.0**-52, 0.25, 0.5, 1 - 1e-9, 1 - 2.0**-52], dtype=torch.float64)
    ids, total = sample_by_inverse_cdf(
        torch.tensor([row] * len(numbers)), numbers[:, None], Blocks(len(numbers), len(row), "cpu")
    )
    assert all(row[i] > 0 for i in ids[:, 0].tolist())
    assert ids[:, 0].tolist() == sorted(ids[:, 0].tolist())
    assert total[0].item() == pytest.approx(sum(row), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nucleus_wider_than_the_sorted_tokens(dtype: torch.dtype) -> None:
    vocabulary = 3 * NUCLEUS_SIZE + 7
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 0.1, (3, vocabulary))).to(dtype)
    logits[2, 5] = 12.0  # this one's is narrow
    rules = [TokenRule(top_p=0.9), TokenRule(top_k=4 * NUCLEUS_SIZE, top_p=0.95), TokenRule(top_p=0.9)]
    batch_rules = BatchRules(rules, vocabulary, "cpu")
    for number in (0.0, 0.3, 0.999999):
        choice = choose_tokens(logits, batch_rules, torch.full((3,), number, dtype=torch.float64))
        for i, rule in enumerate(rules):
            shares = reference(logits[i].float().numpy(), rule)
            token = int(choice.ids[i])
            assert shares[token] > 0
            assert choice.logprobs[i].item() == pytest.approx(math.log(shares[token]), abs=1e-4)
    assert (reference(logits[0].float().numpy(), rules[0]) > 0).sum() > NUCLEUS_SIZE


def test_equal_logits_are_kept_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).expand(100, -1)
    numbers = torch.arange(100, dtype=torch.float64) / 100
    for rule in (TokenRule(top_k=2), TokenRule(top_p=0.6)):
        choice = choose_tokens(logits, BatchRules([rule] * 100, 5, "cpu"), numbers)
        assert set(choice.ids.tolist()) == {0, 1, 2, 3}


def test_rows_without_a_possible_token_have_logprob_nan() -> None:
    logits = torch.zeros(6, 4)
    logits[0, 1] = torch.nan
    logits[1, 1] = torch.inf
    rules = [
        TokenRule(),
        TokenRule(),
        TokenRule(forbidden=(0, 1, 2, 3)),
        TokenRule(temperature=0.0, forbidden=(0, 1, 2, 3), logprobs_kind="raw"),
    ]
    rules += [TokenRule(), TokenRule(temperature=0.0, logprobs_kind="raw")]
    choice = chosen(logits, rules, [0.5] * 6)
    assert choice.logprobs.isnan().tolist() == [True, True, True, True, False, False]
    greedy = [TokenRule(temperature=0.0)] * 2
    assert choose_tokens(logits[:2], BatchRules(greedy, 4, "cpu")).logprobs.isnan().tolist() == [True, True]


def test_logits_and_rules_must_have_the_same_shape() -> None:
    with pytest.raises(ValueError, match=r"logits: got \(2, 4\), expected \(1, 4\)"):
        choose_tokens(torch.zeros(2, 4), BatchRules([TokenRule(temperature=0.0)], 4, "cpu"))


def test_random_numbers_are_required_unless_all_rows_are_greedy() -> None:
    with pytest.raises(ValueError, match="uniforms: missing"):
        choose_tokens(torch.zeros(1, 4), BatchRules([TokenRule()], 4, "cpu"))


class Operations(TorchDispatchMode):
    """Counts operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operations(rules: list[TokenRule]) -> list[str]:
    batch_rules = BatchRules(rules, 512, "cpu")
    logits, numbers = torch.randn(len(rules), 512), torch.rand(len(rules), dtype=torch.float64)
    with Operations() as seen:
        choose_tokens(logits, batch_rules, numbers)
    return seen.names


WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero")


def test_number_of_operations() -> None:
    plain = operations([TokenRule(), TokenRule(temperature=0.5), TokenRule(forbidden=(3,))])
    views = ("slice", "view", "unsqueeze", "select", "expand", "detach", "alias")
    heavy = [name for name in plain if not any(f"aten.{view}." in name for view in views)]
    assert len(heavy) <= 26, heavy
    filtered = operations([TokenRule(top_k=5), TokenRule(min_p=0.1), TokenRule(top_k=9, top_p=0.9)])
    for names in (plain, filtered):
        assert not [name for name in names if any(wait in name for wait in WAITS)], names
    assert not [name for name in plain if "aten.sort" in name or "topk" in name]
    assert not [name for name in filtered if "aten.sort" in name]
