"""`Trainer` from Python: one algorithm for maker and learner, KL in the reward, records without a reward."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import rollbook
from rollbook import Experience
from rollbook.book import ConnectionLostError, Lease, OutcomeUnknownError, trained_steps
from rollbook.compat.lightrft.maker import NaiveExperienceMaker
from rollbook.models import Actor
from rollbook.train.algorithm import Algorithm
from rollbook.train.completing import complete, maker_config
from rollbook.train.data import Prompts
from rollbook.train.episodes import EpisodeMaker
from rollbook.train.learner import Learner
from rollbook.train.retracing import trace
from rollbook.train.trainer import Trainer
from tests import tiny
from tests.train.test_episodes import Game
from tests.train.test_learner import equal
from tests.train.test_reference import weights

KL = Algorithm.of("grpo", n=4, kl_coef=2.0, kl_in="reward", kl_estimator="k1")


def models() -> tuple[Actor, Actor]:
    """An actor, and a reference that it is not."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        actor = Actor(config)
        reference = actor.reference()
        with torch.no_grad():
            for parameter in actor.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return actor, reference


def maker(actor: Actor, algorithm: Algorithm, initial_model: Any = None, kl: Any = None, **changes: Any) -> Any:
    config = dataclasses.replace(maker_config(algorithm, seed=0), **changes)
    return NaiveExperienceMaker(
        actor,
        None,
        None,
        initial_model,
        None,
        8,
        kl,
        config=config,
        reward_fn=lambda response_ids: response_ids[0] / 32,
    )


def trainer(actor: Actor, made: Any, algorithm: Algorithm, **options: Any) -> Trainer:
    given = {"generate": {"max_tokens": 3}, "groups": 2, **options}
    prompts = Prompts([{"prompt": [5, 6]}, {"prompt": [7]}])
    return Trainer(actor, made, rollbook.open("memory:"), algorithm, prompts=prompts, **given)


# --- KL in the reward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["trainer", "maker", "both"])
def test_the_kl_is_taken_off_the_reward_wherever_the_reference_is_given(where: str) -> None:
    """Of a reward r on the last token and of penalties 2 (log p - log ref), group by group, written out."""
    actor, reference = models()
    mine = maker(actor, KL, reference if where != "trainer" else None)
    run = trainer(actor, mine, KL, **({"reference": reference} if where != "maker" else {}))
    assert run.reference is reference and mine.initial_model is reference
    report = run.step()
    assert report["reward/kl_coef"] == 2.0 and abs(report["reward/kl"]) > 0.1
    rows = run.book.get(report.uids)
    for row in rows:
        rewards = torch.tensor([one.reward for one in rows if one.eid.tid == row.eid.tid])
        score = (row.reward - rewards.mean()) / (rewards.std() + 1e-6)
        penalties = 2.0 * (row.policy_logprobs - row.ref_logprobs)
        expected = [float(score - penalties[i:].sum()) for i in range(len(penalties))]
        assert row.advantages.tolist() == pytest.approx(expected, abs=1e-4)
    divergences = torch.cat([row.policy_logprobs - row.ref_logprobs for row in rows])
    assert report["kl"] == pytest.approx(float(divergences.mean()), abs=1e-5)


def test_a_penalty_without_a_reference_is_not_silent() -> None:
    actor, _ = models()
    with pytest.raises(ValueError, match=r"initial_model: got None.*kl_coef is 2"):
        maker(actor, KL).make_records([[5, 6]], max_tokens=2)
    plain = maker(actor, KL, kl=0.5, kl_coef=None)
    with pytest.warns(UserWarning, match=r"kl_controller: got 0.5, and no initial_model"):
        plain.make_records([[5, 6]], max_tokens=2)
    with pytest.raises(ValueError, match=r"algorithm.kl_coef: got -1"):
        Algorithm.of(KL, kl_coef=-1.0)


