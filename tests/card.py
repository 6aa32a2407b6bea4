"""The tests of kernels for GPUs on a card that is here: what asks for JAX's interpreter runs on the card instead.

    python3 -m pytest --noconftest -p tests.card tests/kernels/test_*_gpu.py tests/kernels/test_split_combine.py

Needs pytest, JAX with CUDA, NumPy and jaxtyping, and nothing of what reads checkpoints or texts: hence --noconftest.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest

from benchmarks.gpu.stand_ins import stand_in

stand_in()

from pallas_kernels.mosaic.card import card_for  # noqa: E402 - after what stands in for packages it doesn't need
from pallas_kernels.mosaic.warpgroup import Warpgroup  # noqa: E402


@pytest.fixture(autouse=True)
def run_on_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """References multiply in whole float32, which a card does only when told so."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        pytest.exit(f"JAX finds no GPU, only {device.device_kind}", returncode=2)
    monkeypatch.setattr(Warpgroup, "interpreted", _always(False), raising=False)
    monkeypatch.setattr(Warpgroup, "has_wgmma", _always(card_for(device).has_wgmma))
    jax.config.update("jax_default_matmul_precision", "highest")


def _always(value: Any) -> property:
    """A field that is this, whatever it is set to."""
    return property(lambda _: value, lambda _, __: None)
