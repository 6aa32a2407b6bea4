"""The `jaxinfer` command: serve, generate, batch, demo, compile, convert, plan and more. A command's module is imported
when it is used, and heavy imports, JAX above all, come after its settings were checked."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

from server.cli.parser import parse

USER_ERROR = 2
INTERRUPTED = 130  # as shells report a command that Ctrl+C ended


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0, 2 for a user error (reported in one line), 75 when another process of the
    engine is lost, 130 when interrupted."""
    try:
        command, parsed = parse(sys.argv[1:] if arguments is None else arguments)
        logging.basicConfig(level=getattr(parsed, "log_level", "warning").upper(), format="%(levelname)s: %(message)s", stream=sys.stderr)
        sys.exit(command(parsed))
    except (ValueError, OSError) as error:
        if isinstance(error, ConnectionError) and (status := _status_of_loss(error)) is not None:
            sys.exit(status)
        if not isinstance(error, _user_errors()):
            raise
        print(f"jaxinfer: error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _status_of_loss(error: ConnectionError) -> int | None:
    """The status of a process whose engine has lost another one, which has been logged."""
    from jaxinfer.multi_process.peer_failure import PROCESS_LOST, ProcessLostError

    return PROCESS_LOST if isinstance(error, ProcessLostError) else None


def _user_errors() -> tuple[type[Exception], ...]:
    from checkpoints.errors import CheckpointError
    from jaxinfer.architecture.model_config import UnsupportedModelError
    from jaxinfer.config import ConfigError
    from jaxinfer.request import RequestError

    return ConfigError, CheckpointError, UnsupportedModelError, RequestError, OSError
