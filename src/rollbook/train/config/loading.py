"""From files, recipes and `section.key=value` arguments to one checked `Config`.

Invariant: later layers win key by key (a file over its base, arguments over files), lists are replaced whole, and every
error says which file and line, or argument, it comes from. Naming another source (`model.path` over a base's
`model.builder`, another `algorithm.preset`) also drops what the base said about the old one; `data.path` as an
argument keeps the file's `data.columns`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollbook.core.files import check_regular
from rollbook.train.config.kinds import ConfigError, Kind, Listing, Nullable, Section, Table, Text, section_in
from rollbook.train.config.reading import Document, Place, argument, read_file
from rollbook.train.config.schema import Config
from rollbook.train.config.sections import section_of

DEFAULT = "letters"
"""The recipe that is run where none is named."""
ARGUMENTS = "the command line"
RECIPES = Path(__file__).parent.parent / "recipes"
_ENDINGS = (".yaml", ".yml", ".toml")
_LAYOUT = ("columns", "keep")
"""Keys of `data` that say what a file looks like: another file from the command line has the same layout."""


def recipes() -> dict[str, Path]:
    """The embedded recipes by name."""
    found = sorted(RECIPES.iterdir()) if RECIPES.is_dir() else []
    return {path.stem: path for path in found if path.suffix in _ENDINGS}


def effective(config: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The whole configuration of a file, or of a recipe by its name, with `section.key=value` changes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "my.toml")
    ...     _ = file.write_text('[optimizer]\\nlr = 1e-4')
    ...     found = effective(file, ["optimizer.warmup=5", "algorithm=rloo"])
    >>> found.optimizer.lr, found.optimizer.warmup, found.algorithm.estimator
    (0.0001, 5, 'rloo')
    """
    given = _with_bases(_find(DEFAULT if config is None else config, None), [])
    given = merged(given, overriding(overrides), arguments=True)
    try:
        return Config.of(given.values)
    except ConfigError as error:
        raise error.at(_origin(error.path, given.origins)) from None


def _find(name: str | Path, beside: Path | None) -> Path:
    """The file that a name stands for: a path (relative to the folder `beside`), else a recipe's name."""
    path = Path(name).expanduser() if beside is None else beside / Path(name).expanduser()
    check_regular(path)
    if path.suffix in _ENDINGS or path.is_file():
        if not path.is_file():
            raise ConfigError(str(path), "there is no such file")
        return path
    known = recipes()
    if str(name) not in known:
        from rollbook.core.checks import suggest

        raise ConfigError(str(name), f"is neither a file nor a recipe{suggest(str(name), list(known))}")
    return known[str(name)]


def _with_bases(path: Path, below: list[Path]) -> Document:
    """A file over its base, and that over its own."""
    if path.resolve() in below:
        raise ConfigError("base", f"goes round in a circle: {' <- '.join(each.name for each in [*below, path])}")
    document = read_file(path, f"recipe {path.stem}" if path.parent == RECIPES else None)
    if path.parent != RECIPES:
        document.values = _beside_file(document.values, section_of(Config), path.parent)
    base = document.values.pop("base", None)
    if base is None:
        return merged(Document({}), document)
    source = _origin("base", document.origins)
    if not isinstance(base, str):
        raise ConfigError("base", f"got {base!r}, expected a file, relative to this one, or a recipe's name", source)
    try:
        under = _find(base, path.parent)
    except ConfigError as error:
        raise ConfigError("base", f"{error.path} {error.said}", source) from None
    return merged(_with_bases(under, [*below, path.resolve()]), document)


def _beside_file(value: Any, kind: Kind | None, folder: Path) -> Any:
    """Make the paths of a file's values relative to its folder, if something is there.

    Other paths stay as they are, relative to the working directory: some are names on the hub, and the configuration
    kept with a run has paths from the command line.
    """
    section = section_in(kind) if kind is not None else None
    if isinstance(value, list):
        return [_beside_file(each, kind, folder) for each in value]
    if section is None:
        return value
    if isinstance(value, str) and section.short and section.keys[section.short].path:
        return _existing(value, folder)
    if not isinstance(value, Mapping):
        return value
    anchored = dict(value)
    for name, each in value.items():
        key = section.keys.get(name)
        if key is not None and key.path and isinstance(each, str):
            anchored[name] = _existing(each, folder)
        elif key is not None:
            anchored[name] = _beside_file(each, key.kind, folder)
    return anchored


def _existing(text: str, folder: Path) -> str:
    """A path, or `file.py:function`, joined to a folder if the file is in it."""
    file, ending, function = text.partition(".py:")
    path = Path(file + ending.removesuffix(":"))
    if path.is_absolute() or not (folder / path).exists():
        return text
    return os.path.normpath(folder / path) + (f":{function}" if ending else "")


