"""PeerTier: pages that other engines have, as far as this one was told. Imports no JAX."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxinfer.kv_tiers.rate import Rate

PEER_GUESS = 1e9  # bytes a second
_MOST_KNOWN = 65536  # pages

# Fetches pages by key from an address into rows of an array; returns how many came, from the first on.
FetchPages = Callable[[str, Sequence[bytes], np.ndarray], int]


class PeerTier:
    """Whoever gives a request knows who has its prefix. That may have changed when the pages are asked for: then fewer
    come. Hold the owner's lock for all but `read`."""

    def __init__(self, fetch: FetchPages) -> None:
        self._fetch = fetch
        self._addresses: OrderedDict[bytes, str] = OrderedDict()
        self.rate = Rate(PEER_GUESS)
        self.num_hits = 0  # pages fetched

    def expect(self, keys: Iterable[bytes], address: str) -> None:
        """The engine at this address has these pages."""
        for key in keys:
            self._addresses[key] = address
            self._addresses.move_to_end(key)
        while len(self._addresses) > _MOST_KNOWN:
            self._addresses.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """They were not there."""
        for key in keys:
            self._addresses.pop(key, None)

    def address(self, key: bytes) -> str | None:
        """Who has a page."""
        return self._addresses.get(key)

    def read(self, address: str, keys: Sequence[bytes], out: np.ndarray) -> int:
        """Fetch pages into uint8[len(keys), bytes of a page]; returns how many came, from the first on."""
        return self._fetch(address, keys, out)
