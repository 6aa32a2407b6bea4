"""Pages over TCP: whatever comes over the wire, a page is whole or it is not there, and nobody waits for ever."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.kv_transfer import page_wire
from jaxinfer.kv_transfer.array_transfer import ArrayTransfer
from jaxinfer.kv_transfer.kv_receiver import KVReceiver
from jaxinfer.kv_transfer.kv_sender import LEASE_SECONDS, KVSender
from jaxinfer.kv_transfer.page_client import PageAddress, PageClient
from jaxinfer.kv_transfer.page_coding import LinkCoding, PageCoder
from jaxinfer.kv_transfer.page_server import PageServer
from jaxinfer.kv_transfer.transport_choice import ArrayError, Arrays, TransportChoice

SPEC = PageSpec(num_layers=2, num_kv_heads=2, head_size=16, page_size=8, bytes_per_value=4)
ID = b"0123456789abcdef"
NUM_PAGES = 70  # more than two pulls


def pages(number: int = NUM_PAGES) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((number, SPEC.page_bytes // 4)).astype(np.float32)


class CountedArrays(ArrayTransfer):
    num_pulls = 0

    def pull(self, host: str, port: int, number: int, shape: tuple[int, int]) -> np.ndarray:
        self.num_pulls += 1
        return super().pull(host, port, number, shape)


@pytest.fixture(scope="module")
def arrays() -> CountedArrays:
    return CountedArrays("127.0.0.1")


@pytest.fixture
def server(arrays: CountedArrays) -> Iterator[PageServer]:
    server = PageServer("127.0.0.1", token="secret", bytes_per_value=SPEC.bytes_per_value, arrays=arrays)
    yield server
    server.close()


def pull(
    port: int,
    places: list[int],
    *,
    handoff_id: bytes = ID,
    token: str = "secret",
    seconds: float = 10.0,
    is_coded: bool = False,
    arrays: Arrays | None = None,
    choice: TransportChoice | None = None,
) -> KVReceiver:
    """All that arrives until it is complete or has failed."""
    coding = LinkCoding("on", SPEC.bytes_per_value) if is_coded else None
    client = PageClient(token=token, seconds=seconds, coding=coding, arrays=arrays, choice=choice or TransportChoice("jax"))
    receiver = KVReceiver(lambda receiver, wanted: client.pull(PageAddress("127.0.0.1", port, handoff_id), receiver, wanted), SPEC)
    receiver.want(places)
    deadline = time.monotonic() + 30.0
    while receiver.failure is None and receiver.num_arrived < len(places):
        assert time.monotonic() < deadline
        receiver.changed.wait(0.01)
    assert (client.num_wire_bytes < client.num_bytes) == (is_coded and receiver.num_arrived > 0)
    return receiver


def wait_until_empty(server: PageServer) -> None:
    deadline = time.monotonic() + 10.0
    while server.num_senders:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["as they are", "coded", "as arrays"])
def test_pages_come_in_order_as_they_are_added_and_go_when_all_are_there(server: PageServer, way: str, arrays: CountedArrays) -> None:
    sender, sent = KVSender(), pages()
    server.add(ID, sender)
    places = list(range(3, 3 + 2 * NUM_PAGES, 2))

    def add() -> None:
        for start in range(0, NUM_PAGES, 16):
            time.sleep(0.01)
            sender.add(places[start : start + 16], np.concatenate([sent[start : start + 16], sent[:2]]))  # padding after them
        sender.finish()

    threading.Thread(target=add).start()
    receiver = pull(server.port, places, is_coded=way == "coded", arrays=arrays if way == "as arrays" else None)
    assert receiver.failure is None
    np.testing.assert_array_equal(receiver.pages.view(np.float32), sent)
    assert (arrays.num_pulls > 0) == (way == "as arrays")
    wait_until_empty(server)


def test_what_will_not_come_is_told(server: PageServer) -> None:
    assert "wrong token" in str(pull(server.port, [0], token="guessed").failure)
    assert "no such hand-off" in str(pull(server.port, [0]).failure)
    short, given_up = bytes(16), bytes(range(16))  # ids of their own: who gave up says so after it has failed
    sender = KVSender()
    server.add(short, sender)
    sender.add([0], pages(1))
    sender.finish()
    receiver = pull(server.port, [0, 1], handoff_id=short)
    assert (receiver.num_arrived, "there is no page 1" in str(receiver.failure)) == (1, True)
    wait_until_empty(server)
    sender = KVSender()
    server.add(given_up, sender)
    sender.fail("the prefill worker gave the request up")
    assert "gave the request up" in str(pull(server.port, [0], handoff_id=given_up).failure)


def test_a_lease_that_runs_out_lets_go_of_the_pages(server: PageServer) -> None:
    now = [0.0]
    sender = KVSender(clock=lambda: now[0])
    sender.add([0], pages(1))
    sender.finish()
    server.add(ID, sender)
    now[0] = LEASE_SECONDS - 1.0
    assert pull(server.port, []).failure is None  # an empty pull: the hand-off is over
    server.add(ID, sender)
    now[0] = 3 * LEASE_SECONDS
    wait_until_empty(server)


def respond(answer: Callable[[socket.socket], None]) -> int:
    """A server of one connection, which greets as it should."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listener.accept()
        with connection, listener:
            page_wire.read_greeting(connection)
            connection.sendall(page_wire.greeting(b""))
            answer(connection)

    threading.Thread(target=run, daemon=True).start()
    return int(listener.getsockname()[1])


