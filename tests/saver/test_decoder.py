"""Texts and where tokens end: of every kind of tokenizer, for emoji, CJK and special tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollbook.io.trajectories import Decoder
from tests import tiny

TEXT = "the quick brown fox naïve 😀 答案 the fox the quick"


def trained() -> PreTrainedTokenizerFast:
    """Byte-level, with merges: tokens that end within a character."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [TEXT] * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def pieces() -> PreTrainedTokenizerFast:
    """As SentencePiece writes them: spaces as ▁, other characters by their bytes."""
    words = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁fox", "a", "é", "▁a"]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def word_pieces() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "[SEP]", "the", "fox", "##es", "##x", "a", "##b"]
    inner = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", eos_token="[SEP]")


class Bytes:
    """No tokenizer of a library: one id a byte, and an option that it does not know is an error."""

    eos_token_id = (256, 257)

    def decode(self, ids: list[int]) -> str:
        parts, data = [], b""
        for i in ids:
            if i > 255:
                parts += [data.decode("utf-8", "replace"), f"<{i}>"]
                data = b""
            else:
                data += bytes([i])
        return "".join(parts) + data.decode("utf-8", "replace")


class Spaced:
    """Writes a token otherwise when another follows: a space between letters, none before the last mark."""

    all_special_ids: tuple[int, ...] = ()
    eos_token_id = None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return (
            " ".join(chr(97 + i % 26) for i in ids).upper() if len(ids) % 2 else "".join(chr(97 + i % 26) for i in ids)
        )


MADE: dict[str, Any] = {
    "bytes": tiny.bytes_(),
    "byte-level": trained(),
    "pieces": pieces(),
    "words": tiny.words(),
    "word pieces": word_pieces(),
    "foreign": Bytes(),
}
DECODERS = {name: Decoder(tokenizer) for name, tokenizer in MADE.items()}


def decode_all(name: str, ids: list[int]) -> str:
    tokenizer = MADE[name]
    if name == "foreign":
        return tokenizer.decode(ids)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", ["bytes", "byte-level", "foreign"])
@settings(max_examples=60)
@given(text=st.text(max_size=24), specials=st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=3))
def test_any_text_with_special_tokens(name: str, text: str, specials: list[tuple[int, bool]]) -> None:
    data = [*text.encode("utf-8", "ignore")]
    text = bytes(data).decode()
    ids = data if name == "foreign" else MADE[name].encode(text, add_special_tokens=False)
    ends = {"bytes": (0, 2), "byte-level": (0, 1), "foreign": (256, 257)}[name]
    for at, which in specials:
        ids.insert(min(at, len(ids)), ends[which])
    decoded, places = DECODERS[name].decode_with_ends(ids)
    assert decoded == decode_all(name, ids)
    check(decoded, places, ids)
    if not specials:
        assert decoded == text


@pytest.mark.parametrize("name", list(MADE))
@settings(max_examples=40)
@given(draw=st.data())
def test_any_ids(name: str, draw: st.DataObject) -> None:
    vocabulary = 258 if name == "foreign" else len(MADE[name])
    ids = draw.draw(st.lists(st.integers(0, vocabulary - 1), max_size=24))
    decoded, places = DECODERS[name].decode_with_ends(ids)
    check(decoded, places, ids)
    if name != "pieces":  # bytes that are no character show as one mark for all of them, not for each
        assert decoded == decode_all(name, ids)


def check(text: str, ends: Any, ids: list[int]) -> None:
    """Ends rise to the end of the text, so that the slices between them are the text."""
    places = [0, *ends.tolist()]
    assert len(ends) == len(ids) and places == sorted(places)
    assert "".join(text[a:b] for a, b in pairwise(places)) == text


def test_pieces_are_what_the_tokenizer_says() -> None:
    tokenizer = MADE["pieces"]
    at = tokenizer.convert_tokens_to_ids
    ids = at(["<s>", "▁the", "▁fox", *(f"<0x{byte:02X}>" for byte in "😀".encode()), "▁a", "é", "</s>"])
    for some in (ids, ids[1:]):
        text, ends = DECODERS["pieces"].decode_with_ends(some)
        assert text == decode_all("pieces", some)
        check(text, ends, some)
    text, ends = DECODERS["pieces"].decode_with_ends(ids)
    assert text == "<s> the fox😀 aé</s>"
    assert [text[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)] == [
        "<s>", " the", " fox", "", "", "", "😀", " a", "é", "</s>"
    ]  # fmt: skip


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    decoder = DECODERS["bytes"]
    text, ends = decoder.decode_with_ends(MADE["bytes"].encode("a😀b", add_special_tokens=False))
    assert text == "a😀b" and ends.tolist() == [1, 1, 1, 1, 2, 3]
    truncated, places = decoder.decode_with_ends(MADE["bytes"].encode("a😀", add_special_tokens=False)[:-1])
    assert truncated == "a�" and places[-1] == 2


def test_special_tokens() -> None:
    assert DECODERS["bytes"].is_special([0, 2, 30]).tolist() == [True, True, False]
    assert DECODERS["foreign"].is_special([256, 97]).tolist() == [True, False]
    assert DECODERS["foreign"].end_ids == {256, 257}


@pytest.mark.parametrize("length", [1, 2, 7, 3000])
def test_a_tokenizer_that_changes_its_mind(length: int) -> None:
    ids = [i * 7 for i in range(length)]
    text, ends = Decoder(Spaced()).decode_with_ends(ids)
    assert text == Spaced().decode(ids)
    check(text, ends, ids)


def test_what_is_no_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer: got int"):
        Decoder(3)
