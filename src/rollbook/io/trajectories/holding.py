"""Where samples lie: batches, buffer items and records, each read under the same names.

Invariant: what is given is not changed, not even by being read; what comes out is on the host and without padding.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.compat.lightrft.batch import ExperienceBatch
from rollbook.compat.lightrft.buffer_item import BufferItem, peek
from rollbook.core.experience import Experience
from rollbook.core.fields import BATCH_FIELDS, tensor_fields
from rollbook.core.images import names_file
from rollbook.io.trajectories.fitting import apart, fitted, single, together
from rollbook.io.trajectories.pictures import Picture, Pictures, flat, remote, shown
from rollbook.io.trajectories.plain import Plain, host
from rollbook.io.trajectories.sample import Sample

_KEPT = ("finish_reason", "truncate_status", "parent", "group_size", "prompt_text", "response_text")
_FREE = ("messages", "tools", "sampling")
_RESPONSE = tuple(name for name, one in BATCH_FIELDS.items() if one.axis == "response")


class Held(ABC):
    """The samples of something that a caller gave, each read where it lies; `places` says where that is."""

    def __init__(self, places: list[tuple[int, int]]) -> None:
        self.places = places

    @abstractmethod
    def read(self, i: int, name: str) -> NDArray[Any] | None:
        """A per-token field of sample i by a batch's name, without padding, on the host."""

    @abstractmethod
    def extras(self, i: int) -> dict[str, Callable[[], NDArray[Any]]]:
        """Further arrays of the response with one number a token, by a record's names, each read when it is called."""

    @abstractmethod
    def info(self, i: int) -> Mapping[Any, Any] | None:
        """What was found out about sample i, if anything is said of it."""

    @abstractmethod
    def entry(self, i: int, name: str) -> Any:
        """Its `eid`, `labels`, `references` or `raw_images`."""

    def tokens(self, i: int) -> NDArray[np.int64]:
        """[L] The token ids of sample i."""
        found = self.read(i, "sequences")
        if found is None:
            raise ValueError("sequences: got None, expected token ids")
        return found.astype(np.int64)

    @abstractmethod
    def padded(self, i: int) -> NDArray[np.int64] | None:
        """[S] The token ids of sample i as they were given, padding and all; `None` if there is none."""

    @abstractmethod
    def slots(self, i: int) -> int:
        """R: how many tokens of sample i the response has, the model's and others'."""

    def fill(self, i: int, sample: Sample, plain: Plain, pictures: Pictures) -> None:
        """Add what only this kind of holder knows."""
        given = self.info(i)
        said = given or {}
        sample.label = plain.of(self.entry(i, "labels"), "label")
        sample.reference = plain.of(self.entry(i, "references"), "reference")
        inner = found if isinstance(found := said.get("info"), Mapping) else {}
        images = flat(self.entry(i, "raw_images")) or recorded(inner)
        sample.images = images_of(images, pictures, sample.notes)
        plain.references = named(images, sample.images)
        sample.info = plain.of(given, "info")
        metrics = said.get("reward_metrics", said.get("metrics"))
        sample.parts = parts_of(metrics, plain)
        sample.segments = plain.of(said.get("segments", inner.get("segments")), "segments")
        for name in _KEPT:
            if isinstance(value := said.get(name), (str, int)):
                sample.more[name] = value


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


