"""The commands that look at a run: `show`, `diff`, `doctor`, `view`, `ls --where`, `export … .html`, `completion`."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook.book import read as reading
from rollbook.cli import main
from rollbook.cli.parser import COMMANDS
from rollbook.core import metrics, terminal
from rollbook.inspect import sources
from rollbook.inspect.sources import BatchMeasurer, Follower
from tests.viewer import story

ESCAPE = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A short run."""
    return story.make(tmp_path_factory.mktemp("story") / "run", steps=8, groups=3, runs=4)


@pytest.fixture(autouse=True)
def _plain() -> Any:
    """What one test says of colours is not what the next one gets."""
    yield
    terminal.set_color_mode("auto")


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that goes well prints."""
    assert main(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that is refused says."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err


def on_a_terminal(*arguments: str, **more: str) -> str:
    """What a command writes to a real terminal."""
    primary, secondary = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", **more}
    environment.pop("NO_COLOR", None) if "NO_COLOR" not in more else None
    child = subprocess.Popen(
        # No terminal for what is said beside, such as a bar when the machine is slow.
        [sys.executable, "-m", "rollbook", *arguments],
        stdout=secondary,
        stderr=subprocess.PIPE,
        env=environment,
    )
    os.close(secondary)
    shown = b""
    while True:
        if not select.select([primary], [], [], 120)[0]:
            child.kill()
            raise AssertionError("the command did not end")
        try:
            piece = os.read(primary, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(primary)
    assert child.wait(60) == 0, child.communicate()[1].decode()
    return shown.decode()


# --- show -----------------------------------------------------------------------------------------------------------


def test_show_a_run_a_step_and_a_group(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    screen = output(capsys, "show", run)
    assert "reward" in screen and screen.count("\n") > 10
    shown = json.loads(output(capsys, "show", run, "--json"))
    assert [entry["step"] for entry in shown["steps"]] == list(range(8))
    groups = json.loads(output(capsys, "show", run, "--step", "3", "--json"))["groups"]
    assert len(groups) == 3 and all(len(entry["rewards"]) == 4 for entry in groups)
    table = output(capsys, "show", run, "--step", "3")
    assert all(entry["gid"] in table for entry in groups)
    gid = groups[0]["gid"]
    rows = json.loads(output(capsys, "show", run, gid, "--json"))["rows"]
    assert sorted(row["uid"] for row in rows) == sorted(groups[0]["uids"])
    assert all(row["uid"] in output(capsys, "show", run, gid) for row in rows)


def test_show_a_trajectory(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    with rollbook.open(run, "r") as book:
        record = next(iter(book.where(batch="3", task="10", run=1)))
    uid, text = record.eid.uid, story.tokenizer().decode(record.tokens.tolist(), skip_special_tokens=False)
    shown = output(capsys, "show", run, uid)
    assert shown == output(capsys, "show", run, "3/10/1")  # its beginning
    body = "".join(shown.split()).replace("·", "")
    for piece in text.split():
        assert "".join(piece.split()) in body
    assert "system" in shown and "not trained on" in shown and "tool" in shown
    raw = output(capsys, "show", run, uid, "--raw", "--lens", "off")
    assert raw.rstrip("\n").endswith(text.rstrip("\n"))
    document = json.loads(output(capsys, "show", run, uid, "--json"))
    assert document["tokens"] == record.tokens.tolist() and document["reward"] == record.reward


def test_one_record_or_one_step_is_read_alone(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    frames: set[Any] = set()
    rows, runs = BatchMeasurer.rows, reading.read_runs

    def count_rows(self: BatchMeasurer, columns: Any, count: int) -> Any:
        measured.append(count)
        return rows(self, columns, count)

    def count_frames(book: Any, places: Any) -> Any:
        frames.update(places)
        return runs(book, places)

    monkeypatch.setattr(BatchMeasurer, "rows", count_rows)
    monkeypatch.setattr(reading, "read_runs", count_frames)

    def read(*arguments: str) -> tuple[int, int]:
        measured.clear()
        frames.clear()
        output(capsys, *arguments)
        return sum(measured), len(frames)

    assert read("show", run) >= (96, 8), "eight steps of three groups of four, a frame each"
    out = str(tmp_path / "page.html")
    for expected, command in (
        ((4, 1), ["show", run, "3/10/1"]),
        ((4, 1), ["show", run, "3/10"]),
        ((12, 1), ["show", run, "--step", "3"]),
        ((4, 1), ["export", run, out, "--id", "3/10/1"]),
        ((8, 2), ["diff", run, "--words", "3/10/1", "4/12/0"]),
        ((24, 2), ["diff", run, "--a", "2", "--b", "5"]),
    ):
        assert read(*command) == expected, command


class Shown(metrics.Progress):
    """A bar that is drawn without a terminal too, after some seconds."""

    def __init__(self, label: str, total: int, *, seconds: float, after: float) -> None:
        assert after == 1.0
        super().__init__(label, total, show=True, after=seconds)


def test_reading_for_long_shows_a_bar(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each look ends at once, as a long one does after half a second.
    monkeypatch.setattr(Follower.refresh, "__defaults__", (0.0,))
    for after, bars in ((1e-9, True), (60.0, False)):
        monkeypatch.setattr(sources, "Progress", functools.partial(Shown, seconds=after))
        assert main(["ls", run, "--where", "reward > 2"]) == 0
        printed = capsys.readouterr()
        assert ("reading [" in printed.err) is bars and "reading" not in printed.out


def test_tokens_are_listed_with_their_own_numbers(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    with rollbook.open(run, "r") as book:
        record = next(iter(book.where(batch="2", task="6", run=0)))
    at = record.prompt_length + 5
    table = output(capsys, "show", run, record.eid.uid, "--tokens", f"{at}:{at + 2}").splitlines()
    names, line = table[-3].split(), table[-2]
    text = re.search("'.*'", line)
    assert text is not None
    cells = [*line[: text.start()].split(), "", *line[text.end() :].split()]
    row = dict(zip(names, cells, strict=True))
    assert row["token"] == str(at) and row["id"] == str(record.tokens[at].item()) and row["trained"] == "yes"
    for name, field in (("entropy", record.entropy), ("logprob", record.logprobs), ("advantage", record.advantages)):
        assert float(row[name]) == pytest.approx(field[5].item(), rel=0.01), name
    assert "expected a span such as 100:120" in refused(capsys, "show", run, record.eid.uid, "--tokens", "a:b")


def test_colours_are_for_terminals(run: str) -> None:
    plain = on_a_terminal("show", run, "3/10/1", NO_COLOR="1").replace("\r\n", "\n")
    deep = on_a_terminal("show", run, "3/10/1", COLORTERM="truecolor").replace("\r\n", "\n")
    simple = on_a_terminal("show", run, "3/10/1", COLORTERM="").replace("\r\n", "\n")
    assert "\x1b" not in plain and "48;2;" in deep and "48;5;" in simple and "48;2;" not in simple
    without = [ESCAPE.sub("", text) for text in (deep, simple)]
    assert without[0] == without[1]
    body = plain.split("\n\n", 1)[1]
    assert without[0].endswith(body)  # The same text, whatever its colours.


def test_nothing_in_a_record_commands_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]52;c;ZXZpbA==\x07 \x1b[2J \u202egnp.exe\u202c \x9b31m \r\b"
    with rollbook.open(tmp_path / "run", tokenizer=story.tokenizer()) as book:
        ids = story.tokenizer().encode(evil).ids
        book.append(
            [
                rollbook.Experience(
                    eid=rollbook.EID(batch=0, task=evil, run=i, suffix=evil),
                    tokens=[*ids, *ids],
                    prompt_length=len(ids),
                    prompt_text=evil,
                    response_text=evil,
                    reward=float(i),
                    entropy=[0.5] * len(ids),
                    finish_reason=evil,
                    info={evil: evil, "reference": evil},
                    metrics={evil: 1.0},
                )
                for i in range(2)
            ]
        )
        uid = next(iter(book)).eid.uid
    path = str(tmp_path / "run")
    for arguments in (
        ["show", path],
        ["show", path, "--step", "0"],
        ["show", path, uid],
        ["show", path, uid, "--raw"],
        ["show", path, uid, "--tokens", ":"],
        ["show", path, uid.rsplit("/", 3)[0]],
        ["ls", path, "--where", "reward >= 0"],
        ["diff", path, path],
        ["diff", path, "--words", uid, uid],
        ["doctor", path],
        ["show", path, evil],
    ):
        main(arguments)
        printed = capsys.readouterr()
        bad = {
            character for character in printed.out + printed.err if not character.isprintable() and character != "\n"
        }
        assert not bad, (arguments[:1], bad)
        main([*arguments, "--color", "always"])
        printed = capsys.readouterr()
        bad = {
            character
            for character in ESCAPE.sub("", printed.out + printed.err)
            if not character.isprintable() and character != "\n"
        }
        assert not bad, (arguments[:1], bad)


def test_what_is_not_there_is_said(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a trajectory or group" in refused(capsys, "show", run, "99/1")
    assert "ambiguous: 9 or more begin with it" in refused(capsys, "show", run, "3")
    assert "no records of step 99" in refused(capsys, "show", run, "--step", "99")
    assert "no records of step 99" in refused(capsys, "show", run, "--step", "99", "--json")
    assert "entropy" in refused(capsys, "show", run, "3/10/1", "--lens", "entropi")
    assert "expected one of them" in refused(capsys, "show", run, "3/10/1", "--step", "1")
    assert "truncated" in refused(capsys, "ls", run, "--where", "truncate and reward > 1")


def test_ls_where(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(output(capsys, "ls", run, "--where", "reward > 0.5 and step >= 2", "--sort", "-reward", "--json"))
    rewards = [row["reward"] for row in rows]
    assert rows and min(rewards) > 0.5 and rewards == sorted(rewards, reverse=True)
    with rollbook.open(run, "r") as book:
        expected = [
            row for row in book.where(("reward", ">", 0.5), evaluation=0) if row.eid.batch >= 2
        ]  # evaluation records are listed by `evaluation`
    listed = [row for row in rows if not row["evaluation"]]
    assert len(listed) == min(50, len(expected))
    assert "--limit N shows more" in output(capsys, "ls", run, "--where", "reward >= -9", "--limit", "2")


def test_ls_lists_samples_by_order_or_number_too(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(output(capsys, "ls", run, "--sort", "-reward", "--limit", "3", "--json"))
    every = json.loads(output(capsys, "ls", run, "--limit", "500", "--json"))
    rewards = sorted((row["reward"] for row in every), reverse=True)
    assert [row["reward"] for row in rows] == rewards[:3] and len(every) > 50


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that a command meets on its first day: nothing, evaluation alone, pairs, and another tool's files."""
    folder = tmp_path_factory.mktemp("odd")
    rollbook.open(folder / "empty").close()
    with rollbook.open(folder / "eval") as book:
        records = [rollbook.Experience(eid=rollbook.EID(s, 0, i), tokens=[1, 2, 3], reward=1.0 * i)
                for s in range(2) for i in range(2)]  # fmt: skip
        book.append(records, evaluation=True)
    with rollbook.open(folder / "pairs") as book:
        book.append([rollbook.Experience(eid=rollbook.EID(0, 0), tokens=[1, 2], chosen=[3], rejected=[4, 5])])
    (folder / "verl").mkdir()
    rows = [{"input": f"Q{i // 2}", "output": "so", "gts": "5", "score": 1.0, "step": 1} for i in range(4)]
    (folder / "verl" / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "other").mkdir()
    (folder / "other" / "notes.txt").write_text("no rollouts")
    return folder


