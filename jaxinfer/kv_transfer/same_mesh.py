"""Prefill and decode on one mesh share a pool: the hand-off passes page numbers and copies nothing."""

from __future__ import annotations

from jaxinfer.sequence import Sequence


class SameMeshTransfer:
    def __init__(self) -> None:
        self.num_pages_moved = 0

    def move(self, sequence: Sequence, reserved_pages: int) -> bool:
        """See `KVTransfer`."""
        del reserved_pages  # the pages are in the pool already
        sequence.decode_pages, sequence.prefill_pages = sequence.prefill_pages, []
        return True
