"""Batched decoding with a key-value cache: stop conditions, token selection, the cache, rows and batches.

Invariant: a step that raises leaves every row unchanged. A row's tokens depend on its logits, its sampling options and
its random stream, not on the other rows (up to the rounding of logits). A token of probability 0 is never sampled.

Sampling options apply in this order: forbidden tokens get probability 0, then temperature, top-k, top-p over what top-k
left, and min-p relative to the most likely token. A truncation keeps every token that is as likely as the last one it
keeps, so that equal logits (common with 16 bits) do not depend on the sort order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rollbook.batch.media import BY_TOKEN, placeholders
from rollbook.core.sampling import FinishReason, LogprobsKind
from rollbook.models.head import VARLEN
from rollbook.models.logprobs import from_logits
from rollbook.rollout.engine import Request

if TYPE_CHECKING:
    from rollbook.rollout.transformers import PreparedPrompt

Decode = Callable[[Sequence[int]], str]


class StopTexts:
    """Several stop texts and a tokenizer's decoder; what is known of tokens is shared by all rows of a call.

    Most tokens cannot end a stop text, as its last character is not in theirs; only for the others a window of the
    last tokens is decoded, and only if a stop text is in that, all of them.

    >>> letters = "abc|"
    >>> stops = StopTexts(["|b", "cc"], lambda ids: "".join(letters[i] for i in ids))
    >>> stops.completed([0, 3]), stops.completed([0, 3, 1]), stops.completed([3, 1, 0])
    (None, '|b', None)
    """

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        self.texts = tuple(texts)
        self._decode = decode
        self._longest = max(map(len, self.texts), default=0)
        self._lasts = frozenset(text[-1] for text in self.texts)
        # A piece of a character decodes to U+FFFD; those of ASCII are never in pieces.
        self._pieces = not all(last.isascii() for last in self._lasts)
        self._reach = np.full(1024, -1)

    def may_end(self, tokens: np.ndarray) -> np.ndarray:
        """For each token whether a stop text may end in it."""
        if tokens.size and tokens.max() >= len(self._reach):
            self._reach = np.append(self._reach, np.full(int(tokens.max()) + 1, -1))
        reach: np.ndarray = self._reach[tokens]
        for i in (reach < 0).nonzero()[0].tolist():
            reach[i] = self._reach_of(int(tokens[i]))
        candidates: np.ndarray = reach > 0
        return candidates

    def _reach_of(self, token: int) -> int:
        """0 if no stop text ends in this token, else how much text, at most, it may end before the token's end."""
        # Twice, since a decoder may drop the space of what comes first.
        text = self._decode([token, token])
        some = self._lasts & set(text) or (self._pieces and "\N{REPLACEMENT CHARACTER}" in text)
        self._reach[token] = len(text) + 8 if some else 0
        return int(self._reach[token])

    def completed(self, ids: Sequence[int]) -> str | None:
        """The stop text that the last token completes, or `None`; of several the one that begins first."""
        if not self.may_end(np.array(ids[-1:]))[0]:
            return None
        reach = int(self._reach[ids[-1]])
        size = 2 * self._longest + 8
        window = self._decode(ids[-size:])
        # A window may begin in the middle of a character, and many tokens may have little text.
        while len(window) < self._longest + reach and size < len(ids):
            size *= 2
            window = self._decode(ids[-size:])
        if not any(text in window for text in self.texts):
            return None
        matches = [
            (place, -len(text), text) for text in self.texts if (place := find_stop_start(text, ids, self._decode)) >= 0
        ]
        return min(matches)[2] if matches else None


def find_stop_start(text: str, ids: Sequence[int], decode: Decode) -> int:
    """Where the occurrence of `text` begins that the last token completes; -1 if there is none.

    >>> find_stop_start("aa", [0, 0, 0], lambda ids: "a" * len(ids))
    1
    """
    text_now = decode(ids)
    # What was there before the token: a character that was in pieces, or a space that a decoder joins, is new.
    earlier = decode(ids[:-1])
    before = next((i for i, (a, b) in enumerate(zip(earlier, text_now, strict=False)) if a != b), len(earlier))
    return text_now.find(text, max(0, before - len(text) + 1))


