"""Comparison of two step ranges of a run, or of two runs: metrics, phrases and prompts.

Invariant: both sides are measured in the same way, on samples drawn with the same seed. A value that one side lacks is
`None`, never 0. The result contains how much of each side was read.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollbook.inspect.index import COUNTED
from rollbook.inspect.measures import SOLVED, reward_parts, solved_reward, solved_tag
from rollbook.inspect.statistics import group_means, group_test, histograms, mean_interval, quantiles

if TYPE_CHECKING:
    from rollbook.inspect.index import Index
    from rollbook.inspect.sources import Source

__all__ = ["Side", "compare", "count_phrases", "parse_steps", "read_responses"]

METRICS = {
    "reward": "reward",
    "length": "response_tokens",
    "entropy": "entropy",
    "kl": "kl",
    "mismatch": "mismatch",
    "staleness": "staleness",
}
"""Compared metrics, and their index columns."""
SHARES = {
    "truncated": "status = 'truncated'",
    "errors": "status = 'error'",
    "loops": "repetition >= 0.5",
    "trained": "state = 'trained'",
    "dropped": "state = 'dropped'",
}
DEFAULT_TEXTS = 400
"""Default number of randomly drawn responses per side for phrase counts."""
MAX_PHRASE_WORDS = 4
"""Maximum number of words of a phrase."""
_MIN_Z = 2.5
"""Minimum |z| for a phrase to be listed."""
_SENTENCE_BREAK = " . "
_MARKUP = re.compile(r"<\|[^<>|\s]{1,40}\|>|</?s>|<(?:pad|eos|bos|unk|start_of_turn|end_of_turn)>")
"""Special tokens in texts without token ids."""
_WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)*|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Side:
    """A side of a comparison: all steps of a run, or those from `first` to `last`.

    Args:
        source: Source of the samples.
        index: Index of the source.
        first: First step; `None`: no limit.
        last: Last step; `None`: no limit.
        name: Name of the side; by default that of the source.
    """

    source: Source
    index: Index
    first: int | None = None
    last: int | None = None
    name: str = ""

    @property
    def condition(self) -> tuple[str, list[Any]]:
        """Return the SQL condition of its samples, and the values."""
        conditions, values = ["evaluation = 0", COUNTED], []
        for bound, sign in ((self.first, ">="), (self.last, "<=")):
            if bound is not None:
                conditions.append(f"step {sign} ?")
                values.append(bound)
        return " AND ".join(conditions), values


def parse_steps(text: str) -> tuple[int, int]:
    """Parse `7` or `3-9` to the first and last step.

    Args:
        text: A step, or a range.

    Returns:
        The first and the last step.

    Raises:
        ValueError: The text is not a step or a range.

    >>> parse_steps("3-9"), parse_steps("7")
    ((3, 9), (7, 7))
    """
    match = re.fullmatch(r"\s*(-?\d{1,18})\s*(?:(?:-|\.\.|:)\s*(-?\d{1,18})\s*)?", text)
    if match is None:
        raise ValueError(f"steps: got {text!r}, expected a step such as 7, or a range such as 3-9")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        raise ValueError(f"steps: got {text!r}, expected the first step before the last")
    return first, last


def compare(
    a: Side, b: Side, *, texts: int = DEFAULT_TEXTS, limit: int = 40, solved: float | None = None
) -> dict[str, Any]:
    """Compare two sides: distributions, shares, reward parts, phrases, newly solved and newly broken prompts.

    Args:
        a: The baseline.
        b: The other side.
        texts: Number of responses per side for phrase counts (0: no phrases).
        limit: Maximum number of phrases and prompts.
        solved: Minimum reward of a solved sample; by default the run's (see `solved_reward`).

    Returns:
        The comparison in JSON types: sides (`a`, `b`), `metrics`, `shares`, `parts`, `logged` numbers, `prompts`,
        `phrases` and the number of `texts`.

    >>> import rollbook
    >>> from rollbook.inspect.index import Index
    >>> from rollbook.inspect.sources import BookSource, load
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(eid={"batch": i}, tokens=[1, 2], reward=i / 2) for i in range(2)])
    >>> source, index = BookSource(book), Index()
    >>> load(source, index)
    >>> comparison = compare(Side(source, index, last=0), Side(source, index, first=1), texts=0)
    >>> [comparison["metrics"]["reward"][side]["mean"] for side in ("a", "b")]
    [0.0, 0.5]
    """
    comparison: dict[str, Any] = {"a": _describe_side(a), "b": _describe_side(b)}
    comparison["metrics"] = {name: _compare_metric(a, b, column) for name, column in METRICS.items()}
    comparison["shares"] = {name: {"a": _share(a, test), "b": _share(b, test)} for name, test in SHARES.items()}
    comparison["parts"], comparison["logged"] = _compare_numbers(a, b)
    comparison["prompts"] = _compare_prompts(a, b, limit, solved)
    comparison["phrases"], comparison["texts"] = (
        _compare_phrases(a, b, texts, limit) if texts else ([], {"a": 0, "b": 0})
    )
    return comparison


def _describe_side(side: Side) -> dict[str, Any]:
    condition, values = side.condition
    n, groups, first, last = side.index.query(
        f"SELECT COUNT(*), COUNT(DISTINCT gid), MIN(step), MAX(step) FROM samples WHERE {condition}", values
    )[0]
    return {"name": side.name or side.source.name, "n": n, "groups": groups, "steps": None if n == 0 else [first, last]}


def _read_column(side: Side, column: str) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Return the finite values [N] of a column, and the groups [N] of their samples."""
    condition, values = side.condition
    rows = side.index.query(f"SELECT {column}, gid FROM samples WHERE {condition} AND {column} IS NOT NULL", values)
    numbers = np.array([row[0] for row in rows], dtype=np.float64)
    finite = np.isfinite(numbers)
    return numbers[finite], np.array([row[1] for row in rows])[finite]


