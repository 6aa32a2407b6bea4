"""ServerConfig from flags and the environment."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from jaxinfer.config import EngineConfig
from server.config import ServerConfig
from server.flags import given_flags

# models known by two names
SERVED_AS = {"default": ("SmolLM2-135M-Instruct", "default"), "minilm": ("all-MiniLM-L6-v2", "minilm")}
KEYS_VARIABLE, PRIORITY_KEYS_VARIABLE = "JAXINFER_API_KEYS", "JAXINFER_PRIORITY_KEYS"


def server_config(arguments: argparse.Namespace, engine: EngineConfig) -> ServerConfig:
    """Flags, then the environment's keys, then names from the models. Raises `ConfigError`."""
    fields = given_flags(arguments, dataclasses.fields(ServerConfig))
    _add_keys(fields)
    models = engine.model
    fields.setdefault("served_model_name", names_of(models.model))
    if models.embedding_model is not None:
        fields.setdefault("served_embedding_name", names_of(models.embedding_model))
    return ServerConfig(**fields)


def router_config(arguments: argparse.Namespace, names: tuple[str, ...]) -> ServerConfig:
    """The same for a router in front of a model with these names."""
    fields = given_flags(arguments, dataclasses.fields(ServerConfig))
    _add_keys(fields)
    fields.setdefault("served_model_name", names)
    return ServerConfig(**fields)


def fitted(config: ServerConfig, engine: EngineConfig) -> ServerConfig:
    """With no more prompts in a request than may wait: those would always be too many."""
    return dataclasses.replace(config, max_prompts=min(config.max_prompts, engine.schedule.max_queue_size))


def _add_keys(fields: dict[str, Any]) -> None:
    if keys := os.environ.pop(KEYS_VARIABLE, None):
        fields.setdefault("api_keys", tuple(key.strip() for key in keys.split(",")))
    if keys := os.environ.pop(PRIORITY_KEYS_VARIABLE, None):
        fields.setdefault("priority_keys", tuple(key.strip() for key in keys.split(",")))


def names_of(model: str) -> tuple[str, ...]:
    """A model's short name and, unless it is a path, which is private, the name that was given for it."""
    if model in SERVED_AS:
        return SERVED_AS[model]
    path = Path(model)
    name = path.resolve().name.removesuffix(".gguf")
    return (name,) if path.is_absolute() or path.exists() else tuple(dict.fromkeys((name, model)))
