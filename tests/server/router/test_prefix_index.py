"""The router's index of prefixes against one that looks at everything."""

from __future__ import annotations

import random
from collections import Counter

from server.router.prefix_index import Holder, PrefixIndex

WORKERS = ("a", "b", "c")


def test_it_knows_what_each_worker_told_and_was_given() -> None:
    rng, index = random.Random(4), PrefixIndex()
    held: dict[Holder, set[bytes]] = {Holder(worker, is_stored): set() for worker in WORKERS for is_stored in (False, True)}
    expected: dict[str, Counter[bytes]] = {worker: Counter() for worker in WORKERS}
    under_way: list[tuple[str, list[bytes]]] = []
    blocks = [bytes([n]) * 16 for n in range(6)]
    for _ in range(3000):
        worker, some = rng.choice(WORKERS), blocks[: rng.randrange(7)]
        holder = Holder(worker, rng.random() < 0.5)
        match rng.randrange(7):
            case 0:
                index.add(holder, some)
                held[holder] |= set(some)
            case 1:
                gone = rng.sample(blocks, 3)
                index.discard(holder, gone)
                held[holder] -= set(gone)
            case 2:
                index.replace(holder, some)
                held[holder] = set(some)
            case 3:
                index.expect(worker, some)
                expected[worker].update(some)
                under_way.append((worker, some))
            case 4 if under_way:
                other, given = under_way.pop(rng.randrange(len(under_way)))
                index.settle(other, given)
                expected[other].subtract(given)
            case 5 if not rng.randrange(10):
                index.forget(worker)
                held[Holder(worker)], held[Holder(worker, is_stored=True)], expected[worker] = set(), set(), Counter()
                under_way = [entry for entry in under_way if entry[0] != worker]
        for with_expected in (False, True):
            wanted = {}
            for name in WORKERS:
                known = held[Holder(name)] | held[Holder(name, is_stored=True)]
                known |= set(+expected[name]) if with_expected else set()
                wanted[name] = next((n for n, block in enumerate(blocks) if block not in known), len(blocks))
            assert index.match(blocks, WORKERS, with_expected=with_expected) == wanted
        assert len(index) == len(set().union(*held.values()))
    for worker in WORKERS:
        index.forget(worker)
    assert not len(index) and not index._bits and len(index._free_bits) == 6
