"""Trajectories of batches on a device are saved like those on the CPU, also in an NCCL process group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rollbook import EID, Experience
from rollbook.compat.lightrft.batch import from_experiences
from rollbook.compat.lightrft.replay_buffer import split_experience_batch
from rollbook.compat.lightrft.saver import TrajectorySaver


class Bytes:
    """A tokenizer with one id per byte; 256 is the end token."""

    eos_token_id = 256

    def decode(self, ids: Any) -> str:
        return b"".join(b"<end>" if i == 256 else bytes([i]) for i in ids).decode("utf-8", "replace")


def batch(device: str) -> Any:
    rows = []
    for i, text in enumerate(("wait, no", "héllo 😀", "x")):
        tokens = [*b"Q:", *text.encode(), 256]
        places = torch.arange(len(tokens) - 2, dtype=torch.float32)
        rows.append(
            Experience(
                eid=EID(1, "a", i, suffix=str(i)),
                tokens=tokens,
                prompt_length=2,
                logprobs=-places,
                old_logprobs=(-places - 0.5).to(torch.bfloat16),
                entropy=places / 4,
                advantages=places.requires_grad_(),
                reward=float(i),
            )
        )
    return from_experiences(rows, layout="prompt_left_response_right").to_device(device)


def saved(folder: Path, experiences: Any, **options: Any) -> Any:
    saver = TrajectorySaver(folder, Bytes(), mark_high_entropy_tokens=True, **options)
    path, stats = saver.save_trajectories(experiences, 1, compute_stats="all")
    saver.flush()
    assert saver.error_count == 0 and path is not None
    return json.loads(Path(path).read_text()), stats


@pytest.mark.parametrize("form", ["padded", "packed", "items", "behind"])
def test_a_batch_on_a_device(form: str, tmp_path: Path) -> None:
    saved_files = []
    for device in ("cpu", "cuda"):
        experiences = batch(device)
        saved_forms = {"packed": [experiences.pack()], "items": split_experience_batch(experiences)}.get(
            form, [experiences]
        )
        saved_files.append(saved(tmp_path / device, saved_forms, background=form == "behind")[0])
    assert saved_files[0] == saved_files[1] and len(saved_files[0]) == 3
    assert saved_files[0][1]["generated_text"] == "héllo 😀"


def test_by_nccl(tmp_path: Path) -> None:
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        together = saved(tmp_path / "together", [batch("cuda")])
    finally:
        torch.distributed.destroy_process_group()
    assert together == saved(tmp_path / "alone", [batch("cpu")])
