"""The filter language: random filters against their meaning in Python, errors that say where, and no way out of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollbook.inspect.filters import FLAGS, describe_columns, parse, parse_sort
from rollbook.inspect.index import Index

Row = dict[str, Any]
Test = Callable[[Row], bool]

ROWS: list[Row] = [
    {"reward": 1.0, "response_tokens": 10, "finish_reason": "stop", "task": "geo 1", "parts": {"acc": 1.0}},
    {"reward": 0.0, "response_tokens": 2000, "finish_reason": "length", "task": "GEO 2", "parts": {"acc": 0.0}},
    {"reward": None, "response_tokens": 500, "finish_reason": None, "task": "alg", "parts": {}},
    {"reward": -0.5, "response_tokens": 1500, "finish_reason": "stop", "task": 'it\'s "x"', "parts": {"fmt": 2.0}},
    {"reward": 0.5, "response_tokens": 0, "finish_reason": "abort", "task": "50%_", "parts": {"acc": 0.5, "fmt": 1}},
]
STATES = {"length": "truncated", "abort": "aborted"}


@pytest.fixture(scope="module")
def index() -> Iterator[Index]:
    with Index() as filled:
        for n, row in enumerate(ROWS):
            status = STATES.get(row["finish_reason"], "finished")
            scored = int(row["reward"] is not None)
            fixed = {"n": n, "uid": str(n), "gid": "g", "step": 3, "status": status, "scored": scored}
            filled.put([{**fixed, **row, "parts": json.dumps(row["parts"])}])
        filled.update_summaries()
        yield filled


def chosen(index: Index, text: str, parts: tuple[str, ...] = ("acc", "fmt")) -> list[int]:
    """The rows a filter is true of."""
    condition = parse(text, parts)
    return [n for (n,) in index.query(f"SELECT n FROM samples WHERE {condition.sql} ORDER BY n", condition.values)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("reward < .5", [1, 3]),
        ("reward<.5 and len>1.9k", [1]),
        ("length > 1.9k and tokens = 0", [1]),  # of the response; of prompt and response
        ("REWARD >= 5e-1 or truncated", [0, 1, 4]),
        ("not reward < .5", [0, 2, 4]),  # a reward that is missing is not below anything
        ("reward != 0", [0, 2, 3, 4]),
        ("reward is null", [2]),
        ("reward = null or finish_reason = abort", [2, 4]),
        ("reward is not null and not (truncated or aborted)", [0, 3]),
        ("finish_reason in (stop, 'abort')", [0, 3, 4]),
        ("finish_reason not in (stop)", [1, 2, 4]),
        ("response_tokens in (10, 0, 1.5k)", [0, 3, 4]),
        ("task ~ geo", [0, 1]),
        ('task ~ "\\"x\\""', [3]),
        ("task !~ geo", [2, 3, 4]),
        ("task ~ '%'", [4]),
        ("task = 'it\\'s \"x\"'", [3]),
        ("part.acc > .4", [0, 4]),
        ("parts.fmt = 1 or part.ACC = 1", [0, 4]),
        ("part.fmt is null", [0, 1, 2]),
        ("scored = false", [2]),
        ("!truncated & !scored", [2]),
        ("truncated != true and finished", [0, 2, 3]),
        ("r > 0 and h is null", [0, 4]),
        ("step = 3 and (((reward = 1)))", [0]),
        ("-reward > 0", None),
        ("solved", [0]),
        ("some_solved and not unsolved and not all_solved", [0, 1, 2, 3, 4]),
        ("zero_variance or incomplete or unsolved or duplicate or loop or stale or nan", []),
    ],
)
def test_filters_mean_what_they_say(index: Index, text: str, expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="character 1"):
            parse(text)
    else:
        assert chosen(index, text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rewrd < 1",
            "character 1: got 'rewrd', expected a column or a flag such as truncated; did you mean 'reward'?",
        ),
        ("reward <", "character 9: got the end, expected a number"),
        ("reward < x", "character 10: got 'x', expected a number such as 12, .5, 1e-3 or 2k"),
        ("reward < 1e999", "character 10: got '1e999'"),
        ("reward < 1 and", "character 15: got the end, expected a column"),
        ("reward < 1 reward", "character 12: got 'reward', expected and, or, or the end"),
        ("(reward < 1", "character 12: got the end, expected '\\)'"),
        ("task < 3", "character 6: got '<', expected one of = != ~ in is \\(a text column\\)"),
        ("task in ()", "character 10: got '\\)', expected a value"),
        ("task ~ 'open", 'character 8: got "\'"'),
        ("truncated > 1", "character 11: got '>', expected = or !="),
        ("reward is 1", "character 11: got '1', expected null or not null"),
        ("part.acu = 1", "expected the name of a reward part or metric; did you mean 'acc'"),
        ("n = 1", "character 1: got 'n'"),
        ("response = x", "character 10: got '=', expected ~ or !~"),
        ("reward ~ 1", "character 8: got '~', expected one of < <="),
        ("(" * 60 + "truncated" + ")" * 60, "at most 50 nested"),
        ("not " * 60 + "truncated", "at most 50 nested"),
        ("x" * 5000, "at most 4000 characters"),
        ("step in (" + ",".join("1" * 501) + ")", "at most 500 values"),
    ],
)
def test_errors_say_where_what_and_what_instead(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text, ("acc", "fmt"))


# --- any filter -----------------------------------------------------------------------------------------------------

NUMBERS = {"reward": "reward", "r": "reward", "len": "response_tokens", "response_tokens": "response_tokens"}
SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "=": lambda a, b: a == b,
}


@st.composite
def one_test(draw: st.DrawFn) -> tuple[str, Test]:
    """One test: its text, and what it means."""
    kind = draw(st.sampled_from(("number", "part", "text", "flag", "null", "in")))
    if kind == "number":
        name, sign = draw(st.sampled_from(list(NUMBERS))), draw(st.sampled_from(list(SIGNS)))
        value = draw(st.sampled_from((-0.5, 0, 0.5, 1, 10, 1500)))
        return f"{name}{sign}{value}", lambda row: _holds(row[NUMBERS[name]], sign, value)
    if kind == "part":
        name, sign = draw(st.sampled_from(("acc", "fmt"))), draw(st.sampled_from(list(SIGNS)))
        return f"part.{name} {sign} 1", lambda row: _holds(row["parts"].get(name), sign, 1)
    if kind == "text":
        part = draw(st.sampled_from(("geo", "G", "x", "%", "_", "'", '"', "nothing")))
        quoted = "'" + part.replace("'", "\\'") + "'"
        return f"task ~ {quoted}", lambda row: part.casefold() in row["task"].casefold()
    if kind == "flag":
        name = draw(st.sampled_from(("truncated", "finished", "aborted", "scored")))
        meaning: dict[str, Test] = {
            "truncated": lambda row: row["finish_reason"] == "length",
            "aborted": lambda row: row["finish_reason"] == "abort",
            "finished": lambda row: row["finish_reason"] not in STATES,
            "scored": lambda row: row["reward"] is not None,
        }
        return name, meaning[name]
    if kind == "null":
        name = draw(st.sampled_from(("reward", "finish_reason")))
        return f"{name} is null", lambda row: row[name] is None
    values = draw(st.lists(st.sampled_from(("stop", "length", "abort", "other")), min_size=1, max_size=3))
    return f"finish_reason in ({','.join(values)})", lambda row: row["finish_reason"] in values


def _holds(value: Any, sign: str, other: float) -> bool:
    return value is not None and SIGNS[sign](value, other)


def _both(pair: tuple[tuple[str, Test], tuple[str, Test]]) -> tuple[str, Test]:
    (left, first), (right, second) = pair
    return f"({left} and {right})", lambda row: first(row) and second(row)


def _either(pair: tuple[tuple[str, Test], tuple[str, Test]]) -> tuple[str, Test]:
    (left, first), (right, second) = pair
    return f"({left} or {right})", lambda row: first(row) or second(row)


def _not(inner: tuple[str, Test]) -> tuple[str, Test]:
    text, test = inner
    return f"not {text}", lambda row: not test(row)


FILTERS = st.recursive(
    one_test(),
    lambda inner: st.one_of(st.tuples(inner, inner).map(_both), st.tuples(inner, inner).map(_either), inner.map(_not)),
    max_leaves=12,
)


@given(FILTERS)
def test_any_filter_is_true_of_the_rows_it_should_be(index: Index, case: tuple[str, Test]) -> None:
    text, test = case
    assert chosen(index, text) == [n for n, row in enumerate(ROWS) if test(row)]


PIECES = [
    "reward",
    "task",
    "part.acc",
    "truncated",
    "and",
    "or",
    "not",
    "in",
    "is",
    "null",
    "(",
    ")",
    ",",
    "<",
    "=",
    "~",
]
PIECES += [
    "!",
    "'",
    '"',
    "\\",
    ";",
    "--",
    "1",
    ".5",
    "2k",
    "x",
    "' OR 1=1 --",
    "\0",
    "\ud800",
    "é",
    "1;DROP TABLE samples",
]


@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=12).map(" ".join)))
@example("task = '\0'")
@example("task ~ \ud800")
@example("part.'; drop table samples; -- = 1")
def test_garbage_is_a_value_error_or_a_harmless_condition(index: Index, text: str) -> None:
    try:
        condition = parse(text)
    except ValueError:
        return
    # What was typed is in the values alone.
    assert condition.sql.count("?") == len(condition.values)
    try:
        count = index.query(f"SELECT COUNT(*) FROM samples WHERE {condition.sql}", condition.values)[0][0]
    except UnicodeEncodeError:  # of a lone surrogate, a ValueError too
        return
    assert 0 <= count <= len(ROWS)


# --- order ----------------------------------------------------------------------------------------------------------


def test_sorting_puts_what_is_missing_last_whichever_way(index: Index) -> None:
    def numbers(text: str) -> list[int]:
        sql, values = parse_sort(text, "samples")
        return [n for (n,) in index.query(f"SELECT n FROM samples ORDER BY {sql}", values)]

    assert numbers("reward") == [3, 1, 4, 0, 2]
    assert numbers("-reward") == [0, 4, 1, 3, 2]
    assert numbers("-part.acc,-len") == [0, 4, 1, 3, 2]
    assert numbers("truncated, -r") == [0, 4, 3, 2, 1]
    assert numbers("") == [0, 1, 2, 3, 4]
    assert parse_sort("-reward", "groups")[0] == "mean IS NULL, mean DESC, first"
    for text in ("rewrd", "reward; drop table samples", "1", "-", "(select 1)"):
        with pytest.raises(ValueError, match="sort: got"):
            parse_sort(text)
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        parse_sort("meen", "groups")


def test_what_can_be_asked_is_described() -> None:
    columns = describe_columns(["acc"])
    names = [column["name"] for column in columns]
    assert len(set(names)) == len(names)
    assert {"reward", "part.acc", "zero_variance"} <= set(names)
    assert "digest" not in names
    for column in columns:
        name = column["name"]
        value = {"number": f"{name} > 1", "text": f"{name} = x", "search": f"{name} ~ x", "flag": name}
        parse(value[column["type"]], ["acc"])
        if column["type"] != "search":
            parse_sort(name, "samples")
    assert set(FLAGS) <= set(names)
