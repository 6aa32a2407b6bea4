"""`jaxinfer follow`: a process whose devices belong to an engine that process 0 drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.engine.builder import build
from jaxinfer.multi_process.peer_failure import ProcessLostError
from jaxinfer.multi_process.processes import Follower, meet_leader
from jaxinfer.stats import EngineStats


def follow(given: Mapping[str, Any], on_ready: Callable[[], None] = lambda: None) -> None:
    """Runs until process 0 closes its engine. `given`: settings of `EngineConfig` by flat name, including `coordinator`
    and `process_id`; all others come from process 0. Raises `ConfigError` if the processes can't join. If process 0 is
    lost, this process ends with status `PROCESS_LOST`."""
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
