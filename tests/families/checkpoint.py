"""Small checkpoints of every family, made up by rule: a configuration, and values that follow from each tensor's name and shape.

`tests/golden/family_logits/NAME/` holds a family's config.json, with the keys that published checkpoints have, and what the reference
made of it (`make golden`): tensors.json, the names and shapes of what its class saves, and golden.npz, its scores. A further family
is a folder with its config.json.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests import tiny_model
from tests.golden.family_logits.read import FOLDER

Shapes = Mapping[str, tuple[int, ...]]

# By how a tensor's name ends, the first that fits counts: how far it goes beyond fan-in. So that the best token's score is well clear of
# the next, and is another where a part of the context is not seen.
_GAINS = {
    "embed_tokens.weight": 8.0,
    "lm_head.weight": 4.0,
    "q_proj.weight": 1.5,
    "k_proj.weight": 1.5,
    "o_proj.weight": 3.0,
    "down_proj.weight": 3.0,
    "down_proj": 3.0,  # of all experts, in one tensor
}
_TIED = 3.0  # of an embedding that is the head too: with more, each token would bring forth itself
_TIMES_ROOT = 0.6  # of one that the model multiplies by its width's root
_BIAS, _NORM = 0.3, 0.1  # how far biases are from 0, and norms' scales from 1
_GEMMAS_LAST_NORM = 5.0  # its scale, less 1: what takes scores as far apart as elsewhere


def config_of(family: str) -> dict[str, Any]:
    return json.loads((FOLDER / family / "config.json").read_text())


def shapes_of(family: str) -> Shapes:
    """Of each tensor of the family's checkpoint."""
    return {name: tuple(shape) for name, shape in json.loads((FOLDER / family / "tensors.json").read_text()).items()}


def write(folder: Path, config: Mapping[str, Any], shapes: Shapes) -> Path:
    """A checkpoint's folder, with tests/tiny_model.py's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config, shapes), folder / "model.safetensors", {"format": "pt"})
    return folder


def tensors(config: Mapping[str, Any], shapes: Shapes) -> dict[str, np.ndarray]:
    """float32 values, each tensor's random by its name and shape alone."""
    is_gemma, is_tied = str(config["model_type"]).startswith("gemma"), not any(name.endswith("lm_head.weight") for name in shapes)
    gains = {"embed_tokens.weight": _TIMES_ROOT if is_gemma else _TIED if is_tied else _GAINS["embed_tokens.weight"]}
    return {name: _values(name, shape, is_gemma, _GAINS | gains) for name, shape in shapes.items()}


def _values(name: str, shape: tuple[int, ...], is_gemma: bool, gains: Mapping[str, float]) -> np.ndarray:
    random = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    *_, module, last = name.split(".")
    if "norm" in module and last == "weight":
        scale = 1.0 if not is_gemma else _GEMMAS_LAST_NORM if module == "norm" else 0.0
        return (_NORM * random + scale).astype(np.float32)
    if len(shape) == 1 or last == "bias":
        return (_BIAS * random).astype(np.float32)
    gain = next((gain for end, gain in gains.items() if name.endswith(end)), 1.0)
    # Matrices have their inputs last; stacks of experts' that are no "weight" (Llama 4's) have them first.
    inputs = shape[-1] if last == "weight" else shape[-2]
    return (gain * random / math.sqrt(inputs)).astype(np.float32)
