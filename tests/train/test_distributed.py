"""Several ranks compute what one process computes, resume each other's checkpoints, and end together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rollbook
from rollbook.cli import main
from rollbook.models import Actor
from rollbook.train.checkpoint import list_checkpoints
from rollbook.train.tracker import METRICS_FILE
from tests.train.ranks import (
    FAILURE,
    RUN_STEPS,
    SHORT,
    TOLERANCE,
    compare_runs,
    read_steps,
    relative_difference,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.train.ranks", "--short", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    logs = "".join(path.read_text()[-3000:] for path in folder.rglob("said-*"))
    assert done.returncode == 0, f"{done.stderr}{logs}"
    return folder


def statuses(results: Path) -> dict[str, list[int]]:
    by_name: dict[str, list[int]] = json.loads((results / "statuses.json").read_text())
    return by_name


def read_logs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("said-*")))


@pytest.mark.parametrize(
    ("ranks", "strategy", "number"),
    [
        *(("two", strategy, i) for strategy in ("ddp", "fsdp") for i in range(len(SHORT))),
        ("three", "fsdp", 0),
    ],
)
def test_ranks_compute_the_update_of_one(results: Path, ranks: str, strategy: str, number: int) -> None:
    path = results / ranks / f"{strategy}-{number}.pt"
    assert path.exists(), read_logs(results / ranks)
    expected, measured = torch.load(results / "one" / f"none-{number}.pt"), torch.load(path)
    assert measured["uids"] == expected["uids"]
    assert max(relative_difference(expected, measured).values()) <= TOLERANCE


def test_waiting_is_reported(results: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        steps = torch.load(results / "two" / f"{strategy}-0.pt")["metrics"]
        assert all(0 <= step[name] < 1 for step in steps for name in ("ranks/wait_share", "ranks/plan_wait_share"))


def test_closing_ends_the_watch_and_waiting_for_rank_0_counts(results: Path) -> None:
    """A thread that is in the store when the interpreter ends aborts the process."""
    assert statuses(results)["closed"] == [0, 0], read_logs(results)
    first, second = (json.loads((results / f"closed-{rank}.json").read_text()) for rank in range(2))
    assert first["threads"] == second["threads"] == []
    # Rank 1 works for 0.2 of 0.8 seconds, and waits for the others: 0.6 / (2 * 0.8).
    assert 0.25 < first["shares"]["ranks/wait_share"] < 0.5


@pytest.mark.parametrize("name", ["run-none", "run-fsdp", "run-ddp", "run-apart"])
def test_a_checkpoint_of_two_ranks_resumes(results: Path, name: str) -> None:
    """In one process, on three ranks, with another strategy, and on two machines that share no files."""
    assert set(statuses(results)[name]) == {0}, read_logs(results / name)
    expected, measured = read_steps(results / "expected"), read_steps(results / name)
    assert list(measured) == list(range(1, RUN_STEPS + 1))
    assert compare_runs(expected, measured) <= TOLERANCE


def read_metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line)["metrics"] for line in (folder / "run" / METRICS_FILE).read_text().splitlines()]


@pytest.mark.parametrize("name", ["command-ranks", "command-torchrun"])
def test_the_command_trains_and_evaluates_on_all_ranks(results: Path, name: str) -> None:
    folder = results / name
    assert statuses(results)[name] == [0], read_logs(folder)
    expected, measured = read_metrics(results / "command-none"), read_metrics(folder)
    assert len(measured) == len(expected) == 5  # evaluations before and after three steps, each written once
    for before, after in zip(expected, measured, strict=True):
        names = {
            "eval/reward",
            "eval/prompts",
            "reward",
            "records",
            "rollout/tokens",
            "loss",
            "grad_norm",
        } & before.keys()
        assert {name: after.get(name) for name in names} == pytest.approx(
            {name: before[name] for name in names}, rel=1e-4
        )
    with rollbook.open(folder / "run" / "book", mode="r") as book:
        assert book.counts().trained == 18  # 3 steps of 3 prompts and 2 responses
        assert len({record.eid.uid for record in book.where(evaluation=1)}) == 12
    assert [saved.step for saved in list_checkpoints(folder / "run")] == [0, 2, 3]


def test_several_ranks_need_a_strategy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["train", "letters", "--ranks", "2"]) == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "letters"]) == 2
    errors = capsys.readouterr().err
    assert "--ranks: got 2 with distributed: none, expected distributed=ddp or fsdp" in errors
    assert "distributed: got 'none' with 2 ranks, expected 'ddp' or 'fsdp'" in errors


def test_a_checkpoint_has_a_hugging_face_folder(results: Path) -> None:
    last = list_checkpoints(results / "run")[-1]
    assert last.shards is not None
    saved = Actor(str(last.model))
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    weights = {f"optimizer/weights/{name}": torch.empty_like(weight) for name, weight in saved.named_parameters()}
    with pytest.warns(UserWarning, match="single process"):
        load(weights, storage_reader=FileSystemReader(last.shards), no_dist=True)
    for name, weight in saved.named_parameters():
        assert torch.equal(weights[f"optimizer/weights/{name}"], weight)


def test_a_killed_rank_ends_all_and_the_same_command_continues(results: Path) -> None:
    ended = statuses(results)["killed"]
    assert -9 in ended and 0 not in ended
    assert compare_runs(read_steps(results / "expected"), read_steps(results / "killed")) <= TOLERANCE


def test_an_exception_ends_all_ranks_with_its_message(results: Path) -> None:
    assert statuses(results)["failed"] == [1, 1]
    for rank in range(2):
        assert f"rank 1: ValueError: {FAILURE}" in (results / "failed" / f"said-{rank}").read_text()


def test_rank_0_ends_with_the_message_of_a_rank_that_fails_while_building(results: Path) -> None:
    assert 0 not in statuses(results)["fails"]
    output = (results / "command-fails" / "said-0").read_text()
    assert f"rank 1: RuntimeError: {FAILURE}" in output and "gloo" not in output


def test_ranks_end_with_their_launcher(results: Path) -> None:
    assert statuses(results)["killed-launcher"] == [2, 0]


def test_each_rank_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["train", "letters", "distributed=ddp", "device=auto", "--ranks", "3"]) == 2
    assert "--ranks: got 3 with 2 CUDA devices, expected at most 2, or device=cpu" in capsys.readouterr().err
