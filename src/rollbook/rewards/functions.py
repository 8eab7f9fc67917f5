"""Reward functions: plain Python, called per sample or per batch by parameter name, in threads or processes.

Invariant: a function sees only the response unless its parameters name more. There is one outcome per call, in order;
a call that raises, hangs or kills its process affects only its own samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import io
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import pickletools
import queue
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from rollbook.core.checks import check_choice, check_float, check_int, suggest
from rollbook.core.errors import RollbookError
from rollbook.core.vocabulary import load_module_file, source_fingerprint
from rollbook.rewards.types import (
    OnError,
    Reward,
    RewardInput,
    RewardResult,
    WrongCountError,
    as_float,
    as_inputs,
    check_on_error,
    failed_score,
    locate,
    log_failures,
    run_sync,
)

__all__ = [
    "FileFunction",
    "FunctionReward",
    "MissingExtraError",
    "Parameters",
    "PoolError",
    "ProcessPool",
    "batched",
    "match_parameters",
]


@dataclass(frozen=True)
class CallOutcome:
    """Outcome of a call.

    Args:
        value: What it returned.
        error: The error, if it failed.
        fatal: Exception class of an error that concerns all calls.
        stopped: Whether the call timed out or ended its process.
    """

    value: Any = None
    error: str | None = None
    fatal: type[Exception] | None = None
    stopped: bool = False


class PoolError(RollbookError, RuntimeError):
    """Raised when a process does not start or cannot load its function."""


class MissingExtraError(RollbookError, ImportError):
    """Raised when a built-in reward needs a package that is not installed."""


def describe_error(error: BaseException) -> str:
    """Describe an exception in at most 500 characters, for the `info` of a record.

    >>> describe_error(ValueError("no")), describe_error(KeyError())
    ('ValueError: no', 'KeyError')
    """
    text = str(error)
    text = text if len(text) <= 500 else text[:500] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_LIBRARY_FOLDERS = tuple(os.path.join(folder, "") for folder in (
    str(Path(__file__).parents[1]), *filter(None, map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
))  # fmt: skip


def _user_frame(error: BaseException) -> str:
    """Return the last file and line of the user's code in a traceback, if any."""
    location = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if os.path.isfile(frame.filename) and not frame.filename.startswith(_LIBRARY_FOLDERS):
            location = f" ({frame.filename}, line {frame.lineno})"
    return location


def call_safely(call: Callable[[], Any]) -> CallOutcome:
    """Make a call, which may return a `CallOutcome` itself; catch every exception, including `SystemExit`."""
    try:
        result = call()
        return result if isinstance(result, CallOutcome) else CallOutcome(result)
    except (PoolError, MissingExtraError, WrongCountError) as error:
        return CallOutcome(error=str(error), fatal=type(error))
    except BaseException as error:
        return CallOutcome(error=describe_error(error) + _user_frame(error))


def timeout_outcome(limit: float, suffix: str = "") -> CallOutcome:
    """Return the outcome of a call that exceeded its limit."""
    return CallOutcome(error=f"timed out after {limit:g} s{suffix}", stopped=True)


def run_in_threads(calls: Sequence[Callable[[], Any]], workers: int, limit: float | None) -> list[CallOutcome]:
    """Make calls in at most `workers` threads.

    A thread cannot be stopped. One that exceeds the limit is left behind: its late result is dropped, and another one
    takes its place.

    Args:
        calls: The calls.
        workers: Largest number of threads.
        limit: Seconds per call, from its start.

    Returns:
        The outcome of each call, in the order of `calls`.

    >>> [outcome.value for outcome in run_in_threads([lambda: 1, lambda: 2], workers=2, limit=5.0)]
    [1, 2]
    """
    outcomes: dict[int, CallOutcome] = {}
    todo = deque(range(len(calls)))
    running: dict[object, tuple[int, float]] = {}  # in the order of start
    changed = threading.Condition()

    def work() -> None:
        worker_key = object()
        while True:
            with changed:
                if not todo:
                    return
                index = todo.popleft()
                running[worker_key] = (index, time.monotonic())
                changed.notify()  # there is a new deadline
            outcome = call_safely(calls[index])
            with changed:
                if running.pop(worker_key, None) is None:
                    return  # timed out and replaced
                outcomes[index] = outcome
                if outcome.fatal is not None:  # all later calls would fail in the same way
                    outcomes.update(dict.fromkeys(todo, outcome))
                    todo.clear()
                changed.notify()

    with changed:
        try:
            new_threads = min(workers, len(calls))
            while len(outcomes) < len(calls):
                for _ in range(new_threads):
                    threading.Thread(target=work, name="rollbook-reward", daemon=True).start()
                new_threads, wait = 0, None
                if limit is not None and running:
                    _, started = next(iter(running.values()))
                    wait = max(started + limit - time.monotonic(), 0.0)
                changed.wait(wait)
                now = time.monotonic()
                for worker_key, (index, started) in list(running.items()):
                    if limit is not None and now - started >= limit:
                        del running[worker_key]
                        outcomes[index] = timeout_outcome(
                            limit, "; its thread is still running, use pool='process' to stop such calls"
                        )
                        new_threads += bool(todo)
        finally:
            todo.clear()  # after an interrupt the threads end with their current calls
    return list(map(outcomes.__getitem__, range(len(calls))))


