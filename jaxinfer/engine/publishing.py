"""Publishing: tokens that came from the devices are appended to their sequences and become deltas. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable

from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.output import OutputBuilder
from jaxinfer.engine.remote_handoffs import Arrived, RemoteHandOffs
from jaxinfer.engine.steps import Collected
from jaxinfer.engine.unfinished_requests import UnfinishedRequests
from jaxinfer.prefill.role import PrefillRole
from jaxinfer.request import FinishReason, OutputDelta, TokenLogprob
from jaxinfer.sequence import Sequence


class Publishing:
    def __init__(
        self,
        prefill: PrefillRole,
        requests: UnfinishedRequests,
        remote: RemoteHandOffs,
        output: OutputBuilder,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._prefill, self._requests, self._remote = prefill, requests, remote
        self._output, self._metrics, self._clock = output, metrics, clock

    def cut(self, sequence: Sequence, reason: FinishReason) -> OutputDelta:
        """End a sequence with what it has."""
        return self._requests.end(sequence, self._output.cut(sequence, reason))

    def collected(self, collected: Collected) -> list[OutputDelta]:
        """What prefill and decode steps gave; what is finished ends."""
        deltas: list[OutputDelta] = []
        if collected.prefilled:
            deltas = [self._first(*first, collected.prefilled_at) for first in collected.prefilled]
            self._metrics.lap_prefill()
        if collected.decoded:
            now = self._clock()
            self._output.observe_gaps([sequence for sequence, _, _ in collected.decoded], now)
            taken = [self._output.token(*token, now) for token in collected.decoded]
            for delta, (sequence, _, _) in zip(taken, collected.decoded, strict=True):
                if delta.finish_reason is not None:
                    self._requests.end(sequence, delta)
            deltas += taken
        return deltas

    def arrived(self, arrived: Arrived, now: float) -> OutputDelta:
        """What another engine has prefilled is here, with its first token."""
        sequence, first = arrived.sequence, arrived.first
        delta = self._output.token(sequence, first.token_id, first.logprob, now)
        if delta.finish_reason is None:
            self._remote.join(arrived)
            return delta
        return self._requests.end(sequence, delta)

    def _first(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None, now: float) -> OutputDelta:
        """A sequence's prompt is in the cache; the token sampled at its end is its first, or its next if it was
        preempted."""
        delta = self._output.nothing(sequence) if sequence.max_tokens == 0 else self._output.token(sequence, token_id, logprob, now)
        if self._remote.finish(sequence):
            delta.finish_reason = FinishReason.HANDED_OVER
        if delta.finish_reason is not None:
            return self._requests.end(sequence, delta)
        self._prefill.keep(sequence)
        return delta
