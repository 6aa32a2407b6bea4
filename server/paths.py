"""Groups of paths, with or without a root path."""

from __future__ import annotations

# paths below it need a key where keys are set, and are refused during start and shutdown; health and metrics aren't
GUARDED = "/v1/"


def route_path(path: str, root_path: str) -> str:
    """The path that routes are matched with, as in the framework: without the root path, where it begins with it."""
    return path[len(root_path) :] if root_path and f"{path}/".startswith(f"{root_path}/") else path