def test_ls_of_rollouts_and_of_anything_else(odd_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (odd_folder / "verl", odd_folder / "verl" / "1.jsonl"):
        listing = json.loads(output(capsys, "ls", str(path), "--json"))
        assert listing == {"kind": "verl", "records": 4, "evaluation": 0, "groups": 2, "steps": [1, 1]}
        assert "records        4" in output(capsys, "ls", str(path))
    assert output(capsys, "ls", str(odd_folder / "other")) == "no runs or books here\n"
    assert "no rollouts" in refused(capsys, "ls", str(odd_folder / "other" / "notes.txt"))
    assert "no such file or folder" in refused(capsys, "ls", str(odd_folder / "none"))


def test_runs_without_records_for_training(odd_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, held_out = str(odd_folder / "empty"), str(odd_folder / "eval")
    assert "no records yet" in output(capsys, "show", empty)
    screen = output(capsys, "show", held_out)
    assert "evaluation only" in screen and len(json.loads(output(capsys, "show", held_out, "--json"))["steps"]) == 2
    assert "1/0" in output(capsys, "show", held_out, "--step", "1")
    assert "eval has no training records" in refused(capsys, "diff", held_out, held_out)
    assert "use --evaluation" in output(capsys, "doctor", held_out)
    assert "--evaluation checks" not in output(capsys, "doctor", held_out, "--evaluation")
    assert "no records in steps 7" in refused(capsys, "doctor", held_out, "--steps", "7")


def test_a_pair_is_shown(odd_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "3 (2 of the prompt" in output(capsys, "show", str(odd_folder / "pairs"), "0/0/0")


def test_an_error_names_the_command_once(run: str, odd_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for message in (
        refused(capsys, "diff", str(odd_folder / "empty")),
        refused(capsys, "show", run, "3/10/1", "--step", "1"),
        refused(capsys, "check", run, "--repair", "--quick"),
    ):
        command = message.split()[1]
        assert message.count(command) == 1, message


def test_a_narrow_terminal_breaks_no_word(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = [
        ["show", run],
        ["show", run, "--step", "3"],
        ["show", run, "3/10"],
        ["show", run, "3/10/1"],
        ["ls", run],
        ["ls", run, "--where", "step = 3"],
        ["diff", run, "--texts", "0"],
        ["doctor", run, "--fail-on", "never"],
        ["sql", run, "select uid, prompt_text, reward from experiences limit 9"],
        ["doctor", run, "--thresholds"],
    ]
    wide = [output(capsys, *command) for command in commands]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    narrow = [output(capsys, *command) for command in commands]
    for command, wide_text, text in zip(commands, wide, narrow, strict=True):
        assert max(map(terminal.width, text.splitlines())) <= 80, command
        words = set(wide_text.split())
        for word in text.split():
            # Long words without a space are cut, and ids go without their last part where they take the room.
            is_known = word.strip("…") in words or any(entry.startswith(f"{word}/") for entry in words)
            assert is_known or word in ("not", "shown:") or len(word) >= 14, (command, word)
    samples = [[line for line in text.splitlines() if line.startswith("3/10/")] for text in (wide[2], narrow[2])]
    assert len(samples[0]) == 4
    for wide_line, narrow_line in zip(*samples, strict=True):
        assert narrow_line.split()[0] == wide_line.split()[0] and narrow_line.split()[-1] == wide_line.split()[-1], (
            "ends with, to its end"
        )
    assert "· turn 1 ·" in narrow[3] and "turn 0" not in narrow[3]


def test_options_of_one_trajectory_need_one(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    for selection in ([], ["3/10"], ["--step", "3"]):
        for option in (["--raw"], ["--tokens", "1:2"], ["--lens", "kl"]):
            assert f"{option[0]}: only for one trajectory" in refused(capsys, "show", run, *selection, *option)
    last = output(capsys, "show", run, "3/10/1", "--tokens", "-1:").splitlines()[-1]
    assert "<|im_end|>" in last


def test_history_takes_a_beginning(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    history = output(capsys, "history", run, "3/10/1/0/s")
    assert history == output(capsys, "history", run, "3/10/1")
    assert "admitted" in history and "or more begin with" in refused(capsys, "history", run, "3/")


# --- diff, doctor ---------------------------------------------------------------------------------------------------


def test_diff_of_two_spans_and_of_two_runs(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    difference = json.loads(output(capsys, "diff", run, "--a", "0-1", "--b", "6-7", "--json"))
    assert difference["a"]["steps"] == [0, 1] and difference["b"]["steps"] == [6, 7] and difference["a"]["n"] == 24
    assert difference["metrics"]["entropy"]["shift"] < 0  # The story's entropy falls.
    screen = output(capsys, "diff", run)
    assert "entropy" in screen and "more solved" in screen and "groups with all solved" in screen
    assert 0 < screen.index("mean, 95%") < screen.index("±") < screen.index("median A")
    other = story.make(tmp_path / "other", steps=3, groups=3, runs=4, seed=5)
    both = json.loads(output(capsys, "diff", run, other, "--json"))
    assert both["a"]["n"] == 96 and both["b"]["n"] == 36 and both["prompts"]["common"] > 0
    assert "no training records in the steps of --b" in refused(capsys, "diff", run, "--b", "77")
    assert "expected a step such as 7" in refused(capsys, "diff", run, "--a", "early")


def test_diff_of_words(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes = json.loads(output(capsys, "diff", run, "--words", "3/10/0", "3/10/1", "--json"))["changes"]
    with rollbook.open(run, "r") as book:
        for side, number in (("a", 0), ("b", 1)):
            record = next(iter(book.where(batch="3", task="10", run=number)))
            ids = record.tokens.tolist()[record.prompt_length :]
            text = story.tokenizer().decode(ids, skip_special_tokens=False)
            assert "".join(change[side] for change in changes) == text
    assert any(change["kind"] == "equal" for change in changes) and any(change["kind"] != "equal" for change in changes)


def test_doctor(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", run]) in (0, 1)
    assert "records" in capsys.readouterr().out
    names = [threshold["name"] for threshold in json.loads(output(capsys, "doctor", "--thresholds", "--json"))]
    assert len(names) > 10 and all(name in output(capsys, "doctor", run, "--thresholds") for name in names)
    with rollbook.open(tmp_path / "sick") as book:
        book.append(
            [
                rollbook.Experience(
                    eid=rollbook.EID(batch=step, task=task, run=i),
                    tokens=[1, 2, step, task, i],
                    reward=0.5,
                    group_size=8,
                )
                for step in range(6)
                for task in range(4)
                for i in range(8)
            ]
        )
    sick = str(tmp_path / "sick")
    assert main(["doctor", sick, "--json"]) == 1
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["findings"] and all(
        finding["uids"] and finding["recommendation"] for finding in diagnosis["findings"]
    )
    assert main(["doctor", sick, "--fail-on", "never"]) == 0
    capsys.readouterr()
    assert "did you mean" in refused(capsys, "doctor", run, "--set", f"{names[0][:-1]}=1")


# --- pages ----------------------------------------------------------------------------------------------------------


def test_export_of_a_page(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "group.html")
    printed = json.loads(output(capsys, "export", run, out, "--id", "3/10", "--json"))
    assert printed["trajectories"] == 4 and printed["size"] == os.path.getsize(out)
    assert b"Content-Security-Policy" in Path(out).read_bytes()
    assert "--overwrite replaces it" in refused(capsys, "export", run, out, "--id", "3/10")
    output(capsys, "export", run, out, "--where", "step = 2", "--overwrite", "--redact", "boxes", "--title", "a title")
    assert b"a title" in Path(out).read_bytes()
    assert "expected --id ID" in refused(capsys, "export", run, str(tmp_path / "x.html"))
    for option in (["--redact", "a"], ["--theme", "dark"], ["--max-mb", "1"]):
        printed = refused(capsys, "export", run, str(tmp_path / "x.jsonl"), *option)
        assert printed.startswith(f"rollbook export: {option[0]}: only for HTML pages")
    (tmp_path / "x.jsonl").touch()
    assert "--overwrite replaces it" in refused(capsys, "export", run, str(tmp_path / "x.jsonl"))
    for name in ("x.jsonl", "x.html"):
        far = str(tmp_path / "none" / name)
        assert f"no such folder: {tmp_path / 'none'}" in refused(
            capsys, "export", run, far, *(["--id", "3/10"] * far.endswith("html"))
        )
    assert os.stat(out).st_mode & 0o777 == 0o600


def test_view_serves_until_it_is_told_to_end(run: str) -> None:
    command = [sys.executable, "-m", "rollbook", "view", run, "--port", "0", "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        url = json.loads(child.stdout.readline())["url"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[\w-]{22,}", url)
        import urllib.request

        with urllib.request.urlopen(url.split("#")[0], timeout=30) as page:
            assert b"<!doctype html>" in page.read().lower()
        child.send_signal(signal.SIGINT)
        end = time.monotonic() + 30
        while child.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert child.poll() == 0
    finally:
        child.kill()
        child.communicate()


# --- completion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = output(capsys, "completion", shell)
    assert all(name in script for name in COMMANDS) and "fail-on" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    script = output(capsys, "completion", "bash")

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _rollbook; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.split()

    assert completed("rollbook", "do") == ["doctor"]
    assert "--fail-on" in completed("rollbook", "doctor", "--f")
    assert completed("rollbook", "doctor", "--fail-on", "hi") == ["high"]
    assert "zsh" in completed("rollbook", "completion", "z")
    assert "pyproject.toml" in completed("rollbook", "ls", "pyproj")


@pytest.mark.parametrize(
    ("arguments", "nearest"), [(["lss", "x"], "'ls'"), (["doctr", "x"], "'doctor'"), (["ls", "x", "--jsn"], "--json")]
)
def test_the_nearest_name_is_offered(arguments: list[str], nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and f"did you mean {nearest}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["completion", "tcsh"], "tcsh"),
        (["ls", "x", "--color", "red"], "red"),
        (["doctor", "x", "--fail-on", "all"], "all"),
        (["ls", "x", "--limit", "0"], "got '0', expected an integer >= 1"),
        (["show", "x", "--step", "-1"], "got '-1', expected an integer >= 0"),
        (["show", "x", "--step", "9" * 23], f"got '{'9' * 23}', expected an integer from 0 to {2**63 - 1}"),
        (["diff", "x", "--texts", "few"], "got 'few', expected an integer >= 0"),
        (["view", "x", "--port", "70000"], "got '70000', expected an integer from 0 to 65535"),
    ],
)
def test_a_value_that_is_none(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    message = capsys.readouterr().err
    assert ended.value.code == 2 and expected in message and "unknown command" not in message


def test_text_alone_cannot_be_imported_without_a_tokenizer(
    odd_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, "import", str(tmp_path / "new"), str(odd_folder / "verl" / "1.jsonl"))
    assert message.rstrip().endswith("--tokenizer PATH")
