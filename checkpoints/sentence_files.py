"""The files that sentence-transformers stores beside an encoder: its preprocessing of texts and its pooling of
tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.json_file import read_json
from checkpoints.source import CheckpointError


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """The contents of each; empty where there is none."""

    # their kinds in order, such as ['Transformer', 'Pooling', 'Normalize']; None: no modules.json
    modules: list[str] | None = None
    transformer: Mapping[str, Any] = field(default_factory=dict)  # sentence_bert_config.json
    pooling: Mapping[str, Any] = field(default_factory=dict)  # the Pooling module's config.json
    settings: Mapping[str, Any] = field(default_factory=dict)  # config_sentence_transformers.json


def read_sentence_files(folder: Path) -> SentenceFiles:
    """The contents in a checkpoint's folder. Raises `CheckpointError` for a file that can't be read, or is not of this
    kind."""
    modules, pooling = None, {}
    file = folder / "modules.json"
    if file.exists():
        listed = _read_list(file)
        modules = [kind.rpartition(".")[2] for kind, _ in listed]
        places = [path for kind, path in listed if kind.endswith(".Pooling")]
        pooling = read_json(folder / places[0] / "config.json") if places else {}
    return SentenceFiles(
        modules, _optional(folder / "sentence_bert_config.json"), pooling, _optional(folder / "config_sentence_transformers.json")
    )


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _read_list(file: Path) -> list[tuple[str, str]]:
    """The kind and folder of each module."""
    try:
        return [(str(module["type"]), str(module["path"])) for module in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file}: not a list of modules with type and path ({error}); fetch it again") from error
