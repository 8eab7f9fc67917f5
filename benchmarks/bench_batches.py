"""Padding, splitting and batching: Rollbook beside Trinity-RFT, LightRFT's technique and the bounds of memory.

Run as `python -m benchmarks.bench_batches [--n 4096] [--rounds 9] [--json PATH]` from the project root. The gather
takes all `n` experiences, the batches the first 512 of them, as a fresh rollout: prompts padded on the left, responses
on the right, masks without holes (LightRFT cuts at the wrong place where a mask has any, so equality needs that).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import harness, lightrft_technique, peers
from benchmarks.harness import Comparison, Contender, Options, Report, Times
from benchmarks.workload import PROMPT_RANGE, RESPONSE_MAX, Row, Workload, make_workload
from rollbook import Experiences
from rollbook.compat.lightrft.batch import BufferItem, ExperienceBatch, from_experiences
from rollbook.compat.lightrft.replay_buffer import (
    NaiveReplayBuffer,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from rollbook.compat.trinity import gather_token_ids
from rollbook.core.experience import Experience

THEIR_GATHER = "Trinity gather_token_ids"
GATHER = "gather_token_ids, from columns"
GATHER_ROWS = "gather_token_ids, from rows"
GATHER_REUSED = "gather_token_ids, into a reused output"
FILL = "fill of the output, fresh"
FILL_REUSED = "fill of the output, reused"
SIDES = (THEIR_GATHER, GATHER, GATHER_ROWS, FILL)

THEIR_BATCH = "LightRFT's make_experience_batch"
THEIR_BATCH_COMPACT = "LightRFT's make_experience_batch, from compact items"
THEIR_BATCH_READ = "LightRFT's make_experience_batch, every byte read"
THEIR_SPLIT = "LightRFT's split and unpad"
THEIR_SAMPLES = "LightRFT's 50 minibatches of 8"
BATCH = "make_experience_batch"
BATCH_READ = "make_experience_batch, every byte read"
BATCH_APART = "make_experience_batch, from items with tensors of their own"
BATCH_PACKED = "make_experience_batch, packed"
BATCH_COLUMNS = "from_experiences, from columns"
APPEND = "split and unpad, by NaiveReplayBuffer.append"
SPLIT_FUSED = "split and unpad, by one call"
SPLIT_TWO = "split and unpad, by two calls"
SPLIT_READ = "split and unpad, by one call, every field read"
SAMPLES = "50 minibatches of 8, by NaiveReplayBuffer.sample"

BATCH_SIZE = 512
MINIBATCHES = 50
MINIBATCH_SIZE = 8
PAD_TOKEN_ID = 151_643
"""Not 0: pages that are only ever zero would not count."""
WIDEST = (PROMPT_RANGE[1], RESPONSE_MAX, PAD_TOKEN_ID)
"""What a gather pads to, and with."""
PEAK_TARGET = 1.05
ROUNDS = 9

RECORD_FIELDS = {
    "old_logprobs": "action_log_probs",
    "logprobs": "base_action_log_probs",
    "token_level_reward": "values",
    "returns": "returns",
    "advantages": "advantages",
    "teacher_logprobs": "action_entropy",
    "action_mask": "action_mask",
}
"""Which record field carries which of the batch's, so that records hold as many values as items do."""