PAGE = pages(1).view(np.uint8)[0]


def framed(place: int = 0, page: np.ndarray = PAGE) -> bytes:
    return page_wire.page_header(place, page.data) + page.tobytes()


def coded(place: int = 0, page: np.ndarray = PAGE) -> bytes:
    body = b"".join(PageCoder(SPEC.bytes_per_value).encode(page))
    return page_wire.coded_header(place, page.data, len(body)) + body


def flipped(at: int, message: bytes = framed()) -> bytes:
    data = bytearray(message)
    data[at] ^= 0x10
    return bytes(data)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        framed()[:-1],
        framed()[:5],
        framed(1),
        framed(0, PAGE[:-4]),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        *(flipped(at) for at in (0, 2, 6, 10, 13, len(framed()) // 2, len(framed()) - 1)),
        coded()[:-1],
        page_wire.coded_header(0, PAGE.data, len(PAGE)) + PAGE.tobytes(),
        page_wire.coded_header(0, PAGE.data, 64) + PAGE[:64].tobytes(),
        *(flipped(at, coded()) for at in (6, 10, 13, len(coded()) // 2, len(coded()) - 1)),
    ],
    ids=["nothing", "cut off", "half a header", "another place", "another size", "HTTP"]
    + list(map(str, range(7)))
    + ["code cut off", "code of a page's size", "no code"]
    + [f"code {number}" for number in range(5)],
)
def test_damage_is_never_a_page(answer: bytes) -> None:
    """Cut off, of another place or size, garbage, a bit flipped in the header and in the page, or in its code."""
    receiver = pull(respond(lambda connection: connection.sendall(answer)), [0], seconds=2.0, is_coded=True)
    assert (receiver.num_arrived, bool(receiver.failure)) == (0, True)


@pytest.mark.parametrize("answers", [(0, 0), (0, 2), (0, 1, 1)], ids=["replayed", "reordered", "replayed later"])
def test_each_page_comes_once_and_in_its_place(answers: tuple[int, ...]) -> None:
    receiver = pull(respond(lambda connection: connection.sendall(b"".join(map(framed, answers)))), [0, 1, 2], seconds=2.0)
    assert (receiver.num_arrived, bool(receiver.failure)) == (len(answers) - 1, True)


def test_a_code_that_was_not_asked_for_is_no_page() -> None:
    receiver = pull(respond(lambda connection: connection.sendall(coded())), [0], seconds=2.0)
    assert (receiver.num_arrived, "kind 3" in str(receiver.failure)) == (0, True)


def test_a_server_that_says_nothing_is_given_up() -> None:
    receiver = pull(respond(lambda connection: time.sleep(3.0)), [0], seconds=0.2)
    assert (receiver.num_arrived, bool(receiver.failure)) == (0, True)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, page_wire.HELLO.pack(b"JXKV", 9, 0), b"JX"],
    ids=["HTTP", "zeros", "another version", "cut off"],
)
def test_garbage_from_a_client_costs_it_its_connection(server: PageServer, garbage: bytes) -> None:
    sender = KVSender()
    sender.add([0], pages(1))
    sender.finish()
    server.add(ID, sender)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(10.0)
        with suppress(OSError):  # it may not even read all of it
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            assert connection.recv(100) == b""
    np.testing.assert_array_equal(pull(server.port, [0]).pages[0], PAGE)


