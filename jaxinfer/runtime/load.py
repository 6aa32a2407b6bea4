"""A model's structure without its weights, and its weights from a checkpoint onto a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from checkpoints.loader import load
from checkpoints.source import TensorSource
from checkpoints.weight_map import WeightMap
from jaxinfer.models.base import CausalLM
from jaxinfer.models.config import ArchitectureConfig
from jaxinfer.models.encoder_config import EncoderConfig
from jaxinfer.models.registry import model_class
from sharding.partition import named_sharding
from sharding.rules import Rules

Weights = tuple[Array, ...]


class _Loadable(Protocol):
    weight_map: WeightMap

    def __init__(self, config: Any, dtype: jnp.dtype, activation_dtype: jnp.dtype) -> None: ...


Model = TypeVar("Model", bound=_Loadable)


@dataclass(frozen=True)
class Leaf:
    """One array of the weights: a parameter, or several vectors (norms, biases) of one shape stacked along a new first axis. Every
    array costs the host more than a microsecond a step, and half of a model's parameters are vectors."""

    places: tuple[int, ...]  # of its parameters among those of the module's state
    paths: tuple[str, ...]  # of its parameters, such as "blocks.3.mlp_norm.scale"
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]

    @property
    def is_stack(self) -> bool:
        return len(self.paths) > 1

    @property
    def name(self) -> str:
        """Such as "blocks.3.attention.qkv.kernel"."""
        return f"{self.paths[0]} and {len(self.paths) - 1} like it" if self.is_stack else self.paths[0]


@dataclass(frozen=True)
class Template(Generic[Model]):
    """A module split once into its structure and a flat list of leaves. Programs take the leaves as arguments and call `merge`
    while being traced, so a step never walks module state."""

    config: ArchitectureConfig | EncoderConfig
    dtype: jnp.dtype  # of the weights
    activation_dtype: jnp.dtype  # of what flows between layers, keys and values too
    model: type[Model]
    graph: Any
    structure: Any  # of the state, as a pytree
    leaves: tuple[Leaf, ...]

    def merge(self, weights: Weights) -> Model:
        """The module with these arrays in it, for use inside a program."""
        parameters: dict[int, Array] = {}
        for leaf, array in zip(self.leaves, weights, strict=True):
            parameters |= zip(leaf.places, array if leaf.is_stack else (array,), strict=True)
        return nnx.merge(self.graph, jax.tree.unflatten(self.structure, [parameters[place] for place in range(len(parameters))]))

    def abstract(self, mesh: Mesh, rules: Rules) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape, type and sharding of each leaf on a mesh. Raises `ValueError` where an axis can't be split so."""
        return tuple(
            jax.ShapeDtypeStruct(leaf.shape, self.dtype, sharding=named_sharding(mesh, rules, leaf.axes, leaf.shape, leaf.name))
            for leaf in self.leaves
        )


ModelTemplate = Template[CausalLM]


def make_template(config: ArchitectureConfig, dtype: jnp.dtype, activation_dtype: jnp.dtype | None = None) -> ModelTemplate:
    """Build the model abstractly: no array is made. Activations have the weights' type unless another is given."""
    return template_of(model_class(config), config, dtype, activation_dtype or dtype)


def template_of(
    model: type[Model], config: ArchitectureConfig | EncoderConfig, dtype: jnp.dtype, activation_dtype: jnp.dtype
) -> Template[Model]:
    """The same of any class with a weight map that is built from these."""
    graph, state = nnx.split(nnx.eval_shape(lambda: model(config, dtype, activation_dtype)))
    parameters, structure = jax.tree.flatten_with_path(state)
    metadata = dict(nnx.to_flat_state(state))
    together: dict[Any, list[tuple[int, str]]] = {}  # vectors by axes and shape, all else by itself
    for place, (path, value) in enumerate(parameters):
        key = tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))
        axes = metadata[key].get_metadata()["logical_axes"]
        alone = None if len(value.shape) == 1 else place
        together.setdefault((alone, axes, value.shape), []).append((place, ".".join(map(str, key))))
    leaves = []
    for (_, axes, shape), of_leaf in together.items():
        if len(of_leaf) > 1:
            axes, shape = (None, *axes), (len(of_leaf), *shape)
        places, paths = zip(*of_leaf, strict=True)
        leaves.append(Leaf(places, paths, axes, shape))
    return Template(config, dtype, activation_dtype, model, graph, structure, tuple(leaves))


def load_weights(template: Template[Any], source: TensorSource, mesh: Mesh, rules: Rules) -> Weights:
    """The checkpoint's weights on the mesh, each device reading only its part. Raises `CheckpointError`."""
    weight_map = template.model.weight_map
    for leaf in template.leaves:
        if leaf.is_stack:
            weight_map = weight_map.with_stack(leaf.name, leaf.paths)
    names = [leaf.name for leaf in template.leaves]
    loaded = load(source, dict(zip(names, template.abstract(mesh, rules), strict=True)), weight_map)
    return tuple(loaded[name] for name in names)


def random_weights(template: Template[Any], mesh: Mesh, rules: Rules) -> Weights:
    """Made-up weights, the same on every mesh: normal, scaled by fan-in; vectors (norms) are ones."""

    def make(number: int, leaf: Leaf, target: jax.ShapeDtypeStruct) -> Array:
        if leaf.is_stack or len(leaf.shape) == 1:
            value = np.ones(target.shape, np.float32)
        else:
            value = np.random.default_rng(number).standard_normal(target.shape, np.float32) / np.sqrt(np.float32(target.shape[0]))
        return jax.device_put(value.astype(target.dtype), target.sharding)

    return tuple(
        make(i, leaf, target) for i, (leaf, target) in enumerate(zip(template.leaves, template.abstract(mesh, rules), strict=True))
    )


def weight_bytes(weights: Weights) -> int:
    """Bytes of the weights on one device of the mesh."""
    return sum(w.addressable_shards[0].data.nbytes for w in weights)
