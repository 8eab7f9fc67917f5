"""Checkpoints of a run: weights, optimizer states, random states and the position in the data, in a folder per step.

Invariant: a checkpoint is complete or does not exist: it is written under another name, synced, and renamed. Reading
one executes nothing.

    checkpoints/step-000040/model/        what Actor.save_pretrained writes; of another policy, weights.pt
                            critic/       the critic, if there is one
                            state.pt      optimizer states and random states
                            shards/       distributed run: weights, optimizer states (torch.distributed.checkpoint)
                            trainer.json  step, seed, position in the data, checkpoint of the book
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollbook.book.disk import hit_failpoint
from rollbook.core.checks import check_bool, check_int
from rollbook.core.errors import RollbookError
from rollbook.core.files import make_folder, make_private, sync_path, sync_tree
from rollbook.models.actor import Actor, Critic
from rollbook.models.loading import hide_progress_bars

if TYPE_CHECKING:
    from rollbook.models.protocols import Policy, Trainable, ValueModel
    from rollbook.train.optimizer import Optimizer

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CorruptCheckpointError",
    "checkpoint_name",
    "list_checkpoints",
    "load_weights",
    "prune",
    "save",
]

CHECKPOINT_FOLDER = "checkpoints"
SHARDS = "shards"
_WEIGHTS = "weights.pt"
"""The `state_dict` of a model that is neither an `Actor` nor a `Critic`."""
_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL = ".partial-"
_OLD = ".old-"


class RankError(RollbookError, RuntimeError):
    """Raised on all ranks of a distributed run when one of them failed, with its number and its message."""


class CorruptCheckpointError(RollbookError, ValueError):
    """Raised for a checkpoint that is incomplete or damaged. Older checkpoints are not used instead.

    Args:
        path: The file or folder.
        reason: What is wrong with it.
    """

    def __init__(self, path: Path, reason: str) -> None:
        folder = next((parent for parent in (path, *path.parents) if is_checkpoint_name(parent.name)), None)
        hint = "" if folder is None else f". To continue from the checkpoint before it, remove {folder}"
        super().__init__(f"{path}: {reason}{hint}")


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint of a step, in the folder and in the book.

    Args:
        step: Number of the step.

    Returns:
        The name.

    >>> checkpoint_name(40)
    'step-000040'
    """
    return f"step-{check_int('step', step):06d}"


