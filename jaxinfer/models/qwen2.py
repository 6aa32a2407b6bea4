"""Qwen2 and 2.5 (arXiv:2412.15115): Llama with biases on queries, keys and values; later layers may have a sliding
window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.architecture.model_config import ArchitectureConfig, count, integer, read_spans
from jaxinfer.models.llama import Llama, LlamaBlock
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from pallas_kernels.span import FULL_ATTENTION, Span


class Qwen2Block(LlamaBlock):
    def __init__(self, config: ArchitectureConfig, layer: int, weight_format: ModelWeightFormat) -> None:
        super().__init__(config, layer, weight_format, has_out_bias=False)


class Qwen2(Llama):
    block = Qwen2Block

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """See `CausalLM`."""
        return with_windows(replace(super().read_config(config), attention_bias=True), config)


def with_windows(read: ArchitectureConfig, config: Mapping[str, Any]) -> ArchitectureConfig:
    """The configuration with the spans of a dense model's layers."""
    window, has_window = window_of(config), window_of(config) != FULL_ATTENTION
    first = count(config, "max_window_layers", 28)
    kinds = {"full_attention": FULL_ATTENTION} | ({"sliding_attention": window} if has_window else {})
    default = ["sliding_attention" if has_window and layer >= first else "full_attention" for layer in range(read.num_layers)]
    return replace(read, spans=read_spans(config, read.num_layers, kinds, default))


def window_of(config: Mapping[str, Any]) -> Span:
    """The span of layers with a sliding window; full attention without one."""
    has_window = config.get("use_sliding_window", False) and config.get("sliding_window") is not None
    return Span(window=integer(config, "sliding_window")) if has_window else FULL_ATTENTION
