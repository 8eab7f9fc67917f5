"""Private files and folders, and checks of paths from users.

Invariant: new folders have mode 0700 and new files 0600, whatever the umask. Existing ones keep their mode.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600


def private_opener(path: str, flags: int) -> int:
    """Open a file, created with mode 0600 if missing: an `opener` for `open`."""
    return os.open(path, flags, FILE_MODE)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder and its missing parents with mode 0700. Existing folders keep their mode.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     make_folder(f"{place}/runs/mine")
    ...     oct(os.stat(f"{place}/runs/mine").st_mode)[-3:]
    '700'
    """
    if not os.path.isdir(path):
        make_folder(Path(path).absolute().parent)
        with suppress(FileExistsError):
            os.mkdir(path, FOLDER_MODE)


def make_private(path: str | os.PathLike[str]) -> None:
    """Set mode 0600 or 0700 on a file or folder that was just created, and on all that it contains."""
    os.chmod(path, FOLDER_MODE if os.path.isdir(path) else FILE_MODE)
    for folder, folders, files in os.walk(path):
        for name in folders:
            os.chmod(os.path.join(folder, name), FOLDER_MODE)
        for name in files:
            os.chmod(os.path.join(folder, name), FILE_MODE)


def sync_path(path: str | os.PathLike[str]) -> None:
    """Wait until the content of a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(path: str | os.PathLike[str]) -> None:
    """Wait until a file, or a folder and everything in it, is on the disk."""
    for root, folders, files in os.walk(path):
        for name in (*files, *folders):
            sync_path(os.path.join(root, name))
    sync_path(path)


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: str | os.PathLike[str]) -> None:
    """Check that a path is a regular file or a folder, or does not exist.

    Opening a pipe blocks until its other end is opened, and reading a device may never end.

    Args:
        path: The path.

    Raises:
        ValueError: `path` is a pipe, a socket or a device.

    >>> check_regular("/dev/null")
    Traceback (most recent call last):
        ...
    ValueError: /dev/null: is a device, expected a regular file or a folder
    """
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except (OSError, ValueError):
        return
    if kind in _KINDS:
        raise ValueError(f"{os.fspath(path)}: is {_KINDS[kind]}, expected a regular file or a folder")
