"""One experience: `EID`, `CustomField`, `Experience`, and every public name of Trinity's `trinity.common.experience`.

Invariant: a record that was constructed keeps the promises of the field table: slot j of every response-axis field
speaks of token `prompt_length + j`, its kind is stored, and its dicts and lists are its own.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollbook import fields
from rollbook.equality import same
from rollbook.errors import WireError
from rollbook.fields import BATCH_NAMES, DTYPES, EXPERIENCE_TYPES, FIELDS, INTEGERS, Field
from rollbook.ids import EID

if TYPE_CHECKING:
    from rollbook.experiences import Experiences as Experiences

_TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
}


@dataclass(frozen=True)
class CustomField:
    """Says that `info[source_field]` becomes a column `destination_field` of type `data_type` in a trainer's batch.

    >>> CustomField("is_expert", "expert_mask", torch.bool)
    CustomField(source_field='is_expert', destination_field='expert_mask', data_type=torch.bool)
    >>> CustomField("x", "tokens", torch.bool)
    Traceback (most recent call last):
        ...
    ValueError: CustomField.destination_field: got 'tokens', expected a name that no field or batch column has
    """

    source_field: str
    destination_field: str
    data_type: torch.dtype

    def __post_init__(self) -> None:
        for name in ("source_field", "destination_field"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"CustomField.{name}: got {value!r}, expected a name")
        if self.destination_field in FIELDS or self.destination_field in BATCH_NAMES:
            raise ValueError(
                f"CustomField.destination_field: got {self.destination_field!r}, "
                "expected a name that no field or batch column has"
            )
        if self.data_type not in _TORCH_DTYPES.values():
            raise ValueError(f"CustomField.data_type: got {self.data_type!r}, expected a torch.dtype")

    def to_dict(self) -> dict[str, str]:
        """The three parts as text."""
        return {
            "source_field": self.source_field,
            "destination_field": self.destination_field,
            "data_type": str(self.data_type),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CustomField:
        """The inverse of `to_dict`; a dtype is looked up in a closed table, never on the torch module."""
        if not isinstance(data, Mapping) or set(data) != {"source_field", "destination_field", "data_type"}:
            raise ValueError(f"CustomField: got {data!r}, expected source_field, destination_field and data_type")
        kind = data["data_type"]
        if isinstance(kind, str):
            kind = _TORCH_DTYPES.get(kind.removeprefix("torch."), kind)
        return cls(data["source_field"], data["destination_field"], kind)


@dataclass(init=False, eq=False, repr=False)
class Experience:
    """One trajectory, or one preference pair: what the engine sampled and everything learned about it since.

    Let L be `len(tokens)` and R = L - `prompt_length`. Lists, tuples, ranges and arrays convert to the type the field
    table gives; a tensor is kept as it is, without a copy. Dicts and lists are copied, so that two records never
    share one. Fields (and their shapes) are those of `rollbook.fields.FIELDS`; the most used:

    - `tokens` [L]: prompt, then response. `prompt_length`: how many of them are the prompt.
    - `logprobs` [R]: of the engine that sampled. `policy_logprobs` [R]: the old policy's, recomputed by the trainer.
    - `action_mask` [R]: True where the model chose the token, False on what a tool or user wrote.
    - `reward`: `None` is not scored yet, NaN could not be scored.
    - `experience_type`: `multi_turn` if an `action_mask` was given, `dpo` if `chosen` and `rejected` were, else
      `single_turn` (whose mask is then made, all True). Inferred here and kept by every copy and round trip.

    With `truncate_status="prompt_truncated"` the prompt did not fit and nothing was trained on: `logprobs` are
    required, every response-axis field has `len(logprobs)` entries, and the mask is all False.

    >>> record = Experience(
    ...     eid={"batch": 1, "task": 2, "run": 0, "suffix": "a"},
    ...     tokens=[10, 11, 12, 13], prompt_length=2, logprobs=[-0.5, -0.25], reward=1.0,
    ... )
    >>> record
    Experience(1/2/0/0/a, single_turn, 2+2 tokens, reward=1.0)
    >>> record.action_mask
    tensor([True, True])
    >>> Experience.deserialize(record.serialize()) == record
    True
    >>> Experience(tokens=[1, 2, 3], logprobs=[-0.5])
    Traceback (most recent call last):
        ...
    ValueError: logprobs: got 1 entries, expected 2 (3 tokens - prompt_length 1)
    """

    if TYPE_CHECKING:
        # For type checkers and editors; at run time the signature is made from the table, and a test holds them equal.
        eid: EID
        tokens: torch.Tensor
        prompt_length: int
        logprobs: torch.Tensor | None
        reward: float | None
        token_level_reward: torch.Tensor | None
        advantages: torch.Tensor | None
        returns: torch.Tensor | None
        truncate_status: str | None
        info: dict[str, Any]
        metrics: dict[str, Any]
        response_text: str | None
        prompt_text: str | None
        action_mask: torch.Tensor | None
        messages: list[Any] | None
        tools: list[Any] | None
        chosen: torch.Tensor | None
        rejected: torch.Tensor | None
        chosen_messages: list[Any] | None
        rejected_messages: list[Any] | None
        multi_modal_inputs: dict[str, torch.Tensor] | None
        teacher_logprobs: torch.Tensor | None
        custom_fields: list[CustomField]
        policy_versions: torch.Tensor | int | None
        finish_reason: str | None
        routed_experts: torch.Tensor | None
        loss_weights: torch.Tensor | None
        parent: str | None
        group_size: int | None
        sampling: dict[str, Any] | None
        policy_logprobs: torch.Tensor | None
        experience_type: str
        odd: frozenset[str]
        unknown: Mapping[str, Any]

        def __init__(
            self,
            *,
            eid: EID | Mapping[str, Any] | None = None,
            tokens: Any,
            logprobs: Any = None,
            reward: float | None = None,
            token_level_reward: Any = None,
            advantages: Any = None,
            returns: Any = None,
            truncate_status: str | None = None,
            info: Mapping[str, Any] | None = None,
            metrics: Mapping[str, Any] | None = None,
            prompt_length: int = 1,
            response_text: str | None = None,
            prompt_text: str | None = None,
            action_mask: Any = None,
            messages: list[Any] | None = None,
            tools: list[Any] | None = None,
            chosen: Any = None,
            rejected: Any = None,
            chosen_messages: list[Any] | None = None,
            rejected_messages: list[Any] | None = None,
            multi_modal_inputs: Mapping[str, Any] | None = None,
            teacher_logprobs: Any = None,
            custom_fields: Sequence[CustomField] | None = None,
            policy_versions: Any = None,
            finish_reason: str | None = None,
            routed_experts: Any = None,
            loss_weights: Any = None,
            parent: str | None = None,
            group_size: int | None = None,
            sampling: Mapping[str, Any] | None = None,
            policy_logprobs: Any = None,
            experience_type: str | None = None,
            **declared: Any,
        ) -> None: ...

    else:

        def __init__(self, **given: Any) -> None:
            unknown = [name for name in given if name not in FIELDS]
            if unknown:
                raise TypeError(f"Experience() got an unexpected keyword argument {unknown[0]!r}")
            if "tokens" not in given:
                raise TypeError("Experience() missing the required keyword argument 'tokens'")
            for name, field in FIELDS.items():
                value = convert(field, given.get(name))
                if value is not None:
                    self.__dict__[name] = value
            _settle(self)
            validate(self)

    def serialize(self) -> bytes:
        """This record as one frame (see `rollbook.wire`)."""
        return Experience.serialize_many([self])

    @classmethod
    def deserialize(cls, data: bytes | bytearray | memoryview) -> Experience:
        """The one record in `data`; `ValueError` if there are several."""
        rows = cls.deserialize_many(data)
        if len(rows) != 1:
            raise ValueError(f"deserialize: got {len(rows)} experiences, expected 1; use Experience.deserialize_many")
        return rows[0]

    @classmethod
    def serialize_many(cls, experiences: Iterable[Experience]) -> bytes:
        """All records as one frame.

        >>> data = Experience.serialize_many([Experience(tokens=[1, 2]), Experience(tokens=[3, 4, 5])])
        >>> [row.tokens.tolist() for row in Experience.deserialize_many(data)]
        [[1, 2], [3, 4, 5]]
        """
        from rollbook.wire import encode

        return bytes(encode(experiences))

    @classmethod
    def deserialize_many(cls, data: bytes | bytearray | memoryview) -> list[Experience]:
        """The records in `data`: Rollbook's frames, Trinity's TRXP, or the pickles Trinity wrote before that.

        Nothing in the data is executed; whatever is wrong with it is a `WireError`. The records share nothing with
        `data`.
        """
        from rollbook.wire import read_any

        return read_any(data)

    def to_dict(self) -> dict[str, Any]:
        """The parts a person reads, without tensors; free-form values are copies.

        For a preference pair `response_length` counts both answers (Trinity says 0), and `chosen_length` and
        `rejected_length` stand beside it.
        """
        result: dict[str, Any] = {
            "eid": self.eid.to_dict(),
            "type": self.experience_type,
            "prompt_length": self.prompt_length,
            "response_length": len(self.tokens) - self.prompt_length,
            "info": _own(self.info),
            "metrics": _own(self.metrics),
        }
        if self.chosen is not None and self.rejected is not None and self.experience_type == "dpo":
            result["chosen_length"], result["rejected_length"] = len(self.chosen), len(self.rejected)
            result["response_length"] = len(self.chosen) + len(self.rejected)
        for name, field in FIELDS.items():
            value = getattr(self, name)
            if value is None or name in result or name == "experience_type":
                continue
            if field.kind == "number":
                result[name] = float(value)
            elif field.kind in ("text", "integer") or (field.kind == "json" and value):
                result[name] = _own(value)
        return result

    def replace(self, **changes: Any) -> Experience:
        """A copy with some fields changed, checked again; the kind stays.

        >>> Experience(tokens=[1, 2, 3]).replace(reward=0.5).experience_type
        'single_turn'
        """
        given = {name: getattr(self, name) for name in FIELDS} | changes
        # A record that was read with odd shapes keeps them unless they are changed.
        new = restore(given, "replace") if self.odd else Experience(**given)
        if self.unknown:
            new.__dict__["unknown"] = dict(self.unknown)
        return new

    def compact(self) -> Experience:
        """The same record on memory of its own: a row made from columns keeps all of them alive, this does not."""
        new = self.replace()
        for name in FIELDS:
            if name in new.__dict__ and name != "eid":
                new.__dict__[name] = deep_copy(new.__dict__[name])
        return new

    def __copy__(self) -> Experience:
        return self.replace()

    def __deepcopy__(self, memo: dict[int, Any]) -> Experience:
        return self.compact()

    def __reduce__(self) -> Any:
        # Our own bytes: torch pickles the whole storage behind a view, and cannot read some types back. A record that
        # holds what bytes cannot keep (a user's own objects in `info`) is pickled as Python would, made compact first.
        try:
            return Experience.deserialize, (self.serialize(),)
        except ValueError:
            return row_from_values, (dict(self.compact().__dict__), self.odd, self.unknown)

    def __eq__(self, other: object) -> bool:
        """Equal when every field is: tensors by type, shape and value, NaN equal to NaN, unknown columns too."""
        if not isinstance(other, Experience):
            return NotImplemented
        return same(self.unknown, other.unknown) and all(
            same(getattr(self, name), getattr(other, name)) for name in FIELDS
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if "eid" not in self.__dict__:
            return "Experience(<not yet built>)"
        response = len(self.tokens) - self.prompt_length
        parts = [self.eid.uid, self.experience_type, f"{self.prompt_length}+{response} tokens"]
        if self.experience_type == "dpo" and self.chosen is not None and self.rejected is not None:
            parts[2] = f"{len(self.tokens)}+{len(self.chosen)}|{len(self.rejected)} tokens"
        if self.reward is not None:
            parts.append(
                f"reward={self.reward:g}" if self.reward != int_or_nan(self.reward) else f"reward={self.reward}"
            )
        return f"Experience({', '.join(parts)})"


def int_or_nan(value: float) -> float:
    """The value rounded to a whole number, or NaN."""
    return float(round(value)) if np.isfinite(value) else float("nan")


Experience.odd = frozenset()
Experience.unknown = MappingProxyType({})


# --- construction -------------------------------------------------------------------------------------------------


def as_tensor(field: Field, value: Any) -> torch.Tensor:
    """`value` as the field keeps it: a tensor as it is, anything else converted to the field's type.

    >>> as_tensor(FIELDS["tokens"], range(3))
    tensor([0, 1, 2], dtype=torch.int32)
    >>> as_tensor(FIELDS["tokens"], [1.7])
    Traceback (most recent call last):
        ...
    ValueError: tokens: got values of float64, expected whole numbers
    """
    name = field.name
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        if field.accepts == "integer" and kind not in INTEGERS:
            raise ValueError(f"{name}: got a tensor of {kind}, expected whole numbers")
        if value.is_complex():
            raise ValueError(f"{name}: got a tensor of {kind}, expected real numbers")
        return value
    try:
        array = np.asarray(value)
        if array.dtype == object and isinstance(value, (list, tuple)):
            # Lists of 0-d tensors or of numpy scalars of several types, as loops over tokens make them.
            array = np.asarray([item.item() if isinstance(item, torch.Tensor) else item for item in value])
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name}: got {type(value).__name__}, expected numbers: {error}") from None
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)
    if array.dtype.kind not in ("iu" if field.accepts == "integer" else "biuf"):
        expected = "whole numbers" if field.accepts == "integer" else "real numbers"
        raise ValueError(f"{name}: got values of {array.dtype}, expected {expected}")
    # numpy has no bfloat16: by way of float32, which holds it.
    target = np.dtype("float32" if field.dtype == "bfloat16" else field.dtype)
    if target.kind == "b" and array.size and not np.isin(array, (0, 1)).all():
        raise ValueError(f"{name}: got values other than 0 and 1; give a tensor to keep them")
    if target.kind in "iu" and array.size:
        low, high, bounds = int(array.min()), int(array.max()), np.iinfo(target)
        if low < bounds.min or high > bounds.max:
            raise ValueError(
                f"{name}: got {low if low < bounds.min else high}, which {field.dtype} does not hold; "
                "give a tensor of a wider type to keep it"
            )
    return torch.from_numpy(np.array(array, dtype=target)).to(_TORCH_DTYPES[field.dtype])


def _own(value: Any) -> Any:
    """A copy of the dicts, lists and tuples in `value`; what they hold is the same."""
    kind = type(value)
    if kind is dict:
        return {key: _own(item) for key, item in value.items()}
    if kind is list:
        return [_own(item) for item in value]
    if kind is tuple:
        return tuple(_own(item) for item in value)
    return value


def deep_copy(value: Any) -> Any:
    """A copy of the containers, tensors and arrays in `value`."""
    kind = type(value)
    if kind is dict:
        return {key: deep_copy(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(deep_copy(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.copy() if isinstance(value, np.ndarray) else value


_EMPTY: dict[str, Any] = {"json": dict, "custom_fields": list}


def convert(field: Field, value: Any) -> Any:
    """One field's value as a record keeps it; `None` stays `None` but for dicts and lists that are always there."""
    name, kind = field.name, field.kind
    if value is None:
        if kind == "eid":
            return EID()
        return _EMPTY[kind]() if field.always or kind == "custom_fields" else None
    if kind == "tensor":
        if field.broadcast and isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            if not -(2**31) <= value < 2**31:
                raise ValueError(f"{name}: got {value}, expected a number of 32 bits")
            return int(value)
        return as_tensor(field, value)
    if kind == "text":
        if not isinstance(value, str):
            raise ValueError(f"{name}: got {type(value).__name__} {value!r}, expected a str")
        return value
    if kind == "number":
        return _number(name, value)
    if kind == "integer":
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ValueError(f"{name}: got {type(value).__name__} {value!r}, expected an int")
        if name == "group_size" and int(value) < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
        return int(value)
    if kind == "eid":
        return _eid(value)
    if kind == "media":
        return _media(name, value)
    if kind == "custom_fields":
        if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
            raise ValueError(f"{name}: got {type(value).__name__}, expected a list of CustomField")
        return [item if isinstance(item, CustomField) else CustomField.from_dict(item) for item in value]
    if field.mapping and not isinstance(value, Mapping):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a dict")
    try:
        return _own(dict(value) if isinstance(value, Mapping) else value)
    except RecursionError:
        raise ValueError(f"{name}: nested too deeply, or holds itself") from None


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(f"{name}: got a tensor of shape {list(value.shape)}, expected one real number")
        return float(value.item())
    if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
            return float(value.item())
        raise ValueError(f"{name}: got {type(value).__name__} {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: got an integer too large for a float") from None


