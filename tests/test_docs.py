"""The README and the pages: their code runs, their links lead somewhere, their commands exist."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rollbook
from benchmarks import peers
from rollbook.core import fields
from rollbook.io.parquet import read_parquet

ROOT = Path(__file__).parents[1]
DOCS = [page for page in (ROOT / "docs").rglob("*.md") if "project" not in page.parts]  # where a build puts copies
PAGES = sorted([*ROOT.glob("*.md"), *DOCS, *(ROOT / "benchmarks").glob("*.md")])


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_readme_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(ROOT / "README.md")
    scope: dict[str, Any] = {}
    exec(code, scope)
    trainer = scope["trainer"]
    rewards = dict(trainer.book.metrics())
    assert rewards[1]["reward"] < 0.6 and rewards[12]["reward"] > 0.9
    assert trainer.global_step == 12 and trainer.book.counts().trained == 12 * 64 * 8
    trainer.book.close()
    exec(code.replace("run(12,", "run(13,"), scope)  # a second run continues
    trainer = scope["trainer"]
    assert trainer.resumed_from == 12 and trainer.global_step == 13
    assert dict(trainer.book.metrics())[13]["reward"] > 0.9
    trainer.book.close()


def test_experience_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    try:
        for code in blocks(ROOT / "docs" / "experience.md"):
            exec(code, scope)
    finally:
        fields.withdraw("surprise")
    assert scope["record"].experience_type == "multi_turn"


TESTED = [
    "README",
    "experience",
    "batches",
    "algorithms",
    "integrations",
    "rollouts",
    "multi_turn",
    "book",
    "inspecting",
    "doctor",
    "training",
    "get_started",
    "mix",
    "migration_lightrft",
    "migration_trinity",
]
"""Pages whose code a test of their own runs."""


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in TESTED and blocks(page)], ids=str)
def test_code_of_other_pages(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    scope: dict[str, Any] = {}
    for code in blocks(page):
        exec(code, scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        for command in re.findall(r"`make ([\w-]+)", page.read_text()) + re.findall(
            r"^make ([\w-]+)", page.read_text(), re.M
        ):
            assert command in targets, f"{page.name}: make {command}"


def test_configuration_keys_exist() -> None:
    """Keys such as `optimizer.lr` on the pages are keys of the configuration."""
    reference = (ROOT / "docs" / "configuration.md").read_text()
    sections = "|".join(re.findall(r"^## `(\w+)`", reference, flags=re.MULTILINE))
    for page in DOCS:
        for key in re.findall(rf"`((?:{sections})\.[a-z_]+)(?=[`=]|: (?!unknown key))", page.read_text()):
            assert f"| `{key}`" in reference, f"{page.name}: {key}"


def test_printed_scripts_exist() -> None:
    """The files and modules of `python FILE` and `python -m MODULE` on the pages have the options that are printed."""
    for page in PAGES:
        for script, arguments in re.findall(r"\bpython (-m [\w.]+|\w+/\S+\.py)([^`#\n]*)", page.read_text()):
            file = ROOT / script
            if script.startswith("-m "):
                spec = importlib.util.find_spec(script[3:])
                assert spec is not None and spec.origin is not None, f"{page.name}: python {script}"
                file = (
                    Path(spec.origin).with_name("__main__.py") if spec.submodule_search_locations else Path(spec.origin)
                )
            code = file.read_text()
            for option in re.findall(r"--[a-z-]+", arguments):
                assert f'"{option}"' in code, f"{page.name}: python {script} {option}"


def test_demo(tmp_path: Path) -> None:
    command = [sys.executable, "examples/parts.py", "--out", str(tmp_path / "out"), "--tasks", "2", "--runs", "3"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "every field is the same" in shown
    assert "6 records" in shown
    assert "Batch(6 records, packed" in shown
    assert "on 2 ranks" in shown
    assert len(read_parquet(tmp_path / "out" / "rollouts.parquet")) == 6
    with rollbook.open(tmp_path / "out" / "book", "r") as book:
        assert book.counts().trained == 6 and "admitted, leased, trained" in shown


def test_batches_page() -> None:
    scope: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / "batches.md"):
        exec(code, scope)
    assert len(scope["minibatch"]) == 2
    assert scope["micro_plan"].ranks == 2


def test_algorithms_page() -> None:
    from rollbook.algorithms import ESTIMATORS, KL, LOSSES

    page = ROOT / "docs" / "algorithms.md"
    scope: dict[str, Any] = {}
    try:
        for code in blocks(page):
            exec(code, scope)
    finally:
        ESTIMATORS.unregister("above_worst")
        LOSSES.unregister("hinge_pg")
    assert scope["stats"].logprobs.shape == (6,)
    text = page.read_text()
    for registry in (ESTIMATORS, KL, LOSSES):
        for name in registry.names():
            assert f"`{name}`" in text, f"docs/algorithms.md: {registry.kind} {name} is not named"


def test_integrations_page() -> None:
    peers.verl()
    scope: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / "integrations.md"):
        exec(code, scope)
    assert scope["again"].values("advantages")[0].tolist() == [1.0] * 3
    assert scope["back"].ids == scope["records"].eids()
    assert scope["state"]["epoch"] == 1


def test_migration_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("migration_trinity.md", "migration_lightrft.md"):
        scope: dict[str, Any] = {}
        for code in blocks(ROOT / "docs" / name):
            exec(code, scope)
    assert Path(scope["path"]).exists() and not scope["saver"].errors


def test_pictures_are_drawn_by_the_code() -> None:
    draw = runpy.run_path(str(ROOT / "docs" / "draw.py"))
    for name, picture in draw["documentation"]().items():
        assert (ROOT / "docs" / "pictures" / name).read_text() == picture, f"python docs/draw.py docs/pictures: {name}"


def test_rollouts_page() -> None:
    scope: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / "rollouts.md"):
        exec(code, scope)
    assert len(scope["batch"]) == 24 and scope["batch"].advantages.abs().max() > 0
    assert sum(scope["rewards"][-4:]) > sum(scope["rewards"][:4])  # GRPO learns
    assert scope["learned"].updates == 2
    assert len(scope["value_losses"]) == 6 and all(loss == loss for loss in scope["value_losses"])


def test_multi_turn_page() -> None:
    scope: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / "multi_turn.md"):
        exec(code, scope)
    assert scope["expression"] == "6 * 7" and scope["record"].reward == 1.0
    assert [row.reward for row in scope["rows"]] == [1.0, 0.0]
    assert len(scope["records"]) == 8
    assert scope["batch"].advantages.values.abs().max() > 0


def test_book_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / "book.md"):
        exec(code, scope)
    assert scope["rewound"].acks == 3 and scope["book"].counts().adds_up
    assert len(scope["twin"]) == len(scope["copy"]) == len(scope["book"])
    assert (tmp_path / "runs" / "first" / "ledger.sqlite").exists()
    for name in ("book", "twin", "copy"):
        scope[name].close()


def test_inspecting_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's code runs, and every command and every lens with a key is named on it."""
    from rollbook.cli.parser import COMMANDS
    from rollbook.inspect import filters
    from rollbook.inspect.trajectory import LENSES

    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "inspecting.md"
    scope: dict[str, Any] = {}
    for code in blocks(page):
        exec(code, scope)
    assert scope["page"].trajectories == 4 and scope["page"].redactions > 0
    text = page.read_text()
    for line in text.split("### Filters\n\n```\n")[1].split("```")[0].splitlines():
        assert filters.parse(line, ["accuracy", "format"]).sql
    assert all(name in text for name in COMMANDS)
    assert all(
        f"| `{lens.key}` | {lens.label.lower()} |" in text.replace("KL", "kl") for lens in LENSES.values() if lens.key
    )


