"""`as_reward`: a reward from whatever a user has: functions, modules, URLs, files, recipes, or several of them.

Invariant: what is given decides which reward it is, never what it happens to return; an option that the reward does not
take is refused with the nearest that it does.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rollbook.core.checks import check_float, suggest
from rollbook.rewards.functions import KNOWN, FileFunction, FunctionReward, name_of
from rollbook.rewards.pools import MissingExtra
from rollbook.rewards.recipes import Combined, Recipe
from rollbook.rewards.remote import RemoteReward
from rollbook.rewards.types import Reward, is_reward

_READY = {
    "exact_match": "answers",
    "numeric_match": "answers",
    "boxed_match": "answers",
    "think_boxed_format": "answers",
    "think_answer_format": "answers",
    "gsm8k": "answers",
    "math_match": "equivalence",
    "code_match": "programs",
    "json_match": "texts",
    "json_schema": "texts",
    "length": "texts",
    "repetition": "texts",
}


_PACKAGES = {"math_match": ("math_verify", "math-verify", "math"), "json_schema": ("jsonschema", "jsonschema", "json")}
"""The module, the package and the extra that a ready function needs."""


class _Ready(Mapping[str, Callable[..., Any]]):
    """The ready functions by name, each loaded when it is asked for."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        _check_package(name)
        module = importlib.import_module(f"rollbook.rewards.{_READY[name]}")
        found: Callable[..., Any] = getattr(module, name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_READY)

    def __len__(self) -> int:
        return len(_READY)


READY: Mapping[str, Callable[..., Any]] = _Ready()
"""The ready functions by name."""


def as_reward(given: Any, **options: Any) -> Reward:
    """A reward from

    - a function, sync, async or batched, or the name of a ready one (`rollbook.rewards.READY`): `FunctionReward`;
    - `"module:function"`, `"file.py"` (its `reward_func`) or `"file.py:function"`: the same;
    - a torch module, or the path of a folder with a `config.json`: `ModelReward`;
    - `"http://..."`: `RemoteReward`;
    - {label: [(type, key, weight), ...]}: `Recipe`;
    - a list of these, or a mapping from names to these: their weighted sum, `Combined` (`names`, `weights`, `combine`);
      a list of URLs with `replicas=True` is one reward behind several servers;
    - a `Reward`: itself.

    `options` are those of the class and, for a function, whatever parameters it has that are nothing of a sample's; in
    a list each goes to the parts that take it. A `time_limit` that the function has itself (`math_match`,
    `code_match`) is the function's: the call then has 10 s more, and at least the usual 60.

    >>> from rollbook.rewards import RewardInput
    >>> sample = RewardInput(prompt="2 + 2 =", response="It is 4.", reference="4")
    >>> as_reward(["numeric_match", lambda response: len(response)], names=["right", "length"])([sample]).metrics
    {'right': [1.0], 'length': [8.0]}
    >>> as_reward("length", unit="words", target=2, per_unit=0.5)([sample]).rewards
    [-0.5]
    >>> as_reward("numeric_mach")
    Traceback (most recent call last):
        ...
    ValueError: reward: got 'numeric_mach', expected a URL, a .py file, 'module:function', a model's folder or a ready function; did you mean 'numeric_match'? (exact_match, numeric_match, boxed_match, think_boxed_format, think_answer_format, gsm8k, math_match, code_match, json_match, json_schema, length, repetition)
    """  # noqa: E501
    if is_reward(given):
        if options:
            raise ValueError(f"reward: got the option {next(iter(options))!r} beside a finished {type(given).__name__}")
        return given
    if isinstance(given, (list, tuple)):
        return _combined(list(given), options)
    if isinstance(given, Mapping) and not any(_is_lines(value) for value in given.values()):
        return _combined(list(given.values()), {"names": [str(name) for name in given], **options})
    kind, source = _kind(given)
    known = list(dict.fromkeys([*_options(kind), *_parameters(source)]))
    odd = next((name for name in options if name not in known), None)
    if odd is not None and not _takes_all(kind):
        meant = _SAME.get(odd, odd)
        raise ValueError(f"reward: option {odd!r} is not one of {kind.__name__}{suggest(meant, known)}")
    return _made(kind, source, options)


def _kind(given: Any) -> tuple[Callable[..., Reward], Any]:
    """The class that a single thing is a reward of, and what to make it from."""
    if isinstance(given, (str, Path)):
        return _kind_of_text(str(given))
    if _is_module(given) or _is_config(given):
        from rollbook.rewards.models import ModelReward

        return ModelReward, given
    if isinstance(given, Mapping):
        return Recipe, given
    if callable(given):
        return FunctionReward, given
    what = "None" if given is None else type(given).__name__
    raise ValueError(f"reward: got {what}, expected a function, a model, a URL, a file, a recipe or a list of these")


