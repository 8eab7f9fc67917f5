"""What trajectory savers wrote: LightRFT's JSON and Rollbook's.

Invariant: of LightRFT's numbers only those are shown of which it is known which token they speak of. Its entropies
stand one token early in the file (on the token before the one that was drawn), which is corrected; arrays that were cut
to their first number, and text that lost its last token, are said in `notes`. Layout: LightRFT 0.1; Rollbook's saver.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from rollbook.core.errors import WireError
from rollbook.core.ids import EID
from rollbook.inspect.documents import Picture, Segment, Trajectory, derive, prompt_hash
from rollbook.inspect.files.images import Where, picture
from rollbook.inspect.files.limits import number, numbers, whole
from rollbook.inspect.files.making import from_ids, from_texts, words
from rollbook.inspect.files.stores import Row
from rollbook.inspect.measures import status_of
from rollbook.inspect.plain import plain
from rollbook.inspect.segments import segments_of

_LIGHTRFT_FIELDS = {"global_step", "experience_index", "sample_in_exp", "full_sequence", "generated_text", "pure_generated_text",
        "label", "reference", "repeat_score", "reflection_pattern_score", "reflection_pattern_details",
        "policy_entropy", "response_token_count", "generated_tokens", "pure_generated_tokens", "advantages", "return",
        "action_log_probs", "values", "info", "has_images", "num_images", "image_paths", "images_base64"}  # fmt: skip
_ARRAYS = {"advantages": "advantages", "return": "returns", "action_log_probs": "policy_logprobs", "values": "values"}
_PADDING = re.compile(r"(<[^<>\s]{1,40}>)\1+")
_LAST = re.compile(r"<[^<>\s]{1,40}>")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# --- LightRFT -------------------------------------------------------------------------------------------------------


def lightrft(row: Row, where: Where) -> Iterator[Trajectory]:
    """A record of LightRFT's saver."""
    full, pure = _text(row.get("full_sequence")), _text(row.get("pure_generated_text"))
    info = _dict(row.get("info"))
    notes: list[str] = []
    prompt, tail = _around(full, pure, notes)
    pieces = _pieces(row, pure)
    fields: dict[str, Any] = {
        "step": whole(row.get("global_step")),
        "run": -1,
        "reward": number(info.get("reward")),
        "parts": numbers(info.get("reward_metrics")),
        "declared": tuple(numbers(info.get("reward_metrics"))),
        "metrics": numbers({name: row.get(name) for name in ("repeat_score", "reflection_pattern_score")}),
        "status": "finished",
        "label": plain(row.get("label")),
        "reference": plain(row.get("reference")),
        "info": {
            **plain({name: value for name, value in info.items() if name not in ("reward", "reward_metrics")}),
            **plain({name: value for name, value in row.items() if name not in _LIGHTRFT_FIELDS}),
        },
        "notes": notes,
        "pictures": _pictures(row, where, notes),
        "evaluation": where.evaluation,
    }
    if row.get("policy_entropy") is not None:
        notes.append("policy_entropy is left out: it is the spread of the log-probs, padding included, no entropy.")
    if prompt is None:
        # What the model said is not in the whole text as it stands: special tokens in the middle were dropped.
        made = from_texts("", full or pure, **fields)
        made.segments = [Segment("text", "text", "", 0, len(made.ends), True, 0)] if len(made.ends) else []
        notes.append("Where the response begins is not known: its text is not in the whole one as it stands.")
        _leave_out(row, notes, "the tokens are not known")
    elif pieces is None:
        made = from_texts(prompt, pure + tail, **fields)
        _leave_out(row, notes, "the tokens are not known")
    else:
        made = _exact(row, prompt, pieces, tail, fields, notes)
    if not tail:
        notes.append("The last token of the response is not in this file.")
    yield made


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _around(full: str, pure: str, notes: list[str]) -> tuple[str | None, str]:
    """The prompt's text, and what follows the response that the file has: the last token, without the padding."""
    at = full.rfind(pure) if pure else -1
    if at < 0:
        return (None, "") if pure or full else ("", "")
    before, behind = full[:at], full[at + len(pure) :]
    padding = _PADDING.match(before)
    if padding is not None:
        before = before[padding.end() :]
        notes.append("Padding before the prompt is not shown.")
    found = _LAST.match(behind)
    return before, found[0] if found else ""


