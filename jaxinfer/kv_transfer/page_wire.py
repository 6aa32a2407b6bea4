"""What page server and page client say to each other over a stream of bytes. Imports no JAX.

    client, once:   magic "JXKV" | version, uint16 | length of the token, uint16 | token
    server, once:   magic "JXKV" | version, uint16 | length of an error, uint16 | error, or nothing
    client, pull:   1 | id, 16 bytes | count, uint32 | places in the page table, uint32 each
    client, over:   2 | id
    client, fetch:  3 | digest of the model | count, uint32 | digests of blocks, 16 bytes each; of what caches have
    client, taken:  4 | id; an array has been pulled
    pull and fetch: plus 128 where the page's bytes may come coded (see `page_coding`)
    pull:           plus 64 where pages may come as arrays (see `array_transfer`)
    server, page:   1 | place, uint32 | checksum, uint64 | length, uint32 | bytes; one for each place, in order; the
                    place of a block that was fetched is its number
    server, coded:  3 | as a page; the checksum is of the page, length and bytes are of its code
    server, array:  4 | first place, uint32 | count, uint32 | number, uint64 | port, uint16 | checksums, uint64 each; of
                    so many pages asked for, which wait as an array of that number at that port
    server, failed: 2 | length of the reason, uint32 | reason; instead of what is left

All integers are little-endian. A client has two pulls under way, of which the server answers one: so the client's
memory bounds what is on its way.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from jaxinfer.kv_transfer.handoff import HandOffError
from jaxinfer.kv_transfer.page_coding import PageCoder

MAGIC, VERSION = b"JXKV", 6
PULL, OVER, FETCH, TAKEN, MAY_ARRAY, MAY_CODE = 1, 2, 3, 4, 64, 128
PAGE, FAILED, CODED, ARRAY = 1, 2, 3, 4
HELLO = struct.Struct("<4sHH")
COMMAND = struct.Struct("<B16s")
COUNT = struct.Struct("<I")
PAGE_HEADER = struct.Struct("<BIQI")
ARRAY_HEADER = struct.Struct("<BIIQH")
FAILED_HEADER = struct.Struct("<BI")
DIGEST_BYTES = 16
MOST_PLACES = 4096  # of a pull or fetch
_MOST_TEXT = 4096  # bytes of an error or a token


class WireError(HandOffError):
    """Bytes that are no message, or the end of the connection in the middle of one."""


def receive(connection: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer. Raises `WireError` at the connection's end, `OSError` as sockets do."""
    while buffer:
        count = connection.recv_into(buffer)
        if not count:
            raise WireError("the other side closed the connection")
        buffer = buffer[count:]


def read(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises as `receive` does."""
    data = bytearray(size)
    receive(connection, memoryview(data))
    return bytes(data)


def greeting(text: bytes) -> bytes:
    """A hello with a token, or a welcome with an error."""
    return HELLO.pack(MAGIC, VERSION, len(text)) + text


def read_greeting(connection: socket.socket) -> bytes:
    """The token of a hello, or the error of a welcome. Raises `WireError` for anything else."""
    magic, version, length = HELLO.unpack(read(connection, HELLO.size))
    if magic != MAGIC or length > _MOST_TEXT:
        raise WireError(f"the other side speaks another protocol: it begins with {magic!r}")
    if version != VERSION:
        raise WireError(f"the other side's page transport is of version {version}, this one's is {VERSION}: run the same release on both")
    return read(connection, length)


def checksum(page: memoryview) -> int:
    """XXH3, 64 bits: a CRC costs more than the copy."""
    return xxhash.xxh3_64_intdigest(page)


def page_header(place: int, page: memoryview) -> bytes:
    return PAGE_HEADER.pack(PAGE, place, checksum(page), len(page))


def coded_header(place: int, page: memoryview, length: int) -> bytes:
    return PAGE_HEADER.pack(CODED, place, checksum(page), length)


def array_header(first: int, pages: np.ndarray, number: int, port: int) -> bytes:
    """Of uint8[pages, bytes of a page]."""
    checksums = [checksum(page.data) for page in pages]
    return ARRAY_HEADER.pack(ARRAY, first, len(pages), number, port) + struct.pack(f"<{len(pages)}Q", *checksums)


class PageReceipt(NamedTuple):
    """What a page took, or several in an array."""

    num_pages: int
    num_bytes: int  # on the wire
    wire_seconds: float  # from its first byte to its last
    seconds: float  # with decoding it


PullArray = Callable[[int, int, tuple[int, int]], np.ndarray]  # of a number, at a port, of a shape


def receive_pages(
    connection: socket.socket, places: Sequence[int], pages: np.ndarray, coder: PageCoder | None = None, pull_array: PullArray | None = None
) -> PageReceipt:
    """The first of the pages at these places, or several in an array, into uint8[pages, bytes of a page]. Raises
    `HandOffError` where the server gives up, or sends another page, of another size, or damaged, or in a form that was
    not asked for."""
    kind, place, page = read(connection, 1), places[0], pages[0]
    if kind[0] == FAILED:
        (length,) = COUNT.unpack(read(connection, COUNT.size))
        raise HandOffError(read(connection, min(length, _MOST_TEXT)).decode("utf-8", "replace"))
    if kind[0] == ARRAY and pull_array is not None:
        return _receive_array(connection, places, pages, pull_array)
    if kind[0] != PAGE and (kind[0] != CODED or coder is None):
        raise WireError(f"a message of kind {kind[0]} came where a page should")
    _, found, expected, length = PAGE_HEADER.unpack(kind + read(connection, PAGE_HEADER.size - 1))
    if found != place or (length != page.nbytes if kind[0] == PAGE else length >= page.nbytes):
        raise WireError(f"page {found} of {length} bytes came where page {place} of {page.nbytes} should")
    began = time.perf_counter()
    if kind[0] == CODED and coder is not None:
        coded = read(connection, length)
        received_at = time.perf_counter()
        coder.decode(memoryview(coded), page)
    else:
        receive(connection, page.data)
        received_at = time.perf_counter()
    if checksum(page.data) != expected:
        raise WireError(f"page {place} was damaged on its way: its checksum differs")
    return PageReceipt(1, length, received_at - began, time.perf_counter() - began)


def _receive_array(connection: socket.socket, places: Sequence[int], pages: np.ndarray, pull_array: PullArray) -> PageReceipt:
    _, place, count, number, port = ARRAY_HEADER.unpack(bytes([ARRAY]) + read(connection, ARRAY_HEADER.size - 1))
    if place != places[0] or not 0 < count <= len(places):
        raise WireError(f"{count} pages from {place} on came where {len(places)} from {places[0]} on should")
    expected = struct.unpack(f"<{count}Q", read(connection, 8 * count))
    began = time.perf_counter()
    rows = pull_array(number, port, (count, pages.shape[1]))
    for offset, row in enumerate(rows):
        pages[offset] = row
        if checksum(pages[offset].data) != expected[offset]:
            raise WireError(f"page {places[offset]} was damaged on its way: its checksum differs")
    seconds = time.perf_counter() - began
    return PageReceipt(count, rows.nbytes, seconds, seconds)
