"""Reward types: `RewardInput` (one per sample), `RewardResult` (for all samples) and the `Reward` protocol.

Invariant: a score is a finite float, or NaN with an error for the sample. Rewards, errors and every metric have one
entry per sample, in the order of the inputs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeGuard, TypeVar, runtime_checkable

from rollbook.core.checks import check_float
from rollbook.core.errors import RollbookError
from rollbook.core.ids import EID
from rollbook.core.vocabulary import Tokenizer, source_fingerprint

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image
    import torch

    from rollbook.core.experience import Experience
    from rollbook.core.sampling import Sample

__all__ = ["Reward", "RewardError", "RewardInput", "RewardResult", "WrongCountError"]

T = TypeVar("T")

OnError = Literal["exclude", "raise"] | float
"""What a failure of a sample becomes: no reward (NaN), an exception, or a fixed score."""
Json: TypeAlias = "dict[str, Any] | list[Any] | str | float | bool | None"
"""A JSON value."""
Reference: TypeAlias = "str | float | Sequence[Any] | Mapping[str, Any] | None"
"""A reference: a text, a number, a JSON value, or a list of accepted answers."""
RewardSample: TypeAlias = "RewardInput | Sample | Experience"
"""What a reward scores."""
Image: TypeAlias = "str | bytes | os.PathLike[str] | Mapping[str, Any] | np.ndarray | PIL.Image.Image"
"""An image as `rollbook.core.media` reads it."""

log = logging.getLogger("rollbook.rewards")


class WrongCountError(RollbookError, ValueError):
    """Raised when a reward returns a wrong number of scores, for every `on_error`."""


class RewardError(RollbookError, RuntimeError):
    """Raised when a sample cannot be scored and `on_error` is `raise`.

    >>> from rollbook.rewards import as_reward
    >>> as_reward(lambda response: 1 / 0, on_error="raise")([RewardInput(prompt="", response="")])
    Traceback (most recent call last):
        ...
    rollbook.rewards.types.RewardError: sample 0: <lambda>: ZeroDivisionError: division by zero
    """


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """A sample to score.

    Args:
        prompt: Text that the model was given.
        response: Text that the model wrote, without tool outputs and special tokens.
        reference: Reference answer.
        label: Label of the row, which selects the components of a `Recipe`.
        messages: Chat before the response.
        images: Images of the prompt; files are `pathlib.Path`s. An image that is text, as in records, is never opened.
        prompt_ids: Token ids of the prompt.
        response_ids: Token ids of the response.
        eid: Id of the sample.
        finish_reason: Why the response ended.
        info: Other columns of the row.

    >>> sample = RewardInput(prompt="2 + 2 = ", response="4", reference="4")
    >>> sample.query
    '2 + 2 = 4'
    """

    prompt: str
    response: str
    reference: Any = None
    label: Any = None
    messages: Sequence[Mapping[str, Any]] | None = None
    images: Sequence[Any] = ()
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    eid: EID | None = None
    finish_reason: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("prompt", "response"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}: got {type(getattr(self, name)).__name__}, expected a str")

    @property
    def query(self) -> str:
        """Prompt and response, concatenated, as LightRFT sends them to remote reward models."""
        return self.prompt + self.response

    @classmethod
    def of(cls, source: RewardInput | Sample | Experience, tokenizer: Tokenizer | None = None) -> RewardInput:
        """Build the input from a `Sample` of an engine or from a record; a `RewardInput` is returned unchanged.

        Args:
            source: The sample or record.
            tokenizer: Decodes texts that it does not carry.

        Raises:
            ValueError: It has no response text, and there is no tokenizer.

        >>> from rollbook.core.ids import EID
        >>> from rollbook.rollout import Prompt, Sample
        >>> sample = Sample(prompt=Prompt(text="2+2=", reference="4"), eid=EID(0, 1), prompt_ids=[5], response_ids=[6],
        ...                 text="4", finish_reason="stop")
        >>> scored = RewardInput.of(sample)
        >>> scored.prompt, scored.response, scored.reference, scored.response_ids
        ('2+2=', '4', '4', [6])
        """
        from rollbook.core.sampling import Sample

        if isinstance(source, cls):
            return source
        if isinstance(source, Sample):
            return cls._from_sample(source, tokenizer)
        from rollbook.core.experience import Experience

        if not isinstance(source, Experience):
            raise ValueError(f"sample: got {type(source).__name__}, expected a Sample, an Experience or a RewardInput")
        if source.response_text is None and tokenizer is None:
            raise ValueError(f"experience {source.eid}: got no response text and no tokenizer, expected one of them")
        return cls.from_record(source, tokenizer)

    @classmethod
    def from_record(cls, record: Experience, tokenizer: Tokenizer | None = None) -> RewardInput:
        """Build the input from a record. It equals the input from the `Sample` that the record was created from.

        Images are those that the record keeps, with the same pixels; a path in a record stays text and is not opened.
        If a multi-turn record has no response text, the response is what its mask marks as written by the model, one
        turn per line, without the observations.

        Args:
            record: The record.
            tokenizer: Decodes texts that the record does not carry. Without one, such a text is "", for rewards that
                do not read it.

        >>> from rollbook.core.experience import Experience
        >>> record = Experience(tokens=[5, 6], prompt_length=1, prompt_text="2+2=", info={"reference": "4", "level": 1})
        >>> scored = RewardInput.from_record(record)
        >>> scored.query, scored.reference, scored.info
        ('2+2=', '4', {'level': 1})
        """
        ids = record.tokens.tolist()
        prompt_ids, response_ids = ids[: record.prompt_length], ids[record.prompt_length :]
        messages = record.messages
        if messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]  # that is the response
        response = record.response_text
        if response is None:
            mask = [True] * len(response_ids) if record.action_mask is None else record.action_mask.tolist()
            response = "" if tokenizer is None else _decode_turns(tokenizer, _split_turns(response_ids, mask))
        prompt = record.prompt_text
        if prompt is None:
            prompt = _prompt_text(prompt_ids, messages, tokenizer)
        # `Sample.to_experience` adds the fields of the prompt and the error to the info of the record.
        info = dict(record.info or {})
        reference, label = info.pop("reference", None), info.pop("label", None)
        info.pop("error", None)
        has_images = isinstance(info.get("images"), (list, tuple))
        return cls(
            prompt=prompt,
            response=response,
            reference=reference,
            label=label,
            messages=messages,
            images=tuple(map(_path_to_text, info.pop("images"))) if has_images else (),
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            eid=record.eid,
            finish_reason=record.finish_reason,
            info=info,
        )

    @classmethod
    def _from_sample(cls, sample: Sample, tokenizer: Tokenizer | None) -> RewardInput:
        from rollbook.core.media import as_path

        prompt, response = sample.prompt, sample.text
        if response is None:
            if tokenizer is None:
                raise ValueError(f"sample {sample.eid}: got no response text and no tokenizer, expected one of them")
            response = _decode_turns(tokenizer, [sample.response_ids])
        text = sample.prompt_text if sample.prompt_text is not None else prompt.text
        return cls(
            prompt=text if text is not None else _prompt_text(sample.prompt_ids, prompt.messages, tokenizer),
            response=response,
            reference=prompt.reference,
            label=prompt.label,
            messages=prompt.messages,
            images=tuple(map(as_path, prompt.images)),
            prompt_ids=list(sample.prompt_ids),
            response_ids=list(sample.response_ids),
            eid=sample.eid,
            finish_reason=sample.finish_reason,
            info={**prompt.info, **sample.info},
        )


def _prompt_text(ids: Sequence[int], messages: Sequence[Mapping[str, Any]] | None, tokenizer: Tokenizer | None) -> str:
    """Return the text of a prompt that was not recorded: decoded, else the contents of its messages."""
    if tokenizer is not None and len(ids):
        return str(tokenizer.decode(list(ids)))
    return "\n".join(_content(message) for message in messages or ())


def _path_to_text(image: Image) -> Image:
    """Turn a path in a record into text."""
    from rollbook.core.media import unwrap

    content = unwrap(image)
    return str(content) if isinstance(content, os.PathLike) else image


def as_inputs(samples: Sequence[RewardSample]) -> list[RewardInput]:
    """Convert samples to inputs.

    Args:
        samples: `Sample`s, `Experience`s or `RewardInput`s.

    Raises:
        ValueError: It is not a list.

    >>> as_inputs(RewardInput(prompt="", response=""))
    Traceback (most recent call last):
        ...
    ValueError: inputs: got a single RewardInput, expected a list of samples
    """
    if isinstance(samples, (str, bytes, Mapping)) or not isinstance(samples, Iterable):
        raise ValueError(f"inputs: got a single {type(samples).__name__}, expected a list of samples")
    return list(map(RewardInput.of, samples))


def _content(message: Mapping[str, Any]) -> str:
    """Return the text of a chat message: its content, or its text parts."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def _decode_turns(tokenizer: Tokenizer, turns: Sequence[Sequence[int]]) -> str:
    return "\n".join(tokenizer.decode(list(turn), skip_special_tokens=True) for turn in turns)


