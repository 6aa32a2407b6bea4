"""Multi-head latent attention in DeepSeek-V3's sizes, compiled for GPUs: what it holds, and that no weight and no pool is copied."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import pytest

from jaxinfer.layers.latent_attention import absorbed
from pallas_kernels.latent_prefill_attention.op import latent_prefill_attention

pytestmark = pytest.mark.aot

MB = 10**6


@pytest.mark.parametrize(("num_heads", "most"), [(128, 900 * MB), (16, 115 * MB)], ids=["one-device", "one-of-eight"])
def test_prefill_of_4096_tokens_holds_what_its_docstring_says(compile_for, num_heads, most):
    def temporaries(num_pages: int, row_pages: int) -> int:
        shapes = [((4096, num_heads, 192), jnp.bfloat16), ((2, 1, num_pages, 1, 16, 576), jnp.bfloat16), ((), jnp.int32)]
        shapes += [((8, row_pages), jnp.int32), *[((8,), jnp.int32)] * 3, ((512, num_heads, 256), jnp.bfloat16)]
        attend = partial(latent_prefill_attention, scale=0.1, query_tile=32, pool_is_finite=True, backend="xla")
        return compile_for(attend, *shapes).memory_analysis().temp_size_in_bytes

    few = temporaries(1_000, 100)
    assert few < most
    assert abs(temporaries(100_000, 10_000) - few) < MB


def test_decode_absorbs_without_a_copy_of_what_it_absorbs(compile_for):
    """`up` lies as checkpoints have it, a matrix a head, and is read where it lies; its slices are not copies."""

    def decode(q, up):
        return absorbed(q, jnp.transpose(up, (2, 0, 1)), 576, lambda queries: queries[..., :512] * 2)

    compiled = compile_for(decode, ((32, 128, 192), jnp.bfloat16), ((128, 256, 512), jnp.bfloat16))
    up_bytes = 128 * 256 * 512 * 2
    assert compiled.memory_analysis().temp_size_in_bytes < up_bytes / 2
    assert compiled.memory_analysis().argument_size_in_bytes >= up_bytes
