"""The command line: what it prints, its exit status, its errors, and what it does not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook.cli import main
from tests.book.records import record, records, take

COMMANDS = ("ls", "top", "check", "sql", "history", "export", "import", "compact")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A book of four records, one of them trained, and one for evaluation."""
    path = tmp_path / "runs" / "demo"
    with rollbook.open(path) as book:
        book.append(records(4, reward=0.5))
        book.append(record(suffix="held out"), evaluation=True)
        take(book, 1)
        book.checkpoint("one")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_help_and_ls_load_nothing_heavy(folder: Path) -> None:
    script = """
import sys, contextlib, io
from rollbook.cli import main
for arguments in (["--help"], ["check", "--help"]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments)
main(["ls", sys.argv[1]])
main(["ls", sys.argv[2], "--json"])
print([name for name in ("torch", "pyarrow", "duckdb", "numpy") if name in sys.modules])
"""
    command = [sys.executable, "-c", script, str(folder), str(folder.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and capsys.readouterr().out.startswith("usage: rollbook")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_a_clean_refusal(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out
    more = {"sql": ["select 1"], "history": ["x"], "export": ["out.jsonl"], "import": ["in.jsonl"]}.get(command, [])
    status, out, err = run(capsys, command, tmp_path / "nowhere", *more)
    assert status == 2
    assert out == ""
    assert err.startswith(f"rollbook {command}: ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "nowhere").exists(), "nothing was made"


def test_as_a_module(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollbook", "check", str(folder), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


def test_ls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "ls", folder)
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["records", "4"] in lines
    assert ["checkpoints", "one"] in lines
    assert ["train", "3", "0", "1", "0"] in lines
    listing = json.loads(run(capsys, "ls", folder, "--json")[1])
    assert listing["evaluation"] == 1
    assert listing["consumers"] == [{"consumer": "train", "waiting": 3, "leased": 0, "trained": 1, "dropped": 0}]
    assert listing["segments"] == 1
    (folder.parent / "broken").mkdir()
    (folder.parent / "broken" / "ledger.sqlite").write_bytes(b"not a database, and longer than sixteen bytes")
    status, out, _ = run(capsys, "ls", folder.parent)
    assert status == 0
    assert [line.split()[:3] for line in out.splitlines()][::2] == [["run", "steps", "records"], ["demo", "0", "4"]]
    assert "damaged" in out


def test_ls_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "sweep/second"):
        with rollbook.open(tmp_path / name / "book") as book:
            for step in (9, 10):
                book.append([record(step, i, suffix="s", batch=step, reward=i / 2) for i in range(step - 7)])
            book.append(record("e", suffix="s", batch="eval-10", reward=0.25), evaluation=True)
            book.log(10, {"loss": 1.0})
            book.checkpoint("ten")
            book.append(record(11, suffix="s", batch=11, reward=9.0))
            book.rewind("ten", later="drop")
    (tmp_path / "third").mkdir()
    status, out, _ = run(capsys, "ls", tmp_path)
    assert status == 0
    assert [line.split()[:5] for line in out.splitlines()] == [
        ["run", "steps", "records", "last", "reward"],
        ["first", "10", "5", "0.5", "0.25"],
        ["sweep/second", "10", "5", "0.5", "0.25"],
    ]
    assert run(capsys, "ls", tmp_path / "first") == run(capsys, "ls", tmp_path / "first" / "book")
    listing = json.loads(run(capsys, "ls", tmp_path / "first", "--json")[1])
    assert (listing["steps"], listing["records"], listing["reward"], listing["evaluation_reward"]) == (10, 5, 0.5, 0.25)
    assert json.loads(run(capsys, "ls", tmp_path, "--json")[1])[0] == {"name": "first", **listing}


def test_permission_denied_is_said() -> None:
    script = """
import os, shutil, sys
import rollbook
from rollbook.cli import main
runs = sys.argv[1]
demo = os.path.join(runs, "demo")
unreadable, shut = os.path.join(runs, "unreadable"), os.path.join(runs, "shut")
with rollbook.open(demo) as book:
    book.append(rollbook.Experience(tokens=[1, 2, 3], reward=0.5))
for path in (unreadable, shut):
    shutil.copytree(demo, path)
main(["compact", demo]); main(["sql", demo, "select 1"]); main(["show", demo])  # loads what the user below may not
for path, _, names in os.walk(runs):  # books are their owner's alone
    os.chmod(path, 0o755)
    for name in names:
        os.chmod(os.path.join(path, name), 0o644)
os.chmod(os.path.join(unreadable, "ledger.sqlite"), 0)
os.chmod(os.path.join(demo, "ledger.sqlite"), 0o444)
os.chmod(shut, 0)
if os.geteuid() == 0:  # whom no permission stops
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.stdout.flush()
for command in (["compact", demo], ["show", unreadable], ["sql", shut, "select 1"]):
    assert main(command) == 2
main(["ls", runs])
"""
    # Not in a folder of pytest, which is closed to others.
    with tempfile.TemporaryDirectory(prefix="rollbook-") as runs:
        os.chmod(runs, 0o755)
        command = [sys.executable, "-c", script, runs]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        os.chmod(os.path.join(runs, "shut"), 0o755)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (0, 3), done.stderr
    for line, path in zip(lines, ("demo/ledger.sqlite", "unreadable/ledger.sqlite", "shut/ledger.sqlite"), strict=True):
        assert line.endswith(f"{runs}/{path}: permission denied"), line
    listed = [line.split() for line in done.stdout.splitlines()[-3:]]
    assert [(line[0], line[-2:] == ["permission", "denied"]) for line in listed] == [
        ("demo", False),
        ("shut", True),
        ("unreadable", True),
    ]


def test_check_and_repair(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "check", folder)
    assert (status, out.splitlines()[-1].split(":")[0]) == (0, "ok")
    with rollbook.open(folder) as book, book.ledger.write() as tx:
        tx.run("UPDATE records SET reward = 9.0 WHERE seq = 1")
    status, out, _ = run(capsys, "check", folder, "--quick")
    assert status == 1
    assert "error     tags: //0/0/0000: reward: the ledger has 9.0, the record 0.5" in out.splitlines()
    assert "help for tags: " in out
    report = json.loads(run(capsys, "check", folder, "--json")[1])
    assert report["counts"] == {"tags": 1}
    status, out, _ = run(capsys, "check", folder, "--repair")
    assert status == 1, "something was found, and mended"
    assert out.splitlines()[-1].startswith("ok: ")
    assert "copy of the previous files: " in out
    assert run(capsys, "check", folder, "--repair")[0] == 0
    status, _, err = run(capsys, "check", folder, "--repair", "--quick")
    assert (status, "exclude each other" in err) == (2, True)


def test_a_damaged_ledger(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ledger.sqlite").write_bytes(b"not a database, and longer than sixteen bytes")
    status, _, err = run(capsys, "check", folder)
    assert status == 2
    assert "rollbook check --repair" in err
    status, out, _ = run(capsys, "check", folder, "--repair", "--json")
    assert status == 1
    report = json.loads(out)
    assert report["counts"] == {"quarantined": 4}
    assert report["repairs"]["recovered"] == 5
    assert run(capsys, "check", folder, "--offer")[0] == 2
    status, out, _ = run(capsys, "check", folder, "--repair", "--offer", "--json")
    assert (status, json.loads(out)["repairs"]) == (1, {"offered": 4})
    assert run(capsys, "check", folder)[0] == 0


def test_sql_and_history(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "sql", folder, "select count(*) as n, avg(reward) as mean from experiences")
    assert status == 0
    assert [line.split() for line in out.splitlines()] == [["n", "mean"], ["5", "0.5"]]
    status, out, _ = run(capsys, "sql", folder, "select uid from experiences order by uid limit 1", "--json")
    assert json.loads(out) == [{"uid": "//0/0/0000"}]
    for wrong in ("selec", "select * from nothing", "delete from experiences", "select 1 /"):
        status, _, err = run(capsys, "sql", folder, wrong)
        assert status == 2, wrong
        assert err.startswith("rollbook sql: ")
    status, out, _ = run(capsys, "history", folder, "//0/0/0000")
    assert [line.split()[2] for line in out.splitlines()[1:]] == ["admitted", "leased", "trained"]
    assert [event["kind"] for event in json.loads(run(capsys, "history", folder, "//0/0/0001", "--json")[1])] == [
        "admitted"
    ]
    status, _, err = run(capsys, "history", folder, "nobody")
    assert (status, "nobody" in err) == (2, True)


def test_what_a_terminal_would_obey_is_not_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rollbook.open(folder) as book:
        book.fail(record("x\x1b[31m", 1).eid, "bad\x1b]0;title\x07\nreason")
        uid = book.sql("select uid from experiences where task like 'x%'").rows()[0][0]
    for arguments in (["history", folder, uid], ["sql", folder, "select task from experiences"], ["ls", folder]):
        out = run(capsys, *arguments)[1]
        assert "\x1b" not in out
        assert "\x07" not in out


def test_export_and_import(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "some.jsonl"
    assert run(capsys, "export", folder, out)[:2] == (0, f"exported 4 records to {out}\n")
    status, _, err = run(capsys, "export", folder, out)
    assert (status, "--overwrite" in err) == (2, True)
    assert json.loads(run(capsys, "export", folder, out, "--overwrite", "--json")[1]) == {"exported": 4}
    assert "exported 1 " in run(capsys, "export", folder, tmp_path / "held.parquet", "--evaluation")[1]
    status, printed, _ = run(capsys, "import", tmp_path / "new", out, "--json")
    assert status == 0
    assert json.loads(printed) == {"admitted": 4, "existing": 0, "revised": 0, "stale": 0}
    assert "4 already present" in run(capsys, "import", tmp_path / "new", out)[1]
    with out.open("a") as file:
        file.write("{broken\n")
    assert run(capsys, "import", tmp_path / "other", out)[0] == 2


def test_what_is_no_file_is_refused_before_it_is_opened(folder: Path, tmp_path: Path) -> None:
    # In a child, since what opens a pipe waits for ever.
    script = """
import sys
from rollbook.cli import main
from rollbook.io import read_parquet
from rollbook.train.prompts import read
book, pipe, new, run = sys.argv[1:]
for command in (["import", new, pipe], ["import", new, pipe, "--format", "jsonl"],
                ["export", book, pipe, "--overwrite"], ["show", pipe], ["ls", pipe],
                ["doctor", pipe], ["diff", book, pipe], ["train", pipe],
                ["export", book, pipe, "--overwrite", "--format", "html", "--where", "reward > 0"],
                ["import", run, book], ["show", run]):
    assert main(command) == 2, command
for opens in (read_parquet, lambda path: list(read(path))):
    try:
        opens(pipe)
    except ValueError as error:
        print(error, file=sys.stderr)
"""
    pipe, new, run = tmp_path / "in.jsonl", tmp_path / "new", tmp_path / "run"
    os.mkfifo(pipe)
    run.mkdir()
    (run / "config.yaml").symlink_to(pipe)
    command = [sys.executable, "-c", script, str(folder), str(pipe), str(new), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (0, 13), done.stderr
    assert all(line.endswith(": is a named pipe, expected a regular file or a folder") for line in lines)
    assert pipe.is_fifo()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "run", "runs"], "nothing was made"


def test_an_import_that_fails_leaves_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    assert run(capsys, "export", folder, rows)[0] == 0
    rows.write_text(rows.read_text() + "{broken\n")
    assert run(capsys, "import", tmp_path / "deep" / "new", rows)[0] == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rows.jsonl", "runs"]
    status, _, err = run(capsys, "import", tmp_path / "runs", rows)
    assert (status, err) == (
        2,
        f"rollbook import: {tmp_path / 'runs'}: exists and is not a book, expected a book or a new folder\n",
    )
    status, _, err = run(capsys, "import", tmp_path / "deep" / "new", rows, "--skip")
    assert status == 0
    assert err.startswith("rollbook import: warning: import_records: 1 rows of ") and len(err.splitlines()) == 1
    assert run(capsys, "ls", tmp_path / "deep" / "new", "--json")[0] == 0


def test_compact(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rollbook.open(folder) as book:
        book.delete(["//0/0/0000"], author="ana")
    status, out, _ = run(capsys, "compact", folder, "--json")
    assert status == 0
    assert json.loads(out)["removed"] == 1
    assert run(capsys, "compact", folder)[1].endswith("0 records purged\n")
    assert run(capsys, "check", folder)[0] == 0


def test_a_reader_that_has_enough_is_no_error(folder: Path) -> None:
    query = f"{sys.executable} -m rollbook sql {folder} 'select * from range(100000)'"
    command = f"{query} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[-1] == "0", done
    assert "Traceback" not in done.stderr
    assert os.path.exists(folder)
