"""Hypothesis strategies for records of every kind, and `exact`, a comparison that forgives nothing.

Tensor contents come from a drawn seed, not from a draw per element: what shrinks is the structure of a record, which
is where mistakes hide, and a list of records costs milliseconds.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rollbook import EID, CustomField, Experience
from rollbook.core.fields import FIELDS, Field, tensor_fields

INTEGER_DTYPES = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
FLOAT_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
COLUMN_DTYPES = [*INTEGER_DTYPES, *FLOAT_DTYPES, torch.bool]
BOXED_DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
]
WIDE_COMPLEX = [torch.complex32, torch.complex128]
"""Complex types that a safetensors blob, and so TRXP, has no name for."""

with warnings.catch_warnings():
    # torch warns once per process that half complex numbers are new; the tests only move their bytes.
    warnings.simplefilter("ignore")
    torch.empty(0, dtype=torch.complex32)

ADJACENT_SURROGATES = "\ud83d\ude00"
"""Two lone surrogates that happen to be neighbours: not the one character they would be in UTF-16."""

_ODD_TEXTS = [
    "",
    "plain",
    "🙂 emoji 👩‍👩‍👧",
    "漢字とカナ",
    "\ud800",
    "before \udfff after",
    ADJACENT_SURROGATES,
    "\x00 nul \x00",
    "e\u0301",
    "\u2028\u2029\ufeff",
    "null",
    '"quoted" \\u0024',
]
_TAG_KEYS = ["$int", "$dict", "$tuple", "$map", "$float", "$text", "$tensor", "$array", "$", "$unheard of"]


# --- comparing ----------------------------------------------------------------------------------------------------


def exact(value: Any) -> Any:
    """`value` as nested tuples that are equal only if type, order, dtype, shape, sign of zero and bits are.

    The one thing forgiven is which NaN a NaN is.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return ("Tensor", str(value.dtype), tuple(value.shape), _tensor_bits(value))
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        # Of a long double, 6 of 16 bytes mean nothing.
        bits = str([repr(item) for item in array.flat]) if array.dtype.char in "gG" else array.tobytes()
        return (kind.__name__, array.dtype.str, array.shape, bits)
    if kind is float:
        return ("float", value.hex())
    if kind in (bool, int, str, bytes, type(None)):
        return (kind.__name__, value)
    if kind in (list, tuple):
        return (kind.__name__, tuple(map(exact, value)))
    if kind is dict:
        return ("dict", tuple((exact(key), exact(item)) for key, item in value.items()))
    if kind is EID:
        return ("EID", tuple((name, exact(part)) for name, part in vars(value).items()))
    if kind is CustomField:
        return ("CustomField", value.source_field, value.destination_field, str(value.data_type))
    if kind is Experience:
        unknown = tuple((name, repr(array.to_pylist())) for name, array in value.unknown.items())
        return ("Experience", tuple((name, exact(getattr(value, name))) for name in FIELDS), unknown)
    raise TypeError(f"{kind} is not a value of a record")


def exact_rows(rows: Any) -> list[Any]:
    """`exact` of every record of a list or of `Experiences`."""
    return [exact(row) for row in rows]


def _tensor_bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    # Not `contiguous`, which leaves the stride of a tensor with fewer than two elements as it is.
    plain = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.is_floating_point() and plain.element_size() > 1:
        plain = torch.where(plain != plain, torch.full_like(plain, float("nan")), plain)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def containers(value: Any, arrays: bool = True) -> dict[int, Any]:
    """Every mutable thing inside `value` by its id: dicts, lists, ids and, if wanted, tensors' and arrays' memory."""
    by_id: dict[int, Any] = {}
    _collect(value, arrays, by_id)
    return by_id


