"""`Trainer.save` and `Trainer.resume` from Python, with everything that has a state of its own: adapters, a critic,
float32 copies, a reference, replays, dropped groups, an expert's records, running norms, dropout, random rewards.

Each run dies in a step after a checkpoint, and another trainer, made anew from other weights, goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

import rollbook
from rollbook import EID, Experience
from rollbook.book import disk, trained_steps
from rollbook.book.book import Book
from rollbook.models import Actor, Critic
from rollbook.train import checkpoint
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.checkpoint import CheckpointConfig
from rollbook.train.learner import MinibatchConfig
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.prompts import Prompts
from rollbook.train.recipes import letters
from rollbook.train.replay_config import ReplayConfig
from rollbook.train.trainer import OutOfDataError, Trainer
from tests.train.lineage import equal, ledger, misplaced, timeless

ROWS = 10
Setting = dict[str, Any]


class Died(BaseException):
    """As if the process had been killed here."""


@pytest.fixture(autouse=True)
def unwatched() -> Any:
    yield
    disk.watch_failpoints(None)


def dying(point: str, times: int) -> Callable[[str], None]:
    """Die when a point is reached so many times."""
    left = times

    def reached(name: str) -> None:
        nonlocal left
        left -= name == point
        if name == point and not left:
            raise Died(point)

    return reached


def llama(seed: int, dropout: float = 0.0, **options: Any) -> Actor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=60,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
            initializer_range=0.3,
            attention_dropout=dropout,
            eos_token_id=1,
        )
        return Actor(config, **options)


def by_ids(response_ids: list[int]) -> float:
    return (sum(response_ids) % 5) / 4


def by_chance(response_ids: list[int]) -> float:
    """As rewards of the user's may be: asking the generators that everybody shares."""
    return random.random() + float(np.random.random()) + len(response_ids)


def rarely(response_ids: list[int]) -> float:
    """Most groups are constant."""
    return float(response_ids[0] % 6 == 0)


def expert_book(folder: Path) -> Book:
    book = rollbook.open(folder / "expert")
    rows = [
        Experience(eid=EID(batch="expert", task=i, suffix=""), tokens=[2, 3 + i, 5, 7, 1], prompt_length=2, reward=1.0)
        for i in range(7)
    ]
    book.append(rows)
    return book


def prompts(with_ids: bool = False) -> Prompts:
    """Ten rows; with answers that are given, or to be answered."""
    if with_ids:
        answers = [{"response": f"cb{i}", "chosen": f"ab{i}", "rejected": "ba"} for i in range(ROWS)]
        return Prompts([{"prompt": f"{i}>", **answer} for i, answer in enumerate(answers)], seed=3)
    return Prompts([{"prompt": [2, 3 + i]} for i in range(ROWS)], seed=3)


def trainer(folder: Path, setting: Setting, weights: int = 0) -> Trainer:
    """A trainer of a setting, whose weights are those of this seed until it resumes."""
    settings = {"algorithm": "grpo", "changes": {}, "reward": by_ids, **setting}
    algorithm = AlgorithmConfig.preset(settings["algorithm"], **{"kl_coef": 0.0, **settings["changes"]})
    algorithm = (
        algorithm
        if algorithm.estimator is None or algorithm.group_size > 1
        else AlgorithmConfig.preset(algorithm, group_size=2)
    )
    options = {name: settings[name] for name in ("precision", "replay", "minibatch") if name in settings}
    short = torch.bfloat16 if settings.get("precision") == "bfloat16" else None
    actor = llama(weights, settings.get("dropout", 0.0), lora=settings.get("lora"), dtype=short)
    if algorithm.needs_critic:
        with torch.random.fork_rng():
            torch.manual_seed(weights + 100)
            options["critic"] = Critic(llama(weights + 7, dtype=short).model, value_head="normal")
    reference = actor.reference() if algorithm.needs_reference and settings.get("given_reference") else None
    if algorithm.estimator is None:
        actor.tokenizer = letters.tokenizer()
    if algorithm.mixed:
        has_expert = (folder / "expert").exists()
        options["expert"] = rollbook.open(folder / "expert") if has_expert else expert_book(folder)
    return Trainer(
        actor,
        algorithm,
        rollbook.open(folder / "book"),
        prompts=prompts(with_ids=algorithm.estimator is None),
        reward=settings["reward"] if algorithm.estimator is not None else None,
        prompts_per_step=3,
        sampling={"max_tokens": 5} if algorithm.estimator is not None else None,
        optimizer=OptimizerConfig(lr=0.01, warmup_steps=2),
        seed=3,
        checkpoints=CheckpointConfig(folder, interval=settings.get("interval", 0), keep_last=settings.get("keep_last")),
        reference=reference,
        **{"minibatch": MinibatchConfig(minibatches=2), **options},
    )


