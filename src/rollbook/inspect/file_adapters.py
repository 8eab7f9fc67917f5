"""Adapters: rows of other tools as trajectories.

- verl 0.4 to 0.7 (`{step}.jsonl` of `rollout_data_dir`, Parquet of its generation and of its batches), TRL 0.15 to 0.25
  (`completions_*.parquet`, JSONL of the same columns) and OpenRLHF 0.6 to 0.9.
- Trajectory savers of LightRFT 0.1 and of Rollbook. LightRFT writes entropies one token early (on the token before the
  sampled one), which is corrected.
- Conversations: `{"messages": [...]}` with other fields, ShareGPT's `conversations`, and logs of inspect_ai 0.3.6 to
  0.3.28x (log schema 2).
- verifiers 0.1 and 0.2 (one row per rollout: prompt, completion, reward, metrics, and in prime-rl the token ids of each
  turn), verifiers 0.3 and 0.4 (one row per episode of traces, or one trace, as prime-rl saves them).

Invariant: every field of a row is shown or is in `info`; numbers other than the reward are metrics. A number belongs to
a token only if the writer has one for each sampled token; omitted values are reported in `notes`. Every path of a
message graph from its root to a leaf is a trajectory. Nothing that a row names is fetched.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollbook.core.errors import WireError
from rollbook.core.ids import EID
from rollbook.inspect.file_stores import Row, parse_int, parse_number, parse_numbers
from rollbook.inspect.images import RowContext, read_image, replace_images
from rollbook.inspect.measures import classify_status
from rollbook.inspect.serialization import json_safe
from rollbook.inspect.trajectory import (
    Json,
    Picture,
    Segment,
    Trajectory,
    derive_lenses,
    find_segments,
    hash_prompt,
)
from rollbook.io import frameworks
from rollbook.io.frameworks import Sample

_UNSPACED_SCRIPTS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf" ?[^\W{_UNSPACED_SCRIPTS}]{{1,24}}|\w| ?[^\w\s]|\n+| +|\s")
_SPECIAL = re.compile(r"<[|\uff5c][^<>\s]{1,60}[|\uff5c]>|</?s>|<(?:bos|eos|pad|unk)>|\[(?:PAD|CLS|SEP|UNK|MASK)\]")
_THINK = re.compile(r"<think>.*?(?:</think>\n*|\Z)", re.S)


class Part(NamedTuple):
    """Consecutive text of one speaker."""

    text: str
    role: str
    kind: str = "text"
    name: str = ""
    spoken: bool = False
    """Whether the model wrote it."""
    picture: Picture | None = None


def split_words(text: str) -> NDArray[np.int64]:
    """Return the ends of the words of a text, which replace tokens if only text is known.

    >>> split_words("Let me see: 2 + 3\\n\\n五個").tolist()
    [3, 6, 10, 11, 13, 15, 17, 19, 20, 21]
    """
    # Every character belongs to a word, so lengths give the ends.
    return np.cumsum(list(map(len, _WORD.findall(text))), dtype=np.int64)


def build_from_parts(pieces: Iterable[Part], /, **fields: Any) -> Trajectory:
    """Create a trajectory of words: a segment per part; everything before the first spoken part is the prompt."""
    texts: list[str] = []
    ends: list[NDArray[np.int64]] = []
    segments: list[Segment] = []
    pictures: list[Picture] = list(fields.pop("pictures", ()))
    tokens = characters = turn = 0
    first: int | None = None
    previous_role = ""
    for part in pieces:
        if not part.text:
            continue
        if previous_role and part.role != previous_role:
            # A turn ends with its last spoken part; parts between two turns belong to the next one.
            turn += previous_role == "assistant"
        previous_role = part.role
        if part.picture is not None:
            part.picture.token = tokens
            pictures.append(part.picture)
        word_ends = np.array([len(part.text)]) if part.picture is not None else split_words(part.text)
        if part.spoken and first is None:
            first = tokens
        texts.append(part.text)
        ends.append(word_ends + characters)
        stop = tokens + len(word_ends)
        segments.append(Segment(part.role, part.kind, part.name, tokens, stop, part.spoken, turn))
        tokens, characters = stop, characters + len(part.text)
    last = next((s.turn for s in reversed(segments) if s.role == "assistant"), 0)
    segments = [s._replace(turn=min(s.turn, last)) for s in segments]
    mask = np.zeros(tokens, dtype=np.bool_)
    for segment in segments:
        mask[segment.start : segment.stop] = segment.trained
    prompt = tokens if first is None else first
    text = "".join(texts)
    trajectory = Trajectory(
        uid="",
        text=text,
        ends=np.concatenate(ends) if ends else np.empty(0, dtype=np.int64),
        prompt_tokens=prompt,
        mask=mask,
        segments=segments,
        tokenized="words",
        pictures=pictures,
        **fields,
    )
    trajectory.prompt = trajectory.prompt or hash_prompt(None, text[: trajectory.prompt_end])
    return trajectory


def build_from_texts(prompt: str, response: str, /, **fields: Any) -> Trajectory:
    """Create a trajectory from the words of a prompt and a response, which may contain chat-template marks."""
    prompt_ends, response_ends = split_words(prompt), split_words(response)
    text, ends = prompt + response, np.concatenate([prompt_ends, response_ends + len(prompt)])
    mask = np.arange(len(ends)) >= len(prompt_ends)
    return Trajectory(
        uid="",
        text=text,
        ends=ends,
        prompt_tokens=len(prompt_ends),
        mask=mask,
        segments=find_segments(text, ends, len(prompt_ends), mask, sampled=mask, exact=False),
        tokenized="words",
        prompt=hash_prompt(None, prompt),
        **{"prompt_text": prompt, "response_text": response, **fields},
    )


def build_conversation(prompt: Json, answer: Json, context: RowContext, /, **fields: Any) -> Trajectory:
    """Create a trajectory from a prompt and an answer, each a text or messages."""
    prompt, answer = remove_nulls(prompt), remove_nulls(answer)
    if isinstance(prompt, str) and isinstance(answer, str):
        return build_from_texts(prompt, answer, **fields)
    prompt_messages: Json = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answer_messages: Json = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if (
        not is_messages(prompt_messages)
        or not isinstance(answer_messages, list)
        or (answer_messages and not is_messages(answer_messages))
    ):
        raise WireError(f"got {type(prompt).__name__} and {type(answer).__name__}, expected a prompt and an answer")
    messages = [*prompt_messages, *answer_messages]
    return build_chat(
        messages, context, lambda i: i >= len(prompt_messages) and messages[i].get("role") == "assistant", **fields
    )


def build_chat(
    messages: list[Any], context: RowContext, spoken: Callable[[int], bool] | None = None, /, **fields: Any
) -> Trajectory:
    """Create a trajectory from the words of a conversation; `spoken` as in `message_parts`."""
    notes: list[str] = list(fields.pop("notes", ()))
    seen: dict[str, Picture] = {}
    parts = message_parts(messages, context, notes, seen, spoken)
    trajectory = build_from_parts(parts, messages=json_safe(replace_images(messages, seen)), notes=notes, **fields)
    trajectory.prompt_text, trajectory.response_text = (
        trajectory.text[: trajectory.prompt_end],
        trajectory.text[trajectory.prompt_end :],
    )
    turns = sum(1 for m in messages if isinstance(m, dict) and m.get("role") == "assistant")
    trajectory.kind = "multi_turn" if turns > 1 else "single_turn"
    return trajectory


def remove_nulls(value: Json) -> Any:
    """Remove null entries from messages, which Parquet adds for keys of other messages."""
    if isinstance(value, dict):
        return {key: remove_nulls(item) for key, item in value.items() if item is not None}
    return [remove_nulls(item) for item in value] if isinstance(value, list) else value


def build_from_ids(
    ids: Sequence[int] | NDArray[Any],
    prompt_tokens: int,
    context: RowContext,
    *,
    mask: ArrayLike | None = None,
    arrays: Mapping[str, Any] | None = None,
    versions: ArrayLike | None = None,
    spans: Sequence[Segment] = (),
    sampled: NDArray[np.bool_] | None = None,
    decoded: tuple[str, Any] | None = None,
    recorded: Json = None,
    **fields: Any,
) -> Trajectory:
    """Create a trajectory from token ids [L].

    Text and ends are `decoded`, or from the vocabulary. Segments follow from them and the `recorded` ones; without
    either, they are `spans`. `mask` and `versions` are [L] or [R]. `arrays` are named as a record's fields and [R], or
    [L] with NaN without a value; arrays of other lengths are omitted, with a note.
    """
    try:
        tokens = np.asarray(ids, dtype=np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"invalid token ids: {error}") from None
    length = len(tokens)
    if not 0 <= prompt_tokens <= length:
        raise WireError(f"prompt_tokens: got {prompt_tokens}, expected 0 to {length}")
    notes: list[str] = list(fields.pop("notes", ()))
    trained = np.arange(length) >= prompt_tokens
    if mask is not None:
        trained_column = _to_column(mask, length, prompt_tokens, 0)
        if trained_column is None:
            notes.append(
                f"mask omitted: {_count(mask)} entries for {length} tokens; the whole response counts as trained."
            )
        else:
            trained = trained_column != 0
    columns: dict[str, NDArray[Any]] = {}
    for name, values in (arrays or {}).items():
        column = None if values is None else _to_column(values, length, prompt_tokens, np.nan)
        if column is not None:
            columns[name] = column
        elif values is not None:
            notes.append(f"{name} omitted: {_count(values)} entries for {length - prompt_tokens} response tokens.")
    policy = None if versions is None else _to_column(versions, length, prompt_tokens, -1)
    exact = True
    special = np.zeros(length, dtype=np.bool_)
    if decoded is not None:
        text, ends = decoded[0], _check_ends(decoded[1], len(decoded[0]), length)
        starts = [0, *ends.tolist()]
        special[:] = [_SPECIAL.fullmatch(text, a, b) is not None for a, b in pairwise(starts)]
    elif context.vocabulary is not None:
        text, ends = context.vocabulary.decode_with_ends(tokens)
        special = context.vocabulary.is_special(tokens)
    else:
        exact = False
        pieces = [f"⟨{token}⟩" for token in tokens.tolist()]
        text, ends = "".join(pieces), np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    segments = [s._replace(trained=bool(trained[s.start : s.stop].any())) for s in spans]
    if exact:
        segments = find_segments(text, ends, prompt_tokens, trained, sampled=sampled, spans=recorded)
    lenses = derive_lenses(columns, trained)
    advantage = fields.pop("advantage", None)
    if advantage is None and "advantage" in lenses and trained.any():
        seen = lenses["advantage"][trained]
        seen = seen[~np.isnan(seen)]
        advantage = float(seen.mean()) if len(seen) else None
    trajectory = Trajectory(
        uid="",
        text=text,
        ends=ends.astype(np.int64),
        prompt_tokens=prompt_tokens,
        ids=tokens,
        special=special,
        tokenized="exact" if exact else "ids",
        mask=trained,
        versions=None if policy is None else policy.astype(np.int64),
        arrays=lenses,
        segments=segments,
        advantage=advantage,
        notes=notes,
        **fields,
    )
    trajectory.prompt = trajectory.prompt or hash_prompt(tokens[:prompt_tokens])
    return trajectory


def _check_ends(values: ArrayLike, characters: int, length: int) -> NDArray[np.int64]:
    """Return [L] ends stated by a file, if they are valid."""
    try:
        ends = np.asarray(values, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"invalid token ends: {error}") from None
    if ends.shape != (length,) or (length and (ends[0] < 0 or ends[-1] != characters or (np.diff(ends) < 0).any())):
        raise WireError(f"token ends: expected {length} ascending offsets up to {characters}")
    return ends


def _count(values: ArrayLike) -> int:
    return len(values) if isinstance(values, Sized) else 1


def _to_column(values: ArrayLike, length: int, prompt_tokens: int, empty: float) -> NDArray[Any] | None:
    """Return [L] from [L], from [R] or from one number; otherwise `None`."""
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    if numbers.ndim == 0:
        numbers = np.full(length - prompt_tokens, float(numbers))
    if numbers.ndim != 1 or len(numbers) not in (length, length - prompt_tokens):
        return None
    if len(numbers) == length:
        return numbers
    padded = np.full(length, empty, dtype=np.float64)
    padded[prompt_tokens:] = numbers
    return padded


# --- messages -------------------------------------------------------------------------------------------------------


def is_messages(value: Json) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a value is a conversation: a list of dicts with roles."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def split_thinking(text: str, role: str, spoken: bool = False) -> list[Part]:
    """Split a text into parts, with think tags as separate parts.

    >>> [(part.kind, part.text) for part in split_thinking("<think>hm</think>5", "assistant")]
    [('think', '<think>hm</think>'), ('text', '5')]
    """
    if role != "assistant" or "<think>" not in text:
        return [Part(text, role, spoken=spoken)]
    parts, at = [], 0
    for match in _THINK.finditer(text):
        parts += [Part(text[at : match.start()], role, spoken=spoken), Part(match[0], role, "think", "", spoken)]
        at = match.end()
    return [part for part in (*parts, Part(text[at:], role, spoken=spoken)) if part.text]


_ROLES = {"developer": "system", "function": "tool", "ipython": "tool", "environment": "tool", "human": "user",
          "gpt": "assistant", "model": "assistant", "system": "system", "user": "user", "assistant": "assistant",
          "tool": "tool"}  # fmt: skip


def message_parts(
    messages: Sequence[Any],
    context: RowContext,
    notes: list[str],
    seen: dict[str, Picture],
    spoken: Callable[[int], bool] | None = None,
) -> list[Part]:
    """Return the parts of a conversation in OpenAI's format and its variants: text, pictures, reasoning, tool calls and
    results.

    `spoken` returns whether the model wrote the message with this index (by default, all of the assistant's). Pictures
    are added to `seen` by their placeholder in the messages.
    """
    parts: list[Part] = []
    names: dict[str, str] = {}
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            notes.append(f"Message {i} omitted: got {type(message).__name__}, expected an object.")
            continue
        role = _ROLES.get(str(message.get("role")), "text")
        by_model = role == "assistant" if spoken is None else spoken(i)
        name = _name(message.get("name")) or _name(message.get("function"))
        if role == "tool":
            name = name or names.get(str(message.get("tool_call_id")), "")
        message_pieces: list[Part] = []
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str) and thought:
            message_pieces.append(Part(thought, role, "think", "", by_model))
        message_pieces += _content_parts(message.get("content"), role, name, by_model, context, notes, seen)
        calls = message.get("tool_calls")
        if isinstance(message.get("function_call"), dict):
            calls = [*(calls if isinstance(calls, list) else []), {"function": message["function_call"]}]
        for call in calls if isinstance(calls, list) else []:
            part, key = _tool_call_part(call, by_model)
            names[key] = part.name
            message_pieces.append(part)
        # Keep a separator between two messages.
        if (
            message_pieces
            and i + 1 < len(messages)
            and not message_pieces[-1].text.endswith("\n")
            and message_pieces[-1].picture is None
        ):
            message_pieces[-1] = message_pieces[-1]._replace(text=message_pieces[-1].text + "\n")
        parts += message_pieces
    return parts


def _name(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _content_parts(
    content: Json, role: str, name: str, by_model: bool, context: RowContext, notes: list[str], seen: dict[str, Picture]
) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        if role == "tool":
            return [Part(content, role, "tool_result", name, by_model)]
        return split_thinking(content, role, by_model)
    parts: list[Part] = []
    items: list[Any] = content if isinstance(content, list) else [content]
    for item in items:
        if isinstance(item, str):
            parts += _content_parts(item, role, name, by_model, context, notes, seen)
            continue
        kind = str(item.get("type", "")) if isinstance(item, dict) else ""
        if isinstance(item, dict) and isinstance(item.get("text"), str):
            parts += _content_parts(item["text"], role, name, by_model, context, notes, seen)
        elif kind in ("reasoning", "thinking") and isinstance(item.get(kind), str):
            parts.append(Part(item[kind], role, "think", "", by_model))
        elif kind in ("image", "image_url", "input_image") or (isinstance(item, dict) and "image_url" in item):
            source = item.get("image_url", item.get("image", item.get("source")))
            parts.append(_picture_part(source, role, by_model, context, notes, seen))
        else:
            shown = json.dumps(json_safe(item if isinstance(item, dict) else {"content": item}), ensure_ascii=False)
            parts.append(Part(shown, role, "text", name, by_model))
    return parts


def _tool_call_part(call: Json, by_model: bool) -> tuple[Part, str]:
    """Return a tool call as JSON, and its id."""
    if isinstance(call, str):
        # Some writers store each call as JSON text.
        written = call
        try:
            call = json.loads(written)
        except (ValueError, RecursionError):
            return Part(written, "assistant", "tool_call", "", by_model), ""
    if not isinstance(call, dict):
        return Part(json.dumps(call, default=str), "assistant", "tool_call", "", by_model), ""
    inner = call.get("function")
    inner = inner if isinstance(inner, dict) else {**call, "name": call.get("name", inner)}
    name, arguments = _name(inner.get("name")), inner.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    shown = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, default=str)
    return Part(shown, "assistant", "tool_call", name, by_model), str(call.get("id", ""))


def _picture_part(
    source: Json, role: str, by_model: bool, context: RowContext, notes: list[str], seen: dict[str, Picture]
) -> Part:
    if isinstance(source, dict):
        source = source.get("url") or source.get("data") or source.get("path")
    image = read_image(source, context, notes)
    if image is not None and isinstance(source, str):
        seen[source] = image
    return Part("⟨image⟩", role, "image", "", by_model, image)


# --- trainers: verl, TRL, OpenRLHF ----------------------------------------------------------------------------------

_LABELS = ("gts", "ground_truth", "answer", "solution", "label", "labels")


def read_verl(row: Row, context: RowContext) -> Iterator[Trajectory]:
    """Convert a row of verl."""
    samples, used = frameworks.split_verl_row(row)
    for sample in samples:
        yield _build_trajectory(sample, row, used, context)


def read_openrlhf(row: Row, context: RowContext) -> Iterator[Trajectory]:
    """Convert a row of OpenRLHF; a pair becomes the chosen answer with the rejected one."""
    samples, used = frameworks.split_openrlhf_row(row)
    for sample in samples:
        trajectory = _build_trajectory(sample, row, used, context)
        if sample.rejected is not None:
            trajectory.kind = "dpo"
            trajectory.rejected = build_conversation(
                sample.prompt, sample.rejected, context, kind="dpo", status="finished"
            )
        yield trajectory


_TRL_TENSORS = {"sampling_per_token_logps": "logprobs", "old_per_token_logps": "old_logprobs"}
_TRL_FIELDS = {
    "prompt", "completion", "prompt_ids", "completion_ids", "step", "global_step", "advantage", "prompt_mask",
    "completion_mask", "tool_mask", "images", *_TRL_TENSORS,
}  # fmt: skip


def read_trl(row: Row, context: RowContext) -> Iterator[Trajectory]:
    """Convert a row of TRL. It logs the rewards of all functions but not their weighted sum; their plain sum is shown,
    which is correct for the default weights of 1.
    """
    floats = {
        name: parse_number(value) for name, value in row.items() if type(value) is float and name not in _TRL_FIELDS
    }
    named = {name: value for name, value in floats.items() if "reward" in name.lower()}
    counted = named or floats
    notes = []
    if len(counted) > 1:
        notes.append(f"TRL does not log the total reward; shown is the unweighted sum of {', '.join(counted)}.")
    rewards = [value for value in counted.values() if value is not None and value == value]
    sample = Sample(row.get("prompt"), row.get("completion"), batch=frameworks.read_step(row))
    sample.reward = math.fsum(rewards) if rewards else math.nan if counted else None
    sample.advantage = parse_number(row.get("advantage"))
    used = {"prompt", "completion", "step", "global_step", "advantage"}
    if row.get("prompt_ids") is not None and row.get("completion_ids") is not None:
        sample.prompt, sample.response = row["prompt_ids"], row["completion_ids"]
        used |= frameworks.unpad_trl_row(row, sample) | {"prompt_ids", "completion_ids"}
    elif sample.prompt is None or sample.response is None:
        raise WireError(f"got the keys {', '.join(row)}, expected prompt and completion, or their ids")
    trajectory = _build_trajectory(sample, row, used, context)
    trajectory.declared = tuple(counted)
    trajectory.notes += notes
    yield trajectory


def _build_trajectory(sample: Sample, row: Row, used: set[str], context: RowContext) -> Trajectory:
    rest = {name: value for name, value in row.items() if name not in used}
    label = next((rest[name] for name in _LABELS if rest.get(name) is not None), None)
    if label is None and isinstance(rest.get("reward_model"), dict):
        label = rest["reward_model"].get("ground_truth")
    parts = parse_numbers({name: value for name, value in rest.items() if isinstance(value, (int, float))})
    fields: dict[str, Any] = {
        "step": parse_int(sample.batch),
        "task": sample.task or "",
        "run": -1 if sample.run is None else sample.run,
        "turn": sample.step,
        "reward": sample.reward,
        "parts": parts,
        "metrics": parts,
        "advantage": sample.advantage,
        "status": "finished",
        "label": json_safe(label),
        "info": {name: json_safe(value) for name, value in rest.items() if name not in parts},
    }
    if not (frameworks.is_token_ids(sample.prompt) and frameworks.is_token_ids(sample.response)):
        return build_conversation(sample.prompt, sample.response, context, **fields)
    arrays = dict(sample.tensors)
    if sample.advantage is not None:
        arrays.setdefault("advantages", sample.advantage)
    for name, source_name in (("prompt_text", "prompt"), ("response_text", "completion")):
        fields[name] = row[source_name] if isinstance(row.get(source_name), str) else None
    trajectory = build_from_ids(
        [*sample.prompt, *sample.response],
        len(sample.prompt),
        context,
        mask=sample.mask,
        arrays=arrays,
        **fields,
    )
    if sample.mask is not None:
        trajectory.kind = "multi_turn"
    return trajectory


_LIGHTRFT_FIELDS = {
    "global_step", "experience_index", "sample_in_exp", "full_sequence", "generated_text",
    "pure_generated_text", "label", "reference", "repeat_score", "reflection_pattern_score",
    "reflection_pattern_details", "policy_entropy", "response_token_count", "generated_tokens",
    "pure_generated_tokens", "advantages", "return", "action_log_probs", "values", "info", "has_images",
    "num_images", "image_paths", "images_base64",
}  # fmt: skip
_LIGHTRFT_ARRAYS = {
    "advantages": "advantages",
    "return": "returns",
    "action_log_probs": "old_logprobs",
    "values": "values",
}
_PADDING = re.compile(r"(<[^<>\s]{1,40}>)\1+")
_LAST = re.compile(r"<[^<>\s]{1,40}>")


def _dict(value: Json) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# --- LightRFT -------------------------------------------------------------------------------------------------------


def read_lightrft(row: Row, context: RowContext) -> Iterator[Trajectory]:
    """Convert a record of LightRFT's saver."""
    full, pure = _text(row.get("full_sequence")), _text(row.get("pure_generated_text"))
    info = _dict(row.get("info"))
    notes: list[str] = []
    prompt, tail = _split_prompt(full, pure, notes)
    pieces = _token_texts(row, pure)
    fields: dict[str, Any] = {
        "step": parse_int(row.get("global_step")),
        "run": -1,
        "reward": parse_number(info.get("reward")),
        "parts": parse_numbers(info.get("reward_metrics")),
        "declared": tuple(parse_numbers(info.get("reward_metrics"))),
        "metrics": parse_numbers({name: row.get(name) for name in ("repeat_score", "reflection_pattern_score")}),
        "status": "finished",
        "label": json_safe(row.get("label")),
        "reference": json_safe(row.get("reference")),
        "info": {
            **json_safe({name: value for name, value in info.items() if name not in ("reward", "reward_metrics")}),
            **json_safe({name: value for name, value in row.items() if name not in _LIGHTRFT_FIELDS}),
        },
        "notes": notes,
        "pictures": _read_images(row, context, notes),
        "evaluation": context.evaluation,
    }
    if row.get("policy_entropy") is not None:
        notes.append(
            "policy_entropy omitted: it is the standard deviation of the log-probs (with padding), not an entropy."
        )
    if prompt is None:
        # The response is not a substring of the full text: special tokens were dropped from it.
        trajectory = build_from_texts("", full or pure, **fields)
        trajectory.segments = (
            [Segment("text", "text", "", 0, len(trajectory.ends), True, 0)] if len(trajectory.ends) else []
        )
        notes.append("Unknown start of the response: its text is not part of the full sequence.")
        _note_omitted_arrays(row, notes, "the tokens are unknown")
    elif pieces is None:
        trajectory = build_from_texts(prompt, pure + tail, **fields)
        _note_omitted_arrays(row, notes, "the tokens are unknown")
    else:
        trajectory = _build_from_tokens(row, prompt, pieces, tail, fields, notes)
    if not tail:
        notes.append("The last response token is not recorded.")
    yield trajectory


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _split_prompt(full: str, pure: str, notes: list[str]) -> tuple[str | None, str]:
    """Return the prompt's text, and the text after the response: the last token, without padding."""
    at = full.rfind(pure) if pure else -1
    if at < 0:
        return (None, "") if pure or full else ("", "")
    padded_prompt, response = full[:at], full[at + len(pure) :]
    padding = _PADDING.match(padded_prompt)
    if padding is not None:
        padded_prompt = padded_prompt[padding.end() :]
        notes.append("Padding before the prompt was removed.")
    match = _LAST.match(response)
    return padded_prompt, match[0] if match else ""


def _token_texts(row: Row, pure: str) -> list[str] | None:
    """Return the texts of the response's tokens except the last, if the file has them."""
    tokens = row.get("pure_generated_tokens")
    if not isinstance(tokens, list) or not tokens:
        return None
    texts = [piece.get("text") if isinstance(piece, dict) else None for piece in tokens]
    return [str(text) for text in texts] if all(isinstance(text, str) for text in texts) else None


def _build_from_tokens(
    row: Row, prompt: str, pieces: list[str], tail: str, fields: dict[str, Any], notes: list[str]
) -> Trajectory:
    """Return the prompt in words, the response in its tokens, and their values."""
    response = "".join(pieces)
    if response != _text(row.get("pure_generated_text")):
        notes.append("Tokens were decoded one by one, so characters that span several tokens are lost.")
    prompt_ends = split_words(prompt)
    sizes = [len(piece) for piece in [*pieces, *([tail] if tail else [])]]
    text = prompt + response + tail
    ends = np.concatenate([prompt_ends, len(prompt) + np.cumsum(sizes, dtype=np.int64)])
    start, length = len(prompt_ends), len(ends)
    arrays: dict[str, Any] = {}
    # Entry j of generated_tokens is at the token before response token j, whose entropy it has.
    tokens = row.get("generated_tokens")
    scores = [parse_number(_dict(entry).get("entropy_score")) for entry in tokens] if isinstance(tokens, list) else []
    if any(score is not None for score in scores):
        column = np.full(length, np.nan)
        entropies = [np.nan if score is None else score for score in scores[: length - start]]
        column[start : start + len(entropies)] = entropies
        arrays["entropy"] = column
        notes.append("Entropies were recorded one token early (corrected), and only the highest.")
    count = len(pieces) + 1
    for source_name, array_name in _LIGHTRFT_ARRAYS.items():
        values = row.get(source_name)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != count:
            _note_omitted(source_name, values, f"the response has {count} tokens", notes)
            continue
        column = np.full(length, np.nan)
        shown = np.array([np.nan if parse_number(value) is None else parse_number(value) for value in values])
        column[start:] = shown[: length - start]
        arrays[array_name] = column
    mask = np.arange(length) >= start
    lenses = derive_lenses(arrays, mask)
    seen = lenses["advantage"][mask] if "advantage" in lenses else np.empty(0)
    seen = seen[~np.isnan(seen)]
    return Trajectory(
        uid="",
        text=text,
        ends=ends,
        prompt_tokens=start,
        mask=mask,
        arrays=lenses,
        segments=find_segments(text, ends, start, mask, sampled=mask, exact=False),
        tokenized="words",
        prompt=hash_prompt(None, prompt),
        prompt_text=prompt,
        response_text=response,
        advantage=float(seen.mean()) if len(seen) else None,
        **fields,
    )


def _note_omitted_arrays(row: Row, notes: list[str], reason: str) -> None:
    for name in _LIGHTRFT_ARRAYS:
        if row.get(name) is not None:
            _note_omitted(name, row[name], reason, notes)


def _note_omitted(name: str, values: Json, reason: str, notes: list[str]) -> None:
    if isinstance(values, list):
        notes.append(f"{name} omitted: {len(values)} numbers, but {reason}.")
    else:
        notes.append(f"{name} omitted: only one number for all tokens.")


def _read_images(row: Row, context: RowContext, notes: list[str]) -> list[Picture]:
    sources = row.get("image_paths") if isinstance(row.get("image_paths"), list) else row.get("images_base64")
    if not isinstance(sources, list):
        return []
    pictures = [read_image(source, context, notes) for source in sources[:256] if source is not None]
    return [image for image in pictures if image is not None]


# --- Rollbook -------------------------------------------------------------------------------------------------------

_ROLLBOOK_ARRAYS = {
    "advantages": "advantages",
    "return": "returns",
    "values": "values",
    "action_log_probs": "old_logprobs",
    "base_action_log_probs": "ref_logprobs",
    "action_entropy": "entropy",
    **{name: name for name in ("logprobs", "teacher_logprobs", "token_level_reward", "loss_weights")},
}
"""Arrays [R] of the saver, and the record's names."""
_ROLLBOOK_FIELDS = {
    *_LIGHTRFT_FIELDS, *_ROLLBOOK_ARRAYS, "uid", "gid", "batch", "task", "run", "turn", "kept", "reward",
    "reward_parts", "prompt_tokens", "prompt_text", "response_text", "token_ids", "text", "token_ends", "mask",
    "segments",
    "policy_versions", "image_sha256", "rejected", "messages", "tools", "sampling", "kind", "finish_reason",
    "truncate_status", "parent", "group_size", "notes", "kl",
}  # fmt: skip


def read_rollbook(row: Row, context: RowContext) -> Iterator[Trajectory]:
    """Convert a record of Rollbook's saver: text, tokens and their ends, and arrays of the response's tokens."""
    ids, text = row.get("token_ids"), _text(row.get("text"))
    prompt, step = parse_int(row.get("prompt_tokens")), parse_int(row.get("global_step"))
    if not isinstance(ids, list) or prompt is None:
        raise WireError("the record has no token_ids, or no prompt_tokens")
    info, more = _dict(row.get("info")), {name: value for name, value in row.items() if name not in _ROLLBOOK_FIELDS}
    notes = [str(note) for note in row["notes"]] if isinstance(row.get("notes"), list) else []
    reason, truncate_status = (_text(row.get(name)) or None for name in ("finish_reason", "truncate_status"))
    fields: dict[str, Any] = {
        "step": step,
        "task": "" if row.get("task") is None else str(row["task"]),
        "reward": parse_number(row.get("reward")),
        "parts": parse_numbers(row.get("reward_parts")),
        "metrics": parse_numbers({name: row.get(name) for name in ("repeat_score", "reflection_pattern_score")}),
        "status": "error" if info.get("error") else classify_status(reason, truncate_status, len(ids) - prompt),
        "finish_reason": reason,
        "truncate_status": truncate_status,
        "kind": row["kind"] if isinstance(row.get("kind"), str) else "single_turn",
        "group_size": parse_int(row.get("group_size")),
        "parent": row["parent"] if isinstance(row.get("parent"), str) else None,
        "prompt_text": _text(row.get("prompt_text")) or None,
        "response_text": _text(row.get("response_text")) or None,
        "messages": json_safe(row["messages"]) if isinstance(row.get("messages"), list) else None,
        "tools": row["tools"] if isinstance(row.get("tools"), list) else None,
        "sampling": _dict(row.get("sampling")) or None,
        "label": json_safe(row.get("label")),
        "reference": json_safe(row.get("reference")),
        "info": json_safe({**{name: value for name, value in info.items() if name != "segments"}, **more}),
        "kept": row["kept"] if isinstance(row.get("kept"), str) else None,
        "notes": notes,
        "evaluation": context.evaluation,
    }
    trajectory = build_from_ids(
        ids,
        prompt,
        context,
        mask=row.get("mask"),
        versions=row.get("policy_versions"),
        arrays={array_name: row.get(source_name) for source_name, array_name in _ROLLBOOK_ARRAYS.items()},
        decoded=(text, row.get("token_ends")),
        recorded=row.get("segments"),
        **fields,
    )
    trajectory.pictures = _read_images(row, context, trajectory.notes)
    other = _dict(row.get("rejected"))
    if other:
        shown = (_text(other.get("text")), other.get("token_ends"))
        trajectory.rejected = build_from_ids(other.get("token_ids") or [], prompt, context, decoded=shown, **fields)
    trajectory.uid = _text(row.get("uid"))
    # Samples without a batch in their ids belong to the step in which they were saved.
    trajectory.gid = (
        _text(row.get("gid")) if row.get("batch") not in (None, "") else EID(step or 0, trajectory.task).tid
    )
    yield trajectory


# --- conversations --------------------------------------------------------------------------------------------------

_MESSAGES_FIELDS = {
    "messages", "conversations", "tools", "reward", "score", "step", "global_step", "metrics", "id", "group",
    "group_id", "prompt_id", "problem_id", "finish_reason", "label", "answer", "advantage",
}  # fmt: skip


def read_messages(row: Row, context: RowContext) -> Iterator[Trajectory]:
    """Convert a row with a conversation and other fields."""
    turns = row.get("messages")
    if isinstance(row.get("conversations"), list):
        turns = [
            {"role": turn["from"], "content": turn.get("value")} if isinstance(turn, dict) and "from" in turn else turn
            for turn in row["conversations"]
        ]
    turns = remove_nulls(turns)
    if not is_messages(turns):
        raise WireError("messages: expected a list of objects with a role")
    key = next((row[n] for n in ("group_id", "group", "prompt_id", "problem_id") if _is_id(row.get(n))), None)
    reason = row.get("finish_reason")
    reward = parse_number(row.get("reward"))
    rest = {name: value for name, value in row.items() if name not in _MESSAGES_FIELDS}
    parts = {
        **parse_numbers(row.get("metrics")),
        **parse_numbers({n: v for n, v in rest.items() if isinstance(v, (int, float))}),
    }
    trajectory = build_chat(
        turns,
        context,
        step=parse_int(row.get("step", row.get("global_step"))),
        task="" if key is None else str(key),
        run=-1,
        reward=reward if reward is not None else parse_number(row.get("score")),
        parts=parts,
        metrics=parts,
        advantage=parse_number(row.get("advantage")),
        status="truncated" if reason in ("length", "max_tokens") else "finished",
        finish_reason=reason if isinstance(reason, str) else None,
        tools=row["tools"] if isinstance(row.get("tools"), list) else None,
        label=json_safe(row.get("label", row.get("answer"))),
        info={name: json_safe(value) for name, value in rest.items() if name not in parts},
        evaluation=context.evaluation,
    )
    if _is_id(row.get("id")):
        trajectory.uid = str(row["id"])
    yield trajectory


def _is_id(value: Json) -> bool:
    return (isinstance(value, str) and 0 < len(value) <= 256) or type(value) is int


# --- inspect --------------------------------------------------------------------------------------------------------

_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
"""Correct, incorrect, partial, no answer: with the values of inspect's metrics."""
_INSPECT_TRUNCATED = ("max_tokens", "model_length", "length")


def read_inspect(row: Row, context: RowContext) -> Iterator[Trajectory]:
    """Convert a sample of an inspect log."""
    attachments = row.get("attachments")
    attachments = attachments if isinstance(attachments, dict) else {}
    turns = _resolve_attachments(remove_nulls(row.get("messages")), attachments)
    if not is_messages(turns):
        prompt = _resolve_attachments(remove_nulls(row.get("input")), attachments)
        turns = (
            prompt if is_messages(prompt) else [{"role": "user", "content": prompt if isinstance(prompt, str) else ""}]
        )
    written = [message.get("source") == "generate" for message in turns]
    spec = _dict(context.log.get("eval"))
    parts = _read_scores(_dict(row.get("scores")))
    choices = _dict(row.get("output")).get("choices")
    reason = _dict(choices[0]).get("stop_reason") if isinstance(choices, list) and choices else None
    limit = row.get("limit")
    error = row.get("error")
    notes = []
    if len(parts) > 1:
        notes.append(f"The reward is the first score, {next(iter(parts))!r}; the others are metrics.")
    epoch = parse_int(row.get("epoch"))
    info: dict[str, Any] = {
        **{name: spec[name] for name in ("task", "model", "run_id", "created") if name in spec},
        **{name: row[name] for name in ("metadata", "choices", "total_time", "model_usage", "limit") if row.get(name)},
        "scores": {name: _without_history(score) for name, score in _dict(row.get("scores")).items()},
        **({"error": error} if error else {}),
    }
    trajectory = build_chat(
        turns,
        context,
        (lambda i: written[i]) if any(written) else None,
        task=str(row.get("id", "")),
        run=epoch - 1 if epoch is not None and epoch > 0 else -1,
        reward=next(iter(parts.values()), None),
        parts=parts,
        metrics=parts,
        status="error"
        if error
        else "truncated"
        if limit or reason in _INSPECT_TRUNCATED
        else "finished"
        if reason
        else "unfinished",
        finish_reason=reason if isinstance(reason, str) else None,
        sampling=_dict(spec.get("model_generate_config")) or None,
        label=json_safe(row.get("target")),
        info=json_safe(info),
        notes=notes,
    )
    trajectory.uid = str(row.get("uuid") or "")
    yield trajectory


def _without_history(score: Json) -> Any:
    return {name: value for name, value in score.items() if name != "history"} if isinstance(score, dict) else score


def _resolve_attachments(value: Json, attachments: dict[str, Any]) -> Any:
    """Replace references to attachments by their contents."""
    if isinstance(value, str):
        attachment = attachments.get(value.removeprefix("attachment://")) if value.startswith("attachment://") else None
        return attachment if isinstance(attachment, str) else value
    if isinstance(value, list):
        return [_resolve_attachments(item, attachments) for item in value]
    return (
        {key: _resolve_attachments(item, attachments) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )


def _read_scores(scores: dict[str, Any]) -> dict[str, float]:
    """Return all numbers of the scorers, by scorer, or by scorer and name."""
    grades: dict[str, float | None] = {}
    for name, score in scores.items():
        value = _dict(score).get("value")
        if isinstance(value, dict):
            grades |= {f"{name}.{key}": _parse_grade(item) for key, item in value.items()}
        elif isinstance(value, list):
            grades |= {f"{name}.{i}": _parse_grade(item) for i, item in enumerate(value)}
        else:
            grades[str(name)] = _parse_grade(value)
    return parse_numbers(grades)


def _parse_grade(value: Json) -> float | None:
    if isinstance(value, str):
        if value in _GRADES:
            return _GRADES[value]
        if value.lower() in ("yes", "true", "no", "false"):
            return float(value.lower() in ("yes", "true"))
        try:
            return float(value)
        except ValueError:
            return None
    return parse_number(value)


# --- verifiers and prime-rl -----------------------------------------------------------------------------------------

_VERIFIERS_TRUNCATED = (
    "max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed", "length",
    "max_turns_reached", "prompt_too_long", "has_max_seq_len", "max_tokens",
)  # fmt: skip


def _list(value: Json) -> list[Any]:
    return value if isinstance(value, list) else []


# --- a row a rollout ------------------------------------------------------------------------------------------------

_VERIFIERS_FIELDS = {
    "example_id", "prompt", "completion", "reward", "metrics", "answer", "info", "task", "error",
    "is_truncated", "is_completed", "stop_condition", "trajectory", "tool_defs", "oai_tools", "advantage",
    "step", "sampling_args", "error_chain", "long_error_chain",
}  # fmt: skip


def read_verifiers(row: Row, context: RowContext) -> Iterator[Trajectory]:
    """Convert a row of `results.jsonl`, or of prime-rl's rollouts of these versions."""
    prompt, completion = remove_nulls(row.get("prompt")), remove_nulls(row.get("completion"))
    metrics = _dict(row.get("metrics"))
    error = row.get("error")
    stopped = row.get("stop_condition")
    is_truncated = bool(row.get("is_truncated")) or stopped in _VERIFIERS_TRUNCATED
    problem = row.get("example_id")
    task = "" if problem is None else f"{row['task']}:{problem}" if isinstance(row.get("task"), str) else str(problem)
    rest = {name: value for name, value in row.items() if name not in _VERIFIERS_FIELDS and name not in metrics}
    fields: dict[str, Any] = {
        "step": parse_int(row.get("step")),
        "task": task,
        "run": -1,
        "reward": parse_number(row.get("reward")),
        "parts": parse_numbers(metrics),
        "metrics": parse_numbers(metrics),
        "advantage": parse_number(row.get("advantage")),
        "status": "error" if error else "truncated" if is_truncated else "finished",
        "finish_reason": stopped if isinstance(stopped, str) else None,
        "tools": _list(row.get("tool_defs") or row.get("oai_tools")) or None,
        "sampling": _dict(row.get("sampling_args")) or None,
        "label": json_safe(row.get("answer")),
        "info": {
            **json_safe(_dict(row.get("info"))),
            **json_safe(rest),
            **({"error": json_safe(error)} if error else {}),
        },
        "evaluation": context.evaluation,
    }
    tokens = _turn_tokens(_list(row.get("trajectory")))
    if completion is None:
        completion = []
    if tokens is None:
        yield build_conversation(prompt if prompt is not None else "", completion, context, **fields)
        return
    ids, mask, logprobs, note = tokens
    messages = [*prompt, *completion] if is_messages(prompt) and isinstance(completion, list) else None
    first = int(np.argmax(mask)) if mask.any() else len(ids)
    words = build_conversation(prompt if prompt is not None else "", completion, context)
    trajectory = build_from_ids(
        ids,
        first,
        context,
        mask=mask,
        sampled=mask,
        arrays={"logprobs": logprobs},
        messages=messages,
        prompt_text=words.prompt_text,
        response_text=words.response_text,
        pictures=words.pictures,
        notes=[*words.notes, *note],
        kind=words.kind,
        **fields,
    )
    yield trajectory


def _turn_tokens(turns: list[Any]) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[Any] | None, list[str]] | None:
    """Return ids, mask and log-probs of a rollout whose turns each have the ids of all previous turns."""
    recorded = [_dict(_dict(turn).get("tokens")) for turn in turns]
    recorded = [
        turn for turn in recorded if _list(turn.get("prompt_ids")) and isinstance(turn.get("completion_ids"), list)
    ]
    if not recorded:
        return None
    ids = np.array([*recorded[-1]["prompt_ids"], *recorded[-1]["completion_ids"]], dtype=np.int64)
    mask, logprobs = np.zeros(len(ids), dtype=np.bool_), np.full(len(ids), np.nan)
    lost = bare = 0
    for turn in recorded:
        whole_turn = np.array([*turn["prompt_ids"], *turn["completion_ids"]], dtype=np.int64)
        start, stop = len(turn["prompt_ids"]), len(whole_turn)
        if not np.array_equal(ids[:stop], whole_turn):
            lost += 1
            continue
        chosen = _list(turn.get("completion_mask"))
        mask[start:stop] = np.array(chosen, dtype=bool) if len(chosen) == stop - start else True
        values = _list(turn.get("completion_logprobs"))
        if len(values) == stop - start:
            logprobs[start:stop] = np.array(values, dtype=np.float64)
        else:
            bare += 1
    notes = []
    if lost:
        notes.append(
            f"{lost} of {len(recorded)} turns have another prefix than the last turn; their tokens are not marked."
        )
    if bare:
        notes.append(f"logprobs omitted: {bare} of {len(recorded)} turns do not have one per token.")
    return ids, mask, None if bare else logprobs, notes


# --- traces ---------------------------------------------------------------------------------------------------------


def read_trace(row: Row, context: RowContext) -> Iterator[Trajectory]:
    """Convert an episode of traces, or a single trace."""
    if "traces" not in row:
        yield from _read_branches(row, row, context)
        return
    any_trace = False
    for entry in _list(row["traces"]):
        if isinstance(entry, dict):
            for trajectory in _read_branches(entry, row, context):
                any_trace = True
                yield trajectory
    if not any_trace:
        # The episode failed before the first model call.
        data = _dict(_dict(row.get("task")).get("data"))
        prompt = data.get("prompt")
        yield build_conversation(
            prompt if isinstance(prompt, str) or is_messages(prompt) else "",
            [],
            context,
            **_trace_fields(row, row, context),
        )


def _trace_fields(trace: Row, episode: Row, context: RowContext) -> dict[str, Any]:
    run = _dict(episode.get("run"))
    work = _dict(run.get("work"))
    info = _dict(trace.get("info"))
    stamped = _dict(info.get("prime_rl"))
    task = _dict(trace.get("task") or episode.get("task"))
    data = _dict(task.get("data"))
    group = _dict(episode.get("group")).get("id") or stamped.get("group_id")
    key = group or task.get("key") or task.get("hash") or data.get("idx")
    env = _dict(episode.get("env")).get("id") or _dict(episode.get("env")).get("name") or stamped.get("env_name")
    rewards = {name: _dict(value) for name, value in _dict(trace.get("rewards")).items() if value is not None}
    scores = [(parse_number(r.get("score")), parse_number(r.get("weight", 1.0))) for r in rewards.values()]
    errors = _list(trace.get("errors"))
    stopped = trace.get("stop_condition")
    calls = [call for call in _list(trace.get("calls")) if isinstance(call, dict) and not call.get("error")]
    finish = calls[-1].get("finish_reason") if calls else None
    is_truncated = stopped in _VERIFIERS_TRUNCATED or finish == "length"
    done = bool(trace.get("is_completed"))
    status = (
        "error"
        if errors and not trace.get("ok")
        else "truncated"
        if is_truncated
        else "finished"
        if done
        else "unfinished"
    )
    policy = _dict(work.get("policy"))
    extras = {name: trace[name] for name in ("stop_condition", "errors", "timing", "agent") if trace.get(name)}
    if policy:
        extras["policy"] = policy
    kind = work.get("type") or info.get("kind")
    return {
        "step": parse_int(work.get("step", stamped.get("step"))),
        "task": "" if key is None else f"{env}:{key}" if env and not group else str(key),
        "run": -1,
        "reward": sum(s * w for s, w in scores if s is not None and w is not None) if scores else None,
        "parts": {
            **parse_numbers({name: r.get("score") for name, r in rewards.items()}),
            **parse_numbers(trace.get("metrics")),
        },
        "declared": tuple(rewards),
        "metrics": parse_numbers(trace.get("metrics")),
        "advantage": parse_number(info.get("advantage")),
        "status": status,
        "finish_reason": finish if isinstance(finish, str) else None,
        "label": json_safe(data.get("answer")),
        "tools": _list(trace.get("tools")) or None,
        "sampling": _dict(calls[-1].get("sampling")) or None if calls else None,
        "info": {**json_safe(info), **json_safe(extras), "task": json_safe(data), "env": env},
        "evaluation": (kind == "eval" and run.get("type") == "train") or context.evaluation,
    }


def _read_branches(trace: Row, episode: Row, context: RowContext) -> Iterator[Trajectory]:
    nodes = _list(trace.get("nodes"))
    if not all(isinstance(node, dict) and isinstance(node.get("message"), dict) for node in nodes):
        raise WireError("a node of the trace has no message")
    fields = _trace_fields(trace, episode, context)
    work = _dict(_dict(_dict(episode.get("run")).get("work")).get("policy"))
    versions = (parse_int(work.get("start")), parse_int(work.get("end")))
    for number_of, path in enumerate(_root_to_leaf_paths(nodes)):
        branch_nodes = [nodes[i] for i in path]
        trajectory = _build_branch(branch_nodes, context, {**fields, "turn": number_of}, versions)
        trajectory.uid = str(trace.get("id") or "")
        trajectory.tools = _list(branch_nodes[0].get("tools")) or trajectory.tools
        yield trajectory


def _root_to_leaf_paths(nodes: list[Row]) -> list[list[int]]:
    """Return the paths from the root to each leaf, as node indices."""
    parents = [node.get("parent") for node in nodes]
    for i, parent in enumerate(parents):
        if parent is not None and (type(parent) is not int or not 0 <= parent < i):
            raise WireError(f"trace node {i}: got parent {parent!r}, expected an earlier node")
    paths = []
    for leaf in sorted(set(range(len(nodes))) - {parent for parent in parents if parent is not None}):
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = parents[at]
        paths.append(path[::-1])
    return paths


_STREAMS = {
    "logprobs": "logprobs",
    "trainer_logprobs": "old_logprobs",
    "reference_logprobs": "ref_logprobs",
    "entropies": "entropy",
    "advantages": "advantages",
}


def _build_branch(
    nodes: list[Row], context: RowContext, fields: dict[str, Any], versions: tuple[int | None, int | None]
) -> Trajectory:
    messages = [node["message"] for node in nodes]
    words = build_chat(messages, context, lambda i: bool(nodes[i].get("sampled")), **fields)
    counts = [len(_list(node.get("token_ids"))) for node in nodes]
    if not any(counts):
        return words
    if any(len(_list(node.get("mask"))) != count for node, count in zip(nodes, counts, strict=True)):
        words.notes.append("The masks and token ids have different lengths, so words are shown.")
        return words
    ids = [token for node in nodes for token in _list(node.get("token_ids"))]
    mask = np.array([bool(flag) for node in nodes for flag in _list(node.get("mask"))], dtype=np.bool_)
    arrays: dict[str, NDArray[Any]] = {}
    notes: list[str] = []
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    for source_name, array_name in _STREAMS.items():
        column, filled = np.full(len(ids), np.nan), 0
        for node, start, stop in zip(nodes, starts, starts[1:], strict=False):
            values, at = _list(node.get(source_name)), start + np.flatnonzero(mask[start:stop])
            if values and len(values) == len(at):
                column[at] = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
                filled += len(at)
        # A token without a value would look like one with NaN.
        if filled == mask.sum() > 0:
            arrays[array_name] = column
        elif any(node.get(source_name) for node in nodes):
            notes.append(f"{source_name} omitted: recorded for {filled} of {mask.sum()} sampled tokens.")
    spans, turn = [], 0
    for node, start, stop in zip(nodes, starts, starts[1:], strict=False):
        role = str(node["message"].get("role"))
        role = role if role in ("system", "user", "assistant", "tool") else "text"
        kind = "tool_result" if role == "tool" else "text"
        name = node["message"].get("name")
        if stop > start:
            spans.append(Segment(role, kind, name if isinstance(name, str) else "", start, stop, False, turn))
        turn += role == "assistant"
    low, high = versions
    if low is not None and low == high:
        policy: Any = np.where(mask, low, -1)
    else:
        policy = None
        if low is not None:
            notes.append(f"The policy changed from version {low} to {high} during sampling.")
    first = int(np.argmax(mask)) if mask.any() else len(ids)
    fields = dict(fields)
    if "advantages" in arrays:
        fields.pop("advantage")
    last = max(turn - 1, 0)
    return build_from_ids(
        ids,
        first,
        context,
        mask=mask,
        sampled=mask,
        arrays=arrays,
        versions=policy,
        spans=[span._replace(turn=min(span.turn, last)) for span in spans],
        messages=messages,
        prompt_text=words.prompt_text,
        response_text=words.response_text,
        pictures=words.pictures,
        notes=[*words.notes, *notes],
        kind=words.kind,
        **fields,
    )
