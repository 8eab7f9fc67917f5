"""`Experiences`, a sequence of records stored as ragged columns, and `Groups`, the result of `group_by`.

Invariant: `Experiences(list(records)) == records`. Assigning to a row never changes the columns. Slices share memory;
filters, sorts and index lists copy.
"""

from __future__ import annotations

import gc
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, repeat
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollbook.core import columns
from rollbook.core.checks import suggest
from rollbook.core.columns import Column, Columns
from rollbook.core.fields import COLUMN_NAMES, COLUMNAR, DTYPES, FIELDS, INTEGERS, OWNERS, Field
from rollbook.core.ids import EID
from rollbook.core.ragged import Ragged, compute_offsets

if TYPE_CHECKING:
    import torch

    from rollbook.core.experience import Experience

__all__ = ["Experiences", "Groups", "as_experiences", "from_rows"]

ColumnValues: TypeAlias = Any
"""Values of a field, one per record: a `Ragged`, `Rows`, a pair (values, offsets), an array or a sequence."""

ID_TYPES = {"task": "tid", "run": "rid", "step": "sid"}
"""Names of the id parts by which records are grouped, and the property of `EID` for each."""

HTML_ROWS = 20
"""Maximum number of rows of a table in a notebook."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection, which slows down the creation of thousands of objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def id_part(id_type: str) -> str:
    """Return the property of `EID` for a part of the id (see `ID_TYPES`)."""
    if id_type not in ID_TYPES:
        raise ValueError(f"id_type: got {id_type!r}, expected one of {', '.join(map(repr, ID_TYPES))}")
    return ID_TYPES[id_type]


class Experiences(Sequence["Experience"]):
    """A sequence of `Experience` records, stored as columns.

    Rows are created on demand, anew by each index and loop. Assigning to an attribute of a row changes only that row,
    which the next loop does not see: after `for row in records: row.reward = 7.0`, the rewards of `records` are as
    before. `records.assign(reward=...)` and `fill` return records with new values. Tensors of rows are views of the
    columns, so in-place changes of them are visible in both, except if a row has another dtype than its column.

    Args:
        rows: The records.

    Raises:
        ValueError: A row is not a valid record.

    >>> from rollbook import Experience
    >>> records = Experiences([
    ...     Experience(eid={"batch": 1, "task": t, "run": r}, tokens=[1, 2, 3 + r], reward=float(r))
    ...     for t in range(2) for r in range(2)
    ... ])
    >>> len(records), records[1].tokens.tolist(), records[2:].column("tokens").lengths.tolist()
    (4, [1, 2, 4], [3, 3])
    >>> records.filter(lambda row: row.reward > 0)
    Experiences(2 records, 6 tokens)
    >>> {tid: len(group) for tid, group in records.group_by("task").items()}
    {'1/0': 2, '1/1': 2}
    """

    def __init__(self, rows: Iterable[Experience] = ()) -> None:
        if not isinstance(rows, Iterable):
            raise ValueError(f"rows: got {type(rows).__name__}, expected an iterable of records")
        built = from_rows(list(rows))
        self.columns: Mapping[str, Column] = built.columns
        self._count: int = built._count

    # --- construction ---------------------------------------------------------------------------------------

    @classmethod
    def from_encoded(cls, columns: Columns, count: int) -> Experiences:
        """Build records from encoded columns, without checks.

        Args:
            columns: As in the attribute `columns` of other records.
            count: Number of records.
        """
        self = cls.__new__(cls)
        self.columns, self._count = columns, count
        return self

    @classmethod
    def from_columns(cls, data: Mapping[str, ColumnValues]) -> Experiences:
        """Build records from columns.

        Args:
            data: Columns by field name, `tokens` among them. A tensor field takes a `Ragged`, a pair (values, offsets)
                of arrays, or a sequence of arrays; other fields take a sequence or an array. Missing ids are random,
                missing kinds are inferred.

        Returns:
            The records.

        Raises:
            ValueError: A name is not a field, or the columns have different or invalid lengths.

        >>> Experiences.from_columns({
        ...     "tokens": (np.arange(7, dtype=np.int32), [0, 3, 7]), "prompt_length": [1, 2], "reward": [0.0, 1.0]
        ... })[1].tokens.tolist()
        [3, 4, 5, 6]
        """
        if "tokens" not in data:
            raise ValueError("from_columns: got no 'tokens', expected a column of token ids")
        parts: Columns = {}
        counts: dict[str, int] = {}
        for name, entries in data.items():
            field = FIELDS.get(name)
            if field is None:
                raise ValueError(f"from_columns: {name!r} is not a field; the fields are {', '.join(FIELDS)}")
            encoded = _encode_column(field, entries)
            counts[name] = len(next(iter(encoded.values()))) if encoded else len(entries)
            parts.update(encoded)
        count = counts["tokens"]
        for name, length in counts.items():
            if length != count:
                raise ValueError(f"from_columns: {name!r} has {length} rows, expected {count} as 'tokens' has")
        add_required_columns(parts, count)
        columns.check_columns(parts, count)
        return cls.from_encoded(parts, count)

    @classmethod
    def concat(cls, parts: Iterable[Iterable[Experience]]) -> Experiences:
        """Concatenate records.

        Args:
            parts: `Experiences`, or lists of records, in order.

        Returns:
            All records. If only one part has records, that part itself.

        Raises:
            ValueError: A part is not valid, or unknown columns have different types in the parts.
        """
        if not isinstance(parts, Iterable):
            raise ValueError(f"parts: got {type(parts).__name__}, expected a list of Experiences")
        nonempty = [part for part in map(as_experiences, parts) if len(part)]
        if len(nonempty) <= 1:
            return nonempty[0] if nonempty else cls()
        return cls.from_encoded(
            columns.concat([(dict(part.columns), part._count) for part in nonempty]),
            sum(part._count for part in nonempty),
        )

    # --- sequence -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> Experience: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | NDArray[Any] | torch.Tensor) -> Experiences: ...
    def __getitem__(
        self, index: int | np.integer[Any] | slice | Sequence[int] | NDArray[Any] | torch.Tensor
    ) -> Experience | Experiences:
        """Return a row, a slice (which shares memory if its step is 1), or the rows of an index list or mask."""
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            if step == 1:
                stop = max(start, stop)
                parts: Columns = {}
                for name, column in self.columns.items():
                    end = stop if isinstance(column, Ragged) else stop - start
                    parts[name] = column.slice(start, end)
                return Experiences.from_encoded(parts, stop - start)
            return self.take(np.arange(start, stop, step))
        if isinstance(index, int) or getattr(index, "ndim", None) == 0:
            number = operator.index(index)  # type: ignore[arg-type]
            row = number + (self._count if number < 0 else 0)
            if not 0 <= row < self._count:
                raise IndexError(f"record {number} of {self._count}")
            return self[row : row + 1].rows()[0]
        return self.take(np.asarray(index))

    def __iter__(self) -> Iterator[Experience]:
        # In chunks, so that not all rows of a large book are in memory at once.
        for start in range(0, self._count, 1024):
            yield from self[start : start + 1024].rows()

    def rows(self) -> list[Experience]:
        """Return all rows as a list. This is faster than iterating."""
        from rollbook.core.experience import find_malformed_fields, row_from_values

        with gc_paused():
            states: list[dict[str, Any]] = [{} for _ in range(self._count)]
            in_side_column = np.zeros(self._count, dtype=np.bool_)
            for name, field in FIELDS.items():
                values = columns.decode(field, self.columns)
                if values is not None:
                    for state, entry in zip(states, values, strict=True):
                        if entry is not None:
                            state[name] = entry
                if f"{name}__other" in self.columns:
                    in_side_column |= np.asarray(self.columns[f"{name}__other"].is_valid())
            rows = list(map(row_from_values, states))
            for i in np.flatnonzero(in_side_column).tolist():
                if malformed := find_malformed_fields(rows[i]):
                    rows[i].__dict__["malformed_fields"] = malformed
            if self.columns.keys() - OWNERS:
                unknown = columns.to_arrays({name: c for name, c in self.columns.items() if name not in OWNERS})
                for i, row in enumerate(rows):
                    # Copied, not sliced: a row must not share memory with its source.
                    row.__dict__["unknown"] = {name: array.take(pa.array([i])) for name, array in unknown.items()}
        return rows

    def __add__(self, other: Sequence[Experience]) -> Experiences:
        return Experiences.concat([self, as_experiences(other)])

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is a sequence of equal records."""
        if not isinstance(other, (Experiences, list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Experiences({self._count} records, {int(self.token_lengths().sum())} tokens)"

    def _repr_html_(self) -> str:
        from rollbook.core.terminal import html_table

        first = self[:HTML_ROWS]
        texts = [first.values(name) for name in ("reward", "finish_reason", "prompt_text", "response_text")]
        responses = first.token_lengths() - first.prompt_lengths()
        rows = zip((eid.uid for eid in first.eids()), responses.tolist(), *texts, strict=True)
        headers = ["id", "response tokens", "reward", "finish reason", "prompt", "response"]
        return html_table(_html_caption(self._count, "record"), headers, rows)

    def __reduce__(self) -> Any:
        from rollbook.core.wire import decode, encode

        return decode, (encode(self),)

    # --- selection ------------------------------------------------------------------------------------------

    def take(self, indices: Sequence[int] | NDArray[Any]) -> Experiences:
        """Select rows by index or mask. The rows are copied; the memory of these records is not kept alive.

        Args:
            indices: Row numbers, negative ones counted from the end, or a boolean mask [N].

        Returns:
            The selected rows, in the order of `indices`.

        Raises:
            IndexError: An index is out of range, or the mask has another length.
        """
        chosen = np.asarray(indices)
        if chosen.dtype == np.bool_:
            if chosen.shape != (self._count,):
                raise IndexError(f"mask of shape {chosen.shape}, expected ({self._count},)")
            chosen = np.flatnonzero(chosen)
        if chosen.size == 0:
            chosen = chosen.astype(np.int64)
        if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
            raise IndexError(
                f"indices of type {chosen.dtype}, shape {chosen.shape}: expected integers or bools "
                "(a field of all records is .values(name), a column .column(name))"
            )
        chosen = np.where(chosen < 0, chosen + self._count, chosen).astype(np.int64)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < self._count):
            raise IndexError(f"indices reach from {chosen.min()} to {chosen.max()}, of {self._count} records")
        arrow_indices = pa.array(chosen)
        parts: Columns = {}
        for name, column in self.columns.items():
            parts[name] = column.take(chosen if isinstance(column, Ragged) else arrow_indices)
        return Experiences.from_encoded(parts, len(chosen))

    def filter(self, keep: Callable[[Experience], Any] | Sequence[bool] | NDArray[Any]) -> Experiences:
        """Select the records that a predicate or a mask accepts.

        Args:
            keep: A function of a record, or a boolean mask [N].

        Returns:
            The selected records, copied.

        Raises:
            ValueError: The mask does not consist of bools.
        """
        mask = np.asarray([bool(keep(row)) for row in self] if callable(keep) else keep)
        if mask.size and mask.dtype != np.bool_:
            raise ValueError(f"keep: got values of {mask.dtype}, expected bools; take() selects by index")
        return self.take(mask.astype(np.bool_))

    def sort(
        self, key: Callable[[Experience], Any] | Sequence[Any] | NDArray[Any], reverse: bool = False
    ) -> Experiences:
        """Sort the records. The sort is stable.

        Args:
            key: A function of a record, or one key for each record.
            reverse: Sort in descending order.

        Returns:
            The sorted records, copied.

        Raises:
            ValueError: There is not one key for each record.
        """
        keys = [key(row) for row in self] if callable(key) else list(key)
        if len(keys) != self._count:
            raise ValueError(f"sort: got {len(keys)} keys, expected {self._count}")
        return self.take(sorted(range(self._count), key=keys.__getitem__, reverse=reverse))

    def group_by(self, id_type: str) -> Groups:
        """Group the records by part of their id.

        Args:
            id_type: `"task"`, `"run"` or `"step"`.

        Returns:
            The records of each group by its id, in the order of first appearance.
        """
        id_component = id_part(id_type)
        groups: dict[str, list[int]] = {}
        for i, eid in enumerate(self.eids()):
            groups.setdefault(getattr(eid, id_component), []).append(i)
        return Groups((key, self.take(indices)) for key, indices in groups.items())

    def assign(self, **fields: ColumnValues) -> Experiences:
        """Replace fields of all records.

        Args:
            fields: Columns by field name, as `from_columns` takes them, or as `Rows`.

        Returns:
            Records with the new fields. The other columns are shared; these records do not change.

        Raises:
            ValueError: A name is not a field, or a column has the wrong length or type.

        >>> records = Experiences.from_columns({"tokens": (np.arange(5), [0, 3, 5]), "reward": [0.0, 1.0]})
        >>> assigned = records.assign(advantages=[[-1.0, -1.0], [1.0]])
        >>> assigned[0].advantages.tolist(), records[0].advantages, assigned[1].reward
        ([-1.0, -1.0], None, 1.0)
        """
        parts = dict(self.columns)
        for name, entries in fields.items():
            field = FIELDS.get(name)
            if field is None:
                raise ValueError(f"assign: {name!r} is not a field; the fields are {', '.join(FIELDS)}")
            _check_count("assign", name, entries, self._count)
            encoded = _encode_column(field, entries)
            for key in COLUMN_NAMES[name]:
                parts.pop(key, None)
            parts |= encoded
        columns.check_columns(parts, self._count)
        return self.from_encoded(parts, self._count)

    def missing(self, column: str) -> NDArray[np.int64]:
        """Find the records whose field is `None`.

        Args:
            column: Name of the field.

        Returns:
            Their indices, an int64 array.

        >>> records = Experiences.from_columns({"tokens": (np.arange(5), [0, 3, 5]), "reward": [None, 1.0]})
        >>> records.missing("reward"), records.missing("advantages")
        (array([0]), array([0, 1]))
        """
        field = FIELDS.get(column)
        if field is None or field.kind not in ("tensor", "number", "integer", "text"):
            return np.flatnonzero([entry is None for entry in self.values(column)])
        absent = np.ones(self._count, dtype=np.bool_)
        for name in COLUMN_NAMES[column]:
            stored = self.columns.get(name)
            if isinstance(stored, Ragged):
                absent &= ~stored.present
            elif stored is not None:
                absent &= np.asarray(stored.is_null())
        return np.flatnonzero(absent)

    def fill(
        self, rows: Sequence[int] | NDArray[Any] | None = None, *, overwrite: bool = False, **columns: ColumnValues
    ) -> Experiences:
        """Set fields of the records where they are `None`; `assign` replaces all values.

        Args:
            rows: Indices of the records to fill; `None`: all records, in order.
            overwrite: Also replace existing values of these records.
            columns: By field name, one value for each of `rows`, in a form that `assign` accepts.

        Returns:
            The filled records; these records do not change.

        >>> records = Experiences.from_columns({"tokens": (np.arange(5), [0, 3, 5]), "reward": [None, 1.0]})
        >>> records.fill(reward=[0.5, 0.5]).values("reward"), records.fill([0], reward=[0.25]).values("reward")
        ([0.5, 1.0], [0.25, 1.0])
        """
        chosen = np.arange(self._count) if rows is None else np.asarray(rows, dtype=np.int64)
        is_all = np.array_equal(chosen, np.arange(self._count))
        filled: dict[str, Any] = {}
        for name, new_values in columns.items():
            _check_count("fill", name, new_values, len(chosen))
            absent = self.missing(name)
            if is_all and (overwrite or len(absent) == self._count):
                filled[name] = new_values
                continue
            values = self.values(name)
            is_absent = set(absent.tolist())
            for row, entry in zip(chosen.tolist(), new_values, strict=True):
                if overwrite or row in is_absent:
                    values[row] = entry
            filled[name] = values
        return self.assign(**filled)

    def select(self, *names: str) -> Experiences:
        """Keep only some fields, without copying.

        Args:
            names: Fields to keep besides `eid`, `tokens`, `prompt_length` and `experience_type`, which always stay.

        Returns:
            Records with these fields.

        Raises:
            ValueError: A name is not a field.

        >>> records = Experiences.from_columns({"tokens": (np.arange(5), [0, 3, 5]), "reward": [0.0, 1.0]})
        >>> sorted(records.select().columns)
        ['eid', 'experience_type', 'prompt_length', 'tokens']
        """
        for name in names:
            if name not in FIELDS:
                raise ValueError(f"select: {name!r} is not a field{suggest(name, FIELDS)}")
        selected = {"eid", "tokens", "prompt_length", "experience_type", *names}
        parts: Columns = {}
        for key, column in self.columns.items():
            if key in OWNERS and OWNERS[key][0].name in selected:
                parts[key] = column
        return self.from_encoded(parts, self._count)

    def compact(self) -> Experiences:
        """Copy the records. A slice, in contrast, keeps the memory of its source alive."""
        return self.take(np.arange(self._count))

    # --- columns --------------------------------------------------------------------------------------------

    def column(self, name: str) -> Column | None:
        """Return a physical column.

        Args:
            name: A field, or a side column of one (`tokens__other`).

        Returns:
            A `Ragged` for tensors, an Arrow array otherwise; `None` if no record has the field.

        Raises:
            ValueError: There is no such field or column.
        """
        if name not in self.columns and name not in OWNERS:
            raise ValueError(f"column {name!r} is not a field, and not a column of these records")
        return self.columns.get(name)

    def values(self, name: str) -> list[Any]:
        """Return the values of a field, without creating rows.

        Args:
            name: Name of the field.

        Returns:
            A list of N values; tensors are views of the column.

        Raises:
            ValueError: There is no such field.
        """
        if name not in FIELDS:
            raise ValueError(f"{name!r} is not a field; the fields are {', '.join(FIELDS)}")
        values = columns.decode(FIELDS[name], self.columns)
        return [None] * self._count if values is None else values

    def eids(self) -> list[EID]:
        """Return the id of every record."""
        return self.values("eid") if self._count else []

    def token_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each record, [N]."""
        tokens = self.columns.get("tokens")
        if isinstance(tokens, Ragged) and tokens.valid is None:
            return tokens.lengths
        return np.array([len(row) for row in self.values("tokens")] if self._count else [], dtype=np.int64)

    def prompt_lengths(self) -> NDArray[np.int64]:
        """Return the number of prompt tokens of each record, [N]."""
        if not self._count:
            return np.empty(0, dtype=np.int64)
        lengths: NDArray[np.int64] = self.columns["prompt_length"].to_numpy(zero_copy_only=False)
        return lengths


class Groups(dict[str, Experiences]):
    """Records by group id: a dict that notebooks show as a table.

    Args:
        groups: The records of each group, by its id.

    >>> from rollbook import Experience
    >>> records = [Experience(eid={"batch": 1, "task": 0, "run": r}, tokens=[1, 2, r]) for r in range(3)]
    >>> groups = Experiences(records).group_by("task")
    >>> groups
    {'1/0': Experiences(3 records, 9 tokens)}
    """

    def _repr_html_(self) -> str:
        from rollbook.core.terminal import html_table

        rows = []
        for name, group in islice(self.items(), HTML_ROWS):
            rewards = [reward for reward in group.values("reward") if reward is not None and not math.isnan(reward)]
            statistics = [sum(rewards) / len(rewards), min(rewards), max(rewards)] if rewards else [None] * 3
            rows.append([name, len(group), *statistics, group.values("prompt_text")[0]])
        headers = ["group", "records", "mean reward", "lowest", "highest", "prompt"]
        return html_table(_html_caption(len(self), "group"), headers, rows)


def _html_caption(count: int, noun: str) -> str:
    """Return the number of rows, and how many of them the table shows."""
    limit = f", the first {HTML_ROWS}" if count > HTML_ROWS else ""
    return f"{count:,} {noun}{'' if count == 1 else 's'}{limit}"


def as_experiences(rows: Iterable[Experience]) -> Experiences:
    """Return records as columns; `Experiences` are returned as they are.

    Args:
        rows: Records, or `Experiences`.

    Returns:
        The records as columns.

    Raises:
        ValueError: A row is not a valid record.

    >>> from rollbook import Experience
    >>> records = as_experiences([Experience(tokens=[1, 2, 3], reward=1.0)])
    >>> records, as_experiences(records) is records
    (Experiences(1 records, 3 tokens), True)
    """
    return rows if isinstance(rows, Experiences) else Experiences(rows)


def from_rows(rows: Sequence[Any], copy: bool = True, *, converted: bool = False) -> Experiences:
    """Return the columns of rows.

    Args:
        rows: The records.
        copy: Copy the tensors now. With `False`, the caller must copy them before the records change.
        converted: Whether values that were assigned to the records have been converted.

    Returns:
        The records as columns.

    Raises:
        ValueError: A row is not a valid record.

    >>> from rollbook import Experience
    >>> from_rows([Experience(tokens=[1, 2, 3]), Experience(tokens=[4, 5])]).column("tokens").lengths.tolist()
    [3, 2]
    """
    from rollbook.core.experience import Experience, convert_assigned, validate

    try:
        for kind in set(map(type, rows)):
            if not issubclass(kind, Experience):
                raise TypeError(f"got {kind.__name__}, expected an Experience")
        with gc_paused():
            states = list(map(vars, rows))
            names = set[str]().union(*states)
            malformed = [row.malformed_fields for row in rows] if "malformed_fields" in names else None
            parts: Columns = {}
            for name, field in FIELDS.items():
                if name in names:
                    values = list(map(methodcaller("get", name), states))
                    parts.update(columns.encode(field, values, malformed, copy))
            if "unknown" in names:
                for name in dict.fromkeys(name for row in rows for name in row.unknown):
                    unknown = [({name: row.unknown[name]} if name in row.unknown else {}, 1) for row in rows]
                    parts.update(columns.concat(unknown))
            # Rows with values in side columns are validated as rows, the rest as columns.
            for name, column in parts.items():
                if name.endswith("__other"):
                    for i in np.flatnonzero(np.asarray(column.is_valid())).tolist():
                        validate(rows[i], f"record {i}: ")
            try:
                if rows:
                    columns.check_columns(parts, len(rows))
            except ValueError:
                for i, row in enumerate(rows):
                    validate(row, f"record {i}: ")
                raise
        return Experiences.from_encoded(parts, len(rows))
    except (AttributeError, LookupError, TypeError, ValueError):
        if converted:
            raise
    # Values that were assigned later may not have the form that the constructor gives: rare, so tried last.
    return from_rows(convert_assigned(rows), copy, converted=True)


def _check_count(function: str, name: str, entries: ColumnValues, count: int) -> None:
    try:
        length = len(entries)
    except TypeError:
        kind = type(entries).__name__
        raise ValueError(f"{function}: {name!r}: got {kind}, expected a value for each of {count} records") from None
    if length != count:
        raise ValueError(f"{function}: {name!r} has {length} rows, expected {count}")


def _encode_column(field: Field, entries: ColumnValues) -> Columns:
    """Encode the values of a field, in any form that `from_columns` and `assign` accept, as columns."""
    from rollbook.core.experience import convert

    if isinstance(entries, list) and hasattr(entries, "lengths"):  # `Rows`, whose module needs torch
        flat = entries.values.detach().cpu().contiguous()  # type: ignore[attr-defined]
        dtype = str(flat.dtype).removeprefix("torch.")
        if dtype in COLUMNAR and dtype != "bfloat16":
            entries = Ragged(flat.numpy().view(DTYPES[dtype].storage), compute_offsets(entries.lengths), dtype)
    if not isinstance(entries, (Sequence, np.ndarray, Ragged)) and not hasattr(entries, "__iter__"):
        raise ValueError(f"{field.name}: got {type(entries).__name__}, expected a value for each record")
    if (
        field.kind == "tensor"
        and isinstance(entries, tuple)
        and len(entries) == 2
        and isinstance(entries[0], np.ndarray)
    ):
        values, offsets = np.asarray(entries[0]), np.asarray(entries[1])
        is_vector = offsets.ndim == 1 and offsets.dtype.kind in "iu" and len(offsets) > 0
        if not is_vector or offsets[0] < 0 or offsets[-1] > len(values) or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(f"{field.name}: offsets must rise from 0 or more to at most {len(values)}")
        name = values.dtype.name
        if name not in COLUMNAR:
            raise ValueError(f"{field.name}: got values of {values.dtype}, expected numbers")
        entries = Ragged(values.view(DTYPES[name].storage), offsets.astype(np.int64), name)
    if isinstance(entries, Ragged):
        if field.kind != "tensor":
            raise ValueError(f"{field.name}: got a Ragged, expected a sequence of values")
        if field.accepts == "integer" and not INTEGERS.issuperset({entries.dtype, *entries.row_dtypes()}):
            raise ValueError(f"{field.name}: got values of {entries.dtype}, expected integers")
        if len(entries.trailing) != field.trailing:
            raise ValueError(
                f"{field.name}: got {1 + len(entries.trailing)} dimension(s), expected {1 + field.trailing}"
            )
        return {field.name: entries}
    values = entries.tolist() if isinstance(entries, np.ndarray) and field.kind != "tensor" else entries
    return columns.encode(field, list(map(convert, repeat(field), values)))


def add_required_columns(parts: Columns, count: int, explicit_masks: bool = False) -> None:
    """Add missing ids, prompt lengths, kinds and masks.

    Args:
        parts: The columns, changed in place.
        count: Number of records.
        explicit_masks: Whether single-turn records may have masks, too. By default, a record with a mask becomes
            `multi_turn`; with this option, only if the mask is not the default mask of a single turn.
    """
    kinds = FIELDS["experience_type"].name
    lengths, _ = columns.token_lengths(parts, count)
    if "eid" not in parts:
        parts.update(columns.encode(FIELDS["eid"], [EID() for _ in range(count)]))
    if kinds not in parts:
        masked = columns.has(parts, "action_mask", count)
        paired = columns.has(parts, "chosen", count) & columns.has(parts, "rejected", count)
        if explicit_masks:
            masked &= paired | ~_implied_masks(parts, count, lengths)
        names = np.where(masked, "multi_turn", np.where(paired, "dpo", "single_turn"))
        parts[kinds] = pa.array(names.tolist(), pa.large_string())
    single, _, dpo = columns.kinds(parts[kinds])
    prompt = parts.get("prompt_length")
    if prompt is None or prompt.null_count or dpo.any():
        prompts = 1 if prompt is None else np.asarray(prompt.fill_null(1))
        parts["prompt_length"] = pa.array(np.where(dpo, lengths, prompts), pa.int64())
    missing = single & ~columns.has(parts, "action_mask", count)
    if missing.any():
        _add_masks(parts, count, lengths, missing)


def _implied_masks(parts: Columns, count: int, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each record has the default mask of a single turn, [N]."""
    mask, prompt = parts.get("action_mask"), parts.get("prompt_length")
    if not isinstance(mask, Ragged) or mask.dtype != "bool" or mask.codes is not None:
        return np.zeros(count, dtype=np.bool_)
    prompts = np.ones(count, dtype=np.int64) if prompt is None else np.asarray(prompt.fill_null(1))
    ends = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    actions = ends[mask.offsets[1:]] - ends[mask.offsets[:-1]]
    all_true = (mask.lengths == lengths - prompts) & (mask.lengths > 0) & (actions == mask.lengths)
    implied: NDArray[np.bool_] = (prompts > 0) & np.where(columns.truncated(parts, count), actions == 0, all_true)
    return implied


def _add_masks(parts: Columns, count: int, lengths: NDArray[np.int64], missing: NDArray[np.bool_]) -> None:
    """Add the masks of single-turn records: all True, or all False if the prompt was truncated."""
    widths = np.where(missing, np.maximum(lengths - parts["prompt_length"].to_numpy(zero_copy_only=False), 0), 0)
    fill = np.ones(count, dtype=np.uint8)
    is_truncated = columns.truncated(parts, count) & missing
    if is_truncated.any():
        logprobs = parts.get("logprobs")
        widths = np.where(is_truncated, logprobs.lengths if isinstance(logprobs, Ragged) else 0, widths)
        fill[is_truncated] = 0
    added = Ragged(np.repeat(fill, widths), compute_offsets(widths), "bool", missing, owned=True)
    if missing.all():
        added.valid = None
        parts["action_mask"] = added
        return
    masks = columns.decode(FIELDS["action_mask"], parts)
    rows = [a if b is None else b for a, b in zip(masks or [None] * count, added.tensors(), strict=True)]
    parts.update(columns.encode(FIELDS["action_mask"], rows))
