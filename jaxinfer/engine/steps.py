"""Steps: an iteration's prefill step and decode step, launched and collected in an order that keeps every device
busy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from jaxinfer.decode.role import DecodeRole
from jaxinfer.decode.worker import Decoded
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.preemption import Preemption
from jaxinfer.prefill.role import PrefillRole
from jaxinfer.prefill.worker import Prefilled
from jaxinfer.sequence import Sequence

_IDLE_WAIT = 0.01  # seconds


class Launched(NamedTuple):
    has_prompts: bool  # whether any waited, or was being prefilled
    prefill: bool  # whether a step was started
    decode: bool


class Collected(NamedTuple):
    prefilled: list[Prefilled]
    prefilled_at: float  # seconds, of the engine's clock
    decoded: list[Decoded]


class StepRunner:
    """`max_batch_size`: sequences that may hold pages at once. `shares_mesh`: whether both roles run on the same
    devices."""

    def __init__(
        self,
        prefill: PrefillRole,
        decode: DecodeRole,
        preemption: Preemption,
        metrics: EngineMetrics,
        max_batch_size: int,
        shares_mesh: bool,
        clock: Callable[[], float],
    ) -> None:
        self._prefill, self._decode, self._preemption, self._metrics = prefill, decode, preemption, metrics
        self._max_batch_size, self._shares_mesh, self._clock = max_batch_size, shares_mesh, clock

    @property
    def has_slot(self) -> bool:
        """Whether one more sequence may hold pages."""
        return self._num_admitted < self._max_batch_size

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way and none can be started before something arrives."""
        prefill, decode = self._prefill, self._decode
        return not (prefill.num_admitted or prefill.has_prompts or prefill.num_in_flight or decode.running or decode.num_in_flight)

    def poll_tiers(self) -> None:
        """Queue what waited for its pages from the tiers; with nothing else to do, wait for the first for a moment."""
        if not self._prefill.has_prompts and self._prefill.tiers is None:
            return
        num_busy = self._prefill.num_in_flight + self._decode.num_in_flight + self._num_admitted + len(self._prefill.scheduler.queue)
        self._prefill.poll_tiers(0.0 if num_busy else _IDLE_WAIT)

    def launch(self) -> Launched:
        """Start a prefill step, hand over what is prefilled, start a decode step."""
        prefill, decode = self._prefill, self._decode
        has_prompts = prefill.has_prompts
        is_prefilling = has_prompts and self._launch_prefill()
        while prefill.prefilled and self._hand_over(prefill.prefilled[0]):
            pass
        self._metrics.lap_prefill()
        # More than that are in flight after a micro-batch lost its last sequence.
        is_decoding = decode.num_in_flight <= decode.worker.depth and decode.launch(self._preemption.for_decode)
        self._metrics.lap_decode()
        return Launched(has_prompts, is_prefilling, is_decoding)

    def collect(self, launched: Launched) -> Collected:
        """Read the prefill steps that have ended and the oldest decode step. One decode step of each micro-batch
        stays under way; the last one of a batch is read as soon as nothing follows it."""
        prefill, decode = self._prefill, self._decode
        is_due = decode.num_in_flight > (decode.worker.depth if launched.decode else 0)
        wait, until = int(not (is_due or launched.decode or launched.prefill)), math.inf
        if self._shares_mesh and decode.num_in_flight:
            # On one mesh steps end in the order of their launches: reading them in it costs no time and shows theirs.
            wait, until = prefill.num_in_flight if is_due else wait, decode.worker.oldest_launch
        prefilled, now = prefill.collect(wait=wait, until=until), self._clock()
        self._metrics.lap_prefill()
        decoded = decode.collect() if is_due else []
        if prefilled:
            self._metrics.lap_decode()
        return Collected(prefilled, now, decoded)

    @property
    def _num_admitted(self) -> int:
        """Sequences that hold pages."""
        return self._prefill.num_admitted + len(self._decode.running) + len(self._decode.incoming)

    def _launch_prefill(self) -> bool:
        prefill, preemption = self._prefill, self._preemption
        num_decoding = len(self._decode.running) + len(prefill.prefilled)
        budget = prefill.budget(num_decoding, self._decode.worker.step_seconds, self._clock())
        # Running sequences grow: leave each a page, or what is admitted now would be preempted at once.
        reserved_pages = num_decoding if self._shares_mesh else 0
        num_free_slots = self._max_batch_size - self._num_admitted
        chunks = prefill.launch(budget, num_free_slots, reserved_pages, preemption.for_admission, preemption.for_progress)
        self._metrics.observe_chunks(chunks, self._clock())
        return bool(chunks)

    def _hand_over(self, sequence: Sequence) -> bool:
        """Whether decode has taken a prefilled sequence; less urgent ones are preempted for it."""
        handoff = self._prefill.offer(sequence)
        while not self._decode.accept(handoff):
            if not self._preemption.for_handoff(sequence):
                return False
        self._decode.receive(handoff)
        self._decode.join(handoff)
        self._prefill.close(handoff)
        return True
