"""Named points between the steps of a write, at which a test can stop the process.

Points are where a crash would leave another state. Hot paths check the flag themselves:
`if failpoints.active: failpoints.hit("after write")`.
"""

from __future__ import annotations

from collections.abc import Callable

active = False
"""Whether a callback is set."""
_callback: Callable[[str], None] | None = None


def watch(callback: Callable[[str], None] | None) -> None:
    """Call `callback` with the name of every point that this process reaches; `None` ends it.

    >>> watch(print)
    >>> hit("after write")
    after write
    >>> watch(None)
    >>> hit("after write")
    """
    global active, _callback
    _callback = callback
    active = callback is not None


def hit(name: str) -> None:
    """Report that the point `name` is reached ("after write", "after sync", "after commit", ...)."""
    if _callback is not None:
        _callback(name)
