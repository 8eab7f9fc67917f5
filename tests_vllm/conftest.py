"""Real servers over a tiny Llama: each starts once for a module, in the environment of VLLM_PYTHON (`.vllm`)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollbook.rollout.openai import OpenAIEngine
from tests import tiny

torch.set_num_threads(1)

PYTHON = os.environ.get("VLLM_PYTHON") or str(Path(__file__).parent.parent / ".vllm" / "bin" / "python")

MAX_LENGTH = 16384


@pytest.fixture(scope="session")
def model() -> Any:
    """A Llama with heads of size 64, as vLLM requires, and positions for long responses.

    It has 13 M parameters: with a smaller model, vLLM's engine leaves no time to the thread that sends tokens, which
    then arrive all at once.
    """
    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    return tiny.llama(len(tiny.bytes_()), max_position_embeddings=MAX_LENGTH, initializer_range=0.1, **shape, **heads)


@pytest.fixture(scope="session")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-model")
    model.save_pretrained(path)
    tiny.bytes_().save_pretrained(path)
    return path


SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",  # for the process that answers, which the one that computes would starve
    "VLLM_SERVER_DEV_MODE": "1",  # the routes of weight updates
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}
os.environ.update(SETTINGS)  # for vLLM in process


@contextlib.contextmanager
def started(command: list[str], port: int, log: Path) -> Iterator[str]:
    """Run a server and yield its address. If it does not start, its log is shown."""
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with OpenAIEngine(url, "tiny") as engine:
                try:
                    for _ in range(120):  # up to ten minutes, but not after it has died
                        with contextlib.suppress(TimeoutError):
                            engine.health(5)
                            break
                        if server.poll() is not None:
                            break
                    else:
                        raise TimeoutError
                    engine.health(5)
                except TimeoutError:
                    pytest.fail(f"{' '.join(command[:4])} did not come up:\n{log.read_text()[-4000:]}")
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait(30)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def vllm(folder: Path, log: Path, *more: str) -> Iterator[str]:
    """Run a vLLM server with the model in `folder`."""
    port = free_port()
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(MAX_LENGTH), "--max-num-seqs", "32", "--enforce-eager"]
    # After an update responses are recomputed. Of a seeded one, vLLM's CPU build (0.32) cannot do this in parts.
    command += ["--max-num-batched-tokens", str(2 * MAX_LENGTH)]
    with started([*command, *more], port, log) as url:
        yield url


def model_logprobs(model: Any, sample: Any, temperature: float = 1.0, top_k: int = 0) -> list[float]:
    """Compute the log-probs of a sample's tokens with transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([[*sample.prompt_ids, *sample.response_ids]])).logits[0].double()
    rows = logits[len(sample.prompt_ids) - 1 : -1] / temperature
    if top_k:
        rows = rows.masked_fill(rows < rows.topk(top_k).values[:, -1:], -torch.inf)
    return [float(row[token]) for row, token in zip(rows.log_softmax(-1), sample.response_ids, strict=True)]


def largest(actual: list[float], expected: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(actual, expected, strict=True)), default=0.0)
