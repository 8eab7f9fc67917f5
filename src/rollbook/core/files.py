"""Private files and folders (0600, 0700), and checks of paths that a user names.

Invariant: what is created has mode 0700 (folders) or 0600 (files), whatever the umask; the mode of what exists already
is not changed.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

FOLDER = 0o700
FILE = 0o600


def private_opener(path: str, flags: int) -> int:
    """Open a file, and create it for its owner alone: the `opener` of `open`."""
    return os.open(path, flags, FILE)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder, and those above it that are missing, for their owner alone; what exists stays as it is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     make_folder(f"{place}/runs/mine")
    ...     oct(os.stat(f"{place}/runs/mine").st_mode)[-3:]
    '700'
    """
    if not os.path.isdir(path):
        make_folder(Path(path).absolute().parent)
        with suppress(FileExistsError):
            os.mkdir(path, FOLDER)


def make_private(path: str | os.PathLike[str]) -> None:
    """Take everybody else's access from something that was just created, and from all that it holds."""
    os.chmod(path, FOLDER if os.path.isdir(path) else FILE)
    for folder, folders, files in os.walk(path):
        for name in folders:
            os.chmod(os.path.join(folder, name), FOLDER)
        for name in files:
            os.chmod(os.path.join(folder, name), FILE)


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: str | os.PathLike[str]) -> None:
    """Refuse a path that is neither a regular file nor a folder; one that does not exist passes.

    Opening a pipe waits for its other end, reading a device may never end, and replacing either removes it.

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
