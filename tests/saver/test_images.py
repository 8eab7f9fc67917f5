"""Images: once by content, under LightRFT's names, whatever users give; what is given stays as it is."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rollbook import EID
from rollbook.compat.lightrft.batch import from_experiences
from rollbook.compat.lightrft.replay_buffer import BufferItem, split_experience_batch
from rollbook.compat.lightrft.saver import TrajectorySaver
from tests.saver.making import TOKENIZER, read, record, rollout


def picture(colour: str, size: tuple[int, int] = (12, 8), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, size, colour)


def png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def batch(images: list[Any]) -> Any:
    built = from_experiences(rollout(1, len(images)))
    built.raw_images = images
    return built


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "images"))


def saver(folder: Path, **options: Any) -> TrajectorySaver:
    return TrajectorySaver(folder, TOKENIZER, **options)


def test_equal_images_are_stored_once_and_every_file_is_shown(tmp_path: Path) -> None:
    red, blue = picture("red"), picture("blue")
    images = [[red, blue], red, [picture("red"), [None, blue.copy()]], None]
    saved = read(saver(tmp_path).save_trajectories([batch(images)], 4)[0])
    first, second = "images/step4_exp0_sample0_img0.png", "images/step4_exp0_sample0_img1.png"
    assert [entry.get("image_paths") for entry in saved] == [[first, second], [first], [first, None, second], None]
    assert [entry["has_images"] for entry in saved] == [True, True, True, False]
    assert [entry.get("num_images") for entry in saved] == [2, 1, 3, None]
    assert files(tmp_path) == ["step4_exp0_sample0_img0.png", "step4_exp0_sample0_img1.png"]
    for path, name in zip(saved[0]["image_paths"], saved[0]["image_sha256"], strict=True):
        assert hashlib.sha256((tmp_path / path).read_bytes()).hexdigest() == name
    with Image.open(tmp_path / second) as written:
        assert written.convert("RGB").getpixel((0, 0)) == (0, 0, 255)


def test_a_list_of_no_image_is_one_all_the_same(tmp_path: Path) -> None:
    saved = read(saver(tmp_path).save_trajectories([batch([[None], [], None])], 1)[0])
    assert [entry["has_images"] for entry in saved] == [True, False, False] and files(tmp_path) == []
    assert saved[0]["image_paths"] == [None] and saved[0]["num_images"] == 1 and "num_images" not in saved[1]


def test_one_bare_image_of_an_item(tmp_path: Path) -> None:
    item = split_experience_batch(from_experiences([record("a", "b")]))[0]
    for images, count in ((picture("red"), 1), ([picture("red"), picture("blue")], 2)):
        item.raw_images = images
        (saved,) = read(saver(tmp_path).save_trajectories([item], count)[0])
        assert saved["num_images"] == count and len(set(saved["image_paths"])) == count
    assert isinstance(item, BufferItem) and item.raw_images[0].size == (12, 8)


def test_the_callers_image_stays_as_it_is(tmp_path: Path) -> None:
    large = picture("red", (1024, 600))
    large.info["note"] = "mine"
    before = large.copy()
    (saved,) = read(saver(tmp_path, max_image_size=256).save_trajectories([batch([large])], 1)[0])
    assert large == before and large.size == (1024, 600) and large.info == {"note": "mine"}
    with Image.open(tmp_path / saved["image_paths"][0]) as written:
        assert written.size == (256, 150) and written.format == "PNG" and not written.info


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"])
@pytest.mark.parametrize("size", [(9, 5), (90, 50)])
def test_every_kind_of_pixels(mode: str, size: tuple[int, int], tmp_path: Path) -> None:
    (saved,) = read(saver(tmp_path, max_image_size=30).save_trajectories([batch([Image.new(mode, size)])], 1)[0])
    with Image.open(tmp_path / saved["image_paths"][0]) as written:
        assert max(written.size) == min(max(size), 30)


def test_images_stand_the_right_way_up(tmp_path: Path) -> None:
    data = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    picture("red", (20, 10)).save(data, "JPEG", exif=exif)
    turned = Image.open(io.BytesIO(data.getvalue()))
    saved = read(saver(tmp_path).save_trajectories([batch([turned, data.getvalue(), picture("red", (20, 10))])], 1)[0])
    sizes = []
    for entry in saved:
        with Image.open(tmp_path / entry["image_paths"][0]) as written:
            sizes.append(written.size)
    assert sizes == [(10, 20), (10, 20), (20, 10)] and turned.size == (20, 10)
    assert saved[0]["image_paths"] == saved[1]["image_paths"]


def test_whatever_users_have(tmp_path: Path) -> None:
    red = picture("red")
    file = tmp_path / "red.png"
    file.write_bytes(png(red))
    address = "data:image/png;base64," + base64.b64encode(png(red)).decode()
    images = [
        png(red),
        file,
        str(file),
        file.as_uri(),
        {"url": address},
        np.asarray(red),
        torch.from_numpy(np.array(red)),
    ]
    saved = read(saver(tmp_path / "out").save_trajectories([batch([[entry] for entry in images])], 1)[0])
    assert {entry["image_paths"][0] for entry in saved} == {"images/step1_exp0_sample0_img0.png"}
    assert len(files(tmp_path / "out")) == 1


@pytest.mark.filterwarnings("ignore:saving trajectories")
def test_an_image_that_cannot_be_had(tmp_path: Path) -> None:
    image_saver = saver(tmp_path)
    images = [[b"no image", picture("red")], ["https://example.org/a.png"], [tmp_path / "none.png"], [7]]
    path, stats = image_saver.save_trajectories([batch(images)], 1)
    saved = read(path)
    assert saved[0]["image_paths"] == [None, "images/step1_exp0_sample0_img1.png"] and saved[0]["num_images"] == 2
    assert all(entry["has_images"] for entry in saved)  # they have one, which is not to be had
    assert (
        [entry["image_paths"] for entry in saved[1:]] == [entry["image_sha256"] for entry in saved[1:]] == [[None]] * 3
    )
    assert stats == {"trajectory/save_errors": 3.0} and "cannot be read" in saved[0]["notes"][0]
    assert not saved[1].get("notes")  # nothing is fetched, and that is no error


def test_images_of_messages(tmp_path: Path) -> None:
    address = "data:image/png;base64," + base64.b64encode(png(picture("red"))).decode()
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "image", "image": "https://example.org/a.png"},
    ]
    row = record("a", "b", messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}])
    (saved,) = read(saver(tmp_path).save_trajectories([row], 2)[0])
    assert saved["image_paths"] == ["images/step2_exp0_sample0_img0.png", None]
    content = saved["messages"][0]["content"]
    assert content[1] == {"type": "image_url", "image_url": f"sha256:{saved['image_sha256'][0]}"}
    assert content[2] == parts[2] and row.messages[0]["content"] == parts
    path = tmp_path / "private.png"
    path.write_bytes(png(picture("blue")))
    parts = [{"type": "image", "path": str(path)}, {"type": "image_url", "image_url": {"url": path.as_uri()}}]
    row = record("c", "d", messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": "d"}])
    (saved,) = read(saver(tmp_path / "other").save_trajectories([row], 3)[0])
    assert saved["image_paths"] == [None, None] and saved["notes"][0] == "images[0]: a path in a record, not opened"


def _items(rows: Any) -> Any:
    return split_experience_batch(from_experiences(rows))


@pytest.mark.parametrize("form", [list, from_experiences, _items])
def test_images_that_records_keep_of_their_prompt(tmp_path: Path, form: Any) -> None:
    colours = ("red", "blue")
    rows = [record("a", "b", info={"images": [png(picture(color)), None], "colour": color}) for color in colours]
    experiences = form(rows)
    saved = read(saver(tmp_path).save_trajectories([experiences] if form is from_experiences else experiences, 2)[0])
    assert len(files(tmp_path)) == 2
    for entry in saved:
        (name,) = entry["image_sha256"]
        text = str(entry)
        assert f"sha256:{name}" in text and "$bytes" not in text  # the file's name where the bytes stood
        with Image.open(tmp_path / entry["image_paths"][0]) as written:
            assert written.size == (12, 8)


def test_within_the_json(tmp_path: Path) -> None:
    images = batch([[picture("red", (90, 50)), None]])
    (saved,) = read(saver(tmp_path, save_images_separately=False, max_image_size=30).save_trajectories([images], 1)[0])
    assert saved["num_images"] == 2 and "image_paths" not in saved and saved["images_base64"][1] is None
    with Image.open(io.BytesIO(base64.b64decode(saved["images_base64"][0]))) as written:
        assert written.size == (30, 17)
    assert not (tmp_path / "images").exists()


def test_saves_do_not_share_names(tmp_path: Path) -> None:
    image_saver = saver(tmp_path)
    for prefix, colour in (("trajectories", "red"), ("eval", "blue")):
        image_saver.save_trajectories([batch([picture(colour)])], 4, prefix=prefix)
    assert files(tmp_path) == ["eval_step4_exp0_sample0_img0.png", "step4_exp0_sample0_img0.png"]
    for prefix, pixel in (("trajectories", (255, 0, 0)), ("eval", (0, 0, 255))):
        (saved,) = read(tmp_path / f"{prefix}_step_4.json")
        with Image.open(tmp_path / saved["image_paths"][0]) as written:
            assert written.getpixel((0, 0)) == pixel


def test_a_save_that_is_replaced_leaves_no_image_behind(tmp_path: Path) -> None:
    image_saver = saver(tmp_path)
    image_saver.save_trajectories([batch([picture("red"), picture("blue")])], 4)
    image_saver.save_trajectories([batch([picture("red"), picture("blue")])], 40)
    image_saver.save_trajectories([batch([None, picture("green")])], 4)
    assert files(tmp_path) == [
        "step40_exp0_sample0_img0.png", "step40_exp0_sample1_img0.png", "step4_exp0_sample1_img0.png"
    ]  # fmt: skip
    with Image.open(tmp_path / "images" / "step4_exp0_sample1_img0.png") as written:
        assert written.getpixel((0, 0)) == (0, 128, 0)


def test_an_image_of_an_earlier_step_takes_no_more_room(tmp_path: Path) -> None:
    image_saver = saver(tmp_path)
    for step in (1, 2):
        image_saver.save_trajectories([batch([picture("red")])], step)
    first, second = ((tmp_path / "images" / f"step{step}_exp0_sample0_img0.png").stat() for step in (1, 2))
    assert first.st_ino == second.st_ino
    (tmp_path / "images" / "step2_exp0_sample0_img0.png").unlink()
    image_saver.save_trajectories([batch([picture("red")])], 3)
    with Image.open(tmp_path / "images" / "step3_exp0_sample0_img0.png") as written:
        assert written.getpixel((0, 0)) == (255, 0, 0)


def test_only_images_of_kept_samples_are_written(tmp_path: Path) -> None:
    rows = [record("Q", "a", EID(1, g, run, suffix=f"{g}{run}")) for g in range(4) for run in range(2)]
    rollouts = from_experiences(rows)
    rollouts.raw_images = [[picture("red", (4 + i, 4))] for i in range(8)]
    saved = read(saver(tmp_path).save_trajectories([rollouts], 1, 4)[0])
    assert files(tmp_path) == sorted(Path(path).name for entry in saved for path in entry["image_paths"])
    assert len(saved) == len(files(tmp_path)) == 4


class Refuses:
    """Decodes what is short."""

    def decode(self, ids: Any) -> str:
        if len(ids) > 12:
            raise RuntimeError("too long for me")
        return TOKENIZER.decode(ids)


@pytest.mark.filterwarnings("ignore:saving trajectories")
def test_a_record_that_fails_leaves_no_image(tmp_path: Path) -> None:
    rollouts = from_experiences([record("a", "b" * 20), record("a", "c"), record("a", "d")])
    rollouts.raw_images = [[picture("red"), picture("blue")], [picture("blue")], [picture("green")]]
    saved = read(TrajectorySaver(tmp_path, Refuses()).save_trajectories([rollouts.pack()], 1)[0])
    assert [entry["image_paths"] for entry in saved] == [
        ["images/step1_exp0_sample1_img0.png"], ["images/step1_exp0_sample2_img0.png"]
    ]  # fmt: skip
    assert files(tmp_path) == ["step1_exp0_sample1_img0.png", "step1_exp0_sample2_img0.png"]
