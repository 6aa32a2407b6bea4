"""How well requests find their workers: a trace against simulated workers, in simulated time, with the router's own
policy and index beside simpler ways.

A worker computes one prompt after the other at a given rate and keeps blocks until others need their place, the least
recently used first. The router learns of what came and went a moment later, as from a real worker.
"""

from __future__ import annotations

import heapq
import itertools
import json
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from server.router.policy import RoutedRequest, WorkerView, choose
from server.router.prefix_index import Holder, PrefixIndex
from server.workers.work_under_way import WorkUnderWay

BLOCK_TOKENS = 512  # of a trace's hash id


@dataclass(frozen=True)
class TracedRequest:
    """`seconds`: when it comes; `digests`: of its prompt's blocks, the last of which may be in part."""

    seconds: float
    num_tokens: int
    num_output: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class Machines:
    """All workers are alike. Seconds, tokens."""

    number: int = 8
    tokens_per_second: float = 8_000.0  # of prefill
    seconds_per_token: float = 0.03  # of decode
    max_batch_size: int = 64
    num_blocks: int = 2_000  # that a worker keeps, of BLOCK_TOKENS each
    event_seconds: float = 0.1  # until the router knows what came or went
    bytes_per_token: int = 131_072  # of an 8B model's KV in bfloat16
    bytes_per_second: float = 2.5e9  # between two of them: 25 Gbit/s, of which 20 are had


@dataclass
class RoutingQuality:
    """Of one way to route. Seconds."""

    name: str
    num_tokens: int = 0
    num_found: int = 0  # tokens that nobody had to compute
    num_fetched: int = 0  # of these, from another worker's cache
    ttft: list[float] = field(default_factory=list)
    most_busy: float = 0.0  # share of all prefill time that the busiest worker had, times their number

    @property
    def hit_rate(self) -> float:
        return self.num_found / self.num_tokens

    def quantile(self, share: float) -> float:
        return statistics.quantiles(self.ttft, n=100)[round(share * 100) - 1]


def read_trace(path: Path, speed: float = 1.0) -> list[TracedRequest]:
    """Of a file with a JSON object a line: timestamp in ms, input_length, output_length, hash_ids. `speed`: how many
    times as fast it is played."""
    found = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        digests = tuple(number.to_bytes(16, "little") for number in entry["hash_ids"])
        found.append(TracedRequest(entry["timestamp"] / 1e3 / speed, entry["input_length"], entry["output_length"], digests))
    return found


class SimulatedWorker:
    """One worker in simulated time."""

    def __init__(self, worker_id: str, machines: Machines) -> None:
        self.worker_id, self.max_batch_size, self._num_blocks = worker_id, machines.max_batch_size, machines.num_blocks
        self.free_at = 0.0  # when all prompts that it has now are computed
        self.busy_seconds = 0.0
        self.work = WorkUnderWay()
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def num_cached(self, digests: Sequence[bytes]) -> int:
        """Blocks from the first on that it has."""
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, digests))

    def keep(self, digests: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Its cache has a prompt's blocks now; what came, and what went for them."""
        came = [digest for digest in digests if digest not in self._blocks]
        for digest in reversed(digests):  # a block goes after those that follow it
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        went = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._num_blocks)]
        return came, went


class Routed(NamedTuple):
    """To whom a request goes, and from whom that worker fetches what it has not."""

    worker_id: str
    fetched_from: str | None = None


Route = Callable[[TracedRequest, Sequence[SimulatedWorker], PrefixIndex], Routed]


def by_turns() -> Route:
    """Round robin."""
    turns = itertools.count()
    return lambda request, workers, index: Routed(workers[next(turns) % len(workers)].worker_id)


def by_load() -> Route:
    """The fewest tokens to compute, then the fewest sequences."""

    def route(request: TracedRequest, workers: Sequence[SimulatedWorker], index: PrefixIndex) -> Routed:
        return Routed(min(workers, key=lambda w: (w.work.num_tokens, w.work.num_sequences, w.worker_id)).worker_id)

    return route


def by_affinity() -> Route:
    """The longest cached prefix, whatever its worker has to do; without one by turns."""
    turns = itertools.count()

    def route(request: TracedRequest, workers: Sequence[SimulatedWorker], index: PrefixIndex) -> Routed:
        found = index.match(request.digests, [worker.worker_id for worker in workers])
        # What all requests begin with tells nothing.
        best = max(found, key=lambda worker_id: found[worker_id])
        return Routed(best if found[best] > 1 else workers[next(turns) % len(workers)].worker_id)

    return route


