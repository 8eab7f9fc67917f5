"""Rewards behind HTTP, against a real server on loopback that is slow, wrong, broken or not there."""

from __future__ import annotations

import asyncio
import base64
import io
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollbook import EID, Experience
from rollbook.rewards import RemoteReward, RewardError, RewardInput, as_reward
from rollbook.rewards.remote import ImageEncoder
from rollbook.rollout import Prompt, Sample
from rollbook.rollout.server import Backoff
from tests.rewards.helpers import sample, samples
from tests.rewards.server import nobody, serve

QUICK = Backoff(tries=3, first=0.01, max_wait=0.02)


def decoded(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)))


def picture(width: int, height: int, mode: str = "RGB", colour: Any = (200, 30, 90)) -> Image.Image:
    image = Image.new("RGB", (width, height), colour)
    return image if mode == "RGB" else image.convert(mode)


# --- the request and the reply --------------------------------------------------------------------------------------


def test_the_request_has_lightrfts_form() -> None:
    with serve() as server:
        inputs = [
            RewardInput(prompt="2+2=", response="4", reference="4", label="math", images=[picture(4, 4)]),
            RewardInput(prompt="hi", response="ho"),
        ]
        scores = RemoteReward(server.url, headers={"x-key": "1"})(inputs)
    assert scores.rewards == [5.0, 4.0]
    (sent,) = server.requests
    assert sorted(sent) == ["images", "labels", "prompts", "queries", "references"]
    assert sent["queries"] == ["2+2=4", "hiho"] and sent["prompts"] == ["2+2=", "hi"]
    assert sent["references"] == ["4", None] and sent["labels"] == ["math", None]
    assert [len(images) for images in sent["images"]] == [1, 0]
    assert server.headers[0]["x-key"] == "1"


def test_what_no_sample_has_is_not_sent() -> None:
    with serve() as server:
        RemoteReward(server.url)(samples("a", "b"))
        RemoteReward(server.url, send_responses=True)(samples("a"))
    assert sorted(server.requests[0]) == ["prompts", "queries"]
    assert server.requests[1]["responses"] == ["a"]


def test_any_text_can_be_sent() -> None:
    texts = ["héllo 😀", "\ud83d alone", "\x00", "line\nline", ""]
    with serve() as server:
        scores = RemoteReward(server.url)(samples(*texts, prompt=""))
    assert scores.rewards == [float(len(text)) for text in texts]
    assert server.requests[0]["queries"] == texts


def test_batches_keep_the_order_and_overlap() -> None:
    def slowly(payload: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.05)
        return {"rewards": [float(query) for query in payload["queries"]]}

    with serve(slowly) as server:
        reward = RemoteReward(server.url, batch_size=4, concurrency=3)
        assert reward(samples(*map(str, range(30)), prompt="")).rewards == list(range(30))
        assert [len(request["queries"]) for request in server.requests].count(4) == 7
        assert 1 < server.max_concurrent <= 3


def test_metrics_come_along() -> None:
    def answer(payload: dict[str, Any]) -> dict[str, Any]:
        n = len(payload["queries"])
        return {"rewards": [1] * n, "metrics": {"safe": [0.5] * n, "odd": [None] * n}}

    with serve(answer) as server:
        scores = RemoteReward(server.url, batch_size=2)(samples(*"abc"))
    assert scores.metrics["safe"] == [0.5] * 3 and all(map(math.isnan, scores.metrics["odd"]))


def test_no_samples_no_requests() -> None:
    with serve() as server:
        assert RemoteReward(server.url)([]).rewards == []
    assert server.requests == []


def test_inside_a_running_loop_and_async() -> None:
    async def work(url: str) -> None:
        reward = RemoteReward(url)
        assert reward(samples("a")) == await reward.score_async(samples("a"))

    with serve() as server:
        asyncio.run(work(server.url))
    assert len(server.requests) == 2


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [500, 502, 503, 429, 408, "close"])
def test_what_may_pass_is_tried_again(fault: Any) -> None:
    with serve(faults=[fault, fault]) as server:
        scores = RemoteReward(server.url, backoff=QUICK)(samples("ab"))
    assert scores.rewards == [5.0] and scores.errors == [None]
    assert len(server.requests) == 3


