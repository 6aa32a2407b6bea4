"""CachedPages: what an engine's prefix cache and tiers have, for other engines; and what these have. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from jaxinfer.decode.role import DecodeRole
from jaxinfer.kv_cache.block_keys import TokenHistory, block_keys, digests
from jaxinfer.kv_cache.events import CacheEvents
from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_tiers.peer_tier import FetchPages
from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS, HostPageMover
from jaxinfer.prefill.role import PrefillRole

_FETCH_SECONDS = 5.0  # for pages of this engine's own tiers

Call = Callable[[Callable[[], Any]], Any]  # runs a function in the engine's thread


class CachedPages:
    """Of an engine whose pages others may ask for (`kv_peers`), of a model with one group of layers; of others
    nothing is found. Any thread may call, but for `gather`."""

    def __init__(self, prefill: PrefillRole, decode: DecodeRole) -> None:
        managers = [prefill.manager] if prefill.manager is decode.manager else [prefill.manager, decode.manager]
        movers = (prefill.mover, decode.mover)
        self._page_size, self._page_bytes = prefill.manager.spec.page_size, prefill.manager.spec.page_bytes
        self._pools: list[tuple[KVManager, HostPageMover]] = [
            (manager, mover) for manager, mover in zip(managers, movers, strict=False) if mover is not None and manager.events is not None
        ]
        if prefill.manager.spec.num_groups > 1:
            self._pools = []
        self._device_events = prefill.manager.events
        self._tiers = None if prefill.tiers is None else prefill.tiers.tiers

    @property
    def events(self) -> list[CacheEvents]:
        """What came and went: on the devices, then below them."""
        below = None if self._tiers is None else self._tiers.events
        return [events for events in (self._device_events, below) if events is not None]

    def connect(self, fetch: FetchPages) -> None:
        """Fetch what `expect` says from other engines, with this function."""
        if self._tiers is not None:
            self._tiers.connect(fetch)

    def expect(self, history: TokenHistory, num_tokens: int, address: str) -> None:
        """The engine at this address has the first tokens of a request that comes next, in pages of the same size."""
        if self._tiers is not None:
            keys = block_keys(history, self._page_size, num_tokens // self._page_size)
            self._tiers.expect(digests(history.context.namespace, keys), address)

    def read(self, keys: Sequence[bytes], call: Call) -> Iterator[np.ndarray]:
        """Pages by digest, uint8[bytes of a page], up to the first one that is neither in the tiers nor in a prefix
        cache."""
        start = 0
        while start < len(keys):
            left = keys[start:]
            pages = [*self._from_tiers(left)]
            for gathered, count in [] if pages else call(partial(self.gather, left)):
                pages += [*np.asarray(gathered)[:count].reshape(count, -1).view(np.uint8)]
            yield from pages
            if not pages:
                return
            start += len(pages)

    def gather(self, keys: Sequence[bytes]) -> list[tuple[Any, int]]:
        """Copies of the pages that one prefix cache has of these, from the first on, and how many each array has. In
        the engine's thread."""
        runs = [(manager.cached_run(keys), mover) for manager, mover in self._pools]
        page_ids, mover = max(runs, key=lambda run: len(run[0]), default=([], None))
        size = MOVE_BUCKETS[-1]
        parts = [page_ids[start : start + size] for start in range(0, len(page_ids), size)]
        return [] if mover is None else [(mover.gather(part), len(part)) for part in parts]

    def _from_tiers(self, keys: Sequence[bytes]) -> np.ndarray:
        if self._tiers is None or not self._tiers.find(keys[:1], own_only=True).num_pages:
            return np.empty((0, self._page_bytes), np.uint8)
        fetched: Future[np.ndarray] = self._tiers.fetch(keys, own_only=True)
        try:
            return fetched.result(_FETCH_SECONDS)
        except TimeoutError:
            fetched.cancel()
            return np.empty((0, self._page_bytes), np.uint8)
