"""Weight updates of the engines that need no vLLM, and the check for stale weights."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollbook.models import Actor
from rollbook.rollout import (
    Cancel,
    OpenAIEngine,
    ScriptedEngine,
    StaleWeightsError,
    TransformersEngine,
    VllmEngine,
    WeightSyncError,
    check_sync,
)
from rollbook.rollout.vllm import LocalReplica, ServerReplica, save_checkpoint
from tests import tiny


def changed(model: Any, scale: float = 0.05) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model


def test_shared_parameters_take_only_the_version() -> None:
    actor = Actor(tiny.llama())
    engine = TransformersEngine(actor)
    pointers = [parameter.data_ptr() for parameter in engine.model.parameters()]
    engine.update_weights(actor, 4)
    assert engine.version == 4 and [parameter.data_ptr() for parameter in actor.model.parameters()] == pointers
    assert check_sync(engine, actor, 4) < 1e-5


def test_another_model_is_copied_in_place() -> None:
    policy, engine = Actor(changed(tiny.llama())), TransformersEngine(tiny.llama())
    pointers = [parameter.data_ptr() for parameter in engine.model.parameters()]
    with pytest.raises(StaleWeightsError, match=r"32 tokens differ by [\d.]+ on average and [\d.]+ at most, expected"):
        check_sync(engine, policy)
    engine.update_weights(policy, 1)
    assert check_sync(engine, policy, 1) < 1e-5
    assert [parameter.data_ptr() for parameter in engine.model.parameters()] == pointers
    changed(policy.model)
    with pytest.raises(StaleWeightsError, match="differ by"):
        check_sync(engine, policy, 1)


def test_an_update_in_the_middle_of_a_response() -> None:
    engine, policy = TransformersEngine(tiny.llama(), version=1), changed(tiny.llama())

    class UpdatingCancel(Cancel):
        """Called at every token; starts an update of the weights after some."""

        tokens = 0
        updater = threading.Thread(target=engine.update_weights, args=(policy, 2))

        @property
        def requested(self) -> bool:
            self.tokens += 1
            if self.tokens == 20:
                self.updater.start()
            return False

    (sample,) = engine.generate([[5, 6, 7]], max_tokens=200, ignore_eos=True, seed=0, cancel=UpdatingCancel())
    switch = list(sample.versions or ()).index(2)
    assert 0 < switch < 200 and sample.versions == [1] * switch + [2] * (200 - switch)
    # The first tokens are those of the first weights; a token's log-prob is from the pass that it was sampled from.
    (first,) = TransformersEngine(tiny.llama()).generate([[5, 6, 7]], max_tokens=switch, ignore_eos=True, seed=0)
    assert sample.response_ids[:switch] == first.response_ids
    assert list(sample.logprobs or ())[:switch] == pytest.approx(list(first.logprobs or ()), abs=1e-5)


def test_weights_that_do_not_fit_change_nothing() -> None:
    engine = TransformersEngine(tiny.llama(), version=3)
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    with pytest.raises(WeightSyncError, match=r"got shape .*, expected .*, as in the engine's model"):
        engine.update_weights(changed(tiny.llama(301)), 4)
    assert engine.version == 3
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.model.state_dict().items())


def test_engines_without_weights() -> None:
    scripted = ScriptedEngine([[7, 8]])
    scripted.update_weights(tiny.llama(), 5)
    assert scripted.generate("x", max_tokens=2)[0].versions == [5, 5]
    with OpenAIEngine("http://127.0.0.1:1") as engine, pytest.raises(WeightSyncError, match="OpenAIEngine cannot take"):
        engine.update_weights(tiny.llama(), 1)


def test_a_wrong_version_is_stale() -> None:
    actor = Actor(tiny.llama())
    engine = TransformersEngine(actor)
    with pytest.raises(StaleWeightsError, match=r"tokens of version \[0\], expected 7"):
        check_sync(engine, actor, 7)


def test_a_failed_probe_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="boom"):
        check_sync(ScriptedEngine([RuntimeError("boom")]), Actor(tiny.llama()))


def test_tied_embeddings_are_saved_as_two_tensors(tmp_path: Any) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model = tiny.qwen3()
    save_checkpoint(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(weights.keys())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.tie_word_embeddings and not loaded.config.tie_word_embeddings
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)


class ParamMeta(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], SimpleNamespace]:
    """Return a function that connects a weight transfer to a mock of vLLM, which records its arguments."""

    def trainer_init(init_info: dict[str, Any], client: Any, source: Any) -> SimpleNamespace:
        return SimpleNamespace(source=source, **init_info)

    package = "vllm.distributed.weight_transfer"
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        package: {},
        f"{package}.base": {"ParamMeta": ParamMeta},
        f"{package}.factory": {"WeightTransferTrainerFactory": SimpleNamespace(trainer_init=trainer_init)},
        f"{package}.ipc_engine": {"IPCTrainerInitInfo": dict},
        f"{package}.nccl_engine": {"NCCLTrainerInitInfo": lambda *arguments, rank: {"arguments": arguments}},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "10.0.0.1", "get_open_port": lambda: 9},
    }
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))  # type: ignore[arg-type]

    def connect(model: Any, transfer: str) -> SimpleNamespace:
        engine = object.__new__(VllmEngine)
        engine._replicas = [object.__new__(LocalReplica)]
        engine._run_on_replicas = lambda work: [2]  # type: ignore[method-assign]
        return engine._connect(model, transfer)  # type: ignore[arg-type, no-any-return]

    return connect


def qwen3_moe() -> Any:
    config = Qwen3MoeConfig(**tiny.SIZES, vocab_size=97, head_dim=8, num_experts=3, moe_intermediate_size=16)
    return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("make", [qwen3_moe, lambda: tiny.llava()[0], tiny.qwen_vl, tiny.qwen3])
def test_tensors_are_sent_with_the_names_of_checkpoints(
    make: Callable[[], Any], connected: Callable[[Any, str], SimpleNamespace], tmp_path: Any
) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    source = connected(model, "nccl").source
    sent = dict(source)
    assert sent.keys() == expected.keys() and all(torch.equal(sent[name], expected[name]) for name in sent)
    assert source.metadata() == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]


def test_the_buffer_of_ipc_holds_the_largest_tensor(connected: Callable[[Any, str], SimpleNamespace]) -> None:
    assert connected(tiny.llama(), "ipc").packed_buffer_size_bytes == 1 << 30
    with torch.device("meta"):
        large = LlamaForCausalLM(LlamaConfig(**{**tiny.SIZES, "hidden_size": 4096}, vocab_size=152_064))
    assert connected(large.bfloat16(), "ipc").packed_buffer_size_bytes == 2 * 4096 * 152_064 > 1 << 30


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_engine_follows_the_servers_that_another_one_updates() -> None:
    first, second, unknown = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))
    with VllmEngine([first, second]) as trainer, VllmEngine(second) as worker, VllmEngine(unknown) as other:
        for replica in trainer._replicas:
            replica.adapter = "rollbook-4"  # as after an update of an actor with LoRA
        trainer.version = 7
        worker.follow_weights(trainer.served_weights(), while_updated=True)
        (replica,) = worker._replicas
        assert isinstance(replica, ServerReplica)
        assert (replica.adapter, replica.version, replica.updated_by_other_process) == ("rollbook-4", 7, True)
        with pytest.raises(
            WeightSyncError, match=f"engine.url: got '{unknown}', to which the trainer sends no weights"
        ):
            other.follow_weights(trainer.served_weights())
        with pytest.raises(WeightSyncError, match="expected engine.kind vllm with this URL"):
            worker.follow_weights({})
    engine = TransformersEngine(tiny.llama())
    for call in (engine.served_weights, lambda: engine.follow_weights({"urls": [first]})):
        with pytest.raises(WeightSyncError, match="TransformersEngine"):
            call()


def test_vllm_is_missing() -> None:
    with pytest.raises(ImportError, match=r"pip install 'rollbook\[vllm\]'"):
        VllmEngine(Actor(tiny.llama(), tokenizer=tiny.bytes_()))


@pytest.mark.parametrize("engine_args", [{}, {"max_model_len": 8}, {"trust_remote_code": True}])
def test_vllm_runs_no_code_of_a_model_by_default(
    engine_args: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []

    def start(name: str, arguments: dict[str, Any], *_: Any) -> Any:
        started.append(arguments)
        return SimpleNamespace(tokenizer=None, close=lambda: None)

    monkeypatch.setattr("rollbook.rollout.vllm.LocalReplica", start)
    monkeypatch.setattr("rollbook.rollout.vllm.require_vllm", lambda: None)
    VllmEngine("some/folder", transfer="file", engine_args=engine_args).close()
    (arguments,) = started
    assert arguments["model"] == "some/folder"
    assert arguments["trust_remote_code"] is engine_args.get("trust_remote_code", False)


def test_arguments_of_vllm() -> None:
    with pytest.raises(ValueError, match="transfer: got 'post'"):
        VllmEngine("http://127.0.0.1:1", transfer="post")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected URLs"):
        VllmEngine(["http://127.0.0.1:1", "some/folder"])
    with pytest.raises(ValueError, match="engine_args"):
        VllmEngine("http://127.0.0.1:1", engine_args={"max_model_len": 8})
    with pytest.raises(ValueError, match=r"engine_args.model: got 'other', but the source is the model; remove it"):
        VllmEngine("some/folder", engine_args={"model": "other"})
    with VllmEngine("http://127.0.0.1:1") as engine, pytest.raises(WeightSyncError, match="ConnectError|connect"):
        engine.update_weights(tiny.llama(), 1)
