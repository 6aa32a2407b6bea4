"""Work on texts that would hold up the event loop: done in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

Result = TypeVar("Result")

LONG_TEXT = 8_000  # characters that are worth a thread: 5 ms of tokenizing
VERY_LONG_TEXT = 200_000  # these wait for each other, not shorter ones for them


async def work_on(num_characters: int, work: Callable[[], Result]) -> Result:
    """What `work` gives, done in a thread where texts of that many characters take long.

    One thread has the long ones and one the very long, so that their memory is bounded too. What is cancelled before its turn is not done.
    """
    if num_characters < LONG_TEXT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads(num_characters >= VERY_LONG_TEXT), work)


@cache
def _threads(is_very_long: bool) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "very-long-texts" if is_very_long else "long-texts")
