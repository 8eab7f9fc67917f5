"""Rewards: functions, models, servers and recipes that score samples, and built-in reward functions.

| module | contents |
|---|---|
| `types` | `RewardInput`, `RewardResult`, the `Reward` protocol |
| `functions` | reward functions, in threads or processes, with a time limit for each call |
| `models` | torch modules and sequence classifiers |
| `remote` | reward models behind HTTP |
| `recipes` | `as_reward`, weighted sums, recipes by label |
| `answers` | built-in reward functions (`BUILTIN_REWARDS` has them by name) |
| `sandbox` | `code_match`, and limits for untrusted programs |

Names load when they are first used: neither torch nor httpx is needed before.

>>> from rollbook.rewards import RewardInput, as_reward
>>> score = as_reward("numeric_match")
>>> score([RewardInput(prompt="6 * 7 = ", response="That is 42.", reference="42")]).rewards
[1.0]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core import lazily

if TYPE_CHECKING:
    from rollbook.rewards.answers import boxed_match as boxed_match
    from rollbook.rewards.answers import exact_match as exact_match
    from rollbook.rewards.answers import extract_boxed as extract_boxed
    from rollbook.rewards.answers import extract_final_answer as extract_final_answer
    from rollbook.rewards.answers import extract_last_number as extract_last_number
    from rollbook.rewards.answers import find_json_errors as find_json_errors
    from rollbook.rewards.answers import gsm8k as gsm8k
    from rollbook.rewards.answers import json_match as json_match
    from rollbook.rewards.answers import json_schema as json_schema
    from rollbook.rewards.answers import length as length
    from rollbook.rewards.answers import math_match as math_match
    from rollbook.rewards.answers import numeric_match as numeric_match
    from rollbook.rewards.answers import parse_number as parse_number
    from rollbook.rewards.answers import repetition as repetition
    from rollbook.rewards.answers import think_answer_format as think_answer_format
    from rollbook.rewards.answers import think_boxed_format as think_boxed_format
    from rollbook.rewards.functions import FunctionReward as FunctionReward
    from rollbook.rewards.functions import batched as batched
    from rollbook.rewards.models import ModelReward as ModelReward
    from rollbook.rewards.recipes import BUILTIN_REWARDS as BUILTIN_REWARDS
    from rollbook.rewards.recipes import CombinedReward as CombinedReward
    from rollbook.rewards.recipes import Recipe as Recipe
    from rollbook.rewards.recipes import as_reward as as_reward
    from rollbook.rewards.remote import RemoteReward as RemoteReward
    from rollbook.rewards.sandbox import Limits as Limits
    from rollbook.rewards.sandbox import code_match as code_match
    from rollbook.rewards.sandbox import run_sandboxed as run_sandboxed
    from rollbook.rewards.types import Reward as Reward
    from rollbook.rewards.types import RewardError as RewardError
    from rollbook.rewards.types import RewardInput as RewardInput
    from rollbook.rewards.types import RewardResult as RewardResult

_HOMES = {
    "CombinedReward": "rollbook.rewards.recipes",
    "FunctionReward": "rollbook.rewards.functions",
    "Limits": "rollbook.rewards.sandbox",
    "ModelReward": "rollbook.rewards.models",
    "BUILTIN_REWARDS": "rollbook.rewards.recipes",
    "Recipe": "rollbook.rewards.recipes",
    "RemoteReward": "rollbook.rewards.remote",
    "Reward": "rollbook.rewards.types",
    "RewardError": "rollbook.rewards.types",
    "RewardInput": "rollbook.rewards.types",
    "RewardResult": "rollbook.rewards.types",
    "parse_number": "rollbook.rewards.answers",
    "as_reward": "rollbook.rewards.recipes",
    "batched": "rollbook.rewards.functions",
    "extract_boxed": "rollbook.rewards.answers",
    "boxed_match": "rollbook.rewards.answers",
    "code_match": "rollbook.rewards.sandbox",
    "exact_match": "rollbook.rewards.answers",
    "extract_final_answer": "rollbook.rewards.answers",
    "gsm8k": "rollbook.rewards.answers",
    "find_json_errors": "rollbook.rewards.answers",
    "json_match": "rollbook.rewards.answers",
    "json_schema": "rollbook.rewards.answers",
    "extract_last_number": "rollbook.rewards.answers",
    "length": "rollbook.rewards.answers",
    "math_match": "rollbook.rewards.answers",
    "numeric_match": "rollbook.rewards.answers",
    "repetition": "rollbook.rewards.answers",
    "run_sandboxed": "rollbook.rewards.sandbox",
    "think_answer_format": "rollbook.rewards.answers",
    "think_boxed_format": "rollbook.rewards.answers",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
