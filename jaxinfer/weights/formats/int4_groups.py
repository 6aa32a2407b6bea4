"""Experts as compressed-tensors' `pack-quantized` has them (Kimi K2.x): 4-bit integers, a bfloat16 scale
for 32 inputs."""

from __future__ import annotations

import jax.numpy as jnp

from checkpoints.source import INT4_GROUPS
from jaxinfer.weights.formats.packed_experts import ExpertPart, PackedExperts
from pallas_kernels.grouped_matmul.formats import GROUP, INPUTS, OUTPUTS, WORDS, Int4, int4_scale, int4_words

_PER_WORD = 8  # integers in 32 bits

INT4 = PackedExperts(
    "int4",
    stored_as=INT4_GROUPS,
    quant_method="compressed-tensors",
    parts=(
        ExpertPart(
            "weight_packed",
            "_words",
            cut=(OUTPUTS, INPUTS // _PER_WORD),
            dtype=jnp.dtype("int32"),
            tile=(OUTPUTS, WORDS),
            tile_dtype=jnp.dtype("int32"),
            pack=int4_words,
        ),
        ExpertPart(
            "weight_scale",
            "_scales",
            cut=(OUTPUTS, INPUTS // GROUP),
            dtype=jnp.dtype("bfloat16"),
            tile=(2, 256),
            tile_dtype=jnp.dtype("bfloat16"),
            pack=int4_scale,
        ),
    ),
    kind=Int4,
)
