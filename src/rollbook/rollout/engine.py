"""The `Engine` protocol of rollout engines, `BaseEngine`, which implements it on top of one method, and
`ScriptedEngine`, which returns scripted responses (`Line`), for tests and for replaying recorded rollouts.

Invariant: a call returns exactly n samples per prompt, in the order of the prompts, each with its own id. A failure is
recorded on its sample and does not change the others. With a function or a mapping as the script, a scripted sample
depends only on its prompt and id.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeAlias

from rollbook.core.checks import check_int
from rollbook.core.errors import RollbookError
from rollbook.core.ids import EID
from rollbook.core.sampling import FinishReason, Prompt, RunInfo, Sample, Sampling, token_ids
from rollbook.core.vocabulary import Tokenizer, template_fingerprint, tokenizer_fingerprint

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rollbook.core.experience import Experience
    from rollbook.models.protocols import Policy

__all__ = ["BaseEngine", "Cancel", "Engine", "Line", "Request", "ScriptedEngine", "WeightSyncError"]

Message: TypeAlias = "Mapping[str, Any]"
Ids: TypeAlias = "Sequence[int] | np.ndarray | torch.Tensor"
PromptLike: TypeAlias = "str | Ids | Message | Sequence[Message] | Prompt | Sample"
"""A prompt as engines take it: text, token ids, messages, a `Prompt`, or an unfinished `Sample` to continue."""
PromptsLike: TypeAlias = "PromptLike | Sequence[PromptLike]"
"""A prompt or a list of prompts."""
SamplingLike: TypeAlias = "Sampling | Mapping[str, Any] | None"
"""Sampling options; `None` for the defaults."""
SamplingsLike: TypeAlias = "SamplingLike | Sequence[SamplingLike]"
"""Sampling options of all prompts, or a list with those of each."""
SamplingOption: TypeAlias = "bool | float | str | Sequence[str] | Sequence[int] | Mapping[str, Any] | None"
"""Value of a field of `Sampling`."""
WeightSource: TypeAlias = "Policy | torch.nn.Module"
"""A model whose weights an engine takes: a module, or an object that has one as `.model`."""


class WeightSyncError(RollbookError, RuntimeError):
    """Raised when an engine cannot take the weights of a model."""


def get_module(source: WeightSource) -> Any:
    """Return the module with the weights.

    Args:
        source: An `Actor`, whose module is returned, or a module.
    """
    return getattr(source, "model", source) if hasattr(source, "token_stats") else source


class Cancel:
    """Cancellation of a call, from any thread. Unfinished samples are returned as far as they were sampled.

    Args:
        shared: Whether the caller can request it. If not, an engine need not keep partial responses.

    >>> cancel = Cancel()
    >>> cancel.requested, cancel.request(), cancel.requested
    (False, None, True)
    """

    def __init__(self, shared: bool = True) -> None:
        self.shared = shared
        self._event = threading.Event()

    def request(self) -> None:
        """Cancel the call at the next token."""
        self._event.set()

    @property
    def requested(self) -> bool:
        """Whether the call was cancelled."""
        return self._event.is_set()


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt of a call, as `BaseEngine._run` receives it.

    Args:
        prompt: The prompt.
        sampling: Its sampling options.
        eids: Ids of its samples.
        seeds: Seeds of their random streams.
        position: Sample k is number `position + k` of the call.
        started: Unfinished sample to continue; then there is one id.
        pause_after: Limit on the tokens of this call.

    >>> request = Request(prompt=Prompt(text="hi"), sampling=Sampling(max_tokens=8), eids=(EID(batch=0, task=0),),
    ...                   seeds=(1,), position=0, pause_after=3)
    >>> request.budget, request.pauses
    (3, True)
    """

    prompt: Prompt
    sampling: Sampling
    eids: tuple[EID, ...]
    seeds: tuple[int, ...]
    position: int
    started: Sample | None = None
    pause_after: int | None = None

    @property
    def done(self) -> int:
        """Number of response tokens before this call."""
        return 0 if self.started is None else len(self.started.response_ids)

    @property
    def budget(self) -> int:
        """Largest number of tokens that this call samples for each sample."""
        left = self.sampling.max_tokens - self.done
        return left if self.pause_after is None else min(left, self.pause_after)

    @property
    def pauses(self) -> bool:
        """Whether `pause_after` applies before `max_tokens`."""
        return self.pause_after is not None and self.pause_after < self.sampling.max_tokens - self.done

    def options(self, k: int) -> dict[str, Any]:
        """Return the sampling options for the record of sample k.

        `seed` is that of its random stream, `asked_seed` that of the call. If the sample was continued with other
        options, `earlier` has those of its first tokens.

        Args:
            k: Index of the sample within the request.

        Returns:
            The options by name.
        """
        options = {**self.sampling.to_dict(), "seed": self.seeds[k], "asked_seed": self.sampling.seed}
        if self.started is None:
            return options
        recorded = self.started.sampling
        options["asked_seed"] = recorded.get("asked_seed")
        changed = {
            name: option
            for name, option in recorded.items()
            if name in options and option != options[name] and name != "n"
        }
        earlier = list(recorded.get("earlier", ()))
        if changed and self.done:
            earlier.append({"tokens": self.done, **changed})
        return {**options, "earlier": earlier} if earlier else options

    def failed(self, k: int, error: BaseException | str, run_id: str | None, **fields: Any) -> Sample:
        """Return sample k as failed.

        Args:
            k: Index of the sample within the request.
            error: The error.
            run_id: `RunInfo.id` of the engine.
            fields: Other fields of the sample.
        """
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        started = self.started
        tokens: dict[str, Any] = {"prompt_ids": list(self.prompt.token_ids or ()), "response_ids": [], "logprobs": None}
        if started is not None:
            names = ("prompt_ids", "response_ids", "logprobs", "versions", "text", "prompt_text", "media")
            tokens = {name: getattr(started, name) for name in names}
        return Sample(
            **{
                "prompt": self.prompt,
                "eid": self.eids[k],
                "finish_reason": "error",
                "error": text,
                "sampling": self.options(k),
                "run_id": run_id,
                "group_size": started.group_size if started is not None else self.sampling.n,
                **tokens,
                **fields,
            }
        )


