"""PageTransport: copies pages of one pool to another; PageCopier: copies page tables over a transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS, PageMover


class PageTransport(Protocol):
    """One direction between two pools."""

    def move(self, source_ids: Sequence[int], target_ids: Sequence[int], groups: Sequence[int]) -> None:
        """Copy at most MOVE_BUCKETS[-1] pages, of these groups of layers, to others, asynchronously."""
        ...


class MeshPageTransport:
    """Transport between meshes that have all layers each."""

    def __init__(self, source: PageMover, target: PageMover) -> None:
        self._source, self._target = source, target

    def move(self, source_ids: Sequence[int], target_ids: Sequence[int], groups: Sequence[int]) -> None:
        """See `PageTransport`."""
        del groups  # a page is copied whole, for any group
        self._target.scatter(self._target.put(self._source.gather_shards(source_ids)), target_ids)


class PageCopier:
    """Copies page tables, as many pages a call as the transport takes."""

    def __init__(self, transport: PageTransport, num_groups: int) -> None:
        self._transport, self._num_groups = transport, num_groups
        self.num_pages = 0  # copied so far

    def copy(self, source: list[int], target: list[int]) -> None:
        """Copy pages of one table to those of another, each from a block's first group on. NULL_PAGE in either means
        that no token attends to the page any more."""
        groups = (place % self._num_groups for place in range(len(source)))
        pages = [pair for pair in zip(source, target, groups, strict=True) if NULL_PAGE not in pair[:2]]
        for start in range(0, len(pages), MOVE_BUCKETS[-1]):
            part = pages[start : start + MOVE_BUCKETS[-1]]
            self._transport.move([page for page, _, _ in part], [page for _, page, _ in part], [group for _, _, group in part])
        self.num_pages += len(pages)


def warm_up(transport: PageTransport) -> None:
    """Copy the null page in every size: between meshes of different shapes `device_put` compiles programs too."""
    for size in MOVE_BUCKETS:
        transport.move([NULL_PAGE] * size, [NULL_PAGE] * size, [0] * size)
