"""Which class serves which architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.base import CausalLM
from jaxinfer.models.config import SUPPORTED_ENCODERS, ArchitectureConfig, UnsupportedModelError
from jaxinfer.models.llama import Llama
from jaxinfer.models.mistral import Mistral

MODELS: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
}


def read_config(config: Mapping[str, Any]) -> ArchitectureConfig:
    """From the keys of a config.json. Raises `UnsupportedModelError` naming the field, its value and what is supported."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in MODELS:
        hint = " (an encoder is given as --embedding-model)" if architectures in [[name] for name in SUPPORTED_ENCODERS] else ""
        raise UnsupportedModelError(f"architectures is {architectures!r}: supported are {', '.join(MODELS)}{hint}")
    return MODELS[architectures[0]].read_config(config)


def model_class(config: ArchitectureConfig) -> type[CausalLM]:
    """The class of the configuration's architecture; `UnsupportedModelError` if there is none."""
    if config.architecture not in MODELS:
        raise UnsupportedModelError(f"architectures is {config.architecture!r}: supported are {', '.join(MODELS)}")
    return MODELS[config.architecture]
