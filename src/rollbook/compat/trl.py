"""Records and batches as the batch from which TRL's GRPO trainer computes its loss, and back.

Invariant: TRL's loss mask, `completion_mask * tool_mask`, is the action mask. What TRL has no key for is in lists with
an entry per row, which its trainer shuffles and splits with everything else.

| key of TRL | content |
|---|---|
| `prompt_ids`, `prompt_mask` (B, P) | int64, padded on the left |
| `completion_ids`, `completion_mask` (B, R) | int64, padded on the right; the mask is 1 on all of the response |
| `tool_mask` (B, R) | int64: 0 on tokens that the model did not sample; only if there are such tokens |
| `advantages` (B,) | float32, one per row; (B, R) with `per_token_advantages` |
| `num_items_in_batch` () | int64: the tokens of the loss, on all processes |
| `old_per_token_logps`, `ref_per_token_logps` (B, R) | the old policy's and the reference's log-probs |
| `sampling_per_token_logps` (B, R) | the engine's |
| `importance_sampling_ratio` (B, R) | from `extras`, if present: TRL needs it with vLLM |
| custom fields of records (B, ...) | as declared by their `CustomField` |
| `pixel_values`, `image_grid_thw`, `num_images`, `mm_token_type_ids`, ... | of all rows concatenated; counts per row |
| `unique_ids`, `rollbook` [B] | lists: the ids of the records, and everything else |

A trainer that uses it instead of generating:

    class Offline(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return to_trl(next(self.batches), pad_token_id=self.pad_token_id)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from rollbook.compat.lightrft.batch import ExperienceBatch, Records
from rollbook.compat.padded_columns import (
    COLUMN,
    LAYOUT,
    PaddedColumns,
    ReturnedColumns,
    RowExtras,
    custom_names,
    pop_info,
    read_ids,
    to_columns,
)

KEYS = {
    "action_log_probs": "old_per_token_logps",
    "base_action_log_probs": "ref_per_token_logps",
    "extras.logprobs": "sampling_per_token_logps",
}
"""Columns with another name in TRL."""
_COLUMNS = {key: name for name, key in KEYS.items()}
_BY_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""Media with an entry per token of the prompt, or of the sequence."""
FOREIGN = "trl"
"""The key of `info` for keys that only TRL has."""
_BY_IMAGE = ("image_sizes", "image_position_ids")
"""Media with a row per image."""


def to_trl(
    experiences: Records | ExperienceBatch,
    *,
    pad_token_id: int,
    max_prompt_length: int | None = None,
    max_completion_length: int | None = None,
    per_token_advantages: bool = False,
    num_items_in_batch: int | None = None,
) -> dict[str, Any]:
    """Convert records or an `ExperienceBatch` to the dict that `GRPOTrainer` has after generation.

    A preference pair becomes two rows.

    Args:
        experiences: Records, or a batch.
        pad_token_id: The token id of padding.
        max_prompt_length: P; by default the longest prompt.
        max_completion_length: R; by default the longest response.
        per_token_advantages: Return `advantages` [B, R], which TRL's loss also takes, instead of [B].
        num_items_in_batch: The tokens of the loss on all processes; by default the actions of this batch.

    Returns:
        Tensors by the names of TRL, padded: prompts [B, P] on the left, completions [B, R] on the right.

    Raises:
        ValueError: Without `per_token_advantages`, the actions of a row have different advantages; or only some rows
            have a field.

    >>> from rollbook import Experience
    >>> rows = [
    ...     Experience(tokens=[1, 2, 3], prompt_length=2, advantages=[0.5]),
    ...     Experience(tokens=[4, 5, 6, 7], prompt_length=1, action_mask=[1, 0, 1], advantages=[-0.5, 0.0, -0.5]),
    ... ]
    >>> batch = to_trl(rows, pad_token_id=0)
    >>> batch["prompt_ids"].tolist(), batch["completion_ids"].tolist(), batch["advantages"].tolist()
    ([[1, 2], [0, 4]], [[3, 0, 0], [5, 6, 7]], [0.5, -0.5])
    >>> (batch["completion_mask"] * batch["tool_mask"]).tolist(), batch["num_items_in_batch"].item()
    ([[1, 0, 0], [1, 0, 1]], 3)
    """
    out = to_columns(experiences, "TRL", pad_token_id, max_prompt_length, max_completion_length)
    prompt = out.prompt_width
    completion = out.attention_mask[:, prompt:]
    chosen = out.action_mask
    actions = int(chosen.sum())
    columns = dict(out.columns)
    batch: dict[str, Any] = {
        "prompt_ids": out.sequences[:, :prompt],
        "prompt_mask": out.attention_mask[:, :prompt],
        "completion_ids": out.sequences[:, prompt:],
        "completion_mask": completion,
        "advantages": _advantages(columns.pop("advantages", None), out, per_token_advantages),
        "num_items_in_batch": torch.tensor(
            actions if num_items_in_batch is None else num_items_in_batch, device=chosen.device
        ),
    }
    if not torch.equal(chosen, completion != 0):
        batch["tool_mask"] = (chosen | (completion == 0)).long()
    _add_media(batch, out)
    reserved = {*batch, *KEYS.values(), COLUMN, "unique_ids", "tool_mask", "num_images"}
    for name, value in (columns | {f"extras.{name}": value for name, value in out.custom.items()}).items():
        key = KEYS.get(name, name.removeprefix("extras."))
        if name not in KEYS and key in reserved:
            raise ValueError(f"extras: got {key!r}, expected a name that TRL's batch does not have already")
        batch[key] = value
    if pop_info(out, FOREIGN):
        for key, value in out.info[FOREIGN].items():
            batch.setdefault(key, value)
    if out.ids is not None:
        batch["unique_ids"] = [eid.uid for eid in out.ids]
    batch[COLUMN] = list(out.row_extras)
    return batch


