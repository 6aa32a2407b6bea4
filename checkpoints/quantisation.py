"""The quantisation that a checkpoint's config.json declares. What isn't supported is refused, with the field that
declares it; how wide groups are, and where scales apply, the tensors themselves say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from checkpoints.source import BY_HAND, CheckpointError

_KEY = "quantization_config"
_READ = "fp8 (e4m3, a scale a tensor, an output or a block of 128 x 128) and int4 in groups (compressed-tensors, GPTQ, AWQ) can be read"
# Allowed values of each field; the message names the first. None: it may be absent.
_FP8: dict[str, tuple[Any, ...]] = {"fmt": ("e4m3", None), "weight_block_size": ([128, 128],), "activation_scheme": ("dynamic", None)}
_COMPRESSED: dict[str, tuple[Any, ...]] = {
    "format": ("pack-quantized", "float-quantized"),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
_PACKED_GROUP = {"format": ("pack-quantized", None), "input_activations": (None,), "output_activations": (None,)}
_PACKED = {
    "num_bits": (4,),
    "type": ("int", None),
    "strategy": ("group", "channel"),
    "dynamic": (False, None),
}
_FLOAT_GROUP = {"format": ("float-quantized", None), "output_activations": (None,)}
_FLOAT = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", "channel"),
    "symmetric": (True, None),
    "dynamic": (False, None),
}
_GPTQ = {"bits": (4,), "checkpoint_format": ("gptq", "gptq_v2", None), "is_marlin_format": (False, None)}
_AWQ = {"bits": (4,), "version": ("gemm", "GEMM", None)}


@dataclass(frozen=True)
class Quantisation:
    """`method`: whose names and layout the tensors have. `zero_added`: by how much stored zeros are too small.
    `has_zeros`, `has_indices`: whether each matrix must have zeros, and a group for each input."""

    method: Literal["fp8", "compressed-tensors", "gptq", "awq"]
    zero_added: int = 0
    has_zeros: bool = False
    has_indices: bool = False


def declared_quantisation(config: Mapping[str, Any], file: Path) -> Quantisation | None:
    """None for a checkpoint that is not quantised. `config` is the contents of `file`; a multimodal model's may have
    the declaration at its top or in its text_config. Raises `CheckpointError` that names the field."""
    text = config.get("text_config")
    field, found = _KEY, config.get(_KEY)
    if not found and isinstance(text, dict):
        field, found = f"text_config.{_KEY}", text.get(_KEY)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    match method:
        case "fp8":
            _check(file, field, found, _FP8)
            return Quantisation("fp8")
        case "fbgemm_fp8":
            return Quantisation("fp8")
        case "gptq":
            _check(file, field, found, _GPTQ)
            zero_added = 0 if found.get("checkpoint_format") == "gptq_v2" else 1
            return Quantisation("gptq", zero_added, has_zeros=True, has_indices=bool(found.get("desc_act")))
        case "awq":
            _check(file, field, found, _AWQ)
            return Quantisation("awq", has_zeros=True)
        case "compressed-tensors":
            return _compressed(file, field, found)
    raise CheckpointError(f"{file}: {field}.quant_method is {method!r}: {_READ}; {BY_HAND}")


def _compressed(file: Path, field: str, found: Any) -> Quantisation:
    _check(file, field, found, _COMPRESSED)
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{file}: {field}.config_groups is {groups!r}: it must hold a group; fetch the checkpoint again")
    is_float = found["format"] == "float-quantized"
    for name, group in groups.items():
        _check(file, f"{field}.config_groups.{name}", group, _FLOAT_GROUP if is_float else _PACKED_GROUP)
        _check(file, f"{field}.config_groups.{name}.weights", group.get("weights"), _FLOAT if is_float else _PACKED)
    if is_float:
        return Quantisation("fp8")
    weights = [group["weights"] for group in groups.values()]
    has_zeros, has_indices = (
        all(one.get(key) in values for one in weights) for key, values in (("symmetric", (False,)), ("actorder", ("group", "dynamic")))
    )
    return Quantisation("compressed-tensors", has_zeros=has_zeros, has_indices=has_indices)


def _check(file: Path, field: str, found: Any, wanted: Mapping[str, tuple[Any, ...]]) -> None:
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: {field} is {found!r}, not an object; fetch the checkpoint again")
    for key, values in wanted.items():
        if found.get(key) not in values:
            raise CheckpointError(f"{file}: {field}.{key} is {found.get(key)!r}, not {values[0]!r}: {_READ}; {BY_HAND}")
