"""The embedded recipes at a small size: four letters, 40 thousand weights, a dozen steps.

What is shown of each is that it learns: sampled success on held-out prompts rises, and does not in the same run on
rewards, labels or answers of chance. A warm-up is done once, and all that reinforce begin from its weights. PPO needs
more steps: `make trials` shows that it learns.
"""

from __future__ import annotations

import importlib.util
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook.book import trained_steps
from rollbook.cli import main
from rollbook.train import checkpoint
from rollbook.train.config import list_recipes, load_config
from rollbook.train.recipes import letters
from rollbook.train.run import RunResult, run

LENGTH, COUNT, HIDDEN = 4, 2000, 48
OWN_LOOP = Path(__file__).parents[2] / "examples" / "own_loop.py"
CHANCE = [f"rewards={letters.__name__}:random_reward", f"evaluation.rewards={letters.__name__}:reward"]
WORDS = [f"data.options.length={LENGTH}", f"data.options.count={COUNT}"]
SMALL = [
    *("data.held_out=200", "evaluation.k=2", f"sampling.max_tokens={LENGTH + 1}", "tracking.display=false"),
    *("checkpoint.interval=0", "checkpoint.save_final=false", "tracking.jsonl=false"),
]
WARMUP = [
    *(
        f"model.options.hidden={HIDDEN}",
        "warmup.batch_size=64",
        "warmup.eval_interval=3",
        "warmup.eval_prompts=128",
        "warmup.target_accuracy=0.15",
    )
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="module")
def warm(place: Path) -> Path:
    """The weights that runs begin with: right about a fifth of the time."""
    outcome = run(load_config("letters", [*SMALL, *WORDS, *WARMUP, "steps=0", f"out={place}/warm"]))
    assert outcome.before is not None and 0.1 < outcome.before.success < 0.4
    return checkpoint.list_checkpoints(place / "warm")[0].model


@pytest.fixture(scope="module")
def shown(place: Path) -> RunResult:
    """A run of supervised steps; its weights are a teacher's."""
    return trained("letters-sft", place / "sft", *SFT, "checkpoint.save_final=true")


SFT = [*WORDS, f"model.options.hidden={HIDDEN}", "steps=60", "batch.prompts_per_step=64", "optimizer.lr=5e-3"]
SFT += ["optimizer.warmup_steps=20"]


def trained(recipe: str, folder: Path, *changes: str) -> RunResult:
    outcome = run(load_config(recipe, [*SMALL, f"out={folder}", *changes]), stream=io.StringIO())
    assert outcome.after is not None and outcome.before is not None
    return outcome


def reinforced(recipe: str, folder: Path, warm: Path, *changes: str) -> tuple[float, float]:
    """Held-out success before and after."""
    start = [f"model.path={warm}", "warmup.steps=0", "optimizer.lr=1e-3"]
    outcome = trained(recipe, folder, *WORDS, *start, *changes)
    return outcome.before.success, outcome.after.success  # type: ignore[union-attr]


def test_it_learns_from_its_reward_and_not_from_chance(warm: Path, tmp_path: Path) -> None:
    changes = ["steps=18", "batch.prompts_per_step=24"]
    before, after = reinforced("letters", tmp_path / "reward", warm, *changes)
    start, end = reinforced("letters", tmp_path / "chance", warm, *changes, *CHANCE)
    assert before == start  # the same weights, prompts and seed
    assert after > before + 0.07 and after > end + 0.15 and end < start + 0.05, (before, after, end)


def test_a_replay_learns_from_records_twice(warm: Path, tmp_path: Path) -> None:
    before, after = reinforced("letters-replay", tmp_path / "run", warm, "steps=12", "batch.prompts_per_step=24")
    assert after > before + 0.06, (before, after)
    with rollbook.open(tmp_path / "run" / "book", mode="r") as book:
        uses = [len(steps) for steps in trained_steps(book).values()]
        assert len(uses) == 6 * 24 * 8 and set(uses) <= {1, 2} and sum(uses) == 12 * 24 * 8


