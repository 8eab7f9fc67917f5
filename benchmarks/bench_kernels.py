"""On a CUDA device: log-probs and entropy, from logits and from hidden states, and GAE; peers' techniques and bounds.

Run as `python -m benchmarks.bench_kernels [--rounds 15] [--seed 20260] [--results FOLDER]` from the project root, on a
machine with a CUDA device; elsewhere it says so and ends. Times are those of CUDA events around a call, with nothing
waiting on the device before it: what the host takes to launch a call counts. Nothing has to be installed: what LightRFT
and verl do is written anew, here and in `bench_tokens`. The report goes to `kernels.md` and `kernels.json` in the
folder, `benchmarks/results` unless told otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import random
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.bench_batches import BatchReport, Measured
from benchmarks.bench_tokens import VOCABULARY, lightrft, plain, rollbook_logprobs, verl
from benchmarks.harness import Comparison, Contender, Times
from rollbook.algorithms.kernels import scan_triton
from rollbook.algorithms.scan import gae_scan
from rollbook.models.logprobs import TokenStats, from_hidden, from_logits, top_k

DEVICE = "cuda"
TOKENS, MORE_TOKENS, WIDTH = 16_384, 32_768, 2_048
SEQUENCES = 8
ROWS, SLOTS = 512, 8_192
GAMMA, LAM = 0.99, 0.95
ROUNDS = 15
MIB = 1 << 20

OURS = "from_logits"
LIGHTRFT = "LightRFT's technique"
VERL = "verl's technique"
MOVED = "moving as many bytes (a copy of half of the logits)"
READ = "largest logit of each row"
OURS_BACK = "from_logits and its gradient"
VERL_BACK = "verl's technique and its gradient"
COPY = "a copy of the logits"
TOP = "top_k of 8"
LOGITS = (
    Comparison(OURS, OURS, LIGHTRFT),
    Comparison(OURS, OURS, VERL),
    Comparison(OURS, OURS, MOVED, target=2.5, bound=True),
    Comparison(OURS, OURS, READ, bound=True),
    Comparison(OURS_BACK, OURS_BACK, VERL_BACK),
    Comparison(OURS_BACK, OURS_BACK, COPY, bound=True),
)

HIDDEN = "from_hidden"
WHOLE = "full logits, then from_logits"
UNFUSED = "full logits, then verl's technique"
PRODUCT = "the product alone"
HIDDEN_BACK = "from_hidden and its gradients"
UNFUSED_BACK = "full logits, then verl's technique, and gradients"
WHOLE_BACK = "full logits, then from_logits, and gradients"
PRODUCTS = "the three products alone"
HIDDENS = (
    Comparison(HIDDEN, HIDDEN, UNFUSED),
    Comparison(HIDDEN, HIDDEN, WHOLE),
    Comparison(HIDDEN, HIDDEN, PRODUCT, target=1.15, bound=True),
    Comparison(HIDDEN_BACK, HIDDEN_BACK, UNFUSED_BACK),
    Comparison(HIDDEN_BACK, HIDDEN_BACK, WHOLE_BACK),
    Comparison(HIDDEN_BACK, HIDDEN_BACK, PRODUCTS, bound=True),
)

GAE = "gae_scan, every slot valid"
GAE_HOLES = "gae_scan, 30 % of the slots masked"
GAE_PACKED = "gae_scan, packed"
GAE_KERNEL = "GAE's kernel alone"
GAE_KERNEL_PACKED = "GAE's kernel alone, packed, offsets on the device"
LOOP = "a loop over time in torch"
OUTPUTS = "a copy of the two outputs"
SCANS = (
    Comparison(GAE, GAE, LOOP),
    Comparison(GAE_HOLES, GAE_HOLES, LOOP),
    Comparison(GAE_PACKED, GAE_PACKED, LOOP),
    Comparison(GAE, GAE, OUTPUTS, target=3, bound=True),
    Comparison(GAE_KERNEL, GAE_KERNEL, OUTPUTS, bound=True),
    Comparison(GAE_KERNEL_PACKED, GAE_KERNEL_PACKED, OUTPUTS, bound=True),
)
GAE_TARGET_MS = 0.3
# Milliseconds of the techniques as they were first measured on an H200: they have to keep these in proportion.
STATED_MS = {LIGHTRFT: 34.0, VERL: 25.8}


def measure(contenders: Sequence[Contender], rounds: int, seed: int) -> Times:
    """As `harness.measure`, by the device's clock."""
    times = Times({contender.name: [] for contender in contenders})
    order = random.Random(seed)
    for round_ in range(-2, rounds):
        turn = list(contenders)
        order.shuffle(turn)
        for contender in turn:
            state = contender.prepare()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            result = contender.run(state)
            end.record()
            end.synchronize()
            del result, state
            if round_ >= 0:
                times.seconds[contender.name].append(start.elapsed_time(end) / 1e3)
        print(f"round {round_ + 1}/{rounds}", file=sys.stderr)
    return times


