"""Programs in the sandbox: what they are judged by, and what they try and must not manage."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import rollbook.rewards.sandbox
from rollbook.rewards import Limits, as_reward, code_match, sandboxed
from rollbook.rewards.programs import Cases, program
from rollbook.rewards.sandbox import Ran
from tests.rewards.helpers import sample

SHORT = Limits(wall=15.0)


def run(source: str, stdin: str = "", limits: Limits = SHORT, **more: Any) -> Ran:
    return sandboxed({"main.py": source}, ["main.py"], stdin=stdin.encode(), limits=limits, **more)


def running(mark: str) -> list[str]:
    """The processes whose command line has the mark."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(name)
    return found


# --- judging -------------------------------------------------------------------------------------------------------


def test_input_and_output() -> None:
    text = "Like so:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    tests = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "8", "11  \n\n"]}
    assert code_match(text, tests) == {"reward": pytest.approx(2 / 3), "passed": 2.0, "cases": 3.0, "timed_out": 0.0}
    assert code_match(text, tests, all_or_nothing=True)["reward"] == 0.0
    pairs = [{"input": "1 2", "output": "3"}]
    assert code_match(text, pairs)["reward"] == 1.0


def test_statements() -> None:
    text = "```py\ndef double(x):\n    return 2 * x\n```"
    tests = ["assert double(1) == 2", "assert double(2) == 5", "assert double('a') == 'aa'", "1 / 0"]
    found = code_match(text, tests)
    assert (found["passed"], found["cases"]) == (2.0, 4.0)
    assert code_match(text, "assert double(1) == 2\nassert double(2) == 4")["reward"] == 1.0
    assert code_match(text, '["assert double(1) == 2"]')["reward"] == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "this is no Python",
        "",
        "def double(x): raise KeyboardInterrupt",
        "def double(x):\n    import os\n    os._exit(0)",
        "print('loaded'); print('0')",
        "import os\nfor fd in range(3, 40):\n    try: os.write(fd, b'0\\n' * 9)\n    except OSError: pass",
    ],
)
def test_a_program_that_ends_early_or_pretends_passes_nothing(text: str) -> None:
    assert code_match(text, ["assert double(1) == 2", "assert double(2) == 4"], limits=SHORT)["passed"] == 0.0


def test_what_passed_before_a_hang_counts() -> None:
    text = "def double(x):\n    while x == 2: pass\n    return 2 * x"
    found = code_match(text, ["assert double(1) == 2", "assert double(2) == 4"], limits=Limits(wall=2.0))
    assert (found["passed"], found["timed_out"]) == (1.0, 1.0)


def test_one_case_does_not_see_another() -> None:
    text = "seen = []\ndef count():\n    seen.append(1)\n    return len(seen)"
    assert code_match("x = 1", ["x = 2", "assert x == 1"])["reward"] == 1.0
    assert code_match(text, ["assert count() == 1", "assert count() == 2"])["reward"] == 1.0


def test_cases_past_the_time_of_all_fail() -> None:
    tests = {"inputs": ["0", "9", "0", "0"], "outputs": ["0"] * 4}
    text = "n = int(input())\nimport time; time.sleep(10 * n)\nprint(0)"
    start = time.monotonic()
    found = code_match(text, tests, time_limit=3.0)
    assert time.monotonic() - start < 30
    assert found == {"reward": 0.25, "passed": 1.0, "cases": 4.0, "timed_out": 3.0}


def test_numbers_within_a_tolerance() -> None:
    tests = {"inputs": [""], "outputs": ["0.3333 done"]}
    assert code_match("print(1/3, 'done')", tests)["reward"] == 0.0
    assert code_match("print(1/3, 'done')", tests, tolerance=1e-3)["reward"] == 1.0
    assert code_match("print(1/3, 'dome')", tests, tolerance=1e-3)["reward"] == 0.0


def test_a_failing_program_that_printed_the_answer_fails() -> None:
    assert code_match("print(3)\nraise ValueError", {"inputs": [""], "outputs": ["3"]})["reward"] == 0.0


