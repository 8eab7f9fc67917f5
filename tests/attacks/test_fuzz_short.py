"""A short run of the fuzzer with every test run; `make fuzz` is the long one."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks import fuzz
from tests.attacks.outcome import ROOT


def test_inputs_follow_from_the_seed_and_are_what_they_should_be() -> None:
    first, same_seed, other_seed = fuzz.Inputs(20), fuzz.Inputs(20), fuzz.Inputs(21)
    cases = [first.make(number) for number in range(1000)]
    assert all(case.data == same_seed.make(number).data for number, case in enumerate(cases[:200]))
    assert not all(case.data == other_seed.make(number).data for number, case in enumerate(cases[:200]))
    assert len({case.data for case in cases}) > 0.9 * len(cases)
    kinds = collections.Counter((case.recomputed, case.foreign) for case in cases)
    assert kinds[True, False] > len(cases) / 2, "half of all inputs must reach the Arrow reader"
    assert sum(count for (_, foreign), count in kinds.items() if foreign) > len(cases) / 10


SEED, COUNT = 20, 1000
HARMS = {
    3: ("os.system('true')", "os.system"),
    5: ("__import__('antigravity')", "import"),
    7: ("open('made_by_a_test', 'w')", "open"),
    9: ("exec('1')", "compile"),
    15: ("ctypes.string_at(0)", "ended by SIGSEGV"),
    # From here on under python -O.
    501: ("bytearray(b'1') * (200 << 20)", "MiB"),
    503: ("raise ValueError('no WireError')", "no WireError"),
    505: ("raise WireError('')", "no plain WireError"),
    507: ("os.system('true')", "os.system"),
    515: ("time.sleep(1000)", "did not come to an end"),
}


SCRIPT = """
import ctypes, os, sys, time
from rollbook import WireError
from tests.attacks import fuzz, outcome

fuzz.Campaign.PATIENCE = 16.0
plain, start = fuzz.read, fuzz.subprocess.Popen

def harm(number):
{harms}

def read(case, number):
    if case.change != "warm-up":
        outcome.judged(lambda: harm(number))
    return plain(case, number)

def popen(command, **options):
    at = command.index("-m")  # a child runs this file too
    return start([*command[:at], __file__, *command[at + 2 :]], **options)

fuzz.read, fuzz.subprocess.Popen = read, popen
if __name__ == "__main__":
    sys.exit(fuzz.main())
"""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run of which some inputs are made to do harm: its output, and the folder of the inputs that failed.

    The seed is fixed: the same inputs every time, so that a failure comes from the change that was made.
    """
    folder = tmp_path_factory.mktemp("harm")
    lines = [f"    if number == {number}: {source}" for number, (source, _) in HARMS.items()]
    (folder / "harm.py").write_text(SCRIPT.format(harms="\n".join(lines)))
    command = [sys.executable, str(folder / "harm.py"), "--frames", str(COUNT), "--seed", str(SEED), "--jobs", "2"]
    done = subprocess.run(
        [*command, "--save", str(folder / "saved")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, folder / "saved"


def test_of_a_thousand_inputs_only_those_that_do_harm_fail(campaign: tuple[str, Path]) -> None:
    output, saved = campaign
    assert f"{COUNT} inputs" in output
    assert f" {len(HARMS)} failures" in output
    assert {path.stem for path in saved.iterdir()} == {f"{SEED}-{number}" for number in HARMS}, output


@pytest.mark.parametrize("number", HARMS)
def test_the_fuzzer_sees_what_it_is_there_to_see(number: int, campaign: tuple[str, Path]) -> None:
    """A fuzzer that sees no harm would report no failures either."""
    _, saved = campaign
    assert HARMS[number][1] in (saved / f"{SEED}-{number}.txt").read_text()
    assert (saved / f"{SEED}-{number}.bin").read_bytes() == fuzz.Inputs(SEED).make(number).data