class ProcessPool:
    """Processes that each hold a function and make one call at a time. `call` is thread-safe.

    Processes start on first use, as new interpreters (threads and CUDA contexts do not survive a fork), and live until
    `close`. One that exceeds its limit is killed with all its children and replaced. The function is pickled by module
    and name, or by file, so it cannot be a lambda, a local function or a function of the main program, which no process
    imports.

    Args:
        function: The function.
        workers: Number of processes.

    Raises:
        ValueError: The function cannot be sent to another process.

    >>> import math
    >>> with contextlib.closing(ProcessPool(math.factorial, workers=1)) as pool:
    ...     pool.call((5,), limit=30.0)
    CallOutcome(value=120, error=None, fatal=None, stopped=False)
    """

    def __init__(self, function: Callable[..., Any], workers: int) -> None:
        try:
            self._function = pickle.dumps(function)
        except Exception as error:
            raise ValueError(
                f"function: cannot be sent to another process ({describe_error(error)}); define it at the top level "
                "of a module, or use pool='thread'"
            ) from None
        if any(argument in _MAIN_MODULES for _, argument, _ in pickletools.genops(self._function)):
            raise ValueError(f"function: defined in __main__; {_ALTERNATIVES}")
        self.workers = workers
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._alive: set[_Worker] = set()
        for _ in range(workers):
            self._idle.put(None)
        self._finish = weakref.finalize(self, _kill_all, self._alive)

    def call(self, arguments: tuple[Any, ...], limit: float | None) -> CallOutcome:
        """Make a call in the next free process.

        Args:
            arguments: Arguments of the function.
            limit: Seconds from the start of the call, or `None`.
        """
        worker = self._idle.get()
        try:
            if worker is not None and not worker.alive():  # it died while it was idle
                self._drop(worker)
                worker = None
            if worker is None:
                worker = _Worker(self._function)
                self._alive.add(worker)
            outcome = worker.call(arguments, limit)
        finally:
            if worker is not None and not worker.ready:
                self._drop(worker)
                worker = None
            self._idle.put(worker)
        return outcome

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self._alive.discard(worker)

    def close(self) -> None:
        """Kill the processes. The pool starts others if it is used again."""
        _kill_all(self._alive)


def _kill_all(workers: set[_Worker]) -> None:
    for worker in list(workers):
        worker.kill()
    workers.clear()


START_TIMEOUT = 180.0
"""Seconds in which a process must load its function, which may import torch."""

_MAIN_MODULES = ("__main__", "__mp_main__")
_ALTERNATIVES = "move it into a module, or use pool='thread'"
_inside_pool = False
"""Whether this process belongs to a pool."""


