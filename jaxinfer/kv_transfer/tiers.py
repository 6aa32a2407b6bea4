"""Transfers between the devices' pages and the KV tiers: saves what the prefix cache evicts, fetches what a waiting
request needs."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.radix_cache import CachedBlock
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.kv_tiers.tiers import Tiers
from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS, HostPageMover
from jaxinfer.sequence import Sequence

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0  # for saving the devices' cached pages
_SHORTEST_WAIT, _LONGEST_WAIT = 0.1, 10.0  # bounds on the seconds that a sequence waits for its pages
_MOST_SAVED = 4 * MOVE_BUCKETS[-1]  # pages being copied to host memory at once; they take as much of the device's


@dataclass(eq=False, slots=True)
class _Fetch:
    """A fetch of pages for sequences that wait for the same ones."""

    first: int  # index of the first page in the sequences' page tables
    keys: list[bytes]
    later_keys: list[bytes]  # that follow `keys` in the prefix of the sequence that started the fetch
    give_up_at: float  # seconds, time.monotonic()
    pages: Future[np.ndarray] | None = None  # None: not started, for lack of host memory

    @property
    def is_done(self) -> bool:
        return self.pages is not None and self.pages.done()


class TierTransfer:
    """`pools`: the prefill mesh's first, to which pages are fetched, then the decode mesh's if that is another.
    `seconds_to_compute(num_tokens)`: predicted prefill time. `most_fetched`: pages in host memory for fetches in
    progress, of the most urgent sequences first; a single fetch has no more.

    No sequence waits for its pages longer than computing them would take (or a tenth of a second), even if the disk
    hangs."""

    def __init__(
        self, tiers: Tiers, pools: list[tuple[HostPageMover, KVManager]], seconds_to_compute: Callable[[int], float], most_fetched: int
    ) -> None:
        assert most_fetched > 0, most_fetched
        self.tiers = tiers
        self.num_tokens_restored = 0
        self._pools = pools
        self._mover, self._manager = pools[0]
        self._seconds_to_compute = seconds_to_compute
        self._most_fetched = most_fetched
        self._seconds_to_move = 0.0  # for a page from host memory to the mesh
        self._fetches: dict[Sequence, _Fetch] = {}
        self._asked_again: set[Sequence] = set()
        self._late: Future[np.ndarray] | None = None  # a read that exceeded its time
        self._saves: deque[tuple[int, Future[None]]] = deque()  # number of pages, and the save in progress
        self._saver = ThreadPoolExecutor(1, "kv-tiers-saver")
        self._is_closed = False
        if tiers.num_host_slots:  # else there are other engines' pages only
            for mover, manager in pools:
                manager.save_evicted = self._save_with(mover)

    def warm_up(self) -> None:
        """Copy the null page both ways in every size, and time the copies to the mesh."""
        for size in MOVE_BUCKETS:
            null = [NULL_PAGE] * size
            for mover, _ in self._pools:
                np.asarray(mover.gather(null))
            seconds = min(self._time_up(np.zeros((size, self.tiers.page_bytes), np.uint8), null) for _ in range(3))
        self._seconds_to_move = seconds / size

    def begin(self, sequence: Sequence) -> bool:
        """Start to fetch the pages of a waiting sequence's prefix that the tiers have beyond the devices'. False if
        there are none, or if computing them is faster."""
        return self._begin(sequence, *self._missing(sequence))

    def begin_again(self, sequence: Sequence) -> bool:
        """Call before a sequence is admitted: pages may have been evicted to the tiers while it waited. True at most
        once, if a fetch was started."""
        if sequence in self._asked_again:
            return False
        first, keys = self._missing(sequence)
        fetch = self._fetches.get(sequence)
        if fetch is not None and fetch.first <= first:
            return False
        self._drop(sequence)
        self._asked_again.add(sequence)
        return self._begin(sequence, first, keys)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence's fetch."""
        self._asked_again.discard(sequence)
        self._drop(sequence)

    def poll(self, timeout: float) -> list[Sequence]:
        """Advance saves and fetches; returns the sequences whose fetches have ended, waiting up to `timeout` seconds
        for the first."""
        while self._saves and self._saves[0][1].done():
            self._end_oldest_save()
        if not self._fetches:
            return []
        ended = self._ended()
        self._start(set(ended))
        under_way = [fetch.pages for fetch in self._fetches.values() if fetch.pages is not None]
        if timeout and not ended and under_way:
            futures.wait(under_way, timeout, futures.FIRST_COMPLETED)
            ended = self._ended()
        return ended

    def fill(self, sequence: Sequence, table: list[int], num_cached: int) -> int:
        """Write a sequence's fetched pages into its page table, after its `num_cached` tokens; returns the new number
        of cached tokens. The table must be long enough."""
        fetch, page_size = self._fetches.get(sequence), self._manager.spec.page_size
        fetched = None if fetch is None else _result(fetch)
        self.forget(sequence)
        held = num_cached // page_size
        if fetch is None or fetched is None or held < fetch.first:  # pages before these have gone meanwhile
            return num_cached
        fetched = fetched[held - fetch.first :]
        for start in range(0, len(fetched), MOVE_BUCKETS[-1]):
            part = fetched[start : start + MOVE_BUCKETS[-1]]
            self._mover.scatter(self._mover.put_bytes(part), table[held + start : held + start + len(part)])
        self.num_tokens_restored += len(fetched) * page_size
        return (held + len(fetched)) * page_size

    def invalidate(self) -> None:
        """Forget all pages below the devices: what they hold is no longer right. No sequence may wait for any."""
        assert not self._fetches, "a sequence waits for its pages"
        while self._saves:
            self._end_oldest_save()
        if self._late is not None:
            futures.wait([self._late])
        self.tiers.forget_all()

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Save the devices' cached pages to the file, if there is one, for at most `timeout` seconds, and close the
        tiers."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + timeout
        room = self.tiers.num_disk_slots
        for mover, manager in reversed(self._pools):  # the decode mesh has answers too
            pages = manager.cached_pages()[:room]
            room -= len(pages)
            save = self._save_with(mover)
            for start in range(0, len(pages), MOVE_BUCKETS[-1]):
                if not self._flush(deadline):
                    break
                save(pages[start : start + MOVE_BUCKETS[-1]])
        self._flush(deadline)
        self._saver.shutdown(wait=False, cancel_futures=True)
        self.tiers.close(max(0.0, deadline - time.monotonic()))

    def _missing(self, sequence: Sequence) -> tuple[int, list[bytes]]:
        """How many leading pages of a sequence devices have, and what names those after them that it could start
        from."""
        most = 0 if sequence.needs_prompt_scores else len(sequence.token_ids) - 1
        # What only the decode mesh has comes back from there.
        missing_by_pool = (manager.missing(sequence, most) for _, manager in self._pools)
        return max(missing_by_pool, key=lambda missing: missing[0])

    def _begin(self, sequence: Sequence, first: int, keys: list[bytes]) -> bool:
        if not keys or (self._late is not None and not self._late.done()):
            return False
        count = min(self.tiers.find(keys).num_pages, self._most_fetched)
        keys, later_keys = keys[:count], keys[count:]
        if not keys:
            return False
        fetch = next((fetch for fetch in self._fetches.values() if fetch.keys == keys), None)
        if fetch is None:
            found, seconds = self.tiers.find(keys), self._seconds_to_compute(len(keys) * self._manager.spec.page_size)
            if found.seconds + found.wait_seconds + len(keys) * self._seconds_to_move > seconds:
                return False
            fetch = _Fetch(first, keys, later_keys, time.monotonic() + min(max(seconds, _SHORTEST_WAIT), _LONGEST_WAIT))
        self._fetches[sequence] = fetch
        return True

    def _time_up(self, pages: np.ndarray, page_ids: list[int]) -> float:
        started = time.monotonic()
        self._mover.scatter(self._mover.put_bytes(pages), page_ids)
        self._mover.wait()
        return time.monotonic() - started

    def _ended(self) -> list[Sequence]:
        now = time.monotonic()
        late = {s: fetch.pages for s, fetch in self._fetches.items() if not fetch.is_done and now >= fetch.give_up_at}
        for sequence in late:
            self._drop(sequence)
            self._asked_again.add(sequence)
        for pages in late.values():
            if pages is not None and not pages.done():  # being read; others were cancelled
                self._late = pages
        return [*late, *(s for s, fetch in self._fetches.items() if fetch.is_done)]

    def _drop(self, sequence: Sequence) -> None:
        fetch = self._fetches.pop(sequence, None)
        if fetch is not None and fetch.pages is not None and fetch not in self._fetches.values():
            fetch.pages.cancel()

    def _start(self, ended: set[Sequence]) -> None:
        """Start fetches that waited for host memory, the most urgent first. Others that have their pages but aren't
        admitted yet drop them, and fetch again before admission."""
        if all(fetch.pages is not None for fetch in self._fetches.values()):
            return
        by_urgency: dict[_Fetch, list[Sequence]] = {}
        for sequence in sorted(self._fetches, key=lambda s: (s.context.priority, s.order)):
            by_urgency.setdefault(self._fetches[sequence], []).append(sequence)
        room = self._most_fetched
        for fetch, sequences in by_urgency.items():
            room -= len(fetch.keys)
            if room >= 0 and fetch.pages is None:
                fetch.pages = self.tiers.fetch(fetch.keys, fetch.later_keys)
            elif room < 0 and ended.issuperset(sequences):
                for sequence in sequences:
                    self._drop(sequence)

    def _save_with(self, mover: HostPageMover) -> Callable[[list[CachedBlock]], None]:
        def save(pages: list[CachedBlock]) -> None:
            new = [node for node in pages if not self.tiers.touch(node.digest)]
            for start in range(0, len(new), MOVE_BUCKETS[-1]):
                part = new[start : start + MOVE_BUCKETS[-1]]
                while self._saves and sum(num_pages for num_pages, _ in self._saves) + len(part) > _MOST_SAVED:
                    self._end_oldest_save()
                gathered = mover.gather([node.page for node in part])
                gathered.copy_to_host_async()
                self._saves.append((len(part), self._saver.submit(self._store, [node.digest for node in part], gathered)))

        return save

    def _store(self, keys: list[bytes], gathered: Any) -> None:
        """Runs in the saver's thread."""
        pages = np.asarray(gathered).view(np.uint8)
        self.tiers.put(zip(keys, pages, strict=False))  # there may be padding

    def _end_oldest_save(self) -> None:
        self._saves.popleft()[1].result()

    def _flush(self, deadline: float) -> bool:
        """Wait until all saved pages are in the file. False if time is up."""
        futures.wait([save for _, save in self._saves], max(0.0, deadline - time.monotonic()))
        return self.tiers.flush(max(0.0, deadline - time.monotonic())) and time.monotonic() < deadline


def _result(fetch: _Fetch) -> np.ndarray | None:
    if fetch.pages is None or not fetch.pages.done() or fetch.pages.cancelled():
        return None
    if (error := fetch.pages.exception()) is not None:
        logger.warning("KV pages could not be read and are computed again: %r", error)
        return None
    return fetch.pages.result()
