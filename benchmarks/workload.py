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
    """Tokens per second. Prefill: the prompt's tokens over the time to the first token. Decode: the tokens that came while the
    whole batch was running, from when the last sequence had its first token to when the first sequence had its last."""
    if case.kind == "prefill":
        start = time.perf_counter()
        ends = [time.perf_counter() for step in generate(prompts(1, case.size, seed), 1) if step]  # chunks before the last give no token
        assert len(ends) == 1, f"{len(ends)} tokens came"
        return case.size / (ends[0] - start)
    wanted = case.new_tokens + 1
    counts = [0] * case.size
    marks = []  # time and tokens so far, at each step of the full batch
    for step in generate(prompts(case.size, DECODE_PROMPT_TOKENS, seed), wanted):
        is_full = max(counts) < wanted
        for number in step:
            counts[number] += 1
        if is_full and min(counts) > 0:
            marks.append((time.perf_counter(), sum(counts)))
    assert counts == [wanted] * case.size, f"{counts} tokens came: {wanted} of each sequence were asked for"
    assert len(marks) > 1, f"{case.label}: the first sequence ended before the last began; measure more than {case.new_tokens} new tokens"
    (start, before), (end, after) = marks[0], marks[-1]
    return (after - before) / (end - start)


def cases(decode: Sequence[int], prefill: Sequence[int], new_tokens: int) -> list[Case]:
    """Decode cases by batch size, then prefill cases by prompt length."""
    return [Case("decode", b, new_tokens) for b in decode] + [Case("prefill", n) for n in prefill]
