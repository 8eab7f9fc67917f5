"""`Batch`: every column in its place, padded and packed, from columns that some records lack and types that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollbook
from rollbook import CustomField, Experience, Experiences
from rollbook.batch import Batch
from rollbook.batch.columns import RESPONSE_COLUMNS, read_columns
from rollbook.batch.device import copy_columns
from rollbook.compat.lightrft.batch import from_experiences
from rollbook.core.rows import Rows, concatenated
from tests import tiny

NAMES = {
    **{name: name for name in ("values", "advantages", "returns", "action_mask", "attention_mask")},
    "tokens": "sequences",
    "ref_logprobs": "base_action_log_probs",
    "entropy": "action_entropy",
}
"""A batch's fields, and those of an `ExperienceBatch` that hold the same."""
SIDES = {"left": "left", "right": "prompt_left_response_right"}
ZEROS = dict.fromkeys((*RESPONSE_COLUMNS, "policy_versions", "routed_experts"), 0.0)
"""As LightRFT's batches have it: 0 in the rows of records that lack a column."""


@st.composite
def record_lists(draw: st.DrawFn) -> Experiences:
    """Records of many lengths; each lacks some columns, and some columns have rows of another type."""
    shapes = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)).filter(any), min_size=1, max_size=6))
    source = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    records = []
    for i, (prompt, response) in enumerate(shapes):
        columns: dict[str, Any] = {}
        for name in ("logprobs", "old_logprobs", "ref_logprobs", "entropy", "values", "advantages", "loss_weights"):
            kind = draw(st.sampled_from(["float32", "float32", "float64", None]))
            if kind is not None:
                columns[name] = torch.randn(response, generator=source).to(getattr(torch, kind))
        if draw(st.booleans()):
            columns["policy_versions"] = draw(st.sampled_from([3, list(range(response))]))
        if draw(st.booleans()):
            columns["routed_experts"] = torch.randint(0, 9, (response, 2, 3), generator=source).to(torch.int16)
        tokens = torch.randint(1, 300, (prompt + response,), generator=source)
        tokens = tokens.to(draw(st.sampled_from([torch.int32, torch.int32, torch.int64])))
        mask = torch.rand(response, generator=source) < 0.8
        records.append(
            Experience(
                tokens=tokens,
                prompt_length=prompt,
                action_mask=mask,
                experience_type="multi_turn",
                reward=draw(st.sampled_from([1.0, 0.5])),
                eid={"task": i},
                **columns,
            )
        )
    return Experiences(records)


def same(left: Any, right: Any) -> bool:
    """Bit for bit; rows end to end of a packed batch."""
    if left is None or right is None:
        return left is right
    if isinstance(left, Rows):
        return left.lengths == right.lengths and same(left.values, right.values)
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


@settings(max_examples=150, deadline=None)
@given(records=record_lists(), packed=st.booleans(), side=st.sampled_from(["left", "right"]))
def test_the_same_numbers_as_an_experience_batch(records: Experiences, packed: bool, side: str) -> None:
    batch = Batch.from_records(records, fill=ZEROS, packed=packed, pad_token_id=7, side=side)  # type: ignore[arg-type]
    other = from_experiences(records, packing_samples=packed, pad_token_id=7, layout=SIDES[side])
    for name, legacy_name in NAMES.items():
        if not (packed and name == "attention_mask"):
            assert same(getattr(batch, name), getattr(other, legacy_name)), name
    extras = other.extras or {}
    for name in ("teacher_logprobs", "loss_weights"):
        assert same(getattr(batch, name), extras.get(name))
    assert {*batch.extra} == {*extras} - {*RESPONSE_COLUMNS, "old_logprobs"}
    assert all(same(column, extras[name]) for name, column in batch.extra.items())
    assert torch.equal(batch.position_ids, other.position_ids) and batch.layout == other.layout
    assert batch.eids == records.eids() and batch.reward is not None
    assert batch.reward.tolist() == records.values("reward")
    if packed:
        assert torch.equal(batch.cu_seqlens, other.cu_seqlens)
        assert torch.equal(batch.response_cu_seqlens, other.action_cu_seqlens)
    for name, field in (("logprobs", "logprobs"), ("old_logprobs", "old_logprobs")):
        column, rows = getattr(batch, name), records.values(field)
        if all(row is None for row in rows):
            assert column is None
        else:
            flat = batch if packed else batch.pack()
            for row_tensor, row in zip(getattr(flat, name), rows, strict=True):
                assert torch.equal(
                    row_tensor, torch.zeros_like(row_tensor) if row is None else row.to(row_tensor.dtype)
                )


