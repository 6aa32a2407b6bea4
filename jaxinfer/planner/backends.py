"""Which attention backend a role uses on a device, and why others are unsupported."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp

from jaxinfer.architecture.model_config import LatentSizes
from jaxinfer.config import ConfigError
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.programs.buckets import query_tile
from pallas_kernels.dispatch import KernelBackend
from pallas_kernels.latent_prefill_attention import op as latent_prefill_attention
from pallas_kernels.mosaic import card
from pallas_kernels.paged_attention import op as paged_attention
from pallas_kernels.ragged_prefill_attention import op as ragged_prefill_attention
from pallas_kernels.span import FULL_ATTENTION

logger = logging.getLogger(__name__)

_ATTENTION_KERNELS: dict[str, KernelBackend] = {"cpu": "llvm_cpu", "gpu": "mosaic_gpu"}  # by platform
_KERNELS_ARE_FOR = {"llvm_cpu": "CPUs", "mosaic_gpu": "NVIDIA GPUs"}


def choose_attention(
    role: str,
    name: str,
    device: jax.Device,
    dtype: jnp.dtype,
    spec: PageSpec,
    prefill_buckets: Sequence[int],
    soft_cap: float | None = None,
    latent: LatentSizes | None = None,
) -> KernelBackend:
    """The attention backend of a role, the same in all layers. `spec`: a device's part of a page. `latent`: sizes, for
    the prefill kernel that reads pages of latents.

    Raises `ConfigError` for a named backend that can't run here."""
    wanted = cast(KernelBackend, _ATTENTION_KERNELS.get(device.platform, "xla") if name == "auto" else name)
    pages = wanted, dtype, spec.head_size, spec.part_size
    is_latent, tile = spec.num_sides == 1, math.gcd(*map(query_tile, prefill_buckets))
    against = wrong_device(wanted, device)
    for span in spec.spans:
        if against is not None:
            break
        if role == "decode":
            is_plain = span == FULL_ATTENTION and soft_cap is None and not is_latent
            against = paged_attention.unsupported_reason(*pages, is_plain=is_plain, is_latent=is_latent, card=card.card_for(device))
        elif latent is not None:
            sizes = (latent.nope_size, latent.rope_size), latent.value_size
            against = latent_prefill_attention.unsupported_reason(wanted, dtype, *sizes, spec.page_size, tile, card.card_for(device))
        else:
            against = ragged_prefill_attention.unsupported_reason(*pages, tile, span, soft_cap, card.card_for(device))
    if name != "auto" and against:
        raise ConfigError(f"attention_backend is {name}, but {against}: use auto or xla")
    backend: KernelBackend = "xla" if against else wanted
    reason = against or ("asked for" if name != "auto" else f"the best for {device.device_kind}")
    logger.info("%s attention backend: %s (%s)", role, backend, reason)
    return backend


def wrong_device(backend: KernelBackend, device: jax.Device) -> str | None:
    """Why a backend's kernels can't run on a device, whatever the model; None if they can."""
    if backend not in _KERNELS_ARE_FOR:
        return None
    if _ATTENTION_KERNELS.get(device.platform) != backend:
        return f"its kernels are for {_KERNELS_ARE_FOR[backend]}, not {device.platform}"
    return card.unsupported_reason(device) if backend == "mosaic_gpu" else None
