"""`Vocabulary`: the bytes of every token id, to get texts and token ends without a tokenizer; fingerprints.

Fingerprints are short hashes by which records name the tokenizer, chat template, text or source code that made them.

Invariant: `text_and_ends(ids)` returns one text and one end for each id; the slices between the ends, joined, are the
text, and none of them cuts a character.
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
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollbook.core.errors import WireError

MOST_IDS = 1 << 22
MOST_BYTES = 1 << 26
"""More than any tokenizer has: what a stranger's book says beyond them is not believed."""

_MAGIC = b"RBV1"
_HEAD = struct.Struct("<IIB3x")
_SPECIAL, _KNOWN = 1, 2
_AS_IS, _ONE_SPACE, _FIRST_SPACES = 0, 1, 2
"""What becomes of spaces before the text: they stay, one goes, or all that the first token begins with go."""

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLEANED = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")),
    *((" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
"""What a WordPiece decoder that cleans up writes for each."""


class Tokenizer(Protocol):
    """A tokenizer or processor of `transformers`, or an object that is called like one.

    Chat messages also need `apply_chat_template`, and stopping at the end token needs `eos_token_id`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Tokenize a text; the ids are under `input_ids`."""
        ...

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Return the text of token ids."""
        ...


class VocabularySource(Protocol):
    """A tokenizer of `transformers` or `tokenizers`."""

    @property
    def get_vocab(self) -> Callable[..., dict[str, int]]:
        """Return the ids by token."""


class Vocabulary:
    """The bytes of each id, and which ids are special.

    `pieces[i]` are the bytes of token i, `None` where no token has that id; `special`: ids of special tokens. An id
    that has no token, beyond the last too, shows as ⟨id⟩ and counts as special.

    >>> made = Vocabulary([b"<s>", "né".encode(), b"\\xe2\\x82", b"\\xac", None], special=[0])
    >>> text, ends = made.text_and_ends([0, 1, 2, 3, 4])
    >>> text, ends.tolist()
    ('<s>né€⟨4⟩', [3, 5, 5, 6, 9])
    >>> made.special([0, 1, 4]).tolist()
    [True, False, True]
    """

    def __init__(self, pieces: Sequence[bytes | None], special: Iterable[int] = (), lead: int = _AS_IS) -> None:
        lengths = np.array([0 if piece is None else len(piece) for piece in pieces], dtype=np.int64)
        flags = np.array([0 if piece is None else _KNOWN for piece in pieces], dtype=np.uint8)
        flags[[i for i in special if 0 <= i < len(pieces)]] |= _SPECIAL
        joined = b"".join(piece for piece in pieces if piece is not None)
        self._set(np.frombuffer(joined, dtype=np.uint8), lengths, flags, lead)

    def _set(self, data: NDArray[np.uint8], lengths: NDArray[np.int64], flags: NDArray[np.uint8], lead: int) -> None:
        if len(lengths) > MOST_IDS or len(data) > MOST_BYTES:
            raise ValueError(
                f"vocabulary: got {len(lengths)} ids of {len(data)} bytes, expected at most {MOST_IDS} and {MOST_BYTES}"
            )
        self._data, self._lengths, self._flags, self._lead = data, lengths, flags, lead
        self._starts = np.concatenate([[0], np.cumsum(lengths)])

    def __len__(self) -> int:
        """One more than the highest id."""
        return len(self._lengths)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self.to_bytes() == other.to_bytes() if isinstance(other, Vocabulary) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Vocabulary({int((self._flags & _KNOWN > 0).sum())} tokens, {int(self.special_ids().size)} special)"

    def __getitem__(self, index: int) -> bytes:
        """The bytes of one id."""
        if not 0 <= index < len(self) or not self._flags[index] & _KNOWN:
            return f"⟨{index}⟩".encode()
        return self._data[self._starts[index] : self._starts[index + 1]].tobytes()

    def special_ids(self) -> NDArray[np.int64]:
        """The ids of special tokens."""
        return np.flatnonzero(self._flags & _SPECIAL).astype(np.int64)

    def _known(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        inside = (ids >= 0) & (ids < len(self))
        if not len(self):
            return inside
        indices: NDArray[np.bool_] = inside & (self._flags[np.where(inside, ids, 0)] & _KNOWN > 0)
        return indices

    def special(self, ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_]:
        """[L] Which of `ids` [L] are special, or have no token."""
        requested = np.asarray(ids, dtype=np.int64).reshape(-1)
        indices = self._known(requested)
        if not len(self):
            return ~indices
        flags: NDArray[np.bool_] = ~indices | (self._flags[np.where(indices, requested, 0)] & _SPECIAL > 0)
        return flags

    def text_and_ends(self, ids: Sequence[int] | NDArray[np.int64]) -> tuple[str, NDArray[np.int64]]:
        """The text of `ids` [L], special tokens visible, and [L] where each token ends, in characters.

        A token that ends inside a character has the end of the one before; the character is the token's that completes
        it. Bytes that are no UTF-8 show as U+FFFD, as in `bytes.decode`.
        """
        requested = np.asarray(ids, dtype=np.int64).reshape(-1)
        if not requested.size:
            return "", np.empty(0, dtype=np.int64)
        if self._known(requested).all():
            lengths = self._lengths[requested]
            ends = np.cumsum(lengths)
            places = np.arange(int(ends[-1])) + np.repeat(self._starts[requested] - (ends - lengths), lengths)
            data = self._data[places].tobytes()
        else:
            pieces = [self[i] for i in requested.tolist()]
            data, ends = b"".join(pieces), np.cumsum([len(piece) for piece in pieces])
        if self._lead != _AS_IS and data.startswith(b" "):
            head = data[:1] if self._lead == _ONE_SPACE else data[: int(ends[0])]
            gone = len(head) - len(head.lstrip(b" "))
            data, ends = data[gone:], np.maximum(ends - gone, 0)
        return text_and_ends(data, ends)

    # --- making -------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, tokenizer: VocabularySource | Tokenizer) -> Vocabulary:
        """The vocabulary of a tokenizer of `transformers` or `tokenizers`: byte-level, with byte fallback, WordPiece,
        WordLevel, with added tokens.

        >>> from tokenizers import Tokenizer, decoders, models
        >>> made = Tokenizer(models.BPE({"h": 0, "Ġ": 1, "Ġh": 2}, [("Ġ", "h")]))
        >>> made.decoder = decoders.ByteLevel()
        >>> Vocabulary.of(made).text_and_ends([0, 2])[0]
        'h h'
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if backend is not tokenizer and not hasattr(backend, "get_added_tokens_decoder"):
            backend = tokenizer
        if not hasattr(backend, "get_vocab"):
            raise ValueError(f"tokenizer: got {type(tokenizer).__name__}, expected one of transformers or tokenizers")
        ids = {int(i): str(token) for token, i in backend.get_vocab().items()}
        if hasattr(backend, "get_added_tokens_decoder"):
            added = backend.get_added_tokens_decoder()
            steps = _steps(backend.decoder)
        else:
            added = getattr(backend, "added_tokens_decoder", {})
            steps = _guessed(backend, ids)
        ids |= {int(i): str(getattr(token, "content", token)) for i, token in added.items()}
        special = {int(i) for i, token in added.items() if getattr(token, "special", False)}
        special |= {int(i) for i in getattr(tokenizer, "all_special_ids", ())}
        if not ids:
            return cls(())
        low, high = min(ids), max(ids)
        if low < 0 or high >= MOST_IDS:
            raise ValueError(f"tokenizer: got ids from {low} to {high}, expected 0 to at most {MOST_IDS - 1}")
        convert, lead = _converter(steps)
        pieces: list[bytes | None] = [None] * (high + 1)
        for i, token in ids.items():
            pieces[i] = convert(token)
        return cls(pieces, special, lead)

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """The vocabulary of a folder that holds a `tokenizer.json`, or of such a file; nothing is downloaded."""
        tokenizer = Path(path)
        file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        if not file.is_file():
            raise ValueError(f"tokenizer: got {str(path)!r}, expected a folder with a tokenizer.json, or that file")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError("reading a tokenizer.json needs tokenizers: pip install 'rollbook[models]'") from error
        try:
            return cls.of(Tokenizer.from_file(str(file)))
        except Exception as error:  # tokenizers raises nothing more exact
            raise ValueError(f"tokenizer: {file} cannot be read: {error}") from None

    def to_bytes(self) -> bytes:
        """The vocabulary as few bytes: `from_bytes` is the inverse."""
        body = b"".join(
            (
                _HEAD.pack(len(self), len(self._data), self._lead),
                self._flags.tobytes(),
                self._lengths.astype("<u4").tobytes(),
                self._data.tobytes(),
            )
        )
        return _MAGIC + zlib.compress(body, 6)

    @classmethod
    def from_bytes(cls, data: bytes) -> Vocabulary:
        """What `to_bytes` made `data` of; `WireError` for anything else.

        >>> made = Vocabulary([b"a", b"bc"])
        >>> Vocabulary.from_bytes(made.to_bytes()) == made
        True
        """
        if not data.startswith(_MAGIC):
            raise WireError(f"magic {data[:4]!r} is not a vocabulary's ({_MAGIC!r})", 0)
        most = _HEAD.size + 5 * MOST_IDS + MOST_BYTES
        reader = zlib.decompressobj()
        try:
            body = reader.decompress(data[len(_MAGIC) :], most + 1)
        except zlib.error as error:
            raise WireError(f"a vocabulary is damaged: {error}") from None
        if not reader.eof or reader.unused_data or len(body) < _HEAD.size or len(body) > most:
            raise WireError("a vocabulary is cut short, or longer than it can be")
        count, total, lead = _HEAD.unpack_from(body)
        if len(body) != _HEAD.size + 5 * count + total or lead > _FIRST_SPACES:
            raise WireError(f"a vocabulary of {count} ids and {total} bytes takes other than {len(body)} bytes")
        flags = np.frombuffer(body, np.uint8, count, _HEAD.size)
        lengths = np.frombuffer(body, "<u4", count, _HEAD.size + count).astype(np.int64)
        if int(lengths.sum()) != total or (flags > _SPECIAL | _KNOWN).any() or lengths[flags & _KNOWN == 0].any():
            raise WireError("a vocabulary's lengths do not agree with its bytes")
        vocabulary = cls.__new__(cls)
        try:
            vocabulary._set(np.frombuffer(body, np.uint8, total, _HEAD.size + 5 * count), lengths, flags, lead)
        except ValueError as error:
            raise WireError(str(error)) from None
        return vocabulary


def text_and_ends(data: bytes, ends: NDArray[np.int64]) -> tuple[str, NDArray[np.int64]]:
    """The text of `data`, and in characters the places `ends` [L], which are bytes and never fall.

    >>> text, ends = text_and_ends("a€".encode() + b"\\xff", np.array([1, 2, 4, 5]))
    >>> text, ends.tolist()
    ('a€\\ufffd', [1, 1, 2, 3])
    """
    if data.isascii():
        return data.decode("ascii"), ends.astype(np.int64)
    begins = _begins(np.frombuffer(data, dtype=np.uint8))
    # Characters that are begun before a byte; inside a character the last one is not complete.
    begun = np.concatenate([[0], np.cumsum(begins)])
    inside = ~np.append(begins, True)[ends]
    return data.decode("utf-8", "replace"), (begun[ends] - inside).astype(np.int64)


def _begins(data: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Where a character begins, of those that `data.decode("utf-8", "replace")` has: what does not go on a character
    that is begun is U+FFFD, and so is each longest part that could have become one."""
    following = data & 0xC0 == 0x80
    size = np.ones(256, dtype=np.uint8)
    size[0xC2:0xE0], size[0xE0:0xF0], size[0xF0:0xF5] = 2, 3, 4
    low, high = np.full(256, 0x80, dtype=np.uint8), np.full(256, 0xBF, dtype=np.uint8)
    low[0xE0], high[0xED], low[0xF0], high[0xF4] = 0xA0, 0x9F, 0x90, 0x8F
    requested = size[data]
    begins = np.ones(len(data), dtype=np.bool_)
    goes_on = (requested[:-1] >= 2) & (data[1:] >= low[data[:-1]]) & (data[1:] <= high[data[:-1]])
    for distance in (1, 2, 3):
        begins[distance:] &= ~goes_on
        goes_on = (
            goes_on[:-1] & (requested[: max(len(data) - distance - 1, 0)] > distance + 1) & following[distance + 1 :]
        )
    return begins


# --- what a tokenizer's decoder does with one token -------------------------------------------------------------------


def _alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes: printable ones of Latin-1 stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _alphabet()
_CHARACTERS = frozenset(_ALPHABET)
_TO_LATIN = {ord(character): chr(byte) for character, byte in _ALPHABET.items()}


def _byte_level(token: str) -> bytes:
    if _CHARACTERS.issuperset(token):
        return token.translate(_TO_LATIN).encode("latin-1")
    return token.encode("utf-8", "replace")


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """The parts of a decoder of `tokenizers`, in order; without one, tokens are joined by spaces."""
    if decoder is None:
        return [{"type": "Spaces"}]
    state = json.loads(decoder.__getstate__())

    def parts(part: dict[str, Any]) -> list[dict[str, Any]]:
        if part.get("type") == "Sequence":
            return [step for inner in part.get("decoders") or () for step in parts(inner)]
        return [part]

    return parts(state)


def _guessed(tokenizer: Tokenizer, ids: dict[int, str]) -> list[dict[str, Any]]:
    """The same of a tokenizer that is written in Python, from how it writes its tokens."""
    if hasattr(tokenizer, "byte_decoder"):
        return [{"type": "ByteLevel"}]
    if any("▁" in token for token in ids.values()):
        return [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1},
        ]
    if any(token.startswith("##") for token in ids.values()):
        return [{"type": "WordPiece", "prefix": "##", "cleanup": False}]
    plain = tokenizer.convert_tokens_to_string(["a", "b"]) if hasattr(tokenizer, "convert_tokens_to_string") else "ab"
    return [{"type": "Spaces"}] if plain == "a b" else [{"type": "Fuse"}]


def _converter(steps: Sequence[dict[str, Any]]) -> tuple[Callable[[str], bytes], int]:
    """What writes a token that is not the first as bytes, and what becomes of spaces before the text."""
    kinds = [step.get("type") for step in steps]
    lead = _AS_IS
    changes: list[Callable[[str], str]] = []
    for at, (kind, step) in enumerate(zip(kinds, steps, strict=True)):
        if kind == "Replace":
            changes.append(_replacing(step))
        elif kind == "Metaspace":
            changes.append(_writing(str(step.get("replacement", "▁")), " "))
            lead = _AS_IS if step.get("prepend_scheme") == "never" else _FIRST_SPACES
        elif kind == "WordPiece":
            changes.append(_word_piece(step.get("prefix", "##"), bool(step.get("cleanup"))))
            lead = _ONE_SPACE
        elif kind == "Spaces":
            changes.append(lambda token: " " + token)
            lead = _ONE_SPACE
        elif kind == "BPEDecoder":
            changes.append(_writing(str(step.get("suffix", "</w>")), " "))
        elif kind == "Strip" and "Fuse" in kinds[:at] and step.get("content") == " " and step.get("start"):
            lead = _ONE_SPACE
    byte_level, fallback = "ByteLevel" in kinds, "ByteFallback" in kinds

    def convert(token: str) -> bytes:
        for change in changes:
            token = change(token)
        if fallback and (matches := _FALLBACK.fullmatch(token)):
            return bytes([int(matches[1], 16)])
        return _byte_level(token) if byte_level else token.encode("utf-8", "replace")

    return convert, lead


def _writing(old: str, new: str) -> Callable[[str], str]:
    return lambda token: token.replace(old, new) if old else token


def _replacing(step: dict[str, Any]) -> Callable[[str], str]:
    pattern, content = step.get("pattern") or {}, str(step.get("content", ""))
    if "Regex" not in pattern:
        return _writing(str(pattern.get("String", "")), content)
    try:
        regex = re.compile(str(pattern["Regex"]))
    except re.error:
        return lambda token: token
    return lambda token: regex.sub(lambda _: content, token)


def _word_piece(prefix: str, cleaned: bool) -> Callable[[str], str]:
    def change(token: str) -> str:
        token = token.removeprefix(prefix) if token.startswith(prefix) else " " + token
        if cleaned:
            for old, new in _CLEANED:
                token = token.replace(old, new)
        return token

    return change


def load_module_file(path: str | Path) -> ModuleType:
    """Import a file and return its module; later calls return the same module.

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
    name = "_rollbook_file_" + hashlib.blake2b(str(file_path).encode(), digest_size=8).hexdigest()
    if name in sys.modules:
        return sys.modules[name]
    if not file_path.is_file():
        raise FileNotFoundError(f"no such file: {file_path}")
    spec = importlib.util.spec_from_file_location(name, file_path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file_path} is not a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def source_fingerprint(target: Callable[..., Any]) -> str | None:
    """Fingerprint the source of a user's function or class by the syntax of its module, without comments and layout.

    A function of the main program or of a notebook goes by its own source alone.

    Returns:
        16 hex digits, or `None` for code of this library and where there is no source.

    >>> source_fingerprint(load_module_file), len(source_fingerprint(textwrap.dedent))
    (None, 16)
    """
    name = getattr(target, "__module__", None) or ""
    module = sys.modules.get(name)
    if module is None or name.partition(".")[0] == "rollbook":
        return None
    try:
        # Read from the file: `inspect` keeps the source of the first time it looked.
        path = getattr(module, "__file__", None)
        has_file = path is not None and name != "__main__"
        text = Path(str(path)).read_text("utf-8") if has_file else inspect.getsource(target)
    except (OSError, TypeError, UnicodeDecodeError):
        return None
    return text_fingerprint(text)


def text_fingerprint(text: str) -> str:
    """Fingerprint Python source by its syntax; 16 hex digits.

    >>> text_fingerprint("x = 1  # one") == text_fingerprint("x=1") != text_fingerprint("x = 2")
    True
    """
    with contextlib.suppress(SyntaxError):  # else the text itself: a lambda amid an expression
        text = ast.dump(ast.parse(textwrap.dedent(text)))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def join_fingerprints(parts: Mapping[str, str | None]) -> str | None:
    """Fingerprint several sources by name; `None` if none of them has a fingerprint."""
    present = {name: fingerprint for name, fingerprint in parts.items() if fingerprint is not None}
    return text_fingerprint(repr(sorted(present.items()))) if present else None


def tokenizer_fingerprint(tokenizer: Tokenizer | None) -> str | None:
    """16 hex digits for a tokenizer, `None` for none; truncation and padding, which calls set, do not count.

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
    plain = json.dumps([parts, special], sort_keys=True)
    return hashlib.blake2b(plain.encode(), digest_size=8).hexdigest()


def template_fingerprint(tokenizer: Tokenizer | None) -> str | None:
    """16 hex digits for a tokenizer's or processor's chat template, `None` where there is none.

    >>> template_fingerprint(object()) is None
    True
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    return hashlib.blake2b(json.dumps(template, sort_keys=True).encode(), digest_size=8).hexdigest()
