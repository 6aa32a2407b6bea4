"""`jaxinfer inspect`: what a checkpoint holds, and whether it can be served."""

from __future__ import annotations

import argparse
import json
import os

from server.cli.convert import add_source
from server.cli.model_name import check_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint and the form of the report."""
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes and every tensor")
    add_source(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    check_name(arguments.source)  # before the long imports, which a wrong name would waste
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # models are built abstractly: no GPU is needed
    from checkpoints.hub import resolve
    from server.inspection import inspect

    inspection = inspect(resolve(arguments.source))
    print(json.dumps(inspection.json(), indent=2) if arguments.json else "\n".join(inspection.lines()))
    return 0
