"""llama.cpp as a worker: `python -m benchmarks.peers.llama_cpp_engine '{"name": ..., "model": GGUF, "threads": ...}'`,
in its own environment.

It uses the C interface, which batches sequences as the `Llama` class doesn't. Each case uses flash attention or not,
and one cache for all sequences or one each, whichever was faster in its warm-up. The best token is NumPy's argmax,
faster than its own greedy sampler.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.worker import Answer, serve
from benchmarks.workload import Prompts, WorkloadCase, measure

BATCH = 2048  # most tokens a call; it processes them 512 at a time
FLASH, PLAIN = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
Kind = tuple[int, bool]  # flash attention, and whether all sequences share a cache
DEFAULT: Kind = (FLASH, False)


class LlamaCppContext:
    """Room for some sequences of some tokens each."""

    def __init__(self, model: Any, threads: int, sequences: int, tokens: int, kind: Kind) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_batch = sequences, BATCH
        params.n_ctx = sequences * -(-tokens // 256) * 256  # a sequence's part of it is a multiple of 256
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type, params.kv_unified = kind
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise MemoryError(f"no context for {sequences} sequences of {tokens} tokens")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._tokens, self._positions, self._wanted = (
            np.ctypeslib.as_array(pointer, (BATCH,)) for pointer in (self._batch.token, self._batch.pos, self._batch.logits)
        )
        for i in range(BATCH):
            self._batch.n_seq_id[i] = 1

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def clear(self) -> None:
        """Forget all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def place(self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[bool]) -> None:
        """Sets the tokens of the next run, and which of their logits are wanted."""
        count = self._batch.n_tokens = len(tokens)
        self._tokens[:count], self._positions[:count], self._wanted[:count] = tokens, positions, wanted
        for i, sequence in enumerate(sequences):
            self._batch.seq_id[i][0] = sequence

    def advance(self, tokens: np.ndarray) -> None:
        """The next run computes one more token of each sequence of the last one."""
        self._tokens[: len(tokens)] = tokens
        self._positions[: len(tokens)] += 1

    def run(self, outputs: int) -> np.ndarray:
        """Logits, a row for each token they were wanted of: valid until the next run."""
        if status := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {status}")
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (outputs, self._vocabulary)) if outputs else np.empty((0, self._vocabulary), np.float32)

    def generate(self, batch: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        """Implements `workload.Generate`."""
        everything = [(token, i, number, i == len(p) - 1) for number, p in enumerate(batch) for i, token in enumerate(p)]
        latest = np.zeros(len(batch), np.int32)
        for start in range(0, len(everything), BATCH):
            chunk = everything[start : start + BATCH]
            self.place(*zip(*chunk, strict=True))
            ended = [number for _, _, number, is_last in chunk if is_last]
            latest[ended] = self.run(len(ended)).argmax(-1)
            yield ended
        everyone = range(len(batch))
        self.place(latest.tolist(), [len(p) for p in batch], everyone, [True] * len(batch))
        for step in range(1, new_tokens):
            if step > 1:
                self.advance(latest)
            latest = self.run(len(batch)).argmax(-1)
            yield everyone


def start() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Loads the model; returns a description and a function that answers questions."""
    began = time.perf_counter()
    settings: dict[str, Any] = json.loads(sys.argv[1])
    threads = settings["threads"]
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise ValueError(f"{settings['model']} can't be loaded")
    said = ctypes.create_string_buffer(200)
    llama_cpp.llama_model_desc(model, said, len(said))
    about = {
        "name": settings["name"],
        "versions": {"llama-cpp-python": llama_cpp.__version__},
        "platform": "cpu",
        "device": "cpu",
        "threads": threads,
        "model": said.value.decode(),
        "weight_bytes": llama_cpp.llama_model_size(model),
        "system": llama_cpp.llama_print_system_info().decode().strip(),
        "ready_seconds": time.perf_counter() - began,
    }
    chosen: dict[str, Kind] = {}
    kept: dict[tuple[str, Kind], LlamaCppContext] = {}  # one at most: each has buffers of its own

    def context(case: WorkloadCase, kind: Kind) -> LlamaCppContext:
        """Empty, and with its buffers touched: the first run of a context is slower."""
        if (case.label, kind) not in kept:
            while kept:
                kept.popitem()[1].close()
            made = LlamaCppContext(model, threads, 1 if case.kind == "prefill" else case.size, case.context, kind)
            count = min(512, case.size if case.kind == "prefill" else case.prompt_tokens)
            made.place([0] * count, range(count), [0] * count, [False] * count)
            made.run(0)
            kept[case.label, kind] = made
        kept[case.label, kind].clear()
        return kept[case.label, kind]

    def rate(case: WorkloadCase, seed: int, is_once: bool) -> Answer:
        if not is_once and case.label not in chosen:
            kinds = [(flash, shared) for flash in (FLASH, PLAIN) for shared in ((False,) if case.kind == "prefill" else (False, True))]
            # Room for the whole case, so that the trial is like the measurement.
            trials = {kind: measure(case.short(), 0, context(case, kind).generate) for kind in kinds}
            chosen[case.label] = max(trials, key=lambda kind: trials[kind])
        kind = chosen.get(case.label, DEFAULT)
        found = measure(case, seed, context(case, kind).generate)
        return {"tokens_per_second": found, "flash_attention": kind[0] == FLASH, "one_cache": kind[1]}

    def logits(window: list[int]) -> np.ndarray:
        made = LlamaCppContext(model, threads, 1, len(window), DEFAULT)
        count = len(window)
        made.place(window, range(count), [0] * count, [True] * count)
        found = made.run(count).copy()
        made.close()
        return found

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
    os._exit(0)  # no wait for its threads
