"""`to_verl` and `from_verl` against the released verl: its `DataProto`, its functions, Trinity-RFT's conversion."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import peers
from rollbook import Experience, Experiences
from rollbook.compat.lightrft.batch import ExperienceBatch, from_experiences
from rollbook.compat.lightrft.replay_buffer import make_experience_batch, split_experience_batch
from rollbook.compat.verl import experiences_from_verl, from_verl, to_verl
from tests.adapters.samples import EXPERT, LAYOUT, LAYOUTS, MORE, RESPONSE, make_batch, make_records, odd_bits
from tests.strategies import full_record

FIELD_SETS = st.sets(st.sampled_from([*RESPONSE, *MORE])).map(sorted)


@pytest.fixture(scope="module")
def verl() -> Any:
    return peers.verl()


@pytest.fixture(scope="module")
def algorithms(verl: Any) -> Any:
    return importlib.import_module("verl.trainer.ppo.core_algos")


def same_samples(a: ExperienceBatch, b: ExperienceBatch) -> bool:
    """Whether two batches hold the same samples, however they are padded."""
    return split_experience_batch(a, unpad=True) == split_experience_batch(b, unpad=True)


def plain(tensor: torch.Tensor) -> tuple[str, list[Any]]:
    return str(tensor.dtype).removeprefix("torch."), tensor.tolist()


# --- what is in it ------------------------------------------------------------------------------------------------


def test_two_records_as_the_contract_has_them(verl: Any) -> None:
    rows = [
        Experience(
            eid={"batch": 0, "task": 0, "suffix": "a"},
            tokens=[11, 12, 13],
            prompt_length=1,
            logprobs=[-0.5, -0.25],
            reward=1.0,
            info={"model_version": 3},
        ),
        Experience(
            eid={"batch": 0, "task": 0, "run": 1, "suffix": "b"},
            tokens=[21, 22, 23, 24, 25],
            prompt_length=2,
            logprobs=[-0.125, -0.75, -1.0],
            action_mask=[1, 0, 1],
            reward=-1.0,
            info={"model_version": 4},
        ),
    ]
    data = to_verl(rows, pad_token_id=0, mask_dtype=torch.bool)
    assert isinstance(data, verl.DataProto)
    assert {key: plain(value) for key, value in data.batch.items()} == {
        "position_ids": ("int64", [[0, 0, 1, 2, 2], [0, 1, 2, 3, 4]]),
        "input_ids": ("int64", [[0, 11, 12, 13, 0], [21, 22, 23, 24, 25]]),
        "prompts": ("int64", [[0, 11], [21, 22]]),
        "responses": ("int64", [[12, 13, 0], [23, 24, 25]]),
        "attention_mask": ("int64", [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        "response_mask": ("bool", [[True, True, False], [True, False, True]]),
        "token_level_scores": ("float32", [[0.0, 1.0, 0.0], [0.0, 0.0, -1.0]]),
        "rollout_log_probs": ("float32", [[-0.5, -0.25, 0.0], [-0.125, -0.75, -1.0]]),
    }
    rows_of = {key: list(values) for key, values in data.non_tensor_batch.items()}
    assert rows_of["uid"] == ["0/0", "0/0"] and rows_of["unique_ids"] == ["0/0/0/0/a", "0/0/1/0/b"]
    assert rows_of["model_versions"] == [3, 4] and data.meta_info == {}
    assert to_verl(rows, pad_token_id=0).batch["response_mask"].dtype == torch.int64


def test_a_pair_is_two_rows_of_one_group(verl: Any) -> None:
    pair = Experience(eid={"batch": 1, "task": 2}, tokens=[1, 2], chosen=[3, 4], rejected=[5])
    data = to_verl([pair], pad_token_id=0)
    assert data.batch["input_ids"].tolist() == [[1, 2, 3, 4], [1, 2, 5, 0]]
    assert data.batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 2]]
    assert data.batch["response_mask"].tolist() == [[1, 1], [1, 0]]
    assert data.non_tensor_batch["uid"].tolist() == ["1/2", "1/2"]
    assert [row.parent for row in experiences_from_verl(data)] == [pair.eid.uid] * 2


def test_the_reward_is_on_the_last_action(verl: Any) -> None:
    """Trinity puts it on the last token, where verl's recursions do not see it (its case is marked as a quirk)."""
    row = Experience(tokens=[1, 2, 3, 4], action_mask=[1, 1, 0], reward=5.0, logprobs=[0.0] * 3)
    assert to_verl([row], pad_token_id=0).batch["token_level_scores"].tolist() == [[0.0, 5.0, 0.0]]
    idle = row.replace(action_mask=[0, 0, 0])
    with pytest.warns(UserWarning, match="1 rows have no action"):
        assert to_verl([idle], pad_token_id=0).batch["token_level_scores"].tolist() == [[0.0] * 3]


