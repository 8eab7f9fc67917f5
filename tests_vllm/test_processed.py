"""A vLLM server with `--logprobs-mode processed_logprobs`."""

from __future__ import annotations

import pytest

from rollbook.rollout.openai import OpenAIEngine
from tests_vllm.conftest import largest, model_logprobs, vllm


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "log"
    with vllm(folder, log, "--logprobs-mode", "processed_logprobs") as address:
        yield address


@pytest.mark.parametrize(("temperature", "top_k"), [(0.7, -1), (1.3, 9), (1.0, -1)])
def test_processed_logprobs(url, model, temperature, top_k):
    with OpenAIEngine(url, logprobs_kind="processed") as engine:
        samples = engine.generate("hello", n=8, max_tokens=48, temperature=temperature, top_k=top_k, seed=1)
    worst = max(
        largest(sample.logprobs, model_logprobs(model, sample, temperature, max(top_k, 0))) for sample in samples
    )
    print(f"\nlargest difference of processed log-probs: {worst:.2e}")
    assert worst < 1e-4 and {sample.logprobs_kind for sample in samples} == {"processed"}