GATHERS = (
    Comparison(GATHER, GATHER, THEIR_GATHER, target=6),
    Comparison(GATHER, GATHER, FILL, bound=True),
    Comparison(GATHER_ROWS, GATHER_ROWS, THEIR_GATHER),
    Comparison(GATHER_REUSED, GATHER_REUSED, THEIR_GATHER),
    Comparison(GATHER_REUSED, GATHER_REUSED, FILL_REUSED, bound=True),
)
BATCHES = (
    Comparison(BATCH, BATCH, THEIR_BATCH, target=5),
    Comparison(BATCH, BATCH, THEIR_BATCH_COMPACT),
    Comparison(BATCH_APART, BATCH_APART, THEIR_BATCH),
    Comparison(BATCH_READ, BATCH_READ, THEIR_BATCH_READ),
    Comparison(BATCH_PACKED, BATCH_PACKED, THEIR_BATCH),
    Comparison(BATCH_COLUMNS, BATCH_COLUMNS, THEIR_BATCH),
    Comparison(APPEND, APPEND, THEIR_SPLIT, target=3),
    Comparison(SPLIT_FUSED, SPLIT_FUSED, THEIR_SPLIT),
    Comparison(SPLIT_TWO, SPLIT_TWO, THEIR_SPLIT, target=1.0),
    Comparison(SPLIT_READ, SPLIT_READ, THEIR_SPLIT),
    Comparison(SAMPLES, SAMPLES, THEIR_SAMPLES, target=3.5),
)
# Milliseconds of LightRFT itself on another machine: the technique has to keep these in proportion.
LIGHTRFT_MS = {THEIR_BATCH: 170.0, THEIR_SPLIT: 46.0, THEIR_SAMPLES: 58.0}


@dataclass(frozen=True)
class Measured:
    """A number that is no time, with its target if there is one (at most)."""

    label: str
    value: float
    unit: str
    target: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the target is reached."""
        return "-" if self.target is None else "met" if self.value <= self.target else "MISSED"

    def line(self) -> str:
        """A row of the table."""
        stated = "-" if self.target is None else f"at most {self.target:g}"
        return f"| {self.label} | {self.value:.2f} | {self.unit} | {stated} | {self.verdict} |"


@dataclass(frozen=True)
class BatchReport(Report):
    """Times, and beside them memory and waste."""

    measured: Sequence[Measured]

    def markdown(self) -> str:
        """The tables to print."""
        lines = [
            "| | | unit | target | |",
            "|---|---|---|---|---|",
            *(measurement.line() for measurement in self.measured),
        ]
        return super().markdown() + "\n" + "\n".join(lines) + "\n"

    def plain(self) -> dict[str, Any]:
        """Everything measured, as plain values."""
        return super().plain() | {
            "measured": [asdict(measurement) | {"verdict": measurement.verdict} for measurement in self.measured]
        }


# --- the gather -----------------------------------------------------------------------------------------------------


def materialised(rows: Sequence[Row]) -> Experiences:
    """The rows as columns whose values lie in memory, so that no timed call has to collect them first."""
    experiences = Experiences([Experience(**row) for row in rows])
    for column in experiences.columns.values():
        if hasattr(column, "offsets"):
            column.values  # noqa: B018 (reading it copies)
    return experiences


def gather_by(side: str, workload: Workload, scratch: Path | None) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """How a side gathers, and how what it gathers from is made anew."""
    if side == THEIR_GATHER:
        trinity = peers.trinity(scratch)
        return lambda rows: trinity.gather_token_ids(rows, *WIDEST), lambda: workload.build(trinity.Experience)
    if side == FILL:
        # By numpy, which asks for huge pages: by torch the same takes three times as long.
        shape = len(workload.rows), sum(WIDEST[:2])
        return lambda _: torch.from_numpy(np.full(shape, PAD_TOKEN_ID, dtype=np.int32)), lambda: None
    build = workload.build if side == GATHER_ROWS else lambda make: materialised(workload.rows)
    return lambda records, **out: gather_token_ids(records, *WIDEST, **out), lambda: build(Experience)


def gather_contenders(workload: Workload, scratch: Path | None) -> list[Contender]:
    """Both sides and the bounds, once every way of gathering is known to give the same."""
    sides = {side: gather_by(side, workload, scratch) for side in SIDES}
    gather, columns = sides[GATHER]
    expected = sides[THEIR_GATHER][0](sides[THEIR_GATHER][1]())
    out = torch.full_like(expected, -1)
    if gather(columns(), out=out).data_ptr() != out.data_ptr():
        raise AssertionError("the output to reuse was not used")
    same(GATHER_REUSED, out, expected)
    for side in (GATHER, GATHER_ROWS):
        same(side, sides[side][0](sides[side][1]()), expected)
    return [
        *(Contender(side, call, prepare) for side, (call, prepare) in sides.items()),
        Contender(GATHER_REUSED, lambda experiences: gather(experiences, out=out), columns),
        Contender(FILL_REUSED, lambda _: out.fill_(PAD_TOKEN_ID)),
    ]


def peak_of_gather(side: str, n: int, seed: int, scratch: Path | None) -> float:
    """How far resident memory rose above what it was before a gather, in units of the output.

    Meant for a process of its own, in which nothing large has been freed: memory that an allocator kept from earlier
    would be reused without showing. The kernel's mark is set back just before the call, so that making the workload
    does not count; a fill of the output, measured the same way, has to come out as 1.
    """
    harness.single_thread()
    call, prepare = gather_by(side, make_workload(n, seed), scratch)
    prepared = prepare()
    if prepared is not None:
        call(prepared[:8])  # what it imports and keeps
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    output = call(prepared)
    return (_status("VmHWM") - before) / int(output.nbytes)


def _status(name: str) -> int:
    """Bytes that the kernel states for this process."""
    stated = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(stated[name].split()[0]) * 1024


def measure_peaks(options: Options) -> list[Measured]:
    """Each side's peak, in a new process; nothing where there is no Linux to ask."""
    peaks = []
    for side in SIDES if sys.platform == "linux" else ():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            value = pool.apply(peak_of_gather, (side, options.n, options.seed, options.scratch))
        target = PEAK_TARGET if side in (GATHER, GATHER_ROWS) else None
        peaks.append(Measured(f"peak memory of {side}", value, "of the output", target))
    return peaks


