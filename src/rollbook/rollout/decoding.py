"""Batched decoding with a key-value cache: stop conditions, token selection, the cache, rows and batches.

Invariant: a step that raises leaves every row unchanged. A row's tokens depend on its logits, its sampling options and
its random stream, not on the other rows (up to the rounding of logits). A token of probability 0 is never sampled.

Sampling options apply in this order: forbidden tokens get probability 0, then temperature, top-k, top-p over what top-k
left, and min-p relative to the most likely token. A truncation keeps all tokens that are as likely as the least
likely one it keeps, so that equal logits (common with 16 bits) do not depend on the sort order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    from transformers import DynamicCache, PreTrainedModel

    from rollbook.rollout.transformers import PreparedPrompt

Decode = Callable[[Sequence[int]], str]


class StopTexts:
    """Stop texts of a request, found in the decoded response. Rows of a call with the same texts share one object.

    Most tokens cannot end a stop text because they do not contain its last character. For the others a window of the
    last tokens is decoded, and the whole response only if the window contains a stop text.

    Args:
        texts: The stop texts.
        decode: Decodes token ids.

    >>> letters = "abc|"
    >>> stops = StopTexts(["|b", "cc"], lambda ids: "".join(letters[i] for i in ids))
    >>> stops.completed([0, 3]), stops.completed([0, 3, 1]), stops.completed([3, 1, 0])
    (None, '|b', None)
    """

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        self.texts = tuple(texts)
        self._decode = decode
        self._longest = max(map(len, self.texts), default=0)
        self._last_characters = frozenset(text[-1] for text in self.texts)
        # A part of a character decodes to U+FFFD. ASCII characters are never split.
        self._may_split_characters = not all(last.isascii() for last in self._last_characters)
        self._end_window = np.full(1024, -1)
        """By token, the characters from the end within which a stop text may end; 0 if it cannot, -1 if not known."""

    def may_end(self, tokens: np.ndarray) -> np.ndarray:
        """Return for each token whether a stop text may end in it.

        Args:
            tokens: [n] Token ids.

        Returns:
            [n] Booleans.
        """
        if tokens.size and tokens.max() >= len(self._end_window):
            self._end_window = np.append(self._end_window, np.full(int(tokens.max()) + 1, -1))
        reach: np.ndarray = self._end_window[tokens]
        for i in (reach < 0).nonzero()[0].tolist():
            token = int(tokens[i])
            # Twice, since some decoders drop a leading space.
            text = self._decode([token, token])
            possible = self._last_characters & set(text) or (
                self._may_split_characters and "\N{REPLACEMENT CHARACTER}" in text
            )
            reach[i] = self._end_window[token] = len(text) + 8 if possible else 0
        candidates: np.ndarray = reach > 0
        return candidates

    def completed(self, ids: Sequence[int]) -> str | None:
        """Return the stop text that the last token completes; of several, the first in the text.

        Args:
            ids: [R] The response so far.

        Returns:
            The stop text, or `None`.
        """
        if not self.may_end(np.array(ids[-1:]))[0]:
            return None
        reach = int(self._end_window[ids[-1]])
        size = 2 * self._longest + 8
        window = self._decode(ids[-size:])
        # A window may begin in the middle of a character, and its tokens may have little text.
        while len(window) < self._longest + reach and size < len(ids):
            size *= 2
            window = self._decode(ids[-size:])
        if not any(text in window for text in self.texts):
            return None
        matches = [
            (start, -len(text), text) for text in self.texts if (start := find_stop_start(text, ids, self._decode)) >= 0
        ]
        return min(matches)[2] if matches else None


def find_stop_start(text: str, ids: Sequence[int], decode: Decode) -> int:
    """Return the start of the occurrence of `text` that the last token completes.

    Args:
        text: The stop text.
        ids: [R] The response so far.
        decode: Decodes token ids.

    Returns:
        Index in the decoded response, or -1.

    >>> find_stop_start("aa", [0, 0, 0], lambda ids: "a" * len(ids))
    1
    """
    response = decode(ids)
    # The text before the last token may differ in its last characters: a split character, or a space that is joined.
    earlier = decode(ids[:-1])
    prefix = next((i for i, (a, b) in enumerate(zip(earlier, response, strict=False)) if a != b), len(earlier))
    return response.find(text, max(0, prefix - len(text) + 1))


COLD_TEMPERATURE = 0.5
"""Below it, the largest logit is subtracted before logits are divided by the temperature."""
MIN_TEMPERATURE = 1e-30
"""Lower temperatures count as 0: logits divided by them would overflow."""
NUCLEUS_SIZE = 1024
"""Number of tokens that are sorted for top-p. Rows with a wider nucleus are sorted completely."""

_STEP, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniform_numbers(seeds: Sequence[int], starts: Sequence[int], count: int) -> np.ndarray:
    """Generate uniform random numbers in [0, 1), multiples of 2^-52, from one stream per row.

    A number depends on its stream's seed and its index alone (SplitMix64), so a stream can be continued anywhere.

    Args:
        seeds: [rows] Seeds of the streams.
        starts: [rows] Index of the first number in each stream.
        count: Numbers per row.

    Returns:
        [rows, count] Entry (i, j) is number `starts[i] + j` of stream `seeds[i]`.

    >>> numbers = uniform_numbers([7], [0], 5)
    >>> bool((uniform_numbers([9, 7], [0, 3], 2)[1] == numbers[0, 3:]).all())
    True
    """
    index = np.asarray(starts, np.uint64)[:, None] + np.arange(1, count + 1, dtype=np.uint64)
    seed = (np.array(seeds, object) % 2**64).astype(np.uint64)[:, None]
    bits = _mix(_mix(seed + _STEP) + index * _STEP) >> np.uint64(12)
    uniforms: np.ndarray = bits * 2.0**-52
    return uniforms


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    z ^= z >> np.uint64(31)
    return z


@dataclass(frozen=True, kw_only=True)
class TokenRule:
    """How the next token of a row is chosen, and which log-prob is recorded.

    >>> TokenRule(temperature=0.0).greedy
    True
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    forbidden: tuple[int, ...] = ()
    """Tokens that are never sampled."""
    forbidden_until_min_tokens: tuple[int, ...] = ()
    """Tokens that are not sampled yet: ends, before the response has `min_tokens`."""
    logprobs_kind: LogprobsKind = "processed"

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < MIN_TEMPERATURE


