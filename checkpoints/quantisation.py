"""The quantisation that a checkpoint's config.json declares, of the two that are supported. Others are refused, with
the field that declares them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.source import BY_HAND, FP8_BLOCKS, INT4_GROUPS, CheckpointError

_KEY = "quantization_config"
_READ = "fp8 in blocks of 128 x 128 (DeepSeek-V3's) and compressed-tensors' int4 in groups of 32 (Kimi K2's) can be read"
# Allowed values of each field; the message names the first. None: it may be absent.
_FP8: dict[str, tuple[Any, ...]] = {"fmt": ("e4m3", None), "weight_block_size": ([128, 128],), "activation_scheme": ("dynamic", None)}
_COMPRESSED: dict[str, tuple[Any, ...]] = {"format": ("pack-quantized",), "sparsity_config": (None, {}), "transform_config": (None, {})}
_GROUP = {"format": ("pack-quantized", None), "input_activations": (None,), "output_activations": (None,)}
_WEIGHTS = {
    "num_bits": (4,),
    "type": ("int", None),
    "strategy": ("group",),
    "group_size": (32,),
    "symmetric": (True, None),
    "dynamic": (False, None),
    "actorder": (None, False),
}


def declared_quantisation(config: Mapping[str, Any], file: Path) -> str | None:
    """FP8_BLOCKS, INT4_GROUPS, or None for a checkpoint that is not quantised. `config` is the contents of `file`; a
    multimodal model's may have the declaration at its top or in its text_config. Raises `CheckpointError` that names
    the field."""
    text = config.get("text_config")
    field, found = _KEY, config.get(_KEY)
    if not found and isinstance(text, dict):
        field, found = f"text_config.{_KEY}", text.get(_KEY)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method == "fp8":
        _check(file, field, found, _FP8)
        return FP8_BLOCKS
    if method == "compressed-tensors":
        _check(file, field, found, _COMPRESSED)
        groups = found.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise CheckpointError(f"{file}: {field}.config_groups is {groups!r}: it must hold a group; fetch the checkpoint again")
        for name, group in groups.items():
            _check(file, f"{field}.config_groups.{name}", group, _GROUP)
            _check(file, f"{field}.config_groups.{name}.weights", group.get("weights"), _WEIGHTS)
        return INT4_GROUPS
    raise CheckpointError(f"{file}: {field}.quant_method is {method!r}: {_READ}; {BY_HAND}")


def _check(file: Path, field: str, found: Any, wanted: Mapping[str, tuple[Any, ...]]) -> None:
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: {field} is {found!r}, not an object; fetch the checkpoint again")
    for key, values in wanted.items():
        if found.get(key) not in values:
            raise CheckpointError(f"{file}: {field}.{key} is {found.get(key)!r}, not {values[0]!r}: {_READ}; {BY_HAND}")
