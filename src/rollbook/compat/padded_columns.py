"""Conversion of records and batches to the padded columns of other frameworks and back, for `verl.py` and `trl.py`.

`to_columns` returns `PaddedColumns`; `ReturnedColumns` converts back, to a batch or to records.

Invariant: no row depends on another, so that a framework may reorder, repeat or drop rows. A row that is returned
unchanged gives the same sample, bit for bit: data that the framework has no key for is in the row's `RowExtras`.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollbook.compat.lightrft.batch import (
    BATCH_FIELDS,
    BATCH_MEDIA,
    BufferItem,
    ExperienceBatch,
    Records,
    from_experiences,
)
from rollbook.compat.lightrft.replay_buffer import make_experience_batch, split_experience_batch
from rollbook.core.experience import Experience, split_preference_pairs
from rollbook.core.experiences import Experiences, as_experiences
from rollbook.core.fields import FIELDS, owner
from rollbook.core.freeform import same
from rollbook.core.ids import EID

COLUMN = "rollbook"
"""The key of `RowExtras` in a framework's batch."""
LAYOUT = "prompt_left_response_right"
"""The layout of the frameworks: prompts padded on the left, responses on the right."""
ENGINE = "extras.logprobs"
"""The column of the engine's log-probs."""
_PER_SAMPLE = ("labels", "references", "raw_images")
_RESPONSE = tuple(name for name, field in BATCH_FIELDS.items() if field.axis == "response" and name != "action_mask")


class RowExtras(dict[str, Any]):
    """The data of one row that a framework has no key for.

    Compares by value, tensors included, because frameworks compare rows with `==`.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowExtras) and same(dict(self), dict(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __reduce__(self) -> Any:
        return RowExtras, (dict(self),)


def import_package(package: str, user: str) -> Any:
    """Import `package`. The message of the `ImportError` contains `user`, the function that needs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"{user} needs the package {package!r} (pip install {package}): {error}", name=package
        ) from error


@dataclass(eq=False)
class PaddedColumns:
    """B samples for a framework: tokens [B, P + R], columns [B, R, ...], and the extras of each row."""

    sequences: torch.Tensor
    """[B, P + R] int64."""
    attention_mask: torch.Tensor
    """[B, P + R] int64, 0 and 1."""
    action_mask: torch.Tensor
    """[B, R] bool."""
    columns: dict[str, torch.Tensor]
    """By response-axis field (extras as `extras.NAME`). `action_log_probs` are the old policy's, `extras.logprobs`
    the engine's."""
    rewards: list[float] | None
    ids: list[EID] | None
    media: list[dict[str, torch.Tensor]]
    """By the model's argument names."""
    row_extras: list[RowExtras]
    records: Experiences | None
    """The records, if records were passed; a preference pair is two rows."""
    info: Mapping[Any, Any]
    """The `info` of the batch."""

    @property
    def custom(self) -> dict[str, torch.Tensor]:
        """The records' custom fields [B, ...], by name."""
        return {name: self.info[name] for name in sorted(custom_names(self.row_extras))}

    @property
    def prompt_width(self) -> int:
        """P."""
        return self.sequences.shape[1] - self.action_mask.shape[1]


def custom_names(row_extras: Sequence[RowExtras]) -> set[str]:
    """Return the names of the custom fields of the rows' records."""
    return {field.destination_field for row in row_extras for field in row.get("record", {}).get("custom_fields", ())}


