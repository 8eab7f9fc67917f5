"""Reference numbers of ten training steps of every preset and of its variations, on a one-layer Llama.

    python -m tests.train.preset_steps --record     # write preset_steps.json
    python -m tests.train.preset_steps --compare    # print every difference from preset_steps.json

The numbers of a case depend on its seeds alone. Only the functions under "Construction" use the API of the trainer.
Record anew only for an intended change of numbers, and give the reason in the changelog.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rollbook
from rollbook import EID, Experience
from rollbook.book.book import Book
from rollbook.models import Actor, Critic
from rollbook.rollout import EnvironmentConfig, Prompt, Reply
from rollbook.train.algorithm import PRESET_NAMES, AlgorithmConfig
from rollbook.train.learner import MinibatchConfig
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.prompts import Prompts
from rollbook.train.replay_config import ReplayConfig
from rollbook.train.trainer import Trainer
from tests import tiny

STEPS = 10
"""Recorded steps of each case."""
TOLERANCE = 1e-6
"""Relative and absolute, of every number."""
PATH = Path(__file__).with_name("preset_steps.json")

TOKENIZER = tiny.words()
WORDS = tiny.TEXT.split()
MAX_TOKENS = 6
SEED = 3

METRICS = {"loss": "loss", "grad_norm": "grad_norm", "value_loss": "critic/value_loss"}
"""Names of the recorded metrics in a step's report."""

Numbers = dict[str, Any]
"""The numbers of one step."""

# --- Construction -----------------------------------------------------------------------------------------------------


def build_model(seed: int = 0) -> Any:
    """Build a one-layer Llama with random weights."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    return tiny.llama(vocab=len(TOKENIZER), seed=seed, max_position_embeddings=64, **sizes)


def build_critic(seed: int) -> Critic:
    """Build a value model with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Critic(build_model(seed), value_head="normal")


def build_trainer(
    algorithm: str | AlgorithmConfig,
    folder: Path,
    *,
    reward: Callable[..., Any] | None = None,
    environment: Callable[[Prompt], Any] | None = None,
    records: Sequence[Experience] = (),
    expert: Sequence[Experience] = (),
    batch: Mapping[str, Any] | None = None,
    replay: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    prompts_per_step: int = 2,
    lora: Mapping[str, Any] | None = None,
    precision: str = "float32",
    book: rollbook.Book | None = None,
    **changes: Any,
) -> Trainer:
    """Build the trainer of a case.

    Args:
        algorithm: A preset's name, or an algorithm.
        folder: An empty folder for books.
        reward: Reward function of `response_ids`.
        environment: Factory of environments, for multi-turn rollouts.
        records: Records to train on, in place of rollouts.
        expert: Records of the expert's book.
        batch: Options of the minibatches.
        replay: Options of the records a step takes.
        sampling: Sampling options.
        prompts_per_step: Prompts, or leased groups, of each step.
        lora: Options of the policy's adapters.
        precision: Of the passes.
        book: The book; in memory by default.
        **changes: Changes of the algorithm.
    """
    settings = AlgorithmConfig.preset(algorithm, **changes)
    model = build_model().bfloat16() if precision == "bfloat16" else build_model()
    actor = Actor(model, tokenizer=TOKENIZER, lora=lora)
    critic = build_critic(11) if settings.needs_critic else None
    teacher = Actor(build_model(12), tokenizer=TOKENIZER) if settings.needs_teacher else None
    # A reference other than the initial policy: the divergence is not 0 in the first step.
    reference = Actor(build_model(13), tokenizer=TOKENIZER) if settings.needs_reference else None
    if environment is None and reward is None and settings.takes_rewards and not records:
        reward = reward_sum
    book = rollbook.open("memory:") if book is None else book
    if records:
        book.append(records)
    return Trainer(
        actor,
        settings,
        book,
        prompts=None if records else build_prompts(),
        reward=reward,
        environment=environment and EnvironmentConfig(factory=environment, max_turns=3, on_truncation="respond"),
        sampling=None if settings.estimator is None else {"max_tokens": MAX_TOKENS, **(sampling or {})},
        prompts_per_step=prompts_per_step,
        critic=critic,
        reference=reference,
        teacher=teacher,
        optimizer=OptimizerConfig(lr=0.02, eps=1e-2),
        critic_optimizer=OptimizerConfig(lr=0.02, eps=1e-2) if critic is not None else None,
        minibatch=MinibatchConfig(**{"minibatches": 2, **(batch or {})}),
        replay=ReplayConfig(**(replay or {})),
        expert=expert_book(folder, expert) if expert else None,
        precision=precision,
        seed=SEED,
    )


def expert_book(folder: Path, records: Sequence[Experience]) -> Book:
    """Write the expert's records to a book."""
    book = rollbook.open(folder / "expert")
    book.append(records)
    return book


