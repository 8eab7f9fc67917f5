"""Processes of a distributed run: sums over all of them, and gathered lists.

Invariant: with the same samples in total, one process and k processes compute the same statistics. No function
communicates unless it was given a `ProcessGroup`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torch.distributed as dist


class ProcessGroup:
    """A group of processes, as `torch.distributed` has them: the one that this process belongs to by default.

    Give it to an estimator or to `whiten` to have statistics over the samples of all processes; every process must
    then make the same call. `SINGLE_PROCESS`, the default, is this process only.

    >>> SINGLE_PROCESS.sum(torch.tensor([1.0, 2.0])).tolist(), SINGLE_PROCESS.gather(["a"])
    ([1.0, 2.0], [['a']])
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "process_group: torch.distributed is not initialized; leave `process_group` out for a single process"
            )
        self.group = group

    @property
    def rank(self) -> int:
        """The number of this process."""
        import torch.distributed as dist

        return dist.get_rank(self.group)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes of a tensor that has the same shape in each; float64 stays float64."""
        import torch.distributed as dist

        total = values.clone()
        if dist.get_backend(self.group) == "nccl":
            total = total.cuda()
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def gather(self, items: list[Any]) -> list[list[Any]]:
        """Every process's list, by rank. The lists may differ in length; they are pickled among trusted processes."""
        import torch.distributed as dist

        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, items, group=self.group)
        return gathered


class _Alone(ProcessGroup):
    def __init__(self) -> None:
        self.group = None

    def __repr__(self) -> str:
        return "SINGLE_PROCESS"

    @property
    def rank(self) -> int:
        return 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather(self, items: list[Any]) -> list[list[Any]]:
        return [items]


SINGLE_PROCESS = _Alone()
"""This process alone."""


def check_process_group(process_group: ProcessGroup) -> ProcessGroup:
    """Refuse what is no `ProcessGroup`, before anything is asked of it.

    >>> check_process_group(True)
    Traceback (most recent call last):
        ...
    ValueError: process_group: got True, expected ProcessGroup(), or nothing for this process alone
    """
    if not isinstance(process_group, ProcessGroup):
        raise ValueError(
            f"process_group: got {process_group!r}, expected ProcessGroup(), or nothing for this process alone"
        )
    return process_group


def current_process_group() -> ProcessGroup:
    """Return the group of all processes of a distributed run, or `SINGLE_PROCESS`."""
    import torch.distributed as dist

    return ProcessGroup() if dist.is_available() and dist.is_initialized() else SINGLE_PROCESS
