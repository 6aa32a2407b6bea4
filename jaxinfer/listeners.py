"""What comes of requests, and who is told: the seam between the engine's thread and whoever waits. Imports no JAX."""

from __future__ import annotations

import logging
import queue
from contextlib import suppress
from typing import NamedTuple, Protocol

from jaxinfer.encode.text_batching import Embedded
from jaxinfer.request import OutputDelta

logger = logging.getLogger(__name__)


class Failed(NamedTuple):
    """A request has ended by an error: nothing more comes of it."""

    request_id: str
    error: BaseException


Event = OutputDelta | Embedded | Failed


class Listener(Protocol):
    def deliver(self, events: list[Event]) -> None:
        """What one iteration had for this listener's requests. Called in the engine's thread, which it must not keep waiting."""
        ...


class Answers:
    """A listener whose events a thread waits for."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self.deliver = self._events.put
        self.get = self._events.get  # what the next iteration gives


def deliver(listener: Listener, events: list[Event]) -> None:
    """Tell a listener. If it fails its requests do, and nobody else's."""
    try:
        listener.deliver(events)
    except Exception as error:
        logger.error("events of %d requests are lost", len(events), exc_info=error)
        with suppress(Exception):
            listener.deliver([Failed(request_id, error) for request_id in {event.request_id for event in events}])
