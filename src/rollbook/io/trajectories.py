"""One sample: the few numbers by which it is chosen, and all that is saved of it.

Invariant: value j of every array speaks of token `prompt + j`; a `Sample` shares no memory with what it was taken from.
"""

from __future__ import annotations

import base64
import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from rollbook.core.experience import Experience
from rollbook.core.fields import BATCH_FIELDS, FIELDS, tensor_fields
from rollbook.core.ids import EID
from rollbook.core.images import names_file, source
from rollbook.core.media import is_picture
from rollbook.io.response_text import Decoder, reflections, repeat_score
from rollbook.io.trajectory_files import Picture, Pictures, flat, remote, shown

ARRAYS = {
    "advantages": "advantages",
    "returns": "return",
    "action_log_probs": "action_log_probs",
    "values": "values",
    "base_action_log_probs": "base_action_log_probs",
    "action_entropy": "action_entropy",
    "kl": "kl",
}
"""A batch's per-token fields, and their names in the JSON; the first four are LightRFT's, in its order."""
NUMBERS = tuple(ARRAYS.values())[:4]
"""LightRFT's, which may be one number for the whole sample."""


@dataclass(slots=True)
class Candidate:
    """What is known of a sample before it is chosen: a few numbers."""

    rank: int
    index: int
    """Its place among this process's samples."""
    experience: int
    row: int
    uid: str
    group: str
    """Samples of one prompt have the same."""
    named: bool
    """Whether it came with an id; if not, it was given one by content."""
    reward: float | None
    tokens: int
    """Of its response."""
    truncated: bool = False
    error: bool = False
    mismatch: float | None = None
    """The largest difference between the trainer's log-prob of a token and the engine's."""


