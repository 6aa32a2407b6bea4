"""/v1/files: uploads of batches' input, downloads of their output. A key sees its own files only."""

from __future__ import annotations

from typing import Any, Literal, Self

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import FormData, UploadFile

from server.batches.database import in_thread
from server.batches.file_store import FileStore, StoredFile
from server.openai.body import check, limited
from server.openai.errors import ApiError, quoted
from server.openai.responses import OrAbsent
from server.openai.schema import documented_errors, documented_query
from server.openai.strict import StrictModel

DAY = 24 * 3600
DEFAULT_SECONDS = 30 * DAY  # retention of an uploaded file, as in OpenAI's API
FORM_OVERHEAD = 64 * 1024  # bytes of an upload that are not the file
MAX_NAME = 255


class ExpiresAfter(StrictModel):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=30 * DAY)


class FileUpload(StrictModel):
    """The form's fields beside the file."""

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileQuery(StrictModel):
    model_config = ConfigDict(strict=False)  # a query is text

    after: str | None = Field(None, pattern="^file-", description="the last id of the page before")
    limit: int = Field(10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class FileObject(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: OrAbsent[int] = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: StoredFile) -> Self:
        return cls(
            id=file.id,
            bytes=file.num_bytes,
            created_at=file.created_at,
            expires_at=file.expires_at,
            filename=file.filename,
            purpose=file.purpose,
        )


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: OrAbsent[str] = None
    last_id: OrAbsent[str] = None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


_UPLOAD_BODY = {
    "type": "object",
    "additionalProperties": False,
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 30 * DAY},
    },
    "dependentRequired": {"expires_after[anchor]": ["expires_after[seconds]"], "expires_after[seconds]": ["expires_after[anchor]"]},
}
_DOCUMENTED_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD_BODY}}}}


def add_files(app: FastAPI, files: FileStore, max_file_bytes: int) -> None:
    """The paths of the Files API."""

    @app.post("/v1/files", responses=documented_errors(400, 401, 413, 500, 503), openapi_extra=_DOCUMENTED_UPLOAD)
    async def upload_file(request: Request) -> FileObject:
        async with limited(request, max_file_bytes + FORM_OVERHEAD).form(max_files=1, max_fields=8) as form:
            upload, fields = _read_form(form, max_file_bytes)
            seconds = DEFAULT_SECONDS if fields.expires_after is None else fields.expires_after.seconds
            name = (upload.filename or "file")[:MAX_NAME]
            return FileObject.of(await in_thread(files.add, request.state.caller.tenant, name, upload.file, seconds))

    @app.get("/v1/files", responses=documented_errors(400, 401, 500, 503), openapi_extra=documented_query(FileQuery))
    async def list_files(request: Request) -> FileList:
        query = check(dict(request.query_params), FileQuery)
        is_ascending = query.order == "asc"
        found, has_more = await in_thread(
            files.page, request.state.caller.tenant, after=query.after, limit=query.limit, ascending=is_ascending, purpose=query.purpose
        )
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return FileList(data=[FileObject.of(file) for file in found], first_id=first, last_id=last, has_more=has_more)

    async def find(request: Request, file_id: str) -> StoredFile:
        file = await in_thread(files.find, request.state.caller.tenant, file_id)
        if file is None:
            raise _unknown(file_id)
        return file

    @app.get("/v1/files/{file_id}", responses=documented_errors(401, 404, 500, 503))
    async def file_by_id(request: Request, file_id: str) -> FileObject:
        return FileObject.of(await find(request, file_id))

    @app.delete("/v1/files/{file_id}", responses=documented_errors(401, 404, 500, 503))
    async def delete_file(request: Request, file_id: str) -> FileDeleted:
        if not await in_thread(files.delete, request.state.caller.tenant, file_id):
            raise _unknown(file_id)
        return FileDeleted(id=file_id)

    content: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}

    @app.get("/v1/files/{file_id}/content", responses=content | documented_errors(401, 404, 500, 503), response_class=Response)
    async def file_content(request: Request, file_id: str) -> Response:
        file = await find(request, file_id)
        # a browser must not treat a client's upload as a page of this server
        headers = {"X-Content-Type-Options": "nosniff"}
        return FileResponse(files.path(file_id), headers=headers, media_type="application/octet-stream", filename=file.filename)


def _read_form(form: FormData, max_file_bytes: int) -> tuple[UploadFile, FileUpload]:
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        message = "no file was sent: send multipart/form-data with the fields file and purpose"
        raise ApiError(400, message, param="file", code="missing_required_parameter")
    data: dict[str, Any] = {name: value for name, value in form.items() if name != "file"}
    parts: dict[str, Any] = {part: data.pop(f"expires_after[{part}]") for part in ("anchor", "seconds") if f"expires_after[{part}]" in data}
    if parts:
        seconds = parts.get("seconds")
        if isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() and len(seconds) < 20:
            parts["seconds"] = int(seconds)  # a form has no numbers
        data["expires_after"] = parts
    fields = check(data, FileUpload)
    if (upload.size or 0) > max_file_bytes:
        raise ApiError(413, f"the file has {upload.size} bytes: at most {max_file_bytes}", param="file", code="file_too_large")
    return upload, fields


def _unknown(file_id: str) -> ApiError:
    return ApiError(404, f"the file {quoted(file_id)} does not exist", param="file_id", code="file_not_found")
