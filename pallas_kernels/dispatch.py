"""Names of an op's backends. A backend that is asked for by name and can't run is an error, never a quiet fallback."""

from __future__ import annotations

from typing import Literal

KernelBackend = Literal["mosaic_gpu", "llvm_cpu", "xla", "reference"]
