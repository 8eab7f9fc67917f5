"""A book with a story: a run that learns arithmetic, with tools, pictures, loops, truncation and stranger things in it.

`make(path)` writes it; the same arguments give the same records. Pages, the index, the doctor and the command line are
tested on it, and its pages are the pictures in the documentation.
"""

from __future__ import annotations

import argparse
import base64
import functools
import io
import json
import math
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import rollbook
from rollbook import EID, Experience

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|image|>"]
SYSTEM = (
    "You are a careful assistant. Think inside <think> tags, use the calculator for products, and answer with a number."
)
OPENERS = [
    "Let me set up the numbers.",
    "We need the total first.",
    "Let me think step by step.",
    "First, read the question again.",
]
DOUBTS = [
    "Wait, that is not right.",
    "Hmm, let me verify this.",
    "Actually, I should check the units.",
    "Let me reconsider.",
]
CLOSERS = ["So the answer is", "Therefore we get", "That gives"]
HOSTILE = (
    '<script>window.__pwn=1</script><img src=x onerror="window.__pwn=2"> \u202etxet desrever\u202c zero\u200bwidth '
    "\x1b[31mred\x07 [link](javascript:window.__pwn=3) 🙂👩‍👩‍👧 漢字 é"
)
NAMES = ["Ana", "Bo", "Chen", "Dara", "Eli", "Fatou", "Gus", "Hana", "Ivo", "Juno"]
THINGS = ["apples", "tickets", "marbles", "books", "coins", "stamps"]


def question(task: int) -> tuple[str, int, tuple[int, int, int]]:
    """A word problem, its answer, and its numbers."""
    dice = random.Random(task * 7919)
    a, b, c = dice.randint(3, 19), dice.randint(3, 12), dice.randint(2, 30)
    who, thing = NAMES[task % len(NAMES)], THINGS[task % len(THINGS)]
    text = f"{who} buys {a} boxes with {b} {thing} in each and gives {c} {thing} away. How many {thing} are left?"
    return text, a * b - c, (a, b, c)


