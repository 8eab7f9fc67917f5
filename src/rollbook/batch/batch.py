"""`Batch`: the columns of records that a model and a loss read, padded or packed.

Invariant: slot j of a padded response-axis field belongs to token S - R + j of its row. A packed batch has the same
rows end to end. `batch.pack().pad(...)` and `Batch.from_records` of the same records are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from rollbook.batch.columns import RESPONSE_COLUMNS, Lengths, read_columns
from rollbook.batch.device import Device, copy_columns, move_to_device, pin_memory
from rollbook.batch.media import GRIDS, TYPES, get_model_config, media_inputs, rope_positions
from rollbook.core.checks import check_int
from rollbook.core.experiences import Experiences, as_experiences
from rollbook.core.fields import FIELDS
from rollbook.core.freeform import same
from rollbook.core.ids import EID
from rollbook.core.rows import Column, Rows, Spans, concatenated

if TYPE_CHECKING:
    from rollbook.batch.media import ModelConfig
    from rollbook.core.experience import Experience

Tokens: TypeAlias = torch.Tensor | Rows
"""An entry for each token: [B, S] or [B, R] padded; `Rows` packed."""
Side = Literal["left", "right"]


@dataclass(eq=False, repr=False, kw_only=True)
class Batch:
    """B records in the layout that a model and a loss read, with the field names of a record.

    S is the length of the longest record, R that of the longest response. Padded, fields with an entry for each token
    are matrices; packed, they are `Rows`, whose `values` are contiguous.

    Attributes:
        tokens: [B, S] int64 token ids.
        action_mask: [B, R] True on tokens that the model sampled; if masks were not read, on every response token.
        attention_mask: [B, S] int64: 1 on tokens, 0 on padding. `None`: no padding, or packed.
        eids: [B] Ids of the records.
        reward: [B] NaN for records without one.
        logprobs: [B, R] Log-probs of the rollout engine.
        old_logprobs: [B, R] Log-probs of the policy before the update.
        ref_logprobs: [B, R] Log-probs of the reference policy.
        teacher_logprobs: [B, R] Log-probs of the teacher.
        entropy: [B, R] Entropy of the policy.
        values: [B, R] Values of the critic.
        advantages: [B, R] Advantages.
        returns: [B, R] Returns.
        loss_weights: [B, R] Weights in the loss.
        extra: Other fields of the response axis, [B, R, ...], and custom fields, [B, ...].
        media: By name of the model's input, such as `pixel_values`, the tensor of each record or `None`.
        spans: Padded: positions of the tokens and of the response of each row. `None`: as `attention_mask` states.

    >>> from rollbook import Experience
    >>> records = [Experience(tokens=[5, 6, 7], logprobs=[-0.5, -0.25]), Experience(tokens=[8, 9], logprobs=[-0.75])]
    >>> batch = Batch.from_records(records, ("tokens", "action_mask", "logprobs"))
    >>> batch.tokens.tolist(), batch.action_mask.tolist(), batch.logprobs.tolist()
    ([[5, 6, 7], [0, 8, 9]], [[True, True], [False, True]], [[-0.5, -0.25], [0.0, -0.75]])
    >>> packed = batch.pack()
    >>> packed.tokens.values.tolist(), packed.cu_seqlens.tolist(), packed.position_ids.tolist()
    ([5, 6, 7, 8, 9], [0, 3, 5], [[0, 1, 2, 0, 1]])
    >>> packed.pad() == batch
    True
    """

    tokens: Tokens
    action_mask: Tokens
    attention_mask: torch.Tensor | None = None
    eids: list[EID] = field(default_factory=list)
    reward: torch.Tensor | None = None
    logprobs: Tokens | None = None
    old_logprobs: Tokens | None = None
    ref_logprobs: Tokens | None = None
    teacher_logprobs: Tokens | None = None
    entropy: Tokens | None = None
    values: Tokens | None = None
    advantages: Tokens | None = None
    returns: Tokens | None = None
    loss_weights: Tokens | None = None
    extra: dict[str, Tokens] = field(default_factory=dict)
    media: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    spans: tuple[Spans, Spans] | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "action_mask"):
            if not isinstance(getattr(self, name), (torch.Tensor, Rows)):
                raise ValueError(
                    f"{name}: got {type(getattr(self, name)).__name__}, expected a tensor, or Rows; "
                    "Batch.from_records builds a batch from records"
                )

    # --- from records -------------------------------------------------------------------------------------------------

    @classmethod
    def from_records(
        cls,
        records: Experiences | Sequence[Experience],
        columns: Sequence[str] | None = None,
        *,
        fill: Mapping[str, float] | None = None,
        packed: bool = False,
        pad_token_id: int = 0,
        side: Side = "left",
        device: Device = "cpu",
    ) -> Batch:
        """Build a batch from columns of records, each copied once.

        Args:
            records: `Experiences`, or a list of records, except preference pairs.
            columns: Fields of the batch to read beside tokens, media and ids, which every record must have. `None`:
                all that any record has; the others are `None`. Without `action_mask`, the mask covers every response
                token.
            fill: By name, the value of each token of a record that lacks a column, such as `{"advantages": 0.0}`. By
                default True for `action_mask` and 1 for `loss_weights`.
            packed: Whether rows are packed end to end instead of padded.
            pad_token_id: Token id of the padding.
            side: Side of the padding: `left`, so that all rows end together; `right`, after the responses, which begin
                together.
            device: Device of the batch. Columns are copied there without padding, in one transfer.

        Returns:
            The batch.

        Raises:
            ValueError: If a record lacks a column without a value in `fill`, a column is unknown or has another length
                than its record, or a record is a preference pair.
        """
        read = read_columns(as_experiences(records), columns, fill)
        target = torch.device(device)
        flat: dict[str, Column] = {"tokens": read.tokens, **read.by_response_token}
        if target.type != "cpu":
            lengths = [read.lengths, *[read.response_lengths] * len(read.by_response_token)]
            copies = copy_columns(list(zip(flat.values(), lengths, strict=True)), target)
            flat = dict(zip(flat, copies, strict=True))
            target = copies[0].device  # with an index, as spans know it
        fields: dict[str, Any] = {}
        if packed:
            for name, column in flat.items():
                row_lengths = read.lengths if name == "tokens" else read.response_lengths
                fields[name] = Rows(concatenated(column, row_lengths).contiguous(), row_lengths.tolist())
            fields["tokens"] = fields["tokens"].apply(torch.Tensor.long)
            if "action_mask" not in fields:
                total = int(read.response_lengths.sum())
                mask = torch.ones(total, dtype=torch.bool, device=target)
                fields["action_mask"] = Rows(mask, read.response_lengths.tolist())
        else:
            tokens, responses = fields["spans"] = _spans(read.lengths, read.response_lengths, side)
            pad_token_id = check_int("pad_token_id", pad_token_id)
            fields["tokens"] = tokens.pad(flat.pop("tokens"), pad_token_id, dtype=torch.int64)
            fields["attention_mask"] = tokens.mask(torch.int64, target)
            for name, column in flat.items():
                fields[name] = responses.pad(column, FIELDS[name].pad if name in FIELDS else 0)
            if "action_mask" not in fields:
                fields["action_mask"] = responses.mask(torch.bool, target)
        extra: dict[str, Tokens] = {}
        for name in read.by_response_token:
            if name not in _FIELDS:
                extra[name] = fields.pop(name)
        if read.by_record:
            extra |= move_to_device(read.by_record, target)
        if read.media:
            fields["media"] = move_to_device(read.media, target)
        reward = None if read.reward is None else move_to_device(read.reward, target)
        return cls(**fields, eids=read.eids, reward=reward, extra=extra)

    # --- properties ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.tokens) if isinstance(self.tokens, Rows) else int(self.tokens.shape[0])

    def __repr__(self) -> str:
        if isinstance(self.tokens, Rows):
            return f"Batch({len(self)} records, packed, {len(self.tokens.values)} tokens)"
        count, width = self.tokens.shape
        return f"Batch({count} records, padded, tokens {count}x{width}, responses {count}x{self.response_width})"

    def __eq__(self, other: object) -> bool:
        """Equal if every field but `spans` is: tensors by type, shape and value, NaN equal to NaN."""
        if not isinstance(other, Batch):
            return NotImplemented
        return all(same(getattr(self, name), getattr(other, name)) for name in _FIELDS if name != "spans")

    __hash__ = None  # type: ignore[assignment]

    @property
    def layout(self) -> Literal["padded", "packed"]:
        """`padded` or `packed`."""
        return "packed" if isinstance(self.tokens, Rows) else "padded"

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return self.tokens.values.device if isinstance(self.tokens, Rows) else self.tokens.device

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """[B + 1] int32: offsets of the tokens of each record in a packed batch."""
        return self._packed("cu_seqlens", self.tokens).cu_seqlens

    @property
    def response_cu_seqlens(self) -> torch.Tensor:
        """[B + 1] int32: offsets of the response of each record in the response-axis fields of a packed batch."""
        return self._packed("response_cu_seqlens", self.action_mask).cu_seqlens

    @staticmethod
    def _packed(name: str, column: Tokens) -> Rows:
        if not isinstance(column, Rows):
            raise ValueError(f"{name}: the batch is padded; pack() gives one that has it")
        return column

    @property
    def max_seqlen(self) -> int:
        """Number of tokens of the longest record."""
        if isinstance(self.tokens, Rows):
            return max(self.tokens.lengths, default=0)
        return int(self.tokens.shape[1])

    @property
    def response_width(self) -> int:
        """R: response slots of a padded row, or the longest response of a packed batch."""
        mask = self.action_mask
        return max(mask.lengths, default=0) if isinstance(mask, Rows) else int(mask.shape[1])

    @property
    def position_ids(self) -> torch.Tensor:
        """[1, tokens] packed, restarting from 0 with each record; [B, S] padded, from 0 on the first token of each row,
        1 on padding."""
        if isinstance(self.tokens, Rows):
            rows = self.tokens
            starts = torch.from_numpy(rows.offsets[:-1]).to(self.device)
            lengths = torch.tensor(rows.lengths, dtype=torch.int64, device=self.device)
            positions = torch.arange(len(rows.values), device=self.device)
            return (positions - torch.repeat_interleave(starts, lengths)).unsqueeze(0)
        if self.attention_mask is None:
            return torch.arange(self.tokens.shape[1], device=self.device).expand(self.tokens.shape)
        attended = self.attention_mask.long()
        counted: torch.Tensor = attended.cumsum(-1) - 1
        return counted.masked_fill(attended == 0, 1)

    @cached_property
    def _row_spans(self) -> tuple[Spans, Spans]:
        """Positions of the tokens, and of the response slots, in padded rows."""
        if self.spans is not None:
            return self.spans
        mask = self.attention_mask
        (count, width), slots = self.input_shape, self.response_width
        first, last = np.zeros(count, dtype=np.int64), np.full(count, width, dtype=np.int64)
        if mask is not None and width:
            attended = (mask != 0).cpu().numpy()
            some = attended.any(-1)
            first = np.where(some, attended.argmax(-1), width)
            last = np.where(some, width - attended[:, ::-1].argmax(-1), width)
        begin = np.maximum(first - (width - slots), 0)
        end = np.maximum(np.minimum(last - (width - slots), slots), begin)
        return Spans(last - first, first, width), Spans(end - begin, begin, slots)

    def row_bounds(self) -> list[tuple[int, int, int]]:
        """[B] Return for each record its row in the model input, and its start and length in that row."""
        if isinstance(self.tokens, Rows):
            return [(0, start, stop - start) for start, stop in pairwise(self.tokens.offsets.tolist())]
        spans = self._row_spans[0]
        starts, lengths = spans.starts.tolist(), spans.lengths.tolist()
        return [(i, start, length) for i, (start, length) in enumerate(zip(starts, lengths, strict=True))]

    def token_rows(self) -> list[torch.Tensor]:
        """[B] Return the token ids of each record without padding, as views."""
        if isinstance(self.tokens, Rows):
            return list(self.tokens)
        return [self.tokens[row, start : start + length] for row, start, length in self.row_bounds()]

    def flatten_response(self, column: Tokens) -> torch.Tensor:
        """Remove the padding of a response-axis column of this batch, such as the output of a model.

        Args:
            column: [B, R, ...] or packed.

        Returns:
            [response tokens, ...] All rows end to end.
        """
        if isinstance(column, Rows):
            return column.values
        return (self.spans or self._row_spans)[1].unpad(column)

    # --- layouts ------------------------------------------------------------------------------------------------------

    def pack(self) -> Batch:
        """Return the same records packed; a packed batch is returned as it is."""
        if isinstance(self.tokens, Rows):
            return self
        spans = dict(zip(("tokens", "responses"), self._row_spans, strict=True))

        def pack_column(column: torch.Tensor, axis: str) -> Rows:
            return Rows(spans[axis].unpad(column), spans[axis].lengths.tolist())

        return self._lay_out(pack_column, attention_mask=None, spans=None)

    def pad(self, pad_token_id: int = 0, side: Side = "left") -> Batch:
        """Return the same records padded, with as little padding as possible.

        Args:
            pad_token_id: Token id of padding.
            side: Side on which prompts are padded; see `from_records`.

        Returns:
            The padded batch.
        """
        packed = self.pack()
        lengths = [np.array(column.lengths, dtype=np.int64) for column in (packed.tokens, packed.action_mask)]  # type: ignore[union-attr]
        tokens, responses = spans = _spans(lengths[0], lengths[1], side)
        fill = check_int("pad_token_id", pad_token_id)

        def pad_column(column: Rows, axis: str) -> torch.Tensor:
            return tokens.pad(column.values, fill) if axis == "tokens" else responses.pad(column.values, 0)

        mask = tokens.mask(torch.int64, self.device)
        return packed._lay_out(pad_column, attention_mask=mask, spans=spans)

    def _lay_out(self, lay_out: Callable[[Any, str], Any], **changes: Any) -> Batch:
        changes["tokens"] = lay_out(self.tokens, "tokens")
        for name in ("action_mask", *RESPONSE_COLUMNS):
            column = getattr(self, name)
            changes[name] = None if column is None else lay_out(column, "responses")
        extra = {name: lay_out(col, "responses") if name in FIELDS else col for name, col in self.extra.items()}
        return dataclasses.replace(self, **changes, extra=extra)

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Cut the batch into parts of `sizes` records, which share its memory.

        Args:
            sizes: How many records each part has, all in all those of the batch.

        Returns:
            The parts, as wide as the batch if it is padded.

        Raises:
            ValueError: The sizes do not add up to the records of the batch.

        >>> from rollbook import Experience
        >>> batch = Batch.from_records(Experiences([Experience(tokens=[1, 2, 3]), Experience(tokens=[4, 5])]))
        >>> [part.tokens.tolist() for part in batch.split([1, 1])]
        [[[1, 2, 3]], [[0, 4, 5]]]
        """
        if sum(sizes) != len(self) or any(size < 0 for size in sizes):
            raise ValueError(f"sizes: got {list(sizes)}, expected sizes that add up to {len(self)} records")
        bounds = list(pairwise(np.cumsum([0, *sizes]).tolist()))
        return [self._slice(start, stop) for start, stop in bounds]

    def _slice(self, start: int, stop: int) -> Batch:
        def slice_rows(column: Tokens | list[Any] | None) -> Any:
            if not isinstance(column, Rows):
                return None if column is None else column[start:stop]
            offsets = column.offsets
            return Rows(column.values[int(offsets[start]) : int(offsets[stop])], column.lengths[start:stop])

        changes = {name: slice_rows(getattr(self, name)) for name in _FIELDS if name not in ("extra", "media", "spans")}
        changes["extra"] = {name: slice_rows(column) for name, column in self.extra.items()}
        changes["media"] = {name: parts[start:stop] for name, parts in self.media.items()}
        if self.spans is not None:
            cuts = [Spans(s.lengths[start:stop], s.starts[start:stop], s.width) for s in self.spans]
            changes["spans"] = tuple(cuts)
        return Batch(**changes)

    # --- devices ------------------------------------------------------------------------------------------------------

    def to_device(self, device: Device) -> Batch:
        """Copy the batch to a device.

        Args:
            device: The device.

        Returns:
            The batch on the device; itself, if it is there already.
        """
        if self.device == torch.device(device):
            return self
        return self._change(lambda value: move_to_device(value, device))

    def pin_memory(self) -> Batch:
        """Copy the batch to page-locked memory, from which a device copies without blocking."""
        return self._change(pin_memory)

    def _change(self, change: Callable[[Any], Any]) -> Batch:
        names = [name for name in _FIELDS if name not in ("eids", "spans")]
        return dataclasses.replace(self, **{name: change(getattr(self, name)) for name in names})

    # --- models -------------------------------------------------------------------------------------------------------

    @property
    def input_shape(self) -> tuple[int, int]:
        """[B, S] or, packed, [1, tokens]: the shape of a model's `input_ids`."""
        if isinstance(self.tokens, Rows):
            return 1, len(self.tokens.values)
        return int(self.tokens.shape[0]), int(self.tokens.shape[1])

    def model_inputs(
        self, get_rope_index: Callable[..., Any] | None = None, *, config: ModelConfig | None = None
    ) -> dict[str, Any]:
        """Build the keyword arguments of a transformers model.

        Padded: `input_ids`, `attention_mask`, `position_ids`. Packed: `input_ids` [1, tokens], `position_ids` that
        restart with each record, `use_cache=False`, and the arguments of attention over ragged input (`cu_seq_lens_q`,
        `cu_seq_lens_k`, `max_length_q`, `max_length_k`). Media come under the model's names.

        A model whose images have a grid computes spatial positions itself, so padded batches with grids have no
        `position_ids`; packed ones need `get_rope_index`, and then have [4, 1, tokens].

        Args:
            get_rope_index: The method of that name of a model with spatial positions.
            config: The model's configuration, from whose placeholder ids `mm_token_type_ids` are derived for records
                with grids that came without. Defaults to that of the model whose method `get_rope_index` is.

        Returns:
            The arguments by name.

        Raises:
            ValueError: If a batch with grids is packed without `get_rope_index`, or has no `mm_token_type_ids` and no
                `config` to derive them from.
        """
        inputs: dict[str, Any] = {}
        if isinstance(self.tokens, Rows):
            bounds = self.tokens.cu_seqlens
            inputs["input_ids"] = self.tokens.values.unsqueeze(0)
            inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            inputs |= {"max_length_q": self.max_seqlen, "max_length_k": self.max_seqlen}
            # With a cache, eager and SDPA attention would not look for where records begin.
            inputs["use_cache"] = False
        else:
            inputs["input_ids"] = self.tokens
            if self.attention_mask is not None:
                inputs["attention_mask"] = self.attention_mask
        config = get_model_config(get_rope_index) if config is None else config
        inputs |= media_inputs(self, config) if self.media else {}
        if not self.media or not any(grid in inputs for grid in GRIDS):
            inputs["position_ids"] = self.position_ids
        elif get_rope_index is not None:
            inputs["position_ids"] = rope_positions(self, get_rope_index, config)
        elif self.layout == "packed":
            raise ValueError(
                "get_rope_index: got None, expected the model's method: a packed batch with image or video grids needs "
                "positions in space that restart with each record"
            )
        elif TYPES not in inputs:
            raise ValueError(
                f"media[{TYPES!r}]: got None beside image or video grids, expected it, or config=model.config to "
                "derive it from placeholder ids: without it, a model has no positions in space"
            )
        return inputs


_FIELDS = tuple(spec.name for spec in dataclasses.fields(Batch))


def _spans(lengths: Lengths, response_lengths: Lengths, side: str) -> tuple[Spans, Spans]:
    """Compute the positions of tokens and responses in padded rows."""
    slots = int(response_lengths.max(initial=0))
    if side == "left":
        width = int(lengths.max(initial=0))
        return Spans.right_aligned(lengths, width), Spans.right_aligned(response_lengths, slots)
    if side != "right":
        raise ValueError(f"side: got {side!r}, expected 'left' or 'right'")
    prompts = lengths - response_lengths
    longest = int(prompts.max(initial=0))
    starts = np.zeros_like(response_lengths)
    return Spans(lengths, longest - prompts, longest + slots), Spans(response_lengths, starts, slots)


__all__ = ["Batch", "Device", "Side", "Tokens"]
