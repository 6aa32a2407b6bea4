"""The chat page and its files, which the server sends once it listens."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

_FOLDER = Path(__file__).parent / "static"
STATIC_FILES = StaticFiles(directory=_FOLDER)  # below /static
# It loads nothing from elsewhere and runs no inline script, so a model's text can't either.
_HEADERS = {"Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'", "Cache-Control": "no-cache"}


def chat_page() -> Response:
    """The answer to `/`."""
    return FileResponse(_FOLDER / "index.html", headers=_HEADERS)
