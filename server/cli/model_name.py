"""Checks the name of a command's model before the long imports."""

from __future__ import annotations

from checkpoints.model_path import check_model, is_remote


def check_name(model: str) -> None:
    """Raises the `CheckpointError` that opening the model would, as far as it shows in milliseconds, or in a second
    from Hugging Face."""
    if is_remote(model):
        from checkpoints.hugging_face import check_id  # its libraries take longer than all other checks

        check_id(model)
    else:
        check_model(model)
