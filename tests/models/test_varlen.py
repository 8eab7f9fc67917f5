"""`varlen`: packed samples score and learn as each alone with SDPA, and no mask over all pairs of tokens is made."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rollbook.compat.lightrft.batch import from_experiences
from rollbook.models import Actor, Critic
from rollbook.models.varlen import (
    NAME,
    PackedMask,
    best_attention,
    check_bounds,
    register,
    unsupported_reason,
    use_varlen,
    varlen_attention,
)
from rollbook.rollout import TransformersEngine
from tests import tiny
from tests.models import test_vision_models, zoo
from tests.models.zoo import policy_log_probs, reference_log_probs, values

SHAPES = [(3, 40), (1, 6), (50, 20), (2, 0), (0, 3), (40, 100), (7, 7), (0, 1)]
TOTAL = sum(sum(shape) for shape in SHAPES)


class Watch(TorchFunctionMode):
    """What SDPA is called with: (rows, queries, whether there is a mask); nothing is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, bool]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function is functional.scaled_dot_product_attention:
            self.calls.append((args[0].shape[0], args[0].shape[2], options.get("attn_mask") is not None))
        return function(*args, **options)


def qwen2() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**zoo.TEXT)).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny.llama,
    "qwen2": qwen2,
    "qwen3": tiny.qwen3,
    "gpt2": tiny.gpt2,
    "cohere": zoo.cohere,
    "granite": zoo.granite,
}


def pair(name: str = "llama", **options: Any) -> tuple[Actor, Actor]:
    """The same model with `varlen` and with SDPA."""
    return Actor(MODELS[name](), attn_implementation="varlen", **options), Actor(MODELS[name](), **options)


