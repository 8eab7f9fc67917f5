"""Saving trajectories: Rollbook's saver beside LightRFT's technique, 128 samples with entropy marks.

Run as `python -m benchmarks.bench_saver [--rounds 3] [--json PATH]` from the project root; the report also goes to
`results/saver.md` and `results/saver.json`. The responses are the texts of the first 128 experiences of the workload
(log-normal lengths, one in four with a tool's reply that the model did not write, one in sixteen beyond ASCII),
tokenized by a byte-level tokenizer made from them; 16 padded batches of 8, as a trainer has them. Both sides save all
of them and compute their statistics; Rollbook syncs its file to the disk, writes ids, groups, offsets, masks and every
further array, and does so before it returns; the technique does none of that.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks import harness, lightrft_saving
from benchmarks.harness import Comparison, Contender, Options, Report
from benchmarks.workload import Workload, make_workload
from rollbook.compat.lightrft.batch import ExperienceBatch, from_experiences
from rollbook.compat.lightrft.saver import TrajectorySaver
from rollbook.core.experience import Experience
from rollbook.io.trajectories import Decoder, count_reflections, repeat_score

SAMPLES, BATCH, RATIO = 128, 8, 0.2
TARGET = 15.0
THEIR_SHARE = 0.55
"""How much of LightRFT's own 27.6 s, where the target was set, went into the repetition score."""

THEIRS = "LightRFT's technique"
OURS = "save_trajectories"
BEHIND = "save_trajectories, written in the background"
SCORES = "repetition scores alone"
THEIR_SCORES = "LightRFT's repetition scores alone"


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that knows the words of these texts."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def records(workload: Workload, tokenizer: Any) -> Iterator[Experience]:
    """The workload's texts as tokens, with an entropy for each."""
    draw = np.random.default_rng(workload.seed)
    for row in workload.rows:
        prompt = tokenizer.encode(row["prompt_text"], add_special_tokens=False)
        response = [*tokenizer.encode(row["response_text"], add_special_tokens=False), tokenizer.eos_token_id]
        mask = np.ones(len(response), dtype=np.bool_)
        if not bool(row["action_mask"].all()):
            start = int(draw.integers(1, len(response) // 2))
            mask[start : start + len(response) // 4] = False
        yield Experience(
            eid=row["eid"],
            tokens=[*prompt, *response],
            prompt_length=len(prompt),
            action_mask=mask,
            logprobs=-draw.exponential(0.4, len(response)).astype(np.float32),
            entropy=draw.exponential(0.5, len(response)).astype(np.float32),
            advantages=np.full(len(response), draw.normal(), dtype=np.float32),
            returns=draw.random(len(response)).astype(np.float32),
            reward=row["reward"],
        )


def batches_of(rows: list[Experience], pad: int) -> list[ExperienceBatch]:
    """Padded batches as a rollout has them."""
    return [
        from_experiences(rows[at : at + BATCH], pad_token_id=pad, layout="prompt_left_response_right")
        for at in range(0, len(rows), BATCH)
    ]


def check(path: str, batches: list[ExperienceBatch], tokenizer: Any) -> list[str]:
    """The pure texts that were saved, once they are known to be the tokenizer's, and their scores the peer's."""
    saved = json.loads(Path(path).read_text())
    rows = [(batch, i) for batch in batches for i in range(len(batch))]
    if len(saved) != len(rows):
        raise AssertionError(f"{len(saved)} records instead of {len(rows)}")
    for number, (record, (batch, i)) in enumerate(zip(saved, rows, strict=True)):
        slots = batch.action_mask[i]
        sampled = batch.sequences[i, -len(slots) :][slots]
        if record["generated_text"] != tokenizer.decode(sampled, skip_special_tokens=True):
            raise AssertionError(f"record {number} has another text")
        if "".join(token["text"] for token in record["generated_tokens"]) != record["generated_text"]:
            raise AssertionError(f"record {number}: the tokens' texts are not its text")
        text = record["pure_generated_text"]
        if number % 16 == 15:
            if record["repeat_score"] != lightrft_saving.repetition(text):
                raise AssertionError(f"record {number} has another repetition score")
            if count_reflections(text) != lightrft_saving.reflections(text):
                raise AssertionError(f"record {number} has other phrases of reflection")
    return [record["pure_generated_text"] for record in saved]


def run(options: Options) -> Report:
    """The report."""
    workload = make_workload(SAMPLES, options.seed)
    tokenizer = tokenizer_of([row[name] for row in workload.rows for name in ("prompt_text", "response_text")])
    batches = batches_of(list(records(workload, tokenizer)), tokenizer.pad_token_id)
    rounds = options.rounds or 3
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        folder = Path(name)
        saver = TrajectorySaver(folder / "ours", tokenizer, mark_high_entropy_tokens=True)
        behind = TrajectorySaver(folder / "behind", tokenizer, mark_high_entropy_tokens=True, background=True)
        (folder / "theirs").mkdir()

        def save(which: TrajectorySaver) -> Any:
            outcome = which.save_trajectories(batches, 1, SAMPLES, compute_stats=True)
            if outcome[0] is None or which.error_count:
                raise AssertionError(f"saving failed: {list(which.errors)}")
            return outcome

        path, _ = save(saver)
        texts = check(path, batches, tokenizer)
        their_file, _ = lightrft_saving.save(batches, tokenizer, folder / "theirs", 1, RATIO)
        contenders = [
            Contender(name, run, behind.flush)  # nothing is still being written beside what is timed
            for name, run in (
                (THEIRS, lambda _: lightrft_saving.save(batches, tokenizer, folder / "theirs", 1, RATIO)),
                (OURS, lambda _: save(saver)),
                (BEHIND, lambda _: save(behind)),
                (THEIR_SCORES, lambda _: [lightrft_saving.repetition(text) for text in texts]),
                (SCORES, lambda _: [repeat_score(text) for text in texts]),
            )
        ]
        times = harness.measure(contenders, rounds, options.seed)
        behind.flush()
        begun = time.perf_counter()
        Decoder(tokenizer)
        facts = {
            "samples": SAMPLES,
            "rounds": rounds,
            "tokens": f"{sum(int(batch.action_mask.sum()) for batch in batches):,} sampled",
            "characters": f"{sum(map(len, texts)):,}",
            "MB written": f"{Path(path).stat().st_size / 1e6:.1f}, "
            f"by the technique {their_file.stat().st_size / 1e6:.1f}",
            "the technique's share of time in repetition": (
                f"{times.median_ms(THEIR_SCORES) / times.median_ms(THEIRS):.0%}, LightRFT's own {THEIR_SHARE:.0%}"
            ),
            "ms to read the vocabulary once": f"{(time.perf_counter() - begun) * 1e3:.0f}",
        }
    comparisons = [
        Comparison(OURS, OURS, THEIRS, target=TARGET),
        Comparison(BEHIND, BEHIND, THEIRS),
        Comparison(SCORES, SCORES, THEIR_SCORES),
    ]
    return Report("Saving trajectories", facts, times, [times.compare(comparison) for comparison in comparisons])


def main() -> None:
    """Run it, print the report and write it."""
    options = harness.parse(__doc__)
    harness.single_thread()
    report = run(options)
    print(report.markdown())
    results = Path(__file__).parent / "results"
    (results / "saver.md").write_text(report.markdown())
    written = {"environment": harness.environment(), "reports": [report.plain()]}
    (results / "saver.json").write_text(json.dumps(written, indent=1) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
