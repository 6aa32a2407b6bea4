"""CheckpointError, apart from the code that reads checkpoints: a command that reports one imports no NumPy."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that can't be loaded; the message names the file or tensor, what is wrong with it and what to do."""