# --- batches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    """A fresh rollout: its padded fields and `info`, and the same samples as records."""

    fields: Mapping[str, torch.Tensor]
    info: Mapping[str, torch.Tensor]
    records: Sequence[Row]

    @property
    def payload_bytes(self) -> int:
        """Bytes of the fields without their padding."""
        counts = {mask.shape: int(mask.sum()) for mask in (self.fields["attention_mask"], self.fields["action_mask"])}
        return sum(field.element_size() * counts[field.shape] for field in self.fields.values())

    def theirs(self) -> lightrft_technique.Batch:
        """As LightRFT's technique takes it."""
        return lightrft_technique.Batch(**self.fields, info=dict(self.info))

    def ours(self) -> ExperienceBatch:
        """As Rollbook takes it; both sides share the tensors."""
        columns: dict[str, Any] = dict(self.fields)
        return ExperienceBatch(**columns, info=dict(self.info))


def make_rollout(rows: Sequence[Row], seed: int) -> Rollout:
    """The rows as a fresh rollout, with seeded values, base log-probs and entropies beside what they hold."""
    rng = torch.Generator().manual_seed(seed)
    prompts = [row["prompt_length"] for row in rows]
    slots = [len(row["logprobs"]) for row in rows]
    width, count = max(prompts), len(rows)
    fields = {name: torch.zeros((count, max(slots))) for name in RECORD_FIELDS.values()}
    fields["action_mask"] = torch.zeros((count, max(slots)), dtype=torch.bool)
    for name in ("sequences", "attention_mask"):
        fields[name] = torch.zeros((count, width + max(slots)), dtype=torch.int64)
    records = []
    for i, (row, prompt, slot) in enumerate(zip(rows, prompts, slots, strict=True)):
        values = {
            "action_log_probs": row["logprobs"],
            "base_action_log_probs": row["logprobs"] + 0.1 * torch.randn(slot, generator=rng),
            "values": torch.rand(slot, generator=rng),
            "returns": row["returns"],
            "advantages": row["advantages"],
            "action_entropy": torch.rand(slot, generator=rng),
            "action_mask": torch.ones(slot, dtype=torch.bool),
        }
        fields["sequences"][i, width - prompt : width + slot] = row["tokens"]
        fields["attention_mask"][i, width - prompt : width + slot] = 1
        for name, value in values.items():
            fields[name][i, :slot] = value
        records.append(row | {source: values[name] for source, name in RECORD_FIELDS.items()})
    info = {
        "kl": torch.rand(count, generator=rng),
        "reward": torch.tensor([row["reward"] for row in rows]),
        "response_length": torch.tensor(slots, dtype=torch.float32),
        "total_length": torch.tensor([p + s for p, s in zip(prompts, slots, strict=True)], dtype=torch.float32),
        "return": torch.rand(count, generator=rng),
    }
    return Rollout(fields, info, records)


