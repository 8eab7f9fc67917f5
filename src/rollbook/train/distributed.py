"""Training on several ranks: `Distributed`, `DistributedLearner` and `DistributedTrainer`, on `torch.distributed`.

Rank 0 leads and the other ranks follow. Rank 0 runs the loop of `Trainer`: it takes prompts, writes and leases from the
book, plans micro-batches, and writes metrics and checkpoints. Where a model runs, it calls a handler on all ranks, each
with its share: prompts to generate from, records to annotate, rows to train on. Rows travel as ids, and a rank reads
them from the book; ranks that cannot read it are sent the rows.

| strategy | weights, gradients and optimizer states | gradients are summed |
|---|---|---|
| `ddp` | complete on every rank | by an all-reduce after the last micro-batch |
| `fsdp` | sharded by FSDP2: each decoder layer, and the rest of the model | by a reduce-scatter in each backward pass |

`ddp` does not use `DistributedDataParallel`, which reduces in the backward pass of its own `forward`: passes call
`token_stats` and `token_values` of a model, and a rank may have fewer micro-batches than another, or none.

Invariant: losses are divided by the denominators of all ranks and gradients are summed, so that an update is that of
one rank up to rounding. With `fsdp`, every rank makes the same collective calls in a pass: one with fewer micro-batches
runs micro-batches that do not count.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from rollbook.batch import Batch
from rollbook.batch.columns import mask_unpredicted
from rollbook.batch.plan import MicroBatch, plan
from rollbook.book.disk import hit_failpoint
from rollbook.core.checks import check_choice
from rollbook.core.errors import RollbookError
from rollbook.core.experience import Experience, split_preference_pairs
from rollbook.core.experiences import Experiences
from rollbook.core.metrics import StepMetrics
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup
from rollbook.core.ragged import Ragged
from rollbook.models import Actor, Critic
from rollbook.models.head import Wrapper, scoring
from rollbook.models.loading import hide_progress_bars
from rollbook.rewards.recipes import as_reward
from rollbook.rollout.engine import derive_seed
from rollbook.train import checkpoint
from rollbook.train.checkpoint import RankError
from rollbook.train.learner import Learner, LossNormalizers
from rollbook.train.optimizer import Optimizer
from rollbook.train.pipeline import annotate, generate, score
from rollbook.train.rows import TrainRows
from rollbook.train.trainer import StepReport, Trainer, rollout_metrics

if TYPE_CHECKING:
    from concurrent.futures import Future

    from rollbook.core.sampling import Prompt, Sampling
    from rollbook.rewards.recipes import RewardLike
    from rollbook.rewards.types import Reward
    from rollbook.train.evaluation import Evaluation
    from rollbook.train.prompts import Prompts
    from rollbook.train.worker import RolloutPacer

STRATEGIES = ("none", "ddp", "fsdp")
_MODELS = ("policy", "reference", "critic", "teacher")
_ERROR_KEY = "rollbook/error"
"""Key of the first error of any rank, in the store of the process group."""
_POLL_SECONDS = 1.0
"""How often a rank checks whether another one failed."""
_GRACE_SECONDS = 10.0
"""How long a rank that is told of an error of another may take to end on its own."""
_RELEASE = "return"
"""Message of rank 0 that ends `follow` with a result."""
_FAIL = "raise"
"""Message of rank 0 that ends `follow` with an error."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks")
"""Attributes of a module with the hooks of FSDP."""


@dataclasses.dataclass
class _BusyTime:
    """Time of all ranks together, or its estimate: busy, and in total."""

    busy: float = 0.0
    total: float = 0.0

    def add(self, busy: float, total: float) -> None:
        self.busy += busy
        self.total += total


