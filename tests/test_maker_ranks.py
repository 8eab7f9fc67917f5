"""Several processes make what one would: statistics over groups, running norm and whitening are of all samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from rollbook.compat.lightrft.maker import MakerConfig, NaiveExperienceMaker
from rollbook.compat.lightrft.samples import RolloutBatches
from rollbook.rollout import Prompt, ScriptedEngine

SETTINGS: dict[str, dict[str, Any]] = {
    "group_norm": {},
    "rloo": {"advantages_norm": True},
    "reinforce": {"advantages_norm": True, "reward_running_norm": True, "advantage_clip": 0.8},
    "reinforce++": {},
    "dr_grpo": {"dynamic_sampling": True},
}
TASKS = [[3], [4, 4], [5, 6, 7], [8]]


def answer(prompt: Prompt, run: int) -> list[int]:
    return [*(prompt.token_ids or ()), 20 + run, 2]


def reward(prompt_ids: list[int], response_ids: list[int]) -> float:
    return float((sum(prompt_ids) * response_ids[-2]) % 7) if prompt_ids != [8] else 0.5  # the last task says nothing


def shaped_columns(tasks: list[list[int]]) -> dict[str, list[torch.Tensor]]:
    columns = {}
    for name, options in SETTINGS.items():
        maker = NaiveExperienceMaker(
            None, None, None, None, None, 8, None, reward_fn=reward, engine=ScriptedEngine(answer),
            config=MakerConfig(advantage_estimator=name, n_samples_per_prompt=3, micro_rollout_batch_size=2, **options),
        )  # fmt: skip
        batches = maker.make_experience_list(tasks)
        columns[name] = [row.clone() for row in RolloutBatches(batches).rows("advantages") or ()]
        if not options.get("reward_running_norm"):  # which would take these rewards in twice
            for batch in batches:
                batch.ids = None  # by place, which two processes must not mistake for one another's
            columns[f"{name} by place"] = [part.clone() for part in maker.process_experiences(batches)[1]]
    return columns


def worker(rank: int, parts: list[list[list[int]]], folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(parts))
    try:
        torch.save(shaped_columns(parts[rank]), f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def test_processes_together_are_as_one(tmp_path: Path) -> None:
    parts = [TASKS[:1], TASKS[1:]]
    mp.start_processes(worker, args=(parts, str(tmp_path)), nprocs=2, start_method="fork")
    single = shaped_columns(TASKS)
    apart = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, rows in single.items():
        together = [row for part in apart for row in part[name]]
        flat, expected = torch.cat(together), torch.cat(rows)
        torch.testing.assert_close(flat, expected, rtol=1e-5, atol=1e-6, msg=name)
    assert max(row.abs().max() for row in single["reinforce"]) <= 0.8
    assert all(row.count_nonzero() == 0 for row in single["dr_grpo"][-3:])