def test_a_mix_learns_from_an_expert_beside_its_own(
    warm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    letters.main(["expert", f"{tmp_path}/expert", "--count", "300", "--length", str(LENGTH), "--skip", str(COUNT)])
    assert capsys.readouterr().out == f"300 correct answers in {tmp_path}/expert\n"
    changes = ["steps=12", "batch.prompts_per_step=16", f"replay.expert={tmp_path}/expert"]
    before, after = reinforced("letters-mix", tmp_path / "run", warm, *changes)
    assert after > before + 0.1, (before, after)
    with rollbook.open(tmp_path / "run" / "book", mode="r") as book:
        metrics = [step_metrics for _, step_metrics in book.metrics() if "loss" in step_metrics]
        assert book.counts().trained == 12 * 16 * 8  # its own alone
    losses = [step_metrics["policy/expert/sft_loss"] for step_metrics in metrics]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_a_teacher_is_learned_from(warm: Path, shown: RunResult, tmp_path: Path) -> None:
    teacher = checkpoint.list_checkpoints(shown.folder)[-1].model
    changes = ["steps=12", "batch.prompts_per_step=96", f"teacher.path={teacher}"]
    before, after = reinforced("letters-distill", tmp_path / "run", warm, *changes)
    assert after > before + 0.05, (before, after)


def test_supervised_steps_learn_answers_and_not_those_of_others(shown: RunResult, tmp_path: Path) -> None:
    assert shown.before is not None and shown.after is not None
    assert shown.after.success > shown.before.success + 0.3
    rows = letters.rows(COUNT, LENGTH)
    answers = [row["response"] for row in rows]
    random.Random(0).shuffle(answers)
    path = lines(tmp_path, [{**row, "response": answer} for row, answer in zip(rows, answers, strict=True)])
    changes = [option for option in SFT if not option.startswith("data.")]
    control = trained("letters-sft", tmp_path / "run", *changes, f"data.path={path}")
    assert control.after is not None and control.after.success < 0.05
    losses = [outcome.reports[-1]["loss"] for outcome in (shown, control)]
    assert losses[0] < 0.5 * losses[1], losses


def test_pairs_teach_which_answer_is_better_and_shuffled_ones_do_not(warm: Path, tmp_path: Path) -> None:
    rows = letters.pairs(1000, LENGTH, target_accuracy=0.1, skip=COUNT, hidden=HIDDEN)
    luck, mixed = random.Random(0), []
    for row in rows:
        both = [row["chosen"], row["rejected"]]
        luck.shuffle(both)
        mixed.append({**row, "chosen": both[0], "rejected": both[1]})
    mean_losses = {}
    for name, preferences in (("pairs", rows), ("shuffled", mixed)):
        changes = ["steps=20", "batch.prompts_per_step=32", "optimizer.lr=1e-3", f"model.path={warm}", "warmup.steps=0"]
        changes += ["data.held_out=100"]
        path = lines(tmp_path / name, preferences)
        outcome = trained("letters-dpo", tmp_path / name / "run", *changes, f"data.path={path}")
        # No pair is met twice: the loss of a step is that of pairs which nobody has learned from.
        losses = [report["loss"] for report in outcome.reports]
        mean_losses[name] = sum(losses[-6:]) / 6
        assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # ln 2: the policy is its own reference
    assert mean_losses["pairs"] < 0.55 and mean_losses["shuffled"] > 0.62, mean_losses


def lines(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


TINY = ["steps=2", "data.held_out=8", "data.options.length=4", "data.options.count=80", "batch.prompts_per_step=8"]
TINY += ["sampling.max_tokens=5", "model.options.hidden=48", "warmup.batch_size=8", "warmup.eval_prompts=8"]
TINY += ["batch.drop_zero_advantages=false"]
TEACHER = ["steps=2", "count=40", "length=4", "skip=80", "hidden=48"]
OWN = {
    "letters-sft": [],
    "letters-dpo": ["data.options.hidden=48", "data.options.skip=80", "data.options.target_accuracy=0.0"],
    "letters-distill": [f"teacher.options.{option}" for option in TEACHER],
}


@pytest.mark.parametrize("recipe", list(list_recipes()))
def test_every_recipe_runs_from_the_command_line(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [*TINY, *OWN.get(recipe, []), *([] if recipe == "letters-sft" else ["warmup.steps=2"])]
    if recipe == "letters-mix":
        letters.write_expert_book(tmp_path / "expert", count=20, length=4, skip=80)
        changes += [f"replay.expert={tmp_path}/expert"]
    assert main(["train", recipe, "--json", "--out", f"{tmp_path}/run", *changes]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 2 and summary["after"]["eval/prompts"] == 8
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path / "run")] == [0, 2]
    with rollbook.open(tmp_path / "run" / "book", mode="r") as book:
        assert [
            step
            for step, step_metrics in book.metrics()
            if "loss" in step_metrics or "critic/value_loss" in step_metrics
        ] == [1, 2]
    assert main(["show", f"{tmp_path}/run"]) == 0
    table = [line.split() for line in capsys.readouterr().out.split("\n\n")[1].splitlines()]
    updates = {"letters-dpo": ["loss", "margin", "accuracy", "grad"]}.get(recipe, ["loss", "grad"])
    rewards = [] if recipe in ("letters-sft", "letters-dpo") else ["reward"]
    assert [name for name in table[0] if name in {"reward", "margin", "accuracy", *updates}] == rewards + updates
    assert [row[0] for row in table] == ["step", "2", "1"]
    sampled_steps = table[2:] if recipe == "letters-replay" else table[1:]  # its second step makes no records
    assert not any("-" in row for row in sampled_steps), table


def test_recipes_say_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipes"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(list_recipes()) and all(
        "Sort six letters" in line and len(line) < 140 for line in printed
    )


def test_what_an_expert_shows_and_a_teacher_was_taught_is_not_what_runs_are_judged_by() -> None:
    own_prompts, other_prompts = (
        {row["prompt"] for row in letters.rows(COUNT, seed=3, skip=skip)} for skip in (0, COUNT)
    )
    assert len(own_prompts) == len(other_prompts) == COUNT and not own_prompts & other_prompts
    with pytest.raises(ValueError, match="count: got 4000, expected at most 3000 of 4 letters after the first 2000"):
        letters.rows(4000, length=4, skip=2000)


def test_a_loop_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "reward", letters.random_reward)  # a model that was taught nothing is never right
    spec = importlib.util.spec_from_file_location("own_loop_example", OWN_LOOP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        before, after = module.main(tmp_path, steps=2, prompts_per_step=8, eval_prompts=20, target_accuracy=0.0)
    finally:
        del sys.modules[spec.name]
    assert before.prompts == after.prompts == 20
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path)] == [2]
    with rollbook.open(tmp_path / "book", mode="r") as book:
        assert sorted({step for steps in trained_steps(book).values() for step in steps}) == [1, 2]
        assert book.counts().trained == 2 * 8 * 8 and book.counts().evaluation == 40 and book.policy_version == 2
        assert [step for step, step_metrics in book.metrics() if "loss" in step_metrics] == [1, 2]
