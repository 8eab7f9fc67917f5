"""Supervised data and warm-up: rows with a `response` for SFT, with `chosen` and `rejected` for DPO.

Invariant: the ids of a prompt are those that an engine would pass to the model. The ids of an answer end with the end
token, or the record is marked as truncated. A warm-up depends only on its seed and the rows; the rows that measure its
success are held out from its training rows, and are not the evaluation rows of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rollbook.batch.media import placeholders
from rollbook.core.checks import check_choice, check_float, check_int
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.ids import EID
from rollbook.core.metrics import StepMetrics
from rollbook.core.sampling import Overflow, Prompt, Sampling
from rollbook.core.vocabulary import Tokenizer
from rollbook.rollout.chat import Renderer
from rollbook.rollout.transformers import PreparedPrompt, PromptPreparer, TransformersEngine
from rollbook.train.evaluation import AllSamplesFailedError, evaluate
from rollbook.train.learner import Learner, MinibatchConfig
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.prompts import ANSWERS, Prompts

if TYPE_CHECKING:
    from rollbook.models import Actor
    from rollbook.rewards.recipes import RewardLike
    from rollbook.rollout.engine import SamplingLike

__all__ = ["WarmupConfig", "WarmupResult", "records_from_answers", "warm_up"]

log = logging.getLogger("rollbook.train")

Data = Literal["answers", "pairs"]
Answer = str | Mapping[str, Any]
"""A text, or a message of the assistant."""
_SUFFIXES = {"answers": "sft", "pairs": "dpo"}
"""Suffixes of the ids of records."""


def records_from_answers(
    prompts: Prompts | Sequence[Mapping[str, Any] | Prompt],
    tokenizer: Tokenizer | None,
    data: Data = "answers",
    *,
    processor: Tokenizer | None = None,
    max_tokens: int | None = None,
    max_prompt_tokens: int | None = None,
    prompt_overflow: Overflow = "error",
    long_prompts: Literal["drop", "error"] = "drop",
    eos_token_id: int | None = None,
    add_special_tokens: bool = False,
    batch: int | str = 0,
    metrics: StepMetrics | None = None,
) -> Experiences:
    """Build records of prompts and their answers.

    Args:
        prompts: Prompts, or rows of data. Prompts keep their ids; without ids they are tasks of `batch`, numbered by
            row. All rows of `Prompts` are taken, in the order of the data.
        tokenizer: Encodes prompts and answers; may be a processor.
        data: `answers` reads the `response` in a prompt's `info`, `pairs` reads `chosen` and `rejected`.
        processor: For prompts with images.
        max_tokens: Tokens of prompt and answer together. A longer answer is cut, without an end: `truncate_status` is
            `response_truncated`, and `info["response_truncated_from"]` (or `chosen_...`, `rejected_...`) has its
            length.
        max_prompt_tokens: Tokens of a prompt.
        prompt_overflow: Whether a longer prompt is cut on the `left` or the `right`, or leaves no room (`error`).
        long_prompts: Whether a prompt that leaves no room for an answer is dropped with a warning, or is an `error`.
        eos_token_id: Ends an answer; the tokenizer's own unless given.
        add_special_tokens: As the engine has it.
        batch: The batch id of prompts without ids.
        metrics: Collects counts (`supervised/records`, `supervised/dropped`, ...).

    Returns:
        A record per prompt, in their order, without prompts that were dropped; for `pairs`, the chosen and the rejected
        answer in one record.

    Raises:
        ValueError: There are no prompts, an answer is missing, or a prompt leaves no room for an answer.

    >>> from transformers import PreTrainedTokenizerFast
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> inner = Tokenizer(models.WordLevel({"<eos>": 0, "2": 1, "+": 2, "=": 3, "4": 4}, unk_token="<eos>"))
    >>> inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    >>> record, = records_from_answers(Prompts([{"prompt": "2+2=", "response": "4"}]).take(1, step=7), tokenizer)
    >>> record, record.tokens.tolist(), record.action_mask.tolist()
    (Experience(7/0/0/0/sft, single_turn, 4+2 tokens), [1, 2, 1, 3, 4, 0], [True, True])
    """
    encoder = _Encoder(
        tokenizer,
        data,
        processor,
        max_tokens,
        long_prompts=long_prompts,
        eos_token_id=eos_token_id,
        add_special_tokens=add_special_tokens,
    )
    if isinstance(prompts, Prompts) or not all(isinstance(row, Prompt) and row.eid is not None for row in prompts):
        prompts = (prompts if isinstance(prompts, Prompts) else Prompts(prompts)).every(batch)
    sampling = Sampling(max_prompt_tokens=max_prompt_tokens, prompt_overflow=prompt_overflow)
    rows, dropped = [], []
    for prompt in prompts:
        try:
            row = encoder.record(prompt, sampling)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{_prompt_name(prompt)}: {error}") from error  # type: ignore[arg-type]
        if row is None:
            dropped.append(_prompt_name(prompt))  # type: ignore[arg-type]
        else:
            rows.append(row)
    if dropped:
        log.warning(
            "%d of %d prompts leave no room for an answer in %s tokens and are left out: %s",
            len(dropped), len(rows) + len(dropped), max_tokens or max_prompt_tokens, ", ".join(dropped[:8]),
        )  # fmt: skip
    if not rows:
        raise ValueError(f"prompts: got {len(dropped)}, all of them too long, expected some that leave room"
                         if dropped else "prompts: missing, expected at least one")  # fmt: skip
    if metrics is not None:
        lengths = [_lengths(row) for row in rows]
        metrics.add(
            {
                "supervised/records": float(len(rows)),
                "supervised/dropped": float(len(dropped)),
                "supervised/cut": float(sum(row.truncate_status is not None for row in rows)),
                "supervised/prompt_length": sum(prompt for prompt, _ in lengths) / len(rows),
                "supervised/response_length": sum(response for _, response in lengths) / len(rows),
            }
        )
    return Experiences(rows)


class _Encoder:
    """Encodes prompts and answers as records."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        data: Data,
        processor: Tokenizer | None,
        max_tokens: int | None,
        *,
        long_prompts: Literal["drop", "error"],
        eos_token_id: int | None,
        add_special_tokens: bool,
    ) -> None:
        check_choice("data", data, ("answers", "pairs"))
        check_choice("long_prompts", long_prompts, ("drop", "error"))
        self.data = data
        self.max_tokens = None if max_tokens is None else check_int("max_tokens", max_tokens, 2)
        self.long_prompts = long_prompts
        self.preparer = PromptPreparer(tokenizer, processor, add_special_tokens=add_special_tokens)
        self.tokenizer: Any = self.preparer.tokenizer
        if self.tokenizer is None:
            raise ValueError("tokenizer: missing, expected one: answers are texts")
        end = self.tokenizer.eos_token_id if eos_token_id is None else eos_token_id
        if end is None:
            raise ValueError("eos_token_id: missing, and the tokenizer has none, expected the id of the end token")
        self.eos_token_id = check_int("eos_token_id", end)
        self._media = frozenset(placeholders(self.preparer.processor).values())

    def record(self, prompt: Prompt, sampling: Sampling) -> Experience | None:
        """Return the record of a prompt, or `None` if it leaves no room for an answer."""
        names = ("response",) if self.data == "answers" else ("chosen", "rejected")
        answers = {name: prompt.info[name] for name in names if prompt.info.get(name) is not None}
        missing = next((name for name in names if name not in answers), None)
        if missing is not None:
            present = [name for name in ANSWERS if name in prompt.info] or ["none"]
            raise ValueError(f"{missing}: missing, expected an answer; the row has {', '.join(present)}")
        prepared = self.preparer.prepare(prompt)
        max_prompt_tokens, length = sampling.max_prompt_tokens, len(prepared.ids)
        longer = max_prompt_tokens is not None and length > max_prompt_tokens
        if longer and sampling.prompt_overflow != "error" and prepared.media is None:
            prepared, longer = self.preparer.prepare(prompt, sampling), False
        max_answer_tokens = None if self.max_tokens is None else self.max_tokens - len(prepared.ids)
        if longer or (max_answer_tokens is not None and max_answer_tokens < 1):
            if self.long_prompts == "drop":
                return None
            bound = (
                f"at most {max_prompt_tokens} (max_prompt_tokens)"
                if longer
                else f"fewer than {self.max_tokens} (max_tokens)"
            )
            raise ValueError(f"prompt: got {length} tokens, expected {bound}")
        info = {name: value for name, value in prompt.info.items() if name not in names}
        info |= {name: value for name in ("reference", "label") if (value := getattr(prompt, name)) is not None}
        ids = {}
        for name, answer in answers.items():
            full = self._ids(name, prompt, prepared, answer)
            ids[name] = full[:max_answer_tokens]
            if len(ids[name]) < len(full):
                info[f"{name}_truncated_from"] = len(full)
        is_truncated = any(f"{name}_truncated_from" in info for name in names)
        chats = {name: _chat(prompt, answer) for name, answer in answers.items()}
        fields: dict[str, Any]
        if self.data == "answers":
            fields = {
                "tokens": [*prepared.ids, *ids["response"]],
                "prompt_length": len(prepared.ids),
                "finish_reason": "length" if is_truncated else "stop",
                "response_text": _text(answers["response"]),
                "messages": chats["response"],
            }
        else:
            fields = {"tokens": list(prepared.ids), **ids, "messages": _messages(prompt)}
            fields |= {f"{name}_messages": chats[name] for name in names}
        return Experience(
            eid=(prompt.eid or EID()).replace(suffix=_SUFFIXES[self.data]),
            truncate_status="response_truncated" if is_truncated else None,
            prompt_text=prepared.text,
            tools=None if prompt.tools is None else [dict(tool) for tool in prompt.tools],
            multi_modal_inputs=prepared.media,
            group_size=1,
            info=info,
            **fields,
        )

    def _ids(self, name: str, prompt: Prompt, prepared: PreparedPrompt, answer: Answer) -> list[int]:
        """Encode an answer, with the end token. The chat template renders messages with more than text. Shape: [n]."""
        text = answer if isinstance(answer, str) else self._render(name, prompt, prepared.text or "", answer)
        # Some tokenizers add a space before the first word of a text, which is wrong after a prompt.
        encoded = Renderer(self.tokenizer, chat=False).encode_after(prepared.text or "", text)
        if not encoded or encoded[-1] != self.eos_token_id:
            encoded.append(self.eos_token_id)
        placeholder = next((token for token in encoded if token in self._media), None)
        if placeholder is not None:
            raise ValueError(f"{name}: got a placeholder of media (token {placeholder}), expected text only")
        return encoded

    def _render(self, name: str, prompt: Prompt, start: str, message: Mapping[str, Any]) -> str:
        if prompt.messages is None:
            raise ValueError(
                f"{name}: got a message with {', '.join(message)}, expected text: the prompt is not a chat"
            )
        holder = self.preparer.processor if hasattr(self.preparer.processor, "chat_template") else self.tokenizer
        rendered = Renderer(holder, tools=prompt.tools).text([*prompt.messages, message], generation=False)
        if not rendered.startswith(start):
            raise ValueError(
                f"{name}: the chat template renders the prompt differently with this answer, expected the same text"
            )
        # Text that a template adds after the end of a turn, such as a line break, is not sampled.
        text, end = rendered[len(start) :], self.tokenizer.decode([self.eos_token_id])
        return text[: text.rindex(end) + len(end)] if end in text else text.rstrip()


