"""The maker, over real tiny models: its numbers are those of naive loops, whatever the layout and the batch size."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import EID
from rollbook.algorithms import ESTIMATORS
from rollbook.algorithms.kl import AdaptiveKL
from rollbook.algorithms.results import Advantages
from rollbook.compat.lightrft import maker as maker_module
from rollbook.compat.lightrft.maker import Experience, MakerConfig, NaiveExperienceMaker, Samples
from rollbook.compat.lightrft.samples import RolloutBatches
from rollbook.core.metrics import Progress
from rollbook.core.rows import Rows
from rollbook.core.wire import decode, encode
from rollbook.models import Actor, Critic
from rollbook.rollout import Line, Prompt, ScriptedEngine
from rollbook.rollout.transformers import TransformersEngine
from tests import tiny
from tests.maker_records import make_records

PROMPTS = ["the quick fox", "what is two plus three", "yes"]
OPTIONS = {"max_new_tokens": 6, "temperature": 1.0}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def actor() -> Actor:
    return Actor(tiny.llama(vocab=len(tiny.bytes_())), tokenizer=tiny.bytes_())


@pytest.fixture(scope="module")
def reference() -> Actor:
    return Actor(tiny.llama(vocab=len(tiny.bytes_()), seed=5), tokenizer=tiny.bytes_(), trainable=False)


@pytest.fixture(scope="module")
def critic() -> Critic:
    return Critic(tiny.llama(vocab=len(tiny.bytes_()), seed=6), value_head="normal")


def vowels(response: str) -> float:
    """A reward that differs from sample to sample."""
    return float(sum(letter in "aeiou" for letter in response)) + 0.25 * (len(response) % 3)


def maker(actor: Any, *, critic: Any = None, reference: Any = None, kl: Any = None, **config: Any) -> Any:
    settings: dict[str, Any] = {"n_samples_per_prompt": 3, "seed": 11, "estimator_options": {}} | config
    reward = settings.pop("reward", vowels)
    return NaiveExperienceMaker(
        actor, critic, None, reference, tiny.bytes_(), 32, kl, reward_fn=reward, config=MakerConfig(**settings)
    )


def rows(batches: list[Experience], name: str) -> list[torch.Tensor]:
    """A field of every sample, without padding."""
    column = RolloutBatches(batches).rows(name)
    return [] if column is None else list(column)


def naive_log_probs(model: Any, ids: list[int], prompt: int) -> torch.Tensor:
    """One sample through the model alone, the plain way."""
    logits = model(torch.tensor([ids])).logits[0].float()
    spread = torch.log_softmax(logits, -1)
    return torch.stack([spread[t - 1, ids[t]] for t in range(prompt, len(ids))])


# --- the numbers --------------------------------------------------------------------------------------------------


def test_everything_is_what_loops_say(actor: Actor, reference: Actor) -> None:
    experience_maker = maker(actor, reference=reference, kl=0.1, kl_estimator="k3", advantage_estimator="rloo")
    (batch,) = experience_maker.make_experience_list(PROMPTS, **OPTIONS, gamma=0.9)
    assert len(batch) == 9 and batch.ids is not None
    packed = batch.pack()
    for i in range(9):
        ids, mask = packed.sequences[i].tolist(), packed.action_mask[i]
        prompt = len(ids) - len(mask)
        with torch.no_grad():
            actor_logprobs, base = (naive_log_probs(policy.model, ids, prompt) for policy in (actor, reference))
        torch.testing.assert_close(packed.action_log_probs[i], actor_logprobs, rtol=0, atol=2e-5)
        torch.testing.assert_close(packed.base_action_log_probs[i], base, rtol=0, atol=2e-5)
        off = base - actor_logprobs
        kl = off.exp() - 1 - off
        assert batch.info["kl"][i].item() == pytest.approx(kl.mean().item(), rel=1e-3, abs=1e-5)
        rewards = batch.info["reward"].tolist()
        group = rewards[i // 3 * 3 : i // 3 * 3 + 3]
        score = rewards[i] - (sum(group) - rewards[i]) / 2
        tokens = -0.1 * kl
        tokens[-1] += score
        returns = torch.zeros(len(tokens))
        after = 0.0
        for t in reversed(range(len(tokens))):
            after = returns[t] = tokens[t] + 0.9 * after
        torch.testing.assert_close(packed.returns[i], returns, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed.advantages[i], returns, rtol=1e-4, atol=1e-4)
        assert batch.info["return"][i].item() == pytest.approx(tokens.sum().item(), abs=1e-4)
    text = tiny.bytes_().decode(packed.sequences[0][-len(packed.action_mask[0]) :], skip_special_tokens=True)
    assert batch.info["reward"][0].item() == vowels(text)
    assert list(batch.info)[:4] == ["kl", "reward", "response_length", "total_length"]
    assert "num_actions" not in batch.info and batch.kl is None


def test_gae_is_what_a_loop_says(actor: Actor, critic: Critic) -> None:
    experience_maker = maker(actor, critic=critic, advantage_estimator="gae")
    (batch,) = experience_maker.make_experience_list(PROMPTS, **OPTIONS, gamma=0.95, lambd=0.9)
    packed = batch.pack()
    for i in range(len(batch)):
        values, count = packed.values[i].tolist(), len(packed.values[i])
        rewards = [0.0] * (count - 1) + [batch.info["reward"][i].item()]
        after = ahead = 0.0
        expected = [0.0] * count
        for t in reversed(range(count)):
            delta = rewards[t] + 0.95 * ahead - values[t]
            after = expected[t] = delta + 0.95 * 0.9 * after
            ahead = values[t]
        assert packed.advantages[i].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert packed.returns[i].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, values, strict=True)], rel=1e-4, abs=1e-5
        )


NEEDS_MORE = {"gigpo", "clip_v"}
"""What these ask for comes from an environment or another pass: `test_what_only_some_estimators_ask_for`."""


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("name", [name for name in ESTIMATORS.names() if name not in NEEDS_MORE])
def test_every_estimator(name: str, packing: bool, actor: Actor, reference: Actor, critic: Critic) -> None:
    experience_maker = NaiveExperienceMaker(
        actor,
        critic if "values" in ESTIMATORS[name].inputs else None,
        None,
        reference,
        tiny.bytes_(),
        32,
        0.05 if "token_rewards" in ESTIMATORS[name].inputs else None,
        reward_fn=lambda response_ids: float(response_ids[0] % 2),
        config=MakerConfig(
            advantage_estimator=name,
            n_samples_per_prompt=4,
            packing_samples=packing,
            seed=3,
            token_budget=64,
            estimator_options={"k": 2} if name == "pass_at_k" else {},
        ),
        teacher=reference if "teacher_logprobs" in ESTIMATORS[name].inputs else None,
    )
    (batch,) = experience_maker.make_experience_list(PROMPTS[:2], **OPTIONS)
    assert batch.layout == ("packed" if packing else "padded") and len(batch) == 8
    flat = torch.cat(rows([batch], "advantages"))
    assert flat.isfinite().all() and flat.abs().max() > 0
    assert torch.cat(rows([batch], "returns")).isfinite().all()
    for field in ("advantages", "returns", "action_log_probs", "base_action_log_probs"):
        value = getattr(batch, field)
        assert isinstance(value, Rows) == packing
        assert packing or value.shape == batch.action_mask.shape


def test_what_only_some_estimators_ask_for(actor: Actor) -> None:
    experience_maker = maker(actor, advantage_estimator="gigpo", n_samples_per_prompt=2)
    prompts = [Prompt(text="the fox", info={"env_state_hash": "hall", "step_reward": 1.0})]
    (batch,) = experience_maker.make_experience_list(prompts, **OPTIONS)
    assert batch.advantages.shape == batch.action_mask.shape
    with pytest.raises(ValueError, match="'step_rewards'.*info\\['step_reward'\\]"):
        experience_maker.make_experience_list(["the fox"], **OPTIONS)
    with pytest.raises(ValueError, match="gae: missing input 'values'; give the maker a critic"):
        maker(actor, advantage_estimator="gae").make_experience_list(["the fox"], **OPTIONS)
    with pytest.raises(ValueError, match="missing input 'teacher_logprobs'; give the maker a teacher"):
        maker(actor, advantage_estimator="on_policy_distillation").make_experience_list(["the fox"], **OPTIONS)


def test_remax_compares_with_the_likeliest_response(actor: Actor) -> None:
    experience_maker = maker(actor, advantage_estimator="remax", n_samples_per_prompt=2)
    (batch,) = experience_maker.make_experience_list(PROMPTS, **OPTIONS)
    greedy = TransformersEngine(actor).generate(PROMPTS, temperature=0.0, max_tokens=6)
    expected = [vowels(sample.text or "") for sample in greedy for _ in range(2)]
    assert batch.info["reward_baseline"].tolist() == expected
    scores = (batch.info["reward"] - batch.info["reward_baseline"]).tolist()
    assert [row[0].item() for row in batch.pack().advantages] == pytest.approx(scores)


# --- micro-batches, layouts, groups -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 9, 100])
def test_batch_sizes_change_nothing(size: int, actor: Actor, reference: Actor) -> None:
    options: dict[str, Any] = {"advantage_estimator": "reinforce", "advantages_norm": True, "reward_running_norm": True}
    together = maker(actor, reference=reference, kl=0.1, **options).make_experience_list(PROMPTS, **OPTIONS)
    split_maker = maker(actor, reference=reference, kl=0.1, micro_rollout_batch_size=size, **options)
    parts = split_maker.make_experience_list(PROMPTS, **OPTIONS, gamma=1.0)
    assert [len(part) for part in parts] == [min(size, 9 - at) for at in range(0, 9, size)]
    for name in ("advantages", "returns", "action_log_probs", "base_action_log_probs", "extras.logprobs"):
        for row, other in zip(rows(together, name), rows(parts, name), strict=True):
            assert torch.equal(row, other), name
    for key in ("reward", "kl", "return"):
        assert torch.equal(RolloutBatches(together).numbers(key), RolloutBatches(parts).numbers(key))


@pytest.mark.parametrize("budget", [1, 20, 50, 10_000])
def test_forward_passes_of_any_size_agree(budget: int, actor: Actor) -> None:
    batches = maker(actor, token_budget=budget).make_experience_list(PROMPTS, **OPTIONS)
    other = maker(actor).make_experience_list(PROMPTS, **OPTIONS)
    for row, expected in zip(rows(batches, "action_log_probs"), rows(other, "action_log_probs"), strict=True):
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-5)


def test_gamma_holds_for_every_batch(actor: Actor) -> None:
    experience_maker = maker(
        actor, micro_rollout_batch_size=2, advantage_estimator="reinforce", reward=lambda response: 1.0
    )
    for batch in experience_maker.make_experience_list(PROMPTS, **OPTIONS, gamma=0.5):
        for row in rows([batch], "returns"):
            assert row.tolist() == [0.5 ** (len(row) - 1 - t) for t in range(len(row))]


def test_groups_are_formed_by_id() -> None:
    scores = {"a": [3.0, 1.0], "b": [0.0, 10.0]}
    experience_maker = NaiveExperienceMaker(
        None, None, None, None, None, 8, None, config=MakerConfig(advantage_estimator="dr_grpo", n_samples_per_prompt=2)
    )
    order = [("a", 0), ("b", 1), ("a", 1), ("b", 0)]
    ones = torch.ones(2, 2)
    batches = [
        Experience(
            ones.long(),
            ones,
            *[None] * 4,
            ones.long(),
            ones.bool(),
            {"reward": torch.tensor([scores[task][run] for task, run in part])},
            ids=[EID(batch=0, task=task, run=run) for task, run in part],
        )
        for part in (order[:2], order[2:])
    ]
    _, shaped = experience_maker.process_experiences(batches)
    assert [part.tolist() for part in shaped] == [[1.0, 5.0], [-1.0, -5.0]]
    for batch in batches:
        batch.ids = None
    _, shaped = experience_maker.process_experiences(batches)  # without ids there is nothing to go by but the place
    assert [part.tolist() for part in shaped] == [[-3.5, 3.5], [0.5, -0.5]]


@settings(max_examples=40)
@given(
    value=st.floats(-100, 100, width=32),
    n=st.integers(1, 64),
    estimator=st.sampled_from(["group_norm", "rloo", "cpgd"]),
)
def test_a_constant_group_says_nothing(value: float, n: int, estimator: str) -> None:
    experience_maker = NaiveExperienceMaker(
        None,
        None,
        None,
        None,
        None,
        8,
        None,
        reward_fn=lambda response_ids: value,
        engine=ScriptedEngine([[7, 8, 2]]),
        config=MakerConfig(advantage_estimator=estimator, n_samples_per_prompt=n),
    )
    (batch,) = experience_maker.make_experience_list([[5]])
    assert batch.advantages.count_nonzero() == 0 and batch.info["reward"].tolist() == [value] * n


@settings(max_examples=60, deadline=None)
@given(
    rewards=st.lists(
        st.sampled_from([0.0, -0.0, 1.0, 0.1, -2.5, 3e38, -3e38, 1e-42, math.nan]) | st.floats(-9, 9, width=32),
        min_size=4,
        max_size=24,
    ),
    size=st.integers(1, 5),
    batches=st.integers(1, 3),
    options=st.sampled_from(
        [
            ("rloo", {}),
            ("dr_grpo", {}),
            ("reinforce_baseline", {}),
            ("grpo", {}),
            ("group_norm", {"eps": 0.0}),
            ("grpo", {"std": "population"}),
        ]
    ),
)
@pytest.mark.filterwarnings("ignore:.*every group has one sample", "ignore:.*encountered in")
def test_scores_of_blocks_are_those_of_the_general_path(
    rewards: list[float], size: int, batches: int, options: tuple[str, dict[str, Any]]
) -> None:
    rewards = rewards[: len(rewards) // size * size] or rewards[:1] * size
    ones = torch.ones(len(rewards), 1)
    cuts = [len(rewards) * i // batches for i in range(batches + 1)]
    parts = [slice(*bounds) for bounds in itertools.pairwise(cuts)]
    numbers = torch.tensor(rewards)
    experiences = [
        Experience(ones[part].long(), ones[part], *[None] * 4, None, ones[part].bool(), {"reward": numbers[part]})
        for part in parts
    ]
    name, estimator_options = options
    config = MakerConfig(n_samples_per_prompt=size, advantage_estimator=name, estimator_options=estimator_options)
    short = maker_module.score_rewards(experiences, config)
    with mock.patch.object(maker_module, "_block_scores", return_value=None):
        general = maker_module.score_rewards(experiences, config)
    assert torch.equal(short.rewards.view(torch.int32), general.rewards.view(torch.int32))
    assert repr(short.metrics) == repr(general.metrics)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:.*invalid value")
def test_padded_batches_are_those_of_the_general_path(data: st.DataObject) -> None:
    irregular = data.draw(st.sampled_from([0, 0, 0, 1]))  # rows without a prompt, actions that are not attended
    count, prompt, slots = (data.draw(st.integers(*bounds)) for bounds in ((1, 4), (1 - irregular, 3), (1, 6)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    attention = torch.zeros(count, prompt + slots, dtype=data.draw(st.sampled_from([torch.int64, torch.bool])))
    actions = torch.zeros(count, slots, dtype=torch.bool)
    for i in range(count):
        end = data.draw(st.integers(0, slots))
        attention[i, data.draw(st.integers(0, prompt - 1 + irregular)) : prompt + end] = 1
        actions[i, : end + irregular] = True
    if data.draw(st.booleans()):
        actions &= torch.rand(actions.shape, generator=generator) < 0.7  # tokens of a tool
    answers = [torch.randn(count, slots, generator=generator) for _ in range(3)]
    for number in (math.nan, math.inf):
        for answer in answers:
            answer[torch.rand(answer.shape, generator=generator) < data.draw(st.sampled_from([0, 0, 0.2]))] = number
    answers[1] = answers[1].to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    before = [answer.clone() for answer in answers]
    rewards = torch.tensor(data.draw(st.lists(st.sampled_from([0.5, math.inf]), min_size=count, max_size=count)))
    models: list[Any] = [lambda *_, answer=answer: answer for answer in answers]
    critic = data.draw(st.sampled_from([models[2], None]))
    samples = Samples(
        torch.ones(attention.shape, dtype=torch.int64), attention, actions, slots, None, None, None, None, ["x"] * count
    )

    def make(times: int) -> tuple[Experience, dict[str, float]]:
        maker = NaiveExperienceMaker(models[0], critic, lambda *_: rewards, models[1], None, 8, 0.1)
        batch = maker._experiences([samples] * times)[0][0]
        return batch, {key: value for key, value in maker._step_metrics.values().items() if key.endswith("/tokens")}

    short, tokens = make(1)
    general, general_tokens = make(2)  # several batches take the general path
    assert {key: 2 * value for key, value in tokens.items()} == general_tokens
    assert list(short.info or ()) == list(general.info or ())
    assert repr(short.info) == repr(general.info)
    for name in ("sequences", "attention_mask", "action_mask", "labels", "ids", "advantages"):
        assert repr(getattr(short, name)) == repr(getattr(general, name))
    for name in ("action_log_probs", "base_action_log_probs", "values", "kl"):
        short_column, general_column = getattr(short, name), getattr(general, name)
        assert (short_column is None) == (general_column is None)
        if short_column is not None:
            torch.testing.assert_close(short_column, general_column, rtol=0, atol=0, equal_nan=True)
            short_column.fill_(7.0)
    assert all(torch.equal(now.nan_to_num(), then.nan_to_num()) for now, then in zip(answers, before, strict=True))


def test_normalised_once_and_clipped_last(actor: Actor) -> None:
    for estimator in ("reinforce", "rloo", "reinforce++", "dr_grpo"):
        options = {"advantage_estimator": estimator, "advantages_norm": True}
        (batch,) = maker(actor, **options).make_experience_list(PROMPTS, **OPTIONS)
        flat = torch.cat(rows([batch], "advantages")).double()
        assert flat.mean().item() == pytest.approx(0, abs=1e-5) and flat.std().item() == pytest.approx(1, abs=1e-4)
        (clipped,) = maker(actor, **options, advantage_clip=0.5).make_experience_list(PROMPTS, **OPTIONS)
        clipped_values = torch.cat(rows([clipped], "advantages"))
        assert clipped_values.abs().max() <= 0.5
        shares = [(row.abs() > 0.5).float().mean().item() for row in rows([batch], "advantages")]
        assert clipped.info["advantage_clip_frac"].tolist() == pytest.approx(shares)
    (plain,) = maker(actor, advantage_estimator="group_norm").make_experience_list(PROMPTS, **OPTIONS)
    (normalized,) = maker(actor, advantage_estimator="group_norm", advantages_norm=True).make_experience_list(
        PROMPTS, **OPTIONS
    )
    assert torch.equal(plain.advantages, normalized.advantages)  # they are normalised already
    (centred,) = maker(
        actor, advantage_estimator="reinforce", advantages_norm=True, no_advantage_std_norm=True
    ).make_experience_list(PROMPTS, **OPTIONS)
    (raw,) = maker(actor, advantage_estimator="reinforce").make_experience_list(PROMPTS, **OPTIONS)
    mask = raw.action_mask
    torch.testing.assert_close(centred.advantages[mask], raw.advantages[mask] - raw.advantages[mask].mean())


def test_rewards_are_clipped_and_it_is_said(actor: Actor) -> None:
    experience_maker = maker(actor, advantage_estimator="reinforce", reward_clip_range=(0.0, 0.5))
    (batch,) = experience_maker.make_experience_list(PROMPTS, **OPTIONS)
    raw = batch.info["reward"]
    assert batch.info["return"].tolist() == raw.clamp(0, 0.5).tolist()
    assert batch.info["reward_clip_frac"].tolist() == ((raw < 0) | (raw > 0.5)).float().tolist()


def test_dynamic_sampling_masks_groups_that_say_nothing(actor: Actor) -> None:
    rewards = iter([1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5])
    experience_maker = maker(
        actor, dynamic_sampling=True, reward=lambda response: next(rewards), advantage_estimator="group_norm"
    )
    (batch,) = experience_maker.make_experience_list(PROMPTS, **OPTIONS)
    assert batch.info["filtered"].tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert batch.action_mask.any(1).tolist() == [False] * 3 + [True] * 3 + [False] * 3
    assert experience_maker.metrics["dynamic_sampling/constant_group"] == 6


# --- what engines give --------------------------------------------------------------------------------------------


def test_a_response_that_was_cut_is_kept_as_it_was_sampled(actor: Actor) -> None:
    experience_maker = maker(actor)
    samples = experience_maker.generate_samples(PROMPTS, max_new_tokens=2, ignore_eos=True)
    (batch,) = [experience_maker.make_experience(sample) for sample in samples]
    packed = batch.pack()
    for i, rollout in enumerate(samples[0].rollouts or ()):
        assert packed.sequences[i].tolist() == [*rollout.prompt_ids, *rollout.response_ids]
        assert rollout.finish_reason == "length" and len(rollout.response_ids) == 2
    assert batch.info["finish_reason"] == ["length"] * 9
    assert batch.action_mask.all() and batch.info["num_actions"] == 2


def test_the_engines_log_probs_are_kept_beside_the_policys(actor: Actor) -> None:
    (batch,) = maker(actor).make_experience_list(PROMPTS, **OPTIONS)
    mask = batch.action_mask
    assert batch.extras is not None
    torch.testing.assert_close(batch.extras["logprobs"][mask], batch.action_log_probs[mask], rtol=0, atol=1e-4)
    assert (batch.extras["policy_versions"][mask] == 0).all()


def test_one_failure_is_one_samples(actor: Actor) -> None:
    script = {"good": ["a fox", "a tree"], "bad": ["three", RuntimeError("the server fell over")]}
    engine = ScriptedEngine(script, tokenizer=tiny.bytes_())
    for packing in (False, True):
        experience_maker = NaiveExperienceMaker(
            actor,
            None,
            None,
            None,
            tiny.bytes_(),
            32,
            None,
            reward_fn=vowels,
            engine=engine,
            config=MakerConfig(n_samples_per_prompt=2, advantage_estimator="group_norm", packing_samples=packing),
        )
        (batch,) = experience_maker.make_experience_list(["good", "bad"])
        assert batch.info["error"][3] == "RuntimeError: the server fell over"
        assert batch.info["finish_reason"] == ["stop"] * 3 + ["error"]
        rewards = batch.info["reward"].tolist()
        assert rewards[:3] == [vowels(text) for text in ("a fox", "a tree", "three")] and math.isnan(rewards[3])
        advantages = rows([batch], "advantages")
        assert all(row.isfinite().all() for row in advantages)
        assert advantages[2].count_nonzero() == 0  # alone in its group
        assert advantages[0].count_nonzero() > 0
        assert experience_maker.metrics["rollout/failed"] == 1


def test_nobody_answered() -> None:
    experience_maker = NaiveExperienceMaker(
        None, None, None, None, tiny.bytes_(), 32, None, reward_fn=vowels,
        engine=ScriptedEngine([Line(error="down")], tokenizer=tiny.bytes_()),
        config=MakerConfig(n_samples_per_prompt=2),
    )  # fmt: skip
    (batch,) = experience_maker.make_experience_list(["a", "b"])
    assert batch.advantages.count_nonzero() == 0 and not batch.action_mask.any()


def test_fire_is_passed_on(actor: Actor) -> None:
    (samples,) = maker(actor, use_fire=True).generate_samples(PROMPTS, **OPTIONS)
    assert {rollout.sampling["first_temperature"] for rollout in samples.rollouts or ()} == {10.0}


def test_long_prompts_are_cut_on_the_tokenizers_side(actor: Actor) -> None:
    text = "abcdefgh" * 8
    for side in ("left", "right"):
        tokenizer = tiny.bytes_()
        tokenizer.truncation_side = side
        experience_maker = NaiveExperienceMaker(actor, None, None, None, tokenizer, 8, None, reward_fn=vowels)
        (samples,) = experience_maker.generate_samples([text], **OPTIONS)
        tokenizer.truncation_side = "right"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        (rollout,) = samples.rollouts or ()
        assert list(rollout.prompt_ids) == (ids[-8:] if side == "left" else ids[:8])
        assert rollout.info["prompt_truncated_from"] == 64


def test_ids_and_samples_repeat_with_a_seed(actor: Actor) -> None:
    first, second = (maker(actor).make_experience_list(PROMPTS, **OPTIONS)[0] for _ in range(2))
    assert [str(eid) for eid in first.ids or ()] == [str(eid) for eid in second.ids or ()]
    assert torch.equal(first.sequences, second.sequences)
    again = maker(actor)
    earlier, later = (
        again.make_experience_list(PROMPTS, **OPTIONS)[0],
        again.make_experience_list(PROMPTS, **OPTIONS)[0],
    )
    assert {str(eid) for eid in earlier.ids or ()}.isdisjoint(str(eid) for eid in later.ids or ())
    assert not (earlier.sequences.shape == later.sequences.shape and torch.equal(earlier.sequences, later.sequences))


# --- LightRFT's own actors ----------------------------------------------------------------------------------------


class Upstream(torch.nn.Module):
    """An actor as LightRFT's users have: `generate` to three tensors, called with sequences and a number of actions."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(vocab, generator=torch.Generator().manual_seed(0)))
        self.seen: list[dict[str, Any]] = []

    def generate(self, input_ids: Any, attention_mask: Any, **options: Any) -> Any:
        self.seen.append(options)
        rows = len(input_ids)
        answer = torch.tensor([[70, 71, 2]] * rows)
        sequences = torch.cat([input_ids, answer], 1)
        attended = torch.cat([attention_mask, torch.ones(rows, 3, dtype=torch.int64)], 1)
        return sequences, attended, torch.ones(rows, 3, dtype=torch.bool)

    def forward(self, sequences: Any, num_actions: int, attention_mask: Any) -> torch.Tensor:
        return -self.weight[sequences[:, -num_actions:]].abs()


