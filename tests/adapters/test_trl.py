"""`to_trl` and `from_trl`: keys, types, round trips; what the released TRL makes of them is in `trl_trainer.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollbook import Experience
from rollbook.compat.lightrft.batch import ExperienceBatch, from_experiences
from rollbook.compat.lightrft.replay_buffer import split_experience_batch
from rollbook.compat.trl import from_trl, to_trl
from tests.adapters.samples import EXPERT, LAYOUTS, make_batch, make_records, scored_records


def same_samples(a: ExperienceBatch, b: ExperienceBatch) -> bool:
    return split_experience_batch(a, unpad=True) == split_experience_batch(b, unpad=True)


def test_trls_trainer_takes_it() -> None:
    """The tests of `trl_trainer.py`, in a fresh Python."""
    file = Path(__file__).with_name("trl_trainer.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", str(file)]
    done = subprocess.run(command, cwd=file.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 passed" in done.stdout, done.stdout


# --- there and back -----------------------------------------------------------------------------------------------


def test_the_keys_and_their_types() -> None:
    rows = [
        Experience(tokens=[1, 2, 3], prompt_length=2, advantages=[0.5], logprobs=[-1.0], eid={"suffix": "a"}),
        Experience(
            tokens=[4, 5, 6, 7],
            prompt_length=1,
            action_mask=[1, 0, 1],
            advantages=[-0.5, 9.0, -0.5],
            logprobs=[-2.0, -3.0, -4.0],
            eid={"suffix": "b"},
        ),
    ]
    batch = to_trl(rows, pad_token_id=9)
    shown = {k: (str(v.dtype), v.tolist()) for k, v in batch.items() if isinstance(v, torch.Tensor)}
    assert shown == {
        "prompt_ids": ("torch.int64", [[1, 2], [9, 4]]),
        "prompt_mask": ("torch.int64", [[1, 1], [0, 1]]),
        "completion_ids": ("torch.int64", [[3, 9, 9], [5, 6, 7]]),
        "completion_mask": ("torch.int64", [[1, 0, 0], [1, 1, 1]]),
        "tool_mask": ("torch.int64", [[1, 1, 1], [1, 0, 1]]),
        "advantages": ("torch.float32", [0.5, -0.5]),
        "num_items_in_batch": ("torch.int64", 3),
        "sampling_per_token_logps": ("torch.float32", [[-1.0, 0.0, 0.0], [-2.0, -3.0, -4.0]]),
    }
    assert batch["unique_ids"] == ["//0/0/a", "//0/0/b"]
    assert from_trl(batch) == from_experiences(rows, layout="prompt_left_response_right")
    plain = to_trl(rows[:1], pad_token_id=0, num_items_in_batch=40, max_completion_length=4)
    assert "tool_mask" not in plain and plain["num_items_in_batch"].item() == 40
    assert plain["completion_ids"].tolist() == [[3, 0, 0, 0]]


@pytest.mark.parametrize("media", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_come_back(layout: str, media: bool) -> None:
    batch = make_batch(4, layout, media)
    sent = to_trl(batch, pad_token_id=0, per_token_advantages=True)
    assert sent["old_per_token_logps"].shape == sent["ref_per_token_logps"].shape == sent["completion_ids"].shape
    assert from_trl(sent, layout=layout) == batch


def test_custom_fields_are_one_number_for_each_row() -> None:
    records = make_records(1, names=("advantages",), custom_fields=[EXPERT])
    batch = to_trl(records, pad_token_id=0, per_token_advantages=True)
    assert batch["expert_version"].tolist() == [row.info["model_version"] for row in records]
    assert from_trl(batch) == from_experiences(records, layout="prompt_left_response_right")


def test_importance_ratios_pass_through() -> None:
    batch = from_experiences(scored_records(5))
    ratio = torch.rand_like(batch.advantages)
    batch.extras = {**(batch.extras or {}), "importance_sampling_ratio": ratio}
    sent = to_trl(batch, pad_token_id=0)
    completion = sent["completion_mask"] != 0
    ratios = batch.pack().extras["importance_sampling_ratio"].values
    assert sent["importance_sampling_ratio"][completion].tolist() == ratios.tolist()
    assert same_samples(from_trl(sent), batch)


def test_a_batch_that_trl_made() -> None:
    """Its own keys, no ids: the log-probs have their places, and what nobody knows is kept in `info`."""
    batch = {
        "prompt_ids": torch.tensor([[0, 1], [2, 3]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[4, 5, 0], [6, 7, 8]]),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "tool_mask": torch.tensor([[1, 1, 1], [1, 0, 1]]),
        "advantages": torch.tensor([0.5, -0.5]),
        "num_items_in_batch": torch.tensor(4),
        "old_per_token_logps": torch.tensor([[-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0]]),
        "sampling_per_token_logps": torch.tensor([[-1.5, -2.5, 0.0], [-3.5, -4.5, -5.5]]),
        "importance_sampling_ratio": torch.tensor([[1.0], [2.0]]),
        "ref_per_token_logps": None,
    }
    packed = from_trl(batch, layout="packed")
    assert [row.tolist() for row in packed.sequences] == [[1, 4, 5], [2, 3, 6, 7, 8]]
    assert [row.tolist() for row in packed.action_mask] == [[True, True], [True, False, True]]
    assert [row.tolist() for row in packed.advantages] == [[0.5, 0.5], [-0.5, 0.0, -0.5]]
    assert [row.tolist() for row in packed.action_log_probs] == [[-1.0, -2.0], [-3.0, -4.0, -5.0]]
    assert [row.tolist() for row in packed.extras["logprobs"]] == [[-1.5, -2.5], [-3.5, -4.5, -5.5]]
    assert packed.base_action_log_probs is None and packed.ids is None
    assert packed.info["trl"]["importance_sampling_ratio"].tolist() == [[1.0], [2.0]]
    again = to_trl(packed, pad_token_id=0)
    del batch["ref_per_token_logps"]
    for key, value in batch.items():
        assert again[key].dtype == value.dtype and again[key].tolist() == value.tolist(), key


def test_what_trl_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"advantages: missing, required"):
        to_trl(make_records(0), pad_token_id=0)
    video = {"pixel_values_videos": torch.zeros(4, 2), "video_grid_thw": torch.tensor([[1, 2, 2]])}
    row = Experience(tokens=[1, 2], advantages=[1.0], multi_modal_inputs=video)
    with pytest.raises(ValueError, match=r"pixel_values_videos: got a video, expected images"):
        to_trl([row], pad_token_id=0)
    with pytest.raises(ValueError, match=r"spatial: got media of that name, expected pixel_values"):
        to_trl([row.replace(multi_modal_inputs={"spatial": torch.zeros(1)})], pad_token_id=0)
    with pytest.raises(ValueError, match=r"max_prompt_length: got 0, expected at least 1, the length in row 0"):
        to_trl([row.replace(multi_modal_inputs=None)], pad_token_id=0, max_prompt_length=0)
    with pytest.raises(ValueError, match=r"batch: got NoneType for 'prompt_ids', expected a tensor"):
        from_trl({})


# --- vision -------------------------------------------------------------------------------------------------------


def test_token_types_are_aligned_with_the_tokens() -> None:
    kinds = torch.tensor([[0, 1, 1, 0]])
    media = {
        "pixel_values": torch.rand(4, 3),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "mm_token_type_ids": kinds,
    }
    rows = [
        Experience(tokens=[1, 7, 7, 2, 3], prompt_length=4, advantages=[1.0], multi_modal_inputs=media),
        Experience(tokens=[1, 2, 3, 4, 5, 6, 7], prompt_length=5, advantages=[1.0, 1.0]),
    ]
    batch = to_trl(rows, pad_token_id=0)
    assert batch["mm_token_type_ids"].tolist() == [[0, 0, 1, 1, 0, 0, 0], [0] * 7]
    assert batch["num_images"] == [1, 0] and batch["pixel_values"].shape == (4, 3)
    back = split_experience_batch(from_trl(batch), unpad=True)
    assert back == split_experience_batch(from_experiences(rows), unpad=True)