class Engine(Protocol):
    """Protocol of rollout engines: what `rollbook.train` and episodes need of one.

    An engine may also have a `tokenizer` and a `processor`, which decode samples for rewards and render the turns of
    episodes. A trainer sends weights to a `BaseEngine` that takes them; other engines share the weights with the
    policy, or get them from the user.

    >>> from rollbook.rollout import ScriptedEngine
    >>> engine: Engine = ScriptedEngine([[7, 8]])
    >>> [sample.response_ids for sample in engine.generate([Prompt(token_ids=[5])], Sampling(n=2))]
    [[7, 8], [7, 8]]
    """

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling | list[Sampling], /) -> list[Sample]:
        """Sample `sampling.n` responses per prompt; episodes pass a list of options, one for each prompt.

        Args:
            prompts: Prompts, or unfinished samples to continue.
            sampling: Sampling options, for all prompts or for each.

        Returns:
            The samples, in the order of the prompts. A failure becomes a sample with an `error`, not an exception.
        """
        ...


class BaseEngine(ABC):
    """Base class of the engines: synchronous, asynchronous and streaming generation from one method.

    A subclass defines `run`, and `_run`, which yields `(index, sample)` as samples finish. `version` is the number of
    the policy, set by `update_weights`, or by the caller when the weights change otherwise.

    >>> class Echo(BaseEngine):
    ...     run = RunInfo(engine="echo", engine_version="1", model="none")
    ...     def _run(self, requests, cancel):
    ...         for request in requests:
    ...             ids = list(request.prompt.token_ids)
    ...             for k, eid in enumerate(request.eids):
    ...                 yield request.position + k, Sample(
    ...                     prompt=request.prompt, eid=eid, prompt_ids=ids, response_ids=ids[: request.budget])
    >>> [sample.response_ids for sample in Echo().generate([[5, 6], [7]], max_tokens=1)]
    [[5], [7]]
    """

    version: int = 0
    takes_weights: ClassVar[bool] = False
    """Whether `update_weights` takes the weights of a model. A trainer keeps such an engine in sync."""
    weight_layout: ClassVar[Literal["gathered"]] = "gathered"
    """Weights that the engine of each rank holds in a distributed run: complete ones."""
    is_remote: bool = False
    """Whether the weights are on servers, to which one rank sends them for all."""

    @property
    @abstractmethod
    def run(self) -> RunInfo:
        """Description of the engine, model and tokenizer."""

    @abstractmethod
    def _run(self, requests: Sequence[Request], cancel: Cancel) -> Iterator[tuple[int, Sample]]:
        """Yield `(position + k, sample)` for each sample of each request, in the order they finish."""

    def close(self) -> None:  # noqa: B027  most engines hold no resources
        """Close connections and end threads. The engine cannot be used afterwards."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Sample from the weights of `source` from now on, and record `version` for tokens sampled after it.

        Returns when the engine has the weights. Responses that are being sampled continue; each of their tokens has
        the version that sampled it.

        Args:
            source: An `Actor`, or a module with the architecture of the engine's model.
            version: Number of the policy.

        Raises:
            WeightSyncError: The engine cannot take weights, or the weights do not fit.
        """
        raise WeightSyncError(f"{type(self).__name__} cannot take weights: its model is fixed")

    def served_weights(self) -> dict[str, Any]:
        """Describe the weights that this engine has sent to servers, for `follow_weights` in another process.

        Raises:
            WeightSyncError: The engine does not send weights to servers.
        """
        raise WeightSyncError(f"{type(self).__name__} does not send weights to servers")

    def follow_weights(self, served: Mapping[str, Any], *, while_updated: bool = False) -> None:
        """Sample from weights that an engine of another process has sent to the same servers.

        Args:
            served: What `served_weights` of that engine returned.
            while_updated: Whether servers may be updated while responses are in flight.

        Raises:
            WeightSyncError: A server of this engine is not among those servers.
        """
        raise WeightSyncError(f"{type(self).__name__} has no servers whose weights it could follow")

    def release_memory(self) -> None:  # noqa: B027  most engines keep their memory
        """Free device memory until the next call, if the engine can. A trainer calls it before an update."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- public methods -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptsLike,
        sampling: SamplingsLike = None,
        *,
        cancel: Cancel | None = None,
        pause_after: int | None = None,
        batch: int | str | None = None,
        **options: SamplingOption,
    ) -> list[Sample]:
        """Sample n responses per prompt and return when all are finished.

        Args:
            prompts: A prompt or a list of them: text, messages, token ids, a `Prompt`, or an unfinished `Sample` to
                continue.
            sampling: A `Sampling`, a mapping, or a list of them, one per prompt.
            cancel: Stops the call from another thread.
            pause_after: Limit on the tokens of this call. Samples that are unfinished then have finish reason `abort`
                and can be passed to an engine again.
            batch: Batch id of prompts that have no id; their tasks are numbered by position.
            options: Fields of `Sampling`, which override `sampling`.

        Returns:
            The samples: those of prompt i are [i * n, (i + 1) * n) if all prompts have the same n. A failure becomes a
            sample with an `error`.

        Raises:
            ValueError: A prompt or an option is invalid, or two prompts have the same id.
        """
        requests = self.requests(prompts, sampling, pause_after, batch, **options)
        samples: dict[int, Sample] = dict(self._run_all(requests, cancel or Cancel(shared=False)))
        return list(map(samples.__getitem__, sorted(samples)))

    def stream(
        self,
        prompts: PromptsLike,
        sampling: SamplingsLike = None,
        *,
        cancel: Cancel | None = None,
        pause_after: int | None = None,
        batch: int | str | None = None,
        **options: SamplingOption,
    ) -> Iterator[Sample]:
        """Yield the samples as soon as they are finished. Leaving the loop early cancels the rest.

        Args:
            prompts: See `generate`. The arguments are checked before the iteration starts.
            sampling: See `generate`.
            cancel: See `generate`.
            pause_after: See `generate`.
            batch: See `generate`.
            options: See `generate`.

        Raises:
            ValueError: A prompt or an option is invalid, or two prompts have the same id.
        """
        requests = self.requests(prompts, sampling, pause_after, batch, **options)
        return self._streamed(requests, cancel or Cancel())

    def _streamed(self, requests: Sequence[Request], cancel: Cancel) -> Iterator[Sample]:
        for _, sample in self._run_all(requests, cancel):
            yield sample

    async def agenerate(
        self,
        prompts: PromptsLike,
        sampling: SamplingsLike = None,
        *,
        cancel: Cancel | None = None,
        pause_after: int | None = None,
        batch: int | str | None = None,
        **options: SamplingOption,
    ) -> list[Sample]:
        """Do the same as `generate` in an event loop. Canceling the task cancels the call.

        Args:
            prompts: See `generate`.
            sampling: See `generate`.
            cancel: See `generate`.
            pause_after: See `generate`.
            batch: See `generate`.
            options: See `generate`.

        Returns:
            The samples, in the order of `generate`.

        Raises:
            ValueError: A prompt or an option is invalid, or two prompts have the same id.
        """
        requests = self.requests(prompts, sampling, pause_after, batch, **options)
        async with aclosing(self._arun(requests, cancel or Cancel(shared=False))) as running:
            samples = {index: sample async for index, sample in running}
        return [samples[index] for index in sorted(samples)]

    async def astream(
        self,
        prompts: PromptsLike,
        sampling: SamplingsLike = None,
        *,
        cancel: Cancel | None = None,
        pause_after: int | None = None,
        batch: int | str | None = None,
        **options: SamplingOption,
    ) -> AsyncIterator[Sample]:
        """Do the same as `stream` in an event loop.

        Args:
            prompts: See `generate`.
            sampling: See `generate`.
            cancel: See `generate`.
            pause_after: See `generate`.
            batch: See `generate`.
            options: See `generate`.

        Raises:
            ValueError: A prompt or an option is invalid, or two prompts have the same id.
        """
        requests = self.requests(prompts, sampling, pause_after, batch, **options)
        async with aclosing(self._arun(requests, cancel or Cancel())) as running:
            async for _, sample in running:
                yield sample

    # --- shared implementation ----------------------------------------------------------------------------------------

    @staticmethod
    def requests(
        prompts: PromptsLike,
        sampling: SamplingsLike = None,
        pause_after: int | None = None,
        batch: int | str | None = None,
        **options: SamplingOption,
    ) -> list[Request]:
        """Return the requests of a call: its prompts with their options, ids and seeds, all checked.

        Args:
            prompts: See `generate`.
            sampling: See `generate`.
            pause_after: See `generate`.
            batch: See `generate`.
            options: See `generate`.

        Raises:
            ValueError: A prompt or an option is invalid, or two prompts have the same id.
        """
        if pause_after is not None:
            check_int("pause_after", pause_after, 1)
        entries = _as_list(prompts)
        samplings = sampling if isinstance(sampling, (list, tuple)) else [sampling] * len(entries)
        if len(samplings) != len(entries):
            raise ValueError(f"sampling: got {len(samplings)} entries, expected {len(entries)}, one for each prompt")
        requests: list[Request] = []
        task_of_run: dict[str, int] = {}
        position = 0
        for task, (entry, options_of_entry) in enumerate(zip(entries, samplings, strict=True)):
            if isinstance(entry, Sample):
                request = _continue_request(entry, options_of_entry, options, pause_after, position)
            else:
                prompt = Prompt.of(entry)
                settings = Sampling.of(options_of_entry, **options)
                eid = prompt.eid
                if eid is None:
                    batch = random_batch_id() if batch is None else batch
                    eid = EID(batch=batch, task=task, suffix="")
                root = settings.seed if settings.seed is not None else int.from_bytes(os.urandom(8), "big")
                eids, seeds = _run_ids(eid, settings.n, root, settings.seed is not None)
                request = Request(
                    prompt=prompt,
                    sampling=settings,
                    eids=eids,
                    seeds=seeds,
                    position=position,
                    pause_after=pause_after,
                )
            for eid in request.eids:  # two samples with one id would be one sample in every statistic
                other = task_of_run.setdefault(f"{eid.rid}/{eid.step}", task)
                if other != task:
                    raise ValueError(f"prompts: {other} and {task} both give run {eid.rid}, expected different ids")
            requests.append(request)
            position += len(request.eids)
        return requests

    def _run_all(self, requests: Sequence[Request], cancel: Cancel) -> Iterator[tuple[int, Sample]]:
        """Yield what `_run` yields, and a failed sample for each that is missing at its end."""
        missing = {request.position + k: (request, k) for request in requests for k in range(len(request.eids))}
        running = self._run(requests, cancel)
        try:
            while missing:
                try:
                    index, sample = next(running)
                except StopIteration:
                    error: BaseException | str = "the engine ended without this sample"
                    break
                except Exception as raised:  # fails all unfinished samples
                    error = raised
                    break
                if missing.pop(index, None) is None:
                    raise ValueError(f"{type(self).__name__}: unexpected or repeated sample {index}")
                yield index, sample
            for index, (request, k) in list(missing.items()):
                del missing[index]
                yield index, request.failed(k, error, self.run.id)
        finally:
            cancel_rest = getattr(running, "close", None)
            if cancel_rest is not None:
                cancel_rest()

    async def _arun(self, requests: Sequence[Request], cancel: Cancel) -> AsyncGenerator[tuple[int, Sample], None]:
        """Run `_run_all` in a thread, for engines without their own event loop."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Queue[tuple[int, Sample] | BaseException | None] = asyncio.Queue()

        def put(entry: tuple[int, Sample] | BaseException | None) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed
                loop.call_soon_threadsafe(ready.put_nowait, entry)

        def work() -> None:
            try:
                for entry in self._run_all(requests, cancel):
                    put(entry)
                put(None)
            except BaseException as error:
                put(error)

        worker = threading.Thread(target=work, name="rollbook-engine", daemon=True)
        worker.start()
        finished = False
        try:
            while (entry := await ready.get()) is not None:
                if isinstance(entry, BaseException):
                    raise entry
                yield entry
            finished = True
        finally:
            if not finished:
                cancel.request()


