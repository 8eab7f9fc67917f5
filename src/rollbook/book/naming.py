"""Ids from whatever has one.

Invariant: what is no id, and has none, is refused by its type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollbook.core.experience import Experience
    from rollbook.core.ids import EID


def check_text(name: str, given: object, least: int = 1, most: int = 1 << 20) -> str:
    """A text that every ledger can keep, else an error that says what it should have been.

    >>> check_text("reason", "too long")
    'too long'
    """
    if not isinstance(given, str) or not least <= len(given) <= most:
        size = f" of {least} to {most} characters" if isinstance(given, str) and given else " that is not empty" * least
        raise ValueError(f"{name}: got {str(given)[:100]!r}, expected a text{size}")
    if "\0" in given or any("\ud800" <= letter <= "\udfff" for letter in given):
        raise ValueError(f"{name}: got {given!r}, expected no NUL and no lone surrogate, which a database cannot keep")
    return given


def uid_of(given: str | EID | Experience) -> str:
    """The id, from an id or from what has one."""
    if isinstance(given, str):
        return check_text("uid", given, 0)
    found = getattr(getattr(given, "eid", given), "uid", None)
    if not isinstance(found, str):
        raise ValueError(f"uid: got {type(given).__name__}, expected an id, an EID or an Experience")
    return found


def uids_of(given: Any) -> list[str]:
    """Several ids, from one or many."""
    if isinstance(given, str) or hasattr(given, "uid") or hasattr(given, "eid"):
        return [uid_of(given)]
    return list(dict.fromkeys(uid_of(each) for each in given))
