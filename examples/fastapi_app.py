"""FastAPI around one engine: `uvicorn examples.fastapi_app:app`; or, with httpx, python examples/fastapi_app.py"""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from jaxinfer import LLM, AsyncLLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with LLM(model="default") as app.state.llm:
        app.state.async_llm = AsyncLLM(app.state.llm)  # the same engine
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/answer")
def answer(prompt: str) -> str:  # FastAPI runs these in threads, many at once
    return app.state.llm.generate(prompt, GREEDY)[0].outputs[0].text


@app.get("/stream")
async def stream(prompt: str) -> StreamingResponse:  # ended when the client leaves, which aborts the request
    return StreamingResponse((delta.text async for delta in app.state.async_llm.stream(prompt, GREEDY)), media_type="text/plain")


if __name__ == "__main__":
    with TestClient(app) as client, ThreadPoolExecutor() as pool:
        for reply in pool.map(lambda path: client.get(path, params={"prompt": "The capital of France is"}), ["/answer", "/stream"] * 2):
            print(reply.url.path, reply.text)
