"""Many asyncio tasks over one engine, which batches their requests: python examples/async_llm.py"""

import asyncio
import contextlib

from jaxinfer import AsyncLLM, SamplingParams

greedy = SamplingParams(temperature=0, max_tokens=16)


async def read(llm: AsyncLLM, prompt: str) -> str:
    text = ""
    async for delta in llm.stream(prompt, greedy):
        text += delta.text
    return f"{prompt!r} -> {text!r}"


async def main() -> None:
    async with AsyncLLM(model="default") as llm:  # blocks until the engine is ready
        prompts = ["The capital of France is", "2, 4, 8,", "def fibonacci(n):"]
        for line in await asyncio.gather(*[read(llm, prompt) for prompt in prompts]):
            print(line)

        outputs = await llm.generate(prompts, greedy)
        print([output.outputs[0].finish_reason for output in outputs])

        with contextlib.suppress(TimeoutError):  # cancelling a task aborts its requests
            async with asyncio.timeout(0.2):
                await llm.generate("Once upon a time", SamplingParams(max_tokens=1000, ignore_eos=True))
        answer = await llm.chat([{"role": "user", "content": "Name a primary colour."}], greedy)
        print(answer.outputs[0].text)


asyncio.run(main())
