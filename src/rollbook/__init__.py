"""Rollbook: the experience layer of reinforcement fine-tuning for language and vision-language models.

Public names load when they are first used, so that `import rollbook` is quick and loads no torch and no pyarrow.

>>> import rollbook
>>> rollbook.Experience(tokens=[1, 2, 3], reward=1.0).experience_type
'single_turn'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook._lazy import lazily

if TYPE_CHECKING:
    from rollbook.batch import ExperienceBatch as ExperienceBatch
    from rollbook.book.opening import open as open
    from rollbook.custom_field import CustomField as CustomField
    from rollbook.errors import WireError as WireError
    from rollbook.experience import Experience as Experience
    from rollbook.experiences import Experiences as Experiences
    from rollbook.ids import EID as EID

__version__ = "0.1.0"

_HOMES = {
    "EID": "ids",
    "CustomField": "custom_field",
    "Experience": "experience",
    "ExperienceBatch": "batch",
    "Experiences": "experiences",
    "WireError": "errors",
    "open": "book.opening",
}
_MODULES = (
    "adapters",
    "algorithms",
    "batch",
    "book",
    "collate",
    "doctor",
    "draw",
    "experience",
    "experience_maker",
    "experiences",
    "fields",
    "freeform",
    "interchange",
    "making",
    "models",
    "planner",
    "ragged",
    "replay_buffer",
    "rewards",
    "rollout",
    "train",
    "trajectory_saver",
    "trxp",
    "viewer",
    "wire",
)

__all__ = ["EID", "CustomField", "Experience", "ExperienceBatch", "Experiences", "WireError", "__version__"]

__getattr__, __dir__ = lazily(__name__, _HOMES, _MODULES)
