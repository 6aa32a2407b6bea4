"""Hugging Face transformers with random weights of the same shape: prefill uncompiled, decode compiled over a static
cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from benchmarks.gpu.measure import CallTimes, RowResult
from benchmarks.gpu.sizes import BenchmarkSizes
from benchmarks.gpu.torch_timing import device, device_seconds

_STEPS = 16  # of a measurement; the cache has room for a few more


@functools.cache
def _model(sizes: BenchmarkSizes) -> Any:
    """Created on the device."""
    settings = sizes.model.hf_config(max(sizes.prefill) * 2)
    config = transformers.LlamaConfig(**{name: value for name, value in settings.items() if name != "rope_theta"})
    config.rope_parameters = {"rope_type": "default", "rope_theta": settings["rope_theta"]}
    with torch.device(device()):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, sizes.dtype), attn_implementation="sdpa")
    return model.eval()


@torch.no_grad()
def prefill_steps(sizes: BenchmarkSizes) -> Iterator[RowResult]:
    """A whole prompt, logits of its last token only."""
    model = _model(sizes)
    for num_tokens in sizes.prefill:
        tokens = torch.randint(sizes.model.vocab_size, (1, num_tokens), device=device())
        run = functools.partial(model, tokens, use_cache=True, logits_to_keep=1)
        device_seconds(run, 2)
        times = CallTimes.of([device_seconds(run, 3) for _ in range(sizes.repeats)])
        yield RowResult(f"{num_tokens} tokens", times, sizes.prefill_step(num_tokens), {"tokens_per_s": round(num_tokens / times.median)})


@torch.no_grad()
def decode_steps(sizes: BenchmarkSizes) -> Iterator[RowResult]:
    """Compiled for each size, the shorter contexts first, and the largest and smallest batch before those between."""
    model = _model(sizes)
    shortest = [size for size in sizes.decode if size[1] == min(context for _, context in sizes.decode)]
    others = [size for size in sizes.decode if size not in shortest]
    for batch, context in (shortest[0], *shortest[:0:-1], *others):
        step = model if sizes.is_small else torch.compile(model, mode="reduce-overhead", dynamic=False)
        cache = transformers.StaticCache(config=model.config, max_cache_len=context + _STEPS)
        tokens = torch.randint(sizes.model.vocab_size, (batch, 1), device=device())
        model(tokens, past_key_values=cache)  # creates the cache's arrays
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()

        def run(step: Any = step, cache: Any = cache, tokens: Any = tokens) -> None:
            tokens.copy_(step(tokens, past_key_values=cache).logits.argmax(-1))

        seconds = []
        for number in range(2 + sizes.repeats):  # two to compile and record
            for layer in cache.layers:
                layer.cumulative_length.fill_(context - 1)
            found = device_seconds(run, _STEPS)
            if number > 1:
                seconds.append(found)
        times = CallTimes.of(seconds)
        notes = {"tokens_per_s": round(batch / times.median)}
        yield RowResult(f"batch {batch}, context {context}", times, sizes.decode_step(batch, context), notes)
