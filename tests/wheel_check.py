"""Check of the wheel in a clean virtual environment: its files, a short training run, `show` and the viewer.

    python -m tests.wheel_check

Not part of the test suite: it installs torch and transformers, which takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
# The source tree must not stand in for what the wheel lacks.
ENVIRONMENT = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
TIMEOUT = 1800.0
"""Seconds for each command."""


def run_command(command: Sequence[str | Path], folder: Path) -> str:
    """Run a command outside the source tree and return what it printed."""
    print("+", " ".join(map(str, command)), flush=True)
    finished = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if finished.returncode:
        raise SystemExit(f"exit status {finished.returncode}\n{finished.stdout}{finished.stderr}")
    return finished.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the sources: a stale `build/` would put deleted files into it."""
    sources = folder / "sources"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", sources / "src", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    run_command([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder / "dist", sources], folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def check_files(wheel: Path) -> None:
    """Check that the wheel has every file of the package and no other, and that its description has no broken link."""
    package = ROOT / "src" / "rollbook"
    expected = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    if relative := re.findall(r"\]\((?!https?://)([^)]*)\)", metadata):
        raise SystemExit(f"relative links in the description: {relative}")
    if packed != expected:
        raise SystemExit(f"missing: {sorted(expected - packed)}\nunexpected: {sorted(packed - expected)}")
    suffixes = {Path(name).suffix for name in packed}
    if not suffixes >= {".yaml", ".html", ".js", ".css"}:
        raise SystemExit(f"file types: got {sorted(suffixes)}, expected recipes and static files among them")
    print(f"{len(packed)} files, {wheel.stat().st_size / 1e6:.2f} MB", flush=True)


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Install the wheel with the pinned dependencies and return the folder of its commands."""
    venv.create(folder / "venv", with_pip=True)
    commands = folder / "venv" / "bin"
    constraints = ["-c", ROOT / "constraints.txt"]
    run_command([commands / "pip", "install", "--quiet", *constraints, f"{wheel}[train]"], folder)
    place = run_command([commands / "python", "-c", "import rollbook; print(rollbook.__file__)"], folder)
    if not Path(place.strip()).is_relative_to(folder / "venv"):
        raise SystemExit(f"rollbook is imported from {place.strip()}, expected the new environment")
    return commands


def check_viewer(commands: Path, folder: Path) -> None:
    """Start the viewer and fetch its page and every file the page links to."""
    run_command([commands / "rollbook", "view", "--help"], folder)
    command = [str(commands / "rollbook"), "view", "run", "--port", "0", "--json"]
    print("+", " ".join(command), flush=True)
    with subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as viewer:
        try:
            line = viewer.stdout.readline() if viewer.stdout is not None else ""
            url = json.loads(line)["url"].split("#")[0]
            page = fetch(url)
            links = re.findall(r'(?:href|src)="(static/[^"]+)"', page)
            if not links:
                raise SystemExit(f"the viewer's page links to no static file:\n{page}")
            sizes = {link: len(fetch(url + link)) for link in links}
            print(f"fetched {url}: {len(page)} characters, {sizes}", flush=True)
        finally:
            viewer.send_signal(signal.SIGINT)
    if viewer.returncode:
        raise SystemExit(f"rollbook view: exit status {viewer.returncode}")


def fetch(url: str) -> str:
    """Return the text of an address."""
    with urllib.request.urlopen(url, timeout=30) as response:
        text: str = response.read().decode()
    return text


def main() -> None:
    """Build, install and use the wheel."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        check_files(wheel)
        commands = install_wheel(wheel, folder)
        rollbook = commands / "rollbook"
        run_command([rollbook, "train", "letters", "steps=3", "warmup.steps=3", "--out", "run"], folder)
        if not json.loads(run_command([rollbook, "show", "run", "--json"], folder)):
            raise SystemExit("rollbook show: got nothing, expected the run")
        run_command([rollbook, "show", "run", "--step", "3"], folder)
        check_viewer(commands, folder)
    print("the wheel is complete")


if __name__ == "__main__":
    main()