def _as_list(prompts: PromptsLike) -> list[Any]:
    """Return a list of prompts; a single prompt becomes a list of one."""
    if isinstance(prompts, (str, Prompt, Sample)) or hasattr(prompts, "tolist"):
        return [prompts]
    if isinstance(prompts, Mapping):
        return [[prompts]]  # one message
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray)):
        raise ValueError(f"prompts: got {type(prompts).__name__}, expected a prompt or a list of them")
    entries = list(prompts)
    if entries and isinstance(entries[0], Integral):
        return [entries]  # one prompt's token ids
    if entries and isinstance(entries[0], Mapping) and "role" in entries[0]:
        return [entries]  # one prompt's messages
    return entries


def _continue_request(
    sample: Sample, sampling: SamplingLike, options: dict[str, Any], pause_after: int | None, position: int
) -> Request:
    """Return the request that continues an unfinished sample."""
    if not sample.unfinished:
        raise ValueError(
            f"sample {sample.eid}: got a finished sample ({sample.finish_reason}), expected an unfinished one"
        )
    recorded = {name: value for name, value in sample.sampling.items() if name in Sampling.__dataclass_fields__} | {
        "n": 1
    }
    settings = Sampling.of(sampling if isinstance(sampling, Sampling) else {**recorded, **(sampling or {})}, **options)
    if settings.n != 1:
        raise ValueError(f"n: got {settings.n}, expected 1 to continue sample {sample.eid}")
    if settings.max_tokens <= len(sample.response_ids):
        raise ValueError(
            f"sample {sample.eid}: max_tokens: got {settings.max_tokens}, expected more than the "
            f"{len(sample.response_ids)} it has"
        )
    seed, asked_seed = sample.sampling.get("seed"), sample.sampling.get("asked_seed")
    if settings.seed not in (None, seed, asked_seed):
        seed = _run_ids(sample.eid, 1, settings.seed, True)[1][0]  # continue with another random stream
    return Request(
        prompt=sample.prompt,
        sampling=settings,
        eids=(sample.eid,),
        seeds=(int.from_bytes(os.urandom(8), "big") >> 1 if seed is None else seed,),
        position=position,
        started=sample,
        pause_after=pause_after,
    )