def is_checkpoint_name(name: str) -> bool:
    """Return whether a name is that of a checkpoint.

    >>> is_checkpoint_name("step-000040"), is_checkpoint_name("best")
    (True, False)
    """
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class CheckpointConfig:
    """Where a `Trainer` writes checkpoints, and when.

    Args:
        folder: The run's folder. A trainer continues from the newest checkpoint in it.
        interval: Steps between checkpoints in `Trainer.run`; 0 writes none in between.
        keep_last: Number of recent checkpoints to keep, in addition to that of step 0; `None` keeps all.
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
class Checkpoint:
    """A checkpoint of a run.

    Args:
        step: Number of the step.
        path: The folder.

    >>> str(Checkpoint(40, Path("runs/demo/checkpoints/step-000040")).model)
    'runs/demo/checkpoints/step-000040/model'
    """

    step: int
    path: Path

    @property
    def model(self) -> Path:
        """Folder of the policy, which `Actor` loads."""
        return self.path / "model"

    @property
    def critic(self) -> Path | None:
        """Folder of the critic, which `Critic` loads; `None` if there is none."""
        folder = self.path / "critic"
        return folder if folder.is_dir() else None

    @property
    def shards(self) -> Path | None:
        """Folder of `torch.distributed.checkpoint`; `None` if a single process wrote the checkpoint."""
        folder = self.path / SHARDS
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
        missing = next((name for name in ("seed", "book", "prompts") if name not in state), None)
        if missing is not None:
            raise CorruptCheckpointError(path, f"got no {missing!r}, expected it")
        return state


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints in the folder of a run, oldest first.

    Args:
        folder: The folder of the run.

    Returns:
        The checkpoints.

    >>> list_checkpoints(Path("no such folder"))
    []
    """
    checkpoints = folder / CHECKPOINT_FOLDER
    entries = [(_NAME.fullmatch(entry.name), entry) for entry in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return sorted(
        (Checkpoint(int(match[1]), path) for match, path in entries if match), key=lambda checkpoint: checkpoint.step
    )


def save(
    folder: Path,
    step: int,
    *,
    actor: Policy,
    critic: ValueModel | None = None,
    state: Mapping[str, Any],
    trainer_state: Mapping[str, Any],
) -> Checkpoint:
    """Write a checkpoint. It replaces one of the same step.

    Args:
        folder: The folder of the run.
        step: Number of the step.
        actor: The policy.
        critic: The critic, if there is one.
        state: Content of `state.pt`, in addition to random states.
        trainer_state: Content of `trainer.json`, in addition to the step.

    Returns:
        The checkpoint.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save(Path(folder), 40, actor=torch.nn.Linear(2, 2), state={}, trainer_state={})
    ...     sorted(path.name for path in saved.path.iterdir())
    ['model', 'state.pt', 'trainer.json']
    """
    partial = begin(folder, step)
    with hide_progress_bars():
        _save_model(actor, partial / "model")
        hit_failpoint("model saved")
        if critic is not None:
            _save_model(critic, partial / "critic")
    write_states(partial, step, {**state, "random": random_state()}, trainer_state)
    return commit(folder, step)


def _save_model(model: Trainable, folder: Path) -> None:
    if isinstance(model, Actor | Critic):
        model.save_pretrained(folder)
    else:
        folder.mkdir()
        torch.save(model.state_dict(), folder / _WEIGHTS)


def write_states(partial: Path, step: int, state: Mapping[str, Any], trainer_state: Mapping[str, Any]) -> None:
    """Write `state.pt` and `trainer.json`."""
    torch.save(dict(state), partial / "state.pt")
    hit_failpoint("state saved")
    (partial / "trainer.json").write_text(json.dumps({"step": step, **trainer_state}, indent=1))


def begin(folder: Path, step: int) -> Path:
    """Create the folder of a checkpoint under its temporary name."""
    checkpoints = folder / CHECKPOINT_FOLDER
    make_folder(checkpoints)
    remove_partial(folder)
    partial = checkpoints / f"{_PARTIAL}{checkpoint_name(step)}"
    partial.mkdir(0o700)
    hit_failpoint("saving begins")
    return partial


def commit(folder: Path, step: int) -> Checkpoint:
    """Flush a checkpoint, whose files are all written, and give it its name. It replaces one of the same step."""
    checkpoints = folder / CHECKPOINT_FOLDER
    target, partial = checkpoints / checkpoint_name(step), checkpoints / f"{_PARTIAL}{checkpoint_name(step)}"
    make_private(partial)
    sync_tree(partial)
    hit_failpoint("before rename")
    old = checkpoints / f"{_OLD}{checkpoint_name(step)}"
    if target.exists():
        target.rename(old)
        hit_failpoint("between renames")
    partial.rename(target)
    sync_path(checkpoints)
    hit_failpoint("after rename")
    if old.exists():
        shutil.rmtree(old)
    return Checkpoint(step, target)


def remove_partial(folder: Path) -> None:
    """Remove partial checkpoints of a process that was killed while it saved or removed one."""
    checkpoints = folder / CHECKPOINT_FOLDER
    for path in checkpoints.glob(f"{_OLD}*"):
        target = checkpoints / path.name.removeprefix(_OLD)
        if target.exists():
            shutil.rmtree(path)
        else:
            path.rename(target)  # the process was killed before the new one was in place
    for path in checkpoints.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path)


def load_state(checkpoint: Checkpoint, *, shards: bool = True) -> dict[str, Any]:
    """Load `state.pt`: `learner`, `random`, and the other entries that were passed to `save`.

    Args:
        checkpoint: The checkpoint.
        shards: Whether to add the tensors of a distributed run's `shards` to `learner`.
    """
    path = checkpoint.path / "state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise errors of zip, pickle and torch
        reason = str(error).partition(chr(10))[0].rstrip(".")
        raise CorruptCheckpointError(path, f"cannot be read ({type(error).__name__}: {reason})") from None
    if not isinstance(state, dict) or not {"learner", "random"} <= state.keys():
        raise CorruptCheckpointError(path, "got something else, expected 'learner' and 'random'")
    if shards and checkpoint.shards is not None:
        _add_shards(state["learner"], checkpoint.shards)
    return state


