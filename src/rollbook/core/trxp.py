"""Trinity-RFT's bytes: TRXP 1 (0.5.2 and later) read and written, and the pickles of earlier releases read.

Invariant: reading runs nothing. The pickled part goes through `_unpickle`, which knows a handful of names and has each
re-implemented; any other is a `WireError` that names it. Writing keeps every field: what Trinity does not know stands
under keys that it skips, and is found again here (unknown columns of a newer Rollbook are not written).

Layout: `TRXP`, u8 version, u64 length of the pickled part, u64 length of the tensors, the pickle, a safetensors blob.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rollbook.core import fields, unpickle
from rollbook.core.errors import WireError
from rollbook.core.fields import FIELDS
from rollbook.core.ragged import tensor_bytes, tensor_from_bytes

if TYPE_CHECKING:
    from rollbook.core.experience import Experience
    from rollbook.core.wire import Limits

MAGIC = b"TRXP"
_HEADER = struct.Struct("<4sBQQ")
_MODULE = "trinity.common.experience"
_RECORDS = [(_MODULE, name) for name in ("Experience", "EID", "CustomField", "ExperienceType")]
_EXTRA = "rollbook"
"""The key of an item under which fields stand that Trinity does not know; its reader skips unknown keys."""

_META = [
    "reward",
    "truncate_status",
    "info",
    "metrics",
    "prompt_length",
    "response_text",
    "prompt_text",
    "messages",
    "tools",
    "chosen_messages",
    "rejected_messages",
]
_SAFETENSORS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}
_SAFETENSORS_NAMES = {dtype: name for name, dtype in _SAFETENSORS.items()}


# --- reading ------------------------------------------------------------------------------------------------------


def read(view: memoryview, limits: Limits) -> list[Experience]:
    """The records of a TRXP payload or of a legacy pickle."""
    try:
        return _read_trxp(view, limits) if bytes(view[:4]) == MAGIC else _read_pickle(view, limits)
    except WireError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # A pickle can put a value of any type anywhere; what trips over one has found that the payload is no record.
        raise WireError(f"the payload holds what no record can: {type(error).__name__}: {error}") from None


def read_any(data: bytes | bytearray | memoryview, limits: Limits | None = None) -> list[Experience]:
    """Read the records of frames, of a TRXP payload or of a legacy pickle. They share no memory with `data`."""
    from rollbook.core import wire

    limits = wire.DEFAULT_LIMITS if limits is None else limits
    view = memoryview(data).cast("B")
    if bytes(view[:4]) == wire.MAGIC[:4]:
        return wire.decode(view, limits=limits).rows()
    return read(view, limits)


def _read_pickle(view: memoryview, limits: Limits) -> list[Experience]:
    if not len(view):
        raise WireError("there are no bytes", 0)
    if len(view) > limits.max_bytes:
        raise WireError(f"{len(view)} bytes are over the limit of {limits.max_bytes}", 0)
    if bytes(view[:1]) not in (b"\x80", b"(", b"]", b"c"):
        magic = bytes(view[:8])
        raise WireError(f"magic {magic!r} is none that is known (a frame begins with b'\\x8dROLLBK\\n')", 0)
    value = _unpickled(view, 0, limits)
    items = value if isinstance(value, list) else [value]
    return [_legacy(item, i) for i, item in enumerate(items)]


def _unpickled(view: memoryview, start: int, limits: Limits) -> Any:
    try:
        return unpickle.load(view, records=_RECORDS, max_depth=limits.max_depth)
    except unpickle.UnpickleError as error:
        # The offset is the unpickler's; ours counts from the first byte of the payload.
        raise WireError(f"the pickled part: {error}", start + (error.offset or 0)) from None


def _read_trxp(view: memoryview, limits: Limits) -> list[Experience]:
    if len(view) < _HEADER.size:
        raise WireError(f"the TRXP header is cut short: {len(view)} of {_HEADER.size} bytes", len(view))
    _, version, meta_length, tensor_length = _HEADER.unpack_from(view)
    if version != 1:
        raise WireError(f"TRXP version {version}; this reader knows 1", 4)
    total = _HEADER.size + meta_length + tensor_length
    if total > limits.max_bytes:
        raise WireError(f"{total} bytes are over the limit of {limits.max_bytes}", 5)
    if total != len(view):
        what = "are missing" if total > len(view) else "follow the payload"
        raise WireError(f"{abs(total - len(view))} bytes {what}", min(total, len(view)))
    split = _HEADER.size + meta_length
    meta = _unpickled(view[_HEADER.size : split], _HEADER.size, limits)
    if not isinstance(meta, dict) or not isinstance(meta.get("items"), list):
        raise WireError("the pickled part holds no list of items", _HEADER.size)
    items = meta["items"]
    if meta.get("num_items") != len(items) or len(items) > limits.max_items:
        raise WireError(f"num_items is {meta.get('num_items')!r}, {len(items)} items are there", _HEADER.size)
    by_item: dict[int, dict[str, Any]] = {}
    for key, tensor in _read_safetensors(view[split:], split).items():
        index, _, name = key.partition(":")
        if not index.isdecimal() or int(index) >= len(items) or not name:
            raise WireError(f"tensor {key!r} belongs to none of the {len(items)} items", split)
        by_item.setdefault(int(index), {})[name] = tensor
    return [_from_item(item, by_item.get(i, {}), i) for i, item in enumerate(items)]


def _read_safetensors(view: memoryview, at: int) -> dict[str, Any]:
    if len(view) < 8:
        raise WireError("the tensor part is cut short", at)
    size = struct.unpack_from("<Q", view)[0]
    if size > len(view) - 8:
        raise WireError(f"the tensor part states a header of {size} bytes, {len(view) - 8} are there", at)
    try:
        # Decoded first: given bytes, json would guess at their encoding.
        header = json.loads(bytes(view[8 : 8 + size]).decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"the tensor part's header is no JSON: {error}", at + 8) from None
    if not isinstance(header, dict):
        raise WireError("the tensor part's header is no object", at + 8)
    data = view[8 + size :]
    header.pop("__metadata__", None)
    spans = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise WireError(f"tensor {name!r} is not described by dtype, shape and data_offsets", at + 8)
        span = entry["data_offsets"]
        if not (isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span)) or not (
            0 <= span[0] <= span[1] <= len(data)
        ):
            raise WireError(f"tensor {name!r} has data_offsets {span!r}, of {len(data)} bytes", at + 8)
        spans.append(span)
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise WireError("the tensors leave a hole, or overlap", at + 8 + size + end)
        end = stop
    if end != len(data):
        raise WireError(f"{len(data) - end} bytes follow the tensors", at + 8 + size + end)
    tensors = {}
    for name, entry in header.items():
        dtype = _SAFETENSORS.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        start, stop = entry["data_offsets"]
        tensors[name] = tensor_from_bytes(dtype, entry["shape"], data[start:stop], f"tensor {name!r}")
    return tensors


def _from_item(item: Any, tensors: Mapping[str, Any], index: int) -> Experience:
    where = f"item {index}"
    if not isinstance(item, dict):
        raise WireError(f"{where}: got {type(item).__name__}, expected a dict")
    values: dict[str, Any] = {name: item.get(name) for name in ("eid", "custom_fields", *_META)}
    media: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        group, colon, key = name.partition(":")
        if colon and group in FIELDS and FIELDS[group].kind == "media":
            media.setdefault(group, {})[key] = tensor
        elif name in FIELDS and FIELDS[name].kind == "tensor":
            values[name] = tensor
    extra = item.get(_EXTRA) or {}
    if not isinstance(extra, dict) or not set(extra) <= set(FIELDS):
        raise WireError(f"{where}: {_EXTRA!r} holds what is no field")
    values.update(extra)
    keys = item.get("multi_modal_input_keys") or []
    if keys or "multi_modal_inputs" in media:
        values["multi_modal_inputs"] = keys
    for name, field in FIELDS.items():
        if field.kind == "media" and values.get(name) is not None:
            keys, found = values[name], media.get(name, {})
            if not isinstance(keys, (list, tuple)) or sorted(map(str, keys)) != sorted(found):
                raise WireError(f"{where}: the keys {keys!r} of {name} do not match the tensors {sorted(found)}")
            values[name] = {key: found[key] for key in keys}
    return _restored(values, where)


def _restored(values: dict[str, Any], where: str) -> Experience:
    from rollbook.core.convert import own
    from rollbook.core.experience import restore

    for name, field in FIELDS.items():
        # A pickle can hold one object in many places; no two records share one.
        if field.kind == "json" and name in values:
            values[name] = own(values[name], tensors=True)
    if values.get("experience_type") is None:
        values["experience_type"] = _kind(values)
    return restore(values, where)


def _kind(values: Mapping[str, Any]) -> str | None:
    """What the record was before Trinity wrote it, which makes every mask explicit and so every turn multi_turn.

    A mask that is what a single turn's would be says that it was one; `None` leaves it to the constructor.
    """
    mask, tokens, prompt = values.get("action_mask"), values.get("tokens"), values.get("prompt_length")
    if mask is None or tokens is None or str(mask.dtype) != "torch.bool" or type(prompt) is not int or prompt < 1:
        return None
    if values.get("truncate_status") == "prompt_truncated":
        return "single_turn" if not bool(mask.any()) else None
    whole = mask.dim() == 1 and tokens.dim() == 1 and 0 < len(mask) == len(tokens) - prompt
    return "single_turn" if whole and bool(mask.all()) else None


def _legacy(item: Any, index: int) -> Experience:
    where = f"item {index}"
    if not isinstance(item, unpickle.Record) or item.name != "Experience":
        raise WireError(f"{where}: got {type(item).__name__}, expected a pickled Experience")
    state = {str(name): _plain(value, where) for name, value in item.state.items()}
    values = {name: state.pop(name) for name in list(state) if name in FIELDS}
    if "eid" not in values:
        _from_before_eids(values, state)
    info = dict(values.get("info") or {})
    for name, value in state.items():
        if value not in (None, ""):
            info.setdefault(name, value)
    values["info"] = info
    return _restored(values, where)


def _plain(value: Any, where: str) -> Any:
    """A known record inside a pickled one as what the constructor takes."""
    if isinstance(value, list):
        return [_plain(entry, where) for entry in value]
    if not isinstance(value, unpickle.Record):
        return value
    if value.name == "ExperienceType":
        return value.state.get("value")
    if value.name == "CustomField":
        return {name: str(part) for name, part in value.state.items()}
    if value.name == "EID":
        return value.state
    raise WireError(f"{where}: an {value.name} stands where none can")


def _from_before_eids(values: dict[str, Any], state: dict[str, Any]) -> None:
    """Releases up to 0.2.0 had two texts for ids, and log-probs and masks over the whole sequence."""
    from rollbook.core.ids import EID

    group, unique = state.pop("group_id", ""), state.pop("unique_id", "")
    eid = EID(task=str(group or ""))
    values["eid"] = eid.replace(suffix=str(unique)) if unique else eid
    tokens, prompt = values.get("tokens"), values.get("prompt_length")
    for field in fields.tensor_fields("response"):
        value = values.get(field.name)
        if value is not None and tokens is not None and type(prompt) is int and len(value) == len(tokens):
            values[field.name] = value[prompt:]


# --- writing ------------------------------------------------------------------------------------------------------


def write(experiences: Iterable[Experience]) -> bytes:
    """These records as TRXP 1.

    A single turn's mask is left out: Trinity then makes it again, and with it the right kind.
    """
    from rollbook.core.experience import Experience, implied_mask

    items, tensors = [], {}
    for i, row in enumerate(experiences):
        if not isinstance(row, Experience):
            raise ValueError(f"record {i}: got {type(row).__name__}, expected an Experience")
        items.append(_to_item(row))
        for name, field in FIELDS.items():
            value = getattr(row, name)
            if field.kind == "tensor" and hasattr(value, "dtype"):
                if not (name == "action_mask" and implied_mask(row)):
                    tensors[f"{i}:{name}"] = value
            elif field.kind == "media":
                tensors.update({f"{i}:{name}:{key}": tensor for key, tensor in (value or {}).items()})
    try:
        meta = pickle.dumps({"version": 1, "num_items": len(items), "items": items}, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"a free-form value cannot be kept in TRXP: {error}") from None
    blob = _write_safetensors(tensors)
    return _HEADER.pack(MAGIC, 1, len(meta), len(blob)) + meta + blob


def _to_item(row: Experience) -> dict[str, Any]:
    item: dict[str, Any] = {"eid": row.eid.to_dict()}
    item.update({name: _compact(getattr(row, name)) for name in _META})
    item["custom_fields"] = [custom.to_dict() for custom in row.custom_fields]
    item["multi_modal_input_keys"] = list(row.multi_modal_inputs or {})
    known = {"eid", "custom_fields", *_META}
    item[_EXTRA] = {}
    for name, field in FIELDS.items():
        value = getattr(row, name)
        if name in known or value is None or hasattr(value, "dtype"):
            continue
        if field.kind == "eid":
            value = value.to_dict()
        elif field.kind == "custom_fields":
            value = [custom.to_dict() for custom in value]
        elif field.kind == "media":
            value = list(value)
        if name != "multi_modal_inputs" or not value:
            item[_EXTRA][name] = _compact(value)
    return item


def _compact(value: Any) -> Any:
    """The same value with tensors on memory of their own, since pickle would write all that lies behind a view."""
    if isinstance(value, dict):
        return {key: _compact(entry) for key, entry in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_compact(entry) for entry in value)
    return value.detach().cpu().clone() if hasattr(value, "untyped_storage") else value


def _write_safetensors(tensors: Mapping[str, Any]) -> bytes:
    header: dict[str, Any] = {}
    parts, at = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _SAFETENSORS_NAMES:
            raise ValueError(f"{name}: a tensor of {dtype} cannot be kept in TRXP")
        data = tensor_bytes(tensor).tobytes()
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(data)],
        }
        parts.append(data)
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)
