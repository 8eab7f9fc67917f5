"""Columns of the index: measures of each sample, and summaries of groups and steps.

In this order: repetition, excerpts of texts, rows of samples (`measure_trajectory`), summaries of groups and steps
(`update_summaries`), and the parts of the reward (`reward_parts`).

Invariant: a row is the same whether it is computed from a book's columns (many records at once) or from one
`Trajectory`. Means and maxima are over trained tokens and finite numbers; missing values are `None`. A summary depends
only on the present samples, the run's highest reward and its newest step; only changes are recomputed. Deleted and
rewound samples do not count.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rollbook.inspect.doctor.findings import Thresholds
from rollbook.inspect.serialization import finite_or_none
from rollbook.inspect.statistics import fit_weights, quantiles
from rollbook.inspect.trajectory import Json, Trajectory

if TYPE_CHECKING:
    from rollbook.inspect.index import Index


EXCERPT_LENGTH = 240
"""Characters of an excerpt of a prompt or response."""
NGRAM = 8
MAX_PERIOD = 64
MIN_REPEATS = 4
MIN_TOKENS = 16
"""Limits of a loop; see `measure_repetition`."""
_MAX_END_TOKENS = 4
_HASH_FACTORS = np.random.default_rng(8).integers(1, 2**63, NGRAM, dtype=np.uint64) | np.uint64(1)


# --- repetition -----------------------------------------------------------------------------------------------------


def measure_repetition(ids: NDArray[Any]) -> tuple[float, int | None]:
    """Return the share of repetition in a response [R], from 0 to 1, and the token where a final loop starts.

    The share is the larger of two: the share of tokens in a final loop, and the share of 8-grams that occur earlier in
    the response, which also finds loops that ended and copied blocks. Below 16 tokens it is 0.

    A final loop is at least 4 repeats of up to 64 tokens at the end of the response, at least 16 tokens in all. The
    last repeat may be incomplete, and up to 4 other tokens (such as end of text) may follow.

    >>> measure_repetition(np.array([5, 6, 7, 8] + [1, 2, 3] * 20))
    (0.9375, 4)
    >>> measure_repetition(np.arange(100))
    (0.0, None)
    """
    count = len(ids)
    if count < MIN_TOKENS:
        return 0.0, None
    grams = _hash_ngrams(np.asarray(ids))
    ordered = np.sort(grams)
    repeats = int((ordered[1:] == ordered[:-1]).sum())
    if not repeats:
        return 0.0, None
    share = repeats / len(grams)
    loop = _find_loop(ids, grams)
    if loop is None:
        return share, None
    start, stop = loop
    return max(share, (stop - start) / count), start


def _hash_ngrams(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """Return [R - 7] hashes of the 8-grams."""
    numbers = ids.astype(np.uint64)
    size = len(numbers) - NGRAM + 1
    grams: NDArray[np.uint64] = numbers[:size] * _HASH_FACTORS[0]
    for i in range(1, NGRAM):
        grams += numbers[i : i + size] * _HASH_FACTORS[i]
    return grams


def _find_loop(ids: NDArray[Any], grams: NDArray[np.uint64]) -> tuple[int, int] | None:
    """Return the tokens [start, stop) of a final loop."""
    best = None
    for skipped in range(min(_MAX_END_TOKENS + 1, len(grams) - 1)):
        stop = len(ids) - skipped
        last = len(grams) - 1 - skipped
        # The period is the distance to the previous occurrence of the last 8 tokens.
        candidates = grams[max(0, last - MAX_PERIOD) : last]
        matches = np.flatnonzero(candidates == grams[last])
        if not len(matches):
            continue
        period = len(candidates) - int(matches[-1])
        same = ids[period:stop] == ids[: stop - period]
        differs = np.flatnonzero(~same[::-1])
        length = (int(differs[0]) if len(differs) else len(same)) + period
        is_loop = length >= max(MIN_TOKENS, MIN_REPEATS * period)
        if is_loop and (best is None or length > best[1] - best[0]):
            best = (stop - length, stop)
    return best


def measure_sampled_tokens(response: NDArray[Any], mask: NDArray[np.bool_]) -> tuple[float, int | None, int | None]:
    """Return the share of repetition, the start of a final loop and the hash of the tokens that the model sampled.

    Tool output and other masked tokens are excluded. If no token was sampled, all tokens count.

    >>> read_file = [7, 8, 9] * 20
    >>> measure_sampled_tokens(np.array([1, 2, *read_file, 3]), np.array([True, True, *[False] * 60, True]))[:2]
    (0.0, None)
    """
    positions = np.flatnonzero(mask)
    if not len(positions) or len(positions) == len(response):
        share, loop = measure_repetition(response)
        return share, loop, hash_tokens(response)
    sampled = response[positions]
    share, loop = measure_repetition(sampled)
    return share, None if loop is None else int(positions[loop]), hash_tokens(sampled)


def hash_tokens(ids: NDArray[Any]) -> int | None:
    """Return a 63-bit hash of a response; `None` for an empty one."""
    if not len(ids):
        return None
    return int(xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, dtype="<i8").data) >> 1)


# --- excerpts of texts ----------------------------------------------------------------------------------------------

_USER = re.compile(
    r"<\|im_start\|>user\n|<\|start_header_id\|>user<\|end_header_id\|>\s*|<start_of_turn>user\n|\[INST\]|<\uff5cUser\uff5c>|"
    r"<\|user\|>|(?:^|\n)(?:User|Human|### Instruction): ?"
)
"""Start of the user's message in prompts of common chat templates."""
_USER_ENDS = re.compile(
    r"<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|\[/INST\]|<\uff5cAssistant\uff5c>|<\|assistant\|>|<\|end\|>|"
    r"\n(?:Assistant|### Response):"
)
_MAX_PROMPT_LENGTH = 20_000


