"""Conversion of a checkpoint's arrays to those of a model's programs: int8 and packed matrices, packed experts, heads
of a mesh; each as soon as it is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from jaxinfer.architecture.head_layout import HeadLayout
from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.weights.formats.gguf_blocks import GgufBlocks
from jaxinfer.weights.formats.plain import AsStored, Plain
from jaxinfer.weights.formats.registry import STORED_EXPERTS
from jaxinfer.weights.formats.weight_format import ExpertFormat, MatrixAxes, MisfitError, ModelWeightFormat, WeightFormat
from jaxinfer.weights.template import Leaf, Template, Weights, template_of
from sharding.mesh import is_cpu
from sharding.rules import Rules

_PARTS = {part.name: part for one in STORED_EXPERTS.values() for part in one.parts}


class Conversion:
    """`plain`: the template to load with: matrices of floats, the model's own heads, packed experts as stored; with
    `as_stored`, matrices to be converted have their outputs first, as most checkpoints have them. It is the given
    template if nothing is converted. `abstract`: its arrays on the mesh, with heads whole on each device where the
    mesh's differ. `convert` takes the arrays one at a time, in any thread; `weights` assembles the results."""

    def __init__(self, template: Template[Any], mesh: Mesh, rules: Rules, *, as_stored: bool = False) -> None:
        self._mesh, self._weight_format, self._as_stored = mesh, template.weight_format, as_stored
        config, weight_format = template.config, self._weight_format
        self._heads = config.heads if isinstance(config, ArchitectureConfig) else None
        self.plain: Template[Any] = template
        if isinstance(config, ArchitectureConfig):
            config = config.with_own_heads()
        matrices = self._weight_format.matrices
        if not matrices.is_plain:
            # bfloat16 is rounded as it is read: half the bytes to move. Integers are made of what was stored.
            loaded_type = matrices.dtype if matrices.dtype == jnp.bfloat16 else jnp.dtype("float32")
            weight_format = ModelWeightFormat(
                AsStored(loaded_type, matrices) if as_stored else Plain(loaded_type),
                experts=_as_loaded(self._weight_format),
                kept=tuple((name, blocks.as_stored) for name, blocks in self._weight_format.kept if isinstance(blocks, GgufBlocks)),
            )
        if (config, weight_format) != (template.config, template.weight_format):
            self.plain = template_of(
                template.model, config, weight_format, template.activation_dtype, template.part, has_unread=template.has_unread
            )
        if any(leaf.part for leaf in self.plain.leaves):
            self.plain = replace(self.plain, leaves=tuple(map(stored_leaf, self.plain.leaves)))
        self._targets = list(zip(template.leaves, template.abstract(mesh, rules), strict=True))
        self._target_of = {name: (leaf, target) for leaf, target in self._targets for name in (*leaf.paths, leaf.name)}
        self._axes = {leaf.name: leaf.axes for leaf in self.plain.leaves}
        self._spread_axes = frozenset[str]() if self._heads is None else self._heads.spread_axes
        self._lock = threading.Lock()
        self._stacks: dict[str, Array] = {}  # by leaf
        self._misfits: dict[str, tuple[WeightFormat, MatrixAxes, Array]] = {}
        self.abstract = self.plain.abstract(mesh, {axis: of_mesh for axis, of_mesh in rules.items() if axis not in self._spread_axes})

    def outputs_first(self, leaf: Leaf) -> MatrixAxes | None:
        """Of a leaf of `plain`: the matrix's axes, if it is loaded with its outputs first. Experts never are."""
        target, _ = self._target_of[leaf.name]
        return target.matrix_axes if self._as_stored and not leaf.is_of_experts else None

    def is_of_blocks(self, leaf: Leaf) -> bool:
        """Of a leaf of `plain`: whether it is loaded as the blocks that its tensors are stored in."""
        return isinstance(self._target_of[leaf.name][0].weight_format, GgufBlocks)

    def convert(self, name: str, array: Array) -> dict[str, Array]:
        """A loaded array in the template's format, by the names of its leaves. What belongs to a stack is put there and
        left out: it is in memory twice for a moment only."""
        return {found: one for found, one in self._converted(name, array).items() if not self._put_in_stack(found, one)}

    def _converted(self, name: str, array: Array) -> dict[str, Array]:
        """A matrix in the template's format: one array, or several. For other arrays only heads and type change."""
        leaf, target = self._target_of[name]
        if leaf.part:
            return {name: _packer(leaf.part, self._mesh, jax.typeof(array).sharding.spec, target.sharding.spec)(array)}
        axes = self._axes[name]
        heads = None if self._spread_axes.isdisjoint(axes) else self._heads
        if leaf.weight_format is None and heads is None:
            return {name: array.astype(leaf.dtype)}
        with jax.set_mesh(self._mesh):
            if leaf.weight_format is None:
                return {name: _spreader(axes, heads, leaf.dtype, target.sharding.spec)(array)}
            assert leaf.matrix_axes is not None
            outputs, inputs = leaf.matrix_axes.outputs, leaf.matrix_axes.inputs
            # Permutation of the loaded matrix's dimensions: outputs first, as blocks have them.
            is_of_blocks = isinstance(leaf.weight_format, GgufBlocks)
            order = tuple(range(array.ndim) if is_of_blocks else (axes.index(axis) for axis, _ in (*outputs, *inputs)))
            names = [name + of_matrix.suffix for of_matrix in leaf.weight_format.leaves(leaf.matrix_axes)]
            targets = [self._target_of[name] for name in names]
            specs = tuple(PartitionSpec(*target.sharding.spec[leaf.is_stack :]) for leaf, target in targets)
            arrays, num_misfits = _converter(axes, heads, order, len(outputs), leaf.weight_format, specs)(array)
            if num_misfits is not None:
                self._misfits[name] = leaf.weight_format, leaf.matrix_axes, num_misfits
            return dict(zip(names, arrays, strict=True))

    def _put_in_stack(self, name: str, array: Array) -> bool:
        """Whether this array belongs to a stack; it is there when this returns."""
        leaf, target = self._target_of[name]
        if not leaf.is_stack or (name == leaf.name and not leaf.is_read_in_place):  # loaded as a whole
            return False
        with self._lock, jax.set_mesh(self._mesh):
            if leaf.name not in self._stacks:
                self._stacks[leaf.name] = jnp.zeros(target.shape, _bits(target.dtype), device=target.sharding)
            stack = _put(self._stacks[leaf.name], array, leaf.paths.index(name))
            self._stacks[leaf.name] = stack
        # A thread that went on would load more before this is done, and memory would fill with loaded arrays.
        jax.block_until_ready(array)
        return True

    def weights(self, converted: Mapping[str, Mapping[str, Array]]) -> Weights:
        """The weights in the order of the template's leaves. Raises `MisfitError`."""
        misfits = {name: (weight_format, axes) for name, (weight_format, axes, number) in self._misfits.items() if int(number)}
        if misfits:
            formats, matrices = zip(*misfits.values(), strict=True)
            raise MisfitError(list(misfits), frozenset(matrices), formats[0])
        arrays = {name: array for of_one in converted.values() for name, array in of_one.items()}
        in_order = []
        for leaf, target in self._targets:
            array = arrays.pop(leaf.name) if leaf.name in arrays else _typed(self._stacks.pop(leaf.name), target.dtype)
            in_order.append(jax.device_put(array, target.sharding))
        return tuple(in_order)


