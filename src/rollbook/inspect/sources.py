"""Sources of the viewer: `open_source(path)` opens a book or files as a `Source`; `Watcher` follows it.

Invariant: opening and reading change nothing. A path that cannot be opened is rejected with what it is and what was
expected.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from rollbook.book import reports
from rollbook.book.book import LEDGER, TRAIN, Book
from rollbook.book.book import open as open_book
from rollbook.book.consumer import find_consumer
from rollbook.book.errors import BookError
from rollbook.book.ledger import Transaction, chunks, parse_object
from rollbook.book.read import find_seqs, get_uids
from rollbook.core import columns as physical
from rollbook.core import freeform
from rollbook.core.addresses import POSTGRES, RAY, check_book_is_here, redacted
from rollbook.core.errors import WireError
from rollbook.core.fields import FIELDS
from rollbook.core.files import check_regular
from rollbook.core.ids import record_step
from rollbook.core.metrics import Progress
from rollbook.core.ragged import Ragged
from rollbook.core.vocabulary import Vocabulary
from rollbook.inspect import measures
from rollbook.inspect.index import VOID_REASONS, Index, Scales
from rollbook.inspect.records import Reader, TokenizerLike, load_vocabulary
from rollbook.inspect.trajectory import derive_lenses, hash_prompt

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.inspect.index import Index
    from rollbook.inspect.trajectory import Trajectory


# --- measuring in bulk ----------------------------------------------------------------------------------------------

NUMBER_FIELDS = (
    *("logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "entropy", "values", "advantages"),
    *("returns", "token_level_reward", "loss_weights"),
)
"""Fields with a number per response token."""
TEXT_FIELDS = ("prompt_text", "response_text")
READ_FIELDS = (
    *("tokens", "prompt_length", "experience_type", "truncate_status", "action_mask", *NUMBER_FIELDS),
    *("chosen", "reward", "metrics", "info", "messages", "multi_modal_inputs", *TEXT_FIELDS),
)
"""Fields that are read of each record."""
_OPENING_TOKENS = 4000
_CLOSING_TOKENS = 480
_MAX_CACHED_PROMPTS = 4096
_GRID = "image_grid_thw"
_MAX_GAP_TOKENS = 4


def read_columns(batch: pa.RecordBatch) -> dict[str, Any]:
    """Return the columns of a scanned batch: tensors as `Ragged`, empty columns omitted."""
    columns = {
        name: array for name, array in zip(batch.schema.names, batch.columns, strict=True) if array.type != pa.null()
    }
    return dict(physical.from_arrays(columns))


def to_floats(column: Ragged) -> NDArray[np.float64]:
    """Return all values of a column, concatenated, as numbers."""
    values = column.values[column.offsets[0] : column.offsets[-1]]
    if column.dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


class BatchMeasurer:
    """Measures pieces of a book; caches the openings of prompts, which the records of a group share."""

    def __init__(self, reader: Reader, scales: Scales) -> None:
        self.reader = reader
        self.scales = scales
        self.rescaled = False
        """Whether a lens's range changed since this was set to False."""
        self.declared: dict[str, None] = {}
        """Declared reward parts, in order of appearance."""
        self._vocabulary: Vocabulary | None = None
        self._openings: OrderedDict[tuple[Any, ...], str] = OrderedDict()

    def rows(self, columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """Return the measured columns of `count` records, in order, without their numbers."""
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
        """Measure records with the same fields together, which in most pieces are all of them."""
        number_columns = {name: columns[name] for name in NUMBER_FIELDS if isinstance(columns.get(name), Ragged)}
        lengths = np.zeros(count, dtype=np.int64)
        for column in number_columns.values():
            lengths = np.maximum(lengths, column.lengths)
        has = np.zeros(count, dtype=np.int64)
        for bit, column in enumerate(number_columns.values()):
            has |= (column.present & (column.lengths == lengths)).astype(np.int64) << bit
        rows: list[dict[str, Any]] = [dict(_NO_METRICS) for _ in range(count)]
        for signature in np.unique(has).tolist():
            chosen = (has == signature) & (lengths > 0)
            if not signature or not chosen.any():
                continue
            fields = {}
            for bit, (name, column) in enumerate(number_columns.items()):
                if signature >> bit & 1:
                    values = to_floats(column)
                    fields[name] = values if chosen.all() else values[np.repeat(chosen, column.lengths)]
            sizes = lengths[chosen]
            measured = self._measured(fields, mask.grid(chosen, sizes), sizes)
            for i, row in zip(np.flatnonzero(chosen).tolist(), measured, strict=True):
                rows[i].update(row)
        return rows

    def _measured(
        self, fields: dict[str, NDArray[np.float64]], mask: NDArray[np.bool_], sizes: NDArray[np.int64]
    ) -> list[dict[str, Any]]:
        starts = np.cumsum(sizes) - sizes
        bad = np.zeros(len(mask), dtype=np.bool_)
        for values in fields.values():
            bad |= ~np.isfinite(values)
        lenses = derive_lenses(fields, mask)
        self.rescaled |= self.scales.offer(lenses, mask)
        measured: dict[str, list[Any]] = {"nans": np.add.reduceat(bad & mask, starts, dtype=np.int64).tolist()}
        metrics = [metric for metric in measures.TOKEN_METRICS if metric[1] in lenses]
        if "advantage" in lenses:
            metrics.append(("advantage", "advantage", "mean"))
        for column, lens, statistic in metrics:
            shown = np.abs(lenses[lens]) if lens == "mismatch" else lenses[lens]
            keep = mask & np.isfinite(shown)
            counts = np.add.reduceat(keep, starts, dtype=np.int64)
            if statistic == "mean":
                sums = np.add.reduceat(np.where(keep, shown, 0).astype(np.float64), starts)
                means = sums / np.maximum(counts, 1)
            else:
                means = np.maximum.reduceat(np.where(keep, shown, -np.inf), starts).astype(np.float64)
            measured[column] = [
                value if has_tokens else None for value, has_tokens in zip(means.tolist(), counts > 0, strict=True)
            ]
        return [dict(zip(measured, values, strict=True)) for values in zip(*measured.values(), strict=True)]

    # --- tokens and texts ---------------------------------------------------------------------------------------

    def _tokens(self, columns: Mapping[str, Any], rows: list[dict[str, Any]], mask: _Mask) -> None:
        tokens, chosen = columns.get("tokens"), columns.get("chosen")
        prompts = physical.numbers(columns["prompt_length"])
        for i, row in enumerate(rows):
            ids = _row(tokens, i)
            prompt = ids[: prompts[i]]
            response = ids[prompts[i] :]
            if not len(response) and isinstance(chosen, Ragged):
                response = _row(chosen, i)
            share, loop, digest = measures.measure_sampled_tokens(response, mask.row(i, len(response)))
            row.update(prompt=hash_prompt(prompt), digest=digest, repetition=share, loop_at=loop)
            row["ids"] = prompt, response

    def _texts(self, columns: Mapping[str, Any], rows: list[dict[str, Any]], mask: _Mask) -> None:
        nothing: list[Any] = [None] * len(rows)
        prompts, responses = (
            physical.decode(FIELDS[name], columns) or nothing for name in TEXT_FIELDS
        )  # text that is not UTF-8 is skipped
        messages, infos, metrics = (
            physical.texts(columns[name]) if name in columns else nothing for name in ("messages", "info", "metrics")
        )
        kinds = physical.texts(columns["experience_type"])
        grids = _count_images(columns.get("multi_modal_inputs"), len(rows))
        for i, row in enumerate(rows):
            prompt, response = row.pop("ids")
            turns, calls, images = measures.count_messages(messages[i] or "")
            response_text = responses[i]
            if response_text is None:
                response_text = self._decoded(response[-_CLOSING_TOKENS:])
            if not turns:
                turns = mask.turns(i) if kinds[i] == "multi_turn" else 1
            row.update(
                turns=turns,
                tool_calls=calls or (responses[i] or "").count("<tool_call>"),
                images=images or grids[i],
                opening=self._opening(row["prompt"], prompt, prompts[i], messages[i]),
                closing=measures.extract_closing(response_text),
                kept=_info_entry(infos[i], "kept", str),
                parts=_parts(metrics[i]),
                measured=1,
            )
            parts = _info_entry(infos[i], "reward_parts", list)
            if parts is not None:
                self.declared |= dict.fromkeys(measures.extract_declared_parts({"reward_parts": parts}))
            if _info_entry(infos[i], "error", object) is not None:
                row["status"] = "error"

    def _decoded(self, ids: NDArray[Any]) -> str:
        return "" if self._vocabulary is None or not len(ids) else self._vocabulary.decode_with_ends(ids)[0]

    def _opening(self, key: str, ids: NDArray[Any], text: str | None, messages: str | None) -> str:
        # Keyed by its source too, since a prompt's text can be redacted.
        cache_key = (key, hash(text), hash(messages), self._vocabulary is None)
        cached = self._openings.get(cache_key)
        if cached is None:
            cached = measures.extract_user_message(_loads(messages)) if messages else ""
            if not cached:
                cached = measures.extract_opening(self._decoded(ids[:_OPENING_TOKENS]) if text is None else text)
            self._openings[cache_key] = cached
            if len(self._openings) > _MAX_CACHED_PROMPTS:
                self._openings.popitem(last=False)
        return cached


_NO_METRICS = {"nans": 0, "advantage": None, **{column: None for column, _, _ in measures.TOKEN_METRICS}}


class _Mask:
    """Masks of response tokens; all tokens are trained on without a mask."""

    def __init__(self, columns: Mapping[str, Any], count: int) -> None:
        column = columns.get("action_mask")
        self.column = column if isinstance(column, Ragged) else None
        self.bits = np.zeros(0, dtype=np.bool_)
        self.offsets = np.zeros(count + 1, dtype=np.int64)
        if self.column is not None:
            self.bits = to_floats(self.column) != 0
            self.offsets = self.column.offsets - self.column.offsets[0]
        self.prompt_truncated = physical.truncated(dict(columns), count)
        """[N] records whose prompt was truncated, which are not trained on."""

    def grid(self, chosen: NDArray[np.bool_], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the concatenated masks of records, each of its size."""
        grid = np.repeat(~self.prompt_truncated[chosen], sizes)
        if self.column is None:
            return grid
        lengths = self.column.lengths
        fits = self.column.present[chosen] & (lengths[chosen] == sizes)
        used = np.zeros(len(lengths), dtype=np.bool_)
        used[np.flatnonzero(chosen)[fits]] = True
        grid[np.repeat(fits, sizes)] = self.bits[np.repeat(used, lengths)]
        return grid

    def row(self, i: int, size: int) -> NDArray[np.bool_]:
        """Return the mask [size] of a record; all True if it has no mask of that size."""
        if self.column is None or self.column.lengths[i] != size or not self.column.present[i]:
            return np.ones(size, dtype=np.bool_)
        return self.bits[self.offsets[i] : self.offsets[i + 1]]

    def turns(self, i: int) -> int:
        """Return the number of assistant turns by the mask: runs of trained tokens separated by more than a few others;
        1 without a mask.
        """
        if self.column is None or not self.column.present[i]:
            return 1
        trained = np.flatnonzero(self.bits[self.offsets[i] : self.offsets[i + 1]])
        return 1 + int((np.diff(trained) > _MAX_GAP_TOKENS).sum())


def _row(column: Ragged | None, i: int) -> NDArray[Any]:
    if not isinstance(column, Ragged):
        return np.zeros(0, dtype=np.int64)
    return column.values[int(column.offsets[i]) : int(column.offsets[i + 1])]


def _count_images(column: pa.Array | None, count: int) -> list[int]:
    """Return the number of images of each record."""
    grids = [0] * count
    if column is None:
        return grids
    bounds = physical.offsets(column, len(column.values))
    entries = column.values
    keys = entries.field("key").to_pylist()
    for i in range(count):
        for at in range(int(bounds[i]), int(bounds[i + 1])):
            if keys[at] == _GRID:
                shape: Sequence[int] = entries.field("shape")[at].as_py() or (0,)
                grids[i] = shape[0] if len(shape) == 2 else 0
    return grids


def _loads(text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return None


def _info_entry(info: str | None, name: str, kind: type) -> Any:
    """Return an entry of `info` of this type, or `None`; the JSON text is checked before it is parsed."""
    if info is None or f'"{name}"' not in info:
        return None
    content = _loads(info)
    entry = content.get(name) if isinstance(content, dict) else None
    return entry if isinstance(entry, kind) else None


def _parts(metrics: str | None) -> str:
    if metrics is None or metrics == "{}":
        return "{}"
    content = _loads(metrics)
    if not isinstance(content, dict):
        return "{}"
    if '"$scalar"' in metrics:
        # numpy numbers; tensors, which would need torch, are not parts.
        for name, value in content.items():
            if isinstance(value, dict) and list(value) == ["$scalar"]:
                content[name] = freeform.loads(orjson.dumps(value).decode())
    return json.dumps(measures.extract_numbers(content))


# --- following ------------------------------------------------------------------------------------------------------

LEDGER_ROWS = 4000
"""Ledger rows per transaction."""
BATCH_RECORDS = 512
BATCH_TOKENS = 1 << 20
"""Maximum number of records and tokens measured together, which bounds the memory."""
REFRESH_SECONDS = 0.5
"""Time that a refresh works before it publishes its results."""

_MAX_PROBLEMS = 20
_LEDGER_COLUMNS = (
    *("uid", "gid", "batch", "task", "run", "reward", "scored", "length", "prompt_tokens", "response_tokens"),
    *("trained_tokens", "version_min", "version_max", "finish_reason", "kind", "group_size", "parent", "evaluation"),
    *("admitted", "removed_reason"),
)
"""Ledger columns that the index copies; the last is `removed_reason` in the ledger."""
_SELECTED_COLUMNS = ", ".join(
    f"records.{name}" for name in ("seq", *_LEDGER_COLUMNS[:-1], "removed_reason", "step", "truncate_status")
)
_TEXT_CHANGES = ("revised", "redacted")
_REMOVALS = ("deleted", "removed")
_FULL_RELOADS = ("rewound", "repaired")
"""Events after which all records are read again."""
_REMOVED_VALUES = {"opening": "", "closing": "", "parts": "{}", "kept": None, "measured": 1, "digest": None}


def _state_sql(consumer: int) -> str:
    """Return the SQL of a record's state; records in a consumer's inbox are waiting."""
    return "queue.state" if consumer < 0 else "COALESCE(queue.state, 'waiting')"


class Follower:
    """Keeps an index up to date with a book.

    Args:
        book: The book to follow.
        index: The index to fill.
        reader: Reads the book's records.
        seqs: Numbers of the records to read, once; by default all, and later ones.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(eid={"batch": 3, "task": 1}, tokens=[1, 2, 3], reward=1.0)])
    >>> index = Index()
    >>> follower = Follower(book, index, Reader(book))
    >>> follower.refresh(), follower.refresh()
    ({3}, None)
    >>> index.query("SELECT step, reward, state, measured FROM samples")
    [(3, 1.0, 'waiting', 1)]
    >>> index.close()
    """

    def __init__(self, book: Book, index: Index, reader: Reader, seqs: Sequence[int] | None = None) -> None:
        self.book = book
        self._remaining_seqs = seqs
        self.index = index
        self.reader = reader
        self.problems: list[str] = []
        """Read errors, at most the first 20."""
        self._seq = 0
        self._event: int | None = None
        self._last_metrics_event = 0
        """Last event that logged metrics."""
        self._has_trained = False
        """Whether anything was trained on; waiting records have no staleness then."""
        self._version_history = _VersionHistory()
        self._bulk: BatchMeasurer | None = None

    def refresh(self, seconds: float = REFRESH_SECONDS) -> set[int] | None:
        """Read changes, then measure, for about `seconds`; return the changed steps, or `None` if nothing was left to
        do.
        """
        end = time.monotonic() + seconds
        while True:
            busy = self._read_ledger() or self._set_lags() or self._measure()
            if not busy or time.monotonic() > end:
                changed = self.index.update_summaries()
                if changed or not busy:
                    return changed or None

    # --- the ledger ---------------------------------------------------------------------------------------------

    def _read_ledger(self) -> bool:
        """Read new records or events in one transaction; return whether there were any."""
        # Concurrent writers may commit smaller numbers after larger ones, so nothing is read beyond the bounds.
        seq_bound, event_bound = self.book.ledger.bounds()
        with self.book.ledger.read() as tx:
            train = find_consumer(tx, TRAIN)
            consumer = -1 if train is None else train.id
            if self._event is None:
                # Later changes are read as events; earlier ones are in the rows.
                self._event = event_bound
                self._version_history.read(tx, 0, self._event)
                if self._remaining_seqs is not None:
                    self._version_history.read_records(tx)
            if not self._seq:  # also after a rewind, which may undo all training
                trained = tx.first("SELECT SUM(n) FROM tallies WHERE consumer = ? AND state = 'trained'", (consumer,))
                self._has_trained = bool(trained and trained[0])
            if self._remaining_seqs is not None:
                seqs, self._remaining_seqs = self._remaining_seqs[:LEDGER_ROWS], self._remaining_seqs[LEDGER_ROWS:]
                rows = self._read_rows(tx, seqs, consumer)
                self.index.put(rows)
                return bool(rows)
            records = tx.all(
                f"SELECT {_SELECTED_COLUMNS}, {_state_sql(consumer)}, queue.reason FROM records LEFT JOIN queue ON "
                "queue.consumer = ? AND queue.seq = records.seq WHERE records.seq > ? AND records.seq <= ? "
                "ORDER BY records.seq LIMIT ?",
                (consumer, self._seq, seq_bound, LEDGER_ROWS),
            )
            if records:
                bounds = (records[0][0], records[-1][0])
                events = tx.all(f"{_SELECT_EVENTS} seq >= ? AND seq <= ? ORDER BY id", bounds)
                rows = self._rows(records, events, consumer)
            else:
                rows, changed, last = self._changes(tx, consumer, event_bound)
        if records:
            self.index.put(rows)
            self._seq = records[-1][0]
            return True
        if last == self._event:
            return False
        if changed is None:
            self._seq = 0
        elif rows:
            self.index.put(rows)
            self.index.forget(changed)
        self._event = last
        if self._last_metrics_event:
            self.index.set_fact("logged", self._last_metrics_event)  # notifies pages
        return True

    def _changes(
        self, tx: Transaction, consumer: int, bound: int
    ) -> tuple[list[dict[str, Any]], list[int] | None, int]:
        """Return rows of records changed since the last event, those whose text changed (`None`: all must be read
        again), and the last event.
        """
        events = tx.all(
            "SELECT id, kind, seq, consumer FROM events WHERE id > ? AND id <= ? AND kind <> 'admitted' "
            "ORDER BY id LIMIT ?",
            (self._event, bound, LEDGER_ROWS),
        )
        if not events:
            return [], [], bound
        last = events[-1][0]
        self._version_history.read(tx, self._event or 0, last)
        kinds: dict[int, set[str]] = {}
        for event, kind, seq, whose in events:
            if kind == reports.METRICS_KIND:
                self._last_metrics_event = event
            if kind == "trained" and whose == consumer:
                self._reset_lags()
            if kind in _FULL_RELOADS:
                return [], None, last
            if seq is not None and seq <= self._seq and (whose in (None, consumer)):
                kinds.setdefault(seq, set()).add(kind)
        rows = self._read_rows(tx, sorted(kinds), consumer)
        other = {seq for seq, met in kinds.items() if not met.isdisjoint((*_TEXT_CHANGES, *_REMOVALS))}
        for row in rows:
            if row["n"] in other and row["removed_reason"] is None:
                row["measured"] = 0
            elif row["removed_reason"] in VOID_REASONS:
                row.update(_REMOVED_VALUES)
        return rows, sorted(other), last

    def _reset_lags(self) -> None:
        """Reset the lags of waiting records when the first record was trained on: lags are then set at training."""
        if not self._has_trained:
            self._has_trained = True
            waiting = self.index.query("SELECT n FROM samples WHERE state IN ('waiting', 'leased')")
            self.index.put({"n": n, "staleness": None, "moment": None} for (n,) in waiting)

    def _read_rows(self, tx: Transaction, seqs: Sequence[int], consumer: int) -> list[dict[str, Any]]:
        """Return the `samples` rows of records."""
        records: list[Any] = []
        events: list[Any] = []
        for marks, chunk in chunks(seqs):
            records += tx.all(
                f"SELECT {_SELECTED_COLUMNS}, {_state_sql(consumer)}, queue.reason FROM records LEFT JOIN queue ON "
                f"queue.consumer = ? AND queue.seq = records.seq WHERE records.seq IN ({marks}) ORDER BY records.seq",
                (consumer, *chunk),
            )
            events += tx.all(f"{_SELECT_EVENTS} seq IN ({marks}) ORDER BY id", chunk)
        return self._rows(records, events, consumer)

    def _rows(self, records: Iterable[Any], events: Iterable[Any], consumer: int) -> list[dict[str, Any]]:
        """Return `samples` rows from rows of the ledger."""
        admitted: dict[int, int] = {}
        trained: dict[int, dict[Any, tuple[int, int | None]]] = {}
        for event, seq, kind, event_consumer, step, lease in events:
            if kind == "trained" and event_consumer == consumer:
                trained.setdefault(seq, {})[lease] = (event, step)
            elif kind == "voided" and event_consumer == consumer:
                trained.get(seq, {}).pop(lease, None)
            elif kind in ("admitted", "recovered"):
                admitted[seq] = event
        rows = []
        for seq, *values, turn, truncate_status, state, reason in records:
            row = {"n": seq, **dict(zip(_LEDGER_COLUMNS, values, strict=True))}
            last = max(trained.get(seq, {}).values(), default=None)
            row["step"] = record_step(row["batch"], row["version_min"])
            row["turn"] = turn
            failed = (
                row["removed_reason"] is not None and row["length"] == 0 and row["removed_reason"] not in VOID_REASONS
            )
            status = measures.classify_status(row["finish_reason"], truncate_status, row["response_tokens"])
            row["status"] = "error" if failed else status
            row["state"] = "evaluation" if row["evaluation"] else _STATE_NAMES.get(state, state or "")
            row["reason"] = reason
            row["trained_step"] = None if last is None else last[1]
            waits = self._has_trained and state in _WAITING_STATES
            row["moment"] = last[0] if last is not None else None if waits else admitted.get(seq)
            row["staleness"] = None
            row["evaluation"] = int(row["evaluation"])
            if row["removed_reason"] is not None:
                row["measured"] = 1
            if row["version_max"] is not None:
                self._version_history.see(admitted.get(seq, 0), row["version_max"])
            rows.append(row)
        return rows

    def _set_lags(self) -> bool:
        """Set the staleness of records once all earlier ones are known; return whether any were set."""
        pending = self.index.query(
            "SELECT n, moment, version_min FROM samples "
            "WHERE staleness IS NULL AND version_min IS NOT NULL AND moment IS NOT NULL LIMIT ?",
            (LEDGER_ROWS,),
        )
        self.index.put(
            {"n": n, "staleness": max(0, self._version_history.at(moment) - version)} for n, moment, version in pending
        )
        return bool(pending)

    # --- measuring ----------------------------------------------------------------------------------------------

    def _measure(self) -> bool:
        """Measure one piece of unmeasured records; return whether there was any."""
        waiting = self.index.query(
            "SELECT n, length FROM samples WHERE measured = 0 ORDER BY n DESC LIMIT ?", (BATCH_RECORDS,)
        )
        if not waiting:
            return False
        total, ns = 0, list[int]()
        for n, length in waiting:
            if ns and total + length > BATCH_TOKENS:
                break
            ns.append(n)
            total += length
        if self._bulk is None:
            self._bulk = BatchMeasurer(self.reader, self.index.scales)
        self.index.put(self._measured(sorted(ns)))
        self.index.declare(self._bulk.declared)
        self.index.set_fact("tokenized", ["ids" if self.reader.vocabulary is None else "exact"])
        if self._bulk.rescaled:
            self._bulk.rescaled = False
            self.index.set_fact("scales", self.index.scales.as_dict())
        return True

    def _measured(self, ns: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Return the measured columns of records; unreadable ones are reported once."""
        try:
            rows = self._read(ns)
        except (BookError, WireError, ValueError, OSError) as error:
            if len(ns) > 1:
                half = len(ns) // 2
                yield from self._measured(ns[:half])
                yield from self._measured(ns[half:])
                return
            with self.book.ledger.read():
                pass  # a closed or unreachable book is not damage; that raises here
            rows = {}
            if len(self.problems) < _MAX_PROBLEMS:
                self.problems.append(f"record number {ns[0]}: {error}")
        # Just removed: the ledger's event follows.
        yield from ({"n": n, **rows.get(n, {"measured": 1})} for n in ns)

    def _read(self, ns: Sequence[int]) -> dict[int, dict[str, Any]]:
        bulk = self._bulk
        rows: dict[int, dict[str, Any]] = {}
        if bulk is None:
            return rows
        for _, run in groupby(enumerate(ns), key=lambda pair: pair[1] - pair[0]):
            numbers = [n for _, n in run]
            selection = self.book.where(("seq", ">=", numbers[0]), ("seq", "<=", numbers[-1]))
            for batch in selection.scan(("seq", *READ_FIELDS), rows=BATCH_RECORDS):
                columns = read_columns(batch)
                seqs = columns.pop("seq").to_pylist()
                rows.update(zip(seqs, bulk.rows(columns, len(seqs)), strict=True))
        return rows