def _pieces(row: Row, pure: str) -> list[str] | None:
    """The texts of the response's tokens but the last, if the file has them."""
    held = row.get("pure_generated_tokens")
    if not isinstance(held, list) or not held:
        return None
    texts = [piece.get("text") if isinstance(piece, dict) else None for piece in held]
    return [str(text) for text in texts] if all(isinstance(text, str) for text in texts) else None


def _exact(row: Row, prompt: str, pieces: list[str], tail: str, fields: dict[str, Any], notes: list[str]) -> Trajectory:
    """Prompt in words, response in its own tokens, and the numbers that belong to them."""
    response = "".join(pieces)
    if response != _text(row.get("pure_generated_text")):
        notes.append("The response is shown as its tokens were decoded, one by one: characters of several are lost.")
    before = words(prompt)
    sizes = [len(piece) for piece in [*pieces, *([tail] if tail else [])]]
    text = prompt + response + tail
    ends = np.concatenate([before, len(prompt) + np.cumsum(sizes, dtype=np.int64)])
    start, length = len(before), len(ends)
    arrays: dict[str, Any] = {}
    # Entry j of generated_tokens stands on the token before response token j, whose entropy it has.
    held = row.get("generated_tokens")
    scores = [number(_dict(entry).get("entropy_score")) for entry in held] if isinstance(held, list) else []
    if any(score is not None for score in scores):
        column = np.full(length, np.nan)
        found = [np.nan if score is None else score for score in scores[: length - start]]
        column[start : start + len(found)] = found
        arrays["entropy"] = column
        notes.append("Entropies in this file stand one token early; corrected. Only the highest were kept.")
    count = len(pieces) + 1
    for theirs, ours in _ARRAYS.items():
        values = row.get(theirs)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != count:
            _left_out(theirs, values, f"the response has {count} tokens", notes)
            continue
        column = np.full(length, np.nan)
        shown = np.array([np.nan if number(value) is None else number(value) for value in values])
        column[start:] = shown[: length - start]
        arrays[ours] = column
    mask = np.arange(length) >= start
    lenses = derive(arrays, mask)
    seen = lenses["advantage"][mask] if "advantage" in lenses else np.empty(0)
    seen = seen[~np.isnan(seen)]
    return Trajectory(
        uid="",
        text=text,
        ends=ends,
        prompt_tokens=start,
        mask=mask,
        arrays=lenses,
        segments=segments_of(text, ends, start, mask, sampled=mask, exact=False),
        tokenized="words",
        prompt=prompt_hash(None, prompt),
        prompt_text=prompt,
        response_text=response,
        advantage=float(seen.mean()) if len(seen) else None,
        **fields,
    )


def _leave_out(row: Row, notes: list[str], why: str) -> None:
    for name in _ARRAYS:
        if row.get(name) is not None:
            _left_out(name, row[name], why, notes)


def _left_out(name: str, values: Any, why: str, notes: list[str]) -> None:
    if isinstance(values, list):
        notes.append(f"{name} is left out: {len(values)} numbers, and {why}.")
    else:
        notes.append(f"{name} is left out: one number stands for all tokens, the first of an array that was cut.")


def _pictures(row: Row, where: Where, notes: list[str]) -> list[Picture]:
    held = row.get("image_paths") if isinstance(row.get("image_paths"), list) else row.get("images_base64")
    if not isinstance(held, list):
        return []
    found = [picture(source, where, notes) for source in held[:256] if source is not None]
    return [each for each in found if each is not None]