def _collect(value: Any, arrays: bool, by_id: dict[int, Any]) -> None:
    if isinstance(value, Experience):
        for name in FIELDS:
            _collect(getattr(value, name), arrays, by_id)
        if value.unknown:
            _collect(value.unknown, arrays, by_id)
    elif isinstance(value, EID):
        by_id[id(value)] = value
    elif isinstance(value, Mapping):
        by_id[id(value)] = value
        for item in value.values():
            _collect(item, arrays, by_id)
    elif isinstance(value, list | tuple):
        if isinstance(value, list):
            by_id[id(value)] = value
        for item in value:
            _collect(item, arrays, by_id)
    elif isinstance(value, torch.Tensor) and arrays and value.numel():
        by_id[value.untyped_storage().data_ptr()] = value
    elif isinstance(value, np.ndarray) and arrays and value.size:
        by_id[value.__array_interface__["data"][0]] = value


def shared(a: Any, b: Any, arrays: bool = True) -> list[Any]:
    """What two values both hold and either could change under the other."""
    left, right = containers(a, arrays), containers(b, arrays)
    return [left[key] for key in left.keys() & right.keys()]


def memory_of(tensor: torch.Tensor) -> range:
    """The addresses of a tensor's storage."""
    storage = tensor.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


# --- tensors ------------------------------------------------------------------------------------------------------

LAYOUTS = ["plain", "strided", "offset", "column", "transposed", "expanded", "leaf", "graph"]


def make_tensor(dtype: torch.dtype, shape: Sequence[int], seed: int, layout: str = "plain") -> torch.Tensor:
    """A tensor of random bits (so of NaNs, infinities, subnormals too), lying in memory as `layout` says."""
    shape = tuple(shape)
    if layout == "strided" and shape:
        return make_tensor(dtype, (2 * shape[0], *shape[1:]), seed)[::2]
    if layout == "offset" and shape:
        return make_tensor(dtype, (shape[0] + 5, *shape[1:]), seed)[3 : 3 + shape[0]]
    if layout == "column":
        return make_tensor(dtype, (*shape, 3), seed)[..., 1]
    if layout == "transposed" and len(shape) > 1:
        return make_tensor(dtype, shape[::-1], seed).permute(*reversed(range(len(shape))))
    if layout == "expanded" and shape:
        return make_tensor(dtype, (1, *shape[1:]), seed).expand(shape)
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=np.int64))
    width = torch.empty(0, dtype=dtype).element_size()
    raw = rng.integers(0, 256, count * width, dtype=np.uint8)
    if dtype == torch.bool:
        raw &= 1
    tensor = torch.from_numpy(raw).view(dtype) if count else torch.empty(0, dtype=dtype)
    if dtype in FLOAT_DTYPES:
        special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.5], dtype=dtype)
        pick = torch.from_numpy(rng.integers(0, 12, count))
        tensor = torch.where(pick < 6, special[pick.clamp(max=5)], tensor)
    tensor = tensor.reshape(shape)
    if layout in ("leaf", "graph") and dtype in FLOAT_DTYPES:
        tensor = tensor.requires_grad_()
        return tensor.reshape(shape).view(shape) + 0 if layout == "graph" else tensor
    return tensor


SEEDS = st.integers(0, 2**16)


def tensors(dtypes: Sequence[torch.dtype], shape: Sequence[int]) -> st.SearchStrategy[torch.Tensor]:
    """Tensors of one shape, of any of the types, in any layout."""
    return st.builds(make_tensor, st.sampled_from(dtypes), st.just(tuple(shape)), SEEDS, st.sampled_from(LAYOUTS))


SHAPES = st.lists(st.integers(0, 3), max_size=3)
"""0-d to 3-d, empty ones too."""


@functools.cache
def free_tensors(trxp: bool = False) -> st.SearchStrategy[torch.Tensor]:
    """Tensors of any type and shape, as media and `info` may hold."""
    dtypes = [*COLUMN_DTYPES, *BOXED_DTYPES, *([] if trxp else WIDE_COMPLEX)]
    return SHAPES.flatmap(lambda shape: tensors(dtypes, shape))


def _conjugated(seed: int) -> torch.Tensor:
    return make_tensor(torch.complex64, (2,), seed).conj()


# --- free-form values ---------------------------------------------------------------------------------------------