def to_columns(
    experiences: Records | ExperienceBatch,
    framework: str,
    pad_token_id: int,
    prompt_width: int | None = None,
    response_width: int | None = None,
) -> PaddedColumns:
    """Convert records or a batch to columns: prompts padded on the left to P, responses on the right to R.

    Args:
        experiences: The records or the batch.
        framework: Name of the framework, for errors.
        pad_token_id: Token id of the padding.
        prompt_width: P; by default the length of the longest prompt.
        response_width: R; by default the length of the longest response.
    """
    batch, records = _to_batch(experiences, pad_token_id)
    items = split_experience_batch(batch, unpad=True)
    if batch.layout == "packed" or records is None:
        batch = batch.pad(pad_token_id, LAYOUT)
    widths = _widths(batch, items, prompt_width, response_width)
    # Without `old_logprobs`, a batch has the engine's log-probs in `action_log_probs`.
    uses_engine = records is not None and any(value is None for value in records.values("old_logprobs"))
    names = {"action_log_probs": ENGINE} if uses_engine else {}
    columns = {name: getattr(batch, name) for name in _RESPONSE}
    columns |= {f"extras.{name}": value for name, value in (batch.extras or {}).items()}
    columns = {names.get(name, name): value for name, value in columns.items() if value is not None}
    attention_mask = torch.ones_like(batch.sequences) if batch.attention_mask is None else batch.attention_mask
    action_mask = batch.action_mask
    if action_mask is None:
        action_mask = attention_mask[:, attention_mask.shape[1] - widths.slots :]
    for name, mask in (("attention_mask", attention_mask), ("action_mask", action_mask)):
        # Masks of records are checked already, except action masks of unusual types.
        if mask.dtype != torch.bool and (records is None or name == "action_mask"):
            invalid = (mask != 0) & (mask != 1)
            if bool(invalid.any()):
                value = mask[invalid][0].item()
                raise ValueError(f"{name}: got {value}, expected 0 and 1; weights are `loss_weights`")
    _check_complete(batch, items, framework)
    row_extras = _row_extras(batch, items, names)
    if records is not None:
        _add_record_fields(row_extras, records)
        if uses_engine:
            for row in row_extras:
                row["engine"] = True
    ids = [item.eid for item in items]
    if None in ids and any(ids):
        i = ids.index(None)
        raise ValueError(f"ids[{i}]: got None, expected an id for every row or for none")
    return PaddedColumns(
        widths.tokens(batch.sequences, pad_token_id).long(),
        widths.tokens(attention_mask, 0).long(),
        widths.responses(action_mask, 0).bool(),
        {name: widths.responses(value, _pad_value(name)) for name, value in columns.items()},
        _rewards(items),
        [eid for eid in ids if eid is not None] if any(ids) else None,
        [_media(item) for item in items],
        row_extras,
        records,
        batch.info or {},
    )


def _to_batch(experiences: Records | ExperienceBatch, pad_token_id: int) -> tuple[ExperienceBatch, Experiences | None]:
    if isinstance(experiences, ExperienceBatch):
        return experiences, None
    if not isinstance(experiences, Sequence):
        raise ValueError(
            f"experiences: got {type(experiences).__name__}, expected Experiences, a list or an ExperienceBatch"
        )
    records = as_experiences(experiences)
    kinds = records.values("experience_type") if len(records) else []
    if "dpo" in kinds:
        for i, kind in enumerate(kinds):
            if kind != "dpo":
                raise ValueError(
                    f"record {i} ({records.eids()[i]}): got {kind!r} among preference pairs, expected pairs or none"
                )
        records = Experiences(split_preference_pairs(records))
    return from_experiences(records, pad_token_id=pad_token_id, layout=LAYOUT), records


@dataclass(frozen=True)
class _Widths:
    """The response width of a batch, and the padding to add on the left and right."""

    slots: int
    left: int
    right: int

    def tokens(self, value: torch.Tensor, fill: float) -> torch.Tensor:
        return _widen(value, self.left, self.right, fill)

    def responses(self, value: torch.Tensor, fill: float) -> torch.Tensor:
        return _widen(value, 0, self.right, fill)


def _widths(batch: ExperienceBatch, items: list[BufferItem], prompt: int | None, response: int | None) -> _Widths:
    columns = [getattr(batch, name) for name in (*_RESPONSE, "action_mask")] + list((batch.extras or {}).values())
    slots = next((column.shape[1] for column in columns if column is not None), 0)
    if not slots:
        raise ValueError("responses: got no response-axis field, expected at least one, for the response lengths")
    missing = []
    for name, limit, width in (
        ("max_prompt_length", prompt, batch.sequences.shape[1] - slots),
        ("max_response_length", response, slots),
    ):
        if limit is not None and limit < width:
            lengths = [_slots(item) for item in items]
            if name == "max_prompt_length":
                lengths = [len(item.sequences) - length for item, length in zip(items, lengths, strict=True)]
            i = lengths.index(max(lengths))
            raise ValueError(f"{name}: got {limit}, expected at least {width}, the length in row {i}{_id(items[i])}")
        missing.append(0 if limit is None else limit - width)
    return _Widths(slots, *missing)


