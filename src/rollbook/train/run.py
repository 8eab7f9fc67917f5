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
from typing import Any, TextIO
from urllib.parse import urlsplit

from rollbook.book.book import Book
from rollbook.book.book import open as open_book
from rollbook.book.disk import hit_failpoint
from rollbook.core.files import FILE, make_folder, private_opener
from rollbook.core.metrics import advise
from rollbook.models.loading import transformers_module
from rollbook.train import builders, checkpoint
from rollbook.train.builders import check_rewards
from rollbook.train.config.files import dump_config, load_config
from rollbook.train.config.schema import Config, TrackingSection, compare_configs
from rollbook.train.config.values import ConfigError
from rollbook.train.evaluation import Evaluation, compare_evaluations, evaluate, evaluate_records
from rollbook.train.prompts import Prompts
from rollbook.train.sft_warmup import Warmed, warm_up
from rollbook.train.tracker import METRICS_FILE, Display, WandbTracker, build_trackers, format_duration, shell_command
from rollbook.train.trainer import StepReport, Trainer
from rollbook.train.user_code import find_foreign_code, resolve

CONNECT_TIMEOUT = 10.0
"""Seconds in which a server must accept a connection."""


def check(config: Config) -> None:
    """Check rewards, engine, trackers and tokenizer.

    Raises:
        ConfigError: A package is missing, a reward cannot be called, the engine's server does not answer, or the
            tokenizer has tokens that the model does not.
    """
    check_rewards(config)
    _check_engine(config)
    _check_trackers(config)
    if config.model.path is not None or config.model.config is not None:
        _check_model_files(config)


def check_vocabulary(tokenizer: Any, model_config: Any, generation_config: Any = None) -> None:
    """Refuse a tokenizer that is larger than the model's vocabulary; warn if they end a text with different tokens."""
    if tokenizer is None or model_config is None:
        return
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    size = getattr(text, "vocab_size", None)
    try:
        count = len(tokenizer)
    except TypeError:
        return
    if size is not None and count > size:
        raise ConfigError("model.tokenizer", f"got one of {count} tokens, expected at most the model's {size}")
    end = getattr(tokenizer, "eos_token_id", None)
    for name, holder in (("model's config", text), ("generation config", generation_config)):
        ids = getattr(holder, "eos_token_id", None)
        ends = ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]
        if end is not None and ends and end not in ends:
            advise(
                f"model.tokenizer: it ends a text with token {end}, and the {name} with {', '.join(map(str, ends))}. "
                "Responses end at any of them"
            )


def _check_engine(config: Config) -> None:
    engine = config.engine
    if engine.kind == "transformers":
        return
    if engine.api_key_env is not None and os.environ.get(engine.api_key_env) is None:
        raise ConfigError("engine.api_key_env", f"got {engine.api_key_env!r}, which is not set in the environment")
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError("engine.kind", "got 'openai', which needs httpx: pip install 'rollbook[remote]'")
    try:
        address = urlsplit(str(engine.url))
        host, port = address.hostname or "", address.port or {"http": 80, "https": 443}[address.scheme]
    except ValueError as error:
        raise ConfigError("engine.url", f"got one that cannot be read: {error}") from None
    if any(os.environ.get(name) for name in ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "http_proxy",
                                             "https_proxy")):  # fmt: skip
        return  # the proxy reaches it, or not
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT).close()
    except OSError as error:
        raise ConfigError("engine.url", f"got a server at {host}:{port}, which does not answer: {error}") from None


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
    """Compare tokenizer and model by their configurations; what cannot be read is left to whoever loads it."""
    transformers = transformers_module()
    model = config.model
    words = model.tokenizer or model.processor or model.path
    if words is None:
        return
    generation = None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(words, trust_remote_code=False)
        if model.path is not None:
            model_config = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=False)
            if Path(model.path, "generation_config.json").is_file() or not Path(model.path).exists():
                generation = transformers.GenerationConfig.from_pretrained(model.path, trust_remote_code=False)
        else:
            model_config = transformers.AutoConfig.for_model(**(model.config or {}))
    except Exception:  # of the hub, of its libraries
        return
    check_vocabulary(tokenizer, model_config, generation)