def _prompt_name(prompt: Prompt) -> str:
    return f"prompt {'' if prompt.eid is None else prompt.eid.tid}"


def _text(answer: Answer) -> str:
    content = answer if isinstance(answer, str) else answer.get("content")
    return content if isinstance(content, str) else ""


def _messages(prompt: Prompt) -> list[dict[str, Any]] | None:
    return None if prompt.messages is None else [dict(message) for message in prompt.messages]


def _chat(prompt: Prompt, answer: Answer) -> list[dict[str, Any]] | None:
    prompt_messages = _messages(prompt)
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else dict(answer)
    return None if prompt_messages is None else [*prompt_messages, message]


def _lengths(row: Experience) -> tuple[int, float]:
    """Return the lengths of prompt and answer; of a pair, the mean of both answers."""
    if row.chosen is not None and row.rejected is not None:
        return len(row.tokens), (len(row.chosen) + len(row.rejected)) / 2
    return row.prompt_length, len(row.tokens) - row.prompt_length


_ERROR_KEYS = ("error", "reward_error")
"""Keys of `info` with the reason why a record has no reward."""


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Settings of a supervised warm-up.

    Args:
        steps: Maximum number of supervised steps.
        target_accuracy: Success rate of sampled responses at which the warm-up stops; `None`: after `steps`.
        eval_interval: Steps between measurements of the success rate.
        batch_size: Rows per step.
        eval_prompts: Held-out prompts sampled in each measurement.
        optimizer: Settings of the optimizer.

    >>> WarmupConfig(target_accuracy=0.2).steps
    100
    """

    steps: int = 100
    target_accuracy: float | None = None
    eval_interval: int = 5
    batch_size: int = 128
    eval_prompts: int = 256
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-3, warmup_steps=30))

    def __post_init__(self) -> None:
        for name in ("steps", "eval_interval", "batch_size", "eval_prompts"):
            check_int(f"warmup.{name}", getattr(self, name), 0 if name == "steps" else 1)
        if self.target_accuracy is not None:
            check_float("warmup.target_accuracy", self.target_accuracy, 0, 1)


@dataclass(frozen=True)
class WarmupResult:
    """Result of `warm_up`.

    Args:
        steps: Number of steps.
        loss: Loss of the last step.
        success: Last measured success rate; `None` if there is no target.
    """

    steps: int
    loss: float
    success: float | None


def warm_up(
    actor: Actor,
    prompts: Prompts,
    config: WarmupConfig,
    *,
    reward: RewardLike | None = None,
    sampling: SamplingLike = None,
    seed: int = 0,
    precision: str = "float32",
    token_budget: int = 16384,
    on_step: Callable[[int, float, float | None], Any] | None = None,
) -> WarmupResult:
    """Train a policy on the answers (`response`) of prompts.

    Args:
        actor: The policy.
        prompts: Prompts with answers.
        config: Settings.
        reward: Scores sampled responses, for `target_accuracy`.
        sampling: Sampling options of these responses.
        seed: Seed of every random choice.
        precision: As in `Learner`; so is `token_budget`.
        token_budget: Maximum number of tokens in one pass.
        on_step: Called with the step, its loss, and the success rate if it was measured.

    Returns:
        The number of steps, the last loss and the last success rate.

    Raises:
        ValueError: There is a target but no reward.
        AllSamplesFailedError: No sample of a measurement has a reward.

    >>> from rollbook.models import Actor
    >>> from rollbook.train.recipes import letters
    >>> model, tokenizer = letters.model(hidden=32, heads=1, layers=1)
    >>> actor = Actor(model, tokenizer=tokenizer)
    >>> result = warm_up(actor, Prompts(letters.rows(500)), WarmupConfig(steps=3, batch_size=16))
    >>> result.steps, result.success
    (3, None)
    """
    if config.target_accuracy is not None and reward is None:
        raise ValueError(f"reward: missing, required by warmup.target_accuracy ({config.target_accuracy:g})")
    held_out: Prompts | None = None
    if config.target_accuracy is not None:
        prompts, held_out = prompts.split(min(config.eval_prompts, len(prompts) // 2), seed=seed)
    learner = Learner(
        actor,
        "sft",
        optimizer=config.optimizer,
        minibatch=MinibatchConfig(token_budget=token_budget),
        precision=precision,
        seed=seed,
    )
    loss, success, done = 0.0, None, 0
    for step in range(1, config.steps + 1):
        batch = prompts.take(config.batch_size, f"warmup-{step}")
        records = records_from_answers(batch, actor.tokenizer, processor=actor.processor)
        loss, done = learner.update(records, step=step).metrics["loss"], step
        measured = held_out is not None and step % config.eval_interval == 0
        if held_out is not None and measured:
            evaluation = evaluate(TransformersEngine(actor), held_out, reward, sampling=sampling, step=step, seed=seed)
            if evaluation.failed + evaluation.unscored == len(evaluation.records):
                errors = (info[key] for info in evaluation.records.values("info") for key in _ERROR_KEYS if key in info)
                raise AllSamplesFailedError(
                    f"warm-up, step {step}: no sample has a reward; the first: {next(errors, None)}"
                )
            success = evaluation.success
        if on_step is not None:
            on_step(step, loss, success if measured else None)
        if config.target_accuracy is not None and success is not None and success >= config.target_accuracy:
            break
    return WarmupResult(done, loss, success)
