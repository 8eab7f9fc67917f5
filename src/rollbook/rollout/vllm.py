"""`VllmEngine`: rollouts from vLLM, in this process or from servers, with weights that follow the trainer.

Invariant: a token has the version of the weights that sampled it. vLLM labels the tokens of a request with the version
of the weights; where it does not (chats with tools or images on a server), an update waits for the responses in flight.
After an update no key or value of the earlier weights is used again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

import torch

from rollbook.core.addresses import redacted
from rollbook.core.checks import check_bool, check_choice, check_int
from rollbook.core.media import load_image
from rollbook.core.sampling import LogprobsKind, Prompt, RunInfo, Sample
from rollbook.core.vocabulary import Tokenizer
from rollbook.models.actor import Actor
from rollbook.models.head import get_device, has_adapters, unwrap
from rollbook.models.loading import hide_progress_bars
from rollbook.models.lora import save_base
from rollbook.rollout.chat import has_media
from rollbook.rollout.engine import BaseEngine, Cancel, Request, WeightSource, WeightSyncError, get_module
from rollbook.rollout.openai import Emit, JobEngine, OpenAIEngine, PromptForm, PromptJob, ServerInfo, acollect, collect
from rollbook.rollout.server import (
    BadReplyError,
    LoopThread,
    PartialSample,
    ServerError,
    ServerRequest,
    VllmApi,
    parse_version,
)
from rollbook.rollout.transformers import PromptPreparer, split_media

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
Transfer = Literal["auto", "file", "ipc", "nccl"]
Source: TypeAlias = "Actor | str | os.PathLike[str] | Sequence[str]"
"""What `VllmEngine` runs: an actor, the path of a model, or URLs."""
TransferInfo: TypeAlias = "dict[str, Any] | list[dict[str, Any]] | None"
"""Arguments of a step of vLLM's weight transfer."""
KEPT_ADAPTERS = 8
"""Number of versions whose adapters are kept, for responses in flight that use them."""
ABORT_SECONDS = 5.0
"""Time to receive the rest of a response after its request was aborted."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes as `max_lora_rank`."""
_MIN_IPC_BUFFER = 1 << 30
"""Smallest size in bytes of the buffer for IPC, which must hold each tensor; vLLM's default."""
_MAX_TRACKED_TASKS = 1 << 16
"""Number of tasks whose replica is remembered."""


def sampling_params(request: ServerRequest) -> dict[str, Any]:
    """Return the fields of vLLM's `SamplingParams` for a request, with those of `Sampling.extra`.

    Args:
        request: The request.
    """
    sampling = request.sampling
    return {
        "n": request.n,
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "temperature": request.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": request.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": sampling.include_stop,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": None if sampling.logprobs is None else 0,
        "logit_bias": dict.fromkeys(sampling.suppress, -100.0) or None,
        "stream_interval": VllmApi.stream_interval if request.stream else None,
        **sampling.extra,
    }


# --- replicas ---------------------------------------------------------------------------------------------------------


class Replica(JobEngine, ABC):
    """A vLLM engine with the controls that a weight update needs. All of them run in its event loop."""

    adapter: Any = None
    """LoRA adapter that requests use; `None` for the model itself."""
    dtype: torch.dtype | None = None
    """Type of the weights, if known."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop sampling after the current token, keep the requests and drop all keys and values."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue with the requests."""

    @abstractmethod
    async def load_checkpoint(self, folder: str) -> None:
        """Load the weights of a folder.

        Args:
            folder: Path of a checkpoint.
        """

    @abstractmethod
    async def label(self, version: int) -> None:
        """Label the tokens that are sampled from now on with a version.

        Args:
            version: Version of the policy.
        """

    @abstractmethod
    async def load_adapter(self, name: str, number: int, folder: str, version: int) -> None:
        """Load a LoRA adapter, which requests use from now on.

        Args:
            name: Name of the adapter in vLLM.
            number: Number of the adapter in vLLM.
            folder: Path of the adapter.
            version: Version of the policy.
        """

    @abstractmethod
    async def remove_adapter(self, name: str, number: int) -> None:
        """Remove a LoRA adapter.

        Args:
            name: Name of the adapter in vLLM.
            number: Number of the adapter in vLLM.
        """

    @abstractmethod
    async def transfer_step(self, step: str, info: TransferInfo = None) -> None:
        """Do one step of vLLM's weight transfer.

        Args:
            step: `init`, `start`, `update` or `finish`.
            info: Arguments of the step.
        """

    @abstractmethod
    async def world_size(self) -> int:
        """Return the number of workers."""

    @abstractmethod
    async def sleep(self) -> None:
        """Offload the weights and free the cache."""

    @abstractmethod
    async def wake_up(self) -> None:
        """Load the weights back."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request, which then returns the tokens that were sampled.

        Args:
            request_id: Id of the request in vLLM.
        """

    async def _until_cancelled(
        self, exchange: Coroutine[Any, Any, None], job: PromptJob, ks: list[int], request_id: str
    ) -> None:
        """Run a request. If it is cancelled after its first token, abort it and receive the rest with its versions."""
        task = asyncio.ensure_future(exchange)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done() and any(job.pieces[k] and job.pieces[k][-1].ids for k in ks):
                with contextlib.suppress(ServerError):
                    await self.abort(request_id)
                    await asyncio.wait({task}, timeout=ABORT_SECONDS)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise


