"""Ids from whatever has one.

Invariant: what is no id, and has none, is refused by its type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollbook.experience import Experience
    from rollbook.ids import EID


def uid_of(given: str | EID | Experience) -> str:
    """The id, from an id or from what has one."""
    if isinstance(given, str):
        return given
    found = getattr(getattr(given, "eid", given), "uid", None)
    if not isinstance(found, str):
        raise ValueError(f"uid: got {type(given).__name__}, expected an id, an EID or an Experience")
    return found


def uids_of(given: Any) -> list[str]:
    """Several ids, from one or many."""
    if isinstance(given, str) or hasattr(given, "uid") or hasattr(given, "eid"):
        return [uid_of(given)]
    return list(dict.fromkeys(uid_of(each) for each in given))
