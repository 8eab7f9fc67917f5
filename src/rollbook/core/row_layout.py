"""The body of a frame straight from rows, without Arrow arrays: what most appends and most bytes are made by.

Invariant: the bytes are those that `from_rows` and Arrow's writer give for the same rows. Rows that are not plain (see
`RowLayout.of`), among them all that cannot be kept, give `None`; the general way then takes or refuses them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, compress
from operator import attrgetter, itemgetter, ne, sub
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollbook.core import arrow, freeform, ipc
from rollbook.core.columns import EID_TYPE, Columns, EidParts, Values, plain_part, uniform_dtype
from rollbook.core.fields import DTYPES, FIELDS, Field
from rollbook.core.ids import EID
from rollbook.core.ragged import Ragged

MOST_ROWS = 256
MOST_BYTES = 4 << 20
"""Of a body made here; the tensors of larger ones are gathered by two threads (see `rollbook.core.wire`)."""
_NONE = type(None)
_PLAIN_KINDS = {"number": {float, _NONE}, "integer": {int, _NONE}, "text": {str, _NONE}}
_JSON_TYPES = {"dict": {dict, _NONE}, "list": {list, tuple, _NONE}, "": None}
_TURNS = {"single_turn", "multi_turn"}
_ZEROS = [bytes(n) for n in range(8)]
_EMPTY = {dtype.storage: np.empty(0, dtype=dtype.storage) for dtype in DTYPES.values() if dtype.code}
_eid_parts = attrgetter("batch", "task", "run", "step", "suffix")


class _NotPlainError(Exception):
    """Raised inside `RowLayout.of` for rows that take the general way."""


class _Template(NamedTuple):
    """What Arrow writes before the buffers of any batch of one schema, and where the numbers stand in it."""

    head: bytes
    rows: int
    nodes: int
    buffers: int
    body: int


@lru_cache(64)
def _template(columns: tuple[tuple[str, str], ...]) -> _Template:
    """The template of a schema, given as (name, type) of each column."""
    batch = pa.RecordBatch.from_arrays(
        [pa.array([None], _arrow_type(kind)) for _, kind in columns], names=[name for name, _ in columns]
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    body = memoryview(sink.getvalue())
    slots = ipc.batch_slots(body)
    return _Template(bytes(body[: slots[0]]), *slots[1:])


def _arrow_type(kind: str) -> pa.DataType:
    if kind in ("eid", "text"):
        return EID_TYPE if kind == "eid" else pa.large_string()
    return pa.large_list(pa.from_numpy_dtype(kind[1:])) if kind[0] == "*" else pa.from_numpy_dtype(kind)


class RowLayout:
    """Plain rows as a frame's body: `fill` writes it, and from then on tensor columns lie in the memory it was given.

    `columns` are as those of `Experiences`, with `Values` and `EidParts` in the place of Arrow arrays.

    >>> from rollbook import Experience
    >>> layout = RowLayout.of([Experience(tokens=[1, 2, 3], reward=1.0)])
    >>> list(layout.columns)
    ['eid', 'tokens', 'prompt_length', 'reward', 'info', 'metrics', 'action_mask', 'experience_type']
    >>> RowLayout.of([Experience(tokens=[1, 2], multi_modal_inputs={"pixel_values": [[0.5]]})]) is None
    True
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.columns: Columns = {}
        self._schema: list[tuple[str, str]] = []
        self._nodes: list[int] = []
        self._buffers: list[int] = []
        self._pieces: list[Any] = [b""]
        self._body = 0
        self._lengths: dict[str, tuple[int, ...]] = {}
        self._offsets: dict[tuple[int, ...], tuple[NDArray[np.int64], bytes]] = {}

    @classmethod
    def of(cls, rows: Sequence[Any]) -> RowLayout | None:
        """The layout of `rows`, or `None` if they are not plain.

        Plain rows are single-turn or multi-turn records without a truncated prompt, whose tensors have one dimension
        and, within a field, one type, and whose fields hold exactly the types that the constructor gives them. There
        are at most `MOST_ROWS`, and their body takes at most about `MOST_BYTES`.
        """
        from rollbook.core.experience import Experience

        if not 0 < len(rows) <= MOST_ROWS or set(map(type, rows)) != {Experience}:
            return None
        states = [row.__dict__ for row in rows]
        names = set[str]().union(*states)
        if "odd" in names or "unknown" in names:
            return None
        layout = cls(len(rows))
        try:
            for name, field in FIELDS.items():
                if name in names:
                    try:
                        values = list(map(itemgetter(name), states))
                    except KeyError:
                        values = [state.get(name) for state in states]
                    layout._add(field, values)
            layout._check()
        except (_NotPlainError, ValueError, AttributeError, LookupError, TypeError, struct.error):
            return None
        layout._finish()
        return layout

    def __len__(self) -> int:
        return self._count

    def column(self, name: str) -> Any:
        """A column by name; `None` if no record has it."""
        return self.columns.get(name)

    def prompt_lengths(self) -> NDArray[np.int64]:
        """[N] How many tokens of each record are the prompt."""
        return np.array(self.columns["prompt_length"].values, dtype=np.int64)

    @property
    def size(self) -> int:
        """How many bytes `fill` writes."""
        return len(self._pieces[0]) + self._body + ipc.END_BYTES

    def fill(self, memory: NDArray[np.uint8]) -> None:
        """Write the body to an array of `size` bytes."""
        out = memory.data
        at = 0
        pending: list[bytes] = []
        for piece in (*self._pieces, ipc.END, None):
            if type(piece) is bytes:
                pending.append(piece)
                continue
            joined = b"".join(pending)
            out[at : at + len(joined)] = joined
            at += len(joined)
            pending.clear()
            if piece is not None:
                stop = at + int(piece.offsets[-1]) * piece.memory.itemsize
                values = memory[at:stop].view(piece.memory.dtype)
                piece.copy_to(values)
                piece.settle(values)
                at = stop

    # --- columns ----------------------------------------------------------------------------------------------

    def _add(self, field: Field, values: list[Any]) -> None:
        kind = field.kind
        if kind == "eid":
            self._add_eids(field.name, values)
        elif kind == "custom_fields":
            if any(values):
                raise _NotPlainError
        elif values.count(None) == len(values) if kind != "tensor" else all(value is None for value in values):
            return
        elif kind == "tensor":
            self._add_tensors(field, values)
        elif kind == "json":
            self._add_json(field, values)
        elif kind == "media" or not set(map(type, values)) <= _PLAIN_KINDS[kind]:
            raise _NotPlainError
        elif kind == "text":
            data = [None if value is None else value.encode() for value in values]
            self._begin(field.name, "text")
            self._texts(data)
            self.columns[field.name] = Values(values, data)
        else:
            self._add_numbers(field.name, "float64" if kind == "number" else "int64", values)

    def _begin(self, name: str, kind: str) -> None:
        self._schema.append((name, kind))

    def _buffer(self, length: int, pieces: Iterable[Any]) -> None:
        self._buffers += (self._body, length)
        self._pieces += pieces
        padding = -length % 8
        if padding:
            self._pieces.append(_ZEROS[padding])
        self._body += length + padding
        if self._body > MOST_BYTES:
            raise _NotPlainError

    def _node(self, count: int, values: Sequence[Any] | None = None, nulls: int = 0) -> None:
        """One Arrow array of `count` entries: its node and its bitmap, of which entries of `values` are not null."""
        self._nodes += (count, nulls)
        if nulls and values is not None:
            bitmap = np.packbits([value is not None for value in values], bitorder="little").tobytes()
            self._buffer(len(bitmap), (bitmap,))
        else:
            self._buffers += (self._body, 0)

    def _numbers(self, form: str, values: Sequence[Any]) -> None:
        data = struct.pack(f"<{len(values)}{form}", *values)
        self._buffer(len(data), (data,))

    def _texts(self, data: Sequence[bytes | None]) -> None:
        nulls = data.count(None)
        self._node(len(data), data, nulls)
        texts = [text or b"" for text in data] if nulls else data
        offsets = list(accumulate(map(len, texts), initial=0))  # type: ignore[arg-type]
        self._numbers("q", offsets)
        self._buffer(offsets[-1], texts)

    def _ascii(self, texts: Sequence[str]) -> None:
        self._node(len(texts))
        self._numbers("q", list(accumulate(map(len, texts), initial=0)))
        data = "".join(texts).encode("ascii")
        self._buffer(len(data), (data,))

    def _add_numbers(self, name: str, dtype: str, values: list[Any]) -> None:
        self._begin(name, dtype)
        nulls = values.count(None)
        self._node(len(values), values, nulls)
        self._numbers(
            "d" if dtype == "float64" else "q", [0 if value is None else value for value in values] if nulls else values
        )
        self.columns[name] = Values(values)

    def _add_eids(self, name: str, values: list[Any]) -> None:
        if set(map(type, values)) != {EID}:
            raise _NotPlainError
        batch, task, run, step, suffix = zip(*map(_eid_parts, values), strict=True)
        batch_types, task_types = set(map(type, batch)), set(map(type, task))
        if set(map(type, run + step)) != {int} or min(run) < 0 or min(step) < 0 or set(map(type, suffix)) != {str}:
            raise _NotPlainError
        if not batch_types | task_types <= {int, str} or not all(map(plain_part, {*batch, *task})):
            raise _NotPlainError
        if batch_types == task_types == {int}:
            ints = b"\3" * len(values)
        else:
            ints = bytes([(type(a) is int) + 2 * (type(b) is int) for a, b in zip(batch, task, strict=True)])
        parts = EidParts(list(map(str, batch)), list(map(str, task)), list(run), list(step), list(suffix))
        self._begin(name, "eid")
        self._node(len(values))
        self._ascii(parts.batch)
        self._ascii(parts.task)
        self._node(len(values))
        self._numbers("q", run)
        self._node(len(values))
        self._numbers("q", step)
        self._ascii(parts.suffix)
        self._node(len(values))
        self._buffer(len(values), (ints,))
        self.columns[name] = parts

    def _add_json(self, field: Field, values: list[Any]) -> None:
        allowed = _JSON_TYPES[field.holds]
        if allowed is not None and not set(map(type, values)) <= allowed:
            raise _NotPlainError
        data: list[bytes | None] = []
        flat: list[dict[str, Any] | None] = []
        for value in values:
            text, is_flat = (None, False) if value is None else freeform.dump_bytes(value)
            data.append(text)
            flat.append(value if is_flat else None)
        self._begin(field.name, "text")
        self._texts(data)
        self.columns[field.name] = Values(None, data, flat)

    def _add_tensors(self, field: Field, values: list[Any]) -> None:
        import torch

        if field.broadcast and set(map(type, values)) <= {int, _NONE}:
            self._add_numbers(f"{field.name}__one", "int64", values)
            return
        present = [value for value in values if value is not None]
        dtype = None if field.trailing else uniform_dtype(present)
        if dtype is None or arrow.implied(storage := DTYPES[dtype].storage, field) != dtype:
            raise _NotPlainError
        nulls = len(values) - len(present)
        measure = torch.Tensor.numel
        lengths = tuple([0 if value is None else measure(value) for value in values] if nulls else map(measure, values))
        self._lengths[field.name] = lengths
        offsets, written = self._offsets_of(lengths)
        valid = np.array([value is not None for value in values], dtype=np.bool_) if nulls else None
        column = Ragged(_EMPTY[storage], offsets, dtype, valid, owned=True)
        total = int(offsets[-1])
        if total:
            column.leave_pending(present)
        self._begin(field.name, f"*{storage}")
        self._node(len(values), values, nulls)
        self._buffer(len(written), (written,))
        self._node(total)
        self._buffer(total * DTYPES[dtype].itemsize, (column,) if total else ())
        self.columns[field.name] = column

    def _offsets_of(self, lengths: tuple[int, ...]) -> tuple[NDArray[np.int64], bytes]:
        """Offsets, and their bytes: those of one axis are made once."""
        if lengths not in self._offsets:
            offsets = np.array([0, *accumulate(lengths)], dtype=np.int64)
            self._offsets[lengths] = offsets, offsets.tobytes()
        return self._offsets[lengths]

    # --- the whole --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """See that the rows keep the promises of the table, as `arrow.check` does; others take the general way."""
        columns = self.columns
        kinds, prompts = columns["experience_type"].values, columns["prompt_length"].values
        if not _TURNS.issuperset(kinds) or None in prompts or columns["tokens"].valid is not None:
            raise _NotPlainError
        if "chosen" in columns or "rejected" in columns:
            raise _NotPlainError
        if "truncate_status" in columns and "prompt_truncated" in columns["truncate_status"].values:
            raise _NotPlainError
        sizes = columns.get("group_size")
        if sizes is not None and any(size is not None and size <= 0 for size in sizes.values):
            raise _NotPlainError
        tokens = self._lengths["tokens"]
        response = tuple(map(sub, tokens, prompts))
        for kind, prompt, length in zip(kinds, prompts, response, strict=True):
            if prompt < 0 or length < 0 or (kind == "single_turn" and not (prompt and length)):
                raise _NotPlainError
        expected = {"response": response, "sequence": tokens}
        for name, lengths in self._lengths.items():
            right = expected.get(FIELDS[name].axis, lengths)
            if lengths != right:
                valid = columns[name].valid
                if valid is None or any(map(ne, compress(lengths, valid), compress(right, valid))):
                    raise _NotPlainError

    def _finish(self) -> None:
        template = _template(tuple(self._schema))
        head = bytearray(template.head)
        struct.pack_into("<q", head, template.rows, self._count)
        struct.pack_into(f"<{len(self._nodes)}q", head, template.nodes, *self._nodes)
        struct.pack_into(f"<{len(self._buffers)}q", head, template.buffers, *self._buffers)
        struct.pack_into("<q", head, template.body, self._body)
        self._pieces[0] = bytes(head)
