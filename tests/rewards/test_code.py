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

from rollbook.rewards import Limits, as_reward, code_match, run_sandboxed, sandbox
from rollbook.rewards.sandbox import ProgramTests, SandboxResult, extract_program
from tests.rewards.helpers import sample

SHORT = Limits(wall=15.0)


def run(source: str, stdin: str = "", limits: Limits = SHORT, **more: Any) -> SandboxResult:
    return run_sandboxed({"main.py": source}, ["main.py"], stdin=stdin.encode(), limits=limits, **more)


def running(mark: str) -> list[str]:
    """The processes whose command line has the mark."""
    names = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                names.append(name)
    return names


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
    score = code_match(text, tests)
    assert (score["passed"], score["cases"]) == (2.0, 4.0)
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
    score = code_match(text, ["assert double(1) == 2", "assert double(2) == 4"], limits=Limits(wall=2.0))
    assert (score["passed"], score["timed_out"]) == (1.0, 1.0)


def test_one_case_does_not_see_another() -> None:
    text = "seen = []\ndef count():\n    seen.append(1)\n    return len(seen)"
    assert code_match("x = 1", ["x = 2", "assert x == 1"])["reward"] == 1.0
    assert code_match(text, ["assert count() == 1", "assert count() == 2"])["reward"] == 1.0


def test_cases_past_the_time_of_all_fail() -> None:
    tests = {"inputs": ["0", "9", "0", "0"], "outputs": ["0"] * 4}
    text = "n = int(input())\nimport time; time.sleep(10 * n)\nprint(0)"
    start = time.monotonic()
    score = code_match(text, tests, time_limit=3.0)
    assert time.monotonic() - start < 30
    assert score == {"reward": 0.25, "passed": 1.0, "cases": 4.0, "timed_out": 3.0}


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
        ProgramTests.from_reference(tests)


def test_the_program_in_a_response() -> None:
    assert extract_program("no fence") == "no fence"
    assert extract_program("```\na\n```\n```python\nb\n```") == "b\n"
    assert extract_program("```python\nnever closed") == "never closed"
    assert extract_program("```python\nx = '😀'\n```") == "x = '😀'\n"


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
    for stream in ("stdout", "stderr"):
        ran = run(f"import sys\nwhile True: sys.{stream}.write('x' * 10000)", limits=Limits(wall=30.0, output=100_000))
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
    folders: list[str] = []
    make = tempfile.mkdtemp

    def noted(*arguments: Any, **options: Any) -> str:
        folders.append(make(*arguments, **options))
        return folders[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    ran = run(
        "f = open('big', 'wb')\nf.write(b'0' * (4 << 20))\nf.flush()\nprint('all')", limits=Limits(file_size=1 << 20)
    )
    assert ran.code != 0 and ran.stdout == b""
    ran = run("fs = [open(f'f{i}', 'w') for i in range(100)]\nprint('all')", limits=Limits(files=32))
    assert b"Too many open files" in ran.stderr
    run("import os\nos.makedirs('a/b'); open('a/b/c', 'w').write('x'); os.chmod('a', 0)")
    assert len(folders) == 3 and not any(map(os.path.exists, folders))


def test_a_folder_that_becomes_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is left may replace a folder while it is removed; no other folder changes its mode."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    (folder / "a").mkdir(parents=True)
    other.mkdir(mode=0o500)

    class Entry:
        name = "a"

        def is_dir(self, follow_symlinks: bool) -> bool:
            (folder / "a").rmdir()
            (folder / "a").symlink_to(other)
            return True

    monkeypatch.setattr(os, "scandir", lambda _: contextlib.nullcontext([Entry()]))
    sandbox._remove(str(folder), top := os.open(folder, os.O_RDONLY))
    os.close(top)
    assert other.stat().st_mode & 0o777 == 0o500


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become a user who cannot read everything")
def test_a_folder_without_permissions_is_removed_by_its_owner(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "c").touch()
    for path in (*folder.rglob("*"), folder):
        os.chown(path, 65534, -1)
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0)
    os.chown(tmp_path, 65534, -1)
    top = os.open(folder, os.O_RDONLY)
    os.seteuid(65534)
    try:
        sandbox._remove(str(folder), top)
    finally:
        os.seteuid(0)
        os.close(top)
    assert list(folder.rglob("*")) == []


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


