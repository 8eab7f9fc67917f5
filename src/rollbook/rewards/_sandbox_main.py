"""The sandbox's own process: takes away what it may, starts a program, watches the clock, and leaves nothing behind.

Invariant: when it ends, every process that the program started has been killed, also those in sessions of their own,
unless its first line said that this is beyond it.

Run as `python -I -S _sandbox_main.py SETTINGS COMMAND...` in the program's folder; it imports nothing but the standard
library. On the file descriptor `report` it says, one JSON line each, what it could not take away (before the program
starts) and how the program ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

NEW_MOUNTS, NEW_USER, NEW_PID, NEW_NET, NEW_IPC = 0x20000, 0x10000000, 0x20000000, 0x40000000, 0x08000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
PARENT_DIES, SUBREAPER, NO_NEW_PRIVILEGES = 1, 36, 38
libc: Any = ctypes.CDLL(None, use_errno=True)
linux = sys.platform == "linux"


class Stop(BaseException):
    """The clock ran out, or the owner asked for an end."""


def prctl(option: int, value: int) -> bool:
    """Set one of this process's traits; whether that worked."""
    return linux and bool(libc.prctl(option, value, 0, 0, 0) == 0)


def unshare(flags: int) -> bool:
    """Leave the machine's namespaces for new ones; whether that was allowed."""
    return linux and bool(libc.unshare(flags) == 0)


def mount(source: str | None, target: str, kind: str | None, flags: int) -> bool:
    """Mount something, in a mount namespace of one's own; whether that worked."""
    text = [None if part is None else part.encode() for part in (source, target, kind)]
    return bool(libc.mount(text[0], text[1], text[2], ctypes.c_ulong(flags), None) == 0)


def write(path: str, text: str) -> None:
    """Write to one of the kernel's files."""
    with open(path, "w") as file:
        file.write(text)