class BatchRules:
    """The rules of all rows as tensors on the device of the logits, built once for many steps.

    >>> rules = BatchRules([TokenRule(temperature=0.5), TokenRule(temperature=0.0)], 100, "cpu")
    >>> rules.temperature, rules.greedy
    (tensor([0.5000, 1.0000]), tensor([False,  True]))
    """

    def __init__(self, rules: Sequence[TokenRule], vocabulary: int, device: torch.device | str) -> None:
        greedy: list[bool] = []
        temperatures: list[float] = []
        kinds: list[LogprobsKind] = []
        suppressed: list[tuple[int, int]] = []  # (row, token)
        forbidden_ends: list[tuple[int, int]] = []
        truncated: list[int] = []  # rows with top-k, top-p or min-p, and their options
        top_ks: list[int] = []
        top_ps: list[float] = []
        min_ps: list[float] = []
        for i, rule in enumerate(rules):
            is_greedy = rule.greedy
            greedy.append(is_greedy)
            temperatures.append(1.0 if is_greedy else float(rule.temperature))
            kinds.append(rule.logprobs_kind)
            suppressed += [(i, token) for token in rule.forbidden if token < vocabulary]
            ends = rule.forbidden_until_min_tokens
            forbidden_ends += [(i, token) for token in ends if token < vocabulary]
            if not is_greedy and (rule.top_k > 0 or rule.top_p < 1 or rule.min_p > 0):
                truncated.append(i)
                top_ks.append(rule.top_k if 0 < rule.top_k < vocabulary else vocabulary)
                top_ps.append(rule.top_p)
                min_ps.append(rule.min_p)

        self.blocks = Blocks(len(rules), vocabulary, device)
        self.all_greedy = all(greedy)
        self.greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self.temperature = torch.tensor(temperatures, device=device)
        self.has_temperature = set(temperatures) != {1.0}
        self.is_cold = min(temperatures) < COLD_TEMPERATURE
        """Whether logits divided by a temperature would lose precision."""

        row_kinds = np.array(kinds)
        self.common_kind: LogprobsKind | None = kinds[0] if len(set(kinds)) == 1 else None
        """The kind of log-probs of all rows, or `None` if there are several."""
        self.kinds: dict[LogprobsKind, torch.Tensor] = {}
        for kind in set(kinds):
            self.kinds[kind] = torch.from_numpy(row_kinds == kind).to(device)

        self.neg_inf = torch.tensor([-torch.inf], device=device)
        self.suppressed = torch.tensor(suppressed, device=device).unbind(1) if suppressed else None
        """Indices (rows, tokens) of tokens that are never sampled."""
        forbidden = suppressed + forbidden_ends
        self.forbidden = torch.tensor(forbidden, device=device).unbind(1) if forbidden else None
        """Indices (rows, tokens) of tokens that are not sampled now."""

        self.truncates = bool(truncated)
        self.truncated = None if len(truncated) == len(rules) else torch.tensor(truncated, device=device)
        """Rows with a truncated distribution; `None` if all rows have one."""
        limited = np.array(top_ks) < vocabulary
        self.max_top_k = int(np.max(top_ks, where=limited, initial=0)) if truncated else 0
        self.top_k = torch.tensor(top_ks, device=device) if self.max_top_k else None
        self.top_p = torch.tensor(top_ps, device=device).double() if min(top_ps, default=1.0) < 1 else None
        self.min_p = torch.tensor(min_ps, device=device) if max(min_ps, default=0.0) > 0 else None

    def forbid(self, scores: torch.Tensor) -> torch.Tensor:
        """Exclude the tokens that are not sampled now, in place.

        Args:
            scores: [rows, V] Scores in float32.

        Returns:
            The scores.
        """
        return scores if self.forbidden is None else scores.index_put_(self.forbidden, self.neg_inf)

    def suppress(self, logits: torch.Tensor) -> torch.Tensor:
        """Exclude the tokens that are never sampled.

        Args:
            logits: [rows, V]

        Returns:
            [rows, V] A copy in float32, or the logits themselves if all tokens are allowed.
        """
        if self.suppressed is None:
            return logits
        return logits.to(torch.float32, copy=True).index_put_(self.suppressed, self.neg_inf)

    def truncate(self, probs: torch.Tensor) -> torch.Tensor:
        """Set the probabilities of tokens outside top-k, top-p and min-p to 0, in place.

        Args:
            probs: [rows, V]

        Returns:
            The probabilities.
        """
        return probs.masked_fill_(probs < _truncation_floors(probs, self), 0.0)


