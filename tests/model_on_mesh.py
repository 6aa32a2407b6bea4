"""A model's weights and an empty page pool on a mesh, without an engine around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from checkpoints.hub import open_source
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.models.registry import config_of
from jaxinfer.reference_forward import ReferenceForward
from jaxinfer.weights.formats.packed import Packed
from jaxinfer.weights.formats.weight_format import ModelWeightFormat, WeightFormat
from jaxinfer.weights.load import load_weights
from jaxinfer.weights.template import ModelTemplate, Weights, make_template
from sharding.mesh import make_mesh
from sharding.rules import TENSOR_PARALLEL


@dataclass(frozen=True)
class OnMesh:
    template: ModelTemplate
    mesh: Mesh
    weights: Weights
    pool: PagePool

    def plain_logits(self, token_ids: list[int]) -> np.ndarray:
        return ReferenceForward([(self.template, self.mesh)], lambda: [self.weights]).logits(token_ids)

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(model, pages, *arguments)` as a compiled function of the pages, which it may change where they lie, and the arguments, on the mesh."""
        compiled = jax.jit(lambda weights, *arguments: function(self.template.merge(weights), *arguments), donate_argnums=1)

        def run(*arguments: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return compiled(self.weights, *arguments)

        return run


def put(
    folder: Path,
    device_ids: tuple[int, ...],
    *,
    num_pages: int = 64,
    page_size: int = 8,
    dtype: Any = jnp.float32,
    is_packed: bool = True,
    matrices: WeightFormat | None = None,
) -> OnMesh:
    """`matrices`: a format of their own, instead of the type's packed or plain one."""
    packed = Packed(jnp.dtype(dtype))
    weight_format = ModelWeightFormat(matrices or (packed if is_packed else packed.unpacked))
    if reason := weight_format.matrices.unsupported_reason("cpu"):
        pytest.skip(reason)
    source = open_source(folder)
    config = config_of(source)
    template, mesh = make_template(config.on_devices(len(device_ids)), weight_format), make_mesh(device_ids)
    spec = PageSpec.of(config, page_size, jnp.dtype(dtype).itemsize)
    pool = PagePool(spec, num_pages, template.activation_dtype, mesh, TENSOR_PARALLEL, template.heads)
    pool.allocate()
    return OnMesh(template, mesh, load_weights(template, source, mesh, TENSOR_PARALLEL), pool)
