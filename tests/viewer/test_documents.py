"""Records as pages show them: alignment, masks, versions, pictures, pairs, strict JSON, and no torch."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import rollbook
from rollbook import EID, Experience, Experiences
from rollbook.core import freeform
from rollbook.core.ids import record_step
from rollbook.core.vocabulary import Vocabulary
from rollbook.inspect.images import Album, ImageExtractor
from rollbook.inspect.records import Reader, convert_records, decode_tagged, record_json
from rollbook.inspect.serialization import decode, encode, json_safe
from rollbook.inspect.trajectory import LENSES, Trajectory, derive_lenses, hash_prompt
from rollbook.rollout import Prompt, Sample
from tests.tiny import bytes_

VOCABULARY = Vocabulary.from_tokenizer(bytes_())


def written(text: str) -> list[int]:
    return list(bytes_().encode(text, add_special_tokens=False))


def picture(size: int = 2, kind: str = "PNG", noise: bool = False) -> bytes:
    buffer = io.BytesIO()
    pixels = (
        np.random.default_rng(0).integers(0, 255, (size, size, 3), np.uint8) if noise else np.zeros((size, size, 3))
    )
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def one_of(record: Experience, vocabulary: Vocabulary | None = VOCABULARY) -> Trajectory:
    return convert_records(Experiences([record]), vocabulary)[0]


# --- one record -----------------------------------------------------------------------------------------------------


def test_slot_j_speaks_of_token_prompt_length_plus_j() -> None:
    prompt, answer = written("2+2="), written("4!")
    names = (
        "logprobs",
        "old_logprobs",
        "ref_logprobs",
        "teacher_logprobs",
        "entropy",
        "values",
        "advantages",
        "returns",
        "token_level_reward",
        "loss_weights",
    )
    given_fields = {name: [-(i + 1) / 16, -(i + 1) / 8] for i, name in enumerate(names)}
    trajectory = one_of(
        Experience(tokens=prompt + answer, prompt_length=4, policy_versions=[3, 4], reward=0.5, **given_fields)
    )
    assert (
        trajectory.text,
        trajectory.prompt_tokens,
        trajectory.tokens,
        trajectory.token(4),
        trajectory.tokenized,
    ) == (
        "2+2=4!",
        4,
        6,
        "4",
        "exact",
    )
    shown = {
        "logprob": "logprobs",
        "entropy": "entropy",
        "value": "values",
        "advantage": "advantages",
        "reward": "token_level_reward",
        "return": "returns",
        "weight": "loss_weights",
        "teacher": "teacher_logprobs",
    }
    for lens, name in shown.items():
        assert (
            np.isnan(trajectory.arrays[lens][:4]).all() and trajectory.arrays[lens][4:].tolist() == given_fields[name]
        )
    assert trajectory.arrays["mismatch"][4:].tolist() == pytest.approx([-1 / 16, -1 / 8])
    assert trajectory.arrays["ratio"][4:].tolist() == pytest.approx(np.exp([-1 / 16, -1 / 8]).tolist())
    gap = np.array([-3 / 16 + 2 / 16, -3 / 8 + 2 / 8])
    assert trajectory.arrays["kl"][4:].tolist() == pytest.approx((np.exp(gap) - 1 - gap).tolist())
    assert set(trajectory.arrays) <= set(LENSES)
    assert trajectory.versions is not None and trajectory.versions.tolist() == [-1] * 4 + [3, 4]
    assert trajectory.mask.tolist() == [False] * 4 + [True] * 2
    assert trajectory.advantage == pytest.approx(np.mean(given_fields["advantages"]))
    assert trajectory.prompt == hash_prompt(prompt)


def test_what_was_not_recorded_is_absent() -> None:
    trajectory = one_of(Experience(tokens=[20, 21, 22]))
    assert (
        trajectory.arrays == {}
        and trajectory.versions is None
        and trajectory.advantage is None
        and trajectory.reward is None
    )


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_types_of_numbers(kind: torch.dtype) -> None:
    values = torch.tensor([-1.0, -2.0]).to(kind)
    trajectory = one_of(Experience(tokens=torch.tensor([20, 21, 22], dtype=torch.int64), advantages=values))
    assert trajectory.arrays["advantage"][1:].tolist() == [-1.0, -2.0]


def test_records_of_different_types_in_one_book() -> None:
    rows = [
        Experience(tokens=[20, 21], logprobs=torch.tensor([-1.0], dtype=kind), policy_versions=version)
        for kind, version in ((torch.bfloat16, 7), (torch.float64, [8]), (torch.float8_e5m2, None))
    ]
    trajectories = convert_records(Experiences(rows), VOCABULARY)
    assert [trajectory.arrays["logprob"][1:].tolist() for trajectory in trajectories[:2]] == [[-1.0], [-1.0]]
    assert [None if trajectory.versions is None else trajectory.versions.tolist() for trajectory in trajectories] == [
        [-1, 7],
        [-1, 8],
        None,
    ]
    assert "logprob" not in trajectories[2].arrays, "a type that numpy has not"


def test_a_field_that_is_not_as_long_as_the_response_is_left_out_and_said() -> None:
    record = Experience(
        tokens=[20, 21, 22],
        prompt_length=3,
        truncate_status="prompt_truncated",
        logprobs=[0.0, 0.0],
        entropy=[1.0, 2.0],
    )
    trajectory = one_of(record)
    assert trajectory.arrays == {} and not trajectory.mask.any() and trajectory.status == "truncated"
    assert "entropy omitted: shape [2], expected [0] (one value per response token)." in trajectory.notes


def test_numbers_that_are_not_finite_are_said() -> None:
    trajectory = one_of(Experience(tokens=[20, 21, 22], logprobs=[float("nan"), -1.0], reward=float("nan")))
    assert "logprobs: 1 of 2 values are NaN/Inf." in trajectory.notes
    assert any("not scored" in note for note in trajectory.notes)


def test_masks_and_what_nobody_sampled() -> None:
    record = Experience(
        tokens=written("q?") + written("ab") + written("TT") + written("c"),
        prompt_length=2,
        action_mask=[True, True, False, False, True],
        logprobs=[-1.0, -0.5, 0.0, 0.0, -0.25],
        old_logprobs=[-1.0, -0.5, -3.0, -3.0, -0.25],
        policy_versions=[1, 1, 1, 1, 2],
        info={
            "segments": [
                {"kind": "prompt", "start": 0, "stop": 2},
                {"kind": "model", "start": 2, "stop": 4},
                {"kind": "observation", "start": 4, "stop": 6},
                {"kind": "model", "start": 6, "stop": 7},
            ],
            "label": "x",
            "reference": "7",
            "level": 3,
        },
    )
    trajectory = one_of(record)
    assert trajectory.mask.tolist() == [False, False, True, True, False, False, True]
    assert np.isnan(trajectory.arrays["logprob"][4:6]).all() and np.isnan(trajectory.arrays["mismatch"][4:6]).all()
    assert trajectory.versions is not None and trajectory.versions.tolist() == [-1, -1, 1, 1, -1, -1, 2]
    assert [(part.role, part.kind, part.turn) for part in trajectory.segments] == [
        ("user", "text", 0),
        ("assistant", "text", 0),
        ("tool", "tool_result", 1),
        ("assistant", "text", 1),
    ]
    assert (trajectory.label, trajectory.reference, trajectory.info) == ("x", "7", {"level": 3})


def test_credit_is_what_training_does_with_it() -> None:
    policy = np.log([1.0, 1.5, 0.5, 1.5])  # how far trainer and engine differ clips nothing: the loss has another ratio
    recorded = {"logprobs": np.zeros(4), "old_logprobs": policy, "advantages": np.array([1.0, 1.0, -1.0, -1.0])}
    mask = np.array([True, True, True, False])
    assert derive_lenses(recorded, mask)["credit"].tolist() == [1.0, 1.0, -1.0, 0.0]
    weights = {"loss_weights": np.array([0.5, 0.0, 2.0, 1.0])}
    assert derive_lenses({**recorded, **weights}, mask)["credit"].tolist() == [0.5, 0.0, -2.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"finish_reason": "stop"}, "finished"),
        ({"finish_reason": "length"}, "truncated"),
        ({"truncate_status": "response_truncated"}, "truncated"),
        ({"finish_reason": "abort"}, "aborted"),
        ({"finish_reason": "error", "info": {"error": "it broke"}}, "error"),
        ({"finish_reason": "stop", "info": {"error": "it broke"}}, "error"),
        ({}, "finished"),
    ],
)
def test_how_it_ended(fields: dict[str, Any], status: str) -> None:
    assert one_of(Experience(tokens=[20, 21], **fields)).status == status


def test_a_record_without_a_response_is_unfinished() -> None:
    record = Experience(tokens=[20, 21], prompt_length=2, action_mask=[], experience_type="multi_turn")
    assert one_of(record).status == "unfinished"


def test_without_a_vocabulary_ids_are_shown() -> None:
    trajectory = one_of(Experience(tokens=[20, 21, 22], response_text="said"), None)
    assert (trajectory.text, trajectory.tokenized, trajectory.response_text) == ("⟨20⟩⟨21⟩⟨22⟩", "ids", "said")
    assert [(part.role, part.start, part.stop) for part in trajectory.segments] == [("user", 0, 1), ("assistant", 1, 3)]
    assert not trajectory.special.any()


def test_a_preference_pair() -> None:
    record = Experience(
        eid={"batch": 4, "task": 2},
        tokens=written("q?"),
        chosen=written("yes"),
        rejected=written("no"),
        chosen_messages=[{"role": "assistant", "content": "yes"}],
        rejected_messages=[{"role": "assistant", "content": "no"}],
    )
    trajectory = one_of(record)
    assert trajectory.rejected is not None and trajectory.kind == "dpo"
    assert (trajectory.text, trajectory.rejected.text, trajectory.prompt_tokens) == ("q?yes", "q?no", 2)
    assert trajectory.messages == [{"role": "assistant", "content": "yes"}]
    assert trajectory.rejected.messages == [{"role": "assistant", "content": "no"}]
    assert trajectory.mask.tolist() == [False, False, True, True, True] and trajectory.rejected.rejected is None
    assert decode(encode([trajectory]))[0]["rejected"]["text"] == "q?no"


def test_steps() -> None:
    assert [record_step(batch, 5) for batch in (0, 12, "12", "train/12", "12/eval", "eval-12", "x")] == [
        0,
        12,
        12,
        12,
        5,
        12,
        5,
    ]
    assert record_step("", None) == 0 and record_step(-3, None) == 3
    assert one_of(Experience(eid={"batch": "x"}, tokens=[20, 21], policy_versions=9)).step == 9


def test_parts_are_the_numbers_of_metrics() -> None:
    trajectory = one_of(Experience(tokens=[20, 21], metrics={"accuracy": 1, "format": 0.5, "word": "x", "flag": True}))
    assert trajectory.parts == {"accuracy": 1.0, "format": 0.5, "flag": 1.0}


def test_lengths_are_checked_when_a_trajectory_is_made() -> None:
    ends = np.array([1, 2])
    with pytest.raises(ValueError, match="u: mask: got 3 entries, expected 2"):
        Trajectory(uid="u", text="ab", ends=ends, mask=np.ones(3, bool))
    with pytest.raises(ValueError, match="u: entropy: got 1 entries, expected 2"):
        Trajectory(uid="u", text="ab", ends=ends, arrays={"entropy": np.ones(1, np.float32)})
    with pytest.raises(ValueError, match="u: ends: expected ascending offsets up to 3"):
        Trajectory(uid="u", text="abc", ends=ends)
    with pytest.raises(ValueError, match="u: prompt_tokens: got 3, expected 0 to 2"):
        Trajectory(uid="u", text="ab", ends=ends, prompt_tokens=3)


# --- books ----------------------------------------------------------------------------------------------------------


def test_a_book_shows_its_records_without_torch(tmp_path: Path) -> None:
    rows = [
        Experience(
            eid={"batch": 3, "task": 1, "run": run, "suffix": "s"},
            tokens=written("q?é") + written("🙂"),
            prompt_length=4,
            logprobs=[-1.0] * 4,
            advantages=torch.ones(4, dtype=torch.bfloat16),
            policy_versions=2,
            info={"tensor": torch.ones(2, dtype=torch.bfloat16), "many": torch.zeros(4000), "raw": bytes(3000)},
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(picture(64, noise=True))}}]}
            ],
            multi_modal_inputs={"pixel_values": torch.zeros(40, 30)},
        )
        for run in range(2)
    ]
    with rollbook.open(tmp_path / "book", tokenizer=bytes_()) as book:
        book.append(rows)
        book.append(Experience(eid={"batch": 3, "task": 1, "run": 0, "suffix": "e"}, tokens=[20, 21]), evaluation=True)
    code = (
        "import sys, json, rollbook\nfrom rollbook.inspect.records import Reader\n"
        f"reader = Reader(rollbook.open({str(tmp_path / 'book')!r}, 'r'))\n"
        "one, two = reader.trajectories(['3/1/1/0/s', '3/1/0/0/e'])\n"
        "record = reader.record('3/1/0/0/s')\njson.dumps(record, allow_nan=False)\n"
        "print(json.dumps([one.uid, one.gid, one.step, one.text, one.ends.tolist(), one.evaluation, two.evaluation,\n"
        "  one.info['tensor'].tolist(), one.info['many'], len(one.pictures), one.pictures[0].width,\n"
        "  one.versions.tolist()[-1], record['multi_modal_inputs'], record['info']['raw'][:7],\n"
        "  'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    text = "q?é🙂"
    assert json.loads(done.stdout) == [
        "3/1/1/0/s",
        "3/1",
        3,
        text,
        [1, 2, 2, 3, 3, 3, 3, 4],
        False,
        True,
        [1.0, 1.0],
        "⟨tensor float32 [4000]⟩",
        1,
        64,
        2,
        {"pixel_values": {"dtype": "float32", "shape": [40, 30]}},
        "sha256:",
        False,
    ]


def test_an_unknown_id_is_a_key_error() -> None:
    with rollbook.open("memory:") as book, pytest.raises(KeyError, match="1/2/3/4/a"):
        Reader(book).trajectories(["1/2/3/4/a"])


def test_a_book_of_one_record_in_each_append_keeps_the_order() -> None:
    rows = [Experience(eid={"batch": 1, "task": task, "suffix": "s"}, tokens=[20, 21 + task]) for task in range(5)]
    with rollbook.open("memory:", tokenizer=bytes_()) as book:
        for row in rows:
            book.append(row)
        uids = [rows[i].eid.uid for i in (3, 0, 4, 3)]
        assert [trajectory.uid for trajectory in Reader(book).trajectories(uids)] == uids


# --- pictures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 64])
def test_pictures_of_a_book_are_handed_out_by_their_hash(size: int) -> None:
    """Small ones stand in the record, large ones beside it."""
    data = picture(size, noise=True)
    assert (len(data) > 1024) == (size == 64)
    row = Experience(
        tokens=written("<image>what?") + written("a cat"),
        prompt_length=6,
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": url(data)}}, {"type": "text", "text": "what?"}],
            }
        ],
    )
    with rollbook.open("memory:", tokenizer=bytes_()) as book:
        book.append(row)
        reader = Reader(book)
        (trajectory,) = reader.trajectories([row.eid.uid])
        (shown,) = trajectory.pictures
        assert (shown.mime, shown.width, shown.height, shown.token) == ("image/png", size, size, 0)
        assert reader.media(shown.sha256) == (data, "image/png")
        assert trajectory.messages is not None
        assert trajectory.messages[0]["content"][0]["image_url"]["url"]["picture"] == shown.sha256
        assert reader.media("0" * 64) is None
        again = Reader(book).media(shown.sha256)
        assert again == ((data, "image/png") if size == 64 else None), "of a small one, its record is read first"


@pytest.mark.parametrize(
    "columns",
    [
        lambda data: {"messages": [{"content": [{"type": "image", "image": data}]}]},
        lambda data: {"messages": [{"content": [{"type": "image", "image": base64.b64encode(data).decode()}]}]},
        lambda data: {
            "messages": [{"content": [{"type": "image", "source": {"data": base64.b64encode(data).decode()}}]}]
        },
        lambda data: {"info": {"images": [{"bytes": data, "path": "a.png"}]}},
        lambda data: {"info": {"b64_json": base64.b64encode(data).decode()}},
    ],
)
@pytest.mark.parametrize("size", [2, 64])
def test_where_pictures_stand(columns: Any, size: int) -> None:
    data = picture(size, noise=True)
    row = Experience(tokens=[20, 21], **columns(data))
    with rollbook.open("memory:", tokenizer=bytes_()) as book:
        book.append(row)
        reader = Reader(book)
        (trajectory,) = reader.trajectories([row.eid.uid])
        assert [reader.media(shown.sha256) for shown in trajectory.pictures] == [(data, "image/png")]


def test_the_pictures_of_a_prompt_are_in_its_records_and_once_in_the_book(tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(picture(64, "JPEG", noise=True))
    drawn = Image.open(io.BytesIO(picture(64, noise=True)))
    prompt = Prompt(text="<image><image>what?", images=[file, drawn])
    samples = [
        Sample(
            prompt=prompt,
            eid=EID(0, "a", run, suffix="x"),
            prompt_ids=written("<image><image>what?"),
            response_ids=written("cat"),
            media={"pixel_values": torch.zeros(2, 3, 16, 16)},
        )
        for run in range(8)
    ]
    with rollbook.open("memory:", tokenizer=bytes_()) as book:
        book.append([sample.to_experience() for sample in samples])
        with book.ledger.read() as tx:
            assert tx.first("SELECT count(*) FROM media") == (3,)  # two pictures and the pixels of both, for eight runs
        reader = Reader(book)
        for trajectory in reader.trajectories([sample.eid.uid for sample in samples]):
            assert [shown.token for shown in trajectory.pictures] == [0, 1] and trajectory.notes == []
            media = [reader.media(shown.sha256) for shown in trajectory.pictures]
            assert media[0] == (file.read_bytes(), "image/jpeg")
            assert media[1] is not None and media[1][1] == "image/png"
            with Image.open(io.BytesIO(media[1][0])) as shown:
                assert shown.tobytes() == drawn.tobytes()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_kinds_of_pictures(kind: str) -> None:
    added = Album().add(picture(7, kind))
    assert added is not None and (added.mime, added.width, added.height) == (f"image/{kind.lower()}", 7, 7)


def test_what_is_no_picture_is_not_handed_out() -> None:
    huge = bytearray(picture())
    huge[16:24] = (60_000).to_bytes(4, "big") * 2
    svg = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"
    urls = [
        url(svg, "svg+xml"),
        url(svg, "png"),
        url(bytes(huge)),
        "data:image/svg+xml,<svg/>",
        "data:image/png;base64,%%%",
    ]
    row = Experience(
        tokens=[20, 21], messages=[{"content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]
    )
    trajectory = one_of(row)
    assert trajectory.pictures == [] and any("recorded as URLs" in note for note in trajectory.notes)


def test_nothing_is_fetched_from_where_a_record_points(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(picture())
    path = str(tmp_path / "secret.png")
    parts = [
        {"type": "image", "image": path},
        {"type": "image", "path": f"file://{path}"},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}},
    ]
    trajectory = one_of(Experience(tokens=[20, 21], messages=[{"role": "user", "content": parts}]))
    assert trajectory.pictures == []
    assert "3 images are recorded as URLs only and are not fetched." in trajectory.notes


def test_a_text_that_looks_like_a_reference_is_none() -> None:
    album = Album(lambda _: picture())
    looked = ImageExtractor(album, references=["a" * 64])
    looked.extract({"url": "data:image/png;base64,sha256:" + "b" * 64, "data": "sha256:" + "c" * 64})
    assert looked.pictures == []
    looked.extract({"url": "data:image/png;base64,sha256:" + "a" * 64})
    assert len(looked.pictures) == 1


def test_two_pictures_find_their_places() -> None:
    text = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|><|vision_start|><|image_pad|><|vision_end|>what?"
    content = [{"type": "image", "image": picture(size)} for size in (2, 3)]
    trajectory = one_of(
        Experience(tokens=written(text) + written("x"), prompt_length=len(text), messages=[{"content": content}])
    )
    assert [shown.token for shown in trajectory.pictures] == [0, text.index("<|vision_start|>", 1)]


# --- JSON -----------------------------------------------------------------------------------------------------------


def test_the_whole_record_as_strict_json() -> None:
    row = Experience(
        eid={"batch": 1, "task": "a/b", "suffix": "s"},
        tokens=[1, 2, 3],
        logprobs=[float("nan"), float("-inf")],
        reward=float("nan"),
        prompt_text="lone \ud800",
        policy_versions=7,
        routed_experts=torch.zeros(2, 1, 2, dtype=torch.int16),
        info={"t": (1, float("inf")), "big": 2**80, "b": b"abc", 5: "five", "lone": "\udfff"},
        custom_fields=[],
    )
    document = record_json(Experiences([row]))
    again = json.loads(json.dumps(document, allow_nan=False, ensure_ascii=False).encode())
    assert again == document
    assert document["uid"] == "1/a%2Fb/0/0/s" and document["logprobs"] == [None, None] and document["reward"] is None
    assert document["prompt_text"] == "lone \ufffd" and document["policy_versions"] == 7
    assert document["info"] == {"t": [1, None], "big": str(2**80), "b": "⟨3 bytes⟩", "5": "five", "lone": "\ufffd"}
    assert document["routed_experts"] == [[[0, 0]], [[0, 0]]]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["$int", "$dict", "$bytes"]) | st.integers(), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4) | st.integers(0, 9), VALUES, max_size=4))
def test_free_form_values_are_what_freeform_says(value: dict[Any, Any]) -> None:
    text = freeform.dumps(value)
    decoded = decode_tagged(json.loads(text))
    assert json_safe(decoded) == json_safe(freeform.loads(text))
    json.dumps(json_safe(decoded), allow_nan=False).encode()


def test_damaged_free_form_values_are_one_error() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    for bad in (
        {"$tensor": {"dtype": "float32", "shape": [2], "data": "AA=="}},
        {"$what": 1},
        {"$tensor": {"data": 5}},
        deep,
        {"$bytes": "sha256:" + "a" * 64},
        {"$array": {}},
    ):
        with pytest.raises(rollbook.core.errors.WireError):
            decode_tagged(bad)
