"""Rollouts that verl, TRL and OpenRLHF leave on disk, as records.

Invariant: groups form. The batch is the step, the task the writer's own id or a hash of the prompt, and runs are
counted within the two in the order of the rows; the suffix is a hash of the row, so that reading the same files again
gives the same ids. Nothing of a row is lost: numbers beside the reward are in `metrics`, all else in `info`.

Token ids are taken as they are. Text has to be tokenized again, which need not give the tokens that were sampled (and
the writers drop special tokens, the last one too): such records say so in `info["retokenized"]`, and have no log-probs.
What is counted while reading is 16 bytes of hash for each group seen: the only memory that grows with the files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

from rollbook.core.errors import RollbookError, WireError
from rollbook.core.experiences import Experiences
from rollbook.core.freeform import Json
from rollbook.core.vocabulary import Tokenizer
from rollbook.io.tables import ErrorHandler, list_float_columns, read_rows

if TYPE_CHECKING:
    from rollbook.core.experience import Experience

Row = dict[str, Any]


class MissingOptionError(RollbookError, ValueError):
    """Raised when rows cannot be read without an option that the caller did not pass. Never skipped."""


@dataclass(slots=True)
class Sample:
    """One answer of a row: texts, messages or token ids, reward and ids."""

    prompt: Any
    answer: Any
    reward: float | None = None
    batch: int | str = ""
    task: str | None = None
    run: int | None = None
    step: int = 0
    mask: list[bool] | None = None
    """Over the answer's tokens, if the file has one."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """Response-axis fields."""
    advantage: float | None = None
    """One number for all tokens of the answer."""
    rejected: Any = None
    """The rejected answer of a pair."""


# --- text to tokens -----------------------------------------------------------------------------------------------


class Texts:
    """Tokenizes texts and conversations."""

    def __init__(self, tokenizer: Tokenizer | str | os.PathLike[str] | None, who: str) -> None:
        self.who = who
        if isinstance(tokenizer, (str, os.PathLike)):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        if tokenizer is not None and not callable(tokenizer):
            raise ValueError(
                f"tokenizer: got a {type(tokenizer).__name__}, expected a transformers tokenizer or a path"
            )
        self.tokenizer = tokenizer

    def ids(self, value: Json) -> list[int]:
        """Return the token ids of a prompt: of ids, a text, or messages that await an answer."""
        if is_token_ids(value):
            return list(value)
        if isinstance(value, str):
            return list(self._needed()(value, add_special_tokens=False)["input_ids"])
        if _is_messages(value):
            return self._rendered(value, True)
        raise WireError(f"got a {type(value).__name__} where a text, messages or token ids should be")

    def answer(self, prompt: Json, start: list[int], value: Json) -> tuple[list[int], list[bool] | None]:
        """Return the answer's tokens after the prompt's (`start`), and which of them the model wrote (`None`: all)."""
        if not _is_messages(value):
            return self.ids(value), None
        if not _is_messages(prompt):
            return self.ids("".join(_content(message) for message in value)), None
        so_far, mask = start, list[bool]()
        for i, message in enumerate(value):
            awaits = i + 1 < len(value) and value[i + 1].get("role") == "assistant"
            now = self._rendered([*prompt, *value[: i + 1]], awaits)
            if now[: len(so_far)] != so_far:
                if len(value) == 1:
                    return self.ids(_content(message)), None
                raise WireError(
                    f"the chat template renders message {i} of the answer differently behind what precedes it"
                )
            mask += [message.get("role") == "assistant"] * (len(now) - len(so_far))
            so_far = now
        return so_far[len(start) :], None if all(mask) else mask

    def _rendered(self, messages: Json, awaits: bool) -> list[int]:
        tokenizer = self._needed()
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=awaits)
        except Exception as error:
            # A chat template is a program of its author's, and fails with whatever it likes.
            raise WireError(f"the chat template fails on the messages: {type(error).__name__}: {error}") from None
        return list(rendered["input_ids"] if isinstance(rendered, Mapping) else rendered)

    def _needed(self) -> Any:
        if self.tokenizer is None:
            raise MissingOptionError(
                f"tokenizer: got None, but these {self.who} rows have text and no token ids; give tokenizer= "
                "(a transformers tokenizer, or the path of the one that the run used)"
            )
        return self.tokenizer


