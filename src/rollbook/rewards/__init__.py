"""Rewards: functions, models, servers and recipes that score samples, and ready functions to begin with.

| module | what it holds |
|---|---|
| `types` | `RewardInput`, `Scores`, the `Reward` protocol |
| `choose` | `as_reward`: a reward from whatever a user has; `READY`, the ready functions by name |
| `functions`, `pools` | reward functions, in threads or processes, with a time limit for each call |
| `models` | torch modules and sequence classifiers |
| `remote`, `images` | servers, and what they are sent |
| `recipes` | weighted sums, recipes by label, LightRFT's `reward_fn` |
| `answers`, `equivalence`, `texts`, `programs`, `sandbox` | the ready functions |

Names load when they are first used: neither torch nor httpx is needed before.

>>> from rollbook.rewards import RewardInput, as_reward
>>> score = as_reward("numeric_match")
>>> score([RewardInput(prompt="6 * 7 = ", response="That is 42.", reference="42")]).rewards
[1.0]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook._lazy import lazily

if TYPE_CHECKING:
    from rollbook.rewards.answers import as_number as as_number
    from rollbook.rewards.answers import boxed as boxed
    from rollbook.rewards.answers import boxed_match as boxed_match
    from rollbook.rewards.answers import exact_match as exact_match
    from rollbook.rewards.answers import final_answer as final_answer
    from rollbook.rewards.answers import gsm8k as gsm8k
    from rollbook.rewards.answers import last_number as last_number
    from rollbook.rewards.answers import numeric_match as numeric_match
    from rollbook.rewards.answers import think_answer_format as think_answer_format
    from rollbook.rewards.answers import think_boxed_format as think_boxed_format
    from rollbook.rewards.choose import READY as READY
    from rollbook.rewards.choose import as_reward as as_reward
    from rollbook.rewards.equivalence import math_match as math_match
    from rollbook.rewards.functions import FunctionReward as FunctionReward
    from rollbook.rewards.functions import batched as batched
    from rollbook.rewards.models import ModelReward as ModelReward
    from rollbook.rewards.programs import code_match as code_match
    from rollbook.rewards.recipes import Combined as Combined
    from rollbook.rewards.recipes import Recipe as Recipe
    from rollbook.rewards.recipes import lightrft_reward as lightrft_reward
    from rollbook.rewards.remote import RemoteReward as RemoteReward
    from rollbook.rewards.sandbox import Limits as Limits
    from rollbook.rewards.sandbox import sandboxed as sandboxed
    from rollbook.rewards.texts import json_errors as json_errors
    from rollbook.rewards.texts import json_match as json_match
    from rollbook.rewards.texts import json_schema as json_schema
    from rollbook.rewards.texts import length as length
    from rollbook.rewards.texts import repetition as repetition
    from rollbook.rewards.types import Reward as Reward
    from rollbook.rewards.types import RewardError as RewardError
    from rollbook.rewards.types import RewardInput as RewardInput
    from rollbook.rewards.types import Scores as Scores

_HOMES = {
    "READY": "choose",
    "Combined": "recipes",
    "FunctionReward": "functions",
    "Limits": "sandbox",
    "ModelReward": "models",
    "Recipe": "recipes",
    "RemoteReward": "remote",
    "Reward": "types",
    "RewardError": "types",
    "RewardInput": "types",
    "Scores": "types",
    "as_number": "answers",
    "as_reward": "choose",
    "batched": "functions",
    "boxed": "answers",
    "boxed_match": "answers",
    "code_match": "programs",
    "exact_match": "answers",
    "final_answer": "answers",
    "gsm8k": "answers",
    "json_errors": "texts",
    "json_match": "texts",
    "json_schema": "texts",
    "last_number": "answers",
    "length": "texts",
    "lightrft_reward": "recipes",
    "math_match": "equivalence",
    "numeric_match": "answers",
    "repetition": "texts",
    "sandboxed": "sandbox",
    "think_answer_format": "answers",
    "think_boxed_format": "answers",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
