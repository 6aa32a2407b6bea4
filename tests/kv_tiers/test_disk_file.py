"""What a file keeps over a restart, and which files are refused or left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.config import ConfigError
from jaxinfer.kv_tiers import disk_file
from jaxinfer.kv_tiers.disk_file import ALIGNMENT, DiskFile, DiskFileError
from tests.kv_tiers.made_pages import MODEL, PAGE_BYTES, disk_size, fill, key_of, page_of, read_all

ROOT = Path(__file__).parents[2]


def opened(path, size: int = disk_size(8), page_bytes: int = PAGE_BYTES, fingerprint: bytes = MODEL) -> DiskFile:
    return DiskFile(str(path), size, page_bytes, fingerprint)


def test_pages_are_there_after_a_restart_oldest_first(tmp_path):
    path = tmp_path / "kv"
    file = opened(path)
    for slot in (3, 0, 5):
        file.write(slot, key_of(slot), page_of(key_of(slot)))
    file.write(3, key_of(7), page_of(key_of(7)))
    file.close()
    again = opened(path)
    assert [(page.key, page.slot) for page in again.stored] == [(key_of(0), 0), (key_of(5), 5), (key_of(7), 3)]
    assert read_all(again) == {key_of(0), key_of(5), key_of(7)}
    assert not again.refused
    again.write(1, key_of(1), page_of(key_of(1)))
    again.close()
    assert opened(path).stored[-1].key == key_of(1)


@pytest.mark.parametrize("slots", [(3, 1), (1, 3)])
def test_of_a_page_that_was_written_twice_the_newer_counts(tmp_path, slots):
    file = opened(tmp_path / "kv")
    for slot in slots:
        file.write(slot, key_of(0), page_of(key_of(0)))
    file.close()
    [stored] = opened(tmp_path / "kv").stored
    assert stored.slot == slots[1]


def test_pages_that_were_cut_off_are_not_promised(tmp_path):
    fill(tmp_path / "kv", 4)
    os.truncate(tmp_path / "kv", disk_size(3) - ALIGNMENT + PAGE_BYTES - 1)
    file = opened(tmp_path / "kv")
    assert [page.slot for page in file.stored] == [0, 1]
    assert file.refused == {"torn": 2}


def test_tables_and_pages_never_overlap(tmp_path):
    size = 100 * ALIGNMENT
    fill(tmp_path / "kv", 95, size, page_bytes=ALIGNMENT)
    file = opened(tmp_path / "kv", size, ALIGNMENT)
    assert file.num_slots == 96 == 100 - 1 - 3  # header and three tables
    assert len(file.stored) == 95
    out = np.empty(ALIGNMENT, np.uint8)
    for stored in file.stored:
        assert file.read(stored.slot, stored.checksum, out)
        assert out.tobytes() == page_of(stored.key, ALIGNMENT).tobytes()


@pytest.mark.parametrize("page_bytes", [1, 96, 4096, 4097])
def test_a_file_never_outgrows_its_size_and_uses_it(tmp_path, page_bytes):
    stride = -(-page_bytes // ALIGNMENT) * ALIGNMENT
    for size in (*range(disk_size(1, page_bytes), 3 * ALIGNMENT + 40 * stride, 2999), 36 * ALIGNMENT, 37 * ALIGNMENT):
        path = tmp_path / "kv"
        file = opened(path, size, page_bytes)
        file.write(file.num_slots - 1, key_of(0), page_of(key_of(0), page_bytes))
        assert size - 2 * stride - ALIGNMENT < path.stat().st_size <= size
        file.close()
        path.unlink()


def test_a_size_that_holds_no_page_is_refused_before_a_file_is_made(tmp_path):
    for size in (0, 1, ALIGNMENT, disk_size(1) - 1):
        with pytest.raises(DiskFileError, match=r"kv_disk of .* holds no page of 96 B: give at least 12\.0 KiB"):
            opened(tmp_path / "kv", size)
    assert not (tmp_path / "kv").exists()
    assert issubclass(DiskFileError, ConfigError)


def test_a_file_is_sparse_and_for_its_owner_alone(tmp_path):
    opened(tmp_path / "kv", 2**40)
    status = (tmp_path / "kv").stat()
    assert status.st_size <= ALIGNMENT
    assert status.st_mode & 0o777 == 0o600


@pytest.mark.parametrize("num_slots", [3, 5, 8, 20])
def test_another_size_keeps_the_pages_that_fit(tmp_path, num_slots):
    fill(tmp_path / "kv", 8)
    file = opened(tmp_path / "kv", disk_size(num_slots))
    assert read_all(file) == {key_of(slot) for slot in range(min(num_slots, 8))}
    assert (tmp_path / "kv").stat().st_size <= disk_size(num_slots)
    assert not file.refused


def test_pages_of_another_model_are_refused_one_by_one_and_their_slots_used(tmp_path):
    path = tmp_path / "kv"
    fill(path, 4, disk_size(8))
    other = opened(path, fingerprint=b"another model")
    assert other.stored == []
    assert other.refused == {"other model": 4}
    other.write(2, key_of(2), page_of(key_of(2)))
    other.close()
    first = opened(path)
    assert read_all(first) == {key_of(0), key_of(1), key_of(3)}
    assert first.refused == {"other model": 1}


def test_a_file_of_another_version_starts_over(tmp_path, monkeypatch):
    path = tmp_path / "kv"
    monkeypatch.setattr(disk_file, "VERSION", disk_file.VERSION + 1)
    fill(path, 4)
    monkeypatch.undo()
    file = opened(path)
    assert (file.stored, file.refused) == ([], {"other version": 1})
    file.write(3, key_of(3), page_of(key_of(3)))
    file.close()
    assert read_all(opened(path)) == {key_of(3)}


def test_a_file_of_another_page_size_starts_over(tmp_path):
    path = tmp_path / "kv"
    fill(path, 4)
    file = opened(path, page_bytes=PAGE_BYTES + 1)
    assert (file.stored, file.refused) == ([], {"other layout": 1})
    file.close()
    assert opened(path).stored == []


@pytest.mark.parametrize("content", [b"x", b"important notes of a user" * 1000, b"jaxinfer KV fil", bytes(10_000), b"GGUF"])
def test_a_file_of_someone_else_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "notes"
    path.write_bytes(content)
    if disk_file.MAGIC.startswith(content):  # as far as it goes it is ours
        assert opened(path).refused == {"torn": 1}
        return
    with pytest.raises(DiskFileError, match=r"notes is not a file of KV pages: give another path, or delete it if nobody needs it"):
        opened(path)
    assert path.read_bytes() == content


def test_an_empty_file_is_a_new_one(tmp_path):
    (tmp_path / "kv").touch()
    assert not opened(tmp_path / "kv").refused


def test_paths_that_can_not_be_used_are_told(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path, r"can't open .*: Is a directory; give a file in a folder that can be written to"),
        (tmp_path / "no" / "kv", "can't open .*: No such file or directory; give a file in a folder"),
        (tmp_path / "pipe", "pipe is not a regular file: give another path"),
    ):
        with pytest.raises(DiskFileError, match=words):
            opened(path)


def test_a_refused_file_is_let_go(tmp_path):
    path = tmp_path / "notes"
    path.write_bytes(b"notes")
    for _ in range(2):
        with pytest.raises(DiskFileError, match="not a file of KV pages"):
            opened(path)


def test_two_can_not_share_a_file(tmp_path):
    path = tmp_path / "kv"
    first = opened(path)
    with pytest.raises(DiskFileError, match="kv is in use by another engine: give each its own file"):
        opened(path)
    script = (
        "import sys\nfrom jaxinfer.kv_tiers.disk_file import DiskFile, DiskFileError\n"
        f"try: DiskFile(sys.argv[1], {disk_size(8)}, {PAGE_BYTES}, b'')\nexcept DiskFileError as error: print(error)"
    )
    second = [sys.executable, "-c", script, str(path)]
    assert "in use by another engine" in subprocess.run(second, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    first.close()
    assert subprocess.run(second, cwd=ROOT, capture_output=True, text=True, check=True).stdout == ""
