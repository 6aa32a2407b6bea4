"""An engine whose running sequences are rolled back at random."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from jaxinfer.engine import Engine
from tests.engine.page_audit import audit


def run_with_roll_backs(engine: Engine, random: np.random.Generator) -> tuple[dict[tuple[str, int], list[int]], dict[tuple[str, int], int]]:
    """All that was added, while running sequences are rolled back, each nine times at most. Returns each one's tokens,
    and how often it was."""
    decode = engine._components.decode
    tokens: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    times: defaultdict[tuple[str, int], int] = defaultdict(int)
    for _ in range(10_000):
        if not engine.has_work:
            return tokens, times
        for delta in engine.step():
            tokens[delta.request_id, delta.index] += delta.token_ids
        for sequence in list(decode.running):
            most = min(decode.max_roll_back(sequence), 20)
            which = sequence.request.request_id, sequence.index
            if most and times[which] < 9 and random.random() < 0.15:
                num_tokens = int(random.integers(1, most + 1))
                decode.roll_back(sequence, num_tokens)
                engine._output.roll_back(sequence)
                del tokens[which][-num_tokens:]
                times[which] += 1
        engine._metrics.update_gauges()
        audit(engine)
    raise AssertionError("the engine never came to an end")
