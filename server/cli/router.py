"""`jaxinfer router`: one OpenAI endpoint in front of workers on any machines."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import signal
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from jaxinfer.start_progress import StartProgress
from server.api_keys import KeyRing
from server.cli.cluster_flags import add_cluster_flags, credentials
from server.cli.listener import listening_socket
from server.cli.model_name import check_name
from server.cli.server_config import names_of, router_config
from server.cli.trace_flag import start_tracing
from server.config import OF_SEVERAL_MODELS, ServerConfig
from server.flags import OnlyOne, add_flags
from server.logs import configure
from server.tls import Tls
from server.usage_log import UsageLog

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

_LEFT_OUT = ("embedding_truncate", "served_embedding_name", "batch_dir", "watchdog_timeout", *OF_SEVERAL_MODELS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its own settings and the HTTP server's."""
    group = parser.add_argument_group("router")
    group.add_argument(
        "--model", action=OnlyOne, default="default", help="the workers' model, whose tokenizer is read here (default: default)"
    )
    group.add_argument("--workers-port", type=int, default=8100, metavar="N", help="port that workers register at (default: 8100)")
    group.add_argument("--workers-host", default="127.0.0.1", metavar="TEXT", help="address of that port (default: 127.0.0.1)")
    group.add_argument(
        "--prefill-apart",
        choices=("auto", "always"),
        default="auto",
        help="auto: a prompt is prefilled by another worker than decode's where its first token is expected sooner then; always: by another "
        "wherever there is one (default: auto)",
    )
    add_cluster_flags(group)
    add_flags(parser, "server", [field for field in dataclasses.fields(ServerConfig) if field.name not in _LEFT_OUT])


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is stopped. `/ready` answers 200 once each role has a worker."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    config = router_config(arguments, names_of(arguments.model))
    configure(config.log_level, config.log_format)
    start_tracing(config.otlp_endpoint, "jaxinfer router")
    for check in (KeyRing.api_keys, KeyRing.metrics_keys, Tls.of):
        check(config)
    check_name(arguments.model)
    known = credentials(arguments, "workers_host", arguments.workers_host)
    with ExitStack() as opened:
        listener = opened.enter_context(listening_socket(config))
        usage_log = opened.enter_context(UsageLog(config.usage_log)) if config.usage_log else None
        progress = StartProgress("reading the tokenizer")

        from server.graceful import GracefulServer
        from server.http_limits import raise_file_limit
        from server.starting import StartingApp

        def build() -> FastAPI:
            from checkpoints.hub import open_source, resolve
            from jaxinfer.tokenizer import Tokenizer
            from server.openai.app import create_app
            from server.router.policy import RoutingSettings
            from server.router.router_backend import RouterBackend
            from server.router.workers import Workers

            tokenizer = Tokenizer.from_source(open_source(resolve(arguments.model)))
            workers = Workers(known, tokenizer.digest)
            routing = RoutingSettings(always_apart=arguments.prefill_apart == "always")
            backend = RouterBackend(workers, tokenizer, known, (arguments.workers_host, arguments.workers_port), routing=routing)
            return create_app(backend, tokenizer, config, usage_log)

        host, port = listener.getsockname()[:2]
        url = f"{'http' if config.ssl_certfile is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
        message = f"{config.model_name} is routed on {url}, workers register at {arguments.workers_host}:{arguments.workers_port}"
        raise_file_limit(config.max_connections)
        app = StartingApp(
            build,
            progress,
            config.root_path,
            on_ready=lambda: logger.info(message) if config.log_format == "json" else print(message, file=sys.stderr, flush=True),
            on_failed=lambda: server.end(),  # noqa: PLW0108 (it is made below)
        )
        server = GracefulServer(app, config.without_secrets())
        server.run(sockets=[listener])
        if app.failure is not None:
            raise app.failure
    return 0