# --- Rollbook -------------------------------------------------------------------------------------------------------

_LENSES = {
    "advantages": "advantages",
    "return": "returns",
    "values": "values",
    "action_log_probs": "policy_logprobs",
    "base_action_log_probs": "ref_logprobs",
    "action_entropy": "entropy",
    **{name: name for name in ("logprobs", "teacher_logprobs", "token_level_reward", "loss_weights")},
}
"""The saver's names of arrays [R], and a record's."""
_ROLLBOOK_FIELDS = {*_LIGHTRFT_FIELDS, *_LENSES, "uid", "gid", "batch", "task", "run", "turn", "kept", "reward", "reward_parts",
         "prompt_tokens", "prompt_text", "response_text", "token_ids", "text", "token_ends", "mask", "segments",
         "policy_versions", "image_sha256", "rejected", "messages", "tools", "sampling", "kind", "finish_reason",
         "truncate_status", "parent", "group_size", "notes", "kl"}  # fmt: skip


def rollbook(row: Row, where: Where) -> Iterator[Trajectory]:
    """A record of Rollbook's saver: text, tokens and where they end, and arrays of the response's tokens."""
    ids, text = row.get("token_ids"), _text(row.get("text"))
    prompt, step = whole(row.get("prompt_tokens")), whole(row.get("global_step"))
    if not isinstance(ids, list) or prompt is None:
        raise WireError("the record has no token_ids, or no prompt_tokens")
    info, more = _dict(row.get("info")), {name: value for name, value in row.items() if name not in _ROLLBOOK_FIELDS}
    notes = [str(note) for note in row["notes"]] if isinstance(row.get("notes"), list) else []
    reason, cut = (_text(row.get(name)) or None for name in ("finish_reason", "truncate_status"))
    fields: dict[str, Any] = {
        "step": step,
        "task": "" if row.get("task") is None else str(row["task"]),
        "reward": number(row.get("reward")),
        "parts": numbers(row.get("reward_parts")),
        "metrics": numbers({name: row.get(name) for name in ("repeat_score", "reflection_pattern_score")}),
        "status": "error" if info.get("error") else status_of(reason, cut, len(ids) - prompt),
        "finish_reason": reason,
        "truncate_status": cut,
        "kind": row["kind"] if isinstance(row.get("kind"), str) else "single_turn",
        "group_size": whole(row.get("group_size")),
        "parent": row["parent"] if isinstance(row.get("parent"), str) else None,
        "prompt_text": _text(row.get("prompt_text")) or None,
        "response_text": _text(row.get("response_text")) or None,
        "messages": plain(row["messages"]) if isinstance(row.get("messages"), list) else None,
        "tools": row["tools"] if isinstance(row.get("tools"), list) else None,
        "sampling": _dict(row.get("sampling")) or None,
        "label": plain(row.get("label")),
        "reference": plain(row.get("reference")),
        "info": plain({**{name: value for name, value in info.items() if name != "segments"}, **more}),
        "kept": row["kept"] if isinstance(row.get("kept"), str) else None,
        "notes": notes,
        "evaluation": where.evaluation,
    }
    made = from_ids(
        ids,
        prompt,
        where,
        mask=row.get("mask"),
        versions=row.get("policy_versions"),
        arrays={ours: row.get(theirs) for theirs, ours in _LENSES.items()},
        known=(text, row.get("token_ends")),
        recorded=row.get("segments"),
        **fields,
    )
    made.pictures = _pictures(row, where, made.notes)
    other = _dict(row.get("rejected"))
    if other:
        shown = (_text(other.get("text")), other.get("token_ends"))
        made.rejected = from_ids(other.get("token_ids") or [], prompt, where, known=shown, **fields)
    made.uid = _text(row.get("uid"))
    # Samples whose ids name no batch are of the step in which they were saved.
    made.gid = _text(row.get("gid")) if row.get("batch") not in (None, "") else EID(step or 0, made.task).tid
    yield made