def test_doctor_page() -> None:
    """The page's code runs and finds something, and its list is the code's own."""
    from rollbook.inspect.doctor import render_markdown

    text = (ROOT / "docs" / "doctor.md").read_text()
    assert text.endswith(render_markdown().strip() + "\n"), (
        "docs/doctor.md: the checks are not those of rollbook.inspect.doctor.render_markdown()"
    )
    scope: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / "doctor.md"):
        exec(code, scope)
    assert scope["diagnosis"].findings


def files_of(page: Path) -> dict[str, str]:
    """The blocks of a page that are files, by their names, which are their first lines."""
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", page.read_text(), flags=re.DOTALL)
    return {name: text for name, text in blocks if name.endswith((".py", ".yaml"))}


def test_training_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's files and code run, and the model learns; its table of presets and its metrics are the code's."""
    from rollbook.train.algorithm import presets

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    pages = [ROOT / "docs" / "get_started.md", ROOT / "docs" / "training.md"]
    text, files, threads = pages[1].read_text(), files_of(pages[0]), torch.get_num_threads()
    for name, inside in files.items():
        (tmp_path / name).write_text(inside)
    scope: dict[str, Any] = {}
    try:
        for code in [code for page in pages for code in blocks(page)]:
            if code.partition("\n")[0].removeprefix("# ") not in files:
                exec(code, scope)
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("largest", None)
    outcome = scope["outcome"]
    assert outcome.after.success > outcome.before.success + 0.1
    assert scope["after"].success > scope["before"].success
    assert len(scope["records"]) == 8 and scope["custom"].needs_reference
    for name in presets():
        assert f"`{name}`" in text, name
    metrics = set(outcome.reports[-1]) | {"excluded/no_trainable_token", "excluded/no_reward", "peak_memory_gib"}
    cells = text.split("## Metrics")[1].split("|---|---|\n")[1].split("\n\n")[0].splitlines()
    named = {name for line in cells for name in re.findall(r"`([a-z_/]+)`", line.split(" | ")[0])}
    assert {name for name in named if not name.startswith(("critic/", "episode/"))} <= metrics


def test_recipe_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every recipe has a page; what the pages tell to write into files is a configuration."""
    from rollbook.train.config import list_recipes, load_config

    pages = {path.stem: path for path in (ROOT / "docs" / "recipes").glob("*.md")}
    for name in list_recipes():
        assert re.search(rf"^rollbook train {name}\b", pages[name.rpartition("-")[2]].read_text(), re.M), name
    monkeypatch.chdir(ROOT)
    for page in [*pages.values(), ROOT / "docs" / "get_started.md"]:
        text = page.read_text()
        for number, inside in enumerate(re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)):
            file = tmp_path / f"{page.stem}-{number}.yaml"
            file.write_text(inside)
            assert load_config(file).seed == 0
    monkeypatch.chdir(tmp_path)
    for page in pages.values():
        for code in blocks(page):
            exec(code, {})
    with rollbook.open(tmp_path / "expert", "r") as book:
        assert len(book) == 2
