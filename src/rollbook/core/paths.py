"""Check a path that a user names before it is opened."""

from __future__ import annotations

import os
import stat

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
