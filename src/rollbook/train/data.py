"""`Prompts`: the rows of a task, in a seeded order, epoch after epoch, with a cursor.

Invariant: the row at each place of the endless sequence is a function of (rows, seed, place) alone, so that a whole
number is all there is to go on from; every row is given once in each epoch; within a step no id is given twice; and
what a cursor was not made for (other rows, another order) is refused.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollbook.core.checks import check_bool, check_float, check_int, suggest
from rollbook.core.ids import EID
from rollbook.core.sampling import Prompt
from rollbook.train.naming import resolve
from rollbook.train.prompt_rows import ANSWERS, Reader, Row
from rollbook.train.sources import Placed, read

log = logging.getLogger("rollbook.train")

Columns = Mapping[str, str | None]


class Prompts:
    """Rows of a task: mappings or `Prompt`s, or a function that gives them, called when they are first needed.

    A row has `prompt` (text, a chat or token ids) or `messages`; `reference`, `label`, `images`, `videos`, `tools`;
    `response`, or `chosen` and `rejected`, to learn from; what else it has goes to the prompt's `info`, and so do the
    answers. A chat that ends with the assistant's message is a prompt and its `response`. `columns` says under which
    names the data have these, `keep` which other columns are wanted (all, unless it is given).

    `take(n, step)` gives the next rows as prompts whose ids have the step for a batch and the row's number for a task.

    >>> prompts = Prompts([{"prompt": f"{i}+1=", "reference": i + 1} for i in range(3)], seed=1)
    >>> [(one.text, one.reference, one.eid.tid) for one in prompts.take(2, step=1)]
    [('2+1=', 3, '1/2'), ('1+1=', 2, '1/1')]
    >>> kept = prompts.state_dict()
    >>> [one.eid.tid for one in prompts.take(5, step=2)]  # into the third epoch: some rows come twice
    ['2/0', '2/1', '2/2', '2/0.1', '2/2.2']
    >>> prompts.load_state_dict(kept)
    >>> [one.eid.tid for one in prompts.take(5, step=2)]
    ['2/0', '2/1', '2/2', '2/0.1', '2/2.2']
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any] | Prompt] | Callable[[], Sequence[Mapping[str, Any] | Prompt]],
        *,
        seed: int = 0,
        shuffle: bool = True,
        name: str = "",
        columns: Columns | None = None,
        keep: Sequence[str] | None = None,
    ) -> None:
        reader = Reader(name or "rows", columns, keep)

        def placed() -> Placed:
            given = rows() if callable(rows) else rows
            if isinstance(given, (str, bytes, Mapping)) or not hasattr(given, "__iter__"):
                raise ValueError(f"{reader.name}: got {type(given).__name__}, expected a list of rows")
            return ((f"row {i}", row) for i, row in enumerate(given))

        self._set(lambda: _read(reader, placed()), seed, shuffle, name)
        if not callable(rows):
            len(self)  # whatever is wrong with them is found out here

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        split: str | None = None,
        subset: str | None = None,
        columns: Columns | None = None,
        keep: Sequence[str] | None = None,
        limit: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        name: str | None = None,
    ) -> Prompts:
        """The rows of a file (`.jsonl`, `.ndjson`, both also `.gz`, `.json`, `.parquet`), of a folder of such files of
        one kind, or of a Hugging Face dataset: a folder that it was saved to, or its name on the hub.

        `split` and `subset` are the dataset's. `limit`: the first so many rows. Paths of images and videos are relative
        to the file and must lie in its folder, links followed; a dataset of the hub holds its images itself. A `.json`
        file has a list, or JSON lines.
        """
        found = Path(path)
        folder = (found if found.is_dir() else found.parent) if found.exists() else None
        called = str(path) if name is None else name
        reader = Reader(called, columns, keep, folder, confined=True)
        placed = read(path, split=split, subset=subset, columns=reader.wanted)
        rows = _read(reader, placed, None if limit is None else check_int("limit", limit, 1))
        return cls._of(rows, seed, shuffle, called)

    @classmethod
    def from_function(
        cls,
        function: str | Callable[..., Any],
        options: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        name: str | None = None,
        columns: Columns | None = None,
        keep: Sequence[str] | None = None,
        **more: Any,
    ) -> Prompts:
        """The rows that a function returns; it is called with the options, when the rows are first needed.

        function: a callable, `"module:function"` or `"path/to/file.py:function"`. An option of the function that has
        the name of one here (`seed`) goes into `options`; the others can be given by themselves.

        >>> Prompts.from_function(lambda count: [{"prompt": str(i)} for i in range(count)], count=4)
        Prompts(4 rows of '<lambda>', epoch 0, seed 0)
        """
        made = resolve(function) if isinstance(function, str) else function
        called = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
        if not callable(made):
            raise ValueError(f"function: got {type(made).__name__} ({called}), expected one that returns rows")
        given = {**(options or {}), **more}
        _check_options(called, made, given)
        return cls(
            partial(made, **given),
            seed=seed,
            shuffle=shuffle,
            name=called if name is None else name,
            columns=columns,
            keep=keep,
        )

    @classmethod
    def _of(cls, rows: list[Row], seed: int, shuffle: bool, name: str) -> Prompts:
        made = cls.__new__(cls)
        made._set(lambda: rows, seed, shuffle, name)
        return made

    def _set(self, load: Callable[[], list[Row]], seed: int, shuffle: bool, name: str) -> None:
        self.name = name
        self.seed = check_int("seed", seed)
        self.shuffle = check_bool("shuffle", shuffle)
        self.cursor = 0
        """How many rows were given so far."""
        self._load = load
        self._step: int | str | None = None
        self._since = 0
        """Where the cursor was when this step's first row was taken."""
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    @cached_property
    def _rows(self) -> list[Row]:
        return self._load()

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        named = f" of {self.name!r}" if self.name else ""
        return f"Prompts({len(self)} rows{named}, epoch {self.epoch:g}, seed {self.seed})"

    @property
    def epoch(self) -> float:
        """How often the rows were gone through so far."""
        return self.cursor / len(self)

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that go by what the rows say and by their order. Of a picture's file its path alone counts."""
        made = hashlib.blake2b(digest_size=16)
        for row in self._rows:
            made.update(row.whole)
        return made.hexdigest()

    # --- what it gives ------------------------------------------------------------------------------------------------

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """[len] The places of the rows in an epoch: a function of seed and epoch, the same on every machine."""
        if self._order is None or self._order[0] != epoch:
            count = len(self)
            made = permutation(count, self.seed, epoch) if self.shuffle else np.arange(count)
            self._order = epoch, made
        return self._order[1]

    def take(self, n: int, step: int | str) -> list[Prompt]:
        """The next n rows, over as many epochs as that takes, with ids of this step; the cursor moves on.

        The task of an id is the row's number in the data; of a row that the step has already, in an earlier call too,
        it is `row.epoch`.
        """
        n = check_int("n", n)
        if step != self._step:
            self._step, self._since = step, self.cursor
        seen = {self._rows[self._at(place)].number for place in self._places(self._since, self.cursor)}
        taken = []
        for place in range(self.cursor, self.cursor + n):
            row = self._rows[self._at(place)]
            task: int | str = f"{row.number}.{place // len(self)}" if row.number in seen else row.number
            seen.add(row.number)
            taken.append(_prompt(row, step, task))
        self.cursor += n
        return taken

    def every(self, batch: int | str = "eval") -> list[Prompt]:
        """All rows, in the order of the data, with ids of this batch; the cursor stays."""
        return [_prompt(row, batch, row.number) for row in self._rows]

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, len(self))
        return int(self.order(epoch)[within])

    def _places(self, start: int, stop: int) -> range:
        """The places of a stretch that have all rows of it: a whole epoch has every one."""
        return range(max(start, stop - 2 * len(self)), stop)

    # --- parts of it --------------------------------------------------------------------------------------------------

    def split(self, size: int | float, seed: int = 0) -> tuple[Prompts, Prompts]:
        """(the rest, held out): `size` rows, or a share of them below 1, are held out.

        Rows that ask the same go to the same side, so that no more than `size` are held out, and sometimes a few less.
        Which they are goes by what they ask and by `seed`, not by their order, nor by the seed of the training. Both
        parts keep the rows' numbers.

        >>> rest, held_out = Prompts([{"prompt": str(i % 50)} for i in range(100)]).split(0.1)
        >>> len(rest), len(held_out), {one.text for one in rest.every()} & {one.text for one in held_out.every()}
        (90, 10, set())
        """
        share = isinstance(size, (float, np.floating))
        wanted = round(check_float("size", size, 0, 1) * len(self)) if share else check_int("size", size, 1)
        alike: dict[bytes, list[int]] = {}
        for i, row in enumerate(self._rows):
            alike.setdefault(row.content, []).append(i)
        salt = f"{check_int('seed', seed)}/".encode()
        held: set[int] = set()
        for content in sorted(alike, key=lambda each: hashlib.blake2b(salt + each, digest_size=16).digest()):
            if len(held) + len(alike[content]) <= wanted:
                held.update(alike[content])
        if not held or len(held) == len(self):
            raise ValueError(
                f"size: got {size!r}, holding out {len(held)} of {len(self)} rows ({len(alike)} different prompts), "
                "expected some on both sides"
            )
        parts = []
        for side, inside in (("rest", False), ("held out", True)):
            rows = [row for i, row in enumerate(self._rows) if (i in held) is inside]
            parts.append(self._of(rows, self.seed, self.shuffle, f"{self.name or 'rows'} ({side})"))
        return parts[0], parts[1]

    def require(self, *names: str) -> None:
        """Refuse data in which a row lacks one of these: before a run, rather than in the middle of it.

        >>> Prompts([{"prompt": "2+2=", "reference": 4}, {"prompt": "1+1="}]).require("reference")
        Traceback (most recent call last):
            ...
        ValueError: rows: row 1 has no 'reference', which is needed of every row
        """
        known = ("reference", "label", "images", *ANSWERS)
        for name in names:
            if name not in known:
                raise ValueError(f"require: got {name!r}, expected one of {', '.join(known)}")
            for row in self._rows:
                found = row.prompt.info.get(name) if name in ANSWERS else getattr(row.prompt, name)
                if found is None or (name == "images" and not found):
                    said = f"{self.name or 'rows'}: row {row.number}"
                    raise ValueError(f"{said} has no {name!r}, which is needed of every row")

    def shared(self, other: Prompts) -> int:
        """How many of these rows ask what a row of the others asks.

        >>> Prompts([{"prompt": "a"}, {"prompt": "b"}]).shared(Prompts([{"prompt": "b"}, {"prompt": "c"}]))
        1
        """
        known = {row.content for row in other._rows}
        return sum(row.content in known for row in self._rows)

    # --- going on -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What to go on from, in JSON's types: the cursor, and what it is a cursor of."""
        return {
            "cursor": self.cursor,
            "step": self._step,
            "since": self._since,
            "rows": len(self),
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; other rows, or another order, are refused: prompts would be skipped or come twice."""
        own = self.state_dict()
        odd = sorted(state.keys() ^ own.keys())
        if odd:
            raise ValueError(f"state: {odd[0]!r} is {'not ' if odd[0] in own else ''}there, expected {', '.join(own)}")
        if state["fingerprint"] != own["fingerprint"]:
            got, expected = (f"{each['rows']} rows ({str(each['fingerprint'])[:8]})" for each in (own, state))
            raise ValueError(
                f"data: got {got}{f' of {self.name!r}' if self.name else ''}, expected the {expected} that the run "
                "began with: give it the same data, or begin another run"
            )
        for name in ("seed", "shuffle"):
            if state[name] != own[name]:
                raise ValueError(
                    f"{name}: got {own[name]!r}, expected {state[name]!r}, as the run began: the order would be another"
                )
        cursor = check_int("state['cursor']", state["cursor"])
        since = check_int("state['since']", state["since"])
        if since > cursor:
            raise ValueError(f"state['since']: got {since}, expected at most the cursor ({cursor})")
        self.cursor, self._step, self._since = cursor, state["step"], since


def permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """[count] The numbers below count, in an order of (seed, epoch).

    Each has a key of 64 bits (SplitMix64, from a digest of both on), and they go by their keys: no generator of a
    library is asked, whose stream could be another in its next version.

    >>> permutation(5, seed=0, epoch=0).tolist(), permutation(5, seed=0, epoch=1).tolist()
    ([0, 1, 4, 2, 3], [2, 1, 0, 4, 3])
    """
    start = int.from_bytes(hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest(), "big")
    keys = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(keys ^ (keys >> np.uint64(31)), kind="stable")


def _prompt(row: Row, batch: int | str, task: int | str) -> Prompt:
    # `info` is the prompt's own: what a reward writes into it is not there in the next epoch.
    return row.prompt.replace(eid=EID(batch=batch, task=task, suffix=""), info=dict(row.prompt.info))


def _read(reader: Reader, placed: Placed, limit: int | None = None) -> list[Row]:
    rows = []
    for place, given in placed:
        rows.append(reader.row(place, given))
        if len(rows) == limit:
            break
    if not rows:
        raise ValueError(f"{reader.name}: got no rows, expected at least one")
    reader.finish()
    for column, why in reader.dropped.items():
        log.warning("%s: column %r is not kept: %s", reader.name, column, why)
    return rows


def _check_options(called: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse options that the function does not take, and the lack of one that it needs."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return  # some builtins do not say
    if not any(p.kind is p.VAR_KEYWORD for p in found):
        known = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        odd = next((name for name in given if name not in known), None)
        if odd is not None:
            raise ValueError(f"{called}: option {odd!r} is none of its options{suggest(odd, known)}")
    needed = [p.name for p in found if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = next((name for name in needed if name not in given), None)
    if missing is not None:
        raise ValueError(f"{called}: got no option {missing!r}, which it needs")