@pytest.mark.parametrize("tests", [None, [], {}, {"inputs": ["1"], "outputs": []}, [3], 5])
def test_tests_are_checked(tests: Any) -> None:
    with pytest.raises(ValueError, match="tests"):
        Cases.of(tests)


def test_the_program_in_a_response() -> None:
    assert program("no fence") == "no fence"
    assert program("```\na\n```\n```python\nb\n```") == "b\n"
    assert program("```python\nnever closed") == "never closed"
    assert program("```python\nx = '😀'\n```") == "x = '😀'\n"


def test_as_a_reward_several_at_once() -> None:
    inputs = [sample(f"print({i})", reference={"inputs": [""], "outputs": ["1"]}) for i in range(4)]
    scores = as_reward("code_match", workers=2)(inputs)
    assert scores.rewards == [0.0, 1.0, 0.0, 0.0] and scores.metrics["cases"] == [1.0] * 4
    assert scores.errors == [None] * 4


def test_any_text_goes_in_and_comes_out() -> None:
    ran = run("import sys\nsys.stdout.write(sys.stdin.read() + '😀')", stdin="é\r\n\x00")
    assert ran.stdout.decode() == "é\r\n\x00😀"


# --- what programs try -----------------------------------------------------------------------------------------------


def test_a_busy_loop_is_killed() -> None:
    start = time.monotonic()
    ran = run("while True: pass", limits=Limits(wall=0.5))
    assert ran.timed_out and ran.code is None and time.monotonic() - start < 15


def test_one_that_ignores_signals_is_killed() -> None:
    ran = run("import signal, time\nfor n in range(1, 64):\n    try: signal.signal(n, signal.SIG_IGN)\n"
              "    except (OSError, ValueError): pass\nprint('deaf', flush=True)\ntime.sleep(100)",
              limits=Limits(wall=2.0))  # fmt: skip
    assert ran.timed_out and ran.stdout == b"deaf\n"


def test_memory_is_bounded() -> None:
    ran = run("x = bytearray(1 << 31)\nprint('got it')", limits=Limits(memory=128 << 20))
    assert ran.code == 1 and b"MemoryError" in ran.stderr and ran.stdout == b""


def test_output_is_bounded() -> None:
    start = time.monotonic()
    for where in ("stdout", "stderr"):
        ran = run(f"import sys\nwhile True: sys.{where}.write('x' * 10000)", limits=Limits(wall=30.0, output=100_000))
        assert ran.flooded and not ran.timed_out and len(ran.stdout) + len(ran.stderr) <= 100_000
    assert time.monotonic() - start < 25


def test_a_flood_is_no_pass() -> None:
    text = "print(3)\nimport sys\nfor _ in range(300): sys.stderr.write('x' * 10000)"
    assert code_match(text, {"inputs": [""], "outputs": ["3"]}, limits=Limits(output=1000))["reward"] == 0.0


def test_a_fork_bomb_is_bounded() -> None:
    bomb = """
import os, time
made = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except OSError:
    pass
print(made)
"""
    ran = run(bomb, limits=Limits(processes=10))
    assert (0 < int(ran.stdout) <= 10) == ("fork bombs" not in ran.unprotected)
    start = time.monotonic()
    deep = "import os\nfor _ in range(8):\n    try: os.fork()\n    except OSError: pass\nwhile True: pass"
    assert run(deep, limits=Limits(wall=1.0, processes=10)).timed_out
    assert time.monotonic() - start < 15


