"""`jaxinfer worker`: an engine that routers give prefill, decode, or both."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import signal
import socket
import sys

from jaxinfer.config import ConfigError, flat_fields
from server.cli.cluster_flags import add_cluster_flags, credentials
from server.cli.engine_start import engine_config, start_engine
from server.cli.trace_flag import start_tracing
from server.flags import add_flags
from server.logs import configure
from server.workers.pull_settings import PullSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its place in the cluster, and the engine's settings."""
    group = parser.add_argument_group("worker")
    group.add_argument("--role", choices=("prefill", "decode", "both"), default="both", help="what routers give it (default: both)")
    group.add_argument("--router", metavar="HOST:PORT", required=True, help="workers' port of each router, separated by commas")
    group.add_argument("--host", default="127.0.0.1", help="this machine's address, by which others reach it (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=0, metavar="N", help="port that routers and workers call it at; 0: any (default: 0)")
    group.add_argument("--page-port", type=int, default=0, metavar="N", help="port that others pull pages at; 0: any (default: 0)")
    what = (
        "how pages that it pulls come; jax: by jax.experimental.transfer, without TLS; auto: whichever was quicker lately; where both "
        "workers have socket in common only, that (default: socket)"
    )
    group.add_argument("--kv-transport", choices=("socket", "jax", "auto"), default="socket", help=what)
    what = "whether pages that it pulls come coded, without loss; auto: where the link is slower than the coder gains (default: auto)"
    group.add_argument("--kv-compression", choices=("auto", "on", "off"), default="auto", help=what)
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default: info)")
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="(default: text)")
    group.add_argument("--otlp-endpoint", metavar="URL", help="collector that traces go to, OTLP over gRPC (extra otel)")
    add_cluster_flags(group)
    add_flags(parser, "engine", flat_fields())


def _check_port(host: str, port: int, flag: str) -> None:
    """Raises `ConfigError` for one that can't be listened on: later it would be after a model was loaded."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"can't listen on {host} port {port}: {error}; choose others with --host and {flag}") from error


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT; from SIGUSR1 on nothing new, until all that it has begun has ended."""
    routers = tuple(part.strip() for part in arguments.router.split(","))
    for router in routers:
        host, _, port = router.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"router is {router!r}: give HOST:PORT, such as 10.0.0.1:8100")
    known = credentials(arguments, "host", arguments.host)
    for port, flag in ((arguments.port, "--port"), (arguments.page_port, "--page-port")):
        _check_port(arguments.host, port, flag)
    pulls = PullSettings(arguments.kv_transport, arguments.kv_compression, known.tls is not None)
    settings = engine_config(arguments)
    settings = dataclasses.replace(settings, cache=dataclasses.replace(settings.cache, kv_peers=True))
    configure(arguments.log_level, arguments.log_format)
    start_tracing(arguments.otlp_endpoint, f"jaxinfer {arguments.role} worker")

    from rich.console import Console

    engine = start_engine(settings, Console(stderr=True, quiet=arguments.log_format == "json"))

    from server.workers.worker import WorkerAddress, serve

    async def serve_until_told() -> None:
        stop, drain, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGUSR1, drain.set)

        def ready(address: str) -> None:
            message = f"worker ({arguments.role}) is ready on {address}"
            if arguments.log_format == "json":
                logging.getLogger(__name__).info(message)
            else:
                print(message, file=sys.stderr, flush=True)

        address = WorkerAddress(arguments.host, arguments.port, arguments.page_port)
        await serve(engine, arguments.role, address, routers, known, stop, drain, ready, pulls)

    asyncio.run(serve_until_told())
    return 0
