"""The engine's own programs, one after another, with random weights of Llama-3.1-8B's shape: no checkpoint, tokenizer
or requests."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import compiled_program
from benchmarks.gpu.measure import RowResult
from benchmarks.gpu.roofline import DATASHEET, RooflineWork
from benchmarks.gpu.sizes import BenchmarkSizes
from benchmarks.gpu.stand_ins import stand_in
from benchmarks.gpu.timing import per_launch

stand_in()

from jaxinfer.decode.batch import ON_DEVICE  # noqa: E402 - after what stands in for packages it doesn't need
from jaxinfer.decode.batch import empty_batch as empty_decode_batch  # noqa: E402
from jaxinfer.decode.runner import DecodeRunner  # noqa: E402
from jaxinfer.kv_cache.pages import PagePool  # noqa: E402
from jaxinfer.kv_cache.spec import PageSpec  # noqa: E402
from jaxinfer.models.registry import read_config  # noqa: E402
from jaxinfer.pipeline.stage import Stage  # noqa: E402
from jaxinfer.prefill.batch import empty_batch as empty_prefill_batch  # noqa: E402
from jaxinfer.prefill.runner import PrefillRunner  # noqa: E402
from jaxinfer.programs.buckets import prefill_rows  # noqa: E402
from jaxinfer.programs.compilation import ProgramSource, compile_programs  # noqa: E402
from jaxinfer.sampling.params import neutral_rows  # noqa: E402
from jaxinfer.weights.formats.plain import Plain  # noqa: E402
from jaxinfer.weights.formats.weight_format import ModelWeightFormat  # noqa: E402
from jaxinfer.weights.template import ModelTemplate, Weights, make_template  # noqa: E402
from sharding.mesh import make_mesh  # noqa: E402
from sharding.rules import TENSOR_PARALLEL  # noqa: E402

_TEMPORARIES = 10 * 2**30  # bytes; random numbers for a layer of the largest pool take 6
_LAUNCHES_S = 0.3  # duration of a measurement
_EXPECTED = DATASHEET["h100"]


@dataclass(frozen=True)
class Loaded:
    """A model on the device, and one pool for all measurements."""

    template: ModelTemplate
    mesh: jax.sharding.Mesh
    weights: Weights
    pool: PagePool
    num_tokens: int  # tokens that fit in the pool

    def stage(self, way: Any) -> Stage:
        """The model with one attention backend."""
        return Stage(self.template, self.mesh, TENSOR_PARALLEL, self.pool, way)


@functools.cache  # whatever the attention backend
def load(sizes: BenchmarkSizes, seed: int) -> Loaded:
    """Loads it. Raises `ValueError` where not even the weights and one context fit."""
    model = sizes.model
    most = max([*(batch * context for batch, context in sizes.decode), *sizes.prefill])
    config = read_config(model.hf_config(max([*(context for _, context in sizes.decode), *sizes.prefill])))
    template, mesh = make_template(config, ModelWeightFormat(Plain(jnp.dtype(sizes.dtype)))), make_mesh((0,))
    spec = PageSpec(model.num_layers, model.num_kv_heads, model.head_size, sizes.page_size, sizes.itemsize)
    weights = random_weights(template, mesh, seed)
    stats = mesh.devices.flat[0].memory_stats() or {}
    room = stats["bytes_limit"] - stats["bytes_in_use"] - _TEMPORARIES if "bytes_limit" in stats else 2**62
    num_tokens = min(most, room // spec.token_bytes)
    if num_tokens < min(sizes.prefill):
        raise ValueError(f"{room / 2**30:.1f} GiB are left beside the weights: too few for {min(sizes.prefill)} tokens")
    pool = PagePool(spec, 1 + spec.blocks_for(num_tokens), template.activation_dtype, mesh, TENSOR_PARALLEL)
    pool.allocate()
    return Loaded(template, mesh, weights, pool, num_tokens)


def random_weights(template: ModelTemplate, mesh: jax.sharding.Mesh, seed: int) -> Weights:
    """Created on the device, which takes a second: normal, scaled by fan-in; vectors are ones."""

    @functools.partial(jax.jit, static_argnames=("shape", "dtype"))
    def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (jax.random.normal(key, shape, dtype) * shape[0] ** -0.5).astype(dtype)

    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(template.leaves))
    weights = []
    for key, leaf, target in zip(keys, template.leaves, template.abstract(mesh, TENSOR_PARALLEL), strict=True):
        is_vector = leaf.is_stack or len(leaf.shape) == 1
        made = jnp.ones(target.shape, target.dtype) if is_vector else normal(key, target.shape, target.dtype)
        weights.append(jax.device_put(made, target.sharding))
    return tuple(weights)


def _fill(pool: PagePool, seed: int) -> None:
    """Random keys and values, a layer at a time: zeros would run faster than real ones."""

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(array: jax.Array, layer: jax.Array, key: jax.Array) -> jax.Array:
        return array.at[layer].set(jax.random.normal(key, array.shape[1:], array.dtype))

    with jax.set_mesh(pool.mesh):
        for layer, key in enumerate(jax.random.split(jax.random.key(seed + 1, impl="rbg"), pool.array.shape[0])):
            pool.array = fill(pool.array, jnp.int32(layer), key)
        jax.block_until_ready(pool.array)


def decode_steps(sizes: BenchmarkSizes, way: Any, seed: int) -> Iterator[RowResult]:
    """Decode steps of one batch after another, greedy; each step gets the tokens of the one before, as in the
    engine."""
    loaded, random = load(sizes, seed), np.random.default_rng(seed)
    _fill(loaded.pool, seed)
    buckets = tuple(sorted({batch for batch, _ in sizes.decode}))
    longest = max(context for _, context in sizes.decode)
    runner = DecodeRunner([loaded.stage(way)], buckets, longest)
    notes = _start(runner, loaded)
    page_size = sizes.page_size
    for batch, context in sizes.decode:
        case, work = f"batch {batch}, context {context}", sizes.decode_step(batch, context)
        pages_each = -(-context // page_size)
        if batch * pages_each * page_size > loaded.num_tokens:
            yield RowResult(case, work=work, failure=f"the pool has room for {loaded.num_tokens} tokens")
            continue
        pages = (random.permutation(batch * pages_each) + 1).reshape(batch, -1).astype(np.int32)
        for slot, own in enumerate(pages):
            runner.assign_slot(slot, own.tolist())
        step = empty_decode_batch(batch, runner.num_slots)
        rows = runner.put(neutral_rows(batch), step.num_generated)
        step.slots[:], step.positions[:], step.pages[:] = np.arange(batch), context - 1, pages[:, -1:]
        step.tokens[:] = random.integers(0, sizes.model.vocab_size, batch)
        first = np.asarray(runner.run(step, rows).tokens)
        step.tokens[:] = ON_DEVICE
        times = per_launch(functools.partial(runner.run, step, rows), _launches(work), sizes.repeats)
        yield RowResult(case, times, work, notes | {"tokens_per_s": round(batch / times.median), "tokens": first.tolist()})
        notes = {}


def prefill_steps(sizes: BenchmarkSizes, way: Any, seed: int) -> Iterator[RowResult]:
    """A whole prompt as one step."""
    loaded, random = load(sizes, seed), np.random.default_rng(seed)
    _fill(loaded.pool, seed)
    runner = PrefillRunner([loaded.stage(way)], tuple(sorted(sizes.prefill)), max(sizes.prefill))
    notes = _start(runner, loaded)
    for num_tokens in sizes.prefill:
        case, work = f"{num_tokens} tokens", sizes.prefill_step(num_tokens)
        batch = empty_prefill_batch(num_tokens, prefill_rows(num_tokens), runner.table_width)
        count = -(-num_tokens // sizes.page_size)
        if count * sizes.page_size > loaded.num_tokens:
            yield RowResult(case, work=work, failure=f"the pool has room for {loaded.num_tokens} tokens")
            continue
        packed = batch.packed
        packed.page_table[0, :count] = random.permutation(count) + 1
        packed.token_ids[:] = random.integers(0, sizes.model.vocab_size, num_tokens)
        packed.query_len[0] = packed.kv_len[0] = num_tokens
        first = int(np.asarray(runner.run(batch).sampled.tokens)[0])
        times = per_launch(functools.partial(runner.run, batch), _launches(work), sizes.repeats)
        yield RowResult(case, times, work, notes | {"tokens_per_s": round(num_tokens / times.median), "tokens": [first]})
        notes = {}


def _start(runner: DecodeRunner | PrefillRunner, loaded: Loaded) -> dict[str, Any]:
    programs, seconds = _timed(lambda: compile_programs(_needed(runner.programs())))
    runner.start(programs, (loaded.weights,))
    about = {
        name: compiled_program.describe_program(program.as_text() or "")
        for name, program in programs.items()
        if hasattr(program, "as_text")
    }
    return {"compile_s": round(seconds, 1), "programs": about}


def _needed(sources: list[ProgramSource]) -> list[ProgramSource]:
    """The programs without those for options that aren't used: everything is greedy."""
    return [source for source in sources if source.name.partition("/")[2].partition("/")[0] not in ("reset", "sample", "score")]


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return run(), time.perf_counter() - began


def _launches(work: RooflineWork) -> int:
    return max(3, min(100, int(_LAUNCHES_S / _EXPECTED.floor(work))))
