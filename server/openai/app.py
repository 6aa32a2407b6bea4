"""The FastAPI app: paths, their handlers, and their possible answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route

from jaxinfer.tokenizer import Tokenizer
from server.api_keys import KeyRing
from server.backend import Backend
from server.batches.batch_store import BatchStore
from server.batches.runner import BatchRunner
from server.config import ServerConfig
from server.metrics import live_numbers, metrics_text
from server.openai import chat, completions, embeddings
from server.openai.batches import CreateBatch, add_batches
from server.openai.body import read
from server.openai.caller import ANONYMOUS
from server.openai.errors import ApiError, from_exception, quoted
from server.openai.files import add_files
from server.openai.origin import cors_settings
from server.openai.protocol import ChatRequest, CompletionRequest, EmbeddingRequest
from server.openai.request_log import RequestLog
from server.openai.request_middleware import ActiveRequests, RequestMiddleware
from server.openai.responses import ChatCompletion, Completion, EmbeddingList, Health, Model, ModelList, ServerLoad, Version
from server.openai.schema import documented_body, documented_errors, openapi_page
from server.openai.service import Service
from server.openai.stream import event_stream, until_disconnected
from server.openai.weights import WEIGHT_REQUESTS, add_weights
from server.page import STATIC_FILES, chat_page
from server.usage import UsageMeter
from server.usage_log import UsageLog


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model beside the first, with its names in the API."""

    names: tuple[str, ...]
    backend: Backend
    tokenizer: Tokenizer


def create_app(
    backend: Backend,
    tokenizer: Tokenizer,
    config: ServerConfig,
    usage_log: UsageLog | None = None,
    store: BatchStore | None = None,
    first: Backend | None = None,
    others: Sequence[OtherModel] = (),
) -> FastAPI:
    """The whole HTTP front. `app.state.traffic` counts requests and begins a shutdown, `app.state.abort` ends what
    did not finish in its time, `app.state.key_rings` can read their files again. `store` has files and batches; without
    it there are none. Of several models `backend` starts, watches and ends all; `tokenizer` and the names in `config`
    are the first's, as is `first`, the backend that its requests go to; `others` are those beside it."""
    traffic, keys, metrics_keys = ActiveRequests(), KeyRing.api_keys(config), KeyRing.metrics_keys(config)
    config = config.without_secrets()
    usage = UsageMeter(keys.tenants or [ANONYMOUS], usage_log)
    created = int(time.time())
    beside = [Service(other.backend, other.tokenizer, replace(config, served_model_name=other.names), created, usage) for other in others]
    service = Service(first or backend, tokenizer, config, created, usage, tuple(beside))
    runner = None if store is None else BatchRunner(service, store, lambda: backend.is_ready() and not traffic.is_closing, backend)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await backend.start()
        traffic.open()
        if runner is not None:
            runner.start()
        yield
        traffic.close()
        if runner is not None:
            await runner.stop()
        await backend.stop()

    async def abort() -> None:
        if runner is not None:  # first: its lines are run again after the next start
            await runner.stop()
        backend.abort_all()

    # FastAPI's interactive documentation loads from a CDN, so only the OpenAPI page itself is served.
    app = FastAPI(title="jaxinfer", description="OpenAI-compatible inference", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.traffic, app.state.key_rings, app.state.abort = traffic, (keys, metrics_keys), abort
    app.add_middleware(RequestMiddleware, config=config, traffic=traffic, keys=keys, metrics_keys=metrics_keys)
    if config.cors_origins:  # outermost, so that pages can read its errors too, and preflights need no key
        app.add_middleware(CORSMiddleware, **cors_settings(config))
    app.add_middleware(RequestLog, config=config, traffic=traffic, usage=usage)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    _add_api(app, service)
    if config.weight_control:
        add_weights(app, service)
    if store is not None and runner is not None:
        add_files(app, store.files, config.max_file_bytes)
        add_batches(app, store, runner, config)
    else:
        _add_absence(app)
    _add_operations(app, backend, traffic, usage, runner, config.watchdog_timeout)
    app.mount("/static", STATIC_FILES, name="static")
    bodies: list[type[BaseModel]] = [ChatRequest, CompletionRequest, EmbeddingRequest, CreateBatch]
    if config.weight_control:
        bodies += WEIGHT_REQUESTS
    page = openapi_page(app, bodies, has_keys=bool(keys), is_strict=config.strict_parameters)
    app.openapi = page  # type: ignore[method-assign]
    return app


def _add_api(app: FastAPI, service: Service) -> None:
    """The paths of OpenAI's API."""
    config = service.config
    errors = documented_errors(400, 401, 404, 408, 413, 429, 500, 503)
    streamed: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}

    @app.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses=errors | streamed, openapi_extra=documented_body(ChatRequest)
    )
    async def chat_completions(request: Request) -> Response:
        body = await read(request, config, ChatRequest)
        if body.stream:
            return await event_stream(request, chat.stream(service, body, request.state.caller))
        answer = await until_disconnected(request.receive, chat.respond(service, body, request.state.caller))
        return Response(answer.model_dump_json(), media_type="application/json")

    @app.post("/v1/completions", response_model=Completion, responses=errors | streamed, openapi_extra=documented_body(CompletionRequest))
    async def text_completions(request: Request) -> Response:
        body = await read(request, config, CompletionRequest)
        if body.stream:
            return await event_stream(request, completions.stream(service, body, request.state.caller))
        answer = await until_disconnected(request.receive, completions.respond(service, body, request.state.caller))
        return Response(answer.model_dump_json(), media_type="application/json")

    @app.post("/v1/embeddings", response_model=EmbeddingList, responses=errors, openapi_extra=documented_body(EmbeddingRequest))
    async def text_embeddings(request: Request) -> Response:
        body = await read(request, config, EmbeddingRequest)
        answer = await until_disconnected(request.receive, embeddings.respond(service, body, request.state.caller))
        return Response(await asyncio.to_thread(answer.model_dump_json), media_type="application/json")

    @app.get("/v1/models", responses=documented_errors(401, 503))
    async def models() -> ModelList:
        return ModelList(data=service.models())

    @app.get("/v1/models/{model_id:path}", responses=documented_errors(401, 404, 503))
    async def model_by_id(model_id: str) -> Model:
        return service.model(model_id)