def their_items(rollout: Rollout) -> list[lightrft_technique.Item]:
    """Items as LightRFT's buffer holds them: views of the padded batch."""
    return lightrft_technique.remove_padding_in_sequences(lightrft_technique.split_experience_batch(rollout.theirs()))


def compact(items: Sequence[lightrft_technique.Item]) -> list[lightrft_technique.Item]:
    """Copies of the items."""
    names = lightrft_technique.TENSORS
    return [replace(item, **{name: getattr(item, name).clone() for name in names}) for item in items]


def our_items(rollout: Rollout) -> list[BufferItem]:
    """Items as Rollbook's buffer holds them."""
    return split_experience_batch(rollout.ours(), unpad=True)


def filled_buffer(kind: Callable[..., Any], batch: Any) -> Any:
    """A buffer that holds the batch; both sides draw the same samples from the same seed."""
    buffer = kind(MINIBATCH_SIZE, seed=0)
    buffer.append(batch)
    return buffer


def draw(buffer: Any) -> None:
    """The minibatches of an epoch, one alive at a time."""
    for _ in range(MINIBATCHES):
        buffer.sample()


def ask(items: list[Any]) -> list[Any]:
    """The items, once every field of each was asked for."""
    for item in items:
        for name in (*lightrft_technique.TENSORS, "info"):
            getattr(item, name)
    return items


