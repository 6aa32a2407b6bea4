"""`jaxinfer compile`: an engine's programs, compiled once and shipped to where it is served."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from jaxinfer.config import flat_fields
from server.cli.engine_start import engine_config, start_engine
from server.flags import add_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder, and the engine's settings."""
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="a folder to be made")
    add_flags(parser, "engine", flat_fields())


def run(arguments: argparse.Namespace) -> int:
    """Starts an engine with an empty program cache, and writes what it compiled."""
    config = engine_config(arguments)
    config = replace(config, schedule=replace(config.schedule, ready_when="all"))
    from rich.console import Console

    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache  # read when JAX is imported
        engine = start_engine(config, console)
        from jaxinfer.engine.shipped_programs import ship_programs

        engine.close()
        bundle = ship_programs(config, arguments.output)
    size = sum(map(len, bundle.contents.values()))
    console.print(
        f"{engine.stats.num_programs} programs and what loading needs, {size / 1e6:,.1f} MB, in {arguments.output} "
        f"(serve with --programs {arguments.output})",
        highlight=False,
        soft_wrap=True,
    )
    return 0
