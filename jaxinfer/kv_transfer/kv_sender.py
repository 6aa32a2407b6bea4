"""KVSender: a prefilled sequence's pages on the host, for a decode role elsewhere to pull while prefill goes on.

The engine's thread adds pages as soon as the step that writes them was started; other threads read them. The device's
pages are free again once they have been copied out. The host's copies last until `close`, or until their lease runs
out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxinfer.kv_transfer.handoff import HandOffError
from jaxinfer.kv_transfer.repaging import Repaging

LEASE_SECONDS = 30.0  # without a word from who pulls

_COPIERS = ThreadPoolExecutor(2, "kv-sender")  # where waiting for a device's copy blocks nobody else


class KVSender:
    """`num_known`: leading tokens that the receiver has already, whose pages are not copied. `repaging`: where it has
    pages of another size."""

    def __init__(self, num_known: int = 0, repaging: Repaging | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_known = num_known
        self._repaging = repaging
        self._clock = clock
        self._pages: dict[int, np.ndarray] = {}  # by place in the page table, uint8[bytes of a page]
        self._added: set[int] = set()  # of these, also those still on their way
        self._is_all = False  # nothing is added any more
        self._failure: str | None = None
        self._changed = threading.Condition()
        self.when_closed: Callable[[], None] = lambda: None  # called by `close`, in any thread
        self._lease_ends = clock() + LEASE_SECONDS

    def add(self, places: Sequence[int], gathered: Any) -> None:
        """Pages for these places of the page table, in an array of a device or the host, [pages, ...]; padding after
        them is left out. Returns at once."""
        self._added.update(places)
        _COPIERS.submit(self._copy, places, gathered)

    def missing(self, places: Iterable[int]) -> list[int]:
        """Those that were not added."""
        return [place for place in places if place not in self._added]

    def finish(self) -> None:
        """All pages were added."""
        with self._changed:
            self._is_all = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Nobody will add the rest. Of no effect after `close`."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of the host's copies: the hand-off is over."""
        with self._changed:
            self._failure = self._failure or "the hand-off is over"
            self._pages.clear()
            self._changed.notify_all()
        self.when_closed()

    def renew(self, waits: float = 0.0) -> None:
        """Whoever pulls is alive, and may wait for so many seconds from now."""
        self._lease_ends = self._clock() + waits + LEASE_SECONDS

    @property
    def is_expired(self) -> bool:
        return self._clock() > self._lease_ends

    def page(self, place: int, timeout: float) -> np.ndarray:
        """The bytes of the receiver's page at this place, uint8[bytes], once they are there. Raises `HandOffError`
        where they will never be, or don't come within `timeout` seconds."""
        sources = range(place, place + 1) if self._repaging is None else self._repaging.sources(place)
        with self._changed:
            self.renew(timeout)  # who waits for a prompt that is queued here is there
            arrived = self._changed.wait_for(lambda: self._failure is not None or self._have(sources), timeout)
            if self._failure is not None:
                raise HandOffError(self._failure)
            found = {source: self._pages[source] for source in sources if source in self._pages}
        if not arrived or not found:
            raise HandOffError(f"page {place} did not come within {timeout:g} s" if not arrived else f"there is no page {place}")
        return found[place] if self._repaging is None else self._repaging.page(place, found)

    def is_here(self, place: int) -> bool:
        """Whether `page` would give this one without waiting."""
        sources = range(place, place + 1) if self._repaging is None else self._repaging.sources(place)
        with self._changed:
            return self._failure is None and self._have(sources) and any(source in self._pages for source in sources)

    def _have(self, sources: Iterable[int]) -> bool:
        """Whether all of these are here that will ever be."""
        return all(source in self._pages or (self._is_all and source not in self._added) for source in sources)

    def _copy(self, places: Sequence[int], gathered: Any) -> None:
        try:
            pages = np.asarray(gathered)[: len(places)]
            rows = pages.reshape(len(places), -1).view(np.uint8)
        except Exception as error:  # the device failed: so will the engine's thread
            self.fail(f"the pages can't be read: {type(error).__name__}: {error}")
            return
        with self._changed:
            if self._failure is None:
                self._pages.update(zip(places, rows, strict=True))
            self._changed.notify_all()
