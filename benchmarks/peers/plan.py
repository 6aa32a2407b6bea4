"""What a run measures, as numbers: the full one and the quick one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.second_turn import Chat
from benchmarks.peers.served import Load
from benchmarks.workload import TOKEN_IDS, Case

# In the order they are measured: first those that need the workers, then those that start processes of their own.
PARTS = ("rates", "second-turn", "quality", "embeddings", "start", "served")


@dataclass(frozen=True)
class Plan:
    rounds: int
    rates: tuple[Case, ...]
    chat: Chat
    windows: tuple[int, int]  # of the quality text: tokens of each, and how many
    num_texts: int | None  # embedded in each case; None: all there are
    start: Case
    start_rounds: int
    loads: tuple[Load, ...]
    context: int  # most tokens of a sequence, of all that is asked

    @classmethod
    def full(cls, rounds: int, token_ids: Sequence[int] | None = None) -> Plan:
        ids = _range(token_ids)
        return cls(
            rounds=rounds,
            rates=(
                *(Case("decode", size, 64, token_ids=ids) for size in (1, 8, 32)),
                *(Case("prefill", size, token_ids=ids) for size in (128, 512, 2048)),
                Case("throughput", 64, 128, 64, ids),
            ),
            chat=Chat(2000, 32, 64, ids),
            windows=(512, 2),
            num_texts=None,
            start=Case("prefill", 32, token_ids=ids),
            start_rounds=min(rounds, 2),
            loads=(Load(1, 4, 64, 64), Load(8, 16, 64, 64), Load(32, 64, 64, 64)),
            context=4096,
        )

    @classmethod
    def quick(cls, token_ids: Sequence[int] | None = None) -> Plan:
        ids = _range(token_ids)
        return cls(
            rounds=1,
            rates=(
                *(Case("decode", size, 8, 8, ids) for size in (1, 8)),
                Case("prefill", 64, token_ids=ids),
                Case("throughput", 16, 8, 8, ids),
            ),
            chat=Chat(128, 8, 8, ids),
            windows=(64, 1),
            num_texts=8,
            start=Case("prefill", 8, token_ids=ids),
            start_rounds=1,
            loads=(Load(1, 2, 8, 8), Load(4, 8, 8, 8)),
            context=256,
        )

    def about(self) -> dict[str, Any]:
        """What a reader of the results wants to know of it."""
        return {
            "rounds": self.rounds,
            "start_rounds": self.start_rounds,
            "decode_prompt_tokens": self.rates[0].prompt_tokens,
            "decode_new_tokens": self.rates[0].new_tokens,
            "served_requests": [load.num_requests for load in self.loads],
            "served_prompt_tokens": self.loads[0].prompt_tokens,
            "served_new_tokens": self.loads[0].new_tokens,
            "quality_tokens": self.windows[0] * self.windows[1],
        }


def _range(token_ids: Sequence[int] | None) -> tuple[int, int]:
    first, end = token_ids or TOKEN_IDS
    return (first, end)
