"""vLLM's OpenAI-compatible API, with the extensions that return token ids."""

from __future__ import annotations

from typing import Any, ClassVar

from rollbook.core.sampling import LogprobsKind, Sampling
from rollbook.rollout.server import Dialect, ServerRequest


class VLLM(Dialect):
    """vLLM from 0.10.2 on: token ids with every reply, all options, n samples per request.

    Sample k of a request has seed `seed + k`. Log-probs are `raw` unless the server was started with
    `--logprobs-mode processed_logprobs`, which is not reported: then set `logprobs_kind="processed"`.
    """

    name = "vllm"
    gives_ids = True
    logprobs_kind: ClassVar[LogprobsKind | None] = "raw"
    supported = frozenset({"min_tokens", "top_k", "min_p", "stop_token_ids", "ignore_eos", "suppress"})
    cannot = (
        "log-probs of another kind than the server's --logprobs-mode (raw unless logprobs_kind= says otherwise)",
        "go on with a prompt that has images: only token ids are sent again",
    )
    ids_from = "vLLM gives them from 0.10.2 on (return_token_ids)"
    logprobs_from = "vLLM gives them when it is asked (logprobs), unless extra= or a proxy takes that out"
    interval = 8
    """Tokens per event of a stream. Smaller events are slower; a cancel loses fewer tokens than this."""

    def shares_request(self, sampling: Sampling) -> bool:
        return True

    def seed_of(self, seed: int, k: int) -> int:
        return seed + k

    def body(self, request: ServerRequest) -> dict[str, Any]:
        sampling = request.sampling
        body = self._common_body(request) | {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "min_tokens": request.min_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "include_stop_str_in_output": sampling.include_stop,
            "ignore_eos": sampling.ignore_eos,
            "add_special_tokens": False,
            "return_token_ids": True,
        }
        if sampling.logprobs is not None:
            body |= {"logprobs": 0} if request.messages is None else {"logprobs": True, "top_logprobs": 0}
        if request.stream:
            body["stream_interval"] = self.interval
        return body
