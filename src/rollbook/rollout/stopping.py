"""When a response is over: stop texts, found in decoded text as tokens come, and stop ids.

Invariant: a stop text counts when the last token completes it in the text of all tokens decoded together, wherever in
a token it ends and over however many tokens a character is spread; the tokens themselves are never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Decode = Callable[[Sequence[int]], str]


class StopTexts:
    """Several stop texts and a tokenizer's decoder; what is known of tokens is shared by all rows of a call.

    Most tokens cannot end a stop text, as its last character is not in theirs; only for the others a window of the
    last tokens is decoded, and only if a stop text is in that, all of them.

    >>> letters = "abc|"
    >>> stops = StopTexts(["|b", "cc"], lambda ids: "".join(letters[i] for i in ids))
    >>> stops.completed([0, 3]), stops.completed([0, 3, 1]), stops.completed([3, 1, 0])
    (None, '|b', None)
    """

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        self.texts = tuple(texts)
        self._decode = decode
        self._longest = max(map(len, self.texts), default=0)
        self._lasts = frozenset(text[-1] for text in self.texts)
        # A piece of a character decodes to U+FFFD; those of ASCII are never in pieces.
        self._pieces = not all(last.isascii() for last in self._lasts)
        self._reach = np.full(1024, -1)

    def may_end(self, tokens: np.ndarray) -> np.ndarray:
        """For each token whether a stop text may end in it."""
        if tokens.size and tokens.max() >= len(self._reach):
            self._reach = np.append(self._reach, np.full(int(tokens.max()) + 1, -1))
        reach: np.ndarray = self._reach[tokens]
        for i in (reach < 0).nonzero()[0].tolist():
            reach[i] = self._reach_of(int(tokens[i]))
        found: np.ndarray = reach > 0
        return found

    def _reach_of(self, token: int) -> int:
        """0 if no stop text ends in this token, else how much text, at most, it may end before the token's end."""
        # Twice, since a decoder may drop the space of what comes first.
        text = self._decode([token, token])
        some = self._lasts & set(text) or (self._pieces and "\N{REPLACEMENT CHARACTER}" in text)
        self._reach[token] = len(text) + 8 if some else 0
        return int(self._reach[token])

    def completed(self, ids: Sequence[int]) -> str | None:
        """The stop text that the last token completes, or `None`; of several the one that begins first."""
        if not self.may_end(np.array(ids[-1:]))[0]:
            return None
        reach = int(self._reach[ids[-1]])
        size = 2 * self._longest + 8
        window = self._decode(ids[-size:])
        # A window may begin in the middle of a character, and many tokens may have little text.
        while len(window) < self._longest + reach and size < len(ids):
            size *= 2
            window = self._decode(ids[-size:])
        if not any(text in window for text in self.texts):
            return None
        found = [(place, -len(text), text) for text in self.texts if (place := begin(text, ids, self._decode)) >= 0]
        return min(found)[2] if found else None


def begin(text: str, ids: Sequence[int], decode: Decode) -> int:
    """Where the occurrence of `text` begins that the last token completes; -1 if there is none.

    >>> begin("aa", [0, 0, 0], lambda ids: "a" * len(ids))
    1
    """
    whole = decode(ids)
    # What was there before the token: a character that was in pieces, or a space that a decoder joins, is new.
    earlier = decode(ids[:-1])
    before = next((i for i, (a, b) in enumerate(zip(earlier, whole, strict=False)) if a != b), len(earlier))
    return whole.find(text, max(0, before - len(text) + 1))
