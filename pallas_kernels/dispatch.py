"""Names of the ways an op can run. A named one that can't run is an error, never a quiet fallback."""

from __future__ import annotations

from typing import Literal

Backend = Literal["mosaic_gpu", "llvm_cpu", "xla", "reference"]
