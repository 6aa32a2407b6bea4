"""A model cut into the stages of a pipeline, so that none of them takes much longer than another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxinfer.models.base import Part
from jaxinfer.models.config import ArchitectureConfig
from jaxinfer.runtime.template import ModelTemplate, make_template
from sharding.stage_balancer import balance


def cut(template: ModelTemplate, num_stages: int) -> tuple[ModelTemplate, ...]:
    """A template for each stage. Raises `ValueError` for more stages than layers."""
    if num_stages == 1:
        return (template,)
    assert isinstance(template.config, ArchitectureConfig)
    parts = [Part(layers, layers.start == 0, layers.stop == template.config.num_layers) for layers in stage_layers(template, num_stages)]
    return tuple(make_template(template.config, template.form, template.activation_dtype, part) for part in parts)


def stage_layers(template: ModelTemplate, num_stages: int) -> list[range]:
    """The layers of each stage. The cost of a layer is the bytes of its weights, which decode reads and prefill multiplies with; the head's comes
    on top of the last stage, while of the embedding a step reads a few rows. So memory is shared out evenly too. Raises `ValueError` for more
    stages than layers."""
    return balance(layer_bytes(template), num_stages, last_extra=head_bytes(template))


def layer_bytes(template: ModelTemplate) -> Sequence[int]:
    """Of each layer's weights."""
    found = [0] * len(template.layers)
    for path, num_bytes in _bytes_of(template).items():
        if path.startswith("blocks."):
            found[int(path.split(".")[1])] += num_bytes
    return found


def head_bytes(template: ModelTemplate) -> int:
    """Of what gives the scores over the vocabulary, which may be the embedding's table."""
    of_paths = _bytes_of(template)
    return sum(num_bytes for path, num_bytes in of_paths.items() if path.startswith("head.")) or of_paths["embedding.table"]


def _bytes_of(template: ModelTemplate) -> dict[str, int]:
    """By parameter."""
    return {
        path: math.prod(leaf.shape) * leaf.dtype.itemsize // (len(leaf.paths) if leaf.is_stack else 1)
        for leaf in template.leaves
        for path in leaf.paths
    }
