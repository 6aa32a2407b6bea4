"""The file of a cluster: what it says, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxinfer.config import ConfigError, flat_fields
from server.cli.parser import parse
from server.cluster.cluster_config import read_cluster_config
from server.cluster.scaling_policy import PoolBounds
from server.config import ServerConfig

EXAMPLE = Path(__file__).parents[3] / "examples/cluster.yaml"


def test_the_example_is_read() -> None:
    config = read_cluster_config(EXAMPLE)
    assert [(pool.role, pool.bounds) for pool in config.pools] == [("prefill", PoolBounds(1, 4)), ("decode", PoolBounds(1, 4))]
    assert config.routers == ("127.0.0.1:8100",) and config.scaling.patience == 60 and ("kv-memory", "256MiB") in config.flags


def test_the_kuberay_example_fits_together(tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {}
    for document in yaml.safe_load_all((EXAMPLE.parent / "kuberay.yaml").read_text()):
        kinds[document["kind"]] = document
    path = tmp_path / "cluster.yaml"
    path.write_text(kinds["ConfigMap"]["data"]["cluster.yaml"])
    config = read_cluster_config(path)
    assert {name for name, _ in config.flags} <= {field.name.replace("_", "-") for field in flat_fields()}
    service, cluster = kinds["Service"], kinds["RayCluster"]["spec"]
    ports = {port["name"]: f"{service['metadata']['name']}:{port['port']}" for port in service["spec"]["ports"]}
    assert (config.routers, config.stats) == ((ports["workers"],), f"http://{ports['http']}")
    router = kinds["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    _, parsed = parse([*router["command"][1:], *router["args"]])  # every flag is one
    assert {port["containerPort"] for port in router["ports"]} == {ServerConfig().port, parsed.workers_port}
    (group,) = cluster["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert {(pool.cpus, pool.gpus) for pool in config.pools} == {(int(limits["cpu"]), limits["nvidia.com/gpu"])}
    assert sum(pool.bounds.maximum for pool in config.pools) == group["maxReplicas"]
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > config.drain_seconds
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["env"] == router["env"] and kinds["RayJob"]["spec"]["clusterSelector"] == {"ray.io/cluster": "jaxinfer"}
    assert kinds["RayJob"]["spec"]["entrypoint"].split()[:3] == ["jaxinfer", "cluster", "up"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("look", "look", ""),
        ("flags:", "flag:", "'flag' is no key of it; there are drain_seconds, flags"),
        ("decode:", "decoder:", "pools: 'decoder' is no key"),
        ("maximum: 4", "most: 4", "pools.prefill: 'most' is no key"),
        ("target_ttft", "ttft", "scaling: 'ttft' is no key"),
        ("minimum: 1, maximum: 4", "minimum: 5, maximum: 4", "minimum is 5 and maximum 4"),
        ("patience: 60", "patience: soon", "scaling.patience is 'soon': it must be a number"),
        ("routers:", "#", "routers .* must be given"),
        ("name: example", "name: [", "can't be read"),
        ("flags: {kv-memory: 256MiB, max-batch-size: 8}", "flags: 3", "flags is 3: it must have keys and values"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(EXAMPLE.read_text().replace(before, after, 1))
    if not message:
        read_cluster_config(path)
        return
    with pytest.raises(ConfigError, match=message):
        read_cluster_config(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read_cluster_config(tmp_path / "missing.yaml")
