"""Configurations of known models, their shapes only: for programs and plans that need no weights. Imports no JAX."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from checkpoints.user_folders import expand
from jaxinfer.architecture.model_config import UnsupportedModelError

_FOLDER = files("jaxinfer.architecture") / "model_shapes"


def known_shapes() -> list[str]:
    """Their names, such as 'llama-3.1-8b'."""
    return sorted(file.name.removesuffix(".json") for file in _FOLDER.iterdir() if file.name.endswith(".json"))


def model_shape(name: str) -> dict[str, Any]:
    """The keys of the model's config.json. Raises `UnsupportedModelError` for a name that is not known."""
    if name not in known_shapes():
        raise UnsupportedModelError(f"no shape of a model {name!r}: there are {', '.join(known_shapes())}")
    shape: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return shape


def read_shape(name_or_path: str) -> dict[str, Any]:
    """Of a known model, or of any by its config.json or its folder. Raises `UnsupportedModelError`."""
    path = expand(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if name_or_path in known_shapes() or path.suffix != ".json":
        return model_shape(name_or_path)
    try:
        shape = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path} can't be read as a config.json: {error}") from error
    if not isinstance(shape, dict):
        raise UnsupportedModelError(f"{path} is no config.json: it must be an object")
    return shape
