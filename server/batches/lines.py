"""One line of a batch: a request read, asked through the same handlers as over HTTP, and its answer written."""

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
from server.openai.protocol import ChatRequest, CompletionRequest, EmbeddingRequest
from server.openai.reading import Reading
from server.openai.service import Service
from server.openai.strict import StrictModel

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
INVALID_UNICODE = "invalid_unicode"  # the code of a line that fails alone, whatever its batch
LONGEST_WAIT = 1.0  # seconds between two tries at a full queue


class BatchLine(StrictModel):
    """A line of the input file. The body is checked later, by its URL's handler."""

    place = "line"

    custom_id: str = Field(min_length=1)
    method: str = Field(pattern="^POST$")
    url: str
    body: dict[str, Any]

    @property
    def is_embedding(self) -> bool:
        """Whether it is the embedding model that answers."""
        return self.url == "/v1/embeddings"

    @property
    def num_prompts(self) -> int:
        """Prompts that the line asks for; 1 where the body is wrong, which asks for nothing."""
        prompt = self.body.get("prompt")
        return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1

    @property
    def num_sequences(self) -> int:
        """Sequences that it will decode."""
        n = self.body.get("n")
        return self.num_prompts * (n if isinstance(n, int) and n > 0 else 1)


def read_line(raw: bytes, *, is_strict: bool = False) -> tuple[str | None, BatchLine | ApiError]:
    """The line's custom_id, where it has one, and the line, or what is wrong with it. `is_strict`: unknown names are wrong."""
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
        return custom_id, check(data, BatchLine, Reading(is_strict))
    except ApiError as error:
        return custom_id, error


def _is_unicode(raw: bytes, data: object) -> bool:
    """Whether what was read from `raw` can be written again: JSON can spell half of a character, anywhere."""
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
    """A line's name in its own answer and in the usage log, by the id of the answer."""
    return id.replace("batch_req", "req")


def no_answer(id: str, custom_id: str | None, code: str | None, message: str) -> dict[str, Any]:
    """The output line of a request that was not asked."""
    return {"id": id, "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


def is_failure(answer: dict[str, Any]) -> bool:
    """Whether an output line belongs into the error file."""
    return answer["error"] is not None or answer["response"]["status_code"] != 200


def encoded(answer: dict[str, Any]) -> bytes:
    """An output line as the file holds it, its end included."""
    text = json.dumps(answer, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


async def encoded_beside(answer: dict[str, Any]) -> bytes:
    """`encoded`, beside the event loop for the many numbers of embeddings: one at a time, for others to run in between."""
    body = answer["response"]["body"] if answer["response"] else {}
    if len(data := body.get("data", ())) < 16:
        return encoded(answer)
    shell = encoded(answer | {"response": answer["response"] | {"body": body | {"data": []}}})
    before, after = shell.split(b'"data": []', 1)  # no text holds it: its quotes would be escaped
    rows = await asyncio.to_thread(lambda: ", ".join([json.dumps(row) for row in data]))
    return before + b'"data": [' + rows.encode() + b"]" + after


async def _respond(service: Service, line: BatchLine, caller: Caller) -> tuple[int, dict[str, Any]]:
    """The HTTP status and body that the same request over HTTP would get."""
    while True:
        try:
            return 200, (await _handle(service, line, caller)).model_dump()
        except Unavailable:
            raise
        except Overloaded as error:  # a batch has time
            await asyncio.sleep(min(error.retry_after, LONGEST_WAIT))
        except Exception as error:
            answer = from_exception(error)
            return answer.status, answer.body()


async def _handle(service: Service, line: BatchLine, caller: Caller) -> BaseModel:
    if line.body.get("stream"):
        raise ApiError(400, "stream is true: a batch's answers come whole, leave it out", param="stream", code="unsupported_parameter")
    reading = Reading(service.config.strict_parameters)
    match line.url:
        case "/v1/chat/completions":
            return await chat.respond(service, check(line.body, ChatRequest, reading), caller)
        case "/v1/completions":
            return await completions.respond(service, check(line.body, CompletionRequest, reading), caller)
        case "/v1/embeddings":
            return await embeddings.respond(service, check(line.body, EmbeddingRequest, reading), caller)
    raise ApiError(404, f"url is {line.url[:80]!r}: {', '.join(ENDPOINTS)} are served", param="url", code="unknown_url")
