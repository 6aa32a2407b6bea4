"""What the prefix cache saves: time to the first token of a chat's second turn, with the cache and without,
interleaved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from benchmarks.machine import BackgroundLoad
from benchmarks.peers.measures import Measures
from benchmarks.peers.rates import rotate
from benchmarks.worker import Worker

PART = "second turn"
WITH, WITHOUT = "with the prefix cache", "without it"


@dataclass(frozen=True)
class TwoTurnChat:
    """Numbers of tokens: the first turn's prompt, its answer, and the second turn's question."""

    prompt_tokens: int
    answer_tokens: int
    new_tokens: int
    token_ids: tuple[int, int]

    @property
    def label(self) -> str:
        return f"{self.prompt_tokens:,} tokens, an answer of {self.answer_tokens}, then {self.new_tokens} more: time to first token"


def measure_second_turn(
    workers: Mapping[str, Worker], chat: TwoTurnChat, rounds: int, measures: Measures, others: BackgroundLoad, say: Callable[[str], None]
) -> None:
    """`workers` under WITH and WITHOUT. One unrecorded round, then the rounds. Raises `WorkerError`."""
    for number in range(rounds + 1):
        for name in rotate(list(workers), number):
            say(f"{f'round {number} of {rounds}' if number else 'warming up'}: a chat's second turn {name}")
            others.look()
            seconds = workers[name].ask(second_turn=asdict(chat), seed=2 * number)["second_turn_seconds"]
            if number:
                others.keep()
                measures.add(PART, chat.label, "s", name, seconds, is_higher_better=False)
