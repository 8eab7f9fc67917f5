"""Builders of trajectories: from texts and messages, cut into words, or from token ids with their numbers.

Invariant: the words of a text, joined, are the text. A number is kept for a token only if the file has one for each
token of a known kind; what is left out is reported in `notes`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollbook.core.errors import WireError
from rollbook.inspect.images import Where, picture, pictured
from rollbook.inspect.serialization import json_safe
from rollbook.inspect.trajectory import Picture, Segment, Trajectory, derive, prompt_hash, segments_of

_EAST = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf" ?[^\W{_EAST}]{{1,24}}|\w| ?[^\w\s]|\n+| +|\s")
_SPECIAL = re.compile(r"<[|\uff5c][^<>\s]{1,60}[|\uff5c]>|</?s>|<(?:bos|eos|pad|unk)>|\[(?:PAD|CLS|SEP|UNK|MASK)\]")
_THINK = re.compile(r"<think>.*?(?:</think>\n*|\Z)", re.S)


class Part(NamedTuple):
    """A stretch of text with one speaker."""

    text: str
    role: str
    kind: str = "text"
    name: str = ""
    spoken: bool = False
    """Whether the model wrote it."""
    picture: Picture | None = None


def words(text: str) -> NDArray[np.int64]:
    """Where the words of a text end: what stands for tokens where only text is known.

    >>> words("Let me see: 2 + 3\\n\\n五個").tolist()
    [3, 6, 10, 11, 13, 15, 17, 19, 20, 21]
    """
    # Every character is of a word, so that their lengths say where they end.
    return np.cumsum(list(map(len, _WORD.findall(text))), dtype=np.int64)


def from_parts(pieces: Iterable[Part], /, **fields: Any) -> Trajectory:
    """A trajectory of words: a segment for each part, what stands before the first spoken part is the prompt."""
    texts: list[str] = []
    ends: list[NDArray[np.int64]] = []
    segments: list[Segment] = []
    pictures: list[Picture] = list(fields.pop("pictures", ()))
    tokens = characters = turn = 0
    first: int | None = None
    before = ""
    for part in pieces:
        if not part.text:
            continue
        if before and part.role != before:
            # A turn ends with its last spoken part; what stands between two turns belongs to the one that follows.
            turn += before == "assistant"
        before = part.role
        if part.picture is not None:
            part.picture.token = tokens
            pictures.append(part.picture)
        cut = np.array([len(part.text)]) if part.picture is not None else words(part.text)
        if part.spoken and first is None:
            first = tokens
        texts.append(part.text)
        ends.append(cut + characters)
        stop = tokens + len(cut)
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
    trajectory.prompt = trajectory.prompt or prompt_hash(None, text[: trajectory.prompt_end])
    return trajectory


def from_texts(prompt: str, response: str, /, **fields: Any) -> Trajectory:
    """A trajectory of a prompt's and a response's words; a chat template's marks in them are understood."""
    before, behind = words(prompt), words(response)
    text, ends = prompt + response, np.concatenate([before, behind + len(prompt)])
    mask = np.arange(len(ends)) >= len(before)
    return Trajectory(
        uid="",
        text=text,
        ends=ends,
        prompt_tokens=len(before),
        mask=mask,
        segments=segments_of(text, ends, len(before), mask, sampled=mask, exact=False),
        tokenized="words",
        prompt=prompt_hash(None, prompt),
        **{"prompt_text": prompt, "response_text": response, **fields},
    )


def conversation(prompt: Any, answer: Any, where: Where, /, **fields: Any) -> Trajectory:
    """A trajectory of a prompt and an answer, each a text or messages."""
    prompt, answer = without_nulls(prompt), without_nulls(answer)
    if isinstance(prompt, str) and isinstance(answer, str):
        return from_texts(prompt, answer, **fields)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    behind = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if not is_messages(before) or not (is_messages(behind) or behind == []):
        raise WireError(
            f"got a {type(prompt).__name__} and a {type(answer).__name__} where a prompt and an answer should be"
        )
    messages = [*before, *behind]
    return chat(messages, where, lambda i: i >= len(before) and messages[i].get("role") == "assistant", **fields)


