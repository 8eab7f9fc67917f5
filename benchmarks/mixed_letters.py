"""Training prompts of the letters recipe with words of different lengths."""

from __future__ import annotations

from itertools import chain
from typing import Any

from rollbook.train.recipes import letters


def rows(count: int = 20_000, shortest: int = 4, longest: int = 8, seed: int = 0) -> list[dict[str, Any]]:
    """Generate prompts with answers, as many of each length.

    Args:
        count: Number of words.
        shortest: Letters of the shortest words.
        longest: Letters of the longest words.
        seed: Seed of the words.
    """
    lengths = range(shortest, longest + 1)
    by_length = [letters.rows(count // len(lengths), length, seed) for length in lengths]
    return list(chain.from_iterable(zip(*by_length, strict=True)))
