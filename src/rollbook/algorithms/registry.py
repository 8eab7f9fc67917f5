"""Registries of estimators and losses by name. A function's signature defines its inputs, options and defaults.

Invariant: a name is registered once, every option has a default, and an unknown option or name is rejected with a
suggestion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from rollbook.core.checks import suggest
from rollbook.core.errors import RollbookError

if TYPE_CHECKING:
    import torch

    from rollbook.batch.plan import Denominators

__all__ = ["ESTIMATORS", "LOSSES", "Entry", "Estimator", "LossEntry", "LossRows", "Registry", "UnknownNameError"]

Function = TypeVar("Function", bound=Callable[..., Any])


class UnknownNameError(RollbookError, ValueError, KeyError):
    """Raised for an unknown name. A `ValueError` for callers, and a `KeyError` as `Mapping` requires."""

    __str__ = ValueError.__str__  # a KeyError would show its text in quotes


class LossRows(Protocol):
    """The rows of a training step, as `LossEntry.denominators` reads them."""

    @property
    def masks(self) -> Sequence[torch.Tensor]:
        """[B] The mask of each row."""

    @property
    def pairs(self) -> Sequence[str] | None:
        """[B] The pair of each row, for preference pairs."""

    @property
    def expert(self) -> Sequence[bool] | None:
        """[B] Whether a row is an expert's, for mixed data."""


@dataclass(frozen=True)
class Entry:
    """A registered function.

    Attributes:
        name: The name.
        function: The function. Its keyword-only parameters are options, all others are inputs.
        aliases: Other names.
        source: The paper and equation of the formula.
        supplied: Options that the caller computes, such as the trainer. The others are settings of a configuration.

    >>> entry = Entry("twice", lambda x, y=None, *, by=2: x * by, (), "arithmetic")
    >>> entry.inputs, entry.options, entry.call({"x": 3}, {"by": 4})
    ({'x': True, 'y': False}, {'by': 2}, 12)
    """

    name: str
    function: Callable[..., Any]
    aliases: tuple[str, ...]
    source: str
    supplied: tuple[str, ...] = ()

    @cached_property
    def inputs(self) -> dict[str, bool]:
        """Input names, and whether each is required."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default is p.empty for p in parameters if p.kind is not p.KEYWORD_ONLY}

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options and their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    @property
    def settings(self) -> dict[str, Any]:
        """Options that a configuration may set, and their defaults."""
        return {name: default for name, default in self.options.items() if name not in self.supplied}

    @property
    def summary(self) -> str:
        """First paragraph of the docstring."""
        return (inspect.getdoc(self.function) or "").split("\n\n")[0].replace("\n", " ")

    def call(self, data: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Call the function with its inputs out of `data`, and with options.

        Args:
            data: Inputs by name. Others are ignored; an optional one may be missing or `None`.
            options: Options of the function.

        Returns:
            What the function returns.

        Raises:
            ValueError: If an option is unknown or among the data, or a required input is missing.
        """
        accepted = self.options
        for name in options:
            if name not in accepted:
                raise ValueError(f"{self.name}: unknown option {name!r}{suggest(name, accepted)}")
        for name in data:
            if name in accepted:
                raise ValueError(f"{self.name}: got {name!r} as an input, expected it as an option: {name}=...")
        inputs = {}
        for name, required in self.inputs.items():
            value = data.get(name)
            if value is not None:
                inputs[name] = value
            elif required:
                raise ValueError(f"{self.name}: missing input {name!r}")
        return self.function(**inputs, **options)


@dataclass(frozen=True)
class Estimator(Entry):
    """An advantage estimator, and how the pipeline calls it.

    >>> entry = Estimator("best", lambda rewards, groups: rewards, (), "an example")
    >>> entry.scores, entry.kl_in_reward, entry.takes_token_rewards
    ('rows', True, False)
    """

    supplied: tuple[str, ...] = ("process_group",)
    scores: Literal["rows", "tokens"] | None = None
    """`rows`: it returns one score per row, which the pipeline spreads over tokens as returns. `tokens`: it places
    rewards on tokens itself. `None`: `rows` if it takes `rewards` and `groups` and no input per token."""
    kl_in_reward: bool | None = None
    """Whether a KL penalty per token can be subtracted from its rewards. `None`: if it scores rows or takes token
    rewards."""
    discounts: bool = True
    """Whether `gamma` discounts the scores of rows."""
    clips_rewards: bool = True
    """Whether `reward_clip` applies to it."""
    normalized: bool = False
    """Whether its scores have a standard deviation of 1 already and are not whitened again."""
    greedy_baseline: bool = False
    """Whether it needs the reward of each prompt's greedy response, in `info["reward_baseline"]`."""
    compares_runs: bool = False
    """Whether it compares the runs of a prompt by their rewards. A single run then carries no signal."""
    takes_rewards: bool = field(init=False)
    """Whether it reads the rewards of rows."""
    takes_token_rewards: bool = field(init=False)
    """Whether it reads the token rewards of records that have them, instead of the reward of the record."""

    def __post_init__(self) -> None:
        inputs = self.inputs
        if self.scores is None:
            per_token = any(name in inputs for name in _PER_TOKEN) or inputs.get("mask", False)
            rows = "rewards" in inputs and "groups" in inputs and not per_token
            object.__setattr__(self, "scores", "rows" if rows else "tokens")
        if self.kl_in_reward is None:
            object.__setattr__(self, "kl_in_reward", self.scores == "rows" or "token_rewards" in inputs)
        takes_token_rewards = self.scores == "tokens" and "token_rewards" in inputs and not self.compares_runs
        object.__setattr__(self, "takes_rewards", "rewards" in inputs)
        object.__setattr__(self, "takes_token_rewards", takes_token_rewards)