_SELECT_EVENTS = (
    "SELECT id, seq, kind, consumer, step, lease FROM events "
    "WHERE kind IN ('admitted', 'recovered', 'trained', 'voided') AND"
)
_STATE_NAMES = {"cooling": "waiting"}
_WAITING_STATES = ("waiting", "leased", "cooling")


class _VersionHistory:
    """The highest policy version seen or announced by each event of the ledger."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int, int]] = []
        self._ids: list[int] = []
        self._tops: list[int] = []
        self._top = -1
        self._is_current = True

    def see(self, event: int, version: int) -> None:
        """Add the version of a record that arrived with this event."""
        if version > self._top:
            self._top = version
            self._add(event, version, -1)

    def read_records(self, tx: Transaction) -> None:
        """Read the first record of each version."""
        firsts = tx.all(
            "SELECT MIN(seq), version_max FROM records WHERE version_max IS NOT NULL GROUP BY version_max ORDER BY 1"
        )
        admitted: dict[int, int] = {}
        for marks, chunk in chunks([seq for seq, _ in firsts]):
            admitted |= {
                seq: event
                for event, seq, kind, *_ in tx.all(f"{_SELECT_EVENTS} seq IN ({marks}) ORDER BY id", chunk)
                if kind in ("admitted", "recovered")
            }
        for seq, version in firsts:
            self.see(admitted.get(seq, 0), version)

    def read(self, tx: Transaction, after: int, last: int) -> None:
        """Read announcements and rewinds among events."""
        for event, kind, detail in tx.all(
            "SELECT id, kind, detail FROM events WHERE id > ? AND id <= ? AND kind IN ('announced', 'rewound') "
            "ORDER BY id",
            (after, last),
        ):
            content = parse_object(detail, "an event's detail") if detail else {}
            version, back = content.get("version"), content.get("event")
            if kind == "announced" and isinstance(version, int):
                self._add(event, version, -1)
            elif kind == "rewound" and isinstance(back, int):
                self._add(event, 0, back)
                self._top = -1

    def _add(self, event: int, version: int, back: int) -> None:
        self._points.append((event, version, back))
        self._is_current = False

    def at(self, event: int) -> int:
        """Return the highest version at an event; 0 before any."""
        if not self._is_current:
            self._ids, self._tops = [], []
            for when, version, back in sorted(self._points):
                top = self._tops[-1] if self._tops else 0
                if back >= 0:
                    index = bisect_right(self._ids, back) - 1
                    top = self._tops[index] if index >= 0 else 0
                self._ids.append(when)
                self._tops.append(max(top, version))
            self._is_current = True
        index = bisect_right(self._ids, event) - 1
        return self._tops[index] if index >= 0 else 0


BOOK, CONFIG = "book", "config.yaml"
"""Files of a run's folder, as `rollbook.train.run` creates them."""
_MAX_DEPTH = 3
_MAX_LISTED = 20
_TEXT_COLUMNS = ("prompt_text", "response_text", "tokens", "prompt_length")


