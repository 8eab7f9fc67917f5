"""A run that is killed, at any point, and started again by the same command comes to what it would have come to: the
same records by the same ids, learned from in the same steps, the same losses and the same weights, bit for bit.

Lives of the command are children of a `Nursery`, killed at named points (`rollbook.book.disk`).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollbook
from rollbook.train import checkpoint
from tests.train.lineage import Lineage, command, copied, misplaced, rows_of
from tests.train.nursery import Life, Nursery
from tests.train.trials import trial


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("nursery")) as started:
        yield started


@pytest.fixture(scope="module")
def finished_run(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    life = nursery.live(command(folder))
    assert life.code == 0, life.printed
    return folder


@pytest.fixture(scope="module")
def expected(finished_run: Path) -> Lineage:
    return Lineage.of(finished_run)


DEATHS = {
    # Up to the first checkpoint a run begins anew, in the same folder.
    "before the first checkpoint": [
        *(("config written", 1), ("warming up", 2), ("after write", 1), ("evaluated", 1), ("during checkpoint", 1)),
        *(("book's checkpoint", 1), ("saving begins", 1), ("state saved", 1), ("before rename", 1)),
    ],
    "after each step": [("stepped", 1), ("stepped", 2), ("stepped", 3)],
    "inside a step": [
        *(("collected", 1), ("after sync", 1), ("appended", 2), ("learned", 1)),
        *(("during ack", 1), ("acknowledged", 2), ("learned", 3)),
    ],
    "while it saves": [
        *(("book's checkpoint", 2), ("model saved", 1), ("before rename", 1), ("after rename", 1)),
        *(("during rewind", 1), ("state saved", 1), ("before forgetting", 1), ("during prune", 1)),
    ],
    "while it evaluates": [("evaluated", 2), ("evaluated", 1)],
}
"""Points by the number of times that a life reaches them before it ends there; each life goes on from the last."""


@pytest.mark.parametrize("deaths", DEATHS)
def test_killed_and_started_again(deaths: str, nursery: Nursery, expected: Lineage, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    changes = ["checkpoint.keep_last=1"] if deaths == "while it saves" else []
    for point, times in DEATHS[deaths]:
        life = nursery.live(command(folder, *changes), at=(point, times))
        assert life.killed, (point, life.printed)
        assert life.points[-1] == point
        if (folder / "book").exists():
            with rollbook.open(folder / "book") as book:
                report = book.check()
                assert report.ok, (point, report)
    life = nursery.live(command(folder, *changes))
    assert life.code == 0, life.printed
    lineage = Lineage.of(folder)
    assert expected.differences(lineage) == []
    assert misplaced(lineage.ledger, rows_of(), groups=4, runs=3) == []
    assert not list((folder / "checkpoints").glob(".*"))


def test_the_uninterrupted_run_takes_each_prompt_once(expected: Lineage) -> None:
    """What the others are compared with; and that the comparison can fail."""
    history = expected.ledger
    assert len(history["trained"]) == 6 * 4 * 3 and history["counts"] == (0, 0, 72)
    assert misplaced(history, rows_of(), groups=4, runs=3) == []
    assert misplaced(history, rows_of("seed=1"), groups=4, runs=3) != []
    assert misplaced(history, rows_of(), groups=3, runs=3) != []
    twice = {uid: [*steps, 6] if i == 7 else steps for i, (uid, steps) in enumerate(history["trained"].items())}
    assert misplaced({**history, "trained": twice}, rows_of(), groups=4, runs=3) != []
    losses = [(step, step_metrics["loss"]) for step, step_metrics in history["metrics"] if "loss" in step_metrics]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6] and len({loss for _, loss in losses}) == 6
    assert losses == [(step, step_metrics["loss"]) for step, step_metrics in expected.lines if "loss" in step_metrics]


def test_a_short_trial(nursery: Nursery, tmp_path: Path) -> None:
    """Killed at any moment, as `python -m tests.train.trials` does at length; here with a critic."""
    steps = {"ppo": ["steps=4", "algorithm.preset=ppo", "algorithm.group_size=2", "algorithm.critic_warmup=1"]}
    report = trial(nursery, tmp_path, 3, seed=1, variants=steps)
    assert report.violations == [] and sum(report.kills.values()) == 3 and report.ended["ppo"] >= 1


# --- the same command, once more --------------------------------------------------------------------------------------


def seen(folder: Path) -> dict[str, bytes | None]:
    """Every file of a run, but for what SQLite keeps beside its database while somebody reads."""
    files = sorted(file for file in folder.rglob("*") if not file.name.endswith(("-wal", "-shm")))
    return {str(file.relative_to(folder)): file.read_bytes() if file.is_file() else None for file in files}


def test_a_run_at_its_end_is_left_as_it_is(
    nursery: Nursery, finished_run: Path, expected: Lineage, tmp_path: Path
) -> None:
    folder = copied(finished_run, tmp_path / "run")
    before = seen(folder)
    life = nursery.live(command(folder))
    assert life.code == 0
    assert "has done 6 steps" in life.printed and "Increase it to continue" in life.printed
    assert "all 6 steps were done before" in life.printed and "after     avg@1" in life.printed
    assert "learned" not in life.points and "before commit" not in life.points
    changed = {name for name, data in seen(folder).items() if before.get(name, b"") != data}
    assert changed == {"config.yaml"}  # `out` is another one here
    assert nursery.live(command(folder)).code == 0 and seen(folder).keys() == before.keys()
    less = nursery.live(command(folder, "steps=3"))
    assert less.code == 0 and "has done 6 steps" in less.printed and "steps is 3" in less.printed
    assert expected.differences(Lineage.of(folder)) == []


def test_more_steps_go_on(nursery: Nursery, expected: Lineage, tmp_path: Path) -> None:
    """Four steps, then two more: what four and two are, with a rate that does not go by the number of steps."""
    folder, changes = (
        tmp_path / "run",
        ["optimizer.schedule=constant", "evaluation.interval=0", "evaluation.after=false"],
    )
    assert nursery.live(command(folder, "steps=4", *changes)).code == 0
    life = nursery.live(command(folder, *changes))
    assert life.code == 0 and "continuing after step 4" in life.printed
    assert "steps: 6" in (folder / "config.yaml").read_text()
    other = tmp_path / "other"
    assert nursery.live(command(other, *changes)).code == 0
    assert Lineage.of(other).differences(Lineage.of(folder)) == []
    # Evaluations change nothing of what is learned.
    constant = Lineage.of(folder).ledger["trained"]
    assert constant == expected.ledger["trained"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["seed=1"], "seed: 1, was 0"),
        (["optimizer.lr=1e-4"], "optimizer.lr: 0.0001, was 0.0005"),
        (
            ["algorithm.group_size=2", "batch.prompts_per_step=2"],
            "algorithm.group_size: 2, was 3; batch.prompts_per_step: 2, was 4",
        ),
        (["resume=false"], "resume: got false, and {folder} has a run"),
    ],
)
def test_another_run_in_the_folder_is_refused(
    changes: list[str], message: str, nursery: Nursery, finished_run: Path, tmp_path: Path
) -> None:
    folder = copied(finished_run, tmp_path / "run")
    before = seen(folder)
    life = nursery.live(command(folder, *changes))
    assert life.code == 2
    assert message.format(folder=folder) in life.printed
    assert life.printed.count("\n") == 1, life.printed
    assert seen(folder) == before


def test_overwrite(nursery: Nursery, finished_run: Path, tmp_path: Path) -> None:
    """It begins anew whatever was there, also where it is killed while it removes that; but only what a run made."""
    folder = copied(finished_run, tmp_path / "run")
    changes = ["seed=1", "steps=1", "overwrite=true"]
    for times in (1, 2, 1):
        assert nursery.live(command(folder, *changes), at=("overwriting", times)).killed
    life = nursery.live(command(folder, *changes))
    assert life.code == 0, life.printed
    assert [saved.step for saved in checkpoint.list_checkpoints(folder)] == [0, 1]
    again = nursery.live(command(folder, *changes[:2]))
    assert again.code == 0 and "Increase it to continue" in again.printed
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("It was a dark and stormy night.")
    for more in ([], ["overwrite=true"]):
        life = nursery.live(command(other, *more))
        assert life.code == 2 and "config.yaml" in life.printed
        assert [file.name for file in other.iterdir()] == ["chapter1.tex"]
    life = nursery.live(command(other / "chapter1.tex"))
    assert life.code == 2 and "which is a file, expected a folder" in life.printed


def test_two_processes_do_not_train_in_one_folder(nursery: Nursery, finished_run: Path, tmp_path: Path) -> None:
    folder = copied(finished_run, tmp_path / "run")
    with (folder / ".lock").open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for more in ([], ["overwrite=true"]):
            life = nursery.live(command(folder, *more))
            assert life.code == 2 and "in which another process is training" in life.printed
    assert nursery.live(command(folder)).code == 0


# --- what somebody did to the folder ----------------------------------------------------------------------------------


def unzipped(path: Path) -> None:
    """Bytes that are no archive."""
    path.write_bytes(b"not what torch wrote")


def shortened(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def of_another_step(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": 2}))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *(("state.pt", unzipped), ("state.pt", shortened), ("state.pt", Path.unlink)),
        *(("trainer.json", shortened), ("trainer.json", Path.unlink), ("trainer.json", of_another_step)),
        *(("model/model.safetensors", shortened), ("model", shutil.rmtree)),
    ],
)
def test_a_broken_checkpoint_is_refused_by_name(
    name: str, harm: object, nursery: Nursery, finished_run: Path, tmp_path: Path
) -> None:
    """Older weights are not taken in its place, unless it is removed."""
    folder = copied(finished_run, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints/step-000006")
    target = folder / "checkpoints/step-000004"
    harm(target / name)  # type: ignore[operator]
    life = nursery.live(command(folder))
    assert life.code == 2, life.printed
    last = life.printed.splitlines()[-1]
    assert f"{target / name.partition('/')[0]}" in last
    assert f"To continue from the checkpoint before it, remove {target}" in last
    assert "during rewind" not in life.points


def test_the_checkpoint_before_a_broken_one(
    nursery: Nursery, finished_run: Path, expected: Lineage, tmp_path: Path
) -> None:
    """Without its newest checkpoints, and with a folder that was removed in part, a run goes on from what is left."""
    folder = copied(finished_run, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints/step-000006")
    (folder / "checkpoints/step-000004").rename(folder / "checkpoints/.partial-step-000004")
    shutil.rmtree(folder / "checkpoints/.partial-step-000004/model")
    life = nursery.live(command(folder))
    assert life.code == 0, life.printed
    assert "continuing after step 2" in life.printed
    assert expected.differences(Lineage.of(folder)) == []


def test_a_run_without_its_book_or_its_checkpoints(nursery: Nursery, finished_run: Path, tmp_path: Path) -> None:
    folder = copied(finished_run, tmp_path / "run")
    shutil.rmtree(folder / "book")
    life = nursery.live(command(folder, "steps=8"))
    assert life.code == 2 and "has no checkpoint 'step-000006'" in life.printed, life.printed
    folder = copied(finished_run, tmp_path / "other")
    shutil.rmtree(folder / "checkpoints")
    life = nursery.live(command(folder))
    assert life.code == 2 and "whose book has training records" in life.printed, life.printed
    folder = copied(finished_run, tmp_path / "third")
    shutil.rmtree(folder / "checkpoints/step-000000")
    life = nursery.live(command(folder, "steps=8"))
    assert life.code == 2 and "reference: missing" in life.printed and "step-000000" in life.printed, life.printed


def test_other_data_are_refused(nursery: Nursery, tmp_path: Path) -> None:
    """A file that was changed under a run: its prompts would be skipped or come twice."""
    file, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    rows = [{"prompt": f"{word}>", "response": "a"} for word in ("ab", "bc", "cd", "de", "ef", "fg", "gh", "hi")]
    file.write_text("\n".join(map(json.dumps, rows)))
    changes = [f"data.path={file}", "data.function=null", "data.options={}", "data.held_out=0", "steps=1"]
    changes += ["evaluation.interval=0"]
    first = nursery.live(command(folder, *changes))
    assert first.code == 0, first.printed
    file.write_text("\n".join(map(json.dumps, rows[1:])))
    life: Life = nursery.live(command(folder, *changes, "steps=2"))
    assert life.code == 2 and "expected the 8 rows" in life.printed, life.printed
