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
    """Heads of 64, which vLLM takes, room for long responses, and large enough (13 M) for a step to take a while: of a
    smaller one, vLLM's engine leaves no time to the thread that sends its tokens, which then come all at once."""
    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    return tiny.llama(len(tiny.bytes_()), max_position_embeddings=MAX_LENGTH, initializer_range=0.1, **shape, **heads)


@pytest.fixture(scope="session")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny-model")
    model.save_pretrained(made)
    tiny.bytes_().save_pretrained(made)
    return made


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
    """A server's address while it runs; what it said is shown if it does not come up."""
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
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def vllm(folder: Path, log: Path, *more: str) -> Iterator[str]:
    """A vLLM server over the model in `folder`."""
    port = free_port()
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(MAX_LENGTH), "--max-num-seqs", "32", "--enforce-eager"]
    # After an update responses are recomputed. Of a seeded one, vLLM's CPU build (0.32) cannot do this in parts.
    command += ["--max-num-batched-tokens", str(2 * MAX_LENGTH)]
    with started([*command, *more], port, log) as url:
        yield url


def model_logprobs(model: Any, sample: Any, temperature: float = 1.0, top_k: int = 0) -> list[float]:
    """What transformers says of a sample's tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([[*sample.prompt_ids, *sample.response_ids]])).logits[0].double()
    rows = logits[len(sample.prompt_ids) - 1 : -1] / temperature
    if top_k:
        rows = rows.masked_fill(rows < rows.topk(top_k).values[:, -1:], -torch.inf)
    return [float(row[one]) for row, one in zip(rows.log_softmax(-1), sample.response_ids, strict=True)]


def largest(found: list[float], want: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(found, want, strict=True)), default=0.0)
