"""Batches and buffer items as sources of trajectories.

Invariant: the tokens decide. Of the other fields, those with an entry for each place of the tokens are kept, a number
for each sample stays one, and anything else is reported: a field that does not fit costs only itself. Nothing that the
caller passed is changed, not even by being read.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.compat.lightrft.batch import ExperienceBatch
from rollbook.compat.lightrft.buffer_item import BufferItem, peek
from rollbook.compat.lightrft.layouts import sheet_of_batch
from rollbook.compat.lightrft.ragged_batch import SAMPLE_LISTS, Sheet
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.fields import BATCH_FIELDS, BATCH_MEDIA
from rollbook.core.sampling import Sample
from rollbook.io.trajectories import RecordSource, TrajectorySource, to_numpy

_RESPONSE_FIELDS = tuple(name for name, field in BATCH_FIELDS.items() if field.axis == "response")
_VALUE_FIELDS = tuple(name for name in _RESPONSE_FIELDS if name != "action_mask")
_CHECK_ORDER = ("attention_mask", "action_mask", *_VALUE_FIELDS, "action_starts", "info", *SAMPLE_LISTS)
"""Masks first: the others are checked against them."""


def read_sources(experiences: Any, problems: list[str]) -> Iterator[TrajectorySource]:
    """Read batches, buffer items and records, in any mix. What cannot be read is reported in `problems`."""
    if isinstance(experiences, (ExperienceBatch, Experience, Experiences, BufferItem)):
        experiences = [experiences]
    for number, entry in enumerate(experiences or ()):
        try:
            yield _source(number, entry, problems)
        except Exception as error:
            problems.append(f"experiences[{number}]: {error}")


def _source(number: int, entry: Any, problems: list[str]) -> TrajectorySource:
    if isinstance(entry, Sample):
        entry = entry.to_experience()
    if isinstance(entry, Experience):
        return RecordSource([(number, 0)], [entry])
    if isinstance(entry, Experiences):
        return RecordSource([(number, i) for i in range(len(entry))], entry.rows())
    if isinstance(entry, (list, tuple)) and all(isinstance(row, Experience) for row in entry):
        return RecordSource([(number, i) for i in range(len(entry))], entry)
    if isinstance(entry, BufferItem):
        return ItemSource(number, entry)
    sequences: Any = getattr(entry, "sequences", None)
    is_item = isinstance(sequences, torch.Tensor) and sequences.dim() == 1
    if isinstance(entry, ExperienceBatch):
        return BatchSource(
            number, dataclasses.replace(entry, sequences=sequences[None]) if is_item else entry, problems
        )
    if is_item:
        return ItemSource(number, entry)
    if isinstance(sequences, (list, torch.Tensor)):
        # A batch of LightRFT's own, or any object with its names.
        names = [field.name for field in dataclasses.fields(ExperienceBatch) if field.name != "origin"]
        fields: dict[str, Any] = {name: getattr(entry, name, None) for name in names}
        return BatchSource(number, ExperienceBatch(**fields), problems)
    raise ValueError(f"got {type(entry).__name__}, expected an experience, a batch or a buffer item")


class BatchSource(TrajectorySource):
    """The samples of a batch, padded or packed."""

    def __init__(self, experience: int, batch: ExperienceBatch, problems: list[str]) -> None:
        self.batch = batch
        info, self.shared_info = split_info(batch.info, len(batch))
        coerced = coerce_batch(dataclasses.replace(batch, info=info) if self.shared_info else batch)
        self.sheet, self.numbers = coerced.sheet, coerced.numbers
        problems += [f"experiences[{experience}]: {problem}" for problem in coerced.problems]
        super().__init__([(experience, i) for i in range(len(self.sheet))])

    def read(self, i: int, name: str) -> NDArray[Any] | None:
        if name in self.numbers:
            return self.numbers[name][i : i + 1]
        row = self.sheet.row(name, i)
        return None if row is None else to_numpy(row)

    def padded(self, i: int) -> NDArray[np.int64] | None:
        row = self.batch.sequences[i]
        return None if len(row) == self.sheet.tokens[i] else to_numpy(row).astype(np.int64)

    def extras(self, i: int) -> dict[str, Callable[[], NDArray[Any]]]:
        readers: dict[str, Callable[[], NDArray[Any]]] = {}
        for name, column in self.sheet.columns.items():
            per_token = isinstance(column, torch.Tensor) and column.dim() == 1
            if name.startswith("extras.") and per_token and i not in self.sheet.origin.absent.get(name, ()):
                readers[name.removeprefix("extras.")] = partial(self._read_column, i, name)
        return readers

    def _read_column(self, i: int, name: str) -> NDArray[Any]:
        row = self.sheet.row(name, i)
        return np.empty(0) if row is None else to_numpy(row)

    def info(self, i: int) -> Mapping[Any, Any] | None:
        info = None if self.sheet.info is None else self.sheet.infos[0][i]
        return join_info(self.batch.info or {}, info or {}, self.shared_info) if self.shared_info else info

    def entry(self, i: int, name: str) -> Any:
        return self.sheet.value(name, i)

    def slots(self, i: int) -> int:
        return int(self.sheet.responses[i])


class ItemSource(TrajectorySource):
    """One buffer item, also LightRFT's, with padding or without."""

    def __init__(self, experience: int, item: Any) -> None:
        super().__init__([(experience, 0)])
        self.item = item
        tokens = self.get("sequences")
        if tokens is None:
            raise ValueError("sequences: got None, expected token ids")
        width = len(tokens)
        widths = {name: len(row) for name in _RESPONSE_FIELDS if (row := self._row(name)) is not None}
        slots = widths.get("action_mask", max(widths.values(), default=0))
        if slots > width:
            raise ValueError(f"got {slots} response slots, expected at most its {width} tokens")
        mask = self._row("attention_mask")
        attended = np.arange(width) if mask is None or len(mask) != width else np.flatnonzero(mask)
        first, last = (int(attended[0]), int(attended[-1]) + 1) if len(attended) else (width, width)
        begin = max(self.get("action_start") or 0, first - (width - slots))
        self.widths: dict[str, int] = {"sequence": width, "response": slots}
        self.spans: dict[str, tuple[int, int]] = {
            "sequence": (first, last),
            "response": (begin, max(min(slots, last - (width - slots)), begin)),
        }

    def get(self, name: str) -> Any:
        """Return a field without changing the item: an item caches what is read as an attribute."""
        if isinstance(self.item, BufferItem):
            return peek(self.item.__dict__, name)
        return getattr(self.item, name, None)

    def _row(self, name: str) -> NDArray[Any] | None:
        row = self.get(name)
        return None if row is None else to_numpy(torch.as_tensor(row)).reshape(-1)

    def read(self, i: int, name: str) -> NDArray[Any] | None:
        row, axis = self._row(name), BATCH_FIELDS[name].axis
        if row is None or len(row) != self.widths[axis]:
            return row  # of another length: not cut
        start, stop = self.spans[axis]
        return row[start:stop]

    def extras(self, i: int) -> dict[str, Callable[[], NDArray[Any]]]:
        start, stop = self.spans["response"]
        return {
            name: partial(to_numpy, tensor[start:stop])
            for name, tensor in (self.get("extras") or {}).items()
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 1
        }

    def padded(self, i: int) -> NDArray[np.int64] | None:
        row, (start, stop) = self._row("sequences"), self.spans["sequence"]
        return None if row is None or stop - start == len(row) else row.astype(np.int64)

    def info(self, i: int) -> Mapping[Any, Any] | None:
        info: Mapping[Any, Any] | None = self.get("info")
        return info if info is None else unwrap_info(info)

    def entry(self, i: int, name: str) -> Any:
        return self.get(name)

    def slots(self, i: int) -> int:
        start, stop = self.spans["response"]
        return stop - start


