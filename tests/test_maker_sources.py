"""What LightRFT's users give their maker: models, callables, recipes, URLs, subclasses; and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from rollbook.compat.lightrft.maker import Experience, MakerConfig, NaiveExperienceMaker, Samples
from rollbook.compat.lightrft.replay_buffer import make_experience_batch, split_experience_batch
from rollbook.compat.lightrft.samples import RolloutBatches
from rollbook.models import Actor
from rollbook.rollout import Line, ScriptedEngine
from tests import tiny
from tests.maker_records import make_records
from tests.rewards.server import nobody, serve

TOKENS = {"ab": [[70, 2], [71, 71, 2]], "c": [[72, 2], [73, 2]]}
TEXTS = ["^", "__", "`", "a"]
"""What these read as."""


def maker(
    *, kl: Any = None, config: Any = None, model: Any = None, cls: Any = NaiveExperienceMaker, **more: Any
) -> Any:
    settings = MakerConfig(**{"n_samples_per_prompt": 2, "advantage_estimator": "rloo", **(config or {})})
    engine = more.pop("engine", None) or ScriptedEngine(TOKENS, tokenizer=tiny.bytes_())
    return cls(None, None, model, None, tiny.bytes_(), 16, kl, config=settings, engine=engine, **more)


def rewards(experience_maker: Any, **options: Any) -> list[float]:
    (batch,) = experience_maker.make_experience_list(["ab", "c"], **options)
    return batch.info["reward"].tolist()


class Seen(torch.nn.Module):
    """A reward model that remembers the tokens it was shown."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight
        self.rows: list[list[int]] = []

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        self.rows += [row[mask.bool()].tolist() for row, mask in zip(sequences, attention_mask, strict=True)]
        return attention_mask.sum(1) * self.weight


LENGTHS = [4.0, 5.0, 3.0, 3.0]


# --- models -------------------------------------------------------------------------------------------------------


def test_a_module_is_shown_the_engines_tokens() -> None:
    model = Seen()
    assert rewards(maker(model=model)) == LENGTHS
    first, second = (tiny.bytes_()(text, add_special_tokens=False)["input_ids"] for text in TOKENS)
    expected = [[*first, 70, 2], [*first, 71, 71, 2], [*second, 72, 2], [*second, 73, 2]]
    assert sorted(model.rows) == sorted(expected)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("size", [None, 3])
def test_a_callable_is_asked_as_lightrft_asks(packing: bool, size: int | None) -> None:
    shapes = []

    def model(seqs: torch.Tensor, attn: torch.Tensor) -> dict[str, torch.Tensor]:
        shapes.append(tuple(seqs.shape))
        return {"score": attn.sum(1)}

    config = {"packing_samples": packing, "micro_rollout_batch_size": size}
    batches = maker(model=model, config=config).make_experience_list(["ab", "c"])
    assert torch.cat([batch.info["reward"] for batch in batches]).tolist() == LENGTHS
    assert [shape[0] for shape in shapes] == ([4] if size is None else [3, 1])
    assert rewards(maker(model=lambda *arguments: arguments[1].sum(1))) == LENGTHS


def test_several_models_and_lightrfts_reward_fn() -> None:
    def reward_fn(model_reward_list: Any, labels: Any, queries: Any, refs: Any, label_map: Any) -> Any:
        assert queries == TEXTS and labels == ["x", "x", "y", "y"] and refs == [1, 1, 2, 2]
        return model_reward_list[0] + 10 * model_reward_list[label_map["b"]], {"first": model_reward_list[0]}

    models = [Seen(), lambda seqs, attn: attn.sum(1)]
    experience_maker = maker(model=models, reward_fn=reward_fn, reward_fn_label_map={"a": 0, "b": 1})
    (batch,) = experience_maker.make_experience_list(["ab", "c"], all_labels=["x", "y"], all_references=[1, 2])
    assert batch.info["reward"].tolist() == [11 * length for length in LENGTHS]
    assert batch.info["reward_metrics"]["first"].tolist() == LENGTHS
    assert rewards(maker(model=[Seen(), Seen(2.0)])) == [3 * length for length in LENGTHS]


