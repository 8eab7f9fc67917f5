"""Multi-turn GRPO with a tool: a tiny model learns to call a calculator and to copy its result.

    python examples/calculator.py --steps 60 --seed 0 --out runs/calculator
    rollbook view runs/calculator

An episode is `mul 41 85>`, the model's call `41*85`, the calculator's `=3485>`, and the model's answer `3485`. The
model has 0.19M parameters and cannot multiply, so it has to use the tool. An SFT warm-up teaches the tool, and
then, with bad demonstrations, guessing, until the model mostly fails. GRPO does the rest: half of the reward is for the
call, half for the answer. `--random-reward` is the control. Takes about 90 seconds on two cores.
"""

from __future__ import annotations

import argparse
import operator
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import rollbook
from rollbook import Experience, Experiences
from rollbook.models import Actor
from rollbook.rollout import EnvironmentConfig, Episode, Prompt, Reply, Sampling, TransformersEngine
from rollbook.train import AlgorithmConfig, Learner, MinibatchConfig, OptimizerConfig, Prompts, Trainer, pipeline
from rollbook.train.recipes import letters

SIGNS = {"sum": ("+", operator.add), "gap": ("-", operator.sub), "mul": ("*", operator.mul)}
CALL = re.compile(r"(\d+)([-+*])(\d+)")
SAMPLING = {"max_tokens": 6}  # per turn
ALGORITHM = AlgorithmConfig.preset(
    "grpo", group_size=8, kl_coef=0.0, entropy_coef=0.01, loss_options={"clip_high": 0.28}
)


def compute(call: str) -> str | None:
    """Return the calculator's result, or `None` if the text is not a call."""
    match = CALL.fullmatch(call)
    if match is None:
        return None
    function = next(function for sign, function in SIGNS.values() if sign == match[2])
    return str(function(int(match[1]), int(match[3])))


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return distinct tasks: a prompt, the right call and the right answer."""
    rng, tasks = random.Random(seed), dict[str, dict[str, Any]]()
    while len(tasks) < count:
        word, a, b = rng.choice(list(SIGNS)), rng.randint(10, 99), rng.randint(10, 99)
        call = f"{a}{SIGNS[word][0]}{b}"
        tasks[call] = {"prompt": f"{word} {a} {b}>", "call": call, "reference": compute(call)}
    return list(tasks.values())


class Calculator:
    """The environment of one episode. Text that is not a call is the model's answer and ends the episode.

    The first call with the right result and the right answer have a reward of 0.5 each.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.answer, self.called = prompt.reference, False

    def begin(self) -> None:
        """Return no observation: the model writes first."""

    def respond(self, text: str) -> Reply:
        """Return the result of a call, or the reward of an answer."""
        output = compute(text)
        if output is None:
            return Reply(reward=0.5 * (text == self.answer), done=True)
        first, self.called = not self.called, True
        return Reply(f"={output}>", reward=0.5 * (first and output == self.answer))


class RandomRewardCalculator(Calculator):
    """The random-reward control: the same calculator, with a reward that is independent of the text."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.random_reward = letters.random_reward(prompt.eid)

    def respond(self, text: str) -> Reply:
        """Return the result of a call, or at the end a reward of 1 in a quarter of all episodes."""
        reply = super().respond(text)
        return replace(reply, reward=self.random_reward if reply.done else 0.0)


def demonstrate(prompt: Prompt, tokenizer: Any, guess: str | None = None) -> Experience:
    """Return an SFT record of the right call and answer, or of a guess. The calculator's output is context."""
    episode = Episode(None, tokenizer, prompt)
    if guess is None:
        episode.append_turn([*tokenizer(prompt.info["call"]).input_ids, tokenizer.eos_token_id])
        episode.observe(f"={prompt.reference}>")
    answer = prompt.reference if guess is None else guess
    episode.append_turn([*tokenizer(answer).input_ids, tokenizer.eos_token_id])
    return episode.experiences()[0]


