"""`as_reward`, weighted sums of rewards, and recipes by label.

Invariant: a sample's reward is the sum of weight times score over its components, and each component's score is kept
as a metric. The type of the argument of `as_reward` decides which reward it becomes; unknown options are rejected.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rollbook.core.checks import check_float, suggest
from rollbook.core.vocabulary import join_fingerprints
from rollbook.rewards.functions import (
    PARAMETER_NAMES,
    FileFunction,
    FunctionReward,
    MissingExtraError,
    function_name,
    read_scores,
)
from rollbook.rewards.remote import RemoteReward
from rollbook.rewards.types import (
    Reward,
    RewardInput,
    RewardResult,
    as_inputs,
    is_reward,
    locate,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    RewardLike: TypeAlias = (
        Reward
        | Callable[..., Any]
        | str
        | Path
        | torch.nn.Module
        | PretrainedConfig
        | Sequence[Any]
        | Mapping[Any, Any]
    )
    """What `as_reward` takes."""

__all__ = ["BUILTIN_REWARDS", "CombinedReward", "Recipe", "as_reward"]


@dataclass(frozen=True)
class ScoredComponent:
    """Scores of a component.

    Args:
        name: Name of the component.
        places: Indices of the samples that it scored.
        weights: Its weight for each of them.
        scores: The scores.
    """

    name: str
    places: Sequence[int]
    weights: Sequence[float]
    scores: RewardResult


def add_components(n: int, pieces: Sequence[ScoredComponent]) -> RewardResult:
    """Add the weighted scores of components. Scores become metrics, and metrics become `component/metric`.

    Args:
        n: Number of samples.
        pieces: The components.

    A sample lacks a reward if a component that counts (of a weight other than 0) has none for it.

    >>> part = RewardResult(rewards=[1.0], metrics={"steps": [3.0]})
    >>> add_components(2, [ScoredComponent("a", [1], [0.5], part)])
    RewardResult(rewards=[0.0, 0.5], metrics={'a': [nan, 1.0], 'a/steps': [nan, 3.0]}, errors=[None, None])
    """
    combined = RewardResult(
        rewards=[0.0] * n, parts=tuple(dict.fromkeys(piece.name for piece in pieces if any(piece.weights)))
    )
    for piece in pieces:
        if len(piece.scores) != len(piece.places):
            raise ValueError(f"{piece.name}: gave {len(piece.scores)} scores, expected {len(piece.places)}")
        columns = {piece.name: piece.scores.rewards}
        columns |= {f"{piece.name}/{name}": values for name, values in piece.scores.metrics.items()}
        for name, values in columns.items():
            column = combined.metrics.setdefault(name, [nan] * n)
            for i, value in zip(piece.places, values, strict=True):
                column[i] = value
        for i, weight, reward, error in zip(
            piece.places, piece.weights, piece.scores.rewards, piece.scores.errors, strict=True
        ):
            if weight != 0.0:  # a component of weight 0 is only a metric, and 0 times NaN is NaN
                combined.rewards[i] += weight * reward
            if error is not None:
                combined_error = combined.errors[i]
                text = error if error.startswith(f"{piece.name}: ") else f"{piece.name}: {error}"
                combined.errors[i] = text if combined_error is None else f"{combined_error}; {text}"
    return combined


def score_all(jobs: Sequence[tuple[Reward, Sequence[RewardInput]]]) -> list[RewardResult]:
    """Score the inputs of each reward. Rewards that wait run concurrently, the others one after another."""
    results: dict[int, RewardResult] = {}
    waiting = [k for k, (reward, inputs) in enumerate(jobs) if reward.waits and inputs]
    with ThreadPoolExecutor(max(len(waiting), 1), "rollbook-reward") as threads:
        started = {k: threads.submit(jobs[k][0], jobs[k][1]) for k in waiting}
        for k, (reward, inputs) in enumerate(jobs):
            if k not in started:
                results[k] = reward(inputs) if inputs else RewardResult(rewards=[])
        results |= {k: future.result() for k, future in started.items()}
    return [results[k] for k in range(len(jobs))]


async def score_all_async(jobs: Sequence[tuple[Reward, Sequence[RewardInput]]]) -> list[RewardResult]:
    """Score the inputs of each reward concurrently."""
    return list(await asyncio.gather(*(reward.score_async(inputs) for reward, inputs in jobs)))


class CombinedReward(Reward):
    """Weighted sum of several rewards of the same samples.

    Args:
        rewards: Rewards by name.
        weights: By name or in order; 1 each by default.
        combine: Function from the list of score tensors, (B,) each, to (B,), as LightRFT has it for several remote
            models; it replaces the sum.

    Raises:
        ValueError: There are no rewards, or the weights do not fit them.

    >>> from rollbook.rewards import as_reward
    >>> def correct(response, reference): return float(response == reference)
    >>> def short(response): return float(len(response) < 4)
    >>> components = {"correct": as_reward(correct), "short": as_reward(short)}
    >>> reward = CombinedReward(components, weights={"correct": 0.9, "short": 0.1})
    >>> scores = reward([RewardInput(prompt="", response="no", reference="yes")])
    >>> scores.rewards, scores.metrics
    ([0.1], {'correct': [0.0], 'short': [1.0]})
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        combine: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if not rewards:
            raise ValueError("rewards: missing")
        self.rewards = dict(rewards)
        self.weights = check_weights(list(self.rewards), weights)
        if combine is not None and weights is not None:
            raise ValueError("weights: got them beside combine, expected one of the two")
        self.combine = combine
        self.waits = all(reward.waits for reward in self.rewards.values())

    def __call__(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples."""
        inputs = as_inputs(inputs)
        return self._sum(len(inputs), score_all([(reward, inputs) for reward in self.rewards.values()]))

    async def score_async(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples by all components concurrently, without blocking the event loop.

        Args:
            inputs: The samples, in any form that `as_inputs` takes.

        Returns:
            Rewards, metrics and errors of the samples.
        """
        inputs = as_inputs(inputs)
        return self._sum(len(inputs), await score_all_async([(reward, inputs) for reward in self.rewards.values()]))

    def source(self) -> str | None:
        """Fingerprint the parts."""
        return join_fingerprints({name: reward.source() for name, reward in self.rewards.items()})

    def close(self) -> None:
        """Close every part."""
        for reward in self.rewards.values():
            reward.close()

    def _sum(self, n: int, results: Sequence[RewardResult]) -> RewardResult:
        places = range(n)
        combined = add_components(
            n,
            [
                ScoredComponent(name, places, [self.weights[name]] * n, scores)
                for name, scores in zip(self.rewards, results, strict=True)
            ],
        )
        if self.combine is not None and n:
            is_missing = [isnan(reward) for reward in combined.rewards]
            parts = read_scores(self.combine([scores.to_tensors()[0] for scores in results]), n)
            for i, (reward, metrics, error) in enumerate(parts):
                combined.rewards[i] = nan if is_missing[i] else reward
                for key, value in metrics.items():
                    combined.metrics.setdefault(key, [nan] * n)[i] = value
                if error is not None and not is_missing[i]:
                    combined.errors[i] = f"combine: {error}"
        return combined


def check_weights(names: Sequence[str], weights: Mapping[str, float] | Sequence[float] | None) -> dict[str, float]:
    """Return a weight for each name; 1 each by default.

    >>> check_weights(["a", "b"], [0.9, 0.1])
    {'a': 0.9, 'b': 0.1}
    >>> check_weights(["accuracy", "format"], {"acuracy": 1.0})
    Traceback (most recent call last):
        ...
    ValueError: weights: unknown component 'acuracy'; did you mean 'accuracy'? (accuracy, format)
    """
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if isinstance(weights, Mapping):
        unknown = next((name for name in weights if name not in names), None)
        if unknown is not None:
            raise ValueError(f"weights: unknown component {unknown!r}{suggest(unknown, list(names))}")
        missing = [name for name in names if name not in weights]
        if missing:
            raise ValueError(f"weights: missing for {missing[0]!r}, expected one for each of {', '.join(names)}")
        return {name: _check_weight(name, weights[name]) for name in names}
    if len(weights) != len(names):
        raise ValueError(f"weights: got {len(weights)}, expected {len(names)}, one for each of {', '.join(names)}")
    return {name: _check_weight(name, weight) for name, weight in zip(names, weights, strict=True)}


def _check_weight(name: str, value: float) -> float:
    return check_float(f"weight of {name!r}", value, -1e12, 1e12)


class Recipe(Reward):
    """Reward with components per label: {label: [(type, key, weight), ...]}, LightRFT's `reward_recipe`.

    - ("model", key, weight): the model named `key` in `models`.
    - ("rule", key, weight), ("function", key, weight): the function named `key`.
    - (name, None, weight) or (name, weight): the function of that name, as LightRFT's `("gsm8k_rule", None, 1.0)`.

    A component is called only for the samples whose label needs it, once for each, and its score is kept as a metric
    under its name. With a weight of 0 it is only a metric. Labels and components are checked before anything runs.

    Args:
        recipe: Components by label.
        functions: Functions by name, anything that `as_reward` takes, in addition to the built-in ones
            (`rollbook.rewards.BUILTIN_REWARDS`).
        models: Models by name, or a list with `label_map`.
        label_map: LightRFT's `reward_fn_label_map`: index in `models` by key.
        model_options: Options of every model.
        options: Options of every function (`time_limit`, `pool`, `on_error`, ...).

    Raises:
        ValueError: The recipe is empty, or names an unknown function or model.

    >>> recipe = Recipe(
    ...     {"gsm8k": [("numeric_match", None, 0.9), ("format", None, 0.1)], "chat": [("format", 1.0)]},
    ...     functions={"format": lambda response: float(response.endswith("."))},
    ... )
    >>> scores = recipe([
    ...     RewardInput(prompt="", response="It is 5.", reference="5", label="gsm8k"),
    ...     RewardInput(prompt="", response="Hello", label="chat"),
    ... ])
    >>> scores.rewards, scores.metrics
    ([1.0, 0.0], {'numeric_match': [1.0, nan], 'format': [1.0, 0.0]})
    >>> recipe([RewardInput(prompt="", response="5", label="gsm8")])
    Traceback (most recent call last):
        ...
    ValueError: label: got 'gsm8' (sample 0), which the recipe does not have; did you mean 'gsm8k'? (gsm8k, chat)
    """

    def __init__(
        self,
        recipe: Mapping[Any, Sequence[Sequence[Any]]],
        *,
        functions: Mapping[str, Any] | None = None,
        models: Mapping[str, Any] | Sequence[Any] | None = None,
        label_map: Mapping[str, int] | None = None,
        model_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:

        rules = ChainMap(dict(functions or {}), BUILTIN_REWARDS)  # type: ignore[arg-type]
        by_key = _models_by_key(models, label_map)
        self.components: dict[str, Reward] = {}
        self.recipe: dict[Any, list[tuple[str, float]]] = {}
        kinds: dict[str, str] = {}
        if not isinstance(recipe, Mapping) or not recipe:
            raise ValueError(f"recipe: got {type(recipe).__name__}, expected {{label: [(type, key, weight), ...]}}")
        for label, lines in recipe.items():
            self.recipe[label] = []
            for line in lines:
                kind, name, weight = check_line(label, line)
                source: Mapping[str, Any] = by_key if kind == "model" else rules
                if name not in source:
                    argument = "models" if kind == "model" else "functions"
                    raise ValueError(
                        f"recipe[{label!r}]: got {kind} {name!r}, expected one of the {argument}"
                        f"{suggest(name, list(source))}"
                    )
                if kinds.setdefault(name, kind) != kind:
                    raise ValueError(f"recipe[{label!r}]: got {name!r} as a model and a function, expected two names")
                if name not in self.components:
                    part_options = dict(model_options or {}) if kind == "model" else options
                    component = source[name]
                    self.components[name] = component if is_reward(component) else as_reward(component, **part_options)
                self.recipe[label].append((name, weight))
            if not self.recipe[label]:
                raise ValueError(f"recipe[{label!r}]: got no components, expected at least one")

    def __call__(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples, each by the components of its label."""
        inputs = as_inputs(inputs)
        plan = self._plan(inputs)
        return self._combine(inputs, plan, score_all(self._jobs(inputs, plan)))

    async def score_async(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples by all components concurrently, without blocking the event loop.

        Args:
            inputs: The samples, in any form that `as_inputs` takes.

        Returns:
            Rewards, metrics and errors of the samples.
        """
        inputs = as_inputs(inputs)
        plan = self._plan(inputs)
        return self._combine(inputs, plan, await score_all_async(self._jobs(inputs, plan)))

    def source(self) -> str | None:
        """Fingerprint the components."""
        return join_fingerprints({name: reward.source() for name, reward in self.components.items()})

    def close(self) -> None:
        """Close every component."""
        for reward in self.components.values():
            reward.close()

    def _plan(self, inputs: Sequence[RewardInput]) -> dict[str, dict[int, float]]:
        """Return the samples of each component with their weights. Weights of a component named twice are added."""
        plan: dict[str, dict[int, float]] = {}
        for i, scored in enumerate(inputs):
            check_label(scored, i, self.recipe)
            for name, weight in self.recipe[scored.label]:
                weights = plan.setdefault(name, {})
                weights[i] = weights.get(i, 0.0) + weight
        return plan

    def _jobs(
        self, inputs: Sequence[RewardInput], plan: Mapping[str, dict[int, float]]
    ) -> list[tuple[Reward, list[RewardInput]]]:
        return [(self.components[name], [inputs[i] for i in weights]) for name, weights in plan.items()]

    def _combine(
        self, inputs: Sequence[RewardInput], plan: Mapping[str, dict[int, float]], results: Sequence[RewardResult]
    ) -> RewardResult:
        parts = zip(plan.items(), results, strict=True)
        combined = add_components(
            len(inputs), [ScoredComponent(n, list(w), list(w.values()), scores) for (n, w), scores in parts]
        )
        for name in self.components:  # the same metrics for all labels
            combined.metrics.setdefault(name, [nan] * len(inputs))
        return combined


def check_label(scored: RewardInput, index: int, recipe: Mapping[Any, Any]) -> None:
    """Raise `ValueError` for a label that a recipe does not have."""
    try:
        has_label = scored.label in recipe
    except TypeError:
        has_label = False
    if not has_label:
        spot = locate(scored, index)
        raise ValueError(
            f"label: got {scored.label!r} ({spot}), which the recipe does not have"
            f"{suggest(scored.label, [*map(str, recipe)])}"
        )


def check_line(label: Hashable, line: Sequence[Any]) -> tuple[str, str, float]:
    """Return kind, name and weight of a component of a recipe."""
    if isinstance(line, (str, bytes)) or not isinstance(line, Sequence) or len(line) not in (2, 3):
        raise ValueError(f"recipe[{label!r}]: got {line!r}, expected (type, key, weight) or (name, weight)")
    kind, key, weight = line if len(line) == 3 else (line[0], None, line[1])
    weight = check_float(f"recipe[{label!r}]: weight of {kind!r}", weight, -1e12, 1e12)
    if kind == "model":
        if key is None:
            raise ValueError(f"recipe[{label!r}]: got a model without a key, expected ('model', key, weight)")
        return "model", str(key), weight
    if kind in ("rule", "function") and key is not None:
        return "function", str(key), weight
    if key is not None:
        raise ValueError(
            f"recipe[{label!r}]: got type {kind!r} with key {key!r}, expected 'model', 'rule' or 'function'"
        )
    return "function", str(kind), weight


def _models_by_key(
    models: Mapping[str, Any] | Sequence[Any] | None, label_map: Mapping[str, int] | None
) -> dict[str, Any]:
    if isinstance(models, Mapping) or not models:
        if label_map and not models:
            key = next(iter(label_map))
            raise ValueError(f"label_map: got {key!r} -> {label_map[key]}, expected models: there are none")
        return dict(models or {})
    if label_map is None:
        raise ValueError("models: got a list, expected a mapping by name, or label_map (name -> index) beside the list")
    for key, index in label_map.items():
        if not isinstance(index, int) or not 0 <= index < len(models):
            raise ValueError(f"label_map[{key!r}]: got {index!r}, expected an index below {len(models)}")
    return {str(key): models[index] for key, index in label_map.items()}


_MODULES = {
    "exact_match": "answers",
    "numeric_match": "answers",
    "boxed_match": "answers",
    "think_boxed_format": "answers",
    "think_answer_format": "answers",
    "gsm8k": "answers",
    "math_match": "answers",
    "code_match": "sandbox",
    "json_match": "answers",
    "json_schema": "answers",
    "length": "answers",
    "repetition": "answers",
}
_PACKAGES = {"math_match": ("math_verify", "math-verify", "math"), "json_schema": ("jsonschema", "jsonschema", "json")}
"""Module, package and extra that a built-in reward needs."""


class _Builtins(Mapping[str, Callable[..., Any]]):
    """The built-in reward functions by name, loaded on first use."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        _check_package(name)
        module = importlib.import_module(f"rollbook.rewards.{_MODULES[name]}")
        function: Callable[..., Any] = getattr(module, name)
        return function

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


BUILTIN_REWARDS: Mapping[str, Callable[..., Any]] = _Builtins()
"""The built-in reward functions by name."""


def as_reward(spec: RewardLike, **options: Any) -> Reward:
    """Build a reward.

    Args:
        spec: One of

            - a function, sync, async or batched, or the name of a built-in one (`rollbook.rewards.BUILTIN_REWARDS`):
              `FunctionReward`;
            - `"module:function"`, `"file.py"` (its `reward_func`) or `"file.py:function"`: the same;
            - a torch module, or the path of a folder with a `config.json`: `ModelReward`;
            - `"http://..."`: `RemoteReward`;
            - {label: [(type, key, weight), ...]}: `Recipe`;
            - a list of these, or a mapping from names to these: their weighted sum, `CombinedReward` (`names`,
              `weights`, `combine`); a list of URLs with `replicas=True` is one reward behind several servers;
            - a `Reward`, which is returned unchanged.
        options: Options of the class and, for a function, its own parameters that are not fields of a sample; in a list,
            each goes to the parts that take it. A `time_limit` that the function has itself (`math_match`, `code_match`)
            is the function's: the call then has 10 s more, and at least the usual 60.

    Returns:
        A callable that maps a list of `RewardInput` to a `RewardResult`.

    Raises:
        ValueError: The reward or an option is unknown, or options do not apply to it.

    >>> from rollbook.rewards import RewardInput
    >>> sample = RewardInput(prompt="2 + 2 =", response="It is 4.", reference="4")
    >>> as_reward(["numeric_match", lambda response: len(response)], names=["right", "length"])([sample]).metrics
    {'right': [1.0], 'length': [8.0]}
    >>> as_reward("length", unit="words", target=2, per_unit=0.5)([sample]).rewards
    [-0.5]
    >>> as_reward("numeric_mach")
    Traceback (most recent call last):
        ...
    ValueError: reward: got 'numeric_mach', expected a URL, a .py file, 'module:function', a model's folder or a built-in function; did you mean 'numeric_match'? (exact_match, numeric_match, boxed_match, think_boxed_format, think_answer_format, gsm8k, math_match, code_match, json_match, json_schema, length, repetition)
    """  # noqa: E501
    if is_reward(spec):
        if options:
            raise ValueError(f"reward: option {next(iter(options))!r} cannot be combined with a {type(spec).__name__}")
        return spec
    if isinstance(spec, (list, tuple)):
        return _combine(list(spec), options)
    if isinstance(spec, Mapping) and not any(_is_component_list(value) for value in spec.values()):
        return _combine(list(spec.values()), {"names": [str(name) for name in spec], **options})
    kind, source = _reward_class(spec)
    names = list(dict.fromkeys([*_options(kind), *_parameters(source)]))
    unknown = next((name for name in options if name not in names), None)
    if unknown is not None and not _takes_any_option(kind):
        hint = suggest(_SYNONYMS.get(unknown, unknown), names)
        raise ValueError(f"reward: option {unknown!r} is not one of {kind.__name__}{hint}")
    return _build(kind, source, options)


def _reward_class(spec: RewardLike) -> tuple[Callable[..., Reward], Any]:
    """Return the class of a reward, and its first argument."""
    if isinstance(spec, (str, Path)):
        return _reward_class_of_text(str(spec))
    if _is_module(spec) or _is_config(spec):
        from rollbook.rewards.models import ModelReward

        return ModelReward, spec
    if isinstance(spec, Mapping):
        return Recipe, spec
    if callable(spec):
        return FunctionReward, spec
    kind = "None" if spec is None else type(spec).__name__
    raise ValueError(f"reward: got {kind}, expected a function, a model, a URL, a file, a recipe or a list of these")


def _is_module(spec: RewardLike) -> bool:
    torch = sys.modules.get("torch")  # loaded already if the argument is a module
    return torch is not None and isinstance(spec, torch.nn.Module)


def _is_config(spec: RewardLike) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(spec, transformers.PretrainedConfig)


def _is_component_list(value: RewardLike | Sequence[Sequence[Any]]) -> bool:
    """Return whether a value is a list of components of a recipe."""
    return isinstance(value, (list, tuple)) and all(isinstance(line, (list, tuple)) for line in value)


def _is_url(spec: RewardLike) -> bool:
    return isinstance(spec, str) and spec.startswith(("http://", "https://"))


def _options(kind: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(kind).parameters.values() if p.kind is p.KEYWORD_ONLY]


_SYNONYMS = {"timeout": "time_limit", "time_limit": "timeout"}
"""Names of the same option in functions and servers."""


def _parameters(source: RewardLike) -> list[str]:
    """Return the options of a function: its parameters that are not fields of a sample."""
    if not callable(source) or _is_module(source):
        return []
    try:
        function = source.load_unbound() if isinstance(source, FileFunction) else source
        arguments = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []
    named = [p.name for p in arguments if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in named if name not in PARAMETER_NAMES]


def _build(kind: Callable[..., Reward], source: Any, options: Mapping[str, Any]) -> Reward:
    """Build a reward of this class, with the options of a function bound to it."""
    rest = dict(options)
    bound = {name: rest.pop(name) for name in _parameters(source) if name in rest}
    both = [name for name in bound if name in _options(kind)]
    for name in both:
        if name != "time_limit":
            fixed = f"functools.partial({function_name(source)}, {name}=...) for the function's"
            raise ValueError(f"reward: option {name!r} is one of {kind.__name__} and of the function, expected {fixed}")
        if bound[name] is None:
            rest[name] = bound.pop(name)  # only the limit of the call may be None
        else:
            rest[name] = max(60.0, check_float(name, bound[name], 1e-3, 1e9) + 10.0)
    if isinstance(source, FileFunction):
        source = replace(source, options={**source.options, **bound})
    elif bound:
        source = partial(source, **bound)
    return kind(source, **rest)


def _takes_any_option(kind: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(kind).parameters.values())


def _reward_class_of_text(text: str) -> tuple[Callable[..., Reward], Any]:
    if _is_url(text):
        return RemoteReward, text
    path, _, name = text.rpartition(":")
    if text.endswith(".py"):
        return FunctionReward, FileFunction(text)
    if path.endswith(".py"):
        return FunctionReward, FileFunction(path, name)
    if text in BUILTIN_REWARDS:
        return FunctionReward, BUILTIN_REWARDS[text]
    if (Path(text) / "config.json").is_file():
        from rollbook.rewards.models import ModelReward

        return ModelReward, text
    if path and name.isidentifier() and all(part.isidentifier() for part in path.split(".")):
        module = importlib.import_module(path)
        if not callable(vars(module).get(name)):
            functions = [function for function, value in vars(module).items() if inspect.isfunction(value)]
            raise ValueError(f"reward: module {path!r} has no function {name!r}{suggest(name, functions)}")
        return _reward_class(vars(module)[name])
    expected = "a URL, a .py file, 'module:function', a model's folder or a built-in function"
    raise ValueError(f"reward: got {text!r}, expected {expected}{suggest(text, list(BUILTIN_REWARDS))}")


def _check_package(name: str) -> None:
    """Raise `MissingExtraError` if the package of a built-in function is not installed."""
    module, package, extra = _PACKAGES.get(name, (None, "", ""))
    if module is not None and importlib.util.find_spec(module) is None:
        raise MissingExtraError(f"{name} needs {package}: install the extra {extra!r} of Rollbook")


def _combine(specs: list[Any], options: Mapping[str, Any]) -> Reward:
    if not specs:
        raise ValueError("reward: got an empty list, expected at least one reward")
    bound = {name: options[name] for name in ("names", "weights", "combine") if name in options}
    rest = {name: value for name, value in options.items() if name not in bound}
    if rest.pop("replicas", False):
        if bound or not all(map(_is_url, specs)):
            raise ValueError("replicas: got True, expected a list of URLs, and neither names, weights nor combine")
        return RemoteReward(specs, **rest)
    used: set[str] = set()
    parts = [_build_part(spec, rest, used) for spec in specs]
    unused = next((name for name in rest if name not in used), None)
    if unused is not None:
        raise ValueError(f"reward: option {unused!r} is not one of any reward of the list")
    if len(parts) == 1 and not bound:
        return parts[0]
    names = bound.pop("names", None) or _part_names(specs)
    if len(names) != len(parts) or len(set(names)) != len(names):
        raise ValueError(f"names: got {list(names)}, expected {len(parts)} distinct names, one for each reward")
    return CombinedReward(dict(zip(names, parts, strict=True)), **bound)


def _build_part(spec: RewardLike, options: Mapping[str, Any], used: set[str]) -> Reward:
    """Build a reward of a list with those options that it takes."""
    if is_reward(spec) or isinstance(spec, (list, tuple)):
        return as_reward(spec)
    kind, source = _reward_class(spec)
    names = {*_options(kind), *_parameters(source)}
    accepted = {name: value for name, value in options.items() if name in names}
    used.update(accepted)
    return _build(kind, source, accepted)


def _part_names(specs: Sequence[Any]) -> list[str]:
    """Return distinct names for the rewards of a list; duplicates get a number."""
    names = [_part_name(spec) for spec in specs]
    return [name if names.count(name) == 1 else f"{name}{names[:i].count(name)}" for i, name in enumerate(names)]


def _part_name(spec: RewardLike) -> str:
    if _is_url(spec):
        return "remote"
    if isinstance(spec, (str, Path)):
        return Path(str(spec).rpartition(":")[2]).stem
    name = function_name(spec)  # type: ignore[arg-type]
    return "reward" if name == "<lambda>" else name
