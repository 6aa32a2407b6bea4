"""Work on texts that would hold up the event loop: done in threads that give way to the engine's."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import TypeVar

Result = TypeVar("Result")

LONG_TEXT = 8_000  # characters that are worth a thread: some 5 ms of tokenizing
VERY_LONG_TEXT = 200_000  # these wait for each other, not shorter ones for them
NICENESS = 10  # a tenth of the processor time that the engine's threads get, where they want all of it


async def work_on(num_characters: int, work: Callable[[], Result]) -> Result:
    """What `work` gives, done in a thread where texts of that many characters take long.

    One thread has the long ones and one the very long, so that their memory is bounded too. What is cancelled before its turn is not done.
    """
    if num_characters < LONG_TEXT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads(num_characters >= VERY_LONG_TEXT), work)


@cache
def _threads(is_very_long: bool) -> ThreadPoolExecutor:
    # Else the tokenizer works in threads of its own, which don't give way.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return ThreadPoolExecutor(1, "very-long-texts" if is_very_long else "long-texts", initializer=_give_way)


def _give_way() -> None:
    with suppress(AttributeError, OSError):  # Linux has a priority for each thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
