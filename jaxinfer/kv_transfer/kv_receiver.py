"""KVReceiver: a hand-off's pages on the host of the decode role that pulls them. Imports no JAX.

The engine's thread says which pages it wants; another thread fetches them and tells of each that has arrived whole, and
of the source's first token. What has arrived is in order, so that the engine can write it to the device while the rest
is on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.request import TokenLogprob


@dataclass(frozen=True)
class FirstToken:
    """What the source's prefill gave besides pages."""

    token_id: int
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    num_cached: int = 0  # prompt tokens whose KV it had
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0


class KVReceiver:
    """`start(receiver, places)` begins to fetch the pages at these places of the source's page table into `pages`; it
    is called once, in the engine's thread, and must not wait. `changed` is set whenever something has arrived; an
    engine puts the one that it waits for in its place before it starts."""

    def __init__(self, start: Callable[[KVReceiver, Sequence[int]], None], geometry: PageSpec) -> None:
        self.geometry = geometry
        self.pages = np.zeros((0, geometry.page_bytes), np.uint8)
        self.num_arrived = 0  # of `pages`, from the first on
        self.first_token: FirstToken | None = None
        self.failure: str | None = None
        self.is_over = False  # nobody waits any more: what still arrives is dropped
        self.changed = threading.Event()
        self._start = start

    def want(self, places: Sequence[int]) -> None:
        """Begin to fetch these pages."""
        self.pages = np.empty((len(places), self.geometry.page_bytes), np.uint8)
        self._start(self, places)

    @property
    def is_complete(self) -> bool:
        return self.first_token is not None and self.num_arrived == len(self.pages)

    def arrived(self, num_pages: int) -> None:
        """So many of the pages, from the first on, are there and whole."""
        self.num_arrived = num_pages
        self.changed.set()

    def end(self, first: FirstToken) -> None:
        """The source's prefill has ended."""
        self.first_token = first
        self.changed.set()

    def fail(self, reason: str) -> None:
        """What is missing will not come."""
        self.failure = self.failure or reason
        self.changed.set()
