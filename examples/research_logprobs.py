"""Two views of one distribution, and the engine step by step: python examples/research_logprobs.py"""

from jaxinfer import LLM, SamplingParams

llm = LLM(model="default")

# Sampling reports the same log-probabilities as a plain forward pass over the same tokens.
result = llm.generate(["The three laws of robotics are"], SamplingParams(temperature=0, max_tokens=12, logprobs=0))[0]
output = result.outputs[0]
plain = llm.logprobs(result.prompt_token_ids + output.token_ids)[-len(output.token_ids) :]
for reported, recomputed in zip(output.logprobs, plain, strict=True):
    print(f"{llm.tokenizer.decode([reported.token_id])!r:>14} {reported.logprob:9.4f} {recomputed:9.4f}")

# The engine itself: one request joins while another runs, and is aborted half-way.
engine = llm.engine
engine.add_request("long", llm.tokenizer.encode("Once upon a time"), SamplingParams(temperature=0, max_tokens=24))
for step in range(40):
    if step == 3:
        engine.add_request("late", llm.tokenizer.encode("2, 4, 8,"), SamplingParams(temperature=0, max_tokens=24))
    if step == 12:
        engine.abort("late")
    for delta in engine.step():
        print(step, delta.request_id, delta.token_ids, repr(delta.text), delta.finish_reason or "")
print(f"decode pages in use at the end: {engine.stats.decode_pages_used}")