def _eid(value: Any) -> EID:
    if isinstance(value, EID):
        # The record's own: `record.eid.run = i` must not change the id that others were built with.
        return value.replace()
    if isinstance(value, Mapping):
        unknown = set(value) - set(EID().to_dict())
        if unknown:
            raise ValueError(
                f"eid: got the key {sorted(map(str, unknown))[0]!r}, expected batch, task, run, step, suffix"
            )
        return EID(**value)
    raise ValueError(f"eid: got {type(value).__name__} {value!r}, expected an EID or a dict of its parts")


def _media(name: str, value: Any) -> dict[str, torch.Tensor]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a dict of tensors")
    media: dict[str, torch.Tensor] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ValueError(f"{name}: got the key {key!r}, expected a str")
        if isinstance(item, torch.Tensor):
            media[key] = item
            continue
        try:
            media[key] = torch.from_numpy(item.copy()) if isinstance(item, np.ndarray) else torch.tensor(item)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name}[{key!r}]: got {type(item).__name__}, expected a tensor: {error}") from None
    return media


def _settle(record: Experience) -> None:
    """Infer the kind if it was not given, and what follows from it: prompt length and mask."""
    state = record.__dict__
    if "experience_type" not in state:
        pair = record.chosen is not None and record.rejected is not None
        state["experience_type"] = "multi_turn" if record.action_mask is not None else "dpo" if pair else "single_turn"
    kind = state["experience_type"]
    if kind == "dpo":
        state["prompt_length"] = len(record.tokens) if record.tokens.dim() else 0
    state.setdefault("prompt_length", 1)
    cut = record.truncate_status == "prompt_truncated"
    if cut and record.logprobs is not None and kind != "dpo":
        width = len(record.logprobs) if record.logprobs.dim() else 0
        if kind == "single_turn" or record.action_mask is None:
            state["action_mask"] = torch.zeros(width, dtype=torch.bool, device=record.logprobs.device)
    elif kind == "single_turn" and record.action_mask is None and record.tokens.dim() == 1:
        width = max(len(record.tokens) - record.prompt_length, 0)
        state["action_mask"] = torch.ones(width, dtype=torch.bool, device=record.tokens.device)


