"""`run(config)`: a whole training run, new or resumed, with checks of the configuration before weights are loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import importlib.util
import json
import math
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit

from rollbook.book.book import Book
from rollbook.book.book import open as open_book
from rollbook.book.disk import hit_failpoint
from rollbook.book.ledger import OUTAGE_SECONDS, retry_outages
from rollbook.core.addresses import redacted
from rollbook.core.files import FILE_MODE, make_folder, private_opener
from rollbook.core.metrics import warn_user
from rollbook.core.terminal import format_duration
from rollbook.models.loading import transformers_module
from rollbook.train import builders, checkpoint
from rollbook.train.builders import check_model_paths, check_rewards
from rollbook.train.config.files import dump_config, load_config
from rollbook.train.config.schema import Config, TrackingSection, compare_configs
from rollbook.train.config.values import ConfigError, expand_variables
from rollbook.train.evaluation import Evaluation, compare_evaluations, evaluate, evaluate_records
from rollbook.train.prompts import Prompts
from rollbook.train.supervised import WarmupResult, warm_up
from rollbook.train.tracker import METRICS_FILE, Display, WandbTracker, build_trackers, shell_command
from rollbook.train.trainer import StepReport, Trainer
from rollbook.train.user_code import find_foreign_code, resolve
from rollbook.train.worker import LocalWorkers

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PretrainedConfig

    from rollbook.core.experience import Experience
    from rollbook.core.vocabulary import Tokenizer
    from rollbook.models import Actor
    from rollbook.rewards.types import Reward
    from rollbook.train.distributed import Distributed

CONNECT_TIMEOUT = 10.0
"""Seconds in which a server must accept a connection."""


def check(config: Config) -> None:
    """Check paths of models, rewards, engine, trackers and tokenizer.

    Raises:
        ConfigError: The path of a model is that of a file, a package is missing, a reward cannot be called, the
            engine's server does not answer, or the tokenizer has tokens that the model does not.
    """
    check_model_paths(config)
    check_rewards(config)
    _check_engine(config)
    _check_trackers(config)
    if config.model.path is not None or config.model.config is not None:
        _check_model_files(config)


def check_vocabulary(
    tokenizer: Tokenizer | None,
    model_config: PretrainedConfig | None,
    generation_config: GenerationConfig | None = None,
) -> None:
    """Check that a tokenizer fits a model; warn if their end tokens differ.

    Args:
        tokenizer: The tokenizer.
        model_config: Configuration of the model.
        generation_config: Generation configuration of the model.

    Raises:
        ConfigError: The tokenizer has more tokens than the model.
    """
    if tokenizer is None or model_config is None:
        return
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    size = getattr(text, "vocab_size", None)
    try:
        count = len(tokenizer)  # type: ignore[arg-type]
    except TypeError:
        return
    if size is not None and count > size:
        raise ConfigError("model.tokenizer", f"got {count} tokens, expected at most the {size} of the model")
    end = getattr(tokenizer, "eos_token_id", None)
    for name, holder in (("model's config", text), ("generation config", generation_config)):
        ids = getattr(holder, "eos_token_id", None)
        ends = ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]
        if end is not None and ends and end not in ends:
            warn_user(
                f"model.tokenizer: its end token is {end}, that of the {name} {', '.join(map(str, ends))}. "
                "Responses end at any of them"
            )


def _check_engine(config: Config) -> None:
    engine = config.engine
    if engine.kind == "transformers":
        return
    if engine.kind == "vllm" and engine.url is None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "engine.kind", "'vllm' without a URL needs vllm: install it with `pip install 'rollbook[vllm]'`"
            )
        return
    if engine.api_key_env is not None and os.environ.get(engine.api_key_env) is None:
        raise ConfigError("engine.api_key_env", f"got {engine.api_key_env!r}, which is not set in the environment")
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError(
            "engine.kind", f"got {engine.kind!r}, which needs httpx: install it with `pip install 'rollbook[remote]'`"
        )
    for url in engine.url or ():
        _check_server(url)


def _check_server(url: str) -> None:
    """Check that a server accepts connections."""
    try:
        address = urlsplit(url)
        host, port = address.hostname or "", address.port or {"http": 80, "https": 443}[address.scheme]
    except ValueError as error:
        raise ConfigError("engine.url", f"cannot be parsed: {error}") from None
    if any(os.environ.get(name) for name in ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "http_proxy",
                                             "https_proxy")):  # fmt: skip
        return  # only the proxy can tell
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT).close()
    except OSError as error:
        raise ConfigError("engine.url", f"cannot connect to {host}:{port}: {error}") from None


def _check_trackers(config: Config) -> None:
    tracking = config.tracking
    for name, module, is_on in (
        ("tensorboard", "torch.utils.tensorboard", tracking.tensorboard),
        ("wandb", "wandb", tracking.wandb is not None),
    ):
        if is_on:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(
                    f"tracking.{name}", f"needs the package {name}: pip install {name} ({error})"
                ) from None
    for i, name in enumerate(tracking.trackers):
        resolve(name, name=f"tracking.trackers.{i}")


def _check_model_files(config: Config) -> None:
    """Compare tokenizer and model by their configurations. Errors of reading are left to the code that loads them."""
    transformers = transformers_module()
    model = config.model
    name = model.tokenizer or model.processor or model.path
    if name is None:
        return
    generation = None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        if model.path is not None:
            model_config = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=False)
            if Path(model.path, "generation_config.json").is_file() or not Path(model.path).exists():
                generation = transformers.GenerationConfig.from_pretrained(model.path, trust_remote_code=False)
        else:
            model_config = transformers.AutoConfig.for_model(**(model.config or {}))
    except Exception:  # errors of the hub and its libraries
        return
    check_vocabulary(tokenizer, model_config, generation)


CONFIG_FILE = "config.yaml"
BOOK_FOLDER = "book"
WORKERS_FOLDER = "workers"
"""Folder of the logs of rollout workers."""
SOURCES_FILE = "rewards.json"
"""File with the fingerprints of the code of the rewards."""
_LOCK = ".lock"
_NEW_CONFIG = f".{CONFIG_FILE}.new"


@dataclass
class RunResult:
    """Result of a run.

    Args:
        folder: The folder of the run.
        steps: Number of steps, those before a resume included.
        seconds: Duration.
        book: Folder or address of the book.
        before: Evaluation before the first step.
        after: Evaluation after the last step.
        reports: Reports of the steps of this process.
    """

    folder: Path
    steps: int
    seconds: float
    book: str = ""
    before: Evaluation | None = None
    after: Evaluation | None = None
    reports: list[StepReport] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return folder, steps, seconds and the metrics of the evaluations as plain values, for `--json`."""
        evaluations = {"before": self.before, "after": self.after}
        return {
            "folder": str(self.folder),
            "steps": self.steps,
            "seconds": self.seconds,
            **{name: None if scores is None else scores.metrics() for name, scores in evaluations.items()},
        }


