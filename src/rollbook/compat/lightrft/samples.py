"""The rollout of LightRFT's maker: prompts, `Samples`, their batches and records.

Invariant: tokens are those that the engine sampled, without additions or omissions. In a padded batch, prompts end and
responses begin at the same column, and slot j of a row belongs to token j of its response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.inputs import group_id, run_id
from rollbook.compat.lightrft.batch import ExperienceBatch, Samples, TokenColumn, from_experiences
from rollbook.compat.lightrft.models import concatenate_samples, make_sampling
from rollbook.compat.lightrft.ragged_batch import action_starts, find_spans, predicted_mask
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.ids import EID
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup
from rollbook.core.ragged import compute_offsets
from rollbook.core.rows import NUMPY, Rows, Spans, memory
from rollbook.core.sampling import Prompt, Sample, Sampling, as_media

PromptsLike: TypeAlias = str | Prompt | Sequence[Any]
"""A prompt or a list of them: texts, chats, token ids or `Prompt`s."""


def make_prompts(
    all_prompts: PromptsLike | None,
    *,
    labels: Sequence[Any] | None = None,
    references: Sequence[Any] | None = None,
    images: Sequence[Any] | None = None,
    videos: Sequence[Any] | None = None,
) -> list[Prompt]:
    """Build prompts, each with its label, reference and media. A bare string is one prompt.

    Args:
        all_prompts: A prompt or a list of them.
        labels: A label for each prompt, or `None`; likewise `references`, `images` and `videos`.

    >>> prompts = make_prompts(["a", "b"], labels=["x", None], images=[None, ["one.png", "two.png"]])
    >>> [(prompt.text, prompt.label, prompt.images) for prompt in prompts]
    [('a', 'x', ()), ('b', None, ('one.png', 'two.png'))]
    """
    if all_prompts is None:
        raise ValueError("all_prompts: got None, expected prompts")
    listed = [all_prompts] if isinstance(all_prompts, (str, Prompt)) else list(all_prompts)
    if listed and isinstance(listed[0], Mapping) and "role" in listed[0]:
        listed = [listed]
    prompts = [Prompt.of(prompt) for prompt in listed]
    columns = {"label": labels, "reference": references, "images": images, "videos": videos}
    for name, column in columns.items():
        if column is None:
            continue
        if isinstance(column, str) or len(column) != len(prompts):
            plural = name if name.endswith("s") else f"{name}s"
            shown = repr(column) if isinstance(column, str) else f"{len(column)} entries"
            raise ValueError(f"all_{plural}: got {shown}, expected {len(prompts)}, one for each prompt")
        for i, entry in enumerate(column):
            if name in ("images", "videos"):
                entry = as_media(f"all_{name}[{i}]", entry)
            if entry is not None and entry != ():
                prompts[i] = prompts[i].replace(**{name: entry})
    return prompts


_RENAMED = {"include_stop_str_in_output": "include_stop"}
_IGNORED = ("pad_token_id", "skip_special_tokens", "spaces_between_special_tokens")
"""Options of decoding and padding, which have no effect on sampled tokens."""


def maker_sampling(options: Mapping[str, Any], prompt_max_len: int, defaults: Mapping[str, Any]) -> Sampling:
    """Build `Sampling` from the options of LightRFT's maker; see `rollbook.compat.lightrft.models.make_sampling`.

    >>> options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "include_stop_str_in_output": False}
    >>> sampling = maker_sampling(options, 16, {"n": 4})
    >>> sampling.n, sampling.temperature, sampling.include_stop
    (4, 0.0, False)
    """
    renamed = {_RENAMED.get(name, name): option for name, option in options.items() if name not in _IGNORED}
    return make_sampling({**defaults, **renamed}, prompt_max_len, ())


def make_samples(
    rollouts: Sequence[Sample], *, pad_token_id: int = 0, packed: bool = False, records: Experiences | None = None
) -> Samples:
    """Convert an engine's samples to one `Samples`, padded or packed.

    Args:
        rollouts: The engine's samples.
        pad_token_id: Fills a padded matrix.
        packed: Whether to pack.
        records: The records of the samples; `None`: they are built.

    >>> from rollbook.rollout import ScriptedEngine
    >>> engine = ScriptedEngine([[20, 2], [21, 21, 2]])
    >>> samples = make_samples(engine.generate([[57, 58], [57, 58]]), packed=True)
    >>> samples.sequences.tolist(), samples.attention_mask.tolist(), samples.num_actions.tolist()
    ([[57, 58, 20, 2, 57, 58, 21, 21, 2]], [[1, 1, 1, 1, 2, 2, 2, 2, 2]], [2, 3])
    """
    if not rollouts:
        raise ValueError("rollouts: empty, expected at least one sample")
    # At least one slot: models and losses need a response axis, even if it is padding.
    tokens, spans, begin = concatenate_samples(rollouts, slots=1)
    lengths, responses = torch.from_numpy(spans.lengths), [len(sample.response_ids) for sample in rollouts]
    actions = [0 if sample.failed else length for sample, length in zip(rollouts, responses, strict=True)]
    shared: dict[str, Any] = {
        "response_length": torch.tensor(actions, dtype=torch.float32),
        "total_length": lengths.float(),
        "prompts": [_prompt_text(sample) for sample in rollouts],
        "labels": none_if_empty([sample.prompt.label for sample in rollouts]),
        "references": none_if_empty([sample.prompt.reference for sample in rollouts]),
        "pad_len": None,
        "rollouts": list(rollouts),
        "records": Experiences([sample.to_experience() for sample in rollouts]) if records is None else records,
    }
    if packed:
        numbers = torch.repeat_interleave(torch.arange(1, len(rollouts) + 1), lengths)
        return Samples(
            sequences=tokens.unsqueeze(0),
            attention_mask=numbers.unsqueeze(0),
            action_mask=None,
            num_actions=torch.tensor(responses),
            packed_seq_lens=lengths,
            **shared,
        )
    slots = spans.width - begin
    return Samples(
        sequences=spans.pad(tokens, pad_token_id),
        attention_mask=spans.mask(torch.int64),
        action_mask=Spans(actions, [0] * len(actions), slots).mask(torch.bool),
        num_actions=slots,
        packed_seq_lens=None,
        **shared,
    )


def _prompt_text(sample: Sample) -> Any:
    """Return the prompt as the user passed it, or its rendered text."""
    prompt = sample.prompt
    if prompt.text is not None:
        return prompt.text
    if sample.prompt_text is not None:
        return sample.prompt_text
    return prompt.messages if prompt.messages is not None else list(prompt.token_ids or ())


def none_if_empty(entries: list[Any]) -> list[Any] | None:
    """Return a list of entries, or `None` if all are `None`."""
    return None if all(entry is None for entry in entries) else entries


def batch_from_samples(samples: Samples) -> ExperienceBatch:
    """Build the batch of samples before models and rewards: tokens, masks, labels.

    Samples of an engine also have ids, media, finish reasons, and in `extras` the engine's log-probs and policy
    versions.
    """
    if not isinstance(samples, Samples):
        raise ValueError(f"samples: got {type(samples).__name__}, expected Samples")
    if samples.sequences is None or samples.sequences.dim() != 2:
        raise ValueError("samples.sequences: expected a matrix (B, S), or (1, tokens) packed")
    info: dict[str, Any] = dict(zip(("response_length", "total_length"), sample_lengths(samples), strict=True))
    is_packed = samples.packed_seq_lens is not None
    sequences, attention, action_mask = _packed_fields(samples) if is_packed else _padded_fields(samples)
    if samples.rollouts is None:
        batch = ExperienceBatch(
            sequences=sequences,
            action_log_probs=None,
            base_action_log_probs=None,
            values=None,
            returns=None,
            advantages=None,
            attention_mask=attention,
            action_mask=action_mask,
            info=info,
            labels=samples.labels,
            references=samples.references,
            ids=None if samples.ids is None else list(samples.ids),
        )
        batch.action_mask = predicted_mask(batch)
        return batch
    records = samples.records
    if records is None:
        records = Experiences([sample.to_experience() for sample in samples.rollouts])
    batch = from_experiences(records, packing_samples=is_packed, layout="prompt_left_response_right")
    # If an engine did not report the prompt's ids, the first token stays in this mask; training on the records masks it
    # (`rollbook.batch.columns.mask_unpredicted`).
    batch.sequences, batch.attention_mask, batch.action_mask = sequences, attention, action_mask
    batch.extras = _engine_columns(batch, samples, is_packed)
    batch.action_log_probs = None
    batch.info = info | {"finish_reason": [sample.finish_reason for sample in samples.rollouts]}
    if any(sample.failed for sample in samples.rollouts):
        batch.info["error"] = [sample.error for sample in samples.rollouts]
    has_images = any(sample.prompt.images for sample in samples.rollouts)
    elsewhere = (*_BATCH_KEYS, "images") if has_images else _BATCH_KEYS
    infos = records.values("info")
    for key in dict.fromkeys(key for entries in infos for key in entries if key not in elsewhere):
        batch.info.setdefault("info", {})[key] = [entries.get(key) for entries in infos]
    batch.labels, batch.references = samples.labels, samples.references
    if has_images:
        batch.raw_images = [list(sample.prompt.images) or None for sample in samples.rollouts]
    return batch.to_device(samples.sequences.device)


_BATCH_KEYS = ("label", "reference", "error")
"""Keys of a record's `info` that a batch has fields for."""