def evaluate(actor: Actor, tasks: Prompts, name: str, seed: int = 0, book: rollbook.Book | None = None) -> float:
    """Return the share of sampled episodes with the full reward. A book stores the episodes."""
    environment = EnvironmentConfig(factory=Calculator, max_turns=3)
    records = pipeline.generate(
        TransformersEngine(actor), tasks.every(batch=name), Sampling(seed=seed, **SAMPLING), environment
    )
    if book is not None:
        book.append(records, evaluation=True)
    return sum(row.reward == 1.0 for row in records) / len(records)


def warm_up(seed: int = 0, steps: int = 80, log: Callable[[str], None] = print) -> tuple[Actor, Prompts, Prompts]:
    """Train with SFT on right demonstrations, then on guesses until at most 30 % of the episodes succeed.

    Returns:
        The actor, tasks for training, held-out tasks.
    """
    torch.set_num_threads(1)  # more threads are slower at this size
    model, tokenizer = letters.model(seed)
    actor = Actor(model, tokenizer=tokenizer)
    tasks, held_out = Prompts(rows(8000, seed), seed=seed).split(400)
    tasks, demonstrated = tasks.split(1024)
    tasks, checked = tasks.split(200)
    rng = random.Random(seed)
    prompts = demonstrated.every(batch="shown")
    correct = Experiences([demonstrate(prompt, tokenizer) for prompt in prompts])
    guessed = Experiences([demonstrate(prompt, tokenizer, str(rng.randint(1, 9999))) for prompt in prompts])
    learner = Learner(
        actor,
        "sft",
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=30, schedule="linear", min_lr_ratio=0.03, steps=steps),
    )
    for step in range(1, steps + 51):
        learner.update((correct if step <= steps else guessed).take(rng.sample(range(1024), 128)), step=step)
        if step > steps and evaluate(actor, checked, f"warmup-{step}", seed) <= 0.3:
            break
    log(f"warm-up: {step} supervised steps")
    return actor, tasks, held_out


def reinforce(
    actor: Actor,
    tasks: Prompts,
    book: rollbook.Book,
    steps: int,
    seed: int = 0,
    groups: int = 32,
    random_reward: bool = False,
    log: Callable[[str], None] = print,
) -> None:
    """Train with GRPO over episodes: `groups` tasks per step, eight episodes each."""
    trainer = Trainer(
        actor,
        ALGORITHM,
        book,
        prompts=tasks,
        environment=EnvironmentConfig(factory=RandomRewardCalculator if random_reward else Calculator, max_turns=3),
        sampling=SAMPLING,
        prompts_per_step=groups,
        optimizer=OptimizerConfig(
            lr=5e-4, betas=(0.9, 0.99), warmup_steps=5, schedule="linear", min_lr_ratio=0.1, steps=steps
        ),
        minibatch=MinibatchConfig(minibatches=4, drop_zero_advantages=True),
        seed=seed,
    )
    for _ in range(steps):
        report = trainer.step()
        if report.step % 10 == 0:
            log(f"step {report.step}: reward {report['reward/mean']:.3f}, {report['episode/turns']:.2f} turns")


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="A tiny model learns to use a calculator.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=32, help="tasks per step, with eight episodes each")
    parser.add_argument("--out", type=Path, help="folder of the book of all episodes (default: not stored)")
    parser.add_argument("--random-reward", action="store_true", help="random-reward control")
    options = parser.parse_args()
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    actor, tasks, held_out = warm_up(options.seed)
    url = "memory:" if options.out is None else options.out / "book"
    with rollbook.open(url, tokenizer=actor.tokenizer) as book:
        before = evaluate(actor, held_out, "eval-0", options.seed, book)
        print(f"success before: {before:.3f} of {len(held_out)} episodes")
        reinforce(actor, tasks, book, options.steps, options.seed, options.groups, options.random_reward)
        after = evaluate(actor, held_out, f"eval-{options.steps}", options.seed, book)
    wall, cpu = time.perf_counter() - wall_start, time.process_time() - cpu_start
    print(f"success: {before:.3f} before, {after:.3f} after {options.steps} steps ({wall:.0f} s, {cpu:.0f} s of CPU)")


if __name__ == "__main__":
    main()