class Distributed:
    """The ranks of a run.

    The variables of the environment are those of `torchrun`. Without them, this process is the only rank.

    Args:
        strategy: `ddp` or `fsdp`.
        device: Device of the models; `None`: a GPU, by `LOCAL_RANK`, if there is one.
        precision: See `Learner`. With `fsdp` and `bfloat16`, the shards of trained weights are float32, and are rounded
            to bfloat16 when they are gathered.

    >>> distributed = Distributed("fsdp", "cpu")
    >>> distributed.rank, distributed.size
    (0, 1)
    >>> distributed.close()
    """

    def __init__(self, strategy: str, device: torch.device | str | None = None, *, precision: str = "float32") -> None:
        check_choice("distributed", strategy, STRATEGIES[1:])
        if strategy == "fsdp":
            # The output of a model is a view, which no loss changes in place.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        self.strategy, self.precision = strategy, precision
        device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
            torch.cuda.set_device(device)
        self.device = device
        """Device of this rank."""
        self._owns_process_group = not dist.is_initialized()
        if self._owns_process_group:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            single_rank_options: dict[str, Any] = {}
            if "WORLD_SIZE" not in os.environ:
                single_rank_options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
            dist.init_process_group(backend, timeout=timedelta(hours=2), **single_rank_options)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # A rank that died closes its connections, so a long timeout delays no error.
        self.control_group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        """Carries calls and their results."""
        self.writer_group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        """Used by the threads that write the shards of checkpoints."""
        self.group = ProcessGroup(self.control_group)
        """Exchanges objects between ranks, over gloo."""
        self.mesh = init_device_mesh(device.type, (self.size,))
        self.handlers: dict[str, Callable[[Any], Any]] = {}
        """What `call` calls on all ranks, by name."""
        self._wait_seconds = 0.0
        """Seconds that this rank waited for others in the current call."""
        self._measured_time, self._planned_time = _BusyTime(), _BusyTime()
        self._measured_until = time.perf_counter()
        """On rank 0: end of the time that is in `_measured_time`."""
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._ended = threading.Event()
        self._error_watch: threading.Thread | None = None
        if self.size > 1:
            self._error_watch = threading.Thread(target=self._watch_for_errors, daemon=True)
            self._error_watch.start()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def build_device(self) -> torch.device:
        """Where models are built before they are placed: on the host if only a shard of them may fit on the device."""
        return torch.device("cpu") if self.shards is not None else self.device

    @property
    def shards(self) -> ProcessGroup | None:
        """The ranks over which models are sharded; `None` if each has complete ones."""
        return self.group if self.strategy == "fsdp" and self.size > 1 else None

    def close(self) -> None:
        """End the process group, if this object created it."""
        self._ended.set()
        if self._error_watch is not None:
            # A thread that is in the store while the interpreter ends aborts the process.
            self._error_watch.join()
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
            # Without references, the groups end their threads. One that frees a tensor later aborts the process, too.
            del self.group, self.control_group, self.writer_group, self.mesh

    # --- messages -----------------------------------------------------------------------------------------------------

    def call(self, name: str, shares: Sequence[Any]) -> list[Any]:
        """Call a handler on all ranks, from rank 0.

        Args:
            name: Key of `handlers`.
            shares: [ranks] Argument of each rank.

        Returns:
            [ranks] The results.

        Raises:
            RankError: The handler failed on another rank.
        """
        self._scatter([(name, share) for share in shares])
        return self._run_handler(name, shares[0])

    def start_measuring(self) -> None:
        """Start to measure the time that ranks wait for each other, on rank 0, while the others `follow`."""
        self._measured_until = time.perf_counter()

    def _measure(self, busy_seconds: float) -> None:
        """Count the time since the last count, in which other ranks were busy, and rank 0 when it did not wait."""
        now = time.perf_counter()
        seconds, self._measured_until = now - self._measured_until, now
        self._measured_time.add(seconds - self._wait_seconds + busy_seconds, seconds * self.size)
        self._wait_seconds = 0.0

    def follow(self) -> Any:
        """Run the calls of rank 0 until it releases this rank, and return what it passed on.

        Raises:
            RankError: A rank failed.
        """
        while True:
            name, share = self._scatter(None)
            if name == _RELEASE:
                return share
            if name == _FAIL:
                self._ended.set()
                raise RankError(share)
            self._run_handler(name, share)

    def release(self, result: Any = None) -> None:
        """End `follow` on the other ranks, which return `result`.

        Args:
            result: What `follow` returns.
        """
        self._measure(0.0)
        self._scatter([(_RELEASE, result)] * self.size)

    def fail(self, error: BaseException) -> NoReturn:
        """Tell the other ranks about an exception of this one, which ends them, and raise it.

        Args:
            error: The exception.

        Raises:
            RankError: Another rank failed first, and this one could not communicate with it.
        """
        if self.size > 1 and not self._ended.is_set():
            first_error = self._record_error(error)
            if self.is_main:
                self._ended.set()
                with suppress(RuntimeError):  # they have ended already
                    self._scatter([(_FAIL, first_error)] * self.size)
            # Torch raises a RuntimeError if a rank has ended.
            is_of_torch = isinstance(error, RuntimeError) and not isinstance(error, RollbookError)
            if is_of_torch and first_error != self._describe_error(error):
                raise RankError(first_error) from None
        raise error

    def _describe_error(self, error: BaseException) -> str:
        return str(error) if isinstance(error, RankError) else f"rank {self.rank}: {type(error).__name__}: {error}"

    def _record_error(self, error: BaseException) -> str:
        """Record an exception as the first of all ranks, unless there is one; return the first."""
        text = self._describe_error(error)
        with suppress(RuntimeError):  # the store ends with the process that has it
            self._store.compare_set(_ERROR_KEY, "", text)
            text = self._store.get(_ERROR_KEY).decode()
        return text

    def _scatter(self, messages: list[Any] | None) -> Any:
        received: list[Any] = [None]
        dist.scatter_object_list(received, messages, src=0, group=self.control_group)
        return received[0]

    def _run_handler(self, name: str, share: Any) -> list[Any]:
        self._wait_seconds, start_time = 0.0, time.perf_counter()
        result: Any = None
        failure: BaseException | None = None
        try:
            result = self.handlers[name](share)
        except Exception as error:
            first_error = self._record_error(error)
            failure = error if first_error == self._describe_error(error) else RankError(first_error)
        seconds = time.perf_counter() - start_time
        replies: list[Any] = [None] * self.size
        reply = (failure is not None, result, seconds - self._wait_seconds)
        gather_time = time.perf_counter()
        try:
            dist.gather_object(reply, replies if self.is_main else None, dst=0, group=self.control_group)
        except RuntimeError:
            # A rank that waited for this one has ended, or a rank was killed.
            if failure is None:
                raise
            if self.is_main or isinstance(failure, RankError):
                raise failure from None
            raise RankError(self._describe_error(failure)) from failure
        if self.is_main:
            self._wait_seconds += time.perf_counter() - gather_time
            self._measure(sum(busy for _, _, busy in replies[1:]))
            if any(failed for failed, _, _ in replies):
                first_error = self._store.get(_ERROR_KEY).decode()
                if failure is not None and first_error.startswith("rank 0:"):
                    raise failure
                raise RankError(first_error)
        return [result for _, result, _ in replies] if self.is_main else []

    def _watch_for_errors(self) -> None:
        """End this process if it waits in a collective call for a rank that failed, or for one whose launcher has died.

        The launcher has the store, or rank 0 if there is none.
        """
        first_error = "the launcher of the ranks, or rank 0, has ended"
        with suppress(RuntimeError):  # the store is gone
            while not self._store.check([_ERROR_KEY]):
                if self._ended.wait(_POLL_SECONDS):
                    return
            first_error = self._store.get(_ERROR_KEY).decode()
        if not self._ended.wait(_GRACE_SECONDS):
            print(first_error, file=sys.stderr, flush=True)
            os._exit(1)

    def barrier(self) -> None:
        """Wait for all ranks. The time counts as waiting."""
        start_time = time.perf_counter()
        dist.barrier(group=self.control_group)
        self._wait_seconds += time.perf_counter() - start_time

    def add_plan(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Count how long ranks will wait for each other in an update, by the costs of its micro-batches.

        Args:
            micro_batches: The micro-batches of all ranks.
        """
        costs = np.zeros((self.size, max((micro.step for micro in micro_batches), default=-1) + 1))
        for micro in micro_batches:
            costs[micro.rank, micro.step] = micro.cost
        longest = costs.max(axis=0).sum() if self.strategy == "fsdp" else costs.sum(axis=1).max()
        self._planned_time.add(costs.sum(), longest * self.size)

    def wait_metrics(self) -> dict[str, float]:
        """Return the shares of time that ranks waited for each other since the last call.

        `ranks/wait_share` is measured, also while rank 0 works alone, but not within passes of sharded models, where
        ranks wait in every layer; `ranks/plan_wait_share` is that of the updates by their plans.
        """
        self._measure(0.0)
        times = {"ranks/wait_share": self._measured_time, "ranks/plan_wait_share": self._planned_time}
        self._measured_time, self._planned_time = _BusyTime(), _BusyTime()
        return {name: float(1 - entry.busy / entry.total) for name, entry in times.items() if entry.total}

    def split(self, prompts: Sequence[Any]) -> list[Sequence[Any]]:
        """Split prompts into one part for each rank, in order.

        Args:
            prompts: The prompts.

        Returns:
            The prompts of each rank.
        """
        bounds = [len(prompts) * rank // self.size for rank in range(self.size + 1)]
        return [prompts[begin:end] for begin, end in itertools.pairwise(bounds)]

    # --- models -------------------------------------------------------------------------------------------------------

    def place(self, model: nn.Module) -> None:
        """Give a model the weights of rank 0, complete (`ddp`) or sharded (`fsdp`), on the device of this rank.

        Args:
            model: A model with the same shapes on all ranks. For `fsdp`, an `Actor` or a `Critic`.
        """
        if self.strategy == "ddp":
            model.to(self.device)
            self.distribute(model, dict(_named_tensors(model)))
            return
        if not isinstance(model, Wrapper):
            raise ValueError(f"model: got {type(model).__name__}, expected an Actor or a Critic for fsdp")
        model.probe()
        for weight in model.parameters():
            if weight.requires_grad and weight.dtype == torch.bfloat16:
                weight.data = weight.data.float()
        # With several ranks, the complete weights are in the memory of the host (see `build_device`).
        tensors = dict(_named_tensors(model)) if self.size > 1 else None
        gathered_dtype = torch.bfloat16 if self.precision == "bfloat16" else None
        mixed_precision = MixedPrecisionPolicy(param_dtype=gathered_dtype, reduce_dtype=torch.float32)
        # On one rank, freeing gathered weights saves little: those of a trained model are kept until its update.
        keep_gathered = self.size == 1 and any(weight.requires_grad for weight in model.parameters())
        for layer in _decoder_layers(model):
            fully_shard(layer, mesh=self.mesh, mp_policy=mixed_precision, reshard_after_forward=not keep_gathered)
        if isinstance(model, Critic):
            # Values are float32.
            fully_shard(model.value_head, mesh=self.mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        fully_shard(model, mesh=self.mesh, mp_policy=mixed_precision)
        for module in _sharded_modules(model):
            module.set_reshard_after_backward(not keep_gathered, recurse=False)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        method = "token_values" if isinstance(model, Critic) else "token_stats"
        register_fsdp_forward_method(model, method)
        if tensors is not None:
            self.distribute(model, tensors)
        # The first pass makes the model the root of its layers; the engine calls them without it.
        filler = Batch.from_records(
            Experiences([Experience(tokens=[0, 0])]), ("tokens",), packed=False, device=self.device
        )
        with scoring(model):
            getattr(model, method)(filler)
        _reshard(model)

    def distribute(self, model: nn.Module, tensors: Mapping[str, torch.Tensor] | None) -> None:
        """Copy complete tensors of rank 0 into the weights and buffers of a model on all ranks, called by all.

        Args:
            model: The model.
            tensors: On rank 0, the tensors by name. Others are left as they are.
        """
        _reshard(model)
        targets = dict(_named_tensors(model))
        names = self.group.gather([name for name in targets if tensors is not None and name in tensors])[0]
        for name in names:
            self.copy_from_main(targets[name], None if tensors is None else tensors[name])

    @torch.no_grad()
    def copy_from_main(self, target: torch.Tensor, source: torch.Tensor | None) -> None:
        """Copy a complete tensor of rank 0 into a complete or sharded one on all ranks, called by all.

        Args:
            target: The tensor to write to.
            source: On rank 0, the tensor to copy.
        """
        device = target.device
        if self.is_main and source is not None:
            source = source.detach().to(device, target.dtype)
        else:
            source = torch.empty(target.shape, dtype=target.dtype, device=device)
        if isinstance(target, DTensor):
            target.copy_(distribute_tensor(source, target.device_mesh, target.placements))
        else:
            if self.size > 1:
                source = source.contiguous()
                dist.broadcast(source, 0)
            target.copy_(source)

    def full_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Gather the complete weights of a model in the host memory of rank 0; empty on other ranks. Called by all.

        Args:
            model: The model.

        Returns:
            The weights by name.
        """
        state: dict[str, torch.Tensor] = {}
        for name, weight in model.state_dict().items():
            tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if self.is_main:
                if self.precision == "bfloat16" and tensor.is_floating_point() and "value_head" not in name:
                    tensor = tensor.bfloat16()
                state[name] = tensor.detach().cpu()
        return state

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Gather the complete weights of a sharded model on every rank within the context, called by all.

        Args:
            model: The model.
        """
        modules = _sharded_modules(model) if self.strategy == "fsdp" else []
        saved_hooks = []
        for module in modules:
            module.unshard()
            # The hooks of FSDP gather and free weights, which would break CUDA graphs and shard a state dict.
            saved_hooks.append({name: getattr(module, name) for name in _HOOKS})
            module.__dict__.update({name: OrderedDict() for name in _HOOKS})
        try:
            yield
        finally:
            for module, hooks in zip(modules, saved_hooks, strict=True):
                module.__dict__.update(hooks)
                module.reshard()


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over weights and buffers, also those that a state dict leaves out."""
    for name, weight in model.named_parameters():
        yield name, weight.detach()
    yield from model.named_buffers()


def _sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _reshard(model: nn.Module) -> None:
    for module in _sharded_modules(model):
        module.reshard()


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the list of modules with the most weights."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    largest = max(
        lists, key=lambda module_list: sum(weight.numel() for weight in module_list.parameters()), default=None
    )
    return [] if largest is None else list(largest)


