"""Texts of token ids, and where each token's text ends: from one whole decode, never token by token.

Invariant: the slices between the ends, joined, are the text; a token that ends inside a character is empty, and the
character is the token's that completes it.
"""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.core.vocabulary import Vocabulary

_PROBES, _PROBED = 8, 24
"""So many sequences of so many ids tell whether a tokenizer decodes as its vocabulary says."""
_MOST_PREFIXES = 2048
"""Of a tokenizer that writes a token otherwise when others follow, so many prefixes are decoded at most."""


class Decoder:
    """A tokenizer's texts: by its vocabulary's bytes where these give what it decodes, else by asking it again and
    again.

    Any object with `decode(ids)` will do; of a processor, its tokenizer. `special_ids`, if the tokenizer does not say
    which they are, are its beginning, end and padding.

    >>> class Letters:
    ...     eos_token_id = 0
    ...     def decode(self, ids):
    ...         return "".join("." if i == 0 else chr(96 + i) for i in ids)
    >>> made = Decoder(Letters())
    >>> text, ends = made.text_and_ends([3, 1, 2, 0])
    >>> text, ends.tolist(), made.special([2, 0]).tolist()
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
        said = getattr(tokenizer, "all_special_ids", None)
        if said is None:
            others = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "pad"))
            said = [*self.end_ids, *(i for one in others for i in _ids(one))]
        self.special_ids = frozenset(int(i) for i in said)
        self._vocabulary = self._proved()

    def decode(self, ids: list[int]) -> str:
        """The tokenizer's own text of `ids`, special tokens kept."""
        while True:
            try:
                return _whole(self.tokenizer.decode(ids, **self._options[0]))
            except TypeError:
                if len(self._options) == 1:
                    raise
                del self._options[0]  # a tokenizer that does not know the option

    def special(self, ids: Any) -> NDArray[np.bool_]:
        """[L] Which of `ids` [L] are special tokens."""
        if self._vocabulary is not None:
            return self._vocabulary.special(ids)
        return np.isin(np.asarray(ids, dtype=np.int64), np.array(sorted(self.special_ids), dtype=np.int64))

    def text(self, ids: Any) -> str:
        """The text of `ids` [L], special tokens visible."""
        return (
            self.decode([int(i) for i in ids]) if self._vocabulary is None else self._vocabulary.text_and_ends(ids)[0]
        )

    def text_and_ends(self, ids: Any) -> tuple[str, NDArray[np.int64]]:
        """The text of `ids` [L], special tokens visible, and [L] where each token ends, in characters of it."""
        if self._vocabulary is not None:
            return self._vocabulary.text_and_ends(ids)
        wanted = [int(i) for i in ids]
        text = self.decode(wanted)
        ends = self._stepwise(wanted, text)
        if ends is None:
            ends = self._by_prefixes(wanted, text)
        return text, np.array(ends, dtype=np.int64)

    def _proved(self) -> Vocabulary | None:
        """The tokenizer's vocabulary, if it decodes as that says."""
        try:
            made = Vocabulary.of(self.tokenizer)
            draw = random.Random(0)
            good = [i for i in draw.sample(range(len(made)), min(len(made), 4096)) if _complete(made[i])]
            specials = [int(i) for i in made.special_ids()]
            for turn in range(_PROBES):
                probe = draw.choices(good, k=_PROBED) if good else []
                if specials and turn % 2:
                    probe[draw.randrange(_PROBED)] = draw.choice(specials)
                if not probe or made.text_and_ends(probe)[0] != self.decode(probe):
                    return None
        except Exception:  # whatever a tokenizer that is none of transformers' raises when it is asked for its parts
            return None
        return made

    def _stepwise(self, ids: list[int], text: str) -> list[int] | None:
        """Where tokens end, by decoding each with the few before it; `None` if that gives another text."""
        ends: list[int] = []
        pieces: list[str] = []
        at = start = read = 0
        before = ""
        for i in range(len(ids)):
            now = self.decode(ids[start : i + 1])
            if now.endswith("�") and i + 1 < len(ids):
                ends.append(at)  # within a character; what completes it gets it
                continue
            if not now.startswith(before):
                return None
            pieces.append(now[len(before) :])
            at += len(pieces[-1])
            ends.append(at)
            start, read = read, i + 1
            before = self.decode(ids[start:read])
        return ends if "".join(pieces) == text else None

    def _by_prefixes(self, ids: list[int], text: str) -> list[int]:
        """Where tokens end, by how much of the text their prefix already has; of very many tokens, in strides."""
        stride = -(-len(ids) // _MOST_PREFIXES)
        ends, at = [], 0
        for i in range(len(ids)):
            if (i + 1) % stride == 0 or i + 1 == len(ids):
                at = max(at, _common_prefix(self.decode(ids[: i + 1]), text))
            ends.append(at)
        if ends:
            ends[-1] = len(text)
        return ends


def _whole(text: Any) -> str:
    """A tokenizer's text without halves of surrogate pairs, which UTF-8 cannot hold."""
    if not isinstance(text, str):
        raise ValueError(f"tokenizer: decode gave {type(text).__name__}, expected a str")
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _ids(given: Any) -> list[int]:
    if given is None:
        return []
    return [int(i) for i in given] if isinstance(given, (list, tuple, set, frozenset)) else [int(given)]


def _complete(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _common_prefix(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_BITS = 63
"""A key of several characters is a whole number of this many bits, without the sign."""

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
"""The phrases that are counted: whole words, in capitals or not."""

_PHRASES = [(name, re.compile(rf"{phrase}\b"), phrase.split("\\")[0]) for name, phrase in REFLECTIONS.items()]
_ANY_CASE = {name: re.compile(rf"\b{phrase}\b", re.IGNORECASE) for name, phrase in REFLECTIONS.items()}
_ODD = re.compile("[\u0130\u0131\u017f\u212a]")
"""Characters that count as i, s and k where case does not matter, and that `str.lower` does not make these."""


def repeat_score(text: str) -> float:
    """How repetitive a text is, from 0 to 1: 2 S / (n (n + 1)), where n is its number of characters and S the sum of
    the common prefixes of neighbouring suffixes in sorted order.

    n (n + 1) / 2 - S is the number of different substrings: the score is the share of substrings said before. Texts of
    one character and none score 0.

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
    """[n] Characters by rank, from 1 on: what lies behind the end is 0, and less than any."""
    top = int(codes.max())
    if top > 1 << 16:
        return np.unique(codes, return_inverse=True)[1].astype(np.int64) + 1
    seen = np.zeros(top + 1, dtype=np.int64)
    seen[codes] = 1
    return np.cumsum(seen)[codes]


def _common(ranks: NDArray[np.int64]) -> int:
    """The sum of the common prefixes of neighbouring suffixes.

    Suffixes are sorted by their first w characters, packed into one number; those that are still equal to a neighbour
    by 2 w, 4 w and so on, by the ranks found before (prefix doubling, of which each round has fewer to look at).
    """
    n = len(ranks)
    bits = int(ranks.max()).bit_length()
    width = max(_BITS // bits, 1)
    keys = np.zeros(n + 1, dtype=np.int64)  # the last stands for what lies behind the end
    for k in range(min(width, n)):
        keys[: n - k] |= ranks[k:] << (bits * (width - 1 - k))
    left = np.argsort(keys[:n])
    sorted_keys = keys[left]
    differ = sorted_keys[1:] ^ sorted_keys[:-1]
    total = _shared_characters(differ[differ != 0], bits, width)
    changed = np.concatenate(([True], differ != 0))
    # A rank is 1 + where its run of equals begins, so that it stays when the others of the run are told apart.
    rank = np.zeros(n + 1, dtype=np.int64)
    starts = np.flatnonzero(changed)
    sizes = np.diff(starts, append=n)
    rank[left] = np.repeat(starts + 1, sizes)
    levels = [(width, rank)]
    left = left[np.repeat(sizes > 1, sizes)]
    while len(left):
        # `left`: suffixes whose first `length` characters another has too, runs of equals together.
        length, rank = levels[-1]
        turn = np.argsort(rank[left] * (n + 1) + rank[np.minimum(left + length, n)])
        left = left[turn]
        run, second = rank[left], rank[np.minimum(left + length, n)]
        other_run = run[1:] != run[:-1]
        split = (second[1:] != second[:-1]) & ~other_run
        apart = np.flatnonzero(split)  # neighbours told apart now, by what follows their first `length` characters
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
    """The characters that pairs of keys have in common before their first difference, summed; `differ` is their xor."""
    bounds = np.int64(1) << (bits * np.arange(1, width, dtype=np.int64))  # a difference in the last k characters
    return len(differ) * (width - 1) - int(np.searchsorted(bounds, differ, side="right").sum())


def _lifted(
    one: NDArray[np.int64],
    other: NDArray[np.int64],
    levels: list[tuple[int, NDArray[np.int64]]],
    keys: NDArray[np.int64],
    bits: int,
) -> int:
    """The common prefixes of pairs of suffixes that differ, summed; each is shorter than the highest level's length."""
    n = len(keys) - 1  # where there is no suffix, the key and every rank are 0
    total = 0
    for length, rank in reversed(levels):
        equal = (rank[one] == rank[other]) & (one < n)
        if equal.any():
            total += length * int(np.count_nonzero(equal))
            one, other = one + length * equal, other + length * equal
    return total + _shared_characters(keys[one] ^ keys[other], bits, levels[0][0])


def reflections(text: str) -> dict[str, int]:
    """How often each phrase of `REFLECTIONS` occurs; nothing of an empty text.

    >>> {name: count for name, count in reflections("Wait, actually: let  me think. Await!").items() if count}
    {'let_me_think': 1, 'actually': 1, 'wait': 1}
    """
    if not text:
        return {}
    if not text.isascii() and _ODD.search(text):
        return {name: len(phrase.findall(text)) for name, phrase in _ANY_CASE.items()}
    lower = text.lower()
    # A pattern that begins with letters is searched for at the speed of C; that a word begins there is seen to after.
    return {
        name: sum(not _in_word(lower, found.start()) for found in phrase.finditer(lower)) if stem in lower else 0
        for name, phrase, stem in _PHRASES
    }


def _in_word(text: str, at: int) -> bool:
    return at > 0 and (text[at - 1].isalnum() or text[at - 1] == "_")
