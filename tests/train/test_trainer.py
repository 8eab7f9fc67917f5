"""`Trainer` from Python: KL in the reward, failures, records without a reward."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import rollbook
from rollbook import Experience, Experiences
from rollbook.algorithms import LOSSES
from rollbook.algorithms.results import Loss
from rollbook.book import ConflictError, ConnectionLostError, Lease, OutcomeUnknownError, trained_steps
from rollbook.models import Actor, Critic
from rollbook.rollout import EnvironmentConfig, ScriptedEngine, TransformersEngine
from rollbook.train import pipeline
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.checkpoint import CheckpointConfig
from rollbook.train.learner import Learner
from rollbook.train.prompts import Prompts
from rollbook.train.step_replay import trace_step
from rollbook.train.trainer import AllSamplesFailedError, Trainer
from tests import tiny
from tests.train.stages import complete
from tests.train.test_episodes import Game
from tests.train.test_learner import equal
from tests.train.test_reference import weights

KL = AlgorithmConfig.preset("grpo", group_size=4, kl_coef=2.0, kl_in="reward", kl_estimator="k1")


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


def reward(response_ids: list[int]) -> float:
    return response_ids[0] / 32


def trainer(actor: Actor, algorithm: AlgorithmConfig, **options: Any) -> Trainer:
    prompts = Prompts([{"prompt": [5, 6]}, {"prompt": [7]}])
    settings = {"prompts": prompts, "reward": reward, "sampling": {"max_tokens": 3}, "prompts_per_step": 2, **options}
    return Trainer(actor, algorithm, rollbook.open("memory:"), **settings)


# --- KL in the reward -------------------------------------------------------------------------------------------------


def test_the_kl_is_taken_off_the_reward() -> None:
    """Of a reward r on the last token and of penalties 2 (log p - log ref), group by group, written out."""
    actor, reference = models()
    run = trainer(actor, KL, reference=reference)
    report = run.step()
    assert report["reward/kl_coef"] == 2.0 and abs(report["reward/kl"]) > 0.1
    rows = run.book.get(report.uids)
    for row in rows:
        rewards = torch.tensor([mate.reward for mate in rows if mate.eid.tid == row.eid.tid])
        score = (row.reward - rewards.mean()) / (rewards.std() + 1e-6)
        penalties = 2.0 * (row.old_logprobs - row.ref_logprobs)
        expected = [float(score - penalties[i:].sum()) for i in range(len(penalties))]
        assert row.advantages.tolist() == pytest.approx(expected, abs=1e-4)
    divergences = torch.cat([row.old_logprobs - row.ref_logprobs for row in rows])
    assert report["kl"] == pytest.approx(float(divergences.mean()), abs=1e-5)


def test_a_reference_that_is_needed_is_the_actor_as_it_is() -> None:
    actor, _ = models()
    run = trainer(actor, KL)
    report = run.step()
    assert report["reward/kl"] == pytest.approx(0, abs=1e-6) and report["kl"] == pytest.approx(0, abs=1e-6)
    assert abs(run.step()["kl"]) > 0
    with pytest.raises(ValueError, match=r"algorithm.kl_coef: got -1"):
        AlgorithmConfig.preset(KL, kl_coef=-1.0)


def test_a_penalty_without_a_reference_is_not_silent() -> None:
    records = Experiences(scored([1.0, 0.0]))
    with pytest.raises(ValueError, match="reference: missing, required to compute 'ref_logprobs'"):
        pipeline.annotate(records, KL, pipeline.Models(models()[0]))
    with pytest.raises(ValueError, match="ref_logprobs: missing, required because algorithm.kl_in is 'reward'"):
        pipeline.estimate(records, KL)


def test_what_does_not_fit_together_is_refused() -> None:
    actor, _ = models()
    for options, message in (
        ({"reward": None}, r"reward: missing, required by grpo \(grpo\), unless there is an environment"),
        ({"prompts": None}, "prompts: missing"),
        ({"sampling": {"n": 3}}, "sampling.n: got 3, expected algorithm.group_size, 4"),
        ({"sampling": {"gamma": 0.5}}, "unknown option 'gamma'"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(actor, KL, **options)
    with pytest.raises(ValueError, match=r"algorithm.group_size: got 1, and rloo \(rloo\) compares the responses"):
        trainer(actor, AlgorithmConfig.preset("rloo", group_size=1))
    with pytest.raises(ValueError, match=r"algorithm.kl_coef: got -1"):
        AlgorithmConfig(kl_coef=-1.0)
    with pytest.warns(UserWarning, match=r"samples are drawn at 0.5 and the actor's log-probs are at 1"):
        trainer(actor, KL, sampling={"temperature": 0.5})


def test_episodes_are_trained_with_the_kl_in_the_reward() -> None:
    actor = Actor(tiny.llama(vocab=len(tiny.bytes_())), tokenizer=tiny.bytes_())
    environment = EnvironmentConfig(factory=Game, max_turns=2, on_truncation="respond")
    prompts = Prompts([{"prompt": "ab"}, {"prompt": "c"}])
    run = trainer(actor, KL, prompts=prompts, reward=None, environment=environment)
    assert run.max_response_tokens == 6
    report = run.step()
    assert report["reward/kl_coef"] == 2.0 and report["episode/turns"] == 2
    assert all(row.experience_type == "multi_turn" for row in run.book.get(report.uids))


@pytest.mark.parametrize("broken", ["reward", "engine"])
def test_a_step_in_which_everything_failed_is_an_error(broken: str) -> None:
    def fails(response_ids: list[int]) -> float:
        raise OSError("no server")

    options: dict[str, Any] = {"reward": fails}
    if broken == "engine":
        options = {"engine": ScriptedEngine([RuntimeError("down")])}
    actor, _ = models()
    run = trainer(actor, AlgorithmConfig.preset("grpo", group_size=2, kl_coef=0.0), **options)
    with (
        warnings.catch_warnings(),
        pytest.raises(AllSamplesFailedError, match="all 4 samples failed, or have no reward"),
    ):
        warnings.simplefilter("ignore")
        run.step()
    rows = list(run.book)
    assert len(rows) == 4 and all(math.isnan(row.reward) for row in rows), "the book says what happened"
    assert all(not row.advantages.any() for row in rows)


def test_a_sample_that_failed_is_excluded() -> None:
    def sometimes(response_ids: list[int], eid: Any) -> float:
        if eid.run == 1:
            raise OSError("no server")
        return float(eid.run)

    actor, _ = models()
    run = trainer(actor, AlgorithmConfig.preset("dr_grpo", group_size=3), reward=sometimes)
    report = run.step()
    assert report["excluded/no_reward"] == 2 and report["reward/errors"] == 2 and report["reward"] == 1.0
    for row in run.book.get(report.uids):
        expected = {0: -1.0, 1: 0.0, 2: 1.0}[row.eid.run]
        assert row.advantages.tolist() == [expected] * len(row.advantages)
        assert ("reward_error" in row.info) == (row.eid.run == 1)


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
    run = Trainer(models()[0], AlgorithmConfig.preset("grpo"), book, prompts_per_step=1)
    acknowledge, failures = Lease.ack, [ConnectionLostError("no server"), OutcomeUnknownError("no answer")]

    def ack(lease: Lease, *args: Any, **options: Any) -> int:
        count = acknowledge(lease, *args, **options)
        if failures:
            raise failures.pop()
        return count

    monkeypatch.setattr(Lease, "ack", ack)
    with pytest.warns(UserWarning, match="book not responding, retrying: no"):
        assert run.step().step == 1
    assert not failures and trained_steps(book) == {"0/0/0/0/": [1], "0/0/1/0/": [1]}


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_record_without_a_reward_is_as_if_it_were_not_there(missing: float | None) -> None:
    """In loss, divergence and weights; and the ledger says so, and if nobody scored it a warning, too."""
    actor, reference = models()
    algorithm = AlgorithmConfig.preset("grpo", kl_coef=0.1)
    other = Learner(copy.deepcopy(actor), algorithm)
    expected = other.update(complete(scored([1.0, 0.0]), algorithm, reference=reference), step=1)
    book = rollbook.open("memory:")
    book.append(scored([1.0, 0.0, missing]))
    run = Trainer(actor, algorithm, book, prompts_per_step=1, reference=reference)
    if missing is None:
        with pytest.warns(UserWarning, match=r"reward: missing for 1 of 3 records \(0/0/2/0/\)"):
            report = run.step()
    else:
        report = run.step()
    for name in ("loss", "kl", "grad_norm", "rows"):
        assert report[name] == pytest.approx(expected.metrics[name], rel=1e-6), name
    assert equal(weights(actor), weights(other.actor))
    assert report["excluded/no_reward"] == 1 and report["reward"] == 0.5
    traced = trace_step(book, 1)
    places = dict(zip(traced.uids, traced.placements, strict=True))
    assert places["0/0/2/0/"] == {"excluded": "no reward"} and places["0/0/0/0/"]["weight"] == 0.5


# --- mistakes of a first script ---------------------------------------------------------------------------------------


def test_a_second_run_in_the_same_book_says_how_to_continue() -> None:
    book, prompts = rollbook.open("memory:"), Prompts([{"prompt": [5, 6]}, {"prompt": [7]}])
    options: dict[str, Any] = {"prompts": prompts, "reward": reward, "sampling": {"max_tokens": 3}}
    Trainer(models()[0], KL, book, optimizer={"lr": 1e-2}, prompts_per_step=2, **options).run(2)
    again = Trainer(models()[0], KL, book, optimizer={"lr": 1e-1}, prompts_per_step=2, **options)
    with pytest.warns(UserWarning, match="in the book already, from an earlier run with this seed"):
        again.run(1)
    with pytest.raises(ConflictError, match="step 2: .* pass its folder as checkpoints; .* open another book"):
        again.step()


def test_checkpoints_may_be_a_folder_and_the_optimizer_a_mapping(tmp_path: Path) -> None:
    built = trainer(models()[0], KL, checkpoints=str(tmp_path), optimizer={"lr": 1e-2})
    assert built.checkpoints == CheckpointConfig(tmp_path) and built.learner.optimizer.config.lr == 1e-2
    with pytest.raises(ValueError, match="optimizer: unknown option 'learning_rate'; did you mean 'lr'"):
        trainer(models()[0], KL, optimizer={"learning_rate": 1e-2})
    with pytest.raises(ValueError, match="optimizer: got float, expected OptimizerConfig or a mapping"):
        trainer(models()[0], KL, optimizer=1e-2)


@pytest.fixture
def unweighted() -> Any:
    """A custom loss without the option `weights`, and one without `denominators`."""

    def loss(
        new_logprobs: Any, old_logprobs: Any, advantages: Any, mask: Any = None, *, denominators: Any = None
    ) -> Loss:
        value = (
            (new_logprobs * advantages * mask).sum() if isinstance(mask, torch.Tensor) else new_logprobs.values.sum()
        )
        return Loss(value, {})

    def bare(new_logprobs: Any, mask: Any = None) -> Loss:
        return Loss(new_logprobs.sum(), {})

    LOSSES.register("unweighted", source="a test")(loss)
    LOSSES.register("bare", source="a test")(bare)
    yield
    LOSSES.unregister("unweighted")
    LOSSES.unregister("bare")


def test_a_loss_that_cannot_apply_weights_is_refused_where_there_are_some(unweighted: None) -> None:
    plain = AlgorithmConfig.preset("grpo", group_size=4, kl_coef=0.0, loss="unweighted")
    assert trainer(models()[0], plain).step()["records"] == 8
    with pytest.raises(ValueError, match="algorithm.correction: the loss 'unweighted' has no option 'weights'"):
        AlgorithmConfig.preset(plain, correction={})
    with pytest.raises(ValueError, match="algorithm.loss: 'bare' has no option 'denominators'"):
        AlgorithmConfig.preset(plain, loss="bare")
    learner = Learner(models()[0], plain)
    records = Experiences(
        Experience(tokens=[1, 2, 3], prompt_length=1, old_logprobs=[-1.0, -1.0], advantages=[a, a], loss_weights=[w, w])
        for a, w in ((1.0, 1.0), (-1.0, 0.5))
    )
    with pytest.raises(
        ValueError, match="loss 'unweighted': has no option 'weights', and the records have loss weights"
    ):
        learner.update(records, step=1)


def test_an_unknown_loss_says_that_custom_ones_are_registered_first() -> None:
    message = "algorithm.loss: unknown name 'cipso'; did you mean 'cispo'.* must be registered before"
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.preset("grpo", loss="cipso")


# --- models and engines of others -------------------------------------------------------------------------------------


class ForeignModel:
    """What `Trainable` and both model protocols share, and nothing else: not a module, no configuration."""

    device, dtype, packs_cheaply = torch.device("cpu"), torch.float32, False

    def __init__(self, model: torch.nn.Module) -> None:
        self.hidden = model
        self.train, self.state_dict = model.train, model.state_dict
        self.load_state_dict, self.named_parameters = model.load_state_dict, model.named_parameters


class ForeignPolicy(ForeignModel):
    pad_token_id = 0

    def token_stats(self, batch: Any, *, entropy: bool = False) -> Any:
        return self.hidden.token_stats(batch, entropy=entropy)

    def reference(self) -> ForeignPolicy:
        return ForeignPolicy(copy.deepcopy(self.hidden).requires_grad_(False))


class ForeignCritic(ForeignModel):
    def token_values(self, batch: Any) -> Any:
        return self.hidden.token_values(batch)


class ForeignEngine:
    def __init__(self, engine: TransformersEngine) -> None:
        self.hidden = engine

    def generate(self, prompts: Any, sampling: Any) -> Any:
        return self.hidden.generate(prompts, sampling)


def test_foreign_models_and_engines_train_save_and_resume(tmp_path: Path) -> None:
    algorithm = AlgorithmConfig.preset("ppo", group_size=2, kl_coef=0.1, kl_in="loss")

    def run(folder: str, steps: int, foreign: bool = True) -> tuple[Trainer, dict[str, torch.Tensor]]:
        actor, _ = models()
        engine: Any = TransformersEngine(actor)
        policy: Any = ForeignPolicy(actor) if foreign else actor
        critic: Any = Critic(copy.deepcopy(actor.model), value_head="zeros")
        hidden = {**actor.state_dict(), **critic.state_dict()}
        built = Trainer(
            policy,
            algorithm,
            rollbook.open(tmp_path / folder / "book"),
            prompts=Prompts([{"prompt": [5, 6]}, {"prompt": [7]}]),
            reward=reward,
            sampling={"max_tokens": 3},
            prompts_per_step=2,
            engine=ForeignEngine(engine) if foreign else engine,
            critic=ForeignCritic(critic) if foreign else critic,
            optimizer={"lr": 1e-2},
            checkpoints=tmp_path / folder,
        )
        built.run(steps)
        built.book.close()
        return built, hidden

    _, own_weights = run("own", 3, foreign=False)
    _, uninterrupted = run("whole", 3)
    run("cut", 2)
    resumed, continued = run("cut", 3)
    assert resumed.resumed_from == 2
    for name, weight in uninterrupted.items():
        assert torch.equal(weight, own_weights[name]) and torch.equal(weight, continued[name])


def test_what_a_model_lacks_is_named() -> None:
    actor, _ = models()
    policy = ForeignPolicy(actor)
    with pytest.raises(ValueError, match="actor: got Linear, .*Policy such as Actor; it lacks token_stats, device, "):
        trainer(torch.nn.Linear(1, 1), KL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="critic: got ForeignPolicy, .*Critic; it lacks token_values$"):
        trainer(policy, AlgorithmConfig.preset("ppo"), critic=policy, engine=ScriptedEngine([[1]]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="teacher: got ForeignCritic, .*Actor; it lacks token_stats$"):
        trainer(policy, KL, teacher=ForeignCritic(actor))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="engine: missing, required by grpo with a ForeignPolicy"):
        trainer(policy, KL)  # type: ignore[arg-type]
    policy.reference = None  # type: ignore[assignment, method-assign]
    with pytest.raises(ValueError, match=r"reference: missing, required by grpo; ForeignPolicy has no reference\(\)"):
        trainer(policy, KL)  # type: ignore[arg-type]
