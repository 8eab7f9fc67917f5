"""What several of these tests use: samples, and functions that a spawned process can import."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from rollbook.rewards import RewardInput


def sample(response: str, prompt: str = "p: ", **more: Any) -> RewardInput:
    return RewardInput(prompt=prompt, response=response, **more)


def samples(*responses: str, **more: Any) -> list[RewardInput]:
    return [sample(response, **more) for response in responses]


def as_told(response: str) -> Any:
    """Does what the response says: a number, or a way to misbehave."""
    if response == "raise":
        raise KeyError("told to")
    if response == "exit":
        raise SystemExit(3)
    if response == "hang":
        time.sleep(60)
    if response == "spin":
        while True:
            pass
    if response == "die":
        os._exit(7)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "nan":
        return float("nan")
    if response == "text":
        return "good"
    if response == "none":
        return None
    return float(response)


_LINE = as_told.__code__.co_firstlineno
RAISED = f"KeyError: 'told to' ({__file__}, line {_LINE + 3})"
EXITED = f"SystemExit: 3 ({__file__}, line {_LINE + 5})"
"""What is said of it when it raises and exits."""


def process_id(response: str) -> int:
    return os.getpid()


def doubled(responses: list[str], references: list[str]) -> list[float]:
    return [2.0 * float(response) + float(reference) for response, reference in zip(responses, references, strict=True)]


async def later(response: str) -> float:
    return float(response)


def two_at_most(responses: list[str]) -> list[float]:
    """A batched function that forgets some."""
    return [1.0] * min(len(responses), 2)
