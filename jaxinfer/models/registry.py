"""Which class serves which architecture of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from checkpoints.source import TensorSource
from jaxinfer.architecture.model_config import SUPPORTED_ENCODERS, ArchitectureConfig, UnsupportedModelError
from jaxinfer.models.base import CausalLM
from jaxinfer.models.deepseek_v3 import DeepseekV3, KimiK25
from jaxinfer.models.gemma3 import Gemma3
from jaxinfer.models.llama import Llama
from jaxinfer.models.llama4 import Llama4, Llama4WithImages
from jaxinfer.models.mistral import Mistral
from jaxinfer.models.olmo2 import Olmo2
from jaxinfer.models.qwen2 import Qwen2
from jaxinfer.models.qwen3 import Qwen3, Qwen3Moe

MODELS: dict[str, type[CausalLM]] = {
    "DeepseekV3ForCausalLM": DeepseekV3,
    "KimiK25ForConditionalGeneration": KimiK25,
    "Kimi_K25ForConditionalGeneration": KimiK25,  # transformers' name
    "Gemma3ForCausalLM": Gemma3,
    "Gemma3ForConditionalGeneration": Gemma3,
    "LlamaForCausalLM": Llama,
    "Llama4ForCausalLM": Llama4,
    "Llama4ForConditionalGeneration": Llama4WithImages,
    "MistralForCausalLM": Mistral,
    "Olmo2ForCausalLM": Olmo2,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}


def read_config(config: Mapping[str, Any]) -> ArchitectureConfig:
    """From the keys of a config.json. Raises `UnsupportedModelError` naming the field, its value and what is
    supported."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in MODELS:
        hint = " (an encoder is given as --embedding-model)" if architectures in [[name] for name in SUPPORTED_ENCODERS] else ""
        raise UnsupportedModelError(f"architectures is {architectures!r}: supported are {', '.join(MODELS)}{hint}")
    return MODELS[architectures[0]].read_config(config)


def config_of(source: TensorSource) -> ArchitectureConfig:
    """`read_config` of a checkpoint, without optional parts whose tensors it lacks."""
    config = read_config(source.config)
    optional, names = model_class(config).weight_map.optional, source.names()
    lacking = {key: 0 for key, pattern in optional.items() if not any(fnmatchcase(name, pattern) for name in names)}
    inside = {"text_config": {**source.config["text_config"], **lacking}} if "text_config" in source.config else {}
    return read_config({**source.config, **lacking, **inside}) if lacking else config


def model_class(config: ArchitectureConfig) -> type[CausalLM]:
    """The class of the configuration's architecture. Raises `UnsupportedModelError` if there is none."""
    if config.architecture not in MODELS:
        raise UnsupportedModelError(f"architectures is {config.architecture!r}: supported are {', '.join(MODELS)}")
    return MODELS[config.architecture]
