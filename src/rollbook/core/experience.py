"""`Experience`, the record; `CustomField`; conversion and validation of field values; splitting of preference pairs.

Invariant: a constructed record fits the field table: slot j of every response-axis field describes token
`prompt_length + j`, its `experience_type` is stored, and no other record shares its dicts and lists.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from rollbook.core import fields
from rollbook.core.errors import WireError, explain_missing
from rollbook.core.fields import BATCH_NAMES, DTYPES, EXPERIENCE_TYPES, FIELDS, INTEGERS, Field
from rollbook.core.freeform import same
from rollbook.core.ids import EID
from rollbook.core.ragged import promote

__all__ = ["CustomField", "Experience"]

FieldValue: TypeAlias = Any
"""A value for a field, of any type until `convert` has checked it."""


try:
    import torch
except ModuleNotFoundError as error:
    raise explain_missing(__name__, error) from None


TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
}
_INTEGER_DTYPES = frozenset(TORCH_DTYPES[name] for name in INTEGERS if name in TORCH_DTYPES)


@dataclass(frozen=True)
class CustomField:
    """A column of a batch from an entry of `info`: a tensor [B] or, if the entries are arrays, [B, ...].

    All records of a batch must have the same custom fields and the entries that they name.

    Args:
        source_field: Key in the `info` of each record, whose value is a number or an array.
        destination_field: Name of the column in the batch.
        data_type: Element type of the column.

    Raises:
        ValueError: The destination is a field or a column of a batch, or the type is not a torch type.

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
            text = getattr(self, name)
            if not isinstance(text, str) or not text:
                raise ValueError(f"CustomField.{name}: got {text!r}, expected a name")
        if self.destination_field in FIELDS or self.destination_field in BATCH_NAMES:
            raise ValueError(
                f"CustomField.destination_field: got {self.destination_field!r}, "
                "expected a name that no field or batch column has"
            )
        if self.data_type not in TORCH_DTYPES.values():
            raise ValueError(f"CustomField.data_type: got {self.data_type!r}, expected a torch.dtype")

    def to_dict(self) -> dict[str, str]:
        """Return the three parts as text."""
        return {
            "source_field": self.source_field,
            "destination_field": self.destination_field,
            "data_type": str(self.data_type),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CustomField:
        """Read what `to_dict` returned. The type is looked up in a fixed table, never on the torch module.

        Args:
            data: The dict.

        Returns:
            The field.

        Raises:
            ValueError: The dict has other keys, or the type is unknown.
        """
        if not isinstance(data, Mapping) or set(data) != {"source_field", "destination_field", "data_type"}:
            raise ValueError(f"CustomField: got {data!r}, expected source_field, destination_field and data_type")
        dtype = data["data_type"]
        if isinstance(dtype, str):
            dtype = TORCH_DTYPES.get(dtype.removeprefix("torch."), dtype)
        return cls(data["source_field"], data["destination_field"], dtype)


def _check_dtype(field: Field, tensor: torch.Tensor, prefix: str = "") -> None:
    if tensor.is_complex() or (field.accepts == "integer" and tensor.dtype not in _INTEGER_DTYPES):
        expected = "integers" if field.accepts == "integer" else "real numbers"
        raise ValueError(f"{prefix}{field.name}: got a tensor of {dtype_name(tensor)}, expected {expected}")


def as_tensor(field: Field, value: FieldValue) -> torch.Tensor:
    """Convert a value of a tensor field.

    Args:
        field: The field.
        value: A tensor, which is returned as it is, or numbers, which are converted to the type of the field.

    Returns:
        The tensor.

    Raises:
        ValueError: The values are not numbers, or the type cannot represent them.

    >>> from rollbook.core.fields import FIELDS
    >>> as_tensor(FIELDS["tokens"], range(3))
    tensor([0, 1, 2], dtype=torch.int32)
    >>> as_tensor(FIELDS["tokens"], [1.7])
    Traceback (most recent call last):
        ...
    ValueError: tokens: got values of float64, expected integers
    """
    name = field.name
    if isinstance(value, torch.Tensor):
        _check_dtype(field, value)
        return value
    try:
        array = np.asarray(value)
        if array.dtype == object and isinstance(value, (list, tuple)):
            # Lists of 0-d tensors, or of numpy scalars of different types, as loops over tokens build them.
            array = np.asarray([entry.item() if isinstance(entry, torch.Tensor) else entry for entry in value])
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name}: got {describe_value(value)}, expected numbers: {error}") from None
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)
    if array.dtype.kind not in ("iu" if field.accepts == "integer" else "biuf"):
        expected = "integers" if field.accepts == "integer" else "real numbers"
        if array.dtype.kind in "OUSM" and isinstance(value, (list, tuple)):
            wrong = next((i for i, entry in enumerate(value) if not isinstance(entry, (int, float))), 0)
            raise ValueError(f"{name}[{wrong}]: got {describe_value(value[wrong])}, expected {expected}")
        if array.dtype.kind in "OUSM":
            raise ValueError(f"{name}: got {describe_value(value)}, expected {expected}")
        raise ValueError(f"{name}: got values of {array.dtype}, expected {expected}")
    # numpy has no bfloat16: convert to float32 first, which represents it exactly.
    target = np.dtype("float32" if field.dtype == "bfloat16" else field.dtype)
    if target.kind == "b" and not (good := np.isin(array, (0, 1))).all():
        raise ValueError(f"{name}: got {array[~good][0]}, expected 0 and 1; give a tensor to keep other values")
    if target.kind in "iu" and array.size:
        low, high, bounds = int(array.min()), int(array.max()), np.iinfo(target)
        if low < bounds.min or high > bounds.max:
            raise ValueError(
                f"{name}: got {low if low < bounds.min else high}, which {field.dtype} cannot represent; "
                "give a tensor of a wider type to keep it"
            )
    with np.errstate(over="ignore"):
        converted = np.array(array, dtype=target)
    if target.kind == "f" and (np.isinf(converted) & np.isfinite(array)).any():
        raise ValueError(f"{name}: got a number that {field.dtype} cannot represent; give a wider tensor to keep it")
    return torch.from_numpy(converted).to(TORCH_DTYPES[field.dtype])