def _compare_metric(a: Side, b: Side, column: str) -> dict[str, Any] | None:
    """Return quantiles, mean and 95 % confidence interval (`low`, `high`) per side, and the change of the mean.

    Intervals and the test are clustered by group, since samples of a group are not independent.
    """
    (values_a, groups_a), (values_b, groups_b) = _read_column(a, column), _read_column(b, column)
    if not len(values_a) and not len(values_b):
        return None
    result: dict[str, Any] = {**histograms(values_a, values_b)}
    halves = []
    for side_name, values, grouped in (("a", values_a, groups_a), ("b", values_b, groups_b)):
        result[side_name] = quantiles(values)
        if len(values):
            mean, half = mean_interval(values, grouped)
            halves.append(half)
            has_interval = math.isfinite(half)
            result[side_name] |= {
                "low": mean - half if has_interval else None,
                "high": mean + half if has_interval else None,
            }
    if len(halves) < 2:
        return result | dict.fromkeys(("ks", "p", "shift", "shift_low", "shift_high"))
    distance, p_value = group_test(group_means(values_a, groups_a), group_means(values_b, groups_b))
    shift, half = float(values_b.mean() - values_a.mean()), math.hypot(*halves)
    result |= {"ks": distance, "p": p_value, "shift": shift}
    has_interval = math.isfinite(half)
    return result | {
        "shift_low": shift - half if has_interval else None,
        "shift_high": shift + half if has_interval else None,
    }


def _share(side: Side, test: str) -> float | None:
    condition, values = side.condition
    n, share = side.index.query(f"SELECT COUNT(*), AVG({test}) FROM samples WHERE {condition}", values)[0]
    return None if not n else float(share or 0.0)


