"""Trace of one `Trainer.step()`: source files, functions, calls and depth of frames of the package, paddings.

    python -m tests.train.step_trace

The step is GRPO with KL in the loss on a one-layer Llama, with a book in a folder: eight samples, one update, after one
step that is not traced.
Comprehensions count as functions and frames on Python 3.11; later versions inline most of them.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import rollbook
from rollbook.train.trainer import Trainer
from tests.train.preset_steps import build_trainer, reproducible

PACKAGE = str(Path(rollbook.__file__).parent) + "/"

MAX_FILES, MAX_FUNCTIONS, MAX_FRAMES, MAX_LAYOUTS = 58, 600, 14, 3
"""Targets of one step. There is one layout (padding or packing) per model pass: policy, reference, update."""

MODEL_PASSES = ("token_stats",)
"""Functions that run a model over a batch, by name; decoding is not among them."""
LAYOUTS = {"batch/batch.py": ("from_records", "pack", "pad")}
"""Functions that pad or pack a batch, by file."""


@dataclass
class StepTrace:
    """Calls of the package's functions in one step."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    """Calls of each function; every resumption of a generator counts."""
    stacks: dict[tuple[CodeType, ...], list[CodeType]] = field(default_factory=dict)
    """The deepest of the stacks of the package's frames that begin with the same three, `Trainer.step` first."""
    callers: dict[CodeType, Counter[str]] = field(default_factory=dict)
    """Package frames that called a padding, a packing or a model pass."""

    def files(self) -> dict[str, Counter[str]]:
        """Return the calls of each function by file and qualified name."""
        files: dict[str, Counter[str]] = {}
        for code, count in self.calls.items():
            files.setdefault(path_of(code), Counter())[code.co_qualname.replace("<locals>.", "")] += count
        return files

    @property
    def deepest(self) -> list[CodeType]:
        """The deepest stack of all."""
        return max(self.stacks.values(), key=len)

    def count_functions(self) -> int:
        """Count the distinct functions, comprehensions included."""
        return sum(len(functions) for functions in self.files().values())

    def count_frames(self) -> int:
        """Count the frames of the deepest stack, `Trainer.step` included."""
        return len(self.deepest)

    def count_layouts(self) -> int:
        """Count the batches that are padded or packed."""
        return sum(count for code, count in self.calls.items() if code.co_name in LAYOUTS.get(path_of(code), ()))

    def count_passes(self) -> int:
        """Count the model passes over batches."""
        return sum(count for code, count in self.calls.items() if code.co_name in MODEL_PASSES)


def path_of(code: CodeType) -> str:
    """Return a function's file within the package."""
    return code.co_filename.removeprefix(PACKAGE)


def trace_calls(function: Callable[[], Any]) -> StepTrace:
    """Call a function and trace the frames of the package, with that of the function as the first."""
    trace = StepTrace()
    stack: list[CodeType] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            trace.calls[code] += 1
            stack.append(code)
            stage = tuple(stack[:3])
            if len(stack) > len(trace.stacks.get(stage, ())):
                trace.stacks[stage] = stack.copy()
            if code.co_name in MODEL_PASSES or code.co_name in LAYOUTS.get(path_of(code), ()):
                names = [path_of(caller) + ":" + caller.co_qualname for caller in stack[-5:-1]]
                trace.callers.setdefault(code, Counter())[" > ".join(names)] += 1
        elif event == "return":
            stack.pop()

    # Finalizers run when the collector does, which is not the step's doing.
    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return trace


def trace_step() -> StepTrace:
    """Trace the second step of a trainer."""
    with reproducible(), TemporaryDirectory() as folder:
        book = rollbook.open(Path(folder) / "book")
        trainer: Trainer = build_trainer(
            "grpo", Path(folder), book=book, group_size=4, kl_coef=0.1, batch={"minibatches": 1}
        )
        trainer.step()
        trace = trace_calls(trainer.step)
        book.close()
        return trace


def main() -> None:
    """Print the numbers, the functions of each file and the deepest stack."""
    trace = trace_step()
    files = trace.files()
    print("functions and calls by file:")
    for path, functions in sorted(files.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        print(f"  {path}: {len(functions)} functions, {functions.total()} calls: {', '.join(sorted(functions))}")
    print("deepest stacks:")
    for stack in sorted(trace.stacks.values(), key=len):
        if len(stack) > MAX_FRAMES:
            print(f"  {len(stack)} frames:")
            for depth, code in enumerate(stack, start=1):
                print(f"    {depth:2d} {path_of(code)}:{code.co_firstlineno} {code.co_qualname}")
    print("model passes and layouts, by callers:")
    for code, callers in trace.callers.items():
        for names, count in callers.items():
            print(f"  {count} x {path_of(code)}:{code.co_qualname} < {names}")
    comprehensions = sum(name.endswith(">") for functions in files.values() for name in functions)
    print(f"files {len(files)} (target {MAX_FILES})")
    print(f"functions {trace.count_functions()} (target {MAX_FUNCTIONS}), {comprehensions} of them without a name")
    print(f"frames {trace.count_frames()} (target {MAX_FRAMES}), Trainer.step included")
    print(f"calls {trace.calls.total()}")
    print(
        f"batches padded or packed {trace.count_layouts()} (target {MAX_LAYOUTS}), model passes {trace.count_passes()}"
    )


if __name__ == "__main__":
    main()