class VllmTokenApi(VllmApi):
    """API of vLLM's `/inference/v1/generate`, which takes ids and returns ids and versions.

    Chats with tools or images use the chat API.
    """

    chat_rendering = "template"
    tokenizes = True

    def __init__(self) -> None:
        self.has_labels = False
        """Whether an update has labeled the weights of the server."""

    def path(self, request: ServerRequest) -> str:
        return "/inference/v1/generate" if request.messages is None else super().path(request)

    def payload(self, request: ServerRequest) -> dict[str, Any]:
        if request.messages is not None:
            return super().payload(request)
        return {
            "request_id": request.request_id,
            "model": request.model,
            "token_ids": list(request.ids or ()),
            "sampling_params": sampling_params(request),
            "stream": request.stream,
            "output_mode": "text",
            "return_token_ids": True,
        }

    def _add_choice(
        self, reply: dict[str, Any], choice: dict[str, Any], piece: PartialSample, key: Literal["message", "delta"]
    ) -> None:
        super()._add_choice(reply, choice, piece, key)
        labels = [span.get("version") for span in choice.get("weight_versions") or ()]
        if self.has_labels and "default" in labels:
            raise BadReplyError("weight_versions: got 'default': the server was restarted and lost its weights")


class ServerReplica(OpenAIEngine, Replica):
    """A `vllm serve` process."""

    def __init__(self, url: str, model: str | None, tokenizer: Tokenizer | None, **options: Any) -> None:
        super().__init__(url, model, tokenizer, server="vllm", **options)
        self._token_api = VllmTokenApi()
        self._unlabeled_in_flight = 0  # requests in flight whose tokens are not labeled
        self._updating = False
        self.updated_by_other_process = False
        """Whether another process may update the weights while a chat is in flight."""
        self._changed = asyncio.Condition()  # notified when a chat ends, or an update

    async def _get_server(self, on_retry: Callable[[], None] = lambda: None) -> ServerInfo:
        server = await super()._get_server(on_retry)
        self._server_info = replace(server, api=self._token_api)
        return self._server_info

    async def _exchange(
        self, server: ServerInfo, job: PromptJob, ks: list[int], request: ServerRequest, finished: Callable[[int], None]
    ) -> None:
        if request.messages is None:
            exchange = super()._exchange(server, job, ks, self._with_adapter(request), finished)
            return await self._until_cancelled(exchange, job, ks, f"generate-tokens-{request.request_id}")
        if self.updated_by_other_process:
            raise WeightSyncError(
                "vLLM servers do not report the weight version of chats with tools or images: use rollout.mode=sync, "
                "or vLLM in the process of the worker"
            )
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating)
            self._unlabeled_in_flight += 1
        try:
            await super()._exchange(server, job, ks, self._with_adapter(request), finished)
        finally:
            self._unlabeled_in_flight -= 1
            async with self._changed:
                self._changed.notify_all()

    def _with_adapter(self, request: ServerRequest) -> ServerRequest:
        """Return a request with the adapter and the version of this moment, which go together."""
        return replace(request, model=self.adapter or request.model, version=self.version)

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        async def attempt() -> bytes:
            async with self._connection.open(path, body or {}) as response:
                return await response.aread()

        try:
            return await self._connection.retry(attempt, once=True)
        except ServerError as error:
            if error.status == 404:
                variable = "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if "lora" in path else "VLLM_SERVER_DEV_MODE"
                raise WeightSyncError(f"{error}; start the server with {variable}=1") from None
            raise

    async def pause(self) -> None:
        async with self._changed:
            self._updating = True
            await self._changed.wait_for(lambda: not self._unlabeled_in_flight)
        await self._post("/pause?mode=keep")
        await self._post("/reset_prefix_cache?reset_running_requests=true")

    async def resume(self) -> None:
        await self._post("/resume")
        async with self._changed:
            self._updating = False
            self._changed.notify_all()

    async def load_checkpoint(self, folder: str) -> None:
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})

    async def label(self, version: int) -> None:
        await self._post("/update_weight_version", {"new_version": str(version)})
        self.version, self._token_api.has_labels = version, True

    async def follow(self, adapter: str | None, version: int, while_updated: bool) -> None:
        """Sample with weights that another process has sent.

        Args:
            adapter: Name of the adapter; `None` for labeled weights.
            version: Version of the policy.
            while_updated: Whether that process may update the weights while responses are in flight.
        """
        self.adapter, self.version, self.updated_by_other_process = adapter, version, while_updated
        self._token_api.has_labels = adapter is None

    async def load_adapter(self, name: str, number: int, folder: str, version: int) -> None:
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        self.adapter, self.version = name, version

    async def remove_adapter(self, name: str, number: int) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def transfer_step(self, step: str, info: TransferInfo = None) -> None:
        path = {"init": "/init_weight_transfer_engine", "update": "/update_weights"}.get(step, f"/{step}_weight_update")
        await self._post(path, None if info is None else {f"{step}_info": info})

    async def world_size(self) -> int:
        return int((await self._connection.json("/get_world_size", once=True))["world_size"])

    async def sleep(self) -> None:
        await self._post("/sleep?level=1")

    async def wake_up(self) -> None:
        await self._post("/wake_up")

    async def abort(self, request_id: str) -> None:
        await self._post("/inference/v1/abort_requests", {"request_ids": [request_id]})


