"""Many prompts at once, each with its own settings: python examples/offline_batch.py"""

from jaxinfer import LLM, SamplingParams

prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a small village,", "2, 4, 8, 16,"]
greedy = SamplingParams(temperature=0, max_tokens=16)
playful = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=16, n=2)

llm = LLM(model="default")
for params in (greedy, playful):
    for result in llm.generate(prompts, params):
        for output in result.outputs:
            print(f"{result.prompt!r} -> {output.text!r} ({output.finish_reason})")
