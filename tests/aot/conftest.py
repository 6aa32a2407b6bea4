"""GPUs that nobody here has."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.mosaic.gpu.core import artificial_shared_memory_limit
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.gpu.compiled_program import num_launches
from pallas_kernels.mosaic.card import Card, card_for
from sharding.targets import target_devices
from tests.covering import mark_exhaustive, name_of, parameters_of
from tests.ptx.kernel import run_interpreted_kernels_as_compiled

Compile = Callable[..., jax.stages.Compiled]

# JAX compiles Mosaic GPU's kernels for one compute capability a process, the first that it meets: `make test-aot` starts one for each of these.
_CARDS = {"hopper": ["h100", "h200"], "blackwell": ["b200"], "small": ["rtxpro6000"]}
_KIND = os.environ.get("AOT_CARDS", "hopper")
_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves what is compiled for these cards: what names none of its own is for Hopper's. What the list doesn't need is `exhaustive`."""
    is_for = {"hopper": lambda item: not _is_of_small_cards(item), "blackwell": _asks_for_a_card, "small": _is_of_small_cards}[_KIND]
    left_out = [item for item in items if not is_for(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    mark_exhaustive([item for item in items if item.get_closest_marker("aot")], _needed)


def _needed(item: pytest.Item) -> set[Hashable]:
    """What a list has once. The main one for Hopper each test, and in any of them each card, model, role, format of weights and type; for small cards
    each test; for others, and in the short list of an older JAX beside a newer one, each file that is compiled for any card, as kernels' are."""
    if os.environ.get("AOT_LIST") == "short" or _KIND == "blackwell":
        return {item.path.name} if _asks_for_a_card(item) or _is_of_small_cards(item) else set()
    parameters = parameters_of(item)
    case, options = parameters.get("case"), parameters.get("options", {})
    role = str(parameters.get("role", parameters.get("name")))  # 'decode/32'
    axes = {
        "card": [parameters.get("target"), getattr(case, "card", None)],
        "model": [parameters.get("model"), getattr(case, "model", None)],
        "role": [role.partition("/")[0] if "/" in role else None],
        "format": [getattr(case, "format", None), getattr(case, "packing", None)],
        "type": [str(options.get("dtype"))],
    }
    return {name_of(item)} | {(axis, value) for axis, values in axes.items() for value in values if value is not None}


def _is_of_small_cards(item: pytest.Item) -> bool:
    return item.path.name == "test_small_cards.py"


def _asks_for_a_card(item: pytest.Item) -> bool:
    asked = {"target", "run_as_compiled", "larger"} & set(item.fixturenames)  # type: ignore[attr-defined]
    return bool(asked) and _HERE in item.path.parents and not _is_of_small_cards(item)


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """XLA compiles a kernel once that several programs have in common: most of two lengths of a model, or for two cards of one kind. JAX keeps
    none of these programs, for it could not read it again."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("kernels")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "xla_gpu_kernel_cache_file")


@pytest.fixture(scope="session", params=_CARDS[_KIND])
def target(request) -> str:
    return request.param


@pytest.fixture
def run_as_compiled(monkeypatch) -> None:
    """What asks for JAX's interpreter is compiled for such a GPU, and the compiler's PTX run."""
    run_interpreted_kernels_as_compiled(_CARDS[_KIND][-1], monkeypatch)


@pytest.fixture
def larger(monkeypatch) -> dict[tuple[int, ...], tuple[int, int]]:
    """The same, of operands of the shapes that are put in here as the last part of larger arrays, along an axis of such a length."""
    shapes: dict[tuple[int, ...], tuple[int, int]] = {}
    run_interpreted_kernels_as_compiled(_CARDS[_KIND][-1], monkeypatch, shapes)
    return shapes


@pytest.fixture(scope="session")
def card(target) -> Card:
    return card_for(target_devices(target, 1)[0])


@pytest.fixture(scope="session")
def compile_for(target, card) -> Compile:
    """Gives what a function compiles to on one such GPU: `compile_for(function, shape and type, ..., donate=())`."""
    mesh = Mesh(np.array(target_devices(target, 1)), ("x",), axis_types=(AxisType.Explicit,))

    def compile_for(
        function: Callable[..., Any], *arguments: tuple[tuple[int, ...], Any], donate: tuple[int, ...] = ()
    ) -> jax.stages.Compiled:
        whole = NamedSharding(mesh, PartitionSpec())
        abstract = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in arguments]
        with jax.set_mesh(mesh), artificial_shared_memory_limit(card.shared_memory):
            return jax.jit(functools.partial(function), donate_argnums=donate).lower(*abstract).compile()

    return compile_for


def num_kernels(compiled: jax.stages.Compiled) -> int:
    """Mosaic GPU kernels in a program, as often as they are called, except those that combine KV splits."""
    return len(re.findall(r'custom_call_target="mosaic_gpu.*op_name="(?!\S*/combine_splits/)', compiled.as_text()))


def launches(compiled: jax.stages.Compiled) -> int:
    """Launches of a program, but for those of what it calls."""
    return num_launches(compiled.as_text())


def makers(compiled: jax.stages.Compiled, shape: tuple[int, ...]) -> set[str]:
    """Which operations of a program give an array of this shape, or a tuple with one: those that pass it on alone are left out."""
    sizes = f"[{','.join(map(str, shape))}]"
    found = re.findall(r"^ *(?:ROOT )?%\S+ = (.*?) ([a-z][a-z0-9-]*)\(", compiled.as_text(), re.MULTILINE)
    return {name for given, name in found if sizes in given} - {"parameter", "tuple", "get-tuple-element", "bitcast"}
