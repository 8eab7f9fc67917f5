"""The error that damaged or hostile bytes raise, and no other."""

from __future__ import annotations


class WireError(ValueError):
    """Bytes that are not what they should be: says what is wrong and, where it is known, at which byte.

    >>> from rollbook.wire import decode
    >>> decode(b"not a frame, and too short to be one")
    Traceback (most recent call last):
        ...
    rollbook.errors.WireError: byte 0: magic b'not a fr' is none that is known (a frame begins with b'\\x8dROLLBK\\n')
    """

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message if offset is None else f"byte {offset}: {message}")
        self.message = message
        self.offset = offset
        """Where it was seen, counted from the first byte of the data; `None` if it has no one place."""

    def __reduce__(self) -> tuple[type[WireError], tuple[str, int | None]]:
        return WireError, (self.message, self.offset)
