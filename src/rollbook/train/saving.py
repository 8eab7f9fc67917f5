"""Checkpoints of a run: weights, optimizers, random states and cursors, in a folder of each step that was saved.

Invariant: a checkpoint is there whole or not at all: it is written under another name, synced, and takes its place by
one rename. What is read from one is tensors, numbers and text; nothing in it is executed.

    checkpoints/step-000040/model/        what Actor.save_pretrained writes: a model to go on with, or to serve
                            critic/       the critic's, where there is one
                            state.pt      optimizers and torch's random states
                            trainer.json  step, seed, the cursor in the data, the book's checkpoint
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollbook.algorithms.registry import whole_number

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL = ".partial-"


def name_of(step: int) -> str:
    """What the checkpoint of a step is called, in the folder and in the book.

    >>> name_of(40)
    'step-000040'
    """
    return f"step-{whole_number('step', step):06d}"


@dataclass(frozen=True)
class Saved:
    """One checkpoint."""

    step: int
    path: Path

    @property
    def model(self) -> Path:
        """The folder that `Actor` takes."""
        return self.path / "model"

    @property
    def critic(self) -> Path | None:
        """The folder that `Critic` takes, where there is one."""
        found = self.path / "critic"
        return found if found.is_dir() else None

    def told(self) -> dict[str, Any]:
        """What `trainer.json` says."""
        found = json.loads((self.path / "trainer.json").read_text())
        if not isinstance(found, dict) or found.get("step") != self.step:
            raise ValueError(f"{self.path}: got a trainer.json of step {found.get('step')!r}, expected {self.step}")
        return found


def saved(folder: Path) -> list[Saved]:
    """The checkpoints of a run's folder, oldest first.

    >>> saved(Path("no such folder"))
    []
    """
    where = folder / FOLDER
    found = [(_NAME.fullmatch(one.name), one) for one in where.iterdir()] if where.is_dir() else []
    return sorted((Saved(int(match[1]), one) for match, one in found if match), key=lambda one: one.step)


def save(
    folder: Path, step: int, *, actor: Any, critic: Any = None, state: Mapping[str, Any], told: Mapping[str, Any]
) -> Saved:
    """Write a checkpoint; one of the same step that is there already is replaced."""
    where = folder / FOLDER
    where.mkdir(parents=True, exist_ok=True)
    target, partial = where / name_of(step), where / f"{_PARTIAL}{name_of(step)}"
    for left in where.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left)  # of a run that was killed while it saved
    partial.mkdir()
    actor.save_pretrained(partial / "model")
    if critic is not None:
        critic.save_pretrained(partial / "critic")
    torch.save({**state, "random": random_state()}, partial / "state.pt")
    (partial / "trainer.json").write_text(json.dumps({"step": step, **told}, indent=1))
    _sync(partial)
    if target.exists():
        old = where / f"{_PARTIAL}old-{name_of(step)}"
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old)
    else:
        partial.rename(target)
    _sync_one(where)
    return Saved(step, target)


def load_state(found: Saved) -> dict[str, Any]:
    """What `state.pt` holds; torch's random states are put back on the way."""
    state: dict[str, Any] = torch.load(found.path / "state.pt", map_location="cpu", weights_only=True)
    put_random_state(state.pop("random"))
    return state


def load_weights(model: Any, folder: Path) -> None:
    """Put a checkpoint's weights into a model that is there: an `Actor` or a `Critic`, with adapters or without."""
    kept = type(model)(os.fspath(folder))
    theirs = kept.state_dict()
    with torch.no_grad():
        for name, mine in model.state_dict().items():
            if name not in theirs or theirs[name].shape != mine.shape:
                raise ValueError(f"{folder}: got no weight {name} of shape {list(mine.shape)}, expected it")
            mine.copy_(theirs[name])


def prune(folder: Path, keep: int | None) -> list[Saved]:
    """Remove all but the newest `keep` checkpoints, and the first, which is what training began with; those removed."""
    if keep is None:
        return []
    whole_number("keep", keep, 1)
    found = saved(folder)
    gone = [one for one in found[:-keep] if one.step]
    for one in gone:
        # The name first: what is half removed is no checkpoint.
        hidden = one.path.with_name(f"{_PARTIAL}{one.path.name}")
        one.path.rename(hidden)
        shutil.rmtree(hidden)
    return gone


def random_state() -> dict[str, Any]:
    """Torch's random states: of the CPU and of every CUDA device."""
    made: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        made["cuda"] = torch.cuda.get_rng_state_all()
    return made


def put_random_state(state: Mapping[str, Any]) -> None:
    """Go on from a random state."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _sync(folder: Path) -> None:
    """Have everything in a folder on the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            _sync_one(Path(root) / name)
        _sync_one(Path(root))


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