TEXTS = st.one_of(st.sampled_from(_ODD_TEXTS), st.text(st.characters(codec=None, exclude_categories=()), max_size=6))
UNICODE = st.one_of(
    st.sampled_from([text for text in _ODD_TEXTS if (text.isprintable() and text.isascii()) or "漢" in text]),
    st.text(max_size=6),
)
"""Text that is UTF-8."""

_NUMPY_SCALARS: list[np.generic] = [
    np.bool_(True),
    np.int8(-1),
    np.uint8(255),
    np.int16(-300),
    np.uint16(60000),
    np.int32(7),
    np.uint32(2**32 - 1),
    np.int64(-(2**63)),
    np.uint64(2**64 - 1),
    np.float16(0.1),
    np.float32(-0.0),
    np.float64(0.1),
    np.float64("nan"),
    np.float32("inf"),
    np.longdouble(1) / 3,
    np.complex64(1 + 2j),
    np.complex128(complex(-0.0, 1.5)),
    np.str_("漢"),
    np.str_(""),
    np.bytes_(b"\xff\x01"),
    np.bytes_(b""),
    np.datetime64("2026-01-02T03:04:05", "ms"),
    np.datetime64("NaT"),
    np.timedelta64(5, "s"),
    np.timedelta64(5),
]
_ARRAY_DTYPES = ["<f4", ">f4", "<f8", ">i8", "<i2", ">u2", "|u1", "|i1", "|b1", "<f2", "<c8", ">c16", "<U3", "|S4"]
_ARRAY_DTYPES += ["<M8[ms]", ">m8[s]"]


def make_array(dtype: str, shape: Sequence[int], seed: int, layout: str = "plain") -> np.ndarray:
    """An array of random bits."""
    if layout == "strided" and shape:
        return make_array(dtype, (2 * shape[0], *shape[1:]), seed)[::-2]
    if layout == "transposed":
        return make_array(dtype, tuple(shape)[::-1], seed).T
    kind = np.dtype(dtype)
    count = int(np.prod(tuple(shape), dtype=np.int64))
    rng = np.random.default_rng(seed)
    if kind.kind == "U":
        return np.array(rng.choice(["", "a", "漢字", "xyz"], count), dtype=kind).reshape(shape)
    raw = rng.integers(0, 2 if kind.kind == "b" else 256, count * kind.itemsize, dtype=np.uint8)
    return np.frombuffer(raw.tobytes(), dtype=kind).reshape(shape).copy()


ARRAYS = st.builds(
    make_array,
    st.sampled_from(_ARRAY_DTYPES),
    SHAPES.map(tuple),
    SEEDS,
    st.sampled_from(["plain", "strided", "transposed"]),
)
INTEGERS = st.one_of(
    st.integers(-10, 10),
    st.sampled_from(
        [2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**400, -(10**400)]
    ),
)
FLOATS = st.one_of(st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 5e-324]), st.floats())
_PLAIN = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXTS)
_TEXT_KEYS = st.one_of(st.sampled_from(_TAG_KEYS), TEXTS)
_KEYS = st.one_of(
    _TEXT_KEYS,
    st.none(),
    st.booleans(),
    INTEGERS,
    FLOATS,
    st.binary(max_size=2),
    st.sampled_from([np.int64(3), np.float32(0.5), np.str_("漢"), np.bool_(True), np.bytes_(b"k")]),
    st.tuples(INTEGERS, TEXTS),
    st.tuples(st.tuples(FLOATS)),
)


_LEAVES = st.one_of(
    _PLAIN,
    st.binary(max_size=5),
    # By index: not all of them can be hashed, and a sampled list is.
    st.integers(0, len(_NUMPY_SCALARS) - 1).map(_NUMPY_SCALARS.__getitem__),
    ARRAYS,
    free_tensors(),
    st.builds(_conjugated, SEEDS),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_TEXT_KEYS, inner, max_size=3),
        st.dictionaries(_KEYS, inner, max_size=3),
        # A dict of one key that looks like a tag, holding what that tag would, is the trap.
        st.builds(lambda key, item: {key: item}, st.sampled_from(_TAG_KEYS), inner),
    )


