"""Episodes made in lock step: ids, masks, streams, limits and failures of real tiny models and scripted ones; and a
model that learns to use a tool."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollbook import EID, Experience
from rollbook.models import Actor, Critic
from rollbook.rollout import Line, Prompt, Reply, ScriptedEngine, TransformersEngine
from rollbook.rollout.engine import BaseEngine
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.pipeline import Models
from tests import tiny
from tests.train.stages import Player, complete

TOKENIZER = tiny.bytes_()
END = TOKENIZER.eos_token


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def actor() -> Actor:
    return Actor(tiny.llama(vocab=len(TOKENIZER)), tokenizer=TOKENIZER)


class Game:
    """Says how long the turn was; a turn is worth a tenth of its length; over after `turns` of them."""

    def __init__(self, prompt: Prompt, turns: int = 3) -> None:
        self.prompt, self.left, self.closed = prompt, turns, False

    def begin(self) -> str | None:
        return None

    def respond(self, text: str) -> Reply:
        self.left -= 1
        return Reply(f"[{len(text)}]", reward=len(text) / 10, done=self.left == 0)

    def close(self) -> None:
        self.closed = True


class Counting(BaseEngine):
    """A scripted engine that says how many samples each call asked for."""

    def __init__(self, script: Any) -> None:
        self.inner = ScriptedEngine(script, TOKENIZER)
        self.tokenizer = TOKENIZER
        self.calls: list[int] = []
        self.prompts: list[list[Any]] = []

    @property
    def run(self) -> Any:
        return self.inner.run

    def _run(self, requests: Any, cancel: Any) -> Any:
        self.calls.append(sum(len(request.eids) for request in requests))
        self.prompts.append([(request.prompt.eid.rid, request.sampling.seed) for request in requests])
        return self.inner._run(requests, cancel)


def scripted(script: Any, environment: Any = Game, **options: Any) -> Player:
    engine = script if isinstance(script, BaseEngine) else ScriptedEngine(script, TOKENIZER)
    return Player(environment, engine=engine, **options)


def spoken(row: Experience) -> list[tuple[str, str]]:
    """Who said what, from the first token to the last."""
    ids = row.tokens.tolist()
    return [
        (segment["kind"], TOKENIZER.decode(ids[segment["start"] : segment["stop"]])) for segment in row.info["segments"]
    ]


def run_of(prompt: Prompt) -> int:
    assert prompt.eid is not None
    return prompt.eid.run


# --- lock step ------------------------------------------------------------------------------------------------------


def test_every_turn_is_one_call_over_the_episodes_that_are_left() -> None:
    engine = Counting(lambda prompt, run: f"t{END}")
    player = scripted(engine, lambda prompt: Game(prompt, turns=1 + run_of(prompt)), n=3)
    records = player.make_records(["a", "b"])
    assert engine.calls == [6, 4, 2]
    assert [row.metrics["turns"] for row in records] == [1, 2, 3, 1, 2, 3]
    assert player.metrics["episode/turns"] == 2


def test_what_the_environment_says_is_context_and_what_the_model_wrote_is_trained() -> None:
    (row,) = scripted([f"four{END}", f"2{END}"], lambda prompt: Game(prompt, 2), n=1).play(["hi"])
    assert spoken(row) == [
        ("prompt", "hi"),
        ("model", f"four{END}"),
        ("observation", "[4]"),
        ("model", f"2{END}"),
    ]
    assert row.action_mask is not None and row.action_mask.int().tolist() == [1] * 5 + [0] * 3 + [1] * 2
    assert row.experience_type == "multi_turn" and row.finish_reason == "stop"
    assert row.info["last_observation"] == "[1]"
    assert row.reward == pytest.approx(0.5)
    assert row.token_level_reward is not None
    assert row.token_level_reward.tolist() == pytest.approx([0, 0, 0, 0, 0.4, 0, 0, 0, 0, 0.1])


def test_ids_are_those_of_single_turns(actor: Actor) -> None:
    prompts = [Prompt(text="the fox", eid=EID(batch=7, task="x", suffix="")), Prompt(text="yes")]
    played = Player(Game, actor=actor, n=3, seed=11, max_turns=2).make_records(prompts, max_tokens=4)
    prompts[1] = prompts[1].replace(eid=EID(batch=0, task=1, suffix=""))
    sampled = TransformersEngine(actor).generate(prompts, max_tokens=4, n=3, seed=11)
    assert [eid.uid for eid in played.eids()] == [sample.eid.uid for sample in sampled]
    assert played.values("group_size") == [3] * 6


def test_each_turn_has_a_stream_of_its_own_and_other_episodes_do_not_matter(actor: Actor) -> None:
    def make(prompts: list[Prompt], seed: int = 5) -> dict[str, list[int]]:
        player = Player(Game, actor=actor, n=4, seed=seed, max_turns=2, on_truncation="respond")
        return {row.eid.uid: row.tokens.tolist() for row in player.make_records(prompts, max_tokens=3)}

    prompts = [Prompt(text=text, eid=EID(batch=0, task=text, suffix="")) for text in ("ab", "c", "de")]
    expected = make(prompts)
    assert make(prompts) == expected
    assert make(prompts[1:2]) == {uid: row for uid, row in expected.items() if uid.startswith("0/c/")}
    assert make(prompts, seed=6).keys().isdisjoint(expected)
    engine = Counting(lambda prompt, run: f"t{END}")
    scripted(engine).make_records(["a"])
    seeds = [{seed for _, seed in call} for call in engine.prompts]
    assert all(len(stream) == 1 for stream in seeds) and len(set.union(*seeds)) == 3


def test_log_probs_are_those_of_the_model_over_the_whole_conversation(actor: Actor) -> None:
    player = Player(Game, actor=actor, seed=1, max_turns=3, on_truncation="respond")
    for row in player.make_records(["quick fox", "a"], max_tokens=5):
        assert row.action_mask is not None and row.old_logprobs is not None and row.logprobs is not None
        assert row.metrics["turns"] == 3 and row.metrics["observed_tokens"] > 0
        with torch.no_grad():
            spread = torch.log_softmax(actor.model(row.tokens[None].long()).logits[0].float(), -1)
        ids = row.tokens[row.prompt_length :].long()
        expected = spread[row.prompt_length - 1 : -1].gather(-1, ids[:, None])[:, 0]
        torch.testing.assert_close(row.old_logprobs[row.action_mask], expected[row.action_mask], atol=1e-4, rtol=0)
        torch.testing.assert_close(row.logprobs[row.action_mask], expected[row.action_mask], atol=1e-4, rtol=0)
        assert row.entropy is not None and row.advantages is not None


def test_numbers_do_not_depend_on_the_token_budget(actor: Actor) -> None:
    critic = Critic(tiny.llama(vocab=len(TOKENIZER), seed=6), value_head="normal")
    reference = Actor(tiny.llama(vocab=len(TOKENIZER), seed=5), tokenizer=TOKENIZER, trainable=False)

    def make(**options: Any) -> Any:
        player = Player(
            lambda prompt: Game(prompt, 1 + run_of(prompt)),
            actor=actor,
            models=Models(actor, reference, critic),
            algorithm={"estimator": "gae", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1", "lam": 0.9},
            seed=2,
            on_truncation="respond",
            **options,
        )
        return player.make_records(["ab", "the fox"], max_tokens=4)

    expected = make()
    assert expected[0].values is not None and expected[0].ref_logprobs is not None
    for actual_row, expected_row in zip(make(token_budget=20), expected, strict=True):
        for name in ("advantages", "returns", "values", "ref_logprobs", "old_logprobs"):
            torch.testing.assert_close(getattr(actual_row, name), getattr(expected_row, name), atol=1e-5, rtol=1e-4)
    mask = expected[1].action_mask
    assert mask is not None and not mask.all() and not expected[1].advantages[~mask].any()


# --- rewards --------------------------------------------------------------------------------------------------------


def test_advantages_compare_the_runs_of_a_task() -> None:
    class Lucky(Game):
        def respond(self, text: str) -> Reply:
            return Reply(reward=float(run_of(self.prompt)), done=True)

    player = scripted([f"t{END}"], Lucky, algorithm={"estimator": "dr_grpo"})
    records = player.make_records(["a", "b"])
    assert [row.advantages.tolist() for row in records if row.advantages is not None] == [[-0.5] * 2, [0.5] * 2] * 2
    assert player.metrics["reward/mean"] == 0.5 and player.metrics["rollout/samples"] == 4


@pytest.mark.parametrize(("rewards", "expected"), [("sum", 0.9), ("last", 0.2)])
def test_an_episode_is_worth_the_sum_of_its_turns_or_the_last(rewards: Any, expected: float) -> None:
    player = scripted([f"abcd{END}", f"xyz{END}", f"hi{END}"], rewards=rewards, n=1)
    (row,) = player.make_records(["a"])
    assert row.reward == pytest.approx(expected)


def test_what_is_not_rewarded_is_worth_nothing() -> None:
    class Silent(Game):
        def respond(self, text: str) -> Reply:
            return Reply(done=True)

    assert scripted([f"t{END}"], Silent).make_records(["a"]).values("reward") == [0.0, 0.0]


def test_a_reward_source_is_added_and_sees_what_the_model_wrote() -> None:
    seen = []

    def source(response: str, reference: str) -> float:
        seen.append((response, reference))
        return 10.0

    player = scripted([f"ab{END}", f"c{END}"], lambda prompt: Game(prompt, 2), reward=source, n=1)
    (row,) = player.make_records([Prompt(text="q", reference="r")])
    assert seen == [("ab\nc", "r")] and row.reward == pytest.approx(10.3)
    assert row.metrics["source"] == 10 and row.metrics["environment"] == pytest.approx(0.3)
    assert player.metrics["reward/source"] == 10
    assert row.info["reward_parts"] == ["environment", "source"]


@pytest.mark.parametrize("source", [None, 10.0])
def test_a_turn_is_rewarded_where_it_was_taken(source: float | None) -> None:
    """Three turns by GAE, against a plain loop; a reward of the whole episode comes on its last token."""
    critic = Critic(tiny.llama(vocab=len(TOKENIZER), seed=6), value_head="normal")
    script = [f"abcd{END}", f"xyz{END}", f"hi{END}"]
    options: dict[str, Any] = {"models": Models(critic=critic), "n": 1}
    options["algorithm"] = {"estimator": "ppo", "gamma": 0.9, "lam": 0.8}
    if source is not None:
        options["reward"] = lambda response: source
    (row,) = scripted(script, **options).make_records(["a"])
    end = source or 0.0
    assert row.action_mask is not None and row.values is not None and row.returns is not None
    assert row.reward == pytest.approx(0.9 + end)
    actions = row.action_mask.nonzero()[:, 0].tolist()
    assert len(actions) == 5 + 4 + 3
    by_turn = [0.0] * 12
    by_turn[4], by_turn[8], by_turn[11] = 0.4, 0.3, 0.2 + end
    values = row.values[actions].tolist()

    def returns(rewards: list[float]) -> list[float]:
        to_go, advantage, following = [], 0.0, 0.0
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            advantage = reward + 0.9 * following - value + 0.9 * 0.8 * advantage
            to_go.append(advantage + value)
            following = value
        return to_go[::-1]

    assert row.returns[actions].tolist() == pytest.approx(returns(by_turn), abs=1e-5)


def test_turn_rewards_of_a_ppo_episode_are_earned_at_their_turns() -> None:
    """From the record alone, as a replay or another trainer sees it; worked by hand.

    Three turns of one token, with rewards 0.25, 0.9, 0.2 and values 0.4, -1, -0.3; gamma 0.9, lam 0.8. Observations
    between turns do not count. With deltas r + gamma V' - V, and A = delta + gamma lam A', backwards:

        by turn                                   all 1.35 at the end
        delta 0.2 + 0.3            = 0.5          delta 1.35 + 0.3           = 1.65
        A 0.5,   return A + V      = 0.2          A 1.65,    return          = 1.35
        delta 0.9 - 0.27 + 1       = 1.63         delta -0.27 + 1            = 0.73
        A 1.63 + 0.72 0.5  = 1.99, return 0.99    A 0.73 + 0.72 1.65 = 1.918, return 0.918
        delta 0.25 - 0.9 - 0.4     = -1.05        delta -0.9 - 0.4           = -1.3
        A -1.05 + 0.72 1.99 = 0.3828, 0.7828      A -1.3 + 0.72 1.918 = 0.08096, 0.48096
    """
    config = AlgorithmConfig.preset("ppo", gamma=0.9, lam=0.8, kl_coef=0.0)
    record = Experience(
        eid={"batch": 0, "task": 0, "run": 0},
        tokens=[1, 2, 3, 4, 5, 6],
        prompt_length=1,
        action_mask=[True, False, True, False, True],
        reward=1.35,
        token_level_reward=[0.25, 0.0, 0.9, 0.0, 0.2],
        values=[0.4, 0.0, -1.0, 0.0, -0.3],
        logprobs=[-1.0, 0.0, -1.0, 0.0, -1.0],
    )
    for scored in (record, record.replace(reward=None)):
        by_turn = complete([scored], config)[0].returns
        assert by_turn is not None and by_turn.tolist() == pytest.approx([0.7828, 0, 0.99, 0, 0.2], abs=1e-5)
    at_end = complete([record.replace(token_level_reward=None)], config)[0].returns
    assert at_end is not None and at_end.tolist() == pytest.approx([0.48096, 0, 0.918, 0, 1.35], abs=1e-5)


def test_shaping_changes_the_sum_of_token_rewards() -> None:
    """The overlong penalty comes on the last token; runs are compared by their totals; some rows have no turns."""
    rows = [
        Experience(
            eid={"batch": 0, "task": 0, "run": run},
            tokens=[1, 2, 3, 4],
            prompt_length=1,
            action_mask=[True, False, True],
            reward=[1.0, 3.0, 2.0][run],
            token_level_reward=[[0.75, 9.0, 0.25], None, [2.0, 0.0, 0.0]][run],
            logprobs=[-1.0, 0.0, -1.0],
        )
        for run in range(3)
    ]
    plain = AlgorithmConfig.preset("reinforce++", estimator="reinforce", kl_coef=0.0)
    completed = complete(rows, plain)
    assert [row.returns.tolist() for row in completed if row.returns is not None] == [
        [1, 0, 0.25],
        [3, 0, 3],
        [2, 0, 0],
    ]
    overlong = AlgorithmConfig.preset(plain, overlong_buffer=2)  # two of at most three tokens: half of the penalty
    completed = complete(rows, overlong, max_tokens=3)
    assert completed[0].returns is not None and completed[0].returns.tolist() == [0.5, 0, -0.25]
    carried = AlgorithmConfig.preset(plain, estimator_options={"off_action_rewards": "carry"})
    assert complete(rows, carried)[0].returns.tolist() == [10, 0, 0.25]  # type: ignore[union-attr]
    compared = complete([rows[0].replace(reward=None), *rows[1:]], AlgorithmConfig.preset("dr_grpo"))
    assert compared[1].advantages is not None and compared[1].advantages.tolist() == [-2, 0, -2]


def test_remax_compares_with_the_likeliest_episode() -> None:
    script = [f"xx{END}", f"xxxx{END}", f"x{END}"]  # the likeliest comes first
    player = scripted(script, lambda prompt: Game(prompt, 1), algorithm={"estimator": "remax"})
    first, second = player.make_records(["a"])
    assert first.advantages is not None and first.advantages.tolist() == pytest.approx([0.2] * 5)
    assert second.advantages is not None and second.advantages.tolist() == pytest.approx([-0.1] * 2)


# --- limits ---------------------------------------------------------------------------------------------------------


def test_turns_run_out() -> None:
    player = scripted([f"t{END}"], max_turns=2)
    for row in player.make_records(["a"]):
        assert row.metrics["turns"] == 2 and row.finish_reason == "length"
        assert row.info["truncated"] == "turns" and row.truncate_status == "response_truncated"
        assert row.reward == pytest.approx(0.2), "what the turns were worth counts"
        assert spoken(row)[-1] == ("model", f"t{END}") and row.info["last_observation"] == "[1]"
    assert player.metrics["episode/out_of_turns"] == player.metrics["rollout/truncated"] == 1


def test_a_context_runs_out(actor: Actor) -> None:
    player = Player(Game, actor=actor, seed=1, context_limit=12, on_truncation="respond")
    for row in player.make_records(["abcd"], max_tokens=5):
        assert len(row.tokens) <= 12 and row.finish_reason == "length"
        assert row.info["truncated"] == "context"
    assert player.metrics["episode/out_of_context"] == 1
    player = Player(lambda prompt: Game(prompt, 99), actor=actor, n=1, seed=1, max_turns=99, on_truncation="respond")
    (row,) = player.make_records(["abcd"], max_tokens=64)
    assert row.info["truncated"] == "context" and 192 < len(row.tokens) <= 256, "unless given, the model's positions"


def test_a_prompt_that_fills_the_context_is_an_episode_without_turns(actor: Actor) -> None:
    player = Player(Game, actor=actor, seed=1, context_limit=4)
    records = player.make_records(["abcdefgh", "a"], max_tokens=2)
    assert records.values("finish_reason")[:2] == ["length", "length"] and records.values("reward")[:2] == [0.0, 0.0]
    assert [row.metrics["turns"] for row in records] == [0, 0, 1, 1]


@pytest.mark.parametrize(("on_truncation", "turns"), [("end", 1), ("respond", 3)])
def test_a_turn_that_is_cut_ends_the_episode_or_counts(on_truncation: Any, turns: int) -> None:
    player = scripted([Line(text="abc", finish_reason="length")], on_truncation=on_truncation)
    with pytest.warns(UserWarning, match=r"all \d+ first turns were truncated at max_tokens=\d+; raise sampling"):
        rows = player.make_records(["q"])
    for row in rows:
        assert row.metrics["turns"] == turns
        assert row.reward == pytest.approx(0 if on_truncation == "end" else 0.9)
        if on_truncation == "end":
            assert row.finish_reason == "length" and row.truncate_status == "response_truncated"
            assert row.info["truncated"] == "turn"
        else:  # the environment ended it
            assert row.finish_reason == "stop" and row.truncate_status is None and "truncated" not in row.info


# --- failures -------------------------------------------------------------------------------------------------------


class Fragile(Game):
    """Breaks in run 1, at the place its prompt names."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt, turns=2)
        self._break("made")

    def _break(self, place: str) -> None:
        if run_of(self.prompt) == 1 and self.prompt.label == place:
            raise OSError(f"no {place}")

    def begin(self) -> str | None:
        self._break("begin")
        return None

    def respond(self, text: str) -> Any:
        self._break("first" if self.left == 2 else "second")
        if run_of(self.prompt) == 1 and self.prompt.label == "odd":
            return "not a reply"
        return super().respond(text)

    def close(self) -> None:
        self._break("close")


