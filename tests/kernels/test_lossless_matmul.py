"""Products with 12-bit matrices beside packed bfloat16 ones, bit by bit; what packs, and what survives it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.llvm import host
from pallas_kernels.lossless_matmul import layout, llvm_cpu, op
from pallas_kernels.lossless_matmul.cases import CASES, LosslessMatmulCase
from pallas_kernels.lossless_matmul.layout import MOST_ESCAPES, num_misfits, tile_steps
from pallas_kernels.lossless_matmul.op import lossless_matmul
from pallas_kernels.packed_matmul import layout as packed_layout
from pallas_kernels.packed_matmul import llvm_cpu as packed_llvm_cpu
from pallas_kernels.packed_matmul import op as packed_op
from pallas_kernels.packed_matmul.op import packed_matmul

BFLOAT16 = jnp.dtype(jnp.bfloat16)
# One program each, as loading has it.
pack = jax.jit(op.pack, static_argnums=(1, 2), static_argnames="backend")
unpack, output_values = jax.jit(layout.unpack), jax.jit(layout.output_values)
pack_plain = partial(jax.jit, static_argnums=1)(packed_layout.pack)
BACKENDS = ["llvm_cpu", "reference"]

pytestmark = pytest.mark.skipif(op.unsupported_reason() is not None, reason=str(op.unsupported_reason()))


def arguments(case: LosslessMatmulCase, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """x, and matrices with a few values so small that they need escapes, some zeros, and both signs of zero."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((case.num_rows, case.num_inputs), np.float32)
    matrices = random.standard_normal((case.num_matrices, case.num_outputs, case.num_inputs), np.float32)
    is_tiny = random.random(matrices.shape) < 3 / (16 * 4 * tile_steps(case.num_inputs))
    matrices = np.where(is_tiny, matrices * 2.0**-40, matrices)
    matrices[:, 0, 0], matrices[:, -1, -1] = 0.0, -0.0
    return jnp.asarray(x, BFLOAT16), jnp.asarray(matrices, BFLOAT16)


def bits(values: jax.Array) -> np.ndarray:
    return np.asarray(jax.lax.bitcast_convert_type(values, jnp.uint16))


