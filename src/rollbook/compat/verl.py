"""Records and batches as verl's `DataProto` (or the `TensorDict` inside), and back.

Invariant: `from_verl(to_verl(batch))` equals the batch, for any selection and order of rows: each row has its id, and
under `rollbook` what verl has no key for.

| key of verl | content |
|---|---|
| `prompts` (B, P), `responses` (B, R), `input_ids` (B, P + R) | the tokens, int64, prompts padded on the left |
| `attention_mask`, `position_ids` (B, P + R) | int64; positions from 0, padding on the right repeats the last |
| `response_mask` (B, R) | the action mask, int64 as verl makes it (its GAE fails on bool) |
| `rollout_log_probs`, `old_log_probs`, `ref_log_prob` (B, R) | the engine's, the old policy's and the reference's |
| `values`, `returns`, `advantages`, `kl`, `entropys` (B, R) | by name; `entropys` is `action_entropy` |
| `token_level_scores` (B, R) | `token_level_reward`, else the reward on the last *action* |
| `teacher_logprobs`, `loss_weights`, `policy_versions`, other extras (B, R) | by name |
| `response_routed_experts` (B, R, layers, k) | not `routed_experts`, which in verl includes the prompt |
| custom fields of records (B, ...) | as declared by their `CustomField` |
| `uid`, `unique_ids` | the task's id, by which verl groups, and the record's |
| `multi_modal_inputs` | a dict of tensors for each row, with the `images_seqlens` that verl counts |
| `model_versions` | `info["model_version"]`, or 0; per row, because `meta_info` is not split or joined by row |
| `rollbook` | everything else, per row |

`meta_info` is empty: verl's `concat` compares its entries with `==`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from rollbook.batch.media import TYPES, get_model_config, sample_positions
from rollbook.compat.lightrft.batch import ExperienceBatch, Records
from rollbook.compat.padded_columns import (
    COLUMN,
    LAYOUT,
    PaddedColumns,
    ReturnedColumns,
    RowExtras,
    custom_names,
    import_package,
    on_last_action,
    pop_info,
    read_ids,
    to_columns,
)
from rollbook.core.experiences import Experiences

KEYS = {
    "action_log_probs": "old_log_probs",
    "base_action_log_probs": "ref_log_prob",
    "action_entropy": "entropys",
    "extras.logprobs": "rollout_log_probs",
    "extras.token_level_reward": "token_level_scores",
    "extras.routed_experts": "response_routed_experts",
}
"""Columns with another name in verl."""
_COLUMNS = {key: name for name, key in KEYS.items()}
_BY_NAME = ("values", "returns", "advantages", "kl")
_TOKENS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
_ROWS = ("uid", "unique_ids", "multi_modal_inputs", "model_versions", COLUMN)
_POSITIONS_ONLY = TYPES


def to_verl(
    experiences: Records | ExperienceBatch,
    *,
    pad_token_id: int,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    tensordict_only: bool = False,
    mask_dtype: torch.dtype = torch.int64,
    get_rope_index: Callable[..., Any] | None = None,
) -> Any:
    """Convert records or an `ExperienceBatch` to a `verl.DataProto` with the keys above.

    A preference pair becomes two rows, the chosen answer first. An example, where verl is installed:

        data = to_verl(lease.experiences, pad_token_id=tokenizer.pad_token_id)
        data.batch["token_level_scores"], data.non_tensor_batch["uid"]

    Args:
        experiences: Records, or a batch.
        pad_token_id: The token id of padding.
        max_prompt_length: P; by default the longest prompt.
        max_response_length: R; by default the longest response.
        tensordict_only: Return a `TensorDict` with the same keys, which needs only the package tensordict.
        mask_dtype: The type of `response_mask` (Trinity-RFT uses `torch.bool`).
        get_rope_index: This method of a vision-language model. `position_ids` are then [B, 4, P + R], the positions of
            the text first, as verl has them for such models.

    Returns:
        A `DataProto`, or a `TensorDict` with `tensordict_only`.

    Raises:
        ValueError: Only some rows have a field or a reward (verl would read 0), or a row is longer than P or R.
    """
    package = import_package("tensordict" if tensordict_only else "verl", "to_verl")
    out = to_columns(experiences, "verl", pad_token_id, max_prompt_length, max_response_length)
    tensors, rows = _tensors(out, mask_dtype), _rows(out)
    if get_rope_index is not None:
        tensors["position_ids"] = _rope_positions(tensors, out, get_rope_index)
    _add_foreign(out, tensors, rows)
    if not tensordict_only:
        objects = {key: _objects(values) for key, values in rows.items()}
        return package.DataProto.from_dict(tensors=tensors, non_tensors=objects)
    stacks = {
        key: package.NonTensorStack.from_list([package.NonTensorData(value) for value in values])
        for key, values in rows.items()
    }
    return package.TensorDict({**tensors, **stacks}, batch_size=[len(out.sequences)])


def _tensors(out: PaddedColumns, mask_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    prompt = out.prompt_width
    tensors = {
        "prompts": out.sequences[:, :prompt],
        "responses": out.sequences[:, prompt:],
        "input_ids": out.sequences,
        "attention_mask": out.attention_mask,
        "position_ids": out.attention_mask.cumsum(-1).sub_(1).clamp_(min=0),
        "response_mask": out.action_mask.to(mask_dtype),
    }
    for name, value in (out.columns | {f"extras.{name}": value for name, value in out.custom.items()}).items():
        key = KEYS.get(name, name.removeprefix("extras."))
        taken = key in tensors or (name.startswith("extras.") and name not in KEYS and key in _reserved())
        if taken:
            raise ValueError(f"extras: got {key!r}, expected a name that verl's batch does not have already")
        tensors[key] = value
    scores = KEYS["extras.token_level_reward"]
    if scores not in tensors and out.rewards is not None:
        tensors[scores] = on_last_action(out.rewards, out.action_mask, warn=True)
        for row in out.row_extras:
            row["scored"] = True
    return tensors


def _reserved() -> set[str]:
    return {*_TOKENS, *_ROWS, *KEYS.values(), *_BY_NAME}


def _rows(out: PaddedColumns) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {}
    if out.ids is not None:
        rows["uid"] = [eid.tid for eid in out.ids]
        rows["unique_ids"] = [eid.uid for eid in out.ids]
    if any(out.media):
        rows["multi_modal_inputs"] = [_with_seqlens(media) for media in out.media]
        for row, media in zip(out.row_extras, out.media, strict=True):
            if _POSITIONS_ONLY in media:
                row["media"] = {_POSITIONS_ONLY: media[_POSITIONS_ONLY]}
    if out.records is not None:
        rows["model_versions"] = [int(info.get("model_version", 0)) for info in out.records.values("info")]
    rows[COLUMN] = list(out.row_extras)
    return rows


def _with_seqlens(media: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert media to the inputs of verl's model: without position-only entries, with `images_seqlens`."""
    inputs = {key: value for key, value in media.items() if key != _POSITIONS_ONLY}
    if (lengths := _seqlens(inputs)) is not None:
        inputs.setdefault("images_seqlens", lengths)
    return inputs