def extract_opening(text: str) -> str:
    """Return the first 240 characters of the user's message in a prompt, with whitespace collapsed.

    If no user message is found, the prompt itself is the text.

    >>> extract_opening("<|im_start|>system\\nBe brief.<|im_end|>\\n<|im_start|>user\\nWhat is  2+2?<|im_end|>")
    'What is 2+2?'
    """
    text = text[:_MAX_PROMPT_LENGTH]
    match = _USER.search(text)
    if match is not None:
        end = _USER_ENDS.search(text, match.end())
        question = _excerpt(text[match.end() : end.start() if end else len(text)])
        if question:
            return question
    return _excerpt(text)


def _excerpt(text: str) -> str:
    return " ".join(text[: 4 * EXCERPT_LENGTH].split())[:EXCERPT_LENGTH]


def extract_closing(text: str) -> str:
    """Return the last 240 characters of a response, with whitespace collapsed.

    >>> extract_closing("So the\\n answer is 4.")
    'So the answer is 4.'
    """
    return " ".join(text[-4 * EXCERPT_LENGTH :].split())[-EXCERPT_LENGTH:]


_IMAGE_MARKS = ('"type":"image_url"', '"type":"image"', '"type":"input_image"')


def extract_user_message(messages: Json) -> str:
    """Return the first user message of a conversation, or ""."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, str):
                return _excerpt(content)
            parts = [entry.get("text") for entry in content or () if isinstance(entry, Mapping)]
            return _excerpt(" ".join(entry for entry in parts if isinstance(entry, str)))
    return ""


def count_messages(text: str) -> tuple[int, int, int]:
    """Return the number of assistant messages, tool calls and images in a conversation, given as compact JSON.

    Quotes are escaped inside JSON texts, so message contents are never counted.

    >>> count_messages('[{"role":"user","content":"hi"},{"role":"assistant","tool_calls":[{},{}]},{"role":"tool"}]')
    (1, 2, 0)
    """
    calls = text.count('"role":"tool"')
    if '"tool_calls":[' in text:
        try:
            messages = json.loads(text)
        except (RecursionError, ValueError):
            messages = []
        listed = [message.get("tool_calls") for message in messages if isinstance(message, Mapping)]
        calls = max(calls, sum(len(entries) for entries in listed if isinstance(entries, list)))
    return text.count('"role":"assistant"'), calls, sum(text.count(mark) for mark in _IMAGE_MARKS)


def extract_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite named numbers of a sample; True and False as 1 and 0.

    >>> extract_numbers({"accuracy": True, "length": -0.5, "note": "x", "bad": float("nan")})
    {'accuracy': 1.0, 'length': -0.5}
    """
    parts = {}
    for name, value in metrics.items():
        if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
            try:
                number = float(value)
            except OverflowError:
                continue
            if math.isfinite(number):
                parts[str(name)] = number
    return parts