def test_an_actor_of_lightrfts_make() -> None:
    actor = Upstream(len(tiny.bytes_()))
    args = SimpleNamespace(n_samples_per_prompt=2, micro_rollout_batch_size=3, advantage_estimator="rloo")
    experience_maker = NaiveExperienceMaker(
        actor,
        None,
        lambda sequences, attention_mask: attention_mask.sum(1),
        actor,
        tiny.bytes_(),
        16,
        AdaptiveKL(0.1, 6.0, 100),
        strategy=SimpleNamespace(args=args),
    )
    batches = experience_maker.make_experience_list(
        ["ab", "c"], all_labels=["x", "y"], max_new_tokens=3, gamma=1.0, lambd=1.0
    )
    assert [len(batch) for batch in batches] == [3, 1] and actor.seen[0] == {"max_new_tokens": 3}
    assert batches[0].labels == ["x", "x", "y"] and batches[1].labels == ["y"]
    assert batches[0].info["reward"].tolist() == [5.0, 5.0, 4.0] and batches[0].info["reward"].dtype == torch.float32
    assert torch.equal(batches[0].action_log_probs, actor(batches[0].sequences, 3, None))
    assert actor.training
    assert [eid.tid for eid in batches[0].ids or ()] == ["0/0", "0/0", "0/1"]


