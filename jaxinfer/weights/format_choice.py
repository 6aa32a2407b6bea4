"""Choice of a model's weight format and activation type on these devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, Literal, TypeVar

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxinfer.config import ConfigError, ModelConfig
from jaxinfer.weights.formats.lossless import Lossless
from jaxinfer.weights.formats.packed import Packed
from jaxinfer.weights.formats.registry import WEIGHT_FORMATS
from jaxinfer.weights.formats.tiled import Tiled
from jaxinfer.weights.formats.weight_format import MatrixAxes, ModelWeightFormat, WeightFormat
from jaxinfer.weights.template import Template
from pallas_kernels.llvm.host import host_target
from sharding.rules import Rules

logger = logging.getLogger(__name__)

TemplateT = TypeVar("TemplateT", bound=Template[Any])


def lay_out(
    build: Callable[[ModelWeightFormat, jnp.dtype, int], TemplateT],
    config: ModelConfig,
    platform: str,
    meshes: Sequence[tuple[AbstractMesh | Mesh, Rules]],
    *,
    keeps_types: bool = False,
    incompressible: frozenset[MatrixAxes] = frozenset(),
    no_kernels: str | None = None,
) -> TemplateT:
    """The template from `build`, for one device, in the best weight format for these meshes. `build`'s last argument is
    the number of devices that heads are split over. `Template.abstract` later refuses one that can't be split.
    `incompressible`: matrices that are found not to fit a compressed format. `no_kernels`: why these devices can't run
    `grouped_matmul`'s; None if they can."""
    weight_format, activation_dtype = choose_formats(config, platform, keeps_types=keeps_types)
    if isinstance(weight_format.matrices, Lossless):
        shards = lcm(*(mesh.size for mesh, _ in meshes))
        weight_format = replace(weight_format, matrices=Lossless(shards, incompressible))
    if isinstance(weight_format.matrices, Tiled):
        backend: Literal["mosaic_gpu", "xla"] = "mosaic_gpu" if no_kernels is None and config.matmul_backend == "auto" else "xla"
        logger.info("matmul backend for lossless matrices: %s (%s)", backend, no_kernels or config.matmul_backend)
        weight_format = replace(weight_format, matrices=Tiled(backend, _splits(meshes), incompressible))
    if isinstance(weight_format.matrices, Packed) and config.matmul_backend == "auto":
        try:
            for mesh, rules in meshes:
                build(weight_format, activation_dtype, mesh.size).abstract(mesh, rules)
        except ValueError as error:
            logger.info("matmul backend: xla after all (packed, %s)", error)
            weight_format = replace(weight_format, matrices=weight_format.matrices.unpacked)
    return build(weight_format, activation_dtype, 1)


def _splits(meshes: Sequence[tuple[AbstractMesh | Mesh, Rules]]) -> tuple[tuple[str, int], ...]:
    """Logical axes that some of these meshes split, and a number of parts that has what each of them needs."""
    found: dict[str, int] = {}
    for mesh, rules in meshes:
        found |= {axis: lcm(found.get(axis, 1), mesh.shape[of_mesh]) for axis, of_mesh in rules.items()}
    return tuple(sorted((axis, parts) for axis, parts in found.items() if parts > 1))


def compute_type(config: ModelConfig, platform: str) -> tuple[str, str]:
    """The type that `dtype` means on devices of this platform, and why."""
    if config.dtype != "auto":
        return config.dtype, "asked for"
    if config.weights == "lossless":
        return "bfloat16", "auto: what is compressed without loss"
    if platform != "cpu":
        return "bfloat16", "auto on a GPU"
    instructions = host_target().native_bfloat16
    return (
        ("bfloat16", f"auto: {instructions} multiplies it")
        if instructions
        else ("float32", "auto: this processor has no bfloat16 products")
    )


def choose_formats(config: ModelConfig, platform: str, *, keeps_types: bool = False) -> tuple[ModelWeightFormat, jnp.dtype]:
    """A model's weight format, and the type of activations and KV. `keeps_types`: no matrix becomes integers. On CPU
    activations are float32 for any weights: see `formats.plain.multiply`.

    Raises `ConfigError` for a matmul backend or a format that can't run here."""
    name, _ = compute_type(config, platform)
    if config.weights == "lossless" and not keeps_types:
        activations = "float32" if platform == "cpu" else name
        return ModelWeightFormat(_lossless(name, config.matmul_backend, platform)), jnp.dtype(activations)
    named = "plain" if keeps_types or config.weights in ("auto", "dequantised") else config.weights
    matrices: WeightFormat = WEIGHT_FORMATS[named](jnp.dtype(name))
    packed = Packed(matrices.dtype)
    against = packed.unsupported_reason(platform) or (None if packed.unpacked == matrices else f"it packs no {named} matrices")
    if config.matmul_backend == "packed" and against:
        raise ConfigError(f"matmul_backend is packed, but {against}: use auto or xla")
    is_packed = config.matmul_backend == "packed" or (config.matmul_backend == "auto" and not against)
    reason = "asked for" if config.matmul_backend != "auto" else against or "a kernel made for this processor"
    logger.info("matmul backend for %s: %s (%s)", matrices.dtype, "packed" if is_packed else "xla", reason)
    return ModelWeightFormat(packed if is_packed else matrices), jnp.dtype("float32" if platform == "cpu" else name)


def _lossless(dtype: str, matmul_backend: str, platform: str) -> Lossless | Tiled:
    """Raises `ConfigError`."""
    if dtype != "bfloat16":
        raise ConfigError(f"weights is lossless, which is of bfloat16, but dtype is {dtype}: use auto or bfloat16")
    if platform == "gpu":
        if matmul_backend == "packed":
            raise ConfigError("weights is lossless, but matmul_backend is packed, which is for CPUs: use auto or xla")
        return Tiled()
    if matmul_backend == "xla":
        raise ConfigError("weights is lossless, but matmul_backend is xla, which reads no such matrices: use auto or packed")
    lossless = Lossless()
    if against := lossless.unsupported_reason(platform):
        raise ConfigError(f"weights is lossless, but {against}: use auto")
    logger.info("matmul backend for %s: lossless (asked for)", lossless)
    return lossless