def _seqlens(media: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    grid = media.get("image_grid_thw")
    return None if grid is None else torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])


def _rope_positions(
    tensors: Mapping[str, torch.Tensor], out: PaddedColumns, get_rope_index: Callable[..., Any]
) -> torch.Tensor:
    """Return [B, 4, P + R]: the positions of the text, then the three of images and videos."""
    ids, attention = tensors["input_ids"], tensors["attention_mask"]
    config = get_model_config(get_rope_index)
    rows = []
    for i, media in enumerate(out.media):
        text = tensors["position_ids"][i]
        positions = text.new_zeros((4, len(text)))
        positions[0] = text
        attended = attention[i] != 0
        positions[1:, attended] = sample_positions(ids[i, attended], media, get_rope_index, config, i).to(text)
        rows.append(positions)
    return torch.stack(rows)


def _objects(values: list[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):  # one by one: numpy would look into sequences
        array[i] = value
    return array


# --- keys that only verl has ----------------------------------------------------------------------------------------

FOREIGN = "verl"
"""The key of `info` for verl's own keys: `rows`, `samples` [B, ...] and `tokens` [B, P + R, ...]."""


def _add_foreign(out: PaddedColumns, tensors: dict[str, torch.Tensor], rows: dict[str, list[Any]]) -> None:
    """Restore the keys that `from_verl` kept in `info`."""
    entries = pop_info(out, FOREIGN)
    if not entries:
        return
    for key in entries[0].get("rows", ()):
        rows.setdefault(key, [entry["rows"][key] for entry in entries])
    for key, value in out.info[FOREIGN].get("samples", {}).items():
        tensors.setdefault(key, value)
    width = out.sequences.shape[1]
    for key, first in entries[0].get("tokens", {}).items():
        padded = first.new_zeros((len(entries), width, *first.shape[1:]))
        for i, entry in enumerate(entries):
            begin = int(out.attention_mask[i].argmax())
            padded[i, begin : begin + len(entry["tokens"][key])] = entry["tokens"][key]
        tensors.setdefault(key, padded)


# --- from verl ------------------------------------------------------------------------------------------------------


@runtime_checkable
class DataProto(Protocol):
    """The part of `verl.DataProto` that is read here."""

    batch: Any
    """Tensors by name, or `None`."""
    non_tensor_batch: Mapping[str, Sequence[Any]]


@runtime_checkable
class TensorDict(Protocol):
    """The part of `tensordict.TensorDict` that is read here."""

    batch_size: Sequence[int]

    def items(self) -> Iterable[tuple[str, Any]]:
        """Return the tensors and the other columns by name."""


def from_verl(data: DataProto | TensorDict, *, pad_token_id: int = 0, layout: str = LAYOUT) -> ExperienceBatch:
    """Convert a `DataProto`, or a `TensorDict` with the same keys, to an `ExperienceBatch`.

    Rows from `to_verl` are restored unchanged, with the columns that verl added. For rows that verl created, the
    engine's log-probs replace missing policy log-probs, the reward is the sum of the row's scores, and the task of the
    id is verl's `uid`. Keys that a batch does not have are kept in `info["verl"]`, and `to_verl` restores them.
    `meta_info` is left out.

    Args:
        data: The `DataProto` or `TensorDict`.
        pad_token_id: Token id of the new padding.
        layout: `prompt_left_response_right`, `left` or `packed`.

    Returns:
        The batch.

    Raises:
        ValueError: If `data` is of another type, or lacks `responses` or `attention_mask`.

    >>> from types import SimpleNamespace
    >>> rollout = {
    ...     "prompts": torch.tensor([[0, 1, 2]]), "responses": torch.tensor([[3, 4, 0]]),
    ...     "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0]]), "rm_scores": torch.tensor([[0.0, 0.5, 0.0]]),
    ... }
    >>> batch = from_verl(SimpleNamespace(batch=rollout, non_tensor_batch={"uid": ["q7"]}), layout="left")
    >>> batch.sequences.tolist(), batch.ids[0].tid, batch.extras["rm_scores"].tolist()
    ([[1, 2, 3, 4]], '/q7', [[0.0, 0.5]])
    """
    return _read(data).batch(pad_token_id, layout)


def experiences_from_verl(data: DataProto | TensorDict) -> Experiences:
    """Convert a `DataProto` or `TensorDict` to records, with the columns that verl added.

    Args:
        data: The `DataProto` or `TensorDict`.

    Returns:
        The records. Columns that a record has no field for are in `info["trainer"]`.

    Raises:
        ValueError: If `data` is of another type, or lacks `responses` or `attention_mask`.

    >>> from types import SimpleNamespace
    >>> rollout = {"prompts": torch.tensor([[1, 2]]), "responses": torch.tensor([[3, 4]]),
    ...            "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    >>> experiences_from_verl(SimpleNamespace(batch=rollout, non_tensor_batch={}))[0].tokens.tolist()
    [1, 2, 3, 4]
    """
    return _read(data).records()


def _read(data: DataProto | TensorDict) -> ReturnedColumns:
    tensors, rows = _parts(data)
    for key in ("responses", "attention_mask"):
        if key not in tensors:
            raise ValueError(f"data: missing {key!r} among {', '.join(sorted(tensors))}, expected a rollout's batch")
    responses = tensors["responses"]
    count, width = responses.shape[:2]
    attended = tensors["attention_mask"]
    tokens = tensors["input_ids"] if "prompts" not in tensors else torch.cat([tensors["prompts"], responses], dim=1)
    chosen = tensors.get("response_mask")
    chosen = attended[:, -width:] if chosen is None else chosen
    row_extras = rows.get(COLUMN)
    columns: dict[str, torch.Tensor] = {}
    foreign: dict[str, dict[str, Any]] = {"rows": {}, "samples": {}, "tokens": {}}
    custom = {key: tensors[key] for key in custom_names(row_extras or ()) & tensors.keys()}
    for key, value in tensors.items():
        if key in _TOKENS or key in custom:
            continue
        if value.dim() > 1 and value.shape[1] == width and key not in ("routed_experts", "teacher_ids"):
            columns[_COLUMNS.get(key, key if key in _BY_NAME else f"extras.{key}")] = value
        else:
            aligned = value.dim() > 1 and value.shape[1] == tokens.shape[1]
            foreign["tokens" if aligned else "samples"][key] = value
    foreign["rows"] = {key: values for key, values in rows.items() if key not in _ROWS}
    info = _scores(columns, chosen, row_extras, count)
    incoming = ReturnedColumns(
        tokens,
        attended,
        chosen,
        columns,
        read_ids(rows.get("unique_ids"), rows.get("uid")),
        _media(rows.get("multi_modal_inputs"), row_extras, count),
        row_extras,
        custom=custom,
    )
    if any(foreign.values()):
        for i, (begin, end) in enumerate(incoming.spans()):
            row_foreign = {
                "rows": {key: values[i] for key, values in foreign["rows"].items()},
                "samples": {key: value[i] for key, value in foreign["samples"].items()},
                "tokens": {key: value[i, begin:end] for key, value in foreign["tokens"].items()},
            }
            info[i][FOREIGN] = {key: value for key, value in row_foreign.items() if value}
    incoming.info = info
    return incoming


def _parts(data: DataProto | TensorDict) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]]]:
    """Return the tensors and the object columns; entries of the whole batch are left out."""
    if isinstance(data, DataProto):
        tensors = {} if data.batch is None else dict(data.batch.items())
        return tensors, {key: list(values) for key, values in data.non_tensor_batch.items()}
    if not isinstance(data, TensorDict):
        raise ValueError(f"data: got {type(data).__name__}, expected a verl.DataProto or a TensorDict")
    tensors, rows = {}, {}
    for key, value in data.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif type(value).__name__ == "NonTensorStack" or key in _ROWS:
            rows[key] = value.tolist()
    return tensors, rows