def read(batch: Any) -> int:
    """Sum every byte of a batch's nine tensors, eight at a time: what is not yet in memory has to come."""
    total = 0
    for name in lightrft_technique.TENSORS:
        data = getattr(batch, name).view(torch.uint8).flatten()
        total += int(data[: len(data) // 8 * 8].view(torch.int64).sum())
    return total


def batch_contenders(rollout: Rollout) -> list[Contender]:
    """Both sides, each on items that its own split made; items, batches and buffers are new in each round."""
    technique = lightrft_technique
    prepare_theirs, prepare_ours = partial(their_items, rollout), partial(our_items, rollout)
    return [
        Contender(THEIR_BATCH, technique.make_experience_batch, prepare_theirs),
        Contender(THEIR_BATCH_COMPACT, technique.make_experience_batch, lambda: compact(prepare_theirs())),
        Contender(THEIR_BATCH_READ, lambda items: read(technique.make_experience_batch(items)), prepare_theirs),
        Contender(BATCH, make_experience_batch, prepare_ours),
        Contender(BATCH_APART, make_experience_batch, lambda: [item.detach() for item in prepare_ours()]),
        Contender(BATCH_READ, lambda items: read(make_experience_batch(items)), prepare_ours),
        Contender(BATCH_PACKED, lambda items: make_experience_batch(items, packing_samples=True), prepare_ours),
        Contender(BATCH_COLUMNS, from_experiences, lambda: materialised(rollout.records)),
        Contender(
            THEIR_SPLIT,
            lambda batch: technique.remove_padding_in_sequences(technique.split_experience_batch(batch)),
            rollout.theirs,
        ),
        Contender(
            APPEND,
            lambda buffer_and_batch: buffer_and_batch[0].append(buffer_and_batch[1]),
            lambda: (NaiveReplayBuffer(MINIBATCH_SIZE), rollout.ours()),
        ),
        Contender(SPLIT_FUSED, lambda batch: split_experience_batch(batch, unpad=True), rollout.ours),
        Contender(SPLIT_TWO, lambda batch: remove_padding_in_sequences(split_experience_batch(batch)), rollout.ours),
        Contender(SPLIT_READ, lambda batch: ask(split_experience_batch(batch, unpad=True)), rollout.ours),
        Contender(THEIR_SAMPLES, draw, lambda: filled_buffer(technique.ReplayBuffer, rollout.theirs())),
        Contender(SAMPLES, draw, lambda: filled_buffer(NaiveReplayBuffer, rollout.ours())),
    ]


def check_batches(rollout: Rollout) -> None:
    """Raise unless both sides give the same items, batches and samples, field by field."""
    technique = lightrft_technique
    expected = their_items(rollout)
    buffer = filled_buffer(NaiveReplayBuffer, rollout.ours())
    items = our_items(rollout)
    two = remove_padding_in_sequences(split_experience_batch(rollout.ours()))
    packed = make_experience_batch(items, packing_samples=True)
    for i, item in enumerate(expected):
        for way, actual in ((SPLIT_FUSED, items), (SPLIT_TWO, two), (APPEND, buffer.items)):
            same(f"{way}: {i}", {name: getattr(actual[i], name) for name in vars(item)}, vars(item))
        for name in technique.TENSORS:
            same(f"{BATCH_PACKED}: {i}: {name}", getattr(packed, name)[i], getattr(item, name))
    reference = technique.make_experience_batch(expected)
    unbatched = our_items(rollout)
    same(BATCH, make_experience_batch(unbatched), reference)
    same(BATCH_APART, make_experience_batch([item.detach() for item in unbatched]), reference)
    straight = from_experiences(materialised(rollout.records))
    for name in technique.TENSORS:
        source = next((record for record, batch in RECORD_FIELDS.items() if batch == name), name)
        actual = (straight.extras or {}).get(source, getattr(straight, name))
        same(f"{BATCH_COLUMNS}: {name}", actual.to(getattr(reference, name).dtype), getattr(reference, name))
    drawn = filled_buffer(technique.ReplayBuffer, rollout.theirs())
    buffer = filled_buffer(NaiveReplayBuffer, rollout.ours())
    for i in range(MINIBATCHES):
        same(f"minibatch {i}", buffer.sample(), drawn.sample())


def same(label: str, actual: Any, expected: Any) -> None:
    """Raise unless types, shapes and values are the same, in dicts and in LightRFT's batches entry by entry."""
    if isinstance(expected, lightrft_technique.Batch):
        names = vars(expected)
        same(label, {name: getattr(actual, name) for name in names}, names)
    elif isinstance(expected, dict):
        if actual.keys() != expected.keys():
            raise AssertionError(f"{label}: got {sorted(actual)}, expected {sorted(expected)}")
        for key, value in expected.items():
            same(f"{label}: {key}", actual[key], value)
    elif isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor) or actual.dtype != expected.dtype or not torch.equal(actual, expected):
            raise AssertionError(f"{label}: the sides differ")
    elif actual != expected or type(actual) is not type(expected):
        raise AssertionError(f"{label}: got {actual!r}, expected {expected!r}")


def kept_alive(root: Any) -> int:
    """Bytes of all tensors and arrays that can be reached from an object: what stays while it does."""
    blocks: dict[int, int] = {}
    seen: set[int] = set()
    left = [root]
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, torch.Tensor):
            storage = node.untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
        elif isinstance(node, np.ndarray):
            if isinstance(node.base, np.ndarray):
                left.append(node.base)
            else:
                blocks.setdefault(node.__array_interface__["data"][0], node.nbytes)
        elif isinstance(node, dict):
            left.extend(node.values())
        elif isinstance(node, (list, tuple, set)):
            left.extend(node)
        elif hasattr(node, "__dict__") and not isinstance(node, type):
            left.append(vars(node))
    return sum(blocks.values())


