"""Hugging Face transformers' encoder as a worker: `python -m benchmarks.transformers_embeddings FOLDER DTYPE THREADS`,
in its own environment.

Texts sorted by length in padded batches, mean pooling, length 1: what sentence-transformers does, without its
bookkeeping. The batch size is the one that was fastest in the warm-up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.worker import Answer, serve

REPEATS = 3  # the fastest counts: other load of the machine varies

BATCH_SIZES = (8, 32)


def start() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Loads the model; returns a description and a function that embeds."""
    folder, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def embed(texts: list[str], batch_size: int) -> np.ndarray:
        ids = tokenizer(texts, return_attention_mask=False)["input_ids"]
        order = sorted(range(len(texts)), key=lambda number: -len(ids[number]))
        made = np.empty((len(texts), model.config.hidden_size), np.float32)
        for first in range(0, len(texts), batch_size):
            numbers = order[first : first + batch_size]
            batch = tokenizer.pad({"input_ids": [ids[number] for number in numbers]}, return_tensors="pt")
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None].to(hidden.dtype)
            pooled = (hidden * mask).sum(1) / mask.sum(1)
            made[numbers] = torch.nn.functional.normalize(pooled.float(), dim=-1).numpy()
        return made

    def seconds_of(texts: list[str], batch_size: int) -> float:
        began = time.perf_counter()
        embed(texts, batch_size)
        return time.perf_counter() - began

    chosen: dict[int, int] = {}  # batch size by the number of characters, which identifies the case

    def answer(question: Answer) -> Answer:
        texts = question["texts"]
        key = sum(map(len, texts))
        if question["warm"]:
            for _ in range(2):  # the first run of a shape is slower
                tried = {size: seconds_of(texts, size) for size in BATCH_SIZES}
            chosen[key] = min(tried, key=lambda size: tried[size])
        seconds = min(seconds_of(texts, chosen[key]) for _ in range(REPEATS))
        return {"seconds": seconds, "embeddings": embed(texts, chosen[key]).tolist(), "notes": f"batches of {chosen[key]}"}

    return {"name": f"transformers {dtype}"}, answer


if __name__ == "__main__":
    serve(start)
