"""What is to be timed compiles for the cards, in full size: many calls in a loop whose length XLA knows, and nothing copied in it."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.gpu import kernels, timing
from benchmarks.gpu.sizes import FULL
from sharding.targets import target_devices
from tests.aot.conftest import makers, num_kernels

pytestmark = pytest.mark.aot

CASES = (
    ("paged_attention", "batch 1, context 512"),
    ("paged_attention", "batch 128, context 4096"),
    ("write_and_attend", "batch 1, context 512", "separate"),
    ("write_and_attend", "batch 1, context 512", "one launch"),
    ("write_and_attend", "batch 32, context 4096", "one launch"),
    ("paged_attention", "float8, batch 128, context 4096"),
    ("paged_attention", "latents, batch 32, context 4096"),
    ("paged_attention", "4 tokens, batch 32, context 4096"),
    ("ragged_prefill_attention", "512 tokens"),
    ("ragged_prefill_attention", "8192 tokens"),
    ("ragged_prefill_attention", "32 tokens after 8192"),
    ("latent_prefill_attention", "8192 tokens"),
    ("latent_prefill_attention", "512 tokens after 8192"),
    ("grouped_matmul", "llama-4-scout, 64 tokens"),
    ("grouped_matmul", "deepseek-v3, 64 tokens"),
    ("grouped_matmul", "kimi-k2.5, 4096 tokens"),
)


@pytest.mark.parametrize("what", CASES, ids="/".join)
def test_a_timed_loop(what):
    name, case, *versions = what
    kernel = next(kernel for kernel in kernels.KERNELS if kernel.name == name)
    made = []

    def abstract():
        made.append(kernel.problem(FULL, kernel.cases(FULL)[case], 0))
        return made[0].carry, made[0].shared, made[0].inputs, [check.arguments for check in made[0].checks.values()]

    arrays = jax.eval_shape(abstract)  # gigabytes, never made
    mesh = Mesh(np.array(target_devices("h200", 1)), ("x",), axis_types=(AxisType.Explicit,))
    whole = NamedSharding(mesh, PartitionSpec())
    *timed, checked = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), arrays)
    tiling = kernel.versions[versions[0]](FULL, kernel.cases(FULL)[case]) if versions else None
    function = kernels.implementation(name, "mosaic_gpu", tiling)
    with jax.set_mesh(mesh):
        for check, arguments in zip(made[0].checks.values(), checked, strict=True):
            jax.jit(functools.partial(check.run, function)).lower(*arguments).compile()
        compiled = jax.jit(timing.chain(functools.partial(made[0].step, function), rounds=50), donate_argnums=0).lower(*timed).compile()
    calls = 2 if name == "grouped_matmul" else 1
    assert num_kernels(compiled) == calls * len(arrays[2])
    assert 'known_trip_count":{"n":"50"}' in compiled.as_text()
    largest = max(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))
    assert all("copy" not in makers(compiled, a.shape) for a in jax.tree.leaves(arrays[0])[1:]), "of a pool that calls write to"
    assert compiled.memory_analysis().temp_size_in_bytes < max(largest / 2, 2**28), "no copy of what is read"
