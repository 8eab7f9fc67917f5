"""Servers asked in their own tongue, where OpenAI's API has no words for token ids (SGLang, llama.cpp); all by name.

Invariant: a prompt goes to these as token ids, so that what is recorded is what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rollbook.core.retry import RETRIED
from rollbook.core.sampling import LogprobsKind, Sampling
from rollbook.rollout.connection import BadReply, Connection, ServerError
from rollbook.rollout.dialects import VLLM, Ask, Dialect, Json, Piece, TransformersServe, whole


class SGLang(Dialect):
    """SGLang's own `/generate`: ids in, and (log-prob, id) pairs out. Its OpenAI endpoints give no ids.

    Log-probs are after temperature and before truncation; of a server with SGLANG_RETURN_ORIGINAL_LOGPROB=1 say
    `logprobs_kind="raw"`. A seed holds where the server runs with `--enable-deterministic-inference`.
    """

    name = "sglang"
    gives_ids = True
    chats = "local"
    tokenizes = True
    media = False
    kind: ClassVar[LogprobsKind | None] = "tempered"
    words = frozenset({"min_tokens", "top_k", "min_p", "stop_token_ids", "ignore_eos", "suppress"})
    largest_seed = 2**31 - 1
    cannot = (
        "the prompt ids of a chat: give a tokenizer, which renders it here",
        "the prompt ids of a prompt with images",
        "tool calls as messages: they are in the text",
        "sample the same again by a seed, unless the server runs with --enable-deterministic-inference",
        "log-probs after truncation, or before temperature",
    )
    ids_from = "SGLang gives them by /generate, which a server or a proxy of another kind may lack"
    logprobs_from = "SGLang gives them by /generate (return_logprob)"

    def together(self, sampling: Sampling) -> bool:
        return False

    def path(self, ask: Ask) -> str:
        return "/generate"

    def body(self, ask: Ask) -> dict[str, Any]:
        how = ask.sampling
        sampling: dict[str, Any] = {
            "max_new_tokens": ask.max_tokens,
            "min_new_tokens": ask.min_tokens,
            "temperature": ask.temperature,
            "top_p": how.top_p,
            "top_k": how.top_k,
            "min_p": how.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(how.stop),
            "stop_token_ids": list(how.stop_token_ids),
            "ignore_eos": how.ignore_eos,
            "no_stop_trim": how.include_stop,
        }
        if ask.seed is not None:
            sampling["sampling_seed"] = ask.seed
        if how.suppress:
            sampling["logit_bias"] = {str(one): -100 for one in how.suppress}
        return {
            "input_ids": list(ask.ids or ()),
            "sampling_params": sampling,
            "return_logprob": how.logprobs is not None,
            "stream": ask.stream,
        }

    def read(self, reply: Any, pieces: Sequence[Piece]) -> None:
        self.fold(reply, pieces)
        if pieces[0].finish is None:
            raise BadReply("finish_reason: got none, expected one")

    def fold(self, event: Any, pieces: Sequence[Piece]) -> None:
        (piece,) = pieces
        meta = event.get("meta_info") if isinstance(event, dict) else None
        if not isinstance(meta, dict):
            raise BadReply(f"the reply has no meta_info: {str(event)[:200]}")
        pairs, ids, text = meta.get("output_token_logprobs"), event.get("output_ids"), event.get("text") or ""
        if pairs is not None:
            if any(not isinstance(pair, list) or len(pair) < 2 for pair in pairs):
                raise BadReply(f"output_token_logprobs: got {str(pairs)[:80]}, expected [log-prob, id, text] each")
            ids = [pair[1] for pair in pairs]
        done = meta.get("completion_tokens")
        if len(ids or ()) == done:  # all so far; else, by the server's choice, only what is new
            piece.ids, piece.logprobs, piece.text = None, None, ""
        piece.more(ids, None if pairs is None else [pair[0] for pair in pairs], text)
        version = whole(meta.get("weight_version"))
        if version is not None and piece.ids:
            start = piece.spans[-1][2] if piece.spans else 0
            piece.spans.append((version, start, max(start, len(piece.ids))))
        finish = meta.get("finish_reason")
        if isinstance(finish, dict):
            piece.finish = finish.get("type")
            piece.stop = finish.get("matched")
            if piece.finish == "abort" and finish.get("status_code"):
                raise BadReply(f"the server gave up: {str(finish.get('message'))[:300]}")


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

    def path(self, ask: Ask) -> str:
        return "/completion" if ask.messages is None else "/v1/chat/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        how = ask.sampling
        made: dict[str, Any] = {
            "temperature": ask.temperature,
            "top_p": how.top_p,
            "top_k": max(how.top_k, 0),
            "min_p": how.min_p,
            "typical_p": 1.0,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "dry_multiplier": 0.0,
            "xtc_probability": 0.0,
            "ignore_eos": how.ignore_eos,
            "stop": list(how.stop),
            "stream": ask.stream,
        }
        if ask.seed is not None:
            made["seed"] = ask.seed
        if how.suppress:
            made["logit_bias"] = [[one, False] for one in how.suppress]
        if ask.messages is not None:
            chat = {"messages": list(ask.messages), "max_tokens": ask.max_tokens, "logprobs": True, "top_logprobs": 1}
            return made | chat | ({} if ask.tools is None else {"tools": list(ask.tools)})
        made |= {"prompt": list(ask.ids or ()), "n_predict": ask.max_tokens, "return_tokens": True}
        # Of a whole reply it leaves out the log-probs of the stop text's tokens; of a stream it does not.
        made["stream"] = ask.stream or bool(how.stop)
        return made | ({} if how.logprobs is None else {"n_probs": 1})

    async def tokenized(self, model: str, text: str | None, chat: Mapping[str, Any], json: Json) -> Any:
        if chat:
            text = (await json("/apply-template", chat)).get("prompt")
        return (await json("/tokenize", {"content": text, "add_special": False, "parse_special": True})).get("tokens")

    def read(self, reply: Any, pieces: Sequence[Piece]) -> None:
        if isinstance(reply, dict) and "choices" in reply:
            super().read(reply, pieces)
            return
        self.fold(reply, pieces)
        if pieces[0].finish is None:
            raise BadReply("stop_type: got none, expected one")

    def fold(self, event: Any, pieces: Sequence[Piece]) -> None:
        (piece,) = pieces
        if isinstance(event, dict) and "choices" in event:
            super().fold(event, pieces)
            return
        if not isinstance(event, dict) or "content" not in event:
            raise BadReply(f"the reply has no content: {str(event)[:200]}")
        entries = event.get("completion_probabilities")
        piece.more(event.get("tokens"), [e.get("logprob") for e in entries] if entries else None, event["content"])
        if event.get("stop"):
            how = event.get("stop_type")
            piece.finish = {"limit": "length", "eos": "stop", "word": "stop"}.get(str(how))
            piece.stop = event.get("stopping_word") or None


DIALECTS: dict[str, Dialect] = {one.name: one for one in (Dialect(), VLLM(), TransformersServe(), SGLang(), LlamaCpp())}
"""All of them by name, for `OpenAIEngine(dialect=...)`."""


@dataclass(frozen=True)
class Server:
    """What was found out about a server."""

    dialect: Dialect
    model: str
    version: str


async def find(connection: Connection, name: str, model: str | None, again: Callable[[], None]) -> Server:
    """Which server this is, by what only its kind answers; `name` says it unless it is `auto`. `again` is called before
    each further try."""

    async def asked(path: str) -> dict[str, Any]:
        try:
            said = await connection.json(path, once=True)
        except ServerError:
            return {}
        return said if isinstance(said, dict) else {}

    try:
        listed = await connection.json("/v1/models", again=again)
    except ServerError as error:
        # A server whose model is named need not list it; some cannot. But of one that is not there, or not yet, nothing
        # is known, and it must not be taken for a plain one from now on.
        absent = not isinstance(error, BadReply) and error.status in (None, *RETRIED - {500})
        if model is None or absent:
            raise
        listed = {}
    entries = listed.get("data") if isinstance(listed, dict) else None
    first = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else {}
    model = model or first.get("id")
    if not isinstance(model, str):
        raise BadReply("/v1/models: got no model, expected one, or model= to name it")
    owner, version = first.get("owned_by"), "unknown"
    signs = {
        "vllm": ("/version", "version", "vllm"),
        "sglang": ("/get_server_info", "version", "sglang"),
        "llama.cpp": ("/props", "build_info", "llamacpp"),
    }
    # The one that /v1/models points to is asked first.
    for each, (path, key, sign) in sorted(signs.items(), key=lambda item: item[1][2] != owner):
        if name in ("auto", each):
            said = await asked(path)
            if isinstance(said.get(key), str):
                name, version = each, said[key]
            elif sign == owner:
                name = each
    if name == "auto":
        paths = (await asked("/openapi.json")).get("paths") or {}
        name = "transformers-serve" if "/load_model" in paths else "openai"
    return Server(DIALECTS[name], model, version)
