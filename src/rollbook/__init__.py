"""Rollbook: the experience layer of reinforcement fine-tuning for language and vision-language models.

Public names load when they are first used, so that `import rollbook` is quick and loads no torch and no pyarrow.

>>> import rollbook
>>> rollbook.Experience(tokens=[1, 2, 3], reward=1.0).experience_type
'single_turn'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core import __version__
from rollbook.core.lazy import lazily

if TYPE_CHECKING:
    from rollbook.book.book import open as open
    from rollbook.compat.lightrft.batch import ExperienceBatch as ExperienceBatch
    from rollbook.core.errors import WireError as WireError
    from rollbook.core.experience import CustomField
    from rollbook.core.experience import Experience as Experience
    from rollbook.core.experiences import Experiences as Experiences
    from rollbook.core.ids import EID as EID

_HOMES = {
    "EID": "rollbook.core.ids",
    "CustomField": "rollbook.core.experience",
    "Experience": "rollbook.core.experience",
    "ExperienceBatch": "rollbook.compat.lightrft.batch",
    "Experiences": "rollbook.core.experiences",
    "WireError": "rollbook.core.errors",
    "open": "rollbook.book.book",
}
_MODULES = (
    "algorithms",
    "batch",
    "book",
    "compat",
    "core",
    "experience",
    "experience_maker",
    "inspect",
    "io",
    "models",
    "replay_buffer",
    "replay_buffer_utils",
    "rewards",
    "rollout",
    "train",
    "trajectory_saver",
    "wire",
)

__all__ = ["EID", "CustomField", "Experience", "ExperienceBatch", "Experiences", "WireError", "__version__"]

__getattr__, __dir__ = lazily(__name__, _HOMES, _MODULES)
