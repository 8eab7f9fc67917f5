"""`code_match`: how many of a task's test cases the program in a response passes, run in the sandbox.

Invariant: a program is judged by what it does, from outside the process it runs in where the test is one of input and
output; a program that breaks, hangs, floods or ends early fails its case and nothing else.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollbook.core.checks import check_bool, check_float
from rollbook.rewards.sandbox import Limits, run_sandboxed

# Bounded spaces: without a bound, a fence before a page of blanks takes quadratic time.
_FENCE = re.compile(r"```[ \t]{0,16}(?:python3?|py|Python)?[ \t]{0,16}\n(.*?)(?:```|\Z)", re.DOTALL)
_LONGEST = 1 << 20
"""Characters at the end of a response in which a program is looked for."""


def extract_program(text: str) -> str:
    r"""The program in a response: its last fenced block (three back ticks; one left open counts), else all of it.

    Only the last 1,048,576 characters count.

    >>> extract_program("Here:\n```python\nprint(1)\n```\nDone.")
    'print(1)\n'
    """
    text = text[-_LONGEST:]
    blocks = _FENCE.findall(text)
    return str(blocks[-1]) if blocks else text


@dataclass(frozen=True)
class ProgramTests:
    """A task's tests: pairs of input and output, or statements (`assert f(1) == 2`) that must not raise.

    >>> ProgramTests.of({"inputs": ["1 2"], "outputs": ["3"]})
    ProgramTests(pairs=(('1 2', '3'),), statements=())
    >>> ProgramTests.of(["assert f(1) == 2"]).statements
    ('assert f(1) == 2',)
    """

    pairs: tuple[tuple[str, str], ...] = ()
    statements: tuple[str, ...] = ()

    @classmethod
    def of(cls, reference: Any) -> ProgramTests:
        """From {"inputs": [...], "outputs": [...]}, a list of {"input", "output"} or of statements, {"tests": ...}, or
        the JSON text of one of these."""
        if isinstance(reference, str):
            try:
                reference = json.loads(reference)
            except ValueError:
                reference = [reference]  # one statement, or a page of them
        if isinstance(reference, Mapping) and "inputs" in reference and "outputs" in reference:
            if len(reference["inputs"]) != len(reference["outputs"]):
                raise ValueError(
                    f"tests: got {len(reference['inputs'])} inputs and {len(reference['outputs'])} outputs"
                )
            reference = [
                {"input": i, "output": o} for i, o in zip(reference["inputs"], reference["outputs"], strict=True)
            ]
        elif isinstance(reference, Mapping):
            reference = reference.get("tests", [reference])
        if isinstance(reference, str):
            reference = [reference]
        if not isinstance(reference, Sequence) or not reference:
            raise ValueError(f"tests: got {type(reference).__name__}, expected inputs and outputs, or statements")
        pairs, statements = [], []
        for i, entry in enumerate(reference):
            if isinstance(entry, str):
                statements.append(entry)
            elif isinstance(entry, Mapping) and "input" in entry and "output" in entry:
                pairs.append((_text(entry["input"]), _text(entry["output"])))
            else:
                raise ValueError(f"tests[{i}]: got {str(entry)[:80]}, expected a statement, or input and output")
        return cls(tuple(pairs), tuple(statements))


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


_CHECKER = """
import os, sys