_ATOMS = frozenset((float, int, bool, str, type(None)))


def copy_containers(value: FieldValue, tensors: bool = False) -> Any:
    """Copy a value with its containers and arrays and, with `tensors`, also its tensors."""
    if type(value) in _ATOMS:  # first, since `isinstance(x, torch.Tensor)` is slow for other types
        return value
    if tensors and isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_() if value.requires_grad else value.clone()
    if isinstance(value, dict):
        mapping = {} if type(value) is dict else copy.copy(value)
        for key, entry in value.items():
            mapping[key] = copy_containers(entry, tensors)
        return mapping
    container_type = type(value)
    if container_type is list or container_type is tuple:
        return container_type(map(copy_containers, value, repeat(tensors)))
    if isinstance(value, list):
        entries = copy.copy(value)
        entries[:] = map(copy_containers, value, repeat(tensors))
        return entries
    if isinstance(value, (np.ndarray, set, bytearray)):
        return value.copy()
    return value


def describe_value(value: FieldValue) -> str:
    """Describe a value for an error message: its type and a short repr."""
    return f"{type(value).__name__} {reprlib.repr(value)}"


DEFAULT_FACTORIES: dict[str, Any] = {"json": dict, "custom_fields": list}
"""Functions that make the default values, by kind of field."""


def convert(field: Field, value: FieldValue) -> Any:
    """Convert a value to the form that a record stores.

    Args:
        field: The field.
        value: The value. `None` becomes the default of the field.

    Returns:
        The converted value, which shares no dicts and lists with `value`.

    Raises:
        ValueError: The value does not fit the field.
    """
    name, kind = field.name, field.kind
    if value is None:
        if kind == "eid":
            return EID()
        return DEFAULT_FACTORIES[kind]() if field.always or kind == "custom_fields" else None
    if kind == "tensor":
        if field.broadcast and isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            if not -(2**31) <= value < 2**31:
                raise ValueError(f"{name}: got {value}, expected a 32-bit integer")
            return int(value)
        if field.broadcast and isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_meta:
            return convert(field, value.item())
        return as_tensor(field, value)
    if kind == "text":
        if not isinstance(value, str):
            raise ValueError(f"{name}: got {describe_value(value)}, expected a str")
        return value
    if kind == "number":
        return value if type(value) is float else _number(name, value)
    if kind == "integer":
        try:
            number = operator.index(value)
        except (TypeError, ValueError, RuntimeError):
            number = None
        if number is None or isinstance(value, bool):
            raise ValueError(f"{name}: got {describe_value(value)}, expected an int")
        if name == "group_size" and number < 1:
            raise ValueError(f"{name}: got {number}, expected at least 1")
        return number
    if kind == "eid":
        # A copy: `record.eid.run = i` must not change the id of other records.
        return value.replace() if isinstance(value, EID) else as_eid(value)
    if kind == "media":
        return _media(name, value)
    if kind == "custom_fields":
        if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
            raise ValueError(f"{name}: got {describe_value(value)}, expected a list of CustomField")
        return [entry if isinstance(entry, CustomField) else CustomField.from_dict(entry) for entry in value]
    if field.holds == "dict" and not isinstance(value, Mapping):
        raise ValueError(f"{name}: got {describe_value(value)}, expected a dict")
    if field.holds == "list" and not isinstance(value, (list, tuple)):
        raise ValueError(f"{name}: got {describe_value(value)}, expected a list")
    try:
        return copy_containers(value if isinstance(value, dict) or not isinstance(value, Mapping) else dict(value))
    except RecursionError:
        raise ValueError(f"{name}: nested too deeply, or contains itself") from None


