"""`Experiences`: many records as ragged columns, a sequence of `Experience` to the eye.

Invariant: `Experiences(list(many)) == many`. Assigning to a row changes the row alone, never the columns, and whatever
selects rows either shares memory (slices) or gathers (filter, sort, index lists).
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollbook.core import columns
from rollbook.core.columns import Column, Columns
from rollbook.core.fields import COLUMNAR, DTYPES, FIELDS, INTEGERS, Field, owner
from rollbook.core.ids import EID
from rollbook.core.ragged import Ragged, offsets_of

if TYPE_CHECKING:
    import os

    import torch

    from rollbook.compat.lightrft.batch import ExperienceBatch
    from rollbook.core.experience import Experience
    from rollbook.core.wire import Limits

ID_TYPES = {"task": "tid", "run": "rid", "step": "sid"}


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collector while thousands of objects are made, none of them in a cycle: it would only walk all of the
    process's objects again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def id_part(id_type: str) -> str:
    """The property of `EID` that groups by `id_type`."""
    if id_type not in ID_TYPES:
        raise ValueError(f"id_type: got {id_type!r}, expected one of {', '.join(map(repr, ID_TYPES))}")
    return ID_TYPES[id_type]


class Experiences(Sequence["Experience"]):
    """A sequence of `Experience` on columns.

    Rows are made when asked for, as views: their tensors share memory with the columns (in-place changes show in
    both; only a row whose type is not its column's, in a column of several types, is a copy), while assigning to a
    row's attribute changes that row alone.

    >>> from rollbook import Experience
    >>> many = Experiences([
    ...     Experience(eid={"batch": 1, "task": t, "run": r}, tokens=[1, 2, 3 + r], reward=float(r))
    ...     for t in range(2) for r in range(2)
    ... ])
    >>> len(many), many[1].tokens.tolist(), many[2:].column("tokens").lengths.tolist()
    (4, [1, 2, 4], [3, 3])
    >>> many.filter(lambda row: row.reward > 0)
    Experiences(2 records, 6 tokens)
    >>> {tid: len(group) for tid, group in many.group_by("task").items()}
    {'1/0': 2, '1/1': 2}
    >>> Experiences.from_bytes(many.to_bytes()) == many
    True
    """

    def __init__(self, rows: Iterable[Experience] = ()) -> None:
        if not isinstance(rows, Iterable):
            raise ValueError(f"rows: got one {type(rows).__name__}, expected several")
        built = from_rows(list(rows))
        self._columns: Columns = built._columns
        self._count: int = built._count

    # --- making ---------------------------------------------------------------------------------------------

    @classmethod
    def _of(cls, parts: Columns, count: int) -> Experiences:
        self = cls.__new__(cls)
        self._columns, self._count = parts, count
        return self

    @classmethod
    def from_columns(cls, data: Mapping[str, Any]) -> Experiences:
        """Records from columns by field name.

        A tensor field takes a `Ragged`, a pair (values, offsets) of arrays, or a sequence of arrays; any other field
        a sequence or array of its values. Ids that are not given are fresh; kinds are inferred.

        >>> Experiences.from_columns({
        ...     "tokens": (np.arange(7, dtype=np.int32), [0, 3, 7]), "prompt_length": [1, 2], "reward": [0.0, 1.0]
        ... })[1].tokens.tolist()
        [3, 4, 5, 6]
        """
        if "tokens" not in data:
            raise ValueError("from_columns: got no 'tokens', expected a column of token ids")
        parts: Columns = {}
        counts: dict[str, int] = {}
        for name, given in data.items():
            field = FIELDS.get(name)
            if field is None:
                raise ValueError(f"from_columns: {name!r} is no field; the fields are {', '.join(FIELDS)}")
            made = _column_from(field, given)
            counts[name] = len(given) if not made else len(next(iter(made.values())))
            parts.update(made)
        count = counts["tokens"]
        for name, length in counts.items():
            if length != count:
                raise ValueError(f"from_columns: {name!r} has {length} rows, expected {count} as 'tokens' has")
        complete(parts, count)
        columns.check_columns(parts, count)
        return cls._of(parts, count)

    @classmethod
    def from_arrow(cls, data: pa.Table | pa.RecordBatch) -> Experiences:
        """Records from an Arrow table: Rollbook's own, or one that another tool wrote with these column names."""
        from rollbook.io.arrow import from_table

        return from_table(data)

    @classmethod
    def from_bytes(cls, data: Any, verify: bool = True) -> Experiences:
        """Records from frames, without copying; see `rollbook.core.wire.decode`."""
        from rollbook.core.wire import decode

        return decode(data, verify=verify)

    @classmethod
    def from_parquet(cls, path: str | os.PathLike[str], limits: Limits | None = None) -> Experiences:
        """Records from a Parquet file; see `rollbook.io.arrow.read_parquet`."""
        from rollbook.core.wire import DEFAULT_LIMITS
        from rollbook.io.arrow import read_parquet

        return read_parquet(path, DEFAULT_LIMITS if limits is None else limits)

    @classmethod
    def from_hf(cls, dataset: Any) -> Experiences:
        """Records from a `datasets.Dataset`; see `rollbook.compat.trinity.from_hf_datasets`."""
        from rollbook.io.arrow import from_hf

        return from_hf(dataset)

    @classmethod
    def concat(cls, parts: Iterable[Experiences]) -> Experiences:
        """All records of all parts, in order."""
        given = [part for part in parts if len(part)]
        if len(given) <= 1:
            return given[0] if given else cls()
        return cls._of(
            columns.concat([(part._columns, part._count) for part in given]), sum(part._count for part in given)
        )

    # --- going out ------------------------------------------------------------------------------------------

    def to_arrow(self, portable: bool = False) -> pa.Table:
        """The columns as an Arrow table; `portable` as Parquet and HF have them, with a column for every field."""
        from rollbook.io.arrow import to_table

        return to_table(self, portable)

    def to_bytes(self, compression: str | None = None) -> bytes:
        """One frame; see `rollbook.core.wire.encode`."""
        from rollbook.core.wire import encode

        return bytes(encode(self, compression=compression))

    def batch(self, **options: Any) -> ExperienceBatch:
        """The records as a model takes them, padded or packed."""
        from rollbook.compat.lightrft.batch import from_experiences

        return from_experiences(self, **options)

    def to_parquet(self, path: str | os.PathLike[str], compression: str = "zstd") -> None:
        """A Parquet file that DuckDB, pandas and polars read as ordinary columns."""
        from rollbook.io.arrow import write_parquet

        write_parquet(self, path, compression)

    def to_hf(self) -> Any:
        """A `datasets.Dataset`, from which `from_hf` gives the same records back."""
        from rollbook.io.arrow import to_hf

        return to_hf(self)

    # --- a sequence -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> Experience: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | NDArray[Any] | torch.Tensor) -> Experiences: ...
    def __getitem__(self, index: Any) -> Any:
        """One row, a slice (sharing memory if its step is 1), or the rows of an index list or boolean mask."""
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            if step == 1:
                stop = max(start, stop)
                parts = {name: columns.slice_column(c, start, stop) for name, c in self._columns.items()}
                return Experiences._of(parts, stop - start)
            return self.take(np.arange(start, stop, step))
        if isinstance(index, int) or getattr(index, "ndim", None) == 0:
            given = operator.index(index)
            row = given + (self._count if given < 0 else 0)
            if not 0 <= row < self._count:
                raise IndexError(f"record {given} of {self._count}")
            return self[row : row + 1].rows()[0]
        return self.take(np.asarray(index))

    def __iter__(self) -> Iterator[Experience]:
        # In chunks: rows of a large book are not all alive at once, and bulk conversion still pays.
        for start in range(0, self._count, 1024):
            yield from self[start : start + 1024].rows()

    def rows(self) -> list[Experience]:
        """All rows at once: the fastest way to have them."""
        with uncollected():
            return self._rows()

    def _rows(self) -> list[Experience]:
        from rollbook.core.experience import odd_fields, row_from_values

        values: list[dict[str, Any]] = [{} for _ in range(self._count)]
        aside = np.zeros(self._count, dtype=np.bool_)
        for field in FIELDS.values():
            name = field.name
            found = columns.decode(field, self._columns)
            if found is not None:
                for state, value in zip(values, found, strict=True):
                    if value is not None:
                        state[name] = value
            if f"{name}__other" in self._columns:
                aside |= np.asarray(self._columns[f"{name}__other"].is_valid())
        rows = [row_from_values(state) for state in values]
        for i in np.flatnonzero(aside).tolist():
            if odd := odd_fields(rows[i]):
                rows[i].__dict__["odd"] = odd
        unknown = columns.to_arrays({name: c for name, c in self._columns.items() if owner(name) is None})
        if unknown:
            for i, row in enumerate(rows):
                # Taken, not sliced: a row shares no memory with what it was read from.
                row.__dict__["unknown"] = {name: array.take(pa.array([i])) for name, array in unknown.items()}
        return rows

    def __add__(self, other: Sequence[Experience]) -> Experiences:
        return Experiences.concat([self, as_experiences(other)])

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of equal records."""
        if not isinstance(other, (Experiences, list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Experiences({self._count} records, {int(self.token_lengths().sum())} tokens)"

    def _repr_html_(self) -> str:
        from rollbook.core.notebook import records_html

        return records_html(self)

    def __reduce__(self) -> Any:
        return Experiences.from_bytes, (self.to_bytes(),)

    # --- selecting ------------------------------------------------------------------------------------------

    def take(self, indices: Sequence[int] | NDArray[Any]) -> Experiences:
        """The rows at `indices` (or where a boolean mask is True), gathered: the parent's memory is not kept."""
        chosen = np.asarray(indices)
        if chosen.dtype == np.bool_:
            if chosen.shape != (self._count,):
                raise IndexError(f"mask of shape {chosen.shape}, expected ({self._count},)")
            chosen = np.flatnonzero(chosen)
        if chosen.size == 0:
            chosen = chosen.astype(np.int64)
        if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
            raise IndexError(
                f"indices of type {chosen.dtype}, shape {chosen.shape}: expected whole numbers or bools "
                "(a field of all records is .values(name), a column .column(name))"
            )
        chosen = np.where(chosen < 0, chosen + self._count, chosen).astype(np.int64)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < self._count):
            raise IndexError(f"indices reach from {chosen.min()} to {chosen.max()}, of {self._count} records")
        return Experiences._of({name: columns.take_column(c, chosen) for name, c in self._columns.items()}, len(chosen))

    def filter(self, keep: Callable[[Experience], Any] | Sequence[bool] | NDArray[Any]) -> Experiences:
        """The records for which `keep(row)` is true, or where a mask is."""
        mask = np.asarray([bool(keep(row)) for row in self] if callable(keep) else keep)
        if mask.size and mask.dtype != np.bool_:
            raise ValueError(f"keep: got values of {mask.dtype}, expected bools; take() selects by index")
        return self.take(mask.astype(np.bool_))

    def sort(
        self, key: Callable[[Experience], Any] | Sequence[Any] | NDArray[Any], reverse: bool = False
    ) -> Experiences:
        """The records in the order of `key(row)`, or of one key per record; stable."""
        keys = [key(row) for row in self] if callable(key) else list(key)
        if len(keys) != self._count:
            raise ValueError(f"sort: got {len(keys)} keys, expected {self._count}")
        return self.take(sorted(range(self._count), key=keys.__getitem__, reverse=reverse))

    def group_by(self, id_type: str) -> Groups:
        """The records of each task, run or step, in the order they first appear."""
        part = id_part(id_type)
        groups: dict[str, list[int]] = {}
        for i, eid in enumerate(self.eids()):
            groups.setdefault(getattr(eid, part), []).append(i)
        return Groups((key, self.take(indices)) for key, indices in groups.items())

    def assign(self, **fields: Any) -> Experiences:
        """The same records with other values in some fields, each given as `from_columns` takes it, or as `Rows`.

        Columns that are not named are shared, not copied; these records stay as they are.

        >>> many = Experiences.from_columns({"tokens": (np.arange(5), [0, 3, 5]), "reward": [0.0, 1.0]})
        >>> more = many.assign(advantages=[[-1.0, -1.0], [1.0]])
        >>> more[0].advantages.tolist(), many[0].advantages, more[1].reward
        ([-1.0, -1.0], None, 1.0)
        """
        parts = dict(self._columns)
        for name, given in fields.items():
            field = FIELDS.get(name)
            if field is None:
                raise ValueError(f"assign: {name!r} is no field; the fields are {', '.join(FIELDS)}")
            if len(given) != self._count:
                raise ValueError(f"assign: {name!r} has {len(given)} rows, expected {self._count}")
            made = _column_from(field, _ragged(given))
            parts = {key: column for key, column in parts.items() if (owner(key) or (None,))[0] is not field} | made
        columns.check_columns(parts, self._count)
        return self._of(parts, self._count)

    def compact(self) -> Experiences:
        """The same records on memory that holds nothing else (a slice keeps its parent's alive)."""
        return self.take(np.arange(self._count))

    # --- columns --------------------------------------------------------------------------------------------

    def column(self, name: str) -> Column | None:
        """A physical column by name: a `Ragged` for tensors, an Arrow array otherwise; `None` if no record has it."""
        if name not in self._columns and owner(name) is None:
            raise ValueError(f"column {name!r} is no field, and no column of these records")
        return self._columns.get(name)

    @property
    def columns(self) -> Mapping[str, Column]:
        """All physical columns."""
        return dict(self._columns)

    def values(self, name: str) -> list[Any]:
        """One field of every record, without making rows."""
        if name not in FIELDS:
            raise ValueError(f"{name!r} is no field; the fields are {', '.join(FIELDS)}")
        found = columns.decode(FIELDS[name], self._columns)
        return [None] * self._count if found is None else found

    def eids(self) -> list[EID]:
        """Every record's id."""
        return self.values("eid") if self._count else []

    def token_lengths(self) -> NDArray[np.int64]:
        """[N] How many tokens each record has."""
        tokens = self._columns.get("tokens")
        if isinstance(tokens, Ragged) and tokens.valid is None:
            return tokens.lengths
        return np.array([len(row) for row in self.values("tokens")] if self._count else [], dtype=np.int64)

    def prompt_lengths(self) -> NDArray[np.int64]:
        """[N] How many of them are the prompt."""
        if not self._count:
            return np.empty(0, dtype=np.int64)
        lengths: NDArray[np.int64] = self._columns["prompt_length"].to_numpy(zero_copy_only=False)
        return lengths