def state(built: Trainer) -> dict[str, Any]:
    """All that a trainer has come to."""
    parts = {
        "weights": dict(built.actor.state_dict()),
        "learner": built.learner.state_dict(),
        "prompts": None if built.prompts is None else built.prompts.state_dict(),
        "global_step": built.global_step,
        "random": checkpoint.random_state(),
        **ledger(built.book),
    }
    if built.models.critic is not None:
        parts["critic"] = dict(built.models.critic.state_dict())
    if isinstance(built.models.reference, Actor):
        parts["reference"] = dict(built.models.reference.state_dict())
    return parts


def seeded() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


REPLAY = {"kind": "replay", "reuse": 3, "max_staleness": 3, "rollout_interval": 2}
SETTINGS: dict[str, Setting] = {
    "reference in the reward": {"changes": {"kl_coef": 0.1, "kl_in": "reward"}},
    "adapters": {"lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}, "changes": {"kl_coef": 0.1}},
    "critic": {"algorithm": "ppo", "changes": {"critic_warmup": 1}},
    "bfloat16 critic": {"algorithm": "ppo", "precision": "bfloat16"},
    "autocast": {"precision": "autocast", "dropout": 0.3, "minibatch": MinibatchConfig(minibatches=2, epochs=2)},
    "random rewards": {"reward": by_chance, "changes": {"reward_norm": "mean_std"}},
    "dropped groups": {"reward": rarely, "changes": {"drop_constant_groups": True, "refill": 2, "group_size": 4}},
    "replay": {"replay": ReplayConfig(**REPLAY)},
    "newest first": {"replay": ReplayConfig(**{**REPLAY, "sampler": "last", "max_staleness": 1})},
    "replay and expert": {"algorithm": "mix", "replay": ReplayConfig(**REPLAY, expert_share=0.4)},
    "given answers": {"algorithm": "sft"},
    "pairs": {"algorithm": "dpo"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_goes_on_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    setting = {**SETTINGS[name], "interval": 2}
    seeded()
    uninterrupted = trainer(tmp_path / "whole", setting)
    reports = uninterrupted.run(5)
    expected = state(uninterrupted)
    losses = [timeless(report.metrics) for report in reports]
    assert len({report.get("loss", report.get("critic/value_loss")) for report in losses}) > 1  # it does learn
    # It dies in step 4, between learning and saying so, and once more while it saves.
    seeded()
    folder = tmp_path / "killed"
    first = trainer(folder, setting)
    disk.watch_failpoints(dying("learned", 4 if name != "dropped groups" else 3))
    with pytest.raises(Died):
        first.run(5)
    disk.watch_failpoints(None)
    second = trainer(folder, setting, weights=1)
    assert second.resume()
    assert second.global_step == 2 and second.book.policy_version == 2
    disk.watch_failpoints(dying("before rename", 1))
    with pytest.raises(Died):
        second.run(5)
    disk.watch_failpoints(None)
    third = trainer(folder, setting, weights=1)
    assert third.resume() and third.global_step == 2
    again = third.run(5)
    assert [timeless(report.metrics) for report in again] == losses[2:]
    assert [report.uids for report in again] == [report.uids for report in reports[2:]]
    actual = state(third)
    for part, expected_part in expected.items():
        assert equal(expected_part, actual[part]), part
    assert third.book.check().ok
    if third.replay.kind == "on_policy" and name != "dropped groups" and third.algorithm.estimator is not None:
        assert (
            misplaced(
                actual, Prompts([{"prompt": [2, 3 + i]} for i in range(ROWS)], seed=3), 3, third.algorithm.group_size
            )
            == []
        )


def test_the_settings_do_what_they_are_for(tmp_path: Path) -> None:
    """What is tested above is there: groups are dropped and made up for, records are learned from again."""
    seeded()
    current = trainer(tmp_path / "dropped", SETTINGS["dropped groups"])
    reports = current.run(5)
    assert (
        current.book.counts().dropped["constant group"] > 0 and sum(report["collected"] for report in reports) > 5 * 12
    )
    current = trainer(tmp_path / "replay", SETTINGS["replay"])
    reports = current.run(5)
    assert any(len(steps) > 1 for steps in trained_steps(current.book).values()) and "collected" not in reports[1]
    current = trainer(tmp_path / "random", SETTINGS["random rewards"])
    current.run(1)
    other = trainer(tmp_path / "another", SETTINGS["random rewards"])
    other.run(1)  # the generators have gone on
    assert [record.reward for record in current.book] != [record.reward for record in other.book]


def test_where_others_bring_the_records_they_are_kept(tmp_path: Path) -> None:
    """What came after the checkpoint nobody would make again."""

    def opened() -> Trainer:
        book = rollbook.open(tmp_path / "book")
        options: dict[str, Any] = {"checkpoints": CheckpointConfig(tmp_path), "optimizer": OptimizerConfig(lr=0.01)}
        return Trainer(llama(0), "sft", book, prompts_per_step=2, seed=3, **options)

    def bring(book: Book, tasks: range) -> None:
        rows = [Experience(eid=EID(batch="b", task=i, suffix=""), tokens=[2, 3 + i, 1], prompt_length=1) for i in tasks]
        book.append(rows)

    first = opened()
    bring(first.book, range(6))
    first.run(1)
    bring(first.book, range(6, 10))
    with pytest.raises(OutOfDataError, match="step 6: .* has nothing more to lease"):
        first.run(9)
    expected = state(first)
    second = opened()
    assert second.resume() and second.global_step == 1
    assert second.book.counts().waiting == 8
    second.run(5)
    actual = state(second)
    for part in ("trained", "weights", "learner", "records"):
        assert equal(expected[part], actual[part]), part


def test_a_step_without_records_says_why(tmp_path: Path) -> None:
    first = trainer(tmp_path / "one", {})
    first.step()
    again = trainer(tmp_path / "two", {})
    again.book = first.book
    with pytest.warns(UserWarning, match=r"step 1: no records to train on: the 24 records .* are in the book already"):
        report = again.step()
    with pytest.raises(KeyError, match="loss: step 1 trained on no records"):
        report["loss"]
    again.prompts = None
    nothing = "step 1: no records to train on: "
    with pytest.warns(UserWarning, match=nothing + "no records are waiting for consumer 'train'; 24 trained"):
        again.step()
    again.book.append([Experience(tokens=[1, 2], eid={"batch": "new", "task": 0}, group_size=2)])
    with pytest.warns(UserWarning, match=nothing + "1 records are waiting .* their groups are incomplete"):
        again.step()


# --- saving -------------------------------------------------------------------------------------------------------


def test_a_step_is_saved_again(tmp_path: Path) -> None:
    """Also where that is cut short: one of the two is there, with the point of the book that it goes with."""
    current = trainer(tmp_path, {})
    current.run(2)
    assert [point.name for point in current.book.checkpoints()] == ["step-000000", "step-000002"]
    current.book.log(2, {"looked": 1.0})
    current.save()
    assert [point.name for point in current.book.checkpoints()] == ["step-000000", "step-000002+"]
    for point in ("book's checkpoint", "saving begins", "before rename", "between renames", "after rename"):
        current.book.log(2, {point: 1.0})
        disk.watch_failpoints(dying(point, 1))
        with pytest.raises(Died):
            current.save()
        disk.watch_failpoints(None)
        other = trainer(tmp_path, {}, weights=1)
        assert other.resume()
        logged = dict(other.book.metrics())[2]
        assert "looked" in logged and (point in logged) == (point == "after rename"), point
        assert equal(dict(current.actor.state_dict()), dict(other.actor.state_dict()))
        current = other
    current.save()
    assert len(current.book.checkpoints()) == 2
    assert [file.name for file in (tmp_path / "checkpoints").iterdir() if file.name.startswith(".")] == []


def test_only_the_newest_are_kept_and_the_first(tmp_path: Path) -> None:
    current = trainer(tmp_path, {"keep_last": 2, "interval": 1})
    disk.watch_failpoints(dying("before forgetting", 4))
    with pytest.raises(Died):
        current.run(6)
    disk.watch_failpoints(None)
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path)] == [0, 2, 3]
    current = trainer(tmp_path, {"keep_last": 2, "interval": 1})
    assert current.resume()
    current.run(6)
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path)] == [0, 5, 6]
    assert [point.name for point in current.book.checkpoints()] == ["step-000000", "step-000005", "step-000006"]