def test_scores_by_token_win_over_the_reward(verl: Any) -> None:
    records = make_records(0, names=("token_level_reward",))
    data = to_verl(records, pad_token_id=0)
    for row, scores in zip(records, data.batch["token_level_scores"], strict=True):
        assert scores[: len(row.token_level_reward)].tolist() == row.token_level_reward.tolist()
    assert experiences_from_verl(data) == records


def test_custom_fields_are_one_number_for_each_row(verl: Any) -> None:
    records = make_records(1, custom_fields=[EXPERT])
    data = to_verl(records, pad_token_id=0)
    expected = [row.info["model_version"] for row in records]
    assert plain(data.batch["expert_version"]) == ("int32", expected)
    assert experiences_from_verl(data) == records
    assert from_verl(data) == from_experiences(records, layout=LAYOUT)
    data.batch["expert_version"] += 1
    assert from_verl(data).info["expert_version"].tolist() == [version + 1 for version in expected]
    with pytest.raises(ValueError, match=r"record 1 .*: custom_fields: got none"):
        to_verl([records[0], records[1].replace(custom_fields=[])], pad_token_id=0)


def test_widths_can_be_fixed(verl: Any) -> None:
    records = make_records(2, names=("logprobs", "advantages"))
    data = to_verl(records, pad_token_id=9, max_prompt_length=7, max_response_length=11)
    assert data.batch["prompts"].shape == (5, 7) and data.batch["advantages"].shape == (5, 11)
    attended = data.batch["attention_mask"] != 0
    assert bool((data.batch["input_ids"][~attended] == 9).all())
    assert attended.sum(1).tolist() == [len(row.tokens) for row in records]
    assert experiences_from_verl(data) == records
    with pytest.raises(
        ValueError, match=r"max_prompt_length: got 1, expected at least \d, the length in row \d \(b%2F1/"
    ):
        to_verl(records, pad_token_id=0, max_prompt_length=1)


def trinity_conversion() -> Any:
    """The released `to_data_proto`, from its file: the package around it imports a whole trainer."""
    experience = peers.trinity()
    path = Path(sys.modules["trinity"].__file__ or "").parent / "trainer" / "verl" / "utils.py"
    spec = importlib.util.spec_from_file_location("trinity_trainer_verl_utils", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return experience, module.to_data_proto


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**16), st.sets(st.sampled_from(["advantages", "returns", "teacher_logprobs"])).map(sorted))
def test_as_trinity_makes_it(seed: int, names: list[str]) -> None:
    peers.verl()
    experience, convert = trinity_conversion()
    records = make_records(seed, names=("logprobs", *names), custom_fields=[EXPERT])
    fields = ("tokens", "prompt_length", "reward", "info", "action_mask", "logprobs", "custom_fields", *names)
    trinity_records = [experience.Experience(**{name: getattr(row, name) for name in fields}) for row in records]
    for row, other in zip(records, trinity_records, strict=True):
        other.eid = experience.EID(batch=row.eid.batch, task=row.eid.task, run=row.eid.run, suffix=row.eid.suffix)
    expected = convert(trinity_records, 3, None, logging.getLogger())
    converted = to_verl(records, pad_token_id=3, mask_dtype=torch.bool)
    assert set(converted.batch.keys()) == set(expected.batch.keys())
    for key, value in expected.batch.items():
        assert plain(converted.batch[key]) == plain(value), key
    # Trinity does not escape the slash in a batch's name.
    assert [uid.replace("%2F", "/") for uid in converted.non_tensor_batch["uid"]] == expected.non_tensor_batch[
        "uid"
    ].tolist()
    assert converted.non_tensor_batch["model_versions"].tolist() == expected.meta_info["model_versions"].tolist()


