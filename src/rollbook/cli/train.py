"""`rollbook train`, `rollbook rollout`, `rollbook eval` and `rollbook replay`.

Invariant: a configuration error is one line that names the key, reported before a model is loaded. With
`--json`, standard output has only JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollbook.cli.run import resolve_book
from rollbook.core.errors import RollbookError
from rollbook.core.terminal import FOUND, OK, UNREADABLE, columns, figure, print_json, printable, shorten, styled, table

if TYPE_CHECKING:
    from rollbook.train.config import Config
    from rollbook.train.step_replay import CounterfactualResult

_POLL_SECONDS = 1.0


def train(options: argparse.Namespace) -> int:
    """Train a configuration: a file or a recipe, with overrides."""
    from rollbook.train.config import dump_config, list_recipes, load_config

    if options.recipes:
        paths = list_recipes()
        if options.json:
            print(json.dumps(list(paths)))
        else:
            width = max(map(len, paths))
            for recipe, path in paths.items():
                print(f"{recipe:<{width}}  {path.read_text().partition(chr(10))[0].removeprefix('# ')}")
        return OK
    name: str | None = options.config
    changes = list(options.changes)
    if options.ray is not None and "=" in options.ray:  # `--ray steps=3`
        changes, options.ray = [options.ray, *changes], ""
    if name is not None and "=" in name:
        name, changes = None, [name, *changes]
    overrides: dict[str, Any] = {"out": options.out, "seed": options.seed, "steps": options.steps}
    changes += [f"{key}={value}" for key, value in overrides.items() if value is not None]
    config = load_config(name, [*changes, *(["overwrite=true"] if options.overwrite else [])])
    if options.show_config:
        print(json.dumps(config.to_dict()) if options.json else dump_config(config), end="\n" if options.json else "")
        return OK
    if options.ranks is not None and options.ray is None:
        if config.distributed == "none":
            raise ValueError(f"--ranks: got {options.ranks} with distributed: none, expected distributed=ddp or fsdp")
        _check_devices(options.ranks, config.device)
        arguments = [*([] if name is None else [name]), *changes, *(["--overwrite"] if options.overwrite else [])]
        return _launch(options.ranks, [*arguments, *(["--json"] if options.json else [])])
    from rollbook.train.checkpoint import RankError
    from rollbook.train.ray import train_on_ray
    from rollbook.train.run import run
    from rollbook.train.worker import TrainerReplacedError

    is_main = os.environ.get("RANK", "0") == "0"
    try:
        with _interrupted_by_sigterm():
            if options.ray is not None:
                summary = train_on_ray(config, options.ray or None, ranks=options.ranks or 1)
                if options.json:
                    print(json.dumps(summary))
                return OK
            outcome = run(config)
    except RollbookError as error:
        if isinstance(error, (ValueError, OSError)):
            raise  # of a configuration, a file or a book
        if isinstance(error, RankError) and not is_main:
            return UNREADABLE  # rank 0 prints it
        # Continuing would replace the other trainer.
        hint = (
            "" if isinstance(error, TrainerReplacedError) else " (the same command continues from the last checkpoint)"
        )
        raise ValueError(f"{error}{hint}") from error
    if options.json and is_main:
        print(json.dumps(outcome.to_dict()))
    return OK


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does: schedulers send it before they kill."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    is_terminated = False

    def interrupt(*_: object) -> None:
        nonlocal is_terminated
        is_terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would interrupt the clean-up
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if is_terminated:  # Ray replaces the exception, so that it cannot carry the signal
            raise KeyboardInterrupt(signal.SIGTERM) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def _check_devices(ranks: int, device: str) -> None:
    """Check that every rank gets a GPU of its own, if they run on GPUs."""
    import torch

    count = torch.cuda.device_count()
    if 0 < count < ranks and device.startswith(("auto", "cuda")):
        raise ValueError(f"--ranks: got {ranks} with {count} CUDA devices, expected at most {count}, or device=cpu")


def _launch(ranks: int, arguments: list[str]) -> int:
    """Run `rollbook train` on several ranks of this machine, as torchrun does."""
    import logging
    import uuid

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks print their errors themselves
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(launch, sys.executable)("-m", "rollbook", "train", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"rollbook train: rank {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
        return UNREADABLE
    except SignalException as error:
        raise KeyboardInterrupt(int(error.sigval)) from None
    return OK


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate a model on the held-out prompts of a configuration."""
    from rollbook.models.loading import transformers_module
    from rollbook.train import checkpoint
    from rollbook.train.config import load_config
    from rollbook.train.run import CONFIG_FILE, evaluate_model
    from rollbook.train.tracker import format_evaluation
    from rollbook.train.user_code import check_trusted

    config, model, step = Path(options.config), options.model, 0
    if (config / CONFIG_FILE).is_file():
        checkpoints = checkpoint.list_checkpoints(config)
        if model is None and checkpoints:
            model, step = str(checkpoints[-1].model), checkpoints[-1].step
        if not options.trust:
            check_trusted(config, load_config(config / CONFIG_FILE), remote=True)
        config = config / CONFIG_FILE
    changes = [*options.changes, *([] if model is None else [f"model.path={model}"])]
    if model is not None and (Path(model) / "adapter_config.json").is_file():
        changes.append("model.lora=null")  # the folder has the trained adapters
    transformers_module().utils.logging.disable_progress_bar()
    evaluation = evaluate_model(load_config(config, changes), step)
    if options.json:
        print_json(evaluation.metrics())
    else:
        print(f"{printable(model or 'the model of the configuration')}: {format_evaluation(evaluation.metrics())}")
    return OK


