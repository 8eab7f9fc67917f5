"""The inherited names, through the modules that users import them from: names, order and defaults of every argument.

Arguments that Rollbook adds have a default, and come last or by keyword only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

ANY = object()
"""Default of an argument whose default differs in each call."""

_BATCH = "action_log_probs, base_action_log_probs, values, returns, advantages, attention_mask, action_mask, info"
_OPTIONAL = f"{_BATCH}, ".replace(", ", "=None, ")[:-2]
_REPLAY = [
    f"BufferItem(sequences, {_BATCH}, action_entropy=None, labels=None, references=None, kl=None, eid=None)",
    "BufferItemVL(sequences, pixel_values=None, image_grid_thws=None, pixel_values_videos=None, video_grid_thws=None, "
    f"raw_images=None, {_OPTIONAL}, action_entropy=None)",
    "BufferItem.to_device(self, device)",
    "BufferItem.pin_memory(self)",
    "is_vl_experience(experience)",
    "split_experience_batch(experience)",
    "make_experience_batch(items, packing_samples=False, *, pad_token_id=0)",
    "remove_padding_in_sequences(items)",
    'zero_pad_sequences(sequences, side="left")',
    "NaiveReplayBuffer(sample_batch_size, limit=0, cpu_offload=True, packing_samples=False)",
    "NaiveReplayBuffer.append(self, experience)",
    "NaiveReplayBuffer.sample(self)",
    "NaiveReplayBuffer.collate_fn(self, batch)",
    "NaiveReplayBuffer.normalize(self, attribute, strategy=None)",
    "NaiveReplayBuffer.clear(self)",
    "NaiveReplayBuffer.__len__(self)",
    "NaiveReplayBuffer.__getitem__(self, index)",
]
SIGNATURES = {
    "experience": [
        'EID(batch="", task="", run=0, step=0, suffix=ANY)',
        "EID.parse(uid)",
        "EID.replace(self, **changes)",
        "EID.to_dict(self)",
        "CustomField(source_field, destination_field, data_type)",
        "Experience(*, eid=None, tokens, logprobs=None, reward=None, token_level_reward=None, advantages=None, "
        "returns=None, truncate_status=None, info=None, metrics=None, prompt_length=1, response_text=None, "
        "prompt_text=None, action_mask=None, messages=None, tools=None, chosen=None, rejected=None, "
        "chosen_messages=None, rejected_messages=None, multi_modal_inputs=None, teacher_logprobs=None, "
        "custom_fields=None, policy_versions=None, finish_reason=None, routed_experts=None, loss_weights=None, "
        "parent=None, group_size=None, sampling=None, old_logprobs=None)",
        "Experience.serialize(self)",
        "Experience.deserialize(data)",
        "Experience.serialize_many(experiences)",
        "Experience.deserialize_many(data)",
        "Experience.to_dict(self)",
        "split_dpo_experience_to_single_turn(experiences)",
        "gather_token_ids(experiences, max_prompt_length, max_response_length, pad_token_id)",
        "gather_action_masks(experiences, max_response_length)",
        "gather_attention_masks(experiences, max_prompt_length, max_response_length)",
        "gather_response_attrs(experiences, attr_name, max_response_length, pad_value=0)",
        "gather_multi_modal_inputs(experiences)",
        "group_by(experiences, id_type)",
        "to_hf_datasets(experiences)",
        "from_hf_datasets(dataset)",
    ],
    "replay_buffer": _REPLAY,
    "replay_buffer_utils": _REPLAY,
    "experience_maker": [
        f"Experience(sequences, {_BATCH}, kl=None, action_entropy=None, labels=None, references=None)",
        "ExperienceVL(sequences, pixel_values=None, image_grid_thws=None, raw_images=None, pixel_values_videos=None, "
        f"video_grid_thws=None, {_OPTIONAL}, kl=None, action_entropy=None, labels=None, references=None)",
        "Experience.to_device(self, device)",
        "Experience.pin_memory(self)",
        "Samples(sequences, attention_mask, action_mask, num_actions, packed_seq_lens, response_length, total_length, "
        "prompts, labels, pad_len=None, references=None)",
        "Samples.to_device(self, device)",
        "Samples.pin_memory(self)",
        "clip_filter_like_weight_func(rewards, clip_filter_like_weight_clip_eps=3.0, lamda=1.0)",
        "to(tensor, device)",
        "pin_memory(tensor)",
        "NaiveExperienceMaker(actor, critic, reward_model, initial_model, tokenizer, prompt_max_len, kl_controller, "
        "strategy=None, remote_rm_url=None, reward_fn=None, reward_fn_label_map=None, reward_recipe=None)",
        "NaiveExperienceMaker.generate_samples(self, all_prompts, **generate_kwargs)",
        "NaiveExperienceMaker.make_experience(self, samples)",
        "NaiveExperienceMaker.process_experiences(self, experiences)",
        "NaiveExperienceMaker.make_experience_list(self, all_prompts, **generate_kwargs)",
        "NaiveExperienceMaker.get_advantages_and_returns(self, values, rewards, action_mask, gamma, lambd)",
        "NaiveExperienceMaker.get_cumulative_returns(self, rewards, action_mask, gamma)",
        "NaiveExperienceMaker.tokenize_fn(self, texts, max_length, padding=True, device=None)",
    ],
    "trajectory_saver": [
        "TrajectorySaver(save_dir, tokenizer, save_images_separately=True, max_image_size=512, "
        "mark_high_entropy_tokens=False, high_entropy_token_ratio=0.2)",
        "TrajectorySaver.save_trajectories(self, experiences, step, num_samples=10, "
        'prefix="trajectories", compute_stats=False)',
        "create_trajectory_saver(args, tokenizer)",
    ],
    "wire": ["to_trxp(experiences)"],
}


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize(
    ("module", "promise"), [(module, promise) for module, promises in SIGNATURES.items() for promise in promises]
)
def test_signature(module: str, promise: str) -> None:
    alias = importlib.import_module(f"rollbook.{module}")
    name, _, arguments = promise.partition("(")
    assert name.split(".")[0] in alias.__all__
    actual = attrgetter(name)(alias)
    assert inspect.getdoc(actual) or "__" in name
    if not inspect.isclass(actual):
        assert actual.__name__ == name.split(".")[-1]
    promised = parameters(eval(f"lambda {arguments[:-1]}: None", {"ANY": ANY}))
    by_keyword = [p for p in promised if p.kind is p.KEYWORD_ONLY]
    by_place = [p for p in promised if p.kind is not p.KEYWORD_ONLY]
    own_parameters = parameters(actual)
    own_by_place = [p for p in own_parameters if p.kind is not p.KEYWORD_ONLY]
    own_by_keyword = [p for p in own_parameters if p.kind is p.KEYWORD_ONLY]
    for expected, parameter in [
        *zip(by_place, own_by_place, strict=False),
        *zip(by_keyword, own_by_keyword, strict=False),
    ]:
        assert (parameter.name, parameter.kind) == (expected.name, expected.kind)
        assert parameter.default == expected.default or (
            expected.default is ANY and parameter.default is not parameter.empty
        )
    assert len(own_by_place) >= len(by_place) and len(own_by_keyword) >= len(by_keyword)
    for added in [*own_by_place[len(by_place) :], *own_by_keyword[len(by_keyword) :]]:
        assert added.default is not added.empty
