"""`CustomField`: which entry of `info` becomes an entry of a trainer's batch.

Invariant: its type is a torch dtype of a closed table, never looked up on the torch module by a payload's word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rollbook.core.fields import BATCH_NAMES, DTYPES, FIELDS

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
}


@dataclass(frozen=True)
class CustomField:
    """Makes `info[source_field]` of B records the [B] tensor `batch.info[destination_field]` of type `data_type`.

    An entry is a number, or an array of the same shape in every record, which gives [B, ...]. All records of a batch
    need the same custom fields and the entries they name; otherwise making the batch raises `ValueError`.

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
        if self.data_type not in TORCH_DTYPES.values():
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
            kind = TORCH_DTYPES.get(kind.removeprefix("torch."), kind)
        return cls(data["source_field"], data["destination_field"], kind)
