"""Which workers a request goes to: where its first token is expected soonest, and disturbs others least. Pure: state
in, decision out; no clocks, no sockets. The simulator of `benchmarks.disaggregated` runs the same code."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from server.workers.roles import DRAINING


@dataclass(frozen=True)
class WorkerView:
    """What the policy sees of a worker. `num_tokens`: of prompts that it has still to compute; `num_sequences`: that it
    decodes, or will; `num_cached`: of this prompt's tokens, whose KV it has; `num_elsewhere`: those that another worker
    has, which it can fetch, from the first on; `tokens_per_second`: of prefill, measured,
    0 if unknown; `bytes_per_second`: that it pulls pages with, 0 if unknown; `num_held`: blocks in its prefix cache."""

    worker_id: str
    role: str
    num_tokens: int
    num_sequences: int
    max_batch_size: int
    num_cached: int = 0
    tokens_per_second: float = 0.0
    bytes_per_second: float = 0.0
    num_held: int = 0
    num_elsewhere: int = 0

    @property
    def can_prefill(self) -> bool:
        return self.role in ("prefill", "both")

    @property
    def can_decode(self) -> bool:
        return self.role in ("decode", "both")


@dataclass(frozen=True)
class RoutedRequest:
    """What the policy sees of a request. `favourite`: the worker that prefilled its session last; `may_move`: whether
    another worker than decode's may prefill it."""

    num_tokens: int
    bytes_per_token: int = 0
    favourite: str | None = None
    may_move: bool = True


@dataclass(frozen=True)
class Choice:
    """`prefill`: the worker that computes the prompt; None: the one that decodes. `num_new_tokens`: to compute there;
    `seconds`: to the first token, as expected; `is_fetched`: whether it gets tokens from another worker's cache."""

    decode: str
    prefill: str | None
    reason: str
    num_new_tokens: int
    seconds: float
    is_fetched: bool = False

    @property
    def computed_by(self) -> str:
        return self.prefill or self.decode


@dataclass(frozen=True)
class RoutingSettings:
    """What is assumed until it is measured, and what is weighed against a second of this request's waiting.
    `always_apart`: no worker prefills what it decodes, as long as another can."""

    always_apart: bool = False
    tokens_per_second: float = 10_000.0
    bytes_per_second: float = 1e9
    hop_seconds: float = 0.005  # of a prefill elsewhere, beside the bytes
    disturbance: float = 0.1  # a second by which each sequence of a batch waits for this prompt
    thrift: float = 4.0  # a second of computing what another worker has: all that come later wait for it
    duplicates: float = 1.0  # a second of computing that is fetched: something else goes from the cache for it
    full_batch: float = 1.0  # seconds that a place in a full batch is worth less than in an empty one
    no_place: float = 5.0  # seconds of waiting for a place, for each batch that waits before
    loyalty: float = 1.5  # a session stays with its worker up to so many times the best expectation,
    loyalty_seconds: float = 0.05  # and so much longer


DEFAULT_ROUTING = RoutingSettings()


def choose(
    workers: Sequence[WorkerView], request: RoutedRequest, without: Collection[str] = (), settings: RoutingSettings = DEFAULT_ROUTING
) -> Choice | None:
    """The best workers for a request; None where nobody can decode. `without`: workers not to be asked."""
    known = [worker for worker in workers if worker.worker_id not in without and worker.role != DRAINING]
    # A worker that only prefills has both programs: with no other left it decodes too.
    decoders = [worker for worker in known if worker.can_decode] or known
    if not decoders:
        return None
    rates = [worker.tokens_per_second for worker in workers if worker.tokens_per_second]
    costs = _Options(request, settings, statistics.median(rates) if rates else settings.tokens_per_second)
    options: list[tuple[float, Choice]] = []
    if request.may_move:
        best_decoders = heapq.nsmallest(2, decoders, key=lambda worker: (costs.place(worker) + costs.move(worker), worker.worker_id))
        for worker in known:
            others = [decoder for decoder in best_decoders if decoder is not worker]
            if worker.can_prefill and others:
                options.append(costs.apart(worker, others[0]))
    if not options or not settings.always_apart:
        options += [costs.alone(worker) for worker in decoders]
    # Of equals the one whose cache has most room: else the first would have all, and forget it, while others idle.
    num_held = {worker.worker_id: worker.num_held for worker in known}
    best_cost, best = min(options, key=lambda option: (round(option[0], 3), num_held[option[1].computed_by]))
    if request.favourite is not None:
        loyal = [(cost, choice) for cost, choice in options if choice.computed_by == request.favourite]
        for cost, choice in sorted(loyal, key=lambda option: option[0])[:1]:
            if cost <= best_cost * settings.loyalty + settings.loyalty_seconds:
                return choice
    return best