@pytest.mark.parametrize(
    "reward_fn",
    [
        lambda model_reward_list, labels, queries, refs, label_map: ([float(len(query)) for query in queries], None),
        lambda **arguments: [len(query) for query in arguments["queries"]],
    ],
)
def test_rules_only(reward_fn: Any) -> None:
    assert rewards(maker(model=[], reward_fn=reward_fn)) == [1.0, 2.0, 1.0, 1.0]


def test_a_failed_response_has_no_score_whoever_scores() -> None:
    script = {"ab": [[70, 2], Line(error="down")], "c": [[72, 2], [73, 2]]}
    for model in (Seen(), lambda seqs, attn: attn.sum(1)):
        engine = ScriptedEngine(script, tokenizer=tiny.bytes_())
        (batch,) = maker(model=model, engine=engine).make_experience_list(["ab", "c"])
        assert math.isnan(batch.info["reward"][1]) and batch.info["reward_error"][1] == "no response: down"
        assert batch.advantages[1].count_nonzero() == 0 and batch.advantages[0].count_nonzero() == 0


def test_a_callable_that_gives_nan_says_whose() -> None:
    (batch,) = maker(model=lambda seqs, attn: torch.tensor([1.0, math.nan, 2.0, 3.0])).make_experience_list(["ab", "c"])
    assert batch.info["reward_error"] == [None, "reward_model: returned nan", None, None]


# --- recipes ------------------------------------------------------------------------------------------------------


def test_a_recipe_is_worked_out_by_label() -> None:
    recipe = {"x": [("model", "value", 0.5), ("rule", "long", 2.0)], "y": [("rule", "long", 1.0)]}
    experience_maker = maker(
        model=[Seen()],
        reward_fn={"long": lambda response: float(len(response) > 1)},
        reward_fn_label_map={"value": 0},
        reward_recipe=recipe,
    )
    (batch,) = experience_maker.make_experience_list(["ab", "c"], all_labels=["x", "y"])
    assert batch.info["reward"].tolist() == [2.0, 4.5, 0.0, 0.0]
    assert batch.info["reward_metrics"]["long"].tolist() == [0.0, 1.0, 0.0, 0.0]
    value = batch.info["reward_metrics"]["value"].tolist()
    assert value[:2] == [4.0, 5.0] and all(map(math.isnan, value[2:]))
    assert sorted(batch.info["reward_parts"][0]) == ["long", "value"]
    with pytest.raises(ValueError, match="label: got 'z'.*which the recipe does not have"):
        experience_maker.make_experience_list(["ab", "c"], all_labels=["x", "z"])
    with pytest.raises(ValueError, match="got model 'valu', expected one of the models; did you mean 'value'"):
        maker(model=[Seen()], reward_fn_label_map={"value": 0}, reward_recipe={"x": [("model", "valu", 1.0)]})


def test_a_recipe_of_ready_functions_alone() -> None:
    experience_maker = maker(
        model=[], reward_recipe={"x": [("rule", "exact_match", 0.9)], None: [("rule", "length", 1.0)]}
    )
    (batch,) = experience_maker.make_experience_list(["ab", "c"], all_labels=["x", "x"], all_references=["^", "a"])
    assert batch.info["reward"].tolist() == pytest.approx([0.9, 0.0, 0.0, 0.9])


# --- URLs and files -----------------------------------------------------------------------------------------------