@pytest.mark.parametrize("place", ["made", "begin", "first", "second", "odd"])
def test_an_environment_that_breaks_costs_its_own_run(actor: Actor, place: str) -> None:
    player = Player(Fragile, actor=actor, n=3, seed=1, algorithm={"estimator": "dr_grpo"}, on_truncation="respond")
    rows = player.make_records([Prompt(text="ab", label=place), Prompt(text="cd")], max_tokens=3)
    broken = rows[1]
    assert math.isnan(broken.reward) and broken.finish_reason == "error"
    assert "environment" in broken.info["error"] and "no reward" in broken.info["reward_error"]
    assert broken.action_mask is not None and not broken.action_mask.any()
    assert broken.advantages is not None and not broken.advantages.any()
    complete_rows = [row for i, row in enumerate(rows) if i != 1]
    assert all(row.metrics["turns"] == 2 and math.isfinite(row.reward) for row in complete_rows)
    assert sum(float(row.advantages[0]) for row in (rows[0], rows[2])) == pytest.approx(0, abs=1e-6)
    assert player.metrics["episode/environment_errors"] == 1 and player.metrics["rollout/failed"] == 1


def test_environments_are_closed_and_closing_may_fail() -> None:
    environments: list[Fragile] = []

    def environment(prompt: Prompt) -> Fragile:
        environments.append(Fragile(prompt))
        return environments[-1]

    rows = scripted([f"t{END}"], environment).make_records([Prompt(text="a", label="close")])
    assert all(math.isfinite(row.reward) for row in rows) and len(environments) == 2
    games: list[Game] = []
    scripted([RuntimeError("down"), f"t{END}"], lambda prompt: games.append(Game(prompt)) or games[-1]).make_records(
        ["a"]
    )
    assert all(game.closed for game in games)


