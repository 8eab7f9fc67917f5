"""Log-probs and entropies from hidden states are those of the model's own logits, gradients too, without the logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from rollbook import Experience
from rollbook.batch import Batch
from rollbook.models import Actor, scoring
from rollbook.models.head import Head
from rollbook.rollout import TransformersEngine
from tests import tiny
from tests.models import zoo
from tests.models.zoo import policy_log_probs

SHAPES = [(3, 4), (1, 6), (5, 2), (2, 0), (0, 3), (4, 1)]
LAYOUTS = ["left", "right", "packed"]


def laid(records: list[Experience], layout: str) -> Batch:
    return zoo.batch_of(records, packed=True) if layout == "packed" else zoo.batch_of(records, side=layout)


def by_row(batch: Batch, column: Any) -> list[torch.Tensor]:
    """A row for each sample, out of (B, A) or `Rows`; what is padding must be 0."""
    if batch.layout == "packed":
        return list(column)
    assert not column[~batch.action_mask].any()
    return list(zoo.by_record(batch, column))


@pytest.mark.parametrize("name", zoo.TEXTS)
def test_the_same_as_naively(name: str) -> None:
    model = zoo.text(name)
    actor = Actor(model)
    records = zoo.records(SHAPES)
    assert actor.packs and actor.head_path == "hidden"
    for temperature in (1.0, 0.6, 1.7):
        with torch.no_grad():
            expected = [zoo.naive(model, record, temperature) for record in records]
            for layout in LAYOUTS:
                batch = laid(records, layout)
                stats = actor.token_stats(batch, entropy=True, temperature=temperature)
                assert stats.entropy is not None
                for column, i in ((stats.logprobs, 0), (stats.entropy, 1)):
                    for row, pair in zip(by_row(batch, column), expected, strict=True):
                        assert row.dtype == torch.float32
                        torch.testing.assert_close(row, pair[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gptj", "cohere"])
def test_gradients_are_those_of_the_logits(name: str, layout: str) -> None:
    model, naive_model = zoo.TEXTS[name](), zoo.TEXTS[name]()
    records = zoo.records(SHAPES)
    weight = torch.randn(sum(r for _, r in SHAPES), generator=torch.Generator().manual_seed(1))
    parts = weight.split([r for _, r in SHAPES])
    batch = laid(records, layout)
    actor = Actor(model, suppress=() if name == "gemma2" else (7, 250), temperature=0.8)
    stats = actor.token_stats(batch, entropy=True)
    rows = zip(by_row(batch, stats.logprobs), by_row(batch, stats.entropy), parts, strict=True)
    sum((w * log).sum() + 0.3 * (w * more).sum() for log, more, w in rows).backward()  # type: ignore[union-attr]
    pairs = [zoo.naive(naive_model, record, 0.8, actor.suppress) for record in records]
    sum((w * log).sum() + 0.3 * (w * more).sum() for (log, more), w in zip(pairs, parts, strict=True)).backward()  # type: ignore[union-attr]
    compared = 0
    for (which, parameter), naive_parameter in zip(model.named_parameters(), naive_model.parameters(), strict=True):
        if parameter.grad is None or naive_parameter.grad is None:
            assert parameter.grad is naive_parameter.grad, which
            continue
        compared += 1
        torch.testing.assert_close(parameter.grad, naive_parameter.grad, rtol=1e-3, atol=2e-4, msg=which)
    assert compared > 10


@pytest.mark.parametrize(("name", "path"), [("llama", "hidden"), ("gptj", "hidden"), ("gemma2", "logits")])
def test_suppressed_tokens_have_no_share(name: str, path: str) -> None:
    model, records = zoo.text(name), zoo.records(SHAPES)
    banned = (5, 8, 299)
    records = [
        Experience(tokens=[t if t not in banned else 20 for t in r.tokens.tolist()], prompt_length=r.prompt_length,
                   experience_type="multi_turn", action_mask=[True] * (len(r.tokens) - r.prompt_length))
        for r in records
    ]  # fmt: skip
    actor = Actor(model, suppress=banned)
    assert actor.head_path == path
    with torch.no_grad():
        expected = [zoo.naive(model, record, 1.0, banned) for record in records]
        other = [zoo.naive(model, record) for record in records]
        for layout in LAYOUTS:
            batch = laid(records, layout)
            stats = actor.token_stats(batch, entropy=True)
            for column, i in ((stats.logprobs, 0), (stats.entropy, 1)):
                for row, pair in zip(by_row(batch, column), expected, strict=True):
                    torch.testing.assert_close(row, pair[i], rtol=1e-5, atol=1e-5)
    assert max(float((a[0] - b[0]).abs().max()) for a, b in zip(expected, other, strict=True) if len(a[0])) > 1e-3
    sampled = zoo.batch_of([Experience(tokens=[9, 8, 10], prompt_length=1)])
    assert actor.token_stats(sampled).logprobs[0, 0] == -torch.inf


def test_suppressing_what_is_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"suppress\[1\]: got 300, expected an id below 300"):
        Actor(zoo.text("llama"), suppress=(5, 300))


class Largest(TorchDispatchMode):
    """The largest floating point tensor that any operation gives, however deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                self.numel = max(self.numel, output.numel())
        return outputs


