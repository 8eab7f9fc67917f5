"""Reward models: any torch module or transformers sequence classifier as a reward, in batches of a bounded size.

Invariant: the score of a sample depends neither on the other samples of its batch, except for rounding, nor on the side
of the padding. The model is left in its original mode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from rollbook.core.checks import check_choice, check_int
from rollbook.core.rows import Spans
from rollbook.core.vocabulary import Tokenizer, tokenizer_fingerprint
from rollbook.models.head import scoring
from rollbook.models.loading import load_classifier, reject_hub_kernels
from rollbook.rewards.types import (
    OnError,
    Reward,
    RewardInput,
    RewardResult,
    as_inputs,
    check_on_error,
    failed_score,
    locate,
    log_failures,
)

if TYPE_CHECKING:
    from rollbook.models.loading import ModelSource

__all__ = ["ModelReward"]

ScoreFunction = Callable[[Any], torch.Tensor]
"""Maps the output of a model to scores (B,)."""
ModelOutput: TypeAlias = "torch.Tensor | Mapping[str, Any]"
"""Output of a model; those of transformers are mappings."""


class ModelReward(Reward):
    """Score of a model for prompt and response.

    The model runs in eval mode without gradients. A score that is not finite is the error of its sample; a wrong number
    of scores is raised.

    Args:
        model: An `nn.Module` that is called with (sequences (B, S), attention_mask (B, S)) and returns (B,) or (B, 1),
            a dict with `score` (or `rewards`), or an output with `logits`; or a transformers sequence classifier: a
            module, a config (fresh weights), a local path or a hub name. The score of a decoder's classifier is that
            of the last attended token.
        name: Name in errors and metrics.
        tokenizer: Tokenizer of the model. Without one, or with that of the policy, the sampled ids are used unchanged;
            otherwise the texts are tokenized.
        policy_tokenizer: Tokenizer of the policy.
        template: How texts are tokenized: through the chat template if there are messages (`auto`), always (`chat`), or
            concatenated (`text`).
        score: Function from the model's output to (B,), if it has several numbers per sample.
        batch_size: Largest number of samples per batch.
        token_budget: Largest number of tokens per batch, with padding.
        max_length: A longer sample is an error of that sample.
        padding_side: Matters only to modules that look at a fixed position.
        pad_token_id: Fills the padding.
        device: Device to move the model to.
        dtype: Data type of the model.
        on_error: As in `FunctionReward`.

    >>> class Longest(torch.nn.Module):
    ...     def forward(self, sequences, attention_mask):
    ...         return attention_mask.sum(-1)
    >>> reward = ModelReward(Longest(), batch_size=2)
    >>> reward([RewardInput(prompt="", response="", prompt_ids=[5], response_ids=[6] * n) for n in (3, 1, 2)]).rewards
    [4.0, 2.0, 3.0]
    """

    def __init__(
        self,
        model: ModelSource,
        *,
        name: str | None = None,
        tokenizer: Tokenizer | None = None,
        policy_tokenizer: Tokenizer | None = None,
        template: Literal["auto", "chat", "text"] = "auto",
        score: ScoreFunction | None = None,
        batch_size: int = 16,
        token_budget: int | None = None,
        max_length: int | None = None,
        padding_side: Literal["right", "left"] = "right",
        pad_token_id: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        on_error: OnError = "exclude",
    ) -> None:
        self.model = _load_model(model, dtype)
        if device is not None:
            self.model.to(device)
        self.name = name or type(self.model).__name__
        check_choice("template", template, ("auto", "chat", "text"))
        check_choice("padding_side", padding_side, ("right", "left"))
        is_same = tokenizer is not None and tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(policy_tokenizer)
        self._tokenizer = None if is_same else tokenizer
        self._template = template
        self._score = score
        self.batch_size = check_int("batch_size", batch_size, 1)
        self.token_budget = None if token_budget is None else check_int("token_budget", token_budget, 1)
        self.max_length = None if max_length is None else check_int("max_length", max_length, 1)
        self._padding_side = padding_side
        self._pad_id = _find_pad_id(self.model, tokenizer or policy_tokenizer, pad_token_id)
        self._classifier = _decoder_classifier(self.model)
        self.on_error: OnError = check_on_error(on_error)

    def __call__(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples."""
        inputs = as_inputs(inputs)
        scores = RewardResult(rewards=[nan] * len(inputs))
        if not inputs:
            return scores
        ids = [self._tokenize(scored) for scored in inputs]
        valid: list[int] = []
        for i, row in enumerate(ids):
            if not row:
                scores.errors[i] = "got no token ids, expected prompt_ids and response_ids, or a tokenizer"
            elif self.max_length is not None and len(row) > self.max_length:
                scores.errors[i] = f"got {len(row)} tokens, expected at most {self.max_length} (max_length)"
            else:
                valid.append(i)
        with scoring(self.model):
            for positions in _plan_batches([len(ids[i]) for i in valid], self.batch_size, self.token_budget):
                batch = [valid[k] for k in positions]
                batch_scores = self._score_batch([ids[i] for i in batch], [inputs[i] for i in batch])
                for i, value in zip(batch, batch_scores, strict=True):
                    scores.rewards[i] = value
                    if not isfinite(value):
                        scores.errors[i] = f"gave {value}, expected a finite number"
        for i, error in enumerate(scores.errors):
            if error is not None:
                scores.errors[i] = f"{self.name}: {error}"
                scores.rewards[i] = failed_score(self.on_error, locate(inputs[i], i), f"{self.name}: {error}")
        return log_failures(self.name, scores)

    def _tokenize(self, scored: RewardInput) -> list[int]:
        if self._tokenizer is None:
            return [*scored.prompt_ids, *scored.response_ids]
        tokenizer = self._tokenizer
        uses_template = self._template == "chat" or (
            self._template == "auto" and scored.messages is not None and getattr(tokenizer, "chat_template", None)
        )
        if not uses_template:
            return list(tokenizer(scored.query).input_ids)
        prompt = scored.messages if scored.messages is not None else [{"role": "user", "content": scored.prompt}]
        messages = [*(dict(message) for message in prompt), {"role": "assistant", "content": scored.response}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)  # type: ignore[attr-defined]
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    def model_arguments(self, inputs: Sequence[RewardInput]) -> dict[str, Any]:
        """Return arguments of the model beside tokens and mask; subclasses may have some.

        Args:
            inputs: The samples of a batch.

        Returns:
            Arguments by name; none here.
        """
        return {}

    def _score_batch(self, rows: Sequence[Sequence[int]], inputs: Sequence[RewardInput]) -> list[float]:
        parameter = next(chain(self.model.parameters(), self.model.buffers()), None)
        device = parameter.device if parameter is not None else torch.device("cpu")
        lengths = [len(row) for row in rows]
        pads_right = self._padding_side == "right" or self._classifier is not None
        width = max(lengths)
        spans = Spans(lengths, [0] * len(rows), width) if pads_right else Spans.right_aligned(lengths, width)
        sequences = spans.pad(torch.tensor([*chain.from_iterable(rows)], dtype=torch.int64), self._pad_id).to(device)
        mask = spans.mask(torch.int64).to(device)
        if self._classifier is not None and self._score is None:
            # The classifier's own pooling takes the last token that is not the pad token, which is wrong if the pad
            # token is also the end token.
            hidden = self._classifier.base_model(input_ids=sequences, attention_mask=mask).last_hidden_state
            last = hidden[torch.arange(len(rows), device=device), mask.sum(-1) - 1]
            output: Any = self._classifier.score(last)
        else:
            extras = self.model_arguments(inputs)
            if "attention_mask" in inspect.signature(self.model.forward).parameters:
                output = self.model(sequences, attention_mask=mask, **extras)  # not always the second
            else:
                output = self.model(sequences, mask, **extras)
        scores = torch.as_tensor(self._score(output) if self._score is not None else _extract_scores(output))
        if scores.dim() == 2 and scores.shape[1] == 1:
            scores = scores[:, 0]
        if tuple(scores.shape) != (len(rows),):
            hint = "; score=... picks one of several numbers" if scores.dim() > 1 else ""
            raise ValueError(
                f"{self.name}: gave scores of shape {list(scores.shape)}, expected [{len(rows)}], one a sample{hint}"
            )
        return [float(score) for score in scores.detach().float().tolist()]


