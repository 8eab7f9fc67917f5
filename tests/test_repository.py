"""The scripts of the repository: the description of the package, the check of names."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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
