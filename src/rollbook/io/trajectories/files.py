"""Files of one save: the JSON and its images appear together, or not at all.

Invariant: a name always has a whole file of one save: what is written goes to other names first, is synced, and then
takes its place; whoever is killed on the way leaves the old files, or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollbook.core.files import make_folder, private_opener
from rollbook.io.trajectories.pictures import Picture

IMAGES = "images"
DEFAULT_PREFIX = "trajectories"
_PARTIAL = ".partial"
_STALE_SECONDS = 3600.0
_MAX_LINKED_IMAGES = 256
"""So many images of earlier saves get another name, rather than another file, when they are shown again."""


def check_prefix(prefix: object) -> str:
    """A prefix of file names, refused if it leads to another folder or hides the file."""
    if not isinstance(prefix, str) or not prefix or prefix.startswith(".") or re.search(r"[/\\\0\n\r]", prefix):
        raise ValueError(f"prefix: got {prefix!r}, expected the beginning of a file name, without a folder")
    return prefix


def stem(prefix: str, step: int) -> str:
    """How the images of a save begin: only with the default prefix as in LightRFT, so that no two saves share one."""
    return f"step{step}" if prefix == DEFAULT_PREFIX else f"{prefix}_step{step}"


class Files:
    """The folder of a saver, which it makes, with `images` in it if these have files of their own."""

    def __init__(self, folder: Path, with_images: bool) -> None:
        self.folder = folder
        self._linked: dict[str, Path] = {}
        for each in (folder, folder / IMAGES) if with_images else (folder,):
            make_folder(each)
        self._sweep()

    def path(self, prefix: str, step: int) -> Path:
        """Where the JSON of a save is."""
        return self.folder / f"{prefix}_step_{step}.json"

    def write(self, prefix: str, step: int, records: Sequence[bytes], images: Mapping[str, Picture]) -> Path:
        """Write a save: an array of records, one a line, and images by file name; older ones of this step go."""
        target = self.path(prefix, step)
        moves: list[tuple[Path, Path]] = []
        try:
            for name, picture in images.items():
                final = self.folder / IMAGES / name
                make_folder(final.parent)
                moves.append((self._beside(final), final))
                self._image(moves[-1][0], picture)
            moves.append((self._beside(target), target))
            body = (b"[\n", b",\n".join(records), b"\n]\n") if records else (b"[]\n",)
            _write_file(moves[-1][0], body)
            for made, final in moves:
                os.replace(made, final)
        except BaseException:
            for made, _ in moves:
                with contextlib.suppress(OSError):
                    made.unlink(missing_ok=True)
            raise
        for folder in {final.parent for _, final in moves}:
            _sync_folder(folder)
        self._linked |= {picture.sha256: self.folder / IMAGES / name for name, picture in images.items()}
        self._linked = dict(list(self._linked.items())[-_MAX_LINKED_IMAGES:])
        self._remove_others(stem(prefix, step), images)
        return target

    def _image(self, path: Path, picture: Picture) -> None:
        """The picture's file; the bytes of an earlier step's, if they are there still, under one more name."""
        known = self._linked.get(picture.sha256)
        if known is not None:
            with contextlib.suppress(OSError):  # a file that is gone, or a file system without links
                if hashlib.sha256(known.read_bytes()).hexdigest() == picture.sha256:
                    os.link(known, path)
                    return
        _write_file(path, (picture.png,))

    def _beside(self, final: Path) -> Path:
        return final.with_name(f".{final.name}.{os.getpid()}.{os.urandom(4).hex()}{_PARTIAL}")

    def _remove_others(self, beginning: str, images: Mapping[str, Picture]) -> None:
        """Remove images of an earlier save of the same name that no record shows now."""
        folder = self.folder / IMAGES
        if not folder.is_dir():
            return
        own = re.compile(rf"{re.escape(beginning)}(_rank\d+)?_exp\d+_sample\d+_img\d+\.png")
        for name in os.listdir(folder):
            if name not in images and own.fullmatch(name):
                with contextlib.suppress(OSError):
                    (folder / name).unlink()

    def _sweep(self) -> None:
        """Remove what a save that was killed long ago left behind."""
        for folder in (self.folder, self.folder / IMAGES):
            for entry in os.scandir(folder) if folder.is_dir() else ():
                with contextlib.suppress(OSError):
                    old = entry.name.endswith(_PARTIAL) and time.time() - entry.stat().st_mtime > _STALE_SECONDS
                    if old:
                        os.unlink(entry)


def _write_file(path: Path, parts: Sequence[bytes]) -> None:
    with open(path, "xb", opener=private_opener) as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems have nothing to sync in a folder
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
