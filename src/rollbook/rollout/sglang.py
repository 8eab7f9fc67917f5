"""`SglangApi`: the native API of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rollbook.core.sampling import LogprobsKind
from rollbook.rollout.server import (
    OPTIONAL_SAMPLING,
    BadReplyError,
    JsonValue,
    PartialSample,
    ServerApi,
    ServerRequest,
    parse_version,
)


class SglangApi(ServerApi):
    """API of SGLang: `/generate`, which takes ids and returns (log-prob, id) pairs. Its OpenAI endpoints return no ids.

    Log-probs are after temperature and before truncation; for a server with SGLANG_RETURN_ORIGINAL_LOGPROB=1 set
    `logprobs_kind="raw"`. Seeds require `--enable-deterministic-inference`.
    """

    name = "sglang"
    returns_ids = True
    chat_rendering = "local"
    tokenizes = True
    takes_media = False
    logprobs_kind: ClassVar[LogprobsKind | None] = "tempered"
    supported = frozenset(OPTIONAL_SAMPLING)
    shares_requests = False
    largest_seed = 2**31 - 1
    limitations = (
        "the prompt ids of a chat: give the engine a tokenizer, which renders it",
        "the prompt ids of a prompt with images",
        "tool calls as messages: they are in the text",
        "equal samples from equal seeds, unless the server runs with --enable-deterministic-inference",
        "log-probs after truncation, or before temperature",
    )
    ids_hint = "SGLang returns them by /generate, which a server or a proxy of another kind may lack"
    logprobs_hint = "SGLang returns them by /generate (return_logprob)"

    def path(self, request: ServerRequest) -> str:
        return "/generate"

    def body(self, request: ServerRequest) -> dict[str, Any]:
        options = request.sampling
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "min_new_tokens": request.min_tokens,
            "temperature": request.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "min_p": options.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(options.stop),
            "stop_token_ids": list(options.stop_token_ids),
            "ignore_eos": options.ignore_eos,
            "no_stop_trim": options.include_stop,
        }
        if request.seed is not None:
            sampling["sampling_seed"] = request.seed
        if options.suppress:
            sampling["logit_bias"] = {str(token): -100 for token in options.suppress}
        return {
            "input_ids": list(request.ids or ()),
            "sampling_params": sampling,
            "return_logprob": options.logprobs is not None,
            "stream": request.stream,
        }

    def read_reply(self, reply: JsonValue, pieces: Sequence[PartialSample]) -> None:
        self.read_event(reply, pieces)
        if pieces[0].finish is None:
            raise BadReplyError("finish_reason: missing")

    def read_event(self, event: JsonValue, pieces: Sequence[PartialSample]) -> None:
        (piece,) = pieces
        meta = event.get("meta_info") if isinstance(event, dict) else None
        if not isinstance(event, dict) or not isinstance(meta, dict):
            raise BadReplyError(f"the reply has no meta_info: {str(event)[:200]}")
        pairs, ids, text = meta.get("output_token_logprobs"), event.get("output_ids"), event.get("text") or ""
        if pairs is not None:
            if any(not isinstance(pair, list) or len(pair) < 2 for pair in pairs):
                raise BadReplyError(f"output_token_logprobs: got {str(pairs)[:80]}, expected [log-prob, id, text] each")
            ids = [pair[1] for pair in pairs]
        if len(ids or ()) == meta.get("completion_tokens"):  # all tokens so far; otherwise only new ones
            piece.ids, piece.logprobs, piece.text = None, None, ""
        piece.append(ids, None if pairs is None else [pair[0] for pair in pairs], text)
        version = parse_version(meta.get("weight_version"))
        if version is not None and piece.ids:
            start = piece.spans[-1][2] if piece.spans else 0
            piece.spans.append((version, start, max(start, len(piece.ids))))
        finish = meta.get("finish_reason")
        if isinstance(finish, dict):
            piece.finish = finish.get("type")
            piece.stop = finish.get("matched")
            if piece.finish == "abort" and finish.get("status_code"):
                raise BadReplyError(f"the server aborted the request: {str(finish.get('message'))[:300]}")
