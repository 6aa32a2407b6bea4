"""All weight formats by name. A new one is a file in this folder and an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp

from jaxinfer.weights.formats.fp8_blocks import FP8
from jaxinfer.weights.formats.int4_groups import INT4
from jaxinfer.weights.formats.int8 import Int8
from jaxinfer.weights.formats.lossless import Lossless
from jaxinfer.weights.formats.packed import Packed
from jaxinfer.weights.formats.packed_experts import PackedExperts
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.tiled import Tiled
from jaxinfer.weights.formats.tiled_experts import TiledExperts
from jaxinfer.weights.formats.weight_format import WeightFormat

# Of matrices. Each is made for the type of values that products read, which some formats have no choice of.
WEIGHT_FORMATS: Mapping[str, Callable[[jnp.dtype], WeightFormat]] = {
    "plain": Plain,
    "int8": lambda _: Int8(),
    "packed": Packed,
    "lossless": lambda _: Lossless(),
    "tiled": lambda _: Tiled(),
}

# Of a mixture's experts, where they are kept as a quantised checkpoint has them.
STORED_EXPERTS: Mapping[str, PackedExperts] = {one.name: one for one in (INT4, FP8)}

# All that a mixture's experts can be, if they are not plain.
EXPERT_FORMATS: Mapping[str, PackedExperts | TiledExperts] = {**STORED_EXPERTS, "lossless": TiledExperts()}
