"""Peers as released: installed by pip into a scratch folder on first use and imported from there.

The folder goes to the end of `sys.path`, so that both sides run on the same torch, pyarrow and datasets.
"""

from __future__ import annotations

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


def default_scratch() -> Path:
    """`ROLLBOOK_BENCH_DIR`, or `.bench` in the project root."""
    named = os.environ.get("ROLLBOOK_BENCH_DIR")
    return Path(named) if named else Path(__file__).resolve().parents[1] / ".bench"


def trinity(scratch: Path | None = None) -> Any:
    """The module `trinity.common.experience` of the released wheel, installed on first use."""
    tag = f"trinity-{TRINITY_VERSION}-{sys.implementation.cache_tag}"
    folder = _installed(scratch or default_scratch(), tag, _TRINITY_NEEDS)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    found = importlib.import_module("trinity").__version__
    if found != TRINITY_VERSION:
        raise RuntimeError(f"the comparison is with Trinity-RFT {TRINITY_VERSION}, but {found} was imported")
    return importlib.import_module("trinity.common.experience")


def _installed(scratch: Path, name: str, requirements: tuple[str, ...]) -> Path:
    """The folder with the requirements in it: complete or absent, as it is renamed into place."""
    target = scratch / name
    if target.is_dir():
        return target
    scratch.mkdir(parents=True, exist_ok=True)
    ignore = scratch / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
    part = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=scratch))
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
