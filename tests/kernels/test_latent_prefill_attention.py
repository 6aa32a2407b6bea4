"""latent_prefill_attention: XLA against the reference, the reference against plain NumPy and against attention over expanded pages."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.latent_prefill_attention import xla
from pallas_kernels.latent_prefill_attention.cases import CASES, LatentPrefillCase
from pallas_kernels.latent_prefill_attention.op import latent_prefill_attention, unsupported_reason
from sharding.mesh import TENSOR, make_mesh
from tests.kernels.poisoned_pool import LAYER, poisoned_pool

SMALL = LatentPrefillCase("small", 3, 8, 6, 4, 5, 4, 24, 8, ((0, 5), (9, 3), (2, 8)))


def over_devices(case: LatentPrefillCase, inputs: list[jax.Array], num_devices: int, backend: str = "xla") -> np.ndarray:
    """Devices have a part of every page, and the heads among them."""
    heads, tokens, whole = PartitionSpec(None, TENSOR), PartitionSpec(None, None, None, None, TENSOR), PartitionSpec()

    def local(q, latents, *others):
        assert latents.shape[4] == case.page_size // num_devices
        return latent_prefill_attention(q, latents, LAYER, *others, **options(case), axis=TENSOR, backend=backend)

    specs, mesh = (heads, tokens, *[whole] * 4, heads), make_mesh(range(num_devices))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(inputs, specs, strict=True)]
    return np.asarray(jax.jit(run)(*placed))


@functools.partial(jax.jit, static_argnames=("scale", "query_tile", "backend", "pool_is_finite"))
def run(q, latents, *others, **options):
    return latent_prefill_attention(q, latents, LAYER, *others, **options)


def arguments(case: LatentPrefillCase, seed: int, dtype: Any = jnp.float32, num_rows: int | None = None) -> list[jax.Array]:
    """Rows one after another, each at the next whole tile; queries that belong to none are NaN."""
    random = np.random.default_rng(seed)
    cached, new = zip(*case.rows, strict=True)
    pool, table = poisoned_pool(random, [c + n for c, n in case.rows], 1, case.page_size, case.rank + case.rope_size)
    q = np.full((case.num_tokens, case.num_heads, case.nope_size + case.rope_size), np.nan, np.float32)
    starts, at = [], 0
    for length in new:
        starts.append(at)
        q[at : at + length] = random.standard_normal((length, *q.shape[1:]))
        at += -(-length // case.query_tile) * case.query_tile
    unused = (num_rows or len(new) + 1) - len(new)
    table = np.pad(table, ((0, unused), (0, 0)))
    rows = [np.pad(a, (0, unused)).astype(np.int32) for a in (starts, new, np.add(cached, new))]
    up = random.standard_normal((case.rank, case.num_heads, case.nope_size + case.value_size)) / np.sqrt(case.rank)
    return [*(jnp.asarray(a, dtype) for a in (q, pool[:, :1])), *map(jnp.asarray, (table, *rows)), jnp.asarray(up, dtype)]


def options(case: LatentPrefillCase) -> dict[str, Any]:
    return {"scale": (case.nope_size + case.rope_size) ** -0.5, "query_tile": case.query_tile}


def both(case: LatentPrefillCase, inputs: list[jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    """What XLA finds, and the reference."""
    return np.asarray(run(*inputs, **options(case), backend="xla")), np.asarray(run(*inputs, **options(case), backend="reference"))


def plain(case: LatentPrefillCase, q, latents, table, query_start, query_len, kv_len, up) -> np.ndarray:
    """One token and one head at a time, in float64."""
    out = np.zeros((*q.shape[:2], case.value_size))
    for row, length in enumerate(query_len):
        for i in range(length):
            places = range(kv_len[row] - length + i + 1)
            seen = np.array([latents[LAYER, 0, table[row, p // case.page_size], 0, p % case.page_size] for p in places], np.float64)
            for head in range(case.num_heads):
                expanded = seen[:, : case.rank] @ up[:, head].astype(np.float64)
                keys = np.concatenate([expanded[:, : case.nope_size], seen[:, case.rank :]], axis=1)
                scores = keys @ q[query_start[row] + i, head].astype(np.float64) * options(case)["scale"]
                weights = np.exp(scores - scores.max())
                out[query_start[row] + i, head] = weights / weights.sum() @ expanded[:, case.nope_size :]
    return out


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_it_is_causal_attention_over_expanded_latents(backend):
    inputs = arguments(SMALL, 0)
    out = run(*inputs, **options(SMALL), backend=backend)
    np.testing.assert_allclose(out, plain(SMALL, *map(np.asarray, inputs)), atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_is_the_reference_on_the_shapes_of_real_models(case):
    found, reference = both(case, arguments(case, 1))
    np.testing.assert_allclose(found, reference, atol=2e-5)
    assert np.any(reference)


def test_xla_is_the_reference_whatever_the_lengths():
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
        case = LatentPrefillCase("ragged", 3, 16, 8, 4, 8, 8, 96, 16, tuple(rows[i] for i in order))
        q, latents, *others = arguments(case, seed, num_rows=7)
        latents = jnp.pad(latents, ((0, 0), (0, 0), (0, -latents.shape[2] % 200), *[(0, 0)] * 3), constant_values=jnp.nan)
        np.testing.assert_allclose(*both(case, [q, latents, *others]), atol=2e-5)


# Several chunks of queries and several runs of context, cut where no request ends; pages of odd sizes, and of more than a run.
CUT = (
    LatentPrefillCase("long-rows", 2, 16, 8, 4, 8, 16, 1408, 32, ((0, 700), (900, 200), (300, 460))),
    LatentPrefillCase("many-rows", 2, 16, 8, 4, 8, 8, 1024, 32, tuple((37 * i, 100 + i) for i in range(8))),
    LatentPrefillCase("chunks-of-parts", 2, 16, 8, 4, 8, 8, 608, 16, ((0, 300), (50, 290))),
    LatentPrefillCase("odd-pages", 2, 16, 8, 4, 8, 5, 64, 32, ((161, 64),)),
    LatentPrefillCase("wide-pages", 2, 16, 8, 4, 8, 256, 64, 16, ((300, 7), (0, 16), (126, 9))),
    LatentPrefillCase("nothing-shared", 2, 16, 8, 0, 8, 8, 32, 32, ((10, 20),)),
)


@pytest.mark.parametrize("case", CUT, ids=lambda case: case.name)
def test_every_way_work_is_cut(case):
    found, reference = both(case, arguments(case, 3))
    np.testing.assert_allclose(found, reference, atol=2e-5)
    assert np.any(reference)


@pytest.mark.parametrize(
    ("num_devices", "case"),
    [
        (2, replace(CUT[0], num_heads=2)),
        (4, replace(CASES[1], num_heads=4, page_size=8)),
        (4, LatentPrefillCase("parts-of-five", 4, 16, 8, 4, 8, 20, 96, 16, ((130, 33), (0, 16), (7, 9)))),
        # Gathered twice: more than eight runs of 128 tokens.
        (8, LatentPrefillCase("long-context", 8, 16, 8, 4, 8, 16, 64, 32, ((1500, 9), (300, 30)))),
        (8, LatentPrefillCase("wide-pages", 8, 16, 8, 4, 8, 256, 64, 16, ((2300, 7), (0, 16), (126, 9)))),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_devices_that_have_a_part_of_each_page_attend_to_all_of_it(num_devices, case):
    inputs = arguments(case, 13)
    expected = np.asarray(run(*inputs, **options(case), backend="reference"))
    np.testing.assert_allclose(over_devices(case, inputs, num_devices), expected, atol=2e-5)
    np.testing.assert_allclose(over_devices(case, inputs, num_devices, "reference"), expected, atol=2e-5)
    assert np.any(expected)


def test_rows_may_lie_in_any_order_in_the_batch():
    case = CUT[1]
    q, latents, *rows, up = arguments(case, 4)
    mixed = np.random.default_rng(0).permutation(len(rows[0]))
    found = run(q, latents, *(r[mixed] for r in rows), up, **options(case), backend="xla")
    np.testing.assert_allclose(found, both(case, [q, latents, *rows, up])[1], atol=2e-5)


def test_no_context_is_expanded_twice_and_no_query_goes_by_in_vain(monkeypatch):
    """However many chunks of queries see it, expanding is what costs; of its own chunk a query sees what comes before. Where there is nothing,
    nothing is done."""
    done = []

    def counting(name):
        counted = getattr(xla, name)

        def count(*arguments):
            jax.debug.callback(lambda: done.append(name))
            return counted(*arguments)

        return count

    for name in ("_expand", "_attend"):
        monkeypatch.setattr(xla, name, counting(name))
    for rows, runs, chunks in (  # runs of 512 tokens of context, chunks of 128 queries
        (((0, 1000),), 2, 8 + 4),
        (((700, 1000),), 4, 8 + 8 + 6 + 2),
        (((0, 20), (0, 33), (100, 40), (9, 1)), 1, 2),
        (((0, 32), (0, 512), (0, 440)), 2, 5 + 4),
    ):
        case = replace(CASES[-1], rows=rows)
        q, latents, table, *others, up = arguments(case, 5, num_rows=8)
        table = jnp.pad(table, ((0, 0), (0, 500)))  # room for contexts that are not there
        jax.block_until_ready(latent_prefill_attention(q, latents, LAYER, table, *others, up, **options(case), backend="xla"))
        jax.effects_barrier()
        assert (done.count("_expand"), done.count("_attend")) == (runs, chunks), rows
        done.clear()


def test_what_is_held_does_not_grow_with_contexts_or_the_pool():
    """DeepSeek-V3's sizes: neither a copy of the pool nor a prefix expanded."""

    def temporaries(num_pages: int, row_pages: int) -> int:
        shapes: list[tuple[tuple[int, ...], Any]] = [((4096, 128, 192), jnp.float32), ((4, 1, num_pages, 1, 16, 576), jnp.float32)]
        shapes += [((8, row_pages), jnp.int32), *[((8,), jnp.int32)] * 3, ((512, 128, 256), jnp.float32)]
        lowered = run.lower(*(jax.ShapeDtypeStruct(*s) for s in shapes), scale=0.1, query_tile=32, pool_is_finite=True, backend="xla")
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(1_000, 100), temporaries(100_000, 10_000)
    assert abs(many - few) < 2**20
    q, one_expanded_prefix = 4096 * 128 * 192 * 4, 10_000 * 16 * 128 * 256 * 4
    assert few < 4 * q < one_expanded_prefix


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_tokens_of_no_row_come_out_as_zeros(backend):
    case = CASES[0]
    q, latents, table, query_start, query_len, kv_len, up = arguments(case, 6)
    out = np.asarray(run(q, latents, table, query_start, query_len, kv_len, up, **options(case), backend=backend))
    in_use = np.zeros(case.num_tokens, bool)
    for start, length in zip(query_start, query_len, strict=True):
        in_use[start : start + length] = True
    assert not in_use.all()
    np.testing.assert_array_equal(out[~in_use], 0)
    assert np.isfinite(out).all()
    nothing = jnp.zeros_like(query_len)
    out = run(q, latents, table, query_start, nothing, nothing, up, **options(case), backend=backend)
    np.testing.assert_array_equal(out, 0)


