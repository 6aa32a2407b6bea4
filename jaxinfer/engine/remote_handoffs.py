"""RemoteHandOffs: sequences that another engine decodes, and sequences that another engine prefills. Imports no JAX."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxinfer.decode.role import DecodeRole
from jaxinfer.engine.preemption import Preemption
from jaxinfer.engine.structured_sampling import StructuredSampling
from jaxinfer.kv_cache.spec import NULL_PAGE, PageSpec
from jaxinfer.kv_transfer.handoff import HandOff, HandOffState
from jaxinfer.kv_transfer.kv_receiver import FirstToken, KVReceiver
from jaxinfer.kv_transfer.kv_sender import KVSender
from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS, HostPageMover
from jaxinfer.kv_transfer.remote import Remote
from jaxinfer.prefill.role import PrefillRole
from jaxinfer.sequence import Sequence as EngineSequence
from jaxinfer.sequence import SequenceState
from jaxinfer.stats import EngineStats

_MOST_AT_ONCE = MOVE_BUCKETS[-1]  # pages
_IDLE_WAIT = 0.002  # seconds: new requests wait for it too


class NetworkTransfer:
    """A hand-off whose pages come from a `KVReceiver`. See `KVTransfer`."""

    def __init__(self, receiver: KVReceiver, decode: DecodeRole, mover: HostPageMover) -> None:
        self._receiver, self._manager, self._mover = receiver, decode.manager, mover
        self._wanted: list[int] = []  # places in both page tables
        self._num_written = 0  # of these

    @property
    def num_pages_moved(self) -> int:
        return self._num_written

    def accept(self, handoff: HandOff, table: list[int], reserved_pages: int) -> bool:
        manager, spec = self._manager, self._manager.spec
        num_known = manager.match_prefix(table, handoff.sequence, handoff.num_tokens)
        if not manager.grow(table, handoff.num_tokens, reserved_pages, filled=handoff.num_tokens):
            manager.free(table)
            return False
        handoff.num_received = num_known
        first, last = num_known // spec.page_size * spec.num_groups, spec.blocks_for(handoff.num_tokens) * spec.num_groups
        self._wanted = [place for place in range(first, last) if table[place] != NULL_PAGE]
        handoff.to(HandOffState.ACCEPTED)
        handoff.to(HandOffState.TRANSFERRING)
        self._receiver.want(self._wanted)
        return True

    def receive(self, handoff: HandOff, table: list[int]) -> None:
        receiver = self._receiver
        num_arrived = receiver.num_arrived  # read once: another thread counts on
        is_all = num_arrived == len(self._wanted)
        # Of pages that come one by one a move has many, or the last.
        while num_arrived - self._num_written >= _MOST_AT_ONCE or (is_all and num_arrived > self._num_written):
            end = min(self._num_written + _MOST_AT_ONCE, num_arrived)
            places = self._wanted[self._num_written : end]
            moved = self._mover.put_bytes(receiver.pages[self._num_written : end], _groups(self._manager.spec, places))
            self._mover.scatter(moved, [table[place] for place in places])
            self._num_written = end
        if is_all and receiver.first_token is not None:
            handoff.num_received = handoff.num_tokens
            self._manager.insert(table, handoff.sequence, handoff.num_tokens)
            handoff.to(HandOffState.COMPLETE)


class Arrived(NamedTuple):
    """All of a hand-off is here but its first token, which the engine appends."""

    sequence: EngineSequence
    handoff: HandOff
    first: FirstToken


class RemoteHandOffs:
    """Used by the engine's thread. `has_slot()`: whether one more sequence may hold pages."""

    def __init__(
        self,
        prefill: PrefillRole,
        decode: DecodeRole,
        preemption: Preemption,
        has_slot: Callable[[], bool],
        stats: EngineStats,
        structured: StructuredSampling | None = None,
    ) -> None:
        self._stats, self._structured = stats, structured
        self._prefill, self._decode, self._preemption, self._has_slot = prefill, decode, preemption, has_slot
        self._senders: dict[EngineSequence, KVSender] = {}
        self._num_sent: dict[EngineSequence, int] = {}  # tokens whose pages were added
        self._receivers: dict[EngineSequence, tuple[KVReceiver, HandOff]] = {}
        self._changed = threading.Event()  # of all receivers

    def add(self, sequence: EngineSequence, remote: Remote | None) -> None:
        """Take a new sequence on: another engine prefills it, or decodes it, or neither."""
        if self._structured is not None and self._structured.holds(sequence, remote):
            return
        if isinstance(remote, KVReceiver):
            sequence.level, remote.changed = sequence.context.priority, self._changed
            self._receivers[sequence] = remote, HandOff(sequence, remote.geometry, [], len(sequence.token_ids), 0)
            return
        if remote is not None:
            self._senders[sequence], self._num_sent[sequence] = remote, remote.num_known
        self._prefill.add(sequence)

    @property
    def is_used(self) -> bool:
        """Whether any sequence is shared with another engine."""
        return bool(self._senders or self._receivers)

    def holds(self, sequence: EngineSequence) -> bool:
        """Whether a sequence is in no role yet, for its programs are not there."""
        return self._structured is not None and self._structured.has(sequence)

    def remove(self, sequence: EngineSequence) -> bool:
        """Forget a sequence in either direction, and the pages that came for it. Whether that was all it had here."""
        if self._structured is not None and self._structured.remove(sequence):
            return True
        if (sender := self._senders.pop(sequence, None)) is not None:
            del self._num_sent[sequence]
            sender.fail("the prefill worker gave the request up")
        if (entry := self._receivers.pop(sequence, None)) is not None:
            receiver, handoff = entry
            receiver.is_over = True
            self._decode.cancel(handoff)
            self._stats.num_incoming = len(self._receivers)
        return entry is not None

    def poll(self, *, is_idle: bool) -> list[Arrived]:
        """Take what has room, write what has arrived; what has failed is prefilled here. Returns what is complete, each
        of which is to be joined or removed. An idle engine waits for a moment."""
        complete: list[Arrived] = []
        if self._structured is not None:
            for sequence, remote in self._structured.released(is_idle=is_idle):
                self.add(sequence, remote)
        if is_idle and self._receivers:
            # Going round without waiting would keep the threads that receive from running.
            self._changed.wait(_IDLE_WAIT)
        self._changed.clear()
        for sequence, (receiver, handoff) in list(self._receivers.items()):
            if receiver.failure is not None or receiver.geometry != self._decode.manager.spec:
                self.remove(sequence)
                sequence.level = None
                self._prefill.add(sequence)
                self._stats.num_taken_over += 1
            elif (handoff in self._decode.incoming or self._accept(sequence, receiver, handoff)) and self._decode.receive(handoff):
                assert receiver.first_token is not None
                receiver.is_over = True
                self._stats.num_pages_received += len(receiver.pages)
                complete.append(self._arrived(sequence, handoff, receiver.first_token))
        self._stats.num_incoming = len(self._receivers)
        return complete

    def join(self, arrived: Arrived) -> None:
        """It is not over with its first token: decode goes on with it."""
        del self._receivers[arrived.sequence]
        self._stats.num_incoming = len(self._receivers)
        self._decode.join(arrived.handoff)

    def advance(self) -> None:
        """Copy out what the steps started so far fill. Call before another step may give the pages to others."""
        for sequence, sender in self._senders.items():
            if sequence.state in (SequenceState.PREFILLING, SequenceState.PREFILLED):
                self._copy_out(sequence, sender, sequence.prefill.num_computed, is_all=False)

    def finish(self, sequence: EngineSequence) -> bool:
        """All of a sequence's tokens but the newest are in its pages. If another engine decodes it, the rest goes out
        to it, and this engine has nothing to do with it any more."""
        sender = self._senders.pop(sequence, None)
        if sender is None:
            return False
        self._copy_out_with(sequence, sender, sequence.prefill.num_computed, self._num_sent.pop(sequence), is_all=True)
        sender.finish()
        return True

    @staticmethod
    def _arrived(sequence: EngineSequence, handoff: HandOff, first: FirstToken) -> Arrived:
        sequence.prefill.num_cached, sequence.prefill.prompt_logprobs = first.num_cached, list(first.prompt_logprobs)
        sequence.meter.queue_seconds, sequence.meter.prefill_seconds = first.queue_seconds, first.prefill_seconds
        return Arrived(sequence, handoff, first)

    def _accept(self, sequence: EngineSequence, receiver: KVReceiver, handoff: HandOff) -> bool:
        mover = self._decode.mover
        assert mover is not None
        if not self._has_slot() and not self._preemption.for_handoff(sequence):
            return False
        while not self._decode.accept(handoff, NetworkTransfer(receiver, self._decode, mover)):
            if not self._preemption.for_handoff(sequence):
                return False
        return True

    def _copy_out(self, sequence: EngineSequence, sender: KVSender, num_ready: int, *, is_all: bool) -> None:
        sent = self._num_sent[sequence]
        self._num_sent[sequence] = self._copy_out_with(sequence, sender, num_ready, sent, is_all=is_all)

    def _copy_out_with(self, sequence: EngineSequence, sender: KVSender, num_ready: int, sent: int, *, is_all: bool) -> int:
        spec, table, mover = self._prefill.manager.spec, sequence.prefill.pages, self._prefill.mover
        assert mover is not None
        first, last = sent // spec.page_size, spec.blocks_for(num_ready) if is_all else num_ready // spec.page_size
        places = sender.missing(_places(spec, table, range(first, last), len(sequence.token_ids) - is_all))
        for start in range(0, len(places), _MOST_AT_ONCE):
            some = places[start : start + _MOST_AT_ONCE]
            sender.add(some, mover.gather([table[place] for place in some], _groups(spec, some)))
        return max(sent, last * spec.page_size)


def _groups(spec: PageSpec, places: Sequence[int]) -> list[int]:
    return [place % spec.num_groups for place in places]


def _places(spec: PageSpec, table: Sequence[int], blocks: Iterable[int], num_tokens: int) -> list[int]:
    """Of these blocks the pages that tokens after the first `num_tokens` attend to."""
    firsts = [spec.first_run(group, num_tokens) for group in range(spec.num_groups)]
    found = [block * spec.num_groups + group for block in blocks for group in range(spec.num_groups) if block >= firsts[group]]
    return [place for place in found if table[place] != NULL_PAGE]
