"""grouped_matmul: how weights lie in memory, who has which rows, and every way to run it against the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import formats, lossless, mosaic_gpu
from pallas_kernels.grouped_matmul.cases import CASES, TINY, ExpertsCase
from pallas_kernels.grouped_matmul.op import grouped_matmul, unsupported_reason
from pallas_kernels.grouped_matmul.row_pieces import num_pieces, piece, piece_bounds, tile_for
from tests.kernels.grouped_experts import compressed_tensors_words, experts

# Of 21 rows: one expert has all, all have an expert and the last one's tile would end after the rows do, some have none, all have none.
SIZES = ((0, 21, 0, 0, 0), (10, 0, 8, 1, 2), (3, 0, 9, 1, 5), (0, 0, 0, 0, 0))
NUM_ROWS = 21

run = jax.jit(grouped_matmul, static_argnames="backend")


def rows(case: ExpertsCase, random: np.random.Generator, num_rows: int = NUM_ROWS) -> jax.Array:
    return jnp.asarray(random.standard_normal((num_rows, case.inputs)), jnp.bfloat16)


def plain(x, matrices: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """One expert at a time, in float64."""
    out, first = np.zeros((len(x), matrices.shape[2])), 0
    for matrix, size in zip(matrices, sizes, strict=True):
        out[first : first + size] = np.asarray(x[first : first + size], np.float64) @ matrix
        first += size
    return out


def assert_close(found, expected, rounded: bool = False) -> None:
    """As rounded once to bfloat16, and sums of float32 in any order. `rounded`: each weight is rounded to bfloat16 before it is multiplied."""
    largest = max(np.abs(np.asarray(expected, np.float64)).max(), 1.0)
    of_one, of_sum = (2**-6, 2**-8) if rounded else (2**-8, 2**-16)
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(expected, np.float64), rtol=of_one, atol=of_sum * largest)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.format)
def test_the_reference_multiplies_each_row_by_its_experts_matrix(case):
    random = np.random.default_rng(0)
    weights, matrices = experts(case, random)
    x = rows(case, random)
    for sizes in SIZES:
        assert_close(run(x, weights, jnp.array(sizes), backend="reference"), plain(x, matrices, sizes))


@pytest.mark.parametrize("num_rows", [1, 8, NUM_ROWS])
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.format)
def test_any_sizes_as_the_reference_has_them(case, num_rows):
    random = np.random.default_rng(1)
    weights, x = experts(case, random).weights, rows(case, random, num_rows)
    for sizes in SIZES:
        group_sizes = jnp.array(sizes) * num_rows // NUM_ROWS
        out = run(x, weights, group_sizes, backend="xla")
        assert out.dtype == jnp.bfloat16
        assert_close(out, run(x, weights, group_sizes, backend="reference"), rounded=True)


@pytest.mark.parametrize("num_rows", [1, NUM_ROWS])
@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("case", [None, *TINY], ids=lambda case: case.format if case else "float32")
def test_float32_rows_come_out_in_float32(case, backend, num_rows):
    """By float32 weights nothing is rounded; by those that are bfloat16 the rows are, and only they."""
    random = np.random.default_rng(2)
    weights, matrices = experts(case or TINY[0], random)
    if case is None:
        matrices = random.standard_normal(matrices.shape).astype(np.float32)
        weights = jnp.asarray(matrices)
    x = random.standard_normal((num_rows, matrices.shape[1])).astype(np.float32)
    is_rounded = case is not None and case.format != "fp8"
    for sizes in SIZES:
        for_rows = tuple(np.array(sizes) * num_rows // NUM_ROWS)
        out = run(jnp.asarray(x), weights, jnp.array(for_rows), backend=backend)
        expected = plain(x.astype(jnp.bfloat16) if is_rounded else x, matrices, for_rows)
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, expected, atol=1e-5 * max(np.abs(expected).max(), 1), rtol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 64, 1000])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_a_cpu_no_more_than_one_experts_matrix_is_copied(dtype, num_rows):
    x, weights = jax.ShapeDtypeStruct((num_rows, 256), jnp.float32), jax.ShapeDtypeStruct((64, 256, 512), dtype)
    compiled = run.lower(x, weights, jax.ShapeDtypeStruct((64,), jnp.int32), backend="xla").compile()
    for_rows = num_rows * (256 + 512) * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 256 * 512 * 4 + 2 * for_rows + 100_000


def nothing_of(weights: formats.Weights, expert: int) -> formats.Weights:
    """With an expert that makes everything NaN that it is multiplied by."""
    if isinstance(weights, formats.Int4 | formats.Fp8):
        return weights._replace(scale=weights.scale.at[expert].set(jnp.nan))
    if isinstance(weights, lossless.LosslessWeights):
        return lossless.LosslessWeights(weights.tiles.at[expert, ..., sum(lossless.ROWS[:2]), lossless.SCALE].set(0x7FC07FC0))
    return weights.at[expert].set(jnp.nan)


# Tiles of 8 rows, in two stages. JAX's interpreter compiles a kernel anew for each block of each call: few calls, of few blocks.
interpreted = functools.partial(mosaic_gpu.grouped_matmul, tiling=mosaic_gpu.GroupedMatmulTiling(8, 2, blocks=1), interpreted=True)
of_many_rows = functools.partial(
    interpreted, tiling=mosaic_gpu.GroupedMatmulTiling(32, 2, blocks=1)
)  # packed weights by one tile a step instead of two


@pytest.mark.parametrize(
    "function", [functools.partial(run, backend="xla"), functools.partial(run, backend="reference"), interpreted, of_many_rows]
)
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.format)
def test_rows_and_experts_do_not_touch_each_other(case, function):
    random, sizes = np.random.default_rng(4), (7, 0, 9, 1, 2)
    weights, matrices = experts(case, random)
    x = rows(case, random)
    expected = plain(x, matrices, sizes)
    x = x.at[sum(sizes) :].set(jnp.nan).at[10].set(jnp.nan)
    out = np.array(function(x, nothing_of(weights, 1), jnp.array(sizes)), np.float64)
    assert np.isnan(out[10]).all()
    out[10] = expected[10]
    assert_close(out, expected, rounded=case.format == "fp8" and function not in (interpreted, of_many_rows))
    np.testing.assert_array_equal(out[sum(sizes) :], 0)


@pytest.mark.parametrize(
    ("num_rows", "sizes", "blocks", "splits"), [(21, (0, 21, 0, 0, 0), 2, 1), (3, (0, 2, 0, 1, 0), 1, 3), (21, (0, 0, 0, 0, 0), 1, 1)]
)
def test_the_gpus_kernel_with_one_experts_rows_and_with_few_and_with_none(num_rows, sizes, blocks, splits):
    """Blocks that take turns, and a last tile that would end after the rows do; fewer rows than a tile has, and inputs in uneven shares; no
    steps at all."""
    random = np.random.default_rng(3)
    weights, matrices = experts(TINY[0], random)
    x = rows(TINY[0], random, num_rows)
    out = mosaic_gpu.grouped_matmul(
        x,
        weights,
        jnp.array(sizes),
        tiling=mosaic_gpu.GroupedMatmulTiling(16, 3, blocks, splits, output_tiles_together=1),
        interpreted=True,
    )
    assert_close(out, plain(x, matrices, sizes))


@pytest.mark.parametrize("align", [1, 8])
def test_work_is_each_row_once_and_nothing_for_experts_without_rows(align):
    random = np.random.default_rng(5)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def pieces_of(sizes, num_rows, tile):
        work = piece_bounds(sizes, num_rows, tile, align)
        places = jnp.arange(len(work.owner))
        return num_pieces(work, num_rows, tile, align), jax.vmap(lambda i: piece(work, i, num_rows, tile, align))(places)

    for num_rows, tile in ((16, 1), (16, 16), (61, 1), (61, 16)) if align == 1 else ((16, 8), (64, 8), (64, 16), (200, 32)):
        for _ in range(20):
            sizes = random.multinomial(random.integers(0, num_rows + 1), random.dirichlet(np.full(7, 0.3)))
            (num_owned, num_all), pieces = jax.tree.map(np.asarray, pieces_of(jnp.asarray(sizes), num_rows, tile))
            starts = np.cumsum(sizes) - sizes
            assert num_owned == sum(-(-(size + start % align) // tile) for start, size in zip(starts, sizes, strict=True) if size)
            assert num_all <= len(pieces.expert)
            owners = []
            for i in range(num_all):
                expert, start, skip, size = (of_all[i] for of_all in pieces)
                assert 0 <= start <= num_rows - tile and 0 < size <= tile - skip and 0 <= expert < 7
                assert start + skip == len(owners) and start % align == 0
                owners += [expert if i < num_owned else -1] * size
            assert owners == [*np.repeat(np.arange(7), sizes), *[-1] * (num_rows - sizes.sum())]


def test_tiles_hold_most_experts_rows():
    assert [tile_for(rows, 384, 8, 128) for rows in (8, 512, 2048, 4096, 65536)] == [8, 8, 8, 16, 128]
    assert [tile_for(rows, 16, 8, 256) for rows in (1, 64, 100, 4096)] == [8, 8, 16, 256]


def test_few_tiles_are_split_so_that_every_multiprocessor_has_one():
    scout = jax.ShapeDtypeStruct((16, 5120, 8192), jnp.bfloat16)
    chosen = [mosaic_gpu.tiling_for(num_rows, scout) for num_rows in (1, 2, 64, 4096)]
    assert [(tiling.rows, tiling.splits) for tiling in chosen] == [(8, 2), (8, 1), (8, 1), (256, 1)]


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.format)
def test_packed_weights_are_the_checkpoints(case):
    """Every number: `experts` makes them without these functions."""
    weights, matrices = experts(case, np.random.default_rng(6))
    assert formats.expert_shape(weights) == matrices.shape
    np.testing.assert_array_equal(np.asarray(formats.dequantise(weights), np.float64), matrices.astype(np.float32))


def test_every_code_is_read_as_what_it_stands_for():
    """Also the smallest, which processors may take for 0. A row that is 1 at one input multiplies to that input's weights."""
    one_each = jnp.eye(128)
    integers = np.tile(np.arange(-8, 8), 128 * 8).reshape(1, 128, 128)
    words = jnp.asarray(compressed_tensors_words(integers))
    packed = formats.int4_from_compressed_tensors(words, jnp.ones((1, 128, 4), jnp.bfloat16))
    np.testing.assert_array_equal(formats.dequantise(packed)[0].T, integers[0])
    np.testing.assert_array_equal(run(one_each, packed, jnp.array([128]), backend="xla").T, integers[0])
    codes = np.tile(np.delete(np.arange(256, dtype=np.uint8), (127, 255)), 65)[: 128 * 128]  # without NaN
    numbers = codes.view(jnp.float8_e4m3fn).reshape(1, 128, 128)
    packed = formats.fp8_from_blocks(jnp.asarray(numbers), jnp.ones((1, 1, 1), jnp.float32))
    np.testing.assert_array_equal(formats.dequantise(packed)[0].T, numbers[0].astype(np.float32))
    np.testing.assert_array_equal(run(one_each, packed, jnp.array([128]), backend="xla").T, numbers[0].astype(np.float32))


