"""An engine in one layout, as a worker: `python -m benchmarks.scaling.layout_worker '{"model": ..., "prefill_parallel":
...}'`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.worker import Answer, serve
from benchmarks.workload import Prompts, WorkloadCase, measure
from jaxinfer import LLM, SamplingParams

_SEEN = 0.05  # seconds: the last stage's thread sees a step's end a moment after the reader of its tokens


def start() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Loads and compiles; returns a description and a function that answers questions."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    llm = LLM(**{"prefix_cache": False} | settings)  # every prompt is computed
    engine, stats = llm.engine, llm.engine.stats

    def generate(batch: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        for number, prompt in enumerate(batch):
            engine.add_request(str(number), prompt, params)
        while engine.has_work:
            yield [int(delta.request_id) for delta in engine.step() for _ in delta.token_ids]

    def times() -> tuple[float, float]:
        """Seconds that stages have worked and waited until now."""
        time.sleep(_SEEN)
        stages = [stage for of_role in stats.stage_times.values() for stage in of_role]
        return sum(stage.busy for stage in stages), sum(stage.waiting for stage in stages)

    def answer(question: Answer) -> Answer:
        (busy, waiting), (steps, host) = times(), (stats.num_decode_steps, stats.host_seconds)
        rate = measure(WorkloadCase(**question["case"]), question["seed"], generate)
        busy, waiting = (now - before for now, before in zip(times(), (busy, waiting), strict=True))
        steps = stats.num_decode_steps - steps
        return {
            "tokens_per_second": rate,
            "bubble_share": waiting / (busy + waiting) if busy else None,
            # of a decode step of one micro-batch
            "host_seconds": (stats.host_seconds - host) / steps if steps else None,
        }

    about = {"heads": stats.heads, "memory": stats.memory, "compile_seconds": stats.compile_seconds}
    return about, answer


if __name__ == "__main__":
    serve(start)
    os._exit(0)  # no wait for the runtime's threads
