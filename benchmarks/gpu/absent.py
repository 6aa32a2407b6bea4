"""Packages that only reading a checkpoint or a text needs, and that a borrowed machine may lack: the engine's programs don't."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

# Third-party imports at the top of modules that the runners' imports lead to.
NOT_NEEDED = ("tokenizers", "safetensors", "huggingface_hub", "gguf", "jinja2")


class _StandIn(ModuleType):
    """Gives a class for every name; making one says what is missing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {"__init__": _refuse, "__module__": self.__name__})


def _refuse(self: Any, *_: Any, **__: Any) -> None:
    raise ModuleNotFoundError(f"{type(self).__module__} is not installed on this machine")


def stand_in() -> list[str]:
    """Make those of them importable that aren't installed; returns which."""
    missing = [name for name in NOT_NEEDED if name not in sys.modules and importlib.util.find_spec(name) is None]
    for name in missing:
        sys.modules[name] = _StandIn(name)
    return missing