class Source(Protocol):
    """A run for the viewer: its samples are written to an index, and each can be read as a trajectory."""

    name: str
    kind: str
    """`book`, or the name of a format."""

    @property
    def changed(self) -> float | None:
        """Return the time of the last write in seconds since 1970, or `None` if unknown."""

    @property
    def problems(self) -> list[str]:
        """Return read errors so far, one sentence each."""

    def refresh(self, index: Index) -> set[int] | None:
        """Update the index, completely or in part; return the changed steps, or `None` if there was nothing to do."""

    def trajectories(self, uids: Sequence[str]) -> list[Trajectory]:
        """Return samples in this order; `KeyError` names an unknown one."""

    def record(self, uid: str) -> dict[str, Any]:
        """Return a record as strict JSON."""

    def media(self, sha256: str) -> tuple[bytes, str] | None:
        """Return the bytes and type of a picture."""

    def history(self, uid: str) -> list[dict[str, Any]] | None:
        """Return the ledger's entries of a record, in order; `None` without a ledger."""

    def sql(self, query: str, *, seconds: float, rows: int) -> dict[str, Any]:
        """Run a read-only statement: {columns, rows, truncated}; `ValueError` without tables."""

    def close(self) -> None:
        """Close all files."""


class BookSource:
    """A book as a `Source`.

    >>> import rollbook
    >>> from rollbook.inspect.index import Index
    >>> book = rollbook.open("memory:")
    >>> _ = book.append(rollbook.Experience(eid={"batch": 3, "task": 1, "suffix": "a"}, tokens=[1, 2, 3], reward=1.0))
    >>> source, index = BookSource(book), Index()
    >>> load(source, index)
    >>> index.query("SELECT uid, step, reward FROM samples")
    [('3/1/0/0/a', 3, 1.0)]
    >>> [entry["kind"] for entry in source.history("3/1/0/0/a")]
    ['admitted']
    >>> source.sql("select count(*) as n from experiences", seconds=10, rows=10)
    {'columns': ['n'], 'rows': [[1]], 'truncated': False}
    >>> source.close(), index.close()
    (None, None)
    """

    kind = "book"
    seqs: list[int] | None = None
    """Numbers of the records to index; `None`: all, and later ones."""
    _follower: Follower | None = None

    def __init__(self, book: Book, *, vocabulary: Vocabulary | None = None, name: str | None = None) -> None:
        self.book = book
        self.name = name or run_name(book.url)
        self.reader = Reader(book, vocabulary)

    @property
    def changed(self) -> float | None:
        """See `Source`."""
        try:
            with self.book.ledger.read() as tx:
                row = tx.first("SELECT time FROM events ORDER BY id DESC LIMIT 1")
        except BookError:  # the watcher reports the reason
            return None
        return None if row is None else float(row[0])

    def metrics(self) -> list[tuple[int, dict[str, float]]]:
        """Return the logged metrics of each step, as `Book.metrics`."""
        return self.book.metrics()

    def find_seqs(self, ids: Sequence[str]) -> list[int]:
        """Return the numbers of all records in the groups with these ids, or in the groups of records with these ids.

        An id may be a prefix; of a prefix with many matches, the first nine count.
        """
        gids: dict[str, None] = {}
        with self.book.ledger.read() as tx:
            for name in ids:
                if tx.all("SELECT 1 FROM records WHERE gid = ? LIMIT 1", (name,)):
                    gids[name] = None
                    continue
                for start in (f"{name}/", name):
                    rows = tx.all(
                        "SELECT gid FROM records WHERE uid >= ? AND uid < ? ORDER BY uid LIMIT 9",
                        (start, f"{start}\U0010ffff"),
                    )
                    gids |= dict.fromkeys(gid for (gid,) in rows)
                    if rows:
                        break
            return _seqs(tx, "gid", list(gids))

    def steps(self) -> list[int]:
        """Return the training steps that have training records."""
        with self.book.ledger.read() as tx:
            rows = tx.all(
                "SELECT DISTINCT batch, version_min FROM records "
                "WHERE evaluation = 0 AND (removed_reason IS NULL OR removed_reason NOT IN ('deleted', 'rewound'))"
            )
        return sorted({record_step(batch, version) for batch, version in rows})

    def seqs_in(self, spans: Sequence[tuple[int | None, int | None]]) -> list[int]:
        """Return the record numbers of training steps in spans of first and last step; `None` is open-ended."""
        with self.book.ledger.read() as tx:
            batches = [batch for (batch,) in tx.all("SELECT DISTINCT batch FROM records")]
            numbered = [batch for batch in batches if record_step(batch, None) == record_step(batch, 1)]
            inside = [batch for batch in numbered if _within(record_step(batch, None), spans)]
            seqs = _seqs(tx, "batch", inside)
            for marks, chunk in chunks(sorted({*batches}.difference(numbered))):
                seqs += [
                    seq
                    for seq, version in tx.all(f"SELECT seq, version_min FROM records WHERE batch IN ({marks})", chunk)
                    if _within(record_step("", version), spans)
                ]
        return sorted(seqs)

    @property
    def problems(self) -> list[str]:
        """Return read errors so far."""
        return [] if self._follower is None else list(self._follower.problems)

    def refresh(self, index: Index) -> set[int] | None:
        """See `Source`; works for about half a second at a time."""
        if self._follower is None or self._follower.index is not index:
            self._follower = Follower(self.book, index, self.reader, self.seqs)
        return self._follower.refresh()

    def trajectories(self, uids: Sequence[str]) -> list[Trajectory]:
        """See `Source`."""
        return self.reader.trajectories(uids)

    def record(self, uid: str) -> dict[str, Any]:
        """See `Source`."""
        return self.reader.record(uid)

    def media(self, sha256: str) -> tuple[bytes, str] | None:
        """See `Source`."""
        return self.reader.media(sha256)

    def history(self, uid: str) -> list[dict[str, Any]]:
        """See `Source`."""
        return [
            {
                "time": entry.time,
                "kind": entry.kind,
                "reason": entry.reason,
                "consumer": entry.consumer,
                "step": entry.step,
                "lease": entry.lease,
                "detail": entry.detail,
            }
            for entry in self.book.history(uid)
        ]

    def sql(self, query: str, *, seconds: float, rows: int) -> dict[str, Any]:
        """See `Source`; DuckDB on the tables of `Book.sql`."""
        from rollbook.book.query import run_query, sql_tables

        try:
            table = run_query(query, sql_tables(self.book), seconds=seconds, max_rows=rows)
        except ImportError as error:
            raise ValueError(str(error)) from None
        return {"columns": table.columns, "rows": [list(row) for row in table], "truncated": table.more}

    def texts(self, uids: Sequence[str]) -> list[tuple[str, str]]:
        """Return prompt and response texts of records: recorded, or decoded with the vocabulary; "" if neither is
        possible.
        """
        seqs = find_seqs(self.book, get_uids(uids))
        texts_by_number: dict[int, tuple[str, str]] = {}
        vocabulary = self.reader.vocabulary
        ordered = sorted(set(seqs))
        for at in range(0, len(ordered), 500):
            for batch in self.book.where(("seq", "in", ordered[at : at + 500])).scan(("seq", *_TEXT_COLUMNS)):
                columns = read_columns(batch)
                numbers = columns["seq"].to_pylist()
                nothing: list[Any] = [None] * len(numbers)
                prompts, responses = (physical.decode(FIELDS[name], columns) or nothing for name in _TEXT_COLUMNS[:2])
                lengths = physical.numbers(columns["prompt_length"])
                tokens = columns.get("tokens")
                for i, seq in enumerate(numbers):
                    texts = [prompts[i], responses[i]]
                    if None in texts and vocabulary is not None and isinstance(tokens, Ragged):
                        ids = tokens.values[int(tokens.offsets[i]) : int(tokens.offsets[i + 1])]
                        parts = (ids[: lengths[i]], ids[lengths[i] :])
                        for at_, (text, token_texts) in enumerate(zip(texts, parts, strict=True)):
                            if text is None:
                                texts[at_] = vocabulary.decode_with_ends(token_texts)[0]
                    texts_by_number[seq] = (texts[0] or "", texts[1] or "")
        return [texts_by_number.get(seq, ("", "")) for seq in seqs]

    def close(self) -> None:
        """See `Source`."""
        self.book.close()


