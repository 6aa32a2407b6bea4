"""The contents of a checkpoint: its tensors as they are stored, by part of the model and grouped by shape, and its
other files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from checkpoints.digest import weight_files
from checkpoints.gguf_file import GGUFFile
from checkpoints.hub import open_source
from checkpoints.json_file import read_json
from checkpoints.orbax_source import weights_folder
from checkpoints.safetensors_file import SafetensorsFile
from checkpoints.source import CheckpointError, TensorSource

# A tensor belongs to the first of these that its name contains; the report has the order of PARTS.
_PATTERNS = (
    ("vision", r"vision|visual|multi_modal|mm_projector|^v\.|^mm\."),
    ("norms", r"norm|(^|\.)ln_"),
    ("experts", r"expert|moe|_exps\b|_shexp\b|router|mlp\.gate\.|gate_inp|exp_probs"),
    ("attention", r"attn|attention"),
    ("MLP", r"mlp|feed_forward|ffn|intermediate|output\.dense"),
    ("embedding", r"embed|embd|wte|wpe"),
    ("output head", r"lm_head|^output\."),
)
PARTS = ("embedding", "attention", "MLP", "experts", "norms", "output head", "vision", "other")
_NUM_RUNS = 4  # most runs of numbers in a displayed name
_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]
    type: str  # such as bfloat16 or Q4_K
    num_bytes: int  # as stored

    @property
    def part(self) -> str:
        return next((part for part, pattern in _PATTERNS if re.search(pattern, self.name, re.IGNORECASE)), "other")


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one shape and type whose names differ in numbers only."""

    name: str  # such as model.layers.{0..29}.mlp.down_proj.weight
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True, slots=True)
class Inventory:
    path: Path
    format: str
    files: tuple[Path, ...]  # of weights
    source: TensorSource | None  # None: it can't be opened as a model's,
    unsupported_reason: str | None  # for this reason, and `tensors` have the names in the files
    architecture: str | None
    context: int | None  # tokens
    tokenizer: str | None  # the file, such as tokenizer.json
    has_chat_template: bool
    tensors: tuple[TensorEntry, ...]

    @property
    def num_parameters(self) -> int:
        """Without integers that are no weights, such as an old encoder's position_ids."""
        return sum(prod(tensor.shape) for tensor in self.tensors if not re.fullmatch(r"U?I(NT)?(8|16|32|64)|BOOL", tensor.type))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def take_inventory(path: Path) -> Inventory:
    """The inventory of what `hub.resolve` returned. Raises `CheckpointError` for files that are missing or broken. What
    is intact but not supported is reported in `unsupported_reason`."""
    files = weight_files(path)
    is_gguf = bool(files) and all(file.suffix == ".gguf" for file in files)
    metadata = GGUFFile(files[0]).metadata if is_gguf else {}
    source, unsupported_reason = None, None
    try:
        source = open_source(path)
        config = source.config
        tensors = tuple(_tensor(source, name) for name in source.names())
    except CheckpointError as error:
        source, unsupported_reason = None, str(error)
        config = {} if is_gguf else read_json(path / "config.json")
        tensors = tuple(_stored_tensors(files))
        if not tensors:
            raise
    names = [metadata.get("general.architecture")] if source is None and is_gguf else config.get("architectures")
    return Inventory(
        path,
        "GGUF" if is_gguf else "safetensors" if weights_folder(path) is None else "Orbax",
        tuple(files),
        source,
        unsupported_reason,
        ", ".join(map(str, names)) if isinstance(names, list) and names else None,
        _context(config, metadata),
        _tokenizer(path, metadata),
        _has_chat_template(path, metadata),
        tensors,
    )


def groups(tensors: Iterable[TensorEntry]) -> list[TensorGroup]:
    """Similar tensors grouped, in the order of the first of each."""
    found: dict[tuple[str, tuple[int, ...], str], list[TensorEntry]] = {}
    for tensor in sorted(tensors, key=lambda tensor: (_numbers(tensor.name), tensor.name)):
        found.setdefault((_pattern(tensor.name), tensor.shape, tensor.type), []).append(tensor)
    return [TensorGroup(_name(alike), tuple(alike)) for alike in found.values()]


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "{}", name)


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"(?<![^.])\d+(?![^.])", name)]


def _name(alike: Sequence[TensorEntry]) -> str:
    places = zip(*(_numbers(tensor.name) for tensor in alike), strict=True)
    return _pattern(alike[0].name).format(*(_range(sorted(set(numbers))) for numbers in places))


def _range(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 3] -> '{0..3}'; [1, 3, 5] -> '{1,3..5}'; [0, 1, 5] -> '{0..1,5}'; [4] -> '4'."""
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {after - before for before, after in pairwise(numbers)}
    if len(steps) == 1 and steps != {1} and len(numbers) > 2:
        return f"{{{numbers[0]},{numbers[1]}..{numbers[-1]}}}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    return "{" + ",".join(shown if len(shown) <= _NUM_RUNS else [*shown[: _NUM_RUNS - 1], "..", shown[-1]]) + "}"


def _tensor(source: TensorSource, name: str) -> TensorEntry:
    stored = source.stored(name)
    return TensorEntry(name, source.shape(name), _TYPES.get(stored.format, stored.format), stored.num_bytes)


def _stored_tensors(files: Iterable[Path]) -> Iterable[TensorEntry]:
    for file in files:
        if file.suffix == ".gguf":
            for name, info in GGUFFile(file).tensors.items():
                yield TensorEntry(name, info.shape, _TYPES.get(info.type.name, info.type.name), info.num_bytes)
        elif file.suffix == ".safetensors":
            for name, held in SafetensorsFile(file).tensors.items():
                yield TensorEntry(name, held.shape, _TYPES.get(held.type, held.type), prod(held.shape) * held.dtype.itemsize)


def _context(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> int | None:
    text = config.get("text_config")
    settings = {**config, **(text if isinstance(text, dict) else {})}
    found = settings.get("max_position_embeddings", metadata.get(f"{metadata.get('general.architecture')}.context_length"))
    return found if isinstance(found, int) else None


def _tokenizer(path: Path, metadata: Mapping[str, Any]) -> str | None:
    if metadata:
        kind = metadata.get("tokenizer.ggml.model")
        return None if kind is None else f"in the file's metadata ({kind})"
    names = ("tokenizer.json", "tiktoken.model", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
    return next((name for name in names if (path / name).is_file()), None)


def _has_chat_template(path: Path, metadata: Mapping[str, Any]) -> bool:
    if metadata or not path.is_dir():
        return any(key.startswith("tokenizer.chat_template") for key in metadata)
    settings = path / "tokenizer_config.json"
    files = any(path.glob("chat_template.*")) or any(path.glob("additional_chat_templates/*.jinja"))
    return files or bool(settings.is_file() and read_json(settings).get("chat_template"))
