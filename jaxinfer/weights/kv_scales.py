"""Scales of float8 keys and values that a checkpoint has."""

from __future__ import annotations

import numpy as np

from checkpoints.source import CheckpointError, TensorSource
from checkpoints.weight_map import WeightMap
from jaxinfer.architecture.model_config import ArchitectureConfig

# By tools: compressed-tensors and AutoFP8, then ModelOpt; a number for a layer, or one a KV head.
_NAMES = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"))


def stored_kv_scales(source: TensorSource, weight_map: WeightMap, config: ArchitectureConfig) -> np.ndarray | None:
    """float32[layers, 2, KV heads], each rounded up to a power of two; None if the checkpoint has none. Raises
    `CheckpointError` for scales of some layers only, of another shape, or not positive."""
    names = weight_map.names_in(source.names())
    places = [[f"model.layers.{layer}.self_attn.{name}" for layer in range(config.num_layers) for name in pair] for pair in _NAMES]
    wanted = next((of_pair for of_pair in places if any(name in names for name in of_pair)), None)
    if wanted is None or config.latent is not None:
        return None
    if missing := [name for name in wanted if name not in names]:
        raise CheckpointError(
            f"{source.path}: {missing[0]!r} and {len(missing) - 1} others are missing, while {len(wanted) - len(missing)} scales of keys "
            "and values are there: fetch the checkpoint again"
        )
    scales = np.empty((config.num_layers * 2, config.num_kv_heads), np.float32)
    for row, name in enumerate(wanted):
        values = source.read(names[name])
        if values.size not in (1, config.num_kv_heads) or not (np.isfinite(values) & (values > 0)).all():
            raise CheckpointError(
                f"{source.path}: tensor {names[name]!r} {values.shape} must be one positive scale, or one for each of {config.num_kv_heads} KV heads"
            )
        scales[row] = values.astype(np.float32).reshape(-1)
    return rounded_up(scales.reshape(config.num_layers, 2, config.num_kv_heads))


def rounded_up(scales: np.ndarray) -> np.ndarray:
    """The next powers of two. Multiplying by them is exact, and float8 is as precise whatever its exponent."""
    mantissas, exponents = np.frexp(scales)
    return np.ldexp(np.float32(1), exponents - (mantissas == 0.5)).astype(np.float32)