def _slots(item: BufferItem) -> int:
    """Return the number of response tokens of an item."""
    rows = [getattr(item, name) for name in (*_RESPONSE, "action_mask")] + list((item.extras or {}).values())
    return next((len(row) for row in rows if row is not None), 0)


def _widen(value: torch.Tensor, left: int, right: int, fill: float) -> torch.Tensor:
    if not left and not right:
        return value
    width = value.shape[1]
    out = value.new_full((len(value), left + width + right, *value.shape[2:]), fill)
    out[:, left : left + width] = value
    return out


def _pad_value(name: str) -> float:
    field = FIELDS.get(name.removeprefix("extras."))
    return 0 if field is None else field.pad


def _id(item: BufferItem) -> str:
    return "" if item.eid is None else f" ({item.eid})"


def _row_extras(batch: ExperienceBatch, items: list[BufferItem], names: Mapping[str, str]) -> list[RowExtras]:
    """Return the extras of each row. Rows with the same column types share one dict of them."""
    columns = {name: getattr(batch, name) for name in BATCH_FIELDS}
    columns |= {f"extras.{name}": value for name, value in (batch.extras or {}).items()}
    columns = {name: value for name, value in columns.items() if value is not None}
    origin = batch.origin
    shared_dtypes = {names.get(name, name): value.dtype for name, value in columns.items()}
    rows = []
    for i, item in enumerate(items):
        dtypes = shared_dtypes
        if origin.absent or origin.dtypes:
            dtypes = {
                names.get(name, name): origin.dtypes[name][i] if name in origin.dtypes else column.dtype
                for name, column in columns.items()
                if i not in origin.absent.get(name, ())
            }
        row = RowExtras(dtypes=shared_dtypes if dtypes == shared_dtypes else dtypes)
        if item.info is not None:
            row["info"] = item.info
        if item.info_kinds:
            row["kinds"] = item.info_kinds
        for name in _PER_SAMPLE:
            value = getattr(item, name)
            if value is not None:
                row[name] = value
        rows.append(row)
    return rows


def _check_complete(batch: ExperienceBatch, items: list[BufferItem], framework: str) -> None:
    """Reject a field that only some rows have: a framework would read padding as values."""
    for name, rows in batch.origin.absent.items():
        if rows and (name in _RESPONSE or name.startswith("extras.")):
            first = min(rows)
            label = name.removeprefix("extras.") if name != "action_log_probs" else "action_log_probs (or logprobs)"
            raise ValueError(
                f"{label}: got None in {len(rows)} of {len(items)} rows, the first row {first}{_id(items[first])}, "
                f"expected it in every row or in none: {framework} would read it as 0"
            )


def _rewards(items: list[BufferItem]) -> list[float] | None:
    """Return each row's reward, or `None` if no row has one."""
    rewards: list[Any] = [(item.info or {}).get("reward") for item in items]
    missing = [i for i, reward in enumerate(rewards) if reward is None]
    if missing and len(missing) < len(rewards):
        raise ValueError(
            f"reward: got None in {len(missing)} of {len(rewards)} rows, the first row {missing[0]}"
            f"{_id(items[missing[0]])}, expected one in every row or in none: leave out rows that were not scored"
        )
    return None if missing or not rewards else [float(reward) for reward in rewards]


def _media(item: BufferItem) -> dict[str, torch.Tensor]:
    media = {key: getattr(item, name) for name, key in BATCH_MEDIA.items()} | (item.media or {})
    return {key: value for key, value in media.items() if value is not None}


def _add_record_fields(rows: list[RowExtras], records: Experiences) -> None:
    """Add the fields that a batch does not have: texts, messages, the kind of the record."""
    for row, tokens in zip(rows, records.values("tokens"), strict=True):
        row["record"] = {}
        row["token_dtype"] = tokens.dtype  # a batch has int64
    for name, field in FIELDS.items():
        if field.axis == "sequence" or (field.axis == "response" and not field.broadcast):
            continue
        for row, value in zip(rows, records.values(name), strict=True):
            if field.kind == "media" or field.axis == "response":
                # In a batch, one number is expanded to all tokens, and an empty dict of media becomes `None`.
                stored = isinstance(value, int) or (isinstance(value, dict) and not value)
            else:
                stored = value is not None and field.kind != "eid"
            if stored:
                row["record"][name] = value
    if any(owner(name) is None for name in records.columns):
        for row, record in zip(rows, records.rows(), strict=True):
            row["unknown"] = dict(record.unknown)


