"""Converts a checkpoint of any format to a folder of safetensors or of Orbax, streamed. A conversion that fails leaves
nothing that looks finished."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from checkpoints.converted_tensors import ConvertedTensor
from checkpoints.destination import check_destination, check_space, put_in_place
from checkpoints.gguf_source import GGUFSource
from checkpoints.json_file import read_json
from checkpoints.orbax_source import WEIGHTS
from checkpoints.orbax_writer import write_orbax
from checkpoints.safetensors_writer import write_safetensors
from checkpoints.source import CheckpointError, TensorSource

FORMATS = ("safetensors", "orbax")
# files beside the weights: tokenizers, templates, licences
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
_QUANTISATION = ("quantization_config", "compression_config")
_TYPES = ("dtype", "torch_dtype")
# Their names in GGUF and in Hugging Face's files.
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "eot": "eot_token", "unknown": "unk_token", "padding": "pad_token"}
_TEMPLATE = "tokenizer.chat_template"
_TEMPLATES = "additional_chat_templates"  # a folder


def convert(
    source: TensorSource,
    tensors: Sequence[ConvertedTensor],
    destination: Path,
    format: str,
    *,
    shard_size: int,
    save_tokenizer: Callable[[Path], None],
    is_forced: bool = False,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Writes the tensors, which come from the source, its configuration and the other files. `save_tokenizer` writes
    the tokenizer.json that a GGUF file has only the data for, and raises `CheckpointError` where it has none.
    `is_forced`: the contents of `destination` are replaced, at the end. `advance` is called with the bytes written.
    Raises `CheckpointError` and `OSError`."""
    check_destination(destination, is_forced)
    destination, folder = destination.resolve(), source.path.resolve()
    if destination == folder or destination in folder.parents:
        raise CheckpointError(f"{destination}: is where the checkpoint to convert lies: give another folder")
    destination.parent.mkdir(parents=True, exist_ok=True)
    check_space(destination, sum(tensor.num_bytes for tensor in tensors))
    part = destination.with_name(f".{destination.name}.part-{os.getpid()}")
    try:
        part.mkdir()
        _write_json(part / "config.json", _config(source, tensors))
        if isinstance(source, GGUFSource):
            save_tokenizer(part / "tokenizer.json")
            _write_gguf_settings(part, source)
        else:
            _copy_settings(source.path, part)
        if format == "orbax":
            write_orbax(part / WEIGHTS, tensors, advance)
        else:
            write_safetensors(part, tensors, shard_size, advance)
        put_in_place(part, destination)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _config(source: TensorSource, tensors: Sequence[ConvertedTensor]) -> dict[str, Any]:
    """config.json unchanged where the weights are unchanged; otherwise with the type that they have now."""
    file = source.path / "config.json"
    if isinstance(source, GGUFSource):
        return _with_dtype(source.config, tensors)
    is_same = all([part.dtype for part in source.stored(tensor.name).parts.values()] == [tensor.dtype] for tensor in tensors)
    return read_json(file) if is_same else _with_dtype(read_json(file), tensors)


def _with_dtype(config: dict[str, Any], tensors: Iterable[ConvertedTensor]) -> dict[str, Any]:
    num_bytes: Counter[str] = Counter()
    for tensor in tensors:
        num_bytes[tensor.dtype.name] += tensor.num_bytes
    most = num_bytes.most_common(1)[0][0]

    def retyped(settings: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in settings.items() if key not in _QUANTISATION}
        return {**kept, **{key: most for key in _TYPES if key in kept}}

    changed = retyped(config)
    if isinstance(changed.get("text_config"), dict):
        changed["text_config"] = retyped(changed["text_config"])
    return changed if any(key in changed for key in _TYPES) else {**changed, _TYPES[1]: most}


def _copy_settings(folder: Path, to: Path) -> None:
    """Copies the files beside the weights, those of an encoder's modules, which have folders of their own, and further
    chat templates."""
    kept = [file for file in sorted(folder.iterdir()) if file.suffix in _COPIED or file.name.startswith(("LICENSE", "NOTICE"))]
    kept = [file for file in kept if file.name != "config.json" and not file.name.endswith(".index.json")]
    for file in (*kept, *folder.glob("*/config.json"), *folder.glob(f"{_TEMPLATES}/*.jinja")):
        if file.is_file():
            place = to / file.relative_to(folder)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, place)


def _write_gguf_settings(folder: Path, source: GGUFSource) -> None:
    """Writes what a GGUF file's metadata says of its tokenizer, without the vocabulary, as Hugging Face files do."""
    about = {key.removeprefix("tokenizer.ggml."): value for key, value in source.metadata.items() if key.startswith("tokenizer.ggml.")}
    ids = {name: about[f"{name}_token_id"] for name in _SPECIAL if f"{name}_token_id" in about}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {_SPECIAL[name]: about["tokens"][i] for name, i in ids.items()}
    settings["model_max_length"] = source.config["max_position_embeddings"]
    templates = {key.removeprefix(_TEMPLATE).lstrip("."): text for key, text in source.metadata.items() if key.startswith(_TEMPLATE)}
    if templates.keys() == {""}:
        settings["chat_template"] = templates[""]
    elif templates:
        settings["chat_template"] = [{"name": name or "default", "template": text} for name, text in templates.items()]
    _write_json(folder / "tokenizer_config.json", settings)
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot") if name in ids))
    generation = {"bos_token_id": ids.get("bos"), "eos_token_id": ends or None, "pad_token_id": ids.get("padding")}
    _write_json(folder / "generation_config.json", {key: value for key, value in generation.items() if value is not None})


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
