"""`ProcessGroup`: sums and gathers over the processes of a distributed run.

Invariant: with the same samples in total, one process and k processes compute the same statistics. No function
communicates unless it is passed a `ProcessGroup`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torch.distributed as dist


class ProcessGroup:
    """A group of `torch.distributed` processes.

    An estimator or `whiten` that gets one computes its statistics over the samples of all processes; every process
    must then make the same call. The default, `SINGLE_PROCESS`, is this process only.

    Args:
        group: The group; `None`: all processes.

    Raises:
        ValueError: `torch.distributed` is not initialized.

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
        """Rank of this process."""
        import torch.distributed as dist

        return dist.get_rank(self.group)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes.

        Args:
            values: A tensor of the same shape in every process.

        Returns:
            The sum, of the same type.
        """
        import torch.distributed as dist

        total = values.clone()
        if dist.get_backend(self.group) == "nccl":
            total = total.cuda()
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def gather(self, items: list[Any]) -> list[list[Any]]:
        """Gather a list from each process. The lists are pickled: all processes must be trusted.

        Args:
            items: The list of this process, of any length.

        Returns:
            The lists by rank.
        """
        import torch.distributed as dist

        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, items, group=self.group)
        return gathered


class _SingleProcess(ProcessGroup):
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


SINGLE_PROCESS = _SingleProcess()
"""This process only."""


def check_process_group(process_group: ProcessGroup) -> ProcessGroup:
    """Return `process_group`, or raise `ValueError` if it is not a `ProcessGroup`.

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
    dist = torch.distributed
    return ProcessGroup() if dist.is_available() and dist.is_initialized() else SINGLE_PROCESS
