"""ApiError, apart from what converts other errors: a server that is starting answers with it before FastAPI is
imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from server.logs import current_request

MAX_PARAM = 80  # characters of a parameter's name, which may be the client's own


class ApiError(Exception):
    """An answer other than 200: the HTTP status and the contents of OpenAI's error format."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        # Both may quote the client, whose JSON can contain lone surrogates that UTF-8 can't encode.
        self.message, self.param = _encodable(message), None if param is None else _encodable(param[:MAX_PARAM])
        self.status, self.code, self.type, self.headers = status, code, type, dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        request = current_request.get()
        if request is not None:
            request.error = self.code
        return JSONResponse(self.body(), self.status, self.headers)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