class Groups(dict[str, Experiences]):
    """Records by group id: a dict that notebooks show as a table."""

    def _repr_html_(self) -> str:
        from rollbook.core.notebook import groups_html

        return groups_html(self)


def as_experiences(rows: Iterable[Experience]) -> Experiences:
    """`rows` as columns: itself if it is that already."""
    return rows if isinstance(rows, Experiences) else Experiences(rows)


def from_rows(rows: list[Any], copy: bool = True) -> Experiences:
    """Columns from rows; with `copy=False` for one use at once, by a caller who copies the tensors itself."""
    with uncollected():
        return _from_rows(rows, copy)


def _from_rows(rows: list[Any], copy: bool) -> Experiences:
    from rollbook.core.experience import Experience, validate

    for i, row in enumerate(rows):
        if not isinstance(row, Experience):
            raise ValueError(f"record {i}: got {type(row).__name__}, expected an Experience")
    odd = [row.odd for row in rows]
    states = [row.__dict__ for row in rows]
    parts: Columns = {}
    given = set[str]().union(*states)
    for name, field in FIELDS.items():
        if name not in given:
            continue
        values = [state.get(name) for state in states]
        try:
            parts.update(columns.encode(field, values, odd if any(odd) else None, copy))
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{name}: a record holds what its constructor would have refused: {error}") from None
    unknown = {name: None for row in rows for name in row.unknown}
    for name in unknown:
        parts.update(columns.concat([({name: row.unknown[name]} if name in row.unknown else {}, 1) for row in rows]))
    if rows:
        # What stands aside is checked as a row, the rest as columns.
        aside = [parts[name] for name in parts if name.endswith("__other")]
        for i in {i for column in aside for i in np.flatnonzero(np.asarray(column.is_valid())).tolist()}:
            validate(rows[i], f"record {i}: ")
        try:
            columns.check_columns(parts, len(rows))
        except ValueError:
            for i, row in enumerate(rows):
                validate(row, f"record {i}: ")
            raise
    return Experiences._of(parts, len(rows))


