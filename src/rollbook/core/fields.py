"""The table of fields, from which padding, packing, bytes, Arrow and HF schemas and documentation are derived.

Invariant: a field is declared here and nowhere else. Other modules look fields up by kind or axis, and name a field
only for what is special about it (the length of `tokens`, the mask of a truncated prompt). Dtypes are strings: neither
this module nor `ragged`, `wire` or a book imports torch.

`declare` adds a field:

>>> surprise = Field("surprise", kind="tensor", axis="response", dtype="float32", doc="[R] Negative log-prob.")
>>> declare(surprise)
>>> from rollbook import Experience
>>> from rollbook.wire import decode, encode
>>> record = Experience(tokens=[1, 2, 3], surprise=[0.5, 0.25])
>>> decode(encode([record]))[0].surprise.tolist()
[0.5, 0.25]
>>> withdraw("surprise")
"""

from __future__ import annotations

import keyword
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["FIELDS", "Dtype", "Field", "declare", "observe", "withdraw"]

Kind = Literal["eid", "tensor", "number", "integer", "text", "json", "media", "custom_fields"]
"""Type of a field's value.

- `eid`: an `EID`.
- `tensor`: a torch tensor, ragged over its first axis.
- `number`: a float or `None`; NaN is not `None`.
- `integer`: an int or `None`.
- `text`: a str or `None`.
- `json`: nested dicts and lists that may hold tensors, arrays, bytes, tuples (see `rollbook.core.freeform`).
- `media`: a dict from name to tensor of any shape.
- `custom_fields`: a list of `CustomField`.
"""

Axis = Literal["sequence", "response", "free", "sample"]
"""First axis of a value.

- `sequence`: the tokens, prompt and response.
- `response`: the response tokens; slot j belongs to token `prompt_length + j`.
- `free`: a length of its own (the two answers of a preference pair).
- `sample`: no axis, one value per record.
"""

Accepts = Literal["integer", "real"]


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type.

    Attributes:
        name: Name in torch.
        code: Code in `__dtype` side columns; 0 for types that are stored only as {dtype, shape, bytes}.
        storage: The numpy type of the memory: `uint16` for `bfloat16`, `uint8` for `bool`.
        portable: The numpy type in Parquet and HF, which other tools read.
        itemsize: Bytes of an element.

    >>> DTYPES["bfloat16"].storage, DTYPES["bfloat16"].portable, DTYPES["bfloat16"].itemsize
    ('uint16', 'float32', 2)
    """

    name: str
    code: int
    storage: str
    portable: str
    itemsize: int


def _plain(name: str, code: int, itemsize: int) -> Dtype:
    return Dtype(name, code, name, name, itemsize)


DTYPES: dict[str, Dtype] = {
    d.name: d
    for d in (
        Dtype("bool", 1, "uint8", "uint8", 1),
        _plain("uint8", 2, 1),
        _plain("int8", 3, 1),
        _plain("uint16", 4, 2),
        _plain("int16", 5, 2),
        _plain("uint32", 6, 4),
        _plain("int32", 7, 4),
        _plain("uint64", 8, 8),
        _plain("int64", 9, 8),
        Dtype("float16", 10, "float16", "float32", 2),
        Dtype("bfloat16", 11, "uint16", "float32", 2),
        _plain("float32", 12, 4),
        _plain("float64", 13, 8),
        *(
            Dtype(name, 0, "uint8", "uint8", itemsize)
            for name, itemsize in (
                ("float8_e4m3fn", 1),
                ("float8_e4m3fnuz", 1),
                ("float8_e5m2", 1),
                ("float8_e5m2fnuz", 1),
                ("float8_e8m0fnu", 1),
                ("complex32", 4),
                ("complex64", 8),
                ("complex128", 16),
            )
        ),
    )
}
BY_CODE: dict[int, Dtype] = {d.code: d for d in DTYPES.values() if d.code}

INTEGERS = frozenset(("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"))
COLUMNAR = frozenset(d.name for d in BY_CODE.values())
"""Element types that a ragged column can hold."""

EXPERIENCE_TYPES = ("single_turn", "multi_turn", "dpo")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record.

    Args:
        name: Name of the attribute.
        kind: Type of the value.
        axis: First axis of the value.
        dtype: Element type that lists, ranges and arrays are converted to; tensors keep theirs.
        pad: Value of padded slots in a batch (tokens are padded with the caller's pad id).
        accepts: Allowed element types; `integer` rejects floats and bools.
        trailing: Number of dimensions after the first.
        broadcast: Whether a plain number may stand for the whole axis.
        holds: Required type of a `json` value, if any.
        always: Whether the default is an empty dict instead of `None`.
        doc: Description.

    >>> FIELDS["logprobs"].axis, FIELDS["logprobs"].dtype, FIELDS["logprobs"].pad
    ('response', 'float32', 0)
    """

    name: str
    kind: Kind
    axis: Axis = "sample"
    dtype: str = ""
    pad: float = 0
    accepts: Accepts = "real"
    trailing: int = 0
    broadcast: bool = False
    holds: Literal["", "dict", "list"] = ""
    always: bool = False
    doc: str = ""


