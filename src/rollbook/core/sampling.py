"""Inputs and outputs of engines: prompts, sampling options, samples, and the description of a run.

Invariant: sampled tokens are kept as they were sampled, never tokenized again, truncated or completed. `logprobs` and
`versions` have an entry for each id of `response_ids`, or are `None`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from rollbook.core.checks import check_bool, check_choice, check_float, check_int, suggest
from rollbook.core.ids import EID

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from rollbook.core.experience import Experience
    from rollbook.core.media import Medium

__all__ = ["Prompt", "RunInfo", "Sample", "Sampling"]

LogprobsKind = Literal["processed", "tempered", "raw"]
"""Distribution that log-probs refer to.

- `processed`: the one that tokens were sampled from, after temperature and truncation (top-k, top-p, min-p).
- `tempered`: after temperature and without suppressed tokens, before truncation, as a training forward pass at that
  temperature computes.
- `raw`: that of the model's logits, at temperature 1.
"""
KINDS: tuple[str, ...] = get_args(LogprobsKind)

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
"""Why a response ended. `abort`: paused or canceled before it was complete. `error`: the response failed."""

Overflow = Literal["error", "left", "right"]

TokenIds: TypeAlias = "Sequence[int] | NDArray[Any] | torch.Tensor"
PromptSource: TypeAlias = Any
"""A `Prompt`, text, chat messages or token ids, of any type until `Prompt.of` has checked it."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt: exactly one of `text`, `messages` and `token_ids`, with its media.

    Args:
        text: Plain text.
        messages: Chat messages.
        token_ids: Token ids.
        images: Images of this prompt.
        videos: Videos of this prompt.
        tools: Tools offered to the model, with `messages`.
        eid: Batch and task. The samples of the prompt are the runs of that task and form one group.
        reference: Reference answer, passed on to rewards and records.
        label: Label of the task, passed on to rewards and records.
        info: Other data, passed on to rewards and records.

    >>> Prompt.of("2 + 2 =").text, Prompt.of([5, 6]).token_ids, Prompt.of([{"role": "user", "content": "hi"}]).messages
    ('2 + 2 =', (5, 6), ({'role': 'user', 'content': 'hi'},))
    >>> Prompt.of(17)
    Traceback (most recent call last):
        ...
    ValueError: prompt: got int (17), expected text, chat messages, token ids or a Prompt
    """

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    token_ids: Sequence[int] | None = None
    images: Sequence[Any] = ()
    videos: Sequence[Any] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    eid: EID | None = None
    reference: Any = None
    label: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.text is not None) + (self.messages is not None) + (self.token_ids is not None) != 1:
            forms = [name for name in ("text", "messages", "token_ids") if getattr(self, name) is not None]
            raise ValueError(
                f"prompt: got {' and '.join(forms) or 'nothing'}, expected one of text, messages, token_ids"
            )
        if self.text is not None and not isinstance(self.text, str):
            raise ValueError(f"prompt.text: got {type(self.text).__name__}, expected a str")
        if self.messages is not None:
            object.__setattr__(self, "messages", tuple(self.messages))
            for i, message in enumerate(self.messages):
                if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                    raise ValueError(f"prompt.messages[{i}]: got {message!r}, expected a mapping with a 'role'")
        if self.token_ids is not None:
            object.__setattr__(self, "token_ids", token_ids("prompt.token_ids", self.token_ids))
        if self.tools is not None and self.messages is None:
            raise ValueError("prompt.tools: got tools without messages, expected them beside a chat")
        for name in ("images", "videos"):
            media = getattr(self, name)
            if not isinstance(media, tuple) or media:
                object.__setattr__(self, name, as_media(f"prompt.{name}", media))

    @classmethod
    def of(cls, source: PromptSource) -> Prompt:
        """Convert to a prompt.

        Args:
            source: Text, chat messages, token ids (a list, an array or a tensor), or a `Prompt`, which is returned
                unchanged.

        Returns:
            The prompt.

        Raises:
            ValueError: `source` is none of these.
        """
        if isinstance(source, Prompt):
            return source
        if isinstance(source, str):
            return cls(text=source)
        if hasattr(source, "tolist"):
            return cls(token_ids=source.tolist())
        if isinstance(source, Sequence) and source and isinstance(source[0], Mapping):
            return cls(messages=source)
        if isinstance(source, Sequence) and not isinstance(source, (bytes, bytearray)):
            return cls(token_ids=source)
        description = f"{type(source).__name__} ({source!r})"
        raise ValueError(f"prompt: got {description}, expected text, chat messages, token ids or a Prompt")

    def replace(self, **changes: Any) -> Prompt:
        """Return a copy with some fields changed.

        Args:
            changes: New values, by field name.

        Returns:
            The new prompt.
        """
        return dataclasses.replace(self, **changes)


def token_ids(name: str, ids: TokenIds) -> tuple[int, ...]:
    """Convert token ids to a tuple.

    Args:
        name: Name for error messages.
        ids: A sequence, an array or a tensor.

    Returns:
        The ids.

    Raises:
        ValueError: An entry is not a token id.
    """
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise ValueError(f"{name}: got {type(ids).__name__}, expected a list of token ids")
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral) or int(token) < 0:
            raise ValueError(f"{name}[{i}]: got {token!r}, expected a token id")
    return tuple(map(int, ids))


def as_media(name: str, media: Medium | Sequence[Medium] | None) -> tuple[Any, ...]:
    """Convert the images or videos of a prompt to a tuple.

    Args:
        name: Name for error messages.
        media: `None`, one image or video, or a list of them.

    Returns:
        The media.

    Raises:
        ValueError: An entry of the list is `None`.
    """
    if media is None:
        return ()
    if isinstance(media, (list, tuple)):
        for i, medium in enumerate(media):
            if medium is None:
                raise ValueError(f"{name}[{i}]: got None, expected an image or a video")
        return tuple(media)
    return (media,)


ALIASES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
"""Names of transformers for options of `Sampling`, which `Sampling.of` also takes."""


_RECORDED_KEYS = ("asked_seed", "earlier", "run", "stop_reason")
"""Keys of a record's `sampling` that are not options."""