@pytest.mark.parametrize("layout", ["left", "packed"])
def test_logits_never_lie_in_memory(layout: str) -> None:
    vocabulary, slots = 8192, 4 * 100
    actor = Actor(tiny.llama(vocab=vocabulary, hidden_size=8, num_attention_heads=2))
    records = zoo.records([(6, 100)] * 4, vocab=vocabulary)
    batch = laid(records, layout)
    assert actor.packs and actor.head_path == "hidden"
    for back in (False, True):
        with Largest() as seen:
            stats = actor.token_stats(batch, entropy=True)
            if back:
                log_probs = stats.logprobs if layout == "left" else stats.logprobs.values
                log_probs.sum().backward()
        assert seen.numel < slots * vocabulary / 3, back
    with Largest() as seen:
        policy_log_probs(actor, records, entropy=True, packed=layout == "packed")
    assert seen.numel < slots * vocabulary / 3
    with Largest() as seen:  # what this would see of one who made them
        actor.model(input_ids=torch.ones(4, 106, dtype=torch.long))
    assert seen.numel >= slots * vocabulary


# --- which path, and why ----------------------------------------------------------------------------------------------


def test_what_the_model_does_to_logits_is_found_out() -> None:
    assert [Head.from_model(zoo.text(name)).scale for name in ("llama", "cohere", "granite")] == [1.0, 0.25, 0.25]
    assert [Head.from_model(zoo.text(name)).softcap for name in ("llama", "gemma2")] == [None, 2.0]


def test_a_cap_that_leaves_no_trace_here_is_kept() -> None:
    config = transformers.Gemma2Config(**{**zoo.TEXT, "initializer_range": 0.001}, head_dim=8)
    head = Head.from_model(zoo._build(config))
    assert (head.path, head.softcap) == ("hidden", config.final_logit_softcapping)


class Shifted(transformers.LlamaForCausalLM):
    """Does to its logits what no configuration tells of."""

    def forward(self, *args: Any, **options: Any) -> Any:
        output = super().forward(*args, **options)
        output.logits = output.logits + torch.linspace(0, 3, output.logits.shape[-1])
        return output


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_logits_are_used_as_they_are(layout: str) -> None:
    model = Shifted(zoo.text("llama").config).eval()
    actor = Actor(model, temperature=0.7)
    assert actor.head_path == "logits" and "by up to 3" in actor.head.reason
    records = zoo.records(SHAPES)
    batch = laid(records, layout)
    with torch.no_grad():
        stats = actor.token_stats(batch, entropy=True)
        for row, record in zip(by_row(batch, stats.logprobs), records, strict=True):
            torch.testing.assert_close(row, zoo.naive(model, record, 0.7)[0], rtol=1e-5, atol=1e-5)