_STORED_TYPES: dict[str, frozenset[type]] = {
    "eid": frozenset((EID,)),
    "tensor": frozenset((torch.Tensor,)),
    "number": frozenset((float,)),
    "integer": frozenset((int,)),
    "text": frozenset((str,)),
    "media": frozenset((dict,)),
    "custom_fields": frozenset((list,)),
}
"""Types of the values that `convert` returns, by kind of field."""


def _is_stored_form(field: Field, values: list[Any]) -> bool:
    """Return whether values have the form that `convert` gives, judged by their types."""
    types = set(map(type, values)) - {type(None)}
    if field.broadcast:
        types.discard(int)
    if field.kind == "json":
        return not field.holds or types <= ({dict} if field.holds == "dict" else {list, tuple})
    if not types <= _STORED_TYPES[field.kind]:
        return False
    if field.kind in ("media", "custom_fields"):
        entry_type = torch.Tensor if field.kind == "media" else CustomField
        entries = (entry for value in values if value for entry in (value.values() if field.kind == "media" else value))
        return all(isinstance(entry, entry_type) for entry in entries)
    return True


def convert_assigned(rows: Sequence[Experience]) -> Sequence[Experience]:
    """Convert values that were assigned to attributes of records as the constructor converts its arguments.

    Args:
        rows: The records, which do not change.

    Returns:
        The records, with copies in place of those that have a converted value.

    Raises:
        ValueError: An entry is not a record, or a value does not fit its field.

    >>> record = Experience(tokens=[1, 2])
    >>> record.advantages = [0.5]
    >>> convert_assigned([record])[0].advantages, record.advantages
    (tensor([0.5000]), [0.5])
    """
    check_records(rows)
    states = list(map(vars, rows))
    names = set[str]().union(*states)
    changes: dict[int, dict[str, Any]] = {}
    for name, field in FIELDS.items():
        if name not in names:
            continue
        values = [state.get(name) for state in states]
        if _is_stored_form(field, values):
            continue
        for i, value in enumerate(values):
            if value is None:
                continue
            try:
                changes.setdefault(i, {})[name] = convert(field, value)
            except ValueError as error:
                raise ValueError(f"record {i}: {error}") from None
    return [row_from_values(states[i] | changes[i]) if i in changes else row for i, row in enumerate(rows)]


def _number(name: str, value: FieldValue) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(f"{name}: got a tensor of shape {list(value.shape)}, expected one real number")
        return float(value.item())
    if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
            return float(value.item())
        raise ValueError(f"{name}: got {describe_value(value)}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: got an integer too large for a float") from None


def as_eid(value: FieldValue) -> EID:
    """Return an id from an id, which is copied, or a mapping of its parts."""
    if isinstance(value, EID):
        return value.replace()
    if isinstance(value, Mapping):
        unknown = set(value) - set(EID().to_dict())
        if unknown:
            raise ValueError(
                f"eid: got the key {sorted(map(str, unknown))[0]!r}, expected batch, task, run, step, suffix"
            )
        return EID(**value)
    hint = " (EID.parse reads a uid)" if isinstance(value, str) else ""
    raise ValueError(f"eid: got {describe_value(value)}, expected an EID or a dict of its parts{hint}")


def _holds_arrays(value: FieldValue) -> bool:
    # torch warns about lists of arrays, and is a hundred times slower than numpy.
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], np.ndarray)


def _media(name: str, value: FieldValue) -> dict[str, torch.Tensor]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a dict of tensors")
    media: dict[str, torch.Tensor] = {}
    for key, entry in value.items():
        if not isinstance(key, str):
            raise ValueError(f"{name}: got the key {key!r}, expected a str")
        if isinstance(entry, torch.Tensor):
            media[key] = entry
            continue
        try:
            stacked = np.array(entry) if isinstance(entry, np.ndarray) or _holds_arrays(entry) else None
            media[key] = torch.tensor(entry) if stacked is None else torch.from_numpy(stacked)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name}[{key!r}]: got {type(entry).__name__}, expected a tensor: {error}") from None
    return media


