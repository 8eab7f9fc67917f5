"""Rollout engines: prompts in, samples out, with the engine's own tokens and log-probs.

Names load when they are first used; only the transformers engine needs torch.

>>> from rollbook.rollout import ScriptedEngine
>>> ScriptedEngine([[7, 8]]).generate("hello", max_tokens=1)[0].finish_reason
'length'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook._lazy import lazily

if TYPE_CHECKING:
    from rollbook.rollout.engine import Cancel as Cancel
    from rollbook.rollout.engine import Engine as Engine
    from rollbook.rollout.engine import Request as Request
    from rollbook.rollout.environment import Environment as Environment
    from rollbook.rollout.environment import EnvironmentConfig as EnvironmentConfig
    from rollbook.rollout.environment import Reply as Reply
    from rollbook.rollout.environment import play_episodes as play_episodes
    from rollbook.rollout.episode import Episode as Episode
    from rollbook.rollout.episode import act_all as act_all
    from rollbook.rollout.local import TransformersEngine as TransformersEngine
    from rollbook.rollout.openai import OpenAIEngine as OpenAIEngine
    from rollbook.rollout.rendering import Drift as Drift
    from rollbook.rollout.rendering import Drifts as Drifts
    from rollbook.rollout.rendering import Renderer as Renderer
    from rollbook.rollout.scripted import Line as Line
    from rollbook.rollout.scripted import ScriptedEngine as ScriptedEngine
    from rollbook.rollout.types import Prompt as Prompt
    from rollbook.rollout.types import RunInfo as RunInfo
    from rollbook.rollout.types import Sample as Sample
    from rollbook.rollout.types import Sampling as Sampling

_HOMES = {
    "Cancel": "engine",
    "Drift": "rendering",
    "Drifts": "rendering",
    "Engine": "engine",
    "Environment": "environment",
    "EnvironmentConfig": "environment",
    "Episode": "episode",
    "Reply": "environment",
    "play_episodes": "environment",
    "Line": "scripted",
    "OpenAIEngine": "openai",
    "Prompt": "types",
    "Renderer": "rendering",
    "Request": "engine",
    "RunInfo": "types",
    "Sample": "types",
    "Sampling": "types",
    "ScriptedEngine": "scripted",
    "TransformersEngine": "local",
    "act_all": "episode",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
