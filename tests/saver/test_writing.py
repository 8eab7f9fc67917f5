"""Files appear whole or not at all, whoever is killed; writing in the background drops what finds no room."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rollbook.compat.lightrft.saver import TrajectorySaver
from rollbook.io.trajectories import BackgroundWriter, TrajectoryFiles
from tests.saver.making import TOKENIZER, read, rollout

CHILD = """
import os, signal, sys
from pathlib import Path
from rollbook.io.trajectories import EncodedImage, TrajectoryFiles

files = TrajectoryFiles(Path(sys.argv[1]), True)

def write(turn):
    text = b'"%d' % turn + b"x" * 500_000 + b'"'
    picture = EncodedImage(str(turn), b"%d" % turn * 10_000, 1, 1)
    files.write("trajectories", 1, [text] * 4, {"step1_exp0_sample0_img0.png": picture})

def dying(function, left):
    def called(*given):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return function(*given)
    return called

write(0)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        first = int(line)
        if first < 100:  # at the n-th of the calls that matter
            left = [first]
            os.fsync, os.replace = dying(os.fsync, left), dying(os.replace, left)
        for turn in range(1, 10**9):
            write(first * 1000 + turn)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def test_a_kill_leaves_a_whole_file(tmp_path: Path) -> None:
    """At every call that touches the disk, and at any moment: the old file is there, or the new one."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    seen = set()
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], **pipes) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        for turn in (*range(9), *range(100, 106)):
            parent.stdin.write(f"{turn}\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            if turn >= 100:
                time.sleep(0.007 * (turn - 99))
                os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "gone\n"
            saved = json.loads((tmp_path / "trajectories_step_1.json").read_bytes())
            assert len(set(saved)) == 1 and len(saved) == 4
            image = (tmp_path / "images" / "step1_exp0_sample0_img0.png").read_bytes()
            assert len(image) % 10_000 == 0 and image == image[: len(image) // 10_000] * 10_000
            seen.add(saved[0][:8])
            assert all(file.name.startswith(".") for file in tmp_path.rglob("*.partial"))
        parent.stdin.close()
    assert len(seen) > 3 and list(tmp_path.rglob("*.partial"))
    for file in tmp_path.rglob("*.partial"):
        os.utime(file, (0, 0))
    TrajectoryFiles(tmp_path, True)  # what was left long ago goes
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("at", ["fsync", "replace"])
@pytest.mark.filterwarnings("ignore:saving trajectories")
def test_a_disk_that_fails_leaves_the_old_file(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = TrajectorySaver(tmp_path, TOKENIZER)
    path, _ = saver.save_trajectories(rollout(1, 2), 1)
    before = read(path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"rollbook.io.trajectories.os.{at}", full)
        assert saver.save_trajectories(rollout(2, 2), 1) == (None, {"trajectory/save_errors": 1.0})
    assert read(path) == before and sorted(file.name for file in tmp_path.iterdir()) == [
        "images",
        Path(path or "").name,
    ]
    assert "No space left" in saver.errors[0]


def test_in_the_background(tmp_path: Path) -> None:
    saver = TrajectorySaver(tmp_path, TOKENIZER, background=True, mark_high_entropy_tokens=True)
    rows = rollout(2, 2)
    path, stats = saver.save_trajectories(rows, 1, compute_stats=True)
    assert path == str(tmp_path / "trajectories_step_1.json") and stats is None
    for row in rows:
        row.advantages.fill_(99.0)  # training goes on with the same memory
    saver.flush()
    saved = read(path)
    assert all(entry["advantages"][0] == 0.5 for entry in saved)
    _, stats = saver.save_trajectories(rows, 2, compute_stats=True)
    mean = sum(entry["response_token_count"] for entry in saved) / len(saved)
    assert stats is not None and stats["trajectory/response_token_count_mean"] == mean  # of the save before
    saver.flush()
    assert len(read(tmp_path / "trajectories_step_2.json")) == 4 and saver.dropped == 0


class Slow:
    """Decodes when it is told to."""

    eos_token_id = 2

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()

    def decode(self, ids: Any) -> str:
        self.begun.set()
        self.go.wait(60)
        return TOKENIZER.decode(ids)


def test_what_finds_no_room_is_dropped_and_counted(tmp_path: Path) -> None:
    tokenizer = Slow()
    saver = TrajectorySaver(tmp_path, tokenizer, background=True)
    outcomes = [saver.save_trajectories(rollout(1, 1), 0)]
    assert tokenizer.begun.wait(60)  # that one is being written: of the others, so many wait as there is room for
    outcomes += [saver.save_trajectories(rollout(1, 1), step) for step in range(1, 6)]
    tokenizer.go.set()
    saver.flush()
    taken = [path for path, _ in outcomes if path is not None]
    assert len(taken) == 3 and saver.dropped == 6 - len(taken)
    assert outcomes[-1] == (None, {"trajectory/dropped": float(saver.dropped)})
    assert sorted(map(str, tmp_path.glob("*.json"))) == sorted(taken)


@pytest.mark.filterwarnings("ignore:saving trajectories")
def test_errors_in_the_background_come_with_the_next_save(tmp_path: Path) -> None:
    saver = TrajectorySaver(tmp_path / "in", TOKENIZER, background=True)
    (tmp_path / "in" / "trajectories_step_1.json").mkdir()
    (tmp_path / "in" / "trajectories_step_1.json" / "x").touch()
    assert saver.save_trajectories(rollout(1, 1), 1)[1] is None
    saver.flush()
    assert saver.error_count == 1
    assert saver.save_trajectories(rollout(1, 1), 2)[1] == {"trajectory/save_errors": 1.0}
    saver.flush()


def test_a_program_that_ends_has_written_everything(tmp_path: Path) -> None:
    program = (
        "import sys; from rollbook.compat.lightrft.saver import TrajectorySaver; from rollbook import Experience\n"
        "class T:\n    def decode(self, ids): return ''.join(chr(97 + i) for i in ids)\n"
        "saver = TrajectorySaver(sys.argv[1], T(), background=True)\n"
        "saver.save_trajectories([Experience(tokens=[1, 2, 3])] , 1)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert read(tmp_path / "trajectories_step_1.json")[0]["generated_text"] == "cd"


def test_a_saver_that_nobody_holds_writes_what_it_took(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = Slow()
    saver = TrajectorySaver(tmp_path, tokenizer, background=True)
    path, _ = saver.save_trajectories(rollout(1, 1), 1)
    del saver
    threads = [thread for thread in threading.enumerate() if thread.name == "rollbook saver"]
    tokenizer.go.set()
    for _ in range(600):
        gc.collect()  # the last to hold it is the job itself, in the thread that it must not wait for
        if not any(thread.is_alive() for thread in threads):
            break
        time.sleep(0.02)
    assert len(read(path)) == 1 and not any(thread.is_alive() for thread in threads)
    assert "join" not in capfd.readouterr().err


def test_a_job_that_raises_stops_no_other() -> None:
    done: list[int] = []
    worker = BackgroundWriter(max_pending=4)
    worker.submit(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    worker.submit(lambda: done.append(1))
    worker.flush()
    assert done == [1]
