"""paged_attention's kernel for GPUs, interpreted on a CPU: what it copies, where, and who waits for whom. What registers hold
is for tests/aot/test_running.py, which runs these tests with what is compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic.card import Card
from pallas_kernels.paged_attention import mosaic_tiling
from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_and_lse
from pallas_kernels.paged_attention.mosaic_tiling import DecodeTiling, tiling_for
from pallas_kernels.paged_attention.op import paged_attention as op
from pallas_kernels.paged_attention.op import paged_attention_and_lse as op_and_lse
from pallas_kernels.span import Span
from tests.kernels.compiled import compiled
from tests.kernels.poisoned_pool import LAYER, poisoned_pool

op, op_and_lse = compiled(op), compiled(op_and_lse)


def check(
    context, *, tokens=None, num_heads=4, num_kv_heads=1, head_size=64, page_size=16, tiling=None, dtype=jnp.bfloat16, seed=0, **options
):
    """Interpreted as the reference has it, up to the output's rounding. Unused places are NaN, and so is the output before. `tokens`: how many
    have queries, if not one."""
    random = np.random.default_rng(seed)
    kv, table = poisoned_pool(random, context, num_kv_heads, page_size, head_size)
    q = random.standard_normal((len(context), *([tokens] if tokens else []), num_heads, head_size), np.float32)
    arguments = *(jnp.asarray(a, dtype) for a in (q, kv)), jnp.int32(LAYER), jnp.asarray(table), jnp.asarray(context, jnp.int32)
    options = {"scale": head_size**-0.5, "pool_is_finite": False, **options}
    run = jax.jit(functools.partial(paged_attention_and_lse, tiling=tiling, interpreted=True, **options))
    wide = *(a.astype(jnp.float32) for a in arguments[:2]), *arguments[2:]
    expected = op(*wide, backend="reference", **options)
    rounding = float(jnp.finfo(dtype).eps)
    found, lse = run(*arguments)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=2 * rounding, atol=2 * rounding)
    if options.keys() <= {"scale", "pool_is_finite", "value_size"}:
        check_lse(lse, op_and_lse(*wide, backend="reference", **options)[1])


def check_lse(found, expected):
    """Up to its rounding, and of a row without context as good as nothing."""
    is_nothing = np.asarray(expected) < -1e29
    np.testing.assert_array_equal(np.asarray(found) < -1e29, is_nothing)
    np.testing.assert_allclose(np.asarray(found)[~is_nothing], np.asarray(expected)[~is_nothing], rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.exhaustive if case.num_heads > 8 else ()) for case in CASES]
)
def test_the_shapes_of_real_models(case):
    shape = {"num_heads": case.num_heads, "num_kv_heads": case.num_kv_heads, "head_size": case.head_size, "page_size": case.page_size}
    check(case.context, **shape, tiling=DecodeTiling(64, 2, 1))


@pytest.mark.exhaustive  # the next test's are of each kind
def test_random_lengths():
    random = np.random.default_rng(4)
    check(tuple(random.integers(1, 400, 5).tolist()), tiling=DecodeTiling(64, 4, 2), seed=4)


def test_contexts_of_any_length():
    """Shorter than a page, a tile to the token, more tiles than stages; one of no token at all."""
    check((1, 64, 0, 65, 250), tiling=DecodeTiling(64, 2, 1))


def test_kv_splits_are_combined():
    """Some shares have no tile; a whole context has none."""
    check((300, 70, 0), tiling=DecodeTiling(64, 2, 3))
    check((300,), tiling=DecodeTiling(64, 1, 2, warpgroups=1))


@pytest.mark.exhaustive
def test_kv_splits_of_more_stages_and_wider_heads_are_combined():
    check((300,), tiling=DecodeTiling(64, 3, 2, warpgroups=1))
    check((300, 0), tiling=DecodeTiling(64, 2, 3), head_size=128)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "page_size"),
    [(1, 1, 80, 8), (6, 1, 96, 64), (2, 1, 192, 32), (2, 1, 256, 128)],
)
def test_groups_heads_and_pages_of_every_size(num_heads, num_kv_heads, head_size, page_size):
    check((130,), num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, page_size=page_size)


@pytest.mark.parametrize("options", [{"span": Span(window=70)}, {"span": Span(chunk=100)}, {"soft_cap": 2.0}, {"dtype": jnp.float16}])
def test_spans_caps_and_types(options):
    """A window of the second context begins with the second token of a tile."""
    check((20, 199), tiling=DecodeTiling(64, 2, 2), **options)


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        pytest.param(2, {}, marks=pytest.mark.exhaustive),
        (4, {"span": Span(window=70), "tiling": DecodeTiling(64, 2, 2)}),  # the last one's begins in a later tile than the first one's
        pytest.param(3, {"span": Span(chunk=100), "num_heads": 10, "num_kv_heads": 2}, marks=pytest.mark.exhaustive),
        (5, {"num_heads": 15, "soft_cap": 2.0}),  # 75 rows: of several tiles
    ],
)
def test_each_of_several_tokens_sees_what_comes_before_it(tokens, options):
    """Contexts that have them in two tiles, in two shares of which the first tokens see one; fewer than the tokens; none."""
    check((65, 130, 2, 0), tokens=tokens, **{"tiling": DecodeTiling(64, 2, 3), **options})


def test_pages_before_a_span_are_not_read():
    """Tiles wholly before it hold NaN in a pool that is promised finite: a weight of 0 would bring them out."""
    random, context, span = np.random.default_rng(1), (300,), Span(window=40)
    kv, table = poisoned_pool(random, context, 1, 16, 64)
    q = jnp.asarray(random.standard_normal((1, 4, 64)), jnp.bfloat16)
    rest = jnp.int32(LAYER), jnp.asarray(table), jnp.asarray(context, jnp.int32)
    clean = jnp.asarray(np.nan_to_num(kv), jnp.bfloat16)
    expected = op(q, clean, *rest, scale=0.1, span=span, backend="reference")
    spoilt = clean.at[:, :, table[0, :16]].set(jnp.nan)  # the first 256 of 300 tokens; the span starts at 260
    found, _ = paged_attention_and_lse(
        q, spoilt, *rest, scale=0.1, pool_is_finite=True, span=span, tiling=DecodeTiling(64, 2, 1), interpreted=True
    )
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), atol=0.02)


def test_a_scale_that_turns_scores_around_is_refused():
    kv, table = poisoned_pool(np.random.default_rng(2), (5,), 1, 16, 64)
    arguments = jnp.zeros((1, 1, 64), jnp.bfloat16), jnp.asarray(kv, jnp.bfloat16), jnp.int32(0), jnp.asarray(table), jnp.full(1, 5)
    with pytest.raises(ValueError, match="scale -1 must be positive"):
        paged_attention_and_lse(*arguments, scale=-1, pool_is_finite=False, tiling=DecodeTiling(64, 2, 1), interpreted=True)


@pytest.mark.parametrize(("is_finite", "head_size"), [(False, 64), pytest.param(True, 96, marks=pytest.mark.exhaustive), (True, 128)])
def test_float8_pages_are_widened_and_scaled(is_finite, head_size):
    """A head's keys by 0, so that all tokens count the same, but for those that are none."""
    random, context, num_kv_heads = np.random.default_rng(2), (70, 5), 2
    kv, table = poisoned_pool(random, context, num_kv_heads, 16, head_size)
    scales = jnp.asarray(random.uniform(0.01, 0.1, (len(kv), 2, num_kv_heads)), jnp.float32)
    kv = jnp.asarray(np.nan_to_num(kv) if is_finite else kv)
    narrow = (kv / scales[:, :, None, :, None, None]).astype(jnp.float8_e4m3fn)
    scales = scales.at[:, 0, 1].set(0)
    q = jnp.asarray(random.standard_normal((2, 6, head_size)), jnp.bfloat16)
    arguments = q, narrow, jnp.int32(LAYER), jnp.asarray(table), jnp.asarray(context, jnp.int32)
    options = {"scale": 0.125, "pool_is_finite": is_finite, "kv_scales": scales}
    expected = op(q.astype(jnp.float32), *arguments[1:], backend="reference", **options)
    found, _ = jax.jit(functools.partial(paged_attention_and_lse, interpreted=True, tiling=DecodeTiling(64, 2, 1), **options))(*arguments)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("num_heads", "head_size", "value_size", "page_size", "splits"),
    [(16, 192, 128, 64, 1), (128, 576, 512, 64, 2), (16, 192, 128, 128, 2), (16, 384, 384, 64, 1)],
)
def test_latents(num_heads, head_size, value_size, page_size, splits):
    """Values that are columns of the keys, or all of them; query heads of several tiles; results of two warpgroups, of which one has the scores; pages
    of several tiles; a share and a context without tokens, whose weight is nothing."""
    random, context = np.random.default_rng(3), (150, 20, 0)
    kv, table = poisoned_pool(random, context, 1, page_size, head_size)
    q = jnp.asarray(random.standard_normal((len(context), num_heads, head_size)), jnp.bfloat16)
    arguments = q, jnp.asarray(kv[:, :1], jnp.bfloat16), jnp.int32(LAYER), jnp.asarray(table), jnp.asarray(context, jnp.int32)
    options = {"scale": head_size**-0.5, "pool_is_finite": False, "value_size": value_size}
    wide = *(a.astype(jnp.float32) for a in arguments[:2]), *arguments[2:]
    expected, expected_lse = op_and_lse(*wide, backend="reference", **options)
    tiling = DecodeTiling(64, 2, splits, warpgroups=1)
    found, lse = jax.jit(functools.partial(paged_attention_and_lse, interpreted=True, tiling=tiling, **options))(*arguments)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0.02, atol=0.02)
    check_lse(lse, expected_lse)
    if value_size > 256:
        with pytest.raises(ValueError, match=f"{value_size} columns of a result leave no warpgroups to take turns, not 2"):
            paged_attention_and_lse(*arguments, interpreted=True, tiling=DecodeTiling(64, 2, splits, warpgroups=2), **options)


