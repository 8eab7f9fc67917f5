"""No input takes more than twice what it states plus 64 MiB, or longer than its size deserves."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import pytest

from tests.attacks.bombs import SECONDS, bombs
from tests.attacks.outcome import ROOT, SPARE, in_child


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.attacks.bombs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS * 10, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_costs_no_more_than_it_states(name: str, measured: dict[str, dict[str, Any]]) -> None:
    result = measured[name]
    assert "error" not in result, result["error"]
    allowed = 2 * result["stated"] + SPARE
    if name.startswith("pickled"):
        # A pickle states no size, and a byte of it may well be an object: the reader allows itself 64 MiB and 16 bytes
        # for each byte of the payload.
        allowed += 16 * result["size"] + SPARE
    assert result["peak"] <= allowed, f"{result['size']} bytes took {result['peak'] >> 20} MiB"
    # A second for each ten megabytes, of the input or of what it states, and what a busy machine adds.
    assert result["seconds"] < 5 + (result["size"] + result["stated"]) / 10e6


STARVED = """
import resource
from rollbook import WireError, wire
from tests.attacks import corpus

parts = corpus.take_apart(corpus.frames()["minimal.zstd"])
wire.decode(parts.join())
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
try:
    wire.decode(parts.join(decoded=15 << 30), limits=wire.Limits(max_ratio=1 << 40))
except WireError as error:
    print("refused:", error)
"""


def test_a_stated_size_that_the_machine_has_not_got_is_refused() -> None:
    assert in_child(STARVED).startswith("refused: ")
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY, "the limit was set in this process"