class _Worker:
    """A process of a pool, with its pipe."""

    def __init__(self, function: bytes) -> None:
        self.ready = False
        self._pipe, child_pipe = multiprocessing.Pipe()
        # Not `multiprocessing.Process`, which runs the main program first: a script without a guard would train again.
        program = (
            "import sys; sys.path[:] = sys.argv[2:]; import rollbook.rewards.functions as p; p.serve(int(sys.argv[1]))"
        )
        search_path = [folder for folder in sys.path if isinstance(folder, str)]
        try:
            self._process = subprocess.Popen(
                [multiprocessing.spawn.get_executable(), "-c", program, str(child_pipe.fileno()), *search_path],
                stdin=subprocess.DEVNULL,
                pass_fds=[child_pipe.fileno()],
                # Killed with its children, and not interrupted by Ctrl-C. Nested pools stay in the session of the
                # outer process, to be killed with it.
                start_new_session=not _inside_pool,
            )
        except OSError as error:
            self._pipe.close()
            raise PoolError(f"a reward process did not start: {describe_error(error)}") from None
        finally:
            child_pipe.close()
        try:
            self._pipe.send((sys.argv, function))
            if not self._pipe.poll(START_TIMEOUT):
                raise PoolError(f"a reward process did not start within {START_TIMEOUT:g} s")
            problem = self._pipe.recv()
        except (EOFError, OSError):
            problem = f"it ended with exit code {self._wait()}"
        except BaseException:
            self.kill()
            raise
        if problem is not None:
            self.kill()
            raise PoolError(f"a reward process could not load its function: {problem}")
        self.ready = True

    def call(self, arguments: tuple[Any, ...], limit: float | None) -> CallOutcome:
        try:
            sent = pickle.dumps(arguments)
        except Exception as error:
            return CallOutcome(error=f"its arguments cannot be sent to another process ({describe_error(error)})")
        self.ready = False  # until it replies
        try:
            self._pipe.send_bytes(sent)
            if not self._pipe.poll(limit):
                return timeout_outcome(limit or 0.0)
            outcome: CallOutcome = self._pipe.recv()
        except (EOFError, OSError):
            return CallOutcome(error=f"its process ended with exit code {self._wait()}", stopped=True)
        self.ready = True
        return outcome

    def alive(self) -> bool:
        """Return whether it can take a call."""
        return self.ready and self._process.poll() is None

    def _wait(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        return self._process.returncode

    def kill(self) -> None:
        """Kill the process and its children."""
        self.ready = False
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._wait()
        self._pipe.close()


class _Unpickler(pickle.Unpickler):
    """Unpickler of a pool's process, which does not run the main program again."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _MAIN_MODULES:
            raise PoolError(f"{name}: defined in __main__; {_ALTERNATIVES}")
        return super().find_class(module, name)


def serve(descriptor: int) -> None:
    """Run a process of a pool: load the function, then make calls until the pipe closes."""
    global _inside_pool
    pipe = Connection(descriptor)
    _inside_pool = True
    sys.argv[:], function = pipe.recv()
    loaded = call_safely(lambda: _Unpickler(io.BytesIO(function)).load())
    pipe.send(loaded.error)
    if loaded.error is not None:
        return
    while True:
        try:
            arguments = _Unpickler(io.BytesIO(pipe.recv_bytes())).load()
        except EOFError:
            return
        except PoolError as error:
            pipe.send(CallOutcome(error=str(error), fatal=PoolError))
            continue
        except Exception as error:
            pipe.send(CallOutcome(error=f"its arguments cannot be read in another process ({describe_error(error)})"))
            continue
        outcome = call_safely(lambda: loaded.value(*arguments))  # noqa: B023  called at once
        try:
            answer = pickle.dumps(outcome)
        except Exception as error:
            answer = pickle.dumps(
                CallOutcome(error=f"its result cannot be sent from another process ({describe_error(error)})")
            )
        pipe.send_bytes(answer)


T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

FIELDS = ("prompt", "response", "reference", "label", "query", "messages", "images", "prompt_ids", "response_ids",
          "eid", "finish_reason", "info")  # fmt: skip
"""Fields of a sample that a parameter of a function may name; `query` is prompt and response, concatenated."""
ALIASES = {
    "completion": "response", "solution_str": "response",
    "ground_truth": "reference", "truth": "reference", "ref": "reference",
    "data_source": "label", "extra_info": "info",
}  # fmt: skip
"""Names of these fields in functions of TRL, verl and Trinity."""

_SINGLE = {**{name: name for name in FIELDS}, **ALIASES}
_BATCHED = {
    "prompts": "prompt", "responses": "response", "references": "reference", "labels": "label", "queries": "query",
    "messages": "messages", "images": "images", "prompt_ids": "prompt_ids", "response_ids": "response_ids",
    "eids": "eid", "finish_reasons": "finish_reason", "infos": "info",
}  # fmt: skip
_BATCHED_ALIASES = {
    "completions": "response", "solution_strs": "response", "ground_truths": "reference", "truths": "reference",
    "refs": "reference", "data_sources": "label", "extra_infos": "info",
}  # fmt: skip
_PLURALS = {name: field for name, field in (_BATCHED | _BATCHED_ALIASES).items() if name not in _SINGLE}
_COLUMN = "info."
"""Prefix of a field that is a column of the data."""
PARAMETER_NAMES = frozenset({*_SINGLE, *_PLURALS})
"""All parameter names that receive a field of a sample."""


def batched(function: F) -> F:
    """Mark a function that takes lists, with one entry per sample, and returns a list of scores.

    Args:
        function: The function.

    Returns:
        The same function.

    >>> @batched
    ... def shortest(response):
    ...     minimum = min(map(len, response))
    ...     return [float(len(text) == minimum) for text in response]
    >>> FunctionReward(shortest)([RewardInput(prompt="", response=text) for text in ("a", "bb")]).rewards
    [1.0, 0.0]
    """
    function.rollbook_batched = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class FileFunction:
    """A function of a `.py` file, which is loaded in each process that needs it.

    Args:
        path: The file.
        name: Name of the function.
        options: Keyword arguments to bind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "rewards.py")
    ...     _ = path.write_text("def reward_func(response, scale=1.0): return scale * len(response)")
    ...     FileFunction(str(path), options={"scale": 0.5})("four")
    2.0
    """

    path: str
    name: str = "reward_func"
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Callable[..., Any]:
        """Load the function with its options bound."""
        return functools.partial(self.load_unbound(), **self.options) if self.options else self.load_unbound()

    def load_unbound(self) -> Callable[..., Any]:
        """Load the function. The file runs once in each process."""
        if not self.path.endswith(".py") or not Path(self.path).is_file():
            raise ValueError(
                f"reward file: got {self.path!r}, expected a .py file; there is no {Path(self.path).resolve()}"
            )
        module = load_module_file(self.path)
        function: Any = vars(module).get(self.name)
        if not callable(function):
            names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
            raise ValueError(f"reward file {self.path}: it has no function {self.name!r}{suggest(self.name, names)}")
        unbound: Callable[..., Any] = function
        return unbound

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.load()(*arguments, **options)


class Parameters(NamedTuple):
    """What the parameters of a reward function receive.

    Args:
        fields: {parameter: field of a sample}.
        takes_kwargs: Whether it takes all other fields by `**`.
        lists: Whether it takes lists.
    """

    fields: dict[str, str]
    takes_kwargs: bool
    lists: bool


def match_parameters(function: Callable[..., Any], name: str, lists: bool | None) -> Parameters:
    """Match the parameters of a function to fields of a sample.

    In a function of lists with `**`, as TRL's are, another parameter is a column of the data: the field `info.NAME`.

    Args:
        function: The reward function.
        name: Its name, for errors.
        lists: Whether it takes lists, one entry per sample; `None`: if a parameter has a plural
            name, or it is `batched`.

    Returns:
        The field of each parameter.

    Raises:
        ValueError: A parameter has no name, or one that is unknown.

    >>> match_parameters(lambda response, reference: float(response == reference), "right", lists=None).fields
    {'response': 'response', 'reference': 'reference'}
    >>> match_parameters(lambda completions, solution, **columns: [], "trl_reward", lists=None)
    Parameters(fields={'completions': 'response', 'solution': 'info.solution'}, takes_kwargs=True, lists=True)
    """
    inner, bound = unwrap_partial(function)
    try:
        arguments = [p for p in inspect.signature(function).parameters.values() if p.name not in bound]
    except (TypeError, ValueError):
        raise ValueError(f"{name}: got a callable without a signature, expected one with named parameters") from None
    if lists is None:
        lists = any(p.name in _PLURALS for p in arguments) or bool(getattr(inner, "rollbook_batched", False))
    fields = {**_SINGLE, **_PLURALS} if lists else _SINGLE
    requested: dict[str, str] = {}
    takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in arguments)
    for p in arguments:
        if p.kind is p.VAR_KEYWORD or p.kind is p.VAR_POSITIONAL:
            continue
        if p.kind is p.POSITIONAL_ONLY:
            raise ValueError(f"{name}: parameter {p.name!r} is positional only, expected parameters that have names")
        if p.name in fields:
            requested[p.name] = fields[p.name]
        elif p.default is p.empty and lists and takes_kwargs:
            requested[p.name] = f"{_COLUMN}{p.name}"
        elif p.default is p.empty:
            more = "; batched=True gives lists" if p.name in _PLURALS else ""
            raise ValueError(
                f"{name}: parameter {p.name!r} is not a field of a sample{suggest(p.name, [*fields])}{more}"
            )
    return Parameters(requested, takes_kwargs, lists)


def unwrap_partial(function: Callable[..., Any]) -> tuple[Callable[..., Any], set[str]]:
    """Return the function inside `functools.partial`, and the names of its bound parameters."""
    bound: set[str] = set()
    while isinstance(function, functools.partial):
        bound |= function.keywords.keys()
        function = function.func
    return function, bound


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of a callable object."""
    inner, _ = unwrap_partial(function)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