def peak(call: Callable[[], Any]) -> float:
    """MiB by which the memory in use rose above what it was before, results included."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def gradients(stats: TokenStats | tuple[torch.Tensor, torch.Tensor], leaves: list[torch.Tensor]) -> Any:
    """By a loss of both results."""
    log_probs, entropy = stats
    if entropy is None:
        raise AssertionError("entropy was asked for")
    return torch.autograd.grad(log_probs.sum() + entropy.sum(), leaves)


def off(stats: TokenStats, logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The largest difference of either result to what float64 gives, in millionths of a nat."""
    exact = plain(logits.double(), labels)
    return 1e6 * max(
        float((column - other).abs().max()) for column, other in zip(stats, exact, strict=True) if column is not None
    )


def bench_logits(rounds: int, seed: int) -> BatchReport:
    """From logits (8, 2048, V) in bfloat16."""
    logits = torch.empty(SEQUENCES, TOKENS // SEQUENCES, VOCABULARY, dtype=torch.bfloat16, device=DEVICE).normal_(0, 3)
    labels = torch.randint(0, VOCABULARY, logits.shape[:-1], device=DEVICE)
    half, target = logits[:4], torch.empty_like(logits[:4])
    leaf = logits.detach().requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: from_logits(logits, labels, entropy=True),
        LIGHTRFT: lambda: lightrft(logits, labels),
        VERL: lambda: verl(logits, labels),
        OURS_BACK: lambda: gradients(from_logits(leaf, labels, entropy=True), [leaf]),
        VERL_BACK: lambda: gradients(verl(leaf, labels), [leaf]),
        MOVED: lambda: target.copy_(half),
        READ: lambda: logits.amax(-1),
        COPY: lambda: logits.clone(),
    }
    some = (slice(3, 4), slice(5, 13))
    stats = from_logits(logits[some], labels[some], entropy=True)
    measured = [
        Measured("error of from_logits", off(stats, logits[some], labels[some]), "µnat", 100.0),
        *(
            Measured(
                f"error of {name}",
                off(TokenStats(*side(logits[some], labels[some])), logits[some], labels[some]),
                "µnat",
            )
            for name, side in ((LIGHTRFT, lightrft), (VERL, verl))
        ),
        *(
            Measured(
                f"extra peak of {name}", peak(calls[name]), "MiB", 0.1 * logits.nbytes / MIB if name == OURS else None
            )
            for name in (OURS, LIGHTRFT, VERL)
        ),
        *(
            Measured(f"extra peak of {name}", peak(calls[name]) - logits.nbytes / MIB, "MiB beside the gradient")
            for name in (OURS_BACK, VERL_BACK)
        ),
        Measured(f"extra peak of {TOP}", peak(lambda: top_k(logits[:1], 8)), f"MiB, {TOKENS // SEQUENCES} tokens"),
    ]
    times = measure([Contender(name, lambda _, call=call: call()) for name, call in calls.items()], rounds, seed)
    facts = facts_of(rounds) | {"tokens": TOKENS, "vocabulary": VOCABULARY, "dtype": "bfloat16"}
    relation = (times.median_ms(LIGHTRFT) / times.median_ms(VERL)) / (STATED_MS[LIGHTRFT] / STATED_MS[VERL])
    facts[f"{LIGHTRFT}, ratio to verl's, relative to the first measurement"] = f"{relation:.2f}"
    return BatchReport("From logits", facts, times, [times.compare(comparison) for comparison in LOGITS], measured)


