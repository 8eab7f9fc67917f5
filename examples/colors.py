"""Vision GRPO: a tiny vision-language model learns to name the color and quadrant of a square, such as `r2`.

    python examples/colors.py --steps 80 --seed 0 --out runs/colors
    rollbook view runs/colors

An image of 16 x 16 dots has one small square on a dark, noisy ground. The answer is its color (r, g, b, y) and quadrant
(1 to 4, in reading order). The model is a LLaVA with 0.24 million random weights. An SFT warm-up trains it until a
third of its samples are right. GRPO then uses rewards: 0.5 for the whole answer, 0.25 each for color and quadrant.
`--reward random` is the random-reward control. Takes about 90 seconds on two cores.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import time
from collections.abc import Callable, Mapping
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
SCALE = 6  # pixels per dot in the stored image; the processor scales it down
COLORS = {"r": (200, 60, 60), "g": (60, 170, 60), "b": (70, 90, 210), "y": (200, 180, 60)}
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
TEMPLATE = (  # the parts of a message: `<image>` for an image, else its text
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
Reward = Callable[..., Any]
SAMPLING = {"max_tokens": 3, "temperature": 1.0}


# --- the task ---------------------------------------------------------------------------------------------------------


def draw(rng: np.random.Generator) -> tuple[Image.Image, str]:
    """Return an image and its answer: a square of a slightly varied color, anywhere within one quadrant."""
    color, quadrant = rng.choice(list(COLORS)), int(rng.integers(4))
    dots = rng.normal(40, 20, (SIDE, SIDE, 3))
    top, left = np.array(divmod(quadrant, 2)) * (SIDE // 2) + rng.integers(0, SIDE // 2 - FIGURE + 1, 2)
    dots[top : top + FIGURE, left : left + FIGURE] += np.array(COLORS[color]) - 40 + rng.normal(0, 20, 3)
    small = Image.fromarray(dots.clip(0, 255).astype(np.uint8))
    return small.resize((SIDE * SCALE, SIDE * SCALE), Image.Resampling.NEAREST), f"{color}{quadrant + 1}"


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows of chats. The image is in the message, so that the viewer can show it."""
    rng, chats = np.random.default_rng(seed), []
    for _ in range(count):
        image, answer = draw(rng)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        chats.append({"messages": [{"role": "user", "content": content}], "reference": answer})
    return chats


def reward(response: str, reference: str, finish_reason: str) -> Mapping[str, float]:
    """Score the whole answer and its parts. With the whole answer alone, most groups have equal rewards."""
    exact = float(response == reference and finish_reason == "stop")
    color, quadrant = (float(response[i : i + 1] == reference[i]) for i in range(2))
    return {"reward": 0.5 * exact + 0.25 * color + 0.25 * quadrant, "exact": exact, "color": color,
            "quadrant": quadrant}  # fmt: skip


def random_reward(eid: EID) -> float:
    """Return a number between 0 and 1 that is independent of the answer: the random-reward control."""
    return random.Random(eid.rid).random()


# --- the model --------------------------------------------------------------------------------------------------------


def build(seed: int) -> Actor:
    """Build a LLaVA with random weights: one CLIP layer over 16 patches, two Llama layers, one token per character."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *COLORS, *"1234?"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
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


def warm_up(
    actor: Actor, checked: Prompts, *, seed: int, target_accuracy: float, images: int = 1024, max_steps: int = 200
) -> float:
    """Train with SFT until `target_accuracy` of the sampled answers to `checked` are right; return the accuracy."""
    answered = [{**row, "response": row["reference"]} for row in rows(images, seed=30_000 + seed)]
    records = records_from_answers(answered, actor.tokenizer, processor=actor.processor)
    learner = Learner(actor, "sft", optimizer=OptimizerConfig(lr=2e-3, warmup_steps=30))
    rng, accuracy = np.random.default_rng(seed), 0.0
    for step in range(1, max_steps + 1):
        learner.update(records.take(rng.choice(len(records), 64, replace=False)), step=step)
        if step % 5 == 0 and accuracy < target_accuracy:
            engine = TransformersEngine(actor)
            accuracy = evaluate(engine, checked, reward, sampling=SAMPLING, seed=seed, success="exact").success
        if accuracy >= target_accuracy:
            print(f"warm-up: {step} steps, {accuracy:.2f} of the sampled answers are right")
            return accuracy
    raise RuntimeError(f"warm-up: accuracy {accuracy:.2f} after {max_steps} steps, expected {target_accuracy}")


# --- the run ----------------------------------------------------------------------------------------------------------


def build_trainer(
    actor: Actor, book: rollbook.Book, score: Reward, *, steps: int, seed: int, groups: int = 48, lr: float = 5e-4,
    folder: Path | None = None,
) -> Trainer:  # fmt: skip
    """Build a GRPO trainer: 8 answers to each of 48 images per step, in 4 minibatches."""
    algorithm = AlgorithmConfig.preset(
        "grpo", group_size=8, kl_coef=0.0, entropy_coef=0.01, loss_options={"clip_high": 0.28}
    )
    return Trainer(
        actor, algorithm, book,
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


def train(
    steps: int, seed: int, out: Path, score: Reward = reward, target_accuracy: float = 0.35
) -> tuple[Evaluation, Evaluation]:
    """Warm up, train with GRPO, and evaluate before and after on held-out images."""
    torch.set_num_threads(1)  # more threads are slower at this size
    actor = build(seed)
    warm_up(actor, Prompts(rows(100, seed=10_000 + seed)), seed=seed, target_accuracy=target_accuracy)
    held_out = Prompts(rows(200, seed=40_000 + seed), shuffle=False)
    with rollbook.open(out / "book", tokenizer=actor.tokenizer) as book:
        trainer = build_trainer(actor, book, score, steps=steps, seed=seed, folder=out)
        before = trainer.evaluate(held_out, reward, k=4, success="exact")
        trainer.run(steps, on_step=print_step)
        after = trainer.evaluate(held_out, reward, k=4, success="exact")
    return before, after


def print_step(report: StepReport) -> None:
    """Print a line every ten steps."""
    if report.step % 10 == 0:
        names = [name for name in ("exact", "color", "quadrant") if f"reward/{name}" in report]
        parts = "".join(f", {name} {report[f'reward/{name}']:.2f}" for name in names)
        print(f"step {report.step:3}: reward {report['reward']:.2f}{parts}; {report['seconds']:.2f} s")


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/colors"))
    parser.add_argument("--reward", choices=("true", "random"), default="true")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"--out: {options.out} exists, expected a new folder")
    start = time.monotonic()
    before, after = train(
        options.steps, options.seed, options.out, reward if options.reward == "true" else random_reward
    )
    change = compare_evaluations(before, after)
    print(f"before: {before}\nafter:  {after}\nchange: {change}, {time.monotonic() - start:.0f} s")
    print(f"rollbook view {options.out}")


if __name__ == "__main__":
    main()
