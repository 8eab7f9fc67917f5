"""Reward models: real tiny classifiers and plain modules; scores do not depend on batches, padding or modes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from rollbook.compat.lightrft.rewards import Scorer, TextModelReward
from rollbook.rewards import ModelReward, RewardInput, as_reward
from tests.tiny import bytes_, words


def config(**more: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "num_labels": 1,
        "pad_token_id": 0,
    }
    return LlamaConfig(**settings | more)


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config(**more)).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    settings = GPT2Config(
        vocab_size=300,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        num_labels=1,
        pad_token_id=2,
        initializer_range=0.2,
    )
    return GPT2ForSequenceClassification(settings).eval()


def bert() -> Any:
    torch.manual_seed(0)
    settings = BertConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=1,
        initializer_range=0.2,
        max_position_embeddings=64,
    )
    return BertForSequenceClassification(settings).eval()


def reward_input(prompt: list[int], response: list[int], **more: Any) -> RewardInput:
    return RewardInput(
        prompt=more.pop("text", "p"), response=more.pop("said", "r"), prompt_ids=prompt, response_ids=response, **more
    )


def alone(model: Any, ids: list[int]) -> float:
    """The score of one sequence, without any padding, from the model itself: its head on the last hidden state."""
    with torch.no_grad():
        return float(model.score(model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]))


INPUTS = [
    reward_input([5, 6], [7, 8, 2]),
    reward_input([9], [2]),
    reward_input([4, 4, 4, 4], [11, 12, 13, 14, 15]),
    reward_input([7], [2, 2, 2]),
]


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 1}, {"batch_size": 2}, {"token_budget": 10}, {"pad_token_id": 2}, {"pad_token_id": 7}],
)
def test_the_score_is_that_of_the_last_token_in_any_batch(make: Any, options: dict[str, Any]) -> None:
    # The pad token of the GPT-2 is its end token, which the classifier's own pooling would skip.
    model = make()
    scores = ModelReward(model, **options)(INPUTS)
    expected = [alone(model, [*i.prompt_ids, *i.response_ids]) for i in INPUTS]
    assert scores.rewards == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(expected)


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(1, 299), min_size=1, max_size=12), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(1, 40),
)
def test_batches_do_not_matter(rows: list[list[int]], size: int, tokens: int) -> None:
    model = _MODEL
    inputs = [reward_input([], row) for row in rows]
    expected = ModelReward(model, batch_size=99)(inputs).rewards
    assert ModelReward(model, batch_size=size, token_budget=tokens)(inputs).rewards == pytest.approx(expected, abs=1e-5)


_MODEL = llama()


def test_an_encoder_is_padded_on_the_right() -> None:
    model = bert()
    scores = ModelReward(model, batch_size=4)(INPUTS)
    with torch.no_grad():
        expected = [float(model(torch.tensor([[*i.prompt_ids, *i.response_ids]])).logits[0, 0]) for i in INPUTS]
    assert scores.rewards == pytest.approx(expected, abs=1e-5)


def test_half_precision_and_a_path_and_a_config(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    expected = ModelReward(model)(INPUTS).rewards
    assert ModelReward(str(tmp_path))(INPUTS).rewards == pytest.approx(expected, abs=1e-6)
    assert as_reward(str(tmp_path), batch_size=1)(INPUTS).rewards == pytest.approx(expected, abs=1e-5)
    halved = ModelReward(tmp_path, dtype=torch.bfloat16)
    assert next(halved.model.parameters()).dtype == torch.bfloat16
    assert halved(INPUTS).rewards == pytest.approx(expected, abs=0.3)
    untrained = as_reward(config())
    assert isinstance(untrained, ModelReward) and all(map(math.isfinite, untrained(INPUTS).rewards))
    with pytest.raises(ValueError, match="num_labels 2, expected 1"):
        ModelReward(config(num_labels=2))
    with pytest.raises(ValueError, match="model: got int"):
        ModelReward(3)


def test_adapters_count() -> None:
    from peft import LoraConfig, get_peft_model

    plain = ModelReward(llama())(INPUTS).rewards
    wrapped = get_peft_model(
        llama(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    scores = ModelReward(wrapped)(INPUTS).rewards
    assert scores != pytest.approx(plain, abs=1e-3)
    with torch.no_grad():
        ids = [*INPUTS[2].prompt_ids, *INPUTS[2].response_ids]
        expected = float(wrapped.eval()(input_ids=torch.tensor([ids])).logits[0, 0])
    assert scores[2] == pytest.approx(expected, abs=1e-5)


# --- plain modules --------------------------------------------------------------------------------------------------


class Sum(torch.nn.Module):
    """(B,) or another form of the sum of the attended ids."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.inner = torch.nn.Dropout(0.9)
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        assert not self.training and not self.inner.training and not torch.is_grad_enabled()
        total = self.inner(self.weight * (sequences * attention_mask).sum(-1).float())
        return {
            "tensor": lambda: total,
            "column": lambda: total[:, None],
            "dict": lambda: {"score": total},
            "ints": lambda: total.long(),
            "two": lambda: total[:, None].repeat(1, 2),
            "short": lambda: total[:-1],
            "nan": lambda: torch.where(total > 15, torch.nan, total),
            "text": lambda: "good",
        }[self.form]()


