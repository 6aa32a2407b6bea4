"""vLLM as a worker: `python -m benchmarks.peers.vllm_engine '{"name": ..., "model": FOLDER, "dtype": ...}'`, in its own
environment.

Its engine runs in this process and is stepped as `LLM.generate` steps it, without text: tokens only. The parent sets
the environment that its CPU build reads (`engines.vllm_environment`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import vllm
from vllm.sampling_params import RequestOutputKind

from benchmarks.worker import Answer, serve
from benchmarks.workload import Prompts, WorkloadCase, measure


def start() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Loads and compiles; returns a description and a function that answers a case."""
    began = time.perf_counter()
    settings: dict[str, Any] = json.loads(sys.argv[1])
    llm = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["context"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    engine = llm.llm_engine
    about = {
        "name": settings["name"],
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "platform": "cpu",
        "device": "cpu",
        "threads": settings["threads"],
        "ready_seconds": time.perf_counter() - began,
    }

    def generate(batch: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        for number, prompt in enumerate(batch):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            yield [int(output.request_id) for output in engine.step() for _ in output.outputs[0].token_ids]

    def answer(question: Answer) -> Answer:
        return {"tokens_per_second": measure(WorkloadCase(**question["case"]), question["seed"], generate)}

    return about, answer


if __name__ == "__main__":
    serve(start)
    os._exit(0)  # no wait for the runtime's threads
