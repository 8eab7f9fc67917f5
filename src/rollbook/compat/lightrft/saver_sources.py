"""Batches of which not everything fits: what is wrong with one field costs that field alone.

Invariant: the tokens decide. Of the rest, what has an entry for each of their places is kept, a number for each sample
stays one, and what is neither is named; nothing that is given is changed.
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
from rollbook.core.sampling import Sample as Sampled
from rollbook.io.trajectories import Held, OfRecords, host

_RESPONSE = tuple(name for name, one in BATCH_FIELDS.items() if one.axis == "response")
_LATER = tuple(name for name in _RESPONSE if name != "action_mask")
_ORDER = ("attention_mask", "action_mask", *_LATER, "action_starts", "info", *SAMPLE_LISTS)
"""The masks come first, and the others are held against them."""


@dataclasses.dataclass
class Fitted:
    """What of a batch can be read."""

    sheet: Sheet
    numbers: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    """[B] Per-token fields that came as one number for each sample."""
    left_out: list[str] = dataclasses.field(default_factory=list)
    """What does not fit, in words."""


def fitted(batch: ExperienceBatch) -> Fitted:
    """The samples of a batch of B; `ValueError` if not even its tokens can be read.

    >>> tokens, mask = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 2, dtype=torch.bool)
    >>> made = fitted(ExperienceBatch(tokens, torch.zeros(2, 2), None, torch.zeros(2, 3), None, torch.ones(2),
    ...                               None, mask, None))
    >>> made.numbers["advantages"].tolist(), made.left_out, made.sheet.row("action_log_probs", 1).tolist()
    ([1.0, 1.0], ['values: got 3 columns, expected 2, as action_log_probs has'], [0.0, 0.0])
    """
    # Pixels are not saved, and need not be told apart by sample.
    without: dict[str, Any] = dict.fromkeys((*BATCH_MEDIA, "media"))
    batch = dataclasses.replace(batch, **without)
    try:
        return Fitted(sheet_of_batch(batch))
    except ValueError:
        return _mended(batch)


def _mended(batch: ExperienceBatch) -> Fitted:
    """Field by field, masks first, as far as each fits those before it."""
    without: dict[str, Any] = dict.fromkeys((*_ORDER, "extras"))
    kept = dataclasses.replace(batch, **without)
    made = Fitted(sheet_of_batch(kept))
    slots = _slots(batch)
    given = [(name, name, getattr(batch, name)) for name in _ORDER]
    extras = batch.extras if isinstance(batch.extras, dict) else {}
    for field, name, value in [*given, *(("extras", name, value) for name, value in extras.items())]:
        if value is None:
            continue
        if field in _LATER and (numbers := _numbers(value, len(batch), slots)) is not None:
            made.numbers[name] = numbers
            continue
        try:
            value = _laid_out(name, value, kept, made.sheet)
            more: dict[str, Any] = {field: value if field == name else {**(kept.extras or {}), name: value}}
            trial = dataclasses.replace(kept, **more)
            made.sheet = sheet_of_batch(trial)
        except Exception as error:  # what users put into a field may raise anything when it is looked at
            made.left_out.append(str(error))
        else:
            kept = trial
    return made


def _slots(batch: ExperienceBatch) -> int | None:
    """A of a padded batch: the mask's, or what most fields have."""
    found: Counter[int] = Counter()
    for name in ("action_mask", *_LATER):
        value = getattr(batch, name)
        if isinstance(value, torch.Tensor) and value.dim() == 1 and len(batch) == 1:
            value = value[None]
        if isinstance(value, torch.Tensor) and value.dim() == 2 and len(value) == len(batch):
            found[value.shape[1]] += 1
            if name == "action_mask":
                break
    return found.most_common(1)[0][0] if found else None


