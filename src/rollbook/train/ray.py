"""Training on a Ray cluster: `train_on_ray` starts a book, rollout workers and the ranks of a trainer as actors.

The book is served by an actor (`ray://NAME`), over the folder of the run or the `book` of the configuration. Records
and weights cross in the object store. The driver starts the other actors and watches them: a rollout worker that fails
or dies is restarted; if a rank of the trainer dies, all ranks are restarted and continue from the last checkpoint.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import xxhash

from rollbook.book.book import open as open_book
from rollbook.book.errors import BookError, NotABookError
from rollbook.core.addresses import POSTGRES, RAY, redacted
from rollbook.core.errors import RollbookError
from rollbook.core.files import make_folder, private_opener
from rollbook.core.metrics import warn_user
from rollbook.train import checkpoint
from rollbook.train.config.schema import Config, RolloutSection
from rollbook.train.config.values import ConfigError
from rollbook.train.run import BOOK_FOLDER, CONFIG_FILE, WORKERS_FOLDER, Run
from rollbook.train.worker import MAX_FAILURES, WorkerFailures, WorkersFailedError, wait_for_trainer

if TYPE_CHECKING:
    from rollbook.train.worker import RolloutWorker

_POLL_SECONDS = 0.5
"""How often the driver looks at its actors, and a worker without a trainer at the book."""
_STOP_SECONDS = 10.0
"""How long the driver waits for actors that end."""
_LOCAL = "local"
"""The address of a new cluster on this machine."""


class TrainerDiedError(RollbookError, RuntimeError):
    """Raised when ranks of the trainer die repeatedly, or cannot be started."""


# --- actors -----------------------------------------------------------------------------------------------------------


class _OutputBuffer(io.TextIOBase):
    """Collects text until it is taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._text = ""

    def write(self, text: str) -> int:
        with self._lock:
            self._text += text
        return len(text)

    def take(self) -> str:
        with self._lock:
            text, self._text = self._text, ""
        return text


class TrainerRank:
    """A rank of the trainer, as an actor with two threads: one trains, one answers."""

    def __init__(self, folder: str) -> None:
        os.chdir(folder)
        self._output = _OutputBuffer()

    def address(self) -> tuple[str, int]:
        """Return the address of this machine and a free port, for rank 0."""
        import ray

        with socket.socket() as server:
            server.bind(("", 0))
            host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            return host, server.getsockname()[1]

    def run(self, config: Mapping[str, Any], book: str, environment: Mapping[str, str]) -> dict[str, Any]:
        """Train, and return a summary."""
        os.environ.update(environment)
        result = Run(Config.from_dict(config), stream=self._output, book=book).train()  # type: ignore[arg-type]
        return result.to_dict()

    def poll(self, folder: str) -> tuple[str, int]:
        """Return what was printed since the last call, and the step of the last checkpoint, -1 if there is none.

        Args:
            folder: Folder of the run.
        """
        checkpoints = checkpoint.list_checkpoints(Path(folder))
        return self._output.take(), checkpoints[-1].step if checkpoints else -1


class RolloutActor:
    """A rollout worker, as an actor with two threads: one generates, one answers."""

    def __init__(self, folder: str) -> None:
        os.chdir(folder)
        self._stop = threading.Event()
        self._worker: RolloutWorker | None = None

    def run(self, book: str, name: str) -> dict[str, Any]:
        """Wait for the trainer, generate rollouts until it has finished, and return what was done."""
        from rollbook.train.builders import build_worker
        from rollbook.train.config.files import load_config

        found_trainer = wait_for_trainer(book, self._stop)
        # A finished run that continues with more steps is opened again by the trainer.
        while found_trainer is None and not self._stop.wait(_POLL_SECONDS):
            found_trainer = wait_for_trainer(book, self._stop)
        if found_trainer is None:
            return {}
        opened_book, settings = found_trainer
        with opened_book:
            self._worker = build_worker(load_config(settings["config"]), opened_book, settings, name)
            if self._stop.is_set():
                return {}
            with self._worker.engine:
                return vars(self._worker.run())

    def stop(self) -> None:
        """End `run` soon."""
        self._stop.set()
        if self._worker is not None:
            self._worker.stop()


# --- the driver -------------------------------------------------------------------------------------------------------


