"""Checks whether a checkpoint can be served, without reading its weights."""

from __future__ import annotations

import jax.numpy as jnp

from checkpoints.sentence_files import read_sentence_files
from checkpoints.source import TensorSource
from jaxinfer.architecture.encoder_config import EncoderConfig
from jaxinfer.architecture.model_config import SUPPORTED_ENCODERS
from jaxinfer.models.bert import Bert
from jaxinfer.models.registry import config_of
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from jaxinfer.weights.load import check_tensors
from jaxinfer.weights.template import make_template, template_of

_FORMAT = ModelWeightFormat(Plain(jnp.dtype("float32")))  # the check is the same for any format


def served_as(source: TensorSource) -> str:
    """The flag to serve a checkpoint with: '--model', or '--embedding-model' for an encoder. Raises the
    `CheckpointError` or `UnsupportedModelError` that serving it would raise."""
    if source.config.get("architectures") in [[name] for name in SUPPORTED_ENCODERS] and source.path.is_dir():
        flag = "--embedding-model"
        encoder = EncoderConfig.from_hf(source.config, read_sentence_files(source.path))
        check_tensors(template_of(Bert, encoder, _FORMAT, _FORMAT.vector_dtype), source)
    else:
        flag = "--model"
        check_tensors(make_template(config_of(source), _FORMAT), source)
    Tokenizer.from_source(source)
    return flag
