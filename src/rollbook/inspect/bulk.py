"""Many records of a book measured at once, column by column.

Invariant: nothing here makes a record of a row: numbers go through numpy a piece at a time, and only what each row has
of its own (a hash, the ends of two texts) is done row by row.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from rollbook.core import columns as arrow
from rollbook.core import columns as physical
from rollbook.core import freeform
from rollbook.core.fields import FIELDS
from rollbook.core.ragged import Ragged
from rollbook.core.vocabulary import Vocabulary
from rollbook.inspect import measures
from rollbook.inspect.documents import derive, prompt_hash
from rollbook.inspect.records import Reader
from rollbook.inspect.scales import Scales

NUMBERS = (
    *("logprobs", "policy_logprobs", "ref_logprobs", "teacher_logprobs", "entropy", "values", "advantages"),
    *("returns", "token_level_reward", "loss_weights"),
)
"""The fields with a number for each response token."""
TEXTS = ("prompt_text", "response_text")
READ = (
    *("tokens", "prompt_length", "experience_type", "truncate_status", "action_mask", *NUMBERS),
    *("chosen", "reward", "metrics", "info", "messages", "multi_modal_inputs", *TEXTS),
)
"""The fields that are read of each record."""
_OPENING_TOKENS = 4000
_CLOSING_TOKENS = 480
_KNOWN_PROMPTS = 4096
_GRID = "image_grid_thw"
_SAID_BETWEEN = 4


def columns_of(batch: pa.RecordBatch) -> dict[str, Any]:
    """A scanned batch's columns: tensors as `Ragged`, what no record has left out."""
    found = {
        name: array for name, array in zip(batch.schema.names, batch.columns, strict=True) if array.type != pa.null()
    }
    return dict(arrow.from_arrays(found))


def real(column: Ragged) -> NDArray[np.float64]:
    """All values of a column, one row after the other, as numbers."""
    values = column.values[column.offsets[0] : column.offsets[-1]]
    if column.dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


