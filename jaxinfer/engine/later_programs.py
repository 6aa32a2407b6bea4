"""LaterPrograms: programs of smaller buckets, compiled in the background while an engine serves with its largest."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.programs.compilation import Executable, ProgramSource, compile_programs

logger = logging.getLogger(__name__)

Compiled = dict[str, Executable]


class Grows(Protocol):
    """A role."""

    def add_bucket(self, size: int, programs: Compiled) -> None: ...


@dataclass(frozen=True)
class LaterBucket:
    role: Grows
    size: int
    sources: Sequence[ProgramSource]  # what the buckets before it don't have


class LaterPrograms:
    """Nothing compiles in the engine's thread: one of its own compiles bucket by bucket, in this order, and `poll`
    takes what is there. `named`: what is done with programs before they are used. If one can't be compiled, a line says
    so, and the buckets before it stay in use."""

    def __init__(self, buckets: Sequence[LaterBucket], named: Callable[[Compiled], Compiled] = lambda programs: programs) -> None:
        self._waiting, self._named = list(buckets), named
        self._done: queue.SimpleQueue[tuple[LaterBucket, Compiled]] = queue.SimpleQueue()
        self._is_stopped = threading.Event()
        self.num_left = len(self._waiting)  # buckets that are not in use yet
        self.has_failed = False

    def start(self) -> None:
        """Begin to compile."""
        threading.Thread(target=self._compile, name="later-programs", daemon=True).start()

    def stop(self) -> None:
        """Compile no more; what is being compiled ends."""
        self._is_stopped.set()

    def poll(self) -> int:
        """Use the programs that are there; how many came. Called by the engine's thread between steps."""
        num_programs = 0
        while not self._done.empty():
            bucket, programs = self._done.get()
            bucket.role.add_bucket(bucket.size, programs)
            num_programs += len(programs)
            self.num_left -= 1
        return num_programs

    def _compile(self) -> None:
        for bucket in self._waiting:
            if self._is_stopped.is_set():
                return
            try:
                self._done.put((bucket, self._named(compile_programs(bucket.sources))))
            except Exception as error:
                self.has_failed = True
                if not self._is_stopped.is_set():
                    logger.warning("programs of %d can't be compiled; larger ones stay in use: %s", bucket.size, error)
                return
