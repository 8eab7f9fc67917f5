"""`rollbook rollout`: a rollout worker, anywhere that can reach the book of a trainer."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollbook.cli.run import resolve_book
from rollbook.core.terminal import OK, print_json

if TYPE_CHECKING:
    from rollbook.train.config import Config


_POLL_SECONDS = 1.0


def rollout(options: argparse.Namespace) -> int:
    """Generate rollouts for the trainer of a book until it has finished."""
    from rollbook.models.loading import transformers_module
    from rollbook.train.builders import build_worker
    from rollbook.train.config.values import expand_variables
    from rollbook.train.user_code import check_trusted
    from rollbook.train.worker import wait_for_trainer

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if options.parent is not None:
        threading.Thread(target=_end_with, args=(options.parent,), daemon=True).start()
    opened = wait_for_trainer(resolve_book(expand_variables(options.book, "--book")), stop, _say)
    if opened is None:
        return OK
    book, settings = opened
    with book:
        config = _configure(settings, options)
        if not options.trust:
            check_trusted(Path(book.url), dataclasses.replace(config, book=None), remote=True)
        if os.path.isdir(settings["folder"]):
            os.chdir(settings["folder"])  # paths of the configuration are relative to it
        transformers_module().utils.logging.disable_progress_bar()
        worker = build_worker(config, book, settings, options.name)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
        if stop.is_set():
            return OK
        _say(f"{worker.name}: generating rollouts for {book.url}")
        with worker.engine:
            result = worker.run()
    if options.json:
        print_json(vars(result))
    else:
        lost = f", {result.discarded} discarded" if result.discarded else ""
        _say(f"{worker.name}: {result.groups} groups, {result.records} samples{lost}, {result.updates} weight updates")
    return OK


def _end_with(parent: int) -> None:
    """End this process as SIGTERM does when its parent has ended: the next trainer starts workers of its own."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _configure(settings: dict[str, Any], options: argparse.Namespace) -> Config:
    """Return the trainer's configuration with the changes of the command line."""
    from rollbook.train.config import load_config

    changes = list(options.changes)
    if options.engine is not None:
        if "://" in options.engine:
            changes += ["engine.kind=vllm", f"engine.url=[{options.engine}]"]
        else:
            changes.append(f"engine.kind={options.engine}")
    if options.prompts is not None:
        changes.append(f"data.path={os.path.abspath(options.prompts)}")
    return load_config(settings["config"], changes)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
