"""Files of saved trajectories: the JSON, its images as PNG, and a thread that writes them in the background.

Invariant: the JSON and its images appear together or not at all; a name always has a complete file of one save. The
caller's images are not changed; equal images are one file.
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
from rollbook.core.images import load_picture, pixels_key, read_encoded, source_key, unwrap

_PNG_MODES = frozenset(("1", "L", "LA", "RGB", "RGBA"))
"""Pixel modes that PNG has and that can be resized; others become RGB or RGBA."""
_ORIENTATION = 0x0112
"""The EXIF tag of the orientation."""
_MAX_CACHED_IMAGES = 256
"""Images of earlier saves that are not encoded again."""


@dataclass
class EncodedImage:
    """An image as PNG."""

    sha256: str
    png: bytes
    width: int
    height: int


class ImageEncoder:
    """Encode images as PNG, at most `max_size` pixels wide and high, each content once.

    Takes all forms of `rollbook.core.images`.

    >>> from PIL import Image
    >>> image = Image.new("RGB", (1024, 600))
    >>> encoder = ImageEncoder(512)
    >>> small = encoder.encode(image)
    >>> (small.width, small.height), image.size, encoder.encode(image.copy()) is small
    ((512, 300), (1024, 600), True)
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._by_content: OrderedDict[Any, EncodedImage] = OrderedDict()

    def encode(self, image: Any) -> EncodedImage:
        """Encode an image; `ValueError` if it is none, or cannot be read."""
        raw = read_encoded("image", image)
        image = None if raw is not None else load_picture("image", image)
        key: Any = hashlib.sha256(raw).digest() if raw is not None else _content(image)
        if key not in self._by_content:
            try:
                self._by_content[key] = self._encode(load_picture("image", raw) if raw is not None else image)
            except OSError as error:
                raise ValueError(f"image: got one that cannot be written as PNG: {error}") from error
            if len(self._by_content) > _MAX_CACHED_IMAGES:
                self._by_content.popitem(last=False)
        self._by_content.move_to_end(key)
        return self._by_content[key]

    def _encode(self, image: Any) -> EncodedImage:
        from PIL import Image, ImageOps

        image = ImageOps.exif_transpose(image)  # a copy
        if image.mode.startswith(("I", "F")):
            image = Image.fromarray(_gray(image))
        elif image.mode not in _PNG_MODES:
            clear = image.mode in ("PA", "La", "RGBa") or "transparency" in image.info
            image = image.convert("RGBA" if clear else "RGB")
        if max(image.size) > self.max_size:
            image = image.convert("L") if image.mode == "1" else image
            image.thumbnail((self.max_size, self.max_size), Image.Resampling.LANCZOS)
        bare = Image.new(image.mode, image.size)
        bare.paste(image)  # without the metadata of the original
        buffer = io.BytesIO()
        bare.save(buffer, "PNG")
        png = buffer.getvalue()
        return EncodedImage(hashlib.sha256(png).hexdigest(), png, *image.size)


def _content(image: Any) -> Any:
    """Return what determines the encoded image: pixels, colors and orientation."""
    return pixels_key(image), image.getexif().get(_ORIENTATION)


