"""Tiers: the interface to KV pages that the devices don't have: in host memory, in a file on disk, at other engines.
Imports no JAX."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jaxinfer.kv_cache.events import CacheEvents
from jaxinfer.kv_tiers.disk_file import MAX_KEY_SIZE
from jaxinfer.kv_tiers.disk_tier import DiskTier
from jaxinfer.kv_tiers.host_tier import HostTier
from jaxinfer.kv_tiers.peer_tier import FetchPages, PeerTier
from jaxinfer.stats import TierStats

logger = logging.getLogger(__name__)

_PEER_READERS = 4  # threads


@dataclass(frozen=True, slots=True)
class TierMatch:
    """The prefix that the tiers have, and the expected time of fetching it at recent rates."""

    num_pages: int  # consecutive ones from the start
    host_bytes: int
    disk_bytes: int  # of pages that are on disk only
    seconds: float
    wait_seconds: float  # until earlier fetches are done
    peer_bytes: int = 0  # of pages that only other engines have


class Tiers:
    """Pages by key. A key has at most MAX_KEY_SIZE bytes and identifies a page and all before it. `put` copies to host
    memory, which evicts its least recently used page. With a disk, a thread also writes every page to the file, so it
    stays when host memory evicts it. A page evicted before it was written is lost (and counted): nothing waits for a
    disk.

    Other engines' pages are known once somebody has told of them (`expect`), and fetched with `connect`'s function, by
    threads of their own: an engine that is silent holds up no other fetch. `events` has what is here, in memory or on
    disk, for others to know.

    Any thread may call; `put`, `touch`, `find` and `fetch` never wait for I/O. One lock guards the state of both tiers.
    It is not held while bytes are copied: a copy holds a reference to its slot instead."""

    def __init__(self, page_bytes: int, host_size: int, disk: tuple[str, int] | None = None, fingerprint: bytes = b"") -> None:
        """`disk`: a file's path and size in bytes. `fingerprint`: all that a page's meaning depends on besides its key.
        Raises `ConfigError` for sizes that hold no page, and for a file that can't be used."""
        self.page_bytes = page_bytes
        self._host = HostTier(host_size, page_bytes)
        self._disk = DiskTier(*disk, page_bytes, fingerprint) if disk else None
        self._peers: PeerTier | None = None
        self.events = CacheEvents()
        self._changed = threading.Condition()  # guards everything below, and the tiers' slots
        self._unsaved: dict[bytes, None] = {}  # pages in host memory that are to be written, in order
        self._is_writing = False
        self._pending: dict[Future[np.ndarray], float] = {}  # unfinished fetches -> expected seconds
        self._num_dropped = self._written_bytes = 0
        self._is_closing = False
        for slots in (self._host.slots, *([self._disk.slots] if self._disk else [])):
            kept = slots.keys()
            for key in kept:
                self._tell(key)
            slots.when_changed = self._tell
        self._reader = ThreadPoolExecutor(1, "kv-tiers-reader")
        self._peer_reader = ThreadPoolExecutor(_PEER_READERS, "kv-peer-reader")
        self._writer: threading.Thread | None = None
        if self._disk:
            self._writer = threading.Thread(target=self._write_behind, args=(self._disk,), name="kv-tiers-writer", daemon=True)
            self._writer.start()

    @property
    def num_host_slots(self) -> int:
        """Pages that fit into host memory."""
        return self._host.slots.num_slots

    @property
    def num_disk_slots(self) -> int:
        """Pages that fit into the file; 0 without one."""
        return self._disk.slots.num_slots if self._disk else 0

    def put(self, pages: Iterable[tuple[bytes, np.ndarray]]) -> None:
        """Copy pages: uint8 of any shape and strides with `page_bytes` elements. Later ones are evicted later: give a
        prefix's end before its beginning, which is needed to use the end. A known key keeps its bytes."""
        for key, page in pages:
            assert len(key) <= MAX_KEY_SIZE, key
            with self._changed:
                self._touch(key)
                is_in_host = key in self._host.slots
            if not is_in_host:
                self._put_in_host(key, page)

    def connect(self, fetch: FetchPages) -> None:
        """From now on pages of other engines are fetched with this function, which any thread may call."""
        self._peers = PeerTier(fetch)

    def expect(self, keys: Sequence[bytes], address: str) -> None:
        """Another engine has these pages. Of no effect before `connect`."""
        if self._peers is not None:
            with self._changed:
                self._peers.expect([key for key in keys if key not in self._host.slots], address)

    def forget_all(self) -> None:
        """Forget every page in host memory: what they hold is no longer right. For tiers without a disk, and while
        nothing is being fetched."""
        assert self._disk is None, "its file's fingerprint would be wrong"
        with self._changed:
            self._host.slots.discard(list(self._host.slots.keys()))

    def touch(self, key: bytes) -> bool:
        """Mark a page as just used, as `put` does. False if it isn't here: then it should be copied from the device."""
        with self._changed:
            return self._touch(key)

    def find(self, keys: Sequence[bytes], *, own_only: bool = False) -> TierMatch:
        """Match the longest prefix of keys that are all here, or at other engines. Changes nothing."""
        with self._changed:
            return self._find(keys, own_only=own_only)

    def fetch(self, keys: Sequence[bytes], later_keys: Sequence[bytes] = (), *, own_only: bool = False) -> Future[np.ndarray]:
        """Start reading pages. The future's result is uint8[num_pages, page_bytes], read-only: the longest prefix that
        is here and intact, perhaps shorter than what was found. Poll it with `done`; `cancel` it when it isn't needed.

        If a page of the file is damaged, the file drops it, all that follow it, and `later_keys`, the rest of the
        prefix. All are then computed and saved again; otherwise each request would find one more damaged page.

        `own_only`: without other engines' pages, as one of these has to ask."""
        with self._changed:
            found = self._find(keys, own_only=own_only)
            after = (*keys[found.num_pages :], *later_keys)
            keys = tuple(keys[: found.num_pages])
            for key in reversed(keys):
                self._touch(key)
            fetched: Future[np.ndarray] = Future()
            self._pending[fetched] = found.seconds
        fetched.add_done_callback(self._forget_pending)
        (self._peer_reader if found.peer_bytes else self._reader).submit(self._read, keys, after, fetched)
        return fetched

    def stats(self) -> TierStats:
        with self._changed:
            now, disk = time.monotonic(), self._disk
            host_pages, disk_pages = len(self._host.slots), len(disk.slots) if disk else 0
            return TierStats(
                host_size=self._host.slots.num_slots * self.page_bytes,
                host_pages=host_pages,
                host_bytes=host_pages * self.page_bytes,
                disk_size=disk.slots.num_slots * self.page_bytes if disk else 0,
                disk_pages=disk_pages,
                disk_bytes=disk_pages * self.page_bytes,
                num_unsaved=len(self._unsaved) + self._is_writing,
                host_bytes_per_second=self._host.rate.bytes_per_second(now),
                disk_bytes_per_second=disk.rate.bytes_per_second(now) if disk else 0.0,
                num_host_hits=self._host.num_hits,
                num_disk_hits=disk.num_hits if disk else 0,
                num_peer_hits=self._peers.num_hits if self._peers else 0,
                peer_bytes_per_second=self._peers.rate.bytes_per_second(now) if self._peers else 0.0,
                num_dropped=self._num_dropped,
                num_failed_writes=disk.num_failed_writes if disk else 0,
                written_bytes=self._written_bytes,
                refused=dict(disk.refused) if disk else {},
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every page is on disk or given up. False if that took longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unsaved and not self._is_writing, timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Cancel fetches that haven't begun, write unsaved pages for up to `timeout` seconds, release the file."""
        if self._is_closing:
            return
        self._reader.shutdown(cancel_futures=True)
        self._peer_reader.shutdown(wait=False, cancel_futures=True)
        for fetched in tuple(self._pending):
            fetched.cancel()
        self.flush(timeout)
        with self._changed:
            self._is_closing = True
            self._unsaved.clear()
            self._changed.notify_all()
        if self._disk and self._writer:
            self._writer.join()
            self._disk.close()

    def _touch(self, key: bytes) -> bool:
        is_on_disk = self._disk is not None and self._disk.slots.touch(key)
        return self._host.slots.touch(key) or is_on_disk

    def _tell(self, key: bytes) -> None:
        """Record whether a page is here now."""
        is_here = key in self._host.slots or (self._disk is not None and key in self._disk.slots)
        if is_here != (key in self.events):
            (self.events.inserted if is_here else self.events.evicted)(key)

    def _find(self, keys: Sequence[bytes], *, own_only: bool = False) -> TierMatch:
        in_host = on_disk = at_peers = 0
        for key in keys:
            if key in self._host.slots:
                in_host += 1
            elif self._disk and key in self._disk.slots:
                on_disk += 1
            elif self._peers and not own_only and self._peers.address(key) is not None:
                at_peers += 1
            else:
                break
        host_bytes, disk_bytes, now = in_host * self.page_bytes, on_disk * self.page_bytes, time.monotonic()
        seconds = self._host.rate.seconds_for(host_bytes, now)
        if self._disk:
            seconds += self._disk.rate.seconds_for(disk_bytes, now)
        peer_bytes = at_peers * self.page_bytes
        if self._peers:
            seconds += self._peers.rate.seconds_for(peer_bytes, now)
        return TierMatch(in_host + on_disk + at_peers, host_bytes, disk_bytes, seconds, sum(self._pending.values()), peer_bytes)

    def _forget_pending(self, fetched: Future[np.ndarray]) -> None:
        with self._changed:
            del self._pending[fetched]

    def _put_in_host(self, key: bytes, page: np.ndarray) -> None:
        """Copy a page to host memory, evicting others if needed. If every slot is in use now, the page is dropped."""
        with self._changed:
            while (slot := self._host.slots.reserve()) is None:
                gone = self._host.slots.evict()
                if gone is None:
                    self._num_dropped += 1
                    return
                if gone in self._unsaved:
                    del self._unsaved[gone]
                    self._num_dropped += 1
        self._host.write(slot, page)
        with self._changed:
            self._host.slots.publish(key, slot)
            if self._disk and key not in self._disk.slots:
                self._unsaved[key] = None
                self._changed.notify_all()

    def _read(self, keys: Sequence[bytes], after: Sequence[bytes], fetched: Future[np.ndarray]) -> None:
        """Runs in the reader's thread."""
        if not fetched.set_running_or_notify_cancel():
            return
        try:
            pages, from_disk = self._read_pages(keys, after)
        except Exception as error:
            fetched.set_exception(error)
            return
        fetched.set_result(pages)
        # Pages from disk are in demand now: copy as many as fit to host memory, the prefix's beginning last. Nobody
        # waits for this.
        for index in reversed(from_disk[: self._host.slots.num_slots]):
            self._put_in_host(keys[index], pages[index])

    def _read_pages(self, keys: Sequence[bytes], after: Sequence[bytes]) -> tuple[np.ndarray, list[int]]:
        """The longest intact prefix, and the indices of pages from disk. Drops what follows a damaged page."""
        pages = np.empty((len(keys), self.page_bytes), np.uint8)
        from_disk: list[int] = []
        num_read = 0
        while num_read < len(keys):
            key, page = keys[num_read], pages[num_read]
            tier, refusal = self._read_page(key, page)
            if refusal:
                self._drop_after(key, refusal, (*keys[num_read + 1 :], *after))
            if tier is None:
                num_fetched = self._read_from_peer(keys[num_read:], pages[num_read:])
                num_read += num_fetched
                if num_fetched:
                    continue
                break
            if tier is self._disk:
                from_disk.append(num_read)
            num_read += 1
        pages.flags.writeable = False
        return pages[:num_read], from_disk

    def _read_from_peer(self, keys: Sequence[bytes], out: np.ndarray) -> int:
        """Fetch the first of these pages, and those after it that the same engine has; how many came."""
        peers = self._peers
        if peers is None:
            return 0
        with self._changed:
            address = peers.address(keys[0])
            run = list(itertools.takewhile(lambda key: peers.address(key) == address and key not in self._host.slots, keys))
        if address is None or not run:
            return 0
        start = time.monotonic()
        count = peers.read(address, run, out[: len(run)])
        now = time.monotonic()
        with self._changed:
            peers.rate.observe(count * self.page_bytes, now - start, now)
            peers.num_hits += count
            peers.forget(run[count:])
        return count

    def _drop_after(self, damaged: bytes, refusal: str, keys: Sequence[bytes]) -> None:
        assert self._disk
        with self._changed:
            if damaged in self._disk.slots:  # replaced in the meantime
                return
            num_dropped = self._disk.slots.discard(keys)
            self._unsaved |= dict.fromkeys(key for key in keys if key in self._host.slots)
            self._changed.notify_all()
        logger.warning("kv_disk: a page is %s: it and the %d after it are dropped, to be computed and saved again", refusal, num_dropped)

    def _read_page(self, key: bytes, out: np.ndarray) -> tuple[HostTier | DiskTier | None, str | None]:
        """The tier that a page was copied from, None if none has it intact; and why the file's page was refused."""
        with self._changed:
            tier: HostTier | DiskTier | None = self._host
            slot = self._host.slots.hold(key)
            if slot is None:
                tier, slot = self._disk, self._disk.slots.hold(key) if self._disk else None
            if tier is None or slot is None:
                return None, None
        start = time.monotonic()
        refusal = tier.read(slot, out)
        now = time.monotonic()
        with self._changed:
            tier.slots.release(slot)
            if isinstance(tier, DiskTier) and refusal:
                tier.refused[refusal] += 1
                tier.slots.forget(key, slot)
                return None, refusal
            tier.rate.observe(self.page_bytes, now - start, now)
            tier.num_hits += 1
        return tier, None

    def _write_behind(self, disk: DiskTier) -> None:
        """Runs in the writer's thread: writes unsaved pages to the file, one after another."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsaved or self._is_closing)
                if self._is_closing:
                    return
                key = next(iter(self._unsaved))
                del self._unsaved[key]
                self._changed.notify_all()
                if key in disk.slots:  # it was evicted during its write, and came back
                    continue
                target = disk.reserve(time.monotonic())
                if target is None:
                    self._num_dropped += 1
                    continue
                source = self._host.slots.hold(key)
                assert source is not None, "an unsaved page is in host memory"
                self._is_writing = True
            result: int | OSError
            try:
                result = disk.write(target, key, self._host.page(source))
            except OSError as error:
                result = error
            with self._changed:
                self._host.slots.release(source)
                if isinstance(result, OSError):
                    disk.fail(target, result, time.monotonic())
                    self._num_dropped += 1
                else:
                    disk.publish(key, target, result)
                    self._written_bytes += self.page_bytes
                self._is_writing = False
                self._changed.notify_all()
