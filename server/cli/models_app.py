"""The app of several models: their engines are built one after the other, in memory that may hold one at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxinfer.config import ConfigError, format_bytes
from jaxinfer.start_progress import StartProgress
from server.cli.engine_start import start_engine
from server.cli.server_config import fitted
from server.cli.several_models import ModelSettings
from server.config import ServerConfig

if TYPE_CHECKING:
    from fastapi import FastAPI
    from rich.console import Console

    from server.batches.batch_store import BatchStore
    from server.usage_log import UsageLog

logger = logging.getLogger(__name__)


def models_app(
    models: Sequence[ModelSettings],
    config: ServerConfig,
    console: Console,
    progress: StartProgress,
    usage_log: UsageLog | None,
    store: BatchStore | None,
) -> FastAPI:
    """Builds each model's engine and puts it to sleep, so that the next one finds the memory free. Raises what building
    one raises, and `ConfigError` for one that needs more memory than all may have."""
    from jaxinfer.engine import Engine
    from server.local_backend import LocalBackend
    from server.models.memory import bytes_awake, default_room
    from server.models.policy import Limits
    from server.models.several_models import SeveralModels
    from server.models.turns import TurnSettings
    from server.openai.app import OtherModel, create_app
    from server.openai.text_work import start_with
    from server.summary import summary_table

    engines, sizes = dict[str, Engine](), list[int]()
    for number, model in enumerate(models, 1):
        name, started = model.names[0], time.monotonic()
        progress.about(f"{name}, {number} of {len(models)}")
        engine = engines[name] = start_engine(model.engine, console, progress)
        engine.sleep(config.models_sleep_level)
        if number == 1:
            start_with(lambda engine=engine: engine.tokenizer.encode("a"))  # type: ignore[misc]
        console.print(f"[bold]{name}[/bold], {number} of {len(models)}")
        console.print(summary_table(engine.stats))
        size = bytes_awake(engine.stats)
        logger.info("%s was started in %.1f s; awake it takes %s on a device", name, time.monotonic() - started, format_bytes(size))
        if config.models_bytes is not None and size > config.models_bytes:
            raise ConfigError(
                f"models_memory is {config.models_memory}, but {name} alone needs {format_bytes(size)} for its weights and KV pages: "
                "give more, or less kv_memory"
            )
        sizes.append(size)
    room = config.models_bytes or default_room(min(engine.stats.device_bytes for engine in engines.values()), sizes)
    settings = TurnSettings(Limits(room, config.models_turn), config.models_sleep_level, config.models_wait)
    first_engine = engines[models[0].names[0]]
    max_waiting = first_engine.config.schedule.max_queue_size
    backend = SeveralModels({name: LocalBackend(engine) for name, engine in engines.items()}, settings, max_waiting)
    first, *others = backend.each
    logger.info(
        "%d models need %s on a device; those that are awake may take %s", len(models), format_bytes(sum(sizes)), format_bytes(room)
    )
    beside = [OtherModel(model.names, other, engines[model.names[0]].tokenizer) for model, other in zip(models[1:], others, strict=True)]
    return create_app(backend, first_engine.tokenizer, fitted(config, first_engine.config), usage_log, store, first, beside)
