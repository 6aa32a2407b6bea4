"""PageClient: pulls a hand-off's pages over TCP, straight into a receiver's buffer. Imports no JAX."""

from __future__ import annotations

import logging
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from jaxinfer.kv_transfer import page_wire
from jaxinfer.kv_transfer.handoff import HandOffError
from jaxinfer.kv_transfer.kv_receiver import KVReceiver
from jaxinfer.kv_transfer.page_coding import LinkCoding, PageCoder
from jaxinfer.kv_transfer.transport_choice import ArrayError, Arrays, TransportChoice

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_PULLED_AT_ONCE = 32  # pages of a command
_UNDER_WAY = 2  # commands


@dataclass(frozen=True)
class PageAddress:
    """Where a hand-off's pages are."""

    host: str
    port: int
    handoff_id: bytes


class PageClient:
    """Keeps the connections that nobody uses for the next hand-off from the same place. `seconds`: how long a page may
    take, computing it included. `coding`: which pages are asked for coded; without it none. `arrays`: by what pages are
    pulled as arrays, from where `choice` says so; without it none are."""

    def __init__(
        self,
        *,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        seconds: float = 120.0,
        coding: LinkCoding | None = None,
        arrays: Arrays | None = None,
        choice: TransportChoice | None = None,
    ) -> None:
        self._arrays, self._choice = arrays, choice or TransportChoice("socket")
        self._token, self._tls, self._seconds, self._coding = token.encode(), tls, seconds, coding
        self._idle: dict[tuple[str, int], list[socket.socket]] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0  # of pages, pulled so far
        self.num_wire_bytes = 0  # that these were on the wire
        self.receive_seconds = 0.0  # that they took from their first byte on

    def pull(self, address: PageAddress, receiver: KVReceiver, places: Sequence[int]) -> None:
        """Begin, in a thread. The receiver is told of each page that has arrived whole, or that no more will. Once all
        have, the source may let go of its own."""
        threading.Thread(target=self._pull, args=(address, receiver, list(places)), name="pull pages", daemon=True).start()

    def fetch(self, host: str, port: int, model: bytes, digests: Sequence[bytes], out: np.ndarray, seconds: float) -> int:
        """Copy pages that an engine of this model has in its caches into uint8[len(digests), bytes of a page], in the
        caller's thread; returns how many came, from the first on. No page may take longer than `seconds`."""
        address, num_fetched = PageAddress(host, port, model), 0
        connection, coder = None, self._coder(host)
        try:
            connection = self._connection(address)
            connection.settimeout(seconds)
            for start in range(0, len(digests), page_wire.MOST_PLACES):
                some = digests[start : start + page_wire.MOST_PLACES]
                command = page_wire.COMMAND.pack(page_wire.FETCH | (0 if coder is None else page_wire.MAY_CODE), model)
                connection.sendall(command + page_wire.COUNT.pack(len(some)) + b"".join(some))
                for number in range(len(some)):
                    num_fetched += self._receive(connection, host, [number], out[num_fetched : num_fetched + 1], coder)
            self._keep(address, connection)
        except (OSError, HandOffError) as error:
            logger.info("of %d pages at %s:%d %d came: %s", len(digests), host, port, num_fetched, error)
            if connection is not None:
                connection.close()
        return num_fetched

    @property
    def bytes_per_second(self) -> float:
        """Measured; 0 before the first page."""
        return self.num_bytes / self.receive_seconds if self.receive_seconds else 0.0

    def close(self) -> None:
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _pull(self, address: PageAddress, receiver: KVReceiver, places: list[int]) -> None:
        connection = None
        try:
            connection = self._connection(address)
            if self._arrays is not None and self._choice.takes_arrays(address.host, time.monotonic()):
                try:
                    self._fill(connection, address, receiver, places, self._arrays)
                except ArrayError as error:
                    logger.warning("pages from %s come over the socket from now on: %s", address.host, error)
                    self._choice.has_failed(address.host)
                    connection.close()  # which may say more of arrays
                    connection = self._connection(address)
            self._fill(connection, address, receiver, places, None)
            connection.sendall(page_wire.COMMAND.pack(page_wire.OVER, address.handoff_id))
            self._keep(address, connection)
        except Exception as error:  # whatever it is, who waits must not wait for ever
            if connection is not None:
                connection.close()
            receiver.fail(f"the pages did not come: {error or type(error).__name__}")
            self._release(address)

    def _release(self, address: PageAddress) -> None:
        """Tell the source that nobody will come for the rest; if it can't be told, its lease runs out."""
        with suppress(OSError, HandOffError), self._connection(address) as connection:
            connection.sendall(page_wire.COMMAND.pack(page_wire.OVER, address.handoff_id))

    def _fill(
        self, connection: socket.socket, address: PageAddress, receiver: KVReceiver, places: list[int], arrays: Arrays | None
    ) -> None:
        """What the receiver does not have yet; by arrays if they are given and the other side has them too."""
        done = begun = receiver.num_arrived
        coder = None if arrays is not None else self._coder(address.host)
        flags = page_wire.MAY_ARRAY if arrays is not None else page_wire.MAY_CODE if coder is not None else 0
        asked = deque(places[start : start + _PULLED_AT_ONCE] for start in range(done, len(places), _PULLED_AT_ONCE))
        for _ in range(min(_UNDER_WAY, len(asked))):
            self._ask(connection, address, asked.popleft(), flags)
        while done < len(places):
            if receiver.is_over:
                raise HandOffError("nobody waits for the pages any more")
            few = done + _PULLED_AT_ONCE
            done += self._receive(connection, address.host, places[done:few], receiver.pages[done:few], coder, arrays, address.handoff_id)
            receiver.arrived(done)
            if (done - begun) % _PULLED_AT_ONCE == 0 and asked:
                self._ask(connection, address, asked.popleft(), flags)

    def _coder(self, host: str) -> PageCoder | None:
        return None if self._coding is None else self._coding.coder(host, time.monotonic())

    def _receive(
        self,
        connection: socket.socket,
        host: str,
        places: Sequence[int],
        pages: np.ndarray,
        coder: PageCoder | None,
        arrays: Arrays | None = None,
        handoff_id: bytes = b"",
    ) -> int:
        """The first of these pages, or more of them; returns how many."""

        def pull_array(number: int, port: int, shape: tuple[int, int]) -> np.ndarray:
            assert arrays is not None
            pulled = arrays.pull(host, port, number, shape)
            connection.sendall(page_wire.COMMAND.pack(page_wire.TAKEN, handoff_id))
            return pulled

        receipt = page_wire.receive_pages(connection, places, pages, coder, None if arrays is None else pull_array)
        now, is_array = time.monotonic(), arrays is not None
        self.receive_seconds += receipt.seconds
        self.num_bytes += pages[: receipt.num_pages].nbytes
        self.num_wire_bytes += receipt.num_bytes
        self._choice.observe(host, receipt.num_bytes, receipt.seconds, now, is_array=is_array)
        if self._coding is not None and not is_array:
            self._coding.observe(host, receipt.num_bytes, receipt.wire_seconds, now)
        return receipt.num_pages

    @staticmethod
    def _ask(connection: socket.socket, address: PageAddress, places: Sequence[int], flags: int) -> None:
        command = page_wire.COMMAND.pack(page_wire.PULL | flags, address.handoff_id)
        connection.sendall(command + page_wire.COUNT.pack(len(places)) + struct.pack(f"<{len(places)}I", *places))

    def _connection(self, address: PageAddress) -> socket.socket:
        """One that nobody uses, or a new one. Raises `HandOffError` where the other side refuses it."""
        with self._lock:
            idle = self._idle.get((address.host, address.port), [])
            while idle:
                connection = idle.pop()
                if _is_open(connection):
                    return connection
                connection.close()
        connection = socket.create_connection((address.host, address.port), _CONNECT_SECONDS)
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=address.host)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(page_wire.greeting(self._token))
            if error := page_wire.read_greeting(connection):
                raise HandOffError(error.decode("utf-8", "replace"))
            connection.settimeout(self._seconds)
        except BaseException:
            connection.close()
            raise
        return connection

    def _keep(self, address: PageAddress, connection: socket.socket) -> None:
        connection.settimeout(self._seconds)
        with self._lock:
            self._idle.setdefault((address.host, address.port), []).append(connection)


def _is_open(connection: socket.socket) -> bool:
    """Whether an idle connection is usable: the other side neither closed it nor said anything."""
    timeout = connection.gettimeout()
    try:
        connection.setblocking(False)
        connection.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False
    finally:
        connection.settimeout(timeout)
    return False