def bench_hidden(rounds: int, seed: int) -> BatchReport:
    """From hidden states (N, 2048) and a weight (V, 2048) in bfloat16."""
    hidden = torch.randn(MORE_TOKENS, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.empty(VOCABULARY, WIDTH, dtype=torch.bfloat16, device=DEVICE).normal_(0, 3 / WIDTH**0.5)
    labels = torch.randint(0, VOCABULARY, (MORE_TOKENS,), device=DEVICE)
    weight.requires_grad_()
    size = (hidden[:TOKENS].nbytes + weight.nbytes) / MIB

    def make_inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return hidden.detach()[:tokens], weight.detach(), labels[:tokens]

    def back(tokens: int) -> Any:
        part = hidden.detach()[:tokens].requires_grad_()
        return gradients(from_hidden(part, weight, labels[:tokens], entropy=True), [part, weight])

    def whole_back(side: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
        part = hidden.detach()[:TOKENS].requires_grad_()
        logits = (part @ weight.T).view(SEQUENCES, -1, VOCABULARY)
        return gradients(side(logits, labels[:TOKENS].view(SEQUENCES, -1)), [part, weight])

    left, right, chosen = make_inputs(TOKENS)
    out = torch.empty(TOKENS, VOCABULARY, dtype=torch.bfloat16, device=DEVICE)

    def products() -> Any:
        torch.mm(left, right.T, out=out)
        return out @ right, out.T @ left

    by_sequence = chosen.view(SEQUENCES, -1)
    calls: dict[str, Callable[[], Any]] = {
        HIDDEN: lambda: from_hidden(left, right, chosen, entropy=True),
        WHOLE: lambda: from_logits(left @ right.T, chosen, entropy=True),
        UNFUSED: lambda: verl((left @ right.T).view(SEQUENCES, -1, VOCABULARY), by_sequence),
        PRODUCT: lambda: torch.mm(left, right.T, out=out),
        HIDDEN_BACK: lambda: back(TOKENS),
        UNFUSED_BACK: lambda: whole_back(verl),
        WHOLE_BACK: lambda: whole_back(rollbook_logprobs),
        PRODUCTS: products,
    }
    some = slice(1000, 1016)
    stats = from_hidden(left, right, chosen, entropy=True)
    exact = left[some].double() @ right.double().T
    error = off(TokenStats(stats.logprobs[some], stats.entropy[some]), exact, chosen[some])  # type: ignore[index]
    del exact, stats
    more = make_inputs(MORE_TOKENS)
    more_size = (hidden.nbytes + weight.nbytes) / MIB
    measured = [
        Measured("error of from_hidden", error, "µnat", 100.0),
        Measured(f"extra peak of {HIDDEN}", peak(calls[HIDDEN]), "MiB", 512.0),
        Measured(f"extra peak of {WHOLE}", peak(calls[WHOLE]), "MiB"),
        Measured(f"extra peak of {UNFUSED}", peak(calls[UNFUSED]), "MiB"),
        Measured(f"extra peak of {HIDDEN_BACK}", peak(calls[HIDDEN_BACK]) - size, "MiB beside the gradients", 1024.0),
        Measured(f"extra peak of {WHOLE_BACK}", peak(calls[WHOLE_BACK]) - size, "MiB beside the gradients"),
        Measured(
            f"extra peak of {HIDDEN}, {MORE_TOKENS} tokens",
            peak(lambda: from_hidden(*more, entropy=True)),
            "MiB",
            1024.0,
        ),
        Measured(
            f"extra peak of {HIDDEN_BACK}, {MORE_TOKENS} tokens",
            peak(lambda: back(MORE_TOKENS)) - more_size,
            "MiB beside the gradients",
            1024.0,
        ),
    ]
    times = measure([Contender(name, lambda _, call=call: call()) for name, call in calls.items()], rounds, seed)
    facts = facts_of(rounds) | {"tokens": TOKENS, "hidden": WIDTH, "vocabulary": VOCABULARY, "dtype": "bfloat16"}
    return BatchReport(
        "From hidden states", facts, times, [times.compare(comparison) for comparison in HIDDENS], measured
    )


def by_loop(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """LightRFT's technique: what is masked becomes 0, then one column of the batch at a time.

    Its time is that of some fifty thousand launches, so it follows the host and not the device.
    """
    values, rewards = values * mask, rewards * mask
    ahead, reversed_advantages = torch.zeros_like(rewards[:, 0]), []
    width = rewards.shape[1]
    for i in reversed(range(width)):
        after = values[:, i + 1] if i < width - 1 else 0.0
        ahead = rewards[:, i] + GAMMA * after - values[:, i] + GAMMA * LAM * ahead
        reversed_advantages.append(ahead)
    advantages = torch.stack(reversed_advantages[::-1], 1)
    return advantages, advantages + values


def bench_scan(rounds: int, seed: int) -> BatchReport:
    """GAE of (512, 8192) in float32."""
    rewards, values = torch.randn(2, ROWS, SLOTS, device=DEVICE)
    full = torch.ones(ROWS, SLOTS, dtype=torch.bool, device=DEVICE)
    holes = torch.rand(ROWS, SLOTS, device=DEVICE) > 0.3
    flat = rewards.view(-1), values.view(-1), full.view(-1)
    offsets = torch.arange(0, ROWS + 1, device=DEVICE) * SLOTS
    outputs = torch.empty_like(rewards), torch.empty_like(rewards)
    calls: dict[str, Callable[[], Any]] = {
        GAE: lambda: gae_scan(rewards, values, full, gamma=GAMMA, lam=LAM),
        GAE_HOLES: lambda: gae_scan(rewards, values, holes, gamma=GAMMA, lam=LAM),
        GAE_PACKED: lambda: gae_scan(*flat, [SLOTS] * ROWS, gamma=GAMMA, lam=LAM),
        GAE_KERNEL: lambda: scan_triton.gae(rewards, values, full, None, GAMMA, LAM),
        GAE_KERNEL_PACKED: lambda: scan_triton.gae(*flat, offsets, GAMMA, LAM),
        LOOP: lambda: by_loop(rewards, values, full),
        OUTPUTS: lambda: (outputs[0].copy_(rewards), outputs[1].copy_(values)),
    }
    expected = by_loop(rewards.double(), values.double(), full)
    error = max(
        float((column.view(ROWS, SLOTS) - other).abs().max())
        for name in (GAE, GAE_PACKED, GAE_KERNEL_PACKED)
        for column, other in zip(calls[name](), expected, strict=True)
    )
    times = measure([Contender(name, lambda _, call=call: call()) for name, call in calls.items()], rounds, seed)
    measured = [
        Measured("largest difference to the loop in float64", 1e6 * error, "millionths"),
        *(
            Measured(f"time of {name}", times.median_ms(name), "ms", GAE_TARGET_MS)
            for name in (GAE, GAE_HOLES, GAE_PACKED, GAE_KERNEL, GAE_KERNEL_PACKED)
        ),
    ]
    facts = facts_of(rounds) | {"rows": ROWS, "slots": SLOTS, "dtype": "float32"}
    return BatchReport("GAE", facts, times, [times.compare(comparison) for comparison in SCANS], measured)


def facts_of(rounds: int) -> dict[str, Any]:
    """What every report says."""
    return {"device": torch.cuda.get_device_name(), "rounds": rounds}


def main() -> None:
    """Run all three, print the reports as they come and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds after the warm-up")
    parser.add_argument("--seed", type=int, default=20_260, help="of the numbers and of each round's order")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where to write")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    about = harness.environment() | {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "triton": metadata.version("triton"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    reports = []
    for benchmark in (bench_scan, bench_logits, bench_hidden):
        reports.append(benchmark(options.rounds, options.seed))
        print(reports[-1].markdown(), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    options.results.mkdir(parents=True, exist_ok=True)
    description = ", ".join(f"{key} {value}" for key, value in about.items() if value is not None)
    text = "\n".join(["# Kernels on a CUDA device", "", description, "", *(report.markdown() for report in reports)])
    (options.results / "kernels.md").write_text(text)
    written = {"environment": about, "reports": [report.plain() for report in reports]}
    (options.results / "kernels.json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("bench_kernels: there is no CUDA device here, so nothing was measured")
