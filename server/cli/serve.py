"""`jaxinfer serve`: the HTTP server and its chat page."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from checkpoints.user_folders import expand
from jaxinfer.config import flat_fields
from jaxinfer.start_progress import StartProgress
from server.api_keys import KeyRing
from server.cli.engine_start import engine_config, start_engine
from server.cli.listener import listening_socket
from server.cli.server_config import fitted, server_config
from server.cli.several_models import REPEATED, ModelSettings, for_each_model, other_models
from server.cli.trace_flag import start_tracing
from server.config import ServerConfig
from server.flags import add_flags
from server.logs import configure
from server.tls import Tls
from server.usage_log import UsageLog

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005
FLUSH_SECONDS = 1.0  # for the usage log where the process ends at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The server's settings and the engine's."""
    add_flags(parser, "server", dataclasses.fields(ServerConfig), REPEATED)
    add_flags(parser, "engine", flat_fields(), REPEATED)


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is stopped. The socket is open before anything heavy is imported; clients get an answer as soon
    as the event loop runs."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the event loop has a handler that reloads
    first, *rest = for_each_model(arguments)
    engine_settings = engine_config(first)
    config = server_config(first, engine_settings)
    others = other_models([first, *rest], engine_settings, config)
    configure(config.log_level, config.log_format)
    start_tracing(config.otlp_endpoint, "jaxinfer serve")
    # errors in their files are reported before the long start
    for check in (KeyRing.api_keys, KeyRing.metrics_keys, Tls.of):
        check(config)
    # How long a thread that reads a large body may block the event loop and the engine's thread, each time they want to
    # run.
    sys.setswitchinterval(SWITCH_SECONDS)
    with ExitStack() as opened:
        listener = opened.enter_context(listening_socket(config))
        usage_log = opened.enter_context(UsageLog(config.usage_log)) if config.usage_log else None
        progress = StartProgress("importing libraries")

        from server.graceful import GracefulServer
        from server.http_limits import raise_file_limit
        from server.starting import StartingApp

        def build() -> FastAPI:
            from server.batches.batch_store import BatchStore

            # An unusable folder is reported before the imports that take long.
            store = opened.enter_context(closing(BatchStore(expand(config.batch_dir)))) if config.batch_dir else None

            from rich.console import Console

            from server.cli.models_app import models_app
            from server.local_backend import LocalBackend
            from server.openai.app import create_app
            from server.openai.text_work import start_with
            from server.summary import summary_table

            console = Console(stderr=True, quiet=config.log_format == "json")
            if others:
                return models_app(
                    [ModelSettings(config.model_names, engine_settings), *others], config, console, progress, usage_log, store
                )
            engine = start_engine(engine_settings, console, progress)
            start_with(lambda: engine.tokenizer.encode("a"))
            console.print(summary_table(engine.stats))
            return create_app(LocalBackend(engine), engine.tokenizer, fitted(config, engine.config), usage_log, store)

        def flush() -> None:
            if usage_log is not None:
                usage_log.flush(FLUSH_SECONDS)

        host, port = listener.getsockname()[:2]
        url = f"{'http' if config.ssl_certfile is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
        are_ready = " and ".join([config.model_name, *(other.names[0] for other in others)]) + (" are" if others else " is")
        message = f"{are_ready} ready on {url}"
        raise_file_limit(config.max_connections)
        app = StartingApp(
            build,
            progress,
            config.root_path,
            on_ready=lambda: logger.info(message) if config.log_format == "json" else print(message, file=sys.stderr, flush=True),
            on_failed=lambda: server.end(),  # noqa: PLW0108 (it is made below)
        )
        server = GracefulServer(app, config.without_secrets(), before_cut=flush)
        server.run(sockets=[listener])
        if app.failure is not None:
            raise app.failure
        if app.is_building:  # its threads would continue until their compilations end
            flush()
            logging.shutdown()
            os._exit(0)
    return 0