CONFIG = "config.yaml"
BOOK = "book"
SOURCES = "rewards.json"
"""Fingerprints of the rewards' code that a run was last trained with."""
_LOCK = ".lock"
_NEW = f".{CONFIG}.new"


@dataclass
class Outcome:
    """What a run came to."""

    folder: Path
    steps: int
    seconds: float
    before: Evaluation | None = None
    after: Evaluation | None = None
    reports: list[StepReport] = field(default_factory=list)
    warmed: Warmed | None = None

    @property
    def book(self) -> Path:
        """The run's book."""
        return self.folder / BOOK


class Run:
    """A run under way: its folder, its parts, and what is printed of it."""

    def __init__(self, config: Config, *, stream: TextIO | None = None) -> None:
        config.require()
        self.config = config
        self.stream = sys.stderr if stream is None else stream
        self.folder = config.folder
        self.began = time.monotonic()
        self._held = contextlib.ExitStack()
        self._prompts: tuple[Prompts, Prompts | None] | None = None
        self._trainer: Trainer | None = None

    def say(self, text: str = "") -> None:
        """Print a line for whoever watches."""
        if self.config.tracking.display:
            print(text, file=self.stream, flush=True)

    # --- the folder ---------------------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Make the folder, or find a run in it; whether there is one to go on with."""
        folder, config_path = self.folder, self.folder / CONFIG
        if folder.exists() and not folder.is_dir():
            raise ConfigError("out", f"got {str(folder)!r}, which is a file, expected a folder")
        if _files(folder) and not config_path.is_file():
            if self.config.overwrite:
                raise ConfigError("overwrite", f"got true, and {folder} is no run's folder (it has no {CONFIG})")
            raise ConfigError("out", f"got {str(folder)!r}, which has files and is no run's folder, expected another")
        make_folder(folder)
        self._lock()
        if self.config.overwrite:
            # That it is a run's folder stays to be seen until all else is gone.
            for path in sorted(_files(folder), key=lambda file: file == config_path):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                hit_failpoint("overwriting")
        if config_path.is_file():
            if not self.config.resume:
                raise ConfigError("resume", f"got false, and {folder} has a run, expected overwrite or another folder")
            before = load_config(config_path)
            checkpoint.mend(folder)
            begun = bool(checkpoint.saved(folder))
            changed = any(not change.changeable for change in compare_configs(before, self.config))
            if changed and not begun and self._never_trained():
                # The first attempt ended in an error, and what was wrong is mended: none of it had an effect yet.
                shutil.rmtree(folder / BOOK, ignore_errors=True)
            else:
                self._same(before)
            if compare_configs(before, self.config):
                self._keep_config()
            return begun
        self._keep_config()
        return False

    def _never_trained(self) -> bool:
        """Whether the folder's book, if there is one, has nothing to learn from."""
        if not (self.folder / BOOK).exists():
            return True
        try:
            with open_book(self.folder / BOOK, mode="r") as book:
                return not book.counts().admitted
        except (OSError, ValueError):
            return False  # nobody knows

    def _lock(self) -> None:
        """Have the folder alone, until this process ends, by whatever death. The lock is a process's own: children that
        outlive it do not have it."""
        (self.folder / _LOCK).touch(FILE)
        file = self._held.enter_context((self.folder / _LOCK).open("a"))
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ConfigError(
                "out", f"got {str(self.folder)!r}, in which another process trains, expected another, or its end"
            ) from None
        except OSError as error:
            self.say(f"{self.folder}: its file system has no locks ({error}); let no other process train in it")

    def _keep_config(self) -> None:
        new = self.folder / _NEW
        # Whoever runs the kept file again wants to go on.
        with open(new, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(dump_config(dataclasses.replace(self.config, overwrite=False)))
        hit_failpoint("config written")
        os.replace(new, self.folder / CONFIG)

    def _same(self, before: Config) -> None:
        fixed = [change for change in compare_configs(before, self.config) if not change.changeable]
        if fixed:
            listed = "; ".join(map(str, fixed[:6])) + (f"; and {len(fixed) - 6} more" if len(fixed) > 6 else "")
            raise ConfigError(
                "resume",
                f"the run at {self.folder} has other settings: {listed}. Expected the same, another out, or "
                "overwrite: true",
            )

    # --- its course -----------------------------------------------------------------------------------------------

    def go(self) -> Outcome:
        """Run it to its end."""
        with self._held:
            if self.config.epochs is not None:
                self._prompts = builders.load_prompts(self.config)
                count = math.ceil(self.config.epochs * len(self._prompts[0]) / self.config.batch.prompts_per_step)
                self.config = dataclasses.replace(self.config, steps=count)
            try:
                outcome = self._gone() if self.prepare() else self._go(going_on=False)
            except KeyboardInterrupt:
                checkpoints = checkpoint.saved(self.folder)
                where = f"from {checkpoints[-1].path}" if checkpoints else "from the beginning"
                lost = 0 if self._trainer is None or not checkpoints else self._trainer.done - checkpoints[-1].step
                again = (
                    f", and does {lost} steps again (checkpoint.interval is {self.config.checkpoint.interval})"
                    if lost
                    else ""
                )
                self.say(f"\ninterrupted; the same command goes on {where}{again}")
                raise
        if self.config.tracking.display:
            self.say("\n".join(summary(outcome, self.config)))
        return outcome

    def _gone(self) -> Outcome:
        """A run that has begun: to its end, which it may have come to already."""
        last, steps = checkpoint.saved(self.folder)[-1], self.config.steps
        if last.step < steps:
            return self._go(going_on=True)
        before = f"{last.step} steps of the run at {self.folder} were done before"
        self.say(f"{before}, and steps is {steps}: there is nothing to do. A larger one goes on")
        outcome = Outcome(self.folder, last.step, 0.0)
        with open_book(self.folder / BOOK, mode="r") as book:
            outcome.before, outcome.after = self._evaluations(book, last.step)
        return outcome

    def _go(self, *, going_on: bool) -> Outcome:
        transformers_module().utils.logging.disable_progress_bar()  # they would tear the display apart
        device = builders.configure_torch(self.config)
        config = self.config
        check(config)
        actor = builders.build_actor(config, device)
        if config.model.builder is not None:
            check_vocabulary(
                actor.tokenizer, getattr(actor.model, "config", None), getattr(actor.model, "generation_config", None)
            )
        prompts, held_out = self._prompts or builders.load_prompts(config)
        builders.check_prompts_readable(actor, prompts)
        reward = judge = builders.build_reward(config.rewards, actor)
        if config.evaluation.rewards:
            judge = builders.build_reward(config.evaluation.rewards, actor, "evaluation.rewards")
        self._check_sources({"rewards": reward, "evaluation.rewards": judge}, going_on)
        self.say(_headline(config, actor, prompts, held_out, device))
        outcome = Outcome(self.folder, 0, 0.0)
        if config.warmup.steps and not going_on:
            # What counts in the evaluation says when it is over: runs that learn from other rewards begin alike.
            outcome.warmed = self._warm(actor, prompts, judge)
        models = builders.build_models(config, actor, device)
        with open_book(self.folder / BOOK, tokenizer=actor.tokenizer) as book:
            if not going_on and book.counts().admitted:
                raise ConfigError(
                    "out",
                    f"got {str(self.folder)!r}, whose book has records of training and which has no checkpoint that "
                    "they go with, expected another, or overwrite: true",
                )
            trainer = self._trainer = builders.build_trainer(config, models, prompts, reward, book)
            if trainer.resumed_from is not None:
                if (
                    models.reference is not None
                    and config.reference is None
                    and hasattr(models.reference, "state_dict")
                ):
                    first = checkpoint.saved(self.folder)[0]
                    if first.step:
                        raise ConfigError(
                            "reference",
                            f"missing, and the initial policy {first.path.with_name(checkpoint.name_of(0))} is gone",
                        )
                    checkpoint.load_weights(models.reference, first.model)
                self.say(f"going on after step {trainer.done}, from {checkpoint.saved(self.folder)[-1].path}")
            with self._tracked(trainer, going_on):
                self._train(trainer, held_out, judge, outcome)
            outcome.before, outcome.after = self._evaluations(book, trainer.done)
        outcome.steps, outcome.seconds = trainer.done, time.monotonic() - self.began
        return outcome

    def _check_sources(self, rewards: Mapping[str, Any], going_on: bool) -> None:
        """Keep the fingerprints of the rewards' code, and warn if a run goes on with other code."""
        sources = {key: None if reward is None else reward.source() for key, reward in rewards.items()}
        path = self.folder / SOURCES
        before = json.loads(path.read_text()) if going_on and path.is_file() else sources
        changed = [key for key, source in sources.items() if before.get(key) != source]
        if changed:
            advise(
                f"{changed[0]}: the code of the reward was edited since the run began. Its numbers before and after "
                "are not comparable; another out begins a new run"
            )
        aside = path.with_name(f".{SOURCES}.new")
        with open(aside, "w", opener=private_opener) as file:
            json.dump(sources, file)
        os.replace(aside, path)

    def _warm(self, actor: Any, prompts: Prompts, reward: Any) -> Warmed:
        config = self.config
        warmup = config.warmup.warmup_config()

        def told(step: int, loss: float, success: float | None) -> None:
            hit_failpoint("warming up")
            if success is not None or step == warmup.steps:
                share = "" if success is None else f", {success:.0%} of samples right".replace("%", " %")
                self.say(f"warm-up   step {step:>4}: loss {loss:.3f}{share}")

        cursor = prompts.state_dict()
        done = warm_up(
            actor,
            prompts,
            warmup,
            reward=reward,
            sampling=builders.build_sampling(config),
            seed=config.seed,
            precision=config.model.precision,
            token_budget=config.batch.token_budget,
            on_step=told,
        )
        prompts.load_state_dict(cursor)  # training goes through all rows from the first on
        return done

    @contextlib.contextmanager
    def _tracked(self, trainer: Trainer, going_on: bool) -> Iterator[None]:
        tracking = self.config.tracking
        if not going_on:
            (self.folder / METRICS_FILE).unlink(
                missing_ok=True
            )  # of a process that was killed before the first checkpoint
        names = [*(name for name in ("jsonl", "tensorboard") if getattr(tracking, name)), *tracking.trackers]
        after, settings = trainer.done if going_on else None, self.config.to_dict()
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

    def _train(self, trainer: Trainer, held_out: Prompts | None, reward: Any, outcome: Outcome) -> None:
        config = self.config
        judge = held_out if reward is not None or config.environment.function is not None else None
        if trainer.done == 0 and not checkpoint.saved(self.folder):
            if judge is not None and config.evaluation.before:
                self._evaluate(trainer, judge, reward)
            trainer.save()
        while trainer.done < config.steps:
            report = trainer.advance()
            outcome.reports.append(report)
            step = trainer.done
            last = step == config.steps
            if judge is not None and ((last and config.evaluation.after) or _due(step, config.evaluation.every)):
                self._evaluate(trainer, judge, reward)
            if (last and config.checkpoint.save_final) or _due(step, config.checkpoint.interval):
                trainer.save()

    def _evaluate(self, trainer: Trainer, held_out: Prompts, reward: Any) -> None:
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
        """The first and the last evaluation, from the book: an interrupted run has one half of them from before."""
        settings = self.config.evaluation
        evaluations = []
        for step in (0, done):
            records = list(book.where(evaluation=1, batch=f"eval-{step}"))
            options = {"success": settings.success, "confidence": settings.confidence, "step": step}
            evaluations.append(evaluate_records(records, **options) if records else None)  # type: ignore[arg-type]
        return evaluations[0], evaluations[1] if done else None


def run(config: Config, *, stream: TextIO | None = None) -> Outcome:
    """Train as a configuration says; what came of it.

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
    return Run(config, stream=stream).go()


def evaluate_model(config: Config, step: int = 0) -> Evaluation:
    """Evaluate the model of a configuration on its held-out prompts; nothing is trained or written.

    Args:
        config: What `rollbook train` takes.
        step: The step that the weights are of: the samples are those that a run's evaluation draws there.

    Raises:
        ConfigError: The configuration has no model, no held-out prompts, or nothing that scores them.
    """
    config.require()
    if config.rewards == () and not config.evaluation.rewards and config.environment.function is None:
        raise ConfigError("evaluation.rewards", "got none, expected what scores the answers")
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
    return evaluate(
        builders.build_engine(config, actor),
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
    """Sampling options of an evaluation: those of training, with what `evaluation` changes."""
    settings, sampling = config.evaluation, builders.build_sampling(config)
    for name in ("temperature", "top_p", "max_tokens"):
        if getattr(settings, name) is not None:
            sampling[name] = getattr(settings, name)
    if settings.greedy:
        sampling |= {"temperature": 0.0}
        sampling.pop("first_temperature", None)
    return sampling


def _files(folder: Path) -> list[Path]:
    """What lies in a folder, but for what a run puts there before its configuration."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in paths if path.name not in (_LOCK, _NEW))


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


# --- what is said ---------------------------------------------------------------------------------------------------


def _headline(config: Config, actor: Any, prompts: Prompts, held_out: Prompts | None, device: Any) -> str:
    size = sum(weight.numel() for weight in actor.parameters())
    learns = sum(weight.numel() for weight in actor.parameters() if weight.requires_grad)
    part = "" if learns == size else f", {_count(learns)} of them trained"
    model = f"{type(actor.model).__name__}, {_count(size)} weights{part}, {config.model.precision} on {device}"
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


def _count(number: int) -> str:
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size / 10:
            return f"{number / size:.2f} {name}"
    return f"{number:,}"


def summary(outcome: Outcome, config: Config) -> list[str]:
    """What a run changed, in lines: success before and after, samples of both, and how to look at all of it."""
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
        lines += ["", *_samples(before, after)]
    for last in checkpoint.saved(outcome.folder)[-1:]:
        # Without a last checkpoint these are older weights.
        lines += ["", f"weights   {last.model}" + (f", of step {last.step}" if last.step < outcome.steps else "")]
    program, folder = shell_command(), shlex.quote(str(outcome.folder))
    lines += [f"book      {outcome.book}", f"look      {program} view {folder}", f"          {program} doctor {folder}"]
    if outcome.steps:
        trust = " --trust" if find_foreign_code(config) else ""
        lines.append(f"          {program} replay {folder} --step {outcome.steps}{trust}")
    return lines


def _samples(before: Evaluation, after: Evaluation, count: int = 2) -> list[str]:
    """Prompts with the first sample of before and after: as many newly broken as newly solved, `count` of each."""
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
            lines.append(f"  prompt  {_short(_asked(old), end=True)}")
            lines += [
                f"  {name}  {_short(row.response_text)}   "
                + (f"reward {row.reward:g}" if row.reward is not None else "no reward")
                for name, row in (("before", old), ("after ", new))
            ]
            lines.append("")
    return lines[:-1]


def _asked(record: Any) -> Any:
    """What a record's prompt asks: of a chat the last message."""
    if not record.messages:
        return record.prompt_text
    questions = [message for message in record.messages if message.get("role") != "assistant"]
    return questions[-1].get("content") if questions else record.prompt_text


def _short(text: Any, width: int = 90, end: bool = False) -> str:
    """Shorten a text to one line; `end` keeps its end, where a prompt asks its question."""
    line = " ".join(str(text or "").split())
    if len(line) <= width:
        return line
    return f"...{line[3 - width :]}" if end else f"{line[: width - 3]}..."
