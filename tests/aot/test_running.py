"""The compiled kernels, run: the tests that JAX's interpreter runs of them, with what the compiler makes of them for a GPU instead, its PTX, on a
machine of NumPy."""

from __future__ import annotations

import pytest

from tests.kernels import test_grouped_matmul as grouped_matmul
from tests.kernels import test_paged_attention_gpu as paged_attention
from tests.kernels import test_ragged_prefill_attention_gpu as ragged_prefill_attention
from tests.kernels import test_write_and_attend_gpu as write_and_attend
from tests.ptx.kernel import run_interpreted_kernels_as_compiled

pytestmark = pytest.mark.aot


@pytest.fixture(autouse=True)
def _as_compiled(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_interpreted_kernels_as_compiled(target, monkeypatch)


for _module in (paged_attention, ragged_prefill_attention, write_and_attend):
    globals().update({f"{name}__{_module.__name__.split('.')[-1]}": test for name, test in vars(_module).items() if name.startswith("test_")})
