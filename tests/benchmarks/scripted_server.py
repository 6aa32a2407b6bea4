"""An OpenAI-compatible server of a few lines for the load testers: every answer is as the test wants it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def chunk(text: str, finish_reason: str | None = None, index: int = 0) -> dict:
    return {"choices": [{"index": index, "text": text, "finish_reason": finish_reason}], "usage": None}


def usage(prompt: int, output: int, cached: int | None) -> dict:
    details = None if cached is None else {"cached_tokens": cached}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}}


async def stream(request: web.Request, *events: dict | str | float) -> web.StreamResponse:
    """Send the events; a number waits that many seconds, "[DONE]" ends well, "[BREAK]" cuts the connection."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        if isinstance(event, float):
            await asyncio.sleep(event)
        elif event == "[BREAK]":
            request.transport.abort()
        else:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
    await response.write_eof()
    return response


@asynccontextmanager
async def answering(handler: Handler) -> AsyncIterator[str]:
    """The URL of a server whose completions `handler` gives."""

    async def completions(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted", "max_model_len": 512}]})

    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
