"""What holds for every test: how hypothesis searches, how many threads, and what the garbage collector looks at.

Hypothesis has no deadline, since machines are shared and first calls load code; `--hypothesis-profile=quick` reports a
failure without taking minutes to make it small, and `--hypothesis-profile=long` tries ten times as many examples
wherever a test does not say how many.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from typing import NoReturn

import pytest
from hypothesis import Phase, settings

from benchmarks import peers

settings.register_profile("patient", deadline=None, max_examples=50)
settings.register_profile("quick", phases=(Phase.explicit, Phase.reuse, Phase.generate), deadline=None, max_examples=50)
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("patient")

# Read when torch is first imported, here and in the processes that tests start: at the sizes of tests, several threads
# only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Temporary folders in memory where there is room, and where programs may run from it: books and checkpoints are synced
# to disk thousands of times. What survives a power loss is tested on a simulated disk.
_MEMORY = "/dev/shm"
if (
    os.path.isdir(_MEMORY)
    and shutil.disk_usage(_MEMORY).free > 4 << 30
    and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests and the libraries they import stay to the end: a collector that goes over them again and again
    was a third of the time to collect them, and of many tests. What the tests themselves make is collected as ever."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_sessionfinish() -> None:
    """Some libraries look for what was never freed when the process ends."""
    gc.unfreeze()


def _skip_unsupported(*_: object) -> NoReturn:
    pytest.skip("verl and Trinity-RFT support Python up to 3.12")


if sys.version_info >= (3, 13):
    for name in ("verl", "trinity", "trinity_storage"):
        setattr(peers, name, _skip_unsupported)
