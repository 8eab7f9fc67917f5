"""Checkpoints of a run: weights, optimizers, random states and cursors, in a folder of each step that was saved.

Invariant: a checkpoint is there whole or not at all: it is written under another name, synced, and takes its place by
one rename. What is read from one is tensors, numbers and text; nothing in it is executed.

    checkpoints/step-000040/model/        what Actor.save_pretrained writes: a model to go on with, or to serve
                            critic/       the critic's, where there is one
                            state.pt      optimizers and random states
                            trainer.json  step, seed, the cursor in the data, the book's checkpoint
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollbook.book.disk import hit_failpoint
from rollbook.core.checks import check_bool, check_int
from rollbook.core.errors import RollbookError
from rollbook.core.files import make_folder, make_private
from rollbook.models.loading import hide_progress_bars

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL = ".partial-"
_OLD = ".old-"


class CorruptCheckpointError(RollbookError, ValueError):
    """A checkpoint that is not whole, or was changed: an older one is not taken in its place without being told to."""

    def __init__(self, path: Path, why: str) -> None:
        folder = next((parent for parent in (path, *path.parents) if is_name(parent.name)), None)
        hint = "" if folder is None else f". To go on from the checkpoint before it, remove {folder}"
        super().__init__(f"{path}: {why}{hint}")


def name_of(step: int) -> str:
    """What the checkpoint of a step is called, in the folder and in the book.

    >>> name_of(40)
    'step-000040'
    """
    return f"step-{check_int('step', step):06d}"


def is_name(name: str) -> bool:
    """Whether a name is one that `name_of` gives.

    >>> is_name("step-000040"), is_name("best")
    (True, False)
    """
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class CheckpointConfig:
    """Where a `Trainer` writes checkpoints, and when.

    Args:
        folder: The run's folder. A trainer continues from the newest checkpoint in it.
        interval: Steps between checkpoints in `Trainer.run`; 0 writes none in between.
        keep_last: Number of recent checkpoints to keep, beside that of step 0; `None` keeps all.
        save_final: Whether `Trainer.run` writes a checkpoint after the last step.

    >>> CheckpointConfig("runs/mine", interval=10).keep_last is None
    True
    """

    folder: Path
    interval: int = 0
    keep_last: int | None = None
    save_final: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        check_int("checkpoints.interval", self.interval)
        if self.keep_last is not None:
            check_int("checkpoints.keep_last", self.keep_last, 1)
        check_bool("checkpoints.save_final", self.save_final)


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
        folder = self.path / "critic"
        return folder if folder.is_dir() else None

    def trainer_state(self) -> dict[str, Any]:
        """Read `trainer.json`."""
        path = self.path / "trainer.json"
        try:
            state = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CorruptCheckpointError(path, f"cannot be read ({error})") from None
        if not isinstance(state, dict) or state.get("step") != self.step:
            step = state.get("step") if isinstance(state, dict) else state
            raise CorruptCheckpointError(path, f"got {str(step)[:60]!r} as the step, expected {self.step}")
        lacking = next((name for name in ("seed", "book", "prompts") if name not in state), None)
        if lacking is not None:
            raise CorruptCheckpointError(path, f"got no {lacking!r}, expected it")
        return state


def saved(folder: Path) -> list[Saved]:
    """The checkpoints of a run's folder, oldest first.

    >>> saved(Path("no such folder"))
    []
    """
    where = folder / FOLDER
    entries = [(_NAME.fullmatch(entry.name), entry) for entry in where.iterdir()] if where.is_dir() else []
    return sorted(
        (Saved(int(match[1]), path) for match, path in entries if match), key=lambda checkpoint: checkpoint.step
    )


def save(
    folder: Path,
    step: int,
    *,
    actor: Any,
    critic: Any = None,
    state: Mapping[str, Any],
    trainer_state: Mapping[str, Any],
) -> Saved:
    """Write a checkpoint; one of the same step that is there already is replaced."""
    where = folder / FOLDER
    make_folder(where)
    mend(folder)
    target, partial = where / name_of(step), where / f"{_PARTIAL}{name_of(step)}"
    partial.mkdir(0o700)
    hit_failpoint("saving begins")
    with hide_progress_bars():
        actor.save_pretrained(partial / "model")
        hit_failpoint("model saved")
        if critic is not None:
            critic.save_pretrained(partial / "critic")
    torch.save({**state, "random": random_state()}, partial / "state.pt")
    hit_failpoint("state saved")
    (partial / "trainer.json").write_text(json.dumps({"step": step, **trainer_state}, indent=1))
    make_private(partial)
    _sync(partial)
    hit_failpoint("before rename")
    old = where / f"{_OLD}{name_of(step)}"
    if target.exists():
        target.rename(old)
        hit_failpoint("between renames")
    partial.rename(target)
    _sync_one(where)
    hit_failpoint("after rename")
    if old.exists():
        shutil.rmtree(old)
    return Saved(step, target)


def mend(folder: Path) -> None:
    """Clear away what a process left that was killed while it saved or removed a checkpoint."""
    where = folder / FOLDER
    for left in where.glob(f"{_OLD}*"):
        target = where / left.name.removeprefix(_OLD)
        if target.exists():
            shutil.rmtree(left)
        else:
            left.rename(target)  # its successor did not get there
    for left in where.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left)


def load_state(checkpoint: Saved) -> dict[str, Any]:
    """What `state.pt` holds: `learner`, `random`, and whatever else `save` was given."""
    path = checkpoint.path / "state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a damaged file: of many kinds, from zip, pickle and torch
        reason = str(error).partition(chr(10))[0].rstrip(".")
        raise CorruptCheckpointError(path, f"cannot be read ({type(error).__name__}: {reason})") from None
    if not isinstance(state, dict) or not {"learner", "random"} <= state.keys():
        raise CorruptCheckpointError(path, "got something else, expected 'learner' and 'random'")
    return state


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Report a model that cannot be loaded as a broken checkpoint; random states stay as they are."""
    before = random_state()
    try:
        with hide_progress_bars():
            yield
    except Exception as error:  # of transformers, safetensors, peft
        reason = str(error).partition(chr(10))[0].rstrip(".")
        raise CorruptCheckpointError(folder, f"cannot be loaded ({type(error).__name__}: {reason})") from error
    finally:
        put_random_state(before)