def is_token_ids(value: Json) -> bool:
    return isinstance(value, list) and all(type(element) is int for element in value)


def _is_messages(value: Json) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise WireError(f"got a message of {type(content).__name__}, expected text")
    return content


def _without_nulls(value: Json) -> Any:
    """Remove null keys of messages: in Parquet every message has the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _storable(value: Json) -> Any:
    """Convert a value to a type of `info`: dates and decimals of Parquet become text."""
    if isinstance(value, dict):
        return {str(key): _storable(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_storable(entry) for entry in value]
    return value if value is None or isinstance(value, (str, int, float, bytes)) else str(value)


def _number(value: Json) -> float | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, (int, float)) else None


# --- samples to records -------------------------------------------------------------------------------------------


class _Maker:
    def __init__(self, texts: Texts, who: str) -> None:
        self.texts = texts
        self.who = who
        self.runs: dict[bytes, int] = {}

    def record(self, sample: Sample, row: Row, used: set[str]) -> Experience:
        """Build a record; keys of the row that are not in `used` go to `info` and `metrics`."""
        from rollbook.core.experience import Experience

        prompt, answer = _without_nulls(sample.prompt), _without_nulls(sample.answer)
        fields: Row = {"info": {"source": self.who}, "metrics": {}}
        for name, value in row.items():
            if name not in used and value is not None:
                numeric = isinstance(value, (int, float)) and abs(value) < 2**63
                fields["metrics" if numeric else "info"][name] = float(value) if numeric else _storable(value)
        start = self.texts.ids(prompt)
        if not (is_token_ids(prompt) and is_token_ids(answer)):
            fields["info"]["retokenized"] = True
        if isinstance(prompt, str):
            fields["prompt_text"] = prompt
        fields["eid"] = self._eid(sample, prompt, row)
        if sample.rejected is not None:
            rejected = _without_nulls(sample.rejected)
            fields |= {"tokens": start, "chosen": self.texts.answer(prompt, start, answer)[0]}
            fields["rejected"] = self.texts.answer(prompt, start, rejected)[0]
            return Experience(**fields)
        tokens, mask = self.texts.answer(prompt, start, answer)
        mask = sample.mask if sample.mask is not None else mask
        fields |= {"tokens": start + tokens, "prompt_length": len(start), "reward": sample.reward, **sample.tensors}
        if mask is not None or not start or not tokens:
            # A single turn has a prompt and an answer; what lacks one is kept as a conversation.
            fields["action_mask"] = [True] * len(tokens) if mask is None else mask
        if isinstance(answer, str):
            fields["response_text"] = answer
        if _is_messages(prompt) and _is_messages(answer):
            fields["messages"] = [*prompt, *answer]
        elif _is_messages(prompt):
            fields["messages"] = [*prompt, *([{"role": "assistant", "content": answer}] * isinstance(answer, str))]
        if sample.advantage is not None:
            fields["advantages"] = [sample.advantage] * len(tokens)
        return Experience(**fields)

    def _eid(self, sample: Sample, prompt: Json, row: Row) -> dict[str, Any]:
        shown = orjson.dumps(prompt)
        task = sample.task if sample.task is not None else xxhash.xxh3_64_hexdigest(shown)
        run = sample.run
        if run is None:
            group = xxhash.xxh3_128_digest(orjson.dumps([sample.batch, task]))
            run = self.runs.get(group, 0)
            self.runs[group] = run + 1
        # Two rows that are equal in all are two runs, and so have two ids.
        suffix = xxhash.xxh3_64_hexdigest(orjson.dumps([row, sample.answer], option=_HASHED, default=repr))
        return {"batch": sample.batch, "task": task, "run": run, "step": sample.step, "suffix": suffix}


_HASHED = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
Split = Callable[[Row], tuple[list[Sample], set[str]]]


def _read(
    path: str,
    batch_rows: int,
    errors: ErrorHandler,
    who: str,
    split: Split,
    tokenizer: Tokenizer | str | None,
    max_row_bytes: int,
) -> Iterator[Experiences]:
    make = _Maker(Texts(tokenizer, who), who)
    pending: list[Experience] = []
    for where, row in read_rows(path, errors, max_row_bytes):
        try:
            samples, used = split(row)
            records = [make.record(sample, row, used) for sample in samples]
        except MissingOptionError:
            raise
        except ValueError as error:
            errors.handle(where, error)
            continue
        except (TypeError, LookupError, OverflowError, RuntimeError) as error:
            errors.handle(where, WireError(f"{type(error).__name__}: {error}"))
            continue
        pending += records
        if len(pending) >= batch_rows:
            yield Experiences(pending)
            pending = []
    if pending:
        yield Experiences(pending)


def row_step(row: Row) -> int | str:
    value = row.get("step", row.get("global_step"))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, (int, str)) and not isinstance(value, bool) else ""


_STEPS = {"step", "global_step"}


# --- verl ---------------------------------------------------------------------------------------------------------


def read_verl(
    path: str, batch_rows: int, errors: ErrorHandler, *, tokenizer: Tokenizer | str | None = None, max_row_bytes: int
) -> Iterator[Experiences]:
    """Rows of `{step}.jsonl` (input, output, gts, score, step and what the reward function said), of the Parquet that
    its generation writes (prompt, responses and the dataset's columns), and of Parquet with its batch's columns
    (prompts, responses as ids, attention_mask, response_mask, rollout_log_probs, ...)."""
    yield from _read(path, batch_rows, errors, "verl", split_verl_row, tokenizer, max_row_bytes)


_VERL_TENSORS = {
    "rollout_log_probs": "logprobs",
    "old_log_probs": "old_logprobs",
    "token_level_scores": "token_level_reward",
    "advantages": "advantages",
    "returns": "returns",
}


def split_verl_row(row: Row) -> tuple[list[Sample], set[str]]:
    if "input" in row and "output" in row:
        sample = Sample(row["input"], row["output"], _number(row.get("score")), row_step(row))
        used = {"input", "output", "score", *_STEPS}
        # The newer trainer's ids: sample, rollout, output of the rollout.
        parts = str(row.get("uid", "")).rsplit("_", 2)
        if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
            sample.task, sample.run, sample.step = parts[0], int(parts[1]), int(parts[2])
            used.add("uid")
        return [sample], used
    prompt, answers = row.get("prompts", row.get("prompt")), row.get("responses")
    if answers is None:
        raise WireError(f"got the keys {', '.join(row)}, expected input and output, or a prompt and responses")
    if isinstance(prompt, list) and is_token_ids(prompt) and is_token_ids(answers):
        return [_verl_ids(row, prompt, answers)], {
            *("prompts", "prompt", "responses", "input_ids", "attention_mask", "position_ids", "response_mask", "uid"),
            *("score", "reward", *_VERL_TENSORS, *_STEPS),
        }
    listed = [answers] if isinstance(answers, str) else answers
    return [Sample(prompt, answer, None, row_step(row)) for answer in listed], {
        "prompt",
        "prompts",
        "responses",
        *_STEPS,
    }


def _verl_ids(row: Row, prompt: list[int], answer: list[int]) -> Sample:
    seen = row.get("attention_mask")
    if seen is None:
        seen = [1] * (len(prompt) + len(answer))
    if len(seen) != len(prompt) + len(answer):
        raise WireError(f"attention_mask: got {len(seen)} entries, expected {len(prompt) + len(answer)}")
    at = [i for i in range(len(answer)) if seen[len(prompt) + i]]
    tensors = {}
    for theirs, ours in _VERL_TENSORS.items():
        if row.get(theirs) is not None:
            if len(row[theirs]) != len(answer):
                raise WireError(f"{theirs}: got {len(row[theirs])} entries, expected {len(answer)}")
            tensors[ours] = [row[theirs][i] for i in at]
    mask = row.get("response_mask")
    if mask is not None and len(mask) != len(answer):
        raise WireError(f"response_mask: got {len(mask)} entries, expected {len(answer)}")
    reward = _number(row.get("score", row.get("reward")))
    if reward is None and "token_level_reward" in tensors:
        reward = math.fsum(tensors["token_level_reward"])
    return Sample(
        [token for token, real in zip(prompt, seen, strict=False) if real],
        [answer[i] for i in at],
        reward,
        row_step(row),
        task=None if row.get("uid") is None else str(row["uid"]),
        mask=None if mask is None or all(mask[i] for i in at) else [bool(mask[i]) for i in at],
        tensors=tensors,
    )


# --- TRL ----------------------------------------------------------------------------------------------------------


def read_trl(
    path: str,
    batch_rows: int,
    errors: ErrorHandler,
    *,
    tokenizer: Tokenizer | str | None = None,
    rewards: Sequence[str] | Mapping[str, float] | None = None,
    max_row_bytes: int,
) -> Iterator[Experiences]:
    """Rows of `completions_*.parquet`: step, prompt, completion, a column for each reward function, what was logged
    beside, and the advantage (which every token of the record then has).

    TRL does not log the reward itself, their weighted sum. `rewards` names the columns that count, with their weights
    if they are not 1; without it, the only column of floats is the reward.
    """
    if rewards is not None and (isinstance(rewards, str) or not isinstance(rewards, (Sequence, Mapping))):
        raise ValueError(f"rewards: got {rewards!r}, expected a list of columns, or a dict with their weights")
    weights: dict[str, float] = dict(rewards) if isinstance(rewards, Mapping) else dict.fromkeys(rewards or (), 1.0)
    if rewards is None:
        # Read from the schema of the files if there is one: a column can be null in all rows but one.
        _trl_one_reward(weights, list_float_columns(path))

    def split(row: Row) -> tuple[list[Sample], set[str]]:
        ids = row.get("prompt_ids") is not None and row.get("completion_ids") is not None
        prompt, answer = ("prompt_ids", "completion_ids") if ids else ("prompt", "completion")
        if row.get(prompt) is None or row.get(answer) is None:
            raise WireError(f"got the keys {', '.join(row)}, expected prompt and completion, or their ids")
        if rewards is None:
            _trl_one_reward(weights, [name for name, value in row.items() if type(value) is float])
        sample = Sample(row[prompt], row[answer], _trl_reward(row, weights), row_step(row))
        sample.advantage = _number(row.get("advantage"))
        used = {prompt, answer, *_STEPS}
        if sample.advantage is not None:
            used.add("advantage")
        if ids:
            used |= read_trl_ids(row, sample)
        return [sample], used

    yield from _read(path, batch_rows, errors, "trl", split, tokenizer, max_row_bytes)


_TRL_TENSORS = {"sampling_per_token_logps": "logprobs", "old_per_token_logps": "old_logprobs"}


def read_trl_ids(row: Row, sample: Sample) -> set[str]:
    """Set token ids without padding, by the masks; return the columns that were used."""
    real = row.get("prompt_mask") or [1] * len(row["prompt_ids"])
    sample.prompt = [token for token, here in zip(row["prompt_ids"], real, strict=True) if here]
    real = row.get("completion_mask") or [1] * len(row["completion_ids"])
    at = [i for i, (_, here) in enumerate(zip(row["completion_ids"], real, strict=True)) if here]
    sample.answer = [row["completion_ids"][i] for i in at]
    if row.get("tool_mask") is not None:
        sample.mask = [bool(row["tool_mask"][i]) for i in at]
    for theirs, ours in _TRL_TENSORS.items():
        if row.get(theirs) is not None:
            sample.tensors[ours] = [row[theirs][i] for i in at]
    return {"prompt_mask", "completion_mask", "tool_mask", *_TRL_TENSORS}


def _trl_one_reward(weights: dict[str, float], floats: Iterable[str]) -> None:
    """Take the only float column as the reward; the caller must choose among several."""
    weights |= {name: 1.0 for name in floats if name not in ("advantage", *_STEPS)}
    if len(weights) > 1:
        raise MissingOptionError(
            f"rewards: got None, but the columns {', '.join(weights)} could all be rewards; give rewards= those that "
            "are (or a dict with their weights), [] for none"
        )


def _trl_reward(row: Row, weights: Mapping[str, float]) -> float | None:
    missing = [name for name in weights if name not in row]
    if missing:
        raise MissingOptionError(f"rewards: the rows have no column {missing[0]!r}; they have {', '.join(row)}")
    # A function that gave none for a sample counts for nothing, as in TRL.
    values = [(weight, _number(row[name])) for name, weight in weights.items()]
    parts = [weight * value for weight, value in values if value is not None and value == value]
    return math.fsum(parts) if parts else math.nan if weights else None


# --- OpenRLHF -----------------------------------------------------------------------------------------------------


def read_openrlhf(
    path: str, batch_rows: int, errors: ErrorHandler, *, tokenizer: Tokenizer | str | None = None, max_row_bytes: int
) -> Iterator[Experiences]:
    """Rows of its batch inference (input, output, reward), of pairs that it makes from those (prompt, chosen,
    rejected), of samples (prompts, responses, rewards, labels, in the singular too), and of what its agents give
    (observation_tokens, action_ranges, rollout_log_probs, reward, scores)."""
    yield from _read(path, batch_rows, errors, "openrlhf", split_openrlhf_row, tokenizer, max_row_bytes)


def split_openrlhf_row(row: Row) -> tuple[list[Sample], set[str]]:
    if row.get("observation_tokens") is not None:
        return [_openrlhf_agent(row)], {
            *("observation_tokens", "action_ranges", "rollout_log_probs", "reward", *_STEPS),
        }
    if row.get("chosen") is not None and row.get("rejected") is not None and "prompt" in row:
        sample = Sample(row["prompt"], row["chosen"], None, row_step(row), rejected=row["rejected"])
        return [sample], {"prompt", "chosen", "rejected", *_STEPS}
    prompt = next((name for name in ("input", "prompt", "prompts") if row.get(name) is not None), None)
    answer = next((name for name in ("output", "response", "responses") if row.get(name) is not None), None)
    if prompt is None or answer is None:
        raise WireError(f"got the keys {', '.join(row)}, expected input and output, or prompt and response")
    reward = next((name for name in ("reward", "rewards") if row.get(name) is not None), None)
    reward_value = None if reward is None else row[reward]
    answers = row[answer]
    used = {prompt, answer, *_STEPS}
    if isinstance(answers, list) and not is_token_ids(answers) and not _is_messages(answers):
        rewards = reward_value if isinstance(reward_value, list) else [reward_value] * len(answers)
        if len(rewards) != len(answers):
            raise WireError(f"{reward}: got {len(rewards)}, expected {len(answers)}, one for each answer")
        samples = [Sample(row[prompt], a, _number(r), row_step(row)) for a, r in zip(answers, rewards, strict=True)]
        return samples, used | ({reward} if reward else set())
    sample = Sample(row[prompt], answers, _number(reward_value), row_step(row))
    return [sample], used | ({reward} if reward and sample.reward is not None else set())


def _openrlhf_agent(row: Row) -> Sample:
    tokens, ranges = row["observation_tokens"], row.get("action_ranges")
    if not is_token_ids(tokens):
        raise WireError("observation_tokens: expected token ids")
    if not isinstance(ranges, list) or not ranges or not all(is_token_ids(r) and len(r) == 2 for r in ranges):
        raise WireError(f"action_ranges: got {ranges!r}, expected pairs of start and end")
    prompt = ranges[0][0]
    if not 0 <= prompt <= len(tokens) or any(not prompt <= a <= b <= len(tokens) for a, b in ranges):
        raise WireError(f"action_ranges: got {ranges!r}, of {len(tokens)} tokens")
    mask = [False] * (len(tokens) - prompt)
    for a, b in ranges:
        mask[a - prompt : b - prompt] = [True] * (b - a)
    sample = Sample(tokens[:prompt], tokens[prompt:], _number(row.get("reward")), row_step(row))
    sample.mask = None if all(mask) else mask
    logprobs = row.get("rollout_log_probs")
    if logprobs is not None:
        if len(logprobs) != len(tokens):
            raise WireError(f"rollout_log_probs: got {len(logprobs)} entries, expected {len(tokens)}")
        sample.tensors["logprobs"] = logprobs[prompt:]
    return sample