def test_a_slow_server_is_asked_again() -> None:
    with serve(faults=["slow"]) as server:
        start = time.monotonic()
        scores = RemoteReward(server.url, timeout=1.0, backoff=QUICK)(samples("ab"))
        assert time.monotonic() - start < 15
    assert scores.rewards == [5.0] and len(server.requests) == 2


def test_a_server_that_is_always_slow_is_given_up() -> None:
    with serve(faults=["slow"] * 9) as server:
        scores = RemoteReward(server.url, timeout=0.1, backoff=QUICK)(samples("ab"))
        assert math.isnan(scores.rewards[0])
        assert "/score: timed out after 0.1 s (3 tries)" in (scores.errors[0] or "")


def test_a_reply_that_trickles_does_not_outlast_the_timeout() -> None:
    # One that sends a byte now and then never lets a read time out: the limit is on the whole.
    import socket
    import threading

    leave = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            client, _ = listening.accept()
            with client:
                client.recv(65536)
                client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
                while not leave.wait(0.02):
                    try:
                        client.sendall(b" ")
                    except OSError:
                        return

        threading.Thread(target=drip, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        start = time.monotonic()
        scores = RemoteReward(url, timeout=0.3, backoff=Backoff(tries=1))(samples("a"))
        leave.set()
        assert time.monotonic() - start < 10 and "timed out" in (scores.errors[0] or "")


def test_a_refused_connection_is_tried_again_and_then_recorded() -> None:
    scores = RemoteReward(nobody(), backoff=QUICK)(samples("a", "b"))
    assert all(map(math.isnan, scores.rewards))
    assert all("ConnectError" in (error or "") and "(3 tries)" in (error or "") for error in scores.errors)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (400, "status 400"),
        (404, "status 404"),
        (422, "status 422"),
        (301, "status 301"),
        ("garbage", "bytes that are not JSON"),
        ("html", "bytes that are not JSON"),
        ("list", "gave a list of 2, expected"),
    ],
)
def test_what_cannot_pass_is_asked_once_and_fails_its_request(fault: Any, message: str) -> None:
    with serve(faults={0: fault}) as server:
        reward = RemoteReward(server.url, batch_size=2, concurrency=1, backoff=QUICK)
        scores = reward(samples("a", "b", "c", "d"))
    assert len(server.requests) == 2
    assert [math.isnan(value) for value in scores.rewards] == [True, True, False, False]
    assert (
        message in (scores.errors[0] or "")
        and message in (scores.errors[1] or "")
        and scores.errors[2:] == [None, None]
    )


