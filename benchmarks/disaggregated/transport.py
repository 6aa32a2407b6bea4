"""Pages from one process to another on this machine: the engine's two ways, over a plain socket, and by gRPC."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from functools import cache

import grpc
import numpy as np

from benchmarks.worker import ROOT
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.kv_transfer.array_transfer import ArrayTransfer
from jaxinfer.kv_transfer.kv_receiver import KVReceiver
from jaxinfer.kv_transfer.kv_sender import KVSender
from jaxinfer.kv_transfer.page_client import PageAddress, PageClient
from jaxinfer.kv_transfer.page_server import PageServer
from jaxinfer.kv_transfer.transport_choice import TransportChoice

PAGE_BYTES = 2**20
NUM_PAGES = 256
MOST_ROUNDS = 64
_METHOD = "/pages/Pull"


def handoff_id(number: int) -> bytes:
    return number.to_bytes(16, "little")


def serve() -> None:
    """In a process of its own: all ways, until its input ends. Prints its ports."""
    pages = np.random.default_rng(0).integers(0, 256, (NUM_PAGES, PAGE_BYTES), np.uint8)
    server = PageServer("127.0.0.1", arrays=ArrayTransfer("127.0.0.1"))
    for number in range(2 * MOST_ROUNDS):  # each is over once it was pulled
        sender = KVSender()
        sender.add(range(NUM_PAGES), pages)
        sender.finish()
        server.add(handoff_id(number), sender)
    plain = socket.create_server(("127.0.0.1", 0))

    def copy() -> None:
        while True:
            connection, _ = plain.accept()
            with connection:
                for page in pages:
                    connection.sendall(page.data)

    threading.Thread(target=copy, daemon=True).start()

    def pull(request: bytes, context: grpc.ServicerContext) -> object:
        return (page.tobytes() for page in pages)

    handler = grpc.method_handlers_generic_handler("pages", {"Pull": grpc.unary_stream_rpc_method_handler(pull)})
    calls = grpc.server(futures.ThreadPoolExecutor(1), handlers=[handler], options=[("grpc.max_send_message_length", -1)])
    port = calls.add_insecure_port("127.0.0.1:0")
    calls.start()
    print(server.port, server.port, plain.getsockname()[1], port, flush=True)
    sys.stdin.read()


def by_arrays(port: int, number: int) -> float:
    """By `jax.experimental.transfer`."""
    return by_engine(port, MOST_ROUNDS + number, _arrays())


@cache
def _arrays() -> ArrayTransfer:
    return ArrayTransfer("127.0.0.1")


def by_engine(port: int, number: int, arrays: ArrayTransfer | None = None) -> float:
    """Seconds for all pages, with checksums, as decode pulls them."""
    spec = PageSpec(1, 1, PAGE_BYTES // 2, 1, 1)
    assert spec.page_bytes == PAGE_BYTES
    receiver = KVReceiver(lambda receiver, places: None, spec)
    receiver.want(range(NUM_PAGES))
    receiver.pages.fill(0)  # the kernel gives the memory before, as an engine's buffers have it
    client = PageClient(arrays=arrays, choice=TransportChoice("jax"))
    began = time.perf_counter()
    client.pull(PageAddress("127.0.0.1", port, handoff_id(number)), receiver, range(NUM_PAGES))
    while receiver.num_arrived < NUM_PAGES and receiver.failure is None:
        receiver.changed.wait()
        receiver.changed.clear()
    seconds = time.perf_counter() - began
    client.close()
    if receiver.failure is not None:
        raise RuntimeError(receiver.failure)
    return seconds


def by_socket(port: int, number: int) -> float:
    """The same bytes by `recv_into` alone."""
    buffer = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        began = time.perf_counter()
        for page in buffer:
            rest = page.data
            while rest:
                rest = rest[connection.recv_into(rest) :]
        return time.perf_counter() - began


def by_grpc(port: int, number: int) -> float:
    """The same bytes as messages, each copied to where it belongs."""
    buffer = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]) as channel:
        pull = channel.unary_stream(_METHOD)
        grpc.channel_ready_future(channel).result(10)
        began = time.perf_counter()
        for row, page in enumerate(pull(b"")):
            buffer[row] = np.frombuffer(page, np.uint8)
        return time.perf_counter() - began


def compare(rounds: int) -> str:
    """GB/s of each, alternately, and the medians' ratios to the plain socket."""
    server = subprocess.Popen([sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    ports = list(map(int, server.stdout.readline().split()))
    ways: dict[str, Callable[[int, int], float]] = {
        "socket (jaxinfer)": by_engine,
        "jax (jaxinfer)": by_arrays,
        "plain socket copy": by_socket,
        "gRPC": by_grpc,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for number in range(rounds + 1):
            for (name, pull), port in zip(ways.items(), ports, strict=True):
                rate = NUM_PAGES * PAGE_BYTES / pull(port, number) / 1e9
                if number:  # the first warms up
                    rates[name].append(rate)
    finally:
        server.kill()
    plain = rates["plain socket copy"]
    lines = []
    for name, found in rates.items():
        ratio = statistics.median(one / other for one, other in zip(found, plain, strict=True))
        lines.append(
            f"{name:20}{statistics.median(found):7.2f} GB/s{ratio:8.2f} of the plain socket ({min(found):.2f} to {max(found):.2f} GB/s)"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    serve()
