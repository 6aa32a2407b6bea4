"""Prefill on one device, decode on another, here two virtual parts of the CPU: python examples/two_meshes.py"""

from jaxinfer import LLM, SamplingParams

llm = LLM(model="default", cpu_devices=2, prefill_devices=(0,), decode_devices=(1,), max_batch_size=8)
prompts = ["A page of the cache is handed from one mesh to the other", "while the next prompt is already being read", "1 + 1 ="]
for result in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
    print(f"{result.prompt!r} -> {result.outputs[0].text!r}")

stats = llm.engine.stats
print(f"prefill ran on {', '.join(stats.prefill_devices)}, decode on {', '.join(stats.decode_devices)}")
print(f"pages moved between them: {stats.num_pages_moved}; compiled after ready: {stats.num_compilations_after_ready}")
