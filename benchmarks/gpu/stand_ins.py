"""Stand-ins for packages that a borrowed machine may lack and GPU programs don't need: those for checkpoints, texts and
CPU kernels."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Third-party imports at module level that runners and ops reach.
NOT_NEEDED = ("llvmlite", "tokenizers", "safetensors", "huggingface_hub", "gguf", "jinja2")


class _Missing(type):
    """A class for every name of a module or of another such class. Calling one raises an error that names the missing
    package."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (Exception,), {"__module__": cls.__module__})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise ModuleNotFoundError(f"{cls.__module__} is not installed on this machine")


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(_Missing(self.__name__, (), {"__module__": self.__name__}), name)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in() -> list[str]:
    """Makes those of them importable that aren't installed; returns their names."""
    missing = [name for name in NOT_NEEDED if name not in sys.modules and importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))
    return missing
