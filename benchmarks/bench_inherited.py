"""Every function that Rollbook takes over from LightRFT, beside LightRFT's technique, for a large and a small batch.

Run as `python -m benchmarks.bench_inherited [--rounds 9] [--json PATH]` from the project root; the report also goes to
`results/inherited.md` and `results/inherited.json`. Both sides get the same tensors, made anew for each call where a
call changes them. Short calls are repeated within a round, those below a microsecond thousands of times: the clock and
the first call, on cold caches, would be most of a shorter run. Both sides of a function run one after the other, and
the side that runs first alternates. Times are CPU times of one thread, and a ratio is that of the fastest rounds, so
that other work on the machine has little effect. Models return ready tensors, so that what is timed of the maker is the
maker. Every ratio is to be at least 1; `NOTES` says why some are not.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import harness
from benchmarks import lightrft_technique as technique
from benchmarks.bench_batches import Rollout, make_rollout
from benchmarks.harness import Comparison, Contender, Options, Report, Result, Times
from benchmarks.workload import make_workload
from rollbook.compat.lightrft import maker, replay_buffer
from rollbook.compat.lightrft.maker import Experience, MakerConfig, NaiveExperienceMaker, Samples
from rollbook.compat.lightrft.replay_buffer import BufferItem, NaiveReplayBuffer
from rollbook.compat.lightrft.saver import create_high_entropy_mask

SIZES = (512, 8)
ROUNDS = 9
GROUP = 8
GAMMA, LAMBD = 0.99, 0.95
NOTES = """\
LightRFT's split and unpadded items are views that keep the whole batch alive. Rollbook's items do not share memory with
the batch. In the rows "copied items" LightRFT's tensors are therefore copied, including padding. Rollbook's split
copies attended tokens and reads padding from the batch when an item is read. Compared with views,
`split_experience_batch` takes about three times as long: reading the mask (38 MB for 512 samples) and copying (25 MB)
take longer than creating views. The split followed by `remove_padding_in_sequences`, as in a buffer, is compared with
views.

Both sides call the same models once each, under `no_grad`, and set them to evaluation mode and back to training mode,
as LightRFT does. The actor, the reference and the critic are modules that return copies of ready tensors, on new memory
as every model does: LightRFT keeps these tensors, Rollbook copies and frees them. The reward model is a callable that
counts tokens. The row "models of one layer" has three Llamas of one layer and 64 dimensions instead, smaller than any
model that is trained: with models, what differs is lost in their passes.

Of a packed batch, both sides make what a trainer reads: each field end to end, and what tells attention where samples
begin. LightRFT's trainer numbers the tokens of each row and takes the lengths of the rows; Rollbook's batch has
`cu_seqlens`.

What is below or around 1, and why (minima of repeated calls):

- `make_experience` for 8 samples takes 96 microseconds against 60, with models that return stored tensors. Modes and
  calls of the models, the reward and the decorator take about 25 on both sides. LightRFT's other 35 are the masked KL
  and its means. Rollbook's KL with means in float64 takes 15, copies of the three outputs with zeros after each
  response 16, finding the responses in the masks, with checks for prompts and actions that are not attended, 17,
  checks of scores 3, of frozen models 3, and timings of stages 2; LightRFT returns the models' own tensors, padding
  included. Without the copies, `make_experience` was 3% faster in repeated calls and 10% in rounds of 16, so they stay:
  a batch does not change when a model overwrites its output, and has zeros for padding. Copies row by row and one
  recycled block for all copies are not faster. For 512 samples, and with the advantages that follow, it is faster.
- `make_experience_batch` with `packing_samples`, for 8 new items: types and bounds of the items' columns are read once
  for all batches from them (12 microseconds), and a view is created for each of the 72 rows (25); LightRFT's views are
  created by its split. For a second batch from the same items, it takes 60 microseconds against 65.
