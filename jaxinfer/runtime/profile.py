"""A trace of what the host and the devices do in an engine's first seconds of work, for XProf and Perfetto."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Mapping

import jax

from checkpoints.user_folders import expanded
from jaxinfer.config import ConfigError
from jaxinfer.runtime.compilation import Executable

_log = logging.getLogger(__name__)


class Profile:
    """Writes `FOLDER/plugins/profile/TIME/`: `*.xplane.pb` for XProf (`xprof FOLDER`), `perfetto_trace.json.gz` for ui.perfetto.dev.

    Recording begins with the first `tick` and ends with the first one `seconds` later, with `stop`, or when the process ends. A process has
    one recording at a time. Raises `ConfigError` for a folder that can't be written.
    """

    def __init__(self, folder: str, seconds: float) -> None:
        self._folder = expanded(folder)
        self._seconds = seconds
        self._began: float | None = None
        self._is_over = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"profile is {folder!r}, where no folder can be made ({error}): give one that can be written") from error

    def tick(self) -> None:
        """There is work to do."""
        if self._is_over:
            return
        if self._began is None:
            self._began = time.monotonic()
            atexit.register(self.stop)
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        elif time.monotonic() - self._began >= self._seconds:
            self.stop()

    def stop(self) -> None:
        """Write what was recorded, which takes longer than it took to record; nothing after the first time."""
        if self._began is not None and not self._is_over:
            _log.warning("writing the profile into %s", self._folder)
            jax.profiler.stop_trace()
        self._is_over = True


def named(programs: Mapping[str, Executable]) -> dict[str, Executable]:
    """The same programs, whose calls a trace shows by their names."""
    return {name: jax.profiler.annotate_function(program, name=name) for name, program in programs.items()}
