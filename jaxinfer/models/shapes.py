"""Configurations of known models, their shapes only: for programs and plans that need no weights. Imports no JAX."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from jaxinfer.models.config import UnsupportedModelError

_FOLDER = files("jaxinfer") / "model_shapes"


def known_shapes() -> list[str]:
    """Their names, such as 'llama-3.1-8b'."""
    return sorted(file.name.removesuffix(".json") for file in _FOLDER.iterdir() if file.name.endswith(".json"))


def model_shape(name: str) -> dict[str, Any]:
    """The keys of the model's config.json. Raises `UnsupportedModelError` for a name that is not known."""
    if name not in known_shapes():
        raise UnsupportedModelError(f"no shape of a model {name!r}: there are {', '.join(known_shapes())}")
    shape: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return shape
