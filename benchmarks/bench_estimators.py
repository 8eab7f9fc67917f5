"""Advantages on the CPU: GAE beside LightRFT's technique and others, GRPO beside Trinity-RFT, and a copy as the bound.

Run as `python -m benchmarks.bench_estimators [--n 4096] [--rounds 9] [--json PATH]` from the project root. GAE takes
rows of log-normal length, padded to A, as a trainer has them; packed, as tokens alone; and rows of full length, which
no rollout has, as the worst case. Every side runs on one thread, and the compiled code of numba is loaded before
anything is timed; how long a process waits for that is among the facts. scipy is no dependency: it runs if it is there.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import harness, peers
from benchmarks.bench_batches import materialised
from benchmarks.harness import Comparison, Contender, Options, Report, Times
from benchmarks.workload import RESPONSE_MAX, RESPONSE_MEDIAN, RESPONSE_SIGMA, Workload, make_workload
from rollbook.algorithms import estimate, scan
from rollbook.algorithms.advantages import gae, grpo
from rollbook.compat.lightrft.maker import NaiveExperienceMaker
from rollbook.core.experience import Experience
from rollbook.core.rows import Rows

SHAPES = ((128, 8192), (32, 2048))
GAMMA, LAM = 0.99, 0.95
ROUNDS = 9
CALLS = 5  # a single call finds cold caches, here as in a trainer; a series says what the call itself takes
TARGET_GAE, TARGET_GRPO = 100, 30
# Milliseconds elsewhere of LightRFT's own loop, of a compiled scan and of numpy, time-major: what the relation was.
LIGHTRFT_MS, COMPILED_MS, NUMPY_MS = 541.0, 2.7, 44.0

THEIR_GRPO = "Trinity grpo"
GRPO = "grpo, from columns"
GRPO_ASSIGNED = "grpo, from columns, and assigned to them"
GRPO_SCORES = "grpo, scores of rows alone"
GRPO_ROWS = "grpo, from a list of records"

MAKER = NaiveExperienceMaker(None, None, None, None, None, 1, None)
Pair = tuple[Any, Any]


class Tokens:
    """Rewards on the last action, a critic's values and a mask, (B, A), with NaN nowhere, as every side needs them."""

    def __init__(self, rows: int, width: int, seed: int, full: bool) -> None:
        rng = np.random.default_rng(seed)
        drawn = np.rint(rng.lognormal(np.log(RESPONSE_MEDIAN), RESPONSE_SIGMA, size=rows))
        lengths = np.full(rows, width) if full else np.clip(drawn, 1, min(width, RESPONSE_MAX)).astype(np.int64)
        self.lengths: list[int] = lengths.tolist()
        self.mask = torch.arange(width)[None] < torch.from_numpy(lengths)[:, None]
        self.values = torch.from_numpy(rng.normal(size=(rows, width)).astype(np.float32))
        self.rewards = torch.zeros(rows, width)
        self.rewards[torch.arange(rows), torch.from_numpy(lengths) - 1] = torch.from_numpy(
            rng.integers(0, 2, size=rows).astype(np.float32)
        )

    def packed(self) -> tuple[Rows, Rows]:
        """Rewards and values of the tokens alone."""
        return Rows(self.rewards[self.mask], self.lengths), Rows(self.values[self.mask], self.lengths)


# --- techniques, written anew ---------------------------------------------------------------------------------------


def lightrft(tokens: Tokens) -> Pair:
    """A Python loop over time on columns of the matrix; masked slots are zeroed first."""
    values, rewards = tokens.mask * tokens.values, tokens.mask * tokens.rewards
    width = rewards.size(1)
    carried: Any = 0
    backwards = []
    for t in range(width - 1, -1, -1):
        following: Any = values[:, t + 1] if t + 1 < width else 0.0
        carried = rewards[:, t] + GAMMA * following - values[:, t] + GAMMA * LAM * carried
        backwards.append(carried)
    advantages = torch.stack(backwards[::-1], dim=1)
    return advantages, advantages + values


def _deltas(tokens: Tokens) -> tuple[NDArray[Any], NDArray[Any]]:
    values, rewards = (tokens.mask * tokens.values).numpy(), (tokens.mask * tokens.rewards).numpy()
    deltas = rewards - values
    deltas[:, :-1] += GAMMA * values[:, 1:]
    return deltas, values


def time_major(tokens: Tokens) -> Pair:
    """numpy, one step of all rows at a time."""
    deltas, values = _deltas(tokens)
    steps = np.ascontiguousarray(deltas.T)
    decay = np.float32(GAMMA * LAM)
    for t in range(len(steps) - 2, -1, -1):
        steps[t] += decay * steps[t + 1]
    advantages = np.ascontiguousarray(steps.T)
    return advantages, advantages + values


