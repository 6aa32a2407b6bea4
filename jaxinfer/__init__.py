"""jaxinfer: prefill and decode of language models as two separately compiled programs on two device meshes.

The public names load what they need on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "LLM": "jaxinfer.llm",
    "AsyncLLM": "jaxinfer.async_llm",
    "Embedder": "jaxinfer.embedder",
    "Engine": "jaxinfer.engine",
    "EngineConfig": "jaxinfer.config",
    "SamplingParams": "jaxinfer.request",
    "StructuredOutputs": "jaxinfer.request",
    "RequestOutput": "jaxinfer.request",
    "OutputDelta": "jaxinfer.request",
    "RequestError": "jaxinfer.request",
    "ConfigError": "jaxinfer.config",
    "EngineClosedError": "jaxinfer.engine_access",
    "EngineFailedError": "jaxinfer.engine_thread",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "ConfigError",
    "Embedder",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineFailedError",
    "OutputDelta",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
