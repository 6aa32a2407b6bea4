"""What pools that follow their load cost: a trace against simulated workers, in simulated time, with the pools' own
policy, beside the smallest fixed pools that keep the target for as many requests.

A prefill worker computes one prompt after the other, a decode worker has a batch of sequences. Requests wait for any
that is free. A worker costs from the moment that it is started to the one when it has ended what it had.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.disaggregated.routing import TracedRequest
from server.cluster.scaling_policy import PoolBounds, PoolScaler, PoolView, ScalingSettings

_LOOK_SECONDS = 2.0
_INITIAL = 6, 6  # workers that pools begin with


@dataclass(frozen=True)
class PoolMachines:
    """Workers of both pools. Seconds, tokens."""

    tokens_per_second: float = 8_000.0  # of prefill
    seconds_per_token: float = 0.03  # of decode
    max_batch_size: int = 8
    start_seconds: float = 20.0  # from a worker's start until it is ready
    target_ttft: float = 10.0  # until a request has its first token and a place in decode


@dataclass(frozen=True)
class PoolCost:
    """`attained`: the share of requests within the target; GPU-seconds a request."""

    attained: float
    gpu_seconds: float
    most: tuple[int, int]  # workers of prefill, of decode


@dataclass
class _Worker:
    started_at: float
    num_running: int = 0
    is_ready: bool = False
    is_draining: bool = False


class _Pool:
    """Workers with places, and who waits for one."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self.workers: list[_Worker] = []
        self.waiting: deque[Callable[[_Worker], None]] = deque()
        self.gpu_seconds = 0.0
        self.most = 0

    @property
    def kept(self) -> list[_Worker]:
        return [worker for worker in self.workers if not worker.is_draining]

    def start(self, now: float, *, is_ready: bool = False) -> _Worker:
        self.workers.append(_Worker(now, is_ready=is_ready))
        self.most = max(self.most, len(self.workers))
        return self.workers[-1]

    def give(self) -> None:
        """Whoever waits gets a place, on the worker with the most that are free."""
        while self.waiting:
            free = [worker for worker in self.kept if worker.is_ready and worker.num_running < self._num_places]
            if not free:
                return
            worker = min(free, key=lambda worker: worker.num_running)
            worker.num_running += 1
            self.waiting.popleft()(worker)

    def leave(self, worker: _Worker, now: float) -> None:
        worker.num_running -= 1
        self.end_if_idle(worker, now)

    def drain(self, now: float) -> None:
        worker = min(self.kept, key=lambda worker: (worker.is_ready, worker.num_running))
        worker.is_draining = True
        self.end_if_idle(worker, now)

    def end_if_idle(self, worker: _Worker, now: float) -> None:
        if worker.is_draining and not worker.num_running:
            self.workers.remove(worker)
            self.gpu_seconds += now - worker.started_at