def watch_updates(trainer: Trainer) -> dict[int, Any]:
    """Return the records of each update by its step; filled while the trainer runs."""
    records_by_step: dict[int, Any] = {}
    update = trainer.learner.update

    def watched(records: Any, *, step: int, **options: Any) -> Any:
        records_by_step[step] = records
        return update(records, step=step, **options)

    trainer.learner.update = watched  # type: ignore[method-assign]
    return records_by_step


# --- Data -------------------------------------------------------------------------------------------------------------


def build_prompts() -> Prompts:
    """Build prompts of one to four words, with answers for supervised learning and preferences."""
    rows = []
    for i in range(10):
        start = 3 * i
        rows.append(
            {
                "prompt": " ".join(WORDS[start : start + 1 + i % 4]),
                "response": " ".join(WORDS[start + 5 : start + 7 + i % 3]),
                "chosen": " ".join(WORDS[start + 5 : start + 7 + i % 3]),
                "rejected": " ".join(WORDS[start + 9 : start + 10 + i % 4]),
            }
        )
    return Prompts(rows, seed=SEED)


def build_records(groups: int, *, engine: bool = True, policy: bool = False) -> list[Experience]:
    """Build groups of four records with rewards, as another framework could have written them.

    Args:
        groups: Number of groups.
        engine: Whether they have the engine's log-probs.
        policy: Whether every second record also has the policy's.
    """
    generator = np.random.default_rng(7)
    records = []
    for group in range(groups):
        for run in range(4):
            prompt_length, length = 1 + group % 3, 2 + int(generator.integers(4))
            log_probs = [-float(number) for number in generator.uniform(2.0, 4.0, (2, length)).ravel()]
            records.append(
                Experience(
                    eid=EID(batch="other", task=group, run=run, suffix=""),
                    tokens=generator.integers(9, len(TOKENIZER), prompt_length + length).tolist(),
                    prompt_length=prompt_length,
                    reward=float(generator.integers(5)) / 4,
                    group_size=4,
                    policy_versions=0,
                    logprobs=log_probs[:length] if engine else None,
                    old_logprobs=log_probs[length:] if policy and run % 2 else None,
                )
            )
    return records


def build_expert_records() -> list[Experience]:
    """Build records of prompts and answers alone."""
    return [
        Experience(
            eid=EID(batch="expert", task=i, suffix=""),
            tokens=[9 + i, 12 + i, 20 + i, 10 + i, 2],
            prompt_length=1 + i % 3,
            reward=1.0,
        )
        for i in range(7)
    ]


# --- Rewards and environments -----------------------------------------------------------------------------------------


def reward_sum(response_ids: list[int]) -> float:
    """Score a response by its token ids: 0, 0.25, ..., 1."""
    return (sum(response_ids) % 5) / 4


def reward_rare(response_ids: list[int]) -> float:
    """Return 1 for one response in six, so that most groups are constant."""
    return float(response_ids[0] % 6 == 0)


def reward_failing(response_ids: list[int]) -> float | None:
    """Raise, or return NaN or None, for about four responses in seven."""
    remainder = sum(response_ids) % 7
    if remainder == 0:
        raise RuntimeError("no score")
    if remainder == 1:
        return math.nan
    if remainder == 2:
        return None
    return remainder / 4


class CountingGame:
    """Environment of up to three turns that rewards each turn by its number of words."""

    def __init__(self, prompt: Prompt, failing: bool = False) -> None:
        run = 0 if prompt.eid is None else prompt.eid.run
        self.turns_left = 1 + run % 3
        self.fails = failing and run == 1

    def begin(self) -> str | None:
        return None

    def respond(self, text: str) -> Reply:
        if self.fails:
            raise RuntimeError("no observation")
        self.turns_left -= 1
        return Reply(" two plus three", reward=len(text.split()) / 4 - 0.5, done=self.turns_left == 0)


# --- Cases ------------------------------------------------------------------------------------------------------------