@dataclass(init=False, eq=False, repr=False)
class Experience:
    """One trajectory or preference pair: what the engine sampled, and what was computed from it.

    Let L be `len(tokens)` and R = L - `prompt_length`. Lists, tuples, ranges and arrays are converted to the type of
    the field; tensors are kept without a copy. Dicts and lists are copied, so that records never share them.

    With `truncate_status="prompt_truncated"` the prompt did not fit: `logprobs` are required, every response-axis field
    has `len(logprobs)` entries, and the mask is all False.

    Args:
        eid: Id of the record, or its parts; random by default.
        tokens: [L] Token ids of the prompt, then of the response.
        prompt_length: Number of prompt tokens.
        logprobs: [R] Log-probs of the rollout engine.
        reward: Reward. `None`: not scored yet. NaN: could not be scored.
        token_level_reward: [R] Reward of each token.
        advantages: [R] Advantages.
        returns: [R] Returns.
        truncate_status: `prompt_truncated`, `response_truncated` or `None`.
        info: Other data of the workflow.
        metrics: Numbers to log.
        response_text: The response, decoded.
        prompt_text: The prompt, decoded.
        action_mask: [R] True on tokens that the model sampled, False on those of a tool or user. With
            `prompt_length=0` no model predicts the first token, and batches, estimators and losses leave it out.
        messages: The conversation.
        tools: Tools offered to the model.
        chosen: Token ids of the better answer of a preference pair.
        rejected: Token ids of the worse answer.
        chosen_messages: Conversation that ends in the better answer.
        rejected_messages: Conversation that ends in the worse answer.
        multi_modal_inputs: Tensors by name, such as `pixel_values`.
        teacher_logprobs: [R] Log-probs of the teacher.
        custom_fields: Entries of `info` that become columns of a batch.
        policy_versions: [R] or one number: version of the policy that sampled each token.
        finish_reason: Why the engine stopped.
        routed_experts: [R, layers, k] Experts that a mixture-of-experts model selected.
        loss_weights: [R] Weight of each token in the loss.
        parent: Uid of the record that this one was derived from.
        group_size: Number of runs of the task.
        sampling: Sampling options of the engine.
        old_logprobs: [R] Log-probs of the policy before the update, recomputed by the trainer.
        ref_logprobs: [R] Log-probs of the reference policy.
        entropy: [R] Entropy of the policy at each token.
        values: [R] Values of the critic.
        experience_type: `multi_turn` if an `action_mask` is given, `dpo` if `chosen` and `rejected` are, else
            `single_turn`, whose mask is all True. Inferred at construction, and kept by copies and round trips.

    Raises:
        ValueError: A value does not fit its field, or fields do not fit each other.

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
        # For type checkers and editors. At run time the signature is built from the table; a test compares the two.
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
        old_logprobs: torch.Tensor | None
        ref_logprobs: torch.Tensor | None
        entropy: torch.Tensor | None
        values: torch.Tensor | None
        experience_type: str
        malformed_fields: frozenset[str]
        unknown: Mapping[str, Any]

        def __init__(
            self,
            *,
            eid: EID | Mapping[str, Any] | None = None,
            tokens: ArrayLike,
            logprobs: ArrayLike | None = None,
            reward: ArrayLike | None = None,
            token_level_reward: ArrayLike | None = None,
            advantages: ArrayLike | None = None,
            returns: ArrayLike | None = None,
            truncate_status: str | None = None,
            info: Mapping[str, Any] | None = None,
            metrics: Mapping[str, Any] | None = None,
            prompt_length: int = 1,
            response_text: str | None = None,
            prompt_text: str | None = None,
            action_mask: ArrayLike | None = None,
            messages: Sequence[Any] | None = None,
            tools: Sequence[Any] | None = None,
            chosen: ArrayLike | None = None,
            rejected: ArrayLike | None = None,
            chosen_messages: Sequence[Any] | None = None,
            rejected_messages: Sequence[Any] | None = None,
            multi_modal_inputs: Mapping[str, Any] | None = None,
            teacher_logprobs: ArrayLike | None = None,
            custom_fields: Sequence[CustomField] | None = None,
            policy_versions: ArrayLike | None = None,
            finish_reason: str | None = None,
            routed_experts: ArrayLike | None = None,
            loss_weights: ArrayLike | None = None,
            parent: str | None = None,
            group_size: int | None = None,
            sampling: Mapping[str, Any] | None = None,
            old_logprobs: ArrayLike | None = None,
            ref_logprobs: ArrayLike | None = None,
            entropy: ArrayLike | None = None,
            values: ArrayLike | None = None,
            experience_type: str | None = None,
        ) -> None: ...

    else:

        def __init__(self, **arguments: FieldValue) -> None:
            for name in arguments:
                if name not in FIELDS:
                    raise TypeError(f"Experience() got an unexpected keyword argument {name!r}")
            if "tokens" not in arguments:
                raise TypeError("Experience() missing the required keyword argument 'tokens'")
            _build(self, arguments)
            validate(self)

    def serialize(self) -> bytes:
        """Return the record as one frame (see `rollbook.core.wire`)."""
        return Experience.serialize_many([self])

    @classmethod
    def deserialize(cls, data: bytes | bytearray | memoryview) -> Experience:
        """Read the only record of a payload.

        Args:
            data: What `serialize` wrote, or any payload that `deserialize_many` reads.

        Returns:
            The record.

        Raises:
            ValueError: There is not exactly one record.
            WireError: The bytes are not valid.
        """
        rows = cls.deserialize_many(data)
        if len(rows) != 1:
            raise ValueError(f"deserialize: got {len(rows)} experiences, expected 1; use Experience.deserialize_many")
        return rows[0]

    @classmethod
    def serialize_many(cls, experiences: Iterable[Experience]) -> bytes:
        """Write records as one frame.

        Args:
            experiences: The records.

        Returns:
            The frame.

        Raises:
            ValueError: A record holds a value that a frame cannot keep.

        >>> data = Experience.serialize_many([Experience(tokens=[1, 2]), Experience(tokens=[3, 4, 5])])
        >>> [row.tokens.tolist() for row in Experience.deserialize_many(data)]
        [[1, 2], [3, 4, 5]]
        """
        from rollbook.core.wire import encode

        return bytes(encode(experiences))

    @classmethod
    def deserialize_many(cls, data: bytes | bytearray | memoryview) -> list[Experience]:
        """Read the records of a payload. Nothing in it is executed.

        Args:
            data: Rollbook frames, a TRXP payload of Trinity-RFT, or a pickle of earlier versions of Trinity-RFT.

        Returns:
            The records, which share no memory with `data`.

        Raises:
            WireError: The bytes are not valid.
        """
        from rollbook.core.trxp import read_any

        return read_any(data)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that people read, without tensors. Free-form values are copied.

        For a preference pair, `response_length` counts both answers (0 in Trinity-RFT), beside `chosen_length` and
        `rejected_length`.
        """
        parts: dict[str, Any] = {
            "eid": self.eid.to_dict(),
            "type": self.experience_type,
            "prompt_length": self.prompt_length,
            "response_length": len(self.tokens) - self.prompt_length,
            "info": copy_containers(self.info),
            "metrics": copy_containers(self.metrics),
        }
        if self.chosen is not None and self.rejected is not None and self.experience_type == "dpo":
            parts["chosen_length"], parts["rejected_length"] = len(self.chosen), len(self.rejected)
            parts["response_length"] = len(self.chosen) + len(self.rejected)
        for name, field in FIELDS.items():
            entry = getattr(self, name)
            if entry is None or name in parts or name == "experience_type":
                continue
            if field.kind == "number":
                parts[name] = float(entry)
            elif field.kind in ("text", "integer", "json"):
                parts[name] = copy_containers(entry)
        return parts

    def replace(self, **changes: FieldValue) -> Experience:
        """Return a copy with some fields changed. It is validated again and keeps its `experience_type`.

        Args:
            changes: New values, by field name.

        Returns:
            The new record, which shares unchanged tensors.

        Raises:
            ValueError: A value does not fit its field or the other fields.

        >>> Experience(tokens=[1, 2, 3]).replace(reward=0.5).experience_type
        'single_turn'
        """
        arguments = {name: getattr(self, name) for name in FIELDS} | changes
        if "action_mask" not in changes and implied_mask(self):
            del arguments["action_mask"]  # recreated for the new tokens
        # A record that was read with invalid shapes keeps them unless they are changed.
        new = restore(arguments, "replace") if self.malformed_fields else type(self)(**arguments)
        if self.unknown:
            new.__dict__["unknown"] = dict(self.unknown)
        return new

    def compact(self) -> Experience:
        """Return the record on memory of its own. A row of `Experiences` keeps the memory of all rows alive."""
        new = self.replace()
        for name in FIELDS:
            if name in new.__dict__ and name != "eid":
                new.__dict__[name] = copy_containers(new.__dict__[name], tensors=True)
        return new

    def __copy__(self) -> Experience:
        return self.replace()

    def __deepcopy__(self, memo: dict[int, Any]) -> Experience:
        return self.compact()

    def __reduce__(self) -> Any:
        # As a frame: torch pickles the whole storage behind a view, and cannot read some types back. A record with
        # values that frames do not support (a user's objects in `info`) is made compact and pickled by Python.
        try:
            return Experience.deserialize, (self.serialize(),)
        except ValueError:
            return row_from_values, (dict(self.compact().__dict__),)

    def __eq__(self, other: object) -> bool:
        """Equal when every field is: tensors by type, shape and value, NaN equal to NaN, unknown columns too."""
        if not isinstance(other, Experience):
            return NotImplemented
        return same(self.unknown, other.unknown) and all(
            same(getattr(self, name), getattr(other, name)) for name in FIELDS
        )

    __hash__ = None  # type: ignore[assignment]

    def _repr_html_(self) -> str:
        from rollbook.core.terminal import html_table

        rows = []
        for name in FIELDS:
            entry = getattr(self, name)
            if name == "eid" or entry is None or entry == {}:
                continue
            if isinstance(entry, torch.Tensor):
                entry = f"{dtype_name(entry)} {list(entry.shape)}: {entry.flatten()[:12].tolist()}"
            rows.append((name, entry))
        return html_table(f"Experience {self.eid}", ["field", "value"], rows)

    def __repr__(self) -> str:
        if "eid" not in self.__dict__:
            return "Experience(<not yet built>)"
        response = len(self.tokens) - self.prompt_length
        parts = [self.eid.uid, self.experience_type, f"{self.prompt_length}+{response} tokens"]
        if self.experience_type == "dpo" and self.chosen is not None and self.rejected is not None:
            parts[2] = f"{len(self.tokens)}+{len(self.chosen)}|{len(self.rejected)} tokens"
        if self.reward is not None:
            parts.append(f"reward={round(self.reward, 4)}")
        return f"Experience({', '.join(parts)})"


