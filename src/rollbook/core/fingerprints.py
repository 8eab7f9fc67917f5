"""Short names for tokenizers and chat templates: equal where they do the same, other where they may not.

Invariant: a fingerprint depends on what a tokenizer does (vocabulary, merges, normalisation, special tokens), never on
where it was loaded from.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def _hashed(text: str) -> str:
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
    return _hashed(json.dumps([parts, special], sort_keys=True))


def template_fingerprint(tokenizer: Any) -> str | None:
    """16 hex digits for a tokenizer's or processor's chat template, `None` where there is none.

    >>> template_fingerprint(object()) is None
    True
    """
    template = getattr(tokenizer, "chat_template", None)
    return None if not template else _hashed(json.dumps(template, sort_keys=True))
