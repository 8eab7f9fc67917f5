"""Pictures in records: files unchanged, everything else as PNG of the same pixels, and never an error."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rollbook import EID, Experiences
from rollbook.core import media as under_test
from rollbook.core.media import encode_for_record, encode_message, load_image
from rollbook.rewards.types import RewardInput
from rollbook.rollout import Prompt, Sample


def noise(mode: str = "RGB", size: tuple[int, int] = (7, 5), seed: int = 0) -> Image.Image:
    """Return a picture of any mode with different pixels."""
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    if mode in ("I", "F", "I;16"):
        return Image.fromarray(values[..., 0].astype({"I": np.int32, "F": np.float32, "I;16": np.uint16}[mode]))
    image = Image.fromarray(values)
    return image.quantize(16) if mode == "P" else image.convert(mode)


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    data = io.BytesIO()
    image.save(data, kind)
    return data.getvalue()


def sample(prompt: Prompt, run: int = 0) -> Sample:
    return Sample(
        prompt=prompt, eid=EID(0, "a", run, suffix="x"), prompt_ids=[1], response_ids=[2], text="so", prompt_text="what"
    )


# --- forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_files_are_recorded_unchanged(tmp_path: Path, kind: str) -> None:
    raw = file_of(noise(), kind)
    path = tmp_path / "a picture"
    path.write_bytes(raw)
    address = "data:image/x;base64," + base64.b64encode(raw).decode()
    forms: list[Any] = [path, str(path), path.as_uri(), raw, bytearray(raw), memoryview(raw), address]
    forms += [{"bytes": raw, "path": "gone"}, {"image": path}, {"type": "image_url", "image_url": {"url": address}}]
    assert encode_for_record(forms) == [raw] * len(forms)
    assert all(type(content) is bytes for content in encode_for_record(forms))


@given(
    mode=st.sampled_from(["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"]),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_pictures_are_recorded_as_png_without_loss(mode: str, size: tuple[int, int], seed: int) -> None:
    image = noise(mode, size, seed)
    before = image.tobytes()
    (encoded,) = encode_for_record([image])
    assert isinstance(encoded, bytes) and encoded.startswith(b"\x89PNG") and image.tobytes() == before
    if mode != "I;16":  # which PIL makes of the file again depends on its version
        assert load_image("image", encoded).tobytes() == load_image("image", image).tobytes()


def test_arrays_tensors_and_bmp_files_become_png() -> None:
    image = noise()
    array = np.asarray(image)
    encoded = encode_for_record([array, torch.from_numpy(array.copy()).permute(2, 0, 1), file_of(image, "BMP"), image])
    assert encoded == [encoded[-1]] * 4 and encoded[-1] is not None and encoded[-1][:4] == b"\x89PNG"


def test_palettes_distinguish_pictures() -> None:
    first = Image.new("P", (2, 2), 1)
    first.putpalette([0, 0, 0, 255, 0, 0])
    second = first.copy()
    second.putpalette([0, 0, 0, 0, 0, 255])
    pixels = [load_image("image", encoded).getpixel((0, 0)) for encoded in encode_for_record([first, second])]
    assert pixels == [(255, 0, 0), (0, 0, 255)]


def test_a_changed_picture_is_encoded_again() -> None:
    image = Image.new("RGB", (3, 3), "white")
    (before,) = encode_for_record([image])
    image.putpixel((1, 1), (255, 0, 0))
    (after,) = encode_for_record([image])
    assert load_image("image", before).getpixel((1, 1)) == (255, 255, 255)
    assert load_image("image", after).getpixel((1, 1)) == (255, 0, 0)


def test_runs_of_a_prompt_share_encodings() -> None:
    prompt = Prompt(text="<image>", images=[noise(size=(40, 30), seed=3)])
    rows = [sample(prompt, run).to_experience() for run in range(4)]
    assert len({id(row.info["images"][0]) for row in rows}) == 1
    assert encode_for_record([noise(size=(40, 30), seed=3)])[0] is rows[0].info["images"][0]


def test_the_cache_of_encodings_is_limited() -> None:
    encode_for_record([Image.new("L", (1, 1 + i)) for i in range(300)])
    assert 0 < len(under_test._png_cache) <= 256


def test_unreadable_images_do_not_fail_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, missing = tmp_path, tmp_path / "missing.png"
    processed = {"pixel_values": torch.zeros(1, 3, 2, 2)}
    images: list[Any] = [missing, str(missing), folder, b"no picture", 7, "https://host/a.png", processed]
    expected = [str(missing), str(missing), str(folder), None, None, "https://host/a.png"]
    assert encode_for_record(images) == expected
    monkeypatch.setattr(under_test, "MAX_IMAGE_BYTES", 50)
    large = tmp_path / "large.png"
    large.write_bytes(file_of(noise(size=(30, 30))))
    assert encode_for_record([large, large.read_bytes(), noise(size=(30, 30))]) == [str(large), None, None]


# --- records ----------------------------------------------------------------------------------------------------------


def test_records_and_rewards_have_the_pictures_of_the_prompt() -> None:
    images = [noise(seed=1), file_of(noise(seed=2), "JPEG")]
    with_images = sample(Prompt(text="<image><image>", images=images, info={"source": "test"}))
    record = Experiences([with_images.to_experience()])[0]  # by way of JSON
    assert record.info["source"] == "test" and record.info["images"][1] == images[1]
    first, second = RewardInput.of(with_images), RewardInput.of(record)
    assert [load_image("image", image).tobytes() for image in first.images] == [
        load_image("image", image).tobytes() for image in second.images
    ]
    assert RewardInput.of(sample(Prompt(text="none")).to_experience()).images == ()
    assert "images" not in sample(Prompt(text="none")).to_experience().info


def test_images_in_the_info_of_a_prompt_are_kept() -> None:
    prompt = Prompt(text="<image>", images=[noise()], info={"images": 3})
    record = sample(prompt).to_experience()
    assert record.info["images"] == 3 and RewardInput.of(record).images == ()


def test_pictures_inside_messages(tmp_path: Path) -> None:
    raw = file_of(noise())
    path = tmp_path / "a.png"
    path.write_bytes(raw)
    address = "data:image/png;base64," + base64.b64encode(raw).decode()
    url = {"url": "https://host/a.png", "detail": "low"}
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": noise()},
        {"type": "image", "path": str(path)},
        {"type": "image", "image": {"bytes": raw, "path": None}},
        {"type": "image_url", "image_url": {"url": address, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": path.as_uri(), "detail": "low"}},
        {"type": "image_url", "image_url": url},
        {"type": "image", "path": "gone.png"},
        {"type": "image"},
        {"type": "text", "text": "what?"},
    ]
    prompt = Prompt(messages=[{"role": "system", "content": "see"}, {"role": "user", "content": parts}])
    original = [dict(part) for part in parts]
    record = Experiences([sample(prompt).to_experience()])[0]
    first, *rest = record.messages[1]["content"]
    assert load_image("image", first).tobytes() == noise().tobytes() and first["image"].startswith("data:image/png;")
    assert rest == [
        {"type": "image", "path": address},
        {"type": "image", "image": address},
        {"type": "image_url", "image_url": {"url": address, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": address, "detail": "low"}},
        {"type": "image_url", "image_url": url},
        *parts[6:],
    ]
    assert record.messages[0] == {"role": "system", "content": "see"}
    assert parts == original and prompt.messages is not None and prompt.messages[1]["content"] is parts
    assert encode_message({"role": "tool", "content": None}) == {"role": "tool", "content": None}


def test_an_eps_file_is_not_run() -> None:
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(ValueError, match="image: got an EPS file, expected an image of pixels"):
        load_image("image", program)
    assert encode_for_record([program]) == [None]
