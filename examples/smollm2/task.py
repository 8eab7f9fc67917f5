"""A task for a small pretrained model: reverse a list of two or three words (reasoning-gym, with its scorer).

`rows` returns prompts for training or evaluation, `reward` is 1 for the exact answer, and `random_reward` is the
random-reward control.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import reasoning_gym

TASK, SIZES = "word_sequence_reversal", {"min_words": 2, "max_words": 3}
SYSTEM = "Answer with only the final answer and nothing else."
HELD_OUT = 9_000_000
"""Seed of the evaluation questions. Question i has seed `seed + i`, so seeds must be far apart."""


def questions(seed: int, size: int) -> list[dict[str, Any]]:
    """Return distinct questions whose answer differs from the question."""
    distinct: dict[str, dict[str, Any]] = {}
    for entry in reasoning_gym.create_dataset(TASK, size=size, seed=seed, **SIZES):
        words = entry["metadata"]["words"]
        if words != words[::-1]:
            distinct.setdefault(entry["question"], entry)
    return list(distinct.values())


@functools.cache
def scorer() -> Any:
    return reasoning_gym.create_dataset(TASK, size=1, seed=0, **SIZES)


def shots() -> list[dict[str, str]]:
    """Return the system message and two few-shot examples, one for each number of words."""
    entries = questions(99_991, 20)
    messages = [{"role": "system", "content": SYSTEM}]
    for words in (2, 3):
        entry = next(entry for entry in entries if entry["metadata"]["num_words"] == words)
        messages.append({"role": "user", "content": entry["question"].strip()})
        messages.append({"role": "assistant", "content": entry["answer"]})
    return messages


def rows(count: int = 8000, seed: int = 0, held_out: bool = False) -> list[dict[str, Any]]:
    """Return chats with the answer as reference; with `held_out`, questions that occur in no training set."""
    held_out_entries = questions(HELD_OUT, 700)[:512]
    if held_out:
        entries = held_out_entries[:count]
    else:
        excluded = {entry["question"] for entry in held_out_entries}
        entries = [entry for entry in questions(1_000_000 + 100_000 * seed, count) if entry["question"] not in excluded]
    prefix = shots()
    return [
        {
            "messages": [*prefix, {"role": "user", "content": entry["question"].strip()}],
            "reference": entry["answer"],
            "words": entry["metadata"]["num_words"],
        }
        for entry in entries
    ]


def reward(response: str, reference: str) -> float:
    """Return 1 for the exact answer, else 0. The scorer's partial credit counts as 0."""
    return float(scorer().score_answer(response.strip(), {"answer": reference}) == 1.0)


def random_reward(eid: Any) -> float:
    """Return 1 for a sixth of the samples, independent of the response: the random-reward control."""
    return float(int(hashlib.blake2b(eid.uid.encode(), digest_size=8).hexdigest(), 16) % 6 == 0)