def test_a_bare_string_is_one_prompt(actor: Actor) -> None:
    (samples,) = maker(actor).generate_samples("the fox", **OPTIONS)
    assert samples.prompts == ["the fox"] * 3


def test_tokenize_fn() -> None:
    experience_maker = NaiveExperienceMaker(None, None, None, None, tiny.bytes_(), 8, None)
    tokenized = experience_maker.tokenize_fn(["ab", "abcd"], 3)
    assert tokenized["input_ids"].shape == (2, 3) and tokenized["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
    ragged = experience_maker.tokenize_fn(["ab", "abcd"], 3, padding=False)
    assert [len(ids) for ids in ragged["input_ids"]] == [2, 3]


def test_samples_without_an_engine_are_read_by_the_tokenizer(actor: Actor) -> None:
    tokenizer = tiny.bytes_()
    sequences = torch.tensor([[0, 73, 74, 75, 2], [73, 73, 76, 2, 0]])
    attention = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    actions = torch.tensor([[True, True], [True, False]])
    seen: list[tuple[str, str, Any]] = []

    def reward(prompt: str, response: str, label: Any) -> float:
        seen.append((prompt, response, label))
        return 1

    padded = Samples(
        sequences,
        attention,
        actions,
        2,
        None,
        actions.sum(1).float(),
        attention.sum(1).float(),
        ["P", "Q"],
        [1, 2],
        None,
    )
    batch = maker(actor, reward=reward).make_experience(padded)
    assert seen == [("P", tokenizer.decode([75]), 1), ("Q", "", 2)]
    assert batch.info["reward"].tolist() == [1.0, 1.0]
    packed = Samples(
        torch.tensor([[73, 74, 75, 2, 73, 73, 76, 2]]),
        torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2]]),
        None,
        [2, 1],
        [4, 4],
        torch.tensor([2.0, 1.0]),
        torch.tensor([4.0, 4.0]),
        ["P", "Q"],
        [1, 2],
        None,
    )
    again = maker(actor, reward=reward).make_experience(packed)
    for row, other in zip(rows([again], "action_log_probs"), rows([batch], "action_log_probs"), strict=True):
        torch.testing.assert_close(row, other, rtol=0, atol=1e-5)