class StartingSource(BookSource):
    """The folder of a run that is starting or warming up and has no book yet; a `BookSource` as soon as it has one."""

    def __init__(self, folder: Path, *, vocabulary: Vocabulary | None = None) -> None:
        self.folder = folder
        self.name = os.path.basename(os.path.abspath(folder))
        self._vocabulary = vocabulary

    def __getattr__(self, name: str) -> Any:
        if name in ("book", "reader"):
            raise KeyError("the run has no book yet")
        raise AttributeError(name)

    @property
    def started(self) -> bool:
        """Whether the book exists."""
        return "book" in vars(self)

    @property
    def changed(self) -> float | None:
        """See `Source`."""
        return super().changed if self.started else os.stat(self.folder).st_mtime

    def metrics(self) -> list[tuple[int, dict[str, float]]]:
        """See `BookSource`."""
        return super().metrics() if self.started else []

    def refresh(self, index: Index) -> set[int] | None:
        """See `Source`."""
        if not self.started:
            book_folder = self.folder / BOOK
            if not (book_folder / LEDGER).exists():
                return None
            super().__init__(open_book(book_folder, "r"), vocabulary=self._vocabulary, name=self.name)
        return super().refresh(index)

    def close(self) -> None:
        """See `Source`."""
        if self.started:
            super().close()


