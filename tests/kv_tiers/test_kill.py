"""A process that is killed while it writes: the next one uses what was finished, and nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.kv_tiers.tiers import Tiers
from tests.kv_tiers.made_pages import MODEL, disk_size, fetch, pages_by_tier, put

ROOT = Path(__file__).parents[2]
LARGE = 1 << 20


def run(path: Path, body: str, page_bytes: int, num_slots: int) -> subprocess.Popen:
    script = f"""
import os, signal, sys
from jaxinfer.kv_tiers.tiers import Tiers
from tests.kv_tiers.made_pages import disk_size, fetch, pages_by_tier, key_of, page_of, put
tiers = Tiers({page_bytes}, {4 * page_bytes}, ({str(path)!r}, disk_size({num_slots}, {page_bytes})), {MODEL!r})
{body}
"""
    return subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)


# Of the page and of its entry: nothing, half, or all but the last byte is written when the process ends.
@pytest.mark.parametrize("write", ["page", "entry"])
@pytest.mark.parametrize("part", ["0", "len(data) // 2", "len(data) - 1"])
@pytest.mark.parametrize("num_before", [2, 3])  # pages: the next goes to a new slot, or replaces page 0
def test_a_half_written_page_is_refused(tmp_path, write, part, num_before):
    body = f"""
put(tiers, *range({num_before}))
pwrite = os.pwrite
def die(file, data, position):
    if (len(data) < 8192) == ({write!r} == "entry"):
        pwrite(file, data[:{part}], position)
        os.kill(os.getpid(), signal.SIGKILL)
    return pwrite(file, data, position)
os.pwrite = die
put(tiers, 3)
"""
    process = run(tmp_path / "kv", body, 8192, 3)
    assert process.wait(60) == -signal.SIGKILL
    tiers = Tiers(8192, 8192, (str(tmp_path / "kv"), disk_size(3, 8192)), MODEL)
    assert fetch(tiers, 3) == 0
    assert fetch(tiers, 0) == (1 if num_before == 2 or (write, part) == ("page", "0") else 0)
    assert fetch(tiers, 1) == 1
    put(tiers, 3)
    assert fetch(tiers, 3) == fetch(tiers, 1) == 1
    tiers.close()


def test_killed_at_any_moment(tmp_path):
    """What was said to be on disk is there; whatever else is there is right."""
    body = """
for first in range(0, 10**6, 3):
    tiers.put([(key_of(n), page_of(key_of(n), tiers.page_bytes)) for n in range(first, first + 3)])
    if first % 9 == 0 and tiers.flush():
        print(first + 2, flush=True)
"""
    for num_lines in (1, 3, 6):
        process = run(tmp_path / "kv", body, LARGE, 12)
        said = [process.stdout.readline() for _ in range(num_lines)]
        process.kill()
        last = int((said + process.communicate()[0].splitlines())[-1])
        tiers = Tiers(LARGE, LARGE, (str(tmp_path / "kv"), disk_size(12, LARGE)), MODEL)
        there = pages_by_tier(tiers, range(last + 60))[1]
        assert [n for n in there if n > last] or set(there) >= set(range(last - 2, last + 1))
        good = [n for n in there if fetch(tiers, n)]
        assert len(there) - len(good) == sum(tiers.stats().refused.values()) <= 1
        tiers.close()
