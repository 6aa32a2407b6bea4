"""Experts as DeepSeek-V3 has them: float8_e4m3fn with a float32 scale for 128 x 128."""

from __future__ import annotations

import jax.numpy as jnp

from checkpoints.source import FP8_BLOCKS
from jaxinfer.weights.formats.packed_experts import ExpertPart, PackedExperts
from pallas_kernels.grouped_matmul.formats import INPUTS, LINE, OUTPUTS, WORDS, Fp8, fp8_scale, fp8_words

FP8 = PackedExperts(
    "fp8",
    stored_as=FP8_BLOCKS,
    quant_method="fp8",
    parts=(
        ExpertPart(
            "weight",
            "_words",
            cut=(OUTPUTS, INPUTS),
            dtype=jnp.dtype("float8_e4m3fn"),
            tile=(2 * OUTPUTS, WORDS),
            tile_dtype=jnp.dtype("int32"),
            pack=fp8_words,
        ),
        ExpertPart(
            "weight_scale_inv",
            "_scales",
            cut=(1, 1),
            dtype=jnp.dtype("float32"),
            tile=(LINE,),
            tile_dtype=jnp.dtype("float32"),
            pack=fp8_scale,
        ),
    ),
    kind=Fp8,
)
