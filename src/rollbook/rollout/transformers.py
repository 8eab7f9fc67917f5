"""`TransformersEngine`: rollouts from a local transformers model, text or vision, and the preparation of its prompts.

Invariant: a token's log-prob comes from the forward pass that it was sampled from, and its version is that of the
weights at that time. The samples of a prompt depend on the prompt, its options and its seeds, not on the rest of the
batch (up to the rounding of logits). A row that fails fails alone. Model and weights are left unchanged. A prompt with
media is never truncated.

A prompt runs through the model once for all of its samples. A sample that is continued later runs through the model
again. On CUDA, rows are decoded over a paged key-value cache with CUDA graphs (`rollbook.rollout.paged`). Elsewhere,
and for models that do not allow it, a batch is decoded token by token, and finished rows leave it once there are enough
of them.

Images are PIL images, paths, `file://` and `data:` addresses, encoded bytes, arrays or tensors (height, width,
channels, or channels first), or a mapping with one of them under `image`, `path`, `url` or `bytes`. Processed media go
with token ids that contain their placeholders: `Prompt(token_ids=..., images={"pixel_values": ...,
"image_grid_thw": ...})`.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from rollbook.algorithms.kernels import decode_triton
from rollbook.batch.media import BY_TOKEN, GRIDS, TYPES, placeholders, sample_types
from rollbook.core.checks import check_int
from rollbook.core.media import SHARED, load_image, source_key
from rollbook.core.sampling import FinishReason, LogprobsKind, Prompt, RunInfo, Sample, Sampling
from rollbook.core.vocabulary import Tokenizer, template_fingerprint, tokenizer_fingerprint
from rollbook.models.actor import Actor
from rollbook.models.head import scoring
from rollbook.rollout.chat import has_media
from rollbook.rollout.decoding import (
    MIN_TEMPERATURE,
    DecodingBatch,
    DecodingRow,
    DecodingStats,
    FinishedRow,
    ModelRunner,
    StopTexts,
    find_stop_start,
)
from rollbook.rollout.engine import BaseEngine, Cancel, Request, WeightSource, WeightSyncError
from rollbook.rollout.paged import (
    PagedBatch,
    PagedDecoder,
    UnsupportedModelError,
    is_out_of_memory,
    unsupported_reason,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["PreparedPrompt", "PromptPreparer", "TransformersEngine"]

_TOKEN_INPUTS = ("input_ids", "attention_mask")


@dataclass(frozen=True, kw_only=True)
class PreparedPrompt:
    """A tokenized prompt.

    Args:
        ids: Token ids, with expanded placeholders.
        media: Tensors of the processor under the model's names; `None` without media.
        text: The text that was tokenized.
        truncated_from: Number of ids before truncation, if the prompt was truncated.

    >>> PreparedPrompt(ids=(5, 6)).media is None
    True
    """

    ids: tuple[int, ...]
    media: Mapping[str, torch.Tensor] | None = None
    text: str | None = None
    truncated_from: int | None = None


class PromptPreparer:
    """Tokenizes prompts and processes their media.

    Args:
        tokenizer: Tokenizer, or a processor.
        processor: Processor of images and videos; it has the tokenizer too.
        config: Configuration of the model, if known.
        add_special_tokens: Whether to add special tokens to plain text. The text of a chat has those of the template.

    >>> PromptPreparer().prepare(Prompt(token_ids=[5, 6, 7]), Sampling(max_prompt_tokens=2, prompt_overflow="left"))
    PreparedPrompt(ids=(6, 7), media=None, text=None, truncated_from=3)
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        processor: Tokenizer | None = None,
        config: PretrainedConfig | None = None,
        *,
        add_special_tokens: bool = False,
    ) -> None:
        if processor is None and hasattr(tokenizer, "tokenizer"):
            tokenizer, processor = None, tokenizer
        self.processor: Any = processor
        self.tokenizer: Any = tokenizer if tokenizer is not None else getattr(processor, "tokenizer", None)
        self.config = config
        self.add_special_tokens = add_special_tokens

    def prepare(self, prompt: Prompt, sampling: Sampling | None = None) -> PreparedPrompt:
        """Tokenize a prompt and process its media.

        Args:
            prompt: The prompt.
            sampling: Its `max_prompt_tokens` and `prompt_overflow` apply.

        Returns:
            The token ids and the media.

        Raises:
            ValueError: The prompt is empty or too long, its media and placeholders do not match, or it needs a
                tokenizer, a chat template or a processor that is missing.
        """
        processed = _processed_media(prompt) if prompt.images or prompt.videos else None
        if processed is not None:
            prepared = self._with_processed(prompt, processed)
        elif prompt.messages is not None:
            messages, images, videos = split_media(prompt)
            prepared = self._tokenized(self._templated(prompt, messages), images, videos, special=False)
        elif prompt.token_ids is not None:
            prepared = self._with_ids(prompt)
        else:
            text = prompt.text or ""
            prepared = self._tokenized(text, list(prompt.images), list(prompt.videos), special=self.add_special_tokens)
        length = len(prepared.ids)
        if not length:
            raise ValueError("prompt: got no tokens, expected at least one")
        limit = None if sampling is None else sampling.max_prompt_tokens
        if sampling is None or limit is None or length <= limit:
            return prepared
        if prepared.media is not None:
            raise ValueError(
                f"prompt: got {length} tokens, expected at most {limit} (max_prompt_tokens); a prompt with media is "
                "not truncated"
            )
        if sampling.prompt_overflow == "error":
            raise ValueError(f"prompt: got {length} tokens, expected at most {limit} (max_prompt_tokens)")
        ids = prepared.ids[-limit:] if sampling.prompt_overflow == "left" else prepared.ids[:limit]
        return PreparedPrompt(ids=ids, text=self._decoded(ids), truncated_from=length)

    # --- text ---------------------------------------------------------------------------------------------------------

    def _templated(self, prompt: Prompt, messages: list[dict[str, Any]]) -> str:
        renderer = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        if renderer is None:
            raise ValueError("prompt.messages: got a chat, expected token ids: there is no tokenizer")
        if not getattr(renderer, "chat_template", None):
            raise ValueError("prompt.messages: got a chat, expected text or token ids: the tokenizer has no template")
        tools = None if prompt.tools is None else [dict(tool) for tool in prompt.tools]
        text = renderer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        return str(text)

    def _tokenized(self, text: str, images: list[Any], videos: list[Any], special: bool) -> PreparedPrompt:
        if self.tokenizer is None:
            raise ValueError(f"prompt.text: got text ({text[:40]!r}), expected token ids: there is no tokenizer")
        if not images and not videos:
            ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
            return PreparedPrompt(ids=tuple(ids), text=text)
        features = self._processed(text, images, videos, special)
        ids = tuple(features["input_ids"].reshape(-1).tolist())
        return PreparedPrompt(ids=ids, media=self._media(features, ids, len(images), len(videos)), text=text)

    # --- media --------------------------------------------------------------------------------------------------------

    def _processed(self, text: str, images: list[Any], videos: list[Any], special: bool) -> Any:
        """Run the processor on text and media; the text has a placeholder for each medium."""
        if self.processor is None:
            raise ValueError(f"prompt: got {len(images)} images and {len(videos)} videos, expected none: no processor")
        if videos and getattr(self.processor, "video_processor", None) is None:
            raise ValueError(f"prompt.videos: got {len(videos)}, expected none: the processor takes no videos")
        for medium, count in (("image", len(images)), ("video", len(videos))):
            markers = [
                getattr(self.processor, name, None) for name in (f"{medium}_token", f"boi_{medium}_token", "boi_token")
            ]
            counts = [text.count(marker) for marker in markers if isinstance(marker, str) and marker in text]
            if counts and counts[0] != count:
                raise ValueError(
                    f"prompt.{medium}s: got {count}, expected {counts[0]}, one for each {medium} in the prompt's text"
                )
        media: dict[str, Any] = {}
        if images:
            media["images"] = [load_image(f"prompt.images[{i}]", image) for i, image in enumerate(images)]
        if videos:
            media["videos"] = videos
        try:
            return self.processor(text=[text], return_tensors="pt", add_special_tokens=special, **media)
        except ValueError as error:
            raise ValueError(
                f"prompt: got {len(images)} images and {len(videos)} videos, processor: {error}"
            ) from error

    def _media(
        self, features: Mapping[str, Any], ids: Sequence[int], images: int = 0, videos: int = 0
    ) -> dict[str, torch.Tensor]:
        media = {name: value for name, value in features.items() if name not in _TOKEN_INPUTS and value is not None}
        for name, value in media.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"media[{name!r}]: got {type(value).__name__}, expected a tensor")
        holder = self.config if placeholders(self.config) else self.processor
        token_ids = placeholders(holder)
        for medium, count in (("image", images), ("video", videos)):
            if medium in token_ids and ids.count(token_ids[medium]) < count:
                raise ValueError(
                    f"prompt.{medium}s: got {count}, expected {ids.count(token_ids[medium])}, as many as the prompt "
                    "has placeholders for"
                )
            grid = media.get(f"{medium}_grid_thw")
            merge = getattr(getattr(self.config, "vision_config", None), "spatial_merge_size", None)
            if grid is not None and medium in token_ids and merge is not None:
                expected = int(grid.reshape(-1, 3).prod(-1).sum()) // merge**2
                if ids.count(token_ids[medium]) != expected:
                    raise ValueError(
                        f"prompt: got {ids.count(token_ids[medium])} {medium} placeholders, expected {expected}, by "
                        "its grids"
                    )
        if any(grid in media for grid in GRIDS) and ("image" in token_ids or "video" in token_ids):
            # Models with spatial positions need these types, also in training.
            media[TYPES] = sample_types(torch.tensor(ids), media.get(TYPES), holder).unsqueeze(0)
        return {name: SHARED.keep(value) for name, value in media.items()}

    def _with_processed(self, prompt: Prompt, processed: Mapping[str, Any]) -> PreparedPrompt:
        if prompt.token_ids is None:
            raise ValueError("prompt.images: got processed media without token_ids, which must have their placeholders")
        tensors = {name: torch.as_tensor(value) for name, value in processed.items()}
        ids = tuple(prompt.token_ids)
        return PreparedPrompt(ids=ids, media=self._media(tensors, ids), text=self._decoded(ids))

    def _with_ids(self, prompt: Prompt) -> PreparedPrompt:
        """Prepare token ids, which have the expanded placeholders of the images."""
        ids = tuple(prompt.token_ids or ())
        if not prompt.images and not prompt.videos:
            return PreparedPrompt(ids=ids, text=self._decoded(ids))
        marks = [
            str(getattr(self.processor, f"{medium}_token", "")) * len(getattr(prompt, f"{medium}s"))
            for medium in ("image", "video")
        ]
        features = self._processed("".join(marks), list(prompt.images), list(prompt.videos), special=False)
        alone = features["input_ids"].reshape(-1).tolist()
        for token in set(placeholders(self.config or self.processor).values()):
            if alone.count(token) != ids.count(token):
                raise ValueError(
                    f"prompt.token_ids: got {ids.count(token)} placeholders ({token}), expected {alone.count(token)}, "
                    "as many as its media have"
                )
        # Entries per token are those of the placeholders, without the text.
        features = {name: value for name, value in features.items() if name not in BY_TOKEN}
        return PreparedPrompt(ids=ids, media=self._media(features, ids), text=self._decoded(ids))

    def _decoded(self, ids: Sequence[int]) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def _processed_media(prompt: Prompt) -> Mapping[str, Any] | None:
    """Return media that are processed already, or `None`."""
    ready = [
        entry
        for entry in (*prompt.images, *prompt.videos)
        if isinstance(entry, Mapping) and not source_key(entry) and entry
    ]
    if not ready:
        return None
    if len(ready) != len(prompt.images) + len(prompt.videos):
        raise ValueError("prompt.images: got processed and unprocessed media, expected one kind")
    return {name: value for entry in ready for name, value in entry.items()}


