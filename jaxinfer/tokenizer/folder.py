"""The tokenizer in a model's folder: tokenizer.json, or Kimi's tiktoken.model, and their settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from checkpoints.json_file import read_json
from checkpoints.source import CheckpointError
from jaxinfer.tokenizer.byte_level import WORDS
from jaxinfer.tokenizer.chat_template import ChatTemplate
from jaxinfer.tokenizer.components import TokenizerComponents
from jaxinfer.tokenizer.ranks import read_ranks

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_KIMI_NUM_SPECIAL = 256  # ids after the ranks; unnamed ones are reserved
_KIMI_CODE = ("tokenization_kimi", "tokenization_moonshot")
_OTHER_FORMS = ("tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model")


def read_folder(path: Path) -> TokenizerComponents:
    """Raises `CheckpointError` for a tokenizer that is missing, corrupt or unsupported."""
    config = _settings(path)
    backend = _backend(path, config)
    backend.no_truncation()
    backend.no_padding()
    backend.add_tokens(list(_added(config, backend)))
    named = {name: _content(token) for name, token in _named(config).items()}
    bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    ends: list[int] = []
    # Up to three files name tokens that end a reply; a chat model's end of turn is often in the first only.
    for name in ("generation_config.json", "config.json"):
        settings = read_json(path / name) if (path / name).exists() else {}
        if (ids := settings.get("eos_token_id", settings.get("text_config", {}).get("eos_token_id"))) is not None:
            ends += ids if isinstance(ids, list) else [ids]
            break
    if "eos_token" in named and (eos := backend.token_to_id(named["eos_token"])) is not None:
        ends.append(eos)
    return TokenizerComponents(backend, bos, ends, ChatTemplate(_templates(path, config), named), config.get("response_template"))


def _settings(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the special tokens that older folders have in a file of their own."""
    config: dict[str, Any] = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    if "added_tokens_decoder" not in config and (path / "special_tokens_map.json").exists():
        config |= read_json(path / "special_tokens_map.json")
    return config


def _backend(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if file.exists():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{file}: not a tokenizer.json this version of tokenizers can read ({error}); fetch it again") from error
    if (path / "tiktoken.model").exists() and any(code in str(config.get("auto_map")) for code in _KIMI_CODE):
        names = {int(i): token["content"] for i, token in config.get("added_tokens_decoder", {}).items()}
        return read_ranks(path / "tiktoken.model", WORDS["kimi-k2"], names, _KIMI_NUM_SPECIAL)
    if other := [name for name in _OTHER_FORMS if (path / name).exists()]:
        how = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes one"
        raise CheckpointError(f"{file}: missing; there is {other[0]}, which this engine does not read: {how}")
    raise CheckpointError(f"{file}: missing; fetch the checkpoint again, with its tokenizer.json")


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token, eos_token and so on, also those that only this model has (image_token, ...)."""
    extra = config.get("extra_special_tokens")
    named = {name: token for name, token in config.items() if name.endswith("_token") and isinstance(token, (str, dict)) and token}
    return named | (extra if isinstance(extra, dict) else {})


def _added(config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> Iterator[AddedToken]:
    """Tokens that the settings add, or describe differently than the tokenizer, in order."""
    present = {token.content: _flags(token) for token in backend.get_added_tokens_decoder().values()}
    special = {_content(token) for token in _named(config).values()}
    for _, settings in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        token = AddedToken(settings["content"], **{name: settings[name] for name in _FLAGS if name in settings})
        if present.get(token.content) != _flags(token):
            present[token.content] = _flags(token)
            token.special = token.special or token.content in special
            yield token
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    for named in (*_named(config).values(), *(extra if isinstance(extra, list) else ())):
        if _content(named) not in present:
            flags = {name: named[name] for name in _FLAGS if name in named} if isinstance(named, dict) else {}
            present[_content(named)] = ()
            yield AddedToken(_content(named), **flags | {"special": True})


def _flags(token: AddedToken) -> tuple[bool, ...]:
    return tuple(getattr(token, name) for name in _FLAGS)


def _templates(path: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """chat_template.jinja and named templates in files, if there are any; else tokenizer_config's, a string or a list
    of named ones."""
    files = {"default": path / "chat_template.jinja"} if (path / "chat_template.jinja").exists() else {}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    template = config.get("chat_template")
    if isinstance(template, list):
        return {named["name"]: named["template"] for named in template}
    if template is None and (path / "chat_template.json").exists():  # some multimodal models
        return read_json(path / "chat_template.json").get("chat_template")
    return template


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