Experience.malformed_fields = frozenset()
Experience.unknown = MappingProxyType({})


# --- construction -------------------------------------------------------------------------------------------------


def _build(record: Experience, arguments: Mapping[str, Any]) -> None:
    """Convert the arguments and infer `experience_type`, the prompt length and the mask if they are not given."""
    state = record.__dict__
    for name, field in FIELDS.items():
        converted = convert(field, arguments.get(name))
        if converted is not None:
            state[name] = converted
    if record.tokens is None:
        raise ValueError("tokens: got None, expected token ids")
    if "experience_type" not in state:
        pair = record.chosen is not None and record.rejected is not None
        state["experience_type"] = "multi_turn" if record.action_mask is not None else "dpo" if pair else "single_turn"
    experience_type = state["experience_type"]
    if experience_type == "dpo":
        state["prompt_length"] = len(record.tokens) if record.tokens.dim() else 0
    state.setdefault("prompt_length", 1)
    is_truncated = record.truncate_status == "prompt_truncated"
    if is_truncated and record.logprobs is not None and experience_type != "dpo":
        width = len(record.logprobs) if record.logprobs.dim() else 0
        if experience_type == "single_turn" or record.action_mask is None:
            state["action_mask"] = torch.zeros(width, dtype=torch.bool, device=record.logprobs.device)
    elif experience_type == "single_turn" and record.action_mask is None and record.tokens.dim() == 1:
        width = max(len(record.tokens) - record.prompt_length, 0)
        state["action_mask"] = torch.ones(width, dtype=torch.bool, device=record.tokens.device)


