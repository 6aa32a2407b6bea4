"""jaxinfer as a worker: `python -m benchmarks.peers.this_engine '{"name": ..., "model": ..., "dtype": ...}'`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.worker import Answer, serve
from benchmarks.workload import Prompts, WorkloadCase, measure, prompts
from jaxinfer import LLM, SamplingParams


def start() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Loads and compiles; returns a description and a function that answers questions."""
    began = time.perf_counter()
    settings: dict[str, Any] = json.loads(sys.argv[1])
    # XLA takes all cores that the process may use; a sequence may have as many tokens as the model allows.
    name, _, _ = (settings.pop(word) for word in ("name", "threads", "context"))
    llm = LLM(**{"prefix_cache": False} | settings)  # every prompt is computed, as by the peers
    engine = llm.engine
    stats = engine.stats
    about = {
        "name": name,
        "versions": {"jax": jax.__version__},
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
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

    def rate(case: WorkloadCase, seed: int) -> Answer:
        steps, host = stats.num_decode_steps, stats.host_seconds
        rate = measure(case, seed, generate)
        steps = stats.num_decode_steps - steps
        return {
            "tokens_per_second": rate,
            "host_seconds_per_decode_step": (stats.host_seconds - host) / steps if steps else None,
            "compilations_after_ready": stats.num_compilations_after_ready,
        }

    def second_turn(prompt_tokens: int, answer_tokens: int, new_tokens: int, token_ids: Sequence[int], seed: int) -> Answer:
        """Seconds to the first token of each of two turns, the second with all of the first before it."""
        conversation: list[int] = []
        seconds = []
        for number, length in enumerate((prompt_tokens, new_tokens)):
            [said] = prompts(1, length, seed + number, token_ids)
            params = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True)
            began = time.perf_counter()
            conversation += said
            engine.add_request(f"turn {number}", conversation, params)
            answer: list[int] = []
            while engine.has_work:
                found = [token for delta in engine.step() for token in delta.token_ids]
                if found and not answer:
                    seconds.append(time.perf_counter() - began)
                answer += found
            conversation += answer
        return {"first_turn_seconds": seconds[0], "second_turn_seconds": seconds[1]}

    def answer(question: Answer) -> Answer:
        match question:
            case {"case": case, "seed": seed}:
                return rate(WorkloadCase(**case), seed)
            case {"second_turn": turn, "seed": seed}:
                return second_turn(**turn, seed=seed)
            case {"logits_of": windows, "path": path}:
                np.save(path, np.concatenate([llm.logits(window) for window in windows]))
                return {}
        raise ValueError(f"no such question: {question}")

    return about, answer


if __name__ == "__main__":
    serve(start)
    os._exit(0)  # no wait for the runtime's threads