@functools.cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer made from the story's own words, with the marks of ChatML."""
    words = [question(task)[0] for task in range(40)] + OPENERS + DOUBTS + CLOSERS + [SYSTEM]
    words += [
        "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>",
        "calculator expression name arguments",
    ]
    words += [f"{a} times {b} is {a * b}, minus {a} leaves {a * b - a}.\n" for a in range(3, 20) for b in range(3, 13)]
    words += ["system\n user\n assistant\n tool\n wait wait wait boxes hold altogether given away left over"]
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.train_from_iterator(
        words,
        trainers.BpeTrainer(vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    built.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return built


def picture(task: int) -> bytes:
    """A small drawing, as PNG: as many bars as the task says."""
    from PIL import Image, ImageDraw

    drawn = Image.new("RGB", (160, 100), "white")
    pen = ImageDraw.Draw(drawn)
    for i in range(3 + task % 5):
        pen.rectangle(
            (10 + i * 20, 90 - 12 * (1 + (i * 7 + task) % 6), 22 + i * 20, 90), fill=(40 + 30 * i, 90, 200 - 20 * i)
        )
    buffer = io.BytesIO()
    drawn.save(buffer, "PNG")
    return buffer.getvalue()


class Writer:
    """Pieces of one sample: text to tokens, with who wrote each."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.spans: list[tuple[str, int, int]] = []

    def add(self, kind: str, text: str) -> None:
        start = len(self.ids)
        self.ids += tokenizer().encode(text, add_special_tokens=False).ids
        if self.spans and self.spans[-1][0] == kind:
            start = self.spans.pop()[1]
        self.spans.append((kind, start, len(self.ids)))


def sample(
    step: int, task: int, run: int, runs: int, skill: float, dice: random.Random, *, evaluation: bool = False
) -> Experience:
    """One rollout of a task, as good as `skill`."""
    text, answer, (a, b, c) = question(task)
    writer = Writer()
    seen = task % 9 == 4  # These come with a picture.
    tools = task % 3 == 1  # These use the calculator.
    content = ("<|image|>" if seen else "") + text
    writer.add(
        "prompt",
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
    )
    right = dice.random() < (skill + (0.35 if task % 5 == 0 else -0.25 if task % 5 == 3 else 0))
    if task % 7 == 6:
        right = False  # Nobody solves these.
    loops = not right and dice.random() < 0.12
    long = dice.random() < 0.05
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    if seen:
        url = "data:image/png;base64," + base64.b64encode(picture(task)).decode()
        messages.append(
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
            }
        )
    else:
        messages.append({"role": "user", "content": text})
    answered = answer if right else answer + dice.choice([-3, -1, 1, 2, 10])
    product = a * b + answered - answer
    thought = f"<think>{dice.choice(OPENERS)} {a} boxes hold {b} each, {a} times {b} is {product}."
    for _ in range(dice.choice([0, 0, 1, 2]) + step // 8):
        thought += f" {dice.choice(DOUBTS)} {a} times {b} is {a * b}."
    if step == 5 and task % 6 == 2 and run == 1:
        thought += " " + HOSTILE
    if loops:
        writer.add("model", thought + " wait" * (60 + dice.randint(0, 60)))
    elif tools:
        call = json.dumps({"name": "calculator", "arguments": {"expression": f"{a}*{b}-{c}"}})
        writer.add("model", f"{thought}</think>\n<tool_call>{call}</tool_call><|im_end|>")
        result = f"\n<|im_start|>tool\n<tool_response>{a * b - c}</tool_response><|im_end|>\n<|im_start|>assistant\n"
        writer.add("observation", result)
        writer.add("model", f"{dice.choice(CLOSERS)} {answered}.<|im_end|>")
        messages += [
            {
                "role": "assistant",
                "content": thought + "</think>",
                "tool_calls": [
                    {"function": {"name": "calculator", "arguments": json.dumps({"expression": f"{a}*{b}-{c}"})}}
                ],
            },
            {"role": "tool", "content": str(a * b - c)},
            {"role": "assistant", "content": f"The answer is {answered}."},
        ]
    else:
        writer.add(
            "model",
            f"{thought} minus {c} leaves {answered}.</think>\n{dice.choice(CLOSERS)} {answered}."
            + ("" if long else "<|im_end|>"),
        )
    prompt = writer.spans[0][2]
    count = len(writer.ids) - prompt
    noise = np.random.default_rng(zlib.crc32(f"{step}/{task}/{run}/{evaluation}".encode()))
    mask = np.zeros(count, bool)
    for kind, start, stop in writer.spans:
        if kind == "model":
            mask[start - prompt : stop - prompt] = True
    entropy = noise.gamma(0.6, 0.9 * math.exp(-step / 30), count).astype(np.float32)
    if loops:
        entropy[-50:] *= 0.02
    logprobs = -entropy * noise.uniform(0.3, 1.6, count).astype(np.float32)
    shift = noise.normal(0, 0.01 + (0.25 if step >= 18 and tools else 0) * (noise.random(count) < 0.08), count).astype(
        np.float32
    )
    policy = np.minimum(logprobs + shift, 0)
    drift = noise.normal(-0.002 * step, 0.02 + 0.004 * step, count).astype(np.float32)
    is_cut = loops or long
    parts = {"accuracy": float(right), "format": float(not is_cut), "length": round(-0.001 * count, 3)}
    reward: float | None = round(parts["accuracy"] + 0.1 * parts["format"] + parts["length"], 4)
    if step == 9 and task % 6 == 3 and run == 2:
        reward = math.nan
    first, second = (writer.spans[1][2] - prompt, max(0, step - 1)) if tools and step % 4 == 3 else (0, step)
    versions = np.full(count, step)
    versions[:first] = second
    return Experience(
        eid=EID(batch=step, task=task, run=run, suffix="eval" if evaluation else "s"),
        tokens=np.array(writer.ids, np.int32),
        prompt_length=prompt,
        action_mask=mask,
        logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        old_logprobs=policy,
        ref_logprobs=np.minimum(policy + drift, 0),
        entropy=entropy,
        reward=reward,
        policy_versions=versions,
        finish_reason="length" if is_cut else "stop",
        truncate_status="response_truncated" if is_cut else None,
        prompt_text=tokenizer().decode(writer.ids[:prompt], skip_special_tokens=False),
        response_text=tokenizer().decode(writer.ids[prompt:], skip_special_tokens=True),
        messages=messages,
        tools=[{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
        if tools
        else None,
        group_size=runs,
        info={
            "reference": str(answer),
            "task_name": "bars" if seen else "boxes",
            "segments": [
                {
                    "kind": kind,
                    "start": start,
                    "stop": stop,
                    **({"turn": 0, "trained": True} if kind == "model" else {}),
                }
                for kind, start, stop in writer.spans
            ],
        },
        metrics=parts,
        sampling={"temperature": 1.0, "top_p": 1.0, "max_tokens": 512},
    )


def rollout(step: int, groups: int, runs: int, seed: int = 0) -> list[Experience]:
    """All samples of one step, with advantages within groups."""
    dice = random.Random(seed * 1000 + step)
    skill = 0.15 + 0.7 / (1 + math.exp(-(step - 8) / 4))
    rows: list[Experience] = []
    for place in range(groups):
        task = (step * groups + place) % (groups * 5)
        group = [sample(step, task, run, runs, skill, dice) for run in range(runs)]
        if step == 7 and place == 1:
            group[3] = _same_as(group[2], group[3])
        rewards = np.array([row.reward for row in group], float)
        spread = np.nanstd(rewards)
        for row, reward in zip(group, rewards, strict=True):
            score = 0.0 if not np.isfinite(reward) or spread < 1e-9 else (reward - np.nanmean(rewards)) / spread
            rows.append(row.replace(advantages=np.where(np.asarray(row.action_mask), score, 0).astype(np.float32)))
    return rows


def _same_as(record: Experience, other: Experience) -> Experience:
    """The first record under the second one's id: a sample that was drawn twice."""
    return record.replace(eid=other.eid)


def make(
    path: str | Path, *, steps: int = 24, groups: int = 6, runs: int = 8, seed: int = 0, evaluate: bool = True
) -> str:
    """Write the book; its address."""
    with rollbook.open(path, tokenizer=tokenizer()) as book:
        for step in range(steps):
            more(book, step, groups, runs, seed)
            if evaluate and step % 8 == 0:
                dice = random.Random(step)
                held_out = [sample(step, 1000 + task, 0, 1, 0.4, dice, evaluation=True) for task in range(groups)]
                book.append(held_out, evaluation=True)
    return str(path)


def more(book: Any, step: int, groups: int = 6, runs: int = 8, seed: int = 0) -> list[Experience]:
    """One more step: its samples come in, and those of the step before are trained on."""
    rows = rollout(step, groups, runs, seed)
    book.append(rows)
    book.announce(step)
    with book.lease(groups - 1, by="group") as lease:
        lease.ack(step=step + 1)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    print(make(arguments.path, steps=arguments.steps))
