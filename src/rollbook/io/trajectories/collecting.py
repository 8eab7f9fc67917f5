"""All samples that a caller gave, in any mix of batches, buffer items and records.

Invariant: what cannot be read costs itself alone, and is named; a sample without an id gets one by its content, the
same in every process that holds the same samples in the same order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.ids import EID
from rollbook.io.trajectories.pictures import Pictures
from rollbook.io.trajectories.plain import Plain
from rollbook.io.trajectories.sample import ARRAYS, NUMBERS, Candidate, Sample
from rollbook.io.trajectories.sources import Held

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
