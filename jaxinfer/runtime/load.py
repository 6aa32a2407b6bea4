"""A model's structure without its weights, and its weights from a checkpoint onto a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from checkpoints.loader import load
from checkpoints.source import TensorSource
from jaxinfer.models.base import CausalLM
from jaxinfer.models.config import ArchitectureConfig
from jaxinfer.models.registry import model_class
from sharding.partition import named_sharding
from sharding.rules import Rules

Weights = tuple[Array, ...]


@dataclass(frozen=True)
class ModelTemplate:
    """A module split once into its structure and a flat list of leaves. Programs take the leaves as arguments and call `merge`
    while being traced, so a step never walks module state."""

    config: ArchitectureConfig
    dtype: jnp.dtype  # of the weights
    activation_dtype: jnp.dtype  # of what flows between layers, keys and values too
    model: type[CausalLM]
    graph: Any
    structure: Any  # of the state, as a pytree
    paths: tuple[str, ...]  # of each leaf, such as "blocks.3.attention.q.kernel"
    axes: tuple[tuple[str | None, ...], ...]
    shapes: tuple[tuple[int, ...], ...]

    def merge(self, weights: Weights) -> CausalLM:
        """The module with these arrays in it, for use inside a program."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.structure, weights))

    def abstract(self, mesh: Mesh, rules: Rules) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape, type and sharding of each leaf on a mesh. Raises `ValueError` where an axis can't be split so."""
        return tuple(
            jax.ShapeDtypeStruct(shape, self.dtype, sharding=named_sharding(mesh, rules, axes, shape, path))
            for path, axes, shape in zip(self.paths, self.axes, self.shapes, strict=True)
        )


def make_template(config: ArchitectureConfig, dtype: jnp.dtype, activation_dtype: jnp.dtype | None = None) -> ModelTemplate:
    """Build the model abstractly: no array is made. Activations have the weights' type unless another is given."""
    activation_dtype = activation_dtype or dtype
    model = model_class(config)
    graph, state = nnx.split(nnx.eval_shape(lambda: model(config, dtype, activation_dtype)))
    leaves, structure = jax.tree.flatten_with_path(state)
    params = dict(nnx.to_flat_state(state))
    keys = [tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey)) for path, _ in leaves]
    return ModelTemplate(
        config,
        dtype,
        activation_dtype,
        model,
        graph,
        structure,
        paths=tuple(".".join(map(str, key)) for key in keys),
        axes=tuple(params[key].get_metadata()["logical_axes"] for key in keys),
        shapes=tuple(leaf.shape for _, leaf in leaves),
    )


def load_weights(template: ModelTemplate, source: TensorSource, mesh: Mesh, rules: Rules) -> Weights:
    """The checkpoint's weights on the mesh, each device reading only its part. Raises `CheckpointError`."""
    targets = dict(zip(template.paths, template.abstract(mesh, rules), strict=True))
    loaded = load(source, targets, template.model.weight_map)
    return tuple(loaded[path] for path in template.paths)


def random_weights(template: ModelTemplate, mesh: Mesh, rules: Rules) -> Weights:
    """Made-up weights, the same on every mesh: normal, scaled by fan-in; norms are ones."""

    def make(number: int, target: jax.ShapeDtypeStruct) -> Array:
        if len(target.shape) == 1:
            value = np.ones(target.shape, np.float32)
        else:
            value = np.random.default_rng(number).standard_normal(target.shape, np.float32) / np.sqrt(np.float32(target.shape[0]))
        return jax.device_put(value.astype(target.dtype), target.sharding)

    return tuple(make(i, target) for i, target in enumerate(template.abstract(mesh, rules)))


def weight_bytes(weights: Weights) -> int:
    """Bytes of the weights on one device of the mesh."""
    return sum(w.addressable_shards[0].data.nbytes for w in weights)
