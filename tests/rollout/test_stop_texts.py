"""Stop texts are found if, and only if, the decoded response contains one, for any division into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rollbook.rollout.decoding import StopTexts, find_stop_start
from tests.tiny import bytes_, words


def expected(stops: Sequence[str], ids: Sequence[int], decode: Any) -> tuple[int, str] | None:
    """Return the number of tokens until the decoded text has a stop text, and the one that starts first."""
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        matches = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
        if matches:
            return count, min(matches)[2]
    return None


def first(stops: Sequence[str], ids: Sequence[int], decode: Any) -> tuple[int, str] | None:
    stop_texts = StopTexts(stops, decode)
    for count in range(1, len(ids) + 1):
        text = stop_texts.completed(ids[:count])
        if text is not None:
            return count, text
    return None


LETTERS = st.text(alphabet="ab\n é€😀", min_size=0, max_size=40)
STOPS = st.lists(st.text(alphabet="ab\n é€😀", min_size=1, max_size=6), min_size=1, max_size=3, unique=True)


@given(LETTERS, STOPS, st.data())
@example("aa" * 20 + "ab", ["ab"], None)
@example("€" * 12 + "a€b", ["a€", "€b"], None)
def test_stop_texts_over_tokens_of_any_bytes(text: str, stops: list[str], data: Any) -> None:
    raw = text.encode()
    cuts = [] if data is None else data.draw(st.lists(st.integers(0, len(raw)), max_size=len(raw)))
    bounds = sorted({0, *cuts, len(raw)}) if data is not None else list(range(len(raw) + 1))
    pieces = [raw[a:b] for a, b in pairwise(bounds)]
    numbers = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    vocabulary = {i: piece for piece, i in numbers.items()}
    ids = [numbers[piece] for piece in pieces]

    def decode(some: Sequence[int]) -> str:
        return b"".join(vocabulary[i] for i in some).decode("utf-8", "replace")

    assert first(stops, ids, decode) == expected(stops, ids, decode)


@given(st.text(alphabet="xy é😀<", max_size=30), st.text(alphabet="xy é😀<", min_size=1, max_size=4))
def test_a_byte_level_tokenizer(text: str, stop: str) -> None:
    tokenizer = bytes_()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert first([stop], ids, tokenizer.decode) == expected([stop], ids, tokenizer.decode)


def test_a_character_over_several_tokens() -> None:
    tokenizer = bytes_()
    ids = tokenizer("ok 😀 more", add_special_tokens=False)["input_ids"]
    assert first(["😀"], ids, tokenizer.decode) == (7, "😀")  # three bytes, then the last of four


def test_a_decoder_that_drops_the_first_space() -> None:
    vocabulary = {"▁the": 0, "▁cat": 1, "s": 2, "▁": 3, ".": 4}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=".")
    for ids in ([0, 1, 2, 3, 0], [1, 1, 1, 0, 2, 3], [4] * 40 + [3, 1, 2]):
        for stop in (" ", " cat", "s ", "the c", "  cats"):
            assert first([stop], ids, tokenizer.decode) == expected([stop], ids, tokenizer.decode), (ids, stop)


def test_special_tokens_as_stop_texts() -> None:
    tokenizer = words()
    ids = tokenizer("the quick fox <|tool|> asks", add_special_tokens=False)["input_ids"]
    assert first(["<|tool|>"], ids, tokenizer.decode) == (4, "<|tool|>")


def test_earlier_occurrences_are_ignored() -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join("ab"[i] for i in ids)

    stop_texts = StopTexts(["ba"], decode)
    ids = [1, 0, 0, 0]  # "ba" was complete two tokens ago
    assert stop_texts.completed(ids) is None
    assert stop_texts.completed([*ids, 1, 0]) == "ba"
    assert find_stop_start("ba", [*ids, 1, 0], decode) == 4


def test_tokens_that_cannot_end_a_stop_text_are_not_decoded() -> None:
    tokenizer = bytes_()
    ids = tokenizer("a long answer without the mark " * 20, add_special_tokens=False)["input_ids"]
    decoded: list[int] = []

    def decode(some: Sequence[int]) -> str:
        decoded.append(len(some))
        return str(tokenizer.decode(list(some)))

    stop_texts = StopTexts(["</answer>"], decode)
    assert all(stop_texts.completed(ids[: i + 1]) is None for i in range(len(ids)))
    assert len(decoded) == len(set(ids)) and max(decoded) == 2  # each kind of token was looked at once
    stop_texts = StopTexts(["zzer"], decode)
    decoded.clear()
    assert all(stop_texts.completed(ids[: i + 1]) is None for i in range(len(ids)))
    assert max(decoded) <= 2 * 4 + 8  # never the whole response
