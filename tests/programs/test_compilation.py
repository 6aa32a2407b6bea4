"""Programs compiled ahead of time, and the count of what compiles."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.programs.compilation import COUNTER, TOTAL, ProgramSource, compile_program, compile_programs, use_persistent_cache
from sharding.mesh import make_mesh
from sharding.partition import replicated

MESH = make_mesh((0,))
VECTOR = jax.ShapeDtypeStruct((5,), np.float32, sharding=replicated(MESH))


def source(name: str, factor: float, **options: object) -> ProgramSource:
    return ProgramSource(name, lambda x: x * factor, (VECTOR,), MESH, **options)


def test_programs_come_by_name_and_run():
    programs = compile_programs([source(f"times {factor}", factor) for factor in range(1, 6)])
    assert list(programs) == [f"times {factor}" for factor in range(1, 6)]
    np.testing.assert_array_equal(programs["times 3"](np.ones(5, np.float32)), 3)


def test_donated_arguments_are_gone():
    program = compile_program(source("doubled", 2.0, donated=(0,)))
    x = jax.device_put(np.ones(5, np.float32), replicated(MESH))
    program(x)
    assert x.is_deleted()


def test_a_broken_program_says_so():
    with pytest.raises(TypeError):
        compile_programs([source("fine", 1.0), ProgramSource("broken", lambda x: x + "text", (VECTOR,), MESH)])


def test_an_option_that_this_xla_does_not_know_is_left_out():
    program = compile_program(source("with an option", 7.0, options={"xla_no_such_option_at_all": "1"}))
    np.testing.assert_array_equal(program(np.ones(5, np.float32)), 7)


def test_a_compilation_is_unexpected_where_its_thread_did_not_announce_it():
    def compile_here() -> None:
        jax.jit(lambda x: x - 13)(jnp.ones(3)).block_until_ready()

    unexpected, total = COUNTER.num_unexpected_compilations, TOTAL.num_compilations
    with COUNTER.compiling(), COUNTER.compiling():
        compile_here()
    compile_program(source("wanted", 11.0))
    other = threading.Thread(target=compile_here)
    other.start()
    other.join()
    assert COUNTER.num_unexpected_compilations == unexpected, "neither what is wanted nor what others compile"
    compile_here()
    assert COUNTER.num_unexpected_compilations > unexpected
    assert TOTAL.num_compilations >= total


def test_programs_are_cached_in_the_users_cache_and_jaxs_own_beside_them(monkeypatch, tmp_path):
    kept = jax.config.jax_compilation_cache_dir
    try:
        assert use_persistent_cache() == Path(kept), "a folder that JAX was told of stays"
        jax.config.update("jax_compilation_cache_dir", None)
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path))
            assert use_persistent_cache() == tmp_path / "jaxinfer" / "xla"
            with COUNTER.compiling():
                jax.jit(lambda x: x - 14)(np.ones(3)).block_until_ready()
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
        use_persistent_cache()
    files = [path for path in (tmp_path / "jaxinfer").rglob("*") if path.is_file()]
    assert sorted({path.suffix for path in files}) == [".jax", ".key"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "jaxinfer/xla", tmp_path / "jaxinfer/xla/programs")} == {0o700}
