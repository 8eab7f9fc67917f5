"""Files and folders that only their owner can read: prompts, answers and weights are nobody else's business.

Invariant: what is created has mode 0700 (folders) or 0600 (files), whatever the umask; the mode of what exists already
is not changed.
"""

from __future__ import annotations

import os
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