SampleScore = tuple[float, dict[str, float], str | None]
"""Reward of a sample, its metrics, and its error."""

_TOTALS = ("reward", "score")
_BATCH_TOTALS = ("rewards", "reward", "scores", "score")


def read_score(value: Any, total: str | None = None) -> SampleScore:
    """Read what a function returned for one sample.

    Args:
        value: A number, or a mapping with the reward under `reward` or `score` and metrics.
        total: `sum`: the reward is the sum of the mapping.

    >>> read_score({"reward": 1, "format": True})
    (1.0, {'format': 1.0}, None)
    >>> read_score({"accuracy": 1.0, "format": 0.5})[2]
    "gave a dict without 'reward' or 'score' (accuracy, format); total='sum' adds them up"
    """
    try:
        if not isinstance(value, Mapping):
            return as_float(value), {}, None
        metrics = {str(name): as_float(metric) for name, metric in value.items()}
    except ValueError as error:
        return nan, {}, str(error)
    if total == "sum":
        return sum(metrics.values()), metrics, None
    key = next((name for name in _TOTALS if name in metrics), None)
    if key is None:
        names = ", ".join(metrics) or "empty"
        return nan, {}, f"gave a dict without 'reward' or 'score' ({names}); total='sum' adds them up"
    return metrics.pop(key), metrics, None