@settings(max_examples=80, deadline=None)
@given(records=record_lists(), side=st.sampled_from(["left", "right"]), seed=st.integers(0, 9))
def test_pack_pad_and_split(records: Experiences, side: Any, seed: int) -> None:
    padded = Batch.from_records(records, fill=ZEROS, side=side, pad_token_id=3)
    packed = Batch.from_records(records, fill=ZEROS, packed=True)
    assert padded.pack() == packed and packed.pad(3, side) == padded and packed.pack() is packed
    assert padded.pad(5, "left") == Batch.from_records(records, fill=ZEROS, pad_token_id=5)
    split = seed % (len(records) + 1)
    for batch in (padded, packed):
        parts = batch.split([split, len(records) - split])
        assert [len(part) for part in parts] == [split, len(records) - split]
        for part, rows in zip(parts, (records[:split], records[split:]), strict=True):
            if len(rows):
                alone = Batch.from_records(rows, fill=ZEROS, packed=True)
                for name in ("tokens", "action_mask"):
                    assert same(getattr(part.pack(), name), getattr(alone, name))
    with pytest.raises(ValueError, match="sizes: got"):
        padded.split([len(records) + 1])


def test_only_the_columns_that_are_named() -> None:
    records = Experiences([
        Experience(tokens=[1, 2, 3], logprobs=[-1.0, -2.0], old_logprobs=[-3.0, -4.0], advantages=[1.0, 1.0],
                   action_mask=[True, False], eid={"task": 1}),
        Experience(tokens=[4, 5], logprobs=[-5.0], eid={"task": 2}),
    ])  # fmt: skip
    batch = Batch.from_records(records, ("tokens",))
    assert batch.action_mask.tolist() == [[True, True], [False, True]]  # every response token
    assert all(getattr(batch, name) is None for name in (*RESPONSE_COLUMNS, "reward")) and not batch.extra
    batch = Batch.from_records(records, ("action_mask", "logprobs"))
    assert batch.action_mask.tolist() == [[True, False], [False, True]]
    assert batch.logprobs is not None and batch.logprobs.tolist() == [[-1.0, -2.0], [0.0, -5.0]]
    assert batch.old_logprobs is None and batch.returns is None and batch.advantages is None
    with pytest.raises(ValueError, match="columns: 'advantage' is neither a column of a batch nor a custom field"):
        Batch.from_records(records, ("advantage",))


def test_a_column_that_a_record_lacks_is_never_made_up() -> None:
    records = [
        Experience(tokens=[1, 2, 3], advantages=[1.0, 2.0], eid={"task": 1, "suffix": "a"}),
        Experience(tokens=[4, 5], loss_weights=[0.5], eid={"task": 2, "suffix": "b"}),
    ]
    missing = r"record 1 \(/2/0/0/b\): advantages: missing, expected it in every record of the batch; fill="
    for names in (None, ("advantages",)):
        with pytest.raises(ValueError, match=missing):
            Batch.from_records(records, names)
    with pytest.raises(ValueError, match=r"record 0 .*: returns: missing"):
        Batch.from_records(records, ("returns",))
    book = rollbook.open("memory:")
    book.append(records)
    with book.lease(2) as lease:
        with pytest.raises(ValueError, match=missing):
            lease.batch()
        batch = lease.batch(fill={"advantages": -1.0})
        lease.ack()
    assert batch.advantages.tolist() == [[1.0, 2.0], [0.0, -1.0]] and batch.returns is None
    assert batch.loss_weights.tolist() == [[1.0, 1.0], [0.0, 0.5]], "records without weights count as 1"
    assert Batch.from_records(records, ("returns",), fill={"returns": 0.0}).returns.tolist() == [[0.0, 0.0]] * 2
    assert Batch.from_records(records[:1], ("loss_weights",)).loss_weights.tolist() == [[1.0, 1.0]]
    for fill, message in (({"reward": 0.0}, "fill: 'reward' is not a field"), (0.0, "fill: got float")):
        with pytest.raises(ValueError, match=message):
            Batch.from_records(records, fill=fill)  # type: ignore[arg-type]