- `BufferItem(...)` and `Experience(...)` take about 20 nanoseconds of 400 longer, which is what the empty dict of the
  other keyword arguments takes. Without these arguments the constructor of a batch is 3% faster than LightRFT's; with
  all fields as named parameters it is 8% slower.
- `is_vl_experience` and `process_experiences` take as long as LightRFT's. `is_vl_experience` reads an attribute of the
  batch, LightRFT looks for one. `process_experiences` sorts rewards in float64, so that scores do not depend on the
  order of rows, and checks them for missing ones.
"""
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Pair:
    """A function: both sides' calls, what each is given, and how often it is called within a round."""

    name: str
    theirs: Callable[[Any], Any]
    ours: Callable[[Any], Any]
    their_input: Callable[[], Any]
    our_input: Callable[[], Any]
    calls: int = 1

    def contenders(self, size: int) -> list[Contender]:
        """Both sides for one batch size."""
        return [
            Contender(f"{side}: {self.name}, B={size}", _repeated(call, self.calls), _inputs(prepare, self.calls))
            for side, call, prepare in (
                ("LightRFT", self.theirs, self.their_input),
                ("Rollbook", self.ours, self.our_input),
            )
        ]

    def comparison(self, size: int) -> Comparison:
        """The line of the table."""
        label = f"{self.name}, B={size}"
        return Comparison(label, f"Rollbook: {label}", f"LightRFT: {label}", target=1.0)


def _repeated(call: Callable[[Any], Any], calls: int) -> Callable[[list[Any]], list[Any]]:
    return lambda inputs: [call(prepared) for prepared in inputs[:calls]]


def _inputs(prepare: Callable[[], Any], calls: int) -> Callable[[], list[Any]]:
    return lambda: [prepare() for _ in range(calls)]


# --- what makers are given ------------------------------------------------------------------------------------------


class ReadyModel(torch.nn.Module):
    """A model that returns a copy of a ready tensor, on new memory as every model does, so that the maker is timed."""

    def __init__(self, answer: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))  # the maker sets models with trained weights to training mode
        self.answer = answer

    def forward(self, sequences: torch.Tensor, num_actions: int, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return a copy of the tensor."""
        return self.answer.clone()


class OneLayer(torch.nn.Module):
    """A Llama of one layer, the smallest model that a maker may be given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 4096}
        heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))

    def forward(self, sequences: torch.Tensor, num_actions: int, attention_mask: torch.Tensor) -> torch.Tensor:
        """[B, A] Return the log-probs of the last tokens."""
        tokens = sequences % 1024
        logits = self.model(tokens, attention_mask=attention_mask, logits_to_keep=num_actions + 1).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, tokens[:, -num_actions:, None])[..., 0]