def validate(record: Experience, where: str = "") -> None:
    """Raise `ValueError`, naming field, got and expected, if the record breaks a promise of the field table."""
    kind, length, prompt = record.experience_type, 0, record.prompt_length
    if kind not in EXPERIENCE_TYPES:
        raise ValueError(f"{where}experience_type: got {kind!r}, expected one of {', '.join(EXPERIENCE_TYPES)}")
    for field in fields.tensor_fields():
        value = getattr(record, field.name)
        if value is None or field.name in record.odd or (field.broadcast and isinstance(value, int)):
            continue
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{where}{field.name}: got {type(value).__name__}, expected a tensor")
        if value.dim() != 1 + field.trailing:
            raise ValueError(
                f"{where}{field.name}: got shape {list(value.shape)}, expected {1 + field.trailing} dimension(s)"
            )
    if record.tokens is None:
        raise ValueError(f"{where}tokens: got None, expected token ids")
    length = len(record.tokens)
    if (record.chosen is None) != (record.rejected is None):
        missing = "chosen" if record.chosen is None else "rejected"
        raise ValueError(f"{where}{missing}: got None, expected tokens, since the other answer of the pair is given")
    if kind == "dpo" and record.chosen is None:
        raise ValueError(f"{where}chosen: got None, expected tokens in a dpo record")
    cut = record.truncate_status == "prompt_truncated" and kind != "dpo"
    if kind == "single_turn" and not (prompt > 0 and (cut or prompt < length)):
        raise ValueError(
            f"{where}prompt_length: got {prompt}, expected 0 < prompt_length < {length}, the number of tokens"
        )
    if not prompt >= 0 or (prompt > length and not cut):
        raise ValueError(f"{where}prompt_length: got {prompt}, expected 0 to {length}, the number of tokens")
    expected, why = length - prompt, f"{length} tokens - prompt_length {prompt}"
    if cut:
        if record.logprobs is None:
            raise ValueError(f"{where}logprobs: got None, expected them with truncate_status 'prompt_truncated'")
        expected, why = len(record.logprobs), "as logprobs, the prompt being truncated"
        mask = record.action_mask
        if mask is not None and "action_mask" not in record.odd and not mask.is_meta and bool((mask != 0).any()):
            raise ValueError(
                f"{where}action_mask: got True, expected all False with truncate_status 'prompt_truncated'"
            )
    for field in fields.tensor_fields():
        value = getattr(record, field.name)
        if not isinstance(value, torch.Tensor) or field.name in record.odd:
            continue
        if field.axis == "response" and len(value) != expected:
            raise ValueError(f"{where}{field.name}: got {len(value)} entries, expected {expected} ({why})")
        if field.axis == "sequence" and len(value) != length:
            raise ValueError(f"{where}{field.name}: got {len(value)} entries, expected {length}, one for each token")


