"""`Vocabulary`, which decodes token ids without a tokenizer; fingerprints of tokenizers and of source code.

A fingerprint is a short hash by which records name the tokenizer, chat template or source code that produced them.

Invariant: `decode_with_ends(ids)` returns a text and one end for each id. The slices between the ends, joined, are the
text, and none of them splits a character.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import re
import struct
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollbook.core.errors import WireError

MAX_IDS = 1 << 22
MAX_BYTES = 1 << 26
"""Limits on a vocabulary, far above those of any tokenizer: one read from untrusted bytes cannot exhaust memory."""

_MAGIC = b"RBV1"
_HEADER = struct.Struct("<IIB3x")
"""Number of ids, number of bytes, and how leading spaces are stripped."""
_SPECIAL, _DEFINED = 1, 2
"""Flags of an id: special token; a token has this id."""
_KEEP_SPACES, _STRIP_ONE_SPACE, _STRIP_FIRST_TOKEN = 0, 1, 2
"""Leading spaces of a text that its decoder removes: none, one, or all of those in the first token."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_PIECE_CLEANUP = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")),
    *((" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
"""Replacements of a WordPiece decoder with `cleanup`."""

Ids: TypeAlias = Sequence[int] | NDArray[np.int64]
DecoderStep: TypeAlias = dict[str, Any]
"""One step of a decoder of `tokenizers`, as in `tokenizer.json`."""


class Tokenizer(Protocol):
    """A tokenizer or processor of `transformers`, or an object that is called like one.

    Chat messages also need `apply_chat_template`, and stopping at the end token needs `eos_token_id`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Tokenize a text; the ids are under `input_ids`."""
        ...

    @property
    def decode(self) -> Callable[..., Any]:
        """Return the text of token ids."""


class VocabularySource(Protocol):
    """A tokenizer of `transformers` or `tokenizers`."""

    @property
    def get_vocab(self) -> Callable[..., dict[str, int]]:
        """Return the ids by token."""


class Vocabulary:
    """The bytes of each token id, and which ids are special.

    An id without a token is decoded as ⟨id⟩ and counts as special.

    Args:
        pieces: The bytes of token i at index i, or `None` if no token has that id.
        special: Ids of special tokens.
        strip: How leading spaces are stripped (see `_KEEP_SPACES`).

    >>> vocabulary = Vocabulary([b"<s>", "né".encode(), b"\\xe2\\x82", b"\\xac", None], special=[0])
    >>> text, ends = vocabulary.decode_with_ends([0, 1, 2, 3, 4])
    >>> text, ends.tolist()
    ('<s>né€⟨4⟩', [3, 5, 5, 6, 9])
    >>> vocabulary.is_special([0, 1, 4]).tolist()
    [True, False, True]
    """

    def __init__(self, pieces: Sequence[bytes | None], special: Iterable[int] = (), strip: int = _KEEP_SPACES) -> None:
        lengths = np.array([0 if piece is None else len(piece) for piece in pieces], dtype=np.int64)
        flags = np.array([0 if piece is None else _DEFINED for piece in pieces], dtype=np.uint8)
        flags[[i for i in special if 0 <= i < len(pieces)]] |= _SPECIAL
        joined = b"".join(piece for piece in pieces if piece is not None)
        self._set_arrays(np.frombuffer(joined, dtype=np.uint8), lengths, flags, strip)

    def _set_arrays(
        self, data: NDArray[np.uint8], lengths: NDArray[np.int64], flags: NDArray[np.uint8], strip: int
    ) -> None:
        if len(lengths) > MAX_IDS or len(data) > MAX_BYTES:
            raise ValueError(
                f"vocabulary: got {len(lengths)} ids of {len(data)} bytes, expected at most {MAX_IDS} and {MAX_BYTES}"
            )
        self._data, self._lengths, self._flags, self._strip = data, lengths, flags, strip
        self._starts = np.concatenate([[0], np.cumsum(lengths)])

    # --- construction -------------------------------------------------------------------------------------------

    @classmethod
    def from_tokenizer(cls, tokenizer: VocabularySource | Tokenizer) -> Vocabulary:
        """Build the vocabulary of a tokenizer.

        Args:
            tokenizer: A tokenizer of `transformers` or `tokenizers`: byte-level, with byte fallback, WordPiece or
                WordLevel, with or without added tokens.

        Returns:
            The vocabulary.

        Raises:
            ValueError: The object has no vocabulary, or an id is out of range.

        >>> from tokenizers import Tokenizer, decoders, models
        >>> tokenizer = Tokenizer(models.BPE({"h": 0, "Ġ": 1, "Ġh": 2}, [("Ġ", "h")]))
        >>> tokenizer.decoder = decoders.ByteLevel()
        >>> Vocabulary.from_tokenizer(tokenizer).decode_with_ends([0, 2])[0]
        'h h'
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if backend is not tokenizer and not hasattr(backend, "get_added_tokens_decoder"):
            backend = tokenizer
        if not hasattr(backend, "get_vocab"):
            raise ValueError(f"tokenizer: got {type(tokenizer).__name__}, expected one of transformers or tokenizers")
        tokens = {int(i): str(token) for token, i in backend.get_vocab().items()}
        if hasattr(backend, "get_added_tokens_decoder"):
            added = backend.get_added_tokens_decoder()
            steps = _decoder_steps(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
        else:
            added = getattr(backend, "added_tokens_decoder", {})
            steps = _guess_decoder_steps(backend, tokens)
        tokens |= {int(i): str(getattr(token, "content", token)) for i, token in added.items()}
        special = {int(i) for i, token in added.items() if getattr(token, "special", False)}
        special |= {int(i) for i in getattr(tokenizer, "all_special_ids", ())}
        if not tokens:
            return cls(())
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= MAX_IDS:
            raise ValueError(f"tokenizer: got ids from {low} to {high}, expected 0 to at most {MAX_IDS - 1}")
        to_bytes, strip = _token_converter(steps)
        pieces: list[bytes | None] = [None] * (high + 1)
        for i, token in tokens.items():
            pieces[i] = to_bytes(token)
        return cls(pieces, special, strip)

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Build the vocabulary of a tokenizer on disk. Nothing is downloaded.

        Args:
            path: A `tokenizer.json`, or a folder that contains one.

        Returns:
            The vocabulary.

        Raises:
            ValueError: There is no such file, or it cannot be read.
            ImportError: `tokenizers` is not installed.
        """
        file = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise ValueError(f"tokenizer: got {str(path)!r}, expected a folder with a tokenizer.json, or that file")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(
                "reading a tokenizer.json needs tokenizers: install the extra 'models' of Rollbook"
            ) from error
        try:
            return cls.from_tokenizer(Tokenizer.from_file(str(file)))
        except Exception as error:  # tokenizers raises plain exceptions
            raise ValueError(f"tokenizer: {file} cannot be read: {error}") from None

    @classmethod
    def from_bytes(cls, data: bytes) -> Vocabulary:
        """Read what `to_bytes` wrote.

        Args:
            data: The bytes.

        Returns:
            The vocabulary.

        Raises:
            WireError: The bytes are not a vocabulary.

        >>> vocabulary = Vocabulary([b"a", b"bc"])
        >>> Vocabulary.from_bytes(vocabulary.to_bytes()) == vocabulary
        True
        """
        if not data.startswith(_MAGIC):
            raise WireError(f"bad magic {data[:4]!r}: not a vocabulary ({_MAGIC!r})", 0)
        max_size = _HEADER.size + 5 * MAX_IDS + MAX_BYTES
        reader = zlib.decompressobj()
        try:
            body = reader.decompress(data[len(_MAGIC) :], max_size + 1)
        except zlib.error as error:
            raise WireError(f"corrupt vocabulary: {error}") from None
        if not reader.eof or reader.unused_data or not _HEADER.size <= len(body) <= max_size:
            raise WireError(f"vocabulary: truncated, or larger than the limit of {max_size} bytes")
        count, total, strip = _HEADER.unpack_from(body)
        expected_size = _HEADER.size + 5 * count + total
        if len(body) != expected_size or strip > _STRIP_FIRST_TOKEN:
            raise WireError(f"vocabulary of {count} ids: got {len(body)} bytes, expected {expected_size}")
        flags = np.frombuffer(body, np.uint8, count, _HEADER.size)
        lengths = np.frombuffer(body, "<u4", count, _HEADER.size + count).astype(np.int64)
        if int(lengths.sum()) != total or (flags > _SPECIAL | _DEFINED).any() or lengths[flags & _DEFINED == 0].any():
            raise WireError("vocabulary: token lengths do not match the bytes")
        pieces = np.frombuffer(body, np.uint8, total, _HEADER.size + 5 * count)
        vocabulary = cls.__new__(cls)
        try:
            vocabulary._set_arrays(pieces, lengths, flags, strip)
        except ValueError as error:
            raise WireError(str(error)) from None
        return vocabulary

    def to_bytes(self) -> bytes:
        """Return the vocabulary as compressed bytes, which `from_bytes` reads."""
        header = _HEADER.pack(len(self), len(self._data), self._strip)
        arrays = (self._flags, self._lengths.astype("<u4"), self._data)
        return _MAGIC + zlib.compress(b"".join((header, *(array.tobytes() for array in arrays))), 6)

    # --- decoding -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the largest id plus one."""
        return len(self._lengths)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self.to_bytes() == other.to_bytes() if isinstance(other, Vocabulary) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Vocabulary({int((self._flags & _DEFINED > 0).sum())} tokens, {int(self.special_ids().size)} special)"

    def __getitem__(self, index: int) -> bytes:
        """Return the bytes of an id."""
        if not 0 <= index < len(self) or not self._flags[index] & _DEFINED:
            return f"⟨{index}⟩".encode()
        return self._data[self._starts[index] : self._starts[index + 1]].tobytes()

    def special_ids(self) -> NDArray[np.int64]:
        """Return the ids of special tokens, sorted."""
        return np.flatnonzero(self._flags & _SPECIAL).astype(np.int64)

    def is_special(self, ids: Ids) -> NDArray[np.bool_]:
        """Find special tokens.

        Args:
            ids: [L] Token ids.

        Returns:
            [L] Whether an id is special or has no token.
        """
        flags = self._get_flags(np.asarray(ids, dtype=np.int64).reshape(-1))
        special: NDArray[np.bool_] = (flags & _SPECIAL > 0) | (flags & _DEFINED == 0)
        return special

    def decode_with_ends(self, ids: Ids) -> tuple[str, NDArray[np.int64]]:
        """Decode token ids, special ones included.

        A character that several tokens form belongs to the token that completes it; a token that ends inside a
        character ends where the one before ends. Bytes that are not UTF-8 become U+FFFD, as in `bytes.decode`.

        Args:
            ids: [L] Token ids.

        Returns:
            The text, and [L] the index in the text at which each token ends.
        """
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        if not ids.size:
            return "", np.empty(0, dtype=np.int64)
        if (self._get_flags(ids) & _DEFINED).all():
            lengths = self._lengths[ids]
            ends = np.cumsum(lengths)
            indices = np.arange(int(ends[-1])) + np.repeat(self._starts[ids] - (ends - lengths), lengths)
            data = self._data[indices].tobytes()
        else:
            pieces = [self[i] for i in ids.tolist()]
            data, ends = b"".join(pieces), np.cumsum([len(piece) for piece in pieces])
        if self._strip != _KEEP_SPACES and data.startswith(b" "):
            head = data[:1] if self._strip == _STRIP_ONE_SPACE else data[: int(ends[0])]
            stripped = len(head) - len(head.lstrip(b" "))
            data, ends = data[stripped:], np.maximum(ends - stripped, 0)
        return decode_utf8_with_ends(data, ends)

    def _get_flags(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the flags of ids [L]; 0 for those out of range. Shape: [L]."""
        flags = np.zeros(len(ids), dtype=np.uint8)
        inside = (ids >= 0) & (ids < len(self))
        flags[inside] = self._flags[ids[inside]]
        return flags


def decode_utf8_with_ends(data: bytes, ends: NDArray[np.int64]) -> tuple[str, NDArray[np.int64]]:
    """Decode UTF-8 and convert byte offsets to character offsets.

    Args:
        data: Bytes; those that are not UTF-8 become U+FFFD.
        ends: [L] Ascending offsets into `data`.

    Returns:
        The text, and [L] the number of characters that are complete at each offset.

    >>> text, ends = decode_utf8_with_ends("a€".encode() + b"\\xff", np.array([1, 2, 4, 5]))
    >>> text, ends.tolist()
    ('a€\\ufffd', [1, 1, 2, 3])
    """
    if data.isascii():
        return data.decode("ascii"), ends.astype(np.int64)
    is_start = _character_starts(np.frombuffer(data, dtype=np.uint8))
    started = np.concatenate([[0], np.cumsum(is_start)])
    inside = ~np.append(is_start, True)[ends]  # the last character that started is not complete there
    return data.decode("utf-8", "replace"), (started[ends] - inside).astype(np.int64)


def _character_starts(data: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Mark the bytes at which a character of `data.decode("utf-8", "replace")` starts. Shape: [N].

    An invalid sequence is replaced as Unicode recommends: each maximal prefix of a valid sequence is one U+FFFD.
    """
    is_continuation = data & 0xC0 == 0x80
    size = np.ones(256, dtype=np.uint8)  # bytes of a character, by its first byte
    size[0xC2:0xE0], size[0xE0:0xF0], size[0xF0:0xF5] = 2, 3, 4
    # Range of the second byte, by the first: excludes overlong forms, surrogates and what is beyond U+10FFFF.
    low, high = np.full(256, 0x80, dtype=np.uint8), np.full(256, 0xBF, dtype=np.uint8)
    low[0xE0], high[0xED], low[0xF0], high[0xF4] = 0xA0, 0x9F, 0x90, 0x8F
    sizes = size[data]
    is_start = np.ones(len(data), dtype=np.bool_)
    # Whether the byte `distance` after byte i continues the character that starts at i.
    continues = (sizes[:-1] >= 2) & (data[1:] >= low[data[:-1]]) & (data[1:] <= high[data[:-1]])
    for distance in (1, 2, 3):
        is_start[distance:] &= ~continues
        remaining = max(len(data) - distance - 1, 0)
        continues = continues[:-1] & (sizes[:remaining] > distance + 1) & is_continuation[distance + 1 :]
    return is_start


# --- decoders of tokenizers -------------------------------------------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """Return the character of each byte in byte-level tokenizers; printable Latin-1 characters map to themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()
_BYTE_CHARACTERS = frozenset(_BYTE_ALPHABET)
_TO_LATIN_1 = {ord(character): chr(byte) for character, byte in _BYTE_ALPHABET.items()}


def _decoder_steps(decoder: DecoderStep | None) -> list[DecoderStep]:
    """Return the steps of a decoder of `tokenizers`; without a decoder, tokens are joined by spaces."""
    if decoder is None:
        return [{"type": "Spaces"}]
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders") or () for step in _decoder_steps(inner)]
    return [decoder]


def _guess_decoder_steps(tokenizer: Tokenizer, tokens: dict[int, str]) -> list[DecoderStep]:
    """Guess the decoder of a tokenizer that is written in Python from the form of its tokens."""
    if hasattr(tokenizer, "byte_decoder"):
        return [{"type": "ByteLevel"}]
    if any("▁" in token for token in tokens.values()):
        return [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1},
        ]
    if any(token.startswith("##") for token in tokens.values()):
        return [{"type": "WordPiece", "prefix": "##", "cleanup": False}]
    joined = tokenizer.convert_tokens_to_string(["a", "b"]) if hasattr(tokenizer, "convert_tokens_to_string") else "ab"
    return [{"type": "Spaces"}] if joined == "a b" else [{"type": "Fuse"}]


def _token_converter(steps: Sequence[DecoderStep]) -> tuple[Callable[[str], bytes], int]:
    """Return a function from a token to its bytes (inside a text), and how leading spaces are stripped."""
    kinds = [step.get("type") for step in steps]
    strip = _KEEP_SPACES
    changes: list[Callable[[str], str]] = []
    for i, (kind, step) in enumerate(zip(kinds, steps, strict=True)):
        if kind == "Replace":
            changes.append(_pattern_replacer(step))
        elif kind == "Metaspace":
            changes.append(_replacer(str(step.get("replacement", "▁")), " "))
            strip = _KEEP_SPACES if step.get("prepend_scheme") == "never" else _STRIP_FIRST_TOKEN
        elif kind == "WordPiece":
            changes.append(_word_piece_joiner(step.get("prefix", "##"), bool(step.get("cleanup"))))
            strip = _STRIP_ONE_SPACE
        elif kind == "Spaces":
            changes.append(lambda token: " " + token)
            strip = _STRIP_ONE_SPACE
        elif kind == "BPEDecoder":
            changes.append(_replacer(str(step.get("suffix", "</w>")), " "))
        elif kind == "Strip" and "Fuse" in kinds[:i] and step.get("content") == " " and step.get("start"):
            strip = _STRIP_ONE_SPACE
    byte_level, byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds

    def to_bytes(token: str) -> bytes:
        for change in changes:
            token = change(token)
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if byte_level and _BYTE_CHARACTERS.issuperset(token):
            return token.translate(_TO_LATIN_1).encode("latin-1")
        return token.encode("utf-8", "replace")

    return to_bytes, strip


def _replacer(old: str, new: str) -> Callable[[str], str]:
    return lambda token: token.replace(old, new) if old else token


def _pattern_replacer(step: DecoderStep) -> Callable[[str], str]:
    pattern, content = step.get("pattern") or {}, str(step.get("content", ""))
    if "Regex" not in pattern:
        return _replacer(str(pattern.get("String", "")), content)
    try:
        regex = re.compile(str(pattern["Regex"]))
    except re.error:
        return lambda token: token
    return lambda token: regex.sub(lambda _: content, token)


def _word_piece_joiner(prefix: str, cleanup: bool) -> Callable[[str], str]:
    def join(token: str) -> str:
        token = token.removeprefix(prefix) if token.startswith(prefix) else " " + token
        if cleanup:
            for old, new in _WORD_PIECE_CLEANUP:
                token = token.replace(old, new)
        return token

    return join


def load_module_file(path: str | Path) -> ModuleType:
    """Import a file. Later calls return the same module.

    Args:
        path: A `.py` file.

    Returns:
        The module.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: `path` is not a `.py` file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     script = Path(folder, "mine.py")
    ...     _ = script.write_text("answer = 6 * 7")
    ...     load_module_file(script).answer, load_module_file(script) is load_module_file(str(script))
    (42, True)
    """
    file_path = Path(path).resolve()
    name = "_rollbook_file_" + _hash_text(str(file_path))
    if name in sys.modules:
        return sys.modules[name]
    if not file_path.is_file():
        raise FileNotFoundError(f"no such file: {file_path}")
    spec = importlib.util.spec_from_file_location(name, file_path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file_path} is not a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# --- fingerprints -----------------------------------------------------------------------------------------------------


def _hash_text(text: str) -> str:
    """Return 16 hex digits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def source_fingerprint(target: Callable[..., Any]) -> str | None:
    """Fingerprint the module of a user's function or class by its syntax, without comments and layout.

    Args:
        target: A function or class. One of the main program or of a notebook is fingerprinted by its own source.

    Returns:
        16 hex digits; `None` for code of this library, or if there is no source.

    >>> source_fingerprint(load_module_file), len(source_fingerprint(textwrap.dedent))
    (None, 16)
    """
    name = getattr(target, "__module__", None) or ""
    module = sys.modules.get(name)
    if module is None or name.partition(".")[0] == "rollbook":
        return None
    try:
        # Read the file: `inspect` caches the source.
        path = getattr(module, "__file__", None)
        has_file = path is not None and name != "__main__"
        source = Path(str(path)).read_text("utf-8") if has_file else inspect.getsource(target)
    except (OSError, TypeError, UnicodeDecodeError):
        return None
    return text_fingerprint(source)


def text_fingerprint(text: str) -> str:
    """Fingerprint Python source by its syntax.

    Args:
        text: The source. A text that is not valid Python is fingerprinted as it is.

    Returns:
        16 hex digits.

    >>> text_fingerprint("x = 1  # one") == text_fingerprint("x=1") != text_fingerprint("x = 2")
    True
    """
    with contextlib.suppress(SyntaxError):  # a lambda cut out of an expression, for example
        text = ast.dump(ast.parse(textwrap.dedent(text)))
    return _hash_text(text)


def join_fingerprints(fingerprints: Mapping[str, str | None]) -> str | None:
    """Combine fingerprints by name; `None` if all of them are `None`."""
    present = {name: fingerprint for name, fingerprint in fingerprints.items() if fingerprint is not None}
    return text_fingerprint(repr(sorted(present.items()))) if present else None


def tokenizer_fingerprint(tokenizer: Tokenizer | None) -> str | None:
    """Fingerprint a tokenizer, without its truncation and padding, which calls change.

    Args:
        tokenizer: The tokenizer.

    Returns:
        16 hex digits, or `None` for `None`.

    >>> tokenizer_fingerprint(None) is None
    True
    """
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        parts = json.loads(backend.to_str())
        parts.pop("truncation", None)
        parts.pop("padding", None)
    else:
        parts = {"class": type(tokenizer).__name__, "vocabulary": dict(getattr(tokenizer, "get_vocab", dict)())}
    special = {name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items()}
    return _hash_text(json.dumps([parts, special], sort_keys=True))


def template_fingerprint(tokenizer: Tokenizer | None) -> str | None:
    """Fingerprint the chat template of a tokenizer or processor.

    Args:
        tokenizer: The tokenizer or processor.

    Returns:
        16 hex digits, or `None` if it has no template.

    >>> template_fingerprint(object()) is None
    True
    """
    template = getattr(tokenizer, "chat_template", None)
    return _hash_text(json.dumps(template, sort_keys=True)) if template else None
