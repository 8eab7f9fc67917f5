"""Several turns with a tool: a tiny model learns to ask a calculator, and to answer with what it says.

    python examples/calculator.py --steps 80 --seed 0

An episode is `mul 41 85>`, then the model's call `41*85`, then the calculator's `=3485>`, then the model's answer
`3485`. The model, of 0.19 million weights, cannot do the sums: it has to call, rightly, and to copy the result. It is
shown a thousand demonstrations until it succeeds in a quarter of its episodes; the rest is reinforcement (GRPO), with a
reward of 1 for a right answer and nothing else. `--chance` gives the same rewards out at random, as a control.
"""

from __future__ import annotations

import argparse
import operator
import random
import re
import time
from typing import Any

import torch

import rollbook
from rollbook import Experience
from rollbook.models import Actor
from rollbook.rollout import Episode, Prompt
from rollbook.train import Algorithm, Batching, EpisodeMaker, Learner, Optimizing, Prompts, Reply, Trainer, maker_config
from rollbook.train.recipes import letters

SIGNS = {"sum": ("+", operator.add), "gap": ("-", operator.sub), "mul": ("*", operator.mul)}
CALL = re.compile(r"(\d+)([-+*])(\d+)")
TURN = {"max_tokens": 6}


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
    """One episode's calculator: it computes what can be computed; anything else is the model's answer."""

    def __init__(self, prompt: Prompt) -> None:
        self.right = prompt.reference

    def begin(self) -> None:
        """There is nothing to say before the model has written something."""

    def respond(self, text: str) -> Reply:
        """The result of a call, or the reward of an answer."""
        shown = compute(text)
        if shown is not None:
            return Reply(f"={shown}>")
        return Reply(reward=float(text == self.right), done=True)


class Chance(Calculator):
    """The control: the same calculator, and a reward that has nothing to do with the answer."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.luck = letters.chance(prompt.eid)

    def respond(self, text: str) -> Reply:
        """The result of a call, or a reward of 1 in a quarter of all episodes."""
        reply = super().respond(text)
        return Reply(reward=self.luck, done=True) if reply.done else reply


def demonstration(prompt: Prompt, tokenizer: Any) -> Experience:
    """How it is done: an episode whose turns nobody sampled. What the calculator says is not learned."""
    episode = Episode(None, tokenizer, prompt)
    for turn in (prompt.info["call"], prompt.reference):
        if turn is prompt.reference:
            episode.observe(f"={prompt.reference}>")
        episode.append_turn([*tokenizer(turn).input_ids, tokenizer.eos_token_id])
    return episode.experiences()[0]


def success(maker: EpisodeMaker, tasks: Prompts, name: str) -> float:
    """The share of episodes, sampled as in training, that end with the right answer."""
    rewards = maker.play(tasks.every(batch=name), n=1, **TURN).values("reward")
    return sum(reward == 1.0 for reward in rewards) / len(rewards)


def warm_up(actor: Actor, maker: EpisodeMaker, shown: Prompts, tasks: Prompts, until: float, seed: int) -> int:
    """Supervised steps on demonstrations until the model succeeds now and then; how many it took."""
    learner = Learner(actor, "sft", optimizer=Optimizing(lr=3e-3, warmup=30), seed=seed)
    known = [demonstration(prompt, actor.tokenizer) for prompt in shown.every(batch="shown")]
    for step in range(1, 301):
        learner.learn(random.Random(f"{seed}/{step}").sample(known, 128), step=step)
        if step >= 30 and step % 5 == 0 and success(maker, tasks, f"warmup-{step}") >= until:
            break
    return step


def train(steps: int, seed: int = 0, groups: int = 32, chance: bool = False, tell: Any = print) -> tuple[float, float]:
    """Warm up, then reinforce; success on tasks that were not trained on, before and after."""
    torch.set_num_threads(1)  # of a model of this size threads would only wait for one another
    model, tokenizer = letters.model(seed)
    actor = Actor(model, tokenizer=tokenizer)
    tasks, held_out = Prompts(rows(8000, seed), seed=seed).split(400)
    tasks, shown = tasks.split(1024)
    tasks, looked_at = tasks.split(200)
    algorithm = Algorithm.of("grpo", n=8, kl_coef=0.0, entropy_coef=0.01, loss_options={"clip_high": 0.28})
    config = maker_config(algorithm, seed=seed, progress=False)
    test = EpisodeMaker(actor, Calculator, config=config, max_turns=3)
    begun = time.process_time()
    warm = warm_up(actor, test, shown, looked_at, 0.25, seed)
    before = success(test, held_out, "eval-0")
    tell(f"warm-up: {warm} steps, {time.process_time() - begun:.0f} s; success {before:.3f}")
    trainer = Trainer(
        actor,
        EpisodeMaker(actor, Chance if chance else Calculator, config=config, max_turns=3),
        rollbook.open("memory:"),
        algorithm,
        prompts=tasks,
        groups=groups,
        generate=TURN,
        optimizer=Optimizing(lr=5e-4, betas=(0.9, 0.99), warmup=5, schedule="linear", floor=0.1, steps=steps),
        batching=Batching(minibatches=4, drop_zero=True),
        seed=seed,
    )
    for _ in range(steps):
        report = trainer.step()
        if report.step % 10 == 0:
            turns, reward = report["episode/turns"], report["reward/mean"]
            tell(f"step {report.step}: reward {reward:.3f}, {turns:.2f} turns, {time.process_time() - begun:.0f} s")
    return before, success(test, held_out, f"eval-{steps}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model learns to use a calculator.")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=32, help="prompts of a step; each is tried eight times")
    parser.add_argument("--chance", action="store_true", help="rewards at random: a control")
    given = parser.parse_args()
    first, last = train(given.steps, given.seed, given.groups, given.chance)
    print(f"success on 400 tasks never trained on: {first:.3f} before, {last:.3f} after {given.steps} steps")
