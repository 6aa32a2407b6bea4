"""Where a model is stored, by the name that a user gives it, found without opening its weights. Imports no NumPy, so
that a command reports a wrong name at once."""

from __future__ import annotations

import re
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.json_file import read_json
from checkpoints.user_folders import expand

DEFAULT_MODEL, EMBEDDING_MODEL = "default", "minilm"
FETCH_AGAIN = "fetch or convert the file again"  # what to do about a damaged GGUF
_WAYS = f"give a local folder (config.json, tokenizer.json, safetensors or Orbax), a .gguf file, a Hugging Face id such as org/name, or {DEFAULT_MODEL!r}"


def local_path(model: str) -> Path | None:
    """The folder or .gguf file of this name; None for one to be fetched. Raises `CheckpointError` for a path that does
    not exist."""
    if model in (DEFAULT_MODEL, EMBEDDING_MODEL):
        return None
    path = expand(model)
    if model and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path
    if model and path.exists():
        raise CheckpointError(f"model {model!r} is neither a folder nor a .gguf file: {_WAYS}")
    if path.suffix == ".gguf" or not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise CheckpointError(f"model {model!r} does not exist: {_WAYS}")
    return None


def is_remote(model: str) -> bool:
    """Whether it is a Hugging Face id. Raises as `local_path`."""
    return model not in (DEFAULT_MODEL, EMBEDDING_MODEL) and local_path(model) is None


def check_model(model: str) -> None:
    """Raises the `CheckpointError` that opening a local model would, as far as its path and its config.json show."""
    path = local_path(model)
    if path is None:
        return
    if path.is_file():
        try:
            with path.open("rb") as file:
                check_magic(path, file.read(4))
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read ({error}); check the path, or {FETCH_AGAIN}") from error
    elif not any(path.glob("*.gguf")) or (path / "config.json").exists():
        read_json(path / "config.json")


def check_magic(path: Path, start: bytes) -> None:
    """Raises `CheckpointError` unless these first bytes of a file are a GGUF's."""
    if start[:4] != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file (it starts with {start[:4]!r}); {FETCH_AGAIN}")
