"""Folders of the user for fetched, compiled or measured data, also for a user without a home."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/jaxinfer, by default ~/.cache/jaxinfer. Where there is no writable home, a private folder beside
    other temporary ones, which is logged. Raises `PermissionError` if that one is another user's."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "jaxinfer"
    home = home_folder()
    return _temporary_cache() if home is None else home / ".cache" / "jaxinfer"


def home_folder() -> Path | None:
    """The user's home; None for a user who has none: no HOME and no passwd entry, as in many containers, or a folder
    that can't be created or written to and holds no cache."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    kept = home / ".cache" / "jaxinfer"
    nearest = next(folder for folder in (kept, *kept.parents) if folder.exists())
    return home if home.is_absolute() and (nearest == kept or os.access(nearest, os.W_OK | os.X_OK)) else None


def expand(path: str) -> Path:
    """With `~` as the home; unchanged for a user without one."""
    return Path(os.path.expanduser(path))


@cache  # so that it is logged once
def _temporary_cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"jaxinfer-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user's, so nothing can be kept there: set XDG_CACHE_HOME to one that is")
    folder.chmod(0o700)  # it may have been created by hand
    logger.warning("this user has no home folder to write to: models and compiled programs are kept in %s; set XDG_CACHE_HOME", folder)
    return folder
