"""The one table of fields: everything else (padding, packing, bytes, Arrow, HF, documentation) derives from it.

Invariant: a field is declared here and nowhere else: other modules ask the table by kind or by axis, and name a field
only for what is true of that one alone (the length of `tokens`, the mask of a truncated prompt). Dtypes are strings, so
that nothing here (nor in `ragged`, `wire` or a book) imports torch.

A new field is one call:

>>> surprise = Field("surprise", kind="tensor", axis="response", dtype="float32", doc="[R] How unlikely.")
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

Kind = Literal["eid", "tensor", "number", "integer", "text", "json", "media", "custom_fields"]
"""How one value looks.

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
"""What the first axis of a value runs over.

- `sequence`: the tokens, prompt and response.
- `response`: slot j speaks of token `prompt_length + j`.
- `free`: a length of its own (the two answers of a preference pair).
- `sample`: no axis, one value per record.
"""

Accepts = Literal["integer", "real"]


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type: its torch name, its code in `__dtype` side columns, its numpy storage and size."""

    name: str
    code: int
    """0 for types that are kept only as {dtype, shape, bytes}."""
    storage: str
    """The numpy type of the memory: `bfloat16` lies as `uint16`, `bool` as `uint8`."""
    portable: str
    """The numpy type in Parquet and HF, where other tools read the values."""
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
"""Types a ragged column can hold."""

EXPERIENCE_TYPES = ("single_turn", "multi_turn", "dpo")


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record.

    >>> FIELDS["logprobs"].axis, FIELDS["logprobs"].dtype, FIELDS["logprobs"].pad
    ('response', 'float32', 0)
    """

    name: str
    kind: Kind
    axis: Axis = "sample"
    dtype: str = ""
    """What lists, ranges and arrays convert to; a tensor keeps its own."""
    pad: float = 0
    """The value that fills a padded slot of a batch (tokens are padded with the pad id the caller gives)."""
    accepts: Accepts = "real"
    """Which element types are allowed: `integer` refuses floats and bools."""
    trailing: int = 0
    """How many dimensions follow the first."""
    broadcast: bool = False
    """Whether one plain number may stand for the whole axis."""
    holds: Literal["", "dict", "list"] = ""
    """What a `json` value must be, if not anything."""
    always: bool = False
    """Whether a record to which nothing was given has an empty dict."""
    doc: str = ""


FIELDS: dict[str, Field] = {
    f.name: f
    for f in (
        Field("eid", "eid", doc="The record's id: batch, task, run, step, suffix."),
        Field("tokens", "tensor", "sequence", "int32", accepts="integer", doc="[L] Prompt, then response."),
        Field("prompt_length", "integer", doc="How many of the tokens are the prompt."),
        Field("logprobs", "tensor", "response", "float32", doc="[R] Log-probs the engine sampled with."),
        Field("reward", "number", doc="`None`: not scored yet. NaN: could not be scored."),
        Field("token_level_reward", "tensor", "response", "float32", doc="[R] Reward by token."),
        Field("advantages", "tensor", "response", "float32", doc="[R]"),
        Field("returns", "tensor", "response", "float32", doc="[R]"),
        Field("truncate_status", "text", doc="`prompt_truncated`, `response_truncated` or `None`."),
        Field("info", "json", holds="dict", always=True, doc="Whatever the workflow wants to keep."),
        Field("metrics", "json", holds="dict", always=True, doc="Numbers to log."),
        Field("response_text", "text", doc="The response, decoded."),
        Field("prompt_text", "text", doc="The prompt, decoded."),
        Field("action_mask", "tensor", "response", "bool", doc="[R] True where the model chose the token."),
        Field("messages", "json", holds="list", doc="The conversation."),
        Field("tools", "json", holds="list", doc="The tools that were offered."),
        Field("chosen", "tensor", "free", "int32", accepts="integer", doc="[C] The better answer's tokens."),
        Field("rejected", "tensor", "free", "int32", accepts="integer", doc="[J] The worse answer's tokens."),
        Field("chosen_messages", "json", holds="list", doc="The conversation that ends in the better answer."),
        Field("rejected_messages", "json", holds="list", doc="The conversation that ends in the worse answer."),
        Field("multi_modal_inputs", "media", doc="Name -> tensor, such as `pixel_values` (rows, width)."),
        Field("teacher_logprobs", "tensor", "response", "float32", doc="[R] A teacher's log-probs."),
        Field("custom_fields", "custom_fields", doc="Which `info` keys become columns of a batch."),
        Field(
            "policy_versions",
            "tensor",
            "response",
            "int32",
            accepts="integer",
            broadcast=True,
            doc="[R] or one number: the version of the policy that sampled each token.",
        ),
        Field("finish_reason", "text", doc="Why the engine stopped: `stop`, `length`, ..."),
        Field(
            "routed_experts",
            "tensor",
            "response",
            "int16",
            accepts="integer",
            trailing=2,
            doc="[R, layers, k] The experts that a mixture-of-experts model chose.",
        ),
        Field("loss_weights", "tensor", "response", "float32", pad=0, doc="[R] Weight of each token's loss."),
        Field("parent", "text", doc="The uid this record was made from."),
        Field("group_size", "integer", doc="How many runs this record's task has."),
        Field("sampling", "json", holds="dict", doc="Temperature, top_p, top_k, seed and what else the engine used."),
        Field("old_logprobs", "tensor", "response", "float32", doc="[R] The old policy's, recomputed."),
        Field("ref_logprobs", "tensor", "response", "float32", doc="[R] The reference policy's."),
        Field("entropy", "tensor", "response", "float32", doc="[R] Of the distribution each token was drawn from."),
        Field("values", "tensor", "response", "float32", doc="[R] The critic's, before each token."),
        Field("experience_type", "text", doc="`single_turn`, `multi_turn` or `dpo`; inferred once, then kept."),
    )
}


