"""What a weight format says of a matrix: its leaves, how a checkpoint's becomes them, its product, where it can run.

A format is a file beside this one with a frozen class, and an entry in `registry.py`; nothing else knows it by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from jaxinfer.layers.step_context import NO_CONTEXT, StepContext

Axes = tuple[tuple[str, int], ...]  # logical names with their sizes


@dataclass(frozen=True)
class MatrixAxes:
    """A matrix from its input axes to its output axes. `inputs_first`: its layout in the plain format. A linear layer's
    product then streams whole rows of outputs; an embedding has one row per output instead."""

    outputs: Axes
    inputs: Axes
    inputs_first: bool

    @property
    def output_shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.outputs)

    @property
    def num_inputs(self) -> int:
        return math.prod(size for _, size in self.inputs)


@dataclass(frozen=True)
class WeightLeaf:
    """One array of a matrix. Its parameter is named as the matrix is, continued by `suffix`: "" for the first,
    such as "_scale" for others."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: jnp.dtype
    suffix: str = ""
    is_read_in_place: bool = False  # its product takes a `StackedMatrix`: those of a shape are one argument

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackedMatrix:
    """One of several matrices stacked in one array, used in place: slicing would copy it."""

    stack: Shaped[Array, "S ..."]
    index: Int[Array, ""]


class MisfitError(Exception):
    """Matrices have values that their format can't hold. `matrices`: their axes."""

    def __init__(self, paths: Sequence[str], matrices: frozenset[MatrixAxes], weight_format: WeightFormat) -> None:
        super().__init__(f"{', '.join(paths)} can't be {weight_format}")
        self.matrices = matrices


class WeightFormat(Protocol):
    """Memory layout and product of matrices of linear layers and embeddings. `arrays`: those of `leaves`, in order; the
    first may be a `StackedMatrix`. Frozen, because compiled programs depend on it."""

    def __hash__(self) -> int: ...

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the stored values: int8 for 8-bit integers with a scale."""
        ...

    @property
    def vector_dtype(self) -> jnp.dtype:
        """Type of vectors in such a model: norms, biases, scales."""
        ...

    @property
    def expert_dtype(self) -> jnp.dtype:
        """Type of plain experts in such a model."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether matrices have the checkpoint's layout, so that they are loaded without conversion."""
        ...

    def for_matrix(self, axes: MatrixAxes) -> WeightFormat:
        """This format, or the fallback for a matrix whose sizes it doesn't support."""
        ...

    def leaves(self, axes: MatrixAxes) -> tuple[WeightLeaf, ...]: ...

    def from_plain(self, matrix: Float[Array, "..."], output_axes: int) -> tuple[Array, ...]:
        """The leaves' arrays of a loaded matrix `[outputs..., inputs...]`, whose first axes are outputs."""
        ...

    def num_misfits(self, arrays: Sequence[Array]) -> Int[Array, ""] | None:
        """How many parts of a converted matrix this format could not hold as they were; None where it holds any."""
        ...

    def product(
        self,
        x: Float[Array, "T I"],
        arrays: Sequence[Any],
        axes: MatrixAxes,
        context: StepContext = NO_CONTEXT,
        *,
        is_summed: bool = True,
    ) -> Float[Array, "..."]:
        """x times the matrix, `[T, outputs...]` in x's type. Inputs that are split over devices are summed over them,
        or else come as `deferred_collectives.PartialSums`; outputs stay split. `context`: what the tokens' rows bring;
        only a format that has something for rows of their own reads it."""
        ...

    def outputs_of(self, arrays: Sequence[Any]) -> tuple[Array, int, int]:
        """Of a matrix with one axis of outputs: an array that they lie in, along which of its dimensions, and how many
        there are of a device."""
        ...

    def rows(
        self, arrays: Sequence[Any], places: Int[Array, " T"], out_sharding: PartitionSpec | None, dtype: jnp.dtype
    ) -> Float[Array, "T I"]:
        """Of such a matrix, the rows of these outputs, in this type. Places past its end give any row."""
        ...

    def unsupported_reason(self, platform: str) -> str | None:
        """Why no backend supports it on devices of this platform; None if one does."""
        ...


@dataclass(frozen=True)
class ExpertFormat:
    """Storage and product of mixture-of-experts matrices."""

    dtype: jnp.dtype | None = None  # None: that of all other matrices; bfloat16 beside integers
    packing: str | None = None  # one of the registry's `EXPERT_FORMATS`; None: plain, of that type
    backend: Literal["mosaic_gpu", "xla"] = "xla"  # of `grouped_matmul`

    def __str__(self) -> str:
        kept = self.packing or self.dtype
        return f"{kept} by {self.backend}" if kept else f"by {self.backend}"


@dataclass(frozen=True)
class ModelWeightFormat:
    """Formats of all weights of a model: its matrices, and its experts."""

    matrices: WeightFormat
    experts: ExpertFormat = ExpertFormat()
    kept: tuple[tuple[str, WeightFormat], ...] = ()  # by name, matrices in another format: that of their checkpoint

    @property
    def dtype(self) -> jnp.dtype:
        return self.matrices.dtype

    @property
    def vector_dtype(self) -> jnp.dtype:
        return self.matrices.vector_dtype

    @property
    def expert_dtype(self) -> jnp.dtype:
        """The type of plain experts."""
        return self.experts.dtype or self.matrices.expert_dtype

    def __str__(self) -> str:
        experts = "" if self.experts == ExpertFormat() else f", experts {self.experts}"
        kept = Counter(str(of_one) for _, of_one in self.kept)
        return f"{self.matrices}{''.join(f', {count} as {name}' for name, count in sorted(kept.items()))}{experts}"
