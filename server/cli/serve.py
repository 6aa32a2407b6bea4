"""`jaxinfer serve`: the HTTP server and its chat page."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from contextlib import ExitStack, closing
from functools import partial

from checkpoints.user_folders import expanded
from jaxinfer.config import flat_fields
from server.api_keys import KeyRing
from server.cli.engine_start import engine_config, start_engine
from server.cli.listener import listening_socket
from server.cli.server_config import server_config
from server.config import ServerConfig
from server.flags import add_flags
from server.logs import configure
from server.tls import Tls
from server.usage_log import UsageLog

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The server's settings and the engine's."""
    add_flags(parser, "server", dataclasses.fields(ServerConfig))
    add_flags(parser, "engine", flat_fields())


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop."""
    engine_settings = engine_config(arguments)
    config = server_config(arguments, engine_settings)
    configure(config.log_level, config.log_format)
    for check in (KeyRing.of_api, KeyRing.of_metrics, Tls.of):  # what is wrong with their files is reported before the long start
        check(config)
    with ExitStack() as opened:  # before the long start, which a failure would waste
        listener = opened.enter_context(listening_socket(config))
        usage_log = opened.enter_context(UsageLog(config.usage_log)) if config.usage_log else None
        from rich.console import Console

        from server.batches.batch_store import BatchStore
        from server.graceful import GracefulServer
        from server.http_limits import raise_file_limit
        from server.local_backend import LocalBackend
        from server.openai.app import create_app
        from server.summary import summary_table

        raise_file_limit(config.max_connections)
        console = Console(stderr=True, quiet=config.log_format == "json")
        store = opened.enter_context(closing(BatchStore(expanded(config.batch_dir)))) if config.batch_dir else None
        engine = start_engine(engine_settings, console)
        console.print(summary_table(engine.stats))
        host, port = listener.getsockname()[:2]
        scheme = "http" if config.ssl_certfile is None else "https"
        message = f"{config.model_name} is ready on {scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        # More prompts than may wait would always be too many.
        config = dataclasses.replace(config, max_prompts=min(config.max_prompts, engine.config.schedule.max_queue_size))
        app = create_app(LocalBackend(engine), engine.tokenizer, config, usage_log, store)
        config = config.without_secrets()
        tell = logger.info if console.quiet else partial(console.print, highlight=False)
        GracefulServer(app, config, on_started=lambda: tell(message)).run(sockets=[listener])
    return 0