GRPO: dict[str, Any] = {"algorithm": "grpo", "group_size": 4, "kl_coef": 0.0}
PPO: dict[str, Any] = {"algorithm": "ppo", "group_size": 4, "kl_coef": 0.0}
REPLAY = {"kind": "replay", "reuse": 3}

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name, "group_size": 4} for name in PRESET_NAMES},
    # Presets with other group sizes, and the one that needs an expert.
    "ppo": {"algorithm": "ppo", "prompts_per_step": 6},
    "dapo": {"algorithm": "dapo", "group_size": 6},
    "on_policy_distill": {"algorithm": "on_policy_distill", "prompts_per_step": 6},
    "mix": {"algorithm": "mix", "group_size": 4, "expert": build_expert_records(), "replay": {"expert_share": 0.3}},
    "sft": {"algorithm": "sft", "prompts_per_step": 4},
    "dpo": {"algorithm": "dpo", "prompts_per_step": 4},
    # KL.
    "grpo, KL in the loss": {**GRPO, "kl_coef": 0.5, "kl_estimator": "k3"},
    "grpo, KL in the reward": {**GRPO, "kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"},
    "ppo, KL in the reward": {**PPO, "kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"},
    # Discounts.
    "ppo, gamma and lam": {**PPO, "gamma": 0.9, "lam": 0.8},
    "reinforce++, gamma": {"algorithm": "reinforce++", "group_size": 4, "gamma": 0.9},
    "grpo, gamma": {**GRPO, "gamma": 0.9},
    # Rewards and advantages.
    "rloo, normalized advantages": {"algorithm": "rloo", "group_size": 4, "normalize_advantages": "mean_std"},
    "rloo, centered advantages": {"algorithm": "rloo", "group_size": 4, "normalize_advantages": "mean"},
    "grpo, clipped advantages": {**GRPO, "advantage_clip": 0.5},
    "rloo, normalized and clipped": {
        "algorithm": "rloo", "group_size": 4, "normalize_advantages": "mean_std", "advantage_clip": 0.5
    },
    "grpo, overlong penalty": {**GRPO, "overlong_buffer": 3, "overlong_penalty": 0.7},
    "dr_grpo, normalized rewards": {"algorithm": "dr_grpo", "group_size": 4, "reward_norm": "mean_std"},
    "dr_grpo, clipped rewards": {"algorithm": "dr_grpo", "group_size": 4, "reward_clip": (-0.3, 0.3)},
    "grpo, failing reward": {**GRPO, "reward": reward_failing, "kl_coef": 0.1},
    "ppo, failing reward": {**PPO, "reward": reward_failing},
    # Masks, weights and groups.
    "grpo, correction": {**GRPO, "correction": {"truncate": 1.2}, "sampling": {"temperature": 1.5}},
    "grpo, high-entropy tokens": {**GRPO, "high_entropy_ratio": 0.4, "entropy_coef": 0.01},
    "grpo, refill": {**GRPO, "reward": reward_rare, "drop_constant_groups": True, "refill": 2},
    "ppo, critic warm-up": {**PPO, "critic_warmup": 2, "value_clip": 0.1, "batch": {"epochs": 2}},
    "grpo, packed": {**GRPO, "kl_coef": 0.1, "batch": {"packed": True, "token_budget": 24}},
    "grpo, padded": {**GRPO, "kl_coef": 0.1, "batch": {"packed": False, "token_budget": 24}},
    "grpo, packed rollouts": {**GRPO, "kl_coef": 0.1},
    "grpo, zero advantages dropped": {
        **GRPO, "reward": reward_rare, "batch": {"drop_zero_advantages": True, "keep_groups": True}
    },
    # Other estimators and losses.
    "remax": {**GRPO, "estimator": "remax"},
    "reinforce++ with a baseline": {**GRPO, "estimator": "reinforce_plus_plus_baseline"},
    "cpgd": {**GRPO, "estimator": "cpgd", "loss": "cpgd"},
    "pass@k": {**GRPO, "estimator": "pass_at_k", "estimator_options": {"k": 2}, "reward": reward_rare},
    "clip_b": {**GRPO, "estimator": "clip_b", "estimator_options": {"mu": 0.3}},
    "jsd": {"algorithm": "on_policy_distill", "estimator": "jsd", "group_size": 4},
    "mix_chord": {
        "algorithm": "mix", "loss": "mix_chord", "group_size": 4, "expert": build_expert_records(),
        "replay": {"expert_share": 0.3},
    },
    # Multi-turn rollouts.
    "multi-turn, grpo": {**GRPO, "environment": CountingGame},
    "multi-turn, ppo with token rewards": {**PPO, "environment": CountingGame, "gamma": 0.9},
    "multi-turn, reinforce++ and a reward": {
        "algorithm": "reinforce++", "group_size": 4, "environment": CountingGame, "reward": reward_sum
    },
    "multi-turn, failing environment": {**GRPO, "environment": partial(CountingGame, failing=True)},
    "multi-turn, remax": {**GRPO, "estimator": "remax", "environment": CountingGame},
    # Records that were written before.
    "replay without policy log-probs": {
        **GRPO, "records": build_records(20), "replay": REPLAY, "kl_coef": 0.1, "prompts_per_step": 3
    },
    "replay without log-probs": {
        **GRPO, "records": build_records(20, engine=False), "replay": REPLAY, "prompts_per_step": 3
    },
    "replay with a correction": {
        **GRPO, "records": build_records(20, policy=True), "replay": REPLAY, "correction": {"truncate": 2.0},
        "prompts_per_step": 3,
    },
    "replay of ppo": {**PPO, "records": build_records(20), "replay": REPLAY, "prompts_per_step": 3},
    "replay of rollouts": {**GRPO, "replay": {"kind": "replay", "reuse": 3, "max_staleness": 3, "rollout_interval": 2}},
    "replay with an expert": {
        "algorithm": "mix", "group_size": 4, "records": build_records(20), "expert": build_expert_records(),
        "replay": {**REPLAY, "expert_share": 0.3}, "prompts_per_step": 3,
    },
}  # fmt: skip


