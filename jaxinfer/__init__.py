"""jaxinfer: prefill and decode of language models as two separately compiled programs on two device meshes.

The public names load what they need on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module

_PUBLIC = {
    "LLM": "jaxinfer.llm",
    "Engine": "jaxinfer.engine",
    "EngineConfig": "jaxinfer.config",
    "SamplingParams": "jaxinfer.request",
    "RequestOutput": "jaxinfer.request",
}

__all__ = ["LLM", "Engine", "EngineConfig", "RequestOutput", "SamplingParams"]  # noqa: F822


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
