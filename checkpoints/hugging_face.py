"""Hugging Face's hub: whether it has a model, and the model's files. Imports no NumPy, so that a command reports a
wrong id early."""

from __future__ import annotations

import os
from pathlib import Path

import httpx  # huggingface_hub's own client
import huggingface_hub

from checkpoints.errors import CheckpointError
from checkpoints.model_path import DEFAULT_MODEL
from checkpoints.user_folders import cache_folder, home_folder

_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
_NOT = ["consolidated*", "original/*", "onnx/*"]  # the same weights again, in other formats
_CHECK_SECONDS = 5.0  # limit of one check: the download has its own timeouts


def download(model: str) -> Path:
    """The folder of a model's files, fetched where they are missing. Raises `CheckpointError`."""
    try:
        return Path(huggingface_hub.snapshot_download(model, cache_dir=_folder(), allow_patterns=_FILES, ignore_patterns=_NOT))
    except Exception as error:  # the HTTP client has exceptions of its own; whatever failed, the remedies are these
        raise _unavailable(model, error) from error


def check_id(model: str) -> None:
    """Raises the `CheckpointError` that `download` would for a model that exists neither locally nor on the hub."""
    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(model, "config.json", cache_dir=_folder()), str):
            return
        huggingface_hub.model_info(model, timeout=_CHECK_SECONDS)
    except httpx.TimeoutException:  # a slow connection is no reason
        return
    except Exception as error:
        raise _unavailable(model, error) from error


def _folder() -> Path | None:
    """None: the library's default, in the home or by HF_HOME."""
    return cache_folder() / "models" / "hub" if home_folder() is None and "HF_HOME" not in os.environ else None


def _unavailable(model: str, error: Exception) -> CheckpointError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"model {model!r} is not a local path and can't be had from Hugging Face ({reason}): check the id and the "
        f"connection (HF_TOKEN for gated models), download it elsewhere and give its folder, or use {DEFAULT_MODEL!r}"
    )
