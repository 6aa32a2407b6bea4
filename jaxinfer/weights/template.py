"""A model's structure without its weights: the arrays that a program takes, and how it merges them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from checkpoints.weight_map import WeightMap
from jaxinfer.architecture.encoder_config import EncoderConfig
from jaxinfer.architecture.head_layout import HeadLayout
from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.kv_cache.spec import LayerGroups
from jaxinfer.layers.matrices import keep_formats
from jaxinfer.models.base import CausalLM, ModelSlice
from jaxinfer.models.registry import model_class
from jaxinfer.weights.formats.weight_format import MatrixAxes, ModelWeightFormat, StackedMatrix, WeightFormat
from pallas_kernels.span import Span
from sharding.partition import named_sharding
from sharding.rules import Rules

Weights = tuple[Array, ...]


class _Loadable(Protocol):
    weight_map: WeightMap

    def __init__(self, config: Any, weight_format: ModelWeightFormat, activation_dtype: jnp.dtype) -> None: ...


ModelT = TypeVar("ModelT", bound=_Loadable)


@dataclass(frozen=True)
class Leaf:
    """One array of the weights: a parameter, or several of one shape stacked along a new first axis. Stacked are
    vectors (norms, biases, scales) and matrices that a program reads in place (packed ones): each array costs the host
    more than a microsecond a step. Other matrices are separate: XLA would copy each out of a stack."""

    places: tuple[int, ...]  # indices of its parameters in the module's state
    paths: tuple[str, ...]  # names of its parameters, such as "blocks.3.mlp_norm.scale"
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    dtype: jnp.dtype
    is_read_in_place: bool = False  # by products that take a `StackedMatrix`
    weight_format: WeightFormat | None = None  # on a matrix's first array, if checkpoints store it otherwise
    matrix_axes: MatrixAxes | None = None  # of such a matrix
    part: str | None = None  # of packed experts: the part of a checkpoint's tensors, such as "weight_packed"
    is_companion: bool = False  # a matrix's further array, such as its scales: made together with the first

    @property
    def is_stack(self) -> bool:
        return self.is_read_in_place or len(self.paths) > 1

    @property
    def is_of_experts(self) -> bool:
        """Whether it has a matrix for each expert."""
        return self.axes[0] == "experts" and len(self.shape) > 2

    @property
    def axes_of_one(self) -> tuple[str | None, ...]:
        """Axes without the stack's."""
        return self.axes[1:] if self.is_stack else self.axes

    @property
    def name(self) -> str:
        """A name such as "blocks.3.attention.qkv.kernel"."""
        return f"{self.paths[0]} and {len(self.paths) - 1} like it" if len(self.paths) > 1 else self.paths[0]


@dataclass(frozen=True)
class Template(Generic[ModelT]):
    """A module split once into its structure and a flat list of leaves. Programs take the leaves as arguments and call
    `merge` while being traced, so a step never walks module state."""

    config: ArchitectureConfig | EncoderConfig
    weight_format: ModelWeightFormat
    activation_dtype: jnp.dtype  # of hidden states, keys and values
    model: type[ModelT]
    graph: Any = field(compare=False)  # follows from the fields above, as does the next
    structure: Any = field(compare=False)  # of the state, as a pytree
    leaves: tuple[Leaf, ...]
    part: ModelSlice | None = None  # the slice whose leaves it has; None: all
    has_unread: bool = False  # whether it has leaves of modules that no program reads (`WeightMap.unread`)

    @property
    def layers(self) -> range:
        """The layers of a language model whose leaves it has."""
        assert isinstance(self.config, ArchitectureConfig)
        return range(self.config.num_layers) if self.part is None else self.part.layers

    @property
    def heads(self) -> HeadLayout | None:
        """How a mesh's heads map to the language model's own, if they differ."""
        assert isinstance(self.config, ArchitectureConfig)
        return self.config.heads

    @property
    def layer_spans(self) -> tuple[Span, ...]:
        """The span of each layer of the whole language model."""
        assert isinstance(self.config, ArchitectureConfig)
        return self.config.layer_spans

    @property
    def layers_of_group(self) -> int:
        """Layers of a page of the language model."""
        groups = LayerGroups.of(self.layer_spans)
        return groups.size if self.part is None else groups.of_stage(self.part.layers).size

    @property
    def is_first(self) -> bool:
        return self.part is None or self.part.is_first

    @property
    def is_last(self) -> bool:
        return self.part is None or self.part.is_last

    @property
    def head(self) -> Template[ModelT]:
        """The template of the output head: only the leaves that logits are computed from."""
        names = [path for leaf in self.leaves for path in leaf.paths]
        of_head = "head." if any(name.startswith("head.") for name in names) else "embedding."
        return replace(self, leaves=tuple(leaf for leaf in self.leaves if any(path.startswith(of_head) for path in leaf.paths)))

    def head_weights(self, weights: Weights) -> Weights:
        """The weights of `head`, from this template's."""
        kept = self.head.leaves
        return tuple(array for leaf, array in zip(self.leaves, weights, strict=True) if leaf in kept)

    def merge(self, weights: Weights) -> ModelT:
        """The module with these arrays, for use inside a program. Parts without leaves must not be used."""
        parameters: dict[int, Array | StackedMatrix] = {}
        for leaf, array in zip(self.leaves, weights, strict=True):
            if leaf.is_read_in_place:
                parameters |= {place: StackedMatrix(array, jnp.int32(i)) for i, place in enumerate(leaf.places)}
            else:
                parameters |= zip(leaf.places, array if leaf.is_stack else (array,), strict=True)
        absent = jnp.zeros(())
        state = [parameters.get(place, absent) for place in range(self.structure.num_leaves)]
        return nnx.merge(self.graph, jax.tree.unflatten(self.structure, state))

    def abstract(self, mesh: Mesh | AbstractMesh, rules: Rules) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape, type and sharding of each leaf on a mesh. Raises `ValueError` for an axis that can't be split."""
        return tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=named_sharding(mesh, rules, leaf.axes, leaf.shape, leaf.name))
            for leaf in self.leaves
        )


