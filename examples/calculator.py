"""Several turns with a tool: a tiny model learns to ask a calculator, and to answer with what it says.

    python examples/calculator.py --steps 60 --seed 0 --out runs/calculator
    rollbook view runs/calculator

An episode is `mul 41 85>`, then the model's call `41*85`, then the calculator's `=3485>`, then the model's answer
`3485`. The model, of 0.19 million weights, cannot do the sums: it has to call, rightly, and to copy the result. It is
shown a thousand demonstrations, and then others that guess instead of calling, until it fails most of the time. The
rest is reinforcement (GRPO): half of the reward is for the call, half for the answer. With `--chance` rewards are given
at random, as a control. It takes about a minute and a half on two cores.
"""

from __future__ import annotations

import argparse
import operator
import random
import re
import time
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
TURN = {"max_tokens": 6}
HOW = AlgorithmConfig.preset("grpo", group_size=8, kl_coef=0.0, entropy_coef=0.01, loss_options={"clip_high": 0.28})


def compute(call: str) -> str | None:
    """What a calculator shows, if that is something for a calculator."""
    found = CALL.fullmatch(call)
    if found is None:
        return None
    function = next(function for sign, function in SIGNS.values() if sign == found[2])
    return str(function(int(found[1]), int(found[3])))


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Different tasks: each a prompt, the call that is to be made, and the right answer."""
    rng, made = random.Random(seed), dict[str, dict[str, Any]]()
    while len(made) < count:
        word, a, b = rng.choice(list(SIGNS)), rng.randint(10, 99), rng.randint(10, 99)
        call = f"{a}{SIGNS[word][0]}{b}"
        made[call] = {"prompt": f"{word} {a} {b}>", "call": call, "reference": compute(call)}
    return list(made.values())


class Calculator:
    """One episode's calculator: it computes what can be computed; anything else is the model's answer.

    Half of the reward is for a first call that shows the right number, half for the right answer.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.right, self.called = prompt.reference, False

    def begin(self) -> None:
        """There is nothing to say before the model has written something."""

    def respond(self, text: str) -> Reply:
        """The result of a call, or the reward of an answer."""
        shown = compute(text)
        if shown is None:
            return Reply(reward=0.5 * (text == self.right), done=True)
        first, self.called = not self.called, True
        return Reply(f"={shown}>", reward=0.5 * (first and shown == self.right))


class Chance(Calculator):
    """The control: the same calculator, and rewards that have nothing to do with what the model writes."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.luck = letters.random_reward(prompt.eid)

    def respond(self, text: str) -> Reply:
        """The result of a call, or a reward of 1 in a quarter of all episodes."""
        reply = super().respond(text)
        return replace(reply, reward=self.luck if reply.done else 0.0)


def demonstration(prompt: Prompt, tokenizer: Any, guess: str | None = None) -> Experience:
    """How it is done, or how it is not: an episode whose turns nobody sampled. What the calculator says is context."""
    episode = Episode(None, tokenizer, prompt)
    if guess is None:
        episode.append_turn([*tokenizer(prompt.info["call"]).input_ids, tokenizer.eos_token_id])
        episode.observe(f"={prompt.reference}>")
    answer = prompt.reference if guess is None else guess
    episode.append_turn([*tokenizer(answer).input_ids, tokenizer.eos_token_id])
    return episode.experiences()[0]


def success(actor: Actor, tasks: Prompts, name: str, seed: int = 0, book: Any = None) -> float:
    """The share of episodes, sampled as in training, that end with the right answer; a book keeps them, if given."""
    environment = EnvironmentConfig(factory=Calculator, max_turns=3)
    records = pipeline.generate(
        TransformersEngine(actor), tasks.every(batch=name), Sampling(seed=seed, **TURN), environment
    )
    if book is not None:
        book.append(records, evaluation=True)
    return sum(row.reward == 1.0 for row in records) / len(records)


def warmed_up(seed: int = 0, steps: int = 80, tell: Any = print) -> tuple[Actor, Prompts, Prompts]:
    """A model that was shown how it is done, and then, until it fails most of the time, how people guess instead;
    tasks to train on, and to judge it by."""
    torch.set_num_threads(1)  # of a model of this size threads would only wait for one another
    model, tokenizer = letters.model(seed)
    actor = Actor(model, tokenizer=tokenizer)
    tasks, held_out = Prompts(rows(8000, seed), seed=seed).split(400)
    tasks, shown = tasks.split(1024)
    tasks, looked_at = tasks.split(200)
    rng = random.Random(seed)
    prompts = shown.every(batch="shown")
    right = Experiences([demonstration(prompt, tokenizer) for prompt in prompts])
    sloppy = Experiences([demonstration(prompt, tokenizer, str(rng.randint(1, 9999))) for prompt in prompts])
    learner = Learner(
        actor,
        "sft",
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=30, schedule="linear", min_lr_ratio=0.03, steps=steps),
    )
    for step in range(1, steps + 51):
        learner.update((right if step <= steps else sloppy).take(rng.sample(range(1024), 128)), step=step)
        if step > steps and success(actor, looked_at, f"warmup-{step}", seed) <= 0.3:
            break
    tell(f"warm-up: {step} supervised steps")
    return actor, tasks, held_out


def reinforce(
    actor: Actor,
    tasks: Prompts,
    book: Any,
    steps: int,
    seed: int = 0,
    groups: int = 32,
    chance: bool = False,
    tell: Any = print,
) -> None:
    """GRPO over episodes: so many steps, each of `groups` tasks that are tried eight times."""
    trainer = Trainer(
        actor,
        HOW,
        book,
        prompts=tasks,
        environment=EnvironmentConfig(factory=Chance if chance else Calculator, max_turns=3),
        sampling=TURN,
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
            tell(f"step {report.step}: reward {report['reward/mean']:.3f}, {report['episode/turns']:.2f} turns")


def judged(actor: Actor, held_out: Prompts, name: str, seed: int = 0, book: Any = None) -> float:
    """Success on tasks that were neither shown nor trained on."""
    return success(actor, held_out, name, seed, book)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model learns to use a calculator.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=32, help="tasks of a step; each is tried eight times")
    parser.add_argument("--out", type=Path, help="a folder for the book of all episodes; without it none is kept")
    parser.add_argument("--chance", action="store_true", help="rewards at random: a control")
    given = parser.parse_args()
    begun, spent = time.perf_counter(), time.process_time()
    actor, tasks, held_out = warmed_up(given.seed)
    place = "memory:" if given.out is None else given.out / "book"
    with rollbook.open(place, tokenizer=actor.tokenizer) as book:
        before = judged(actor, held_out, "eval-0", given.seed, book)
        print(f"success before: {before:.3f} of {len(held_out)} episodes")
        reinforce(actor, tasks, book, given.steps, given.seed, given.groups, given.chance)
        after = judged(actor, held_out, f"eval-{given.steps}", given.seed, book)
    wall, cpu = time.perf_counter() - begun, time.process_time() - spent
    print(f"success: {before:.3f} before, {after:.3f} after {given.steps} steps ({wall:.0f} s, {cpu:.0f} s of CPU)")
