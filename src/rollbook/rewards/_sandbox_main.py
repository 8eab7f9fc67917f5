"""The process of the sandbox: isolates itself, starts a program, enforces the time limit, and cleans up.

Invariant: when it ends, every process that the program started has been killed, also in other sessions, unless it
reported `leftovers`.

Run as `python -I -S _sandbox_main.py SETTINGS COMMAND...` in the folder of the program; it imports only the standard
library. It writes two JSON lines to the file descriptor `report`: `unprotected` before the program starts, `timed_out`
and `code` at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

NEW_MOUNTS, NEW_USER, NEW_PID, NEW_NET, NEW_IPC = 0x20000, 0x10000000, 0x20000000, 0x40000000, 0x08000000
ANY_NAMESPACE = 0x7E020000
READ_ONLY, NO_SUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE, DETACH = 1, 2, 4, 32, 4096, 16384, 1 << 18, 2
MOUNT_SETATTR, AT_CWD, AT_RECURSIVE = 442, -100, 0x8000
PARENT_DIES, SECCOMP, SUBREAPER, NO_NEW_PRIVILEGES = 1, 22, 36, 38
WORK = "/tmp/program"
"""Folder of the program in its own root."""
INODES = 16384
libc: Any = ctypes.CDLL(None, use_errno=True)
linux = sys.platform == "linux"

# --- calls of the kernel ----------------------------------------------------------------------------------------------


class StopError(BaseException):
    """Raised at the time limit, or when the parent process asks to stop."""


def prctl(option: int, value: int, more: Any = 0) -> bool:
    """Set an attribute of this process; return whether that worked."""
    return linux and bool(libc.prctl(option, value, more, 0, 0) == 0)


def unshare(flags: int) -> bool:
    """Move to new namespaces; return whether that was allowed."""
    return linux and bool(libc.unshare(flags) == 0)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> bool:
    """Mount a file system in this mount namespace; return whether that worked."""
    encoded = [None if argument is None else argument.encode() for argument in (source, target, kind, options)]
    return bool(libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]) == 0)


def make_read_only(path: str) -> bool:
    """Make a mount and all mounts in it read-only; return whether that worked (Linux 5.12 or later)."""
    attributes = struct.pack("4Q", READ_ONLY | NO_SUID, 0, 0, 0)
    return bool(libc.syscall(MOUNT_SETATTR, AT_CWD, path.encode(), AT_RECURSIVE, attributes, len(attributes)) == 0)


def write(path: str, text: str) -> None:
    """Write to a file."""
    with open(path, "w") as file:
        file.write(text)


# --- system calls -----------------------------------------------------------------------------------------------------

UNIX, INET, INET6 = 1, 2, 10
NUMBERS = {
    # Audit architecture, clone, socket, socketpair, pivot_root, then the denied calls: unshare, setns, mount, umount2,
    # pivot_root, chroot; ptrace, process_vm_readv, process_vm_writev; persistent resources of the whole kernel: keyctl,
    # add_key, request_key, bpf, perf_event_open, userfaultfd, shmget, semget, msgget; memory outside of the limits:
    # memfd_create
    "x86_64": (0xC000003E, 56, 41, 53, 155, (272, 308, 165, 166, 155, 161, 101, 310, 311, 250, 248, 249, 321, 298, 323,
                                             29, 64, 68, 319)),
    "aarch64": (0xC00000B7, 220, 198, 199, 41, (97, 268, 40, 39, 41, 51, 117, 270, 271, 219, 217, 218, 280, 241, 282,
                                                194, 190, 186, 279)),
}  # fmt: skip
SAME_EVERYWHERE = (425, *range(428, 434), MOUNT_SETATTR, 447)
"""io_uring_setup, which bypasses the filter for sockets; open_tree to fspick and mount_setattr; memfd_secret."""
CLONE3 = 435
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def pivot_root(new: str) -> bool:
    """Make a mount the root of the namespace and detach the old one; return whether that worked."""
    number = NUMBERS.get(os.uname().machine)
    os.chdir(new)
    if number is None or libc.syscall(number[4], b".", b".") != 0:
        return False
    return bool(libc.umount2(b".", DETACH) == 0)


def filter_system_calls(families: Sequence[int]) -> bool:
    """Deny system calls, new namespaces and sockets of other families from now on; return whether that worked."""
    machine = os.uname().machine
    if not linux or machine not in NUMBERS or sys.maxsize < 1 << 32:
        return False
    audit, clone, socket, pair, _, denied = NUMBERS[machine]
    refuse = [(RETURN, 0, 0, FAIL | errno.EPERM)]
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    steps += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, FAIL | errno.ENOSYS)]  # another numbering (x32)
    # The flags of clone3 are in memory, which a filter cannot read; libraries fall back to clone.
    steps += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    steps += [(EQUAL, 0, 4, clone), (LOAD, 0, 0, 16), (ANY_BIT, 0, 1, ANY_NAMESPACE), *refuse, (RETURN, 0, 0, ALLOW)]
    for call, allowed in ((socket, families), (pair, (UNIX,))):
        tests = [(EQUAL, len(allowed) - i, 0, family) for i, family in enumerate(allowed)]
        steps += [(EQUAL, 0, len(tests) + 3, call), (LOAD, 0, 0, 16), *tests]
        steps += [(RETURN, 0, 0, FAIL | errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]
    for call in (*denied, *SAME_EVERYWHERE):
        steps += [(EQUAL, 0, 1, call), *refuse]
    steps.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    return prctl(SECCOMP, 2, ctypes.byref(program))


# --- files ------------------------------------------------------------------------------------------------------------


def show(path: str, root: str) -> bool:
    """Mount a path of the machine read-only in the new root, unless it exists; return whether that worked."""
    target = root + path
    if os.path.lexists(target) or not os.path.lexists(path):
        return True
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return True
    os.mkdir(target) if os.path.isdir(path) else write(target, "")
    return mount(path, target, None, BIND | RECURSIVE) and make_read_only(target)


def enter_root(visible: Sequence[str], folder: str, disk: int, user: int | None) -> bool:
    """Enter a read-only root that shows only `visible`, with bounded temporary storage.

    The storage is at `/tmp`, `/var/tmp` and `/dev/shm`; the files of `folder` are copied there. Requires a mount
    namespace and, for `/proc`, to be the first process of a PID namespace.
    """
    files = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            files[name] = file.read()
    bare = NO_SUID | NO_DEVICES
    if "/" in visible:
        entered = mount("/", folder, None, BIND | RECURSIVE) and make_read_only(folder)
    else:
        entered = mount("tmpfs", folder, "tmpfs", bare, "size=1m,mode=755")
        for path in ("/tmp", "/var/tmp", "/dev/shm", "/proc") if entered else ():
            os.makedirs(folder + path)
    entered = entered and mount("tmpfs", folder + "/tmp", "tmpfs", bare, f"size={disk},nr_inodes={INODES},mode=1777")
    for path in ("/var/tmp", "/dev/shm", "/run"):  # /run has the sockets of services
        if entered and os.path.isdir(folder + path) and not os.path.islink(folder + path):
            entered = mount(folder + "/tmp", folder + path, None, BIND)
    entered = entered and all(show(path, folder) for path in sorted(visible) if path != "/")
    if entered and "/" not in visible:
        entered = mount(None, folder, None, REMOUNT | BIND | READ_ONLY | bare)
    # `/proc` of this PID namespace, or an empty folder if it cannot be mounted.
    if entered and not mount("proc", folder + "/proc", "proc", bare):
        entered = mount("tmpfs", folder + "/proc", "tmpfs", bare | READ_ONLY, "size=4k,mode=755")
    if not entered or not pivot_root(folder):
        libc.umount2(folder.encode(), DETACH)
        os.chdir(folder)
        return False
    os.mkdir(WORK, 0o700)
    os.chdir(WORK)
    for name, content in files.items():
        with open(name, "wb") as file:
            file.write(content)
    if user is not None:
        give(WORK, user)
    return True


def give(folder: str, user: int) -> None:
    """Change the owner of the program's folder and its files."""
    for name in [".", *os.listdir(folder)]:
        os.chown(os.path.join(folder, name), user, user)


