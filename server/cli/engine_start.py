"""The engine of a command: its settings checked before anything heavy is imported, its start with a spinner on a terminal."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jaxinfer.config import EngineConfig, flat_fields
from server.flags import given

if TYPE_CHECKING:
    from rich.console import Console

    from jaxinfer.engine import Engine


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """What the flags say. Raises `ConfigError`."""
    return EngineConfig.of(**given(arguments, flat_fields()))


def start_engine(config: EngineConfig, console: Console) -> Engine:
    """Load and compile, with a spinner on a terminal."""
    with console.status(f"starting {config.model.model}: loading weights and compiling programs"):
        from jaxinfer.engine import Engine

        return Engine(config)
