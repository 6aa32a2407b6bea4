"""Programs that one start keeps and the next finds."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kv_transfer.page_moves import gather, scatter
from jaxinfer.programs import compilation
from jaxinfer.programs.compilation import TOTAL, ProgramSource, compile_programs
from jaxinfer.programs.serialization import Origin
from sharding.mesh import make_mesh
from sharding.partition import replicated

MESH = make_mesh((0,))
PAGES = jax.ShapeDtypeStruct((2, 2, 8, 1, 4, 16), np.float32, sharding=replicated(MESH))
MOVED = jax.ShapeDtypeStruct((3, 2, 2, 1, 4, 16), np.float32, sharding=replicated(MESH))
IDS = jax.ShapeDtypeStruct((3,), np.int32, sharding=replicated(MESH))
SOURCES = [
    ProgramSource("gather", gather, (PAGES, IDS), MESH),
    ProgramSource("scatter", scatter, (PAGES, MOVED, IDS), MESH, donated=(0,)),
]


@pytest.fixture
def folder(tmp_path):
    """Where programs are kept, empty."""
    kept = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", kept)


@pytest.fixture
def done(monkeypatch) -> list[str]:
    """What is lowered and compiled from here on, in order."""
    done: list[str] = []
    lower, compile_ = compilation._lower, compilation._compile
    monkeypatch.setattr(compilation, "_lower", lambda source: (done.append(f"lower {source.name}"), lower(source))[1])
    monkeypatch.setattr(
        compilation, "_compile", lambda lowered, source: (done.append(f"compile {source.name}"), compile_(lowered, source))[1]
    )
    return done


def check(programs: dict[str, Any]) -> None:
    """They do what they are for, and take their arguments donated."""
    pool = np.random.default_rng(0).random(PAGES.shape, np.float32)
    ids = np.array([5, 1, 7], np.int32)
    moved = programs["gather"](jax.device_put(pool, PAGES.sharding), ids)
    np.testing.assert_array_equal(moved, np.moveaxis(pool[:, :, ids], 2, 0))
    before = jax.device_put(jnp.zeros(PAGES.shape), PAGES.sharding)
    after = np.asarray(programs["scatter"](before, moved, ids))
    np.testing.assert_array_equal(after[:, :, ids], pool[:, :, ids])
    assert not after[:, :, [0, 2, 3, 4, 6]].any()
    assert before.is_deleted()


def test_a_second_start_neither_traces_nor_compiles(folder, done):
    check(compile_programs(SOURCES))
    assert sorted(done) == ["compile gather", "compile scatter", "lower gather", "lower scatter"]
    compiled = TOTAL.num_compilations
    programs = compile_programs(SOURCES)
    assert len(done) == 4
    assert TOTAL.num_compilations == compiled
    check(programs)
    assert programs["gather"].memory_analysis().output_size_in_bytes == 4 * np.prod(MOVED.shape)


def test_an_update_that_leaves_a_program_as_it_was_does_not_compile_it(folder, done, monkeypatch):
    compile_programs(SOURCES)
    monkeypatch.setattr(compilation, "source_digest", lambda: "another version")
    del done[:]
    check(compile_programs(SOURCES))
    assert sorted(done) == ["lower gather", "lower scatter"]
    check(compile_programs(SOURCES))
    assert len(done) == 2, "it is found by its new origin"


def test_programs_are_told_apart_by_all_that_they_follow_from(folder, done, monkeypatch):
    other = make_mesh((1,))
    changed = [
        replace(SOURCES[1], donated=()),
        ProgramSource("gather", gather, (PAGES, jax.ShapeDtypeStruct((4,), np.int32, sharding=replicated(MESH))), MESH),
        ProgramSource(
            "gather", gather, tuple(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated(other)) for a in (PAGES, IDS)), other
        ),
        replace(SOURCES[0], options={"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}),
    ]
    compile_programs(SOURCES)
    for source in changed:
        del done[:]
        compile_programs([source])
        assert done == [f"lower {source.name}", f"compile {source.name}"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")  # XLA has read it long since: only what is kept is at stake
    del done[:]
    compile_programs(SOURCES[:1])
    assert done == ["lower gather", "compile gather"]


@pytest.mark.parametrize("kind", ["origin", "executable"])
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-9], lambda data: data[:99] + bytes([data[99] ^ 4]) + data[100:]])
def test_damaged_files_are_made_anew(folder, done, caplog, kind, damage):
    compile_programs(SOURCES)
    paths = list(folder.glob(f"*.{kind}"))
    assert len(paths) == 2
    for path in paths:
        path.write_bytes(damage(path.read_bytes()))
    del done[:]
    with caplog.at_level(logging.WARNING):
        check(compile_programs(SOURCES))
    assert sum("compiled again" in record.message for record in caplog.records) >= 2
    assert sorted(done)[-2:] == ["lower gather", "lower scatter"]
    del done[:]
    check(compile_programs(SOURCES))
    assert not done


def test_a_folder_that_cannot_be_written_costs_only_the_next_start(folder, done, caplog, monkeypatch):
    def full(*arguments: object, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        check(compile_programs(SOURCES))
    assert "No space left on device" in caplog.text
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_made_stops_no_start(folder, done, caplog):
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file")
    with caplog.at_level(logging.WARNING):
        check(compile_programs(SOURCES))
    assert "aren't cached in" in caplog.text


def test_what_others_delete_or_own_stops_no_start(folder, done, monkeypatch):
    compile_programs(SOURCES)
    (folder / "gone").symlink_to(folder / "nowhere")
    monkeypatch.setattr(os, "utime", lambda file: (_ for _ in ()).throw(PermissionError(1, "not yours")))
    del done[:]
    check(compile_programs(SOURCES))
    assert not done, "it is read all the same"


def test_what_has_no_plain_form_is_made_every_time(folder, done, caplog, monkeypatch):
    monkeypatch.setattr("jaxinfer.programs.cache.encode_origin", fail_to_encode)
    with caplog.at_level(logging.INFO):
        check(compile_programs(SOURCES))
    assert "can't be cached: no plain form" in caplog.text
    assert not list(folder.iterdir())


def fail_to_encode(origin: Origin) -> bytes:
    raise TypeError("no plain form")


def test_a_cache_elsewhere_than_on_this_machine_is_jaxs_alone(folder, done):
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
    assert compilation._program_cache() is None


def test_what_has_no_known_origin_is_compiled_every_time(folder, done):
    source = ProgramSource("doubled", lambda x: x * 2, (IDS,), MESH)
    for _ in range(2):
        np.testing.assert_array_equal(compile_programs([source])["doubled"](np.arange(3, dtype=np.int32)), [0, 2, 4])
    assert not list(folder.iterdir())


def test_what_nobody_used_for_a_month_is_deleted(folder, done):
    compile_programs(SOURCES[:1])
    long_ago = time.time() - 31 * 24 * 3600
    for path in folder.iterdir():
        os.utime(path, (long_ago, long_ago))
    old = {path.name for path in folder.iterdir()}
    compile_programs(SOURCES[1:])
    assert old.isdisjoint(path.name for path in folder.iterdir())
    compile_programs(SOURCES[1:])
    assert len(list(folder.iterdir())) == 2


START = """
import json, sys
from jaxinfer.llm import LLM
from jaxinfer.request import SamplingParams
from jaxinfer.programs import compilation
lowered, lower = [], compilation._lower
compilation._lower = lambda source: (lowered.append(source.name), lower(source))[1]
llm = LLM(sys.argv[1], kv_memory="512KiB", max_batch_size=4, decode_buckets=(4,), prefill_buckets=(32,), prefill_chunk_size=32)
token_ids = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=12, temperature=0))[0].outputs[0].token_ids
stats = llm.engine.stats
print(json.dumps([token_ids, lowered, stats.num_programs, stats.num_compilations, stats.num_compilations_after_ready]))
"""


@pytest.mark.processes
def test_another_process_starts_from_what_one_kept_custom_calls_too(tiny_model_path, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"} | {
        "XDG_CACHE_HOME": str(tmp_path)
    }
    starts = []
    for _ in range(2):
        start = subprocess.run(
            [sys.executable, "-c", START, str(tiny_model_path)], check=False, env=environment, capture_output=True, text=True
        )
        assert start.returncode == 0, start.stderr
        starts.append(json.loads(start.stdout))
    (first_tokens, lowered, *_), (tokens, lowered_again, num_programs, *compilations) = starts
    assert len(lowered) == num_programs
    assert lowered_again == []
    assert compilations == [0, 0]
    assert tokens == first_tokens