def test_writing_is_bounded_and_the_rest_is_read_only() -> None:
    fill = """
import os
for folder in (".", "/tmp", "/dev/shm", "/var/tmp"):
    written = 0
    try:
        for written in range(40):
            with open(f"{folder}/part{written}", "wb") as file:
                file.write(bytes(1 << 20))
    except OSError as error:
        print(error.strerror)
    for i in range(written + 1):
        os.unlink(f"{folder}/part{i}")
for place in ("/", "/usr", "/etc"):
    try:
        open(f"{place}/rollbook-test", "w")
    except OSError as error:
        print(error.strerror)
"""
    ran = run(fill, limits=Limits(wall=30.0, disk=8 << 20))
    if "disk space" in ran.unprotected:
        pytest.skip("no namespaces here")
    assert ran.stdout.decode().splitlines() == ["No space left on device"] * 4 + ["Read-only file system"] * 3


@pytest.mark.parametrize(
    "text",
    [
        "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')",
        "x = '\ud800'\nprint(3)",
        "import shutil, os\nos.rename(os.getcwd(), '/tmp/elsewhere')",
    ],
)
def test_no_program_gets_out_of_its_score(text: str) -> None:
    scores = as_reward("code_match")([sample(text, reference={"inputs": ["\udfff"], "outputs": ["3"]})])
    assert scores.rewards == [0.0] and scores.errors == [None]


def test_system_calls_are_filtered() -> None:
    attempt = """
import ctypes, errno, socket
for family, kind in ((1, 1), (2, 1), (10, 1), (16, 3), (17, 3), (38, 5), (40, 1)):
    try:
        socket.socket(family, kind).close()
        print(family)
    except OSError as error:
        assert error.errno == errno.EAFNOSUPPORT or family == 10, error
libc = ctypes.CDLL(None, use_errno=True)
for call in (lambda: libc.unshare(0x10000000), lambda: libc.shmget(0, 4096, 0o1600), lambda: libc.syscall(425, 1, 0),
             lambda: libc.memfd_create(b"a", 0)):
    assert call() == -1 and ctypes.get_errno() == errno.EPERM, ctypes.get_errno()
import multiprocessing, subprocess, threading
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
subprocess.run(["/bin/echo", "process"])
"""
    ran = run(attempt)
    if "system calls" in ran.unprotected:
        pytest.skip("no filter here")
    assert ran.code == 0, ran.stderr
    assert set(ran.stdout.decode().split()) <= {"1", "2", "10", "thread", "process"}
    assert {"1", "thread", "process"} <= set(ran.stdout.decode().split())


OUTER = """
import ctypes, json, os, runpy, sys, warnings
folder, user, spaces, prefix, port = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
if user != os.geteuid():  # become another user, to whom this Python is shown
    libc = ctypes.CDLL(None)
    assert libc.unshare(0x20000) == 0 and libc.mount(None, b"/", None, 16384 | 1 << 18, None) == 0
    assert libc.mount(sys.base_prefix.encode(), prefix.encode(), None, 4096, None) == 0
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    python = prefix + os.path.realpath(sys.executable).removeprefix(sys.base_prefix)
    path = os.pathsep.join(filter(None, sys.path[1:]))
    os.execve(python, [python, *sys.argv], {"PYTHONPATH": path, "TMPDIR": folder})
from rollbook.rewards import sandbox
if spaces == "without":
    inner = runpy.run_path(sandbox.__file__.replace("sandbox.py", "_sandbox_main.py"))
    assert inner["prctl"](inner["NO_NEW_PRIVILEGES"], 1) and inner["filter_system_calls"]((1, 2, 10))
with open(folder + "/main.py") as file:
    source = file.read()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ran = sandbox.run_sandboxed({"main.py": source}, ["main.py", folder, port])
    sandbox.run_sandboxed({}, ["-c", "pass"])
print(json.dumps([ran.code, ran.stdout.decode(), ran.stderr.decode()[-300:], ran.unprotected,
                  [str(one.message) for one in caught]]))
"""