_VERDICT_STYLES = {
    "same": ("green",),
    "differs by rounding": ("yellow",),
    "differs": ("bold", "red"),
    "not compared": ("dim",),
}


def replay(options: argparse.Namespace) -> int:
    """Recompute a step of a run and compare it with the recorded one."""
    import warnings

    from rollbook.models.loading import transformers_module
    from rollbook.train.step_replay import replay as replay_step

    transformers_module().utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the run has printed these already
        outcome = replay_step(options.path, options.step, options.changes, trust=options.trust)
    if options.json:
        print_json(outcome.to_dict())
        return OK if outcome.agrees else FOUND
    source = f"{outcome.records:,} records, from {outcome.checkpoint}"
    print(styled(f"{printable(str(outcome.folder))}, step {outcome.step}", "bold") + f": {source}")
    rows = [
        [
            printable(check.quantity),
            *map(_format_value, (check.recorded, check.recomputed, check.difference)),
            check.verdict,
        ]
        for check in outcome.checks
    ]
    print()
    for i, line in enumerate(table(("", "recorded", "computed", "difference", "verdict"), rows, right=(1, 2, 3))):
        verdict = outcome.checks[i - 1].verdict if i else ""
        print(
            line[: -len(verdict)] + styled(verdict, *_VERDICT_STYLES[verdict]) if i and line.endswith(verdict) else line
        )
    count = Counter(check.verdict for check in outcome.checks)
    others = [f"{count[name]} {name}" for name in ("differs by rounding", "not compared") if count[name]]
    more = f" ({', '.join(others)})".replace("differs ", "") if others else ""
    notes = [f"{check.quantity}: {check.note}" for check in outcome.checks if check.note] + outcome.notes
    print()
    for text in notes:
        print(f"- {printable(text)}")
    print(f"- tolerance: {outcome.tolerance}")
    if outcome.agrees:
        print(styled(f"All values match{more}.", "bold", "green"))
    else:
        print(styled(f"{count['differs']} of {len(rows)} values differ{more}.", "bold", "red"))
    if outcome.changed is not None:
        _print_changed(outcome.changed)
    return OK if outcome.agrees else FOUND


def _format_value(value: float | str | None) -> str:
    return printable(value) if isinstance(value, str) else figure(value, 6)


