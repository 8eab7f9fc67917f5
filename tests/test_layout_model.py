"""Padded and packed are one thing to a model: log-probs, advantages, loss and gradient are equal in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from rollbook import EID, Experience
from rollbook.compat.lightrft.batch import BufferItem, ExperienceBatch, from_experiences
from rollbook.compat.lightrft.replay_buffer import make_experience_batch
from rollbook.core.rows import Rows

VOCABULARY = 64
LAYOUTS: dict[str, Callable[[list[BufferItem]], ExperienceBatch]] = {
    "left": lambda items: make_experience_batch(items, pad_token_id=3),
    "fresh": lambda items: make_experience_batch(items, pad_token_id=3, layout="prompt_left_response_right"),
    "packed": lambda items: make_experience_batch(items, packing_samples=True),
    "padded, then packed": lambda items: make_experience_batch(items, pad_token_id=3).pack(),
}
CLOSE = {"eager": (torch.float32, 3e-5), "sdpa": (torch.float64, 1e-9)}


def model(attention: str, kind: str = "llama") -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    configs = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    torch.manual_seed(0)
    # Eager attention takes its softmax in float32, where the mask of a float64 model would overflow.
    built = transformers.AutoModelForCausalLM.from_config(
        configs[kind](**sizes), attn_implementation=attention, dtype=CLOSE[attention][0]
    )
    return built.eval()


def close(actual: torch.Tensor, expected: torch.Tensor, attention: str, about: str = "") -> None:
    dtype, tolerance = CLOSE[attention]
    torch.testing.assert_close(actual.to(dtype), expected.to(dtype), rtol=tolerance, atol=tolerance, msg=about or None)


def samples(count: int = 7) -> list[BufferItem]:
    """Prompts and responses of several lengths, one with tool tokens in between, one masked throughout."""
    draw = torch.Generator().manual_seed(1)
    items = []
    for i in range(count):
        prompt, response = 1 + (5 * i) % 9, 1 + (7 * i) % 11
        mask = torch.ones(response, dtype=torch.bool)
        if i == 3:
            mask[1 : response // 2] = False
        if i == 5:
            mask[:] = False
        items.append(
            BufferItem(
                sequences=torch.randint(4, VOCABULARY, (prompt + response,), generator=draw),
                action_log_probs=-torch.rand(response, generator=draw, dtype=torch.float64),
                base_action_log_probs=-torch.rand(response, generator=draw, dtype=torch.float64),
                values=None,
                returns=None,
                advantages=torch.randn(response, generator=draw, dtype=torch.float64),
                attention_mask=torch.ones(prompt + response, dtype=torch.int64),
                action_mask=mask,
                info={"reward": float(i)},
            )
        )
    return items


def log_probs(policy: nn.Module, batch: ExperienceBatch) -> torch.Tensor:
    """(B, A) or (slots,) The log-probs of the response tokens, as a trainer computes them."""
    logits = batch.at_actions(policy(**batch.model_inputs()).logits)
    return logits.log_softmax(-1).gather(-1, actions(batch).unsqueeze(-1)).squeeze(-1)


def actions(batch: ExperienceBatch) -> torch.Tensor:
    """The token that each response slot speaks of."""
    if batch.layout == "padded":
        return batch.sequences[:, -batch.action_mask.shape[1] :]
    counts = [len(row) for row in batch.action_mask]
    return torch.cat([row[len(row) - count :] for row, count in zip(batch.sequences, counts, strict=True)])


def flat(batch: ExperienceBatch, value: Any) -> torch.Tensor:
    """The valid slots of a response-axis field, sample by sample."""
    if isinstance(value, Rows):
        return value.values
    if batch.layout == "packed":
        return value
    packed = ExperienceBatch(**{**vars(batch), "values": value}).pack()
    return packed.values.values


def loss(new: torch.Tensor, old: Any, advantages: Any, mask: Any) -> torch.Tensor:
    """A clipped policy loss, its mean over the tokens that count."""
    old, advantages, mask = (v.values if isinstance(v, Rows) else v for v in (old, advantages, mask))
    ratio = (new - old).exp()
    terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return torch.where(mask, terms, 0).sum() / mask.sum()


@pytest.mark.parametrize("attention", CLOSE)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_every_layout_gives_the_same(attention: str, kind: str) -> None:
    policy, items = model(attention, kind), samples()
    # One sample at a time, without any layout: what all of them must reproduce.
    alone = []
    for item in items:
        logits = policy(input_ids=item.sequences[None]).logits[0].log_softmax(-1)
        every = logits[:-1].gather(-1, item.sequences[1:, None]).squeeze(-1)
        alone.append(every[len(every) - len(item.action_mask) :])
    expected = torch.cat(alone)
    fields = {name: torch.cat([getattr(item, name) for item in items]) for name in ("action_log_probs", "advantages")}
    mask = torch.cat([item.action_mask for item in items])
    expected_loss = loss(expected, fields["action_log_probs"], fields["advantages"], mask)
    expected_gradient = torch.autograd.grad(expected_loss, list(policy.parameters()))

    for name, make in LAYOUTS.items():
        batch = make(items)
        new = log_probs(policy, batch)
        close(flat(batch, new), expected, attention, name)
        assert torch.equal(flat(batch, batch.advantages), fields["advantages"]), name
        assert torch.equal(flat(batch, batch.action_mask), mask), name
        actual_loss = loss(new, batch.action_log_probs, batch.advantages, batch.action_mask)
        close(actual_loss, expected_loss, attention, name)
        for actual_slopes, expected_slopes in zip(
            torch.autograd.grad(actual_loss, list(policy.parameters())), expected_gradient, strict=True
        ):
            close(actual_slopes, expected_slopes, attention, name)


def test_packed_samples_do_not_see_each_other() -> None:
    policy, items = model("sdpa"), samples()
    batch = make_experience_batch(items, packing_samples=True)
    inputs = batch.model_inputs()
    before = policy(**inputs).logits
    changed = inputs["input_ids"].clone()
    changed[0, : len(items[0].sequences)] = 5
    after = policy(**{**inputs, "input_ids": changed}).logits
    rest = len(items[0].sequences)
    assert torch.equal(before[0, rest:], after[0, rest:])
    assert not torch.equal(before[0, :rest], after[0, :rest])


def test_from_records_to_the_model() -> None:
    policy = model("sdpa")
    records = [
        Experience(
            eid=EID(0, i, 0),
            tokens=item.sequences,
            prompt_length=len(item.sequences) - len(item.action_mask),
            logprobs=item.action_log_probs,
            advantages=item.advantages,
            action_mask=item.action_mask,
        )
        for i, item in enumerate(samples())
    ]
    padded = from_experiences(records, pad_token_id=3)
    packed = from_experiences(records, packing_samples=True)
    close(flat(padded, log_probs(policy, padded)), log_probs(policy, packed), "sdpa")


def test_rows_without_actions_change_nothing() -> None:
    policy, items = model("sdpa"), samples()
    with_actions = [item for item in items if item.action_mask.any()]
    empty = BufferItem(
        torch.tensor([5, 6]),
        *[torch.zeros(0, dtype=torch.float64)] * 2,
        None,
        None,
        torch.zeros(0, dtype=torch.float64),
        torch.ones(2, dtype=torch.int64),
        torch.zeros(0, dtype=torch.bool),
        {"reward": 0.0},
    )
    results = []
    for rows in (with_actions, [*items, empty], [empty, *items]):
        for make in LAYOUTS.values():
            batch = make(rows)
            new = log_probs(policy, batch)
            row_loss = loss(new, batch.action_log_probs, batch.advantages, batch.action_mask)
            results.append((row_loss, *torch.autograd.grad(row_loss, list(policy.parameters()))))
    for outcome in results[1:]:
        for slopes, first_slopes in zip(outcome, results[0], strict=True):
            close(slopes, first_slopes, "sdpa")
            assert torch.isfinite(slopes).all()