_PER_TOKEN = ("token_rewards", "old_logprobs", "step_rewards")
"""Inputs of estimators over tokens or steps."""


@dataclass(frozen=True)
class LossEntry(Entry):
    """A loss, its role, and the records it is computed from.

    >>> entry = LossEntry("margin", lambda new_logprobs, *, by=0.1, weights=None: new_logprobs, (), "an example")
    >>> entry.settings, entry.needs_reference({})
    ({'by': 0.1}, False)
    """

    supplied: tuple[str, ...] = ("denominators", "weights", "norm")
    role: Literal["policy", "critic", "regularizer"] = "policy"
    data: Literal["rollouts", "answers", "pairs", "mixed"] = "rollouts"
    """Own rollouts, demonstrations, preference pairs, or rollouts mixed with expert records."""
    denominators: Callable[[LossRows, Sequence[int]], int | tuple[Denominators, Denominators]] | None = None
    """Computes the denominators of a minibatch from the rows of the step and the row numbers of the minibatch. `None`:
    the token, sequence and sample counts of the mask."""
    needs_reference: Callable[[Mapping[str, Any]], bool] = lambda options: False
    """Whether the loss reads reference log-probs, given its options."""


EntryT = TypeVar("EntryT", bound=Entry)


class Registry(Mapping[str, EntryT], Generic[EntryT]):
    """Entries by name and alias.

    Args:
        kind: What the functions are, for error messages.
        entry: Class of the entries. `register` accepts its fields.

    >>> shapes = Registry("shape")
    >>> @shapes.register("square", "box", source="Euclid, book I, definition 22")
    ... def square(side, *, scale=1.0):
    ...     '''Compute the area of a square.'''
    ...     return (side * scale) ** 2
    >>> shapes.call("box", {"side": 3.0}, scale=2.0)
    36.0
    >>> shapes.call("box", {"sides": 3.0})
    Traceback (most recent call last):
        ...
    ValueError: square: unknown input 'sides'; did you mean 'side'? (side)
    >>> shapes["square"].options
    {'scale': 1.0}
    >>> shapes.call("square", {"side": 3.0}, scael=2.0)
    Traceback (most recent call last):
        ...
    ValueError: square: unknown option 'scael'; did you mean 'scale'? (scale)
    """

    def __init__(self, kind: str, entry: type[EntryT] = Entry) -> None:  # type: ignore[assignment]
        self.kind = kind
        self._entry = entry
        self._entries: dict[str, EntryT] = {}

    def register(self, name: str, *aliases: str, source: str, **declared: Any) -> Callable[[Function], Function]:
        """Register the decorated function under a name and its aliases.

        Args:
            name: The name.
            aliases: Other names for it.
            source: The paper and equation of the formula.
            declared: Fields of the registry's entry class.

        Returns:
            A decorator, which returns the function itself.

        Raises:
            ValueError: By the decorator, if a name is taken or an option has no default.
        """

        def decorate(function: Function) -> Function:
            for option in inspect.signature(function).parameters.values():
                if option.kind is option.KEYWORD_ONLY and option.default is option.empty:
                    raise ValueError(f"{self.kind} {name!r}: option {option.name!r} has no default")
                if option.kind in (option.VAR_KEYWORD, option.VAR_POSITIONAL):
                    raise ValueError(f"{self.kind} {name!r}: takes {option}, expected named inputs and options")
            taken = next((candidate for candidate in (name, *aliases) if candidate in self._entries), None)
            if taken is not None:
                raise ValueError(f"{self.kind} {taken!r} is registered already; `unregister` removes it")
            entry = self._entry(name, function, aliases, source, **declared)
            self._entries |= dict.fromkeys((name, *aliases), entry)
            return function

        return decorate

    def unregister(self, name: str) -> None:
        """Remove a function, under its name and all aliases.

        Args:
            name: Its name, or an alias.
        """
        entry = self[name]
        for key in (entry.name, *entry.aliases):
            del self._entries[key]

    def call(self, name: str, data: Mapping[str, Any], **options: Any) -> Any:
        """Call a function with its inputs out of `data`.

        An input that no function of the registry has is rejected: a misspelled mask would silently be no mask.

        Args:
            name: Name or alias of the function.
            data: Inputs by name. Inputs of other functions are ignored.
            options: Options of the function.

        Returns:
            What the function returns.

        Raises:
            ValueError: If a name is unknown, or a required input is missing.
        """
        entry = self[name]
        if not isinstance(data, Mapping):
            raise ValueError(f"{entry.name}: got {type(data).__name__}, expected its inputs by name")
        for argument in data:
            if argument not in entry.inputs and argument not in entry.options:
                inputs = {name for other in self._entries.values() for name in other.inputs}
                if argument not in inputs:
                    raise ValueError(f"{entry.name}: unknown input {argument!r}{suggest(argument, sorted(inputs))}")
        return entry.call(data, options)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self.names())})"

    def names(self) -> list[str]:
        """Return all names, without aliases, in the order of registration."""
        return [name for name, entry in self._entries.items() if entry.name == name]

    def __getitem__(self, name: str) -> EntryT:
        if name not in self._entries:
            raise UnknownNameError(f"{self.kind}: unknown name {name!r}{suggest(name, self._entries)}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


ESTIMATORS = Registry("advantage estimator", Estimator)
"""Advantage estimators by name. `ESTIMATORS["grpo"].options` has the options and defaults of GRPO."""


LOSSES = Registry("loss", LossEntry)
"""Losses by name. `LOSSES["ppo"].options` has the options and defaults of PPO; `LOSSES.call("ppo", data)` calls it."""
