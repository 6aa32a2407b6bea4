"""What the OpenAPI page adds to what FastAPI finds out: bodies that handlers parse themselves, errors, the API key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.openai.caller import SESSION, SESSION_HEADER
from server.openai.errors import ErrorBody

_MEANINGS = {
    400: "The request can't be served as asked",
    401: "No API key, or a wrong one",
    403: "The API key may not do this",
    404: "No such model, file or batch",
    408: "The request's timeout passed",
    409: "The batch has ended, or the server's settings rule it out",
    413: "The body is too large",
    429: "The queue is full; see Retry-After",
    500: "Internal error",
    503: "The server is shutting down or has failed",
}


def documented_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: these statuses answer in OpenAI's error format."""
    return {status: {"description": _MEANINGS[status], "model": ErrorBody} for status in statuses}


def documented_body(model: type[BaseModel]) -> dict[str, Any]:
    """For a route's `openapi_extra`: its body is a JSON object that fits `model`, and a header may name a session."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    session = {
        "name": SESSION_HEADER,
        "in": "header",
        "description": "a conversation's name, whose cached prompt is kept ahead of others; sent back",
        "schema": {"type": "string", "pattern": f"^{SESSION.pattern}$"},
    }
    return {"requestBody": body, "parameters": [session]}


def documented_query(model: type[BaseModel]) -> dict[str, Any]:
    """For a route's `openapi_extra`: its query has the fields of `model`."""
    properties = model.model_json_schema()["properties"]
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]}


def openapi_page(app: FastAPI, bodies: Sequence[type[BaseModel]], *, has_keys: bool, is_strict: bool) -> Callable[[], dict[str, Any]]:
    """A replacement of `app.openapi` that adds the bodies' schemas and, where keys are set, the key. Unless
    `is_strict`, objects may have names that no schema has."""

    def page() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            components = made.setdefault("components", {})
            _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}")
            for schema in () if is_strict else definitions["$defs"].values():
                if schema.get("additionalProperties") is False:
                    del schema["additionalProperties"]
            components.setdefault("schemas", {}).update(definitions["$defs"])
            if has_keys:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                for path, operations in made["paths"].items():
                    for operation in operations.values() if path.startswith("/v1/") else ():
                        operation["security"] = [{"key": []}]
            app.openapi_schema = made
        return app.openapi_schema

    return page
