"""`EID`, the id of a record from the engine to the optimizer, the disk and the screen.

Invariant: `EID.parse(eid.uid) == eid` for every id.
"""

from __future__ import annotations

import operator
import os
import re
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

__all__ = ["EID"]

MAX_BITS = 1024
"""Largest size of a batch or task that is a number; Python does not print numbers of thousands of digits."""
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_ESCAPE = re.compile(r"%(25|2F)")
_LAST_NUMBER = re.compile(r"([0-9]{1,15})$")


def _suffix() -> str:
    return os.urandom(8).hex()


def _escape(part: int | str) -> str:
    text = str(part)
    if "%" in text or "/" in text:
        return text.replace("%", "%25").replace("/", "%2F")
    return text


def _unescape(text: str) -> str:
    if "%" in _ESCAPE.sub("", text):
        raise ValueError(f"uid part {text!r}: '%' must be written %25 and '/' %2F")
    return text.replace("%2F", "/").replace("%25", "%")


def _number_or_text(text: str) -> int | str:
    return int(text) if len(text) < 20 and _INTEGER.fullmatch(text) else _unescape(text)


@dataclass(eq=False, repr=False)
class EID:
    """Id of a record. Groups are formed by its parts, never by position.

    The parts can be assigned. Ids compare by `uid` and are not hashable, since they can change: use `uid` as a key. In
    text parts `%` is written as `%25` and `/` as `%2F`, so that every uid can be parsed.

    Args:
        batch: Batch: valid Unicode, or a number of at most 1024 bits.
        task: Task, usually a prompt, in the batch: as `batch`.
        run: Number of the sample of the task, 64 bits.
        step: Number of the turn, 64 bits.
        suffix: Random by default: 64 bits (Trinity's 24 bits collide within thousands of records).

    Raises:
        ValueError: A part has an invalid type or value.

    >>> eid = EID(batch=1, task=2, run=3, step=4, suffix="abc123")
    >>> eid
    EID(batch=1, task=2, run=3, step=4, uuid=abc123)
    >>> eid.uid, eid.tid, eid.rid, eid.sid
    ('1/2/3/4/abc123', '1/2', '1/2/3', '1/2/4')
    >>> EID.parse(eid.uid) == eid, eid.replace(run=0).rid
    (True, '1/2/0')
    >>> EID(batch="10/eval", task="50%").tid
    '10%2Feval/50%25'
    """

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=_suffix)

    def __post_init__(self) -> None:
        for name in ("batch", "task"):
            part = getattr(self, name)
            if type(part) is not str and type(part) is not int:
                part = str(part) if isinstance(part, str) else _index(name, part, "an int or a str")
                setattr(self, name, part)
            if isinstance(part, str):
                if not part.isascii():
                    _check_unicode(name, part)
            elif part.bit_length() > MAX_BITS:
                raise ValueError(f"EID.{name}: got an int of {part.bit_length()} bits, expected at most {MAX_BITS}")
        for name in ("run", "step"):
            part = getattr(self, name)
            if type(part) is not int:
                part = _index(name, part, "an int")
                setattr(self, name, part)
            if not -(1 << 63) <= part < 1 << 63:
                raise ValueError(f"EID.{name}: got an int of {part.bit_length()} bits, expected one of 64 bits")
        if type(self.suffix) is not str:
            raise ValueError(f"EID.suffix: got {self.suffix!r}, expected a str")
        if not self.suffix.isascii():
            _check_unicode("suffix", self.suffix)

    def validate(self) -> None:
        """Validate the parts again, since they can be set; numpy integers become Python integers.

        Raises:
            ValueError: A part has an invalid type or value.
        """
        self.__post_init__()

    @property
    def uid(self) -> str:
        """The whole id: batch/task/run/step/suffix."""
        return f"{_escape(self.batch)}/{_escape(self.task)}/{self.run}/{self.step}/{_escape(self.suffix)}"

    @property
    def sid(self) -> str:
        """The same step of all runs: batch/task/step."""
        return f"{_escape(self.batch)}/{_escape(self.task)}/{self.step}"

    @property
    def rid(self) -> str:
        """One run, all its steps: batch/task/run."""
        return f"{_escape(self.batch)}/{_escape(self.task)}/{self.run}"

    @property
    def tid(self) -> str:
        """One task, all its runs: batch/task."""
        return f"{_escape(self.batch)}/{_escape(self.task)}"

    @classmethod
    def parse(cls, uid: str) -> EID:
        """Parse a `uid`. Parts that look like integers become integers, since 1 and "1" print alike.

        Args:
            uid: Text of the form `batch/task/run/step/suffix`.

        Returns:
            The id.

        Raises:
            ValueError: The text is not a uid.
        """
        parts = uid.split("/") if isinstance(uid, str) else []
        if len(parts) != 5 or not all(_INTEGER.fullmatch(part) for part in parts[2:4]):
            raise ValueError(f"uid: got {uid!r}, expected 'batch/task/run/step/suffix' with numbers for run and step")
        batch, task, run, step, suffix = parts
        return cls(_number_or_text(batch), _number_or_text(task), int(run), int(step), _unescape(suffix))

    def replace(self, **changes: int | str) -> EID:
        """Return a copy with some parts changed.

        Args:
            changes: New parts, by name.

        Returns:
            The new id, validated.
        """
        return EID(**{**self.__dict__, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Return the five parts by name."""
        return {
            "batch": self.batch,
            "task": self.task,
            "run": self.run,
            "step": self.step,
            "suffix": self.suffix,
        }

    def __str__(self) -> str:
        return self.uid

    def __repr__(self) -> str:
        return f"EID(batch={self.batch}, task={self.task}, run={self.run}, step={self.step}, uuid={self.suffix})"

    def __eq__(self, other: object) -> bool:
        return self.uid == other.uid if isinstance(other, EID) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def _index(name: str, part: SupportsIndex, expected: str) -> int:
    try:
        return operator.index(part)
    except TypeError:
        raise ValueError(f"EID.{name}: got {part!r}, expected {expected}") from None


def _check_unicode(name: str, text: str) -> None:
    # Ids are keys of databases and pages: text with lone surrogates is rejected, not escaped.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"EID.{name}: got {text!r}, expected valid Unicode: {error.reason}") from None


def record_step(batch: int | str, version: int | None) -> int:
    """Return the training step of a record.

    Args:
        batch: The `batch` of its id; `eval-40` is an evaluation after step 40.
        version: The oldest policy version of its tokens, if it is known.

    Returns:
        The number that the batch ends in, else the version, else 0.

    >>> record_step(137, None), record_step("train/137", 5), record_step("warmup", 5), record_step("", None)
    (137, 137, 5, 0)
    """
    match = _LAST_NUMBER.search(str(batch))
    if match:
        return int(match[1])
    return 0 if version is None else max(int(version), 0)