def _advantages(advantages: torch.Tensor | None, out: PaddedColumns, per_token: bool) -> torch.Tensor:
    if advantages is None:
        raise ValueError("advantages: missing, required by TRL's loss")
    if per_token:
        return advantages
    chosen = out.action_mask
    low = advantages.masked_fill(~chosen, torch.inf).amin(dim=1)
    high = advantages.masked_fill(~chosen, -torch.inf).amax(dim=1)
    has_actions = chosen.any(dim=1)
    uneven = torch.nonzero(has_actions & (low != high)).flatten().tolist()
    if uneven:
        i = uneven[0]
        who = "" if out.ids is None else f" ({out.ids[i]})"
        raise ValueError(
            f"advantages: got {low[i].item():g} to {high[i].item():g} in row {i}{who}, expected one number for each "
            "row; per_token_advantages=True gives TRL one for each token"
        )
    flat = torch.where(has_actions, low, torch.zeros_like(low)).float()
    spread = flat[:, None].to(advantages.dtype) * chosen
    for i in torch.nonzero((spread != advantages).any(dim=1)).flatten().tolist():
        # Advantages of tokens that are not actions, which TRL ignores, are kept for the way back.
        length = int(out.attention_mask[i, out.prompt_width :].sum())
        out.row_extras[i]["advantages"] = advantages[i, :length].clone()
    return flat


def _add_media(batch: dict[str, Any], out: PaddedColumns) -> None:
    """Add the concatenated media of all rows, in the form that TRL's trainer splits."""
    names = dict.fromkeys(key for media in out.media for key in media)
    if not names:
        return
    for key in names:
        if "video" in key:
            raise ValueError(f"{key}: got a video, expected images: TRL's GRPO trainer takes no videos")
    if "pixel_values" in names:
        counted = "image_grid_thw" if "image_grid_thw" in names else "pixel_values"
        batch["num_images"] = [len(media[counted]) if counted in media else 0 for media in out.media]
    width = out.sequences.shape[1]
    for key in names:
        present = [media[key] for media in out.media if key in media]
        if key in _BY_TOKEN:
            padded = present[0].new_zeros((len(out.media), width))
            for i, media in enumerate(out.media):
                if key in media:
                    begin = int(out.attention_mask[i].argmax())
                    row = media[key].reshape(-1)
                    padded[i, begin : begin + len(row)] = row
                    out.row_extras[i]["media"] = {**out.row_extras[i].get("media", {}), key: media[key]}
            batch[key] = padded
        elif key in ("pixel_values", "image_grid_thw", *_BY_IMAGE):
            batch[key] = torch.cat(present)
        else:
            raise ValueError(
                f"{key}: got media of that name, expected pixel_values, image_grid_thw, {', '.join(_BY_IMAGE)}, "
                f"{' or '.join(_BY_TOKEN)}"
            )


# --- from TRL -------------------------------------------------------------------------------------------------------