def test_urls_and_files(tmp_path: Path) -> None:
    with serve(lambda body: {"rewards": [len(query) for query in body["queries"]]}) as server:
        assert rewards(maker(remote_rm_url=server.url)) == [3.0, 4.0, 2.0, 2.0]
        assert rewards(maker(remote_rm_url=[server.url])) == [3.0, 4.0, 2.0, 2.0]
        assert rewards(maker(remote_rm_url=[server.url] * 2, reward_fn=lambda scores: scores[0] * 10 + scores[1])) == [
            33.0, 44.0, 22.0, 22.0,
        ]  # fmt: skip
        assert rewards(maker(remote_rm_url=server.url, reward_fn=lambda scores: scores[0] * 2)) == [6.0, 8.0, 4.0, 4.0]
        with pytest.raises(ValueError, match="reward_fn: got the parameters .*, expected one with remote_rm_url"):
            maker(remote_rm_url=server.url, reward_fn=lambda model_reward_list, labels, queries: 1)
        with pytest.raises(ValueError, match="reward_model: got it with remote_rm_url"):
            maker(remote_rm_url=server.url, model=Seen())
    file = tmp_path / "reward.py"
    file.write_text("def reward_func(queries, prompts, labels):\n    return [len(p) for p in prompts]\n")
    assert rewards(maker(remote_rm_url=[str(file)]), all_labels=["x", "y"]) == [2.0, 2.0, 1.0, 1.0]
    other = tmp_path / "places.py"
    other.write_text("def reward_func(texts, asked):\n    return [len(a) + len(t) for t, a in zip(texts, asked)]\n")
    assert rewards(maker(remote_rm_url=str(other))) == [5.0, 6.0, 3.0, 3.0]


@pytest.mark.parametrize("fault", ["slow", 500, "garbage", "nan"])
def test_faults_of_a_server_are_its_samples(fault: Any) -> None:
    from rollbook.rewards import as_reward
    from rollbook.rollout.server import Backoff

    quick = Backoff(tries=2, first=0.01)
    tries = 2 if fault in ("slow", 500) else 1  # the others are not asked again
    with serve(faults=[fault] * tries, delay=8.0) as server:
        source = as_reward(server.url, batch_size=2, concurrency=1, timeout=2.0, backoff=quick)
        (batch,) = maker(model=source).make_experience_list(["ab", "c"])
    missing = batch.info["reward"].isnan()
    assert missing.any() and not missing.all()
    assert all(
        (error is None) != lost for error, lost in zip(batch.info["reward_error"], missing.tolist(), strict=True)
    )
    assert batch.advantages.isfinite().all()


def test_a_server_that_is_not_there_and_one_that_cannot_count() -> None:
    from rollbook.rewards import as_reward
    from rollbook.rollout.server import Backoff

    source = as_reward(nobody(), backoff=Backoff(tries=2, first=0.01))
    (batch,) = maker(model=source).make_experience_list(["ab", "c"])
    assert batch.info["reward"].isnan().all() and "ConnectError" in batch.info["reward_error"][0]
    with serve(faults=["count"]) as server, pytest.raises(ValueError, match="gave 3 scores, expected 4"):
        maker(remote_rm_url=server.url).make_experience_list(["ab", "c"])


# --- unknown rewards, filtered rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["rloo", "group_norm", "dr_grpo", "reinforce_baseline", "cpgd", "reinforce"])
def test_a_row_without_a_reward_counts_for_nothing(estimator: str) -> None:
    """Advantages of the others, normalised, are those of a rollout without it; its own are 0, whatever its KL."""
    advantages = []
    for lost in (True, False):
        script = {"ab": [[70, 2], [71, 71, 2], [72, 2]][: 3 if lost else 2]}
        rewards_to_give = iter([1.0, 4.0, math.nan])

        def policy(sequences: Any, actions: int, mask: Any) -> torch.Tensor:
            return torch.full((len(sequences), actions), -0.5)

        experience_maker = NaiveExperienceMaker(
            policy,
            None,
            None,
            lambda sequences, actions, mask: torch.full((len(sequences), actions), -1.0),
            tiny.bytes_(),
            16,
            0.1,
            reward_fn=lambda response, rewards_to_give=rewards_to_give: next(rewards_to_give),
            config=MakerConfig(
                n_samples_per_prompt=3 if lost else 2, advantage_estimator=estimator, advantages_norm=True
            ),
            engine=ScriptedEngine(script, tokenizer=tiny.bytes_()),
        )
        (batch,) = experience_maker.make_experience_list(["ab"])
        advantages.append([row.tolist() for row in RolloutBatches([batch]).rows("advantages") or ()])
    assert advantages[0][2] == [0.0, 0.0]
    assert [value for row in advantages[0][:2] for value in row] == pytest.approx(
        [value for row in advantages[1] for value in row], abs=1e-6
    )


