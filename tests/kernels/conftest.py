"""What the tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src.pallas.mosaic.interpret import thread_map


def _run(jaxpr: Any, consts: Any, *args: Any) -> None:
    jax.core.eval_jaxpr(jaxpr, consts, *args)


def _run_jaxpr(jaxpr: Any, consts: Any, *args: Any) -> None:
    jax.jit(_run, static_argnums=0).trace(jaxpr, consts, *args).lower().compile()(consts, *args)


@pytest.fixture(autouse=True, scope="session")
def interpreted_kernels_are_compiled_once() -> None:
    """JAX 0.10 compiles what it interprets anew for every thread of every block; 0.11 has this function at the top, where caches find it."""
    if jax.__version_info__ < (0, 11):
        thread_map._run_jaxpr = _run_jaxpr


@pytest.fixture(autouse=True, scope="module")
def what_a_file_compiled_is_let_go() -> Iterator[None]:
    """Every compiled function takes some ten memory mappings, of which Linux gives a process 65,530: past them compilers crash. Only here,
    where there are thousands: engines that tests share would compile anew what they move between meshes with."""
    yield
    jax.clear_caches()
