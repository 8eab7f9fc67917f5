"""`transformers serve`, which returns neither ids nor log-probs: every sample is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.rollout.openai import OpenAIEngine
from rollbook.rollout.server import Backoff
from tests import tiny
from tests_vllm.conftest import PYTHON, free_port, started

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    port = free_port()
    command = [str(Path(PYTHON).parent / "transformers"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with started([*command, "--device", "cpu"], port, tmp_path_factory.mktemp("transformers") / "log") as address:
        yield address


def test_missing_ids_are_an_error(url, folder):
    with OpenAIEngine(url, str(folder), backoff=Backoff(tries=2)) as engine:
        text, chat, ids = engine.generate(["hello", CHAT, [20, 30]], max_tokens=4)
        assert engine.run.engine == "transformers-serve"
        for sample in (text, chat):
            assert "transformers-serve did not return the token ids of the response" in sample.error
        assert "prompt.token_ids: transformers-serve servers take no token ids" in ids.error


def test_retokenized_texts(url, folder):
    with OpenAIEngine(url, str(folder), tokenizer=tiny.bytes_(), retokenize=True) as engine:
        (sample,) = engine.generate("hello", max_tokens=6, logprobs=None)
        assert not sample.failed, sample.error
        assert sample.info["retokenized"] and sample.logprobs is None and sample.text