# --- Measurement ------------------------------------------------------------------------------------------------------


def hash_rows(rows: Iterable[Sequence[Any]]) -> str:
    """Return the SHA-256 of rows of numbers."""
    return hashlib.sha256(json.dumps([list(row) for row in rows]).encode()).hexdigest()


def measure_records(records: Any) -> Numbers:
    """Measure the tokens and advantages of one step's records, sorted by their ids."""
    rows = sorted(records, key=lambda record: record.eid.uid)
    advantages = [[] if row.advantages is None else row.advantages.double().tolist() for row in rows]
    flat = np.concatenate([np.asarray(row, dtype=np.float64) for row in advantages]) if rows else np.zeros(0)
    # The signs of -0.0 are rounding, too.
    rounded = [[round(number, 5) + 0.0 for number in row] for row in advantages]
    return {
        "tokens": hash_rows(row.tokens.tolist() for row in rows),
        "advantages": hash_rows(rounded),
        "advantages_mean": float(flat.mean()) if len(flat) else 0.0,
        "advantages_abs_sum": float(np.abs(flat).sum()),
        # Depends on the place of each advantage, unlike the two above.
        "advantages_projection": float(flat @ np.cos(np.arange(len(flat)))) / max(len(flat), 1),
    }


@contextmanager
def reproducible() -> Iterator[None]:
    """Run with one thread, fixed seeds and without warnings of failing rewards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def measure_case(name: str, steps: int = STEPS, **changes: Any) -> list[Numbers]:
    """Train a case and return the numbers of each step; `changes` override its settings."""
    with reproducible(), tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(folder=Path(folder), **{**SETTINGS[name], **changes})
        records_by_step = watch_updates(trainer)
        reports = trainer.run(steps)
        numbers = []
        for report in reports:
            metrics: Numbers = {"records": len(report.uids)}
            metrics |= {key: report[name] for key, name in METRICS.items() if name in report}
            if report.step in records_by_step:
                metrics |= measure_records(records_by_step[report.step])
            numbers.append(metrics)
        return numbers


def compare_steps(expected: Sequence[Numbers], measured: Sequence[Numbers]) -> list[str]:
    """Describe every difference of steps that is above the tolerance.

    The hash of the advantages is left out: a change below the tolerance may change it.
    """
    differences = []
    for step, (before, after) in enumerate(zip(expected, measured, strict=True), start=1):
        for key in dict.fromkeys([*before, *after]):
            old, new = before.get(key), after.get(key)
            if key == "advantages" or old == new:
                continue
            if isinstance(old, float) and isinstance(new, float):
                if math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                    continue
                differences.append(f"step {step}: {key} {new!r}, expected {old!r}, off by {new - old:.2g}")
            else:
                differences.append(f"step {step}: {key} {new!r}, expected {old!r}")
    return differences


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare the numbers of all cases, or of those whose names are given."""
    parser = argparse.ArgumentParser(description="Reference numbers of training steps.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--record", action="store_true", help=f"write {PATH.name}")
    action.add_argument("--compare", action="store_true", help=f"print differences from {PATH.name}")
    parser.add_argument("names", nargs="*", metavar="case", help="only these cases")
    options = parser.parse_args(arguments)
    recorded: dict[str, list[Numbers]] = json.loads(PATH.read_text()) if PATH.exists() else {}
    failures = 0
    for name in options.names or SETTINGS:
        start = time.perf_counter()
        measured = measure_case(name)
        seconds = time.perf_counter() - start
        if options.record:
            recorded[name] = measured
            print(f"{name}: {seconds:.2f} s")
            continue
        expected = recorded.get(name, [])
        differences = compare_steps(expected, measured) if expected else ["not recorded"]
        failures += bool(differences)
        hashes = sum(
            old.get("advantages") != new.get("advantages") for old, new in zip(expected, measured, strict=False)
        )
        note = f" (hash of the advantages differs in {hashes} steps)" if hashes and not differences else ""
        print(f"{name}: {'differs' if differences else 'equal'}{note}, {seconds:.2f} s")
        for difference in differences:
            print(f"    {difference}")
    if options.record:
        ordered = {name: recorded[name] for name in SETTINGS if name in recorded}
        PATH.write_text(json.dumps(ordered, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
