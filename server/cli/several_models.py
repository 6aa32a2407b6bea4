"""The models of `jaxinfer serve --model a --model b`: their settings from the flags, and what can't go with several."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.config import ConfigError, EngineConfig
from server.cli.engine_start import engine_config
from server.cli.server_config import names_of
from server.config import ServerConfig

REPEATED = ("model", "served_model_name")  # flags that may be given once for each model


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One of the models, with its names in the API; the first name is the one that logs and metrics have."""

    names: tuple[str, ...]
    engine: EngineConfig


def for_each_model(arguments: argparse.Namespace) -> list[argparse.Namespace]:
    """The flags of each model, the first one first. Raises `ConfigError` where there are not as many
    --served-model-name as --model."""
    models: list[str] = getattr(arguments, "model", [])
    names: list[tuple[str, ...]] = getattr(arguments, "served_model_name", [])
    num_models = max(len(models), 1)
    if names and len(names) != num_models:
        raise ConfigError(
            f"--served-model-name is given {len(names)} times for {num_models} model(s): give it once for each --model, in the same order, "
            "or not at all; several names of one model are one list, such as a,b"
        )
    each = []
    for number in range(num_models):
        flags = copy.copy(arguments)
        if models:
            flags.model = models[number]
        if names:
            flags.served_model_name = names[number]
        if number:  # one embedding model is enough
            vars(flags).pop("embedding_model", None)
        each.append(flags)
    return each


def other_models(each: Sequence[argparse.Namespace], first: EngineConfig, config: ServerConfig) -> list[ModelSettings]:
    """Those after the first. Raises `ConfigError` for what can't go with several models, and for names that two have;
    else as `engine_config`."""
    if len(each) == 1:
        return []
    devices, several = first.devices, f"there are {len(each)} models (--model)"
    for is_so, what, instead in (
        (devices.num_processes > 1, f"num_processes is {devices.num_processes}", "an engine of several processes has one model"),
        (first.cache.kv_disk is not None, f"kv_disk is {first.cache.kv_disk}", "its pages belong to one model that never sleeps"),
        (devices.profile is not None, f"profile is {devices.profile}", "one engine is recorded at a time"),
    ):
        if is_so:
            raise ConfigError(f"{what}, but {several}: {instead}; leave it out, or serve each model with a server of its own")
    others = [ModelSettings(tuple(getattr(flags, "served_model_name", ())), engine_config(flags)) for flags in each[1:]]
    others = [ModelSettings(other.names or names_of(other.engine.model.model), other.engine) for other in others]
    taken = [*config.model_names, *(config.embedding_names if first.model.embedding_model is not None else ())]
    for other in others:
        for name in other.names:
            if not name.strip() or name in taken:
                raise ConfigError(f"two models would have the name {name!r}: give --served-model-name once for each --model")
            taken.append(name)
    return others
