"""Padding, grouping and splitting: the same from rows and from columns, and the same as done naively."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook import EID, CustomField, Experience, Experiences
from rollbook.compat.trinity import (
    gather_action_masks,
    gather_attention_masks,
    gather_multi_modal_inputs,
    gather_response_attrs,
    gather_token_ids,
    group_by,
    split_dpo_experience_to_single_turn,
)
from rollbook.core.fields import FIELDS, tensor_fields
from rollbook.core.wire import decode, encode
from tests.strategies import (
    COLUMN_DTYPES,
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    SEEDS,
    exact,
    exact_rows,
    full_record,
    make_tensor,
    record_lists,
    records,
    shared,
)

Rows = list[Experience]
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
PLAIN_RESPONSE_FIELDS = [field.name for field in tensor_fields("response") if not field.trailing]


# --- a naive reference --------------------------------------------------------------------------------------------


def widest(dtypes: list[torch.dtype]) -> torch.dtype:
    """The type of a padded result, for types of one family: the narrowest that holds all."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    if set(dtypes) == {torch.bfloat16, torch.float16}:
        return torch.float32
    family = next(family for family in (SIGNED, UNSIGNED, FLOAT_DTYPES) if set(dtypes) <= set(family))
    return max(dtypes, key=family.index)


def naive(parts: list[tuple[list[Any], list[Any]]], left: int, right: int, pad: Any) -> list[list[Any]]:
    """Rows of plain numbers: the first part of each padded on the left, the second on the right."""
    return [
        [pad] * (left - len(prompt)) + prompt + response + [pad] * (right - len(response)) for prompt, response in parts
    ]


def check(result: torch.Tensor, expected: list[list[Any]], dtype: torch.dtype, width: int) -> None:
    assert result.dtype == dtype
    assert tuple(result.shape[:2]) == (len(expected), width)
    wide = np.float64 if dtype.is_floating_point else np.uint64 if dtype == torch.uint64 else np.int64
    reference = torch.from_numpy(np.array(expected, dtype=wide))
    assert exact(result) == exact(reference.reshape(len(expected), width).to(dtype))


def outcome(make: Callable[[], Any]) -> Any:
    """What a call gives, or the kind of error that it raises."""
    try:
        return exact(make())
    except ValueError as error:
        return type(error), str(error).split(":")[0]


# --- gathering ----------------------------------------------------------------------------------------------------


@st.composite
def batches(
    draw: st.DrawFn, families: tuple[list[torch.dtype], ...], attr: str | None = None, min_size: int = 0
) -> Rows:
    """Records of any lengths whose `attr` (or tokens) are of types from one family."""
    family = draw(st.sampled_from(families))
    field = FIELDS[attr or "tokens"]
    rows = []
    for i in range(draw(st.integers(min_size, 5))):
        prompt, response = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        given_fields: dict[str, Any] = {"action_mask": [True] * response}
        length = response if attr else prompt + response
        value = make_tensor(draw(st.sampled_from(family)), (length, *[2] * field.trailing), draw(SEEDS))
        given_fields["tokens"] = list(range(prompt + response))
        given_fields[field.name] = value
        rows.append(Experience(eid=EID(task=i), prompt_length=prompt, **given_fields))
    return rows


@QUICK
@given(
    rows=batches((SIGNED, UNSIGNED)),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    pad=st.integers(0, 100),
)
def test_gather_token_ids(rows: Rows, more: tuple[int, int], pad: int) -> None:
    left = max((row.prompt_length for row in rows), default=0) + more[0]
    right = max((len(row.tokens) - row.prompt_length for row in rows), default=0) + more[1]
    split = [(row.tokens[: row.prompt_length].tolist(), row.tokens[row.prompt_length :].tolist()) for row in rows]
    dtype = widest([row.tokens.dtype for row in rows]) if rows else torch.int32
    before = exact_rows(rows)
    for given_rows in (rows, tuple(rows), Experiences(rows)):
        result = gather_token_ids(given_rows, left, right, pad)
        check(result, naive(split, left, right, pad), dtype, left + right)
        masks = gather_attention_masks(given_rows, left, right)
        ones = [([True] * len(a), [True] * len(b)) for a, b in split]
        check(masks, naive(ones, left, right, False), torch.bool, left + right)
    assert exact_rows(rows) == before