class LocalReplica(Replica):
    """vLLM in this process: `AsyncLLM`, whose workers are child processes."""

    def __init__(
        self,
        name: str,
        engine_args: Mapping[str, Any],
        tokenizer: Tokenizer | None,
        processor: Tokenizer | None,
        version: int,
        tool_call_parser: str | None,
    ) -> None:
        from vllm.tool_parsers import ToolParserManager

        if tool_call_parser is not None:
            check_choice("tool_call_parser", tool_call_parser, ToolParserManager.list_registered())
        self._tool_call_parser = tool_call_parser
        loop = LoopThread("rollbook-vllm")
        try:
            self._llm = loop.submit(_start_vllm(engine_args)).result()
        except BaseException:
            loop.close()
            raise
        loop.closers.append(partial(_stop_vllm, self._llm))
        logprobs_kind = {"processed_logprobs": "processed", "raw_logprobs": "raw"}.get(
            self._llm.model_config.logprobs_mode
        )
        super().__init__(
            loop,
            name,
            tokenizer if tokenizer is not None else self._llm.get_tokenizer(),
            version=version,
            render="local",
            logprobs_kind=logprobs_kind,  # type: ignore[arg-type]
        )
        import vllm

        self.dtype = self._llm.model_config.dtype
        self.processor = processor
        self._server_info = ServerInfo(VllmApi(), name, vllm.__version__)

    async def _get_server(self, on_retry: Callable[[], None] = lambda: None) -> ServerInfo:
        if self._server_info is None:
            raise ServerError("vLLM is not running")
        return self._server_info

    async def _tokenize(self, server: ServerInfo, job: PromptJob) -> list[int] | None:
        return None  # prompts are rendered here

    async def _prompt_form(self, server: ServerInfo, job: PromptJob) -> PromptForm:
        prompt, sampling = job.request.prompt, job.request.sampling
        if not has_media(prompt) or job.done:
            return await super()._prompt_form(server, job)
        if prompt.token_ids is not None or sampling.first_temperature is not None:
            raise ValueError("prompt.images: expected text or messages with images, and no first_temperature")
        preparer = PromptPreparer(self.tokenizer, self.processor, self._llm.model_config.hf_config)
        prepared = preparer.prepare(prompt, sampling)
        images, videos = list(prompt.images), list(prompt.videos)
        if prompt.messages is not None:
            _, images, videos = split_media(prompt)
        media = {"image": [load_image(f"prompt.images[{i}]", image) for i, image in enumerate(images)], "video": videos}
        ids = list(prepared.ids)
        data = {name: entries for name, entries in media.items() if entries}
        return PromptForm(text=prepared.text, ids=ids, prompt_ids=ids, media=prepared.media, media_data=data)

    async def _exchange(
        self, server: ServerInfo, job: PromptJob, ks: list[int], request: ServerRequest, finished: Callable[[int], None]
    ) -> None:
        generation = self._generate(job, ks, request, finished)
        await self._until_cancelled(generation, job, ks, request.request_id)

    async def _generate(
        self, job: PromptJob, ks: list[int], request: ServerRequest, finished: Callable[[int], None]
    ) -> None:
        from vllm import SamplingParams
        from vllm.renderers.inputs.preprocess import parse_model_prompt
        from vllm.sampling_params import RequestOutputKind

        adapter, pieces = self.adapter, [PartialSample(version=self.version) for _ in ks]
        for k, piece in zip(ks, pieces, strict=True):
            job.pieces[k].append(piece)
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.ids or ())}
        if job.form.media_data is not None:
            prompt = {"prompt": job.form.text, "multi_modal_data": job.form.media_data}
        has_tools = self._tool_call_parser is not None and bool(job.request.prompt.tools)
        # Checked before the prompt is rendered: vLLM would miss the images of a rendered prompt that is not sent.
        params = SamplingParams(
            **sampling_params(request),
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
            skip_special_tokens=not has_tools,  # calls may be marked by special tokens
        )
        parsed = parse_model_prompt(self._llm.model_config, prompt)
        (rendered,) = await self._llm.renderer.render_cmpl_async([parsed])
        async for output in self._llm.generate(rendered, params, request.request_id, lora_request=adapter):
            for index in _read_output(output, pieces):
                if has_tools:
                    pieces[index].message = self._parse_tool_calls(job.request.prompt, pieces[index].text)
                finished(ks[index])

    def _parse_tool_calls(self, prompt: Prompt, text: str) -> dict[str, Any]:
        """Return the message of a response, with its tool calls."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        chat = ChatCompletionRequest(messages=list(prompt.messages or ()), tools=list(prompt.tools or ()))
        parser = ToolParserManager.get_tool_parser(self._tool_call_parser)(self.tokenizer, chat.tools)
        extracted = parser.extract_tool_calls(text, chat)
        message = {"role": "assistant", "content": extracted.content}
        if extracted.tools_called:
            message["tool_calls"] = [call.model_dump() for call in extracted.tool_calls]
        return message

    async def pause(self) -> None:
        await self._llm.pause_generation(mode="keep")
        await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def load_checkpoint(self, folder: str) -> None:
        await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    async def label(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))
        self.version = version

    async def load_adapter(self, name: str, number: int, folder: str, version: int) -> None:
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(lora_name=name, lora_int_id=number, lora_path=folder)
        await self._llm.add_lora(adapter)
        self.adapter, self.version = adapter, version

    async def remove_adapter(self, name: str, number: int) -> None:
        await self._llm.remove_lora(number)

    async def transfer_step(self, step: str, info: TransferInfo = None) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        if step == "init":
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        elif step == "start":
            await self._llm.start_weight_update()
        elif step == "update":
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        else:
            await self._llm.finish_weight_update()

    async def world_size(self) -> int:
        return int(self._llm.vllm_config.parallel_config.world_size_across_dp)

    async def sleep(self) -> None:
        await self._llm.sleep(level=1)

    async def wake_up(self) -> None:
        await self._llm.wake_up()

    async def abort(self, request_id: str) -> None:
        await self._llm.abort(request_id)


def _read_output(output: RequestOutput, pieces: Sequence[PartialSample]) -> Iterator[int]:
    """Add an output of vLLM to its samples, and yield the numbers of those that are finished."""
    for completion in output.outputs:
        piece, ids = pieces[completion.index], list(completion.token_ids)
        logprobs = completion.logprobs
        values: Any = None
        if logprobs is not None:
            values = [entries[token].logprob for token, entries in zip(ids, logprobs, strict=True)]
        piece.append(ids, values, completion.text)
        piece.prompt_ids = list(output.prompt_token_ids or ())
        for span in completion.weight_versions or ():
            version = parse_version(span.version)
            if version is not None:
                piece.spans.append((version, span.start, span.end))
        piece.stop = completion.stop_reason
        if completion.finish_reason is not None:
            piece.finish = completion.finish_reason
            yield completion.index


async def _start_vllm(engine_args: Mapping[str, Any]) -> AsyncLLM:
    """Start vLLM in the running event loop."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))


