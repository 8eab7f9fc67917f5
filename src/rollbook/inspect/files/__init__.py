"""Rollouts in files that this and other tools wrote, as one run that pages can show.

A file is known by what is in it (`recognize`); a folder of files is one run. `FAMILIES` says what is read.

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
from typing import TYPE_CHECKING, Any

from rollbook.core.lazy import lazily

if TYPE_CHECKING:
    from rollbook.inspect.files.source import FAMILIES as FAMILIES
    from rollbook.inspect.files.source import Family as Family
    from rollbook.inspect.files.source import FileSource as FileSource
    from rollbook.inspect.files.source import UnknownFormatError as UnknownFormatError


def open_file_source(path: str | os.PathLike[str], *, tokenizer: Any = None) -> FileSource:
    """Open the rollouts of a file, or of a folder of files, as a source; otherwise raise `UnknownFormatError`.

    `tokenizer`: a tokenizer, a `Vocabulary`, or the path of a folder with a tokenizer.json, for the text of files that
    have token ids; what has text alone is shown in words, and needs none.
    """
    from rollbook.inspect.files.source import FileSource

    return FileSource(path, tokenizer=tokenizer)


def recognize(path: str | os.PathLike[str]) -> str:
    """Return the name, in `FAMILIES`, of the format of a file or a folder."""
    with open_file_source(path) as source:
        return source.kind


# Other modules of the viewer use the small ones of this package, which must not bring the large ones.
_HOMES = {
    "FAMILIES": "rollbook.inspect.files.source",
    "Family": "rollbook.inspect.files.source",
    "UnknownFormatError": "rollbook.inspect.files.source",
    "FileSource": "rollbook.inspect.files.source",
}
__all__ = ["FAMILIES", "Family", "FileSource", "UnknownFormatError", "open_file_source", "recognize"]
__getattr__, __dir__ = lazily(__name__, _HOMES)