def _packed_fields(samples: Samples) -> tuple[Rows, Rows, Rows]:
    """Return tokens, attention mask and action mask of packed samples."""
    lengths = torch.as_tensor(samples.packed_seq_lens).tolist()
    actions = torch.as_tensor(samples.num_actions).reshape(-1).tolist()
    if len(actions) != len(lengths):
        raise ValueError(f"samples.num_actions: got {len(actions)} entries, expected {len(lengths)}, one per sample")
    total = samples.sequences.shape[1]
    if sum(lengths) != total:
        raise ValueError(f"samples.packed_seq_lens: got a sum of {sum(lengths)}, expected {total}, the tokens")
    for i, (length, count) in enumerate(zip(lengths, actions, strict=True)):
        if count > length:
            raise ValueError(f"samples.num_actions[{i}]: got {count}, expected at most the sample's {length} tokens")
    mask = torch.ones(sum(actions), dtype=torch.bool, device=samples.sequences.device)
    if samples.rollouts is not None:
        for sample, (start, stop) in zip(samples.rollouts, pairwise(compute_offsets(actions).tolist()), strict=True):
            mask[start:stop] = not sample.failed
    sequences = Rows(samples.sequences[0], lengths)
    return sequences, sequences.apply(torch.ones_like), Rows(mask, actions)


