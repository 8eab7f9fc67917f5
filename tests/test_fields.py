"""One call of `declare` gives a field everything the built-in ones have; one of `withdraw` takes it away again."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import rollbook.core.experience
from rollbook import EID, CustomField, Experience, Experiences
from rollbook.compat.trinity import (
    from_hf_datasets,
    gather_response_attrs,
    split_dpo_experience_to_single_turn,
    to_hf_datasets,
)
from rollbook.core import fields, wire
from rollbook.core.fields import FIELDS, Field
from rollbook.core.wire import decode, encode
from rollbook.io.arrow import from_table, to_table
from rollbook.io.parquet import read_parquet, write_parquet
from tests.strategies import exact, exact_rows


@contextmanager
def declared(field: Field) -> Iterator[None]:
    """The field is in the table inside, and the table is what it was outside."""
    before, signature = dict(FIELDS), inspect.signature(Experience)
    fields.declare(field)
    try:
        yield
    finally:
        fields.withdraw(field.name)
        assert before == FIELDS
        assert list(before) == list(FIELDS)
        assert inspect.signature(Experience) == signature
        assert not hasattr(Experience, field.name)


@contextmanager
def table_kept() -> Iterator[None]:
    """Whatever a failed declaration leaves behind is cleared away, so that one failure is not many."""
    before = dict(FIELDS)
    attributes = {name: value for name, value in vars(Experience).items() if not name.startswith("__")}
    try:
        yield
    finally:
        FIELDS.clear()
        FIELDS.update(before)
        for callback in fields._observers:
            callback()
        for name, value in attributes.items():
            if vars(Experience).get(name) is not value:
                setattr(Experience, name, value)


# Each case: the field, then three values for records with tokens of length 4, 3 and 5 and a prompt of 1.
CASES: dict[str, tuple[Field, list[Any]]] = {
    "response float": (
        Field("novel", "tensor", "response", "float32", doc="[R]"),
        [[0.5, -0.0, float("nan")], None, [1.0, 2.0, 3.0, 4.0]],
    ),
    "response bool": (Field("novel", "tensor", "response", "bool"), [[True, False, True], [False, False], None]),
    "response int": (
        Field("novel", "tensor", "response", "int16", accepts="integer", pad=-1),
        [[1, 2, 3], [4, 5], [6, 7, 8, 9]],
    ),
    "response bfloat16": (
        Field("novel", "tensor", "response", "bfloat16"),
        [torch.ones(3).to(torch.bfloat16), None, torch.ones(4).to(torch.bfloat16)],
    ),
    "response uint64": (
        Field("novel", "tensor", "response", "uint64", accepts="integer"),
        [torch.tensor([1, 2, 2**64 - 1], dtype=torch.uint64), None, [1, 2, 3, 4]],
    ),
    "response with trailing": (
        Field("novel", "tensor", "response", "float32", trailing=1),
        [np.ones((3, 2)), np.ones((2, 3)), np.ones((4, 2))],
    ),
    "response or one number": (
        Field("novel", "tensor", "response", "int32", accepts="integer", broadcast=True),
        [5, [1, 2], None],
    ),
    "sequence": (
        Field("novel", "tensor", "sequence", "int64", accepts="integer"),
        [[0, 1, 2, 3], None, [0, 1, 2, 3, 2**40]],
    ),
    "free": (Field("novel", "tensor", "free", "float64"), [[0.1], [], None]),
    "sample tensor": (Field("novel", "tensor", "sample", "float32"), [[0.1, 0.2], None, [0.3]]),
    "number": (Field("novel", "number"), [0.5, None, float("nan")]),
    "integer": (Field("novel", "integer"), [-(2**63), None, 2**63 - 1]),
    "text": (Field("novel", "text"), ["漢", None, "\ud800"]),
    "json": (Field("novel", "json"), [{"a": (1, float("nan"))}, None, [np.float32(1), {"$int": 1}]]),
    "media": (
        Field("novel", "media"),
        [{"p": torch.ones(2, 2).to(torch.bfloat16)}, None, {}],
    ),
    "custom fields": (
        Field("novel", "custom_fields"),
        [[CustomField("a", "b", torch.bool)], None, []],
    ),
    "eid": (Field("novel", "eid"), [EID(batch="a/b", task=1, suffix="x"), EID(suffix="y"), EID(1, 2, 3, 4, "z")]),
}
LENGTHS = [4, 3, 5]


def build(values: list[Any]) -> list[Experience]:
    return [
        Experience(
            eid=EID(task=i, suffix=str(i)), tokens=range(length), reward=float(i), info={"i": i}, novel=values[i]
        )
        for i, length in enumerate(LENGTHS)
    ]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Field, list[Any], list[Experience]]]:
    field, values = CASES[request.param]
    with declared(field):
        yield field, values, build(values)


Case = tuple[Field, list[Any], list[Experience]]


def test_construction(case: Case) -> None:
    field, values, rows = case
    empty: Any = [] if field.kind == "custom_fields" else None
    for row, value in zip(rows, values, strict=True):
        stored = row.novel
        if value is None:
            assert stored == empty
        elif field.kind == "tensor" and not isinstance(value, int):
            assert stored.dtype == getattr(torch, field.dtype)
            expected = torch.as_tensor(np.asarray(value), dtype=stored.dtype) if not torch.is_tensor(value) else value
            assert exact(stored) == exact(expected)
        else:
            assert exact(stored) == exact(value)
        if isinstance(value, dict | list):
            assert stored is not value
    default = Experience(tokens=[1, 2])
    assert default.novel == empty if field.kind != "eid" else isinstance(default.novel, EID)
    with pytest.raises(TypeError, match="novell"):
        Experience(tokens=[1, 2], novell=None)


def test_round_trips(case: Case, tmp_path: Path) -> None:
    _, _, rows = case
    experiences = Experiences(rows)
    write_parquet(experiences, tmp_path / "rows.parquet")
    ways = {
        "bytes": Experience.deserialize_many(Experience.serialize_many(rows)),
        "zstd": decode(encode(experiences, compression="zstd")),
        "arrow": from_table(to_table(experiences)),
        "portable": from_table(to_table(experiences, portable=True)),
        "parquet": read_parquet(tmp_path / "rows.parquet"),
        "hf": from_hf_datasets(to_hf_datasets(rows)),
        "hf part": [*from_hf_datasets(to_hf_datasets(rows).select([0, 1])), rows[2]],
        "trxp": Experience.deserialize_many(wire.to_trxp(rows)),
        "pickle": pickle.loads(pickle.dumps(rows)),
        "deepcopy": copy.deepcopy(rows),
        "copy": [copy.copy(row) for row in rows],
        "replace": [row.replace() for row in rows],
        "dataclasses.replace": [dataclasses.replace(row) for row in rows],
        "compact": [row.compact() for row in rows],
        "columns": Experiences.from_columns({name: [getattr(row, name) for row in rows] for name in FIELDS}),
    }
    lost = [way for way, back in ways.items() if exact_rows(back) != exact_rows(rows)]
    assert lost == []


def test_the_table_says_the_rest(case: Case) -> None:
    field, _, rows = case
    assert "novel" in [f.name for f in dataclasses.fields(Experience)]
    assert inspect.signature(Experience).parameters["novel"].default is None
    assert "novel" in dataclasses.asdict(rows[0])
    assert "novel" in to_hf_datasets(rows).column_names
    assert "novel" in to_table(Experiences(rows), portable=True).column_names
    assert (field in fields.tensor_fields(field.axis)) == (field.kind == "tensor")
    with pytest.raises(ValueError, match="novel"):
        CustomField("source", "novel", torch.bool)


def test_equality_and_replace(case: Case) -> None:
    _, values, rows = case
    same, other = build(values), rows[0].replace(novel=None)
    assert same == rows
    assert other != rows[0]
    back = other.replace(novel=values[0])
    assert back == rows[0]
    assert back.experience_type == "single_turn"
    assert exact(back) == exact(rows[0])


def test_selecting_and_joining(case: Case) -> None:
    _, _, rows = case
    experiences = Experiences(rows)
    assert exact_rows(experiences[1:]) == exact_rows(rows[1:])
    assert exact_rows(experiences[::-1]) == exact_rows(rows[::-1])
    assert exact_rows(experiences[[2, 0, 2]]) == exact_rows([rows[2], rows[0], rows[2]])
    assert exact_rows(experiences.filter([True, False, True])) == exact_rows([rows[0], rows[2]])
    assert exact_rows(experiences.compact()) == exact_rows(rows)
    assert exact_rows(Experiences.concat([experiences[:1], experiences[1:2], experiences[2:]])) == exact_rows(rows)
    assert exact_rows(Experiences.concat([experiences, Experiences(rows[:1])])) == exact_rows([*rows, rows[0]])
    # An empty list of custom fields is none at all in a column.
    assert [exact(value or None if isinstance(value, list) else value) for value in experiences.values("novel")] == [
        exact(row.novel or None if isinstance(row.novel, list) else row.novel) for row in rows
    ]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("response")])
def test_padding(name: str) -> None:
    field, values = CASES[name]
    with declared(field):
        rows = [Experience(tokens=range(4), novel=[1, 2, 3] if isinstance(values[0], int) else values[0])]
        for source in (rows, Experiences(rows)):
            padded = gather_response_attrs(source, "novel", 5, pad_value=1)
            assert padded.dtype == getattr(torch, field.dtype)
            assert padded.shape[:2] == (1, 5)
            assert exact(padded[0, :3]) == exact(rows[0].novel)
            assert set(padded[0, 3:].flatten().tolist()) == {1}
            with pytest.raises(ValueError, match="max_response_length"):
                gather_response_attrs(source, "novel", 2)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("response", "sequence"))])
def test_lengths_are_checked(name: str) -> None:
    field, values = CASES[name]
    with declared(field):
        value = values[0]
        if isinstance(value, int):
            value = [1, 2, 3]
        wrong = value[:2]
        with pytest.raises(ValueError, match="novel: got 2 entries"):
            Experience(tokens=range(4), novel=wrong)
        good = Experience(tokens=range(4), novel=value)
        good.novel = good.novel[:2]
        with pytest.raises(ValueError, match="novel: got 2 entries"):
            good.serialize()
        with pytest.raises(ValueError, match="novel"):
            Experiences.from_columns({"tokens": [range(4)], "novel": [wrong]})


@pytest.mark.parametrize("name", [name for name, (field, _) in CASES.items() if field.kind == "tensor"])
def test_shapes_and_types_are_checked(name: str) -> None:
    field = CASES[name][0]
    with declared(field):
        with pytest.raises(ValueError, match="novel"):
            Experience(tokens=range(4), novel=torch.ones(3, 1, 1, 1).to(getattr(torch, field.dtype)))
        with pytest.raises(ValueError, match="novel"):
            Experience(tokens=range(4), novel="text")
        if field.accepts == "integer":
            with pytest.raises(ValueError, match="novel"):
                Experience(tokens=range(4), novel=[0.5, 0.5, 0.5])


def test_lists_convert_to_the_declared_type() -> None:
    # Half floats too, which numpy has no name for.
    for dtype in sorted(fields.COLUMNAR):
        with declared(Field("novel", "tensor", "response", dtype)):
            record = Experience(tokens=[1, 2, 3], novel=[1, 0])
            assert record.novel.dtype == getattr(torch, dtype)
            assert record.novel.tolist() == [1, 0]


def test_a_pair_gives_its_new_fields_to_both_halves() -> None:
    for name in ("number", "integer", "text", "json", "media", "custom fields"):
        field, values = CASES[name]
        with declared(field):
            pair = Experience(tokens=[1], chosen=[2], rejected=[3], novel=values[0])
            for half in split_dpo_experience_to_single_turn([pair]):
                assert exact(half.novel) == exact(pair.novel)


@pytest.mark.parametrize("name", CASES)
def test_withdrawn_columns_are_kept_as_unknown_ones(name: str, tmp_path: Path) -> None:
    field, values = CASES[name]
    with declared(field):
        rows = build(values)
        expected = exact_rows(rows)
        data = Experience.serialize_many(rows)
    without = decode(data)
    assert [row.info["i"] for row in without] == [0, 1, 2]
    again = Experience.serialize_many(without.rows())
    part = encode(without[[2, 0]])
    write_parquet(without, tmp_path / "rows.parquet")
    with declared(field):
        assert exact_rows(Experience.deserialize_many(again)) == expected
        assert exact_rows(decode(part)) == [expected[2], expected[0]]
        assert exact_rows(read_parquet(tmp_path / "rows.parquet")) == expected


@pytest.mark.parametrize("name", CASES)
def test_columns_in_memory_outlive_their_field(name: str) -> None:
    field, values = CASES[name]
    with declared(field):
        expected = exact_rows(build(values))
        experiences = Experiences(build(values))
    data = [encode(experiences), encode(experiences[1:]), encode(Experiences(experiences.rows()))]
    with declared(field):
        decoded = [exact_rows(decode(part)) for part in data]
    assert decoded == [expected, expected[1:], expected]


def test_bytes_with_a_field_that_nobody_declared() -> None:
    plain_rows = Experiences([Experience(tokens=[1, 2])])
    table = to_table(plain_rows).append_column("novel", pa.array([[0.5]], pa.large_list(pa.float32())))
    data = encode(from_table(table))
    with declared(Field("novel", "tensor", "response", "float32")):
        assert Experience.deserialize(data).novel.tolist() == [0.5]
    # What was unknown is checked once it is known.
    with (
        declared(Field("novel", "tensor", "response", "float32", trailing=1)),
        pytest.raises(ValueError, match="novel"),
    ):
        Experience.deserialize(data)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        Field("tokens", "tensor", "sequence", "int32"),
        Field("experience_type", "text"),
        Field("", "text"),
        Field("two words", "text"),
        Field("1st", "text"),
        Field("a-b", "text"),
        Field("double__underscore", "text"),
        Field("novel", "tensor", "response", ""),
        Field("novel", "tensor", "response", "float8_e5m2"),
        Field("novel", "tensor", "response", "complex64"),
        Field("novel", "tensor", "response", "float31"),
        Field("class", "number"),
        Field("novel", "pickle"),  # type: ignore[arg-type]
        Field("novel", "tensor", "diagonal", "float32"),  # type: ignore[arg-type]
        Field("serialize", "number"),
        Field("replace", "text"),
        Field("malformed_fields", "json"),
        Field("unknown", "json"),
        Field("self", "number"),
    ],
    ids=lambda field: f"{field.name} {field.kind} {field.axis} {field.dtype}",
)
def test_what_cannot_be_declared(field: Field) -> None:
    before, signature = dict(FIELDS), inspect.signature(Experience)
    with table_kept():
        with pytest.raises(ValueError):
            fields.declare(field)
        assert before == FIELDS
        assert list(before) == list(FIELDS)
        assert inspect.signature(Experience) == signature
    assert Experience.deserialize(Experience(tokens=[1, 2]).serialize()).tokens.tolist() == [1, 2]


def test_declaring_twice_and_withdrawing_twice() -> None:
    field = Field("novel", "number")
    with declared(field):
        with pytest.raises(ValueError, match="'novel' already exists"):
            fields.declare(field)
        with pytest.raises(ValueError, match="'novel' already exists"):
            fields.declare(Field("novel", "text"))
    with pytest.raises(ValueError, match="'novel' does not exist"):
        fields.withdraw("novel")
    with pytest.raises(TypeError, match="novel"):
        Experience(tokens=[1, 2], novel=1.0)


def test_observers_hear_of_every_change() -> None:
    heard: list[bool] = []
    fields.observe(lambda: heard.append("novel" in FIELDS))
    try:
        with declared(Field("novel", "number")):
            pass
    finally:
        fields._observers.pop()
    assert heard == [True, False]


def test_owner() -> None:
    assert fields.owner("tokens") == (FIELDS["tokens"], "")
    assert fields.owner("tokens__other") == (FIELDS["tokens"], "other")
    assert fields.owner("prompt_text__raw") == (FIELDS["prompt_text"], "raw")
    for unknown in ("novel", "tokens__raw", "tokens__", "__dtype", "reward__dtype", "tokens__dtype__dtype", ""):
        assert fields.owner(unknown) is None, unknown


# --- the table, the class and the signature agree -----------------------------------------------------------------

UPSTREAM_FIELDS = [
    "eid",
    "tokens",
    "prompt_length",
    "logprobs",
    "reward",
    "token_level_reward",
    "advantages",
    "returns",
    "truncate_status",
    "info",
    "metrics",
    "response_text",
    "prompt_text",
    "action_mask",
    "messages",
    "tools",
    "chosen",
    "rejected",
    "chosen_messages",
    "rejected_messages",
    "multi_modal_inputs",
    "teacher_logprobs",
    "custom_fields",
]
OWN = [
    "policy_versions",
    "finish_reason",
    "routed_experts",
    "loss_weights",
    "parent",
    "group_size",
    "sampling",
    "old_logprobs",
    "ref_logprobs",
    "entropy",
    "values",
]


def test_order_of_fields_and_keywords() -> None:
    assert list(FIELDS)[: len(UPSTREAM_FIELDS)] == UPSTREAM_FIELDS
    assert list(FIELDS)[len(UPSTREAM_FIELDS) :][: len(OWN)] == OWN
    assert set(inspect.signature(Experience).parameters) == set(FIELDS)
    assert [field.name for field in dataclasses.fields(Experience)] == list(FIELDS)
    record = Experience(tokens=[1, 2])
    assert list(dataclasses.asdict(record)) == list(FIELDS)
    names = [name for name in to_hf_datasets([record]).column_names if name in FIELDS]
    assert names == list(FIELDS)


def _typed_class() -> tuple[list[str], ast.arguments]:
    """The annotated attributes and the `__init__` that type checkers see."""
    source = Path(rollbook.core.experience.__file__).read_text(encoding="utf-8")
    (class_node,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Experience"]
    (block,) = [n for n in class_node.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    attributes = [n.target.id for n in block.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    (init,) = [n for n in block.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return attributes, init.args


def test_what_type_checkers_see_is_the_table() -> None:
    attributes, arguments = _typed_class()
    assert attributes[: len(FIELDS)] == list(FIELDS)
    assert [argument.arg for argument in arguments.args] == ["self"]
    assert arguments.vararg is None
    signature = inspect.signature(Experience)
    assert [argument.arg for argument in arguments.kwonlyargs] == list(signature.parameters)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameter = signature.parameters[argument.arg]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert argument.annotation is not None
        if default is None:
            assert parameter.default is inspect.Parameter.empty
        else:
            assert ast.literal_eval(default) == parameter.default
    required = [name for name, p in signature.parameters.items() if p.default is inspect.Parameter.empty]
    assert required == ["tokens"]


def test_the_attributes_that_are_no_fields_exist() -> None:
    attributes, _ = _typed_class()
    record = Experience(tokens=[1, 2])
    for name in attributes:
        assert hasattr(record, name), name


def test_every_field_is_described() -> None:
    for name, field in FIELDS.items():
        assert field.name == name
        assert field.doc, name
        assert field.kind in fields.SIDES, name
        if field.kind == "tensor":
            assert field.dtype in fields.COLUMNAR, name
            assert field.axis in ("sequence", "response", "free"), name
        else:
            assert (field.axis, field.dtype) == ("sample", ""), name
