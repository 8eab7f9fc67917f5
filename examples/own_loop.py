"""A training loop of one's own, from the parts: GRPO on the embedded task (sort six letters), without `Trainer`.

    python examples/own_loop.py --steps 60 --seed 0 --out runs/own_loop
    rollbook view runs/own_loop

Each part works alone: an actor (the model), a maker (samples and scores), a book (keeps records, leases them out, knows
what became of each) and a learner (moves the weights). The loop below is what `Trainer` does, for on-policy GRPO and
without resuming; put into it whatever yours does otherwise. It takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import rollbook
from rollbook.compat.lightrft.maker import NaiveExperienceMaker
from rollbook.models import Actor
from rollbook.rollout import TransformersEngine
from rollbook.train import Algorithm, Batching, Learner, Optimizing, Prompts, complete, evaluate, maker_config
from rollbook.train.evaluating import Evaluation, difference
from rollbook.train.recipes import letters
from rollbook.train.saving import name_of, save
from rollbook.train.warming import WarmUp, warm_up

SAMPLING = {"max_tokens": 7, "temperature": 1.0}


def train(
    out: Path,
    steps: int = 60,
    seed: int = 0,
    groups: int = 64,
    held: int = 500,
    save_every: int = 20,
    until: float = 0.2,
) -> tuple[Evaluation, Evaluation]:
    """Warm up, reinforce, save; success on held-out prompts before and after."""
    torch.set_num_threads(1)  # at this size two are slower
    model, tokenizer = letters.model(seed)
    actor = Actor(model, tokenizer=tokenizer)
    prompts, held_out = Prompts(letters.rows(seed=seed), seed=seed).split(held)
    # Supervised steps first: of a model that is never right there is nothing to reinforce.
    warm_up(actor, prompts, WarmUp(until=until), reward=letters.reward, sampling=SAMPLING, seed=seed)

    algorithm = Algorithm.of("grpo", n=8, kl_coef=0.0, entropy_coef=0.01, loss_options={"clip_high": 0.28})
    maker = NaiveExperienceMaker(
        actor, None, None, None, tokenizer, 64, None,
        reward_fn=letters.reward, config=maker_config(algorithm, seed=seed, progress=False),
    )  # fmt: skip
    learner = Learner(
        actor,
        algorithm,
        optimizer=Optimizing(lr=5e-4, betas=(0.9, 0.99), warmup=5, schedule="linear", floor=0.1, steps=steps),
        batching=Batching(minibatches=4, drop_zero=True),
        seed=seed,
        max_tokens=SAMPLING["max_tokens"],
    )
    with rollbook.open(out / "book", tokenizer=tokenizer) as book:

        def judge(step: int) -> Evaluation:
            options = {"sampling": SAMPLING, "step": step, "seed": seed, "book": book}
            found = evaluate(TransformersEngine(actor), held_out, letters.reward, **options)
            book.log(step, found.metrics())
            return found

        def keep(step: int) -> None:
            # The book's checkpoint goes with the weights: `book.rewind` to it undoes what later weights learnt.
            told = {"seed": seed, "book": book.checkpoint(name_of(step)), "prompts": prompts.state_dict()}
            save(out, step, actor=actor, state={"learner": learner.state_dict()}, told=told)

        # The policy's version is how many steps it has learnt: records carry it, the book counts staleness from it.
        maker.engine.version = 0
        book.announce(0)
        before = judge(0)
        keep(0)
        for step in range(1, steps + 1):
            records = maker.make_records(prompts.take(groups, step), **SAMPLING)
            book.append(records)  # durable when it returns
            # A group is all answers to a prompt. Leaving this block by an exception gives the records back.
            with book.lease(groups, by="group") as lease:
                # What the maker left open is filled in: nothing here, but a replay, say, may lack advantages.
                ready = complete(lease.experiences, algorithm, actor=actor)
                learned = learner.learn(ready, step=step)
                lease.ack(step=step, details=dict(zip(lease.uids, learned.places, strict=True)))
            maker.engine.version = step  # the engine samples from the actor's own weights: nothing to copy
            book.announce(step)
            rewards = [record.reward for record in records]
            metrics = {"reward": sum(rewards) / len(rewards), **maker.metrics, **learned.metrics}
            book.log(step, metrics)
            if step % 10 == 0 or step == steps:
                print(f"step {step:3}: reward {metrics['reward']:.3f}, {learned.updates} updates")
            if step % save_every == 0 or step == steps:
                keep(step)
        after = judge(steps)
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/own_loop"))
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"--out: {given.out} is there already, expected a new folder")
    before, after = train(given.out, given.steps, given.seed)
    print(f"before: {before}\nafter:  {after}\nchange: {difference(before, after)}")