def measure_pins(rollout: Rollout) -> list[Measured]:
    """What the items keep alive, all of them and one that outlives the others."""
    their_items_made = their_items(rollout)
    sizes = {
        "data in the items": rollout.payload_bytes,
        "kept alive by LightRFT's items": kept_alive(their_items_made),
        "kept alive by Rollbook's items": kept_alive(our_items(rollout)),
        "kept alive by Rollbook's items, every field read": kept_alive(ask(our_items(rollout))),
        "data in the first item": sum(getattr(their_items_made[0], name).nbytes for name in lightrft_technique.TENSORS),
        "kept alive by the first of LightRFT's items": kept_alive(their_items_made[0]),
        "kept alive by the first of Rollbook's items": kept_alive(our_items(rollout)[0]),
        "kept alive by the first of Rollbook's items, detached": kept_alive(our_items(rollout)[0].detach()),
    }
    return [Measured(label, size / 1e6, "MB") for label, size in sizes.items()]


def waste(pairs: Sequence[tuple[int, int]], size: int, width: int | None = None) -> float:
    """Percent of the tokens that are padding, in batches of `size` with prompts padded left and responses right."""
    slots = 0
    for start in range(0, len(pairs), size):
        prompts, responses = zip(*pairs[start : start + size], strict=True)
        slots += (width or max(prompts) + max(responses)) * len(prompts)
    return 100 * (1 - sum(map(sum, pairs)) / slots)


def measure_waste(workload: Workload) -> list[Measured]:
    """How much of a padded batch is padding on this workload: what packing and planning save."""
    pairs = [(row["prompt_length"], len(row["logprobs"])) for row in workload.rows]
    shares = {"at fixed width": waste(pairs, len(pairs), sum(WIDEST[:2]))}
    for order, chosen in (("as they come", pairs), ("sorted by length", sorted(pairs, key=sum))):
        for size in (8, 128):
            shares[f"at batch {size}, {order}, prompts left and responses right"] = waste(chosen, size)
            shares[f"at batch {size}, {order}, all left"] = waste([(sum(pair), 0) for pair in chosen], size)
    return [Measured(f"padding {label}", percent, "% of tokens") for label, percent in shares.items()]


def proportions(times: Times) -> dict[str, str]:
    """How the technique's times stand to its time for batching, over how LightRFT's stood: 1 is the same relation."""
    scale = {name: times.median_ms(name) / stated for name, stated in LIGHTRFT_MS.items()}
    return {
        f"{name}, ratio to batching, relative to LightRFT's own": f"{scale[name] / scale[THEIR_BATCH]:.2f}"
        for name in (THEIR_SPLIT, THEIR_SAMPLES)
    }


def run(options: Options) -> Report:
    """Check that the sides agree, then time them."""
    rounds = options.rounds or ROUNDS
    workload = make_workload(options.n, options.seed)
    rollout = make_rollout(workload.rows[:BATCH_SIZE], options.seed)
    check_batches(rollout)

    gathers = harness.measure(gather_contenders(workload, options.scratch), rounds, options.seed)
    batches = harness.measure(batch_contenders(rollout), rounds, options.seed)
    facts = {
        "experiences gathered": len(workload.rows),
        "batch": len(rollout.records),
        "rounds": rounds,
        "MB gathered": round(4e-6 * len(workload.rows) * sum(WIDEST[:2]), 1),
        "MB of the batch's data": round(rollout.payload_bytes / 1e6, 1),
        "MB padded": round(sum(field.nbytes for field in rollout.fields.values()) / 1e6, 1),
        **proportions(batches),
    }
    results = [*(gathers.compare(c) for c in GATHERS), *(batches.compare(c) for c in BATCHES)]
    measured = [*measure_peaks(options), *measure_pins(rollout), *measure_waste(workload)]
    return BatchReport("Padding and batching", facts, Times(gathers.seconds | batches.seconds), results, measured)


if __name__ == "__main__":
    harness.main(run)