# --- rewards ------------------------------------------------------------------------------------------------------


def test_functions_see_the_response_alone() -> None:
    engine = ScriptedEngine(["banana"], tokenizer=tiny.bytes_())
    seen = []

    def reward(response: str) -> int:
        seen.append(response)
        return 3

    experience_maker = NaiveExperienceMaker(
        None, None, None, None, tiny.bytes_(), 99, None, reward_fn=reward, engine=engine
    )
    (batch,) = experience_maker.make_experience_list(["<think> </think> \\boxed{}"])
    assert seen == ["banana"]
    assert batch.info["reward"].dtype == torch.float32 and batch.info["reward"].tolist() == [3.0]


def test_parts_of_a_reward_are_kept_for_every_sample(actor: Actor) -> None:
    experience_maker = maker(
        actor, reward=lambda response: {"reward": 1.0, "length": len(response)}, micro_rollout_batch_size=4
    )
    batches = experience_maker.make_experience_list(PROMPTS, **OPTIONS)
    for batch in batches:
        packed = batch.pack()
        answers = [row[-len(mask) :] for row, mask in zip(packed.sequences, packed.action_mask, strict=True)]
        texts = [tiny.bytes_().decode(answer, skip_special_tokens=True) for answer in answers]
        assert batch.info["reward_metrics"]["length"].tolist() == [len(text) for text in texts]


