"""A mock server on loopback with the API of vLLM, SGLang, llama.cpp, `transformers serve` or plain OpenAI, over a tiny
model with an independent sampling loop, and with faults on request.

    with serve() as server:
        OpenAIEngine(server.url)

`server.seen` has the requests for samples, `server.max_open` the largest number of them that were open at once, and
`server.broken` the number of streams that lost their reader. `server.faults` are applied in order: see `Fault`.
`server.lacks` has paths that the server does not have; with `stream` among them, replies are complete.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from tests import tiny

CALL = '{"name": "add", "arguments": {"a": 1}}'
"""Response to a chat with `tool_choice: required`."""


@dataclass
class Fault:
    """A fault of `times` requests whose JSON contains `match`.

    Kinds: `status` (with `status`, `headers`, `message`), `hang up` (in the middle of the reply), `garbage`, `choices`
    (one too few), `nan`, `positive`, `short` (a log-prob is missing), `no ids`, `no logprobs`, `reason` (unknown),
    `error` (an event in a stream), `other prompt` (ids other than those that were sent).
    """

    kind: str
    times: int = 1
    match: str = ""
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "out of order"


@dataclass
class Step:
    """A sampled token and its log-prob of each kind."""

    id: int
    raw: float
    tempered: float
    processed: float


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def sampled(model: Any, ids: list[int], options: dict[str, Any], lock: Any) -> Iterator[Step]:
    """Sample tokens one by one, each from a forward pass over the complete sequence."""
    generator = torch.Generator()
    if options["seed"] is None:
        generator.seed()
    else:
        generator.manual_seed(options["seed"])
    ids, forced, count = list(ids), list(options["forced"]), 0
    while count < options["max_tokens"]:
        with lock, torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        raw = logits.log_softmax(-1)
        for token, bias in options["bias"].items():
            logits[token] += bias
        if count < options["min_tokens"]:
            logits[[2, *options["stop_token_ids"]]] = -torch.inf
        tempered = (logits / (options["temperature"] or 1.0)).log_softmax(-1)
        processed = truncated(tempered, options["top_k"], options["top_p"], options["min_p"]).log_softmax(-1)
        if forced:
            chosen = forced.pop(0)
        elif options["temperature"] == 0:
            chosen = int(logits.argmax())
        else:
            chosen = int(torch.multinomial(processed.exp(), 1, generator=generator))
        count += 1
        ids.append(chosen)
        yield Step(chosen, float(raw[chosen]), float(tempered[chosen]), float(processed[chosen]))


def truncated(logprobs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    order = logprobs.argsort(descending=True)
    drop = torch.zeros_like(logprobs, dtype=torch.bool)
    if top_k > 0:
        drop[order[top_k:]] = True
    mass = logprobs.masked_fill(drop, -torch.inf).softmax(-1)[order]
    drop[order[(mass.cumsum(0) - mass) >= top_p]] = True
    drop |= logprobs.exp() < min_p * logprobs.exp().max()
    return logprobs.masked_fill(drop, -torch.inf)


class Response:
    """A sample in progress: `advance` adds a token; `finish` and `stop` are its finish and stop reasons."""

    def __init__(self, server: Server, prompt: list[int], options: dict[str, Any]) -> None:
        self.tokenizer, self.options, self.prompt = server.tokenizer, options, prompt
        self.stopping = server.stopping
        self.steps: list[Step] = []
        self.finish: str | None = None
        self.stop: str | int | None = None
        self.text = ""
        self._tokens = sampled(server.model, prompt, options, server.lock)

    def advance(self) -> None:
        if self.stopping.is_set():
            raise Refused(503, "the server stops")
        step = next(self._tokens)
        self.steps.append(step)
        self.text = self.tokenizer.decode([step.id for step in self.steps], skip_special_tokens=True)
        if step.id == 2 and not self.options["ignore_eos"]:
            self.finish = "stop"
        elif step.id in self.options["stop_token_ids"]:
            self.finish, self.stop = "stop", step.id
        elif len(self.steps) >= self.options["min_tokens"]:
            for stop in self.options["stop"]:
                start = self.text.find(stop)
                if start >= 0:
                    self.finish, self.stop = "stop", stop
                    self.text = self.text[: start + (len(stop) if self.options["include_stop"] else 0)]
                    break
        if self.finish is None and len(self.steps) == self.options["max_tokens"]:
            self.finish = "length"


class Server:
    """The server. See the module."""

    def __init__(
        self, kind: str, model: Any, tokenizer: Any, logprobs_kind: str, pace: float, version: str | None
    ) -> None:
        self.kind, self.model, self.tokenizer, self.logprobs_kind = kind, model, tokenizer, logprobs_kind
        self.pace, self.weight_version = pace, version
        self.context = model.config.max_position_embeddings
        self.faults: list[Fault] = []
        self.lacks: set[str] = set()
        self.seen: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.keys: list[str | None] = []
        self.images: list[list[Any]] = []
        self.open = self.max_open = self.broken = 0
        self.lock = threading.Lock()
        self.counts = threading.Lock()
        self.stopping = threading.Event()
        self.sockets: set[Any] = set()
        self.url = ""

    def fault(self, body: dict[str, Any], *kinds: str) -> Fault | None:
        with self.counts:
            text = json.dumps(body)
            for fault in self.faults:
                if fault.kind in kinds and fault.times > 0 and fault.match in text:
                    fault.times -= 1
                    return fault
        return None

    # --- common to all kinds ------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        owners = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp"}
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "tiny", "owned_by": owners.get(self.kind, "someone")}]}
        replies = {
            "vllm": {"/version": {"version": "0.32.0"}},
            "sglang": {"/get_server_info": {"version": "0.5.9"}},
            "llama.cpp": {"/props": {"build_info": "b7777-abcdef", "default_generation_settings": {}}},
            "transformers-serve": {"/openapi.json": {"paths": {"/v1/completions": {}, "/load_model": {}}}},
        }
        reply = replies.get(self.kind, {}).get(path)
        if reply is None:
            raise Refused(404, "Not Found")
        return reply

    def post(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """Yield the reply, or its events if the body requests a stream."""
        if path in self.lacks:
            raise Refused(404, "Not Found")
        if path == "/tokenize" and self.kind != "openai":
            text = body.get("content", body.get("prompt"))
            if text is None and self.kind == "vllm":
                text = self.rendered(body)
            yield {"tokens": self.encoded(text)}
        elif path == "/apply-template" and self.kind == "llama.cpp":
            yield {"prompt": self.rendered(body)}
        elif path == "/generate" and self.kind == "sglang":
            yield from self.sglang(body)
        elif path == "/completion" and self.kind == "llama.cpp":
            yield from self.llama_cpp(body)
        elif path in ("/v1/completions", "/v1/chat/completions"):
            yield from self.openai(path, body)
        else:
            raise Refused(404, "Not Found")

    def encoded(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def rendered(self, body: dict[str, Any]) -> str:
        messages = []
        for message in body["messages"]:
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "".join("<image>" if part["type"] == "image_url" else part["text"] for part in content)
            messages.append({"role": message["role"], "content": content})
        return self.tokenizer.apply_chat_template(
            messages, tools=body.get("tools"), add_generation_prompt=True, tokenize=False
        )

    def settings(self, body: dict[str, Any], max_tokens_key: str = "max_tokens", **changes: Any) -> dict[str, Any]:
        bias = body.get("logit_bias") or {}
        pairs = bias.items() if isinstance(bias, dict) else bias
        return {
            "max_tokens": body.get(max_tokens_key, 16),
            "min_tokens": body.get("min_tokens", body.get("min_new_tokens", 0)),
            "temperature": body.get("temperature", 1.0),
            "top_k": body.get("top_k", -1),
            "top_p": body.get("top_p", 1.0),
            "min_p": body.get("min_p", 0.0),
            "seed": body.get("seed", body.get("sampling_seed")),
            "stop": body.get("stop") or [],
            "stop_token_ids": body.get("stop_token_ids") or [],
            "include_stop": body.get("include_stop_str_in_output", body.get("no_stop_trim", False)),
            "ignore_eos": body.get("ignore_eos", False),
            "bias": {int(sample): (-torch.inf if value is False else value) for sample, value in pairs},
            "forced": [],
        } | changes

    def fits(self, prompt: list[int], options: dict[str, Any]) -> None:
        if not prompt:
            raise Refused(400, "The prompt is empty")
        if self.kind == "vllm":  # which shortens the response to fit
            options["max_tokens"] = min(options["max_tokens"], max(self.context - len(prompt), 0))
        if len(prompt) + max(options["max_tokens"], 1) > self.context:
            raise Refused(
                400, f"maximum context length is {self.context}, got {len(prompt)} and {options['max_tokens']} tokens"
            )

    def logprob(self, step: Step) -> float:
        return float(getattr(step, self.logprobs_kind))

    # --- OpenAI's endpoints --------------------------------------------------------------------------------------

    def openai(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        chat = path.endswith("chat/completions")
        plain = {"model", "prompt", "messages", "n", "max_tokens", "temperature", "top_p", "stream", "seed", "stop"}
        plain |= {"logprobs", "top_logprobs", "tools", "tool_choice", "logit_bias"}
        plain |= {"presence_penalty", "frequency_penalty"}
        unexpected = sorted(set(body) - plain) if self.kind in ("openai", "transformers-serve") else []
        if unexpected:
            raise Refused(422 if self.kind == "transformers-serve" else 400, f"Unexpected fields: {unexpected}")
        prompt = body.get("prompt")
        if chat:
            self.keep_images(body)
            prompt = self.encoded(self.rendered(body))
        elif isinstance(prompt, str):
            prompt = self.encoded(prompt)
        elif self.kind == "transformers-serve":
            raise Refused(400, "prompt must be a string.")
        has_call = chat and body.get("tools") and body.get("tool_choice") == "required"
        forced = [*self.encoded(CALL), 2] if has_call else []
        n, seed = body.get("n", 1), body.get("seed")
        if self.kind == "vllm" and n > 1 and body.get("temperature") == 0:
            raise Refused(400, f"n must be 1 when using greedy sampling, got {n}.")
        sample_options = [
            self.settings(body, seed=None if seed is None else seed + i * (self.kind == "vllm"), forced=forced)
            for i in range(n)
        ]
        for options in sample_options:
            self.fits(prompt, options)
        responses = [Response(self, prompt, options) for options in sample_options]
        if self.fault(body, "other prompt"):
            prompt = [1, *prompt]
        if not body.get("stream"):
            while any(sample.finish is None for sample in responses):
                for sample in responses:
                    if sample.finish is None:
                        sample.advance()
                time.sleep(self.pace)
            if self.fault(body, "choices"):
                responses.pop()
            choices = [self.choice(body, chat, has_call, i, sample, 0, prompt) for i, sample in enumerate(responses)]
            reply = {"object": "reply", "choices": choices, "usage": {"prompt_tokens": len(prompt)}}
            if chat and body.get("return_token_ids"):
                reply["prompt_token_ids"] = prompt
            yield reply
            return
        if chat:
            for i in range(n):
                first: dict[str, Any] = {
                    "choices": [{"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
                }
                yield first | ({"prompt_token_ids": prompt} if body.get("return_token_ids") else {})
        sent, shown = [0] * n, [""] * n
        while any(sample.finish is None for sample in responses):
            time.sleep(self.pace)
            for i, sample in enumerate(responses):
                if sample.finish is not None:
                    continue
                sample.advance()
                if sample.finish is None and len(sample.steps) - sent[i] < body.get("stream_interval", 1):
                    continue
                choice = self.choice(body, chat, has_call, i, sample, sent[i], None if chat or sent[i] else prompt)
                new = sample.text[len(shown[i]) :] if sample.text.startswith(shown[i]) else ""
                if chat:
                    message = choice.pop("message")
                    choice["delta"] = {"content": new} if not has_call else {}
                    if has_call and sample.finish:
                        (call,) = message["tool_calls"]
                        arguments = call["function"]["arguments"]
                        half = {**call, "index": 0, "function": {**call["function"], "arguments": arguments[:4]}}
                        yield {"choices": [{"index": i, "delta": {"tool_calls": [half]}, "finish_reason": None}]}
                        choice["delta"] = {"tool_calls": [{"index": 0, "function": {"arguments": arguments[4:]}}]}
                else:
                    choice["text"] = new
                sent[i], shown[i] = len(sample.steps), sample.text
                yield {"choices": [choice]}
                if self.fault(body, "error"):
                    yield {"error": {"message": "the engine died", "code": 500}}
                    return

    def choice(
        self, body: dict[str, Any], chat: bool, called: Any, i: int, sample: Response, start: int, prompt: Any
    ) -> dict[str, Any]:
        steps = sample.steps[start:]
        values = [self.logprob(step) for step in steps]
        if values and self.fault(body, "nan"):
            values[-1] = float("nan")
        if values and self.fault(body, "positive"):
            values[-1] = 0.5
        if values and self.fault(body, "short"):
            values.pop()
        tokens = [self.tokenizer.decode([step.id]) for step in steps]
        has_logprobs = body.get("logprobs") not in (None, False) or (body.get("logprobs") == 0 and not chat)
        logprobs: Any = None
        if has_logprobs and self.kind != "transformers-serve" and not self.fault(body, "no logprobs"):
            logprobs = {"tokens": tokens, "token_logprobs": values}
            if chat:
                named = self.kind == "llama.cpp"
                logprobs = {
                    "content": [
                        {"token": token, "logprob": value, **({"id": step.id} if named else {})}
                        for step, token, value in zip(steps, tokens, values, strict=False)
                    ]
                }
        reason = sample.finish if not self.fault(body, "reason") else "because"
        choice: dict[str, Any] = {"index": i, "logprobs": logprobs, "finish_reason": reason, "stop_reason": sample.stop}
        if self.kind == "vllm" and body.get("return_token_ids") and not self.fault(body, "no ids"):
            choice["token_ids"] = [step.id for step in steps]
            if not chat and prompt is not None:
                choice["prompt_token_ids"] = prompt
        if self.weight_version is not None and sample.finish:
            choice["weight_versions"] = [{"version": self.weight_version, "start": 0, "end": len(sample.steps)}]
        if not chat:
            return choice | {"text": sample.text}
        message: dict[str, Any] = {"role": "assistant", "content": sample.text}
        if called and sample.finish == "stop":
            call = json.loads(CALL)
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
            }
            choice["finish_reason"] = "tool_calls"
        return choice | {"message": message}

    def keep_images(self, body: dict[str, Any]) -> None:
        from PIL import Image

        images = []
        for message in body["messages"]:
            if isinstance(message.get("content"), list):
                for part in message["content"]:
                    if part["type"] == "image_url":
                        head, _, data = part["image_url"]["url"].partition(",")
                        if not head.startswith("data:image/"):
                            raise Refused(400, f"cannot fetch {part['image_url']['url'][:2000]}")
                        images.append(Image.open(io.BytesIO(base64.b64decode(data, validate=True))))
        self.images.append(images)

    # --- native APIs ---------------------------------------------------------------------------------------------

    def sglang(self, body: dict[str, Any]) -> Iterator[Any]:
        params = body["sampling_params"]
        options = self.settings(params, "max_new_tokens")
        self.fits(body["input_ids"], options)
        sample = Response(self, body["input_ids"], options)
        while sample.finish is None:
            time.sleep(self.pace)
            sample.advance()
            if not body.get("stream") and sample.finish is None:
                continue
            reason = {"length": {"type": "length", "length": len(sample.steps)}}.get(
                sample.finish or "", {"type": "stop", "matched": sample.stop if sample.stop is not None else 2}
            )
            meta: dict[str, Any] = {
                "completion_tokens": len(sample.steps),
                "prompt_tokens": len(body["input_ids"]),
                "finish_reason": reason if sample.finish else None,
                "weight_version": self.weight_version or "default",
            }
            if body.get("return_logprob"):
                meta["output_token_logprobs"] = [[self.logprob(step), step.id, None] for step in sample.steps]
            yield {"text": sample.text, "output_ids": [step.id for step in sample.steps], "meta_info": meta}

    def llama_cpp(self, body: dict[str, Any]) -> Iterator[Any]:
        options = self.settings(body, "n_predict", include_stop=False)
        self.fits(body["prompt"], options)
        sample = Response(self, body["prompt"], options)
        shown = ""
        while sample.finish is None:
            time.sleep(self.pace)
            sample.advance()
            if body.get("stream"):
                step = sample.steps[-1]
                event: dict[str, Any] = {"content": sample.text[len(shown) :], "tokens": [step.id], "stop": False}
                if body.get("n_probs"):
                    event["completion_probabilities"] = [{"id": step.id, "logprob": self.logprob(step)}]
                shown = sample.text
                yield event
        kinds = {"length": "limit", "stop": "word" if isinstance(sample.stop, str) else "eos"}
        final: dict[str, Any] = {"content": "", "tokens": [], "stop": True, "stop_type": kinds[sample.finish]}
        final["stopping_word"] = sample.stop if isinstance(sample.stop, str) else ""
        if not body.get("stream"):
            final |= {"content": sample.text, "tokens": [step.id for step in sample.steps]}
            if body.get("n_probs"):
                entries = [{"id": step.id, "logprob": self.logprob(step)} for step in sample.steps]
                # As in llama.cpp, the tokens of the stop text have no entry.
                final["completion_probabilities"] = (
                    entries[: -len(sample.stop)] if isinstance(sample.stop, str) else entries
                )
        yield final


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        with self.server.app.counts:
            self.server.app.sockets.add(self.connection)

    def finish(self) -> None:
        with self.server.app.counts:
            self.server.app.sockets.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        try:
            self.send_json(200, self.server.app.get(self.path))
        except Refused as error:
            self.send_json(error.status, {"error": {"message": str(error)}})

    def do_POST(self) -> None:
        app: Server = self.server.app
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        counted = self.path not in ("/tokenize", "/apply-template")
        with app.counts:
            app.paths.append(self.path)
            if counted:
                app.seen.append(body)
                app.times.append(time.monotonic())
                app.keys.append(self.headers.get("authorization"))
                app.open += 1
                app.max_open = max(app.max_open, app.open)
        try:
            try:
                self.reply(app, body)
            except Refused as error:
                self.send_json(error.status, {"error": {"message": str(error)}})
        except OSError:
            with app.counts:
                app.broken += 1
            self.close_connection = True
        finally:
            with app.counts:
                app.open -= counted

    def reply(self, app: Server, body: dict[str, Any]) -> None:
        fault = app.fault(body, "status")
        if fault is not None:
            self.send_json(fault.status, {"error": {"message": fault.message}}, fault.headers)
            return
        if "stream" in app.lacks:
            body = {**body, "stream": False}
        events = app.post(self.path, body)
        if not body.get("stream"):
            reply = json.dumps(next(events)).encode()
            if app.fault(body, "garbage"):
                reply = b"<html>" + reply
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            if app.fault(body, "hang up"):
                self.wfile.write(reply[: len(reply) // 2])
                self.close_connection = True
                return
            self.wfile.write(reply)
            return
        first = next(events)  # a refusal comes before the headers
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        self.event(app, body, 0, first)
        for number, event in enumerate(events, 1):
            if number == 2 and app.fault(body, "hang up"):
                return
            self.event(app, body, number, event)
        if self.path != "/completion":
            self.wfile.write(b"data: [DONE]\n\n")

    def event(self, app: Server, body: dict[str, Any], number: int, event: Any) -> None:
        data = json.dumps(event, ensure_ascii=False)
        if number == 1 and app.fault(body, "garbage"):
            data = data[: len(data) // 2]
        self.wfile.write(f": ping\n\ndata: {data}\n\n".encode())
        self.wfile.flush()

    def send_json(self, status: int, reply: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(reply).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def serve(
    kind: str = "vllm",
    *,
    model: Any = None,
    tokenizer: Any = None,
    logprobs_kind: str | None = None,
    pace: float = 0.0,
    version: str | None = None,
    port: int = 0,
) -> Iterator[Server]:
    """Run a server until the block is left.

    Args:
        kind: Kind of the server, whose API it has.
        model: The model.
        tokenizer: The tokenizer.
        logprobs_kind: Kind of the log-probs in replies; by default that of the kind of server.
        pace: Seconds per token.
        version: Version of the weights in replies.
        port: The port; 0 for a free one.
    """
    logprobs_kind = logprobs_kind or {"sglang": "tempered"}.get(kind, "raw")
    tokenizer = tokenizer or tiny.bytes_()
    app = Server(kind, model or tiny.llama(len(tokenizer)), tokenizer, logprobs_kind, pace, version)
    http = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    http.daemon_threads = False  # joined: a thread in torch at the end of Python crashes it
    http.app = app  # type: ignore[attr-defined]
    app.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield app
    finally:
        app.stopping.set()
        http.shutdown()
        with app.counts:
            for connection in app.sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        http.server_close()
        thread.join()
