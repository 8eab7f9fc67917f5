"""What several processes tell each other about a save: all to the first, and the first to all.

Invariant: collective calls are made only once every process is known to make them, in the same order, whatever went
wrong in it: what is sent is made before, and a failure to make it is what is sent then.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable
from typing import Any, TypeVar

from rollbook.core.process_group import ALONE, Ranks

T = TypeVar("T")


def here() -> Ranks:
    """The processes of `torch.distributed` if it is initialised, else this one alone."""
    import torch.distributed as dist

    return Ranks() if dist.is_available() and dist.is_initialized() else ALONE


class Rendezvous:
    """Finds out, before each save, whether every process takes part in it.

    Each process writes its presence into the store of `torch.distributed` and the first decides, by what is there when
    all have come or `seconds` are over. Nobody waits for one that never comes: a process that the first does not come
    to meet closes the save itself. A prefix that was saved without the others is not waited for again, until one of
    them has come late.
    """

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self._calls: dict[tuple[str, int], int] = {}
        self._alone: dict[str, str] = {}
        """By prefix, the key of its last save, where that was without the others."""

    def met(self, ranks: Ranks, prefix: str, step: int) -> tuple[bool, list[int]]:
        """Whether all processes save together, and which ones came: the first one's answer, in each of them."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        store, group = _get_default_store(), dist.get_process_group_ranks(ranks.group)
        number = self._calls[prefix, step] = self._calls.get((prefix, step), -1) + 1
        named = repr((self.folder, prefix, step, number, group)).encode()
        key = f"rollbook/save/{hashlib.blake2b(named, digest_size=16).hexdigest()}"
        places = range(len(group))

        def present(of: str) -> list[int]:
            return [rank for rank in places if rank == ranks.rank or store.check([f"{of}/{rank}"])]

        store.set(f"{key}/{ranks.rank}", "here")
        before = self._alone.get(prefix)
        waits = before is None or len(present(before)) > 1  # somebody came after the last save was over
        # The first may come as late as it then waits for others.
        limit = (self.seconds if ranks.rank == 0 else 2 * self.seconds) if waits else 0.0
        deadline, pause = time.monotonic() + limit, 0.001
        arrived = present(key) if ranks.rank == 0 else []
        while time.monotonic() < deadline:
            if len(arrived) == len(group) or (ranks.rank and store.check([f"{key}/decision"])):
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            arrived = present(key) if ranks.rank == 0 else []
        wanted = "together" if len(arrived) == len(group) else "apart"
        # Whoever is first to say so decides for all.
        together = store.compare_set(f"{key}/decision", "", wanted) == b"together"
        if together:
            self._alone.pop(prefix, None)
        else:
            self._alone[prefix] = key
        return together, present(key)


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