def _load_model(model: ModelSource, dtype: torch.dtype | None) -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
        return model if dtype is None else model.to(dtype)
    try:
        from transformers import AutoModelForSequenceClassification, PretrainedConfig
    except ImportError:
        raise ImportError(
            "a reward model by path or config needs transformers: install the extra 'models' of Rollbook"
        ) from None
    if isinstance(model, PretrainedConfig):
        if model.num_labels != 1:
            raise ValueError(f"model: got a config with num_labels {model.num_labels}, expected 1: fresh weights")
        reject_hub_kernels(model, "model")
        classifier: torch.nn.Module = AutoModelForSequenceClassification.from_config(model, trust_remote_code=False)  # type: ignore[no-untyped-call]
        return classifier if dtype is None else classifier.to(dtype)
    if isinstance(model, (str, Path)):
        return load_classifier(str(model), dtype or "auto")
    raise ValueError(f"model: got {type(model).__name__}, expected a torch module, a transformers config or a path")


def _find_pad_id(model: torch.nn.Module, tokenizer: Tokenizer | None, pad_token_id: int | None) -> int:
    """Return the token id of the padding. It is masked, but must be a valid row of the embedding."""
    if pad_token_id is not None:
        return check_int("pad_token_id", pad_token_id)
    for holder in (tokenizer, getattr(model, "config", None)):
        token = getattr(holder, "pad_token_id", None)
        if isinstance(token, int) and token >= 0:
            return token
    return 0