def _seqs(tx: Transaction, column: str, values: Sequence[str]) -> list[int]:
    return sorted(
        seq
        for marks, chunk in chunks(values)
        for (seq,) in tx.all(f"SELECT seq FROM records WHERE {column} IN ({marks})", chunk)
    )


def _within(step: int, spans: Sequence[tuple[int | None, int | None]]) -> bool:
    return any((first is None or step >= first) and (last is None or step <= last) for first, last in spans)


def run_name(url: str) -> str:
    """Return the name of a run: the last part of its path or URL."""
    if "://" in url:
        from urllib.parse import parse_qsl, urlsplit

        parts = urlsplit(url)
        schema = dict(parse_qsl(parts.query)).get("schema")
        return (
            "/".join(filter(None, (parts.path.strip("/"), schema))) or parts.scheme
        )  # never the URL, which may contain a password
    return os.path.basename(os.path.abspath(url)) if url != "memory:" else "memory"


def open_source(
    path: str | os.PathLike[str] | Book, *, tokenizer: TokenizerLike | None = None, starting: bool = False
) -> Source:
    """Open a run for inspection.

    Args:
        path: A book (a folder, or `postgresql://...`), a folder that contains one, or rollout files of a known tool.
        tokenizer: A tokenizer, a `Vocabulary`, or the path of a tokenizer.json or its folder, for records without text;
            a book written with a tokenizer has its vocabulary.
        starting: Also open a run's folder without a book, and follow it until it has one.

    Raises:
        ValueError: If nothing at `path` can be opened.

    >>> open_source("no/such/run")
    Traceback (most recent call last):
        ...
    FileNotFoundError: path: 'no/such/run' does not exist
    """
    if isinstance(path, Book):
        return BookSource(path, vocabulary=load_vocabulary(tokenizer))
    address = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(address, str) or not address:
        raise ValueError(f"path: got {path!r}, expected a book, a folder or a file")
    if address.startswith((*POSTGRES, RAY)):
        return BookSource(open_book(address, "r"), vocabulary=load_vocabulary(tokenizer))
    folder = Path(os.path.expanduser(address))
    if not os.path.lexists(folder):
        raise FileNotFoundError(f"path: {redacted(address)!r} does not exist")
    check_regular(folder)
    if folder.name == LEDGER and folder.is_file():
        folder = folder.parent
    if (folder / LEDGER).exists():
        return BookSource(open_book(folder, "r"), vocabulary=load_vocabulary(tokenizer))
    books = find_books(folder) if folder.is_dir() else []
    if len(books) == 1:
        # The book of a run is named after the run's folder.
        name = os.path.basename(os.path.abspath(folder)) if books[0].name == BOOK else None
        return BookSource(open_book(books[0], "r"), vocabulary=load_vocabulary(tokenizer), name=name)
    if books:
        shown = ", ".join(str(book) for book in books[:_MAX_LISTED])
        more = f" and {len(books) - _MAX_LISTED} more" if len(books) > _MAX_LISTED else ""
        raise ValueError(f"path: {address!r} contains {len(books)} books, expected one of: {shown}{more}")
    check_book_is_here(folder)
    from rollbook.inspect.file_source import FileSource, UnknownFormatError

    try:
        return FileSource(folder, tokenizer=tokenizer)
    except UnknownFormatError as error:
        if (folder / CONFIG).is_file():
            if starting:
                return StartingSource(folder, vocabulary=load_vocabulary(tokenizer))
            raise UnknownFormatError(
                f"path: {address!r} has no book yet: the run is starting or warming up; `rollbook view` follows it"
            ) from None
        raise UnknownFormatError(
            f"path: {address!r} is neither a book (a folder with {LEDGER}) nor saved rollouts: {error}"
        ) from None


