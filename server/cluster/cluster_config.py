"""ClusterConfig: pools of workers as a YAML file says them. Unknown keys are errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from jaxinfer.config import ConfigError
from server.cluster.scaling_policy import DEFAULT_SCALING, PoolBounds, ScalingSettings
from server.workers.roles import ROLES


@dataclass(frozen=True)
class PoolConfig:
    """Workers of one role. `processes`: of each, on hosts apart where there are so many; `cpus`, `gpus`: that Ray sets
    aside for a process; `flags`: of `jaxinfer worker`, by name."""

    role: str
    bounds: PoolBounds
    cpus: float = 1.0
    gpus: float = 0.0
    processes: int = 1
    flags: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ClusterConfig:
    """`ray`: `local`, `auto` or a cluster's address. `routers`: workers' ports, which workers register at; `stats`: a
    router's URL, whose numbers pools are scaled by; `look_seconds`: between two looks."""

    routers: tuple[str, ...]
    stats: str
    pools: tuple[PoolConfig, ...]
    name: str = "default"
    ray: str = "auto"
    flags: tuple[tuple[str, str], ...] = ()
    scaling: ScalingSettings = DEFAULT_SCALING
    look_seconds: float = 2.0
    drain_seconds: float = 120.0  # that a worker's requests may take before they are moved elsewhere


def read_cluster_config(path: Path) -> ClusterConfig:
    """Raises `ConfigError`, which names the key."""
    try:
        read = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    given = _mapping(read, str(path))
    _known(given, {field.name for field in fields(ClusterConfig)}, str(path))
    pools = _mapping(given.get("pools"), "pools")
    _known(pools, set(ROLES), "pools")
    routers = given.get("routers")
    if not pools or not isinstance(routers, list) or not routers or not isinstance(given.get("stats"), str):
        raise ConfigError(f"{path}: routers (a list of HOST:PORT), stats (a router's URL) and pools (by role) must be given")
    scaling = _mapping(given.get("scaling", {}), "scaling")
    _known(scaling, {field.name for field in fields(ScalingSettings)}, "scaling")
    plain = {name: given[name] for name in ("name", "ray", "look_seconds", "drain_seconds") if name in given}
    return ClusterConfig(
        tuple(map(str, routers)),
        given["stats"].rstrip("/"),
        tuple(_pool(role, _mapping(of_pool, f"pools.{role}")) for role, of_pool in pools.items()),
        flags=_flags(given.get("flags", {}), "flags"),
        scaling=ScalingSettings(**{name: _number(value, f"scaling.{name}") for name, value in scaling.items()}),
        **plain,
    )


def _pool(role: str, given: Mapping[str, Any]) -> PoolConfig:
    _known(given, {"minimum", "maximum", "cpus", "gpus", "processes", "flags"}, f"pools.{role}")
    numbers = {name: _number(given.get(name, 1), f"pools.{role}.{name}") for name in ("minimum", "maximum")}
    if not 0 <= numbers["minimum"] <= numbers["maximum"]:
        raise ConfigError(
            f"pools.{role}: minimum is {numbers['minimum']:g} and maximum {numbers['maximum']:g}: give 0 <= minimum <= maximum"
        )
    processes = int(_number(given.get("processes", 1), f"pools.{role}.processes"))
    if processes < 1:
        raise ConfigError(f"pools.{role}.processes is {processes}: it must be at least 1")
    return PoolConfig(
        role,
        PoolBounds(int(numbers["minimum"]), int(numbers["maximum"])),
        _number(given.get("cpus", 1.0), f"pools.{role}.cpus"),
        _number(given.get("gpus", 0.0), f"pools.{role}.gpus"),
        processes,
        _flags(given.get("flags", {}), f"pools.{role}.flags"),
    )


def _flags(given: Any, where: str) -> tuple[tuple[str, str], ...]:
    return tuple((str(name), str(value)) for name, value in _mapping(given, where).items())


def _mapping(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}: it must have keys and values")
    return given


def _number(given: Any, where: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ConfigError(f"{where} is {given!r}: it must be a number")
    return given


def _known(given: Mapping[str, Any], names: set[str], where: str) -> None:
    if unknown := sorted(str(name) for name in given if name not in names):
        raise ConfigError(f"{where}: {unknown[0]!r} is no key of it; there are {', '.join(sorted(names))}")
