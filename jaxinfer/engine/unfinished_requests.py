"""UnfinishedRequests: an engine's requests until each of their sequences has ended. Imports no JAX."""

from __future__ import annotations

from jaxinfer.engine.intake import Deadlines
from jaxinfer.engine.preemption import Preemption
from jaxinfer.engine.remote_handoffs import RemoteHandOffs
from jaxinfer.prefill.role import PrefillRole
from jaxinfer.request import FinishReason, OutputDelta
from jaxinfer.sequence import Sequence, SequenceState
from jaxinfer.stats import EngineStats


class UnfinishedRequests(dict[str, list[Sequence]]):
    """By id, the sequences that have not ended."""

    def __init__(self, prefill: PrefillRole, preemption: Preemption, remote: RemoteHandOffs, stats: EngineStats) -> None:
        super().__init__()
        self._prefill, self._preemption, self._remote, self._stats = prefill, preemption, remote, stats
        self._deadlines = Deadlines()

    def add(self, request_id: str, sequences: list[Sequence]) -> None:
        self[request_id] = sequences
        self._deadlines.add(request_id, sequences[0].context.deadline)

    def overdue(self, now: float) -> list[list[Sequence]]:
        """The sequences of each request whose deadline has passed since the last call."""
        found = [(deadline, list(self.get(request_id, ()))) for deadline, request_id in self._deadlines.expired(now)]
        # One that ended may have left its id to another.
        return [sequences for deadline, sequences in found if sequences and sequences[0].context.deadline == deadline]

    def end(self, sequence: Sequence, delta: OutputDelta) -> OutputDelta:
        """Finish a sequence with its last delta."""
        assert delta.finish_reason is not None
        self.finish(sequence, delta.finish_reason)
        delta.device_usage = sequence.meter.read()
        return delta

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence has ended: give back all that it holds."""
        if not self._remote.remove(sequence):
            self._preemption.release(sequence)
        sequence.state = SequenceState.FINISHED
        self._prefill.scheduler.queue.charge(sequence.context.tenant, sequence.num_output)
        unfinished = self[sequence.request.request_id]
        unfinished.remove(sequence)
        if not unfinished:
            del self[sequence.request.request_id]
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1
