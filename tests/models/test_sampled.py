"""For the same weights, log-probs recorded at sampling are those of the training forward pass; the largest difference
is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollbook.models import Actor
from rollbook.rollout import TransformersEngine
from tests import tiny
from tests.models.zoo import policy_log_probs

PROMPTS = [[5, 6, 7, 9, 10, 11, 12, 13], [8], [10, 11], [20, 21, 22, 23, 24]]
MODELS = {"llama": tiny.llama, "qwen3": tiny.qwen3, "gpt2": tiny.gpt2}

HOW: list[tuple[float, dict[str, Any]]] = [
    (0.5, {}),
    (1.0, {}),
    (1.5, {}),
    (0.7, {"max_prompt_tokens": 4, "prompt_overflow": "left"}),
    (1.2, {"max_prompt_tokens": 4, "prompt_overflow": "right"}),
    (0.9, {"top_p": 0.8, "top_k": 40}),
]


def differences(actor: Actor, temperature: float, packed: bool | None, **options: Any) -> torch.Tensor:
    samples = TransformersEngine(actor).generate(
        PROMPTS, n=2, max_tokens=24, temperature=temperature, logprobs="tempered", seed=1, **options
    )
    records = [sample.to_experience() for sample in samples]
    assert all(record.finish_reason in ("stop", "length") for record in records)
    scored = policy_log_probs(actor, records, temperature=temperature, packed=packed, token_budget=200).logprobs
    recorded = torch.cat([record.logprobs for record in records])
    assert len(recorded) > 100 and recorded.std() > 0.1
    return (scored.tensor_of_values() - recorded).abs()


@pytest.mark.parametrize("packed", [None, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sampled_and_scored(
    dtype: torch.dtype, name: str, packed: bool | None, record_property: Callable[[str, object], None]
) -> None:
    actor = Actor(MODELS[name](dtype=dtype), tokenizer=tiny.words())
    largest, mean = 0.0, 0.0
    for temperature, options in HOW:
        off = differences(actor, temperature, packed, **options)
        largest, mean = max(largest, float(off.max())), max(mean, float(off.mean()))
    record_property("largest difference", largest)
    record_property("largest mean difference", mean)
    print(f"\n{name} {dtype} {'packed' if packed else 'padded'}: largest {largest:.3g}, mean {mean:.3g}")
    if dtype == torch.float32:
        assert largest < 1e-4
    else:
        assert mean < 0.02


def test_another_temperature_is_another_distribution() -> None:
    actor = Actor(tiny.llama(), tokenizer=tiny.words())
    samples = TransformersEngine(actor).generate(PROMPTS, max_tokens=8, temperature=0.5, seed=1)
    records = [sample.to_experience() for sample in samples]
    scored = policy_log_probs(actor, records, temperature=1.0).logprobs.tensor_of_values()
    assert float((scored - torch.cat([record.logprobs for record in records])).abs().max()) > 0.1


def test_images(record_property: Callable[[str, object], None]) -> None:
    from rollbook.rollout import Prompt

    model, processor = tiny.llava()
    actor = Actor(model, processor=processor)
    colours = ((255, 0, 0), (0, 255, 0), (0, 0, 255))
    pictures = [[], [tiny.picture(colours[0])], [tiny.picture(colours[1]), tiny.picture(colours[2])]]
    prompts = [Prompt(text="<image>" * len(some) + "what?", images=some) for some in pictures]
    largest = 0.0
    # Nothing is cut off here, so that what was sampled from is what is scored: all tokens but the image's.
    for temperature in (0.7, 1.2):
        samples = TransformersEngine(actor).generate(
            prompts, n=3, max_tokens=12, temperature=temperature, logprobs="tempered", seed=2, ignore_eos=True
        )
        records = [sample.to_experience() for sample in samples]
        assert [sample.error for sample in samples] == [None] * 9
        for packed in (None, True):
            scored = policy_log_probs(actor, records, temperature=temperature, packed=packed).logprobs
            off = (scored.tensor_of_values() - torch.cat([sample.logprobs for sample in records])).abs()
            largest = max(largest, float(off.max()))
    record_property("largest difference", largest)
    print(f"\nllava: largest {largest:.3g}")
    assert largest < 1e-4
