"""Which class serves which architecture."""

from __future__ import annotations

from jaxinfer.models.base import CausalLM
from jaxinfer.models.config import ArchitectureConfig, UnsupportedModelError
from jaxinfer.models.llama import Llama

MODELS: dict[str, type[CausalLM]] = {"LlamaForCausalLM": Llama, "MistralForCausalLM": Llama}


def model_class(config: ArchitectureConfig) -> type[CausalLM]:
    """The class of the configuration's architecture; `UnsupportedModelError` if there is none."""
    if config.architecture not in MODELS:
        raise UnsupportedModelError(f"architectures is {config.architecture!r}: supported are {', '.join(MODELS)}")
    return MODELS[config.architecture]
