"""`jaxinfer compress`: a folder of safetensors in fewer bytes, without loss."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkpoints.model_path import check_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint and the folder."""
    parser.add_argument("--force", action="store_true", help="replace what is in DST")
    parser.add_argument("--per-tensor", action="store_true", help="list what each tensor became")
    parser.add_argument("source", metavar="SRC", help="a folder of safetensors, 'minilm' or a Hugging Face id")
    parser.add_argument("destination", metavar="DST", type=Path, help="a folder to be made")


def run(arguments: argparse.Namespace) -> int:
    """Writes the folder, with a progress bar on a terminal. Interrupted, it goes on when run again."""
    check_model(arguments.source)
    from rich.console import Console

    from checkpoints.compression import compress, plain_bytes
    from checkpoints.destination import check_destination
    from checkpoints.hub import resolve
    from server.cli.bytes_progress import bytes_progress

    check_destination(arguments.destination, arguments.force)  # before a long download, which a wrong name would waste
    console = Console(stderr=True)
    source = resolve(arguments.source)
    with bytes_progress(console, plain_bytes(source)) as advance:
        sizes = compress(source, arguments.destination, is_forced=arguments.force, advance=advance)
    if arguments.per_tensor:
        for tensor in sizes.tensors:
            print(f"{tensor.coded / max(tensor.plain, 1):7.1%} of {tensor.plain / 1e6:9,.2f} MB {tensor.type:7} {tensor.name}")
    saved = 1 - sizes.coded / max(sizes.plain, 1)
    console.print(
        f"{sizes.plain / 1e6:,.1f} MB became {sizes.coded / 1e6:,.1f} MB ({saved:.1%} saved) in {arguments.destination}",
        highlight=False,
        soft_wrap=True,
    )
    return 0
