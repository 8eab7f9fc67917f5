"""From logits to the next token: temperature, truncation, a random stream for each row, and log-probs of each kind.

Invariant: what a row gets depends on its logits, its rule and its random number alone, whatever the other rows are; a
token of probability 0 is never chosen; nothing waits for the device, save where a nucleus is wider than `NUCLEUS`.

Rules apply in this order: forbidden tokens have probability 0; then the temperature; then top-k; then top-p, of what
top-k left; then min-p, by the likeliest token. A truncation keeps every token that is as likely as the last one it
keeps, so that equal logits (16-bit ones often are) do not depend on the order of sorting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

import numpy as np
import torch

from rollbook.core.sampling import LogprobsKind
from rollbook.models.logprobs import from_logits

COLDEST = 1e-30
"""A temperature below is 0: logits divided by it would overflow."""
NUCLEUS = 1024
"""So many tokens are sorted for top-p; rows whose nucleus is wider are sorted whole."""

_STEP, _MIX, _MORE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seeds: Sequence[int], starts: Sequence[int], count: int) -> np.ndarray:
    """(rows, count) numbers from 0 to 1 - 2^-52: entry (i, j) is number starts[i] + j of stream seeds[i].

    A number is made from its stream's seed and its index alone (SplitMix64), so that a stream can be taken up anywhere.

    >>> whole = uniforms([7], [0], 5)
    >>> bool((uniforms([9, 7], [0, 3], 2)[1] == whole[0, 3:]).all())
    True
    """
    index = np.asarray(starts, np.uint64)[:, None] + np.arange(1, count + 1, dtype=np.uint64)
    seed = np.asarray([each % 2**64 for each in seeds], np.uint64)[:, None]
    bits = _mixed(_mixed(seed + _STEP) + index * _STEP) >> np.uint64(12)
    made: np.ndarray = bits * 2.0**-52
    return made


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX
    z = (z ^ (z >> np.uint64(27))) * _MORE
    z ^= z >> np.uint64(31)
    return z


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one row's next token is chosen, and which log-prob of it is wanted.

    >>> Rule(temperature=0.0).greedy
    True
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    forbidden: tuple[int, ...] = ()
    """Never sampled: as if the model knew no such tokens."""
    early: tuple[int, ...] = ()
    """Not sampled yet: ends, before a response is as long as it must be."""
    kind: LogprobsKind = "processed"

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < COLDEST


class Rules:
    """The rules of all rows, as tensors on the device of the logits; made once for many steps.

    >>> rules = Rules([Rule(temperature=0.5), Rule(temperature=0.0)], 100, "cpu")
    >>> rules.temperature, rules.greedy
    (tensor([0.5000, 1.0000]), tensor([False,  True]))
    """

    def __init__(self, rules: Sequence[Rule], vocabulary: int, device: torch.device | str) -> None:
        def column(values: list[float] | list[int] | list[bool]) -> torch.Tensor:
            return torch.tensor(values, device=device)

        self.all_greedy = all(rule.greedy for rule in rules)
        self.greedy = column([rule.greedy for rule in rules]) if any(rule.greedy for rule in rules) else None
        self.temperature = column([1.0 if rule.greedy else float(rule.temperature) for rule in rules])
        heats = {1.0 if rule.greedy else float(rule.temperature) for rule in rules}
        self.tempers = heats != {1.0}
        self.cold = min(heats) < 0.5
        """Whether logits, divided by a temperature, would lose digits that count."""
        kinds = {rule.kind for rule in rules}
        self.only: LogprobsKind | None = next(iter(kinds)) if len(kinds) == 1 else None
        self.kinds = {kind: column([rule.kind == kind for rule in rules]) for kind in kinds}
        self.blocks = Blocks(len(rules), vocabulary, device)

        def places(banned: list[tuple[int, int]]) -> tuple[torch.Tensor, ...] | None:
            return tuple(column(list(each)) for each in zip(*banned, strict=True)) if banned else None

        never = [(i, token) for i, rule in enumerate(rules) for token in rule.forbidden]
        self.never = column([-torch.inf])
        self.suppressed = places(never)
        self.forbidden = places(never + [(i, token) for i, rule in enumerate(rules) for token in rule.early])

        cuts = [not rule.greedy and (rule.top_k > 0 or rule.top_p < 1 or rule.min_p > 0) for rule in rules]
        self.truncates = any(cuts)
        cut = [rule for rule, is_cut in zip(rules, cuts, strict=True) if is_cut]
        self.cut = None if all(cuts) else column([i for i, is_cut in enumerate(cuts) if is_cut])
        top_ks = [rule.top_k if 0 < rule.top_k < vocabulary else vocabulary for rule in cut]
        self.most_k = max((k for k in top_ks if k < vocabulary), default=0)
        self.top_k = column(top_ks) if self.most_k else None
        self.top_p = column([rule.top_p for rule in cut]).double() if any(r.top_p < 1 for r in cut) else None
        self.min_p = column([rule.min_p for rule in cut]) if any(r.min_p > 0 for r in cut) else None


class Chosen(NamedTuple):
    """The next token of each row [rows], int64, and its log-prob, float32: NaN where there was nothing to choose from.

    >>> Chosen(torch.tensor([3]), torch.tensor([-0.5])).ids.tolist()
    [3]
    """

    ids: torch.Tensor
    logprobs: torch.Tensor


def choose(logits: torch.Tensor, rules: Rules, numbers: torch.Tensor | None = None) -> Chosen:
    """The next token of each row of logits (rows, V); `numbers` [rows] are uniform, float64 (`None`: all are greedy).

    Of a token that was taken greedily, the `raw` log-prob is the model's; by `processed` and `tempered` it is 0, since
    there was no other choice. A row whose logits are NaN or infinite, or all forbidden, gets log-prob NaN.

    >>> logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    >>> rules = Rules([Rule(top_k=1), Rule(temperature=0.0, forbidden=(1,), kind="raw")], 3, "cpu")
    >>> choose(logits, rules, torch.tensor([0.9, 0.0], dtype=torch.float64))
    Chosen(ids=tensor([1, 2]), logprobs=tensor([ 0.0000, -2.1698]))
    """
    rows, vocabulary = logits.shape
    if vocabulary != rules.blocks.vocabulary or rows != len(rules.temperature):
        raise ValueError(f"logits: got {rows, vocabulary}, expected {len(rules.temperature), rules.blocks.vocabulary}")
    scores = logits
    if rules.tempers or rules.forbidden is not None:
        scores = logits.to(torch.float32, copy=True)
        if rules.cold:
            scores.sub_(scores.amax(-1, keepdim=True))
        if rules.tempers:
            scores.div_(rules.temperature[:, None])
        if rules.forbidden is not None:
            scores.index_put_(rules.forbidden, rules.never)
    best = scores.argmax(-1, keepdim=True) if rules.greedy is not None else None
    if best is not None and rules.all_greedy:
        ids, processed = best, torch.zeros_like(rules.temperature)
        sound = scores.gather(1, best)[:, 0]
    else:
        if numbers is None:
            raise ValueError("numbers: got None, expected a random number for each row that is not greedy")
        shares = scores.softmax(-1, dtype=torch.float32)
        if rules.truncates:
            shares.masked_fill_(shares < _floors(shares, rules), 0.0)
        ids, total = picked(shares, numbers[:, None], rules.blocks)
        share = shares.gather(1, ids)
        if rules.truncates:
            share = (share / total).float()
        sound = processed = share[:, 0].log()
        if best is not None and rules.greedy is not None:
            ids, processed = torch.where(rules.greedy[:, None], best, ids), processed.masked_fill(rules.greedy, 0.0)
    if rules.only == "processed" and best is None:
        return Chosen(ids[:, 0], processed)
    logprobs = processed
    for kind, those in rules.kinds.items():
        found = _of_model(kind, logits, ids[:, 0], rules) if kind != "processed" else processed
        logprobs = found if rules.only is not None else torch.where(those, found, logprobs)
    return Chosen(ids[:, 0], logprobs + (sound - sound))  # NaN where there was nothing to choose from, else the same


def _of_model(kind: str, logits: torch.Tensor, ids: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Log-probs [rows] before truncation: `raw`, or `tempered`, where suppressed tokens have no probability, as in
    training."""
    if kind == "tempered" and rules.suppressed is not None:
        logits = logits.to(torch.float32, copy=True).index_put_(rules.suppressed, rules.never)
    if kind == "raw" or not rules.tempers:
        found = from_logits(logits, ids).log_probs
    else:
        found = from_logits(logits, ids, temperature=rules.temperature).log_probs
    return found if kind == "raw" or rules.greedy is None else found.masked_fill(rules.greedy, 0.0)


