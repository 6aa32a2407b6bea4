"""`python -m benchmarks.kv_dtype`: keys and values in float8 beside those of activations' type: what a context costs,
what it does to a text's perplexity, and the speed of decode over long contexts and of prefill.

Both engines run in turns in one process. A figure is a median, a ratio that of two measurements of one round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.blocks import TOKENS, perplexity
from benchmarks.compression import in_turns, row
from jaxinfer import LLM, SamplingParams

KINDS = ("auto", "fp8")
CONTEXTS = ((1, 2048), (8, 2048), (32, 512))  # sequences, tokens of each
NEW_TOKENS = 32


def decode(llm: LLM, prompts: list[list[int]]) -> float:
    """Seconds of the answers to prompts that the prefix cache has, but for their last tokens."""
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - began


def prefill(llm: LLM) -> float:
    """Seconds of 512 tokens that it does not have."""
    prompt = np.random.default_rng(time.monotonic_ns()).integers(100, 40_000, 512).tolist()
    began = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_dtype", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each way (default: %(default)s)")
    parser.add_argument("--model", default="default", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    batches = tuple(batch for batch, _ in CONTEXTS)
    llms = [
        LLM(
            options.model,
            kv_dtype=kind,
            kv_memory="1GiB",
            max_model_len=4096,
            max_batch_size=max(batches),
            decode_buckets=batches,
            prefill_buckets=(32, 512),
        )
        for kind in KINDS
    ]
    console = Console()
    table = Table("keys and values", "bytes a token", "tokens in 1 GiB", f"perplexity of {TOKENS} tokens")
    for llm in llms:
        stats = llm.engine.stats
        table.add_row(stats.kv_dtype, f"{llm.engine.page_spec.token_bytes:,}", f"{stats.kv_tokens:,}", f"{perplexity(llm):.4f}")
    console.print(table)
    names = [str(llm.engine.stats.kv_dtype.partition(",")[0]) for llm in llms]
    table = Table(options.model, f"{names[0]}, ms", f"{names[1]}, ms", "times as fast", title="the engine, host work and all")
    for batch, context in CONTEXTS:
        prompts = np.random.default_rng(context).integers(100, 40_000, (batch, context)).tolist()
        ways = [partial(decode, llm, prompts) for llm in llms]
        table.add_row(f"{NEW_TOKENS} steps of {batch} after {context:,} tokens", *row(in_turns(ways[0], ways[1], options.rounds)))
    ways = [partial(prefill, llm) for llm in llms]
    table.add_row("prefill of 512 tokens", *row(in_turns(ways[0], ways[1], options.rounds)))
    console.print(table)
    for llm in llms:
        llm.close()


if __name__ == "__main__":
    main()