def main():
    key, place = sys.stdin.readline().strip(), int(sys.argv[1])
    with open("tests.json", encoding="utf-8") as file:
        import json
        tests = json.load(file)
    with open("main.py", encoding="utf-8", newline="") as file:
        source = file.read()
    sys.stdin = open(os.devnull)
    names = {"__name__": "solution", "__builtins__": __builtins__}
    exec(compile(source, "main.py", "exec"), names)
    os.write(place, f"{key} loaded\\n".encode())
    for i, test in enumerate(tests):
        try:
            exec(compile(test, f"test {i}", "exec"), dict(names))
        except BaseException as error:
            print(f"test {i}: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            os.write(place, f"{key} {i}\\n".encode())

main()
"""


def code_match(
    response: str,
    reference: Any,
    *,
    limits: Limits | None = None,
    time_limit: float = 50.0,
    tolerance: float | None = None,
    all_or_nothing: bool = False,
    python: str | None = None,
) -> dict[str, float]:
    r"""Run the response's Python program and return the share of the tests that it passes.

    With input and output, the program runs once per pair and must print the expected text, up to space at the ends of
    lines. Statements run after the program, in one process, each with its own copy of the program's names. A program
    cannot pass a test of input and output except by printing what is expected. With statements it runs in the process
    that judges it: ending early does not pass, but a program that searches for the key that reports a pass finds it.

    Args:
        response: Text with the program.
        reference: The tests, see `ProgramTests`.
        limits: Limits of each run; by default 10 s and 512 MiB. See `run_sandboxed` for what the sandbox isolates.
        time_limit: Seconds for all tests; tests that are not finished by then fail.
        tolerance: Compare numbers in the output as numbers.
        all_or_nothing: 1 only if all tests pass.
        python: Another interpreter.

    Returns:
        `reward`, and the counts `passed`, `cases` and `timed_out`.

    >>> code_match("```python\nprint(sum(map(int, input().split())))\n```", {"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]})
    {'reward': 0.5, 'passed': 1.0, 'cases': 2.0, 'timed_out': 0.0}
    >>> code_match("def double(x):\n    return 2 * x", ["assert double(2) == 4", "assert double('a') == 'aa'"])["reward"]
    1.0
    """  # noqa: E501
    cases = ProgramTests.of(reference)
    check_bool("all_or_nothing", all_or_nothing)
    if tolerance is not None:
        check_float("tolerance", tolerance, 0, 1)
    deadline = time.monotonic() + check_float("time_limit", time_limit, 0.1, 1e6)
    limits = limits if limits is not None else Limits()
    source = extract_program(response)
    passed = late = 0
    for text, expected in cases.pairs:
        left = _remaining_limits(limits, deadline)
        if left is None:
            late += 1
            continue
        stdin = text.encode("utf-8", "surrogatepass")
        ran = run_sandboxed({"main.py": source}, ["main.py"], stdin=stdin, limits=left, python=python)
        late += ran.timed_out
        output = ran.stdout.decode("utf-8", "replace")
        passed += ran.code == 0 and not ran.flooded and _same_output(output, expected, tolerance)
    left = _remaining_limits(limits, deadline)
    if cases.statements and left is None:
        late += 1
    elif cases.statements:
        # The key is a secret of this run's: a line without it is not the checker's.
        key = secrets.token_hex(16)
        files = {"main.py": source, "tests.json": json.dumps(cases.statements), "check.py": _CHECKER}
        ran = run_sandboxed(files, ["check.py"], stdin=f"{key}\n".encode(), limits=left, python=python, side=True)
        late += ran.timed_out
        lines = set(ran.side.decode("ascii", "replace").splitlines())
        passed += sum(f"{key} {i}" in lines for i in range(len(cases.statements)))
    total = len(cases.pairs) + len(cases.statements)
    share = float(passed == total) if all_or_nothing else passed / total
    return {"reward": share, "passed": float(passed), "cases": float(total), "timed_out": float(late)}


def _remaining_limits(limits: Limits, deadline: float) -> Limits | None:
    """The limits of the next run, with no more time than is left; `None` if there is none."""
    left = deadline - time.monotonic()
    return None if left < 0.05 else replace(limits, wall=min(limits.wall, left))


def _same_output(output: str, expected: str, tolerance: float | None) -> bool:
    ours, theirs = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    if ours == theirs:
        return True
    if tolerance is None or len(ours) != len(theirs):
        return False
    for line, other in zip(ours, theirs, strict=True):
        words, others = line.split(), other.split()
        if len(words) != len(others) or not all(map(_near(tolerance), words, others)):
            return False
    return True


def _near(tolerance: float) -> Any:
    def near(word: str, other: str) -> bool:
        if word == other:
            return True
        try:
            a, b = float(word), float(other)
        except ValueError:
            return False
        return abs(a - b) <= tolerance * max(1.0, abs(b))

    return near