def test_the_only_row_may_begin_anywhere():
    case = LatentPrefillCase("late", 2, 16, 8, 4, 8, 8, 96, 32, ((20, 40),))
    q, latents, table, query_start, *others = arguments(case, 7)
    found, reference = both(case, [jnp.roll(q, 32, axis=0), latents, table, query_start.at[0].set(32), *others])
    np.testing.assert_allclose(found, reference, atol=2e-5)
    assert np.any(reference[32:72])
    assert not np.any(found[:32])


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_where_the_pool_is_promised_finite_its_unused_places_may_hold_any_number(backend):
    case = CASES[0]
    q, latents, *others = arguments(case, 8)
    expected = run(q, latents, *others, **options(case), backend="reference")
    out = run(q, jnp.nan_to_num(latents, nan=3e38), *others, **options(case), backend=backend, pool_is_finite=True)
    np.testing.assert_allclose(out, expected, atol=2e-5)


def test_a_request_that_overflows_spoils_no_other():
    """In one run of context with it, and one chunk of queries."""
    case = LatentPrefillCase("two", 2, 16, 8, 4, 8, 8, 64, 32, ((10, 20), (30, 17)))
    q, latents, table, *others = arguments(case, 9)
    sound, _ = both(case, [q, latents, table, *others])
    latents = latents.at[LAYER, 0, table[0, 1]].set(3e38)  # whose keys and values are infinite
    broken, _ = both(case, [q.at[3].set(jnp.nan), latents, table, *others])
    assert not np.isfinite(broken[3]).any()
    np.testing.assert_array_equal(broken[32:], sound[32:])
    assert np.any(sound[32:])


