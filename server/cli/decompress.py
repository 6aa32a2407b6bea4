"""`jaxinfer decompress`: the folder that `jaxinfer compress` was given, byte for byte."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkpoints.model_path import check_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The compressed checkpoint and the folder."""
    parser.add_argument("--force", action="store_true", help="replace what is in DST")
    parser.add_argument("source", metavar="SRC", help="a folder that `jaxinfer compress` wrote, or a Hugging Face id of one")
    parser.add_argument("destination", metavar="DST", type=Path, help="a folder to be made")


def run(arguments: argparse.Namespace) -> int:
    """Writes the folder, with a progress bar on a terminal. Interrupted, it goes on when run again."""
    check_model(arguments.source)
    from rich.console import Console

    from checkpoints.compression import decompress, plain_bytes
    from checkpoints.destination import check_destination
    from checkpoints.hub import resolve
    from server.cli.bytes_progress import bytes_progress

    check_destination(arguments.destination, arguments.force)  # before a long download, which a wrong name would waste
    console = Console(stderr=True)
    source = resolve(arguments.source)
    with bytes_progress(console, plain_bytes(source)) as advance:
        sizes = decompress(source, arguments.destination, is_forced=arguments.force, advance=advance)
    console.print(
        f"{sizes.plain / 1e6:,.1f} MB of weights, every checksum right, are in {arguments.destination}", highlight=False, soft_wrap=True
    )
    return 0