def _compare_numbers(a: Side, b: Side) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the means of each named number on both sides: of reward parts, and of other logged numbers."""
    means: dict[str, dict[str, float | None]] = {}
    for side_name, side in (("a", a), ("b", b)):
        selected, values = side.condition
        rows = side.index.query(
            "SELECT part.key, AVG(part.value) FROM samples, json_each(samples.parts) part "
            f"WHERE {selected} AND samples.parts IS NOT NULL AND part.type IN ('integer', 'real') GROUP BY 1 LIMIT 200",
            values,
        )
        for name, mean in rows:
            means.setdefault(str(name), {"a": None, "b": None})[side_name] = float(mean)
    parts = {name for side in (a, b) for name in reward_parts(side.index)}
    named = sorted(means.items())
    return {n: v for n, v in named if n in parts}, {n: v for n, v in named if n not in parts}


# --- prompts --------------------------------------------------------------------------------------------------------


def _compare_prompts(a: Side, b: Side, limit: int, solved: float | None) -> dict[str, Any]:
    """Return prompts of both sides with more, or fewer, solved samples (none, some, all)."""
    if solved is None:
        minimums = [minimum for side in (a, b) if (minimum := _solved_reward(side)) is not None]
        solved = max(minimums, default=None)
    prompts_a, prompts_b = (_count_solved(side, "prompt", solved) for side in (a, b))
    both = sorted(prompts_a.keys() & prompts_b.keys())
    rows: list[dict[str, Any]] = [
        {
            "prompt": prompt,
            "opening": prompts_b[prompt]["opening"] or prompts_a[prompt]["opening"],
            **{f"{name}_a": prompts_a[prompt][name] for name in ("gid", "n", "solved")},
            **{f"{name}_b": prompts_b[prompt][name] for name in ("gid", "n", "solved")},
            "a": prompts_a[prompt]["mean"],
            "b": prompts_b[prompt]["mean"],
        }
        for prompt in both
    ]

    def risen(low: str, high: str) -> list[dict[str, Any]]:
        more = [row for row in rows if SOLVED.index(row[f"solved_{low}"]) < SOLVED.index(row[f"solved_{high}"])]
        return sorted(more, key=lambda row: (row[low] - row[high], row["prompt"]))

    better, worse = risen("a", "b"), risen("b", "a")
    return {
        "solved_from": solved,
        "common": len(both),
        "only_a": len(prompts_a) - len(both),
        "only_b": len(prompts_b) - len(both),
        "groups": {"a": _count_groups(a, solved), "b": _count_groups(b, solved)},
        "newly_solved": better[:limit],
        "newly_broken": worse[:limit],
        "solved_count": len(better),
        "broken_count": len(worse),
    }


def _solved_reward(side: Side) -> float | None:
    with side.index.reading() as read:
        return solved_reward(read)


def _count_solved(side: Side, column: str, solved: float | None) -> dict[str, dict[str, Any]]:
    """Return each prompt's or group's (`gid`) mean reward, and whether none, some or all samples are solved."""
    condition, values = side.condition
    rows = side.index.query(
        f"SELECT {column}, AVG(reward), COUNT(*), MAX(gid), MAX(opening), TOTAL(reward >= ?) FROM samples "
        f"WHERE {condition} AND reward IS NOT NULL AND {column} <> '' GROUP BY 1",
        [solved, *values],
    )
    return {
        key: {"mean": float(mean), "n": n, "gid": gid, "opening": opening or "", "solved": solved_tag(int(right), n)}
        for key, mean, n, gid, opening, right in rows
    }


def _count_groups(side: Side, solved: float | None) -> dict[str, int]:
    """Return how many groups have none, some or all samples solved."""
    counts = Counter(group["solved"] for group in _count_solved(side, "gid", solved).values())
    return {tag: counts[tag] for tag in SOLVED}


# --- phrases --------------------------------------------------------------------------------------------------------


def count_phrases(text: str) -> Counter[str]:
    """Count the phrases of one to four words in a text; phrases do not cross sentence ends.

    Args:
        text: The text.

    Returns:
        The number of occurrences of each phrase, in lower case.

    >>> count_phrases("Wait, wait. No")["wait"], "wait no" in count_phrases("Wait, wait. No")
    (2, False)
    """
    counts: Counter[str] = Counter()
    sentence: list[str] = []
    for word in (*(match.group().casefold() for match in _WORD.finditer(text)), "."):
        if word[0].isalnum():
            sentence.append(word)
            continue
        if word in '.!?;:"()[]{}<>|/=*#`~':
            for size in range(1, MAX_PHRASE_WORDS + 1):
                counts.update(" ".join(sentence[i : i + size]) for i in range(len(sentence) - size + 1))
            sentence = []
    return counts


def _compare_phrases(a: Side, b: Side, texts: int, limit: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    sides = [_sample_responses(side, texts) for side in (a, b)]
    if not all(sides):
        return [], {"a": len(sides[0]), "b": len(sides[1])}
    counted = [[count_phrases(entry.text) for entry in side] for side in sides]
    sample_counts = [Counter(phrase for entry in side for phrase in entry) for side in counted]
    totals = [Counter[str]() for _ in sides]
    for total, side in zip(totals, counted, strict=True):
        for entry in side:
            total.update(entry)
    sizes = [max(1, len(side)) for side in sides]
    scored = []
    for phrase in sample_counts[0].keys() | sample_counts[1].keys():
        occurrences = sample_counts[0][phrase] + sample_counts[1][phrase]
        if occurrences < 3 or (phrase.replace(" ", "").isdigit()):
            continue
        score = _log_odds_z(sample_counts[0][phrase], sizes[0], sample_counts[1][phrase], sizes[1])
        if abs(score) >= _MIN_Z:
            errors = [_share_error(side, phrases, phrase) for side, phrases in zip(sides, counted, strict=True)]
            gap = sample_counts[1][phrase] / sizes[1] - sample_counts[0][phrase] / sizes[0]
            # Samples of a group are not independent: a phrase of a few prompts is in all of their samples.
            by_group = abs(gap) / math.hypot(*errors) if any(errors) else math.inf
            score = math.copysign(min(abs(score), by_group), score)
        if abs(score) >= _MIN_Z:
            scored.append((score, phrase))
    scored.sort(key=lambda entry: (-abs(entry[0]), -len(entry[1]), entry[1]))
    chosen: list[tuple[float, str]] = []
    chosen_texts: list[set[int]] = []
    all_counts = [entry for side in counted for entry in side]
    for score, phrase in scored:
        if len(chosen) >= limit:
            break
        texts_with_phrase = {i for i, entry in enumerate(all_counts) if phrase in entry}
        # Skip phrases that are in the same texts as a listed phrase, or part of it.
        if not any(
            len(texts_with_phrase & earlier) > 0.8 * len(texts_with_phrase | earlier) or f" {phrase} " in f" {other} "
            for earlier, (_, other) in zip(chosen_texts, chosen, strict=True)
        ):
            chosen.append((score, phrase))
            chosen_texts.append(texts_with_phrase)
    entries = []
    for score, phrase in chosen:
        rewards: list[float] = []
        has_phrase: list[float] = []
        uids: list[str] = []
        for samples, counts in zip(sides, counted, strict=True):
            for sample, entry in zip(samples, counts, strict=True):
                if phrase in entry and len(uids) < 200:
                    uids.append(sample.uid)
                if sample.reward is not None and math.isfinite(sample.reward):
                    rewards.append(sample.reward)
                    has_phrase.append(float(phrase in entry))
        entries.append(
            {
                "phrase": phrase,
                "a": totals[0][phrase] / sizes[0],
                "b": totals[1][phrase] / sizes[1],
                "share_a": sample_counts[0][phrase] / sizes[0],
                "share_b": sample_counts[1][phrase] / sizes[1],
                "z": score,
                "reward": _correlation(rewards, has_phrase),
                "uids": uids[-8:],
            }
        )
    return entries, {"a": len(sides[0]), "b": len(sides[1])}


def _log_odds_z(hits_a: int, texts_a: int, hits_b: int, texts_b: int) -> float:
    """Return the z of the difference of two shares: the log odds ratio over its standard error, with 0.5 added to each
    cell.
    """
    cells = [hits_a + 0.5, texts_a - hits_a + 0.5, hits_b + 0.5, texts_b - hits_b + 0.5]
    return math.log(cells[2] * cells[1] / (cells[3] * cells[0])) / math.sqrt(sum(1 / cell for cell in cells))


def _correlation(values: Sequence[float], other_values: Sequence[float]) -> float | None:
    if len(values) < 8 or len(set(values)) < 2 or len(set(other_values)) < 2:
        return None
    return float(np.corrcoef(np.array(values), np.array(other_values))[0, 1])


class _Response(NamedTuple):
    """A sample whose phrases are counted."""

    uid: str
    gid: str
    reward: float | None
    text: str


def _share_error(side: Sequence[_Response], counted: Sequence[Counter[str]], phrase: str) -> float:
    """Return the standard error of the share of texts that contain a phrase, clustered by group."""
    values = np.array([float(phrase in entry) for entry in counted])
    _, half = mean_interval(values, np.array([entry.gid for entry in side]))
    return half / 1.96 if math.isfinite(half) else 0.0


def _sample_responses(side: Side, count: int) -> list[_Response]:
    condition, values = side.condition
    rows = side.index.query(
        f"SELECT uid, gid, reward FROM samples WHERE {condition} AND removed_reason IS NULL ORDER BY n", values
    )
    if len(rows) > count:
        rows = random.Random(0).sample(rows, count)
    rows_by_uid = {uid: (gid, reward) for uid, gid, reward in rows}
    return [
        _Response(uid, *rows_by_uid[uid], text)
        for uid, text in read_responses(side.source, sorted(rows_by_uid), special=False)
    ]


def read_responses(
    source: Source, uids: Sequence[str], chunk_size: int = 64, special: bool = True
) -> Iterable[tuple[str, str]]:
    """Read the texts of responses, a few trajectories at a time.

    Args:
        source: Source of the samples.
        uids: Ids of the samples.
        chunk_size: Number of trajectories that are loaded at once.
        special: Whether special tokens are part of the text. Otherwise they end sentences.

    Yields:
        The id and the text of each response.

    >>> import rollbook
    >>> from rollbook.inspect.sources import BookSource
    >>> book = rollbook.open("memory:")
    >>> _ = book.append(rollbook.Experience(eid={"batch": 3, "suffix": "s"}, tokens=[1, 2], response_text="4"))
    >>> list(read_responses(BookSource(book), ["3//0/0/s"]))
    [('3//0/0/s', '4')]
    """
    for start in range(0, len(uids), chunk_size):
        for trajectory in source.trajectories(uids[start : start + chunk_size]):
            if trajectory.tokenized == "ids":
                text = trajectory.response_text or ""
            else:
                text = trajectory.text[trajectory.prompt_end :]
                if not special and trajectory.special[trajectory.prompt_tokens :].any():
                    tokens = range(trajectory.prompt_tokens, trajectory.tokens)
                    text = "".join(_SENTENCE_BREAK if trajectory.special[i] else trajectory.token(i) for i in tokens)
            yield trajectory.uid, text if special else _MARKUP.sub(_SENTENCE_BREAK, text)