def _numbers(value: Any, count: int, slots: int | None) -> NDArray[Any] | None:
    """[B] One number for each sample, if that is what there is."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) == (count, slots):
        return None
    if value.dim() == 0:
        return np.repeat(host(value)[None], count)
    return host(value).reshape(-1) if tuple(value.shape) in ((count,), (count, 1)) else None


def _laid_out(name: str, value: Any, kept: ExperienceBatch, sheet: Sheet) -> Any:
    """A field as batches have it, where it came in another form of which it is known what it means."""
    count = len(kept)
    if name in SAMPLE_LISTS:
        if isinstance(value, torch.Tensor) and value.dim():
            return list(value)
        return [value] if name == "raw_images" and count == 1 and not isinstance(value, (list, tuple)) else value
    if not isinstance(value, torch.Tensor) or name not in BATCH_FIELDS:
        return value
    if kept.layout == "packed" and value.dim() == 2 and len(value) == count and name in _RESPONSE:
        return [row[len(row) - int(length) :] for row, length in zip(value, sheet.responses, strict=True)]
    if value.dim() == 1 and count == 1 and kept.layout == "padded":
        return value[None]
    mask = kept.action_mask
    if name == "action_entropy" and value.dim() == 1 and isinstance(mask, torch.Tensor):
        chosen = mask.to(value.device) != 0
        if int(chosen.sum()) == len(value):  # those of the model's tokens, end to end
            return torch.zeros(chosen.shape, dtype=value.dtype, device=value.device).masked_scatter(chosen, value)
    return value


# --- info -----------------------------------------------------------------------------------------------------------


def apart(info: Any, count: int) -> tuple[Any, dict[Any, Any]]:
    """An `info` without its tensors and arrays that have no entry for each of `count` samples; and these.

    >>> apart({"reward": torch.ones(2), "bins": np.arange(3), "parts": {"a": torch.ones(1)}}, 2)
    ({'reward': tensor([1., 1.]), 'parts': {}}, {'bins': array([0, 1, 2]), 'parts': {'a': tensor([1.])}})
    """
    if not isinstance(info, dict):
        return info, {}
    own: dict[Any, Any] = {}
    whole: dict[Any, Any] = {}
    for name, value in info.items():
        if isinstance(value, dict):
            own[name], inner = apart(value, count)
            if inner:
                whole[name] = inner
        elif isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim and len(value) != count:
            whole[name] = value
        else:
            own[name] = value
    return (own, whole) if whole else (info, {})


def together(info: Mapping[Any, Any], own: Mapping[Any, Any], whole: Mapping[Any, Any]) -> dict[Any, Any]:
    """A sample's own `info` and what is of all, in the order of the whole `info`."""
    found: dict[Any, Any] = {}
    for name, value in info.items():
        if isinstance(value, dict) and name in own and name in whole:
            found[name] = together(value, own[name], whole[name])
        elif name in own or name in whole:
            found[name] = own[name] if name in own else whole[name]
    return found


def single(info: Mapping[Any, Any]) -> dict[Any, Any]:
    """The `info` of one sample, in which a tensor of one entry is that sample's number.

    >>> single({"reward": torch.tensor([0.5]), "parts": {"a": torch.tensor([1])}, "bins": [1]})
    {'reward': 0.5, 'parts': {'a': 1}, 'bins': [1]}
    """
    return {
        name: single(value)
        if isinstance(value, dict)
        else value.item()
        if isinstance(value, torch.Tensor) and value.shape == (1,)
        else value
        for name, value in info.items()
    }




class OfBatch(Held):
    """The samples of a batch, padded or packed."""

    def __init__(self, experience: int, batch: ExperienceBatch, problems: list[str]) -> None:
        self.batch = batch
        info, self.whole = apart(batch.info, len(batch))
        made = fitted(dataclasses.replace(batch, info=info) if self.whole else batch)
        self.sheet, self.numbers = made.sheet, made.numbers
        problems += [f"experiences[{experience}]: {what}" for what in made.left_out]
        super().__init__([(experience, i) for i in range(len(self.sheet))])

    def read(self, i: int, name: str) -> NDArray[Any] | None:
        if name in self.numbers:
            return self.numbers[name][i : i + 1]
        row = self.sheet.row(name, i)
        return None if row is None else host(row)

    def padded(self, i: int) -> NDArray[np.int64] | None:
        row = self.batch.sequences[i]
        return None if len(row) == self.sheet.tokens[i] else host(row).astype(np.int64)

    def extras(self, i: int) -> dict[str, Callable[[], NDArray[Any]]]:
        found: dict[str, Callable[[], NDArray[Any]]] = {}
        for name, column in self.sheet.columns.items():
            plain = isinstance(column, torch.Tensor) and column.dim() == 1
            if name.startswith("extras.") and plain and i not in self.sheet.origin.absent.get(name, ()):
                found[name.removeprefix("extras.")] = partial(self._there, i, name)
        return found

    def _there(self, i: int, name: str) -> NDArray[Any]:
        row = self.sheet.row(name, i)
        return np.empty(0) if row is None else host(row)

    def info(self, i: int) -> Mapping[Any, Any] | None:
        own = None if self.sheet.info is None else self.sheet.infos[0][i]
        return together(self.batch.info or {}, own or {}, self.whole) if self.whole else own

    def entry(self, i: int, name: str) -> Any:
        return self.sheet.value(name, i)

    def slots(self, i: int) -> int:
        return int(self.sheet.responses[i])


