"""Reading server-sent events back."""

from __future__ import annotations

import json
from typing import Any


def events_of(response: Any) -> list[str]:
    """The data of each event of a finished response; every event is one line of data and a blank line."""
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def chunks_of(response: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    assert response.status_code == 200, response.text
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]