def implied_mask(record: Experience) -> bool:
    """Return whether the mask of a record is the one that the constructor creates for a single turn."""
    mask = record.action_mask
    if (
        record.experience_type != "single_turn"
        or mask is None
        or record.malformed_fields
        or mask.dtype != torch.bool
        or mask.is_meta
    ):
        return False
    return bool((~mask if record.truncate_status == "prompt_truncated" else mask).all())


def validate(record: Experience, prefix: str = "") -> None:
    """Raise `ValueError` if a record does not fit the field table. `prefix` is the prefix of the message."""
    experience_type, length, prompt = record.experience_type, 0, record.prompt_length
    if record.tokens is None:
        raise ValueError(f"{prefix}tokens: got None, expected token ids")
    if not isinstance(prompt, int):
        raise ValueError(f"{prefix}prompt_length: got {prompt!r}, expected an int")
    if record.group_size is not None and record.group_size < 1:
        raise ValueError(f"{prefix}group_size: got {record.group_size}, expected at least 1")
    if experience_type not in EXPERIENCE_TYPES:
        raise ValueError(
            f"{prefix}experience_type: got {experience_type!r}, expected one of {', '.join(EXPERIENCE_TYPES)}"
        )
    for field in fields.TENSOR_FIELDS[None]:
        tensor = getattr(record, field.name)
        if tensor is None or field.name in record.malformed_fields or (field.broadcast and isinstance(tensor, int)):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{prefix}{field.name}: got {type(tensor).__name__}, expected a tensor")
        _check_dtype(field, tensor, prefix)
        if tensor.dim() != 1 + field.trailing:
            raise ValueError(
                f"{prefix}{field.name}: got shape {list(tensor.shape)}, expected {1 + field.trailing} dimension(s)"
            )
    length = len(record.tokens)
    if not length and experience_type == "single_turn" and record.truncate_status != "prompt_truncated":
        raise ValueError(f"{prefix}tokens: got no tokens, expected a prompt and a response")
    if (record.chosen is None) != (record.rejected is None):
        missing = "chosen" if record.chosen is None else "rejected"
        raise ValueError(f"{prefix}{missing}: got None, expected tokens, since the other answer of the pair is given")
    if experience_type == "dpo" and record.chosen is None:
        raise ValueError(f"{prefix}chosen: got None, expected tokens in a dpo record")
    is_truncated = record.truncate_status == "prompt_truncated" and experience_type != "dpo"
    if experience_type == "single_turn" and not (prompt > 0 and (is_truncated or prompt < length)):
        raise ValueError(
            f"{prefix}prompt_length: got {prompt}, expected 0 < prompt_length < {length}, the number of tokens"
        )
    if not prompt >= 0 or (prompt > length and not is_truncated):
        raise ValueError(f"{prefix}prompt_length: got {prompt}, expected 0 to {length}, the number of tokens")
    expected, explanation = length - prompt, f"{length} tokens - prompt_length {prompt}"
    if is_truncated:
        if record.logprobs is None:
            raise ValueError(f"{prefix}logprobs: got None, expected them with truncate_status 'prompt_truncated'")
        expected, explanation = len(record.logprobs), "the number of logprobs, because the prompt is truncated"
        mask = record.action_mask
        malformed = "action_mask" in record.malformed_fields
        if mask is not None and not malformed and not mask.is_meta and bool((mask != 0).any()):
            raise ValueError(
                f"{prefix}action_mask: got True, expected all False with truncate_status 'prompt_truncated'"
            )
    for field in fields.TENSOR_FIELDS[None]:
        tensor = getattr(record, field.name)
        if not isinstance(tensor, torch.Tensor) or field.name in record.malformed_fields:
            continue
        if field.axis == "response" and len(tensor) != expected:
            raise ValueError(f"{prefix}{field.name}: got {len(tensor)} entries, expected {expected} ({explanation})")
        if field.axis == "sequence" and len(tensor) != length:
            raise ValueError(f"{prefix}{field.name}: got {len(tensor)} entries, expected {length}, one for each token")


