"""/v1/models/{id}/sleep, /wake and /update_weights: for who runs the server."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from jaxinfer.config import ConfigError
from jaxinfer.engine_access import EngineClosedError
from server.backend import Backend, InFlight, Unavailable, WeightControl
from server.openai.api_error import ApiError
from server.openai.body import read
from server.openai.responses import WeightState
from server.openai.schema import documented_body, documented_errors
from server.openai.service import Service
from server.openai.strict import StrictModel, describe


class SleepRequest(StrictModel):
    level: Literal[1, 2] | None = describe(description="1: the weights go to host memory; 2: they are dropped, and read again to wake up")
    in_flight: InFlight | None = describe(description="requests under way: finish waits for them, pause interrupts them")


class UpdateWeightsRequest(StrictModel):
    path: str = Field(description="a folder, a .gguf file or a Hugging Face id of the same model, on the server's machine")
    in_flight: InFlight | None = describe(description="requests under way: finish waits for them, pause interrupts them")


class WakeRequest(StrictModel):
    """Nothing needs to be said."""


WEIGHT_REQUESTS: list[type[BaseModel]] = [SleepRequest, WakeRequest, UpdateWeightsRequest]


def add_weights(app: FastAPI, service: Service) -> None:
    """These paths, which a server has with --weight-control."""
    config = service.config
    errors = documented_errors(400, 401, 403, 404, 409, 503)

    def control(request: Request, model_id: str) -> tuple[Backend, WeightControl]:
        if not request.state.caller.may_go_ahead:
            raise ApiError(403, "this API key may not change the model: use one of --priority-key-file", code="not_allowed")
        backend = service.of_model(model_id).backend
        found = backend.weight_control()
        if found is None:
            raise ApiError(409, "weights are changed at an engine's own server, not at a router", code="not_possible")
        return backend, found

    async def state(backend: Backend, change: Awaitable[object]) -> WeightState:
        try:
            await change
        except EngineClosedError as error:
            raise Unavailable("the server is shutting down") from error
        except ConfigError as error:
            raise ApiError(409, str(error), code="not_possible") from error
        except ValueError as error:  # a CheckpointError, or one about the model
            raise ApiError(400, str(error), code="weights_refused") from error
        stats = backend.stats()
        return WeightState(version=stats.weights_version, is_asleep=stats.is_asleep)

    @app.post("/v1/models/{model_id:path}/sleep", responses=errors, openapi_extra=documented_body(SleepRequest))
    async def sleep(request: Request, model_id: str) -> WeightState:
        """Give the memory of weights and KV pages back until the model is woken."""
        (backend, found), body = control(request, model_id), await read(request, config, SleepRequest)
        return await state(backend, found.sleep(body.level or 1, body.in_flight or "finish"))

    @app.post("/v1/models/{model_id:path}/wake", responses=errors, openapi_extra=documented_body(WakeRequest))
    async def wake(request: Request, model_id: str) -> WeightState:
        backend, found = control(request, model_id)
        await read(request, config, WakeRequest)
        return await state(backend, found.wake())

    @app.post("/v1/models/{model_id:path}/update_weights", responses=errors, openapi_extra=documented_body(UpdateWeightsRequest))
    async def update_weights(request: Request, model_id: str) -> WeightState:
        """Serve other weights of the same model from now on."""
        (backend, found), body = control(request, model_id), await read(request, config, UpdateWeightsRequest)
        return await state(backend, found.update_weights(body.path, body.in_flight or "finish"))