ModelTemplate = Template[CausalLM]


def make_template(
    config: ArchitectureConfig, weight_format: ModelWeightFormat, activation_dtype: jnp.dtype | None = None, part: ModelSlice | None = None
) -> ModelTemplate:
    """The abstract model, or a slice of it, without arrays. Activations have the vectors' type by default."""
    return template_of(model_class(config), config, weight_format, activation_dtype or weight_format.vector_dtype, part)


def template_of(
    model: type[ModelT],
    config: ArchitectureConfig | EncoderConfig,
    weight_format: ModelWeightFormat,
    activation_dtype: jnp.dtype,
    part: ModelSlice | None = None,
    *,
    has_unread: bool = False,
) -> Template[ModelT]:
    """The template of any class with a weight map; the same one for the same arguments. `has_unread`: include modules
    that no program reads."""
    return _template_of(model, config, weight_format, activation_dtype, part, has_unread)


# Both roles ask for it, each stage, and a search for a layout hundreds of times; a deep model takes a second.
@functools.lru_cache(maxsize=256)
def _template_of(
    model: type[Any],
    config: ArchitectureConfig | EncoderConfig,
    weight_format: ModelWeightFormat,
    activation_dtype: jnp.dtype,
    part: ModelSlice | None,
    has_unread: bool,
) -> Template[Any]:
    module = model(config, weight_format, activation_dtype)
    keep_formats(module, dict(weight_format.kept))
    graph, state = nnx.split(module)
    parameters, structure = jax.tree.flatten_with_path(state)
    metadata = dict(nnx.to_flat_state(state))
    names = [".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)) for path, _ in parameters]
    is_tied = not any(name.startswith("head.") for name in names)
    left_out = () if has_unread else model.weight_map.unread
    # Vectors, scales and matrices read in place are grouped by axes and shape; others are separate.
    together: dict[Any, list[tuple[int, str]]] = {}
    for place, (path, value) in enumerate(parameters):
        if names[place].partition(".")[0] in left_out or (part is not None and not part.holds(names[place], is_tied=is_tied)):
            continue
        key = tuple(step.key for step in path if isinstance(step, jax.tree_util.DictKey))
        about = metadata[key].get_metadata()
        is_read_in_place = about.get("is_read_in_place", False)
        is_companion = about.get("is_companion", False)
        alone = is_companion if is_companion or is_read_in_place or len(value.shape) == 1 else key
        of_matrix = (is_read_in_place, about.get("weight_format"), about.get("matrix_axes"), about.get("part"), is_companion)
        kind = (alone, of_matrix, about["logical_axes"], value.shape, value.dtype)
        together.setdefault(kind, []).append((place, names[place]))
    leaves = []
    for (_, of_matrix, axes, shape, of_type), of_leaf in together.items():
        if of_matrix[0] or len(of_leaf) > 1:
            axes, shape = (None, *axes), (len(of_leaf), *shape)
        places, paths = zip(*of_leaf, strict=True)
        leaves.append(Leaf(places, paths, axes, shape, of_type, *of_matrix))
    return Template(config, weight_format, activation_dtype, model, graph, structure, tuple(leaves), part, has_unread)
