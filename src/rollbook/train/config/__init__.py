"""The configuration of `rollbook train`: its keys, files and arguments, and how it is shown.

| module | what it holds |
|---|---|
| `schema` | `Config` and its sections: every key with its type, default, bounds and one sentence |
| `kinds` | how values are checked, and `ConfigError` |
| `loading`, `reading` | `effective`: files with their bases, recipes, `section.key=value` arguments |
| `writing` | `shown`: a configuration as YAML with comments, which loads back to the same |
| `page` | the reference page |

Names load when they are first used.

>>> from rollbook.train.config import Config
>>> Config.of({"optimizer": {"lr": 1e-5}}).optimizer.lr
1e-05
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core.lazy import lazily

if TYPE_CHECKING:
    from rollbook.train.config.files import effective as effective
    from rollbook.train.config.files import recipes as recipes
    from rollbook.train.config.files import shown as shown
    from rollbook.train.config.schema import Config as Config
    from rollbook.train.config.schema import Difference as Difference
    from rollbook.train.config.schema import differences as differences
    from rollbook.train.config.values import ConfigError as ConfigError

_HOMES = {
    "Config": "rollbook.train.config.schema",
    "ConfigError": "rollbook.train.config.values",
    "Difference": "rollbook.train.config.schema",
    "differences": "rollbook.train.config.schema",
    "effective": "rollbook.train.config.files",
    "recipes": "rollbook.train.config.files",
    "shown": "rollbook.train.config.files",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
