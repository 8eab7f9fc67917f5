"""The parts of the library, one after the other: records, a durable book, leases, Parquet, GRPO, micro-batches, a loss.

The "model" is a script that sorts letters and makes mistakes, so the example needs no GPU and no weights.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from pathlib import Path

import rollbook
from rollbook import Batch
from rollbook.algorithms import estimate
from rollbook.algorithms.losses import ppo
from rollbook.batch.plan import plan
from rollbook.book import export_records
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.ids import EID
from rollbook.io.parquet import read_parquet

LETTERS = "abcdefghij"
VOCABULARY = {letter: i for i, letter in enumerate(LETTERS + ">.")}
TOKENS = list(VOCABULARY)


def sample(task: int, run: int, runs: int, skill: float, rng: random.Random) -> Experience:
    """Return one rollout: the answer to `dbfa>` is `abdf.`; each letter is right with probability `skill`."""
    prompt = random.Random(task).choices(LETTERS, k=4 + task % 3)
    answer, logprobs = [], []
    for letter in sorted(prompt):
        correct = rng.random() < skill
        answer.append(letter if correct else rng.choice(LETTERS))
        logprobs.append(math.log(skill if correct else (1 - skill) / len(LETTERS)))
    exact = answer == sorted(prompt)
    tokens = [VOCABULARY[token] for token in [*prompt, ">", *answer, "."]]
    return Experience(
        eid=EID(batch=0, task=task, run=run),
        tokens=tokens,
        prompt_length=len(prompt) + 1,
        logprobs=[*logprobs, 0.0],
        reward=1.0 if exact else 0.0,
        prompt_text="".join(prompt) + ">",
        response_text="".join(answer) + ".",
        finish_reason="stop",
        policy_versions=0,
        group_size=runs,
        info={"task": "sort letters", "skill": skill},
        metrics={"accuracy": sum(a == b for a, b in zip(answer, sorted(prompt), strict=True)) / len(prompt)},
        sampling={"temperature": 1.0},
    )


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(prog="python examples/parts.py", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the files (default: a temporary one)")
    parser.add_argument("--tasks", type=int, default=6)
    parser.add_argument("--runs", type=int, default=4)
    options = parser.parse_args()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        show(options.out, options.tasks, options.runs)
        return
    with tempfile.TemporaryDirectory(prefix="rollbook-parts-") as folder:
        show(Path(folder), options.tasks, options.runs)


def show(folder: Path, tasks: int, runs: int) -> None:
    """Generate, store, lease and train on records, and print each step."""
    rng = random.Random(0)
    rollouts = [sample(task, run, runs, 0.85, rng) for task in range(tasks) for run in range(runs)]
    parquet = folder / "rollouts.parquet"
    with rollbook.open(folder / "book") as book:
        print(f"rollouts {Experiences(rollouts)}")
        print(f"append   {book.append(rollouts)}")
        print(f"again    {book.append(rollouts)}")
        export_records(book, parquet, overwrite=True)
        with book.lease(tasks, by="group") as lease:
            records = lease.experiences
            # A lease returns the runs of a task together, so compare in the order of ids.
            same = sorted(records, key=uid) == sorted(rollouts, key=uid) == sorted(read_parquet(parquet), key=uid)
            if not same:
                raise SystemExit("the records that were read differ from those that were written")
            print(f"lease    {lease}: every field is the same")
            step(records)
            lease.ack(step=1)
        print(f"\nack      {book.counts()}")
        print("ledger   " + ", ".join(event.kind for event in book.history(rollouts[0])))
        print("\nselect task, avg(reward), sum(trained_tokens) from experiences group by task order by 2 desc limit 3")
        print(
            book.sql(
                "select task, avg(reward) as reward, sum(trained_tokens) as trained from experiences "
                "group by task order by 2 desc, 1 limit 3"
            )
        )


def uid(record: Experience) -> str:
    """Return the sort key of a record."""
    return record.eid.uid


def step(records: Experiences) -> None:
    """Compute advantages, plan micro-batches and compute a loss, as a trainer does."""
    estimated = estimate("grpo", records)
    records = records.assign(advantages=estimated.advantages, returns=estimated.returns)
    print("\ntask     prompt   rewards          mean  GRPO advantages")
    for tid, group in records.group_by("task").items():
        rewards = group.values("reward")
        marks = "  ".join(f"{reward:.0f}" for reward in rewards)
        scores = "  ".join(f"{tokens[0].item():+.2f}" for tokens in group.values("advantages"))
        print(f"{tid:<8} {group[0].prompt_text:<8} {marks:<16} {sum(rewards) / len(rewards):.2f}  {scores}")
    constant = estimated.report.count("constant group")
    print(f"         {constant} of {len(records)} records are in groups of equal rewards, with advantage 0")
    worst = min(records, key=lambda record: (record.reward, record.metrics["accuracy"]))
    print(f"\n{worst!r}")
    print(f"  {worst.prompt_text} -> {worst.response_text}  (accuracy {worst.metrics['accuracy']:.1f})")
    response = worst.tokens[worst.prompt_length :].tolist()
    print("  token    " + "".join(f"{TOKENS[token]:>8}" for token in response))
    if worst.logprobs is not None:
        print("  logprob  " + "".join(f"{logprob:>8.2f}" for logprob in worst.logprobs.tolist()))
    print(f"\n{Batch.from_records(records)}\n{Batch.from_records(records, packed=True)}")
    micro_plan = plan(records, token_cap=64, ranks=2)
    print(f"\n{micro_plan.report()}")
    for micro_batch in micro_plan[0][:1]:
        batch = Batch.from_records(records.take(micro_batch.indices), packed=True)
        print(f"rank 0, first micro-batch: {batch}, cu_seqlens {batch.cu_seqlens.tolist()}")
        new_logprobs = batch.logprobs.values + 0.05  # from the policy after an update
        loss, metrics = ppo(
            new_logprobs, batch.logprobs, batch.advantages, batch.action_mask, denominators=micro_plan.denominators
        )
        print(f"its share of the PPO loss: {loss.item():+.4f}, of clipped tokens: {metrics['pg_clipfrac'].item():.2f}")


if __name__ == "__main__":
    main()
