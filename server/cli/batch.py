"""`jaxinfer batch`: answer a file of OpenAI batch requests."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from jaxinfer.config import flat_fields
from server.cli.engine_start import engine_config, start_engine
from server.cli.server_config import names_of
from server.config import ServerConfig
from server.flags import add_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two files and the engine's settings."""
    parser.add_argument("input", type=Path, help='a request a line: {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}')
    parser.add_argument("output", type=Path, help="an answer a line; requests already answered there are skipped")
    help = "cut texts that are longer than the embedding model takes, instead of refusing them"
    parser.add_argument("--embedding-truncate", action="store_true", help=help)
    add_flags(parser, "engine", flat_fields())


def run(arguments: argparse.Namespace) -> int:
    """Answers the requests that have no answer yet; 1 if the engine fails meanwhile."""
    engine_settings = engine_config(arguments)
    import asyncio

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from server.batches.offline import BatchStopped, check_files, run_batch
    from server.local_backend import LocalBackend
    from server.openai.service import Service

    console = Console(stderr=True)
    num_lines = check_files(arguments.input, arguments.output)  # before the long start, which a wrong name would waste
    engine = start_engine(engine_settings, console)
    models = engine.config.model
    config = ServerConfig(
        served_model_name=names_of(models.model),
        served_embedding_name=() if models.embedding_model is None else names_of(models.embedding_model),
        embedding_truncate=arguments.embedding_truncate,
    )
    backend = LocalBackend(engine)
    service = Service(backend, engine.tokenizer, config, int(time.time()))
    schedule = engine.config.schedule
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())

    async def answer() -> str:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("requests", total=num_lines)
            await backend.start()
            concurrency = min(2 * schedule.max_batch_size, schedule.max_queue_size)
            try:
                result = await run_batch(
                    service, arguments.input, arguments.output, concurrency=concurrency, advance=lambda count: progress.advance(bar, count)
                )
            finally:
                await backend.stop()
        return f"{result.num_answered} answered, {result.num_failed} of them with an error; {result.num_kept} kept from before"

    try:
        console.print(asyncio.run(answer()))
    except BatchStopped as error:
        console.print(f"jaxinfer: error: {error}; the answers so far are in {arguments.output}: run the same command again for the rest")
        return 1
    return 0