def _decoder_classifier(model: torch.nn.Module) -> Any:
    """Return the model, without adapters around it, if it is a classifier of transformers that pools the last token;
    else `None`."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]  # peft: the same modules, with the adapters inside
    head, prefix = getattr(model, "score", None), getattr(model, "base_model_prefix", "")
    return model if isinstance(head, torch.nn.Module) and prefix and hasattr(model, prefix) else None


def _extract_scores(output: ModelOutput) -> torch.Tensor:
    """Return the scores in the output of a model."""
    if isinstance(output, torch.Tensor):
        return output
    for name in ("score", "scores", "rewards", "logits"):
        if isinstance(output, Mapping) and name in output:
            return torch.as_tensor(output[name])
        scores = getattr(output, name, None)
        if isinstance(scores, torch.Tensor):
            return scores
    raise ValueError(
        f"reward model: gave {type(output).__name__}, expected a tensor, or an output with score or logits"
    )


def _plan_batches(lengths: Sequence[int], batch_size: int, token_budget: int | None) -> list[list[int]]:
    """Assign samples to batches of similar lengths, the longest first, so that running out of memory shows at once.

    >>> _plan_batches([3, 9, 4, 8], batch_size=2, token_budget=None)
    [[1, 3], [2, 0]]
    >>> _plan_batches([3, 9, 4, 8], batch_size=9, token_budget=9)
    [[1], [3], [2, 0]]
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        batch = batches[-1] if batches else []
        longest = lengths[batch[0]] if batch else 0
        is_over_budget = token_budget is not None and longest * (len(batch) + 1) > token_budget
        if not batch or len(batch) >= batch_size or is_over_budget:
            batches.append([i])
        else:
            batch.append(i)
    return batches
