"""The parts, one after the other: make experiences as a rollout would, keep them, lease, estimate, batch, look at them.

The "model" is a scripted one that sorts letters and sometimes slips, so that it runs on any machine; everything around
it is the library itself: records with ids, a durable book, leases, columns, Parquet, GRPO, a plan, batches, a loss.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from pathlib import Path

import rollbook
from rollbook.algorithms import estimate
from rollbook.algorithms.losses import ppo
from rollbook.batch.plan import plan
from rollbook.book import export_records
from rollbook.compat.lightrft.batch import from_experiences
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.ids import EID
from rollbook.io.parquet import read_parquet

LETTERS = "abcdefghij"
VOCABULARY = {letter: i for i, letter in enumerate(LETTERS + ">.")}
NAMES = list(VOCABULARY)


def sample(task: int, run: int, runs: int, skill: float, rng: random.Random) -> Experience:
    """One rollout: `dbfa>` is to be answered with `abdf.`; each letter is right with probability `skill`."""
    prompt = random.Random(task).choices(LETTERS, k=4 + task % 3)
    answer, logprobs = [], []
    for right in sorted(prompt):
        good = rng.random() < skill
        answer.append(right if good else rng.choice(LETTERS))
        logprobs.append(math.log(skill if good else (1 - skill) / len(LETTERS)))
    exact = answer == sorted(prompt)
    tokens = [VOCABULARY[name] for name in [*prompt, ">", *answer, "."]]
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
    """Run it; see `python examples/parts.py --help`."""
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
    """Make, write, read back, print."""
    rng = random.Random(0)
    rollouts = [sample(task, run, runs, 0.85, rng) for task in range(tasks) for run in range(runs)]
    parquet = folder / "rollouts.parquet"
    with rollbook.open(folder / "book") as book:
        print(f"made     {Experiences(rollouts)}")
        print(f"append   {book.append(rollouts)}")
        print(f"again    {book.append(rollouts)}")
        export_records(book, parquet, overwrite=True)
        with book.lease(tasks, by="group") as lease:
            many = lease.experiences
            # Runs of one task come together, whatever order they were brought in.
            same = sorted(many, key=uid) == sorted(rollouts, key=uid) == sorted(read_parquet(parquet), key=uid)
            print(f"lease    {lease}: {'every field is the same' if same else 'SOMETHING DIFFERS'}")
            if not same:
                raise SystemExit("the records that were read are not those that were written")
            step(many)
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
    """What records are sorted by to be compared."""
    return record.eid.uid


def step(many: Experiences) -> None:
    """What a trainer does with a lease."""
    estimated = estimate("grpo", many)
    many = many.assign(advantages=estimated.advantages, returns=estimated.returns)
    print("\ntask     prompt   rewards          mean  advantages by GRPO")
    for tid, group in many.group_by("task").items():
        rewards = group.values("reward")
        marks = "  ".join(f"{reward:.0f}" for reward in rewards)
        scores = "  ".join(f"{tokens[0].item():+.2f}" for tokens in group.values("advantages"))
        print(f"{tid:<8} {group[0].prompt_text:<8} {marks:<16} {sum(rewards) / len(rewards):.2f}  {scores}")
    print(
        f"         {estimated.report.count('constant group')} of {len(many)} are of groups of equal rewards: exactly 0"
    )
    worst = min(many, key=lambda row: (row.reward, row.metrics["accuracy"]))
    print(f"\n{worst!r}")
    print(f"  {worst.prompt_text} -> {worst.response_text}  (accuracy {worst.metrics['accuracy']:.1f})")
    response = worst.tokens[worst.prompt_length :].tolist()
    print("  token    " + "".join(f"{NAMES[token]:>8}" for token in response))
    if worst.logprobs is not None:
        print("  logprob  " + "".join(f"{value:>8.2f}" for value in worst.logprobs.tolist()))
    print(f"\n{from_experiences(many)}\n{from_experiences(many, packing_samples=True)}")
    found = plan(many, token_cap=64, ranks=2)
    print(f"\n{found.report()}")
    for micro_batch in found[0][:1]:
        batch = from_experiences(many.take(micro_batch.indices), packing_samples=True)
        print(f"rank 0, step 0: {batch}, cu_seqlens {batch.cu_seqlens.tolist()}")
        moved = batch.action_log_probs.values + 0.05  # what a policy would say that learned a little
        loss, metrics = ppo(
            moved, batch.action_log_probs, batch.advantages, batch.action_mask, denominators=found.denominators
        )
        clipped = metrics["pg_clipfrac"].item()
        print(f"its share of the batch's PPO loss: {loss.item():+.4f}, of the clipped tokens: {clipped:.2f}")


if __name__ == "__main__":
    main()
