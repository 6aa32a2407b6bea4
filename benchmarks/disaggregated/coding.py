"""What coding pages of the default model gains: bytes, the coder's speed, and the time over links of several speeds."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import ml_dtypes
import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.kv_transfer.kv_receiver import KVReceiver
from jaxinfer.kv_transfer.kv_sender import KVSender
from jaxinfer.kv_transfer.page_client import PageAddress, PageClient
from jaxinfer.kv_transfer.page_coding import Compression, LinkCoding, PageCoder
from jaxinfer.kv_transfer.page_server import PageServer

NUM_TOKENS = 512
_PIECE = 16 << 10  # bytes that the slow link passes on at once


def pages_of_a_text() -> tuple[PageSpec, np.ndarray]:
    """The pages of a prompt of text, uint8[pages, bytes of a page], in float32."""
    with LLM(dtype="float32", kv_peers=True, max_model_len=2 * NUM_TOKENS, prefill_buckets=(256,), max_batch_size=1) as llm:
        text = " ".join(f"In year {year} the town had {year * 7 % 911} houses, and {year * 3 % 97} wells." for year in range(1800, 2000))
        prompt, engine, sender = llm.tokenizer.encode(text)[:NUM_TOKENS], llm.engine, KVSender()
        engine.add_request("pages", prompt, SamplingParams(max_tokens=1, temperature=0.0), remote=sender)
        while engine.has_work:
            engine.step()
        spec = engine.page_spec
        return spec, np.stack([sender.page(place, 10.0) for place in range(len(prompt) // spec.page_size)])


class SlowLink:
    """Passes bytes from a port on to the client, so many a second."""

    def __init__(self, port: int, bytes_per_second: float) -> None:
        self._target, self._rate = port, bytes_per_second
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._copy, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._copy, args=(far, near, self._rate), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket, rate: float | None) -> None:
        due = time.perf_counter()
        with suppress(OSError):
            while data := source.recv(_PIECE):
                if rate is not None:
                    due = max(due, time.perf_counter()) + len(data) / rate
                    time.sleep(max(0.0, due - time.perf_counter()))
                sink.sendall(data)


def _pull(spec: PageSpec, pages: np.ndarray, server: PageServer, client: PageClient, port: int, number: int) -> float:
    """Seconds for all pages."""
    sender, name = KVSender(), number.to_bytes(16, "little")
    sender.add(range(len(pages)), pages)
    sender.finish()
    server.add(name, sender)
    receiver = KVReceiver(lambda receiver, places: client.pull(PageAddress("127.0.0.1", port, name), receiver, places), spec)
    began = time.perf_counter()
    receiver.want(range(len(pages)))
    while receiver.num_arrived < len(pages) and receiver.failure is None:
        receiver.changed.wait()
        receiver.changed.clear()
    if receiver.failure is not None:
        raise RuntimeError(receiver.failure)
    assert np.array_equal(receiver.pages, pages)
    return time.perf_counter() - began


def _seconds(spec: PageSpec, pages: np.ndarray, link_rate: float, rounds: int) -> dict[Compression, float]:
    """Medians, each way in turn."""
    ways: tuple[Compression, ...] = ("off", "on", "auto")
    server = PageServer("127.0.0.1", bytes_per_value=spec.bytes_per_value)
    clients = {way: PageClient(coding=LinkCoding(way, spec.bytes_per_value)) for way in ways}
    port = SlowLink(server.port, link_rate).port if link_rate else server.port
    found: dict[Compression, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for place, (way, client) in enumerate(clients.items()):
            seconds = _pull(spec, pages, server, client, port, len(ways) * number + place)
            if number:  # the first measures the link
                found[way].append(seconds)
    for client in clients.values():
        client.close()
    server.close()
    return {way: statistics.median(seconds) for way, seconds in found.items()}


def compare(rates: Sequence[float], rounds: int) -> str:
    """A row a type of value and link; `rates`: bytes a second, 0: loopback as it is."""
    lines = []
    full_spec, full_pages = pages_of_a_text()
    # On a CPU pages are float32. A GPU's are bfloat16: these are the same values rounded.
    half_pages = full_pages.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint8)
    for dtype, spec, pages in (("bfloat16", replace(full_spec, bytes_per_value=2), half_pages), ("float32", full_spec, full_pages)):
        coder = PageCoder(spec.bytes_per_value)
        began = time.perf_counter()
        coded = [b"".join(coder.encode(page)) for page in pages]
        encoded_at, found = time.perf_counter(), np.empty_like(pages[0])
        for code in coded:
            coder.decode(memoryview(code), found)
        decoded_at = time.perf_counter()
        lines.append(
            f"{dtype}: {len(pages)} pages of {spec.page_bytes:,} bytes become {sum(map(len, coded)) / pages.nbytes:.2f} of it; "
            f"{pages.nbytes / (encoded_at - began) / 1e6:,.0f} MB/s coded, {pages.nbytes / (decoded_at - encoded_at) / 1e6:,.0f} decoded"
        )
        for rate in rates:
            name = f"{rate / 1e6:,.0f} MB/s" if rate else "loopback"
            off, on, auto = _seconds(spec, pages, rate, rounds).values()
            lines.append(
                f"  {name:>10}: as they are {off * 1e3:6.0f} ms, coded {on * 1e3:6.0f} ({on / off:.2f}), auto {auto * 1e3:6.0f} ({auto / off:.2f})"
            )
    return "\n".join(lines)
