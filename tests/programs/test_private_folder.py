"""What somebody else could have written, or what changed since, is never read: not a program, not JAX's own entries."""

from __future__ import annotations

import logging
import math
import os
import pickle
import random
import re
import stat
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.config import persistent_cache_min_compile_time_secs

from jaxinfer.kv_transfer.page_moves import gather
from jaxinfer.programs import sealing
from jaxinfer.programs.cache import JaxCache, ProgramCache
from jaxinfer.programs.compilation import ProgramSource
from jaxinfer.programs.private_folder import UnsafeFileError, read_key
from jaxinfer.programs.serialization import Origin, decode_origin, encode_origin, load_executable
from jaxinfer.sampling.token_counts import TokenCounts
from tests.programs.test_cache import IDS, MESH, PAGES

SOURCE = ProgramSource("gather", gather, (PAGES, IDS), MESH)
DEVICES = list(MESH.devices.flat)
RAN: list[str] = []


class RunsCode:
    """A pickle that runs code when it is read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return RAN.append, (self.name,)


@pytest.fixture
def cache(tmp_path) -> ProgramCache:
    """With one program in it, of the origin "here"."""
    made = ProgramCache.at(tmp_path / "programs", tmp_path / "key")
    assert made is not None
    with jax.set_mesh(MESH), persistent_cache_min_compile_time_secs(math.inf):  # what XLA loads from JAX's cache can't be serialized
        lowered = jax.jit(gather).lower(PAGES, IDS)
        made.keep("here", "its text", lowered, lowered.compile())
    return made


def find(cache: ProgramCache) -> jax.stages.Compiled | None:
    return cache.by_origin("here", SOURCE.arguments, DEVICES)


def files_of(cache: ProgramCache) -> list[Path]:
    return sorted(cache.files.path.iterdir())


def test_what_was_written_is_found(cache):
    program = find(cache)
    assert program is not None
    pool = np.random.default_rng(0).random(PAGES.shape, np.float32)
    np.testing.assert_array_equal(
        program(jax.device_put(pool, PAGES.sharding), np.array([1, 2, 3], np.int32)), np.moveaxis(pool[:, :, 1:4], 2, 0)
    )
    assert {path.suffix for path in files_of(cache)} == {".executable", ".origin"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files_of(cache)} == {0o600}
    assert stat.S_IMODE(cache.files.path.stat().st_mode) == 0o700


def test_a_bit_flipped_anywhere_is_noticed_before_anything_is_decoded(cache, caplog, monkeypatch):
    monkeypatch.setattr("jaxinfer.programs.sealing.zlib.decompress", lambda data: pytest.fail("it was decoded"))
    rng = random.Random(0)
    for path in files_of(cache):
        whole = path.read_bytes()
        for position in [*range(0, 48, 7), *(rng.randrange(len(whole)) for _ in range(200))]:
            damaged = bytearray(whole)
            damaged[position] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="does not match its seal"):
                cache.files.read(path.name)
        path.write_bytes(whole[:-1])
        with caplog.at_level(logging.WARNING):
            assert cache._read(path.name, bytes) is None
        assert "compiled again" in caplog.text
        path.write_bytes(whole)


def test_no_file_stands_for_another(cache):
    first, second = files_of(cache)
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match="does not match its seal"):
        cache.files.read(first.name)


@pytest.mark.parametrize("form", ["first", "plain", "unsealed"])
def test_a_planted_file_runs_no_code(cache, form, caplog):
    """Also one of the format that was in use before, which is compiled again without a word."""
    planted = pickle.dumps(RunsCode(form))
    content = {"first": zlib.compress(planted), "plain": planted, "unsealed": sealing._MAGIC + bytes(32) + zlib.compress(planted)}
    for path in files_of(cache):
        path.write_bytes(content[form])
    with caplog.at_level(logging.WARNING):
        assert find(cache) is None
    assert RAN == []
    assert ("compiled again" in caplog.text) == (form != "first")


def test_whoever_had_the_key_could_not_run_code_either(cache, caplog):
    """What JAX pickles may name what describes a program, and nothing else."""

    class Dotted:
        def __reduce__(self) -> Any:
            return os.getpid, ()

    for planted in (pickle.dumps(RunsCode("sealed")), pickle.dumps(Dotted()), b"\x80\x04\x8c\x0djax._src.core\x8c\x09os.getpid\x93)R."):
        name = next(path.name for path in files_of(cache) if path.suffix == ".executable")
        cache.files.write(name, planted)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert find(cache) is None
        assert "has no place in a compiled program" in caplog.text
    assert RAN == []


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 9, b"\xff" * 64, b"\x02\x00\x00\x00{}", b"\x04\x00\x00\x00null", b'\x1e\x00\x00\x00{"program": 1, "result": [[]]}'],
)
def test_a_wrong_shape_inside_a_sealed_file_stops_no_start(cache, content, caplog):
    for path in files_of(cache):
        cache.files.write(path.name, content)
        with caplog.at_level(logging.WARNING):
            assert find(cache) is None
        assert "compiled again" in caplog.text


def test_results_in_containers_have_a_plain_form():
    out_tree = jax.tree.structure(((0, [0], None), {"a": TokenCounts(0, 0)}))  # type: ignore[arg-type]
    data = encode_origin(Origin("key", out_tree, {"call": b"object file"}))
    assert decode_origin(data) == Origin("key", out_tree, {"call": b"object file"})
    own = b"jaxinfer.sampling.token_counts:TokenCounts"
    assert own in data
    for elsewhere in (b"jaxinfer.sampling.token_counts:np", b"collections:OrderedDict00000000000"):
        with pytest.raises(ValueError, match="is no named tuple of this program's"):
            decode_origin(data.replace(own, elsewhere.ljust(len(own))))  # the lengths before it in the file still hold


def test_what_another_user_owns_is_refused(cache, monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(UnsafeFileError, match=f"programs belongs to user {user}, not to {user + 1}, who runs this: delete it, or chown it"):
        cache.files.read("any")
    with pytest.raises(UnsafeFileError, match="not this user's own file"):
        read_key(cache.files.path.parent / "key")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(cache, mode, caplog):
    cache.files.path.chmod(mode)
    words = f"programs can be written by others (mode {mode:o}): delete it, or chmod go-w it"
    with pytest.raises(UnsafeFileError, match=re.escape(words)):
        cache.files.read("any")
    with caplog.at_level(logging.WARNING):
        assert ProgramCache.at(cache.files.path, cache.files.path.parent / "key") is None
    assert len(caplog.records) == 1 and words in caplog.text


def test_a_folder_that_others_can_only_read_becomes_private(cache):
    cache.files.path.chmod(0o755)
    assert find(cache) is not None
    assert stat.S_IMODE(cache.files.path.stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["writable", "link", "pipe", "folder"])
def test_what_is_no_private_file_is_refused(cache, how, tmp_path, caplog):
    path = next(path for path in files_of(cache) if path.suffix == ".executable")
    if how == "writable":
        path.chmod(0o620)
    else:
        path.rename(tmp_path / "elsewhere")
    if how == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    with caplog.at_level(logging.WARNING):
        assert find(cache) is None
    assert "compiled again" in caplog.text


def test_a_key_is_this_users_alone_and_made_once(tmp_path):
    key = read_key(tmp_path / "folder" / "key")
    assert len(key) == 32
    assert read_key(tmp_path / "folder" / "key") == key
    assert stat.S_IMODE((tmp_path / "folder" / "key").stat().st_mode) == 0o600
    (tmp_path / "folder" / "key").chmod(0o644)
    assert read_key(tmp_path / "folder" / "key") != key, "others could have read it"
    (tmp_path / "folder" / "key").write_bytes(b"short")
    assert len(read_key(tmp_path / "folder" / "key")) == 32
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["key"]


def test_what_was_sealed_with_another_key_is_compiled_anew(cache, tmp_path):
    other = ProgramCache.at(cache.files.path, tmp_path / "another key")
    assert other is not None
    assert find(other) is None
    assert find(cache) is not None


def test_jaxs_own_entries_are_sealed_too(cache):
    entries = JaxCache(cache)
    entries.put("jit_f-0123", b"an executable")
    assert entries.get("jit_f-0123") == b"an executable"
    assert entries.get("jit_f-4567") is None
    path = next(path for path in files_of(cache) if path.suffix == ".jax")
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    assert entries.get("jit_f-0123") is None
    assert JaxCache(None).get("jit_f-0123") is None


def test_an_executable_is_loaded_for_the_arguments_it_was_made_for(cache):
    name = next(path.name for path in files_of(cache) if path.suffix == ".executable")
    data = cache.files.read(name)
    assert data is not None
    with pytest.raises(ValueError):
        load_executable(data, SOURCE.arguments[:1], jax.tree.structure(0), DEVICES)
