"""Why layers are unrolled: of a scan over stacked weights XLA copies a layer's largest matrix out of the stack before each product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.kv_cache.spec import LayerGroups
from jaxinfer.layers.attention_kernels import DecodeKernels, KVCacheLocation
from jaxinfer.layers.paged_attention import PagedAttentionBackend
from jaxinfer.layers.rope import angles, inverse_frequencies
from jaxinfer.models.llama import LlamaBlock
from jaxinfer.models.registry import read_config
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from sharding.mesh import TENSOR
from sharding.targets import target_devices

pytestmark = pytest.mark.aot
NUM_LAYERS = 4


@pytest.mark.parametrize("batch", [1, 32])
def test_unrolled_layers_copy_no_weights_and_scanned_ones_do(target, batch):
    config = read_config(model_shape("llama-3.1-8b"))
    graph, state = nnx.split(nnx.eval_shape(lambda: LlamaBlock(config, 0, ModelWeightFormat(Plain(jnp.dtype("bfloat16"))))))
    leaves, structure = jax.tree.flatten(state)
    mesh = Mesh(np.array(target_devices(target, 1)), (TENSOR,))
    whole = NamedSharding(mesh, PartitionSpec())

    def abstract(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def block_of(weights):
        return nnx.merge(graph, jax.tree.unflatten(structure, weights))

    def context(positions, page_ids, table, kv_len):
        cos_sin = angles(positions, inverse_frequencies(config.head_size, config.rope_theta, config.rope_scaling))
        groups = LayerGroups.of(config.layer_spans)
        everywhere = PagedAttentionBackend(mesh, DecodeKernels("mosaic_gpu"), groups, (table,), (page_ids,), positions % 16, kv_len)
        return cos_sin, lambda layer: everywhere.at((KVCacheLocation(layer, table, page_ids), None))

    def unrolled(weights, pages, x, *rows):
        cos_sin, attend = context(*rows)
        for layer, of_layer in enumerate(weights):
            x, pages = block_of(of_layer)(x, cos_sin, pages, attend(jnp.int32(layer)))
        return x, pages

    def scanned(weights, pages, x, *rows):
        cos_sin, attend = context(*rows)

        def one(carry, layer_and_weights):
            layer, of_layer = layer_and_weights
            return block_of(of_layer)(carry[0], cos_sin, carry[1], attend(layer)), None

        return jax.lax.scan(one, (x, pages), (jnp.arange(NUM_LAYERS, dtype=jnp.int32), weights))[0]

    def temporaries(function, weights):
        rows = [
            abstract((batch,), jnp.int32),
            abstract((batch,), jnp.int32),
            abstract((batch, 512), jnp.int32),
            abstract((batch,), jnp.int32),
        ]
        arguments = weights, abstract((NUM_LAYERS, 2, 4096, 8, 16, 128)), abstract((batch, 4096)), *rows
        with jax.set_mesh(mesh):
            return jax.jit(function, donate_argnums=1).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    apart = temporaries(unrolled, [[abstract(leaf.shape, leaf.dtype) for leaf in leaves] for _ in range(NUM_LAYERS)])
    stacked = temporaries(scanned, [abstract((NUM_LAYERS, *leaf.shape), leaf.dtype) for leaf in leaves])
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    print(f"{target}, batch {batch}: unrolled {apart / 2**20:.1f} MiB of temporaries, scanned {stacked / 2**20:.1f} MiB")
    assert apart < 2**23 < largest <= stacked
