"""The batches of a rollout seen as one: all rows in order, for what is computed over all of them.

Invariant: what is computed here does not depend on how the rollout was cut into batches; a field that is put back lies
in each batch as its own fields do, padded or packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.inputs import group_id, run_id
from rollbook.compat.lightrft.batch import ExperienceBatch
from rollbook.compat.lightrft.layouts import action_starts, spans_of_rows
from rollbook.core.ids import EID
from rollbook.core.process_group import ALONE, Ranks
from rollbook.core.rows import Rows, Spans


class Whole:
    """Several batches, row by row.

    >>> def batch(rewards):
    ...     ones = torch.ones(len(rewards), 2)
    ...     return ExperienceBatch(ones.long(), ones, *[None] * 4, ones.long(), ones.bool(),
    ...                            {"reward": torch.tensor(rewards)})
    >>> whole = Whole([batch([1.0, 0.0]), batch([2.0])])
    >>> whole.numbers("reward").tolist(), whole.groups(per_group=3).tolist(), len(whole.rows("action_log_probs"))
    ([1.0, 0.0, 2.0], [0, 0, 0], 3)
    >>> whole.put("advantages", Rows(torch.arange(6.0), [2, 2, 2]))
    >>> whole.batches[1].advantages
    tensor([[4., 5.]])
    """

    def __init__(self, batches: Sequence[ExperienceBatch]) -> None:
        self.batches = list(batches)
        self.sizes = [_count(batch) for batch in self.batches]

    @cached_property
    def _spans(self) -> list[Spans | None]:
        return [_acting(batch) for batch in self.batches]

    def __len__(self) -> int:
        return sum(self.sizes)

    # --- per token ----------------------------------------------------------------------------------------------

    def rows(self, name: str) -> Rows | None:
        """A response-axis field of all rows, on the CPU, `None` if some batch lacks it. An `action_mask` that is not
        there is all True."""
        column = self.column(name)
        return None if column is None else Rows(*column)

    def column(self, name: str) -> tuple[torch.Tensor, list[int]] | None:
        """`rows` as values end to end and lengths: making a tensor of every row takes longer than most arithmetic."""
        parts = []
        for batch, spans in zip(self.batches, self._spans, strict=True):
            value = _field(batch, name)
            if value is None and name == "action_mask":
                value = _all_true(batch)
            if value is None:
                return None
            parts.append(_cut(value, spans))
        if not parts:
            return torch.zeros(0, dtype=torch.bool if name == "action_mask" else torch.float32), []
        return _end_to_end(parts)

    def token_rewards(self) -> tuple[Rows, torch.Tensor] | None:
        """The token rewards of all rows, on the CPU, 0 on rows without any, and [N] bool: which rows have them; `None`
        if no row has."""
        name = "extras.token_level_reward"
        if all(_field(batch, name) is None for batch in self.batches):
            return None
        parts, lengths, has = [], list[int](), []
        for batch, spans, size in zip(self.batches, self._spans, self.sizes, strict=True):
            value = _field(batch, name)
            values, own_lengths = _cut(_all_true(batch) if value is None else value, spans)
            parts.append(torch.zeros(len(values)) if value is None else values.float())
            lengths += own_lengths
            absent = range(size) if value is None else batch.origin.absent.get(name, ())
            has += [row not in absent for row in range(size)]
        return Rows(torch.cat(parts), lengths), torch.tensor(has)

    def of_each(self, find: Callable[[ExperienceBatch], Any]) -> tuple[torch.Tensor, list[int]]:
        """What a function finds of each batch, (B, A), or `Rows` of a packed one, as `column` gives it."""
        return _end_to_end([_cut(find(batch), spans) for batch, spans in zip(self.batches, self._spans, strict=True)])

    def put(self, name: str, rows: Rows) -> None:
        """Give each batch its rows of a response-axis field (`extras.NAME` for one that a batch has no name for)."""
        self.put_column(name, rows.values, rows.lengths)

    def put_column(self, name: str, values: torch.Tensor, lengths: list[int]) -> None:
        """`put` of values end to end."""
        for batch, value in zip(self.batches, self._laid_out(values, lengths), strict=True):
            _set_field(batch, name, value)

    def laid_out(self, rows: Rows) -> list[Any]:
        """A response-axis column as each batch has its own fields: (B, A), 0 on padding, or `Rows` of a packed one."""
        return self._laid_out(rows.values, rows.lengths)

    def _laid_out(self, values: torch.Tensor, lengths: list[int]) -> list[Any]:
        parts: list[Any] = []
        start = row = 0
        for batch, spans, size in zip(self.batches, self._spans, self.sizes, strict=True):
            stop = start + sum(lengths[row : row + size])
            part = values[start:stop].to(batch_device(batch))
            parts.append(Rows(part, lengths[row : row + size]) if spans is None else spans.pad(part, 0))
            start, row = stop, row + size
        return parts

    def gathered(self, name: str, parts: Sequence[Any]) -> Rows:
        """The inverse of `laid_out`, for what a function `name` returned for each batch."""
        columns = []
        for i, (part, spans, size) in enumerate(zip(parts, self._spans, self.sizes, strict=True)):
            if spans is None:
                if not isinstance(part, list) or len(part) != size:
                    raise ValueError(f"{name}: got {_described(part)} for batch {i}, expected {size} 1-D tensors")
            elif not isinstance(part, torch.Tensor) or part.shape != (size, spans.width):
                raise ValueError(f"{name}: got {_described(part)} for batch {i}, expected [{size}, {spans.width}]")
            columns.append(_cut(part, spans))
        return Rows(*_end_to_end(columns))

    # --- per row ------------------------------------------------------------------------------------------------

    def numbers(self, key: str) -> torch.Tensor:
        """[N] An entry of `info`, one number for each row, float32, on the CPU; `None` is NaN."""
        parts = []
        for i, batch in enumerate(self.batches):
            value = (batch.info or {}).get(key)
            if value is None:
                raise ValueError(f"experiences[{i}].info[{key!r}]: got none, expected a number for each sample")
            if isinstance(value, list):
                value = [math.nan if number is None else number for number in value]
            part = torch.as_tensor(value, dtype=torch.float32).detach().cpu().reshape(-1)
            if len(part) != self.sizes[i]:
                raise ValueError(
                    f"experiences[{i}].info[{key!r}]: got {len(part)} numbers, expected {self.sizes[i]}, one a sample"
                )
            parts.append(part)
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros(0)

    def put_numbers(self, key: str, values: torch.Tensor) -> None:
        """Give each batch its rows' numbers in `info`."""
        for batch, part in zip(self.batches, self.split(values), strict=True):
            batch.info = {**(batch.info or {}), key: part.to(batch_device(batch))}

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """[N] numbers cut as the rows are."""
        if len(self.sizes) == 1:
            return [values]
        return list(torch.split(values, self.sizes)) if self.sizes else []

    def entries(self, key: str) -> list[Any] | None:
        """[N] What `info` holds for each row, `None` if no batch has it."""
        found: list[Any] = []
        for batch, size in zip(self.batches, self.sizes, strict=True):
            info = batch.info or {}
            value = info.get(key, (info.get("info") or {}).get(key))
            if isinstance(value, torch.Tensor):
                value = value.tolist()
            found += [None] * size if value is None else list(value)
        return None if all(value is None for value in found) else found

    def ids(self) -> list[EID] | None:
        """[N] The rows' ids, `None` unless every row has one."""
        if any(size and not batch.ids for batch, size in zip(self.batches, self.sizes, strict=True)):
            return None
        found = [eid for batch in self.batches for eid in batch.ids or ()]
        return None if any(eid is None for eid in found) else found  # type: ignore[return-value]

    def groups(self, per_group: int, ranks: Ranks = ALONE) -> Sequence[Any] | NDArray[np.int64]:
        """[N] Which task each row is of: by id; rows without ids by place, `per_group` after one another, in each
        process apart."""
        ids = self.ids()
        if ids is not None:
            return [group_id(eid) for eid in ids]
        if len(self) % per_group:
            raise ValueError(
                f"experiences: got {len(self)} samples without ids, expected a multiple of n_samples_per_prompt "
                f"({per_group}), to group them by place"
            )
        places = np.arange(len(self) // per_group).repeat(per_group)
        return places if ranks is ALONE else [f"process {ranks.rank}, group {place}" for place in places]

    def runs(self) -> list[Any] | None:
        """[N] Which run each row is of; `None` without ids, where each row is one."""
        ids = self.ids()
        return None if ids is None else [run_id(eid) for eid in ids]


def mean_by_row(values: NDArray[np.float64], lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> torch.Tensor:
    """Compute each row's mean over the slots that count.

    Args:
        values: (total,) rows end to end, 0 where nothing counts.
        lengths: [B] slots of each row.
        counts: [B] how many of them count.

    Returns:
        [B] float32, 0 for a row in which nothing counts.

    >>> mean_by_row(np.array([1.0, 0.0, 3.0]), np.array([2, 0, 1]), np.array([1, 0, 1]))
    tensor([1., 0., 3.])
    """
    filled = lengths > 0  # reduceat has no empty segments
    sums = np.zeros(len(lengths), dtype=np.float32)
    if len(values):
        sums[filled] = np.add.reduceat(values, (lengths.cumsum() - lengths)[filled])
    return torch.from_numpy(sums / np.maximum(counts, 1).astype(np.float32))


def _described(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _cut(value: Any, spans: Spans | None) -> tuple[torch.Tensor, list[int]]:
    """A response-axis field of one batch without padding, on the CPU: its rows end to end, and their lengths."""
    if spans is not None:
        return spans.unpad(value.detach().cpu()), spans.lengths.tolist()
    rows = value if isinstance(value, Rows) else Rows(value)
    return rows.values.detach().to("cpu", copy=True), rows.lengths


def _end_to_end(columns: list[tuple[torch.Tensor, list[int]]]) -> tuple[torch.Tensor, list[int]]:
    if len(columns) == 1:
        return columns[0]
    values = [values for values, _ in columns]
    return torch.cat(values) if values else torch.zeros(0), [n for _, lengths in columns for n in lengths]


def _count(batch: ExperienceBatch) -> int:
    """How many rows a batch has; one that is only looked at for its rewards need not have tokens."""
    if batch.sequences is not None:
        return len(batch)
    return len((batch.info or {}).get("reward", ()))


def _acting(batch: ExperienceBatch) -> Spans | None:
    """Where a padded batch's response slots lie; `None` for a packed one."""
    if batch.layout == "packed":
        return None
    width = int(batch.sequences.shape[1]) if batch.sequences is not None else 0
    found = [value for value in (_field(batch, name) for name in _WIDE) if value is not None]
    if not found:
        raise ValueError("experience: got no response-axis field, expected action_mask or action_log_probs")
    slots = int(found[0].shape[1])
    return spans_of_rows(batch.attention_mask, len(batch), width, slots, action_starts(batch, slots))[1]


_WIDE = ("action_mask", "action_log_probs", "values", "kl", "advantages", "returns", "base_action_log_probs")


def _all_true(batch: ExperienceBatch) -> Any:
    for name in _WIDE:
        value = _field(batch, name)
        if isinstance(value, torch.Tensor):
            return torch.ones(value.shape[:2], dtype=torch.bool, device=value.device)
        if value is not None:
            rows = value if isinstance(value, Rows) else Rows(value)
            return rows.apply(lambda values: torch.ones(len(values), dtype=torch.bool, device=values.device))
    return None


def _field(batch: ExperienceBatch, name: str) -> Any:
    if name.startswith("extras."):
        return (batch.extras or {}).get(name.removeprefix("extras."))
    return getattr(batch, name)


def _set_field(batch: ExperienceBatch, name: str, value: Any) -> None:
    if name.startswith("extras."):
        batch.extras = {**(batch.extras or {}), name.removeprefix("extras."): value}
    else:
        setattr(batch, name, value)


def batch_device(batch: ExperienceBatch) -> torch.device:
    """Where a batch's tokens are."""
    sequences = batch.sequences
    if isinstance(sequences, torch.Tensor):
        return sequences.device
    if isinstance(sequences, Rows):
        return sequences.values.device
    return sequences[0].device if len(sequences) else torch.device("cpu")