def test_a_turn_that_fails_is_its_run_s() -> None:
    def script(prompt: Prompt, run: int) -> Any:
        long = len(prompt.token_ids or ()) > 1
        return RuntimeError("down") if long and run_of(prompt) == 1 else f"t{END}"

    rows = scripted(script, lambda prompt: Game(prompt, 2)).make_records(["a"])
    assert [row.finish_reason for row in rows] == ["stop", "error"]
    assert math.isnan(rows[1].reward) and "down" in rows[1].info["error"] and rows[1].metrics["turns"] == 1


def test_a_prompt_that_cannot_be_rendered_is_that_prompts_failure() -> None:
    player = scripted([f"t{END}"], lambda prompt: Game(prompt, 1), algorithm={"estimator": "dr_grpo"})
    broken = Prompt(messages=[{"role": "user", "content": "x"}], label="no")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TOKENIZER, "chat_template", "{{ raise_exception('never') }}")
        rows = player.make_records([broken, "a"])
    assert [row.finish_reason for row in rows] == ["error", "error", "stop", "stop"]
    assert "never" in rows[0].info["error"] and math.isnan(rows[0].reward)
    assert rows.eids()[0].rid == "0/0/0" and rows.eids()[1].rid == "0/0/1"


def test_all_failing_is_said() -> None:
    with pytest.warns(UserWarning, match="all 2 failed; the first: environment: ZeroDivisionError"):
        rows = scripted([f"t{END}"], lambda prompt: 1 / 0).make_records(["a"])
    assert all(math.isnan(row.reward) for row in rows)