def chat(
    messages: list[Any], where: Where, spoken: Callable[[int], bool] | None = None, /, **fields: Any
) -> Trajectory:
    """A trajectory of a conversation's words; `spoken` as in `message_parts`."""
    notes: list[str] = list(fields.pop("notes", ()))
    seen: dict[str, Picture] = {}
    parts = message_parts(messages, where, notes, seen, spoken)
    trajectory = from_parts(parts, messages=json_safe(pictured(messages, seen)), notes=notes, **fields)
    trajectory.prompt_text, trajectory.response_text = (
        trajectory.text[: trajectory.prompt_end],
        trajectory.text[trajectory.prompt_end :],
    )
    turns = sum(1 for m in messages if isinstance(m, dict) and m.get("role") == "assistant")
    trajectory.kind = "multi_turn" if turns > 1 else "single_turn"
    return trajectory


def without_nulls(value: Any) -> Any:
    """Messages as they were: in Parquet every message has the keys of all, null where it has none."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def from_ids(
    ids: Sequence[int] | NDArray[Any],
    prompt_tokens: int,
    where: Where,
    *,
    mask: Any = None,
    arrays: Mapping[str, Any] | None = None,
    versions: Any = None,
    spans: Sequence[Segment] = (),
    sampled: NDArray[np.bool_] | None = None,
    decoded: tuple[str, Any] | None = None,
    recorded: Any = None,
    **fields: Any,
) -> Trajectory:
    """A trajectory of token ids [L]. Its text and ends are `decoded` or the vocabulary's, and its segments follow from
    them and what was `recorded`; without either, they are `spans`. `mask` and `versions` are [L] or [R]; `arrays` are
    named as a record's fields and [R], or [L] with NaN where there is no value; one of another length is left out, with
    a note."""
    try:
        tokens = np.asarray(ids, dtype=np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"the token ids are none: {error}") from None
    length = len(tokens)
    if not 0 <= prompt_tokens <= length:
        raise WireError(f"the prompt has {prompt_tokens} of {length} tokens")
    notes: list[str] = list(fields.pop("notes", ()))
    trained = np.arange(length) >= prompt_tokens
    if mask is not None:
        trained_column = _column(mask, length, prompt_tokens, 0)
        if trained_column is None:
            notes.append(f"The mask has {len(mask)} entries for {length} tokens, so all of the response is shown.")
        else:
            trained = trained_column != 0
    columns: dict[str, NDArray[Any]] = {}
    for name, values in (arrays or {}).items():
        column = None if values is None else _column(values, length, prompt_tokens, np.nan)
        if column is not None:
            columns[name] = column
        elif values is not None:
            notes.append(
                f"{name} is left out: it has {_count(values)} entries for {length - prompt_tokens} response tokens."
            )
    policy = None if versions is None else _column(versions, length, prompt_tokens, -1)
    exact = True
    special = np.zeros(length, dtype=np.bool_)
    if decoded is not None:
        text, ends = decoded[0], _ends(decoded[1], len(decoded[0]), length)
        starts = [0, *ends.tolist()]
        special[:] = [_SPECIAL.fullmatch(text, a, b) is not None for a, b in pairwise(starts)]
    elif where.vocabulary is not None:
        text, ends = where.vocabulary.text_and_ends(tokens)
        special = where.vocabulary.special(tokens)
    else:
        exact = False
        pieces = [f"⟨{token}⟩" for token in tokens.tolist()]
        text, ends = "".join(pieces), np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    segments = [s._replace(trained=bool(trained[s.start : s.stop].any())) for s in spans]
    if exact:
        segments = segments_of(text, ends, prompt_tokens, trained, sampled=sampled, spans=recorded)
    lenses = derive(columns, trained)
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
    trajectory.prompt = trajectory.prompt or prompt_hash(tokens[:prompt_tokens])
    return trajectory


def _ends(values: Any, characters: int, length: int) -> NDArray[np.int64]:
    """[L] Ends that a file states, if they are what ends can be."""
    try:
        ends = np.asarray(values, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"the ends of the tokens are none: {error}") from None
    if ends.shape != (length,) or (length and (ends[0] < 0 or ends[-1] != characters or (np.diff(ends) < 0).any())):
        raise WireError(f"the ends of {length} tokens in {characters} characters do not rise to the last of them")
    return ends


def _count(values: Any) -> int:
    return len(values) if hasattr(values, "__len__") else 1


def _column(values: Any, length: int, prompt_tokens: int, empty: float) -> NDArray[Any] | None:
    """[L] from [L], from [R] or from one number; `None` if it is neither."""
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


def is_messages(value: Any) -> bool:
    """Whether this is a conversation: a list of dicts with roles."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def text_parts(text: str, role: str, spoken: bool = False) -> list[Part]:
    """A text, what stands in think tags apart.

    >>> [(part.kind, part.text) for part in text_parts("<think>hm</think>5", "assistant")]
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
    where: Where,
    notes: list[str],
    seen: dict[str, Picture],
    spoken: Callable[[int], bool] | None = None,
) -> list[Part]:
    """The parts of a conversation, in OpenAI's form and its relatives: contents of text, pictures, reasoning, calls of
    tools and their results. `spoken` says of a message's number whether the model wrote it (all of the assistant's).
    Pictures are put into `seen` by what stands for them in the messages."""
    parts: list[Part] = []
    names: dict[str, str] = {}
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            notes.append(f"Message {i} is a {type(message).__name__}, not an object, and left out.")
            continue
        role = _ROLES.get(str(message.get("role")), "text")
        by_model = role == "assistant" if spoken is None else spoken(i)
        name = _name(message.get("name")) or _name(message.get("function"))
        if role == "tool":
            name = name or names.get(str(message.get("tool_call_id")), "")
        here: list[Part] = []
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str) and thought:
            here.append(Part(thought, role, "think", "", by_model))
        here += _content(message.get("content"), role, name, by_model, where, notes, seen)
        calls = message.get("tool_calls")
        if isinstance(message.get("function_call"), dict):
            calls = [*(calls if isinstance(calls, list) else []), {"function": message["function_call"]}]
        for call in calls if isinstance(calls, list) else []:
            part, key = _call(call, by_model)
            names[key] = part.name
            here.append(part)
        # Two messages do not run into each other.
        if here and i + 1 < len(messages) and not here[-1].text.endswith("\n") and here[-1].picture is None:
            here[-1] = here[-1]._replace(text=here[-1].text + "\n")
        parts += here
    return parts


def _name(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _content(
    content: Any, role: str, name: str, by_model: bool, where: Where, notes: list[str], seen: dict[str, Picture]
) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        if role == "tool":
            return [Part(content, role, "tool_result", name, by_model)]
        return text_parts(content, role, by_model)
    parts: list[Part] = []
    for item in content if isinstance(content, list) else [content]:
        if isinstance(item, str):
            parts += _content(item, role, name, by_model, where, notes, seen)
            continue
        kind = str(item.get("type", "")) if isinstance(item, dict) else ""
        if isinstance(item, dict) and isinstance(item.get("text"), str):
            parts += _content(item["text"], role, name, by_model, where, notes, seen)
        elif kind in ("reasoning", "thinking") and isinstance(item.get(kind), str):
            parts.append(Part(item[kind], role, "think", "", by_model))
        elif kind in ("image", "image_url", "input_image") or (isinstance(item, dict) and "image_url" in item):
            source = item.get("image_url", item.get("image", item.get("source")))
            parts.append(_picture_part(source, role, by_model, where, notes, seen))
        else:
            shown = json.dumps(json_safe(item if isinstance(item, dict) else {"content": item}), ensure_ascii=False)
            parts.append(Part(shown, role, "text", name, by_model))
    return parts


def _call(call: Any, by_model: bool) -> tuple[Part, str]:
    """A call of a tool as JSON, and its id."""
    if isinstance(call, str):
        # Some writers keep each call as a text of JSON.
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            return Part(call, "assistant", "tool_call", "", by_model), ""
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
    source: Any, role: str, by_model: bool, where: Where, notes: list[str], seen: dict[str, Picture]
) -> Part:
    if isinstance(source, dict):
        source = source.get("url") or source.get("data") or source.get("path")
    image = picture(source, where, notes)
    if image is not None and isinstance(source, str):
        seen[source] = image
    return Part("⟨image⟩", role, "image", "", by_model, image)
