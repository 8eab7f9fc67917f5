"""One training step stays within its budget of files, functions, frames and paddings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rollbook
from tests.train.step_trace import MAX_FILES, MAX_FRAMES, MAX_FUNCTIONS, MAX_LAYOUTS, StepTrace, trace_step


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    return trace_step()


def test_files(trace: StepTrace) -> None:
    assert len(trace.files()) <= MAX_FILES


def test_functions(trace: StepTrace) -> None:
    assert trace.count_functions() <= MAX_FUNCTIONS


def test_frames(trace: StepTrace) -> None:
    assert trace.count_frames() <= MAX_FRAMES


def test_a_batch_is_padded_once_for_each_model_pass(trace: StepTrace) -> None:
    assert trace.count_layouts() <= MAX_LAYOUTS


def test_three_model_passes(trace: StepTrace) -> None:
    """Policy, reference and update: the counters see what they are for."""
    assert trace.count_passes() == 3 and trace.count_layouts() >= 3
    assert trace.deepest[0].co_qualname == "Trainer.step"


def test_a_step_does_not_load_compat() -> None:
    """In a process of its own, since other tests import `rollbook.compat`."""
    program = (
        "import sys\n"
        "from tests.train.step_trace import trace_step\n"
        "trace_step()\n"
        "print([name for name in sys.modules if name.startswith('rollbook.compat')])"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("package", ["core", "batch", "algorithms", "models", "book", "train"])
def test_no_inherited_names(package: str) -> None:
    """Names of LightRFT's batches stay in `rollbook.compat`."""
    inherited = re.compile(r"\b(action_log_probs|base_action_log_probs|Samples|num_actions)\b")
    files = sorted((Path(rollbook.__file__).parent / package).rglob("*.py"))
    assert files
    assert [str(file) for file in files if inherited.search(file.read_text())] == []