class TokenChoice(NamedTuple):
    """The next token of each row and its log-prob.

    >>> TokenChoice(torch.tensor([3]), torch.tensor([-0.5])).ids.tolist()
    [3]
    """

    ids: torch.Tensor
    """[rows] int64."""
    logprobs: torch.Tensor
    """[rows] float32; NaN if no token could be chosen."""


def choose_tokens(logits: torch.Tensor, rules: BatchRules, uniforms: torch.Tensor | None = None) -> TokenChoice:
    """Choose the next token of each row.

    The `raw` log-prob of a greedy token is the model's; the `processed` and `tempered` ones are 0, since there was no
    other choice.

    Args:
        logits: [rows, V]
        rules: The rules of the rows.
        uniforms: [rows] Uniform random numbers, float64. May be `None` if all rows are greedy.

    Returns:
        The tokens. A row whose logits are NaN, infinite or all forbidden has log-prob NaN.

    Raises:
        ValueError: The shape of the logits is not that of the rules, or random numbers are missing.

    >>> logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    >>> rules = [TokenRule(top_k=1), TokenRule(temperature=0.0, forbidden=(1,), logprobs_kind="raw")]
    >>> choose_tokens(logits, BatchRules(rules, 3, "cpu"), torch.tensor([0.9, 0.0], dtype=torch.float64))
    TokenChoice(ids=tensor([1, 2]), logprobs=tensor([ 0.0000, -2.1698]))
    """
    rows, vocabulary = logits.shape
    if vocabulary != rules.blocks.vocabulary or rows != len(rules.temperature):
        raise ValueError(f"logits: got {rows, vocabulary}, expected {len(rules.temperature), rules.blocks.vocabulary}")
    scores = logits
    if rules.has_temperature or rules.forbidden is not None:
        scores = logits.to(torch.float32, copy=True)
        if rules.is_cold:
            scores.sub_(scores.amax(-1, keepdim=True))
        if rules.has_temperature:
            scores.div_(rules.temperature[:, None])
        rules.forbid(scores)
    best = scores.argmax(-1, keepdim=True) if rules.greedy is not None else None
    if best is not None and rules.all_greedy:
        ids, processed = best, torch.zeros_like(rules.temperature)
        chosen_score = scores.gather(1, best)[:, 0]
    else:
        if uniforms is None:
            raise ValueError("uniforms: missing, expected a random number for each row that is not greedy")
        probs = scores.softmax(-1, dtype=torch.float32)
        if rules.truncates:
            rules.truncate(probs)
        ids, total = sample_by_inverse_cdf(probs, uniforms[:, None], rules.blocks)
        prob = probs.gather(1, ids)
        if rules.truncates:
            prob = (prob / total).float()
        chosen_score = processed = prob[:, 0].log()
        if best is not None and rules.greedy is not None:
            ids, processed = torch.where(rules.greedy[:, None], best, ids), processed.masked_fill(rules.greedy, 0.0)
    if rules.common_kind == "processed" and best is None:
        return TokenChoice(ids[:, 0], processed)
    logprobs = processed
    for kind, has_kind in rules.kinds.items():
        kind_logprobs = _model_logprobs(kind, logits, ids[:, 0], rules) if kind != "processed" else processed
        logprobs = kind_logprobs if rules.common_kind is not None else torch.where(has_kind, kind_logprobs, logprobs)
    # The score is not finite if no token could be chosen: the difference is NaN then, else 0.
    return TokenChoice(ids[:, 0], logprobs + (chosen_score - chosen_score))


def _model_logprobs(kind: str, logits: torch.Tensor, ids: torch.Tensor, rules: BatchRules) -> torch.Tensor:
    """Compute log-probs [rows] before truncation; `tempered` ones without the suppressed tokens, as in training."""
    if kind == "tempered":
        logits = rules.suppress(logits)
    if kind == "raw" or not rules.has_temperature:
        logprobs = from_logits(logits, ids).logprobs
    else:
        logprobs = from_logits(logits, ids, temperature=rules.temperature).logprobs
    return logprobs if kind == "raw" or rules.greedy is None else logprobs.masked_fill(rules.greedy, 0.0)


