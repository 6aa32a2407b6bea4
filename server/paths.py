"""Which paths there are groups of, below a root path or not."""

from __future__ import annotations

GUARDED = "/v1/"  # what lies below needs a key where keys are set, and is refused during start and shutdown; health and metrics aren't


def route_path(path: str, root_path: str) -> str:
    """The path that routes are matched with, as the framework has it: without the root path, where it begins with it."""
    return path[len(root_path) :] if root_path and f"{path}/".startswith(f"{root_path}/") else path
