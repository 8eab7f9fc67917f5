"""The filter language: `reward < .5 and len > 1.5k and (truncated or not trained)`, and the order `-reward,length`.

Invariant: a filter becomes SQL in which every value is a parameter and every name comes from a table here; whatever the
text, the answer is that or a `ValueError` that says where it is wrong. A comparison with a value that is missing is
false, and its `not` is true.

    filter      = either { "or" either }
    either      = term { "and" term }              (`&`, `&&`, `|` and `||` too)
    term        = "not" term | "(" filter ")" | test     (`!` too)
    test        = FLAG | COLUMN operator value | COLUMN ["not"] "in" "(" value { "," value } ")"
                | COLUMN "is" ["not"] "null"
    operator    = "=" "==" "!=" "<>" "<" "<=" ">" ">=" and, of texts, "~" (holds, whatever its case) and "!~"
    value       = 12  .5  -1e-3  2k  1.5m  "a text"  'a text'  word

`part.NAME` is a part of the reward, `metric.NAME` another number that was logged with the sample; both look among all
of them. Texts know `=`, `!=`, `~` and `in` alone. `response ~ TEXT` and `prompt ~ TEXT` look in whole texts; `prompt =
ID` is a prompt's id. `length` is that of the response, `tokens` of prompt and response.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollbook.core.checks import suggest
from rollbook.inspect.index import COLUMNS
from rollbook.inspect.measures import DUPLICATE_TOKENS, LOOP, STALE

MOST_LETTERS = 4000
MOST_NESTING = 50
MOST_VALUES = 500
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
    "staleness": "lag",
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
    "response": "IFNULL((SELECT holds(body, ?) FROM bodies WHERE bodies.n = samples.n), 0)",
    "prompt": "IFNULL(samples.prompt IN (SELECT prompt FROM prompt_bodies WHERE holds(body, ?)), 0)",
}
"""Tests on full texts, which are loaded on first use (see `Condition.texts`)."""

_BAR = "(SELECT bar FROM tops WHERE tops.evaluation = samples.evaluation AND solves)"
_GROUP_BAR = "(SELECT bar FROM tops WHERE tops.evaluation = groups.evaluation AND solves)"
_IN_GROUP = (
    "EXISTS (SELECT 1 FROM groups WHERE groups.gid = samples.gid AND groups.evaluation = samples.evaluation AND {})"
)


class Flag(NamedTuple):
    """A word that is true or false for a sample."""

    sql: str
    label: str
    help: str


FLAGS: dict[str, Flag] = {
    "truncated": Flag("status = 'truncated'", "Truncated", "The response was cut at its limit."),
    "finished": Flag("status = 'finished'", "Finished", "The model ended its response."),
    "aborted": Flag("status = 'aborted'", "Aborted", "The engine was stopped."),
    "error": Flag("status = 'error'", "Error", "The run failed."),
    "loop": Flag(f"COALESCE(repetition >= {LOOP}, 0)", "Loop", f"At least {LOOP:.0%} of the response repeats itself."),
    "duplicate": Flag(
        "duplicate = 1", "Duplicate", f"{DUPLICATE_TOKENS} tokens or more, the same as another run's of its group."
    ),
    "nan": Flag("(COALESCE(nans, 0) > 0 OR scored = 2)", "NaN", "A number of it is not finite."),
    "scored": Flag("scored = 1", "Scored", "It has a reward that is a number."),
    "solved": Flag(f"COALESCE(reward >= {_BAR}, 0)", "Solved", "Its reward is the run's highest, or nearly."),
    "stale": Flag(f"COALESCE(lag > {STALE}, 0)", "Stale", f"The policy had moved on by more than {STALE} version."),
    "trained": Flag("state = 'trained'", "Trained", "It was trained on."),
    "dropped": Flag("state = 'dropped'", "Dropped", "It was given up; `reason` says why."),
    "waiting": Flag("state = 'waiting'", "Waiting", "It waits to be trained on."),
    "leased": Flag("state = 'leased'", "Leased", "A trainer has it just now."),
    "evaluation": Flag("evaluation = 1", "Evaluation", "It is kept beside, never trained on."),
    "removed": Flag("removed_reason IS NOT NULL", "Removed", "Its bytes were removed."),
    "measured": Flag("measured = 1", "Measured", "Its tokens were looked at."),
    "tool": Flag("COALESCE(tool_calls > 0, 0)", "Tool", "It calls tools."),
    "image": Flag("COALESCE(images > 0, 0)", "Image", "It shows images."),
    "masked": Flag("trained_tokens < response_tokens", "Masked", "Not all of its response is trained on."),
    "zero_variance": Flag(_IN_GROUP.format("zero_variance"), "Zero variance", "All of its group have the same reward."),
    "incomplete": Flag(
        _IN_GROUP.format(
            "runs < expected AND groups.step < "
            "(SELECT MAX(step) FROM steps WHERE steps.evaluation = groups.evaluation AND steps.n > 0)"
        ),
        "Incomplete",
        "Its group has fewer runs than it was to have, and is not of the newest step.",
    ),
    "unsolved": Flag(
        _IN_GROUP.format(f"high < {_GROUP_BAR}"),
        "None solved",
        "No sample of its group is solved.",
    ),
    "some_solved": Flag(
        _IN_GROUP.format(f"high >= {_GROUP_BAR} AND low < {_GROUP_BAR}"),
        "Some solved",
        "Some samples of its group are solved, and some are not.",
    ),
    "all_solved": Flag(_IN_GROUP.format(f"low >= {_GROUP_BAR}"), "All solved", "All samples of its group are solved."),
}
"""Flags and their SQL conditions, which are never NULL."""

_NAMED = ("part.", "parts.", "metric.", "metrics.")
_NUMBERS = {name for name, column in COLUMNS.items() if column.type == "number"}
_TEXTS = {name for name, column in COLUMNS.items() if column.type == "text"}
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
_COMPARE = {"=": "=", "==": "=", "!=": "<>", "<>": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


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
    """Parse a filter; an empty one is true. `parts`: names of reward parts and metrics.

    >>> parse("reward < .5 and not truncated")
    Condition(sql="(reward < ? AND NOT (status = 'truncated'))", values=(0.5,))
    >>> parse("rewrd < 1")
    Traceback (most recent call last):
        ...
    ValueError: filter, letter 1: got 'rewrd', expected a column or a word such as truncated; did you mean 'reward'?
    """
    if not isinstance(text, str) or len(text) > MOST_LETTERS:
        raise ValueError(f"filter: got {str(text)[:40]!r}, expected a text of at most {MOST_LETTERS} letters")
    if not text.strip():
        return Condition("1", ())
    reader = _Reader(text, parts)
    node = reader.either(0)
    left = reader.peek()
    if left is not None:
        raise reader.wrong(left, "and, or, or the end")
    values: list[Any] = []
    sql = node.sql(values, False)
    return Condition(sql, tuple(values), reader.texts)


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


class _Reader:
    """A recursive-descent parser of filters."""

    def __init__(self, text: str, parts: Sequence[str]) -> None:
        self.text = text
        self.parts = parts
        self.texts = False
        self.tokens: list[_Token] = []
        self.at = 0
        place = 0
        while text[place:].strip():
            match = _TOKEN.match(text, place)
            if match is None or match.lastgroup is None:
                start = place + len(text[place:]) - len(text[place:].lstrip())
                raise self._error(start, text[start], "a column, a value, or and, or, not")
            self.tokens.append(_Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
            place = match.end()

    def _error(self, at: int, actual: str | None, expected: str, hint: str = "") -> ValueError:
        shown = "the end" if actual is None else repr(actual[:40])
        return ValueError(f"filter, letter {at + 1}: got {shown}, expected {expected}{hint}")

    def wrong(self, token: _Token | None, expected: str, hint: str = "") -> ValueError:
        """Return the error for an unexpected token."""
        if token is None:
            return self._error(len(self.text), None, expected, hint)
        return self._error(token.at, token.text, expected, hint)

    def peek(self) -> _Token | None:
        """Return the next token, or `None`."""
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, expected: str) -> _Token:
        """Consume and return the next token."""
        token = self.peek()
        if token is None:
            raise self.wrong(None, expected)
        self.at += 1
        return token

    def met(self, *words: str) -> bool:
        """Consume the next token if it is one of these; return whether it was."""
        token = self.peek()
        if token is None or token.kind not in ("word", "sign") or token.text.lower() not in words:
            return False
        self.at += 1
        return True

    # --- the grammar --------------------------------------------------------------------------------------------

    def either(self, depth: int) -> _Node:
        """Parse terms joined by "and", joined by "or"."""
        sides = [self._both(depth)]
        while self.met("or", "|", "||"):
            sides.append(self._both(depth))
        return sides[0] if len(sides) == 1 else _Node("OR", tuple(sides))

    def _both(self, depth: int) -> _Node:
        sides = [self._term(depth)]
        while self.met("and", "&", "&&"):
            sides.append(self._term(depth))
        return sides[0] if len(sides) == 1 else _Node("AND", tuple(sides))

    def _term(self, depth: int) -> _Node:
        token = self.peek()
        if depth > MOST_NESTING:
            raise self.wrong(token, f"at most {MOST_NESTING} levels of brackets and not")
        if self.met("not", "!"):
            return _Node("NOT", (self._term(depth + 1),))
        if self.met("("):
            inner = self.either(depth + 1)
            if not self.met(")"):
                raise self.wrong(self.peek(), "')'")
            return inner
        return self._test()

    def _test(self) -> _Node:
        token = self.take("a column, not, or '('")
        if token.kind != "word":
            raise self.wrong(token, "a column, a word such as truncated, not, or '('")
        name = token.text.lower()
        if name in FLAGS and not self._compares():
            return _Node("", test=FLAGS[name].sql, null=False)
        sign = self.peek()
        if name in _TEXT_TESTS and (name not in COLUMNS or (sign is not None and sign.text in ("~", "!~"))):
            return self._text(name)
        name = ALIASES.get(name, name)
        if name in FLAGS and name not in _TEXTS:
            return self._flag(name)
        if name.startswith(_NAMED):
            part = self._part(token)
            # As one side of a comparison, a name is safe even if it is not a valid SQLite path.
            column = "(SELECT value FROM json_each(samples.parts) WHERE key = ?)"
            return self._number(column, (part,))
        if name in _NUMBERS:
            return self._number(name)
        if name in _TEXTS:
            return self._words(name)
        names = [*COLUMNS, *ALIASES, *FLAGS, *_TEXT_TESTS, "part.NAME"]
        hint = suggest(name, names).split("(")[0].strip() if suggest(name, names).startswith("; did") else ""
        raise self.wrong(token, "a column or a word such as truncated", hint)

    def _text(self, name: str) -> _Node:
        sign = self.take("~ or !~")
        if sign.text not in ("~", "!~"):
            raise self.wrong(sign, "~ or !~")
        self.texts = True
        test = _Node("", test=_TEXT_TESTS[name], values=(_as_text(self._value("a text")),), null=False)
        return _Node("NOT", (test,)) if sign.text == "!~" else test

    def _compares(self) -> bool:
        token = self.peek()
        if token is None:
            return False
        if token.kind == "sign":
            return token.text in _COMPARE or token.text in ("~", "!~")
        return token.kind == "word" and token.text.lower() in ("is", "in")

    def _part(self, token: _Token) -> str:
        name = token.text.split(".", 1)[1]
        if self.parts and name not in self.parts:
            same = [part for part in self.parts if part.lower() == name.lower()]
            if not same:
                hint = suggest(name, list(self.parts))
                raise self.wrong(token, "the name of a part of the reward or of a metric", hint)
            name = same[0]
        return name

    def _flag(self, name: str) -> _Node:
        sign = self.take("= or !=")
        if sign.text not in ("=", "==", "!=", "<>"):
            raise self.wrong(sign, "= or !=, or nothing behind a word that stands alone")
        value = self.take("true or false")
        if value.text.lower() not in _TRUTH:
            raise self.wrong(value, "true or false")
        test = _Node("", test=FLAGS[name].sql, null=False)
        return test if _TRUTH[value.text.lower()] == (_COMPARE[sign.text] == "=") else _Node("NOT", (test,))

    def _null(self, column: str, values: tuple[Any, ...]) -> _Node | None:
        if not self.met("is"):
            return None
        negated = self.met("not")
        if not self.met("null", "none", "missing"):
            raise self.wrong(self.peek(), "null" if negated else "null or not null")
        test = _Node("", test=f"{column} IS NULL", values=values, null=False)
        return _Node("NOT", (test,)) if negated else test

    def _listed(self) -> tuple[bool, list[_Token]] | None:
        """Parse `in` or `not in` and its values; `None` if neither comes next."""
        negated = False
        token = self.peek()
        if token is not None and token.text.lower() == "not" and self.at + 1 < len(self.tokens):
            negated = self.tokens[self.at + 1].text.lower() == "in"
            self.at += negated
        if not self.met("in"):
            return None
        if not self.met("("):
            raise self.wrong(self.peek(), "'(' and values")
        values = [self._value("a value")]
        while self.met(","):
            values.append(self._value("a value"))
        if not self.met(")"):
            raise self.wrong(self.peek(), "',' or ')'")
        if len(values) > MOST_VALUES:
            raise self.wrong(values[MOST_VALUES], f"at most {MOST_VALUES} values")
        return negated, values

    def _value(self, expected: str) -> _Token:
        token = self.take(expected)
        if token.kind == "sign":
            raise self.wrong(token, expected)
        return token

    def _number(self, column: str, first: tuple[Any, ...] = ()) -> _Node:
        listed = self._listed()
        if listed is not None:
            numbers = tuple(self._as_number(token) for token in listed[1])
            marks = ",".join("?" * len(numbers))
            test = _Node("", test=f"{column} IN ({marks})", values=(*first, *numbers))
            return _Node("NOT", (test,)) if listed[0] else test
        missing = self._null(column, first)
        if missing is not None:
            return missing
        sign = self.take("one of < <= > >= = != in is")
        if sign.text not in _COMPARE:
            raise self.wrong(sign, "one of < <= > >= = != in is")
        value = self._value("a number")
        if value.text.lower() in ("null", "none") and sign.text in ("=", "==", "!=", "<>"):
            absent = _Node("", test=f"{column} IS NULL", values=first, null=False)
            return absent if _COMPARE[sign.text] == "=" else _Node("NOT", (absent,))
        compared = _COMPARE[sign.text]
        test = _Node(
            "", test=f"{column} {'=' if compared == '<>' else compared} ?", values=(*first, self._as_number(value))
        )
        return _Node("NOT", (test,)) if compared == "<>" else test

    def _as_number(self, token: _Token) -> float:
        text = token.text.lower()
        if token.kind == "number":
            unit = _UNITS.get(text[-1], 1.0)
            number = float(text.rstrip("km")) * unit
            if math.isfinite(number):
                return number
        elif token.kind == "word" and text in _TRUTH:
            return float(_TRUTH[text])
        raise self.wrong(token, "a number such as 12, .5, 1e-3 or 2k")

    def _words(self, column: str) -> _Node:
        listed = self._listed()
        if listed is not None:
            texts = tuple(_as_text(token) for token in listed[1])
            test = _Node("", test=f"{column} IN ({','.join('?' * len(texts))})", values=texts)
            return _Node("NOT", (test,)) if listed[0] else test
        missing = self._null(column, ())
        if missing is not None:
            return missing
        sign = self.take("one of = != ~ in is")
        if sign.text not in ("=", "==", "!=", "<>", "~", "!~"):
            raise self.wrong(sign, "one of = != ~ in is, since it is a text")
        value = _as_text(self._value("a text"))
        test = _Node("", test=f"contains({column}, ?)" if "~" in sign.text else f"{column} = ?", values=(value,))
        return _Node("NOT", (test,)) if sign.text in ("!=", "<>", "!~") else test


def _as_text(token: _Token) -> str:
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
    "lag": "stale",
    "repetition": "loops",
}


def order(text: str, view: str = "samples", parts: Sequence[str] = ()) -> tuple[str, tuple[Any, ...]]:
    """Convert `-reward,length` to SQL: column names, `-` for descending, missing values last; return it with its
    values.

    >>> order("-reward,length")
    ('reward IS NULL, reward DESC, response_tokens, n', ())
    """
    if not isinstance(text, str) or len(text) > MOST_LETTERS:
        raise ValueError(f"sort: got {str(text)[:40]!r}, expected columns, with a comma between them")
    clauses: list[str] = []
    values: list[Any] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        falling = word.startswith("-")
        name = word.lstrip("+-").strip()
        lower = name.lower()
        if view == "groups":
            column, columns = _GROUP_ALIASES.get(lower, lower), list(GROUP_COLUMNS)
        else:
            column, columns = ALIASES.get(lower, lower), [*COLUMNS, *ALIASES, *FLAGS, "part.NAME"]
        if view == "samples" and lower.startswith(_NAMED):
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


_SHOWN_AS = {"length": "tokens", "response_tokens": "length"}


def described(parts: Sequence[str], metrics: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the columns for filters and sorting, for `/api/run`: {name, label, type, help}."""
    columns = [
        {"name": _SHOWN_AS.get(name, name), "label": column.label, "type": column.type, "help": column.help}
        for name, column in COLUMNS.items()
        if column.type in ("number", "text") and name not in FLAGS
    ]
    columns.append(
        {"name": "response", "label": "Response", "type": "search", "help": "All of its text: response ~ wait."}
    )
    columns += [
        {"name": f"{kind}.{name}", "label": name, "type": "number", "help": text}
        for kind, names, text in (
            ("part", parts, "A part of the reward."),
            ("metric", metrics, "A number that was logged with the sample."),
        )
        for name in names
    ]
    columns += [{"name": name, "label": flag.label, "type": "flag", "help": flag.help} for name, flag in FLAGS.items()]
    return columns