# --- forms ----------------------------------------------------------------------------------------------------------


def test_chats_tools_and_what_comes_before_the_first_turn() -> None:
    class Shop(Game):
        def begin(self) -> Any:
            return "welcome"

        def respond(self, text: str) -> Reply:
            self.left -= 1
            return Reply({"role": "tool", "content": "5"} if self.left == 2 else "more", done=self.left == 0)

    prompt = Prompt(messages=[{"role": "system", "content": "buy"}])
    (row,) = scripted([f"one{END}", f"two{END}", f"three{END}"], Shop, n=1).play([prompt])
    assert row.messages is not None
    assert [(message["role"], message["content"]) for message in row.messages] == [
        ("system", "buy"),
        ("user", "welcome"),
        ("assistant", "one"),
        ("tool", "5"),
        ("assistant", "two"),
        ("user", "more"),
        ("assistant", "three"),
    ]
    assert spoken(row)[0] == ("prompt", "<|system|>buy<|end|><|user|>welcome<|end|><|assistant|>")
    assert spoken(row)[2] == ("observation", "<|tool|>5<|end|><|assistant|>")


def test_environments_that_wait_can_wait_together() -> None:
    barrier = threading.Barrier(4, timeout=60)

    class Slow(Game):
        def respond(self, text: str) -> Reply:
            barrier.wait()
            return super().respond(text)

    rows = scripted([f"t{END}"], Slow, workers=4, n=4).make_records(["a"])
    assert [row.metrics["turns"] for row in rows] == [3] * 4


