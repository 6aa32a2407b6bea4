"""ragged_prefill_attention's kernel for GPUs, interpreted on a CPU: what it copies, where, and who waits for whom. What registers hold
is for tests/aot/test_running.py, which runs these tests with what is compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic.card import HOPPER
from pallas_kernels.ragged_prefill_attention.mosaic_gpu import ragged_prefill_attention
from pallas_kernels.ragged_prefill_attention.mosaic_tile_work import (
    PrefillTiling,
    TileWork,
    query_tiles,
    split_work,
    splits_for,
    tile_work,
    tiling_for,
)
from pallas_kernels.ragged_prefill_attention.op import ragged_prefill_attention as op
from pallas_kernels.ragged_prefill_attention.op import unsupported_reason
from pallas_kernels.span import FULL_ATTENTION, Span
from pallas_kernels.visibility import first_visible
from tests.kernels.compiled import compiled
from tests.kernels.poisoned_pool import LAYER, poisoned_pool

op = compiled(op)


def arguments(starts, cached, new, num_tokens, *, num_heads=1, num_kv_heads=1, head_size=16, page_size=32, dtype=jnp.bfloat16, unused=1):
    """Queries of no request are NaN, and so is all of the pool that no request may read."""
    random = np.random.default_rng(0)
    kv, table = poisoned_pool(random, np.add(cached, new), num_kv_heads, page_size, head_size)
    q = np.full((num_tokens, num_heads, head_size), np.nan, np.float32)
    for start, length in zip(starts, new, strict=True):
        q[start : start + length] = random.standard_normal((length, num_heads, head_size))
    rows = (jnp.asarray(np.pad(a, (0, unused)), jnp.int32) for a in (starts, new, np.add(cached, new)))
    return *(jnp.asarray(a, dtype) for a in (q, kv)), jnp.int32(LAYER), jnp.pad(jnp.asarray(table), ((0, unused), (0, 0))), *rows


def check(inputs, tiling=None, query_tile=32, splits=None, **options):
    """Interpreted as the reference has it, up to the output's rounding. The output is NaN before."""
    q, kv, *others = inputs
    options = {"scale": 0.3, "query_tile": query_tile, "pool_is_finite": False, **options}
    run = jax.jit(functools.partial(ragged_prefill_attention, tiling=tiling, splits=splits, interpreted=True, **options))
    expected = op(q.astype(jnp.float32), kv.astype(jnp.float32), *others, backend="reference", **options)
    rounding = float(jnp.finfo(q.dtype).eps)
    np.testing.assert_allclose(np.asarray(run(*inputs), np.float32), expected, rtol=2 * rounding, atol=2 * rounding)
    assert np.any(expected)


def test_requests_of_any_length_in_any_order():
    """More tiles of keys than stages after a prefix, none before a whole tile of queries, one token alone; between them tokens of no one."""
    check(arguments((32, 0, 128), (0, 150, 127), (50, 20, 1), 160, num_heads=2), PrefillTiling(2, 64, 2))


@pytest.mark.parametrize(
    "options", [{"span": Span(window=50)}, {"span": Span(chunk=60)}, {"soft_cap": 0.7}, {"dtype": jnp.float16, "pool_is_finite": True}]
)
def test_spans_caps_and_types(options):
    """One head's 128 tokens, of which each warpgroup has half."""
    inputs = arguments((0,), (100,), (120,), 128, dtype=options.pop("dtype", jnp.bfloat16), unused=0)
    if options.get("pool_is_finite"):
        inputs = inputs[0], jnp.nan_to_num(inputs[1], nan=1000.0), *inputs[2:]
    check(inputs, PrefillTiling(1, 64, 2), query_tile=64, **options)


@pytest.mark.parametrize(
    ("splits", "options"),
    [
        pytest.param(3, {"span": Span(window=150)}, marks=pytest.mark.exhaustive),
        (2, {"span": Span(chunk=200), "soft_cap": 0.7}),
        pytest.param(2, {}, marks=pytest.mark.exhaustive),
        pytest.param(3, {"dtype": jnp.float16}, marks=pytest.mark.exhaustive),
    ],
)
def test_kv_splits_are_combined(splits, options):
    """More shares than tiles of keys; shares that only the last queries see; tiles of no request; requests of several tiles."""
    inputs = arguments((64, 0), (190, 30), (90, 5), 160, num_heads=4, num_kv_heads=2, dtype=options.pop("dtype", jnp.bfloat16))
    check(inputs, PrefillTiling(2, 64, 2), splits=splits, **options)


@pytest.mark.parametrize(
    "scale", [pytest.param(0.0625, marks=pytest.mark.exhaustive), 0.08838835, pytest.param(0.125, marks=pytest.mark.exhaustive)]
)
def test_queries_that_see_nothing_of_a_tile_before_others(scale):
    """What counts for nothing is as large as numbers get, and products of it with a scale are rounded, up or down."""
    inputs = arguments((0,), (100,), (120,), 128, unused=0)
    check(inputs, PrefillTiling(1, 64, 2), query_tile=64, span=Span(window=50), scale=scale)
    check(inputs, PrefillTiling(1, 64, 2), query_tile=64, splits=3, scale=scale)