def on_last_action(rewards: Sequence[float], action_mask: torch.Tensor, warn: bool = False) -> torch.Tensor:
    """Return token rewards [B, R] float32: the reward of each row on its last action, 0 elsewhere.

    A row without actions has no reward.

    >>> on_last_action([1.0, 2.0], torch.tensor([[1, 1, 0], [0, 0, 0]]))
    tensor([[0., 1., 0.],
            [0., 0., 0.]])
    """
    mask = (action_mask != 0).cpu().numpy()
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    rows = np.flatnonzero(mask[np.arange(len(mask)), last])
    if warn and len(rows) < len(mask):
        warnings.warn(f"reward: {len(mask) - len(rows)} rows have no action, and lose their reward", stacklevel=3)
    scores = torch.zeros(action_mask.shape, dtype=torch.float32)
    scores[rows, last[rows]] = torch.tensor(rewards, dtype=torch.float32)[rows]
    return scores.to(action_mask.device)


# --- back to batches and records ----------------------------------------------------------------------------------


@dataclass(eq=False)
class ReturnedColumns:
    """B samples from a framework, with its padding; names as in `PaddedColumns`."""

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    action_mask: torch.Tensor
    columns: dict[str, torch.Tensor]
    ids: list[EID] | None
    media: list[dict[str, torch.Tensor]]
    row_extras: list[RowExtras] | None
    """`None` for rows that the framework created."""
    info: list[dict[str, Any]] | None = None
    """Entries to add to each row's `info`."""
    custom: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The custom fields [B, ...], by name; also in `info`."""

    def spans(self) -> list[tuple[int, int]]:
        """Return the start and end of each row's tokens [B]."""
        mask = (self.attention_mask != 0).to(torch.int8)
        width = mask.shape[1]
        if not width:
            return [(0, 0)] * len(mask)
        begin = mask.argmax(dim=1)
        end = width - mask.flip(1).argmax(dim=1)
        end = torch.where(mask.any(dim=1), end, begin)
        return list(zip(begin.tolist(), end.tolist(), strict=True))

    @property
    def uses_engine_logprobs(self) -> bool:
        """Whether the engine's log-probs replace missing policy log-probs, as in `from_experiences`."""
        from_engine = all(row.get("engine", False) for row in self.row_extras or ())
        return "action_log_probs" not in self.columns and from_engine

    def items(self) -> list[BufferItem]:
        """Return the rows without padding."""
        prompt = self.sequences.shape[1] - self.action_mask.shape[1]
        rows: list[Any] = self.row_extras or [RowExtras() for _ in self.sequences]
        names = {ENGINE: "action_log_probs"} if self.uses_engine_logprobs else {}
        per_token = {"sequences": self.sequences, "attention_mask": self.attention_mask}
        slots = {"action_mask": self.action_mask} | self.columns
        items = []
        for i, (row, (begin, end)) in enumerate(zip(rows, self.spans(), strict=True)):
            parts = {name: value[i, begin:end] for name, value in per_token.items()}
            low, high = max(begin - prompt, 0), max(end - prompt, 0)
            parts |= {name: value[i, low:high] for name, value in slots.items()}
            dtypes = row.get("dtypes")
            if dtypes is not None:
                masks = ("attention_mask", "action_mask")  # may have been added for the framework
                parts = {name: part for name, part in parts.items() if name in dtypes or name not in masks}
                parts = {name: part.to(dtypes.get(name, part.dtype)) for name, part in parts.items()}
            fields: dict[str, Any] = dict.fromkeys(BATCH_FIELDS)
            fields |= {names.get(name, name): part.clone() for name, part in parts.items()}
            extras = {n.removeprefix("extras."): fields.pop(n) for n in list(fields) if n.startswith("extras.")}
            media = dict(self.media[i])
            fields |= {name: media.pop(key) for name, key in BATCH_MEDIA.items() if key in media}
            info = row.get("info")
            if self.info is not None and self.info[i]:
                info = {**(info or {}), **self.info[i]}
            for name, value in self.custom.items():
                info = {**(info or {}), name: value[i].item() if value[i].numel() == 1 else value[i].clone()}
            item = BufferItem(**fields, info={} if info is None and "dtypes" not in row else info)
            item.extras, item.media = extras or None, media or None
            item.eid = None if self.ids is None else self.ids[i]
            item.info_kinds = row.get("kinds")
            for name in _PER_SAMPLE:
                setattr(item, name, row.get(name))
            items.append(item)
        return items

    def batch(self, pad_token_id: int, layout: str) -> ExperienceBatch:
        """Return the batch, in one of the padded layouts or `packed`."""
        return make_experience_batch(
            self.items(),
            layout == "packed",
            pad_token_id=pad_token_id,
            layout=LAYOUT if layout == "packed" else layout,
        )

    def records(self) -> Experiences:
        """Return the records. Columns that a record has no field for go to `info["trainer"]`, by name."""
        rows: list[Any] = self.row_extras or [RowExtras() for _ in self.sequences]
        return Experiences(
            [_build_record(item, row, self.uses_engine_logprobs) for item, row in zip(self.items(), rows, strict=True)]
        )


