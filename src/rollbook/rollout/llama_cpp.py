"""`LlamaCppApi`: the native API of llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rollbook.core.sampling import LogprobsKind
from rollbook.rollout.server import BadReplyError, JsonValue, PartialSample, PostJson, ServerApi, ServerRequest


class LlamaCppApi(ServerApi):
    """API of llama.cpp: `/completion`, which takes ids and returns ids and raw log-probs.

    Chats are rendered by `/apply-template` and sent as ids. Chats with tools are sent to the chat endpoint, whose
    log-probs have ids.
    """

    name = "llama.cpp"
    returns_ids = True
    chat_rendering = "template"
    tokenizes = True
    takes_media = False
    trims_stop = True
    logprobs_kind: ClassVar[LogprobsKind | None] = "raw"
    supported = frozenset({"top_k", "min_p", "ignore_eos", "suppress"})
    shares_requests = False
    largest_seed = 2**32 - 2  # the next value means a random seed
    limitations = (
        "stop token ids and a minimum number of tokens (stop_token_ids, min_tokens)",
        "the prompt ids of a prompt with images",
        "log-probs of another kind than raw",
    )
    ids_hint = "llama.cpp returns them from the end of 2024 on (return_tokens)"
    logprobs_hint = "llama.cpp returns them from the end of 2024 on (n_probs)"

    def path(self, request: ServerRequest) -> str:
        return "/completion" if request.messages is None else "/v1/chat/completions"

    def body(self, request: ServerRequest) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": sampling.min_p,
            "typical_p": 1.0,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "dry_multiplier": 0.0,
            "xtc_probability": 0.0,
            "ignore_eos": sampling.ignore_eos,
            "stop": list(sampling.stop),
            "stream": request.stream,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        if sampling.suppress:
            body["logit_bias"] = [[token, False] for token in sampling.suppress]
        if request.messages is not None:
            chat = {
                "messages": list(request.messages),
                "max_tokens": request.max_tokens,
                "logprobs": True,
                "top_logprobs": 1,
            }
            return body | chat | ({} if request.tools is None else {"tools": list(request.tools)})
        body |= {"prompt": list(request.ids or ()), "n_predict": request.max_tokens, "return_tokens": True}
        # Complete replies lack the log-probs of the stop text's tokens, streamed ones have them.
        body["stream"] = request.stream or bool(sampling.stop)
        return body | ({} if sampling.logprobs is None else {"n_probs": 1})

    async def tokenize(self, model: str, text: str | None, chat: Mapping[str, Any], post: PostJson) -> Any:
        if chat:
            text = (await post("/apply-template", chat)).get("prompt")
        return (await post("/tokenize", {"content": text, "add_special": False, "parse_special": True})).get("tokens")

    def read_reply(self, reply: JsonValue, pieces: Sequence[PartialSample]) -> None:
        if isinstance(reply, dict) and "choices" in reply:
            super().read_reply(reply, pieces)
            return
        self.read_event(reply, pieces)
        if pieces[0].finish is None:
            raise BadReplyError("stop_type: missing")

    def read_event(self, event: JsonValue, pieces: Sequence[PartialSample]) -> None:
        (piece,) = pieces
        if isinstance(event, dict) and "choices" in event:
            super().read_event(event, pieces)
            return
        if not isinstance(event, dict) or "content" not in event:
            raise BadReplyError(f"the reply has no content: {str(event)[:200]}")
        entries = event.get("completion_probabilities")
        piece.append(
            event.get("tokens"), [entry.get("logprob") for entry in entries] if entries else None, event["content"]
        )
        if event.get("stop"):
            reason = event.get("stop_type")
            piece.finish = {"limit": "length", "eos": "stop", "word": "stop"}.get(str(reason))
            piece.stop = event.get("stopping_word") or None