def read_scores(value: Any, n: int, total: str | None = None) -> list[SampleScore]:
    """Read what a batched function returned.

    Args:
        value: A list, an array or a tensor of n scores (or of n dicts); a dict of lists with the rewards under
            `rewards`; or the pair (rewards, metrics).
        n: Number of samples.
        total: `sum`: the reward of a sample is the sum of its dict.

    Raises:
        WrongCountError: There are not n scores.

    >>> read_scores({"rewards": [1, 0], "format": [1, 1]}, 2)
    [(1.0, {'format': 1.0}, None), (0.0, {'format': 1.0}, None)]
    >>> read_scores([1.0], 2)
    Traceback (most recent call last):
        ...
    rollbook.rewards.types.WrongCountError: gave 1 scores, expected 2, one for each sample
    """
    columns: dict[str, Any] = {}
    if (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[1], (Mapping, type(None)))
        and _is_sequence(value[0])
    ):
        value = {**(value[1] or {}), "rewards": value[0]}
    if isinstance(value, Mapping):
        key = next((name for name in _BATCH_TOTALS if name in value), None)
        if key is None:
            raise ValueError(f"gave a dict without 'rewards' ({', '.join(map(str, value))})")
        for name, column in value.items():
            if name != key:
                columns |= dict(column) if isinstance(column, Mapping) else {str(name): column}
        value = value[key]
    rows = _check_rows("scores", value, n)
    extra = {str(name): _check_rows(f"entries of {name!r}", column, n) for name, column in columns.items()}
    parts = []
    for i, row in enumerate(rows):
        reward, metrics, error = read_score(row, total)
        for name, column in extra.items():
            try:
                metrics[name] = as_float(column[i])
            except ValueError as wrong:
                metrics[name] = nan
                error = error or f"{name}: {wrong}"
        parts.append((reward if error is None else nan, metrics, error))
    return parts


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or hasattr(value, "tolist")


def _check_rows(name: str, value: Any, n: int) -> list[Any]:
    rows = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(rows, (list, tuple)):
        raise ValueError(f"gave {type(value).__name__}, expected a list of {n} {name}")
    if len(rows) != n:
        raise WrongCountError(f"gave {len(rows)} {name}, expected {n}, one for each sample")
    return [row[0] if isinstance(row, list) and len(row) == 1 else row for row in rows]


