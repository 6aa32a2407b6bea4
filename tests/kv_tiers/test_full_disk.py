"""A disk that is full or fails costs pages, never an error in the engine."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.kv_tiers import disk_tier
from jaxinfer.kv_tiers.disk_file import ALIGNMENT, DiskFileError
from jaxinfer.kv_tiers.tiers import Tiers
from tests.kv_tiers.made_pages import MODEL, PAGE_BYTES, disk_size, fetch, pages_by_tier, put

ROOT = Path(__file__).parents[2]
PWRITE = os.pwrite


@pytest.fixture
def tiers(tmp_path):
    made = Tiers(PAGE_BYTES, PAGE_BYTES, (str(tmp_path / "kv"), disk_size(6)), MODEL)
    yield made
    made.close()


def full_after(num_slots: int, error: int = errno.ENOSPC):
    """pwrite on a disk with room for so many slots: what goes beyond is written in part, then refused."""
    end = disk_size(num_slots)

    def pwrite(file, data, position):
        if position >= end:
            raise OSError(error, os.strerror(error))
        return PWRITE(file, data[: end - position], position)

    return pwrite


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_used_as_far_as_it_goes(tiers, monkeypatch, caplog, error):
    monkeypatch.setattr(os, "pwrite", full_after(3, error))
    with caplog.at_level(logging.WARNING):
        put(tiers, 0, 1, 2, 3)
        assert pages_by_tier(tiers, range(4)) == ([3], [0, 1, 2])
        put(tiers, 4, 5)
    assert pages_by_tier(tiers, range(6)) == ([5], [2, 4]), "the pages written so far take turns"
    assert fetch(tiers, 2) == fetch(tiers, 4) == fetch(tiers, 5) == 1
    stats = tiers.stats()
    assert (stats.num_failed_writes, stats.num_dropped, stats.refused) == (1, 1, {})
    [record] = caplog.records
    assert f"{os.strerror(error)}; it is used up to 3 pages" in record.message


def test_a_disk_that_was_full_is_asked_again(tiers, monkeypatch):
    now = 0.0
    monkeypatch.setattr("jaxinfer.kv_tiers.tiers.time.monotonic", lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_after(2))
        put(tiers, 0, 1, 2, 3)
    put(tiers, 4)
    assert tiers.stats().disk_pages == 2
    now = 61.0
    put(tiers, 5, 6, 7, 8)
    assert pages_by_tier(tiers, range(9)) == ([8], [3, 4, 5, 6, 7])


def test_a_disk_without_room_for_one_page_leaves_host_memory(tiers, monkeypatch):
    monkeypatch.setattr(os, "pwrite", full_after(0))
    put(tiers, 0, 1, 2)
    assert pages_by_tier(tiers, range(3)) == ([2], [])
    assert tiers.stats().num_dropped == 3
    assert tiers.stats().num_failed_writes == 1


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS])
def test_a_failing_disk_has_a_rest_and_serves_what_it_has(tiers, monkeypatch, caplog, error):
    now = 0.0
    monkeypatch.setattr("jaxinfer.kv_tiers.tiers.time.monotonic", lambda: now)
    put(tiers, 0, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_after(-1, error))
        put(tiers, *range(3, 20))
    put(tiers, 20)
    assert pages_by_tier(tiers, range(21)) == ([20], [0, 1, 2])
    assert fetch(tiers, 0, 1, 2) == 3
    assert (tiers.stats().num_failed_writes, tiers.stats().num_dropped) == (1, 18)
    assert len(caplog.records) == 1
    now = 61.0
    put(tiers, 21)
    assert tiers.stats().disk_pages == 4
    assert tiers.stats().num_failed_writes == 1


def test_a_disk_that_fails_again_and_again_is_told_once(tiers, monkeypatch, caplog):
    monkeypatch.setattr(disk_tier, "PATIENCE", 0.0)
    monkeypatch.setattr(os, "pwrite", full_after(-1, errno.EIO))
    put(tiers, 0, 1, 2)
    assert (tiers.stats().num_failed_writes, tiers.stats().num_dropped) == (3, 3)
    assert len(caplog.records) == 1


def test_overwriting_can_fail_too(tiers, monkeypatch):
    """On a file system that never writes in place. The page that made room is gone, the others stay."""
    put(tiers, *range(6))
    monkeypatch.setattr(os, "pwrite", full_after(0))
    put(tiers, 6, 7, 8)
    assert pages_by_tier(tiers, range(9)) == ([8], [1, 2, 3, 4, 5])
    assert tiers.stats().num_failed_writes == 1


def test_a_disk_that_is_full_at_the_start_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", full_after(-2))
    for _ in range(2):  # the lock is let go
        with pytest.raises(DiskFileError, match=r"kv can't be used: No space left on device; free some room or give another path"):
            Tiers(PAGE_BYTES, PAGE_BYTES, (str(tmp_path / "kv"), disk_size(6)), MODEL)


def test_the_systems_own_limit_on_a_files_size(tmp_path):
    """No part of it made up: the kernel cuts a write in two, then refuses."""
    script = f"""
import resource
from jaxinfer.kv_tiers.tiers import Tiers
from tests.kv_tiers.made_pages import disk_size, fetch, pages_by_tier, put
resource.setrlimit(resource.RLIMIT_FSIZE, ({disk_size(3, 8192) + 100},) * 2)
tiers = Tiers(8192, 8192, ({str(tmp_path / "kv")!r}, disk_size(6, 8192)), {MODEL!r})
put(tiers, *range(6))
print(pages_by_tier(tiers, range(6)), fetch(tiers, 2), tiers.stats().num_failed_writes)
tiers.close()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "([5], [2, 4]) 1 1\n"
    assert "File too large; it is used up to 3 pages" in done.stderr
    after = Tiers(8192, 8192, (str(tmp_path / "kv"), disk_size(6, 8192)), MODEL)
    assert pages_by_tier(after, range(6)) == ([], [2, 4, 5])
    assert fetch(after, 2) == fetch(after, 4) == fetch(after, 5) == 1
    assert (tmp_path / "kv").stat().st_size == disk_size(3, 8192) + 100 > 2 * ALIGNMENT
    after.close()
