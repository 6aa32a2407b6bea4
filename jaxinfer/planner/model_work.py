"""Work of a step in each layer, for `sharding.cost_model`: bytes and products, from a model's template and config."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxinfer.architecture.model_config import ArchitectureConfig, Routing
from jaxinfer.models.base import ModelSlice
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from jaxinfer.weights.template import ModelTemplate, make_template
from sharding.cost_model import AttentionWork, ExpertWork, LayerWork, Matrices
from sharding.rules import Rules

# Kernels left after XLA's fusion, counted in decode and prefill programs of Llama 3.1 8B, Llama 4 Scout and Kimi K2.5
# compiled for H100 and H200: 11 to 14 in a dense layer, 30 to 38 in one with experts, about 15 before and after the
# layers.
_LAYER_KERNELS, _ROUTING_KERNELS = 12, 22
_EMBEDDING_KERNELS, _HEAD_KERNELS = 3, 12
# Reads and writes of a token's vector between products: by two norms and two residuals; by RoPE and attention, for all
# heads.
_LAYER_MOVES, _HEAD_MOVES = 10, 3


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a whole model's arrays, by its parts, such as "blocks.3" or "head"."""

    num_layers: int
    split: Mapping[str, int]  # of arrays that are split over devices
    whole: Mapping[str, int]  # of arrays that each device has whole

    def on_device(self, layers: range, num_devices: int) -> int:
        """Weights on each device of a stage; `models.base.ModelSlice` decides which parts a stage has."""
        kept = ModelSlice(layers, layers.start == 0, layers.stop == self.num_layers)
        is_tied = "head" not in self.split and "head" not in self.whole
        names = [name for name in {*self.split, *self.whole} if kept.holds(name, is_tied=is_tied)]
        return sum(self._part_bytes(name, num_devices) for name in names)

    def of_layer(self, layer: int, num_devices: int) -> int:
        """On each of a stage's devices."""
        return self._part_bytes(f"blocks.{layer}", num_devices)

    def _part_bytes(self, name: str, num_devices: int) -> int:
        return self.split.get(name, 0) // num_devices + self.whole.get(name, 0)


@dataclass(frozen=True)
class ModelWork:
    """Work of a whole model. A stage does its layers', the first also the embedding's, the last also the head's."""

    embedding: LayerWork
    layers: tuple[LayerWork, ...]
    head: LayerWork
    weights: WeightBytes

    def of_stage(self, layers: range) -> list[LayerWork]:
        """Work of a stage with these layers."""
        first = [self.embedding] if layers.start == 0 else []
        last = [self.head] if layers.stop == len(self.layers) else []
        return [*first, *self.layers[layers.start : layers.stop], *last]


def model_work(template: ModelTemplate, rules: Rules, kv_bytes: int | None = None) -> ModelWork:
    """The work of a template's model, laid out by these rules. `kv_bytes`: of a cached value, if not an
    activation's."""
    config = template.config
    assert isinstance(config, ArchitectureConfig)
    num_bytes, num_values = _bytes_by_part(template, rules), _values_by_part(template, rules)
    dtype = str(template.weight_format.dtype)

    def matrices(part: str) -> Matrices:
        return Matrices(num_bytes[part, True], num_bytes[part, False], num_values[part, True], num_values[part, False], dtype=dtype)

    routing = getattr(config.family, "routing", None)
    value_bytes = template.activation_dtype.itemsize
    width = config.hidden_size * value_bytes
    layers = tuple(
        LayerWork(
            matrices(f"blocks.{layer}"),
            _experts(template, routing, num_bytes[f"blocks.{layer}", None], num_values[f"blocks.{layer}", None]),
            _attention(config, layer, value_bytes, kv_bytes or value_bytes),
            reduced_bytes=(width, width),
            split_moved=value_bytes * (_HEAD_MOVES * (config.num_heads + config.num_kv_heads) * config.head_size + 3 * config.mlp_size),
            whole_moved=_LAYER_MOVES * width,
            num_kernels=_LAYER_KERNELS + _ROUTING_KERNELS * bool(num_values[f"blocks.{layer}", None]),
        )
        for layer in range(config.num_layers)
    )
    of_row = config.hidden_size * template.weight_format.dtype.itemsize
    embedding = LayerWork(
        Matrices(row_bytes=of_row, dtype=dtype), reduced_bytes=(width,), whole_moved=2 * width, num_kernels=_EMBEDDING_KERNELS
    )
    head = LayerWork(
        matrices("embedding" if config.tie_word_embeddings else "head"),
        reduced_bytes=(8,),
        split_moved=2 * 4 * config.vocab_size,  # logits are written, then read
        num_kernels=_HEAD_KERNELS,
        of_sampled=True,
    )
    return ModelWork(embedding, layers, head, _weight_bytes(config, num_bytes))


