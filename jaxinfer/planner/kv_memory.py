"""Memory for KV pages: how much an engine takes on a device, and the context length that pages hold."""

from __future__ import annotations

import os
from bisect import bisect_right

import jax

from jaxinfer.config import ConfigError, format_bytes, parse_bytes
from jaxinfer.kv_cache.spec import PageSpec
from sharding.mesh import own_device

CPU_KV_BYTES = 2**29  # on each device, by default
GPU_KV_SHARE = 0.85  # of what weights leave free, by default; the rest is for temporaries


def kv_budget(kv_memory: str, mesh: jax.sharding.Mesh, weight_bytes: int) -> int:
    """Bytes for pages on each device of a mesh. Raises `ConfigError` for more than a device has."""
    device = own_device(mesh)
    if kv_memory == "auto" and device.platform != "cpu" and jax.process_count() > 1:
        raise ConfigError("kv_memory is auto, but each process would find another size: give one, such as 40GiB")
    stats = device.memory_stats() if device.platform != "cpu" else None
    if kv_memory != "auto":
        budget = parse_bytes("kv_memory", kv_memory)
        memory = stats["bytes_limit"] if stats else machine_bytes()
        if budget > memory:
            raise ConfigError(f"kv_memory is {kv_memory}, but {device} has {format_bytes(memory)}: give less, or auto")
        return budget
    if not stats:
        return CPU_KV_BYTES
    return max(int((stats["bytes_limit"] - stats["bytes_in_use"] - weight_bytes) * GPU_KV_SHARE), 0)


def machine_bytes() -> int:
    """Memory of a CPU device: the machine's."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_bytes(device: jax.Device) -> int:
    """Memory that a device has for JAX."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return int(stats["bytes_limit"]) if stats else machine_bytes()


def max_context_tokens(spec: PageSpec, num_pages: int, chunk_size: int, wanted: int) -> int:
    """Tokens of the longest context that this many pages hold when it is prefilled in chunks of `chunk_size`; at most
    a page more than `wanted`."""
    blocks = range(spec.blocks_for(wanted) + 1)
    most = bisect_right(blocks, num_pages, key=lambda block: spec.max_pages(block * spec.page_size, chunk_size))
    return most * spec.page_size - spec.page_size