class Bare(torch.nn.Module):
    """A model of the user's own: embeddings, a running mean, an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.out = torch.nn.Linear(8, 50)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        attended = attention_mask[..., None].float()
        summed = (self.embed(input_ids) * attended).cumsum(1)
        return self.out(summed / attended.cumsum(1).clamp(min=1))


def test_a_module_of_ones_own() -> None:
    torch.manual_seed(0)
    model = Bare()
    actor = Actor(model)
    assert actor.head_path == "logits" and not actor.packs
    records = zoo.records(SHAPES, vocab=50)
    with torch.no_grad():
        scored = policy_log_probs(actor, records, token_budget=12)
    for row, record in zip(scored.logprobs, records, strict=True):
        tokens = record.tokens.long()
        every = torch.log_softmax(model(tokens[None], torch.ones_like(tokens)[None])[0], -1)
        naive = torch.cat([torch.zeros(1), every[:-1].gather(1, tokens[1:, None])[:, 0]])[record.prompt_length :]
        torch.testing.assert_close(row, naive, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="does not separate packed samples"):
        actor.token_stats(zoo.batch_of(records, packed=True))


def test_a_replaced_output_layer_is_looked_at_again() -> None:
    model = tiny.llama()
    actor = Actor(model)
    records = zoo.records([(3, 4)])
    before = policy_log_probs(actor, records).logprobs[0]
    model.lm_head = torch.nn.Linear(32, 300)
    logprobs = policy_log_probs(actor, records).logprobs[0]
    torch.testing.assert_close(logprobs, zoo.naive(model, records[0])[0].detach(), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before, logprobs)
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(32, 300), torch.nn.Tanh())
    assert actor.head_path == "logits" and "Sequential" in actor.head.reason


# --- packing ----------------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Any, bool]] = {
    "bloom": (
        transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2),
        False,
    ),
    "mamba": (transformers.MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=4), False),
    "mistral": (transformers.MistralConfig(**zoo.TEXT, sliding_window=4), True),
    "neox": (
        transformers.GPTNeoXConfig(
            vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        ),
        True,
    ),
    "moe": (
        transformers.Qwen3MoeConfig(
            **zoo.TEXT, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        True,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_let_packed_samples_see_each_other_are_told_apart(name: str) -> None:
    config, packs = OTHERS[name]
    model = zoo._build(config)
    actor = Actor(model)
    assert actor.packs is packs
    records = zoo.records([(3, 4), (1, 9), (5, 2)])
    with torch.no_grad():
        expected = torch.cat([zoo.naive(model, record)[0] for record in records])
    for packed in (None, True):
        if packed and not packs:
            with pytest.raises(ValueError, match="does not separate packed samples"):
                policy_log_probs(actor, records, packed=True)
            continue
        logprobs = policy_log_probs(actor, records, packed=packed).logprobs
        torch.testing.assert_close(torch.cat(list(logprobs)), expected, rtol=1e-5, atol=1e-5)


# --- modes ------------------------------------------------------------------------------------------------------------


def test_scoring_leaves_every_part_as_it_was() -> None:
    model = tiny.gpt2().train()
    model.transformer.h[0].eval()
    before = {name: part.training for name, part in model.named_modules()}
    with pytest.raises(KeyError):
        with scoring(model):
            assert not any(part.training for part in model.modules()) and not torch.is_grad_enabled()
            raise KeyError
    assert {name: part.training for name, part in model.named_modules()} == before
    assert torch.is_grad_enabled() and len(set(before.values())) == 2


def test_a_copy_of_an_actor_is_an_actor() -> None:
    actor = Actor(tiny.llama(), temperature=0.5)
    records = zoo.records([(2, 3)])
    expected = policy_log_probs(actor, records).logprobs[0]
    assert TransformersEngine(actor).generate([[5, 6]], max_tokens=2)[0].error is None  # which has a lock
    other = copy.deepcopy(actor)
    with torch.no_grad():
        actor.model.lm_head.weight.zero_()
    assert torch.equal(policy_log_probs(other, records).logprobs[0], expected)