async def _stop_vllm(llm: AsyncLLM) -> None:
    llm.shutdown()


# --- the engine -------------------------------------------------------------------------------------------------------


class VllmEngine(BaseEngine):
    """Rollout engine over vLLM, whose weights `update_weights` replaces.

    Given an `Actor` or the path of a model, vLLM runs in this process (its workers are child processes). Given URLs, it
    runs in servers, started with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out`: these enable the routes
    for weight updates and for tokens with their versions. LoRA also needs `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` and
    `--enable-lora`. The routes have no access control, so the servers belong on a private network. All samples of a
    task go to one replica, new tasks to the one with the fewest samples in flight.

    `update_weights` pauses vLLM, loads the weights and continues with the responses in flight. The weights travel by
    `transfer`:

    - `file`: a checkpoint in `folder`, which vLLM reads. Works everywhere, also on vLLM's CPU build.
    - `ipc`: CUDA IPC, for vLLM in this process on the device of the trainer.
    - `nccl`: an NCCL broadcast from the trainer to all workers.
    - `auto`: `ipc` in this process and `nccl` to servers if the model is on a CUDA device, else `file`.

    If the source has LoRA adapters, only these are sent, as files. Responses in flight end with the adapters, and the
    version, they started with.

    Args:
        source: An `Actor`, the path or hub name of a model, or one or several URLs.
        tokenizer: Tokenizer; by default that of the actor or, in this process, of the model.
        model: Name of the model on the servers; by default the first that each lists.
        version: Number of the policy.
        transfer: How weights travel.
        folder: Folder for checkpoints and adapters, which servers must be able to read; by default a temporary one.
        sleep: Whether `release_memory` offloads vLLM's weights and frees its cache, for an engine on the device of the
            trainer. A server also needs `--enable-sleep-mode`.
        engine_args: Fields of `vllm.AsyncEngineArgs`, in this process; not `model`, which is the source. The default of
            `trust_remote_code` is False.
        tool_call_parser: Name of vLLM's parser of the model's tool calls, in this process; `None`: they stay text. A
            server is started with `--tool-call-parser`.
        api_key: Bearer token of the servers.
        timeout: Seconds without a byte from a server.
        concurrency: Largest number of requests in flight, for each server.
        logprobs_kind: Kind of the servers' log-probs, if they were started with another `--logprobs-mode` than `raw`.
            In this process log-probs are `processed`.

    Raises:
        ImportError: vLLM is not installed, and it is to run in this process.

    >>> with VllmEngine(["http://127.0.0.1:8000", "http://127.0.0.1:8001"]) as engine:
    ...     engine, engine.replica_count  # and engine.generate(["2+2="], max_tokens=8)
    (VllmEngine('http://127.0.0.1:8000', 'http://127.0.0.1:8001'), 2)
    """

    takes_weights: ClassVar[bool] = True

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer | None = None,
        *,
        model: str | None = None,
        version: int = 0,
        transfer: Transfer = "auto",
        folder: str | os.PathLike[str] | None = None,
        sleep: bool = False,
        engine_args: Mapping[str, Any] | None = None,
        tool_call_parser: str | None = None,
        api_key: str | None = None,
        timeout: float = 1800.0,
        concurrency: int = 64,
        logprobs_kind: LogprobsKind | None = None,
    ) -> None:
        check_choice("transfer", transfer, get_args(Transfer))
        self.transfer: Transfer = transfer
        self._can_sleep = check_bool("sleep", sleep)
        self._is_asleep = False
        self._temporary = None if folder is not None else tempfile.TemporaryDirectory(prefix="rollbook-vllm-")
        self.folder = Path(folder if self._temporary is None else self._temporary.name).absolute()  # type: ignore[arg-type]
        self._sync_lock = threading.Lock()
        self._load_lock = threading.Lock()
        self._replica_by_task: OrderedDict[str, int] = OrderedDict()
        self._adapters: list[tuple[str, int]] = []
        self._sender: Any = None  # vLLM's trainer side of a weight transfer, and the model that it sends
        self._sent_model: torch.nn.Module | None = None
        self._replicas: list[Replica] = []
        urls = _find_urls(source)
        if urls:
            if engine_args:
                raise ValueError("engine_args: got some with URLs, expected them for vLLM in this process")
            if tool_call_parser is not None:
                raise ValueError(
                    f"tool_call_parser: got {tool_call_parser!r} with URLs, expected it for vLLM in this process; "
                    "start the servers with --tool-call-parser"
                )
            options: dict[str, Any] = {
                "version": version,
                "api_key": api_key,
                "timeout": timeout,
                "concurrency": concurrency,
                "logprobs_kind": logprobs_kind,
            }
            self._replicas += [ServerReplica(url, model, tokenizer, **options) for url in urls]
        else:
            self._replicas.append(
                self._start_local(source, tokenizer, version, dict(engine_args or {}), tool_call_parser)
            )
        self.tokenizer: Any = self._replicas[0].tokenizer
        self._in_flight = [0] * len(self._replicas)
        self.is_remote = bool(urls)

    def _start_local(
        self,
        source: Source,
        tokenizer: Tokenizer | None,
        version: int,
        engine_args: dict[str, Any],
        tool_call_parser: str | None,
    ) -> Replica:
        """Start vLLM in this process."""
        if "model" in engine_args:
            raise ValueError(f"engine_args.model: got {engine_args['model']!r}, but the source is the model; remove it")
        require_vllm()
        name, processor = str(source), None
        defaults: dict[str, Any] = {
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": self._can_sleep,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "trust_remote_code": False,
        }
        if isinstance(source, Actor):
            name = str(getattr(source.config, "_name_or_path", "") or type(unwrap(source.model)).__name__)
            tokenizer = tokenizer if tokenizer is not None else source.tokenizer
            processor = source.processor
            defaults["dtype"] = str(source.dtype).removeprefix("torch.")
            if has_adapters(source.model):
                ranks = [config.r for config in source.model.peft_config.values()]  # type: ignore[operator]
                defaults |= {"enable_lora": True, "max_loras": 2}
                defaults["max_lora_rank"] = next((rank for rank in _LORA_RANKS if rank >= max(ranks)), max(ranks))
            start = self.folder / "start"
            save_checkpoint(source, start)
            for preprocessor in (tokenizer, processor):
                save: Any = getattr(preprocessor, "save_pretrained", lambda folder: None)
                save(start)
            device, source = source.device, start
        else:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        transfer = self._choose_transfer(device, local=True)
        if transfer in ("ipc", "nccl"):
            # Handles of device memory are pickled, between this process and its children only.
            os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
            defaults["weight_transfer_config"] = {"backend": transfer}
        engine_args = {**defaults, **engine_args, "model": str(source)}
        return LocalReplica(name, engine_args, tokenizer, processor, version, tool_call_parser)

    def __repr__(self) -> str:
        names = [getattr(replica, "url", replica.model) for replica in self._replicas]
        return f"{type(self).__name__}({', '.join(map(repr, names))})"

    # --- properties ---------------------------------------------------------------------------------------------------

    @property
    def run(self) -> RunInfo:
        """Description of the first replica."""
        return self._replicas[0].run

    @property
    def version(self) -> int:
        """Number of the policy."""
        return self._replicas[0].version

    @version.setter
    def version(self, version: int) -> None:
        for replica in self._replicas:
            replica.version = version

    @property
    def replica_count(self) -> int:
        """Number of vLLM engines."""
        return len(self._replicas)

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of the weights; `None` if it is not known."""
        return self._replicas[0].dtype

    def health(self, timeout: float = 120.0) -> None:
        """Wait until all servers are ready.

        Args:
            timeout: Seconds to wait for each.

        Raises:
            TimeoutError: A server is not ready in time.
        """
        for replica in self._replicas:
            if isinstance(replica, ServerReplica):
                replica.health(timeout)

    def close(self) -> None:
        """End vLLM in this process, or close the connections."""
        for replica in self._replicas:
            replica.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    # --- calls --------------------------------------------------------------------------------------------------------

    def _run(self, requests: Sequence[Request], cancel: Cancel) -> Iterator[tuple[int, Sample]]:
        return collect(partial(self._start_requests, requests, cancel))

    def _arun(self, requests: Sequence[Request], cancel: Cancel) -> AsyncGenerator[tuple[int, Sample], None]:
        return acollect(partial(self._start_requests, requests, cancel))

    def _start_requests(
        self, requests: Sequence[Request], cancel: Cancel, emit: Emit
    ) -> list[concurrent.futures.Future[None]]:
        """Start the requests on their replicas."""
        if self._is_asleep:
            with self._sync_lock:
                self._wake()
        shares: dict[int, list[Request]] = {}
        with self._load_lock:
            for request in requests:
                shares.setdefault(self._choose_replica(request), []).append(request)
        return [self._start_on_replica(i, share, cancel, emit) for i, share in shares.items()]

    def _choose_replica(self, request: Request) -> int:
        """Return the replica of a request, and count its samples there."""
        task = request.eids[0].tid
        replica_index = self._replica_by_task.pop(task, None)
        if replica_index is None:
            replica_index = min(range(len(self._in_flight)), key=self._in_flight.__getitem__)
        self._replica_by_task[task] = replica_index
        if len(self._replica_by_task) > _MAX_TRACKED_TASKS:
            self._replica_by_task.popitem(last=False)
        self._in_flight[replica_index] += len(request.eids)
        return replica_index

    def _start_on_replica(
        self, replica_index: int, requests: Sequence[Request], cancel: Cancel, emit: Emit
    ) -> concurrent.futures.Future[None]:
        unfinished = sum(len(request.eids) for request in requests)

        def count_and_emit(entry: tuple[int, Sample]) -> None:
            nonlocal unfinished
            with self._load_lock:
                unfinished -= 1
                self._in_flight[replica_index] -= 1
            emit(entry)

        def forget_unfinished(_: concurrent.futures.Future[None]) -> None:
            with self._load_lock:
                self._in_flight[replica_index] -= unfinished

        call = self._replicas[replica_index].start(requests, cancel, count_and_emit)
        call.add_done_callback(forget_unfinished)
        return call

    # --- weights ------------------------------------------------------------------------------------------------------

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Send the weights of `source`, or its LoRA adapters, to all replicas. See the class.

        If that fails, some replicas may have a part of the weights, so the engine is closed.

        Args:
            source: An `Actor`, or a transformers model.
            version: Number of the policy.

        Raises:
            WeightSyncError: A replica did not take the weights.
        """
        check_int("version", version, 0)
        model = get_module(source)
        with self._sync_lock:
            try:
                self._wake()
                if has_adapters(model):
                    self._send_adapters(model, version)
                else:
                    transfer = self._choose_transfer(get_device(model), isinstance(self._replicas[0], LocalReplica))
                    if transfer == "file":
                        self._send_file(model, version)
                    else:
                        self._send_tensors(model, version, transfer)
            except BaseException:
                self.close()
                raise

    def served_weights(self) -> dict[str, Any]:
        """Describe the weights that this engine has sent to servers, for `follow_weights` in another process.

        Raises:
            WeightSyncError: vLLM runs in this process.
        """
        replicas = [replica for replica in self._replicas if isinstance(replica, ServerReplica)]
        if not replicas:
            return super().served_weights()
        return {
            "urls": [redacted(replica.url) for replica in replicas],
            "adapter": replicas[0].adapter,
            "version": self.version,
        }

    def follow_weights(self, served: Mapping[str, Any], *, while_updated: bool = False) -> None:
        """Sample from weights that an engine of another process has sent to the same servers.

        Args:
            served: Result of `served_weights` of that engine.
            while_updated: Whether servers may be updated while responses are in flight.

        Raises:
            WeightSyncError: A server of this engine is not among those servers, or vLLM runs in this process.
        """
        replicas = [replica for replica in self._replicas if isinstance(replica, ServerReplica)]
        if not replicas:
            super().follow_weights(served)
        urls = served.get("urls") or ()
        for replica in replicas:
            if redacted(replica.url) not in urls:
                raise WeightSyncError(
                    f"engine.url: got {redacted(replica.url)!r}, to which the trainer sends no weights, expected "
                    + (f"some of {', '.join(urls)}" if urls else "engine.kind vllm with this URL in its configuration")
                )
        self._run_on_replicas(lambda replica: replica.follow(served["adapter"], served["version"], while_updated))  # type: ignore[attr-defined]

    def _choose_transfer(self, device: torch.device, local: bool) -> Transfer:
        """Return how the weights of a model on `device` travel; `local`: to vLLM in this process."""
        if self.transfer != "auto":
            return self.transfer
        if device.type != "cuda":
            return "file"
        return "ipc" if local else "nccl"

    def _run_on_replicas(self, work: Callable[[Replica], Coroutine[Any, Any, T]]) -> list[T]:
        """Run a coroutine for each replica, all at once."""
        calls = [replica.submit(work(replica)) for replica in self._replicas]
        concurrent.futures.wait(calls)
        try:
            return [call.result() for call in calls]
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(f"{self!r}: {type(error).__name__}: {error}") from error

    def _send_file(self, model: PreTrainedModel, version: int) -> None:
        folder = self.folder / f"version-{version}"
        save_checkpoint(model, folder)

        async def update(replica: Replica) -> None:
            await replica.pause()
            await replica.load_checkpoint(str(folder))
            await replica.label(version)
            await replica.resume()

        try:
            self._run_on_replicas(update)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _send_adapters(self, model: PeftModel, version: int) -> None:
        # A new name for each version: vLLM caches keys and values by it, and requests in flight keep theirs.
        number = self._adapters[-1][1] + 1 if self._adapters else 1
        name = f"rollbook-{number}"
        folder = self.folder / name
        model.save_pretrained(str(folder))
        self._run_on_replicas(lambda replica: replica.load_adapter(name, number, str(folder), version))
        self._adapters.append((name, number))
        if len(self._adapters) > KEPT_ADAPTERS:
            oldest = self._adapters.pop(0)
            self._run_on_replicas(lambda replica: replica.remove_adapter(*oldest))
            shutil.rmtree(self.folder / oldest[0], ignore_errors=True)

    def _send_tensors(self, model: PreTrainedModel, version: int, transfer: Transfer) -> None:
        """Send weights by vLLM's weight transfer (NCCL or IPC)."""
        if self._sender is None:
            self._sender, self._sent_model = self._connect(model, transfer), model
        if model is not self._sent_model:
            raise WeightSyncError("source: got another model than in the first update, expected the same one")
        self._run_on_replicas(lambda replica: replica.pause())
        self._sender.send_weights()
        self._run_on_replicas(lambda replica: replica.label(version))
        self._run_on_replicas(lambda replica: replica.resume())

    def _connect(self, model: PreTrainedModel, transfer: Transfer) -> Any:
        """Return vLLM's trainer side of a weight transfer, connected to the workers."""
        require_vllm()
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_ip, get_open_port

        if transfer == "ipc" and not isinstance(self._replicas[0], LocalReplica):
            raise WeightSyncError("transfer: got 'ipc', which needs vLLM in this process; expected 'nccl' or 'file'")
        sizes = self._run_on_replicas(lambda replica: replica.world_size())
        source = CheckpointSource(model)
        init_info: Any
        if transfer == "nccl":
            init_info = NCCLTrainerInitInfo(get_ip(), get_open_port(), 1 + sum(sizes), rank=0)
        else:
            buffer_size = max(_MIN_IPC_BUFFER, source.largest)
            init_info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=buffer_size)
        client = _TransferClient(self._run_on_replicas, self._replicas, sizes)
        return WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)

    # --- memory -------------------------------------------------------------------------------------------------------

    def release_memory(self) -> None:
        """Offload the weights and free the cache, if the engine was created with `sleep=True`.

        The next call, or the next weight update, loads the weights back.
        """
        with self._sync_lock:
            if self._can_sleep and not self._is_asleep:
                self._run_on_replicas(lambda replica: replica.sleep())
                self._is_asleep = True

    def _wake(self) -> None:
        if self._is_asleep:
            self._run_on_replicas(lambda replica: replica.wake_up())
            self._is_asleep = False


