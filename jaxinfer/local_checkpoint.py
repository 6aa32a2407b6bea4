"""Where a checkpoint is on this machine, fetched where it is not yet."""

from __future__ import annotations

from checkpoints.hub import resolve


def local_checkpoint(model: str) -> str:
    """The local path of what `update_weights` is given, fetched where necessary: call it in another thread than the
    engine's, which would stand still meanwhile. Raises `CheckpointError`."""
    return str(resolve(model))