def _column_from(field: Field, given: Any) -> Columns:
    from rollbook.core.experience import convert

    if not isinstance(given, (Sequence, np.ndarray, Ragged)) and not hasattr(given, "__iter__"):
        raise ValueError(f"{field.name}: got {type(given).__name__}, expected a value for each record")
    if field.kind == "tensor" and isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], np.ndarray):
        values, offsets = np.asarray(given[0]), np.asarray(given[1])
        rising = offsets.ndim == 1 and offsets.dtype.kind in "iu" and len(offsets) > 0
        if not rising or offsets[0] < 0 or offsets[-1] > len(values) or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(f"{field.name}: offsets must rise from 0 or more to at most {len(values)}")
        name = values.dtype.name
        if name not in COLUMNAR:
            raise ValueError(f"{field.name}: got values of {values.dtype}, expected numbers")
        given = Ragged(values.view(DTYPES[name].storage), offsets.astype(np.int64), name)
    if isinstance(given, Ragged):
        if field.kind != "tensor":
            raise ValueError(f"{field.name}: got a Ragged, expected a sequence of values")
        if field.accepts == "integer" and not INTEGERS.issuperset({given.dtype, *given.row_dtypes()}):
            raise ValueError(f"{field.name}: got values of {given.dtype}, expected whole numbers")
        if len(given.trailing) != field.trailing:
            raise ValueError(f"{field.name}: got {1 + len(given.trailing)} dimension(s), expected {1 + field.trailing}")
        return {field.name: given}
    values = given.tolist() if isinstance(given, np.ndarray) and field.kind != "tensor" else given
    return columns.encode(field, [convert(field, value) for value in values])


