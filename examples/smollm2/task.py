"""A task for a small pretrained model: reverse a list of two or three words, from reasoning-gym, scored by its scorer.

`rows` gives prompts for training and evaluation (they share no question), `reward` is 1 for the exact answer, and
`chance` is the control: a reward that has nothing to do with it.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import reasoning_gym

TASK, SIZES = "word_sequence_reversal", {"min_words": 2, "max_words": 3}
SYSTEM = "Answer with only the final answer and nothing else."
HELD_OUT = 9_000_000
"""The seed of questions to evaluate with; item i of a dataset comes of seed + i, so seeds must lie far apart."""


def questions(seed: int, size: int) -> list[dict[str, Any]]:
    """Different questions whose answer is not the question itself."""
    found: dict[str, dict[str, Any]] = {}
    for entry in reasoning_gym.create_dataset(TASK, size=size, seed=seed, **SIZES):
        words = entry["metadata"]["words"]
        if words != words[::-1]:
            found.setdefault(entry["question"], entry)
    return list(found.values())


@functools.cache
def scorer() -> Any:
    return reasoning_gym.create_dataset(TASK, size=1, seed=0, **SIZES)


def shots() -> list[dict[str, str]]:
    """Two worked turns, one for each number of words: they show the model what an answer looks like."""
    known = questions(99_991, 20)
    chosen = [next(one for one in known if one["metadata"]["num_words"] == n) for n in (2, 3)]
    turns = [{"role": "system", "content": SYSTEM}]
    for one in chosen:
        turns.append({"role": "user", "content": one["question"].strip()})
        turns.append({"role": "assistant", "content": one["answer"]})
    return turns


def rows(count: int = 8000, seed: int = 0, held_out: bool = False) -> list[dict[str, Any]]:
    """Prompts as chats, with the answer as reference; `held_out`: those that no training seed has."""
    away = questions(HELD_OUT, 700)[:512]
    if held_out:
        found = away[:count]
    else:
        kept = {one["question"] for one in away}
        found = [one for one in questions(1_000_000 + 100_000 * seed, count) if one["question"] not in kept]
    first = shots()
    return [
        {
            "messages": [*first, {"role": "user", "content": one["question"].strip()}],
            "reference": one["answer"],
            "words": one["metadata"]["num_words"],
        }
        for one in found
    ]


def reward(response: str, reference: str) -> float:
    """1 for the answer, word for word, else 0: the scorer's part marks (for answers that contain it) count as 0."""
    return float(scorer().score_answer(response.strip(), {"answer": reference}) == 1.0)


def chance(eid: Any) -> float:
    """1 for about a sixth of the samples, whatever they say."""
    return float(int(hashlib.blake2b(eid.uid.encode(), digest_size=8).hexdigest(), 16) % 6 == 0)