def train_on_ray(
    config: Config, address: str | None = None, *, ranks: int = 1, stream: TextIO | None = None
) -> dict[str, Any]:
    """Train a configuration on a Ray cluster.

    Every node needs Rollbook, and the files that the configuration names, at the same paths.

    Args:
        config: The configuration; `rollout.workers` is the number of rollout workers.
        address: Address of the cluster; `local`: a new one on this machine; `None`: that of `RAY_ADDRESS` or of this
            machine, or else a new one.
        ranks: Number of ranks of the trainer.
        stream: Output of the display; `None`: standard error.

    Returns:
        Folder, steps, seconds, and the metrics of the evaluations before and after.

    Raises:
        ConfigError: The configuration is not valid, or does not fit the run in the folder.
        TrainerDiedError: Ranks of the trainer died repeatedly, or an actor could not be created.
        WorkersFailedError: A rollout worker failed repeatedly, or code of the trainer raised an exception that is not
            Rollbook's.
    """
    config.require()
    if not config.rollout.workers:
        raise ConfigError("rollout.workers", "got 0, expected the number of rollout workers to start on Ray")
    if config.book is not None and "://" in config.book and not config.book.startswith(POSTGRES):
        raise ConfigError(
            "book",
            f"got {redacted(config.book)!r} with --ray, expected a folder or postgresql://...: the run starts its own "
            "actor, which serves that book",
        )
    if ranks > 1 and config.distributed == "none":
        raise ConfigError("distributed", f"got 'none' with {ranks} ranks, expected 'ddp' or 'fsdp'")
    # Ray prints messages of its nodes to standard output, which `--json` is for.
    with (
        redirect_stdout(sys.stderr),
        _connected(config, address, ranks),
        _Cluster(config, ranks, stream) as cluster,
    ):
        return cluster.train()


