"""Conversations as OpenAI's API has them, one a line, and logs of inspect (`.eval`, `.json`).

Invariant: nothing that a message names is fetched; what an inspect log keeps beside a sample (attachments) is put back
where it stood. Layouts: `{"messages": [...]}` with whatever stands beside, ShareGPT's `conversations`, and inspect_ai
0.3.6 to 0.3.28x (log schema 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollbook.core.errors import WireError
from rollbook.inspect.documents import Trajectory
from rollbook.inspect.files.images import Where
from rollbook.inspect.files.limits import number, numbers, whole
from rollbook.inspect.files.making import chat, is_messages, without_nulls
from rollbook.inspect.files.saved import _dict
from rollbook.inspect.files.stores import Row
from rollbook.inspect.plain import plain

_MESSAGES_FIELDS = {"messages", "conversations", "tools", "reward", "score", "step", "global_step", "metrics", "id", "group",
        "group_id", "prompt_id", "problem_id", "finish_reason", "label", "answer", "advantage"}  # fmt: skip


def messages(row: Row, where: Where) -> Iterator[Trajectory]:
    """A row with a conversation, and what stands beside it."""
    found = row.get("messages")
    if isinstance(row.get("conversations"), list):
        found = [
            {"role": turn["from"], "content": turn.get("value")} if isinstance(turn, dict) and "from" in turn else turn
            for turn in row["conversations"]
        ]
    found = without_nulls(found)
    if not is_messages(found):
        raise WireError("messages: expected a list of objects with a role")
    key = next((row[n] for n in ("group_id", "group", "prompt_id", "problem_id") if _is_id(row.get(n))), None)
    reason = row.get("finish_reason")
    reward = number(row.get("reward"))
    rest = {name: value for name, value in row.items() if name not in _MESSAGES_FIELDS}
    parts = {**numbers(row.get("metrics")), **numbers({n: v for n, v in rest.items() if isinstance(v, (int, float))})}
    made = chat(
        found,
        where,
        step=whole(row.get("step", row.get("global_step"))),
        task="" if key is None else str(key),
        run=-1,
        reward=reward if reward is not None else number(row.get("score")),
        parts=parts,
        metrics=parts,
        advantage=number(row.get("advantage")),
        status="truncated" if reason in ("length", "max_tokens") else "finished",
        finish_reason=reason if isinstance(reason, str) else None,
        tools=row["tools"] if isinstance(row.get("tools"), list) else None,
        label=plain(row.get("label", row.get("answer"))),
        info={name: plain(value) for name, value in rest.items() if name not in parts},
        evaluation=where.evaluation,
    )
    if _is_id(row.get("id")):
        made.uid = str(row["id"])
    yield made


def _is_id(value: Any) -> bool:
    return (isinstance(value, str) and 0 < len(value) <= 256) or type(value) is int


# --- inspect --------------------------------------------------------------------------------------------------------

_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
"""Correct, incorrect, partly so, no answer: as inspect's own metrics count them."""
_INSPECT_TRUNCATED = ("max_tokens", "model_length", "length")


def inspect(row: Row, where: Where) -> Iterator[Trajectory]:
    """A sample of an inspect log."""
    held = row.get("attachments")
    held = held if isinstance(held, dict) else {}
    found = _attached(without_nulls(row.get("messages")), held)
    if not is_messages(found):
        given = _attached(without_nulls(row.get("input")), held)
        found = given if is_messages(given) else [{"role": "user", "content": given if isinstance(given, str) else ""}]
    written = [message.get("source") == "generate" for message in found]
    spec = _dict(where.log.get("eval"))
    parts = _scores(_dict(row.get("scores")))
    choices = _dict(row.get("output")).get("choices")
    reason = _dict(choices[0]).get("stop_reason") if isinstance(choices, list) and choices else None
    limit = row.get("limit")
    error = row.get("error")
    notes = []
    if len(parts) > 1:
        notes.append(f"The reward shown is the first score, {next(iter(parts))!r}; the others are metrics.")
    epoch = whole(row.get("epoch"))
    info: dict[str, Any] = {
        **{name: spec[name] for name in ("task", "model", "run_id", "created") if name in spec},
        **{name: row[name] for name in ("metadata", "choices", "total_time", "model_usage", "limit") if row.get(name)},
        "scores": {name: _without_history(score) for name, score in _dict(row.get("scores")).items()},
        **({"error": error} if error else {}),
    }
    made = chat(
        found,
        where,
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
        label=plain(row.get("target")),
        info=plain(info),
        notes=notes,
    )
    made.uid = str(row.get("uuid") or "")
    yield made


def _without_history(score: Any) -> Any:
    return {name: value for name, value in score.items() if name != "history"} if isinstance(score, dict) else score


def _attached(value: Any, held: dict[str, Any]) -> Any:
    """The same with what stands beside put in its place."""
    if isinstance(value, str):
        found = held.get(value.removeprefix("attachment://")) if value.startswith("attachment://") else None
        return found if isinstance(found, str) else value
    if isinstance(value, list):
        return [_attached(item, held) for item in value]
    return {key: _attached(item, held) for key, item in value.items()} if isinstance(value, dict) else value


def _scores(scores: dict[str, Any]) -> dict[str, float]:
    """Every number that the scorers gave, by scorer, or by scorer and name."""
    found: dict[str, float | None] = {}
    for name, score in scores.items():
        value = _dict(score).get("value")
        if isinstance(value, dict):
            found |= {f"{name}.{key}": _grade(item) for key, item in value.items()}
        elif isinstance(value, list):
            found |= {f"{name}.{i}": _grade(item) for i, item in enumerate(value)}
        else:
            found[str(name)] = _grade(value)
    return numbers(found)


def _grade(value: Any) -> float | None:
    if isinstance(value, str):
        if value in _GRADES:
            return _GRADES[value]
        if value.lower() in ("yes", "true", "no", "false"):
            return float(value.lower() in ("yes", "true"))
        try:
            return float(value)
        except ValueError:
            return None
    return number(value)