def random_batch_id() -> str:
    """Return a random batch id, marked as such, for prompts without an id."""
    return "~" + os.urandom(8).hex()


def _run_ids(eid: EID, n: int, root: int, repeatable: bool) -> tuple[tuple[EID, ...], tuple[int, ...]]:
    """Return the ids and seeds of the n runs of a task; repeatable if the call has a seed."""
    eids, seeds = [], []
    named = not str(eid.batch).startswith("~")
    for run in range(n):
        run_eid = eid.replace(run=eid.run + run, suffix="")
        # Samples of a seeded call must not depend on a random batch id.
        stream = run_eid if named else run_eid.replace(batch="")
        digest = hashlib.blake2b(f"{root}/{stream.uid}".encode(), digest_size=16).digest()
        # 63 bits, which Arrow and servers accept.
        seeds.append(int.from_bytes(digest[:8], "big") >> 1)
        eids.append(run_eid.replace(suffix=digest[8:].hex() if repeatable else os.urandom(8).hex()))
    return tuple(eids), tuple(seeds)


def derive_seed(seed: int, key: int | str) -> int:
    """Derive the seed of an independent random stream.

    Args:
        seed: The seed.
        key: Name or number of the stream.

    Returns:
        A seed of 63 bits.

    >>> derive_seed(1, "turn 2") == derive_seed(1, "turn 2") != derive_seed(1, "turn 3")
    True
    """
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


