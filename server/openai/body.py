"""A request's body: read under a limit, parsed, checked. Files of batch requests go the same way from the parsing on."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.types import Message

from server.config import ServerConfig
from server.openai.errors import ApiError, from_exception, from_validation, joined
from server.openai.json_text import read_json
from server.openai.reading import IGNORED, Reading
from server.openai.strict import StrictModel
from server.openai.text_work import work_on

Body = TypeVar("Body", bound=BaseModel)

_BYTES_A_CHARACTER = 8  # that are read in the time in which one character is tokenized


async def read_body(request: Request, limit: int) -> bytes:
    """The body's bytes. Raises `ApiError` 400 where it isn't declared as JSON, 413 for one that is `limited`'s."""
    sent = request.headers.get("content-type")
    if sent is None:  # a browser leaves it out for a page that must not choose it
        raise ApiError(400, "no Content-Type was sent: send application/json", code="invalid_content_type")
    content_type = sent.partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(400, f"the Content-Type is {content_type[:80]!r}: send application/json", code="invalid_content_type")
    return await limited(request, limit).body()


def limited(request: Request, limit: int) -> Request:
    """The same request, whose body raises `ApiError` 413 as soon as it proves larger than `limit`, before the rest is read."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        message = await request.receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > limit:
            raise _too_large(limit)
        return message

    return Request(request.scope, receive)


def _too_large(limit: int) -> ApiError:
    # Closing spares reading the rest, which may be endless.
    return ApiError(
        413, f"the body is over {limit} bytes: send less in one request", code="body_too_large", headers={"Connection": "close"}
    )


def reading(request: Request, config: ServerConfig) -> Reading:
    """How this request's parameters are read. What is ignored of them comes back in a header."""
    request.state.reading = Reading(config.strict_parameters)
    return request.state.reading


async def read(request: Request, config: ServerConfig, model: type[Body]) -> Body:
    """The request's body as `model`. Raises `ApiError` 413 for one that is `limited`'s, and 400 saying what is wrong with another."""
    raw = await read_body(request, config.max_body_bytes)
    return await work_on(len(raw) // _BYTES_A_CHARACTER, partial(parse, raw, model, reading(request, config)))


def parse(raw: bytes, model: type[Body], reading: Reading | None = None) -> Body:
    """The body as `model`. Raises `ApiError` 400 saying what is wrong with it."""
    if not raw:
        raise ApiError(400, "the body is empty: send a JSON object", code="invalid_json")
    return check(read_json(raw, "the body"), model, reading)


def check(data: object, model: type[Body], reading: Reading | None = None) -> Body:
    """A body that was read from JSON as `model`; without a `reading`, unknown names are errors. Raises `ApiError` 400 saying what is
    wrong with it."""
    reading = reading or Reading()
    try:
        body = model.model_validate(data, context=reading)
    except ValidationError as error:
        raise from_validation(error, model, reading.refusals) from None
    if reading.refusals:
        raise joined([from_exception(refusal) for refusal in reading.refusals])
    IGNORED.log(reading.ignored)
    if isinstance(body, StrictModel):
        body.read_with(reading)
    return body