def _gray(image: Any) -> NDArray[np.uint8]:
    """Convert numbers of more than 8 bits to gray [H, W]: unchanged if all are in 0 to 255, else scaled."""
    pixels = np.nan_to_num(np.asarray(image).astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(pixels.min(initial=0.0)), float(pixels.max(initial=0.0))
    if low < 0 or high > 255:
        pixels = (pixels - low) * (255 / max(high - low, 1e-12))
    return np.rint(pixels).astype(np.uint8)


def flatten_images(images: Any) -> list[Any]:
    """Return the images of one sample as a flat list: of `None`, one image, or nested lists.

    >>> flatten_images(["a", [None, ["b"]]]), flatten_images(None), flatten_images("c")
    (['a', None, 'b'], [], ['c'])
    """
    if images is None:
        return []
    if not isinstance(images, (list, tuple)):
        return [images]
    return [
        image
        for nested in images
        for image in (flatten_images(nested) if isinstance(nested, (list, tuple)) else [nested])
    ]


def message_images(messages: Iterable[Any] | None) -> list[Mapping[str, Any]]:
    """Return the parts of a conversation that have an image."""
    contents = [message.get("content") for message in messages or () if isinstance(message, Mapping)]
    return [
        part
        for content in contents
        for part in (content if isinstance(content, (list, tuple)) else ())
        if isinstance(part, Mapping) and "image" in str(part.get("type", "")) and source_key(part) is not None
    ]


def is_remote(image: Any) -> bool:
    """Whether an image is a URL, which is never fetched."""
    image = unwrap(image)
    return isinstance(image, str) and image.startswith(("http://", "https://"))


# --- files ----------------------------------------------------------------------------------------------------------

IMAGES = "images"
DEFAULT_PREFIX = "trajectories"
_PARTIAL = ".partial"
_STALE_SECONDS = 3600.0
_MAX_LINKED_IMAGES = 256
"""Images of earlier saves that are hard-linked, not written, when they occur again."""


def check_prefix(prefix: object) -> str:
    """Check that a prefix of file names neither leads to another folder nor hides the file."""
    if not isinstance(prefix, str) or not prefix or prefix.startswith(".") or re.search(r"[/\\\0\n\r]", prefix):
        raise ValueError(f"prefix: got {prefix!r}, expected the beginning of a file name, without a folder")
    return prefix


def image_stem(prefix: str, step: int) -> str:
    """Return the beginning of image names: LightRFT's for the default prefix, unique for others."""
    return f"step{step}" if prefix == DEFAULT_PREFIX else f"{prefix}_step{step}"


class TrajectoryFiles:
    """The folder of a saver, created if missing, with a folder `images` if `with_images`."""

    def __init__(self, folder: Path, with_images: bool) -> None:
        self.folder = folder
        self._linked: dict[str, Path] = {}
        for path in (folder, folder / IMAGES) if with_images else (folder,):
            make_folder(path)
        self._sweep()

    def path(self, prefix: str, step: int) -> Path:
        """Return the path of the JSON of a save."""
        return self.folder / f"{prefix}_step_{step}.json"

    def write(self, prefix: str, step: int, records: Sequence[bytes], images: Mapping[str, EncodedImage]) -> Path:
        """Write a save: a JSON array with one record per line, and images by file name. Replaces an earlier save."""
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
            for partial, final in moves:
                os.replace(partial, final)
        except BaseException:
            for partial, _ in moves:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
            raise
        for folder in {final.parent for _, final in moves}:
            _sync_folder(folder)
        self._linked |= {picture.sha256: self.folder / IMAGES / name for name, picture in images.items()}
        self._linked = dict(list(self._linked.items())[-_MAX_LINKED_IMAGES:])
        self._remove_others(image_stem(prefix, step), images)
        return target

    def _image(self, path: Path, picture: EncodedImage) -> None:
        """Write an image, or link the file of an earlier save with the same content."""
        earlier = self._linked.get(picture.sha256)
        if earlier is not None:
            with contextlib.suppress(OSError):  # the file was removed, or the file system has no links
                if hashlib.sha256(earlier.read_bytes()).hexdigest() == picture.sha256:
                    os.link(earlier, path)
                    return
        _write_file(path, (picture.png,))

    def _beside(self, final: Path) -> Path:
        return final.with_name(f".{final.name}.{os.getpid()}.{os.urandom(4).hex()}{_PARTIAL}")

    def _remove_others(self, beginning: str, images: Mapping[str, EncodedImage]) -> None:
        """Remove images of an earlier save of the same name."""
        folder = self.folder / IMAGES
        if not folder.is_dir():
            return
        pattern = re.compile(rf"{re.escape(beginning)}(_rank\d+)?_exp\d+_sample\d+_img\d+\.png")
        for name in os.listdir(folder):
            if name not in images and pattern.fullmatch(name):
                with contextlib.suppress(OSError):
                    (folder / name).unlink()

    def _sweep(self) -> None:
        """Remove partial files of saves that were killed."""
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
    with contextlib.suppress(OSError):  # some file systems cannot sync folders
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


# --- background writer ----------------------------------------------------------------------------------------------

Job = Callable[[], None]


class BackgroundWriter:
    """A thread that runs jobs in order, of which at most `room` wait.

    A caller never waits. Jobs that were accepted are finished before the program ends.

    >>> numbers = []
    >>> writer = BackgroundWriter(room=4)
    >>> [writer.submit(lambda i=i: numbers.append(i)) for i in range(3)]
    [True, True, True]
    >>> writer.flush()
    >>> numbers
    [0, 1, 2]
    """

    def __init__(self, room: int) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(room)
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="rollbook saver", daemon=True)
        self._thread.start()
        weakref.finalize(self, _stop, self._jobs, self._thread)  # also when the program ends

    def submit(self, job: Job) -> bool:
        """Queue `job`, which must not raise; `False` if there is no room."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def flush(self) -> None:
        """Wait until all jobs are finished."""
        self._jobs.join()


def _work(jobs: queue.Queue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        with contextlib.suppress(Exception):  # a job reports its own errors
            job()
        del job
        jobs.task_done()


def _stop(jobs: queue.Queue[Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # a job may hold the last reference to the saver
        thread.join()


__all__ = [
    "DEFAULT_PREFIX",
    "IMAGES",
    "BackgroundWriter",
    "EncodedImage",
    "ImageEncoder",
    "TrajectoryFiles",
    "check_prefix",
    "flatten_images",
    "image_stem",
    "is_remote",
    "message_images",
]