def test_filtered_groups_do_not_count_in_the_norm() -> None:
    scores = dict(zip(TEXTS, [1.0, 4.0, 2.0, 2.0], strict=True))
    options = {"advantages_norm": True, "dynamic_sampling": True}
    (both,) = maker(reward_fn=lambda response: scores[response], config=options).make_experience_list(["ab", "c"])
    (alone,) = maker(reward_fn=lambda response: scores[response], config=options).make_experience_list(["ab"])
    assert both.info["filtered"].tolist() == [False, False, True, True]
    assert torch.equal(both.advantages[:2], alone.advantages) and both.advantages[2:].count_nonzero() == 0


def test_cpgd_is_defined_by_rewards_alone() -> None:
    scores = dict(zip(TEXTS, [3.0, 1.0, 2.0, 2.0], strict=True))
    experience_maker = maker(
        reward_fn=lambda response: scores[response], config={"advantage_estimator": "cpgd", "reward_clip": 0.5}, kl=0.1
    )
    (batch,) = experience_maker.make_experience_list(["ab", "c"], gamma=0.5)
    assert [part.tolist() for part in experience_maker.process_experiences([batch])[1]] == [[3.0, 1.0, 2.0, 2.0]]
    assert batch.advantages[0, :2].tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    assert batch.advantages[2:].count_nonzero() == 0


def test_as_many_tokens_as_rows() -> None:
    script = {"ab": [[70, 70, 70, 2], Line(error="down")], "c": [Line(error="down"), Line(error="down")]}
    engine = ScriptedEngine(script, tokenizer=tiny.bytes_())
    for estimator in ("rloo", "reinforce"):
        experience_maker = maker(
            reward_fn=lambda response: 1.0, config={"advantage_estimator": estimator}, engine=engine
        )
        (batch,) = experience_maker.make_experience_list(["ab", "c"])
        assert batch.info["return"].tolist()[1:] == [0.0] * 3


@pytest.mark.parametrize(("coef", "use_loss", "taken"), [(0.1, False, 0.05), (0.1, True, 0.0), (-0.1, False, 0.0)])
def test_the_kl_penalty_and_who_takes_it(coef: float, use_loss: bool, taken: float) -> None:
    def constant(value: float) -> Any:
        return lambda sequences, actions, mask: torch.full((len(sequences), actions), value)

    experience_maker = NaiveExperienceMaker(
        constant(-0.5), None, None, constant(-1.0), tiny.bytes_(), 16, SimpleNamespace(value=coef),
        reward_fn=lambda response: 1.0, engine=ScriptedEngine(TOKENS, tokenizer=tiny.bytes_()),
        config=MakerConfig(advantage_estimator="reinforce", use_kl_loss=use_loss, n_samples_per_prompt=2),
    )  # fmt: skip
    (batch,) = experience_maker.make_experience_list(["ab"])
    assert batch.info["kl"].tolist() == [0.5, 0.5]
    assert batch.info["return"].tolist() == pytest.approx([1 - 2 * taken, 1 - 3 * taken])


def test_bounds_of_rewards() -> None:
    scores = dict(zip(TEXTS, [3.0, -3.0, 0.5, 1.0], strict=True))
    options = {"advantage_estimator": "reinforce", "reward_clip": 1.0, "reward_clip_range": (-2.0, 0.75)}
    (batch,) = maker(reward_fn=lambda response: scores[response], config=options).make_experience_list(["ab", "c"])
    assert batch.info["return"].tolist() == [0.75, -1.0, 0.5, 0.75]
    assert batch.info["reward_clip_frac"].tolist() == [1.0, 1.0, 0.0, 1.0]
    assert batch.info["reward"].tolist() == [3.0, -3.0, 0.5, 1.0]