def _as_loaded(weight_format: ModelWeightFormat) -> ExpertFormat:
    """The format that experts are loaded in: packed ones as they are stored, or plain."""
    experts = replace(weight_format.experts, dtype=weight_format.expert_dtype)
    return experts if experts.packing in STORED_EXPERTS else replace(experts, packing=None)


def stored_leaf(leaf: Leaf) -> Leaf:
    """For packed experts, the leaf as the checkpoint stores it; other leaves unchanged."""
    if leaf.part is None:
        return leaf
    part = _PARTS[leaf.part]
    shape = part.stored_shape(leaf.shape)
    return replace(leaf, axes=leaf.axes[: len(shape)], shape=shape, dtype=part.dtype)


@cache
def _packer(name: str, mesh: Mesh, stored: PartitionSpec, packed: PartitionSpec) -> Callable[[Array], Array]:
    """The packing program, one for all leaves of a kind. Devices split experts by whole tiles, so each packs its
    own."""

    def tiled(array: Array) -> Array:
        *lead, outputs, inputs = array.shape
        # One expert at a time: while packing, a code takes four or eight times its size.
        tiles = jax.lax.map(lambda one: _PARTS[name].pack(one[None])[0], array.reshape(-1, outputs, inputs))
        return tiles.reshape(*lead, *tiles.shape[1:])

    packer: Callable[[Array], Array] = jax.jit(jax.shard_map(tiled, mesh=mesh, in_specs=stored, out_specs=packed, check_vma=False))
    return packer


