"""A registry of functions by name; their signatures are the one place where inputs, options and defaults stand.

Invariant: a name is registered once, every option has a default, and an option or a name that is not known is refused
with the nearest one that is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from rollbook.core.checks import suggest
from rollbook.core.errors import RollbookError

Function = TypeVar("Function", bound=Callable[..., Any])


class UnknownNameError(RollbookError, ValueError, KeyError):
    """A name that is in no registry: bad input to whoever gave it, a key that is not there to a mapping."""

    __str__ = ValueError.__str__  # a KeyError would show its text in quotes


@dataclass(frozen=True)
class Entry:
    """One function under its name.

    >>> entry = Entry("twice", lambda x, y=None, *, by=2: x * by, (), "arithmetic")
    >>> entry.inputs, entry.options, entry.call({"x": 3}, {"by": 4})
    ({'x': True, 'y': False}, {'by': 2}, 12)
    """

    name: str
    function: Callable[..., Any]
    aliases: tuple[str, ...]
    source: str
    """Where the formula stands: the paper and its equation."""

    @cached_property
    def inputs(self) -> dict[str, bool]:
        """The data it takes, by name, and whether it must be given."""
        found = inspect.signature(self.function).parameters.values()
        return {p.name: p.default is p.empty for p in found if p.kind is not p.KEYWORD_ONLY}

    @cached_property
    def options(self) -> dict[str, Any]:
        """Its options and their defaults."""
        found = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY}

    @property
    def summary(self) -> str:
        """The first paragraph of its documentation."""
        return (inspect.getdoc(self.function) or "").split("\n\n")[0].replace("\n", " ")

    def call(self, data: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Call it with the inputs it takes, out of `data`, and with options, all of which it must know.

        An input that it can do without is left out where `data` has none, or `None`.
        """
        known = self.options
        for name in options:
            if name not in known:
                raise ValueError(f"{self.name}: option {name!r} is none of its options{suggest(name, known)}")
        for name in data:
            if name in known:
                raise ValueError(f"{self.name}: got {name!r} among the data, expected it as an option: {name}=...")
        given = {}
        for name, required in self.inputs.items():
            value = data.get(name)
            if value is not None:
                given[name] = value
            elif required:
                raise ValueError(f"{self.name}: got no {name!r}, which it needs")
        return self.function(**given, **options)


class Registry(Mapping[str, Entry]):
    """Entries by name and alias.

    >>> shapes = Registry("shape")
    >>> @shapes.register("square", "box", source="Euclid, book I, definition 22")
    ... def square(side, *, scale=1.0):
    ...     '''A square's area.'''
    ...     return (side * scale) ** 2
    >>> shapes.call("box", {"side": 3.0}, scale=2.0)
    36.0
    >>> shapes.call("box", {"sides": 3.0})
    Traceback (most recent call last):
        ...
    ValueError: square: got 'sides' among the data, which is no input here; did you mean 'side'? (side)
    >>> shapes["square"].options
    {'scale': 1.0}
    >>> shapes.call("square", {"side": 3.0}, scael=2.0)
    Traceback (most recent call last):
        ...
    ValueError: square: option 'scael' is none of its options; did you mean 'scale'? (scale)
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, *aliases: str, source: str) -> Callable[[Function], Function]:
        """A decorator that puts a function under a name and its aliases; users may add their own."""

        def put(function: Function) -> Function:
            for option in inspect.signature(function).parameters.values():
                if option.kind is option.KEYWORD_ONLY and option.default is option.empty:
                    raise ValueError(f"{self.kind} {name!r}: option {option.name!r} has no default")
                if option.kind in (option.VAR_KEYWORD, option.VAR_POSITIONAL):
                    raise ValueError(f"{self.kind} {name!r}: takes {option}, expected named inputs and options")
            taken = next((each for each in (name, *aliases) if each in self._entries), None)
            if taken is not None:
                raise ValueError(f"{self.kind} {taken!r} is registered already")
            entry = Entry(name, function, aliases, source)
            self._entries |= dict.fromkeys((name, *aliases), entry)
            return function

        return put

    def withdraw(self, name: str) -> None:
        """Take a function out again, under all its names."""
        entry = self[name]
        for each in (entry.name, *entry.aliases):
            del self._entries[each]

    def call(self, name: str, data: Mapping[str, Any], **options: Any) -> Any:
        """Call the function called `name` with what it takes out of `data`; what none of the functions here takes is
        refused, since it is a mistake: a mask under another name would be no mask."""
        entry = self[name]
        if not isinstance(data, Mapping):
            raise ValueError(f"{entry.name}: got {type(data).__name__}, expected its inputs by name")
        known = {need for each in self._entries.values() for need in each.inputs}
        odd = next((given for given in data if given not in known and given not in entry.options), None)
        if odd is not None:
            raise ValueError(
                f"{entry.name}: got {odd!r} among the data, which is no input here{suggest(odd, sorted(known))}"
            )
        return entry.call(data, options)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self.names())})"

    def names(self) -> list[str]:
        """Every name, without aliases, in the order of registration."""
        return [name for name, entry in self._entries.items() if entry.name == name]

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            raise UnknownNameError(
                f"{self.kind}: got {name!r}, expected one of its names{suggest(name, self._entries)}"
            )
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


ESTIMATORS = Registry("advantage estimator")
"""Every estimator by name: `ESTIMATORS["grpo"].options` are its options and defaults."""


LOSSES = Registry("loss")
"""Every loss by name: `LOSSES["ppo"].options` are its options and defaults; `LOSSES.call("ppo", data)` calls it."""