class OfItem(Held):
    """One buffer item, LightRFT's too, with padding or without."""

    def __init__(self, experience: int, item: Any) -> None:
        super().__init__([(experience, 0)])
        self.item = item
        tokens = self.get("sequences")
        if tokens is None:
            raise ValueError("sequences: got None, expected token ids")
        width = len(tokens)
        known = {name: len(row) for name in _RESPONSE if (row := self._row(name)) is not None}
        slots = known.get("action_mask", max(known.values(), default=0))
        if slots > width:
            raise ValueError(f"got {slots} response slots, expected at most its {width} tokens")
        attended = self._row("attention_mask")
        kept = np.arange(width) if attended is None or len(attended) != width else np.flatnonzero(attended)
        first, last = (int(kept[0]), int(kept[-1]) + 1) if len(kept) else (width, width)
        begin = max(self.get("action_start") or 0, first - (width - slots))
        self.widths: dict[str, int] = {"sequence": width, "response": slots}
        self.spans: dict[str, tuple[int, int]] = {
            "sequence": (first, last),
            "response": (begin, max(min(slots, last - (width - slots)), begin)),
        }

    def get(self, name: str) -> Any:
        """A field of the item, which stays as it is: an item keeps what it is asked for by attribute."""
        if isinstance(self.item, BufferItem):
            return peek(self.item.__dict__, name)
        return getattr(self.item, name, None)

    def _row(self, name: str) -> NDArray[Any] | None:
        value = self.get(name)
        return None if value is None else host(torch.as_tensor(value)).reshape(-1)

    def read(self, i: int, name: str) -> NDArray[Any] | None:
        row, axis = self._row(name), BATCH_FIELDS[name].axis
        if row is None or len(row) != self.widths[axis]:
            return row  # what does not fit is not made to
        start, stop = self.spans[axis]
        return row[start:stop]

    def extras(self, i: int) -> dict[str, Callable[[], NDArray[Any]]]:
        start, stop = self.spans["response"]
        given = (self.get("extras") or {}).items()
        return {
            name: partial(host, value[start:stop])
            for name, value in given
            if isinstance(value, torch.Tensor) and value.dim() == 1
        }

    def padded(self, i: int) -> NDArray[np.int64] | None:
        row, (start, stop) = self._row("sequences"), self.spans["sequence"]
        return None if row is None or stop - start == len(row) else row.astype(np.int64)

    def info(self, i: int) -> Mapping[Any, Any] | None:
        said: Mapping[Any, Any] | None = self.get("info")
        return said if said is None else single(said)

    def entry(self, i: int, name: str) -> Any:
        return self.get(name)

    def slots(self, i: int) -> int:
        start, stop = self.spans["response"]
        return stop - start


def sources_of(experiences: Any, problems: list[str]) -> Iterator[Held]:
    """Read batches, buffer items and records, in any mix; what cannot be read is named in `problems`."""
    if isinstance(experiences, (ExperienceBatch, Experience, Experiences, BufferItem)):
        experiences = [experiences]
    for number, one in enumerate(experiences or ()):
        try:
            yield _source(number, one, problems)
        except Exception as error:
            problems.append(f"experiences[{number}]: {error}")


def _source(number: int, one: Any, problems: list[str]) -> Held:
    if isinstance(one, Sampled):
        one = one.to_experience()
    if isinstance(one, Experience):
        return OfRecords([(number, 0)], [one])
    if isinstance(one, Experiences):
        return OfRecords([(number, i) for i in range(len(one))], one.rows())
    if isinstance(one, (list, tuple)) and all(isinstance(row, Experience) for row in one):
        return OfRecords([(number, i) for i in range(len(one))], one)
    if isinstance(one, BufferItem):
        return OfItem(number, one)
    sequences: Any = getattr(one, "sequences", None)
    bare = isinstance(sequences, torch.Tensor) and sequences.dim() == 1
    if isinstance(one, ExperienceBatch):
        return OfBatch(number, dataclasses.replace(one, sequences=sequences[None]) if bare else one, problems)
    if bare:
        return OfItem(number, one)
    if isinstance(sequences, (list, torch.Tensor)):
        # A batch of LightRFT's own, or any object with its names.
        names = [f.name for f in dataclasses.fields(ExperienceBatch) if f.name != "origin"]
        fields: dict[str, Any] = {name: getattr(one, name, None) for name in names}
        return OfBatch(number, ExperienceBatch(**fields), problems)
    raise ValueError(f"got {type(one).__name__}, expected an experience, a batch or a buffer item")