def split_media(prompt: Prompt) -> tuple[list[dict[str, Any]], list[Any], list[Any]]:
    """Move images and videos out of the messages.

    Args:
        prompt: A chat.

    Returns:
        The messages, the images and the videos, in order.

    Raises:
        ValueError: The media do not match the parts of the messages.
    """
    separate = {"image": iter(prompt.images), "video": iter(prompt.videos)}
    media: dict[str, list[Any]] = {"image": [], "video": []}
    empty_parts = {"image": 0, "video": 0}

    def extract(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        medium = {"image": "image", "image_url": "image", "video": "video"}.get(kind or "")
        if medium is None:
            return part
        key = source_key(part)
        if key is None:
            empty_parts[medium] += 1
            content = next(separate[medium], None)
            if content is None:
                raise ValueError(
                    f"prompt.{medium}s: got {empty_parts[medium] - 1}, expected one for each {medium} part of the "
                    "messages"
                )
        else:
            content = part[key]
        media[medium].append(content)
        return {"type": medium}

    messages = []
    for message in prompt.messages or ():
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            message = {**message, "content": [extract(part) for part in content]}
        messages.append(dict(message))
    for medium, remaining in separate.items():
        left_over = list(remaining)
        if left_over and media[medium]:
            raise ValueError(
                f"prompt.{medium}s: got {empty_parts[medium] + len(left_over)}, expected {empty_parts[medium]}, one "
                f"for each empty {medium} part of the messages"
            )
        media[medium] += left_over  # the text of the messages has their placeholders
    return messages, media["image"], media["video"]


_IDLE_SECONDS = 0.01
_MEMORY_SHARE = 8
"""`release_memory` keeps what takes less than 1 / _MEMORY_SHARE of the device's memory, to save capturing again."""
_STEPS_PER_TURN = 32
"""Number of tokens after which another call can use the model."""
_PREPARED_BATCHES = 4
"""Number of batches whose prompts are prepared and sorted by length before the first is run."""


def _warn_slow(reason: str) -> None:
    warnings.warn(f"decoding token by token, without CUDA graphs: {reason}", stacklevel=4)


class _FairLock:
    """A lock for `with` that serves threads in turn: a thread that takes it again waits for those that waited."""

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class TransformersEngine(BaseEngine):
    """Rollout engine over a transformers model: any causal or vision-language model, on any device, with PEFT adapters.

    `TransformersEngine(actor)` samples from the weights of an `Actor`, with its tokenizer, and never samples the tokens
    that the actor suppresses. Without further arguments, all calls for an actor return the same engine, so that it has
    one `version`.

    Args:
        model: An `Actor`, a transformers model, or an object that has one as `.model`.
        tokenizer: Tokenizer, or a processor. Without one, prompts are token ids.
        processor: Processor for images and videos; it has the tokenizer too.
        max_batch_rows: Largest number of samples per batch.
        max_batch_tokens: Largest number of tokens per batch, if every sample becomes as long as it may; a longer sample
            is a batch of its own. A batch that does not fit in memory is split in halves. On CUDA, the key-value cache
            has this many tokens at most, in pages of 64, and one more page; it has more if a sample needs them.
        version: Number of the policy, to be set when the weights change.
        device: Device of the inputs; by default that of the model's input embeddings.
        add_special_tokens: Whether the tokenizer adds special tokens to a prompt of plain text.

    Raises:
        ValueError: The model is an encoder-decoder, keeps its state outside a key-value cache, or is not a model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...     num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=32)
    >>> engine = TransformersEngine(LlamaForCausalLM(config), version=3)
    >>> samples = engine.generate([[5, 6, 7], [8]], n=2, max_tokens=4, ignore_eos=True, temperature=0.5)
    >>> [len(sample.response_ids) for sample in samples], samples[0].versions, samples[0].finish_reason
    ([4, 4, 4, 4], [3, 3, 3, 3], 'length')
    """

    takes_weights: ClassVar[bool] = True

    def __new__(cls, model: Actor | torch.nn.Module, *arguments: Any, **options: Any) -> Self:
        if not isinstance(model, Actor) or arguments or options:
            return super().__new__(cls)
        if not isinstance(model.engine, cls):
            model.engine = super().__new__(cls)
        return model.engine

    def __init__(
        self,
        model: Actor | torch.nn.Module,
        tokenizer: Tokenizer | None = None,
        processor: Tokenizer | None = None,
        *,
        max_batch_rows: int = 256,
        max_batch_tokens: int = 262_144,
        version: int = 0,
        device: torch.device | str | None = None,
        add_special_tokens: bool = False,
    ) -> None:
        if hasattr(self, "runner"):
            return  # the cached engine of an actor
        suppress: tuple[int, ...] = ()
        if isinstance(model, Actor):
            suppress = tuple(model.suppress)
            if tokenizer is None and processor is None:
                tokenizer, processor = model.tokenizer, model.processor
        self.model = _unwrap_model(model)
        self.config = self.model.config
        if getattr(self.config, "is_encoder_decoder", False):
            raise ValueError(f"model: got {type(self.model).__name__}, expected a decoder-only model")
        self.max_batch_rows = check_int("max_batch_rows", max_batch_rows, 1)
        self.max_batch_tokens = check_int("max_batch_tokens", max_batch_tokens, 1)
        self.version = check_int("version", version)
        self.preparer = PromptPreparer(tokenizer, processor, self.config, add_special_tokens=add_special_tokens)
        self.tokenizer: Any = self.preparer.tokenizer
        self.processor = self.preparer.processor
        self.runner = ModelRunner(self.model, device)
        self._placeholders = frozenset(self.runner.suppressed)
        # Tokens that have no probability in training are not sampled; prompts may contain them.
        self.runner.suppressed = tuple(sorted({*self.runner.suppressed, *suppress}))
        self.ends = _end_ids(self.runner.base, self.tokenizer)
        """Token ids that end a response."""
        self._model_lock = _FairLock()
        self._paged: PagedDecoder | None = None
        self._not_paged: str | None = None
        """Reason why this model is not decoded over a paged cache; `None` as long as none is known."""

    @property
    def stats(self) -> DecodingStats:
        """Counts of the work so far."""
        return self.runner.stats

    @property
    def run(self) -> RunInfo:
        """Description of the model and tokenizer, with the current adapters and template."""
        import transformers

        path = str(getattr(self.config, "_name_or_path", "") or "")
        adapters = getattr(self.model, "active_adapters", None) if hasattr(self.model, "peft_config") else None
        names = adapters() if callable(adapters) else adapters
        template = template_fingerprint(self.processor)
        return RunInfo(
            engine="transformers",
            engine_version=transformers.__version__,
            model=path or type(self.runner.base).__name__,
            tokenizer=self._tokenizer_fingerprint,
            chat_template=template if template is not None else template_fingerprint(self.tokenizer),
            adapter=",".join(names) if names else None,
        )

    @cached_property
    def _tokenizer_fingerprint(self) -> str | None:
        return tokenizer_fingerprint(self.tokenizer)  # slow for a large vocabulary

    def update_weights(self, source: WeightSource | Mapping[str, torch.Tensor], version: int) -> None:
        """Copy weights into the model, in place and between two tokens, and set the version.

        Args:
            source: A model, or some of the weights by their names in the engine's model, such as those of adapters. If
                it is the engine's own model, only the version is set.
            version: Number of the policy.

        Raises:
            WeightSyncError: The names or shapes differ from those of the engine's model.
        """
        partial_update = isinstance(source, Mapping)
        model = None if isinstance(source, Mapping) else _unwrap_model(source)
        with self._model_lock:
            if model is not self.model:
                weights: Mapping[str, torch.Tensor] = source if model is None else model.state_dict()  # type: ignore[assignment]
                targets = self.model.state_dict()
                shapes, expected = (
                    {name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (weights, targets)
                )
                for name in sorted(shapes.keys() | (() if partial_update else expected.keys())):
                    if shapes.get(name) != expected.get(name):
                        raise WeightSyncError(
                            f"source: {name}: got shape {shapes.get(name)}, expected {expected.get(name)}, as in the "
                            "engine's model"
                        )
                with torch.no_grad():
                    for name, tensor in weights.items():
                        targets[name].copy_(tensor)
            self.version = version

    # --- a call -------------------------------------------------------------------------------------------------------

    def _run(self, requests: Sequence[Request], cancel: Cancel) -> Iterator[tuple[int, Sample]]:
        run_id = self.run.id
        stops: dict[tuple[str, ...], StopTexts] = {}
        rows: list[DecodingRow] = []
        for i, request in enumerate(requests, start=1):
            try:
                rows += self._rows(request, stops, run_id, prepare=not cancel.requested)
            except Exception as error:  # fails the samples of this prompt alone
                for k in range(len(request.eids)):
                    yield request.position + k, request.failed(k, error, run_id)
            if i == len(requests) or len(rows) >= _PREPARED_BATCHES * self.max_batch_rows:
                decoder = self._paged_decoder()
                if decoder is not None and rows:
                    rows = yield from self._decode_paged(rows, decoder, cancel)
                waiting, rows = deque(self._planned(rows)), []
                while waiting:
                    yield from self._decode_batch(waiting.popleft(), waiting, cancel)

    def _paged_decoder(self) -> PagedDecoder | None:
        """Return the decoder with CUDA graphs; `None` on other devices and for models that it cannot run."""
        if self.runner.device.type != "cuda" or self._not_paged is not None:
            return None
        with self._model_lock:
            if self._paged is None:
                reason = unsupported_reason(self.runner) if decode_triton.READY else "Triton is not installed"
                if reason is not None:
                    self._not_paged = reason
                    _warn_slow(reason)
                    return None
                self._paged = PagedDecoder(self.runner, self.max_batch_rows, capture=True)
            if self._paged.max_rows != self.max_batch_rows and not self._paged.calls:
                self._paged.release()
                self._paged = PagedDecoder(self.runner, self.max_batch_rows, capture=True)
            return self._paged

    def _decode_paged(
        self, rows: list[DecodingRow], decoder: PagedDecoder, cancel: Cancel
    ) -> Generator[tuple[int, Sample], None, list[DecodingRow]]:
        """Decode rows over a paged cache. If that fails, return the unfinished rows, for `_decode_batch`."""
        longest = max(row.longest for row in rows)
        with self._model_lock:
            if not decoder.reserve(longest, sum(row.longest for row in rows), self.max_batch_tokens):
                _warn_slow(
                    f"rows of up to {longest} tokens do not fit into the key-value cache of another call that is in "
                    "progress, which cannot grow"
                )
                return rows
            decoder.calls += 1
        batch, waiting = PagedBatch(decoder), deque(rows)
        unfinished = {row.index: row for row in rows}
        failure: Exception | None = None
        try:
            while unfinished and failure is None and not cancel.requested:
                finished: list[FinishedRow] = []
                try:
                    # Other calls can use the model between windows.
                    with self._model_lock, scoring(self.model):
                        self._admit_groups(batch, batch.next_groups(waiting), finished)
                        if batch.live:
                            finished += batch.run_window(self.version, waiting)
                except Exception as error:
                    failure = error.with_traceback(None)  # its frames hold memory
                for row, reason, stop in finished:
                    del unfinished[row.index]
                    yield row.index, self._sample(row, reason, stop)
                if not finished and not batch.live:
                    time.sleep(_IDLE_SECONDS)  # another call has all pages
        finally:
            batch.remove_all()
            decoder.calls -= 1
        if failure is not None:
            with self._model_lock:
                if not decoder.calls:
                    decoder.release()
            problem = f"{type(failure).__name__}: {failure}"
            if isinstance(failure, UnsupportedModelError):
                self._not_paged, self._paged = problem, None
            _warn_slow(problem)
            return list(unfinished.values())
        for row in unfinished.values():
            yield row.index, self._sample(row, "abort")
        return []

    def _admit_groups(self, batch: PagedBatch, groups: list[list[DecodingRow]], finished: list[FinishedRow]) -> None:
        """Run the prompts of groups of rows. If that fails, halves are tried; a single group that fails is an error.

        Args:
            batch: The batch that the rows join.
            groups: Rows of one prompt each.
            finished: Takes the rows that end with their first token, or with an error.
        """
        if not groups:
            return
        try:
            finished += batch.admit(groups, self.version)
            return
        except Exception as error:
            if isinstance(error, UnsupportedModelError) or (len(groups) == 1 and is_out_of_memory(error)):
                raise
            failure = error.with_traceback(None)  # its frames hold memory
        if len(groups) == 1:
            finished += [FinishedRow(row, "error", failure) for row in groups[0]]
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.runner.stats.splits += 1
        half = len(groups) // 2
        self._admit_groups(batch, groups[:half], finished)
        self._admit_groups(batch, groups[half:], finished)

    def release_memory(self) -> None:
        """Free the key-value cache and the captured graphs, unless cache and decoding buffers are small.

        The trainer calls it before an update on the same device. The next call allocates them again.
        """
        if self._paged is None or self._paged.calls:
            return
        with self._model_lock:
            if self._paged.nbytes * _MEMORY_SHARE > torch.cuda.get_device_properties(self.runner.device).total_memory:
                self._paged.release()

    def _planned(self, rows: list[DecodingRow]) -> Iterator[list[DecodingRow]]:
        """Split rows into batches. Rows of a prompt stay together; of several batches the longest come first."""
        longest = max(map(attrgetter("longest"), rows), default=0)
        if len(rows) > self.max_batch_rows or len(rows) * longest > self.max_batch_tokens:
            rows = sorted(rows, key=attrgetter("longest"), reverse=True)
        batch: list[DecodingRow] = []
        longest, shape = 0, None
        for row in rows:
            longest = max(longest, row.longest)
            full = len(batch) == self.max_batch_rows or (len(batch) + 1) * longest > self.max_batch_tokens
            row_shape = _media_shape(row.prepared.media) if row.prepared.media else None
            if batch and (full or (None not in (shape, row_shape) and row_shape != shape)):
                yield batch
                batch, longest, shape = [], row.longest, None
            batch.append(row)
            shape = row_shape if shape is None else shape
        if batch:
            yield batch

    def _decode_batch(
        self, rows: list[DecodingRow], waiting: deque[list[DecodingRow]], cancel: Cancel
    ) -> Iterator[tuple[int, Sample]]:
        """Decode a batch. If it fails, its halves are put back in the queue; a single row that fails is an error."""
        batch = DecodingBatch(self.runner, rows)
        while batch.count:
            if cancel.requested:
                for row in batch.unfinished():
                    yield row.index, self._sample(row, "abort")
                return
            finished: list[FinishedRow] = []
            failure: Exception | None = None
            try:
                # Other calls can use the model after `_STEPS_PER_TURN` tokens, or when a row is finished.
                with self._model_lock, scoring(self.model), _attention(batch):
                    for _ in range(_STEPS_PER_TURN):
                        finished = batch.step(self.version)
                        if finished or cancel.requested:
                            break
            except Exception as error:
                failure = error.with_traceback(None)  # its frames hold the batch's memory
            if failure is None:
                for row, reason, stop in finished:
                    yield row.index, self._sample(row, reason, stop)
                continue
            unfinished = batch.unfinished()
            del batch
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if len(unfinished) == 1:
                yield unfinished[0].index, self._sample(unfinished[0], "error", failure)
            else:
                self.runner.stats.splits += 1
                half = len(unfinished) // 2
                waiting.extendleft((unfinished[half:], unfinished[:half]))
            return

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _rows(
        self, request: Request, stops: dict[tuple[str, ...], StopTexts], run_id: str, prepare: bool
    ) -> list[DecodingRow]:
        """Check the options of a request and return its rows."""
        sampling, started = request.sampling, request.started
        if prepare or started is not None:
            prepared = self._prepared(request)
        else:  # cancelled: the samples are returned as they are, and prepared when they are continued
            prepared = PreparedPrompt(ids=tuple(request.prompt.token_ids or ()))
        kind: LogprobsKind | None = (
            "raw" if sampling.logprobs is not None and sampling.temperature < MIN_TEMPERATURE else sampling.logprobs
        )
        if started is not None and started.response_ids:
            started_kind = started.logprobs_kind if started.logprobs is not None else None
            if started_kind != kind:
                raise ValueError(f"logprobs: got {kind!r}, expected {started_kind!r}, which the sample has so far")
        if sampling.extra:
            raise ValueError(
                f"extra: got {sorted(sampling.extra)}, expected none: this engine has no options of its own"
            )
        for name in ("suppress", "stop_token_ids"):
            for i, token in enumerate(getattr(sampling, name)):
                if token >= self.runner.vocabulary:
                    raise ValueError(f"{name}[{i}]: got {token}, expected an id below {self.runner.vocabulary}")
        texts = None
        if sampling.stop:
            if self.tokenizer is None:
                raise ValueError(f"stop: got {list(sampling.stop)}, expected none: there is no tokenizer")
            decode = partial(self.tokenizer.decode, skip_special_tokens=False)
            texts = stops.setdefault(tuple(sampling.stop), StopTexts(sampling.stop, decode))
        # The end of the model's positions ends a response as `max_tokens` does.
        positions = self.runner.max_positions
        max_length = sys.maxsize if positions is None else positions - len(prepared.ids)
        if started is not None and len(started.response_ids) >= max_length:
            raise ValueError(f"sample {started.eid}: fills the {positions} positions of the model")
        limit = min(request.done + request.budget, max_length)
        suppress = tuple(sorted({*sampling.suppress, *self.runner.suppressed}))
        rows = []
        for k in range(len(request.eids)):
            row = DecodingRow(
                request=request,
                k=k,
                index=request.position + k,
                run_id=run_id,
                prepared=prepared,
                ids=[],
                logprobs=[],
                versions=[],
                logprobs_kind=kind,
                limit=limit,
                pauses=limit < max_length and request.pauses,
                longest=len(prepared.ids) + limit,
                suppress=suppress,
                ends=frozenset() if sampling.ignore_eos else self.ends,
                stop_ids=frozenset(sampling.stop_token_ids),
                texts=texts,
            )
            if started is not None:
                row.ids += started.response_ids
                row.logprobs += started.logprobs or ()
                row.versions += started.versions or ()
            rows.append(row)
        return rows

    def _prepared(self, request: Request) -> PreparedPrompt:
        """Prepare the prompt of a request; a continued sample keeps its tokens and media."""
        prompt, sampling, started = request.prompt, request.sampling, request.started
        has_ids = started is not None and started.prompt_ids
        if started is not None and has_ids and (started.media is not None or not has_media(prompt)):
            prepared = PreparedPrompt(ids=tuple(started.prompt_ids), media=started.media, text=started.prompt_text)
        else:
            prepared = self.preparer.prepare(prompt, sampling)
            if started is not None and has_ids and prepared.ids != tuple(started.prompt_ids):
                raise ValueError(f"prompt: got {len(prepared.ids)} tokens, other than those of sample {started.eid}")
        vocabulary = self.runner.vocabulary
        if max(prepared.ids) >= vocabulary:
            i, token = next((i, token) for i, token in enumerate(prepared.ids) if token >= vocabulary)
            raise ValueError(f"prompt[{i}]: got token {token}, expected one below {vocabulary}")
        if not prepared.media and not self._placeholders.isdisjoint(prepared.ids):
            count = sum(token in self._placeholders for token in prepared.ids)
            raise ValueError(f"prompt: got {count} media placeholders and no media, expected both or neither")
        if self.runner.max_positions is not None and len(prepared.ids) >= self.runner.max_positions:
            raise ValueError(
                f"prompt: got {len(prepared.ids)} tokens, expected fewer than {self.runner.max_positions}, the model's "
                "positions"
            )
        return prepared

    # --- samples ------------------------------------------------------------------------------------------------------

    def _sample(self, row: DecodingRow, reason: FinishReason, stop: str | int | Exception | None = None) -> Sample:
        request, started, prepared = row.request, row.request.started, row.prepared
        text = None
        if self.tokenizer is not None:
            decode = partial(self.tokenizer.decode, skip_special_tokens=True)
            text = decode(row.ids)
            if reason == "stop" and not request.sampling.include_stop:
                if isinstance(stop, str):
                    stop_start = find_stop_start(stop, row.ids, decode)
                    text = text if stop_start < 0 else text[:stop_start]  # special tokens are not in the text
                else:
                    text = decode(row.ids[:-1])
        fields: dict[str, Any] = {
            "prompt_ids": list(prepared.ids),
            "response_ids": row.ids,
            "logprobs": None if row.logprobs_kind is None else row.logprobs,
            "logprobs_kind": row.logprobs_kind,
            "versions": row.versions if len(row.versions) == len(row.ids) else None,
            "text": text,
            "prompt_text": prepared.text,
            "media": prepared.media,
            "sampling": {**request.options(row.k), "suppress": list(row.suppress)},
            "metrics": dict(started.metrics) if started is not None else {},
            "info": dict(started.info) if started is not None else {},
        }
        if prepared.truncated_from is not None:
            fields["info"]["prompt_truncated_from"] = prepared.truncated_from
        if isinstance(stop, Exception):
            return request.failed(row.k, stop, row.run_id, **fields)
        return Sample(
            prompt=request.prompt,
            eid=request.eids[row.k],
            finish_reason=reason,
            stop_reason=stop,
            run_id=row.run_id,
            group_size=started.group_size if started is not None else request.sampling.n,
            **fields,
        )


# `help` would show the arguments of `__new__`.
_signature = inspect.signature(TransformersEngine.__init__)
TransformersEngine.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=list(_signature.parameters.values())[1:], return_annotation=inspect.Signature.empty
)


def _media_shape(media: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what prompts of one batch must have in common: a batch concatenates their media."""
    return {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in media.items() if name not in BY_TOKEN}


def _attention(batch: DecodingBatch) -> AbstractContextManager[None]:
    """Return a context for attention over sequences that grow by a token.

    cuDNN plans its kernels for each length, which takes longer than the forward pass. It is disabled without a mask,
    where flash attention is as fast; with a mask, lengths are rounded (`ModelRunner.stride`).
    """
    if batch.padded or batch.runner.device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    context: AbstractContextManager[None] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return context


def _unwrap_model(source: WeightSource) -> Any:
    """Return the transformers model of an object with `.model`, a compiled or a distributed module."""
    from transformers import PreTrainedModel

    model: Any = source
    for name in ("_orig_mod", "module"):  # torch.compile, DistributedDataParallel
        if isinstance(model, torch.nn.Module) and isinstance(inner := model._modules.get(name), torch.nn.Module):
            model = inner
    # The `.model` of a transformers or PEFT model is its backbone.
    while not isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config") and hasattr(model, "model"):
        model = model.model
    if not isinstance(model, torch.nn.Module) or not (hasattr(model, "config") and hasattr(model, "generate")):
        raise ValueError(
            f"model: got {type(source).__name__}, expected a transformers model or an object with `.model`"
        )
    return model


def _end_ids(model: PreTrainedModel, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return all ids that end a response: of the generation config, the model's configs and the tokenizer."""
    end_ids: set[int] = set()
    text = model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else None
    for holder in (getattr(model, "generation_config", None), model.config, text, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        end_ids.update(token for token in (ids if isinstance(ids, (list, tuple)) else [ids]) if isinstance(token, int))
    return frozenset(token for token in end_ids if token >= 0)