@contextmanager
def _connected(config: Config, address: str | None, ranks: int) -> Iterator[None]:
    """Connect to a cluster, or start one on this machine, unless this process is connected already."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray", "needs ray: install it with `pip install 'rollbook[ray]'`") from error
    from rollbook.book.ray import NAMESPACE, check_cluster_address

    _check_resources(config.rollout)
    if ray.is_initialized():
        yield
        return
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, "namespace": NAMESPACE}
    is_new = address == _LOCAL
    if not is_new:
        existing_address = address or os.environ.get("RAY_ADDRESS")
        try:
            check_cluster_address(existing_address or "")
            ray.init(existing_address or "auto", **options)
        except (ConnectionError, ValueError) as error:
            if existing_address is not None:
                raise ConfigError("--ray", f"cannot connect to the cluster at {existing_address}: {error}") from None
            is_new = True
    if is_new:
        cpus = max(os.cpu_count() or 1, math.ceil(_count_cpus(config, ranks)))
        ray.init(_LOCAL, num_cpus=cpus, include_dashboard=False, **options)
    if callable(sigterm_handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, sigterm_handler)  # Ray has replaced it
    try:
        yield
    finally:
        ray.shutdown()


def _check_resources(rollout: RolloutSection) -> None:
    """Reject resources that Ray would reject when an actor starts."""
    import ray

    for name in ("worker_resources", "trainer_resources"):
        for option, value in getattr(rollout, name).items():
            try:
                ray.remote(TrainerRank).options(**{option: value})
            except (TypeError, ValueError) as error:
                message = " ".join(str(error).split())
                raise ConfigError(f"rollout.{name}.{option}", f"got {value!r}: {message}") from None


def _count_cpus(config: Config, ranks: int) -> float:
    """Return how many CPUs the rollout workers and the ranks of the trainer need."""
    rollout, total = config.rollout, 0.0
    for resources, count in ((rollout.worker_resources, rollout.workers), (rollout.trainer_resources, ranks)):
        cpus = resources.get("num_cpus", 1)
        total += float(1 if cpus is None else cpus) * count
    return total


class _Cluster:
    """The actors of a run: its book, rollout workers and ranks."""

    def __init__(self, config: Config, ranks: int, stream: TextIO | None) -> None:
        self.config, self.rank_count = config, ranks
        self.stream = sys.stderr if stream is None else stream
        self.folder = os.getcwd()
        book_location = config.book or os.path.abspath(config.folder / BOOK_FOLDER)
        # The same command finds the book again, and commands in other folders do not.
        self.book_address = f"ray://{config.name}-{xxhash.xxh3_64_hexdigest(book_location.encode())[:8]}"
        self.config = self._prepare()
        self.worker_actors: dict[int, Any] = {}
        self.rank_actors: list[Any] = []
        self._worker_of_result: dict[Any, int] = {}
        """Number of the worker by the reference to the result of its `run`."""
        self._failures = WorkerFailures()
        self._saved_step = -1
        """Step of the last checkpoint that rank 0 reported; -1: none."""

    def _prepare(self) -> Config:
        """Prepare the folder of the run before its book is opened; return the configuration that continues with it."""
        run = Run(self.config, stream=self.stream)
        if self.config.overwrite and (self.config.folder / CONFIG_FILE).is_file():
            run.check_lock()
            self._stop_book()  # left by a driver that was killed
        run.prepare_folder()
        return dataclasses.replace(self.config, overwrite=False)

    def __enter__(self) -> _Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        import ray

        if kind is KeyboardInterrupt:
            checkpoints = checkpoint.list_checkpoints(self.config.folder)
            resume_point = f"from {checkpoints[-1].path}" if checkpoints else "from the beginning"
            self._log(f"\ninterrupted; the same command continues {resume_point}")
        with suppress(ray.exceptions.RayError):
            for worker in self.worker_actors.values():
                worker.stop.remote()
            ray.wait(list(self._worker_of_result), num_returns=len(self._worker_of_result), timeout=_STOP_SECONDS)
        for actor in (*self.worker_actors.values(), *self.rank_actors):
            ray.kill(actor)
        self._stop_book()

    def _stop_book(self) -> None:
        import ray

        from rollbook.book.ray import RayBook, find_actor

        try:
            book = open_book(self.book_address)
            if isinstance(book, RayBook):
                book.stop()
        except NotABookError:
            return
        except BookError:  # such as if its database cannot be reached
            actor = find_actor(self.book_address.removeprefix(RAY))
            if actor is not None:
                ray.kill(actor, no_restart=True)

    def _log(self, text: str) -> None:
        if self.config.tracking.display:
            print(text, file=self.stream, flush=True)

    def train(self) -> dict[str, Any]:
        """Train to the end, and restart ranks that died."""
        self._log(f"ray       rollout workers: {self.config.rollout.workers}, ranks of the trainer: {self.rank_count}")
        self._log(f"book      {self.book_address}")
        self._warn_about_resources()
        for number in range(self.config.rollout.workers):
            self._start_worker(number)
        failures, failed_step = 0, -1
        while True:
            try:
                return self._train_once()
            except _RankDiedError as error:
                step = self._saved_step
                failures, failed_step = (failures + 1 if step == failed_step else 1), step
                if failures >= MAX_FAILURES:
                    raise TrainerDiedError(
                        f"the trainer died {failures} times in a row after step {max(step, 0)}: {error}"
                    ) from error
                warn_user(f"{error}; restarting the trainer from step {max(step, 0)}")

    def _warn_about_resources(self) -> None:
        import ray

        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        available = resources.get("CPU", 0.0)
        needed = _count_cpus(self.config, self.rank_count)
        if needed > available:
            warn_user(
                f"the run needs {needed:g} CPUs and the cluster has {available:g}: it waits until there are more; "
                "rollout.worker_resources={num_cpus: 0.5} lets actors share one"
            )

    def _start_worker(self, number: int) -> None:
        import ray

        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **self.config.rollout.worker_resources}
        actor: Any = ray.remote(RolloutActor).options(max_concurrency=2, max_restarts=0, **options)
        worker = actor.remote(self.folder)
        self.worker_actors[number] = worker
        self._failures.record_start(number)
        self._worker_of_result[worker.run.remote(self.book_address, f"worker-{number}")] = number

    def _train_once(self) -> dict[str, Any]:
        import ray

        try:
            results = self._start_trainer()
            pending = results
            while pending:
                done, pending = ray.wait(pending, num_returns=1, timeout=_POLL_SECONDS)
                self._poll_main_rank()
                self._check_ranks(done, pending)
                self._check_workers()
            return dict(ray.get(results[0]))
        except ray.exceptions.RayTaskError as error:
            self._poll_main_rank()
            raise self._read_error(error, "trainer") from None
        except ray.exceptions.RayActorError as error:
            raise _RankDiedError(f"a rank of the trainer died ({_describe_death(error)})") from error
        finally:
            for rank in self.rank_actors:
                ray.kill(rank)
            self.rank_actors = []

    def _check_ranks(self, done: list[Any], pending: list[Any]) -> None:
        """Raise the exception of a rank that failed; if another one died, which is the reason, raise that.

        Args:
            done: References to the results of the ranks that have ended.
            pending: Those of the others.
        """
        import ray

        try:
            ray.get(done)
        except ray.exceptions.RayTaskError:
            ended, _ = ray.wait(pending, num_returns=len(pending), timeout=_STOP_SECONDS)
            for result in ended:
                with suppress(ray.exceptions.RayTaskError):
                    ray.get(result)
            raise

    def _start_trainer(self) -> list[Any]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {"num_cpus": 1, **self.config.rollout.trainer_resources}
        driver_node = ray.get_runtime_context().get_node_id()
        for rank in range(self.rank_count):
            # Rank 0 writes the folder of the run: on the machine of this command, if that has the resources.
            default_node = (
                {"scheduling_strategy": NodeAffinitySchedulingStrategy(driver_node, soft=True)} if rank == 0 else {}
            )
            actor: Any = ray.remote(TrainerRank).options(
                max_concurrency=2, max_restarts=0, **{**default_node, **options}
            )
            self.rank_actors.append(actor.remote(self.folder))
        environments: list[dict[str, str]] = [{}]
        if self.rank_count > 1:
            host, port = ray.get(self.rank_actors[0].address.remote())
            shared = {
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(self.rank_count),
                "LOCAL_RANK": "0",
            }
            environments = [{**shared, "RANK": str(rank)} for rank in range(self.rank_count)]
        config = self.config.to_dict()
        pairs = zip(self.rank_actors, environments, strict=True)
        return [rank.run.remote(config, self.book_address, environment) for rank, environment in pairs]

    def _poll_main_rank(self) -> None:
        """Print the output of rank 0, and read the step of its last checkpoint: its node may be another one."""
        import ray

        with suppress(ray.exceptions.RayError):
            polled = self.rank_actors[0].poll.remote(str(self.config.folder))
            text, self._saved_step = ray.get(polled, timeout=5.0)
            print(text, end="", file=self.stream, flush=True)

    def _check_workers(self) -> None:
        """Restart workers that failed or died.

        Raises:
            WorkersFailedError: A worker failed too often.
        """
        import ray

        from rollbook.book.ray import describe_ray_error

        done, _ = ray.wait(list(self._worker_of_result), num_returns=len(self._worker_of_result), timeout=0)
        for result in done:
            number = self._worker_of_result.pop(result)
            try:
                ray.get(result)
                # It is needed again if the trainer dies before it has saved the last checkpoint.
                next_result = self.worker_actors[number].run.remote(self.book_address, f"worker-{number}")
                self._worker_of_result[next_result] = number
                continue
            except ray.exceptions.RayTaskError as error:
                reason, log = describe_ray_error(error).last, self._log_error(error, f"worker-{number}")
            except ray.exceptions.RayActorError as error:
                reason, log = _describe_death(error), None
            self._failures.record(number, reason, log)
            ray.kill(self.worker_actors[number])
            self._start_worker(number)

    def _log_error(self, error: Any, name: str) -> Path:
        """Append the traceback of an actor's exception to a file, and return its path."""
        path = self.config.folder / WORKERS_FOLDER / f"{name}.log"
        make_folder(path.parent)
        with open(path, "a", encoding="utf-8", opener=private_opener) as file:
            file.write(f"{error}\n")
        return path

    def _read_error(self, error: Any, name: str) -> Exception:
        """Return the exception that an actor raised; one of other code than Rollbook's with its traceback in a file."""
        from rollbook.book.ray import describe_ray_error

        if isinstance(error.cause, (RollbookError, ValueError, OSError)):
            cause: Exception = error.cause
            return cause
        return WorkersFailedError(
            f"{name} failed: {describe_ray_error(error).last} (log: {self._log_error(error, name)})"
        )


class _RankDiedError(Exception):
    """A rank of the trainer died."""


def _describe_death(error: BaseException) -> str:
    """Return the first line of the error of an actor that died.

    Raises:
        TrainerDiedError: The actor could not be created, which would fail again.
    """
    from rollbook.book.ray import describe_ray_error

    description = describe_ray_error(error)
    if description.is_creation:
        raise TrainerDiedError(f"an actor could not be created: {description.last}") from error
    return description.first


__all__ = ["TrainerDiedError", "train_on_ray"]