class TokenCount:
    """A reward model that counts tokens; a plain callable, which the maker calls with the tokens of the batch."""

    def eval(self) -> None:
        """Do nothing."""

    def __call__(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """[B] Count the attended tokens of each row."""
        return attention_mask.sum(1).float()


def ready_models(fields: dict[str, torch.Tensor]) -> list[torch.nn.Module]:
    """Return an actor, a reference and a critic that return ready tensors."""
    return [ReadyModel(fields[name]) for name in ("action_log_probs", "base_action_log_probs", "values")]


def their_maker(models: Sequence[torch.nn.Module]) -> technique.Maker:
    """Build a maker of LightRFT's kind with an actor, a reference and a critic."""
    return technique.Maker(*models, TokenCount(), group=GROUP)


def our_maker(models: Sequence[torch.nn.Module], estimator: str = "rloo") -> NaiveExperienceMaker:
    """Build Rollbook's maker with the same models."""
    actor, reference, critic = models
    return NaiveExperienceMaker(
        actor,
        critic,
        TokenCount(),
        reference,
        SimpleNamespace(pad_token_id=0, eos_token_id=0),
        1024,
        0.01,
        config=MakerConfig(n_samples_per_prompt=GROUP, advantage_estimator=estimator),
    )


def make_samples(rollout: Rollout) -> Samples:
    """What `generate_samples` gives `make_experience`."""
    fields, info = rollout.fields, rollout.info
    count, slots = fields["action_mask"].shape
    lengths = info["response_length"], info["total_length"]
    return Samples(
        fields["sequences"], fields["attention_mask"], fields["action_mask"], slots, None, *lengths, [""] * count, None
    )


# --- the functions --------------------------------------------------------------------------------------------------


def pairs(rollout: Rollout, size: int) -> list[Pair]:
    """Every function, for one batch size."""
    fields, info = dict(rollout.fields), dict(rollout.info)
    often = 4 if size > 64 else 64
    few = 1 if size > 64 else 16
    thousands = 2048
    mask, rewards, values = fields["action_mask"], fields["returns"], fields["values"]
    rows = [row[: int(length)] for row, length in zip(values, info["response_length"], strict=True)]
    groups = torch.rand(max(size // GROUP, 1), GROUP)
    makers = their_maker(ready_models(fields)), our_maker(ready_models(fields))
    samples = make_samples(rollout)
    scored = {"reward": torch.rand(size)}
    columns = {name: fields[name][0] for name in technique.TENSORS}

    def split_theirs() -> list[technique.Item]:
        return technique.split_experience_batch(rollout.theirs())

    def bare_theirs() -> list[technique.Item]:
        return technique.remove_padding_in_sequences(split_theirs())

    def split_ours() -> list[BufferItem]:
        return replay_buffer.split_experience_batch(rollout.ours())

    def bare_ours() -> list[BufferItem]:
        return replay_buffer.split_experience_batch(rollout.ours(), unpad=True)

    def packed_ours(items: list[BufferItem]) -> tuple[Experience, torch.Tensor]:
        batch = replay_buffer.make_experience_batch(items, True)
        return batch, batch.cu_seqlens  # which tells attention where samples begin, as LightRFT's row numbers do

    def filled(kind: Any, batch: Any) -> Any:
        buffer = kind(min(GROUP, size), seed=0)
        buffer.append(batch)
        return buffer

    def normalized(kind: Any, batch: Any) -> Any:
        buffer = filled(kind, batch)
        buffer.normalize("advantages", None)
        return buffer

    def both(buffers: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        return (
            lambda: buffers(technique.ReplayBuffer, rollout.theirs()),
            lambda: buffers(NaiveReplayBuffer, rollout.ours()),
        )

    def no() -> None:
        return None

    return [
        Pair(
            "Experience(...)",
            lambda _: technique.Batch(**fields, info=info),
            lambda _: Experience(**fields, info=info),
            no,
            no,
            thousands,
        ),
        Pair(
            "BufferItem(...)",
            lambda _: technique.Item(**columns, info=info),
            lambda _: BufferItem(**columns, info=info),
            no,
            no,
            thousands,
        ),
        Pair(
            "Experience.to_device",
            lambda batch: technique.to_device(batch, "cpu"),
            lambda batch: batch.to_device("cpu"),
            rollout.theirs,
            rollout.ours,
            64,
        ),
        Pair(
            "to",
            lambda prepared: technique.to(prepared, "cpu"),
            lambda prepared: maker.to(prepared, "cpu"),
            lambda: list(values),
            lambda: list(values),
            few,
        ),
        Pair(
            "clip_filter_like_weight_func",
            technique.clip_filter_like_weight_func,
            maker.clip_filter_like_weight_func,
            lambda: groups,
            lambda: groups,
            64,
        ),
        Pair(
            "is_vl_experience",
            technique.is_vl_experience,
            replay_buffer.is_vl_experience,
            rollout.theirs,
            rollout.ours,
            thousands,
        ),
        Pair(
            "zero_pad_sequences",
            technique.zero_pad_sequences,
            replay_buffer.zero_pad_sequences,
            lambda: rows,
            lambda: rows,
            few,
        ),
        Pair(
            "split_experience_batch, copied items",
            lambda batch: technique.owned(technique.split_experience_batch(batch)),
            replay_buffer.split_experience_batch,
            rollout.theirs,
            rollout.ours,
            few,
        ),
        Pair(
            "remove_padding_in_sequences",
            technique.remove_padding_in_sequences,
            replay_buffer.remove_padding_in_sequences,
            split_theirs,
            split_ours,
            few,
        ),
        Pair(
            "remove_padding_in_sequences, copied items that were read",
            lambda items: technique.owned(technique.remove_padding_in_sequences(items)),
            replay_buffer.remove_padding_in_sequences,
            split_theirs,
            lambda: [item.detach() for item in split_ours()],
            few,
        ),
        Pair(
            "split_experience_batch, then remove_padding_in_sequences",
            lambda batch: technique.remove_padding_in_sequences(technique.split_experience_batch(batch)),
            lambda batch: replay_buffer.remove_padding_in_sequences(replay_buffer.split_experience_batch(batch)),
            rollout.theirs,
            rollout.ours,
            few,
        ),
        Pair(
            "make_experience_batch",
            technique.make_experience_batch,
            replay_buffer.make_experience_batch,
            bare_theirs,
            bare_ours,
            few,
        ),
        Pair(
            "make_experience_batch, items that were read",
            technique.make_experience_batch,
            replay_buffer.make_experience_batch,
            bare_theirs,
            lambda: [item.detach() for item in bare_ours()],
            few,
        ),
        Pair(
            "make_experience_batch, packing_samples, fields end to end",
            lambda items: technique.end_to_end(technique.make_experience_batch(items, True)),
            packed_ours,
            bare_theirs,
            bare_ours,
            few,
        ),
        Pair(
            "NaiveReplayBuffer.append",
            lambda prepared: prepared[0].append(prepared[1]),
            lambda prepared: prepared[0].append(prepared[1]),
            lambda: (technique.ReplayBuffer(GROUP), rollout.theirs()),
            lambda: (NaiveReplayBuffer(GROUP), rollout.ours()),
            few,
        ),
        Pair(
            "NaiveReplayBuffer.normalize",
            lambda buffer: buffer.normalize("advantages", None),
            lambda buffer: buffer.normalize("advantages", None),
            *both(filled),
            few,
        ),
        Pair(
            f"NaiveReplayBuffer.sample, {GROUP} of them, after normalize",
            lambda buffer: [buffer.sample() for _ in range(often)],
            lambda buffer: [buffer.sample() for _ in range(often)],
            *both(normalized),
        ),
        Pair(
            "get_advantages_and_returns",
            lambda _: makers[0].get_advantages_and_returns(values, rewards, mask, GAMMA, LAMBD),
            lambda _: makers[1].get_advantages_and_returns(values, rewards, mask, GAMMA, LAMBD),
            no,
            no,
        ),
        Pair(
            "get_advantages_and_returns, a mask of int64",
            lambda prepared: makers[0].get_advantages_and_returns(values, rewards, prepared, GAMMA, LAMBD),
            lambda prepared: makers[1].get_advantages_and_returns(values, rewards, prepared, GAMMA, LAMBD),
            mask.long,
            mask.long,
        ),
        Pair(
            "get_cumulative_returns",
            lambda _: makers[0].get_cumulative_returns(rewards, mask, GAMMA),
            lambda _: makers[1].get_cumulative_returns(rewards, mask, GAMMA),
            no,
            no,
        ),
        Pair(
            "make_experience",
            makers[0].make_experience,
            makers[1].make_experience,
            lambda: samples,
            lambda: samples,
            few,
        ),
        *(
            Pair(
                "make_experience, models of one layer",
                their_maker(layers).make_experience,
                our_maker(layers).make_experience,
                lambda: samples,
                lambda: samples,
            )
            for layers in ([[OneLayer() for _ in range(3)]] if size <= 64 else [])
        ),
        Pair(
            "process_experiences",
            lambda batch: makers[0].process_experiences([batch]),
            lambda batch: makers[1].process_experiences([batch]),
            lambda: technique.Batch(**fields, info=dict(scored)),
            lambda: Experience(**fields, info=dict(scored)),
            64,
        ),
        Pair(
            "make_experience, process_experiences, advantages",
            lambda _: makers[0].estimated(samples, GAMMA),
            lambda _: makers[1]._finish([makers[1].make_experience(samples)], 0, {"gamma": GAMMA}),
            no,
            no,
        ),
        Pair(
            "create_high_entropy_mask",
            lambda _: technique.create_high_entropy_mask(fields["action_entropy"], mask, 0.2),
            lambda _: create_high_entropy_mask(fields["action_entropy"], mask, 0.2),
            no,
            no,
            few,
        ),
    ]


def measure_pairs(contenders: Sequence[Sequence[Contender]], rounds: int, seed: int) -> Times:
    """Time both sides of each pair one after the other; the side that runs first alternates between rounds."""
    times = Times({contender.name: [] for pair in contenders for contender in pair})
    order = random.Random(seed)
    for round_ in range(-1, rounds):  # the first is a warm-up
        for pair in order.sample(contenders, len(contenders)):
            for contender in pair if round_ % 2 else reversed(pair):
                seconds = harness.time_once(contender, time.process_time)
                if round_ >= 0:
                    times.seconds[contender.name].append(seconds)
        print(f"round {round_ + 1}/{rounds}" if round_ >= 0 else "warm-up", file=sys.stderr)
    return times


def compare_fastest(times: Times, comparison: Comparison) -> Result:
    """Compare the fastest round of each side; the spread is that of the ratios within rounds."""
    ratio = min(times.seconds[comparison.reference]) / min(times.seconds[comparison.ours])
    return replace(times.compare(comparison), ratio=ratio, verdict=comparison.met(ratio))


def run(options: Options) -> Report:
    """The report."""
    rounds = options.rounds or ROUNDS
    contenders: list[list[Contender]] = []
    comparisons: list[Comparison] = []
    workload = make_workload(max(SIZES), options.seed)
    for size in SIZES:
        rollout = make_rollout(workload.rows[:size], options.seed)
        for pair in pairs(rollout, size):
            contenders.append(pair.contenders(size))
            comparisons.append(pair.comparison(size))
    times = measure_pairs(contenders, rounds, options.seed)
    results = [compare_fastest(times, comparison) for comparison in comparisons]
    lines = ["| function | B | ratio | spread | |", "|---|---|---|---|---|"]
    for result in results:
        name, size = result.comparison.label.rsplit(", B=", 1)
        low, high = result.ratio_spread
        verdict = "" if result.ratio >= 1 else "below 1"
        lines.append(f"| {name} | {size} | x{result.ratio:.2f} | {low:.2f}-{high:.2f} | {verdict} |")
    table = "\n".join(lines)
    command = f"python -m benchmarks.bench_inherited --rounds {rounds}"
    RESULTS.joinpath("inherited.md").write_text(
        f"## Inherited functions compared with LightRFT's technique\n\nMeasured by `{command}`: ratios of the "
        f"fastest of {rounds} interleaved rounds in CPU time, one thread. Higher is better. The spread is that of "
        "single rounds."
        f"\n\n{table}\n\n{NOTES}"
    )
    report = Report("Inherited functions", {"rounds": rounds, "sizes": SIZES}, times, results)
    written = {"environment": harness.environment(), "results": [asdict(result) for result in results]}
    RESULTS.joinpath("inherited.json").write_text(json.dumps(written, indent=1) + "\n")
    return report


if __name__ == "__main__":
    harness.main(run)
