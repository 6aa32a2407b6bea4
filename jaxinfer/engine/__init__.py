"""The engine: coordinator of the two roles, builder, preemption, outputs.

`Engine` is loaded on first use, so that the host half's files here can be imported without JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name != "Engine":
        raise AttributeError(f"module 'jaxinfer.engine' has no attribute {name!r}")
    return import_module("jaxinfer.engine.engine").Engine
