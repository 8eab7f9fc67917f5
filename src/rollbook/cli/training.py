"""`rollbook train` and `rollbook replay`.

Invariant: what is wrong with a configuration is one line that names the key, before a model is loaded; what is printed
for programs (`--json`) goes to the standard output alone, what is for people to the standard error.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from rollbook.cli.terminal import OK


def train(options: argparse.Namespace) -> int:
    """Train as a file, a recipe and the arguments say."""
    from rollbook.train.config import effective, recipes, shown

    if options.recipes:
        known = recipes()
        if options.json:
            print(json.dumps(list(known)))
        else:
            width = max(map(len, known))
            for recipe, path in known.items():
                print(f"{recipe:<{width}}  {path.read_text().partition(chr(10))[0].removeprefix('# ')}")
        return OK
    name: str | None = options.config
    changes = list(options.changes)
    if name is not None and "=" in name:
        name, changes = None, [name, *changes]
    given: dict[str, Any] = {"out": options.out, "seed": options.seed, "steps": options.steps}
    changes += [f"{key}={value}" for key, value in given.items() if value is not None]
    config = effective(name, [*changes, *(["overwrite=true"] if options.overwrite else [])])
    if options.show_config:
        print(json.dumps(config.to_dict()) if options.json else shown(config), end="\n" if options.json else "")
        return OK
    from rollbook.train.running import run

    outcome = run(config)
    if options.json:
        found: dict[str, Any] = {"folder": str(outcome.folder), "steps": outcome.steps, "seconds": outcome.seconds}
        for when, one in (("before", outcome.before), ("after", outcome.after)):
            found[when] = None if one is None else one.metrics()
        print(json.dumps(found))
    return OK
