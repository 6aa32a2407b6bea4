"""Limits on connections: their number, the time for a head and for a body, the pause between requests, and clients that
read nothing.

uvicorn limits the size of a head and the pause after an answer. The rest is here: `LimitedProtocol` is its protocol
with a timer for whatever a connection must send or read next, and `timely` limits the wait for a body. Neither ever
cuts an answer that its client reads.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import json
import logging
import resource
import socket
import ssl
import termios
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import h11
from starlette.types import Message, Receive
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from server.config import ServerConfig
from server.openai.api_error import ApiError

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MIN_BODY_RATE = 4096  # bytes a second that an unfinished body must keep up, on average and beyond its timeout
SPARE_FILES = 256  # descriptors for what is not a connection
# seconds until a silent peer is probed, between probes, and their number: then it counts as lost
KEEPALIVE = (60, 15, 4)


@dataclass(slots=True)
class Connections:
    """The connections of one server. Over the limit the one that has been idle longest is closed for a new one."""

    max_connections: int
    idle: dict[LimitedProtocol, None] = field(default_factory=dict)  # the longest idle first
    num_open: int = 0

    def admit(self, protocol: LimitedProtocol) -> bool:
        """Counts a new connection, idle for now. False if it is one too many and no other could be closed: then its
        requests are refused."""
        self.num_open += 1
        has_room = self.num_open <= self.max_connections or bool(self.idle)
        if self.num_open > self.max_connections and self.idle:
            next(iter(self.idle)).abort()
        self.idle[protocol] = None
        return has_room

    def leave(self, protocol: LimitedProtocol) -> None:
        self.num_open -= 1
        self.idle.pop(protocol, None)


def protocol_factory(config: ServerConfig) -> Callable[..., LimitedProtocol]:
    """For uvicorn's setting `http`."""
    return functools.partial(LimitedProtocol, config, Connections(config.max_connections))


class LimitedProtocol(H11Protocol):
    """h11 whatever is installed beside it, because it limits a head's size. A connection must send a whole head as long
    as no request is active, within `head_timeout` from its first byte on, or from when it was opened. uvicorn's own
    timer runs in the pause between."""

    def __init__(self, limits: ServerConfig, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits, self._all = limits, connections
        self._handshake: asyncio.Task[None] | None = None
        self._is_aborted = False
        self._is_counted = True  # from when it is accepted, before TLS's handshake
        if not self._all.admit(self):
            self.app_state = {**self.app_state, "is_over_capacity": True}
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _probe_silent_peers(transport)
        if self._is_aborted:  # of many accepted at once the first are closed for the last before they are set up
            transport.abort()
        else:
            self._expect_head()

    def begin_tls(self, connection: socket.socket, context: ssl.SSLContext) -> asyncio.Task[None]:
        """Serves an accepted connection over TLS; returns the task of its handshake. This has `head_timeout`, too, and
        counts as idle: it may be closed for another connection."""
        self._handshake = self.loop.create_task(self._shake_hands(connection, context))
        # also if it is closed before it begins
        self._handshake.add_done_callback(lambda _: self._end_handshake(connection))
        return self._handshake

    async def _shake_hands(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        try:
            await self.loop.connect_accepted_socket(lambda: self, connection, ssl=context, ssl_handshake_timeout=self._limits.head_timeout)
        except OSError as error:  # ssl.SSLError is one, too
            logger.debug("a TLS handshake failed: %s", error)

    def _end_handshake(self, connection: socket.socket) -> None:
        self._handshake = None
        if self.transport is None:  # it was never set up, and so is never lost
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # asyncio closes it in its own time
            self._leave()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # a head that came ahead of this may begin the next request here
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._cancel_deadline()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading(_num_unread(self.transport))

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def abort(self) -> None:
        """Closes at once, whatever is still to be sent."""
        self._is_aborted = True
        self._all.idle.pop(self, None)
        if self.transport is not None:
            self.transport.abort()
        elif self._handshake is not None:
            self._handshake.cancel()

    def _leave(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._all.leave(self)

    @property
    def _is_under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self) -> None:
        """Called after anything that may have begun or ended a request."""
        if self.transport.is_closing() or self._is_under_way:
            self._all.idle.pop(self, None)
            self._cancel_deadline()
            return
        self._all.idle.setdefault(self)
        if self._deadline is None and self.timeout_keep_alive_task is None:
            self._expect_head()

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(self._limits.head_timeout, self._give_up_head)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up_head(self) -> None:
        self._deadline = None
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._answer_timeout()
        self.transport.close()
        # A peer that reads nothing would block even closing.
        self.loop.call_later(self._limits.head_timeout, self.transport.abort)

    def _answer_timeout(self) -> None:
        seconds = self._limits.head_timeout
        error = ApiError(408, f"the request's head was not complete within {seconds:g} s", code="head_timeout", type="timeout")
        body = json.dumps(error.body()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (
            h11.Response(status_code=408, headers=headers, reason=STATUS_PHRASES[408]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")

    def _expect_reading(self, num_unsent: int) -> None:
        self._write_deadline = self.loop.call_later(self._limits.write_timeout, self._check_reading, num_unsent)

    def _check_reading(self, num_unsent: int) -> None:
        """A slow client is waited for; one that took not a byte counts as lost."""
        left = _num_unread(self.transport)
        if left < num_unsent:
            self._expect_reading(left)
        else:
            logger.info("a client read nothing for %g s: its connection is closed", self._limits.write_timeout)
            self.transport.abort()


def _num_unread(transport: asyncio.WriteTransport) -> int:
    """Bytes that the peer's system has not taken: those here, and those in the kernel, where it can be asked."""
    unsent = array("i", [0])
    try:
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, unsent)
    except OSError:
        unsent[0] = 0
    return transport.get_write_buffer_size() + unsent[0]


def timely(receive: Receive, seconds: float) -> Receive:
    """The same until the body has ended. Raises `ApiError` 408 where it isn't complete within `seconds`, and as many
    more as what has arrived takes at MIN_BODY_RATE. Time in which the handler is busy and reads nothing doesn't count.
    Waits for a disconnect are unlimited."""
    waited = 0.0
    num_bytes = 0
    is_complete = False

    async def receive_in_time() -> Message:
        nonlocal waited, num_bytes, is_complete
        if is_complete:
            return await receive()
        start = time.monotonic()
        try:
            async with asyncio.timeout(seconds + num_bytes / MIN_BODY_RATE - waited):
                message = await receive()
        except TimeoutError:
            text = f"the request's body was not complete within {seconds:g} s: {num_bytes} bytes came; send it without a pause"
            raise ApiError(408, text, code="body_timeout", type="timeout", headers={"Connection": "close"}) from None
        waited += time.monotonic() - start
        num_bytes += len(message.get("body", b""))
        is_complete = not message.get("more_body", False)
        return message

    return receive_in_time


def raise_file_limit(max_connections: int) -> None:
    """Raises the limit of descriptors for as many connections: systems begin with 1,024 a process and allow more on
    request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "max_connections is %d, but this process may open %d files: raise its limit, or lower the setting", max_connections, hard
        )


def _probe_silent_peers(transport: asyncio.BaseTransport) -> None:
    """A client whose machine is lost sends no goodbye: without probes its request would run to its end for nobody."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), KEEPALIVE, strict=True):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
