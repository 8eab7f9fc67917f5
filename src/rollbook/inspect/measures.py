"""What is measured of a sample's tokens: repetition, entropy, mismatch and the other columns of the index.

Invariant: a row is the same whether it comes from a book's columns, many records at once, or from one `Trajectory`.
Means and extremes are over tokens that are trained on and numbers that are finite; what was not recorded is `None`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rollbook.inspect.documents import Trajectory

if TYPE_CHECKING:
    from rollbook.inspect.index import Index

SHOWN_LETTERS = 240
GRAM = 8
LONGEST_PERIOD = 64
REPEATS = 4
SHORTEST = 16
_END_TOKENS = 4
_FACTORS = np.random.default_rng(8).integers(1, 2**63, GRAM, dtype=np.uint64) | np.uint64(1)


# --- repetition -----------------------------------------------------------------------------------------------------


def repetition(ids: NDArray[Any]) -> tuple[float, int | None]:
    """How much of a response [R] repeats itself, from 0 to 1, and the token where a loop at its end begins.

    A loop: the response ends in at least 4 repeats of up to 64 tokens, 16 tokens or more together; the last repeat may
    be cut, and up to 4 other tokens (an end of text) may follow. Its share is that of its tokens, the first repeat
    too. Where there is no loop, or its share is less: the share of the 8-grams that stand in the response earlier
    already, which finds loops that ended, and blocks that were copied. Below 16 tokens the answer is 0.

    >>> repetition(np.array([5, 6, 7, 8] + [1, 2, 3] * 20))
    (0.9375, 4)
    >>> repetition(np.arange(100))
    (0.0, None)
    """
    count = len(ids)
    if count < SHORTEST:
        return 0.0, None
    grams = _grams(np.asarray(ids))
    ordered = np.sort(grams)
    again = int((ordered[1:] == ordered[:-1]).sum())
    if not again:
        return 0.0, None
    share = again / len(grams)
    found = _loop(ids, grams)
    if found is None:
        return share, None
    start, stop = found
    return max(share, (stop - start) / count), start


def _grams(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """[R - 7] A hash of each 8 tokens in a row."""
    numbers = ids.astype(np.uint64)
    size = len(numbers) - GRAM + 1
    grams: NDArray[np.uint64] = numbers[:size] * _FACTORS[0]
    for i in range(1, GRAM):
        grams += numbers[i : i + size] * _FACTORS[i]
    return grams


def _loop(ids: NDArray[Any], grams: NDArray[np.uint64]) -> tuple[int, int] | None:
    """The tokens [start, stop) of a loop at the end."""
    best = None
    for skipped in range(min(_END_TOKENS + 1, len(grams) - 1)):
        stop = len(ids) - skipped
        last = len(grams) - 1 - skipped
        # The period is the distance to where the last 8 tokens stood before.
        near = grams[max(0, last - LONGEST_PERIOD) : last]
        before = np.flatnonzero(near == grams[last])
        if not len(before):
            continue
        period = len(near) - int(before[-1])
        same = ids[period:stop] == ids[: stop - period]
        differs = np.flatnonzero(~same[::-1])
        covered = (int(differs[0]) if len(differs) else len(same)) + period
        long = covered >= max(SHORTEST, REPEATS * period)
        if long and (best is None or covered > best[1] - best[0]):
            best = (stop - covered, stop)
    return best


def own_tokens(response: NDArray[Any], mask: NDArray[np.bool_]) -> tuple[float, int | None, int | None]:
    """Measure repetition, the start of a final loop and the digest over the tokens that the model chose.

    Tool output and other masked tokens repeat for reasons of their own. A response without any such token is measured
    as it is.

    >>> read_file = [7, 8, 9] * 20
    >>> own_tokens(np.array([1, 2, *read_file, 3]), np.array([True, True, *[False] * 60, True]))[:2]
    (0.0, None)
    """
    chosen = np.flatnonzero(mask)
    if not len(chosen) or len(chosen) == len(response):
        share, loop = repetition(response)
        return share, loop, digest_of(response)
    own = response[chosen]
    share, loop = repetition(own)
    return share, None if loop is None else int(chosen[loop]), digest_of(own)


def digest_of(ids: NDArray[Any]) -> int | None:
    """63 bits that two equal responses share; `None` for an empty one."""
    if not len(ids):
        return None
    return int(xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, dtype="<i8").data) >> 1)


# --- texts ----------------------------------------------------------------------------------------------------------

_USER = re.compile(
    r"<\|im_start\|>user\n|<\|start_header_id\|>user<\|end_header_id\|>\s*|<start_of_turn>user\n|\[INST\]|<\uff5cUser\uff5c>|"
    r"<\|user\|>|(?:^|\n)(?:User|Human|### Instruction): ?"
)
"""Where the user's words begin in prompts of the usual templates."""
_USER_ENDS = re.compile(
    r"<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|\[/INST\]|<\uff5cAssistant\uff5c>|<\|assistant\|>|<\|end\|>|"
    r"\n(?:Assistant|### Response):"
)
_READ_LETTERS = 20_000


