"""The filter language: `reward < .5 and len > 1.5k and (truncated or not trained)`, and the order `-reward,length`.

Invariant: a filter becomes SQL in which every value is a parameter and every name comes from a table in this module.
Invalid filters raise a `ValueError` that names the position. A comparison with a missing value is false, and its `not`
is true.

    filter      = either { "or" either }
    either      = term { "and" term }              (`&`, `&&`, `|` and `||` too)
    term        = "not" term | "(" filter ")" | test     (`!` too)
    test        = FLAG | COLUMN operator value | COLUMN ["not"] "in" "(" value { "," value } ")"
                | COLUMN "is" ["not"] "null"
    operator    = "=" "==" "!=" "<>" "<" "<=" ">" ">="; for texts also "~" (contains, ignoring case) and "!~"
    value       = 12  .5  -1e-3  2k  1.5m  "a text"  'a text'  word

`part.NAME` is a reward part, `metric.NAME` another number logged with the sample. Texts support only `=`, `!=`, `~` and
`in`. `response ~ TEXT` and `prompt ~ TEXT` search full texts; `prompt = ID` compares prompt ids. `length` counts
response tokens, `tokens` counts tokens of prompt and response.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollbook.core.checks import suggest
from rollbook.inspect.index import COLUMNS
from rollbook.inspect.measures import DUPLICATE_TOKENS, LOOP_SHARE, STALE_LAG

MAX_LENGTH = 4000
MAX_NESTING = 50
MAX_VALUES = 500
ALIASES = {
    "len": "response_tokens",
    "length": "response_tokens",
    "tokens": "length",
    "total_tokens": "length",
    "id": "uid",
    "group": "gid",
    "h": "entropy",
    "logp": "logprob",
    "adv": "advantage",
    "r": "reward",
    "score": "reward",
    "lag": "staleness",
    "version": "version_max",
    "finish": "finish_reason",
    "answer": "closing",
    "question": "opening",
    "loop_share": "repetition",
    "eval": "evaluation",
    "dropped_because": "reason",
}
"""Alternative names of columns."""
_TEXT_TESTS = {
    "response": "IFNULL((SELECT text_contains(body, ?) FROM bodies WHERE bodies.n = samples.n), 0)",
    "prompt": "IFNULL(samples.prompt IN (SELECT prompt FROM prompt_bodies WHERE text_contains(body, ?)), 0)",
}
"""Tests on full texts, which are loaded on first use (see `Condition.texts`)."""

_SOLVED_REWARD = "(SELECT bar FROM tops WHERE tops.evaluation = samples.evaluation AND solves)"
_GROUP_SOLVED_REWARD = "(SELECT bar FROM tops WHERE tops.evaluation = groups.evaluation AND solves)"
_IN_GROUP = (
    "EXISTS (SELECT 1 FROM groups WHERE groups.gid = samples.gid AND groups.evaluation = samples.evaluation AND {})"
)


class Flag(NamedTuple):
    """A word that is true or false for a sample."""

    sql: str
    label: str
    help: str


FLAGS: dict[str, Flag] = {
    "truncated": Flag("status = 'truncated'", "Truncated", "Truncated at a limit."),
    "finished": Flag("status = 'finished'", "Finished", "Ended by the model."),
    "aborted": Flag("status = 'aborted'", "Aborted", "Generation was aborted."),
    "error": Flag("status = 'error'", "Error", "Generation failed."),
    "loop": Flag(
        f"COALESCE(repetition >= {LOOP_SHARE}, 0)", "Loop", f"At least {LOOP_SHARE:.0%} of the response is repetition."
    ),
    "duplicate": Flag(
        "duplicate = 1", "Duplicate", f"Identical to another sample of its group ({DUPLICATE_TOKENS} tokens or more)."
    ),
    "nan": Flag(
        "(COALESCE(nans, 0) > 0 OR scored = 2)", "NaN/Inf", "The reward or a per-token value is NaN or infinite."
    ),
    "scored": Flag("scored = 1", "Scored", "The reward is a number."),
    "solved": Flag(f"COALESCE(reward >= {_SOLVED_REWARD}, 0)", "Solved", "The reward is near the run's highest."),
    "stale": Flag(f"COALESCE(staleness > {STALE_LAG}, 0)", "Stale", f"More than {STALE_LAG} policy version behind."),
    "trained": Flag("state = 'trained'", "Trained", "Trained on."),
    "dropped": Flag("state = 'dropped'", "Dropped", "Dropped before training; see `reason`."),
    "waiting": Flag("state = 'waiting'", "Waiting", "Waiting to be trained on."),
    "leased": Flag("state = 'leased'", "Leased", "Leased by a trainer."),
    "evaluation": Flag("evaluation = 1", "Evaluation", "Evaluation sample, never trained on."),
    "removed": Flag("removed_reason IS NOT NULL", "Removed", "Data removed."),
    "measured": Flag("measured = 1", "Measured", "Tokens have been measured."),
    "tool": Flag("COALESCE(tool_calls > 0, 0)", "Tool", "Has tool calls."),
    "image": Flag("COALESCE(images > 0, 0)", "Image", "Has images."),
    "masked": Flag("trained_tokens < response_tokens", "Masked", "Some response tokens are not trained on."),
    "zero_variance": Flag(
        _IN_GROUP.format("zero_variance"), "Zero variance", "All samples of its group have the same reward."
    ),
    "incomplete": Flag(
        _IN_GROUP.format(
            "runs < expected AND groups.step < "
            "(SELECT MAX(step) FROM steps WHERE steps.evaluation = groups.evaluation AND steps.n > 0)"
        ),
        "Incomplete",
        "Its group has fewer samples than its group size, and is not in the newest step.",
    ),
    "unsolved": Flag(
        _IN_GROUP.format(f"high < {_GROUP_SOLVED_REWARD}"),
        "None solved",
        "No sample of its group is solved.",
    ),
    "some_solved": Flag(
        _IN_GROUP.format(f"high >= {_GROUP_SOLVED_REWARD} AND low < {_GROUP_SOLVED_REWARD}"),
        "Some solved",
        "Some samples of its group are solved, and some are not.",
    ),
    "all_solved": Flag(
        _IN_GROUP.format(f"low >= {_GROUP_SOLVED_REWARD}"), "All solved", "All samples of its group are solved."
    ),
}
"""Flags and their SQL conditions, which are never NULL."""

_NUMBER_PREFIXES = ("part.", "parts.", "metric.", "metrics.")
_NUMBER_COLUMNS = {name for name, column in COLUMNS.items() if column.type == "number"}
_TEXT_COLUMNS = {name for name, column in COLUMNS.items() if column.type == "text"}
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?[kKmM]?(?![\w.]))
    |(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<sign><=|>=|!=|<>|==|!~|&&|\|\||[=<>~(),&|!])
    |(?P<word>[^\s"'()<>=!~,&|]+)
    )""",
    re.VERBOSE,
)
_UNITS = {"k": 1e3, "m": 1e6}
_SQL_OPERATORS = {"=": "=", "==": "=", "!=": "<>", "<>": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed filter: a condition on `samples`, and its values."""

    sql: str
    values: tuple[Any, ...]
    texts: bool = field(default=False, repr=False)
    """Whether it reads the texts that `Search` stores."""


def parse(text: str, parts: Sequence[str] = ()) -> Condition:
    """Parse a filter; an empty one is true.

    Args:
        text: The filter.
        parts: Names of reward parts and metrics.

    Raises:
        ValueError: If the filter is invalid.

    >>> parse("reward < .5 and not truncated")
    Condition(sql="(reward < ? AND NOT (status = 'truncated'))", values=(0.5,))
    >>> parse("rewrd < 1")
    Traceback (most recent call last):
        ...
    ValueError: filter, character 1: got 'rewrd', expected a column or a flag such as truncated; did you mean 'reward'?
    """
    if not isinstance(text, str) or len(text) > MAX_LENGTH:
        raise ValueError(f"filter: got {str(text)[:40]!r}, expected a string of at most {MAX_LENGTH} characters")
    if not text.strip():
        return Condition("1", ())
    parser = _Parser(text, parts)
    node = parser.parse_or(0)
    rest = parser.peek()
    if rest is not None:
        raise parser.error(rest, "and, or, or the end")
    values: list[Any] = []
    sql = node.sql(values, False)
    return Condition(sql, tuple(values), parser.texts)


class _Node(NamedTuple):
    """A node of a filter. Negation is pushed down to the tests, where missing values matter."""

    word: str
    """`AND`, `OR`, `NOT`, or "" for a test."""
    inner: tuple[_Node, ...] = ()
    test: str = ""
    values: tuple[Any, ...] = ()
    null: bool = True
    """Whether the test can be NULL."""

    def sql(self, values: list[Any], negated: bool) -> str:
        """Return the condition and append its values to `values`."""
        if self.word == "NOT":
            return self.inner[0].sql(values, not negated)
        if self.word:
            word = self.word if not negated else {"AND": "OR", "OR": "AND"}[self.word]
            return f"({f' {word} '.join(node.sql(values, negated) for node in self.inner)})"
        values += self.values
        if not negated:
            return self.test
        return f"NOT IFNULL({self.test}, 0)" if self.null else f"NOT ({self.test})"


class _Parser:
    """A recursive-descent parser of filters."""

    def __init__(self, text: str, parts: Sequence[str]) -> None:
        self.text = text
        self.parts = parts
        self.texts = False
        self.tokens: list[_Token] = []
        self.at = 0
        offset = 0
        while text[offset:].strip():
            match = _TOKEN.match(text, offset)
            if match is None or match.lastgroup is None:
                start = offset + len(text[offset:]) - len(text[offset:].lstrip())
                raise self._error_at(start, text[start], "a column, a value, or and, or, not")
            self.tokens.append(_Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
            offset = match.end()

    def _error_at(self, at: int, actual: str | None, expected: str, hint: str = "") -> ValueError:
        token = "the end" if actual is None else repr(actual[:40])
        return ValueError(f"filter, character {at + 1}: got {token}, expected {expected}{hint}")

    def error(self, token: _Token | None, expected: str, hint: str = "") -> ValueError:
        """Return the error for an unexpected token."""
        if token is None:
            return self._error_at(len(self.text), None, expected, hint)
        return self._error_at(token.at, token.text, expected, hint)

    def peek(self) -> _Token | None:
        """Return the next token, or `None`."""
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, expected: str) -> _Token:
        """Consume and return the next token."""
        token = self.peek()
        if token is None:
            raise self.error(None, expected)
        self.at += 1
        return token

    def accept(self, *words: str) -> bool:
        """Consume the next token if it is one of these; return whether it was."""
        token = self.peek()
        if token is None or token.kind not in ("word", "sign") or token.text.lower() not in words:
            return False
        self.at += 1
        return True

    # --- the grammar --------------------------------------------------------------------------------------------

    def parse_or(self, depth: int) -> _Node:
        """Parse terms joined by "and", joined by "or"."""
        sides = [self._parse_and(depth)]
        while self.accept("or", "|", "||"):
            sides.append(self._parse_and(depth))
        return sides[0] if len(sides) == 1 else _Node("OR", tuple(sides))

    def _parse_and(self, depth: int) -> _Node:
        sides = [self._parse_term(depth)]
        while self.accept("and", "&", "&&"):
            sides.append(self._parse_term(depth))
        return sides[0] if len(sides) == 1 else _Node("AND", tuple(sides))

    def _parse_term(self, depth: int) -> _Node:
        token = self.peek()
        if depth > MAX_NESTING:
            raise self.error(token, f"at most {MAX_NESTING} nested brackets and nots")
        if self.accept("not", "!"):
            return _Node("NOT", (self._parse_term(depth + 1),))
        if self.accept("("):
            inner = self.parse_or(depth + 1)
            if not self.accept(")"):
                raise self.error(self.peek(), "')'")
            return inner
        return self._parse_test()

    def _parse_test(self) -> _Node:
        token = self.take("a column, not, or '('")
        if token.kind != "word":
            raise self.error(token, "a column, a flag such as truncated, not, or '('")
        name = token.text.lower()
        if name in FLAGS and not self._is_comparison():
            return _Node("", test=FLAGS[name].sql, null=False)
        sign = self.peek()
        if name in _TEXT_TESTS and (name not in COLUMNS or (sign is not None and sign.text in ("~", "!~"))):
            return self._parse_text_search(name)
        name = ALIASES.get(name, name)
        if name in FLAGS and name not in _TEXT_COLUMNS:
            return self._parse_flag(name)
        if name.startswith(_NUMBER_PREFIXES):
            reward_part = self._resolve_part(token)
            # As one side of a comparison, a name is safe even if it is not a valid SQLite path.
            column = "(SELECT value FROM json_each(samples.parts) WHERE key = ?)"
            return self._parse_number_test(column, (reward_part,))
        if name in _NUMBER_COLUMNS:
            return self._parse_number_test(name)
        if name in _TEXT_COLUMNS:
            return self._parse_text_test(name)
        names = [*COLUMNS, *ALIASES, *FLAGS, *_TEXT_TESTS, "part.NAME"]
        hint = suggest(name, names).split("(")[0].strip() if suggest(name, names).startswith("; did") else ""
        raise self.error(token, "a column or a flag such as truncated", hint)

    def _parse_text_search(self, name: str) -> _Node:
        sign = self.take("~ or !~")
        if sign.text not in ("~", "!~"):
            raise self.error(sign, "~ or !~")
        self.texts = True
        test = _Node("", test=_TEXT_TESTS[name], values=(_parse_text(self._parse_value("a text")),), null=False)
        return _Node("NOT", (test,)) if sign.text == "!~" else test

    def _is_comparison(self) -> bool:
        token = self.peek()
        if token is None:
            return False
        if token.kind == "sign":
            return token.text in _SQL_OPERATORS or token.text in ("~", "!~")
        return token.kind == "word" and token.text.lower() in ("is", "in")

    def _resolve_part(self, token: _Token) -> str:
        name = token.text.split(".", 1)[1]
        if self.parts and name not in self.parts:
            same = [candidate for candidate in self.parts if candidate.lower() == name.lower()]
            if not same:
                hint = suggest(name, list(self.parts))
                raise self.error(token, "the name of a reward part or metric", hint)
            name = same[0]
        return name

    def _parse_flag(self, name: str) -> _Node:
        sign = self.take("= or !=")
        if sign.text not in ("=", "==", "!=", "<>"):
            raise self.error(sign, "= or !=, or nothing after a flag")
        value = self.take("true or false")
        if value.text.lower() not in _BOOLEANS:
            raise self.error(value, "true or false")
        test = _Node("", test=FLAGS[name].sql, null=False)
        return test if _BOOLEANS[value.text.lower()] == (_SQL_OPERATORS[sign.text] == "=") else _Node("NOT", (test,))

    def _parse_null(self, column: str, values: tuple[Any, ...]) -> _Node | None:
        if not self.accept("is"):
            return None
        negated = self.accept("not")
        if not self.accept("null", "none", "missing"):
            raise self.error(self.peek(), "null" if negated else "null or not null")
        test = _Node("", test=f"{column} IS NULL", values=values, null=False)
        return _Node("NOT", (test,)) if negated else test

    def _parse_list(self) -> tuple[bool, list[_Token]] | None:
        """Parse `in` or `not in` and its values; `None` if neither comes next."""
        negated = False
        token = self.peek()
        if token is not None and token.text.lower() == "not" and self.at + 1 < len(self.tokens):
            negated = self.tokens[self.at + 1].text.lower() == "in"
            self.at += negated
        if not self.accept("in"):
            return None
        if not self.accept("("):
            raise self.error(self.peek(), "'(' and values")
        values = [self._parse_value("a value")]
        while self.accept(","):
            values.append(self._parse_value("a value"))
        if not self.accept(")"):
            raise self.error(self.peek(), "',' or ')'")
        if len(values) > MAX_VALUES:
            raise self.error(values[MAX_VALUES], f"at most {MAX_VALUES} values")
        return negated, values

    def _parse_value(self, expected: str) -> _Token:
        token = self.take(expected)
        if token.kind == "sign":
            raise self.error(token, expected)
        return token

    def _parse_number_test(self, column: str, first: tuple[Any, ...] = ()) -> _Node:
        listed = self._parse_list()
        if listed is not None:
            numbers = tuple(self._parse_number(token) for token in listed[1])
            marks = ",".join("?" * len(numbers))
            test = _Node("", test=f"{column} IN ({marks})", values=(*first, *numbers))
            return _Node("NOT", (test,)) if listed[0] else test
        missing = self._parse_null(column, first)
        if missing is not None:
            return missing
        sign = self.take("one of < <= > >= = != in is")
        if sign.text not in _SQL_OPERATORS:
            raise self.error(sign, "one of < <= > >= = != in is")
        value = self._parse_value("a number")
        if value.text.lower() in ("null", "none") and sign.text in ("=", "==", "!=", "<>"):
            absent = _Node("", test=f"{column} IS NULL", values=first, null=False)
            return absent if _SQL_OPERATORS[sign.text] == "=" else _Node("NOT", (absent,))
        compared = _SQL_OPERATORS[sign.text]
        test = _Node(
            "", test=f"{column} {'=' if compared == '<>' else compared} ?", values=(*first, self._parse_number(value))
        )
        return _Node("NOT", (test,)) if compared == "<>" else test

    def _parse_number(self, token: _Token) -> float:
        text = token.text.lower()
        if token.kind == "number":
            unit = _UNITS.get(text[-1], 1.0)
            number = float(text.rstrip("km")) * unit
            if math.isfinite(number):
                return number
        elif token.kind == "word" and text in _BOOLEANS:
            return float(_BOOLEANS[text])
        raise self.error(token, "a number such as 12, .5, 1e-3 or 2k")

    def _parse_text_test(self, column: str) -> _Node:
        listed = self._parse_list()
        if listed is not None:
            texts = tuple(_parse_text(token) for token in listed[1])
            test = _Node("", test=f"{column} IN ({','.join('?' * len(texts))})", values=texts)
            return _Node("NOT", (test,)) if listed[0] else test
        missing = self._parse_null(column, ())
        if missing is not None:
            return missing
        sign = self.take("one of = != ~ in is")
        if sign.text not in ("=", "==", "!=", "<>", "~", "!~"):
            raise self.error(sign, "one of = != ~ in is (a text column)")
        value = _parse_text(self._parse_value("a text"))
        test = _Node("", test=f"contains({column}, ?)" if "~" in sign.text else f"{column} = ?", values=(value,))
        return _Node("NOT", (test,)) if sign.text in ("!=", "<>", "!~") else test


def _parse_text(token: _Token) -> str:
    if token.kind != "quoted":
        return token.text
    return re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL)


# --- order ----------------------------------------------------------------------------------------------------------

GROUP_COLUMNS = (
    *("gid", "step", "task", "prompt", "n", "expected", "images", "mean", "std", "low", "high", "length", "entropy"),
    *("kl_max", "mismatch_max", "zero_variance", "truncated", "loops", "duplicates", "nans", "stale"),
)
"""Columns that groups can be sorted by; sample columns map to the corresponding one."""
_GROUP_ALIASES = {
    "reward": "mean",
    "response_tokens": "length",
    "len": "length",
    "group": "gid",
    "group_size": "expected",
    "kl": "kl_max",
    "mismatch": "mismatch_max",
    "h": "entropy",
    "opening": "prompt",
    "staleness": "stale",
    "repetition": "loops",
}


def parse_sort(text: str, view: str = "samples", parts: Sequence[str] = ()) -> tuple[str, tuple[Any, ...]]:
    """Convert `-reward,length` to SQL: column names, `-` for descending, missing values last; return it with its
    values.

    >>> parse_sort("-reward,length")
    ('reward IS NULL, reward DESC, response_tokens, n', ())
    """
    if not isinstance(text, str) or len(text) > MAX_LENGTH:
        raise ValueError(f"sort: got {str(text)[:40]!r}, expected column names separated by commas")
    clauses: list[str] = []
    values: list[Any] = []
    for word in filter(None, (text_part.strip() for text_part in text.split(","))):
        falling = word.startswith("-")
        name = word.lstrip("+-").strip()
        lower = name.lower()
        if view == "groups":
            column, columns = _GROUP_ALIASES.get(lower, lower), list(GROUP_COLUMNS)
        else:
            column, columns = ALIASES.get(lower, lower), [*COLUMNS, *ALIASES, *FLAGS, "part.NAME"]
        if view == "samples" and lower.startswith(_NUMBER_PREFIXES):
            column = "(SELECT value FROM json_each(samples.parts) WHERE key = ?)"
            values += [name.split(".", 1)[1]] * 2
        elif view == "samples" and column in FLAGS and column not in COLUMNS:
            column = f"({FLAGS[column].sql})"
        elif column not in columns:
            raise ValueError(f"sort: got {name[:40]!r}, expected a column{suggest(name, columns)}")
        if column in COLUMNS and "NOT NULL" in COLUMNS[column].sql:
            clauses.append(f"{column}{' DESC' if falling else ''}")
        else:
            clauses += [f"{column} IS NULL", f"{column}{' DESC' if falling else ''}"]
    return ", ".join([*clauses, "first" if view == "groups" else "n"]), tuple(values)


_FILTER_NAMES = {"length": "tokens", "response_tokens": "length"}


def describe_columns(parts: Sequence[str], metrics: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the columns for filters and sorting, for `/api/run`: {name, label, type, help}."""
    columns = [
        {"name": _FILTER_NAMES.get(name, name), "label": column.label, "type": column.type, "help": column.help}
        for name, column in COLUMNS.items()
        if column.type in ("number", "text") and name not in FLAGS
    ]
    columns.append(
        {
            "name": "response",
            "label": "Response",
            "type": "search",
            "help": "Full text of the response, e.g. response ~ wait.",
        }
    )
    columns += [
        {"name": f"{kind}.{name}", "label": name, "type": "number", "help": text}
        for kind, names, text in (
            ("part", parts, "Reward part."),
            ("metric", metrics, "Number logged with the sample."),
        )
        for name in names
    ]
    columns += [{"name": name, "label": flag.label, "type": "flag", "help": flag.help} for name, flag in FLAGS.items()]
    return columns
