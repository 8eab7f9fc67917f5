"""GRPO from the parts, without `Trainer`, on the embedded task (sort six letters). About a minute on two cores.

python examples/own_loop.py
rollbook view runs/own_loop
"""

from pathlib import Path

import torch

import rollbook
from rollbook import Actor, AlgorithmConfig, Learner, Prompts, TransformersEngine
from rollbook.train import MinibatchConfig, Models, OptimizerConfig, evaluate, pipeline
from rollbook.train.checkpoint import checkpoint_name, save
from rollbook.train.recipes import letters


def main(
    out: Path,
    steps: int = 60,
    prompts_per_step: int = 64,
    eval_prompts: int = 500,
    target_accuracy: float = 0.2,
    seed: int = 0,
):
    torch.set_num_threads(1)  # at this size two threads are slower
    # A model that is never right has nothing to reinforce.
    model, tokenizer = letters.trained_model(seed, target_accuracy=target_accuracy)
    actor = Actor(model, tokenizer=tokenizer)
    engine = TransformersEngine(actor)  # samples from the actor's own weights
    prompts, held_out = Prompts(letters.rows(seed=seed), seed=seed).split(eval_prompts)
    algorithm = AlgorithmConfig.preset(
        "grpo", group_size=8, kl_coef=0.0, entropy_coef=0.01, loss_options={"clip_high": 0.28}
    )
    sampling, models = algorithm.sampling(max_tokens=7, seed=seed), Models(policy=actor)
    optimizer = OptimizerConfig(lr=5e-4, betas=(0.9, 0.99), warmup_steps=5)
    minibatch = MinibatchConfig(minibatches=4, drop_zero_advantages=True)
    learner = Learner(actor, algorithm, optimizer=optimizer, minibatch=minibatch, seed=seed)
    with rollbook.open(out / "book", tokenizer=tokenizer) as book:
        before = evaluate(engine, held_out, letters.reward, sampling=sampling, seed=seed, book=book)
        for step in range(1, steps + 1):
            records = pipeline.generate(engine, prompts.take(prompts_per_step, step), sampling)
            records = pipeline.score(records, letters.reward, tokenizer)
            records = pipeline.annotate(records, algorithm, models)
            records = pipeline.estimate(records, algorithm)
            book.append(records)  # durable on return
            with book.lease(prompts_per_step, by="group") as lease:  # an exception returns the records
                learned = learner.update(lease.experiences, step=step)
                lease.ack(step=step, details=learned.placements_by_uid(lease.uids))
            engine.version = step  # records keep the version of the policy that sampled them
            book.announce(step)
            reward = sum(records.values("reward")) / len(records)
            book.log(step, {"reward": reward, **learned.metrics})
            if step % 20 == 0 or step == steps:
                print(f"step {step}: reward {reward:.3f}, {learned.updates} updates")
                # Weights and the book's checkpoint go together: `book.rewind` to it undoes what came later.
                state = {"seed": seed, "book": book.checkpoint(checkpoint_name(step)), "prompts": prompts.state_dict()}
                save(out, step, actor=actor, state={"learner": learner.state_dict()}, trainer_state=state)
        after = evaluate(engine, held_out, letters.reward, sampling=sampling, seed=seed, step=steps, book=book)
    print(f"before: {before}\nafter:  {after}")
    return before, after


if __name__ == "__main__":
    main(Path("runs/own_loop"))
