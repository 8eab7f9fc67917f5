"""Functions that a configuration names, as `module:function` or `file.py:function`, and which of them are trusted.

Invariant: a name gives the one object that it names, or a `ValueError` that says which half of it is wrong; a file is
run once in a process, however often it is named; what goes wrong inside a user's module is raised as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rollbook.core.checks import suggest
from rollbook.core.vocabulary import load_module_file
from rollbook.train.config.schema import Config, Reward


def resolve(target: str, *, name: str = "function", folder: str | Path | None = None) -> Any:
    """What `module:name` or `file.py:name` names; a dotted name is looked up step by step (`module:Class.method`).

    `name` says in errors which option it is of. A file's path is relative to `folder`, by default the current one.

    >>> resolve("math:gcd")(12, 18)
    6
    >>> resolve("math:gdc")
    Traceback (most recent call last):
        ...
    ValueError: function: got 'math:gdc', but math has no 'gdc'; did you mean 'gcd'?
    >>> resolve("maths:gcd", name="data.function")
    Traceback (most recent call last):
        ...
    ValueError: data.function: got 'maths:gcd', but there is no module 'maths'
    """
    where, _, inner = target.rpartition(":") if isinstance(target, str) else ("", "", "")
    if not where or not inner or not all(part.isidentifier() for part in inner.split(".")):
        raise ValueError(f"{name}: got {target!r}, expected 'module:function' or 'path/to/file.py:function'")
    target_object: Any
    if where.endswith(".py"):
        target_object = _file(target, name, Path(folder or ".") / where)
    else:
        target_object = _module(target, name, where, Path(folder or "."))
    for part in inner.split("."):
        if not hasattr(target_object, part):
            names = (
                {attribute: None for attribute in vars(target_object) if not attribute.startswith("_")}
                if hasattr(target_object, "__dict__")
                else {}
            )
            guess = suggest(part, names).partition("?")
            hint = guess[0] + guess[1] if guess[1] else ""
            raise ValueError(f"{name}: got {target!r}, but {where} has no {part!r}{hint}")
        target_object = getattr(target_object, part)
    return target_object


def _module(target: str, name: str, path: str, folder: Path) -> ModuleType:
    if not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{name}: got {target!r}, expected a module's dotted name or a .py file before the colon")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if path != missing and not path.startswith(f"{missing}."):
            raise  # the module is there, and misses another
        # A command does not look for modules in the folder where it is called, as a script of one's own would.
        file = Path(*path.split(".")).with_suffix(".py")
        here = f"; the file is there: {file}:{target.rpartition(':')[2]}" if (folder / file).is_file() else ""
        raise ValueError(f"{name}: got {target!r}, but there is no module {missing!r}{here}") from None


def _file(target: str, name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{name}: got {target!r}, but there is no file {path.resolve()}")
    return load_module_file(path)


_RECIPES = "rollbook.train.recipes."


def check_trusted(folder: Path, config: Config, *, remote: bool = False) -> None:
    """Refuse a run whose configuration names code that is not Rollbook's.

    Args:
        folder: The run's folder, for the message.
        config: The configuration that the folder holds.
        remote: Whether servers that sample or score would be asked, too.

    Raises:
        ValueError: It names some; the message lists every key and its value.
    """
    named = foreign_code(config, remote=remote)
    if named:
        listed = "".join(f"\n{path}: {value}" for path, value in named.items())
        raise ValueError(
            f"{folder}: its configuration names code or servers that are not part of Rollbook:{listed}\n"
            "Going on would run some of it. If you trust all of it, pass --trust (in Python: trust=True)"
        )


def foreign_code(config: Config, *, remote: bool = False) -> dict[str, str]:
    """Find what a configuration names that is not Rollbook's own: functions, files, programs and servers.

    Returns:
        Values by the path of their key.

    >>> foreign_code(Config(model={"builder": "os:system"}, rewards=["exact_match", "mine.py:score"]))
    {'model.builder': 'os:system', 'rewards.1.function': 'mine.py:score'}
    """
    functions = {
        "model.builder": config.model.builder,
        "teacher.builder": config.teacher.builder,
        "data.function": config.data.function,
        "evaluation.function": config.evaluation.function,
        "environment.function": config.environment.function,
    }
    named = {path: target for path, target in functions.items() if target is not None and not is_own(target)}
    for key, rewards in (("rewards", config.rewards), ("evaluation.rewards", config.evaluation.rewards)):
        for i, reward in enumerate(rewards):
            named |= {f"{key}.{i}.{name}": value for name, value in _of_reward(reward, remote)}
    named |= {f"tracking.trackers.{i}": tracker for i, tracker in enumerate(config.tracking.trackers)}
    if "/" in (config.model.attention or ""):
        named["model.attention"] = str(config.model.attention)  # a kernel of the hub
    if remote and config.engine.url is not None:
        named["engine.url"] = config.engine.url
    expert = config.replay.expert
    if expert is not None and "://" in expert:
        # libpq offers the server of an address whatever password the environment holds.
        named["replay.expert"] = expert
    return named


def _of_reward(reward: Reward, remote: bool) -> Iterator[tuple[str, str]]:
    if reward.function is not None and not is_own(reward.function):
        yield "function", reward.function
    for label, lines in (reward.recipe or {}).items():
        if "code_match" in str(lines):
            yield f"recipe.{label}", "code_match"
    for name in ("functions", "models"):
        option = reward.options.get(name, {})
        parts = option.items() if isinstance(option, Mapping) else enumerate(option if isinstance(option, list) else ())
        for part, value in parts:
            if not is_own(value):
                yield f"options.{name}.{part}", str(value)
    if remote and reward.remote is not None:
        yield "remote", ", ".join(reward.remote)


def is_own(target: Any) -> bool:
    """Whether the name of a function is of one that Rollbook has for configurations: a recipe's, or a ready reward.

    Being in a module of Rollbook's is not enough: its modules import others (`rollbook.cli.parser:os.system`), and some
    of its functions run files. `code_match` is not among them: it runs the programs that records hold.

    >>> [is_own(name) for name in ("rollbook.train.recipes.letters:reward", "exact_match", "rollbook.core:sys.exit")]
    [True, True, False]
    """
    from rollbook.rewards.recipes import READY

    if not isinstance(target, str):
        return False
    module, _, name = target.rpartition(":")
    if module.startswith(_RECIPES) and module.removeprefix(_RECIPES).isidentifier():
        try:
            return name in importlib.import_module(module).__all__
        except ImportError:
            return False
    ready = name in READY and name != "code_match"
    return ready and (not module or module in ("rollbook.rewards", READY[name].__module__))