def find_books(folder: Path, depth: int = _MAX_DEPTH) -> list[Path]:
    """Return the books in a folder and a few levels below, by name; links are not followed."""
    books: list[Path] = []
    try:
        inside = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return books
    for entry in inside:
        if not entry.is_dir(follow_symlinks=False) or entry.name.startswith("."):
            continue
        if os.path.isfile(os.path.join(entry.path, LEDGER)):
            books.append(Path(entry.path))
        elif depth > 1:
            books += find_books(Path(entry.path), depth - 1)
    return books


def load(source: Source, index: Index) -> None:
    """Bring an index up to date with a source; show progress on a terminal."""
    with Progress("reading", 0, after=1.0) as bar:
        while source.refresh(index):
            bar.total, done = index.query("SELECT COUNT(*), COALESCE(SUM(measured), 0) FROM samples")[0]
            bar.advance(done - bar.done)
    index.update_summaries()


class Watcher:
    """Follows a source in a background thread, and lets others wait for changes.

    It refreshes continuously while there is more to read, then every `seconds`, less often while nothing changes. An
    error is stored in `error`, shown, and retried.
    """

    def __init__(self, source: Source, index: Index, *, seconds: float = 1.0, slowest: float = 5.0) -> None:
        self.source = source
        self.index = index
        self.seconds = seconds
        self.slowest = slowest
        self.error: str | None = None
        """Why the source could not be read the last time."""
        self._closing = threading.Event()
        self._refreshed = threading.Event()
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollbook-watcher", daemon=True)

    def start(self, patience: float = 2.0) -> Watcher:
        """Start to follow; return after the first refresh, or after `patience` seconds."""
        self._thread.start()
        self._refreshed.wait(patience)
        return self

    @property
    def loaded(self) -> bool:
        """Whether everything that existed at the start has been read."""
        return self._loaded.is_set()

    def wait(self, cursor: int, timeout: float) -> bool:
        """Wait until the index changes after `cursor`; return whether it did within `timeout` seconds."""
        return self.index.wait(cursor, timeout, self._closing.is_set)

    def _run(self) -> None:
        pause = self.seconds
        while not self._closing.is_set() and not self.index.closed:
            error = None
            try:
                changed = self.source.refresh(self.index)
                self.index.update_summaries()
            except Exception as raised:  # an error of a source is shown, and the pages continue
                error = str(raised) if isinstance(raised, BookError) else f"{type(raised).__name__}: {raised}"
                changed = None
            if error != self.error:
                with contextlib.suppress(ValueError):  # closed meanwhile
                    self.index.set_fact("error", error)
                self.error = error
            self._refreshed.set()
            if changed:
                pause = self.seconds
                continue
            self._loaded.set()
            self._closing.wait(pause)
            pause = min(self.slowest, pause * 1.25)

    def close(self) -> None:
        """Stop following after the current refresh."""
        self._closing.set()
        self.index.wake()
        if self._thread.is_alive():
            self._thread.join(30)

    def __enter__(self) -> Watcher:
        return self.start()

    def __exit__(self, *_: BaseException | type[BaseException] | TracebackType | None) -> None:
        self.close()
