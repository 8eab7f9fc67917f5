"""The vision example at a small size: rewards alone make a tiny vision-language model name what pictures show."""

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
STEPS, GROUPS, SEED = 10, 12, 0


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
    """The weights that both runs begin with: some answers are right, most are not."""
    actor = colours.build(SEED)
    colours.warm_up(actor, Prompts(colours.rows(40, 1)), seed=SEED, until=0.15, pictures=256)
    return {name: value.clone() for name, value in actor.state_dict().items()}


def reinforced(colours: Any, warm: Any, book: rollbook.Book, score: Any) -> tuple[Evaluation, Evaluation]:
    actor: Actor = colours.build(SEED)
    actor.load_state_dict(warm)
    trainer = colours.trainer_of(actor, book, score, steps=STEPS, seed=SEED, groups=GROUPS)
    held_out = Prompts(colours.rows(50, 2))
    before = trainer.evaluate(held_out, colours.reward, k=2, success="exact")
    trainer.run(STEPS)
    return before, trainer.evaluate(held_out, colours.reward, k=2, success="exact")


def mean_reward(found: Evaluation) -> float:
    return found.metrics()["eval/reward"]


def test_it_learns_from_its_reward_and_not_from_noise(colours: Any, warm: Any, tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book, rollbook.open("memory:") as other:
        before, after = reinforced(colours, warm, book, colours.reward)
        start, end = reinforced(colours, warm, other, colours.noise)
        assert mean_reward(before) == mean_reward(start)  # the same weights, pictures and seed
        rise, control = mean_reward(after) - mean_reward(before), mean_reward(end) - mean_reward(start)
        print(f"{rise=:.3f} {control=:.3f} {before.success=:.3f} {after.success=:.3f} {end.success=:.3f}")
        assert rise > 0.05 and rise > control + 0.05, (rise, control)
        assert after.success > before.success
        check_book(book, colours)


def check_book(book: rollbook.Book, colours: Any) -> None:
    """Every answer is kept with its picture, the parts of its reward, and never a placeholder among its tokens."""
    assert book.counts().trained == STEPS * GROUPS * 8 and book.counts().evaluation == 2 * 100
    image = colours.SPECIAL.index("<image>")
    for record in book.where(batch=3):
        assert {"exact", "colour", "quarter"} <= record.metrics.keys()
        assert image not in record.tokens[record.prompt_length :].tolist()
        assert record.multi_modal_inputs["pixel_values"].shape == (1, 3, 16, 16)