def _build_record(item: BufferItem, row: RowExtras, uses_engine: bool) -> Experience:
    fields: dict[str, Any] = dict(row.get("record", {}))
    trainer_columns: dict[str, Any] = {}
    columns = {name: getattr(item, name) for name in BATCH_FIELDS} | (item.extras or {})
    for name, part in columns.items():
        field = _find_record_field(name, uses_engine)
        if part is None or name == "attention_mask" or field in fields:
            continue
        if field is None:
            trainer_columns[name] = part
        else:
            fields[field] = part
    if "token_dtype" in row:
        fields["tokens"] = fields["tokens"].to(row["token_dtype"])
    length, slots = len(item.sequences), _slots(item)
    fields.setdefault("prompt_length", length - slots)
    info = dict(item.info or {})
    if "record" not in row:
        # The row was not a record before: all of `info` is kept, and the reward is a field.
        fields["reward"] = info.pop("reward", None)
        fields["info"] = info
        if fields["prompt_length"] and slots and bool((fields.get("action_mask", torch.ones(1)) != 0).all()):
            fields.pop("action_mask", None)
    if trainer_columns:
        fields["info"] = {**fields.get("info", {}), "trainer": trainer_columns}
    if media := _media(item):
        fields["multi_modal_inputs"] = media
    if item.eid is not None:
        fields["eid"] = item.eid
    record = Experience(**fields)
    if row.get("unknown"):
        record.__dict__["unknown"] = dict(row["unknown"])
    return record


def _find_record_field(name: str, uses_engine: bool) -> str | None:
    """Return the field of a record for a column of a batch, if there is one."""
    batch_field = BATCH_FIELDS.get(name)
    if batch_field is not None:
        return batch_field.sources[-1 if uses_engine else 0] if batch_field.sources else None
    return name if name in FIELDS and FIELDS[name].axis == "response" else None


def pop_info(columns: PaddedColumns, key: str) -> list[Any]:
    """Remove `info[key]` of each row and return the values; if any row lacks it, remove nothing and return []."""
    entries = [(row.get("info") or {}).get(key) for row in columns.row_extras]
    if any(entry is None for entry in entries):
        return []
    for row in columns.row_extras:
        row["info"] = {name: value for name, value in row["info"].items() if name != key}
    return entries


def read_ids(uids: Sequence[Any] | None, groups: Sequence[Any] | None) -> list[EID] | None:
    """Return the ids of rows. Rows that the framework created have only a group, which becomes the task of a new id.

    >>> [eid.rid for eid in read_ids(None, ["a", "b", "a"])]
    ['/a/0', '/b/0', '/a/1']
    """
    if uids is not None:
        return [EID.parse(str(uid)) for uid in uids]
    if groups is None:
        return None
    runs: dict[str, int] = {}
    eids = []
    for group in map(str, groups):
        runs[group] = runs.get(group, -1) + 1
        eids.append(EID(task=group, run=runs[group]))
    return eids