class Run:
    """A run in progress.

    Args:
        config: The configuration.
        stream: Output of the display; `None`: standard error.
        book: `ray://NAME`, to serve the book of the configuration by Ray; other code starts the workers then.
    """

    def __init__(self, config: Config, *, stream: TextIO | None = None, book: str | None = None) -> None:
        config.require()
        self.config = config
        self._served_book = book
        self.stream = sys.stderr if stream is None else stream
        self.folder = config.folder
        self.start_time = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._prompts: tuple[Prompts, Prompts | None] | None = None
        self._trainer: Trainer | None = None
        self._distributed: Distributed | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, or the only one."""
        return self._distributed is None or self._distributed.is_main

    @property
    def book_address(self) -> str:
        """Folder or address of the book."""
        return self._served_book or self._own_book

    @property
    def _own_book(self) -> str:
        address: str = expand_variables(self.config.book or str(self.folder / BOOK_FOLDER), "book")
        return address

    def say(self, text: str = "") -> None:
        """Print a line if the display is on, on rank 0."""
        if self.config.tracking.display and self.is_main:
            print(text, file=self.stream, flush=True)

    # --- the folder ---------------------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Create and lock the folder; return whether it has a run to resume."""
        folder, config_path = self.folder, self.folder / CONFIG_FILE
        if folder.exists() and not folder.is_dir():
            raise ConfigError("out", f"got {str(folder)!r}, which is a file, expected a folder")
        if _list_files(folder) and not config_path.is_file():
            if self.config.overwrite:
                raise ConfigError(
                    "overwrite", f"got true, and {folder} is not the folder of a run (it has no {CONFIG_FILE})"
                )
            raise ConfigError(
                "out", f"got {str(folder)!r}, which has files but no {CONFIG_FILE}, expected another folder"
            )
        make_folder(folder)
        self._lock()
        if self.config.overwrite:
            # The configuration is removed last: it marks the folder as that of a run.
            for path in sorted(_list_files(folder), key=lambda file: file == config_path):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                hit_failpoint("overwriting")
        if config_path.is_file():
            if not self.config.resume:
                raise ConfigError("resume", f"got false, and {folder} has a run, expected overwrite or another folder")
            previous = load_config(config_path)
            checkpoint.remove_partial(folder)
            has_checkpoints = bool(checkpoint.list_checkpoints(folder))
            changed = any(not change.changeable for change in compare_configs(previous, self.config))
            if changed and not has_checkpoints and self._never_trained():
                # The first attempt failed before it trained, so that its settings may still change.
                if "://" not in self._own_book:
                    shutil.rmtree(self._own_book, ignore_errors=True)
            else:
                self._check_same_settings(previous)
            if compare_configs(previous, self.config):
                self._keep_config()
            return has_checkpoints
        self._keep_config()
        return False

    def prepare_folder(self) -> None:
        """Check, create and, with `overwrite`, clear the folder, for processes that train in it later."""
        with self._stack:
            self.prepare()

    def check_lock(self) -> None:
        """Raise `ConfigError` if another process is training in the folder."""
        with self._stack:
            self._lock()

    def _never_trained(self) -> bool:
        """Return whether the book, if there is one, has no training records."""
        if "://" not in self._own_book and not Path(self._own_book).exists():
            return True
        try:
            with open_book(self._own_book, mode="r") as book:
                return not book.counts().admitted
        except (OSError, ValueError):
            return False

    def _lock(self) -> None:
        """Lock the folder until this process ends. Child processes do not inherit the lock."""
        (self.folder / _LOCK).touch(FILE_MODE)
        file = self._stack.enter_context((self.folder / _LOCK).open("a"))
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ConfigError(
                "out", f"got {str(self.folder)!r}, in which another process is training, expected another folder"
            ) from None
        except OSError as error:
            self.say(f"{self.folder}: its file system has no locks ({error}); do not train in it from another process")

    def _keep_config(self) -> None:
        new = self.folder / _NEW_CONFIG
        # Running the stored file again resumes the run.
        with open(new, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(dump_config(dataclasses.replace(self.config, overwrite=False)))
        hit_failpoint("config written")
        os.replace(new, self.folder / CONFIG_FILE)

    def _check_same_settings(self, previous: Config) -> None:
        fixed = [change for change in compare_configs(previous, self.config) if not change.changeable]
        if fixed:
            listed = "; ".join(map(str, fixed[:6])) + (f"; and {len(fixed) - 6} more" if len(fixed) > 6 else "")
            raise ConfigError(
                "resume",
                f"the run at {self.folder} has other settings: {listed}. Expected the same, another out, or "
                "overwrite: true",
            )

    # --- training -----------------------------------------------------------------------------------------------------

    def train(self) -> RunResult:
        """Run or resume the training."""
        with self._stack, self._joined():
            if self.config.epochs is not None:
                self._prompts = builders.load_prompts(self.config)
                count = math.ceil(self.config.epochs * len(self._prompts[0]) / self.config.batch.prompts_per_step)
                self.config = dataclasses.replace(self.config, steps=count)
            if self._distributed is not None and not self._distributed.is_main:
                return self._follow(self._distributed)
            try:
                outcome = self._resume() if self.prepare() else self._run(resumed=False)
            except KeyboardInterrupt:
                checkpoints = checkpoint.list_checkpoints(self.folder)
                start = f"from {checkpoints[-1].path}" if checkpoints else "from the beginning"
                lost = (
                    0 if self._trainer is None or not checkpoints else self._trainer.global_step - checkpoints[-1].step
                )
                interval = self.config.checkpoint.interval
                repeated = f", and repeats {lost} steps (checkpoint.interval is {interval})" if lost else ""
                self.say(f"\ninterrupted; the same command continues {start}{repeated}")
                raise
        if self.config.tracking.display:
            self.say("\n".join(summarize(outcome, self.config)))
        return outcome

    @contextlib.contextmanager
    def _joined(self) -> Iterator[None]:
        """Join the ranks of a distributed run. An exception of this rank ends the others."""
        config, count = self.config, int(os.environ.get("WORLD_SIZE", "1"))
        if config.distributed == "none":
            if count > 1:
                raise ConfigError("distributed", f"got 'none' with {count} ranks, expected 'ddp' or 'fsdp'")
            yield
            return
        from rollbook.train.distributed import Distributed

        device = builders.configure_torch(config)
        ranks = self._distributed = Distributed(config.distributed, device, precision=config.model.precision)
        try:
            yield
        except BaseException as error:
            ranks.fail(error)
        finally:
            ranks.close()

    def _follow(self, ranks: Distributed) -> RunResult:
        """Build the models and the trainer on a rank other than 0, and do what rank 0 says."""
        resumed = ranks.follow()
        if resumed is None:  # there is nothing to do
            return RunResult(self.folder, self.config.steps, 0.0)
        return self._run(resumed=resumed)

    def _open_book(self, actor: Actor) -> contextlib.AbstractContextManager[Book | None]:
        """Open the book: rank 0 creates it, then other ranks open it for reading, if they can see it."""
        address = self.book_address
        over = None if self._served_book is None else self._own_book
        # `_check_book` has opened it: if its server does not respond now, the address is right.
        if self._distributed is None:
            return retry_outages(open_book, address, tokenizer=actor.tokenizer, over=over)
        book = retry_outages(open_book, address, tokenizer=actor.tokenizer, over=over) if self.is_main else None
        self._distributed.group.gather([])
        if not self.is_main and ("://" in address or Path(address).exists()):
            book = retry_outages(open_book, address, mode="r")
        return book or contextlib.nullcontext()

    def _check_book(self, resumed: bool) -> None:
        """Check that the book can be opened and is not that of another run, before models are loaded.

        Args:
            resumed: Whether the run has a book, whose server may be restarting. A new run may have a wrong address.
        """
        try:
            with retry_outages(open_book, self._own_book, outage_seconds=OUTAGE_SECONDS if resumed else 0.0) as book:
                self._check_unused(book, resumed)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            if self.config.book is None:
                raise
            raise ConfigError("book", str(error)) from error

    def _check_unused(self, book: Book, resumed: bool) -> None:
        """Reject the training records of another run in the book of a new one."""
        if resumed or not book.counts().admitted:
            return
        if self.config.book is not None:
            raise ConfigError("book", f"got {book.url}, which has training records, expected a new one")
        raise ConfigError(
            "out",
            f"got {str(self.folder)!r}, whose book has training records but which has no checkpoint, expected another "
            "folder, or overwrite: true",
        )

    @contextlib.contextmanager
    def _working(self, trainer: Trainer) -> Iterator[None]:
        """Start the rollout workers of this machine, if there are any, and end them with the run."""
        pacer = trainer.pacer
        if pacer is None:
            yield
            return
        workers = None
        if self.config.rollout.workers and self._served_book is None:
            # Not `book_address`: other users of this machine can read the arguments of a process.
            address = self.config.book or str(self.folder / BOOK_FOLDER)
            workers = LocalWorkers(address, self.config.rollout.workers, self.folder / WORKERS_FOLDER)
        elif self._served_book is None:
            self.say(f"workers   start some: rollbook rollout --book {shlex.quote(redacted(self._own_book))}")
        try:
            if workers is not None:
                workers.start()
                pacer.on_wait = workers.poll
            yield
            pacer.close()
        finally:
            if workers is not None:
                workers.stop()

    def _resume(self) -> RunResult:
        last, steps = checkpoint.list_checkpoints(self.folder)[-1], self.config.steps
        if last.step < steps:
            return self._run(resumed=True)
        self.say(f"the run at {self.folder} has done {last.step} steps, and steps is {steps}. Increase it to continue")
        if self._distributed is not None:
            self._distributed.release(None)
        outcome = RunResult(self.folder, last.step, 0.0, redacted(self._own_book))
        with retry_outages(open_book, self._own_book, mode="r") as book:
            outcome.before, outcome.after = self._evaluations(book, last.step)
        return outcome

    def _run(self, *, resumed: bool) -> RunResult:
        transformers_module().utils.logging.disable_progress_bar()  # progress bars would garble the display
        config, ranks = self.config, self._distributed
        device = builders.configure_torch(config) if ranks is None else ranks.device
        if ranks is not None and ranks.is_main:
            ranks.release(resumed)
        check(config)
        if self.is_main:
            self._check_book(resumed)
        build_device = device if ranks is None else ranks.build_device
        actor = builders.build_actor(config, build_device)
        if config.model.builder is not None:
            check_vocabulary(
                actor.tokenizer, getattr(actor.model, "config", None), getattr(actor.model, "generation_config", None)
            )
        prompts, held_out = self._prompts or builders.load_prompts(config)
        builders.check_prompts_readable(actor, prompts)
        reward = eval_reward = builders.build_reward(config.rewards, actor, device=device)
        if config.evaluation.rewards:
            eval_reward = builders.build_reward(config.evaluation.rewards, actor, "evaluation.rewards", device)
        if self.is_main:
            self._check_sources({"rewards": reward, "evaluation.rewards": eval_reward}, resumed)
        self.say(_format_headline(config, actor, prompts, held_out, device))
        if ranks is not None:
            self.say(f"ranks     {ranks.size}, {ranks.strategy}")
        outcome = RunResult(self.folder, 0, 0.0, redacted(self._own_book))
        if config.warmup.steps and not resumed and self.is_main:
            # Measured by the evaluation reward, so that runs with other training rewards start from the same weights.
            self._warm_up(actor.to(device), prompts, eval_reward)
            actor.to(build_device)
        models = builders.build_models(config, actor, build_device)
        with self._open_book(actor) as book, contextlib.ExitStack() as stack:
            if self.is_main and book is not None:
                self._check_unused(book, resumed)  # again: another run may have begun with it
            trainer = self._trainer = builders.build_trainer(config, models, prompts, reward, book, ranks)
            if trainer.engine is not None:
                stack.callback(trainer.engine.close)
            if ranks is not None:
                leader: Any = trainer
                leader.evaluation_reward = eval_reward
                if not ranks.is_main:
                    leader.follow()
                    return RunResult(self.folder, trainer.global_step, time.monotonic() - self.start_time)
                stack.enter_context(leader.lead())
            if trainer.resumed_from is not None:
                self._restore_reference(trainer, models.reference)
                last = checkpoint.list_checkpoints(self.folder)[-1]
                self.say(f"continuing after step {trainer.global_step}, from {last.path}")
            with self._tracked(trainer, resumed), self._working(trainer):
                self._train(trainer, held_out, eval_reward, outcome)
            outcome.before, outcome.after = self._evaluations(trainer.book, trainer.global_step)
        outcome.steps, outcome.seconds = trainer.global_step, time.monotonic() - self.start_time
        return outcome

    def _restore_reference(self, trainer: Trainer, reference: Actor | None) -> None:
        """Load the policy that a resumed run began with into its reference, unless the configuration names another."""
        if reference is None or self.config.reference is not None or not hasattr(reference, "state_dict"):
            return
        first = checkpoint.list_checkpoints(self.folder)[0]
        if first.step:
            raise ConfigError(
                "reference", f"missing, and there is no {first.path.with_name(checkpoint.checkpoint_name(0))}"
            )
        trainer.load_weights(reference, first.model)

    def _check_sources(self, rewards: Mapping[str, Reward | None], resumed: bool) -> None:
        """Store the fingerprints of the rewards' code, and warn if a run is resumed with other code."""
        sources = {key: None if reward is None else reward.source() for key, reward in rewards.items()}
        path = self.folder / SOURCES_FILE
        recorded = json.loads(path.read_text()) if resumed and path.is_file() else sources
        changed = [key for key, source in sources.items() if recorded.get(key) != source]
        if changed:
            warn_user(
                f"{changed[0]}: the code of the reward was edited since the run began. Rewards before and after are "
                "not comparable; use another out for a new run"
            )
        new_path = path.with_name(f".{SOURCES_FILE}.new")
        with open(new_path, "w", opener=private_opener) as file:
            json.dump(sources, file)
        os.replace(new_path, path)

    def _warm_up(self, actor: Actor, prompts: Prompts, reward: Reward | None) -> WarmupResult:
        config = self.config
        warmup = config.warmup.warmup_config()

        def report(step: int, loss: float, success: float | None) -> None:
            hit_failpoint("warming up")
            if success is not None or step == warmup.steps:
                rate = "" if success is None else f", {success:.0%} of samples right"
                self.say(f"warm-up   step {step:>4}: loss {loss:.3f}{rate}")

        cursor = prompts.state_dict()
        result = warm_up(
            actor,
            prompts,
            warmup,
            reward=reward,
            sampling=builders.build_sampling(config),
            seed=config.seed,
            precision=config.model.precision,
            token_budget=config.batch.token_budget,
            on_step=report,
        )
        prompts.load_state_dict(cursor)  # training starts with the first row again
        return result

    @contextlib.contextmanager
    def _tracked(self, trainer: Trainer, resumed: bool) -> Iterator[None]:
        tracking = self.config.tracking
        if not resumed:
            # Left by a process that was killed before the first checkpoint.
            (self.folder / METRICS_FILE).unlink(missing_ok=True)
        names = [*(name for name in ("jsonl", "tensorboard") if getattr(tracking, name)), *tracking.trackers]
        after, settings = trainer.global_step if resumed else None, self.config.to_dict()
        trackers: list[Any] = list(
            build_trackers(names, self.folder, steps=self.config.steps, after=after, config=settings)
        )
        if tracking.wandb is not None:
            options = {"project": tracking.wandb["project"]} if "project" in tracking.wandb else {}
            trackers.append(WandbTracker(self.folder, config=settings, after=after, **options))
        if tracking.display:
            trackers.append(Display(self.config.steps, stream=self.stream))
        trainer.trackers = trackers
        try:
            yield
        finally:
            for tracker in trackers:
                tracker.close()

    def _train(self, trainer: Trainer, held_out: Prompts | None, reward: Reward | None, outcome: RunResult) -> None:
        config = self.config
        eval_prompts = held_out if reward is not None or config.environment.function is not None else None
        if trainer.global_step == 0 and not checkpoint.list_checkpoints(self.folder):
            if eval_prompts is not None and config.evaluation.before:
                self._evaluate(trainer, eval_prompts, reward)
            trainer.save()
        trainer.last_step = config.steps
        while trainer.global_step < config.steps:
            report = trainer.advance()
            outcome.reports.append(report)
            step = trainer.global_step
            is_last = step == config.steps
            evaluation = config.evaluation
            if eval_prompts is not None and ((is_last and evaluation.after) or _is_due(step, evaluation.interval)):
                self._evaluate(trainer, eval_prompts, reward)
            if (is_last and config.checkpoint.save_final) or _is_due(step, config.checkpoint.interval):
                trainer.save()

    def _evaluate(self, trainer: Trainer, held_out: Prompts, reward: Reward | None) -> None:
        settings = self.config.evaluation
        trainer.evaluate(
            held_out,
            reward,
            k=settings.k,
            sampling=_evaluation_sampling(self.config),
            success=settings.success,
            confidence=settings.confidence,
        )

    def _evaluations(self, book: Book, done: int) -> tuple[Evaluation | None, Evaluation | None]:
        """Compute the first and the last evaluation from the records of the book."""
        settings = self.config.evaluation
        evaluations = []
        for step in (0, done):
            records = list(book.where(evaluation=1, batch=f"eval-{step}"))
            options = {"success": settings.success, "confidence": settings.confidence, "step": step}
            evaluations.append(evaluate_records(records, **options) if records else None)  # type: ignore[arg-type]
        return evaluations[0], evaluations[1] if done else None


def run(config: Config, *, stream: TextIO | None = None, book: str | None = None) -> RunResult:
    """Train by a configuration.

    Args:
        config: The configuration.
        stream: Output of the display; `None`: standard error.
        book: See `Run`.

    Raises:
        ConfigError: The configuration is not valid, or does not fit the run in the folder.

    >>> import io, tempfile
    >>> from rollbook.train.config import load_config
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     small = ["steps=1", "warmup.steps=1", "warmup.target_accuracy=null", "data.options.count=40",
    ...              "data.held_out=4",
    ...              "batch.prompts_per_step=2", "algorithm.group_size=2",
    ...              "model.options.hidden=32", "model.options.heads=1"]
    ...     outcome = run(load_config("letters", [*small, f"out={folder}/run"]), stream=io.StringIO())
    >>> outcome.steps, outcome.after.prompts
    (1, 4)
    """
    return Run(config, stream=stream, book=book).train()


def evaluate_model(config: Config, step: int = 0) -> Evaluation:
    """Evaluate the model of a configuration on its held-out prompts; nothing is trained or written.

    Args:
        config: What `rollbook train` takes.
        step: Training step of the weights. The samples equal those of a run's evaluation at that step.

    Raises:
        ConfigError: The configuration has no model, no held-out prompts, or nothing that scores them.
    """
    config.require()
    if config.rewards == () and not config.evaluation.rewards and config.environment.function is None:
        raise ConfigError("evaluation.rewards", "missing, expected a reward")
    device = builders.configure_torch(config)
    check(dataclasses.replace(config, tracking=TrackingSection()))
    _, held_out = builders.load_prompts(config)
    if held_out is None:
        raise ConfigError("data.held_out", "got 0, expected rows to evaluate on, or evaluation.data or function")
    actor = builders.build_actor(config, device)
    builders.check_prompts_readable(actor, held_out)
    reward = builders.build_reward(config.evaluation.rewards or config.rewards, actor, "rewards")
    settings, sampling = config.evaluation, _evaluation_sampling(config)
    options: dict[str, Any] = {"success": settings.success, "confidence": settings.confidence}
    with builders.build_engine(config, actor) as engine:
        if config.engine.kind == "vllm":
            engine.update_weights(actor, step)
        return evaluate(
            engine,
            held_out,
            reward,
            k=settings.k,
            sampling=sampling,
            environment=builders.build_environment(config, actor),
            step=step,
            seed=config.seed,
            **options,
        )


def _evaluation_sampling(config: Config) -> dict[str, Any]:
    """Return the sampling options of training with the changes of `evaluation`."""
    settings, sampling = config.evaluation, builders.build_sampling(config)
    for name in ("temperature", "top_p", "max_tokens"):
        if getattr(settings, name) is not None:
            sampling[name] = getattr(settings, name)
    if settings.greedy:
        sampling |= {"temperature": 0.0}
        sampling.pop("first_temperature", None)
    return sampling


def _list_files(folder: Path) -> list[Path]:
    """Return the files in a folder, without those that a run creates before its configuration."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in paths if path.name not in (_LOCK, _NEW_CONFIG))


def _is_due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


# --- output -----------------------------------------------------------------------------------------------------------


def _format_headline(
    config: Config, actor: Actor, prompts: Prompts, held_out: Prompts | None, device: torch.device
) -> str:
    size = sum(weight.numel() for weight in actor.parameters())
    trainable = sum(weight.numel() for weight in actor.parameters() if weight.requires_grad)
    trainable_note = "" if trainable == size else f", {_format_count(trainable)} of them trained"
    model = (
        f"{type(actor.model).__name__}, {_format_count(size)} parameters{trainable_note}, "
        f"{config.model.precision} on {device}"
    )
    rows = f"{len(prompts):,} to train on" + ("" if held_out is None else f", {len(held_out):,} held out")
    algorithm = config.algorithm
    recipe = (
        f"{algorithm.name}, {config.batch.prompts_per_step} prompts x {algorithm.group_size}"
        if algorithm.needs_rollouts
        else algorithm.name
    )
    lines = [("run", str(config.folder)), ("model", model), ("data", rows)]
    lines += [("algorithm", f"{recipe} a step, {config.steps} steps, seed {config.seed}")]
    return "\n".join(f"{name:<9} {text}" for name, text in lines)


def _format_count(number: int) -> str:
    for size, name in ((1e9, "B"), (1e6, "M")):
        if number >= size / 10:
            return f"{number / size:.2f}{name}"
    return f"{number:,}"


def summarize(outcome: RunResult, config: Config) -> list[str]:
    """Summarize a run in lines: success before and after, samples of both, and commands to inspect it.

    Args:
        outcome: The result of the run.
        config: Its configuration.
    """
    count = len(outcome.reports)
    if count == outcome.steps:
        lines = ["", f"{count} steps in {format_duration(outcome.seconds)}"]
    elif count:
        lines = ["", f"{count} steps in {format_duration(outcome.seconds)}, continuing a run: {outcome.steps} in all"]
    else:
        lines = ["", f"all {outcome.steps} steps were done before"]
    before, after = outcome.before, outcome.after
    if before is not None:
        lines.append(f"before    {before}")
    if after is not None:
        lines.append(f"after     {after}")
    if before is not None and after is not None:
        if before.reward_source == after.reward_source:
            change = compare_evaluations(before, after)
            interval = f"({change.low:+.3f} to {change.high:+.3f})"
            lines.append(f"change    {change.value:+.3f} {interval}, the same prompts compared")
        else:
            lines.append("change    not compared: the code of the reward was edited in between")
        lines += ["", *_format_samples(before, after)]
    for last in checkpoint.list_checkpoints(outcome.folder)[-1:]:
        # Without a final checkpoint, the weights are those of an earlier step.
        lines += ["", f"weights   {last.model}" + (f", of step {last.step}" if last.step < outcome.steps else "")]
    program, folder = shell_command(), shlex.quote(str(outcome.folder))
    source = shlex.quote(outcome.book) if "://" in outcome.book else folder
    lines += [f"book      {outcome.book}", f"look      {program} view {source}", f"          {program} doctor {source}"]
    if outcome.steps:
        trust = " --trust" if find_foreign_code(config) else ""
        lines.append(f"          {program} replay {folder} --step {outcome.steps}{trust}")
    return lines


def _format_samples(before: Evaluation, after: Evaluation, count: int = 2) -> list[str]:
    """Format prompts whose reward increased or decreased, `count` of each, with a sample of before and after."""
    first, last = ({row.eid.task: row for row in reversed(list(evaluation.records))} for evaluation in (before, after))
    both = [(first[task], last[task]) for task in last if task in first]
    changes = [(new.reward or 0.0) - (old.reward or 0.0) for old, new in both]
    lines: list[str] = []
    for title, chosen in (
        ("with a higher reward", [pair for pair, change in zip(both, changes, strict=True) if change > 0]),
        ("with a lower reward", [pair for pair, change in zip(both, changes, strict=True) if change < 0]),
    ):
        if not chosen:
            continue
        lines.append(f"{len(chosen)} of {len(both)} prompts {title}; the first:")
        for old, new in chosen[:count]:
            lines.append(f"  prompt  {_shorten(_question(old), end=True)}")
            lines += [
                f"  {name}  {_shorten(row.response_text)}   "
                + (f"reward {row.reward:g}" if row.reward is not None else "no reward")
                for name, row in (("before", old), ("after ", new))
            ]
            lines.append("")
    return lines[:-1]


def _question(record: Experience) -> str | list[Any] | None:
    """Return the text of a prompt, or the last message of a chat."""
    if not record.messages:
        return record.prompt_text
    questions = [message for message in record.messages if message.get("role") != "assistant"]
    return questions[-1].get("content") if questions else record.prompt_text


def _shorten(text: str | list[Any] | None, width: int = 90, end: bool = False) -> str:
    """Shorten a text to one line; `end` keeps its end, which has the question of a prompt."""
    line = " ".join(str(text or "").split())
    if len(line) <= width:
        return line
    return f"...{line[3 - width :]}" if end else f"{line[: width - 3]}..."