def test_a_reward_that_crashes_is_that_samples(actor: Actor) -> None:
    calls = iter(range(9))

    def reward(response: str) -> float:
        if next(calls) == 4:
            raise ZeroDivisionError("by zero")
        return 1.0

    (batch,) = maker(actor, reward=reward).make_experience_list(PROMPTS, **OPTIONS)
    failed = [i for i, error in enumerate(batch.info["reward_error"]) if error is not None]
    assert len(failed) == 1 and math.isnan(batch.info["reward"][failed[0]])
    assert batch.info["reward"].isnan().sum() == 1 and batch.advantages.isfinite().all()


def test_no_source_is_an_error(actor: Actor) -> None:
    experience_maker = NaiveExperienceMaker(actor, None, None, None, tiny.bytes_(), 32, None)
    with pytest.raises(ValueError, match="reward: got no source, expected reward_model, remote_rm_url or reward_fn"):
        experience_maker.make_experience_list(PROMPTS, **OPTIONS)


def test_a_model_that_gives_too_few_scores_is_an_error() -> None:
    experience_maker = NaiveExperienceMaker(
        Upstream(300), None, lambda sequences, attention_mask: torch.ones(1), None, tiny.bytes_(), 16, None
    )
    with pytest.raises(ValueError, match="returned 1 scores, expected 2"):
        experience_maker.make_experience_list(["a", "b"])


