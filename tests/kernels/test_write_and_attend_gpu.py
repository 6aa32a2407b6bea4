"""paged_attention's kernel for GPUs where it writes the new token too, interpreted on a CPU: what queries attend to, and what is in the pool
afterwards, bit for bit."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.mosaic_gpu import write_and_attend
from pallas_kernels.paged_attention.mosaic_tiling import DecodeTiling
from pallas_kernels.paged_attention.op import write_and_attend as op
from pallas_kernels.span import Span
from tests.kernels.compiled import compiled
from tests.kernels.poisoned_pool import LAYER, poisoned_pool

op = compiled(op)

ONE_SHARE = DecodeTiling(64, 2, 1, writes=True)


def check(
    context,
    *,
    num_heads=4,
    num_kv_heads=1,
    head_size=64,
    page_size=16,
    tiling=ONE_SHARE,
    dtype=jnp.bfloat16,
    bad=(),
    fill=math.nan,
    **options,
):
    """The output is the reference's, up to its rounding, and the pool what it was but for the new tokens. All that lies outside of contexts, the new
    places before too, is `fill`; where that is a number the pool is promised finite. `bad`: numbers of the new tokens that can't be stored."""
    random = np.random.default_rng(len(context))
    kv, table = poisoned_pool(random, context, num_kv_heads, page_size, head_size)
    last, rows = np.maximum(np.asarray(context) - 1, 0), np.arange(len(context))
    page_ids = np.where(np.asarray(context) > 0, table[rows, last // page_size], 0).astype(np.int32)
    offsets = (last % page_size).astype(np.int32)
    kv[LAYER, :, page_ids, :, offsets] = math.nan
    kv = np.where(np.isnan(kv), fill, kv)
    q = random.standard_normal((len(context), num_heads, head_size))
    k, v = random.standard_normal((2, len(context), num_kv_heads, head_size))
    for side, place, number in bad:
        (k, v)[side][place] = number
    q, k, v, kv = (jnp.asarray(a, dtype) for a in (q, k, v, kv))
    where = jnp.int32(LAYER), *map(jnp.asarray, (table, page_ids, offsets, np.asarray(context, np.int32)))
    options = {"scale": head_size**-0.5, "pool_is_finite": not math.isnan(fill), **options}
    out, pool = jax.jit(functools.partial(write_and_attend, tiling=tiling, interpreted=True, **options))(q, k, v, kv, *where)

    wide = (a.astype(jnp.float32) for a in (q, k, v, kv))
    expected, _ = op(*wide, *where, backend="reference", **options)
    rounding = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2 * rounding, atol=2 * rounding)
    after = np.array(kv)
    for row in rows[np.asarray(context) > 0]:
        for side, new in enumerate((np.asarray(k), np.asarray(v))):
            after[LAYER, side, page_ids[row], :, offsets[row]] = np.where(np.isfinite(new[row].astype(np.float32)), new[row], 0)
    np.testing.assert_array_equal(np.asarray(pool).view(np.uint16), after.view(np.uint16))


@pytest.mark.parametrize("page_size", [8, pytest.param(16, marks=pytest.mark.exhaustive), 64])
def test_contexts_that_end_anywhere_in_a_page_and_in_a_tile(page_size):
    """One token, the last place of a page or tile, the first of the next, none at all."""
    check((1, page_size, 0, page_size + 1, 65, 130), page_size=page_size)


def test_kv_splits_are_combined():
    """The new token is in one of them, which may have no tile; some shares have none either."""
    check((300, 70, 0, 1, 65), tiling=DecodeTiling(64, 2, 3, writes=True))


@pytest.mark.exhaustive
def test_kv_splits_of_more_stages_are_combined():
    check((300, 129), tiling=DecodeTiling(64, 3, 2, warpgroups=1, writes=True))


def test_a_pool_that_is_promised_finite():
    check((20, 1, 0, 128, 129), fill=3e4)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "page_size"),
    [(9, 3, 64, 16), (128, 1, 64, 16), *(pytest.param(*sizes, marks=pytest.mark.exhaustive) for sizes in ((1, 1, 80, 8), (2, 1, 256, 16)))],
)
def test_groups_and_heads_of_every_size(num_heads, num_kv_heads, head_size, page_size):
    check((66, 3), num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, page_size=page_size)


@pytest.mark.parametrize(
    "options",
    [
        {"span": Span(window=70)},
        {"span": Span(chunk=64)},  # in which one of the contexts has just begun
        *(
            pytest.param(options, marks=pytest.mark.exhaustive)  # as where the token is written by itself
            for options in ({"span": Span(window=1)}, {"soft_cap": 2.0}, {"dtype": jnp.float16})
        ),
    ],
    ids=str,
)
def test_spans_caps_and_types(options):
    check((20, 230, 65, 0), tiling=DecodeTiling(64, 2, 2, writes=True), **options)


def test_what_is_no_finite_number_is_stored_and_attended_to_as_zero():
    bad = [(0, (0, 0, 3), math.nan), (0, (1, 0, 0), -math.inf), (1, (0, 0, 5), math.inf), (1, (1, 0, 7), math.nan)]
    check((70, 1), bad=bad)


def test_float8_pages_are_written_by_themselves():
    pool, row = jnp.zeros((1, 2, 4, 1, 16, 64), jnp.float8_e4m3fn), jnp.zeros((1, 1, 64), jnp.bfloat16)
    where = jnp.int32(0), jnp.zeros((1, 2), jnp.int32), *(jnp.ones(1, jnp.int32) for _ in range(3))
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        write_and_attend(row, row, row, pool, *where, tiling=ONE_SHARE, scale=1.0, pool_is_finite=True)
