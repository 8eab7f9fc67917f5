"""Batches and buffer items as sources of trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.compat.lightrft.batch import ExperienceBatch
from rollbook.compat.lightrft.buffer_item import BufferItem, peek
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.fields import BATCH_FIELDS
from rollbook.core.sampling import Sample as Sampled
from rollbook.io.trajectories.fitting import apart, fitted, single, together
from rollbook.io.trajectories.plain import host
from rollbook.io.trajectories.sources import Held, OfRecords

_RESPONSE = tuple(name for name, one in BATCH_FIELDS.items() if one.axis == "response")


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
