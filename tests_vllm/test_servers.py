"""`VllmEngine` over two `vllm serve` processes, whose weights follow an actor."""

from __future__ import annotations

import copy

import pytest

from rollbook.models import Actor
from rollbook.rollout import VllmEngine
from rollbook.rollout.vllm import save_checkpoint
from rollbook.train.recipes import letters
from tests import tiny
from tests_vllm import checks
from tests_vllm.conftest import vllm

OPTIONS = (
    *("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"),
)


@pytest.fixture(scope="module")
def actor(model):
    return Actor(copy.deepcopy(model), tokenizer=tiny.bytes_())


@pytest.fixture(scope="module")
def urls(folder, tmp_path_factory):
    logs = tmp_path_factory.mktemp("vllm")
    with vllm(folder, logs / "first", *OPTIONS) as first, vllm(folder, logs / "second", *OPTIONS) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def engine(urls):
    with VllmEngine(urls) as engine:
        yield engine


def test_samples(engine, actor):
    assert engine.run.engine == "vllm" and engine.replica_count == 2
    checks.check_samples(engine, actor.model)


def test_tasks_stay_on_a_replica(engine):
    before = list(engine._in_flight)
    engine.generate([[20], [30], [40], [50]], n=2, max_tokens=2, batch="sticky")
    replicas = {task: index for task, index in engine._replica_by_task.items() if "sticky" in task}
    assert sorted(replicas.values()) == [0, 0, 1, 1] and engine._in_flight == before == [0, 0]
    engine.generate([[20], [30], [40], [50]], n=2, max_tokens=2, batch="sticky")
    assert {task: index for task, index in engine._replica_by_task.items() if "sticky" in task} == replicas


def test_stops(engine):
    checks.check_stops(engine)


def test_tools(engine):
    checks.check_tools(engine)


def test_cancel(engine, actor):
    checks.check_cancel(engine, actor.model)


def test_adapters(urls, model):
    actor = Actor(copy.deepcopy(model), tokenizer=tiny.bytes_(), lora={"r": 4, "target_modules": ["q_proj", "v_proj"]})
    with VllmEngine(urls) as engine:
        checks.check_adapters(engine, actor)


def test_update(engine, actor):
    checks.check_update(engine, actor)


def test_update_during_generation(urls, actor):
    with VllmEngine(urls[0]) as engine:
        checks.check_update_during_generation(engine, actor)


def test_a_failed_update_closes_the_engine(urls, actor):
    with VllmEngine(urls[0], transfer="file", folder="/dev/null/no-such-folder") as engine:
        with pytest.raises(OSError):
            engine.update_weights(actor, 9)
        with pytest.raises(ValueError, match="engine: closed"):
            engine.generate([[5, 6]], max_tokens=2)


def test_letters(tmp_path):
    model, tokenizer = letters.model()
    save_checkpoint(model, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with vllm(tmp_path / "model", tmp_path / "log", "--enable-scale-out", "--max-model-len", "64") as url:
        checks.check_letters(tmp_path / "run", f"engine.url={url}")
        checks.check_worker(tmp_path / "workers", f"engine.url={url}")
