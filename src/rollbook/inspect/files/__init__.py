"""Rollouts in files of this and other tools, as one run.

The format of a file is detected from its content (`recognize`); a folder of files is one run. `FORMATS` lists the
formats.

>>> import json, pathlib, tempfile
>>> from rollbook.inspect.index import Index
>>> with tempfile.TemporaryDirectory() as folder:
...     row = {"input": "2 + 3 =", "output": " 5", "score": 1.0, "step": 17}
...     _ = pathlib.Path(folder, "17.jsonl").write_text(json.dumps(row))
...     with open_file_source(folder) as source, Index() as index:
...         source.kind, source.refresh(index), index.query("SELECT step, reward, closing FROM samples")
('verl', {17}, [(17, 1.0, '5')])
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rollbook.core import lazily

if TYPE_CHECKING:
    from rollbook.inspect.files.source import FORMATS as FORMATS
    from rollbook.inspect.files.source import FileFormat as FileFormat
    from rollbook.inspect.files.source import FileSource as FileSource
    from rollbook.inspect.files.source import UnknownFormatError as UnknownFormatError
    from rollbook.inspect.records import TokenizerLike


def open_file_source(path: str | os.PathLike[str], *, tokenizer: TokenizerLike | None = None) -> FileSource:
    """Open rollouts in a file, or in a folder of files.

    Args:
        path: A file or a folder.
        tokenizer: A tokenizer, a `Vocabulary`, or the path of a folder with a tokenizer.json, for files with token ids.
            Files with only text are split into words and need none.

    Returns:
        The source; close it after use.

    Raises:
        UnknownFormatError: If no file is in a known format.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "3.jsonl").write_text('{"input": "2 + 3 =", "output": " 5", "score": 1.0}')
    ...     with open_file_source(folder) as source:
    ...         source.kind
    'verl'
    """
    from rollbook.inspect.files.source import FileSource

    return FileSource(path, tokenizer=tokenizer)


def recognize(path: str | os.PathLike[str]) -> str:
    """Detect the format of a file or folder.

    Args:
        path: A file or a folder.

    Returns:
        The name of the format, a key of `FORMATS`.

    Raises:
        UnknownFormatError: If no file is in a known format.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "rollouts.jsonl")
    ...     _ = path.write_text('{"messages": [{"role": "user", "content": "2 + 3?"}], "reward": 1.0}')
    ...     recognize(path)
    'messages'
    """
    with open_file_source(path) as source:
        return source.kind


# Other modules of the viewer import `stores`, which must not load the large modules.
_HOMES = {
    "FORMATS": "rollbook.inspect.files.source",
    "FileFormat": "rollbook.inspect.files.source",
    "UnknownFormatError": "rollbook.inspect.files.source",
    "FileSource": "rollbook.inspect.files.source",
}
__all__ = ["FORMATS", "FileFormat", "FileSource", "UnknownFormatError", "open_file_source", "recognize"]
__getattr__, __dir__ = lazily(__name__, _HOMES)