# --- there and back -----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**16), FIELD_SETS, st.booleans())
def test_records_come_back(seed: int, names: list[str], media: bool) -> None:
    peers.verl()
    records = make_records(seed, names=names, media=media)
    data = to_verl(records, pad_token_id=7)
    assert experiences_from_verl(data) == records
    assert from_verl(data, pad_token_id=7) == from_experiences(records, pad_token_id=7, layout=LAYOUT)


@pytest.mark.parametrize("kind", ["single_turn", "multi_turn"])
def test_records_with_every_field_come_back(verl: Any, kind: str) -> None:
    records = Experiences([full_record(kind, seed) for seed in range(3)])
    assert experiences_from_verl(to_verl(records, pad_token_id=0)) == records


def test_types_nans_and_truncated_prompts_come_back(verl: Any) -> None:
    rows = [
        Experience(
            tokens=torch.arange(4, dtype=torch.int16), logprobs=odd_bits(torch.bfloat16, 3, 1), reward=float("nan")
        ),
        Experience(tokens=torch.arange(9), prompt_length=2, logprobs=odd_bits(torch.float32, 7, 2), reward=1.0),
        Experience(
            tokens=list(range(6)), prompt_length=6, logprobs=[0.0], reward=0.0, truncate_status="prompt_truncated"
        ),
        Experience(tokens=[1, 2, 3], logprobs=[0.5, 1.5], reward=2.0, policy_versions=4, multi_modal_inputs={}),
    ]
    records = Experiences([row.replace(policy_versions=1) if row.policy_versions is None else row for row in rows])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the truncated one has no action
        data = to_verl(records, pad_token_id=0)
    assert experiences_from_verl(data) == records


@pytest.mark.parametrize("media", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_come_back(verl: Any, layout: str, media: bool) -> None:
    batch = make_batch(3, layout, media)
    data = to_verl(batch, pad_token_id=0, max_response_length=9)
    for column, key in (
        ("action_log_probs", "old_log_probs"),
        ("base_action_log_probs", "ref_log_prob"),
        ("values", "values"),
        ("action_entropy", "entropys"),
        ("kl", "kl"),
    ):
        first = batch.pack().__getattribute__(column)[0]
        assert data.batch[key][0, : len(first)].tolist() == first.tolist()
    assert data.batch["rollout_log_probs"].tolist() != data.batch["old_log_probs"].tolist()
    assert same_samples(from_verl(data), batch)
    assert from_verl(data, layout=layout) == batch


def test_a_batch_without_ids_masks_or_info_comes_back(verl: Any) -> None:
    batch = ExperienceBatch(torch.tensor([[5, 6, 7], [1, 2, 3]]), torch.tensor([[-1.0], [-2.0]]), *[None] * 7)
    data = to_verl(batch, pad_token_id=0)
    assert set(data.non_tensor_batch) == {"rollbook"}
    assert data.batch["response_mask"].tolist() == [[1], [1]]
    assert same_samples(from_verl(data), batch)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**16), st.permutations(range(6)))
def test_verls_operations_keep_rows_whole(seed: int, order: list[int]) -> None:
    proto = peers.verl().DataProto
    records = make_records(seed, count=6, names=("logprobs", "advantages"), media=True)
    data = to_verl(records, pad_token_id=0)
    parts = data.chunk(3)
    assert [experiences_from_verl(part) for part in parts] == [records[i : i + 2] for i in (0, 2, 4)]
    joined = proto.concat(parts[::-1])
    assert experiences_from_verl(joined) == Experiences.concat([records[4:], records[2:4], records[:2]])
    assert experiences_from_verl(data.select_idxs(order)) == records[order]
    assert experiences_from_verl(data[1:5:2]) == records[1:5:2]
    twice = data.repeat(2, interleave=True)
    assert experiences_from_verl(twice) == records[np.repeat(np.arange(6), 2)]
    copy = pickle.loads(pickle.dumps(data))
    assert experiences_from_verl(copy) == records
    # union compares what both have, our column and its tensors too.
    scores = to_verl(records, pad_token_id=0).select(
        batch_keys=["advantages"], non_tensor_batch_keys=["rollbook", "uid", "unique_ids"]
    )
    less = copy.select(batch_keys=[key for key in data.batch.keys() if key != "advantages"])  # noqa: SIM118
    assert experiences_from_verl(less.union(scores)) == records
    data.reorder(torch.tensor(order))
    assert experiences_from_verl(data) == records[order]