@pytest.mark.parametrize("attr", ["logprobs", "action_mask", "policy_versions", "loss_weights"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), more=st.integers(0, 3), pad=st.sampled_from([0, 1, 7, -0.5, float("nan"), float("-inf")]))
def test_gather_response_attrs(attr: str, data: st.DataObject, more: int, pad: float) -> None:
    families = (SIGNED, UNSIGNED) if FIELDS[attr].accepts == "integer" else (SIGNED, UNSIGNED, FLOAT_DTYPES)
    if attr == "action_mask":
        families = ([torch.bool], SIGNED)
    rows = data.draw(batches(families, attr))
    values = [getattr(row, attr) for row in rows]
    dtype = widest([value.dtype for value in values]) if rows else getattr(torch, FIELDS[attr].dtype)
    if not dtype.is_floating_point and pad not in (0, 1, 7):
        pad = 3
    if dtype == torch.bool and pad not in (0, 1):
        pad = 1
    width = max((len(value) for value in values), default=0) + more
    before = exact_rows(rows)
    for given_rows in (rows, tuple(rows), Experiences(rows), decode(encode(Experiences(rows)))):
        result = gather_response_attrs(given_rows, attr, width, pad_value=pad)
        check(result, naive([([], value.tolist()) for value in values], 0, width, pad), dtype, width)
        if attr == "action_mask":
            masks = gather_action_masks(given_rows, width)
            check(masks, naive([([], value.tolist()) for value in values], 0, width, 0), dtype, width)
    assert exact_rows(rows) == before


