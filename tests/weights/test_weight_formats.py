"""The weight formats of the registry, and one that a file and an entry add."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.weights.formats.int8 import Int8
from jaxinfer.weights.formats.lossless import Lossless
from jaxinfer.weights.formats.packed import Packed
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.registry import WEIGHT_FORMATS
from jaxinfer.weights.formats.weight_format import MatrixAxes, WeightFormat
from tests import model_on_mesh
from tests.conftest import TINY
from tests.weights.transposed_format import Transposed

FLOAT32 = jnp.dtype("float32")
AXES = MatrixAxes((("kv_heads", 3), ("head_size", 32)), (("embed", 64),), inputs_first=True)
TOKENS = list(range(3, 40))


@pytest.fixture
def with_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of plain matrices: that is what an engine takes that is asked for nothing else."""
    monkeypatch.setitem(WEIGHT_FORMATS, "plain", Transposed)  # type: ignore[arg-type]


@pytest.mark.parametrize("device_ids", [(0,), (0, 1)], ids=str)
def test_a_format_that_is_added_gives_the_scores_of_plain_matrices(tiny_model_path: Path, device_ids: tuple[int, ...]) -> None:
    plain = model_on_mesh.put(tiny_model_path, (0,), is_packed=False)
    ours = model_on_mesh.put(tiny_model_path, device_ids, matrices=Transposed(FLOAT32))
    paths = {path for leaf in ours.template.leaves for path in leaf.paths}
    assert {"blocks.0.mlp.down.kernel_steps", "embedding.table_steps"} <= paths
    np.testing.assert_allclose(ours.plain_logits(TOKENS), plain.plain_logits(TOKENS), atol=1e-3)


def test_an_engine_serves_a_format_that_is_added(llm: LLM, tiny_model_path: Path, with_transposed: None) -> None:
    ours = LLM(str(tiny_model_path), **TINY | {"matmul_backend": "xla", "dtype": "float32"})
    assert ours.engine.stats.weights == "float32 transposed"
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    prompts = ["The capital of France is", "One, two"]
    found, expected = ([output.outputs[0].token_ids for output in one.generate(prompts, greedy)] for one in (ours, llm))
    assert found == expected
    assert ours.engine.stats.num_compilations_after_ready == 0


@pytest.mark.parametrize(
    ("weight_format", "num_bytes"),
    [
        (Plain(FLOAT32), 4 * 96 * 64),
        (Plain(jnp.dtype("bfloat16")), 2 * 96 * 64),
        (Int8(), 96 * 64 + 4 * 96),
        (Packed(FLOAT32), 4 * 96 * 64),
        (Packed(jnp.dtype("int8")), 96 * 64 + 4 * 96),
        (Lossless(), 6 * (64 + 16 * 96)),
        (Lossless(num_shards=4), 6 * 4 * (64 + 4 * 96)),
        (Transposed(FLOAT32), 4 * 96 * 64 + 4 * 96),
    ],
    ids=str,
)
def test_a_checkpoints_matrix_becomes_the_leaves_that_a_format_says(weight_format: WeightFormat, num_bytes: int) -> None:
    leaves = weight_format.leaves(AXES)
    assert sum(leaf.num_bytes for leaf in leaves) == num_bytes
    if not weight_format.is_plain:  # which is loaded as it is
        arrays = weight_format.from_plain(jnp.ones((3, 32, 64)), 2)
        assert [(array.shape, array.dtype) for array in arrays] == [(leaf.shape, leaf.dtype) for leaf in leaves]
    assert leaves[0].suffix == "" and all(leaf.suffix for leaf in leaves[1:])


def test_matrices_that_panels_do_not_divide_are_not_packed() -> None:
    odd = MatrixAxes((("vocab", 33),), (("embed", 64),), inputs_first=False)
    assert Packed(FLOAT32).for_matrix(odd) == Plain(FLOAT32)
    assert Packed(jnp.dtype("int8")).for_matrix(odd) == Int8()
    assert Packed(FLOAT32).for_matrix(AXES) == Packed(FLOAT32)
    assert Lossless().for_matrix(odd) == Plain(jnp.dtype(jnp.bfloat16))
    assert Lossless().for_matrix(AXES) == Lossless()
    assert Lossless(incompressible=frozenset([AXES])).for_matrix(AXES) == Packed(jnp.dtype(jnp.bfloat16))


def test_a_format_says_where_no_backend_multiplies_it() -> None:
    assert Packed(FLOAT32).unsupported_reason("gpu") == "its kernels are for CPUs, not gpu"
    assert {name: make(FLOAT32).unsupported_reason("gpu") is None for name, make in WEIGHT_FORMATS.items()} == {
        "plain": True,
        "int8": True,
        "packed": False,
        "lossless": False,
        "tiled": True,
    }
