"""paged_attention: every way to run it against the reference, and the reference against plain NumPy."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.llvm import host
from pallas_kernels.page_write import write
from pallas_kernels.paged_attention import llvm_cpu
from pallas_kernels.paged_attention.cases import CASES, DecodeCase
from pallas_kernels.paged_attention.op import paged_attention, paged_attention_and_lse, unsupported_reason, write_and_attend
from pallas_kernels.span import Span
from tests.kernels.compiled import compiled
from tests.kernels.poisoned_pool import LAYER, poisoned_pool

paged_attention, paged_attention_and_lse = compiled(paged_attention), compiled(paged_attention_and_lse)


@functools.partial(jax.jit, static_argnames=("scale", "backend", "pool_is_finite", "span", "soft_cap"))
def run(q, kv, *others, **options):
    return paged_attention(q, kv, LAYER, *others, **options)


def arguments(case: DecodeCase, context: tuple[int, ...], seed: int, dtype: jnp.dtype = jnp.float32):
    random = np.random.default_rng(seed)
    kv, table = poisoned_pool(random, context, case.num_kv_heads, case.page_size, case.head_size)
    q = random.standard_normal((len(context), case.num_heads, case.head_size), np.float32)
    return *(jnp.asarray(a, dtype) for a in (q, kv)), jnp.asarray(table), jnp.asarray(context, jnp.int32)


def plain(q, kv, table, kv_len, scale, seen=lambda query, key: True, soft_cap=None):
    """One request and one head at a time, in float64. `seen`: whether a query at one position attends to a key at another."""
    out = np.zeros(q.shape)
    num_kv_heads, page_size = kv.shape[3:5]
    for row, length in ((r, n) for r, n in enumerate(kv_len) if n):
        places = [(table[row, p // page_size], p % page_size) for p in range(length) if seen(length - 1, p)]
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // num_kv_heads)
            keys, values = (np.array([pool[page, kv_head, place] for page, place in places], np.float64) for pool in kv[LAYER])
            scores = keys @ q[row, head].astype(np.float64) * scale
            scores = scores if soft_cap is None else np.tanh(scores / soft_cap) * soft_cap
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ values
    return out


def test_the_reference_is_attention():
    case = DecodeCase("small", 4, 2, 8, 4, (1, 4, 5, 11))
    q, kv, table, kv_len = arguments(case, case.context, 0)
    out = run(q, kv, table, kv_len, scale=0.3, backend="reference")
    np.testing.assert_allclose(out, plain(*map(np.asarray, (q, kv, table, kv_len)), 0.3), atol=1e-5)


SPANS = {
    Span(window=1): lambda query, key: query == key,
    Span(window=7): lambda query, key: query - key < 7,
    Span(window=100): lambda query, key: query - key < 100,
    Span(chunk=8): lambda query, key: query // 8 == key // 8,
    Span(chunk=64): lambda query, key: query // 64 == key // 64,
}


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_windows_and_chunks(span, backend):
    case = DecodeCase("", 4, 2, 16, 4, (1, 7, 8, 9, 64, 65, 128, 300, 0))
    q, kv, table, kv_len = arguments(case, case.context, 14)
    out = np.asarray(run(q, kv, table, kv_len, scale=0.3, backend=backend, span=span))
    np.testing.assert_allclose(out[:-1], plain(*map(np.asarray, (q, kv, table, kv_len)), 0.3, SPANS[span])[:-1], atol=1e-5)
    np.testing.assert_array_equal(out[-1], 0)


def test_pages_before_a_span_are_not_read():
    """They may be another request's by now: promised finite, yet NaN, which would come out if it were read."""
    case = DecodeCase("", 4, 2, 16, 4, (1000, 900))
    for span, first in ((Span(window=50), 850), (Span(chunk=400), 800)):
        q, kv, table, kv_len = arguments(case, case.context, 15)
        expected = run(q, kv, table, kv_len, scale=0.3, backend="reference", span=span)
        before = table[:, : (first - 256) // 4]  # but for a run's length
        kv = jnp.nan_to_num(kv).at[:, :, before].set(jnp.nan)
        out = run(q, kv, table, kv_len, scale=0.3, backend="xla", span=span, pool_is_finite=True)
        np.testing.assert_allclose(out, expected, atol=2e-5)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_soft_caps(backend):
    case = DecodeCase("", 4, 2, 16, 4, (1, 9, 64))
    q, kv, table, kv_len = arguments(case, case.context, 16)
    q *= 5
    out = run(q, kv, table, kv_len, scale=1.0, backend=backend, soft_cap=3.0)
    np.testing.assert_allclose(out, plain(*map(np.asarray, (q, kv, table, kv_len)), 1.0, soft_cap=3.0), atol=1e-5)


def quantized(kv, num_kv_heads, seed):
    """A pool in float8 whose heads need scales of their own, and those."""
    scales = jnp.asarray(np.random.default_rng(seed).uniform(0.005, 0.1, (kv.shape[0], kv.shape[1], num_kv_heads)), jnp.float32)
    return (kv / scales[:, :, None, :, None, None]).astype(jnp.float8_e4m3fn), scales


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_float8_pages_with_scales(backend):
    case = DecodeCase("", 4, 2, 16, 4, (1, 9, 64))
    q, kv, table, kv_len = arguments(case, case.context, 17)
    narrow, scales = quantized(kv, 2, 17)
    wide = np.asarray(narrow.astype(jnp.float32) * scales[:, :, None, :, None, None])
    out = paged_attention(q, narrow, jnp.int32(LAYER), table, kv_len, scale=0.3, backend=backend, kv_scales=scales)
    np.testing.assert_allclose(out, plain(np.asarray(q), wide, np.asarray(table), np.asarray(kv_len), 0.3), atol=1e-5)
    with pytest.raises(ValueError, match=r"kv_scales .* \[L, 2, K\]"):
        paged_attention(q, narrow, jnp.int32(LAYER), table, kv_len, scale=0.3, backend=backend, kv_scales=scales[0])


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_values_that_are_columns_of_latents(backend):
    case = DecodeCase("", 8, 1, 24, 4, (1, 9, 64))
    q, kv, table, kv_len = arguments(case, case.context, 18)
    latents = kv[:, :1]
    out = paged_attention(q, latents, jnp.int32(LAYER), table, kv_len, scale=0.3, backend=backend, value_size=16)
    both = np.concatenate([latents, latents], 1)
    np.testing.assert_allclose(out, plain(np.asarray(q), both, np.asarray(table), np.asarray(kv_len), 0.3)[..., :16], atol=1e-5)
    with pytest.raises(ValueError, match=r"\[L, 1, P, K, G, H\]"):
        paged_attention(q, kv, jnp.int32(LAYER), table, kv_len, scale=0.3, backend=backend, value_size=16)
    with pytest.raises(ValueError, match="value_size is 25: latents have 24 columns"):
        paged_attention(q, latents, jnp.int32(LAYER), table, kv_len, scale=0.3, backend=backend, value_size=25)


def in_parts(pool: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Each device's part of every page."""
    return np.split(np.asarray(pool), num_parts, axis=4)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("value_size", [None, 16])
def test_the_logarithm_of_the_sum_puts_parts_of_a_context_together(backend, value_size):
    """Tokens of every page are dealt out to four; some contexts have none in a part, one has none at all."""
    case, random = DecodeCase("", 8, 1 if value_size else 2, 24, 8, (1, 2, 5, 9, 64, 300, 0)), np.random.default_rng(20)
    q, kv, table, kv_len = arguments(case, tuple(random.permutation(case.context).tolist()), 19)
    q *= 4  # weights that differ by much
    pool = kv if value_size is None else kv[:, :1]
    rest = {"scale": 0.3, "backend": backend, "value_size": value_size}
    whole = paged_attention(q, pool, jnp.int32(LAYER), table, kv_len, **rest | {"backend": "reference"})
    found = []
    for part, of_part in enumerate(in_parts(pool, 4)):
        held = [sum(place % 8 // 2 == part for place in range(length)) for length in np.asarray(kv_len).tolist()]
        found.append(paged_attention_and_lse(q, jnp.asarray(of_part), jnp.int32(LAYER), table, jnp.asarray(held), **rest))
        assert np.isfinite(found[-1][0]).all() and np.isfinite(found[-1][1]).all()
        np.testing.assert_array_equal(np.asarray(found[-1][1])[np.array(held) == 0] < -1e29, True)
    outs, sums = (np.stack(arrays).astype(np.float64) for arrays in zip(*found, strict=True))
    weights = np.exp(sums - sums.max(0))
    together = (outs * (weights / weights.sum(0))[..., None]).sum(0)
    np.testing.assert_allclose(together, whole, atol=2e-5)
    _, of_whole = paged_attention_and_lse(q, pool, jnp.int32(LAYER), table, kv_len, **rest | {"backend": "reference"})
    np.testing.assert_allclose(np.log(weights.sum(0)) + sums.max(0), np.asarray(of_whole), atol=1e-4, rtol=1e-6)


def test_the_logarithm_is_of_the_scores_exponentials():
    q, kv, table, kv_len = arguments(DecodeCase("", 4, 2, 16, 4, ()), (5, 11), 21)
    _, lse = paged_attention_and_lse(q, kv, jnp.int32(LAYER), table, kv_len, scale=0.3, backend="reference")
    for row, head in ((0, 3), (1, 0)):
        keys = [np.asarray(kv)[LAYER, 0, table[row, p // 4], head // 2, p % 4].astype(np.float64) for p in range(int(kv_len[row]))]
        scores = np.array(keys) @ np.asarray(q)[row, head] * 0.3
        np.testing.assert_allclose(lse[row, head], np.log(np.exp(scores).sum()), rtol=1e-5)
    with pytest.raises(ValueError, match=r"llvm_cpu can't run: .* or sums of exponentials"):
        paged_attention_and_lse(q, kv, jnp.int32(LAYER), table, kv_len, scale=0.3, backend="llvm_cpu")


FEW = DecodeCase("", 6, 2, 24, 8, (1, 3, 8, 9, 64, 70, 300, 0))
OPTIONS = [{}, {"span": Span(window=2)}, {"span": Span(window=50)}, {"span": Span(chunk=4)}, {"soft_cap": 3.0}, {"value_size": 16}]


@pytest.mark.parametrize("options", [*OPTIONS, {"kv_scales": None}], ids=str)
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_each_of_several_tokens_gets_what_it_gets_alone(backend, options):
    """The last four of each context, or what there is of them."""
    case = replace(FEW, num_kv_heads=1) if "value_size" in options else FEW
    _, kv, table, kv_len = arguments(case, case.context, 22)
    q = jnp.asarray(np.random.default_rng(22).standard_normal((len(case.context), 4, case.num_heads, case.head_size)), jnp.float32)
    if "value_size" in options:
        kv = kv[:, :1]
    if "kv_scales" in options:
        kv, scales = quantized(kv, case.num_kv_heads, 22)
        options = {"kv_scales": scales}
    rest = {"scale": 0.3, **options}
    together = paged_attention(q, kv, jnp.int32(LAYER), table, kv_len, backend=backend, **rest)
    assert np.isfinite(together).all()
    attend = jax.jit(functools.partial(paged_attention, backend="reference", **rest))
    for token in range(4):
        alone = attend(q[:, token], kv, jnp.int32(LAYER), table, jnp.maximum(kv_len - (3 - token), 0))
        np.testing.assert_allclose(together[:, token], alone, atol=1e-5)


def test_several_tokens_have_a_logarithm_of_a_sum_each():
    _, kv, table, kv_len = arguments(FEW, FEW.context, 23)
    q = jnp.asarray(np.random.default_rng(23).standard_normal((len(FEW.context), 2, FEW.num_heads, FEW.head_size)), jnp.float32)
    for backend in ("reference", "xla"):
        out, lse = paged_attention_and_lse(q, kv, jnp.int32(LAYER), table, kv_len, scale=0.3, backend=backend)
        for token in range(2):
            rest = jnp.int32(LAYER), table, jnp.maximum(kv_len - (1 - token), 0)
            alone, own_lse = paged_attention_and_lse(q[:, token], kv, *rest, scale=0.3, backend="reference")
            np.testing.assert_allclose(out[:, token], alone, atol=1e-5)
            is_none = np.asarray(rest[2]) == 0
            np.testing.assert_allclose(lse[:, token][~is_none], own_lse[~is_none], rtol=1e-5, atol=1e-5)
            assert (np.asarray(lse)[is_none, token] < -1e29).all()


def test_pages_before_several_tokens_spans_are_not_read():
    """The first of them begins the earliest; what lies before it is NaN in a pool that is promised finite."""
    case = DecodeCase("", 4, 2, 16, 4, (1000,))
    _, kv, table, kv_len = arguments(case, case.context, 24)
    q = jnp.asarray(np.random.default_rng(24).standard_normal((1, 8, 4, 16)), jnp.float32)
    for span, first in ((Span(window=50), 943), (Span(chunk=331), 662)):  # tokens 992 to 999: their chunks begin at 662 and 993
        expected = paged_attention(q, kv, jnp.int32(LAYER), table, kv_len, scale=0.3, backend="reference", span=span)
        before = table[:, : (first - 256) // 4]
        spoilt = jnp.nan_to_num(kv).at[:, :, before].set(jnp.nan)
        out = paged_attention(q, spoilt, jnp.int32(LAYER), table, kv_len, scale=0.3, backend="xla", span=span, pool_is_finite=True)
        np.testing.assert_allclose(out, expected, atol=2e-5)


def test_a_span_is_one_thing():
    with pytest.raises(ValueError, match="not both"):
        Span(window=4, chunk=4)
    with pytest.raises(ValueError, match="window is 0"):
        Span(window=0)


FAST = ("llvm_cpu", "xla")


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_shapes_of_real_models_as_the_reference_has_them(case, backend):
    inputs = arguments(case, case.context, 1)
    out = {backend: run(*inputs, scale=case.head_size**-0.5, backend=backend) for backend in (backend, "reference")}
    np.testing.assert_allclose(out[backend], out["reference"], atol=2e-5)


@pytest.mark.parametrize("backend", FAST)
def test_any_lengths_as_the_reference_has_them(backend):
    case, random = DecodeCase("ragged", 6, 2, 16, 8, ()), np.random.default_rng(2)
    for seed in range(12):
        # The longest is always there, so that all seeds share one program.
        context = (*random.integers(1, 300, 6).tolist(), 300)
        q, kv, table, kv_len = arguments(case, tuple(random.permutation(context).tolist()), seed)
        pages = -kv.shape[2] % 300  # nor does the pool's size differ
        kv = jnp.pad(kv, ((0, 0), (0, 0), (0, pages), (0, 0), (0, 0), (0, 0)), constant_values=jnp.nan)
        out = {backend: run(q, kv, table, kv_len, scale=0.25, backend=backend) for backend in (backend, "reference")}
        np.testing.assert_allclose(out[backend], out["reference"], atol=2e-5)


@pytest.mark.parametrize("page_size", [1, 3, 20, 64])
@pytest.mark.parametrize("num_heads", [1, 5, 12])
def test_pages_and_groups_of_any_size(page_size, num_heads):
    """Tiles that span pages and pages that span tiles; query heads that registers hold at once, and more; part of a run, a whole one, more."""
    case = DecodeCase("", num_heads, 1, 48, page_size, (1, 16, 31, 64, 65, 129))
    inputs = arguments(case, case.context, 7)
    out = run(*inputs, scale=0.2, backend="llvm_cpu")
    np.testing.assert_allclose(out, run(*inputs, scale=0.2, backend="reference"), atol=2e-5)


LONG = DecodeCase("long", 4, 2, 16, 32, (4096, 1, 4097, 0, 128, 8300, 129))


def test_long_contexts_are_put_together_from_their_parts():
    inputs = arguments(LONG, LONG.context, 8)
    q, kv, table, kv_len = inputs
    q = q.at[0].mul(10)  # maxima that differ by much: parts count for little, or for all
    expected = run(q, kv, table, kv_len, scale=0.25, backend="reference")
    for _ in range(5):  # whichever thread is last
        np.testing.assert_allclose(run(q, kv, table, kv_len, scale=0.25, backend="llvm_cpu"), expected, atol=2e-5)


def test_a_row_is_the_same_in_any_batch():
    """However many threads its parts are done by, and whatever the others' lengths are."""
    for case in (LONG, CASES[0], replace(CASES[1], context=(700, 33, 130))):
        q, kv, table, kv_len = arguments(case, case.context, 9)
        together = np.asarray(run(q, kv, table, kv_len, scale=0.25, backend="llvm_cpu"))
        for row in range(len(case.context)):
            rows = slice(row, row + 1)
            alone = run(q[rows], kv, table[rows], kv_len[rows], scale=0.25, backend="llvm_cpu")
            np.testing.assert_array_equal(alone[0], together[row])


def test_rows_and_heads_do_not_touch_each_other():
    q, kv, table, kv_len = arguments(LONG, LONG.context, 10)
    sound = np.asarray(run(q, kv, table, kv_len, scale=0.25, backend="llvm_cpu"))
    for bad in (np.nan, np.inf):
        broken = np.array(run(q.at[2, 1].set(bad), kv, table, kv_len, scale=0.25, backend="llvm_cpu"))
        assert np.isnan(broken[2, 1]).all()
        broken[2, 1] = sound[2, 1]
        np.testing.assert_array_equal(broken, sound)


def test_many_calls_at_once():
    """Programs of several meshes share one pool of threads, and each call its parts' counts among those threads only."""
    inputs = arguments(LONG, LONG.context, 11)
    expected = run(*inputs, scale=0.25, backend="llvm_cpu")
    on_devices = [jax.device_put(inputs, device) for device in jax.devices("cpu")[:4]]
    for found in [run(*on_devices[i % len(on_devices)], scale=0.25, backend="llvm_cpu") for i in range(40)]:
        np.testing.assert_array_equal(found, expected)


def test_code_for_processors_without_avx512(monkeypatch):
    """What this machine's processor can run too: fewer query heads at a time."""
    plain = replace(host.host_target(), avx512=False, avx512_bf16=False, avx512_vnni=False)
    monkeypatch.setattr(llvm_cpu, "host_target", lambda: plain)
    monkeypatch.setattr(llvm_cpu, "NAME", f"{llvm_cpu.NAME}_plain")
    for case in CASES:
        q, kv, table, kv_len = arguments(case, case.context, 12)
        out = paged_attention(q, kv, jnp.int32(LAYER), table, kv_len, scale=0.1, backend="llvm_cpu")
        np.testing.assert_allclose(out, run(q, kv, table, kv_len, scale=0.1, backend="reference"), atol=2e-5)


def test_bfloat16_pools_are_summed_in_float32():
    case = CASES[0]
    q, kv, table, kv_len = arguments(case, case.context, 3, jnp.bfloat16)
    out = run(q, kv, table, kv_len, scale=0.125, backend="xla")
    assert out.dtype == jnp.bfloat16
    wide = run(*(a.astype(jnp.float32) for a in (q, kv)), table, kv_len, scale=0.125, backend="reference")
    np.testing.assert_allclose(out.astype(jnp.float32), wide, rtol=2**-8, atol=2**-12)  # rounded once, at the end


@pytest.mark.parametrize("backend", [*FAST, "reference"])
def test_where_the_pool_is_promised_finite_its_unused_places_may_hold_any_number(backend):
    case = CASES[0]
    q, kv, table, kv_len = arguments(case, case.context, 6)
    expected = run(q, kv, table, kv_len, scale=0.125, backend="reference")
    kv = jnp.nan_to_num(kv, nan=3e38)
    out = run(q, kv, table, kv_len, scale=0.125, backend=backend, pool_is_finite=True)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_array_equal(run(q, kv, table, kv_len.at[2].set(0), scale=0.125, backend=backend, pool_is_finite=True)[2], 0)


@pytest.mark.parametrize("backend", [*FAST, "reference"])
def test_rows_without_context_come_out_as_zeros(backend):
    case = CASES[2]
    q, kv, table, kv_len = arguments(case, (5, 64), 4)
    one = run(q, kv, table, kv_len.at[0].set(0), scale=0.1, backend=backend)
    np.testing.assert_array_equal(one[0], 0)
    assert np.isfinite(one).all() and np.any(one[1])
    np.testing.assert_array_equal(run(q, kv, table, jnp.zeros_like(kv_len), scale=0.1, backend=backend), 0)


def test_shapes_that_do_not_fit_are_refused_by_name():
    q, kv, table, kv_len = arguments(CASES[2], (5, 64), 5)
    with pytest.raises(ValueError, match=r"kv_pages .* \[L, 2, P, K, G, H\]"):
        paged_attention(q, kv[:, :1], LAYER, table, kv_len, scale=1.0)
    with pytest.raises(ValueError, match="N a multiple of K"):
        paged_attention(q[:, :3], kv, LAYER, table, kv_len, scale=1.0)
    with pytest.raises(ValueError, match="with the same H"):
        paged_attention(q[:, :, :32], kv, LAYER, table, kv_len, scale=1.0)
    with pytest.raises(ValueError, match="must have q's 2 rows"):
        paged_attention(q, kv, LAYER, table, kv_len[:1], scale=1.0)


def test_what_a_backend_has_no_kernel_for_is_refused():
    float32, bfloat16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
    assert unsupported_reason("llvm_cpu", float32, 96, 8) is None
    assert unsupported_reason("mosaic_gpu", bfloat16, 80, 16, is_plain=False) is None
    assert unsupported_reason("mosaic_gpu", bfloat16, 576, 64, is_latent=True) is None
    assert unsupported_reason("mosaic_gpu", bfloat16, 576, 256, is_latent=True) is None
    assert "pages of 96 tokens" in unsupported_reason("mosaic_gpu", bfloat16, 576, 96, is_latent=True)
    assert "pages of 256 tokens" in unsupported_reason("mosaic_gpu", bfloat16, 64, 256)
    for backend, dtype, head_size, page_size, words in (
        ("llvm_cpu", bfloat16, 64, 8, "bfloat16 pages"),
        ("llvm_cpu", float32, 24, 8, "heads of 24: they must be a multiple of 16"),
        ("mosaic_gpu", float32, 64, 8, "float32 pages"),
        ("mosaic_gpu", bfloat16, 24, 8, "heads of 24: they must be a multiple of 16, at most 256"),
        ("mosaic_gpu", bfloat16, 272, 8, "heads of 272"),
        ("mosaic_gpu", bfloat16, 64, 4, "pages of 4 tokens"),
        ("mosaic_gpu", bfloat16, 64, 24, "pages of 24 tokens"),
        ("mosaic_gpu", jnp.dtype("float8_e4m3fn"), 80, 16, "heads of 80: they must be a multiple of 32"),
    ):
        assert words in unsupported_reason(backend, dtype, head_size, page_size)
        q, kv, table, kv_len = arguments(DecodeCase("", 1, 1, head_size, page_size, ()), (5, 64), 13, dtype)
        with pytest.raises(ValueError, match=words):
            paged_attention(q, kv, LAYER, table, kv_len, scale=1.0, backend=backend)
        paged_attention(q, kv, LAYER, table, kv_len, scale=1.0, backend="xla")
    q, kv, table, kv_len = arguments(DecodeCase("", 2, 2, 64, 8, ()), (5, 64), 13)
    with pytest.raises(ValueError, match="no kernel for several tokens"):
        paged_attention(q[:, None], kv, LAYER, table, kv_len, scale=1.0, backend="llvm_cpu")
    for options in ({"span": Span(window=4)}, {"soft_cap": 3.0}, {"kv_scales": jnp.ones((kv.shape[0], 2, 2))}):
        with pytest.raises(ValueError, match="several tokens, windows, chunks, soft caps, scales, latents"):
            paged_attention(q, kv, LAYER, table, kv_len, scale=1.0, backend="llvm_cpu", **options)


@pytest.mark.parametrize("backend", ["reference", "xla", "llvm_cpu"])
def test_new_tokens_are_written_and_attended_to(backend):
    case = DecodeCase("small", 4, 2, 16, 8, (1, 8, 9, 0))
    q, kv, table, kv_len = arguments(case, case.context, 0)
    k, v = jnp.asarray(np.random.default_rng(1).standard_normal((2, 4, 2, 16)), jnp.float32)
    page_ids, offsets = jnp.where(kv_len > 0, table[jnp.arange(4), (kv_len - 1) // 8], 0), (kv_len - 1) % 8
    attend = jax.jit(functools.partial(write_and_attend, scale=0.3, backend=backend))
    out, pool = attend(q, k, v, kv, jnp.int32(LAYER), table, page_ids, offsets, kv_len)
    np.testing.assert_array_equal(pool, write(kv, LAYER, (k, v), page_ids, offsets))
    np.testing.assert_array_equal(pool[LAYER, 1, page_ids[2], :, 0], v[2])
    np.testing.assert_allclose(out, run(q, pool, table, kv_len, scale=0.3, backend="reference"), atol=1e-5)
    np.testing.assert_allclose(out[0], jnp.repeat(v[0], 2, axis=0), atol=1e-6)  # all that there is to attend to


def test_new_tokens_that_do_not_fit_are_refused():
    q, kv, table, kv_len = arguments(DecodeCase("small", 4, 2, 16, 8, (1,)), (1,), 0)
    k = jnp.zeros((1, 2, 16))
    with pytest.raises(ValueError, match=r"q .* must be \[B, N, H\]: several tokens are written by page_write.write before"):
        write_and_attend(q[:, None], k, k, kv, LAYER, table, kv_len, kv_len, kv_len, scale=1.0)
    for wrong in ((k[:, :1], k, kv_len, kv_len), (k, k[..., :8], kv_len, kv_len), (k, k, kv_len[:0], kv_len)):
        with pytest.raises(ValueError, match="page_ids"):
            write_and_attend(q, *wrong[:2], kv, LAYER, table, *wrong[2:], kv_len, scale=1.0)
