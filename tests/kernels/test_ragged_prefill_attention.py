"""ragged_prefill_attention: every way to run it against the reference, and the reference against plain NumPy."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.llvm import host
from pallas_kernels.ragged_prefill_attention import llvm_cpu
from pallas_kernels.ragged_prefill_attention.cases import CASES, PrefillCase
from pallas_kernels.ragged_prefill_attention.op import ragged_prefill_attention, unsupported_reason
from pallas_kernels.span import Span
from tests.kernels.poisoned_pool import LAYER, poisoned_pool


@functools.partial(jax.jit, static_argnames=("scale", "query_tile", "backend", "pool_is_finite", "span", "soft_cap"))
def run(q, kv, *others, **options):
    return ragged_prefill_attention(q, kv, LAYER, *others, **options)


def arguments(case: PrefillCase, seed: int, dtype: jnp.dtype = jnp.float32, num_rows: int | None = None):
    """Rows one after another, each at the next whole tile; queries that belong to none are NaN."""
    random = np.random.default_rng(seed)
    cached, new = zip(*case.rows, strict=True)
    kv, table = poisoned_pool(random, [c + n for c, n in case.rows], case.num_kv_heads, case.page_size, case.head_size)
    q = np.full((case.num_tokens, case.num_heads, case.head_size), np.nan, np.float32)
    starts, at = [], 0
    for length in new:
        starts.append(at)
        q[at : at + length] = random.standard_normal((length, case.num_heads, case.head_size))
        at += -(-length // case.query_tile) * case.query_tile
    unused = (num_rows or len(new) + 1) - len(new)
    table = np.pad(table, ((0, unused), (0, 0)))
    rows = [np.pad(a, (0, unused)).astype(np.int32) for a in (starts, new, np.add(cached, new))]
    return [jnp.asarray(a, dtype) for a in (q, kv)] + [jnp.asarray(a) for a in (table, *rows)]


def both(case: PrefillCase, inputs, backend: str):
    """What a backend finds, and the reference."""
    options = {"scale": case.head_size**-0.5, "query_tile": case.query_tile}
    return (np.asarray(run(*inputs, **options, backend=backend)) for backend in (backend, "reference"))


def plain(q, kv, table, query_start, query_len, kv_len, scale, seen=lambda query, key: True, soft_cap=None):
    """One token and one head at a time, in float64. `seen`: whether a query at one position attends to a key at or before it."""
    out = np.zeros(q.shape)
    num_kv_heads, page_size = kv.shape[3:5]
    for row, length in enumerate(query_len):
        for i in range(length):
            position = kv_len[row] - length + i
            places = [(table[row, p // page_size], p % page_size) for p in range(position + 1) if seen(position, p)]
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // num_kv_heads)
                keys, values = (np.array([pool[page, kv_head, place] for page, place in places], np.float64) for pool in kv[LAYER])
                scores = keys @ q[query_start[row] + i, head].astype(np.float64) * scale
                scores = scores if soft_cap is None else np.tanh(scores / soft_cap) * soft_cap
                weights = np.exp(scores - scores.max())
                out[query_start[row] + i, head] = weights / weights.sum() @ values
    return out


def test_the_reference_is_causal_attention_over_cache_and_chunk():
    case = PrefillCase("small", 4, 2, 8, 4, 24, 8, ((0, 5), (9, 3), (2, 8)))
    inputs = arguments(case, 0)
    out = run(*inputs, scale=0.3, query_tile=8, backend="reference")
    np.testing.assert_allclose(out, plain(*map(np.asarray, inputs), 0.3), atol=1e-5)


SPANS = {
    Span(window=1): lambda query, key: query == key,
    Span(window=7): lambda query, key: query - key < 7,
    Span(window=150): lambda query, key: query - key < 150,
    Span(chunk=8): lambda query, key: query // 8 == key // 8,
    Span(chunk=50): lambda query, key: query // 50 == key // 50,
}
SPANNED = PrefillCase("spanned", 4, 2, 8, 4, 96, 32, ((0, 20), (150, 9), (300, 21)))


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_windows_and_chunks(span, backend):
    for case in (SPANNED, replace(SPANNED, rows=((190, 50),))):  # each row a tile of its own; all of the step one tile
        inputs = arguments(case, 12)
        out = run(*inputs, scale=0.3, query_tile=32, backend=backend, span=span)
        np.testing.assert_allclose(out, plain(*map(np.asarray, inputs), 0.3, SPANS[span]), atol=1e-5)


@pytest.mark.parametrize("rows", [((1000, 20), (900, 30)), ((800, 60),)])
@pytest.mark.parametrize("span", [Span(window=50), Span(chunk=400)])
def test_pages_before_a_span_are_not_read(rows, span):
    """They may be another request's by now. Promised finite, yet NaN, they would come out if they were read; else nothing is promised."""
    case = replace(SPANNED, rows=rows)
    q, kv, table, *others = arguments(case, 13)
    expected = run(q, kv, table, *others, scale=0.3, query_tile=32, backend="reference", span=span)
    first = min(cached - 49 if span.window else cached // 400 * 400 for cached, _ in rows)
    before = table[: len(rows), : (first - 128) // 4]  # but for a run's length
    finite = jnp.nan_to_num(kv).at[:, :, before].set(jnp.nan)
    out = run(q, finite, table, *others, scale=0.3, query_tile=32, backend="xla", span=span, pool_is_finite=True)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    assert np.any(expected)
    spoilt = kv.at[:, :, table[: len(rows), : first // 4]].set(jnp.nan)
    for backend in ("xla", "reference"):
        out = run(q, spoilt, table, *others, scale=0.3, query_tile=32, backend=backend, span=span)
        np.testing.assert_allclose(out, expected, atol=2e-5)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_soft_caps(backend):
    q, *others = arguments(SPANNED, 14)
    q *= 5
    out = run(q, *others, scale=1.0, query_tile=32, backend=backend, soft_cap=3.0)
    np.testing.assert_allclose(out, plain(*map(np.asarray, (q, *others)), 1.0, soft_cap=3.0), atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "llvm_cpu"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_backend_is_the_reference_on_the_shapes_of_real_models(case, backend):
    found, reference = both(case, arguments(case, 1), backend)
    np.testing.assert_allclose(found, reference, atol=2e-5)
    assert np.any(reference)


@pytest.mark.parametrize("backend", ["xla", "llvm_cpu"])
def test_the_only_row_may_begin_anywhere_and_there_may_be_none(backend):
    case = PrefillCase("late", 4, 2, 16, 8, 96, 32, ((20, 40),))
    q, kv, table, query_start, query_len, kv_len = arguments(case, 3)
    late = (jnp.roll(q, 32, axis=0), kv, table, query_start.at[0].set(32), query_len, kv_len)
    found, reference = both(case, late, backend)
    np.testing.assert_allclose(found, reference, atol=2e-5)
    assert np.any(reference[32:72])
    assert not np.any(found[:32])
    nobody = (q, kv, table, query_start, jnp.zeros_like(query_len), jnp.zeros_like(kv_len))
    assert not np.any(next(both(case, nobody, backend)))


@pytest.mark.parametrize("backend", ["xla", "llvm_cpu"])
def test_every_backend_is_the_reference_whatever_the_lengths(backend):
    random = np.random.default_rng(2)
    for seed in range(12):
        rows = [(247, int(random.integers(1, 10)))]  # at most 256 tokens of context for all seeds: one program
        rows[0] = (256 - rows[0][1], rows[0][1])
        left = 96 - 16
        while left > 0:
            length = int(random.integers(1, left + 1))
            rows.append((int(random.choice([0, random.integers(0, 256 - length + 1)])), length))
            left -= -(-length // 16) * 16
        order = random.permutation(len(rows))
        case = PrefillCase("ragged", 6, 2, 16, 8, 96, 16, tuple(rows[i] for i in order))
        q, kv, *others = arguments(case, seed, num_rows=7)
        kv = jnp.pad(kv, ((0, 0), (0, 0), (0, -kv.shape[2] % 200), (0, 0), (0, 0), (0, 0)), constant_values=jnp.nan)
        found, reference = both(case, (q, kv, *others), backend)
        np.testing.assert_allclose(found, reference, atol=2e-5)


# Head sizes that are cut into unequal parts, groups that fill no whole number of tiles, pages of odd sizes and of more than a run.
ODD = (
    PrefillCase("five-vectors", 7, 1, 80, 16, 64, 32, ((0, 30), (70, 32))),
    PrefillCase("odd-pages", 4, 4, 16, 5, 64, 32, ((61, 64),)),
    PrefillCase("wide-pages", 6, 2, 48, 128, 64, 16, ((300, 7), (0, 16), (126, 9))),
    PrefillCase("wide-heads", 8, 1, 256, 16, 32, 32, ((40, 25),)),
    PrefillCase("a-tile-of-several-rows", 64, 64, 16, 8, 256, 32, ((0, 40), (20, 33), (5, 20), (100, 70))),
    PrefillCase("one-kv-head-of-many", 71, 1, 64, 16, 8, 4, ((100, 7),)),
)


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_every_way_a_cpu_kernel_cuts_its_work(case):
    found, reference = both(case, arguments(case, 7), "llvm_cpu")
    np.testing.assert_allclose(found, reference, atol=2e-5)
    assert np.any(reference)


def test_code_for_processors_without_avx512(monkeypatch):
    plain = replace(host.host_target(), avx512=False, avx512_bf16=False, avx512_vnni=False)
    monkeypatch.setattr(llvm_cpu, "host_target", lambda: plain)
    monkeypatch.setattr(llvm_cpu, "NAME", f"{llvm_cpu.NAME}_plain")
    for case in (CASES[0], ODD[0]):
        inputs = arguments(case, 8)
        options = {"scale": 0.1, "query_tile": case.query_tile}
        found = ragged_prefill_attention(*inputs[:2], LAYER, *inputs[2:], **options, backend="llvm_cpu")
        np.testing.assert_allclose(found, run(*inputs, **options, backend="reference"), atol=2e-5)


@pytest.mark.parametrize("factor", [1e-4, 8.0, 60.0, 1e4])
def test_scores_of_any_size(factor):
    """A row's maximum is found anew only when scores grow by much: by a little, by more, and by so much that all before is nothing."""
    case = PrefillCase("two", 6, 2, 32, 8, 64, 32, ((40, 30), (390, 20)))
    q, kv, *others = arguments(case, 9)
    found, reference = both(case, (q * factor, kv, *others), "llvm_cpu")
    np.testing.assert_allclose(found, reference, atol=2e-6 * max(factor, 1))


def test_a_query_that_is_broken_breaks_no_other():
    case = PrefillCase("two", 6, 2, 32, 8, 64, 32, ((40, 30), (90, 20)))
    q, *others = arguments(case, 9)
    sound, _ = both(case, (q, *others), "llvm_cpu")
    broken, _ = both(case, (q.at[3, 1].set(jnp.nan), *others), "llvm_cpu")
    assert np.isnan(broken[3, 1]).all()
    rest = np.ones(q.shape[:2], bool)
    rest[3, 1] = False
    np.testing.assert_array_equal(broken[rest], sound[rest])


def test_what_the_cpu_kernel_can_not_do_is_said():
    assert unsupported_reason("llvm_cpu", jnp.dtype("float32"), 64, 8, 32) is None
    for dtype, head_size in (("bfloat16", 64), ("float32", 24)):
        assert str(head_size if dtype == "float32" else dtype) in (unsupported_reason("llvm_cpu", jnp.dtype(dtype), head_size, 8, 32) or "")
        case = PrefillCase("", 2, 2, head_size, 8, 32, 32, ((0, 20),))
        q, kv, *others = arguments(case, 10, jnp.dtype(dtype))
        with pytest.raises(ValueError, match="llvm_cpu can't run"):
            ragged_prefill_attention(q, kv, LAYER, *others, scale=1.0, query_tile=32, backend="llvm_cpu")
    inputs = arguments(CASES[0], 10)
    for options in ({"span": Span(window=4)}, {"span": Span(chunk=4)}, {"soft_cap": 3.0}):
        with pytest.raises(ValueError, match=r"llvm_cpu can't run: .* no kernel for windows, chunks or soft caps"):
            run(*inputs, scale=1.0, query_tile=32, backend="llvm_cpu", **options)


def test_a_narrow_query_over_a_float32_pool_is_rounded_once():
    case = CASES[0]
    q, kv, *others = arguments(case, 11)
    narrow = q.astype(jnp.bfloat16)
    found, reference = (
        run(a, kv, *others, scale=0.125, query_tile=32, backend=b)
        for a, b in ((narrow, "llvm_cpu"), (narrow.astype(jnp.float32), "reference"))
    )
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), reference, rtol=2**-8, atol=2**-12)


def test_bfloat16_pools_are_summed_in_float32():
    case = CASES[0]
    inputs = arguments(case, 3, jnp.bfloat16)
    narrow = run(*inputs, scale=0.125, query_tile=case.query_tile, backend="xla")
    assert narrow.dtype == jnp.bfloat16
    wide = [a.astype(jnp.float32) for a in inputs[:2]]
    exact = run(*wide, *inputs[2:], scale=0.125, query_tile=case.query_tile, backend="reference")
    np.testing.assert_allclose(narrow.astype(jnp.float32), exact, rtol=2**-8, atol=2**-12)  # rounded once, at the end


@pytest.mark.parametrize("backend", ["xla", "llvm_cpu", "reference"])
def test_where_the_pool_is_promised_finite_its_unused_places_may_hold_any_number(backend):
    case = CASES[0]
    q, kv, *others = arguments(case, 6)
    expected = run(q, kv, *others, scale=0.125, query_tile=case.query_tile, backend="reference")
    kv = jnp.nan_to_num(kv, nan=3e38)
    out = run(q, kv, *others, scale=0.125, query_tile=case.query_tile, backend=backend, pool_is_finite=True)
    np.testing.assert_allclose(out, expected, atol=2e-5)


@pytest.mark.parametrize("backend", ["xla", "llvm_cpu", "reference"])
def test_tokens_of_no_row_come_out_as_zeros(backend):
    case = CASES[0]
    *inputs, query_start, query_len, kv_len = arguments(case, 4)
    out = np.asarray(run(*inputs, query_start, query_len, kv_len, scale=0.1, query_tile=32, backend=backend))
    in_use = np.zeros(case.num_tokens, bool)
    for start, length in zip(query_start, query_len, strict=True):
        in_use[start : start + length] = True
    assert not in_use.all()
    np.testing.assert_array_equal(out[~in_use], 0)
    assert np.isfinite(out).all()
    nothing = jnp.zeros_like(query_len)
    np.testing.assert_array_equal(run(*inputs, query_start, nothing, nothing, scale=0.1, query_tile=32, backend=backend), 0)


def test_shapes_that_do_not_fit_are_refused_by_name():
    q, kv, table, *rows = arguments(CASES[2], 5)
    options = {"scale": 1.0, "query_tile": 32}
    with pytest.raises(ValueError, match=r"kv_pages .* \[L, 2, P, K, G, H\]"):
        ragged_prefill_attention(q, kv[:, :1], LAYER, table, *rows, **options)
    with pytest.raises(ValueError, match="N a multiple of K"):
        ragged_prefill_attention(q[:, :3], kv, LAYER, table, *rows, **options)
    with pytest.raises(ValueError, match="32 tokens are not a multiple of query_tile 24"):
        ragged_prefill_attention(q, kv, LAYER, table, *rows, scale=1.0, query_tile=24)
    with pytest.raises(ValueError, match="must each have page_table's 2 rows"):
        ragged_prefill_attention(q, kv, LAYER, table, rows[0][:1], *rows[1:], **options)
