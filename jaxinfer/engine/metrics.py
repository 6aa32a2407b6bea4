"""EngineMetrics: what iterations report to `EngineStats`: host time, gauges, time in the queue."""

from __future__ import annotations

import time
from collections.abc import Iterable

from jaxinfer.decode.role import DecodeRole
from jaxinfer.prefill.role import PrefillRole
from jaxinfer.prefill.scheduler import Chunk
from jaxinfer.programs.compilation import COUNTER, TOTAL
from jaxinfer.request import OutputDelta
from jaxinfer.sequence import Sequence
from jaxinfer.stats import EngineStats


class EngineMetrics:
    """Call `begin`, a `lap_*` after each part of an iteration, then `end`. Laps count this thread's CPU time: waiting
    for the device, or for a core that the device uses, is not host work."""

    def __init__(self, stats: EngineStats, prefill: PrefillRole, decode: DecodeRole) -> None:
        self._stats, self._prefill, self._decode = stats, prefill, decode
        self._prefill_seconds = self._decode_seconds = self._lap_began = 0.0
        self._num_unexpected = 0
        self.update_gauges()

    def begin(self) -> None:
        self._num_unexpected = COUNTER.num_unexpected_compilations
        self._prefill_seconds = self._decode_seconds = 0.0
        self._lap_began = time.thread_time()

    def lap_prefill(self) -> None:
        """Account the time since the last lap to prefill, admission and hand-off included."""
        now = time.thread_time()
        self._prefill_seconds += now - self._lap_began
        self._lap_began = now

    def lap_decode(self) -> None:
        """Account the time since the last lap to decode."""
        now = time.thread_time()
        self._decode_seconds += now - self._lap_began
        self._lap_began = now

    def end(self, deltas: Iterable[OutputDelta], *, launched_decode: bool, has_changed: bool) -> None:
        stats = self._stats
        stats.num_output_tokens += sum([len(delta.token_ids) for delta in deltas])
        if has_changed or not self._decode.worker.is_steady:
            self.update_gauges()
        stats.num_compilations_after_ready += COUNTER.num_unexpected_compilations - self._num_unexpected
        stats.num_decode_steps += launched_decode
        stats.prefill_host_seconds += self._prefill_seconds
        if launched_decode:
            self.lap_decode()
            stats.host_seconds += self._decode_seconds

    def observe_request(self, first: Sequence) -> None:
        """Count a queued request; `first` is its first sequence."""
        self._stats.num_requests += 1
        self._stats.num_prompt_tokens += first.num_prompt
        self._stats.num_waiting = self._prefill.num_waiting

    def observe_queue(self, sequence: Sequence, now: float) -> None:
        """Record the time that a sequence spent in the queue, until it was scheduled or its deadline passed."""
        if sequence.prefill.leader is None:
            sequence.meter.queue_seconds = now - sequence.request.arrival_time

    def observe_chunks(self, chunks: list[Chunk], now: float) -> None:
        """Record the prefill step of these chunks, if there are any."""
        for chunk in chunks:
            sequence, progress = chunk.sequence, chunk.sequence.prefill
            if progress.first_scheduled_time is None:
                progress.first_scheduled_time = now
                self._stats.queue_seconds.observe(now - sequence.request.arrival_time)
                self.observe_queue(sequence, now)
                self._stats.num_cached_tokens += progress.num_cached if progress.leader is None else 0
        self._stats.num_prefill_steps += bool(chunks)

    def update_gauges(self) -> None:
        stats, prefill, decode = self._stats, self._prefill, self._decode
        stats.num_waiting, stats.num_prefilling, stats.num_running = prefill.num_waiting, prefill.num_admitted, len(decode.running)
        stats.prefill_pages_used, stats.decode_pages_used = prefill.manager.num_used, decode.manager.num_used
        stats.prefill_pages_cached, stats.decode_pages_cached = prefill.manager.num_cached, decode.manager.num_cached
        stats.peak_pages_used = max(stats.peak_pages_used, stats.decode_pages_used)
        stats.num_pages_moved = decode.transfer.num_pages_moved + (0 if prefill.recall is None else prefill.recall.num_pages_moved)
        if prefill.tiers is not None:
            stats.num_restored_tokens = prefill.tiers.num_tokens_restored
        stats.num_compilations = TOTAL.num_compilations