class Bulk:
    """Measures pieces of a book; keeps the openings of prompts it has met, which a group's records share."""

    def __init__(self, reader: Reader, scales: Scales) -> None:
        self.reader = reader
        self.scales = scales
        self.rescaled = False
        """Whether a lens's range changed since this was set to False."""
        self.declared: dict[str, None] = {}
        """Parts of the reward that records declared, in the order they were met."""
        self._vocabulary: Vocabulary | None = None
        self._openings: OrderedDict[tuple[Any, ...], str] = OrderedDict()

    def rows(self, columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """The measured columns of `count` records, in their order, without their numbers."""
        rows: list[dict[str, Any]] = [{} for _ in range(count)]
        mask = _Mask(columns, count)
        self._vocabulary = self.reader.vocabulary
        for row, numbers in zip(rows, self._numbers(columns, mask, count), strict=True):
            row.update(numbers)
        for row, reward in zip(rows, physical.numbers(columns["reward"]) if "reward" in columns else (), strict=False):
            row["nans"] += reward is not None and reward != reward
        self._tokens(columns, rows, mask)
        self._texts(columns, rows, mask)
        return rows

    # --- numbers by token ---------------------------------------------------------------------------------------

    def _numbers(self, columns: Mapping[str, Any], mask: _Mask, count: int) -> list[dict[str, Any]]:
        """Records that have the same fields are measured together, which in most pieces are all of them."""
        there = {name: columns[name] for name in NUMBERS if isinstance(columns.get(name), Ragged)}
        lengths = np.zeros(count, dtype=np.int64)
        for column in there.values():
            lengths = np.maximum(lengths, column.lengths)
        has = np.zeros(count, dtype=np.int64)
        for bit, column in enumerate(there.values()):
            has |= (column.present & (column.lengths == lengths)).astype(np.int64) << bit
        rows: list[dict[str, Any]] = [dict(_UNKNOWN) for _ in range(count)]
        for signature in np.unique(has).tolist():
            chosen = (has == signature) & (lengths > 0)
            if not signature or not chosen.any():
                continue
            given = {}
            for bit, (name, column) in enumerate(there.items()):
                if signature >> bit & 1:
                    values = real(column)
                    given[name] = values if chosen.all() else values[np.repeat(chosen, column.lengths)]
            sizes = lengths[chosen]
            made = self._measured(given, mask.grid(chosen, sizes), sizes)
            for i, row in zip(np.flatnonzero(chosen).tolist(), made, strict=True):
                rows[i].update(row)
        return rows

    def _measured(
        self, given: dict[str, NDArray[np.float64]], mask: NDArray[np.bool_], sizes: NDArray[np.int64]
    ) -> list[dict[str, Any]]:
        starts = np.cumsum(sizes) - sizes
        bad = np.zeros(len(mask), dtype=np.bool_)
        for values in given.values():
            bad |= ~np.isfinite(values)
        lenses = derive(given, mask)
        self.rescaled |= self.scales.offer(lenses, mask)
        made: dict[str, list[Any]] = {"nans": np.add.reduceat(bad & mask, starts, dtype=np.int64).tolist()}
        wanted = [each for each in measures.METRICS if each[1] in lenses]
        if "advantage" in lenses:
            wanted.append(("advantage", "advantage", "mean"))
        for column, lens, how in wanted:
            shown = np.abs(lenses[lens]) if lens == "mismatch" else lenses[lens]
            keep = mask & np.isfinite(shown)
            counts = np.add.reduceat(keep, starts, dtype=np.int64)
            if how == "mean":
                sums = np.add.reduceat(np.where(keep, shown, 0).astype(np.float64), starts)
                found = sums / np.maximum(counts, 1)
            else:
                found = np.maximum.reduceat(np.where(keep, shown, -np.inf), starts).astype(np.float64)
            made[column] = [value if known else None for value, known in zip(found.tolist(), counts > 0, strict=True)]
        return [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]

    # --- what each row has of its own ---------------------------------------------------------------------------

    def _tokens(self, columns: Mapping[str, Any], rows: list[dict[str, Any]], mask: _Mask) -> None:
        tokens, chosen = columns.get("tokens"), columns.get("chosen")
        prompts = physical.numbers(columns["prompt_length"])
        for i, row in enumerate(rows):
            ids = _row(tokens, i)
            prompt = ids[: prompts[i]]
            response = ids[prompts[i] :]
            if not len(response) and isinstance(chosen, Ragged):
                response = _row(chosen, i)
            share, loop, digest = measures.own_tokens(response, mask.row(i, len(response)))
            row.update(prompt=prompt_hash(prompt), digest=digest, repetition=share, loop_at=loop)
            row["ids"] = prompt, response

    def _texts(self, columns: Mapping[str, Any], rows: list[dict[str, Any]], mask: _Mask) -> None:
        nothing: list[Any] = [None] * len(rows)
        prompts, responses = (
            physical.decode(FIELDS[name], columns) or nothing for name in TEXTS
        )  # a text that is not UTF-8 stands aside
        messages, infos, metrics = (
            physical.texts(columns[name]) if name in columns else nothing for name in ("messages", "info", "metrics")
        )
        kinds = physical.texts(columns["experience_type"])
        grids = _grids(columns.get("multi_modal_inputs"), len(rows))
        for i, row in enumerate(rows):
            prompt, response = row.pop("ids")
            turns, calls, images = measures.spoken_in(messages[i] or "")
            said = responses[i]
            if said is None:
                said = self._decoded(response[-_CLOSING_TOKENS:])
            if not turns:
                turns = mask.turns(i) if kinds[i] == "multi_turn" else 1
            row.update(
                turns=turns,
                tool_calls=calls or (responses[i] or "").count("<tool_call>"),
                images=images or grids[i],
                opening=self._opening(row["prompt"], prompt, prompts[i], messages[i]),
                closing=measures.closing_of(said),
                kept=_entry(infos[i], "kept", str),
                parts=_parts(metrics[i]),
                measured=1,
            )
            parts = _entry(infos[i], "reward_parts", list)
            if parts is not None:
                self.declared |= dict.fromkeys(measures.declared_in({"reward_parts": parts}))
            if _entry(infos[i], "error", object) is not None:
                row["status"] = "error"

    def _decoded(self, ids: NDArray[Any]) -> str:
        return "" if self._vocabulary is None or not len(ids) else self._vocabulary.text_and_ends(ids)[0]

    def _opening(self, key: str, ids: NDArray[Any], text: str | None, messages: str | None) -> str:
        # By what it is read from, too: a prompt's text can be redacted.
        known = (key, hash(text), hash(messages), self._vocabulary is None)
        found = self._openings.get(known)
        if found is None:
            found = measures.asked_in(_loads(messages)) if messages else ""
            if not found:
                found = measures.opening_of(self._decoded(ids[:_OPENING_TOKENS]) if text is None else text)
            self._openings[known] = found
            if len(self._openings) > _KNOWN_PROMPTS:
                self._openings.popitem(last=False)
        return found


_UNKNOWN = {"nans": 0, "advantage": None, **{column: None for column, _, _ in measures.METRICS}}


class _Mask:
    """Which response tokens are trained on; all of them where no mask says otherwise."""

    def __init__(self, columns: Mapping[str, Any], count: int) -> None:
        column = columns.get("action_mask")
        self.column = column if isinstance(column, Ragged) else None
        self.bits = np.zeros(0, dtype=np.bool_)
        self.offsets = np.zeros(count + 1, dtype=np.int64)
        if self.column is not None:
            self.bits = real(self.column) != 0
            self.offsets = self.column.offsets - self.column.offsets[0]
        self.cut = arrow.truncated(dict(columns), count)
        """Records whose prompt was cut, on which nothing is trained."""

    def grid(self, chosen: NDArray[np.bool_], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The masks of some records, one after the other, each of its size."""
        made = np.repeat(~self.cut[chosen], sizes)
        if self.column is None:
            return made
        lengths = self.column.lengths
        fits = self.column.present[chosen] & (lengths[chosen] == sizes)
        used = np.zeros(len(lengths), dtype=np.bool_)
        used[np.flatnonzero(chosen)[fits]] = True
        made[np.repeat(fits, sizes)] = self.bits[np.repeat(used, lengths)]
        return made

    def row(self, i: int, size: int) -> NDArray[np.bool_]:
        """[size] The mask of one record; all True where it has none of that size."""
        if self.column is None or self.column.lengths[i] != size or not self.column.present[i]:
            return np.ones(size, dtype=np.bool_)
        return self.bits[self.offsets[i] : self.offsets[i + 1]]

    def turns(self, i: int) -> int:
        """How often the model speaks, by the mask: stretches of trained tokens with what a tool or a user says between
        them, which is more than a few tokens; 1 without a mask."""
        if self.column is None or not self.column.present[i]:
            return 1
        trained = np.flatnonzero(self.bits[self.offsets[i] : self.offsets[i + 1]])
        return 1 + int((np.diff(trained) > _SAID_BETWEEN).sum())


def _row(column: Any, i: int) -> NDArray[Any]:
    if not isinstance(column, Ragged):
        return np.zeros(0, dtype=np.int64)
    return column.values[int(column.offsets[i]) : int(column.offsets[i + 1])]


def _grids(column: Any, count: int) -> list[int]:
    """How many images the media of each record say they are."""
    found = [0] * count
    if column is None:
        return found
    bounds = arrow.offsets(column, len(column.values))
    entries = column.values
    keys = entries.field("key").to_pylist()
    for i in range(count):
        for at in range(int(bounds[i]), int(bounds[i + 1])):
            if keys[at] == _GRID:
                shape: Sequence[int] = entries.field("shape")[at].as_py() or (0,)
                found[i] = shape[0] if len(shape) == 2 else 0
    return found


def _loads(text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return None


def _entry(info: str | None, name: str, kind: type) -> Any:
    """An entry of `info` of this kind; nothing if there is none, which its text tells without being read."""
    if info is None or f'"{name}"' not in info:
        return None
    found = _loads(info)
    entry = found.get(name) if isinstance(found, dict) else None
    return entry if isinstance(entry, kind) else None


def _parts(metrics: str | None) -> str:
    if metrics is None or metrics == "{}":
        return "{}"
    found = _loads(metrics)
    if not isinstance(found, dict):
        return "{}"
    if '"$scalar"' in metrics:
        # Numbers of numpy; tensors, which would need torch, are no parts.
        for name, value in found.items():
            if isinstance(value, dict) and list(value) == ["$scalar"]:
                found[name] = freeform.loads(orjson.dumps(value).decode())
    return json.dumps(measures.parts_of(found))
