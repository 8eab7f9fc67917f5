"""Rollouts of verifiers and prime-rl: `results.jsonl`, `traces.jsonl`, and `rollouts/step_N/*_rollouts.jsonl`.

Invariant: of a graph of messages every path from its root to a leaf is a trajectory; a number is a token's only if the
writer has one for each token that was sampled. Layouts: verifiers 0.1 and 0.2 (a row a rollout: prompt, completion,
reward, metrics, and in prime-rl the token ids of each turn), verifiers 0.3 and 0.4 (a row an episode of traces, or one
trace, as prime-rl saves them).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.core.errors import WireError
from rollbook.inspect.documents import Segment, Trajectory
from rollbook.inspect.files.images import Where
from rollbook.inspect.files.limits import number, numbers, whole
from rollbook.inspect.files.making import chat, conversation, from_ids, is_messages, without_nulls
from rollbook.inspect.files.saved import _dict
from rollbook.inspect.files.stores import Row
from rollbook.inspect.plain import plain

_VERIFIERS_TRUNCATED = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed", "length",
        "max_turns_reached", "prompt_too_long", "has_max_seq_len", "max_tokens")  # fmt: skip


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# --- a row a rollout ------------------------------------------------------------------------------------------------

_VERIFIERS_FIELDS = {"example_id", "prompt", "completion", "reward", "metrics", "answer", "info", "task", "error", "is_truncated",
        "is_completed", "stop_condition", "trajectory", "tool_defs", "oai_tools", "advantage", "step", "sampling_args",
        "error_chain", "long_error_chain"}  # fmt: skip


def rollout(row: Row, where: Where) -> Iterator[Trajectory]:
    """A row of `results.jsonl`, or of prime-rl's rollouts of that time."""
    prompt, completion = without_nulls(row.get("prompt")), without_nulls(row.get("completion"))
    metrics = _dict(row.get("metrics"))
    error = row.get("error")
    stopped = row.get("stop_condition")
    cut = bool(row.get("is_truncated")) or stopped in _VERIFIERS_TRUNCATED
    problem = row.get("example_id")
    task = "" if problem is None else f"{row['task']}:{problem}" if isinstance(row.get("task"), str) else str(problem)
    rest = {name: value for name, value in row.items() if name not in _VERIFIERS_FIELDS and name not in metrics}
    fields: dict[str, Any] = {
        "step": whole(row.get("step")),
        "task": task,
        "run": -1,
        "reward": number(row.get("reward")),
        "parts": numbers(metrics),
        "metrics": numbers(metrics),
        "advantage": number(row.get("advantage")),
        "status": "error" if error else "truncated" if cut else "finished",
        "finish_reason": stopped if isinstance(stopped, str) else None,
        "tools": _list(row.get("tool_defs") or row.get("oai_tools")) or None,
        "sampling": _dict(row.get("sampling_args")) or None,
        "label": plain(row.get("answer")),
        "info": {**plain(_dict(row.get("info"))), **plain(rest), **({"error": plain(error)} if error else {})},
        "evaluation": where.evaluation,
    }
    tokens = _turn_tokens(_list(row.get("trajectory")))
    if completion is None:
        completion = []
    if tokens is None:
        yield conversation(prompt if prompt is not None else "", completion, where, **fields)
        return
    ids, mask, logprobs, note = tokens
    messages = [*prompt, *completion] if is_messages(prompt) and isinstance(completion, list) else None
    first = int(np.argmax(mask)) if mask.any() else len(ids)
    words = conversation(prompt if prompt is not None else "", completion, where)
    made = from_ids(
        ids,
        first,
        where,
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
    yield made


def _turn_tokens(turns: list[Any]) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[Any] | None, list[str]] | None:
    """Ids, mask and log-probs of a rollout whose turns each have the ids of all that came before."""
    known = [_dict(_dict(turn).get("tokens")) for turn in turns]
    known = [turn for turn in known if _list(turn.get("prompt_ids")) and isinstance(turn.get("completion_ids"), list)]
    if not known:
        return None
    ids = np.array([*known[-1]["prompt_ids"], *known[-1]["completion_ids"]], dtype=np.int64)
    mask, logprobs = np.zeros(len(ids), dtype=np.bool_), np.full(len(ids), np.nan)
    lost = bare = 0
    for turn in known:
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
            f"{lost} of {len(known)} turns were sampled behind other tokens than the last one, and not marked."
        )
    if bare:
        notes.append(f"The log-probs are left out: {bare} of {len(known)} turns have none for each token.")
    return ids, mask, None if bare else logprobs, notes


# --- traces ---------------------------------------------------------------------------------------------------------


def trace(row: Row, where: Where) -> Iterator[Trajectory]:
    """An episode of traces, or a trace that stands alone."""
    if "traces" not in row:
        yield from _of_trace(row, row, where)
        return
    found = False
    for each in _list(row["traces"]):
        if isinstance(each, dict):
            for made in _of_trace(each, row, where):
                found = True
                yield made
    if not found:
        # An episode that failed before a model was asked.
        data = _dict(_dict(row.get("task")).get("data"))
        prompt = data.get("prompt")
        yield conversation(
            prompt if isinstance(prompt, str) or is_messages(prompt) else "", [], where, **_common(row, row, where)
        )


