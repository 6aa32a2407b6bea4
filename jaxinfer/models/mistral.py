"""Mistral (arXiv:2310.06825): Llama with a sliding window, where the configuration has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.architecture.model_config import ArchitectureConfig, integer
from jaxinfer.models.llama import Llama
from pallas_kernels.span import Span


class Mistral(Llama):
    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """See `CausalLM`."""
        read = super().read_config(config)
        window = integer(config, "sliding_window", read.max_position_embeddings)
        return replace(read, spans=(Span(window=window),) * read.num_layers) if window < read.max_position_embeddings else read