# --- scripted responses ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Line:
    """A scripted response.

    Args:
        ids: Token ids.
        text: Text that the tokenizer converts to ids, instead of `ids`.
        logprobs: One per token; -1 each by default.
        finish_reason: Finish reason of the sample.
        error: Error of the sample, instead of a response.

    >>> Line(ids=(4, 5)).logprobs is None
    True
    """

    ids: Sequence[int] | None = None
    text: str | None = None
    logprobs: Sequence[float] | None = None
    finish_reason: FinishReason = "stop"
    error: str | None = None

    def __post_init__(self) -> None:
        if self.error is None and (self.ids is None) == (self.text is None):
            raise ValueError("line: got both or neither of ids and text, expected one of them, or an error")


Script = Callable[[Prompt, int], Any] | Sequence[Any] | Mapping[Any, Any]


class ScriptedEngine(BaseEngine):
    """Engine that returns scripted responses, for tests and for replaying records.

    Args:
        script: One of three forms. A function `(prompt, run) -> response`. A list of responses, which samples use in
            turn, and which starts over at its end. A mapping from prompt text or task id to a response, or to a list of
            responses, one per run, which also starts over. A response is a text, token ids, a `Line`, or an exception,
            which becomes the error of the sample.
        tokenizer: Converts texts to ids and ids to text. Not needed for scripts of token ids.
        version: Version of the policy.

    Raises:
        ValueError: The script is not a function, a list of responses or a mapping.

    >>> engine = ScriptedEngine({"2+2=": [[4], [5, 6]]}, tokenizer=None)
    >>> [sample.response_ids for sample in engine.generate([Prompt(text="2+2=", info={})], n=3, batch=0)]
    [[4], [5, 6], [4]]
    """

    def __init__(self, script: Script, tokenizer: Tokenizer | None = None, version: int = 0) -> None:
        if isinstance(script, Sequence) and any(hasattr(response, "prompt_length") for response in script):
            raise ValueError(
                "script: got records, expected responses; ScriptedEngine.replaying(records) replays records"
            )
        if not (callable(script) or isinstance(script, (Sequence, Mapping))) or isinstance(script, (str, bytes)):
            raise ValueError(
                f"script: got {type(script).__name__}, expected a function, a list of responses, or a mapping"
            )
        self.script = script
        self.tokenizer: Any = tokenizer
        self.version = check_int("version", version)
        self._next = 0
        """Index of the next response, if the script is a list."""

    @property
    def run(self) -> RunInfo:
        """Description of the engine and its tokenizer."""
        return RunInfo(
            engine="scripted",
            engine_version="1",
            model="none",
            tokenizer=tokenizer_fingerprint(self.tokenizer),
            chat_template=template_fingerprint(self.tokenizer),
        )

    @classmethod
    def replaying(cls, experiences: Iterable[Experience], tokenizer: Tokenizer | None = None) -> ScriptedEngine:
        """Create an engine that repeats recorded responses with their log-probs, versions and finish reasons.

        Prompts are matched by task id. The token ids or text of a prompt must be those of the record.

        Args:
            experiences: Single-turn records, one per run.
            tokenizer: Tokenizer of the records.

        Returns:
            The engine.

        Raises:
            ValueError: Several records have the same run, or a record has several turns.

        >>> from rollbook import Experience
        >>> from rollbook import EID
        >>> row = Experience(eid=EID(batch=0, task=1), tokens=[5, 6, 7], prompt_length=2, logprobs=[-0.25])
        >>> samples = ScriptedEngine.replaying([row]).generate(Prompt(token_ids=[5, 6], eid=EID(batch=0, task=1)))
        >>> samples[0].response_ids, samples[0].logprobs
        ([7], [-0.25])
        """
        recorded: dict[str, Experience] = {}
        for row in experiences:
            if recorded.setdefault(row.eid.rid, row) is not row:
                raise ValueError(f"experiences: got several of run {row.eid.rid}, expected one record per run")
            if row.finish_reason != "error" and row.action_mask is not None and not bool(row.action_mask.all()):
                raise ValueError(
                    f"experience {row.eid}: got a multi-turn record, expected one whose response was sampled completely"
                )

        def find_record(prompt: Prompt, run: int) -> Any:
            if prompt.eid is None:
                raise ValueError("prompt.eid: got None, expected the id of a recorded task")
            row = recorded.get(prompt.eid.replace(run=run).rid)
            if row is None:
                raise ValueError(f"prompt.eid: run {prompt.eid.replace(run=run).rid} was not recorded")
            if prompt.text is not None and row.prompt_text not in (None, prompt.text):
                raise ValueError(
                    f"prompt.text: got {prompt.text!r}, expected {row.prompt_text!r}, as {row.eid.tid} had"
                )
            return row

        return cls(find_record, tokenizer)

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Set the version; a script has no weights.

        Args:
            source: Not used.
            version: Number of the policy.
        """
        self.version = check_int("version", version)

    def _run(self, requests: Sequence[Request], cancel: Cancel) -> Iterator[tuple[int, Sample]]:
        run_id = self.run.id  # once, since the fingerprint of a large tokenizer is slow
        for request in requests:
            for k in range(len(request.eids)):
                try:
                    sample = self._make_sample(request, k, cancel, run_id)
                except Exception as error:
                    sample = request.failed(k, error, run_id)
                yield request.position + k, sample

    def _make_sample(self, request: Request, k: int, cancel: Cancel, run_id: str) -> Sample:
        eid = request.eids[k]
        prompt = request.prompt if request.prompt.eid is not None else request.prompt.replace(eid=eid)
        response = self._look_up(prompt, eid.run)
        if isinstance(response, BaseException):
            raise response
        if hasattr(response, "prompt_length"):  # a record; its class is not imported, since that imports torch
            return self._sample_from_record(request, k, response, run_id)
        line = response if isinstance(response, Line) else _as_line(response)
        if line.error is not None:
            return request.failed(k, line.error, run_id, prompt_ids=self._prompt_ids(request.prompt))
        ids = list(line.ids if line.ids is not None else self._encode("response", line.text))
        limit = 0 if cancel.requested else request.done + request.budget
        length = len(ids)
        truncated = length > limit
        reason: FinishReason = line.finish_reason
        if truncated:
            reason = "abort" if request.pauses or cancel.requested else "length"
            ids = ids[:limit]
        logprobs = list(line.logprobs if line.logprobs is not None else [-1.0] * length)
        if len(logprobs) != length:
            raise ValueError(f"response: got {len(logprobs)} log-probs, expected {length}, one for each token")
        logprobs = logprobs[: len(ids)]
        old_versions = list(request.started.versions or ()) if request.started is not None else []
        text = line.text if line.text is not None and not truncated else self._decode(ids)
        return Sample(
            prompt=request.prompt,
            eid=eid,
            prompt_ids=self._prompt_ids(request.prompt),
            response_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            versions=old_versions + [self.version] * (len(ids) - len(old_versions)),
            text=text,
            sampling=request.options(k),
            run_id=run_id,
            group_size=request.started.group_size if request.started is not None else request.sampling.n,
        )

    def _sample_from_record(self, request: Request, k: int, row: Experience, run_id: str) -> Sample:
        tokens = row.tokens.tolist()
        prompt_ids, ids = tokens[: row.prompt_length], tokens[row.prompt_length :]
        expected = request.prompt.token_ids
        if expected is not None and list(expected) != prompt_ids:
            raise ValueError(f"prompt.token_ids: got {len(expected)} ids that are not those recorded for {row.eid.rid}")
        version = row.policy_versions
        versions = None if version is None else [version] * len(ids) if isinstance(version, int) else version.tolist()
        sampling = dict(row.sampling or {})
        kind: Any = sampling.pop("logprobs", None) or "processed"
        stop_reason = sampling.pop("stop_reason", None)
        sampling.pop("run", None)
        return Sample(
            prompt=request.prompt,
            eid=request.eids[k],
            prompt_ids=prompt_ids,
            response_ids=ids,
            logprobs=None if row.logprobs is None else row.logprobs.tolist(),
            logprobs_kind=kind,
            finish_reason=row.finish_reason or "stop",  # type: ignore[arg-type]
            stop_reason=stop_reason,
            error=row.info.get("error") or "recorded as failed" if row.finish_reason == "error" else None,
            versions=versions,
            text=row.response_text,
            prompt_text=row.prompt_text,
            sampling=sampling or request.options(k),
            run_id=run_id,
            group_size=row.group_size or request.sampling.n,
            media=row.multi_modal_inputs,
        )

    def _look_up(self, prompt: Prompt, run: int) -> Any:
        if callable(self.script):
            return self.script(prompt, run)
        if isinstance(self.script, Mapping):
            task = [] if prompt.eid is None else [prompt.eid.tid, prompt.eid.task]
            keys = [prompt.text, *task, prompt.token_ids]
            key = next((key for key in keys if key is not None and key in self.script), None)
            if key is None:
                raise ValueError(f"script: no response to {next((key for key in keys if key), None)!r}")
            entry = self.script[key]
            one_per_run = isinstance(entry, (list, tuple)) and entry and not isinstance(entry[0], int)
            return entry[run % len(entry)] if one_per_run else entry
        if not len(self.script):
            raise ValueError("script: got an empty list, expected responses")
        response = self.script[self._next % len(self.script)]
        self._next += 1
        return response

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        if self.tokenizer is None:
            return []
        if prompt.messages is not None:
            tools = None if prompt.tools is None else [dict(tool) for tool in prompt.tools]
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in prompt.messages], tools=tools, add_generation_prompt=True, tokenize=False
            )
            return self._encode("prompt", text)
        return self._encode("prompt", prompt.text)

    def _encode(self, name: str, text: str | None) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{name}: got text ({text!r}), expected token ids: the engine has no tokenizer")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=True)


def _as_line(response: Any) -> Line:
    if isinstance(response, str):
        return Line(text=response)
    return Line(ids=token_ids("response", response))
