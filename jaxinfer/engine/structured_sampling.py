"""StructuredSampling: what answers held to a grammar need of an engine: the grammars, and programs that sample with
masks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxinfer.engine.later_programs import Compiled, LaterBucket, LaterPrograms
from jaxinfer.kv_transfer.kv_receiver import KVReceiver
from jaxinfer.kv_transfer.remote import Remote
from jaxinfer.programs.compilation import ProgramSource
from jaxinfer.sequence import Sequence as EngineSequence
from jaxinfer.structured.grammars import Grammars

logger = logging.getLogger(__name__)

_IDLE_WAIT = 0.005  # seconds


class Runner(Protocol):
    def add_programs(self, programs: Compiled) -> None:
        """Use these too from now on."""
        ...


class StructuredSampling:
    """The first sequence with a grammar has the programs compiled, or loaded from the cache, in a thread of their own:
    no start waits for them, and no other request. Sequences that need them are held here until then. Used by the
    engine's thread, but for `grammars`."""

    def __init__(
        self,
        grammars: Grammars,
        runners: Sequence[Runner],
        sources: Sequence[ProgramSource],
        named: Callable[[Compiled], Compiled] = lambda programs: programs,
    ) -> None:
        self.grammars, self._runners, self._num_programs = grammars, runners, len(sources)
        self._later = LaterPrograms([LaterBucket(self, len(sources), sources)], named)
        self._is_ready = self._is_started = False
        self._held: list[tuple[EngineSequence, Remote | None]] = []

    def add_bucket(self, size: int, programs: Compiled) -> None:
        """The programs are there."""
        del size
        for runner in self._runners:
            runner.add_programs(programs)
        logger.info("the programs of structured outputs are ready")
        self._is_ready = True

    def holds(self, sequence: EngineSequence, remote: Remote | None) -> bool:
        """Whether a new sequence waits here, for `released` to give it back."""
        if sequence.grammar is None or self._is_ready:
            return False
        if not self._is_started:
            self._is_started = True
            logger.info("the first request for structured outputs waits for %d programs, made in the background", self._num_programs)
            self._later.start()
        self._held.append((sequence, remote))
        return True

    def has(self, sequence: EngineSequence) -> bool:
        """Whether a sequence is held."""
        return any(held is sequence for held, _ in self._held)

    def remove(self, sequence: EngineSequence) -> bool:
        """Forget a sequence, and tell the engine that shares it; whether it was held."""
        removed = [entry for entry in self._held if entry[0] is sequence]
        for entry in removed:
            self._held.remove(entry)
            if isinstance(entry[1], KVReceiver):
                entry[1].is_over = True
            elif entry[1] is not None:
                entry[1].fail("the prefill worker gave the request up")
        return bool(removed)

    def released(self, *, is_idle: bool) -> list[tuple[EngineSequence, Remote | None]]:
        """Sequences that need to wait no longer. An idle engine waits for a moment. Raises `RuntimeError` where the
        programs can't be compiled."""
        if not self._held:
            return []
        if self._later.has_failed:
            raise RuntimeError("the programs of structured outputs can't be compiled: start with --no-structured-outputs")
        if is_idle:
            time.sleep(_IDLE_WAIT)
        self._later.poll()
        if not self._is_ready:
            return []
        held, self._held = self._held, []
        return held

    def stop(self) -> None:
        """Compile no more."""
        self._later.stop()