MIN_TEMPERATURE = 1e-30
"""A temperature below is 0: logits divided by it would overflow."""
NUCLEUS_SIZE = 1024
"""So many tokens are sorted for top-p; rows whose nucleus is wider are sorted whole."""

_STEP, _MIX, _MORE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniform_numbers(seeds: Sequence[int], starts: Sequence[int], count: int) -> np.ndarray:
    """(rows, count) numbers from 0 to 1 - 2^-52: entry (i, j) is number starts[i] + j of stream seeds[i].

    A number is made from its stream's seed and its index alone (SplitMix64), so that a stream can be taken up anywhere.

    >>> whole = uniform_numbers([7], [0], 5)
    >>> bool((uniform_numbers([9, 7], [0, 3], 2)[1] == whole[0, 3:]).all())
    True
    """
    index = np.asarray(starts, np.uint64)[:, None] + np.arange(1, count + 1, dtype=np.uint64)
    seed = np.asarray([stream_seed % 2**64 for stream_seed in seeds], np.uint64)[:, None]
    bits = _mix(_mix(seed + _STEP) + index * _STEP) >> np.uint64(12)
    numbers: np.ndarray = bits * 2.0**-52
    return numbers


def _mix(z: np.ndarray) -> np.ndarray:
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
        return self.temperature < MIN_TEMPERATURE


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
            return tuple(column(list(indices)) for indices in zip(*banned, strict=True)) if banned else None

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


class TokenChoice(NamedTuple):
    """The next token of each row [rows], int64, and its log-prob, float32: NaN where there was nothing to choose from.

    >>> TokenChoice(torch.tensor([3]), torch.tensor([-0.5])).ids.tolist()
    [3]
    """

    ids: torch.Tensor
    logprobs: torch.Tensor


def choose_tokens(logits: torch.Tensor, rules: Rules, numbers: torch.Tensor | None = None) -> TokenChoice:
    """The next token of each row of logits (rows, V); `numbers` [rows] are uniform, float64 (`None`: all are greedy).

    Of a token that was taken greedily, the `raw` log-prob is the model's; by `processed` and `tempered` it is 0, since
    there was no other choice. A row whose logits are NaN or infinite, or all forbidden, gets log-prob NaN.

    >>> logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    >>> rules = Rules([Rule(top_k=1), Rule(temperature=0.0, forbidden=(1,), kind="raw")], 3, "cpu")
    >>> choose_tokens(logits, rules, torch.tensor([0.9, 0.0], dtype=torch.float64))
    TokenChoice(ids=tensor([1, 2]), logprobs=tensor([ 0.0000, -2.1698]))
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
            shares.masked_fill_(shares < _truncation_floors(shares, rules), 0.0)
        ids, total = sample_by_inverse_cdf(shares, numbers[:, None], rules.blocks)
        share = shares.gather(1, ids)
        if rules.truncates:
            share = (share / total).float()
        sound = processed = share[:, 0].log()
        if best is not None and rules.greedy is not None:
            ids, processed = torch.where(rules.greedy[:, None], best, ids), processed.masked_fill(rules.greedy, 0.0)
    if rules.only == "processed" and best is None:
        return TokenChoice(ids[:, 0], processed)
    logprobs = processed
    for kind, those in rules.kinds.items():
        kind_logprobs = _model_logprobs(kind, logits, ids[:, 0], rules) if kind != "processed" else processed
        logprobs = kind_logprobs if rules.only is not None else torch.where(those, kind_logprobs, logprobs)
    return TokenChoice(
        ids[:, 0], logprobs + (sound - sound)
    )  # NaN where there was nothing to choose from, else the same


def _model_logprobs(kind: str, logits: torch.Tensor, ids: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Log-probs [rows] before truncation: `raw`, or `tempered`, where suppressed tokens have no probability, as in
    training."""
    if kind == "tempered" and rules.suppressed is not None:
        logits = logits.to(torch.float32, copy=True).index_put_(rules.suppressed, rules.never)
    if kind == "raw" or not rules.tempers:
        logprobs = from_logits(logits, ids).logprobs
    else:
        logprobs = from_logits(logits, ids, temperature=rules.temperature).logprobs
    return logprobs if kind == "raw" or rules.greedy is None else logprobs.masked_fill(rules.greedy, 0.0)


