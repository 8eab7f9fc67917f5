"""Disks for tests: one that forgets, at a power loss, what was not synced, and one that fails when it is told to."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import rollbook
from rollbook.book import Book
from rollbook.book.disk import Disk, File


def open_on(disk: Disk, url: str | os.PathLike[str], **options: Any) -> Book:
    """Open a book in a folder on this disk."""
    with patch("rollbook.book.book.Disk", lambda: disk):
        return rollbook.open(url, **options)


class ForgetfulDisk(Disk):
    """Real files, and a memory of what of them would survive: bytes up to a file's last sync, entries of a folder up
    to the folder's last sync.

    `power_loss()` takes the rest away. With a `seed` some of it stays: of each folder's changes the first few, of each
    file's unsynced tail a beginning and then garbage, as a real disk may. Nothing is really synced, so it is fast.
    `attic` is a folder on the same file system where removed files wait; after the loss every call fails.
    """

    def __init__(self, attic: str | os.PathLike[str], seed: int | None = None) -> None:
        self.attic = os.fspath(attic)
        self.random = None if seed is None else random.Random(seed)
        self.off = False
        self._synced: dict[int, int] = {}  # by inode: a file keeps it when it is renamed
        self._changes: dict[str, list[Callable[[], None]]] = {}  # by folder: how each unsynced change is undone
        self._files: weakref.WeakSet[File] = weakref.WeakSet()
        os.makedirs(self.attic, exist_ok=True)

    def _powered(self) -> None:
        if self.off:
            raise OSError(errno.EIO, "The power is off")

    def _change(self, path: str, undo: Callable[[], None]) -> None:
        self._changes.setdefault(os.path.dirname(os.path.abspath(path)), []).append(undo)

    def _keep(self, path: str) -> str:
        backup = os.path.join(self.attic, os.urandom(8).hex())
        os.link(path, backup)
        return backup

    def mkdir(self, path: str) -> None:
        self._powered()
        super().mkdir(path)
        self._changes.setdefault(os.path.abspath(path), [])
        self._change(path, lambda: shutil.rmtree(path))

    def create(self, path: str) -> File:
        self._powered()
        file = super().create(path)
        self._synced[os.fstat(file.fd).st_ino] = 0
        self._change(path, lambda: os.unlink(path))
        self._files.add(file)
        return file

    def append(self, file: File, pieces: Sequence[bytes | memoryview]) -> int:
        self._powered()
        return super().append(file, pieces)

    def sync(self, file: File) -> None:
        self._powered()
        status = os.fstat(file.fd)
        self._synced[status.st_ino] = status.st_size

    def sync_folder(self, path: str) -> None:
        self._powered()
        self._changes[os.path.abspath(path)] = []

    def rename(self, source: str, target: str) -> None:
        self._powered()
        covered = self._keep(target) if os.path.exists(target) else None
        super().rename(source, target)

        def undo() -> None:
            os.replace(target, source)
            if covered is not None:
                os.replace(covered, target)

        self._change(target, undo)

    def unlink(self, path: str) -> None:
        self._powered()
        backup = self._keep(path)
        super().unlink(path)
        self._change(path, lambda: os.replace(backup, path))

    def power_loss(self) -> None:
        """Drop what was not synced, and end every lock, as the machine's end does."""
        self._powered()
        self.off = True
        for file in list(self._files):
            if file.fd >= 0:
                fcntl.flock(file.fd, fcntl.LOCK_UN)
        for changes in self._changes.values():
            stay = self.random.randint(0, len(changes)) if self.random else 0
            for undo in reversed(changes[stay:]):
                # A folder that was lost took its files along.
                with suppress(FileNotFoundError):
                    undo()
        for folder in self._changes:
            with suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.inode() in self._synced:
                        self._truncate(entry.path, self._synced[entry.inode()])

    def _truncate(self, path: str, synced: int) -> None:
        tail = os.path.getsize(path) - synced
        stays = self.random.randint(0, tail) if self.random else 0
        garbage = self.random.randbytes(self.random.randint(0, tail - stays)) if self.random else b""
        os.truncate(path, synced + stays)
        with open(path, "ab") as file:
            file.write(garbage)


class FailingDisk(Disk):
    """Fails once: the call number `at` (from 1) of one operation raises the error `code`; later ones succeed, as a
    disk's do that has space again, or a kernel's that has forgotten which pages it lost.

    A failing append first writes `written` bytes. `calls` counts every operation.
    """

    def __init__(self, operation: str, at: int, code: int, written: int = 0) -> None:
        self.operation, self.at, self.code, self.written = operation, at, code, written
        self.calls = dict.fromkeys(("create", "append", "sync", "sync_folder", "rename", "unlink"), 0)

    def _count(self, operation: str) -> bool:
        self.calls[operation] += 1
        return operation == self.operation and self.calls[operation] == self.at

    def _fail(self, path: str) -> OSError:
        return OSError(self.code, os.strerror(self.code), path)

    def create(self, path: str) -> File:
        if self._count("create"):
            raise self._fail(path)
        return super().create(path)

    def append(self, file: File, pieces: Sequence[bytes | memoryview]) -> int:
        if self._count("append"):
            super().append(file, [b"".join(pieces)[: self.written]])
            raise self._fail(file.path)
        return super().append(file, pieces)

    def sync(self, file: File) -> None:
        if self._count("sync"):
            raise self._fail(file.path)
        super().sync(file)

    def sync_folder(self, path: str) -> None:
        if self._count("sync_folder"):
            raise self._fail(path)
        super().sync_folder(path)

    def rename(self, source: str, target: str) -> None:
        if self._count("rename"):
            raise self._fail(target)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        if self._count("unlink"):
            raise self._fail(path)
        super().unlink(path)
