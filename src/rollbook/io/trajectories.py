"""Trajectories as readable JSON files: decode tokens, select samples of a rollout, encode and write them.

Contents, in order:

- `Decoder`: token ids to text, with the end of each token;
- `repeat_score`, `count_reflections`: statistics of texts;
- `ImageEncoder`: images as PNG;
- `TrajectoryFiles`, `BackgroundWriter`: the files, and a thread that writes them;
- `TrajectorySource` (`RecordSource` for records), `TrajectorySet`: all samples, each as a `Candidate`;
- `select`: which candidates are written, each as a `Trajectory`;
- `TrajectoryEncoder`: the JSON. LightRFT's keys come first, in its order, then the rest of the record.

Invariant: entry j of every array of a `Trajectory` belongs to token `prompt + j`. A trajectory shares no memory with
its source, and sources are not changed. The texts of all tokens concatenated are the whole text. The files are strict
JSON.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import math
import os
import queue
import random
import re
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from rollbook.core.experience import Experience
from rollbook.core.fields import FIELDS, tensor_fields
from rollbook.core.files import make_folder, private_opener, sync_path
from rollbook.core.freeform import Json
from rollbook.core.ids import EID
from rollbook.core.media import (
    Medium,
    is_picture,
    load_picture,
    names_file,
    pixels_key,
    read_encoded,
    source_key,
    unwrap,
)
from rollbook.core.vocabulary import Ids, Tokenizer, Vocabulary

__all__ = [
    *["REFLECTIONS", "Decoder", "count_reflections", "repeat_score"],
    *[
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
    ],
    *[
        "SELECTION_METHODS",
        "Candidate",
        "JsonSafe",
        "RecordSource",
        "Response",
        "ResponseStats",
        "Selection",
        "Trajectory",
        "TrajectoryEncoder",
        "TrajectorySet",
        "TrajectorySource",
        "extract_response",
        "measure_response",
        "sample_std",
        "select",
        "to_numpy",
    ],
]

# --- decoding -------------------------------------------------------------------------------------------------------

_PROBES, _PROBE_LENGTH = 8, 24
"""Number and length of the sequences that test whether a tokenizer decodes by concatenation of vocabulary entries."""
_MAX_PREFIXES = 2048
"""Maximum number of prefixes to decode for a tokenizer whose text of a token depends on the tokens after it."""


class Decoder:
    """Decodes token ids: by the bytes of the tokenizer's vocabulary if that gives the same text, else by its `decode`.

    Args:
        tokenizer: Any object with `decode(ids)`, or a processor with a `tokenizer`. Without `all_special_ids`, its
            special tokens are the BOS, EOS and padding tokens.

    Raises:
        ValueError: The tokenizer has no `decode`.

    >>> class Letters:
    ...     eos_token_id = 0
    ...     def decode(self, ids):
    ...         return "".join("." if i == 0 else chr(96 + i) for i in ids)
    >>> decoder = Decoder(Letters())
    >>> text, ends = decoder.decode_with_ends([3, 1, 2, 0])
    >>> text, ends.tolist(), decoder.is_special([2, 0]).tolist()
    ('cab.', [1, 2, 3, 4], [False, True])
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not callable(getattr(tokenizer, "decode", None)):
            raise ValueError(f"tokenizer: got {type(tokenizer).__name__}, expected an object with decode(ids)")
        inner: Any = getattr(tokenizer, "tokenizer", None)
        tokenizer = inner if callable(getattr(inner, "decode", None)) else tokenizer
        self.tokenizer: Tokenizer = tokenizer
        self._options: list[dict[str, bool]] = [
            {"skip_special_tokens": False, "clean_up_tokenization_spaces": False},
            {"skip_special_tokens": False},
            {},
        ]
        ends = getattr(tokenizer, "eos_token_id", None)
        self.end_ids = frozenset(_as_int_list(ends))
        """The ids that end a response."""
        special_ids = getattr(tokenizer, "all_special_ids", None)
        if special_ids is None:
            others = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "pad"))
            special_ids = [*self.end_ids, *(i for ids in others for i in _as_int_list(ids))]
        self.special_ids = frozenset(int(i) for i in special_ids)
        self._vocabulary = self._find_vocabulary()

    def decode(self, ids: list[int]) -> str:
        """Decode `ids` with the tokenizer, special tokens included.

        Args:
            ids: The token ids.

        Returns:
            The text.
        """
        while True:
            try:
                return _valid_text(self.tokenizer.decode(ids, **self._options[0]))
            except TypeError:
                if len(self._options) == 1:
                    raise
                del self._options[0]  # the tokenizer does not have this option

    def is_special(self, ids: Ids) -> NDArray[np.bool_]:
        """Mark special tokens.

        Args:
            ids: [L] The token ids.

        Returns:
            [L] bool: which ids are special tokens.
        """
        if self._vocabulary is not None:
            return self._vocabulary.is_special(ids)
        return np.isin(np.asarray(ids, dtype=np.int64), np.array(sorted(self.special_ids), dtype=np.int64))

    def text(self, ids: Ids) -> str:
        """Decode ids of an array, special tokens included.

        Args:
            ids: [L] The token ids.

        Returns:
            The text.
        """
        if self._vocabulary is None:
            return self.decode([int(i) for i in ids])
        return self._vocabulary.decode_with_ends(ids)[0]

    def decode_with_ends(self, ids: Ids) -> tuple[str, NDArray[np.int64]]:
        """Decode ids, special tokens included, with the positions of tokens.

        Args:
            ids: [L] The token ids.

        Returns:
            The text, and [L] the index in it at which each token ends.
        """
        if self._vocabulary is not None:
            return self._vocabulary.decode_with_ends(ids)
        token_ids = [int(i) for i in ids]
        text = self.decode(token_ids)
        ends = self._ends_stepwise(token_ids, text)
        if ends is None:
            ends = self._ends_by_prefixes(token_ids, text)
        return text, np.array(ends, dtype=np.int64)

    def _find_vocabulary(self) -> Vocabulary | None:
        """Return the tokenizer's vocabulary if concatenating its entries gives the text of `decode`."""
        try:
            vocabulary = Vocabulary.from_tokenizer(self.tokenizer)
            generator = random.Random(0)
            sampled = generator.sample(range(len(vocabulary)), min(len(vocabulary), 4096))
            complete = [i for i in sampled if _is_utf8(vocabulary[i])]
            special_ids = [int(i) for i in vocabulary.special_ids()]
            for turn in range(_PROBES):
                probe = generator.choices(complete, k=_PROBE_LENGTH) if complete else []
                if special_ids and turn % 2:
                    probe[generator.randrange(_PROBE_LENGTH)] = generator.choice(special_ids)
                if not probe or vocabulary.decode_with_ends(probe)[0] != self.decode(probe):
                    return None
        except Exception:  # tokenizers of other libraries may raise anything
            return None
        return vocabulary

    def _ends_stepwise(self, ids: list[int], text: str) -> list[int] | None:
        """Return where tokens end, by decoding each with the few before it; `None` if the pieces are not `text`."""
        ends: list[int] = []
        pieces: list[str] = []
        at = start = read = 0
        decoded = ""
        for i in range(len(ids)):
            now = self.decode(ids[start : i + 1])
            if now.endswith("�") and i + 1 < len(ids):
                ends.append(at)  # the token ends inside a character
                continue
            if not now.startswith(decoded):
                return None
            pieces.append(now[len(decoded) :])
            at += len(pieces[-1])
            ends.append(at)
            start, read = read, i + 1
            decoded = self.decode(ids[start:read])
        return ends if "".join(pieces) == text else None

    def _ends_by_prefixes(self, ids: list[int], text: str) -> list[int]:
        """Return where tokens end, by decoding prefixes: all of them, or every n-th if there are many tokens."""
        stride = -(-len(ids) // _MAX_PREFIXES)
        ends, at = [], 0
        for i in range(len(ids)):
            if (i + 1) % stride == 0 or i + 1 == len(ids):
                at = max(at, _common_prefix(self.decode(ids[: i + 1]), text))
            ends.append(at)
        if ends:
            ends[-1] = len(text)
        return ends


def _valid_text(text: str) -> str:
    """Replace unpaired surrogates, which UTF-8 cannot encode."""
    if not isinstance(text, str):
        raise ValueError(f"tokenizer: decode gave {type(text).__name__}, expected a str")
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _as_int_list(token_ids: int | Iterable[int] | None) -> list[int]:
    if token_ids is None:
        return []
    return [int(i) for i in token_ids] if isinstance(token_ids, Iterable) else [int(token_ids)]


def _is_utf8(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _common_prefix(left: str, right: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# --- statistics of texts --------------------------------------------------------------------------------------------

_KEY_BITS = 63
"""Bits of a key that packs several characters: an int64 without its sign."""

REFLECTIONS = {
    "let_me_think": r"let\s+me\s+think",
    "let_me_reconsider": r"let\s+me\s+reconsider",
    "actually": "actually",
    "wait": "wait",
    "correction": "correction",
    "mistake": "mistake",
    "wrong": "wrong",
    "rethink": "rethink",
}
"""The phrases that `count_reflections` counts, as patterns of whole words, ignoring case."""

_FAST_PATTERNS = [(name, re.compile(rf"{phrase}\b"), phrase.split("\\")[0]) for name, phrase in REFLECTIONS.items()]
_SLOW_PATTERNS = {name: re.compile(rf"\b{phrase}\b", re.IGNORECASE) for name, phrase in REFLECTIONS.items()}
_SPECIAL_CASE = re.compile("[\u0130\u0131\u017f\u212a]")
"""Characters that match i, s and k with `re.IGNORECASE`, but that `str.lower` does not convert to them."""


def repeat_score(text: str) -> float:
    """Compute the share of substrings of a text that occurred before.

    The score is 2 S / (n (n + 1)), where n is the number of characters and S the sum of the lengths of the common
    prefixes of adjacent suffixes in sorted order: n (n + 1) / 2 - S is the number of distinct substrings.

    Args:
        text: The text.

    Returns:
        The score, from 0 to 1; 0 for fewer than two characters.

    >>> repeat_score("hello hello hello")
    0.43790849673202614
    >>> repeat_score("aa"), repeat_score("ab"), repeat_score("")
    (0.3333333333333333, 0.0, 0.0)
    """
    n = len(text)
    if n <= 1:
        return 0.0
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return 2 * _sum_common_prefixes(_rank_characters(codes)) / (n * (n + 1))


def _rank_characters(codes: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the ranks [n] of the characters, from 1; 0 is reserved for the end of the text."""
    top = int(codes.max())
    if top > 1 << 16:
        return np.unique(codes, return_inverse=True)[1].astype(np.int64) + 1
    seen = np.zeros(top + 1, dtype=np.int64)
    seen[codes] = 1
    return np.cumsum(seen)[codes]


def _sum_common_prefixes(ranks: NDArray[np.int64]) -> int:
    """Sum the lengths of the common prefixes of adjacent suffixes in sorted order, by prefix doubling.

    Suffixes are first sorted by w characters, packed into one number. Those that are equal so far are sorted by 2 w,
    4 w, ... characters, by their ranks in the round before. Each round has fewer suffixes.
    """
    n = len(ranks)
    bits = int(ranks.max()).bit_length()
    width = max(_KEY_BITS // bits, 1)
    keys = np.zeros(n + 1, dtype=np.int64)  # the last is the end of the text
    for k in range(min(width, n)):
        keys[: n - k] |= ranks[k:] << (bits * (width - 1 - k))
    left = np.argsort(keys[:n])
    sorted_keys = keys[left]
    differ = sorted_keys[1:] ^ sorted_keys[:-1]
    total = _shared_characters(differ[differ != 0], bits, width)
    changed = np.concatenate(([True], differ != 0))
    # The rank is 1 + the start of the run of equal suffixes, so that it stays valid when the run is split later.
    rank = np.zeros(n + 1, dtype=np.int64)
    starts = np.flatnonzero(changed)
    sizes = np.diff(starts, append=n)
    rank[left] = np.repeat(starts + 1, sizes)
    levels = [(width, rank)]
    left = left[np.repeat(sizes > 1, sizes)]
    while len(left):
        # `left`: suffixes that share their first `length` characters with another, sorted by runs of equal suffixes.
        length, rank = levels[-1]
        turn = np.argsort(rank[left] * (n + 1) + rank[np.minimum(left + length, n)])
        left = left[turn]
        run, second = rank[left], rank[np.minimum(left + length, n)]
        other_run = run[1:] != run[:-1]
        split = (second[1:] != second[:-1]) & ~other_run
        apart = np.flatnonzero(split)  # adjacent suffixes that differ after their first `length` characters
        total += len(apart) * length
        total += _sum_common_prefixes_of_pairs(left[apart] + length, left[apart + 1] + length, levels, keys, bits)
        starts = np.flatnonzero(np.concatenate(([True], split | other_run)))
        sizes = np.diff(starts, append=len(left))
        begins = np.flatnonzero(np.concatenate(([True], other_run)))
        into = np.arange(len(left)) - np.repeat(begins, np.diff(begins, append=len(left)))
        finer = rank.copy()
        finer[left] = np.repeat((run + into)[starts], sizes)
        levels.append((2 * length, finer))
        left = left[np.repeat(sizes > 1, sizes)]
    return total


def _shared_characters(differ: NDArray[np.int64], bits: int, width: int) -> int:
    """Sum the number of characters that pairs of keys share before their first difference; `differ` is their xor."""
    bounds = np.int64(1) << (bits * np.arange(1, width, dtype=np.int64))  # a difference in the last k characters
    return len(differ) * (width - 1) - int(np.searchsorted(bounds, differ, side="right").sum())


def _sum_common_prefixes_of_pairs(
    left: NDArray[np.int64],
    right: NDArray[np.int64],
    levels: list[tuple[int, NDArray[np.int64]]],
    keys: NDArray[np.int64],
    bits: int,
) -> int:
    """Sum the common prefixes of pairs of suffixes that differ; each is shorter than the length of the last level."""
    n = len(keys) - 1  # at the end of the text, the key and every rank are 0
    total = 0
    for length, rank in reversed(levels):
        equal = (rank[left] == rank[right]) & (left < n)
        if equal.any():
            total += length * int(np.count_nonzero(equal))
            left, right = left + length * equal, right + length * equal
    return total + _shared_characters(keys[left] ^ keys[right], bits, levels[0][0])


def count_reflections(text: str) -> dict[str, int]:
    """Count the phrases of `REFLECTIONS` in a text.

    Args:
        text: The text.

    Returns:
        Counts by name; empty for an empty text.

    >>> {name: count for name, count in count_reflections("Wait, actually: let  me think. Await!").items() if count}
    {'let_me_think': 1, 'actually': 1, 'wait': 1}
    """
    if not text:
        return {}
    if not text.isascii() and _SPECIAL_CASE.search(text):
        return {name: len(phrase.findall(text)) for name, phrase in _SLOW_PATTERNS.items()}
    lower = text.lower()
    # Patterns that begin with letters are fast; the word boundary before them is checked afterwards.
    return {
        name: sum(not _is_inside_word(lower, match.start()) for match in phrase.finditer(lower)) if stem in lower else 0
        for name, phrase, stem in _FAST_PATTERNS
    }


def _is_inside_word(text: str, at: int) -> bool:
    return at > 0 and (text[at - 1].isalnum() or text[at - 1] == "_")


# --- images ---------------------------------------------------------------------------------------------------------

_PNG_MODES = frozenset(("1", "L", "LA", "RGB", "RGBA"))
"""Pixel modes of PNG that can be resized; others are converted to RGB or RGBA."""
_ORIENTATION = 0x0112
"""The EXIF tag of the orientation."""
_MAX_CACHED_IMAGES = 256
"""Number of encoded images to cache."""


@dataclass
class EncodedImage:
    """An image as PNG.

    Attributes:
        sha256: Hash of the image.
        png: The encoded image.
        width: Width in pixels.
        height: Height in pixels.
    """

    sha256: str
    png: bytes
    width: int
    height: int


class ImageEncoder:
    """Encodes images as PNG, equal images once. Accepts all forms of `rollbook.core.media`.

    Args:
        max_size: Maximum width and height in pixels; larger images are scaled down.

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

    def encode(self, image: Medium) -> EncodedImage:
        """Encode an image.

        Args:
            image: The image, in any form.

        Returns:
            The encoded image.

        Raises:
            ValueError: It is not an image, or cannot be read.
        """
        raw = read_encoded("image", image)
        image = None if raw is not None else load_picture("image", image)
        key: Any = hashlib.sha256(raw).digest() if raw is not None else _content_key(image)
        if key not in self._by_content:
            try:
                self._by_content[key] = self._encode(load_picture("image", raw) if raw is not None else image)
            except OSError as error:
                raise ValueError(f"image: cannot be written as PNG: {error}") from error
            if len(self._by_content) > _MAX_CACHED_IMAGES:
                self._by_content.popitem(last=False)
        self._by_content.move_to_end(key)
        return self._by_content[key]

    def _encode(self, image: Medium) -> EncodedImage:
        from PIL import Image, ImageOps

        image = ImageOps.exif_transpose(image)  # a copy
        if image.mode.startswith(("I", "F")):
            image = Image.fromarray(_gray(image))
        elif image.mode not in _PNG_MODES:
            has_alpha = image.mode in ("PA", "La", "RGBa") or "transparency" in image.info
            image = image.convert("RGBA" if has_alpha else "RGB")
        if max(image.size) > self.max_size:
            image = image.convert("L") if image.mode == "1" else image
            image.thumbnail((self.max_size, self.max_size), Image.Resampling.LANCZOS)
        pixels_only = Image.new(image.mode, image.size)
        pixels_only.paste(image)  # without the metadata of the original
        buffer = io.BytesIO()
        pixels_only.save(buffer, "PNG")
        png = buffer.getvalue()
        return EncodedImage(hashlib.sha256(png).hexdigest(), png, *image.size)


def _content_key(image: Medium) -> Any:
    """Return a key that determines the encoded image: pixels, colors and orientation."""
    return pixels_key(image), image.getexif().get(_ORIENTATION)


def _gray(image: Medium) -> NDArray[np.uint8]:
    """Convert pixels of more than 8 bits to 8-bit gray [H, W]: unchanged if all are in 0 to 255, else scaled."""
    pixels = np.nan_to_num(np.asarray(image).astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(pixels.min(initial=0.0)), float(pixels.max(initial=0.0))
    if low < 0 or high > 255:
        pixels = (pixels - low) * (255 / max(high - low, 1e-12))
    return np.rint(pixels).astype(np.uint8)


def flatten_images(images: Medium) -> list[Any]:
    """Return the images of one sample as a flat list.

    Args:
        images: `None`, one image, or nested lists of images.

    Returns:
        The images, in order.

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
    """Return the parts of a conversation that have an image.

    Args:
        messages: Chat messages.

    Returns:
        The parts, in order.

    >>> content = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What is this?"}]
    >>> message_images([{"role": "user", "content": content}])
    [{'type': 'image', 'path': 'a.png'}]
    """
    contents = [message.get("content") for message in messages or () if isinstance(message, Mapping)]
    return [
        part
        for content in contents
        for part in (content if isinstance(content, (list, tuple)) else ())
        if isinstance(part, Mapping) and "image" in str(part.get("type", "")) and source_key(part) is not None
    ]


def is_remote(image: Medium) -> bool:
    """Return whether an image is a URL, which is never fetched.

    Args:
        image: An image in any form.

    Returns:
        Whether the image is a URL.

    >>> is_remote("https://host/a.png"), is_remote("a.png")
    (True, False)
    """
    image = unwrap(image)
    return isinstance(image, str) and image.startswith(("http://", "https://"))


# --- files ----------------------------------------------------------------------------------------------------------

IMAGES = "images"
DEFAULT_PREFIX = "trajectories"
_PARTIAL = ".partial"
_STALE_SECONDS = 3600.0
_MAX_LINKED_IMAGES = 256
"""Number of images of earlier saves that are hard-linked instead of written when they occur again."""


def check_prefix(prefix: str) -> str:
    """Check that a prefix of file names contains no folder and does not make the file hidden.

    Args:
        prefix: The prefix.

    Returns:
        The prefix.

    Raises:
        ValueError: It is empty, begins with a dot, or has a separator or a newline.

    >>> check_prefix("trajectories")
    'trajectories'
    """
    if not isinstance(prefix, str) or not prefix or prefix.startswith(".") or re.search(r"[/\\\0\n\r]", prefix):
        raise ValueError(f"prefix: got {prefix!r}, expected the beginning of a file name, without a folder")
    return prefix


def image_stem(prefix: str, step: int) -> str:
    """Return the start of image file names: LightRFT's for the default prefix; others contain the prefix.

    Args:
        prefix: Prefix of the files.
        step: Training step.

    Returns:
        The start of the names.

    >>> image_stem("trajectories", 3), image_stem("eval", 3)
    ('step3', 'eval_step3')
    """
    return f"step{step}" if prefix == DEFAULT_PREFIX else f"{prefix}_step{step}"


class TrajectoryFiles:
    """Writes saves to a folder, which is created if missing.

    Args:
        folder: The folder.
        with_images: Whether to create a folder `images` in it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = TrajectoryFiles(Path(folder, "saved"), with_images=False)
    ...     files.write("trajectories", 3, [b'{"reward": 1.0}'], {}).name
    'trajectories_step_3.json'
    """

    def __init__(self, folder: Path, with_images: bool) -> None:
        self.folder = folder
        self._linked: dict[str, Path] = {}
        for path in (folder, folder / IMAGES) if with_images else (folder,):
            make_folder(path)
        self._remove_stale_partials()

    def path(self, prefix: str, step: int) -> Path:
        """Return the path of the JSON of a save.

        Args:
            prefix: Prefix of the files.
            step: Training step.

        Returns:
            The path.
        """
        return self.folder / f"{prefix}_step_{step}.json"

    def write(self, prefix: str, step: int, records: Sequence[bytes], images: Mapping[str, EncodedImage]) -> Path:
        """Write a save: a JSON array with one record per line, and images by file name. Replaces an earlier save.

        Args:
            prefix: Prefix of the files.
            step: Training step.
            records: JSON of each record.
            images: Encoded images by file name.

        Returns:
            The path of the JSON.
        """
        target = self.path(prefix, step)
        moves: list[tuple[Path, Path]] = []
        try:
            for name, picture in images.items():
                final = self.folder / IMAGES / name
                make_folder(final.parent)
                moves.append((self._partial_path(final), final))
                self._write_image(moves[-1][0], picture)
            moves.append((self._partial_path(target), target))
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
            with contextlib.suppress(OSError):  # some file systems cannot sync folders
                sync_path(folder)
        self._linked |= {picture.sha256: self.folder / IMAGES / name for name, picture in images.items()}
        self._linked = dict(list(self._linked.items())[-_MAX_LINKED_IMAGES:])
        self._remove_others(image_stem(prefix, step), images)
        return target

    def _write_image(self, path: Path, picture: EncodedImage) -> None:
        """Write an image, or link the file of an earlier save with the same content."""
        earlier = self._linked.get(picture.sha256)
        if earlier is not None:
            with contextlib.suppress(OSError):  # the file was removed, or the file system has no links
                if hashlib.sha256(earlier.read_bytes()).hexdigest() == picture.sha256:
                    os.link(earlier, path)
                    return
        _write_file(path, (picture.png,))

    def _partial_path(self, final: Path) -> Path:
        return final.with_name(f".{final.name}.{os.getpid()}.{os.urandom(4).hex()}{_PARTIAL}")

    def _remove_others(self, stem: str, images: Mapping[str, EncodedImage]) -> None:
        """Remove images of an earlier save of the same name that are not in `images`."""
        folder = self.folder / IMAGES
        if not folder.is_dir():
            return
        pattern = re.compile(rf"{re.escape(stem)}(_rank\d+)?_exp\d+_sample\d+_img\d+\.png")
        for name in os.listdir(folder):
            if name not in images and pattern.fullmatch(name):
                with contextlib.suppress(OSError):
                    (folder / name).unlink()

    def _remove_stale_partials(self) -> None:
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


# --- background writer ----------------------------------------------------------------------------------------------

Job = Callable[[], None]


class BackgroundWriter:
    """A thread that runs jobs in order. Accepted jobs finish before the program ends.

    Args:
        max_pending: Maximum number of queued jobs.

    >>> numbers = []
    >>> writer = BackgroundWriter(max_pending=4)
    >>> [writer.submit(lambda i=i: numbers.append(i)) for i in range(3)]
    [True, True, True]
    >>> writer.flush()
    >>> numbers
    [0, 1, 2]
    """

    def __init__(self, max_pending: int) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_pending)
        self._thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name="rollbook saver", daemon=True)
        self._thread.start()
        weakref.finalize(self, _stop, self._jobs, self._thread)  # also when the program ends

    def submit(self, job: Job) -> bool:
        """Queue a job, which must not raise, without waiting; return `False` if the queue is full.

        Args:
            job: A function without arguments.

        Returns:
            Whether the job was queued.
        """
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def flush(self) -> None:
        """Wait until all jobs are finished."""
        self._jobs.join()


def _run_jobs(jobs: queue.Queue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        with contextlib.suppress(Exception):  # a job reports its own errors
            job()
        del job
        jobs.task_done()


def _stop(jobs: queue.Queue[Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # a job may hold the last reference to the saver
        thread.join()


# --- candidates and trajectories ------------------------------------------------------------------------------------

ARRAYS = {
    "advantages": "advantages",
    "returns": "return",
    "old_logprobs": "action_log_probs",
    "values": "values",
    "ref_logprobs": "base_action_log_probs",
    "entropy": "action_entropy",
    "kl": "kl",
}
"""Per-token fields, and their names in the JSON. The first four are the keys of LightRFT's files, in its order."""
NUMBERS = tuple(ARRAYS.values())[:4]
"""LightRFT's arrays, which may be one number per sample."""
_TEXT_FIELDS = ("finish_reason", "truncate_status", "parent", "group_size", "prompt_text", "response_text")
_FREE_FORM_FIELDS = ("messages", "tools", "sampling")
_TRUNCATED = ("length", "response_truncated", "prompt_truncated")


@dataclass(slots=True)
class Candidate:
    """The properties of a sample by which it is selected.

    Args:
        rank: Process that has the sample.
        index: Index among the samples of its process.
        experience: Index of its experience in what the caller passed.
        row: Its row in the experience.
        uid: Id of the sample.
        group: Id of its group, the same for all samples of a prompt.
        has_id: Whether the sample came with an id. Otherwise its id is a hash of its content.
        reward: Its reward, if any.
        tokens: Number of response tokens.
        truncated: Whether the response was truncated.
        error: Whether the sample failed.
        mismatch: Largest difference between the trainer's and the engine's log-prob of a token.
    """

    rank: int
    index: int
    experience: int
    row: int
    uid: str
    group: str
    has_id: bool
    reward: float | None
    tokens: int
    truncated: bool = False
    error: bool = False
    mismatch: float | None = None


@dataclass
class Trajectory:
    """One sample as it is written: L tokens, of which the last R are the response.

    Attributes:
        rank: Process that has the sample.
        experience: Index of its experience in what the caller passed.
        row: Its row in the experience.
        eid: Id of the sample.
        has_id: Whether the sample came with an id.
        tokens: [L] Token ids.
        mask: [R] True on tokens that the model sampled.
        arrays: [R] each, by their names in the JSON.
        numbers: Fields with one number for all tokens, by their names in the JSON.
        padded: [S] The tokens with the padding that the source has, if any.
        label: Label of the prompt.
        reference: Reference answer of the prompt.
        info: Other data of the sample.
        reward: Its reward, if any.
        reward_parts: Parts of the reward, by name.
        segments: Segments of a multi-turn sample.
        fields: Further fields of a record, by name.
        images: Images of the prompt; `None` for one that cannot be read.
        rejected: Token ids of the rejected answer of a preference pair.
        nonfinite: Number of NaN and infinite values of each field.
        notes: Parts of the sample that could not be written, with the reason.
        reason: Why it was selected.
        weight: Number of samples that it represents, if it was drawn at random.
    """

    rank: int
    experience: int
    row: int
    eid: EID
    has_id: bool
    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    numbers: dict[str, float | None] = field(default_factory=dict)
    padded: NDArray[np.int64] | None = None
    label: Any = None
    reference: Any = None
    info: Any = None
    reward: float | None = None
    reward_parts: dict[str, Any] = field(default_factory=dict)
    segments: Any = None
    fields: dict[str, Any] = field(default_factory=dict)
    images: list[EncodedImage | None] = field(default_factory=list)
    rejected: NDArray[np.int64] | None = None
    nonfinite: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reason: str = ""
    weight: float | None = None

    @property
    def prompt(self) -> int:
        """Number of tokens before the response."""
        return len(self.tokens) - len(self.mask)


# --- JSON-safe values -----------------------------------------------------------------------------------------------

_MAX_DEPTH = 32
_MAX_ELEMENTS = 1 << 18
"""Larger tensors and arrays are replaced by their type and shape."""
_MAX_TEXT = 1 << 16
"""Bytes, and the text of unknown objects, are truncated to this length."""
_INT64 = 1 << 63
_HALF_PRECISION = (torch.bfloat16, torch.float16)


class JsonSafe:
    """Converts any values to strict JSON, and counts non-finite numbers by path. Never raises.

    Tensors and arrays become lists (numbers, if they have no dimensions), tuples and sets become lists, and keys become
    text. Bytes become text if they are UTF-8, else `{"$bytes": hexadecimal}`. Images and other objects become a
    description.

    Args:
        references: By `id()` of a message part with an image, or of an image's bytes, the text to write instead.

    >>> safe = JsonSafe()
    >>> safe.convert({"a": torch.tensor([1.0, float("nan")]), 2: {3}, "b": b"x", "c": np.float32(0.5)}, "info")
    {'a': [1.0, None], '2': [3], 'b': 'x', 'c': 0.5}
    >>> safe.nonfinite
    {'info.a': {'nan': 1}}
    """

    def __init__(self, references: Mapping[int, str] | None = None) -> None:
        self.nonfinite: dict[str, dict[str, int]] = {}
        self.references = references or {}

    def convert(self, value: Json, path: str, depth: int = 0) -> Any:
        """Convert a value.

        Args:
            value: The value.
            path: Its path in the record, under which non-finite numbers are counted.
            depth: Number of containers around it.

        Returns:
            The value in JSON types.
        """
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self.text(value)
        if kind is float:
            return self.number(value, path)
        if kind is int:
            return value if -_INT64 <= value < 2 * _INT64 else str(value)
        if depth >= _MAX_DEPTH:
            return f"{kind.__name__}, too deep to be shown"
        try:
            return self._convert(value, path, depth)
        except Exception as error:  # a user's object may raise anything
            return f"{kind.__name__}, which cannot be shown ({type(error).__name__})"

    def _convert(self, value: Json, path: str, depth: int) -> Any:
        if isinstance(value, Mapping):
            image_key = source_key(value) if id(value) in self.references else None
            converted = {}
            for key, element in value.items():
                name = self.text(key if isinstance(key, str) else str(key))
                if image_key is not None and key == image_key:
                    converted[name] = self.references[id(value)]
                else:
                    converted[name] = self.convert(element, f"{path}.{name}", depth + 1)
            return converted
        if isinstance(value, (list, tuple)):
            return [self.convert(element, f"{path}[{i}]", depth + 1) for i, element in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            elements = sorted(value, key=lambda element: (str(type(element)), element))
            return [self.convert(element, path, depth + 1) for element in elements]
        if isinstance(value, torch.Tensor):
            if value.numel() > _MAX_ELEMENTS or value.is_meta:
                return f"tensor of {value.dtype}, shape {list(value.shape)}"
            return self.array(to_numpy(value), path)
        if isinstance(value, np.generic | np.ndarray):
            array = np.asarray(value)
            if array.size > _MAX_ELEMENTS or array.dtype.names is not None:
                return f"array of {array.dtype}, shape {list(array.shape)}"
            return self.array(array, path)
        if isinstance(value, bytes) and id(value) in self.references:
            return self.references[id(value)]
        if isinstance(value, (bytes, bytearray, memoryview)):
            head = bytes(value[:_MAX_TEXT])
            try:
                return head.decode()
            except UnicodeDecodeError:
                return {"$bytes": head.hex()}
        if is_picture(value):
            return f"image {value.width}x{value.height} {value.mode}"
        if isinstance(value, str):
            return self.text(str(value))
        if isinstance(value, (bool, int, float)):
            return self.convert(float(value) if isinstance(value, float) else int(value), path, depth)
        return self.text(str(value)[:_MAX_TEXT])

    def text(self, text: str) -> str:
        """Replace unpaired surrogates, which UTF-8 cannot encode, by U+FFFD.

        Args:
            text: The text.

        Returns:
            Text that UTF-8 can encode.
        """
        return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")

    def number(self, number: float, path: str) -> float | None:
        """Convert a number.

        Args:
            number: The number.
            path: Its path in the record.

        Returns:
            The number, or `None` if it is not finite.
        """
        if math.isfinite(number):
            return number
        self._count(path, repr(number), 1)
        return None

    def array(self, array: NDArray[Any], path: str) -> Any:
        """Convert an array to lists, or to a number if it has no dimensions.

        Args:
            array: The array.
            path: Its path in the record.

        Returns:
            The numbers, with `None` for those that are not finite.
        """
        if array.dtype.kind == "f":
            self.count_nonfinite(array, path)
            objects: Any = array.astype(object)
            objects[~np.isfinite(array)] = None
            return objects.tolist()
        if array.dtype.kind in "biu":
            return array.tolist()
        return self.convert(array.tolist(), path, 1)

    def count_nonfinite(self, array: NDArray[Any], path: str) -> None:
        """Count the non-finite numbers of an array.

        Args:
            array: The array.
            path: Its path in the record.
        """
        if array.dtype.kind != "f" or np.isfinite(array).all():
            return
        for name, count in (
            ("nan", np.isnan(array).sum()),
            ("inf", np.isposinf(array).sum()),
            ("-inf", np.isneginf(array).sum()),
        ):
            if count:
                self._count(path, name, int(count))

    def _count(self, path: str, name: str, count: int) -> None:
        counts = self.nonfinite.setdefault(path, {})
        counts[name] = counts.get(name, 0) + count


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Copy a tensor to an array. Types that numpy lacks, and float16, become float32.

    Args:
        tensor: A tensor on any device.

    Returns:
        The array, in memory of the host.

    >>> to_numpy(torch.ones(1, dtype=torch.bfloat16))
    array([1.], dtype=float32)
    """
    tensor = tensor.detach()
    if tensor.dtype in _HALF_PRECISION or str(tensor.dtype).startswith("torch.float8"):
        tensor = tensor.float()
    return np.array(tensor.cpu().numpy())


def as_number(value: Json) -> float | None:
    """Convert a number, or a tensor or array of one, to a float; anything else to `None`."""
    size = value.numel() if isinstance(value, torch.Tensor) else value.size if isinstance(value, np.ndarray) else 0
    value = value.item() if size == 1 else value
    return float(value) if isinstance(value, (int, float, np.integer, np.floating)) else None


# --- sources --------------------------------------------------------------------------------------------------------


class TrajectorySource(ABC):
    """Samples whose fields are read from the caller's objects on demand.

    Args:
        places: (experience, row) of each sample: the index of the object that the caller passed, and the row in it.
    """

    def __init__(self, places: list[tuple[int, int]]) -> None:
        self.places = places

    @abstractmethod
    def read(self, i: int, name: str) -> NDArray[Any] | None:
        """Return a per-token field of sample i, by its name in a record, or `kl`, on the host and without padding.

        Args:
            i: Number of the sample.
            name: Name of the field, or `kl`.

        Returns:
            [R] The numbers, or `None`.
        """

    @abstractmethod
    def extras(self, i: int) -> dict[str, Callable[[], NDArray[Any]]]:
        """Return functions that read further [R] arrays of sample i, by their names in a record.

        Args:
            i: Number of the sample.

        Returns:
            The functions by name.
        """

    @abstractmethod
    def info(self, i: int) -> Mapping[Any, Any] | None:
        """Return the `info` of sample i.

        Args:
            i: Number of the sample.

        Returns:
            The `info`, or `None`.
        """

    @abstractmethod
    def entry(self, i: int, name: str) -> Any:
        """Return the `eid`, `labels`, `references` or `raw_images` of sample i.

        Args:
            i: Number of the sample.
            name: Name of the entry.

        Returns:
            The entry, or `None`.
        """

    @abstractmethod
    def padded(self, i: int) -> NDArray[np.int64] | None:
        """Return the token ids of a sample with their padding.

        Args:
            i: Number of the sample.

        Returns:
            [S] The ids, or `None` if there is no padding.
        """

    @abstractmethod
    def slots(self, i: int) -> int:
        """Return the number of response tokens of a sample, sampled or not.

        Args:
            i: Number of the sample.

        Returns:
            R.
        """

    def tokens(self, i: int) -> NDArray[np.int64]:
        """Return the token ids of a sample.

        Args:
            i: Number of the sample.

        Returns:
            [L] The ids.

        Raises:
            ValueError: The sample has no tokens.
        """
        ids = self.read(i, "tokens")
        if ids is None:
            raise ValueError("tokens: got None, expected token ids")
        return ids.astype(np.int64)

    def fill(self, i: int, trajectory: Trajectory, safe: JsonSafe, encoder: ImageEncoder) -> None:
        """Add everything but the per-token arrays of sample i.

        Args:
            i: Number of the sample.
            trajectory: The trajectory, which is changed.
            safe: Converts values to JSON types.
            encoder: Encodes images.
        """
        batch_info = self.info(i)
        info = batch_info or {}
        trajectory.label = safe.convert(self.entry(i, "labels"), "label")
        trajectory.reference = safe.convert(self.entry(i, "references"), "reference")
        record_info = info.get("info")
        record_info = record_info if isinstance(record_info, Mapping) else {}
        images = flatten_images(self.entry(i, "raw_images")) or recorded_images(record_info)
        trajectory.images = encode_images(images, encoder, trajectory.notes)
        safe.references = image_references(images, trajectory.images)
        trajectory.info = safe.convert(batch_info, "info")
        trajectory.reward_parts = reward_parts(info.get("reward_metrics", info.get("metrics")), safe)
        trajectory.segments = safe.convert(info.get("segments", record_info.get("segments")), "segments")
        for name in _TEXT_FIELDS:
            if isinstance(content := info.get(name), (str, int)):
                trajectory.fields[name] = content


class RecordSource(TrajectorySource):
    """Samples of records.

    Args:
        places: (experience, row) of each sample.
        rows: The records.

    >>> record = Experience(tokens=[1, 2, 3], prompt_length=1, entropy=[0.5, 0.25], reward=1.0)
    >>> source = RecordSource([(0, 0)], [record])
    >>> source.slots(0), source.read(0, "entropy").tolist(), source.info(0)
    (2, [0.5, 0.25], {'reward': 1.0})
    """

    def __init__(self, places: list[tuple[int, int]], rows: Sequence[Experience]) -> None:
        super().__init__(places)
        self.rows = rows

    def read(self, i: int, name: str) -> NDArray[Any] | None:
        """See `TrajectorySource.read`."""
        row = self.rows[i]
        if name == "tokens":
            parts = [row.tokens, row.chosen] if row.experience_type == "dpo" else [row.tokens]
            return np.concatenate([to_numpy(column) for column in parts if column is not None])
        if name == "old_logprobs" and row.old_logprobs is None:
            name = "logprobs"
        return None if getattr(row, name, None) is None else self._response(i, name)

    def _response(self, i: int, name: str) -> NDArray[Any]:
        per_token = getattr(self.rows[i], name)
        if isinstance(per_token, int):
            return np.full(self.slots(i), per_token, dtype=np.int64)
        return to_numpy(per_token)

    def extras(self, i: int) -> dict[str, Callable[[], NDArray[Any]]]:
        """See `TrajectorySource.extras`."""
        row = self.rows[i]
        read_by_name = {*ARRAYS, "action_mask"}
        if row.old_logprobs is None:
            read_by_name.add("logprobs")  # else the engine's are next to the trainer's
        return {
            tensor_field.name: partial(self._response, i, tensor_field.name)
            for tensor_field in tensor_fields("response")
            if not tensor_field.trailing
            and tensor_field.name not in read_by_name
            and getattr(row, tensor_field.name) is not None
        }

    def padded(self, i: int) -> None:
        """Return `None`, since records have no padding. See `TrajectorySource.padded`."""

    def info(self, i: int) -> Mapping[Any, Any]:
        """See `TrajectorySource.info`."""
        row = self.rows[i]
        outcome = {"finish_reason": row.finish_reason, "truncate_status": row.truncate_status, "reward": row.reward}
        return {**row.info, **{name: content for name, content in outcome.items() if content is not None}}

    def entry(self, i: int, name: str) -> Any:
        """See `TrajectorySource.entry`."""
        return self.rows[i].eid if name == "eid" else None

    def slots(self, i: int) -> int:
        """See `TrajectorySource.slots`."""
        row = self.rows[i]
        if row.experience_type == "dpo":
            return 0 if row.chosen is None else len(row.chosen)
        if row.truncate_status == "prompt_truncated" and row.logprobs is not None and row.logprobs.dim():
            return min(len(row.logprobs), len(row.tokens))
        return max(len(row.tokens) - row.prompt_length, 0)

    def fill(self, i: int, trajectory: Trajectory, safe: JsonSafe, encoder: ImageEncoder) -> None:
        """See `TrajectorySource.fill`."""
        row = self.rows[i]
        trajectory.label = safe.convert(row.info.get("label"), "label")
        trajectory.reference = safe.convert(row.info.get("reference"), "reference")
        images = [*message_images(row.messages), *recorded_images(row.info)]
        contents = [None if names_file(image) and not is_remote(image) else image for image in images]
        trajectory.images = encode_images(contents, encoder, trajectory.notes)
        trajectory.notes += [
            f"images[{k}]: a path in a record, not opened" for k, image in enumerate(images) if contents[k] is not image
        ]
        safe.references = image_references(images, trajectory.images)
        trajectory.info = safe.convert(row.info, "info")
        trajectory.reward_parts = reward_parts(row.metrics, safe)
        trajectory.segments = safe.convert(row.info.get("segments"), "segments")
        trajectory.fields["kind"] = row.experience_type
        for name in (*_TEXT_FIELDS, *_FREE_FORM_FIELDS):
            if (content := getattr(row, name)) is not None:
                trajectory.fields[name] = safe.convert(content, name)
        if row.rejected is not None:
            trajectory.rejected = to_numpy(row.rejected).astype(np.int64)


def reward_parts(metrics: Json, safe: JsonSafe) -> dict[str, Any]:
    """Return the numbers among the metrics of a sample."""
    if not isinstance(metrics, Mapping):
        return {}
    converted = safe.convert(metrics, "reward_parts")
    return {
        name: component
        for name, component in converted.items()
        if isinstance(component, (int, float)) or component is None
    }


def recorded_images(info: Mapping[Any, Any]) -> list[bytes]:
    """Return the images in a record's `info["images"]`; see `rollbook.core.media.encode_for_record`."""
    images = info.get("images")
    return [image for image in images if isinstance(image, bytes)] if isinstance(images, (list, tuple)) else []


def image_references(images: Sequence[Any], encoded: Sequence[EncodedImage | None]) -> dict[int, str]:
    """Return the `references` of `JsonSafe`: a hash for each image that was encoded."""
    pairs = zip(images, encoded, strict=True)
    return {id(image): f"sha256:{picture.sha256}" for image, picture in pairs if picture is not None}


def encode_images(images: Iterable[Any], encoder: ImageEncoder, notes: list[str]) -> list[EncodedImage | None]:
    """Encode the images of a sample: `None` for a missing, remote or unreadable one. The reasons go to `notes`."""
    encoded: list[EncodedImage | None] = []
    for k, image in enumerate(images):
        picture = None
        if image is not None and not is_remote(image):
            try:
                picture = encoder.encode(image)
            except Exception as error:  # images come from many libraries, with their own exceptions
                notes.append(f"images[{k}]: {error}")
        encoded.append(picture)
    return encoded


class TrajectorySet:
    """All samples of a process: a `Candidate` for each, and its `Trajectory` on demand.

    A sample without an id gets a hash of its content as id, which is the same in every process that has the same
    samples in the same order.

    Args:
        sources: The samples.
        step: The training step, which is part of the ids of samples that have none.
        rank: The process.
        problems: A list to which the reason is added for each sample that cannot be read. The others are not affected.

    >>> records = [Experience(tokens=[1, 2, 3], reward=1.0, eid=EID(0, "a", suffix="x"))]
    >>> samples = TrajectorySet([RecordSource([(0, 0)], records)], step=3, rank=0, problems=[])
    >>> samples.candidates[0].uid, samples.candidates[0].reward
    ('0/a/0/0/x', 1.0)
    >>> samples.trajectory(0, ImageEncoder(512)).tokens.tolist()
    [1, 2, 3]
    """

    def __init__(self, sources: Iterable[TrajectorySource], step: int, rank: int, problems: list[str]) -> None:
        self.problems = problems
        self.rank, self.step = rank, step
        self.candidates: list[Candidate] = []
        self._places: list[tuple[TrajectorySource, int]] = []
        self._ids: list[EID] = []
        self._runs: dict[str, int] = {}
        for samples in sources:
            for i, (experience, row) in enumerate(samples.places):
                try:
                    self._add(samples, i, experience, row)
                except Exception as error:
                    self.problems.append(f"experiences[{experience}], sample {row}: {error}")

    def __len__(self) -> int:
        return len(self.candidates)

    def _add(self, samples: TrajectorySource, i: int, experience: int, row: int) -> None:
        slots = samples.slots(i)
        mask = samples.read(i, "action_mask")
        eid, info = samples.entry(i, "eid"), samples.info(i) or {}
        has_id = isinstance(eid, EID)
        if not has_id:
            eid = self._id_by_content(samples.tokens(i), slots)
        reward = as_number(info.get("reward"))
        finish_reason = info.get("finish_reason")
        failed = info.get("error") is not None or info.get("reward_error") is not None or finish_reason == "error"
        self.candidates.append(
            Candidate(
                rank=self.rank,
                index=len(self.candidates),
                experience=experience,
                row=row,
                uid=eid.uid,
                group=eid.tid,
                has_id=has_id,
                reward=reward,
                tokens=slots if mask is None or len(mask) != slots else int(np.count_nonzero(mask)),
                truncated=finish_reason in _TRUNCATED or info.get("truncate_status") in _TRUNCATED,
                error=failed or (reward is not None and math.isnan(reward)),
                mismatch=self._mismatch(samples, i, mask),
            )
        )
        self._places.append((samples, i))
        self._ids.append(eid)

    def _id_by_content(self, tokens: NDArray[np.int64], slots: int) -> EID:
        ids = tokens.astype("<i8")
        task = hashlib.blake2b(ids[: len(ids) - slots].tobytes(), digest_size=8).hexdigest()
        run = self._runs[task] = self._runs.get(task, -1) + 1
        return EID(self.step, task, run, 0, hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest())

    @staticmethod
    def _mismatch(samples: TrajectorySource, i: int, mask: NDArray[Any] | None) -> float | None:
        extras = samples.extras(i)
        trainer = samples.read(i, "old_logprobs") if "logprobs" in extras else None
        if trainer is None:
            return None
        engine = extras["logprobs"]()
        if len(engine) != len(trainer):
            return None
        difference = np.abs(trainer.astype(np.float64) - engine)
        difference = difference[mask != 0] if mask is not None and len(mask) == len(difference) else difference
        difference = difference[np.isfinite(difference)]
        return float(difference.max()) if len(difference) else None

    def trajectory(self, index: int, encoder: ImageEncoder | None) -> Trajectory:
        """Return a sample.

        Args:
            index: Index of its candidate.
            encoder: Encoder of its images; `None`: return only the parts that `measure_response` reads.

        Returns:
            The sample.
        """
        samples, i = self._places[index]
        candidate = self.candidates[index]
        slots = samples.slots(i)
        action_mask = samples.read(i, "action_mask")
        mask = np.ones(slots, dtype=np.bool_) if action_mask is None else action_mask != 0
        safe = JsonSafe()
        trajectory = Trajectory(
            rank=self.rank,
            experience=candidate.experience,
            row=candidate.row,
            eid=self._ids[index].replace(),
            has_id=candidate.has_id,
            tokens=samples.tokens(i),
            mask=mask,
        )
        if len(mask) != slots:
            trajectory.mask = np.ones(slots, dtype=np.bool_)
            trajectory.notes.append(f"action_mask: got {len(mask)} entries, expected {slots}; left out")
        arrays: dict[str, NDArray[Any] | None]
        if encoder is None:
            arrays = {"action_entropy": samples.read(i, "entropy")}
        else:
            arrays = {json_name: samples.read(i, name) for name, json_name in ARRAYS.items()}
            arrays.update((name, read()) for name, read in samples.extras(i).items())
            trajectory.padded = samples.padded(i)
            samples.fill(i, trajectory, safe, encoder)
            trajectory.reward = None if candidate.reward is None else safe.number(candidate.reward, "reward")
        for name, array in arrays.items():
            if array is None:
                continue
            if len(array) == 1 != slots and name in NUMBERS:
                trajectory.numbers[name] = safe.number(float(array[0]), name)
                continue
            if len(array) != slots:
                trajectory.notes.append(f"{name}: got {len(array)} entries, expected {slots}; left out")
                continue
            safe.count_nonfinite(array, name)
            trajectory.arrays[name] = array
        trajectory.nonfinite = safe.nonfinite
        return trajectory


# --- selection ------------------------------------------------------------------------------------------------------

SELECTION_METHODS = ("auto", "groups", "first", "random")
"""Methods of `select`."""


@dataclass
class Selection:
    """A selected candidate.

    Args:
        candidate: The candidate.
        reasons: Why it was selected.
        weight: Number of samples that it represents, if it was drawn at random.
    """

    candidate: Candidate
    reasons: list[str] = field(default_factory=list)
    weight: float | None = None

    @property
    def reason(self) -> str:
        """All reasons in order, without duplicates."""
        return ", ".join(dict.fromkeys(self.reasons))


def select(candidates: Sequence[Candidate], count: int, keep: str | Callable[..., Any], seed: str) -> list[Selection]:
    """Select `count` of the candidates, or all if there are no more.

    The selection depends on the candidates and `seed` alone, not on their order or on which rank they came from.

    - `groups`: half of them are whole groups (samples of one prompt) drawn at random. The rest comes from rankings in
      turn: best, worst, one of a group without variance, truncated, largest log-prob mismatch, longest, failed; then
      the next of each ranking, and so on. Each is selected with its group, as far as `count` allows.
    - `first`: the first of each rank in turn. `random`: any, at random.
    - `auto`: `groups` if samples have ids, which contain the group; else `first`.
    - a function of the candidates and `count` that returns the selected ones, or pairs of a candidate and a reason.

    Args:
        candidates: The candidates of all processes.
        count: How many to select.
        keep: One of `SELECTION_METHODS`, or a function.
        seed: The seed of random choices.

    Returns:
        The selection, in the order of `candidates`.

    >>> rewards = {"a": [1, 0, 0, 1], "b": [0, 0, 0, 0], "c": [1, 1, 1, 0]}
    >>> candidates = [
    ...     Candidate(0, i, 0, i, f"{name}{run}", name, True, reward, 10)
    ...     for i, (name, run, reward) in enumerate((g, r, x) for g, xs in rewards.items() for r, x in enumerate(xs))
    ... ]
    >>> [(entry.candidate.uid, entry.reason, entry.weight) for entry in select(candidates, 6, "groups", "3")]
    [('a0', 'random', 3.0), ('a1', 'random', 3.0), ('a2', 'random', 3.0), ('a3', 'random', 3.0),
     ('c2', 'best', None), ('c3', 'with best', None)]
    """
    if len(candidates) <= count:
        return [Selection(candidate, ["all"], 1.0) for candidate in candidates]
    if count <= 0:
        return []
    if callable(keep):
        return _select_by_function(candidates, count, keep)
    if keep == "auto":
        keep = "groups" if any(candidate.has_id for candidate in candidates) else "first"
    if keep == "first":
        first = sorted(candidates, key=lambda candidate: (candidate.index, candidate.rank))[:count]
        return _in_order(candidates, {candidate.uid: Selection(candidate, ["first"]) for candidate in first})
    # Sorted by uid: the order of the ranks' samples has no influence.
    generator = random.Random(seed)
    by_uid = sorted(candidates, key=lambda candidate: candidate.uid)
    if keep == "random":
        weight = len(by_uid) / count
        drawn = generator.sample(by_uid, count)
        return _in_order(candidates, {candidate.uid: Selection(candidate, ["random"], weight) for candidate in drawn})
    return _in_order(candidates, _GroupSelector(by_uid, generator).select(count))


def _in_order(candidates: Sequence[Candidate], selected: dict[str, Selection]) -> list[Selection]:
    return [selected[candidate.uid] for candidate in candidates if candidate.uid in selected]


def _select_by_function(candidates: Sequence[Candidate], count: int, keep: Callable[..., Any]) -> list[Selection]:
    by_uid = {candidate.uid: candidate for candidate in candidates}
    selected: dict[str, Selection] = {}
    for entry in keep(list(candidates), count):
        candidate, reason = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, "chosen")
        if not isinstance(candidate, Candidate) or candidate.uid not in by_uid:
            raise ValueError(
                f"keep: got {candidate!r}, expected some of the candidates, or pairs of a candidate and a reason"
            )
        selected[candidate.uid] = Selection(by_uid[candidate.uid], [str(reason)])
    return _in_order(candidates, dict(list(selected.items())[:count]))


class _GroupSelector:
    """Selects half of the candidates at random and half from rankings."""

    def __init__(self, candidates: list[Candidate], generator: random.Random) -> None:
        self.generator = generator
        self.groups: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            self.groups.setdefault(candidate.group, []).append(candidate)
        # Ties, which are frequent for rewards of 0 and 1, are broken by one random order for all rankings.
        order = list(candidates)
        generator.shuffle(order)
        scored = [candidate for candidate in order if candidate.reward is not None and not math.isnan(candidate.reward)]
        constant = {name for name, group in self.groups.items() if _is_constant(group)}
        mismatched = [candidate for candidate in order if candidate.mismatch]
        self.rankings: dict[str, list[Candidate]] = {
            "best": sorted(scored, key=lambda candidate: -(candidate.reward or 0.0)),
            "worst": sorted(scored, key=lambda candidate: candidate.reward or 0.0),
            "zero variance": _first_of_each_group(candidate for candidate in order if candidate.group in constant),
            "truncated": [candidate for candidate in order if candidate.truncated],
            "mismatch": sorted(mismatched, key=lambda candidate: -(candidate.mismatch or 0.0)),
            "longest": sorted(order, key=lambda candidate: -candidate.tokens),
            "error": [candidate for candidate in order if candidate.error],
        }
        self.candidates = candidates

    def select(self, count: int) -> dict[str, Selection]:
        """Select `count` candidates, by uid."""
        selected = self._random_half(count)
        queues = {reason: list(reversed(ranking)) for reason, ranking in self.rankings.items()}
        while len(selected) < count:
            for reason, ranked in queues.items():
                self._select_next(reason, ranked, selected, count)
        return selected

    def _random_half(self, count: int) -> dict[str, Selection]:
        """Draw as many whole groups as fit into half of `count`, at least one; of larger groups, single samples."""
        half = -(-count // 2)
        largest = max(map(len, self.groups.values()))
        if largest > count:
            weight = len(self.candidates) / half
            drawn = self.generator.sample(self.candidates, half)
            return {candidate.uid: Selection(candidate, ["random"], weight) for candidate in drawn}
        names = self.generator.sample(sorted(self.groups), min(max(1, half // largest), len(self.groups)))
        weight = len(self.groups) / len(names)
        return {
            candidate.uid: Selection(candidate, ["random"], weight) for name in names for candidate in self.groups[name]
        }

    def _select_next(self, reason: str, queue: list[Candidate], selected: dict[str, Selection], count: int) -> None:
        """Select the next of a ranking with its group, or add the reason if it is selected already."""
        if not queue or len(selected) >= count:
            return
        candidate = queue.pop()
        if candidate.uid in selected:
            selected[candidate.uid].reasons.append(reason)
            return
        selected[candidate.uid] = Selection(candidate, [reason])
        others = [other for other in self.groups[candidate.group] if other.uid not in selected]
        for other in _sort_by_contrast(others, candidate)[: count - len(selected)]:
            selected[other.uid] = Selection(other, [f"with {reason}"])


def _is_constant(group: list[Candidate]) -> bool:
    rewards = {candidate.reward for candidate in group}
    return len(group) > 1 and len(rewards) == 1 and None not in rewards


def _first_of_each_group(candidates: Iterable[Candidate]) -> list[Candidate]:
    return list({candidate.group: candidate for candidate in reversed(list(candidates))}.values())[::-1]


def _sort_by_contrast(group: list[Candidate], candidate: Candidate) -> list[Candidate]:
    """Sort by reward, alternating between both ends and starting with the one further from `candidate`.

    If a group does not fit, those that differ most are then selected.
    """
    ranked = sorted(group, key=_finite_reward)
    reward = _finite_reward(candidate)
    if ranked and reward - _finite_reward(ranked[0]) < _finite_reward(ranked[-1]) - reward:
        ranked.reverse()
    return [ranked[i // 2] if i % 2 == 0 else ranked[-1 - i // 2] for i in range(len(ranked))]


def _finite_reward(candidate: Candidate) -> float:
    return candidate.reward if candidate.reward is not None and math.isfinite(candidate.reward) else 0.0


# --- JSON -----------------------------------------------------------------------------------------------------------

_ORJSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_ORJSON_TYPES = (np.float32, np.float64, np.int64, np.int32, np.int16, np.int8, np.uint8)
_MAX_CACHED_TOKENS = 1 << 18


@dataclass
class ResponseStats:
    """Statistics of one response.

    Attributes:
        repeat_score: Share of repeated substrings (see `repeat_score`).
        reflections: Number of each reflection phrase.
        policy_entropy: Mean entropy over sampled tokens, if entropies are known.
        tokens: Number of sampled tokens.
    """

    repeat_score: float
    reflections: dict[str, int]
    policy_entropy: float | None
    tokens: int

    @property
    def reflection_score(self) -> int:
        """Number of reflection phrases."""
        return sum(self.reflections.values())


@dataclass
class Response:
    """The tokens of a trajectory that the model sampled: n of R.

    Attributes:
        ids: [n] Token ids.
        sampled: [R] Which tokens of the response they are: those of the mask.
        text: Their text without special tokens.
        ends: [n] Index in the text at which each token ends; special tokens are empty.
        pure: Number of tokens before the end token.
    """

    ids: NDArray[np.int64]
    sampled: NDArray[np.bool_]
    text: str
    ends: NDArray[np.int64]
    pure: int

    @property
    def pure_text(self) -> str:
        """The text before the end token."""
        return self.text[: int(self.ends[self.pure - 1])] if self.pure else ""


def extract_response(trajectory: Trajectory, decoder: Decoder) -> Response:
    """Decode the tokens that the model sampled.

    Args:
        trajectory: The sample.
        decoder: Decoder of its tokenizer.

    Returns:
        The tokens, and their text.

    >>> from types import SimpleNamespace
    >>> decoder = Decoder(SimpleNamespace(eos_token_id=0, decode=lambda ids: "".join(".abc"[i] for i in ids)))
    >>> source = RecordSource([(0, 0)], [Experience(tokens=[3, 1, 2, 0], prompt_length=1)])
    >>> trajectory = TrajectorySet([source], step=3, rank=0, problems=[]).trajectory(0, None)
    >>> response = extract_response(trajectory, decoder)
    >>> response.text, response.ids.tolist(), response.ends.tolist()
    ('ab', [1, 2, 0], [1, 2, 2])
    """
    ids = trajectory.tokens[trajectory.prompt :][trajectory.mask]
    special = decoder.is_special(ids)
    text, text_ends = decoder.decode_with_ends(ids[~special])
    ends = np.zeros(len(ids), dtype=np.int64)
    ends[~special] = text_ends
    ended = len(ids) > 0 and (bool(special[-1]) or int(ids[-1]) in decoder.end_ids)
    return Response(ids, trajectory.mask, text, np.maximum.accumulate(ends), len(ids) - ended)


def measure_response(trajectory: Trajectory, response: Response) -> ResponseStats:
    """Compute the statistics of a response.

    Args:
        trajectory: The sample.
        response: Its response, from `extract_response`.

    Returns:
        Repetition, reflection phrases, entropy and length of the response.

    >>> from types import SimpleNamespace
    >>> decoder = Decoder(SimpleNamespace(eos_token_id=0, decode=lambda ids: "".join(".abc"[i] for i in ids)))
    >>> source = RecordSource([(0, 0)], [Experience(tokens=[3, 1, 2, 0], prompt_length=1)])
    >>> trajectory = TrajectorySet([source], step=3, rank=0, problems=[]).trajectory(0, None)
    >>> measure_response(trajectory, extract_response(trajectory, decoder)).tokens
    3
    """
    entropy = trajectory.arrays.get("action_entropy")
    finite = None if entropy is None else entropy[response.sampled]
    finite = None if finite is None else finite[np.isfinite(finite)]
    return ResponseStats(
        repeat_score=repeat_score(response.pure_text),
        reflections=count_reflections(response.pure_text),
        policy_entropy=float(finite.mean(dtype=np.float64)) if finite is not None and len(finite) else None,
        tokens=len(response.ids),
    )


def sample_std(log_probs: NDArray[Any]) -> float:
    """Return the sample standard deviation; 0 for fewer than two numbers.

    Args:
        log_probs: [n] The numbers.

    Returns:
        The standard deviation.

    >>> sample_std(np.array([1.0, 3.0])), sample_std(np.array([1.0]))
    (1.4142135623730951, 0.0)
    """
    return float(np.std(log_probs.astype(np.float64), ddof=1)) if len(log_probs) > 1 else 0.0


class TrajectoryEncoder:
    """Encodes trajectories as JSON objects.

    Args:
        decoder: Decoder of the tokenizer.
        mark: A function from the entropies [n] of the sampled tokens to the indices of those to mark, or `None`.
        separate_images: Write paths of images instead of base64.

    >>> import json
    >>> from types import SimpleNamespace
    >>> decoder = Decoder(SimpleNamespace(eos_token_id=0, decode=lambda ids: "".join(".abc"[i] for i in ids)))
    >>> source = RecordSource([(0, 0)], [Experience(tokens=[3, 1, 2, 0], prompt_length=1)])
    >>> trajectory = TrajectorySet([source], step=3, rank=0, problems=[]).trajectory(0, ImageEncoder(512))
    >>> encoded, stats = TrajectoryEncoder(decoder, mark=None, separate_images=False).encode(trajectory, 3, [])
    >>> json.loads(encoded)["generated_text"]
    'ab'
    """

    def __init__(
        self, decoder: Decoder, mark: Callable[[NDArray[Any]], NDArray[Any]] | None, separate_images: bool
    ) -> None:
        self.decoder = decoder
        self.mark = mark
        self.separate_images = separate_images
        self._token_json = _TokenJson()

    def encode(self, trajectory: Trajectory, step: int, paths: list[str | None]) -> tuple[bytes, ResponseStats]:
        """Return the JSON of a trajectory, with `paths` of its images, and its statistics.

        Args:
            trajectory: The trajectory.
            step: Training step.
            paths: Paths of its images; `None` for an image that was not written.

        Returns:
            The JSON, and the statistics.
        """
        text, ends = self.decoder.decode_with_ends(trajectory.tokens)
        response = extract_response(trajectory, self.decoder)
        stats = measure_response(trajectory, response)
        entropy = trajectory.arrays.get("action_entropy")
        record: dict[str, Any] = {
            "global_step": step,
            "experience_index": trajectory.experience,
            "sample_in_exp": trajectory.row,
            "full_sequence": text if trajectory.padded is None else self.decoder.text(trajectory.padded),
            "generated_text": response.text,
            "pure_generated_text": response.pure_text,
            "label": trajectory.label,
            "reference": trajectory.reference,
            "repeat_score": stats.repeat_score,
            "reflection_pattern_score": stats.reflection_score,
            "reflection_pattern_details": stats.reflections,
            "policy_entropy": stats.policy_entropy,
            "response_token_count": stats.tokens,
        }
        if self.mark is not None and entropy is not None:
            tokens = self._tokens(response, entropy[response.sampled], self.mark)
            record["generated_tokens"] = orjson.Fragment(b"[" + b",".join(tokens) + b"]")
            record["pure_generated_tokens"] = orjson.Fragment(b"[" + b",".join(tokens[: response.pure]) + b"]")
        for name in NUMBERS:
            if name in trajectory.arrays:
                record[name] = _as_json_array(trajectory.arrays[name])
            elif name in trajectory.numbers:
                record[name] = trajectory.numbers[name]
        if trajectory.info is not None:
            record["info"] = trajectory.info
        record |= self._images(trajectory, paths)
        record |= self._rollbook_keys(trajectory, text, ends, response)
        return orjson.dumps(record, option=_ORJSON_OPTIONS), stats

    def _tokens(
        self, response: Response, entropy: NDArray[Any], mark: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> list[bytes]:
        """Return the JSON of each token [n]: its text, whether it is marked, and if so its entropy."""
        ends = response.ends.tolist()
        text = response.text
        tokens = [self._token_json[text[start:end]] for start, end in pairwise([0, *ends])]
        if len(self._token_json) > _MAX_CACHED_TOKENS:
            self._token_json.clear()
        if not len(entropy):
            return tokens
        places = mark(entropy)
        scores = orjson.dumps(_as_json_array(entropy[places]), option=_ORJSON_OPTIONS)[1:-1].split(b",")
        for index, score in zip(places.tolist(), scores, strict=True):
            tokens[index] = tokens[index].removesuffix(b"false}") + b'true,"entropy_score":' + score + b"}"
        return tokens

    def _images(self, trajectory: Trajectory, paths: list[str | None]) -> dict[str, Any]:
        if not trajectory.images:
            return {"has_images": False}
        counts: dict[str, Any] = {"has_images": True, "num_images": len(trajectory.images)}
        if self.separate_images:
            return counts | {"image_paths": paths}
        texts = [None if image is None else base64.b64encode(image.png).decode() for image in trajectory.images]
        return counts | {"images_base64": texts}

    def _rollbook_keys(
        self, trajectory: Trajectory, text: str, ends: NDArray[np.int64], response: Response
    ) -> dict[str, Any]:
        """Return the keys that Rollbook adds to LightRFT's."""
        eid, prompt, arrays = trajectory.eid, trajectory.prompt, trajectory.arrays
        log_probs = arrays.get("action_log_probs")
        spread = None if log_probs is None else sample_std(log_probs[response.sampled])
        batch_names = [name for name in ARRAYS.values() if name not in NUMBERS and name in arrays]
        field_names = [name for name in arrays if name in FIELDS and name not in ARRAYS.values()]
        custom_names = [name for name in arrays if name not in FIELDS and name not in ARRAYS.values()]
        keys: dict[str, Any] = {
            "action_log_prob_std": spread,
            "uid": eid.uid,
            "gid": eid.tid,
            "batch": eid.batch,
            "task": eid.task,
            "run": eid.run,
            "turn": eid.step,
            "named": trajectory.has_id,
            "rank": trajectory.rank,
            "kept": trajectory.reason,
            "kept_weight": trajectory.weight,
            "reward": trajectory.reward,
            "reward_parts": trajectory.reward_parts,
            "prompt_tokens": prompt,
            "prompt_text": trajectory.fields.get("prompt_text", text[: int(ends[prompt - 1])] if prompt else ""),
            "token_ids": trajectory.tokens,
            "text": text,
            "token_ends": ends,
            "mask": trajectory.mask.astype(np.uint8),
            "segments": trajectory.segments,
        }
        keys |= {name: _as_json_array(arrays[name]) for name in (*batch_names, *field_names)}
        if custom_names:
            keys["custom"] = {name: _as_json_array(arrays[name]) for name in custom_names}
        keys |= {name: content for name, content in trajectory.fields.items() if name not in keys}
        if trajectory.images:
            keys["image_sha256"] = [None if image is None else image.sha256 for image in trajectory.images]
        if trajectory.rejected is not None:
            rejected = np.concatenate([trajectory.tokens[:prompt], trajectory.rejected])
            rejected_text, rejected_ends = self.decoder.decode_with_ends(rejected)
            keys["rejected"] = {"text": rejected_text, "token_ids": rejected, "token_ends": rejected_ends}
        if trajectory.nonfinite:
            keys["nonfinite"] = trajectory.nonfinite
        if trajectory.notes:
            keys["notes"] = trajectory.notes
        return keys


class _TokenJson(dict[str, bytes]):
    """A cache of the JSON of tokens that are not marked, by their text."""

    def __missing__(self, text: str) -> bytes:
        encoded = self[text] = b'{"text":' + orjson.dumps(text) + b',"high_entropy":false}'
        return encoded


def _as_json_array(array: NDArray[Any]) -> NDArray[Any]:
    """Convert an array to a type that orjson encodes; it encodes non-finite numbers as null."""
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    if array.dtype not in _ORJSON_TYPES:
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    return np.ascontiguousarray(array)
