"""Vision by reinforcement: a tiny vision-language model learns to say what a picture shows, such as `r2`.

A picture of 16 x 16 dots has one small figure on a dark, noisy ground. The answer is the figure's colour (r, g, b, y)
and its quarter (1 to 4, as one reads). The model, a LLaVA of 0.24 million weights made from a config, first sees a few
hundred pictures with their answers, until it is right about a third of the time; everything after that it learns from
rewards alone: a half for the whole answer, a quarter for the colour, a quarter for the quarter.

    python examples/colours.py --steps 80 --seed 0 --out runs/colours
    rollbook view runs/colours

takes about a minute and a half on two cores. `--reward random` is the control: the same run, with rewards that say
nothing.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

import rollbook
from rollbook import EID
from rollbook.models import Actor
from rollbook.rollout import TransformersEngine
from rollbook.train import (
    AlgorithmConfig,
    CheckpointConfig,
    Evaluation,
    Learner,
    MinibatchConfig,
    OptimizerConfig,
    Prompts,
    StepReport,
    Trainer,
    evaluate,
    records_from_answers,
)
from rollbook.train.evaluation import compare_evaluations

SIDE, PATCH, FIGURE = 16, 4, 4
SCALE = 6  # pixels of a dot in the picture that people see; the processor makes it small again
COLOURS = {"r": (200, 60, 60), "g": (60, 170, 60), "b": (70, 90, 210), "y": (200, 180, 60)}
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
TEMPLATE = (  # a message's parts one after the other: `<image>` for a picture, else its text
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
SAMPLING = {"max_tokens": 3, "temperature": 1.0}


# --- the task ---------------------------------------------------------------------------------------------------------


def draw(rng: np.random.Generator) -> tuple[Image.Image, str]:
    """A picture and what to say of it: a square of a colour that varies a little, anywhere within one quarter."""
    colour, quarter = rng.choice(list(COLOURS)), int(rng.integers(4))
    dots = rng.normal(40, 20, (SIDE, SIDE, 3))
    top, left = np.array(divmod(quarter, 2)) * (SIDE // 2) + rng.integers(0, SIDE // 2 - FIGURE + 1, 2)
    dots[top : top + FIGURE, left : left + FIGURE] += np.array(COLOURS[colour]) - 40 + rng.normal(0, 20, 3)
    small = Image.fromarray(dots.clip(0, 255).astype(np.uint8))
    return small.resize((SIDE * SCALE, SIDE * SCALE), Image.Resampling.NEAREST), f"{colour}{quarter + 1}"


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows as a file of chats would have them. The picture is in the message, so the book's pages can show it."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        picture, answer = draw(rng)
        data = io.BytesIO()
        picture.save(data, "PNG")
        url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        made.append({"messages": [{"role": "user", "content": content}], "reference": answer})
    return made


def reward(response: str, reference: str, finish_reason: str) -> Mapping[str, float]:
    """Half of it for the whole answer, a quarter for each part: with the first alone, most groups teach nothing."""
    exact = float(response == reference and finish_reason == "stop")
    colour, quarter = (float(response[i : i + 1] == reference[i]) for i in range(2))
    return {"reward": 0.5 * exact + 0.25 * colour + 0.25 * quarter, "exact": exact, "colour": colour,
            "quarter": quarter}  # fmt: skip


def noise(eid: EID) -> float:
    """The control: a number between 0 and 1 that has nothing to do with the answer."""
    return random.Random(eid.rid).random()


# --- the model --------------------------------------------------------------------------------------------------------


def build(seed: int) -> Actor:
    """A LLaVA with random weights: CLIP of one layer over 16 patches, Llama of two layers, a token a character."""
    words = {token: i for i, token in enumerate([*SPECIAL, *COLOURS, *"1234?"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<image>"], padding_side="left",
    )  # fmt: skip
    size = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        # The processors without `Pil` need torchvision.
        image_processor=CLIPImageProcessorPil(size=size, resample=Image.Resampling.NEAREST, do_center_crop=False),
        tokenizer=tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    )  # fmt: skip
    ids: dict[str, Any] = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos"))}
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=3,
        initializer_range=0.05, max_position_embeddings=64, tie_word_embeddings=True, **ids,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=SIDE,
        patch_size=PATCH, projection_dim=64, initializer_range=0.1,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=SPECIAL.index("<image>"), vision_feature_layer=-1,
        vision_feature_select_strategy="default", image_seq_length=(SIDE // PATCH) ** 2, tie_word_embeddings=True,
        **ids,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Actor(config, processor=processor)


def warm_up(actor: Actor, checked: Prompts, *, seed: int, until: float, pictures: int = 1024, most: int = 200) -> float:
    """Learn from given answers until *sampled* ones are right so often: who is never right is never rewarded."""
    answered = [{**row, "response": row["reference"]} for row in rows(pictures, seed=30_000 + seed)]
    records = records_from_answers(answered, actor.tokenizer, processor=actor.processor)
    learner = Learner(actor, "sft", optimizer=OptimizerConfig(lr=2e-3, warmup_steps=30))
    rng, right = np.random.default_rng(seed), 0.0
    for step in range(1, most + 1):
        learner.update(records.take(rng.choice(len(records), 64, replace=False)), step=step)
        if step % 5 == 0 and right < until:
            engine = TransformersEngine(actor)
            right = evaluate(engine, checked, reward, sampling=SAMPLING, seed=seed, success="exact").success
        if right >= until:
            print(f"warm-up: {step} steps, then {right:.2f} of the sampled answers are right")
            return right
    raise RuntimeError(f"warm-up: {right:.2f} of the answers are right after {most} steps, expected {until}")


# --- the run ----------------------------------------------------------------------------------------------------------


def trainer_of(
    actor: Actor, book: rollbook.Book, score: Any, *, steps: int, seed: int, groups: int = 48, lr: float = 5e-4,
    folder: Path | None = None,
) -> Trainer:  # fmt: skip
    """GRPO: 8 answers to each of 48 pictures a step, one pass over them in 4 updates."""
    how = AlgorithmConfig.preset("grpo", group_size=8, kl_coef=0.0, entropy_coef=0.01, loss_options={"clip_high": 0.28})
    return Trainer(
        actor, how, book,
        prompts=Prompts(rows(groups * steps, seed=20_000 + seed), seed=seed),
        reward=score,
        sampling=SAMPLING,
        prompts_per_step=groups,
        optimizer=OptimizerConfig(
            lr=lr, betas=(0.9, 0.99), warmup_steps=5, schedule="linear", min_lr_ratio=0.1, steps=steps
        ),
        minibatch=MinibatchConfig(minibatches=4, drop_zero_advantages=True),
        seed=seed,
        checkpoints=None if folder is None else CheckpointConfig(folder),
    )  # fmt: skip


def train(steps: int, seed: int, out: Path, score: Any = reward, until: float = 0.35) -> tuple[Evaluation, Evaluation]:
    """Warm up, reinforce, and measure before and after, on pictures that are never trained on."""
    torch.set_num_threads(1)  # at this size two are slower
    actor = build(seed)
    warm_up(actor, Prompts(rows(100, seed=10_000 + seed)), seed=seed, until=until)
    held_out = Prompts(rows(200, seed=40_000 + seed), shuffle=False)
    with rollbook.open(out / "book", tokenizer=actor.tokenizer) as book:
        trainer = trainer_of(actor, book, score, steps=steps, seed=seed, folder=out)
        before = trainer.evaluate(held_out, reward, k=4, success="exact")
        trainer.run(steps, on_step=tell)
        after = trainer.evaluate(held_out, reward, k=4, success="exact")
    return before, after


def tell(report: StepReport) -> None:
    """A line every ten steps."""
    if report.step % 10 == 0:
        names = [name for name in ("exact", "colour", "quarter") if f"reward/{name}" in report]
        parts = "".join(f", {name} {report[f'reward/{name}']:.2f}" for name in names)
        print(f"step {report.step:3}: reward {report['reward']:.2f}{parts}; {report['seconds']:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/colours"))
    parser.add_argument("--reward", choices=("true", "random"), default="true")
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"--out: {given.out} is there already, expected a new folder")
    began = time.monotonic()
    before, after = train(given.steps, given.seed, given.out, reward if given.reward == "true" else noise)
    rise = compare_evaluations(before, after)
    print(f"before: {before}\nafter:  {after}\nrise:   {rise}, {time.monotonic() - began:.0f} s")
    print(f"rollbook view {given.out}")


if __name__ == "__main__":
    main()