@pytest.mark.parametrize("attr", [*PLAIN_RESPONSE_FIELDS, "routed_experts"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_rows_and_columns_agree_whatever_the_types(attr: str, data: st.DataObject) -> None:
    dtypes = INTEGER_DTYPES if FIELDS[attr].accepts == "integer" else COLUMN_DTYPES
    rows = data.draw(batches((dtypes,), attr))
    width = data.draw(st.integers(0, 6))
    experiences = Experiences(rows)
    expected = outcome(lambda: gather_response_attrs(rows, attr, width, 1))
    assert outcome(lambda: gather_response_attrs(experiences, attr, width, 1)) == expected
    # A part of a batch of several types may have one: its result is then what the rows' own would be.
    for part in (slice(0, 2), slice(1, None)):
        if not rows[part]:
            continue
        expected = outcome(lambda part=part: gather_response_attrs(rows[part], attr, 6))
        assert outcome(lambda part=part: gather_response_attrs(experiences[part], attr, 6)) == expected


@QUICK
@given(rows=record_lists(), limits=st.tuples(st.integers(0, 5), st.integers(0, 5)), attr=st.sampled_from(list(FIELDS)))
def test_rows_and_columns_agree_on_any_records(rows: Rows, limits: tuple[int, int], attr: str) -> None:
    experiences = Experiences(rows)
    calls: list[Callable[[Any], Any]] = [
        lambda given_rows: gather_token_ids(given_rows, *limits, 0),
        lambda given_rows: gather_attention_masks(given_rows, *limits),
        lambda given_rows: gather_action_masks(given_rows, limits[1]),
        lambda given_rows: gather_response_attrs(given_rows, attr, limits[1]),
        gather_multi_modal_inputs,
    ]
    for call in calls:
        assert outcome(lambda call=call: call(experiences)) == outcome(lambda call=call: call(rows))
    for id_type in ("task", "run", "step"):
        by_rows, by_columns = group_by(rows, id_type), group_by(experiences, id_type)
        assert list(by_rows) == list(by_columns)
        assert [exact_rows(group) for group in by_columns.values()] == list(map(exact_rows, by_rows.values()))


def test_worked_example() -> None:
    rows = [
        Experience(tokens=[11, 12, 13], logprobs=[-1.0, -2.0]),
        Experience(tokens=[21, 22, 23, 24, 25], prompt_length=2, action_mask=[1, 0, 1], logprobs=[-1.0, -2.0, -3.0]),
    ]
    for given_rows in (rows, Experiences(rows)):
        assert gather_token_ids(given_rows, 2, 3, 9).tolist() == [[9, 11, 12, 13, 9], [21, 22, 23, 24, 25]]
        attended = gather_attention_masks(given_rows, max_prompt_length=2, max_response_length=3)
        assert attended.tolist() == [[False, True, True, True, False], [True] * 5]
        assert gather_action_masks(given_rows, max_response_length=3).tolist() == [
            [True, True, False],
            [True, False, True],
        ]
        padded = gather_response_attrs(given_rows, attr_name="logprobs", max_response_length=3, pad_value=0.5)
        assert padded.tolist() == [[-1.0, -2.0, 0.5], [-1.0, -2.0, -3.0]]


def test_nothing_to_gather() -> None:
    for nothing in ([], (), Experiences()):
        assert gather_token_ids(nothing, 2, 3, 9).shape == (0, 5)
        assert gather_token_ids(nothing, 2, 3, 9).dtype == torch.int32
        assert gather_attention_masks(nothing, 2, 3).shape == (0, 5)
        assert gather_attention_masks(nothing, 2, 3).dtype == torch.bool
        assert gather_action_masks(nothing, 3).shape == (0, 3)
        assert gather_response_attrs(nothing, "logprobs", 3).shape == (0, 3)
        assert gather_response_attrs(nothing, "logprobs", 3, pad_value=1).dtype == torch.float32
        assert gather_multi_modal_inputs(nothing) == {}
        assert group_by(nothing, "task") == {}
        assert split_dpo_experience_to_single_turn(nothing) == []


def test_mixed_types_promote() -> None:
    rows = [Experience(tokens=[1, 2]), Experience(tokens=torch.tensor([1, 2**40]))]
    for given_rows in (rows, rows[::-1], Experiences(rows)):
        result = gather_token_ids(given_rows, 1, 1, 0)
        assert result.dtype == torch.int64
        assert 2**40 in result.tolist()[0] + result.tolist()[1]
    halves = [
        Experience(tokens=[1, 2], logprobs=torch.tensor([2.0**-126], dtype=torch.bfloat16)),
        Experience(tokens=[1, 2], logprobs=torch.tensor([0.1], dtype=torch.float16)),
    ]
    for given_rows in (halves, Experiences(halves)):
        result = gather_response_attrs(given_rows, "logprobs", 1)
        assert result.dtype == torch.float32
        assert result.tolist() == [[row.logprobs.item()] for row in halves]


def test_types_that_no_one_type_holds() -> None:
    rows = [Experience(tokens=torch.tensor([1, 2])), Experience(tokens=torch.tensor([1, 2], dtype=torch.uint64))]
    for given_rows in (rows, Experiences(rows)):
        with pytest.raises(ValueError, match=r"tokens: .*int64.*uint64"):
            gather_token_ids(given_rows, 1, 1, 0)


@pytest.mark.parametrize("columns", [False, True])
def test_a_maximum_that_is_too_small_names_the_record(columns: bool) -> None:
    rows = [
        Experience(eid=EID(task="short", suffix="s"), tokens=[1, 2, 3]),
        Experience(eid=EID(task="long", suffix="l"), tokens=[1] * 9, prompt_length=4, logprobs=[0.0] * 5),
        Experience(eid=EID(task="short", suffix="s"), tokens=[1, 2, 3]),
    ]
    source: Any = Experiences(rows) if columns else rows
    long = "/long/0/0/l"
    with pytest.raises(ValueError, match=f"max_prompt_length: got 3.*4.*record 1.*{long}"):
        gather_token_ids(source, 3, 5, 0)
    with pytest.raises(ValueError, match=f"max_response_length: got 4.*5.*record 1.*{long}"):
        gather_token_ids(source, 4, 4, 0)
    with pytest.raises(ValueError, match=f"max_prompt_length: got 3.*record 1.*{long}"):
        gather_attention_masks(source, 3, 5)
    with pytest.raises(ValueError, match=f"max_response_length: got 4.*record 1.*{long}"):
        gather_attention_masks(source, 4, 4)
    with pytest.raises(ValueError, match=f"max_response_length: got 4.*record 1.*{long}"):
        gather_action_masks(source, 4)
    with pytest.raises(ValueError, match="max_response_length: got 1.*record 0.*/short/0/0/s"):
        gather_action_masks(source, 1)
    with pytest.raises(ValueError, match="max_response_length: got -1"):
        gather_action_masks([], -1)
    assert gather_token_ids(source, 4, 5, 0).shape == (3, 9)


@pytest.mark.parametrize("columns", [False, True])
def test_a_record_without_the_value_is_named(columns: bool) -> None:
    rows = [Experience(tokens=[1, 2], logprobs=[0.5]), Experience(eid=EID(suffix="none"), tokens=[1, 2])]
    source: Any = Experiences(rows) if columns else rows
    with pytest.raises(ValueError, match=r"logprobs: got None in record 1 .*none"):
        gather_response_attrs(source, "logprobs", 2)
    pair = [Experience(tokens=[1, 2], chosen=[1], rejected=[2], eid=EID(suffix="pair"))]
    with pytest.raises(ValueError, match=r"action_mask: got None in record 0 .*pair"):
        gather_action_masks(Experiences(pair) if columns else pair, 2)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("attr", ["tokens", "reward", "chosen", "info", "rewards", ""])
def test_only_response_fields_can_be_gathered(attr: str, columns: bool) -> None:
    rows = [Experience(tokens=[1, 2], reward=1.0)]
    with pytest.raises(ValueError, match=f"attr_name: got {attr!r}"):
        gather_response_attrs(Experiences(rows) if columns else rows, attr, 2)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 2, 1), (2, 1, 3), (2, 4, 3)])
