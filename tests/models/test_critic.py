"""Critics: values of the state before each response token, from backbones, actors, folders and token classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rollbook.compat.lightrft.batch import from_experiences
from rollbook.compat.lightrft.models import Critic
from rollbook.models import Actor
from tests import tiny
from tests.models import zoo
from tests.models.batches import native_batch
from tests.models.zoo import values

SHAPES = [(3, 4), (2, 0), (1, 6), (5, 2)]


def naive(critic: Critic, record: Any) -> torch.Tensor:
    """The head on the hidden state of the token before each of the response."""
    hidden = critic.backbone(record.tokens.long()[None]).last_hidden_state[0].float()
    return critic.value_head(hidden)[record.prompt_length - 1 : -1, 0]


@pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2, tiny.qwen3])
def test_values_are_of_the_state_before(make: Any) -> None:
    torch.manual_seed(0)
    critic, records = Critic(make(), value_head="normal"), zoo.records(SHAPES)
    torch.nn.init.ones_(critic.value_head.bias)
    expected = [naive(critic, record) for record in records]
    for layout in ("left", "prompt_left_response_right"):
        batch = from_experiences(records, layout=layout)
        state_values = critic.token_values(native_batch(batch))
        called = critic(batch.sequences, batch.action_mask.shape[1], batch.attention_mask)
        for i, row in enumerate(expected):
            torch.testing.assert_close(state_values[i][batch.action_mask[i]], row, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(called[i][batch.action_mask[i]], row, rtol=1e-5, atol=1e-5)
            assert not state_values[i][~batch.action_mask[i]].any()
    packed = from_experiences(records, packing_samples=True)
    lengths = packed.cu_seqlens.diff()
    numbers = torch.repeat_interleave(torch.arange(1, 5), lengths)[None]
    called = critic(packed.sequences.values[None], [4, 0, 6, 2], numbers, packed_seq_lens=lengths)
    torch.testing.assert_close(called[0], torch.cat(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(zoo.values_of(critic, records).values, torch.cat(expected), rtol=1e-5, atol=1e-5)
    critic.token_values(native_batch(packed)).values.square().sum().backward()
    assert critic.value_head.weight.grad is not None and critic.value_head.weight.grad.abs().sum() > 0
    assert next(critic.backbone.parameters()).grad is not None


def test_fresh_heads() -> None:
    records = zoo.records(SHAPES)
    assert not values(Critic(tiny.llama().config), records).values.tensor_of_values().any()
    assert values(Critic(tiny.llama().config, value_head="normal"), records).values.tensor_of_values().std() > 0.1
    half = Critic(tiny.llama().config, dtype="bfloat16", value_head="normal")
    assert half.dtype == torch.bfloat16 and half.value_head.weight.dtype == torch.float32
    assert values(half, records).values.dtype == "float32"


def test_the_actors_backbone_is_copied() -> None:
    actor = Actor(tiny.llama())
    critic = Critic(backbone_from=actor, value_head="normal")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(critic.backbone(ids).last_hidden_state, actor.model.model(ids).last_hidden_state)
    assert not {id(parameter) for parameter in critic.parameters()} & {
        id(parameter) for parameter in actor.parameters()
    }
    output = critic(ids, 2, return_output=True)[1]
    assert output.last_hidden_state.shape == (1, 3, 32)


def test_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    critic, records = Critic(tiny.qwen3(), value_head="normal"), zoo.records(SHAPES)
    critic.save_pretrained(tmp_path)
    again = Critic(tmp_path)
    expected = values(critic, records).values.tensor_of_values()
    assert torch.equal(values(again, records).values.tensor_of_values(), expected) and expected.any()
    # A language model's folder is a backbone with a fresh head.
    tiny.qwen3().save_pretrained(tmp_path / "model")
    loaded = Critic(str(tmp_path / "model"))
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded.backbone(ids).last_hidden_state, critic.backbone(ids).last_hidden_state)
    assert not values(loaded, records).values.tensor_of_values().any()


def test_a_token_classifier_with_one_label(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny.llama().config
    config.num_labels = 1
    model = transformers.LlamaForTokenClassification(config).eval()
    torch.nn.init.normal_(model.score.weight)
    records = zoo.records(SHAPES)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = torch.cat(
            [model(r.tokens.long()[None]).logits[0, r.prompt_length - 1 : -1, 0] for r in records if len(r.tokens)]
        )
    for critic in (Critic(model), Critic(tmp_path)):
        torch.testing.assert_close(values(critic, records).values.tensor_of_values(), expected, rtol=1e-5, atol=1e-5)
    config.num_labels = 3
    transformers.LlamaForTokenClassification(config).save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match="model: got a classifier of 3 labels, expected one of 1"):
        Critic(tmp_path / "three")
    with pytest.raises(ValueError, match="expected a linear one with a single output"):
        Critic(transformers.LlamaForTokenClassification(config))


def test_a_reward_model_begins_as_a_critic(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny.llama().config
    config.num_labels = 1
    model = transformers.LlamaForSequenceClassification(config).eval()
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    for critic in (Critic(model), Critic(tmp_path)):
        # The value of the state that ends with a token is the score of the sequence up to there.
        torch.testing.assert_close(critic(ids, 1), model(ids[:, :-1]).logits, rtol=1e-5, atol=1e-5)


def test_bad_critics() -> None:
    with pytest.raises(ValueError, match="value_head: got 'ones'"):
        Critic(tiny.llama(), value_head="ones")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model: expected either model or backbone_from"):
        Critic()
    with pytest.raises(ValueError, match="model: expected either model or backbone_from"):
        Critic(tiny.llama(), backbone_from=Actor(tiny.llama()))
    bloom = transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=1, n_head=4, initializer_range=0.2)
    critic = Critic(bloom)
    assert not critic.packs
    with pytest.raises(ValueError, match="does not separate packed samples"):
        critic.token_values(zoo.batch_of(zoo.records(SHAPES), packed=True))


def test_gradient_checkpointing() -> None:
    critic = Critic(tiny.llama(), value_head="normal").train()
    critic.gradient_checkpointing_enable()
    zoo.values_of(critic, zoo.records(SHAPES)).values.sum().backward()
    assert critic.backbone.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    critic.gradient_checkpointing_disable()
    assert not critic.backbone.is_gradient_checkpointing