def test_the_overlong_buffer_counts_from_the_calls_own_length() -> None:
    options = {"advantage_estimator": "reinforce", "overlong_buffer": True, "overlong_buffer_len": 2}
    experience_maker = maker(reward_fn=lambda response: 1.0, config=options)
    (batch,) = experience_maker.make_experience_list(["ab"], max_new_tokens=3)
    assert batch.info["return"].tolist() == [0.5, 0.0]  # of 2 and of 3 tokens, where 1 would cost nothing
    (batch,) = experience_maker.make_experience_list(["ab"], max_new_tokens=8)
    assert batch.info["return"].tolist() == [1.0, 1.0]
    uncalled = maker(reward_fn=lambda response: 1.0, config=options)
    with pytest.raises(ValueError, match="max_new_tokens: got None, expected the longest response"):
        uncalled.process_experiences([batch])


def test_of_a_failed_sample_nothing_is_trained_on() -> None:
    """Not even the part of a response that there is."""
    engine = ScriptedEngine(TOKENS, tokenizer=tiny.bytes_())
    (samples,) = maker(model=Seen(), engine=engine).generate_samples(["ab", "c"])
    rollouts = list(samples.rollouts or ())
    rollouts[1] = rollouts[1].replace(finish_reason="error", error="cut off")
    from rollbook.compat.lightrft.samples import batch_from_samples, make_samples

    for packed in (False, True):
        failed_samples = make_samples(rollouts, packed=packed)
        assert failed_samples.response_length.tolist() == [2.0, 0.0, 2.0, 2.0]
        mask = RolloutBatches([batch_from_samples(failed_samples)]).rows("action_mask")
        assert [bool(row.any()) for row in mask or ()] == [True, False, True, True]


def test_tool_tokens_are_in_a_models_ids_and_not_in_the_text() -> None:
    seen: list[tuple[str, list[int]]] = []

    def reward(response: str, response_ids: list[int]) -> float:
        seen.append((response, response_ids))
        return 1.0

    mask = torch.tensor([[True, False, True]])
    tokens = torch.tensor([[75, 70, 71, 72]])
    lengths = torch.tensor([2.0]), torch.tensor([4.0])
    samples = Samples(tokens, torch.ones_like(tokens), mask, 3, None, *lengths, ["p"], None, None)
    maker(reward_fn=reward).make_experience(samples)
    assert seen == [("^`", [70, 71, 72])]


# --- subclasses, strategies, mocks --------------------------------------------------------------------------------


def test_a_subclass_has_the_last_word() -> None:
    class Mine(NaiveExperienceMaker):
        def make_experience(self, samples: Samples) -> Experience:
            batch = super().make_experience(samples)
            batch.info["reward"] = batch.info["reward"] + 1
            return batch

        def process_experiences(self, experiences: Any, max_new_tokens: Any = None) -> Any:
            return experiences, [100 * batch.info["reward"] for batch in experiences]

    config = {"advantage_estimator": "reinforce", "micro_rollout_batch_size": 3}
    batches = maker(model=Seen(), cls=Mine, config=config).make_experience_list(["ab", "c"])
    assert [row[0].item() for row in RolloutBatches(batches).rows("advantages") or ()] == [
        100 * (length + 1) for length in LENGTHS
    ]


class Filtering(NaiveExperienceMaker):
    """Drops the first sample of the rollout and triples the other rewards."""

    def process_experiences(self, experiences: Any) -> Any:  # LightRFT's signature
        processed, rewards = super().process_experiences(experiences)
        items = [item for batch in processed for item in split_experience_batch(batch, unpad=True)][1:]
        return [make_experience_batch(items)], [3 * torch.cat(rewards)[1:]]


def test_process_experiences_may_filter_and_change_rewards_before_the_clip() -> None:
    config = {"advantage_estimator": "reinforce", "reward_clip_range": (0.0, 12.0), "micro_rollout_batch_size": 3}
    experience_maker = maker(model=Seen(), cls=Filtering, config=config)
    (batch,) = experience_maker.make_experience_list(["ab", "c"])
    assert [row[0].item() for row in RolloutBatches([batch]).rows("returns") or ()] == [12.0, 9.0, 9.0]
    assert batch.info["reward_clip_frac"].tolist() == [1.0, 0.0, 0.0]
    assert batch.info["reward"].tolist() == LENGTHS[1:]
    assert (
        experience_maker.metrics["rollout/samples"] == 4 and experience_maker.metrics["reward/mean"] == sum(LENGTHS) / 4
    )

    records = make_records(experience_maker, ["ab", "c"])
    assert [(row.eid.task, row.eid.run, row.reward) for row in records] == [(0, 1, 5.0), (1, 0, 3.0), (1, 1, 3.0)]
    assert [row.response_text for row in records] == TEXTS[1:]