def _add_absence(app: FastAPI) -> None:
    @app.api_route("/v1/files{path:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    @app.api_route("/v1/batches{path:path}", methods=["GET", "POST"], include_in_schema=False)
    async def no_batches() -> None:
        message = "this server keeps no files and batches: start it with --batch-dir and a folder for them"
        raise ApiError(404, message, code="batches_disabled")


def _add_operations(
    app: FastAPI, backend: Backend, traffic: ActiveRequests, usage: UsageMeter, runner: BatchRunner | None, watchdog_timeout: float
) -> None:
    """The chat page, and the endpoints for monitoring. None of these needs an API key."""

    def failure_of_engine() -> str | None:
        seconds = backend.iteration_seconds()
        hang = f"the engine has been in one iteration for {seconds:.0f} s (watchdog_timeout is {watchdog_timeout:g}): restart the server"
        return backend.failure() or (hang if seconds > watchdog_timeout else None)

    @app.head("/ping", include_in_schema=False)
    @app.post("/ping", include_in_schema=False)
    @app.get("/ping", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={503: {"model": Health, "description": "The engine has failed; restart the server"}})
    async def health() -> Response:
        failure = failure_of_engine()
        return JSONResponse({"status": failure or "ok"}, 503 if failure else 200)

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses={503: {"model": Health, "description": "Send no requests now"}})
    async def ready() -> Response:
        failure = failure_of_engine()
        is_ready = backend.is_ready() and not traffic.is_closing and failure is None
        waiting = "asleep" if backend.stats().is_asleep else "starting"
        status = "ready" if is_ready else failure or ("shutting down" if traffic.is_closing else waiting)
        models = {} if (reports := backend.models()) is None else {"models": {name: model.status for name, model in reports.items()}}
        return JSONResponse({"status": status} | models, 200 if is_ready else 503)

    @app.get("/version")
    async def version() -> Version:
        return Version(version=metadata.version("jaxinfer"))

    @app.get("/load")
    async def load() -> ServerLoad:
        """The number of active requests below /v1/."""
        return ServerLoad(server_load=traffic.num_open)

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        text, content_type = metrics_text(
            backend.models() or backend.stats(), traffic.num_answered, usage.totals, runner.counts() if runner else None, backend.cluster()
        )
        return Response(text, headers={"content-type": content_type})

    @app.get("/stats", include_in_schema=False)
    async def stats(model: str | None = None) -> Response:
        """The chat page's live numbers; of several models, those of one, or of the first."""
        reports = backend.models()
        if reports is None:
            return JSONResponse(live_numbers(backend.stats(), backend.cluster()))
        shown = reports.get(model or "", next(iter(reports.values())))
        return JSONResponse(live_numbers(shown.stats) | {"models": {name: report.status for name, report in reports.items()}})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return chat_page()


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """What the framework itself refuses, in OpenAI's error format."""
    match getattr(error, "status_code", 500):
        case 404:
            error = ApiError(404, f"unknown URL: {request.method} {quoted(request.url.path)}", code="unknown_url")
        case 405:
            headers = {"Allow": ", ".join(_methods_of(request))}
            error = ApiError(405, f"{quoted(request.url.path)} doesn't take {request.method}", code="method_not_allowed", headers=headers)
    return from_exception(error).response()


def _methods_of(request: Request) -> list[str]:
    """The methods of the path, over all its routes: the framework's own answer names those of the first."""
    routes = [route for route in request.app.routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in route.methods or ()})
