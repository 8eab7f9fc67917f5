"""What notebooks and the interactive prompt show: short, escaped, and without reading more than the first rows."""

from __future__ import annotations

import pickle
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import rollbook
from rollbook import Experience, Experiences
from rollbook.core.experiences import HTML_ROWS

HOSTILE = "<script>alert(1)</script>\"'&"


class Cells(HTMLParser):
    """The texts and tags of a table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def records(count: int) -> Experiences:
    rows = [
        Experience(
            eid={"batch": 1, "task": i // 4, "run": i % 4, "suffix": "a"},
            tokens=[1, 2, 3],
            reward=i % 2,
            prompt_text=HOSTILE,
            response_text="long " * 100,
            info={HOSTILE: 1},
        )
        for i in range(count)
    ]
    return Experiences(rows)


def test_tables_are_short_and_escaped(tmp_path: Path) -> None:
    experiences = records(HTML_ROWS + 4)
    with rollbook.open(tmp_path / "book") as book:
        book.append(experiences)
        shown = {
            "Experiences": experiences,
            "Experience": experiences[0],
            "groups": experiences.group_by("task"),
            "Book": book,
        }
        tables = {name: Cells(value._repr_html_()) for name, value in shown.items()}
    for name, table in tables.items():
        assert table.tags == {"table", "caption", "thead", "tbody", "tr", "th", "td"}, name
        assert max(map(len, table.texts)) <= 200
    assert (
        HOSTILE in tables["Experiences"].texts and f"24 records, the first {HTML_ROWS}" in tables["Experiences"].texts
    )
    assert {"reward", "0"} <= set(tables["Experience"].texts)
    assert {"1/0", "0.5", HOSTILE} <= set(tables["groups"].texts)
    assert {"train", "24"} <= set(tables["Book"].texts)


def test_a_book_shows_counts_and_pickles_by_reopening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    book = rollbook.open("book", quota=10**9)
    book.append(records(4))
    assert repr(book) == "Book('book': 4 records, 4 waiting, 0 leased, 0 trained)"
    script = "import pickle, sys; book = pickle.load(sys.stdin.buffer); print(len(book.lease(8)), book.quota)"
    monkeypatch.chdir("/")
    child = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(book), capture_output=True, check=True)
    assert child.stdout.split() == [b"4", b"1000000000"]
    with rollbook.open(tmp_path / "book", "r") as reader:
        assert pickle.loads(pickle.dumps(reader)).read_only
    book.close()
    assert repr(book) == "Book('book')"
    with pytest.raises(TypeError, match="a book in memory cannot be pickled"):
        pickle.dumps(rollbook.open("memory:"))


def test_a_runs_folder_opens_its_book(tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "run" / "book") as book:
        book.append(records(4))
    with rollbook.open(tmp_path / "run") as book:
        assert len(book) == 4 and book.url.endswith("run/book")
    assert not (tmp_path / "run" / "ledger.sqlite").exists()


def test_a_lease_that_is_left_without_ack_warns() -> None:
    with rollbook.open("memory:") as book:
        book.append(records(4))
        with pytest.warns(UserWarning, match=r"4 leased records were not acknowledged and go back: call lease\.ack"):
            with book.lease(4):
                pass
        assert book.counts().waiting == 4