class StubArrays:
    """Stands for `ArrayTransfer`: what is pulled never comes, or comes damaged."""

    port = 1

    def __init__(self, *, is_damaged: bool = False) -> None:
        self.num_pulls, self._is_damaged = 0, is_damaged

    def offer(self, pages: np.ndarray) -> tuple[int, object]:
        return 1, pages

    def pull(self, host: str, port: int, number: int, shape: tuple[int, int]) -> np.ndarray:
        self.num_pulls += 1
        if self._is_damaged:
            return np.zeros(shape, np.uint8)
        raise ArrayError("it did not come in time")


def serve_arrays(arrays: Arrays | None) -> tuple[PageServer, KVSender]:
    """With all pages there."""
    server, sender = PageServer("127.0.0.1", token="secret", arrays=arrays), KVSender()
    sender.add(range(NUM_PAGES), pages())
    sender.finish()
    server.add(ID, sender)
    return server, sender


def test_arrays_that_do_not_come_are_replaced_by_the_socket_for_good() -> None:
    arrays, choice = StubArrays(), TransportChoice("jax")
    for _ in range(2):
        server, _ = serve_arrays(arrays)
        receiver = pull(server.port, list(range(NUM_PAGES)), arrays=arrays, choice=choice)
        np.testing.assert_array_equal(receiver.pages.view(np.float32), pages())
        server.close()
    assert arrays.num_pulls == 1


def test_a_worker_without_arrays_sends_pages_one_by_one() -> None:
    server, _ = serve_arrays(None)
    receiver = pull(server.port, list(range(NUM_PAGES)), arrays=(arrays := StubArrays()))
    np.testing.assert_array_equal(receiver.pages.view(np.float32), pages())
    assert arrays.num_pulls == 0
    server.close()


def test_a_damaged_array_is_no_page() -> None:
    server, _ = serve_arrays(arrays := StubArrays(is_damaged=True))
    receiver = pull(server.port, [0, 1], arrays=arrays)
    assert (receiver.num_arrived, "checksum" in str(receiver.failure)) == (0, True)
    server.close()


def test_an_array_that_nobody_offers_does_not_come_within_the_deadline() -> None:
    arrays, began = ArrayTransfer("127.0.0.1", seconds=0.2), time.monotonic()
    for port in (arrays.port, 1):
        with pytest.raises(ArrayError, match=r"within 0\.2 s"):
            arrays.pull("127.0.0.1", port, 1, (1, 16))
    assert time.monotonic() - began < 5.0


def test_auto_takes_the_way_that_was_quicker_lately() -> None:
    choice, now = TransportChoice("auto"), 0.0
    found = [choice.takes_arrays("a", now)]  # the socket first, then arrays
    choice.observe("a", 10**9, 1.0, now, is_array=False)
    found.append(choice.takes_arrays("a", now))
    choice.observe("a", 10**9, 2.0, now, is_array=True)
    found.append(choice.takes_arrays("a", now))
    choice.observe("a", 10**10, 1.0, now, is_array=True)
    found.append(choice.takes_arrays("a", now))
    choice.has_failed("a")
    found.append(choice.takes_arrays("a", now))
    assert found == [False, True, False, True, False]
    assert (TransportChoice("jax").takes_arrays("a", now), TransportChoice("socket").takes_arrays("a", now)) == (True, False)
