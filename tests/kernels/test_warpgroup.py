"""How kernels for Mosaic GPU are compiled is stated in one place."""

from __future__ import annotations

from pathlib import Path

from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels.mosaic.warpgroup import compiler_params


def test_lowering_semantics_are_stated_for_every_kernel():
    """JAX 0.10 and 0.11 have different defaults, and kernels are written for one."""
    assert compiler_params().lowering_semantics is plgpu.LoweringSemantics.Lane
    sources = Path(pallas_kernels.__path__[0]).rglob("*.py")
    assert [path.name for path in sources if "plgpu.CompilerParams(" in path.read_text()] == ["warpgroup.py"]