def test_play_gives_rewards_alone(actor: Actor) -> None:
    player = Player(Game, actor=actor, n=4, seed=1, max_turns=2)
    rows = player.play(["ab"], n=1, max_tokens=3)
    assert len(rows) == 1 and rows[0].old_logprobs is None and rows[0].advantages is None
    assert "policy/seconds" not in player.metrics and "kl/mean" not in player.metrics
    assert player.metrics["environment/seconds"] >= 0 and player.metrics["rollout/tokens"] > 0
    actor.train()
    player.make_records(["ab"], max_tokens=3)
    assert actor.training, "to be trained after this"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": "mean"}, "rewards: got 'mean'"),
        ({"on_truncation": "stop"}, "on_truncation: got 'stop'"),
        ({"max_turns": 0}, "max_turns: got 0"),
        ({"workers": 0}, "workers: got 0"),
        ({"context_limit": 0}, "context_limit: got 0"),
        ({"episode": {"on_frok": "keep"}}, "did you mean 'on_fork'"),
        ({"environment": 3}, "environment: got int"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    environment = options.pop("environment", Game)
    with pytest.raises(ValueError, match=message):
        scripted(["t"], environment, **options)


def test_what_a_call_refuses() -> None:
    player = scripted([f"t{END}"])
    with pytest.raises(ValueError, match="max_prompt_tokens: .*context_limit"):
        player.make_records(["a"], max_prompt_tokens=4)
    with pytest.raises(ValueError, match="tokenizer: missing"):
        Player(Game, engine=ScriptedEngine([[1]])).make_records(["a"])
    for reply in (
        {"reward": math.nan, "done": True},
        {"reward": "1", "done": True},
        {"reward": math.inf, "done": True},
    ):
        with pytest.raises(ValueError, match="reward: got"):
            Reply(**reply)
    with pytest.raises(ValueError, match="observation: missing"):
        Reply()
