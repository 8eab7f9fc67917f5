"""Installing a program that tests need from the distribution, as root, only where `ROLLBOOK_TEST_APT=1` asks for it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

ENVIRONMENT = "ROLLBOOK_TEST_APT"
HINT = f"set {ENVIRONMENT}=1 to have the tests install it by apt-get, as root"


def apt_allowed() -> bool:
    """Whether tests may install packages."""
    return os.environ.get(ENVIRONMENT) == "1"


def install(package: str, *options: str) -> str:
    """Install a package of the distribution if that was asked for; return why it was not, or an empty string."""
    if not apt_allowed():
        return HINT
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"{ENVIRONMENT}=1 needs root and apt-get"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install_command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *options, package]
    with Path(tempfile.gettempdir(), "rollbook-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may come here at once
        failures = []
        for command in (["apt-get", "update", "-q"], install_command):
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
            if done.returncode:
                failures.append(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-400:]}")
    return "\n".join(failures) if done.returncode else ""
