"""EncoderConfig: sizes and choices of a text encoder, from config.json and sentence-transformers' files. Imports no
JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoints.sentence_files import SentenceFiles
from jaxinfer.architecture.model_config import SUPPORTED_ENCODERS, UnsupportedModelError, integer, positive

_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_PREFIX = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    architecture: str  # such as 'BertModel'
    num_layers: int
    hidden_size: int  # also an embedding's
    num_heads: int
    mlp_size: int
    vocab_size: int
    num_token_types: int
    max_position_embeddings: int  # tokens
    max_tokens: int  # of a text, special tokens included
    layer_norm_eps: float
    pooling: str  # a text's embedding: 'mean' of its tokens' hidden states, or the first token's ('cls')
    normalizes: bool  # whether embeddings are scaled to length 1

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], files: SentenceFiles) -> EncoderConfig:
        """From the keys of a config.json and the files beside it. Raises `UnsupportedModelError` naming the field."""
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in SUPPORTED_ENCODERS:
            raise UnsupportedModelError(f"architectures is {architectures!r}: for embeddings supported are {', '.join(SUPPORTED_ENCODERS)}")
        for name, default in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if (value := config.get(name, default)) != default:
                raise UnsupportedModelError(f"{name} is {value!r}: supported is {default}")
        if config.get("is_decoder") or config.get("add_cross_attention"):
            raise UnsupportedModelError("is_decoder or add_cross_attention is true: only encoders make embeddings")
        hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        if hidden_size % num_heads:
            raise UnsupportedModelError(f"num_attention_heads is {num_heads}: it must divide hidden_size ({hidden_size})")
        max_position_embeddings = integer(config, "max_position_embeddings", 512)
        pooling, normalizes = _after_the_encoder(files)
        return cls(
            architecture=architectures[0],
            num_layers=integer(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            mlp_size=integer(config, "intermediate_size"),
            vocab_size=integer(config, "vocab_size"),
            num_token_types=integer(config, "type_vocab_size", 2),
            max_position_embeddings=max_position_embeddings,
            max_tokens=min(integer(files.transformer, "max_seq_length", max_position_embeddings), max_position_embeddings),
            layer_norm_eps=positive(config, "layer_norm_eps", 1e-12),
            pooling=pooling,
            normalizes=normalizes,
        )


def _after_the_encoder(files: SentenceFiles) -> tuple[str, bool]:
    """(pooling, whether embeddings are normalised). Without files: mean and not normalised, sentence-transformers'
    default."""
    if files.transformer.get("do_lower_case"):
        raise UnsupportedModelError("do_lower_case of sentence_bert_config.json is true: only the tokenizer may change a text")
    if prompt := files.settings.get("default_prompt_name"):
        raise UnsupportedModelError(f"default_prompt_name is {prompt!r}: supported is null; put the prompt before your texts yourself")
    if files.modules is None:
        return "mean", False
    if files.modules not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(
            f"modules.json has {', '.join(files.modules)}: supported are Transformer, Pooling and, after them, Normalize"
        )
    modes = [name for name, value in files.pooling.items() if name.startswith(_PREFIX) and value]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UnsupportedModelError(f"the pooling is {' and '.join(modes) or 'not given'}: supported are {' or '.join(_POOLINGS)}, alone")
    return _POOLINGS[modes[0]], files.modules[-1] == "Normalize"