def test_custom_fields() -> None:
    fields = [CustomField("score", "scores", torch.float32)]
    records = Experiences([Experience(tokens=[1, 2], info={"score": s}, custom_fields=fields) for s in (1, 2)])
    for names in (None, ("scores",)):
        batch = Batch.from_records(records, names)
        assert batch.extra["scores"].tolist() == [1.0, 2.0]
        assert batch.pack().extra["scores"].tolist() == [1.0, 2.0]
        assert [part.extra["scores"].tolist() for part in batch.split([1, 1])] == [[1.0], [2.0]]
    assert not Batch.from_records(records, ("tokens",)).extra


def test_what_is_refused() -> None:
    records = Experiences([Experience(tokens=[1, 2, 3], eid={"task": 1})])
    for options, message in (
        ({"side": "top"}, "side: got 'top', expected 'left' or 'right'"),
        ({"pad_token_id": True}, "pad_token_id: got True, expected an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            Batch.from_records(records, **options)
    for wrong, message in ((5, "rows: got int"), ([1], "record 0: got int, expected an Experience")):
        with pytest.raises(ValueError, match=message):
            Batch.from_records(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got a preference pair, expected a response"):
        Batch.from_records(Experiences([Experience(tokens=[1], chosen=[2], rejected=[3])]))
    with pytest.raises(ValueError, match="cu_seqlens: the batch is padded"):
        Batch.from_records(records).cu_seqlens  # noqa: B018


def test_the_first_token_is_masked_and_rows_of_a_hand_made_batch() -> None:
    promptless = Experience(tokens=[1, 2, 3], prompt_length=0, action_mask=[True] * 3, experience_type="multi_turn")
    batch = Batch.from_records(Experiences([promptless]), ("action_mask",))
    assert batch.action_mask.tolist() == [[False, True, True]]
    attended = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    built = Batch(tokens=torch.arange(8).view(2, 4), action_mask=torch.ones(2, 3).bool(), attention_mask=attended)
    packed = built.pack()
    assert [row.tolist() for row in packed.tokens] == [[1, 2, 3], [4, 5, 6]]
    assert [len(row) for row in packed.action_mask] == [3, 2]


def test_nothing() -> None:
    for packed in (False, True):
        batch = Batch.from_records(Experiences([]), packed=packed)
        assert len(batch) == 0 and batch.tokens is not None


def test_devices_leave_the_batch_as_it_is() -> None:
    records = Experiences([Experience(tokens=[1, 2, 3], logprobs=[0.0, 0.0], reward=1.0)])
    batch = Batch.from_records(records)
    moved = batch.to_device("meta")
    assert moved.tokens.device.type == "meta" and batch.device.type == "cpu" and batch.to_device("cpu") is batch
    assert moved.logprobs is not None and moved.logprobs.device.type == "meta"


def vision_records(typed: bool = True) -> Experiences:
    draw = torch.Generator().manual_seed(0)
    records = []
    for shapes, response in (([(4, 4)], 3), ([], 5), ([(4, 8), (8, 4)], 2), ([(4, 4)], 6)):
        tokens = [5 + response]
        for height, width in shapes:
            tokens += [tiny.START, *[tiny.IMAGE] * (height * width // 4), tiny.END]
        prompt = len(tokens)
        tokens += torch.randint(9, 90, (response,), generator=draw).tolist()
        media: dict[str, Any] = {}
        if typed:
            media["mm_token_type_ids"] = (torch.tensor(tokens) == tiny.IMAGE).long()[None]
        if shapes:
            patches = sum(height * width for height, width in shapes)
            media["pixel_values"] = torch.randn(patches, 3 * 2 * 14 * 14, generator=draw)
            media["image_grid_thw"] = torch.tensor([[1, h, w] for h, w in shapes])
        records.append(Experience(tokens=tokens, prompt_length=prompt, multi_modal_inputs=media or None))
    return Experiences(records)


@pytest.mark.parametrize("typed", [True, False])
def test_model_inputs_with_images(typed: bool) -> None:
    model, records = tiny.qwen_vl(), vision_records(typed)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"config": model.config}),
        ({"side": "right"}, {"config": model.config}),
        ({"side": "right"}, {"get_rope_index": model.model.get_rope_index}),
        ({"packed": True}, {"get_rope_index": model.model.get_rope_index}),
    ]
    for layout, options in cases:
        batch = Batch.from_records(records, ("tokens",), **layout)
        other = from_experiences(
            records, packing_samples=layout.get("packed", False), layout=SIDES[layout.get("side", "left")]
        )
        inputs, expected = batch.model_inputs(**options), other.model_inputs(**options)
        assert inputs.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(inputs[name], value) if isinstance(value, torch.Tensor) else inputs[name] == value, name
        for part, rows in zip(batch.split([1, 3]), (records[:1], records[1:]), strict=True):
            alone = Batch.from_records(rows, ("tokens",), packed=True).model_inputs(model.model.get_rope_index)
            part_inputs = part.pack().model_inputs(model.model.get_rope_index)
            assert all(
                torch.equal(part_inputs[name], alone[name]) for name in ("input_ids", "position_ids", "pixel_values")
            )
    with pytest.raises(ValueError, match="get_rope_index: got None"):
        Batch.from_records(records, packed=True).model_inputs()
    if not typed:
        with pytest.raises(ValueError, match=r"'mm_token_type_ids'\]: got None beside image or video grids"):
            Batch.from_records(records).model_inputs()


def test_media_that_do_not_fit_together() -> None:
    records = Experiences([
        Experience(tokens=[1, 2], multi_modal_inputs={"pixel_values": torch.zeros(2, 3)}),
        Experience(tokens=[1, 2], multi_modal_inputs={"pixel_values": torch.zeros(2, 4)}),
    ])  # fmt: skip
    with pytest.raises(ValueError, match=r"media\['pixel_values'\]\[1\]: got \[2, 4\] of torch.float32"):
        Batch.from_records(records).model_inputs()
    long = Experience(tokens=[1, 2], multi_modal_inputs={"mm_token_type_ids": torch.zeros(1, 3)})
    with pytest.raises(ValueError, match=r"media\['mm_token_type_ids'\]\[0\]: got 3 entries, expected at most 2"):
        Batch.from_records(Experiences([long])).model_inputs()


def test_columns_travel_together() -> None:
    """What a device gets in one transfer, here from the host to the host."""
    records = Experiences(
        [
            Experience(tokens=[1, 2, 3], logprobs=torch.tensor([-1.0, -2.0], dtype=torch.bfloat16)),
            Experience(tokens=[4, 5]),
        ]
    )
    columns = read_columns(records, fill=ZEROS)
    sources = {"tokens": columns.tokens, **columns.by_response_token}
    lengths = [columns.lengths, *[columns.response_lengths] * len(columns.by_response_token)]
    copies = copy_columns(list(zip(sources.values(), lengths, strict=True)), torch.device("cpu"))
    for column, copy, counts in zip(sources.values(), copies, lengths, strict=True):
        assert torch.equal(copy, concatenated(column, counts))
    assert {*sources} == {"tokens", "logprobs", "action_mask"} and copies[1].dtype == torch.bfloat16