class PoolSimulation:
    """`sizes`: of prefill's and decode's pool at the beginning, and to the end if `scaling` is None."""

    def __init__(self, machines: PoolMachines, sizes: tuple[int, int], scaling: ScalingSettings | None) -> None:
        self._machines = machines
        self._pools = _Pool(1), _Pool(machines.max_batch_size)
        for pool, size in zip(self._pools, sizes, strict=True):
            for _ in range(size):
                pool.start(0.0, is_ready=True)
        bounds = PoolBounds(1, 1000)
        self._scalers = None if scaling is None else (PoolScaler("prefill", bounds, scaling), PoolScaler("decode", bounds, scaling))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._num_arrived = self._num_computed = self._num_sequences = 0  # tokens, tokens, sequences
        self._num_attained = 0

    def play(self, trace: Sequence[TracedRequest]) -> PoolCost:
        for request in trace:
            self._at(request.seconds, partial(self._arrive, request))
        if self._scalers is not None:
            for look in range(int(trace[-1].seconds / _LOOK_SECONDS)):
                self._at(look * _LOOK_SECONDS, self._look)
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        for pool in self._pools:
            pool.gpu_seconds += sum(self._now - worker.started_at for worker in pool.workers)
        prefill, decode = self._pools
        return PoolCost(
            self._num_attained / len(trace), (prefill.gpu_seconds + decode.gpu_seconds) / len(trace), (prefill.most, decode.most)
        )

    def _at(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), happen))

    def _arrive(self, request: TracedRequest) -> None:
        self._num_arrived += request.num_tokens
        self._pools[0].waiting.append(partial(self._prefill, request))
        self._pools[0].give()

    def _prefill(self, request: TracedRequest, worker: _Worker) -> None:
        self._at(self._now + request.num_tokens / self._machines.tokens_per_second, partial(self._prefilled, request, worker))

    def _prefilled(self, request: TracedRequest, worker: _Worker) -> None:
        prefill, decode = self._pools
        self._num_computed += request.num_tokens
        prefill.leave(worker, self._now)
        prefill.give()
        self._num_sequences += 1
        decode.waiting.append(partial(self._decode, request))
        decode.give()

    def _decode(self, request: TracedRequest, worker: _Worker) -> None:
        self._num_attained += self._now - request.seconds <= self._machines.target_ttft
        self._at(self._now + request.num_output * self._machines.seconds_per_token, partial(self._decoded, worker))

    def _decoded(self, worker: _Worker) -> None:
        self._num_sequences -= 1
        self._pools[1].leave(worker, self._now)
        self._pools[1].give()

    def _look(self) -> None:
        assert self._scalers is not None
        machines, pending = self._machines, self._num_arrived - self._num_computed
        seen = PoolView(self._now, 0, pending, self._num_arrived, machines.tokens_per_second)
        views = seen, replace(seen, num_sequences=self._num_sequences, max_batch_size=machines.max_batch_size)
        for pool, scaler, view in zip(self._pools, self._scalers, views, strict=True):
            num_workers = len(pool.kept)
            wanted = scaler.wanted(replace(view, num_workers=num_workers))
            for _ in range(wanted - num_workers):
                self._at(self._now + machines.start_seconds, partial(self._ready, pool, pool.start(self._now)))
            if wanted < num_workers:
                pool.drain(self._now)

    @staticmethod
    def _ready(pool: _Pool, worker: _Worker) -> None:
        worker.is_ready = True
        pool.give()


def with_tides(trace: Sequence[TracedRequest], lowest: float) -> list[TracedRequest]:
    """Of a trace that is even, what a day has: between all of its requests and a share of them, two waves long."""
    rng, end = random.Random(0), trace[-1].seconds

    def share(seconds: float) -> float:
        return lowest + (1.0 - lowest) * (0.5 - 0.5 * math.cos(4.0 * math.pi * seconds / end))

    return [request for request in trace if rng.random() < share(request.seconds)]


def best_fixed(trace: Sequence[TracedRequest], machines: PoolMachines, attained: float) -> tuple[tuple[int, int], PoolCost]:
    """The smallest pools that attain as much."""
    seconds = trace[-1].seconds
    prefill = sum(request.num_tokens for request in trace) / machines.tokens_per_second / seconds
    decode = sum(request.num_output for request in trace) * machines.seconds_per_token / machines.max_batch_size / seconds
    some_prefill, some_decode = (range(max(1, int(load)), math.ceil(4 * load)) for load in (prefill, decode))
    for pair in sorted(itertools.product(some_prefill, some_decode), key=sum):
        cost = PoolSimulation(machines, pair, None).play(trace)
        if cost.attained >= attained:
            return pair, cost
    raise ValueError(f"no fixed pools attain {attained:.1%}")


def compare(trace: Sequence[TracedRequest], machines: PoolMachines) -> str:
    """A row a kind of load."""
    lines = ["load                     target kept     pools: GPU-s/request, most    fixed: GPU-s/request, size    ratio"]
    for name, load in (("the trace", trace), ("with tides, 20 to 100%", with_tides(trace, 0.2))):
        scaling = ScalingSettings(target_ttft=machines.target_ttft)
        pools = PoolSimulation(machines, _INITIAL, scaling).play(load)
        size, fixed = best_fixed(load, machines, pools.attained)
        lines.append(
            f"{name:24} {pools.attained:6.1%} {fixed.attained:6.1%}  {pools.gpu_seconds:18.1f}, {pools.most[0]:2} + {pools.most[1]:2}"
            f"  {fixed.gpu_seconds:22.1f}, {size[0]:2} + {size[1]:2}  {pools.gpu_seconds / fixed.gpu_seconds:7.2f}"
        )
    return "\n".join(lines)
