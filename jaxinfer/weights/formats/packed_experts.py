"""Experts stored in a quantised checkpoint's format, packed in tiles for `grouped_matmul`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxinfer.weights.formats.weight_format import WeightLeaf
from pallas_kernels.grouped_matmul.formats import INPUTS, OUTPUTS, Weights


@dataclass(frozen=True)
class ExpertPart:
    """One of the arrays that make up a tensor in a checkpoint, and how it is packed, tile by tile."""

    name: str  # last word of the array's
    suffix: str  # of the parameter's name
    cut: tuple[int, int]  # of a tile: outputs and inputs in the checkpoint's array
    dtype: jnp.dtype
    tile: tuple[int, ...]  # in the array made of it
    tile_dtype: jnp.dtype
    pack: Callable[[Array], Array]  # for arrays [E, outputs, inputs]

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint, for a packed array of this shape."""
        *lead, output_tiles, input_tiles = shape[: len(shape) - len(self.tile)]
        return (*lead, output_tiles * self.cut[0], input_tiles * self.cut[1])


@dataclass(frozen=True)
class PackedExperts:
    """`leaves`: arrays of words and of scales. `weights`: the operand of `grouped_matmul`."""

    name: str
    stored_as: str  # a tensor's format, as `checkpoints.source` has it
    quant_method: str  # in a config.json's quantization_config
    parts: tuple[ExpertPart, ...]
    kind: Callable[..., Weights]  # of the parts' arrays

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of the arrays' names."""
        return tuple(part.suffix for part in self.parts)

    def parameters(self, axes: dict[str, int]) -> list[tuple[WeightLeaf, dict[str, Any]]]:
        """Each of the `leaves` with its metadata."""
        return [(leaf, {"part": part.name}) for part, leaf in zip(self.parts, self.leaves(axes), strict=True)]

    def leaves(self, axes: dict[str, int]) -> tuple[WeightLeaf, ...]:
        """For axes of which the last two are outputs and inputs, in the parts' order."""
        *lead, outputs, inputs = axes.values()
        assert outputs % OUTPUTS == 0 and inputs % INPUTS == 0, axes
        tiles = (*lead, outputs // OUTPUTS, inputs // INPUTS)
        return tuple(
            WeightLeaf((*tiles, *part.tile), (*axes, *[None] * len(part.tile)), part.tile_dtype, part.suffix) for part in self.parts
        )

    def weights(self, arrays: Sequence[Array]) -> Weights:
        """Of matrices whose outputs may have several axes."""
        lead = [array.ndim - len(part.tile) for array, part in zip(arrays, self.parts, strict=True)]
        flat = [array.reshape(len(array), -1, *array.shape[axes - 1 :]) for array, axes in zip(arrays, lead, strict=True)]
        return self.kind(*flat)
