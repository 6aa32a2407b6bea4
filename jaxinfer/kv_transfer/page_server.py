"""PageServer: other engines pull over TCP what this one has prefilled. Imports no JAX."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np

from jaxinfer.kv_transfer import page_wire
from jaxinfer.kv_transfer.handoff import HandOffError
from jaxinfer.kv_transfer.kv_sender import KVSender
from jaxinfer.kv_transfer.page_coding import CODED_SIZES, PageCoder
from jaxinfer.kv_transfer.transport_choice import ArrayError, Arrays

logger = logging.getLogger(__name__)

PAGE_SECONDS = 120.0  # that a pull waits for a page to be computed
_HELLO_SECONDS = 10.0  # from a connection to its first words
_SWEEP_SECONDS = 1.0


class CachedSource(Protocol):
    """What an engine's caches have. `model`: 16 bytes that name what its pages mean besides tokens."""

    model: bytes

    def read(self, keys: Sequence[bytes]) -> Iterator[np.ndarray]:
        """Pages by digest, uint8[bytes of a page], up to the first one that is missing. Any thread may call."""
        ...


class PageServer:
    """Serves from threads of its own until `close`. `token`: what a client has to know; `tls`: of the server's side;
    `cached`: what caches have, for who asks by digest; `bytes_per_value`: of pages, 0 if they are never coded;
    `arrays`: for who takes pages that way, None if nobody may.

    Raises `OSError` for an address that can't be listened on."""

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        cached: CachedSource | None = None,
        bytes_per_value: int = 0,
        arrays: Arrays | None = None,
    ) -> None:
        self._bytes_per_value, self._arrays = bytes_per_value, arrays
        self._token, self._tls, self._cached = token.encode(), tls, cached
        self._listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._senders: dict[bytes, KVSender] = {}  # by the hand-off's id
        self._connections: set[socket.socket] = set()
        self._closed = threading.Event()
        for target in (self._accept, self._sweep):
            threading.Thread(target=target, name="page-server", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def num_senders(self) -> int:
        """Hand-offs whose pages are kept here."""
        return len(self._senders)

    def add(self, handoff_id: bytes, sender: KVSender) -> None:
        """Serve a sender's pages under this id, until it is over or its lease runs out."""
        self._senders[handoff_id] = sender

    def remove(self, handoff_id: bytes) -> None:
        """Let go of a hand-off's pages; of no effect for one that is gone."""
        if (sender := self._senders.pop(handoff_id, None)) is not None:
            sender.close()

    def close(self) -> None:
        """End all connections and let go of all pages."""
        self._closed.set()
        for connection in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for handoff_id in list(self._senders):
            self.remove(handoff_id)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection, peer), name=f"pages to {peer[0]}", daemon=True).start()

    def _sweep(self) -> None:
        """Let go of what nobody has asked for within its lease."""
        while not self._closed.wait(_SWEEP_SECONDS):
            for handoff_id, sender in list(self._senders.items()):
                if sender.is_expired:
                    logger.warning("a hand-off's lease ran out: its pages are let go")
                    self.remove(handoff_id)

    def _serve(self, connection: socket.socket, peer: Sequence[object]) -> None:
        try:
            connection.settimeout(_HELLO_SECONDS)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(page_wire.read_greeting(connection), self._token):
                connection.sendall(page_wire.greeting(b"wrong token: give both workers the same"))
                return
            connection.sendall(page_wire.greeting(b""))
            connection.settimeout(PAGE_SECONDS)
            self._connections.add(connection)
            coder = PageCoder(self._bytes_per_value) if self._bytes_per_value in CODED_SIZES else None
            offered: deque[object] = deque()  # arrays that were not pulled yet
            while True:
                self._answer(connection, coder, offered)
        except (OSError, HandOffError) as error:
            if not self._closed.is_set():
                logger.debug("pages to %s: %s", peer, error)
        finally:
            self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, coder: PageCoder | None, offered: deque[object]) -> None:
        command, handoff_id = page_wire.COMMAND.unpack(page_wire.read(connection, page_wire.COMMAND.size))
        kind, coder = command & ~(page_wire.MAY_CODE | page_wire.MAY_ARRAY), coder if command & page_wire.MAY_CODE else None
        sender = self._senders.get(handoff_id)
        if sender is not None:
            sender.renew()
        if kind == page_wire.OVER:
            self.remove(handoff_id)
        elif kind == page_wire.PULL:
            (count,) = page_wire.COUNT.unpack(page_wire.read(connection, page_wire.COUNT.size))
            if count > page_wire.MOST_PLACES:
                raise page_wire.WireError(f"a pull of {count} pages: at most {page_wire.MOST_PLACES}")
            places = memoryview(page_wire.read(connection, 4 * count)).cast("I")
            self._send(connection, sender, places, coder, offered if command & page_wire.MAY_ARRAY else None)
        elif kind == page_wire.TAKEN:
            if offered:
                offered.popleft()
        elif kind == page_wire.FETCH:
            (count,) = page_wire.COUNT.unpack(page_wire.read(connection, page_wire.COUNT.size))
            if count > page_wire.MOST_PLACES:
                raise page_wire.WireError(f"a fetch of {count} pages: at most {page_wire.MOST_PLACES}")
            size = page_wire.DIGEST_BYTES
            digests = page_wire.read(connection, count * size)
            self._send_cached(connection, handoff_id, [digests[at : at + size] for at in range(0, len(digests), size)], coder)
        else:
            raise page_wire.WireError(f"there is no command {kind}")

    def _send(
        self,
        connection: socket.socket,
        sender: KVSender | None,
        places: Sequence[int],
        coder: PageCoder | None,
        offered: deque[object] | None,
    ) -> None:
        try:
            if sender is None:
                raise HandOffError("there is no such hand-off: it is over, or its lease ran out")
            if offered is not None and self._arrays is not None:
                places = places[self._offer(connection, sender, places, self._arrays, offered) :]
            for place in places:
                _send_page(connection, place, sender.page(place, PAGE_SECONDS), coder)
                sender.renew()
        except HandOffError as error:
            _send_failure(connection, str(error))

    @staticmethod
    def _offer(connection: socket.socket, sender: KVSender, places: Sequence[int], arrays: Arrays, offered: deque[object]) -> int:
        """As arrays, each of the pages that are there when its first one is; returns how many pages that were: all, or
        those before arrays failed."""
        done = 0
        while done < len(places):
            first = sender.page(places[done], PAGE_SECONDS)
            more = takewhile(sender.is_here, places[done + 1 :])
            pages = np.stack([first, *(sender.page(place, PAGE_SECONDS) for place in more)])
            try:
                number, array = arrays.offer(pages)
            except ArrayError as error:
                logger.warning("%s: pages go over the socket", error)
                break
            offered.append(array)
            connection.sendall(page_wire.array_header(places[done], pages, number, arrays.port))
            sender.renew()
            done += len(pages)
        return done

    def _send_cached(self, connection: socket.socket, model: bytes, digests: Sequence[bytes], coder: PageCoder | None) -> None:
        cached, number = self._cached, 0
        if cached is None or model != cached.model:
            _send_failure(connection, "this engine has another model" if cached else "this engine has no cache for others")
            return
        for number, page in enumerate(cached.read(digests), 1):
            _send_page(connection, number - 1, page, coder)
        if number < len(digests):
            _send_failure(connection, "the next page is not here any more")


def _send_failure(connection: socket.socket, text: str) -> None:
    reason = text.encode()[:1000]
    connection.sendall(page_wire.FAILED_HEADER.pack(page_wire.FAILED, len(reason)) + reason)


def _send_page(connection: socket.socket, place: int, page: np.ndarray, coder: PageCoder | None) -> None:
    """As it is, unless it may be coded and is shorter so."""
    if coder is not None:
        planes, exponents = coder.encode(page)
        if (length := len(planes) + len(exponents)) < page.nbytes:
            connection.sendall(b"".join((page_wire.coded_header(place, page.data, length), planes, exponents)))
            return
    _send_all(connection, page_wire.page_header(place, page.data), page.data)


def _send_all(connection: socket.socket, header: bytes, page: memoryview) -> None:
    """In one call where the socket has room for all."""
    if isinstance(connection, ssl.SSLSocket):  # which has no sendmsg
        connection.sendall(header)
        connection.sendall(page)
        return
    sent = connection.sendmsg([header, page])
    if sent < len(header):
        connection.sendall(header[sent:])
        sent = len(header)
    if sent < len(header) + len(page):
        connection.sendall(page[sent - len(header) :])
