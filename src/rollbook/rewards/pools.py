"""Running many calls at once, each with a time limit: in threads, or in processes that can really be stopped.

Invariant: there is one outcome for each call, in the order of the calls; a call that raises, hangs or takes its process
down is its own outcome, and the others are what they would have been.
"""

from __future__ import annotations

import ast
import contextlib
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from rollbook.rewards.types import WrongCount


@dataclass(frozen=True)
class Outcome:
    """What a call gave, or the error that it ended with; `fatal` is set where it is not this call's alone, `stopped`
    where the call took too long or took its process down."""

    value: Any = None
    error: str | None = None
    fatal: type[Exception] | None = None
    stopped: bool = False


class PoolError(RuntimeError):
    """A process does not start, or cannot load the function it is for."""


class MissingExtra(ImportError):
    """A ready function needs a package that is not installed."""


def said(error: BaseException) -> str:
    """An exception in a few words: an error is a record's, not a place for all that the exception quotes.

    >>> said(ValueError("no")), said(KeyError())
    ('ValueError: no', 'KeyError')
    """
    text = str(error)
    text = text if len(text) <= 500 else text[:500] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_LIBRARIES = tuple(os.path.join(place, "") for place in (
    str(Path(__file__).parents[1]), *filter(None, map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
))  # fmt: skip


def _place(error: BaseException) -> str:
    """The file and line of a user's code that an exception comes from, if any."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if os.path.isfile(frame.filename) and not frame.filename.startswith(_LIBRARIES):
            place = f" ({frame.filename}, line {frame.lineno})"
    return place


def attempt(call: Callable[[], Any]) -> Outcome:
    """Make a call; whatever it raises (a reward function may even call `sys.exit`) is its outcome."""
    try:
        return Outcome(call())
    except (PoolError, MissingExtra, WrongCount) as error:
        return Outcome(error=str(error), fatal=type(error))
    except BaseException as error:
        return Outcome(error=said(error) + _place(error))


def timed_out(limit: float, more: str = "") -> Outcome:
    """The outcome of a call that took too long."""
    return Outcome(error=f"timed out after {limit:g} s{more}", stopped=True)


def in_threads(calls: Sequence[Callable[[], Any]], workers: int, limit: float | None) -> list[Outcome]:
    """Make calls in at most `workers` threads. The limit counts from when a call begins, not from when it queues.

    A thread cannot be stopped: one that runs over is left alone, its late answer dropped, and another takes its place.

    >>> [outcome.value for outcome in in_threads([lambda: 1, lambda: 2], workers=2, limit=5.0)]
    [1, 2]
    """
    outcomes: dict[int, Outcome] = {}
    todo = deque(range(len(calls)))
    running: dict[object, tuple[int, float]] = {}
    changed = threading.Condition()

    def lane() -> None:
        token = object()
        while True:
            with changed:
                if not todo:
                    return
                place = todo.popleft()
                running[token] = (place, time.monotonic())
                changed.notify()  # whoever waits has a deadline to learn of
            outcome = attempt(calls[place])
            with changed:
                if running.pop(token, None) is None:
                    return  # given up, and replaced
                outcomes[place] = outcome
                if outcome.fatal is not None:  # it would be the outcome of all that is to come, too
                    outcomes.update(dict.fromkeys(todo, outcome))
                    todo.clear()
                changed.notify()

    def open_lane() -> None:
        threading.Thread(target=lane, name="rollbook-reward", daemon=True).start()

    with changed:
        try:
            for _ in range(min(workers, len(calls))):
                open_lane()
            while len(outcomes) < len(calls):
                wait = None
                if limit is not None and running:
                    wait = max(min(start for _, start in running.values()) + limit - time.monotonic(), 0.0)
                changed.wait(wait)
                now = time.monotonic()
                for token, (place, start) in list(running.items()):
                    if limit is not None and now - start >= limit:
                        del running[token]
                        outcomes[place] = timed_out(limit, "; its thread runs on, which only pool='process' can stop")
                        if todo:
                            open_lane()
        finally:
            todo.clear()  # an interrupt ends the lanes after the calls they are at
    return [outcomes[place] for place in range(len(calls))]


class Processes:
    """Processes that each hold one function and make one call at a time; `call` may be used from many threads.

    They are started when first needed, as fresh interpreters (a trainer's threads and CUDA context do not survive a
    fork), and live until `close`. One that runs over its limit is killed with all that it started, and another takes
    its place. A function travels by its module and name, or by its file: it cannot be a lambda or a local one. The main
    program is not run again in them, unless the function is one of its own: then its work must stand under
    `if __name__ == "__main__":`.

    >>> import math
    >>> with contextlib.closing(Processes(math.factorial, workers=1)) as pool:
    ...     pool.call((5,), limit=30.0)
    Outcome(value=120, error=None, fatal=None, stopped=False)
    """

    def __init__(self, function: Callable[..., Any], workers: int) -> None:
        try:
            self._function = pickle.dumps(function)
        except Exception as error:
            raise ValueError(
                f"function: got one that cannot be sent to another process ({said(error)}), expected one at the top "
                "level of a module, or pool='thread'"
            ) from None
        if any(argument == "__main__" for _, argument, _ in pickletools.genops(self._function)):
            problem = Main.here().problem
            if problem is not None:
                raise ValueError(f"function: got one of the main program, {problem}")
        self.workers = workers
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._alive: set[_Worker] = set()
        for _ in range(workers):
            self._idle.put(None)
        self._finish = weakref.finalize(self, _kill_all, self._alive)

    def call(self, arguments: tuple[Any, ...], limit: float | None) -> Outcome:
        """Make a call in the next process that is free; the limit counts from when it begins."""
        worker = self._idle.get()
        try:
            if worker is not None and not worker.alive():  # it may have died, or been killed, while it was idle
                self._drop(worker)
                worker = None
            if worker is None:
                worker = _Worker(self._function)
                self._alive.add(worker)
            outcome = worker.call(arguments, limit)
        finally:
            if worker is not None and not worker.fit:
                self._drop(worker)
                worker = None
            self._idle.put(worker)
        return outcome

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self._alive.discard(worker)

    def close(self) -> None:
        """Kill the processes; the pool starts others if it is used again."""
        _kill_all(self._alive)


def _kill_all(workers: set[_Worker]) -> None:
    for worker in list(workers):
        worker.kill()
    workers.clear()


START_LIMIT = 180.0
"""Seconds in which a process must have loaded its function: it may import torch."""

_GUARD = "`if __name__ == '__main__':`"
_ELSE = "move the function into a module of its own, or use pool='thread'"


@dataclass(frozen=True)
class Main:
    """The main program, for a process that needs a function or a class of it: how to load it, or why that is not to be.

    `how` is one of the entries of `multiprocessing.spawn.prepare`, which runs a program under another name.
    """

    how: tuple[str, str] | None = None
    problem: str | None = None

    @classmethod
    def here(cls, starting: bool = False) -> Main:
        """This process's main program; `starting` a process, it must be at work under its guard."""
        main = sys.modules["__main__"]
        known = vars(main)
        path, name = known.get("__file__"), getattr(known.get("__spec__"), "name", None)
        if path is None or not Path(path).is_file():
            return cls(problem=f"which has no file (a notebook, python -c, standard input) to load it from; {_ELSE}")
        if name is not None and name.rpartition(".")[2] == "__main__":
            return cls(problem=f"{name}, which another process cannot import; {_ELSE}")
        try:
            body = ast.parse(Path(path).read_bytes()).body
        except (OSError, SyntaxError, ValueError) as error:
            return cls(problem=f"{path}, which cannot be read ({said(error)}); {_ELSE}")
        guards = [range(one.lineno, (one.end_lineno or one.lineno) + 1) for one in body if _is_guard(one)]
        if not guards:
            why = f"{path}, which has no {_GUARD} and would do its work again in every process"
            return cls(problem=f"{why}; put that work there, {_ELSE}")
        line = _line_of(main) if starting else None
        if line is not None and not any(line in guard for guard in guards):
            return cls(problem=f"{path}, whose line {line} is not under its {_GUARD} and would run again; {_ELSE}")
        return cls(("init_main_from_path", path) if name is None else ("init_main_from_name", name))


def _is_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )


