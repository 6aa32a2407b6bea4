"""Workers on Ray: an actor a process, which is beneath it and dies with it; whichever dies, Ray starts the actor anew.

A worker of several processes has a placement group: one bundle of CPUs and GPUs for each, on hosts apart where there
are so many. If one of its processes dies all end, and all are started anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from server.cluster.cluster_config import ClusterConfig, PoolConfig

NAMESPACE = "jaxinfer"
_PDEATHSIG = 1  # of prctl(2)
_CONNECT_SECONDS = 120.0  # that a worker's processes wait for each other
_RETRY_SECONDS = 1.0


class WorkerActor:
    """A `jaxinfer worker` with these flags, or the first of its processes."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str], digest: str, num_processes: int = 1) -> None:
        self.digest_of_flags = digest
        self._address: str | None = None
        self._is_stopping = False
        host = ray.util.get_node_ip_address()
        self._coordinator = f"{host}:{_free_port(host)}"
        command = [sys.executable, "-m", "server.cli", "worker", f"--host={host}", *flags]
        if num_processes > 1:
            command += [f"--coordinator={self._coordinator}", f"--num-processes={num_processes}", f"--connect-seconds={_CONNECT_SECONDS:g}"]
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

    def coordinator(self) -> str:
        """Where its other processes find the first."""
        return self._coordinator

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


class FollowerActor:
    """A `jaxinfer follow` of the worker whose first process this actor has."""

    def __init__(self, leader: str, process_id: int) -> None:
        threading.Thread(target=self._run, args=(leader, process_id), daemon=True).start()

    def _run(self, leader: str, process_id: int) -> None:
        try:
            call: Any = ray.get_actor(leader, NAMESPACE).coordinator.remote()
            coordinator = ray.get(call)
        except (ValueError, ray.exceptions.RayError):  # it is being started anew, or is gone
            time.sleep(_RETRY_SECONDS)
            os._exit(1)
        flags = [f"--coordinator={coordinator}", f"--process-id={process_id}", f"--connect-seconds={_CONNECT_SECONDS:g}"]
        process = subprocess.Popen([sys.executable, "-m", "server.cli", "follow", *flags], preexec_fn=_die_with_parent)  # noqa: PLW1509
        os._exit(process.wait() or 1)  # a worker that has ended takes its placement group along


def start_worker(config: ClusterConfig, pool: PoolConfig, environment: Mapping[str, str]) -> None:
    """One more worker of a pool. Returns at once; where there is no room it waits for it."""
    name = f"{_prefix(config, pool.role)}{uuid.uuid4().hex[:8]}"
    bundle = {"CPU": pool.cpus} | ({"GPU": pool.gpus} if pool.gpus else {})
    group = None
    if pool.processes > 1:
        group = placement_group([bundle] * pool.processes, strategy="SPREAD", name=name, lifetime="detached")
    leader = _actor(WorkerActor, name, pool, group, 0)
    leader.remote(worker_flags(config, pool), environment, flags_digest(config, pool), pool.processes)
    for process_id in range(1, pool.processes):
        _actor(FollowerActor, f"process {process_id} of {name}", pool, group, process_id).remote(name, process_id)


def _actor(kind: type, name: str, pool: PoolConfig, group: PlacementGroup | None, bundle: int) -> Any:
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": pool.cpus,
        "num_gpus": pool.gpus,
        "max_concurrency": 4,  # `about` is answered while `stop` waits
    }
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(kind).options(**options)


def end_placements(config: ClusterConfig) -> None:
    """Give back what workers of several processes had that have ended, their other processes' actors with it."""
    names = {name for pool in config.pools for name in worker_names(config, pool.role)}
    for group_id, about in placement_group_table().items():
        is_own = any(about["name"].startswith(_prefix(config, pool.role)) for pool in config.pools)
        if is_own and about["name"] not in names and about["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))


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


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _prefix(config: ClusterConfig, role: str) -> str:
    return f"{config.name} {role} worker "


def _die_with_parent() -> None:
    """Runs in the child, between fork and exec. Linux only: elsewhere a worker outlives an actor that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