def _bits(dtype: jnp.dtype) -> jnp.dtype:
    """A type of the same size that XLA on CPU updates in place: it would convert a whole bfloat16 stack each time."""
    return jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 else dtype


def _typed(stack: Array, dtype: jnp.dtype) -> Array:
    """These bits as this type, where they lie. XLA on a CPU would copy them."""
    if stack.dtype == dtype:
        return stack
    if not is_cpu(stack.sharding.mesh):  # type: ignore[attr-defined]
        return _bitcast(stack, dtype)
    shards = [jax.device_put(np.asarray(shard.data).view(dtype), shard.device) for shard in stack.addressable_shards]
    return jax.make_array_from_single_device_arrays(stack.shape, stack.sharding, shards)


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def _bitcast(stack: Array, dtype: jnp.dtype) -> Array:
    return jax.lax.bitcast_convert_type(stack, dtype)


@partial(jax.jit, donate_argnums=0)
def _put(stack: Array, one: Array, place: int) -> Array:
    return stack.at[place].set(jax.lax.bitcast_convert_type(one, stack.dtype))


AxisNames = tuple[str | None, ...]


@cache
def _spreader(axes: AxisNames, heads: HeadLayout, dtype: jnp.dtype, spec: PartitionSpec) -> Callable[[Array], Array]:
    """A program that maps heads, one for all arrays of a kind, so that it compiles once."""

    def spread(array: Array) -> Array:
        return _spread(array, axes, heads).astype(dtype)

    spreader: Callable[[Array], Array] = jax.jit(jax.sharding.auto_axes(spread, out_sharding=spec))
    return spreader


@cache
def _converter(
    axes: AxisNames,
    heads: HeadLayout | None,
    order: tuple[int, ...],
    output_axes: int,
    weight_format: WeightFormat,
    specs: tuple[PartitionSpec, ...],
) -> Callable[[Array], tuple[tuple[Array, ...], Array | None]]:
    """A program that converts matrices, one for all of a kind. It says how much of a matrix the format can't hold."""

    def convert(matrix: Array) -> tuple[tuple[Array, ...], Array | None]:
        spread = matrix if heads is None else _spread(matrix, axes, heads)
        arrays = weight_format.from_plain(spread.transpose(order), output_axes)
        return arrays, weight_format.num_misfits(arrays)

    converter: Callable[[Array], tuple[tuple[Array, ...], Array | None]] = jax.jit(
        jax.sharding.auto_axes(convert, out_sharding=(specs, PartitionSpec()))
    )
    return converter


def _spread(array: Array, axes: AxisNames, heads: HeadLayout) -> Array:
    """Map the model's heads to a mesh's, with copies and zeros."""
    if "q_k_v" in axes:  # queries, key and value of each KV head; its queries may move to its copies
        at, num_axes, sources, num_of_model = axes.index("kv_heads"), 2, heads.projections, heads.model_heads + 2 * heads.model_kv_heads
    elif "kv_heads" in axes:
        at, num_axes, sources, num_of_model = axes.index("kv_heads"), 1, heads.kv_heads, heads.model_kv_heads
    else:
        at, num_axes, sources, num_of_model = axes.index("heads"), 1, heads.query_heads, heads.model_heads
    before, after = array.shape[:at], array.shape[at + num_axes :]
    # Vectors over all heads are flat: a head is a part of their axis.
    one_by_one = array.reshape(*before, num_of_model, -1, *after)
    places = np.array([num_of_model if source is None else source for source in sources])
    taken = jnp.take(one_by_one, places, axis=at, mode="fill", fill_value=0)
    return taken.reshape(*before, *((heads.num_kv_heads, heads.group + 2) if num_axes == 2 else (-1,)), *after)
