"""Pools on a Ray of this machine, with a router and the tiny model: they come up, mend themselves, and are replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from server.cluster.cluster_config import ClusterConfig, PoolConfig
from server.cluster.scaling_policy import PoolBounds, PoolView, ScalingSettings
from tests.conftest import QUICK_COMPILATION
from tests.server.workers.cluster import ROOT, SETTINGS, Cluster, _text

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray does it")
from server.cluster import ray_pools, worker_actors  # noqa: E402 - they need Ray

pytestmark = pytest.mark.ray
SECONDS = 90.0


@pytest.fixture(scope="module")
def router(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tiny_model_path, tmp_path_factory.mktemp("cluster"))
    cluster.start_router()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT), **QUICK_COMPILATION}.items():
            patch.setenv(name, value)
        ray.init(num_cpus=6, namespace=worker_actors.NAMESPACE, include_dashboard=False, log_to_driver=False)
        yield cluster
        ray.shutdown()
    cluster.close()


def test_what_the_policy_sees_of_a_pool() -> None:
    worker = {
        "role": "decode",
        "num_pending_tokens": 5,
        "num_new_prompt_tokens": 7,
        "prefill_tokens_per_second": 100.0,
        "num_running": 3,
        "num_waiting": 1,
        "num_incoming": 2,
        "max_batch_size": 8,
    }
    others = [worker | {"role": "prefill"}, worker | {"prefill_tokens_per_second": 0.0}]
    view = ray_pools.pool_view("decode", 4, [worker, *others], 0.2)
    assert view == PoolView(view.seconds, 4, 10, 14, 100.0, 12, 8, 0.2)
    nobody = ray_pools.pool_view("both", 1, others, 0.2)
    assert nobody == PoolView(nobody.seconds, 1), "no worker of the pool has told anything yet"


def config_of(router: Cluster) -> ClusterConfig:
    flags = tuple((name.replace("_", "-"), _text(value)) for name, value in (SETTINGS | {"model": router.model}).items())
    two = (("cpu-devices", "1"), ("prefill-parallel", "tp=2"), ("decode-parallel", "tp=2"))
    pools = PoolConfig("prefill", PoolBounds(1, 2), processes=2, flags=two), PoolConfig("decode", PoolBounds(1, 2))
    scaling = ScalingSettings(patience=2.0)
    return ClusterConfig(
        (f"127.0.0.1:{router.ports['router'][1]}",), router.url, pools, flags=flags, scaling=scaling, look_seconds=0.2, drain_seconds=20.0
    )


def start_pools(config: ClusterConfig, token: str) -> Any:
    options = {"name": ray_pools.pools_name(config), "num_cpus": 0, "max_concurrency": 4, "max_restarts": -1}
    return ray.remote(ray_pools.PoolsActor).options(**options).remote(config, {"JAXINFER_WORKER_TOKEN": token})


def until(is_true: Callable[[], object], about: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline, about()
        time.sleep(0.1)


def workers(router: Cluster) -> list[psutil.Process]:
    """Processes of this router's workers."""
    port = f"--router=127.0.0.1:{router.ports['router'][1]}"
    return [process for process in psutil.process_iter(["cmdline"]) if port in (process.info["cmdline"] or ())]


def followers() -> list[psutil.Process]:
    """Processes of workers but for their first, beneath an actor each."""
    found = [process for process in psutil.process_iter(["cmdline"]) if "follow" in (process.info["cmdline"] or ())]
    return [process for process in found if (parent := process.parent()) is not None and "ray::" in " ".join(parent.cmdline())]


def test_pools_come_up_mend_themselves_and_are_replaced(router: Cluster) -> None:
    config = config_of(router)
    pools = start_pools(config, router.token)

    def status() -> dict[str, Any]:
        found: dict[str, Any] = ray.get(pools.status.remote())
        return found

    def names() -> set[str]:
        return {name for of_role in status()["pools"].values() for name in of_role}

    def is_complete() -> bool:
        found = status()
        each = [address for of_role in found["pools"].values() for address in of_role.values()]
        return len(each) == 2 and all(each) and not found["draining"]

    until(is_complete, status)
    until(lambda: httpx.get(f"{router.url}/ready").status_code == 200, lambda: router.log("router"))
    asked = httpx.post(f"{router.url}/v1/completions", json={"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3}, timeout=60.0)
    assert asked.status_code == 200
    # A worker's process is killed, and an actor's with which its worker dies: both come back.
    assert len(followers()) == 1, "the prefill worker has two processes"
    before = workers(router)
    before[0].kill()
    os.kill(before[1].ppid(), signal.SIGKILL)
    until(lambda: not any(process.is_running() for process in before), lambda: before)
    until(lambda: is_complete() and router.num_workers() == 2, status)
    # Of other flags: one by one, without a moment in which a role has nobody.
    old = names()
    ray.kill(pools)
    alone = tuple(PoolConfig(pool.role, pool.bounds) for pool in config.pools)  # no worker of two processes any more
    pools = start_pools(replace(config, pools=alone, flags=(*config.flags, ("log-level", "debug"))), router.token)
    until(lambda: is_complete() and not names() & old, status)
    until(lambda: not followers(), followers)
    assert httpx.get(f"{router.url}/ready").status_code == 200 and status()["last_error"] == ""
    ray.kill(pools)
    for name in names_left(config):
        ray.get_actor(name).stop.remote(5.0)
    until(lambda: not workers(router), lambda: workers(router))


def names_left(config: ClusterConfig) -> list[str]:
    return [name for pool in config.pools for name in worker_actors.worker_names(config, pool.role)]
