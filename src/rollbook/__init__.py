"""Rollbook: the experience layer of RL fine-tuning for language and vision-language models.

Names load when they are first used, so that `import rollbook` is quick and loads neither torch nor pyarrow.

>>> import rollbook
>>> rollbook.Experience(tokens=[1, 2, 3], reward=1.0).experience_type
'single_turn'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core import __version__ as __version__
from rollbook.core import lazily

if TYPE_CHECKING:
    from rollbook import algorithms as algorithms
    from rollbook import batch as batch
    from rollbook import book as book
    from rollbook import cli as cli
    from rollbook import compat as compat
    from rollbook import core as core
    from rollbook import inspect as inspect
    from rollbook import io as io
    from rollbook import models as models
    from rollbook import rewards as rewards
    from rollbook import rollout as rollout
    from rollbook import train as train
    from rollbook.batch import Batch as Batch
    from rollbook.book import Book as Book
    from rollbook.book import Lease as Lease
    from rollbook.book import open as open
    from rollbook.core.errors import RollbookError as RollbookError
    from rollbook.core.errors import WireError as WireError
    from rollbook.core.experience import CustomField as CustomField
    from rollbook.core.experience import Experience as Experience
    from rollbook.core.experiences import Experiences as Experiences
    from rollbook.core.ids import EID as EID
    from rollbook.core.sampling import Prompt as Prompt
    from rollbook.core.sampling import Sample as Sample
    from rollbook.core.sampling import Sampling as Sampling
    from rollbook.models import Actor as Actor
    from rollbook.models import Critic as Critic
    from rollbook.rewards import RewardInput as RewardInput
    from rollbook.rewards import as_reward as as_reward
    from rollbook.rollout import Engine as Engine
    from rollbook.rollout import EnvironmentConfig as EnvironmentConfig
    from rollbook.rollout import Episode as Episode
    from rollbook.rollout import OpenAIEngine as OpenAIEngine
    from rollbook.rollout import Reply as Reply
    from rollbook.rollout import ScriptedEngine as ScriptedEngine
    from rollbook.rollout import TransformersEngine as TransformersEngine
    from rollbook.train import AlgorithmConfig as AlgorithmConfig
    from rollbook.train import Learner as Learner
    from rollbook.train import Prompts as Prompts
    from rollbook.train import Trainer as Trainer

_HOMES = {
    "Actor": "rollbook.models",
    "AlgorithmConfig": "rollbook.train",
    "Batch": "rollbook.batch",
    "Book": "rollbook.book",
    "Critic": "rollbook.models",
    "CustomField": "rollbook.core.experience",
    "EID": "rollbook.core.ids",
    "Engine": "rollbook.rollout",
    "EnvironmentConfig": "rollbook.rollout",
    "Episode": "rollbook.rollout",
    "Experience": "rollbook.core.experience",
    "Experiences": "rollbook.core.experiences",
    "Learner": "rollbook.train",
    "Lease": "rollbook.book",
    "OpenAIEngine": "rollbook.rollout",
    "Prompt": "rollbook.core.sampling",
    "Prompts": "rollbook.train",
    "Reply": "rollbook.rollout",
    "RewardInput": "rollbook.rewards",
    "RollbookError": "rollbook.core.errors",
    "Sample": "rollbook.core.sampling",
    "Sampling": "rollbook.core.sampling",
    "ScriptedEngine": "rollbook.rollout",
    "Trainer": "rollbook.train",
    "TransformersEngine": "rollbook.rollout",
    "WireError": "rollbook.core.errors",
    "as_reward": "rollbook.rewards",
    "open": "rollbook.book",
}
_MODULES = (
    *("algorithms", "batch", "book", "cli", "compat", "core", "inspect", "io", "models", "rewards", "rollout", "train"),
    *("experience", "experience_maker", "replay_buffer", "replay_buffer_utils", "trajectory_saver", "wire"),
)

# Not `open`: a star import would hide the built-in function.
__all__ = ["__version__", *(name for name in _HOMES if name != "open")]

__getattr__, __dir__ = lazily(__name__, _HOMES, _MODULES)
