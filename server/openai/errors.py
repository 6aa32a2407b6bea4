"""All errors of a request, in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import difflib
import logging
import math
import reprlib
from collections.abc import Collection, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from jaxinfer.request import RequestError
from server.backend import Overloaded, Unavailable
from server.openai.api_error import ApiError as ApiError

logger = logging.getLogger(__name__)

MAX_FAULTS = 8  # of one body, reported in one error

_SHORT = reprlib.Repr()  # a message quotes the client's value, which may be megabytes
_SHORT.maxstring = _SHORT.maxother = 80


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


def from_exception(error: Exception) -> ApiError:
    """The answer to any exception a handler raised. An unexpected one is logged and answered 500 without its
    details."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code or "invalid_value")
        case Overloaded():
            seconds = max(1, math.ceil(error.retry_after))
            return ApiError(429, str(error), code="rate_limit_exceeded", type="rate_limit_error", headers={"Retry-After": str(seconds)})
        case Unavailable():
            after = None if error.retry_after is None else {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            return ApiError(503, str(error), code="service_unavailable", type="server_error", headers=after)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
    logger.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error", type="server_error")


def from_validation(error: ValidationError, model: type[BaseModel], refusals: Sequence[RequestError] = ()) -> ApiError:
    """The answer to a body that doesn't fit `model`: its faults, each with its name, its value and what would be right.
    `refusals` are faults that were found before."""
    # A misspelt name explains a missing one, so it comes first.
    errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    shown = [from_exception(refusal) for refusal in refusals] + [_from_details(details, model) for details in errors[:MAX_FAULTS]]
    return joined(shown, len(refusals) + len(errors))


def joined(faults: Sequence[ApiError], num_faults: int | None = None) -> ApiError:
    """Several faults of one request as one error about the first; there may be more than are given, `num_faults` in
    all."""
    first, *others = faults[:MAX_FAULTS]
    num_left = (len(faults) if num_faults is None else num_faults) - 1 - len(others)
    messages = [first.message, *(_named(other) for other in others), *([f"and {num_left} more faults"] if num_left else [])]
    return ApiError(first.status, "; ".join(messages), param=first.param, code=first.code, type=first.type, headers=first.headers)


def _named(fault: ApiError) -> str:
    is_named = fault.param is None or fault.param in fault.message
    return fault.message if is_named else f"{fault.param}: {fault.message}"


def _from_details(details: ErrorDetails, model: type[BaseModel]) -> ApiError:
    *parents, last = details["loc"] or ("",)
    # <...> are the tags of protocol.py's unions
    path = tuple(part for part in parents if not str(part).startswith("<"))
    if details["type"] == "extra_forbidden":  # the last is then the client's own name, whatever it looks like
        return _unknown_field((*path, last), model)
    path += (last,) if last != "" and not str(last).startswith("<") else ()
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):  # from a validator of protocol.py, which names the field of its own model
        inner = RequestError(str(cause), path_text((*path, cause.param)) if cause.param else None, cause.code)
        return from_exception(inner)
    param = path_text(path) or None
    match details["type"]:
        case "missing":
            return ApiError(400, f"missing required parameter: {param!r}", param=param, code="missing_required_parameter")
        case "model_type" | "model_attributes_type" | "dict_type" if not path:
            return ApiError(400, f"the body is {quoted(details['input'])}: it must be a JSON object", code="invalid_type")
        case "too_short" | "string_too_short":
            return ApiError(400, f"{param} is {quoted(details['input'])}: it must not be empty", param=param, code="invalid_value")
        case "too_long":
            most = details["ctx"]["max_length"]
            return ApiError(400, f"{param} has over {most} entries: at most {most}", param=param, code="invalid_value")
        case kind:
            message = details["msg"].removeprefix("Value error, ").replace("Input should", "it must")
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
            return ApiError(400, f"{param or 'the body'} is {quoted(details['input'])}: {message}", param=param, code=code)


def _unknown_field(path: tuple[int | str, ...], model: type[BaseModel]) -> ApiError:
    name = str(path[-1])
    nearest = difflib.get_close_matches(name, _known_names(path, model), n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ApiError(400, f"unknown parameter: {quoted(path_text(path))}{hint}", param=path_text(path), code="unknown_parameter")


def _known_names(path: tuple[int | str, ...], model: type[BaseModel]) -> Collection[str]:
    """The known names where `path` ends, from the model's schema: paths lead through lists and unions."""
    schema = model.model_json_schema()
    nodes = [schema]
    for part in path[:-1]:
        nodes = [child for node in nodes for child in _children(_alternatives(node, schema), part)]
    return [name for node in nodes for alternative in _alternatives(node, schema) for name in alternative.get("properties", {})]


def _alternatives(node: dict[str, Any], root: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in node:
        node = root["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    unions = node.get("anyOf", []) + node.get("oneOf", [])
    return [leaf for child in unions for leaf in _alternatives(child, root)] if unions else [node]


def _children(nodes: list[dict[str, Any]], part: int | str) -> list[dict[str, Any]]:
    if isinstance(part, int):
        return [node["items"] for node in nodes if "items" in node]
    return [node["properties"][part] for node in nodes if part in node.get("properties", {})]


def path_text(path: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") -> 'messages[0].role', as OpenAI names a parameter."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def quoted(value: object) -> str:
    """A value as a message quotes it, cut to a readable length."""
    return _SHORT.repr(value)