@pytest.mark.parametrize("span", [Span(window=40), Span(chunk=250)])
def test_pages_before_a_span_are_not_read(span):
    """Promised finite, yet NaN: a weight of 0 would bring it out."""
    q, kv, layer, table, *rows = arguments((0,), (300,), (20,), 32, num_heads=4, unused=0)
    clean = jnp.nan_to_num(kv)
    spoilt = clean.at[:, :, table[0, : int(first_visible(span, jnp.int32(300))) // 32]].set(jnp.nan)
    options = {"scale": 0.3, "query_tile": 32, "pool_is_finite": True, "span": span}
    found = ragged_prefill_attention(q, spoilt, layer, table, *rows, tiling=PrefillTiling(4, 64, 2), interpreted=True, **options)
    expected = op(q, clean, layer, table, *rows, backend="reference", **options)
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), atol=0.02)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "page_size"),
    [(4, 2, 64, 64), (3, 1, 16, 64), (4, 1, 192, 16), (4, 1, 128, 256)],
)
def test_groups_heads_and_pages_of_every_size(num_heads, num_kv_heads, head_size, page_size):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "page_size": page_size}
    check(arguments((0,), (130,), (31,), 32, unused=0, **sizes))


SPANS = (FULL_ATTENTION, Span(window=1), Span(window=40), Span(chunk=1), Span(chunk=50))


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("tiling", [PrefillTiling(1, 64, 2), PrefillTiling(4, 128, 2)])
def test_every_tile_has_the_work_of_its_queries(tiling, span):
    """All tokens once, and of keys no fewer and no more than they see: against what each query sees, one by one."""
    random, run, num_tokens = np.random.default_rng(3), 16, 512

    @jax.jit
    def worked_out(query_start, query_len, kv_len):
        return tile_work(query_tiles(query_start, query_len, num_tokens, tiling, 32), kv_len, kv_len, tiling, run, span)

    for _ in range(8):
        order = random.permutation(6)
        lengths = [int(random.choice([0, random.integers(1, 90)])) for _ in order]
        starts, at = np.zeros(6, np.int32), 0
        for row in order:
            at += 32 * int(random.integers(0, 2)) if at + 32 * 4 * 6 < num_tokens else 0
            starts[row], at = at, min(at + -(-lengths[row] // 32) * 32, num_tokens)
            lengths[row] = min(lengths[row], num_tokens - int(starts[row]))
        cached = random.integers(0, 300, 6)
        rows = [jnp.asarray(a, jnp.int32) for a in (starts, lengths, cached + lengths)]
        work = TileWork(*map(np.asarray, worked_out(*rows)))
        work = work._replace(first=work.first * 32, end=work.end * 32)  # tokens, of pieces
        owner = np.full(num_tokens, -1)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            owner[start : start + length] = row
        assert work.first[0] == 0
        assert work.end[-1] == num_tokens
        np.testing.assert_array_equal(work.first[1:], work.end[:-1])
        assert (work.end - work.first <= tiling.queries).all()
        for tile in (TileWork(*fields) for fields in zip(*work, strict=True)):
            used = tile.first + np.flatnonzero(owner[tile.first : tile.end] >= 0)
            np.testing.assert_array_equal(used, tile.first + np.arange(tile.num_queries))
            if not len(used):
                assert tile.num_tiles == 0
                continue
            assert set(owner[used]) == {tile.row}
            position = cached[tile.row] + used - starts[tile.row]
            assert position[0] == tile.position
            key = tile.start * run + np.arange(tile.num_tiles * tiling.tokens)
            first = np.broadcast_to(first_visible(span, jnp.asarray(position)), position.shape)
            seen = (key <= position[:, None]) & (key >= first[:, None])
            assert seen.sum() == (position + 1 - first).sum(), "all that they see"
            assert seen[:, :run].any()
            assert seen.reshape(len(used), tile.num_tiles, tiling.tokens)[:, -1].any()
            whole = seen.all(axis=0).reshape(tile.num_tiles, tiling.tokens).all(axis=1)
            np.testing.assert_array_equal(np.flatnonzero(whole), np.arange(tile.whole, max(tile.edge, tile.whole)))


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("splits", [2, 5])
def test_kv_splits_cover_a_tiles_work(splits, span):
    tokens, run = 64, 16
    start, length, kv_len = (jnp.asarray(a, jnp.int32) for a in ((0, 160, 320), (150, 3, 0), (700, 40, 0)))
    tiling = PrefillTiling(4, tokens, 2)
    work = tile_work(query_tiles(start, length, 512, tiling, 32), kv_len, kv_len, tiling, run, span)
    shares = [TileWork(*map(np.asarray, split_work(work, jnp.int32(share), splits, tokens, run))) for share in range(splits)]
    for tile in range(len(work.first)):
        first = int(work.start[tile]) * run // tokens
        of_kind = {"before": [], "whole": [], "after": []}  # tiles of keys, counted from the context's start where that is at a tile's
        for share in shares:
            begin = first + (int(share.start[tile]) - int(work.start[tile])) * run // tokens
            whole, edge, end = (begin + int(field[tile]) for field in (share.whole, share.edge, share.num_tiles))
            for kind, tiles in zip(of_kind, (range(begin, whole), range(whole, edge), range(edge, end)), strict=True):
                of_kind[kind] += tiles
        whole, edge, end = (first + int(field[tile]) for field in (work.whole, work.edge, work.num_tiles))
        assert of_kind == {"before": list(range(first, whole)), "whole": list(range(whole, edge)), "after": list(range(edge, end))}


@pytest.mark.parametrize("of_run", [64, 112])
def test_runs_of_a_context_have_all_of_it_between_them(of_run):
    """Of tiles that begin in a run, before it and after it: what their queries see of it, by `last`, and which of its tiles they see all of."""
    start, length, kv_len = (np.asarray(a, np.int32) for a in ((0, 96, 160), (70, 3, 0), (300, 40, 0)))
    tiling = PrefillTiling(4, 64, 2)
    tiles = query_tiles(jnp.asarray(start), jnp.asarray(length), 192, tiling, 32)
    seen = np.zeros((192, 320), int)  # how often, of each token of q and each key
    for begin in range(0, 320, of_run):
        before = np.minimum(begin, kv_len)
        work = tile_work(tiles, jnp.asarray(kv_len - before), jnp.asarray(np.clip(kv_len - begin, 0, of_run)), tiling, 16, FULL_ATTENTION)
        work = TileWork(*map(np.asarray, work))
        for tile in range(len(work.first)):
            for i in range(work.num_queries[tile]):
                position, token = work.position[tile] + i, work.first[tile] * 32 + i
                keys = np.arange(work.num_tiles[tile] * tiling.tokens)
                is_seen = keys <= min(position, work.last[tile])
                assert is_seen[: work.edge[tile] * tiling.tokens].all(), "no mask is needed before the edge"
                seen[token, begin + keys[is_seen]] += 1
    for row in range(2):
        for i in range(length[row]):
            position = kv_len[row] - length[row] + i
            np.testing.assert_array_equal(seen[start[row] + i], np.arange(320) <= position)
    assert seen.sum() == sum(sum(range(c - n + 1, c + 1)) for n, c in zip(length, kv_len, strict=True))


def test_few_blocks_split_contexts():
    assert splits_for(num_blocks=8, max_context=131072, card=HOPPER) == 16
    assert splits_for(num_blocks=8, max_context=4096, card=HOPPER) == 8, "a share is worth its block"
    assert splits_for(num_blocks=8, max_context=100, card=HOPPER) == 1
    assert splits_for(num_blocks=128, max_context=131072, card=HOPPER) == 1


def test_a_tiling_has_full_rows_and_fits_shared_memory():
    for group, heads in ((1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 4), (16, 4)):
        assert tiling_for(group, 128, 128, HOPPER) == PrefillTiling(heads, 128, 3)
    for head_size, tokens, stages in ((64, 128, 4), (80, 128, 4), (96, 128, 4), (192, 64, 3), (256, 64, 2)):
        assert tiling_for(4, head_size, head_size, HOPPER) == PrefillTiling(4, tokens, stages)


def test_what_the_kernel_can_not_do_is_said():
    bfloat16 = jnp.dtype("bfloat16")
    assert unsupported_reason("mosaic_gpu", bfloat16, 80, 24, 8, Span(window=4), 30.0) is None
    for dtype, head_size, page_size, words in (
        (jnp.dtype("float32"), 64, 16, "float32 pages"),
        (bfloat16, 24, 16, "heads of 24: they must be a multiple of 16, at most 256"),
        (bfloat16, 272, 16, "heads of 272"),
        (bfloat16, 64, 4, "pages of 4 tokens"),
    ):
        assert words in unsupported_reason("mosaic_gpu", dtype, head_size, page_size, 32)
        inputs = arguments((0,), (0,), (5,), 32, head_size=head_size, page_size=page_size, dtype=dtype)
        with pytest.raises(ValueError, match=f"mosaic_gpu can't run: .*{words}"):
            op(*inputs, scale=1.0, query_tile=32, backend="mosaic_gpu")
    for query_tile, options, words in ((12, {"scale": 1.0}, "tiles of 12 query tokens"), (32, {"scale": -1.0}, "scale -1.0")):
        inputs = arguments((0,), (0,), (5,), 3 * query_tile)
        with pytest.raises(ValueError, match=words):
            op(*inputs, query_tile=query_tile, **options, backend="mosaic_gpu")