def _common(trace: Row, episode: Row, where: Where) -> dict[str, Any]:
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
    scores = [(number(r.get("score")), number(r.get("weight", 1.0))) for r in rewards.values()]
    errors = _list(trace.get("errors"))
    stopped = trace.get("stop_condition")
    calls = [call for call in _list(trace.get("calls")) if isinstance(call, dict) and not call.get("error")]
    finish = calls[-1].get("finish_reason") if calls else None
    cut = stopped in _VERIFIERS_TRUNCATED or finish == "length"
    done = bool(trace.get("is_completed"))
    status = "error" if errors and not trace.get("ok") else "truncated" if cut else "finished" if done else "unfinished"
    policy = _dict(work.get("policy"))
    kept = {name: trace[name] for name in ("stop_condition", "errors", "timing", "agent") if trace.get(name)}
    if policy:
        kept["policy"] = policy
    kind = work.get("type") or info.get("kind")
    return {
        "step": whole(work.get("step", stamped.get("step"))),
        "task": "" if key is None else f"{env}:{key}" if env and not group else str(key),
        "run": -1,
        "reward": sum(s * w for s, w in scores if s is not None and w is not None) if scores else None,
        "parts": {**numbers({name: r.get("score") for name, r in rewards.items()}), **numbers(trace.get("metrics"))},
        "declared": tuple(rewards),
        "metrics": numbers(trace.get("metrics")),
        "advantage": number(info.get("advantage")),
        "status": status,
        "finish_reason": finish if isinstance(finish, str) else None,
        "label": plain(data.get("answer")),
        "tools": _list(trace.get("tools")) or None,
        "sampling": _dict(calls[-1].get("sampling")) or None if calls else None,
        "info": {**plain(info), **plain(kept), "task": plain(data), "env": env},
        "evaluation": (kind == "eval" and run.get("type") == "train") or where.evaluation,
    }


def _of_trace(trace: Row, episode: Row, where: Where) -> Iterator[Trajectory]:
    nodes = _list(trace.get("nodes"))
    if not all(isinstance(node, dict) and isinstance(node.get("message"), dict) for node in nodes):
        raise WireError("a node of the trace has no message")
    fields = _common(trace, episode, where)
    work = _dict(_dict(_dict(episode.get("run")).get("work")).get("policy"))
    versions = (whole(work.get("start")), whole(work.get("end")))
    for number_of, path in enumerate(_paths(nodes)):
        here = [nodes[i] for i in path]
        made = _branch(here, where, {**fields, "turn": number_of}, versions)
        made.uid = str(trace.get("id") or "")
        made.tools = _list(here[0].get("tools")) or made.tools
        yield made


def _paths(nodes: list[Row]) -> list[list[int]]:
    """From the root to each leaf, by the nodes' numbers."""
    parents = [node.get("parent") for node in nodes]
    for i, parent in enumerate(parents):
        if parent is not None and (type(parent) is not int or not 0 <= parent < i):
            raise WireError(f"node {i} of the trace has the parent {parent!r}, expected one before it")
    found = []
    for leaf in sorted(set(range(len(nodes))) - {parent for parent in parents if parent is not None}):
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = parents[at]
        found.append(path[::-1])
    return found


_STREAMS = {
    "logprobs": "logprobs",
    "trainer_logprobs": "policy_logprobs",
    "reference_logprobs": "ref_logprobs",
    "entropies": "entropy",
    "advantages": "advantages",
}


def _branch(
    nodes: list[Row], where: Where, fields: dict[str, Any], versions: tuple[int | None, int | None]
) -> Trajectory:
    messages = [node["message"] for node in nodes]
    words = chat(messages, where, lambda i: bool(nodes[i].get("sampled")), **fields)
    counts = [len(_list(node.get("token_ids"))) for node in nodes]
    if not any(counts):
        return words
    if any(len(_list(node.get("mask"))) != count for node, count in zip(nodes, counts, strict=True)):
        words.notes.append("The masks are not as long as the token ids: shown are the words.")
        return words
    ids = [token for node in nodes for token in _list(node.get("token_ids"))]
    mask = np.array([bool(flag) for node in nodes for flag in _list(node.get("mask"))], dtype=np.bool_)
    arrays: dict[str, NDArray[Any]] = {}
    notes: list[str] = []
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    for theirs, ours in _STREAMS.items():
        column, known = np.full(len(ids), np.nan), 0
        for node, start, stop in zip(nodes, starts, starts[1:], strict=False):
            values, at = _list(node.get(theirs)), start + np.flatnonzero(mask[start:stop])
            if values and len(values) == len(at):
                column[at] = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
                known += len(at)
        # A token without a number would look like one whose number is NaN.
        if known == mask.sum() > 0:
            arrays[ours] = column
        elif any(node.get(theirs) for node in nodes):
            notes.append(f"{theirs} are left out: they are there for {known} of {mask.sum()} sampled tokens.")
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
            notes.append(f"The policy went from version {low} to {high} while this was sampled.")
    first = int(np.argmax(mask)) if mask.any() else len(ids)
    fields = dict(fields)
    if "advantages" in arrays:
        fields.pop("advantage")
    last = max(turn - 1, 0)
    return from_ids(
        ids,
        first,
        where,
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
