"""A model's structure without its weights: which arrays a program takes for them, and how it puts them together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from checkpoints.weight_map import WeightMap
from jaxinfer.kv_cache.spec import LayerGroups
from jaxinfer.layers.heads import HeadLayout
from jaxinfer.layers.matrices import InStack, MatrixFormat
from jaxinfer.models.base import CausalLM, ModelSlice
from jaxinfer.models.config import ArchitectureConfig
from jaxinfer.models.encoder_config import EncoderConfig
from jaxinfer.models.registry import model_class
from pallas_kernels.span import Span
from sharding.partition import named_sharding
from sharding.rules import Rules

Weights = tuple[Array, ...]
SCALE = "_scale"  # how the name of a matrix of integers is continued for its scales


class _Loadable(Protocol):
    weight_map: WeightMap

    def __init__(self, config: Any, form: MatrixFormat, activation_dtype: jnp.dtype) -> None: ...


Model = TypeVar("Model", bound=_Loadable)


@dataclass(frozen=True)
class Leaf:
    """One array of the weights: a parameter, or several of one shape stacked along a new first axis: vectors (norms, biases, scales) and
    packed matrices, which a program reads where they lie. Every array costs the host more than a microsecond a step. Other matrices are
    arrays of their own: of a stack XLA would copy each."""

    places: tuple[int, ...]  # of its parameters among those of the module's state
    paths: tuple[str, ...]  # of its parameters, such as "blocks.3.mlp_norm.scale"
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    dtype: jnp.dtype
    is_packed: bool = False
    output_axes: int | None = None  # how many of a matrix's axes, the first ones, are outputs; None for what lies as in checkpoints
    part: str | None = None  # of packed experts: what of a checkpoint's tensors it is made of, such as "weight_packed"

    @property
    def is_stack(self) -> bool:
        return self.is_packed or len(self.paths) > 1

    @property
    def is_of_experts(self) -> bool:
        """Whether it is of a matrix for each of a mixture's experts."""
        return self.axes[0] == "experts" and len(self.shape) > 2

    @property
    def axes_of_one(self) -> tuple[str | None, ...]:
        """Without the stack's own."""
        return self.axes[1:] if self.is_stack else self.axes

    @property
    def name(self) -> str:
        """Such as "blocks.3.attention.qkv.kernel"."""
        return f"{self.paths[0]} and {len(self.paths) - 1} like it" if len(self.paths) > 1 else self.paths[0]


