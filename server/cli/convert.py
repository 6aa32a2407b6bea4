"""`jaxinfer convert`: write a checkpoint in another format."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from checkpoints.model_path import check_model
from jaxinfer.config import parse_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint, the folder and its format."""
    parser.add_argument("--format", choices=("safetensors", "orbax"), default="safetensors", help="to write (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of all weights (default: as stored; once quantised, float32)"
    )
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="of a safetensors file, at most (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace what is in DST")
    add_source(parser)
    parser.add_argument("destination", metavar="DST", type=Path, help="a folder to be made")


def add_source(parser: argparse.ArgumentParser) -> None:
    """The checkpoint to read."""
    parser.add_argument("source", metavar="SRC", help="'default', 'minilm', a folder, a .gguf file or a Hugging Face id")


def run(arguments: argparse.Namespace) -> int:
    """Write the folder, with a bar on a terminal."""
    shard_size = parse_bytes("shard_size", arguments.shard_size)
    check_model(arguments.source)  # before the long imports, which a wrong name would waste; one of Hugging Face's after the destination
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Orbax starts JAX, which would take a GPU that others may be using
    from checkpoints.convert import check_destination, convert
    from checkpoints.hub import open_source, resolve
    from checkpoints.outgoing import DTYPES, outgoing
    from jaxinfer.tokenizer import Tokenizer

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what is meant to be so
    check_destination(arguments.destination, arguments.force)  # before a long download, which a wrong name would waste
    console = Console(stderr=True)
    source = open_source(resolve(arguments.source))
    tensors = outgoing(source, None if arguments.dtype is None else DTYPES[arguments.dtype])
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("weights", total=num_bytes)
        convert(
            source,
            tensors,
            arguments.destination,
            arguments.format,
            shard_size=shard_size,
            save_tokenizer=lambda file: Tokenizer.from_source(source).save(file),
            is_forced=arguments.force,
            advance=lambda written: progress.advance(bar, written),
        )
    console.print(f"{len(tensors):,} tensors, {num_bytes / 1e6:,.1f} MB, are in {arguments.destination}", highlight=False, soft_wrap=True)
    return 0