def test_experts_of_other_sizes_are_refused_and_never_spread(shape: tuple[int, ...], columns: bool) -> None:
    rows = [
        Experience(tokens=[1, 2, 3], routed_experts=np.ones((2, 2, 3), np.int16)),
        Experience(tokens=[1, 2, 3], routed_experts=np.ones((2, 2, 3), np.int16)),
        Experience(tokens=[1, 2, 3], routed_experts=np.ones(shape, np.int16), eid=EID(suffix="odd")),
    ]
    with pytest.raises(ValueError, match=r"routed_experts: .*record 2 .*odd"):
        gather_response_attrs(Experiences(rows) if columns else rows, "routed_experts", 3)


def test_experts_are_padded_along_the_response() -> None:
    rows = [Experience(tokens=[1] * (n + 1), routed_experts=np.full((n, 2, 3), n, np.int16)) for n in (1, 2)]
    for given_rows in (rows, Experiences(rows)):
        result = gather_response_attrs(given_rows, "routed_experts", 3, pad_value=-1)
        assert result.shape == (2, 3, 2, 3)
        assert result.dtype == torch.int16
        assert result[:, :, 0, 0].tolist() == [[1, -1, -1], [2, 2, -1]]
        assert (result == result[:, :, :1, :1]).all()


@pytest.mark.parametrize("pad", [0.5, float("nan"), float("inf")])
def test_a_pad_value_that_the_type_does_not_hold(pad: float) -> None:
    rows = [Experience(tokens=[1, 2])]
    for given_rows in (rows, Experiences(rows)):
        with pytest.raises(ValueError):
            gather_response_attrs(given_rows, "action_mask", 3, pad_value=pad)


def test_a_truncated_prompt() -> None:
    rows = [
        Experience(tokens=[1, 2, 3], prompt_length=2),
        Experience(tokens=[7] * 4, prompt_length=4, truncate_status="prompt_truncated", logprobs=[0.0]),
        Experience(tokens=[8] * 2, prompt_length=9, truncate_status="prompt_truncated", logprobs=[0.0]),
    ]
    for given_rows in (rows, Experiences(rows)):
        assert gather_token_ids(given_rows, 4, 1, 0).tolist() == [[0, 0, 1, 2, 3], [7, 7, 7, 7, 0], [0, 0, 8, 8, 0]]
        assert gather_action_masks(given_rows, 1).tolist() == [[True], [False], [False]]