def from_trl(batch: Mapping[str, Any], *, pad_token_id: int = 0, layout: str = LAYOUT) -> ExperienceBatch:
    """Convert a dict of `to_trl`, or of TRL, to an `ExperienceBatch`.

    The advantage of a row is set on each of its actions. `num_items_in_batch` is left out. Keys that a batch does not
    have are kept in `info["trl"]`, and `to_trl` restores them.

    Args:
        batch: The dict.
        pad_token_id: Token id of the new padding.
        layout: `prompt_left_response_right`, `left` or `packed`.

    Returns:
        The batch.

    Raises:
        ValueError: A required key is missing or not a tensor, or values do not match the rows.

    >>> batch = {
    ...     "prompt_ids": torch.tensor([[0, 1]]), "prompt_mask": torch.tensor([[0, 1]]),
    ...     "completion_ids": torch.tensor([[2, 3, 0]]), "completion_mask": torch.tensor([[1, 1, 0]]),
    ...     "advantages": torch.tensor([0.5]), "num_items_in_batch": torch.tensor(2),
    ... }
    >>> converted = from_trl(batch)
    >>> converted.sequences.tolist(), converted.advantages.tolist(), converted.action_mask.tolist()
    ([[1, 2, 3]], [[0.5, 0.5]], [[True, True]])
    """
    for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
        if not isinstance(batch.get(key), torch.Tensor):
            raise ValueError(f"batch: got {type(batch.get(key)).__name__} for {key!r}, expected a tensor")
    completion = batch["completion_mask"]
    count, width = completion.shape
    chosen = completion * batch["tool_mask"] if batch.get("tool_mask") is not None else completion
    row_extras: list[RowExtras] | None = batch.get(COLUMN)
    media_keys = ("pixel_values", "image_grid_thw", "num_images", *_BY_TOKEN, *_BY_IMAGE)
    standard = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"}
    standard |= {"num_items_in_batch", "unique_ids", COLUMN, *media_keys}
    custom = {key: batch[key] for key in custom_names(row_extras or ()) & batch.keys()}
    columns: dict[str, torch.Tensor] = {}
    info: list[dict[str, Any]] = [{} for _ in range(count)]
    for key, value in batch.items():
        if key in standard or key in custom or value is None:
            continue
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == width:
            columns[_COLUMNS.get(key) or _name(key)] = value
        elif isinstance(value, (torch.Tensor, list)) and len(value) == count:
            for row, entry in zip(info, value, strict=True):
                row.setdefault(FOREIGN, {})[key] = entry
    if batch.get("advantages") is not None:
        columns["advantages"] = _spread(batch["advantages"], chosen, row_extras)
    return ReturnedColumns(
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        torch.cat([batch["prompt_mask"], completion], dim=1),
        chosen != 0,
        columns,
        read_ids(batch.get("unique_ids"), None),
        _media(batch, row_extras, count),
        row_extras,
        info,
        custom,
    ).batch(pad_token_id, layout)


def _name(key: str) -> str:
    return key if key in ("values", "returns", "kl", "action_entropy") else f"extras.{key}"


def _spread(advantages: torch.Tensor, chosen: torch.Tensor, row_extras: Sequence[RowExtras] | None) -> torch.Tensor:
    if advantages.dim() > 1:
        return advantages
    per_token = advantages[:, None] * (chosen != 0)
    for i, row in enumerate(row_extras or ()):
        sent = row.get("advantages")
        if sent is not None and bool((sent == per_token[i, : len(sent)])[chosen[i, : len(sent)] != 0].all()):
            per_token[i, : len(sent)] = sent
    return per_token


def _media(
    batch: Mapping[str, Any], row_extras: Sequence[RowExtras] | None, count: int
) -> list[dict[str, torch.Tensor]]:
    rows: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    numbers = batch.get("num_images")
    grids = batch.get("image_grid_thw")
    for key in ("pixel_values", "image_grid_thw", *_BY_IMAGE):
        value = batch.get(key)
        if value is None:
            continue
        if numbers is None:
            raise ValueError(f"{key}: missing 'num_images', expected the number of images of each row")
        sizes = torch.tensor(numbers)
        if key == "pixel_values" and grids is not None:
            ends = torch.cat([torch.zeros(1, dtype=torch.int64), grids.prod(dim=-1).cpu().cumsum(0)])
            firsts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
            sizes = torch.stack([ends[b] - ends[a] for a, b in pairwise(firsts.tolist())])
        parts = torch.split(value, sizes.tolist())
        for row, number, part in zip(rows, numbers, parts, strict=True):
            if number:
                row[key] = part
    for key in _BY_TOKEN:
        if batch.get(key) is not None and row_extras is None:
            attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1) != 0
            for i, row in enumerate(rows):
                row[key] = batch[key][i][attended[i]]
    for row, sent in zip(rows, row_extras or (), strict=False):
        row |= sent.get("media", {})
    return rows


__all__ = ["from_trl", "to_trl"]
