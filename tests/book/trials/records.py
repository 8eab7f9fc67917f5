"""Records whose content follows from their id, so that whoever reads one knows what it must hold."""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from rollbook import Experience

PICTURES = ["data:image/png;base64," + letters * 700 for letters in ("iVBO", "R0lG", "Qk0A")]
"""Shared by many records: a book keeps each of them once."""


class Piece(NamedTuple):
    """What is appended at once: the runs of one task, a group."""

    batch: str
    task: int
    count: int

    def __str__(self) -> str:
        return f"{self.batch}/{self.task}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Piece:
        batch, task, count = text.split("/")
        return cls(batch, int(task), int(count))

    @property
    def uids(self) -> list[str]:
        return [f"{self.batch}/{self.task}/{run}/0/t" for run in range(self.count)]


def make_records(piece: Piece) -> list[Experience]:
    """The records of a piece, the same every time."""
    return [_record(piece, run) for run in range(piece.count)]


def first_reward(uid: str) -> float:
    return zlib.crc32(uid.encode()) % 1000 / 1000


def _record(piece: Piece, run: int) -> Experience:
    uid = piece.uids[run]
    chance = random.Random(uid)
    length = chance.choice((3, 20, 90, 400, 3000))
    numbers = np.random.default_rng(zlib.crc32(uid.encode()))
    prompt = chance.randint(1, length - 1)
    messages: Any = None
    if piece.task % 4 == 0:
        picture = {"type": "image_url", "image_url": {"url": PICTURES[piece.task // 4 % len(PICTURES)]}}
        messages = [{"role": "user", "content": [picture, {"type": "text", "text": uid}]}]
    return Experience(
        eid={"batch": piece.batch, "task": piece.task, "run": run, "step": 0, "suffix": "t"},
        tokens=numbers.integers(0, 150_000, length),
        prompt_length=prompt,
        logprobs=-numbers.random(length - prompt, dtype=np.float32),
        reward=first_reward(uid),
        messages=messages,
        info={"nonce": uid, "model_version": piece.task},
        group_size=piece.count,
    )


def digest(row: Experience) -> str:
    """Of all that is never revised."""
    parts = (
        row.eid.uid.encode(),
        np.asarray(row.tokens).astype("<i8").tobytes(),
        b"" if row.logprobs is None else np.asarray(row.logprobs).astype("<f4").tobytes(),
        json.dumps([row.prompt_length, row.messages, row.info, row.group_size], sort_keys=True).encode(),
    )
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@cache
def expected(piece: Piece) -> tuple[str, ...]:
    """The digest of each record of a piece."""
    return tuple(digest(row) for row in make_records(piece))
