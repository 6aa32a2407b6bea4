"""/v1/batches: files of requests, answered when there is capacity. A key sees its own batches only."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from server.batches.batch_store import BatchStore, StoredBatch, UnknownFile
from server.batches.database import in_thread
from server.batches.runner import BatchRunner
from server.config import ServerConfig
from server.openai.body import check, read
from server.openai.errors import ApiError, quoted
from server.openai.files import ExpiresAfter
from server.openai.responses import OrAbsent
from server.openai.schema import documented_body, documented_errors, documented_query
from server.openai.strict import StrictModel, UnicodeText

MetadataKey = Annotated[UnicodeText, Field(max_length=64)]
MetadataValue = Annotated[UnicodeText, Field(max_length=512)]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class CreateBatch(StrictModel):
    input_file_id: UnicodeText
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchQuery(StrictModel):
    model_config = ConfigDict(strict=False)  # a query is text

    after: str | None = Field(None, pattern="^batch_", description="the last id of the page before")
    limit: int = Field(20, ge=1, le=100)


class BatchError(BaseModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class InputDetails(BaseModel):
    cached_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int = 0


class BatchUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: OrAbsent[str] = None
    errors: OrAbsent[BatchErrors] = None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: OrAbsent[str] = None
    error_file_id: OrAbsent[str] = None
    created_at: int
    in_progress_at: OrAbsent[int] = None
    expires_at: int
    finalizing_at: OrAbsent[int] = None
    completed_at: OrAbsent[int] = None
    failed_at: OrAbsent[int] = None
    expired_at: OrAbsent[int] = None
    cancelling_at: OrAbsent[int] = None
    cancelled_at: OrAbsent[int] = None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: StoredBatch) -> Self:
        same: dict[str, Any] = {name: getattr(batch, name) for name in cls.model_fields if hasattr(batch, name) and name != "errors"}
        return cls(
            **same,
            errors=None if batch.errors is None else BatchErrors(data=[BatchError(**error) for error in batch.errors]),
            request_counts=RequestCounts(total=batch.num_lines, completed=batch.num_completed, failed=batch.num_failed),
            usage=BatchUsage(
                input_tokens=batch.input_tokens,
                input_tokens_details=InputDetails(cached_tokens=batch.cached_tokens),
                output_tokens=batch.output_tokens,
                total_tokens=batch.input_tokens + batch.output_tokens,
            ),
        )


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: OrAbsent[str] = None
    last_id: OrAbsent[str] = None
    has_more: bool


def add_batches(app: FastAPI, store: BatchStore, runner: BatchRunner, config: ServerConfig) -> None:
    """The paths of the Batches API."""

    @app.post("/v1/batches", responses=documented_errors(400, 401, 413, 500, 503), openapi_extra=documented_body(CreateBatch))
    async def create_batch(request: Request) -> BatchObject:
        body = await read(request, config, CreateBatch)
        seconds = None if body.output_expires_after is None else body.output_expires_after.seconds
        try:
            batch = await in_thread(store.create, request.state.caller.tenant, body.input_file_id, body.endpoint, body.metadata, seconds)
        except UnknownFile:
            message = (
                f"input_file_id is {quoted(body.input_file_id)}: there is no such file with the purpose 'batch'; upload one to /v1/files"
            )
            raise ApiError(400, message, param="input_file_id", code="file_not_found") from None
        runner.look()
        return BatchObject.of(batch)

    @app.get("/v1/batches", responses=documented_errors(400, 401, 500, 503), openapi_extra=documented_query(BatchQuery))
    async def list_batches(request: Request) -> BatchList:
        query = check(dict(request.query_params), BatchQuery)
        found, has_more = await in_thread(store.page, request.state.caller.tenant, after=query.after, limit=query.limit)
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return BatchList(data=[BatchObject.of(batch) for batch in found], first_id=first, last_id=last, has_more=has_more)

    @app.get("/v1/batches/{batch_id}", responses=documented_errors(401, 404, 500, 503))
    async def batch_by_id(request: Request, batch_id: str) -> BatchObject:
        return BatchObject.of(_find(await in_thread(store.find, request.state.caller.tenant, batch_id), batch_id))

    @app.post("/v1/batches/{batch_id}/cancel", responses=documented_errors(401, 404, 409, 500, 503))
    async def cancel_batch(request: Request, batch_id: str) -> BatchObject:
        batch = _find(await in_thread(store.cancel, request.state.caller.tenant, batch_id), batch_id)
        if batch.status != "cancelling":
            raise ApiError(409, f"Cannot cancel a batch with status {batch.status!r}.", code="batch_not_cancellable")
        runner.look()
        return BatchObject.of(batch)


def _find(batch: StoredBatch | None, batch_id: str) -> StoredBatch:
    if batch is None:
        raise ApiError(404, f"the batch {quoted(batch_id)} does not exist", param="batch_id", code="batch_not_found")
    return batch