class Blocks:
    """How a vocabulary is cut into blocks, each about as long as there are of them, and what `picked` needs of them.

    >>> Blocks(2, 151936, "cpu").size, Blocks(2, 50257, "cpu").size
    (128, 256)
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        # A power of two that divides the vocabulary, if there is one of about that length, saves a few operations.
        divisor = vocabulary & -vocabulary
        self.size = divisor if 64 <= divisor <= 1024 else 1 << isqrt(max(vocabulary - 1, 0)).bit_length()
        self.vocabulary = vocabulary
        self.whole = vocabulary - vocabulary % self.size
        """Where the last block begins, if that is shorter than the others."""
        self.zero = torch.zeros((rows, 1), device=device)
        self.steps = torch.arange(self.size, device=device)


def picked(shares: torch.Tensor, numbers: torch.Tensor, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (rows, 1) by the inverse of the distribution function, in float64, and the total (rows, 1) of shares
    (rows, V), which need not be 1; `numbers` (rows, 1) are multiples of 2^-52 below 1.

    First the block of tokens where the sum passes number * total, then the token in it: one pass over all of them. What
    is picked is where a sum grows past the number, and it does not grow where the share is 0. The product is below the
    total, as numbers are; within the block, whose sum is rounded in another way, it may not be.

    >>> shares = torch.tensor([[0.0, 1.0, 3.0, 0.0]] * 3)
    >>> numbers = torch.tensor([[0.0], [0.25], [0.999]], dtype=torch.float64)
    >>> picked(shares, numbers, Blocks(3, 4, "cpu"))[0][:, 0]
    tensor([1, 2, 2])
    """
    parts = [blocks.zero, shares[:, : blocks.whole].view(len(shares), -1, blocks.size).sum(-1)]
    ragged = blocks.whole < blocks.vocabulary
    if ragged:
        parts.append(shares[:, blocks.whole :].sum(-1, keepdim=True))
    sums = torch.cat(parts, 1).double().cumsum(-1)
    aim = numbers * sums[:, -1:]
    # The first sum is 0, so that the last that is not past the aim is there; the bounds are for NaN.
    before = torch.searchsorted(sums, aim, right=True).clamp_(1, sums.shape[1] - 1) - 1
    columns = torch.add(blocks.steps, before, alpha=blocks.size)
    piece = shares.gather(1, columns.clamp(max=blocks.vocabulary - 1) if ragged else columns)
    if ragged:
        piece.masked_fill_(columns >= blocks.vocabulary, 0.0)
    inside = piece.double().cumsum(-1)
    place = torch.searchsorted(inside, aim - sums.gather(1, before), right=True)
    last = inside.argmax(-1, keepdim=True)  # the first of the largest: where the sum ends to grow
    return torch.add(torch.minimum(place, last), before, alpha=blocks.size), sums[:, -1:]


