"""The hand-off: a prefilled sequence's KV pages go from the prefill mesh to the decode mesh."""

from __future__ import annotations

from typing import Protocol

from jaxinfer.sequence import Sequence


class KVTransfer(Protocol):
    """How pages change hands. The sequence owns its prefill pages until `move` returns True, its decode pages from then on; a sequence
    aborted before that gives back what it holds, and nothing of it is left on the other side."""

    num_pages_moved: int  # copied so far from mesh to mesh

    def move(self, sequence: Sequence, reserved_pages: int) -> bool:
        """Fill `decode_pages` from `prefill_pages` and give those back. False, with nothing changed, if the decode pool has no room
        for them that leaves `reserved_pages` pages."""
        ...