def _ragged(given: Any) -> Any:
    """`Rows`, which only torch knows, as a column; anything else as it is."""
    if not isinstance(given, list) or not hasattr(given, "lengths"):
        return given
    values = given.values.detach().cpu().contiguous()  # type: ignore[attr-defined]
    name = str(values.dtype).removeprefix("torch.")
    if name not in COLUMNAR or name == "bfloat16":
        return list(given)
    return Ragged(values.numpy().view(DTYPES[name].storage), offsets_of(given.lengths), name)


def complete(parts: Columns, count: int, explicit_masks: bool = False) -> None:
    """Add what every record must have: ids, prompt lengths, kinds and masks.

    A mask makes a record multi_turn, with `explicit_masks` only if it is not the one that a single turn would get.
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
        given = 1 if prompt is None else np.asarray(prompt.fill_null(1))
        parts["prompt_length"] = pa.array(np.where(dpo, lengths, given), pa.int64())
    missing = single & ~columns.has(parts, "action_mask", count)
    if missing.any():
        _add_masks(parts, count, lengths, missing)


def _implied_masks(parts: Columns, count: int, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[N] Whether a record's mask is the one that the constructor makes for a single turn."""
    mask, prompt = parts.get("action_mask"), parts.get("prompt_length")
    if not isinstance(mask, Ragged) or mask.dtype != "bool" or mask.codes is not None:
        return np.zeros(count, dtype=np.bool_)
    prompts = np.ones(count, dtype=np.int64) if prompt is None else np.asarray(prompt.fill_null(1))
    ends = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    actions = ends[mask.offsets[1:]] - ends[mask.offsets[:-1]]
    full = (mask.lengths == lengths - prompts) & (mask.lengths > 0) & (actions == mask.lengths)
    implied: NDArray[np.bool_] = (prompts > 0) & np.where(columns.truncated(parts, count), actions == 0, full)
    return implied


def _add_masks(parts: Columns, count: int, lengths: NDArray[np.int64], missing: NDArray[np.bool_]) -> None:
    """Give single-turn records their masks: all True, or all False where the prompt was truncated."""
    widths = np.where(missing, np.maximum(lengths - parts["prompt_length"].to_numpy(zero_copy_only=False), 0), 0)
    fill = np.ones(count, dtype=np.uint8)
    cut = columns.truncated(parts, count) & missing
    if cut.any():
        logprobs = parts.get("logprobs")
        widths = np.where(cut, logprobs.lengths if isinstance(logprobs, Ragged) else 0, widths)
        fill[cut] = 0
    made = Ragged(np.repeat(fill, widths), offsets_of(widths), "bool", missing, owned=True)
    if missing.all():
        made.valid = None
        parts["action_mask"] = made
        return
    given = columns.decode(FIELDS["action_mask"], parts)
    rows = [a if b is None else b for a, b in zip(given or [None] * count, made.tensors(), strict=True)]
    parts.update(columns.encode(FIELDS["action_mask"], rows))