# --- a rollout's own estimator, metrics, progress -----------------------------------------------------------------


def test_an_estimator_of_ones_own(actor: Actor) -> None:
    @ESTIMATORS.register("best_of_group", source="a test")
    def best_of_group(rewards: Any, groups: Any, mask: Any = None, *, bonus: float = 1.0) -> Advantages:
        values = torch.as_tensor(rewards)
        best = torch.stack([values[[candidate == group for candidate in groups]].max() for group in groups])
        scores = torch.where(values == best, bonus, 0.0)
        return Advantages(scores, scores=scores)

    try:
        experience_maker = maker(actor, advantage_estimator="best_of_group", estimator_options={"bonus": 2.0})
        (batch,) = experience_maker.make_experience_list(PROMPTS, **OPTIONS)
    finally:
        ESTIMATORS.unregister("best_of_group")
    rewards = batch.info["reward"].reshape(3, 3)
    expected = torch.where(rewards == rewards.amax(1, keepdim=True), 2.0, 0.0).reshape(-1)
    assert [row[0].item() for row in rows([batch], "advantages")] == expected.tolist()


def test_metrics_say_how_long_each_stage_took(actor: Actor, reference: Actor, critic: Critic) -> None:
    experience_maker = maker(actor, reference=reference, critic=critic, advantage_estimator="gae")
    (batch,) = experience_maker.make_experience_list(PROMPTS, **OPTIONS)
    for stage in ("rollout", "policy", "reference", "values", "reward"):
        assert experience_maker.metrics[f"{stage}/seconds"] > 0
        assert stage == "reward" or experience_maker.metrics[f"{stage}/tokens_per_second"] > 0
    assert experience_maker.metrics["rollout/tokens"] == batch.info["response_length"].sum().item()
    assert experience_maker.metrics["policy/tokens"] == batch.info["total_length"].sum().item()
    assert experience_maker.metrics["reward/mean"] == pytest.approx(batch.info["reward"].mean().item())