def test_packed_bytes_are_what_is_kept():
    int4, fp8 = (experts(case, np.random.default_rng(7)).weights for case in TINY[1:])
    num_weights = 5 * 256 * 256
    assert sum(a.nbytes for a in int4) == num_weights * 4.5 / 8
    assert sum(a.nbytes for a in fp8) == num_weights * (1 + 1 / 128)


def test_shapes_that_do_not_fit_are_refused_by_name():
    random = np.random.default_rng(9)
    x, weights, sizes = rows(TINY[0], random), experts(TINY[0], random).weights, jnp.array(SIZES[0])
    for bad in (x[:, :128], x[0], x[:0], x.astype(jnp.float16)):
        with pytest.raises(ValueError, match="must be one or more rows of 256 bfloat16 or float32"):
            grouped_matmul(bad, weights, sizes)
    for bad in (sizes[:4], sizes.astype(jnp.float32)):
        with pytest.raises(ValueError, match="must be integers, one for each of 5 experts"):
            grouped_matmul(x, weights, bad)
    with pytest.raises(ValueError, match="96 outputs and 128 inputs: both must be multiples of 128"):
        formats.fp8_from_blocks(jnp.zeros((1, 96, 128), jnp.float8_e4m3fn), jnp.ones((1, 1, 1)))
    with pytest.raises(ValueError, match=r"weight_scale_inv .* must be a scale a 128 x 128"):
        formats.fp8_from_blocks(jnp.zeros((1, 128, 128), jnp.float8_e4m3fn), jnp.ones((1, 1, 2)))
    with pytest.raises(ValueError, match=r"weight_scale \(1, 128, 8\) must be \(1, 128, 4\)"):
        formats.int4_from_compressed_tensors(jnp.zeros((1, 128, 16), jnp.int32), jnp.ones((1, 128, 8), jnp.bfloat16))


def test_what_mosaic_gpu_has_no_kernel_for_is_refused():
    shapes = [(case.inputs, case.outputs) for case in CASES]
    assert all(
        unsupported_reason(i, o, jnp.dtype("bfloat16")) is None and unsupported_reason(o, i, jnp.dtype("bfloat16")) is None
        for i, o in shapes
    )
    x, weights = jnp.zeros((4, 64), jnp.bfloat16), jnp.zeros((2, 64, 96), jnp.bfloat16)
    with pytest.raises(ValueError, match="no kernel for 64 inputs and 96 outputs: both must be multiples of 128"):
        grouped_matmul(x, weights, jnp.array((1, 2)), backend="mosaic_gpu")
    assert grouped_matmul(x, weights, jnp.array((1, 2)), backend="xla").shape == (4, 96)
    x, weights = jnp.zeros((4, 128), jnp.bfloat16), jnp.zeros((2, 128, 128), jnp.bfloat16)
    for bad in ((x.astype(jnp.float32), weights), (x, weights.astype(jnp.float32))):
        with pytest.raises(ValueError, match="it multiplies bfloat16, not float32"):
            grouped_matmul(*bad, jnp.array((1, 2)), backend="mosaic_gpu")
