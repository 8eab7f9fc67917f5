"""Stars and notes that a reader leaves on samples: the one thing that the viewer writes, and only when told to.

Invariant: the file is only ever appended to, a line at a time, each on disk before it is acknowledged; a line that a
crash cut is passed over; the last line about a sample counts. The records themselves are not touched.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

from rollbook.core.addresses import redacted
from rollbook.core.files import private_opener

LONGEST_NOTE = 10_000
_LONGEST_LINE = 1 << 20


class Annotations:
    """What `path` has been annotated with: in a folder `annotations.jsonl`, beside a file `NAME.annotations.jsonl`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = Annotations(folder).set("4/7/0/0/a", star=True, note="reads the answer from the prompt")
    ...     Annotations(folder).all()["4/7/0/0/a"]["star"]
    True
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        place = Path(path)
        if not place.exists():
            raise ValueError(
                f"annotate: {redacted(path)} is no file or folder here, so there is no place for notes beside it"
            )
        self.path = (
            place / "annotations.jsonl" if place.is_dir() else place.with_name(place.name + ".annotations.jsonl")
        )
        if os.path.lexists(self.path) and not stat.S_ISREG(os.lstat(self.path).st_mode):
            raise ValueError(f"annotate: {self.path} is a link, which could lead anywhere, or no file")
        self._lock = threading.Lock()
        self._kept: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            with open(self.path, "rb", opener=_private) as file:
                for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
                    self._read(line)

    def _read(self, line: bytes) -> None:
        # The file may be a stranger's, as the run is.
        try:
            found = json.loads(line)
            uid, note = str(found["uid"]), str(found["note"])[:LONGEST_NOTE]
            self._kept[uid] = {"star": bool(found["star"]), "note": note, "time": float(found["time"])}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return

    def all(self) -> dict[str, dict[str, Any]]:
        """{uid: {"star", "note", "time"}} of the samples that have either."""
        with self._lock:
            return {uid: kept for uid, kept in self._kept.items() if kept["star"] or kept["note"]}

    def set(self, uid: str, *, star: bool | None = None, note: str | None = None) -> dict[str, Any]:
        """Star a sample or take the star away, write a note or, with an empty one, remove it; how it is then."""
        if note is not None and len(note) > LONGEST_NOTE:
            raise ValueError(f"note: got {len(note)} characters, expected at most {LONGEST_NOTE}")
        with self._lock:
            before = self._kept.get(uid, {"star": False, "note": ""})
            kept = {
                "star": before["star"] if star is None else star,
                "note": before["note"] if note is None else note,
                "time": time.time(),
            }
            line = json.dumps({"uid": uid, **kept}).encode()
            # A newline on either side: what a crash cut before it stays a line of its own.
            with open(self.path, "ab", opener=_private) as file:
                file.write(b"\n" + line + b"\n")
                file.flush()
                os.fsync(file.fileno())
            self._kept[uid] = kept
            return kept


def _private(path: str, flags: int) -> int:
    return private_opener(path, flags | getattr(os, "O_NOFOLLOW", 0))
