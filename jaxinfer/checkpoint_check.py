"""Whether a checkpoint can be served, found out without reading its weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.loader import check
from checkpoints.sentence_files import read_sentence_files
from checkpoints.source import TensorSource
from jaxinfer.layers.matrices import MatrixFormat
from jaxinfer.models.bert import Bert
from jaxinfer.models.config import SUPPORTED_ENCODERS, ArchitectureConfig
from jaxinfer.models.encoder_config import EncoderConfig
from jaxinfer.models.registry import config_of
from jaxinfer.runtime.template import Template, make_template, template_of
from jaxinfer.tokenizer import Tokenizer

_FORM = MatrixFormat(jnp.dtype("float32"))  # any would do: a checkpoint has what a model calls for in all or in none


def served_as(source: TensorSource) -> str:
    """The flag that takes it: '--model', or '--embedding-model' for an encoder. Raises the `CheckpointError` or `UnsupportedModelError` that
    serving it would."""
    if source.config.get("architectures") in [[name] for name in SUPPORTED_ENCODERS] and source.path.is_dir():
        flag = "--embedding-model"
        encoder = EncoderConfig.from_hf(source.config, read_sentence_files(source.path))
        _check(source, template_of(Bert, encoder, _FORM, _FORM.vector_dtype))
    else:
        flag = "--model"
        check_tensors(source, config_of(source))
    Tokenizer.from_source(source)
    return flag


def check_tensors(source: TensorSource, config: ArchitectureConfig) -> None:
    """Raise the `CheckpointError` that loading all of a model's weights would before it reads any."""
    _check(source, make_template(config, _FORM))


def _check(source: TensorSource, template: Template[Any]) -> None:
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape[1:] if leaf.is_stack else leaf.shape, leaf.dtype)
        for leaf in template.leaves
        for path in leaf.paths
    }
    check(source, shapes, template.model.weight_map)