def _scores(
    columns: dict[str, torch.Tensor], action_mask: torch.Tensor, row_extras: list[RowExtras] | None, count: int
) -> list[dict[str, Any]]:
    """Return the `info` of each row with its reward. Remove scores from `columns` if they only repeat the reward."""
    name = "extras.token_level_reward"
    info: list[dict[str, Any]] = [{} for _ in range(count)]
    scores = columns.get(name)
    if scores is None:
        return info
    if row_extras is None:
        for row, total in zip(info, scores.sum(dim=1).tolist(), strict=True):
            row["reward"] = total
    elif all(row.get("scored") for row in row_extras):
        rewards = on_last_action([row["info"]["reward"] for row in row_extras], action_mask)
        if torch.equal(rewards.nan_to_num(nan=torch.inf), scores.to(rewards.dtype).nan_to_num(nan=torch.inf)):
            del columns[name]
    return info


def _media(rows: list[Any] | None, row_extras: list[RowExtras] | None, count: int) -> list[dict[str, torch.Tensor]]:
    per_row = []
    for i in range(count):
        media = dict(rows[i] or {}) if rows is not None else {}
        lengths = _seqlens(media)
        if lengths is not None and "images_seqlens" in media and torch.equal(lengths, media["images_seqlens"]):
            del media["images_seqlens"]
        per_row.append(media | ({} if row_extras is None else row_extras[i].get("media", {})))
    return per_row


__all__ = ["experiences_from_verl", "from_verl", "to_verl"]
