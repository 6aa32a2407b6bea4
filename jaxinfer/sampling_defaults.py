"""A model's default sampling parameters, for requests that leave them out. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.hub import published_generation
from checkpoints.json_file import read_json
from checkpoints.source import CheckpointError
from jaxinfer.request import RequestError, SamplingParams

FILE = "generation_config.json"
# Names in the file -> fields of `SamplingParams`. The same set as vLLM's; other entries don't affect sampling.
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_sampling_defaults(model: str, path: Path, generation_config: str) -> dict[str, Any]:
    """Fields of `SamplingParams` by name, from the checkpoint's file or, for a known model without one, from its model
    card; empty for `generation_config` "none". Raises `CheckpointError` for an invalid value."""
    if generation_config == "none":
        return {}
    file = path / FILE
    settings = read_json(file) if file.exists() else published_generation(model)
    defaults = {field: settings[name] for name, field in _FIELDS.items() if settings.get(name) is not None}
    if defaults.get("top_k") == -1:
        defaults["top_k"] = 0
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise CheckpointError(f"{file}: {error}; correct it, or leave the file unused with --generation-config none") from error
    return defaults


def describe(defaults: Mapping[str, Any]) -> str:
    """As text, such as 'temperature 0.2, top_p 0.9'."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
