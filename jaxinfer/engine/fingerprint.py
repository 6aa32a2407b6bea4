"""What a page of an engine's KV cache means, besides tokens: the same for engines that can use each other's."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from checkpoints.digest import weights_digest
from checkpoints.hub import resolve
from jaxinfer.engine.engine import Engine


def fingerprint(engine: Engine) -> str:
    """Of the weights, how they are multiplied, the type and scales of keys and values, and a page's geometry but for
    its number of tokens, for pages of other sizes can be made of it. Reads the whole checkpoint: a second for each
    1.5 GB and core. Raises `OSError`."""
    model, stats = engine.config.model, engine.stats
    digest = b"random weights" if model.random_weights else weights_digest(resolve(model.model))
    return hashlib.sha256(
        digest + repr((replace(engine.page_spec, page_size=1), stats.weights, stats.compute_type, stats.kv_dtype)).encode()
    ).hexdigest()[:16]
