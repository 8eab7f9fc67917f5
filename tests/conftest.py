"""What holds for every test: how hypothesis searches, how many threads, and what the garbage collector looks at.

Hypothesis has no deadline, since machines are shared and first calls load code; `--hypothesis-profile=quick` reports a
failure without taking minutes to make it small, and `--hypothesis-profile=long` tries ten times as many examples
wherever a test does not say how many.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

settings.register_profile("patient", deadline=None, max_examples=50)
settings.register_profile("quick", phases=(Phase.explicit, Phase.reuse, Phase.generate), deadline=None, max_examples=50)
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("patient")

# Read when torch is first imported, here and in the processes that tests start: at the sizes of tests, several threads
# only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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
