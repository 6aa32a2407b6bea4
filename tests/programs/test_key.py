"""Text that tells one program from another."""

from __future__ import annotations

import enum
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxinfer.decode.program import assign_slot, decode_step
from jaxinfer.kv_transfer.page_moves import gather, scatter
from jaxinfer.models.registry import read_config
from jaxinfer.programs import key as program_key
from jaxinfer.programs.key import UnknownOriginError, describe, sources, surroundings
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from jaxinfer.weights.template import make_template
from sharding.mesh import make_mesh
from sharding.partition import replicated
from tests import tiny_model

MESH, OTHER_MESH = make_mesh((0,)), make_mesh((1,))


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Setting:
    size: int
    derived: object = field(default=None, compare=False)


def array(shape: tuple[int, ...], dtype: str = "float32", mesh: Any = MESH) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=replicated(mesh))


DIFFERENT = [
    None, True, 1, 1.0, "1", b"1", np.dtype("int8"), np.dtype("uint8"), int, float, Color.RED, Color.BLUE,
    (), (1,), (1, 2), (2, 1), [1, 2], (1, (2,)), ((1,), 2), Pair(1, 2), {1, 2}, frozenset((1, 2)), {1: 2}, {2: 1}, {"1": 2},
    Setting(1), Setting(2), partial(gather, 1), partial(gather, x=1), partial(scatter, 1), gather, scatter, assign_slot,
    MESH, OTHER_MESH, array((2,)), array((3,)), array((2,), "int32"), array((2,), mesh=OTHER_MESH),
]  # fmt: skip


def test_different_values_have_different_texts():
    texts = [describe(value) for value in DIFFERENT]
    assert len(set(texts)) == len(texts)
    assert texts == [describe(value) for value in DIFFERENT]


def test_sets_are_told_by_what_they_hold():
    names = [f"name {i}" for i in range(50)]
    assert describe(frozenset(names)) == describe(frozenset(reversed(names)))


def test_what_a_dataclass_does_not_compare_by_is_left_out():
    assert describe(Setting(1, object())) == describe(Setting(1))


@pytest.mark.parametrize("value", [object(), np.ones(2), lambda: 1, test_sets_are_told_by_what_they_hold, (1, object()), Setting(object())])
def test_what_no_text_tells_apart_is_refused(value):
    with pytest.raises(UnknownOriginError):
        describe(value)


def test_a_program_is_told_by_all_that_it_closes_over():
    config = read_config(tiny_model.CONFIG)
    float32 = ModelWeightFormat(Plain(np.dtype("float32")))
    template = make_template(config, float32)
    steps = [
        decode_step(template, MESH, "xla"),
        decode_step(template, OTHER_MESH, "xla"),
        decode_step(template, MESH, "reference"),
        decode_step(make_template(replace(config, rms_norm_eps=1e-6), float32), MESH, "xla"),  # of the same shapes
        decode_step(make_template(config, float32, np.dtype("float16")), MESH, "xla"),
    ]
    assert len({describe(step) for step in steps}) == len(steps)
    assert describe(decode_step(make_template(config, float32), MESH, "xla")) == describe(steps[0])


def test_settings_of_jax_and_xla_count_but_not_where_programs_are_kept(monkeypatch):
    before = surroundings()
    kept = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", "/elsewhere")
        assert surroundings() == before
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert surroundings() != before
    monkeypatch.undo()
    precision = jax.config.jax_default_matmul_precision
    try:
        jax.config.update("jax_default_matmul_precision", "highest")
        assert surroundings() != before
    finally:
        jax.config.update("jax_default_matmul_precision", precision)
    assert surroundings() == before


def test_every_source_counts(monkeypatch, tmp_path):
    before = sources()
    for package in program_key._PACKAGES:
        shutil.copytree(program_key._ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(program_key, "_ROOT", tmp_path)
    tuned = "pallas_kernels/tuned/some-card.json"
    (tmp_path / tuned).parent.mkdir(exist_ok=True)
    digests = [before]
    try:
        for changed in ("jaxinfer/layers/norm.py", "pallas_kernels/dispatch.py", "sharding/rules.py", "checkpoints/source.py", tuned):
            sources.cache_clear()
            assert sources() == digests[-1], "of the contents, wherever they lie"
            path = tmp_path / changed
            path.write_text((path.read_text() if path.exists() else "") + "#")
            sources.cache_clear()
            digests.append(sources())
    finally:
        sources.cache_clear()
    assert len(set(digests)) == 6
