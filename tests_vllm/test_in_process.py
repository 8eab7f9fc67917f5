"""`VllmEngine` in process. Runs under the Python that has vLLM: `make test-vllm`."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("vllm")

from rollbook.models import Actor
from rollbook.rollout import VllmEngine
from tests import tiny
from tests_vllm import checks

ARGS = {"enforce_eager": True, "max_num_seqs": 32, "max_model_len": 2048}


@pytest.fixture(scope="module")
def actor(model):
    return Actor(copy.deepcopy(model), tokenizer=tiny.bytes_())


@pytest.fixture(scope="module")
def engine(actor):
    with VllmEngine(actor, engine_args=ARGS) as started:
        yield started


def test_samples(engine, actor):
    assert engine.run.engine == "vllm" and engine.run.model == "LlamaForCausalLM"
    checks.check_samples(engine, actor.model)


def test_stops(engine):
    checks.check_stops(engine)


def test_tools(engine):
    checks.check_tools(engine)


def test_cancel(engine, actor):
    checks.check_cancel(engine, actor.model)


def test_update(engine, actor):
    checks.check_update(engine, actor)


def test_adapters(model):
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    actor = Actor(copy.deepcopy(model), tokenizer=tiny.bytes_(), lora=lora)
    with VllmEngine(actor, engine_args=ARGS) as engine:
        checks.check_adapters(engine, actor)


def test_letters(tmp_path):
    checks.check_letters(tmp_path / "run", "engine.options={engine_args: {enforce_eager: true, max_num_seqs: 64}}")


def test_letters_with_a_worker(tmp_path):
    arguments = "{enforce_eager: true, max_num_seqs: 64, gpu_memory_utilization: 0.3}"  # beside the trainer's memory
    checks.check_worker(tmp_path / "run", f"engine.options={{engine_args: {arguments}}}")
