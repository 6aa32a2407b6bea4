"""Two meshes, or pipelines of them: pages are gathered on one, moved by `device_put`, and scattered into the other's
pool."""

from __future__ import annotations

from typing import Protocol

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_transfer.handoff import HandOff, HandOffState
from jaxinfer.kv_transfer.page_transport import PageCopier
from jaxinfer.sequence import Sequence


class CrossMeshTransfer:
    """Moves only what the target does not hold already. Nothing here waits: both devices run what they are given in
    order, so pages that the source gives back are read before any later program writes to them. See `KVTransfer`."""

    def __init__(self, manager: KVManager, copier: PageCopier) -> None:
        self._manager, self._copier = manager, copier

    @property
    def num_pages_moved(self) -> int:
        return self._copier.num_pages

    def accept(self, handoff: HandOff, table: list[int], reserved_pages: int) -> bool:
        manager = self._manager
        num_known = manager.match_prefix(table, handoff.sequence, handoff.num_tokens)
        if not manager.grow(table, manager.num_tokens(handoff.pages), reserved_pages, filled=handoff.num_tokens):
            manager.free(table)
            return False
        handoff.num_received = num_known
        handoff.to(HandOffState.ACCEPTED)
        return True

    def receive(self, handoff: HandOff, table: list[int]) -> None:
        manager, size, num_groups = self._manager, self._manager.spec.page_size, self._manager.spec.num_groups
        handoff.to(HandOffState.TRANSFERRING)
        # A block that is not full yet would have to be moved again.
        num_ready = handoff.num_tokens if handoff.is_ready else min(handoff.num_ready, handoff.num_tokens - 1) // size * size
        if num_ready > handoff.num_received:
            first, last = handoff.num_received // size * num_groups, manager.spec.blocks_for(num_ready) * num_groups
            self._copier.copy(handoff.pages[first:last], table[first:last])
            handoff.num_received = num_ready
        if handoff.is_ready:
            manager.insert(table, handoff.sequence, handoff.num_tokens)
            handoff.to(HandOffState.COMPLETE)


class Lender(Protocol):
    """A role whose prefix cache has pages that another can use."""

    def offer_cached(self, sequence: Sequence) -> HandOff:
        """What it has of a sequence's tokens. It keeps these pages until `close`."""
        ...

    def close(self, handoff: HandOff) -> None:
        """Let go of the pages of a hand-off that is over."""
        ...


class PrefixRecall:
    """From decode's mesh to prefill's: what decode alone has of a prompt, as of an answer that is now part of it."""

    def __init__(self, lender: Lender, manager: KVManager, copier: PageCopier) -> None:
        self._lender, self._manager, self._copier = lender, manager, copier

    @property
    def num_pages_moved(self) -> int:
        return self._copier.num_pages

    def fill(self, sequence: Sequence, table: list[int], num_cached: int) -> int:
        """Fill a sequence's page table after the `num_cached` tokens that it holds; returns how many it holds then."""
        handoff, spec = self._lender.offer_cached(sequence), self._manager.spec
        num_lent = handoff.num_tokens
        if num_lent > num_cached:
            self._manager.begin_anew(table, sequence, num_cached, num_lent)
            first = num_cached // spec.page_size * spec.num_groups
            self._copier.copy(handoff.pages[first:], table[first : len(handoff.pages)])
        handoff.cancel()  # the sequence itself goes nowhere
        self._lender.close(handoff)
        return max(num_cached, num_lent)
