"""Fingerprints of tokenizers, chat templates and the source of user code, and the loader of a user's `.py` file.

Invariant: a tokenizer's fingerprint depends on what it does (vocabulary, merges, normalization, special tokens), not on
where it was loaded from. A user's file runs once per process, so that all functions taken from it share one module.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def load_module_file(path: str | Path) -> ModuleType:
    """Import a file and return its module; later calls return the same module.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: `path` is not a `.py` file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     script = Path(folder, "mine.py")
    ...     _ = script.write_text("answer = 6 * 7")
    ...     load_module_file(script).answer, load_module_file(script) is load_module_file(str(script))
    (42, True)
    """
    file_path = Path(path).resolve()
    name = "_rollbook_file_" + hashlib.blake2b(str(file_path).encode(), digest_size=8).hexdigest()
    if name in sys.modules:
        return sys.modules[name]
    if not file_path.is_file():
        raise FileNotFoundError(f"no such file: {file_path}")
    spec = importlib.util.spec_from_file_location(name, file_path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file_path} is not a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def source_fingerprint(target: Any) -> str | None:
    """Fingerprint the source of a user's function or class by the syntax of its module, without comments and layout.

    A function of the main program or of a notebook goes by its own source alone.

    Returns:
        16 hex digits, or `None` for code of this library and where there is no source.

    >>> source_fingerprint(load_module_file), len(source_fingerprint(textwrap.dedent))
    (None, 16)
    """
    name = getattr(target, "__module__", None) or ""
    module = sys.modules.get(name)
    if module is None or name.partition(".")[0] == "rollbook":
        return None
    try:
        # Read from the file: `inspect` keeps the source of the first time it looked.
        path = getattr(module, "__file__", None)
        has_file = path is not None and name != "__main__"
        text = Path(str(path)).read_text("utf-8") if has_file else inspect.getsource(target)
    except (OSError, TypeError, UnicodeDecodeError):
        return None
    return text_fingerprint(text)


def text_fingerprint(text: str) -> str:
    """Fingerprint Python source by its syntax; 16 hex digits.

    >>> text_fingerprint("x = 1  # one") == text_fingerprint("x=1") != text_fingerprint("x = 2")
    True
    """
    with contextlib.suppress(SyntaxError):  # else the text itself: a lambda amid an expression
        text = ast.dump(ast.parse(textwrap.dedent(text)))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def join_fingerprints(parts: Mapping[str, str | None]) -> str | None:
    """Fingerprint several sources by name; `None` if none of them has a fingerprint."""
    present = {name: fingerprint for name, fingerprint in parts.items() if fingerprint is not None}
    return text_fingerprint(repr(sorted(present.items()))) if present else None


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """16 hex digits for a tokenizer, `None` for none; truncation and padding, which calls set, do not count.

    >>> tokenizer_fingerprint(None) is None
    True
    """
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        parts = json.loads(backend.to_str())
        parts.pop("truncation", None)
        parts.pop("padding", None)
    else:
        parts = {"class": type(tokenizer).__name__, "vocabulary": dict(tokenizer.get_vocab())}
    special = {name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items()}
    return _hash(json.dumps([parts, special], sort_keys=True))


def template_fingerprint(tokenizer: Any) -> str | None:
    """16 hex digits for a tokenizer's or processor's chat template, `None` where there is none.

    >>> template_fingerprint(object()) is None
    True
    """
    template = getattr(tokenizer, "chat_template", None)
    return None if not template else _hash(json.dumps(template, sort_keys=True))