# --- users and limits -------------------------------------------------------------------------------------------------


def unused_user() -> int | None:
    """Return the id of an unused user, for programs started by root; `None` if there is none."""
    for user in (1_000_000_000 + os.getpid(), 65534):
        with contextlib.suppress(OSError):
            os.seteuid(user)
            os.seteuid(0)
            return user
    return None


def become(user: int) -> None:
    """Become another user permanently."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def threads_of_user() -> int:
    """Count the threads of this user, which the limit on processes includes without a user namespace."""
    count, user = 0, os.getuid()
    for name in os.listdir("/proc") if linux else []:
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def set_limits(settings: dict[str, Any], others: int) -> None:
    """Set the resource limits of each process."""
    bounds = {"CORE": 0, "CPU": settings["cpu"], "FSIZE": settings["file_size"], "NOFILE": settings["files"]}
    bounds |= {"AS": settings["memory"], "NPROC": settings["processes"] + others, "MSGQUEUE": 0}
    for name, value in bounds.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            with contextlib.suppress(ValueError, OSError):  # some systems cannot limit memory
                resource.setrlimit(kind, (value, value))


def children() -> list[int]:
    """Return the child processes of this one."""
    processes = []
    for name in os.listdir("/proc") if linux else []:
        with contextlib.suppress(OSError, ValueError, IndexError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                        processes.append(int(name))
    return processes


def kill_the_rest(child: int) -> None:
    """Kill all processes that the program left. Orphans become children of this process, their subreaper."""
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
    """Run as the first process of a PID namespace: when it ends, the kernel kills all others in it."""
    child = os.fork()
    if child == 0:
        start()
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    """Isolate this process, start the program, wait for it, and clean up."""
    began = time.monotonic()
    settings: dict[str, Any] = json.loads(sys.argv[1])
    command, folder, report = sys.argv[2:], os.getcwd(), settings["report"]
    os.set_inheritable(report, False)

    def stop(*_: Any) -> None:
        raise StopError

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGTERM, stop)
    user, group = os.geteuid(), os.getegid()
    other_user = unused_user() if user == 0 and settings["other_user"] else None
    prctl(PARENT_DIES, signal.SIGTERM)
    prctl(NO_NEW_PRIVILEGES, 1)
    reaper = prctl(SUBREAPER, 1)
    isolated = unshare(NEW_MOUNTS | NEW_NET | NEW_IPC | NEW_PID | (0 if user == 0 else NEW_USER))
    if isolated and user != 0:
        with contextlib.suppress(OSError):
            write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{user} {user} 1")
        write("/proc/self/gid_map", f"{group} {group} 1")
    # Since Linux 5.14, a user namespace has its own count of processes.
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2]) if linux else (0, 0)
    counted_alone = other_user is not None or (isolated and kernel >= (5, 14))
    others = 0 if counted_alone else threads_of_user()

    def isolate() -> None:
        """Isolate files and system calls in the child, and report the missing protections."""
        prctl(PARENT_DIES, signal.SIGKILL)
        rooted = (
            isolated
            and mount(None, "/", None, RECURSIVE | PRIVATE)
            and enter_root(settings["visible"], folder, settings["disk"], other_user)
        )
        if isolated and not rooted:
            mount("proc", "/proc", "proc", 0)  # shows only the processes of this namespace
        if not rooted and other_user is not None:
            give(folder, other_user)
        filtered = filter_system_calls((UNIX, INET, INET6) if isolated else (UNIX,))
        hidden = rooted and "/" not in settings["visible"]
        beyond = {
            "network": not isolated and not filtered,
            "files of its user": not hidden and other_user is None,
            "files of everybody": not hidden and other_user is not None,
            "disk space": not rooted,
            "other processes of its user": not isolated and other_user is None,
            "fork bombs": user == 0 and other_user is None,  # the kernel does not count root's processes
            "leftovers": not isolated and not reaper,
            "system calls": not filtered,
        }
        unprotected = [name for name, is_beyond in beyond.items() if is_beyond]
        os.write(report, (json.dumps({"unprotected": unprotected}) + "\n").encode())

    def start() -> None:
        """Drop the remaining privileges in the child, and execute the program."""
        try:
            os.setsid()
            if other_user is not None:
                become(other_user)
            prctl(PARENT_DIES, signal.SIGKILL)
            set_limits(settings, others)
            os.execve(command[0], command, {"PATH": "/usr/bin:/bin", "HOME": os.getcwd(), "LANG": "C.UTF-8"})
        except BaseException as error:
            os.write(2, f"sandbox: {error}\n".encode())
            os._exit(126)

    ended: dict[str, Any] = {"timed_out": False, "code": None}
    child = os.fork()
    if child == 0:
        try:
            for number in (signal.SIGALRM, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            isolate()
            if isolated:
                first_process(start)
            start()
        except BaseException as error:
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
        os._exit(126)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(settings["wall_ms"] / 1000 - (time.monotonic() - began), 0.001))
        while True:
            pid, status = os.wait()
            if pid == child:
                ended["code"] = os.waitstatus_to_exitcode(status)
                break
    except StopError:
        ended["timed_out"] = True
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if isolated:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)  # returns when the namespace is empty
    else:
        kill_the_rest(child)
    os.write(report, (json.dumps(ended) + "\n").encode())


if __name__ == "__main__":
    main()
