"""One line of a batch: parses a request, runs it through the same handlers as over HTTP, and writes its answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pydantic import BaseModel, Field

from server.backend import Overloaded, Unavailable
from server.openai import chat, completions, embeddings
from server.openai.body import check
from server.openai.caller import UNKNOWN, Caller
from server.openai.errors import ApiError, from_exception
from server.openai.json_text import read_json
from server.openai.parameter_policy import ParameterPolicy
from server.openai.protocol import ChatRequest, CompletionRequest, EmbeddingRequest
from server.openai.service import Service
from server.openai.strict import StrictModel

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
INVALID_UNICODE = "invalid_unicode"  # the code of a line that fails alone, whatever its batch
MAX_WAIT_SECONDS = 1.0  # seconds between two tries at a full queue


class BatchLine(StrictModel):
    """A line of the input file. The body is checked later, by its URL's handler."""

    place = "line"

    custom_id: str = Field(min_length=1)
    method: str = Field(pattern="^POST$")
    url: str
    body: dict[str, Any]

    @property
    def is_embedding(self) -> bool:
        """Whether it is for the embedding model."""
        return self.url == "/v1/embeddings"

    @property
    def num_prompts(self) -> int:
        """Prompts of the line; 1 where the body is invalid."""
        prompt = self.body.get("prompt")
        return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1

    @property
    def num_sequences(self) -> int:
        """Sequences that it will decode."""
        n = self.body.get("n")
        return self.num_prompts * (n if isinstance(n, int) and n > 0 else 1)


def read_line(raw: bytes, *, is_strict: bool = False) -> tuple[str | None, BatchLine | ApiError]:
    """The line's custom_id, where it has one, and the line, or its error. `is_strict`: unknown names are errors."""
    try:
        data = read_json(raw, "the line")
    except ApiError as error:
        return None, error
    named = data.get("custom_id") if isinstance(data, dict) else None
    custom_id = named if isinstance(named, str) else None
    if not _is_unicode(raw, data):
        message = "the line holds half a surrogate pair (such as \\ud83d alone), which is no character: send the whole pair"
        return custom_id, ApiError(400, message, code=INVALID_UNICODE)
    try:
        return custom_id, check(data, BatchLine, ParameterPolicy(is_strict))
    except ApiError as error:
        return custom_id, error


def _is_unicode(raw: bytes, data: object) -> bool:
    """Whether what was read from `raw` can be written again: JSON can spell half of a surrogate pair, anywhere."""
    if b"\\u" not in raw:
        return True
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


async def answer_line(
    service: Service, id: str, custom_id: str | None, line: BatchLine | ApiError, caller: Caller = UNKNOWN
) -> dict[str, Any]:
    """The output line. Raises `Unavailable` when the backend has failed: then there is no answer."""
    if isinstance(line, ApiError):
        return no_answer(id, custom_id, line.code, line.message)
    status, body = await _respond(service, line, caller)
    response = {"status_code": status, "request_id": request_id(id), "body": body}
    return {"id": id, "custom_id": custom_id, "response": response, "error": None}


def request_id(id: str) -> str:
    """A line's name in its own answer and in the usage log, from the id of the answer."""
    return id.replace("batch_req", "req")


def no_answer(id: str, custom_id: str | None, code: str | None, message: str) -> dict[str, Any]:
    """The output line of a request that was not run."""
    return {"id": id, "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


def is_failure(answer: dict[str, Any]) -> bool:
    """Whether an output line belongs in the error file."""
    return answer["error"] is not None or answer["response"]["status_code"] != 200


def encoded(answer: dict[str, Any]) -> bytes:
    """An output line as it stands in the file, with its newline."""
    text = json.dumps(answer, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


async def encoded_beside(answer: dict[str, Any]) -> bytes:
    """`encoded`, outside of the event loop because embeddings have many numbers: one at a time, so that others can run
    in between."""
    body = answer["response"]["body"] if answer["response"] else {}
    if len(data := body.get("data", ())) < 16:
        return encoded(answer)
    shell = encoded(answer | {"response": answer["response"] | {"body": body | {"data": []}}})
    before, after = shell.split(b'"data": []', 1)  # no text contains it: its quotes would be escaped
    rows = await asyncio.to_thread(lambda: ", ".join([json.dumps(row) for row in data]))
    return before + b'"data": [' + rows.encode() + b"]" + after


async def _respond(service: Service, line: BatchLine, caller: Caller) -> tuple[int, dict[str, Any]]:
    """The HTTP status and body that the same request over HTTP would get."""
    while True:
        try:
            return 200, (await _handle(service, line, caller)).model_dump()
        except Unavailable:
            raise
        except Overloaded as error:  # a batch can wait
            await asyncio.sleep(min(error.retry_after, MAX_WAIT_SECONDS))
        except Exception as error:
            answer = from_exception(error)
            return answer.status, answer.body()


async def _handle(service: Service, line: BatchLine, caller: Caller) -> BaseModel:
    if line.body.get("stream"):
        raise ApiError(400, "stream is true: a batch's answers come whole, leave it out", param="stream", code="unsupported_parameter")
    policy = ParameterPolicy(service.config.strict_parameters)
    match line.url:
        case "/v1/chat/completions":
            return await chat.respond(service, check(line.body, ChatRequest, policy), caller)
        case "/v1/completions":
            return await completions.respond(service, check(line.body, CompletionRequest, policy), caller)
        case "/v1/embeddings":
            return await embeddings.respond(service, check(line.body, EmbeddingRequest, policy), caller)
    raise ApiError(404, f"url is {line.url[:80]!r}: {', '.join(ENDPOINTS)} are served", param="url", code="unknown_url")