class CheckpointSource:
    """The weights of a model under the names of its checkpoints, as a `WeightSource` of vLLM's weight transfer.

    In memory, transformers fuses or renames some weights (experts, vision-language models). These are converted as in
    `save_pretrained`; fused ones are copied, all of them before the first is sent.

    Args:
        model: A transformers model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...     num_attention_heads=1, num_key_value_heads=1)
    >>> dict(CheckpointSource(LlamaForCausalLM(config)))["model.norm.weight"].shape
    torch.Size([8])
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._convert().items())

    def metadata(self) -> list[Any]:
        """Return the names, types and shapes in vLLM's form, in the order of the weights."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._convert("meta").items()]

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(tensor.nbytes for tensor in self._convert("meta").values())

    def _convert(self, device: str | None = None) -> dict[str, torch.Tensor]:
        """Return the weights as `save_pretrained` writes them; on the device `meta`, without their data."""
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        weights = remove_tied_weights_from_state_dict(self._model.state_dict(), self._model)
        if device is not None:
            weights = {name: tensor.to(device) for name, tensor in weights.items()}
        converted: dict[str, torch.Tensor] = revert_weight_conversion(self._model, weights)
        return converted


class _TransferClient:
    """The client of vLLM's `VLLMWeightSyncClient` protocol for all replicas together."""

    def __init__(
        self, run_on_replicas: Callable[..., list[Any]], replicas: Sequence[Replica], sizes: Sequence[int]
    ) -> None:
        self._run_on_replicas = run_on_replicas
        self._offsets = {id(replica): sum(sizes[:i]) for i, replica in enumerate(replicas)}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        def init(replica: Replica) -> Coroutine[Any, Any, None]:
            info = dict(init_info)
            if "rank_offset" in info:  # ranks of NCCL, where the trainer is rank 0
                info["rank_offset"] += self._offsets[id(replica)]
            return replica.transfer_step("init", info)

        self._run_on_replicas(init)

    def start_weight_update(self) -> None:
        self._run_on_replicas(lambda replica: replica.transfer_step("start"))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._run_on_replicas(lambda replica: replica.transfer_step("update", update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._run_on_replicas(lambda replica: replica.transfer_step("finish"))


def save_checkpoint(source: WeightSource, folder: str | os.PathLike[str]) -> None:
    """Write a model for vLLM, without adapters.

    On the CPU, tied embeddings become two tensors: vLLM's CPU build (0.32) does not update a tied output head.

    Args:
        source: An `Actor`, or a transformers model.
        folder: Folder to write.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...     num_attention_heads=1, num_key_value_heads=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(LlamaForCausalLM(config), folder)
    ...     sorted(os.listdir(folder))
    ['config.json', 'generation_config.json', 'model.safetensors']
    """
    model = get_module(source)
    with hide_progress_bars():
        if has_adapters(model):
            save_base(model, str(folder))
            return
        head = model.get_output_embeddings()
        tied = head is not None and head.weight is model.get_input_embeddings().weight
        if not tied or get_device(model).type != "cpu":
            model.save_pretrained(folder)
            return
        name = next(name for name, module in model.named_modules() if module is head)
        weights = {**model.state_dict(), f"{name}.weight": head.weight.detach().clone()}
        configs = [model.config, model.config.get_text_config()]  # of a language model the same object
        previous = [config.tie_word_embeddings for config in configs]
        try:
            for config in configs:
                config.tie_word_embeddings = False
            model.save_pretrained(folder, state_dict=weights)
        finally:
            for config, tie in zip(configs, previous, strict=True):
                config.tie_word_embeddings = tie


def require_vllm() -> None:
    """Check that vLLM is installed.

    Raises:
        ImportError: vLLM is not installed.
    """
    try:
        import vllm  # noqa: F401
    except ImportError:
        raise ImportError("vLLM in this process needs vllm: install it with `pip install 'rollbook[vllm]'`") from None


def _find_urls(source: Source) -> list[str]:
    """Return the URLs of a source; none if it is a model."""
    if isinstance(source, str):
        return [source] if _is_url(source) else []
    if not isinstance(source, (list, tuple)):
        return []
    if not source or not all(map(_is_url, source)):
        raise ValueError(f"source: got {list(source)!r}, expected URLs")
    return list(source)


def _is_url(entry: Any) -> bool:
    return isinstance(entry, str) and entry.startswith(("http://", "https://"))


__all__ = ["VllmEngine", "save_checkpoint"]
