"""What a process reports about itself before it measures. Each function imports its library itself."""

from __future__ import annotations

import importlib
from typing import Any


def describe_jax(*, needs_gpu: bool) -> dict[str, Any]:
    """The GPU and versions. Raises `RuntimeError` where JAX finds no GPU but needs one."""
    jax = importlib.import_module("jax")
    if not needs_gpu:
        importlib.import_module("benchmarks.gpu.interpreter").have_threads()
    device = jax.devices()[0]
    if needs_gpu and device.platform != "gpu":
        raise RuntimeError(f"JAX finds no GPU, only {device.device_kind}: install jax[cuda13], or use --small")
    stats = device.memory_stats() or {}
    about = {"card": device.device_kind, "jax": jax.__version__, "jaxlib": importlib.import_module("jaxlib").__version__}
    return about | {"jax_memory_bytes": stats.get("bytes_limit")}


def describe_torch(*, needs_gpu: bool) -> dict[str, Any]:
    """Versions. Raises `ImportError` where there is no torch, `RuntimeError` where it finds no GPU but needs one."""
    torch = importlib.import_module("torch")
    if needs_gpu and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    return {"torch": str(torch.__version__), "torch_card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