def extract_declared_parts(info: Json) -> tuple[str, ...]:
    """Return the reward parts that a record's `info` declares.

    >>> extract_declared_parts({"reward_parts": ["accuracy", "format"]}), extract_declared_parts({})
    (('accuracy', 'format'), ())
    """
    names = info.get("reward_parts") if isinstance(info, Mapping) else None
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


# --- rows -----------------------------------------------------------------------------------------------------------


def measure_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """Return the row of `samples` for a trajectory, without its number.

    >>> trajectory = Trajectory(uid="3/1/0/0/a", gid="3/1", step=3, text="2+2=4", ends=np.arange(1, 6), prompt_tokens=4,
    ...                         reward=1.0, arrays={"entropy": np.array([np.nan] * 4 + [0.5], np.float32)})
    >>> row = measure_trajectory(trajectory)
    >>> row["reward"], row["entropy"], row["response_tokens"], row["trained_tokens"], row["opening"], row["closing"]
    (1.0, 0.5, 1, 1, '2+2=', '4')
    """
    start, length = trajectory.prompt_tokens, trajectory.tokens
    ids = trajectory.ids
    if ids is None:
        words = [trajectory.token(i) for i in range(start, length)]
        response: NDArray[Any] = np.array(
            [xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass")) >> 2 for word in words], dtype=np.int64
        )
    else:
        response = ids[start:]
    trained = trajectory.mask & (np.arange(length) >= start)
    share, loop, digest = measure_sampled_tokens(response, trajectory.mask[start:])
    prompt_text, response_text = trajectory.prompt_text, trajectory.response_text
    if prompt_text is None:
        prompt_text = trajectory.text[: trajectory.prompt_end]
    if response_text is None:
        response_text = trajectory.text[trajectory.prompt_end :]
    versions = None if trajectory.versions is None else trajectory.versions[trained & (trajectory.versions >= 0)]
    if trajectory.versions is not None and versions is not None and not len(versions):
        versions = trajectory.versions[trajectory.versions >= 0]
    reward, scored = encode_reward(trajectory.reward)
    turns = {segment.turn for segment in trajectory.segments if segment.role == "assistant"}
    tool_results = sum(segment.kind == "tool_result" for segment in trajectory.segments)
    tool_calls = sum(segment.kind == "tool_call" for segment in trajectory.segments)
    # LightRFT's files contain only the highest entropies, so their mean and NaN count would be wrong.
    entropies = trajectory.arrays.get("entropy")
    incomplete_entropies = (
        trajectory.tokenized == "words" and entropies is not None and not np.isfinite(entropies[trained]).all()
    )
    lenses = {n: v for n, v in trajectory.arrays.items() if n != "entropy" or not incomplete_entropies}
    bad = np.zeros(length, dtype=np.bool_)
    for name in (lens for lens in _RECORDED_LENSES if lens in lenses):
        bad |= ~np.isfinite(lenses[name])
    if "kl" in lenses:
        bad |= np.isnan(lenses["kl"])
    advantage = trajectory.advantage
    if advantage is None and "advantage" in lenses:
        advantage = _aggregate_tokens({"entropy": lenses["advantage"][trained]})["entropy"]
    return {
        "uid": trajectory.uid,
        "gid": trajectory.gid or trajectory.uid,
        "step": trajectory.step or 0,
        "task": str(trajectory.task),
        "run": trajectory.run,
        "turn": trajectory.turn,
        "prompt": trajectory.prompt,
        "evaluation": int(trajectory.evaluation),
        "reward": reward,
        "scored": scored,
        "parts": json.dumps(extract_numbers(trajectory.parts)),
        "advantage": finite_or_none(advantage),
        "length": length,
        "prompt_tokens": start,
        "response_tokens": length - start,
        "trained_tokens": int(trained.sum()),
        "version_min": int(versions.min()) if versions is not None and len(versions) else None,
        "version_max": int(versions.max()) if versions is not None and len(versions) else None,
        "finish_reason": trajectory.finish_reason,
        "status": trajectory.status,
        "kind": trajectory.kind,
        "group_size": trajectory.group_size,
        "parent": trajectory.parent,
        **_aggregate_tokens({name: values[trained] for name, values in lenses.items()}),
        "nans": int((bad & trained).sum()) + (scored == 2),
        "repetition": share,
        "loop_at": loop,
        "turns": len(turns),
        "tool_calls": max(tool_calls, tool_results),
        "images": len(trajectory.pictures),
        "digest": digest,
        "opening": extract_user_message(trajectory.messages) or extract_opening(prompt_text),
        "closing": extract_closing(response_text),
        "kept": trajectory.kept,
        "state": "evaluation" if trajectory.evaluation else "",
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
"""Columns that are the mean or the maximum of a lens (of mismatch, its absolute value)."""
_RECORDED_LENSES = ("entropy", "logprob", "mismatch", "advantage", "value", "reward", "return", "weight", "teacher")
"""Lenses that should be finite on trained tokens."""


def _aggregate_tokens(trained: Mapping[str, NDArray[Any]]) -> dict[str, float | None]:
    metrics: dict[str, float | None] = {}
    for column, lens, statistic in TOKEN_METRICS:
        values = trained.get(lens, _EMPTY)
        values = values[np.isfinite(values)].astype(np.float64)
        if lens == "mismatch":
            values = np.abs(values)
        metrics[column] = None if not len(values) else float(values.mean() if statistic == "mean" else values.max())
    return metrics


_EMPTY: NDArray[np.float32] = np.zeros(0, dtype=np.float32)


_TRUNCATED = frozenset(("length", "max_tokens", "max_length", "truncated", "model_length", "max_output_tokens"))
_ABORTED = frozenset(("abort", "aborted", "cancelled", "canceled", "timeout"))
_FAILED = frozenset(("error", "failed", "content_filter"))


def classify_status(finish_reason: str | None, truncate_status: str | None, response_tokens: int = 1) -> str:
    """Return the status of a sample, one of `STATUSES`. Without other information, it is finished if it has a response.

    >>> classify_status("stop", None), classify_status("length", None), classify_status(None, "prompt_truncated")
    ('finished', 'truncated', 'truncated')
    """
    reason = (finish_reason or "").lower()
    if reason in _FAILED:
        return "error"
    if reason in _ABORTED:
        return "aborted"
    if truncate_status or reason in _TRUNCATED:
        return "truncated"
    return "finished" if reason or response_tokens else "unfinished"


def encode_reward(reward: float | None) -> tuple[float | None, int]:
    """Return a reward as the index stores it, and 0 for none, 1 for a number, 2 for NaN."""
    if reward is None:
        return None, 0
    return (None, 2) if math.isnan(reward) else (float(reward), 1)


def update_scales(index: Index, trajectories: Sequence[Trajectory]) -> None:
    """Add the tokens of trajectories to the index's scales."""
    if index.scales.full:
        return
    changed = False
    for trajectory in trajectories:
        changed |= index.scales.offer(trajectory.arrays, trajectory.mask)
    if changed:
        index.set_fact("scales", index.scales.as_dict())


# --- groups and steps ------------------------------------------------------------------------------------------------

LOOP_SHARE = 0.5
"""Share of repetition from which a sample counts as a loop."""
STALE_LAG = 1
"""Lag above which a sample counts as stale."""
_SOLVED_DISTANCE = 0.2
"""See `_update_solved_reward`."""
FLAGGED_MISMATCH = 1.0
"""Minimum train-inference mismatch at any token for a group to be flagged."""
STEP_METRICS = ("reward", "length", "entropy", "kl", "mismatch", "staleness", "advantage")
"""Metrics with quantiles in a step's summary; `length` is the response length."""
DUPLICATE_TOKENS = Thresholds().duplicate_tokens
"""Minimum number of tokens of a duplicate, since short correct answers are often identical."""
SHARES = ("truncated", "duplicates", "stale", "loops", "masked", "errors", "nans")

_COUNTED = "(removed_reason IS NULL OR removed_reason NOT IN ('deleted', 'rewound'))"
_GROUP_COLUMNS = {
    "first": ("INTEGER NOT NULL", "MIN(n)"),
    "step": ("INTEGER NOT NULL", "MIN(step)"),
    "task": ("TEXT NOT NULL", "MIN(task)"),
    "prompt": ("TEXT NOT NULL", "MAX(prompt)"),
    "n": ("INTEGER NOT NULL", "COUNT(*)"),
    "runs": ("INTEGER NOT NULL", "COUNT(DISTINCT run)"),
    "expected": ("INTEGER", "MAX(group_size)"),
    "images": ("INTEGER NOT NULL", "COALESCE(MAX(images), 0)"),
    "mean": ("REAL", "AVG(reward)"),
    "std": ("REAL", "spread(reward)"),
    "low": ("REAL", "MIN(reward)"),
    "high": ("REAL", "MAX(reward)"),
    "length": ("REAL", "AVG(NULLIF(response_tokens, 0))"),
    "entropy": ("REAL", "AVG(entropy)"),
    "kl_max": ("REAL", "MAX(kl_max)"),
    "mismatch_max": ("REAL", "MAX(mismatch_max)"),
    "zero_variance": ("INTEGER", "COUNT(*) >= 2 AND COUNT(reward) = COUNT(*) AND MIN(reward) = MAX(reward)"),
    "truncated": ("INTEGER", "SUM(status = 'truncated')"),
    "loops": ("INTEGER", f"COALESCE(SUM(repetition >= {LOOP_SHARE}), 0)"),
    "duplicates": ("INTEGER", "SUM(duplicate)"),
    "nans": ("INTEGER", "SUM(COALESCE(nans, 0) > 0 OR scored = 2)"),
    "stale": ("INTEGER", f"COALESCE(SUM(staleness > {STALE_LAG}), 0)"),
}
"""Columns of `groups`: types, and expressions over a group's samples."""
TABLES = (
    "CREATE TABLE groups (g INTEGER PRIMARY KEY, gid TEXT NOT NULL, evaluation INTEGER NOT NULL, "
    f"{', '.join(f'{name} {kind}' for name, (kind, _) in _GROUP_COLUMNS.items())}, UNIQUE (gid, evaluation))",
    "CREATE INDEX groups_step ON groups (step, first)",
    "CREATE INDEX groups_newest ON groups (evaluation, step)",
    "CREATE INDEX groups_prompt ON groups (prompt, step)",
    "CREATE TABLE steps (step INTEGER NOT NULL, evaluation INTEGER NOT NULL, cursor INTEGER NOT NULL, "
    "n INTEGER NOT NULL, summary TEXT NOT NULL, PRIMARY KEY (step, evaluation))",
    "CREATE TABLE tops (evaluation INTEGER PRIMARY KEY, low REAL NOT NULL, top REAL NOT NULL, bar REAL NOT NULL, "
    "solves INTEGER NOT NULL, groups INTEGER NOT NULL)",
)
"""`groups`: one row per group, ordered by their `first` samples; `expected` is the group size, of which `runs` are
present. `tops`: lowest and highest reward, the minimum reward of a solved sample, and whether it separates solved
samples from others.
"""

_UPDATE_GROUPS = (
    f"INSERT INTO groups (gid, evaluation, {', '.join(_GROUP_COLUMNS)}) "
    f"SELECT gid, evaluation, {', '.join(sql for _, sql in _GROUP_COLUMNS.values())} FROM samples "
    f"WHERE gid IN (SELECT gid FROM dirty) AND {_COUNTED} GROUP BY gid, evaluation "
    f"ON CONFLICT (gid, evaluation) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _GROUP_COLUMNS)}"
)
_UPDATE_DUPLICATES = f"""
    UPDATE samples SET duplicate = 1 - duplicate
    WHERE gid IN (SELECT gid FROM dirty) AND duplicate <> (response_tokens >= {DUPLICATE_TOKENS} AND EXISTS (
        SELECT 1 FROM samples AS other WHERE other.gid = samples.gid AND other.digest = samples.digest
        AND other.run <> samples.run AND other.turn = samples.turn AND other.evaluation = samples.evaluation
        AND {_COUNTED.replace("removed_reason", "other.removed_reason")}))"""
"""A duplicate has the same tokens as a sample of another run of its group. Turns of one run may be equal."""


class _StandardDeviation:
    """Population standard deviation as a SQL aggregate; NULL without finite numbers."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self.values.append(value)

    def finalize(self) -> float | None:
        if not self.values:
            return None
        first = self.values[0]
        if all(value == first for value in self.values):
            return 0.0
        return float(np.std(self.values))


def register_functions(connection: sqlite3.Connection) -> None:
    """Register the SQL functions of `update_summaries` on a connection."""
    connection.create_aggregate("spread", 1, _StandardDeviation)  # type: ignore[arg-type]
    connection.execute("CREATE TEMP TABLE dirty (gid TEXT PRIMARY KEY)")


def update_summaries(
    write: sqlite3.Connection, gids: Iterable[str], steps: Iterable[tuple[int, int]], cursor: int
) -> set[tuple[int, int]]:
    """Update the summaries of groups and of the steps of their samples.

    Args:
        write: The connection that writes to the index.
        gids: The groups whose samples changed.
        steps: (step, evaluation) of steps whose samples changed.
        cursor: Number of the change, which is stored with each changed step.

    Returns:
        (step, evaluation) of each step whose summary was written.
    """
    changed = set(steps)
    write.execute("DELETE FROM dirty")
    write.executemany("INSERT INTO dirty VALUES (?)", [(gid,) for gid in gids])
    places = "SELECT DISTINCT step, evaluation FROM groups WHERE gid IN (SELECT gid FROM dirty)"
    changed.update(write.execute(places).fetchall())
    write.execute(_UPDATE_DUPLICATES)
    write.execute(_UPDATE_GROUPS)
    write.execute(
        "DELETE FROM groups WHERE gid IN (SELECT gid FROM dirty) AND NOT EXISTS (SELECT 1 FROM samples "
        f"WHERE samples.gid = groups.gid AND samples.evaluation = groups.evaluation AND {_COUNTED})"
    )
    changed.update(write.execute(places).fetchall())
    newest = newest_steps(write)
    candidates = set(changed)
    for evaluation in (0, 1):
        if _update_solved_reward(write, evaluation):
            candidates.update(write.execute("SELECT step, evaluation FROM steps WHERE evaluation = ?", (evaluation,)))
        # The previous newest step may have groups that are now known to be incomplete.
        last_step = write.execute(
            "SELECT MAX(step) FROM steps WHERE evaluation = ? AND n > 0", (evaluation,)
        ).fetchone()
        if last_step[0] is not None and last_step[0] != newest.get(evaluation):
            candidates.add((last_step[0], evaluation))
    summaries = dict[tuple[int, int], str]()
    for step, evaluation, text in write.execute("SELECT step, evaluation, summary FROM steps"):
        if (step, evaluation) in candidates:
            summaries[step, evaluation] = text
    rows = []
    for step, evaluation in sorted(candidates):
        summary = summarize(write, step, evaluation, newest.get(evaluation))
        text = json.dumps(summary, allow_nan=False)
        # A sample's state is not in the summary, but pages that list the step's samples need the change.
        if (step, evaluation) in changed or text != summaries.get((step, evaluation)):
            rows.append((step, evaluation, cursor, summary["n"], text))
    write.executemany("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)", rows)
    return {row[:2] for row in rows}


def newest_steps(read: sqlite3.Connection) -> dict[int, int]:
    """Return the newest step with groups, for training (0) and evaluation (1)."""
    return dict(read.execute("SELECT evaluation, MAX(step) FROM groups GROUP BY evaluation").fetchall())


def _update_solved_reward(write: sqlite3.Connection, evaluation: int) -> bool:
    """Recompute the minimum reward of a solved sample; return whether it changed.

    It is the run's highest reward minus a fifth of the distance to the 10th percentile, so that a bonus for short
    answers does not leave only one prompt solved. It is recomputed when the highest reward changes or the run has
    doubled in size.
    """
    count, least, top = write.execute(
        "SELECT COUNT(*), MIN(low), MAX(high) FROM groups WHERE evaluation = ? AND low > -9e999 AND high < 9e999",
        (evaluation,),
    ).fetchone()
    stored = write.execute("SELECT top, bar, solves, groups FROM tops WHERE evaluation = ?", (evaluation,)).fetchone()
    write.execute("UPDATE tops SET low = ? WHERE evaluation = ? AND low <> ?", (least, evaluation, least))
    if top is None:
        write.execute("DELETE FROM tops WHERE evaluation = ?", (evaluation,))
        return stored is not None
    if stored is not None and stored[0] == top and stored[3] <= count < 2 * stored[3]:
        return False
    condition = f"evaluation = ? AND reward > -9e999 AND reward < 9e999 AND {_COUNTED}"  # 9e999 is infinity
    scored = write.execute(f"SELECT COUNT(*) FROM samples WHERE {condition}", (evaluation,)).fetchone()[0]
    low = write.execute(
        f"SELECT reward FROM samples WHERE {condition} ORDER BY reward LIMIT 1 OFFSET ?", (evaluation, scored // 10)
    ).fetchone()[0]
    bar = top - _SOLVED_DISTANCE * (top - low)
    entry = (top, bar, int(top > low or top > 0), count)
    write.execute("INSERT OR REPLACE INTO tops VALUES (?, ?, ?, ?, ?, ?)", (evaluation, least, *entry))
    return stored is not None and stored[1:3] != entry[1:3]


def solved_reward(read: sqlite3.Connection, evaluation: int = 0) -> float | None:
    """Return the minimum reward of a solved sample; `None` if rewards do not separate solved samples."""
    row = read.execute("SELECT bar FROM tops WHERE evaluation = ? AND solves", (evaluation,)).fetchone()
    return None if row is None else float(row[0])


SOLVED = ("none", "some", "all")
"""Whether none, some or all of a prompt's samples are solved."""


def solved_tag(solved: int, total: int) -> str:
    """Return the entry of `SOLVED` for a count of solved samples.

    >>> solved_tag(0, 8), solved_tag(3, 8), solved_tag(8, 8)
    ('none', 'some', 'all')
    """
    return SOLVED[0 if not solved else 2 if solved == total else 1]


def incomplete_condition(newest: int | None) -> str:
    """Return the SQL condition of an incomplete group: fewer runs than expected, and not of the newest step."""
    return f"(runs < expected AND step < {int(newest)})" if newest is not None else "0"


def summarize(read: sqlite3.Connection, step: int, evaluation: int, newest: int | None) -> dict[str, Any]:
    """Return the summary of a step, for `/api/steps`; every number is finite or `None`."""
    rows = read.execute(
        "SELECT reward, response_tokens, entropy, kl, mismatch, staleness, advantage, status, duplicate, repetition, "
        "trained_tokens, nans, scored, parts, version_min, version_max, removed_reason FROM samples "
        f"WHERE step = ? AND evaluation = ? AND {_COUNTED}",
        (step, evaluation),
    ).fetchall()
    count = len(rows)
    minimum = solved_reward(read, evaluation)
    groups, flat, missing, solved, all_solved = read.execute(
        f"SELECT COUNT(*), SUM(zero_variance), SUM({incomplete_condition(newest)}), SUM(high >= ?), SUM(low >= ?) "
        "FROM groups WHERE step = ? AND evaluation = ?",
        (minimum, minimum, step, evaluation),
    ).fetchone()
    copied = read.execute(
        "SELECT COUNT(*) FROM (SELECT DISTINCT gid, turn, digest FROM samples "
        f"WHERE step = ? AND evaluation = ? AND duplicate AND {_COUNTED})",
        (step, evaluation),
    ).fetchone()[0]
    columns = list(zip(*rows, strict=True)) if rows else [()] * 17
    (reward, response, entropy, kl, mismatch, staleness, advantage) = columns[:7]
    status, duplicate, repetition, trained, nans, scored, parts, low, high, removed = columns[7:]
    lengths = [r if r or reason is None else None for r, reason in zip(response, removed, strict=True)]
    measured = (reward, lengths, entropy, kl, mismatch, staleness, advantage)
    tokens = sum(response)
    shares = {
        "truncated": status.count("truncated"),
        # One sample of each set of equal samples is not redundant.
        "duplicates": sum(duplicate) - copied,
        "stale": sum(number is not None and number > STALE_LAG for number in staleness),
        "loops": sum(number is not None and number >= LOOP_SHARE for number in repetition),
        "errors": status.count("error"),
        "nans": sum(bool(number) or score == 2 for number, score in zip(nans, scored, strict=True)),
    }
    oldest = [version for version in low if version is not None]
    latest = [version for version in high if version is not None]
    return {
        "step": step,
        "n": count,
        "groups": groups,
        **{name: summarize_values(column) for name, column in zip(STEP_METRICS, measured, strict=True)},
        **{name: hits / count if count else 0.0 for name, hits in shares.items()},
        "masked": 1 - sum(trained) / tokens if tokens else 0.0,
        "zero_variance": (flat or 0) / groups if groups else 0.0,
        "incomplete": (missing or 0) / groups if groups else 0.0,
        "solved": (solved or 0) / groups if groups else 0.0,
        "all_solved": (all_solved or 0) / groups if groups else 0.0,
        "parts": mean_parts(parts),
        "versions": [min(oldest), max(latest)] if oldest and latest else None,
    }


def summarize_values(values: Sequence[float | None]) -> dict[str, float | None] | None:
    """Return quantiles and mean of the finite numbers; `None` if there are none.

    >>> summarize_values([1.0, None, 3.0, float("inf")])
    {'p5': 1.1, 'p25': 1.5, 'p50': 2.0, 'p75': 2.5, 'p95': 2.9, 'mean': 2.0}
    """
    with np.errstate(all="ignore"):
        spread = quantiles(np.array([math.nan if value is None else value for value in values], dtype=np.float64))
    if spread is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in spread.items()}


def mean_parts(parts: Sequence[str]) -> dict[str, float]:
    """Return the mean of each named number over the samples that have it."""
    sums: dict[str, list[float]] = {}
    for text in parts:
        if text != "{}":
            for name, value in json.loads(text).items():
                entry = sums.setdefault(name, [0.0, 0.0])
                entry[0] += value
                entry[1] += 1
    means = {name: total / count for name, (total, count) in sums.items()}
    return {name: value for name, value in means.items() if math.isfinite(value)}


# --- parts of the reward ---------------------------------------------------------------------------------------------

DECLARED = "reward_parts"
"""The entry of a record's `info`, and the fact of the index, with declared reward parts."""
MAX_FITTED = 2000
"""Maximum number of samples, spread evenly over the run, to which weights are fitted."""
_MIN_PRESENCE = 0.9
_ROWS_PER_COLUMN = 4


def reward_parts(index: Index) -> list[str]:
    """Return the names of reward parts.

    These are the parts that the records declare. Without a declaration, they are the named numbers whose weighted sum,
    with the same weights in every sample, is the reward up to rounding.

    >>> from rollbook.inspect.index import Index
    >>> index = Index()
    >>> index.put({"n": i, "uid": str(i), "gid": "g", "step": 0, "reward": i % 2 + 0.1 * (i % 3), "scored": 1,
    ...            "parts": json.dumps({"right": i % 2, "form": i % 3, "tool_errors": i % 7})} for i in range(40))
    >>> reward_parts(index)
    ['form', 'right']
    >>> index.close()
    """
    declared = index.fact(DECLARED, [])
    if declared:
        return list(declared)
    total = index.query("SELECT COUNT(*) FROM samples WHERE reward IS NOT NULL AND parts <> '{}'")[0][0]
    rows = index.query(
        "SELECT reward, parts FROM samples WHERE reward > -9e999 AND reward < 9e999 AND parts <> '{}' AND n % ? = 0",
        (max(1, total // MAX_FITTED),),
    )
    return _find_summands(np.array([row[0] for row in rows], np.float64), [json.loads(row[1]) for row in rows])


def _find_summands(reward: NDArray[np.float64], numbers: list[dict[str, float]]) -> list[str]:
    """Return the names of columns whose weighted sum is `reward` [N]; empty if there are none."""
    counts: dict[str, int] = {}
    for row in numbers:
        for name in row:
            counts[name] = counts.get(name, 0) + 1
    names = sorted(name for name, count in counts.items() if count >= _MIN_PRESENCE * len(numbers))
    use = [i for i, row in enumerate(numbers) if all(name in row for name in names)]
    reward = reward[use]
    if len(reward) < 2 or reward.min() == reward.max():
        return []
    columns = {name: np.array([numbers[i][name] for i in use], np.float64) for name in names}
    equal = [name for name, column in columns.items() if np.abs(column - reward).max() <= 1e-6 * np.abs(reward).max()]
    others = {name: column for name, column in columns.items() if name not in equal}
    if others and len(reward) >= _ROWS_PER_COLUMN * (len(others) + 1):
        weights = fit_weights(reward, others)
        if weights:
            return sorted(weights)
    return equal