def test_a_wrong_number_of_scores_is_raised() -> None:
    with serve(faults={0: "count"}) as server, pytest.raises(ValueError, match="remote: gave 1 scores, expected 2"):
        RemoteReward(server.url, on_error=0.0)(samples("a", "b"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [("nan", "gave nan, expected a finite number"), ("text", "gave str ('good')"), ("null", "gave NoneType")],
)
def test_a_score_that_is_none_is_its_samples_error(fault: str, message: str) -> None:
    with serve(faults=[fault]) as server:
        scores = RemoteReward(server.url)(samples("a", "bb"))
    assert math.isnan(scores.rewards[0]) and scores.rewards[1] == 5.0
    assert message in (scores.errors[0] or "") and scores.errors[1] is None


def test_integers_become_floats() -> None:
    with serve(faults=["ints"]) as server:
        scores = RemoteReward(server.url)(samples("a"))
    assert scores.rewards == [4.0] and type(scores.rewards[0]) is float
    assert str(scores.to_tensors()[0].dtype) == "torch.float32"


def test_a_fixed_score_or_an_exception() -> None:
    with serve(faults=[400, 400]) as server:
        assert RemoteReward(server.url, on_error=-2.0)(samples("a")).rewards == [-2.0]
        with pytest.raises(RewardError, match="sample 0: remote: .*status 400"):
            RemoteReward(server.url, on_error="raise")(samples("a"))


def test_errors_say_neither_what_was_sent_nor_secrets(caplog: pytest.LogCaptureFixture) -> None:
    with serve(faults=[400, "list", "garbage"]) as server:
        for _ in range(3):
            url = server.url.replace("http://", "http://user:hunter2@") + "?token=hunter3"
            scores = RemoteReward(url)([sample("x", prompt="the secret prompt", images=[picture(4, 4)])])
            assert scores.errors[0] is not None and "hunter" not in scores.errors[0]
            assert "secret" not in scores.errors[0]
    assert "secret" not in caplog.text and "hunter" not in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 500


def test_a_reference_that_is_no_json_fails_its_request_alone() -> None:
    with serve() as server:
        reward = RemoteReward(server.url, batch_size=1)
        scores = reward([sample("a", reference=object()), sample("b", reference={"x": [1]})])
    assert "cannot be sent" in (scores.errors[0] or "") and scores.rewards[1] == 4.0


def test_replicas_share_the_work_and_stand_in_for_each_other() -> None:
    with serve() as first, serve() as second:
        reward = as_reward([first.url, second.url], replicas=True, batch_size=1, backoff=QUICK)
        assert reward(samples(*"abcdef")).rewards == [4.0] * 6
        assert len(first.requests) == len(second.requests) == 3
    with serve() as alive:
        reward = as_reward([nobody(), alive.url], replicas=True, batch_size=1, backoff=QUICK)
        assert reward(samples(*"abcd")).rewards == [4.0] * 4


def test_several_urls_are_several_rewards() -> None:
    def ones(payload: dict[str, Any]) -> dict[str, Any]:
        return {"rewards": [1.0 for _ in payload["queries"]]}

    with serve() as first, serve(ones) as second:
        urls = [first.url, second.url]
        scores = as_reward(urls, weights=[0.5, 2.0])(samples("a", "bb"))
        assert scores.rewards == [4.0, 4.5]
        assert scores.metrics == {"remote0": [4.0, 5.0], "remote1": [1.0, 1.0]}
        by_hand = as_reward(urls, combine=lambda rewards: rewards[0] * rewards[1] - 1)(samples("a", "bb"))
        assert by_hand.rewards == [3.0, 4.0]
        named = as_reward({"length": first.url, "one": second.url})(samples("a"))
        assert named.rewards == [5.0] and list(named.metrics) == ["length", "one"]


def test_a_file_first_and_urls_after_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)")
    with serve() as server:
        scores = as_reward([str(path), server.url])(samples("a"))
    assert scores.rewards == [5.0] and scores.metrics == {"mine": [1.0], "remote": [4.0]}


# --- images ---------------------------------------------------------------------------------------------------------


def test_every_image_is_its_own() -> None:
    with serve() as server:
        RemoteReward(server.url)([sample("a", images=[picture(4, 4), picture(8, 8)]), sample("b")])
    (images, none) = server.requests[0]["images"]
    assert [decoded(text).size for text in images] == [(4, 4), (8, 8)] and none == []
    assert decoded(images[0]).format == "JPEG"


@pytest.mark.parametrize("mode", ["P", "RGBA", "LA", "L", "1", "CMYK", "I;16", "F"])
@pytest.mark.parametrize("image_format", ["jpeg", "png"])
def test_every_kind_of_pixels_can_be_sent(mode: str, image_format: Any) -> None:
    image = Image.new("L", (8, 6), 77).convert("I").convert("I;16") if mode == "I;16" else picture(8, 6, mode)
    sent = decoded(ImageEncoder(image_format).text(image))
    assert sent.size == (8, 6) and sent.format == image_format.upper()


def test_png_loses_nothing() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    sent = decoded(ImageEncoder("png").text(Image.fromarray(noise)))
    assert np.array_equal(np.asarray(sent), noise)
    assert np.array_equal(np.asarray(decoded(ImageEncoder("png").text(noise))), noise)


def test_an_image_is_encoded_once() -> None:
    image = picture(16, 16)
    encoder = ImageEncoder()
    texts = [encoder.text(image), encoder.text(image), encoder.text(image.copy()), encoder.text(picture(8, 8))]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    assert encoder.encoded == 2


