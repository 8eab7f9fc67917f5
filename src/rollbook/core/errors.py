"""`RollbookError`, the base class of all exceptions, and the error of a missing optional package."""

from __future__ import annotations

from typing import Any

__all__ = ["RollbookError", "WireError"]


class RollbookError(Exception):
    """Base class of the exceptions that Rollbook defines. Invalid arguments raise `ValueError`."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Not `type(self)(*self.args)`: `args` has the text, and constructors have other parameters.
        return _restore_error, (type(self), self.args, self.__dict__.copy())


def _restore_error(kind: type[RollbookError], args: tuple[Any, ...], state: dict[str, Any]) -> RollbookError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class WireError(RollbookError, ValueError):
    """Raised when bytes are not a valid frame.

    Args:
        message: What is wrong.
        offset: Byte offset of the error, if known.

    >>> from rollbook.core.wire import decode
    >>> decode(b"not a frame, and too short to be one")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    rollbook.core.errors.WireError: byte 0: bad magic b'not a fr': not a Rollbook frame (a frame begins ...)
    """

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message if offset is None else f"byte {offset}: {message}")
        self.message = message
        self.offset = offset
        """Byte offset of the error in the data, or `None`."""


_EXTRAS = {
    "PIL": "models",
    "datasets": "hf",
    "duckdb": "sql",
    "httpx": "remote",
    "peft": "models",
    "psycopg": "postgres",
    "ray": "ray",
    "torch": "torch",
    "transformers": "models",
    "yaml": "train",
}
"""Optional packages, by import name, and the extra of `rollbook` that installs each."""


def explain_missing(user: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return an error that names the extra to install, or `error` itself if no extra has the package.

    Args:
        user: The module or name that needs the package.
        error: The error of the import.

    >>> print(explain_missing("rollbook.train", ModuleNotFoundError("No module named 'torch'", name="torch")))
    rollbook.train needs torch: install the extra 'torch' of Rollbook
    """
    extra = _EXTRAS.get(error.name or "")
    if extra is None or "install" in str(error):
        return error
    message = f"{user} needs {error.name}: install the extra {extra!r} of Rollbook"
    return ModuleNotFoundError(message, name=error.name)
