"""Several processes: the union of their samples, each once, by the first; whatever goes wrong in one, none waits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from PIL import Image

from rollbook.compat.lightrft.batch import from_experiences
from rollbook.compat.lightrft.saver import TrajectorySaver
from rollbook.core.process_group import SINGLE_PROCESS
from tests.saver.making import TOKENIZER, read, rollout

WORLD = 2


class Bomb:
    """A list that cannot be walked."""

    def __iter__(self) -> Any:
        raise RuntimeError("no such rollout")


def with_images(rows: list[Any], colours: list[str]) -> list[Any]:
    batch = from_experiences(rows)
    batch.raw_images = [[Image.new("RGB", (4, 4), colour)] for colour in colours]
    return [batch]


def unnamed(rows: list[Any]) -> list[Any]:
    batch = from_experiences(rows)
    batch.ids = None
    return [batch]


def scenes(rank: int) -> dict[str, dict[str, Any]]:
    """What each process calls, by name; all make the same calls."""
    rows = rollout(6, 2)
    part = rows[6 * rank : 6 * rank + 6]
    return {
        "apart": {"experiences": part, "num_samples": 100, "compute_stats": True},
        "copies": {"experiences": rows, "num_samples": 100},
        "unnamed": {"experiences": unnamed(part), "num_samples": 100},
        "unnamed copies": {"experiences": unnamed(rows), "num_samples": 100},
        "few": {"experiences": part, "num_samples": 5, "compute_stats": "all"},
        "one is empty": {"experiences": [] if rank == 1 else part, "num_samples": 100},
        "the first is empty": {"experiences": part if rank else []},
        "all are empty": {"experiences": []},
        "one fails": {"experiences": Bomb() if rank == 1 else part, "num_samples": 100},
        "the first fails": {"experiences": Bomb() if rank == 0 else part, "num_samples": 100},
        "all fail": {"experiences": Bomb()},
        "bad choice": {"experiences": part, "num_samples": 2, "keep": lambda some, count: [1 // 0]},
        "images": {
            "experiences": with_images(part, ["red"] * 6 if not rank else ["blue", "red"] * 3),
            "num_samples": 100,
        },
        "alone": {"experiences": part if rank == 0 else None, "process_group": SINGLE_PROCESS},
        "behind": {"experiences": part, "num_samples": 100, "background": True},
    }


def calls_of_some(rank: int, folder: str) -> dict[str, Any]:
    """Saves that not every process calls, or one calls after the first has gone on."""
    own_rows = rollout(6, 2)[6 * rank : 6 * rank + 6]
    outcomes: dict[str, Any] = {}
    for name, caller in (("first only", 0), ("other only", 1)):
        saver = TrajectorySaver(f"{folder}/{name}", TOKENIZER, wait_seconds=0.5)
        if rank == caller:
            start = time.monotonic()
            outcomes[name] = saver.save_trajectories(own_rows, 5, 100)
            outcomes[f"{name}, again"] = [time.monotonic() - start]
            outcomes[f"{name}, again"] += saver.save_trajectories(own_rows, 6, 100)
            outcomes[f"{name}, again"].append(time.monotonic() - start)
    saver = TrajectorySaver(f"{folder}/late", TOKENIZER, wait_seconds=0.1)
    if rank:
        torch.distributed.barrier()
    outcomes["late"] = saver.save_trajectories(own_rows, 5, 100)
    if not rank:
        torch.distributed.barrier()
    torch.distributed.barrier()
    saver._rendezvous.seconds = 60.0
    outcomes["in time"] = saver.save_trajectories(own_rows, 6, 100)
    return outcomes


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    try:
        outcomes: dict[str, Any] = {}
        for name, call in scenes(rank).items():
            options = {key: call.pop(key) for key in ("keep", "process_group", "background") if key in call}
            if options.get("process_group") is SINGLE_PROCESS and rank:
                outcomes[name] = None, None  # a saver that one process has for itself
                continue
            saver = TrajectorySaver(f"{folder}/{name}", TOKENIZER, **options)
            outcomes[name] = saver.save_trajectories(step=5, **call)
            saver.flush()
        outcomes |= calls_of_some(rank, folder)
        Path(f"{folder}/{rank}.json").write_text(json.dumps(outcomes))
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each process's calls gave, by rank, and the folder."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(worker, args=(str(folder),), nprocs=WORLD, start_method="fork")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)], folder


ALL = [row.eid.uid for row in rollout(6, 2)]


def saved(answers: Any, name: str) -> list[dict[str, Any]]:
    """The records of a scene, which the first process alone wrote."""
    outcomes, folder = answers
    assert [of_rank[name] for of_rank in outcomes[1:]] == [[None, None]] * (WORLD - 1)
    path = folder / name / "trajectories_step_5.json"
    assert outcomes[0][name][0] == str(path)
    return read(path)


@pytest.mark.parametrize("name", ["apart", "copies", "behind"])
def test_the_union_without_copies(answers: Any, name: str) -> None:
    assert [entry["uid"] for entry in saved(answers, name)] == ALL


@pytest.mark.parametrize("name", ["unnamed", "unnamed copies"])
def test_samples_without_ids(answers: Any, name: str) -> None:
    entries = saved(answers, name)
    assert [entry["text"] for entry in entries] == [entry["text"] for entry in saved(answers, "apart")]
    assert len({entry["uid"] for entry in entries}) == len(ALL)


def test_places_are_of_the_process_that_had_it(answers: Any) -> None:
    places = [(entry["rank"], entry["experience_index"], entry["sample_in_exp"]) for entry in saved(answers, "apart")]
    assert places == [(rank, i, 0) for rank in range(WORLD) for i in range(6)]


def test_the_same_is_kept_as_in_one_process(answers: Any, tmp_path: Path) -> None:
    alone = TrajectorySaver(tmp_path, TOKENIZER)
    path, stats = alone.save_trajectories(rollout(6, 2), 5, 5, compute_stats="all")
    entries = saved(answers, "few")
    assert [(entry["uid"], entry["kept"], entry["kept_weight"]) for entry in entries] == [
        (entry["uid"], entry["kept"], entry["kept_weight"]) for entry in read(path)
    ]
    assert answers[0][0]["few"][1] == pytest.approx(stats)
    _, full_stats = alone.save_trajectories(rollout(6, 2), 6, 100, compute_stats=True)
    assert answers[0][0]["apart"][1] == pytest.approx(full_stats) == stats


def test_a_process_without_samples_takes_part(answers: Any) -> None:
    assert [entry["uid"] for entry in saved(answers, "one is empty")] == ALL[:6]
    assert [entry["uid"] for entry in saved(answers, "the first is empty")] == ALL[6:]
    assert [entry["all are empty"] for entry in answers[0]] == [[None, None]] * WORLD


def test_a_process_that_fails_costs_its_own_samples(answers: Any) -> None:
    assert [entry["uid"] for entry in saved(answers, "one fails")] == ALL[:6]
    assert [entry["uid"] for entry in saved(answers, "the first fails")] == ALL[6:]
    for name, count in (("one fails", 1), ("the first fails", 1), ("all fail", 2), ("bad choice", 1)):
        assert answers[0][0][name][1] == {"trajectory/save_errors": count}
    for name in ("all fail", "bad choice"):
        assert [of_rank[name][0] for of_rank in answers[0]] == [None] * WORLD
        assert not list((answers[1] / name).glob("*.json"))


def test_images_of_every_process(answers: Any) -> None:
    entries = saved(answers, "images")
    first, other = "images/step5_exp0_sample0_img0.png", "images/step5_rank1_exp0_sample0_img0.png"
    assert [entry["image_paths"] for entry in entries] == [[first]] * 6 + [[other], [first]] * 3
    assert sorted(file.name for file in (answers[1] / "images" / "images").iterdir()) == [
        Path(first).name,
        Path(other).name,
    ]


def test_a_process_by_itself(answers: Any) -> None:
    assert [entry["uid"] for entry in saved(answers, "alone")] == ALL[:6]


def test_a_call_of_the_first_process_alone_saves_its_samples(answers: Any) -> None:
    first, _ = answers[0]
    assert [entry["uid"] for entry in read(first["first only"][0])] == ALL[:6] and first["first only"][1] is None
    waited, path, stats, total = first["first only, again"]
    assert [entry["uid"] for entry in read(path)] == ALL[:6] and stats is None
    assert total - waited < waited, "the second call does not wait"


def test_a_call_of_another_process_alone_returns(answers: Any) -> None:
    assert answers[0][1]["other only"] == answers[0][1]["other only, again"][1:3] == [None, None]
    assert not list((answers[1] / "other only").glob("*.json"))


def test_a_process_that_comes_late_is_waited_for_the_next_time(answers: Any) -> None:
    first, other = answers[0]
    assert [entry["uid"] for entry in read(first["late"][0])] == ALL[:6] and other["late"] == [None, None]
    assert [entry["uid"] for entry in read(first["in time"][0])] == ALL and other["in time"] == [None, None]
