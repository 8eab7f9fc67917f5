"""Named points between the steps of a write, at which a trial can stop the process.

Invariant: nothing happens at a point unless somebody watches; the points are where a crash would leave another state.
"""

from __future__ import annotations

from collections.abc import Callable

_watcher: Callable[[str], None] | None = None


def watch(callback: Callable[[str], None] | None) -> None:
    """Have `callback` called with the name of every point that is reached in this process; `None` ends it.

    >>> watch(print)
    >>> hit("after write")
    after write
    >>> watch(None)
    >>> hit("after write")
    """
    global _watcher
    _watcher = callback


def hit(name: str) -> None:
    """Say that the point `name` is reached ("after write", "after sync", "after commit", ...)."""
    if _watcher is not None:
        _watcher(name)
