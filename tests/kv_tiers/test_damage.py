"""Whatever happens to a file, no page comes out of it that was not put in."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.kv_tiers.disk_file import ALIGNMENT, ENTRY_SIZE, MAGIC, DiskFile, DiskFileError
from jaxinfer.kv_tiers.tiers import Tiers
from tests.kv_tiers.made_pages import MODEL, PAGE_BYTES, disk_size, fetch, fill, key_of, page_of, put, read_all

NUM_PAGES = 5
SIZE = disk_size(NUM_PAGES)
KEYS = {key_of(slot) for slot in range(NUM_PAGES)}
HEADER_END = 32
ENTRIES = range(ALIGNMENT, ALIGNMENT + NUM_PAGES * ENTRY_SIZE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "kv"
    fill(path, NUM_PAGES)
    return path.read_bytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "kv"


def good_pages(path: Path, content: bytes) -> tuple[set[bytes], int]:
    """What can be read of a file with this content, and how many pages are refused."""
    path.write_bytes(content)
    file = DiskFile(str(path), SIZE, PAGE_BYTES, MODEL)
    good = read_all(file)
    file.close()
    return good, file.refused.total() + len(file.stored) - len(good)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_costs_the_page_it_is_in(path, whole, mask):
    slots = [range(2 * ALIGNMENT + slot * ALIGNMENT, 2 * ALIGNMENT + slot * ALIGNMENT + PAGE_BYTES) for slot in range(NUM_PAGES)]
    positions = [*ENTRIES, *(position for page in slots for position in page)]
    for position in positions:
        content = bytearray(whole)
        content[position] ^= mask
        if position in ENTRIES:
            slot, used = (position - ALIGNMENT) // ENTRY_SIZE, (position - ALIGNMENT) % ENTRY_SIZE < 81
        else:
            slot, used = (position - 2 * ALIGNMENT) // ALIGNMENT, True
        assert good_pages(path, bytes(content)) == ((KEYS - {key_of(slot)}, 1) if used else (KEYS, 0)), position


def test_a_flipped_byte_of_the_header_costs_all_or_leaves_the_file_alone(path, whole):
    for position in range(HEADER_END):
        content = bytearray(whole)
        content[position] ^= 0x10
        if position < len(MAGIC):
            with pytest.raises(DiskFileError, match="is not a file of KV pages"):
                good_pages(path, bytes(content))
            assert path.read_bytes() == content
        else:
            assert good_pages(path, bytes(content)) == (set(), 1), position


def test_a_file_may_end_anywhere(path, whole):
    ends = [*range(HEADER_END + 1), *range(HEADER_END, len(whole), 31), *range(2 * ALIGNMENT, len(whole), ALIGNMENT)]
    for end in ends:
        good, num_refused = good_pages(path, whole[:end])
        within = {key_of(slot) for slot in range(NUM_PAGES) if 2 * ALIGNMENT + slot * ALIGNMENT + PAGE_BYTES <= end}
        assert good == (within if end >= HEADER_END else set()), end
        if end >= ALIGNMENT + NUM_PAGES * ENTRY_SIZE:
            assert num_refused == NUM_PAGES - len(good)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_junk_anywhere_of_any_length(path, whole, data):
    """Also pieces of the file itself, as a misdirected write would put them."""
    start = data.draw(st.integers(len(MAGIC), len(whole)))
    source = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, 2 * ALIGNMENT))
    piece = data.draw(st.sampled_from([whole[source : source + length], bytes(length), b"\xff" * length]))
    content = bytearray(whole)
    content[start : start + len(piece)] = piece
    good, _ = good_pages(path, bytes(content))
    assert good <= KEYS


@given(st.integers(0, SIZE - 1), st.integers(1, 255), st.booleans())
@settings(max_examples=60, deadline=None)
def test_fetch_gives_the_leading_pages_that_are_whole(path, whole, position, mask, is_running):
    """A byte flipped before the start, or under a running engine's hands."""
    content = bytearray(whole.ljust(SIZE, b"\0"))
    content[position] ^= mask
    path.write_bytes(whole if is_running else content)
    try:
        tiers = Tiers(PAGE_BYTES, PAGE_BYTES, (str(path), SIZE), MODEL)
    except DiskFileError:
        assert position < len(MAGIC)
        return
    if is_running:
        with open(path, "r+b") as file:
            file.seek(position)
            file.write(content[position : position + 1])
    present = tiers.find([key_of(number) for number in range(NUM_PAGES)]).num_pages
    count = fetch(tiers, *range(NUM_PAGES))
    refused = tiers.stats().refused
    assert sum(refused.values()) <= 1
    assert count == NUM_PAGES or sum(refused.values()) == 1
    if count < present:
        assert refused == {"damaged": 1}
        assert tiers.find([key_of(count)]).num_pages == 0, "a damaged page is forgotten"
        put(tiers, count, 99)  # and can be kept anew
        assert fetch(tiers, count) == 1
    tiers.close()


def test_a_page_that_can_not_be_read_is_refused(path, whole, monkeypatch):
    path.write_bytes(whole)
    tiers = Tiers(PAGE_BYTES, PAGE_BYTES, (str(path), SIZE), MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert fetch(tiers, 0, 1) == 0
    assert tiers.stats().refused == {"unreadable": 1}
    assert fetch(tiers, 0) == 0
    assert fetch(tiers, 1) == 0, "it followed the refused page"
    assert fetch(tiers, 2, 3, 4) == 3
    tiers.close()


def test_what_follows_a_damaged_page_is_saved_again_whether_host_memory_has_it_or_not(path, whole):
    content = bytearray(whole)
    content[2 * ALIGNMENT] ^= 1  # page 0
    content[2 * ALIGNMENT + 3 * ALIGNMENT] ^= 1  # page 3
    path.write_bytes(content)
    tiers = Tiers(PAGE_BYTES, PAGE_BYTES, (str(path), SIZE), MODEL)
    assert fetch(tiers, 2) == 1
    assert tiers.fetch([key_of(0), key_of(1)], [key_of(2), key_of(3)]).result(20).shape[0] == 0
    assert tiers.flush(20)
    assert [tiers.find([key_of(n)]).num_pages for n in range(NUM_PAGES)] == [0, 0, 1, 0, 1]
    put(tiers, 3, 1, 0)
    assert fetch(tiers, *range(NUM_PAGES)) == NUM_PAGES
    assert tiers.stats().refused == {"damaged": 1}
    tiers.close()


def fail(*arguments):
    raise OSError(errno.EIO, "Input/output error")


def test_reading_goes_on_where_the_system_stopped_short(path, whole, monkeypatch):
    path.write_bytes(whole)
    file = DiskFile(str(path), SIZE, PAGE_BYTES, MODEL)
    pread = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: pread(fd, [views[0][:7]], at))
    out = np.empty(PAGE_BYTES, np.uint8)
    assert file.read(file.stored[2].slot, file.stored[2].checksum, out)
    assert out.tobytes() == page_of(key_of(2)).tobytes()
    file.close()
