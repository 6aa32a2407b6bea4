"""The engine of a command: checks of its settings that need no JAX, and its start with a spinner on a terminal."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from jaxinfer.config import ConfigError, EngineConfig, flat_fields
from jaxinfer.start_progress import StartProgress
from server.cli.model_name import check_name
from server.flags import given_flags
from sharding.layout import missing_device

if TYPE_CHECKING:
    from rich.console import Console

    from jaxinfer.engine import Engine

_ACCELERATORS = ("jax_plugins", "libtpu")  # packages, one of which JAX needs for devices other than the CPU


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The configuration from the flags. Raises `ConfigError`, and `CheckpointError` for a local model that can't be
    opened: in milliseconds, where building the engine would fail after seconds of imports."""
    config = EngineConfig.of(**given_flags(arguments, flat_fields()))
    _check_devices(config)
    for model in (config.model.model, config.model.embedding_model):
        if model is not None:
            check_name(model)
    return config


def start_engine(config: EngineConfig, console: Console, progress: StartProgress | None = None) -> Engine:
    """Loads and compiles, with a spinner on a terminal; `progress` reports to others."""
    with console.status(f"starting {config.model.model}: loading weights and compiling programs"):
        from jaxinfer.engine import Engine

        engine = Engine(config, progress=progress)
    # Garbage collection stops every thread while it examines long-lived objects: 50 to 250 ms for what a start creates,
    # libraries' modules and compiled programs, all of which stays. So they are frozen.
    gc.collect()
    gc.freeze()
    return engine


def _check_devices(config: EngineConfig) -> None:
    num_devices = _num_cpu_devices(config)
    if num_devices is None:
        return
    for role in ("prefill", "decode"):
        device_ids = config.devices.of_role(role)
        if reason := missing_device(device_ids, num_devices, "cpu"):
            raise ConfigError(f"{role}_devices is {device_ids}: {reason}")


def _num_cpu_devices(config: EngineConfig) -> int | None:
    """How many devices JAX will have, where it can only have the CPU's; None where only JAX knows."""
    is_cpu = os.environ.get("JAX_PLATFORMS") == "cpu" or not any(map(importlib.util.find_spec, _ACCELERATORS))
    is_forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    is_set_elsewhere = "jax" in sys.modules or is_forced or "JAX_NUM_CPU_DEVICES" in os.environ
    if not is_cpu or is_set_elsewhere or config.devices.num_processes > 1:
        return None
    return config.devices.cpu_devices or 1