def by_policy(machines: Machines | None = None) -> Route:
    """What the router does. `machines`: between which pages can be fetched; None: they can't."""

    def route(request: TracedRequest, workers: Sequence[SimulatedWorker], index: PrefixIndex) -> Routed:
        worker_ids = [worker.worker_id for worker in workers]
        found = index.match(request.digests, worker_ids)
        told = index.match(request.digests, worker_ids, with_expected=False) if machines is not None else dict.fromkeys(worker_ids, 0)
        longest = max(told, key=lambda worker_id: told[worker_id])
        views = [
            WorkerView(
                worker.worker_id,
                "both",
                worker.work.num_tokens,
                worker.work.num_sequences,
                worker.max_batch_size,
                min(found[worker.worker_id] * BLOCK_TOKENS, request.num_tokens),
                worker.work.tokens_per_second,
                bytes_per_second=machines.bytes_per_second if machines is not None else 0.0,
                num_held=index.num_held(worker.worker_id),
                num_elsewhere=min(told[longest] * BLOCK_TOKENS, request.num_tokens),
            )
            for worker in workers
        ]
        bytes_per_token = machines.bytes_per_token if machines is not None else 0
        choice = choose(views, RoutedRequest(request.num_tokens, bytes_per_token, may_move=False))
        assert choice is not None
        return Routed(choice.decode, longest if choice.is_fetched else None)

    return route


def ways(machines: Machines) -> dict[str, Route]:
    """All that are compared, by name."""
    return {
        "round robin": by_turns(),
        "least loaded": by_load(),
        "affinity alone": by_affinity(),
        "no fetching": by_policy(),
        "this router": by_policy(machines),
    }


class RoutingSimulation:
    """A trace against workers, in simulated time."""

    def __init__(self, name: str, route: Route, machines: Machines) -> None:
        self.quality = RoutingQuality(name)
        self._route, self._machines = route, machines
        self._workers = {f"worker {number}": SimulatedWorker(f"worker {number}", machines) for number in range(machines.number)}
        self._index = PrefixIndex()
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # what happens when
        self._order = itertools.count()

    def play(self, trace: Iterable[TracedRequest]) -> RoutingQuality:
        for request in trace:
            self._at(request.seconds, partial(self._arrive, request))
        while self._events:
            heapq.heappop(self._events)[2]()
        busy = [worker.busy_seconds for worker in self._workers.values()]
        self.quality.most_busy = max(busy) / statistics.mean(busy)
        return self.quality

    def _at(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), what))

    def _arrive(self, request: TracedRequest) -> None:
        routed = self._route(request, list(self._workers.values()), self._index)
        worker = self._workers[routed.worker_id]
        expected = self._index.match(request.digests, [worker.worker_id])[worker.worker_id] * BLOCK_TOKENS
        work = worker.work.begin(max(1, request.num_tokens - expected), num_sequences=1)
        self._index.expect(worker.worker_id, request.digests)
        # Its place in the queue is certain, so what it will find there is what those before it leave.
        num_found = min(worker.num_cached(request.digests) * BLOCK_TOKENS, request.num_tokens - 1)
        num_fetched = self._num_there(routed.fetched_from, request, num_found)
        fetched_at = request.seconds + num_fetched * self._machines.bytes_per_token / self._machines.bytes_per_second
        num_found += num_fetched
        came, went = worker.keep(request.digests)
        seconds = (request.num_tokens - num_found) / self._machines.tokens_per_second
        worker.free_at = max(fetched_at, worker.free_at) + seconds
        worker.busy_seconds += seconds
        self.quality.num_tokens += request.num_tokens
        self.quality.num_found += num_found
        self.quality.num_fetched += num_fetched
        self.quality.ttft.append(worker.free_at - request.seconds)

        def compute() -> None:
            work.has_prefilled()
            worker.work.measure(request.num_tokens - num_found, seconds)

        def tell() -> None:
            self._index.discard(Holder(worker.worker_id), went)
            self._index.add(Holder(worker.worker_id), came)

        def end() -> None:
            work.end()
            self._index.settle(worker.worker_id, request.digests)

        self._at(worker.free_at, compute)
        self._at(worker.free_at + self._machines.event_seconds, tell)
        self._at(worker.free_at + request.num_output * self._machines.seconds_per_token, end)

    def _num_there(self, worker_id: str | None, request: TracedRequest, num_found: int) -> int:
        """Tokens beyond these that a worker has told of and still has."""
        if worker_id is None:
            return 0
        told = self._index.match(request.digests, [worker_id], with_expected=False)[worker_id]
        num_there = min(told, self._workers[worker_id].num_cached(request.digests)) * BLOCK_TOKENS
        return max(0, min(num_there, request.num_tokens - 1) - num_found)


def compare(trace: Sequence[TracedRequest], machines: Machines) -> list[RoutingQuality]:
    """Each way to route, over the same trace."""
    return [RoutingSimulation(name, way, machines).play(trace) for name, way in ways(machines).items()]


def table(found: Iterable[RoutingQuality]) -> str:
    """A line a way."""
    lines = [f"{'':16}{'prefix hits':>12}{'fetched':>9}{'TTFT p50':>10}{'p90':>9}{'p99':>9}{'busiest':>9}"]
    lines += [
        f"{way.name:16}{way.hit_rate:12.1%}{way.num_fetched / way.num_tokens:9.1%}{way.quantile(0.5):9.2f}s{way.quantile(0.9):8.2f}s{way.quantile(0.99):8.2f}s{way.most_busy:8.2f}x"
        for way in found
    ]
    return "\n".join(lines)
