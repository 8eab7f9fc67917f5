"""On a CUDA device: the cost of FSDP2 on one rank, and the largest models that train in the memory of one device.

Run as `python -m benchmarks.bench_distributed [--results FOLDER]` from the project root, on a machine with a CUDA
device and transformers (`--cpu` tries the script out, small). It takes less than four minutes on an H200.

Cost: the same supervised updates, and the same GRPO steps with rollouts, by a trainer in one process without
`torch.distributed` and by one with FSDP2 on one rank. Rounds alternate. Seconds are medians, until the device has
finished. Both use bfloat16 with float32 weights in AdamW.

Largest model: Llama shapes with a varying number of layers, from a configuration, one update on one sequence. Peak
memory grows linearly with the number of layers: two small models give the line, and the largest model that should fit
is trained, then one more layer or fewer, until one fits and the next does not.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import random
import statistics
import time
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import rollbook
from rollbook import EID, Experience
from rollbook.train import Prompts, builders
from rollbook.train.config import Config
from rollbook.train.distributed import Distributed
from rollbook.train.pipeline import Models

GIB = 2**30
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    "1.5B": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
}
LORA = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def make_config(shape: str, layers: int, vocabulary: int, strategy: str, **changes: Any) -> Config:
    """Return the configuration of a run with a model of random weights."""
    model = {"model_type": "llama", "num_hidden_layers": layers, "vocab_size": vocabulary, **SHAPES[shape]}
    model |= {"max_position_embeddings": 8192, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    settings: dict[str, Any] = {
        "model": {"config": model, "precision": "bfloat16", **changes.pop("model", {})},
        "data": {"path": "unused"},
        "algorithm": "sft",
        "distributed": strategy,
        "optimizer": {"lr": 1e-6},
        **changes,
    }
    return Config(**settings)


def make_trainer(config: Config, device: torch.device, distributed: Distributed | None) -> Any:
    """Build the trainer of a configuration with its weights on the device, and a book in memory."""
    with torch.device(device):  # random weights are drawn there
        actor = builders.build_actor(config, device)
    prompts = Prompts([{"prompt": [5 + i % 7, 9, 11 + i]} for i in range(512)], seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return builders.build_trainer(
            config, Models(actor), prompts, builders.build_reward(config.rewards), rollbook.open("memory:"), distributed
        )


def make_records(count: int, shortest: int, longest: int, vocabulary: int) -> list[Experience]:
    """Return records of random tokens."""
    rng = random.Random(0)
    records = []
    for i in range(count):
        tokens = [rng.randrange(3, vocabulary) for _ in range(rng.randint(shortest, longest))]
        records.append(Experience(tokens=tokens, prompt_length=len(tokens) // 4, eid=EID(batch="bench", task=i)))
    return records


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Free the memory of objects that are gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def reward(response_ids: list[int]) -> float:
    """Return a reward that differs between responses."""
    return sum(response_ids) % 11 / 10


def measure_cost(options: argparse.Namespace, device: torch.device, kind: str) -> dict[str, Any]:
    """Time supervised updates (`update`) or GRPO steps (`step`) without and with FSDP2, in turns."""
    shape, layers, vocabulary = ("tiny", 2, 512) if options.cpu else ("1.5B", 18, 128_256)
    changes: dict[str, Any] = {"batch": {"token_budget": 16384}}
    if kind == "step":
        changes |= {
            "algorithm": {"preset": "grpo", "group_size": 8, "kl_coef": 0.0},
            "rewards": [{"function": "benchmarks.bench_distributed:reward"}],
            "sampling": {"max_tokens": 8 if options.cpu else 256},
            "batch": {"token_budget": 16384, "prompts_per_step": 2 if options.cpu else 32},
        }
    records = make_records(*((8, 16, 64) if options.cpu else (64, 512, 1536)), vocabulary)
    seconds: dict[str, list[float]] = {"none": [], "fsdp": []}
    losses: dict[str, list[float]] = {"none": [], "fsdp": []}
    peaks: dict[str, float] = {}
    trainers: dict[str, Any] = {}
    ranks = Distributed("fsdp", device, precision="bfloat16")
    for name in seconds:
        free(device)
        config = make_config(shape, layers, vocabulary, name, **changes)
        trainers[name] = make_trainer(config, device, ranks if name == "fsdp" else None)
    warm_up, rounds = (2, options.rounds) if kind == "update" else (1, max(options.rounds // 2, 1))
    for turn in range(warm_up + rounds):
        for name, trainer in trainers.items():
            synchronize(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            begun = time.perf_counter()
            if kind == "update":
                loss = trainer.learner.update(records, step=turn + 1).metrics["loss"]
            else:
                report = trainer.step()
                loss = report["loss"] if "loss" in report else float("nan")
            synchronize(device)
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - begun)
            losses[name].append(loss)
            peaks[name] = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0
    size = sum(weight.numel() for weight in trainers["none"].actor.parameters())
    ranks.close()
    tokens = sum(len(record.tokens) for record in records) if kind == "update" else None
    return {"kind": kind, "parameters": size, "tokens": tokens, "seconds": seconds, "losses": losses, "peaks": peaks}


def try_model(
    options: argparse.Namespace, device: torch.device, shape: str, layers: int, updates: int = 2, **model: Any
) -> Any:
    """Train a model for some updates; return its size, peak memory and seconds, or `None` if memory is short."""
    vocabulary, length = (512, 128) if options.cpu else (128_256, options.tokens)
    records = make_records(1, length, length, vocabulary)
    config = make_config(shape, layers, vocabulary, "fsdp", model=model, batch={"token_budget": length})
    free(device)  # also what the traceback of the last failure held
    ranks = Distributed("fsdp", device, precision="bfloat16")
    trainer, begun = None, 0.0
    try:
        trainer = make_trainer(config, device, ranks)
        for step in range(1, updates + 1):
            synchronize(device)
            begun = time.perf_counter()
            trainer.learner.update(records, step=step)
        synchronize(device)
        size = sum(weight.numel() for weight in trainer.actor.parameters())
        peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 1.0 + layers
        return {"layers": layers, "parameters": size, "peak": peak, "seconds": time.perf_counter() - begun}
    except torch.OutOfMemoryError:
        return None
    finally:
        ranks.handlers.clear()
        del trainer
        ranks.close()
        free(device)


def find_largest(options: argparse.Namespace, device: torch.device, lora: bool, checkpointing: bool) -> dict[str, Any]:
    """Find the largest number of layers that trains."""
    shape = "tiny" if options.cpu else "70B" if lora else "8B"
    model: dict[str, Any] = {"gradient_checkpointing": checkpointing, **({"lora": LORA} if lora else {})}
    capacity = 9.5 if options.cpu else torch.cuda.get_device_properties(device).total_memory / GIB - options.margin
    small = [try_model(options, device, shape, layers, **model) for layers in (2, 4)]
    slope = (small[1]["peak"] - small[0]["peak"]) / 2
    largest, smallest_failed = small[1], None
    layers, step = max(int((capacity - small[0]["peak"]) / slope) + 2, 5), 1
    for _ in range(8):
        result = try_model(options, device, shape, layers, **model) if not options.cpu or layers < 9 else None
        if result is None:
            smallest_failed = layers
        else:
            largest = result
        if smallest_failed is None:
            layers += 1
        elif smallest_failed - largest["layers"] == 1:
            break
        elif largest is small[1]:
            layers, step = max(smallest_failed - step, 5), 2 * step
        else:
            layers = (largest["layers"] + smallest_failed) // 2
    settings = {"lora": lora, "gradient_checkpointing": checkpointing, "shape": shape, "per_layer_gib": slope}
    return {**settings, "largest": largest, "failed": smallest_failed}


def measure(options: argparse.Namespace, results: dict[str, Any]) -> Iterator[None]:
    """Add the measurements to `results`, and yield after each part."""
    device = torch.device("cpu" if options.cpu else "cuda")
    begun = time.perf_counter()
    name = "CPU" if options.cpu else torch.cuda.get_device_name(device)
    results |= {
        "device": name,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "date": datetime.date.today().isoformat(),
        "tokens": options.tokens,
        "seconds": 0.0,
        "cost": [],
        "largest": [],
    }
    if "cost" in options.parts:
        for kind in ("update", "step"):
            results["cost"].append(measure_cost(options, device, kind))
            free(device)
            results["seconds"] = time.perf_counter() - begun
            yield
    if "largest" in options.parts:
        for lora in (False, True):
            for checkpointing in (False, True):
                results["largest"].append(find_largest(options, device, lora, checkpointing))
                results["seconds"] = time.perf_counter() - begun
                yield


def report(results: dict[str, Any]) -> str:
    """Return the results as a page."""
    lines = [
        "# FSDP2 on one rank, and the largest models of one device",
        "",
        f"{results['device']}, torch {results['torch']}, transformers {results['transformers']}, {results['date']}; "
        f"`python -m benchmarks.bench_distributed`, {results['seconds']:.0f} s.",
        "",
    ]
    if results["cost"]:
        lines += [
            "| | `none`, s | `fsdp`, s | ratio | peak `none`, GiB | peak `fsdp`, GiB |",
            "|---|---|---|---|---|---|",
        ]
    for cost in results["cost"]:
        medians = {name: statistics.median(numbers) for name, numbers in cost["seconds"].items()}
        label = f"update on {cost['tokens']:,} tokens" if cost["kind"] == "update" else "GRPO step with rollouts"
        lines.append(
            f"| {label}, {cost['parameters'] / 1e9:.2f}B | {medians['none']:.3f} | {medians['fsdp']:.3f} "
            f"| {medians['fsdp'] / medians['none']:.3f} | {cost['peaks']['none']:.1f} | {cost['peaks']['fsdp']:.1f} |"
        )
    if results["largest"]:
        lines += [
            "",
            f"Peaks of the first table include the weights of both. Largest models, one sequence of "
            f"{results['tokens']:,} tokens, bfloat16 with float32 trained weights, AdamW:",
            "",
            "| LoRA | gradient checkpointing | shape | layers | parameters | peak, GiB | s per update | does not fit |",
            "|---|---|---|---|---|---|---|---|",
        ]
    for row in results["largest"]:
        best = row["largest"] or {"layers": 0, "parameters": 0, "peak": 0.0, "seconds": 0.0}
        flags = " | ".join("yes" if row[name] else "no" for name in ("lora", "gradient_checkpointing"))
        lines.append(
            f"| {flags} | {row['shape']} | {best['layers']} | {best['parameters'] / 1e9:.2f}B | {best['peak']:.1f} "
            f"| {best['seconds']:.2f} | {row['failed'] or '-'} layers |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096, help="length of the sequence of the largest models")
    parser.add_argument("--margin", type=float, default=3.0, help="GiB that the first guess leaves free")
    parser.add_argument("--parts", nargs="+", choices=("cost", "largest"), default=["cost", "largest"])
    parser.add_argument("--cpu", action="store_true", help="try the script out, small")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device (--cpu tries it out)")
    options.results.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for _ in measure(options, results):  # written after each part, so that a time limit loses only the rest
        print(report(results), flush=True)
        (options.results / "distributed.json").write_text(json.dumps(results))
        (options.results / "distributed.md").write_text(report(results))


if __name__ == "__main__":
    main()
