"""Work on texts that would block the event loop, in threads of its own."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from jaxinfer.request import SamplingParams

T = TypeVar("T")

LONG_TEXT = 8_000  # characters that are worth a thread: 5 ms of tokenizing
VERY_LONG_TEXT = 200_000  # these wait for each other, but shorter ones don't wait for them
NICENESS = 4  # a process of niceness 0 gets two and a half times as much


async def work_on(num_characters: int, work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread where texts of `num_characters` characters take long.

    One thread runs the long ones and one the very long, so that their memory is bounded too. Work that is cancelled in
    the queue doesn't run.
    """
    if num_characters < LONG_TEXT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads(num_characters >= VERY_LONG_TEXT), work)


def size_of_grammar(params: SamplingParams) -> int:
    """Characters for `work_on` of validating these parameters: a grammar that is new is compiled then, the first one of
    a process after the tokenizer's tables."""
    wanted = params.structured_outputs
    if wanted is None:
        return 0
    texts = (wanted.json_schema, wanted.regex, wanted.grammar, *wanted.choice)
    return LONG_TEXT + sum(len(text) for text in texts if text is not None)


def start_with(work: Callable[[], object]) -> None:
    """Runs a first piece of work in these threads. Threads that it starts (tokenizers do, once in a process) inherit
    their priority."""
    _threads(False).submit(work).result()


@cache
def _threads(is_very_long: bool) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "very-long-texts" if is_very_long else "long-texts", initializer=_step_back)


def _step_back() -> None:
    """Gives this thread, and those that a tokenizer starts in it, less of a busy processor than the engine's threads
    have.

    It can hold the interpreter's lock, so it must not wait long for the processor: with more niceness /health waits,
    too.
    """
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
