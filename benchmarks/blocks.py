"""`python -m benchmarks.blocks`: a GGUF file's blocks as they are beside the same weights dequantised to bfloat16:
speed of the engine, bytes, perplexity of a text.

Both ways run in turns in one process. A figure is a median, a ratio that of two measurements of one round.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.compression import engines, row, whole_engine
from jaxinfer import LLM, SamplingParams

TEXT = Path(__file__).parent / "peers" / "quality_text.txt"
TOKENS = 768


def perplexity(llm: LLM) -> float:
    """Of the text's first tokens."""
    tokens = llm.engine.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:TOKENS]
    (result,) = llm.generate([tokens], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    scores = [of_token.logprob for of_token in result.prompt_logprobs or () if of_token is not None]
    return math.exp(-sum(scores) / len(scores))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each way (default: %(default)s)")
    parser.add_argument("--model", default="default", help="a GGUF file's (default: %(default)s)")
    options = parser.parse_args(arguments)
    console = Console()
    llms = engines(options.model, ("dequantised", "auto"))
    table = Table("in memory", "weights, MB", f"perplexity of {TOKENS} tokens")
    for llm in llms:
        stats = llm.engine.stats
        table.add_row(stats.weights, f"{stats.memory['shared weights'] / 1e6:.1f}", f"{perplexity(llm):.4f}")
    console.print(table)
    table = Table(options.model, "dequantised, ms", "blocks, ms", "times as fast", title="the engine, host work and all")
    for name, found in whole_engine(llms, options.rounds):
        table.add_row(name, *row(found))
    console.print(table)
    for llm in llms:
        llm.close()


if __name__ == "__main__":
    main()
