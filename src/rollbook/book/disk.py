"""File operations of folder books, fail-points for tests, private memory maps, and detection of network mounts.

All writes of a folder book go through `Disk`, which tests replace to simulate power loss and full disks.

Invariant: bytes that were appended and synced, in a file whose folder was synced, survive a power loss. Every system
error is an `OSError` that names the path.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rollbook.core.files import FILE_MODE, FOLDER_MODE, sync_path

failpoints_active = False
"""Whether a callback is set. Hot paths check it before they call `hit_failpoint`."""
_failpoint_callback: Callable[[str], None] | None = None


def watch_failpoints(callback: Callable[[str], None] | None) -> None:
    """Call `callback` with the name of every fail-point that this process reaches, until it is `None`.

    >>> watch_failpoints(print)
    >>> hit_failpoint("after write")
    after write
    >>> watch_failpoints(None)
    >>> hit_failpoint("after write")
    """
    global failpoints_active, _failpoint_callback
    _failpoint_callback = callback
    failpoints_active = callback is not None


def hit_failpoint(name: str) -> None:
    """Report that a fail-point is reached ("after write", "after sync", "after commit", ...)."""
    if _failpoint_callback is not None:
        _failpoint_callback(name)


MOUNTS = Path("/proc/self/mountinfo")
_MAX_WRITEV_BUFFERS = 1024  # buffers that one writev takes; POSIX promises 16, Linux and macOS take 1,024
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)

NETWORK_FILE_SYSTEMS = frozenset(
    re.findall(
        r"\S+",
        "afs beegfs ceph cifs coda davfs dfs glusterfs gpfs lizardfs lustre mmfs moosefs ncpfs nfs nfs3 nfs4 orangefs "
        "panfs prl_fs pvfs2 quobyte smb2 smb3 smbfs vboxsf vmhgfs wekafs",
    )
)
"""File systems of other machines. SQLite's log needs locks and shared memory of one kernel."""
NETWORK_FUSE_PROGRAMS = frozenset(
    re.findall(
        r"\S+",
        "alluxio-fuse beegfs blobfuse blobfuse2 ceph-fuse cfs curlftpfs cvmfs2 davfs davfs2 gcsfuse geesefs glusterfs "
        "goofys hdfs hf-mount juicefs lizardfs mfs moosefs mount-s3 mountpoint-s3 quobyte rclone s3backer s3fs s3ql "
        "seaweedfs smbnetfs sshfs vmhgfs-fuse weed",
    )
)
"""FUSE programs for files of other machines, as the type or the source of a mount names them."""


