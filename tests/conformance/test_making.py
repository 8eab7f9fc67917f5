"""LightRFT's cases for making experience, by its names: reproduced, or, where they were judged wrong, done right."""

from __future__ import annotations

import base64
import copy
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from rollbook import EID
from rollbook.compat.lightrft.maker import Experience, MakerConfig, NaiveExperienceMaker, Samples
from rollbook.compat.lightrft.models import Actor
from rollbook.compat.lightrft.samples import make_prompts, make_samples
from rollbook.rewards import RewardInput, as_reward, think_boxed_format
from rollbook.rollout import Prompt, ScriptedEngine, TransformersEngine
from tests import tiny
from tests.conformance.algorithms import decoded
from tests.rewards.server import serve

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "making_lightrft.json").read_text())["cases"]
}


def maker(**args: Any) -> NaiveExperienceMaker:
    """A maker as LightRFT's users make one, of which only arithmetic is asked."""
    strategy = SimpleNamespace(args=SimpleNamespace(**args))
    return NaiveExperienceMaker(None, None, None, None, None, 64, None, strategy=strategy)


def experiences(rewards: list[list[float]], slots: int = 2) -> list[Experience]:
    """Batches as upstream's harness has them: rewards, no ids."""
    batches = []
    for part in rewards:
        ones = torch.ones(len(part), slots)
        info = {"reward": torch.tensor(part), "response_length": ones.sum(1), "total_length": ones.sum(1)}
        batches.append(Experience(ones.long(), ones, None, None, None, None, ones.long(), ones.bool(), info))
    return batches


# --- process_sequences -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("procseq_")])
def test_sequences_are_read_and_never_rewritten(case: str) -> None:
    inputs = CASES[case]["inputs"]
    before = torch.tensor(inputs["sequences"])
    actor = Actor(tiny.llama())
    sequences, attention, actions = actor.process_sequences(
        before.clone(), inputs["input_len"], inputs["eos_token_id"], inputs["pad_token_id"]
    )
    assert torch.equal(sequences, before)
    expected = decoded(CASES[case]["lightrft_output"])
    better = CASES[case].get("better", {})
    if CASES[case]["kind"] == "conform":
        assert torch.equal(attention, expected["attention_mask"]) and torch.equal(actions, expected["action_mask"])
    elif "action_mask" in better:
        assert actions.tolist() == better["action_mask"]
    else:  # an end in the middle of a response: what follows was sampled too
        assert actions.tolist() == [[True] * actions.shape[1]]
    assert attention.dtype == torch.int64 and actions.dtype == torch.bool


# --- rewards and advantages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("naive_process_")])
def test_processing(case: str) -> None:
    rewards = CASES["naive_process_rloo"]["inputs"]["reward per micro-batch"]
    inputs = CASES[case]["inputs"]
    processor = maker(advantage_estimator=inputs["advantage_estimator"], n_samples_per_prompt=4)
    batches = experiences(rewards)
    same, shaped = processor.process_experiences(batches)
    expected = CASES[case]["lightrft_output"] if CASES[case]["kind"] == "conform" else CASES[case]["better"]
    assert [batch is other for batch, other in zip(same, batches, strict=True)] == [True] * len(batches)
    for part, other in zip(shaped, expected, strict=True):
        assert part.tolist() == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("case", ["gae_g1.0_l1.0", "gae_g1.0_l0.95"])
def test_gae(case: str) -> None:
    inputs = decoded(CASES[case]["inputs"])
    expected = decoded(CASES[case]["lightrft_output"])
    estimated = maker().get_advantages_and_returns(
        inputs["values"], inputs["rewards"], inputs["action_mask"], inputs["gamma"], inputs["lambd"]
    )
    for column, name in zip(estimated, ("advantages", "returns"), strict=True):
        torch.testing.assert_close(column, expected[name], rtol=1e-5, atol=1e-6)


