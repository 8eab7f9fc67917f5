"""Every `rollbook ...` command that is printed to be typed is run: on the pages, in the examples and in `--help`.

The run of `make demo` is replaced by a small one of the same recipe, with the same steps and checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.cli.parser import COMMANDS, build_parser, main
from rollbook.inspect.server import Server
from rollbook.train.builders import load_prompts
from rollbook.train.config import load_config
from rollbook.train.run import run
from tests.test_docs import DOCS, files_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
EXAMPLES = [path for suffix in ("py", "yaml") for path in (ROOT / "examples").rglob(f"*.{suffix}")]
SMALL = (
    *(
        "warmup.steps=0",
        "warmup.target_accuracy=null",
        "data.options.count=260",
        "data.held_out=4",
        "batch.prompts_per_step=2",
    ),
    *("algorithm.group_size=2", "model.options.hidden=32", "model.options.heads=1", "tracking.display=false"),
)
PLACEHOLDERS = {"RUN": "runs/letters", "RUN/config.yaml": "runs/letters/config.yaml", "CONFIG": "letters", "N": "42"}
"""What a synopsis leaves open, such as `rollbook replay RUN --step N`; everything else is run as it stands."""
FINDS = ("doctor", "check")
"""Commands whose status 1 is a finding, not a failure."""
OTHERS = {
    "--peers",
    "--logprobs-mode",
    "--enable-lora",
    "--enable-auto-tool-choice",
    "--enable-scale-out",
    "--enable-sleep-mode",
    "--node-rank",
    "--master-addr",
}
"""Options of other programs."""
ID = re.compile(r"\b(\d+)/(\d+)(?:/(\d+))?(?![\w/.])")
"""Step, task and run: those of the demo on the pages, some of the same step in the stand-in."""


def spans(text: str) -> list[str]:
    """The inline code of a page."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def commands(path: Path) -> list[str]:
    """The commands in a file: lines of its blocks, or of an example's docstring, and code that is more than a name."""
    text = path.read_text()
    blocks = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    if path in EXAMPLES:
        blocks = re.findall(r"^(?:#   |    )(rollbook .*)$", text, flags=re.MULTILINE)
    pieces = [
        piece.removeprefix("$ ").removeprefix(".venv/bin/")
        for line in "\n".join(blocks).splitlines()
        for piece in re.split(r"\s{2,}|\s#\s", line.strip())
    ]
    names = {f"rollbook {name}" for name in COMMANDS}
    return [line for line in (*pieces, *(set(spans(text)) - names)) if line.startswith("rollbook ")]


PRINTED = {path: printed for path in sorted([*PAGES, *EXAMPLES]) if (printed := commands(path))}


def helps() -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in build_parser()._actions if action.dest == "command")
    assert isinstance(action.choices, dict)
    return action.choices


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader's after `make demo`."""
    folder = tmp_path_factory.mktemp("place")
    run(load_config("letters", [*SMALL, f"out={folder / 'runs' / 'letters'}"]), stream=io.StringIO())
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture(scope="module")
def tasks(place: Path) -> dict[str, str]:
    """A task of each step of the stand-in."""
    output, query = io.StringIO(), "select batch, min(task) as task from training group by 1"
    with contextlib.redirect_stdout(output):
        assert main(["sql", f"{place}/runs/letters", "--json", query]) == 0
    return {row["batch"]: row["task"] for row in json.loads(output.getvalue())}


def made_runs(page: Path) -> Iterator[str]:
    """The runs that the commands of a page make."""
    yield from re.findall(r"--out (runs/[\w-]+)", page.read_text())
    for line in PRINTED[page]:
        if recipe := re.match(r"rollbook train ([a-z-]+)(?= |$)", line):
            yield f"runs/{recipe[1]}"


def stand_in(match: re.Match[str], tasks: dict[str, str]) -> str:
    """An id of the stand-in, whose groups have two runs."""
    step, _, number = match.groups()
    return f"{step}/{tasks[step]}" if number is None else f"{step}/{tasks[step]}/{int(number) % 2}"


@pytest.fixture(scope="module")
def seen() -> set[tuple[str, ...]]:
    """The commands that were run, some of which are on several pages."""
    return set()


@pytest.mark.parametrize("page", PRINTED, ids=lambda page: str(page.relative_to(ROOT)))
def test_printed_commands(
    page: Path,
    place: Path,
    tasks: dict[str, str],
    seen: set[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    for name, text in files_of(page).items():
        Path(name).write_text(text)
    run_folders = re.compile(f"(?:{'|'.join(sorted(made_runs(page), reverse=True)) or 'runs/letters'})(?=/|$)")
    for line in PRINTED[page]:
        words = [PLACEHOLDERS.get(word, run_folders.sub("runs/letters", word)) for word in shlex.split(line)[1:]]
        words = [ID.sub(lambda match: stand_in(match, tasks), word) for word in words]
        if tuple(words) in seen:
            continue
        seen.add(tuple(words))
        words, file = (words[:-2], words[-1]) if ">" in words else (words, None)
        if words[0] == "view":
            options = build_parser().parse_args(words)
            with Server(options.path, tokenizer=options.tokenizer, annotate=options.annotate) as server:
                assert urllib.request.urlopen(server.url).status == 200
            continue
        if words[0] == "rollout":
            build_parser().parse_args(words)  # it would wait for a trainer
            continue
        if words[0] == "train" and "--recipes" not in words:
            words.append("--show-config")
        try:
            status = main(words)
        except SystemExit as error:
            pytest.fail(f"{line}: status {error.code}: {capsys.readouterr().err}")
        output, errors = capsys.readouterr()
        assert status == 0 or (status == 1 and words[0] in FINDS), f"{line}: {errors}"
        assert output and not re.search(r"error|Traceback", errors, re.IGNORECASE), f"{line}: {errors}"
        if file is not None:
            Path(file).write_text(output)


def test_ids_are_those_of_the_demo() -> None:
    texts = [line for printed in PRINTED.values() for line in printed] + [
        parser.format_help() for parser in helps().values()
    ]
    printed = {match.group(1, 2) for text in texts for match in ID.finditer(text)}
    assert printed
    config = load_config("letters")
    prompts, _ = load_prompts(config)
    for step in range(1, 1 + config.steps):
        numbers = {str(prompt.eid.task) for prompt in prompts.take(config.batch.prompts_per_step, step) if prompt.eid}
        assert {task for batch, task in printed if batch == str(step)} <= numbers
        printed = {(batch, task) for batch, task in printed if batch != str(step)}
    assert not printed, "steps that the demo does not have"


def test_printed_options_exist() -> None:
    options_of_commands = {
        option for parser in helps().values() for action in parser._actions for option in action.option_strings
    }
    for page in PAGES:
        options = {span.split()[0] for span in spans(page.read_text()) if span.startswith("--")}
        assert options <= options_of_commands | OTHERS, page.name
