"""The numbers of a run: the full one and the quick one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.second_turn import TwoTurnChat
from benchmarks.peers.serving_load import ClientLoad
from benchmarks.workload import TOKEN_IDS, WorkloadCase

# In the order of measurement: first those that need the workers, then those that start processes of their own.
PARTS = ("rates", "second-turn", "quality", "embeddings", "start", "served")


@dataclass(frozen=True)
class PeerPlan:
    rounds: int
    rates: tuple[WorkloadCase, ...]
    chat: TwoTurnChat
    windows: tuple[int, int]  # of the quality text: tokens of each, and their number
    num_texts: int | None  # embedded in each case; None: all there are
    start: WorkloadCase
    start_rounds: int
    loads: tuple[ClientLoad, ...]
    context: int  # most tokens of a sequence in any part

    @classmethod
    def full(cls, rounds: int, token_ids: Sequence[int] | None = None) -> PeerPlan:
        ids = _range(token_ids)
        return cls(
            rounds=rounds,
            rates=(
                *(WorkloadCase("decode", size, 64, token_ids=ids) for size in (1, 8, 32)),
                *(WorkloadCase("prefill", size, token_ids=ids) for size in (128, 512, 2048)),
                WorkloadCase("throughput", 64, 128, 64, ids),
            ),
            chat=TwoTurnChat(2000, 32, 64, ids),
            windows=(512, 2),
            num_texts=None,
            start=WorkloadCase("prefill", 32, token_ids=ids),
            start_rounds=min(rounds, 2),
            loads=(ClientLoad(1, 4, 64, 64), ClientLoad(8, 16, 64, 64), ClientLoad(32, 64, 64, 64)),
            context=4096,
        )

    @classmethod
    def quick(cls, token_ids: Sequence[int] | None = None) -> PeerPlan:
        ids = _range(token_ids)
        return cls(
            rounds=1,
            rates=(
                *(WorkloadCase("decode", size, 8, 8, ids) for size in (1, 8)),
                WorkloadCase("prefill", 64, token_ids=ids),
                WorkloadCase("throughput", 16, 8, 8, ids),
            ),
            chat=TwoTurnChat(128, 8, 8, ids),
            windows=(64, 1),
            num_texts=8,
            start=WorkloadCase("prefill", 8, token_ids=ids),
            start_rounds=1,
            loads=(ClientLoad(1, 2, 8, 8), ClientLoad(4, 8, 8, 8)),
            context=256,
        )

    def about(self) -> dict[str, Any]:
        """What a reader of the results needs to know of it."""
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
