"""Matrices of linear layers in tiles, as `grouped_matmul`'s GPU kernel reads them: bfloat16 in 12 bits a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Int32

from jaxinfer.layers.deferred_collectives import as_partial_sum
from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import Axes, MatrixAxes, WeightFormat, WeightLeaf
from pallas_kernels.grouped_matmul.lossless import ROWS, LosslessWeights, lossless_from_bfloat16, num_misfits
from pallas_kernels.grouped_matmul.op import grouped_matmul
from pallas_kernels.grouped_matmul.word_order import INPUTS, OUTPUTS, WORDS

_BFLOAT16 = jnp.dtype(jnp.bfloat16)
# More rows than this expand the layer for XLA's product: each tile of rows unpacks the weights anew, while an
# expansion is written and read once. By arithmetic, not measured: an H200 multiplies 256 rows in the time that it
# needs to move the expanded weights.
MOST_ROWS_IN_KERNEL = 256


@dataclass(frozen=True)
class Tiled:
    """A matrix is one array: an expert of `grouped_matmul`. Embeddings, sizes that no tile divides, and matrices whose
    values don't fit are plain bfloat16."""

    backend: Literal["mosaic_gpu", "xla"] = "mosaic_gpu"
    splits: tuple[tuple[str, int], ...] = ()  # logical axes that are split, and over how many devices
    incompressible: frozenset[MatrixAxes] = frozenset()

    @property
    def dtype(self) -> jnp.dtype:
        return _BFLOAT16

    @property
    def vector_dtype(self) -> jnp.dtype:
        return _BFLOAT16

    @property
    def expert_dtype(self) -> jnp.dtype:
        return _BFLOAT16

    @property
    def is_plain(self) -> bool:
        return False

    def for_matrix(self, axes: MatrixAxes) -> WeightFormat:
        fits = axes.inputs_first and axes not in self.incompressible and self._has_tiles(axes)
        return self if fits else Plain(_BFLOAT16)

    def _has_tiles(self, axes: MatrixAxes) -> bool:
        if prod(axes.output_shape) % OUTPUTS or axes.num_inputs % INPUTS:
            return False
        splits, tile_axes = dict(self.splits), _tile_axes(axes)
        merged = axes.outputs[len(tile_axes) - 1 :]
        return all(size % splits.get(name, 1) == 0 for name, size in tile_axes) and splits.keys().isdisjoint(name for name, _ in merged)

    def leaves(self, axes: MatrixAxes) -> tuple[WeightLeaf, ...]:
        named = _tile_axes(axes)
        shape, names = tuple(size for _, size in named), tuple(name for name, _ in named)
        return (WeightLeaf((*shape, sum(ROWS), WORDS), (*names, None, None), jnp.dtype("int32")),)

    def from_plain(self, matrix: Float[Array, "..."], output_axes: int) -> tuple[Array, ...]:
        sizes = matrix.shape[:output_axes]
        outer = sizes[: _num_outer(sizes)]
        # The axes before tiles' stay apart, as experts do: XLA would gather an axis that devices split within another.
        tiles = lossless_from_bfloat16(matrix.astype(_BFLOAT16).reshape(prod(outer), prod(sizes[len(outer) :]), -1)).tiles
        return (tiles.reshape(*outer, *tiles.shape[1:]),)

    def num_misfits(self, arrays: Sequence[Array]) -> Int[Array, ""]:
        return num_misfits(LosslessWeights(arrays[0]))

    def product(
        self,
        x: Float[Array, "T I"],
        arrays: Sequence[Any],
        axes: MatrixAxes,
        context: StepContext = NO_CONTEXT,
        *,
        is_summed: bool = True,
    ) -> Float[Array, "..."]:
        (tiles,) = arrays
        sharding = jax.typeof(tiles).sharding
        *outputs, inputs, _, _ = sharding.spec
        merged = axes.output_shape[len(outputs) :]  # axes whose tiles are counted along the last one of `outputs`
        is_split = is_summed and inputs is not None and sharding.mesh.shape[inputs] > 1
        local = partial(self._local, merged, inputs if is_split else None)
        over_shards: Any = jax.shard_map(
            local if is_summed else as_partial_sum(local),
            mesh=sharding.mesh,
            in_specs=(PartitionSpec(None, inputs), sharding.spec),
            out_specs=PartitionSpec(*(() if is_summed else (inputs,)), None, *outputs, *[None] * len(merged)),
            check_vma=False,
        )
        return over_shards(x, tiles)

    def _local(
        self, merged: tuple[int, ...], split_over: str | None, x: Float[Array, "T I"], tiles: Int32[Array, "... 386 16"]
    ) -> Float[Array, "T ..."]:
        """On one device."""
        weights = LosslessWeights(tiles.reshape(1, -1, *tiles.shape[-3:]))
        backend = self.backend if len(x) <= MOST_ROWS_IN_KERNEL and x.dtype == _BFLOAT16 else "xla"
        y = grouped_matmul(x, weights, jnp.full(1, len(x), jnp.int32), backend=backend)
        y = y if split_over is None else jax.lax.psum(y, split_over)
        return y.reshape(len(x), *tiles.shape[:-4], -1, *merged)

    def outputs_of(self, arrays: Sequence[Any]) -> tuple[Array, int, int]:
        raise AssertionError("embeddings are plain")

    def rows(
        self, arrays: Sequence[Any], places: Int[Array, " T"], out_sharding: PartitionSpec | None, dtype: jnp.dtype
    ) -> Float[Array, "T I"]:
        raise AssertionError("embeddings are plain")

    def unsupported_reason(self, platform: str) -> str | None:
        return None if platform == "gpu" or self.backend == "xla" else f"its kernel is for NVIDIA GPUs, not {platform}"

    def __str__(self) -> str:
        return f"bfloat16 lossless by {self.backend}"


def _num_outer(outputs: Sequence[int]) -> int:
    """How many axes of outputs stay as they are. The others, as few as possible, are cut into tiles together."""
    return next(num for num in reversed(range(len(outputs))) if prod(outputs[num:]) % OUTPUTS == 0)


def _tile_axes(axes: MatrixAxes) -> Axes:
    """The numbers of tiles, along axes of outputs and then of inputs. Tiles of several axes have the first one's
    name."""
    outer = _num_outer(axes.output_shape)
    tiles = axes.outputs[outer][0], prod(axes.output_shape[outer:]) // OUTPUTS
    return (*axes.outputs[:outer], tiles, (axes.inputs[0][0], axes.num_inputs // INPUTS))
