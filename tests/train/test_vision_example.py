"""The vision example at a small size: rewards alone make a tiny vision-language model see more than it did.

In eight steps of 16 pictures the colour is as much as can be learnt; the example itself goes on to the whole answer.
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

FILE = Path(__file__).parents[2] / "examples" / "colours.py"
STEPS, GROUPS, SEED, HELD_OUT = 8, 16, 2, 60


@pytest.fixture(scope="module")
def colours() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("colours_example", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def warm(colours: Any) -> dict[str, torch.Tensor]:
    """The weights that both runs begin with: the form of an answer is known, and little more."""
    actor = colours.build(SEED)
    colours.warm_up(actor, Prompts(colours.rows(50, seed=1)), seed=SEED, until=0.04, pictures=192)
    return {name: value.clone() for name, value in actor.state_dict().items()}


def colour(response: str, reference: str) -> float:
    return float(response[:1] == reference[0])


def reinforced(colours: Any, warm: Any, book: rollbook.Book, score: Any) -> tuple[float, float]:
    """How often the colour of pictures that are never trained on is right, before and after."""
    actor: Actor = colours.build(SEED)
    actor.load_state_dict(warm)
    trainer = colours.trainer_of(actor, book, score, steps=STEPS, seed=SEED, groups=GROUPS, lr=1e-3)
    held_out = Prompts(colours.rows(HELD_OUT, seed=2))
    before: Evaluation = trainer.evaluate(held_out, colour, k=2)
    trainer.run(STEPS)
    return before.success, trainer.evaluate(held_out, colour, k=2).success


def test_it_learns_from_its_reward_and_not_from_noise(colours: Any, warm: Any, tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book, rollbook.open("memory:") as other:
        before, after = reinforced(colours, warm, book, colour)
        start, end = reinforced(colours, warm, other, colours.noise)
        check_book(book, colours)
    assert before == start  # the same weights, pictures and seed
    assert after > before + 0.05 and after > end + 0.1, (before, after, end)


def check_book(book: rollbook.Book, colours: Any) -> None:
    """Every answer is kept with its picture, as the model and as people see it, and without a placeholder."""
    assert book.counts().trained == STEPS * GROUPS * 8 and book.counts().evaluation == 2 * HELD_OUT * 2
    records = list(book.where(batch=3))
    assert len(records) == GROUPS * 8 and len({record.eid.tid for record in records}) == GROUPS
    image = colours.SPECIAL.index("<image>")
    for record in records:
        assert record.tokens[: record.prompt_length].tolist().count(image) == 16
        assert image not in record.tokens[record.prompt_length :].tolist()
        assert record.multi_modal_inputs["pixel_values"].shape == (1, 3, 16, 16)
        assert record.messages[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


def test_the_parts_of_the_reward(colours: Any) -> None:
    found = {text: colours.reward(text, "r2", "stop")["reward"] for text in ("r2", "r3", "b2", "b3", "", "r22")}
    assert found == {"r2": 1.0, "r3": 0.25, "b2": 0.25, "b3": 0.0, "": 0.0, "r22": 0.5}
    assert colours.reward("r2", "r2", "length")["reward"] == 0.5  # right, and did not know where to end
