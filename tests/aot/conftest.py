"""GPUs that nobody here has."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sharding.targets import target_devices

Compile = Callable[..., jax.stages.Compiled]


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """XLA compiles a kernel once that several programs have in common: most of two lengths of a model, or for two cards of one kind. JAX keeps
    none of these programs, for it could not read it again."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("kernels")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "xla_gpu_kernel_cache_file")


@pytest.fixture(scope="session", params=["h100", "h200"])
def target(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def compile_for(target) -> Compile:
    """Gives what a function compiles to on one such GPU: `compile_for(function, shape and type, ..., donate=())`."""
    mesh = Mesh(np.array(target_devices(target, 1)), ("x",), axis_types=(AxisType.Explicit,))

    def compile_for(
        function: Callable[..., Any], *arguments: tuple[tuple[int, ...], Any], donate: tuple[int, ...] = ()
    ) -> jax.stages.Compiled:
        whole = NamedSharding(mesh, PartitionSpec())
        abstract = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in arguments]
        with jax.set_mesh(mesh):
            return jax.jit(functools.partial(function), donate_argnums=donate).lower(*abstract).compile()

    return compile_for


def num_kernels(compiled: jax.stages.Compiled) -> int:
    """Mosaic GPU kernels in a program, as often as they are called."""
    return compiled.as_text().count('custom_call_target="mosaic_gpu')


def makers(compiled: jax.stages.Compiled, shape: tuple[int, ...]) -> set[str]:
    """Which operations of a program give an array of this shape, or a tuple with one: those that pass it on alone are left out."""
    sizes = f"[{','.join(map(str, shape))}]"
    found = re.findall(r"^ *(?:ROOT )?%\S+ = (.*?) ([a-z][a-z0-9-]*)\(", compiled.as_text(), re.MULTILINE)
    return {name for given, name in found if sizes in given} - {"parameter", "tuple", "get-tuple-element", "bitcast"}
