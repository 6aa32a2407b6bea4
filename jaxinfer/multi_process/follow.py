"""`jaxinfer follow`: a process that lends its devices to an engine that another drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.builder import build
from jaxinfer.multi_process.peer_failure import ProcessLostError
from jaxinfer.multi_process.processes import Follower, meet_leader
from jaxinfer.stats import EngineStats


def follow(given: Mapping[str, Any], on_ready: Callable[[], None] = lambda: None) -> None:
    """Until process 0 closes its engine. `given`: settings of `EngineConfig` by their flat names, `coordinator` and `process_id` among them;
    all others are process 0's. Raises `ConfigError` if they don't meet. If process 0 is gone this process ends with status `PROCESS_LOST`."""
    config, channel, messages = meet_leader(given)
    follower = Follower(channel, messages)
    try:
        with follower.surface_peer_failure():
            build(config, EngineStats(), follower)
            on_ready()
            follower.follow()
    except ProcessLostError as error:
        channel.monitor.report_lost(str(error))
        channel.monitor.end()
    except Exception as error:
        channel.report(error=f"{type(error).__name__}: {error}")
        raise
    finally:
        channel.close()
