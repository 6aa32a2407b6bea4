"""What is wrong has no time; what is right has one, of as many calls as there were."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import (
    cudnn_attention,
    grouped_matmul,
    kernels,
    latent_prefill_attention,
    paged_attention,
    ragged_prefill_attention,
    timing,
    write_and_attend,
)
from benchmarks.gpu.kernels import WORST_ERROR, WORST_ROW, implementation, measure_function, relative_error, row_errors
from benchmarks.gpu.measure import CallTimes
from benchmarks.gpu.sizes import SMALL
from pallas_kernels.grouped_matmul.cases import TINY
from pallas_kernels.paged_attention import mosaic_tiling

SIZES = dataclasses.replace(SMALL, cache_bytes=1)  # one set of inputs


def once(make):
    """What the reference makes of a problem's inputs is computed for the first test alone."""

    @functools.cache
    def made():
        problem = make()
        checks = {name: dataclasses.replace(check, expected=functools.cache(check.expected)) for name, check in problem.checks.items()}
        return dataclasses.replace(problem, checks=checks)

    return made


DECODE = paged_attention.cases(SIZES)
ATTENTION = {
    "paged_attention": once(lambda: paged_attention.problem(SIZES, DECODE["batch 4, context 24"], seed=1)),
    "ragged_prefill_attention": once(lambda: ragged_prefill_attention.problem(SIZES, ragged_prefill_attention.BenchmarkPrompt(64), seed=1)),
    "latent_prefill_attention": once(
        lambda: latent_prefill_attention.problem(SIZES, latent_prefill_attention.cases(SIZES)["32 tokens after 64"], seed=1)
    ),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(kernels, "per_call", lambda *_: (CallTimes(1.0, 1.0, 1.0), {}))


def found(name, change, make=None):
    function = implementation(name, "xla", None)
    problem = (make or ATTENTION[name])()
    return measure_function(functools.partial(change, function), problem, SIZES, "case", {})


def right(function, *arguments, **options):
    return function(*arguments, **options)


def slightly_off(function, *arguments, **options):
    return function(*arguments, **options) * 1.02


def one_number_missing(function, *arguments, **options):
    out = function(*arguments, **options)
    return out.at[(-1,) * out.ndim].set(jnp.nan)


def reads_past_contexts(function, q, kv, layer, table, *rest, **options):
    *others, kv_len = rest
    return function(q, kv, layer, table, *others, jnp.where(kv_len > 0, kv_len + 1, 0), **options)


def another_layer(function, q, kv, layer, *rest, **options):
    return function(q, kv, layer - 1, *rest, **options)


def always_the_first_page(function, q, kv, layer, table, *rest, **options):
    return function(q, kv, layer, table.at[:].set(table[:1]), *rest, **options)


def forgets_the_last_token(function, q, kv, layer, table, *rest, **options):
    *others, kv_len = rest
    return function(q, kv, layer, table, *others, jnp.maximum(kv_len - 1, 0), **options)


def trusts_the_pool(function, *arguments, **options):
    return function(*arguments, **(options | {"pool_is_finite": True}))


@pytest.mark.parametrize("name", ATTENTION)
def test_a_right_kernel_is_timed(name):
    row = found(name, right)
    assert row.failure is None and row.times == CallTimes(1.0, 1.0, 1.0)
    assert 0 < row.notes["relative_error"] < 1e-5


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(
    "wrong", [slightly_off, one_number_missing, reads_past_contexts, another_layer, forgets_the_last_token, trusts_the_pool]
)
def test_a_wrong_kernel_is_not(name, wrong):
    row = found(name, wrong)
    if (name, wrong) == ("latent_prefill_attention", trusts_the_pool):  # XLA's has no use for the promise
        assert row.times is not None
    else:
        assert row.times is None and "relative error" in row.failure, wrong.__name__


@pytest.mark.parametrize("case", ["float8, batch 4, context 24", "latents, batch 4, context 24"])
def test_other_pages(case):
    make = once(lambda: paged_attention.problem(SIZES, DECODE[case], seed=1))

    def one_scale_for_all(function, *arguments, **options):
        return function(
            *arguments, **{name: value.at[:].set(value[0, 0, 0]) if name == "kv_scales" else value for name, value in options.items()}
        )

    def values_from_the_end(function, q, kv, *rest, **options):
        size = options.get("value_size")
        return (
            function(q, kv, *rest, **options)
            if size is None
            else function(q, kv, *rest, **(options | {"value_size": kv.shape[-1]}))[..., -size:]
        )

    assert found("paged_attention", right, make).times is not None
    wrong = (slightly_off, another_layer, one_scale_for_all if "float8" in case else values_from_the_end)
    for change in wrong:
        assert found("paged_attention", change, make).times is None, change.__name__


WRITTEN = once(lambda: write_and_attend.problem(SIZES, write_and_attend.cases(SIZES)["batch 4, context 24"], seed=1))


def test_a_write_is_checked_too():
    assert found("write_and_attend", right, WRITTEN).times is not None

    def writes_nothing(function, q, k, v, kv, *where, **options):
        return function(q, k, v, kv, *where, **options)[0], kv

    def attends_before_it_writes(function, q, k, v, kv, layer, table, page_ids, offsets, kv_len, **options):
        return function(q, k, v, kv, layer, table, page_ids, offsets, jnp.maximum(kv_len - 1, 0), **options)

    def exchanges_keys_and_values(function, q, k, v, kv, *where, **options):
        return function(q, v, k, kv, *where, **options)

    def touches_another_place(function, q, k, v, kv, *where, **options):
        out, after = function(q, k, v, kv, *where, **options)
        return out, after.at[0, 0, 2, 0, 0, 0].set(7.0)

    for wrong in (writes_nothing, attends_before_it_writes, exchanges_keys_and_values, touches_another_place):
        assert found("write_and_attend", wrong, WRITTEN).times is None, wrong.__name__


@pytest.mark.parametrize("kernel", [k for k in kernels.KERNELS if k.folder or k.name == "paged_attention"], ids=lambda kernel: kernel.name)
def test_what_the_tuner_keeps_a_tiling_by_is_what_the_kernel_looks_for(kernel, monkeypatch):
    asked = []
    monkeypatch.setattr(mosaic_tiling, "tuned_tiling", lambda op, shape: asked.append((op, shape)))
    for case in (case for case in kernel.cases(SIZES).values() if not (case.value_size or case.has_scales)):
        problem = kernel.problem(SIZES, case, seed=0)
        function = implementation(kernel.name, "mosaic_gpu", None)
        asked.clear()
        jax.eval_shape(functools.partial(problem.step, function), problem.carry, problem.shared, problem.inputs[0])
        assert (kernel.name, problem.shape) in asked


def test_page_tables_are_told_apart():
    assert found("paged_attention", always_the_first_page).times is None


def test_the_pool_that_is_promised_finite_is_checked_as_it_is_timed():
    """A kernel that masks nothing at all where the pool is promised finite."""

    def unmasked(function, q, kv, layer, table, kv_len, **options):
        return function(q, kv, layer, table, jnp.where(options["pool_is_finite"], -(-kv_len // 8) * 8, kv_len), **options)

    assert found("paged_attention", unmasked).failure.startswith("finite pool: ")


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.format)
def test_grouped_products(case):
    make = once(lambda: grouped_matmul.problem(SIZES, (case, 40), seed=2))

    def swapped_neighbours(function, x, weights, counts):
        return function(x, weights, counts.at[:2].add(jnp.asarray([1, -1])))

    def writes_rows_of_no_expert(function, x, weights, counts):
        return function(jnp.nan_to_num(x, nan=1.0), weights, counts.at[-1].add(len(x) - counts.sum()))

    def nan_in_a_row_that_is_not_compared(function, *arguments):
        return function(*arguments).at[3].set(jnp.nan)

    assert found("grouped_matmul", right, make).times is not None
    for wrong in (nan_in_a_row_that_is_not_compared, slightly_off, one_number_missing, swapped_neighbours, writes_rows_of_no_expert):
        assert found("grouped_matmul", wrong, make).times is None, wrong.__name__


def test_results_that_change_from_run_to_run_are_marked():
    calls = []

    def racing(function, *arguments, **options):
        def noise(out):
            calls.append(1)
            return np.asarray(out) * np.float32(1 + 1e-6 * len(calls))

        out = function(*arguments, **options)
        return jax.pure_callback(noise, out, out)

    row = found("paged_attention", racing)
    assert row.times is not None and row.notes["differs_between_runs"] is True
    assert "differs_between_runs" not in found("paged_attention", right).notes


def test_nan_is_never_a_small_error():
    assert relative_error(np.asarray([3.0, 4.4]), np.asarray([3.0, 4.0])) == pytest.approx(0.08)
    assert np.isnan(relative_error(np.asarray([1.0, np.nan]), np.asarray([1.0, 1.0])))
    with pytest.raises(ValueError, match=r"\(2,\), not \(1,\)"):
        relative_error(np.zeros(2), np.ones(1))


def test_one_wrong_row_among_thousands_is_seen():
    expected = np.random.default_rng(0).standard_normal((2000, 64))
    expected[7] = 0.0  # a row without context
    wrong = expected.copy()
    wrong[3] *= 1.05
    assert relative_error(wrong, expected) < WORST_ERROR["bfloat16"]
    assert np.argmax(row_errors(wrong, expected)) == 3 and row_errors(wrong, expected)[3] == pytest.approx(0.05)
    wrong[7, 0] = 1.0
    assert row_errors(wrong, expected)[7] > WORST_ROW["bfloat16"]


@pytest.mark.parametrize("queries", [1, 40])
def test_what_jax_has_is_checked_too(queries):
    problem = cudnn_attention._problem(SIZES, SIZES.decode_attention(1, 40), 1, queries, 40, seed=3)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=queries > 1)
    assert measure_function(attend, problem, SIZES, "", {}).times is not None
    assert measure_function(functools.partial(jax.nn.dot_product_attention, scale=0.01), problem, SIZES, "", {}).times is None


def test_seconds_of_a_call_are_of_all_calls_of_a_loop(monkeypatch):
    """Every launch takes 0.02 s, and 0.5 s go by before and after."""
    monkeypatch.setattr(timing, "_seconds", lambda run: 0.5 + 0.02 * run.args[0])
    traced = []

    def step(carry, shared, own):
        traced.append(own)
        return carry + own * shared

    times, program = timing.per_call(step, jnp.zeros(2), jnp.float32(3.0), [jnp.float32(i) for i in range(5)], expected_s=1e-4, repeats=4)
    rounds = 20  # 10 ms of 5 calls of 0.1 ms
    assert times.median == pytest.approx(0.02 / (rounds * 5))
    assert len(traced) == 1, "a kernel is compiled once for all inputs"
    assert program["calls"] == 5 and program["hlo"]


def test_no_time_is_made_of_noise(monkeypatch):
    monkeypatch.setattr(timing, "_seconds", lambda run: 0.5 - 0.02 * run.args[0])
    with pytest.raises(ValueError, match="too short"):
        timing.per_call(lambda carry, *_: carry + 1, jnp.zeros(2), None, [None], expected_s=1.0, repeats=3)
