"""The model in the formats that the peers read, created once in the user's cache folder: the weights are the same in
all of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.guidellm_replay import write_tokenizer
from benchmarks.peers.venvs import LLAMA_CPP, PARITY, PeerUnavailable
from benchmarks.worker import ROOT
from checkpoints.hub import cache_dir


def provide_weights(kind: str, model: Path, say: Callable[[str], None] = print) -> Path:
    """`kind` as an engine's `weights`: 'model' or 'gguf' (the file itself), 'gguf F16' and such, 'folder' (Hugging Face
    format, float32). Raises `PeerUnavailable` where a format can't be created."""
    if kind == "model" or (kind == "folder" and model.is_dir()):
        return model
    if model.is_dir():
        raise PeerUnavailable(f"it reads .gguf files, and {model.name} is a folder")
    if kind == "gguf":
        return model
    # The size distinguishes two files of one name well enough.
    made = cache_dir().parent / "peers" / f"{model.stem}-{model.stat().st_size}"
    if kind == "folder":
        return _folder(model, made, say)
    return _float_file(model, made.with_name(f"{made.name}-{kind.split()[1]}.gguf"), kind.split()[1], say)


def _folder(model: Path, made: Path, say: Callable[[str], None]) -> Path:
    if (made / "tokenizer_config.json").is_file():  # written last
        return made
    if not PARITY.is_made:
        raise PeerUnavailable(f"its folder of weights is made by transformers, and {PARITY.folder} is not there")
    say(f"writing {model.name} as a folder of float32 weights, once")
    _run(PARITY.python, "benchmarks.peers.write_folder", model, made)
    write_tokenizer(made, str(model))
    return made


def _float_file(model: Path, made: Path, kind: str, say: Callable[[str], None]) -> Path:
    if made.is_file():
        return made
    say(f"writing {model.name} as {kind}, once")
    made.parent.mkdir(parents=True, exist_ok=True)
    part = made.with_suffix(".part")
    _run(LLAMA_CPP.python, "benchmarks.peers.write_gguf", model, part, kind)
    part.replace(made)  # the whole file or none
    return made


def _run(python: Path, module: str, *arguments: object) -> None:
    done = subprocess.run([str(python), "-m", module, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerUnavailable(f"its weights can't be written: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