def _print_changed(changed: CounterfactualResult) -> None:
    print()
    for text in changed.changes:
        print(styled(f"with {printable(text)}", "bold"))
    print()
    rows = [
        [printable(name), _format_value(old), _format_value(new), _format_difference(old, new)]
        for name, (old, new) in changed.numbers.items()
    ]
    for line in table(("", "trained", "changed", "difference"), rows, right=(1, 2, 3)):
        print(line)
    print()
    if changed.rows:
        correlation = "" if changed.correlation is None else f"; correlation {figure(changed.correlation)}"
        print(f"{changed.signs} of {changed.rows} advantages change sign{correlation}")
    cosine = "-" if changed.cosine is None else figure(changed.cosine, 4)
    print(f"cosine similarity of the weight updates: {cosine}")
    for text in changed.notes:
        print(f"- {printable(text)}")
    if not changed.moved:
        return
    print(styled("\nlargest changes of advantages", "bold"))
    names = ("", "advantage", "changed", "reward", "changed", "prompt")
    rows = [
        [
            printable(move.uid),
            *map(figure, (*move.advantage, *move.reward)),
            shorten(printable(move.prompt), max(20, columns() // 3)),
        ]
        for move in changed.moved
    ]
    for line in table(names, rows, right=(1, 2, 3, 4)):
        print(line)


def _format_difference(old: float | None, new: float | None) -> str:
    return "-" if old is None or new is None else figure(new - old, 6)


def rollout(options: argparse.Namespace) -> int:
    """Generate rollouts for the trainer of a book until it has finished."""
    from rollbook.models.loading import transformers_module
    from rollbook.rollout.engine import WeightSyncError
    from rollbook.train.builders import build_worker
    from rollbook.train.config.values import expand_variables
    from rollbook.train.user_code import check_trusted
    from rollbook.train.worker import wait_for_trainer

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if options.parent is not None:
        threading.Thread(target=_exit_with_parent, args=(options.parent,), daemon=True).start()
    opened = wait_for_trainer(resolve_book(expand_variables(options.book, "--book")), stop, _log)
    if opened is None:
        return OK
    book, settings = opened
    with book:
        config, overridden = _configure(settings, options)
        if not options.trust:
            check_trusted(Path(book.url), dataclasses.replace(config, book=None), remote=True, trusted=overridden)
        if os.path.isdir(settings["folder"]):
            os.chdir(settings["folder"])  # paths of the configuration are relative to it
        transformers_module().utils.logging.disable_progress_bar()
        worker = build_worker(config, book, settings, options.name)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
        if stop.is_set():
            return OK
        _log(f"{worker.name}: generating rollouts for {book.url}")
        try:
            with worker.engine:
                result = worker.run()
        except WeightSyncError as error:
            raise ValueError(str(error)) from error
    if options.json:
        print_json(vars(result))
    else:
        lost = f", {result.discarded} discarded" if result.discarded else ""
        _log(f"{worker.name}: {result.groups} groups, {result.records} samples{lost}, {result.updates} weight updates")
    return OK


def _exit_with_parent(parent: int) -> None:
    """End this process as SIGTERM does when its parent has ended: the next trainer starts workers of its own."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


_WORKER_KEYS = ("data", "device", "engine", "model", "threads", "rollout.claim_seconds", "rollout.prompts_per_claim")
"""Keys and sections that a worker may change: checks compare its prompts and its weights with the trainer's."""


def _configure(settings: dict[str, Any], options: argparse.Namespace) -> tuple[Config, set[str]]:
    """Return the trainer's configuration with the changes of the command line, and the keys that these set."""
    from rollbook.train.config import load_config
    from rollbook.train.config.files import parse_arguments
    from rollbook.train.config.schema import compare_configs
    from rollbook.train.config.values import ConfigError

    changes = list(options.changes)
    if options.engine is not None:
        if "://" in options.engine:
            changes += ["engine.kind=vllm", f"engine.url=[{options.engine}]"]
        else:
            changes.append(f"engine.kind={options.engine}")
    if options.prompts is not None:
        changes.append(f"data.path={os.path.abspath(options.prompts)}")
    config = load_config(settings["config"], changes)
    for difference in compare_configs(load_config(settings["config"]), config):
        if not any(difference.path == name or difference.path.startswith(f"{name}.") for name in _WORKER_KEYS):
            raise ConfigError(
                difference.path, f"cannot differ from the trainer's; a worker can change {', '.join(_WORKER_KEYS)}"
            )
    return config, set(_leaf_keys(parse_arguments(changes).values))


def _leaf_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all values that are not mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaf_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