class File:
    """A file open for appending. It is closed, which releases its lock, when it is garbage-collected at the latest."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # When the interpreter exits, globals of this module may be gone: only the default argument is safe.
        if self.fd >= 0:
            try:
                close(self.fd)
            except OSError:
                self.fd = -1


@contextmanager
def _add_path_to_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Errors of calls on a descriptor have no path.
        if error.filename is None:
            error.filename = path
        raise


class Disk:
    """File operations of a book.

    >>> import tempfile
    >>> disk = Disk()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = disk.create(f"{folder}/log")
    ...     disk.append(file, [b"one, ", b"two"])
    ...     disk.sync(file)
    ...     disk.sync_folder(folder)
    ...     disk.write_atomic(f"{folder}/name", b"demo")
    ...     sorted(disk.sizes(folder).items())
    8
    [('log', 8), ('name', 4)]
    """

    def make_folder(self, path: str) -> None:
        """Create the folder and its missing parents durably."""
        if not os.path.isdir(path):
            above = os.path.dirname(os.path.abspath(path))
            self.make_folder(above)
            with suppress(FileExistsError):
                self.mkdir(path)
            self.sync_folder(above)

    def mkdir(self, path: str) -> None:
        """Create one folder; durable once its parent is synced."""
        os.mkdir(path, FOLDER_MODE)

    def create(self, path: str) -> File:
        """Create a new file, open for appending."""
        return File(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, FILE_MODE), path)

    def open_append(self, path: str) -> tuple[File, bool]:
        """Open a plain file for appending, or create it; return it and whether it was created."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = File(os.open(path, flags), path)
        except FileNotFoundError:
            return self.create(path), True
        if not stat.S_ISREG(os.fstat(file.fd).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "Not a plain file", path)
        return file, False

    def append(self, file: File, pieces: Sequence[bytes | memoryview]) -> int:
        """Append all pieces to the file, and return their size in bytes."""
        written = 0
        with _add_path_to_errors(file.path):
            for at in range(0, len(pieces), _MAX_WRITEV_BUFFERS):
                left = list(filter(len, pieces[at : at + _MAX_WRITEV_BUFFERS]))
                while left:
                    # A call may write less, after a signal, on a full disk, or if the pieces exceed 2 GiB.
                    count = os.writev(file.fd, left)
                    written += count
                    while left and count >= len(left[0]):
                        count -= len(left.pop(0))
                    if count:
                        left[0] = memoryview(left[0])[count:]
        return written

    def sync(self, file: File) -> None:
        """Wait until the file's bytes and length are on the disk.

        After an error the bytes may be lost although a second call would succeed: the kernel forgets failed pages.
        """
        with _add_path_to_errors(file.path):
            if _FULL_SYNC is not None:
                fcntl.fcntl(file.fd, _FULL_SYNC)  # fsync of macOS leaves the bytes in the drive's own memory
            else:
                os.fdatasync(file.fd)

    def sync_folder(self, path: str) -> None:
        """Wait until the folder's entries are on the disk. Otherwise a power loss may remove a new file."""
        with _add_path_to_errors(path):
            sync_path(path)

    def rename(self, source: str, target: str) -> None:
        """Rename a file within its folder, replacing the target; durable once the folder is synced."""
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        """Unlink a file; durable once the folder is synced. Open descriptors stay valid."""
        os.unlink(path)

    def write_atomic(self, path: str, data: bytes | memoryview) -> None:
        """Replace a file's content atomically: after a crash it has the old or the new content."""
        folder, name = os.path.split(os.path.abspath(path))
        file = self.create(os.path.join(folder, f".{name}.{os.urandom(8).hex()}.tmp"))
        try:
            try:
                self.append(file, [data])
                self.sync(file)
            finally:
                file.close()
            self.rename(file.path, path)
        except BaseException:
            with suppress(OSError):
                self.unlink(file.path)
            raise
        self.sync_folder(folder)

    def remove(self, path: str) -> None:
        """Remove a file durably."""
        self.unlink(path)
        self.sync_folder(os.path.dirname(os.path.abspath(path)))

    def open_read(self, path: str) -> int:
        """Open a plain file for reading and return its descriptor; links, pipes and devices raise `OSError`."""
        # Opening a pipe would wait for a writer; O_NONBLOCK is without effect on plain files.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "Not a plain file", path)
        return fd

    def is_plain(self, path: str) -> bool:
        """Return whether a plain file exists; links are not followed."""
        try:
            return stat.S_ISREG(os.lstat(path).st_mode)
        except FileNotFoundError:
            return False

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the plain files in a folder with their sizes in bytes, sorted by name, without links."""
        sizes = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                # A file may go while they are listed.
                with suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return dict(sorted(sizes.items()))

    def try_lock(self, fd: int, shared: bool = False) -> bool:
        """Try to take the file's lock, exclusively or `shared`, and return whether that succeeded.

        The lock belongs to the open file: it ends when its last descriptor is closed, however the process ends, and
        does not extend to other descriptors of the same file.
        """
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def free(self, path: str) -> int:
        """Return how many bytes this user may still write on the file system of `path`."""
        with _add_path_to_errors(path):
            stats = os.statvfs(path)
            return stats.f_bavail * stats.f_frsize

    def network_file_system(self, path: str) -> str | None:
        """Return the name of the network file system of `path`, or `None` for a local one.

        Where the system has no table of mounts (anything but Linux) it is always `None`.
        """
        try:
            table = MOUNTS.read_text(errors="surrogateescape")
        except OSError:
            return None
        return network_mount(os.path.realpath(path), table)


# --- memory maps ----------------------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MIN_MAP_BYTES = 64 << 10  # below this size, copying is faster than mapping and its page faults
_MAX_MAPS = 1 << 14  # of the 65,530 that Linux allows a process, which malloc and every library need too
_live_maps: dict[int, int] = {}  # address and length of every map that is still in use


class _Map:
    """A private, writable map of a file's bytes, unmapped when the last view of it goes.

    Python's own maps each keep a descriptor open; a reader that holds a thousand frames would use up its limit.
    """

    __slots__ = ("__array_interface__", "_address", "_length")

    def __init__(self, fd: int, start: int, stop: int) -> None:
        skip = start % mmap.ALLOCATIONGRANULARITY
        self._length = stop - start + skip
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._address = _mmap(None, self._length, access, mmap.MAP_PRIVATE, fd, start - skip)
        if self._address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        _live_maps[self._address] = self._length
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (stop - start,),
            "data": (self._address + skip, False),
        }

    def __del__(self, _munmap: Callable[[int, int], int] = _munmap, _live: dict[int, int] = _live_maps) -> None:
        if _live.pop(self._address, 0):
            _munmap(self._address, self._length)


def read_private(fd: int, start: int, stop: int, mapped: bool) -> memoryview:
    """Read bytes of an open file as private writable memory (fewer at its end), mapped if that is faster.

    The range must be within the file, and no process may truncate it: access to missing pages kills this process.
    """
    import numpy as np  # only here: the command line lists books without it

    if mapped and stop - start >= _MIN_MAP_BYTES and len(_live_maps) < _MAX_MAPS:
        try:
            return np.asarray(_Map(fd, start, stop)).data
        except OSError as error:
            # Others may have used the maps up; some file systems have none at all.
            if error.errno not in (errno.ENOMEM, errno.ENODEV):
                raise
    memory = np.empty(stop - start, dtype=np.uint8).data
    filled = 0
    while filled < len(memory):
        step = os.preadv(fd, [memory[filled:]], start + filled)
        if not step:
            break
        filled += step
    return memory[:filled]


# --- mounts ---------------------------------------------------------------------------------------------------------


def network_mount(path: str, table: str) -> str | None:
    """Return the network file system of an absolute path, by a table like /proc/self/mountinfo, or `None`.

    >>> table = '''25 1 8:1 / / rw - ext4 /dev/sda1 rw
    ... 31 25 0:40 / /shared\\\\040runs rw shared:1 - nfs4 host:/runs rw,vers=4.2
    ... 32 31 8:2 / /shared\\\\040runs/fast rw - xfs /dev/sdb rw'''
    >>> network_mount("/shared runs/demo", table), network_mount("/shared runs/fast/demo", table)
    ('nfs4', None)
    """
    longest, kind = -1, None
    for line in table.splitlines():
        mount_fields, dash, source_fields = line.partition(" - ")
        fields, kinds = mount_fields.split(" "), source_fields.split(" ")
        if not dash or len(fields) < 5 or len(kinds) < 2:
            continue
        point = _unescape(fields[4])
        inside = point.rstrip("/") + "/"
        # Of several on the same point the last one covers the others.
        if len(point) >= longest and (path + "/").startswith(inside):
            longest, kind = len(point), _network_kind(kinds)
    return kind


def _network_kind(kinds: list[str]) -> str | None:
    kind, source, options = kinds[0], kinds[1], kinds[-1].split(",")
    if kind == "9p":
        # Virtual machines and sandboxes use this protocol for files of their host, without a network.
        return kind if {"trans=tcp", "trans=rdma"} & set(options) else None
    family, _, program = kind.partition(".")
    if family in ("fuse", "fuseblk"):
        name = program or _unescape(source)
        return kind if name.lower() in NETWORK_FUSE_PROGRAMS else None
    return kind if kind.lower() in NETWORK_FILE_SYSTEMS else None


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def file_identity(path: str | os.PathLike[str] | int) -> tuple[int, int] | None:
    """Return the device and inode of a path or a descriptor, or `None` if it does not exist.

    >>> file_identity("/") == file_identity("/tmp/.."), file_identity("/nowhere")
    (True, None)
    """
    try:
        entry = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return entry.st_dev, entry.st_ino


@contextmanager
def folder_lock(folder: str | os.PathLike[str], *, shared: bool, seconds: float) -> Iterator[bool]:
    """Hold the lock of a book's folder: shared for a write transaction, alone for a repair that replaces the ledger.

    The lock is taken on the folder itself: it needs no file, moves with the folder and ends with the process.

    Returns:
        A context whose value is whether the lock was acquired within `seconds`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with folder_lock(folder, shared=True, seconds=0.0), folder_lock(folder, shared=False, seconds=0.0) as alone:
    ...         alone
    False
    """
    # Opened each time: threads and forked children that share a descriptor would also share its lock.
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + seconds
        pause = 0.0002
        while True:
            try:
                fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(pause * (0.5 + random.random()))
                    pause = min(pause * 1.5, 0.01)
                    continue
                yield False
                return
            break
        try:
            yield True
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # Closing would leave it to a child that was forked meanwhile.
    finally:
        os.close(fd)