def test_bars_are_for_terminals(actor: Actor, capsys: pytest.CaptureFixture[str]) -> None:
    maker(actor).make_experience_list(PROMPTS, **OPTIONS)
    assert capsys.readouterr() == ("", "")
    maker(actor, progress=True).make_experience_list(PROMPTS, **OPTIONS)
    shown = capsys.readouterr().err
    assert "rollout [" in shown and "9/9" in shown and "reward [" in shown

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Progress("work", 4, stream=stream) as bar:
        for _ in range(4):
            bar.advance()
    assert stream.getvalue().count("4/4") == 1 and stream.getvalue().endswith("\n")


def test_samples_move_with_all_they_hold(actor: Actor) -> None:
    (samples,) = maker(actor).generate_samples(PROMPTS, **OPTIONS)
    moved = samples.to_device("meta")
    assert moved.sequences.device.type == moved.action_mask.device.type == moved.response_length.device.type == "meta"
    assert moved.labels is None and len(moved.rollouts or ()) == 9


def test_one_engine_may_sample_for_another_policy(actor: Actor, reference: Actor) -> None:
    engine = TransformersEngine(reference.model, tiny.bytes_(), version=7)
    experience_maker = NaiveExperienceMaker(
        actor, None, None, None, tiny.bytes_(), 32, None, reward_fn=vowels, engine=engine,
        config=MakerConfig(n_samples_per_prompt=2, seed=1),
    )  # fmt: skip
    (batch,) = experience_maker.make_experience_list(PROMPTS, **OPTIONS)
    mask = batch.action_mask
    assert batch.extras is not None and (batch.extras["policy_versions"][mask] == 7).all()
    assert (batch.extras["logprobs"][mask] - batch.action_log_probs[mask]).abs().max() > 0.1


def test_the_run_says_what_made_it(actor: Actor) -> None:
    experience_maker = maker(actor)
    run = experience_maker.run
    assert (run.engine, run.seed) == ("transformers", 11) and len(run.tokenizer) == len(run.chat_template) == 16
    (samples,) = experience_maker.generate_samples(PROMPTS, **OPTIONS)
    assert {rollout.run_id for rollout in samples.rollouts or ()} == {experience_maker.engine.run.id}