def test_what_verl_adds_comes_back(verl: Any, algorithms: Any) -> None:
    records = make_records(5, count=8)
    data = to_verl(records, pad_token_id=0)
    mask = data.batch["response_mask"]
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    advantages, returns = algorithms.compute_grpo_outcome_advantage(
        token_level_rewards=data.batch["token_level_rewards"],
        response_mask=mask,
        index=data.non_tensor_batch["uid"],
    )
    for group in records.group_by("task").values():
        rewards = torch.tensor([row.reward for row in group])
        for row in group:
            i = [eid.uid for eid in records.eids()].index(row.eid.uid)
            expected = (row.reward - rewards.mean()) / (rewards.std() + 1e-6) if len(group) > 1 else row.reward
            assert advantages[i][mask[i] != 0].tolist() == pytest.approx(
                [float(expected)] * int(mask[i].sum()), rel=1e-4
            )
    data.batch["advantages"], data.batch["returns"] = advantages, returns
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"] + 1
    data.batch["values"] = torch.zeros_like(advantages)
    back = experiences_from_verl(data)
    for i, (row, old) in enumerate(zip(back, records, strict=True)):
        width = len(old.logprobs)
        assert row.logprobs.tolist() == old.logprobs.tolist() and row.reward == old.reward
        assert row.old_logprobs.tolist() == (old.logprobs + 1).tolist()
        assert row.advantages.tolist() == advantages[i, :width].tolist()
        assert row.values.tolist() == [0.0] * width
        assert row.replace(info=old.info, old_logprobs=None, advantages=None, returns=None, values=None) == old
    batch = from_verl(data)
    assert (
        batch.action_log_probs.tolist() == data.batch["old_log_probs"].masked_fill(~_action_tokens(batch), 0).tolist()
    )
    assert batch.extras["logprobs"].tolist() == data.batch["rollout_log_probs"].tolist()
    data.batch["token_level_scores"] = data.batch["token_level_scores"] * 2
    assert float(experiences_from_verl(data)[0].token_level_reward.sum()) == pytest.approx(2 * records[0].reward)


def _action_tokens(batch: ExperienceBatch) -> torch.Tensor:
    return batch.attention_mask[:, -batch.action_mask.shape[1] :] != 0


def test_verls_gae_takes_the_mask(verl: Any, algorithms: Any) -> None:
    batch = make_batch(6)
    data = to_verl(batch, pad_token_id=0)
    _, returns = algorithms.compute_gae_advantage_return(
        token_level_rewards=data.batch["token_level_scores"],
        values=data.batch["values"],
        response_mask=data.batch["response_mask"],
        gamma=torch.tensor(1.0),
        lam=torch.tensor(1.0),
    )
    acts = data.batch["response_mask"] != 0
    first = torch.arange(len(batch)), acts.int().argmax(1)
    # With gamma and lambda 1 the return of the first action is the reward, wherever tool tokens stand.
    assert returns[first].tolist() == pytest.approx(batch.info["reward"].tolist(), abs=1e-5)


def test_verls_unpadding_takes_it(verl: Any) -> None:
    unpad = importlib.import_module("verl.workers.utils.padding").left_right_2_no_padding
    records = make_records(7)
    data = unpad(to_verl(records, pad_token_id=0).to_tensordict())
    assert [row.tolist() for row in data["input_ids"].unbind()] == [row.tokens.tolist() for row in records]
    assert [row.tolist() for row in data["position_ids"].unbind()] == [list(range(len(row.tokens))) for row in records]
    del data["loss_mask"]  # which verl adds, and a record would keep
    assert experiences_from_verl(data) == records


def test_a_tensordict_alone(verl: Any) -> None:
    records = make_records(8, names=RESPONSE, media=True)
    data = to_verl(records, pad_token_id=0, tensordict_only=True)
    assert type(data).__name__ == "TensorDict" and data.batch_size == (5,)
    assert experiences_from_verl(data) == records
    assert experiences_from_verl(torch.cat([data[3:], data[:3]])) == records[[3, 4, 0, 1, 2]]
    assert experiences_from_verl(verl.DataProto.from_tensordict(data)) == records
    assert experiences_from_verl(to_verl(records, pad_token_id=0).to_tensordict()) == records


