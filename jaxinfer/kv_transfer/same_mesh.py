"""Prefill and decode on one mesh share a pool: the hand-off passes page numbers and copies nothing. Imports no JAX."""

from __future__ import annotations

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_transfer.handoff import HandOff, HandOffState


class SameMeshTransfer:
    """The target's table references the source's pages too, until the source releases them. See `KVTransfer`."""

    def __init__(self, manager: KVManager) -> None:
        self._manager = manager

    @property
    def num_pages_moved(self) -> int:
        return 0

    def accept(self, handoff: HandOff, table: list[int], reserved_pages: int) -> bool:
        del reserved_pages  # the pages are in the pool already
        if not handoff.is_ready:  # prefill still changes the page table
            return False
        self._manager.adopt(table, handoff.pages)
        handoff.to(HandOffState.ACCEPTED)
        return True

    def receive(self, handoff: HandOff, table: list[int]) -> None:
        del table
        handoff.to(HandOffState.TRANSFERRING)
        handoff.num_received = handoff.num_tokens
        handoff.to(HandOffState.COMPLETE)