def test_results_stay_on_the_inputs_device() -> None:
    meta = torch.device("meta")
    rows = [
        Experience(
            tokens=torch.ones(length, dtype=torch.int32, device=meta),
            logprobs=torch.ones(length - 1, device=meta),
            multi_modal_inputs={"p": torch.ones(2, device=meta)} if length == 3 else None,
        )
        for length in (3, 5)
    ]
    results = [
        gather_token_ids(rows, 1, 4, 7),
        gather_attention_masks(rows, 1, 4),
        gather_response_attrs(rows, "logprobs", 4),
        gather_response_attrs(rows, "logprobs", 4, pad_value=2.0),
        *gather_multi_modal_inputs(rows)["p"],
    ]
    assert {result.device.type for result in results} == {"meta"}
    assert [tuple(result.shape) for result in results[:4]] == [(2, 5), (2, 5), (2, 4), (2, 4)]


def test_the_mask_that_is_made_lies_where_the_tokens_do() -> None:
    record = Experience(tokens=torch.ones(3, dtype=torch.int32, device="meta"))
    assert record.action_mask.device.type == "meta"
    assert gather_action_masks([record], 2).device.type == "meta"
    truncated = Experience(
        tokens=torch.ones(3, dtype=torch.int32, device="meta"),
        logprobs=torch.ones(1, device="meta"),
        truncate_status="prompt_truncated",
    )
    assert truncated.action_mask.device.type == "meta"


def test_gradients_reach_through() -> None:
    logprobs = torch.tensor([1.0, 2.0], requires_grad=True)
    gather_response_attrs([Experience(tokens=[1, 2, 3], logprobs=logprobs)], "logprobs", 4).sum().backward()
    assert logprobs.grad.tolist() == [1.0, 1.0]


def test_results_are_the_callers_own() -> None:
    rows = [Experience(tokens=[1, 2, 3])]
    for given_rows in (rows, Experiences(rows)):
        gather_token_ids(given_rows, 1, 2, 0).fill_(9)
        gather_action_masks(given_rows, 2).fill_(False)
        assert given_rows[0].tokens.tolist() == [1, 2, 3]
        assert given_rows[0].action_mask.tolist() == [True, True]


# --- media --------------------------------------------------------------------------------------------------------


def test_gather_multi_modal_inputs() -> None:
    pixels = [make_tensor(torch.bfloat16, (n, 4), n) for n in (2, 3)]
    rows = [
        Experience(tokens=[1, 2]),
        Experience(tokens=[1, 2], multi_modal_inputs={"pixel_values": pixels[0]}),
        Experience(tokens=[1, 2], multi_modal_inputs={}),
        Experience(tokens=[1, 2], multi_modal_inputs={"grid": torch.tensor([[1, 2, 3]]), "pixel_values": pixels[1]}),
        Experience(tokens=[1, 2], multi_modal_inputs={"scalar": torch.tensor(5)}),
    ]
    for given_rows in (rows, Experiences(rows)):
        media = gather_multi_modal_inputs(given_rows)
        assert list(media) == ["pixel_values", "grid", "scalar"]
        assert all(isinstance(tensors, list) and len(tensors) == 5 for tensors in media.values())
        assert [exact(media["pixel_values"][i]) for i in (1, 3)] == list(map(exact, pixels))
        assert [tuple(tensor.shape) for tensor in media["pixel_values"]] == [(0, 4), (2, 4), (0, 4), (3, 4), (0, 4)]
        assert {tensor.dtype for tensor in media["pixel_values"]} == {torch.bfloat16}
        assert [tensor.numel() for tensor in media["grid"]] == [0, 0, 0, 3, 0]
        assert [tensor.numel() for tensor in media["scalar"]] == [0, 0, 0, 0, 1]


