"""Small rollouts for the saver's tests, and strict reading of what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rollbook import EID
from rollbook.compat.lightrft.batch import from_experiences
from rollbook.core.experience import Experience
from tests import tiny

TOKENIZER = tiny.bytes_()
END = TOKENIZER.eos_token_id
TEXTS = ["wait, no", "héllo 😀", "答案是五", "", "x", "aaaaaaaa"]


def refuse(name: str) -> Any:
    """For `json.loads`: the names that strict JSON does not have."""
    raise ValueError(f"{name} is no JSON")


def read(path: str | Path | None) -> list[dict[str, Any]]:
    """The records of a file, which must be strict JSON."""
    if path is None:
        raise AssertionError("nothing was saved")
    saved: list[dict[str, Any]] = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=refuse)
    return saved


def ids(text: str) -> list[int]:
    """A text's token ids."""
    token_ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return token_ids


def record(prompt: str, response: str, eid: EID | None = None, **more: Any) -> Experience:
    """A record with every per-token array that a trainer leaves, each value telling its place."""
    first, then = ids(prompt), [*ids(response), END]
    places = torch.arange(len(then), dtype=torch.float32)
    columns: dict[str, Any] = {
        "tokens": [*first, *then],
        "prompt_length": len(first),
        "reward": 1.0,
        "logprobs": -places / 8,
        "old_logprobs": -places / 8 - 0.25,
        "ref_logprobs": -places / 4,
        "entropy": places / 16,
        "values": places,
        "advantages": torch.full_like(places, 0.5),
        "returns": places + 1,
        "policy_versions": 3,
        "finish_reason": "stop",
        "prompt_text": prompt,
        "response_text": response,
    }
    return Experience(**({"eid": eid} if eid is not None else {}), **{**columns, **more})


def rollout(groups: int, size: int, step: int = 5) -> list[Experience]:
    """Groups of one prompt each, whose samples have different texts, lengths and rewards."""
    return [
        record(
            f"Q{g}?",
            f"{TEXTS[run % len(TEXTS)]} {g} {'la ' * ((7 * g + 3 * run) % 11)}",
            EID(step, f"t{g}", run, suffix=f"{g}-{run}"),
            reward=float((g * run) % 3) if g else 0.0,
        )
        for g in range(groups)
        for run in range(size)
    ]


def batches(rows: list[Experience], size: int = 4, **options: Any) -> list[Any]:
    """The same as batches, `size` at a time."""
    return [from_experiences(rows[at : at + size], **options) for at in range(0, len(rows), size)]
