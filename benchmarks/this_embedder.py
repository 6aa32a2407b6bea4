"""jaxinfer's embedding model as a worker: `python -m benchmarks.this_embedder FOLDER DTYPE THREADS`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from benchmarks.worker import Answer, serve
from jaxinfer import Embedder

REPEATS = 3  # the fastest counts, as for the peer


def start() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Loads and compiles; returns a description and a function that embeds."""
    embedder = Embedder(sys.argv[1], dtype=sys.argv[2])

    def answer(question: Answer) -> Answer:
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            embeddings = embedder.embed(question["texts"])
            seconds.append(time.perf_counter() - began)
        notes = f"{embedder.stats.num_compilations_after_ready} compiled after ready"
        return {"seconds": min(seconds), "embeddings": embeddings.tolist(), "notes": notes}

    return {"name": f"jaxinfer {sys.argv[2]}"}, answer


if __name__ == "__main__":
    serve(start)
    os._exit(0)  # no wait for the runtime's threads