def _padded_fields(samples: Samples) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return tokens, attention mask and action mask of padded samples."""
    attention, action_mask = samples.attention_mask, samples.action_mask
    if action_mask is None:
        raise ValueError("samples.action_mask: got None, expected (B, A); or packed_seq_lens, if they are packed")
    action_mask = action_mask if action_mask.dtype == torch.bool else action_mask != 0
    return samples.sequences, None if attention is None else _attended(attention, action_mask), action_mask


def _attended(attention: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
    """Return the attention mask with every action attended; some masks lack the last one."""
    begin = attention.shape[1] - action_mask.shape[1]
    if attention.device.type == "cpu" and attention.dtype in NUMPY:
        unattended = memory(attention)[:, begin:] == 0  # in a tenth of torch's time
        if not (memory(action_mask) & unattended).any():
            return attention
    attention = attention.clone()
    attention[:, begin:] |= action_mask.to(attention.dtype)
    return attention


def _are_floats(lengths: Any) -> bool:
    return type(lengths) is torch.Tensor and lengths.is_cpu and lengths.dtype == torch.float32


def sample_lengths(samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    """[B] Return the number of actions and of tokens of samples as float32; counted if samples lack them."""
    responses, totals = samples.response_length, samples.total_length
    if _are_floats(responses) and _are_floats(totals) and samples.sequences.is_cpu:
        return responses, totals
    device = samples.sequences.device
    if responses is None:
        is_packed, mask = samples.packed_seq_lens is not None, samples.action_mask
        counts = [0] * len(samples.sequences) if mask is None else (mask != 0).sum(-1)
        responses = samples.num_actions if is_packed else counts
    if totals is None and samples.packed_seq_lens is not None:
        totals = samples.packed_seq_lens
    elif totals is None:
        tokens, mask = samples.sequences, samples.attention_mask
        totals = torch.full((len(tokens),), tokens.shape[1]) if mask is None else mask.sum(-1)
    return torch.as_tensor(responses).float().to(device), torch.as_tensor(totals).float().to(device)


def _engine_columns(batch: ExperienceBatch, samples: Samples, is_packed: bool) -> dict[str, Any] | None:
    """Return the engine's columns in the layout of the batch: sampling log-probs, policy versions, routed experts."""
    extras = dict(batch.extras or {})
    if batch.action_log_probs is not None:
        extras["logprobs"] = batch.action_log_probs
    if not is_packed:
        slots = int(samples.num_actions)  # type: ignore[arg-type]
        for name, matrix in extras.items():
            if matrix.shape[1] < slots:  # no response: the only slot is padding
                extras[name] = matrix.new_zeros((len(samples.sequences), slots, *matrix.shape[2:]))
    return extras or None