def test_process_experiences_may_keep_nothing() -> None:
    class Nothing(NaiveExperienceMaker):
        def process_experiences(self, experiences: Any) -> Any:
            return [], []

    for estimator in ("rloo", "reinforce", "group_norm", "cpgd"):
        config = {"advantage_estimator": estimator, "advantages_norm": True, "advantage_clip": 1.0, "reward_clip": 1.0}
        experience_maker = maker(model=Seen(), cls=Nothing, config=config)
        assert (
            experience_maker.make_experience_list(["ab", "c"]) == []
            and len(make_records(experience_maker, ["ab", "c"])) == 0
        )


def test_rewards_that_do_not_fit_the_experiences_are_named() -> None:
    class Short(NaiveExperienceMaker):
        def process_experiences(self, experiences: Any) -> Any:
            return experiences, [torch.ones(1) for _ in experiences]

    with pytest.raises(ValueError, match=r"process_experiences: returned rewards of sizes \[1\], expected \[4\]"):
        maker(model=Seen(), cls=Short).make_experience_list(["ab", "c"])


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("estimator", ["gae", "ppo", "reinforce", "rloo"])
def test_overridden_recursions_are_called_for_each_batch(estimator: str, packing: bool) -> None:
    class Doubling(NaiveExperienceMaker):
        calls = 0

        def get_cumulative_returns(self, rewards: Any, action_mask: Any, gamma: float) -> Any:
            self.calls += 1
            assert gamma == 0.5
            return doubled(super().get_cumulative_returns(rewards, action_mask, gamma))

        def get_advantages_and_returns(
            self, values: Any, rewards: Any, action_mask: Any, gamma: float, lambd: float
        ) -> Any:
            self.calls += 1
            assert (gamma, lambd) == (0.5, 0.25)
            return tuple(map(doubled, super().get_advantages_and_returns(values, rewards, action_mask, gamma, lambd)))

    def doubled(returned: Any) -> Any:
        return 2 * returned if isinstance(returned, torch.Tensor) else [2 * row for row in returned]

    def critic(sequences: Any, num_actions: Any, attention_mask: Any = None, **_: Any) -> torch.Tensor:
        return torch.full((1, sum(num_actions)) if packing else (len(sequences), num_actions), 0.5)

    config = MakerConfig(
        n_samples_per_prompt=2, advantage_estimator=estimator, micro_rollout_batch_size=3, packing_samples=packing
    )
    columns = {}
    for cls in (NaiveExperienceMaker, Doubling):
        experience_maker = cls(
            None, critic if estimator in ("gae", "ppo") else None, Seen(), None, tiny.bytes_(), 16, None, config=config,
            engine=ScriptedEngine(TOKENS, tokenizer=tiny.bytes_()),
        )  # fmt: skip
        batches = experience_maker.make_experience_list(["ab", "c"], gamma=0.5, lambd=0.25)
        columns[cls] = [torch.cat(list(RolloutBatches(batches).rows(name) or ())) for name in ("advantages", "returns")]
    assert experience_maker.calls == 2
    (advantages, returns), (doubled_advantages, doubled_returns) = columns[NaiveExperienceMaker], columns[Doubling]
    # ppo whitens: twice the advantages are the same ones then.
    torch.testing.assert_close(doubled_advantages, advantages if estimator == "ppo" else 2 * advantages)
    torch.testing.assert_close(doubled_returns, 2 * returns)


def test_an_override_of_the_wrong_shape_is_named() -> None:
    experience_maker = maker(model=Seen())
    experience_maker.get_cumulative_returns = lambda rewards, action_mask, gamma: rewards.sum(1)
    with pytest.raises(ValueError, match=r"get_cumulative_returns: got shape \[4\] for batch 0, expected \[4, 3\]"):
        experience_maker.make_experience_list(["ab", "c"])