@dataclass
class Sample:
    """One sample as it is saved: L tokens, of which the last R are the response's slots."""

    rank: int
    experience: int
    row: int
    eid: EID
    named: bool
    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    """[R] True where the model chose the token."""
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    """[R] each, by their names in the JSON."""
    numbers: dict[str, float | None] = field(default_factory=dict)
    """What came as one number for all tokens, by its name in the JSON."""
    padded: NDArray[np.int64] | None = None
    """[S] The tokens as they were given, where there was padding around them."""
    label: Any = None
    reference: Any = None
    info: Any = None
    reward: float | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    segments: Any = None
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of a record, by name."""
    images: list[Picture | None] = field(default_factory=list)
    rejected: NDArray[np.int64] | None = None
    """The other answer of a preference pair."""
    nonfinite: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    why: str = ""
    weight: float | None = None

    @property
    def prompt(self) -> int:
        """How many tokens come before the response."""
        return len(self.tokens) - len(self.mask)


_DEEPEST = 32
_MOST = 1 << 18
"""A tensor or array of more elements is described, not written out."""
_LONGEST = 1 << 16
"""Bytes, and what an unknown object says of itself, are cut here."""
_INT64 = 1 << 63


class Plain:
    """Makes values plain, and notes by path what was not finite.

    Tensors and arrays become lists (of no dimension: numbers), tuples and sets lists, keys text; bytes that are UTF-8
    become text, and others the hexadecimal `{"$bytes": ...}`; images and objects of other kinds are described.
    `references`: by the identity of a part of a message that has an image, or of its bytes, what to write in the
    image's place.

    >>> made = Plain()
    >>> made.of({"a": torch.tensor([1.0, float("nan")]), 2: {3}, "b": b"x", "c": np.float32(0.5)}, "info")
    {'a': [1.0, None], '2': [3], 'b': 'x', 'c': 0.5}
    >>> made.nonfinite
    {'info.a': {'nan': 1}}
    """

    def __init__(self, references: Mapping[int, str] | None = None) -> None:
        self.nonfinite: dict[str, dict[str, int]] = {}
        self.references = references or {}

    def of(self, value: Any, path: str, depth: int = 0) -> Any:
        """`value` as plain values; `path` is where it stands in the record."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self.text(value)
        if kind is float:
            return self.number(value, path)
        if kind is int:
            return value if -_INT64 <= value < 2 * _INT64 else str(value)
        if depth >= _DEEPEST:
            return f"{kind.__name__}, too deep to be shown"
        try:
            return self._of(value, path, depth)
        except Exception as error:  # an object of a user's own may raise anything when it is looked at
            return f"{kind.__name__}, which cannot be shown ({type(error).__name__})"

    def _of(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, Mapping):
            image = source(value) if id(value) in self.references else None
            found = {}
            for name, item in value.items():
                shown = self.text(name if isinstance(name, str) else str(name))
                is_image = image is not None and name == image
                found[shown] = self.references[id(value)] if is_image else self.of(item, f"{path}.{shown}", depth + 1)
            return found
        if isinstance(value, (list, tuple)):
            return [self.of(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return [self.of(item, path, depth + 1) for item in sorted(value, key=lambda item: (str(type(item)), item))]
        if isinstance(value, torch.Tensor):
            if value.numel() > _MOST or value.is_meta:
                return f"tensor of {value.dtype}, shape {list(value.shape)}"
            return self.array(host(value), path)
        if isinstance(value, np.generic | np.ndarray):
            array = np.asarray(value)
            if array.size > _MOST or array.dtype.names is not None:
                return f"array of {array.dtype}, shape {list(array.shape)}"
            return self.array(array, path)
        if isinstance(value, bytes) and id(value) in self.references:
            return self.references[id(value)]
        if isinstance(value, (bytes, bytearray, memoryview)):
            held = bytes(value[:_LONGEST])
            try:
                return held.decode()
            except UnicodeDecodeError:
                return {"$bytes": held.hex()}
        if is_picture(value):
            return f"image {value.width}x{value.height} {value.mode}"
        if isinstance(value, str):
            return self.text(str(value))
        if isinstance(value, (bool, int, float)):
            return self.of(float(value) if isinstance(value, float) else int(value), path, depth)
        return self.text(str(value)[:_LONGEST])

    def text(self, value: str) -> str:
        """Text that UTF-8 can hold: halves of surrogate pairs are U+FFFD."""
        return value if value.isascii() else value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")

    def number(self, value: float, path: str) -> float | None:
        """A number, or nothing and a note."""
        if math.isfinite(value):
            return value
        self._note(path, repr(value), 1)
        return None

    def array(self, values: NDArray[Any], path: str) -> Any:
        """An array as lists, or a number if it has no dimension."""
        if values.dtype.kind == "f":
            self.check(values, path)
            made: Any = values.astype(object)
            made[~np.isfinite(values)] = None
            return made.tolist()
        if values.dtype.kind in "biu":
            return values.tolist()
        return self.of(values.tolist(), path, 1)

    def check(self, values: NDArray[Any], path: str) -> None:
        """Note what of an array is not finite."""
        if values.dtype.kind != "f" or np.isfinite(values).all():
            return
        for name, count in (
            ("nan", np.isnan(values).sum()),
            ("inf", np.isposinf(values).sum()),
            ("-inf", np.isneginf(values).sum()),
        ):
            if count:
                self._note(path, name, int(count))

    def _note(self, path: str, name: str, count: int) -> None:
        seen = self.nonfinite.setdefault(path, {})
        seen[name] = seen.get(name, 0) + count


def host(value: torch.Tensor) -> NDArray[Any]:
    """A tensor as an array of its own memory; of a type that numpy lacks, as float32."""
    value = value.detach()
    if value.dtype in _AS_FLOAT or str(value.dtype).startswith("torch.float8"):
        value = value.float()
    return np.array(value.cpu().numpy())


_AS_FLOAT = (torch.bfloat16, torch.float16)


_KEPT = ("finish_reason", "truncate_status", "parent", "group_size", "prompt_text", "response_text")
_FREE = ("messages", "tools", "sampling")


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
        for field_name in BATCH_FIELDS[name].sources:
            if getattr(row, field_name) is not None:
                return self._response(i, field_name)
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
    """The images of a prompt that its record has in `info["images"]`; see `rollbook.core.images.recorded`."""
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


_CUT = ("length", "response_truncated", "prompt_truncated")


class Samples:
    """All samples that a caller gave, in order: what is known of each, and each whole when it is asked for.

    >>> from rollbook.core.experience import Experience
    >>> records = [Experience(tokens=[1, 2, 3], reward=1.0, eid=EID(0, "a", suffix="x"))]
    >>> made = Samples([OfRecords([(0, 0)], records)], step=3, rank=0)
    >>> made.candidates[0].uid, made.candidates[0].reward, made.sample(0, Pictures(512)).tokens.tolist()
    ('0/a/0/0/x', 1.0, [1, 2, 3])
    """

    def __init__(self, sources: Iterable[Held], step: int, rank: int, problems: list[str] | None = None) -> None:
        self.problems: list[str] = [] if problems is None else problems
        """What could not be read, in words."""
        self.rank, self.step = rank, step
        self.candidates: list[Candidate] = []
        self._where: list[tuple[Held, int]] = []
        self._ids: list[EID] = []
        self._runs: dict[str, int] = {}
        for held in sources:
            for i, (experience, row) in enumerate(held.places):
                try:
                    self._add(held, i, experience, row)
                except Exception as error:  # one sample that cannot be read must not cost the others
                    self.problems.append(f"experiences[{experience}], sample {row}: {error}")

    def __len__(self) -> int:
        return len(self.candidates)

    def _add(self, held: Held, i: int, experience: int, row: int) -> None:
        slots = held.slots(i)
        mask = held.read(i, "action_mask")
        given, info = held.entry(i, "eid"), held.info(i) or {}
        eid = given if isinstance(given, EID) else self._made_id(held.tokens(i), slots)
        reward = number_of(info.get("reward"))
        reason = info.get("finish_reason")
        failed = info.get("error") is not None or info.get("reward_error") is not None or reason == "error"
        self.candidates.append(
            Candidate(
                rank=self.rank,
                index=len(self.candidates),
                experience=experience,
                row=row,
                uid=eid.uid,
                group=eid.tid,
                named=isinstance(given, EID),
                reward=reward,
                tokens=slots if mask is None or len(mask) != slots or not mask.any() else int(np.count_nonzero(mask)),
                truncated=reason in _CUT or info.get("truncate_status") in _CUT,
                error=failed or (reward is not None and math.isnan(reward)),
                mismatch=self._mismatch(held, i, mask),
            )
        )
        self._where.append((held, i))
        self._ids.append(eid)

    def _made_id(self, tokens: NDArray[np.int64], slots: int) -> EID:
        """An id by content: the same for the same samples in the same order, so that copies on other ranks are seen."""
        held = tokens.astype("<i8")
        task = hashlib.blake2b(held[: len(held) - slots].tobytes(), digest_size=8).hexdigest()
        run = self._runs[task] = self._runs.get(task, -1) + 1
        return EID(self.step, task, run, 0, hashlib.blake2b(held.tobytes(), digest_size=8).hexdigest())

    @staticmethod
    def _mismatch(held: Held, i: int, mask: NDArray[Any] | None) -> float | None:
        extras = held.extras(i)
        trainer = held.read(i, "action_log_probs") if "logprobs" in extras else None
        if trainer is None:
            return None
        engine = extras["logprobs"]()
        if len(engine) != len(trainer):
            return None
        off = np.abs(trainer.astype(np.float64) - engine)
        off = off[mask != 0] if mask is not None and len(mask) == len(off) else off
        off = off[np.isfinite(off)]
        return float(off.max()) if len(off) else None

    def sample(self, index: int, pictures: Pictures | None) -> Sample:
        """One sample, whole; without `pictures`, only what statistics need."""
        held, i = self._where[index]
        known = self.candidates[index]
        slots = held.slots(i)
        given = held.read(i, "action_mask")
        mask = np.ones(slots, dtype=np.bool_) if given is None else given != 0
        plain = Plain()
        made = Sample(
            rank=self.rank,
            experience=known.experience,
            row=known.row,
            eid=self._ids[index].replace(),
            named=known.named,
            tokens=held.tokens(i),
            mask=mask,
        )
        if len(mask) != slots:
            made.mask = np.zeros(slots, dtype=np.bool_)
            made.notes.append(f"action_mask: got {len(mask)} entries, expected {slots}; left out")
        entropy = held.read(i, "action_entropy")
        arrays: dict[str, NDArray[Any] | None] = {"action_entropy": entropy}
        if pictures is not None:
            arrays = {ours: held.read(i, name) for name, ours in ARRAYS.items()}
            arrays.update((name, read()) for name, read in held.extras(i).items())
            made.padded = held.padded(i)
            held.fill(i, made, plain, pictures)
            made.reward = None if known.reward is None else plain.number(known.reward, "reward")
        for name, values in arrays.items():
            if values is None:
                continue
            if len(values) == 1 != slots and name in NUMBERS:
                made.numbers[name] = plain.number(float(values[0]), name)
                continue
            if len(values) != slots:
                made.notes.append(f"{name}: got {len(values)} entries, expected {slots}; left out")
                continue
            plain.check(values, name)
            made.arrays[name] = values
        made.nonfinite = plain.nonfinite
        return made


def number_of(value: Any) -> float | None:
    """A number, or a tensor or array of one, as a float; `None` of anything else."""
    size = value.numel() if isinstance(value, torch.Tensor) else value.size if isinstance(value, np.ndarray) else 0
    value = value.item() if size == 1 else value
    return float(value) if isinstance(value, (int, float, np.integer, np.floating)) else None


KEEP = ("auto", "groups", "first", "random")


@dataclass
class Kept:
    """A chosen candidate: why, and (kept by chance) the number of samples it stands for."""

    candidate: Candidate
    why: list[str] = field(default_factory=list)
    weight: float | None = None

    @property
    def reason(self) -> str:
        """Every reason, in order."""
        return ", ".join(dict.fromkeys(self.why))


def choose(candidates: Sequence[Candidate], count: int, keep: str | Callable[..., Any], seed: str) -> list[Kept]:
    """`count` of the candidates, or all if there are no more, in the order in which they came.

    - `groups`: half of them by chance, as whole groups (samples of one prompt), the rest by what they show: the best,
      the worst, a group without variance, truncated, the largest difference of log-probs, the longest, errors, each
      with its group as far as there is room; then the next best, and so on.
    - `first`: the first, in turn from each rank. `random`: any, by chance.
    - `auto`: `groups` where samples have ids, which say of what group they are; else `first`.
    - a function of the candidates and `count`: it gives the chosen ones, or pairs of one and why.

    >>> rewards = {"a": [1, 0, 0, 1], "b": [0, 0, 0, 0], "c": [1, 1, 1, 0]}
    >>> every = [
    ...     Candidate(0, i, 0, i, f"{name}{run}", name, True, reward, 10)
    ...     for i, (name, run, reward) in enumerate((g, r, x) for g, xs in rewards.items() for r, x in enumerate(xs))
    ... ]
    >>> [(one.candidate.uid, one.reason, one.weight) for one in choose(every, 6, "groups", "3")]
    [('a0', 'random', 3.0), ('a1', 'random', 3.0), ('a2', 'random', 3.0), ('a3', 'random', 3.0),
     ('c2', 'best', None), ('c3', 'with best', None)]
    """
    if len(candidates) <= count:
        return [Kept(one, ["all"], 1.0) for one in candidates]
    if count <= 0:
        return []
    if callable(keep):
        return _asked(candidates, count, keep)
    if keep == "auto":
        keep = "groups" if any(one.named for one in candidates) else "first"
    if keep == "first":
        turns = sorted(candidates, key=lambda one: (one.index, one.rank))[:count]
        return _ordered(candidates, {one.uid: Kept(one, ["first"]) for one in turns})
    # By uid: the same whatever order the ranks' samples came in.
    lots = random.Random(seed)
    known = sorted(candidates, key=lambda one: one.uid)
    if keep == "random":
        share = len(known) / count
        return _ordered(candidates, {one.uid: Kept(one, ["random"], share) for one in lots.sample(known, count)})
    return _ordered(candidates, _Groups(known, lots).chosen(count))


def _ordered(candidates: Sequence[Candidate], kept: dict[str, Kept]) -> list[Kept]:
    return [kept[one.uid] for one in candidates if one.uid in kept]


def _asked(candidates: Sequence[Candidate], count: int, keep: Callable[..., Any]) -> list[Kept]:
    """What a user's function chose, checked."""
    known = {one.uid: one for one in candidates}
    kept: dict[str, Kept] = {}
    for given in keep(list(candidates), count):
        one, why = given if isinstance(given, tuple) and len(given) == 2 else (given, "chosen")
        if not isinstance(one, Candidate) or one.uid not in known:
            raise ValueError(f"keep: got {one!r}, expected some of the candidates, or pairs of one and why")
        kept[one.uid] = Kept(known[one.uid], [str(why)])
    return _ordered(candidates, dict(list(kept.items())[:count]))


class _Groups:
    """Candidates by group, and those of each kind from the most telling on."""

    def __init__(self, candidates: list[Candidate], lots: random.Random) -> None:
        self.lots = lots
        self.groups: dict[str, list[Candidate]] = {}
        for one in candidates:
            self.groups.setdefault(one.group, []).append(one)
        # Ties, of which rewards of 0 and 1 have many, are broken by lot, in one order for all.
        order = list(candidates)
        lots.shuffle(order)
        scored = [one for one in order if one.reward is not None and not math.isnan(one.reward)]
        flat = {name for name, some in self.groups.items() if _no_variance(some)}
        self.telling: dict[str, list[Candidate]] = {
            "best": sorted(scored, key=lambda one: -(one.reward or 0.0)),
            "worst": sorted(scored, key=lambda one: one.reward or 0.0),
            "zero variance": _one_each(one for one in order if one.group in flat),
            "truncated": [one for one in order if one.truncated],
            "mismatch": sorted((one for one in order if one.mismatch), key=lambda one: -(one.mismatch or 0.0)),
            "longest": sorted(order, key=lambda one: -one.tokens),
            "error": [one for one in order if one.error],
        }
        self.all = candidates

    def chosen(self, count: int) -> dict[str, Kept]:
        """`count` of them, by uid."""
        kept = self._by_lot(count)
        queues = {why: list(reversed(some)) for why, some in self.telling.items()}
        while len(kept) < count:
            for why, queue in queues.items():
                self._next(why, queue, kept, count)
        return kept

    def _by_lot(self, count: int) -> dict[str, Kept]:
        """Half of them: as many whole groups as fit into it, at least one; of groups that are larger, single ones."""
        half = -(-count // 2)
        largest = max(map(len, self.groups.values()))
        if largest > count:
            share = len(self.all) / half
            return {one.uid: Kept(one, ["random"], share) for one in self.lots.sample(self.all, half)}
        names = self.lots.sample(sorted(self.groups), min(max(1, half // largest), len(self.groups)))
        share = len(self.groups) / len(names)
        return {one.uid: Kept(one, ["random"], share) for name in names for one in self.groups[name]}

    def _next(self, why: str, queue: list[Candidate], kept: dict[str, Kept], count: int) -> None:
        """Keep the most telling of a kind that has not had its turn, with its group; if it is kept already, say so."""
        if not queue or len(kept) >= count:
            return
        one = queue.pop()
        if one.uid in kept:
            kept[one.uid].why.append(why)
            return
        kept[one.uid] = Kept(one, [why])
        others = [other for other in self.groups[one.group] if other.uid not in kept]
        for other in _telling_apart(others, one)[: count - len(kept)]:
            kept[other.uid] = Kept(other, [f"with {why}"])


def _no_variance(some: list[Candidate]) -> bool:
    rewards = {one.reward for one in some}
    return len(some) > 1 and len(rewards) == 1 and None not in rewards


def _one_each(some: Iterable[Candidate]) -> list[Candidate]:
    """The first of each group."""
    return list({one.group: one for one in reversed(list(some))}.values())[::-1]


def _telling_apart(some: list[Candidate], one: Candidate) -> list[Candidate]:
    """From both ends, by reward, the end that `one` is further from first: where a group does not fit whole, those do
    that differ most."""
    ranked = sorted(some, key=_score)
    if ranked and _score(one) - _score(ranked[0]) < _score(ranked[-1]) - _score(one):
        ranked.reverse()
    return [ranked[i // 2] if i % 2 == 0 else ranked[-1 - i // 2] for i in range(len(ranked))]


def _score(one: Candidate) -> float:
    return one.reward if one.reward is not None and math.isfinite(one.reward) else 0.0


_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_MOST_PIECES = 1 << 18


@dataclass
class Measures:
    """What statistics are made of."""

    repeat_score: float
    reflections: dict[str, int]
    policy_entropy: float | None
    tokens: int

    @property
    def reflection_score(self) -> int:
        """How many phrases of reflection there are."""
        return sum(self.reflections.values())


@dataclass
class Response:
    """What the model sampled of a sample: n tokens."""

    ids: NDArray[np.int64]
    chosen: NDArray[np.bool_]
    """[R] Which of the response's slots these are: those of the mask, or all, if none is trained on."""
    text: str
    """Without special tokens."""
    ends: NDArray[np.int64]
    """[n] Where each token ends in it; special tokens are empty."""
    pure: int
    """How many tokens there are before the end token."""

    @property
    def pure_text(self) -> str:
        """The text of what comes before the end token."""
        return self.text[: int(self.ends[self.pure - 1])] if self.pure else ""


def response_of(sample: Sample, decoder: Decoder) -> Response:
    """The model's part of a sample."""
    slots = sample.tokens[sample.prompt :]
    chosen = sample.mask if sample.mask.any() else np.ones_like(sample.mask)
    ids = slots[chosen]
    special = decoder.special(ids)
    text, ends = decoder.text_and_ends(ids[~special])
    every = np.zeros(len(ids), dtype=np.int64)
    every[~special] = ends
    ended = len(ids) > 0 and (bool(special[-1]) or int(ids[-1]) in decoder.end_ids)
    return Response(ids, chosen, text, np.maximum.accumulate(every), len(ids) - ended)


def measured(sample: Sample, response: Response) -> Measures:
    """A sample's part in the statistics."""
    entropy = sample.arrays.get("action_entropy")
    known = None if entropy is None else entropy[response.chosen]
    known = None if known is None else known[np.isfinite(known)]
    return Measures(
        repeat_score=repeat_score(response.pure_text),
        reflections=reflections(response.pure_text),
        policy_entropy=float(known.mean(dtype=np.float64)) if known is not None and len(known) else None,
        tokens=len(response.ids),
    )


def spread_of(log_probs: NDArray[Any]) -> float:
    """The sample standard deviation of log-probs; 0 of one or none."""
    return float(np.std(log_probs.astype(np.float64), ddof=1)) if len(log_probs) > 1 else 0.0


class Renderer:
    """Encode trajectories as JSON objects.

    `mark`: from the entropies [n] of the sampled tokens to the indices of those to mark, or `None` to mark none.
    """

    def __init__(
        self, decoder: Decoder, mark: Callable[[NDArray[Any]], NDArray[Any]] | None, separate_images: bool
    ) -> None:
        self.decoder = decoder
        self.mark = mark
        self.separate_images = separate_images
        self._pieces = _Pieces()

    def record(self, sample: Sample, step: int, paths: list[str | None]) -> tuple[bytes, Measures]:
        """A sample's record, as JSON, and its measures; `paths`: the files of its images."""
        text, ends = self.decoder.text_and_ends(sample.tokens)
        response = response_of(sample, self.decoder)
        found = measured(sample, response)
        entropy = sample.arrays.get("action_entropy")
        record: dict[str, Any] = {
            "global_step": step,
            "experience_index": sample.experience,
            "sample_in_exp": sample.row,
            "full_sequence": text if sample.padded is None else self.decoder.text(sample.padded),
            "generated_text": response.text,
            "pure_generated_text": response.pure_text,
            "label": sample.label,
            "reference": sample.reference,
            "repeat_score": found.repeat_score,
            "reflection_pattern_score": found.reflection_score,
            "reflection_pattern_details": found.reflections,
            "policy_entropy": found.policy_entropy,
            "response_token_count": found.tokens,
        }
        if self.mark is not None and entropy is not None:
            marked = self._marked(response, entropy[response.chosen], self.mark)
            record["generated_tokens"] = orjson.Fragment(b"[" + b",".join(marked) + b"]")
            record["pure_generated_tokens"] = orjson.Fragment(b"[" + b",".join(marked[: response.pure]) + b"]")
        for name in NUMBERS:
            if name in sample.arrays:
                record[name] = _writable(sample.arrays[name])
            elif name in sample.numbers:
                record[name] = sample.numbers[name]
        if sample.info is not None:
            record["info"] = sample.info
        record |= self._images(sample, paths)
        record |= self._more(sample, text, ends, response)
        return orjson.dumps(record, option=_OPTIONS), found

    def _marked(
        self, response: Response, entropy: NDArray[Any], mark: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> list[bytes]:
        """[n] The JSON of each token: its text, whether it is marked, and if so its entropy."""
        ends = response.ends.tolist()
        text = response.text
        tokens = [self._pieces[text[a:b]] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        if len(self._pieces) > _MOST_PIECES:
            self._pieces.clear()
        if not len(entropy):
            return tokens
        places = mark(entropy)
        scores = orjson.dumps(_writable(entropy[places]), option=_OPTIONS)[1:-1].split(b",")
        for at, score in zip(places.tolist(), scores, strict=True):
            tokens[at] = tokens[at].removesuffix(b"false}") + b'true,"entropy_score":' + score + b"}"
        return tokens

    def _images(self, sample: Sample, paths: list[str | None]) -> dict[str, Any]:
        if not sample.images:
            return {"has_images": False}
        said: dict[str, Any] = {"has_images": True, "num_images": len(sample.images)}
        if self.separate_images:
            return said | {"image_paths": paths}
        texts = [None if one is None else base64.b64encode(one.png).decode() for one in sample.images]
        return said | {"images_base64": texts}

    def _more(self, sample: Sample, text: str, ends: NDArray[np.int64], response: Response) -> dict[str, Any]:
        """What LightRFT's records lack."""
        eid, prompt = sample.eid, sample.prompt
        log_probs = sample.arrays.get("action_log_probs")
        spread = None if log_probs is None else spread_of(log_probs[response.chosen])
        own = [name for name in ARRAYS.values() if name not in NUMBERS]
        known = [name for name in sample.arrays if name in FIELDS and name not in ARRAYS.values()]
        custom = [name for name in sample.arrays if name not in FIELDS and name not in ARRAYS.values()]
        more: dict[str, Any] = {
            "action_log_prob_std": spread,
            "uid": eid.uid,
            "gid": eid.tid,
            "batch": eid.batch,
            "task": eid.task,
            "run": eid.run,
            "turn": eid.step,
            "named": sample.named,
            "rank": sample.rank,
            "kept": sample.why,
            "kept_weight": sample.weight,
            "reward": sample.reward,
            "reward_parts": sample.parts,
            "prompt_tokens": prompt,
            "prompt_text": sample.more.get("prompt_text", text[: int(ends[prompt - 1])] if prompt else ""),
            "token_ids": sample.tokens,
            "text": text,
            "token_ends": ends,
            "mask": sample.mask.astype(np.uint8),
            "segments": sample.segments,
        }
        more |= {name: _writable(sample.arrays[name]) for name in (*own, *known) if name in sample.arrays}
        if custom:
            more["custom"] = {name: _writable(sample.arrays[name]) for name in custom}
        more |= {name: value for name, value in sample.more.items() if name not in more}
        if sample.images:
            more["image_sha256"] = [None if one is None else one.sha256 for one in sample.images]
        if sample.rejected is not None:
            tokens = np.concatenate([sample.tokens[:prompt], sample.rejected])
            other, other_ends = self.decoder.text_and_ends(tokens)
            more["rejected"] = {"text": other, "token_ids": tokens, "token_ends": other_ends}
        if sample.nonfinite:
            more["nonfinite"] = sample.nonfinite
        if sample.notes:
            more["notes"] = sample.notes
        return more


class _Pieces(dict[str, bytes]):
    """The JSON of a token that is not marked, by its text: most texts come again."""

    def __missing__(self, text: str) -> bytes:
        made = self[text] = b'{"text":' + orjson.dumps(text) + b',"high_entropy":false}'
        return made


def _writable(values: NDArray[Any]) -> NDArray[Any]:
    """An array as orjson takes it; what is not finite becomes null there."""
    if values.dtype.kind == "b":
        return values.astype(np.uint8)
    kept = values.dtype in (np.float32, np.float64, np.int64, np.int32, np.int16, np.int8, np.uint8)
    return np.ascontiguousarray(values if kept else values.astype(np.float32 if values.dtype.kind == "f" else np.int64))