def _add_shards(learner: dict[str, Any], folder: Path) -> None:
    """Add the tensors of a distributed checkpoint to the state of a learner, in the form of a single process."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        reader = FileSystemReader(folder)
        entries: Any = reader.read_metadata().state_dict_metadata
        tensors = {path: torch.empty(entry.size, dtype=entry.properties.dtype) for path, entry in entries.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(tensors, storage_reader=reader, no_dist=True)
    except Exception as error:  # errors of the reader, the planner and torch
        reason = str(error).partition(chr(10))[0].rstrip(".")
        raise CorruptCheckpointError(folder, f"cannot be read ({type(error).__name__}: {reason})") from None
    for name in ("optimizer", "critic_optimizer"):
        if name not in learner:
            continue
        optimizer, prefix = learner[name], f"{name}/"
        by_weight: dict[str, dict[str, torch.Tensor]] = {weight: {} for weight in optimizer["names"]}
        for path, tensor in tensors.items():
            if path.startswith(prefix):
                key, _, weight = path.removeprefix(prefix).partition("/")
                by_weight[weight][key] = tensor
        weights = [by_weight[weight].pop("weights") for weight in optimizer["names"]]
        if optimizer.pop("rounded"):
            optimizer["masters"] = weights
        # The optimizer counts matrices first, then vectors.
        order = sorted(range(len(weights)), key=lambda i: weights[i].dim() <= 1)
        states = [by_weight[optimizer["names"][i]] for i in order]
        optimizer["inner"]["state"] = {i: state for i, state in enumerate(states) if state}


def flatten_states(learner: Mapping[str, Any], optimizers: Mapping[str, Optimizer]) -> dict[str, torch.Tensor]:
    """Return the optimizer states of a learner, and its float32 copies, under the names of a distributed checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for name, optimizer in optimizers.items():
        dims = {weight: tensor.dim() for weight, tensor in zip(optimizer.names, optimizer.weights, strict=True)}
        # The optimizer counts matrices first, then vectors.
        order = sorted(learner[name]["names"], key=lambda weight: dims[weight] <= 1)
        for i, state in learner[name]["inner"]["state"].items():
            tensors |= {f"{name}/{key}/{order[i]}": tensor for key, tensor in state.items() if tensor is not None}
        masters = zip(learner[name]["names"], learner[name].get("masters", ()), strict=False)
        tensors |= {f"{name}/weights/{weight}": master for weight, master in masters}
    return tensors


@contextmanager
def loading_errors(folder: Path) -> Iterator[None]:
    """Raise errors of loading a model as `CorruptCheckpointError`; restore random states."""
    saved_state = random_state()
    try:
        with hide_progress_bars():
            yield
    except Exception as error:  # errors of transformers, safetensors, peft
        reason = str(error).partition(chr(10))[0].rstrip(".")
        raise CorruptCheckpointError(folder, f"cannot be loaded ({type(error).__name__}: {reason})") from error
    finally:
        set_random_state(saved_state)


def load_weights(model: Trainable, folder: Path) -> None:
    """Load the weights of a checkpoint into a model, with adapters or without. Random states do not change.

    Args:
        model: The model.
        folder: The folder of the saved model.

    Raises:
        CorruptCheckpointError: The folder cannot be loaded, or lacks a weight. The model is unchanged.

    >>> import tempfile
    >>> model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load_weights(other, save(Path(folder), 40, actor=model, state={}, trainer_state={}).model)
    >>> torch.equal(model.weight, other.weight)
    True
    """
    if not isinstance(model, Actor | Critic):
        with loading_errors(folder):
            model.load_state_dict(torch.load(folder / _WEIGHTS, map_location="cpu", weights_only=True))
        return
    weights, saved_weights = model.state_dict(), read_weights(model, folder)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved_weights[name])


def read_weights(model: Actor | Critic, folder: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a saved model, which must have those of `model`; see `load_weights`."""
    # A sharded model is of a subclass that torch makes.
    kind = next(base for base in type(model).__mro__ if base.__module__.startswith("rollbook."))
    with loading_errors(folder):
        saved_model = kind(os.fspath(folder))
    saved_weights: dict[str, torch.Tensor] = saved_model.state_dict()
    for name, weight in model.state_dict().items():
        if name not in saved_weights or saved_weights[name].shape != weight.shape:
            raise CorruptCheckpointError(folder, f"got no weight {name} of shape {list(weight.shape)}, expected it")
    return saved_weights


def prune(folder: Path, keep: int | None) -> list[Checkpoint]:
    """Remove all checkpoints but the newest `keep` and that of step 0.

    Args:
        folder: The folder of the run.
        keep: Number of checkpoints to keep; `None`: all.

    Returns:
        The removed checkpoints.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (0, 10, 20, 30):
    ...         _ = save(Path(folder), step, actor=torch.nn.Linear(2, 2), state={}, trainer_state={})
    ...     [checkpoint.step for checkpoint in prune(Path(folder), keep=2)]
    [10]
    """
    if keep is None:
        return []
    check_int("keep", keep, 1)
    checkpoints = list_checkpoints(folder)
    removed = [checkpoint for checkpoint in checkpoints[:-keep] if checkpoint.step]
    for checkpoint in removed:
        # Renamed first, so that a partly removed folder is not a checkpoint.
        partial = checkpoint.path.with_name(f"{_PARTIAL}{checkpoint.path.name}")
        checkpoint.path.rename(partial)
        hit_failpoint("during prune")
        shutil.rmtree(partial)
    return removed


def random_state() -> dict[str, Any]:
    """Return the random states of torch (CPU and all CUDA devices), Python and NumPy."""
    numpy_state = np.random.get_state(legacy=False)
    numpy = {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}}
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
