"""Experts with weights in each format, as checkpoints have them and as numbers."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import formats, lossless
from pallas_kernels.grouped_matmul.cases import ExpertsCase


class Experts(NamedTuple):
    weights: formats.Weights
    matrices: np.ndarray  # [E, D, F]: what the checkpoint says, in float64


def experts(case: ExpertsCase, random: np.random.Generator) -> Experts:
    """Random ones; scales differ by a factor of 8. Lossless ones with large, small and no weights among the others."""
    shape = (case.num_experts, case.outputs, case.inputs)
    if case.format == "int4":
        integers = random.integers(-8, 8, shape)
        scale = jnp.asarray(2.0 ** random.uniform(-5, -2, (*shape[:2], case.inputs // 32)), jnp.bfloat16)
        products = integers * np.repeat(np.asarray(scale, np.float64), 32, -1)
        weights = formats.int4_from_compressed_tensors(jnp.asarray(compressed_tensors_words(integers)), scale)
        return Experts(weights, np.asarray(products.astype(jnp.bfloat16), np.float64).swapaxes(1, 2))
    if case.format == "fp8":
        numbers = random.standard_normal(shape).astype(jnp.float8_e4m3fn)
        scale = (2.0 ** random.uniform(-5, -2, (shape[0], shape[1] // 128, shape[2] // 128))).astype(np.float32)
        products = numbers.astype(np.float64) * scale.repeat(128, 1).repeat(128, 2)
        return Experts(formats.fp8_from_blocks(jnp.asarray(numbers), jnp.asarray(scale)), products.swapaxes(1, 2))
    plain = (random.standard_normal(shape) / 8).astype(jnp.bfloat16).swapaxes(1, 2)
    if case.format == "lossless":
        large, small, none = (tuple(random.integers(size, size=20) for size in plain.shape) for _ in range(3))
        plain[large], plain[small], plain[none] = plain[large] * 2.0**20, plain[small] * 2.0**-40, 0
        weights = lossless.lossless_from_bfloat16(jnp.asarray(plain.swapaxes(1, 2)))
        assert not lossless.num_misfits(weights)
        return Experts(weights, np.asarray(plain, np.float64))
    return Experts(jnp.asarray(plain), np.asarray(plain, np.float64))


def compressed_tensors_words(integers: np.ndarray) -> np.ndarray:
    """Rows of integers of 4 bits, eight an int32, the first one lowest, 8 added."""
    words = np.zeros((*integers.shape[:-1], integers.shape[-1] // 8), np.uint32)
    for place in range(8):
        words |= (integers[..., place::8] + 8).astype(np.uint32) << (4 * place)
    return words.view(np.int32)
