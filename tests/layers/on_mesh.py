"""A layer by itself, on a mesh of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.weights.formats.weight_format import StackedMatrix
from sharding.mesh import make_mesh
from sharding.partition import named_sharding, replicated
from sharding.rules import TENSOR_PARALLEL, Rules


def shapes(layer: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Of each parameter, such as "router.kernel"."""
    return {".".join(map(str, path)): param.shape for path, param in nnx.to_flat_state(nnx.state(layer))}


def on_mesh(
    layer: nnx.Module, values: Mapping[str, np.ndarray], device_ids: tuple[int, ...] = (0,), rules: Rules = TENSOR_PARALLEL
) -> Callable[..., Any]:
    """The layer with these values, split over devices as models are, as a compiled function of its inputs."""
    mesh = make_mesh(device_ids)
    graph, state = nnx.split(layer)
    flat = dict(nnx.to_flat_state(state))
    placed = {}
    for path, param in flat.items():
        name, axes = ".".join(map(str, path)), param.get_metadata()["logical_axes"]
        value = np.asarray(values[name])
        placed[path] = jax.device_put(value.reshape(param.shape).astype(param.dtype), named_sharding(mesh, rules, axes, param.shape, name))
    assert {".".join(map(str, path)) for path in placed} == set(values)

    @jax.jit
    def run(arrays: Any, *inputs: Any) -> Any:
        merged = nnx.merge(graph, nnx.from_flat_state({path: param.replace(arrays[path]) for path, param in flat.items()}))
        return merged(*inputs)

    def call(*inputs: np.ndarray) -> Any:
        with jax.set_mesh(mesh):
            return jax.tree.map(np.asarray, run(placed, *map(jnp.asarray, inputs)))

    return call


def compiled(layer: nnx.Module, num_tokens: int, device_ids: tuple[int, ...], rules: Rules) -> jax.stages.Compiled:
    """A mixture's program for so many float32 tokens. Packed matrices come in a stack of one, as a model's do."""
    mesh = make_mesh(device_ids)
    graph, state = nnx.split(layer)
    flat = dict(nnx.to_flat_state(state))
    in_place = {path: param.get_metadata().get("is_read_in_place", False) for path, param in flat.items()}
    arrays = {}
    for path, param in flat.items():
        axes, shape = ((None,), (1,)) if in_place[path] else ((), ())
        axes, shape = (*axes, *param.get_metadata()["logical_axes"]), (*shape, *param.shape)
        arrays[path] = jax.ShapeDtypeStruct(shape, param.dtype, sharding=named_sharding(mesh, rules, axes, shape, str(path)))
    x = jax.ShapeDtypeStruct((num_tokens, flat["router", "kernel"].shape[0]), jnp.float32, sharding=replicated(mesh))

    def run(arrays: Any, x: jax.Array) -> Any:
        values = {path: StackedMatrix(array, jnp.int32(0)) if in_place[path] else array for path, array in arrays.items()}
        return nnx.merge(graph, nnx.from_flat_state({path: param.replace(values[path]) for path, param in flat.items()}))(x)

    with jax.set_mesh(mesh):
        return jax.jit(run).lower(arrays, x).compile()