@dataclass(frozen=True, slots=True)
class BatchField:
    """One per-token field of a batch, and of its items: (B, S) on the `sequence` axis, (B, A) on the `response` axis.

    >>> BATCH_FIELDS["action_log_probs"].axis, BATCH_FIELDS["action_log_probs"].sources
    ('response', ('old_logprobs', 'logprobs'))
    """

    name: str
    axis: Axis
    sources: tuple[str, ...] = ()
    """The record's fields it is made from: the first that every record has."""
    absent: float = 0
    """What a row that lacks the field counts as: no mask masks nothing."""


BATCH_FIELDS: dict[str, BatchField] = {
    f.name: f
    for f in (
        BatchField("sequences", "sequence", ("tokens",)),
        BatchField("action_log_probs", "response", ("old_logprobs", "logprobs")),
        BatchField("base_action_log_probs", "response", ("ref_logprobs",)),
        BatchField("values", "response", ("values",)),
        BatchField("returns", "response", ("returns",)),
        BatchField("advantages", "response", ("advantages",)),
        BatchField("attention_mask", "sequence", absent=1),
        BatchField("action_mask", "response", ("action_mask",), absent=1),
        BatchField("kl", "response"),
        BatchField("action_entropy", "response", ("entropy",)),
    )
}
"""LightRFT's names. A record's other response-axis fields go to a batch's `extras`, under their own names."""

BATCH_MEDIA: dict[str, str] = {
    "pixel_values": "pixel_values",
    "image_grid_thws": "image_grid_thw",
    "pixel_values_videos": "pixel_values_videos",
    "video_grid_thws": "video_grid_thw",
}
"""A batch's media fields, and the keys of `multi_modal_inputs` they are made from; other keys go to `media`."""

_BATCH = """uid unique_ids input_ids sequences attention_mask position_ids prompts responses response_mask
    token_level_scores token_level_rewards rewards rollout_log_probs old_log_probs ref_log_prob cu_seqlens values labels
    references response_length total_length"""
BATCH_NAMES = frozenset(_BATCH.split())
"""Names of a trainer's batch that a custom field must not overwrite."""

_observers: list[Callable[[], None]] = []


def observe(callback: Callable[[], None]) -> None:
    """Have `callback()` called whenever the table changes."""
    _observers.append(callback)


def declare(field: Field) -> None:
    """Add a field to the table; every module serves it from then on."""
    if field.name in FIELDS:
        raise ValueError(f"field {field.name!r} is in the table already")
    if not field.name.isidentifier() or keyword.iskeyword(field.name) or "__" in field.name or field.name == "self":
        raise ValueError(f"field name {field.name!r}: expected an identifier without a double underscore")
    if field.kind not in get_args(Kind) or field.axis not in get_args(Axis) or field.accepts not in get_args(Accepts):
        raise ValueError(
            f"field {field.name!r}: got {field.kind!r}, {field.axis!r}, {field.accepts!r}, "
            f"expected one each of {get_args(Kind)}, {get_args(Axis)}, {get_args(Accepts)}"
        )
    if field.kind == "tensor" and field.dtype not in COLUMNAR:
        raise ValueError(f"field {field.name!r}: dtype {field.dtype!r} is none of {sorted(COLUMNAR)}")
    FIELDS[field.name] = field
    try:
        for callback in _observers:
            callback()
    except ValueError:
        del FIELDS[field.name]
        _index_fields()
        raise


def withdraw(name: str) -> None:
    """Take a declared field out of the table again; its columns are then unknown ones, kept as they are."""
    if name not in FIELDS:
        raise ValueError(f"field {name!r} is not in the table")
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
    """Rebuild what is derived from the table."""
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