def _requested_options(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a mapping. For a record, with the seed of the call instead of that of the sample."""
    options = {name: option for name, option in recorded.items() if name not in _RECORDED_KEYS}
    return options | {"seed": recorded["asked_seed"]} if "asked_seed" in recorded else options


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options that every engine supports, validated on construction.

    Args:
        n: Number of samples per prompt.
        max_tokens: Largest number of tokens of a response.
        min_tokens: Smallest number of tokens of a response.
        temperature: 0 takes the most likely token.
        top_p: Nucleus sampling.
        top_k: Number of most likely tokens to sample from; -1 or 0 for all.
        min_p: Smallest probability relative to that of the most likely token.
        first_temperature: Temperature of the first token (FIRE).
        stop: Texts that end a response, in addition to the model's end tokens. Sampled tokens are never cut.
        stop_token_ids: Token ids that end a response.
        include_stop: Whether `Sample.text` keeps the stop text. Special tokens are never in `text`.
        ignore_eos: Continue past the model's end tokens.
        seed: Seed of the random streams. Each sample has its own, derived from the seed and its id, so that it does not
            depend on the rest of the batch. `None`: another one for each call.
        suppress: Token ids that are never sampled, such as image placeholders.
        max_prompt_tokens: Largest number of prompt tokens.
        prompt_overflow: What happens to longer prompts: `error` fails the prompt, `left` and `right` truncate it on
            that side and record it.
        logprobs: Log-probs to record (see `LogprobsKind`), or `None`.
        extra: Options of one server, sent unchanged.

    >>> Sampling(temperature=0.7, top_p=0.9).to_dict()["top_p"]
    0.9
    >>> Sampling.of({"max_new_tokens": 8}, temperature=0.5).max_tokens
    8
    >>> Sampling(top_p=1.5)
    Traceback (most recent call last):
        ...
    ValueError: top_p: got 1.5, expected a number in (0, 1]
    >>> Sampling.of(temprature=1.0)
    Traceback (most recent call last):
        ...
    ValueError: sampling: unknown option 'temprature'; did you mean 'temperature'? (n, max_tokens, min_tokens, temperature, top_p, top_k, min_p, first_temperature, stop, stop_token_ids, include_stop, ignore_eos, seed, suppress, max_prompt_tokens, prompt_overflow, logprobs, extra)
    """  # noqa: E501

    n: int = 1
    max_tokens: int = 1024
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    first_temperature: float | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = True
    ignore_eos: bool = False
    seed: int | None = None
    suppress: Sequence[int] = ()
    max_prompt_tokens: int | None = None
    prompt_overflow: Overflow = "error"
    logprobs: LogprobsKind | None = "processed"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "n", check_int("n", self.n, 1))
        put(self, "max_tokens", check_int("max_tokens", self.max_tokens, 1))
        put(self, "min_tokens", check_int("min_tokens", self.min_tokens))
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: got {self.min_tokens}, expected at most max_tokens ({self.max_tokens})")
        for name in ("temperature", "first_temperature"):
            if getattr(self, name) is not None:
                put(self, name, check_float(name, getattr(self, name), 0, 1e4, "a number >= 0"))
        if self.temperature is None:
            raise ValueError("temperature: got None, expected a number >= 0")
        put(self, "top_p", check_float("top_p", self.top_p, 1e-12, 1, "a number in (0, 1]"))
        put(self, "min_p", check_float("min_p", self.min_p, 0, 1))
        top_k = check_int("top_k", self.top_k, -1)
        put(self, "top_k", -1 if top_k == 0 else top_k)
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise ValueError(f"stop: got {self.stop!r}, expected texts")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for i, text in enumerate(stop):
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop[{i}]: got {text!r}, expected a string that is not empty")
        put(self, "stop", stop)
        for name in ("stop_token_ids", "suppress"):
            ids = getattr(self, name)
            if not isinstance(ids, tuple) or ids:
                put(self, name, () if ids is None else token_ids(name, ids))
        put(self, "include_stop", check_bool("include_stop", self.include_stop))
        put(self, "ignore_eos", check_bool("ignore_eos", self.ignore_eos))
        if self.seed is not None:
            put(self, "seed", check_int("seed", self.seed))
        if self.max_prompt_tokens is not None:
            put(self, "max_prompt_tokens", check_int("max_prompt_tokens", self.max_prompt_tokens, 1))
        check_choice("prompt_overflow", self.prompt_overflow, get_args(Overflow))
        check_choice("logprobs", self.logprobs, (*KINDS, None))
        if not isinstance(self.extra, (Mapping, type(None))):
            raise ValueError(f"extra: got {self.extra!r}, expected a mapping of a server's options")
        put(self, "extra", dict(self.extra or {}))

    @classmethod
    def of(cls, source: Sampling | Mapping[str, Any] | None = None, **options: Any) -> Sampling:
        """Convert to sampling options, with changes.

        Args:
            source: A `Sampling`, a mapping of options (also the `sampling` of a record), or `None` for the defaults.
            options: Options to change.

        Returns:
            The options.

        Raises:
            ValueError: An option is unknown or has an invalid value.
        """
        base = cls() if source is None else source
        changes = dict(options)
        if not isinstance(base, Sampling):
            if not isinstance(base, Mapping):
                raise ValueError(f"sampling: got {type(base).__name__}, expected Sampling or a mapping of its options")
            changes, base = {**_requested_options(base), **changes}, cls()
        names = list(cls.__dataclass_fields__)
        named = {}
        for name, option in changes.items():
            if ALIASES.get(name, name) not in names:
                raise ValueError(f"sampling: unknown option {name!r}{suggest(name, names)}")
            named[ALIASES.get(name, name)] = option
        return dataclasses.replace(base, **named)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values, as records store them."""
        plain = dict(self.__dict__)
        for name in ("stop", "stop_token_ids", "suppress"):
            plain[name] = list(plain[name])
        return plain

    def needs_truncation(self) -> bool:
        """Return whether top-p, top-k or min-p excludes tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Properties that all samples of an engine share.

    Args:
        engine: Name of the engine.
        engine_version: Its version.
        model: Name of the model.
        tokenizer: Fingerprint of the tokenizer.
        chat_template: Fingerprint of the chat template.
        adapter: Name of the adapter.
        seed: Seed of the engine.
        limitations: Descriptions of requested features that the engine does not support.

    >>> run = RunInfo(engine="scripted", engine_version="1", model="none")
    >>> run.to_dict()["engine"], len(run.id)
    ('scripted', 16)
    """

    engine: str
    engine_version: str
    model: str
    tokenizer: str | None = None
    chat_template: str | None = None
    adapter: str | None = None
    seed: int | None = None
    limitations: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Hash of all properties, 16 hex digits, which every sample has as `run_id`."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the properties as plain values."""
        return {**dataclasses.asdict(self), "limitations": list(self.limitations)}


