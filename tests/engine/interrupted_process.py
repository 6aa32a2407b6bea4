"""A process of its own, run by test_interrupts: `python -m tests.engine.interrupted_process MODEL ROUNDS SEED`. Gets Ctrl+C at random moments of
its generate calls, after each of which the answers must be what they were; then tries a fork, and ends with requests under way."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

from jaxinfer.llm import LLM
from jaxinfer.request import RequestError, SamplingParams
from tests.conftest import TINY
from tests.engine.page_audit import assert_all_free

PROMPTS = [[7 + i, 3, 11 * i + 2] for i in range(8)]
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def main() -> None:
    path, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    llm = LLM(path, **TINY | {"decode_buckets": (8,), "max_batch_size": 8, "prefill_buckets": (32,), "prefill_chunk_size": 32})

    def answers() -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SHORT)]

    expected, moments, num_interrupted = answers(), random.Random(seed), 0
    for _ in range(rounds):
        timer = threading.Timer(moments.uniform(0.0, 0.06), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            while True:
                llm.generate(PROMPTS, LONG)
        except KeyboardInterrupt:
            num_interrupted += 1
        timer.join()
        assert answers() == expected
    assert_all_free(llm.engine)
    print(f"interrupted {num_interrupted}", flush=True)

    child = os.fork()
    if not child:
        began, code = time.monotonic(), 1
        try:
            llm.generate(PROMPTS, SHORT)
        except RequestError as error:
            code = 0 if "forked" in str(error) and time.monotonic() - began < 1 else 2
        finally:
            os._exit(code)
    print(f"child {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)
    assert answers() == expected

    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    threading.Thread(target=lambda: llm.generate(PROMPTS, LONG), daemon=True).start()
    time.sleep(0.05)
    print("ends", flush=True)


if __name__ == "__main__":
    main()
