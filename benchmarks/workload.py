"""What is measured, and the one formula both engines are measured by. Standard library only: it runs in the peer's environment too."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Prompts = list[list[int]]
# Prompts and the new tokens of each (greedy, deaf to the end-of-sequence token) -> after each step, the prompts, by number,
# that got a token. The first step and the last have been waited for when they come.
Generate = Callable[[Prompts, int], Iterator[Sequence[int]]]

DECODE_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Case:
    kind: str  # decode or prefill
    size: int  # decode: sequences in the batch; prefill: prompt tokens of the one sequence
    new_tokens: int = 0  # decode: timed tokens of each sequence

    @property
    def label(self) -> str:
        return f"decode, batch {self.size}" if self.kind == "decode" else f"prefill, {self.size:,} tokens"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def prompts(count: int, length: int, seed: int) -> Prompts:
    """Token ids that any vocabulary of 32,000 has, special tokens left out. New with each seed: a prefix cache finds nothing."""
    rng = random.Random(f"{count} {length} {seed}")
    return [[rng.randrange(1_000, 31_000) for _ in range(length)] for _ in range(count)]


def measure(case: Case, seed: int, generate: Generate) -> float:
    """Tokens per second. Decode: what came after every sequence had its first token, over the time it took. Prefill: the
    prompt's tokens over the time to the first token."""
    if case.kind == "prefill":
        start = time.perf_counter()
        ends = [time.perf_counter() for step in generate(prompts(1, case.size, seed), 1) if step]  # chunks before the last give no token
        assert len(ends) == 1, f"{len(ends)} tokens came"
        return case.size / (ends[0] - start)
    started: set[int] = set()
    start, num_tokens, num_before = 0.0, 0, 0
    for step in generate(prompts(case.size, DECODE_PROMPT_TOKENS, seed), case.new_tokens + 1):
        num_tokens += len(step)
        if len(started) < case.size:
            started.update(step)
            start, num_before = time.perf_counter(), num_tokens
    end = time.perf_counter()
    assert num_tokens == case.size * (case.new_tokens + 1), f"{num_tokens} tokens came"
    return (num_tokens - num_before) / (end - start)


def cases(decode: Sequence[int], prefill: Sequence[int], new_tokens: int) -> list[Case]:
    """Decode cases by batch size, then prefill cases by prompt length."""
    return [Case("decode", b, new_tokens) for b in decode] + [Case("prefill", n) for n in prefill]