# --- verl's own ---------------------------------------------------------------------------------------------------


def test_a_rollout_that_verl_made(verl: Any) -> None:
    """Wide padding, verl's own keys, no ids of ours: nothing of it is lost, and it can go back."""
    data = verl.DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0, 0, 1, 2], [0, 3, 4, 5]]),
            "responses": torch.tensor([[6, 7, 8, 0, 0], [9, 0, 0, 0, 0]]),
            "input_ids": torch.tensor([[0, 0, 1, 2, 6, 7, 8, 0, 0], [0, 3, 4, 5, 9, 0, 0, 0, 0]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0, 0]]),
            "position_ids": torch.tensor([[0, 0, 0, 1, 2, 3, 4, 4, 4], [0, 0, 1, 2, 3, 3, 3, 3, 3]]),
            "response_mask": torch.tensor([[1, 0, 1, 0, 0], [1, 0, 0, 0, 0]]),
            "rollout_log_probs": torch.tensor([[-1.0, -2.0, -3.0, 0.0, 0.0], [-4.0, 0.0, 0.0, 0.0, 0.0]]),
            "token_level_scores": torch.tensor([[0.0, 0.25, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]]),
            "reward_baselines": torch.tensor([0.5, 0.25]),
            "turns": torch.tensor([[1], [2]], dtype=torch.int16),
            "teacher_ids": torch.arange(36).reshape(2, 9, 2),
        },
        non_tensors={"uid": ["q", "q"], "data_source": ["a", "b"], "extra_info": [{"n": 1}, {"n": 2}]},
        meta_info={"temperature": 1.0},
    )
    batch = from_verl(data, layout="packed")
    assert [row.tolist() for row in batch.sequences] == [[1, 2, 6, 7, 8], [3, 4, 5, 9]]
    assert [eid.rid for eid in batch.ids] == ["/q/0", "/q/1"]
    assert [row.tolist() for row in batch.action_log_probs] == [[-1.0, -2.0, -3.0], [-4.0]]
    assert batch.info["reward"].tolist() == [0.75, 1.0]
    records = experiences_from_verl(data)
    assert [row.experience_type for row in records] == ["multi_turn", "single_turn"]
    assert records[0].logprobs.tolist() == [-1.0, -2.0, -3.0] and records[0].old_logprobs is None

    again = to_verl(batch, pad_token_id=0, max_prompt_length=4, max_response_length=5)
    attended = data.batch["attention_mask"] != 0
    for key, value in data.batch.items():
        column = again.batch["old_log_probs" if key == "rollout_log_probs" else key]
        if key == "teacher_ids":
            value = value.masked_fill(~attended[..., None], 0)  # what stood on padding is not kept
        assert plain(column) == plain(value), key
    assert again.non_tensor_batch["data_source"].tolist() == ["a", "b"]
    assert again.non_tensor_batch["extra_info"].tolist() == [{"n": 1}, {"n": 2}]
    assert again.non_tensor_batch["uid"].tolist() == ["/q", "/q"]
    assert same_samples(from_verl(again), batch)


# --- media --------------------------------------------------------------------------------------------------------


def test_media_are_dicts_by_row(verl: Any) -> None:
    extract = importlib.import_module("verl.utils.model").extract_multi_modal_inputs
    records = make_records(9, count=6, media=True)
    data = to_verl(records, pad_token_id=0)
    rows = data.non_tensor_batch["multi_modal_inputs"]
    assert [sorted(row) for row in rows[:2]] == [[], ["image_grid_thw", "images_seqlens", "pixel_values"]]
    inputs = extract(list(rows))
    present = [row.multi_modal_inputs for row in records if row.multi_modal_inputs]
    assert inputs["pixel_values"].tolist() == torch.cat([media["pixel_values"] for media in present]).tolist()
    assert inputs["images_seqlens"].sum().item() == len(inputs["pixel_values"])
    assert same_samples(from_verl(data), from_experiences(records))


def tiny_vision_config() -> Any:
    return transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
        },
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16},
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=59,
        vision_end_token_id=58,
    )


