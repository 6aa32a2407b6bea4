"""Two meshes, or pipelines of them: pages are gathered on one, moved by `device_put`, and scattered into the other's pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS, PageMover
from jaxinfer.sequence import Sequence as RunningSequence


class PageTransport(Protocol):
    """One way between two roles."""

    def move(self, source_ids: Sequence[int], target_ids: Sequence[int], groups: Sequence[int]) -> None:
        """Copy at most MOVE_BUCKETS[-1] pages, of these groups of layers, to others. Nothing waits."""
        ...


class MeshPageTransport:
    """From one mesh to another, which have all layers each."""

    def __init__(self, source: PageMover, target: PageMover) -> None:
        self._source, self._target = source, target

    def move(self, source_ids: Sequence[int], target_ids: Sequence[int], groups: Sequence[int]) -> None:
        """See `PageTransport`."""
        del groups  # a page goes as a whole, whichever group's it is
        self._target.scatter(self._target.put(self._source.gather(source_ids)), target_ids)


class CrossMeshTransfer:
    def __init__(self, there: PageTransport, back: PageTransport, prefill_manager: KVManager, decode_manager: KVManager) -> None:
        self._there, self._back = there, back
        self._prefill_manager, self._decode_manager = prefill_manager, decode_manager
        self.num_pages_moved = 0

    def move(self, sequence: RunningSequence, reserved_pages: int) -> bool:
        """See `KVTransfer`. Moves only what the decode mesh does not hold already. Nothing here waits: both devices run what they are given
        in order, so the pages given back on the prefill mesh are read before any later program writes to them."""
        prefill, decode = sequence.prefill_pages, sequence.decode_pages
        num_tokens = len(sequence.token_ids) - 1  # the newest token is not in a page yet
        self._decode_manager.match_prefix(decode, sequence.token_ids, num_tokens, sequence.context)
        held = len(decode)
        if not self._decode_manager.grow(decode, self._prefill_manager.num_tokens(prefill), reserved_pages, filled=num_tokens):
            self._decode_manager.free(decode)
            return False
        self._move(prefill[held:], decode[held:])
        self._decode_manager.insert(decode, sequence.token_ids, num_tokens, sequence.context)
        self._prefill_manager.free(prefill)
        return True

    def recall(self, sequence: RunningSequence, table: list[int], num_cached: int) -> int:
        """Fill a sequence's page table on the prefill mesh with what the decode mesh alone has of its tokens, as of an answer that is now
        part of the prompt, after the `num_cached` tokens that it holds; returns how many it holds then."""
        held: list[int] = []
        num_held = self._decode_manager.match_prefix(held, sequence.token_ids, len(sequence.token_ids) - 1, sequence.context)
        if num_held > num_cached:
            self._prefill_manager.begin_anew(table, sequence.token_ids, num_cached, num_held, sequence.context)
            first = num_cached // self._prefill_manager.spec.page_size * self._prefill_manager.spec.num_groups
            self._move(held[first:], table[first : len(held)], back=True)
        self._decode_manager.free(held)
        return max(num_cached, num_held)

    def warm_up(self) -> None:
        """Move the null page in every size: between meshes of different shapes `device_put` compiles programs of its own."""
        for size in MOVE_BUCKETS:
            for back in (False, True):
                self._move_at_once([NULL_PAGE] * size, [NULL_PAGE] * size, [0] * size, back)

    def _move(self, source: list[int], target: list[int], back: bool = False) -> None:
        # Page tables from a run's first group on.
        # Where either has none there is nothing that anyone still attends to.
        groups = (place % self._prefill_manager.spec.num_groups for place in range(len(source)))
        pages = [(here, there, group) for here, there, group in zip(source, target, groups, strict=True) if NULL_PAGE not in (here, there)]
        most = MOVE_BUCKETS[-1]
        for start in range(0, len(pages), most):
            part = pages[start : start + most]
            self._move_at_once([page for page, _, _ in part], [page for _, page, _ in part], [group for _, _, group in part], back)
        self.num_pages_moved += len(pages)

    def _move_at_once(self, source: list[int], target: list[int], groups: list[int], back: bool) -> None:
        (self._back if back else self._there).move(source, target, groups)
