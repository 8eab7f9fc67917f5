"""Texts of token ids, and where each token's text ends: from one whole decode, never token by token.

Invariant: the slices between the ends, joined, are the text; a token that ends inside a character is empty, and the
character is the token's that completes it.
"""

from __future__ import annotations

import random
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
