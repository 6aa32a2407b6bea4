"""What the tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from benchmarks.gpu import interpreter


@pytest.fixture(autouse=True, scope="session")
def interpreted_kernels_are_compiled_once() -> None:
    interpreter.make_fast()


@pytest.fixture(autouse=True, scope="module")
def what_a_file_compiled_is_let_go() -> Iterator[None]:
    """Every compiled function takes some ten memory mappings, of which Linux gives a process 65,530: past them compilers crash. Only here,
    where there are thousands: engines that tests share would compile anew what they move between meshes with."""
    yield
    jax.clear_caches()
