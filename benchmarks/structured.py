"""`python -m benchmarks.structured`: what holding answers to a schema costs: a decode step with all rows held beside
one with none, the masks of a step, the first answer of a grammar that is new.

Both kinds of answers are generated one after the other in one process. A figure is a median, a ratio that of two
measurements of one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.compression import in_turns, row
from jaxinfer import LLM, SamplingParams, StructuredOutputs
from jaxinfer.structured.grammars import Grammars, masks_for

BATCHES = (1, 8, 32)
NEW_TOKENS = 64
ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"enum": ["north", "south", "east", "west"]},
        "sizes": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["id", "name", "tags", "place", "sizes", "note"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 20}  # no answer of so few tokens ends


def generation(llm: LLM, batch: int, wanted: StructuredOutputs | None) -> float:
    """Seconds of a batch's steps."""
    prompts = np.random.default_rng(time.monotonic_ns()).integers(100, 40_000, (batch, 16)).tolist()
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, structured_outputs=wanted)
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def mask_times(grammars: Grammars, wanted: StructuredOutputs, answer: Sequence[int]) -> list[float]:
    """Microseconds of each token's mask in an answer."""
    grammar, found = grammars.follow(wanted), []
    for token_id in answer:
        began = time.perf_counter()
        masks_for([grammar], 1, grammars.mask_words)
        found.append(1e6 * (time.perf_counter() - began))
        grammar.accept((token_id,))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (default: %(default)s)")
    parser.add_argument("--model", default="default", help="(default: %(default)s)")
    parser.add_argument("--settings", type=json.loads, default={}, help="of the engine, as JSON")
    options = parser.parse_args(arguments)
    settings: dict[str, Any] = {"kv_memory": "256MiB", "max_model_len": 1024, "max_batch_size": max(BATCHES), "decode_buckets": BATCHES}
    llm = LLM(options.model, **settings | options.settings)
    wanted = StructuredOutputs(json_schema=json.dumps(SCHEMA))
    began = time.perf_counter()
    llm.generate("x", SamplingParams(max_tokens=1, structured_outputs=wanted))
    first = time.perf_counter() - began
    console, table = Console(), Table("", "free, ms", "held, ms", "times as fast", title=f"{options.model}, {llm.engine.stats.weights}")
    for batch in BATCHES:
        ways = [partial(generation, llm, batch, each) for each in (None, wanted)]
        for way in ways:
            way()
        table.add_row(f"{NEW_TOKENS} steps of {batch}", *row(in_turns(ways[0], ways[1], options.rounds)))
    console.print(table)
    prompt = llm.tokenizer.encode("A list of things:")
    [output] = llm.generate([prompt], SamplingParams(max_tokens=400, temperature=0.8, seed=1, structured_outputs=wanted))
    grammars = llm.engine._components.grammars
    assert grammars is not None
    times = mask_times(grammars, wanted, output.outputs[0].token_ids)
    began = time.perf_counter()
    masks_for([grammars.follow(StructuredOutputs(json_schema=json.dumps(SCHEMA | {"maxItems": 99})))], 1, grammars.mask_words)
    new = 1e3 * (time.perf_counter() - began)
    console.print(f"a token's mask: {statistics.median(times):,.0f} us, p99 {np.percentile(times, 99):,.0f} us, of {len(times)} tokens")
    console.print(f"the first mask of a new grammar: {new:.1f} ms; the first request of the process: {first:.1f} s, with its programs")
    llm.close()


if __name__ == "__main__":
    main()
