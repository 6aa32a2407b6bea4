"""CacheEvents: which blocks a prefix cache has, told to others who want to know, by digest. Imports no JAX.

The engine's thread records; others read what has happened since they last asked. A reader who asks too late gets all
that is there now, and starts again from it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass

_MOST_KEPT = 65536  # events


@dataclass(frozen=True)
class CacheChange:
    """Digests of 16 bytes, of blocks that came and went with events `first` to `last`; in neither is what came and
    went again. `is_reset`: forget what was known before; `inserted` is all that is there."""

    first: int
    last: int
    inserted: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()
    is_reset: bool = False


class CacheEvents:
    """One thread records, any may read. `most_kept`: events that a reader may be behind."""

    def __init__(self, most_kept: int = _MOST_KEPT) -> None:
        self._present: set[bytes] = set()
        self._recorded: deque[tuple[bytes, bool]] = deque(maxlen=most_kept)  # and whether it came
        self._last = 0  # the newest event's number
        self._lock = threading.Lock()

    def __contains__(self, digest: bytes) -> bool:
        """Whether it is there now."""
        with self._lock:
            return digest in self._present

    def inserted(self, digest: bytes) -> None:
        with self._lock:
            self._present.add(digest)
            self._record(digest, has_come=True)

    def evicted(self, digest: bytes) -> None:
        with self._lock:
            self._present.discard(digest)
            self._record(digest, has_come=False)

    def since(self, number: int | None) -> CacheChange | None:
        """What has happened after event `number`, None: from the beginning; None if nothing has."""
        with self._lock:
            num_missed = self._last - number if number is not None else self._last + 1
            if number is None or not 0 <= num_missed <= len(self._recorded):
                return CacheChange(0, self._last, tuple(self._present), is_reset=True)
            if not num_missed:
                return None
            final: dict[bytes, bool] = {}
            for digest, has_come in itertools.islice(reversed(self._recorded), num_missed):
                final.setdefault(digest, has_come)
            came = tuple(digest for digest, has_come in final.items() if has_come)
            went = tuple(digest for digest, has_come in final.items() if not has_come)
            return CacheChange(number + 1, self._last, came, went)

    def _record(self, digest: bytes, *, has_come: bool) -> None:
        self._last += 1
        self._recorded.append((digest, has_come))
