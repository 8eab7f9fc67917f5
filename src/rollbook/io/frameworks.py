"""Readers for the rollout files of verl, TRL and OpenRLHF: `read_verl`, `read_trl` and `read_openrlhf`.

A function per framework splits a row into `Sample`s; `_RecordBuilder` converts each to a record.

Invariant: samples of one prompt in one step form a group. An id consists of the step as `batch`, the framework's own id
or a hash of the prompt as `task`, the number of the sample in its group as `run`, and a hash of the row as `suffix`, so
that reading the same files again gives the same ids. No column is lost: numbers other than the reward go to `metrics`,
everything else to `info`.

Token ids are used unchanged. Text is tokenized again, which may give other tokens than those sampled, since the
frameworks drop special tokens, also the end token. Such records have `info["retokenized"]` and no log-probs. Apart from
a batch, memory grows only by a 16-byte hash per group.
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
from rollbook.io.rows import ErrorHandler, list_float_columns, read_rows

if TYPE_CHECKING:
    from rollbook.core.experience import Experience

Row = dict[str, Any]


class MissingOptionError(RollbookError, ValueError):
    """Raised when rows cannot be read without an option that the caller did not pass. Never skipped."""


@dataclass(slots=True)
class Sample:
    """One response of a row. Prompt and response are text, messages or token ids."""

    prompt: Any
    response: Any
    reward: float | None = None
    batch: int | str = ""
    task: str | None = None
    run: int | None = None
    step: int = 0
    mask: list[bool] | None = None
    """The action mask of the response tokens, if the file has one."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """Response-axis fields by name."""
    advantage: float | None = None
    """One number for all tokens of the response."""
    rejected: Any = None
    """The rejected response of a preference pair."""


RowSplitter = Callable[[Row], tuple[list[Sample], set[str]]]
"""Splits a row into samples; also returns the columns that it used."""
_STEP_COLUMNS = {"step", "global_step"}


def _read_records(
    path: str,
    batch_rows: int,
    errors: ErrorHandler,
    framework: str,
    split_row: RowSplitter,
    tokenizer: Tokenizer | str | None,
    max_row_bytes: int,
) -> Iterator[Experiences]:
    builder = _RecordBuilder(framework, tokenizer)
    pending: list[Experience] = []
    for location, row in read_rows(path, errors, max_row_bytes):
        try:
            samples, used = split_row(row)
            records = [builder.build(sample, row, used) for sample in samples]
        except MissingOptionError:
            raise
        except ValueError as error:
            errors.handle(location, error)
            continue
        except (TypeError, LookupError, OverflowError, RuntimeError) as error:
            errors.handle(location, WireError(f"{type(error).__name__}: {error}"))
            continue
        pending += records
        if len(pending) >= batch_rows:
            yield Experiences(pending)
            pending = []
    if pending:
        yield Experiences(pending)


def read_step(row: Row) -> int | str:
    """Return the training step of a row, or "" if it has none."""
    value = row.get("step", row.get("global_step"))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, (int, str)) and not isinstance(value, bool) else ""


def _read_number(value: Json) -> float | None:
    """Return a number, also from a list of one; `None` for anything else."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, (int, float)) else None


def is_token_ids(value: Json) -> bool:
    """Return whether a value is a list of integers."""
    return isinstance(value, list) and all(type(element) is int for element in value)


def _is_messages(value: Json) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


# --- verl ---------------------------------------------------------------------------------------------------------


def read_verl(
    path: str, batch_rows: int, errors: ErrorHandler, *, tokenizer: Tokenizer | str | None = None, max_row_bytes: int
) -> Iterator[Experiences]:
    """Read rollouts of verl, in any of three layouts:

    - `{step}.jsonl` of `rollout_data_dir`: input, output, gts, score, step and the reward function's extra keys;
    - Parquet of its generation script: prompt, responses and the dataset's columns;
    - Parquet with the columns of its batch: prompts and responses as ids, attention_mask, response_mask,
      rollout_log_probs and others.
    """
    yield from _read_records(path, batch_rows, errors, "verl", split_verl_row, tokenizer, max_row_bytes)


_VERL_TENSORS = {
    "rollout_log_probs": "logprobs",
    "old_log_probs": "old_logprobs",
    "token_level_scores": "token_level_reward",
    "advantages": "advantages",
    "returns": "returns",
}
_VERL_BATCH_COLUMNS = {
    *("prompts", "prompt", "responses", "input_ids", "attention_mask", "position_ids", "response_mask", "uid"),
    *("score", "reward", *_VERL_TENSORS, *_STEP_COLUMNS),
}


