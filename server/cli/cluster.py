"""`jaxinfer cluster`: pools of workers on Ray, of a size that follows their load."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.config import ConfigError
from server.cli.cluster_flags import TOKEN_VARIABLE

if TYPE_CHECKING:
    from server.cluster.cluster_config import ClusterConfig

_READY_SECONDS = 600.0  # for every pool's least workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, with which file."""
    parser.add_argument("action", choices=("up", "status", "down"), help="start or update the pools; show them; drain and end all")
    parser.add_argument("config", type=Path, help="YAML file: routers, stats, pools (docs/disaggregation.md)")


def run(arguments: argparse.Namespace) -> int:
    """Raises `ConfigError` for a file with an unknown key, without the extra `cluster`, and where Ray is not there."""
    try:
        import ray

        from server.cluster.cluster_config import read_cluster_config
        from server.cluster.worker_actors import NAMESPACE
    except ImportError as error:
        raise ConfigError(f"jaxinfer cluster needs Ray ({error}): pip install 'jaxinfer[cluster]'") from error
    config = read_cluster_config(arguments.config)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled") if config.ray == "local" else None
    try:
        address = None if config.ray == "local" else config.ray
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, include_dashboard=False if address is None else None)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no Ray at {config.ray!r}: {error}") from error
    action = {"up": _up, "status": _status, "down": _down}[arguments.action]
    return action(config)


def _up(config: ClusterConfig) -> int:
    import ray

    from server.cluster import ray_pools

    environment = {name: os.environ[name] for name in (TOKEN_VARIABLE,) if name in os.environ}
    _end_pools_actor(config)
    options = {"name": ray_pools.pools_name(config), "lifetime": "detached", "max_restarts": -1, "num_cpus": 0, "max_concurrency": 4}
    pools: Any = ray.remote(ray_pools.PoolsActor).options(**options).remote(config, environment)
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        status: Any = ray.get(pools.status.remote())
        ready = {role: sum(address is not None for address in workers.values()) for role, workers in status["pools"].items()}
        if all(ready[pool.role] >= pool.bounds.minimum for pool in config.pools):
            print(", ".join(f"{number} {role}" for role, number in ready.items()), "ready", file=sys.stderr)
            break
        if time.monotonic() > deadline:
            raise ConfigError(f"the pools are not ready after {_READY_SECONDS:g} s: {json.dumps(status)}")
        time.sleep(0.5)
    if config.ray == "local":  # it ends with this process
        print("Ray runs in this process: Ctrl+C ends all", file=sys.stderr, flush=True)
        while True:
            time.sleep(3600.0)
    return 0


def _status(config: ClusterConfig) -> int:
    import ray

    from server.cluster import ray_pools

    try:
        pools = ray.get_actor(ray_pools.pools_name(config))
    except ValueError as error:
        raise ConfigError(f"there are no pools named {config.name!r}: start them with `jaxinfer cluster up`") from error
    print(json.dumps(ray.get(pools.status.remote()), indent=1))
    return 0


def _down(config: ClusterConfig) -> int:
    import ray

    from server.cluster import worker_actors

    _end_pools_actor(config)
    names = [name for pool in config.pools for name in worker_actors.worker_names(config, pool.role)]
    calls: list[Any] = [ray.get_actor(name).stop.remote(config.drain_seconds) for name in names]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=config.drain_seconds + 30.0)
    worker_actors.end_placements(config)
    print(f"{len(calls)} workers ended", file=sys.stderr)
    return 0


def _end_pools_actor(config: ClusterConfig) -> None:
    import ray

    from server.cluster import ray_pools

    try:
        pools = ray.get_actor(ray_pools.pools_name(config))
    except ValueError:
        return
    ray.kill(pools)