class _PrefillWork(NamedTuple):
    queue: float  # seconds that it waits for others' prompts
    fetch: float  # seconds until another worker's pages are here
    compute: float  # seconds
    num_new: int  # tokens to compute
    saved: float = 0.0  # seconds of computing that fetching saves


class _Options:
    """Of a request's options, in seconds."""

    def __init__(self, request: RoutedRequest, settings: RoutingSettings, tokens_per_second: float) -> None:
        self._request, self._settings, self._usual_rate = request, settings, tokens_per_second

    def alone(self, worker: WorkerView) -> tuple[float, Choice]:
        """One worker does both."""
        work = self._prefill(worker)
        seconds = work.queue + work.fetch + work.compute
        cost = seconds + self._thrift(work) + self._disturbance(worker, work.compute) + self.place(worker)
        return cost, Choice(worker.worker_id, None, "decode's worker does it as soon", work.num_new, seconds, work.fetch > 0)

    def apart(self, prefill: WorkerView, decode: WorkerView) -> tuple[float, Choice]:
        """Pages move while prefill computes those after them."""
        work = self._prefill(prefill)
        seconds = work.queue + work.fetch + max(work.compute, self.move(decode)) + self._settings.hop_seconds
        cost = seconds + self._thrift(work) + self._disturbance(prefill, work.compute) + self.place(decode) + self._waiting(prefill)
        return cost, Choice(decode.worker_id, prefill.worker_id, "prefilled apart", work.num_new, seconds, work.fetch > 0)

    def place(self, worker: WorkerView) -> float:
        """What a place in its decode batch costs."""
        taken = worker.num_sequences / worker.max_batch_size
        return self._settings.full_batch * min(taken, 1.0) + self._waiting(worker)

    def _waiting(self, worker: WorkerView) -> float:
        """Until it has a place; who only prefills there needs one too."""
        return self._settings.no_place * max(0.0, (worker.num_sequences + 1) / worker.max_batch_size - 1.0)

    def move(self, decode: WorkerView) -> float:
        """Moving what decode's worker has not to it."""
        num_bytes = max(0, self._request.num_tokens - decode.num_cached) * self._request.bytes_per_token
        return num_bytes / (decode.bytes_per_second or self._settings.bytes_per_second)

    def _prefill(self, worker: WorkerView) -> _PrefillWork:
        """With what another worker has where fetching that is quicker than computing it."""
        rate, num_tokens = worker.tokens_per_second or self._usual_rate, self._request.num_tokens
        queue, num_new = worker.num_tokens / rate, max(1, num_tokens - worker.num_cached)
        if worker.num_elsewhere > worker.num_cached:
            num_bytes = (worker.num_elsewhere - worker.num_cached) * self._request.bytes_per_token
            fetch = self._settings.hop_seconds + num_bytes / (worker.bytes_per_second or self._settings.bytes_per_second)
            num_left = max(1, num_tokens - worker.num_elsewhere)
            if fetch < (num_new - num_left) / rate:
                return _PrefillWork(queue, fetch, num_left / rate, num_left, (num_new - num_left) / rate)
        return _PrefillWork(queue, 0.0, num_new / rate, num_new)

    def _thrift(self, work: _PrefillWork) -> float:
        """What this costs those that come later."""
        return self._settings.thrift * work.compute + self._settings.duplicates * work.saved

    def _disturbance(self, worker: WorkerView, compute: float) -> float:
        """Of those that it decodes meanwhile. Who decodes only may get more of them at any moment."""
        num_disturbed = min(worker.num_sequences, worker.max_batch_size)
        return self._settings.disturbance * compute * max(num_disturbed, int(worker.role == "decode"))