def row_from_values(
    values: dict[str, Any], odd: frozenset[str] = frozenset(), unknown: dict[str, Any] | None = None
) -> Experience:
    """A record from values that are known to be good: those of columns, which were checked when they were made."""
    row = Experience.__new__(Experience)
    for name, empty in _always:
        if name not in values:
            values[name] = empty()
    if odd:
        values["odd"] = odd
    if unknown:
        values["unknown"] = unknown
    row.__dict__ = values
    return row


def odd_fields(row: Experience) -> frozenset[str]:
    """The tensor fields whose shape the field table does not allow."""
    expected = len(row.tokens) - row.prompt_length
    cut = row.truncate_status == "prompt_truncated" and row.experience_type != "dpo"
    if cut and row.logprobs is not None:
        expected = len(row.logprobs) if row.logprobs.dim() else -1
    odd = set()
    for field in fields.tensor_fields():
        value = getattr(row, field.name)
        if not isinstance(value, torch.Tensor) or field.name == "tokens":
            continue
        lengths = {"response": expected, "sequence": len(row.tokens)}
        fits = value.dim() == 1 + field.trailing and len(value) == lengths.get(field.axis, len(value))
        if not fits or (field.name == "action_mask" and cut and not value.is_meta and bool((value != 0).any())):
            odd.add(field.name)
    return frozenset(odd)