def overriding(arguments: Sequence[str]) -> Document:
    """`section.key=value` arguments as one layer; of two for the same key the later one counts.

    A key of text takes the value as it stands; others take numbers, true, false, null, [lists] and {mappings}.

    >>> overriding(["algorithm=ppo", "algorithm.n=2"]).values
    {'algorithm': {'preset': 'ppo', 'n': 2}}
    >>> overriding(["name=2026", "steps=20", "sampling.stop=[END]", "rewards.0.weight=2"]).values
    {'name': '2026', 'steps': 20, 'sampling': {'stop': ['END']}, 'rewards': {'0': {'weight': 2}}}
    """
    layer = Document({})
    for each in arguments:
        path, equals, text = each.partition("=")
        place = tuple(path.strip().split("."))
        if not equals or not all(place):
            raise ConfigError(each, "is no change, expected section.key=value", ARGUMENTS)
        if place == ("base",):
            raise ConfigError(path, "got it as a change, expected it in a file", ARGUMENTS)
        try:
            value = _typed(_kind_at(place), text)
        except ConfigError as error:
            raise ConfigError(path, error.said, ARGUMENTS) from None
        except ValueError as error:
            raise ConfigError(path, str(error), ARGUMENTS) from None
        inner = layer.values
        for at, part in enumerate(place[:-1]):
            if not isinstance(inner.get(part), dict):
                inner[part] = _opened(_kind_at(place[: at + 1]), inner.get(part))
            inner = inner[part]
        held, spread = inner.get(place[-1]), _opened(_kind_at(place), value) if isinstance(value, str) else {}
        # `data=x.jsonl` after `data.limit=5` is a key beside it: it does not matter which of the two is said first.
        inner[place[-1]] = {**held, **spread} if isinstance(held, dict) and spread else value
        layer.origins[place] = ARGUMENTS
    return layer


def _opened(kind: Kind | None, value: Any) -> dict[str, Any]:
    """What stands for a section, or for a list of one, as a mapping that more keys go into."""
    kind = kind.inner if isinstance(kind, Nullable) else kind
    if value is None:
        return {}
    if isinstance(kind, Listing):
        return {"0": _opened(kind.item, value)}
    made = kind.spread(value) if isinstance(kind, Section) else None
    return dict(made) if isinstance(made, Mapping) else {}


def _kind_at(place: Place) -> Kind | None:
    """The kind of the key at a place; `None` where there is none, or any plain value."""
    kind: Kind = section_of(Config)
    for part in place:
        kind = kind.inner if isinstance(kind, Nullable) else kind
        if isinstance(kind, Listing) and part.isdecimal():
            kind = kind.item
        elif isinstance(kind, Section) and part in kind.keys:
            kind = kind.keys[part].kind
        elif isinstance(kind, Table):
            kind = kind.item
        else:
            return None
    return kind


def _typed(kind: Kind | None, text: str) -> Any:
    inner = kind.inner if isinstance(kind, Nullable) else kind
    if isinstance(kind, Nullable) and text in ("null", "~", ""):
        return None
    words = isinstance(inner.item if isinstance(inner, Listing) else inner, Text)
    if words and text[:1] not in ("'", '"', "[" if isinstance(inner, Listing) else "'"):
        return text
    return argument(text)


# --- layers -----------------------------------------------------------------------------------------------------------


def merged(old: Document, new: Document, arguments: bool = False) -> Document:
    """One layer over another; `arguments`: the new one is from the command line."""
    try:
        values = _over(old.values, new.values, section_of(Config), arguments)
    except ConfigError as error:
        raise error.at(_origin(error.path, new.origins)) from None
    return Document(values, {**old.origins, **new.origins})


def _over(old: Any, new: Any, kind: Kind | None, arguments: bool = False) -> Any:
    """A value over another one: mappings key by key, anything else in its place."""
    section = section_in(kind) if kind is not None else None
    if section is not None and new is not None:
        old, new = section.spread(old), section.spread(new)
    lists = isinstance(kind.inner if isinstance(kind, Nullable) else kind, Listing)
    if lists and isinstance(new, Mapping) and new and all(str(name).isdecimal() for name in new):
        return _items(old, new, section)
    if not isinstance(new, Mapping) or not isinstance(old, Mapping) or lists:
        return new
    keys = section.keys if section is not None else {}
    made = dict(old)
    for name, value in new.items():
        key = keys.get(name)
        whole = key is not None and key.whole and isinstance(value, Mapping) and key.whole in value
        if whole:
            made.pop(name, None)
        if key is not None and value is not None and _is_another(old.get(name), value, bool(whole)):
            gone = old if "*" in key.anew else [each for each in key.anew if each != name]
            same_layout = arguments and old.get(name) is not None
            for each in gone:
                if not (same_layout and each in _LAYOUT):
                    made.pop(each, None)
        try:
            made[name] = _over(made.get(name), value, key.kind if key is not None else None, arguments)
        except ConfigError as error:
            raise error.under(name) from None
    # What this layer says itself was not dropped by it, in whatever order it says so.
    return {**made, **{name: made.get(name, new[name]) for name in new}}


def _is_another(old: Any, new: Any, whole: bool) -> bool:
    return whole or (old is None if isinstance(new, Mapping) else old != new)


def _items(old: Any, new: Mapping[str, Any], section: Section | None) -> Any:
    """Single items of a list changed, by their numbers."""
    items = [] if old is None else list(old) if isinstance(old, (list, tuple)) else [old]
    for name, value in sorted(new.items(), key=lambda each: int(each[0])):
        if int(name) > len(items):
            raise ConfigError(str(name), f"got item {name} of a list of {len(items)}, expected at most {len(items)}")
        before = items[int(name)] if int(name) < len(items) else None
        items[int(name) : int(name) + 1] = [_over(before, value, section)]
    return items


def _origin(path: str, origins: Mapping[Place, str]) -> str:
    """Where the key at a path was written: by an argument for a part of it, itself, or what holds it."""
    place = tuple(path.replace("[", ".").replace("]", "").split("."))
    if any(each[: len(place)] == place and source == ARGUMENTS for each, source in origins.items()):
        return ARGUMENTS
    found = (origins[place[:n]] for n in range(len(place), -1, -1) if place[:n] in origins)
    return next(found, "")