def test_gae_of_lists_is_lists() -> None:
    case = CASES["gae_packed_lists"]
    inputs = case["inputs"]
    rows = {name: [torch.tensor(row) for row in inputs[name]] for name in ("values", "rewards")}
    estimated = maker().get_advantages_and_returns(
        rows["values"], rows["rewards"], None, inputs["gamma"], inputs["lambd"]
    )
    for column, expected in zip(estimated, decoded(case["lightrft_output"]), strict=True):
        assert type(column) is list
        for row, other in zip(column, expected, strict=True):
            torch.testing.assert_close(row, other, rtol=1e-5, atol=1e-6)


def test_gae_skips_what_a_tool_wrote() -> None:
    case = CASES["gae_interior_mask_wrong_bootstrap"]
    inputs = case["inputs"]
    values, rewards, mask = (torch.tensor(inputs[name]) for name in ("values", "rewards", "action_mask"))
    advantages, _ = maker().get_advantages_and_returns(values, rewards, mask.bool(), inputs["gamma"], inputs["lambd"])
    assert advantages[0].tolist() == pytest.approx(case["better"], abs=1e-6)


@pytest.mark.parametrize("case", ["cumret_g1.0", "cumret_g0.5"])
def test_cumulative_returns(case: str) -> None:
    inputs = decoded(CASES[case]["inputs"])
    returns = maker().get_cumulative_returns(inputs["rewards"], inputs["action_mask"], inputs["gamma"])
    torch.testing.assert_close(returns, decoded(CASES[case]["lightrft_output"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [name for name in CASES if "zero_variance" in name or name.endswith("n1_nan")])
def test_groups_without_a_difference_say_nothing(case: str) -> None:
    rewards = CASES[case]["inputs"]["rewards"]
    estimator = "rloo" if "rloo" in case else "group_norm"
    processor = maker(advantage_estimator=estimator, n_samples_per_prompt=CASES[case]["inputs"]["n_samples_per_prompt"])
    _, shaped = processor.process_experiences(experiences([list(row) for row in rewards]))
    assert all(score == 0 for part in shaped for score in part.tolist())


def test_batches_of_any_size_get_their_own() -> None:
    case = CASES["chunk_misalignment"]
    sizes, n = case["inputs"]["micro-batch sizes"], case["inputs"]["n_samples_per_prompt"]
    flat = [float(i) for i in range(sum(sizes))]
    rewards = [flat[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    _, shaped = maker(advantage_estimator="rloo", n_samples_per_prompt=n).process_experiences(experiences(rewards))
    assert [len(part) for part in shaped] == case["better"]


def test_an_overlong_response_is_fined_and_its_reward_kept() -> None:
    case = CASES["overlong_penalty"]
    inputs = case["inputs"]
    processor = maker(
        advantage_estimator="reinforce",
        overlong_buffer=True,
        overlong_buffer_len=inputs["overlong_buffer_len"],
        overlong_buffer_penalty_factor=inputs["penalty_factor"],
    )
    (batch,) = experiences([[inputs["reward"]] * 3])
    batch.info["response_length"] = torch.tensor([float(length) for length in inputs["lengths"]])
    (batch,), (shaped,) = processor.process_experiences([batch], max_new_tokens=inputs["max_new_tokens"])
    assert shaped.tolist() == pytest.approx(case["lightrft_output"]["shaped"][0])
    assert batch.info["reward"].tolist() == decoded(case["lightrft_output"]["info_reward"]).tolist()


def test_equal_rewards_stay_finite_in_the_running_norm() -> None:
    rewards = CASES["running_norm_constant_reward_explodes"]["inputs"]["rewards"]
    processor = maker(advantage_estimator="reinforce", reward_running_norm=True)
    _, (normalized,) = processor.process_experiences(experiences([rewards]))
    assert normalized.tolist() == rewards


# --- samples -----------------------------------------------------------------------------------------------------


def test_each_sample_has_its_prompts_label_and_reference() -> None:
    case = CASES["text_only_prompts_refs_misaligned"]
    inputs = case["inputs"]
    config = MakerConfig.from_args(
        {name: inputs[name] for name in ("n_samples_per_prompt", "micro_rollout_batch_size")}
    )
    engine = ScriptedEngine(["x"], tokenizer=tiny.bytes_())
    experience_maker = NaiveExperienceMaker(
        None, None, None, None, tiny.bytes_(), 16, None, config=config, engine=engine
    )
    samples = experience_maker.generate_samples(
        inputs["prompts"], all_labels=inputs["labels"], all_references=inputs["references"]
    )
    shown = [{name: getattr(part, name) for name in ("prompts", "labels", "references")} for part in samples]
    assert shown == case["better"]


def test_packed_samples() -> None:
    case = CASES["packed_samples_format"]
    engine = ScriptedEngine(case["inputs"]["outputs"])
    samples = make_samples(engine.generate(case["inputs"]["prompts tokens"]), packed=True)
    for name, expected in decoded(case["lightrft_output"]).items():
        value = getattr(samples, name)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(value, expected) and value.dtype == expected.dtype
        else:
            assert value == expected
    for counts in (samples.num_actions, copy.deepcopy(samples).packed_seq_lens, samples.to_device("cpu").num_actions):
        assert counts.dtype == torch.int64 and counts.shape == (2,)
        assert counts != [2] and torch.equal(counts == torch.tensor([0, 1]), torch.tensor([False, False]))


def test_packed_experience_is_the_padded_one() -> None:
    """`packed_make_experience_list_crashes`: per-sample experiences equal to the unpacked path."""
    by_packing = {}
    for packing in (False, True):
        engine = ScriptedEngine({"a": [[20, 2], [21, 21, 2]], "b": [[22, 2], [23, 2]]})
        experience_maker = NaiveExperienceMaker(
            None,
            None,
            None,
            None,
            tiny.bytes_(),
            16,
            None,
            reward_fn=lambda response_ids: float(response_ids[0] % 2),
            config=MakerConfig(n_samples_per_prompt=2, packing_samples=packing, advantage_estimator="dr_grpo", seed=1),
            engine=engine,
        )
        by_packing[packing] = experience_maker.make_experience_list(["a", "b"])
    (padded,), (packed,) = by_packing[False], by_packing[True]
    assert packed.layout == "packed" and padded.layout == "padded"
    for name in ("sequences", "advantages", "returns", "action_log_probs"):
        for row, other in zip(getattr(packed, name), getattr(padded.pack(), name), strict=True):
            assert torch.equal(row, other), name
    assert packed.info["reward"].tolist() == padded.info["reward"].tolist() == [0, 1, 0, 1]


# --- media -------------------------------------------------------------------------------------------------------


def test_images_are_counted_by_prompt() -> None:
    picture = tiny.picture()
    prompts = make_prompts(["a", "b", "c"], images=[picture, None, [picture, picture]])
    assert [len(prompt.images) for prompt in prompts] == CASES["images_num"]["lightrft_output"]


def test_each_prompt_is_sent_with_its_own_images() -> None:
    case = CASES["mixed_batch_image_dropped_at_rollout"]
    inputs = case["inputs"]
    seen: list[dict[str, Any]] = []

    def look(prompt: Prompt, run: int) -> list[int]:
        media = {"multi_modal_data": {"image": list(prompt.images)}} if prompt.images else {}
        seen.append({"prompt": prompt.text, **media})
        return [2]

    experience_maker = NaiveExperienceMaker(None, None, None, None, None, 16, None, engine=ScriptedEngine(look))
    experience_maker.generate_samples(inputs["prompts"], all_images=inputs["images"])
    assert seen == case["better"]


def test_a_surplus_placeholder_is_its_own_samples_error() -> None:
    """`image_token_fix_edits_wrong_sample`: the sample with one too many is flagged, no token is rewritten."""
    model, processor = tiny.llava()
    actor = Actor(model, processor=processor)
    image = tiny.SPECIAL.index("<image>")
    pixels = processor.image_processor(tiny.picture(), return_tensors="pt")["pixel_values"]
    prompts = [
        Prompt(token_ids=[image] * (4 + surplus) + [70], images=[{"pixel_values": pixels}], eid=EID(0, i))
        for i, surplus in enumerate((1, 0))
    ]
    wrong, right = TransformersEngine(actor).generate(prompts, max_tokens=2, seed=0)
    assert wrong.failed and "tokens: 5" in (wrong.error or "")
    assert not right.failed and list(right.prompt_ids) == [image] * 4 + [70]


# --- reward sources ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["gsm8k_format_ok", "gsm8k_format_reversed"])
def test_think_before_the_box(case: str) -> None:
    assert think_boxed_format(CASES[case]["inputs"]["sol"]) == CASES[case]["lightrft_output"]


def test_a_prompt_earns_no_format_reward() -> None:
    case = CASES["gsm8k_format_prompt_leaks"]
    prompt, response = case["inputs"]["sol"].split("banana")[0], "banana"
    scores = as_reward(think_boxed_format)([RewardInput(prompt=prompt, response=response)])
    assert scores.rewards == [case["better"]]


def test_a_remote_model_gets_every_image_and_label() -> None:
    case = CASES["remote_rm_second_image_corrupt"]
    inputs = [
        RewardInput(
            prompt="p",
            response="r",
            reference="ref",
            label=case["inputs"]["labels"][0],
            images=[tiny.picture(size=4), tiny.picture(size=8)],
        )
    ]
    with serve(lambda body: {"rewards": [1] * len(body["queries"])}) as server:
        scores = as_reward(server.url)(inputs)
    body = server.requests[0]
    assert sorted(body) == case["better"]["payload_keys"]
    sizes = [list(Image.open(io.BytesIO(base64.b64decode(encoded))).size) for encoded in body["images"][0]]
    assert sizes == case["better"]["decoded_sizes"]
    assert scores.rewards == [1.0] and scores.to_tensors()[0].dtype == torch.float32


# --- the penalty and the forced gamma, through a whole rollout ---------------------------------------------------


def test_the_kl_penalty_lies_on_every_token() -> None:
    case = CASES["reward_with_kl_penalty"]
    inputs = decoded(case["inputs"])
    mask = inputs["action_mask"].bool()
    rows, slots = mask.shape

    def policy(sequences: Any, num_actions: int, attention_mask: Any, **_: Any) -> torch.Tensor:
        return inputs["kl"]  # against a reference of 0, k1 is this

    def reference(sequences: Any, num_actions: int, attention_mask: Any, **_: Any) -> torch.Tensor:
        return torch.zeros(rows, slots)

    experience_maker = NaiveExperienceMaker(
        policy,
        None,
        lambda sequences, attention_mask: inputs["r"],
        reference,
        None,
        8,
        inputs["kl_coef"],
        config=MakerConfig(advantage_estimator="reinforce"),
    )
    attention = torch.cat([torch.ones(rows, 1), mask], dim=1).long()
    samples = Samples(
        attention, attention, mask, slots, None, mask.sum(1).float(), attention.sum(1).float(), None, None, None
    )
    batch = experience_maker.make_experience(samples)
    expected = decoded(case["lightrft_output"])
    _, scored = experience_maker.process_experiences([batch])
    from rollbook.algorithms.kl import penalize

    penalized, _ = penalize(scored[0], batch.kl, batch.action_mask, coef=inputs["kl_coef"])
    torch.testing.assert_close(penalized, expected, rtol=1e-5, atol=1e-6)


def test_reinforce_baseline_takes_gamma_1() -> None:
    case = CASES["reinforce_baseline_forces_gamma1"]
    engine = ScriptedEngine([[20, 21, 2], [20, 21, 2]])
    rewards = iter([2.0, 0.0])
    experience_maker = NaiveExperienceMaker(
        None,
        None,
        None,
        None,
        None,
        8,
        None,
        reward_fn=lambda response_ids: next(rewards),
        config=MakerConfig(advantage_estimator="reinforce_baseline", n_samples_per_prompt=2),
        engine=engine,
    )
    with pytest.warns(UserWarning, match="gamma"):
        (batch,) = experience_maker.make_experience_list([[5, 6]], gamma=case["inputs"]["gamma"])
    assert batch.advantages[:1].tolist() == decoded(case["lightrft_output"])["advantages"].tolist()


def test_every_case_of_this_area_is_here() -> None:
    source = Path(__file__).read_text()
    for name in CASES:
        covered = name in source or any(
            name.startswith(part) for part in ("procseq_", "naive_process_", "grpo_zero_variance")
        )
        assert covered or name.endswith("n1_nan"), name
