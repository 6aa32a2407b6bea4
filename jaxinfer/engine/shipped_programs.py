"""Compiled programs that are shipped: written after a start, put into the program cache before one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from checkpoints.user_folders import cache_folder
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.programs.bundle import Bundle, BundleError, read_bundle, read_bundle_key, write_bundle
from jaxinfer.programs.compilation import program_files
from jaxinfer.programs.key import sources, surrounding_facts

logger = logging.getLogger(__name__)

# Settings that no program depends on, or only by the model's sizes.
_NOT_OF_PROGRAMS = (
    "model",
    "programs",
    "programs_key",
    "ready_when",
    "profile",
    "profile_seconds",
    "kv_disk",
    "generation_config",
    "prefix_cache",
    "session_seconds",
    "target_ttft",
    "target_itl",
    "ageing_seconds",
    "max_queue_size",
    "coordinator",
    "process_id",
    "connect_seconds",
    "heartbeat_seconds",
)
_OWN_KEY = "program-cache.key"


def install_programs(config: EngineConfig) -> None:
    """Put the programs that `config` names where this start will look for them; a line says what they were compiled
    for that isn't so here. Raises `ConfigError` for programs that were changed, before any is used."""
    folder = config.devices.programs
    if folder is None:
        return
    files = program_files()
    if files is None:
        raise ConfigError("programs is given, but compiled programs are not kept (jax_enable_compilation_cache): switch that on")
    try:
        bundle = read_bundle(Path(folder), _key(config))
        bundle.install(files)
    except (BundleError, OSError) as error:
        raise ConfigError(f"programs is {folder}: {error}") from error
    if differences := bundle.differences(_about(config)):
        logger.warning("of the programs in %s some are compiled anew: %s", folder, "; ".join(differences))


def ship_programs(config: EngineConfig, folder: Path) -> Bundle:
    """Write all programs that an engine of this configuration found or compiled at its start. Raises `ConfigError`."""
    files = program_files()
    if files is None:
        raise ConfigError("compiled programs are not kept (jax_enable_compilation_cache): switch that on")
    try:
        return write_bundle(files, folder, _key(config), _about(config))
    except (BundleError, OSError) as error:
        raise ConfigError(str(error)) from error


def _key(config: EngineConfig) -> bytes:
    path = config.devices.programs_key
    return read_bundle_key(cache_folder() / _OWN_KEY if path is None else Path(path))


def _about(config: EngineConfig) -> Mapping[str, str]:
    groups = (config.model, config.devices, config.cache, config.schedule)
    settings = {field.name: getattr(group, field.name) for group in groups for field in fields(group)}
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in settings.items() if name not in _NOT_OF_PROGRAMS}
    return {**surrounding_facts(), "jaxinfer's sources": sources()[:16], **named}
