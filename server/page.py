"""The chat page and what it loads, as the server sends them once it listens."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

_FOLDER = Path(__file__).parent / "static"
STATIC_FILES = StaticFiles(directory=_FOLDER)  # below /static
# It loads nothing from elsewhere and runs no inline script, so that no model's text can.
_HEADERS = {"Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'", "Cache-Control": "no-cache"}


def chat_page() -> Response:
    """The answer to `/`."""
    return FileResponse(_FOLDER / "index.html", headers=_HEADERS)