class Blocks:
    """Division of a vocabulary into about as many blocks as each block has tokens, for `sample_by_inverse_cdf`.

    >>> Blocks(2, 151936, "cpu").size, Blocks(2, 50257, "cpu").size
    (128, 256)
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        # A power of two of suitable size that divides the vocabulary saves a few operations.
        divisor = vocabulary & -vocabulary
        self.size = divisor if 64 <= divisor <= 1024 else 1 << isqrt(max(vocabulary - 1, 0)).bit_length()
        self.vocabulary = vocabulary
        self.last_start = vocabulary - vocabulary % self.size
        """Start of the last block if it is shorter than the others."""
        self.zero = torch.zeros((rows, 1), device=device)
        self.steps = torch.arange(self.size, device=device)


def sample_by_inverse_cdf(
    probs: torch.Tensor, uniforms: torch.Tensor, blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens by the inverse of the distribution function, in float64.

    Finds the block of tokens in which the cumulative sum passes `uniform * total`, then the token in the block: one
    pass over the vocabulary. A token of probability 0 is never picked, since the sum does not grow there. The sum
    within a block is rounded differently and may stay below the target; then the last token of nonzero probability is
    picked.

    Args:
        probs: [rows, V] Unnormalized probabilities.
        uniforms: [rows, 1] Multiples of 2^-52 below 1.
        blocks: Division of the vocabulary.

    Returns:
        Token ids [rows, 1] and sums of the probabilities [rows, 1].

    >>> probs = torch.tensor([[0.0, 1.0, 3.0, 0.0]] * 3)
    >>> uniforms = torch.tensor([[0.0], [0.25], [0.999]], dtype=torch.float64)
    >>> sample_by_inverse_cdf(probs, uniforms, Blocks(3, 4, "cpu"))[0][:, 0]
    tensor([1, 2, 2])
    """
    block_sums = [blocks.zero, probs[:, : blocks.last_start].view(len(probs), -1, blocks.size).sum(-1)]
    has_short_block = blocks.last_start < blocks.vocabulary
    if has_short_block:
        block_sums.append(probs[:, blocks.last_start :].sum(-1, keepdim=True))
    sums = torch.cat(block_sums, 1).double().cumsum(-1)
    target = uniforms * sums[:, -1:]
    # The first sum is 0 and never past the target. The bounds are for NaN.
    block = torch.searchsorted(sums, target, right=True).clamp_(1, sums.shape[1] - 1) - 1
    columns = torch.add(blocks.steps, block, alpha=blocks.size)
    block_probs = probs.gather(1, columns.clamp(max=blocks.vocabulary - 1) if has_short_block else columns)
    if has_short_block:
        block_probs.masked_fill_(columns >= blocks.vocabulary, 0.0)
    sums_in_block = block_probs.double().cumsum(-1)
    index = torch.searchsorted(sums_in_block, target - sums.gather(1, block), right=True)
    last = sums_in_block.argmax(-1, keepdim=True)  # the first maximum: where the sum stops growing
    return torch.add(torch.minimum(index, last), block, alpha=blocks.size), sums[:, -1:]


def _truncation_floors(probs: torch.Tensor, rules: BatchRules) -> torch.Tensor:
    """Return the smallest probability that each row keeps, [rows, 1]."""
    truncated = probs if rules.truncated is None else probs[rules.truncated]
    floor = truncated.new_zeros((len(truncated), 1))
    if rules.min_p is not None:
        floor = truncated.amax(-1, keepdim=True) * rules.min_p[:, None]
    total: torch.Tensor | float = 1.0
    if rules.top_k is not None:
        best = truncated.topk(rules.max_top_k, sorted=True).values
        last = best.gather(1, rules.top_k.clamp(max=rules.max_top_k)[:, None] - 1)
        last = last.masked_fill((rules.top_k > rules.max_top_k)[:, None], 0.0)
        floor = torch.maximum(floor, last)
        if rules.top_p is not None:
            total = truncated.masked_fill(truncated < last, 0.0).sum(-1, keepdim=True)
    if rules.top_p is not None:
        floor = torch.maximum(floor, _nucleus_floors(truncated, rules.top_p[:, None], total))
    if rules.truncated is None:
        return floor
    return probs.new_zeros((len(probs), 1)).index_copy_(0, rules.truncated, floor)


def _nucleus_floors(probs: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor | float) -> torch.Tensor:
    """Return the largest p [rows, 1] such that the probabilities >= p sum to at least `top_p * total`."""
    size = min(NUCLEUS_SIZE, probs.shape[1])
    best = probs.topk(size, sorted=True).values
    target = top_p * total
    mass = best.double().cumsum(-1)
    floor = best.gather(1, (mass < target).sum(-1, keepdim=True).clamp_(max=size - 1))
    floor = floor.masked_fill(top_p >= 1, 0.0)
    if size < probs.shape[1]:
        wide = ((mass[:, -1:] < target) & (top_p < 1)).nonzero()[:, 0]  # synchronizes with the device
        if len(wide):
            best = probs[wide].sort(-1, descending=True).values
            mass = best.double().cumsum(-1)
            floor[wide] = best.gather(1, (mass < target[wide]).sum(-1, keepdim=True).clamp_(max=best.shape[1] - 1))
    return floor