FIELDS: dict[str, Field] = {
    f.name: f
    for f in (
        Field("eid", "eid", doc="Id of the record: batch, task, run, step, suffix."),
        Field("tokens", "tensor", "sequence", "int32", accepts="integer", doc="[L] Prompt ids, then response ids."),
        Field("prompt_length", "integer", doc="Number of prompt tokens."),
        Field(
            "logprobs",
            "tensor",
            "response",
            "float32",
            doc="[R] Log-probs of the rollout engine.",
        ),
        Field("reward", "number", doc="`None`: not scored yet. NaN: could not be scored."),
        Field("token_level_reward", "tensor", "response", "float32", doc="[R] Reward of each token."),
        Field("advantages", "tensor", "response", "float32", doc="[R] Advantage of each token."),
        Field("returns", "tensor", "response", "float32", doc="[R] Return of each token."),
        Field("truncate_status", "text", doc="`prompt_truncated`, `response_truncated` or `None`."),
        Field("info", "json", holds="dict", always=True, doc="Other data of the workflow."),
        Field("metrics", "json", holds="dict", always=True, doc="Numbers to log."),
        Field("response_text", "text", doc="The response, decoded."),
        Field("prompt_text", "text", doc="The prompt, decoded."),
        Field("action_mask", "tensor", "response", "bool", doc="[R] True on tokens that the model sampled."),
        Field("messages", "json", holds="list", doc="The conversation."),
        Field("tools", "json", holds="list", doc="The tools offered to the model."),
        Field("chosen", "tensor", "free", "int32", accepts="integer", doc="[C] Token ids of the better answer."),
        Field("rejected", "tensor", "free", "int32", accepts="integer", doc="[J] Token ids of the worse answer."),
        Field("chosen_messages", "json", holds="list", doc="The conversation that ends in the better answer."),
        Field("rejected_messages", "json", holds="list", doc="The conversation that ends in the worse answer."),
        Field("multi_modal_inputs", "media", doc="Name -> tensor, such as `pixel_values` (rows, width)."),
        Field("teacher_logprobs", "tensor", "response", "float32", doc="[R] Log-probs of the teacher."),
        Field("custom_fields", "custom_fields", doc="Entries of `info` that become columns of a batch."),
        Field(
            "policy_versions",
            "tensor",
            "response",
            "int32",
            accepts="integer",
            broadcast=True,
            doc="[R] or one number: version of the policy that sampled each token.",
        ),
        Field("finish_reason", "text", doc="Why the engine stopped: `stop`, `length`, ..."),
        Field(
            "routed_experts",
            "tensor",
            "response",
            "int16",
            accepts="integer",
            trailing=2,
            doc="[R, layers, k] Experts that a mixture-of-experts model selected.",
        ),
        Field("loss_weights", "tensor", "response", "float32", pad=0, doc="[R] Weight of each token's loss."),
        Field("parent", "text", doc="Uid of the record that this one was derived from."),
        Field("group_size", "integer", doc="Number of runs of the task."),
        Field(
            "sampling", "json", holds="dict", doc="Sampling options of the engine: temperature, top_p, top_k, seed, ..."
        ),
        Field(
            "old_logprobs",
            "tensor",
            "response",
            "float32",
            doc="[R] Recomputed before the update.",
        ),
        Field("ref_logprobs", "tensor", "response", "float32", doc="[R] Log-probs of the reference policy."),
        Field("entropy", "tensor", "response", "float32", doc="[R] Entropy of the policy at each token."),
        Field("values", "tensor", "response", "float32", doc="[R] Value estimate of the critic before each token."),
        Field("experience_type", "text", doc="`single_turn`, `multi_turn` or `dpo`; inferred at construction."),
    )
}

BATCH_NAMES = frozenset(
    (
        *("uid", "unique_ids", "input_ids", "sequences", "attention_mask", "position_ids", "cu_seqlens"),
        *("prompts", "responses", "response_mask", "response_length", "total_length", "labels", "references"),
        *("token_level_scores", "token_level_rewards", "rewards", "values"),
        *("rollout_log_probs", "old_log_probs", "ref_log_prob"),
    )
)
"""Names in the batch of a trainer, which custom fields cannot use."""

