"""The program cache's key: all that a compiled program depends on, as text. Equal texts mean equal programs, so a
cached one need not be traced again."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import flax
import jax
import jaxlib
import llvmlite
import llvmlite.binding as llvm
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_PACKAGES = ("jaxinfer", "pallas_kernels", "sharding", "checkpoints")  # whose sources decide what programs are traced
_ROOT = Path(__file__).parents[2]


class UnknownOriginError(TypeError):
    """A program depends on a value that has no text to tell it from others."""


def describe(value: Any) -> str:
    """Text that differs where values differ. A function is described by its name, position and closure; a dataclass by
    its compared fields. Raises `UnknownOriginError` for anything that is not plain data, a function of this project,
    or made of those."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return f"{type(value).__name__} {value!r}"
        case enum.Enum():
            return f"{_name(type(value))}.{value.name}"
        case np.dtype():
            return f"dtype {value}"
        case type():
            return _name(value)
        case jax.ShapeDtypeStruct():
            return f"array {value.shape} {value.dtype} {value.weak_type} {describe(value.sharding)}"
        case NamedSharding():
            return f"sharding {describe(value.mesh)} {value.spec} {value.memory_kind}"
        case PartitionSpec():
            return str(value)
        case Mesh():
            devices = ", ".join(f"{d.platform} {d.device_kind} {d.id}" for d in value.devices.flat)
            return f"mesh {value.devices.shape} {value.axis_names} {value.axis_types} of {devices}"
        case tuple() | list():
            return f"{_name(type(value))}{_listed(value)}"
        case set() | frozenset():
            return f"{_name(type(value))}{{{', '.join(sorted(map(describe, value)))}}}"
        case Mapping():
            return f"{_name(type(value))}{_listed(value.items())}"
        case functools.partial():
            return f"partial{_listed((value.func, value.args, value.keywords))}"
        case FunctionType():
            return _described_function(value)
    if dataclasses.is_dataclass(value):
        compared = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare]
        return f"{_name(type(value))}{_listed(compared)}"
    raise UnknownOriginError(f"{type(value)} has no text that says all of it")


def surroundings() -> str:
    """What a program depends on besides its own text: versions, settings of this process, and the processor."""
    return describe(surrounding_facts())


def surrounding_facts() -> dict[str, str]:
    """The same by name, each as text."""
    kept_apart = ("jax_compilation_cache", "jax_persistent_cache")  # where programs are cached changes none of them
    of_jax = {name: str(value) for name, value in sorted(jax.config.values.items()) if not name.startswith(kept_apart)}
    # XLA divides work among as many threads.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        **_versions(),
        "XLA_FLAGS": str(os.environ.get("XLA_FLAGS")),
        "processor cores": str(num_cores),
        "settings of JAX": hashlib.sha256(describe(of_jax).encode()).hexdigest()[:16],
    }


@functools.cache
def sources() -> str:
    """A digest of the sources that programs are traced from, and of the tuned tilings of kernels."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted(p for kind in ("*.py", "tuned/*.json") for p in (_ROOT / package).rglob(kind)):
            digest.update(describe((path.relative_to(_ROOT).as_posix(), path.read_bytes())).encode())
    return digest.hexdigest()


@functools.cache
def _versions() -> dict[str, str]:
    modules = {m.__name__: m.__version__ for m in (jax, jaxlib, flax, np, llvmlite)}
    features = hashlib.sha256(llvm.get_host_cpu_features().flatten().encode()).hexdigest()[:16]
    client = jax.devices()[0].client
    return {
        **modules,
        "Python": platform.python_version(),
        "system": platform.system(),
        "processor": f"{platform.machine()} {llvm.get_host_cpu_name()}, features {features}",
        "platform": f"{client.platform} {client.platform_version}",
    }


def _described_function(function: FunctionType) -> str:
    is_ours = function.__module__.partition(".")[0] in _PACKAGES
    if not is_ours or "<lambda>" in function.__qualname__:
        raise UnknownOriginError(f"{function.__module__}.{function.__qualname__} is not among the sources by name")
    closed_over = [cell.cell_contents for cell in function.__closure__ or ()]
    place = (f"{function.__module__}.{function.__qualname__}", function.__code__.co_firstlineno)
    return f"function{_listed((*place, closed_over, function.__defaults__, function.__kwdefaults__))}"


def _listed(values: Iterable[Any]) -> str:
    return f"({', '.join(map(describe, values))})"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