def test_two_palettes_with_the_same_indices_are_two_images() -> None:
    first, second = picture(4, 4, "P", (255, 0, 0)), picture(4, 4, "P", (255, 0, 0))
    second.putpalette([0, 0, 255] * 256)
    encoder = ImageEncoder("png")
    pixels = [decoded(encoder.text(image)).convert("RGB").getpixel((0, 0)) for image in (first, second)]
    assert pixels[0] != pixels[1] and encoder.encoded == 2


def test_bytes_files_and_data_go_as_they_are(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    picture(5, 5).save(buffer, "WEBP")
    raw = buffer.getvalue()
    path = tmp_path / "a picture.webp"
    path.write_bytes(raw)
    data = "data:image/webp;base64," + base64.b64encode(raw).decode()
    encoder = ImageEncoder()
    for image in (raw, bytearray(raw), path, data, {"bytes": raw, "path": "gone.webp"}, {"path": path}, {"image": raw},
                  {"image_url": {"url": data}}):  # fmt: skip
        assert base64.b64decode(encoder.text(image)) == raw
    for bad in ("http://elsewhere/a.png", Path("nothing.png"), 3, {"a": 1}, np.zeros((2, 3, 3)) - 1, "data:;base64,abc",
                b"no image", raw[:20], str(path), path.as_uri(), {"path": str(path)}):  # fmt: skip
        with pytest.raises(ValueError, match="image: got"):
            encoder.text(bad)


def test_a_file_that_a_record_names_is_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    picture(4, 4).save(path)
    content = path.read_bytes()
    secret = tmp_path / "key"
    secret.write_text("hunter2")
    named: list[Any] = [str(path), path, path.as_uri(), {"path": str(path)}, {"image_url": {"url": str(path)}}]
    records = [Experience(eid=EID(0, i), tokens=[1, 2], prompt_length=1, prompt_text="", response_text=str(i),
                          info={"images": [image]}) for i, image in enumerate([*named, content])]  # fmt: skip
    prompt = Prompt(text="", images=[str(path)])
    own_sample = Sample(
        prompt=prompt, eid=EID(0, 9), prompt_ids=[1], response_ids=[2], text="own", finish_reason="stop"
    )
    stolen = sample("stolen", images=[secret])
    with serve() as server:
        scores = RemoteReward(server.url)([*records, own_sample, stolen])
    (sent,) = server.requests
    assert sent["queries"] == ["5", "own"] and [len(images) for images in sent["images"]] == [1, 1]
    assert [base64.b64decode(images[0]) for images in sent["images"]] == [content] * 2
    assert [i for i, error in enumerate(scores.errors) if error is None] == [5, 6]
    assert scores.errors[0] is not None and "got a path or an address as text" in scores.errors[0]
    assert scores.errors[7] is not None and "cannot be read" in scores.errors[7]


def test_images_sent_once_as_a_table() -> None:
    shared, other = picture(16, 16), picture(8, 8)
    inputs = [sample("a", images=[shared]), sample("b", images=[shared, other]), sample("c")]
    with serve() as server:
        RemoteReward(server.url, dedupe_images=True)(inputs)
        RemoteReward(server.url)(inputs)
    sent, nested = server.requests
    assert [decoded(text).size for text in sent["images"]] == [(16, 16), (8, 8)]
    assert sent["image_indices"] == [[0], [0, 1], []]
    assert [[sent["images"][i] for i in row] for row in sent["image_indices"]] == nested["images"]


# --- options --------------------------------------------------------------------------------------------------------


def test_options_are_checked() -> None:
    for name, value in {
        "batch_size": 0,
        "concurrency": 0,
        "timeout": 0,
        "image_format": "gif",
        "on_error": "x",
    }.items():
        with pytest.raises(ValueError, match=name):
            RemoteReward("http://localhost/", **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"option 'time_out' is not one of RemoteReward; did you mean 'timeout'\?"):
        as_reward("http://localhost/", time_out=3)


def test_without_httpx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match="extra 'remote' of Rollbook"):
        RemoteReward(nobody())(samples("a"))