def preallocate(cache: DynamicCache, max_tokens: int, step: int = 1) -> DynamicCache:
    """Let the plain attention layers of an empty cache grow in place.

    Layers of other kinds (sliding windows, linear attention) are unchanged.

    Args:
        cache: The cache, changed in place.
        max_tokens: Largest number of tokens that is expected.
        step: Above 1, keys and values after the first call are padded with zeros to a multiple of it. The model must
            then have a mask, by positions, that hides them.

    Returns:
        The same cache.

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
            cache.layers[i] = _preallocated_layer()(max_tokens, step)
    return cache


@functools.cache
def _preallocated_layer() -> Any:
    """Return the layer class. It is defined on first use, to import transformers late."""
    from transformers.cache_utils import DynamicLayer

    class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
        """Keys and values [rows, heads, tokens, size], which are views of larger tensors."""

        def __init__(self, max_tokens: int, step: int) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.max_tokens, self.step = max_tokens, step
            self.length = 0
            self.storage: list[torch.Tensor] = []
            self.view: torch.Tensor | None = None

        def get_seq_length(self) -> int:
            return self.length

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            new = self.length + query_length
            return (self._rounded(new) if self.length else new), 0

        def reset(self) -> None:
            self.length, self.storage = 0, []
            super().reset()

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            old, self.length = self.length, self.length + key_states.shape[-2]
            if not old or self.keys is None or self.values is None:
                self.keys, self.values = key_states, value_states  # the prompt; its rows may be repeated first
                return self.keys, self.values
            visible = self._rounded(self.length)
            # Selecting rows replaces `keys`; the storage then has the previous rows.
            if not self.storage or self.keys is not self.view or self.storage[0].shape[-2] < visible:
                size = max(visible, self._rounded(min(self.max_tokens, 2 * self.length)))
                self.storage = []
                for states in (self.keys, self.values):
                    # Zeros, since masked values must not be NaN.
                    extended = states.new_zeros((*states.shape[:-2], size, states.shape[-1]))
                    extended[..., :old, :] = states[..., :old, :]
                    self.storage.append(extended)
            keys, values = self.storage
            keys[..., old : self.length, :] = key_states
            values[..., old : self.length, :] = value_states
            self.keys = self.view = keys[..., :visible, :]
            self.values = values[..., :visible, :]
            return self.keys, self.values

        def _rounded(self, length: int) -> int:
            return -(-length // self.step) * self.step

    return PreallocatedLayer


_WINDOW = 64
"""Largest number of tokens that are sampled before rows receive them and their rules are updated."""
_FINISHED_SHARE = 8
"""Finished rows leave when they are 1 / _FINISHED_SHARE of all: copying the cache costs as much as a step."""


@dataclass
class DecodingStats:
    """Counts of the work of an engine.

    >>> DecodingStats().steps
    0
    """

    prompts: int = 0
    """Prompts run through the model, once for all of their samples in a batch."""
    prompt_tokens: int = 0
    steps: int = 0
    """Forward passes, of prompts and of single tokens."""
    rows: int = 0
    """Rows of all forward passes of single tokens, including finished ones."""
    tokens: int = 0
    """Sampled tokens."""
    splits: int = 0
    """Batches that failed and were tried again in halves."""


@dataclass(eq=False, kw_only=True)
class DecodingRow:
    """A sample that is being decoded, with the `ids`, `logprobs` and `versions` of its response so far."""

    request: Request
    k: int
    """Index of the sample in the request."""
    index: int
    """Index of the sample in the call."""
    run_id: str
    prepared: PreparedPrompt
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    logprobs_kind: LogprobsKind | None
    limit: int
    """Largest length of the response in this call of the engine."""
    pauses: bool
    """Whether the limit comes from `pause_after`, so that the sample can be continued."""
    longest: int
    """Largest length of prompt and response in this call."""
    suppress: tuple[int, ...]
    """Token ids that are never sampled."""
    ends: frozenset[int]
    """End tokens of the model."""
    stop_ids: frozenset[int]
    """Stop tokens of the request."""
    texts: StopTexts | None
    """Stop texts of the request."""

    def next_rule(self) -> tuple[TokenRule, int]:
        """Return the rule for the next token, and the number of tokens for which it applies."""
        sampling, count = self.request.sampling, len(self.ids)
        span = self.limit - count
        temperature = sampling.temperature
        forbidden_ends: tuple[int, ...] = ()
        if sampling.first_temperature is not None and not count:
            temperature, span = sampling.first_temperature, min(span, 1)
        if count < sampling.min_tokens:
            forbidden_ends, span = tuple(sorted(self.ends | self.stop_ids)), min(span, sampling.min_tokens - count)
        rule = TokenRule(
            temperature=temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            forbidden=self.suppress,
            forbidden_until_min_tokens=forbidden_ends,
            logprobs_kind=self.logprobs_kind or "processed",
        )
        return rule, span

    def ended(self) -> FinishedRow | None:
        """Return why the last token ends the response, or `None` if it does not."""
        token = self.ids[-1]
        if token in self.stop_ids:
            return FinishedRow(self, "stop", token)
        if token in self.ends:
            return FinishedRow(self, "stop")
        if self.texts is not None and len(self.ids) >= self.request.sampling.min_tokens:
            try:
                text = self.texts.completed(self.ids)
            except Exception as error:  # a failure of the decoder fails this row alone
                return FinishedRow(self, "error", error)
            if text is not None:
                return FinishedRow(self, "stop", text)
        if len(self.ids) >= self.limit:
            return FinishedRow(self, "abort" if self.pauses else "length")
        return None


class FinishedRow(NamedTuple):
    """A row that its last token finished."""

    row: DecodingRow
    reason: FinishReason
    stop: str | int | Exception | None = None
    """The stop text or token that ended the response, or the error."""


class ModelRunner:
    """Calls a transformers model: the arguments of its `forward`, its device, vocabulary and positions.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> runner = ModelRunner(GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=16, n_embd=4, n_layer=1, n_head=1)))
    >>> runner.vocabulary, runner.max_positions, runner.suppressed
    (9, 16, ())
    """

    def __init__(self, model: PreTrainedModel, device: torch.device | str | None = None) -> None:
        self.model = model
        unwrap: Callable[[], Any] = getattr(model, "get_base_model", lambda: model)
        self.base = unwrap()
        """The model without the PEFT wrapper."""
        self.config: Any = model.config
        self.stats = DecodingStats()
        self._device = torch.device(device) if device is not None else None
        parameters = inspect.signature(self.base.forward).parameters
        self.forward_parameters = frozenset(parameters)
        if "past_key_values" not in self.forward_parameters or getattr(self.base, "_is_stateful", False):
            state_argument = next(
                (name for name in ("cache_params", "state") if name in self.forward_parameters), "itself"
            )
            raise ValueError(
                f"model: got {type(self.base).__name__}, which keeps its state in {state_argument}, expected a model "
                "that takes past_key_values"
            )
        self.accepts_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.get_rope_index = next(
            (m.get_rope_index for m in self.base.modules() if hasattr(m, "get_rope_index")), None
        )
        """Computes spatial positions of prompts with media; `None` if the model has none."""
        text = self.config.get_text_config(decoder=True) if hasattr(self.config, "get_text_config") else self.config
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        self.vocabulary = int(self.base.get_input_embeddings().weight.shape[0])
        self.suppressed = tuple(sorted(set(placeholders(self.config).values())))
        """Placeholders of media. Sampling one would break the next forward pass."""
        self._sdpa = getattr(text, "_attn_implementation", None) in ("sdpa", VARLEN)  # which uses SDPA with a cache
        self.padding = next(i for i in range(self.vocabulary) if i not in self.suppressed)

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        device: torch.device = self._device or self.base.get_input_embeddings().weight.device
        return device

    @functools.cached_property
    def stride(self) -> int:
        """With a mask, keys and values are padded to a multiple of this: cuDNN plans its kernels for each length."""
        return 64 if self._sdpa and self.device.type == "cuda" else 1

    def logits(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        cache: DynamicCache,
        media: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Run the model. The cache grows by the tokens.

        Args:
            ids: [rows, T] Token ids.
            mask: [rows, cache length] Attention mask; `None` if all rows have the same length.
            positions: [rows, T] Position ids, or [3, rows, T] spatial ones.
            cache: The cache.
            media: Tensors of the processor under the model's names.

        Returns:
            [rows, V] Logits after the last tokens.
        """
        inputs: dict[str, Any] = {"input_ids": ids, "past_key_values": cache, "use_cache": True, **media}
        if mask is not None:
            inputs["attention_mask"] = mask
        if "position_ids" in self.forward_parameters:
            inputs["position_ids"] = positions
        if "logits_to_keep" in self.forward_parameters:
            inputs["logits_to_keep"] = 1
        self.stats.steps += 1
        logits: torch.Tensor = self.model(**inputs, return_dict=True).logits
        return logits[:, -1]

    def media(self, rows: list[DecodingRow], width: int) -> dict[str, torch.Tensor]:
        """Collate the media of all rows: concatenated, or per token and left-padded.

        Args:
            rows: The rows.
            width: Number of tokens of the padded rows.

        Returns:
            Tensors under the model's names.
        """
        names = {name: None for row in rows for name in row.prepared.media or ()}
        inputs: dict[str, torch.Tensor] = {}
        for name in names:
            if name not in self.forward_parameters and (name in BY_TOKEN or not self.accepts_kwargs):
                continue
            media = [row.prepared.media or {} for row in rows]
            tensors = {i: row_media[name] for i, row_media in enumerate(media) if name in row_media}
            if name in BY_TOKEN:
                values = torch.zeros((len(rows), width), dtype=next(iter(tensors.values())).dtype)
                for i, tensor in tensors.items():
                    start = width - len(rows[i].prepared.ids) - len(rows[i].ids)
                    values[i, start : start + tensor.numel()] = tensor.reshape(-1)
            else:
                values = torch.cat(list(tensors.values()))
                if values.dtype.is_floating_point:
                    values = values.to(self.base.dtype)
            inputs[name] = values.to(self.device)
        return inputs

    def rope_positions(self, rows: list[DecodingRow], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the spatial positions of left-padded rows.

        Args:
            rows: The rows.
            width: Number of tokens of the padded rows.

        Returns:
            [3, rows, width] Positions, and [rows] the positions of the next tokens.
        """
        positions = torch.zeros((3, len(rows), width), dtype=torch.int64)
        next_positions = []
        for i, row in enumerate(rows):
            ids = [*row.prepared.ids, *row.ids]
            row_positions, next_position = torch.arange(len(ids)).expand(3, -1), len(ids)
            # The position of text after a video is not the largest position plus one, and depends on the model. A text
            # token is appended, so that the model computes it as in training.
            if self.get_rope_index is not None and row.prepared.media:
                parameters = inspect.signature(self.get_rope_index).parameters
                longer = [*ids, self.padding]
                inputs: dict[str, Any] = {"attention_mask": torch.ones((1, len(longer)), dtype=torch.int64)}
                for name, tensor in row.prepared.media.items():
                    inputs[name] = tensor.cpu()
                    if name in BY_TOKEN:  # of the prompt; the response is text
                        inputs[name] = torch.zeros((1, len(longer)), dtype=tensor.dtype)
                        inputs[name][0, : tensor.numel()] = tensor.reshape(-1)
                inputs = {name: tensor for name, tensor in inputs.items() if name in parameters}
                row_positions = self.get_rope_index(input_ids=torch.tensor([longer]), **inputs)[0].reshape(3, -1)
                next_position, row_positions = int(row_positions[0, -1]), row_positions[:, :-1]
            positions[:, i, width - len(ids) :] = row_positions
            next_positions.append(next_position)
        return positions, torch.tensor(next_positions)


class DecodingBatch:
    """Rows that are decoded together.

    Each prompt runs through the model once for all of its rows that have no token yet; then its cache is repeated.
    Sampled tokens are buffered in arrays for a window of up to 64 steps, in which the rules of the rows do not change.
    They are appended to a row when it may be finished, and when the window ends.
    """

    def __init__(self, runner: ModelRunner, rows: list[DecodingRow]) -> None:
        self.runner = runner
        self.rows = rows
        self.alive = np.ones(len(rows), bool)
        self.count = len(rows)
        """Number of unfinished rows."""
        self.cache: Any = None
        lengths = {len(row.prepared.ids) + len(row.ids) for row in rows}
        self.padded = len(lengths) > 1 or "position_ids" not in runner.forward_parameters
        """Whether there is a mask. Attention is faster without one."""
        self.stride = runner.stride if self.padded else 1
        self.window = 0
        """Number of steps of the window."""
        self.filled = 0
        """Number of steps of the window that are done."""
        self.ids = np.zeros((len(rows), 0), np.int64)
        self.logprobs = np.zeros((len(rows), 0))
        self.versions: list[int] = []
        self.flushed = [0] * len(rows)
        """Number of tokens of the window that each row has received."""

    def step(self, version: int) -> list[FinishedRow]:
        """Sample a token for each row.

        Args:
            version: Version of the policy, recorded for the tokens.

        Returns:
            The rows that the token finishes.
        """
        logits = self._run_prompts() if self.cache is None else self._run_tokens()
        if self.filled == self.window:
            self._open_window(logits)
        uniforms = None if self.uniforms is None else self.uniforms[:, self.filled]
        chosen = choose_tokens(logits, self.rules, uniforms)
        # One transfer for both.
        ids, bits = torch.stack([chosen.ids, chosen.logprobs.double().view(torch.int64)]).cpu().numpy()
        self.last = chosen.ids
        self.ids[:, self.filled], self.logprobs[:, self.filled] = ids, bits.view(np.float64)
        self.versions.append(version)
        self.filled += 1
        self.runner.stats.tokens += self.count
        return self._finish_rows()

    def unfinished(self) -> list[DecodingRow]:
        """Return the unfinished rows, with all of their tokens."""
        alive = self.alive.nonzero()[0].tolist()
        self._flush(alive, self.filled)
        return list(map(self.rows.__getitem__, alive))

    def _open_window(self, logits: torch.Tensor) -> None:
        """Read the rules of the rows and generate their random numbers, for as many steps as the rules hold."""
        vocabulary = logits.shape[1]
        self.window, self.filled = _WINDOW, 0
        rules: list[TokenRule] = []
        seeds: list[int] = []
        starts: list[int] = []
        stops: set[int] = set()
        watched: dict[StopTexts, list[int]] = {}
        for i, row in enumerate(self.rows):
            rule, span = row.next_rule()
            rules.append(rule)
            seeds.append(row.request.seeds[row.k])
            starts.append(len(row.ids))
            stops |= row.ends | row.stop_ids
            if self.alive[i]:
                self.window = min(self.window, span)
                if row.texts is not None:
                    watched.setdefault(row.texts, []).append(i)
        self.stops = np.zeros(max(vocabulary, *stops, 0) + 1, bool)
        """By token, whether it ends some row."""
        self.stops[list(stops)] = True
        self.watched: dict[StopTexts, np.ndarray] = {}
        """Rows with stop texts."""
        for texts, indices in watched.items():
            self.watched[texts] = np.array(indices)
        self.rules = BatchRules(rules, vocabulary, logits.device)
        self.uniforms: torch.Tensor | None = None
        if not self.rules.all_greedy:
            self.uniforms = torch.from_numpy(uniform_numbers(seeds, starts, self.window)).to(logits.device)
        self.ids = np.zeros((len(self.rows), self.window), np.int64)
        self.logprobs = np.zeros((len(self.rows), self.window))
        self.versions, self.flushed = [], [0] * len(self.rows)

    def _finish_rows(self) -> list[FinishedRow]:
        """Return the rows that their last token finishes."""
        ids = self.ids[:, self.filled - 1]
        broken = np.isnan(self.logprobs[:, self.filled - 1])
        candidates = broken | self.stops[ids] | (self.filled == self.window)
        for texts, rows in self.watched.items():
            try:
                candidates[rows] |= texts.may_end(ids[rows])
            except Exception:  # a failure of the decoder, which the rows report one by one
                candidates[rows] = True
        finished: list[FinishedRow] = []
        for i in (candidates & self.alive).nonzero()[0].tolist():
            row = self.rows[i]
            end: FinishedRow | None
            if broken[i]:
                self._flush([i], self.filled - 1)
                error = ValueError(f"token {len(row.ids)}: the model's logits are NaN, infinite or all forbidden")
                end = FinishedRow(row, "error", error)
            else:
                self._flush([i], self.filled)
                end = row.ended()
            if end is not None:
                finished.append(end)
                self.alive[i] = False
                self.count -= 1
        return finished

    def _flush(self, indices: Sequence[int], count: int) -> None:
        """Append the first `count` tokens of the window to rows that have not received them."""
        for i in indices:
            row, start = self.rows[i], self.flushed[i]
            row.ids += self.ids[i, start:count].tolist()
            row.versions += self.versions[start:count]
            if row.logprobs_kind is not None:
                row.logprobs += self.logprobs[i, start:count].tolist()
            self.flushed[i] = count

    def _run_prompts(self) -> torch.Tensor:
        """Run all prompts and repeat their caches for their rows; return the logits of the next tokens [rows, V]."""
        from transformers import DynamicCache

        runner, device = self.runner, self.runner.device
        indices: dict[int, int] = {}
        row_indices: list[int] = []
        distinct: list[DecodingRow] = []
        lengths: list[int] = []
        for row in self.rows:
            key = id(row) if row.ids else id(row.prepared)
            if key not in indices:
                indices[key] = len(distinct)
                distinct.append(row)
                lengths.append(len(row.prepared.ids) + len(row.ids))
            row_indices.append(indices[key])
        self.width = width = max(lengths)
        longest, has_media = 0, False
        ids = torch.full((len(distinct), width), runner.padding)
        for i, row in enumerate(distinct):
            ids[i, width - lengths[i] :] = torch.tensor([*row.prepared.ids, *row.ids])
            longest = max(longest, row.longest)
            has_media = has_media or bool(row.prepared.media)
        next_positions = torch.tensor(lengths)
        positions = torch.arange(width) - (width - next_positions[:, None])
        self.mask = (positions >= 0).long().to(device) if self.padded else None
        positions.clamp_(min=0)
        if runner.get_rope_index is not None:
            positions, next_positions = runner.rope_positions(distinct, width)
        media = runner.media(distinct, width) if has_media else {}
        self.cache = preallocate(DynamicCache(config=runner.config), longest, self.stride)
        logits = runner.logits(ids.to(device), self.mask, positions.to(device), self.cache, media)
        runner.stats.prompts += len(distinct)
        runner.stats.prompt_tokens += sum(lengths)
        self.position = next_positions.to(device)
        if len(row_indices) != len(distinct):
            repeated = torch.tensor(row_indices, device=device)
            self._select(repeated)
            logits = logits[repeated.to(logits.device)]
        return logits

    def _run_tokens(self) -> torch.Tensor:
        """Run the last token of each row; return the logits of the next ones [rows, V]."""
        runner = self.runner
        if len(self.rows) - self.count >= max(1, len(self.rows) // _FINISHED_SHARE):
            rows = self.unfinished()
            alive = torch.from_numpy(self.alive.nonzero()[0]).to(self.position.device)
            self._select(alive)
            self.last = self.last[alive.to(self.last.device)]
            self.rows, self.alive = rows, np.ones(len(rows), bool)
            self.window = self.filled = 0
        self.width += 1
        width = -(-self.width // self.stride) * self.stride
        if self.mask is not None:
            if self.mask.shape[1] < width:
                added = width + _WINDOW - self.mask.shape[1]
                self.mask = torch.cat([self.mask, self.mask.new_zeros(len(self.rows), added)], 1)
            # Later columns stay 0. transformers drops a mask of only ones, and would attend to them.
            self.mask[:, self.width - 1] = 1
        positions = self.position[:, None]
        if runner.get_rope_index is not None:
            positions = positions.expand(3, -1, -1)
        mask = None if self.mask is None else self.mask[:, :width]
        logits = runner.logits(self.last.to(runner.device)[:, None], mask, positions, self.cache, {})
        runner.stats.rows += len(self.rows)
        self.position += 1
        if self.count < len(self.rows) and runner.max_positions is not None:
            self.position.clamp_(max=runner.max_positions - 1)  # finished rows may run over
        return logits

    def _select(self, indices: torch.Tensor) -> None:
        """Keep, reorder or repeat rows of the cache, the positions and the mask."""
        self.cache.reorder_cache(indices)  # which all kinds of layers implement: attention, sliding, linear
        self.position = self.position[indices]
        if self.mask is not None:
            self.mask = self.mask[indices]
