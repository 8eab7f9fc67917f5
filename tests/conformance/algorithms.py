"""The shared cases of both systems for estimators, divergences, losses and shaping, decoded."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).parent
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf, "nan": math.nan, "inf": math.inf}


def _load(name: str) -> dict[str, dict[str, Any]]:
    return {case["id"]: case for case in json.loads((_HERE / name).read_text())["cases"]}


TRINITY = _load("algorithms_trinity.json")
LIGHTRFT = _load("algorithms_lightrft.json")


def decoded(value: Any) -> Any:
    """A case's value with tensors as tensors and the words for numbers that JSON lacks as numbers."""
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return _WORDS[value["__float__"].removeprefix("-")] * (-1 if value["__float__"].startswith("-") else 1)
        if "dtype" in value and "data" in value:
            return torch.tensor(decoded(value["data"]), dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
        return {key: decoded(item) for key, item in value.items()}
    return value


def call_of(case: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the options of a case's call, such as "grpo({'epsilon': 1e-06})"."""
    name, _, rest = case["call"].partition("(")
    return name, ast.literal_eval(rest[:-1])