def test_an_overridden_tokenize_fn_reads_the_prompts() -> None:
    class Upper(NaiveExperienceMaker):
        def tokenize_fn(self, texts: Any, max_length: int, padding: bool = True, device: Any = None) -> Any:
            return super().tokenize_fn([text.upper() for text in texts], max_length, padding, device)

    actor = Actor(tiny.llama(len(tiny.bytes_())), tokenizer=tiny.bytes_())
    experience_maker = Upper(actor, None, None, None, tiny.bytes_(), 16, None, reward_fn=lambda response: 1.0)
    (samples,) = experience_maker.generate_samples(["ab"], max_new_tokens=2)
    assert samples.prompts == ["ab"] and tiny.bytes_().decode(samples.sequences[0, :2]) == "AB"


def test_strategies_with_more_than_we_know() -> None:
    args = SimpleNamespace(n_samples_per_prompt=2, advantage_estimator="group_norm", gamma=0.5, entropy=0.01, seed="x")
    strategy = MagicMock(args=args)
    experience_maker = NaiveExperienceMaker(
        None, None, Seen(), None, tiny.bytes_(), 16, SimpleNamespace(value=0.1), strategy=strategy,
        engine=ScriptedEngine(TOKENS, tokenizer=tiny.bytes_()),
    )  # fmt: skip
    (batch,) = experience_maker.make_experience_list(["ab", "c"])
    assert experience_maker.config.gamma == 1.0 and experience_maker.config.seed is None
    assert batch.advantages[0, 0].item() == pytest.approx(-0.5 / (0.5**0.5 + 1e-8), abs=1e-7)


def test_a_fake_tokenizer_that_only_decodes_batches() -> None:
    class Tokenizer:
        pad_token_id = 0

        def __call__(self, texts: list[str], **options: Any) -> dict[str, torch.Tensor]:
            ids = torch.tensor([[ord(letter) for letter in text] for text in texts])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def batch_decode(self, rows: Any, **options: Any) -> list[str]:
            return ["".join(chr(token) for token in row) for row in rows]

    class Plain:
        """No module, and masks of integers."""

        training = True

        def eval(self) -> None:
            self.training = False

        def train(self) -> None:
            self.training = True

        def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
            rows = len(input_ids)
            attended = torch.cat([attention_mask, torch.tensor([[1, 0]] * rows)], 1)  # the end is not attended
            return torch.cat([input_ids, torch.tensor([[120, 33]] * rows)], 1), attended, torch.ones(rows, 2).long()

        def __call__(self, sequences: torch.Tensor, num_actions: int, attention_mask: torch.Tensor) -> torch.Tensor:
            assert not self.training
            return -sequences[:, -num_actions:].float()

    actor = Plain()
    experience_maker = NaiveExperienceMaker(
        actor, None, None, actor, Tokenizer(), 16, None, reward_fn=lambda response: float(response == "x!")
    )
    (batch,) = experience_maker.make_experience_list(["ab", "cd"])
    assert batch.info["reward"].tolist() == [1.0, 1.0] and actor.training
    assert batch.action_mask.tolist() == [[True, True]] * 2
    assert batch.action_log_probs.tolist() == [[-120.0, -33.0]] * 2


def test_the_makers_tokenizer_is_the_actors_where_it_has_none() -> None:
    actor = Actor(tiny.llama(len(tiny.bytes_())))
    experience_maker = NaiveExperienceMaker(
        actor, None, None, None, tiny.bytes_(), 16, None, reward_fn=lambda response: 1.0
    )
    with pytest.warns(UserWarning, match="every group has one sample"):
        (batch,) = experience_maker.make_experience_list(["ab", "c"], max_new_tokens=3)
    assert "error" not in batch.info and batch.info["reward"].tolist() == [1.0, 1.0]