_observers: list[Callable[[], None]] = []


def observe(callback: Callable[[], None]) -> None:
    """Call `callback()` whenever the table changes.

    Args:
        callback: A function without arguments.

    >>> from functools import partial
    >>> changes = []
    >>> observe(partial(changes.append, "changed"))
    >>> declare(Field("difficulty", kind="number"))
    >>> withdraw("difficulty")
    >>> changes
    ['changed', 'changed']
    """
    _observers.append(callback)


def declare(field: Field) -> None:
    """Add a field to the table.

    Args:
        field: The field, which all modules support from then on.

    Raises:
        ValueError: The name is taken or invalid, or the declaration is inconsistent.

    >>> declare(Field("surprise", kind="tensor", axis="response", dtype="float32", doc="[R] Negative log-prob."))
    >>> from rollbook import Experience
    >>> Experience(tokens=[1, 2, 3], surprise=[0.5, 0.25]).surprise
    tensor([0.5000, 0.2500])
    >>> withdraw("surprise")
    """
    if field.name in FIELDS:
        raise ValueError(f"field {field.name!r} already exists")
    if not field.name.isidentifier() or keyword.iskeyword(field.name) or "__" in field.name or field.name == "self":
        raise ValueError(f"field name {field.name!r}: expected an identifier without a double underscore")
    if field.kind not in get_args(Kind) or field.axis not in get_args(Axis) or field.accepts not in get_args(Accepts):
        raise ValueError(
            f"field {field.name!r}: got {field.kind!r}, {field.axis!r}, {field.accepts!r}, "
            f"expected one each of {get_args(Kind)}, {get_args(Axis)}, {get_args(Accepts)}"
        )
    if field.kind == "tensor" and field.dtype not in COLUMNAR:
        raise ValueError(
            f"field {field.name!r}: got dtype {field.dtype!r}, expected one of {', '.join(sorted(COLUMNAR))}"
        )
    FIELDS[field.name] = field
    try:
        for callback in _observers:
            callback()
    except ValueError:
        del FIELDS[field.name]
        _index_fields()
        raise


def withdraw(name: str) -> None:
    """Remove a declared field from the table. Its columns become unknown columns, which are preserved.

    Args:
        name: Name of the field.

    Raises:
        ValueError: There is no such field.

    >>> declare(Field("difficulty", kind="number"))
    >>> withdraw("difficulty")
    >>> "difficulty" in FIELDS
    False
    """
    if name not in FIELDS:
        raise ValueError(f"field {name!r} does not exist")
    del FIELDS[name]
    for callback in _observers:
        callback()


SIDES = {
    "tensor": ("dtype", "other", "one"),
    "text": ("raw",),
    "number": (),
    "integer": (),
    "json": (),
    "media": (),
    "eid": (),
    "custom_fields": (),
}
"""Side columns of each kind, named `<field>__<side>`: `dtype` (a code per row), `other` (values that do not fit
the column, as {dtype, shape, data}), `one` (one number for the whole axis), `raw` (text that is not UTF-8)."""


OWNERS: dict[str, tuple[Field, str]] = {}
"""Field and side (`""` for the main column) of each physical column, in the order of the table."""
COLUMN_NAMES: dict[str, tuple[str, ...]] = {}
"""Physical columns of each field, the main one first."""
TENSOR_FIELDS: dict[Axis | None, list[Field]] = {}
"""Tensor fields of each axis; those of all axes under `None`."""


def _index_fields() -> None:
    """Rebuild the indices of the table."""
    OWNERS.clear()
    COLUMN_NAMES.clear()
    TENSOR_FIELDS.update({axis: [] for axis in (None, *get_args(Axis))})
    for name, field in FIELDS.items():
        for side in ("", *sorted(SIDES[field.kind])):
            OWNERS[f"{name}__{side}" if side else name] = field, side
        COLUMN_NAMES[name] = (name, *(f"{name}__{side}" for side in SIDES[field.kind]))
        if field.kind == "tensor":
            TENSOR_FIELDS[field.axis].append(field)
            TENSOR_FIELDS[None].append(field)


observe(_index_fields)
_index_fields()


def tensor_fields(axis: Axis | None = None) -> list[Field]:
    """Return the tensor fields of one axis, or of all axes if `axis` is `None`."""
    return list(TENSOR_FIELDS[axis])


def owner(column: str) -> tuple[Field, str] | None:
    """Return the field and side of a physical column (see `OWNERS`), or `None` if the column is unknown.

    >>> field, side = owner("tokens__dtype")
    >>> field.name, side
    ('tokens', 'dtype')
    """
    return OWNERS.get(column)
