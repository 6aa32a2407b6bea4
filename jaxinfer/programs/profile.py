"""A trace of what the host and the devices do in an engine's first seconds of work, for XProf and Perfetto."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Mapping

import jax

from checkpoints.user_folders import expand
from jaxinfer.config import ConfigError
from jaxinfer.programs.compilation import Executable

_log = logging.getLogger(__name__)


class Profile:
    """Writes `FOLDER/plugins/profile/TIME/`: `*.xplane.pb` for XProf (`xprof FOLDER`), `perfetto_trace.json.gz` for
    ui.perfetto.dev.

    Recording begins with the first `tick`. It ends with the first `tick` after `seconds`, with `stop`, or with the
    process. A process has one recording at a time. Raises `ConfigError` for a folder that can't be written.
    """

    def __init__(self, folder: str, seconds: float) -> None:
        self._folder = expand(folder)
        self._seconds = seconds
        self._began: float | None = None
        self._is_over = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"profile is {folder!r}, where no folder can be made ({error}): give one that can be written") from error

    def tick(self) -> None:
        """Call when the engine has work."""
        if self._is_over:
            return
        if self._began is None:
            self._began = time.monotonic()
            atexit.register(self.stop)
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        elif time.monotonic() - self._began >= self._seconds:
            self.stop()

    def stop(self) -> None:
        """Write the recording, which takes longer than recording did. Later calls do nothing."""
        if self._began is not None and not self._is_over:
            _log.warning("writing the profile into %s", self._folder)
            jax.profiler.stop_trace()
        self._is_over = True


def named(programs: Mapping[str, Executable]) -> dict[str, Executable]:
    """The same programs, with their names shown in traces."""
    return {name: jax.profiler.annotate_function(program, name=name) for name, program in programs.items()}