def test_positions_of_a_vision_model(verl: Any) -> None:
    model = transformers.Qwen2_5_VLModel(tiny_vision_config())
    grid = torch.tensor([[1, 4, 4]])
    tokens = [1, 59, 60, 60, 60, 60, 58, 2, 3, 4]
    kinds = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]])
    media = {"pixel_values": torch.zeros(16, 4), "image_grid_thw": grid, "mm_token_type_ids": kinds}
    rows = [
        Experience(tokens=tokens, prompt_length=8, multi_modal_inputs=media),
        Experience(tokens=[5, 6, 7, 8], prompt_length=1),
    ]
    for _ in range(2):  # a second conversion is the same: nothing is taken out of the records
        data = to_verl(rows, pad_token_id=0, get_rope_index=model.get_rope_index)
        positions = data.batch["position_ids"]
        assert positions.shape == (2, 4, 11)
        alone = torch.tensor([tokens])
        token_types = torch.zeros_like(alone)
        token_types[:, :8] = kinds
        expected, _ = model.get_rope_index(
            input_ids=alone, image_grid_thw=grid, attention_mask=torch.ones_like(alone), mm_token_type_ids=token_types
        )
        assert positions[0, 1:, :10].tolist() == expected[:, 0].tolist()
        assert positions[0, 0, :10].tolist() == list(range(10))
        assert positions[1, :, 7:].tolist() == [[0, 1, 2, 3]] * 4
        assert "mm_token_type_ids" not in data.non_tensor_batch["multi_modal_inputs"][0]
        assert experiences_from_verl(data) == Experiences(rows)
    bare = rows[0].replace(multi_modal_inputs={"image_grid_thw": grid})
    derived = to_verl([bare, rows[1]], pad_token_id=0, get_rope_index=model.get_rope_index).batch["position_ids"]
    assert torch.equal(derived, positions)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_fields_that_only_some_rows_have_are_refused(verl: Any) -> None:
    rows = make_records(10, names=("logprobs", "advantages")).rows()
    rows[2] = rows[2].replace(advantages=None)
    with pytest.raises(ValueError, match=r"advantages: got None in 1 of 5 rows, the first row 2 \(b%2F1/\d/2/0/s2\)"):
        to_verl(rows, pad_token_id=0)
    rows[2] = rows[3].replace(reward=None)
    with pytest.raises(ValueError, match=r"reward: got None in 1 of 5 rows, the first row 2"):
        to_verl(rows, pad_token_id=0)
    with pytest.raises(ValueError, match=r"action_log_probs \(or logprobs\): got None in 1 of 2 rows, the first row 1"):
        to_verl([rows[0], rows[1].replace(logprobs=None)], pad_token_id=0)


def test_what_cannot_be_said_is_refused(verl: Any) -> None:
    pair = Experience(tokens=[1, 2], chosen=[3], rejected=[4])
    with pytest.raises(ValueError, match=r"record 1 .*: got 'single_turn' among preference pairs"):
        to_verl([pair, Experience(tokens=[1, 2])], pad_token_id=0)
    weighted = Experience(tokens=[1, 2, 3], action_mask=torch.tensor([0.5, 1.0]))
    with pytest.raises(ValueError, match=r"action_mask: got 0.5, expected 0 and 1"):
        to_verl([weighted], pad_token_id=0)
    batch = make_batch(11)
    batch.extras = {"input_ids": torch.zeros_like(batch.values)}
    with pytest.raises(ValueError, match=r"extras: got 'input_ids', expected a name that verl's batch does not have"):
        to_verl(batch, pad_token_id=0)
    with pytest.raises(ValueError, match=r"experiences: got int, expected Experiences"):
        to_verl(3, pad_token_id=0)
    with pytest.raises(ValueError, match=r"data: got dict, expected a verl.DataProto or a TensorDict"):
        from_verl({"responses": torch.zeros(1, 1)})
    with pytest.raises(ValueError, match=r"data: missing 'responses' among input_ids"):
        from_verl(verl.DataProto.from_dict(tensors={"input_ids": torch.zeros(1, 1)}))
    assert isinstance(make_experience_batch(split_experience_batch(make_batch(11))), ExperienceBatch)


@pytest.mark.parametrize("package", ["verl", "tensordict"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"to_verl needs the package '{package}' \(pip install {package}\)"):
        to_verl(make_records(0), pad_token_id=0, tensordict_only=package == "tensordict")
