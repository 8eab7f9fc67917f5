"""Log-probs and entropy of 512 tokens over a vocabulary of 151,936, on the CPU: Rollbook beside its peers' techniques.

Run as `python -m benchmarks.bench_tokens [--rounds 5] [--json PATH]` from the project root; `--n` is not used. Logits
are float32, (8, 64, 151936), 311 MB; from hidden states, (8, 64, 256), they are made and taken together. Nothing has to
be installed: what LightRFT and verl do with logits are a few lines each, which stand here in other words.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributions import Categorical

from benchmarks import harness
from benchmarks.bench_batches import BatchReport, Measured
from benchmarks.harness import Comparison, Contender, Options, Report
from rollbook.models.logprobs import from_hidden, from_logits

VOCABULARY = 151_936
SHAPE = (8, 64)
WIDTH = 256
"""Of hidden states: small, so that what is done with logits is not lost beside the product."""

OURS = "from_logits"
LIGHTRFT = "LightRFT's technique"
VERL = "verl's technique"
PLAIN = "log_softmax, then exp and a product"
OURS_BF16 = "from_logits, bfloat16"
LIGHTRFT_BF16 = "LightRFT's technique, bfloat16"
READ = "reading the logits once (amax)"
POWERS = "a power of each logit, into a reused row"
HIDDEN = "from_hidden"
WHOLE = "full logits, then from_logits"
PRODUCT = "the product alone"

ROUNDS = 5
PEAK_TARGET = 0.1
COMPARISONS = (
    Comparison(OURS, OURS, LIGHTRFT, target=6),
    Comparison(OURS, OURS, VERL),
    Comparison(OURS, OURS, PLAIN),
    Comparison(OURS_BF16, OURS_BF16, LIGHTRFT_BF16),
    Comparison(OURS, OURS, POWERS, bound=True),
    Comparison(OURS, OURS, READ, bound=True),
    Comparison(HIDDEN, HIDDEN, WHOLE),
    Comparison(HIDDEN, HIDDEN, PRODUCT, bound=True),
)
# Milliseconds of the peers themselves on another machine: their techniques have to keep these in proportion.
STATED_MS = {LIGHTRFT: 2_414.0, VERL: 1_592.0, PLAIN: 1_533.0}

Pair = tuple[torch.Tensor, torch.Tensor]


def lightrft(logits: torch.Tensor, labels: torch.Tensor) -> Pair:
    """The chosen logit less the logarithm of all powers, one sequence at a time; entropy by torch's distribution."""
    if logits.dtype == torch.float32:
        powers = torch.stack([torch.logsumexp(sequence, -1) for sequence in logits])
        log_probs = logits.gather(-1, labels[..., None])[..., 0] - powers
    else:
        log_probs = by_sequence(logits, labels)
    return log_probs, Categorical(logits=logits).entropy()


def verl(logits: torch.Tensor, labels: torch.Tensor) -> Pair:
    """The same log-probs; entropy as the logarithm of all powers less the mean logit."""
    if logits.dtype == torch.float32:
        powers = torch.stack([torch.logsumexp(sequence, -1) for sequence in logits])
        log_probs = logits.gather(-1, labels[..., None])[..., 0] - powers
    else:
        log_probs = by_sequence(logits, labels)
    return log_probs, torch.logsumexp(logits, -1) - (torch.softmax(logits, -1) * logits).sum(-1)


