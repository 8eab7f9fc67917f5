"""Where the response slots of a batch lie among its tokens: what is picked from a model's output, and put back.

Invariant: a slot's prediction is the model's output one token earlier, within the same sample; a slot that is padding,
or that speaks of a sample's very first token, has none: nothing is picked for it, and 0 is put there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollbook.batch import Batch
from rollbook.core.checks import check_int
from rollbook.core.rows import Rows


@dataclass(frozen=True, eq=False)
class Slots:
    """The slots of a batch that have a prediction, N of them, in the batch's order.

    >>> batch = Batch(tokens=torch.tensor([[0, 5, 6, 7]]), action_mask=torch.ones(1, 2).bool(),
    ...               attention_mask=torch.tensor([[0, 1, 1, 1]]))
    >>> slots = Slots.of(batch)
    >>> slots.index.tolist(), slots.labels.tolist()
    ([1, 2], [6, 7])
    >>> slots.put(torch.tensor([-0.5, -0.25]))
    tensor([[-0.5000, -0.2500]])
    """

    index: torch.Tensor
    """[N] Where the token before each slot lies among all tokens of the batch, row after row."""
    labels: torch.Tensor
    """[N] int64: the tokens that the slots speak of."""
    places: torch.Tensor
    """[N] Where the slots lie among all slots of the batch."""
    shape: tuple[int, ...]
    """(B, A) if padded, (slots,) if packed."""
    lengths: list[int] | None
    """How many slots each sample has, if packed."""

    @classmethod
    def of(cls, batch: Batch) -> Slots:
        """Those of a batch, padded or packed."""
        return _packed(batch, batch.tokens) if isinstance(batch.tokens, Rows) else _padded(batch, batch.tokens)

    def pick(self, predictions: torch.Tensor) -> torch.Tensor:
        """(N, ...) What the model said at the token before each slot, of (B, S, ...) or (1, tokens, ...)."""
        return predictions.flatten(0, 1).index_select(0, self.index)

    def put(self, entries: torch.Tensor) -> Any:
        """(B, A) or `Rows`: an entry (N,) for each slot that has a prediction, 0 on the others; gradients flow."""
        flat = entries.new_zeros(int(np.prod(self.shape))).index_copy(0, self.places, entries)
        return flat.view(self.shape) if self.lengths is None else Rows(flat, self.lengths)


def _padded(batch: Batch, tokens: torch.Tensor) -> Slots:
    (count, width), slots = tokens.shape, batch.response_width
    device, begin = tokens.device, width - slots
    if batch.attention_mask is None:
        place = torch.arange(begin, width, device=device)
        there = (place > 0).expand(count, slots)
    else:
        attended = batch.attention_mask != 0
        # Something must come before it: of a sample's first token nothing was said.
        there = (attended & (attended.cumsum(-1) > 1))[:, begin:]
    if batch.spans is not None and batch.spans[1].starts.any():
        starts = torch.from_numpy(batch.spans[1].starts).to(device)
        there = there & (torch.arange(slots, device=device) >= starts[:, None])
    places = there.flatten().nonzero()[:, 0]
    row, slot = places // max(slots, 1), places % max(slots, 1)
    at = row * width + begin + slot
    return Slots(at - 1, tokens.flatten()[at].long(), places, (count, slots), None)


def _packed(batch: Batch, rows: Rows) -> Slots:
    counts = np.array([len(row) for row in batch.action_mask], dtype=np.int64)
    ends = rows.offsets[1:]
    slot = np.arange(int(counts.sum()))
    at = slot + np.repeat(ends - np.cumsum(counts), counts)
    there = np.flatnonzero(at > np.repeat(rows.offsets[:-1], counts))
    device = rows.values.device
    index = torch.from_numpy(at[there]).to(device)
    places = torch.from_numpy(there).to(device)
    return Slots(index - 1, rows.values[index].long(), places, (len(slot),), counts.tolist())


def called_batch(sequences: Any, num_actions: Any, attention_mask: torch.Tensor | None, packed_seq_lens: Any) -> Batch:
    """The batch that a call in LightRFT's way speaks of.

    Padded: `sequences` (B, S), `attention_mask` (B, S), the last `num_actions` tokens of each row are the response.
    Packed: `sequences` (1, tokens), `attention_mask` numbers the samples from 1 on, `num_actions` and
    `packed_seq_lens` [B].

    >>> called_batch(torch.tensor([[1, 2, 3]]), 2, None, None)
    Batch(1 records, padded, tokens 1x3, responses 1x2)
    >>> called_batch(torch.tensor([[1, 2, 3, 4]]), [1, 1], torch.tensor([[1, 1, 2, 2]]), [2, 2])
    Batch(2 records, packed, 4 tokens)
    """
    check_matrix("sequences", sequences, "(B, S), or (1, tokens) if packed")
    if attention_mask is not None and attention_mask.shape != sequences.shape:
        raise ValueError(
            f"attention_mask: got shape {list(attention_mask.shape)}, expected {list(sequences.shape)}, as sequences"
        )
    if packed_seq_lens is None:
        actions = check_int("num_actions", num_actions)
        if actions >= max(sequences.shape[1], 1):
            raise ValueError(
                f"num_actions: got {actions}, expected fewer than the {sequences.shape[1]} tokens of a row"
            )
        mask = torch.ones(len(sequences), actions, dtype=torch.bool, device=sequences.device)
        return Batch(tokens=sequences, attention_mask=attention_mask, action_mask=mask)
    lengths, counts = _numbers("packed_seq_lens", packed_seq_lens), _numbers("num_actions", num_actions)
    if len(sequences) != 1 or sum(lengths) != sequences.shape[1]:
        raise ValueError(
            f"packed_seq_lens: got {len(lengths)} samples with {sum(lengths)} tokens in all, expected as many as "
            f"sequences {list(sequences.shape)} has"
        )
    if attention_mask is not None:
        counted = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths, dtype=torch.int64))
        if not torch.equal(attention_mask[0].cpu().long(), counted):
            raise ValueError("attention_mask: expected the number of the sample, from 1 on, at each packed token")
    if len(counts) != len(lengths):
        raise ValueError(f"num_actions: got {len(counts)} entries, expected {len(lengths)}, one for each sample")
    for i, (actions, length) in enumerate(zip(counts, lengths, strict=True)):
        if actions > length:
            raise ValueError(f"num_actions[{i}]: got {actions}, expected at most its {length} tokens")
    mask = torch.ones(sum(counts), dtype=torch.bool, device=sequences.device)
    return Batch(tokens=Rows(sequences[0], lengths), action_mask=Rows(mask, counts))


def check_matrix(name: str, matrix: Any, expected: str) -> None:
    """Refuse what is not a matrix.

    >>> check_matrix("sequences", torch.zeros(3), "(B, S)")
    Traceback (most recent call last):
        ...
    ValueError: sequences: got shape [3], expected a tensor (B, S)
    """
    if not isinstance(matrix, torch.Tensor) or matrix.dim() != 2:
        shown = f"shape {list(matrix.shape)}" if isinstance(matrix, torch.Tensor) else type(matrix).__name__
        raise ValueError(f"{name}: got {shown}, expected a tensor {expected}")


def _numbers(name: str, numbers: Any) -> list[int]:
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if not isinstance(numbers, (list, tuple)):
        raise ValueError(f"{name}: got {numbers!r}, expected a number for each packed sample")
    return [check_int(f"{name}[{i}]", number) for i, number in enumerate(numbers)]
