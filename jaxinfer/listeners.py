"""Events of requests and their listeners: the seam between the engine's thread and its callers. Imports no JAX."""

from __future__ import annotations

import logging
import queue
from contextlib import suppress
from typing import NamedTuple, Protocol

from jaxinfer.encode.text_batching import Embedded
from jaxinfer.request import OutputDelta

logger = logging.getLogger(__name__)


class Failed(NamedTuple):
    """A request has ended with an error; no other event follows."""

    request_id: str
    error: BaseException


Event = OutputDelta | Embedded | Failed


class Listener(Protocol):
    def deliver(self, events: list[Event]) -> None:
        """Receive one iteration's events for this listener's requests. Called in the engine's thread: must not
        block."""
        ...


class Answers:
    """A listener that a thread waits on."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self.deliver = self._events.put
        self.get = self._events.get  # waits for the next iteration's events


def deliver(listener: Listener, events: list[Event]) -> None:
    """Deliver events. If the listener raises, only its own requests fail."""
    try:
        listener.deliver(events)
    except Exception as error:
        logger.error("events of %d requests are lost", len(events), exc_info=error)
        with suppress(Exception):
            listener.deliver([Failed(request_id, error) for request_id in {event.request_id for event in events}])
