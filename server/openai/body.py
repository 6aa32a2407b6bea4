"""A request's body: read under a limit, parsed, checked. Lines of batch files share the parsing and what follows."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.types import Message

from server.config import ServerConfig
from server.openai.errors import ApiError, from_exception, from_validation, joined
from server.openai.json_text import read_json
from server.openai.parameter_policy import IGNORED, ParameterPolicy
from server.openai.strict import StrictModel
from server.openai.text_work import work_on

Body = TypeVar("Body", bound=BaseModel)

_BYTES_A_CHARACTER = 8  # bytes read in the time of tokenizing one character


async def read_body(request: Request, limit: int) -> bytes:
    """The body's bytes. Raises `ApiError` 400 where it isn't declared as JSON, 413 as `limited`."""
    sent = request.headers.get("content-type")
    if sent is None:  # a browser leaves it out for a page that must not choose it
        raise ApiError(400, "no Content-Type was sent: send application/json", code="invalid_content_type")
    content_type = sent.partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(400, f"the Content-Type is {content_type[:80]!r}: send application/json", code="invalid_content_type")
    return await limited(request, limit).body()


def limited(request: Request, limit: int) -> Request:
    """The same request, whose body raises `ApiError` 413 as soon as it proves larger than `limit`, before the rest is
    read."""
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
    # Closing avoids reading the rest, which may be endless.
    return ApiError(
        413, f"the body is over {limit} bytes: send less in one request", code="body_too_large", headers={"Connection": "close"}
    )


def policy(request: Request, config: ServerConfig) -> ParameterPolicy:
    """How this request's parameters are read. Ignored ones are returned in a header."""
    request.state.policy = ParameterPolicy(config.strict_parameters)
    return request.state.policy


async def read(request: Request, config: ServerConfig, model: type[Body]) -> Body:
    """The request's body as `model`. Raises `ApiError` 413 as `limited`, and 400 saying what is wrong with another."""
    raw = await read_body(request, config.max_body_bytes)
    return await work_on(len(raw) // _BYTES_A_CHARACTER, partial(parse, raw, model, policy(request, config)))


def parse(raw: bytes, model: type[Body], policy: ParameterPolicy | None = None) -> Body:
    """The body as `model`. Raises `ApiError` 400 saying what is wrong with it."""
    if not raw:
        raise ApiError(400, "the body is empty: send a JSON object", code="invalid_json")
    return check(read_json(raw, "the body"), model, policy)


def check(data: object, model: type[Body], policy: ParameterPolicy | None = None) -> Body:
    """A body that was read from JSON as `model`; without a `policy`, unknown names are errors. Raises `ApiError` 400
    saying what is wrong with it."""
    policy = policy or ParameterPolicy()
    try:
        body = model.model_validate(data, context=policy)
    except ValidationError as error:
        raise from_validation(error, model, policy.refusals) from None
    if policy.refusals:
        raise joined([from_exception(refusal) for refusal in policy.refusals])
    IGNORED.log(policy.ignored)
    if isinstance(body, StrictModel):
        body.read_with(policy)
    return body
