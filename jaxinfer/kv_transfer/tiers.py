"""Between the devices' pages and the tiers below them: what the prefix cache evicts goes down, what a waiting request needs comes up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.radix_cache import CachedPage
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.kv_tiers.tiers import Tiers
from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS, PageMover
from jaxinfer.sequence import Sequence

_MOST_COPIES = 4  # under way from a device to the host; each holds MOVE_BUCKETS[-1] pages of device memory at most


@dataclass(frozen=True, slots=True)
class _Copy:
    """Pages on their way from a device to the tiers."""

    keys: list[bytes]
    pages: Any  # a jax.Array


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Pages on their way from the tiers to a sequence that waits."""

    sequence: Sequence
    first: int  # the place of the first one in the sequence's page table
    pages: Future[np.ndarray]


class TierTransfer:
    """`pools`: the prefill mesh's pages first, to which pages come back, then the decode mesh's where that is another.
    `seconds_to_compute(num_tokens)`: what prefill would take, as measured."""

    def __init__(self, tiers: Tiers, pools: list[tuple[PageMover, KVManager]], seconds_to_compute: Callable[[int], float]) -> None:
        self.tiers = tiers
        self.num_tokens_restored = 0
        self._mover, self._manager = pools[0]
        self._movers = [mover for mover, _ in pools]
        self._seconds_to_compute = seconds_to_compute
        self._copies: deque[_Copy] = deque()
        self._fetches: dict[Sequence, _Fetch] = {}
        for mover, manager in pools:
            manager.save_evicted = self._saver(mover)

    def warm_up(self) -> None:
        """Move the null page both ways in every size."""
        for size in MOVE_BUCKETS:
            null = [NULL_PAGE] * size
            for mover in self._movers:
                pages = np.asarray(mover.gather(null))
            self._mover.scatter(self._mover.put(np.zeros_like(pages)), null)

    def begin(self, sequence: Sequence) -> bool:
        """Start to fetch what the tiers have of a waiting sequence's tokens beyond what its mesh has; False if they have nothing, or
        computing it again is quicker."""
        most, page_size = len(sequence.token_ids) - 1, self._manager.spec.page_size
        if sequence.needs_prompt_scores or most < page_size:
            return False
        keys, held = self._manager.keys(sequence.token_ids, most, sequence.context)
        found = self.tiers.find(keys[held:])
        if not found.num_pages or found.seconds + found.wait_seconds > self._seconds_to_compute(found.num_pages * page_size):
            return False
        self._fetches[sequence] = _Fetch(sequence, held, self.tiers.fetch(keys[held : held + found.num_pages]))
        return True

    def forget(self, sequence: Sequence) -> None:
        """A sequence needs what is fetched for it no more."""
        if (fetch := self._fetches.pop(sequence, None)) is not None:
            fetch.pages.cancel()

    def poll(self, timeout: float) -> list[Sequence]:
        """Go on with what is under way; returns the waiting sequences whose fetches have ended, waiting `timeout` seconds for the first."""
        if timeout and self._fetches:
            futures.wait([fetch.pages for fetch in self._fetches.values()], timeout, futures.FIRST_COMPLETED)
        while self._copies and self._copies[0].pages.is_ready():
            self._store(self._copies.popleft())
        return [fetch.sequence for fetch in self._fetches.values() if fetch.pages.done()]

    def fill(self, sequence: Sequence, table: list[int], num_cached: int) -> int:
        """Write the pages fetched for a sequence into its page table after the `num_cached` tokens that it holds; returns how many it
        holds then. The table must be long enough."""
        fetch, page_size = self._fetches.pop(sequence, None), self._manager.spec.page_size
        if fetch is None or not fetch.pages.done() or fetch.pages.cancelled() or fetch.pages.exception() is not None:
            return num_cached
        fetched, held = fetch.pages.result(), num_cached // page_size
        if held < fetch.first:  # pages before these have gone meanwhile
            return num_cached
        fetched = fetched[held - fetch.first :]
        for start in range(0, len(fetched), MOVE_BUCKETS[-1]):
            part = fetched[start : start + MOVE_BUCKETS[-1]]
            self._mover.scatter(self._mover.put_bytes(part), table[held + start : held + start + len(part)])
        self.num_tokens_restored += len(fetched) * page_size
        return (held + len(fetched)) * page_size

    def close(self) -> None:
        """Save what the devices keep, as far as that takes no longer than some seconds, and let go of the tiers."""
        self._manager.forget()
        while self._copies:
            self._store(self._copies.popleft())
        self.tiers.close()

    def _saver(self, mover: PageMover) -> Callable[[list[CachedPage]], None]:
        def save(evicted: list[CachedPage]) -> None:
            new = [node for node in evicted if not self.tiers.touch(node.digest)]
            for start in range(0, len(new), MOVE_BUCKETS[-1]):
                part = new[start : start + MOVE_BUCKETS[-1]]
                pages = mover.gather([node.page for node in part])
                pages.copy_to_host_async()
                self._copies.append(_Copy([node.digest for node in part], pages))
            while len(self._copies) > _MOST_COPIES:
                self._store(self._copies.popleft())

        return save

    def _store(self, copy: _Copy) -> None:
        pages = np.asarray(copy.pages).view(np.uint8)  # [L, 2, X, K, G, bytes]
        self.tiers.put((key, pages[:, :, i]) for i, key in enumerate(copy.keys))
