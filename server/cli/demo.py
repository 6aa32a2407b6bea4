"""`jaxinfer demo`: `generate` with a ready prompt, and a report of what ran where."""

from __future__ import annotations

import argparse

from jaxinfer.config import flat_fields
from server.cli import generate
from server.flags import add_flags

PROMPT = "Explain in a few sentences why the sky is blue."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As `generate`'s, with a prompt that may be left out."""
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="the prompt (default: %(default)s)")
    parser.set_defaults(stats=True)
    generate.add_generation_flags(parser)
    add_flags(parser, "engine", flat_fields())


def run(arguments: argparse.Namespace) -> int:
    """`generate`'s."""
    return generate.run(arguments)
