"""Preparation of prompts: text, chats, ids and images of every kind, and truncation."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rollbook.batch.media import placeholders
from rollbook.core.sampling import Prompt, Sampling
from rollbook.rollout.transformers import PreparedPrompt, PromptPreparer, load_image
from tests.tiny import SPECIAL, bytes_, llava, picture, words

IMAGE = SPECIAL.index("<image>")
PARTS = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def preparer() -> PromptPreparer:
    model, processor = llava()
    processor.chat_template = PARTS
    return PromptPreparer(processor=processor, config=model.config)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


# --- text -----------------------------------------------------------------------------------------------------------


def test_text_chats_and_ids() -> None:
    preparer = PromptPreparer(words())
    text = preparer.prepare(Prompt(text="the quick fox"))
    assert text.ids == tuple(words()("the quick fox", add_special_tokens=False)["input_ids"])
    assert text.text == "the quick fox" and text.media is None
    chat = preparer.prepare(Prompt(messages=[{"role": "user", "content": "yes or no ?"}]))
    assert chat.text == "<|user|>yes or no ?<|end|><|assistant|>"
    ids = preparer.prepare(Prompt(token_ids=text.ids))
    assert ids.ids == text.ids and ids.text == "the quick fox"
    assert PromptPreparer().prepare(Prompt(token_ids=[1, 2])) == PreparedPrompt(ids=(1, 2))


def test_special_tokens_of_plain_text() -> None:
    inner = Tokenizer.from_str(bytes_().backend_tokenizer.to_str())
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
    assert PromptPreparer(tokenizer).prepare(Prompt(text="a")).ids == (73,)
    assert PromptPreparer(tokenizer, add_special_tokens=True).prepare(Prompt(text="a")).ids == (1, 73)


@pytest.mark.parametrize(("side", "expected_ids"), [("left", (7, 8)), ("right", (5, 6))])
def test_long_prompts_are_truncated_and_recorded(side: Any, expected_ids: tuple[int, ...]) -> None:
    sampling = Sampling(max_prompt_tokens=2, prompt_overflow=side)
    prepared = PromptPreparer(words()).prepare(Prompt(token_ids=[5, 6, 7, 8]), sampling)
    assert prepared.ids == expected_ids and prepared.truncated_from == 4
    assert prepared.text == words().decode(list(expected_ids))
    assert PromptPreparer().prepare(Prompt(token_ids=[5, 6]), sampling).truncated_from is None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt(token_ids=[5, 6, 7]), r"prompt: got 3 tokens, expected at most 2 \(max_prompt_tokens\)"),
        (Prompt(text="a"), "prompt.text: got text .* there is no tokenizer"),
        (Prompt(messages=[{"role": "user", "content": "a"}]), "prompt.messages: got a chat, expected token ids"),
        (Prompt(token_ids=[]), "prompt: got no tokens"),
        (Prompt(token_ids=[1], images=[picture()]), "got 1 images and 0 videos, expected none: no processor"),
    ],
)
def test_invalid_prompts(prompt: Prompt, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptPreparer().prepare(prompt, Sampling(max_prompt_tokens=2))


def test_a_tokenizer_without_a_template() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=words().backend_tokenizer)
    with pytest.raises(ValueError, match="the tokenizer has no template"):
        PromptPreparer(bare).prepare(Prompt(messages=[{"role": "user", "content": "a"}]))


# --- images ---------------------------------------------------------------------------------------------------------


def test_every_kind_of_image(tmp_path: Path) -> None:
    red = picture((200, 30, 40))
    path = tmp_path / "a picture.png"
    path.write_bytes(encoded(red))
    array = np.asarray(red)
    address = "data:image/png;base64," + base64.b64encode(encoded(red)).decode()
    kinds = [
        red,
        path,
        str(path),
        path.as_uri(),
        encoded(red),
        bytearray(encoded(red)),
        array,
        np.moveaxis(array, -1, 0),
        array.astype(np.float32) / 255,
        torch.from_numpy(array.copy()),
        torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 255,
        address,
        {"image": red},
        {"bytes": encoded(red)},
        {"bytes": encoded(red), "path": "gone.png"},
        {"type": "image_url", "image_url": {"url": address}},
        red.convert("RGBA"),
        red.quantize(4),
    ]
    for kind in kinds:
        image = load_image("image", kind)
        assert image.mode == "RGB" and image.size == red.size
        assert np.abs(np.asarray(image).astype(int) - array).max() <= 1, kind
    grey = load_image("image", array[..., 0])
    assert grey.mode == "RGB" and grey.getpixel((0, 0)) == (200, 200, 200)
    assert load_image("image", red.convert("L")).mode == "RGB"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"no picture", "cannot be read"),
        ("/nowhere/at/all.png", "cannot be read"),
        ("https://example.org/a.png", "got 'https://example.org/a.png', expected"),
        (np.zeros((2, 5, 5, 3)), r"got shape \[2, 5, 5, 3\]"),
        (np.full((4, 4, 3), 2.0), "got floats from 2 to 2"),
        (np.full((4, 4, 3), 300), "got values from 300 to 300"),
        (3.5, "got float"),
    ],
)
def test_invalid_images(bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_image("prompt.images[1]", bad)


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.png"
    path.write_bytes(encoded(Image.effect_noise((64, 64), 50))[:200])
    with pytest.raises(ValueError, match="cannot be read"):
        load_image("image", path)


def test_text_with_images(preparer: PromptPreparer) -> None:
    prepared = preparer.prepare(Prompt(text="a<image>b<image>", images=[picture(), picture((0, 9, 0))]))
    assert prepared.ids.count(IMAGE) == 8 and prepared.media is not None
    assert prepared.media["pixel_values"].shape == (2, 3, 16, 16)
    assert prepared.text == "a<image>b<image>"
    same = preparer.prepare(Prompt(text="c<image><image>", images=[picture(), picture((0, 9, 0))]))
    assert (
        same.media is not None and same.media["pixel_values"] is prepared.media["pixel_values"]
    )  # one object for equal
    assert preparer.prepare(Prompt(text="plain")).media is None


def test_a_chat_with_images_in_and_outside_its_messages(preparer: PromptPreparer) -> None:
    red, green = picture(), picture((0, 255, 0))
    parts = [{"type": "image", "image": red}, {"type": "text", "text": "and"}, {"type": "image"}]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    prepared = preparer.prepare(Prompt(messages=chat, images=[green]))
    assert prepared.text == "<|system|>s<|end|><|user|><image>and<image><|end|><|assistant|>"
    expected = preparer.prepare(Prompt(text=prepared.text, images=[red, green]))
    assert prepared.ids == expected.ids and prepared.media is not None and expected.media is not None
    assert prepared.media["pixel_values"] is expected.media["pixel_values"]
    part = {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(encoded(red)).decode()}}
    other = preparer.prepare(Prompt(messages=[{"role": "user", "content": [part]}]))
    assert other.media is not None and torch.equal(other.media["pixel_values"], expected.media["pixel_values"][:1])
    assert parts[0]["image"] is red  # the caller's messages are as they were
    marked = preparer.prepare(Prompt(messages=[{"role": "user", "content": "<image>?"}], images=red))
    assert marked.ids.count(IMAGE) == 4


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt(text="a<image>", images=[picture()] * 2), "prompt.images: got 2, expected 1, one for each image"),
        (Prompt(text="a<image><image>", images=[picture()]), "prompt.images: got 1, expected 2"),
        (
            Prompt(text="nothing", images=[picture()]),
            "prompt.images: got 1, expected 0, as many as the prompt has|prompt: got 1 images and 0 videos, ",
        ),
        (Prompt(text="a<image>", videos=["v"]), "the processor takes no videos"),
        (Prompt(text="a<image>", images=[b"x"]), r"prompt.images\[0\]: got an image that cannot be read"),
        (Prompt(messages=[{"role": "user", "content": [{"type": "image"}]}]), "prompt.images: got 0, expected one"),
        (
            Prompt(messages=[{"role": "user", "content": [{"type": "image"}]}], images=[picture()] * 2),
            "prompt.images: got 2, expected 1, one for each empty image part",
        ),
        (Prompt(text="a<image>", images={"pixel_values": torch.zeros(1)}), "got processed media without token_ids"),
        (Prompt(token_ids=[5, 8, 8], images=[picture()]), r"got 2 placeholders \(8\), expected 4"),
        (Prompt(token_ids=[8], images=[picture(), {"pixel_values": 1}]), "got processed and unprocessed media"),
    ],
)
def test_images_must_match_their_placeholders(preparer: PromptPreparer, prompt: Prompt, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preparer.prepare(prompt)


def test_a_prompt_with_images_is_not_truncated(preparer: PromptPreparer) -> None:
    sampling = Sampling(max_prompt_tokens=3, prompt_overflow="left")
    with pytest.raises(ValueError, match="got 5 tokens, expected at most 3 .* a prompt with media is not truncated"):
        preparer.prepare(Prompt(text="a<image>", images=[picture()]), sampling)


def test_ids_with_their_placeholders(preparer: PromptPreparer) -> None:
    prepared = preparer.prepare(Prompt(text="a<image>b", images=[picture()]))
    again = preparer.prepare(Prompt(token_ids=prepared.ids, images=[picture()]))
    ready = preparer.prepare(Prompt(token_ids=prepared.ids, images=prepared.media))
    assert again.ids == ready.ids == prepared.ids
    assert again.media is not None and prepared.media is not None and ready.media is not None
    assert again.media["pixel_values"] is prepared.media["pixel_values"] is ready.media["pixel_values"]


class Grids:
    """The part of a Qwen2.5-VL configuration with the placeholders of media."""

    image_token_id, video_token_id, vision_start_token_id = 100, 101, 102

    class vision_config:
        spatial_merge_size = 2


def test_grids_are_checked_and_token_types_computed() -> None:
    preparer = PromptPreparer(config=Grids())
    assert placeholders(Grids()) == {"image": 100, "video": 101, "start": 102}
    media = {"pixel_values": torch.zeros(16, 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    prepared = preparer.prepare(Prompt(token_ids=[5, 102, 100, 100, 100, 100, 103], images=media))
    assert prepared.media is not None and prepared.media["mm_token_type_ids"].tolist() == [[0, 0, 1, 1, 1, 1, 0]]
    with pytest.raises(ValueError, match="got 3 image placeholders, expected 4, by its grids"):
        preparer.prepare(Prompt(token_ids=[5, 100, 100, 100], images=media))
    frames = {"pixel_values_videos": torch.zeros(8, 4), "video_grid_thw": torch.tensor([[2, 2, 2]])}
    prepared = preparer.prepare(Prompt(token_ids=[101, 101, 100, 100, 100, 100], images=media, videos=frames))
    assert prepared.media is not None and prepared.media["mm_token_type_ids"].tolist() == [[2, 2, 1, 1, 1, 1]]