class Blocks:
    """Division of a vocabulary into about as many blocks as each has tokens, for `sample_by_inverse_cdf`.

    >>> Blocks(2, 151936, "cpu").size, Blocks(2, 50257, "cpu").size
    (128, 256)
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        # A power of two that divides the vocabulary, if there is one of about that length, saves a few operations.
        divisor = vocabulary & -vocabulary
        self.size = divisor if 64 <= divisor <= 1024 else 1 << isqrt(max(vocabulary - 1, 0)).bit_length()
        self.vocabulary = vocabulary
        self.last_start = vocabulary - vocabulary % self.size
        """Where the last block begins, if that is shorter than the others."""
        self.zero = torch.zeros((rows, 1), device=device)
        self.steps = torch.arange(self.size, device=device)


def sample_by_inverse_cdf(
    shares: torch.Tensor, numbers: torch.Tensor, blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (rows, 1) by the inverse of the distribution function, in float64, and the total (rows, 1) of shares
    (rows, V), which need not be 1; `numbers` (rows, 1) are multiples of 2^-52 below 1.

    First the block of tokens where the sum passes number * total, then the token in it: one pass over all of them. What
    is picked is where a sum grows past the number, and it does not grow where the share is 0. The product is below the
    total, as numbers are; within the block, whose sum is rounded in another way, it may not be.

    >>> shares = torch.tensor([[0.0, 1.0, 3.0, 0.0]] * 3)
    >>> numbers = torch.tensor([[0.0], [0.25], [0.999]], dtype=torch.float64)
    >>> sample_by_inverse_cdf(shares, numbers, Blocks(3, 4, "cpu"))[0][:, 0]
    tensor([1, 2, 2])
    """
    parts = [blocks.zero, shares[:, : blocks.last_start].view(len(shares), -1, blocks.size).sum(-1)]
    ragged = blocks.last_start < blocks.vocabulary
    if ragged:
        parts.append(shares[:, blocks.last_start :].sum(-1, keepdim=True))
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


def _truncation_floors(shares: torch.Tensor, rules: Rules) -> torch.Tensor:
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
        floor = torch.maximum(floor, _nucleus_floors(those, rules.top_p[:, None], total))
    if rules.cut is None:
        return floor
    return shares.new_zeros((len(shares), 1)).index_copy_(0, rules.cut, floor)


def _nucleus_floors(shares: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor | float) -> torch.Tensor:
    """(rows, 1): the largest share such that those not below it are at least `top_p` of the total together."""
    size = min(NUCLEUS_SIZE, shares.shape[1])
    best = shares.topk(size, sorted=True).values
    target = top_p * total
    mass = best.double().cumsum(-1)
    floor = best.gather(1, (mass < target).sum(-1, keepdim=True).clamp_(max=size - 1))
    floor = floor.masked_fill(top_p >= 1, 0.0)
    if size < shares.shape[1]:
        wide = ((mass[:, -1:] < target) & (top_p < 1)).nonzero()[:, 0]  # waits for the device
        if len(wide):
            best = shares[wide].sort(-1, descending=True).values
            mass = best.double().cumsum(-1)
            floor[wide] = best.gather(1, (mass < target[wide]).sum(-1, keepdim=True).clamp_(max=best.shape[1] - 1))
    return floor


