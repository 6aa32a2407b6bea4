"""config.json and sentence-transformers' files to EncoderConfig, and what is not supported by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from checkpoints.sentence_files import SentenceFiles
from jaxinfer.architecture.encoder_config import EncoderConfig
from jaxinfer.architecture.model_config import UnsupportedModelError
from jaxinfer.models.registry import read_config
from tests.tiny_encoder import CONFIG

MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "pooling_mode_max_tokens": False}
FILES = SentenceFiles(["Transformer", "Pooling", "Normalize"], {"max_seq_length": 70}, MEAN, {"default_prompt_name": None})


def test_every_size_is_taken_over() -> None:
    assert EncoderConfig.from_hf(CONFIG, FILES) == EncoderConfig(
        architecture="BertModel",
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        mlp_size=48,
        vocab_size=84,
        num_token_types=2,
        max_position_embeddings=80,
        max_tokens=70,
        layer_norm_eps=1e-12,
        pooling="mean",
        normalizes=True,
    )


def test_without_sentence_transformers_files_its_own_defaults_hold() -> None:
    config = EncoderConfig.from_hf(CONFIG, SentenceFiles())
    assert (config.pooling, config.normalizes, config.max_tokens) == ("mean", False, 80)


def test_the_pooling_and_what_follows_are_as_the_files_say() -> None:
    first = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 32, "include_prompt": True}
    config = EncoderConfig.from_hf(CONFIG, SentenceFiles(["Transformer", "Pooling"], {"max_seq_length": 500}, first))
    assert (config.pooling, config.normalizes, config.max_tokens) == ("cls", False, 80)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["RobertaModel"]}, r"architectures is \['RobertaModel'\]: for embeddings supported are BertModel"),
        ({"architectures": ["LlamaForCausalLM"]}, "for embeddings supported are BertModel"),
        ({"architectures": None}, "architectures is None"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu': supported is gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key': supported is absolute"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, r"num_attention_heads is 5: it must divide hidden_size \(32\)"),
        ({"intermediate_size": 0}, "intermediate_size is 0: it must be a positive integer"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"layer_norm_eps": -1}, "layer_norm_eps is -1: it must be a positive number"),
    ],
)
def test_what_is_not_supported_is_named_with_its_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        EncoderConfig.from_hf({**CONFIG, **changes}, FILES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules": ["Transformer", "Pooling", "Dense"]}, r"modules\.json has Transformer, Pooling, Dense: supported are"),
        ({"modules": ["Transformer"]}, r"modules\.json has Transformer: supported are"),
        (
            {"pooling": {"pooling_mode_max_tokens": True}},
            "the pooling is pooling_mode_max_tokens: supported are pooling_mode_mean_tokens or",
        ),
        ({"pooling": {**MEAN, "pooling_mode_cls_token": True}}, "the pooling is pooling_mode_mean_tokens and pooling_mode_cls_token"),
        ({"pooling": {}}, "the pooling is not given"),
        ({"transformer": {"max_seq_length": "long"}}, "max_seq_length is 'long'"),
        ({"transformer": {"do_lower_case": True}}, "do_lower_case"),
        ({"settings": {"default_prompt_name": "query"}}, "default_prompt_name is 'query'"),
    ],
)
def test_other_ways_from_tokens_to_an_embedding_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        EncoderConfig.from_hf(CONFIG, replace(FILES, **changes))


def test_an_encoder_given_as_the_language_model_is_told_where_it_belongs() -> None:
    with pytest.raises(UnsupportedModelError, match=r"architectures is \['BertModel'\].*--embedding-model"):
        read_config(CONFIG)
