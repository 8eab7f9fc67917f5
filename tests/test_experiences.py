"""`Experiences` is a sequence like a list of the same records, on columns that only an in-place write changes."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook import EID, Experience, Experiences
from rollbook.core.fields import FIELDS
from rollbook.core.ragged import Ragged
from rollbook.core.wire import decode, encode
from rollbook.io.arrow import from_table, to_table
from tests.strategies import exact, exact_rows, full_record, make_tensor, memory_of, record_lists

Rows = list[Experience]
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def simple(count: int, response: int = 2, **changes: Any) -> Rows:
    """Records that differ in every field that is looked at below."""
    return [
        Experience(
            eid=EID(batch=1, task=i // 2, run=i % 2, step=0, suffix=str(i)),
            tokens=[i] * (1 + response),
            logprobs=[float(i)] * response,
            reward=float(i),
            prompt_text=f"prompt {i}",
            **changes,
        )
        for i in range(count)
    ]


def storage_bytes(value: torch.Tensor) -> int:
    return value.untyped_storage().nbytes()


# --- indexing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 4, -1, -5, np.int64(2), np.int32(-2), np.uint8(3)])
def test_one_row(index: int) -> None:
    rows = simple(5)
    assert exact(Experiences(rows)[index]) == exact(rows[int(index)])


@pytest.mark.parametrize("index", [torch.tensor(2), np.array(2)], ids=["tensor", "array"])
def test_whatever_indexes_a_list_indexes_records(index: Any) -> None:
    rows = simple(5)
    assert exact(Experiences(rows)[index]) == exact(rows[index])


@pytest.mark.parametrize("index", [5, -6, 10**9, np.int64(5)])
def test_a_row_that_is_not_there(index: int) -> None:
    with pytest.raises(IndexError, match=str(int(index))):
        Experiences(simple(5))[index]
    with pytest.raises(IndexError):
        Experiences()[0]


@QUICK
@given(
    rows=record_lists(),
    start=st.none() | st.integers(-8, 8),
    stop=st.none() | st.integers(-8, 8),
    step=st.none() | st.sampled_from([1, 2, 3, -1, -2]),
)
def test_slices(rows: Rows, start: int | None, stop: int | None, step: int | None) -> None:
    part = Experiences(rows)[start:stop:step]
    assert isinstance(part, Experiences)
    assert len(part) == len(rows[start:stop:step])
    assert exact_rows(part) == exact_rows(rows[start:stop:step])
    assert exact_rows(decode(encode(part))) == exact_rows(rows[start:stop:step])


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, dtype=np.int8)])
def test_index_lists(kind: Callable[[Any], Any]) -> None:
    rows = simple(5)
    chosen = [3, 0, -1, 3]
    for part in (Experiences(rows)[kind(chosen)], Experiences(rows).take(kind(chosen))):
        assert exact_rows(part) == exact_rows(rows[i] for i in chosen)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_masks(kind: Callable[[Any], Any]) -> None:
    rows = simple(4)
    mask = [True, False, False, True]
    for part in (
        Experiences(rows)[kind(mask)],
        Experiences(rows).take(kind(mask)),
        Experiences(rows).filter(kind(mask)),
    ):
        assert exact_rows(part) == exact_rows([rows[0], rows[3]])
    assert len(Experiences(rows)[kind([False] * 4)]) == 0


@pytest.mark.parametrize(
    "index",
    [[0, 5], [-6], [True, False], [[0, 1]], [0.0, 1.0], np.ones((5, 1), dtype=bool), "0", None, [None], ["0"], 1.0],
    ids=repr,
)
def test_indices_that_cannot_be(index: Any) -> None:
    with pytest.raises((IndexError, TypeError)):
        Experiences(simple(5))[index]


def test_no_index_at_all() -> None:
    experiences = Experiences(simple(3))
    for nothing in ([], (), np.array([], dtype=np.int64), np.array([], dtype=np.float64), slice(0, 0)):
        assert isinstance(experiences[nothing], Experiences)
        assert len(experiences[nothing]) == 0
        assert exact_rows(experiences[nothing] + experiences) == exact_rows(experiences)
    assert len(Experiences()[[]]) == 0


def test_sequence_methods() -> None:
    rows = simple(4)
    experiences = Experiences(rows)
    assert exact_rows(reversed(experiences)) == exact_rows(reversed(rows))
    assert rows[2] in experiences
    assert Experience(tokens=[1, 2]) not in experiences
    assert experiences.index(rows[3]) == 3
    assert experiences.count(rows[1]) == 1
    assert bool(experiences)
    assert not Experiences()
    assert experiences == rows
    assert rows == experiences
    assert experiences == tuple(rows)
    assert experiences != rows[:3]
    assert experiences != "records"
    assert repr(experiences) == "Experiences(4 records, 12 tokens)"
    assert repr(Experiences()) == "Experiences(0 records, 0 tokens)"
    with pytest.raises(TypeError, match="unhashable"):
        hash(experiences)


def test_iteration_over_more_than_one_chunk() -> None:
    rows = simple(2500, response=1)
    experiences = Experiences(rows)
    assert [row.eid.uid for row in experiences] == [row.eid.uid for row in rows]
    assert [row.tokens[0].item() for row in experiences.rows()] == list(range(2500))
    # Two walks at once, as zip does.
    assert all(a.tokens is not b.tokens and a.eid == b.eid for a, b in zip(experiences, experiences, strict=True))


def test_only_records_can_be_records() -> None:
    with pytest.raises(ValueError, match="record 1: got dict, expected an Experience"):
        Experiences([Experience(tokens=[1, 2]), {"tokens": [1, 2]}])


def test_records_are_checked_again() -> None:
    rows = simple(2)
    rows[1].logprobs = torch.ones(5)
    with pytest.raises(ValueError, match="record 1: logprobs: got 5 entries, expected 2"):
        Experiences(rows)


# --- against a list -----------------------------------------------------------------------------------------------


def _apply(name: str, argument: int, experiences: Experiences, rows: Rows, extra: Rows) -> tuple[Experiences, Rows]:
    """The same operation on columns and on a list."""
    count = len(rows)
    rng = np.random.default_rng(argument)
    if name == "slice":
        a, b = sorted(rng.integers(-count - 1, count + 2, 2).tolist())
        return experiences[a:b], rows[a:b]
    if name == "stride":
        step = [2, -1, -2, 3][argument % 4]
        return experiences[::step], rows[::step]
    if name == "take":
        chosen = rng.integers(-count, count, argument % 7).tolist() if count else []
        return experiences[chosen], [rows[i] for i in chosen]
    if name == "mask":
        mask = rng.random(count) < 0.7
        return experiences[mask], [row for row, keep in zip(rows, mask, strict=True) if keep]
    if name == "filter":
        return experiences.filter(lambda row: len(row.tokens) % 2 == argument % 2), [
            row for row in rows if len(row.tokens) % 2 == argument % 2
        ]
    if name == "sort":
        reverse = bool(argument % 2)
        return experiences.sort(lambda row: len(row.tokens), reverse=reverse), sorted(
            rows, key=lambda row: len(row.tokens), reverse=reverse
        )
    if name == "append":
        return experiences + extra, rows + extra
    if name == "prepend":
        return Experiences.concat([Experiences(extra), experiences]), extra + rows
    if name == "double":
        return Experiences.concat([experiences, experiences]), rows + rows
    if name == "compact":
        return experiences.compact(), rows
    if name == "bytes":
        return decode(encode(experiences)), rows
    if name == "rebuild":
        return Experiences(experiences), rows
    return pickle.loads(pickle.dumps(experiences)), rows


_OPERATIONS = ["slice", "stride", "take", "mask", "filter", "sort", "append", "prepend", "double", "compact", "bytes"]
_OPERATIONS += ["rebuild", "pickle"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=record_lists(max_size=4),
    extra=record_lists(max_size=3),
    steps=st.lists(st.tuples(st.sampled_from(_OPERATIONS), st.integers(0, 1000)), max_size=6),
)
def test_any_operations_do_what_a_list_does(rows: Rows, extra: Rows, steps: list[tuple[str, int]]) -> None:
    expected_extra = exact_rows(extra)
    experiences = Experiences(rows)
    for name, argument in steps:
        if len(rows) > 40:
            break
        before, old = experiences, exact_rows(rows)
        experiences, rows = _apply(name, argument, experiences, rows, extra)
        assert len(experiences) == len(rows)
        assert exact_rows(before) == old, f"{name} changed what it was called on"
    assert exact_rows(experiences) == exact_rows(rows)
    assert exact_rows(experiences.rows()) == exact_rows(rows)
    assert exact_rows(experiences[i] for i in range(len(experiences))) == exact_rows(rows)
    assert experiences.token_lengths().tolist() == [len(row.tokens) for row in rows]
    assert experiences.prompt_lengths().tolist() == [row.prompt_length for row in rows]
    assert [exact(eid) for eid in experiences.eids()] == [exact(row.eid) for row in rows]
    assert exact_rows(extra) == expected_extra
    for name in FIELDS:
        column = experiences.values(name)
        missing = {"info": {}, "metrics": {}, "custom_fields": []}.get(name)
        assert [exact(missing if v is None else v) for v in column] == [exact(getattr(row, name)) for row in rows]


# --- joining ------------------------------------------------------------------------------------------------------


def test_concat_of_types_shapes_and_fields_that_differ() -> None:
    parts = [
        [Experience(tokens=torch.tensor([1, 2, 3], dtype=torch.int64), logprobs=[0.5, 0.5])],
        [Experience(tokens=[1, 2, 3], logprobs=torch.ones(2).to(torch.bfloat16), info={"a": 1})],
        [Experience(tokens=torch.tensor([1, 2, 3], dtype=torch.uint64), logprobs=torch.tensor([1, 2]))],
        [],
        [Experience(tokens=[1, 2], prompt_text="\ud800", policy_versions=4)],
        [Experience(tokens=[1, 2, 3], routed_experts=np.ones((2, 2, 3), np.int16), policy_versions=[1, 2])],
        [Experience(tokens=[1, 2, 3], routed_experts=np.ones((2, 4, 1), np.int16))] * 2,
        [Experience(tokens=[1, 2, 3], routed_experts=np.ones((2, 0, 1), np.int16))],
        [Experience(tokens=[1, 2], multi_modal_inputs={}), Experience(tokens=[1, 2], chosen=[1], rejected=[])],
    ]
    rows = [row for part in parts for row in part]
    joined = Experiences.concat(Experiences(part) for part in parts)
    assert exact_rows(joined) == exact_rows(rows)
    backwards = Experiences.concat(Experiences(part) for part in reversed(parts))
    assert exact_rows(backwards) == exact_rows(row for part in reversed(parts) for row in part)
    one_by_one = Experiences()
    for row in rows:
        one_by_one += (row,)
    assert exact_rows(one_by_one) == exact_rows(rows)
    assert exact_rows(decode(encode(joined))) == exact_rows(rows)


def test_columns_that_are_no_columns_are_refused() -> None:
    records = Experiences([Experience(tokens=[1, 2, 3], reward=1.0)])
    for call, message in (
        (lambda: Experiences.concat([records, 1]), "rows: got int, expected an iterable of records"),
        (lambda: Experiences.concat(1), "parts: got int"),
        (lambda: records.assign(reward=1.0), "assign: 'reward': got float, expected a value for each of 1 records"),
        (lambda: records.fill(reward=torch.tensor(1.0)), "fill: 'reward': got Tensor"),
        (lambda: records.assign(reward=[1.0, 2.0]), "assign: 'reward' has 2 rows, expected 1"),
        (lambda: records.select("rewrd"), "select: 'rewrd' is not a field; did you mean 'reward'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert Experiences.concat([records, list(records)]) == [*records, *records]


def test_concat_of_nothing() -> None:
    assert len(Experiences.concat([])) == 0
    assert len(Experiences.concat([Experiences(), Experiences()])) == 0
    assert exact_rows(Experiences() + simple(2)) == exact_rows(simple(2))
    assert exact_rows(Experiences(simple(2)) + Experiences()) == exact_rows(simple(2))


def test_concat_keeps_the_narrow_type_of_each_row() -> None:
    small, large = Experience(tokens=[1, 2]), Experience(tokens=torch.tensor([1, 2**40]))
    experiences = Experiences([small]) + Experiences([large])
    assert [row.tokens.dtype for row in experiences] == [torch.int32, torch.int64]
    assert [row.tokens.dtype for row in experiences[:1].compact()] == [torch.int32]


# --- selecting ----------------------------------------------------------------------------------------------------


def test_sort_is_stable_both_ways() -> None:
    rows = [row.replace(reward=float(i % 2)) for i, row in enumerate(simple(6))]
    experiences = Experiences(rows)
    for reverse in (False, True):
        expected = sorted(rows, key=lambda row: row.reward, reverse=reverse)
        assert exact_rows(experiences.sort(lambda row: row.reward, reverse=reverse)) == exact_rows(expected)
        assert exact_rows(experiences.sort([row.reward for row in rows], reverse=reverse)) == exact_rows(expected)
        assert exact_rows(experiences.sort(np.array([row.reward for row in rows]), reverse)) == exact_rows(expected)
    with pytest.raises(ValueError, match="got 2 keys, expected 6"):
        experiences.sort([1, 2])


def test_filter() -> None:
    rows = simple(5)
    experiences = Experiences(rows)
    assert exact_rows(experiences.filter(lambda row: row.reward > 2)) == exact_rows(rows[3:])
    assert len(experiences.filter(lambda row: False)) == 0
    assert len(Experiences().filter(lambda row: True)) == 0
    with pytest.raises(IndexError, match="mask"):
        experiences.filter([True])


@pytest.mark.parametrize("id_type", ["task", "run", "step"])
def test_group_by(id_type: str) -> None:
    rows = [
        Experience(eid=EID(batch="b/1", task=task, run=run, step=step), tokens=[1, 2])
        for step in range(2)
        for run in range(2)
        for task in (3, 1)
    ]
    expected: dict[str, Rows] = {}
    for row in rows:
        expected.setdefault(getattr(row.eid, {"task": "tid", "run": "rid", "step": "sid"}[id_type]), []).append(row)
    groups = Experiences(rows).group_by(id_type)
    assert list(groups) == list(expected)
    for key, group in groups.items():
        assert isinstance(group, Experiences)
        assert exact_rows(group) == exact_rows(expected[key])
    assert Experiences().group_by(id_type) == {}


def test_group_by_something_else() -> None:
    with pytest.raises(ValueError, match=r"id_type: got 'batch'.*'task', 'run', 'step'"):
        Experiences(simple(2)).group_by("batch")


# --- memory -------------------------------------------------------------------------------------------------------


def _sources() -> dict[str, Experiences]:
    rows = [full_record(seed=i) for i in range(4)]
    return {
        "rows": Experiences(rows),
        "bytes": decode(encode(Experiences(rows))),
        "bytearray": decode(bytearray(encode(Experiences(rows)))),
        "lz4": decode(encode(Experiences(rows), compression="lz4")),
        "arrow": from_table(to_table(Experiences(rows))),
        "concat": Experiences.concat([Experiences(rows[:2]), Experiences(rows[2:])]),
        "take": Experiences(rows)[[0, 1, 2, 3]],
    }


@pytest.mark.parametrize("source", _sources())
def test_rows_are_views(source: str) -> None:
    experiences = _sources()[source]
    row = experiences[1]
    row.tokens[0] = 77
    row.advantages[:] = 5
    assert experiences.column("tokens").tensor(1)[0] == 77
    assert experiences.column("tokens").values[experiences.column("tokens").offsets[1]] == 77
    assert experiences[1].tokens[0] == 77
    assert experiences[1].advantages.tolist() == [5, 5, 5]
    assert experiences[0].tokens[0] != 77
    assert experiences.rows()[1].tokens[0] == 77
    assert list(experiences)[1].tokens[0] == 77
    assert experiences.values("tokens")[1][0] == 77
    assert decode(encode(experiences))[1].tokens[0] == 77


@pytest.mark.parametrize("source", _sources())
def test_slices_share_memory(source: str) -> None:
    # Whether or not anybody has looked at the parent's tensors before.
    experiences = _sources()[source]
    part = experiences[1:3]
    part[0].tokens[0] = 77
    assert experiences[1].tokens[0] == 77
    assert part[0].tokens[0] == 77
    experiences[2].tokens[0] = 78
    assert part[1].tokens[0] == 78


@pytest.mark.parametrize("source", _sources())
def test_selected_rows_share_nothing(source: str) -> None:
    experiences = _sources()[source]
    before = exact_rows(experiences)
    for part in (
        experiences[[1, 2]],
        experiences[::2],
        experiences.filter(lambda row: True),
        experiences.sort(lambda row: 0),
        experiences.compact(),
    ):
        for row in part:
            row.tokens.fill_(-1)
    assert exact_rows(experiences) == before


@pytest.mark.parametrize("source", _sources())
def test_assigning_changes_the_row_alone(source: str) -> None:
    experiences = _sources()[source]
    before = exact_rows(experiences)
    row = experiences[1]
    row.tokens = torch.tensor([9])
    row.reward = 99.0
    row.prompt_text = "changed"
    row.eid.run = 1234
    row.eid = EID()
    row.info["new"] = 1
    row.messages.append({"role": "user"})
    row.messages[0]["role"] = "changed"
    row.multi_modal_inputs["new"] = torch.ones(1)
    row.custom_fields.clear()
    assert exact_rows(experiences) == before


def test_a_row_keeps_its_columns_alive() -> None:
    row = Experiences(simple(3))[1]
    gc.collect()
    _ = [torch.zeros(9, dtype=torch.int32) for _ in range(100)]
    assert row.tokens.tolist() == [1, 1, 1]


def test_compact_frees_the_parent() -> None:
    rows = [Experience(tokens=torch.full((50_001,), i), reward=1.0, info={"pad": "x" * 50_000}) for i in range(8)]
    experiences = decode(encode(Experiences(rows)))
    parent_bytes = storage_bytes(experiences[0].tokens)
    assert parent_bytes >= 8 * 50_001 * 8
    watched = weakref.ref(experiences)
    part = experiences[2:3].compact()
    assert storage_bytes(part[0].tokens) == 50_001 * 8
    assert storage_bytes(part[0].action_mask) == 50_000
    info = part.column("info")
    assert sum(buffer.size for buffer in info.buffers() if buffer is not None) < 60_000
    assert exact_rows(part) == exact_rows(rows[2:3])
    del experiences
    gc.collect()
    assert watched() is None
    assert part[0].tokens[0] == 2


def test_memory_is_given_back() -> None:
    pool = pa.default_memory_pool()
    rows = [Experience(tokens=torch.full((500_001,), i), info={"pad": "x" * 200_000}) for i in range(8)]
    gc.collect()
    before = pool.bytes_allocated()
    experiences = Experiences(rows)
    assert pool.bytes_allocated() - before > 30_000_000
    part = experiences[0:1].compact()
    row = experiences[0].compact()
    del experiences
    gc.collect()
    assert pool.bytes_allocated() - before < 10_000_000
    assert exact(part[0]) == exact(rows[0]) == exact(row)


@pytest.mark.parametrize("count", [1, 3])
def test_a_compact_row_is_independent(count: int) -> None:
    # The columns of a single record are no larger than the record: it must be freed from them all the same.
    experiences = Experiences([full_record(seed=i) for i in range(count)])
    before = exact_rows(experiences)
    row = experiences[0].compact()
    for name in ("tokens", "logprobs", "advantages", "action_mask", "routed_experts"):
        value = getattr(row, name)
        assert storage_bytes(value) == value.numel() * value.element_size()
        column = experiences.column(name).tensor_of_values()
        assert memory_of(value).start not in memory_of(column)
        value.zero_()
    assert exact_rows(experiences) == before


# --- columns ------------------------------------------------------------------------------------------------------


def test_columns() -> None:
    rows = [*simple(2), Experience(tokens=[9, 9, 9, 9], info={"a": 1})]
    experiences = Experiences(rows)
    tokens = experiences.column("tokens")
    assert isinstance(tokens, Ragged)
    assert tokens.offsets.tolist() == [0, 3, 6, 10]
    assert tokens.values.tolist() == [0, 0, 0, 1, 1, 1, 9, 9, 9, 9]
    assert experiences.column("logprobs").present.tolist() == [True, True, False]
    assert experiences.column("logprobs").lengths.tolist() == [2, 2, 0]
    assert experiences.column("reward").to_pylist() == [0.0, 1.0, None]
    assert experiences.column("routed_experts") is None
    assert experiences[2:].column("tokens").lengths.tolist() == [4]
    assert experiences[2:].column("tokens").tensor(0).tolist() == [9, 9, 9, 9]
    assert experiences.values("reward") == [0.0, 1.0, None]
    assert experiences.values("prompt_text") == ["prompt 0", "prompt 1", None]
    assert experiences.values("finish_reason") == [None] * 3
    assert experiences.values("logprobs")[2] is None
    assert [eid.suffix for eid in experiences.eids()[:2]] == ["0", "1"]
    assert experiences.token_lengths().tolist() == [3, 3, 4]
    assert experiences.prompt_lengths().tolist() == [1, 1, 1]
    assert set(experiences.columns) >= {"tokens", "eid", "reward", "info"}
    with pytest.raises(ValueError, match="rewards"):
        experiences.values("rewards")
    with pytest.raises(ValueError, match="rewards"):
        experiences.column("rewards")


def test_columns_of_nothing() -> None:
    experiences = Experiences()
    assert experiences.eids() == []
    assert experiences.token_lengths().tolist() == []
    assert experiences.prompt_lengths().tolist() == []
    assert experiences.values("reward") == []
    assert experiences.column("tokens") is None
    assert experiences.rows() == []


# --- from columns -------------------------------------------------------------------------------------------------

TOKENS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def test_from_columns_in_each_form() -> None:
    values, offsets = np.arange(1, 10, dtype=np.int32), np.array([0, 3, 5, 9])
    forms: list[Any] = [
        Ragged.from_arrays(TOKENS, "int32"),
        (values, offsets),
        (values, offsets.tolist()),
        TOKENS,
        [np.array(row) for row in TOKENS],
        [torch.tensor(row, dtype=torch.int32) for row in TOKENS],
        [range(1, 4), (4, 5), [6, 7, 8, 9]],
    ]
    expected = [Experience(eid=EID(suffix=str(i)), tokens=row, reward=0.5) for i, row in enumerate(TOKENS)]
    for tokens in forms:
        experiences = Experiences.from_columns(
            {"tokens": tokens, "reward": np.full(3, 0.5), "eid": [EID(suffix=str(i)) for i in range(3)]}
        )
        assert exact_rows(experiences) == exact_rows(expected)
        assert exact_rows(decode(encode(experiences))) == exact_rows(expected)


def test_from_columns_with_every_field() -> None:
    rows = [full_record(kind, seed) for seed, kind in enumerate(["single_turn", "multi_turn", "multi_turn"])]
    experiences = Experiences.from_columns({name: [getattr(row, name) for row in rows] for name in FIELDS})
    assert exact_rows(experiences) == exact_rows(rows)


def test_from_columns_fills_in_what_is_missing() -> None:
    experiences = Experiences.from_columns(
        {
            "tokens": TOKENS,
            "action_mask": [None, [True], None],
            "chosen": [None, None, [1]],
            "rejected": [None, None, [2, 3]],
            "info": [None, {"a": 1}, {}],
        }
    )
    assert [row.experience_type for row in experiences] == ["single_turn", "multi_turn", "dpo"]
    assert [row.prompt_length for row in experiences] == [1, 1, 4]
    assert experiences[0].action_mask.tolist() == [True, True]
    assert experiences[2].action_mask is None
    assert [row.info for row in experiences] == [{}, {"a": 1}, {}]
    assert len({eid.uid for eid in experiences.eids()}) == 3
    for row in experiences:
        assert exact(row.replace()) == exact(row)


def test_from_columns_takes_what_the_constructor_takes() -> None:
    ids: list[Any] = [{"batch": 1, "suffix": "a"}, EID(task=2, suffix="b"), EID(suffix="c")]
    given_values: dict[str, list[Any]] = {
        "eid": ids,
        "tokens": TOKENS,
        "policy_versions": [3, np.int64(4), [1, 2, 3]],
        "reward": [1, None, float("nan")],
        "group_size": [2, None, 4],
        "prompt_text": ["\ud800", None, ""],
        "multi_modal_inputs": [{"p": torch.ones(2)}, None, {}],
    }
    experiences = Experiences.from_columns(given_values)
    expected = [Experience(**{name: column[i] for name, column in given_values.items()}) for i in range(3)]
    assert exact_rows(experiences) == exact_rows(expected)


def test_from_columns_leaves_arrays_alone() -> None:
    values = np.arange(9, dtype=np.int64)
    values.flags.writeable = False
    experiences = Experiences.from_columns({"tokens": (values, [0, 4, 9])})
    experiences[0].tokens.fill_(7)
    assert values.tolist() == list(range(9))
    assert experiences[0].tokens.tolist() == [7] * 4


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"reward": [1.0]}, "tokens"),
        ({"tokens": TOKENS, "rewards": [1.0] * 3}, "rewards"),
        ({"tokens": TOKENS, "reward": [1.0]}, "'reward' has 1 rows, expected 3"),
        ({"tokens": TOKENS, "logprobs": [[0.0], [0.0], [0.0]]}, "record 0: logprobs: got 1 entries, expected 2"),
        ({"tokens": TOKENS, "prompt_length": [1, 2, 1]}, "record 1: prompt_length: got 2"),
        ({"tokens": TOKENS, "prompt_length": [1, 1, 0]}, "record 2: prompt_length: got 0"),
        ({"tokens": (np.arange(9), [0, 3, 2, 9])}, "tokens: offsets"),
        ({"tokens": (np.arange(9), [0, 3, 5, 10])}, "tokens: offsets"),
        ({"tokens": (np.arange(9), [-1, 3, 5, 9])}, "tokens: offsets"),
        ({"tokens": (np.arange(9), [])}, "tokens: offsets"),
        ({"tokens": (np.array(["a", "b"]), [0, 2])}, "tokens: got"),
        ({"tokens": (np.array([1.5, 2.5]), [0, 2])}, "tokens"),
        ({"tokens": (np.array([True, False]), [0, 2])}, "tokens"),
        ({"tokens": (np.ones((4, 2), np.int32), [0, 2, 4])}, "tokens"),
        ({"tokens": Ragged.from_arrays([[1.5, 2.5]], "float32")}, "tokens"),
        ({"tokens": [[1.5, 2.5]]}, "tokens: got values of float64"),
        ({"tokens": [[1, 2], None]}, "record 1: tokens: got None"),
        ({"tokens": TOKENS, "chosen": [[1], [2], [3]]}, "rejected"),
        ({"tokens": TOKENS, "experience_type": ["dpo"] * 3}, "chosen"),
        ({"tokens": TOKENS, "experience_type": ["other"] * 3}, "experience_type"),
        ({"tokens": TOKENS, "reward": ["a", "b", "c"]}, "reward"),
        ({"tokens": TOKENS, "prompt_text": [1, 2, 3]}, "prompt_text"),
        ({"tokens": TOKENS, "info": [[1], [2], [3]]}, "info"),
        ({"tokens": TOKENS, "group_size": [0, 1, 2]}, "group_size"),
        ({"tokens": TOKENS, "truncate_status": ["prompt_truncated"] * 3}, "logprobs"),
        ({"tokens": TOKENS, "eid": [{"bacth": 1}, None, None]}, "eid"),
        ({"tokens": TOKENS, "routed_experts": [np.ones(2), np.ones(1), np.ones(3)]}, "routed_experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_from_columns_errors(columns: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Experiences.from_columns(columns)


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"tokens": [[1.5, 2.5]]}, "tokens"),
        ({"tokens": [[1, 2]], "chosen": [[1]]}, "rejected"),
        ({"tokens": [[1, 2]], "logprobs": [[0.5, 0.5]]}, "logprobs"),
        ({"reward": [1.0]}, "tokens"),
    ],
)
def test_from_arrow_keeps_the_promises_of_the_table(columns: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        from_table(pa.table(columns))


def test_ragged() -> None:
    column = Ragged.from_tensors([make_tensor(torch.bfloat16, (n,), n) for n in (3, 0, 2)], "bfloat16")
    assert column.lengths.tolist() == [3, 0, 2]
    assert [exact(row) for row in column.tensors()] == [exact(column.tensor(i)) for i in range(3)]
    assert column.slice(1, 3).tensor(1).data_ptr() == column.tensor(2).data_ptr()
    taken = column.take(np.array([2, 0, 0]))
    assert [exact(row) for row in taken.tensors()] == [exact(column.tensor(i)) for i in (2, 0, 0)]
    absent = Ragged.absent(2, "int16", (2, 3))
    assert absent.tensors() == [None, None]
    assert absent.trailing == (2, 3)
    assert len(absent) == 2
    small = column.slice(2, 3).take(np.array([0]))
    assert small.values.size == 2
    assert small.offsets.tolist() == [0, 2]
    assert exact(small.tensor(0)) == exact(column.tensor(2))


def test_missing_and_fill() -> None:
    experiences = Experiences([Experience(tokens=[1, 2, 3], reward=reward) for reward in (0.5, None, None)])
    assert experiences.missing("reward").tolist() == [1, 2] and experiences.missing("advantages").tolist() == [0, 1, 2]
    filled = experiences.fill(reward=[1.0, 2.0, 3.0], advantages=[[1.0, 1.0]] * 3)
    assert filled.values("reward") == [0.5, 2.0, 3.0] and not len(filled.missing("advantages"))
    assert experiences.values("reward") == [0.5, None, None], "the others stay as they are"
    assert experiences.fill([2, 0], reward=[7.0, 8.0]).values("reward") == [0.5, None, 7.0]
    assert experiences.fill([2, 0], overwrite=True, reward=[7.0, 8.0]).values("reward") == [8.0, None, 7.0]
    assert experiences.fill(overwrite=True, reward=[1.0, 2.0, 3.0]).values("reward") == [1.0, 2.0, 3.0]
    partly = experiences.fill([1], advantages=[torch.tensor([0.25, 0.5])])
    assert partly.missing("advantages").tolist() == [0, 2] and partly[1].advantages.tolist() == [0.25, 0.5]
    with pytest.raises(ValueError, match="fill: 'reward' has 2 rows, expected 3"):
        experiences.fill(reward=[1.0, 2.0])
    with pytest.raises(ValueError, match="is not a field"):
        experiences.missing("nothing")
    assert not len(Experiences([]).missing("reward"))
