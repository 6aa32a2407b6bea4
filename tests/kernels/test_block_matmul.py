"""Products with matrices in GGUF's blocks beside the gguf package's values of them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pallas_kernels.block_matmul import layout, llvm_cpu, op, reference
from pallas_kernels.block_matmul.block_types import BLOCK_TYPES, BlockType, read_blocks, values_of
from pallas_kernels.block_matmul.cases import CASES, BlockMatmulCase
from pallas_kernels.block_matmul.layout import tile_bytes
from pallas_kernels.block_matmul.op import block_matmul
from pallas_kernels.llvm import host

pytestmark = pytest.mark.skipif(op.unsupported_reason() is not None, reason=str(op.unsupported_reason()))
# One program each, as loading has it: op by op every type and shape would compile dozens.
pack = partial(jax.jit, static_argnums=(0, 2))(layout.pack)
unpack = partial(jax.jit, static_argnums=0)(layout.unpack)
output_values = partial(jax.jit, static_argnums=0)(layout.output_values)
by_reference = partial(jax.jit, static_argnums=3)(reference.block_matmul)
EACH = pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=BLOCK_TYPES)


def random_blocks(kind: BlockType, num_outputs: int, num_inputs: int, seed: int = 0) -> np.ndarray:
    """Any codes and factors; scales and minima of both signs, some of them subnormal, some zero."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_outputs, num_inputs // kind.size, kind.num_bytes), np.uint8)
    for at in (208,) if kind.name == "Q6_K" else (0, 2)[: 1 + (kind.has_minimum and not kind.has_zeros)]:
        halves = (random.standard_normal(blocks.shape[:2]) * 10.0 ** random.integers(-7, -1, blocks.shape[:2])).astype(kind.scale_type)
        halves[random.random(halves.shape) < 0.1] = 0
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    if kind.has_zeros:
        blocks[..., 2] &= 15
    return blocks


def by_gguf(kind: BlockType, blocks: np.ndarray) -> np.ndarray:
    if kind.name.startswith("INT4"):  # no type of GGUF's
        scale = blocks[..., :2].copy().view(kind.scale_type).astype(np.float32)
        zero = blocks[..., 2:3] if kind.has_zeros else 8
        halves = blocks[..., 2 + kind.has_zeros :].reshape(*blocks.shape[:2], -1, 16)
        codes = np.concatenate([halves & 15, halves >> 4], axis=-1).reshape(*blocks.shape[:2], kind.size).astype(np.float32)
        return ((codes - zero) * scale).reshape(len(blocks), -1)
    return dequantize(blocks.reshape(len(blocks), -1), GGMLQuantizationType[kind.name])


@EACH
def test_values_are_those_of_the_gguf_package(kind):
    assert kind.name.startswith("INT4") or GGML_QUANT_SIZES[GGMLQuantizationType[kind.name]] == (kind.size, kind.num_bytes)
    blocks = random_blocks(kind, 48, 512)
    values = by_gguf(kind, blocks)
    of_blocks = jax.jit(lambda blocks: values_of(kind, read_blocks(kind, blocks)).reshape(48, -1))
    np.testing.assert_array_equal(of_blocks(blocks), values)
    tiles = pack(kind, jnp.asarray(blocks))
    assert tiles.shape == (3, 512 // kind.size, tile_bytes(kind))
    assert tile_bytes(kind) <= 16 * kind.num_bytes * (1.16 if kind.has_zeros else 1.03)
    np.testing.assert_array_equal(unpack(kind, tiles), values)
    np.testing.assert_array_equal(output_values(kind, tiles[jnp.array([0, 2, 2])], jnp.array([3, 0, 15])), values[[3, 32, 47]])
    several = pack(kind, jnp.asarray(blocks).reshape(3, 16, 2, -1, kind.num_bytes), 2)
    np.testing.assert_array_equal(several.reshape(tiles.shape), tiles)


def check_products(kind: BlockType, case: BlockMatmulCase, dtype: str, *, is_rounded: bool = False) -> None:
    blocks = [random_blocks(kind, case.num_outputs, case.num_inputs, seed) for seed in range(case.num_matrices)]
    matrices = jnp.asarray(np.stack([pack(kind, each) for each in blocks]))
    x = jnp.asarray(np.random.default_rng(9).standard_normal((case.num_rows, case.num_inputs), np.float32), dtype)
    for place, of_one in enumerate(blocks):
        wanted = np.asarray(x, np.float64) @ by_gguf(kind, of_one).T.astype(np.float64)
        by_kernel = block_matmul(x, matrices, jnp.int32(place), kind, is_rounded=is_rounded)
        for found in (by_kernel, by_reference(x, matrices, jnp.int32(place), kind)):
            # Rounded inputs are off by 2 ** -16 of the row's largest at most.
            np.testing.assert_allclose(found, wanted, rtol=0, atol=(1e-4 if is_rounded else 3e-6) * np.abs(wanted).max())


@EACH
@pytest.mark.parametrize("dtype", op.TYPES)
def test_products(kind, dtype):
    for case in CASES[: 1 if dtype == "float32" else None]:
        check_products(kind, case, dtype)


WITH_VNNI = pytest.mark.skipif(not op.multiplies_integers(), reason="this processor has no AVX-512 VNNI")


@WITH_VNNI
@EACH
def test_products_of_rounded_rows(kind):
    for case in CASES:
        check_products(kind, case, "float32", is_rounded=True)


@WITH_VNNI
@EACH
def test_rounded_rows_are_multiplied_exactly(kind):
    """Integers of 16 bits keep their values, the smallest beside the largest: the product is that of exact numbers."""
    blocks = random_blocks(kind, 32, 512)
    x = np.random.default_rng(3).integers(-127 * 256, 127 * 256 + 1, (5, 512)).astype(np.float32)
    x[:, 7] = 127 * 256
    wanted = x.astype(np.float64) @ by_gguf(kind, blocks).T.astype(np.float64)
    found = block_matmul(jnp.asarray(x), pack(kind, jnp.asarray(blocks))[None], jnp.int32(0), kind, is_rounded=True)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())