# --- groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("id_type", "part"), [("task", "tid"), ("run", "rid"), ("step", "sid")])
def test_group_by(id_type: str, part: str) -> None:
    rows = [
        Experience(eid=EID(batch=1, task=task, run=run, step=step), tokens=[1, 2])
        for run in range(2)
        for task in ("b", "a/c")
        for step in range(2)
    ]
    groups = group_by(rows, id_type)
    assert list(groups) == list(dict.fromkeys(getattr(row.eid, part) for row in rows))
    assert all(isinstance(group, list) for group in groups.values())
    for key, group in groups.items():
        assert [id(row) for row in group] == [id(row) for row in rows if getattr(row.eid, part) == key]


@pytest.mark.parametrize("columns", [False, True])
def test_group_by_something_else(columns: bool) -> None:
    with pytest.raises(ValueError, match="id_type: got 'batch'"):
        group_by(Experiences() if columns else [], "batch")


# --- splitting pairs ----------------------------------------------------------------------------------------------


def pair(**changes: Any) -> Experience:
    return Experience(
        **{
            "eid": EID(batch=1, task=2, run=3, step=4, suffix="pair"),
            "tokens": [1, 2],
            "chosen": [3, 4],
            "rejected": [5],
            **changes,
        }
    )


def test_split_dpo() -> None:
    preference = pair(
        reward=0.5,
        prompt_text="question",
        tools=[{"name": "search"}],
        chosen_messages=[{"role": "assistant", "content": "good"}],
        rejected_messages=[{"role": "assistant", "content": "bad"}],
        multi_modal_inputs={"pixel_values": torch.ones(2, 2)},
        info={"nested": {"list": [1]}, "expert": True},
        metrics={"m": [1]},
        custom_fields=[CustomField("expert", "expert_mask", torch.bool)],
        policy_versions=7,
        finish_reason="stop",
        group_size=4,
        sampling={"temperature": 1.0},
    )
    before = exact(preference)
    for given_rows in ([preference], (preference,), Experiences([preference])):
        chosen, rejected = split_dpo_experience_to_single_turn(given_rows)
        assert [half.tokens.tolist() for half in (chosen, rejected)] == [[1, 2, 3, 4], [1, 2, 5]]
        assert chosen.messages == preference.chosen_messages
        assert rejected.messages == preference.rejected_messages
        assert chosen.action_mask.tolist() == [True, True]
        assert rejected.action_mask.tolist() == [True]
        for half in (chosen, rejected):
            assert half.experience_type == "single_turn"
            assert half.prompt_length == 2
            assert half.tokens.dtype == preference.tokens.dtype
            assert half.chosen is half.rejected is half.chosen_messages is half.rejected_messages is None
            assert half.parent == preference.eid.uid
            assert half.eid.sid == preference.eid.sid
            assert half.eid.rid == preference.eid.rid
            assert exact(half.multi_modal_inputs) == exact(preference.multi_modal_inputs)
            for name in ("reward", "prompt_text", "tools", "info", "metrics", "custom_fields", "policy_versions"):
                assert exact(getattr(half, name)) == exact(getattr(preference, name)), name
            for name in ("group_size", "sampling"):
                assert exact(getattr(half, name)) == exact(getattr(preference, name)), name
            assert not shared(half, preference, arrays=False)
        assert not shared(chosen, rejected, arrays=False)
        assert len({chosen.eid.suffix, rejected.eid.suffix, preference.eid.suffix}) == 3
        chosen.info["nested"]["list"].append(2)
        chosen.eid.run = 99
    assert exact(preference) == before