def load_weights(model: Any, folder: Path) -> None:
    """Put a checkpoint's weights into a model that is there: an `Actor` or a `Critic`, with adapters or without. All of
    them or none; random states stay as they are."""
    with loading(folder):
        saved_model = type(model)(os.fspath(folder))
    theirs, mine = saved_model.state_dict(), model.state_dict()
    for name, weight in mine.items():
        if name not in theirs or theirs[name].shape != weight.shape:
            raise CorruptCheckpointError(folder, f"got no weight {name} of shape {list(weight.shape)}, expected it")
    with torch.no_grad():
        for name, weight in mine.items():
            weight.copy_(theirs[name])


def prune(folder: Path, keep: int | None) -> list[Saved]:
    """Remove all but the newest `keep` checkpoints, and the first, which is what training began with; those removed."""
    if keep is None:
        return []
    check_int("keep", keep, 1)
    checkpoints = saved(folder)
    gone = [checkpoint for checkpoint in checkpoints[:-keep] if checkpoint.step]
    for checkpoint in gone:
        # The name first: what is half removed is no checkpoint.
        hidden = checkpoint.path.with_name(f"{_PARTIAL}{checkpoint.path.name}")
        checkpoint.path.rename(hidden)
        hit_failpoint("during prune")
        shutil.rmtree(hidden)
    return gone


def random_state() -> dict[str, Any]:
    """The random states of torch, for the CPU and every CUDA device, and those of Python and NumPy, which functions of
    the user's (rewards, environments) may ask."""
    numpy_state = np.random.get_state(legacy=False)
    numpy = {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}}
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def put_random_state(state: Mapping[str, Any]) -> None:
    """Go on from a random state."""
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
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