@dataclass(frozen=True)
class Caller:
    """A function and how to read its result. Picklable; returns plain floats."""

    function: Callable[..., Any]
    lists: bool
    total: str | None

    def __call__(self, n: int, arguments: dict[str, Any]) -> list[SampleScore]:
        value = self.function(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_await_value(value))
        return self.read(value, n)

    def read(self, value: Any, n: int) -> list[SampleScore]:
        """Read a result."""
        return read_scores(value, n, self.total) if self.lists else [read_score(value, self.total)]


async def _await_value(value: Awaitable[T]) -> T:
    return await value


class FunctionReward(Reward):
    """A function as a reward, called with the fields of a sample that its parameters name (see `FIELDS`).

    The function returns a number, or a dict with the total under `reward` or `score` and metrics beside it. It may be
    async. A missing package of a built-in function and a wrong number of scores are always raised.

    Args:
        function: The function.
        name: Name in errors and metrics.
        batched: Whether it takes and returns lists; by default if it is decorated with `batched` or has a plural
            parameter such as `responses`.
        batch_size: Largest number of samples per call of a batched function.
        pool: `thread`, or `process` for functions that compute much, hang or crash: only a process can be stopped. A
            thread that exceeds its limit is left behind and reported; an async function is canceled.
        workers: Number of concurrent calls; by default twice the cores for threads, the cores for processes, 64 for
            async functions.
        time_limit: Seconds per call, or `None`.
        on_error: `exclude` (no reward: NaN), a fixed score, or `raise`. The error is in `RewardResult.errors`.
        total: `"sum"`: the reward is the sum of the returned dict.

    Raises:
        ValueError: A parameter of the function is unknown, or an option is invalid.

    >>> def right(response, reference):
    ...     return {"reward": float(response.strip() == reference), "length": len(response)}
    >>> scores = FunctionReward(right)([
    ...     RewardInput(prompt="1 + 1 = ", response="2", reference="2"),
    ...     RewardInput(prompt="1 + 2 = ", response="4", reference="3"),
    ... ])
    >>> scores.rewards, scores.metrics
    ([1.0, 0.0], {'length': [1.0, 1.0]})
    >>> FunctionReward(lambda answer: 1.0)
    Traceback (most recent call last):
        ...
    ValueError: <lambda>: parameter 'answer' is not a field of a sample; choose from prompt, response, reference, label, query, messages, images, prompt_ids, response_ids, eid, finish_reason, info, completion, solution_str, ground_truth, truth, ref, data_source, extra_info
    """  # noqa: E501

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        batched: bool | None = None,
        batch_size: int | None = None,
        pool: Literal["thread", "process"] = "thread",
        workers: int | None = None,
        time_limit: float | None = 60.0,
        on_error: OnError = "exclude",
        total: Literal["sum"] | None = None,
    ) -> None:
        if not callable(function):
            raise ValueError(f"function: got {type(function).__name__}, expected a function")
        inner = function.load() if isinstance(function, FileFunction) else function
        self.name = name or function_name(inner)
        self._fields, takes_kwargs, self.batched = match_parameters(inner, self.name, batched)
        if takes_kwargs:
            self._fields = {**(_BATCHED if self.batched else dict(zip(FIELDS, FIELDS, strict=True))), **self._fields}
        if batch_size is not None and not self.batched:
            raise ValueError(f"batch_size: got {batch_size!r}, expected None: {self.name} takes one sample at a time")
        self.batch_size = None if batch_size is None else check_int("batch_size", batch_size, 1)
        check_choice("pool", pool, ("thread", "process"))
        check_choice("total", total, (None, "sum"))
        self.time_limit = None if time_limit is None else check_float("time_limit", time_limit, 1e-3, 1e9)
        self.on_error: OnError = check_on_error(on_error)
        bare, _ = unwrap_partial(inner)
        code = function.load_unbound() if isinstance(function, FileFunction) else bare
        # Fingerprinted now, because the file may change after the import.
        self._source = source_fingerprint(code if hasattr(code, "__code__") else type(code))
        self._async = pool == "thread" and (
            inspect.iscoroutinefunction(bare) or inspect.iscoroutinefunction(type(bare).__call__)
        )
        cores = os.cpu_count() or 1
        usual = 64 if self._async else cores if pool == "process" else 2 * cores
        self.workers = usual if workers is None else check_int("workers", workers, 1)
        self._caller = Caller(function, self.batched, total)
        self._processes = ProcessPool(self._caller, self.workers) if pool == "process" else None
        self.waits = self._async or pool == "process"

    def __call__(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples, in their order."""
        if self._async:
            return run_sync(lambda: self.score_async(inputs))
        inputs = as_inputs(inputs)
        chunks = self._chunks(inputs)
        processes, limit = self._processes, self.time_limit
        if processes is None:
            calls = [functools.partial(self._caller, len(c), g) for c, g in chunks]
            return self._scores(inputs, chunks, run_in_threads(calls, self.workers, limit))
        sent = [functools.partial(processes.call, (len(c), g), limit) for c, g in chunks]
        # The threads only wait for the processes, which keep the limit.
        return self._scores(inputs, chunks, run_in_threads(sent, self.workers, None))

    async def score_async(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples without blocking the event loop; an async function runs in that loop.

        Args:
            inputs: The samples, in any form that `as_inputs` takes.

        Returns:
            Rewards, metrics and errors of the samples.
        """
        if not self._async:
            return await asyncio.to_thread(self, inputs)
        inputs = as_inputs(inputs)
        chunks = self._chunks(inputs)
        free = asyncio.Semaphore(self.workers)
        outcomes = await asyncio.gather(*(self._awaited(free, len(c), g) for c, g in chunks))
        return self._scores(inputs, chunks, outcomes)

    async def _awaited(self, free: asyncio.Semaphore, n: int, arguments: dict[str, Any]) -> CallOutcome:
        async with free:
            task = asyncio.ensure_future(_await_value(self._caller.function(**arguments)))
            try:
                done, _ = await asyncio.wait({task}, timeout=self.time_limit)
            except asyncio.CancelledError:
                task.cancel()
                raise
            if not done:
                task.cancel()
                return timeout_outcome(self.time_limit or 0.0)
            return call_safely(lambda: self._caller.read(task.result(), n))

    def source(self) -> str | None:
        """Fingerprint the module or file of the function."""
        return self._source

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()

    def _chunks(self, inputs: Sequence[RewardInput]) -> list[tuple[range, dict[str, Any]]]:
        """Return the places and the arguments of each call."""
        size = (self.batch_size or max(len(inputs), 1)) if self.batched else 1
        chunks = []
        for start in range(0, len(inputs), size):
            chunk = inputs[start : start + size]
            arguments: dict[str, Any] = {}
            for parameter, name in self._fields.items():
                column = self._column(name, chunk)
                arguments[parameter] = column if self.batched else column[0]
            chunks.append((range(start, start + len(chunk)), arguments))
        return chunks

    def _column(self, name: str, chunk: Sequence[RewardInput]) -> list[Any]:
        """Return a field of the samples, or a column of their data."""
        if not name.startswith(_COLUMN):
            return list(map(attrgetter(name), chunk))
        key = name.removeprefix(_COLUMN)
        rows = [sample.info or {} for sample in chunk]
        columns = sorted({column for row in rows for column in row})
        if key not in columns:
            raise ValueError(
                f"{self.name}: parameter {key!r} is neither a field of a sample nor a column of the data"
                f"{suggest(key, [*_PLURALS, *columns])}"
            )
        return [row.get(key) for row in rows]

    def _scores(
        self, inputs: Sequence[RewardInput], chunks: Sequence[tuple[range, Any]], outcomes: Sequence[CallOutcome]
    ) -> RewardResult:
        scores = RewardResult(rewards=[nan] * len(inputs))
        for outcome in outcomes:  # fatal errors concern all samples: a missing package, a process that does not start
            if outcome.fatal is not None:
                prefix = f"{self.name}: " if outcome.fatal is WrongCountError else ""
                raise outcome.fatal(f"{prefix}{outcome.error}")
        for (places, _), outcome in zip(chunks, outcomes, strict=True):
            scores_of_call: list[SampleScore] = (
                [(nan, {}, outcome.error)] * len(places) if outcome.error else outcome.value
            )
            for i, (reward, metrics, error) in zip(places, scores_of_call, strict=True):
                for key, value in metrics.items():
                    scores.metrics.setdefault(key, [nan] * len(inputs))[i] = value
                if error is not None:
                    scores.errors[i] = f"{self.name}: {error}"
                    reward = failed_score(self.on_error, locate(inputs[i], i), f"{self.name}: {error}")
                scores.rewards[i] = reward
        scores.parts = tuple(scores.metrics) if self._caller.total == "sum" else ()
        return log_failures(self.name, scores)
