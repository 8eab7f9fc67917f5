"""Search: phrases, parts of words and regular expressions, none of which becomes syntax, and a child that is killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollbook
from rollbook import EID, Experience
from rollbook.book import redact_records
from rollbook.inspect import search as searching
from rollbook.inspect.index import Index
from rollbook.inspect.search import Search, split_phrases
from rollbook.inspect.sources import BookSource, load
from rollbook.inspect.trajectory import Trajectory
from rollbook.inspect.workers import QueryTimeoutError

SAID = {
    "1/1/0/0/s": "First I add the sides. Wait, let me verify: 3 + 4 = 7.",
    "1/1/1/0/s": "Let me verify the height_of the café; it is 100% right.",
    "2/1/0/0/s": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
    "2/2/0/0/s": "答えは四十二です。 let the \\boxed{42} be",
    "3/1/0/0/s": 'He said "let me" and left, me verify',
}


def sample(uid: str, **fields: Any) -> Experience:
    """A record with a text under an id."""
    eid = EID.parse(uid)
    columns = {"prompt_text": f"Question {eid.task}: what now?", "response_text": SAID.get(uid, "new")} | fields
    return Experience(eid=eid, tokens=[1, int(eid.task), 3, eid.run + 4], prompt_length=2, **columns)


class Run:
    """A book, its index and its search."""

    def __init__(self, path: Path) -> None:
        self.book = rollbook.open(path / "book")
        self.book.append([sample(uid, reward=float(i)) for i, uid in enumerate(SAID)])
        self.source, self.index = BookSource(self.book), Index()
        load(self.source, self.index)
        self.search = Search(self.source, self.index)

    def uids(self, q: str, mode: str = "phrase", **options: Any) -> list[str]:
        """The ids of responses that match."""
        answer = self.search.search(q, mode, **options)
        assert answer["complete"]
        return [row["uid"] for row in answer["rows"] if row["field"] == "response"]

    def close(self) -> None:
        """End everything."""
        self.search.close()
        self.index.close()
        self.source.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    opened = Run(tmp_path)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    opened = Run(tmp_path_factory.mktemp("search"))
    yield opened
    opened.close()


def test_phrases_are_words_in_a_row(still: Run) -> None:
    assert still.uids("let me verify") == ["1/1/0/0/s", "1/1/1/0/s"]
    assert still.uids("LET  me,verify!") == ["1/1/0/0/s", "1/1/1/0/s"]
    assert still.uids("let me") == ["3/1/0/0/s", "1/1/0/0/s", "1/1/1/0/s"]  # the newest step first
    assert still.uids('"let me" left') == ["3/1/0/0/s"]
    assert still.uids("café") == ["1/1/1/0/s"]
    assert still.uids("verif") == []  # no part of a word
    assert still.uids("boxed 42") == ["2/2/0/0/s"]
    assert still.uids("let me", step=1) == ["1/1/0/0/s", "1/1/1/0/s"]
    assert still.search.search("let me", limit=1)["total"] == 3


def test_snippets_show_what_stands_around(still: Run) -> None:
    (row,) = still.search.search("verify 3")["rows"]
    assert row == {
        "uid": "1/1/0/0/s",
        "gid": "1/1",
        "step": 1,
        "reward": 0.0,
        "field": "response",
        "snippet": {"before": "First I add the sides. Wait, let me ", "match": "verify: 3", "after": " + 4 = 7."},
    }
    (row,) = still.search.search("{42}", "substring")["rows"]
    assert row["snippet"] == {"before": "答えは四十二です。 let the \\boxed", "match": "{42}", "after": " be"}


def test_a_prompt_is_found_once_for_each_group(still: Run) -> None:
    answer = still.search.search("question 1")
    assert answer["total"] == 3
    assert [(row["field"], row["gid"], row["uid"]) for row in answer["rows"]] == [
        ("prompt", "3/1", "3/1/0/0/s"),
        ("prompt", "2/1", "2/1/0/0/s"),
        ("prompt", "1/1", "1/1/0/0/s"),
    ]
    assert [row["gid"] for row in still.search.search("ion 2: w", "substring")["rows"]] == ["2/2"]


def test_parts_of_words_and_signs(still: Run) -> None:
    assert still.uids("VERIF", "substring") == ["3/1/0/0/s", "1/1/0/0/s", "1/1/1/0/s"]
    assert still.uids("100%", "substring") == ["1/1/1/0/s"]
    assert still.uids("t_o", "substring") == ["1/1/1/0/s"]
    assert still.uids("四十二", "phrase") == ["2/2/0/0/s"]  # a script without spaces
    assert still.uids("\\boxed{", "substring") == ["2/2/0/0/s"]


def test_regular_expressions(still: Run) -> None:
    assert still.uids(r"\d \+ \d = \d", "regex") == ["1/1/0/0/s"]
    assert still.uids("^[Ll]et", "regex") == ["1/1/1/0/s"]
    answer = still.search.search("me|q*", "regex", limit=1)
    assert (answer["total"], len(answer["rows"])) == (3, 1)  # empty matches are none
    with pytest.raises(ValueError, match="expected a regular expression"):
        still.search.search("(", "regex")


def test_a_catastrophic_expression_is_stopped_and_the_next_one_answered(still: Run) -> None:
    begun = time.monotonic()
    with pytest.raises(QueryTimeoutError, match="longer than 0.5 seconds"):
        still.search.search("(a+)+$", "regex", seconds=0.5)
    assert time.monotonic() - begun < 30
    assert still.uids("a!", "regex") == ["2/1/0/0/s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": ""}, "expected 1 to"),
        ({"q": "x" * 2000}, "expected 1 to"),
        ({"q": "=="}, "expected at least one word"),
        ({"q": "x", "mode": "sql"}, "mode: got 'sql'"),
        ({"q": "x", "limit": 0}, "limit: got 0"),
    ],
)
def test_bad_questions_are_refused(still: Run, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        still.search.search(**options)


NASTY = [
    '"',
    '""',
    "'",
    "*",
    "NEAR(",
    "response:",
    "a AND",
    "OR",
    "NOT x",
    "^",
    "(",
    "{x}",
    "-x",
    "+",
    "\0a",
    "\ud800",
    "a*",
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.text(min_size=1, max_size=30), st.lists(st.sampled_from(NASTY), min_size=1).map(" ".join)))
def test_nothing_typed_becomes_syntax(still: Run, q: str) -> None:
    try:
        answer = still.search.search(q)
    except ValueError as error:
        assert str(error).startswith("q: got")
        return
    for row in answer["rows"]:
        # Of every phrase that was asked for, the words are there.
        text = SAID[row["uid"]] if row["field"] == "response" else f"Question {row['uid'].split('/')[1]}: what now?"
        for phrase in split_phrases(q) if answer["mode"] == "phrase" else []:
            for word in searching._WORD.findall(phrase):
                assert word.casefold() in text.casefold()


def test_what_changes_is_found_anew_and_what_is_deleted_no_more(run: Run) -> None:
    assert run.uids("let me left") == []
    assert run.uids('"let me" left') == ["3/1/0/0/s"]
    run.book.append([sample("4/1/0/0/s", response_text="let me go, I am left here")])
    run.book.delete(["3/1/0/0/s"], author="ana")
    redact_records(run.book, ["1/1/1/0/s"], ["response_text"], author="ana")
    load(run.source, run.index)
    deadline = time.monotonic() + 30
    while not run.search.complete() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run.uids('"let me" left') == ["4/1/0/0/s"]
    assert run.uids("let me verify") == ["1/1/0/0/s"]
    assert run.uids("let me", "substring") == ["4/1/0/0/s", "1/1/0/0/s"]
    assert run.index.query("SELECT COUNT(*) FROM bodies") == [(4,)]


def test_texts_are_kept_packed_once_a_prompt_and_only_when_somebody_searches(tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book:
        text = " ".join(f"word{i}" for i in range(2000))
        rows = [sample(f"1/1/{run}/0/s", prompt_text=text, response_text=f"{run} {text}") for run in range(16)]
        book.append(rows)
        source, index = BookSource(book), Index()
        load(source, index)
        assert index.query("SELECT COUNT(*) FROM bodies") == [(0,)]
        searcher = Search(source, index)
        while searcher.fill():
            pass
        ((letters,),) = index.query("SELECT SUM(LENGTH(body)) FROM bodies")
        ((prompt_letters,),) = index.query("SELECT SUM(LENGTH(body)) FROM prompt_bodies")
        assert letters + prompt_letters < 0.5 * 17 * len(text)
        assert index.query("SELECT COUNT(*) FROM prompt_bodies") == [(1,)]
        searcher.close()
        index.close()


def test_other_sources_give_their_texts_as_documents(tmp_path: Path) -> None:
    import numpy as np

    class Files:
        name, kind, live = "files", "verl", False

        def trajectories(self, uids: list[str]) -> list[Trajectory]:
            text = "what now? it ends"
            ends = np.array([9, 17])
            return [
                Trajectory(uid=uid, gid="g", step=1, text=text, ends=ends, prompt_tokens=1, prompt="p") for uid in uids
            ]

    files: Any = Files()
    with Index() as index:
        index.add(files.trajectories(["a", "b"]))
        searcher = Search(files, index)
        answer = searcher.search("it ends")
        assert [(row["uid"], row["field"]) for row in answer["rows"]] == [("a", "response"), ("b", "response")]
        assert [row["uid"] for row in searcher.search("what now")["rows"]] == ["a"]
        searcher.close()


def test_without_full_text_search_phrases_are_still_found(run: Run) -> None:
    run.index.full_text = False
    assert run.uids("let me verify") == ["1/1/0/0/s", "1/1/1/0/s"]
    assert run.uids("verif") == []
    assert run.uids('"let me" left') == ["3/1/0/0/s"]