def by_packed(x: jax.Array, matrix: jax.Array) -> np.ndarray:
    return np.asarray(packed_matmul(x, pack_plain(matrix, BFLOAT16)[None], jnp.int32(0)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products_are_those_of_packed_bfloat16_bit_by_bit(case):
    x, matrices = arguments(case)
    tiles = jnp.stack([pack(matrix) for matrix in matrices])
    assert num_misfits(tiles) == 0
    headers = np.asarray(tiles).reshape(-1, tiles.shape[-1])[:, :4].copy().view(np.uint32)
    assert case.num_inputs < 64 or (headers >> 16).any()  # there are escapes
    multiply = jax.jit(lossless_matmul, static_argnames="backend")
    for place in range(case.num_matrices):
        found = multiply(x, tiles, jnp.int32(place))
        np.testing.assert_array_equal(found, by_packed(x, matrices[place]))
        plain = multiply(x, tiles, jnp.int32(place), backend="reference")
        np.testing.assert_allclose(found, plain, rtol=0, atol=2e-6 * case.num_inputs**0.5 * np.abs(plain).max())


def test_any_number_of_rows():
    """Every way in which rows are cut into tiles, and rows into chunks; a last group of fewer panels."""
    x, matrices = arguments(LosslessMatmulCase("", 300, 448, 80), 1)
    tiles, wanted = pack(matrices[0])[None], by_packed(x, matrices[0])
    for num_rows in (*range(1, 20), 127, 128, 129, 135, 256, 300):
        np.testing.assert_array_equal(lossless_matmul(x[:num_rows], tiles, jnp.int32(0)), wanted[:num_rows])


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_bit_patterns_survive(backend):
    """NaNs with their payloads, infinities, both zeros, denormals. Sorted, so that a tile has few exponents."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    by_exponent = patterns[np.argsort(patterns >> 7 & 0xFF, kind="stable")].reshape(32, 16, 128)
    matrix = jax.lax.bitcast_convert_type(jnp.asarray(by_exponent.transpose(1, 0, 2).reshape(16, -1)), BFLOAT16)
    tiles = pack(matrix, 1, 32, backend=backend)
    assert tiles.shape == (1, 32, 64 + 32 * 96)
    assert num_misfits(tiles) == 0
    np.testing.assert_array_equal(bits(unpack(tiles)), bits(matrix))
    for lane in (0, 7, 8, 15):
        np.testing.assert_array_equal(bits(output_values(tiles, jnp.array([lane])))[0], bits(matrix)[lane])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tile_has_room_for_some_escapes_and_tells_when_there_are_more(backend):
    matrix = np.ones((32, 64), np.float32)
    places = np.random.default_rng(0).permutation(16 * 64)[: MOST_ESCAPES + 1]
    matrix[:16].flat[places[:-1]] = 2.0 ** -np.arange(20, 20 + MOST_ESCAPES, dtype=np.float32)
    tiles = pack(jnp.asarray(matrix, BFLOAT16), backend=backend)
    assert num_misfits(tiles) == 0
    np.testing.assert_array_equal(unpack(tiles), matrix)
    matrix[:16].flat[places[-1]] = 2.0**60
    tiles = pack(jnp.asarray(matrix, BFLOAT16), backend=backend)
    assert num_misfits(tiles) == 1
    np.testing.assert_array_equal(unpack(tiles)[16:], matrix[16:])
    random = np.random.default_rng(0).integers(0, 1 << 16, (32, 256), np.uint16)
    assert num_misfits(pack(jax.lax.bitcast_convert_type(jnp.asarray(random), BFLOAT16), backend=backend)) == 2 * -(-256 // 384)


def test_several_axes_of_outputs_and_inputs():
    matrix = arguments(LosslessMatmulCase("", 1, 24, 96))[1][0]
    packed = pack(matrix.reshape(3, 32, 2, 12), 2)
    assert packed.shape == (3, 2, 1, 64 + 6 * 96)
    np.testing.assert_array_equal(packed.reshape(6, 1, -1), pack(matrix))
    np.testing.assert_array_equal(unpack(packed), matrix.reshape(3, 32, 24))
    assert pack(matrix, 1, 2).shape == (6, 2, 64 + 3 * 96)
    np.testing.assert_array_equal(unpack(pack(matrix, 1, 2)), matrix)


@pytest.mark.parametrize("shape", [(24, 8), (16, 6)])
def test_what_can_not_be_packed_is_refused(shape):
    with pytest.raises(ValueError, match="pack"):
        op.pack(jnp.zeros(shape, BFLOAT16))
    with pytest.raises(ValueError, match="must be bfloat16"):
        op.pack(jnp.zeros((16, 8), jnp.float16))


@pytest.mark.parametrize(
    "change",
    [
        {"x": jnp.zeros((2, 8), jnp.float32)},
        {"x": jnp.zeros((2, 12), BFLOAT16)},
        {"matrices": jnp.zeros((1, 2, 1, 64 + 96), jnp.uint8)},
        {"matrices": jnp.zeros((2, 1, 64 + 2 * 96), jnp.uint8)},
        {"matrices": jnp.zeros((1, 2, 1, 64 + 2 * 96), jnp.int8)},
        {"place": jnp.zeros(1, jnp.int32)},
    ],
    ids=lambda change: " ".join(f"{name} {a.dtype}{a.shape}" for name, a in change.items()),
)
def test_shapes_that_do_not_fit_are_refused(change):
    fitting = {"x": jnp.zeros((2, 8), BFLOAT16), "matrices": jnp.zeros((1, 2, 1, 64 + 2 * 96), jnp.uint8), "place": jnp.int32(0)}
    lossless_matmul(**fitting)
    with pytest.raises(ValueError, match="lossless_matmul"):
        lossless_matmul(**(fitting | change))


@pytest.mark.parametrize("lacks", [("avx512_vbmi",), ("avx512_vbmi", "avx512", "avx512_bf16", "avx512_vnni")], ids=["VBMI", "AVX-512"])
def test_code_for_processors_without(lacks, monkeypatch):
    """What this machine's processor can run too: look-ups of half as many bytes, plain multiplications."""
    plain = replace(host.host_target(), **dict.fromkeys(lacks, False))
    for module in (llvm_cpu, op, packed_llvm_cpu, packed_op):
        monkeypatch.setattr(module, "host_target", lambda: plain)
    for module in (llvm_cpu, packed_llvm_cpu):
        monkeypatch.setattr(module, "NAME", f"{module.NAME}_without_{lacks[-1]}")
    for case in CASES[:2]:
        x, matrices = arguments(case)
        np.testing.assert_array_equal(lossless_matmul(x, op.pack(matrices[0])[None], jnp.int32(0)), by_packed(x, matrices[0]))


def test_a_processor_without_avx2_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(op, "host_target", lambda: replace(host.host_target(), avx2=False))
    with pytest.raises(ValueError, match="no AVX2"):
        op.pack(jnp.zeros((16, 4), BFLOAT16))