def split_verl_row(row: Row) -> tuple[list[Sample], set[str]]:
    """Return the samples of a row of verl, and the columns that they use."""
    if "input" in row and "output" in row:
        sample = Sample(row["input"], row["output"], _read_number(row.get("score")), read_step(row))
        used = {"input", "output", "score", *_STEP_COLUMNS}
        # Newer trainers write uid as SAMPLE_ROLLOUT_OUTPUT.
        parts = str(row.get("uid", "")).rsplit("_", 2)
        if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
            sample.task, sample.run, sample.step = parts[0], int(parts[1]), int(parts[2])
            used.add("uid")
        return [sample], used
    prompt, responses = row.get("prompts", row.get("prompt")), row.get("responses")
    if responses is None:
        raise WireError(f"got the keys {', '.join(row)}, expected input and output, or a prompt and responses")
    if isinstance(prompt, list) and is_token_ids(prompt) and is_token_ids(responses):
        return [_unpad_verl_row(row, prompt, responses)], _VERL_BATCH_COLUMNS
    if isinstance(responses, str):
        responses = [responses]
    samples = [Sample(prompt, response, None, read_step(row)) for response in responses]
    return samples, {"prompt", "prompts", "responses", *_STEP_COLUMNS}


def _unpad_verl_row(row: Row, prompt: list[int], response: list[int]) -> Sample:
    """Return the sample of a row of verl's batch, without the padding."""
    attention_mask = row.get("attention_mask")
    if attention_mask is None:
        attention_mask = [1] * (len(prompt) + len(response))
    if len(attention_mask) != len(prompt) + len(response):
        raise WireError(f"attention_mask: got {len(attention_mask)} entries, expected {len(prompt) + len(response)}")
    positions = [i for i in range(len(response)) if attention_mask[len(prompt) + i]]
    tensors = {}
    for column, field_name in _VERL_TENSORS.items():
        if row.get(column) is not None:
            if len(row[column]) != len(response):
                raise WireError(f"{column}: got {len(row[column])} entries, expected {len(response)}")
            tensors[field_name] = [row[column][i] for i in positions]
    mask = row.get("response_mask")
    if mask is not None and len(mask) != len(response):
        raise WireError(f"response_mask: got {len(mask)} entries, expected {len(response)}")
    reward = _read_number(row.get("score", row.get("reward")))
    if reward is None and "token_level_reward" in tensors:
        reward = math.fsum(tensors["token_level_reward"])
    return Sample(
        [token for token, attended in zip(prompt, attention_mask, strict=False) if attended],
        [response[i] for i in positions],
        reward,
        read_step(row),
        task=None if row.get("uid") is None else str(row["uid"]),
        mask=None if mask is None or all(mask[i] for i in positions) else [bool(mask[i]) for i in positions],
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
    """Read completions that TRL logged, `completions_*.parquet`.

    Columns are step, prompt, completion, one per reward function, the advantage and others. The advantage is set on all
    tokens of a record.

    TRL does not log the reward, which is the weighted sum of the reward functions. `rewards` names the columns to sum,
    with their weights if these are not 1. By default, the only float column is the reward.
    """
    if rewards is not None and (isinstance(rewards, str) or not isinstance(rewards, (Sequence, Mapping))):
        raise ValueError(f"rewards: got {rewards!r}, expected a list of columns, or a dict with their weights")
    weights: dict[str, float] = dict(rewards) if isinstance(rewards, Mapping) else dict.fromkeys(rewards or (), 1.0)
    if rewards is None:
        # From the schema of the files if there is one, since a column can be null in most rows.
        _add_reward_column(weights, list_float_columns(path))

    def split_row(row: Row) -> tuple[list[Sample], set[str]]:
        has_ids = row.get("prompt_ids") is not None and row.get("completion_ids") is not None
        prompt, completion = ("prompt_ids", "completion_ids") if has_ids else ("prompt", "completion")
        if row.get(prompt) is None or row.get(completion) is None:
            raise WireError(f"got the keys {', '.join(row)}, expected prompt and completion, or their ids")
        if rewards is None:
            _add_reward_column(weights, [name for name, value in row.items() if type(value) is float])
        sample = Sample(row[prompt], row[completion], _sum_rewards(row, weights), read_step(row))
        sample.advantage = _read_number(row.get("advantage"))
        used = {prompt, completion, *_STEP_COLUMNS}
        if sample.advantage is not None:
            used.add("advantage")
        if has_ids:
            used |= unpad_trl_row(row, sample)
        return [sample], used

    yield from _read_records(path, batch_rows, errors, "trl", split_row, tokenizer, max_row_bytes)


_TRL_TENSORS = {"sampling_per_token_logps": "logprobs", "old_per_token_logps": "old_logprobs"}


def unpad_trl_row(row: Row, sample: Sample) -> set[str]:
    """Set the token ids, mask and tensors of a sample without padding; return the columns that were used."""
    prompt_mask = row.get("prompt_mask") or [1] * len(row["prompt_ids"])
    sample.prompt = [token for token, attended in zip(row["prompt_ids"], prompt_mask, strict=True) if attended]
    completion_mask = row.get("completion_mask") or [1] * len(row["completion_ids"])
    attended_tokens = zip(row["completion_ids"], completion_mask, strict=True)
    positions = [i for i, (_, attended) in enumerate(attended_tokens) if attended]
    sample.response = [row["completion_ids"][i] for i in positions]
    if row.get("tool_mask") is not None:
        sample.mask = [bool(row["tool_mask"][i]) for i in positions]
    for column, field_name in _TRL_TENSORS.items():
        if row.get(column) is not None:
            sample.tensors[field_name] = [row[column][i] for i in positions]
    return {"prompt_mask", "completion_mask", "tool_mask", *_TRL_TENSORS}


def _add_reward_column(weights: dict[str, float], float_columns: Iterable[str]) -> None:
    """Use the only float column as the reward; raise an error if there are several."""
    weights |= {name: 1.0 for name in float_columns if name not in ("advantage", *_STEP_COLUMNS)}
    if len(weights) > 1:
        raise MissingOptionError(
            f"rewards: got None, but the columns {', '.join(weights)} could all be rewards; give rewards= those that "
            "are (or a dict with their weights), [] for none"
        )


def _sum_rewards(row: Row, weights: Mapping[str, float]) -> float | None:
    missing = [name for name in weights if name not in row]
    if missing:
        raise MissingOptionError(f"rewards: the rows have no column {missing[0]!r}; they have {', '.join(row)}")
    # As in TRL, functions that returned no reward for a sample are left out of its sum.
    values = [(weight, _read_number(row[name])) for name, weight in weights.items()]
    parts = [weight * value for weight, value in values if value is not None and not math.isnan(value)]
    if parts:
        return math.fsum(parts)
    return math.nan if weights else None


# --- OpenRLHF -----------------------------------------------------------------------------------------------------


def read_openrlhf(
    path: str, batch_rows: int, errors: ErrorHandler, *, tokenizer: Tokenizer | str | None = None, max_row_bytes: int
) -> Iterator[Experiences]:
    """Read samples of OpenRLHF, in any of four layouts:

    - batch inference: input, output, reward;
    - preference pairs made from those: prompt, chosen, rejected;
    - samples: prompt(s), response(s), reward(s), label(s);
    - results of agents: observation_tokens, action_ranges, rollout_log_probs, reward, scores.
    """
    yield from _read_records(path, batch_rows, errors, "openrlhf", split_openrlhf_row, tokenizer, max_row_bytes)


def split_openrlhf_row(row: Row) -> tuple[list[Sample], set[str]]:
    """Return the samples of a row of OpenRLHF, and the columns that they use."""
    if row.get("observation_tokens") is not None:
        used = {"observation_tokens", "action_ranges", "rollout_log_probs", "reward", *_STEP_COLUMNS}
        return [_read_agent_row(row)], used
    if row.get("chosen") is not None and row.get("rejected") is not None and "prompt" in row:
        sample = Sample(row["prompt"], row["chosen"], None, read_step(row), rejected=row["rejected"])
        return [sample], {"prompt", "chosen", "rejected", *_STEP_COLUMNS}
    prompt_column = _first_present(row, "input", "prompt", "prompts")
    response_column = _first_present(row, "output", "response", "responses")
    if prompt_column is None or response_column is None:
        raise WireError(f"got the keys {', '.join(row)}, expected input and output, or prompt and response")
    reward_column = _first_present(row, "reward", "rewards")
    prompt, response = row[prompt_column], row[response_column]
    reward = None if reward_column is None else row[reward_column]
    used = {prompt_column, response_column, *_STEP_COLUMNS}
    if isinstance(response, list) and not is_token_ids(response) and not _is_messages(response):
        rewards = reward if isinstance(reward, list) else [reward] * len(response)
        if len(rewards) != len(response):
            raise WireError(f"{reward_column}: got {len(rewards)}, expected {len(response)}, one for each answer")
        samples = [
            Sample(prompt, text, _read_number(number), read_step(row))
            for text, number in zip(response, rewards, strict=True)
        ]
        return samples, used | ({reward_column} if reward_column else set())
    sample = Sample(prompt, response, _read_number(reward), read_step(row))
    return [sample], used | ({reward_column} if reward_column and sample.reward is not None else set())


def _first_present(row: Row, *columns: str) -> str | None:
    return next((column for column in columns if row.get(column) is not None), None)


def _read_agent_row(row: Row) -> Sample:
    tokens, ranges = row["observation_tokens"], row.get("action_ranges")
    if not is_token_ids(tokens):
        raise WireError("observation_tokens: expected token ids")
    if not isinstance(ranges, list) or not ranges or not all(is_token_ids(r) and len(r) == 2 for r in ranges):
        raise WireError(f"action_ranges: got {ranges!r}, expected pairs of start and end")
    prompt_length = ranges[0][0]
    in_order = all(prompt_length <= start <= end <= len(tokens) for start, end in ranges)
    if not 0 <= prompt_length <= len(tokens) or not in_order:
        raise WireError(f"action_ranges: got {ranges!r}, expected ranges within {len(tokens)} tokens")
    mask = [False] * (len(tokens) - prompt_length)
    for start, end in ranges:
        mask[start - prompt_length : end - prompt_length] = [True] * (end - start)
    sample = Sample(tokens[:prompt_length], tokens[prompt_length:], _read_number(row.get("reward")), read_step(row))
    sample.mask = None if all(mask) else mask
    logprobs = row.get("rollout_log_probs")
    if logprobs is not None:
        if len(logprobs) != len(tokens):
            raise WireError(f"rollout_log_probs: got {len(logprobs)} entries, expected {len(tokens)}")
        sample.tensors["logprobs"] = logprobs[prompt_length:]
    return sample


# --- samples to records -------------------------------------------------------------------------------------------


class _RecordBuilder:
    """Converts samples to records, and numbers the samples of each group."""

    def __init__(self, framework: str, tokenizer: Tokenizer | str | None) -> None:
        self.framework = framework
        self.encoder = _SampleTokenizer(framework, tokenizer)
        self.group_counts: dict[bytes, int] = {}

    def build(self, sample: Sample, row: Row, used: set[str]) -> Experience:
        """Build a record; columns of the row that are not in `used` go to `info` and `metrics`."""
        from rollbook.core.experience import Experience

        prompt, response = _drop_nulls(sample.prompt), _drop_nulls(sample.response)
        fields: Row = {"info": {"source": self.framework}, "metrics": {}}
        for name, value in row.items():
            if name not in used and value is not None:
                numeric = isinstance(value, (int, float)) and abs(value) < 2**63
                fields["metrics" if numeric else "info"][name] = float(value) if numeric else _to_info_value(value)
        prompt_ids = self.encoder.encode(prompt)
        if not (is_token_ids(prompt) and is_token_ids(response)):
            fields["info"]["retokenized"] = True
        if isinstance(prompt, str):
            fields["prompt_text"] = prompt
        fields["eid"] = self._eid(sample, prompt, row)
        if sample.rejected is not None:
            rejected = _drop_nulls(sample.rejected)
            fields["tokens"] = prompt_ids
            fields["chosen"], _ = self.encoder.encode_response(prompt, prompt_ids, response)
            fields["rejected"], _ = self.encoder.encode_response(prompt, prompt_ids, rejected)
            return Experience(**fields)
        response_ids, mask = self.encoder.encode_response(prompt, prompt_ids, response)
        mask = sample.mask if sample.mask is not None else mask
        fields |= {"tokens": prompt_ids + response_ids, "prompt_length": len(prompt_ids), "reward": sample.reward}
        fields |= sample.tensors
        if mask is not None or not prompt_ids or not response_ids:
            # A single-turn record has a prompt and a response. With a mask, the record is multi-turn and may lack one.
            fields["action_mask"] = [True] * len(response_ids) if mask is None else mask
        if isinstance(response, str):
            fields["response_text"] = response
        if _is_messages(prompt):
            fields["messages"] = list(prompt)
            if _is_messages(response):
                fields["messages"] += response
            elif isinstance(response, str):
                fields["messages"].append({"role": "assistant", "content": response})
        if sample.advantage is not None:
            fields["advantages"] = [sample.advantage] * len(response_ids)
        return Experience(**fields)

    def _eid(self, sample: Sample, prompt: Json, row: Row) -> dict[str, Any]:
        task = sample.task if sample.task is not None else xxhash.xxh3_64_hexdigest(orjson.dumps(prompt))
        run = sample.run
        if run is None:
            group = xxhash.xxh3_128_digest(orjson.dumps([sample.batch, task]))
            run = self.group_counts.get(group, 0)
            self.group_counts[group] = run + 1
        # Equal rows have the same suffix; their ids differ by `run`.
        suffix = xxhash.xxh3_64_hexdigest(orjson.dumps([row, sample.response], option=_HASH_OPTIONS, default=repr))
        return {"batch": sample.batch, "task": task, "run": run, "step": sample.step, "suffix": suffix}


_HASH_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS


def _drop_nulls(value: Json) -> Any:
    """Remove null keys of messages: in Parquet every message has the keys of all."""
    if isinstance(value, dict):
        return {key: _drop_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_drop_nulls(entry) for entry in value] if isinstance(value, list) else value


def _to_info_value(value: Json) -> Any:
    """Convert a value to a type of `info`: dates and decimals of Parquet become text."""
    if isinstance(value, dict):
        return {str(key): _to_info_value(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_to_info_value(entry) for entry in value]
    return value if value is None or isinstance(value, (str, int, float, bytes)) else str(value)


# --- text to tokens -----------------------------------------------------------------------------------------------


class _SampleTokenizer:
    """Tokenizes the prompts and responses of samples: text, messages, or token ids, which are returned unchanged."""

    def __init__(self, framework: str, tokenizer: Tokenizer | str | os.PathLike[str] | None) -> None:
        self.framework = framework
        if isinstance(tokenizer, (str, os.PathLike)):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        if tokenizer is not None and not callable(tokenizer):
            raise ValueError(
                f"tokenizer: got a {type(tokenizer).__name__}, expected a transformers tokenizer or a path"
            )
        self.tokenizer = tokenizer

    def encode(self, value: Json) -> list[int]:
        """Return token ids. Messages are rendered as a prompt, up to the start of the assistant's message."""
        if is_token_ids(value):
            return list(value)
        if isinstance(value, str):
            return list(self._require_tokenizer()(value, add_special_tokens=False)["input_ids"])
        if _is_messages(value):
            return self._render(value, add_generation_prompt=True)
        raise WireError(f"got a {type(value).__name__}, expected a string, messages or token ids")

    def encode_response(
        self, prompt: Json, prompt_ids: list[int], response: Json
    ) -> tuple[list[int], list[bool] | None]:
        """Return the tokens of a response, and a mask of those that the model sampled (`None`: all)."""
        if not _is_messages(response):
            return self.encode(response), None
        if not _is_messages(prompt):
            return self.encode("".join(_text_content(message) for message in response)), None
        ids, mask = prompt_ids, list[bool]()
        for i, message in enumerate(response):
            assistant_next = i + 1 < len(response) and response[i + 1].get("role") == "assistant"
            extended = self._render([*prompt, *response[: i + 1]], add_generation_prompt=assistant_next)
            if extended[: len(ids)] != ids:
                if len(response) == 1:
                    return self.encode(_text_content(message)), None
                raise WireError(
                    f"message {i} of the response makes the chat template render the messages before it differently"
                )
            mask += [message.get("role") == "assistant"] * (len(extended) - len(ids))
            ids = extended
        return ids[len(prompt_ids) :], None if all(mask) else mask

    def _render(self, messages: Json, *, add_generation_prompt: bool) -> list[int]:
        tokenizer = self._require_tokenizer()
        try:
            rendered = tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:
            # A chat template is user code and may raise anything.
            raise WireError(f"the chat template fails on the messages: {type(error).__name__}: {error}") from None
        return list(rendered["input_ids"] if isinstance(rendered, Mapping) else rendered)

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise MissingOptionError(
                f"tokenizer: got None, but these {self.framework} rows have text and no token ids; give tokenizer= "
                "(a transformers tokenizer, or the path of the one that the run used)"
            )
        return self.tokenizer


def _text_content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise WireError(f"got a message of {type(content).__name__}, expected text")
    return content
