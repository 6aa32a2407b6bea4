"""Tokenizer: text to token ids and back, and chats to prompts, from a GGUF's metadata or a folder's tokenizer.json. Imports no JAX."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from checkpoints.gguf_source import GGUFSource
from checkpoints.safetensors_source import read_json
from checkpoints.source import CheckpointError, TensorSource
from jaxinfer.chat_template import ChatTemplate
from jaxinfer.request import RequestError

# How a vocabulary's training text was cut into words, by GGUF's `tokenizer.ggml.pre`. The patterns are data of those models.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"gpt-2": None, "smollm": "digits", "llama-bpe": _WORDS % r"\p{N}{1,3}", "qwen2": _WORDS % r"\p{N}"}
_CONTROL, _USER_DEFINED = 3, 4  # `tokenizer.ggml.token_type`
_NAMES_IN_GGUF = {"bos": "bos_token", "eos": "eos_token", "eot": "eot_token", "unknown": "unk_token", "padding": "pad_token"}
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_AGAIN = "fetch or convert the file again"
_USE_FOLDER = "use the model's folder with tokenizer.json"


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE writes every byte as a printable character: its own where it has one, else the next above 255 (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _bytes_of_characters()


class Tokenizer:
    """`vocab_size` counts added tokens too. `eos_token_ids` are all that end a reply; `bos_token_id` is None where there is none.

    `special_ids` are the tokens that `decode` leaves out unless asked. `is_byte_level`: every token is a run of bytes, and
    decoding is joining them. `token_bytes(token_id)` are the bytes one token stands for: a special token's those of its name, an
    unknown id's none. `token_text(token_id)` is their text if they are whole characters, else None.
    """

    def __init__(self, backend: tokenizers.Tokenizer, bos: int | None, eos: Sequence[int], template: ChatTemplate) -> None:
        self._backend = backend
        self._template = template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = bos
        self.eos_token_ids = tuple(dict.fromkeys(eos))
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.token_bytes = functools.cache(self._token_bytes)  # asked for every token of every sequence
        self.token_text = functools.cache(self._token_text)

    @classmethod
    def from_source(cls, source: TensorSource) -> Tokenizer:
        """The tokenizer that comes with a checkpoint. Raises `CheckpointError` where it is missing, corrupt or of a kind not supported."""
        return _from_gguf(source.path, source.metadata) if isinstance(source, GGUFSource) else _from_folder(source.path)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with the tokens that the model wants around a prompt (such as one for its beginning) unless told not to.

        Raises `RequestError` for text that is not Unicode (half a surrogate pair, which JSON can spell).
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "the text holds half a surrogate pair (such as \\ud83d alone), which is no character: send the whole pair", "prompt"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The ids' text; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def save(self, path: Path) -> None:
        """Write it as a tokenizer.json, which transformers reads."""
        self._backend.save(str(path))

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            # A token with any other character was added by name.
            return bytes(map(_BYTES.__getitem__, token)) if all(map(_BYTES.__contains__, token)) else token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def _token_text(self, token_id: int) -> str | None:
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation, by the model's template; encode it with `add_special_tokens=False`: it has them already.

        Raises `RequestError` for a model without a template and for messages that the template refuses.
        """
        return self._template.render(messages, add_generation_prompt)


def _from_gguf(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    about = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    kind, pre = about.get("model"), about.get("pre")
    if kind != "gpt2":
        raise CheckpointError(f"{path}: tokenizer.ggml.model is {kind!r}: of GGUF files 'gpt2' is supported; {_USE_FOLDER}")
    if pre not in _SPLITS:
        raise CheckpointError(f"{path}: tokenizer.ggml.pre is {pre!r}: supported are {', '.join(_SPLITS)}; {_USE_FOLDER}")
    tokens, merges = about.get("tokens"), about.get("merges")
    if not isinstance(tokens, list) or not isinstance(merges, list) or len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens or .merges is missing, no list of strings, or names a token twice; {_AGAIN}")
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: the vocabulary and merges in its metadata don't fit ({error}); {_AGAIN}") from error
    backend.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    types = about.get("token_type")
    kinds = types.tolist() if isinstance(types, np.ndarray) else []
    added = [(token, t) for token, t in zip(tokens, kinds, strict=False) if t in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens([AddedToken(token, normalized=False, special=t == _CONTROL) for token, t in added])
    named = {name: i for name in _NAMES_IN_GGUF if (i := about.get(f"{name}_token_id")) is not None}
    for name, i in named.items():
        if not isinstance(i, int) or not 0 <= i < len(tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.{name}_token_id is {i!r}, but the vocabulary has {len(tokens)} tokens; {_AGAIN}")
    bos = named.get("bos")
    if bos is not None and about.get("add_bos_token", pre == "llama-bpe"):
        backend.post_processor = processors.TemplateProcessing(single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)])
    ends = [named[name] for name in ("eos", "eot") if name in named]
    variables = {_NAMES_IN_GGUF[name]: tokens[i] for name, i in named.items()}
    return Tokenizer(backend, bos, ends, ChatTemplate(metadata.get("tokenizer.chat_template"), variables))


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    split = _SPLITS[pre]
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words = pre_tokenizers.Split(Regex(split), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _from_folder(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.exists():
        raise CheckpointError(f"{file}: missing; fetch the checkpoint again, with its tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file}: not a tokenizer.json this version of tokenizers can read ({error}); fetch it again") from error
    backend.no_truncation()
    backend.no_padding()
    config = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    named = {name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
    bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    ends: list[int] = []
    # What ends a reply is said in up to three places; a chat model's end of turn is often only in the first.
    for name in ("generation_config.json", "config.json"):
        if (path / name).exists() and (ids := read_json(path / name).get("eos_token_id")) is not None:
            ends += ids if isinstance(ids, list) else [ids]
            break
    if "eos_token" in named and (eos := backend.token_to_id(named["eos_token"])) is not None:
        ends.append(eos)
    return Tokenizer(backend, bos, ends, ChatTemplate(_folder_template(path, config), named))


def _folder_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja where there is one; else tokenizer_config's, a string or a list of named ones."""
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((t["template"] for t in template if t.get("name") == "default"), None)
    return template


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