def weight_bytes(template: ModelTemplate, rules: Rules) -> WeightBytes:
    """The bytes of a template's model, laid out by these rules."""
    assert isinstance(template.config, ArchitectureConfig)
    return _weight_bytes(template.config, _bytes_by_part(template, rules))


# (part of the model, whether it is split over devices; None for experts) -> bytes or values
_ByPart = defaultdict[tuple[str, bool | None], int]


def _weight_bytes(config: ArchitectureConfig, num_bytes: _ByPart) -> WeightBytes:
    split, whole = defaultdict[str, int](int), defaultdict[str, int](int)
    for (part, is_split), size in num_bytes.items():
        (whole if is_split is False else split)[part] += size
    return WeightBytes(config.num_layers, split, whole)


def _bytes_by_part(template: ModelTemplate, rules: Rules) -> _ByPart:
    found = _ByPart(int)
    for leaf in template.leaves:
        size = math.prod(leaf.shape) * leaf.dtype.itemsize // len(leaf.paths)
        is_split = None if leaf.is_of_experts else any(axis in rules for axis in leaf.axes)
        for path in leaf.paths:
            found[_part(path), is_split] += size
    return found


def _values_by_part(template: ModelTemplate, rules: Rules) -> _ByPart:
    """Values of matrices in the unpacked model, except those that attention multiplies itself."""
    assert isinstance(template.config, ArchitectureConfig)
    weight_format, found = template.weight_format, _ByPart(int)
    is_plain = weight_format.matrices.is_plain and weight_format.experts.packing is None and not weight_format.kept
    plain = template if is_plain else make_template(template.config, ModelWeightFormat(Plain(jnp.dtype("bfloat16"))))
    for leaf in plain.leaves:
        if len(leaf.axes_of_one) > 1 and not leaf.paths[0].endswith(".attention.up"):
            is_split = None if leaf.is_of_experts else any(axis in rules for axis in leaf.axes)
            for path in leaf.paths:
                found[_part(path), is_split] += math.prod(leaf.shape) // len(leaf.paths)
    return found


def _part(path: str) -> str:
    """The part of the model, such as "blocks.3" or "head"."""
    names = path.split(".")
    return ".".join(names[:2]) if names[0] == "blocks" else names[0]


def _experts(template: ModelTemplate, routing: Routing | None, num_bytes: int, num_values: int) -> ExpertWork | None:
    if routing is None or not num_values:
        return None
    dtype = template.weight_format.experts.packing or str(template.weight_format.expert_dtype)
    count = routing.num_experts
    has_shared = any(".mlp.shared." in path for leaf in template.leaves for path in leaf.paths)
    return ExpertWork(count, routing.top_k, num_bytes // count, num_values // count, dtype, has_shared)


def _attention(config: ArchitectureConfig, layer: int, value_bytes: int, kv_bytes: int) -> AttentionWork:
    span, latent = config.layer_spans[layer], config.latent
    if latent is not None:
        return AttentionWork(
            token_bytes=latent.latent_size * kv_bytes,
            is_split=True,
            decode_values=config.num_heads * (latent.latent_size + latent.rank),
            prefill_values=config.num_heads * (latent.head_size + latent.value_size),
            expand_values=config.num_heads * latent.rank * (latent.nope_size + latent.value_size),
            exchanged_bytes=config.num_heads * (latent.latent_size + latent.rank) * value_bytes,
        )
    values = 2 * config.num_heads * config.head_size
    token_bytes = 2 * config.num_kv_heads * config.head_size * kv_bytes
    return AttentionWork(token_bytes, True, values, values, window=span.window, chunk=span.chunk)
