"""How much of a text is said again: the repetition score and the phrases of reflection.

Invariant: the score is exact, equal to the sum of the common prefixes of neighbouring suffixes, for every text.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

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
