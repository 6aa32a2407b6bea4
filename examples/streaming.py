"""Streamed tokens, and a thread's answer beside them: python examples/streaming.py"""

import threading

from jaxinfer import LLM, SamplingParams

greedy = SamplingParams(temperature=0, max_tokens=40)

with LLM(model="default") as llm:  # closed at the end; Ctrl+C aborts running requests
    beside = threading.Thread(target=lambda: print(f"\nbeside: {llm.generate('The capital of France is', greedy)[0].outputs[0].text!r}"))
    beside.start()
    for delta in llm.stream("Once upon a time, in a small village,", greedy):
        print(delta.text, end="", flush=True)
    beside.join()

    num_tokens = 0
    for delta in llm.stream_chat([{"role": "user", "content": "Count to a hundred."}], greedy):
        num_tokens += len(delta.token_ids)
        if num_tokens >= 5:
            break  # aborts the request
    print(f"left after {num_tokens} tokens; aborted: {llm.engine.stats.finished['abort']}")