def restore(values: Mapping[str, Any], where: str) -> Experience:
    """A record from a foreign payload, whose writer checked less than we do.

    Response-axis values of a shape they cannot have are kept as they are and named in `odd`: nothing is lost, and
    whoever gathers them is told. What cannot stand at all (bounds, types) is a `WireError`.
    """
    try:
        row = Experience.__new__(Experience)
        for name, field in FIELDS.items():
            value = convert(field, values.get(name))
            if value is not None:
                row.__dict__[name] = value
        if row.tokens is None or row.tokens.dim() != 1:
            raise ValueError("tokens: expected one dimension of token ids")
        _settle(row)
        if odd := odd_fields(row):
            row.__dict__["odd"] = odd
        validate(row)
    except (ValueError, TypeError) as error:
        raise WireError(f"{where}: {error}") from None
    return row


# --- the table makes the class ------------------------------------------------------------------------------------

_UPSTREAM_ORDER = ("eid", "tokens", "logprobs", "reward", "token_level_reward", "advantages", "returns",
                   "truncate_status", "info", "metrics", "prompt_length")  # fmt: skip
"""Trinity's keyword order differs from its field order in where `prompt_length` stands."""


_always: list[tuple[str, Any]] = []
"""The fields that every record has, if only empty, and what makes an empty one."""


