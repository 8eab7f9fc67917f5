"""What TRL's released GRPO trainer makes of `to_trl`'s batches: its loss, its shuffling, a training run.

Run by `test_trl.py` in a Python of its own: transformers decides when it is imported whether accelerate is there, so
that TRL must be found before anything else is.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from benchmarks import peers

trl = peers.trl()

import datasets  # noqa: E402
import pytest  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from rollbook import Experiences  # noqa: E402
from rollbook.compat.lightrft.batch import ExperienceBatch, from_experiences  # noqa: E402
from rollbook.compat.lightrft.replay_buffer import split_experience_batch  # noqa: E402
from rollbook.compat.trl import from_trl, to_trl  # noqa: E402
from tests.adapters.samples import TRL_NAMES, make_records, scored_records  # noqa: E402

PAD = 60


def tiny_model(folder: Path) -> Any:
    """A language model of one layer, kept in a folder, from where TRL loads the reference model too."""
    torch.manual_seed(0)
    words = {f"w{i}": i for i in range(PAD)} | {"<pad>": PAD, "<eos>": PAD + 1, "<unk>": PAD + 2}
    words_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words_only, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return transformers.Qwen2ForCausalLM.from_pretrained(folder), tokenizer


def make_trainer(folder: Path, kind: Any = None, **changes: Any) -> Any:
    model, tokenizer = tiny_model(folder / "model")
    settings = {
        "output_dir": str(folder / "out"),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "beta": 0.04,
        "epsilon": 0.1,
        "use_bias_correction_kl": False,
    }
    trainer = (kind or trl.GRPOTrainer)(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(**settings | changes),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"w{i}"} for i in range(8)]),
    )
    trainer.current_gradient_accumulation_steps = 1  # which its loop sets before each step
    return trainer


# --- the loss -----------------------------------------------------------------------------------------------------


def loss_by_hand(model: Any, batch: ExperienceBatch, trainer: Any, kind: str) -> torch.Tensor:
    """The clipped policy loss with its KL term, from a batch in Rollbook's own layout."""
    logits = model(**batch.model_inputs()).logits.log_softmax(-1)
    after = torch.cat([batch.sequences[:, 1:], batch.sequences[:, :1]], dim=1).long()
    now = batch.at_actions(logits.gather(-1, after.unsqueeze(-1)).squeeze(-1))
    ratio = (now - batch.action_log_probs).exp()
    low, high = 1 - trainer.epsilon_low, 1 + trainer.epsilon_high
    gain = torch.minimum(ratio * batch.advantages, ratio.clamp(low, high) * batch.advantages)
    gap = batch.base_action_log_probs - now
    loss = trainer.beta * (gap.exp() - gap - 1) - gain
    mask = batch.action_mask.float()
    if kind == "grpo":
        return ((loss * mask).sum(1) / mask.sum(1)).mean()
    if kind == "dr_grpo":
        return (loss * mask).sum() / (len(batch) * trainer.max_completion_length)
    return (loss * mask).sum() / mask.sum()


@pytest.mark.parametrize("layout", ["left", "prompt_left_response_right"])
@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_trls_loss_is_the_loss(tmp_path: Path, kind: str, layout: str) -> None:
    trainer = make_trainer(tmp_path, loss_type=kind)
    batch = from_experiences(scored_records(1), pad_token_id=PAD, layout=layout)
    batch.base_action_log_probs = batch.action_log_probs - 0.3
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, to_trl(batch, pad_token_id=PAD))
    expected = loss_by_hand(trainer.model, batch, trainer, kind)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4) and loss.item() != 0
    found_gradient = torch.autograd.grad(loss, list(trainer.model.parameters()))
    gradient = torch.autograd.grad(expected, list(trainer.model.parameters()))
    for a, b in zip(found_gradient, gradient, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_some_of_the_ratios_are_clipped(tmp_path: Path) -> None:
    """What the test above compares is not the plain policy gradient."""
    trainer = make_trainer(tmp_path)
    batch = from_experiences(scored_records(1), pad_token_id=PAD)
    batch.base_action_log_probs = batch.action_log_probs
    clipped = loss_by_hand(trainer.model, batch, trainer, "grpo").item()
    trainer.epsilon_low = trainer.epsilon_high = 100.0
    assert loss_by_hand(trainer.model, batch, trainer, "grpo").item() != pytest.approx(clipped, rel=1e-3)


def test_advantages_by_token(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, loss_type="grpo")
    batch = from_experiences(scored_records(2), pad_token_id=PAD)
    batch.base_action_log_probs = batch.action_log_probs
    even = to_trl(batch, pad_token_id=PAD)
    assert even["advantages"].shape == (4,)
    by_token = to_trl(batch, pad_token_id=PAD, per_token_advantages=True)
    assert by_token["advantages"].shape == by_token["completion_ids"].shape
    losses = [trainer._compute_loss(trainer.model, inputs).item() for inputs in (even, by_token)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)

    batch.advantages = torch.arange(batch.advantages.numel()).reshape(batch.advantages.shape) * batch.action_mask * 0.1
    with pytest.raises(ValueError, match=r"advantages: got .* to .* in row \d \(b%2F1.*per_token_advantages=True"):
        to_trl(batch, pad_token_id=PAD)
    loss = trainer._compute_loss(trainer.model, to_trl(batch, pad_token_id=PAD, per_token_advantages=True))
    expected = loss_by_hand(trainer.model, batch, trainer, "grpo")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


# --- in a trainer -------------------------------------------------------------------------------------------------


def test_a_trainer_trains_on_it(tmp_path: Path) -> None:
    """TRL's own loop: it shuffles and splits the batch, and steps; every record arrives once."""
    records = scored_records(3, count=16)
    seen: list[str] = []
    losses: list[float] = []

    waiting = [records[:8], records[8:]]

    class Offline(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            assert len(inputs) == 8
            return to_trl(waiting.pop(0), pad_token_id=PAD)

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            seen.extend(inputs["unique_ids"])
            back = from_trl(inputs, layout="left")
            assert [eid.uid for eid in back.ids] == inputs["unique_ids"]
            chosen = [row for row in records if row.eid.uid in inputs["unique_ids"]]
            chosen.sort(key=lambda row: inputs["unique_ids"].index(row.eid.uid))
            assert back == from_experiences(chosen)
            loss = super()._compute_loss(model, inputs)
            losses.append(loss.item())
            return loss

    trainer = make_trainer(tmp_path, Offline, gradient_accumulation_steps=2, max_steps=2, learning_rate=1e-2, beta=0.0)
    before = [value.detach().clone() for value in trainer.model.parameters()]
    trainer.train()
    assert sorted(seen) == sorted(row.eid.uid for row in records) and len(losses) == 4
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**16), st.booleans())
def test_trls_shuffle_and_split_keep_rows_whole(seed: int, media: bool) -> None:
    utils = importlib.import_module("trl.trainer.utils")
    records = make_records(seed, count=6, names=TRL_NAMES, media=media)
    records = Experiences([row.replace(advantages=torch.full((len(row.logprobs),), row.reward)) for row in records])
    torch.manual_seed(seed)
    batch = utils.split_pixel_values_by_grid(to_trl(records, pad_token_id=0))
    parts = utils.split_tensor_dict(utils.shuffle_sequence_dict(batch), 3)
    rows = {}
    for part in map(utils.unsplit_pixel_values_by_grid, parts):
        for item in split_experience_batch(from_trl(part), unpad=True):
            rows[item.eid.uid] = item
    expected = split_experience_batch(from_experiences(records), unpad=True)
    assert [rows[row.eid.uid] for row in records] == expected