# --- batches with fields that do not fit ----------------------------------------------------------------------------


@dataclasses.dataclass
class CoercedBatch:
    """The readable part of a batch."""

    sheet: Sheet
    numbers: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    """[B] Per-token fields that came as one number per sample."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """Fields that do not fit, with the reason."""


def coerce_batch(batch: ExperienceBatch) -> CoercedBatch:
    """Read as much of a batch as fits together; `ValueError` if its tokens cannot be read.

    >>> tokens, mask = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 2, dtype=torch.bool)
    >>> coerced = coerce_batch(ExperienceBatch(tokens, torch.zeros(2, 2), None, torch.zeros(2, 3), None, torch.ones(2),
    ...                                        None, mask, None))
    >>> coerced.numbers["advantages"].tolist(), coerced.problems, coerced.sheet.row("action_log_probs", 1).tolist()
    ([1.0, 1.0], ['values: got 3 columns, expected 2, as action_log_probs has'], [0.0, 0.0])
    """
    # Pixels are not saved, so they need not be split by sample.
    without: dict[str, Any] = dict.fromkeys((*BATCH_MEDIA, "media"))
    batch = dataclasses.replace(batch, **without)
    try:
        return CoercedBatch(sheet_of_batch(batch))
    except ValueError:
        return _coerce_fields(batch)


def _coerce_fields(batch: ExperienceBatch) -> CoercedBatch:
    """Add field by field, masks first, as long as each fits those before it."""
    without: dict[str, Any] = dict.fromkeys((*_CHECK_ORDER, "extras"))
    accepted = dataclasses.replace(batch, **without)
    coerced = CoercedBatch(sheet_of_batch(accepted))
    width = _response_width(batch)
    entries = [(name, name, getattr(batch, name)) for name in _CHECK_ORDER]
    extras = batch.extras if isinstance(batch.extras, dict) else {}
    for field, name, content in [*entries, *(("extras", name, content) for name, content in extras.items())]:
        if content is None:
            continue
        if field in _VALUE_FIELDS and (numbers := _one_per_sample(content, len(batch), width)) is not None:
            coerced.numbers[name] = numbers
            continue
        try:
            content = _coerce_layout(name, content, accepted, coerced.sheet)
            change: dict[str, Any] = {field: content if field == name else {**(accepted.extras or {}), name: content}}
            trial = dataclasses.replace(accepted, **change)
            coerced.sheet = sheet_of_batch(trial)
        except Exception as error:  # a user's object may raise anything
            coerced.problems.append(str(error))
        else:
            accepted = trial
    return coerced


def _response_width(batch: ExperienceBatch) -> int | None:
    """Return A of a padded batch: that of the mask, or of most fields."""
    widths: Counter[int] = Counter()
    for name in ("action_mask", *_VALUE_FIELDS):
        tensor = getattr(batch, name)
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 1 and len(batch) == 1:
            tensor = tensor[None]
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and len(tensor) == len(batch):
            widths[tensor.shape[1]] += 1
            if name == "action_mask":
                break
    return widths.most_common(1)[0][0] if widths else None


def _one_per_sample(content: Any, count: int, width: int | None) -> NDArray[Any] | None:
    """Return [B] one number per sample, if that is what `content` has."""
    if not isinstance(content, torch.Tensor) or tuple(content.shape) == (count, width):
        return None
    if content.dim() == 0:
        return np.repeat(to_numpy(content)[None], count)
    return to_numpy(content).reshape(-1) if tuple(content.shape) in ((count,), (count, 1)) else None


def _coerce_layout(name: str, content: Any, accepted: ExperienceBatch, sheet: Sheet) -> Any:
    """Convert a field to the layout of a batch, if it has another unambiguous one."""
    count = len(accepted)
    if name in SAMPLE_LISTS:
        if isinstance(content, torch.Tensor) and content.dim():
            return list(content)
        return [content] if name == "raw_images" and count == 1 and not isinstance(content, (list, tuple)) else content
    if not isinstance(content, torch.Tensor) or name not in BATCH_FIELDS:
        return content
    if accepted.layout == "packed" and content.dim() == 2 and len(content) == count and name in _RESPONSE_FIELDS:
        return [row[len(row) - int(length) :] for row, length in zip(content, sheet.responses, strict=True)]
    if content.dim() == 1 and count == 1 and accepted.layout == "padded":
        return content[None]
    mask = accepted.action_mask
    if name == "action_entropy" and content.dim() == 1 and isinstance(mask, torch.Tensor):
        sampled = mask.to(content.device) != 0
        if int(sampled.sum()) == len(content):  # those of the sampled tokens, concatenated
            zeros = torch.zeros(sampled.shape, dtype=content.dtype, device=content.device)
            return zeros.masked_scatter(sampled, content)
    return content


# --- info -----------------------------------------------------------------------------------------------------------


def split_info(info: Any, count: int) -> tuple[Any, dict[Any, Any]]:
    """Split an `info` into the entries per sample and those of the whole batch: tensors and arrays of another length.

    >>> split_info({"reward": torch.ones(2), "bins": np.arange(3), "parts": {"a": torch.ones(1)}}, 2)
    ({'reward': tensor([1., 1.]), 'parts': {}}, {'bins': array([0, 1, 2]), 'parts': {'a': tensor([1.])}})
    """
    if not isinstance(info, dict):
        return info, {}
    per_sample: dict[Any, Any] = {}
    shared: dict[Any, Any] = {}
    for name, content in info.items():
        if isinstance(content, dict):
            per_sample[name], shared_content = split_info(content, count)
            if shared_content:
                shared[name] = shared_content
        elif isinstance(content, (torch.Tensor, np.ndarray)) and content.ndim and len(content) != count:
            shared[name] = content
        else:
            per_sample[name] = content
    return (per_sample, shared) if shared else (info, {})


def join_info(info: Mapping[Any, Any], sample: Mapping[Any, Any], shared: Mapping[Any, Any]) -> dict[Any, Any]:
    """Join the `info` of a sample and that of the whole batch, in the order of the batch's `info`."""
    joined: dict[Any, Any] = {}
    for name, content in info.items():
        if isinstance(content, dict) and name in sample and name in shared:
            joined[name] = join_info(content, sample[name], shared[name])
        elif name in sample or name in shared:
            joined[name] = sample[name] if name in sample else shared[name]
    return joined


def unwrap_info(info: Mapping[Any, Any]) -> dict[Any, Any]:
    """Replace tensors of one entry in the `info` of one sample by numbers.

    >>> unwrap_info({"reward": torch.tensor([0.5]), "parts": {"a": torch.tensor([1])}, "bins": [1]})
    {'reward': 0.5, 'parts': {'a': 1}, 'bins': [1]}
    """
    return {
        name: unwrap_info(content)
        if isinstance(content, dict)
        else content.item()
        if isinstance(content, torch.Tensor) and content.shape == (1,)
        else content
        for name, content in info.items()
    }


__all__ = ["BatchSource", "ItemSource", "coerce_batch", "read_sources"]