def test_what_leaves_its_session_is_killed_too(tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.execv({sys.executable!r} if os.access({sys.executable!r}, os.X_OK) else sys.executable,
                 ["python", "-I", "-S", "-c", "import time; time.sleep(100)", "{mark}"])
    os._exit(0)
import time
time.sleep(0.3)
print("left")
"""
    ran = run(source)
    assert ran.stdout == b"left\n" and "leftovers" not in ran.unprotected
    assert not running(mark)


def test_the_environment_holds_nothing() -> None:
    look = """
import os
print(sorted(os.environ))
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        print(open(f"/proc/{name}/environ", "rb").read())
    except OSError:
        pass
"""
    secret = {"SECRET_TOKEN": "hunter2"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=secret, stdin=subprocess.PIPE) as other:
        ran = run(look)
        other.communicate(b"\n")
    assert ran.stdout.startswith(b"['HOME', 'LANG', 'PATH']")
    assert (b"hunter2" in ran.stdout) == ("other processes of its user" in ran.unprotected)


def test_there_is_no_network_or_it_is_said() -> None:
    from tests.rewards.server import serve

    with serve() as server:
        port = int(server.url.rsplit(":", 1)[1].split("/")[0])
        ran = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nprint('reached')")
    assert (ran.stdout == b"reached\n") == ("network" in ran.unprotected)


def test_files_are_bounded_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make = tempfile.mkdtemp

    def noted(*given: Any, **options: Any) -> str:
        made.append(make(*given, **options))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    ran = run(
        "f = open('big', 'wb')\nf.write(b'0' * (4 << 20))\nf.flush()\nprint('all')", limits=Limits(file_size=1 << 20)
    )
    assert ran.code != 0 and ran.stdout == b""
    ran = run("fs = [open(f'f{i}', 'w') for i in range(100)]\nprint('all')", limits=Limits(files=32))
    assert b"Too many open files" in ran.stderr
    run("import os\nos.makedirs('a/b'); open('a/b/c', 'w').write('x'); os.chmod('a', 0)")
    assert len(made) == 3 and not any(map(os.path.exists, made))


def test_only_its_own_descriptors_are_open() -> None:
    ran = run("import os\nprint(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1])")
    assert ran.stdout.strip() in (b"[0, 1, 2]", b"[0, 1, 2, 3]")  # and the one that lists them


def test_exit_codes_and_signals() -> None:
    assert run("raise SystemExit(3)").code == 3
    assert run("import os; os.abort()").code in (134, -6)
    assert run("print(1)").code == 0


def test_another_python() -> None:
    ran = run("import sys; print(sys.flags.isolated)", python=os.path.realpath(sys.executable))
    assert ran.stdout == b"1\n"


def test_limits_are_checked() -> None:
    for name, value in {"wall": 0, "memory": 1, "cpu": 0, "files": 1, "processes": 0, "output": 0}.items():
        with pytest.raises(ValueError, match=name):
            Limits(**{name: value})  # type: ignore[arg-type]


def test_without_namespaces_nothing_is_left_either_and_it_is_said(tmp_path: Path) -> None:
    # The same process where the kernel allows no namespaces: the sandbox is then the reaper of what is orphaned.
    (tmp_path / "folder").mkdir()
    inner = Path(rollbook.rewards.sandbox.__file__).with_name("_sandbox_main.py")
    (tmp_path / "outer.py").write_text(
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('inner', {str(inner)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module.unshare = lambda flags: False\n"
        "module.main()\n"
    )
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    (tmp_path / "folder" / "main.py").write_text(f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.execv(sys.executable, ["python", "-I", "-S", "-c", "import time; time.sleep(100)", "{mark}"])
    os._exit(0)
time.sleep(100)
""")
    report, ours = os.pipe()
    settings = {
        "report": ours,
        "wall_ms": 1000,
        "cpu": 9,
        "memory": 1 << 29,
        "file_size": 1,
        "files": 64,
        "processes": 9,
    }
    python = [os.path.realpath(sys.executable), "-I", "-S"]
    subprocess.run(
        [*python, str(tmp_path / "outer.py"), json.dumps(settings), *python, "main.py"],
        cwd=tmp_path / "folder",
        pass_fds=[ours],
        timeout=60,
        check=True,
    )
    os.close(ours)
    with os.fdopen(report) as lines:
        beyond, ended = map(json.loads, lines)
    assert "network" in beyond and "leftovers" not in beyond and ended == {"timed_out": True, "code": None}
    assert not running(mark)