def _derive() -> None:
    """(Re)make what the table says of the class: defaults, `dataclasses.fields` and the signature."""
    for name in FIELDS.keys() - Experience.__dataclass_fields__.keys():
        if hasattr(Experience, name):
            raise ValueError(f"field {name!r}: Experience has an attribute of that name")
    _always[:] = [(f.name, _EMPTY[f.kind]) for f in FIELDS.values() if f.always or f.kind == "custom_fields"]
    for name in Experience.__dataclass_fields__.keys() - FIELDS.keys():
        delattr(Experience, name)
    for name in FIELDS:
        setattr(Experience, name, None)
    made = dataclasses.make_dataclass("_Fields", [(name, Any, dataclasses.field(default=None)) for name in FIELDS])
    Experience.__dataclass_fields__ = {field.name: field for field in dataclasses.fields(made)}
    names = [*_UPSTREAM_ORDER, *(name for name in FIELDS if name not in _UPSTREAM_ORDER)]
    defaults = {"tokens": inspect.Parameter.empty, "prompt_length": 1}
    Experience.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(n)) for n in names]
    )


fields.observe(_derive)
_derive()

from rollbook.collate import (  # noqa: E402
    from_hf_datasets,
    gather_action_masks,
    gather_attention_masks,
    gather_multi_modal_inputs,
    gather_response_attrs,
    gather_token_ids,
    group_by,
    split_dpo_experience_to_single_turn,
    to_hf_datasets,
)
from rollbook.experiences import Experiences  # noqa: E402

__all__ = [
    "EID",
    "CustomField",
    "Experience",
    "Experiences",
    "from_hf_datasets",
    "gather_action_masks",
    "gather_attention_masks",
    "gather_multi_modal_inputs",
    "gather_response_attrs",
    "gather_token_ids",
    "group_by",
    "split_dpo_experience_to_single_turn",
    "to_hf_datasets",
]
