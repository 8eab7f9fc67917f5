"""Rollout engines: prompts in, samples out, with the engine's own tokens and log-probs.

Names load when they are first used; only the transformers engine needs torch.

>>> from rollbook.rollout import ScriptedEngine
>>> ScriptedEngine([[7, 8]]).generate("hello", max_tokens=1)[0].finish_reason
'length'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollbook.rollout.engine import Cancel as Cancel
    from rollbook.rollout.engine import Engine as Engine
    from rollbook.rollout.engine import Request as Request
    from rollbook.rollout.scripted import Line as Line
    from rollbook.rollout.scripted import ScriptedEngine as ScriptedEngine
    from rollbook.rollout.types import Prompt as Prompt
    from rollbook.rollout.types import RunInfo as RunInfo
    from rollbook.rollout.types import Sample as Sample
    from rollbook.rollout.types import Sampling as Sampling

_HOMES = {
    "Cancel": "engine",
    "Engine": "engine",
    "Line": "scripted",
    "Prompt": "types",
    "Request": "engine",
    "RunInfo": "types",
    "Sample": "types",
    "Sampling": "types",
    "ScriptedEngine": "scripted",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rollbook.rollout' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rollbook.rollout.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