INNER = """
import json, os, socket, sys
folder, port = sys.argv[1:]
def works(call):
    try:
        call()
    except OSError:
        return False
    return True
print(json.dumps({
    "files of its user": works(lambda: open(folder + "/secret").read()),
    "disk space": works(lambda: open(folder + "/written", "w").write("x")),
    "network": works(lambda: socket.create_connection(("127.0.0.1", int(port)), 2)),
    "system calls": works(lambda: socket.socket(16, socket.SOCK_RAW)),
}), flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.execv(sys.executable, ["python", "-I", "-S", "-c", "import time; time.sleep(100)", folder])
    os._exit(0)
os.waitpid(-1, 0)
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
os.chmod("..", 0)
"""


@pytest.mark.parametrize("spaces", ["with", "without"])
@pytest.mark.parametrize("user", [os.geteuid(), 65534])
def test_what_is_isolated_is_what_is_said(spaces: str, user: int) -> None:
    """As this user and as one without privileges, with namespaces and without: nothing is left behind either way."""
    from tests.rewards.server import serve

    if user != os.geteuid() and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # on a disk, many folders take their time
    with tempfile.TemporaryDirectory(dir=memory) as name, serve() as server:
        folder = Path(name)
        for part, text in {"outer.py": OUTER, "main.py": INNER, "secret": "hunter2"}.items():
            (folder / part).write_text(text)
        (folder / "secret").chmod(0o600)
        (folder / "python").mkdir()
        for path in (folder, *folder.iterdir()):
            os.chown(path, user, -1)
        before = sorted(folder.iterdir())
        port = server.url.rsplit(":", 1)[1].split("/")[0]
        command = [sys.executable, folder / "outer.py", folder, user, spaces, folder / "python", port]
        environment = {**os.environ, "TMPDIR": name, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=120)
        unreadable = "Permission denied" in done.stderr or "cannot open shared object file" in done.stderr
        if user != os.geteuid() and unreadable:
            pytest.skip("another user cannot read this environment")
        assert done.returncode == 0, done.stderr
        code, stdout, stderr, unprotected, warned = json.loads(done.stdout)
        assert code == 0, stderr
        seen = json.loads(stdout)
        seen["disk space"] = (folder / "written").exists()  # elsewhere it is the program's own
        (folder / "written").unlink(missing_ok=True)
        assert not running(name) and "leftovers" not in unprotected
        assert {protection for protection, is_seen in seen.items() if is_seen} == set(unprotected) & seen.keys()
        assert sorted(folder.iterdir()) == before
        assert len(warned) == (1 if unprotected else 0) and all(protection in warned[0] for protection in unprotected)
        if spaces == "without":
            assert {"files of its user", "disk space", "other processes of its user"} <= set(unprotected)
        elif user != os.geteuid():
            assert unprotected == []  # user namespaces are enough


@pytest.mark.parametrize("unit", ["```", "``` ", "```python ", "```\n", " ", "\t", "\n", "`"])
def test_looking_for_a_program_takes_linear_time(unit: str) -> None:
    def seconds(n: int) -> float:
        times = []
        for _ in range(3):
            start = time.process_time()
            extract_program("```" + unit * (n // len(unit)) + "x")
            times.append(time.process_time() - start)
        return min(times)

    small, large = seconds(20_000), seconds(160_000)
    assert large < 24 * small + 0.02  # 8 times the text; a quadratic search takes 64 times as long
