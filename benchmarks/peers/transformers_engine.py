"""Hugging Face transformers as a worker: `python -m benchmarks.peers.transformers_engine '{"name": ..., "model": ...,
"dtype": ...}'`.

A plain greedy loop over the model's forward pass under `torch.inference_mode`, with SDPA attention and logits of the
last position only. That is what `generate` does, without its bookkeeping. Each case uses the key-value cache, dynamic
or static, that was faster in its warm-up. Runs in its own environment.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.worker import Answer, serve
from benchmarks.workload import Generate, Prompts, WorkloadCase, measure


def start() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Loads the model; returns a description and a function that answers questions."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    path, dtype, threads = Path(settings["model"]), settings["dtype"], settings["threads"]
    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    where = {"gguf_file": path.name} if path.is_file() else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent if path.is_file() else path, dtype=getattr(torch, dtype), attn_implementation="sdpa", **where
    )
    model = model.to(device).eval()
    about = {
        "name": settings["name"],
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "platform": device,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
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

    def rate(case: WorkloadCase, seed: int, is_once: bool) -> Answer:
        if is_once:
            return {"tokens_per_second": measure(case, seed, generator("dynamic", case.context))}
        if case.label not in chosen:
            measure(case.short(), 0, generator("dynamic", case.context))  # the first run of a shape is slower
            trials = {c: measure(case.short(), 0, generator(c, case.context)) for c in ("dynamic", "static")}
            chosen[case.label] = max(trials, key=lambda c: trials[c])
        cache = chosen[case.label]
        return {"tokens_per_second": measure(case, seed, generator(cache, case.context)), "cache": cache}

    @torch.inference_mode()
    def logits(window: list[int]) -> np.ndarray:
        return model(torch.tensor([window], device=device)).logits[0].float().cpu().numpy()

    def answer(question: Answer) -> Answer:
        match question:
            case {"case": case, "seed": seed}:
                return rate(WorkloadCase(**case), seed, question.get("once", False))
            case {"logits_of": windows, "path": path}:
                np.save(path, np.concatenate([logits(window) for window in windows]))
                return {}
        raise ValueError(f"no such question: {question}")

    return about, answer


if __name__ == "__main__":
    serve(start)
