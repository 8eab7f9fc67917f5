"""Text of token ids with the end of each token, and two measures of a text: repetition and reflection phrases.

Invariant: the slices between the ends, joined, are the text. A token that ends inside a character is empty; the
character belongs to the token that completes it. The repetition score is exact for every text.
"""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.core.vocabulary import Vocabulary

_PROBES, _PROBE_LENGTH = 8, 24
"""Number and length of the sequences that test whether a tokenizer decodes as its vocabulary says."""
_MAX_PREFIXES = 2048
"""Prefixes that are decoded at most, for a tokenizer whose text of a token depends on the tokens after it."""


class Decoder:
    """Decode token ids with a tokenizer: by the bytes of its vocabulary if the text is the same, else by its `decode`.

    Args:
        tokenizer: Any object with `decode(ids)`, or a processor with a `tokenizer`. Without `all_special_ids`, its
            special tokens are those of beginning, end and padding.

    >>> class Letters:
    ...     eos_token_id = 0
    ...     def decode(self, ids):
    ...         return "".join("." if i == 0 else chr(96 + i) for i in ids)
    >>> decoder = Decoder(Letters())
    >>> text, ends = decoder.text_and_ends([3, 1, 2, 0])
    >>> text, ends.tolist(), decoder.special([2, 0]).tolist()
    ('cab.', [1, 2, 3, 4], [False, True])
    """

    def __init__(self, tokenizer: Any) -> None:
        if not callable(getattr(tokenizer, "decode", None)):
            raise ValueError(f"tokenizer: got {type(tokenizer).__name__}, expected an object with decode(ids)")
        inner: Any = getattr(tokenizer, "tokenizer", None)
        tokenizer = inner if callable(getattr(inner, "decode", None)) else tokenizer
        self.tokenizer: Any = tokenizer
        self._options: list[dict[str, bool]] = [
            {"skip_special_tokens": False, "clean_up_tokenization_spaces": False},
            {"skip_special_tokens": False},
            {},
        ]
        ends = getattr(tokenizer, "eos_token_id", None)
        self.end_ids = frozenset(_ids(ends))
        """The ids that end a response."""
        special_ids = getattr(tokenizer, "all_special_ids", None)
        if special_ids is None:
            others = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "pad"))
            special_ids = [*self.end_ids, *(i for ids in others for i in _ids(ids))]
        self.special_ids = frozenset(int(i) for i in special_ids)
        self._vocabulary = self._tested_vocabulary()

    def decode(self, ids: list[int]) -> str:
        """Decode `ids` with the tokenizer, special tokens included."""
        while True:
            try:
                return _valid_text(self.tokenizer.decode(ids, **self._options[0]))
            except TypeError:
                if len(self._options) == 1:
                    raise
                del self._options[0]  # the tokenizer does not have this option

    def special(self, ids: Any) -> NDArray[np.bool_]:
        """Return which of `ids` [L] are special tokens."""
        if self._vocabulary is not None:
            return self._vocabulary.special(ids)
        return np.isin(np.asarray(ids, dtype=np.int64), np.array(sorted(self.special_ids), dtype=np.int64))

    def text(self, ids: Any) -> str:
        """Return the text of `ids` [L], special tokens included."""
        return (
            self.decode([int(i) for i in ids]) if self._vocabulary is None else self._vocabulary.text_and_ends(ids)[0]
        )

    def text_and_ends(self, ids: Any) -> tuple[str, NDArray[np.int64]]:
        """Return the text of `ids` [L], special tokens included, and where each token ends in it [L]."""
        if self._vocabulary is not None:
            return self._vocabulary.text_and_ends(ids)
        token_ids = [int(i) for i in ids]
        text = self.decode(token_ids)
        ends = self._ends_stepwise(token_ids, text)
        if ends is None:
            ends = self._ends_by_prefixes(token_ids, text)
        return text, np.array(ends, dtype=np.int64)

    def _tested_vocabulary(self) -> Vocabulary | None:
        """Return the tokenizer's vocabulary if it decodes as that says."""
        try:
            vocabulary = Vocabulary.of(self.tokenizer)
            generator = random.Random(0)
            sampled = generator.sample(range(len(vocabulary)), min(len(vocabulary), 4096))
            complete = [i for i in sampled if _is_utf8(vocabulary[i])]
            special_ids = [int(i) for i in vocabulary.special_ids()]
            for turn in range(_PROBES):
                probe = generator.choices(complete, k=_PROBE_LENGTH) if complete else []
                if special_ids and turn % 2:
                    probe[generator.randrange(_PROBE_LENGTH)] = generator.choice(special_ids)
                if not probe or vocabulary.text_and_ends(probe)[0] != self.decode(probe):
                    return None
        except Exception:  # tokenizers of other libraries raise anything when asked for their vocabulary
            return None
        return vocabulary

    def _ends_stepwise(self, ids: list[int], text: str) -> list[int] | None:
        """Return where tokens end, by decoding each with the few before it; `None` if that gives another text."""
        ends: list[int] = []
        pieces: list[str] = []
        at = start = read = 0
        before = ""
        for i in range(len(ids)):
            now = self.decode(ids[start : i + 1])
            if now.endswith("�") and i + 1 < len(ids):
                ends.append(at)  # inside a character
                continue
            if not now.startswith(before):
                return None
            pieces.append(now[len(before) :])
            at += len(pieces[-1])
            ends.append(at)
            start, read = read, i + 1
            before = self.decode(ids[start:read])
        return ends if "".join(pieces) == text else None

    def _ends_by_prefixes(self, ids: list[int], text: str) -> list[int]:
        """Return where tokens end, by decoding prefixes; with a stride if there are many tokens."""
        stride = -(-len(ids) // _MAX_PREFIXES)
        ends, at = [], 0
        for i in range(len(ids)):
            if (i + 1) % stride == 0 or i + 1 == len(ids):
                at = max(at, _common_prefix(self.decode(ids[: i + 1]), text))
            ends.append(at)
        if ends:
            ends[-1] = len(text)
        return ends


def _valid_text(text: Any) -> str:
    """Replace unpaired surrogates, which UTF-8 cannot encode."""
    if not isinstance(text, str):
        raise ValueError(f"tokenizer: decode gave {type(text).__name__}, expected a str")
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _ids(token_ids: Any) -> list[int]:
    if token_ids is None:
        return []
    return [int(i) for i in token_ids] if isinstance(token_ids, (list, tuple, set, frozenset)) else [int(token_ids)]


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


# --- repetition -----------------------------------------------------------------------------------------------------

_KEY_BITS = 63
"""Bits of a key that packs several characters: those of an int64 without its sign."""

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
"""The phrases that are counted: whole words, in any case."""

_PHRASES = [(name, re.compile(rf"{phrase}\b"), phrase.split("\\")[0]) for name, phrase in REFLECTIONS.items()]
_ANY_CASE = {name: re.compile(rf"\b{phrase}\b", re.IGNORECASE) for name, phrase in REFLECTIONS.items()}
_CASE_FOLDED = re.compile("[\u0130\u0131\u017f\u212a]")
"""Characters that match i, s and k if case is ignored, but that `str.lower` does not convert to them."""


def repeat_score(text: str) -> float:
    """Score how repetitive a text is, from 0 to 1: 2 S / (n (n + 1)), where n is the number of characters and S the
    sum of the lengths of the common prefixes of neighboring suffixes in sorted order.

    n (n + 1) / 2 - S is the number of different substrings: the score is the share of substrings that occurred before.
    Texts of fewer than two characters score 0.

    >>> repeat_score("hello hello hello")
    0.43790849673202614
    >>> repeat_score("aa"), repeat_score("ab"), repeat_score("")
    (0.3333333333333333, 0.0, 0.0)
    """
    n = len(text)
    if n <= 1:
        return 0.0
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return 2 * _common(_ranked(codes)) / (n * (n + 1))


def _ranked(codes: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the ranks [n] of the characters, from 1: the end of the text is 0."""
    top = int(codes.max())
    if top > 1 << 16:
        return np.unique(codes, return_inverse=True)[1].astype(np.int64) + 1
    seen = np.zeros(top + 1, dtype=np.int64)
    seen[codes] = 1
    return np.cumsum(seen)[codes]


def _common(ranks: NDArray[np.int64]) -> int:
    """Return the summed lengths of the common prefixes of neighboring suffixes.

    Suffixes are sorted by their first w characters, packed into one number; those that equal a neighbor by 2 w, 4 w and
    so on, by their ranks so far (prefix doubling, each round on fewer suffixes).
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
    # A rank is 1 + the start of its run of equals, so that it stays when the others of the run are separated.
    rank = np.zeros(n + 1, dtype=np.int64)
    starts = np.flatnonzero(changed)
    sizes = np.diff(starts, append=n)
    rank[left] = np.repeat(starts + 1, sizes)
    levels = [(width, rank)]
    left = left[np.repeat(sizes > 1, sizes)]
    while len(left):
        # `left`: suffixes that share their first `length` characters with another, sorted by runs of equals.
        length, rank = levels[-1]
        turn = np.argsort(rank[left] * (n + 1) + rank[np.minimum(left + length, n)])
        left = left[turn]
        run, second = rank[left], rank[np.minimum(left + length, n)]
        other_run = run[1:] != run[:-1]
        split = (second[1:] != second[:-1]) & ~other_run
        apart = np.flatnonzero(split)  # neighbors that differ after their first `length` characters
        total += len(apart) * length
        total += _lifted(left[apart] + length, left[apart + 1] + length, levels, keys, bits)
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


def _lifted(
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


def reflections(text: str) -> dict[str, int]:
    """Count the phrases of `REFLECTIONS`; empty for an empty text.

    >>> {name: count for name, count in reflections("Wait, actually: let  me think. Await!").items() if count}
    {'let_me_think': 1, 'actually': 1, 'wait': 1}
    """
    if not text:
        return {}
    if not text.isascii() and _CASE_FOLDED.search(text):
        return {name: len(phrase.findall(text)) for name, phrase in _ANY_CASE.items()}
    lower = text.lower()
    # Patterns that begin with letters are fast; the word boundary before them is checked afterwards.
    return {
        name: sum(not _in_word(lower, match.start()) for match in phrase.finditer(lower)) if stem in lower else 0
        for name, phrase, stem in _PHRASES
    }


def _in_word(text: str, at: int) -> bool:
    return at > 0 and (text[at - 1].isalnum() or text[at - 1] == "_")


__all__ = ["REFLECTIONS", "Decoder", "reflections", "repeat_score"]
