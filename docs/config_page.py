"""Write the reference page of the configuration from the schema: `python docs/config_page.py > PAGE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rollbook.train.algorithm import AlgorithmConfig, presets
from rollbook.train.config.files import format_value, list_recipes, summarize
from rollbook.train.config.schema import Config
from rollbook.train.config.values import Key, ListOf, find_section, get_section

BEGINNING = """\
# Configuration

Every key of `rollbook train`. `python docs/config_page.py` writes this page from the code.

```sh
rollbook train                                       # the built-in recipe
rollbook train letters --show-config > my.yaml       # a complete configuration with all defaults
rollbook train my.yaml --out runs/mine               # a file: YAML or TOML
rollbook train my.yaml optimizer.lr=1e-4 seed=3 --out runs/slow      # with changes
```

A file has only the keys that differ from the defaults:

```yaml
base: letters            # a file, relative to this one, or a recipe's name; the keys below change it
model: path/or/hub-name  # short for model: {path: ...}
data:
  path: train.jsonl
  columns: {prompt: question, reference: answer}
  held_out: 200
rewards:
  - numeric_match        # short for {function: numeric_match}
  - {function: "my_rewards:brief", weight: 0.1}
algorithm: grpo          # short for {preset: grpo}
optimizer: {lr: 1e-5, schedule: linear}
```

- **Base.** Mappings are merged key by key; lists are replaced. Naming another source or kind (`model.path` where the base has a builder, another `algorithm.preset`) drops the base's settings of the old one.
- **Changes.** `section.key=value`, with values as in YAML: numbers, `true`, `null`, `[a, b]`, `{a: 1}`. Text needs no quotes. `rewards.0.weight=2` changes one item of a list.
- **YAML** is read by the rules of version 1.2: `1e-5` is a number, `no` and `12:30` are text. Duplicate keys and tags are errors. TOML has no null: leave the key out.
- **Errors** name the key, the file and the line: `optimizer.lr: got -1.0, expected a number >= 0 (my.yaml, line 12)`. Unknown keys are errors, with the closest match.
- **Paths** in a file are relative to that file, or else to the working directory. `out` and paths on the command line are relative to the working directory.
- **Code.** Reading a file runs no code. Training imports and calls what the file names (`builder`, `function`, reward functions), so read a file from others before you train with it. See [which command runs which code](training.md#code-executed-from-shared-runs).
- **Secrets** must not be in a file, because the run folder repeats it. A password or token in a URL, an option such as `api_key`, or a header is an error; headers count if their name has auth, cookie, credential, key, password, secret, session, signature or token in it. The value must be a variable, with at most a scheme before it. All other headers are stored and shown as they are, and may have variables, too. Write `${NAME}` to read an environment variable: `remote: "https://user:${REWARD_PASSWORD}@host/score"`, `options: {headers: {Authorization: "Bearer ${REWARD_TOKEN}"}}`, `replay: {expert: "postgresql://user:${BOOK_PASSWORD}@host/runs"}`. `engine.api_key_env` names the variable of the engine's key.
- **Resume.** Only keys marked ↻ may change when a run is resumed.
"""  # noqa: E501


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield BEGINNING
    yield f"Recipes: {', '.join(f'`{name}`' for name in list_recipes()) or 'none'}.\n"
    top = get_section(Config)
    sections = {name: inner for name, key in top.keys.items() if (inner := find_section(key.kind)) is not None}
    yield "## The run\n"
    yield from _table([key for name, key in top.keys.items() if name not in sections], "")
    seen: dict[type, str] = {}
    for name, section in sections.items():
        key = top.keys[name]
        yield f"\n## `{name}`\n"
        yield key.doc or summarize(section)
        if section.cls in seen:
            yield f"\nKeys: those of [`{seen[section.cls]}`](#{seen[section.cls]})."
            continue
        seen[section.cls] = name
        yield ""
        before = f"{name}.N." if isinstance(key.kind, ListOf) else f"{name}."
        yield from _table(list(section.keys.values()), before, key.changeable)
        if section.cls is AlgorithmConfig:
            yield from _presets()


def _presets() -> Iterator[str]:
    yield "\nThese are the defaults without a preset (`preset: null`). A preset changes some of them:\n"
    yield "| preset | changes |"
    yield "|---|---|"
    defaults = AlgorithmConfig().to_dict()
    for name, preset in presets().items():
        changes = {key: value for key, value in preset.to_dict().items() if value != defaults[key] and key != "name"}
        yield f"| `{name}` | {', '.join(f'`{key}: {format_value(value)}`' for key, value in changes.items())} |"


def _table(keys: list[Key], before: str, changeable: bool = False) -> Iterator[str]:
    yield "| key | default | description | expected |"
    yield "|---|---|---|---|"
    for key in keys:
        mark = " ↻" if changeable or key.changeable else ""
        cells = (f"`{before}{key.name}`{mark}", f"`{format_value(key.default)}`", key.doc, key.kind.expected)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
