"""Pools of workers on Ray: an actor a worker, and one that keeps as many of them as the policy wants.

A worker is a process of its own beneath its actor, and dies with it; whichever dies, Ray starts the actor anew. All
actors are detached: they outlive whoever called `up`. Requests never pass through here.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from server.cluster.cluster_config import ClusterConfig, PoolConfig
from server.cluster.scaling_policy import PoolScaler, PoolView

NAMESPACE = "jaxinfer"
_STATS_SECONDS = 5.0  # that a router's answer may take
_PDEATHSIG = 1  # of prctl(2)


class WorkerActor:
    """A `jaxinfer worker` with these flags."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str], digest: str) -> None:
        self.digest_of_flags = digest
        self._address: str | None = None
        self._is_stopping = False
        command = [sys.executable, "-m", "server.cli", "worker", f"--host={ray.util.get_node_ip_address()}", *flags]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - no other thread of this process holds a lock yet
        )
        threading.Thread(target=self._watch, daemon=True).start()

    def about(self) -> tuple[str | None, str]:
        """Where routers reach it, once it is ready; and what its flags are known by."""
        return self._address, self.digest_of_flags

    def stop(self, seconds: float) -> None:
        """Take nothing new, end what has begun, for so many seconds at most; what is left then goes on elsewhere."""
        self._is_stopping = True
        self._process.send_signal(signal.SIGUSR1)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        ray.actor.exit_actor()

    def _watch(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            sys.stderr.write(line)  # to Ray's log of this actor
            if " is ready on " in line:
                self._address = line.rpartition(" ")[2].strip()
        self._process.wait()
        if not self._is_stopping:
            os._exit(1)


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


def start_worker(config: ClusterConfig, pool: PoolConfig, environment: Mapping[str, str]) -> None:
    """One more actor of a pool."""
    options = {
        "name": f"{_prefix(config, pool.role)}{uuid.uuid4().hex[:8]}",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": pool.cpus,
        "num_gpus": pool.gpus,
        "max_concurrency": 4,  # `about` is answered while `stop` waits
    }
    ray.remote(WorkerActor).options(**options).remote(worker_flags(config, pool), environment, flags_digest(config, pool))


def worker_flags(config: ClusterConfig, pool: PoolConfig) -> list[str]:
    """The flags of a pool's workers."""
    given = dict(config.flags) | dict(pool.flags)
    return [f"--role={pool.role}", f"--router={','.join(config.routers)}", *(f"--{name}={value}" for name, value in given.items())]


def flags_digest(config: ClusterConfig, pool: PoolConfig) -> str:
    """What tells workers of this configuration from those of another."""
    return hashlib.sha256(json.dumps(worker_flags(config, pool)).encode()).hexdigest()[:12]


def worker_names(config: ClusterConfig, role: str) -> list[str]:
    """Names of a pool's actors."""
    found = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    return sorted(name for name in found if name.startswith(_prefix(config, role)))


def pools_name(config: ClusterConfig) -> str:
    """The name of a cluster's `PoolsActor`."""
    return f"{config.name} pools"


def _prefix(config: ClusterConfig, role: str) -> str:
    return f"{config.name} {role} worker "


def _die_with_parent() -> None:
    """Runs in the child, between fork and exec. Linux only: elsewhere a worker outlives an actor that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
