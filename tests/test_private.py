"""What is written is its owner's alone: runs, books, exports and saved trajectories, whatever the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollbook
from rollbook.book import export_records, snapshot
from rollbook.book.recovery import repair
from rollbook.cli.parser import main
from rollbook.compat.lightrft.saver import TrajectorySaver
from rollbook.inspect.api import Annotations
from rollbook.train.config import load_config
from rollbook.train.run import Run
from rollbook.train.tracker import JsonlTracker
from tests.book.records import records
from tests.saver import making


@pytest.fixture(autouse=True)
def _open_to_all() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def shared(folder: Path) -> dict[str, str]:
    """Everything in a folder, itself included, that another user could reach, with its mode."""
    modes = {path: path.lstat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    return {str(path): oct(mode) for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)}


def test_a_runs_folder_is_its_owners(tmp_path: Path) -> None:
    existing = tmp_path / "there"
    existing.mkdir(0o750)
    for folder in (tmp_path / "runs" / "one", existing):
        assert Run(load_config("letters", [f"out={folder}"])).prepare() is False
        JsonlTracker(folder / "metrics.jsonl").close()
        assert set(os.listdir(folder)) == {"config.yaml", "metrics.jsonl", ".lock"}
    assert shared(tmp_path / "runs") == {}
    assert shared(existing) == {str(existing): "0o750"}, "a folder that exists keeps its mode"


def test_a_book_and_what_is_made_of_it_are_their_owners(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "book"
    with rollbook.open(folder) as book:
        book.append(records(3))
        snapshot(book, folder.with_name("copy")).close()
        for ending in ("parquet", "jsonl", "frames", "trxp", "hf"):
            export_records(book, folder.with_name(f"out.{ending}"))
        saver = TrajectorySaver(folder.with_name("saved"), making.TOKENIZER)
        assert saver.save_trajectories([making.record("2 + 3 =", "5")], 1)[0] is not None
        assert shared(folder.parent) == {}  # the ledger's log lies beside it while the book is open
    assert main(["export", str(folder), str(folder.with_name("out.html")), "--where", "length > 0"]) == 0
    Annotations(folder).set("a", star=True)
    (folder / "ledger.sqlite").write_bytes(b"x" * 5000)
    assert repair(folder, offer=True).ok
    assert shared(folder.parent) == {}