def row_from_values(
    values: dict[str, Any], malformed: frozenset[str] = frozenset(), unknown: dict[str, Any] | None = None
) -> Experience:
    """Build a record from valid values, without checks: those of columns are checked when these are built."""
    row = Experience.__new__(Experience)
    for name, empty in _always:
        if name not in values:
            values[name] = empty()
    if malformed:
        values["malformed_fields"] = malformed
    if unknown:
        values["unknown"] = unknown
    row.__dict__ = values
    return row


def find_malformed_fields(row: Experience) -> frozenset[str]:
    """Return the tensor fields whose shape the field table does not allow."""
    expected = len(row.tokens) - row.prompt_length
    is_truncated = row.truncate_status == "prompt_truncated" and row.experience_type != "dpo"
    if is_truncated and row.logprobs is not None:
        expected = len(row.logprobs) if row.logprobs.dim() else -1
    malformed = set()
    for field in fields.TENSOR_FIELDS[None]:
        tensor = getattr(row, field.name)
        if not isinstance(tensor, torch.Tensor) or field.name == "tokens":
            continue
        lengths = {"response": expected, "sequence": len(row.tokens)}
        fits = tensor.dim() == 1 + field.trailing and len(tensor) == lengths.get(field.axis, len(tensor))
        if not fits or (
            field.name == "action_mask" and is_truncated and not tensor.is_meta and bool((tensor != 0).any())
        ):
            malformed.add(field.name)
    return frozenset(malformed)


def restore(values: Mapping[str, Any], prefix: str) -> Experience:
    """Build a record from a payload of another framework, which validates less.

    Response-axis values of an invalid shape are kept and named in `malformed_fields`; reading them into a batch raises.

    Args:
        values: The fields by name.
        prefix: Prefix of error messages.

    Returns:
        The record.

    Raises:
        WireError: A value has an invalid type, or the lengths are out of range.
    """
    try:
        row = Experience.__new__(Experience)
        _build(row, values)
        if row.tokens.dim() != 1:
            raise ValueError(f"tokens: got shape {list(row.tokens.shape)}, expected one dimension")
        if malformed := find_malformed_fields(row):
            row.__dict__["malformed_fields"] = malformed
        validate(row)
    except (ValueError, TypeError) as error:
        raise WireError(f"{prefix}: {error}") from None
    return row


# --- attributes from the field table --------------------------------------------------------------------------------

_UPSTREAM_ORDER = ("eid", "tokens", "logprobs", "reward", "token_level_reward", "advantages", "returns",
                   "truncate_status", "info", "metrics", "prompt_length")  # fmt: skip
"""Order of Trinity's keywords, in which `prompt_length` has another place than in the field order."""


_always: list[tuple[str, Any]] = []
"""Fields with an empty container as default, and its type."""