def opening_of(text: str) -> str:
    """What the user asks in a prompt, its first 240 letters, spaces collapsed; of a text without roles, its beginning.

    >>> opening_of("<|im_start|>system\\nBe brief.<|im_end|>\\n<|im_start|>user\\nWhat is  2+2?<|im_end|>")
    'What is 2+2?'
    """
    text = text[:_READ_LETTERS]
    found = _USER.search(text)
    if found is not None:
        end = _USER_ENDS.search(text, found.end())
        asked = _short(text[found.end() : end.start() if end else len(text)])
        if asked:
            return asked
    return _short(text)


def _short(text: str) -> str:
    return " ".join(text[: 4 * SHOWN_LETTERS].split())[:SHOWN_LETTERS]


def closing_of(text: str) -> str:
    """The last 240 letters of a response, spaces collapsed.

    >>> closing_of("So the\\n answer is 4.")
    'So the answer is 4.'
    """
    return " ".join(text[-4 * SHOWN_LETTERS :].split())[-SHOWN_LETTERS:]


_IMAGES = ('"type":"image_url"', '"type":"image"', '"type":"input_image"')


def asked_in(messages: Any) -> str:
    """The first words of the user in a conversation; nothing if it has none."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, str):
                return _short(content)
            parts = [part.get("text") for part in content or () if isinstance(part, Mapping)]
            return _short(" ".join(part for part in parts if isinstance(part, str)))
    return ""


def spoken_in(text: str) -> tuple[int, int, int]:
    """How often the model speaks, calls of tools, and images, in a conversation as compact JSON.

    Inside a JSON text quotes are escaped, so that what somebody said is never counted.

    >>> spoken_in('[{"role":"user","content":"hi"},{"role":"assistant","tool_calls":[{},{}]},{"role":"tool"}]')
    (1, 2, 0)
    """
    calls = text.count('"role":"tool"')
    if '"tool_calls":[' in text:
        try:
            messages = json.loads(text)
        except (RecursionError, ValueError):
            messages = []
        listed = [one.get("tool_calls") for one in messages if isinstance(one, Mapping)]
        calls = max(calls, sum(len(each) for each in listed if isinstance(each, list)))
    return text.count('"role":"assistant"'), calls, sum(text.count(mark) for mark in _IMAGES)


def parts_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The named numbers of a sample: those that are finite, True and False as 1 and 0.

    >>> parts_of({"accuracy": True, "length": -0.5, "note": "x", "bad": float("nan")})
    {'accuracy': 1.0, 'length': -0.5}
    """
    found = {}
    for name, value in metrics.items():
        if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
            try:
                number = float(value)
            except OverflowError:
                continue
            if math.isfinite(number):
                found[str(name)] = number
    return found


def declared_in(info: Any) -> tuple[str, ...]:
    """The parts of the reward that a record's `info` names.

    >>> declared_in({"reward_parts": ["accuracy", "format"]}), declared_in({})
    (('accuracy', 'format'), ())
    """
    names = info.get("reward_parts") if isinstance(info, Mapping) else None
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


# --- rows -----------------------------------------------------------------------------------------------------------


