"""Adapters: trained alone, switched off they are the reference, saved and loaded with the model they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from rollbook.compat.lightrft.models import Actor
from rollbook.models import Critic, Reference
from rollbook.rollout import TransformersEngine
from tests import tiny
from tests.models import zoo
from tests.models.zoo import policy_log_probs, reference_log_probs, values

RECORDS = [(3, 4), (1, 6), (5, 2)]


def adapted(**options: Any) -> Actor:
    """A Llama with adapters that do something."""
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.5, **options}
    actor = Actor(tiny.llama(), lora=settings, temperature=0.9)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in actor.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3, generator=draw)
    return actor


def rows(scored: Any) -> torch.Tensor:
    return scored.logprobs.tensor_of_values()


def test_the_base_is_the_reference() -> None:
    actor, records = adapted(), zoo.records(RECORDS)
    assert actor.head_path == "hidden" and actor.packs
    base = Actor(tiny.llama(), temperature=0.9)
    expected = rows(policy_log_probs(base, records))
    actor.train()
    before = {name: parameter.requires_grad for name, parameter in actor.named_parameters()}
    assert 0 < sum(before.values()) < len(before)
    mine = rows(policy_log_probs(actor, records))
    reference = actor.reference()
    assert isinstance(reference, Reference) and not list(reference.parameters())
    for scored in (
        reference_log_probs(actor, records),
        reference_log_probs(reference, records, packed=True, token_budget=8),
    ):
        torch.testing.assert_close(rows(scored), expected, rtol=1e-5, atol=1e-5)
    assert float((mine - expected).abs().max()) > 0.1
    assert torch.equal(rows(policy_log_probs(actor, records)), mine)
    assert {name: parameter.requires_grad for name, parameter in actor.named_parameters()} == before
    assert all(part.training for part in actor.modules())


def test_the_reference_is_called_as_the_actor() -> None:
    actor, base = adapted().train(), Actor(tiny.llama(), temperature=0.9)
    reference = actor.reference().eval().train().to("cpu")
    ids = torch.tensor([[5, 6, 7, 8]])
    logprobs = reference(ids, 2, torch.ones_like(ids))
    torch.testing.assert_close(logprobs, base(ids, 2), rtol=1e-5, atol=1e-5)
    assert not logprobs.requires_grad and not reference.training and actor.training
    stats = zoo.stats_of(reference, zoo.records(RECORDS), entropy=True)
    assert stats.entropy is not None and not stats.logprobs.values.requires_grad
    assert (reference.dtype, reference.device, reference.head_path, reference.packs) == (
        torch.float32,
        torch.device("cpu"),
        "hidden",
        True,
    )
    assert reference.config is actor.config and reference.model is actor.model
    with pytest.raises(ValueError, match="actor: got one without adapters"):
        Reference(base)


def test_only_adapters_learn() -> None:
    actor, records = adapted(lora_dropout=0.0).train(), zoo.records(RECORDS)
    expected = rows(reference_log_probs(actor, records))
    learner = torch.optim.SGD([parameter for parameter in actor.parameters() if parameter.requires_grad], lr=1e-3)
    first = rows(policy_log_probs(actor, records)).sum()
    zoo.stats_of(actor, records).logprobs.values.sum().neg().backward()
    learner.step()
    assert rows(policy_log_probs(actor, records)).sum() > first
    torch.testing.assert_close(rows(reference_log_probs(actor, records)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", ["attention", "head"])
def test_saved_with_its_base_and_loaded(tmp_path: Path, layers: str) -> None:
    targets = ["q_proj", "v_proj"] if layers == "attention" else ["q_proj", "lm_head"]
    actor, records = adapted(target_modules=targets), zoo.records(RECORDS)
    actor.save_pretrained(tmp_path)
    loaded = Actor(tmp_path, temperature=0.9)
    for score in (policy_log_probs, reference_log_probs):
        torch.testing.assert_close(rows(score(loaded, records)), rows(score(actor, records)), rtol=1e-5, atol=1e-5)
    learns = [
        {name for name, parameter in who.named_parameters() if parameter.requires_grad} for who in (actor, loaded)
    ]
    assert learns[0] == learns[1] and learns[0]


def test_saved_beside_a_base_that_has_a_place(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path / "model")
    actor = Actor(tmp_path / "model", lora=peft.LoraConfig(r=2, target_modules=["q_proj"]))
    actor.save_pretrained(tmp_path / "adapters")
    assert not (tmp_path / "adapters" / "base").exists()
    assert isinstance(Actor(tmp_path / "adapters").reference(), Reference)


def test_an_adapter_on_the_head_is_seen_before_it_does_anything() -> None:
    actor, records = adapted(target_modules=["q_proj", "lm_head"]), zoo.records(RECORDS)
    untrained = Actor(tiny.llama(), lora={"r": 2, "target_modules": ["lm_head"]})
    assert untrained.head_path == actor.head_path == "logits" and "lora" in actor.head.reason
    with torch.no_grad():
        expected = torch.cat([zoo.naive(actor.model.eval(), record, 0.9)[0] for record in records])
    for packed in (None, True):
        scored = policy_log_probs(actor, records, packed=packed, token_budget=9)
        torch.testing.assert_close(rows(scored), expected, rtol=1e-5, atol=1e-5)
    base = rows(policy_log_probs(Actor(tiny.llama(), temperature=0.9), records))
    torch.testing.assert_close(rows(reference_log_probs(actor, records)), base, rtol=1e-5, atol=1e-5)


def test_sampling_is_with_adapters() -> None:
    actor = adapted()
    records = [sample.to_experience() for sample in TransformersEngine(actor).generate([[5, 6], [7]], n=2, max_tokens=6, seed=0, temperature=0.9, logprobs="tempered")]  # fmt: skip  # noqa: E501
    expected = torch.cat([record.logprobs for record in records])
    torch.testing.assert_close(rows(policy_log_probs(actor, records)), expected, rtol=1e-4, atol=1e-4)
    assert float((rows(reference_log_probs(actor, records)) - expected).abs().max()) > 0.1


def test_a_critic_from_an_adapted_actor() -> None:
    torch.manual_seed(0)
    actor, records = adapted(), zoo.records(RECORDS)
    critic = Critic(backbone_from=actor, value_head="normal")
    merged = critic.backbone
    inside = actor.model.eval().get_base_model().model
    ids = records[0].tokens.long()[None]
    torch.testing.assert_close(merged(ids).last_hidden_state, inside(ids).last_hidden_state, rtol=1e-4, atol=1e-4)
    assert all(parameter.requires_grad for parameter in critic.parameters())
    before = rows(policy_log_probs(actor, records))
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.zero_()
    assert torch.equal(rows(policy_log_probs(actor, records)), before) and not values(critic, records).values[0].any()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"r": 2, "targets": ["q_proj"]}, "lora: .*targets"),
        (7, "lora: got int, expected a peft.LoraConfig or a dict"),
    ],
)
def test_bad_adapters(lora: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Actor(tiny.llama(), lora=lora)
    with pytest.raises(ValueError, match="lora: got a model with adapters"):
        Actor(adapted().model, lora={"r": 2, "target_modules": ["q_proj"]})