def filtered(lfilter: Callable[..., Any], tokens: Tokens) -> Pair:
    """scipy's recursive filter over reversed rows."""
    deltas, values = _deltas(tokens)
    advantages = lfilter([1.0], [1.0, -GAMMA * LAM], deltas[:, ::-1], axis=1)[:, ::-1]
    return advantages, advantages + values


def repeated(side: Callable[[Tokens], Pair], tokens: Tokens) -> None:
    """The same call again and again."""
    for _ in range(CALLS):
        side(tokens)


# --- ours -----------------------------------------------------------------------------------------------------------


def rollbook_gae(tokens: Tokens) -> Pair:
    estimated = gae(tokens.rewards, tokens.values, tokens.mask, gamma=GAMMA, lam=LAM)
    return estimated.advantages, estimated.returns


def inherited(tokens: Tokens) -> Pair:
    """By LightRFT's name."""
    pair: Pair = MAKER.get_advantages_and_returns(tokens.values, tokens.rewards, tokens.mask, GAMMA, LAM)
    return pair


def inherited_int(tokens: Tokens) -> Pair:
    """By LightRFT's name, with a mask of numbers."""
    pair: Pair = MAKER.get_advantages_and_returns(tokens.values, tokens.rewards, tokens.mask.long(), GAMMA, LAM)
    return pair


def ours_packed(packed_tokens: tuple[Rows, Rows]) -> Pair:
    estimated = gae(*packed_tokens, gamma=GAMMA, lam=LAM)
    return estimated.advantages, estimated.returns


def ours_plain(tokens: Tokens) -> Pair:
    """Without numba, as where it is not installed."""
    loaded = list(scan._numba)
    scan._numba[:] = [None]
    try:
        return rollbook_gae(tokens)
    finally:
        scan._numba[:] = loaded


def run_gae(
    rows: int, width: int, full: bool, rounds: int, seed: int
) -> tuple[Times, list[Comparison], dict[str, Any]]:
    """One shape: every side on the same tokens, which must come out the same."""
    shape = f"B={rows} A={width}" + (", full rows" if full else "")
    tokens = Tokens(rows, width, seed, full)
    their_loop, mine = f"LightRFT's loop, {shape}", f"GAE, {shape}"
    plain, packed = f"GAE without numba, {shape}", f"GAE packed, {shape}"
    numpy_, scipy_ = f"numpy, time-major, {shape}", f"scipy lfilter, {shape}"
    by_name, by_name_int = f"get_advantages_and_returns, {shape}", f"get_advantages_and_returns, int64 mask, {shape}"
    copy = f"copy of the two outputs, {shape}"
    outputs = torch.empty_like(tokens.values), torch.empty_like(tokens.values)
    contenders = [
        Contender(their_loop, lightrft, lambda: tokens),
        Contender(mine, rollbook_gae, lambda: tokens),
        Contender(by_name, inherited, lambda: tokens),
        Contender(by_name_int, inherited_int, lambda: tokens),
        Contender(packed, ours_packed, tokens.packed),
        Contender(plain, ours_plain, lambda: tokens),
        Contender(numpy_, time_major, lambda: tokens),
        Contender(copy, lambda _: (outputs[0].copy_(tokens.rewards), outputs[1].copy_(tokens.values))),
    ]
    often = f"{CALLS} calls in a row: "
    contenders += [
        Contender(often + their_loop, partial(repeated, lightrft), lambda: tokens),
        Contender(often + mine, partial(repeated, rollbook_gae), lambda: tokens),
    ]
    try:
        lfilter = importlib.import_module("scipy.signal").lfilter
        contenders.append(Contender(scipy_, partial(filtered, lfilter), lambda: tokens))
    except ImportError:
        pass
    expected = [torch.as_tensor(column)[tokens.mask] for column in lightrft(tokens)]
    for contender in contenders:
        if contender.name in (their_loop, copy) or contender.name.startswith(often):
            continue
        pair = contender.run(contender.prepare())
        for actual, other in zip(pair, expected, strict=True):
            column = (
                actual.values
                if isinstance(actual, Rows)
                else torch.as_tensor(np.ascontiguousarray(actual))[tokens.mask]
            )
            torch.testing.assert_close(column.to(other.dtype), other, rtol=1e-3, atol=1e-3)
    times = harness.measure(contenders, rounds, seed)
    target = None if full else TARGET_GAE  # no rollout has rows that are all of full length
    comparisons = [
        Comparison(mine, mine, their_loop, target=target),
        Comparison(mine, mine, copy, bound=True),
        Comparison(by_name, by_name, their_loop),
        Comparison(by_name_int, by_name_int, their_loop),
        Comparison(often + mine, often + mine, often + their_loop),
        Comparison(packed, packed, their_loop, target=target),
        Comparison(plain, plain, their_loop),
        *(Comparison(other.name, other.name, their_loop) for other in contenders if other.name in (numpy_, scipy_)),
    ]
    facts: dict[str, Any] = {f"tokens of {shape}:": f"{sum(tokens.lengths):,} of {rows * width:,} slots"}
    if full and (rows, width) == SHAPES[0]:
        loop = times.median_ms(their_loop)
        facts["the loop's ratio to a compiled scan and to numpy, relative to LightRFT's own:"] = (
            f"{loop / times.median_ms(mine) / (LIGHTRFT_MS / COMPILED_MS):.2f}, "
            f"{loop / times.median_ms(numpy_) / (LIGHTRFT_MS / NUMPY_MS):.2f}"
        )
    return times, comparisons, facts


