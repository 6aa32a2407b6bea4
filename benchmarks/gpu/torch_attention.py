"""torch's attention over contiguous keys and values without pages: its own choice of kernel, and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.measure import RowResult
from benchmarks.gpu.problem import interleaved_inputs
from benchmarks.gpu.roofline import DATASHEET, RooflineWork
from benchmarks.gpu.sizes import BenchmarkSizes
from benchmarks.gpu.torch_timing import device, per_call

_WORST_ERROR = 1e-2
_CHECKED = 32  # queries of a prompt that are checked


def measure_prefill(sizes: BenchmarkSizes, case: str, num_tokens: int, way: str) -> Iterator[RowResult]:
    """A prompt's tokens over themselves."""
    yield _measure(sizes, case, sizes.prefill_attention(num_tokens), 1, num_tokens, num_tokens, way)


def measure_decode(sizes: BenchmarkSizes, case: str, batch: int, context: int, way: str) -> Iterator[RowResult]:
    """One token a request over its context."""
    yield _measure(sizes, case, sizes.decode_attention(batch, context), batch, 1, context, way)


def _measure(sizes: BenchmarkSizes, case: str, work: RooflineWork, batch: int, queries: int, context: int, way: str) -> RowResult:
    model, dtype = sizes.model, getattr(torch, sizes.dtype)
    make = partial(torch.randn, dtype=dtype, device=device())
    q = make(batch, model.num_heads, queries, model.head_size)
    kv = (batch, model.num_kv_heads, context, model.head_size)
    inputs = [(make(*kv), make(*kv)) for _ in range(interleaved_inputs(work, sizes))]
    attend = _flex(queries, context, is_compiled=not sizes.is_small) if way == "torch flex" else _chosen(queries)
    with torch.inference_mode():
        error = _error(attend(q, *inputs[0]), q, *inputs[0])
        if not error <= _WORST_ERROR:
            return RowResult(case, work=work, failure=f"relative error {error:.1e}")
        calls = [partial(attend, q, k, v) for k, v in inputs]
        times = per_call(calls, max(DATASHEET["h100"].floor(work), 4e-6), sizes.repeats)
    return RowResult(case, times, work, {"relative_error": error})


def _chosen(queries: int) -> Callable[..., Any]:
    return partial(scaled_dot_product_attention, is_causal=queries > 1, enable_gqa=True)


def _flex(queries: int, context: int, *, is_compiled: bool) -> Callable[..., Any]:
    mask = create_block_mask(_is_causal, None, None, queries, context, device=device()) if queries > 1 else None
    attend = torch.compile(flex_attention, dynamic=False) if is_compiled else flex_attention
    return partial(attend, block_mask=mask, enable_gqa=True)


def _is_causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def _error(found: Any, q: Any, k: Any, v: Any) -> float:
    """Relative error of the first queries, against plain products in float32."""
    group, queries = q.shape[1] // k.shape[1], min(q.shape[2], _CHECKED)
    seen = k.shape[2] if q.shape[2] == 1 else queries
    q, found = q[:, :, :queries].float(), found[:, :, :queries].float()
    k, v = (a[:, :, :seen].float().repeat_interleave(group, 1) for a in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if queries > 1:
        scores = scores.masked_fill(torch.ones(queries, seen, device=q.device).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ v
    return float((found - expected).norm() / expected.norm())