def row_of(document: Trajectory) -> dict[str, Any]:
    """The row of `samples` of one trajectory, without its number.

    >>> one = Trajectory(uid="3/1/0/0/a", gid="3/1", step=3, text="2+2=4", ends=np.arange(1, 6), prompt_tokens=4,
    ...                  reward=1.0, arrays={"entropy": np.array([np.nan] * 4 + [0.5], np.float32)})
    >>> row = row_of(one)
    >>> row["reward"], row["entropy"], row["response_tokens"], row["trained_tokens"], row["opening"], row["closing"]
    (1.0, 0.5, 1, 1, '2+2=', '4')
    """
    start, length = document.prompt_tokens, document.tokens
    ids = document.ids
    if ids is None:
        words = [document.token(i) for i in range(start, length)]
        response: NDArray[Any] = np.array(
            [xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass")) >> 2 for word in words], dtype=np.int64
        )
    else:
        response = ids[start:]
    trained = document.mask & (np.arange(length) >= start)
    share, loop, digest = own_tokens(response, document.mask[start:])
    prompt_text = document.text[: document.prompt_end] if document.prompt_text is None else document.prompt_text
    said = document.text[document.prompt_end :] if document.response_text is None else document.response_text
    versions = None if document.versions is None else document.versions[trained & (document.versions >= 0)]
    if document.versions is not None and versions is not None and not len(versions):
        versions = document.versions[document.versions >= 0]
    reward, scored = scored_as(document.reward)
    turns = {segment.turn for segment in document.segments if segment.role == "assistant"}
    answered = sum(segment.kind == "tool_result" for segment in document.segments)
    called = sum(segment.kind == "tool_call" for segment in document.segments)
    # LightRFT's files, which know words, have the highest entropies alone: no mean is made of them, and no NaNs.
    known = document.arrays.get("entropy")
    some = document.tokenized == "words" and known is not None and not np.isfinite(known[trained]).all()
    lenses = {n: v for n, v in document.arrays.items() if n != "entropy" or not some}
    bad = np.zeros(length, dtype=np.bool_)
    for name in (each for each in _RECORDED if each in lenses):
        bad |= ~np.isfinite(lenses[name])
    if "kl" in lenses:
        bad |= np.isnan(lenses["kl"])
    advantage = document.advantage
    if advantage is None and "advantage" in lenses:
        advantage = _metrics({"entropy": lenses["advantage"][trained]})["entropy"]
    return {
        "uid": document.uid,
        "gid": document.gid or document.uid,
        "step": document.step or 0,
        "task": str(document.task),
        "run": document.run,
        "turn": document.turn,
        "prompt": document.prompt,
        "evaluation": int(document.evaluation),
        "reward": reward,
        "scored": scored,
        "parts": json.dumps(parts_of(document.parts)),
        "advantage": plain(advantage),
        "length": length,
        "prompt_tokens": start,
        "response_tokens": length - start,
        "trained_tokens": int(trained.sum()),
        "version_min": int(versions.min()) if versions is not None and len(versions) else None,
        "version_max": int(versions.max()) if versions is not None and len(versions) else None,
        "finish_reason": document.finish_reason,
        "status": document.status,
        "kind": document.kind,
        "group_size": document.group_size,
        "parent": document.parent,
        **_metrics({name: values[trained] for name, values in lenses.items()}),
        "nans": int((bad & trained).sum()) + (scored == 2),
        "repetition": share,
        "loop_at": loop,
        "turns": len(turns),
        "tool_calls": max(called, answered),
        "images": len(document.pictures),
        "digest": digest,
        "opening": asked_in(document.messages) or opening_of(prompt_text),
        "closing": closing_of(said),
        "kept": document.kept,
        "state": "evaluation" if document.evaluation else "",
        "measured": 1,
    }


TOKEN_METRICS = (
    ("entropy", "entropy", "mean"),
    ("entropy_max", "entropy", "max"),
    ("logprob", "logprob", "mean"),
    ("kl", "kl", "mean"),
    ("kl_max", "kl", "max"),
    ("mismatch", "mismatch", "mean"),
    ("mismatch_max", "mismatch", "max"),
)
"""Columns of the index that are a mean or the highest of a lens (of mismatch, of its distance from 0)."""
_RECORDED = ("entropy", "logprob", "mismatch", "advantage", "value", "reward", "return", "weight", "teacher")
"""The lenses whose numbers should be finite wherever a token is trained on."""


def _metrics(trained: Mapping[str, NDArray[Any]]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for column, lens, how in TOKEN_METRICS:
        values = trained.get(lens, _NOTHING)
        values = values[np.isfinite(values)].astype(np.float64)
        if lens == "mismatch":
            values = np.abs(values)
        found[column] = None if not len(values) else float(values.mean() if how == "mean" else values.max())
    return found


_NOTHING: NDArray[np.float32] = np.zeros(0, dtype=np.float32)


_TRUNCATED = frozenset(("length", "max_tokens", "max_length", "truncated", "model_length", "max_output_tokens"))
_ABORTED = frozenset(("abort", "aborted", "cancelled", "canceled", "timeout"))
_FAILED = frozenset(("error", "failed", "content_filter"))


def status_of(finish_reason: str | None, truncate_status: str | None, response_tokens: int = 1) -> str:
    """How a sample ended, one of `documents.STATUSES`; one that nothing is said of counts as finished, if it has a
    response.

    >>> status_of("stop", None), status_of("length", None), status_of(None, "prompt_truncated"), status_of("abort", "")
    ('finished', 'truncated', 'truncated', 'aborted')
    """
    reason = (finish_reason or "").lower()
    if reason in _FAILED:
        return "error"
    if reason in _ABORTED:
        return "aborted"
    if truncate_status or reason in _TRUNCATED:
        return "truncated"
    return "finished" if reason or response_tokens else "unfinished"


def scored_as(reward: float | None) -> tuple[float | None, int]:
    """A reward as the index keeps it, and 0 for none, 1 for a number, 2 for NaN."""
    if reward is None:
        return None, 0
    return (None, 2) if math.isnan(reward) else (float(reward), 1)


def plain(value: float | None) -> float | None:
    """A finite number, or `None`."""
    return None if value is None or not math.isfinite(value) else float(value)


def sample_documents(index: Index, documents: Sequence[Trajectory]) -> None:
    """Let the index's scales see the tokens of some trajectories."""
    if index.scales.full:
        return
    changed = False
    for one in documents:
        changed |= index.scales.offer(one.arrays, one.mask)
    if changed:
        index.keep("scales", index.scales.as_dict())