FREEFORM: st.SearchStrategy[Any] = st.recursive(_LEAVES, _nested, max_leaves=6)
"""Any value that `info` may hold."""

FREEFORM_DICTS: st.SearchStrategy[dict[Any, Any]] = st.one_of(
    st.just({}),
    st.dictionaries(TEXTS, _PLAIN, max_size=3),
    st.dictionaries(_KEYS, FREEFORM, max_size=3),
    st.builds(lambda key, item: {key: item}, st.sampled_from(_TAG_KEYS), FREEFORM),
)
"""What `info`, `metrics` and `sampling` may be."""

_CONTENT = st.one_of(TEXTS, st.none(), st.just([{"type": "image"}, {"type": "text", "text": "漢"}]), FREEFORM)
_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": _CONTENT},
    optional={"tool_calls": st.just([]), "name": TEXTS},
)
CONVERSATIONS: st.SearchStrategy[list[Any]] = st.one_of(
    st.just([]), st.lists(_MESSAGES, max_size=2), st.lists(FREEFORM, max_size=2)
)
"""What messages and tools may be: plain ones, ones with parts, and whatever else."""


# --- records ------------------------------------------------------------------------------------------------------

_PARTS = st.one_of(
    st.integers(-(2**40), 2**40),
    st.sampled_from([2**70, "1", "01", "-0", "10/eval", "50%", "%2F", "%25/", "漢/字", ""]),
    st.text(max_size=4),
)
EIDS = st.builds(
    EID,
    batch=_PARTS,
    task=_PARTS,
    run=st.integers(-(2**63), 2**63 - 1),
    step=st.integers(0, 9),
    suffix=st.one_of(st.sampled_from(["a", "a/b", "%", "漢"]), st.text(max_size=4)),
)
CUSTOM_FIELDS = st.lists(
    st.builds(
        CustomField,
        source_field=TEXTS.filter(bool),
        destination_field=st.sampled_from(["expert_mask", "weight", "漢", "a/b"]),
        data_type=st.sampled_from([*COLUMN_DTYPES, *BOXED_DTYPES, *WIDE_COMPLEX]),
    ),
    max_size=2,
)
MEDIA_KEYS = st.sampled_from(["pixel_values", "image_grid_thw", "a:b", "漢", "0:tokens", ""])
KINDS = ["single_turn", "multi_turn", "dpo", "single_turn cut", "multi_turn cut"]
"""`cut`: with `truncate_status="prompt_truncated"`."""


@functools.cache
def _tensor_field(field: Field, length: int) -> st.SearchStrategy[Any]:
    dtypes = INTEGER_DTYPES if field.accepts == "integer" else COLUMN_DTYPES
    shape = st.tuples(st.just(length), *[st.integers(0, 3)] * field.trailing)
    # Mostly the field's own type: then most columns are plain ones, and the rest are the exceptions.
    kinds = st.one_of(st.just([getattr(torch, field.dtype)]), st.just(dtypes))
    drawn = st.tuples(shape, kinds).flatmap(lambda pair: tensors(pair[1], pair[0]))
    if field.broadcast:
        return st.one_of(drawn, st.integers(-(2**31), 2**31 - 1))
    return drawn


@functools.cache
def _plain_field(field: Field, trxp: bool) -> st.SearchStrategy[Any]:
    if field.kind == "number":
        return st.one_of(FLOATS, st.integers(-3, 3))
    if field.kind == "integer":
        return st.integers(1, 2**63 - 1)
    if field.kind == "text":
        return TEXTS
    if field.kind == "custom_fields":
        return CUSTOM_FIELDS
    if field.kind == "media":
        return st.dictionaries(MEDIA_KEYS, free_tensors(trxp), max_size=3)
    return FREEFORM_DICTS if field.name in ("info", "metrics", "sampling") else CONVERSATIONS


_DRAWN_APART = ("eid", "tokens", "prompt_length", "truncate_status", "experience_type", "chosen", "rejected")