@dataclass(frozen=True)
class Template(Generic[Model]):
    """A module split once into its structure and a flat list of leaves. Programs take the leaves as arguments and call `merge`
    while being traced, so a step never walks module state."""

    config: ArchitectureConfig | EncoderConfig
    form: MatrixFormat
    activation_dtype: jnp.dtype  # of what flows between layers, keys and values too
    model: type[Model]
    graph: Any = field(compare=False)  # follows from what is above, as does the next
    structure: Any = field(compare=False)  # of the state, as a pytree
    leaves: tuple[Leaf, ...]
    part: ModelSlice | None = None  # what it has leaves of, where that is not all

    @property
    def layers(self) -> range:
        """Of a language model, those that it has leaves of."""
        assert isinstance(self.config, ArchitectureConfig)
        return range(self.config.num_layers) if self.part is None else self.part.layers

    @property
    def heads(self) -> HeadLayout | None:
        """Of a language model: how its attention heads come from the model's own, where they are those of a mesh."""
        assert isinstance(self.config, ArchitectureConfig)
        return self.config.heads

    @property
    def layer_spans(self) -> tuple[Span, ...]:
        """Of a language model: what each layer of all attends to."""
        assert isinstance(self.config, ArchitectureConfig)
        return self.config.layer_spans

    @property
    def layers_of_group(self) -> int:
        """Of a language model: layers that a page is for."""
        groups = LayerGroups.of(self.layer_spans)
        return groups.size if self.part is None else groups.of_stage(self.part.layers).size

    @property
    def is_first(self) -> bool:
        return self.part is None or self.part.is_first

    @property
    def is_last(self) -> bool:
        return self.part is None or self.part.is_last

    @property
    def head(self) -> Template[Model]:
        """Of what has the output head: with those leaves alone that scores over the vocabulary are made of."""
        names = [path for leaf in self.leaves for path in leaf.paths]
        of_head = "head." if any(name.startswith("head.") for name in names) else "embedding."
        return replace(self, leaves=tuple(leaf for leaf in self.leaves if any(path.startswith(of_head) for path in leaf.paths)))

    def head_weights(self, weights: Weights) -> Weights:
        """Those of `head`, of these leaves'."""
        kept = self.head.leaves
        return tuple(array for leaf, array in zip(self.leaves, weights, strict=True) if leaf in kept)

    def merge(self, weights: Weights) -> Model:
        """The module with these arrays in it, for use inside a program. Of other parts there is nothing in it that could be used."""
        parameters: dict[int, Array | InStack] = {}
        for leaf, array in zip(self.leaves, weights, strict=True):
            if leaf.is_packed:
                parameters |= {place: InStack(array, jnp.int32(i)) for i, place in enumerate(leaf.places)}
            else:
                parameters |= zip(leaf.places, array if leaf.is_stack else (array,), strict=True)
        absent = jnp.zeros(())
        state = [parameters.get(place, absent) for place in range(self.structure.num_leaves)]
        return nnx.merge(self.graph, jax.tree.unflatten(self.structure, state))

    def abstract(self, mesh: Mesh, rules: Rules) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape, type and sharding of each leaf on a mesh. Raises `ValueError` where an axis can't be split so."""
        return tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=named_sharding(mesh, rules, leaf.axes, leaf.shape, leaf.name))
            for leaf in self.leaves
        )


ModelTemplate = Template[CausalLM]


def make_template(
    config: ArchitectureConfig, form: MatrixFormat, activation_dtype: jnp.dtype | None = None, part: ModelSlice | None = None
) -> ModelTemplate:
    """Build the model abstractly, or a part of it: no array is made. Activations have the vectors' type unless another is given."""
    return template_of(model_class(config), config, form, activation_dtype or form.vector_dtype, part)


def template_of(
    model: type[Model],
    config: ArchitectureConfig | EncoderConfig,
    form: MatrixFormat,
    activation_dtype: jnp.dtype,
    part: ModelSlice | None = None,
) -> Template[Model]:
    """The same of any class with a weight map that is built from these."""
    graph, state = nnx.split(nnx.eval_shape(lambda: model(config, form, activation_dtype)))
    parameters, structure = jax.tree.flatten_with_path(state)
    metadata = dict(nnx.to_flat_state(state))
    names = [".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)) for path, _ in parameters]
    is_tied = not any(name.startswith("head.") for name in names)
    together: dict[Any, list[tuple[int, str]]] = {}  # vectors, scales and packed matrices by axes and shape, all else by itself
    for place, (path, value) in enumerate(parameters):
        if part is not None and not part.holds(names[place], is_tied=is_tied):
            continue
        key = tuple(step.key for step in path if isinstance(step, jax.tree_util.DictKey))
        about = metadata[key].get_metadata()
        is_packed = about.get("is_packed", False)
        is_scale = str(key[-1]).endswith(SCALE)
        alone = is_scale if is_scale or is_packed or len(value.shape) == 1 else key
        kind = (alone, is_packed, about.get("output_axes"), about.get("part"), about["logical_axes"], value.shape, value.dtype)
        together.setdefault(kind, []).append((place, names[place]))
    leaves = []
    for (_, is_packed, output_axes, stored_as, axes, shape, of_type), of_leaf in together.items():
        if is_packed or len(of_leaf) > 1:
            axes, shape = (None, *axes), (len(of_leaf), *shape)
        places, paths = zip(*of_leaf, strict=True)
        leaves.append(Leaf(places, paths, axes, shape, of_type, is_packed, output_axes, stored_as))
    return Template(config, form, activation_dtype, model, graph, structure, tuple(leaves), part)
