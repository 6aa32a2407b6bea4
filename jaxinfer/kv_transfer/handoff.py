"""HandOff: a sequence on its way from one role to another, as a value. Imports no JAX.

The source keeps its pages until the hand-off is complete or cancelled. The target allocates pages of its own, and
pulls what is ready. Each side touches its own page manager only; what both know of each other is in the hand-off.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.kv_cache.block_keys import block_keys, digests
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.sequence import Sequence


class HandOffError(ValueError):
    """A hand-off that can't be taken, or bytes that are none."""


class HandOffState(enum.StrEnum):
    OFFERED = "offered"  # the source has pages, the target nothing
    ACCEPTED = "accepted"  # the target has pages of its own, not filled yet
    TRANSFERRING = "transferring"  # the target has some of the tokens' KV; prefill may still go on
    COMPLETE = "complete"  # the target has it all
    CANCELLED = "cancelled"  # either side gave up


_NEXT = {
    HandOffState.OFFERED: (HandOffState.ACCEPTED, HandOffState.CANCELLED),
    HandOffState.ACCEPTED: (HandOffState.TRANSFERRING, HandOffState.CANCELLED),
    HandOffState.TRANSFERRING: (HandOffState.TRANSFERRING, HandOffState.COMPLETE, HandOffState.CANCELLED),
    HandOffState.COMPLETE: (),
    HandOffState.CANCELLED: (),
}


@dataclass(slots=True, eq=False)
class HandOff:
    """`pages` is the source's page table. Its KV is that of the first `num_tokens` of the sequence's tokens once all
    are ready, and with it comes the next token, which no page has. See `handoff_bytes` for what goes over a wire."""

    sequence: Sequence
    geometry: PageSpec
    pages: list[int]
    num_tokens: int
    num_ready: int  # of these, tokens whose KV some step that was started writes
    num_received: int = 0  # of these, tokens whose KV the target has, in its prefix cache before or by now
    state: HandOffState = HandOffState.OFFERED

    @property
    def is_ready(self) -> bool:
        """Whether the source has done its part: all KV, and the token after it."""
        return self.num_ready == self.num_tokens < len(self.sequence.token_ids)

    @property
    def is_over(self) -> bool:
        return self.state in (HandOffState.COMPLETE, HandOffState.CANCELLED)

    def digests(self) -> list[bytes]:
        """What names each whole block of its tokens, with all before it, in every prefix cache and tier."""
        size = self.geometry.page_size
        return digests(self.sequence.context.namespace, block_keys(self.sequence, size, self.num_tokens // size))

    def to(self, state: HandOffState) -> None:
        """Go on to a state. Raises `HandOffError` where that does not follow."""
        if state not in _NEXT[self.state]:
            raise HandOffError(f"the hand-off of {self.sequence.request.request_id!r} is {self.state}: it can't become {state}")
        self.state = state

    def cancel(self) -> None:
        """Give up; of no effect once it is over."""
        if not self.is_over:
            self.state = HandOffState.CANCELLED

    def update(self, newer: HandOff) -> None:
        """Take over what the source has said since: more tokens are ready, the next one is known, or it gave up."""
        assert newer.sequence.request.request_id == self.sequence.request.request_id
        self.pages, self.num_ready = newer.pages, newer.num_ready
        self.sequence.token_ids[:] = newer.sequence.token_ids
        self.sequence.output = newer.sequence.output
        if newer.state is HandOffState.CANCELLED:
            self.cancel()


class KVTransfer(Protocol):
    """The target's side of hand-offs: where its pages come from."""

    @property
    def num_pages_moved(self) -> int:
        """Pages copied so far from mesh to mesh."""
        ...

    def accept(self, handoff: HandOff, table: list[int], reserved_pages: int) -> bool:
        """Fill an empty page table with the target's own pages. False, with nothing changed, if there is no room for
        them that leaves `reserved_pages` blocks' pages, or if it is too early."""
        ...

    def receive(self, handoff: HandOff, table: list[int]) -> None:
        """Fill these pages with what is ready and not here yet. The hand-off is complete once that is all."""
        ...