def by_sequence(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probs in the logits' own type, one sequence at a time, as both peers take 16 bits."""
    pairs = zip(logits, labels, strict=True)
    return torch.stack([torch.log_softmax(row, -1).gather(-1, chosen[:, None])[:, 0] for row, chosen in pairs])


def plain(logits: torch.Tensor, labels: torch.Tensor) -> Pair:
    """All log-probs, once."""
    log_probs = torch.log_softmax(logits, -1)
    return log_probs.gather(-1, labels[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)


def rollbook_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> Pair:
    """What users call."""
    stats = from_logits(logits, labels, entropy=True)
    if stats.entropy is None:
        raise AssertionError("entropy was asked for")
    return stats.logprobs, stats.entropy


SIDES: dict[str, Callable[[torch.Tensor, torch.Tensor], Pair]] = {
    OURS: rollbook_logprobs,
    LIGHTRFT: lightrft,
    VERL: verl,
    PLAIN: plain,
}


def make(seed: int, dtype: torch.dtype = torch.float32) -> Pair:
    """Logits and labels."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.empty((*SHAPE, VOCABULARY), dtype=dtype).normal_(0, 3, generator=draw)
    return logits, torch.randint(0, VOCABULARY, SHAPE, generator=draw)


def errors(logits: torch.Tensor, labels: torch.Tensor, side: str) -> float:
    """The largest difference to the same computed in float64, over log-probs and entropies."""
    some = (slice(0, 1), slice(0, 8))
    exact = plain(logits[some].double(), labels[some])
    actual = SIDES[side](logits[some], labels[some])
    return max(float((column - other).abs().max()) for column, other in zip(actual, exact, strict=True))


def peak(side: str, seed: int) -> float:
    """How far resident memory rose above what it was before, in units of the logits; for a process of its own."""
    harness.single_thread()
    logits, labels = make(seed)
    SIDES[side](torch.zeros(1, 2, 8), torch.zeros(1, 2, dtype=torch.int64))  # what it imports and keeps
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    SIDES[side](logits, labels)
    return (_status("VmHWM") - before) / logits.nbytes


def _status(name: str) -> int:
    stated = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(stated[name].split()[0]) * 1024


def measure_peaks(seed: int) -> list[Measured]:
    """Each side's peak, in a new process; nothing where there is no Linux to ask."""
    peaks = []
    for side in SIDES if sys.platform == "linux" else ():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            value = pool.apply(peak, (side, seed))
        peaks.append(
            Measured(f"extra peak memory of {side}", value, "of the logits", PEAK_TARGET if side == OURS else None)
        )
    return peaks


def contenders(seed: int) -> tuple[list[Contender], list[Measured]]:
    """All sides, and how far each is off."""
    logits, labels = make(seed)
    narrow, _ = make(seed, torch.bfloat16)
    off = [Measured(f"error of {side}, float32", 1e6 * errors(logits, labels, side), "µnat") for side in SIDES]
    for side in SIDES:
        target = 100.0 if side == OURS else None
        value = 1e6 * errors(narrow, labels, side)
        off.append(Measured(f"error of {side}, bfloat16", value, "µnat", target))
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn((*SHAPE, WIDTH), generator=draw)
    weight = torch.randn((VOCABULARY, WIDTH), generator=draw) / WIDTH**0.5
    row = torch.empty(VOCABULARY)
    flat = logits.view(-1, VOCABULARY)

    def powers(_: Any) -> None:
        for chunk in flat:
            torch.exp(chunk, out=row)

    by_side = [Contender(side, lambda _, call=call: call(logits, labels)) for side, call in SIDES.items()]
    return [
        *by_side,
        Contender(OURS_BF16, lambda _: rollbook_logprobs(narrow, labels)),
        Contender(LIGHTRFT_BF16, lambda _: lightrft(narrow, labels)),
        Contender(READ, lambda _: logits.amax(-1)),
        Contender(POWERS, powers),
        Contender(HIDDEN, lambda _: from_hidden(hidden, weight, labels, entropy=True)),
        Contender(WHOLE, lambda _: from_logits(hidden @ weight.T, labels, entropy=True)),
        Contender(PRODUCT, lambda _: hidden @ weight.T),
    ], off


def run(options: Options) -> Report:
    """Measure how far each side is off, then time them, then their peaks."""
    rounds = options.rounds or ROUNDS
    sides, off = contenders(options.seed)
    times = harness.measure(sides, rounds, options.seed)
    del sides
    scale = {name: times.median_ms(name) / stated for name, stated in STATED_MS.items()}
    facts = {
        "tokens": SHAPE[0] * SHAPE[1],
        "vocabulary": VOCABULARY,
        "rounds": rounds,
        **{
            f"{name}, relation to LightRFT's over what was stated": f"{scale[name] / scale[LIGHTRFT]:.2f}"
            for name in (VERL, PLAIN)
        },
    }
    results = [times.compare(comparison) for comparison in COMPARISONS]
    return BatchReport("Log-probs and entropy", facts, times, results, [*measure_peaks(options.seed), *off])


if __name__ == "__main__":
    harness.main(run)