def _split_turns(ids: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """Return each consecutive run of ids that the mask selects."""
    runs: list[list[int]] = []
    previous = False
    for token, counts in zip(ids, mask, strict=True):
        if counts:
            if not previous:
                runs.append([])
            runs[-1].append(token)
        previous = bool(counts)
    return runs


@dataclass(kw_only=True)
class RewardResult:
    """The scores of B samples.

    Args:
        rewards: [B] Rewards; NaN for samples without one.
        metrics: [B] each, by name; NaN if a component does not apply to a sample.
        errors: [B] Errors of samples, or `None`. A sample with an error may have a fixed reward (`on_error`).
        parts: Names of the metrics that the reward is a weighted sum of; others are only logged.

    >>> result = RewardResult(rewards=[1, nan], metrics={"accuracy": [1, nan]}, errors=[None, "timed out"])
    >>> result.to_tensors()
    (tensor([1., nan]), {'accuracy': tensor([1., nan])})
    >>> RewardResult(rewards=[1.0], errors=[None, None])
    Traceback (most recent call last):
        ...
    ValueError: errors: got 2 entries, expected 1, one for each reward
    """

    rewards: list[float]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str | None] = field(default_factory=list)
    parts: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        self.rewards = list(map(float, self.rewards))
        self.errors = list(self.errors) or [None] * len(self.rewards)
        metrics, self.metrics = self.metrics, {}
        for name, numbers in metrics.items():
            self.metrics[str(name)] = list(map(float, numbers))
        columns: dict[str, Sequence[Any]] = {"errors": self.errors, **self.metrics}
        for name, column in columns.items():
            if len(column) != len(self.rewards):
                raise ValueError(
                    f"{name}: got {len(column)} entries, expected {len(self.rewards)}, one for each reward"
                )

    def __len__(self) -> int:
        return len(self.rewards)

    def to_tensors(self, device: torch.device | str | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return rewards (B,) and metrics by name (B,), in float32.

        Args:
            device: Device of the tensors.
        """
        import torch

        metrics = {
            name: torch.tensor(values, dtype=torch.float32, device=device) for name, values in self.metrics.items()
        }
        return torch.tensor(self.rewards, dtype=torch.float32, device=device), metrics


@runtime_checkable
class Reward(Protocol):
    """Base class of rewards. A custom one derives from it and implements `__call__`.

    Attributes:
        waits: Whether most of its time is spent waiting, so that several such rewards run concurrently.

    >>> class LengthReward(Reward):
    ...     def __call__(self, inputs):
    ...         return RewardResult(rewards=[len(sample.response) for sample in inputs])
    >>> LengthReward()([RewardInput(prompt="", response="four")]).rewards
    [4.0]
    """

    waits: bool = False

    def __call__(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples.

        Args:
            inputs: `RewardInput`s. The rewards of this package also take `Sample`s and `Experience`s.

        Returns:
            The scores, in the order of the inputs.
        """
        ...

    async def score_async(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples without blocking the event loop.

        Args:
            inputs: The samples, in any form that `as_inputs` takes.

        Returns:
            Rewards, metrics and errors of the samples.
        """
        return await asyncio.to_thread(self, inputs)

    def source(self) -> str | None:
        """Return the fingerprint of the user's code that scores; `None` if there is none or it is unknown."""
        return source_fingerprint(type(self))

    def close(self) -> None:
        """Release processes and connections."""
        return


def is_reward(candidate: object) -> TypeGuard[Reward]:
    """Return whether an object is a reward: of a class that derives from `Reward`.

    Methods do not matter: a mock object has all of them.

    >>> is_reward(len)
    False
    """
    return Reward in type(candidate).__mro__


def check_on_error(value: OnError) -> OnError:
    """Check the `on_error` of a reward.

    >>> check_on_error("exclude"), check_on_error(-1)
    ('exclude', -1.0)
    """
    if value in ("exclude", "raise"):
        return value
    return check_float("on_error", value, -1e30, 1e30, "'exclude', 'raise' or a fixed score")


def failed_score(on_error: OnError, prefix: str, error: str) -> float:
    """Return the score of a failed sample, or raise `RewardError`."""
    if on_error == "raise":
        raise RewardError(f"{prefix}: {error}")
    return nan if on_error == "exclude" else float(on_error)


def as_float(value: Any) -> float:
    """Convert a score: an int, a bool, a NumPy number, or a tensor or array of one element.

    Raises:
        ValueError: It is not a finite number.

    >>> import numpy as np
    >>> as_float(True), as_float(np.float32(0.5)), as_float(np.array([2]))
    (1.0, 0.5, 2.0)
    >>> as_float("high")
    Traceback (most recent call last):
        ...
    ValueError: gave str ('high'), expected a number
    """
    if not isinstance(value, Number) and hasattr(value, "item") and hasattr(value, "shape"):
        size = 1
        for width in value.shape:
            size *= int(width)
        if size != 1:
            raise ValueError(f"gave an array of shape {list(value.shape)}, expected a number")
        value = value.item()
    if not isinstance(value, Number) or isinstance(value, complex):
        raise ValueError(f"gave {type(value).__name__} ({_shorten(value)}), expected a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (OverflowError, TypeError):
        raise ValueError(f"gave {_shorten(value)}, expected a number that a float can hold") from None
    if not isfinite(number):
        raise ValueError(f"gave {number}, expected a finite number")
    return number


def _shorten(value: object, width: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def locate(sample: RewardInput, index: int) -> str:
    """Return the name of a sample in errors: its id, or its index."""
    return f"sample {index}" if sample.eid is None else f"sample {sample.eid.uid}"


def log_failures(name: str, scores: RewardResult) -> RewardResult:
    """Log once per call how many samples failed, and the first error; never the contents of samples."""
    if scores.errors.count(None) < len(scores):
        failed = [error for error in scores.errors if error is not None]
        unscored = sum(map(isnan, scores.rewards))
        log.warning("%s: %d of %d samples failed (%d without a reward); the first: %s",
                    name, len(failed), len(scores), unscored, failed[0])  # fmt: skip
    return scores


def run_sync(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end, from plain code or from inside a running event loop.

    >>> async def five():
    ...     return 5
    >>> run_sync(five)
    5
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    # Waiting in the running loop would block it forever, so the coroutine runs in another thread.
    values: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            values.append(asyncio.run(make()))
        except BaseException as error:
            raised.append(error)

    worker = threading.Thread(target=work, name="rollbook-reward", daemon=True)
    worker.start()
    worker.join()
    if raised:
        raise raised[0]
    return values[0]