def gradients(actor: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    slopes = torch.autograd.grad(loss, list(actor.parameters()), allow_unused=True)
    return [slope for slope in slopes if slope is not None]


def weighted(rows: torch.Tensor) -> torch.Tensor:
    """A loss by which every slot counts, each otherwise."""
    return (rows * torch.linspace(-1, 1, len(rows))).sum() / len(rows)


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_gradients_are_those_of_padded_sdpa(name: str) -> None:
    varlen, plain = pair(name)
    assert varlen.config._attn_implementation == NAME and varlen.packs and varlen.packs_cheaply
    assert plain.packs and not plain.packs_cheaply
    records = zoo.records(SHAPES)
    with Watch() as watch:
        actual = zoo.stats_of(varlen, records, entropy=True)
    lengths = [sum(shape) for shape in SHAPES]
    assert watch.calls[-2 * len(SHAPES) :] == [(1, length, False) for length in lengths] * 2, "each sample, no mask"
    expected = zoo.stats_of(plain, records, entropy=True, packed=False)
    assert actual.entropy is not None and expected.entropy is not None
    torch.testing.assert_close(actual.logprobs.values, expected.logprobs.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.entropy.values, expected.entropy.values, rtol=1e-5, atol=1e-5)
    varlen_slopes, sdpa_slopes = (
        gradients(varlen, weighted(actual.logprobs.values)),
        gradients(plain, weighted(expected.logprobs.values)),
    )
    assert len(varlen_slopes) == len(sdpa_slopes) > 10
    for a, b in zip(varlen_slopes, sdpa_slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_samples_share_has_the_bits_of_the_sample_alone() -> None:
    torch.manual_seed(0)
    bounds, (query, key, value) = [0, 5, 6, 17], torch.randn(3, 1, 4, 17, 8)
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    offsets = torch.tensor(bounds, dtype=torch.int32)
    attended, weights = varlen_attention(
        module, query, key[:, :2], value[:, :2], None, scaling=0.3, cu_seq_lens_q=offsets
    )
    assert attended.shape == (1, 17, 4, 8) and weights is None
    for a, b in itertools.pairwise(bounds):
        parts = (query[:, :, a:b], key[:, :2, a:b], value[:, :2, a:b])
        alone = functional.scaled_dot_product_attention(*parts, is_causal=b - a > 1, scale=0.3, enable_gqa=True)
        assert torch.equal(attended[:, a:b], alone.transpose(1, 2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    varlen, plain = pair()
    records = zoo.records(SHAPES)
    expected = gradients(plain, weighted(zoo.stats_of(plain, records, packed=False).logprobs.values))
    varlen.gradient_checkpointing_enable({"use_reentrant": reentrant})
    varlen.train()
    loss = weighted(zoo.stats_of(varlen, records).logprobs.values)
    masks: list[Any] = []
    for layer in varlen.model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _module, _args, arguments: masks.append(arguments["attention_mask"]), with_kwargs=True
        )
    torch.autograd.backward(loss)
    assert len(masks) == 2 and masks[0] is masks[1], "computed again, in the backward pass"
    assert isinstance(masks[0], PackedMask) and masks[0]._tensor is None
    slopes = [parameter.grad for parameter in varlen.parameters() if parameter.grad is not None]
    for a, b in zip(slopes, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_critics_and_scores_of_many() -> None:
    records = zoo.records(SHAPES)
    varlen = Critic(tiny.llama(), attn_implementation="varlen", value_head="normal")
    plain = Critic(tiny.llama())
    plain.value_head.load_state_dict(varlen.value_head.state_dict())
    assert varlen.packs_cheaply and Critic(backbone_from=pair()[0]).packs_cheaply
    torch.testing.assert_close(zoo.values_of(varlen, records).values, zoo.values_of(plain, records).values)
    for budget in (1, 60, 1000):
        scored, expected = values(varlen, records, token_budget=budget), values(plain, records)
        torch.testing.assert_close(scored.values.tensor_of_values(), expected.values.tensor_of_values())
    assert scored.stats["padding"] == 0 and scored.stats["micro_batches"] == 1
    actor, other = pair()
    scores = policy_log_probs(actor, records, token_budget=100).logprobs.tensor_of_values()
    torch.testing.assert_close(scores, policy_log_probs(other, records).logprobs.tensor_of_values())


@pytest.mark.parametrize("name", test_vision_models.MODELS)
def test_the_part_that_reads_text_of_a_model_that_sees(name: str) -> None:
    make, records = test_vision_models.MODELS[name]
    varlen, plain = Actor(make(), attn_implementation="varlen"), Actor(make())
    assert varlen.packs_cheaply and varlen.config.text_config._attn_implementation == NAME
    assert varlen.config.vision_config._attn_implementation == "sdpa"
    logprobs, expected = (policy_log_probs(actor, records()).logprobs.tensor_of_values() for actor in (varlen, plain))
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


def test_autocast_and_half() -> None:
    records = zoo.records(SHAPES)
    varlen, plain = pair()
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = zoo.stats_of(varlen, records), zoo.stats_of(plain, records)
    assert (actual.logprobs.values - expected.logprobs.values).abs().mean() < 0.02
    halves = [
        Actor(tiny.llama(dtype=torch.bfloat16), attn_implementation=implementation)
        for implementation in ("varlen", "sdpa")
    ]
    actual, expected = (zoo.stats_of(actor, records) for actor in halves)
    assert (actual.logprobs.values - expected.logprobs.values).abs().mean() < 0.02


def test_dropout_in_attention_is_not_lost() -> None:
    config = transformers.LlamaConfig(**zoo.TEXT, attention_dropout=0.5)
    actor = Actor(config, attn_implementation="varlen")
    records = zoo.records(SHAPES)
    still, again = (zoo.stats_of(actor.eval(), records).logprobs.values for _ in range(2))
    assert torch.equal(still, again)
    assert not torch.allclose(zoo.stats_of(actor.train(), records).logprobs.values, still, atol=1e-3)


# --- all that is not packed is SDPA's ---------------------------------------------------------------------------------


def test_padded_batches_have_sdpas_bits() -> None:
    varlen, plain = pair("qwen3")
    records = zoo.records(SHAPES)
    for side in ("left", "right"):
        batch = zoo.batch_of(records, side=side)
        assert torch.equal(varlen.token_stats(batch).logprobs, plain.token_stats(batch).logprobs)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_same_is_sampled(name: str) -> None:
    varlen, plain = pair(name, tokenizer=tiny.words())
    prompts = [[5, 6, 7, 9], [8], [10, 11]]
    options = {"n": 3, "max_tokens": 24, "temperature": 0.8, "logprobs": "tempered", "seed": 3}
    varlen_samples, sdpa_samples = (TransformersEngine(actor).generate(prompts, **options) for actor in (varlen, plain))
    assert [sample.response_ids for sample in varlen_samples] == [sample.response_ids for sample in sdpa_samples]
    assert len({tuple(sample.response_ids) for sample in varlen_samples}) > 3
    records = [[sample.to_experience() for sample in samples] for samples in (varlen_samples, sdpa_samples)]
    varlen_logprobs, sdpa_logprobs = (torch.cat([record.logprobs for record in side]) for side in records)
    assert torch.equal(varlen_logprobs, sdpa_logprobs)
    scored = policy_log_probs(varlen, records[0], temperature=0.8).logprobs.tensor_of_values()
    torch.testing.assert_close(scored, varlen_logprobs, rtol=1e-4, atol=1e-4)
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    mask = (ids != 0).long()
    greedy = [
        actor.model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False) for actor in (varlen, plain)
    ]
    assert torch.equal(*greedy)


def test_positions_alone_tell_samples_apart_too() -> None:
    # Without boundaries there is nothing to go by but the mask: it is made, and right.
    varlen, plain = pair()
    inputs = from_experiences(zoo.records(SHAPES), packing_samples=True).model_inputs()
    bare = {name: inputs[name] for name in ("input_ids", "position_ids", "use_cache")}
    with torch.no_grad(), Watch() as watch:
        logits = varlen.model(**bare).logits
    assert watch.calls == [(1, TOTAL, True)] * 2
    with torch.no_grad():
        assert torch.equal(logits, plain.model(**bare).logits)
        with_bounds = varlen.model(**inputs).logits
        torch.testing.assert_close(with_bounds, logits, rtol=1e-5, atol=1e-5)
        # Boundaries hold with a cache asked for, too, where SDPA would let samples see each other.
        cached = varlen.model(**{**inputs, "use_cache": True}).logits
        torch.testing.assert_close(cached, logits, rtol=1e-5, atol=1e-5)


# --- kept, copied, saved ----------------------------------------------------------------------------------------------


def test_it_goes_where_the_model_goes(tmp_path: Path) -> None:
    records = zoo.records(SHAPES)
    config = transformers.LlamaConfig(**zoo.TEXT)
    actor = Actor(config, attn_implementation="varlen", lora={"r": 2, "target_modules": ["q_proj", "v_proj"]})
    assert actor.packs_cheaply and actor.reference().packs_cheaply
    assert not Actor(config).packs_cheaply, "a configuration is not changed"
    plain = pair()[0]
    frozen = plain.reference()
    assert frozen.packs_cheaply
    expected = policy_log_probs(plain, records).logprobs.tensor_of_values()
    assert torch.equal(reference_log_probs(frozen, records).logprobs.tensor_of_values(), expected)
    assert copy.deepcopy(plain).packs_cheaply
    # Another process has not heard of it.
    carried = pickle.dumps(plain)
    for registry in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        del registry._global_mapping[NAME]
    again = pickle.loads(carried)
    assert torch.equal(policy_log_probs(again, records).logprobs.tensor_of_values(), expected)
    # What is written says nothing of it: elsewhere it loads without rollbook.
    plain.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    loaded = Actor(str(tmp_path), attn_implementation="varlen")
    assert loaded.packs_cheaply
    assert torch.equal(policy_log_probs(loaded, records).logprobs.tensor_of_values(), expected)


# --- refused ----------------------------------------------------------------------------------------------------------


def mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**zoo.TEXT, sliding_window=64))


def windowed() -> Any:
    config = transformers.Qwen2Config(**zoo.TEXT, use_sliding_window=True, sliding_window=64, max_window_layers=1)
    return transformers.Qwen2ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (zoo.gemma2, "'varlen' for a Gemma2ForCausalLM with layers of sliding_attention.*use 'sdpa'"),
        (mistral, "'varlen' for a MistralForCausalLM with a sliding window of 64 tokens"),
        (windowed, "'varlen' for a Qwen2ForCausalLM with layers of sliding_attention"),
        (zoo.gptj, "'varlen' for a GPTJForCausalLM, whose attention is fixed"),
        (lambda: torch.nn.Linear(2, 2), "'varlen' for a Linear, expected a transformers model"),
    ],
)
def test_models_that_it_is_not_for(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use_varlen(make())


def test_windows_that_are_found_only_when_it_runs() -> None:
    # Set past the check, by transformers' own means: still nothing wrong is computed.
    register()
    records = zoo.records([(3, 40), (50, 30), (1, 6)])
    for make in (mistral, windowed):
        model = make()
        model.set_attn_implementation(NAME)
        inputs = from_experiences(records, packing_samples=True).model_inputs()
        with pytest.raises(ValueError, match="sliding_window: got it with packed samples|do not attend to all earlier"):
            model(**inputs)


def test_why_not() -> None:
    assert (
        unsupported_reason(transformers.Qwen2Config()) is None
        and unsupported_reason(transformers.Qwen3Config()) is None
    )
    assert unsupported_reason(transformers.MistralConfig(sliding_window=None)) is None
    capped = transformers.Gemma2Config(layer_types=["full_attention"] * 26)
    assert unsupported_reason(capped) == "a soft cap on attention logits"
    assert unsupported_reason(transformers.LlamaConfig(is_causal=False)) == "attention to later tokens"


def test_boundaries_that_contradict_positions() -> None:
    varlen, _ = pair()
    inputs = from_experiences(zoo.records([(3, 4), (2, 6)]), packing_samples=True).model_inputs()
    off = torch.tensor([0, 6, 15], dtype=torch.int32)
    for wrong in (off, torch.tensor([0, 15]), torch.tensor([0, 3, 7, 15])):
        with pytest.raises(ValueError, match="cu_seq_lens_q: got boundaries other than"):
            varlen.model(**{**inputs, "cu_seq_lens_q": wrong, "cu_seq_lens_k": wrong})
    for wrong in (torch.tensor([0, 7]), torch.tensor([1, 7, 15]), torch.tensor([0, 9, 7, 15])):
        with pytest.raises(ValueError, match="cu_seq_lens_q: got .* expected boundaries in ascending order"):
            varlen.model(**{**inputs, "cu_seq_lens_q": wrong, "cu_seq_lens_k": wrong})
    with pytest.raises(ValueError, match="cu_seq_lens_k: got other boundaries"):
        varlen.model(**{**inputs, "cu_seq_lens_k": off})
    cache = transformers.DynamicCache(config=varlen.config)
    varlen.model(input_ids=torch.tensor([[5, 6]]), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="1 rows of 15 tokens and 17 keys, expected one row of samples and an empty"):
        varlen.model(**{**inputs, "past_key_values": cache, "use_cache": True})
    padding = (torch.arange(15) < 14).long()[None]
    with pytest.raises(ValueError, match="attention_mask: got one with cu_seq_lens_q"):
        varlen.model(**{**inputs, "attention_mask": padding})
    with torch.no_grad():  # of ones alone it says nothing, and boundaries hold
        masked, bare = varlen.model(**{**inputs, "attention_mask": torch.ones_like(padding)}), varlen.model(**inputs)
    assert torch.equal(masked.logits, bare.logits)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.data())
def test_a_mask_is_told_from_any_other(lengths: list[int], data: Any) -> None:
    """The check passes where the mask is that of the samples, and fails if a single sample were cut or joined."""
    total = sum(lengths)
    if total == 0:
        return
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def sees(row: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (sample[q] == sample[k]) & (k <= q)

    def checked(bounds: list[int]) -> list[int]:
        return PackedMask(lambda: None, sees, total, "cpu").bounds(torch.tensor(bounds))[1]

    true = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    marks, ends = check_bounds(torch.tensor(true), total)
    assert checked(true) == ends == sorted(set(true)) == marks.tolist()
    other = sorted(set(true) ^ {data.draw(st.integers(1, total))} | {0, total})
    if other != ends:
        with pytest.raises(ValueError, match="cu_seq_lens_q"):
            checked(other)


def test_the_choice_without_a_device() -> None:
    if not torch.cuda.is_available():
        assert best_attention("cuda", "bfloat16") == "sdpa"
    assert best_attention("cpu", torch.float32, transformers.LlamaConfig()) == "sdpa"
    with pytest.raises(ValueError, match="dtype: got 'int8'"):
        best_attention("cpu", "int8")
