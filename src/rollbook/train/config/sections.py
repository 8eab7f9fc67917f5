"""Dataclasses as sections of a configuration: fields as keys, and back to plain values.

Invariant: what a key is follows from the field alone: its annotation, its default, its limits and the string under it.
The library's own dataclasses (`AlgorithmConfig`, `Optimizing`) are sections as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from rollbook.train.config.kinds import ConfigError, Key, Nullable, Section, Text, docs_of, kind_of, section_in

if TYPE_CHECKING:
    from rollbook.train.algorithm import AlgorithmConfig


def key(
    default: Any,
    *,
    free: bool = False,
    anew: tuple[str, ...] = (),
    whole: str = "",
    path: bool = False,
    **limits: Any,
) -> Any:
    """A field with its default and limits: `low`, `high`, `above`, `below`, `whole_from` of numbers, `choices`,
    `pattern`, `what` of texts, `names` of mappings. `free`, `anew`, `whole` and `path` are those of `Key`."""
    told = {"limits": limits, "free": free, "anew": anew, "whole": whole, "path": path}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=told)
    return field(default=default, metadata=told)


def checked(self: Any) -> None:
    """Read every field of a section by its kind, and put what was read in its place."""
    for name, one in section_of(type(self)).keys.items():
        try:
            value = one.kind.read(getattr(self, name))
        except ConfigError as error:
            raise error.under(name) from None
        object.__setattr__(self, name, value)


def section_of(cls: type) -> Section:
    """A dataclass as a section: its keys by name."""
    return _section_of(cls)


@functools.cache
def _section_of(cls: type) -> Section:
    # These load torch: when a configuration is made, not when its modules are imported.
    from rollbook.train.algorithm import PRESET_NAMES, AlgorithmConfig
    from rollbook.train.optimizer import Optimizing

    names = {"AlgorithmConfig": AlgorithmConfig, "Optimizing": Optimizing}
    hints, docs = typing.get_type_hints(cls, localns=names), docs_of(cls)
    keys = {}
    if cls is AlgorithmConfig:
        doc = "The algorithm to begin from; null: one's own, of its parts."
        keys["preset"] = Key("preset", Nullable(Text(choices=tuple(PRESET_NAMES))), "grpo", doc, anew=("*",))
    for one in dataclasses.fields(cls):
        told = one.metadata
        default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
        keys[one.name] = Key(
            one.name,
            kind_of(hints[one.name], told.get("limits", {}), section_of),
            list(default) if isinstance(default, tuple) else default,
            docs.get(one.name, ""),
            told.get("free", False),
            told.get("anew", _ANEW.get(one.name, ()) if cls is AlgorithmConfig else ()),
            told.get("whole", ""),
            told.get("path", False),
        )
    if cls is AlgorithmConfig:
        return Section(cls, keys, _algorithm, _of_algorithm, _preset, "preset")
    usual = {name: plain(one.default) for name, one in keys.items()}
    return Section(cls, keys, lambda given: cls(**given), vars, lambda values: usual, getattr(cls, "SHORT", ""))


_ANEW = {"loss": ("loss_options",), "estimator": ("estimator_options",)}


def _algorithm(given: dict[str, Any]) -> AlgorithmConfig:
    from rollbook.train.algorithm import AlgorithmConfig

    preset = given.pop("preset", "grpo")
    return AlgorithmConfig(**given) if preset is None else AlgorithmConfig.preset(preset, **given)


def _of_algorithm(one: AlgorithmConfig) -> dict[str, Any]:
    from rollbook.train.algorithm import PRESET_NAMES

    return {"preset": one.name if one.name in PRESET_NAMES else None, **one.to_dict()}


def _preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the preset that an algorithm's values begin from."""
    return _of_algorithm(_algorithm({"preset": values["preset"]})) | {"preset": "grpo"}


def plain(value: Any) -> Any:
    """A section as plain values: text, numbers, lists, mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        section = section_of(type(value))
        parts = section.parts(value)
        return {name: plain(parts[name]) for name in section.keys}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def leaves(config: Any) -> Iterator[tuple[str, Any, bool]]:
    """(path, plain value, whether it may change) of every key, mappings and lists of sections taken apart."""

    def walk(path: str, value: Any, section: Section | None, free: bool) -> Iterator[tuple[str, Any, bool]]:
        if isinstance(value, Mapping) and value:
            for name, each in value.items():
                known = section.keys[name] if section is not None else None
                inner = section_in(known.kind) if known is not None else None
                mine = free or (known is not None and known.free)
                yield from walk(f"{path}.{name}" if path else name, each, inner, mine)
        elif isinstance(value, list) and section is not None:
            for i, each in enumerate(value):
                yield from walk(f"{path}.{i}", each, section, free)
        else:
            yield path, value, free

    yield from walk("", plain(config), section_of(type(config)), False)
