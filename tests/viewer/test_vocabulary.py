"""Token ids as text: byte-correct, as the tokenizers themselves decode, for every kind of tokenizer."""

from __future__ import annotations

import functools
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollbook.core import vocabulary
from rollbook.core.errors import WireError
from rollbook.core.vocabulary import Vocabulary, decode_utf8_with_ends
from tests.tiny import TEXT, bytes_, words

WORDS = [TEXT, "naïve café — 漢字かな交じり文 🙂👩‍👩‍👧 Ελληνικά", "  two  spaces\n\tand tabs", "don't can't won't"] * 3
MARKS = ["<|im_start|>", "<|im_end|>", "<think>"]


@functools.cache
def byte_level() -> Tokenizer:
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    built.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS[:2]])
    built.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False)])
    return built


@functools.cache
def sentence_piece() -> Tokenizer:
    """As Llama 2's: metaspaces, byte fallback, one space stripped before the text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a"), ("i", "n"), ("o", "n"), ("▁", "▁")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    built = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens(["<s>", "</s>"])
    return built


@functools.cache
def metaspace() -> Tokenizer:
    built = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("▁the", -2.0), ("▁", -3.0), *((c, -4.0) for c in "thequickbrown")], 0)
    )
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    return built


@functools.cache
def word_piece() -> Tokenizer:
    built = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece()
    built.train_from_iterator(
        WORDS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    )
    return built


@functools.cache
def tokenizer_and_vocabulary(name: str) -> tuple[Any, Vocabulary]:
    built: Any = {
        "byte_level": byte_level,
        "wrapped": lambda: PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>"),
        "bytes": bytes_,
        "words": words,
        "sentence_piece": sentence_piece,
        "metaspace": metaspace,
        "word_piece": word_piece,
    }[name]()
    return built, Vocabulary.from_tokenizer(built)


def decoded(tokenizer: Any, ids: list[int]) -> str:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.decode(ids, skip_special_tokens=False)
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def check_slices(text: str, ends: np.ndarray, count: int) -> None:
    assert len(ends) == count and (np.diff(ends, prepend=0) >= 0).all()
    starts = [0, *ends.tolist()]
    assert "".join(text[a:b] for a, b in zip(starts, ends.tolist(), strict=False)) == text


BYTE_LEVEL = ("byte_level", "wrapped", "bytes")


@pytest.mark.parametrize("name", BYTE_LEVEL)
@given(data=st.data())
def test_byte_level_ids_decode_as_the_tokenizer_decodes(name: str, data: st.DataObject) -> None:
    tokenizer, vocabulary = tokenizer_and_vocabulary(name)
    ids = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=60))
    text, ends = vocabulary.decode_with_ends(ids)
    assert text == decoded(tokenizer, ids)
    check_slices(text, ends, len(ids))


@pytest.mark.parametrize("name", [*BYTE_LEVEL, "words", "sentence_piece", "metaspace", "word_piece"])
@given(text=st.text(st.sampled_from("the quick brown fox, 漢字🙂é<|im_end|> don't\n"), max_size=40))
def test_text_that_was_tokenized_decodes_as_the_tokenizer_decodes(name: str, text: str) -> None:
    tokenizer, vocabulary = tokenizer_and_vocabulary(name)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    ids = encoded.ids if isinstance(tokenizer, Tokenizer) else encoded
    shown, ends = vocabulary.decode_with_ends(ids)
    assert shown == decoded(tokenizer, ids)
    check_slices(shown, ends, len(ids))


@given(st.binary(max_size=80), st.lists(st.integers(0, 80), max_size=20))
def test_any_bytes_cut_anywhere(data: bytes, cuts: list[int]) -> None:
    ends = np.array([*sorted(min(place, len(data)) for place in cuts), len(data)])
    text, text_ends = decode_utf8_with_ends(data, ends)
    assert text == data.decode("utf-8", "replace")
    check_slices(text, text_ends, len(ends))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_a_character_belongs_to_the_token_that_completes_it(text: str) -> None:
    data = text.encode()
    shown, ends = decode_utf8_with_ends(data, np.arange(1, len(data) + 1))
    assert shown == text
    complete = np.cumsum([len(character.encode()) for character in text], dtype=np.int64)
    assert ends.tolist() == [int((complete <= at).sum()) for at in range(1, len(data) + 1)]


def test_a_character_that_is_never_complete_is_the_last_tokens() -> None:
    vocabulary = Vocabulary([b"a", b"\xe6", b"\xbc", b"\xa2"])
    assert vocabulary.decode_with_ends([0, 1, 2])[0] == "a\ufffd"
    assert vocabulary.decode_with_ends([0, 1, 2])[1].tolist() == [1, 1, 2]
    assert vocabulary.decode_with_ends([1, 2, 0])[1].tolist() == [0, 1, 2], (
        "what cannot become one is shown before the next"
    )
    assert vocabulary.decode_with_ends([1, 2, 3])[0] == "漢"


def test_ids_without_a_token_show_themselves() -> None:
    vocabulary = Vocabulary([b"a", None, b"c"], special=[2])
    text, ends = vocabulary.decode_with_ends([0, 1, 2, 99, -200])
    assert (text, ends.tolist()) == ("a⟨1⟩c⟨99⟩⟨-200⟩", [1, 4, 5, 9, 15])
    assert vocabulary.is_special([0, 1, 2, 99, -200]).tolist() == [False, True, True, True, True]
    empty = Vocabulary(())
    assert empty.decode_with_ends([7])[0] == "⟨7⟩" and empty.is_special([7]).tolist() == [True]
    assert vocabulary.decode_with_ends([])[0] == "" and not len(vocabulary.decode_with_ends([])[1])


def test_special_tokens_are_known_and_visible() -> None:
    vocabulary = Vocabulary.from_tokenizer(tokenizer_and_vocabulary("wrapped")[0])
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(mark) for mark in MARKS]
    assert vocabulary.is_special(ids).tolist() == [True, True, False], "<think> was added, and is not special"
    assert vocabulary.decode_with_ends(ids)[0] == "".join(MARKS)
    assert set(Vocabulary.from_tokenizer(words()).special_ids().tolist()) == set(words().all_special_ids)


def test_added_tokens_may_leave_holes() -> None:
    tokenizer = words()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    assert len(vocabulary) == max(tokenizer.get_vocab().values()) + 1


class Slow:
    """A tokenizer that is written in Python, with metaspaces and byte fallback."""

    all_special_ids = (0,)

    def get_vocab(self) -> dict[str, int]:
        return {"<s>": 0, "▁hi": 1, "<0xF0>": 2, "<0x9F>": 3, "<0x99>": 4, "<0x82>": 5}


def test_tokenizers_in_python_are_told_by_their_tokens() -> None:
    text, ends = Vocabulary.from_tokenizer(Slow()).decode_with_ends([1, 2, 3, 4, 5, 1])
    assert (text, ends.tolist()) == ("hi🙂 hi", [2, 2, 2, 2, 3, 6])


@pytest.mark.parametrize("name", ["byte_level", "sentence_piece", "word_piece"])
def test_bytes_there_and_back(name: str) -> None:
    vocabulary = tokenizer_and_vocabulary(name)[1]
    again = Vocabulary.from_bytes(vocabulary.to_bytes())
    ids = list(range(len(vocabulary)))
    assert again == vocabulary and repr(again) == repr(vocabulary)
    assert again.decode_with_ends(ids)[0] == vocabulary.decode_with_ends(ids)[0]
    assert (again.is_special(ids) == vocabulary.is_special(ids)).all()


@given(st.data())
def test_damaged_bytes_are_one_error(data: st.DataObject) -> None:
    encoded = Vocabulary([b"a", b"bc", None, b"\xff"], special=[1]).to_bytes()
    at = data.draw(st.integers(0, len(encoded) - 1))
    damaged = bytearray(encoded)
    damaged[at] ^= data.draw(st.integers(1, 255))
    for bad in (bytes(damaged), encoded[:at], encoded + b"x"):
        try:
            read = Vocabulary.from_bytes(bad)
        except WireError:
            continue
        assert len(read) == 4, "zlib's header has bits that mean nothing"


def test_a_vocabulary_that_says_it_is_huge_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    head = vocabulary._HEADER.pack(2**32 - 1, 2**32 - 1, 0)
    with pytest.raises(WireError, match="expected 25769803782"):
        Vocabulary.from_bytes(b"RBV1" + zlib.compress(head))
    lengths = np.array([2**32 - 1, 2], "<u4").tobytes()
    with pytest.raises(WireError, match="do not match"):
        Vocabulary.from_bytes(b"RBV1" + zlib.compress(vocabulary._HEADER.pack(2, 1, 0) + b"\2\2" + lengths + b"a"))
    monkeypatch.setattr(vocabulary, "MAX_IDS", 10)
    monkeypatch.setattr(vocabulary, "MAX_BYTES", 10)
    with pytest.raises(WireError, match="larger than the limit"):
        Vocabulary.from_bytes(b"RBV1" + zlib.compress(bytes(10_000)))
    with pytest.raises(ValueError, match="expected at most 10"):
        Vocabulary([b"x"] * 11)


def test_from_a_folder(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert (
        Vocabulary.from_path(tmp_path)
        == Vocabulary.from_path(tmp_path / "tokenizer.json")
        == tokenizer_and_vocabulary("byte_level")[1]
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Vocabulary.from_path(tmp_path)
    with pytest.raises(ValueError, match=r"expected a folder with a tokenizer\.json"):
        Vocabulary.from_path(tmp_path / "nowhere")


def test_without_tokenizers_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from rollbook.core.vocabulary import Vocabulary\n"
        f"try: Vocabulary.from_path({str(tmp_path)!r})\nexcept ImportError as error: print(error)\n"
        "print('torch' in sys.modules, 'pyarrow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "extra 'models'" in done.stdout and done.stdout.endswith("False False\n")


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer: got int"):
        Vocabulary.from_tokenizer(3)