@dataclass(kw_only=True)
class Sample:
    """One response of an engine to a prompt, with P prompt ids and R response ids.

    Args:
        prompt: The prompt.
        eid: Id of the sample; samples of one prompt have the same task.
        prompt_ids: [P] Token ids that the model was given.
        response_ids: [R] Sampled token ids.
        logprobs: [R] Log-probs of the distribution that `logprobs_kind` names.
        logprobs_kind: Kind of the log-probs.
        finish_reason: `stop`, `length`, `tool_calls`, `abort` (an engine can continue it) or `error`.
        stop_reason: The requested stop text or id that ended the response, if any.
        versions: [R] Version of the policy that sampled each token.
        text: Text of the response, without special tokens.
        prompt_text: Text of the prompt.
        sampling: Sampling options, as recorded.
        run_id: `RunInfo.id` of the engine.
        group_size: Number of samples of the prompt.
        error: What went wrong, with finish reason `error`.
        message: Reply of a chat server, with its tool calls.
        media: Processed media of the prompt, one object for all of its samples.
        routed_experts: [R, layers, k] Experts that were selected.
        metrics: Numbers to record.
        info: Other data to record.

    >>> sample = Sample(
    ...     prompt=Prompt(text="2+2="), eid=EID(batch=0, task=7, run=1, suffix="a"), prompt_ids=[5, 6],
    ...     response_ids=[9], logprobs=[-0.5], finish_reason="stop", versions=[3], text="4", group_size=2,
    ... )
    >>> record = sample.to_experience()
    >>> record, record.policy_versions.tolist(), record.group_size
    (Experience(0/7/1/0/a, single_turn, 2+1 tokens), [3], 2)
    """

    prompt: Prompt
    eid: EID
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    logprobs_kind: LogprobsKind | None = "processed"
    finish_reason: FinishReason = "stop"
    stop_reason: str | int | None = None
    versions: Sequence[int] | None = None
    text: str | None = None
    prompt_text: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    run_id: str | None = None
    group_size: int = 1
    error: str | None = None
    message: Mapping[str, Any] | None = None
    media: Mapping[str, Any] | None = None
    routed_experts: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("logprobs", "versions"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != len(self.response_ids):
                raise ValueError(
                    f"{name}: got {len(entries)} entries, expected {len(self.response_ids)}, one for each response id"
                )
        check_choice("finish_reason", self.finish_reason, get_args(FinishReason))
        if (self.error is None) == (self.finish_reason == "error"):
            raise ValueError(
                f"error: got {self.error!r} with finish_reason {self.finish_reason!r}, expected both or none"
            )
        check_choice("logprobs_kind", self.logprobs_kind, (*KINDS, None))

    @property
    def group_id(self) -> str:
        """Id of the task, which the samples of one prompt share."""
        return self.eid.tid

    @property
    def failed(self) -> bool:
        """Whether the sample failed."""
        return self.finish_reason == "error"

    @property
    def unfinished(self) -> bool:
        """Whether an engine can continue it."""
        return self.finish_reason == "abort"

    def replace(self, **changes: Any) -> Sample:
        """Return a copy with some fields changed.

        Args:
            changes: New values, by field name.

        Returns:
            The new sample.
        """
        return dataclasses.replace(self, **changes)

    def to_experience(self) -> Experience:
        """Convert the sample to a record.

        The record of a failed sample has the response as far as it was sampled, an all-False mask, a reward of NaN
        and `info["error"]`. `info["images"]` holds the encoded images of the prompt (see `encode_for_record`), unless
        the prompt's own `info` has that key.
        """
        from rollbook.core.experience import Experience
        from rollbook.core.media import encode_for_record, encode_message

        prompt = self.prompt
        succeeded = self.finish_reason != "error"
        info = {**prompt.info, **self.info}
        if prompt.reference is not None:
            info["reference"] = prompt.reference
        if prompt.label is not None:
            info["label"] = prompt.label
        if self.error is not None:
            info["error"] = self.error
        if prompt.images and "images" not in info and (images := encode_for_record(prompt.images)):
            info["images"] = images
        sampling = {**self.sampling, "logprobs": self.logprobs_kind if self.logprobs is not None else None}
        if self.run_id is not None:
            sampling["run"] = self.run_id
        if self.stop_reason is not None:
            sampling["stop_reason"] = self.stop_reason
        mask: dict[str, Any] = {}
        if not succeeded or not self.response_ids or not self.prompt_ids:
            mask = {"action_mask": [succeeded] * len(self.response_ids), "experience_type": "multi_turn"}
        messages = prompt.messages
        if messages is not None and self.message is not None:
            messages = [*messages, self.message]
        return Experience(
            eid=self.eid,
            tokens=[*self.prompt_ids, *self.response_ids],
            prompt_length=len(self.prompt_ids),
            logprobs=self.logprobs,
            policy_versions=None if self.versions is None else list(self.versions),
            finish_reason=self.finish_reason,
            truncate_status="response_truncated" if self.finish_reason == "length" else None,
            response_text=self.text,
            prompt_text=self.prompt_text if self.prompt_text is not None else prompt.text,
            messages=None if messages is None else [encode_message(message) for message in messages],
            tools=None if prompt.tools is None else [dict(tool) for tool in prompt.tools],
            multi_modal_inputs=self.media,
            routed_experts=self.routed_experts,
            sampling=sampling,
            group_size=self.group_size,
            info=info,
            metrics=self.metrics,
            reward=None if succeeded else math.nan,
            **mask,
        )
