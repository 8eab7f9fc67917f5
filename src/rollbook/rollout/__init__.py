"""Rollout engines: prompts in, samples out, with the engine's own tokens and log-probs.

Names load when they are first used; only the transformers engine needs torch.

>>> from rollbook.rollout import ScriptedEngine
>>> ScriptedEngine([[7, 8]]).generate("hello", max_tokens=1)[0].finish_reason
'length'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core import lazily

if TYPE_CHECKING:
    from rollbook.core.sampling import Prompt as Prompt
    from rollbook.core.sampling import RunInfo as RunInfo
    from rollbook.core.sampling import Sample as Sample
    from rollbook.core.sampling import Sampling as Sampling
    from rollbook.rollout.chat import Drift as Drift
    from rollbook.rollout.chat import Drifts as Drifts
    from rollbook.rollout.chat import Renderer as Renderer
    from rollbook.rollout.engine import BaseEngine as BaseEngine
    from rollbook.rollout.engine import Cancel as Cancel
    from rollbook.rollout.engine import Engine as Engine
    from rollbook.rollout.engine import Line as Line
    from rollbook.rollout.engine import Request as Request
    from rollbook.rollout.engine import ScriptedEngine as ScriptedEngine
    from rollbook.rollout.engine import WeightSyncError as WeightSyncError
    from rollbook.rollout.environment import Environment as Environment
    from rollbook.rollout.environment import EnvironmentConfig as EnvironmentConfig
    from rollbook.rollout.environment import Episode as Episode
    from rollbook.rollout.environment import Reply as Reply
    from rollbook.rollout.environment import act_all as act_all
    from rollbook.rollout.environment import play_episodes as play_episodes
    from rollbook.rollout.openai import OpenAIEngine as OpenAIEngine
    from rollbook.rollout.transformers import TransformersEngine as TransformersEngine
    from rollbook.rollout.vllm import VllmEngine as VllmEngine
    from rollbook.rollout.weight_sync import StaleWeightsError as StaleWeightsError
    from rollbook.rollout.weight_sync import check_sync as check_sync

_HOMES = {
    "BaseEngine": "rollbook.rollout.engine",
    "Cancel": "rollbook.rollout.engine",
    "Drift": "rollbook.rollout.chat",
    "Drifts": "rollbook.rollout.chat",
    "Engine": "rollbook.rollout.engine",
    "Environment": "rollbook.rollout.environment",
    "EnvironmentConfig": "rollbook.rollout.environment",
    "Episode": "rollbook.rollout.environment",
    "Line": "rollbook.rollout.engine",
    "OpenAIEngine": "rollbook.rollout.openai",
    "Prompt": "rollbook.core.sampling",
    "Renderer": "rollbook.rollout.chat",
    "Reply": "rollbook.rollout.environment",
    "Request": "rollbook.rollout.engine",
    "RunInfo": "rollbook.core.sampling",
    "Sample": "rollbook.core.sampling",
    "Sampling": "rollbook.core.sampling",
    "ScriptedEngine": "rollbook.rollout.engine",
    "StaleWeightsError": "rollbook.rollout.weight_sync",
    "TransformersEngine": "rollbook.rollout.transformers",
    "VllmEngine": "rollbook.rollout.vllm",
    "WeightSyncError": "rollbook.rollout.engine",
    "act_all": "rollbook.rollout.environment",
    "check_sync": "rollbook.rollout.weight_sync",
    "play_episodes": "rollbook.rollout.environment",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
