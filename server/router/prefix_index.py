"""PrefixIndex: which workers have the KV of which blocks, by digest. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class Holder(NamedTuple):
    """Where blocks are: in the prefix cache of a worker's devices, or stored in its host memory and on its disk."""

    worker_id: str
    is_stored: bool = False


class PrefixIndex:
    """A block's digest names it with all before it (see `jaxinfer.kv_cache.block_keys`), so a run that a worker has is
    known by asking for each of its blocks in turn. What a worker told of is kept apart from what it was just given:
    that is there soon, and the next request with the same beginning must not go elsewhere."""

    def __init__(self) -> None:
        self._bits: dict[Holder, int] = {}  # one bit each
        self._free_bits: list[int] = []
        self._holders: dict[bytes, int] = {}  # by digest, the bits of holders
        self._held: dict[Holder, set[bytes]] = {}
        self._expected: dict[str, Counter[bytes]] = {}  # by worker; how many requests under way make it

    def __len__(self) -> int:
        """Blocks that any worker told of."""
        return len(self._holders)

    def add(self, holder: Holder, digests: Iterable[bytes]) -> None:
        """These came."""
        bit, held = self._bit(holder), self._held.setdefault(holder, set())
        for digest in digests:
            held.add(digest)
            self._holders[digest] = self._holders.get(digest, 0) | bit

    def discard(self, holder: Holder, digests: Iterable[bytes]) -> None:
        """These went."""
        held = self._held.get(holder, set())
        for digest in digests:
            if digest in held:
                held.remove(digest)
                self._drop(digest, self._bits[holder])

    def replace(self, holder: Holder, digests: Iterable[bytes]) -> None:
        """These are all that it has."""
        self.discard(holder, list(self._held.get(holder, ())))
        self.add(holder, digests)

    def forget(self, worker_id: str) -> None:
        """It is gone."""
        self._expected.pop(worker_id, None)
        for holder in (Holder(worker_id), Holder(worker_id, is_stored=True)):
            self.discard(holder, list(self._held.get(holder, ())))
            self._held.pop(holder, None)
            if (bit := self._bits.pop(holder, None)) is not None:
                self._free_bits.append(bit)

    def expect(self, worker_id: str, digests: Iterable[bytes]) -> None:
        """A request that makes these was given to the worker."""
        self._expected.setdefault(worker_id, Counter()).update(digests)

    def settle(self, worker_id: str, digests: Iterable[bytes]) -> None:
        """That request has ended: from now on the worker's own word counts."""
        expected = self._expected.get(worker_id)
        if expected is None:
            return
        for digest in digests:
            if expected[digest] > 1:
                expected[digest] -= 1
            else:
                del expected[digest]

    def num_held(self, worker_id: str) -> int:
        """Blocks that it told of, on its devices."""
        return len(self._held.get(Holder(worker_id), ()))

    def match(self, digests: Sequence[bytes], worker_ids: Collection[str], *, with_expected: bool = True) -> dict[str, int]:
        """How many of a prompt's blocks, from the first on, each of these workers has, or will have."""
        found = dict.fromkeys(worker_ids, 0)
        for worker_id in worker_ids:
            bits = self._bits.get(Holder(worker_id), 0) | self._bits.get(Holder(worker_id, is_stored=True), 0)
            expected = self._expected.get(worker_id) if with_expected else None
            if not bits and not expected:
                continue
            count = 0
            for digest in digests:
                if not self._holders.get(digest, 0) & bits and (expected is None or digest not in expected):
                    break
                count += 1
            found[worker_id] = count
        return found

    def _bit(self, holder: Holder) -> int:
        if holder not in self._bits:
            self._bits[holder] = self._free_bits.pop() if self._free_bits else 1 << len(self._bits)
        return self._bits[holder]

    def _drop(self, digest: bytes, bit: int) -> None:
        left = self._holders[digest] & ~bit
        if left:
            self._holders[digest] = left
        else:
            del self._holders[digest]
