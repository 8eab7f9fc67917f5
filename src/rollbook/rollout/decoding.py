"""Rows of tokens on their way, and the batches in which a model decodes them, with a cache, one token at a time.

Invariant: a step that raises leaves every row as it was; what a row gets does not depend on the rows beside it, up to
the rounding of logits; rows that are finished get nothing more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rollbook.batch.vision import BY_TOKEN, placeholders
from rollbook.core.sampling import FinishReason, LogprobsKind
from rollbook.models.heads import VARLEN
from rollbook.rollout.caching import room
from rollbook.rollout.choosing import Rule, Rules, choose, uniforms
from rollbook.rollout.engine import Request
from rollbook.rollout.processing import Prepared
from rollbook.rollout.stopping import StopTexts

_AHEAD = 64
"""So many random numbers are made at a time for each row."""
_SPARE = 8
"""Rows leave a batch once one in so many is finished: to copy the cache costs about as much as a token's pass."""


@dataclass
class Work:
    """What an engine has done so far, in numbers: how often it called the model, and for how much.

    >>> Work().steps
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
class Row:
    """One sample on its way: `ids`, `logprobs` and `versions` of the response as far as it got.

    `limit`: how many tokens it may have when this call is over; `room`: how many the model has positions for.
    `suppress` is never sampled; `ends` (the model's own)
    and `stop_ids` (asked for) end it, and so do `texts`.
    """

    request: Request
    k: int
    run_id: str
    prepared: Prepared
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
        how = self.request.sampling
        hot = how.first_temperature if not self.ids else None
        early = sorted(self.ends | self.stop_ids) if len(self.ids) < how.min_tokens else []
        return Rule(
            temperature=how.temperature if hot is None else hot,
            top_p=how.top_p,
            top_k=how.top_k,
            min_p=how.min_p,
            forbidden=tuple(token for token in self.suppress if token < vocabulary),
            early=tuple(token for token in early if token < vocabulary),
            kind=self.kind or "processed",
        )

    def ended(self) -> Finished | None:
        """Whether its last token is the end of it, and why."""
        token, how = self.ids[-1], self.request.sampling
        if token in self.stop_ids:
            return self, "stop", token
        if token in self.ends:
            return self, "stop", None
        if self.texts is not None and len(self.ids) >= how.min_tokens:
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
        how, count = self.request.sampling, len(self.ids)
        turns = [self.limit - count]
        if how.first_temperature is not None and not count:
            turns.append(1)
        if how.min_tokens > count:
            turns.append(how.min_tokens - count)
        return min(turns)


Finished = tuple[Row, FinishReason, str | int | Exception | None]


class Runner:
    """How a model is called: what its `forward` takes, where its inputs go, how far its ids and positions reach.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> runner = Runner(GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=16, n_embd=4, n_layer=1, n_head=1)))
    >>> runner.vocabulary, runner.positions, runner.suppressed
    (9, 16, ())
    """

    def __init__(self, model: Any, device: torch.device | str | None = None) -> None:
        self.model = model
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.config = model.config
        self.work = Work()
        self._device = torch.device(device) if device is not None else None
        parameters = inspect.signature(self.base.forward).parameters
        self.takes = frozenset(parameters)
        if "past_key_values" not in self.takes or getattr(self.base, "_is_stateful", False):
            own = next((name for name in ("cache_params", "state") if name in self.takes), "itself")
            raise ValueError(
                f"model: got {type(self.base).__name__}, which keeps what it has read in {own}, expected a model that "
                "takes past_key_values"
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
        """Keys and values beside a mask come in multiples of so many tokens: see `rollbook.rollout.caching`."""
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
        self.work.steps += 1
        logits: torch.Tensor = self.model(**inputs, return_dict=True).logits
        return logits[:, -1]

    def media(self, rows: list[Row], width: int) -> dict[str, torch.Tensor]:
        """The media of all rows under the model's names: end to end, or by token and padded as the tokens are."""
        names = {name: None for row in rows for name in row.prepared.media or ()}
        inputs: dict[str, torch.Tensor] = {}
        for name in names:
            if name not in self.takes and (name in BY_TOKEN or not self.takes_any):
                continue
            parts = [(i, (row.prepared.media or {}).get(name)) for i, row in enumerate(rows)]
            present = [(i, part) for i, part in parts if part is not None]
            if name in BY_TOKEN:
                made = torch.zeros((len(rows), width), dtype=present[0][1].dtype)
                for i, part in present:
                    start = width - len(rows[i].prepared.ids) - len(rows[i].ids)
                    made[i, start : start + part.numel()] = part.reshape(-1)
            else:
                made = torch.cat([part for _, part in present])
                if made.dtype.is_floating_point:
                    made = made.to(self.base.dtype)
            inputs[name] = made.to(self.device)
        return inputs

    def places(self, rows: list[Row], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of left-padded rows, (rows, width), or in space, (3, rows, width); and the next of each [rows]."""
        rope = self.rope
        positions = torch.zeros((3, len(rows), width), dtype=torch.int64)
        following = []
        for i, row in enumerate(rows):
            ids = row.tokens
            found, after = torch.arange(len(ids)).expand(3, -1), len(ids)
            # Where text goes on after a video is the model's to say, and not one past the largest position: a token of
            # text is put behind, so that sampling and training agree.
            if rope is not None and row.prepared.media:
                asked = inspect.signature(rope).parameters
                longer = [*ids, self.padding]
                given: dict[str, Any] = {"attention_mask": torch.ones((1, len(longer)), dtype=torch.int64)}
                for name, value in row.prepared.media.items():
                    given[name] = value.cpu()
                    if name in BY_TOKEN:  # of the prompt: the response is text
                        given[name] = torch.zeros((1, len(longer)), dtype=value.dtype)
                        given[name][0, : value.numel()] = value.reshape(-1)
                given = {name: value for name, value in given.items() if name in asked}
                found = rope(input_ids=torch.tensor([longer]), **given)[0].reshape(3, -1)
                after, found = int(found[0, -1]), found[:, :-1]
            positions[:, i, width - len(ids) :] = found
            following.append(after)
        return (positions if rope is not None else positions[0]), torch.tensor(following)


class Batch:
    """Rows that are decoded together; `version` is asked for the policy's number at each token.

    A prompt is run through the model once for all of its rows that have no token yet; then its cache is repeated.
    Rows get their tokens many at a time, as lists are slow; those that are finished, or given back, have all of them.
    """

    def __init__(self, runner: Runner, rows: list[Row], version: Callable[[], int]) -> None:
        self.runner = runner
        self.version = version
        self.cache: Any = None
        lengths = {len(row.prepared.ids) + len(row.ids) for row in rows}
        self.padded = len(lengths) > 1 or "position_ids" not in runner.takes
        """Whether there is a mask. Without padding there is nothing to hide, and attention is faster."""
        self.stride = runner.stride if self.padded else 1
        self._take(rows)

    def _take(self, rows: list[Row]) -> None:
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
    def unfinished(self) -> list[Row]:
        """The rows that are to go on."""
        self._give_all()
        return [self.rows[i] for i in self.alive.nonzero()[0]]

    def step(self) -> list[Finished]:
        """A token for each row: those that are finished with it, and why."""
        version = self.version()
        logits = self._prompts() if self.cache is None else self._next()
        vocabulary = logits.shape[1]
        if self.rules is None:
            self._give_all()
            # An output layer may be wider than the tokens that the model takes.
            self.stops = np.append(self.stops, np.zeros(max(0, vocabulary - len(self.stops)), bool))
            self.rules = Rules([row.rule(vocabulary) for row in self.rows], vocabulary, logits.device)
        chosen = choose(logits, self.rules, self._random(self.rules, logits.device))
        # One transfer for both, bit by bit.
        ids, bits = torch.stack([chosen.ids, chosen.logprobs.double().view(torch.int64)]).cpu().numpy()
        logprobs = bits.view(np.float64)
        self.last = chosen.ids
        self.runner.work.tokens += self.count
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
        self._give((looked_at & broken).nonzero()[0], len(self.waiting) - 1)
        self._give((looked_at & ~broken).nonzero()[0], len(self.waiting))
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

    def _give(self, those: np.ndarray, count: int) -> None:
        """Let some rows have the first `count` tokens that wait, as far as they have not yet."""
        first = min((self.given[i] for i in those), default=count)
        if first == count:
            return
        ids, logprobs, versions = zip(*self.waiting[first:count], strict=True)
        some_ids, some_logprobs = (np.stack([each[those] for each in column], 1) for column in (ids, logprobs))
        for j, i in enumerate(those.tolist()):
            row, start = self.rows[i], self.given[i] - first
            row.ids.extend(some_ids[j, start:].tolist())
            row.versions.extend(versions[start:])
            if row.kind is not None:
                row.logprobs.extend(some_logprobs[j, start:].tolist())
            self.given[i] = count

    def _give_all(self) -> None:
        """Let all rows have what waits, and look ahead."""
        live = self.alive.nonzero()[0]
        self._give(live, len(self.waiting))
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
            self._give_all()
            seeds = [row.request.seeds[row.k] for row in self.rows]
            made = uniforms(seeds, [len(row.ids) for row in self.rows], _AHEAD)
            self.numbers, self.column = torch.from_numpy(made).to(device), 0
        self.column += 1
        return self.numbers[:, self.column - 1]

    def _prompts(self) -> torch.Tensor:
        """Run all prompts, and repeat their caches for their rows; the next token's logits (rows, V)."""
        from transformers import DynamicCache

        runner = self.runner
        places: dict[Any, int] = {}
        which: list[int] = []
        unlike: list[Row] = []
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
        self.cache = room(DynamicCache(config=runner.config), max(row.longest for row in self.rows), self.stride)
        logits = runner.logits(torch.tensor(ids).to(device), self.mask, positions.to(device), self.cache, media)
        runner.work.prompts += len(unlike)
        runner.work.prompt_tokens += sum(lengths)
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
        runner.work.rows += len(self.rows)
        self.position += 1
        if spare and runner.positions is not None:
            self.position.clamp_(max=runner.positions - 1)  # of rows that are finished
        return logits

    def _drop(self) -> None:
        """Let finished rows go."""
        kept = torch.from_numpy(self.alive.nonzero()[0]).to(self.position.device)
        self._select(kept)
        self.last = self.last[kept.to(self.last.device)]
        self._take(self.unfinished)

    def _select(self, those: torch.Tensor) -> None:
        self.cache.reorder_cache(those)  # which every kind of layer has: attention, sliding, linear
        self.position = self.position[those]
        if self.mask is not None:
            self.mask = self.mask[those]