def _derive() -> None:
    """Set the defaults, `dataclasses.fields` and the signature of `Experience` from the table."""
    for name in FIELDS.keys() - Experience.__dataclass_fields__.keys():
        if hasattr(Experience, name):
            raise ValueError(f"field {name!r}: Experience has an attribute of that name")
    _always[:] = [(f.name, DEFAULT_FACTORIES[f.kind]) for f in FIELDS.values() if f.always or f.kind == "custom_fields"]
    for name in Experience.__dataclass_fields__.keys() - FIELDS.keys():
        delattr(Experience, name)
    for name in FIELDS:
        setattr(Experience, name, None)
    template = dataclasses.make_dataclass("_Fields", [(name, Any, dataclasses.field(default=None)) for name in FIELDS])
    Experience.__dataclass_fields__ = {field.name: field for field in dataclasses.fields(template)}
    names = [*_UPSTREAM_ORDER, *(name for name in FIELDS if name not in _UPSTREAM_ORDER)]
    defaults = {"tokens": inspect.Parameter.empty, "prompt_length": 1}
    Experience.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(n)) for n in names]
    )


fields.observe(_derive)
_derive()


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def result_dtype(name: str, dtypes: set[str], fill: float = 0) -> str:
    """Return the type that represents the values of all records and the padding exactly."""
    if not dtypes:
        return FIELDS[name].dtype
    joined = dtypes.copy().pop() if len(dtypes) == 1 else promote(dtypes)
    if joined is None:
        raise ValueError(
            f"{name}: got records of types {', '.join(sorted(dtypes))}, expected types that one type represents"
        )
    if joined == "bool" and fill not in (0, 1):
        raise ValueError(f"pad_value: got {fill}, expected 0 or 1, since {name} is bool")
    if joined in INTEGERS and (not math.isfinite(fill) or fill != int(fill)):
        raise ValueError(f"pad_value: got {fill}, expected an integer, since {name} is {joined}")
    return joined


def check_records(records: Sequence[Experience]) -> None:
    """Raise `ValueError` if an entry is not an `Experience`."""
    for i, record in enumerate(records):
        if not isinstance(record, Experience):
            raise ValueError(f"record {i}: got {type(record).__name__}, expected an Experience")


def split_preference_pairs(records: Iterable[Experience]) -> list[Experience]:
    """Split each preference pair into two single-turn records.

    Fields that apply to both answers are copied to both (prompt text, tools, media, reward, info, custom fields).
    `chosen_messages` and `rejected_messages` become `messages`. `parent` is the uid of the pair, and the suffix of the
    id is new. Fields of one response, and the mark of a truncated prompt, are left out.

    Args:
        records: Preference pairs.

    Returns:
        Two records for each pair, the chosen one first.

    Raises:
        ValueError: A record is not a preference pair, or an answer is empty.

    >>> pair = Experience(tokens=[1, 2], chosen=[3, 4], rejected=[5], prompt_text="q", eid={"suffix": "p"})
    >>> [(half.tokens.tolist(), half.prompt_length, half.parent) for half in split_preference_pairs([pair])]
    [([1, 2, 3, 4], 2, '//0/0/p'), ([1, 2, 5], 2, '//0/0/p')]
    """
    halves = []
    records = list(records)
    check_records(records)
    for i, pair in enumerate(records):
        if pair.experience_type != "dpo" or pair.chosen is None or pair.rejected is None:
            raise ValueError(f"record {i} ({pair.eid}): experience_type: got {pair.experience_type!r}, expected 'dpo'")
        common = {name: getattr(pair, name) for name, field in FIELDS.items() if field.axis in ("sample", "free")}
        # Fields of the pair as a pair, or of a single response.
        for name in ("chosen", "rejected", "chosen_messages", "rejected_messages", "experience_type", "response_text"):
            del common[name]
        if pair.truncate_status == "prompt_truncated":
            del common["truncate_status"]  # which would require log-probs
        if isinstance(pair.policy_versions, int):
            common["policy_versions"] = pair.policy_versions
        for answer_name in ("chosen", "rejected"):
            answer, messages = getattr(pair, answer_name), getattr(pair, f"{answer_name}_messages")
            for name, tokens in (("tokens", pair.tokens), (answer_name, answer)):
                if len(tokens) == 0:
                    raise ValueError(f"record {i} ({pair.eid}): {name}: got no tokens, expected at least one")
            dtype = getattr(torch, result_dtype("tokens", {dtype_name(pair.tokens), dtype_name(answer)}))
            arguments = {
                **common,
                "tokens": torch.cat([pair.tokens.to(dtype), answer.to(pair.tokens.device, dtype)]),
                "prompt_length": len(pair.tokens),
                "messages": messages,
                "parent": pair.eid.uid,
                "eid": pair.eid.replace(suffix=EID().suffix),
            }
            half = Experience(**arguments)
            if pair.unknown:
                half.__dict__["unknown"] = dict(pair.unknown)
            halves.append(half)
    return halves
