"""From ragged records in host memory to a padded batch on a CUDA device: packed and pinned, beside padded and pageable.

Run as `python -m benchmarks.bench_device [--rounds 15] [--json PATH]` from the project root, on a machine with a CUDA
device; elsewhere it says so and ends. Every call is timed until the device has finished it. Nothing has to be
installed: the peer is LightRFT's technique, which is in this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import harness, lightrft_technique
from benchmarks.bench_batches import BATCH_SIZE, compact, make_rollout, materialised, same, their_items
from benchmarks.harness import Comparison, Contender, Options, Report
from benchmarks.workload import make_workload
from rollbook.compat.lightrft.batch import ExperienceBatch, from_experiences

OURS = "from_experiences to the device, padded there"
OURS_PACKED = "from_experiences to the device, packed"
OURS_HOST = "from_experiences on the host, then to_device"
TRANSFER = "padded batch from pageable memory, transfer alone"
BUILT = "LightRFT's make_experience_batch, then to the device"
PACKED_TRANSFER = "packed bytes from pinned memory, transfer alone"

ROUNDS = 15
COMPARISONS = (
    Comparison(OURS, OURS, TRANSFER),
    Comparison(OURS, OURS, BUILT),
    Comparison(OURS, OURS, PACKED_TRANSFER, bound=True),
    Comparison(OURS_PACKED, OURS_PACKED, TRANSFER),
    Comparison(OURS_PACKED, OURS_PACKED, PACKED_TRANSFER, bound=True),
    Comparison(OURS_HOST, OURS_HOST, BUILT),
    Comparison(PACKED_TRANSFER, PACKED_TRANSFER, TRANSFER),
)
DEVICE = "cuda"


def finished(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The call, and then a wait for all that it asked of the device."""

    def run(state: Any) -> Any:
        result = call(state)
        torch.cuda.synchronize()
        return result

    return run


def tensors(batch: ExperienceBatch) -> dict[str, torch.Tensor]:
    """The per-token tensors of a padded batch, by name."""
    named = {name: getattr(batch, name) for name in lightrft_technique.TENSORS} | (batch.extras or {})
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def moved(tensors_on_host: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor on the device, as `Tensor.to` takes it there."""
    return [tensor.to(DEVICE) for tensor in tensors_on_host]


def contenders(records: Sequence[Any], items: Sequence[lightrft_technique.Item], packed_bytes: int) -> list[Contender]:
    """All ways; records are new in each round, the padded batch and the pinned bytes lie ready."""
    # Cloned, so that each page is there and none is shared.
    padded = [tensor.clone() for tensor in tensors(from_experiences(materialised(records))).values()]
    pinned = torch.ones(packed_bytes, dtype=torch.uint8).pin_memory()

    def columns() -> Any:
        torch.cuda.synchronize()
        return materialised(records)

    def built(_: Any) -> list[torch.Tensor]:
        batch = lightrft_technique.make_experience_batch(items)
        return moved([getattr(batch, name) for name in lightrft_technique.TENSORS])

    return [
        Contender(OURS, finished(lambda experiences: from_experiences(experiences, device=DEVICE)), columns),
        Contender(
            OURS_PACKED,
            finished(lambda experiences: from_experiences(experiences, packing_samples=True, device=DEVICE)),
            columns,
        ),
        Contender(OURS_HOST, finished(lambda experiences: from_experiences(experiences).to_device(DEVICE)), columns),
        Contender(TRANSFER, finished(lambda _: moved(padded))),
        Contender(BUILT, finished(built)),
        Contender(PACKED_TRANSFER, finished(lambda _: pinned.to(DEVICE, non_blocking=True))),
    ]


def run(options: Options) -> Report:
    """Check that what arrives is the same, then time the ways."""
    rounds = options.rounds or ROUNDS
    workload = make_workload(options.n, options.seed)
    rollout = make_rollout(workload.rows[:BATCH_SIZE], options.seed)
    experiences = materialised(rollout.records)
    host, on_device = tensors(from_experiences(experiences)), tensors(from_experiences(experiences, device=DEVICE))
    if host.keys() != on_device.keys():
        raise AssertionError(f"the device's batch has {sorted(on_device)}, the host's {sorted(host)}")
    for name, tensor in host.items():
        if on_device[name].device.type != DEVICE:
            raise AssertionError(f"{name} is on {on_device[name].device}")
        same(f"on the device: {name}", on_device[name].cpu(), tensor)
    packed = from_experiences(experiences, packing_samples=True)
    rows = [getattr(packed, name) for name in lightrft_technique.TENSORS] + list((packed.extras or {}).values())
    packed_bytes = sum(part.values.nbytes for part in rows if part is not None)

    times = harness.measure(
        contenders(rollout.records, compact(their_items(rollout)), packed_bytes), rounds, options.seed
    )
    facts = {
        "device": torch.cuda.get_device_name(),
        "batch": len(rollout.records),
        "rounds": rounds,
        "MB packed": round(packed_bytes / 1e6, 1),
        "MB padded": round(sum(tensor.nbytes for tensor in host.values()) / 1e6, 1),
    }
    return Report("Host to device", facts, times, [times.compare(c) for c in COMPARISONS])


if __name__ == "__main__":
    if torch.cuda.is_available():
        harness.main(run)
    else:
        print("bench_device: there is no CUDA device here, so nothing was measured")
