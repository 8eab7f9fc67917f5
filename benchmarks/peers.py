"""Peers as released: installed by pip into a scratch folder on first use and imported from there.

The folder goes to the end of `sys.path`, so that both sides run on the same torch, pyarrow and datasets.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRINITY_VERSION = "0.6.0"
# Its experience module also needs torch, datasets and PyYAML (which datasets brings).
_TRINITY_NEEDS = (f"trinity-rft=={TRINITY_VERSION}", "omegaconf>=2.4", "safetensors>=0.5")

# What importing Ray takes; nothing here starts it.
_RAY_NEEDS = (
    "ray==2.60.0",
    *("attrs", "certifi", "charset-normalizer", "jsonschema", "jsonschema-specifications", "msgpack", "protobuf"),
    *("referencing", "requests", "rpds-py", "urllib3"),
)
# Its buffers also import Ray and SQLAlchemy, with an asynchronous driver of SQLite.
_TRINITY_STORAGE_NEEDS = (*_TRINITY_NEEDS, *_RAY_NEEDS, "sqlalchemy", "greenlet", "aiosqlite", "sortedcontainers")

VERL_VERSION = "0.9.1"
# `from verl import DataProto` needs Ray itself, and through it half of what Ray needs; transformers is here already.
# tensordict as verl asks for it; torchdata is what verl's trainer loads its data with.
_VERL_NEEDS = (
    f"verl=={VERL_VERSION}",
    "tensordict==0.10.0",
    "torchdata==0.11.0",
    *_RAY_NEEDS,
    *("cloudpickle", "codetiming", "omegaconf>=2.4", "pyvers"),
)

TRANSFER_QUEUE_VERSION = "0.1.11"
# It also needs Ray, torch, numpy, msgspec and psutil; tensordict as verl asks for it.
_TRANSFER_QUEUE_NEEDS = (
    f"TransferQueue=={TRANSFER_QUEUE_VERSION}",
    "tensordict==0.10.0",
    *_RAY_NEEDS,
    *("cloudpickle", "hydra-core", "importlib-metadata", "msgspec", "omegaconf>=2.4", "orjson", "prometheus-client"),
    *("psutil", "pyvers", "pyzmq"),
)

TRL_VERSION = "1.16.0"
# It also needs transformers and datasets, which are here already.
_TRL_NEEDS = (f"trl=={TRL_VERSION}", "accelerate==1.15.0", "psutil>=5.9.4")


def default_scratch() -> Path:
    """`ROLLBOOK_BENCH_DIR`, or `.bench` in the project root."""
    named = os.environ.get("ROLLBOOK_BENCH_DIR")
    return Path(named) if named else Path(__file__).resolve().parents[1] / ".bench"


def trinity(scratch: Path | None = None) -> Any:
    """The module `trinity.common.experience` of the released wheel, installed on first use."""
    _import("trinity", TRINITY_VERSION, _TRINITY_NEEDS, scratch)
    return importlib.import_module("trinity.common.experience")


def trinity_storage(scratch: Path | None = None) -> Any:
    """The package `trinity` with what its SQL storage and its queue import (270 MB, most of it Ray, never started)."""
    _import("trinity", TRINITY_VERSION, _TRINITY_STORAGE_NEEDS, scratch, tag="trinity-storage")
    names = ("common.experience", "common.config", "buffer.storage.sql", "buffer.storage.queue")
    for name in names:
        importlib.import_module(f"trinity.{name}")
    return sys.modules["trinity"]


def verl(scratch: Path | None = None) -> Any:
    """The package `verl` of the released wheel, installed on first use (270 MB, most of it Ray); no CUDA is needed."""
    return _import("verl", VERL_VERSION, _VERL_NEEDS, scratch)


def transfer_queue(scratch: Path | None = None) -> Any:
    """The package `transfer_queue` of the released wheel, installed on first use (most of it Ray)."""
    tag = "transfer-queue"
    return _import("transfer_queue", TRANSFER_QUEUE_VERSION, _TRANSFER_QUEUE_NEEDS, scratch, tag=tag)


def trl(scratch: Path | None = None) -> Any:
    """The package `trl` of the released wheel, installed on first use."""
    return _import("trl", TRL_VERSION, _TRL_NEEDS, scratch)


def _import(name: str, version: str, needs: tuple[str, ...], scratch: Path | None, tag: str | None = None) -> Any:
    tag = f"{tag or name}-{version}-{sys.implementation.cache_tag}"
    folder = _installed(scratch or default_scratch(), tag, needs)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    package = importlib.import_module(name)
    if package.__version__ != version:
        raise RuntimeError(f"the comparison is with {name} {version}, but {package.__version__} was imported")
    return package


def _installed(scratch: Path, name: str, requirements: tuple[str, ...]) -> Path:
    """The folder with the requirements in it: complete or absent, as it is renamed into place."""
    target = scratch / name
    if target.is_dir():
        return target
    scratch.mkdir(parents=True, exist_ok=True)
    with (scratch / f".{name}.lock").open("w") as lock:
        # Of several processes that want it at once, one installs and the others find it there.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return target if target.is_dir() else _install(scratch, target, requirements)


def _install(scratch: Path, target: Path, requirements: tuple[str, ...]) -> Path:
    ignore = scratch / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
    part = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=scratch))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    try:
        subprocess.run([*command, "--target", str(part), *requirements], check=True)
        part.rename(target)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            f"pip could not install {', '.join(requirements)}: the comparison needs them once, in {target}"
        ) from error
    finally:
        if part.exists():
            shutil.rmtree(part)
    return target
