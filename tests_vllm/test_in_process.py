"""`VllmEngine` in process. Runs under the Python that has vLLM: `make test-vllm`."""

from __future__ import annotations

import copy
import json

import pytest
import torch

pytest.importorskip("vllm")

from rollbook.models import Actor
from rollbook.rollout import Cancel, Prompt, TransformersEngine, VllmEngine
from tests import tiny
from tests_vllm import checks
from tests_vllm.conftest import MAX_LENGTH, largest

ARGS = {
    "enforce_eager": True,
    "max_num_seqs": 32,
    "max_model_len": MAX_LENGTH,
    "max_num_batched_tokens": 2 * MAX_LENGTH,  # see the servers of conftest
}


@pytest.fixture(scope="module")
def actor(model):
    return Actor(copy.deepcopy(model), tokenizer=tiny.bytes_())


@pytest.fixture(scope="module")
def engine(actor):
    with VllmEngine(actor, engine_args=ARGS) as started:
        yield started


@pytest.fixture(scope="module")
def vision_actor():
    """A tiny Idefics3, whose processor works without torchvision."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    side = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    processor = Idefics3Processor(image_processor=images, tokenizer=tiny.bytes_(), image_seq_len=4)
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = {"model_type": "llama", "vocab_size": len(processor.tokenizer), "pad_token_id": 0, "initializer_range": 0.1}
    text |= {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    config = Idefics3Config(
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        text_config=text,
        image_token_id=processor.image_token_id,
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config)
    return Actor(model, tokenizer=processor.tokenizer, processor=processor)


def test_samples(engine, actor):
    assert engine.run.engine == "vllm" and engine.run.model == "LlamaForCausalLM"
    checks.check_samples(engine, actor.model)


def test_stops(engine):
    checks.check_stops(engine)


def test_tools(engine):
    checks.check_tools(engine)


def test_parsed_tool_calls(actor):
    """Check that vLLM's parser reads the calls of a response with a grammar."""
    from vllm.sampling_params import StructuredOutputsParams

    pattern = r'<tool_call>{"name": "add", "arguments": {"a": [1-9]}}</tool_call>'
    forced = {"structured_outputs": StructuredOutputsParams(regex=pattern.replace("{", r"\{").replace("}", r"\}"))}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    prompt = Prompt(messages=checks.CHAT, tools=tools)
    with VllmEngine(actor, engine_args=ARGS, tool_call_parser="hermes") as engine:
        for cancel in (None, Cancel()):  # complete and streamed
            for sample in engine.generate(prompt, n=2, max_tokens=100, seed=1, extra=forced, cancel=cancel):
                assert not sample.failed, sample.error
                (call,) = sample.message["tool_calls"]
                assert call["function"]["name"] == "add" and sample.finish_reason == "tool_calls"
                assert json.loads(call["function"]["arguments"])["a"] in range(1, 10)
        (plain,) = engine.generate(prompt, max_tokens=8, seed=1)
        assert plain.message["role"] == "assistant" and "tool_calls" not in plain.message
    with pytest.raises(ValueError, match="tool_call_parser: got 'hermess'"):
        VllmEngine(actor, engine_args=ARGS, tool_call_parser="hermess")


def test_images(vision_actor):
    """Check that samples with images equal those of `TransformersEngine`."""
    options = {"engine_args": {"enforce_eager": True, "max_num_seqs": 8, "max_model_len": 128}}
    prompts = [Prompt(text="<image>what?", images=[tiny.picture(color)]) for color in ((255, 0, 0), (0, 90, 200))]
    greedy = {"n": 2, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with VllmEngine(vision_actor, **options) as engine:
        bad = engine.generate(prompts[0], max_tokens=2, extra={"no_such_option": 1})[0]
        assert "no_such_option" in bad.error  # and vLLM does not think that it has the picture
        samples = engine.generate(prompts, **greedy)
        seeded = engine.generate(prompts, n=2, max_tokens=12, seed=1, batch=0)
        again = engine.generate(prompts, n=2, max_tokens=12, seed=1, batch=0)
    expected = TransformersEngine(vision_actor).generate(prompts, **greedy)
    assert [sample.error for sample in [*samples, *seeded]] == [None] * 8
    assert [sample.response_ids for sample in samples] == [sample.response_ids for sample in expected]
    for sample, expected_sample in zip(samples, expected, strict=True):
        assert (
            list(sample.prompt_ids) == list(expected_sample.prompt_ids)
            and largest(sample.logprobs, expected_sample.logprobs) < 1e-4
        )
    assert samples[0].logprobs != samples[2].logprobs  # they depend on the picture
    assert [sample.response_ids for sample in seeded] == [sample.response_ids for sample in again]
    assert len({tuple(sample.response_ids) for sample in seeded}) == 4


def test_cancel(engine, actor):
    checks.check_cancel(engine, actor.model)


def test_update(engine, actor):
    checks.check_update(engine, actor)
    checks.check_update_during_generation(engine, actor)


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