@pytest.mark.parametrize("form", ["tensor", "list", "advantages"])
def test_an_estimator_may_give_plain_numbers(actor: Actor, form: str) -> None:
    @ESTIMATORS.register("as_it_is", source="a test")
    def as_it_is(rewards: Any, groups: Any) -> Any:
        scores = torch.as_tensor(rewards)
        return {"tensor": scores, "list": scores.tolist(), "advantages": Advantages(scores)}[form]

    @ESTIMATORS.register("by_token", source="a test")
    def by_token(rewards: Any, groups: Any, mask: Any) -> Any:
        return mask.apply(lambda values: values * 2) if form != "list" else "nothing"

    try:
        (batch,) = maker(actor, advantage_estimator="as_it_is").make_experience_list(PROMPTS, **OPTIONS)
        assert [row[0].item() for row in rows([batch], "advantages")] == batch.info["reward"].tolist()
        if form == "list":
            with pytest.raises(ValueError, match="by_token: returned str, expected a number for each row"):
                maker(actor, advantage_estimator="by_token").make_experience_list(PROMPTS, **OPTIONS)
        else:
            (batch,) = maker(actor, advantage_estimator="by_token").make_experience_list(PROMPTS, **OPTIONS)
            assert torch.equal(batch.advantages, batch.action_mask * 2.0)
    finally:
        ESTIMATORS.unregister("as_it_is")
        ESTIMATORS.unregister("by_token")


def test_two_makers_have_ids_of_their_own(actor: Actor) -> None:
    training, evaluation = maker(actor), maker(actor, batch_name="eval")
    first = training.make_experience_list(PROMPTS, **OPTIONS)[0]
    other = evaluation.make_experience_list(PROMPTS, **OPTIONS)[0]
    assert [eid.tid for eid in first.ids or ()][::3] == ["0/0", "0/1", "0/2"]
    assert [eid.tid for eid in other.ids or ()][::3] == ["eval-0/0", "eval-0/1", "eval-0/2"]
    resumed = maker(actor)
    resumed.rollouts_made = 5
    assert (resumed.make_experience_list(PROMPTS, **OPTIONS)[0].ids or ())[0].batch == 5


def test_metrics_of_the_rewards_parts_and_of_cut_prompts(actor: Actor) -> None:
    def reward(response: str, eid: EID) -> dict[str, float]:
        if eid.task == 2:
            raise TimeoutError("too slow")
        return {"reward": 1.0, "length": float(len(response)), "half": 0.5}

    experience_maker = NaiveExperienceMaker(
        actor, None, None, None, tiny.bytes_(), 8, None, reward_fn=reward,
        config=MakerConfig(n_samples_per_prompt=2, seed=1),
    )  # fmt: skip
    (batch,) = experience_maker.make_experience_list(PROMPTS, **OPTIONS)
    assert experience_maker.metrics["reward/half"] == 0.5 and experience_maker.metrics["reward/errors"] == 2
    lengths = batch.info["reward_metrics"]["length"]
    assert experience_maker.metrics["reward/length"] == pytest.approx(lengths[~lengths.isnan()].mean().item())
    assert experience_maker.metrics["rollout/prompts_cut"] == pytest.approx(2 / 3)  # "yes" is short


def test_records_hold_everything(actor: Actor, reference: Actor, critic: Critic) -> None:
    experience_maker = maker(
        actor, reference=reference, critic=critic, advantage_estimator="gae", micro_rollout_batch_size=4, kl=0.1,
        reward=lambda response: {"reward": vowels(response), "length": len(response)},
    )  # fmt: skip
    records = make_records(experience_maker, PROMPTS, **OPTIONS)
    again = maker(actor, reference=reference, critic=critic, advantage_estimator="gae", kl=0.1)
    (batch,) = again.make_experience_list(PROMPTS, **OPTIONS)
    assert len(records) == 9 and [str(eid) for eid in records.eids()] == [str(eid) for eid in batch.ids or ()]
    back = decode(encode(records))
    packed = batch.pack()
    for i, row in enumerate(back):
        assert row.tokens.tolist() == packed.sequences[i].tolist() and row.reward == batch.info["reward"][i].item()
        for field, name in (
            ("advantages", "advantages"),
            ("old_logprobs", "action_log_probs"),
            ("ref_logprobs", "base_action_log_probs"),
            ("values", "values"),
        ):
            torch.testing.assert_close(getattr(row, field), getattr(packed, name)[i])
        assert row.metrics["length"] == len(row.response_text or "") and row.sampling["asked_seed"] == 11
    from rollbook.algorithms import estimate

    estimated = estimate("gae", back)
    assert len(estimated.advantages) == 9


def test_what_is_missing_is_said_before_anything_is_sampled(actor: Actor) -> None:
    before = TransformersEngine(actor).stats.tokens
    for experience_maker, message in (
        (maker(actor, advantage_estimator="gae"), "give the maker a critic"),
        (maker(actor, reward=None), "reward: got no source"),
        (maker(actor, reward={"x": [("rule", "exact_match", 1.0)]}), "label: got 'y'"),
    ):
        with pytest.raises(ValueError, match=message):
            experience_maker.make_experience_list(PROMPTS, all_labels=["y"] * 3, **OPTIONS)
    with pytest.raises(ValueError, match="all_reference: unknown column; did you mean 'all_references'"):
        maker(actor).make_experience_list(PROMPTS, all_reference=["a"] * 3, **OPTIONS)
    assert TransformersEngine(actor).stats.tokens == before