def _line_of(main: ModuleType) -> int | None:
    """The line that a main program is at, unless it has ended."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals is vars(main) and frame.f_code.co_name == "<module>":
            return frame.f_lineno
        frame = frame.f_back
    return None


class _Life:
    """What a process is: its owner's, or one of a pool; and whether that one is just running the main program."""

    inside = False
    loading = False
    main = Main()


class _Worker:
    """One process, its pipe, and whether it can be used again."""

    def __init__(self, function: bytes) -> None:
        if _Life.loading:
            raise PoolError(f"the main program scores in processes as it is loaded, expected that under {_GUARD}")
        self.fit = False
        self._pipe, theirs = multiprocessing.Pipe()
        # Not by `multiprocessing`, whose processes begin by running the main program: a training script whose work
        # stands under no guard would do it again in each of them.
        program = (
            "import sys; sys.path[:] = sys.argv[2:]; import rollbook.rewards.pools as p; p.serve(int(sys.argv[1]))"
        )
        places = [place for place in sys.path if isinstance(place, str)]
        try:
            self._process = subprocess.Popen(
                [multiprocessing.spawn.get_executable(), "-c", program, str(theirs.fileno()), *places],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # It is killed with what it starts, and an interrupt at the terminal is its owner's to handle. A process
                # of a process stays in the session of the outer one, to be killed with that.
                start_new_session=not _Life.inside,
            )
        except OSError as error:
            self._pipe.close()
            raise PoolError(f"a reward process did not start: {said(error)}") from None
        finally:
            theirs.close()
        try:
            self._pipe.send((sys.argv, Main.here(starting=True), function))
            if not self._pipe.poll(START_LIMIT):
                raise PoolError(f"a reward process did not start within {START_LIMIT:g} s")
            problem = self._pipe.recv()
        except (EOFError, OSError):
            problem = f"it ended with exit code {self._ended()}"
        except BaseException:
            self.kill()
            raise
        if problem is not None:
            self.kill()
            raise PoolError(f"a reward process could not load its function: {problem}")
        self.fit = True

    def call(self, arguments: tuple[Any, ...], limit: float | None) -> Outcome:
        try:
            sent = pickle.dumps(arguments)
        except Exception as error:
            return Outcome(error=f"its arguments cannot be sent to another process ({said(error)})")
        self.fit = False  # unless it answers
        try:
            self._pipe.send_bytes(sent)
            if not self._pipe.poll(limit):
                return timed_out(limit or 0.0)
            outcome: Outcome = self._pipe.recv()
        except (EOFError, OSError):
            return Outcome(error=f"its process ended with exit code {self._ended()}", stopped=True)
        self.fit = True
        return outcome

    def alive(self) -> bool:
        """Whether it can take a call."""
        return self.fit and self._process.poll() is None

    def _ended(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        return self._process.returncode

    def kill(self) -> None:
        """Kill the process and what it started."""
        self.fit = False
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._ended()
        self._pipe.close()


class _Unpickler(pickle.Unpickler):
    """Reads what is sent to a process; the main program is loaded when something of it is, and not before."""

    def find_class(self, module: str, name: str) -> Any:
        main = _Life.main
        if module in ("__main__", "__mp_main__") and main.problem is not None:
            raise PoolError(f"got {name} of the main program, {main.problem}")
        if module in ("__main__", "__mp_main__") and main.how is not None:
            _Life.main, _Life.loading = Main(), True
            try:
                multiprocessing.spawn.prepare(dict([main.how]))
            finally:
                _Life.loading = False
        return super().find_class(module, name)


def serve(place: int) -> None:
    """A process's life: load the function, then answer calls until the pipe, a descriptor, closes."""
    pipe = Connection(place)
    _Life.inside = True
    sys.argv[:], _Life.main, function = pipe.recv()
    loaded = attempt(lambda: _Unpickler(io.BytesIO(function)).load())
    pipe.send(loaded.error)
    if loaded.error is not None:
        return
    while True:
        try:
            arguments = _Unpickler(io.BytesIO(pipe.recv_bytes())).load()
        except EOFError:
            return
        except PoolError as error:
            pipe.send(Outcome(error=str(error), fatal=PoolError))
            continue
        except Exception as error:
            pipe.send(Outcome(error=f"its arguments cannot be read in another process ({said(error)})"))
            continue
        outcome = attempt(lambda: loaded.value(*arguments))  # noqa: B023  called at once
        try:
            answer = pickle.dumps(outcome)
        except Exception as error:
            answer = pickle.dumps(Outcome(error=f"its result cannot be sent from another process ({said(error)})"))
        pipe.send_bytes(answer)
