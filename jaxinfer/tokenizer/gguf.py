"""The tokenizer in a GGUF file's metadata: a vocabulary with merges (byte-level BPE) or scores (SentencePiece)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken

from checkpoints.source import CheckpointError
from jaxinfer.tokenizer.byte_level import WORDS, byte_level
from jaxinfer.tokenizer.chat_template import ChatTemplate
from jaxinfer.tokenizer.components import TokenizerComponents, with_ends
from jaxinfer.tokenizer.sentencepiece import SPACE, merges_of, sentencepiece

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # `tokenizer.ggml.token_type`
_NAMES = {"bos": "bos_token", "eos": "eos_token", "eot": "eot_token", "eom": "eom_token", "unknown": "unk_token", "padding": "pad_token"}
_AGAIN = "fetch or convert the file again"
_USE_FOLDER = "use the model's folder with tokenizer.json"


def read_gguf(path: Path, metadata: Mapping[str, Any]) -> TokenizerComponents:
    """Raises `CheckpointError` for a vocabulary that is missing, corrupt or unsupported."""
    about = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    kind, pre, tokens = about.get("model"), about.get("pre"), about.get("tokens")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{path}: tokenizer.ggml.model is {kind!r}: of GGUF files 'gpt2' and 'llama' are supported; {_USE_FOLDER}")
    if kind == "gpt2" and pre not in WORDS:
        raise CheckpointError(f"{path}: tokenizer.ggml.pre is {pre!r}: supported are {', '.join(WORDS)}; {_USE_FOLDER}")
    if not isinstance(tokens, list) or len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens is missing, no list of strings, or names a token twice; {_AGAIN}")
    kinds = _numbers(about.get("token_type")) or [_NORMAL] * len(tokens)
    try:
        if kind == "gpt2":
            backend, adds_bos = _of_merges(path, about, tokens), WORDS[about["pre"]].adds_bos
        else:
            is_gemma = str(metadata.get("general.architecture")).startswith("gemma")
            if is_gemma:  # its GGUF writes runs of spaces as plain spaces
                tokens = [SPACE * len(token) if not token.strip(" ") else token for token in tokens]
            backend, adds_bos = _of_scores(path, about, tokens, kinds, is_gemma), True
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: the vocabulary and merges in its metadata don't fit ({error}); {_AGAIN}") from error
    vocab = backend.get_vocab(with_added_tokens=False)
    whole = [(t, token) for t, token in zip(kinds, tokens, strict=False) if t in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token in vocab]
    backend.add_tokens([AddedToken(token, normalized=False, special=t != _USER_DEFINED) for t, token in whole])
    named = {name: i for name in _NAMES if (i := about.get(f"{name}_token_id")) is not None}
    for name, i in named.items():
        if not isinstance(i, int) or not 0 <= i < len(tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.{name}_token_id is {i!r}, but the vocabulary has {len(tokens)} tokens; {_AGAIN}")
    bos, eos = named.get("bos"), named.get("eos")
    before = [(tokens[bos], bos)] if bos is not None and about.get("add_bos_token", adds_bos) else []
    after = [(tokens[eos], eos)] if eos is not None and about.get("add_eos_token", False) else []
    if before or after:
        backend.post_processor = with_ends(before, after)
    ends = [named[name] for name in ("eos", "eot", "eom") if name in named]
    variables = {_NAMES[name]: tokens[i] for name, i in named.items()}
    return TokenizerComponents(backend, bos, ends, ChatTemplate(_templates(metadata), variables))


def _of_merges(path: Path, about: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    merges = about.get("merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{path}: tokenizer.ggml.merges is missing or no list of strings; {_AGAIN}")
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    return byte_level({token: i for i, token in enumerate(tokens)}, pairs, WORDS[about["pre"]])


def _of_scores(path: Path, about: Mapping[str, Any], tokens: list[str], kinds: Sequence[int], is_gemma: bool) -> tokenizers.Tokenizer:
    scores = _numbers(about.get("scores"))
    if len(scores) != len(tokens) or len(kinds) != len(tokens):
        message = f"has {len(tokens)} tokens, {len(scores)} scores and {len(kinds)} token types: there must be one of each a token"
        raise CheckpointError(f"{path}: tokenizer.ggml {message}; {_AGAIN}")
    if is_gemma:  # tokens are in the order of merges; scores are not
        scores = [-float(i) for i in range(len(tokens))]
    unknown = about.get("unknown_token_id")
    merges = merges_of(tokens, scores, [kind in (_NORMAL, _USER_DEFINED) for kind in kinds])
    name = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    return sentencepiece({token: i for i, token in enumerate(tokens)}, merges, name, about.get("add_space_prefix", True))


def _numbers(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else []


def _templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Chat templates by name; the unnamed one is the default."""
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")}
    default = metadata.get(key)
    return named | ({"default": default} if default else {}) if named else default