class OfRecords(Held):
    """Records: `Experience`s."""

    def __init__(self, places: list[tuple[int, int]], rows: Sequence[Experience]) -> None:
        super().__init__(places)
        self.rows = rows

    def read(self, i: int, name: str) -> NDArray[Any] | None:
        row = self.rows[i]
        if name == "sequences":
            parts = [row.tokens, row.chosen] if row.experience_type == "dpo" else [row.tokens]
            return np.concatenate([host(part) for part in parts if part is not None])
        for source in BATCH_FIELDS[name].sources:
            if getattr(row, source) is not None:
                return self._response(i, source)
        return None

    def _response(self, i: int, name: str) -> NDArray[Any]:
        value = getattr(self.rows[i], name)
        if isinstance(value, int):
            return np.full(self.slots(i), value, dtype=np.int64)
        return host(value)

    def extras(self, i: int) -> dict[str, Callable[[], NDArray[Any]]]:
        row = self.rows[i]
        taken = {source for one in BATCH_FIELDS.values() for source in one.sources}
        if row.policy_logprobs is not None:
            taken.discard("logprobs")  # the engine's, beside the trainer's
        return {
            one.name: partial(self._response, i, one.name)
            for one in tensor_fields("response")
            if not one.trailing and one.name not in taken and getattr(row, one.name) is not None
        }

    def padded(self, i: int) -> None:
        return None

    def info(self, i: int) -> Mapping[Any, Any]:
        row = self.rows[i]
        said = {"finish_reason": row.finish_reason, "truncate_status": row.truncate_status, "reward": row.reward}
        return {**row.info, **{name: value for name, value in said.items() if value is not None}}

    def entry(self, i: int, name: str) -> Any:
        return self.rows[i].eid if name == "eid" else None

    def slots(self, i: int) -> int:
        row = self.rows[i]
        if row.experience_type == "dpo":
            return 0 if row.chosen is None else len(row.chosen)
        if row.truncate_status == "prompt_truncated" and row.logprobs is not None and row.logprobs.dim():
            return min(len(row.logprobs), len(row.tokens))
        return max(len(row.tokens) - row.prompt_length, 0)

    def fill(self, i: int, sample: Sample, plain: Plain, pictures: Pictures) -> None:
        row = self.rows[i]
        sample.label = plain.of(row.info.get("label"), "label")
        sample.reference = plain.of(row.info.get("reference"), "reference")
        places = [*shown(row.messages), *recorded(row.info)]
        contents = [None if names_file(one) and not remote(one) else one for one in places]
        sample.images = images_of(contents, pictures, sample.notes)
        sample.notes += [f"images[{k}]: a path in a record, not opened" for k, one in enumerate(places)
                         if contents[k] is not one]  # fmt: skip
        plain.references = named(places, sample.images)
        sample.info = plain.of(row.info, "info")
        sample.parts = parts_of(row.metrics, plain)
        sample.segments = plain.of(row.info.get("segments"), "segments")
        sample.more["kind"] = row.experience_type
        for name in (*_KEPT, *_FREE):
            if (value := getattr(row, name)) is not None:
                sample.more[name] = plain.of(value, name)
        if row.rejected is not None:
            sample.rejected = host(row.rejected).astype(np.int64)


def parts_of(metrics: Any, plain: Plain) -> dict[str, Any]:
    """The parts of a reward: the numbers among what was measured."""
    if not isinstance(metrics, Mapping):
        return {}
    found = plain.of(metrics, "reward_parts")
    return {name: value for name, value in found.items() if isinstance(value, (int, float)) or value is None}


def recorded(info: Mapping[Any, Any]) -> list[bytes]:
    """The images of a prompt that its record has in `info["images"]`; see `rollbook.core.images.encode_for_record`."""
    found = info.get("images")
    return [one for one in found if isinstance(one, bytes)] if isinstance(found, (list, tuple)) else []


def named(given: Sequence[Any], found: Sequence[Picture | None]) -> dict[int, str]:
    """What `Plain` is to write where images stand that there are pictures of."""
    return {id(one): f"sha256:{made.sha256}" for one, made in zip(given, found, strict=True) if made is not None}


def images_of(given: Iterable[Any], pictures: Pictures, notes: list[str]) -> list[Picture | None]:
    """The pictures of a sample, `None` for one that is not there, or that cannot be had: the reason is noted."""
    found: list[Picture | None] = []
    for k, one in enumerate(given):
        picture = None
        if one is not None and not remote(one):
            try:
                picture = pictures.of(one)
            except Exception as error:  # images come in the forms of many libraries, which raise what they like
                notes.append(f"images[{k}]: {error}")
        found.append(picture)
    return found
