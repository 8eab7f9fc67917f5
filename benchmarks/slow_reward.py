"""The reward of the letters recipe after a pause, as a reward server or a sandbox would take it."""

from __future__ import annotations

import asyncio

from rollbook.train.recipes import letters


async def reward(response: str, reference: str, finish_reason: str, seconds: float = 0.5) -> float:
    """Sleep, then return the reward of the letters recipe.

    Args:
        response: The response.
        reference: The correct answer.
        finish_reason: Why the response ended.
        seconds: Seconds to sleep; other samples are scored meanwhile.
    """
    await asyncio.sleep(seconds)
    return letters.reward(response, reference, finish_reason)
