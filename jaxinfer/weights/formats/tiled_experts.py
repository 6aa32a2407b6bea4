"""Experts in tiles of lossless bfloat16, each an expert of `grouped_matmul`: made of plain ones as they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array

from jaxinfer.weights.formats.tiled import Tiled
from jaxinfer.weights.formats.weight_format import Axes, MatrixAxes, WeightLeaf
from pallas_kernels.grouped_matmul.formats import Weights
from pallas_kernels.grouped_matmul.lossless import LosslessWeights


@dataclass(frozen=True)
class TiledExperts:
    """As `PackedExperts`, for checkpoints with plain experts. An array is named as its matrix is."""

    name: str = "lossless"
    suffixes: tuple[str, ...] = ("",)

    def parameters(self, axes: dict[str, int]) -> list[tuple[WeightLeaf, dict[str, Any]]]:
        """The array and its metadata, for axes of which the last two are outputs and inputs."""
        experts, *outputs, inputs = axes.items()
        of_matrix = experts_axes((experts, inputs, *outputs))
        (leaf,) = Tiled().leaves(of_matrix)
        return [(leaf, {"weight_format": Tiled(), "matrix_axes": of_matrix, "is_read_in_place": False})]

    def weights(self, arrays: Sequence[Array]) -> Weights:
        """Of matrices whose outputs may have several axes."""
        (tiles,) = arrays
        return LosslessWeights(tiles.reshape(len(tiles), -1, *tiles.shape[-3:]))


def experts_axes(plain: Axes) -> MatrixAxes:
    """The matrix that all experts are together, whose plain axes are experts, inputs, then outputs."""
    experts, inputs, *outputs = plain
    return MatrixAxes((experts, *outputs), (inputs,), inputs_first=True)
