"""JSON files of checkpoints. Imports no NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError


def read_json(file: Path, is_once: bool = False) -> dict[str, Any]:
    """The object in a JSON file; `CheckpointError` names the file where there is none. With `is_once` no key may occur
    twice in it."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_once if is_once else None)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing; give a folder with config.json, tokenizer.json and safetensors, or a .gguf file") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: can't be read as JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, not a JSON object; fetch it again")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON readers silently take the last of duplicate keys."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is listed twice")
        found[key] = value
    return found