def _floors(shares: torch.Tensor, rules: Rules) -> torch.Tensor:
    """(rows, 1): the least share that each row keeps."""
    those = shares if rules.cut is None else shares[rules.cut]
    floor = those.new_zeros((len(those), 1))
    if rules.min_p is not None:
        floor = those.amax(-1, keepdim=True) * rules.min_p[:, None]
    total: torch.Tensor | float = 1.0
    if rules.top_k is not None:
        best = those.topk(rules.most_k, sorted=True).values
        last = best.gather(1, rules.top_k.clamp(max=rules.most_k)[:, None] - 1)
        last = last.masked_fill((rules.top_k > rules.most_k)[:, None], 0.0)
        floor = torch.maximum(floor, last)
        if rules.top_p is not None:
            total = those.masked_fill(those < last, 0.0).sum(-1, keepdim=True)
    if rules.top_p is not None:
        floor = torch.maximum(floor, _nucleus(those, rules.top_p[:, None], total))
    if rules.cut is None:
        return floor
    return shares.new_zeros((len(shares), 1)).index_copy_(0, rules.cut, floor)


def _nucleus(shares: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor | float) -> torch.Tensor:
    """(rows, 1): the largest share such that those not below it are at least `top_p` of the total together."""
    many = min(NUCLEUS, shares.shape[1])
    best = shares.topk(many, sorted=True).values
    wanted = top_p * total
    mass = best.double().cumsum(-1)
    floor = best.gather(1, (mass < wanted).sum(-1, keepdim=True).clamp_(max=many - 1))
    floor = floor.masked_fill(top_p >= 1, 0.0)
    if many < shares.shape[1]:
        wide = ((mass[:, -1:] < wanted) & (top_p < 1)).nonzero()[:, 0]  # waits for the device
        if len(wide):
            best = shares[wide].sort(-1, descending=True).values
            mass = best.double().cumsum(-1)
            floor[wide] = best.gather(1, (mass < wanted[wide]).sum(-1, keepdim=True).clamp_(max=best.shape[1] - 1))
    return floor