# --- GRPO -----------------------------------------------------------------------------------------------------------


def trinity_grpo(workload: Workload, options: Options) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    """Trinity's function as its pipeline calls it, and its records made anew, since it writes into them."""
    record = peers.trinity(options.scratch).Experience
    peers.verl(options.scratch)  # its folder holds Ray, which Trinity's logging imports
    advantage_fn = importlib.import_module("trinity.algorithm.advantage_fn.grpo_advantage").GRPOGroupedAdvantage()
    return lambda exps: advantage_fn(exps)[0], lambda: workload.build(record)


def estimate_and_assign(experiences: Any) -> Any:
    estimated = estimate("grpo", experiences)
    return experiences.assign(advantages=estimated.advantages, returns=estimated.returns)


def check_grpo(their_records: list[Any], advantages: Any) -> None:
    """Raise unless both sides have the same advantages for every token."""
    for row, (row_advantages, record) in enumerate(zip(advantages, their_records, strict=True)):
        if not torch.allclose(row_advantages, record.advantages.float(), rtol=1e-4, atol=1e-5):
            raise AssertionError(f"grpo: row {row} differs")


def run_grpo(workload: Workload, rounds: int, options: Options) -> tuple[Times, list[Comparison], dict[str, Any]]:
    """Groups of 8, rewards of 0 and 1: advantages for every token."""
    their_grpo, records = trinity_grpo(workload, options)
    experiences = materialised(workload.rows)
    check_grpo(their_grpo(records()), estimate("grpo", experiences).advantages)
    rewards = [row["reward"] for row in workload.rows]
    groups = [row["eid"]["task"] for row in workload.rows]
    columns = partial(materialised, workload.rows)
    times = harness.measure(
        [
            Contender(THEIR_GRPO, their_grpo, records),
            Contender(GRPO, lambda records_or_columns: estimate("grpo", records_or_columns), columns),
            Contender(GRPO_ASSIGNED, estimate_and_assign, columns),
            Contender(
                GRPO_ROWS,
                lambda records_or_columns: estimate("grpo", records_or_columns),
                lambda: workload.build(Experience),
            ),
            Contender(
                GRPO_SCORES,
                lambda records_or_columns: grpo(*records_or_columns),
                lambda: (np.array(rewards), np.array(groups)),
            ),
        ],
        rounds,
        options.seed,
    )
    comparisons = [
        Comparison(GRPO, GRPO, THEIR_GRPO, target=TARGET_GRPO),
        Comparison(GRPO_ASSIGNED, GRPO_ASSIGNED, THEIR_GRPO),
        Comparison(GRPO_SCORES, GRPO_SCORES, THEIR_GRPO),
        Comparison(GRPO_ROWS, GRPO_ROWS, THEIR_GRPO),
    ]
    return times, comparisons, {"experiences of GRPO:": len(workload.rows)}


def first_call() -> str:
    """How long a new process waits at its first large call, and at the next one, with compiled code in its cache."""
    code = (
        "import time, torch\n"
        "from rollbook.algorithms import scan\n"
        "torch.set_num_threads(1)\n"
        "data = torch.zeros(32, 2048), torch.zeros(32, 2048), torch.ones(32, 2048, dtype=torch.bool)\n"
        "for _ in range(2):\n"
        "    start = time.perf_counter(); scan.gae_scan(*data); scan.count_rewards(data[0], data[2])\n"
        "    print(f'{1e3 * (time.perf_counter() - start):.2f} ms')\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ", then ".join(finished.stdout.split("\n")[:2])


def run(options: Options) -> Report:
    """GAE in every shape, then GRPO."""
    rounds = options.rounds or ROUNDS
    parts = [run_gae(*shape, full, rounds, options.seed) for shape in SHAPES for full in (False, True)]
    parts.append(run_grpo(make_workload(options.n, options.seed), rounds, options))
    facts: dict[str, Any] = {
        "rounds": rounds,
        "scans by": scan.backend(),
        "first large call of a process:": first_call(),
    }
    seconds: dict[str, list[float]] = {}
    results = []
    for times, comparisons, part_facts in parts:
        seconds |= times.seconds
        facts |= part_facts
        results += [times.compare(comparison) for comparison in comparisons]
    return Report("Estimators", facts, Times(seconds), results)


if __name__ == "__main__":
    harness.main(run)
