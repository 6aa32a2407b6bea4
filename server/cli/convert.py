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
    parser.add_argument("--format", choices=("safetensors", "orbax"), default="safetensors", help="output format (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="type of all weights (default: as stored; float32 for quantised ones)"
    )
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="largest safetensors file (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace what is in DST")
    add_source(parser)
    parser.add_argument("destination", metavar="DST", type=Path, help="a folder to be made")


def add_source(parser: argparse.ArgumentParser) -> None:
    """The checkpoint to read."""
    parser.add_argument("source", metavar="SRC", help="'default', 'minilm', a folder, a .gguf file or a Hugging Face id")


def run(arguments: argparse.Namespace) -> int:
    """Writes the folder, with a progress bar on a terminal."""
    shard_size = parse_bytes("shard_size", arguments.shard_size)
    # before the long imports, which a wrong name would waste; a Hugging Face id is checked after the destination
    check_model(arguments.source)
    from rich.console import Console

    # Orbax starts JAX, which would allocate a GPU that others may be using
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from checkpoints.convert import convert
    from checkpoints.converted_tensors import DTYPES, converted_tensors
    from checkpoints.destination import check_destination
    from checkpoints.hub import open_source, resolve
    from jaxinfer.tokenizer import Tokenizer
    from server.cli.bytes_progress import bytes_progress

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what is intended
    check_destination(arguments.destination, arguments.force)  # before a long download, which a wrong name would waste
    console = Console(stderr=True)
    source = open_source(resolve(arguments.source))
    tensors = converted_tensors(source, None if arguments.dtype is None else DTYPES[arguments.dtype])
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    with bytes_progress(console, num_bytes) as advance:
        convert(
            source,
            tensors,
            arguments.destination,
            arguments.format,
            shard_size=shard_size,
            save_tokenizer=lambda file: Tokenizer.from_source(source).save(file),
            is_forced=arguments.force,
            advance=advance,
        )
    console.print(f"{len(tensors):,} tensors, {num_bytes / 1e6:,.1f} MB, are in {arguments.destination}", highlight=False, soft_wrap=True)
    return 0