def test_latents_of_several_tokens():
    random, context = np.random.default_rng(5), (150, 66, 1)
    kv, table = poisoned_pool(random, context, 1, 64, 192)
    q = jnp.asarray(random.standard_normal((len(context), 2, 40, 192)), jnp.bfloat16)  # of 80 rows
    arguments = q, jnp.asarray(kv[:, :1], jnp.bfloat16), jnp.int32(LAYER), jnp.asarray(table), jnp.asarray(context, jnp.int32)
    options = {"scale": 192**-0.5, "pool_is_finite": False, "value_size": 128}
    wide = *(a.astype(jnp.float32) for a in arguments[:2]), *arguments[2:]
    expected, expected_lse = op_and_lse(*wide, backend="reference", **options)
    tiling = DecodeTiling(64, 2, 2, warpgroups=1)
    found, lse = jax.jit(functools.partial(paged_attention_and_lse, interpreted=True, tiling=tiling, **options))(*arguments)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0.02, atol=0.02)
    check_lse(lse, expected_lse)


def test_a_tiling_fills_the_gpu_and_no_more():
    dtype = jnp.dtype("bfloat16")
    assert tiling_for(1, 8, 4, 128, 16, 131072, dtype) == DecodeTiling(64, 6, 16)
    assert tiling_for(32, 8, 4, 128, 16, 131072, dtype).splits == 1
    assert tiling_for(1, 8, 4, 128, 16, 512, dtype).splits == 2, "a share is worth its block"
    assert tiling_for(1, 8, 4, 128, 128, 512, dtype).tokens == 128
    for page_size in (16, 64, 128, 256):
        assert tiling_for(1, 1, 128, 576, page_size, 131072, dtype, is_latent=True) == DecodeTiling(64, 2, 66, warpgroups=1)


def test_a_tiling_fits_a_card_with_less_shared_memory(monkeypatch):
    """A tile for all of a page where there is room, then one warpgroup, then one stage."""
    monkeypatch.setattr(mosaic_tiling, "card_for", lambda _: Card(False, 101_376, 188))
    bfloat16, float8 = jnp.dtype("bfloat16"), jnp.dtype("float8_e4m3fn")
    assert tiling_for(1, 8, 4, 128, 16, 131072, bfloat16) == DecodeTiling(64, 2, 23)
    assert tiling_for(1, 8, 4, 64, 128, 131072, bfloat16) == DecodeTiling(128, 2, 23)
    assert tiling_for(1, 8, 4, 128, 128, 131072, bfloat16) == DecodeTiling(64, 2, 23)
    assert tiling_for(1, 8, 4, 96, 16, 131072, float8) == DecodeTiling(64, 4, 23, warpgroups=1)
    assert tiling_for(1, 8, 4, 128, 16, 131072, float8) == DecodeTiling(64, 1, 23, warpgroups=1)
