"""The workload of the benchmarks: seeded keyword dicts that build any contender's `Experience`.

Prompts are uniform in 64..1024 tokens, responses log-normal with median 800 and at most 8,192, so that 4,096
experiences hold about 99 MB of tensors and 27 MB of text. Every tensor owns its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

Row = dict[str, Any]
T = TypeVar("T")

PROMPT_RANGE = (64, 1024)
RESPONSE_MEDIAN = 800
RESPONSE_SIGMA = 1.02
RESPONSE_MAX = 8192
CHARS_PER_TOKEN = 3.6
GROUP_SIZE = 8
VOCABULARY = 151_936

FIELDS = (
    "eid",
    "experience_type",
    "tokens",
    "prompt_length",
    "logprobs",
    "reward",
    "token_level_reward",
    "advantages",
    "returns",
    "truncate_status",
    "info",
    "metrics",
    "response_text",
    "prompt_text",
    "action_mask",
    "messages",
    "tools",
    "chosen",
    "rejected",
    "chosen_messages",
    "rejected_messages",
    "multi_modal_inputs",
    "teacher_logprobs",
    "routed_experts",
    "custom_fields",
)
"""Every attribute that both sides' `Experience` has."""

_PROSE = (
    "let us compute the sum of all terms and check that it is right so we get a value then we can divide "
    "both sides by two because the first factor cannot vanish here hence x = 3 or x = 7 and the answer "
    "follows wait maybe I should verify this step again with another method before writing down the result"
)
_BEYOND_ASCII = " ≤ → naïve θ₁ 答案"


@dataclass(frozen=True)
class Workload:
    """Rows as keyword dicts, and how many bytes they hold."""

    rows: list[Row]
    seed: int
    tensor_bytes: int
    text_bytes: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensors and texts together: what any encoding has to carry."""
        return self.tensor_bytes + self.text_bytes

    def build(self, make: Callable[..., T]) -> list[T]:
        """Fresh objects from the rows; dicts are copied, tensors and texts shared."""
        return [make(**{**row, "eid": dict(row["eid"]), "info": dict(row["info"])}) for row in self.rows]


def make_workload(n: int = 4096, seed: int = 20_260) -> Workload:
    """`n` seeded experiences; the same `n` and `seed` give the same rows."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    rng = np.random.default_rng(seed)
    prompts = rng.integers(PROMPT_RANGE[0], PROMPT_RANGE[1], size=n, endpoint=True)
    drawn = rng.lognormal(np.log(RESPONSE_MEDIAN), RESPONSE_SIGMA, size=n)
    responses = np.clip(np.rint(drawn), 1, RESPONSE_MAX).astype(np.int64)
    text = _text_source(rng, _PROSE.split())
    wide = _text_source(rng, (_PROSE + _BEYOND_ASCII).split())
    rows = [
        _row(rng, index, int(p), int(r), wide if index % 16 == 15 else text)
        for index, (p, r) in enumerate(zip(prompts, responses, strict=True))
    ]
    return Workload(rows, seed, *_count(rows))


def tensors_of(row: Row) -> list[torch.Tensor]:
    """The tensors of one row."""
    return [value for value in row.values() if isinstance(value, torch.Tensor)]


def touch(rows: Iterable[Any]) -> int:
    """Ask every row for every field, and look into `info`; gives the number of fields that were set."""
    count = 0
    for row in rows:
        for name in FIELDS:
            if getattr(row, name) is not None:
                count += 1
        count += len(row.info)
    return count


def check_same(workload: Workload, sides: Mapping[str, Sequence[Any]], sample: int = 64) -> None:
    """Raise unless every side holds what the workload says, in a seeded sample of its rows."""
    n = len(workload.rows)
    chosen = np.random.default_rng(workload.seed).choice(n, size=min(sample, n), replace=False).tolist()
    for side, rows in sides.items():
        if len(rows) != n:
            raise AssertionError(f"{side} has {len(rows)} rows instead of {n}")
        for index in {0, n - 1, *chosen}:
            for name, expected in workload.rows[index].items():
                if not _same(getattr(rows[index], name), expected):
                    raise AssertionError(f"{side}: row {index} has another {name}")


def _same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(actual, torch.Tensor) and actual.dtype == expected.dtype and torch.equal(actual, expected)
    if isinstance(expected, dict):  # an id or an `info`
        actual = actual if isinstance(actual, Mapping) else actual.to_dict()
        return dict(actual) == expected
    return bool(actual == expected)


def _row(rng: np.random.Generator, index: int, prompt: int, response: int, text: str) -> Row:
    logprobs = -rng.exponential(0.4, size=response).astype(np.float32)
    advantage = float(rng.normal())
    mask = np.ones(response, dtype=np.bool_)
    if index % 4 == 3 and response > 8:  # every fourth one holds a tool's reply
        start = int(rng.integers(1, response // 2))
        mask[start : start + response // 4] = False
    prompt_chars, response_chars = int(CHARS_PER_TOKEN * prompt), int(CHARS_PER_TOKEN * response)
    at = int(rng.integers(0, len(text) - prompt_chars - response_chars + 1))
    reward = float(rng.integers(0, 2))
    return {
        "eid": {
            "batch": index // 1024,
            "task": index // GROUP_SIZE,
            "run": index % GROUP_SIZE,
            "step": 0,
            "suffix": f"{index:06x}",
        },
        "tokens": torch.from_numpy(rng.integers(0, VOCABULARY, size=prompt + response, dtype=np.int32)),
        "prompt_length": prompt,
        "logprobs": torch.from_numpy(logprobs),
        "advantages": torch.from_numpy(np.full(response, advantage, dtype=np.float32)),
        "returns": torch.from_numpy(rng.random(size=response, dtype=np.float32)),
        "action_mask": torch.from_numpy(mask),
        "reward": reward,
        "prompt_text": text[at : at + prompt_chars],
        "response_text": text[at + prompt_chars : at + prompt_chars + response_chars],
        "info": {
            "model_version": index // 1024,
            "model_version_drift": index % 2,
            "use_count": 0,
            "task_index": index // GROUP_SIZE,
            "temperature": 1.0,
            "accuracy": reward,
            "finish_reason": "length" if response == RESPONSE_MAX else "stop",
            "truncated": response == RESPONSE_MAX,
        },
    }


def _text_source(rng: np.random.Generator, words: Sequence[str]) -> str:
    """Words at random, long enough for any row to cut its texts out of."""
    longest = int(CHARS_PER_TOKEN * (RESPONSE_MAX + PROMPT_RANGE[1]))
    parts: list[str] = []
    length = 0
    while length < 4 * longest:
        chosen = [words[i] for i in rng.integers(0, len(words), size=4096)]
        parts.append(" ".join(chosen) + "\n")
        length += len(parts[-1])
    return "".join(parts)


def _count(rows: Iterable[Row]) -> tuple[int, int]:
    tensors = texts = 0
    for row in rows:
        tensors += sum(tensor.nbytes for tensor in tensors_of(row))
        texts += len(row["prompt_text"].encode()) + len(row["response_text"].encode())
    return tensors, texts