@st.composite
def records(draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS), trxp: bool = False) -> Experience:
    """One record of one of the kinds; `trxp` leaves out what that format has no name for."""
    kind, _, is_cut = draw(st.sampled_from(kinds)).partition(" ")
    columns: dict[str, Any] = {"eid": draw(EIDS)}
    least = 1 if kind == "single_turn" else 0
    prompt, response = draw(st.integers(least, 3)), draw(st.integers(least, 3))
    if kind == "dpo":
        response = 0
    columns["prompt_length"] = prompt
    length = prompt + response
    if is_cut:
        columns["truncate_status"] = "prompt_truncated"
        length = draw(st.integers(0, 4))
    elif draw(st.booleans()):
        status = [None, "response_truncated", "\ud800", *(["prompt_truncated"] if kind == "dpo" else [])]
        columns["truncate_status"] = draw(st.sampled_from(status))
    columns["tokens"] = draw(_tensor_field(FIELDS["tokens"], length))
    # A multi-turn record may carry a pair as well: the mask decides what it is.
    if kind == "dpo" or (kind == "multi_turn" and draw(st.integers(0, 4)) == 4):
        for name in ("chosen", "rejected"):
            columns[name] = draw(_tensor_field(FIELDS[name], draw(st.integers(0, 3))))
    optional = [name for name in FIELDS if name not in _DRAWN_APART]
    chosen = draw(st.sets(st.sampled_from(optional), max_size=6))
    if is_cut:
        chosen |= {"logprobs"}
    if kind == "multi_turn":
        chosen |= {"action_mask"}
    else:
        chosen -= {"action_mask"}
    for name in (name for name in optional if name in chosen):
        field = FIELDS[name]
        strategy = _tensor_field(field, response) if field.kind == "tensor" else _plain_field(field, trxp)
        columns[name] = draw(strategy)
    if is_cut and "action_mask" in columns:
        columns["action_mask"] = torch.zeros_like(columns["action_mask"])
    if {"advantages", "returns"} <= chosen and draw(st.booleans()):
        columns["returns"] = columns["advantages"]
    return Experience(**columns)


@st.composite
def record_lists(
    draw: st.DrawFn, max_size: int = 5, kinds: Sequence[str] = tuple(KINDS), trxp: bool = False
) -> list[Experience]:
    """Lists of records, now and then with the same record twice."""
    rows = draw(st.lists(records(kinds, trxp), max_size=max_size))
    if rows and draw(st.booleans()):
        rows.append(rows[0])
    return rows


def full_record(kind: str = "single_turn", seed: int = 0, **changes: Any) -> Experience:
    """A record of one kind with a value in every field of the table that the kind can have."""
    dpo = kind == "dpo"
    prompt, response = 2, 0 if dpo else 3
    columns: dict[str, Any] = {
        "eid": EID(batch=1, task=f"t/{seed}", run=seed, step=2, suffix=f"s{seed}"),
        "prompt_length": prompt,
        "experience_type": kind,
        "truncate_status": "response_truncated",
    }
    for field in tensor_fields():
        length = {"sequence": prompt + response, "response": response, "free": 2, "sample": 1}[field.axis]
        dtype = getattr(torch, field.dtype)
        columns[field.name] = make_tensor(dtype, (length, *[2] * field.trailing), seed)
    for name, field in FIELDS.items():
        if field.kind == "number":
            columns[name] = seed + 0.5
        elif field.kind == "integer":
            columns.setdefault(name, 4)
        elif field.kind == "text":
            columns.setdefault(name, f"{name} 漢 {seed}")
        elif field.kind == "json":
            columns[name] = (
                {"n": seed} if name in ("info", "metrics", "sampling") else [{"role": "user", "content": "?"}]
            )
        elif field.kind == "media":
            columns[name] = {"pixel_values": make_tensor(torch.bfloat16, (2, 3), seed)}
        elif field.kind == "custom_fields":
            columns[name] = [CustomField("n", "expert_mask", torch.bool)]
    if dpo:
        del columns["action_mask"]
    elif kind == "single_turn":
        columns["action_mask"] = torch.ones(response, dtype=torch.bool)
    return Experience(**{**columns, **changes})
