"""jaxinfer as a worker: `python -m benchmarks.this_engine MODEL DTYPE`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from benchmarks.worker import Answer, serve
from benchmarks.workload import Case, Prompts, measure
from jaxinfer import LLM, SamplingParams


def start() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Load, compile, and return what this is and how to answer a case."""
    began = time.perf_counter()
    llm = LLM(model=sys.argv[1], dtype=sys.argv[2], prefix_cache=False)  # every prompt is computed, as the peers do
    engine = llm.engine
    stats = engine.stats
    platform = jax.default_backend()
    about = {
        "name": f"jaxinfer {sys.argv[2]}",
        "jax": jax.__version__,
        "platform": platform,
        "device": jax.devices()[0].device_kind,
        "dtype": sys.argv[2],
        "ready_seconds": time.perf_counter() - began,
        "load_seconds": stats.load_seconds,
        "compile_seconds": stats.compile_seconds,
    }

    def generate(batch: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        for number, prompt in enumerate(batch):
            engine.add_request(str(number), prompt, params)
        while engine.has_work:
            yield [int(delta.request_id) for delta in engine.step() for _ in delta.token_ids]

    def answer(question: Answer) -> Answer:
        steps, host = stats.num_decode_steps, stats.host_seconds
        rate = measure(Case(**question["case"]), question["seed"], generate)
        steps = stats.num_decode_steps - steps
        return {
            "tokens_per_second": rate,
            "host_seconds_per_decode_step": (stats.host_seconds - host) / steps if steps else None,
            "compilations_after_ready": stats.num_compilations_after_ready,
        }

    return about, answer


if __name__ == "__main__":
    serve(start)
    os._exit(0)  # no wait for the runtime's threads
