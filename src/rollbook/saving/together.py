"""What several processes tell each other about a save: all to the first, and the first to all.

Invariant: every process makes the same calls in the same order, whatever went wrong in it: what is sent is made before,
and a failure to make it is what is sent then.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from rollbook.algorithms.ranks import ALONE, Ranks

T = TypeVar("T")


def here() -> Ranks:
    """The processes of `torch.distributed` if it is initialised, else this one alone."""
    import torch.distributed as dist

    return Ranks() if dist.is_available() and dist.is_initialized() else ALONE


def attempted(problems: list[str], make: Callable[..., T], *given: Any) -> T | None:
    """What `make(*given)` gives; if it raises, nothing, and what went wrong in `problems`.

    >>> said = []
    >>> attempted(said, int, "7"), attempted(said, int, "x"), said
    (7, None, ["ValueError: invalid literal for int() with base 10: 'x'"])
    """
    try:
        return make(*given)
    except Exception as error:  # whatever it is, the other processes wait for this one
        problems.append(f"{type(error).__name__}: {error}")
        return None


def to_first(ranks: Ranks, item: Any, problems: list[str]) -> list[tuple[Any, list[str]]] | None:
    """In the first process, every process's item and problems, by rank; elsewhere `None`. An item that cannot be sent
    is `None`, and one more problem."""
    if ranks is ALONE:
        return [(item, problems)]
    import torch.distributed as dist

    sent = attempted(problems, pickle.dumps, item) or pickle.dumps(None)
    parts: list[Any] | None = [None] * dist.get_world_size(ranks.group) if ranks.rank == 0 else None
    dist.gather_object((sent, problems), parts, group=ranks.group, group_dst=0)
    return None if parts is None else [(pickle.loads(data), said) for data, said in parts]


def from_first(ranks: Ranks, item: Any) -> Any:
    """The first process's item, in every process."""
    if ranks is ALONE:
        return item
    import torch.distributed as dist

    box = [item]
    dist.broadcast_object_list(box, group=ranks.group, group_src=0)
    return box[0]