@QUICK
@given(rows=st.lists(records(["dpo"]), min_size=1, max_size=3))
def test_split_loses_no_tokens(rows: Rows) -> None:
    good = [
        row
        for row in rows
        # A turn needs a prompt and an answer; and a truncated prompt needs log-probs, which a pair has none of.
        if len(row.tokens) and len(row.chosen) and len(row.rejected) and row.truncate_status != "prompt_truncated"
    ]
    before = exact_rows(good)
    try:
        halves = split_dpo_experience_to_single_turn(good)
    except ValueError:
        # Only where prompt and answer have types that no one type holds.
        kinds = [{row.tokens.dtype, row.chosen.dtype, row.rejected.dtype} for row in good]
        assert any(torch.uint64 in kind and len(kind) > 1 for kind in kinds)
        return
    assert len(halves) == 2 * len(good)
    assert len({half.eid.uid for half in halves}) == len(halves)
    for i, half in enumerate(halves):
        preference = good[i // 2]
        answer = preference.rejected if i % 2 else preference.chosen
        assert half.tokens.tolist() == preference.tokens.tolist() + answer.tolist()
        assert half.prompt_length == len(preference.tokens)
        assert half.parent == preference.eid.uid
        assert exact(half.info) == exact(preference.info)
        assert exact(half.multi_modal_inputs) == exact(preference.multi_modal_inputs)
    assert exact_rows(good) == before
    assert exact_rows(Experience.deserialize_many(Experience.serialize_many(halves))) == exact_rows(halves)


def test_every_field_of_a_sample_reaches_both_halves() -> None:
    preference = full_record("dpo", truncate_status=None)
    own_fields = {
        "eid",
        "prompt_length",
        "experience_type",
        "parent",
        "messages",
        "chosen_messages",
        "rejected_messages",
    }
    # What was said of a response cannot be said of two.
    own_fields |= {"response_text", "finish_reason", "truncate_status"}
    for half in split_dpo_experience_to_single_turn([preference]):
        for name, field in FIELDS.items():
            if field.axis == "sample" and name not in own_fields:
                assert exact(getattr(half, name)) == exact(getattr(preference, name)), name


def test_split_promotes_the_types_of_prompt_and_answer() -> None:
    chosen, rejected = split_dpo_experience_to_single_turn([pair(chosen=torch.tensor([2**40]))])
    assert chosen.tokens.tolist() == [1, 2, 2**40]
    assert chosen.tokens.dtype == torch.int64
    assert rejected.tokens.dtype == torch.int32


def test_a_half_has_the_messages_of_its_answer_alone() -> None:
    prompt = [{"role": "user", "content": "?"}]
    halves = split_dpo_experience_to_single_turn([pair(messages=prompt, chosen_messages=[{"role": "a"}])])
    assert [half.messages for half in halves] == [[{"role": "a"}], None]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (Experience(tokens=[1, 2], eid=EID(suffix="bad")), "single_turn"),
        (pair(chosen=[], eid=EID(suffix="bad")), "chosen"),
        (pair(rejected=[], eid=EID(suffix="bad")), "rejected"),
        (pair(tokens=[], eid=EID(suffix="bad")), ""),
    ],
)
def test_split_errors_name_the_record(bad: Experience, word: str, columns: bool) -> None:
    rows = [pair(), bad]
    with pytest.raises(ValueError, match=f"record 1 .*bad.*{word}"):
        split_dpo_experience_to_single_turn(Experiences(rows) if columns else rows)


def test_entries_that_are_no_records_are_refused() -> None:
    for call in (
        lambda rows: gather_token_ids(rows, 1, 1, 0),
        lambda rows: gather_attention_masks(rows, 1, 1),
        lambda rows: gather_action_masks(rows, 1),
        lambda rows: gather_response_attrs(rows, "logprobs", 1),
        gather_multi_modal_inputs,
        lambda rows: group_by(rows, "task"),
        split_dpo_experience_to_single_turn,
    ):
        with pytest.raises(ValueError, match="record 1: got int, expected an Experience"):
            call([Experience(tokens=[1, 2], chosen=[3], rejected=[4]), 1])


@pytest.mark.parametrize("limit", [None, 1.5, -1, True])
def test_maxima_are_integers(limit: Any) -> None:
    rows = [Experience(tokens=[1, 2])]
    for call in (
        lambda: gather_token_ids(rows, limit, 1, 0),
        lambda: gather_attention_masks(rows, limit, 1),
    ):
        with pytest.raises(ValueError, match=f"max_prompt_length: got {limit}, expected an integer >= 0"):
            call()
    with pytest.raises(ValueError, match=f"max_response_length: got {limit}, expected an integer >= 0"):
        gather_action_masks(rows, limit)