def _is_module(given: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever holds a module has loaded torch
    return torch is not None and isinstance(given, torch.nn.Module)


def _is_config(given: Any) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(given, transformers.PretrainedConfig)


def _is_lines(value: Any) -> bool:
    """Whether it is a recipe's list of components."""
    return isinstance(value, (list, tuple)) and all(isinstance(line, (list, tuple)) for line in value)


def _is_url(given: Any) -> bool:
    return isinstance(given, str) and given.startswith(("http://", "https://"))


def _options(kind: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(kind).parameters.values() if p.kind is p.KEYWORD_ONLY]


_SAME = {"timeout": "time_limit", "time_limit": "timeout"}
"""What functions and servers call differently."""


def _parameters(source: Any) -> list[str]:
    """A function's parameters that are nothing of a sample's: its own options."""
    if not callable(source) or _is_module(source):
        return []
    try:
        found = inspect.signature(source.bare() if isinstance(source, FileFunction) else source).parameters.values()
    except (TypeError, ValueError):
        return []
    named = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in named if name not in KNOWN]


def _made(kind: Callable[..., Reward], source: Any, options: Mapping[str, Any]) -> Reward:
    """A reward of this class, where a function has its own options fixed."""
    rest = dict(options)
    own = {name: rest.pop(name) for name in _parameters(source) if name in rest}
    both = [name for name in own if name in _options(kind)]
    for name in both:
        if name != "time_limit":
            fixed = f"functools.partial({name_of(source)}, {name}=...) for the function's"
            raise ValueError(f"reward: option {name!r} is one of {kind.__name__} and of the function, expected {fixed}")
        if own[name] is None:
            rest[name] = own.pop(name)  # the call's: a function's own limit is a number
        else:
            rest[name] = max(60.0, check_float(name, own[name], 1e-3, 1e9) + 10.0)
    if isinstance(source, FileFunction):
        source = replace(source, options={**source.options, **own})
    elif own:
        source = partial(source, **own)
    return kind(source, **rest)


def _takes_all(kind: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(kind).parameters.values())


def _kind_of_text(text: str) -> tuple[Callable[..., Reward], Any]:
    if _is_url(text):
        return RemoteReward, text
    path, _, name = text.rpartition(":")
    if text.endswith(".py"):
        return FunctionReward, FileFunction(text)
    if path.endswith(".py"):
        return FunctionReward, FileFunction(path, name)
    if text in READY:
        return FunctionReward, READY[text]
    if (Path(text) / "config.json").is_file():
        from rollbook.rewards.models import ModelReward

        return ModelReward, text
    if path and name.isidentifier() and all(part.isidentifier() for part in path.split(".")):
        module = importlib.import_module(path)
        if not callable(vars(module).get(name)):
            known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
            raise ValueError(f"reward: module {path!r} has no function {name!r}{suggest(name, known)}")
        return _kind(vars(module)[name])
    expected = "a URL, a .py file, 'module:function', a model's folder or a ready function"
    raise ValueError(f"reward: got {text!r}, expected {expected}{suggest(text, list(READY))}")


def _check_package(name: str) -> None:
    """Refuse a ready function whose package is not installed: it would fail with the first sample."""
    module, package, extra = _PACKAGES.get(name, (None, "", ""))
    if module is not None and importlib.util.find_spec(module) is None:
        raise MissingExtra(f"{name} needs {package}: pip install 'rollbook[{extra}]'")


def _combined(given: list[Any], options: Mapping[str, Any]) -> Reward:
    if not given:
        raise ValueError("reward: got an empty list, expected at least one reward")
    own = {name: options[name] for name in ("names", "weights", "combine") if name in options}
    rest = {name: value for name, value in options.items() if name not in own}
    if rest.pop("replicas", False):
        if own or not all(map(_is_url, given)):
            raise ValueError("replicas: got True, expected a list of URLs, and neither names, weights nor combine")
        return RemoteReward(given, **rest)
    used: set[str] = set()
    parts = [_part(one, rest, used) for one in given]
    unused = next((name for name in rest if name not in used), None)
    if unused is not None:
        raise ValueError(f"reward: got the option {unused!r}, which no part of the list takes")
    if len(parts) == 1 and not own:
        return parts[0]
    names = own.pop("names", None) or _names(given)
    if len(names) != len(parts) or len(set(names)) != len(names):
        raise ValueError(f"names: got {list(names)}, expected {len(parts)} that differ, one for each reward")
    return Combined(dict(zip(names, parts, strict=True)), **own)


def _part(one: Any, options: Mapping[str, Any], used: set[str]) -> Reward:
    """One reward of a list, with those of the options that it takes."""
    if is_reward(one) or isinstance(one, (list, tuple)):
        return as_reward(one)
    kind, source = _kind(one)
    known = {*_options(kind), *_parameters(source)}
    mine = {name: value for name, value in options.items() if name in known}
    used.update(mine)
    return _made(kind, source, mine)


def _names(given: Sequence[Any]) -> list[str]:
    """A name for each reward of a list: its own where that tells them apart, with a number where it does not."""
    found = [_name(one) for one in given]
    return [name if found.count(name) == 1 else f"{name}{found[:i].count(name)}" for i, name in enumerate(found)]


def _name(one: Any) -> str:
    if _is_url(one):
        return "remote"
    if isinstance(one, (str, Path)):
        return Path(str(one).rpartition(":")[2]).stem  # a file, a module's function, or a ready one
    name = name_of(one)
    return "reward" if name == "<lambda>" else name
