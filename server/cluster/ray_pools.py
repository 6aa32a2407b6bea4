"""Pools of workers on Ray: an actor that keeps as many of them as the policy wants.

All actors are detached: they outlive whoever called `up`. Requests never pass through here.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from server.cluster.cluster_config import ClusterConfig, PoolConfig
from server.cluster.scaling_policy import PoolScaler, PoolView
from server.cluster.worker_actors import NAMESPACE, end_placements, flags_digest, start_worker, worker_names

_STATS_SECONDS = 5.0  # that a router's answer may take


class PoolsActor:
    """Looks at a router's numbers, and starts and drains workers."""

    def __init__(self, config: ClusterConfig, environment: Mapping[str, str]) -> None:
        self._config, self._environment = config, environment
        self._scalers = {pool.role: PoolScaler(pool.role, pool.bounds, config.scaling) for pool in config.pools}
        self._wanted: dict[str, int] = {}  # by role
        self._stopping: dict[str, Any] = {}  # by actor's name, its call of `stop`
        self._is_over = threading.Event()
        self.last_error = ""
        threading.Thread(target=self._run, daemon=True).start()

    def status(self) -> dict[str, Any]:
        """Each pool's workers, and the last error of a look."""
        pools = {pool.role: {name: about[0] for name, about in self._workers(pool).items()} for pool in self._config.pools}
        return {"pools": pools, "draining": sorted(self._stopping), "last_error": self.last_error}

    def close(self) -> None:
        """Start and drain nothing any more."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(self._config.look_seconds):
            try:
                self._look()
                self.last_error = ""
            except Exception as error:  # whatever it is, the next look may go well
                self.last_error = f"{type(error).__name__}: {error}"

    def _look(self) -> None:
        stats, itl = _stats(self._config.stats)
        for name in [name for name, call in self._stopping.items() if ray.wait([call], timeout=0)[0]]:
            del self._stopping[name]
        for pool in self._config.pools:
            self._resize(pool, stats, itl)
        end_placements(self._config)

    def _resize(self, pool: PoolConfig, stats: Sequence[Mapping[str, Any]], itl: float | None) -> None:
        workers = self._workers(pool)
        old = [name for name, (_, digest) in workers.items() if digest not in ("", flags_digest(self._config, pool))]
        wanted = self._wanted.setdefault(pool.role, max(pool.bounds.minimum, len(workers)))
        if not old:
            wanted = self._wanted[pool.role] = self._scalers[pool.role].wanted(pool_view(pool.role, len(workers), stats, itl))
        # A rolling update: one more than wanted, until the old ones are gone.
        for _ in range(wanted + bool(old) - len(workers)):
            start_worker(self._config, pool, self._environment)
        if len(workers) > wanted and all(address is not None for address, _ in workers.values()):
            self._drain(old[0] if old else self._least_busy(workers, stats))

    def _workers(self, pool: PoolConfig) -> dict[str, tuple[str | None, str]]:
        """By actor's name: where each is, and its flags' digest; None and empty for one that is starting."""
        names = [name for name in worker_names(self._config, pool.role) if name not in self._stopping]
        calls: list[Any] = [ray.get_actor(name, NAMESPACE).about.remote() for name in names]
        done = ray.wait(calls, num_returns=len(calls), timeout=1.0)[0] if calls else []
        found: dict[str, tuple[str | None, str]] = {}
        for name, call in zip(names, calls, strict=True):
            found[name] = None, ""
            if call in done:
                with contextlib.suppress(ray.exceptions.RayActorError):  # it is being started anew
                    found[name] = ray.get(call)
        return found

    def _drain(self, name: str) -> None:
        self._stopping[name] = ray.get_actor(name, NAMESPACE).stop.remote(self._config.drain_seconds)

    @staticmethod
    def _least_busy(workers: Mapping[str, tuple[str | None, str]], stats: Sequence[Mapping[str, Any]]) -> str:
        busy = {worker["address"]: worker["num_running"] + worker["num_incoming"] + worker["num_waiting"] for worker in stats}
        return min(workers, key=lambda name: (busy.get(workers[name][0] or "", 0), name))


def _stats(url: str) -> tuple[list[dict[str, Any]], float | None]:
    """A router's workers, and the median time between its clients' tokens, in seconds."""
    with urllib.request.urlopen(f"{url}/stats", timeout=_STATS_SECONDS) as answer:
        stats = json.load(answer)
    cluster = stats.get("cluster")
    return [] if cluster is None else cluster["workers"], stats.get("inter_token_latency")


def pool_view(role: str, num_workers: int, stats: Sequence[Mapping[str, Any]], itl: float | None = None) -> PoolView:
    """Of a pool, from a router's numbers."""
    own = [worker for worker in stats if worker["role"] == role]
    rates = [worker["prefill_tokens_per_second"] for worker in own if worker["prefill_tokens_per_second"]]
    return PoolView(
        time.monotonic(),
        num_workers,
        sum(worker["num_pending_tokens"] for worker in own),
        sum(worker["num_new_prompt_tokens"] for worker in own),
        sum(rates) / len(rates) if rates else 0.0,
        sum(worker["num_running"] + worker["num_waiting"] + worker["num_incoming"] for worker in own),
        max((worker["max_batch_size"] for worker in own), default=1),
        itl if any(worker["num_running"] for worker in own) else None,
    )


def pools_name(config: ClusterConfig) -> str:
    """The name of a cluster's `PoolsActor`."""
    return f"{config.name} pools"
