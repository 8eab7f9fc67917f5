"""Experiences to a Hugging Face dataset and back: Rollbook beside Trinity-RFT.

Run as `python -m benchmarks.bench_hf [--n 4096] [--rounds 5] [--json PATH]` from the project root.
"""

from __future__ import annotations

from typing import Any

from benchmarks import harness, peers
from benchmarks.harness import Comparison, Contender, Options, Report
from benchmarks.workload import Workload, check_same, make_workload, touch
from rollbook import Experiences
from rollbook.compat.trinity import from_hf_datasets, to_hf_datasets
from rollbook.core.experience import Experience
from rollbook.io.hf import from_hf

THEIR_TO = "Trinity to_hf_datasets"
THEIR_FROM = "Trinity from_hf_datasets, every field read"
TO_FROM_ROWS = "to, from rows"
TO_FROM_COLUMNS = "to, from columns"
FROM_AS_COLUMNS = "from, as columns"
FROM_AS_ROWS = "from, as rows, every field read"

ROUNDS = 5
COMPARISONS = (
    Comparison(TO_FROM_ROWS, TO_FROM_ROWS, THEIR_TO, target=3),
    Comparison(TO_FROM_COLUMNS, TO_FROM_COLUMNS, THEIR_TO),
    Comparison(FROM_AS_COLUMNS, FROM_AS_COLUMNS, THEIR_FROM, target=100),
    Comparison(FROM_AS_ROWS, FROM_AS_ROWS, THEIR_FROM),
)


def contenders(workload: Workload, trinity: Any, our_dataset: Any, their_dataset: Any) -> list[Contender]:
    """Both sides. Objects to convert are new in each round, so that nothing is cached in them."""

    def our_rows() -> list[Experience]:
        return workload.build(Experience)

    return [
        Contender(THEIR_TO, trinity.to_hf_datasets, lambda: workload.build(trinity.Experience)),
        Contender(THEIR_FROM, lambda _: touch(trinity.from_hf_datasets(their_dataset))),
        Contender(TO_FROM_ROWS, to_hf_datasets, our_rows),
        Contender(TO_FROM_COLUMNS, to_hf_datasets, lambda: Experiences(our_rows())),
        Contender(FROM_AS_COLUMNS, lambda _: from_hf(our_dataset)),
        Contender(FROM_AS_ROWS, lambda _: touch(from_hf_datasets(our_dataset))),
    ]


def run(options: Options) -> Report:
    """Check that both sides agree, then time them."""
    rounds = options.rounds or ROUNDS
    trinity = peers.trinity(options.scratch)
    workload = make_workload(options.n, options.seed)

    our_dataset = to_hf_datasets(workload.build(Experience))
    their_dataset = trinity.to_hf_datasets(workload.build(trinity.Experience))
    check_same(
        workload,
        {
            "Trinity": trinity.from_hf_datasets(their_dataset),
            "Rollbook": from_hf_datasets(our_dataset),
            "Rollbook, as columns": list(from_hf(our_dataset)),
        },
    )

    times = harness.measure(contenders(workload, trinity, our_dataset, their_dataset), rounds, options.seed)
    facts = {
        "experiences": len(workload.rows),
        "rounds": rounds,
        "MB of tensors": round(workload.tensor_bytes / 1e6, 1),
        "MB of text": round(workload.text_bytes / 1e6, 1),
    }
    return Report("HF datasets", facts, times, [times.compare(c) for c in COMPARISONS])


if __name__ == "__main__":
    harness.main(run)
