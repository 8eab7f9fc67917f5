"""The scripts of the repository, and limits on the code: modules, public names of the book, private names."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

import rollbook
from rollbook.book import Book
from rollbook.core.errors import WireError
from rollbook.core.fields import FIELDS
from rollbook.core.wire import decode, encode

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rollbook"


@pytest.mark.parametrize(
    ("repository", "expected"),
    [
        (None, "See Training.  [web](https://a.example)"),
        (
            "https://b.example/r",
            "See [Training](https://b.example/r/blob/main/docs/training.md). "
            "![run](https://b.example/r/raw/main/docs/run.png) [web](https://a.example)",
        ),
    ],
)
def test_description_has_no_relative_links(repository: str | None, expected: str) -> None:
    make_description = runpy.run_path(str(ROOT / "setup.py"))["make_description"]
    text = "See [Training](docs/training.md). ![run](docs/run.png) [web](https://a.example)"
    assert make_description(text, repository) == expected
    assert "](docs/" not in make_description((ROOT / "README.md").read_text(), repository)


@pytest.mark.parametrize(
    ("code", "title"),
    [
        ("found = 1\n", "banned names"),
        ("class Reader:\n    def __init__(self): self.found = 1\n", "banned names"),
        ("def odd(number): ...\n", "banned names"),
        ("def read(value): ...\n", "vague names"),
        ("from typing import Any\n" + "def read(source: Any): ...\n" * 251, "parameters typed Any or object"),
    ],
)
def test_check_names_reports_what_exceeds_a_limit(
    code: str, title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(ROOT / "tools" / "check_names.py"))
    (tmp_path / "module.py").write_text(code)
    assert script["main"]([str(tmp_path)]) == 1
    failed = [line for line in capsys.readouterr().out.split("\n  ")[0].splitlines() if line][-1]
    assert failed.startswith(title)


def test_check_names_limits_gerund_modules(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "tools" / "check_names.py"))
    for number in range(11):
        (tmp_path / f"m{number}ing.py").write_text("")
    assert script["main"]([str(tmp_path)]) == 1
    (tmp_path / "m0ing.py").unlink()
    assert script["main"]([str(tmp_path)]) == 0


def test_the_number_of_modules_is_limited() -> None:
    assert len(list(PACKAGE.rglob("*.py"))) <= 210


def test_a_book_has_few_public_names() -> None:
    methods = [name for name in vars(Book) if not name.startswith("_")]
    assert len(methods) <= 25
    with rollbook.open("memory:") as book:
        attributes = {name for name in vars(book) if not name.startswith("_")}
    assert attributes == {"url", "ledger", "store", "read_only", "tokenizer", "quota", "closed", "state"}


def test_a_type_checker_rejects_unknown_fields_of_a_record() -> None:
    """As `Experience(rewrd=1.0)`: `__init__` names every field and takes no others."""
    (record,) = [
        node
        for node in ast.parse((PACKAGE / "core" / "experience.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Experience"
    ]
    (typed,) = [node for node in record.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    (init,) = [node for node in typed.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    assert init.args.kwarg is None and not init.decorator_list
    assert {argument.arg for argument in init.args.kwonlyargs} == {*FIELDS}
    with pytest.raises(TypeError, match="rewrd"):
        rollbook.Experience(tokens=[1, 2], rewrd=1.0)


def test_frames_of_version_1_are_refused_by_name() -> None:
    frame = bytearray(encode(rollbook.Experiences([rollbook.Experience(tokens=[1, 2])])))
    frame[8:10] = (1).to_bytes(2, "little")
    with pytest.raises(WireError, match="format version 1, written before `policy_logprobs` became `old_logprobs`"):
        decode(frame)
