"""The vision example at a small size: rewards alone make a tiny vision-language model see more than it did.

In eight steps of 16 pictures the color is as much as can be learned; the example itself goes on to the whole answer.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollbook
from rollbook.models import Actor
from rollbook.train import Evaluation, Prompts

FILE = Path(__file__).parents[2] / "examples" / "colors.py"
STEPS, GROUPS, SEED, HELD_OUT = 8, 16, 2, 60


@pytest.fixture(scope="module")
def colors() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("colors_example", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def warm(colors: Any) -> dict[str, torch.Tensor]:
    """The weights that both runs begin with: the form of an answer is known, and little more."""
    actor = colors.build(SEED)
    colors.warm_up(actor, Prompts(colors.rows(50, seed=1)), seed=SEED, target_accuracy=0.04, images=192)
    return {name: value.clone() for name, value in actor.state_dict().items()}


def color(response: str, reference: str) -> float:
    return float(response[:1] == reference[0])


def reinforced(colors: Any, warm: Any, book: rollbook.Book, score: Any) -> tuple[float, float]:
    """How often the color of pictures that are never trained on is right, before and after."""
    actor: Actor = colors.build(SEED)
    actor.load_state_dict(warm)
    trainer = colors.build_trainer(actor, book, score, steps=STEPS, seed=SEED, groups=GROUPS, lr=1e-3)
    held_out = Prompts(colors.rows(HELD_OUT, seed=2))
    before: Evaluation = trainer.evaluate(held_out, color, k=2)
    trainer.run(STEPS)
    return before.success, trainer.evaluate(held_out, color, k=2).success


def test_it_learns_from_its_reward_and_not_from_noise(colors: Any, warm: Any, tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book, rollbook.open("memory:") as other:
        before, after = reinforced(colors, warm, book, color)
        start, end = reinforced(colors, warm, other, colors.random_reward)
        check_book(book, colors)
    assert before == start  # the same weights, pictures and seed
    assert after > before + 0.05 and after > end + 0.1, (before, after, end)


def check_book(book: rollbook.Book, colors: Any) -> None:
    """Every answer is kept with its picture, as the model and as people see it, and without a placeholder."""
    assert book.counts().trained == STEPS * GROUPS * 8 and book.counts().evaluation == 2 * HELD_OUT * 2
    records = list(book.where(batch=3))
    assert len(records) == GROUPS * 8 and len({record.eid.tid for record in records}) == GROUPS
    image = colors.SPECIAL.index("<image>")
    for record in records:
        assert record.tokens[: record.prompt_length].tolist().count(image) == 16
        assert image not in record.tokens[record.prompt_length :].tolist()
        assert record.multi_modal_inputs["pixel_values"].shape == (1, 3, 16, 16)
        assert record.messages[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


def test_the_parts_of_the_reward(colors: Any) -> None:
    rewards = {text: colors.reward(text, "r2", "stop")["reward"] for text in ("r2", "r3", "b2", "b3", "", "r22")}
    assert rewards == {"r2": 1.0, "r3": 0.25, "b2": 0.25, "b3": 0.0, "": 0.0, "r22": 0.5}
    assert colors.reward("r2", "r2", "length")["reward"] == 0.5  # right, and did not know where to end