# --- the learner ------------------------------------------------------------------------------------------------------


class DistributedLearner(Learner):
    """A learner whose micro-batches are planned over all ranks by rank 0, which calls `update`.

    A `DistributedTrainer` builds it.

    Args:
        distributed: The ranks.
        pack: Turns rows into a message for a rank.
        unpack: Turns a message into rows.
        actor: The policy, placed on all ranks; further arguments are those of `Learner`.
        options: Those of `Learner`.
    """

    def __init__(
        self,
        distributed: Distributed,
        pack: Callable[[TrainRows, int], Any],
        unpack: Callable[[Any], TrainRows],
        actor: Any,
        algorithm: Any,
        **options: Any,
    ) -> None:
        super().__init__(actor, algorithm, **options)
        self.distributed, self._pack, self._unpack = distributed, pack, unpack
        self.rank_count = distributed.size
        # The reduce-scatter of a rank contains the weights that have a gradient: they must be the same on all ranks.
        self.uniform_media = distributed.shards is not None
        if distributed.strategy == "fsdp":
            for optimizer in self.optimizers.values():
                optimizer.shards = distributed.mesh.get_group()

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by their names in a checkpoint."""
        named = {"optimizer": self.optimizer, "critic_optimizer": self.critic_optimizer}
        return {name: optimizer for name, optimizer in named.items() if optimizer is not None}

    def _update(
        self,
        rows: TrainRows,
        minibatch: Sequence[int],
        micro_batches: Sequence[MicroBatch],
        normalizers: LossNormalizers,
        step: int,
        critic_only: bool,
    ) -> dict[str, Any] | None:
        self.distributed.add_plan(micro_batches)
        shares = []
        for rank in range(self.rank_count):
            rank_micro_batches = [micro for micro in micro_batches if micro.rank == rank]
            if self.distributed.strategy == "ddp":
                rank_micro_batches = [micro for micro in rank_micro_batches if len(micro)]
            row_lists = [
                [minibatch[i] for i in micro.indices.tolist()] or _find_filler(rows, minibatch, micro.modality)
                for micro in rank_micro_batches
            ]
            rank_rows = sorted({row for row_list in row_lists for row in row_list})
            position_of_row = {row: position for position, row in enumerate(rank_rows)}
            planned = [
                dataclasses.replace(micro, indices=np.array([position_of_row[row] for row in row_list], dtype=np.int64))
                for micro, row_list in zip(rank_micro_batches, row_lists, strict=True)
            ]
            message = self._pack(rows.take(rank_rows), rank) if rank_rows else None
            shares.append((message, planned, normalizers, step, critic_only))
        metrics: dict[str, Any] | None = self.distributed.call("update", shares)[0]
        return metrics

    def update_on_rank(self, share: tuple[Any, list[MicroBatch], LossNormalizers, int, bool]) -> dict[str, Any] | None:
        """Run the micro-batches of this rank, and update the weights together with the others.

        Args:
            share: What rank 0 sent: rows, micro-batches, normalizers, the step, and whether only the critic is trained.

        Returns:
            The metrics of all ranks, or `None` if a loss or gradient was not finite.
        """
        message, planned, normalizers, step, critic_only = share
        self.actor.train()
        if self.critic is not None:
            self.critic.train()
        rows = self._unpack(message) if message is not None else None
        indices = range(0 if rows is None else len(rows))
        return super()._update(rows, indices, planned, normalizers, step, critic_only)  # type: ignore[arg-type]

    def _reduce(self, metrics: dict[str, float]) -> dict[str, float]:
        for model in (self.actor, self.critic):
            if isinstance(model, nn.Module):
                _reshard(model)
        weights = [weight for optimizer in self.optimizers.values() for weight in optimizer.weights]
        replicated = weights if self.distributed.strategy == "ddp" else []
        self.distributed.barrier()
        replies = self.distributed.group.gather([metrics, [weight.grad is not None for weight in replicated]])
        reductions = []
        for i, weight in enumerate(replicated):
            if any(flags[i] for _, flags in replies):
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                reductions.append(dist.all_reduce(weight.grad, async_op=True))
        for reduction in reductions:
            reduction.wait()
        totals: dict[str, float] = {}
        for rank_metrics, _ in replies:
            for name, value in rank_metrics.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def state_dict(self) -> dict[str, Any]:
        """Return the state without its tensors, which every rank writes itself (`tensors`)."""
        state: dict[str, Any] = {"failures": self.failures}
        for name, optimizer in self.optimizers.items():
            groups = optimizer.inner.state_dict()["param_groups"]
            state[name] = {
                "names": optimizer.names,
                "inner": {"state": {}, "param_groups": groups},
                "rounded": self.precision == "bfloat16",
            }
        return state

    def tensors(self, keys: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Return the trained weights and optimizer states of all optimizers.

        Args:
            keys: Create the state of these keys where it is missing; `None`: as it is. See `Optimizer.tensors`.

        Returns:
            The tensors by name, as this rank has them.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name, optimizer in self.optimizers.items():
            prefix = f"{name}/"
            paths = None if keys is None else [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
            tensors |= {f"{prefix}{path}": tensor for path, tensor in optimizer.tensors(paths).items()}
        return tensors


def _find_filler(rows: TrainRows, minibatch: Sequence[int], media_kind: Any) -> list[int]:
    """Return the shortest row, or pair, of a kind of media, or of any: what a rank without rows runs."""
    lengths = rows.records.token_lengths()
    candidates = minibatch
    if media_kind is not None:
        candidates = [i for i in minibatch if rows.media_kinds[i] == media_kind]
    shortest = min(candidates, key=lambda i: int(lengths[i]))
    if rows.pairs is None:
        return [shortest]
    return [i for i in minibatch if rows.pairs[i] == rows.pairs[shortest]]


# --- the trainer ------------------------------------------------------------------------------------------------------


class DistributedTrainer(Trainer):
    """A trainer on several ranks. All of them build it with the same arguments and make the same calls.

    Rank 0 uses the book, the prompts, the trackers and the checkpoints. Other ranks pass a book opened for reading, or
    `None`, and are sent the rows. Methods return the same on all ranks.

    Args:
        arguments: Those of `Trainer`.
        distributed: The ranks.
        options: Those of `Trainer`.
    """

    actor: Actor
    process_group = SINGLE_PROCESS  # rank 0 has the records of all ranks
    learner: DistributedLearner

    def __init__(self, *arguments: Any, distributed: Distributed, **options: Any) -> None:
        self.distributed = distributed
        self.evaluation_reward: Reward | None = None
        """Scores the samples of evaluations on this rank."""
        self._lead_depth = 0
        self._rank_reads_book: list[bool] = []
        """On rank 0: whether each rank reads the records of the book itself."""
        self._step_records, self._leased_count = Experiences(), 0
        """From leasing to the end of the update: the records of the step as they are in the books, and how many of them
        are leased. Those of the expert follow."""
        self._loaded_tensors: Any = None
        """On rank 0, during a "copy": the weights or optimizer states that were read, by name."""
        self._shard_write: Future[Any] | None = None
        """The last write of shards of this rank."""
        self._unfinished_checkpoint: tuple[Path, int, set[str]] | None = None
        """On rank 0, while shards are being written: folder of the run, step, and checkpoints of the book to remove."""
        distributed.handlers = {
            "collect": self._collect_on_rank,
            "annotate": self._annotate_on_rank,
            "evaluate": self._evaluate_on_rank,
            "sync": self._sync_on_rank,
            "publish": self._publish_on_rank,
            "update": self._update_on_rank,
            "save": self._save_on_rank,
            "load": self._load_on_rank,
            "copy": self._copy_on_rank,
            "random": self._set_random_state,
        }
        super().__init__(*arguments, **options)

    def _build_learner(self, **options: Any) -> DistributedLearner:
        placed: list[Any] = []
        for name in _MODELS:
            model = getattr(self.models, name)
            if isinstance(model, nn.Module) and not any(model is other for other in placed):
                self.distributed.place(model)
                placed.append(model)
        url, host = str(getattr(self.book, "url", "memory:")), socket.gethostname()
        book_location = (url, "" if "://" in url else host, self.expert is None)
        locations = self.distributed.group.gather([book_location])
        hosts = self.distributed.group.gather([host])
        # Files of a book are read on the machine of rank 0 only: a book is not kept on a network file system.
        self._rank_reads_book = [location == locations[0] and url != "memory:" for location in locations]
        self._on_one_machine = len({name for (name,) in hosts}) == 1
        if not self.distributed.is_main:
            torch.manual_seed(derive_seed(self.seed, f"rank/{self.distributed.rank}"))
        return DistributedLearner(
            self.distributed, self._pack_rows, self._unpack_rows, self.actor, self.algorithm, **options
        )

    # --- leading and following ----------------------------------------------------------------------------------------

    @contextmanager
    def lead(self) -> Iterator[list[Any]]:
        """Lead the other ranks, on rank 0, while they `follow`.

        They are released at the end. What was appended to the list is the result of their `follow`.
        """
        if self._lead_depth == 0:
            self.distributed.start_measuring()
        self._lead_depth += 1
        results: list[Any] = []
        try:
            yield results
            if self._lead_depth == 1:
                self._finish_saving()
                self.distributed.release((results[0] if results else None, self.global_step, self.resumed_from))
        except BaseException as error:
            if self._lead_depth == 1:
                self.distributed.fail(error)
            raise
        finally:
            self._lead_depth -= 1

    def follow(self) -> Any:
        """Do what rank 0 says, on another rank, until it has finished; return the result of its method."""
        result, self.global_step, self.resumed_from = self.distributed.follow()
        return result

    def _run_on_main(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a method on rank 0; the others follow, and return its result."""
        if not self.distributed.is_main:
            return self.follow()
        with self.lead() as results:
            results.append(method(*arguments, **options))
        return results[0]

    def _start(self) -> None:
        self._run_on_main(super()._start)

    def step(self) -> StepReport:
        report: StepReport = self._run_on_main(self._step_now)
        return report

    def _step_now(self) -> StepReport:
        # Without its first checkpoint, a run whose book has records cannot start over. Later ones are complete when
        # their shards are written.
        if self.global_step == 0 or (self._shard_write is not None and self._shard_write.done()):
            self._finish_saving()
        return super().step()

    def advance(self) -> StepReport:
        report: StepReport = self._run_on_main(super().advance)
        return report

    def run(self, steps: int, *, on_step: Callable[[StepReport], Any] | None = None) -> list[StepReport]:
        """Run steps on all ranks. See `Trainer.run`."""
        reports: list[StepReport] = self._run_on_main(super().run, steps, on_step=on_step)
        return reports

    def evaluate(self, prompts: Prompts, reward: RewardLike | None = None, **options: Any) -> Evaluation:
        """Evaluate the current policy on all ranks. See `Trainer.evaluate`."""
        self.evaluation_reward = None if reward is None else as_reward(reward)
        evaluation: Evaluation = self._run_on_main(
            super().evaluate, prompts, reward, collect=self._collect_evaluation, **options
        )
        return evaluation

    def save(self) -> Path:
        path: Path = self._run_on_main(self._save_now)
        return path

    def resume(self) -> bool:
        resumed: bool = self._run_on_main(super().resume)
        return resumed

    # --- rollouts and annotation --------------------------------------------------------------------------------------

    def collect(self, prompts: Sequence[Prompt], metrics: StepMetrics | None = None) -> Experiences:
        """Make the records of prompts on all ranks; called on rank 0. See `Trainer.collect`."""
        metrics = StepMetrics() if metrics is None else metrics
        if not self.algorithm.needs_rollouts:
            return super().collect(prompts, metrics)
        shares = [(self.global_step, shard) for shard in self.distributed.split(prompts)]
        replies = self.distributed.call("collect", shares)
        metrics.merge(timing for _, timing in replies)
        records = Experiences.concat([shard for shard, _ in replies if len(shard)])
        metrics.add(rollout_metrics(records))
        return self._estimate(records, metrics)

    def _collect_on_rank(self, share: tuple[int, Sequence[Prompt]]) -> tuple[Experiences, StepMetrics]:
        version, prompts = share
        metrics, records = StepMetrics(), Experiences()
        with self._sampling_engine(self.engine, version):
            if prompts:
                records = self._sample(prompts, metrics)
        records = annotate(
            records,
            self.algorithm,
            self.models,
            token_budget=self.learner.minibatch.token_budget,
            metrics=metrics,
            process_group=self.distributed.shards,
        )
        return records, metrics

    @contextmanager
    def _sampling_engine(self, engine: Any, version: int) -> Iterator[None]:
        """Gather the weights that the engine samples from, and set their version."""
        if engine is self._own_engine and engine is not None:
            engine.version = version
        with self.distributed.gathered(self.actor):
            yield

    def compute_missing_columns(self, records: Experiences, expert: Sequence[bool] | None = None) -> Experiences:
        """Add missing columns, which all ranks compute; called on rank 0. See `Trainer.compute_missing_columns`."""
        passes = self.algorithm.passes if self.algorithm.needs_rollouts else ()
        missing = [records.missing(entry.column) for entry in passes]
        rows = np.unique(np.concatenate(missing)) if missing else np.zeros(0, dtype=np.int64)
        if len(rows):
            incomplete = records.take(rows)
            planned = plan(incomplete.token_lengths(), ranks=self.distributed.size, empty="allow", micro_batches=1)
            parts = [micro_batches[0].indices for micro_batches in planned]
            messages = [
                self._pack_records(incomplete.take(rank_rows), rows[rank_rows], rank)
                for rank, rank_rows in enumerate(parts)
            ]
            replies = self.distributed.call("annotate", messages)
            for rank_rows, columns in zip(parts, replies, strict=True):
                if len(rank_rows):
                    records = records.fill(rows[rank_rows], **columns)
        return super().compute_missing_columns(records, expert)

    def _annotate_on_rank(self, message: Any) -> dict[str, list[Any]]:
        records = annotate(
            self._unpack_records(message),
            self.algorithm,
            self.models,
            old_logprobs=self._old_logprobs,
            token_budget=self.learner.minibatch.token_budget,
            process_group=self.distributed.shards,
        )
        return {name: records.values(name) for entry in self.algorithm.passes for name in entry.outputs}

    def _collect_evaluation(self, prompts: Sequence[Prompt], sampling: Sampling) -> Experiences:
        shares = [(self.global_step, shard, sampling) for shard in self.distributed.split(prompts)]
        return Experiences.concat([shard for shard in self.distributed.call("evaluate", shares) if len(shard)])

    def _evaluate_on_rank(self, share: tuple[int, Sequence[Prompt], Sampling]) -> Experiences:
        version, prompts, sampling = share
        engine, records = self._own_engine or self.engine, Experiences()
        with self._sampling_engine(engine, version):
            if prompts:
                records = generate(engine, prompts, sampling, self.environment)
                if self.evaluation_reward is not None:
                    tokenizer = getattr(engine, "tokenizer", None)
                    records = score(records, self.evaluation_reward, tokenizer, prompts=prompts)
        return records

    def _send_weights(self, version: int) -> float:
        differences: list[float] = self.distributed.call("sync", [version] * self.distributed.size)
        return max(differences)

    def _sync_on_rank(self, version: int) -> float:
        with self.distributed.gathered(self.actor):
            if self.distributed.is_main or not self.engine.is_remote:
                return super()._send_weights(version)
            self.engine.version = version  # rank 0 sends the weights to the servers
            return 0.0

    def _publish(self, pacer: RolloutPacer) -> None:
        self.distributed.call("publish", [None] * self.distributed.size)

    def _publish_on_rank(self, _: None) -> None:
        with self.distributed.gathered(self.actor):
            if self.distributed.is_main and self.pacer is not None:
                super()._publish(self.pacer)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _update_on_rank(self, share: Any) -> dict[str, Any] | None:
        self._release_memory()
        return self.learner.update_on_rank(share)

    def _with_experts(
        self, leased: Experiences, weights: list[float] | None, step: int
    ) -> tuple[Experiences, list[bool] | None, list[float] | None]:
        result = super()._with_experts(leased, weights, step)
        self._step_records, self._leased_count = result[0], len(leased)
        return result

    def _pack_records(self, records: Experiences, sources: Sequence[int] | np.ndarray[Any, Any], rank: int) -> Any:
        """Return records as ids for a rank that reads the book, else as they are.

        Args:
            records: The records.
            sources: Their indices in `_step_records`.
            rank: The rank that gets them.
        """
        if rank == 0 or not self._rank_reads_book[rank]:
            return records
        return [(int(i) >= self._leased_count, uid) for i, uid in zip(sources, _list_uids(records), strict=True)]

    def _unpack_records(self, message: Any) -> Experiences:
        if isinstance(message, Experiences):
            return message
        records: dict[tuple[bool, str], Experience] = {}
        for is_expert, book in ((False, self.book), (True, self.expert)):
            uids = list(dict.fromkeys(uid for flag, uid in message if flag == is_expert))
            if uids and book is not None:
                records |= {(is_expert, row.eid.uid): row for row in book.get(uids)}
        return Experiences([records[key] for key in message])

    def _pack_rows(self, rows: TrainRows, rank: int) -> Any:
        """Return rows for a rank: ids, and the columns that differ from those in the book; or the rows."""
        if rank == 0 or not self._rank_reads_book[rank]:
            return rows
        sources = list(dict.fromkeys(rows.sources.tolist()))
        stored = self._step_records.take(sources)
        base = _as_train_rows(stored, rows.pairs is not None)
        columns = {
            name: rows.records.values(name)
            for name in (*self.algorithm.loss_columns, "logprobs", "truncate_status")
            if not _columns_equal(rows.records.column(name), base.column(name))
        }
        flags = {name: getattr(rows, name) for name in ("pairs", "chosen", "expert")}
        return self._pack_records(stored, sources, rank), columns, flags, rows.sources, rows.record_count

    def _unpack_rows(self, message: Any) -> TrainRows:
        if isinstance(message, TrainRows):
            return message
        packed, columns, flags, sources, record_count = message
        records = _as_train_rows(self._unpack_records(packed), flags["pairs"] is not None)
        names = (*self.algorithm.loss_columns, "truncate_status", "multi_modal_inputs", "logprobs")
        records = records.select(*names).assign(**columns)
        return TrainRows(records, sources, record_count, **flags)

    def _add_metrics(self, metrics: StepMetrics, leased: Experiences, trained: Experiences, seconds: float) -> None:
        super()._add_metrics(metrics, leased, trained, seconds)
        metrics.add(self.distributed.wait_metrics())

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _save_now(self) -> Path:
        self._finish_saving()
        return super().save()

    def _write(
        self, folder: Path, state: Mapping[str, Any], trainer_state: Mapping[str, Any], replaced: set[str]
    ) -> Path:
        """Write the Hugging Face folders and begin to write the shards. `_finish_saving` completes the checkpoint."""
        partial = checkpoint.begin(folder, self.global_step)
        random_states = self.distributed.call("save", [str(partial)] * self.distributed.size)
        all_states = {**state, "random": random_states[0], "random_by_rank": random_states}
        checkpoint.write_states(partial, self.global_step, all_states, trainer_state)
        self._unfinished_checkpoint = (folder, self.global_step, replaced)
        return folder / checkpoint.CHECKPOINT_FOLDER / checkpoint.checkpoint_name(self.global_step)

    def _finish_saving(self) -> None:
        """Wait until the shards of the last checkpoint are written by all ranks, then commit it."""
        if self._unfinished_checkpoint is None or self._shard_write is None:
            return
        folder, step, replaced = self._unfinished_checkpoint
        self._unfinished_checkpoint = None
        self._shard_write.result()
        hit_failpoint("shards saved")
        checkpoint.commit(folder, step)
        self._prune(folder, replaced)

    def _save_on_rank(self, partial: str) -> dict[str, Any]:
        models = {"model": self.actor, "critic": self.models.critic}
        for name, model in models.items():
            if model is not None:
                state = self.distributed.full_state(model)
                if self.distributed.is_main:
                    with hide_progress_bars():
                        model.save_pretrained(Path(partial) / name, state_dict=state)
        if self._shard_write is not None:
            self._shard_write.result()
        # A copy, so that training can go on while it is written. On a GPU, `async_save` copies to the host.
        tensors = self.learner.tensors()
        if not self._on_one_machine:
            # The folder of the run is on the machine of rank 0.
            tensors = {name: self._gather(tensor) for name, tensor in tensors.items()}
        elif self.distributed.device.type == "cpu":
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        if self._on_one_machine or self.distributed.is_main:
            self._shard_write = async_save(  # type: ignore[assignment]
                tensors,
                storage_writer=FileSystemWriter(Path(partial) / checkpoint.SHARDS),
                process_group=self.distributed.writer_group if self._on_one_machine else None,
                no_dist=not self._on_one_machine,
            )
        return checkpoint.random_state()

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a complete tensor in the memory of the host, on rank 0; on others, an empty tensor."""
        complete = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return complete.to("cpu", copy=True) if self.distributed.is_main else torch.empty(0)

    def _load(self, saved: checkpoint.Checkpoint) -> dict[str, Any]:
        if saved.shards is None or not self._on_one_machine:
            state = checkpoint.load_state(saved)
            self.load_weights(self.actor, saved.model)
            if self.models.critic is not None and saved.critic is not None:
                self.load_weights(self.models.critic, saved.critic)
            self._loaded_tensors = checkpoint.flatten_states(state["learner"], self.learner.optimizers)
            self.distributed.call("copy", [(None, list(self._loaded_tensors))] * self.distributed.size)
        else:
            state = checkpoint.load_state(saved, shards=False)
            self.distributed.call("load", [str(saved.shards)] * self.distributed.size)
        self.learner.failures = int(state["learner"]["failures"])
        return state

    def load_weights(self, model: Any, folder: Path) -> None:
        """Load the weights of a saved model on all ranks. See `Trainer.load_weights`."""
        self._loaded_tensors = checkpoint.read_weights(model, folder)
        name = next(name for name in _MODELS if getattr(self.models, name) is model)
        self._run_on_main(self.distributed.call, "copy", [(name, [])] * self.distributed.size)

    def _load_on_rank(self, folder: str) -> None:
        reader = FileSystemReader(folder)
        keys = list(reader.read_metadata().state_dict_metadata)
        _reshard(self.actor)
        if self.models.critic is not None:
            _reshard(self.models.critic)
        load_shards(self.learner.tensors(keys), storage_reader=reader, process_group=self.distributed.control_group)
        for optimizer in self.learner.optimizers.values():
            optimizer.round_masters()

    def _copy_on_rank(self, target: tuple[str | None, list[str]]) -> None:
        """Copy weights or optimizer states that rank 0 has read."""
        name, keys = target
        if name is not None:
            self.distributed.distribute(getattr(self.models, name), self._loaded_tensors)
        else:
            targets, sources = self.learner.tensors(keys), self._loaded_tensors or {}
            for key in keys:
                self.distributed.copy_from_main(targets[key], sources.get(key))
            for optimizer in self.learner.optimizers.values():
                optimizer.round_masters()
        self._loaded_tensors = None

    def _set_random_states(self, state: Mapping[str, Any]) -> None:
        states = list(state.get("random_by_rank", [state["random"]]))[: self.distributed.size]
        states += [None] * (self.distributed.size - len(states))
        self.distributed.call("random", states)

    def _set_random_state(self, state: Mapping[str, Any] | None) -> None:
        if state is None:  # this rank is new
            torch.manual_seed(derive_seed(self.seed, f"rank/{self.distributed.rank}/{self.global_step}"))
        else:
            checkpoint.set_random_state(state)


def _list_uids(records: Experiences) -> list[str]:
    return [eid.uid for eid in records.eids()]


def _as_train_rows(records: Experiences, pairs: bool) -> Experiences:
    """Return the rows of records as `TrainRows` begins with them."""
    return mask_unpredicted(Experiences(split_preference_pairs(list(records))) if pairs else records)


def _columns_equal(column: Any, other: Any) -> bool:
    """Return whether two columns have the same content."""
    if column is None or other is None or isinstance(column, Ragged) != isinstance(other, Ragged):
        return column is other
    if not isinstance(column, Ragged):
        return bool(column.equals(other))
    present = [np.ones(len(values), dtype=bool) if values.valid is None else values.valid for values in (column, other)]
    pairs = ((column.lengths, other.lengths), (column.values, other.values), present)
    return column.dtype == other.dtype and all(np.array_equal(first, second) for first, second in pairs)


__all__ = ["Distributed", "DistributedLearner", "DistributedTrainer", "RankError"]
