"""LightRFT's cases for its trajectory saver, by its names: reproduced, or, where they were judged wrong, done right."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

from rollbook.compat.lightrft.maker import Experience, ExperienceVL
from rollbook.compat.lightrft.replay_buffer import remove_padding_in_sequences, split_experience_batch
from rollbook.compat.lightrft.saver import (
    TrajectorySaver,
    _calculate_entropy_from_log_probs,
    _calculate_repeatness,
    create_high_entropy_mask,
)
from tests.conformance.algorithms import decoded

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "saver_lightrft.json").read_text())["cases"]
}
RECORD = CASES["saver_buffer_item_record_truncated"]


class Characters:
    """The cases' tokenizer: an id is a character's number, but for three."""

    eos_token_id, bos_token_id, pad_token_id = 2, 1, 0
    names: ClassVar = {0: "<pad>", 1: "<bos>", 2: "<eos>"}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        skipped = {} if not skip_special_tokens else dict.fromkeys(self.names, "")
        return "".join({**self.names, **skipped}.get(int(i), chr(int(i))) for i in ids)


def experience(**more: Any) -> Experience:
    """The batch of the cases."""
    columns = decoded(RECORD["inputs"]["experience"])
    return ExperienceVL(**{name: value for name, value in columns.items() if name != "tokenizer"}, **more)


def saved(path: str | None) -> list[dict[str, Any]]:
    assert path is not None
    return json.loads(Path(path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("high_entropy")])
def test_high_entropy_mask(case: str) -> None:
    inputs = decoded(CASES[case]["inputs"])
    entropy, mask = (torch.as_tensor(inputs[name]) for name in ("entropy", "action_mask"))
    selected = create_high_entropy_mask(entropy, mask, inputs["ratio"])
    if CASES[case]["kind"] == "conform":
        expected = decoded(CASES[case]["lightrft_output"])
        assert torch.equal(selected, expected) and selected.dtype == expected.dtype
    else:
        assert selected.tolist() == CASES[case]["better"]


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("repeat_")])
def test_repetition(case: str) -> None:
    assert _calculate_repeatness(CASES[case]["inputs"]["s"]) == pytest.approx(CASES[case]["lightrft_output"], abs=1e-12)


def test_the_spread_of_log_probs_has_its_own_name(tmp_path: Path) -> None:
    """`policy_entropy_is_std_of_logprobs`: an entropy is one, or not there."""
    case = CASES["policy_entropy_is_std_of_logprobs"]
    logprobs = torch.tensor(case["inputs"]["log_probs"])
    assert _calculate_entropy_from_log_probs(logprobs) == pytest.approx(case["lightrft_output"], abs=1e-6)
    row = torch.tensor([[97, 98, 99, 100, 2]])
    batch = Experience(row, logprobs[None], None, None, None, None, torch.ones_like(row), torch.ones(1, 4).bool(), {})
    saver = TrajectorySaver(tmp_path, Characters())
    path, stats = saver.save_trajectories([batch], 1, compute_stats=True)
    (record,) = saved(path)
    assert record["policy_entropy"] is None and stats is not None and "trajectory/policy_entropy_mean" not in stats
    assert record["action_log_prob_std"] == pytest.approx(case["lightrft_output"], abs=1e-6)
    batch.action_entropy = torch.tensor([[1.0, 0.5, 0.25, 0.25]])
    path, stats = saver.save_trajectories([batch], 1, compute_stats=True)
    assert saved(path)[0]["policy_entropy"] == 0.5 and stats is not None
    assert stats["trajectory/policy_entropy_mean"] == 0.5


@pytest.mark.parametrize("kind", ["items", "padded items", "batch", "packed"])
def test_records(kind: str, tmp_path: Path) -> None:
    """`saver_buffer_item_record_truncated`: what upstream wrote, but whole, and each token at its own place."""
    batch = experience()
    items = split_experience_batch(batch)
    experiences: list[Any] = {
        "items": remove_padding_in_sequences(items),
        "padded items": items,
        "batch": [batch],
        "packed": [batch.pack()],
    }[kind]
    saver = TrajectorySaver(str(tmp_path), Characters(), mark_high_entropy_tokens=True)
    path, stats = saver.save_trajectories(experiences, 4, compute_stats=True)
    upstream = RECORD["lightrft_output"]
    assert os.path.basename(path or "") == upstream["file"] and saver.error_count == 0
    records = saved(path)
    one_each = "items" in kind
    padded = kind in ("padded items", "batch")
    for i, (record, reference) in enumerate(zip(records, upstream["records"], strict=True)):
        keys = [key for key in reference if key != "has_images"]
        assert [key for key in record if key in reference] == list(reference)
        assert list(record)[: len(keys)] == keys
        for key in ("global_step", "pure_generated_text", "repeat_score", "has_images"):
            assert record[key] == reference[key], key
        assert record["text"] == reference["full_sequence"]
        around = (["<pad>", ""], ["", "<pad>" * 4])[i] if padded else ["", ""]  # the row as it was given
        assert record["full_sequence"] == around[0] + record["text"] + around[1]
        for key in ("reflection_pattern_score", "reflection_pattern_details"):
            assert record[key] == reference[key], key
        place = record["experience_index"], record["sample_in_exp"]
        assert place == ((i, 0) if one_each else (0, i))
        # The response as sampled, and its end token counted; upstream's were one token early.
        assert record["generated_text"] == reference["pure_generated_text"]
        length = record["response_token_count"]
        assert length == reference["response_token_count"] + 1 == [7, 3][i]
        for key in ("advantages", "return", "action_log_probs", "mask", "action_entropy"):
            assert len(record[key]) == length
        assert record["action_log_probs"][0] == pytest.approx(reference["action_log_probs"])
        assert record["advantages"] == pytest.approx([reference["advantages"]] * length)
        assert record["info"]["reward_metrics"]["format_reward"] == [1.0, 0.0][i]
        assert {**record["info"], "reward_metrics": 0} == {**reference["info"], "reward_metrics": 0}
        # The highest entropy is the last token's, the end token's: it is not in the pure list.
        marked = [j for j, token in enumerate(record["generated_tokens"]) if token["high_entropy"]]
        assert marked == [length - 1]
        score = record["generated_tokens"][-1]["entropy_score"]
        assert score == pytest.approx(reference["generated_tokens"][-1]["entropy_score"])
        for name in ("generated", "pure_generated"):
            assert "".join(token["text"] for token in record[f"{name}_tokens"]) == record[f"{name}_text"]
        assert len(record["pure_generated_tokens"]) == length - 1
    better = RECORD["better"]
    assert records[0]["advantages"] == pytest.approx(better["advantages"])
    assert records[0]["return"] == pytest.approx(better["return"])
    assert (records[0]["label"], records[0]["reference"]) == (better["label"], better["reference"])
    assert stats == {
        **upstream["stats"],
        "trajectory/policy_entropy_mean": pytest.approx((0.3 + 0.8) / 2),
        "trajectory/response_token_count_mean": 5.0,
    }


def test_images(tmp_path: Path) -> None:
    case = CASES["saver_images"]
    image = Image.new("RGB", (1024, 600), "red")
    batch = experience(raw_images=[[image, None, Image.new("RGBA", (10, 10), "blue")], None])
    path, _ = TrajectorySaver(tmp_path, Characters(), max_image_size=512).save_trajectories([batch], 13)
    expected = case["lightrft_output"]
    for record, reference in zip(saved(path), expected["records"], strict=True):
        assert {key: record[key] for key in reference} == reference
        assert "image_paths" in record or not record["has_images"]
    assert sorted(os.listdir(tmp_path / "images")) == expected["files"]
    with Image.open(tmp_path / "images" / expected["files"][0]) as written:
        assert list(written.size) == expected["saved_size"]
    assert image.size == (1024, 600)


def test_only_images_of_what_is_kept(tmp_path: Path) -> None:
    case = CASES["saver_orphan_images"]
    pictures = [[Image.new("RGB", (8, 8), color)] for color in ("red", "blue")]
    saver = TrajectorySaver(tmp_path, Characters())
    path, _ = saver.save_trajectories([experience(raw_images=pictures)], 16, num_samples=case["inputs"]["num_samples"])
    assert len(saved(path)) == case["better"]["n_records"]
    assert os.listdir(tmp_path / "images") == case["better"]["files"]