def test_an_old_folder_is_not_written_over(tmp_path: Path) -> None:
    trainer(tmp_path / "run", {}).run(2)
    current = trainer(tmp_path / "other", {})
    current.checkpoints = CheckpointConfig(tmp_path / "run")
    with pytest.raises(ValueError, match=r"has a checkpoint of the later step 2, at step 0, .* or resume\(\) first"):
        current.save()
    with pytest.raises(ValueError, match="has no checkpoint 'step-000002' of "):
        current.resume()
    other = trainer(tmp_path / "run", {})
    other.seed = 4
    with pytest.raises(ValueError, match="seed: got 4, and the run at .* has 3"):
        other.resume()
    assert not trainer(tmp_path / "new", {}).resume()


def test_weights_of_another_shape_change_nothing(tmp_path: Path) -> None:
    trainer(tmp_path, {}).run(1)
    current = trainer(tmp_path, {"changes": {"kl_coef": 0.0}})
    wide = LlamaConfig(vocab_size=60, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    current.actor = Actor(wide)
    before = {name: tensor.clone() for name, tensor in current.actor.state_dict().items()}
    drawn = torch.get_rng_state()
    with pytest.raises(
        checkpoint.CorruptCheckpointError, match=r"step-000001/model: got no weight .* of shape \[60, 32\]"
    ):
        current.resume()
    assert equal(before, dict(current.actor.state_dict())) and torch.equal(drawn, torch.get_rng_state())
    assert len(trained_steps(current.book)) == 24
