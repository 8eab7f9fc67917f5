"""Images of samples on their way to files: small copies, as PNG, each content once.

Invariant: an image that is given is never changed; equal content is one `Picture`, and one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import queue
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.core.files import make_folder, private_opener
from rollbook.core.images import encoded, inner, load_picture, pixels_key, source

_KEPT_MODES = frozenset(("1", "L", "LA", "RGB", "RGBA"))
"""The kinds of pixels that PNG holds and that can be made smaller; others become RGB, or RGBA."""
_ORIENTATION = 0x0112
"""EXIF's number for which way up an image is."""
_MAX_CACHED_IMAGES = 256
"""So many images of earlier saves are known again without being encoded."""


@dataclass
class Picture:
    """An image as PNG."""

    sha256: str
    png: bytes
    width: int
    height: int


class Pictures:
    """Makes pictures of whatever users give as images (see `rollbook.core.images`).

    >>> from PIL import Image
    >>> given = Image.new("RGB", (1024, 600))
    >>> pictures = Pictures(512)
    >>> made = pictures.of(given)
    >>> (made.width, made.height), given.size, pictures.of(given.copy()) is made
    ((512, 300), (1024, 600), True)
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._by_content: OrderedDict[Any, Picture] = OrderedDict()

    def of(self, given: Any) -> Picture:
        """The picture of an image; `ValueError` for what is none, or cannot be read."""
        raw = encoded("image", given)
        image = None if raw is not None else load_picture("image", given)
        key: Any = hashlib.sha256(raw).digest() if raw is not None else _content(image)
        if key not in self._by_content:
            try:
                self._by_content[key] = self._made(load_picture("image", raw) if raw is not None else image)
            except OSError as error:
                raise ValueError(f"image: got one that cannot be written as PNG: {error}") from error
            if len(self._by_content) > _MAX_CACHED_IMAGES:
                self._by_content.popitem(last=False)
        self._by_content.move_to_end(key)
        return self._by_content[key]

    def _made(self, image: Any) -> Picture:
        from PIL import Image, ImageOps

        image = ImageOps.exif_transpose(image)  # a copy, the right way up
        if image.mode.startswith(("I", "F")):
            image = Image.fromarray(_gray(image))
        elif image.mode not in _KEPT_MODES:
            clear = image.mode in ("PA", "La", "RGBa") or "transparency" in image.info
            image = image.convert("RGBA" if clear else "RGB")
        if max(image.size) > self.max_size:
            image = image.convert("L") if image.mode == "1" else image
            image.thumbnail((self.max_size, self.max_size), Image.Resampling.LANCZOS)
        bare = Image.new(image.mode, image.size)
        bare.paste(image)  # pixels alone: no profile, comment or time of the original
        data = io.BytesIO()
        bare.save(data, "PNG")
        png = data.getvalue()
        return Picture(hashlib.sha256(png).hexdigest(), png, *image.size)


def _content(image: Any) -> Any:
    """What makes the picture of an image: its pixels, their colours, and which way up they are."""
    return pixels_key(image), image.getexif().get(_ORIENTATION)


def _gray(image: Any) -> NDArray[np.uint8]:
    """(H, W) Numbers of more than 8 bits as grey: those from 0 to 255 as they are, others from least to most."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    if low < 0 or high > 255:
        values = (values - low) * (255 / max(high - low, 1e-12))
    return np.rint(values).astype(np.uint8)


def flat(given: Any) -> list[Any]:
    """The images of one sample, in order, `None` among them: of nothing, one bare image, or lists in lists.

    >>> flat(["a", [None, ["b"]]]), flat(None), flat("c")
    (['a', None, 'b'], [], ['c'])
    """
    if given is None:
        return []
    if isinstance(given, (list, tuple)):
        return [one for item in given for one in (flat(item) if isinstance(item, (list, tuple)) else [item])]
    return [given]


def shown(messages: Iterable[Any] | None) -> list[Mapping[str, Any]]:
    """The parts of a conversation that have an image, in order."""
    contents = [message.get("content") for message in messages or () if isinstance(message, Mapping)]
    return [
        part
        for content in contents
        for part in (content if isinstance(content, (list, tuple)) else ())
        if isinstance(part, Mapping) and "image" in str(part.get("type", "")) and source(part) is not None
    ]


def remote(given: Any) -> bool:
    """Whether an image is an address on the network, which is never fetched."""
    given = inner(given)
    return isinstance(given, str) and given.startswith(("http://", "https://"))


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


Job = Callable[[], None]


class Background:
    """A thread that does jobs in order, of which at most `room` wait.

    >>> done = []
    >>> worker = Background(room=4)
    >>> [worker.submit(lambda i=i: done.append(i)) for i in range(3)]
    [True, True, True]
    >>> worker.flush()
    >>> done
    [0, 1, 2]
    """

    def __init__(self, room: int) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(room)
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="rollbook saver", daemon=True)
        self._thread.start()
        weakref.finalize(self, _stop, self._jobs, self._thread)  # at the end of the program too

    def submit(self, job: Job) -> bool:
        """Have `job` done, unless there is no room; it must not raise."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def flush(self) -> None:
        """Wait until every job is done."""
        self._jobs.join()


def _work(jobs: queue.Queue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        with contextlib.suppress(Exception):  # a job reports its own errors
            job()
        del job
        jobs.task_done()


def _stop(jobs: queue.Queue[Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # the last to hold the saver may have been a job
        thread.join()
