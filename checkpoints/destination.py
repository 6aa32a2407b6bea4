"""The folder that a command writes a checkpoint to: checked before, put in place when it is finished."""

from __future__ import annotations

import shutil
from pathlib import Path

from checkpoints.errors import CheckpointError


def check_destination(destination: Path, is_forced: bool) -> None:
    """Raises `CheckpointError` for a folder that is not written to."""
    if destination.exists() and not destination.is_dir():
        raise CheckpointError(f"{destination}: is a file: give a folder to write to")
    if destination.exists() and any(destination.iterdir()) and not is_forced:
        raise CheckpointError(f"{destination}: exists and is not empty: give another folder, or --force to replace it")


def check_space(destination: Path, num_bytes: int) -> None:
    """Raises `CheckpointError` if its disk has less room."""
    if (free := shutil.disk_usage(destination.parent).free) < num_bytes:
        raise CheckpointError(
            f"{destination}: {num_bytes / 1e9:.1f} GB are to be written and its disk has {free / 1e9:.1f} GB left: free some"
        )


def put_in_place(part: Path, destination: Path) -> None:
    """A finished folder takes the place of what is there."""
    if not destination.exists():
        part.rename(destination)
        return
    old = part.with_name(part.name + "-old")
    destination.rename(old)
    part.rename(destination)
    shutil.rmtree(old)