def preallocate(cache: Any, most: int, step: int = 1) -> Any:
    """The same cache, still empty, whose plain attention layers have room for up to `most` tokens at last; layers of
    other kinds (sliding windows, linear attention) are left as they are.

    With a `step` above 1, keys and values are shown after the first call with zeros up to its next multiple: the model
    must have a mask, by positions, that hides them.

    >>> from transformers import DynamicCache, LlamaConfig
    >>> cache = preallocate(DynamicCache(config=LlamaConfig(num_hidden_layers=1)), 100, step=8)
    >>> keys = torch.ones(1, 2, 3, 4)
    >>> for _ in range(3):
    ...     grown, _ = cache.update(keys, keys, 0)
    >>> grown.shape, cache.get_seq_length()
    (torch.Size([1, 2, 16, 4]), 9)
    """
    from transformers.cache_utils import DynamicLayer

    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = _preallocated_layer()(most, step)
    return cache


@functools.cache
def _preallocated_layer() -> Any:
    """The class of such layers, made when transformers is first needed."""
    from transformers.cache_utils import DynamicLayer

    class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
        """Keys and values (rows, heads, tokens, size) that are the first part of larger tensors."""

        def __init__(self, most: int, step: int) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.most, self.step = most, step
            self.length = 0
            self.storage: tuple[torch.Tensor, torch.Tensor] | None = None
            self.shown: torch.Tensor | None = None

        def get_seq_length(self) -> int:
            return self.length

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            new = self.length + query_length
            return (self._rounded(new) if self.length else new), 0

        def reset(self) -> None:
            self.length, self.storage = 0, None
            super().reset()

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            old, self.length = self.length, self.length + key_states.shape[-2]
            if not old or self.keys is None or self.values is None:
                self.keys, self.values = key_states, value_states  # a prompt's: its rows may be repeated first
                return self.keys, self.values
            show = self._rounded(self.length)
            # Whoever selects rows puts other tensors in place of those shown; then the room is gone.
            if self.storage is None or self.keys is not self.shown or self.storage[0].shape[-2] < show:
                size = max(show, self._rounded(min(self.most, 2 * self.length)))
                self.storage = (_extend(self.keys, old, size), _extend(self.values, old, size))
            for stored, states in zip(self.storage, (key_states, value_states), strict=True):
                stored[..., old : self.length, :] = states
            self.keys, self.values = (stored[..., :show, :] for stored in self.storage)
            self.shown = self.keys
            return self.keys, self.values

        def _rounded(self, length: int) -> int:
            return -(-length // self.step) * self.step

    return PreallocatedLayer


def _extend(states: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """The first `length` states in a larger tensor, with zeros after them: what is masked must not be NaN."""
    extended = states.new_zeros((*states.shape[:-2], size, states.shape[-1]))
    extended[..., :length, :] = states[..., :length, :]
    return extended


_AHEAD = 64
"""So many random numbers are made at a time for each row."""
_SPARE = 8
"""Rows leave a batch once one in so many is finished: to copy the cache costs about as much as a token's pass."""


@dataclass
class DecodingStats:
    """What an engine has done so far, in numbers: how often it called the model, and for how much.

    >>> DecodingStats().steps
    0
    """

    prompts: int = 0
    """Prompts run through the model, each once for all of its samples in a batch."""
    prompt_tokens: int = 0
    steps: int = 0
    """Calls of the model, for prompts and for single tokens."""
    rows: int = 0
    """Rows of all calls for single tokens, finished ones among them."""
    tokens: int = 0
    """Tokens sampled."""
    splits: int = 0
    """Batches that failed, for memory or otherwise, and were tried again in halves."""


@dataclass(eq=False, kw_only=True)
class DecodingRow:
    """One sample on its way: `ids`, `logprobs` and `versions` of the response as far as it got.

    `limit`: how many tokens it may have when this call is over; `preallocate`: how many the model has positions for.
    `suppress` is never sampled; `ends` (the model's own)
    and `stop_ids` (asked for) end it, and so do `texts`.
    """

    request: Request
    k: int
    run_id: str
    prepared: PreparedPrompt
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    kind: LogprobsKind | None
    limit: int
    room: int
    suppress: tuple[int, ...]
    ends: frozenset[int]
    stop_ids: frozenset[int]
    texts: StopTexts | None

    @property
    def place(self) -> int:
        """Its place among the call's results."""
        return self.request.position + self.k

    @property
    def tokens(self) -> list[int]:
        """All that it has, prompt and response."""
        return [*self.prepared.ids, *self.ids]

    @property
    def longest(self) -> int:
        """How many tokens it may come to have."""
        return len(self.prepared.ids) + self.limit

    @cached_property
    def shape(self) -> Any:
        """Of media: the samples of a batch have theirs in one tensor for each name."""
        media = self.prepared.media
        if not media:
            return None
        return {name: (value.dtype, value.shape[1:]) for name, value in media.items() if name not in BY_TOKEN}

    def rule(self, vocabulary: int) -> Rule:
        """How its next token is chosen."""
        sampling = self.request.sampling
        hot = sampling.first_temperature if not self.ids else None
        early = sorted(self.ends | self.stop_ids) if len(self.ids) < sampling.min_tokens else []
        return Rule(
            temperature=sampling.temperature if hot is None else hot,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            forbidden=tuple(token for token in self.suppress if token < vocabulary),
            early=tuple(token for token in early if token < vocabulary),
            kind=self.kind or "processed",
        )

    def ended(self) -> Finished | None:
        """Whether its last token is the end of it, and why."""
        token, sampling = self.ids[-1], self.request.sampling
        if token in self.stop_ids:
            return self, "stop", token
        if token in self.ends:
            return self, "stop", None
        if self.texts is not None and len(self.ids) >= sampling.min_tokens:
            try:
                text = self.texts.completed(self.ids)
            except Exception as error:  # a decoder's failure is this row's own
                return self, "error", error
            if text is not None:
                return self, "stop", text
        if len(self.ids) >= self.limit:
            pause = self.request.done + self.request.budget
            return self, "abort" if self.request.pauses and self.limit == pause < self.room else "length", None
        return None

    def due(self) -> int:
        """How many tokens from now its rule changes, or it has as many as it may have."""
        sampling, count = self.request.sampling, len(self.ids)
        turns = [self.limit - count]
        if sampling.first_temperature is not None and not count:
            turns.append(1)
        if sampling.min_tokens > count:
            turns.append(sampling.min_tokens - count)
        return min(turns)


Finished = tuple[DecodingRow, FinishReason, str | int | Exception | None]


class ModelRunner:
    """How a model is called: what its `forward` takes, where its inputs go, how far its ids and positions reach.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> runner = ModelRunner(GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=16, n_embd=4, n_layer=1, n_head=1)))
    >>> runner.vocabulary, runner.positions, runner.suppressed
    (9, 16, ())
    """

    def __init__(self, model: Any, device: torch.device | str | None = None) -> None:
        self.model = model
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.config = model.config
        self.stats = DecodingStats()
        self._device = torch.device(device) if device is not None else None
        parameters = inspect.signature(self.base.forward).parameters
        self.takes = frozenset(parameters)
        if "past_key_values" not in self.takes or getattr(self.base, "_is_stateful", False):
            state_argument = next((name for name in ("cache_params", "state") if name in self.takes), "itself")
            raise ValueError(
                f"model: got {type(self.base).__name__}, which keeps what it has read in {state_argument}, expected a "
                "model that takes past_key_values"
            )
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.rope = next((m.get_rope_index for m in self.base.modules() if hasattr(m, "get_rope_index")), None)
        """Gives the positions in space of a prompt with media, where the model has such."""
        text = self.config.get_text_config(decoder=True) if hasattr(self.config, "get_text_config") else self.config
        self.positions: int | None = getattr(text, "max_position_embeddings", None)
        self.vocabulary = int(self.base.get_input_embeddings().weight.shape[0])
        self.suppressed = tuple(sorted(set(placeholders(self.config).values())))
        """Placeholders of media: a sampled one would break the next forward pass."""
        sdpa = getattr(text, "_attn_implementation", None) in ("sdpa", VARLEN)  # which is SDPA beside a cache
        self.stride = 64 if sdpa and self.device.type == "cuda" else 1
        """Keys and values beside a mask come in multiples of so many tokens: see `rollbook.rollout.decoding`."""
        self.padding = next(i for i in range(self.vocabulary) if i not in self.suppressed)

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        if self._device is not None:
            return self._device
        place: torch.device = self.base.get_input_embeddings().weight.device
        return place

    def logits(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: Any, media: dict[str, Any]
    ) -> torch.Tensor:
        """One call: the logits after the last of ids (rows, tokens), (rows, V); the cache grows by the tokens."""
        inputs: dict[str, Any] = {"input_ids": ids, "past_key_values": cache, "use_cache": True, **media}
        if mask is not None:
            inputs["attention_mask"] = mask
        if "position_ids" in self.takes:
            inputs["position_ids"] = positions
        if "logits_to_keep" in self.takes:
            inputs["logits_to_keep"] = 1
        self.stats.steps += 1
        logits: torch.Tensor = self.model(**inputs, return_dict=True).logits
        return logits[:, -1]

    def media(self, rows: list[DecodingRow], width: int) -> dict[str, torch.Tensor]:
        """The media of all rows under the model's names: end to end, or by token and padded as the tokens are."""
        names = {name: None for row in rows for name in row.prepared.media or ()}
        inputs: dict[str, torch.Tensor] = {}
        for name in names:
            if name not in self.takes and (name in BY_TOKEN or not self.takes_any):
                continue
            parts = [(i, (row.prepared.media or {}).get(name)) for i, row in enumerate(rows)]
            present = [(i, part) for i, part in parts if part is not None]
            if name in BY_TOKEN:
                values = torch.zeros((len(rows), width), dtype=present[0][1].dtype)
                for i, part in present:
                    start = width - len(rows[i].prepared.ids) - len(rows[i].ids)
                    values[i, start : start + part.numel()] = part.reshape(-1)
            else:
                values = torch.cat([part for _, part in present])
                if values.dtype.is_floating_point:
                    values = values.to(self.base.dtype)
            inputs[name] = values.to(self.device)
        return inputs

    def places(self, rows: list[DecodingRow], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of left-padded rows, (rows, width), or in space, (3, rows, width); and the next of each [rows]."""
        rope = self.rope
        positions = torch.zeros((3, len(rows), width), dtype=torch.int64)
        following = []
        for i, row in enumerate(rows):
            ids = row.tokens
            row_positions, after = torch.arange(len(ids)).expand(3, -1), len(ids)
            # Where text goes on after a video is the model's to say, and not one past the largest position: a token of
            # text is put behind, so that sampling and training agree.
            if rope is not None and row.prepared.media:
                parameters = inspect.signature(rope).parameters
                longer = [*ids, self.padding]
                rope_inputs: dict[str, Any] = {"attention_mask": torch.ones((1, len(longer)), dtype=torch.int64)}
                for name, value in row.prepared.media.items():
                    rope_inputs[name] = value.cpu()
                    if name in BY_TOKEN:  # of the prompt: the response is text
                        rope_inputs[name] = torch.zeros((1, len(longer)), dtype=value.dtype)
                        rope_inputs[name][0, : value.numel()] = value.reshape(-1)
                rope_inputs = {name: value for name, value in rope_inputs.items() if name in parameters}
                row_positions = rope(input_ids=torch.tensor([longer]), **rope_inputs)[0].reshape(3, -1)
                after, row_positions = int(row_positions[0, -1]), row_positions[:, :-1]
            positions[:, i, width - len(ids) :] = row_positions
            following.append(after)
        return (positions if rope is not None else positions[0]), torch.tensor(following)


class DecodingBatch:
    """Rows that are decoded together; `version` is asked for the policy's number at each token.

    A prompt is run through the model once for all of its rows that have no token yet; then its cache is repeated.
    Rows get their tokens many at a time, as lists are slow; those that are finished, or given back, have all of them.
    """

    def __init__(self, runner: ModelRunner, rows: list[DecodingRow], version: Callable[[], int]) -> None:
        self.runner = runner
        self.version = version
        self.cache: Any = None
        lengths = {len(row.prepared.ids) + len(row.ids) for row in rows}
        self.padded = len(lengths) > 1 or "position_ids" not in runner.takes
        """Whether there is a mask. Without padding there is nothing to hide, and attention is faster."""
        self.stride = runner.stride if self.padded else 1
        self._reset(rows)

    def _reset(self, rows: list[DecodingRow]) -> None:
        self.rows = rows
        self.alive = np.ones(len(rows), bool)
        self.waiting: list[tuple[np.ndarray, np.ndarray, int]] = []
        self.given = [0] * len(rows)
        """How many of the waiting tokens each row has."""
        self.count = len(rows)
        """How many of them are not finished."""
        stops = {token for row in rows for token in row.ends | row.stop_ids}
        self.stops = np.zeros(max(self.runner.vocabulary, *stops, 0) + 1, bool)
        """By token, whether it is the end of some row."""
        self.stops[list(stops)] = True
        self.rules: Rules | None = None
        self.numbers: torch.Tensor | None = None
        self.column = 0
        self.due = 0
        self.watched: list[tuple[StopTexts, np.ndarray]] = []

    @property
    def unfinished(self) -> list[DecodingRow]:
        """The rows that are to go on."""
        self._flush()
        return [self.rows[i] for i in self.alive.nonzero()[0]]

    def step(self) -> list[Finished]:
        """A token for each row: those that are finished with it, and why."""
        version = self.version()
        logits = self._prompts() if self.cache is None else self._next()
        vocabulary = logits.shape[1]
        if self.rules is None:
            self._flush()
            # An output layer may be wider than the tokens that the model takes.
            self.stops = np.append(self.stops, np.zeros(max(0, vocabulary - len(self.stops)), bool))
            self.rules = Rules([row.rule(vocabulary) for row in self.rows], vocabulary, logits.device)
        chosen = choose_tokens(logits, self.rules, self._random(self.rules, logits.device))
        # One transfer for both, bit by bit.
        ids, bits = torch.stack([chosen.ids, chosen.logprobs.double().view(torch.int64)]).cpu().numpy()
        logprobs = bits.view(np.float64)
        self.last = chosen.ids
        self.runner.stats.tokens += self.count
        self.waiting.append((ids, logprobs, version))
        return self._finished(ids, np.isnan(logprobs))

    def _finished(self, ids: np.ndarray, broken: np.ndarray) -> list[Finished]:
        """The rows that their last tokens end; only those are looked at that may be."""
        maybe = broken | self.stops[ids]
        for texts, those in self.watched:
            try:
                maybe[those] |= texts.may_end(ids[those])
            except Exception:  # a decoder's failure: each row finds out about its own
                maybe[those] = True
        turn = len(self.waiting) == self.due
        looked_at = self.alive & (maybe | turn)
        self._flush_rows((looked_at & broken).nonzero()[0], len(self.waiting) - 1)
        self._flush_rows((looked_at & ~broken).nonzero()[0], len(self.waiting))
        finished: list[Finished] = []
        for i in looked_at.nonzero()[0].tolist():
            row = self.rows[i]
            error = ValueError(f"token {len(row.ids)}: the model's logits are NaN, infinite or all forbidden")
            end: Finished | None = (row, "error", error) if broken[i] else row.ended()
            if end is not None:
                finished.append(end)
                self.alive[i] = False
                self.count -= 1
        if turn:
            self.rules = None
        return finished

    def _flush_rows(self, those: np.ndarray, count: int) -> None:
        """Let some rows have the first `count` tokens that wait, as far as they have not yet."""
        first = min((self.given[i] for i in those), default=count)
        if first == count:
            return
        ids, logprobs, versions = zip(*self.waiting[first:count], strict=True)
        some_ids, some_logprobs = (np.stack([entries[those] for entries in column], 1) for column in (ids, logprobs))
        for j, i in enumerate(those.tolist()):
            row, start = self.rows[i], self.given[i] - first
            row.ids.extend(some_ids[j, start:].tolist())
            row.versions.extend(versions[start:])
            if row.kind is not None:
                row.logprobs.extend(some_logprobs[j, start:].tolist())
            self.given[i] = count

    def _flush(self) -> None:
        """Let all rows have what waits, and look ahead."""
        live = self.alive.nonzero()[0]
        self._flush_rows(live, len(self.waiting))
        self.waiting = []
        self.given = [0] * len(self.rows)
        watched: dict[StopTexts, list[int]] = {}
        for i in live.tolist():
            texts = self.rows[i].texts
            if texts is not None:
                watched.setdefault(texts, []).append(i)
        self.watched = [(texts, np.array(rows)) for texts, rows in watched.items()]
        self.due = min((self.rows[i].due() for i in live.tolist()), default=0)

    def _random(self, rules: Rules, device: torch.device) -> torch.Tensor | None:
        """The next number of each row's stream."""
        if rules.all_greedy:
            self.numbers = None
            return None
        if self.numbers is None or self.column == self.numbers.shape[1]:
            self._flush()
            seeds = [row.request.seeds[row.k] for row in self.rows]
            numbers = uniform_numbers(seeds, [len(row.ids) for row in self.rows], _AHEAD)
            self.numbers, self.column = torch.from_numpy(numbers).to(device), 0
        self.column += 1
        return self.numbers[:, self.column - 1]

    def _prompts(self) -> torch.Tensor:
        """Run all prompts, and repeat their caches for their rows; the next token's logits (rows, V)."""
        from transformers import DynamicCache

        runner = self.runner
        places: dict[Any, int] = {}
        which: list[int] = []
        unlike: list[DecodingRow] = []
        for row in self.rows:
            key = id(row) if row.ids else id(row.prepared)
            if key not in places:
                places[key] = len(unlike)
                unlike.append(row)
            which.append(places[key])
        lengths = [len(row.tokens) for row in unlike]
        width, device = max(lengths), runner.device
        self.width = width
        ids = [[runner.padding] * (width - len(row.tokens)) + row.tokens for row in unlike]
        positions, following = runner.places(unlike, width)
        media = runner.media(unlike, width)
        mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
        self.mask = mask.to(device) if self.padded else None
        self.cache = preallocate(DynamicCache(config=runner.config), max(row.longest for row in self.rows), self.stride)
        logits = runner.logits(torch.tensor(ids).to(device), self.mask, positions.to(device), self.cache, media)
        runner.stats.prompts += len(unlike)
        runner.stats.prompt_tokens += sum(lengths)
        self.position = following.to(device)
        if len(which) != len(unlike):
            rows = torch.tensor(which, device=device)
            self._select(rows)
            logits = logits[rows.to(logits.device)]
        return logits

    def _next(self) -> torch.Tensor:
        """The logits after the last token, (rows, V)."""
        runner = self.runner
        spare = len(self.rows) - self.count
        if spare >= max(1, len(self.rows) // _SPARE):
            self._drop()
            spare = 0
        self.width += 1
        width = -(-self.width // self.stride) * self.stride  # what is beyond is hidden, as it is ahead of the token
        if self.mask is not None and self.mask.shape[1] < width:
            more = width + _AHEAD - self.mask.shape[1]
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), more)], 1)
        positions = self.position[:, None]
        if runner.rope is not None:
            positions = positions.expand(3, -1, -1)
        mask = None if self.mask is None else self.mask[:, :width]
        logits = runner.logits(self.last.to(runner.device)[:, None], mask, positions, self.cache, {})
        runner.stats.rows += len(self.rows)
        self.position += 1
        if spare and runner.positions is not None:
            self.position.clamp_(max=runner.positions - 1)  # of rows that are finished
        return logits

    def _drop(self) -> None:
        """Let finished rows go."""
        alive = torch.from_numpy(self.alive.nonzero()[0]).to(self.position.device)
        self._select(alive)
        self.last = self.last[alive.to(self.last.device)]
        self._reset(self.unfinished)

    def _select(self, those: torch.Tensor) -> None:
        self.cache.reorder_cache(those)  # which every kind of layer has: attention, sliding, linear
        self.position = self.position[those]
        if self.mask is not None:
            self.mask = self.mask[those]