@WITH_VNNI
def test_rows_of_zeros_and_of_what_is_no_number():
    """A row without a number spoils no other row."""
    kind = BLOCK_TYPES["Q4_1"]
    matrices = pack(kind, jnp.asarray(random_blocks(kind, 32, 64)))[None]
    x = np.ones((5, 64), np.float32)
    x[1], x[2, 3], x[3, 5] = 0, np.nan, np.inf
    found = np.asarray(block_matmul(jnp.asarray(x), matrices, jnp.int32(0), kind, is_rounded=True))
    np.testing.assert_array_equal(found[4], found[0])
    assert not found[1].any() and not np.isfinite(found[2:4]).any()


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("is_rounded", [False, pytest.param(True, marks=WITH_VNNI)])
def test_a_row_s_sums_do_not_depend_on_the_others(name, is_rounded):
    """Every way in which rows are cut into tiles, and rows into chunks; a last group of fewer panels."""
    kind = BLOCK_TYPES[name]
    matrices = pack(kind, jnp.asarray(random_blocks(kind, 80, 288)))[None]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((300, 288), np.float32), jnp.bfloat16)
    whole = np.asarray(block_matmul(x, matrices, jnp.int32(0), kind, is_rounded=is_rounded))
    for num_rows in (*range(1, 20), 127, 128, 129, 256):
        found = block_matmul(x[:num_rows], matrices, jnp.int32(0), kind, is_rounded=is_rounded)
        np.testing.assert_array_equal(found, whole[:num_rows])


@pytest.mark.parametrize("name", ["Q5_1", "Q8_0", "IQ4_NL", "Q6_K"])
@pytest.mark.parametrize("lacks", [("avx512_vbmi",), ("avx512_vbmi", "avx512", "avx512_bf16", "avx512_vnni")], ids=["VBMI", "AVX-512"])
def test_code_for_processors_without(name, lacks, monkeypatch):
    plain = replace(host.host_target(), **dict.fromkeys(lacks, False))
    monkeypatch.setattr(llvm_cpu, "host_target", lambda: plain)
    monkeypatch.setattr(llvm_cpu, "NAME", f"{llvm_cpu.NAME}_without_{lacks[-1]}")
    for dtype in op.TYPES:
        check_products(BLOCK_TYPES[name], CASES[1], dtype)


@pytest.mark.parametrize(
    "change",
    [
        {"x": jnp.zeros((2, 64), jnp.float16)},
        {"x": jnp.zeros((2, 96), jnp.float32)},
        {"matrices": jnp.zeros((2, 2, 288), jnp.uint8)},
        {"matrices": jnp.zeros((1, 2, 2, 320), jnp.uint8)},
        {"matrices": jnp.zeros((1, 2, 2, 288), jnp.int8)},
        {"place": jnp.zeros(1, jnp.int32)},
    ],
    ids=lambda change: " ".join(f"{name} {a.dtype}{a.shape}" for name, a in change.items()),
)
def test_shapes_that_do_not_fit_are_refused(change):
    fitting = {"x": jnp.zeros((2, 64)), "matrices": jnp.zeros((1, 2, 2, 288), jnp.uint8), "place": jnp.int32(0)}
    block_matmul(**fitting, kind=BLOCK_TYPES["Q4_0"])
    with pytest.raises(ValueError, match="block_matmul"):
        block_matmul(**(fitting | change), kind=BLOCK_TYPES["Q4_0"])


def test_what_can_not_be_packed_is_refused():
    for shape in ((24, 2, 18), (16, 2, 20)):
        with pytest.raises(ValueError, match="pack"):
            pack(BLOCK_TYPES["Q4_0"], jnp.zeros(shape, jnp.uint8))


def test_a_processor_without_avx2_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(op, "host_target", lambda: replace(host.host_target(), avx2=False))
    with pytest.raises(ValueError, match="no AVX2"):
        block_matmul(jnp.zeros((1, 32)), jnp.zeros((1, 1, 1, 288), jnp.uint8), jnp.int32(0), BLOCK_TYPES["Q4_0"])


def test_under_jit_one_of_several():
    kind = BLOCK_TYPES["Q4_1"]
    matrices = jnp.stack([pack(kind, jnp.asarray(random_blocks(kind, 32, 64, seed))) for seed in range(3)])
    x = jnp.ones((2, 64), jnp.bfloat16)
    multiply = jax.jit(lambda place: block_matmul(x, matrices, place, kind))
    for place in range(3):
        np.testing.assert_array_equal(multiply(jnp.int32(place)), block_matmul(x, matrices[place : place + 1], jnp.int32(0), kind))
