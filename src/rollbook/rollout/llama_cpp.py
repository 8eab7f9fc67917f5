"""llama.cpp's native `/completion` API, which returns token ids.

Invariant: prompts are sent as token ids, so that the recorded ids are those the server was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rollbook.core.sampling import LogprobsKind, Sampling
from rollbook.rollout.server import BadReplyError, Dialect, Json, PartialSample, ServerRequest


class LlamaCpp(Dialect):
    """llama.cpp's own `/completion`: ids in; ids and log-probs of the model's own distribution out.

    A chat is rendered by its `/apply-template`, and sent as ids. One with tools goes to its chat endpoint, whose
    log-probs carry ids.
    """

    name = "llama.cpp"
    gives_ids = True
    chats = "template"
    tokenizes = True
    media = False
    trims_stop = True
    kind: ClassVar[LogprobsKind | None] = "raw"
    words = frozenset({"top_k", "min_p", "ignore_eos", "suppress"})
    largest_seed = 2**32 - 2  # the next one means "any"
    cannot = (
        "stop at token ids, and a least number of tokens (stop_token_ids, min_tokens)",
        "the prompt ids of a prompt with images",
        "log-probs of another kind than raw",
    )
    ids_from = "llama.cpp gives them from the end of 2024 on (return_tokens)"
    logprobs_from = "llama.cpp gives them from the end of 2024 on (n_probs)"

    def together(self, sampling: Sampling) -> bool:
        return False

    def path(self, ask: ServerRequest) -> str:
        return "/completion" if ask.messages is None else "/v1/chat/completions"

    def body(self, ask: ServerRequest) -> dict[str, Any]:
        sampling = ask.sampling
        request: dict[str, Any] = {
            "temperature": ask.temperature,
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
            "stream": ask.stream,
        }
        if ask.seed is not None:
            request["seed"] = ask.seed
        if sampling.suppress:
            request["logit_bias"] = [[token, False] for token in sampling.suppress]
        if ask.messages is not None:
            chat = {"messages": list(ask.messages), "max_tokens": ask.max_tokens, "logprobs": True, "top_logprobs": 1}
            return request | chat | ({} if ask.tools is None else {"tools": list(ask.tools)})
        request |= {"prompt": list(ask.ids or ()), "n_predict": ask.max_tokens, "return_tokens": True}
        # Of a whole reply it leaves out the log-probs of the stop text's tokens; of a stream it does not.
        request["stream"] = ask.stream or bool(sampling.stop)
        return request | ({} if sampling.logprobs is None else {"n_probs": 1})

    async def tokenized(self, model: str, text: str | None, chat: Mapping[str, Any], json: Json) -> Any:
        if chat:
            text = (await json("/apply-template", chat)).get("prompt")
        return (await json("/tokenize", {"content": text, "add_special": False, "parse_special": True})).get("tokens")

    def read(self, reply: Any, pieces: Sequence[PartialSample]) -> None:
        if isinstance(reply, dict) and "choices" in reply:
            super().read(reply, pieces)
            return
        self.fold(reply, pieces)
        if pieces[0].finish is None:
            raise BadReplyError("stop_type: got none, expected one")

    def fold(self, event: Any, pieces: Sequence[PartialSample]) -> None:
        (piece,) = pieces
        if isinstance(event, dict) and "choices" in event:
            super().fold(event, pieces)
            return
        if not isinstance(event, dict) or "content" not in event:
            raise BadReplyError(f"the reply has no content: {str(event)[:200]}")
        entries = event.get("completion_probabilities")
        piece.more(event.get("tokens"), [e.get("logprob") for e in entries] if entries else None, event["content"])
        if event.get("stop"):
            reason = event.get("stop_type")
            piece.finish = {"limit": "length", "eos": "stop", "word": "stop"}.get(str(reason))
            piece.stop = event.get("stopping_word") or None