@pytest.mark.parametrize("factor", [1e-4, 8.0, 1e3])
def test_scores_of_any_size(factor):
    case = CUT[0]
    q, *others = arguments(case, 10)
    found, reference = both(case, [q * factor, *others])
    np.testing.assert_allclose(found, reference, atol=2e-5 * max(factor, 1))


def test_bfloat16_is_rounded_where_any_model_rounds_it():
    """Keys, values and weights to bfloat16; scores and sums are float32."""
    case = CUT[0]
    q, latents, *others, up = arguments(case, 11, jnp.bfloat16)
    narrow = run(q, latents, *others, up, **options(case), backend="xla")
    assert narrow.dtype == jnp.bfloat16
    exact = run(q.astype(jnp.float32), latents.astype(jnp.float32), *others, up.astype(jnp.float32), **options(case), backend="reference")
    assert np.abs(narrow.astype(jnp.float32) - exact).max() < 2**-6 * np.abs(exact).max()
    wide = run(q.astype(jnp.float32), latents.astype(jnp.float32), *others, up, **options(case), backend="xla")  # narrow weights only
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, exact, atol=2e-5)


def test_what_does_not_fit_together_is_said():
    q, latents, *rows, up = arguments(SMALL, 12)
    named = options(SMALL)
    for changed, message in (
        ([q, jnp.concatenate([latents, latents], 1), *rows, up], r"latent_pages .* \[L, 1, P, 1, G, C\]"),
        ([q, latents, *rows, up[:, :2]], r"up \(8, 2, 11\) must be \[R, N, E\] with the 3 heads"),
        ([q, latents, *rows, up[:, :, :6]], "more than the columns of a head"),
        ([q[:20], latents, *rows, up], "20 tokens are not a multiple of query_tile 8"),
        ([q, latents, *rows[:3], rows[3][:1], up], "4 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*changed, **named)
    for backend, reason in (("mosaic_gpu", "latents' keys of 6 and 4 columns"), ("llvm_cpu", "it has no kernel that expands latents")):
        with pytest.raises(ValueError, match=f"{backend} can't run: it has no kernel .*{reason.removeprefix('it has no kernel ')}"):
            run(q, latents, *rows, up, **named, backend=backend)
    assert unsupported_reason("xla", q.dtype, (6, 4), 5, 4, 8) is None
