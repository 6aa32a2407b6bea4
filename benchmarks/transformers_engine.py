"""Hugging Face transformers as a worker: `python -m benchmarks.transformers_engine GGUF float32 THREADS`, in its own environment.

A plain greedy loop over the model's forward pass under `torch.inference_mode`, with SDPA attention and logits of the last
position only. That is what `generate` does, without its bookkeeping. Each case uses the key-value cache, dynamic or static,
that was faster in its warm-up."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from benchmarks.worker import Answer, serve
from benchmarks.workload import DECODE_PROMPT_TOKENS, Case, Generate, Prompts, measure


def start() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Load, and return what this is and how to answer a case."""
    path, dtype, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    where = {"gguf_file": path.name} if path.is_file() else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent if path.is_file() else path, dtype=getattr(torch, dtype), attn_implementation="sdpa", **where
    )
    model = model.to(device).eval()
    about = {
        "name": f"transformers {dtype}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": device,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "dtype": dtype,
        "threads": threads,
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "ready_seconds": time.perf_counter() - began,
    }
    chosen: dict[str, str] = {}

    def generator(cache: str, length: int) -> Generate:
        @torch.inference_mode()
        def generate(batch: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
            tokens = torch.tensor(batch, device=device)
            kv = transformers.DynamicCache() if cache == "dynamic" else transformers.StaticCache(config=model.config, max_cache_len=length)
            for step in range(new_tokens):
                logits = model(tokens, past_key_values=kv, use_cache=True, logits_to_keep=1).logits
                tokens = logits[:, -1].argmax(-1, keepdim=True)
                if step in (0, new_tokens - 1):
                    tokens.cpu()  # on a GPU the steps between are only queued
                yield range(len(batch))

        return generate

    def answer(question: Answer) -> Answer:
        case = Case(**question["case"])
        length = case.size + 1 if case.kind == "prefill" else DECODE_PROMPT_TOKENS + case.new_tokens + 1
        if case.label not in chosen:
            short = replace(case, new_tokens=min(case.new_tokens, 8))
            measure(short, 0, generator("dynamic", length))  # the first run of a shape is slower
            trials = {c: measure(short, 0, generator(c, length)) for c in ("dynamic", "static")}
            chosen[case.label] = max(trials, key=lambda c: trials[c])
        cache = chosen[case.label]
        return {"tokens_per_second": measure(case, question["seed"], generator(cache, length)), "cache": cache}

    return about, answer


if __name__ == "__main__":
    serve(start)