def test_a_frozen_actor_stays_as_it_is() -> None:
    actor = Actor(tiny.llama(len(tiny.bytes_())), tokenizer=tiny.bytes_(), trainable=False)
    experience_maker = NaiveExperienceMaker(
        actor, None, None, None, tiny.bytes_(), 16, None, reward_fn=lambda response: 1.0
    )
    experience_maker.make_experience_list(["ab"], max_new_tokens=3)
    assert not actor.training


def test_a_temperature_apart_from_the_actors_is_said() -> None:
    actor = Actor(tiny.llama(len(tiny.bytes_())), tokenizer=tiny.bytes_(), temperature=0.7)
    experience_maker = NaiveExperienceMaker(
        actor, None, None, None, tiny.bytes_(), 16, None, reward_fn=lambda response: 1.0,
        config=MakerConfig(n_samples_per_prompt=2, seed=0),
    )  # fmt: skip
    (batch,) = experience_maker.make_experience_list(["ab"], max_new_tokens=5)
    mask = batch.action_mask
    torch.testing.assert_close(batch.extras["logprobs"][mask], batch.action_log_probs[mask], rtol=0, atol=1e-4)
    with pytest.warns(UserWarning, match=r"drawn at 1, but the actor's log-probs are at 0.7") as warned:
        experience_maker.make_experience_list(["ab"], max_new_tokens=5, temperature=1.0)
    assert warned[0].filename == __file__  # whose line it is


def test_remax_with_another_number_of_samples() -> None:
    actor = Actor(tiny.llama(len(tiny.bytes_())), tokenizer=tiny.bytes_())
    experience_maker = NaiveExperienceMaker(
        actor, None, None, None, tiny.bytes_(), 16, None, reward_fn=lambda response: float(len(response)),
        config=MakerConfig(advantage_estimator="remax", seed=0),
    )  # fmt: skip
    (batch,) = experience_maker.make_experience_list(["ab", "c"], max_new_tokens=3, n=3)
    assert len(batch) == 6 and batch.info["reward_baseline"].shape == (6,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_controller": "x"}, "kl_controller: got 'x', expected None, a finite number"),
        ({"kl_controller": object()}, "kl_controller: got <object"),
        ({"prompt_max_len": 0}, "prompt_max_len: got 0, expected an integer >= 1"),
        ({"initial_model": "gpt2"}, r"initial_model: got str \('gpt2'\), expected a model to call, or None"),
        ({"critic": object()}, "critic: got object"),
        ({"initial_model": tiny.llama()}, "initial_model: got LlamaForCausalLM, a transformers model, expected"),
        ({"reward_model": {}, "remote_rm_url": ["http://localhost:1"]}, "reward_model: got it with remote_rm_url"),
    ],
)
def test_what_a_maker_refuses(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "actor": None, "critic": None, "reward_model": None, "initial_model": None, "tokenizer": None,
        "prompt_max_len": 8, "kl_controller": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        NaiveExperienceMaker(**arguments | changes)


def test_what_calls_refuse() -> None:
    experience_maker = NaiveExperienceMaker(
        None, None, None, None, tiny.bytes_(), 8, None, reward_fn=lambda response: 1.0
    )
    with pytest.raises(ValueError, match="actor: got None, expected one with generate, or an engine"):
        experience_maker.make_experience_list(["a"])
    with pytest.raises(ValueError, match="all_prompts: got None"):
        experience_maker.make_experience_list(None)
    with pytest.raises(ValueError, match="all_prompts: empty"):
        experience_maker.make_experience_list([])
    with pytest.raises(ValueError, match="samples: got NoneType, expected Samples"):
        experience_maker.make_experience(None)
    with pytest.raises(ValueError, match=r"experiences\[0\]: got SimpleNamespace, expected an Experience"):
        experience_maker.process_experiences([SimpleNamespace(info={})])
    with pytest.raises(ValueError, match="tokenizer: missing"):
        NaiveExperienceMaker(None, None, None, None, None, 8, None).tokenize_fn(["a"], 4)
    with pytest.raises(ValueError, match="generate: unknown option 'max_tokenz'; did you mean 'max_tokens'"):
        maker(model=Seen()).make_experience_list(["ab"], max_tokenz=4)