@pytest.mark.parametrize(
    ("algorithm", "changes", "options", "said"),
    [
        (KL, {"kl_coef": 1.0}, {}, r"kl_coef \(in the reward\) 1.0.*expected the algorithm's, 2.0"),
        (KL, {"use_kl_loss": True}, {}, r"kl_coef \(in the reward\) 0.0"),
        (KL, {"kl_estimator": "k3"}, {}, "kl_estimator 'k3'"),
        (Algorithm.of("grpo", kl_coef=0.0), {"advantage_estimator": "rloo"}, {}, "advantage_estimator 'rloo'"),
        (Algorithm.of("grpo", kl_coef=0.0), {"estimator_options": {"eps": 1.0}}, {}, "estimator_options {'eps': 1.0}"),
        (Algorithm.of("grpo", kl_coef=0.0), {}, {"generate": {"gamma": 0.5}}, "gamma 0.5"),
        (Algorithm.of("grpo", kl_coef=0.0), {"n_samples_per_prompt": 3}, {}, "n_samples_per_prompt 3"),
        (Algorithm.of("grpo", overlong_buffer=2), {"overlong_buffer": False}, {}, "overlong_buffer None"),
    ],
)
def test_a_maker_that_contradicts_the_algorithm_is_refused(
    algorithm: Algorithm, changes: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    actor, reference = models()
    with pytest.raises(ValueError, match=f"maker: got {said}"):
        trainer(actor, maker(actor, algorithm, reference, **changes), algorithm, **options)


def test_two_coefficients_or_two_references_are_refused() -> None:
    actor, reference = models()
    assert maker(actor, KL, reference, kl=2.0).kl_coef == 2.0
    with pytest.raises(ValueError, match=r"kl_controller: got 3, expected None, or config.kl_coef, 2"):
        maker(actor, KL, reference, kl=3.0)
    with pytest.raises(ValueError, match="reference: got another model than the maker's initial_model"):
        trainer(actor, maker(actor, KL, reference), KL, reference=actor.reference())


def test_a_maker_of_episodes_is_held_to_the_algorithm() -> None:
    actor = Actor(tiny.llama(vocab=len(tiny.bytes_())), tokenizer=tiny.bytes_())
    episodes = EpisodeMaker(actor, Game, config=maker_config(KL), max_turns=2)
    run = trainer(actor, episodes, KL)
    assert episodes.initial_model is run.reference and episodes.kl_coef == 2.0
    with pytest.raises(ValueError, match="maker: got advantage_estimator 'grpo', expected the algorithm's, 'rloo'"):
        trainer(actor, episodes, Algorithm.of("rloo", n=4, kl_coef=2.0, kl_in="reward", kl_estimator="k1"))


# --- records without a reward -----------------------------------------------------------------------------------------


def scored(rewards: list[float | None]) -> list[Experience]:
    return [
        Experience(
            eid={"batch": 0, "task": 0, "run": i, "suffix": ""},
            tokens=[1, 2, 3 + i, 4],
            prompt_length=2,
            reward=reward,
            logprobs=[-3.0, -3.5],
            group_size=len(rewards),
        )
        for i, reward in enumerate(rewards)
    ]


def test_a_step_is_acknowledged_again_while_the_server_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    book = rollbook.open("memory:")
    book.append(scored([1.0, 0.0]))
    run = Trainer(models()[0], None, book, Algorithm.of("grpo"), groups=1)
    acknowledge, failures = Lease.ack, [ConnectionLostError("no server"), OutcomeUnknownError("no answer")]

    def ack(lease: Lease, *args: Any, **options: Any) -> int:
        count = acknowledge(lease, *args, **options)
        if failures:
            raise failures.pop()
        return count

    monkeypatch.setattr(Lease, "ack", ack)
    with pytest.warns(UserWarning, match="step 1 is not acknowledged yet: no"):
        assert run.step().step == 1
    assert not failures and trained_steps(book) == {"0/0/0/0/": [1], "0/0/1/0/": [1]}


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_record_without_a_reward_is_as_if_it_were_not_there(missing: float | None) -> None:
    """In loss, divergence and weights; and the ledger says so, and if nobody scored it a warning, too."""
    actor, reference = models()
    algorithm = Algorithm.of("grpo", kl_coef=0.1)
    other = Learner(copy.deepcopy(actor), algorithm)
    expected = other.learn(complete(scored([1.0, 0.0]), algorithm, reference=reference), step=1)
    book = rollbook.open("memory:")
    book.append(scored([1.0, 0.0, missing]))
    run = Trainer(actor, None, book, algorithm, groups=1, reference=reference)
    if missing is None:
        with pytest.warns(UserWarning, match=r"reward: 1 of 3 records have none \(0/0/2/0/\)"):
            report = run.step()
    else:
        report = run.step()
    for name in ("loss", "kl", "grad_norm", "rows"):
        assert report[name] == pytest.approx(expected.metrics[name], rel=1e-6), name
    assert equal(weights(actor), weights(other.actor))
    assert report["left_out/no_reward"] == 1 and report["reward"] == 0.5
    traced = trace(book, 1)
    places = dict(zip(traced.uids, traced.places, strict=True))
    assert places["0/0/2/0/"] == {"left_out": "no reward"} and places["0/0/0/0/"]["weight"] == 0.5