def become(user: int) -> None:
    """Be another user, for good."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def can_run(user: int, command: list[str], folder: str) -> bool:
    """Whether a user can run a command from the folder, which becomes the user's own."""
    for name in [".", *os.listdir(folder)]:
        with contextlib.suppress(OSError):
            os.chown(os.path.join(folder, name), user, user)
    child = os.fork()
    if child == 0:
        try:
            become(user)
            os.chdir(folder)
            null = os.open("/dev/null", os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            os.execve(command[0], [*command[:3], "-c", "import io"], {})
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def stranger(command: list[str], folder: str, mounts: bool) -> int | None:
    """As root: a user that nobody is and that can run the command, so that files and limits are not root's.

    Where that user cannot reach this Python (it lies in root's home), it is shown to it at another place.
    """
    for user in (1_000_000_000 + os.getpid(), 65534):
        if can_run(user, command, folder):
            return user
    if mounts and command[0] == os.path.realpath(sys.executable) and command[0].startswith(sys.base_prefix + os.sep):
        shown = os.path.join(folder, ".python")
        os.mkdir(shown)
        command[0] = shown + command[0].removeprefix(sys.base_prefix)
        if mount(sys.base_prefix, shown, None, BIND) and mount(None, shown, None, BIND | REMOUNT | READ_ONLY):
            for user in (1_000_000_000 + os.getpid(), 65534):
                if can_run(user, command, folder):
                    return user
        command[0] = sys.base_prefix + command[0].removeprefix(shown)
    for name in [".", *os.listdir(folder)]:
        os.chown(os.path.join(folder, name), 0, 0)
    return None


def threads_of_user() -> int:
    """How many threads this user has now: where it has no namespace, the limit on processes counts them too."""
    count, user = 0, os.getuid()
    for name in os.listdir("/proc") if linux else []:
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def set_limits(settings: dict[str, int], others: int) -> None:
    """Bound what each process may use."""
    bounds = {"CORE": 0, "CPU": settings["cpu"], "FSIZE": settings["file_size"], "NOFILE": settings["files"]}
    bounds |= {"AS": settings["memory"], "NPROC": settings["processes"] + others}
    for name, value in bounds.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            with contextlib.suppress(ValueError, OSError):  # some systems do not limit memory
                resource.setrlimit(kind, (value, value))


def children() -> list[int]:
    """The processes whose parent this one is."""
    found = []
    for name in os.listdir("/proc") if linux else []:
        with contextlib.suppress(OSError, ValueError, IndexError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                        found.append(int(name))
    return found


def kill_the_rest(child: int) -> None:
    """Kill what the program left: its orphans come to this process, their reaper, generation by generation."""
    for _ in range(10_000):
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        for other in children():
            with contextlib.suppress(OSError):
                os.kill(other, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def first_process(start: Callable[[], None]) -> None:
    """The first process of a namespace: when it ends, the kernel kills all others in there."""
    prctl(PARENT_DIES, signal.SIGKILL)
    mount("proc", "/proc", "proc", 0)  # so that it shows this namespace's processes alone
    child = os.fork()
    if child == 0:
        start()
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    """Take away, start, watch, clean up."""
    began = time.monotonic()
    settings: dict[str, int] = json.loads(sys.argv[1])
    command, folder, report = sys.argv[2:], os.getcwd(), settings["report"]
    os.set_inheritable(report, False)

    def stop(*_: Any) -> None:
        raise Stop

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGTERM, stop)
    prctl(PARENT_DIES, signal.SIGTERM)
    prctl(NO_NEW_PRIVILEGES, 1)
    reaper = prctl(SUBREAPER, 1)
    user, group, strange = os.geteuid(), os.getegid(), None
    if user == 0:
        # Processes last: the first that is forked afterwards is the first of its namespace.
        own_network = unshare(NEW_MOUNTS | NEW_NET | NEW_IPC) and mount(None, "/", None, RECURSIVE | PRIVATE)
        strange = stranger(command, folder, own_network)
        own_processes = own_network and unshare(NEW_PID)
    else:
        own_network = own_processes = unshare(NEW_USER | NEW_MOUNTS | NEW_NET | NEW_IPC | NEW_PID)
        if own_network:
            with contextlib.suppress(OSError):
                write("/proc/self/setgroups", "deny")
            write("/proc/self/uid_map", f"{user} {user} 1")
            write("/proc/self/gid_map", f"{group} {group} 1")
    beyond = {
        "network": not own_network,
        "files of its user": strange is None,
        "other processes of its user": not own_processes and strange is None,
        "fork bombs": user == 0 and strange is None,  # the kernel does not count root's processes
        "leftovers": not own_processes and not reaper,
    }
    os.write(report, (json.dumps([name for name, is_beyond in beyond.items() if is_beyond]) + "\n").encode())
    # A user namespace has a count of its own since Linux 5.14.
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2]) if linux else (0, 0)
    alone = strange is not None or (own_processes and kernel >= (5, 14))
    others = 0 if alone else threads_of_user()

    def start() -> None:
        """In the child: become small, then become the program."""
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number in (signal.SIGALRM, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            if strange is not None:
                become(strange)
            prctl(PARENT_DIES, signal.SIGKILL)
            set_limits(settings, others)
            os.execve(command[0], command, {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"})
        except BaseException as error:
            os.write(2, f"sandbox: {error}\n".encode())
            os._exit(126)

    ended: dict[str, Any] = {"timed_out": False, "code": None}
    child = os.fork()
    if child == 0:
        if own_processes:
            first_process(start)
        start()
    try:
        signal.setitimer(signal.ITIMER_REAL, max(settings["wall_ms"] / 1000 - (time.monotonic() - began), 0.001))
        while True:
            pid, status = os.wait()
            if pid == child:
                ended["code"] = os.waitstatus_to_exitcode(status)
                break
    except Stop:
        ended["timed_out"] = True
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if own_processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)  # returns when the namespace is empty
    else:
        kill_the_rest(child)
    os.write(report, (json.dumps(ended) + "\n").encode())


if __name__ == "__main__":
    main()