@pytest.mark.parametrize("form", ["tensor", "column", "dict", "ints"])
def test_the_forms_of_a_score(form: str) -> None:
    assert ModelReward(Sum(form), batch_size=3)(INPUTS).rewards == [28.0, 11.0, 81.0, 13.0]


def test_wrong_forms_are_errors() -> None:
    with pytest.raises(ValueError, match=r"shape \[1\], expected \[2\]"):
        ModelReward(Sum("short"))(INPUTS[:2])
    with pytest.raises(ValueError, match=r"score=\.\.\. picks one"):
        ModelReward(Sum("two"))(INPUTS)
    with pytest.raises(ValueError, match="gave str"):
        ModelReward(Sum("text"))(INPUTS)
    assert ModelReward(Sum("two"), score=lambda output: output[:, 1])(INPUTS).rewards[1] == 11.0


def test_a_score_that_is_not_finite_is_its_samples_error() -> None:
    scores = ModelReward(Sum("nan"))(INPUTS)
    assert [math.isnan(value) for value in scores.rewards] == [True, False, True, False]
    assert scores.errors[0] == "Sum: gave nan, expected a finite number" and scores.errors[1] is None
    assert ModelReward(Sum("nan"), on_error=0.0)(INPUTS).rewards == [0.0, 11.0, 0.0, 13.0]


def test_a_sample_that_is_too_long_or_empty_is_its_own_error() -> None:
    scores = ModelReward(Sum(), max_length=5, name="rm")([*INPUTS, reward_input([], [])])
    assert scores.errors[2] == "rm: got 9 tokens, expected at most 5 (max_length)"
    assert scores.errors[4] is not None and "no token ids" in scores.errors[4]
    assert scores.rewards[:2] == [28.0, 11.0]


def test_the_model_is_left_as_it_was() -> None:
    model = Sum()
    model.train()
    model.inner.eval()
    ModelReward(model)(INPUTS)
    assert model.training and not model.inner.training
    broken = Sum("short").train()
    with pytest.raises(ValueError, match="shape"):
        ModelReward(broken)(INPUTS)
    assert broken.training and broken.inner.training


def test_padding_on_the_left_for_modules_that_look_at_the_end() -> None:
    class Last(torch.nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return ids[:, -1]

    assert ModelReward(Last(), padding_side="left")(INPUTS).rewards == [2.0, 2.0, 15.0, 2.0]
    assert ModelReward(Last(), pad_token_id=99)(INPUTS).rewards == [99.0, 99.0, 15.0, 99.0]


def test_a_module_written_for_lightrft_gets_its_texts() -> None:
    class Written(torch.nn.Module):
        def forward(
            self, sequences: Any, attention_mask: Any, prompt_and_output: Any, raw_images: Any, labels: Any
        ) -> Any:
            assert raw_images == [["i"], []] and labels == ["l", None]
            return {"score": torch.tensor([float(len(text)) for text in prompt_and_output])}

    inputs = [
        reward_input([1], [2], text="ab", said="c", images=("i",), label="l"),
        reward_input([1], [2], text="abcd", said="e"),
    ]
    assert TextModelReward(Written())(inputs).rewards == [3.0, 5.0]
    assert Scorer(Written())(inputs).rewards == [3.0, 5.0]


def test_several_models_with_weights() -> None:
    both = as_reward([Sum(), llama()], names=["sum", "rm"], weights=[0.5, 1.0], batch_size=2)
    scores = both(INPUTS)
    assert scores.metrics["sum"] == [28.0, 11.0, 81.0, 13.0]
    assert scores.rewards == pytest.approx([0.5 * s + r for s, r in zip(*scores.metrics.values(), strict=True)])


# --- tokens ---------------------------------------------------------------------------------------------------------


class Seen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        self.rows += [row[mask.bool()].tolist() for row, mask in zip(sequences, attention_mask, strict=True)]
        return attention_mask.sum(-1)


def test_the_policys_ids_are_used_as_they_are() -> None:
    for options in ({}, {"tokenizer": words(), "policy_tokenizer": words()}):
        model = Seen()
        ModelReward(model, **options)([reward_input([5, 5], [7, 2], text="the", said="fox")])
        assert model.rows == [[5, 5, 7, 2]]


def test_another_tokenizer_reads_the_texts() -> None:
    tokenizer = bytes_()
    chat = [{"role": "user", "content": "hi"}]
    with_texts = reward_input([1], [2], text="hi", said="ho", messages=chat)
    bare = reward_input([1], [2], text="hi", said="ho")
    cases = [
        (with_texts, "auto", "<|user|>hi<|end|><|assistant|>ho<|end|>"),
        (bare, "auto", "hiho"),
        (bare, "chat", "<|user|>hi<|end|><|assistant|>ho<|end|>"),
        (with_texts, "text", "hiho"),
    ]
    for sample, template, text in cases:
        for policy in (None, words()):
            model = Seen()
            ModelReward(model, tokenizer=tokenizer, policy_tokenizer=policy, template=template)([sample])  # type: ignore[arg-type]
            assert tokenizer.decode(model.rows[0]) == text


def test_no_samples() -> None:
    assert ModelReward(Sum())([]).rewards == []


def test_options_are_checked() -> None:
    for name, value in {
        "batch_size": 0,
        "token_budget": 0,
        "max_length": 0,
        "padding_side": "up",
        "template": "x",
        "on_error": "x",
    }.items():
        with pytest.raises(ValueError, match=name):
            ModelReward(Sum(), **{name: value})  # type: ignore[arg-type]