# --- records ----------------------------------------------------------------------------------------------------------


def records_of_samples(parts: Sequence[Samples], batches: Sequence[ExperienceBatch]) -> Experiences:
    """Return the records of samples: the engine's, or else new ones with the tokens of the batches."""
    records = []
    for i, (samples, batch) in enumerate(zip(parts, batches, strict=True)):
        if samples.rollouts is not None:
            rows = samples.records
            records.append(Experiences([s.to_experience() for s in samples.rollouts]) if rows is None else rows)
            continue
        packed = batch.pack()
        columns = zip(packed.sequences, packed.action_mask, strict=True)
        records.append(
            Experiences(
                [
                    Experience(
                        eid=EID(batch=i, task=row),
                        tokens=tokens.cpu(),
                        prompt_length=len(tokens) - len(mask),
                        action_mask=mask.cpu(),
                        experience_type="multi_turn",
                    )
                    for row, (tokens, mask) in enumerate(columns)
                ]
            )
        )
    return records[0] if len(records) == 1 else Experiences.concat(records)


# --- batches of a rollout ------------------------------------------------------------------------------------------


class RolloutBatches:
    """The batches of a rollout, read and written as N rows.

    Args:
        batches: The batches.

    >>> def batch(rewards):
    ...     ones = torch.ones(len(rewards), 2)
    ...     return ExperienceBatch(ones.long(), ones, *[None] * 4, ones.long(), ones.bool(),
    ...                            {"reward": torch.tensor(rewards)})
    >>> rollout = RolloutBatches([batch([1.0, 0.0]), batch([2.0])])
    >>> rollout.numbers("reward").tolist(), rollout.groups(per_group=3).tolist(), len(rollout.rows("action_log_probs"))
    ([1.0, 0.0, 2.0], [0, 0, 0], 3)
    >>> rollout.set_field("advantages", Rows(torch.arange(6.0), [2, 2, 2]))
    >>> rollout.batches[1].advantages
    tensor([[4., 5.]])
    """

    def __init__(self, batches: Sequence[ExperienceBatch]) -> None:
        self.batches = list(batches)
        self.sizes = [_count(batch) for batch in self.batches]

    @cached_property
    def _spans(self) -> list[Spans | None]:
        return [_response_spans(batch) for batch in self.batches]

    def __len__(self) -> int:
        return sum(self.sizes)

    # --- per token ----------------------------------------------------------------------------------------------

    def rows(self, name: str) -> Rows | None:
        """Return a response-axis field of all rows on the CPU; `None` if a batch lacks it (a mask is then True)."""
        column = self.column(name)
        return None if column is None else Rows(*column)

    def column(self, name: str) -> tuple[torch.Tensor, list[int]] | None:
        """Return `rows` as concatenated values and lengths, which is faster than a tensor for each row."""
        parts = []
        for batch, spans in zip(self.batches, self._spans, strict=True):
            value = _field(batch, name)
            if value is None and name == "action_mask":
                value = _all_true(batch)
            if value is None:
                return None
            parts.append(_unpad(value, spans))
        if not parts:
            return torch.zeros(0, dtype=torch.bool if name == "action_mask" else torch.float32), []
        return _concatenate(parts)

    def token_rewards(self) -> tuple[Rows, torch.Tensor] | None:
        """Return the token rewards of all rows on the CPU, 0 for rows without, and [N] bool: which rows have them.

        `None` if no row has token rewards.
        """
        name = "extras.token_level_reward"
        if all(_field(batch, name) is None for batch in self.batches):
            return None
        parts, lengths, has = [], list[int](), []
        for batch, spans, size in zip(self.batches, self._spans, self.sizes, strict=True):
            value = _field(batch, name)
            values, batch_lengths = _unpad(_all_true(batch) if value is None else value, spans)
            parts.append(torch.zeros(len(values)) if value is None else values.float())
            lengths += batch_lengths
            absent = range(size) if value is None else batch.origin.absent.get(name, ())
            has += [row not in absent for row in range(size)]
        return Rows(torch.cat(parts), lengths), torch.tensor(has)

    def compute(self, compute: Callable[[ExperienceBatch], Any]) -> tuple[torch.Tensor, list[int]]:
        """Call a function on each batch, and concatenate its results, (B, A) or packed `Rows`, to a `column`."""
        parts = zip(self.batches, self._spans, strict=True)
        return _concatenate([_unpad(compute(batch), spans) for batch, spans in parts])

    def token_count(self) -> int:
        """Count the attended tokens."""
        total = 0
        for batch in self.batches:
            mask = batch.attention_mask
            if batch.layout == "packed":
                total += len(batch.sequences.values)
            elif mask is None:
                total += batch.sequences.numel()
            else:
                by_numpy = mask.is_cpu and mask.dtype in NUMPY  # in a fraction of torch's time
                total += int((memory(mask) if by_numpy else mask).sum())
        return total

    def set_field(self, name: str, rows: Rows) -> None:
        """Set a response-axis field of each batch (`extras.NAME` for fields that a batch does not have)."""
        self.set_column(name, rows.values, rows.lengths)

    def set_column(self, name: str, values: torch.Tensor, lengths: list[int]) -> None:
        """Set a response-axis field of each batch from concatenated values."""
        for batch, value in zip(self.batches, self._lay_out(values, lengths), strict=True):
            _set_field(batch, name, value)

    def lay_out(self, rows: Rows) -> list[Any]:
        """Split a response-axis column by batch, in the layout of each: (B, A), 0 on padding, or packed `Rows`."""
        return self._lay_out(rows.values, rows.lengths)

    def _lay_out(self, values: torch.Tensor, lengths: list[int]) -> list[Any]:
        parts: list[Any] = []
        start = row = 0
        for batch, spans, size in zip(self.batches, self._spans, self.sizes, strict=True):
            stop = start + sum(lengths[row : row + size])
            batch_values = values[start:stop].to(batch_device(batch))
            parts.append(Rows(batch_values, lengths[row : row + size]) if spans is None else spans.pad(batch_values, 0))
            start, row = stop, row + size
        return parts

    def gather(self, name: str, parts: Sequence[Any]) -> Rows:
        """Invert `lay_out` for the results of a function `name` for each batch."""
        columns = []
        for i, (batch_values, spans, size) in enumerate(zip(parts, self._spans, self.sizes, strict=True)):
            if spans is None:
                if not isinstance(batch_values, list) or len(batch_values) != size:
                    raise ValueError(
                        f"{name}: got {_describe(batch_values)} for batch {i}, expected {size} 1-D tensors"
                    )
            elif not isinstance(batch_values, torch.Tensor) or batch_values.shape != (size, spans.width):
                raise ValueError(
                    f"{name}: got {_describe(batch_values)} for batch {i}, expected [{size}, {spans.width}]"
                )
            columns.append(_unpad(batch_values, spans))
        return Rows(*_concatenate(columns))

    # --- per row ------------------------------------------------------------------------------------------------

    def numbers(self, key: str) -> torch.Tensor:
        """[N] Return an entry of `info` as float32 numbers on the CPU; `None` becomes NaN."""
        parts = []
        for i, batch in enumerate(self.batches):
            value = (batch.info or {}).get(key)
            if value is None:
                raise ValueError(f"experiences[{i}].info[{key!r}]: missing, expected a number for each sample")
            if isinstance(value, list):
                value = [math.nan if number is None else number for number in value]
            batch_numbers = torch.as_tensor(value, dtype=torch.float32).detach().cpu().reshape(-1)
            if len(batch_numbers) != self.sizes[i]:
                raise ValueError(
                    f"experiences[{i}].info[{key!r}]: got {len(batch_numbers)} numbers, "
                    f"expected {self.sizes[i]}, one per sample"
                )
            parts.append(batch_numbers)
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros(0)

    def set_numbers(self, key: str, values: torch.Tensor) -> None:
        """Set numbers [N] in the `info` of each batch."""
        for batch, batch_numbers in zip(self.batches, self.split(values), strict=True):
            batch.info = {**(batch.info or {}), key: batch_numbers.to(batch_device(batch))}

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Split numbers [N] by batch."""
        if len(self.sizes) == 1:
            return [values]
        return list(torch.split(values, self.sizes)) if self.sizes else []

    def entries(self, key: str) -> list[Any] | None:
        """[N] Return an entry of `info` for each row; `None` if no batch has it."""
        entries: list[Any] = []
        for batch, size in zip(self.batches, self.sizes, strict=True):
            info = batch.info or {}
            column = info.get(key, (info.get("info") or {}).get(key))
            if isinstance(column, torch.Tensor):
                column = column.tolist()
            entries += [None] * size if column is None else list(column)
        return none_if_empty(entries)

    def ids(self) -> list[EID] | None:
        """[N] Return the ids of rows; `None` unless every row has one."""
        if any(size and not batch.ids for batch, size in zip(self.batches, self.sizes, strict=True)):
            return None
        ids = [eid for batch in self.batches for eid in batch.ids or ()]
        return None if any(eid is None for eid in ids) else ids  # type: ignore[return-value]

    def groups(self, per_group: int, process_group: ProcessGroup = SINGLE_PROCESS) -> Sequence[Any] | NDArray[np.int64]:
        """[N] Return the group of each row: by id, or, without ids, `per_group` consecutive rows of each process."""
        ids = self.ids()
        if ids is not None:
            return [group_id(eid) for eid in ids]
        if len(self) % per_group:
            raise ValueError(
                f"experiences: got {len(self)} samples without ids, expected a multiple of n_samples_per_prompt "
                f"({per_group}), to group them by position"
            )
        places = np.arange(len(self) // per_group).repeat(per_group)
        return (
            places
            if process_group is SINGLE_PROCESS
            else [f"process {process_group.rank}, group {index}" for index in places]
        )

    def runs(self) -> list[Any] | None:
        """[N] Return the run of each row; `None` without ids, where each row is a run."""
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


def _describe(value: TokenColumn) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _unpad(value: TokenColumn, spans: Spans | None) -> tuple[torch.Tensor, list[int]]:
    """Return a response-axis field of one batch without padding, on the CPU, as concatenated rows and lengths."""
    if spans is not None and isinstance(value, torch.Tensor):
        return spans.unpad(value.detach().cpu()), spans.lengths.tolist()
    rows = value if isinstance(value, Rows) else Rows(value)
    return rows.values.detach().to("cpu", copy=True), rows.lengths


def _concatenate(columns: list[tuple[torch.Tensor, list[int]]]) -> tuple[torch.Tensor, list[int]]:
    if len(columns) == 1:
        return columns[0]
    values = [values for values, _ in columns]
    return torch.cat(values) if values else torch.zeros(0), [n for _, lengths in columns for n in lengths]


def _count(batch: ExperienceBatch) -> int:
    """Return the number of rows of a batch, which may have rewards only, without tokens."""
    if batch.sequences is not None:
        return len(batch)
    return len((batch.info or {}).get("reward", ()))


def _response_spans(batch: ExperienceBatch) -> Spans | None:
    """Return the spans of the response slots of a padded batch; `None` for a packed one."""
    if batch.layout == "packed":
        return None
    width = int(batch.sequences.shape[1]) if batch.sequences is not None else 0
    columns = [column for column in (_field(batch, name) for name in _RESPONSE_FIELDS) if column is not None]
    if not columns:
        raise ValueError("experience: got no response-axis field, expected action_mask or action_log_probs")
    slots = int(columns[0].shape[1])
    return find_spans(batch.attention_mask, len(batch), width, slots, action_starts(batch, slots))[1]


_RESPONSE_FIELDS = ("action_mask", "action_log_probs", "values", "kl", "advantages", "returns", "base_action_log_probs")


def _all_true(batch: ExperienceBatch) -> Any:
    for name in _RESPONSE_FIELDS:
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


def _set_field(batch: ExperienceBatch, name: str, value: TokenColumn) -> None:
    if name.startswith("extras."):
        batch.extras = {**(batch.extras or {}), name.removeprefix("extras."): value}
    else:
        setattr(batch, name, value)


def batch_device(batch: ExperienceBatch) -> torch.device:
    """Return the device of the tokens of a batch."""
    sequences = batch.sequences
    if isinstance(sequences, torch.Tensor):
        return sequences.device
    if isinstance(sequences, Rows):
        return sequences.values.device
    return sequences[0].device if len(sequences) else torch.device("cpu")
