"""The configuration of `rollbook train`: its keys, files and arguments.

| module | contents |
|---|---|
| `schema` | `Config` and its sections: every key with its type, default, bounds and description |
| `values` | kinds of values, `ConfigError`, secrets |
| `files` | `load_config`: files with their bases, recipes, `section.key=value` arguments; `dump_config`: YAML |

Names load when they are first used.

>>> from rollbook.train.config import Config
>>> Config.from_dict({"optimizer": {"lr": 1e-5}}).optimizer.lr
1e-05
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core import lazily

if TYPE_CHECKING:
    from rollbook.train.config.files import dump_config as dump_config
    from rollbook.train.config.files import list_recipes as list_recipes
    from rollbook.train.config.files import load_config as load_config
    from rollbook.train.config.schema import Config as Config
    from rollbook.train.config.schema import Difference as Difference
    from rollbook.train.config.schema import compare_configs as compare_configs
    from rollbook.train.config.values import ConfigError as ConfigError

_HOMES = {
    "Config": "rollbook.train.config.schema",
    "ConfigError": "rollbook.train.config.values",
    "Difference": "rollbook.train.config.schema",
    "compare_configs": "rollbook.train.config.schema",
    "load_config": "rollbook.train.config.files",
    "list_recipes": "rollbook.train.config.files",
    "dump_config": "rollbook.train.config.files",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
