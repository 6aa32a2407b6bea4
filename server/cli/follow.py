"""`jaxinfer follow`: gives this process's devices to an engine that process 0 drives."""

from __future__ import annotations

import argparse
import sys

from jaxinfer.config import flat_fields
from server.flags import add_flags, given_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's settings; those that aren't given come from process 0."""
    add_flags(parser, "engine (process 0's where they aren't given)", flat_fields())


def run(arguments: argparse.Namespace) -> int:
    """Runs until process 0 closes its engine."""
    from jaxinfer.multi_process.follow import follow

    follow(given_flags(arguments, flat_fields()), lambda: print("ready", file=sys.stderr, flush=True))
    return 0
