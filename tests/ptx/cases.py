"""Small launches of every kernel for GPUs: enough tiles that each stage of shared memory is used again, in few blocks. They are for what runs a
kernel many times (`mutations`); that results are right is for tests/aot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_gpu as grouped_matmul
from pallas_kernels.grouped_matmul.cases import ExpertsCase
from pallas_kernels.latent_prefill_attention.cases import LatentPrefillCase
from pallas_kernels.mosaic.split_combine import combine_splits
from pallas_kernels.mosaic.warpgroup import Warpgroup
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_and_lse, write_and_attend
from pallas_kernels.paged_attention.mosaic_tiling import DecodeTiling
from pallas_kernels.ragged_prefill_attention.mosaic_gpu import ragged_prefill_attention
from pallas_kernels.ragged_prefill_attention.mosaic_tile_work import PrefillTiling
from tests.kernels import test_latent_prefill_attention as latents
from tests.kernels import test_latent_prefill_attention_gpu as latents_gpu
from tests.kernels import test_ragged_prefill_attention_gpu as ragged
from tests.kernels.grouped_experts import experts
from tests.kernels.poisoned_pool import LAYER, poisoned_pool
from tests.ptx import kernel
from tests.ptx.faults import Run
from tests.ptx.launch import Launch

_CONTEXTS = (150, 230)  # tokens of two requests: three tiles of 64 and four, so that of two warpgroups one and the other has the last


def first_launch(case: Callable[[], Any], target: str) -> Run:
    """Compiles a case for this card, and runs it until its first kernel is done."""
    found: list[Run] = []

    def run(launch: Launch, arrays: Sequence[np.ndarray]) -> None:
        found.append(Run.of(launch, arrays))

    with pytest.MonkeyPatch.context() as patch:
        kernel.run_interpreted_kernels_as_compiled(target, patch)
        patch.setattr(kernel, "run", run)
        jax.block_until_ready(case())
    return found[0]


def _decode(*, is_latent: bool = False, dtype: Any = jnp.bfloat16, head_size: int = 64, **options: Any) -> Any:
    random = np.random.default_rng(0)
    kv, table = poisoned_pool(random, _CONTEXTS, 1, 64 if is_latent else 16, head_size)
    q = jnp.asarray(random.standard_normal((2, 4, head_size)), jnp.bfloat16)
    pool = jnp.asarray(kv[:, :1] if is_latent else kv, jnp.float32).astype(dtype)
    arguments = q, pool, jnp.int32(LAYER), jnp.asarray(table), jnp.asarray(_CONTEXTS, jnp.int32)
    return paged_attention_and_lse(*arguments, scale=0.1, pool_is_finite=False, interpreted=True, **options)


def _write() -> Any:
    random = np.random.default_rng(1)
    kv, table = poisoned_pool(random, _CONTEXTS, 1, 16, 64)
    q, k, v = (jnp.asarray(random.standard_normal((2, n, 64)), jnp.bfloat16) for n in (4, 1, 1))
    last = np.array(_CONTEXTS) - 1
    page_ids, offsets = (jnp.asarray(a, jnp.int32) for a in (table[range(2), last // 16], last % 16))
    where = jnp.asarray(table), page_ids, offsets, jnp.asarray(_CONTEXTS, jnp.int32)
    tiling = DecodeTiling(64, 2, 1, writes=True)
    options = {"scale": 0.1, "pool_is_finite": False, "interpreted": True}
    run = jax.jit(functools.partial(write_and_attend, tiling=tiling, **options))
    return run(q, k, v, jnp.asarray(kv, jnp.bfloat16), jnp.int32(LAYER), *where)


def _prefill() -> Any:
    inputs = ragged.arguments((0,), (330,), (90,), 128, unused=0)
    return ragged_prefill_attention(
        *inputs, tiling=PrefillTiling(1, 128, 2), scale=0.3, query_tile=64, pool_is_finite=False, interpreted=True
    )


def _prefill_over_latents() -> Any:
    case = LatentPrefillCase("one", 1, 32, 16, 16, 16, 16, 32, 32, ((250, 31),))
    return latents_gpu.attend(case, latents.arguments(case, 0, jnp.bfloat16, num_rows=1))


def _experts(format_: Any, rows: int) -> Any:
    random = np.random.default_rng(2)
    weights = experts(ExpertsCase("two", 2, 1, 512, 128, format_), random).weights
    x = jnp.asarray(random.standard_normal((10, 512)), jnp.bfloat16)
    tiling = grouped_matmul.GroupedMatmulTiling(rows, 2, blocks=1)
    return grouped_matmul.grouped_matmul(x, weights, jnp.array((3, 7)), tiling=tiling, interpreted=True)


def _splits() -> Any:
    random = np.random.default_rng(3)
    out, weight = (jnp.asarray(random.normal(size=(2, 1, 1, *last)), jnp.float32) for last in ((128,), ()))
    return combine_splits(Warpgroup(interpreted=True), out, weight, jnp.bfloat16)


CASES: dict[str, Callable[[], Any]] = {
    "decode": functools.partial(_decode, tiling=DecodeTiling(64, 2, 1)),
    "decode, one warpgroup": functools.partial(_decode, tiling=DecodeTiling(64, 2, 1, warpgroups=1)),
    "decode, float8": functools.partial(
        _decode, tiling=DecodeTiling(64, 2, 1), dtype=jnp.float8_e4m3fn, kv_scales=jnp.full((3, 2, 1), 0.5)
    ),
    "decode, latents": functools.partial(
        _decode, tiling=DecodeTiling(64, 2, 1, warpgroups=1), head_size=384 + 64, value_size=384, is_latent=True
    ),
    "decode and write": _write,
    "prefill": _prefill,
    "prefill over latents": _prefill_over_latents,
    "experts, bfloat16": functools.partial(_experts, "bfloat16", 8),
    "experts, int4": functools.partial(_experts, "int4", 8),
    "experts, fp8": functools.partial(_experts, "fp8", 8),
    "experts, lossless": functools.partial(_experts, "lossless", 8),
    "KV splits combined": _splits,
}
